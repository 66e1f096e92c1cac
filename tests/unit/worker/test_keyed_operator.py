"""The keyed operator without Spark: frames in, frames and state bytes out."""

from __future__ import annotations

import gc
import json
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark import KeyedProcessFunction, ListStateDescriptor, OutputTag, ValueStateDescriptor
from flinkish_spark.checkpoint.failures import classify
from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.core.errors import USER_FUNCTION_MARKER
from flinkish_spark.functions.keyed import KeyedCoProcessFunction
from flinkish_spark.operators.process import KeyedProcessOperator
from flinkish_spark.operators.vectorized import VectorizedProcessFunction, sum_by_key
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.state.group_values import describe_group
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import (
    BEHIND,
    EMITTED,
    PACKED,
    BlockPacker,
    BlockRow,
    BlockUnpacker,
    TimeReport,
    from_block,
    to_block,
    to_frame,
)
from flinkish_spark.transport.columns import Origins
from flinkish_spark.transport.routing import Routing, place_of, spark_hash_int
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.exact_columns import is_of_kind
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.worker.keyed_operator import KeyedOperator, KeyedOperatorSpec, OperatorError, SharedTasks
from flinkish_spark.worker.runners import InputShape, RowShape

INPUT = T.StructType(
    [
        *[T.StructField(name, T.LongType()) for name in (C.KEY_HASH, C.CHANNEL, C.SEQUENCE)],
        T.StructField("c0", T.StringType()),
        T.StructField("c1", T.LongType()),
    ]
)
LATE = OutputTag("late", "user STRING")


class State:
    def __init__(self):
        self.value = None

    @property
    def exists(self):
        return self.value is not None

    @property
    def get(self):
        return self.value

    def update(self, value):
        self.value = value


class RunningTotal(KeyedProcessFunction):
    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "total LONG, orders LONG"))

    def process_element(self, order, ctx):
        if order.amount == 13:
            raise RuntimeError("unlucky")
        total, orders = self.total.value() or (0, 0)
        self.total.update((total + order.amount, orders + 1))
        yield ctx.get_current_key(), total + order.amount, orders + 1


def operator(
    function=None,
    output="user STRING, total LONG, orders LONG",
    channels=frozenset({0}),
    sides=(),
    is_behind_operator=False,
    inputs=1,
):
    function = function or RunningTotal()
    is_plain = isinstance(function, KeyedProcessFunction | KeyedCoProcessFunction)
    runs = KeyedProcessOperator(function) if is_plain else function
    came = InputShape(arrow_schema(INPUT), ("user", "amount"), ("c0", "c1"), ("c0",), is_behind_operator)
    shape = RowShape(
        inputs=tuple(replace(came, entry=number) for number in range(inputs)),
        key_types=(T.StringType(),),
        outputs=(parse_ddl(output), *(parse_ddl(tag.output) for tag in sides)),
        side_names=tuple(tag.name for tag in sides),
    )
    return KeyedOperator(
        KeyedOperatorSpec(
            uid="totals",
            bundling=Bundling(128, 1, 128),
            operator=runs,
            shape=shape,
            upstream_channels=(channels,) * inputs,
            bundle_of_route={7: 5},
            barrier_routes={99: 1},
            origins=(Origins(("orders",)),) * inputs,
            reporter=3,
        )
    )


def records(rows, channel=0, start=0, route=7):
    """Rows with a route, as they come to a packer."""
    columns = {
        C.ROUTE: pa.array([route] * len(rows), pa.int32()),
        C.KEY_HASH: pa.array([hash(user) for user, _ in rows], pa.int64()),
        C.CHANNEL: pa.array([channel] * len(rows), pa.int64()),
        C.SEQUENCE: pa.array(range(start, start + len(rows)), pa.int64()),
        "c0": pa.array([user for user, _ in rows], pa.string()),
        "c1": pa.array([amount for _, amount in rows], pa.int64()),
    }
    return pa.RecordBatch.from_pydict(columns)


def frame(rows, channel=0, start=0, number=0):
    """What an operator gets of some rows of one key group."""
    (packed,) = BlockPacker(arrow_schema(INPUT), number=number)(iter([records(rows, channel, start)]))
    return packed.to_pandas()


def control(kind, checkpoint=0, channel=0, sequence=0, block=b""):
    return pd.DataFrame([[99, int(kind), checkpoint, channel, sequence, block]], columns=PACKED.names)


