"""Folds of windows over columns: types, keys that collide, the watermark, refusals, what travels."""

from __future__ import annotations

import datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from flinkish_spark.core.elements import (
    LATE_RECORDS_DROPPED,
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    OutputTag,
    Progress,
    TimeDomain,
)
from flinkish_spark.core.errors import ConfigError, GraphError, SchemaError
from flinkish_spark.datastream.windowed_stream import WindowedStream
from flinkish_spark.functions.aggregates import AggregateColumn, Fold
from flinkish_spark.operators import columnar_windows
from flinkish_spark.operators.columnar_aggregates import AggregateOverflow
from flinkish_spark.operators.columnar_windows import ELEMENTS, LAST_MS
from flinkish_spark.operators.window_contents import OPEN
from flinkish_spark.operators.windowing import window_operator
from flinkish_spark.planning.factories import FoldingWindows
from flinkish_spark.planning.sent_columns import Transport, plan_window_fold
from flinkish_spark.savepoints.group_edits import next_timers
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.state.key_group import GroupState
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BEHIND, sort_blocks
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.windows import (
    CountEvictor,
    CountTrigger,
    DynamicEventTimeSessionWindows,
    EventTimeSessionWindows,
    EventTimeTrigger,
    GlobalWindows,
    NoEventTime,
    ReduceWindow,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowBounds,
    WindowSpec,
    count_window,
)
from tests.support import operator_harness as columns_harness
from tests.support.operator_harness import FoldHarness, OperatorHarness, Snapshot
from tests.support.windows_support import INPUT, TINY

TOTAL = AggregateColumn("total", Fold.SUM, "n")
COUNT = AggregateColumn("rows", Fold.COUNT)
FIRST = AggregateColumn("first", Fold.FIRST, "n")
AT = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def ms(number):
    return AT + datetime.timedelta(milliseconds=number)


def folding(assigner, *columns, input_type=INPUT, key="k", **given):
    spec = given.pop("spec", None) or WindowSpec(assigner)
    return FoldHarness(spec, columns or (TOTAL, COUNT), input_type, key, max_parallelism=2, **given)


def push(run, *elements):
    """Push (key, number, time)."""
    run.push_all([((key, number), time_ms) for key, number, time_ms in elements])


# -- what comes out -------------------------------------------------------------------------------------
def test_a_row_has_the_key_the_folds_and_the_bounds_at_the_windows_last_instant() -> None:
    run = folding(TumblingEventTimeWindows(10))
    push(run, ("a", 1, 3), (None, 2, 9), ("a", 4, 10))
    run.watermark(9)
    output = run.take()
    assert sorted(output.rows, key=str) == [("a", 1, 1, ms(0), ms(10)), (None, 2, 1, ms(0), ms(10))]
    assert output.times_ms == [9, 9]
    assert run.next_due_ms(TimeDomain.EVENT_TIME) == 19
    run.watermark(MAX_WATERMARK_MS)
    assert run.take().rows == [("a", 4, 1, ms(10), ms(20))]
    assert run.next_due_ms(TimeDomain.EVENT_TIME) is None


def test_late_elements_of_a_micro_batch_fire_their_window_once_more() -> None:
    run = folding(None, spec=WindowSpec(TumblingEventTimeWindows(10), allowed_lateness_ms=5))
    push(run, ("a", 1, 3))
    run.watermark(9)
    push(run, ("a", 2, 4), ("a", 4, 5))
    assert [row[:3] for row in run.take().rows] == [("a", 1, 1), ("a", 7, 3)]
    assert run.next_due_ms(TimeDomain.EVENT_TIME) == 14
    run.watermark(14)
    push(run, ("a", 8, 5), ("b", 8, 5), ("a", 8, 6))
    output = run.take()
    assert (output.rows, output.counts) == ([], {LATE_RECORDS_DROPPED: 3})
    assert run.entries(OPEN) == {}


