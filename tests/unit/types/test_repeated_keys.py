"""Maps whose keys become one in the declared type are refused where they are stored: nobody can read them."""

from __future__ import annotations

import datetime
import math
import random

import numpy as np
import pyarrow as pa
import pytest

from flinkish_spark import KeyedProcessFunction, ValueStateDescriptor, VectorizedProcessFunction
from flinkish_spark.state.codec import StateValueError
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import OutputError, RowWriter
from flinkish_spark.types.to_arrow import find_repeated_key
from tests.support.effort import seeds
from tests.support.operator_harness import OperatorHarness, VectorizedHarness

MORNING, NOON = datetime.datetime(2026, 1, 1, 6), datetime.datetime(2026, 1, 1, 12)


class Keeps(KeyedProcessFunction):
    def __init__(self, kind):
        self.kind = kind

    def open(self, context):
        self.kept = context.get_state(ValueStateDescriptor("kept", self.kind))

    def process_element(self, element, ctx):
        if element[1] is not None:
            self.kept.update(element[1])
        yield (self.kept.value(),)


@pytest.mark.parametrize(
    ("kind", "value", "key"),
    [
        ("MAP<DATE, LONG>", {MORNING: 1, NOON: 2}, r"datetime.date\(2026, 1, 1\)"),
        ("MAP<FLOAT, LONG>", {0.1: 1, 0.10000000149011612: 2}, "0.10000000149011612"),
        ("MAP<STRING, LONG>", {"a": 1, b"a": 2}, "'a'"),
        ("MAP<TIMESTAMP, LONG>", {MORNING: 1, MORNING.replace(tzinfo=datetime.UTC): 2}, "datetime"),
        ("MAP<LONG, LONG>", [(1, 1), (1, 2)], "1"),
        ("n LONG, days MAP<DATE, LONG>", (1, {MORNING: 1, NOON: 2}), "datetime.date"),
        ("ARRAY<MAP<DATE, STRUCT<m: MAP<STRING, INT>>>>", [{NOON: {"m": {"x": 1, b"x": 2}}}], "'x'"),
    ],
)
def test_a_map_that_would_have_a_key_twice_is_refused_by_state_and_key(kind, value, key) -> None:
    run = OperatorHarness(Keeps(kind), key=lambda element: element[0], key_type="STRING")
    with pytest.raises(StateValueError, match=rf"state 'kept'.* of key 'ann'.*has the key {key}.* twice"):
        run.push_all([(("ben", None), None), (("ann", value), None)])


def test_a_map_with_nan_twice_is_one_that_can_be_read() -> None:
    run = OperatorHarness(Keeps("MAP<DOUBLE, LONG>"), key=lambda element: element[0], key_type="STRING")
    run.push(("ann", {math.nan: 1, float("nan"): 2}))
    run.push(("ann", None))
    assert len(run.take().rows) == 2


def test_rows_and_columns_are_looked_at_too() -> None:
    kind = pa.map_(pa.date32(), pa.int64())
    with pytest.raises(OutputError, match=r"field 'days' .*twice") as caught:
        RowWriter(pa.schema([("days", kind)])).write([({MORNING: 1},), ({MORNING: 1, NOON: 2},)])
    assert caught.value.row == 1

    class Puts(VectorizedProcessFunction):
        def open(self, context):
            context.get_state(ValueStateDescriptor("kept", "MAP<STRING, LONG>"))

        def process_batch(self, batch, ctx):
            maps = [[("a", 1)]] * (len(ctx.index) - 1) + [[("a", 1), ("a", 2)]]
            ctx.state("kept").put([pa.array(maps, pa.map_(pa.string(), pa.int64()))])

    run = VectorizedHarness(Puts(), "user STRING", "user STRING", "user", max_parallelism=1)
    with pytest.raises(StateValueError, match="of key 'ben': a map has the key 'a' twice"):
        run.push_all([(("ann",), None), (("ben",), None)])


@pytest.mark.parametrize("seed", seeds(20))
def test_what_is_found_is_what_a_dict_would_lose(seed) -> None:
    chosen = random.Random(seed)
    kind = pa.map_(pa.int8(), pa.int8())
    rows = [
        chosen.choice([None, [(chosen.randrange(6), 0) for _ in range(chosen.randrange(4))]])
        for _ in range(chosen.randrange(1, 8))
    ]
    column = pa.array(rows, kind)
    first = chosen.randrange(len(rows))
    part = rows[first:]
    lost = [row for row in part if row is not None and len(dict(row)) < len(row)]
    found = find_repeated_key(column.slice(first))
    assert (found is not None) is bool(lost)
    within = find_repeated_key(pa.StructArray.from_arrays([column], names=["m"]).slice(first))
    assert within == found
    lists = pa.ListArray.from_arrays(pa.array(np.arange(len(rows) + 1), pa.int32()), column)
    assert find_repeated_key(lists.slice(first)) == found


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("MAP<STRING, LONG>", [None]),
        ("MAP<STRING, LONG>", (("a", 1), None)),
        ("ARRAY<MAP<STRING, LONG>>", [[None]]),
        ("STRUCT<m: MAP<STRING, LONG>>", ([None],)),
        ("MAP<STRING, MAP<STRING, LONG>>", {"k": [None]}),
    ],
)
def test_a_map_with_none_in_place_of_a_pair_is_refused_and_does_not_end_the_process(kind, value) -> None:
    with pytest.raises(OutputError, match="pairs of a key and a value, and one of them is None"):
        RowWriter.of(parse_ddl(f"v {kind}")).write([(value,)])
