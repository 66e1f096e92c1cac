"""Unions, connected streams and joins in running jobs: to the end of their input, and over a savepoint."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import (
    JobStatus,
    KeyedProcessFunction,
    MemorySink,
    RestoreSettings,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from flinkish_spark.core.elements import OutputTag
from flinkish_spark.core.errors import ConfigError, GraphError, SchemaError
from flinkish_spark.functions.keyed import KeyedCoProcessFunction
from flinkish_spark.joins import CoGroupFunction, JoinType, LookupCache, LookupTable, ProcessJoinFunction
from flinkish_spark.sources import Discovery, FileSource, JsonLines
from flinkish_spark.windows import TumblingEventTimeWindows
from tests.support.jobs import await_that, environment, rows, running

pytestmark = pytest.mark.timeout(600)
ORDERS, PAYMENTS = "user STRING, amount LONG, at LONG", "payer STRING, paid LONG, at LONG"
BY_AT = WatermarkStrategy.for_bounded_out_of_orderness(0).with_timestamp_assigner("at")
ODD = OutputTag("odd", "user STRING, total LONG")


class Totals(KeyedProcessFunction):
    def open(self, context: Any) -> None:
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        self.total.update(self.total.value() + value.amount)
        if value.amount % 2:
            ctx.output(ODD, (value.user, value.amount))
        yield value.user, self.total.value()


class Open(KeyedCoProcessFunction):
    """What of an order is not paid yet; says so at the end of time."""

    def open(self, context: Any) -> None:
        self.owed = context.get_state(ValueStateDescriptor("owed", "LONG", default=0))

    def process_element1(self, order: Any, ctx: Any) -> Iterator[Any]:
        self.owed.update(self.owed.value() + order.amount)
        ctx.timer_service().register_event_time_timer(1_000_000)
        yield from ()

    def process_element2(self, payment: Any, ctx: Any) -> Iterator[Any]:
        self.owed.update(self.owed.value() - payment.paid)
        yield from ()

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        yield ctx.get_current_key(), self.owed.value()


class Paid(ProcessJoinFunction):
    def process_element(self, order: Any, payment: Any, ctx: Any) -> Iterator[Any]:
        yield order.user, order.amount, payment.paid, ctx.right_timestamp() - ctx.left_timestamp()


class Counts(CoGroupFunction):
    def co_group(self, key: Any, context: Any, lefts: Any, rights: Any) -> Iterator[Any]:
        yield key, len(lefts), len(rights), context.window.end_ms


class Countries(LookupTable):
    def lookup(self, keys: Any) -> Any:
        return {"ann": [("Germany", "ann")]}


class Noted(LookupTable):
    """Notes who asked for what: process and key."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def lookup(self, keys: Any) -> Any:
        with self.notes.open("a") as notes:
            notes.writelines(f"{os.getpid()} {key}\n" for key in keys)
        return {key: [(key.upper(),)] for key in keys}


