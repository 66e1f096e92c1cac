"""Event times out of a column: what Spark's `unix_millis` says, and none of control rows."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from flinkish_spark.core.errors import BadRecordError
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.worker.time import TimestampsFromColumn


def taken(column: pa.Array, **more: pa.Array) -> list[Any]:
    (made,) = TimestampsFromColumn("at")(iter([pa.record_batch({"at": column, **more})]))
    found: list[Any] = made.column(C.TIME).to_pylist()
    assert made.schema.names[-1] == C.TIME and made.column("at").equals(column)
    return found


def test_a_time_is_rounded_down_also_before_1970() -> None:
    micros = [0, 1_999, -1, -1_000, -1_001, 253_402_300_799_999_999]
    times = pa.array(micros, pa.int64()).view(pa.timestamp("us", "UTC"))
    assert taken(times) == [0, 1, -1, -1, -2, 253_402_300_799_999]


def test_a_number_is_milliseconds() -> None:
    assert taken(pa.array([5, -7], pa.int64())) == [5, -7]


@pytest.mark.parametrize("kind", [pa.int64(), pa.timestamp("us", "Europe/Berlin")])
def test_a_record_without_a_time_is_bad(kind: pa.DataType) -> None:
    with pytest.raises(BadRecordError, match="its event time is null"):
        taken(pa.array([5, None], pa.int64()).cast(kind))


def test_a_control_row_has_none() -> None:
    kinds = pa.array([0, 1], pa.int32())
    assert taken(pa.array([5, None], pa.int64()), **{C.KIND: kinds}) == [5, None]
    with pytest.raises(BadRecordError, match="its event time is null"):
        taken(pa.array([None, 5], pa.int64()), **{C.KIND: kinds})


def test_a_time_that_was_there_is_replaced() -> None:
    now = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    (made,) = TimestampsFromColumn("at")(
        iter([pa.record_batch({C.TIME: pa.array([1]), "at": pa.array([now]), C.MARK: pa.array([2])})])
    )
    assert made.schema.names == ["at", C.TIME]
    assert made.column(C.TIME).to_pylist() == [int(now.timestamp() * 1_000)]
    given = parse_ddl(f"{C.TIME} LONG, at TIMESTAMP, {C.MARK} LONG")
    assert TimestampsFromColumn.columns(given).names == ["at", C.TIME]  # type: ignore[arg-type]
