"""CPU per record of reading Avro and Protobuf: a slice at once, and the same slice record by record."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import fastavro
import pyarrow as pa

from flinkish_spark import OnSchemaChange
from flinkish_spark.connectors.formats import avro, protobuf
from flinkish_spark.connectors.formats.reader import Reader, SliceReader
from flinkish_spark.connectors.formats.registry import RegistrySchema

RECORDS, SLICE, ROUNDS = 100_000, 10_000, 3
PROTOBUF = {
    "flat": """syntax = "proto3"; message M {
        int64 id = 1; string name = 2; int32 n = 3; double price = 4; bool ok = 5; string city = 6;
        int64 at = 7; string raw = 8;
    }""",
    "nested": """syntax = "proto3"; message M {
        int64 id = 1; Color color = 2; Time at = 3; repeated Item items = 4; map<string, int64> counts = 5;
        repeated int32 codes = 6; optional string note = 7; oneof what { string a = 8; int32 b = 9; }
        message Item { string sku = 1; int32 q = 2; double price = 3; Color c = 4; }
        message Time { int64 seconds = 1; int32 nanos = 2; }
        enum Color { RED = 0; BLUE = 1; GREEN = 2; }
    }""",
}
_ITEM = {"sku": "string", "q": "int", "price": "double", "c": "Color"}
_TIME = {"type": "long", "logicalType": "timestamp-micros"}
_FLAT = {"id": "long", "name": "string", "n": "int", "price": "double", "ok": "boolean", "city": "string"}


def _record(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": at, "type": one} for at, one in fields.items()],
    }


AVRO = {
    "flat": _record("M", {**_FLAT, "at": _TIME, "raw": "string"}),
    "nested": _record(
        "M",
        {
            "id": "long",
            "color": {"type": "enum", "name": "Color", "symbols": ["RED", "BLUE", "GREEN"]},
            "at": _TIME,
            "items": {"type": "array", "items": _record("Item", _ITEM)},
            "counts": {"type": "map", "values": "long"},
            "codes": {"type": "array", "items": "int"},
            "note": ["null", "string"],
            "a": ["null", "string"],
            "b": ["null", "int"],
        },
    ),
}


def rows(shape: str) -> Iterator[dict[str, Any]]:
    chance = random.Random(1)
    for at in range(RECORDS):
        number, micros = chance.randrange(1 << 40), 1_700_000_000_000_000 + at * 1_000
        if shape == "flat":
            yield {
                **{
                    "id": number,
                    "name": f"person {at % 1_000}",
                    "n": chance.randrange(1_000),
                    "raw": "x" * (at % 20),
                },
                **{"price": chance.random() * 100, "ok": at % 2 == 0, "city": "Berlin", "at": micros},
            }
            continue
        items = [
            {"sku": f"sku-{chance.randrange(1_000)}", "q": 5, "price": chance.random(), "c": "BLUE"}
            for _ in range(at % 4)
        ]
        yield {
            **{"id": number, "color": ("RED", "BLUE", "GREEN")[at % 3], "at": micros, "items": items},
            **{"counts": {key: chance.randrange(1_000) for key in ("a", "bb", "ccc")[: at % 4]}},
            **{
                "codes": [chance.randrange(10_000) for _ in range(at % 5)],
                "note": None if at % 3 else "note",
            },
            **{"a": "x" if at % 2 else None, "b": None if at % 2 else at},
        }


def of_protobuf(shape: str) -> tuple[Reader, list[bytes]]:
    files = protobuf.files_of(RegistrySchema("PROTOBUF", PROTOBUF[shape]))
    write = protobuf.ProtobufWriter(files, "M").make_converter()
    made = []
    for row in rows(shape):
        if shape == "nested":
            seconds, micros = divmod(row["at"], 1_000_000)
            row["at"] = {"seconds": seconds, "nanos": micros * 1_000}
        made.append(write(row))
    return protobuf.ProtobufReader(files, "M", None, OnSchemaChange.FAIL), made


def of_avro(shape: str) -> tuple[Reader, list[bytes]]:
    schema, made = fastavro.parse_schema(AVRO[shape]), []
    for row in rows(shape):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, row)
        made.append(out.getvalue())
    text = json.dumps(avro.parse_schema(json.dumps(AVRO[shape])))
    return avro.AvroReader(text, "value", None, OnSchemaChange.FAIL), made


def cpu(read: Callable[[pa.Array], Any], column: pa.Array) -> float:
    """Return the fewest microseconds per record of some rounds."""
    found = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for at in range(0, len(column), SLICE):
            read(column.slice(at, SLICE))
        found.append((time.process_time() - begun) / len(column) * 1e6)
    return min(found)


def main() -> None:
    print("| records | bytes | one by one | at once |\n|---|---:|---:|---:|")
    for name, made_of in (("Avro", of_avro), ("Protobuf", of_protobuf)):
        for shape in ("flat", "nested"):
            reader, values = made_of(shape)
            column = pa.array(values, pa.binary())
            read = SliceReader(reader)
            slow, fast = cpu(read._read_by_record, column), cpu(read.read, column)
            size = sum(map(len, values)) // len(values)
            print(f"| {name}, {shape} | {size} | {slow:.2f} us | {fast:.2f} us |", flush=True)


if __name__ == "__main__":
    main()