def test_the_first_is_the_one_that_came_first() -> None:
    for assigner in (SlidingEventTimeWindows(20, 10), EventTimeSessionWindows(20)):
        for late in (None, OutputTag("late", INPUT)):
            run = folding(None, FIRST, spec=WindowSpec(assigner, late_output=late))
            push(run, ("a", 1, 15), ("a", 2, 5), ("b", None, 6), ("b", 4, 2))
            push(run, ("a", 3, 2))
            run.watermark(40)
            firsts = {(row[0], row[1]) for row in run.take().rows}
            assert ("a", 1) in firsts
            assert ("a", 3) not in firsts - {("a", 2)}
            assert ("b", None) in firsts


def test_sessions_merge_over_micro_batches_and_what_they_were_is_gone() -> None:
    run = folding(EventTimeSessionWindows(5), FIRST, TOTAL, policy=TINY)
    push(run, ("a", 1, 0), ("a", 2, 8), ("b", 4, 8))
    push(run, ("a", 8, 4))
    assert set(run.entries(OPEN)) == {("a", (0, 13)), ("b", (8, 13))}
    run.watermark(12)
    assert sorted(run.take().rows) == [("a", 1, 11, ms(0), ms(13)), ("b", 4, 4, ms(8), ms(13))]
    assert run.entries(OPEN) == {}


@pytest.mark.parametrize(("before_ms", "after_ms"), [(10, 20), (20, 10)])
def test_windows_of_an_earlier_program_take_no_elements_of_those_of_another_size(before_ms, after_ms) -> None:
    """They begin at the same time; so it is in one loop, too."""
    run = folding(TumblingEventTimeWindows(before_ms), TOTAL)
    push(run, ("a", 1, 3), ("a", 2, 7))
    after = folding(TumblingEventTimeWindows(after_ms), TOTAL, restore=run.snapshot())
    push(after, ("a", 4, 4))
    after.watermark(MAX_WATERMARK_MS)
    assert sorted(after.take().rows) == [("a", 3, ms(0), ms(before_ms)), ("a", 4, ms(0), ms(after_ms))]


@pytest.mark.parametrize(
    "assigner",
    [
        EventTimeSessionWindows(5),
        EventTimeSessionWindows(MAX_WATERMARK_MS),
        TumblingEventTimeWindows(10, 3),
        TumblingEventTimeWindows(1 << 62, 1 << 61),
        TumblingEventTimeWindows(MAX_WATERMARK_MS, 2 - MAX_WATERMARK_MS),
        SlidingEventTimeWindows(12, 5, -4),
        SlidingEventTimeWindows(3, 7, 6),
    ],
)
@pytest.mark.parametrize(
    "times_ms",
    [
        (MIN_WATERMARK_MS + 5, MAX_WATERMARK_MS - 7),
        (MIN_WATERMARK_MS + 1, MIN_WATERMARK_MS, MAX_WATERMARK_MS - 1, MAX_WATERMARK_MS),
        (-(1 << 62) - 5, (1 << 62) + 5),
        (-1, -10, -11, -3),
    ],
)
def test_times_may_be_anywhere_in_64_bits(assigner, times_ms) -> None:
    """Windows there, and which of them are one, are those of the loop, which reckons with any numbers."""

    def over_columns(rows):
        return rows.key_by("k").window(assigner).sum("n", uid="sums")

    def looped(rows):
        both, bounds = (
            lambda one, other: (one.k, one.n + other.n),
            "window_start TIMESTAMP, window_end TIMESTAMP",
        )
        windows = rows.key_by("k").window(assigner)
        return windows.reduce(both, WindowBounds(), output=f"k STRING, n LONG, {bounds}", uid="sums")

    found = []
    for program in (over_columns, looped):
        run = ProgramHarness(program, "k STRING, n LONG")
        run.push_all([(("a", 1 << at), time_ms) for at, time_ms in enumerate(times_ms)])
        run.end_of_input()
        output = run.take()
        rows = zip(map(tuple, output.rows), output.times_ms, strict=True)
        found.append((sorted(map(repr, rows)), output.counts))
    assert found[0] == found[1]


