"""Sinks that commit together in a plain Spark query: restarts, every crash point, lost data, refusals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from flinkish_spark import (
    DeltaSink,
    JdbcSink,
    KafkaSink,
    SinkGroup,
    Upsert,
    register,
)
from flinkish_spark.checkpoint.ownership import take_over
from flinkish_spark.connectors.buffer import BufferWriter
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable, TransactionClient
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.protocol.ids import BatchId
from tests.support.cli_rig import flinkish
from tests.support.door_files import confirmed, decided, open_sink_dir
from tests.support.jobs import produce, read_committed
from tests.support.query_rig import DieAt
from tests.support.query_rig import QueryRig as Rig


@pytest.fixture
def rig(spark: Any, broker: Any, topic: Any, tmp_path: Path) -> Iterator[Rig]:
    yield Rig(spark, broker.bootstrap_servers, topic(partitions=2), tmp_path)


def test_four_systems_have_each_row_once_over_restarts(rig: Rig) -> None:
    rig.write(1, 2, 3)
    rig.write(4, 5)
    group = rig.group()
    rig.run(group)
    rig.expect(1, 2, 3, 4, 5)
    # The same group goes on in this process, and another one as in the next.
    rig.write(6)
    rig.run(group)
    rig.write(7, 8)
    rig.run(rig.group())
    rig.expect(*range(1, 9))
    assert confirmed(rig.checkpoint) == {BatchId(n) for n in range(4)}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", [Step.TRIGGER, Step.DECISION, Step.RECEIPT])
def test_a_driver_that_dies_at_a_step_leaves_each_row_once(rig: Rig, step: Step, moment: str) -> None:
    rig.write(1, 2, 3)
    rig.run(rig.group())
    rig.write(4, 5)
    rig.run_until_it_dies(DieAt(step, moment))
    was_committed = step is Step.RECEIPT
    rig.expect(*range(1, 6 if was_committed else 4))
    rig.write(6)
    rig.run(rig.group())
    rig.expect(*range(1, 7))


def test_sinks_have_rows_of_their_own(rig: Rig) -> None:
    rig.write(1, 2, 3, 4)
    rows = {
        "topic": lambda df: df.where("amount > 2"),
        "table": lambda df: df.groupBy("user").agg(F.sum("amount").alias("amount")),
    }
    rig.run(rig.group(rows=rows))
    found = rig.seen()
    assert found["topic"] == Counter([3, 4]) and found["rows"] == Counter([1, 2, 3, 4])
    assert found["table"] == Counter([5, 2, 3])


@pytest.mark.parametrize("moment", ["before", "after"])
def test_state_of_spark_goes_on_after_a_commit_that_spark_did_not_note(rig: Rig, moment: str) -> None:
    """The totals are of Spark's aggregate; its upserts into a table commit with a copy into a topic."""

    def run(at: DieAt | None = None) -> None:
        sinks = {
            "topic": KafkaSink(rig.servers, rig.topic),
            "table": DeltaSink(str(rig.folder / "totals"), mode=Upsert(("user",))),
        }
        group = SinkGroup(sinks, checkpoint_location=str(rig.checkpoint))
        if at is not None:
            group.observer = lambda: at
        totals = rig.orders().groupBy("user").agg(F.sum("amount").alias("total"))
        rig.run(group, totals, "update")

    rig.write(1, 2, 3)
    run()
    rig.write(4, 5)
    with pytest.raises(StreamingQueryException, match="Dies"):
        run(DieAt(Step.RECEIPT, moment))
    rig.write(6, 7)
    run()
    shown = DeltaTable(rig.folder / "totals").to_pyarrow_table().to_pylist()
    assert {row["user"]: row["total"] for row in shown} == {"u0": 9, "u1": 12, "u2": 7}
    sent = Counter(
        (v["user"], v["total"]) for v in (json.loads(r.value) for r in read_committed(rig.servers, rig.topic))
    )
    wanted = [("u1", 1), ("u2", 2), ("u0", 3), ("u1", 5), ("u2", 7), ("u0", 9), ("u1", 12)]
    assert sent == Counter(wanted)