def emitted(op, frames, state):
    """Return what comes out, unpacked."""
    unpacker = BlockUnpacker(op.spec.shape.outputs, (False,) * len(op.spec.shape.outputs))
    out = [pa.RecordBatch.from_pandas(f, arrow_schema(EMITTED)) for f in op((7,), frames, state)]
    return [row for batch in unpacker(iter(out)) for row in batch.to_pylist()]


def run(op, frames, state):
    rows = [row for row in emitted(op, frames, state) if row[C.KIND] == int(C.Kind.RECORD)]
    return [(row["user"], row["total"], row["orders"]) for row in rows]


def test_totals_are_kept_per_key_over_batches_and_null_is_a_key():
    op, state = operator(), State()
    assert run(op, [frame([("a", 1), ("b", 5), (None, 7), ("a", 2)])], state) == [
        ("a", 1, 1),
        ("b", 5, 1),
        (None, 7, 1),
        ("a", 3, 2),
    ]
    assert run(operator(), [frame([("a", 10), (None, 1)])], state) == [("a", 13, 3), (None, 8, 2)]


def test_the_order_of_a_channel_is_restored():
    """Blocks come in any order, and the rows of one block may be mixed."""
    mixed = records([("a", 1), ("a", 2), ("a", 3)]).take(pa.array([2, 0, 1]))
    (rows,) = BlockPacker(arrow_schema(INPUT))(iter([mixed]))
    frames = [frame([("a", 100)], channel=1), frame([("a", 4)], start=9), rows.to_pandas()]
    assert [t for _, t, _ in run(operator(), frames, State())] == [1, 3, 6, 10, 110]


def test_large_integers_survive_beside_nulls():
    big = 2**53 + 1
    assert run(operator(), [frame([("a", big), (None, 1)])], State())[0] == ("a", big, 1)


def barrier(channels, checkpoints=(3,), number=0):
    rows = [control(C.Kind.BARRIER, one, channel, number) for one in checkpoints for channel in channels]
    return pd.concat(rows, ignore_index=True)


@pytest.mark.parametrize(
    "channels,passes", [([0, 1], True), ([1, 0], True), ([0], False), ([0, 1, 1], False), ([0, 2], False)]
)
def test_a_barrier_passes_only_when_every_channel_showed_it_once(channels, passes):
    op = operator(channels=frozenset({0, 1}))
    out = list(op((99,), [barrier(channels)], State()))
    assert len(out) == passes
    if passes:
        assert out[0][C.KIND].tolist() == [1]
        assert (out[0][C.CHECKPOINT][0], out[0][C.CHANNEL][0]) == (3, 1)


def test_barriers_of_two_checkpoints_do_not_pass():
    assert not list(operator()((99,), [barrier([0], (3, 4))], State()))


class Both(KeyedCoProcessFunction):
    """The left side counts, the right side asks."""

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

    def process_element1(self, value, ctx):
        if value.amount == 13:
            raise RuntimeError("unlucky")
        self.total.update(self.total.value() + value.amount)

    def process_element2(self, value, ctx):
        if value.amount == 13:
            raise RuntimeError("unlucky, too")
        yield value.user, self.total.value(), value.amount


def test_two_inputs_share_the_state_of_a_key():
    op, state = operator(Both(), inputs=2), State()
    given = [frame([("a", 1), ("b", 2), ("a", 4)]), frame([("a", -1), ("c", -2)], number=1)]
    assert run(op, given, state) == [("a", 5, -1), ("c", 0, -2)]
    assert run(op, [frame([("b", -3)], number=1)], state) == [("b", 2, -3)]
    with pytest.raises(OperatorError, match='"offset": 1, "error": "RuntimeError: unlucky"'):
        run(op, [frame([("a", 1), ("a", 13)]), frame([("a", 1)], number=1)], state)
    with pytest.raises(OperatorError, match='"offset": 41, "error": "RuntimeError: unlucky, too"'):
        run(op, [frame([("a", 1)]), frame([("a", 1), ("a", 13)], start=40, number=1)], state)


def test_a_barrier_passes_only_when_both_inputs_showed_it():
    op = operator(Both(), inputs=2)
    left, right = barrier([0]), barrier([0], number=1)
    assert len(list(op((99,), [pd.concat([left, right], ignore_index=True)], State()))) == 1
    for missing in (left, right, pd.concat([left, left], ignore_index=True)):
        assert not list(op((99,), [missing], State()))


def test_a_report_passes_by_unchanged():
    (out,) = operator()((99,), [control(17, 5, 6, -7)], State())
    assert out[list(C.CONTROL)].to_numpy().tolist() == [[17, 5, 6, -7]]


