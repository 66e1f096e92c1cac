"""Reading of Avro records: the mapping to Spark's types, and resolution of the writer's schema.

fastavro decodes with the writer's schema alone and returns the branch of each union value. This module
converts the result to the reader's schema, by "Schema Resolution" of Avro's specification, once for each pair
of schemas. fastavro's own resolution takes the first branch that could hold a value, and does not say which.
Logical types are converted here, from whole numbers and bytes, so that no number passes through a float and
no year is out of Python's range. Two schemas that disagree about a logical type are refused: values would
silently change.
"""

from __future__ import annotations

import decimal
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.connectors.formats.avro_columns import record_columns
from flinkish_spark.connectors.formats.avro_schemas import (
    PLAIN,
    TIMES,
    find_named_types,
    kind_of,
    limits_of,
    logical_of,
    map_parts,
    name_of,
    resolve_name,
    score_match,
)
from flinkish_spark.connectors.formats.proofs import read_after_prefix
from flinkish_spark.connectors.formats.reader import (
    CodecError,
    OnSchemaChange,
    Reader,
    SchemaDifference,
    SliceConverter,
    check_difference,
    prepare_by_id,
    to_mismatch_error,
)
from flinkish_spark.connectors.formats.registry import (
    HEADER_BYTES,
    RegistrySchema,
    SchemaRegistry,
    make_library_error,
)
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.types.arrow_types import arrow_type
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
_COLUMNS: Mapping[str, T.DataType] = {**_PRIMITIVES, "enum": T.StringType(), "fixed": T.BinaryType()}
_MOST_DIGITS = 38
#: Logical types that change the meaning of values, each with its Avro type. All others are ignored.
_LOGICAL: Mapping[str, str] = {
    "date": "int",
    "time-millis": "int",
    "time-micros": "long",
    **{f"timestamp-{unit}": "long" for unit in ("millis", "micros", "nanos")},
    **{f"local-timestamp-{unit}": "long" for unit in ("millis", "micros", "nanos")},
}
_EXACT = decimal.Context(prec=_MOST_DIGITS + 1)


def parse_schema(text: str, references: Sequence[tuple[str, str]] = ()) -> Any:
    """Return a schema with full names, in which each named type is defined at its first use."""
    try:
        import fastavro
    except ImportError as missing:
        raise make_library_error("avro", "fastavro", missing) from None
    named: dict[str, Any] = {}
    try:
        for _, one in references:
            fastavro.parse_schema(_drop_unknown_logical_types(json.loads(one)), named)
        known = set(named)
        parsed = fastavro.parse_schema(_drop_unknown_logical_types(json.loads(text)), named)
    except Exception as wrong:
        raise SchemaError(
            "an Avro schema cannot be read",
            why=f"{type(wrong).__name__}: {wrong}",
            what_to_do="correct the schema",
        ) from None
    return _inline_types(parsed, {name: named[name] for name in known}, set())


def _drop_unknown_logical_types(schema: Any) -> Any:
    """Return a schema as JSON without invalid and unknown logical types."""
    # By the specification these are ignored. fastavro refuses a schema with some of them, even if no reader
    # needs the field.
    if isinstance(schema, dict) and isinstance(schema.get("type"), dict | list) and "name" not in schema:
        return _drop_unknown_logical_types(schema["type"])
    made = map_parts(schema, _drop_unknown_logical_types)
    if isinstance(made, dict) and "logicalType" in made and not _is_known(made):
        del made["logicalType"]
    return made


def _is_known(schema: Mapping[str, Any]) -> bool:
    """Return if a schema's logical type is valid and Spark has a type for its values."""
    name, kind = schema["logicalType"], schema.get("type")
    if name != "decimal":
        return isinstance(name, str) and _LOGICAL.get(name) == kind
    precision, scale, most = schema.get("precision"), schema.get("scale", 0), _MOST_DIGITS
    if kind == "fixed" and type(schema.get("size")) is int:
        most = min(most, len(str((1 << max(8 * schema["size"] - 1, 0)) - 1)) - 1)
    elif kind != "bytes":
        return False
    return type(precision) is int and type(scale) is int and 0 < precision <= most and 0 <= scale <= precision


