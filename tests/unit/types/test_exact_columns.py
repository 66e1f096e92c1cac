"""Columns are cast as single values would be taken: what is refused of a record is refused of a column."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark.connectors.split_records import cast_to_field
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.exact_columns import exact_cast, is_of_kind
from flinkish_spark.types.to_arrow import ValueMismatch, strict_array
from flinkish_spark.types.to_python import to_values
from flinkish_spark.worker.columns_runner import OutputError, cast_to_declared

UTC = datetime.UTC
NOON = datetime.datetime(2026, 1, 1, 12)
AT_NOON = NOON.replace(tzinfo=UTC)
B_AND_A = pa.struct([("b", pa.int8()), ("a", pa.int8())])
#: Every declared type without parts that a function or a state can have.
DECLARED = [
    T.ByteType(), T.ShortType(), T.IntegerType(), T.LongType(), T.FloatType(), T.DoubleType(),
    T.DecimalType(10, 2), T.DecimalType(38, 0), T.DecimalType(38, 18), T.DecimalType(38, 38), T.StringType(),
    T.BinaryType(), T.BooleanType(), T.DateType(), T.TimestampType(), T.TimestampNTZType(),
    T.DayTimeIntervalType(), T.TimeType(6), T.NullType(),
]  # fmt: skip


def _columns() -> Iterator[pa.Array]:
    """Yield a value or two of every type of Arrow's, at the edges of what others hold."""
    for bits in (8, 16, 32, 64):
        yield pa.array([0, None, -(1 << bits - 1)], getattr(pa, f"int{bits}")())
        yield pa.array([0, None, (1 << bits) - 1], getattr(pa, f"uint{bits}")())
    for whole in (7, 1 << 24, (1 << 24) + 1, 1 << 53, (1 << 53) + 1, 123_456_789):
        yield pa.array([whole])
    for number in (1.5, 1.239, 0.1, -0.0, 1e10, 1e300, float("nan"), float("-inf"), 2.0**53, 2.0**60):
        yield pa.array([number, None])
        yield pa.array([number], pa.float32())
    for number in (1.5, 2.0, 2048.0, float("inf")):
        yield pa.array([np.float16(number)], pa.float16())
    for text in ("1.239", "1.20", "3", "-0.001", "99999999.99"):
        for make in (pa.decimal32, pa.decimal64, pa.decimal128, pa.decimal256):
            number = Decimal(text)
            digits = max(4, len(number.as_tuple().digits))
            yield (
                pa.array([number, None], make(min(digits, 9), -int(number.as_tuple().exponent)))
                if (digits < 10)
                else pa.array([number], pa.decimal128(10, 2))
            )
    yield pa.array([Decimal("12345678901234567890123456789.1")], pa.decimal128(30, 1))
    yield pa.array([Decimal(10) ** 40], pa.decimal256(50, 0))
    yield pa.array([True, None])
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        yield pa.array(["12", None], kind)
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2)):
        yield pa.array([b"ab", None], kind)
        yield pa.array([b"\xff\xfe"], kind)
    yield pa.array([NOON.date(), None])
    yield pa.array([NOON.date()], pa.date64())
    for unit in ("s", "ms", "us", "ns"):
        for zone in (None, "UTC", "Europe/Berlin"):
            yield pa.array([1_001, None]).cast(pa.timestamp(unit, zone))
            yield pa.array([5_000_000]).cast(pa.timestamp(unit, zone))
        yield pa.array([1_001, None], pa.duration(unit))
        yield pa.array([(1 << 62) + 1], pa.duration(unit))
    yield pa.array([1_001], pa.time32("ms"))
    yield pa.array([61], pa.time32("s"))
    yield pa.array([1_001], pa.time64("us"))
    yield pa.array([1_000, None], pa.time64("ns"))
    yield pa.array([1_001], pa.time64("ns"))
    yield pa.array([pa.MonthDayNano([1, 2, 3])])
    yield pa.nulls(2)
    yield pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"], pa.binary(16)))


