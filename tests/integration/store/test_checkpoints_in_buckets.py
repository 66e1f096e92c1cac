"""Plain queries whose checkpoint lies in a bucket: the drop-in sink, and a group of sinks."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

import flinkish_spark
from flinkish_spark import FileFormat, FileSink, KafkaSink, SinkGroup
from flinkish_spark.bridge.buckets import pass_on
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.core.store_spec import StoreSpec
from tests.support.buckets import LocalS3
from tests.support.jobs import read_committed
from tests.support.services import BUILD

pytestmark = pytest.mark.skipif(
    not any((BUILD / "s3a-jars").glob("hadoop-aws-*.jar")), reason="Hadoop's S3A is not there: `make s3a`"
)


@pytest.fixture(scope="module")
def server() -> Iterator[LocalS3]:
    with LocalS3() as found:
        yield found


@pytest.fixture
def place(spark: Any, server: LocalS3) -> StoreSpec:
    found = server.new_store()
    pass_on(spark, found)
    return found


def write(folder: Path, *amounts: int) -> None:
    folder.mkdir(exist_ok=True)
    lines = "\n".join(json.dumps({"amount": amount}) for amount in amounts)
    (folder / f"{uuid.uuid4().hex}.json").write_text(lines)


def amounts_in(servers: str, topic: str) -> Counter[int]:
    return Counter(json.loads(record.value)["amount"] for record in read_committed(servers, topic))


def run(writer: Any, location: str) -> None:
    query = writer.option("checkpointLocation", location).trigger(availableNow=True).start()
    try:
        query.awaitTermination(120)
    finally:
        query.stop()


class Dies(SilentObserver):
    def on_step_end(self, step: Any, subject: str) -> None:
        if step is Step.DECISION:
            raise RuntimeError("died behind the decision")


def test_a_group_of_sinks_goes_on_from_its_bucket(
    spark: Any, broker: Any, topic: Any, place: StoreSpec, tmp_path: Path
) -> None:
    servers, name = broker.bootstrap_servers, topic()
    location = place.hadoop_url

    def step(observer: Any = SilentObserver) -> None:
        sinks = {
            "topic": KafkaSink(servers, name),
            "files": FileSink(f"{tmp_path}/out", FileFormat.JSON),
        }
        group = SinkGroup(sinks, checkpoint_location=location, options=dict(place.options))
        group.observer = observer
        stream = spark.readStream.schema("amount LONG").json(f"{tmp_path}/in")
        run(stream.writeStream.foreachBatch(group), location)

    write(tmp_path / "in", 1, 2)
    step()
    write(tmp_path / "in", 3)
    with pytest.raises(StreamingQueryException, match="died behind the decision"):
        step(Dies)
    assert amounts_in(servers, name) == Counter([1, 2])
    write(tmp_path / "in", 4)
    step()
    assert amounts_in(servers, name) == Counter([1, 2, 3, 4])
    rows = spark.read.schema("amount LONG").json(f"{tmp_path}/out").collect()
    assert Counter(row.amount for row in rows) == Counter([1, 2, 3, 4])
    assert place.open().list("flinkish/checkpoints/1") == tuple(
        f"flinkish/checkpoints/1/{one}.json" for one in ("decision", "receipt", "trigger")
    )


def test_the_drop_in_sink_goes_on_from_its_bucket(
    spark: Any, broker: Any, topic: Any, place: StoreSpec, tmp_path: Path
) -> None:
    flinkish_spark.register(spark)
    servers, name, location = broker.bootstrap_servers, topic(), place.hadoop_url
    options = {f"flinkish.store.{option}": value for option, value in place.options}

    def step() -> None:
        stream = spark.readStream.schema("amount LONG").json(f"{tmp_path}/in")
        writer = stream.selectExpr("to_json(struct(*)) AS value").writeStream.format("flinkish-kafka")
        writer = writer.options(**options).option("kafka.bootstrap.servers", servers).option("topic", name)
        run(writer, location)

    for amounts in (1, 2), (3,):
        write(tmp_path / "in", *amounts)
        step()
    assert amounts_in(servers, name) == Counter([1, 2, 3])
    assert len([one for one in place.open().list("flinkish/checkpoints/2") if "receipt" in one]) == 1
