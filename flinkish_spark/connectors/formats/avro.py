"""Avro records of a source: schemas, what each type becomes, and reading by the schema of the writer.

fastavro reads and resolves the writer's schema to the one that is read with. It does not see logical types:
those are made here, of whole numbers and bytes, so that no number passes through a float and no time through
a clock with other years. Two schemas that disagree about a logical type would give another value without a
word, so they are refused.
"""

from __future__ import annotations

import decimal
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.connectors.formats.reader import (
    Difference,
    Reader,
    Unreadable,
    WriterSchemas,
    check_difference,
)
from flinkish_spark.connectors.formats.registry import (
    HEADER_BYTES,
    Registered,
    needed,
)
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.core.formats import OnSchemaChange, SchemaRegistry
from flinkish_spark.types.schemas import check_field_names

Convert = Callable[[Any], Any]
_PRIMITIVES: Mapping[str, T.DataType] = {
    "boolean": T.BooleanType(),
    "int": T.IntegerType(),
    "long": T.LongType(),
    "float": T.FloatType(),
    "double": T.DoubleType(),
    "string": T.StringType(),
    "bytes": T.BinaryType(),
}
_MOST_DIGITS = 38
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_FIRST_MICRO, _LAST_MICRO = -62_135_596_800_000_000, 253_402_300_799_999_999
#: Of a schema that says no more about its values; who reads by it wants them as they are.
_PLAIN = "a plain value"
#: Logical types whose values are what their own type says; all others are left to that, too.
_TIMES: Mapping[str, tuple[T.DataType, int]] = {
    "timestamp-millis": (T.TimestampType(), 1_000),
    "timestamp-micros": (T.TimestampType(), 1),
    "local-timestamp-millis": (T.TimestampNTZType(), 1_000),
    "local-timestamp-micros": (T.TimestampNTZType(), 1),
}
_EXACT = decimal.Context(prec=_MOST_DIGITS + 1)


# ----------------------------------------------------------------------------------------------------------
# Schemas: with everything in them that they name, without logical types, and compared.


def whole_schema(text: str, references: Sequence[tuple[str, str]] = ()) -> Any:
    """Return a schema with full names, in which every type is defined where it is first named.

    Parameters
    ----------
    references
        Schemas that it may name types of, what is needed first in front.

    Raises
    ------
    SchemaError
        It is no schema.
    """
    try:
        import fastavro
    except ImportError as missing:
        raise needed("avro", "fastavro", missing) from None
    named: dict[str, Any] = {}
    try:
        for _, one in references:
            fastavro.parse_schema(json.loads(one), named)
        known = set(named)
        parsed = fastavro.parse_schema(json.loads(text), named)
    except Exception as wrong:
        raise SchemaError("an Avro schema cannot be read", why=f"{type(wrong).__name__}: {wrong}") from None
    return _inlined(parsed, {name: named[name] for name in known}, set())


def _inlined(schema: Any, named: Mapping[str, Any], seen: set[str]) -> Any:
    match schema:
        case str():
            if schema not in named or schema in seen:
                return schema
            return _inlined(named[schema], named, seen)
        case list():
            return [_inlined(one, named, seen) for one in schema]
    made = {name: value for name, value in schema.items() if not name.startswith("__")}
    kind = made["type"]
    if "name" in made:
        seen.add(made["name"])
    if kind in ("record", "error"):
        made["fields"] = [{**one, "type": _inlined(one["type"], named, seen)} for one in made["fields"]]
    elif kind == "array":
        made["items"] = _inlined(made["items"], named, seen)
    elif kind == "map":
        made["values"] = _inlined(made["values"], named, seen)
    return made


def _bare(schema: Any) -> Any:
    """Return a schema without logical types."""
    match schema:
        case list():
            return [_bare(one) for one in schema]
        case dict():
            left = {name: value for name, value in schema.items() if name not in ("logicalType",)}
            if "fields" in left:
                left["fields"] = [{**one, "type": _bare(one["type"])} for one in left["fields"]]
            for name in ("items", "values"):
                if name in left:
                    left[name] = _bare(left[name])
            if isinstance(left.get("type"), str) and left["type"] in _PRIMITIVES:
                return left["type"]
            return left
    return schema


def _kind(schema: Any) -> str:
    if isinstance(schema, list):
        return "union"
    found = schema if isinstance(schema, str) else schema["type"]
    return str(found)


def differences(writer: Any, reader: Any) -> Difference:
    """Compare a writer's schema with the one that is read with; both from :func:`whole_schema`."""
    found = Difference()
    _Comparison(_names_in(writer), _names_in(reader), found).compare(writer, reader, "")
    return found


