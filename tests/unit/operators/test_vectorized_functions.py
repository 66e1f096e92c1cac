"""Vectorised functions with timers, side outputs and event times, beside the same function row by row."""

from __future__ import annotations

import datetime
import random
from collections import namedtuple
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from flinkish_spark import (
    KeyedProcessFunction,
    ListStateDescriptor,
    OutputTag,
    StateTtl,
    TtlUpdate,
    ValueStateDescriptor,
    VectorizedProcessFunction,
)
from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.operators.vectorized import greatest_by_key, sum_by_key
from flinkish_spark.state.codec import StateValueError
from flinkish_spark.state.key_group import BasePolicy
from flinkish_spark.types.rows import OutputError
from tests.support.effort import seeds
from tests.support.operator_harness import OperatorHarness, VectorizedHarness

ORDERS, ALARMS = "user STRING, amount LONG", "user STRING, total LONG, at LONG"
REFUSED = OutputTag("refused", "user STRING, amount LONG")
#: Whatever is stored goes into a base at once.
TINY = BasePolicy(smallest_bytes=1, smallest_delta_rows=1)
DELAY_MS = 7
Order = namedtuple("Order", "user amount")


def to_batch(ctx, *columns, names):
    return pa.RecordBatch.from_arrays([*ctx.index.keys, *map(pa.array, columns)], names=["user", *names])


class Alarms(VectorizedProcessFunction):
    """Says a key's total when nothing has come for a while; negative amounts go to the side."""

    event_time = "at"

    def open(self, context):
        context.get_state(ValueStateDescriptor("kept", "total LONG, last LONG"))

    def process_batch(self, batch, ctx):
        amounts = batch.column("amount").to_numpy()
        is_refused = pa.array(amounts < 0)
        if (amounts < 0).any():
            ctx.output(REFUSED, batch.filter(is_refused))
        kept, index = ctx.state("kept"), ctx.index
        there = kept.exists.copy()
        total = kept.numbers(0) + sum_by_key(index, np.maximum(amounts, 0))
        before = kept.numbers(1)
        last = np.maximum(np.where(there, before, -(1 << 62)), greatest_by_key(index, ctx.times_ms))
        moved = ~there | (last != before)
        ctx.delete_event_time_timers(before + DELAY_MS, there & moved)
        ctx.register_event_time_timers(last + DELAY_MS, moved)
        kept.put([total, last])

    def on_timers(self, domain, ctx):
        assert domain is TimeDomain.EVENT_TIME
        kept = ctx.state("kept")
        total = kept.numbers(0)
        kept.remove(np.ones(len(ctx.index), dtype=bool))
        return [to_batch(ctx, total, greatest_by_key(ctx.index, ctx.times_ms), names=["total", "at"])]


class AlarmsByRow(KeyedProcessFunction):
    def open(self, context):
        self.kept = context.get_state(ValueStateDescriptor("kept", "total LONG, last LONG"))

    def process_element(self, order, ctx):
        total, last = self.kept.value() or (0, None)
        timers = ctx.timer_service()
        if order.amount < 0:
            ctx.output(REFUSED, order)
        if last is None or ctx.timestamp() > last:
            if last is not None:
                timers.delete_event_time_timer(last + DELAY_MS)
            last = ctx.timestamp()
            timers.register_event_time_timer(last + DELAY_MS)
        self.kept.update((total + max(order.amount, 0), last))

    def on_timer(self, time_ms, ctx):
        total, _ = self.kept.value()
        self.kept.clear()
        yield ctx.get_current_key(), total, time_ms


def alarms(**more):
    return VectorizedHarness(Alarms(), ORDERS, ALARMS, "user", side_outputs=[REFUSED], **more)


