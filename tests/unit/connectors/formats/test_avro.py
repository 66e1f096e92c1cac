"""Avro of a source: exact values, the writer's schema, reasons; without Spark and without a registry."""

from __future__ import annotations

import datetime as dt
import io
import itertools
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from flinkish_spark import OnSchemaChange, SchemaRegistry
from flinkish_spark.connectors.formats import avro
from flinkish_spark.connectors.formats.reader import Reader, read_values
from flinkish_spark.connectors.formats.registry import RegistrySchema, client_of, header
from flinkish_spark.core.errors import RetriableError, SchemaError


def record(*fields: tuple[str, Any], name: str = "R") -> str:
    made = [{"name": one[0], "type": one[1], **(one[2] if len(one) > 2 else {})} for one in fields]
    return json.dumps({"type": "record", "name": name, "fields": made})


def reader(schema: str) -> avro.AvroReader:
    return avro.AvroReader(json.dumps(avro.parse_schema(schema)), "value", None, OnSchemaChange.FAIL)


def written(schema: str, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(schema)), value)
    return out.getvalue()


def read(schema: str, *values: bytes | None) -> list[dict[str, Any]]:
    """What Spark gets."""
    made = reader(schema)
    return rows_and_reasons(made, pa.array(values, pa.binary()))


def rows_and_reasons(made: Reader, values: pa.Array) -> list[dict[str, Any]]:
    rows, reasons = read_values(made, values)
    return [
        {"read": row, "reason": reason}
        for row, reason in zip(rows.to_pylist(), reasons.to_pylist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "given", "column", "value"),
    [
        ("long", -(2**63), "bigint", -(2**63)),
        (["null", "string"], None, "string", None),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 10},
            Decimal("-1234567890123456789012345678.0123456789"),
            "decimal(38,10)",
            Decimal("-1234567890123456789012345678.0123456789"),
        ),
        (
            {"type": "fixed", "name": "F", "size": 8, "logicalType": "decimal", "precision": 18, "scale": 2},
            Decimal("-0.01"),
            "decimal(18,2)",
            Decimal("-0.01"),
        ),
        (
            {"type": "long", "logicalType": "timestamp-micros"},
            dt.datetime(1, 1, 1, 0, 0, 0, 1, dt.UTC),
            "timestamp",
            dt.datetime(1, 1, 1, 0, 0, 0, 1, dt.UTC),
        ),
        (
            {"type": "long", "logicalType": "local-timestamp-millis"},
            dt.datetime(9999, 12, 31, 23, 59, 59, 999000),
            "timestamp_ntz",
            dt.datetime(9999, 12, 31, 23, 59, 59, 999000),
        ),
        ({"type": "int", "logicalType": "date"}, dt.date(1582, 10, 10), "date", dt.date(1582, 10, 10)),
        ({"type": "long", "logicalType": "timestamp-nanos"}, 1_234_567_891, "bigint", 1_234_567_891),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "string", "B"),
        ({"type": "map", "values": ["null", "int"]}, {"a": None}, "map<string,int>", [("a", None)]),
        (["int", "long"], 5, "bigint", 5),
        (
            [
                "null",
                "string",
                "long",
                {"type": "record", "name": "P", "fields": [{"name": "x", "type": "int"}]},
            ],
            {"x": 7},
            "struct<member0:string,member1:bigint,member2:struct<x:int>>",
            {"member0": None, "member1": None, "member2": {"x": 7}},
        ),
        (
            ["null", "string", "long"],
            "7",
            "struct<member0:string,member1:bigint>",
            {"member0": "7", "member1": None},
        ),
    ],
)
def test_each_type_is_what_the_page_says(kind: Any, given: Any, column: str, value: Any) -> None:
    schema = record(("f", kind))
    assert reader(schema).kind.simpleString() == f"struct<f:{column}>"
    (found,) = read(schema, written(schema, {"f": given}))
    assert found == {"read": {"f": value}, "reason": None}


def test_what_is_no_record_has_a_reason_and_the_rest_is_read() -> None:
    schema = record(("s", "string"), ("n", "int"))
    good = written(schema, {"s": "ä", "n": 1})
    found = read(schema, good, good[:-1], good + b"\0", b"", b"\x02\xff\x02", None, good)
    assert [one["reason"] and one["reason"].split(" of ")[0] for one in found] == [
        None,
        "the bytes end within a record",
        "1 bytes follow the record",
        "the bytes end within a record",
        "the bytes are no record",
        None,
        None,
    ]
    assert found[0] == found[-1] and found[5]["read"] is None