@dataclass
class _Comparison:
    writers: Mapping[str, Any]
    readers: Mapping[str, Any]
    found: Difference
    seen: set[tuple[str, str]] = field(default_factory=set)

    def compare(self, writer: Any, reader: Any, path: str) -> None:
        writer = self.writers.get(writer, writer) if isinstance(writer, str) else writer
        reader = self.readers.get(reader, reader) if isinstance(reader, str) else reader
        if isinstance(writer, list):
            for one in writer:
                self.compare(one, reader, path)
            return
        if isinstance(reader, list):
            full = self.writers.get(writer, writer) if isinstance(writer, str) else writer
            branch = _branch_of(full, [self.readers.get(r, r) if isinstance(r, str) else r for r in reader])
            if branch is not None:
                self.compare(writer, branch, path)
            return
        kind = _kind(writer)
        if kind == "record" and _kind(reader) == "record":
            self._records(writer, reader, path)
        elif kind == "array" and _kind(reader) == "array":
            self.compare(writer["items"], reader["items"], f"{path}[]")
        elif kind == "map" and _kind(reader) == "map":
            self.compare(writer["values"], reader["values"], f"{path}[]")
        elif (ours := _logical(reader)) not in (theirs := _logical(writer), _PLAIN):
            self.found.other.append(f"{path or 'the value'} ({theirs} is read as {ours})")

    def _records(self, writer: Any, reader: Any, path: str) -> None:
        at = (writer["name"], reader["name"])
        if at in self.seen:
            return
        self.seen.add(at)
        known = {name: one for one in reader["fields"] for name in (one["name"], *one.get("aliases", ()))}
        for one in writer["fields"]:
            name = f"{path}.{one['name']}" if path else one["name"]
            if one["name"] in known:
                self.compare(one["type"], known[one["name"]]["type"], name)
            else:
                self.found.left_out.append(name)


def _logical(schema: Any) -> str:
    """Return what the values of a schema mean, where another meaning gives other values."""
    if not isinstance(schema, dict):
        return _PLAIN
    name = str(schema.get("logicalType", ""))
    if name == "decimal":
        return f"decimal({schema.get('precision')},{schema.get('scale', 0)})"
    is_time = name.startswith(("timestamp-", "local-timestamp-", "time-"))
    return name if is_time or name == "date" else _PLAIN


def _branch_of(writer: Any, branches: Sequence[Any]) -> Any:
    kind = _kind(writer)
    same = [one for one in branches if _kind(one) == kind]
    if isinstance(writer, dict) and "name" in writer:
        short = writer["name"].rpartition(".")[2]
        same = [one for one in same if one["name"].rpartition(".")[2] == short] or same
    alike = [one for one in same if _logical(one) == _logical(writer)]
    return (alike or same or [None])[0]