@pytest.mark.parametrize("seed", seeds(6))
def test_timers_by_column_fire_as_those_by_row_do_over_restores(seed) -> None:
    rng = random.Random(seed)
    policy = TINY if seed % 2 else None
    by_column = alarms(policy=policy)
    by_row = OperatorHarness(AlarmsByRow(), key=lambda order: order.user, key_type="STRING")
    seen, expected, now_ms = [], [], 0
    for _ in range(40):
        rows = [
            ((rng.choice(["ann", "ben", None, "cid"]), rng.randrange(-2, 9)), now_ms + rng.randrange(12))
            for _ in range(rng.randrange(6))
        ]
        by_column.push_all(rows)
        by_row.push_all([(Order(*row), time_ms) for row, time_ms in rows])
        now_ms += rng.randrange(10)
        by_column.watermark(now_ms)
        by_row.watermark(now_ms)
        for harness, found in ((by_column, seen), (by_row, expected)):
            output = harness.take()
            found.append(
                (sorted(map(tuple, output.rows), key=str), sorted(map(str, output.side.get("refused", []))))
            )
            assert sorted(output.times_ms) == sorted(row[2] for row in output.rows)
        waiting = [last + DELAY_MS for _, last in by_column.entries("kept").values()]
        assert by_column.next_due_ms(TimeDomain.EVENT_TIME) == min(waiting, default=None)
        by_column = alarms(policy=policy, restore=by_column.snapshot(), bases=by_column.bases)
    assert [rows for rows, _ in seen] == [rows for rows, _ in expected]
    assert sum(len(side) for _, side in seen) == sum(len(side) for _, side in expected)


class Again(VectorizedProcessFunction):
    """Registers what is due at once, by both clocks."""

    def process_batch(self, batch, ctx):
        ctx.register_processing_time_timers(5)
        ctx.register_event_time_timers(np.array([3] * len(ctx.index)))
        ctx.register_event_time_timers(3)
        ctx.register_event_time_timers(9)
        ctx.delete_event_time_timers(9)
        ctx.delete_processing_time_timers(99)

    def on_timers(self, domain, ctx):
        if domain is TimeDomain.EVENT_TIME and ctx.times_ms.min() < 6:
            ctx.register_event_time_timers(ctx.times_ms[ctx.index.first] + 1)
        count = len(ctx.times)
        return [
            pa.RecordBatch.from_arrays(
                [pa.array([domain.value] * count), ctx.times, pa.array([ctx.watermark_ms] * count)],
                names=["domain", "at", "watermark"],
            )
        ]


def test_timers_that_are_due_at_once_fire_in_the_same_round() -> None:
    run = VectorizedHarness(Again(), ORDERS, "domain STRING, at LONG, watermark LONG", "user")
    run.push_all([(("ann", 1), 1)])
    run.watermark(5)
    assert [row[1:] for row in run.take().rows] == [(3, 5), (4, 5), (5, 5)]
    run.processing_time(7)
    assert run.take().rows == [("PROCESSING_TIME", 5, 5)]
    run.watermark(50)
    assert run.take().rows == [("EVENT_TIME", 6, 50)]
    assert run.next_due_ms(TimeDomain.EVENT_TIME) is run.next_due_ms(TimeDomain.PROCESSING_TIME) is None


class Copies(VectorizedProcessFunction):
    def __init__(self, event_time, column=None):
        self.event_time, self.column = event_time, column

    def process_batch(self, batch, ctx):
        if self.column is None:
            yield batch
        else:
            yield batch.append_column("at", pa.array([self.column] * batch.num_rows))


@pytest.mark.parametrize(
    ("event_time", "column", "times"),
    [
        (None, None, [None, None]),
        ("amount", None, [5, 3]),
        ("at", 11, [11, 11]),
        ("at", datetime.datetime.fromtimestamp(-0.0005, datetime.UTC), [-1, -1]),
        ("at", None, [None, None]),
    ],
)
def test_a_column_says_the_event_time_and_is_taken_off_if_it_is_not_declared(
    event_time, column, times
) -> None:
    run = VectorizedHarness(Copies(event_time, column), ORDERS, ORDERS, "user", max_parallelism=1)
    run.push_all([(("ann", 5), 1), (("ann", 3), 2)])
    output = run.take()
    assert (output.rows, output.times_ms) == ([("ann", 5), ("ann", 3)], times)