def _nested(column: pa.Array, kind: pa.DataType) -> Iterator[tuple[pa.Array, pa.DataType]]:
    """Yield a column within others, and a type within others of the same form."""
    count = len(column)
    offsets = pa.array(range(count + 1), pa.int32())
    names = pa.array([str(at) for at in range(count)])
    yield column, kind
    yield pa.concat_arrays([column, column]).slice(1, count), kind
    yield (
        pa.StructArray.from_arrays([names, column], ["k", "x"]),
        pa.struct([("x", kind), ("k", pa.string())]),
    )
    yield pa.ListArray.from_arrays(offsets, column), pa.list_(kind)
    yield pa.LargeListArray.from_arrays(offsets.cast(pa.int64()), column), pa.list_(kind)
    yield pa.FixedSizeListArray.from_arrays(column, 1), pa.list_(kind)
    yield pa.MapArray.from_arrays(offsets, names, column), pa.map_(pa.string(), kind)
    if not column.null_count and not pa.types.is_null(kind):
        yield pa.MapArray.from_arrays(offsets, column, names), pa.map_(kind, pa.string())
    if not isinstance(column, pa.ExtensionArray) and not pa.types.is_null(column.type):
        # Arrow has no such dictionaries of some types.
        with contextlib.suppress(pa.ArrowNotImplementedError):
            yield column.dictionary_encode(), kind


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


@pytest.mark.parametrize("declared", DECLARED, ids=str)
def test_a_column_is_taken_as_its_values_would_be_or_refused(declared: T.DataType) -> None:
    taken = 0
    for column in _columns():
        for given, kind in _nested(column, arrow_type(declared)):
            if not is_of_kind(given.type, kind):
                continue
            try:
                made = exact_cast(given, kind)
            except pa.ArrowException:
                continue
            made.validate(full=True)
            assert made.type == kind
            values = to_values(given)
            if pa.types.is_floating(column.type) and pa.types.is_integer(arrow_type(declared)):
                # Whole numbers with gaps come as floats out of pandas; a record of a function never has them.
                assert to_values(made) == values
            else:
                assert _same(to_values(strict_array(values, kind)), to_values(made)), (given.type, kind)
            taken += 1
    assert taken