def test_a_time_beyond_the_years_and_a_decimal_beyond_its_digits_are_bad_records() -> None:
    schema = record(("at", {"type": "long", "logicalType": "timestamp-millis"}))
    plain = record(("at", "long"))
    found = read(schema, written(plain, {"at": 253_402_300_800_000}), written(plain, {"at": 0}))
    assert found[0]["reason"] == "the field 'at' is in no year from 1 to 9999" and found[1]["reason"] is None
    decimal = record(("d", {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 1}))
    found = read(decimal, written(record(("d", "bytes")), {"d": (1000).to_bytes(2, "big")}))
    assert found[0]["reason"] == "the field 'd' has more than the 3 digits of its decimal"


@given(st.binary(max_size=40))
def test_no_bytes_end_a_task(data: bytes) -> None:
    schema = record(
        ("m", {"type": "map", "values": ["null", "string"]}),
        ("d", {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 1}),
        ("e", {"type": "enum", "name": "E", "symbols": ["A"]}),
        ("a", {"type": "array", "items": "E"}),
    )
    (found,) = read(schema, data)
    assert (found["read"] is None) == (found["reason"] is not None)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("null", "null"),
        (["null"], "always null"),
    ],
)
def test_types_that_no_column_holds_are_refused_by_name(kind: Any, words: str) -> None:
    with pytest.raises(SchemaError, match="the field 'f'") as refused:
        _ = reader(record(("f", kind))).kind
    assert words in str(refused.value)


def test_a_record_within_itself_is_refused() -> None:
    with pytest.raises(SchemaError, match="contains itself, in 'next'"):
        _ = reader(record(("next", ["null", "R"]))).kind


def test_a_value_that_is_no_record_is_one_column() -> None:
    made = avro.AvroReader('"string"', "key", None, OnSchemaChange.FAIL)
    assert made.kind.simpleString() == "struct<key:string>" and made.make_converter()(b"\4ab") == ("ab",)


def test_references_are_put_where_they_are_first_named() -> None:
    item = '{"type": "record", "name": "shop.Item", "fields": [{"name": "q", "type": "long"}]}'
    order = record(("a", "shop.Item"), ("b", {"type": "array", "items": "shop.Item"}))
    whole = avro.parse_schema(order, [("shop.Item", item)])
    found = avro.AvroReader(json.dumps(whole), "value", None, OnSchemaChange.FAIL).kind
    assert found.simpleString() == "struct<a:struct<q:bigint>,b:array<struct<q:bigint>>>"


def test_what_a_reader_leaves_out_or_takes_for_something_else() -> None:
    micros, millis = ({"type": "long", "logicalType": f"timestamp-{unit}"} for unit in ("micros", "millis"))
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 1}
    inner = {"type": "record", "name": "I", "fields": [{"name": "x", "type": "int"}]}
    more = {"type": "record", "name": "I", "fields": [*inner["fields"], {"name": "y", "type": "int"}]}
    writer = record(("a", micros), ("b", decimal), ("c", ["null", more]), ("new", "int"), ("d", decimal))
    ours = record(("a", millis), ("b", {**decimal, "scale": 2}), ("c", ["null", inner]), ("d", "bytes"))
    resolution = avro.Resolution(avro.parse_schema(writer), avro.parse_schema(ours))
    resolution.convert()
    assert resolution.found.left_out == ["c.y", "new"]
    assert resolution.found.other == [
        "a (timestamp-micros is read as timestamp-millis)",
        "b (decimal(5,1) is read as decimal(5,2))",
    ]


# ----------------------------------------------------------------------------------------------------------
# Resolution: the writer's schema is known by a registry, and is not that of the source.

A = {"type": "record", "name": "A", "fields": [{"name": "x", "type": "int"}]}
B = {"type": "record", "name": "B", "fields": [{"name": "x", "type": "int"}]}
E = {"type": "enum", "name": "E", "symbols": ["X", "Y"]}
F1 = {"type": "fixed", "name": "F", "size": 1}
MICROS = {"type": "long", "logicalType": "timestamp-micros"}
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
BIG = 2**53 + 1
EPOCH_1 = dt.datetime(1970, 1, 1, 0, 0, 0, 1, dt.UTC)


