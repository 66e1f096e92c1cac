"""Running aggregates: one by one and over columns, beside one model."""

from __future__ import annotations

import datetime
import decimal
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from flinkish_spark.core.elements import MIN_WATERMARK_MS, Progress
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.functions.aggregates import AggregateColumn, ElementChoice, FieldAggregate, Fold, Ties
from flinkish_spark.operators.aggregates import AggregateOperator, ReduceOperator, make_element_reduce
from flinkish_spark.operators.columnar_aggregates import (
    AGGREGATE,
    AggregateColumns,
    AggregatedRows,
    AggregateOverflow,
    MergePartials,
    ReducedRows,
    combine,
    make_element_aggregation,
    merge,
)
from flinkish_spark.operators.process import ElementError, GroupRun, KeyedStreamOperator
from flinkish_spark.state import StateTtl
from flinkish_spark.state.key_group import BasePolicy, GroupLayout, GroupState
from flinkish_spark.state.layered import KeyIndex, group_numbers
from flinkish_spark.transport import columns as C
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import ElementType
from flinkish_spark.worker.columns_runner import ColumnsRunner
from flinkish_spark.worker.runners import InputShape, RowShape
from tests.support.effort import examples
from tests.support.joins_support import harness
from tests.support.operator_harness import MemoryBases
from tests.support.windows_support import TINY, Sum

D = decimal.Decimal
NAN = float("nan")
#: DDL of the field that is folded, and what it may be.
FIELDS = {
    "LONG": st.integers(-(1 << 40), 1 << 40),
    "INT": st.integers(-1000, 1000),
    "DOUBLE": st.sampled_from([0.5, 1.0, -2.25, NAN, math.inf]),
    "DECIMAL(9, 2)": st.integers(-9999, 9999).map(lambda n: D(n) / 100),
    "STRING": st.sampled_from(["", "a", "b", "ü"]),
    "BOOLEAN": st.booleans(),
    "DATE": st.integers(0, 3).map(lambda n: datetime.date(2020, 1, 1 + n)),
    "TIMESTAMP": st.integers(0, 3).map(lambda n: datetime.datetime(2020, 1, 1 + n, tzinfo=datetime.UTC)),
}
SUMMED = ("LONG", "INT", "DOUBLE", "DECIMAL(9, 2)")
AGGREGATES = [
    *(FieldAggregate(fold, "v") for fold in (Fold.SUM, Fold.MIN, Fold.MAX)),
    *(ElementChoice(fold, "v", ties) for fold in (Fold.MIN, Fold.MAX) for ties in Ties),
]


def rank(value):
    return (1, 0) if isinstance(value, float) and math.isnan(value) else (0, value)


def expected(aggregate, rows):
    """Return the running aggregate of rows (k, n, v): by its definition, from all of them."""
    there = [row for row in rows if row[2] is not None]
    if isinstance(aggregate, ElementChoice):
        if not there:
            return rows[0] if aggregate.ties is Ties.FIRST else rows[-1]
        ranks = [rank(row[2]) for row in there]
        best = min(ranks) if aggregate.fold is Fold.MIN else max(ranks)
        same = [row for row in there if rank(row[2]) == best]
        return same[0] if aggregate.ties is Ties.FIRST else same[-1]
    values = [row[2] for row in there]
    folded = None
    if values:
        folded = {
            Fold.SUM: lambda: sum(values[1:], values[0]),
            Fold.MIN: lambda: min(values, key=rank),
            Fold.MAX: lambda: max(values, key=rank),
        }[aggregate.fold]()
    return (*rows[0][:2], folded)


def plain(rows):
    """Return rows in which NaN is the same as NaN."""
    return [tuple("NaN" if isinstance(v, float) and math.isnan(v) else v for v in row) for row in rows]


@st.composite
def cases(draw):
    kind = draw(st.sampled_from(list(FIELDS)))
    usable = [one for one in AGGREGATES if kind in SUMMED or one.fold is not Fold.SUM]
    values = st.one_of(st.none(), FIELDS[kind])
    row = st.tuples(st.sampled_from(["a", "b", None]), values)
    batches = draw(st.lists(st.lists(row, min_size=1, max_size=6), max_size=5))
    numbers = iter(range(1_000))
    batches = [[(key, next(numbers), value) for key, value in batch] for batch in batches]
    return kind, draw(st.sampled_from(usable)), batches


class Declaring(KeyedStreamOperator):
    """Only declares what a vectorised function does."""

    def __init__(self, function):
        self.function = function

    def open(self, states, context, timers):
        self.function.open(states)

    def processors(self):
        return ()

    def on_timer(self, timer, domain):
        return None


