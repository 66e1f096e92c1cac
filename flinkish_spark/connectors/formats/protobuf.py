"""Protobuf: mapping to Spark's types, reading and writing of messages, and the registry.

Messages are read with the source's descriptor, as Protobuf intends; fields that a newer writer has added are
skipped. Protobuf silently cuts a number that is too long for its type, and skips a field whose wire type
differs, so with a registry the writer's descriptor is compared before its messages are read. A field may have
the name of a Python method, so methods are called on the message's class.
"""

from __future__ import annotations

import decimal
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.connectors.formats.proofs import read_after_prefix
from flinkish_spark.connectors.formats.protobuf_columns import is_map, message_columns
from flinkish_spark.connectors.formats.protobuf_descriptors import (
    descriptor_of,
    file_of,
    files_of,
    message_at,
    path_in,
    serialize_descriptors,
)
from flinkish_spark.connectors.formats.reader import (
    CodecError,
    OnSchemaChange,
    Reader,
    SchemaDifference,
    SliceConverter,
    Writer,
    check_difference,
    fetch_schema,
    schema_id_of,
)
from flinkish_spark.connectors.formats.registry import HEADER_BYTES, SchemaRegistry
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.schemas import check_field_names

Convert = Callable[[Any], Any]
#: Spark's types by Protobuf's type names; unsigned numbers get a type that holds all of them.
_KINDS: Mapping[str, T.DataType] = {
    "double": T.DoubleType(),
    "float": T.FloatType(),
    "int32": T.IntegerType(),
    "sint32": T.IntegerType(),
    "sfixed32": T.IntegerType(),
    "uint32": T.LongType(),
    "fixed32": T.LongType(),
    "int64": T.LongType(),
    "sint64": T.LongType(),
    "sfixed64": T.LongType(),
    "uint64": T.DecimalType(20, 0),
    "fixed64": T.DecimalType(20, 0),
    "bool": T.BooleanType(),
    "string": T.StringType(),
    "bytes": T.BinaryType(),
    "enum": T.StringType(),
}
_NAMES = (
    *("", "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group"),
    *("message", "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64"),
)
#: Pairs of writer's and reader's type between which no value changes.
_WIDENED = frozenset(
    {("int32", "int64"), ("uint32", "uint64"), ("uint32", "int64"), ("sint32", "sint64")}
    | {("bool", kind) for kind in ("int32", "int64", "uint32", "uint64")}
    | {("string", "bytes")}
)
_UNSIGNED_64 = ("uint64", "fixed64")


def fields_of(message: Any, path: str = "", within: tuple[str, ...] = ()) -> T.StructType:
    if message.full_name in within:
        raise SchemaError(
            f"the Protobuf message '{message.full_name}' contains itself, in '{path}'",
            why="Spark has no recursive types",
            what_to_do="give a descriptor without that field: readers skip unknown fields",
        )
    around = (*within, message.full_name)
    fields = [
        T.StructField(one.name, _field_kind(one, f"{path}.{one.name}" if path else one.name, around))
        for one in message.fields
    ]
    struct = T.StructType(fields)
    check_field_names(struct, f"the Protobuf message '{message.full_name}'")
    return struct


def _field_kind(one: Any, path: str, within: tuple[str, ...]) -> T.DataType:
    if is_map(one):
        key, value = (one.message_type.fields_by_name[name] for name in ("key", "value"))
        return T.MapType(_single_kind(key, path, within), _single_kind(value, path, within))
    kind = _single_kind(one, path, within)
    return T.ArrayType(kind) if one.is_repeated else kind


def _single_kind(one: Any, path: str, within: tuple[str, ...]) -> T.DataType:
    if one.message_type is not None:
        return fields_of(one.message_type, path, within)
    return _KINDS[_NAMES[one.type]]


def _row_of(message: Any) -> Convert:
    parts = tuple((one.name, _value_of(one), one.has_presence) for one in message.fields)

    def convert(value: Any) -> tuple[Any, ...]:
        return tuple(
            None if may_miss and not type(value).HasField(value, name) else take(getattr(value, name))
            for name, take, may_miss in parts
        )

    return convert


def _value_of(one: Any) -> Convert:
    if is_map(one):
        key, value = (_single_of(one.message_type.fields_by_name[name]) for name in ("key", "value"))
        # Protobuf's own order differs between processes.
        return lambda found: [(key(name), value(found[name])) for name in sorted(found)]
    single = _single_of(one)
    return (lambda found: [single(each) for each in found]) if one.is_repeated else single


