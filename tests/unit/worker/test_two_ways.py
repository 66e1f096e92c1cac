"""Functions between two keyed operators, and ways from one operator that meet again, without Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark.core.arrow_pass import ComposedWorker
from flinkish_spark.core.errors import GraphError, SchemaError
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import CONTROL, BlockPacker, from_block
from flinkish_spark.transport.branches import (
    INPUT,
    ControlRows,
    InputPacker,
    InputPackers,
    InputPath,
    InputPaths,
    ParallelWorkers,
)
from flinkish_spark.types.rows import arrow_schema
from tests.support import two_ways
from tests.support.two_ways import ORDERS, ROWS, TOTALS


def harness_of(program: Any) -> ProgramHarness:
    return ProgramHarness(
        lambda orders: program(orders.assign_timestamps_and_watermarks(two_ways.BY_AT)), ORDERS
    )


def found_by(program: Any) -> list[tuple[Any, ...]]:
    harness = harness_of(program)
    harness.push_all([(row, None) for row in ROWS])
    harness.end_of_input()
    return [tuple(row) for row in harness.take().rows]


def seen(program: Any, user: str) -> str:
    """What the last record of a key has seen, in order."""
    return str([row[1] for row in found_by(program) if row[0] == user][-1])


def test_an_operator_meets_its_side_output_again() -> None:
    counts = [("ann", 3, 1), ("ben", 2, 1), ("cid", 2, 1), ("dan", 1, 0)]
    assert sorted(found_by(two_ways.connected_with_its_side)) == counts
    # Elements of the first stream come first within a micro-batch.
    assert [row for row in found_by(two_ways.counted_by_name) if row[0] == "cid"][-1] == ("cid", 2, 1)
    assert found_by(two_ways.broadcast_to_itself) == [("dan", 20)]
    sums = [row[1] for row in found_by(two_ways.united_with_its_side) if row[0] == "ann"]
    assert sums == [3, 6, 17, 28, 41, 54, 57], "each total twice, then what is odd"


def test_a_stream_is_joined_with_itself_and_with_a_filter_of_itself() -> None:
    pairs = [("ann", 3, "ann", 11), ("ann", 11, "ann", 13), ("ben", 4, "ben", 13), ("cid", 1, "cid", 31)]
    assert sorted(found_by(two_ways.joined_with_itself)) == pairs
    groups = [("ann", 3, 2, 10), ("ben", 2, 1, 10), ("cid", 2, 1, 10), ("dan", 1, 1, 10)]
    assert sorted(found_by(two_ways.grouped_with_its_filter)) == groups


def test_branches_come_record_by_record_in_the_order_of_the_union() -> None:
    assert seen(two_ways.united_branches, "ANN") == " 3 3 3 -11 11 11 11 -13 13 13 13"
    assert seen(two_ways.united_branches, "BEN") == " 4 -13 13 13 13"


def test_functions_between_operators_are_told_times() -> None:
    rows = [("ann", " 3"), ("ann 3", " 11"), ("ann 6", " 13"), ("ben", " 4")]
    assert sorted(found_by(two_ways.mapped_between))[:4] == rows
    assert set(found_by(two_ways.looked_up_between)) == {("Germany", 13), (None, 31)}


@pytest.mark.parametrize("program", two_ways.PROGRAMS)
def test_results_stand_over_crashes_and_snapshots(program: Any) -> None:
    whole, harness = harness_of(program), harness_of(program)
    for at in range(0, len(ROWS), 3):
        part = [(row, None) for row in ROWS[at : at + 3]]
        whole.push_all(part)
        harness.snapshot()
        harness.push_all(part)
        harness.crash()
        harness.push_all(part)
        stored, rows = harness.snapshot(), harness.take()
        harness = ProgramHarness(
            lambda orders: program(orders.assign_timestamps_and_watermarks(two_ways.BY_AT)),
            ORDERS,
            parallelism=at + 1,
            restore=stored,
        )
        assert Counter(map(tuple, rows.rows)) == Counter(map(tuple, whole.take().rows))
    whole.end_of_input()
    harness.end_of_input()
    assert Counter(map(tuple, harness.take().rows)) == Counter(map(tuple, whole.take().rows))


def test_what_cannot_be_is_refused() -> None:
    def fields(orders: Any) -> Any:
        totals = two_ways.totals_of(orders, "totals")
        return (
            totals.union(totals.map(lambda row: (row.user,), output="user STRING"))
            .key_by("user")
            .process(two_ways.Listed(), output="user STRING, seen STRING", uid="listed")
        )

    def frames(orders: Any) -> Any:
        totals = two_ways.totals_of(orders, "totals")
        both = totals.union(totals.transform(lambda frame: frame))
        return both.key_by("user").sum("total", uid="sums")

    for program, error, says in (
        (fields, SchemaError, "operator 'listed' unites a stream of"),
        (frames, GraphError, r"transform\(\) cannot be run in a harness"),
    ):
        with pytest.raises(error, match=says):
            harness_of(program)


def test_an_error_names_the_function_and_not_its_neighbours() -> None:
    def program(orders: Any) -> Any:
        totals = two_ways.totals_of(orders, "totals")
        bad = totals.map(lambda row: (row.user, 1 // (row.total - 13)), output=TOTALS, name="divide")
        return totals.union(bad).key_by("user").sum("total", uid="sums")

    harness = harness_of(program)
    with pytest.raises(ZeroDivisionError) as raised:
        harness.push_all([(row, None) for row in ROWS])
    assert raised.value.__notes__ == ["in the operator 'divide'"]


# -- in a task ------------------------------------------------------------------------------------------

FRAME = T.StructType(
    [
        *CONTROL,
        T.StructField(C.TIME, T.LongType()),
        T.StructField(C.SIDE, T.IntegerType()),
        T.StructField("n", T.LongType()),
        T.StructField("s1_0", T.StringType()),
    ]
)
GIVEN = T.StructType([T.StructField(name, T.LongType()) for name in (C.CHANNEL, C.SEQUENCE, C.TIME)])
LOG: list[str] = []


class Logged:
    """A worker as a function of the user's has one: opened once per task, and closed at its end."""

    def __init__(self, name: str, add: int) -> None:
        self.name, self.add = name, add

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        LOG.append(f"open {self.name}")
        try:
            for batch in batches:
                at = batch.schema.names.index("n")
                added = pa.array(batch.column(at).to_numpy() + self.add)
                yield batch.set_column(at, "n", added)
        finally:
            LOG.append(f"close {self.name}")