def _names_in(schema: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def walk(one: Any) -> None:
        if isinstance(one, list):
            for branch in one:
                walk(branch)
        elif isinstance(one, dict):
            if "name" in one:
                found[one["name"]] = one
            for inner in (
                *(each["type"] for each in one.get("fields", ())),
                one.get("items"),
                one.get("values"),
            ):
                if inner is not None:
                    walk(inner)

    walk(schema)
    return found


# ----------------------------------------------------------------------------------------------------------
# What each type becomes, and how a value of it is made of what fastavro reads.


@dataclass(frozen=True)
class Typed:
    """A type of a column, and what makes a value of it; None where what is read is that already."""

    kind: T.DataType
    convert: Convert | None = None


def typed(schema: Any, named: Mapping[str, Any], path: str, within: tuple[str, ...] = ()) -> Typed:
    """Return what a schema becomes.

    Raises
    ------
    SchemaError
        Spark has no type for it.
    """
    if isinstance(schema, str) and schema in named:
        schema = named[schema]
    if isinstance(schema, list):
        return _union(schema, named, path, within)
    kind = _kind(schema)
    logical = str(schema.get("logicalType", "")) if isinstance(schema, dict) else ""
    if kind == "record":
        return _record(schema, named, path, within)
    if kind == "array":
        inner = typed(schema["items"], named, f"{path}[]", within)
        return Typed(T.ArrayType(inner.kind), _convert_each(inner.convert))
    if kind == "map":
        inner = typed(schema["values"], named, f"{path}[]", within)
        return Typed(T.MapType(T.StringType(), inner.kind), partial(_pairs, inner.convert))
    if logical == "decimal" and kind in ("bytes", "fixed"):
        return _decimal(int(schema["precision"]), int(schema.get("scale", 0)), path)
    if logical == "date" and kind == "int":
        return Typed(T.DateType(), partial(_within_years, _FIRST_DAY, _LAST_DAY, 1, path))
    if logical in _TIMES and kind == "long":
        time, micros = _TIMES[logical]
        return Typed(time, partial(_within_years, _FIRST_MICRO, _LAST_MICRO, micros, path))
    if kind == "enum":
        return Typed(T.StringType())
    if kind == "fixed":
        return Typed(T.BinaryType(), _bytes)
    if kind == "bytes":
        return Typed(T.BinaryType(), _bytes)
    if kind not in _PRIMITIVES:
        raise SchemaError(
            f"the field '{path}' of an Avro schema is {kind}",
            why="no column holds such values",
            what_to_do="leave it out of the schema that is read with",
        )
    return Typed(_PRIMITIVES[kind])


def _record(schema: Any, named: Mapping[str, Any], path: str, within: tuple[str, ...]) -> Typed:
    name = str(schema["name"])
    if name in within:
        raise SchemaError(
            f"the Avro record '{name}' has itself within it, in '{path}'",
            why="Spark has no type that does",
            what_to_do="leave that field out of the schema that is read with",
        )
    fields = [
        (
            one["name"],
            typed(one["type"], named, f"{path}.{one['name']}" if path else one["name"], (*within, name)),
        )
        for one in schema["fields"]
    ]
    struct = T.StructType([T.StructField(name, one.kind) for name, one in fields])
    check_field_names(struct, f"the Avro record '{name}'")
    converts = [(name, one.convert) for name, one in fields]
    return Typed(struct, partial(_row, tuple(converts)))


def _union(schema: Any, named: Mapping[str, Any], path: str, within: tuple[str, ...]) -> Typed:
    branches = [one for one in schema if one != "null"]
    kinds = [_kind(named.get(one, one) if isinstance(one, str) else one) for one in branches]
    plain = all(isinstance(one, str) for one in branches)
    if plain and len(branches) > 1 and set(kinds) <= {"int", "long"}:
        return Typed(T.LongType())
    if plain and len(branches) > 1 and set(kinds) <= {"float", "double"}:
        return Typed(T.DoubleType())
    if not branches:
        raise SchemaError(f"the field '{path}' of an Avro schema is always null", what_to_do="leave it out")
    made = [typed(one, named, path, within) for one in branches]
    if len(made) == 1:
        inner = made[0].convert
        return Typed(made[0].kind, partial(_of_one_branch, inner))
    struct = T.StructType([T.StructField(f"member{at}", one.kind) for at, one in enumerate(made)])
    names = [
        (named.get(one, one) if isinstance(one, str) else one).get("name", kind)
        if not isinstance(one, str) or one in named
        else kind
        for one, kind in zip(branches, kinds, strict=True)
    ]
    places = {name: at for at, name in enumerate(names)}
    return Typed(struct, partial(_of_a_branch, places, tuple(one.convert for one in made), path))


def _decimal(precision: int, scale: int, path: str) -> Typed:
    if not 0 < precision <= _MOST_DIGITS or scale > precision:
        raise SchemaError(
            f"the field '{path}' of an Avro schema is a decimal({precision},{scale})",
            why=f"Spark has {_MOST_DIGITS} at most",
            what_to_do="read it as bytes: leave logicalType out of the schema that is read with",
        )
    return Typed(T.DecimalType(precision, scale), partial(_exact_decimal, precision, scale, path))


def _bytes(value: Any) -> bytes:
    # A default stands in the schema as text, a letter for each byte.
    return value.encode("latin-1") if isinstance(value, str) else bytes(value)


def _exact_decimal(precision: int, scale: int, path: str, value: Any) -> decimal.Decimal | None:
    if value is None:
        return None
    unscaled = int.from_bytes(_bytes(value), "big", signed=True)
    if abs(unscaled) >= 10**precision:
        raise Unreadable(f"the field '{path}' has more than the {precision} digits of its decimal")
    return decimal.Decimal(unscaled).scaleb(-scale, _EXACT)


def _within_years(first: int, last: int, factor: int, path: str, value: int | None) -> int | None:
    if value is None:
        return None
    made = value * factor
    if not first <= made <= last:
        raise Unreadable(f"the field '{path}' is in no year from 1 to 9999")
    return made


def _convert_each(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda values: [convert(one) for one in values]


def _pairs(convert: Convert | None, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, one if convert is None else convert(one)) for key, one in values.items()]


def _row(converts: Sequence[tuple[str, Convert | None]], record: Any) -> tuple[Any, ...]:
    if isinstance(record, tuple):
        record = record[1]
    return tuple(record[name] if convert is None else convert(record[name]) for name, convert in converts)


def _of_one_branch(convert: Convert | None, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, tuple):
        value = value[1]
    return value if convert is None else convert(value)


def _of_a_branch(
    places: Mapping[str, int], converts: Sequence[Convert | None], path: str, value: Any
) -> tuple[Any, ...] | None:
    if value is None:
        return None
    if isinstance(value, tuple):
        candidates: tuple[str, ...] = (value[0],)
        value = value[1]
    else:
        candidates = _BRANCHES.get(type(value), ())
    at = next((places[name] for name in candidates if name in places), None)
    if at is None:
        # Not by the writer's own union: what is read has one branch with a name, or nobody knows which.
        named = [place for name, place in places.items() if name not in _UNNAMED]
        at = named[0] if len(named) == 1 else None
    if at is None:
        raise Unreadable(f"the field '{path}' has a branch that is not known")
    convert = converts[at]
    made = value if convert is None else convert(value)
    return tuple(made if place == at else None for place in range(len(converts)))


#: What a value of Python's can be, of a type without a name.
_BRANCHES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("long", "int"),
    float: ("double", "float"),
    str: ("string",),
    bytes: ("bytes",),
    list: ("array",),
    dict: ("map",),
}
_UNNAMED = frozenset(name for names in _BRANCHES.values() for name in names)