def _inline_types(schema: Any, named: Mapping[str, Any], seen: set[str]) -> Any:
    if isinstance(schema, str):
        is_new = schema in named and schema not in seen
        return _inline_types(named[schema], named, seen) if is_new else schema
    if isinstance(schema, dict):
        schema = {name: value for name, value in schema.items() if not name.startswith("__")}
        if "name" in schema:
            seen.add(schema["name"])
    return map_parts(schema, lambda one: _inline_types(one, named, seen))


def to_spark_type(
    schema: Any, named: Mapping[str, Any], path: str, within: tuple[str, ...] = ()
) -> T.DataType:
    schema = resolve_name(schema, named)
    if isinstance(schema, list):
        made = [to_spark_type(one, named, path, within) for one in _branches(schema) if one != "null"]
        if not made:
            raise SchemaError(f"the field '{path}' in Avro is always null", what_to_do="leave it out")
        if len(made) == 1:
            return made[0]
        return T.StructType([T.StructField(f"member{at}", one) for at, one in enumerate(made)])
    kind, logical = kind_of(schema), logical_of(schema)
    if kind == "record":
        return _struct(schema, named, path, within)
    if kind == "array":
        return T.ArrayType(to_spark_type(schema["items"], named, f"{path}[]", within))
    if kind == "map":
        return T.MapType(T.StringType(), to_spark_type(schema["values"], named, f"{path}[]", within))
    if logical.startswith("decimal"):
        return T.DecimalType(int(schema["precision"]), int(schema.get("scale", 0)))
    if logical == "date":
        return T.DateType()
    if logical in TIMES:
        return TIMES[logical][0]
    if kind not in _COLUMNS:
        raise SchemaError(
            f"the field '{path}' of an Avro schema is {kind}",
            why="no column holds such values",
            what_to_do="leave it out of the reader's schema",
        )
    return _COLUMNS[kind]


def _branches(union: Sequence[Any]) -> Sequence[Any]:
    """Return the branches of a reader's union, without a number type if a wider one is there."""
    # Only if the union has no other branches: in larger unions each branch has a column.
    for narrow, wide in _WIDER.items():
        if sorted(str(one) for one in union if one != "null") == sorted((narrow, wide)):
            return [one for one in union if one != narrow]
    return union


def _struct(schema: Any, named: Mapping[str, Any], path: str, within: tuple[str, ...]) -> T.StructType:
    name = str(schema["name"])
    if name in within:
        raise SchemaError(
            f"the Avro record '{name}' contains itself, in '{path}'",
            why="Spark has no recursive types",
            what_to_do="leave that field out of the reader's schema",
        )
    struct = T.StructType()
    for one in schema["fields"]:
        struct.add(one["name"], to_spark_type(one["type"], named, _path(path, one), (*within, name)))
    check_field_names(struct, f"the Avro record '{name}'")
    return struct


def _path(path: str, one: Mapping[str, Any]) -> str:
    return f"{path}.{one['name']}" if path else str(one["name"])


#: The field of the record that wraps the value of a boxed branch.
_BOX = "value"
#: A boolean as an enum: byte 0 is number 0, byte 1 is number -1. fastavro reads any byte but 0 as true.
_BOOLEAN: Mapping[str, Any] = {"type": "enum", "name": "boolean", "symbols": {0: False, -1: True}}
_READ_AS: Mapping[str, type] = {
    "null": type(None),
    "int": int,
    "long": int,
    "float": float,
    "double": float,
    "string": str,
    "bytes": bytes,
    "array": list,
    "map": dict,
}
#: Pairs of types whose values have the same type in Python.
_WIDER: Mapping[str, str] = {"int": "long", "float": "double"}