def long(value: int) -> bytes:
    return written('"long"', value)


def read_via(
    writer: Any, ours: Any, *data: bytes, change: OnSchemaChange = OnSchemaChange.LEAVE_OUT
) -> list[dict[str, Any]]:
    """What Spark gets of the bytes behind the number of the writer's schema."""
    registry = SchemaRegistry(f"http://{next(NUMBERS)}")
    client_of(registry)._by_id[1] = RegistrySchema("AVRO", json.dumps(writer), schema_id=1)
    made = avro.AvroReader(json.dumps(avro.parse_schema(json.dumps(ours))), "value", registry, change)
    return rows_and_reasons(made, pa.array([header(1) + one for one in data], pa.binary()))


NUMBERS = itertools.count()


def members(*values: Any) -> dict[str, Any]:
    return {f"member{at}": value for at, value in enumerate(values)}


@pytest.mark.parametrize(
    ("writer", "ours", "data", "value"),
    [
        (["null", "double", "long"], ["null", "double", "long"], long(2) + long(BIG), members(None, BIG)),
        (["long", "double"], ["null", "double", "long"], long(0) + long(BIG), members(None, BIG)),
        (["double", MICROS], ["double", MICROS], long(1) + long(1), members(None, EPOCH_1)),
        (["string", DECIMAL], ["string", DECIMAL], long(1) + b"\4\x30\x39", members(None, Decimal("123.45"))),
        (["string", "bytes"], ["string", "bytes"], long(1) + b"\2\xff", members(None, b"\xff")),
        (["string", "bytes"], "bytes", long(0) + b"\4\xc3\xa4", b"\xc3\xa4"),
        (["string", "bytes"], "string", long(1) + b"\4\xc3\xa4", "\u00e4"),
        ("string", ["bytes", "int"], b"\2a", members(b"a", None)),
        ("int", ["string", "double", "long"], long(7), members(None, 7.0, None)),
        ("int", ["string", "double", "int"], long(7), members(None, None, 7)),
        (["int", "long"], ["double", "long"], long(0) + long(7), members(7.0, None)),
        (["int", "long"], ["double", "long"], long(1) + long(7), members(None, 7)),
        (["float", "double"], ["double", "float"], long(0) + b"\0\0\x80\x3f", 1.0),
        (
            ["float", "double"],
            ["float", "string", "double"],
            long(0) + b"\0\0\x80\x3f",
            members(1.0, None, None),
        ),
        (["null", "long"], "long", long(1) + long(BIG), BIG),
        ("long", "float", long(2**60 + 2**36 + 1), float(2**60 + 2**37)),
        (A, ["null", A, B], long(1), members({"x": 1}, None)),
        ([A, B], ["null", B, A], long(0) + long(1), members(None, {"x": 1})),
        ([A, "string"], ["string", {**B, "aliases": ["A"]}], long(0) + long(1), members(None, {"x": 1})),
        (A, [{"type": "map", "values": "string"}, A], long(1), members(None, {"x": 1})),
        (E, ["string", E], long(1), members(None, "Y")),
        (["string", E], ["null", E, "string"], long(1) + long(1), members("Y", None)),
        ([F1, "bytes"], ["bytes", F1], long(0) + b"a", members(None, b"a")),
        (["boolean", "int"], ["int", "boolean"], long(0) + b"\1", members(None, True)),
        (
            {"type": "array", "items": ["double", "long"]},
            {"type": "array", "items": ["null", "double", "long"]},
            long(1) + long(1) + long(BIG) + long(0),
            [members(None, BIG)],
        ),
        (
            {"type": "map", "values": ["double", "long"]},
            {"type": "map", "values": ["double", "string", "long"]},
            long(1) + b"\2k" + long(1) + long(BIG) + long(0),
            [("k", members(None, None, BIG))],
        ),
        (
            {**A, "fields": [{"name": "x", "type": ["double", "long"]}]},
            {**A, "fields": [{"name": "x", "type": ["double", "string", "long"]}]},
            long(1) + long(BIG),
            {"x": members(None, None, BIG)},
        ),
    ],
)
def test_a_value_is_of_the_branch_of_its_own_type_or_else_of_the_first_wider_one(
    writer: Any, ours: Any, data: bytes, value: Any
) -> None:
    def of(kind: Any) -> Any:
        return json.loads(record(("f", kind)))

    wrapped = {**of(ours), "fields": [*of(ours)["fields"], {"name": "z", "type": "int", "default": 0}]}
    assert read_via(of(writer), wrapped, data) == [{"read": {"f": value, "z": 0}, "reason": None}]