def test_rows_on_both_sides_of_the_watermark_are_worked_on_apart() -> None:
    class Sides(VectorizedProcessFunction):
        def process_batch(self, batch, ctx):
            yield to_batch(ctx, [ctx.watermark_ms] * len(ctx.index), names=["at"])

    run = VectorizedHarness(Sides(), ORDERS, "user STRING, at LONG", "user")
    run.watermark(10)
    run.micro_batch([(("ann", 1), 25)], before=[(("ann", 2), 11)], watermark_ms=20)
    assert run.take().rows == [("ann", 10), ("ann", 20)]


@pytest.mark.parametrize(
    ("emitted", "says"),
    [
        (lambda batch, ctx: [("ann", 1)], "emitted a tuple; emit batches: pyarrow.RecordBatch or pandas"),
        (
            lambda batch, ctx: [batch.select(["user"])],
            "emitted the columns user, but the declared columns are user, amount",
        ),
        (
            lambda batch, ctx: ctx.output(REFUSED, batch.select(["user"])),
            "to the side output 'refused': emitted the columns user",
        ),
        (
            lambda batch, ctx: [batch.append_column("at", pa.array(["x"] * batch.num_rows))],
            "wrong event time: 'at' is string",
        ),
    ],
)
def test_what_is_not_as_it_was_declared_is_named_and_nothing_has_happened(emitted, says) -> None:
    class Wrong(VectorizedProcessFunction):
        event_time = "at"

        def open(self, context):
            context.get_state(ValueStateDescriptor("seen", "LONG"))

        def process_batch(self, batch, ctx):
            ctx.state("seen").put([np.ones(len(ctx.index), dtype=np.int64)])
            return emitted(batch, ctx)

    run = VectorizedHarness(Wrong(), ORDERS, ORDERS, "user", side_outputs=[REFUSED])
    with pytest.raises(OutputError, match=says):
        run.push_all([(("ann", 1), 1)])
    assert run.entries("seen") == {}
    assert run.take().rows == []


def test_timers_need_a_method_that_is_called_for_them() -> None:
    class Silent(VectorizedProcessFunction):
        def process_batch(self, batch, ctx):
            ctx.register_event_time_timers(5)

    run = VectorizedHarness(Silent(), ORDERS, ORDERS, "user")
    with pytest.raises(TypeError, match=r"has the method on_timers\(domain, ctx\)"):
        run.push_all([(("ann", 1), 1)])


def test_times_of_timers_are_whole_numbers() -> None:
    class Half(Again):
        def process_batch(self, batch, ctx):
            ctx.register_event_time_timers(np.array([0.5] * len(ctx.index)))

    with pytest.raises(TypeError, match="whole numbers, not float64"):
        VectorizedHarness(Half(), ORDERS, ORDERS, "user").push_all([(("ann", 1), 1)])


def test_times_of_timers_are_at_most_the_end_of_time() -> None:
    class Late(Again):
        def process_batch(self, batch, ctx):
            ctx.register_event_time_timers(np.array([1 << 63] * len(ctx.index), dtype=np.uint64))

    with pytest.raises(ValueError, match="a timer's time is 9223372036854775808; 64 bits"):
        VectorizedHarness(Late(), ORDERS, ORDERS, "user").push_all([(("ann", 1), 1)])


