"""A streaming DataFrame as a source: what replays is taken, what does not is refused at once."""

from __future__ import annotations

from collections import Counter

import pytest
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamReader

from flinkish_spark import DeltaSink
from flinkish_spark.connectors.dataframe import DataFrameSource
from flinkish_spark.core.errors import GraphError
from tests.support.jobs import TOTAL, RunningTotal, environment, expected_totals, read_delta, rows, run_until


class OwnReader(DataSourceStreamReader):
    def initialOffset(self):
        return {"at": 0}

    def latestOffset(self):
        return {"at": 1}

    def partitions(self, start, end):
        return []

    def read(self, partition):
        return iter(())


class OwnSource(DataSource):
    @classmethod
    def name(cls):
        return "own"

    def schema(self):
        return "user STRING"

    def streamReader(self, schema):
        return OwnReader()


def rate(spark):
    return spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()


def watermarked(spark):
    return rate(spark).withWatermark("timestamp", "1 second")


def memory(spark):
    """Spark's own test source; it has no Python name, so it is made in the JVM."""
    jvm = spark._jvm
    package = jvm.org.apache.spark.sql.execution.streaming.runtime
    stream = package.MemoryStream.apply(jvm.org.apache.spark.sql.Encoders.INT(), spark._jsparkSession)
    from pyspark.sql import DataFrame

    return DataFrame(stream.toDF(), spark)


def refuse(spark, job_dir, frame, *parts: str) -> None:
    env = environment(spark, job_dir)
    with pytest.raises(GraphError) as caught:
        env.from_dataframe(frame, uid="frame")
    error = caught.value
    assert error.what and error.what_to_do
    assert all(part in str(error) for part in parts), str(error)
    assert not env.graph.sources and not job_dir.exists()


# -- cannot be replayed -----------------------------------------------------------------------------


def test_a_socket(spark, job_dir) -> None:
    frame = spark.readStream.format("socket").option("host", "127.0.0.1").option("port", "9").load()
    refuse(spark, job_dir, frame, "'socket'", "cannot be replayed")


def test_a_memory_stream(spark, job_dir) -> None:
    refuse(spark, job_dir, memory(spark), "cannot be replayed", "same offsets")


def test_an_own_python_source(spark, job_dir) -> None:
    spark.dataSource.register(OwnSource)
    refuse(spark, job_dir, spark.readStream.format("own").load(), "'own'", "cannot be replayed")


def test_one_bad_source_beside_a_good_one(spark, job_dir) -> None:
    spark.dataSource.register(OwnSource)
    own = spark.readStream.format("own").load()
    refuse(spark, job_dir, rate(spark).selectExpr("string(value) AS user").union(own), "'own'")


def test_a_batch_frame(spark, job_dir) -> None:
    refuse(spark, job_dir, spark.range(5), "batch DataFrame", "readStream")


# -- taken ------------------------------------------------------------------------------------------


def test_what_replays_is_taken(spark, job_dir, tmp_path) -> None:
    (tmp_path / "in").mkdir()
    spark.range(1).write.format("delta").save(str(tmp_path / "delta"))
    kafka = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", "127.0.0.1:9")
        .option("subscribe", "t")
    )
    frames = {
        "rate": rate(spark),
        "json": spark.readStream.schema("user STRING").json(str(tmp_path / "in")),
        "parquet": spark.readStream.schema("user STRING").parquet(str(tmp_path / "in")),
        "delta": spark.readStream.format("delta").load(str(tmp_path / "delta")),
        "kafka": kafka.load(),
        "table join": rate(spark).join(spark.range(3).withColumnRenamed("id", "value"), "value"),
        "grouped table": rate(spark).join(spark.range(3).selectExpr("id AS value").distinct(), "value"),
        "union": rate(spark).union(rate(spark)),
        "windowed aggregate": watermarked(spark).groupBy(F.window("timestamp", "1 second")).count(),
        "distinct": rate(spark).distinct(),
        "dropDuplicates": rate(spark).dropDuplicates(["value"]),
        "dropDuplicatesWithinWatermark": watermarked(spark).dropDuplicatesWithinWatermark(["value"]),
        "join of two streams": rate(spark).join(
            rate(spark).selectExpr("value AS other"), F.col("value") == F.col("other")
        ),
        "limit": rate(spark).limit(3),
    }
    env = environment(spark, job_dir)
    for number, frame in enumerate(frames.values()):
        env.from_dataframe(frame, uid=f"frame-{number}")
    assert len(env.graph.sources) == len(frames)


@pytest.mark.nightly
def test_files_in_totals_out_over_two_starts(spark, job_dir, tmp_path) -> None:
    """The source is a folder of JSON; a second start goes on where the first ended."""
    folder, table = tmp_path / "in", tmp_path / "table"
    folder.mkdir()

    def job():
        env = environment(spark, job_dir)
        frame = spark.readStream.schema("user STRING, amount LONG").json(str(folder))
        stream = env.from_dataframe(frame, uid="files").transform(lambda df: df.where("amount > 0"))
        totals = stream.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
        return totals.sink_to(DeltaSink(str(table)), uid="table")._environment

    for part, user in enumerate(("ann", None)):
        lines = [
            f'{{"user": {"null" if user is None else chr(34) + user + chr(34)}, "amount": {n}}}'
            for n in (0, 1, 2)
        ]
        (folder / f"{part}.json").write_text("\n".join(lines))
        run_until(job(), lambda client: rows(client, "table") == 2)
    found = Counter((r["user"], r["total"]) for r in read_delta(table))
    assert found == expected_totals({"ann": [1, 2], None: [1, 2]})


def test_what_a_frame_reads_is_named(spark, tmp_path):
    (tmp_path / "in").mkdir()
    files = spark.readStream.schema("user STRING").json(str(tmp_path / "in"))
    kafka = spark.readStream.format("kafka").options(
        **{"kafka.bootstrap.servers": "one:9092", "subscribe": "a, b", "kafka.sasl.jaas.config": "secret"}
    )
    both = files.union(kafka.load().selectExpr("CAST(value AS STRING) AS user"))
    assert [(one.namespace, one.name) for one in DataFrameSource(both).datasets()] == [
        ("file", str(tmp_path / "in")),
        ("kafka://one:9092", "a"),
        ("kafka://one:9092", "b"),
    ]
    assert DataFrameSource(rate(spark)).datasets() == ()
