"""State from outside on a real Spark: bootstrapped, edited and read, and the jobs that go on with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import functions as F

from flinkish_spark import (
    CheckpointConfig,
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    MemorySink,
    ValueStateDescriptor,
    read_state,
)
from flinkish_spark.core.errors import EnvironmentFault, UserFunctionError
from flinkish_spark.functions.stream import CheckpointedProcessFunction
from flinkish_spark.protocol.restore import UnpositionedSources
from flinkish_spark.savepoints.files import RestoreSettings, SavepointDir
from flinkish_spark.state.operator_state import OperatorListDescriptor
from flinkish_spark.state_processor import (
    BootstrapError,
    CheckpointNotRetainedError,
    KeyedStateBootstrapFunction,
    SavepointWriter,
    key_by,
    read_broadcast_state,
    read_list_state,
    read_timers,
)
from tests.support.jobs import ORDER, await_that, environment, running
from tests.support.savepoint_support import started, stop, stop_with

TRUST = UnpositionedSources.BEGIN_WHERE_THEY_ARE
OUT = "kind STRING, user STRING, n LONG"
USERS = 200


class Totals(KeyedProcessFunction):
    """A total per user; a timer says its own time."""

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))
        self.seen = context.get_list_state(ListStateDescriptor("seen", "LONG"))

    def process_element(self, order, ctx):
        self.total.update(self.total.value() + order.amount)
        self.seen.add(order.amount)
        yield "total", order.user, self.total.value()
        yield "seen", order.user, len(self.seen)

    def on_timer(self, time_ms, ctx):
        yield "timer", ctx.get_current_key(), time_ms


class Bootstrap(KeyedStateBootstrapFunction):
    """What Totals goes on with; every user has a timer that is due when the job begins."""

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))
        self.seen = context.get_list_state(ListStateDescriptor("seen", "LONG"))

    def process_element(self, value, ctx):
        if value.amount < 0:
            raise ValueError("a negative amount")
        self.total.update(self.total.value() + value.amount)
        self.seen.add(value.amount)
        ctx.timer_service().register_processing_time_timer(1_000 + value.amount)
        ctx.timer_service().register_event_time_timer(1 << 50)


def feed(folder: Path, name: str, amounts: dict[str, int]) -> None:
    folder.mkdir(exist_ok=True)
    lines = (json.dumps({"user": user, "amount": amount}) for user, amount in amounts.items())
    (folder / f".{name}").write_text("\n".join(lines))
    (folder / f".{name}").rename(folder / f"{name}.json")


def job(spark, job_dir, folder, sink, uid="totals", **settings):
    folder.mkdir(exist_ok=True)
    env = environment(spark, job_dir, **settings)
    stream = env.from_dataframe(spark.readStream.schema(ORDER).json(str(folder)), uid="files")
    stream.key_by("user").process(Totals(), output=OUT, uid=uid).sink_to(sink, uid="out")
    return env


def found(sink, kind):
    return {row.user: row.n for row in sink.rows() if row.kind == kind}


def users(factor=1):
    return {f"u{n}": factor * n for n in range(USERS)}


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_job_goes_on_with_bootstrapped_state_and_timers(spark, job_dir, tmp_path) -> None:
    rows = spark.createDataFrame([*users().items(), *users(10).items()], ORDER)
    target = tmp_path / "savepoint"
    # An operator beside it, whose states are columns.
    columns = [
        (MapStateDescriptor("by_amount", "LONG", "STRING"), ("amount", "user")),
        (ListStateDescriptor("amounts", "LONG"), "amount"),
    ]
    both = rows.withColumn("half", F.col("user"))
    writer = SavepointWriter.new(spark).with_operator("totals", key_by(rows, "user"), Bootstrap())
    metadata = writer.with_operator("beside", key_by(both.where("amount > 0"), "half"), columns).write(target)
    assert SavepointDir(target).metadata() == metadata and len(metadata.chains) == 1
    assert metadata.operators["totals"].key_types == ("string",) and metadata.rows > 100

    totals = read_state(spark, target, "totals", "total")
    assert {row.key: row.value for row in totals.collect()} == users(11)
    amounts = read_state(spark, target, "beside", "by_amount").where("key = 'u3'").collect()
    assert amounts[0].value == {3: "u3", 30: "u3"}
    timers = read_timers(spark, target, "totals")
    assert {(row.clock, row["count"]) for row in timers.groupBy("clock").count().collect()} == {
        ("EVENT_TIME", USERS),
        ("PROCESSING_TIME", 2 * USERS - 1),
    }
    assert timers.where("key = 'u3' and clock = 'PROCESSING_TIME'").count() == 2

    # Without any record the timers fire; with records the state is there.
    kept = SavepointWriter.from_existing(spark, target).remove_operator("beside")
    kept.replace_timers("totals", timers.where("key != 'u4'")).write(tmp_path / "kept")
    sink, folder = MemorySink("bootstrapped"), tmp_path / "in"
    with started(job(spark, job_dir, folder, sink), RestoreSettings(str(tmp_path / "kept")), 3) as client:
        await_that(lambda: len(found(sink, "timer")) == USERS - 1, client)
        feed(folder, "0", {"u7": 1, "new": 5})
        await_that(lambda: "new" in found(sink, "total"), client)
        stop(client)
    assert sorted(row.n for row in sink.rows() if row.kind == "timer" and row.user == "u3") == [1_003, 1_030]
    assert "u4" not in found(sink, "timer")
    assert found(sink, "total") == {"u7": 78, "new": 5} and found(sink, "seen") == {"u7": 3, "new": 1}


@pytest.mark.nightly
def test_a_savepoint_of_a_job_is_edited_and_the_job_goes_on_elsewhere(spark, job_dir, tmp_path) -> None:
    first, sink = tmp_path / "first", MemorySink("edited-1")
    feed(first, "0", users())
    with started(job(spark, job_dir, first, sink)) as client:
        await_that(lambda: len(found(sink, "total")) == USERS, client)
        stop_with(client, tmp_path / "savepoint")
    before = files_in(tmp_path / "savepoint")

    totals = read_state(spark, tmp_path / "savepoint", "totals", "total")
    doubled = totals.where("key != 'u0'").withColumn("value", F.col("value") * 2)
    more = doubled.unionByName(spark.createDataFrame([("extra", 1_000)], "key STRING, value LONG"))
    writer = SavepointWriter.from_existing(spark, tmp_path / "savepoint").replace_state(
        "totals", "total", more
    )
    for target in (tmp_path / "savepoint", tmp_path / "savepoint" / "inside"):
        with pytest.raises(EnvironmentFault):
            writer.write(target)
    metadata = writer.change_uid("totals", "sums").write(tmp_path / "edited")
    assert files_in(tmp_path / "savepoint") == before
    assert list(metadata.operators) == ["sums"] and metadata.chains[0].chain.name == "sums"
    # What is not edited is as it was.
    seen = {row.key: row.value for row in read_state(spark, tmp_path / "edited", "sums", "seen").collect()}
    assert seen == {user: [amount] for user, amount in users().items()}

    # Another uid, other partitions.
    rest, again = tmp_path / "rest", MemorySink("edited-2")
    feed(rest, "1", {**users(), "extra": 1})
    env = job(spark, tmp_path / "second", rest, again, uid="sums")
    restore = RestoreSettings(str(tmp_path / "edited"), unpositioned=TRUST)
    with started(env, restore, 5) as client:
        await_that(lambda: len(found(again, "total")) == USERS + 1, client)
        stop(client)
    assert found(again, "total") == {**users(3), "extra": 1_001, "u0": 0}
    assert found(again, "seen") == {**dict.fromkeys(users(), 2), "extra": 1}


def test_what_does_not_fit_is_refused_and_no_savepoint_is_there(spark, tmp_path) -> None:
    rows = spark.createDataFrame([("a", 1), ("a", 2)], ORDER)
    negative = spark.createDataFrame([("a", -1)], ORDER)
    new = SavepointWriter.new(spark)
    one = [(ValueStateDescriptor("total", "LONG"), "amount")]
    with pytest.raises(UserFunctionError, match="several rows for the key 'a'"):
        new.with_operator("totals", key_by(rows, "user"), one).write(tmp_path / "a")
    with pytest.raises(UserFunctionError, match="a negative amount"):
        new.with_operator("totals", key_by(negative, "user"), Bootstrap()).write(tmp_path / "a")
    assert not (tmp_path / "a" / "savepoint.json").exists()
    # The place can be used again.
    new.with_operator("totals", key_by(rows.limit(1), "user"), one).write(tmp_path / "a")
    twice = spark.createDataFrame([("a", 1), ("a", 2)], "key STRING, value LONG")
    writer = SavepointWriter.from_existing(spark, tmp_path / "a")
    with pytest.raises(BootstrapError, match="has several rows for"):
        writer.replace_state("totals", "total", twice).write(tmp_path / "b")
    with pytest.raises(BootstrapError, match="an operator 'totals' already"):
        writer.with_operator("totals", key_by(rows, "user"), one)


@pytest.mark.nightly
def test_retained_checkpoints_are_read_from_the_job_directory(spark, job_dir, tmp_path) -> None:
    """Also those whose key groups lie in bases; the job runs or not, and is never changed."""
    folder, sink = tmp_path / "in", MemorySink("retained")
    many = {f"user-{n:06d}": 1 for n in range(20_000)}
    feed(folder, "0", many)
    kept = CheckpointConfig(interval_ms=500, retained=100)
    env = job(spark, job_dir, folder, sink, max_parallelism=2, checkpoint=kept)
    with started(env) as client:
        await_that(lambda: len(found(sink, "total")) == len(many), client)
        first = max(int(one) for one in sink.rows_by_checkpoint())
        running = read_state(spark, job_dir, "totals", "total")
        assert running.agg(F.count("*"), F.sum("value")).first() == (20_000, 20_000)
        feed(folder, "1", {"user-000007": 5})
        await_that(lambda: found(sink, "total")["user-000007"] == 6, client)
        stop(client)
    assert list((job_dir / "pins/state/bases/totals").iterdir())
    # Nothing of Spark's is left that writes what it has still in hand.
    spark._jvm.org.apache.spark.sql.execution.streaming.state.StateStore.stop()
    before = files_in(job_dir)
    last = max(int(one) for one in sink.rows_by_checkpoint())
    seven = F.col("key") == "user-000007"
    for path, checkpoint in ((job_dir, None), (job_dir, last), (job_dir / "checkpoints" / str(last), None)):
        state = read_state(spark, path, "totals", "total", checkpoint=checkpoint)
        assert [row.value for row in state.where(seven).collect()] == [6] and state.count() == 20_000
    state = read_state(spark, job_dir, "totals", "total", checkpoint=first, scratch=tmp_path / "scratch")
    assert [row.value for row in state.where(seven).collect()] == [1]
    with pytest.raises(CheckpointNotRetainedError, match="does not exist"):
        read_state(spark, job_dir, "totals", "total", checkpoint=last + 1_000)
    assert files_in(job_dir) == before


FACTORS = MapStateDescriptor("factors", "STRING", "LONG")


class Scaled(KeyedBroadcastProcessFunction):
    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

    def process_element(self, order, ctx):
        factors = ctx.get_broadcast_state(FACTORS)
        self.total.update(self.total.value() + order.amount)
        yield order.user, self.total.value(), factors["all"] * factors["some"]

    def process_broadcast_element(self, rule, ctx):
        ctx.get_broadcast_state(FACTORS)[rule.name] = rule.factor


@pytest.mark.nightly
def test_a_job_goes_on_with_broadcast_state_that_was_written(spark, job_dir, tmp_path) -> None:
    rows = spark.createDataFrame([("ann", 10)], ORDER)
    factors = spark.createDataFrame([("all", 7), ("some", 1)], "key STRING, value LONG")
    states = [(ValueStateDescriptor("total", "LONG"), "amount")]
    writer = SavepointWriter.new(spark).with_operator("scaled", key_by(rows, "user"), states)
    writer.replace_broadcast_state("scaled", "factors", factors).write(tmp_path / "first")
    # Edited keyed state leaves the broadcast state as it is, under another uid, too.
    total = read_state(spark, tmp_path / "first", "scaled", "total").selectExpr("key", "value + 1 as value")
    edited = SavepointWriter.from_existing(spark, tmp_path / "first").replace_state("scaled", "total", total)
    edited.change_uid("scaled", "factored").write(tmp_path / "second")
    found = read_broadcast_state(spark, tmp_path / "second", "factored", "factors")
    assert {row.key: row.value for row in found.collect()} == {"all": 7, "some": 1}

    sink = MemorySink("broadcast")
    env = environment(spark, job_dir, restore=RestoreSettings(str(tmp_path / "second")))
    rules = env.from_collection([("some", 3)], "name STRING, factor LONG", uid="rules").broadcast(FACTORS)
    orders = env.from_collection([("ann", 1), ("ben", 2)], ORDER, uid="orders").key_by("user")
    scaled = orders.connect(rules).process(Scaled(), output="user STRING, n LONG, f LONG", uid="factored")
    scaled.sink_to(sink, uid="out")
    with running(env) as client:
        assert client.wait(300_000), f"the job did not end; {client.progress}"
    assert sorted((row.user, row.n) for row in sink.rows()) == [("ann", 12), ("ben", 2)]
    assert {row.f for row in sink.rows()} <= {7, 21}


OPEN = OperatorListDescriptor("open", "STRING")


class Opened(CheckpointedProcessFunction):
    """Emits what it has kept, and keeps the users that come."""

    def open(self, context):
        self.kept = context.get_operator_list_state(OPEN)

    def process_element(self, order, ctx):
        self.kept.add(order.user)
        yield "kept", ",".join(sorted(self.kept)), len(self.kept)


@pytest.mark.nightly
def test_a_job_goes_on_with_items_that_were_written(spark, job_dir, tmp_path) -> None:
    items = spark.createDataFrame([("ann",), ("ben",)], "item STRING")
    writer = SavepointWriter.new(spark).add_unkeyed_operator("opened")
    writer.replace_list_state("opened", "open", items).write(tmp_path / "first")
    sink = MemorySink("items")
    env = environment(spark, job_dir, restore=RestoreSettings(str(tmp_path / "first")))
    orders = env.from_collection([("cem", 1)], ORDER, uid="orders")
    orders.process_with_state(Opened(), output=OUT, uid="opened").sink_to(sink, uid="out")
    with started(env, env.restore, partitions=1) as client:
        assert client.wait(300_000), f"the job did not end; {client.progress}"
    assert [row.user for row in sink.rows()] == ["ann,ben,cem"]
    found = read_list_state(spark, job_dir, "opened", "open")
    assert {row.item for row in found.collect()} == {"ann", "ben", "cem"}