@pytest.mark.parametrize("policy", [None, TINY], ids=["in one piece", "in two layers"])
@pytest.mark.parametrize(
    ("update", "found"),
    [(TtlUpdate.ON_CREATE_AND_WRITE, [1, 1, None]), (TtlUpdate.ON_READ_AND_WRITE, [1, 1, 1])],
)
def test_a_read_begins_the_time_to_live_anew_if_it_is_a_touch(update, found, policy) -> None:
    class Once(VectorizedProcessFunction):
        def open(self, context):
            ttl = StateTtl(100, update)
            context.get_state(ValueStateDescriptor("first", "LONG", ttl=ttl))

        def process_batch(self, batch, ctx):
            first = ctx.state("first")
            if batch.column("amount")[0].as_py():
                first.put([batch.column("amount")])
            yield to_batch(ctx, first.column(), names=["first"])

    run = VectorizedHarness(Once(), ORDERS, "user STRING, first LONG", "user", policy=policy)
    for now_ms, amount in ((0, 1), (60, 0), (120, 0)):
        run.processing_time(now_ms)
        run.push_all([(("ann", amount), None)])
    assert [row[1] for row in run.take().rows] == found


def test_a_list_whose_elements_expire_is_no_column() -> None:
    class Lists(VectorizedProcessFunction):
        def open(self, context):
            context.get_list_state(ListStateDescriptor("seen", "LONG", StateTtl(100)))

        def process_batch(self, batch, ctx):
            yield to_batch(ctx, ctx.state("seen").column(), names=["seen"])

    run = VectorizedHarness(Lists(), ORDERS, "user STRING, seen ARRAY<LONG>", "user")
    with pytest.raises(ValueError, match="state 'seen' has elements that expire one by one"):
        run.push_all([(("ann", 1), None)])


def test_a_state_that_is_asked_for_twice_in_a_call_is_one_state() -> None:
    class Twice(VectorizedProcessFunction):
        def open(self, context):
            context.get_state(ValueStateDescriptor("seen", "LONG"))

        def process_batch(self, batch, ctx):
            first, is_new = ctx.state("seen"), ~ctx.state("seen").exists
            seen = first.numbers()
            ctx.state("seen").put([seen + 1], is_new)
            first.put([seen + 1], ~is_new)

    run = VectorizedHarness(Twice(), ORDERS, ORDERS, "user", max_parallelism=1)
    for users in ("df", "abcdef"):
        run.push_all([((user, 1), 1) for user in users])
    assert run.entries("seen") == {"a": 1, "b": 1, "c": 1, "d": 2, "e": 1, "f": 2}


def putting(kind, columns, *where):
    """A function that puts columns into a state of two keys, in the order of their hashes: ann, ben."""

    class Puts(VectorizedProcessFunction):
        def open(self, context):
            context.get_state(ValueStateDescriptor("kept", kind))

        def process_batch(self, batch, ctx):
            assert ctx.index.keys[0].to_pylist() == ["ann", "ben"]
            ctx.state("kept").put(columns, *where)

    return VectorizedHarness(Puts(), ORDERS, ORDERS, "user", max_parallelism=1)


@pytest.mark.parametrize(
    ("kind", "columns", "says"),
    [
        ("LONG", [pa.array([None, "7"])], "the value of key 'ben': the column has the type string.*: '7'"),
        ("LONG", [np.array([1, np.nan])], "the value of key 'ben': Float value nan was truncated"),
        ("LONG", [[1, 2.5]], "the value of key 'ben': .*2.5: it is a float"),
        ("n INT, m INT", [[1, 2], np.array([1, 1 << 40])], "field 'm' of key 'ben': .*not in range"),
        (
            "DECIMAL(10,2)",
            [np.array([1, 1.239])],
            "the value of key 'ann': the column has the type double, but",
        ),
        (
            "DOUBLE",
            [pa.array([Decimal("1.1"), None])],
            "the value of key 'ann': the column has the type decimal",
        ),
        (
            "ARRAY<TIMESTAMP_NTZ>",
            [pa.array([[0], [1]], pa.list_(pa.timestamp("us", "Europe/Berlin")))],
            "the value of key 'ann': the column has the type list",
        ),
        (
            "TIMESTAMP",
            [np.array([1000, 1], "M8[ns]")],
            "the value of key 'ben': Casting from timestamp.ns. to",
        ),
        ("LONG", [np.array([1, 2.0**53])], "the value of key 'ben': it is a float so great"),
        ("FLOAT", [np.array([1, 1e300])], "the value of key 'ben': it is beyond what a FLOAT can be"),
        ("TIMESTAMP", [np.array([1, 2])], "the value of key 'ann': the column has the type int64"),
        (
            "STRING",
            [pd.Series([True, False])],
            "the value of key 'ann': the column has the type bool, but the declared type is string: True",
        ),
        ("LONG", [np.array([1, 2, 3])], "the value: 3 values for 2 of the keys"),
        ("LONG", [5], "the value: int: "),
        ("n INT, m INT", [[1, 2]], "it is a list of 2 columns: n, m; 1 columns came"),
        ("LONG", np.array([1]), "it is a list of 1 columns; ndarray came"),
    ],
)
def test_columns_that_a_state_cannot_have_are_refused_by_name(kind, columns, says) -> None:
    run = putting(kind, columns)
    with pytest.raises(StateValueError, match=f"state 'kept' got a wrong value: {says}"):
        run.push_all([(("ann", 1), None), (("ben", 1), None)])