def _wire(schema: Any, named: Mapping[str, Any], made: dict[str, Any]) -> Any:
    """Return a writer's schema in fastavro's parsed form, without logical types."""
    # Branches and symbols are dicts from number to item: in a list, the number -1 would be the last item.
    if isinstance(schema, list):
        branches = [resolve_name(one, named) for one in schema]
        found = {at: _wire(one, named, made) for at, one in enumerate(branches)}
        for at, one in enumerate(branches):
            if _is_boxed(one, branches):
                box = [{"name": _BOX, "type": found[at]}]
                found[at] = {"type": "record", "name": _tag(one, branches), "fields": box}
        return {"type": "union", **found}
    schema = resolve_name(schema, named)
    kind = kind_of(schema)
    if isinstance(schema, str) or kind in _PRIMITIVES or kind == "null":
        return _BOOLEAN if kind == "boolean" else {"type": kind}
    if kind == "array":
        return {"type": kind, "items": _wire(schema["items"], named, made)}
    if kind == "map":
        return {"type": kind, "values": _wire(schema["values"], named, made)}
    name = schema["name"]
    if name not in made:
        one = made[name] = {"type": kind, "name": name}
        if kind == "enum":
            one["symbols"] = dict(enumerate(schema["symbols"]))
        elif kind == "fixed":
            one["size"] = schema["size"]
        else:
            fields = schema["fields"]
            one["fields"] = [{"name": f["name"], "type": _wire(f["type"], named, made)} for f in fields]
    return made[name]


def _is_boxed(branch: Any, union: Sequence[Any]) -> bool:
    return _WIDER.get(kind_of(branch)) in [kind_of(one) for one in union]


def _tag(branch: Any, union: Sequence[Any]) -> str | type:
    """Return what identifies a branch: the name that comes with its values, or their Python type."""
    if isinstance(branch, dict) and "name" in branch:
        return str(branch["name"])
    kind = kind_of(branch)
    return kind if kind == "boolean" or _is_boxed(branch, union) else _READ_AS[kind]


class ResolutionError(Exception):
    """The writer's schema, or a value of it, does not resolve to the reader's schema."""


