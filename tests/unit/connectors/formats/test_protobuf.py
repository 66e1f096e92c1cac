"""Protobuf: exact values both ways, message indexes, reasons, and writers with other descriptors."""

from __future__ import annotations

import base64
import sys
from decimal import Decimal
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, message_factory, struct_pb2, timestamp_pb2
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from flinkish_spark import OnSchemaChange, Protobuf
from flinkish_spark.connectors.formats import protobuf
from flinkish_spark.connectors.formats import protobuf_descriptors as descriptors
from flinkish_spark.connectors.formats.avro import SchemaDifference
from flinkish_spark.connectors.formats.reader import CodecError
from flinkish_spark.connectors.formats.registry import RegistrySchema
from flinkish_spark.core.errors import EnvironmentFault, SchemaError
from flinkish_spark.types.ddl import parse_ddl

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
FILES = descriptors.files_of(RegistrySchema("PROTOBUF", TEXT))
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
    return protobuf.ProtobufWriter(FILES, "shop.Order", prefix).make_converter()(row)


def read(data: bytes, files: bytes = FILES) -> tuple[Any, ...]:
    return protobuf.ProtobufReader(files, "shop.Order", None, OnSchemaChange.FAIL).make_converter()(data)


def test_columns_are_what_the_page_says() -> None:
    found = protobuf.fields_of(descriptors.descriptor_of(FILES, "shop.Order"))
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


ENUMS = """
message M {
  %s Color c = 1; repeated Color list = 2; repeated Color packed = 3 [%s]; map<string, Color> map = 4;
  oneof what { Color one = 5; string other = 6; } %s In in = 7; %s shop.Far far = 8;
  message In { %s Color c = 1; }
}
enum Color { RED = 0; BLUE = 1; LESS = -1; }
"""
CLOSED = 'edition = "2023"; option features.enum_type = CLOSED;'
FAR = 'syntax = "proto2"; package shop; message Far { optional E e = 1 [default = B]; enum E { B = 6; } }'


@pytest.mark.parametrize(
    ("head", "optional", "packed"),
    [
        ('syntax = "proto2";', "optional", "packed = true"),
        ('syntax = "proto3";', "optional", "packed = true"),
        (CLOSED, "", "features.repeated_field_encoding = PACKED"),
    ],
)
def test_a_number_that_an_enum_does_not_know_is_read_as_digits_wherever_it_is(
    head: str, optional: str, packed: str
) -> None:
    text = head + 'import "far.proto";' + ENUMS % (optional, packed, optional, optional, optional)
    files = descriptors.files_of(RegistrySchema("PROTOBUF", text, (("far.proto", FAR),)))
    read = protobuf.ProtobufReader(files, "M", None, OnSchemaChange.FAIL).make_converter()
    below = b"\xfe" + b"\xff" * 8 + b"\x01"  # -2: ten bytes on the wire
    data = b"\x08" + below + b"\x10\x01\x10\x07\x10\x00" + b"\x1a\x0c" + below + b"\x01\x07"
    data += b"\x22\x05\x0a\x01k\x10\x07" + b"\x28\x07" + b"\x3a\x02\x08\x07" + b"\x42\x02\x08\x07"
    whole = ("-2", ["BLUE", "7", "RED"], ["-2", "BLUE", "7"], [("k", "7")], "7", None, ("7",), ("7",))
    assert read(data) == whole
    known = b"\x08" + b"\xff" * 9 + b"\x01" + b"\x22\x03\x0a\x01k" + b"\x42\x00"
    assert read(known) == ("LESS", [], [], [("k", "RED")], None, None, None, (None,))
    assert read(b"") == (None, [], [], [], None, None, None, None)


def test_a_required_enum_with_a_number_that_it_does_not_know_is_there() -> None:
    text = 'syntax = "proto2"; message M { required Color c = 1; } enum Color { RED = 0; }'
    files = descriptors.files_of(RegistrySchema("PROTOBUF", text))
    read = protobuf.ProtobufReader(files, "M", None, OnSchemaChange.FAIL).make_converter()
    assert read(b"\x08\x07") == ("7",)
    with pytest.raises(CodecError, match="has no c, which is required"):
        read(b"")