def operator_rows(*rows: tuple[Any, ...]) -> pa.RecordBatch:
    columns = [list(column) for column in zip(*rows, strict=True)]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, arrow_schema(FRAME), strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(FRAME))


def record(sequence: int, side: int, n: int | None, text: str | None = None) -> tuple[Any, ...]:
    return int(C.Kind.RECORD), 0, 5, sequence, sequence * 10, side, n, text


BARRIER = (int(C.Kind.BARRIER), 7, 5, 0, None, None, None, None)
WAKE = (int(C.Kind.WAKE), 0, 1, 3, None, None, None, None)


def test_rows_are_dealt_to_inputs_and_functions_are_opened_once() -> None:
    LOG.clear()
    numbers = T.StructType([*GIVEN, T.StructField("n", T.LongType())])
    texts = T.StructType([*GIVEN, T.StructField("text", T.StringType())])
    both = ParallelWorkers((Logged("a", 100), ComposedWorker((Logged("b", 1), Logged("c", 1)))), numbers)
    n, text = T.StructType([numbers["n"]]), T.StructType([texts["text"]])
    deal = InputPaths(
        (
            InputPath(0, ("n",), numbers, ComposedWorker((both,)), n, ("x0",)),
            InputPath(1, ("s1_0",), texts, ComposedWorker(()), text, ("y0",)),
            InputPath(0, ("n",), numbers, ComposedWorker(()), n, ("z0",)),
        ),
        T.StructType([*CONTROL, FRAME[C.TIME]]),
    )
    first = operator_rows(record(0, 0, 1), WAKE, record(0, 1, None, "odd"), record(1, 0, 2))
    second = operator_rows(record(2, 0, 3), BARRIER)
    found = [row for batch in deal(iter([first, second])) for row in batch.to_pylist()]
    assert sorted(LOG) == ["close a", "close b", "close c", "open a", "open b", "open c"]
    records = [row for row in found if row[C.KIND] == 0]
    of_first = [(row[C.SEQUENCE], row[C.TIME], row["x0"]) for row in records if row[INPUT] == 0]
    assert of_first == [(0, 0, 101), (0, 0, 3), (1, 10, 102), (1, 10, 4), (2, 20, 103), (2, 20, 5)]
    assert [row["y0"] for row in records if row[INPUT] == 1] == ["odd"]
    assert [row["z0"] for row in records if row[INPUT] == 2] == [1, 2, 3]
    control = [row for row in found if row[C.KIND] != 0]
    assert [(row[C.KIND], row[C.CHECKPOINT], row[INPUT]) for row in control] == [(2, 0, None), (1, 7, None)]


