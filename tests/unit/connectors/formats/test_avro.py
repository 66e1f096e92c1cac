"""Avro of a source: exact values, the writer's schema, reasons; without Spark and without a registry."""

from __future__ import annotations

import datetime as dt
import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from flinkish_spark.connectors.formats import avro
from flinkish_spark.connectors.formats.reader import READ, REASON, _Read
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.core.formats import OnSchemaChange


def record(*fields: tuple[str, Any], name: str = "R") -> str:
    made = [{"name": one[0], "type": one[1], **(one[2] if len(one) > 2 else {})} for one in fields]
    return json.dumps({"type": "record", "name": name, "fields": made})


def reader(schema: str) -> avro.AvroReader:
    return avro.avro_reader(json.dumps(avro.whole_schema(schema)), "value", None, OnSchemaChange.FAIL)


def written(schema: str, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(schema)), value)
    return out.getvalue()


def read(schema: str, *values: bytes | None) -> list[dict[str, Any]]:
    """What Spark gets."""
    made = reader(schema)
    kind = T.StructType([T.StructField(READ, made.kind), T.StructField(REASON, T.StringType())])
    return _Read(made, kind)(pa.array(values, pa.binary())).to_pylist()


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
        ({"type": "bytes", "logicalType": "decimal", "precision": 39, "scale": 0}, "decimal(39,0)"),
        ("null", "null"),
        (["null"], "always null"),
    ],
)
def test_types_that_no_column_holds_are_refused_by_name(kind: Any, words: str) -> None:
    with pytest.raises(SchemaError, match="the field 'f'") as refused:
        reader(record(("f", kind)))
    assert words in str(refused.value)


def test_a_record_within_itself_is_refused() -> None:
    with pytest.raises(SchemaError, match="has itself within it, in 'next'"):
        reader(record(("next", ["null", "R"])))


def test_a_value_that_is_no_record_is_one_column() -> None:
    made = avro.avro_reader('"string"', "key", None, OnSchemaChange.FAIL)
    assert made.kind.simpleString() == "struct<key:string>" and made.opened()(b"\4ab") == ("ab",)


def test_references_are_put_where_they_are_first_named() -> None:
    item = '{"type": "record", "name": "shop.Item", "fields": [{"name": "q", "type": "long"}]}'
    order = record(("a", "shop.Item"), ("b", {"type": "array", "items": "shop.Item"}))
    whole = avro.whole_schema(order, [("shop.Item", item)])
    found = avro.avro_reader(json.dumps(whole), "value", None, OnSchemaChange.FAIL).kind
    assert found.simpleString() == "struct<a:struct<q:bigint>,b:array<struct<q:bigint>>>"


def test_what_a_reader_leaves_out_or_takes_for_something_else() -> None:
    micros, millis = ({"type": "long", "logicalType": f"timestamp-{unit}"} for unit in ("micros", "millis"))
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 1}
    inner = {"type": "record", "name": "I", "fields": [{"name": "x", "type": "int"}]}
    more = {"type": "record", "name": "I", "fields": [*inner["fields"], {"name": "y", "type": "int"}]}
    writer = record(("a", micros), ("b", decimal), ("c", ["null", more]), ("new", "int"), ("d", decimal))
    ours = record(("a", millis), ("b", {**decimal, "scale": 2}), ("c", ["null", inner]), ("d", "bytes"))
    found = avro.differences(avro.whole_schema(writer), avro.whole_schema(ours))
    assert found.left_out == ["c.y", "new"]
    assert found.other == [
        "a (timestamp-micros is read as timestamp-millis)",
        "b (decimal(5,1) is read as decimal(5,2))",
    ]
    same = avro.differences(avro.whole_schema(ours), avro.whole_schema(writer))
    assert same.left_out == []
