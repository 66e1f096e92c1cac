"""Key groups that are worked on together: put together, taken apart, and called by one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flinkish_spark import KeyedProcessFunction, MapStateDescriptor, ValueStateDescriptor
from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.operators.windowing import window_operator
from flinkish_spark.protocol.event_time import MAX_WATERMARK_MS, TimerReport
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.protocol.records import SinkAck, TaskAck, TimeReport
from flinkish_spark.protocol.time_plan import TimePlan, find_reports, make_reporters
from flinkish_spark.state.group_values import (
    bundle_groups,
    describe_group,
    inline_base,
    unbundle_groups,
)
from flinkish_spark.state.key_group import BasePolicy, GroupState
from flinkish_spark.windows import (
    CountTrigger,
    PurgingTrigger,
    ReduceWindow,
    TumblingEventTimeWindows,
    WindowSpec,
)
from tests.support.operator_harness import MemoryBases, OperatorHarness, Snapshot

BUNDLING = Bundling(key_groups=12, partitions=2, per_partition=2)


class Seen(KeyedProcessFunction):
    """Counts, keeps what it has seen, and has timers of both clocks in the order of registration."""

    def open(self, context: Any) -> None:
        self.n = context.get_state(ValueStateDescriptor("n", "LONG", default=0))
        self.seen = context.get_map_state(MapStateDescriptor("seen", "LONG", "STRING"))

    def process_element(self, value: int, ctx: Any) -> Any:
        self.n.update(self.n.value() + 1)
        self.seen.put(self.n.value(), f"{value}")
        ctx.timer_service().register_event_time_timer(1_000 + value % 3)
        ctx.timer_service().register_processing_time_timer(50_000)
        if value % 4 == 0:
            ctx.timer_service().delete_event_time_timer(1_000 + value % 3)
        yield value, self.n.value()

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        yield ctx.get_current_key(), -time_ms


def harness(
    groups: int, restore: Snapshot | None = None, policy: BasePolicy | None = None
) -> OperatorHarness:
    more = {} if policy is None else {"policy": policy, "bases": MemoryBases()}
    return OperatorHarness(
        Seen(), key=lambda n: n, key_type="LONG", max_parallelism=groups, restore=restore, **more
    )


def layout_of(one: OperatorHarness) -> Any:
    return one._layout


def state_of(one: OperatorHarness) -> tuple[dict[Any, Any], dict[Any, Any], int]:
    return one.entries("n"), one.entries("seen"), one.timer_count()


@pytest.mark.parametrize(
    "policy", [None, BasePolicy(smallest_bytes=1, delta_share=0.0, smallest_delta_rows=0)]
)
def test_what_is_put_together_comes_apart_again(policy: BasePolicy | None) -> None:
    run = harness(12, policy=policy)
    for number in (*range(80), *range(0, 80, 5)):
        run.push(number)
    snapshot = run.snapshot()
    whole = {group: inline_base(value, run.bases) for group, value in snapshot.values.items()}
    apart: dict[int, bytes] = {}
    for bundle in range(BUNDLING.bundles):
        own = [whole[group] for group in BUNDLING.groups_of(bundle) if group in whole]
        value = bundle_groups(layout_of(run), own)
        assert describe_group(value) == describe_group(own[0])
        parts = unbundle_groups(value, "operator", BUNDLING)
        assert set(parts) == {group for group in BUNDLING.groups_of(bundle) if group in whole}
        apart |= parts
    again = harness(12, replace(snapshot, values=apart))
    assert state_of(again) == state_of(run)
    # Timers fire in the order in which they would have.
    for one in (run, again):
        one.take()
        one.watermark(10_000)
    assert sorted(run.take().rows) == sorted(again.take().rows)


def test_a_bundle_has_the_timers_of_all_of_its_groups_and_each_a_place_of_its_own() -> None:
    run = harness(12)
    for number in range(60):
        run.push(number)
    values = [run.snapshot().values[group] for group in BUNDLING.groups_of(1)]
    state = GroupState(layout_of(run), bundle_groups(layout_of(run), values), MemoryBases())
    for domain in TimeDomain:
        rows = list(state.timer_rows(domain))
        places = {row.value[0] for row in rows}
        assert len(places) == len(rows) and state.timers.registered[domain] > max(places)
        alone = [GroupState(layout_of(run), value, MemoryBases()) for value in values]
        assert {row.slot for row in rows} == {row.slot for one in alone for row in one.timer_rows(domain)}


def test_windows_have_places_of_their_own_in_a_bundle_and_behind_it() -> None:
    spec = WindowSpec(TumblingEventTimeWindows(10), PurgingTrigger(CountTrigger(2)))
    operator = window_operator(spec, ReduceWindow(max), "user STRING, n LONG")
    run = OperatorHarness(operator, key=lambda e: e[0], key_type="STRING", max_parallelism=12)
    run.push_all([((f"u{number % 40}", number), 0) for number in range(60)])
    values, layout = run.snapshot().values, layout_of(run)
    own = [values[group] for group in BUNDLING.groups_of(1)]
    bundle = bundle_groups(layout, own)
    parts = unbundle_groups(bundle, "operator", BUNDLING)
    for stored, windows in ((bundle, own), *((part, [values[group]]) for group, part in parts.items())):
        state = GroupState(layout, stored, MemoryBases())
        rows = {row.slot: row.value for row in state.rows("window/open")}
        places = {place for _, place, _ in rows.values()}
        assert len(places) == len(rows) and state.timers.registered[TimeDomain.EVENT_TIME] > max(places)
        alone = [row for one in windows for row in GroupState(layout, one, MemoryBases()).rows("window/open")]
        # What a trigger has purged is nothing behind that, too.
        assert {slot: value[::2] for slot, value in rows.items()} == {
            row.slot: row.value[::2] for row in alone
        }
        assert windows is not own or any(value is None for _, _, value in rows.values())


def test_hashes_below_zero_have_the_key_group_that_spark_gives_them() -> None:
    hashes = np.array([-1, -13, 5, -(1 << 63)], dtype=np.int64)
    assert np.mod(hashes, 12).tolist() == [11, 11, 5, 4]


@given(groups=st.integers(1, 200), partitions=st.integers(1, 40), per=st.integers(1, 8))
def test_each_key_group_is_in_one_bundle_of_its_partition(groups: int, partitions: int, per: int) -> None:
    bundling = Bundling(groups, partitions, per)
    found = [group for bundle in range(bundling.bundles) for group in bundling.groups_of(bundle)]
    assert sorted(found) == list(range(groups))
    assert all(group % partitions == bundling.bundle_of(group) % partitions for group in found) or (
        bundling.bundles == groups
    )
    sizes = [len(bundling.groups_of(bundle)) for bundle in range(bundling.bundles)]
    assert max(sizes) - min(sizes) <= 1


# -- calls ------------------------------------------------------------------------------------------------


PLAN = TimePlan(
    make_reporters(["sums"], ["orders"]),
    {"out": ("sums",)},
    {"sums": ("sums",)},
    bundlings={"sums": BUNDLING},
)


def test_a_report_is_for_all_key_groups_of_a_bundle_and_so_is_a_call() -> None:
    report = TimeReport(0, 1, 60_000, MAX_WATERMARK_MS)
    _, timers = find_reports(PLAN, [SinkAck("out", (TaskAck(0, 1, 0, reports=(report,)),))])
    assert timers == tuple(TimerReport("sums", group, 60_000, None) for group in (1, 5, 9))
    assert PLAN.number_groups({("sums", 5), ("sums", 9), ("sums", 2)}) == {0: frozenset({1, 2})}
    silent = PLAN.report_silent_groups([(0, 1), (0, 2)], timers)
    assert silent == tuple(TimerReport("sums", group, None, None) for group in (2, 6, 10))


def test_calls_of_before_reach_the_bundles_that_key_groups_are_in_now() -> None:
    """What a job without bundles has stored about timers is about key groups, as it is now."""
    _, timers = find_reports(
        replace(PLAN, bundlings={}),
        [SinkAck("out", (TaskAck(0, 1, 0, reports=(TimeReport(0, 7, 5, MAX_WATERMARK_MS),)),))],
    )
    assert timers == (TimerReport("sums", 7, 5, None),)
    assert PLAN.number_groups([(one.operator, one.group) for one in timers]) == {0: frozenset({3})}