@pytest.mark.parametrize(
    "head", ['syntax = "proto2";', 'edition = "2023"; option features.utf8_validation = NONE;', CLOSED]
)
@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\x01\xff",
        b"\x12\x01a\x12\x01\xff",
        b"\x1a\x06\x0a\x01\xff\x12\x01x",
        b"\x1a\x06\x0a\x01x\x12\x01\xff",
    ],
)
def test_a_text_that_is_not_utf_8_is_a_bad_record_also_where_protobuf_does_not_look(
    head: str, data: bytes
) -> None:
    optional = "optional" if "proto2" in head else ""
    fields = f"{optional} string t = 1; repeated string list = 2; map<string, string> map = 3;"
    files = descriptors.files_of(RegistrySchema("PROTOBUF", f"{head} message M {{ {fields} }}"))
    read = protobuf.ProtobufReader(files, "M", None, OnSchemaChange.FAIL).make_converter()
    assert read(data.replace(b"\xff", b"y"))[0] in ("y", None)
    with pytest.raises(CodecError, match=r"(?i)utf-8"):
        read(data)


ALIAS = "option allow_alias = true; RED = 0; "


@pytest.mark.parametrize(
    ("writer", "reader", "other"),
    [
        (ALIAS + "BLUE = 1; NAVY = 1;", ALIAS + "BLUE = 1; NAVY = 1;", []),
        ("RED = 0; NAVY = 1;", ALIAS + "BLUE = 1; NAVY = 1;", []),
        (ALIAS + "BLUE = 1; NAVY = 1;", "RED = 0; NAVY = 1; MORE = 2;", []),
        (ALIAS + "BLUE = 1; NAVY = 1;", "RED = 0; PINK = 1;", ["c (BLUE is read as PINK)"]),
    ],
)
def test_an_enum_is_another_one_if_a_number_has_no_name_in_common(
    writer: str, reader: str, other: list[str]
) -> None:
    def files(values: str) -> bytes:
        text = f'syntax = "proto3"; message M {{ Color c = 1; }} enum Color {{ {values} }}'
        return descriptors.files_of(RegistrySchema("PROTOBUF", text))

    found, (theirs, ours) = (
        SchemaDifference(),
        (descriptors.descriptor_of(files(one), "M") for one in (writer, reader)),
    )
    protobuf._compare(theirs, ours, "", found, set())
    assert found.other == other
    read = protobuf.ProtobufReader(files(reader), "M", None, OnSchemaChange.FAIL).make_converter()
    first = next(one.name for one in ours.file.enum_types_by_name["Color"].values if one.number == 1)
    assert read(b"\x08\x01") == (first,), "the first name of a number"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"a": "x"}, "of the oneof 'what' more than one field is set: a, b"),
        ({"c": "GREEN"}, "the field 'c' is no symbol of its enum"),
        ({"s": None}, "the field 's' is null, which its message cannot hold"),
        ({"v": -1}, "the field 'v' cannot be written"),
        ({"u": Decimal(2**64)}, "the field 'u' cannot be written"),
        ({"r": [None]}, "the list 'r' has a null, which Protobuf cannot hold"),
        ({"items": [("k", None)]}, "the map 'items' has a null"),
    ],
)
def test_a_row_that_no_message_says_has_a_reason(change: dict[str, Any], why: str) -> None:
    with pytest.raises(CodecError) as refused:
        write({**ROW, **change})
    assert str(refused.value).startswith(why)


@given(st.binary(max_size=60))
def test_no_bytes_end_a_task(data: bytes) -> None:
    try:
        assert len(read(data)) == len(ROW)
    except CodecError as refused:
        assert "shop.Order" in str(refused)


@pytest.mark.parametrize(
    ("path", "data"), [((0,), b"\0"), ((1,), b"\2\2"), ((1, 0), b"\4\2\0"), ((300,), b"\2\xd8\4")]
)
def test_the_indexes_of_a_message(path: tuple[int, ...], data: bytes) -> None:
    assert descriptors.path_bytes(path) == data
    assert descriptors.path_in(b"12345" + data + b"rest", 5) == (path, 5 + len(data))


def test_where_a_message_stands_in_its_file() -> None:
    # The entries of the map stand in front of the item.
    for name, path in (("shop.Other", (0,)), ("shop.Order", (1,)), ("shop.Order.Item", (1, 1))):
        assert descriptors.index_path(descriptors.descriptor_of(FILES, name)) == path
    file = descriptors.file_of(FILES)
    assert descriptors.message_at(file, (1, 0), counts_entries=False).full_name == "shop.Order.Item"
    assert descriptors.message_at(file, (1, 2)) is descriptors.message_at(file, (2,)) is None


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x02", b"\xff" * 12, b"\x81\x01"])
def test_indexes_that_cannot_be_read(data: bytes) -> None:
    with pytest.raises(CodecError):
        descriptors.path_in(data, 0)


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
        return descriptors.descriptor_of(descriptors.files_of(RegistrySchema("PROTOBUF", text)), "shop.Order")

    found = SchemaDifference()
    protobuf._compare(order(writer), order("string s = 1; int64 n = 2;"), "", found, set())
    assert (found.left_out, found.other) == (left_out, other)