def test_lost_data_of_one_sink_is_staged_again_and_no_other_sink_writes_twice(rig: Rig) -> None:
    rig.write(1, 2, 3)
    rig.run_until_it_dies(DieAt(Step.DECISION, "after"))
    (staged,) = decided(rig.checkpoint)[BatchId(0)].batches
    lost = next(one for one in staged.committables if one.sink == "topic")
    with TransactionClient(KafkaConnection(rig.servers)) as client:
        client.abort(KafkaCommittable.from_json(lost.payload))
    # One start finds the loss, and the rows replace it as Spark runs the micro-batch again.
    rig.write(4)
    rig.run(rig.group())
    rig.expect(1, 2, 3, 4)


def test_an_atomic_topic_shows_each_micro_batch_at_once(rig: Rig) -> None:
    sinks = {
        "topic": KafkaSink(rig.servers, rig.topic, atomic=True),
        "rows": JdbcSink(f"jdbc:sqlite:{rig.folder}/rows.db", "copies", create_table=True),
    }
    for amounts in (1, 2, 3), (4, 5), (6,):
        rig.write(*amounts)
    rig.run(SinkGroup(sinks, checkpoint_location=str(rig.checkpoint)))
    for batch in range(3):
        (staged,) = decided(rig.checkpoint)[BatchId(batch)].batches
        assert len([one for one in staged.committables if one.sink == "topic"]) == 1
    found = rig.seen()
    assert found["topic"] == found["rows"] == Counter(range(1, 7))


def test_the_sweep_of_one_topic_leaves_the_decided_records_of_another(rig: Rig, topic: Any) -> None:
    """The names of transactions do not say of which sink they are."""
    names = [topic(), topic()]

    def group() -> SinkGroup:
        sinks = {name: KafkaSink(rig.servers, name) for name in names}
        return SinkGroup(sinks, checkpoint_location=str(rig.checkpoint))

    rig.write(1, 2, 3)
    dying = group()
    dying.observer = lambda: DieAt(Step.DECISION, "after")
    with pytest.raises(StreamingQueryException, match="Dies"):
        rig.run(dying)
    (staged,) = decided(rig.checkpoint)[BatchId(0)].batches
    lost = next(one for one in staged.committables if one.sink == names[0])
    with TransactionClient(KafkaConnection(rig.servers)) as client:
        client.abort(KafkaCommittable.from_json(lost.payload))
    rig.run(group())
    for name in names:
        seen = Counter(json.loads(record.value)["amount"] for record in read_committed(rig.servers, name))
        assert seen == Counter([1, 2, 3])


def test_a_group_that_meets_another_query_is_refused_and_no_row_is_lost(rig: Rig) -> None:
    """In a notebook: the path of the query was changed, and the group is that of before."""
    rig.write(1, 2)
    group = rig.group()
    rig.run(group)
    before, rig.checkpoint = rig.checkpoint, rig.folder / "another"
    with pytest.raises(StreamingQueryException, match="is not the checkpointLocation of the query"):
        rig.run(group)
    assert not (rig.checkpoint / "commits").exists() or not [*(rig.checkpoint / "commits").glob("[0-9]*")]
    rig.checkpoint = before
    rig.write(3)
    rig.run(group)
    rig.expect(1, 2, 3)


def test_a_group_takes_the_columns_of_the_run_that_calls_it(rig: Rig) -> None:
    rig.write(1)
    group = SinkGroup({"topic": KafkaSink(rig.servers, rig.topic)}, checkpoint_location=str(rig.checkpoint))
    rig.run(group, rig.orders().select("amount"))
    rig.write(2)
    rig.run(group, rig.orders().select("amount", F.lit("new").alias("more")))
    values = [json.loads(record.value) for record in read_committed(rig.servers, rig.topic)]
    assert sorted(map(str, values)) == ["{'amount': 1}", "{'amount': 2, 'more': 'new'}"]


def test_a_function_whose_columns_change_with_the_rows_is_refused(rig: Rig) -> None:
    rig.write(1)
    rig.write(2)
    sinks = {"topic": KafkaSink(rig.servers, rig.topic)}

    def pivot(frame: Any) -> Any:
        return frame.groupBy("user").pivot("amount").count()

    group = SinkGroup(sinks, checkpoint_location=str(rig.checkpoint), rows={"topic": pivot})
    with pytest.raises(StreamingQueryException, match="other columns than in the first micro-batch"):
        rig.run(group)


def test_a_failing_sink_leaves_nothing_and_the_query_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.write(1, 2)
    with monkeypatch.context() as broken, pytest.raises(StreamingQueryException, match="no disk"):
        broken.setattr(BufferWriter, "plan", lambda self, request: (_ for _ in ()).throw(OSError("no disk")))
        rig.run(rig.group())
    rig.expect()
    rig.run(rig.group())
    rig.expect(1, 2)