def test_a_group_without_timers_reports_nothing():
    rows = emitted(operator(), [frame([("a", 1)])], State())
    assert {row[C.KIND] for row in rows} == {int(C.Kind.RECORD)}


class Alarm(KeyedProcessFunction):
    """Two timers for each element: at its amount, by both clocks."""

    def process_element(self, value, ctx):
        timers = ctx.timer_service()
        if value.amount:
            timers.register_event_time_timer(value.amount)
            timers.register_processing_time_timer(timers.current_processing_time() + value.amount)

    def on_timer(self, time_ms, ctx):
        yield ctx.get_current_key(), time_ms, None


def test_the_next_timers_are_reported_and_a_wake_call_fires_what_is_due():
    op, state = operator(Alarm()), State()
    (report,) = emitted(op, [frame([("a", 10**15), ("b", 10**14)])], state)
    assert (report[C.KIND], report[C.CHANNEL], report[C.CHECKPOINT]) == (C.FIRST_REPORT + 3, 5, 10**14)
    assert report[C.SEQUENCE] > 10**14
    wake = control(C.Kind.WAKE)
    (again,) = emitted(op, [wake], state)
    assert again == report, "nothing was due"


class AtTheEnd(KeyedProcessFunction):
    def process_element(self, value, ctx):
        ctx.timer_service().register_event_time_timer(MAX_WATERMARK_MS)


def test_a_timer_at_the_end_of_time_is_told_from_none():
    """Else its key group would not be called when a bounded input ends: so global windows fire."""
    (report,) = emitted(operator(AtTheEnd()), [frame([("a", 1)])], State())
    assert (report[C.CHECKPOINT], report[C.SEQUENCE]) == (MAX_WATERMARK_MS - 1, MAX_WATERMARK_MS)


def test_a_woken_group_without_state_does_nothing():
    assert emitted(operator(), [control(C.Kind.WAKE)], State()) == []


class Sorts(KeyedProcessFunction):
    def process_element(self, value, ctx):
        ctx.output(LATE, (value.user,))
        ctx.output(OutputTag("nobody reads it", "x LONG"), (1,))
        yield value.user, value.amount, None


def test_side_outputs_come_beside_the_main_one():
    rows = emitted(operator(Sorts(), sides=(LATE,)), [frame([("a", 1), ("b", 2)])], State())
    assert [row["total"] for row in rows if row[C.SIDE] == 0] == [1, 2]
    shape = operator(Sorts(), sides=(OutputTag("late", "who STRING"),)).spec.shape
    parts = BlockUnpacker(shape.outputs, (False, False))
    assert parts.columns.names[-1] == "who"


def test_rows_of_an_operator_stay_on_their_side_of_the_watermark():
    """What fired timers emitted comes before the watermark, and the rest behind it, whatever the order."""
    op = operator(is_behind_operator=True)
    frames = [frame([("a", 1)], start=BEHIND), frame([("a", 10), ("a", 20)])]
    rows = emitted(op, frames, State())
    assert [row["total"] for row in rows] == [10, 30, 31]
    with pytest.raises(OperatorError, match='"offset": 1, "error": "RuntimeError: unlucky"'):
        run(op, [frame([("a", 1)], start=BEHIND), frame([("a", 10), ("a", 13)])], State())


class Totals(VectorizedProcessFunction):
    def __init__(self, names=("user", "total", "orders")):
        self.names = names

    def open(self, context):
        context.get_state(ValueStateDescriptor("total", "LONG"))

    def process_batch(self, batch, ctx):
        total, index = ctx.state("total"), ctx.index
        sums = total.numbers() + sum_by_key(index, batch.column("amount").to_numpy())
        total.put([sums])
        columns = [*index.keys, pa.array(sums), pa.nulls(len(index), pa.int64())]
        yield pa.RecordBatch.from_arrays(columns, names=list(self.names))


def test_a_vectorised_function_gets_columns_and_keeps_state():
    state = State()
    rows = [("a", 1), ("b", 5), (None, 7), ("a", 2)]
    assert sorted(run(operator(Totals()), [frame(rows)], state), key=str) == [
        ("a", 3, None),
        ("b", 5, None),
        (None, 7, None),
    ]
    assert run(operator(Totals()), [frame([("a", 10)])], state) == [("a", 13, None)]
    with pytest.raises(
        OperatorError, match="emitted the columns user, sum, orders, but the declared columns are user, total"
    ):
        run(operator(Totals(("user", "sum", "orders"))), [frame(rows)], State())