#: What Arrow casts by itself, without a word.
WRONG = [
    ("DECIMAL(10,2)", pa.array([1.239])),
    ("DECIMAL(10,2)", pa.array([1.25], pa.float32())),
    ("DECIMAL(10,2)", pa.array([np.float16(1.5)], pa.float16())),
    ("DECIMAL(10,2)", pa.array([Decimal("1.239")], pa.decimal256(50, 3))),
    ("TIMESTAMP_NTZ", pa.array([NOON.replace(tzinfo=UTC)])),
    ("TIMESTAMP_NTZ", pa.array([NOON], pa.timestamp("s", "Europe/Berlin"))),
    ("DOUBLE", pa.array([Decimal("12345678901234567890123456789.1")], pa.decimal128(30, 1))),
    ("FLOAT", pa.array([Decimal("0.5")])),
    ("DOUBLE", pa.array([(1 << 53) + 1])),
    ("FLOAT", pa.array([1e300])),
    ("LONG", pa.array([2.0**53])),
    ("LONG", pa.array([2.0**24], pa.float32())),
    ("LONG", pa.array([(1 << 63) + 1], pa.uint64())),
    ("TIMESTAMP", pa.array([1], pa.timestamp("ns", "UTC"))),
    ("TIMESTAMP_NTZ", pa.array([1], pa.timestamp("ns"))),
    ("INTERVAL DAY TO SECOND", pa.array([1], pa.duration("ns"))),
    ("TIME", pa.array([1], pa.time64("ns"))),
    ("DATE", pa.array([86_400_005]).view(pa.date64())),
    ("STRING", pa.array([b"\xff"])),
    ("STRING", pa.array([1])),
    ("BINARY", pa.array(["a"])),
    ("BINARY", pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"], pa.binary(16)))),
]


@pytest.mark.parametrize(("ddl", "column"), WRONG, ids=[f"{ddl}-{one.type}" for ddl, one in WRONG])
@pytest.mark.parametrize("depth", ["plain", "struct", "list", "map"])
def test_every_way_in_refuses_what_would_be_another_value(ddl: str, column: pa.Array, depth: str) -> None:
    """Out of vectorised functions, into states, and out of sources; by name."""
    from flinkish_spark.types.ddl import parse_ddl

    offsets, one = pa.array([0, 1], pa.int32()), pa.array(["k"])
    column, ddl = {
        "plain": (column, ddl),
        "struct": (pa.StructArray.from_arrays([column], ["x"]), f"STRUCT<x: {ddl}>"),
        "list": (pa.ListArray.from_arrays(offsets, column), f"ARRAY<{ddl}>"),
        "map": (pa.MapArray.from_arrays(offsets, one, column), f"MAP<STRING, {ddl}>"),
    }[depth]
    declared = parse_ddl(ddl)
    with pytest.raises(OutputError, match="field 'made'"):
        cast_to_declared(T.StructField("made", declared), column, arrow_type(declared))
    with pytest.raises(ValueError, match="the column 'made'"):
        cast_to_field(column, pa.field("made", arrow_type(declared)))


@pytest.mark.parametrize(
    ("ddl", "column", "found"),
    [
        ("DECIMAL(10,2)", pa.array([5, None]), [Decimal("5.00"), None]),
        ("DECIMAL(38,38)", pa.array([0]), [Decimal("0E-38")]),
        ("ARRAY<DECIMAL(3,1)>", pa.array([[5], None]), [[Decimal("5.0")], None]),
        ("STRING", pa.array(["a"], pa.string_view()), ["a"]),
        ("BINARY", pa.array([b"ab"], pa.binary(2)), [b"ab"]),
        ("ARRAY<LONG>", pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), [[1, 2], None]),
        ("ARRAY<STRING>", pa.array([["a"], None, []], pa.large_list_view(pa.string())), [["a"], None, []]),
        ("TIME", pa.array([61], pa.time32("s")), [datetime.time(0, 1, 1)]),
        ("TIMESTAMP", pa.array([AT_NOON], pa.timestamp("s", "Asia/Tokyo")), [AT_NOON]),
        # Fields of structs go by name, as those of a record's dict do.
        ("STRUCT<a: LONG, b: LONG>", pa.array([{"b": 2, "a": 1}], B_AND_A), [{"a": 1, "b": 2}]),
    ],
)
def test_what_a_declared_type_holds_is_taken(ddl: str, column: pa.Array, found: list[Any]) -> None:
    from flinkish_spark.types.ddl import parse_ddl

    declared = parse_ddl(ddl)
    made = cast_to_declared(T.StructField("made", declared), column, arrow_type(declared))
    assert made.type == arrow_type(declared) and to_values(made) == found


def test_values_below_a_null_are_nobodys() -> None:
    hidden = pa.StructArray.from_arrays([pa.array([1.5, 2.0])], ["x"], mask=pa.array([True, False]))
    assert exact_cast(hidden, pa.struct([("x", pa.int64())])).to_pylist() == [None, {"x": 2}]
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), pa.array([1.5, 2.0]), mask=pa.array([True, False])
    )
    assert exact_cast(lists, pa.list_(pa.int64())).to_pylist() == [None, [2]]


CITY = pa.struct([("City", pa.string()), ("n", pa.int64())])