def test_types_and_what_is_null_survive_the_state() -> None:
    schema = "k INT, n LONG, x DOUBLE, d DECIMAL(10, 2), s STRING, t TIMESTAMP, f FLOAT"
    names = {"n": Fold.SUM, "x": Fold.MAX, "d": Fold.SUM, "s": Fold.MIN, "t": Fold.MAX, "f": Fold.SUM}
    columns = [AggregateColumn(name, fold, name) for name, fold in names.items()]
    run = folding(TumblingEventTimeWindows(10), *columns, input_type=schema)
    run.push_all(
        [((1, None, 1.5, Decimal("1.25"), "b", ms(5), 0.5), 1), ((2, None, None, None, None, None, None), 1)]
    )
    run.push_all([((1, 7, float("nan"), Decimal("2.50"), "a", None, 0.25), 2)])
    run.watermark(9)
    rows = {row[0]: row[1:-2] for row in run.take().rows}
    assert str(rows[1]) == str((7, float("nan"), Decimal("3.75"), "a", rows[1][4], 0.75))
    assert rows[1][4] == ms(5)
    assert rows[2] == (None,) * 6


def test_a_sum_that_leaves_its_type_is_an_error() -> None:
    run = folding(TumblingEventTimeWindows(10))
    push(run, ("a", (1 << 63) - 1, 1))
    with pytest.raises(AggregateOverflow, match="the field 'n'"):
        push(run, ("a", 1, 2))


def test_keys_of_one_hash_are_told_apart(monkeypatch) -> None:
    monkeypatch.setattr(columns_harness, "stable_hash", lambda key: 7)
    for policy in (None, TINY):
        run = folding(EventTimeSessionWindows(5), policy=policy)
        for time_ms in (0, 3, 20):
            push(run, ("a", 1, time_ms), ("b", 2, time_ms), (None, 4, time_ms))
        run.watermark(10)
        assert sorted(row[1:3] for row in run.take().rows) == [(2, 2), (4, 2), (8, 2)]
        run.watermark(30)
        assert sorted(row[1:3] for row in run.take().rows) == [(1, 1), (2, 1), (4, 1)]
        assert run.entries(OPEN) == {}


def test_an_element_without_a_time_cannot_be_in_an_event_time_window() -> None:
    for late in (None, OutputTag("late", INPUT)):
        run = folding(None, spec=WindowSpec(TumblingEventTimeWindows(10), late_output=late))
        with pytest.raises(NoEventTime):
            push(run, ("a", 1, None))
    run = folding(TumblingProcessingTimeWindows(10))
    push(run, ("a", 1, None))
    run.processing_time(9)
    assert [row[:3] for row in run.take().rows] == [("a", 1, 1)]


def test_processing_time_windows_fire_without_elements() -> None:
    run = folding(SlidingProcessingTimeWindows(10, 5))
    run.processing_time(7)
    push(run, ("a", 1, 3))
    assert run.next_due_ms(TimeDomain.PROCESSING_TIME) == 9
    for now_ms in (9, 14, 19):
        run.processing_time(now_ms)
    output = run.take()
    assert (len(output.rows), output.times_ms) == (2, [9, 14])


def test_a_writer_of_savepoints_knows_when_windows_are_due() -> None:
    run = folding(TumblingEventTimeWindows(10))
    push(run, ("a", 1, 3), ("a", 1, 25))
    (value,) = run.snapshot().values.values()
    assert next_timers(value) == (9, None)
    run = folding(TumblingProcessingTimeWindows(10))
    push(run, ("a", 1, 3))
    (value,) = run.snapshot().values.values()
    assert next_timers(value) == (None, 9)