def test_functions_are_closed_when_one_of_them_fails() -> None:
    LOG.clear()
    numbers = T.StructType([*GIVEN, T.StructField("n", T.LongType())])

    def failing(batches: Any) -> Iterator[pa.RecordBatch]:
        yield next(batches).take([7])

    both = ParallelWorkers((Logged("a", 1), failing), numbers)
    n = T.StructType([numbers["n"]])
    deal = InputPaths(
        (InputPath(0, ("n",), numbers, ComposedWorker((both,)), n, ("x0",)),), T.StructType([*CONTROL])
    )
    with pytest.raises(IndexError):
        list(deal(iter([operator_rows(record(0, 0, 1))])))
    assert LOG == ["open a", "close a"]


def test_a_row_may_be_for_several_inputs_and_a_barrier_is_for_all_of_them() -> None:
    schema = pa.schema([(C.CHANNEL, pa.int64()), (C.SEQUENCE, pa.int64()), ("c0", pa.int64())])
    packers = [BlockPacker(schema, number=number) for number in (0, 3)]
    names = (C.CHANNEL, C.SEQUENCE, "c0")
    deal = InputPackers(
        tuple(
            InputPacker(f"r{at}", (C.CHANNEL, C.SEQUENCE, f"v{at}"), names, packer, takes)
            for at, (packer, takes) in enumerate(
                zip(packers, (ControlRows.ALL, ControlRows.BARRIERS), strict=True)
            )
        )
    )
    rows = [
        # route, kind, checkpoint, channel, sequence, route and value of each input
        (0, 0, 0, 5, 0, 11, 1, 12, -1),
        (0, 0, 0, 5, 1, None, None, 12, -2),
        (0, 0, 0, 5, 2, 11, 3, 13, -3),
        (99, 1, 7, 5, 0, None, None, None, None),
        (98, 2, 0, 1, 3, None, None, None, None),
    ]
    types = [pa.int32(), pa.int32(), *[pa.int64()] * 3, pa.int32(), pa.int64(), pa.int32(), pa.int64()]
    columns = (C.ROUTE, C.KIND, C.CHECKPOINT, C.CHANNEL, C.SEQUENCE, "r0", "v0", "r1", "v1")
    arrays = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, names=columns)
    found = [row for one in deal(iter([batch])) for row in one.to_pylist()]
    blocks = {
        (row[C.ROUTE], row[C.SEQUENCE]): from_block(row[C.BLOCK], schema).column("c0").to_pylist()
        for row in found
        if row[C.KIND] == 0
    }
    assert blocks == {(11, 0): [1, 3], (12, 3): [-1, -2], (13, 3): [-3]}
    control = sorted((row[C.ROUTE], row[C.KIND], row[C.SEQUENCE]) for row in found if row[C.KIND])
    assert control == [(98, 2, 3), (99, 1, 0), (99, 1, 3)], "other control rows pass once"
    assert np.array_equal([row[C.CHECKPOINT] for row in found if row[C.KIND] == 1], [7, 7])