@pytest.mark.parametrize(
    ("kind", "default", "value"),
    [
        (["double", "string"], 1, members(1.0, None)),
        (["bytes", "string"], "\u00ff", members(b"\xff", None)),
        (["int", "string", "long"], 1, members(1, None, None)),
        (["boolean", "string"], True, members(True, None)),
        ([E, "string"], "Y", members("Y", None)),
        (DECIMAL, "09", Decimal("123.45")),
        ({"type": "array", "items": ["long", "double"]}, [1], [members(1, None)]),
        ({"type": "map", "values": "double"}, {"k": 1}, [("k", 1.0)]),
        (
            {**A, "fields": [{"name": "x", "type": "int", "default": 3}, {"name": "y", "type": "int"}]},
            {"y": 1},
            {"x": 3, "y": 1},
        ),
    ],
)
def test_a_default_is_of_the_first_branch_and_is_completed(kind: Any, default: Any, value: Any) -> None:
    ours = json.loads(record(("f", kind, {"default": default}), ("a", "int")))
    assert read_via(json.loads(record(("a", "int"))), ours, b"\2") == [
        {"read": {"f": value, "a": 1}, "reason": None}
    ]


@pytest.mark.parametrize(
    ("writer", "ours", "words"),
    [
        ("long", "int", "The field 'f' is long, and is read as int"),
        (E, "string", "The field 'f' is enum E, and is read as string"),
        (A, {"type": "map", "values": "int"}, "is record A, and is read as map"),
        (A, ["null", B], "is record A, and is read as null or record B"),
        (F1, {**F1, "size": 2}, "is fixed F, and is read as fixed F"),
        (["null", "string"], "string", "is null, and is read as string"),
        ({**E, "symbols": ["Z"]}, E, "is the new symbol 'Z' of its enum, which has no default"),
        (A, {**A, "fields": [{"name": "y", "type": "int"}]}, "'f.y' is not there, and has no default"),
    ],
)
def test_what_has_no_place_is_refused_by_name_or_read_with_the_newest_schema(
    writer: Any, ours: Any, words: str
) -> None:
    writer, ours = (json.loads(record(("f", kind))) for kind in (writer, ours))
    with pytest.raises(SchemaError, match=words):
        read_via(writer, ours, b"\0")
    with pytest.raises(RetriableError, match=words):
        read_via(writer, ours, b"\0", change=OnSchemaChange.EVOLVE)


def test_a_branch_and_a_symbol_without_a_place_do_not_matter_until_there_is_a_value_of_them() -> None:
    writer = [{"name": "f", "type": ["null", "string"]}, {"name": "e", "type": {**E, "symbols": ["Z", "Y"]}}]
    ours = [{"name": "f", "type": "string"}, {"name": "e", "type": E}]
    both = ({"type": "record", "name": "R", "fields": fields} for fields in (writer, ours))
    assert read_via(*both, b"\2\2a\2") == [{"read": {"f": "a", "e": "Y"}, "reason": None}]


@pytest.mark.parametrize(
    ("writer", "ours", "data", "reason"),
    [
        ("int", "int", long(2**31), "too large"),
        ("int", "long", long(2**31), "the field 'f' is no int of 32 bits"),
        (["int", "long"], ["int", "long"], b"\0" + long(-(2**31) - 1), "the field 'f' is no int of 32 bits"),
        (E, E, b"\1", "nothing there has number -1"),
        (["null", "int"], ["null", "int"], b"\1", "nothing there has number -1"),
        (["null", "int"], ["null", "int"], b"\4", "nothing there has number 2"),
        ("boolean", "boolean", b"\2", "nothing there has number 1"),
        ("bytes", "string", b"\2\xff", "the field 'f' is no text in UTF-8"),
    ],
)
def test_a_number_that_is_none_of_its_type_is_a_bad_record_and_the_rest_is_read(
    writer: Any, ours: Any, data: bytes, reason: str
) -> None:
    schemas = [json.loads(record(("f", kind))) for kind in (writer, ours)]
    bad, good = read_via(*schemas, data, b"\0" * (1 + (writer == ["int", "long"])))
    assert reason in bad["reason"] and bad["read"] is None and good["reason"] is None