def test_open_windows_go_on_from_a_savepoint_which_knows_no_bases() -> None:
    run = folding(TumblingEventTimeWindows(10), policy=TINY)
    for time_ms in (3, 14, 25):
        push(run, ("a", 1, time_ms), ("b", 2, time_ms + 1))
    run.watermark(9)
    run.take()
    whole = {
        group: GroupState(run._runner.layout, value, run.bases).dump_whole()
        for group, value in run.snapshot().values.items()
    }
    again = folding(TumblingEventTimeWindows(10), restore=Snapshot(whole, 9, 0))
    assert again.entries(OPEN) == run.entries(OPEN)
    push(again, ("a", 4, 12))
    again.watermark(29)
    found = sorted((row[0], row[1], row[3]) for row in again.take().rows)
    assert found == [("a", 1, ms(20)), ("a", 5, ms(10)), ("b", 2, ms(10)), ("b", 2, ms(20))]
    assert again.entries(OPEN) == {}


# -- where it comes out ---------------------------------------------------------------------------------
def test_what_the_watermark_fires_is_before_it_and_what_comes_late_is_behind() -> None:
    run = folding(None, spec=WindowSpec(TumblingEventTimeWindows(10), allowed_lateness_ms=50))
    schema = arrow_schema(run.sent.transport.schema)
    runner, values = run._runner, {}

    def process(behind, before, was_ms, now_ms):
        state = GroupState(runner.layout, values.get(0), run.bases)
        blocks = run._blocks([(one, time_ms) for *one, time_ms in behind], [(one, t) for *one, t in before])
        given = [block for own in blocks.values() for block in own]
        rows = sort_blocks(given, schema) if given else None
        out = list(runner.process([rows], state, Progress(was_ms, now_ms, 0)))
        values[0] = state.dump(0, TINY, 0)
        return [(one.first, one.rows.column("total").to_pylist()) for one in out]

    # The element at 4 is before the watermark 9 and goes with the window; the one at 3 fires it again.
    assert process([("a", 1, 3)], [("a", 2, 4)], -100, 9) == [(0, [2]), (BEHIND, [3])]
    # The former watermark is 9: what is before the new one, and late by that, fires before it.
    assert process([], [("a", 4, 5), ("a", 8, 15)], 9, 19) == [(0, [7]), (1, [8])]
    assert process([], [], 19, 69) == []


def test_one_row_per_key_and_slice_travels() -> None:
    for assigner, parts in ((SlidingEventTimeWindows(12, 4), 3), (EventTimeSessionWindows(3), 1)):
        run = folding(assigner)
        combiner = run.sent.folded.combiner
        rows = run.rows([(("a", n), n) for n in range(12)], BEHIND)
        combined = combiner(rows)
        assert combined.num_rows == parts
        assert combined.schema.names[-4:] == ["p0", "p1", "p2", "p3"]
        assert run.sent.folded.fields[-2:] == (ELEMENTS, LAST_MS)
        assert sum(combined.column("p2").to_pylist()) == 12
        both = pa.concat_batches([rows, run.rows([(("a", 1), 1)], 0)])
        assert combiner(both).num_rows == parts + 1


def test_late_elements_go_out_as_they_came() -> None:
    late = OutputTag("late", "key STRING, n LONG")
    run = folding(None, spec=WindowSpec(TumblingEventTimeWindows(10), late_output=late))
    run.watermark(20)
    push(run, ("a", 1, 3), ("b", 2, 25), ("a", None, 4))
    output = run.take()
    assert sorted(output.side["late"], key=str) == [("a", 1), ("a", None)]
    assert output.counts == {}


# -- refusals -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (WindowSpec(GlobalWindows()), "GlobalWindows"),
        (count_window(3), "CountTrigger|PurgingTrigger"),
        (WindowSpec(TumblingEventTimeWindows(5), CountTrigger(2)), "CountTrigger"),
        (WindowSpec(TumblingEventTimeWindows(5), evictor=CountEvictor(2)), "CountEvictor"),
        (WindowSpec(DynamicEventTimeSessionWindows(lambda e: 5)), "DynamicEventTimeSessionWindows"),
    ],
)
def test_what_cannot_be_folded_is_refused_with_what_to_use(spec, says) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        WindowedStream(None, spec).fold(TOTAL, uid="sums")
    assert "aggregate(), reduce() or process()" in str(refused.value)
    assert "'sums'" in str(refused.value)


