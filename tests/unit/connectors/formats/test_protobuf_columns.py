"""Protobuf read at once, held against its own reader: no byte makes another value or another reason."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import message_factory
from hypothesis import given
from hypothesis import strategies as st

from flinkish_spark import OnSchemaChange, SchemaRegistry
from flinkish_spark.connectors.formats import protobuf, reader
from flinkish_spark.connectors.formats import protobuf_descriptors as descriptors
from flinkish_spark.connectors.formats.protobuf_columns import is_map, message_columns
from flinkish_spark.connectors.formats.reader import READ, REASON, SliceResult
from flinkish_spark.connectors.formats.registry import RegistrySchema, header
from flinkish_spark.types.arrow_types import arrow_type

_NUMBERS = (
    *("int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64"),
)
SINGLES = (*_NUMBERS, "double", "float", "bool", "string", "bytes", "E")
MAPS = (
    *("<string,In>", "<int32,string>", "<uint64,E>", "<bool,double>"),
    *("<sint64,bytes>", "<fixed32,uint32>", "<uint32,sint32>", "<sfixed64,float>"),
)
TEXT = f"""
syntax = "proto3"; package b;
import "google/protobuf/timestamp.proto"; import "google/protobuf/wrappers.proto";
message M {{
  {" ".join(f"{kind} a{at} = {at};" for at, kind in enumerate(SINGLES, 1))}
  {" ".join(f"optional {kind} b{at} = {at};" for at, kind in enumerate(SINGLES, 21))}
  {" ".join(f"repeated {kind} c{at} = {at};" for at, kind in enumerate([*SINGLES, "In"], 41))}
  {" ".join(f"map{kind} d{at} = {at};" for at, kind in enumerate(MAPS, 61))}
  oneof w {{ string e1 = 71; In e2 = 72; int32 e3 = 73; E e4 = 74; bool e5 = 75; }}
  In f1 = 81; google.protobuf.Timestamp f2 = 82; google.protobuf.StringValue f3 = 83;
  repeated google.protobuf.Timestamp f5 = 85; google.protobuf.UInt64Value f6 = 86;
  message In {{
    int32 x = 1; optional string y = 2; repeated int64 z = 3; Deep n = 4;
    oneof q {{ int32 r = 5; string s = 6; }}
    map<string, int64> m = 7; uint64 u = 8;
  }}
  message Deep {{ E e = 1; repeated E es = 2; double d = 3; }}
}}
enum E {{ option allow_alias = true; Z = 0; A = 1; A2 = 1; NEG = -5; }}
"""
FILES = descriptors.files_of(RegistrySchema("PROTOBUF", TEXT))
MESSAGE = message_factory.GetMessageClass(descriptors.descriptor_of(FILES, "b.M"))
REGISTRY = SchemaRegistry("http://registry")


def read_of(files: bytes, message: str, registry: SchemaRegistry | None = None) -> reader.SliceReader:
    made = protobuf.ProtobufReader(files, message, registry, OnSchemaChange.LEAVE_OUT)
    return reader.SliceReader(made)


def of_text(text: str) -> reader.SliceReader:
    return read_of(descriptors.files_of(RegistrySchema("PROTOBUF", text)), "M")


def proven(read: reader.SliceReader, values: Sequence[bytes | None]) -> list[bool] | None:
    at_once = reader._make_slice_converter(read.reader)
    assert at_once is not None
    found = at_once(pa.array(values, pa.binary()))
    return None if found is None else found.are_proven.to_pylist()


def comparable(value: Any) -> Any:
    """A value in which NaN is NaN, -0.0 is not 0.0, and a map has no order."""
    match value:
        case float():
            return "nan" if value != value else value.hex()
        case dict():
            return {name: comparable(one) for name, one in value.items()}
        case [tuple(), *_]:
            return sorted(((comparable(key), comparable(one)) for key, one in value), key=repr)
        case list():
            return [comparable(one) for one in value]
    return value


def check_same(read: reader.SliceReader, values: Sequence[bytes | None]) -> list[Any]:
    """Hold what a task gets against what each record is by itself."""
    column = pa.array(values, pa.binary())
    made, exact = read.read(column), read._read_by_record(column)
    made.validate(full=True)
    assert made.type == exact.type
    for one, other, value in zip(made.to_pylist(), exact.to_pylist(), values, strict=True):
        assert comparable(one) == comparable(other), value
    return list(made.to_pylist())


class Messages:
    """Messages with values at the limits, and bytes that are nearly messages."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def any(self) -> bytes:
        made = MESSAGE()
        self._fill(made, self._chance.choice([0, 0.05, 0.3, 0.9]))
        return bytes(made.SerializeToString())

    def broken(self) -> bytes:
        chance, data = self._chance, bytearray(self.any())
        at = chance.randrange(len(data) + 1)
        match chance.randrange(8):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[at:]
            case 2:
                # Fields twice: messages are joined, and of a oneof the last one counts.
                data += self.any()
            case 3:
                data += _varint(chance.randrange(1, 100) << 3 | chance.randrange(8)) + chance.randbytes(5)
            case 4:
                data += _varint(chance.choice([3, 4, 23, 24]) << 3) + b"\x80" * chance.randrange(11) + b"\x01"
            case 5:
                tag = chance.choice([1, 3, 14]) << 3 | chance.choice([0, 2])
                data += _varint(tag | 1 << chance.choice([32, 35, 40, 63])) + b"\x01"
            case 6:
                lengths = (
                    b"\xff" * 9 + b"\x01",
                    b"\xff\xff\xff\xff\x0f",
                    b"\x81\x80\x00a",
                    b"\xf5" + b"\xff" * 8,
                )
                data += (
                    _varint(chance.choice([14, 43, 57, 61, 99]) << 3 | 2) + chance.choice(lengths) + b"\x01"
                )
            case 7:
                entries = b"\0", b"\x03\x0a\x01k", b"\x05\x12\x00\x0a\x01k", b"\x06\x0a\x01k\x0a\x01l"
                data += b"\xea\x03" + chance.choice(entries)
        return bytes(data)

    def _fill(self, made: Any, density: float) -> None:
        for one in made.DESCRIPTOR.fields:
            if self._chance.random() > density:
                continue
            place = getattr(made, one.name)
            if is_map(one):
                key, value = (one.message_type.fields_by_name[name] for name in ("key", "value"))
                for _ in range(self._chance.randrange(4)):
                    if value.message_type is not None:
                        self._fill(place[self._value(key)], density)
                    else:
                        place[self._value(key)] = self._value(value)
            elif one.message_type is not None and one.is_repeated:
                for _ in range(self._chance.randrange(3)):
                    self._fill(place.add(), density)
            elif one.message_type is not None:
                place.SetInParent()
                self._fill(place, density)
            elif one.is_repeated:
                place.extend(self._value(one) for _ in range(self._chance.randrange(4)))
            else:
                setattr(made, one.name, self._value(one))

    def _value(self, one: Any) -> Any:
        chance, kind = self._chance, protobuf._NAMES[one.type]
        match kind:
            case "double" | "float":
                return chance.choice([0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan"), 0.1])
            case "bool":
                return chance.random() < 0.5
            case "string":
                return chance.choice(["", "a", "ä€\U0001f600", "x" * 200, "\0"])
            case "bytes":
                return chance.choice([b"", b"\xff\0", b"y" * 130])
            case "enum":
                return chance.choice([0, 1, -5, 7, -1, 2**31 - 1])
        bits = int(kind[-2:])
        if kind.startswith(("u", "f")):
            return chance.choice([0, 1, 2**bits - 1, chance.randrange(2**bits)])
        half = 2 ** (bits - 1)
        return chance.choice([0, 1, -1, -half, half - 1, chance.randrange(-half, half)])


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def test_what_protobuf_writes_is_proven_and_the_same() -> None:
    messages, read = Messages(random.Random(7)), read_of(FILES, "b.M")
    values = [messages.any() for _ in range(1_000)]
    check_same(read, values)
    # Also a timestamp that no nanoseconds can say, an enum's number without a name, and -0.0.
    assert proven(read, values) == [True] * len(values)


@pytest.mark.parametrize("seed", range(5))
def test_bytes_that_are_nearly_messages_are_what_they_are_by_themselves(seed: int) -> None:
    chance = random.Random(seed)
    messages, read = Messages(chance), read_of(FILES, "b.M")
    for share in (0.005, 0.1, 1):
        for size in (1, 70, 300):
            values: list[bytes | None] = [
                messages.broken() if chance.random() < share else messages.any() for _ in range(size)
            ]
            check_same(read, [None if chance.random() < 0.03 else value for value in values])


@given(st.lists(st.binary(max_size=30), max_size=5))
def test_no_bytes_end_a_task(values: list[bytes]) -> None:
    check_same(read_of(FILES, "b.M"), values)


@pytest.mark.parametrize(
    ("data", "is_proven"),
    [
        (b"", True),
        (b"\x18\x00", True),  # a default that is written
        (b"\x18\x81\x00", False),  # a number that is longer than it must be
        (b"\x18\x01\x18\x02", False),  # a field twice
        (b"\x20\x01\x18\x02", False),  # in another order
        (b"\x98\x06\x01", False),  # a field that is not known
        (b"\xd8\x02\x05", False),  # a list that is not packed
        (b"\x1a\x01a", False),  # another wire type
        (b"\x1b\x1c", False),  # a group
        (b"\x8a\x05\x02\x08\x01\x8a\x05\x02\x18\x02", False),  # a message in two parts
    ],
)
def test_only_what_protobuf_itself_would_write_is_proven(data: bytes, is_proven: bool) -> None:
    read = read_of(FILES, "b.M")
    assert proven(read, [data, b""]) == [is_proven, True]
    check_same(read, [data, None, b""])


@pytest.mark.parametrize(
    "data",
    [
        b"\xba\x04\x01a\xc8\x04\x02",  # two members of a oneof
        b"\x8a\x05\x05\x28\x01\x32\x01a",  # of one in a message within
        b"\xf2\x03\x05\x08\x01\x12\x01a\xf2\x03\x05\x08\x01\x12\x01b",  # a key twice
        b"\xea\x03\x03\x0a\x01k",  # an entry without its message
    ],
)
def test_of_a_slice_in_which_a_value_may_be_another_nothing_is_proven(data: bytes) -> None:
    read = read_of(FILES, "b.M")
    assert proven(read, [b"\x18\x01", data]) is None
    check_same(read, [b"\x18\x01", data])


@pytest.mark.parametrize(
    "text",
    [
        'syntax = "proto2"; message M { required int32 a = 1; }',
        'syntax = "proto2"; message M { optional group A = 1 { optional int32 b = 1; } }',
        'edition = "2023"; message In { int32 b = 1; }'
        " message M { In a = 1 [features.message_encoding = DELIMITED]; }",
        'syntax = "proto3"; message M { int32 a = 536870911; }',
        'syntax = "proto3"; message M { In a = 1; message In {} }',
    ],
)
def test_messages_that_only_protobuf_reads(text: str) -> None:
    files = descriptors.files_of(RegistrySchema("PROTOBUF", text))
    message = descriptors.descriptor_of(files, "M")
    assert message_columns(message, arrow_type(protobuf.fields_of(message))) is None
    check_same(of_text(text), [b"", b"\x08\x01", b"\x0a\x00", b"\x0b\x08\x01\x0c"])


@pytest.mark.parametrize("head", ['syntax = "proto2";', 'edition = "2023";'])
def test_what_is_not_set_is_null_whatever_its_default_is(head: str) -> None:
    optional = "optional" if "proto2" in head else ""
    closed = "" if "proto2" in head else "option features.enum_type = CLOSED; "
    fields = f"{optional} int32 a = 1 [default = 5]; {optional} E e = 2; {optional} string s = 3;"
    read = of_text(f"{head} message M {{ {fields} }} enum E {{ {closed}B = 6; }}")
    values = [b"", b"\x08\x00", b"\x10\x06", b"\x10\x07", b"\x1a\x00"]
    assert proven(read, values) == [True] * 5
    rows = [one[READ] for one in check_same(read, values)]
    assert [tuple(row.values()) for row in rows] == [
        (None, None, None),
        (0, None, None),
        (None, "B", None),
        (None, "7", None),
        (None, None, ""),
    ]
    # Of proto2 nobody else looks at the letters.
    check_same(read, [b"", b"\x1a\x01\xff", b""])


class Schemas:
    def find_by_id(self, schema_id: int) -> RegistrySchema:
        text = TEXT if schema_id < 3 else TEXT.replace("message M {", "message M { int32 more = 99;", 1)
        return RegistrySchema("PROTOBUF", text, (), schema_id, "s", 1)


def test_each_record_is_of_the_schema_and_the_message_in_front_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "client_of", lambda _: Schemas())
    read = read_of(FILES, "b.M", SchemaRegistry("http://one"))
    messages = Messages(random.Random(3))
    fronts = [
        header(1) + b"\0",
        header(2) + b"\0",
        header(3) + b"\x02\x00",
        header(1) + b"\x04\x00\x00",
        b"x",
        b"",
    ]
    mixed: list[bytes | None] = [
        None if at % 29 == 0 else fronts[at % len(fronts)] + messages.any() for at in range(400)
    ]
    found = check_same(read, mixed)
    reasons = {(one[REASON] or "")[:19] for one in found}
    assert reasons == {"", "it is the message '", "it does not begin w"}
    check_same(read, [fronts[0] + messages.any() for _ in range(100)] + [fronts[1] + messages.any()] * 100)
    check_same(read, [None, None])
    assert proven(read, [None, fronts[1] + b"\x18\x01", fronts[0], None]) == [True, True, False, True]


def test_a_second_kind_of_front_is_read_at_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "client_of", lambda _: Schemas())
    read = read_of(FILES, "b.M", SchemaRegistry("http://two"))
    monkeypatch.setattr(reader.SliceReader, "_read_by_record", None)
    values = [header(1 + at % 2) + b"\0\x18\x01" for at in range(300)]
    assert [one[READ]["a3"] for one in read.read(pa.array(values, pa.binary())).to_pylist()] == [1] * 300


