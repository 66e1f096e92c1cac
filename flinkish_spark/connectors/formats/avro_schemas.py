"""Functions on Avro schemas: kinds, names, logical types, and how two schemas match."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from pyspark.sql import types as T

_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_FIRST_MICRO, _LAST_MICRO = -62_135_596_800_000_000, 253_402_300_799_999_999
#: The logical type of a schema without one.
PLAIN = "a plain value"
#: Logical types of timestamps, each with its Spark type and its microseconds per unit.
TIMES: Mapping[str, tuple[T.DataType, int]] = {
    "timestamp-millis": (T.TimestampType(), 1_000),
    "timestamp-micros": (T.TimestampType(), 1),
    "local-timestamp-millis": (T.TimestampNTZType(), 1_000),
    "local-timestamp-micros": (T.TimestampNTZType(), 1),
}


def kind_of(schema: Any) -> str:
    if isinstance(schema, list):
        return "union"
    found = schema if isinstance(schema, str) else schema["type"]
    return str(found)


def logical_of(schema: Any) -> str:
    if not isinstance(schema, dict):
        return PLAIN
    name = str(schema.get("logicalType", PLAIN))
    return f"decimal({schema['precision']},{schema.get('scale', 0)})" if name == "decimal" else name


def map_parts(schema: Any, change: Callable[[Any], Any]) -> Any:
    """Return a schema with each direct part changed: branches, items, values and the types of fields."""
    if isinstance(schema, list):
        return [change(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for kind, inner in (("array", "items"), ("map", "values")):
        if schema.get("type") == kind and inner in schema:
            made[inner] = change(schema[inner])
    if isinstance(fields := schema.get("fields"), list):
        made["fields"] = [
            {**one, "type": change(one["type"])} if isinstance(one, dict) and "type" in one else one
            for one in fields
        ]
    return made


def find_named_types(schema: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def visit(one: Any) -> Any:
        if isinstance(one, dict) and "name" in one:
            found[one["name"]] = one
        return map_parts(one, visit)

    visit(schema)
    return found


def resolve_name(schema: Any, named: Mapping[str, Any]) -> Any:
    return named.get(schema, schema) if isinstance(schema, str) else schema


def score_match(writer: Any, reader: Any) -> int:
    """Return how well two schemas of one kind match; 0 if they do not."""
    if not isinstance(writer, dict) or "name" not in writer:
        return 2 if logical_of(writer) == logical_of(reader) else 1
    if writer.get("size") != reader.get("size"):
        return 0
    name, ours = str(writer["name"]), str(reader["name"])
    short = name.rpartition(".")[2]
    if name == ours:
        return 3
    if {name, short} & set(reader.get("aliases", ())):
        return 2
    return 1 if short == ours.rpartition(".")[2] else 0


def limits_of(kind: str, logical: str) -> tuple[int, int, int] | None:
    """Return the least and greatest day or microsecond of a type, and the factor from its unit to that."""
    if logical == "date" and kind == "int":
        return _FIRST_DAY, _LAST_DAY, 1
    if logical in TIMES and kind == "long":
        return _FIRST_MICRO, _LAST_MICRO, TIMES[logical][1]
    return None


def name_of(one: Mapping[str, Any], reader: Any, theirs: Container[str]) -> str | None:
    """Return the name of the writer's field that matches a reader's field; None if there is none."""
    names = {each["name"] for each in reader["fields"]}
    called = [one["name"], *(alias for alias in one.get("aliases", ()) if alias not in names)]
    return next((name for name in called if name in theirs), None)