def test_the_key_of_a_wrong_value_is_known_where_only_some_get_one() -> None:
    only_ben = np.array([False, True])
    for columns in ([[1.5]], [[0, 1.5]], [np.array([0, 1.5])], [np.array([1.5])]):
        with pytest.raises(StateValueError, match="of key 'ben'"):
            putting("LONG", columns, only_ben).push_all([(("ann", 1), None), (("ben", 1), None)])
    with pytest.raises(
        StateValueError, match="state 'kept': the array that selects keys has type bool and shape"
    ):
        run = putting("LONG", [[1, 2]], np.array([True, True, True]))
        run.push_all([(("ann", 1), None), (("ben", 1), None)])


@pytest.mark.parametrize(
    ("kind", "column", "found"),
    [
        ("LONG", pd.Series([np.nan, 2.0]), {"ann": None, "ben": 2}),
        ("LONG", pd.Series([np.nan, 2], dtype=object), {"ann": None, "ben": 2}),
        ("STRING", pd.Series(pd.Categorical(["x", "y"])), {"ann": "x", "ben": "y"}),
        ("MAP<STRING, INT>", [{"a": 1}, None], {"ann": {"a": 1}, "ben": None}),
        ("ARRAY<INT>", pd.Series([[1], None]), {"ann": [1], "ben": None}),
        (
            "DATE",
            pd.Series(pd.to_datetime(["2026-01-02", None])),
            {"ann": datetime.date(2026, 1, 2), "ben": None},
        ),
        ("LONG", pa.chunked_array([[1], [2]]), {"ann": 1, "ben": 2}),
        ("DOUBLE", pa.array([1, 2], pa.int8()), {"ann": 1.0, "ben": 2.0}),
    ],
)
def test_columns_may_come_in_any_form(kind, column, found) -> None:
    run = putting(kind, [column])
    run.push_all([(("ann", 1), None), (("ben", 1), None)])
    assert run.entries("kept") == found


@pytest.mark.parametrize(
    ("absent", "found"), [(0, [0, 7]), (-1, [-1, 7]), (0.5, [0.5, 7]), (np.nan, [np.nan, 7])]
)
def test_what_stands_for_an_absent_number_is_not_cut(absent, found) -> None:
    seen = []

    class Looks(VectorizedProcessFunction):
        def open(self, context):
            context.get_state(ValueStateDescriptor("kept", "LONG"))

        def process_batch(self, batch, ctx):
            assert ctx.index.keys[0].to_pylist() == ["ann", "ben"]
            kept = ctx.state("kept")
            kept.put([[7]], np.array([False, True]))
            seen.append(kept.numbers(absent=absent))

    run = VectorizedHarness(Looks(), ORDERS, ORDERS, "user", max_parallelism=1)
    run.push_all([(("ann", 1), None), (("ben", 1), None)])
    np.testing.assert_array_equal(seen[0], found)
    assert seen[0].dtype == (np.int64 if float(absent).is_integer() else np.float64)