def test_a_record_that_ends_within_what_is_left_out_is_bad() -> None:
    writer = json.loads(record(("a", "int"), ("s", "string")))
    (found,) = read_via(writer, json.loads(record(("a", "int"))), b"\2\6a")
    assert found["reason"] == "the bytes end within a record of the Avro schema"


@pytest.mark.parametrize("raw", [b"hello", b"", b"\4ab"])
def test_bytes_alone_stand_behind_the_number_as_clients_in_the_jvm_write_them(raw: bytes) -> None:
    assert read_via("bytes", "bytes", raw) == [{"read": {"value": raw}, "reason": None}]


def logical(meant: Any, kind: str = "bytes", **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": meant, **more}


#: Logical types that are none, or that Spark has no column for, by the words of their schema.
NO_LOGICAL_TYPES = [
    (logical("decimal"), "binary"),
    (logical("decimal", precision=64, scale=127), "binary"),
    (logical("decimal", precision=4, scale=5), "binary"),
    (logical("decimal", precision=39), "binary"),
    (logical("decimal", precision=64, scale=2), "binary"),
    (logical("decimal", precision=0), "binary"),
    (logical("decimal", precision="4"), "binary"),
    (logical("decimal", precision=True), "binary"),
    (logical("decimal", precision=4, scale=-1), "binary"),
    (logical("decimal", precision=4, scale=None), "binary"),
    (logical("decimal", "fixed", name="F", size=2, precision=5), "binary"),
    (logical("decimal", "string", precision=4), "string"),
    (logical("decimal", "long", precision=4), "bigint"),
    (logical("duration", "fixed", name="F", size=11), "binary"),
    (logical("duration", "long"), "bigint"),
    (logical("uuid", "long"), "bigint"),
    (logical("uuid", "fixed", name="F", size=16), "binary"),
    (logical("date", "string"), "string"),
    (logical("date", "long"), "bigint"),
    (logical("timestamp-micros", "int"), "int"),
    (logical("timestamp-nanos", "long"), "bigint"),
    (logical("local-timestamp-nanos", "long"), "bigint"),
    (logical("timestamp-fortnights", "long"), "bigint"),
    (logical(5, "long"), "bigint"),
    (logical("x", "array", items=logical("decimal", precision=1, scale=2)), "array<binary>"),
    (logical("x", "map", values=logical("decimal", precision=1, scale=2)), "map<string,binary>"),
    ({"type": logical("decimal", precision=1, scale=2)}, "binary"),
]


@pytest.mark.parametrize(("kind", "column"), NO_LOGICAL_TYPES, ids=lambda one: json.dumps(one)[:60])
def test_of_a_logical_type_that_is_none_the_values_are_what_their_own_type_says(
    kind: Any, column: str
) -> None:
    """As Avro's specification has it, also in a field that nobody reads."""
    assert reader(record(("f", kind))).kind.simpleString() == f"struct<f:{column}>"
    assert reader(record(("f", ["null", kind]))).kind.simpleString() == f"struct<f:{column}>"
    writer = record(
        ("n", "int"), ("inner", {"type": "record", "name": "I", "fields": [{"name": "f", "type": kind}]})
    )
    resolution = avro.Resolution(avro.parse_schema(writer), avro.parse_schema(record(("n", "int"))))
    assert resolution.convert() is not None and resolution.found.left_out == ["inner"]
    plain = avro.Resolution(avro.parse_schema(record(("f", kind))), avro.parse_schema(record(("f", kind))))
    plain.convert()
    assert plain.found.other == []


def test_the_bytes_of_a_decimal_that_is_none_are_there() -> None:
    schema = record(("d", logical("decimal", precision=64, scale=127)), ("n", "int"))
    assert read(schema, b"\2\x05\x0e") == [{"read": {"d": b"\x05", "n": 7}, "reason": None}]


def test_a_fixed_has_the_digits_that_fit() -> None:
    for size, digits in ((1, 2), (2, 4), (4, 9), (8, 18), (16, 38)):
        kind = logical("decimal", "fixed", name="F", size=size, precision=digits)
        assert reader(record(("f", kind))).kind["f"].dataType == T.DecimalType(digits, 0)
        kind["precision"] += 1
        assert reader(record(("f", kind))).kind["f"].dataType == T.BinaryType()