class MaybeNone(KeyedProcessFunction):
    def process_element(self, value, ctx):
        yield value.user, [(None if value.amount == 13 else value.amount,)]


@pytest.mark.parametrize("kind", ["user STRING, x ARRAY<STRUCT<n LONG NOT NULL>>"])
def test_a_null_that_must_not_be_names_the_record_that_it_was_emitted_for(kind):
    op = operator(MaybeNone(), output=kind)
    assert len(emitted(op, [frame([("a", 1), ("b", 2)])], State())) == 2
    says = (
        r'"uid": "totals".*"offset": 41, "error": "the function emitted a wrong value: field .x.element.n. is'
    )
    with pytest.raises(OperatorError, match=says):
        run(op, [frame([("a", 1), ("b", 13), ("a", 2)], start=40)], State())


class OneColumn(VectorizedProcessFunction):
    def __init__(self, column):
        self.column = column

    def process_batch(self, batch, ctx):
        yield pa.RecordBatch.from_arrays([self.column], names=["found"])


@pytest.mark.parametrize(
    "column,output,found",
    [
        (pa.array([5], pa.int32()), "found LONG", 5),
        (pa.array([5.0]), "found LONG", 5),
        (pa.array(["a"], pa.large_string()), "found STRING", "a"),
        (pa.array(["a"]).dictionary_encode(), "found STRING", "a"),
        (pa.nulls(1), "found STRING", None),
        (pa.array([[1]], pa.list_(pa.int32())), "found ARRAY<LONG>", [1]),
    ],
)
def test_a_column_gets_the_declared_width(column, output, found):
    rows = emitted(operator(OneColumn(column), output), [frame([("a", 1)])], State())
    assert [row["found"] for row in rows if row[C.KIND] == int(C.Kind.RECORD)] == [found]


def test_what_pandas_makes_of_time_deltas_is_cast():
    assert is_of_kind(pa.duration("ns"), pa.duration("us"))
    assert not is_of_kind(pa.int64(), pa.duration("us"))


@pytest.mark.parametrize(
    "column,output,says",
    [
        (pa.array(["12"]), "found LONG", "field 'found' has the type string, but the declared type is int64"),
        (pa.array([12]), "found STRING", "field 'found' has the type int64, but the declared type is string"),
        (pa.array([True]), "found LONG", "field 'found' has the type bool"),
        (pa.array([1.5]), "found LONG", "field 'found' of 1.5: Float value 1.5"),
        (pa.array([1 << 40]), "found INT", "field 'found' of 1099511627776: Integer value 1099511627776"),
        (pa.array([["1"]]), "found ARRAY<LONG>", "field 'found' has the type list"),
    ],
)
def test_a_column_of_another_kind_is_refused_with_its_field(column, output, says):
    with pytest.raises(OperatorError, match="totals") as failed:
        run(operator(OneColumn(column), output), [frame([("a", 1)])], State())
    assert says in str(failed.value)


def test_a_failing_function_names_the_record():
    with pytest.raises(OperatorError) as failed:
        run(operator(), [frame([("a", 1), ("a", 13)], channel=2, start=40)], State())
    facts = json.loads(str(failed.value).split(" ", 1)[1])
    assert facts == {
        "uid": "totals",
        "topic": "orders",
        "partition": 2,
        "offset": 41,
        "error": "RuntimeError: unlucky",
    }


class Emits(KeyedProcessFunction):
    def __init__(self, row):
        self.row = row

    def process_element(self, value, ctx):
        return [self.row]


@pytest.mark.parametrize(
    "row,says",
    [
        (("a", "many", 1), "field 'total' of type int64 cannot hold 'many'"),
        (("a", 1.5, 1), "field 'total'"),
        (("a", 1), "emitted 2 fields, but 3 are declared"),
        ({"user": "a", "sum": 1}, "emitted the field 'sum'"),
        ("abc", "emitted a str"),
    ],
)
def test_a_wrong_row_is_refused_with_field_and_value(row, says):
    with pytest.raises(OperatorError, match="totals") as failed:
        run(operator(Emits(row)), [frame([("a", 1)])], State())
    assert says in str(failed.value)