def test_the_trigger_that_windows_have_anyway_may_be_named() -> None:
    assert columnar_windows.require_column_windows(
        WindowSpec(EventTimeSessionWindows(5), EventTimeTrigger()), "x"
    )


def test_folds_that_are_none_are_refused() -> None:
    windows = WindowedStream(None, WindowSpec(TumblingEventTimeWindows(5)))
    for wrong in ((), ("total",), (AggregateColumn,)):
        with pytest.raises(ConfigError, match="AggregateColumn"):
            windows.fold(*wrong, uid="sums")
    with pytest.raises(ConfigError, match="'amount'"):
        folding(TumblingEventTimeWindows(5), AggregateColumn("total", Fold.SUM, "amount"))
    for twice in (
        (TOTAL, TOTAL),
        (AggregateColumn("K", Fold.SUM, "n"),),
        (AggregateColumn("window_end", Fold.COUNT),),
    ):
        with pytest.raises((SchemaError, ConfigError)):
            folding(TumblingEventTimeWindows(5), *twice)
    with pytest.raises(SchemaError, match="late"):
        folding(None, spec=WindowSpec(TumblingEventTimeWindows(5), late_output=OutputTag("late", "k STRING")))


def test_event_time_windows_over_a_stream_without_times_are_refused() -> None:
    transport = folding(TumblingEventTimeWindows(5)).transport
    without = Transport(
        (),
        type(transport.schema)([field for field in transport.schema if field.name != C.TIME]),
        transport.field_names,
        transport.key_names,
        transport.key_types,
    )
    given = (parse_ddl(INPUT), ["k"], without)
    with pytest.raises(GraphError, match="assign_timestamps_and_watermarks"):
        plan_window_fold(FoldingWindows(WindowSpec(TumblingEventTimeWindows(5)), (TOTAL,)), "x", *given)
    assert plan_window_fold(
        FoldingWindows(WindowSpec(TumblingProcessingTimeWindows(5)), (TOTAL,)), "x", *given
    )


def test_windows_behind_windows_are_told_how_to_rename_their_bounds() -> None:
    """The greatest sum of each window: both windows have bounds of the same names."""
    hours = TumblingEventTimeWindows(10)

    def sums(orders):
        return orders.key_by("user").window(hours).sum("amount", uid="sums")

    def renamed(orders):
        # As the message says.
        output = "user STRING, amount LONG, hour TIMESTAMP"
        named = sums(orders).map(lambda one: (one.user, one.amount, one.window_end), output=output)
        return named.key_by("hour").window(hours).max_by("amount", uid="top")

    says = r"'window_start' twice.*rename the field .* key_by\(\): map\(lambda one"
    with pytest.raises(SchemaError, match=says):
        ProgramHarness(
            lambda orders: sums(orders).key_by("window_end").window(hours).max_by("amount", uid="top"),
            "user STRING, amount LONG",
        )
    run = ProgramHarness(renamed, "user STRING, amount LONG")
    run.push_all([(("ann", 1), 3), (("bob", 5), 4), (("ann", 3), 7), (("cid", 9), 12)])
    run.end_of_input()
    assert sorted(tuple(row)[:3] for row in run.take().rows) == [("bob", 5, ms(10)), ("cid", 9, ms(20))]


def test_folds_and_windows_element_by_element_do_not_go_on_from_each_other() -> None:
    run = folding(TumblingEventTimeWindows(10))
    push(run, ("a", 1, 3))
    (value,) = run.snapshot().values.values()
    operator = window_operator(WindowSpec(TumblingEventTimeWindows(10)), ReduceWindow(max), INPUT)
    layout = OperatorHarness(operator, key=lambda e: e[0], key_type="STRING")._layout
    with pytest.raises(
        StateMismatch, match="'window/open' is stored as value state and declared as reducing"
    ):
        GroupState(layout, value, run.bases)