@pytest.mark.parametrize(
    ("kind", "column", "says"),
    [
        (pa.struct([("city", pa.string())]), pa.array([("a", 1)], CITY), "has no field 's.city'"),
        (
            pa.list_(pa.struct([("city", pa.string())])),
            pa.array([[("a", 1)]], pa.list_(CITY)),
            "no field 's.element.city'",
        ),
        (
            pa.map_(pa.string(), pa.struct([("city", pa.string())])),
            pa.array([{"k": ("a", 1)}], pa.map_(pa.string(), CITY)),
            "no field 's.value.city'",
        ),
        (
            pa.struct([("n", pa.struct([("x", pa.int64()), ("y", pa.int64())]))]),
            pa.array([{"n": {"x": 1}}]),
            "no field 's.n.y'",
        ),
        (pa.struct([("City", pa.int64())]), pa.array([("a", 1)], CITY), "is struct<City: string"),
    ],
)
def test_a_nested_field_that_is_not_there_is_refused(kind: pa.DataType, column: pa.Array, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cast_to_field(column, pa.field("s", kind))


def test_of_structs_the_declared_fields_are_taken_in_any_order() -> None:
    wanted = pa.struct([("n", pa.int64()), ("City", pa.string())])
    more = pa.struct([*CITY, ("more", pa.int8())])
    taken = cast_to_field(pa.array([("a", 1, 2), None], more), pa.field("s", wanted))
    assert taken.to_pylist() == [{"n": 1, "City": "a"}, None]
    assert not is_of_kind(more, wanted), "a function's rows have declared fields only"


def test_only_who_asks_for_it_gets_null_for_a_field_that_is_not_there() -> None:
    wanted = pa.struct([("n", pa.int64()), ("later", pa.list_(pa.string()))])
    column = pa.array([{"n": 1}, None], pa.struct([("n", pa.int32())]))
    assert not is_of_kind(column.type, wanted)
    assert is_of_kind(column.type, wanted, may_lack=True)
    assert exact_cast(column, wanted).to_pylist() == [{"n": 1, "later": None}, None]
    assert not is_of_kind(pa.struct([("N", pa.int64())]), pa.struct([("n", pa.int64())]), may_lack=True)


NANOS, ZONED = pd.Timestamp("2026-01-01 12:00:00.000000001"), pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("kind", "wrong", "says"),
    [
        (ZONED, NANOS, "it has nanoseconds"),
        (ZONED, NANOS.tz_localize("Europe/Berlin"), "it has nanoseconds"),
        (pa.timestamp("us"), NANOS, "it has nanoseconds"),
        (pa.duration("us"), pd.Timedelta(1, "ns"), "it has nanoseconds"),
        (pa.list_(ZONED), [NOON, NANOS], "it has nanoseconds"),
        (pa.map_(ZONED, pa.string()), {NANOS: "a"}, "it has nanoseconds"),
        (pa.map_(pa.string(), pa.duration("us")), {"a": pd.Timedelta(1, "ns")}, "it has nanoseconds"),
        (pa.struct([("at", pa.timestamp("us"))]), (NANOS,), "it has nanoseconds"),
        (ZONED, np.datetime64(1, "ns"), "numpy.datetime64"),
        (pa.int64(), np.datetime64(1, "ns"), "numpy.datetime64"),
        (pa.date32(), np.datetime64(1, "ns"), "numpy.datetime64"),
        (pa.list_(pa.int64()), [np.timedelta64(1, "M")], "numpy.timedelta64"),
        (pa.float64(), np.timedelta64(1, "ns"), "numpy.timedelta64"),
        (pa.time64("ns"), np.datetime64(1, "ns"), "numpy.datetime64"),
        (pa.time64("ns"), datetime.time(1, tzinfo=UTC), "it has a time zone"),
        (pa.int64(), np.True_, "is not known to be stored unchanged"),
        (pa.date32(), np.True_, "is not known to be stored unchanged"),
        (pa.int64(), np.array(1.5), "numpy.ndarray is not known"),
        (ZONED, np.array(1.5), "numpy.ndarray is not known"),
        (pa.list_(pa.int64()), [2.0**53, 1], "it is a float"),
    ],
)
def test_a_value_that_is_finer_than_its_type_or_of_another_kind_is_refused(
    kind: pa.DataType, wrong: Any, says: str
) -> None:
    with pytest.raises(ValueMismatch, match=says):
        strict_array([None, wrong], kind)


def test_whole_microseconds_of_pandas_are_times() -> None:
    at = pd.Timestamp("2026-01-01 12:00")
    assert strict_array([at], pa.timestamp("us")).to_pylist() == [NOON]
    assert strict_array([pd.Timedelta(5, "us")], pa.duration("us")).to_pylist() == [
        datetime.timedelta(microseconds=5)
    ]