@pytest.mark.parametrize("coded", [(), (0,), (1,), (0, 1)])
def test_a_schema_is_text_or_a_descriptor_and_so_is_what_it_refers_to(coded: tuple[int, ...]) -> None:
    item = 'syntax = "proto3"; package shop; message Item { int64 q = 1; }'
    order = 'syntax = "proto3"; package shop; import "a/item.proto"; message Order { Item i = 1; }'
    text = descriptors.files_of(RegistrySchema("PROTOBUF", order, (("a/item.proto", item),)))
    assert descriptors.first_message(text) == "shop.Order"
    texts, files = [item, order], descriptor_pb2.FileDescriptorSet.FromString(text).file
    for at in coded:
        texts[at] = base64.b64encode(files[at].SerializeToString()).decode()
    mixed = descriptors.files_of(RegistrySchema("PROTOBUF", texts[1], (("a/item.proto", texts[0]),)))
    assert descriptors.first_message(mixed) == "shop.Order"
    found = protobuf.fields_of(descriptors.descriptor_of(mixed, "shop.Order"))
    assert found.simpleString() == "struct<i:struct<q:bigint>>"


@pytest.mark.parametrize("name", ["../out.proto", "/etc/out.proto"])
def test_no_schema_writes_outside_of_its_folder(name: str) -> None:
    with pytest.raises(SchemaError, match="no name of a file"):
        descriptors.files_of(RegistrySchema("PROTOBUF", "syntax = 'proto3';", ((name, "x"),)))


def test_a_message_within_itself_is_refused() -> None:
    files = Protobuf.of(struct_pb2.Struct)
    with pytest.raises(SchemaError, match="contains itself"):
        protobuf.fields_of(descriptors.descriptor_of(files.descriptor, files.message))


def test_a_compiled_module_gives_its_description() -> None:
    form = Protobuf.of(timestamp_pb2.Timestamp)
    data = timestamp_pb2.Timestamp(seconds=5, nanos=7).SerializeToString()
    found = protobuf.ProtobufReader(form.descriptor, form.message, None, OnSchemaChange.FAIL)
    assert found.kind.simpleString() == "struct<seconds:bigint,nanos:int>"
    assert found.make_converter()(data) == (5, 7)


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
    found = protobuf.why_unfit(parse_ddl(given), parse_ddl(wanted), "")
    assert (found is None) == (why is None) and (found or "").startswith(why or "")
    assert isinstance(parse_ddl(given), T.StructType)


CLOSED = descriptors.files_of(
    RegistrySchema(
        "PROTOBUF",
        """syntax = "proto2"; message M {
        optional E e = 1; repeated E r = 2; repeated E p = 3 [packed = true]; map<string, E> m = 4;
        optional In n = 5; repeated In l = 6; map<string, In> i = 7;
        enum E { A = 0; B = -5; } message In { required int32 x = 1; optional string y = 2; } }""",
    )
)


@pytest.mark.parametrize("symbol", ["A", "B", "7", "-1", "2147483647", "-2147483648"])
def test_what_is_read_of_a_closed_enum_can_be_written(symbol: str) -> None:
    row = {"e": symbol, "r": ["A", symbol], "p": [symbol, "B"], "m": [("k", symbol)], "n": {"x": 1}}
    data = protobuf.ProtobufWriter(CLOSED, "M").make_converter()(row)
    found = protobuf.ProtobufReader(CLOSED, "M", None, OnSchemaChange.FAIL).make_converter()(data)
    assert found == (symbol, ["A", symbol], [symbol, "B"], [("k", symbol)], (1, None), [], [])
    if symbol in "AB":
        known = message_factory.GetMessageClass(descriptors.descriptor_of(CLOSED, "M"))
        assert known.FromString(data).SerializeToString(deterministic=True) == data


def test_a_field_may_have_the_name_of_a_method() -> None:
    names = ["IsInitialized", "SerializeToString", "HasField", "SetInParent", "FindInitializationErrors"]
    fields = " ".join(f"optional string {name} = {at};" for at, name in enumerate(names, 1))
    text = f'syntax = "proto2"; message M {{ required In i = 9; {fields} message In {{ {fields} }} }}'
    made = descriptors.files_of(RegistrySchema("PROTOBUF", text))
    inner = {name: name for name in names}
    data = protobuf.ProtobufWriter(made, "M").make_converter()({**inner, "i": inner})
    read = protobuf.ProtobufReader(made, "M", None, OnSchemaChange.FAIL).make_converter()
    assert sorted(read(data), key=str) == sorted([tuple(names), *names], key=str)
    with pytest.raises(CodecError, match="has no i, which is required"):
        read(b"")