@dataclass
class Resolution:
    """Resolves a writer's schema to a reader's schema, both from :func:`parse_schema`."""

    writer: Any
    reader: Any
    #: Collects the fields that the reader's schema lacks or reads as another type.
    found: SchemaDifference = field(default_factory=SchemaDifference)

    def __post_init__(self) -> None:
        self._theirs, self._ours = find_named_types(self.writer), find_named_types(self.reader)

    def convert(self) -> Convert | None:
        """Return a function from a decoded value to a column's value; None if they are equal."""
        return self._resolve(self.writer, self.reader, "")

    def _resolve(self, writer: Any, reader: Any, path: str) -> Convert | None:
        writer, reader = resolve_name(writer, self._theirs), resolve_name(reader, self._ours)
        if isinstance(writer, list):
            return self._resolve_union(writer, reader, path)
        if not isinstance(reader, list):
            return self._resolve_type(writer, reader, path)
        branches = [resolve_name(one, self._ours) for one in _branches(reader)]
        # A branch of the same kind, or else the first branch of a wider kind.
        kind = kind_of(writer)
        same = [one for one in branches if kind_of(one) == kind and score_match(writer, one) > 0]
        wider = (one for one in branches if kind_of(one) in _PROMOTED.get(kind, ()))
        branch = max(same, key=partial(score_match, writer)) if same else next(wider, None)
        if branch is None:
            raise _to_resolution_error(path, writer, reader)
        convert = self._resolve_type(writer, branch, path)
        members = [one for one in branches if one != "null"]
        if len(members) == 1 or branch == "null":
            return convert
        at = members.index(branch)
        return partial(_member, (None,) * at, (None,) * (len(members) - at - 1), convert)

    def _resolve_union(self, writer: Sequence[Any], reader: Any, path: str) -> Convert | None:
        wholes = [resolve_name(one, self._theirs) for one in writer]
        converts: dict[str | type, Convert | None] = {}
        for one in wholes:
            convert: Convert | None
            try:
                convert = self._resolve(one, reader, path)
            except ResolutionError as error:
                # A branch that does not resolve matters only if a value has it.
                convert = partial(_refuse, str(error))
            if _is_boxed(one, wholes):
                convert = partial(_unbox, convert)
            converts[_tag(one, wholes)] = convert
        if not any(converts.values()) and not any(isinstance(tag, str) for tag in converts):
            return None
        return partial(_convert_branch, converts)

    def _resolve_type(self, writer: Any, reader: Any, path: str) -> Convert | None:
        kind, wanted = kind_of(writer), kind_of(reader)
        if kind != wanted:
            if wanted not in _PROMOTED.get(kind, ()):
                raise _to_resolution_error(path, writer, reader)
        elif score_match(writer, reader) == 0:
            raise _to_resolution_error(path, writer, reader)
        if kind in ("record", "error"):
            return self._resolve_record(writer, reader, path)
        if kind == "array":
            return _each(self._resolve(writer["items"], reader["items"], f"{path}[]"))
        if kind == "map":
            return partial(_pairs, self._resolve(writer["values"], reader["values"], f"{path}[]"))
        if kind == "enum":
            known, default = reader["symbols"], reader.get("default")
            symbols = {one: one if one in known else default for one in writer["symbols"]}
            return None if symbols.keys() <= set(known) else partial(_symbol, symbols, path)
        if (ours := logical_of(reader)) not in (theirs := logical_of(writer), PLAIN):
            self.found.other.append(f"{path or 'the value'} ({theirs} is read as {ours})")
        return _resolve_primitive(kind, reader, path)

    def _resolve_record(self, writer: Any, reader: Any, path: str) -> Convert:
        theirs = {one["name"]: one for one in writer["fields"]}
        converts: list[tuple[str, Convert | None]] = []
        defaults: dict[str, Any] = {}
        for one in reader["fields"]:
            name = name_of(one, reader, theirs)
            if name is not None:
                inner = theirs.pop(name)["type"]
                converts.append((name, self._resolve(inner, one["type"], _path(path, one))))
            elif "default" in one:
                converts.append((one["name"], None))
                defaults[one["name"]] = self.default(one, _path(path, one))
            else:
                raise ResolutionError(f"the field '{_path(path, one)}' is not there, and has no default")
        self.found.left_out += [_path(path, one) for one in theirs.values()]
        return partial(_row, converts, defaults)

    def default(self, one: Mapping[str, Any], path: str) -> Any:
        """Return the default of a field that the writer's schema lacks."""
        value = _as_read(one["type"], one["default"], self._ours)
        same = Resolution(self.reader, self.reader)
        convert = same._resolve(one["type"], one["type"], path)
        return value if convert is None else convert(value)


def _to_resolution_error(path: str, writer: Any, reader: Any) -> ResolutionError:
    return ResolutionError(f"{_what(path)} is {_describe(writer)}, and is read as {_describe(reader)}")


def _what(path: str) -> str:
    return f"the field '{path}'" if path else "the value"


def _describe(schema: Any) -> str:
    if isinstance(schema, list):
        return " or ".join(_describe(one) for one in schema)
    if isinstance(schema, str):
        return schema
    return " ".join([kind_of(schema), *filter(None, [schema.get("name")])])


#: Types to which a value may be promoted, by the specification.
_PROMOTED: Mapping[str, tuple[str, ...]] = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}


def _resolve_primitive(kind: str, reader: Any, path: str) -> Convert | None:
    wanted, logical = kind_of(reader), logical_of(reader)
    if logical.startswith("decimal"):
        return partial(_exact_decimal, int(reader["precision"]), int(reader.get("scale", 0)), path)
    if (limits := limits_of(wanted, logical)) is not None:
        return partial(_check_years, *limits, path)
    match kind, wanted:
        case "int", "long" | "float" | "double":
            return partial(_widen, int if wanted == "long" else float, path)
        case "long", "double":
            return float
        case "long", "float":
            return _single
        case "string", "bytes":
            return str.encode
        case "bytes", "string":
            return partial(_text, path)
    return None