class EmitsItsAmount(KeyedProcessFunction):
    """A wrong value where the amount is 13, to one output or the other; from a timer for amounts of 20."""

    def __init__(self, side=None):
        self.side = side

    def process_element(self, value, ctx):
        wrong = "unlucky" if value.amount == 13 else value.amount
        if self.side is not None:
            ctx.output(self.side, (wrong,))
        elif value.amount == 20:
            ctx.timer_service().register_processing_time_timer(0)
        else:
            yield value.user, 0, None
            yield value.user, wrong, None

    def on_timer(self, time_ms, ctx):
        yield ctx.get_current_key(), "late", None


AMOUNTS = OutputTag("amounts", "amount LONG")


@pytest.mark.parametrize("side", [None, AMOUNTS])
def test_a_wrong_row_names_the_record_that_it_came_from(side):
    op = operator(EmitsItsAmount(side), sides=(AMOUNTS,), is_behind_operator=True)
    frames = [frame([("a", 1)], start=BEHIND), frame([("a", 10), ("b", 13), ("c", 1)], channel=2, start=40)]
    state = State()
    with pytest.raises(OperatorError) as failed:
        run(op, frames, state)
    facts = json.loads(str(failed.value).split(" ", 1)[1])
    name, where = ("total", "") if side is None else ("amount", "to the side output 'amounts': ")
    says = f"the function {where}emitted a wrong value: field '{name}' of type int64 cannot hold 'unlucky'"
    assert facts.pop("error").startswith(says)
    assert facts == {"uid": "totals", "topic": "orders", "partition": 2, "offset": 41}
    assert not state.exists


def test_a_wrong_row_of_a_timer_names_the_key_and_the_time():
    op, state = operator(EmitsItsAmount()), State()
    run(op, [frame([("a", 20)])], state)
    with pytest.raises(OperatorError) as failed:
        run(op, [control(C.Kind.WAKE)], state)
    facts = json.loads(str(failed.value).split(" ", 1)[1])
    assert "field 'total' of type int64 cannot hold 'late'" in facts.pop("error")
    assert facts == {"uid": "totals", "key": "'a'", "timer_ms": 0, "time_domain": "PROCESSING_TIME"}
    assert "failed at the timer with key 'a', timer_ms 0" in str(classify(failed.value))
    assert "failed at the timer with key 'a', timer_ms 0" in str(classify(failed.value))


class Counts(KeyedProcessFunction):
    """Not what a function may do: what it emits hangs on itself."""

    calls = 0

    def process_element(self, value, ctx):
        self.calls += 1
        yield value.user, "wrong" if self.calls == 1 else 1, None


def test_a_wrong_row_that_does_not_come_again_is_refused_without_its_record():
    with pytest.raises(OperatorError, match="cannot hold 'wrong'") as failed:
        run(operator(Counts()), [frame([("a", 1)])], State())
    assert "offset" not in str(failed.value)


class Stores(KeyedProcessFunction):
    """Gives its states what they were not declared for."""

    def __init__(self, total, seen):
        self.given = total, seen

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "total LONG, orders LONG"))
        self.seen = context.get_list_state(ListStateDescriptor("seen", "LONG"))

    def process_element(self, value, ctx):
        total, seen = self.given
        self.total.update(total)
        self.seen.add(seen)


@pytest.mark.parametrize(
    "total,seen,says",
    [
        (
            (1, "many"),
            1,
            "state 'total' got a wrong value: field 'orders' of key 'a': type int64 cannot",
        ),
        ((1.5, 2), 1, "state 'total' got a wrong value: field 'total' of key 'a'"),
        ((1, 2), "x", "state 'seen' got a wrong value: the value of key 'a'"),
    ],
)
def test_a_wrong_value_for_a_state_is_the_function_s_fault(total, seen, says):
    """And no damage of what is stored: the job goes on where it was when the function is mended."""
    with pytest.raises(OperatorError, match=re.escape(USER_FUNCTION_MARKER)) as failed:
        run(operator(Stores(total, seen)), [frame([("a", 1)])], State())
    assert says in str(failed.value) and '"uid": "totals"' in str(failed.value)


def test_errors_call_an_operator_by_its_name_too():
    named = KeyedOperator(replace(operator(Emits((1, 2, 3))).spec, name="running totals"))
    with pytest.raises(OperatorError, match=r"the function of operator 'totals' \(running totals\)"):
        run(named, [frame([("a", 1)])], State())


def test_a_function_is_closed_when_a_task_gives_its_operator_up():
    closed = []

    class Closing(Emits):
        def close(self):
            closed.append(True)

    used = operator(Closing({"user": "a"}))
    run(used, [frame([("a", 1)])], State())
    assert not closed
    del used
    gc.collect()
    assert closed == [True]


