"""Broadcast state in running jobs: keyed and not, over a savepoint into another number of partitions."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import JobStatus, MemorySink, RestoreSettings, WatermarkStrategy
from flinkish_spark.functions.keyed import BroadcastProcessFunction, KeyedBroadcastProcessFunction
from flinkish_spark.functions.stream import CheckpointedProcessFunction
from flinkish_spark.sources import CollectionSource, Discovery, FileSource, JsonLines, RateLimit
from flinkish_spark.state import MapStateDescriptor, ValueStateDescriptor
from flinkish_spark.state.operator_state import OperatorListDescriptor
from flinkish_spark.windows import TumblingEventTimeWindows
from tests.integration.spark.test_two_inputs import feed
from tests.support.jobs import await_that, environment, rows, running

pytestmark = pytest.mark.timeout(600)
FACTORS = MapStateDescriptor("factors", "STRING", "LONG")
TOTAL = ValueStateDescriptor("total", "LONG", default=0)
GROWING = Discovery.CONTINUOUS
ORDERS, RULES = "user STRING, amount LONG", "name STRING, factor LONG"


class Scaled(KeyedBroadcastProcessFunction):
    def open(self, context: Any) -> None:
        self.total = context.get_state(TOTAL)

    def process_element(self, order: Any, ctx: Any) -> Any:
        self.total.update(self.total.value() + order.amount)
        yield order.user, self.total.value(), ctx.get_broadcast_state(FACTORS).get("all", 1)

    def process_broadcast_element(self, rule: Any, ctx: Any) -> Any:
        if rule.name == "forget":
            ctx.apply_to_keyed_state(TOTAL, lambda key, total: total.clear())
        else:
            ctx.get_broadcast_state(FACTORS)[rule.name] = rule.factor


class Plain(BroadcastProcessFunction):
    def process_element(self, order: Any, ctx: Any) -> Any:
        yield order.user, order.amount, ctx.get_broadcast_state(FACTORS).get("all", 1)

    def process_broadcast_element(self, rule: Any, ctx: Any) -> Any:
        ctx.get_broadcast_state(FACTORS)[rule.name] = rule.factor


def job(spark: Any, tmp_path: Path, name: str, **settings: Any) -> tuple[Any, dict[str, MemorySink]]:
    env = environment(spark, tmp_path / name, **settings)
    found = {
        uid: env.from_source(
            FileSource(
                str(tmp_path / uid),
                JsonLines(),
                fields,
                discovery=Discovery.CONTINUOUS,
                discover_every_ms=100,
            ),
            uid=uid,
        )
        for uid, fields in (("orders", ORDERS), ("rules", RULES))
    }
    sinks = {uid: MemorySink(f"{tmp_path}/{name}-{uid}") for uid in ("scaled", "plain")}
    rules, output = found["rules"].broadcast(FACTORS), "user STRING, n LONG, factor LONG"
    scaled = found["orders"].key_by("user").connect(rules).process(Scaled(), output=output, uid="scaled")
    plain = found["orders"].connect(rules).process(Plain(), output=output, uid="plain")
    for uid, stream in (("scaled", scaled), ("plain", plain)):
        stream.sink_to(sinks[uid], uid=f"{uid}-out")
    return env, sinks


def orders(*users: str) -> list[dict[str, Any]]:
    return [{"user": user, "amount": 1} for user in users]


def ask(client: Any, tmp_path: Path, sinks: dict[str, MemorySink], is_known: Any) -> int:
    """Feed an order until what comes of it shows that a rule is known; return how many it took."""
    before = rows(client, "scaled-out")
    for asked in range(1, 100):
        feed(tmp_path / "orders", f"ask-{time.monotonic_ns()}", orders("asking"))
        await_that(lambda wanted=before + asked: rows(client, "scaled-out") == wanted, client)
        await_that(lambda wanted=before + asked: rows(client, "plain-out") == wanted, client)
        if is_known(sinks["scaled"].rows()[-1]):
            return asked
    raise AssertionError("the rule was never known")


@pytest.mark.nightly
def test_rules_reach_every_partition_and_go_through_savepoints(spark: Any, tmp_path: Path) -> None:
    """Behaviour 90: every copy is everybody's."""
    users = [f"user-{n}" for n in range(20)]
    feed(tmp_path / "orders", "0", orders(*users))
    (tmp_path / "rules").mkdir()
    env, sinks = job(spark, tmp_path, "first")
    client = env.execute_async()
    await_that(lambda: rows(client, "scaled-out") == 20 == rows(client, "plain-out"), client)
    feed(tmp_path / "rules", "0", [{"name": "all", "factor": 7}])
    # Nothing shows that a rule was read but what comes behind it.
    asked = ask(client, tmp_path, sinks, lambda row: row.factor == 7)
    feed(tmp_path / "orders", "1", orders(*users))
    await_that(lambda: rows(client, "scaled-out") == 40 + asked == rows(client, "plain-out"), client)
    client.stop_with_savepoint(str(tmp_path / "savepoint"))
    client.wait()
    found = [tuple(row) for row in sinks["scaled"].rows() if not row.user.startswith("asking")]
    assert Counter(found) == Counter([(user, 1, 1) for user in users] + [(user, 2, 7) for user in users])

    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", str(int(before) + 1))
    try:
        feed(tmp_path / "orders", "2", orders(*users))
        env, sinks = job(spark, tmp_path, "second", restore=RestoreSettings(str(tmp_path / "savepoint")))
        with running(env) as client:
            await_that(lambda: rows(client, "scaled-out") == 20 == rows(client, "plain-out"), client)
            feed(tmp_path / "rules", "1", [{"name": "forget", "factor": 0}])
            asked = ask(client, tmp_path, sinks, lambda row: row.n <= 1)
            feed(tmp_path / "orders", "3", orders(*users))
            await_that(lambda: rows(client, "scaled-out") == 40 + asked, client)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
    found = [tuple(row) for row in sinks["scaled"].rows() if not row.user.startswith("asking")]
    assert Counter(found) == Counter([(user, 3, 7) for user in users] + [(user, 1, 7) for user in users])
    plain = [tuple(row) for row in sinks["plain"].rows() if not row.user.startswith("asking")]
    assert Counter(plain) == Counter([(user, 1, 7) for user in users] * 2)