# ----------------------------------------------------------------------------------------------------------
# Reading.


@dataclass(frozen=True)
class AvroReader(Reader):
    """Reads records by one schema, whatever they were written with.

    Parameters
    ----------
    schema
        As JSON text, with everything in it that it names.
    registry
        Who knows the schemas that records name. None: they were written with `schema`, and name none.
    on_schema_change
        What is done with a writer's schema that has more.
    column
        What the value is called if the schema is not that of a record.
    """

    schema: str
    registry: SchemaRegistry | None
    on_schema_change: OnSchemaChange
    column: str

    @property
    def kind(self) -> T.StructType:  # type: ignore[override]
        """The fields."""
        return self._typed().kind  # type: ignore[return-value]

    def _typed(self) -> Typed:
        schema = whole_schema(self.schema)
        found = typed(schema, _names_in(schema), "")
        if isinstance(found.kind, T.StructType) and _kind(schema) == "record":
            return found
        convert = found.convert
        return Typed(
            T.StructType([T.StructField(self.column, found.kind)]),
            (lambda value: (value,)) if convert is None else (lambda value: (convert(value),)),
        )

    def opened(self) -> Callable[[bytes], tuple[Any, ...]]:
        """Parse the schema; those of writers are asked for when they are met."""
        import fastavro

        convert = self._typed().convert
        assert convert is not None
        own = whole_schema(self.schema)
        ours = fastavro.parse_schema(_bare(own))
        if self.registry is None:
            return lambda data: convert(_decoded(data, 0, ours, None))

        def looked_at(found: Registered) -> Any:
            writer = whole_schema(found.text, found.references)
            check_difference(found, differences(writer, own), self.on_schema_change)
            return fastavro.parse_schema(_bare(writer))

        writers = WriterSchemas(self.registry, "AVRO", looked_at)

        def read(data: bytes) -> tuple[Any, ...]:
            row: tuple[Any, ...] = convert(_decoded(data, HEADER_BYTES, writers.of(data), ours))
            return row

        return read


def _decoded(data: bytes, start: int, writer: Any, reader: Any) -> Any:
    """Return what the bytes from `start` on say, all of which are of one value."""
    import fastavro
    from fastavro.read import SchemaResolutionError

    stream = io.BytesIO(data)
    stream.seek(start)
    try:
        value = fastavro.schemaless_reader(stream, writer, reader, return_named_type=True)
    except SchemaResolutionError as mismatch:
        raise SchemaError(
            "a record was written with an Avro schema that cannot be read with that of the source",
            why=str(mismatch)[:500].rstrip("."),
            what_to_do="give the source a schema that the registry calls compatible with both",
        ) from None
    except EOFError:
        raise Unreadable("the bytes end within a record of the Avro schema") from None
    except MemoryError:
        raise
    except Exception as error:
        raise Unreadable(f"the bytes are no record of its schema: {error or type(error).__name__}") from None
    if stream.tell() != len(data):
        raise Unreadable(f"{len(data) - stream.tell()} bytes follow the record of the Avro schema")
    return value


def avro_reader(
    text: str, column: str, registry: SchemaRegistry | None, change: OnSchemaChange
) -> AvroReader:
    """Return the reader of a schema, which is looked at now.

    Raises
    ------
    SchemaError
        It is none, or has types that no column holds.
    """
    reader = AvroReader(text, registry, change, column)
    _ = reader.kind
    return reader