def _as_read(schema: Any, value: Any, named: Mapping[str, Any]) -> Any:
    """Return a JSON default as fastavro would decode it; the default of a union is of its first branch."""
    schema = resolve_name(schema, named)
    if isinstance(schema, list):
        wholes = [resolve_name(one, named) for one in schema]
        tag, made = _tag(wholes[0], wholes), _as_read(wholes[0], value, named)
        if _is_boxed(wholes[0], wholes):
            made = {_BOX: made}
        return (tag, made) if isinstance(tag, str) else made
    match kind_of(schema):
        case "bytes" | "fixed":
            # Each character is a byte.
            return value.encode("latin-1")
        case "float" | "double":
            return float(value)
        case "array":
            return [_as_read(schema["items"], one, named) for one in value]
        case "map":
            return {name: _as_read(schema["values"], one, named) for name, one in value.items()}
        case "record" | "error":
            fields = schema["fields"]
            return {f["name"]: _as_read(f["type"], _find_default(f, value), named) for f in fields}
    return value


def _find_default(one: Mapping[str, Any], record: Mapping[str, Any]) -> Any:
    if one["name"] not in record and "default" not in one:
        raise ResolutionError(f"a default leaves out the field '{one['name']}', which has none itself")
    return record.get(one["name"], one.get("default"))


def _exact_decimal(precision: int, scale: int, path: str, value: bytes) -> decimal.Decimal:
    unscaled = int.from_bytes(value, "big", signed=True)
    if abs(unscaled) >= 10**precision:
        raise CodecError(f"the field '{path}' has more than the {precision} digits of its decimal")
    return decimal.Decimal(unscaled).scaleb(-scale, _EXACT)


def _check_years(first: int, last: int, factor: int, path: str, value: int) -> int:
    made = value * factor
    if not first <= made <= last:
        raise CodecError(f"the field '{path}' is in no year from 1 to 9999")
    return made


def _widen(wider: Callable[[int], Any], path: str, value: int) -> Any:
    if not -(2**31) <= value < 2**31:
        raise CodecError(f"{_what(path)} is no int of 32 bits")
    return wider(value)


def _single(value: int) -> Any:
    # Through Python's float it would be rounded twice.
    return pa.scalar(value, pa.int64()).cast(pa.float32(), safe=False).as_py()