def _single_of(one: Any) -> Convert:
    if one.message_type is not None:
        return _row_of(one.message_type)
    if one.enum_type is not None:
        # A number without a name becomes its digits; of several names the first is taken.
        names = {number: found[0] for number, found in _names_of(one.enum_type).items()}
        return lambda number: names.get(number) or str(number)
    if _NAMES[one.type] == "string":
        return _text_of(one.full_name)
    return decimal.Decimal if _NAMES[one.type] in _UNSIGNED_64 else _same


def _text_of(name: str) -> Convert:
    def text(found: Any) -> str:
        # In proto2, Protobuf does not check that a text is UTF-8, and returns bytes if it is not.
        if isinstance(found, str):
            return found
        raise CodecError(f"the text of '{name}' is not UTF-8")

    return text


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class ProtobufReader(Reader):
    files: bytes
    message: str
    #: The registry of the schemas whose ids records carry. None: records carry no id.
    registry: SchemaRegistry | None
    on_schema_change: OnSchemaChange

    @property
    def kind(self) -> T.StructType:  # type: ignore[override]
        return fields_of(descriptor_of(self.files, self.message))

    def make_converter(self) -> Callable[[bytes], tuple[Any, ...]]:
        from google.protobuf import message_factory
        from google.protobuf.message import DecodeError

        descriptor = descriptor_of(self.files, self.message)
        made, convert = message_factory.GetMessageClass(_replace_enums(descriptor)), _row_of(descriptor)
        is_needed = _has_required(descriptor, set())
        start_of = None if self.registry is None else _find_starts(self.registry, self, descriptor)

        def read(data: bytes) -> tuple[Any, ...]:
            start = 0 if start_of is None else start_of(data)
            try:
                found = made.FromString(data[start:] if start else data)
            # The pure-Python implementation of Protobuf raises UnicodeDecodeError.
            except (DecodeError, UnicodeDecodeError) as error:
                raise CodecError(f"the bytes are no {descriptor.full_name}: {error}") from None
            if is_needed and not made.IsInitialized(found):
                missing = ", ".join(made.FindInitializationErrors(found))
                raise CodecError(f"the message has no {missing}, which is required")
            row: tuple[Any, ...] = convert(found)
            return row

        return read

    def make_slice_converter(self) -> SliceConverter | None:
        """Return a converter that reads slices by `ptars`, with a proof for each message."""
        descriptor = descriptor_of(self.files, self.message)
        columns = message_columns(descriptor, arrow_type(fields_of(descriptor)))
        if columns is None or self.registry is None:
            return columns
        start_of = _find_starts(self.registry, self, descriptor)
        return partial(read_after_prefix, lambda data: (data[: start_of(data)], columns))


def _replace_enums(message: Any) -> Any:
    """Return a message's descriptor with int32 in place of enums; the encoding is the same."""
    # Protobuf treats an unknown number of a closed enum (proto2) as an unknown field: the value would be
    # lost, also as an element of a list or with its key in a map. It refuses to write such a number.
    from google.protobuf import descriptor_pb2

    made = descriptor_pb2.FileDescriptorSet.FromString(serialize_descriptors(message.file))
    for file in made.file:
        _number_enums(file.message_type)
    return descriptor_of(made.SerializeToString(), message.full_name)


def _number_enums(messages: Sequence[Any]) -> None:
    for message in messages:
        for one in message.field:
            if one.type == one.TYPE_ENUM:
                one.type = one.TYPE_INT32
                one.ClearField("type_name")
                # The default is an enum's name. It is not needed: a field with a default has presence.
                one.ClearField("default_value")
        _number_enums(message.nested_type)


def _has_required(message: Any, seen: set[str]) -> bool:
    if message.full_name in seen:
        return False
    seen.add(message.full_name)
    return any(
        one.is_required or (one.message_type is not None and _has_required(one.message_type, seen))
        for one in message.fields
    )


