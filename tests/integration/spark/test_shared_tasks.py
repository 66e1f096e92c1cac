"""Operators that share tasks: one pass for all of them, and each has its state and its sinks for itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from flinkish_spark import (
    Emit,
    JobStatus,
    KeyedProcessFunction,
    MemorySink,
    RestoreSettings,
    ValueStateDescriptor,
)
from flinkish_spark.functions.keyed import KeyedBroadcastProcessFunction
from flinkish_spark.planning import optimizer
from flinkish_spark.planning.rules import share_scans
from flinkish_spark.planning.rules.share_tasks import share_tasks
from flinkish_spark.protocol.plan_layout import PlanLayout, ScanRole
from flinkish_spark.sources import Discovery, FileSource, JsonLines
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import EventTimeSessionWindows, TumblingEventTimeWindows
from tests.integration.spark.test_two_ways import feed
from tests.support import effort
from tests.support.jobs import await_that, environment, rows
from tests.support.savepoint_support import started
from tests.support.two_ways import BY_AT, LIMITS, ODD, ORDERS, ROWS, TOTALS, Totals

pytestmark = pytest.mark.timeout(600)


def by_field(orders: Any) -> Any:
    return orders.key_by("user").process(Totals(), output=TOTALS, uid="by-field")


def odd_ones(orders: Any) -> Any:
    return by_field(orders).get_side_output(ODD)


def by_function(orders: Any) -> Any:
    keyed = orders.key_by(lambda order: order.user[:1], key="STRING")
    return keyed.process(Totals(), output=TOTALS, uid="by-function")


def by_other_function(orders: Any) -> Any:
    keyed = orders.key_by(lambda order: order.amount % 3, key="LONG")
    return keyed.process(Totals(), output=TOTALS, uid="by-other-function")


def by_expression(orders: Any) -> Any:
    return orders.key_by(F.upper("user")).process(Totals(), output=TOTALS, uid="by-expression")


def by_other_expression(orders: Any) -> Any:
    keyed = orders.key_by(F.col("amount") % 2, F.assert_true(F.col("amount") > 0).isNull())
    return keyed.process(Totals(), output=TOTALS, uid="by-other-expression")


def by_parity(orders: Any) -> Any:
    keyed = orders.key_by(lambda order: order.amount % 2, key="LONG")
    return keyed.process(Totals(), output=TOTALS, uid="by-parity")


def folded(orders: Any) -> Any:
    return orders.key_by("user").sum("amount", uid="folded", emit=Emit.PER_ELEMENT)


def windows(orders: Any) -> Any:
    return orders.key_by("user").window(TumblingEventTimeWindows(4)).sum("amount", uid="windows")


def sessions(orders: Any) -> Any:
    return orders.key_by("user").window(EventTimeSessionWindows(2)).sum("amount", uid="sessions")


def large(orders: Any) -> Any:
    """Another stream of the same source: records that are dropped leave their times."""
    return orders.filter(lambda order: order.amount > 3).key_by("user").sum("amount", uid="large")


def large_windows(orders: Any) -> Any:
    """They fire by the times of all records."""
    some = orders.filter(lambda order: order.amount > 3).map(lambda order: order, output=ORDERS)
    return some.key_by("user").window(TumblingEventTimeWindows(2)).sum("amount", uid="large-windows")


def halves(orders: Any) -> Any:
    """Several rows of a record, and none."""
    made = orders.flat_map(
        lambda order: [(order.user, order.amount // 2)] * (order.amount % 3), output=TOTALS
    )
    return made.key_by("user").sum("total", uid="halves", emit=Emit.PER_ELEMENT)


def by_frame(orders: Any) -> Any:
    """The division fails in each row that is dropped."""
    some = orders.transform(
        lambda df: df.where("amount <> 3").withColumn("part", F.expr("120 div (amount - 3)"))
    )
    return some.key_by("user").sum("part", uid="by-frame", emit=Emit.PER_ELEMENT)


def by_frame_and_function(orders: Any) -> Any:
    some = orders.transform(lambda df: df.where(df.amount > 3).withColumn("user", F.upper("user")))
    made = some.map(lambda order: (order.user, -order.amount, order.at), output=ORDERS)
    keyed = made.key_by(lambda order: order.user[:1], key="STRING")
    return keyed.process(Totals(), output=TOTALS, uid="by-frame-and-function")


def united(orders: Any) -> Any:
    """Two ways into one entry."""
    doubled = orders.map(lambda order: (order.user, 2 * order.amount, order.at), output=ORDERS)
    by_user = doubled.union(orders.filter(lambda order: order.amount > 3)).key_by("user")
    return by_user.process(Listed(), output="user STRING, seen STRING", uid="united")


def joined(orders: Any) -> Any:
    by_user = orders.key_by("user")
    return by_user.interval_join(by_user, lower_ms=1, upper_ms=4, uid="joined")


def above(orders: Any) -> Any:
    """A broadcast side, which comes in front of the keyed one in each micro-batch."""
    limits = orders.filter(lambda order: order.amount > 5).broadcast(LIMITS)
    return orders.key_by("user").connect(limits).process(Above(), output=TOTALS, uid="above")


class Listed(KeyedProcessFunction):
    """How many elements a user has had, and the sum."""

    def open(self, context: Any) -> None:
        self.seen = context.get_state(ValueStateDescriptor("seen", "n LONG, amount LONG", default=(0, 0)))

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        count, amount = self.seen.value()
        self.seen.update((count + 1, amount + order.amount))
        if (count + 1) % 3 == 0:
            yield order.user, f"{count + 1} {amount + order.amount}"


class Above(KeyedBroadcastProcessFunction):
    """What is worth more than the greatest amount that has been broadcast."""

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        known = [amount for _, amount in ctx.get_broadcast_state(LIMITS).items()]
        if order.amount >= max(known, default=0):
            yield order.user, order.amount

    def process_broadcast_element(self, order: Any, ctx: Any) -> None:
        ctx.get_broadcast_state(LIMITS)[order.user] = order.amount


def parts(orders: Any) -> Any:
    """What `by_frame` computes."""
    some = orders.filter(lambda order: order.amount != 3)
    made = some.map(lambda order: (*order, 120 // (order.amount - 3)), output=f"{ORDERS}, part LONG")
    return made.key_by("user").sum("part", uid="by-frame", emit=Emit.PER_ELEMENT)


def shouted(orders: Any) -> Any:
    """What `by_frame_and_function` computes."""
    some = orders.filter(lambda order: order.amount > 3)
    made = some.map(lambda order: (order.user.upper(), -order.amount, order.at), output=ORDERS)
    return made.key_by(lambda order: order.user[:1], key="STRING").process(
        Totals(), output=TOTALS, uid="shouted"
    )


PROGRAMS = (
    by_field, by_function, by_other_function, folded, windows, sessions, large, large_windows, halves, united,
    joined, above,
)  # fmt: skip
#: A harness computes no expressions: what has the same results.
BY_EXPRESSION = {
    by_expression: by_field,
    by_other_expression: by_parity,
    by_frame: parts,
    by_frame_and_function: shouted,
}
#: The source is read once, whoever reads it and through which functions.
SCANS = {"orders": 1, "": 1}
PARTS = ROWS[:3], ROWS[3:5], ROWS[5:]


def expected(program: Any, *parts: list[Any]) -> Counter[Any]:
    """Return what a harness makes of the records, before the end of time."""
    same = BY_EXPRESSION.get(program, program)
    harness = ProgramHarness(lambda orders: same(orders.assign_timestamps_and_watermarks(BY_AT)), ORDERS)
    for part in parts:
        harness.push_all([(row, None) for row in part])
    if parts:
        harness.watermark(max(row[2] for part in parts for row in part) - 1)
    return Counter(map(tuple, harness.take().rows))


ALL = (*PROGRAMS, *BY_EXPRESSION)
BY_DAY = (
    by_field,
    by_function,
    large_windows,
    halves,
    united,
    joined,
    above,
    by_expression,
    by_frame_and_function,
)


def job(spark: Any, tmp_path: Path, name: str, programs: Any = ALL) -> tuple[Any, dict[Any, MemorySink]]:
    env = environment(spark, tmp_path / name)
    files = FileSource(
        str(tmp_path / "orders"), JsonLines(), ORDERS, discovery=Discovery.CONTINUOUS, discover_every_ms=100
    )
    orders = env.from_source(files, BY_AT, uid="orders")
    sinks: dict[Any, MemorySink] = {}
    for program in programs:
        sinks[program] = MemorySink(f"{tmp_path}/{name}-{program.__name__}")
        stream = program(orders)
        stream.sink_to(sinks[program], uid=f"to-{program.__name__}")
        if program is by_field:
            sinks[odd_ones] = MemorySink(f"{tmp_path}/{name}-odd")
            stream.get_side_output(ODD).sink_to(sinks[odd_ones], uid="to-odd_ones")
    return env, sinks


def layout(folder: Path, name: str = "layout-0") -> PlanLayout:
    _, body = (folder / "facts" / f"{name}.json").read_text().splitlines()
    return PlanLayout.from_json(json.loads(body))


def run(
    spark: Any,
    tmp_path: Path,
    name: str,
    count: int,
    savepoint: str = "",
    restore: str = "",
    programs: Any = ALL,
) -> dict[Any, MemorySink]:
    """Run the job until it has emitted what `count` files come to; then stop it."""
    feed(tmp_path / "orders", str(count), PARTS[count - 1])
    restored = RestoreSettings(str(tmp_path / restore)) if restore else None
    env, sinks = job(spark, tmp_path, name, programs)
    wanted = {
        f"to-{program.__name__}": expected(program, *PARTS[:count]).total()
        - expected(program, *PARTS[: count - 1]).total()
        for program in sinks
    }
    with started(env, restored, partitions=3 if restore else 2) as client:
        await_that(lambda: {one: rows(client, one) for one in wanted} == wanted, client)
        if savepoint:
            client.stop_with_savepoint(str(tmp_path / savepoint))
        else:
            client.stop_with_checkpoint()
        assert client.wait(60_000)
        assert client.status is not JobStatus.FAILED
    return sinks


def all_of(*runs: dict[Any, MemorySink]) -> dict[str, Counter[Any]]:
    return {
        program.__name__: Counter(tuple(row) for sinks in runs for row in sinks[program].rows())
        for program in runs[0]
    }


def truth(count: int, programs: Any = (*ALL, odd_ones)) -> dict[str, Counter[Any]]:
    return {program.__name__: expected(program, *PARTS[:count]) for program in programs}


def test_operators_over_one_source_share_tasks_and_nothing_else(spark: Any, tmp_path: Path) -> None:
    """Over a restart, and a savepoint that is restored with another number of partitions."""
    programs = ALL if effort.is_night else BY_DAY
    run(spark, tmp_path, "first", 1, programs=programs)
    second = run(spark, tmp_path, "first", 2, savepoint="savepoint", programs=programs)
    began = layout(tmp_path / "first")
    (shared,) = began.shared
    assert len(shared) == len(programs)
    assert {one.number for one in began.states} == {0}
    assert Counter(scan.uid for scan in began.scans) == SCANS
    third = run(spark, tmp_path, "second", 3, restore="savepoint", programs=programs)
    assert layout(tmp_path / "second").shared == began.shared, "also where each begins with state of its own"
    assert all_of(second, third) == truth(3, (*programs, odd_ones))


@pytest.mark.nightly
def test_a_log_goes_on_as_it_began(spark: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """In one of before each operator has its state alone, until a savepoint begins another log."""
    programs = (by_field, by_other_function, windows, large, halves, united, joined, above, by_frame)
    with monkeypatch.context() as before:
        without = tuple(rule for rule in optimizer.RULES if rule is not share_tasks)
        before.setattr(optimizer, "RULES", without)
        run(spark, tmp_path, "first", 1, programs=programs)
    second = run(spark, tmp_path, "first", 2, savepoint="savepoint", programs=programs)
    began = layout(tmp_path / "first")
    assert not began.shared and len({one.number for one in began.states}) == len(programs)
    third = run(spark, tmp_path, "second", 3, restore="savepoint", programs=programs)
    assert layout(tmp_path / "second").shared
    assert all_of(second, third) == truth(3, (*programs, odd_ones))


@pytest.mark.nightly
def test_a_log_with_a_scan_for_each_branch_goes_on(spark: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Until a savepoint begins another log."""

    def alone(graph: Any, paths: Any) -> Any:
        return [(len(path.steps), [[number]]) for number, path in enumerate(paths)]

    programs = (by_field, large, large_windows, by_frame_and_function, joined)
    with monkeypatch.context() as before:
        before.setattr(share_scans, "group_by_common_steps", alone)
        run(spark, tmp_path, "first", 1, programs=programs)
    began = layout(tmp_path / "first")
    assert Counter(scan.uid for scan in began.scans) == {"orders": 4, "orders#2": 1, "": 1}
    second = run(spark, tmp_path, "first", 2, savepoint="savepoint", programs=programs)
    third = run(spark, tmp_path, "second", 3, restore="savepoint", programs=programs)
    scans = (scan.uid for scan in layout(tmp_path / "second").scans if scan.role is not ScanRole.SEED)
    assert Counter(scans) == SCANS
    assert all_of(second, third) == truth(3, (*programs, odd_ones))