class Vectorised:
    """Both steps over batches; state through the stored form each time."""

    def __init__(self, aggregation, input_type, ttl=None):
        self.aggregation, self.value, self.bases = aggregation, None, MemoryBases()
        self.schema = pa.schema(
            [(one.name, arrow_type(one.dataType)) for one in ElementType(input_type).fields]
        )
        states = GroupRun(Declaring(MergePartials(aggregation, ttl)), "op", 4).states
        self.layout = GroupLayout.of(states, [T.StringType()])

    def batch(self, rows):
        columns = list(zip(*rows, strict=True))
        return pa.RecordBatch.from_arrays(
            [pa.array(column, field.type) for column, field in zip(columns, self.schema, strict=True)],
            schema=self.schema,
        )

    def run(self, *parts, now_ms=0):
        """Combine each part, merge all at once; return the result by key."""
        keys, partials = [], []
        for rows in parts:
            batch = self.batch(rows)
            groups, first = group_numbers([batch.column("k")])
            keys.append(batch.column("k").take(pa.array(first)))
            partials.append(combine(self.aggregation, batch, groups, first))
        key = pa.concat_arrays(keys)
        hashes = np.array([{None: -7, "a": 3, "b": 11}[one] for one in key.to_pylist()])
        index = KeyIndex.of(hashes, [key])
        state = GroupState(self.layout, self.value, self.bases)
        stored = state.columns(AGGREGATE, index, now_ms)
        result = merge(self.aggregation, pa.concat_batches(partials), index, stored)
        self.value = state.dump(0, TINY, 0)
        found = list(zip(*(column.to_pylist() for column in result.columns), strict=True))
        return dict(zip(index.keys[0].to_pylist(), found, strict=True))


@settings(max_examples=examples(60), deadline=None)
@given(cases(), st.data())
def test_both_forms_do_what_the_model_says(case, data) -> None:
    kind, aggregate, batches = case
    input_type = f"k STRING, n LONG, v {kind}"
    columns = Vectorised(make_element_aggregation(aggregate, input_type), input_type)

    def make(**given):
        return harness(ReduceOperator(make_element_reduce(aggregate, input_type), input_type), **given)

    single, seen = make(), {}
    for batch in batches:
        cut = data.draw(st.integers(0, len(batch)))
        parts = [part for part in (batch[:cut], batch[cut:]) if part]
        after = columns.run(*parts)
        for row in batch:
            seen.setdefault(row[0], []).append(row)
            single.push(row)
            assert plain(single.take().rows) == plain([expected(aggregate, seen[row[0]])])
        single = make(restore=single.snapshot(), bases=single.bases)
        assert set(after) == {row[0] for row in batch}
        for key, row in after.items():
            assert plain([row]) == plain([expected(aggregate, seen[key])])


def test_a_table_of_aggregates_counts_too() -> None:
    input_type = "k STRING, v INT, w DOUBLE"
    table = AggregateColumns(
        [
            AggregateColumn("rows", Fold.COUNT),
            AggregateColumn("there", Fold.COUNT, "v"),
            AggregateColumn("least", Fold.MIN, "w"),
            AggregateColumn("first", Fold.FIRST, "v"),
            AggregateColumn("total", Fold.SUM, "v"),
        ],
        input_type,
    )
    assert table.state_type() == "rows bigint, there bigint, least double, first int, total int"
    run = Vectorised(table, input_type)
    first = run.run([("a", None, 1.0), ("b", 2, None)], [("a", 3, 0.5)])
    assert first == {"a": (2, 1, 0.5, None, 3), "b": (1, 1, None, 2, 2)}
    assert run.run([("a", 4, 0.75)]) == {"a": (3, 2, 0.5, None, 7)}


def test_one_column_alone_is_kept_as_it_is() -> None:
    one = AggregateColumns([AggregateColumn("total", Fold.SUM, "v")], "k STRING, v LONG")
    run = Vectorised(one, "k STRING, v LONG")
    assert (one.state_type(), run.run([("a", 2)]), run.run([("a", 3)])) == (
        "bigint",
        {"a": (2,)},
        {"a": (5,)},
    )