@pytest.mark.parametrize("symbol", ["C", "", "\u0663", "--7", "+7", "2147483648", "7 "])
def test_what_is_neither_a_symbol_nor_a_number_is_none(symbol: str) -> None:
    for row in ({"e": symbol}, {"r": [symbol]}, {"m": [("k", symbol)]}):
        with pytest.raises(CodecError):
            protobuf.ProtobufWriter(CLOSED, "M").make_converter()(row)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("n STRUCT<x: INT>, l ARRAY<STRUCT<x: INT>>, i MAP<STRING, STRUCT<x: INT>>", None),
        ("e STRING", None),
        ("n STRUCT<y: STRING>", "n.x"),
        ("l ARRAY<STRUCT<y: STRING>>", "l.x"),
        ("i MAP<STRING, STRUCT<y: STRING>>", "i.x"),
    ],
)
def test_a_required_field_that_no_row_has_is_named(given: str, missing: str | None) -> None:
    assert protobuf.find_missing_required(descriptors.descriptor_of(CLOSED, "M"), parse_ddl(given)) == missing


BUILT_IN = """
syntax = "proto3"; package shop; import "confluent/meta.proto";
import "confluent/type/decimal.proto";
import public 'google/type/date.proto'; import "google/protobuf/timestamp.proto";
message Price {
  option (confluent.message_meta).doc = "what it costs";
  confluent.type.Decimal amount = 1 [(confluent.field_meta).doc = "in euros"];
  google.type.Date day = 2; google.protobuf.Timestamp at = 3;
}
"""
PRICE = (
    "struct<amount:struct<value:binary,precision:bigint,scale:int>,"
    "day:struct<year:int,month:int,day:int>,at:struct<seconds:bigint,nanos:int>>"
)


def test_files_that_every_client_has_built_in_are_read() -> None:
    files = descriptors.files_of(RegistrySchema("PROTOBUF", BUILT_IN))
    assert protobuf.fields_of(descriptors.descriptor_of(files, "shop.Price")).simpleString() == PRICE
    row = {
        "amount": {"value": b"\x04\xd2", "precision": 6, "scale": 2},
        "day": {"year": 2026, "month": 3, "day": 29},
        "at": None,
    }
    data = protobuf.ProtobufWriter(files, "shop.Price").make_converter()(row)
    reader = protobuf.ProtobufReader(files, "shop.Price", None, OnSchemaChange.FAIL)
    assert reader.make_converter()(data) == ((b"\x04\xd2", 6, 2), (2026, 3, 29), None)
    # A descriptor that leaves them out, as protoc without --include_imports makes it.
    own = descriptor_pb2.FileDescriptorSet.FromString(files).file[-1]
    alone = descriptor_pb2.FileDescriptorSet(file=[own]).SerializeToString()
    assert protobuf.fields_of(descriptors.descriptor_of(alone, "shop.Price")).simpleString() == PRICE


@pytest.mark.parametrize(
    ("missing", "name", "says"),
    [
        ("google.type", "google/type/date.proto", "googleapis-common-protos"),
        ("confluent_kafka.schema_registry.confluent", "confluent/meta.proto", "confluent-kafka"),
    ],
)
def test_a_package_that_brings_a_built_in_file_and_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: str, name: str, says: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    text = f'syntax = "proto3"; import "{name}"; message A {{}}'
    says = rf"needs {says}, for the file '{name}': .*pip install .*'{says}"
    with pytest.raises(EnvironmentFault, match=says):
        descriptors.files_of(RegistrySchema("PROTOBUF", text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("message A { Foo x = 1; }", 'The compiler says: schema.proto:2:13: "Foo" is not defined'),
        ('import "no/such.proto";', 'schema.proto:2:1: Import "no/such.proto" was not found'),
        ('import "google/type/none.proto";', 'schema.proto:2:1: Import "google/type/none.proto" was not'),
        ('import "confluent/../../x.proto";', "schema.proto:2:1: Import"),
    ],
)
def test_what_the_compiler_says_is_in_the_message(text: str, says: str) -> None:
    with pytest.raises(SchemaError) as refused:
        descriptors.files_of(RegistrySchema("PROTOBUF", f'syntax = "proto3";\n{text}'))
    assert says in str(refused.value) and "flinkish-protobuf" not in str(refused.value)