def finish(env: Any) -> None:
    with running(env) as client:
        assert client.wait(timeout_ms=300_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED


@pytest.mark.nightly
def test_a_union_is_whole_whatever_leads_into_it(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    first = [("ann", n, n) for n in range(50)]
    second = [("ben", 2 * n, n) for n in range(50)]
    left = env.from_collection(first, ORDERS, uid="left")
    right = env.from_collection(second, ORDERS, uid="right")
    both = left.union(right).filter(lambda order: order.amount != 4)
    totals = both.key_by("user").process(Totals(), output="user STRING, total LONG", uid="totals")
    mixed = totals.transform(lambda frame: frame.where("total > 1000")).union(
        totals.get_side_output(ODD),
        left.map(lambda order: (order.user, -1), output="user STRING, total LONG"),
    )
    sinks = {name: MemorySink(f"{tmp_path}/{name}") for name in ("all", "twice", "totals", "mixed")}
    left.union(right).sink_to(sinks["all"], uid="all")
    left.union(left.transform(lambda frame: frame.where("amount < 10"))).sink_to(sinks["twice"], uid="twice")
    totals.sink_to(sinks["totals"], uid="totals-out")
    mixed.sink_to(sinks["mixed"], uid="mixed")
    finish(env)
    found = {name: Counter(map(tuple, sink.rows())) for name, sink in sinks.items()}
    assert found["all"] == Counter(first + second)
    assert found["twice"] == Counter(first + first[:10])
    kept = [row for row in [*first, *second] if row[1] != 4]
    wanted, running_total = Counter[Any](), Counter[str]()
    for user, amount, _ in kept:
        running_total[user] += amount
        wanted[user, running_total[user]] += 1
    assert found["totals"] == wanted
    odd = Counter((user, amount) for user, amount, _ in kept if amount % 2)
    many = Counter({row: count for row, count in wanted.items() if row[1] > 1000})
    assert found["mixed"] == many + odd + Counter({("ann", -1): 50})


def test_a_worker_asks_a_table_once_for_a_key_whose_answer_it_keeps(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    notes, folder, sink = tmp_path / "notes", tmp_path / "in", MemorySink(f"{tmp_path}/rows")
    micro_batches = 8
    for number in range(micro_batches):
        feed(folder, str(number), [{"user": "ann"}, {"user": "ben"}])
    source = FileSource(str(folder), JsonLines(), "user STRING", max_files_per_batch=1)
    users = env.from_source(source, uid="users")
    cache = LookupCache(ttl_ms=3_600_000)
    found = users.lookup_join(Noted(notes), "name STRING", key=lambda one: one.user, cache=cache)
    found.sink_to(sink, uid="out")
    finish(env)
    assert Counter(map(tuple, sink.rows())) == Counter(
        {("ann", "ANN"): micro_batches, ("ben", "BEN"): micro_batches}
    )
    asked = notes.read_text().splitlines()
    # Tasks go to whichever worker is idle, of a few; each of them remembers.
    assert len(asked) == len(set(asked)) < 2 * micro_batches


def test_connected_and_joined_streams(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    orders = [("ann", 5, 100), ("ann", 6, 105), ("ben", 7, 110), ("cid", 8, 200)]
    payments = [("ann", 1, 104), ("ann", 4, 112), ("ben", 9, 95), ("dan", 2, 130)]
    left = env.from_collection(orders, ORDERS, uid="orders").assign_timestamps_and_watermarks(BY_AT)
    right = env.from_collection(payments, PAYMENTS, uid="payments").assign_timestamps_and_watermarks(BY_AT)
    by_user, by_payer = left.key_by("user"), right.key_by("payer")
    joined = by_user.join(by_payer)
    streams = {
        "owed": by_user.connect(by_payer).process(Open(), output="user STRING, owed LONG", uid="owed"),
        "near": by_user.interval_join(by_payer, lower_ms=0, upper_ms=10, uid="near"),
        "paid": joined.interval(
            lower_ms=-20,
            upper_ms=0,
            function=Paid(),
            output="user STRING, amount LONG, paid LONG, after LONG",
            uid="paid",
        ),
        "windows": joined.window(TumblingEventTimeWindows(10), join_type=JoinType.LEFT, uid="windows"),
        "groups": joined.co_group(
            TumblingEventTimeWindows(100),
            Counts(),
            output="user STRING, orders INT, payments INT, end LONG",
            uid="groups",
        ),
        "versions": joined.temporal(join_type=JoinType.LEFT, uid="versions"),
        "countries": left.lookup_join(
            Countries(), "country STRING, user STRING", key=lambda order: order.user, join_type=JoinType.LEFT
        ),
        "all": left.connect(right).map(
            lambda order: (order.user, order.amount),
            lambda one: (one.payer, -one.paid),
            output="who STRING, n LONG",
        ),
    }
    sinks = {name: MemorySink(f"{tmp_path}/{name}") for name in streams}
    for name, stream in streams.items():
        stream.sink_to(sinks[name], uid=f"{name}-out")
    finish(env)
    found = {name: Counter(map(tuple, sink.rows())) for name, sink in sinks.items()}
    assert found["owed"] == Counter([("ann", 6), ("ben", -2), ("cid", 8)])
    assert found["near"] == Counter([("ann", 5, 100, "ann", 1, 104), ("ann", 6, 105, "ann", 4, 112)])
    assert tuple(sinks["near"].rows()[0].asDict()) == ("user", "amount", "at", "payer", "paid", "right_at")
    assert found["paid"] == Counter([("ann", 6, 1, -1), ("ben", 7, 9, -15)])
    none = (None, None, None)
    assert found["windows"] == Counter(
        [
            ("ann", 5, 100, "ann", 1, 104),
            ("ann", 6, 105, "ann", 1, 104),
            ("ben", 7, 110, *none),
            ("cid", 8, 200, *none),
        ]
    )
    assert found["groups"] == Counter(
        [("ann", 2, 2, 200), ("ben", 0, 1, 100), ("ben", 1, 0, 200), ("cid", 1, 0, 300), ("dan", 0, 1, 200)]
    )
    assert found["versions"] == Counter(
        [
            ("ann", 5, 100, *none),
            ("ann", 6, 105, "ann", 1, 104),
            ("ben", 7, 110, "ben", 9, 95),
            ("cid", 8, 200, *none),
        ]
    )
    assert found["countries"] == Counter(
        [(u, n, at, "Germany", "ann") if u == "ann" else (u, n, at, None, None) for u, n, at in orders]
    )
    assert found["all"] == Counter([(u, n) for u, n, _ in orders] + [(u, -n) for u, n, _ in payments])


def feed(folder: Path, name: str, rows_: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f".{name}").write_text("".join(json.dumps(row) + "\n" for row in rows_))
    (folder / f".{name}").rename(folder / f"{name}.json")


def two_files(spark: Any, tmp_path: Path, job: str, **settings: Any) -> tuple[Any, MemorySink]:
    env = environment(spark, tmp_path / job, **settings)
    sources = [
        FileSource(
            str(tmp_path / name), JsonLines(), fields, discovery=Discovery.CONTINUOUS, discover_every_ms=100
        )
        for name, fields in (("orders", ORDERS), ("payments", PAYMENTS))
    ]
    orders, payments = (
        env.from_source(source, uid=uid) for uid, source in zip(("orders", "payments"), sources, strict=True)
    )
    timed = orders.assign_timestamps_and_watermarks(BY_AT), payments.assign_timestamps_and_watermarks(BY_AT)
    joined = timed[0].key_by("user").join(timed[1].key_by("payer"))
    sink = MemorySink(f"{tmp_path}/{job}-rows")
    joined.interval(lower_ms=0, upper_ms=1_000, uid="near").sink_to(sink, uid="out")
    return env, sink


@pytest.mark.nightly
def test_both_inputs_of_a_join_go_on_behind_a_savepoint(spark: Any, tmp_path: Path) -> None:
    feed(
        tmp_path / "orders",
        "0",
        [{"user": "ann", "amount": 1, "at": 10}, {"user": "ben", "amount": 2, "at": 20}],
    )
    feed(tmp_path / "payments", "0", [{"payer": "ann", "paid": 1, "at": 15}])
    env, sink = two_files(spark, tmp_path, "first")
    client = env.execute_async()
    await_that(lambda: rows(client, "out") == 1, client)
    client.stop_with_savepoint(str(tmp_path / "savepoint"))
    client.wait()
    assert [tuple(row)[:2] for row in sink.rows()] == [("ann", 1)]

    feed(
        tmp_path / "payments",
        "1",
        [{"payer": "ben", "paid": 2, "at": 25}, {"payer": "ann", "paid": 3, "at": 30}],
    )
    settings = {"restore": RestoreSettings(str(tmp_path / "savepoint"))}
    env, sink = two_files(spark, tmp_path, "second", **settings)
    with running(env) as client:
        await_that(lambda: rows(client, "out") == 2, client)
    # What waits for its partner came along, and nothing is read again.
    assert sorted((*tuple(row)[:2], row.paid) for row in sink.rows()) == [("ann", 1, 3), ("ben", 2, 2)]


def test_what_cannot_be_one_stream_is_refused_before_anything_starts(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    orders = env.from_collection([("ann", 1, 1)], ORDERS, uid="orders")
    payments = env.from_collection([("ann", 1, 1)], PAYMENTS, uid="payments")
    with pytest.raises(ConfigError, match="It must be an instance of DataStream"):
        orders.union(payments.key_by("payer"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="call key_by"):
        orders.key_by("user").join(payments)  # type: ignore[arg-type]
    orders.union(payments).sink_to(MemorySink(f"{tmp_path}/rows"), uid="out")
    with pytest.raises(SchemaError, match="unites a stream of \\(user string"):
        env.execute()

    env = environment(spark, tmp_path / "keys")
    orders = env.from_collection([("ann", 1, 1)], ORDERS, uid="orders")
    payments = env.from_collection([("ann", 1, 1)], PAYMENTS, uid="payments")
    connected = orders.connect(payments).key_by("user", "paid")
    connected.process(Open(), output="user STRING, owed LONG", uid="owed").sink_to(
        MemorySink(f"{tmp_path}/rows"), uid="out"
    )
    with pytest.raises(GraphError, match="keyed by \\(string\\) on one path and by \\(bigint\\)"):
        env.execute()

    env = environment(spark, tmp_path / "times")
    orders = env.from_collection([("ann", 1, 1)], ORDERS, uid="orders").assign_timestamps_and_watermarks(
        BY_AT
    )
    payments = env.from_collection([("ann", 1, 1)], PAYMENTS, uid="payments")
    near = orders.key_by("user").interval_join(payments.key_by("payer"), lower_ms=0, upper_ms=1, uid="near")
    near.sink_to(MemorySink(f"{tmp_path}/rows"), uid="out")
    with pytest.raises(GraphError, match="uses event time"):
        env.execute()