def test_the_second_step_runs_where_functions_over_columns_run() -> None:
    input_type = "k STRING, n LONG, v DOUBLE"
    aggregation = make_element_aggregation(FieldAggregate(Fold.MAX, "v"), input_type)
    came = InputShape(pa.schema([]), ("k", "n", "v"), ("c0", "c1", "c2"), ("c0",))
    shape = RowShape((came,), (T.StringType(),), (parse_ddl(input_type),))
    runner = ColumnsRunner(MergePartials(aggregation), "op", 4, shape)
    value, seen = None, []
    for rows in ([("a", 1, 0.5), ("b", 2, NAN), ("a", 3, 1.5)], [("a", 4, 1.0), ("b", 5, 9.0)]):
        batch = pa.RecordBatch.from_arrays(
            [pa.array(one) for one in zip(*rows, strict=True)], ["k", "n", "v"]
        )
        partials = combine(aggregation, batch, *group_numbers([batch.column("k")]))
        hashes = pa.array([len(key) + ord(key[0]) for key in partials.column("k").to_pylist()])
        arrays = [hashes, *partials.columns]
        given = pa.RecordBatch.from_arrays(arrays, names=[C.KEY_HASH, "c0", "c1", "c2"])
        group = GroupState(runner.layout, value, MemoryBases())
        out = list(runner.process([given], group, Progress(MIN_WATERMARK_MS, MIN_WATERMARK_MS, 0)))
        value = group.dump(0, BasePolicy(), 0)
        seen.append(
            plain(zip(*(column.to_pylist() for one in out for column in one.rows.columns), strict=True))
        )
    assert seen == [[("a", 1, 1.5), ("b", 2, "NaN")], [("a", 1, 1.5), ("b", 2, "NaN")]]


def test_a_reduction_of_ones_own_over_columns() -> None:
    run = Vectorised(ReducedRows(lambda a, b: (a.k, a.n * 10 + b.n), "k STRING, n LONG"), "k STRING, n LONG")
    parts = [[("a", 1), ("b", 7), ("a", 2)], [("a", 3)]]
    assert run.run(*parts) == {"a": ("a", 123), "b": ("b", 7)}
    assert run.run([("b", 1), (None, 5)]) == {"b": ("b", 71), None: (None, 5)}
    alone = ReducedRows(max, "LONG")
    batch = pa.RecordBatch.from_pydict({"value": [3, 5, 4]})
    assert alone.state_type() == "bigint"
    groups = group_numbers([pa.array(["a", "a", "b"])])
    assert combine(alone, batch, *groups).to_pydict() == {"value": [5, 4]}
    nothing = combine(alone, batch.slice(0, 0), *group_numbers([pa.array([], pa.string())]))
    assert nothing.to_pydict() == {"value": []}


def test_an_aggregate_function_over_columns_merges_accumulators() -> None:
    class Average(Sum):
        def get_result(self, accumulator):
            return accumulator[0] / accumulator[1]

    average = AggregatedRows(Average(), "k STRING, n LONG", "total LONG, rows LONG")
    run = Vectorised(average, "k STRING, n LONG")
    assert run.run([("a", 1), ("b", 7)], [("a", 2)]) == {"a": (3, 2), "b": (7, 1)}
    merged = run.run([("a", 6), ("b", 8)])
    assert merged == {"a": (9, 3), "b": (15, 2)}
    rows = list(zip(*merged.values(), strict=True))
    assert average.results(pa.RecordBatch.from_arrays([pa.array(one) for one in rows], ["x", "y"])) == [
        3.0,
        7.5,
    ]


BIG = 1 << 62


@pytest.mark.parametrize(
    ("kind", "values", "total"),
    [
        ("LONG", [BIG, BIG - 1, BIG, -BIG], 2 * BIG - 1),
        ("LONG", [BIG, BIG], None),
        ("LONG", [-BIG, -BIG, -1], None),
        ("LONG", [-BIG, -BIG], -2 * BIG),
        ("INT", [2**31 - 1, 1], None),
        ("INT", [-(2**31), 1, 0], -(2**31) + 1),
        ("TINYINT", [127, 1], None),
        ("DECIMAL(38, 0)", [D(9 * 10**37), D(9 * 10**37)], None),
        ("DECIMAL(38, 0)", [D(9 * 10**37), D(10**37 - 1)], D(10**38 - 1)),
        ("DECIMAL(4, 2)", [D("99.99"), D("0.01")], None),
        ("DECIMAL(4, 2)", [D("99.98"), D("0.01")], D("99.99")),
    ],
)
@pytest.mark.parametrize("at_once", [True, False], ids=["in one batch", "in one batch each"])
def test_a_sum_is_exact_or_an_error(kind, values, total, at_once) -> None:
    input_type = f"k STRING, v {kind}"
    aggregate = FieldAggregate(Fold.SUM, "v")
    run = Vectorised(make_element_aggregation(aggregate, input_type), input_type)
    single = harness(ReduceOperator(make_element_reduce(aggregate, input_type), input_type))
    rows = [("a", value) for value in values]
    if total is None:
        with pytest.raises(AggregateOverflow, match="the sum of the field 'v' leaves its type"):
            for part in [rows] if at_once else [[row] for row in rows]:
                run.run(part)
        with pytest.raises(ElementError, match="the sum of the field 'v' leaves its type"):
            single.push_all([(row, None) for row in rows])
        return
    # Of values in one batch the sum may leave 64 bits on the way; one by one it may not.
    is_wide_on_the_way = values[:2] == [BIG, BIG - 1]
    parts = [rows] if at_once or is_wide_on_the_way else [[row] for row in rows]
    assert [run.run(part)["a"][1] for part in parts][-1] == total
    if not is_wide_on_the_way:
        single.push_all([(row, None) for row in rows])
        assert single.take().rows[-1][1] == total


