"""A plain query over Kafka becomes a job: it reads on behind the plain query's offsets, with its state."""

from __future__ import annotations

from collections import Counter

import pytest

from flinkish_spark import FileFormat, FileSink
from tests.support.cli_rig import flinkish
from tests.support.jobs import environment, produce, rows, run_until

pytestmark = pytest.mark.timeout(600)


def test_no_word_comes_twice(spark, broker, topic, job_dir, tmp_path) -> None:
    servers, name = broker.bootstrap_servers, topic(2)

    def words():
        reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
        stream = reader.option("subscribe", name).option("startingOffsets", "earliest").load()
        return stream.selectExpr("CAST(value AS STRING) AS word").dropDuplicates()

    produce(servers, name, [b"%d" % number for number in (*range(8), *range(3))])
    plain = words().writeStream.format("json").option("path", str(tmp_path / "plain"))
    plain = plain.option("checkpointLocation", str(tmp_path / "checkpoint"))
    plain.trigger(availableNow=True).start().awaitTermination()
    assert flinkish("adopt", tmp_path / "checkpoint", job_dir).exit_code == 0
    produce(servers, name, [b"%d" % number for number in (*range(4, 12), 9)])
    env = environment(spark, job_dir)
    sink = FileSink(str(tmp_path / "out"), FileFormat.JSON)
    env.from_dataframe(words(), uid="words").sink_to(sink, uid="files")
    run_until(env, lambda client: rows(client, "files") >= 4)
    plain = spark.read.schema("word STRING").json(str(tmp_path / "plain")).collect()
    ours = spark.read.schema("word STRING").json(str(tmp_path / "out")).collect()
    assert Counter(row.word for row in plain) == Counter(str(number) for number in range(8))
    assert Counter(row.word for row in ours) == Counter(str(number) for number in range(8, 12))
