"""Avro read with another schema than it was written with, as Java reads it: Spark and Flink do by that."""

from __future__ import annotations

import copy
import io
import json
import random
import struct
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_type

from flinkish_spark.connectors.formats import avro
from flinkish_spark.connectors.formats.reader import CodecError
from flinkish_spark.core.errors import SchemaError

#: Of schemas, each with one value. In 6,000 there was no difference either.
_PAIRS = 400
_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "string", "bytes")
_DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}
_MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
_WIDER = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
_SYMBOLS = ("P", "Q", "R", "S")


class Schemas:
    """Schemas of writers, what becomes of them in readers, and values."""

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._names = chance, 0

    def any(self, depth: int) -> Any:
        kinds = [*_PRIMITIVES[1:] * 2, "enum", "fixed", "decimal", "millis"]
        return self.one(
            self._chance.choice([*kinds, *["record", "array", "map", "union"] * 5 * (depth > 0)]), depth
        )

    def one(self, kind: str, depth: int) -> Any:
        chance = self._chance
        match kind:
            case "decimal":
                return dict(_DECIMAL)
            case "millis":
                return dict(_MILLIS)
            case "enum":
                return {"type": kind, "name": self._name(), "symbols": chance.sample(_SYMBOLS, 2)}
            case "fixed":
                return {"type": kind, "name": self._name(), "size": chance.choice([1, 2])}
            case "array":
                return {"type": kind, "items": self.any(depth - 1)}
            case "map":
                return {"type": kind, "values": self.any(depth - 1)}
            case "record":
                names = chance.sample("abcde", chance.randrange(1, 4))
                fields = [{"name": name, "type": self.any(depth - 1)} for name in names]
                return {"type": kind, "name": self._name(), "fields": fields}
            case "union":
                kinds = [*_PRIMITIVES, "null", "enum", "fixed", "record", "record", "array", "map", "decimal"]
                return _union(
                    [self.one(one, depth - 1) for one in chance.sample(kinds, chance.randrange(2, 5))]
                )
        return kind

    def _name(self) -> str:
        self._names += 1
        return f"x.N{self._names}"

    def evolved(self, schema: Any) -> Any:
        """Return what another version of a program might read with."""
        chance = self._chance
        if chance.random() < 0.04:
            return self.any(1)
        if isinstance(schema, list):
            made = [self.evolved(one) if chance.random() < 0.4 else one for one in schema]
            chance.shuffle(made)
            more = [chance.choice(_PRIMITIVES)] if chance.random() < 0.3 else []
            return _union(
                more + [one for each in made for one in (each if isinstance(each, list) else [each])]
            )
        if chance.random() < 0.2:
            return _union(chance.sample([schema, schema, *_PRIMITIVES], 4))
        if isinstance(schema, str):
            return chance.choice([schema, *_WIDER.get(schema, ())])
        made = copy.deepcopy(schema)
        if "name" in made and chance.random() < 0.2:
            made |= {"name": self._name(), "aliases": [made["name"]]}
        match made["type"]:
            case "enum":
                made["symbols"] = chance.sample(_SYMBOLS, 3)
                if chance.random() < 0.5:
                    made["default"] = chance.choice(made["symbols"])
            case "array":
                made["items"] = self.evolved(made["items"])
            case "map":
                made["values"] = self.evolved(made["values"])
            case "record":
                made["fields"] = [self._evolved_field(one) for one in made["fields"] if chance.random() < 0.8]
                new = self.any(1)
                given = {"default": self.default(new)} if chance.random() < 0.8 else {}
                made["fields"].insert(0, {"name": "n", "type": new, **given})
        return made

    def _evolved_field(self, field: dict[str, Any]) -> dict[str, Any]:
        made = {"name": field["name"], "type": self.evolved(field["type"])}
        if self._chance.random() < 0.2:
            made |= {"name": f"new_{field['name']}", "aliases": [field["name"]]}
        return made

    def default(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return self.default(schema[0])
        match schema if isinstance(schema, str) else schema["type"]:
            case "record":
                return {one["name"]: self.default(one["type"]) for one in schema["fields"]}
            case "array":
                # Of a union with an array in front, Java's takes none that has something within.
                return []
            case "map":
                return {"k": self.default(schema["values"])}
            case "fixed":
                return "\u00ff" * schema["size"]
            case "enum":
                return schema["symbols"][0]
            case "bytes":
                return "\u0001"
            case kind:
                return {"null": None, "boolean": True, "string": "é", "float": 1.5, "double": -0.25}.get(
                    kind, 7
                )

    def value(self, schema: Any) -> Any:
        """Return a value as fastavro writes it."""
        chance = self._chance
        if isinstance(schema, list):
            one = chance.choice(schema)
            name = one if isinstance(one, str) else one.get("name", one["type"])
            return (name, self.value(one))
        kind = schema if isinstance(schema, str) else schema["type"]
        match kind:
            case "record":
                return {one["name"]: self.value(one["type"]) for one in schema["fields"]}
            case "array":
                return [self.value(schema["items"]) for _ in range(chance.randrange(3))]
            case "map":
                return {f"k{at}": self.value(schema["values"]) for at in range(chance.randrange(3))}
            case "fixed":
                return chance.randbytes(schema["size"])
            case "enum":
                return chance.choice(schema["symbols"])
            case "long" if schema != "long":
                return chance.choice([0, -1, 1_700_000_000_000])
            case "bytes" if schema != "bytes":
                return chance.choice([b"\x01", b"\xff", b"\x00\x7f"])
        return chance.choice(_VALUES[kind])


_VALUES: dict[str, list[Any]] = {
    "null": [None],
    "boolean": [True, False],
    "int": [0, 5, 2**31 - 1, -(2**31)],
    "long": [-7, 2**53 + 1, 2**63 - 1, -(2**63), 16_777_217],
    "float": [struct.unpack("<f", struct.pack("<f", 0.1))[0], 1.5, -(2.0**80)],
    "double": [0.1, -0.25, 1e300],
    "string": ["", "x", "äö", "\U0001f600"],
    "bytes": [b"", b"abc", "ä".encode()],
}


def _union(branches: list[Any]) -> list[Any]:
    """Return a union of them; the specification allows one of each kind that has no name."""
    kinds = {(one if isinstance(one, str) else one.get("name", one["type"])): one for one in branches}
    return list(kinds.values()) if set(kinds) != {"null"} else ["null", "string"]


def _column(schema: Any, named: dict[str, Any], told: Any) -> Any:
    """Return the value of a column for what Java's JsonEncoder wrote, which names the branches of unions."""
    schema = named.get(schema, schema) if isinstance(schema, str) else schema
    if isinstance(schema, list):
        kept = [one for one in avro._branches(schema) if one != "null"]
        if told is None:
            return None
        ((name, inner),) = told.items()
        wholes = [named.get(one, one) if isinstance(one, str) else one for one in schema]
        branch = next(
            one for one in wholes if name == (one if isinstance(one, str) else one.get("name", one["type"]))
        )
        value = _column(branch, named, inner)
        if len(kept) == 1:
            return value
        at = next(at for at, one in enumerate(kept) if named.get(str(one), one) == branch)
        return (*[None] * at, value, *[None] * (len(kept) - at - 1))
    match schema if isinstance(schema, str) else schema["type"]:
        case "record":
            return tuple(_column(one["type"], named, told[one["name"]]) for one in schema["fields"])
        case "array":
            return [_column(schema["items"], named, one) for one in told]
        case "map":
            return [(key, _column(schema["values"], named, one)) for key, one in told.items()]
        case "bytes" | "fixed":
            data = told.encode("latin-1")
            is_plain = schema == "bytes" or "logicalType" not in schema
            return data if is_plain else Decimal(int.from_bytes(data, "big", signed=True)).scaleb(-2)
        case "float":
            return struct.unpack("<f", struct.pack("<f", told))[0]
        case "double":
            return float(told)
        case "long" if schema != "long" and "logicalType" in schema:
            return told * 1000
    return told


class Java:
    """Java's Avro, in the JVM of a session."""

    def __init__(self, spark: SparkSession) -> None:
        jvm = spark._jvm
        self._avro, self._bytes = jvm.org.apache.avro, jvm.java.io.ByteArrayOutputStream

    def read(self, writer: str, reader: str, data: bytes) -> Any:
        """Return what JsonEncoder writes of a record."""
        theirs, ours = (getattr(self._avro, "Schema$Parser")().parse(one) for one in (writer, reader))
        decoder = self._avro.io.DecoderFactory.get().binaryDecoder(data, None)
        value = self._avro.generic.GenericDatumReader(theirs, ours).read(None, decoder)
        out = self._bytes()
        encoder = self._avro.io.EncoderFactory.get().jsonEncoder(ours, out)
        self._avro.generic.GenericDatumWriter(ours).write(value, encoder)
        encoder.flush()
        return json.loads(out.toString("UTF-8"))


@pytest.fixture(scope="module")
def java(spark: SparkSession) -> Java:
    return Java(spark)


def test_what_both_read_is_the_same(java: Java) -> None:
    compared = 0
    for seed in range(_PAIRS):
        schemas = Schemas(random.Random(seed))
        written = schemas.one("record", 3)
        writer, reader = json.dumps(written), json.dumps(schemas.evolved(written))
        out = io.BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(written), schemas.value(written))
        theirs, ours = (
            _java_reads(java, writer, reader, out.getvalue()),
            _we_read(writer, reader, out.getvalue()),
        )
        if theirs is not None and ours is not None:
            schema = avro.parse_schema(reader)
            named = avro.find_named_types(schema)
            kind = to_arrow_type(avro.to_spark_type(schema, named, ""), timezone="UTC")
            assert _stored(ours, kind) == _stored(_column(schema, named, theirs), kind), (
                seed,
                writer,
                reader,
            )
            compared += 1
    assert compared > _PAIRS / 2


def _stored(value: Any, kind: pa.DataType) -> Any:
    return pa.array([value], kind).to_pylist()


def _java_reads(java: Java, writer: str, reader: str, data: bytes) -> Any:
    try:
        return java.read(writer, reader, data)
    except Py4JJavaError as error:
        assert "org.apache.avro" in str(error.java_exception), error
        return None


def _we_read(writer: str, reader: str, data: bytes) -> Any:
    try:
        theirs, ours = avro.parse_schema(writer), avro.parse_schema(reader)
        _ = avro.to_spark_type(ours, avro.find_named_types(ours), "")
        resolution = avro.Resolution(theirs, ours)
        convert = resolution.convert()
        return None if resolution.found.other else avro._reading(theirs, convert, True, 0)(data)
    except (SchemaError, avro.ResolutionError, CodecError):
        return None