def _find_starts(registry: SchemaRegistry, reader: ProtobufReader, wanted: Any) -> Callable[[bytes], int]:
    """Return a function to where the message of a record begins; it refuses another message."""

    @functools.cache
    def find_name(schema_id: int, path: tuple[int, ...]) -> str:
        schema = fetch_schema(registry, schema_id, "PROTOBUF")
        file = file_of(files_of(schema))
        message = message_at(file, path)
        # Java clients do not count the entry messages of maps.
        other = message_at(file, path, counts_entries=False)
        if other is not None and other.full_name == wanted.full_name:
            message = other
        if message is None:
            raise CodecError(f"its schema {schema_id} has no message at {list(path)}")
        if message.full_name == wanted.full_name:
            found = SchemaDifference()
            _compare(message, wanted, "", found, set())
            check_difference(schema, found, reader.on_schema_change)
        return str(message.full_name)

    def start_of(data: bytes) -> int:
        schema_id, (path, start) = schema_id_of(data), path_in(data, HEADER_BYTES)
        if (name := find_name(schema_id, path)) != wanted.full_name:
            raise CodecError(f"it is the message '{name}', and not '{wanted.full_name}'")
        return start

    return start_of


def _compare(writer: Any, reader: Any, path: str, found: SchemaDifference, seen: set[str]) -> None:
    if writer.full_name in seen:
        return
    seen.add(writer.full_name)
    known = {one.number: one for one in reader.fields}
    for one in writer.fields:
        name = f"{path}.{one.name}" if path else one.name
        ours = known.get(one.number)
        if ours is None:
            found.left_out.append(name)
            continue
        theirs, kind = _NAMES[one.type], _NAMES[ours.type]
        is_same = theirs == kind or (theirs, kind) in _WIDENED
        if not is_same or one.is_repeated != ours.is_repeated or is_map(one) != is_map(ours):
            many = ("repeated " if each.is_repeated else "" for each in (one, ours))
            found.other.append(f"{name} ({next(many)}{theirs} is read as {next(many)}{kind})")
        elif one.message_type is not None:
            _compare(one.message_type, ours.message_type, name, found, seen)
        elif one.enum_type is not None:
            numbers = _names_of(ours.enum_type)
            for number, names in _names_of(one.enum_type).items():
                if number in numbers and not set(names) & set(numbers[number]):
                    found.other.append(f"{name} ({names[0]} is read as {numbers[number][0]})")


def _names_of(enum: Any) -> dict[int, list[str]]:
    """Return the names of each number of an enum; with allow_alias a number has several."""
    names: dict[int, list[str]] = {}
    for value in enum.values:
        names.setdefault(value.number, []).append(value.name)
    return names


@dataclass(frozen=True)
class ProtobufWriter(Writer):
    files: bytes
    message: str
    prefix: bytes = b""

    def make_converter(self) -> Callable[[Any], bytes]:
        from google.protobuf import message_factory

        descriptor = descriptor_of(self.files, self.message)
        made, fill = message_factory.GetMessageClass(_replace_enums(descriptor)), _filler(descriptor, "")

        def write(row: Mapping[str, Any]) -> bytes:
            message = made()
            fill(message, row)
            if not made.IsInitialized(message):
                missing = ", ".join(made.FindInitializationErrors(message))
                raise CodecError(f"the field '{missing}' is null, and required")
            # Deterministic order of maps, so that equal rows are equal keys.
            return self.prefix + bytes(made.SerializeToString(message, deterministic=True))

        return write


def _filler(message: Any, path: str) -> Callable[[Any, Any], None]:
    parts = []
    for one in message.fields:
        where = f"{path}.{one.name}" if path else one.name
        parts.append((one.name, where, one.has_presence or one.is_repeated, _setter(one, where)))
    oneofs = [(one.name, [each.name for each in one.fields]) for one in message.oneofs if len(one.fields) > 1]

    def fill(made: Any, row: Mapping[str, Any]) -> None:
        for name, choices in oneofs:
            given = [each for each in choices if row.get(each) is not None]
            if len(given) > 1:
                raise CodecError(f"of the oneof '{name}' more than one field is set: {', '.join(given)}")
        for name, where, may_miss, put in parts:
            value = row.get(name)
            if value is not None:
                try:
                    put(made, value)
                except CodecError:
                    raise
                except (TypeError, ValueError) as error:
                    raise CodecError(f"the field '{where}' cannot be written: {error}") from None
            elif name in row and not may_miss:
                raise CodecError(f"the field '{where}' is null, which its message cannot hold")

    return fill


