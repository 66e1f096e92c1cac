"""Protobuf: exact values both ways, message indexes, reasons, and writers with other descriptors."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from google.protobuf import struct_pb2, timestamp_pb2
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from flinkish_spark.connectors.formats import protobuf
from flinkish_spark.connectors.formats.avro import Difference
from flinkish_spark.connectors.formats.reader import Unreadable
from flinkish_spark.connectors.formats.registry import Registered
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.core.formats import OnSchemaChange, Protobuf

TEXT = """
syntax = "proto3"; package shop;
message Other {}
message Order {
  string s = 1; uint64 u = 2; uint32 v = 3; repeated int32 r = 4; map<string, Item> items = 5;
  oneof what { string a = 6; Item b = 7; } optional int32 o = 8; Color c = 9; bytes y = 10; float f = 11;
  message Item { int64 q = 1; }
  enum Color { RED = 0; BLUE = 1; }
}
"""
FILES = protobuf.files_of(Registered("PROTOBUF", TEXT))
ROW: dict[str, Any] = {
    "s": "x",
    "u": Decimal(2**64 - 1),
    "v": 2**32 - 1,
    "r": [1, -1],
    "items": [("k", {"q": 5})],
    "a": None,
    "b": {"q": 0},
    "o": None,
    "c": "BLUE",
    "y": b"\0",
    "f": 0.5,
}


def write(row: dict[str, Any], prefix: bytes = b"") -> bytes:
    return protobuf.ProtobufWriter(FILES, "shop.Order", prefix).opened()(row)


def read(data: bytes, files: bytes = FILES) -> tuple[Any, ...]:
    return protobuf.ProtobufReader(files, "shop.Order", None, OnSchemaChange.FAIL).opened()(data)


def test_columns_are_what_the_page_says() -> None:
    found = protobuf.fields_of(protobuf.descriptor_of(FILES, "shop.Order"))
    assert found.simpleString() == (
        "struct<s:string,u:decimal(20,0),v:bigint,r:array<int>,items:map<string,struct<q:bigint>>,"
        "a:string,b:struct<q:bigint>,o:int,c:string,y:binary,f:float>"
    )


def test_a_row_comes_back_as_it_was() -> None:
    # An empty message that is set is there, and an optional number that is not set is null.
    expected = (
        "x",
        Decimal(2**64 - 1),
        2**32 - 1,
        [1, -1],
        [("k", (5,))],
        None,
        (0,),
        None,
        "BLUE",
        b"\0",
        0.5,
    )
    assert read(write(ROW)) == expected
    assert read(write({**ROW, "c": "77"}))[8] == "77", "a number that the descriptor does not know"
    assert read(b"") == ("", Decimal(0), 0, [], [], None, None, None, "RED", b"", 0.0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"a": "x"}, "of the oneof 'what' more than one field is set: a, b"),
        ({"c": "GREEN"}, "the field 'c' is no symbol of its enum"),
        ({"s": None}, "the field 's' is null, which its message cannot say"),
        ({"v": -1}, "the field 'v' cannot be written"),
        ({"u": Decimal(2**64)}, "the field 'u' cannot be written"),
        ({"r": [None]}, "the list 'r' has a null, which Protobuf cannot say"),
        ({"items": [("k", None)]}, "the map 'items' has a null"),
    ],
)
def test_a_row_that_no_message_says_has_a_reason(change: dict[str, Any], why: str) -> None:
    with pytest.raises(Unreadable) as refused:
        write({**ROW, **change})
    assert str(refused.value).startswith(why)


@given(st.binary(max_size=60))
def test_no_bytes_end_a_task(data: bytes) -> None:
    try:
        assert len(read(data)) == len(ROW)
    except Unreadable as refused:
        assert "shop.Order" in str(refused)


@pytest.mark.parametrize(
    ("path", "data"), [((0,), b"\0"), ((1,), b"\2\2"), ((1, 0), b"\4\2\0"), ((300,), b"\2\xd8\4")]
)
def test_the_indexes_of_a_message(path: tuple[int, ...], data: bytes) -> None:
    assert protobuf.path_bytes(path) == data
    assert protobuf.path_in(b"12345" + data + b"rest", 5) == (path, 5 + len(data))


def test_where_a_message_stands_in_its_file() -> None:
    # The entries of the map stand in front of the item.
    for name, path in (("shop.Other", (0,)), ("shop.Order", (1,)), ("shop.Order.Item", (1, 1))):
        assert protobuf.index_path(protobuf.descriptor_of(FILES, name)) == path
    file = protobuf.file_of(FILES)
    assert protobuf._message_at(file, (1, 0), counts_entries=False).full_name == "shop.Order.Item"
    assert protobuf._message_at(file, (1, 2)) is protobuf._message_at(file, (2,)) is None


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x02", b"\xff" * 12, b"\x81\x01"])
def test_indexes_that_cannot_be_read(data: bytes) -> None:
    with pytest.raises(Unreadable):
        protobuf.path_in(data, 0)


@pytest.mark.parametrize(
    ("writer", "left_out", "other"),
    [
        ("string s = 1; int32 n = 2; string more = 3;", ["more"], []),
        ("string s = 1;", [], []),
        ("bytes s = 1; int32 n = 2;", [], ["s (bytes is read as string)"]),
        ("string s = 1; repeated int32 n = 2;", [], ["n (repeated int32 is read as int64)"]),
        ("string s = 1; uint64 n = 2;", [], ["n (uint64 is read as int64)"]),
    ],
)
def test_what_a_reader_leaves_out_or_takes_for_something_else(
    writer: str, left_out: list[str], other: list[str]
) -> None:
    def order(fields: str) -> Any:
        text = f'syntax = "proto3"; package shop; message Order {{ {fields} }}'
        return protobuf.descriptor_of(protobuf.files_of(Registered("PROTOBUF", text)), "shop.Order")

    found = Difference()
    protobuf._compare(order(writer), order("string s = 1; int64 n = 2;"), "", found, set())
    assert (found.left_out, found.other) == (left_out, other)


def test_a_schema_is_text_or_a_descriptor_with_what_it_refers_to() -> None:
    import base64

    item = 'syntax = "proto3"; package shop; message Item { int64 q = 1; }'
    order = 'syntax = "proto3"; package shop; import "a/item.proto"; message Order { Item i = 1; }'
    text = protobuf.files_of(Registered("PROTOBUF", order, (("a/item.proto", item),)))
    assert protobuf.first_message(text) == "shop.Order"
    from google.protobuf import descriptor_pb2

    files = descriptor_pb2.FileDescriptorSet.FromString(text).file
    first, last = (base64.b64encode(one.SerializeToString()).decode() for one in files)
    coded = protobuf.files_of(Registered("PROTOBUF", last, (("a/item.proto", first),)))
    found = protobuf.fields_of(protobuf.descriptor_of(coded, "shop.Order"))
    assert found.simpleString() == "struct<i:struct<q:bigint>>"


@pytest.mark.parametrize("name", ["../out.proto", "/etc/out.proto"])
def test_no_schema_writes_outside_of_its_folder(name: str) -> None:
    with pytest.raises(SchemaError, match="no name of a file"):
        protobuf.files_of(Registered("PROTOBUF", "syntax = 'proto3';", ((name, "x"),)))


def test_a_message_within_itself_is_refused() -> None:
    files = Protobuf.of(struct_pb2.Struct)
    with pytest.raises(SchemaError, match="has itself within it"):
        protobuf.fields_of(protobuf.descriptor_of(files.descriptor, files.message))


def test_a_compiled_module_gives_its_description() -> None:
    form = Protobuf.of(timestamp_pb2.Timestamp)
    data = timestamp_pb2.Timestamp(seconds=5, nanos=7).SerializeToString()
    found = protobuf.ProtobufReader(form.descriptor, form.message, None, OnSchemaChange.FAIL)
    assert found.kind.simpleString() == "struct<seconds:bigint,nanos:int>"
    assert found.opened()(data) == (5, 7)


@pytest.mark.parametrize(
    ("given", "wanted", "why"),
    [
        ("a SMALLINT", "a BIGINT", None),
        ("a BIGINT", "a INT", "the field 'a' is bigint, and the message has int"),
        ("a BIGINT", "a DECIMAL(20,0)", None),
        ("a DECIMAL(20,1)", "a DECIMAL(20,0)", "the field 'a' is decimal(20,1)"),
        ("a STRUCT<x: INT>", "a STRUCT<y: INT>", "the message has no field 'a.x'"),
    ],
)
def test_columns_that_a_message_holds(given: str, wanted: str, why: str | None) -> None:
    from flinkish_spark.types.ddl import parse_ddl

    found = protobuf.unfit(parse_ddl(given), parse_ddl(wanted), "")
    assert (found is None) == (why is None) and (found or "").startswith(why or "")
    assert isinstance(parse_ddl(given), T.StructType)