class Numbered(CheckpointedProcessFunction):
    """Says how many records its partition has seen, of which it keeps every one."""

    def open(self, context: Any) -> None:
        self.seen = context.get_operator_list_state(OperatorListDescriptor("seen", "STRING"))

    def process_element(self, order: Any, ctx: Any) -> Any:
        self.seen.add(order.user)
        yield order.user, len(self.seen)


@pytest.mark.nightly
def test_what_a_partition_keeps_is_dealt_out_behind_a_savepoint(spark: Any, tmp_path: Path) -> None:
    """Behaviour 90."""
    users = [f"user-{n}" for n in range(21)]
    feed(tmp_path / "orders", "0", orders(*users))

    def start(name: str, **settings: Any) -> tuple[Any, MemorySink]:
        env = environment(spark, tmp_path / name, **settings)
        files = FileSource(str(tmp_path / "orders"), JsonLines(), ORDERS, discovery=GROWING)
        sink = MemorySink(f"{tmp_path}/{name}-rows")
        source = env.from_source(files, uid="orders")
        numbered = source.process_with_state(Numbered(), output="user STRING, n LONG", uid="numbered")
        numbered.sink_to(sink, uid="out")
        return env, sink

    env, sink = start("first")
    client = env.execute_async()
    await_that(lambda: rows(client, "out") == 21, client)
    client.stop_with_savepoint(str(tmp_path / "savepoint"))
    client.wait()
    # One file is one channel.
    assert sorted(row.n for row in sink.rows()) == list(range(1, 22))

    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "3")
    try:
        feed(tmp_path / "orders", "1", orders("last"))
        env, sink = start("second", restore=RestoreSettings(str(tmp_path / "savepoint")))
        with running(env) as client:
            await_that(lambda: rows(client, "out") == 1, client)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
    assert [tuple(row) for row in sink.rows()] == [("last", 8)]


def test_a_bounded_job_with_rules_ends(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    rules = env.from_collection([("all", 3)], RULES, uid="rules").broadcast(FACTORS)
    given = env.from_collection([("ann", 1), ("ben", 2)], ORDERS, uid="orders")
    sink = MemorySink(f"{tmp_path}/rows")
    given.key_by("user").connect(rules).process(
        Scaled(), output="user STRING, n LONG, factor LONG", uid="scaled"
    ).sink_to(sink, uid="out")
    with running(env) as client:
        assert client.wait(timeout_ms=300_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED
    assert sorted(tuple(row)[:2] for row in sink.rows()) == [("ann", 1), ("ben", 2)]


class Passed(BroadcastProcessFunction):
    def process_element(self, total: Any, ctx: Any) -> Any:
        yield total.user, total.amount

    def process_broadcast_element(self, rule: Any, ctx: Any) -> Any:
        yield from ()


class Kept(CheckpointedProcessFunction):
    def process_element(self, total: Any, ctx: Any) -> Any:
        yield total.user, total.amount


@pytest.mark.nightly
def test_windows_behind_functions_without_keys_behind_windows_lose_nothing(
    spark: Any, tmp_path: Path
) -> None:
    """With broadcast state and with state of their own: two branches of a job."""
    env = environment(spark, tmp_path / "job")
    timed = WatermarkStrategy.for_bounded_out_of_orderness(0).with_timestamp_assigner("at")
    given = [(f"user-{n % 3}", 1, n * 200) for n in range(300)]
    source = CollectionSource(given, f"{ORDERS}, at LONG").limit_rate(RateLimit(records_per_batch=70))
    orders = env.from_source(source, timed, uid="orders")
    ones = orders.key_by("user").window(TumblingEventTimeWindows(1_000)).sum("amount", uid="ones")
    rules = env.from_collection([("all", 3)], RULES, uid="rules").broadcast(FACTORS)
    ways = {
        "broadcast": ones.connect(rules).process(Passed(), output=ORDERS, uid="passed"),
        "with-state": ones.process_with_state(Kept(), output=ORDERS, uid="kept"),
    }
    sinks = {way: MemorySink(f"{tmp_path}/{way}") for way in ways}
    for way, passed in ways.items():
        by_user = passed.key_by("user")
        tens = by_user.window(TumblingEventTimeWindows(10_000)).sum("amount", uid=f"tens-{way}")
        tens.sink_to(sinks[way], uid=f"out-{way}")
    with running(env) as client:
        assert client.wait(timeout_ms=300_000), f"the job did not end; {client.progress}"
        assert client.progress.late_dropped == {}, client.progress
    for way, sink in sinks.items():
        found = Counter()
        for row in sink.rows():
            found[row.user] += row.amount
        # Whatever the watermark of the rules lets through on time, nothing may be late.
        assert found == {f"user-{n}": 100 for n in range(3)}, way
        assert len(sink.rows()) == 18, way