def test_an_aggregate_function_emits_for_each_element_and_its_state_expires() -> None:
    def make(**given):
        return harness(AggregateOperator(Sum(), "total LONG, n LONG", StateTtl(10)), **given)

    one = make()
    one.push_all([(("a", 1), None), (("b", 5), None), (("a", 2), None)])
    assert sorted(one.take().rows) == [(1, 1), (3, 2), (5, 1)]
    one.processing_time(9)
    one.push(("a", 4))
    assert one.take().rows == [(7, 3)]
    one = make(restore=one.snapshot(), bases=one.bases)
    one.processing_time(12)
    one.push_all([(("a", 8), None), (("b", 1), None)])
    assert sorted(one.take().rows) == [(1, 1), (15, 4)]


def test_a_reduction_of_ones_own_has_names_and_expires() -> None:
    def make(**given):
        reduce = lambda a, b: (a.k, a.n + b[1])  # noqa: E731
        return harness(ReduceOperator(reduce, "k STRING, n LONG", StateTtl(10)), **given)

    one = make()
    one.push(("a", 1))
    one = make(restore=one.snapshot(), bases=one.bases)
    one.push(("a", 2))
    one.processing_time(10)
    one.push(("a", 4))
    assert one.take().rows == [("a", 3), ("a", 4)]


def test_over_columns_a_key_s_aggregate_expires_like_one_by_one() -> None:
    input_type, ttl = "k STRING, v LONG", StateTtl(10)
    total = FieldAggregate(Fold.SUM, "v")
    run = Vectorised(make_element_aggregation(total, input_type), input_type, ttl)

    def make(**given):
        return harness(ReduceOperator(make_element_reduce(total, input_type), input_type, ttl), **given)

    single = make()
    for at, now_ms in enumerate((0, 5, 9, 15, 24, 25, 40, 49, 59)):
        rows = [(key, 1 << at) for key in ("a", "b") if key == "a" or at % 3 == 0]
        single.processing_time(now_ms)
        single.push_all([(row, None) for row in rows])
        assert run.run(rows, now_ms=now_ms) == {row[0]: tuple(row) for row in single.take().rows}
        single = make(restore=single.snapshot(), bases=single.bases)


TYPE = "k STRING, v INT, tags ARRAY<STRING>"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FieldAggregate(Fold.COUNT, "v"), "Fold.SUM, Fold.MIN or Fold.MAX"),
        (lambda: FieldAggregate("SUM", "v"), "Fold.SUM"),
        (lambda: FieldAggregate(Fold.SUM, 1), "give the name of a field"),
        (lambda: ElementChoice(Fold.SUM, "v"), "Fold.MIN or Fold.MAX"),
        (lambda: ElementChoice(Fold.MIN, "v", True), "Ties.FIRST, Ties.LAST"),
        (
            lambda: make_element_reduce(FieldAggregate(Fold.SUM, "w"), TYPE),
            "They have k, v, tags",
        ),
        (
            lambda: make_element_reduce(FieldAggregate(Fold.SUM, "k"), TYPE),
            "field 'k', which is string",
        ),
        (lambda: make_element_aggregation(ElementChoice(Fold.MIN, "tags"), TYPE), "which is array<string>"),
        (lambda: make_element_aggregation(FieldAggregate(Fold.SUM, "v"), "LONG"), "They have no fields"),
    ],
)
def test_an_aggregate_that_cannot_be_is_refused_where_it_is_said(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