def test_a_function_that_cannot_be_opened_is_closed_and_named():
    calls = []

    class Unopened(Emits):
        def open(self, context):
            calls.append("open")
            raise LookupError("no table")

        def close(self):
            calls.append("close")
            raise AttributeError("nothing to close")

    with pytest.raises(OperatorError) as failed:
        run(operator(Unopened({"user": "a"})), [frame([("a", 1)])], State())
    assert calls == ["open", "close"]
    assert "open() of operator 'totals' failed. LookupError: no table" in str(classify(failed.value))


def test_a_dict_and_a_missing_field_are_fine():
    assert run(operator(Emits({"user": "a"})), [frame([("a", 1)])], State()) == [("a", None, None)]


def test_nan_and_null_stay_apart():
    op = operator(Emits(("a", math.nan, None)), "user STRING, total DOUBLE, orders DOUBLE")
    ((_, total, orders),) = run(op, [frame([("a", 1)])], State())
    assert math.isnan(total)
    assert orders is None


def test_state_that_came_with_the_first_micro_batch_is_installed():
    state = State()
    run(operator(), [frame([("a", 1)])], state)
    (value,) = state.value
    assert describe_group(value).owner == "totals"
    assert list(describe_group(value).types) == ["total"]
    fresh = State()
    seed = control(C.Kind.STATE, 0, C.STATE_CHANNEL, 5, value)
    assert run(operator(), [frame([("a", 2)]), seed], fresh) == [("a", 3, 2)]
    with pytest.raises(OperatorError, match="got its state twice"):
        run(operator(), [seed], fresh)
    with pytest.raises(OperatorError, match="bundle 5 got the state of key group 6"):
        run(operator(), [control(C.Kind.STATE, 0, C.STATE_CHANNEL, 6, value)], State())
    alone = State()
    assert run(operator(), [seed], alone) == []
    assert alone.value == (value,)
    assert run(operator(), [frame([("a", 2)])], alone) == [("a", 3, 2)]


def test_state_of_another_operator_or_torn_is_refused_although_no_record_needs_it():
    state = State()
    other = operator()
    other.spec = replace(other.spec, uid="other")
    run(other, [frame([("a", 1)])], state)
    (value,) = state.value
    for stored, says in [(value, "belongs to operator 'other', not to 'totals'"), (value[:-3], "torn")]:
        seed = control(C.Kind.STATE, 0, C.STATE_CHANNEL, 5, stored)
        with pytest.raises(OperatorError, match=says):
            run(operator(), [seed], State())


class Renamed(KeyedProcessFunction):
    def open(self, context):
        self.sum = context.get_state(ValueStateDescriptor("sum", "LONG"))

    def process_element(self, value, ctx):
        return ()


class Widened(Renamed):
    def open(self, context):
        self.sum = context.get_state(ValueStateDescriptor("total", "LONG"))


@pytest.mark.parametrize(
    "function,says",
    [(Renamed(), "'total' is no longer declared"), (Widened(), "which have no field in common")],
)
def test_a_declaration_that_does_not_fit_is_refused(function, says):
    state = State()
    run(operator(), [frame([("a", 1)])], state)
    with pytest.raises(OperatorError, match=says):
        run(operator(function), [frame([("a", 1)])], state)


def test_damaged_state_is_found():
    state = State()
    run(operator(), [frame([("a", 1), ("b", 2)])], state)
    (value,) = state.value
    for at in range(0, len(value), 11):
        torn = State()
        torn.value = (value[:at] + bytes([value[at] ^ 0x55]) + value[at + 1 :],)
        with pytest.raises(OperatorError, match="FLINKISH_STATE"):
            run(operator(), [frame([("a", 1)])], torn)


def test_a_packer_tells_records_from_control_rows():
    rows = records([("a", 1), ("b", 2), ("a", 3)])
    kinds = pa.array([0, 1, 0], pa.int32())
    columns = [rows.column(0), kinds, pa.array([0, 9, 0], pa.int64()), *rows.columns[1:]]
    both = pa.RecordBatch.from_arrays(columns, names=[C.ROUTE, C.KIND, C.CHECKPOINT, *INPUT.names])
    barriers, packed = BlockPacker(arrow_schema(INPUT))(iter([both]))
    assert barriers.column(C.CHECKPOINT).to_pylist() == [9]
    (row,) = packed.to_pylist()
    assert (row[C.ROUTE], row[C.KIND]) == (7, 0)


