"""`format("flinkish")`: several sinks of a plain query commit together, without foreachBatch."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSourceStreamArrowWriter

from flinkish_spark import (
    DeltaSink,
    IcebergSink,
    KafkaSink,
    Upsert,
    commit_together,
    register,
)
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable, TransactionClient
from flinkish_spark.core.steps import Step
from flinkish_spark.foreach_batch.sinks_format import Flinkish
from flinkish_spark.protocol.ids import BatchId
from tests.support.cli_rig import flinkish
from tests.support.door_files import confirmed, decided
from tests.support.jobs import produce, read_committed
from tests.support.query_rig import DieAt, QueryRig


class DyingSinks(Flinkish):
    """Dies at the step that a file beside the checkpoint names."""

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:
        writer = super().streamWriter(schema, overwrite)
        order = Path(self.options["checkpointLocation"]).parent / "dies-at"
        if order.exists():
            step, moment = order.read_text().split(":")
            writer._make_observer = partial(DieAt, Step(step), moment)
        return writer


@pytest.fixture
def rig(spark: Any, broker: Any, topic: Any, tmp_path: Path) -> Iterator[QueryRig]:
    register(spark)
    yield QueryRig(spark, broker.bootstrap_servers, topic(partitions=2), tmp_path)


def run_until_it_dies(rig: QueryRig, step: Step, moment: str) -> None:
    order = rig.folder / "dies-at"
    order.write_text(f"{step.value}:{moment}")
    rig.spark.dataSource.register(DyingSinks)
    with pytest.raises(StreamingQueryException, match="Dies"):
        rig.run_format()
    order.unlink()
    register(rig.spark)


def test_four_systems_have_each_row_once_over_restarts_and_over_to_a_group_and_back(rig: QueryRig) -> None:
    rig.write(1, 2, 3)
    rig.write(4, 5)
    rig.run_format()
    rig.expect(1, 2, 3, 4, 5)
    rig.write(6)
    rig.run(rig.group())
    rig.write(7, 8)
    rig.run_format()
    rig.expect(*range(1, 9))
    assert confirmed(rig.checkpoint) == {BatchId(n) for n in range(4)}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", [Step.TRIGGER, Step.DECISION, Step.RECEIPT])
def test_a_process_that_dies_at_a_step_leaves_each_row_once(rig: QueryRig, step: Step, moment: str) -> None:
    rig.write(1, 2, 3)
    rig.run_format()
    rig.write(4, 5)
    run_until_it_dies(rig, step, moment)
    was_committed = step is Step.RECEIPT
    rig.expect(*range(1, 6 if was_committed else 4))
    rig.write(6)
    rig.run_format()
    rig.expect(*range(1, 7))


def test_sinks_have_columns_and_rows_of_their_own(rig: QueryRig) -> None:
    rig.write(1, 2, 3, 4)
    frame = rig.orders().selectExpr(
        "*", "map(user, amount) AS more", "amount > 2 OR amount IS NULL AS is_big"
    )
    narrow = ["user", "amount"]
    rig.run_format(frame, columns={"rows": narrow, "topic": ["amount"]}, where={"topic": "is_big"})
    found = rig.seen()
    assert found["topic"] == Counter([3, 4])
    assert found["rows"] == found["table"] == found["files"] == Counter([1, 2, 3, 4])
    assert {record.value for record in read_committed(rig.servers, rig.topic)} == {
        b'{"amount":3}',
        b'{"amount":4}',
    }
    with sqlite3.connect(rig.folder / "rows.db") as db:
        assert [row[1] for row in db.execute("PRAGMA table_info(copies)")] == narrow
    (line, *_) = next((rig.folder / "files").glob("part-*")).read_text().split()
    assert json.loads(line).keys() == {"user", "amount", "more"}


def test_lost_data_of_one_sink_is_staged_again_and_no_other_sink_writes_twice(rig: QueryRig) -> None:
    rig.write(1, 2, 3)
    run_until_it_dies(rig, Step.DECISION, "after")
    (staged,) = decided(rig.checkpoint)[BatchId(0)].batches
    lost = next(one for one in staged.committables if one.sink == "topic")
    with TransactionClient(KafkaConnection(rig.servers)) as client:
        client.abort(KafkaCommittable.from_json(lost.payload))
    rig.write(4)
    rig.run_format()
    rig.expect(1, 2, 3, 4)


def test_an_iceberg_table_and_an_upsert_of_delta_commit_with_a_topic(rig: QueryRig) -> None:
    from pyiceberg.catalog import load_catalog

    properties = {
        "type": "sql",
        "uri": f"sqlite:///{rig.folder}/catalog.db",
        "warehouse": f"{rig.folder}/lake",
    }
    load_catalog("lake", **properties).create_namespace("shop")
    sinks = {
        "topic": KafkaSink(rig.servers, rig.topic),
        "ice": IcebergSink("lake.shop.orders", properties=properties, create_table=True),
        "newest": DeltaSink(str(rig.folder / "table"), mode=Upsert(("user",), sequence_by="amount")),
    }
    for amounts in ((1, 2, 3), (4, 5)):
        rig.write(*amounts)
        rig.run_format(sinks=sinks)
    ice = load_catalog("lake", **properties).load_table("shop.orders").scan().to_arrow()
    assert Counter(ice["amount"].to_pylist()) == Counter(range(1, 6))
    found = rig.seen()
    assert found["topic"] == Counter(range(1, 6)) and found["table"] == Counter([3, 4, 5])


def test_no_secret_of_a_sink_is_in_a_plan_and_none_in_the_checkpoint(rig: QueryRig, capfd: Any) -> None:
    rig.write(1)
    sinks = {
        **rig.sinks(),
        "topic": KafkaSink(rig.servers, rig.topic, options={"ssl.key.password": "hunter2"}),
    }
    options = commit_together(sinks)
    (text,) = options.values()
    writer = rig.orders().writeStream.format("flinkish").options(**options)
    query = writer.option("checkpointLocation", str(rig.checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination(120)
    plan = query._jsq.explainInternal(True)
    query.explain(True)
    shown = "".join(capfd.readouterr()) + plan + json.dumps(query.lastProgress, default=str)
    assert "flinkish" in plan
    kept = b"".join(one.read_bytes() for one in rig.checkpoint.rglob("*") if one.is_file())
    for secret in ("hunter2", text[-80:], text[60:140]):
        assert secret not in shown and secret.encode() not in kept


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"columns": {"table": ["nothing"]}}, "no column 'nothing' for the sink 'table'"),
        ({"where": {"table": "amount"}}, "is bigint"),
        ({"mode": "complete"}, "has no outputMode"),
    ],
)
def test_what_the_query_does_not_have_is_refused_before_a_row_is_staged(
    rig: QueryRig, settings: Any, why: str
) -> None:
    rig.write(1)
    frame = rig.orders()
    if "mode" in settings:
        frame = frame.groupBy("user").agg(F.sum("amount").alias("amount"))
    with pytest.raises(StreamingQueryException, match=why):
        rig.run_format(frame, **settings)
    rig.expect()


def test_a_table_that_needs_spark_is_refused_and_nothing_is_staged(rig: QueryRig) -> None:
    from deltalake import DeltaTable, Field, Schema
    from deltalake.schema import PrimitiveType

    fields = Schema([Field(n, PrimitiveType(t)) for n, t in (("user", "string"), ("amount", "long"))])
    DeltaTable.create(str(rig.folder / "table"), fields, partition_by=["user"])
    rig.write(1)
    with pytest.raises(StreamingQueryException, match="cannot stage in the tasks of this format"):
        rig.run_format()
    rig.expect()
    rig.run(rig.group())
    rig.expect(1)


def test_commands_take_the_checkpoint_of_the_query(rig: QueryRig, topic: Any) -> None:
    source = topic(partitions=2)
    produce(rig.servers, source, [b'{"amount": %d}' % n for n in range(20)])
    records = rig.spark.readStream.format("flinkish-kafka").option("subscribe", source)
    records = (
        records.option("kafka.bootstrap.servers", rig.servers).option("startingOffsets", "earliest").load()
    )
    named = records.selectExpr("topic AS _topic", "partition AS _partition", "offset AS _offset")
    sinks = {"topic": KafkaSink(rig.servers, rig.topic), "table": DeltaSink(str(rig.folder / "table"))}
    rig.run_format(named, sinks)

    listed = flinkish("checkpoints", "list", rig.checkpoint)
    assert listed.exit_code == 0 and "COMPLETED" in listed.stdout
    where = ("--bootstrap-servers", rig.servers)
    assert flinkish("transactions", "list", rig.checkpoint, *where).exit_code == 0
    outputs = ("--output", f"topic=kafka:{rig.topic}", "--output", f"table=delta:{rig.folder}/table")
    audit = flinkish("audit", rig.checkpoint, *where, "--input", source, *outputs)
    assert audit.exit_code == 0 and "0 lost, 0 duplicated" in audit.stdout
