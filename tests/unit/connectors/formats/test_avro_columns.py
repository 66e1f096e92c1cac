"""Avro read at once, held against reading record by record: no byte makes another value or another reason."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flinkish_spark import OnSchemaChange, SchemaRegistry
from flinkish_spark.connectors.formats import avro, reader
from flinkish_spark.connectors.formats.reader import READ, REASON
from flinkish_spark.connectors.formats.registry import RegistrySchema, client_of, header
from flinkish_spark.core.errors import SchemaError

_KINDS = ("boolean", "int", "long", "float", "double", "string", "day", "millis", "micros", "local", "enum")
_LOGICAL = {
    "day": {"type": "int", "logicalType": "date"},
    "millis": {"type": "long", "logicalType": "timestamp-millis"},
    "micros": {"type": "long", "logicalType": "timestamp-micros"},
    "local": {"type": "long", "logicalType": "local-timestamp-micros"},
}


class Records:
    """Schemas whose types are all read at once, and values at the limits."""

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._count = chance, 0

    def schema(self, depth: int = 3) -> Any:
        self._count += 1
        name = f"R{self._count}"
        fields = [{"name": f"a{at}", "type": self._type(depth)} for at in range(self._chance.randrange(1, 6))]
        return {"type": "record", "name": name, "fields": fields}

    def _type(self, depth: int) -> Any:
        kind = self._chance.choice([*_KINDS, *["array", "map", "record", "null"] * 3 * (depth > 0)])
        match kind:
            case "array":
                return {"type": "array", "items": self._type(depth - 1)}
            case "map":
                return {"type": "map", "values": self._type(depth - 1)}
            case "record":
                return self.schema(depth - 1)
            case "null":
                inner = self._type(depth - 1)
                while isinstance(inner, list):
                    inner = self._type(depth - 1)
                return self._chance.choice([["null", inner], [inner, "null"]])
            case "enum":
                self._count += 1
                return {"type": "enum", "name": f"E{self._count}", "symbols": ["A", "B", "C"]}
        return _LOGICAL.get(kind, kind)

    def value(self, schema: Any) -> Any:
        chance = self._chance
        if isinstance(schema, list):
            return self.value(chance.choice(schema))
        kind = schema if isinstance(schema, str) else schema.get("logicalType", schema["type"])
        match kind:
            case "null":
                return None
            case "record":
                return {one["name"]: self.value(one["type"]) for one in schema["fields"]}
            case "array":
                return [self.value(schema["items"]) for _ in range(chance.randrange(4))]
            case "map":
                keys = chance.sample(["", "a", "ä", "key"], chance.randrange(4))
                return {key: self.value(schema["values"]) for key in keys}
            case "enum":
                return chance.choice(schema["symbols"])
            case "boolean":
                return chance.random() < 0.5
            case "string":
                return chance.choice(["", "a", "ä€\U0001f600", "x" * 100, "\0"])
            case "float" | "double":
                return chance.choice([0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan")])
            case "int":
                return chance.choice([0, -1, 1, 2**31 - 1, -(2**31)])
            case "date":
                return chance.choice([0, -719_162, 2_932_896])
            case "timestamp-millis":
                return chance.choice([0, 1, -62_135_596_800_000, 253_402_300_799_999])
            case "timestamp-micros" | "local-timestamp-micros":
                return chance.choice([0, -1, -62_135_596_800_000_000, 253_402_300_799_999_999])
        return chance.choice([0, -1, 1, 2**63 - 1, -(2**63)])

    def broken(self, data: bytes) -> bytes:
        chance, made = self._chance, bytearray(data)
        at = chance.randrange(len(made) + 1)
        match chance.randrange(5):
            case 0:
                made[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del made[at:]
            case 2:
                made += chance.randbytes(chance.randrange(1, 4))
            case 3:
                # A number that is longer than it must be, or is none of its type.
                made[at : at + 1] = b"\x80" * chance.randrange(1, 10) + bytes([chance.randrange(3)])
            case 4:
                made[at:at] = chance.randbytes(chance.randrange(1, 3))
        return bytes(made)


def written(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(_without_logical(schema)), value)
    return out.getvalue()


def _without_logical(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {name: _without_logical(one) for name, one in schema.items() if name != "logicalType"}
    return [_without_logical(one) for one in schema] if isinstance(schema, list) else schema


def read_of(schema: Any, registry: SchemaRegistry | None = None) -> reader.SliceReader:
    text = json.dumps(avro.parse_schema(json.dumps(schema)))
    made = avro.AvroReader(text, "value", registry, OnSchemaChange.LEAVE_OUT)
    return reader.SliceReader(made)


def proven(read: reader.SliceReader, values: Sequence[bytes | None]) -> list[bool] | None:
    at_once = reader._make_slice_converter(read.reader)
    assert at_once is not None
    found = at_once(pa.array(values, pa.binary()))
    return None if found is None else found.are_proven.to_pylist()


def comparable(value: Any) -> Any:
    match value:
        case float():
            return "nan" if value != value else value.hex()
        case dict():
            return {name: comparable(one) for name, one in value.items()}
        case [tuple(), *_]:
            return sorted((key, comparable(one)) for key, one in value)
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


@pytest.mark.parametrize("seed", range(40))
def test_records_of_any_schema_are_proven_and_the_same(seed: int) -> None:
    chance = random.Random(seed)
    records = Records(chance)
    schema = records.schema()
    read = read_of(schema)
    values: list[bytes | None] = [written(schema, records.value(schema)) for _ in range(100)]
    assert proven(read, values) == [True] * len(values)
    check_same(read, values)
    for share in (0.02, 0.5):
        check_same(
            read,
            [
                None if chance.random() < 0.05 else records.broken(one) if chance.random() < share else one
                for one in values
                if one is not None
            ],
        )


MAP = {"type": "record", "name": "R", "fields": [{"name": "m", "type": {"type": "map", "values": "int"}}]}
TEXTS = {
    "type": "record",
    "name": "R",
    "fields": [{"name": "s", "type": {"type": "array", "items": "string"}}],
}


@given(st.lists(st.binary(max_size=30), max_size=5))
def test_no_bytes_end_a_task(values: list[bytes]) -> None:
    check_same(read_of(MAP), values)


@pytest.mark.parametrize(
    ("schema", "data", "are_proven"),
    [
        (MAP, b"\x04\x02a\x02\x02b\x02\x00", [True, True]),
        (MAP, b"\x04\x02a\x02\x02a\x04\x00", None),  # a key twice
        (MAP, b"\x02\x02a\x02\x02\x02b\x02\x00", [False, True]),  # in two blocks
        (MAP, b"\x01\x06\x02a\x02\x00", [False, True]),  # a block with its length
        (MAP, b"\x02\x02a\x80\x80\x80\x80\x20\x00", [False, True]),  # no int of 32 bits
        (MAP, b"\x00\x00", [False, True]),  # a byte behind it
        (TEXTS, b"\x02\x02\xff\x00", None),  # no UTF-8
        (TEXTS, b"\x02\x02a", None),  # an end within
    ],
)
def test_only_what_is_written_as_the_same_bytes_is_proven(
    schema: Any, data: bytes, are_proven: list[bool] | None
) -> None:
    read = read_of(schema)
    assert proven(read, [data, b"\x00"]) == are_proven
    check_same(read, [data, None, b"\x00"])


@pytest.mark.parametrize(
    "kind",
    [
        "bytes",
        {"type": "fixed", "name": "F", "size": 2},
        {"type": "bytes", "logicalType": "decimal", "precision": 3},
        ["null", "int", "string"],
        ["int", "long"],
        {"type": "array", "items": {"type": "record", "name": "Empty", "fields": []}},
    ],
)
def test_schemas_that_are_read_record_read_by_record(kind: Any) -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": kind}]}
    assert read_of(schema).reader.make_slice_converter() is None


def test_a_time_beyond_the_years_makes_only_its_own_record_bad() -> None:
    for kind, last in (
        ("micros", 253_402_300_799_999_999),
        ("millis", 253_402_300_799_999),
        ("day", 2_932_896),
    ):
        schema = {"type": "record", "name": "R", "fields": [{"name": "t", "type": _LOGICAL[kind]}]}
        values = [written(schema, {"t": number}) for number in (0, last, last + 1, 0)]
        found = check_same(read_of(schema), values)
        assert [one[REASON] is None for one in found] == [True, True, False, True]


def of(*fields: tuple[Any, ...]) -> Any:
    made = [{"name": name, "type": kind, **(more[0] if more else {})} for name, kind, *more in fields]
    return {"type": "record", "name": "R", "fields": made}


ITEM = {"type": "record", "name": "Item", "fields": [{"name": "x", "type": "int"}]}
OTHER = {**ITEM, "name": "Other"}


@pytest.mark.parametrize(
    ("writer", "ours", "value"),
    [
        (of(("a", "int"), ("b", "string")), of(("b", "string"), ("a", "long")), {"a": 5, "b": "x"}),
        (of(("a", "float")), of(("a", ["null", "double"])), {"a": 0.1}),
        (of(("a", "int")), of(("n", ["null", "string"], {"default": None}), ("a", "int")), {"a": 1}),
        (of(("a", "int")), of(("a", "int"), ("n", ITEM, {"default": {"x": 7}})), {"a": 1}),
        (of(("old", "int")), of(("a", "int", {"aliases": ["old"]})), {"old": 1}),
        (of(("a", ["null", ITEM])), of(("a", ["null", ITEM])), {"a": {"x": 1}}),
        (of(("a", ["null", ITEM])), of(("a", ["null", OTHER])), {"a": None}),
        (of(("a", ["null", "int"])), of(("a", "int")), {"a": 3}),
        (of(("a", "int")), of(("a", ["int", "string"])), {"a": 3}),
        (of(("a", "long")), of(("a", "double")), {"a": 2**53 + 1}),
        (of(("a", _LOGICAL["micros"])), of(("a", "long")), {"a": -(2**63)}),
        (
            of(("a", {"type": "enum", "name": "E", "symbols": ["A", "B"]})),
            of(("a", {"type": "enum", "name": "E", "symbols": ["B"], "default": "B"})),
            {"a": "A"},
        ),
        (of(("i", ITEM), ("j", "Item")), of(("j", ITEM), ("i", "Item")), {"i": {"x": 1}, "j": {"x": 2}}),
    ],
)
def test_records_of_a_writer_are_read_by_the_schema_of_the_source(
    writer: Any, ours: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Schemas:
        def find_by_id(self, schema_id: int) -> RegistrySchema:
            text = json.dumps(writer if schema_id == 1 else ours)
            return RegistrySchema("AVRO", text, (), schema_id, "s", 1)

    monkeypatch.setattr(reader, "client_of", lambda _: Schemas())
    read = read_of(ours, SchemaRegistry(f"http://{abs(hash(json.dumps([writer, ours])))}"))
    found = check_same(read, [header(1) + written(writer, value), None, b"x", header(1)])
    assert found[0][REASON] is None and found[2][REASON] and found[3][REASON]


def test_a_value_without_a_place_ends_the_task_as_read_by_record(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, ours = of(("a", ["null", ITEM])), of(("a", ["null", OTHER]))

    class Schemas:
        def find_by_id(self, schema_id: int) -> RegistrySchema:
            return RegistrySchema("AVRO", json.dumps(writer), (), schema_id, "s", 1)

    monkeypatch.setattr(reader, "client_of", lambda _: Schemas())
    read = read_of(ours, SchemaRegistry("http://unlike"))
    with pytest.raises(SchemaError, match="cannot be read with the schema of the source"):
        read.read(pa.array([header(1) + written(writer, {"a": {"x": 1}})], pa.binary()))


def test_without_the_library_records_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyruhvro", None)
    assert read_of(MAP).reader.make_slice_converter() is None


def test_a_schema_that_is_a_union_is_read_one_by_one_and_ends_no_task() -> None:
    record = {"type": "record", "name": "A", "fields": [{"name": "f", "type": "string"}]}
    registry = SchemaRegistry("http://union")
    client_of(registry)._by_id[1] = RegistrySchema("AVRO", json.dumps(record), schema_id=1)
    read = read_of(["null", record], registry)
    found = check_same(read, [header(1) + b"\x02x", None])
    assert [one[READ] for one in found] == [{"value": {"f": "x"}}, None]


def test_a_record_without_bytes_leaves_its_slice_what_it_is() -> None:
    record = {"type": "record", "name": "A", "fields": [{"name": "f", "type": "string"}]}
    assert proven(read_of(record), [None, b"\x02x", None]) == [True, True, True]
    check_same(read_of(record), [None, b"\x02x", None, b""])