def test_a_packer_reports_the_latest_time_of_each_channel():
    timed = T.StructType([*INPUT.fields, T.StructField(C.TIME, T.LongType())])
    packer = BlockPacker(arrow_schema(timed), TimeReport(2, 77))

    def batch(channel, times):
        rows = records([("a", 1)] * len(times), channel)
        return rows.append_column(C.TIME, pa.array(times, pa.int64()))

    out = list(packer(iter([batch(0, [5, None, 3]), batch(1, [9]), batch(0, [4, 4])])))
    reports = out[-1].select([C.ROUTE, *C.CONTROL]).to_pylist()
    assert [tuple(row.values()) for row in reports] == [(77, 18, 5, 0, 4), (77, 18, 9, 1, 1)]
    assert [row[C.KIND] for one in out[:-1] for row in one.to_pylist()] == [0]
    assert len(list(packer(iter([])))) == 0
    assert len(list(packer(iter([batch(0, [None])])))) == 1, "no time, no report"


def test_a_packer_reports_the_marks_of_a_generator_in_place_of_times():
    timed = T.StructType([*INPUT.fields, T.StructField(C.TIME, T.LongType())])
    packer = BlockPacker(arrow_schema(timed), TimeReport(2, 77))
    none = -(1 << 63)

    def batch(channel, times, marks):
        rows = records([("a", 1)] * len(times), channel)
        for name, values in ((C.TIME, times), (C.MARK, marks)):
            rows = rows.append_column(name, pa.array(values, pa.int64()))
        return rows

    given = [batch(0, [50, 60], [none, 40]), batch(1, [90], [none]), batch(0, [70], [45])]
    block, reports = packer(iter(given))
    rows = [tuple(row.values()) for row in reports.select([C.KIND, C.CHECKPOINT, C.CHANNEL]).to_pylist()]
    assert rows == [(18, 45, 0), (18, none, 1)]
    packed = from_block(block.column(C.BLOCK)[0].as_buffer(), arrow_schema(timed))
    assert packed.column(C.TIME).to_pylist() == [50, 60, 90, 70]


class AtItsTime(KeyedProcessFunction):
    def process_element(self, value, ctx):
        if value.amount:
            ctx.timer_service().register_processing_time_timer(0)
        yield value.user, ctx.timestamp(), None

    def on_timer(self, time_ms, ctx):
        yield ctx.get_current_key(), time_ms, -1


def test_rows_go_out_with_their_times():
    op = operator(AtItsTime())
    timed = T.StructType([*INPUT.fields, T.StructField(C.TIME, T.LongType())])
    came = replace(op.spec.shape.inputs[0], schema=arrow_schema(timed))
    shape = replace(op.spec.shape, inputs=(came,), with_times=True)
    op.spec = replace(op.spec, shape=shape)
    rows = records([("a", 1), ("b", 0)]).append_column(C.TIME, pa.array([1000, None], pa.int64()))
    (packed,) = BlockPacker(arrow_schema(timed))(iter([rows]))
    unpacker = BlockUnpacker(shape.outputs, (True,) * len(shape.outputs))
    out = op((7,), [packed.to_pandas(), control(C.Kind.WAKE)], State())
    batches = [pa.RecordBatch.from_pandas(f, arrow_schema(EMITTED)) for f in out]
    found = [row for one in unpacker(iter(batches)) for row in one.to_pylist()]
    assert [(r[C.TIME], r["user"], r["total"]) for r in found if not r[C.KIND]] == [
        (1000, "a", 1000),
        (None, "b", None),
    ]


def test_packed_rows_keep_their_order_whatever_their_routes():
    rng = np.random.default_rng(3)
    for routes in (rng.integers(0, 40, 1000), rng.integers(60_000, 70_000, 1000)):
        rows = records([(str(n), n) for n in range(1000)])
        rows = rows.set_column(0, C.ROUTE, pa.array(routes, pa.int32()))
        packer = BlockPacker(arrow_schema(INPUT), rows=300)
        found = {}
        for batch in packer(iter([rows.slice(at, 100) for at in range(0, 1000, 100)])):
            for row in batch.to_pylist():
                block = pa.ipc.read_record_batch(pa.py_buffer(row[C.BLOCK]), arrow_schema(INPUT))
                found.setdefault(row[C.ROUTE], []).extend(block.column("c1").to_pylist())
        assert found == {r: np.flatnonzero(routes == r).tolist() for r in set(routes.tolist())}