def test_another_checkpoint_location_than_the_querys_is_refused(rig: Rig, tmp_path: Path) -> None:
    rig.write(1)
    elsewhere = SinkGroup(rig.sinks(), checkpoint_location=str(tmp_path / "elsewhere"))
    with pytest.raises(StreamingQueryException, match="is not the checkpointLocation of the query"):
        rig.run(elsewhere)
    assert not (tmp_path / "elsewhere").exists()


def test_a_driver_that_was_replaced_decides_nothing(rig: Rig) -> None:
    """A zombie: its successor took over while it was staging."""
    rig.write(1, 2)
    group = rig.group()
    seen: list[int] = []

    class Successor(SilentObserver):
        def on_step_start(self, step: Any, subject: str) -> None:
            if step is Step.DECISION and not seen:
                seen.append(1)
                take_over(open_sink_dir(rig.checkpoint), SystemClock())

    group.observer = Successor
    with pytest.raises(StreamingQueryException, match=r"taken this job over|was decided by another owner"):
        rig.run(group)
    rig.expect()
    rig.run(rig.group())
    rig.expect(1, 2)


@pytest.mark.parametrize(
    "sinks, more, says",
    [
        ({}, {}, "at least one sink"),
        ({"a/b": None}, {}, "not usable"),
        ({"a": 5}, {}, "a sink"),
        ({"a": KafkaSink("h:1", "t")}, {"rows": {"b": lambda df: df}}, "no sink of the group"),
        ({"a": KafkaSink("h:1", "t")}, {"rows": {"a": 5}}, "function"),
        ({"a": KafkaSink("h:1", "t")}, {"checkpoint_location": "relative"}, "absolute"),
    ],
)
def test_wrong_settings_are_refused_at_once(sinks: Any, more: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SinkGroup(sinks, **{"checkpoint_location": "/data/c", **more})


def test_commands_take_the_checkpoint_of_the_query(rig: Rig, topic: Any) -> None:
    """Checkpoints, open transactions, and an audit, which finds a record that somebody has written again."""
    source = topic(partitions=2)
    register(rig.spark)
    produce(rig.servers, source, [b'{"amount": %d}' % n for n in range(20)])
    records = rig.spark.readStream.format("flinkish-kafka").option("subscribe", source)
    records = (
        records.option("kafka.bootstrap.servers", rig.servers).option("startingOffsets", "earliest").load()
    )
    named = records.selectExpr("topic AS _topic", "partition AS _partition", "offset AS _offset")
    sinks = {"topic": KafkaSink(rig.servers, rig.topic), "table": DeltaSink(str(rig.folder / "table"))}
    rig.run(SinkGroup(sinks, checkpoint_location=str(rig.checkpoint)), named)

    listed = flinkish("checkpoints", "list", rig.checkpoint)
    assert listed.exit_code == 0 and "COMPLETED" in listed.stdout
    where = ("--bootstrap-servers", rig.servers)
    assert flinkish("transactions", "list", rig.checkpoint, *where).exit_code == 0
    outputs = ("--output", f"topic=kafka:{rig.topic}", "--output", f"table=delta:{rig.folder}/table")
    audit = ("audit", rig.checkpoint, *where, "--input", source, *outputs)
    exact = flinkish(*audit)
    assert exact.exit_code == 0 and "0 lost, 0 duplicated" in exact.stdout
    refused = flinkish("transactions", "abort", rig.checkpoint, *where)
    assert refused.exit_code == 2 and "takes no orders" in refused.output
    assert flinkish("rewind", rig.checkpoint, 1).exit_code == 2
    (first, *_) = read_committed(rig.servers, rig.topic)
    produce(rig.servers, rig.topic, [first.value])
    assert "0 lost, 1 duplicated" in flinkish(*audit).stdout


def test_a_query_with_a_foreach_batch_of_its_own_goes_over_and_back(rig: Rig) -> None:
    """With its checkpoint, both ways: no micro-batch is left out, none comes twice."""
    own: list[int] = []

    def collect(frame: Any, batch: int) -> None:
        own.extend(row.amount for row in frame.collect())

    rig.write(1, 2)
    rig.run(collect)
    rig.write(3, 4)
    rig.run(rig.group())
    rig.write(5)
    rig.run(collect)
    assert own == [1, 2, 5]
    rig.expect(3, 4)
