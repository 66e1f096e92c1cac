"""Projections and filters over Arrow columns, beside control rows and times that are kept."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.transport import columns as C
from flinkish_spark.transport.select import SelectColumns
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.expressions import Call, ColumnReference, Constant, FieldOf

BID = pa.struct([("a", pa.int64()), ("p", pa.string())])
CONTROL: T.StructType = parse_ddl("_fs_kind INT, _fs_checkpoint LONG, _fs_channel LONG, _fs_seq LONG")
IS_BID = Call("is_valid", (ColumnReference("bid"),))


def rows(bids: list[Any], kinds: list[int] | None = None) -> pa.RecordBatch:
    count = len(bids)
    own = {
        C.KIND: pa.array(kinds or [0] * count, pa.int32()),
        C.CHECKPOINT: pa.array([7 if kind else 0 for kind in kinds or [0] * count]),
        C.CHANNEL: pa.array([3] * count),
        C.SEQUENCE: pa.array(range(count)),
        "bid": pa.array(bids, BID),
    }
    return pa.RecordBatch.from_pydict(own)


def selected(select: SelectColumns, batch: pa.RecordBatch) -> list[dict[str, Any]]:
    (made,) = select(iter([batch]))
    return [{k: v for k, v in row.items() if k not in (C.CHANNEL, C.CHECKPOINT)} for row in made.to_pylist()]


def select(*steps: Any, fields: str, outputs: tuple[str, ...], keeps_times: bool = False) -> SelectColumns:
    columns = T.StructType([*CONTROL, *parse_ddl(fields)])
    return SelectColumns(steps, columns, outputs, keeps_times)


def test_fields_are_chosen_and_rows_dropped_but_for_control_rows() -> None:
    steps = IS_BID, {"m0": FieldOf(ColumnReference("bid"), 0), "m1": Constant(5, T.IntegerType())}
    one = select(*steps, fields="a LONG, five INT", outputs=("m0", "m1"))
    given = rows([{"a": 1, "p": "x"}, None, {"a": None, "p": "y"}, None], [0, 0, 0, 1])
    assert selected(one, given) == [
        {"_fs_kind": 0, "_fs_seq": 0, "a": 1, "five": 5},
        {"_fs_kind": 0, "_fs_seq": 2, "a": None, "five": 5},
        {"_fs_kind": 1, "_fs_seq": 3, "a": None, "five": 5},
    ]
    assert one.find_inputs() == {"a": {"bid"}, "five": set()}


def test_what_is_dropped_of_records_with_times_leaves_a_row_without_place_and_fields() -> None:
    condition = Call("greater", (FieldOf(ColumnReference("bid"), 0), Constant(1, T.LongType())))
    one = select(condition, fields="bid STRUCT<a: LONG, p: STRING>", outputs=("bid",), keeps_times=True)
    given = rows([{"a": 1, "p": "x"}, {"a": 2, "p": "y"}, None])
    dropped = {"_fs_kind": 0, "_fs_seq": None, "bid": None}
    assert selected(one, given) == [
        dropped,
        {"_fs_kind": 0, "_fs_seq": 1, "bid": {"a": 2, "p": "y"}},
        dropped,
    ]


def test_a_condition_that_is_null_keeps_no_record() -> None:
    field = FieldOf(ColumnReference("bid"), 1)
    either = Call(
        "or_kleene", (Call("equal", (field, Constant("x", T.StringType()))), Constant(False, T.BooleanType()))
    )
    one = select(either, fields="bid STRUCT<a: LONG, p: STRING>", outputs=("bid",))
    given = rows([{"a": 1, "p": None}, {"a": 2, "p": "x"}, None])
    assert [row["_fs_seq"] for row in selected(one, given)] == [1]
    always = select(
        Constant(True, T.BooleanType()), fields="bid STRUCT<a: LONG, p: STRING>", outputs=("bid",)
    )
    assert len(selected(always, given)) == 3