def test_routes_follow_sparks_hash_and_barriers_come_last():
    # Values of SELECT hash(CAST(n AS INT)) in Spark.
    assert [spark_hash_int(n) for n in (0, 1, -1)] == [933211791, -559580957, -1604776387]
    for partitions in (1, 2, 3, 7):
        routing = Routing(Bundling(128, partitions, 128))
        assert len({*routing.of_group, *routing.of_barrier}) == 128 + partitions
        sizes = [0] * partitions
        for route in routing.of_group:
            partition = spark_hash_int(route) % partitions
            sizes[partition] += 1
            assert route < routing.of_barrier[partition]
        assert max(sizes) - min(sizes) <= 1
        assert [spark_hash_int(r) % partitions for r in routing.of_barrier] == list(range(partitions))


def test_operators_that_share_tasks_have_routes_of_their_own_in_the_same_order():
    for partitions in (1, 3, 40):
        routings = [Routing(Bundling(128, partitions), place) for place in range(3)]
        every = [(*one.of_bundle, *one.of_barrier, *one.of_broadcast) for one in routings]
        assert len({route for own in every for route in own}) == sum(map(len, every))
        for place, (routing, own) in enumerate(zip(routings, every, strict=True)):
            assert {place_of(route) for route in own} == {place}
            for bundle, route in enumerate(routing.of_bundle):
                partition = bundle % partitions
                assert spark_hash_int(route) % partitions == partition
                assert routing.of_broadcast[partition] < 0 <= route < routing.of_barrier[partition]
            partition_of = [spark_hash_int(route) % partitions for route in routing.of_broadcast]
            assert partition_of == list(range(partitions))


def test_a_route_is_called_at_its_operator_and_says_whose_output_comes_out():
    first, second = operator(), operator()
    routing = Routing(Bundling(128, 1, 128), place=1)
    (bundle, at_barrier) = routing.of_bundle[5], routing.of_barrier[0]
    spec = replace(
        second.spec, bundle_of_route={bundle: 5}, barrier_routes={at_barrier: 0}, uid="again", first_output=1
    )
    shared = SharedTasks((first, KeyedOperator(spec)))
    states = State(), State()
    mine = next(shared((7,), [frame([("a", 1)])], states[0]))
    other = next(shared((bundle,), [frame([("a", 5)])], states[1]))
    assert (set(mine[C.SIDE]), set(other[C.SIDE])) == ({0}, {1})
    assert [describe_group(state.get[0]).owner for state in states] == ["totals", "again"]
    (control_rows,) = shared((at_barrier,), [barrier([0], (9,))], State())
    assert control_rows[[C.SIDE, C.KIND, C.CHECKPOINT]].to_numpy().tolist() == [[1, 1, 9]]


def test_what_comes_together_goes_out_in_few_batches():
    two = [T.StructType([T.StructField(name, T.LongType())]) for name in ("x", "y")]
    unpacker = BlockUnpacker(tuple(two), (True, False))
    timed = pa.schema([(C.TIME, pa.int64()), ("x", pa.int64())])
    plain = pa.schema([("y", pa.int64())])
    rows = [
        BlockRow(
            0, 0, 3, 0, to_block(pa.RecordBatch.from_pydict({C.TIME: [7, 8], "x": [1, 2]}, schema=timed)), 0
        ),
        BlockRow(1, 9, 0, 9, b"", 1),
        BlockRow(0, 0, 4, 5, to_block(pa.RecordBatch.from_pydict({"y": [6]}, schema=plain)), 1),
        BlockRow(0, 0, 5, 2, to_block(pa.RecordBatch.from_pydict({C.TIME: [9], "x": [3]}, schema=timed)), 0),
    ]
    found = list(unpacker(iter([pa.RecordBatch.from_pandas(to_frame(rows), arrow_schema(EMITTED))])))
    assert [batch.num_rows for batch in found] == [3, 1, 1]
    assert [row[C.TIME] for batch in found for row in batch.to_pylist()] == [7, 8, 9, None, None]
    said = [
        (r[C.SIDE], r[C.KIND], r[C.CHANNEL], r[C.SEQUENCE], r["x"], r["y"])
        for b in found
        for r in b.to_pylist()
    ]
    assert said == [
        (0, 0, 3, 0, 1, None),
        (0, 0, 3, 1, 2, None),
        (0, 0, 5, 2, 3, None),
        (1, 0, 4, 5, None, 6),
        (1, 1, 0, 9, None, None),
    ]