@pytest.mark.nightly
def test_branches_of_dataframe_functions_share_a_scan(spark: Any, tmp_path: Path) -> None:
    """Without a function of Python among them; one that is not done row by row has its own."""

    def moved(orders: Any) -> Any:
        return orders.transform(lambda df: df.repartition(2)).key_by("user").sum("amount", uid="moved")

    programs = (by_field, by_frame, windows, by_expression)
    run(spark, tmp_path, "first", 1, programs=programs)
    second = run(spark, tmp_path, "first", 2, programs=programs)
    began = layout(tmp_path / "first")
    assert Counter(scan.uid for scan in began.scans) == {"orders": 1, "": 1}
    assert all_of(second) == truth(2, (*programs, odd_ones))
    spread = environment(spark, tmp_path / "spread")
    others = spread.from_collection(ROWS, ORDERS, uid="orders")
    for program in (by_field, by_frame, moved):
        program(others).sink_to(MemorySink(f"{tmp_path}/{program.__name__}"), uid=f"to-{program.__name__}")
    assert spread.get_job_graph().scans == {"orders": 2}


@pytest.mark.nightly
def test_groups_that_a_program_names_have_tasks_of_their_own(spark: Any, tmp_path: Path) -> None:
    """As with Flink's slot sharing groups: only operators of one group share."""
    env, sinks = environment(spark, tmp_path / "job"), {}
    orders = env.from_collection(ROWS, ORDERS, uid="orders").assign_timestamps_and_watermarks(BY_AT)
    for program in PROGRAMS:
        stream = program(orders)
        if program in (windows, sessions):
            stream = stream.slot_sharing_group("windows")
        if program is folded:
            stream = stream.slot_sharing_group("alone")
        sinks[program] = MemorySink(f"{tmp_path}/{program.__name__}")
        stream.sink_to(sinks[program], uid=f"to-{program.__name__}")
    shared = {one.uid: one.shares for one in env.get_job_graph().operators if one.has_state}
    env.execute()
    assert layout(tmp_path / "job").shared[1:] == (("windows", "sessions"),)
    assert [uid for uid, first in shared.items() if not first] == ["by-field", "folded", "windows"]
    for program, sink in sinks.items():
        harness = ProgramHarness(
            lambda given, own=program: own(given.assign_timestamps_and_watermarks(BY_AT)), ORDERS
        )
        harness.push_all([(row, None) for row in ROWS])
        harness.end_of_input()
        assert Counter(map(tuple, sink.rows())) == Counter(map(tuple, harness.take().rows)), program.__name__