def _setter(one: Any, path: str) -> Callable[[Any, Any], None]:
    """Return a function that sets a field of a message to a value that is not null."""
    name = one.name
    if is_map(one):
        return _map_setter(name, one.message_type, path)
    if one.message_type is not None:
        fill = _filler(one.message_type, path)

        def add_messages(made: Any, values: Any) -> None:
            for value in _refuse_null(values, f"list '{path}'"):
                fill(getattr(made, name).add(), value)

        def set_message(made: Any, value: Any) -> None:
            inner = getattr(made, name)
            # Sets the field even if the inner message is empty.
            type(inner).SetInParent(inner)
            fill(inner, value)

        return add_messages if one.is_repeated else set_message
    plain = _plain_of(one, path)
    if one.is_repeated:
        return lambda made, values: getattr(made, name).extend(
            [plain(value) for value in _refuse_null(values, f"list '{path}'")]
        )
    return lambda made, value: setattr(made, name, plain(value))


def _map_setter(name: str, entry: Any, path: str) -> Callable[[Any, Any], None]:
    key_of, value = _plain_of(entry.fields_by_name["key"], path), entry.fields_by_name["value"]
    is_message = value.message_type is not None
    fill: Callable[..., Any] = _filler(value.message_type, path) if is_message else _plain_of(value, path)

    def set_map(made: Any, pairs: Any) -> None:
        target, items = getattr(made, name), dict(pairs)
        _refuse_null(items.values(), f"map '{path}'")
        for key, one in items.items():
            if is_message:
                fill(target[key_of(key)], one)
            else:
                target[key_of(key)] = fill(one)

    return set_map


def _refuse_null(values: Collection[Any], where: str) -> Collection[Any]:
    if any(one is None for one in values):
        raise CodecError(f"the {where} has a null, which Protobuf cannot hold")
    return values


def _plain_of(one: Any, path: str) -> Convert:
    if one.enum_type is not None:
        numbers = {value.name: value.number for value in one.enum_type.values}

        def number_of(text: str) -> int:
            found = numbers.get(text)
            if found is None and not re.fullmatch("-?[0-9]+", text):
                raise CodecError(f"the field '{path}' is no symbol of its enum")
            return int(text) if found is None else found

        return number_of
    return int if _NAMES[one.type] in _UNSIGNED_64 else _same


def why_unfit(kind: T.DataType, wanted: T.DataType, path: str) -> str | None:
    """Return why a column's type cannot be written as a message's type `wanted`; None if it can."""
    match kind, wanted:
        case T.StructType(), T.StructType():
            known = {one.name: one.dataType for one in wanted}
            for one in kind:
                name = f"{path}.{one.name}" if path else one.name
                if one.name not in known:
                    return f"the message has no field '{name}'"
                if (why := why_unfit(one.dataType, known[one.name], name)) is not None:
                    return why
            return None
        case T.ArrayType(), T.ArrayType():
            return why_unfit(kind.elementType, wanted.elementType, f"{path}[]")
        case T.MapType(), T.MapType():
            return why_unfit(kind.keyType, wanted.keyType, f"{path}[]") or why_unfit(
                kind.valueType, wanted.valueType, f"{path}[]"
            )
        case ((T.ByteType() | T.ShortType() | T.IntegerType()), (T.IntegerType() | T.LongType())):
            return None
        case ((T.ByteType() | T.ShortType() | T.IntegerType() | T.LongType()), T.DecimalType()):
            return None
        case T.FloatType(), T.DoubleType():
            return None
        case T.DecimalType(), T.DecimalType() if kind.scale == 0:
            return None
    if type(kind) is type(wanted) and not isinstance(kind, T.DecimalType):
        return None
    return f"the field '{path}' is {kind.simpleString()}, and the message has {wanted.simpleString()}"


def find_missing_required(message: Any, given: T.StructType, path: str = "") -> str | None:
    """Return the first required field that the columns lack, at any depth; None if they have all."""
    for one in message.fields:
        name = f"{path}.{one.name}" if path else one.name
        if one.name not in given.names:
            if one.is_required:
                return name
            continue
        kind, inner = given[one.name].dataType, one.message_type
        if isinstance(kind, T.ArrayType):
            kind = kind.elementType
        elif isinstance(kind, T.MapType):
            kind, inner = kind.valueType, inner.fields_by_name["value"].message_type
        if isinstance(kind, T.StructType) and (found := find_missing_required(inner, kind, name)) is not None:
            return found
    return None
