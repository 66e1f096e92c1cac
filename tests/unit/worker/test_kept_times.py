"""Times of records that a function drops behind a strategy, without Spark."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.joins import LookupTable
from flinkish_spark.joins.lookup import LookupJoin
from flinkish_spark.planning.transforms import make_filter, make_flat_map, make_lookup
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BlockPacker, TimeReport
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.worker.functions import AppendColumns, RowFunction
from flinkish_spark.worker.time import DroppedTimesKeeper

OWN = T.StructType([T.StructField("user", T.StringType(), False), T.StructField("n", T.LongType())])
PLACES = [T.StructField(name, T.LongType(), False) for name in (C.CHANNEL, C.SEQUENCE, C.TIME)]
GIVEN = T.StructType([*OWN, *PLACES])


def batch(*rows: tuple[Any, ...]) -> pa.RecordBatch:
    """Make a batch of (user, n, channel, sequence, time)."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    plain = arrow_schema(GIVEN)
    schema = pa.schema([one.with_nullable(GIVEN[one.name].nullable) for one in plain])
    return pa.RecordBatch.from_arrays([*map(pa.array, columns)], schema=schema)


def worker_of(transform: Any, given: T.StructType = GIVEN) -> DroppedTimesKeeper:
    return DroppedTimesKeeper(*transform._make_row_worker(transform.function, given))


def rows_of(found: Any) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for one in found for row in one.to_pylist()]


ROWS = batch(
    ("ann", 1, 0, 10, 100), ("bob", 2, 0, 11, 300), ("bob", 3, 1, 12, 900), ("ann", 4, 0, 13, 200),
    ("ann", 5, 2, 14, 700), ("bob", 6, 2, 15, 600),
)  # fmt: skip
ONLY_ANN = make_filter(lambda one: one.user == "ann", None)


def test_the_greatest_times_of_what_is_dropped_stay() -> None:
    worker = worker_of(ONLY_ANN)
    assert all(field.nullable for field in worker.columns)
    batches = list(worker(iter([ROWS.slice(0, 3), ROWS.slice(3)])))
    found = rows_of(batches)
    # Spark takes no batch whose schema is another one, be it in what may be null.
    assert len({one.schema for one in batches}) == 1
    kept = [("ann", 1, 0, 10, 100), ("ann", 4, 0, 13, 200), ("ann", 5, 2, 14, 700)]
    # Of channel 2 a later one was kept.
    times = [(None, None, 0, None, 300), (None, None, 1, None, 900)]
    assert found == [*kept[:1], *times, *kept[1:]], "with the batch in which they were dropped, and once"


def test_no_function_sees_them_and_the_next_passes_them_on() -> None:
    first = list(worker_of(ONLY_ANN)(iter([ROWS])))
    nothing = make_flat_map(lambda one: [], "user STRING, n LONG", None)
    found = rows_of(worker_of(nothing)(iter(first)))
    assert found == [(None, None, 0, None, 300), (None, None, 1, None, 900), (None, None, 2, None, 700)]
    only_times = [one.filter(one.column(C.SEQUENCE).is_null()) for one in first]
    assert rows_of(worker_of(ONLY_ANN)(iter(only_times))) == [
        (None, None, 0, None, 300),
        (None, None, 1, None, 900),
    ]
    made = T.StructType([T.StructField("key", T.LongType())])
    keyed = AppendColumns(RowFunction("key", lambda one: (one.n * 2,)), GIVEN, made, ("_fs_key0",))
    assert [row[-1] for row in rows_of(keyed(first))] == [2, 8, 10, None, None]


def test_a_lookup_join_drops_records_and_keeps_their_times() -> None:
    class OnlyAnn(LookupTable):
        def lookup(self, keys):
            assert None not in keys
            return {"ann": [(7,)]}

    joined = make_lookup(
        LookupJoin("user STRING, n LONG", "number LONG", lambda one: one.user, OnlyAnn()), None, "known"
    ).keep_times()
    first = list(worker_of(make_filter(lambda one: one.n != 6, None))(iter([ROWS])))
    worker, columns = joined.make_worker(GIVEN)
    found = rows_of(DroppedTimesKeeper(worker, columns)(iter(first)))
    kept = [("ann", 1, 7, 0, 10, 100), ("ann", 4, 7, 0, 13, 200), ("ann", 5, 7, 2, 14, 700)]
    assert found == [*kept, (None, None, None, 0, None, 300), (None, None, None, 1, None, 900)]


def test_they_are_reported_and_go_nowhere_else() -> None:
    first = list(worker_of(ONLY_ANN)(iter([ROWS])))
    routed = [one.add_column(0, C.ROUTE, pa.array([3] * one.num_rows, pa.int32())) for one in first]
    packer = BlockPacker(arrow_schema(GIVEN), TimeReport(0, 7))
    found = [row for one in packer(iter(routed)) for row in one.to_pylist()]
    reports = {row[C.CHANNEL]: (row[C.CHECKPOINT], row[C.SEQUENCE]) for row in found if row[C.ROUTE] == 7}
    # By channel the greatest time, and how many records there were behind the function.
    assert reports == {0: (300, 2), 1: (900, 0), 2: (700, 1)}
    (block,) = [row for row in found if row[C.ROUTE] == 3]
    assert pa.ipc.read_record_batch(pa.py_buffer(block[C.BLOCK]), arrow_schema(GIVEN)).num_rows == 3


def test_of_a_generator_the_greatest_mark_stays_too() -> None:
    given = T.StructType([*GIVEN, T.StructField(C.MARK, T.LongType())])
    rows = ROWS.append_column(C.MARK, pa.array([50, 250, 800, 250, 10, 10]))
    found = rows_of(worker_of(ONLY_ANN, given)(iter([rows])))
    assert found[3:] == [(None, None, 0, None, 300, None), (None, None, 1, None, 900, 800)]