def _text(path: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise CodecError(f"{_what(path)} is no text in UTF-8") from None


def _symbol(symbols: Mapping[str, str | None], path: str, value: str) -> str:
    symbol = symbols[value]
    if symbol is None:
        raise ResolutionError(f"{_what(path)} is the new symbol '{value}' of its enum, which has no default")
    return symbol


def _each(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda values: [convert(one) for one in values]


def _pairs(convert: Convert | None, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, one if convert is None else convert(one)) for key, one in values.items()]


def _row(
    converts: Sequence[tuple[str, Convert | None]], defaults: Mapping[str, Any], record: dict[str, Any]
) -> tuple[Any, ...]:
    record |= defaults
    return tuple([record[name] if convert is None else convert(record[name]) for name, convert in converts])


def _convert_branch(converts: Mapping[str | type, Convert | None], value: Any) -> Any:
    tag: str | type = type(value)
    if tag is tuple:
        tag, value = value
    convert = converts[tag]
    return value if convert is None else convert(value)


def _unbox(convert: Convert | None, box: Mapping[str, Any]) -> Any:
    return box[_BOX] if convert is None else convert(box[_BOX])


def _refuse(why: str, value: Any) -> None:
    raise ResolutionError(why)


def _member(
    before: tuple[None, ...], after: tuple[None, ...], convert: Convert | None, value: Any
) -> tuple[Any, ...]:
    return (*before, value if convert is None else convert(value), *after)


@dataclass(frozen=True)
class AvroReader(Reader):
    """Reads Avro records into the columns of one schema, whatever schema they were written with."""

    #: JSON text that includes all named types.
    schema: str
    #: Name of the column if the schema is not a record.
    column: str
    #: The registry of the schemas whose ids records carry. None: records carry no id, and have this `schema`.
    registry: SchemaRegistry | None
    on_schema_change: OnSchemaChange

    @property
    def kind(self) -> T.StructType:  # type: ignore[override]
        schema = parse_schema(self.schema)
        found = to_spark_type(schema, find_named_types(schema), "")
        if isinstance(found, T.StructType) and kind_of(schema) == "record":
            return found
        return T.StructType([T.StructField(self.column, found)])

    def make_converter(self) -> Callable[[bytes], tuple[Any, ...]]:
        """Parse the reader's schema; schemas of writers are fetched when a record needs them."""
        own = parse_schema(self.schema)
        is_row = kind_of(own) == "record"
        if self.registry is None:
            return _reading(own, Resolution(own, own).convert(), is_row, 0)

        def prepare(found: RegistrySchema) -> Callable[[bytes], tuple[Any, ...]]:
            resolution, convert = self._resolve(found, own)
            read = _reading(resolution.writer, convert, is_row, HEADER_BYTES)

            def read_or_tell(data: bytes) -> tuple[Any, ...]:
                try:
                    return read(data)
                except ResolutionError as error:
                    raise to_mismatch_error(found, str(error), self.on_schema_change) from None

            return read_or_tell

        reading_of = prepare_by_id(self.registry, "AVRO", prepare)
        return lambda data: reading_of(data)(data)

    def _resolve(self, found: RegistrySchema, own: Any) -> tuple[Resolution, Convert | None]:
        resolution = Resolution(parse_schema(found.text, found.references), own)
        try:
            convert = resolution.convert()
        except ResolutionError as error:
            raise to_mismatch_error(found, str(error), self.on_schema_change) from None
        check_difference(found, resolution.found, self.on_schema_change)
        return resolution, convert

    def make_slice_converter(self) -> SliceConverter | None:
        """Return a converter that reads slices, with one implementation per writer's schema."""
        own, kind = parse_schema(self.schema), arrow_type(self.kind)
        if self.registry is None:
            return record_columns(own, own, Resolution(own, own).default, kind)

        def prepare(found: RegistrySchema) -> SliceConverter | None:
            resolution, _ = self._resolve(found, own)
            return record_columns(resolution.writer, own, resolution.default, kind)

        converter_of = prepare_by_id(self.registry, "AVRO", prepare)
        return partial(read_after_prefix, lambda data: (data[:HEADER_BYTES], converter_of(data)))


def _reading(
    writer: Any, convert: Convert | None, is_row: bool, start: int
) -> Callable[[bytes], tuple[Any, ...]]:
    """Return a function that reads the bytes from `start` on as one value of the writer's schema."""
    if start and writer in ("bytes", {"type": "bytes"}):
        # Confluent's JVM clients write bytes without a length.
        return lambda data: (data[start:] if convert is None else convert(data[start:]),)
    # The two extra members mark the schema as parsed by fastavro.
    wire = {**_wire(writer, find_named_types(writer), {}), "__fastavro_parsed": True, "__named_schemas": {}}

    def read(data: bytes) -> tuple[Any, ...]:
        value = _decode(data, start, wire)
        made = value if convert is None else convert(value)
        return made if is_row else (made,)

    return read


def _decode(data: bytes, start: int, wire: Any) -> Any:
    import fastavro

    stream = io.BytesIO(data)
    stream.seek(start)
    try:
        value = fastavro.schemaless_reader(stream, wire, return_named_type=True)
    except EOFError:
        raise CodecError("the bytes end within a record of the Avro schema") from None
    except MemoryError:
        raise
    except KeyError as number:
        raise CodecError(
            f"the bytes are no record of its schema: nothing there has number {number}"
        ) from None
    except Exception as error:
        raise CodecError(f"the bytes are no record of its schema: {error or type(error).__name__}") from None
    if stream.tell() != len(data):
        raise CodecError(f"{len(data) - stream.tell()} bytes follow the record of the Avro schema")
    return value