def test_without_the_library_messages_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ptars", None)
    message = descriptors.descriptor_of(FILES, "b.M")
    assert message_columns(message, arrow_type(protobuf.fields_of(message))) is None


def test_a_slice_is_not_read_again_and_again() -> None:
    tries: list[int] = []

    def at_once(values: pa.Array) -> SliceResult:
        tries.append(len(values))
        rows = pa.array([("",)] * len(values), pa.struct([("s", pa.string())]))
        return SliceResult(rows, pa.array([at == 0 for at in range(len(values))]))

    read = of_text('syntax = "proto3"; message M { string s = 1; }')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_make_slice_converter", lambda _: at_once)
        assert len(read.read(pa.array([b""] * 1_000, pa.binary()))) == 1_000
    assert tries == [1_000]


def test_a_map_has_the_order_of_its_keys_either_way() -> None:
    read = of_text('syntax = "proto3"; message M { map<string, int32> m = 1; map<bool, int32> b = 2; }')
    entry = b"\x0a\x05\x0a\x01%s\x10\x01"
    value = (
        b"".join(entry % name for name in (b"c", b"a", b"b"))
        + b"\x12\x04\x08\x01\x10\x01\x12\x04\x08\x00\x10\x01"
    )
    made, exact = (
        one.to_pylist()[0][READ]
        for one in (read.read(pa.array([value])), read._read_by_record(pa.array([value])))
    )
    assert made == exact == {"m": [("a", 1), ("b", 1), ("c", 1)], "b": [(False, 1), (True, 1)]}
