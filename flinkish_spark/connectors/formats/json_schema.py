"""JSON Schema: mapping to Spark's types, validation of records, and schemas derived from rows.

A record is validated here, and then read by the same JSON parser as any other. A schema may refer only to
schemas that came with it; nothing is fetched.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.connectors.formats.reader import (
    CodecError,
    ConvertingReader,
    ConvertingWriter,
    OnSchemaChange,
    Reader,
    SchemaDifference,
    Writer,
    check_difference,
    prepare_by_id,
    read_values,
)
from flinkish_spark.connectors.formats.registered import RegisteredFormat, parse_schema_text
from flinkish_spark.connectors.formats.registry import (
    HEADER_BYTES,
    RegistrySchema,
    SchemaRegistry,
    make_library_error,
    record_name,
)
from flinkish_spark.connectors.plain_formats import (
    check_exact,
    choose_fields,
    find_field,
    parse_fields,
    read_json,
)
from flinkish_spark.contracts.format import PartReader, PartWriter
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.fields import check_fields
from flinkish_spark.core.formats import BadRecordPolicy, OnBadRecord
from flinkish_spark.types.exact_text import JsonWriter, unfit_for_json
from flinkish_spark.types.schemas import check_field_names

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SIMPLE: Mapping[str, T.DataType] = {
    "string": T.StringType(),
    "integer": T.LongType(),
    "number": T.DoubleType(),
    "boolean": T.BooleanType(),
}
_MOST_VALIDATED = 5
_DEEPEST = 64
# Python's limit for integers. Comparing or dividing 1e999999999 would need all of its digits.
_MOST_DIGITS = 4300
#: Drafts in which all members beside a `$ref` are ignored.
_REF_ALONE = ("draft-03", "draft-04", "draft-06", "draft-07")


def validator_of(text: str, references: Sequence[tuple[str, str]] = ()) -> Any:
    return _load_schema(text, references)[0]


def _load_schema(text: str, references: Sequence[tuple[str, str]]) -> tuple[Any, _SchemaNode]:
    try:
        import jsonschema
        import referencing
        from referencing.jsonschema import specification_with
    except ImportError as missing:
        raise make_library_error("json-schema", "jsonschema", missing) from None
    known: dict[str, Any] = {}
    name = ""
    try:
        schema = _DECODER.decode(text)
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft7Validator)
        draft = specification_with(kind.ID_OF(kind.META_SCHEMA))
        for name, its_text in [("", text), *references]:
            one = _DECODER.decode(its_text)
            jsonschema.validators.validator_for(one, default=kind).check_schema(one)
            known[name] = referencing.Resource.from_contents(one, draft)
        # The name of a referenced schema is relative to the `$id` of the schema that refers to it.
        for name, resource in list(known.items()):
            known.setdefault(urljoin(name, resource.id() or name), resource)
        for base, (name, _) in itertools.product(list(known), references):
            known.setdefault(urljoin(base, name), known[name])
    except (ValueError, jsonschema.SchemaError) as wrong:
        why = str(wrong).partition("\n")[0]
        raise SchemaError(
            "a JSON Schema cannot be read",
            why=f"{name}: {why}" if name else why,
            what_to_do="correct the schema",
        ) from None
    # This registry cannot retrieve other schemas.
    registry: Any = referencing.Registry().with_resources(known.items())
    resolver = registry.resolver_with_root(draft.create_resource(schema))
    return kind(schema, registry=registry), _SchemaNode(schema, draft, resolver)


class _Number(Decimal):
    """A number with decimal places, validated as it is written: as a float it would be another number."""

    def __repr__(self) -> str:
        return str(self)

    # Exactly, for `multipleOf`.
    def __mod__(self, other: Decimal | int) -> Decimal:
        return _EXACT.remainder(self, other)

    def __rmod__(self, other: Decimal | int) -> Decimal:
        return _EXACT.remainder(other, self)


# The quotient of the largest by the smallest has twice as many digits.
_EXACT = Context(prec=3 * _MOST_DIGITS)


def _number(text: str, *, is_whole_integer: bool = False) -> _Number | int:
    if len(text) + abs(int(text.lower().partition("e")[2] or 0)) > _MOST_DIGITS:
        raise ValueError(f"a number has more than {_MOST_DIGITS} digits")
    value = _Number(text)
    return int(value) if is_whole_integer and value == value.to_integral_value() else value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(
    parse_constant=_constant, parse_float=functools.partial(_number, is_whole_integer=True)
)
# In draft 4, 1.0 is no integer.
_DECODER_OF_DRAFT_4 = json.JSONDecoder(parse_constant=_constant, parse_float=_number)


def fields_of(text: str, references: Sequence[tuple[str, str]] = ()) -> T.StructType:
    found = _type_of([_load_schema(text, references)[1]], "")
    if not isinstance(found, T.StructType):
        raise SchemaError(
            "the JSON Schema describes no object with properties",
            what_to_do='write {"type": "object", "properties": {...}}, or name fields="a STRING, b BIGINT"',
        )
    for name in differences(text, references, found).left_out:
        raise _no_column(name, "is in some records only: by oneOf, anyOf, if or patternProperties")
    return found


@dataclass(frozen=True)
class _SchemaNode:
    schema: Any
    draft: Any
    resolver: Any

    def descend(self, schema: Any) -> _SchemaNode:
        if not isinstance(schema, dict):
            return replace(self, schema=schema)
        draft = self.draft.detect(schema)
        return _SchemaNode(schema, draft, self.resolver.in_subresource(draft.create_resource(schema)))

    def each(self, *keywords: str) -> list[_SchemaNode]:
        return [self.descend(one) for keyword in keywords for one in self.schema.get(keyword, ())]

    def follow_reference(self, path: str) -> _SchemaNode:
        from referencing.exceptions import Unresolvable

        try:
            found = self.resolver.lookup(self.schema["$ref"])
        except (Unresolvable, TypeError, ValueError):
            raise _no_column(path, f"refers to {self.schema['$ref']!r}, which is not there") from None
        return _SchemaNode(found.contents, self.draft.detect(found.contents), found.resolver)


def _parts(place: _SchemaNode, path: str, depth: int = 0) -> list[_SchemaNode]:
    """Return all schemas that apply to a non-null value of a schema: references, allOf, a single choice."""
    if depth > _DEEPEST:
        raise _no_column(path, "refers to itself")
    if not isinstance(place.schema, dict):
        return []
    referred = [place.follow_reference(path)] if "$ref" in place.schema else []
    if referred and place.draft.name in _REF_ALONE:
        return _parts(referred[0], path, depth + 1)
    found = [place]
    for one in (*referred, *place.each("allOf")):
        found += _parts(one, path, depth + 1)
    choices = [_parts(one, path, depth + 1) for one in place.each("oneOf", "anyOf")]
    left = [one for one in choices if not any(part.schema.get("type") == "null" for part in one)]
    return found + left[0] if len(left) == 1 else found


def _type_of(places: Sequence[_SchemaNode], path: str, depth: int = 0) -> T.DataType:
    if depth > _DEEPEST:
        raise _no_column(path, "contains itself, and Spark has no recursive types")
    parts = [part for one in places for part in _parts(one, path)]
    kinds = sorted({kind for part in parts if (kind := _kind(part.schema, path)) is not None})
    if len(kinds) > 1:
        raise _no_column(path, f"is of different types in parts of the schema: {', '.join(kinds)}")
    if not kinds:
        choice = any(part.schema.get(one) for part in parts for one in ("oneOf", "anyOf"))
        raise _no_column(path, "may be of several types" if choice else "may be anything")

    def inner(keyword: str) -> list[_SchemaNode]:
        found = [(part, part.schema.get(keyword)) for part in parts]
        return [part.descend(one) for part, one in found if isinstance(one, dict)]

    kind = kinds[0]
    properties: dict[str, list[_SchemaNode]] = {}
    for part in parts:
        for name, one in part.schema.get("properties", {}).items():
            properties.setdefault(name, []).append(part.descend(one))
    if kind == "object" and properties:
        fields = [
            T.StructField(name, _type_of(each, f"{path}.{name}" if path else name, depth + 1))
            for name, each in properties.items()
        ]
        struct = T.StructType(fields)
        check_field_names(struct, "the JSON Schema" + (f", in '{path}'," if path else ""))
        return struct
    if kind == "object" and (values := inner("additionalProperties")):
        return T.MapType(T.StringType(), _type_of(values, f"{path}[]", depth + 1))
    if kind == "array" and (items := inner("items")):
        return T.ArrayType(_type_of(items, f"{path}[]", depth + 1))
    if kind not in _SIMPLE:
        raise _no_column(path, f"is of type {kind}, of which the schema says no more")
    return _SIMPLE[kind]


def _kind(schema: Mapping[str, Any], path: str) -> str | None:
    """Return the one type besides null that a schema itself names; None if it names none."""
    texts = [isinstance(one, str) for one in schema.get("enum", ()) if one is not None]
    default = "object" if "properties" in schema else "string" if texts and all(texts) else None
    kind = schema.get("type", default)
    kinds = [one for one in (kind if isinstance(kind, list) else [kind]) if one != "null"]
    if sorted(map(str, kinds)) == ["integer", "number"]:
        return "number"
    if len(kinds) != 1:
        raise _no_column(path, f"may be of {len(kinds)} types")
    return None if kinds[0] is None else str(kinds[0])


def _no_column(path: str, why: str) -> SchemaError:
    return SchemaError(
        f"no column follows from the JSON Schema for '{path}'",
        why=f"it {why}",
        what_to_do='name the fields: JsonSchema(..., fields="a STRING, b DECIMAL(10,2)")',
    )


def differences(text: str, references: Sequence[tuple[str, str]], reader: T.StructType) -> SchemaDifference:
    """Return the properties of a writer's schema that the reader's fields lack."""
    # Types are not compared: values are checked record by record.
    found = SchemaDifference()
    _compare(_load_schema(text, references)[1], reader, "", found, set())
    return found


def _compare(
    place: _SchemaNode, reader: T.DataType, path: str, found: SchemaDifference, seen: set[tuple[int, str]]
) -> None:
    try:
        parts = _parts(place, path)
    except SchemaError:
        # Such a schema declares no properties.
        return
    for part in parts:
        if (id(part.schema), path) in seen:
            continue
        seen.add((id(part.schema), path))
        # Include schemas that apply conditionally.
        sometimes = [part.schema[name] for name in ("if", "then", "else") if name in part.schema]
        for several in ("dependentSchemas", "dependencies"):
            sometimes += part.schema.get(several, {}).values()
        for one in (*part.each("oneOf", "anyOf"), *map(part.descend, sometimes)):
            _compare(one, reader, path, found, seen)
        match reader:
            case T.StructType():
                known, named = {one.name: one.dataType for one in reader}, part.schema.get("properties", {})
                patterns = part.schema.get("patternProperties", {})
                allowed = [pattern for pattern, schema in patterns.items() if schema is not False]
                for each in (*named, *allowed):
                    name = f"{path}.{each}" if path else each
                    if each in named and each in known:
                        _compare(part.descend(named[each]), known[each], name, found, seen)
                    elif name not in found.left_out:
                        found.left_out.append(name)
            case T.ArrayType():
                inner = part.descend(part.schema.get("items"))
                _compare(inner, reader.elementType, f"{path}[]", found, seen)
            case T.MapType():
                inner = part.descend(part.schema.get("additionalProperties"))
                _compare(inner, reader.valueType, f"{path}[]", found, seen)


@dataclass(frozen=True)
class JsonSchemaReader(Reader):
    text: str
    references: tuple[tuple[str, str], ...]
    #: The fields that objects are read into, as Spark's JSON of a StructType.
    fields: str
    #: The registry of the schemas whose ids records carry. None: records carry no id, and have the schema
    #: `text`.
    registry: SchemaRegistry | None
    on_schema_change: OnSchemaChange

    kind = T.StringType()

    def read(self, values: pa.Array, time_zone: str) -> tuple[pa.Array, pa.Array]:
        texts, reasons = read_values(self, values)
        fields = T.StructType.fromJson(json.loads(self.fields))
        rows, refused = read_json(texts.cast(pa.binary()), fields, "it", time_zone)
        return rows, pc.coalesce(reasons, refused)

    def make_converter(self) -> Callable[[bytes], str]:
        if self.registry is None:
            validator = validator_of(self.text, self.references)
            return lambda data: _valid(data, 0, validator)
        validator_by_id = prepare_by_id(self.registry, "JSON", self._prepare)
        return lambda data: _valid(data, HEADER_BYTES, validator_by_id(data))

    def _prepare(self, found: RegistrySchema) -> Any:
        if self.on_schema_change is not OnSchemaChange.LEAVE_OUT:
            read = T.StructType.fromJson(json.loads(self.fields))
            left_out = differences(found.text, found.references, read)
            check_difference(found, left_out, self.on_schema_change)
        return validator_of(found.text, found.references)


def _valid(data: bytes, start: int, validator: Any) -> str:
    try:
        text = data[start:].decode()
    except UnicodeDecodeError as error:
        raise CodecError(f"it is no UTF-8: {error.reason}") from None
    why = why_invalid(text, validator)
    if why is not None:
        raise CodecError(why)
    return text


def why_invalid(text: str, validator: Any) -> str | None:
    try:
        decoder = _DECODER if validator.is_type(1.0, "integer") else _DECODER_OF_DRAFT_4
        value = decoder.decode(text)
        errors = sorted(
            validator.iter_errors(value), key=lambda one: [str(step) for step in one.absolute_path]
        )
    except (ValueError, RecursionError) as error:
        return f"it is no JSON: {error}"
    except Exception as error:
        # A reference in the schema does not resolve.
        raise SchemaError(
            "a JSON Schema cannot be used",
            why=f"{type(error).__name__}: {error}"[:500].rstrip("."),
            what_to_do="correct the schema",
        ) from None
    if not errors:
        return None
    told = [f"{'.'.join(map(str, one.absolute_path)) or 'the object'}: {one.message}" for one in errors]
    return f"it is not valid by its JSON Schema: {'; '.join(told[:_MOST_VALIDATED])}"


@dataclass(frozen=True)
class JsonSchemaWriter(Writer):
    """Validates the text of each row, and prepends the schema's prefix."""

    text: str
    prefix: bytes = b""

    def make_converter(self) -> Callable[[Any], bytes]:
        validator = validator_of(self.text)

        def write(data: bytes) -> bytes:
            why = why_invalid(data.decode(), validator)
            if why is not None:
                try:
                    text = _add_nulls(data.decode(), validator)
                except (ValueError, RecursionError):
                    raise CodecError(why) from None
                if why_invalid(text, validator) is not None:
                    raise CodecError(why)
                data = text.encode()
            return self.prefix + data

        return write


class _Digits(str):
    """A number as it is written."""


_DECODER_OF_DIGITS = json.JSONDecoder(parse_float=_Digits, parse_int=_Digits)


def _add_nulls(text: str, validator: Any) -> str:
    """Return the text of a row with nulls added for missing properties that its schema requires."""
    value = _DECODER_OF_DIGITS.decode(text)
    for error in validator.iter_errors(_DECODER.decode(text)):
        if error.validator == "required" and isinstance(error.validator_value, list):
            place = functools.reduce(lambda at, step: at[step], error.absolute_path, value)
            place.update((name, None) for name in error.validator_value if name not in place)
    return _text_of(value)


def _text_of(value: Any) -> str:
    match value:
        case dict():
            return f"{{{','.join(f'{_text_of(name)}:{_text_of(one)}' for name, one in value.items())}}}"
        case list():
            return f"[{','.join(map(_text_of, value))}]"
        case _Digits():
            return str(value)
    return json.dumps(value, ensure_ascii=False)


def why_never_valid(kind: T.DataType, wanted: T.DataType, path: str) -> str | None:
    if isinstance(kind, T.NullType):
        return None
    (ours, theirs) = (str(_describe(one)["type"]) for one in (kind, wanted))
    # Numbers are checked record by record: 1.0 is an integer.
    if ours != theirs and not {ours, theirs} <= {"integer", "number"}:
        return f"the field '{path}' is written as {ours}, and the schema has {theirs}"
    match kind, wanted:
        case T.StructType(), T.StructType():
            pairs = [(one, wanted[one.name]) for one in kind if one.name in wanted.names]
            told = (
                why_never_valid(one.dataType, other.dataType, f"{path}.{one.name}") for one, other in pairs
            )
            return next((why for why in told if why is not None), None)
        case T.ArrayType(), T.ArrayType():
            return why_never_valid(kind.elementType, wanted.elementType, f"{path}[]")
        case T.MapType(), T.MapType():
            return why_never_valid(kind.valueType, wanted.valueType, f"{path}[]")
    return None


def check_references(text: str) -> None:
    """Refuse a schema with an unresolved reference: a validator would find it only at some record."""
    left = [_load_schema(text, ())[1]]
    while left:
        place = left.pop()
        if not isinstance(place.schema, dict):
            continue
        if "$ref" in place.schema:
            try:
                place.follow_reference("")
            except SchemaError:
                raise SchemaError(
                    f"the JSON Schema refers to {place.schema['$ref']!r}, which is not there",
                    why="a sink has one document, and nothing is fetched",
                    what_to_do="put what it refers to into the schema, under definitions",
                ) from None
        inner = place.draft.create_resource(place.schema).subresources()
        left += [place.descend(one.contents) for one in inner]


def derive_schema(fields: T.StructType) -> str:
    draft = "http://json-schema.org/draft-07/schema#"
    return json.dumps({"$schema": draft, "title": "Record", **_describe(fields)})


def _describe(kind: T.DataType) -> dict[str, Any]:
    match kind:
        case T.StructType():
            return {"type": "object", "properties": {one.name: _nullable(one.dataType) for one in kind}}
        case T.ArrayType():
            return {"type": "array", "items": _nullable(kind.elementType)}
        case T.MapType():
            return {"type": "object", "additionalProperties": _nullable(kind.valueType)}
        case T.IntegralType():
            return {"type": "integer"}
        case T.DecimalType() | T.DoubleType() | T.FloatType():
            # JSON has no NaN and no infinities: rows with them are refused.
            return {"type": "number"}
    return {"type": "boolean"} if isinstance(kind, T.BooleanType) else {"type": "string"}


def _nullable(kind: T.DataType) -> dict[str, Any]:
    found = _describe(kind)
    return {**found, "type": [found["type"], "null"]}


@dataclass(frozen=True, slots=True)
class JsonSchema(RegisteredFormat):
    """JSON objects that a JSON Schema describes; with a registry in Confluent's wire format.

    Needs the extra ``json-schema``. Drafts 4 to 2020-12.

    Parameters
    ----------
    schema
        The schema as JSON text, of an object. A sink without one derives it from the stream; a source
        without one takes the newest of the registry's subject at the first start of the job.
    fields
        Columns as DDL, in place of those that follow from the schema, as for :class:`Json`:
        ``"amount DECIMAL(10,2)"`` keeps every digit, which the type ``number`` does not promise.
    registry, on_schema_change, on_bad_record
        As for :class:`Avro`. A record is bad, too, if it is not valid by the schema it was written with.
    """

    schema: str = ""
    fields: str = ""
    registry: SchemaRegistry | None = None
    on_schema_change: OnSchemaChange = OnSchemaChange.FAIL
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL
    _kind = "JSON"

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_change(has_fields=bool(self.schema or self.fields))
        if self.schema and not isinstance(parse_schema_text(self.schema, "JSON Schema"), dict):
            raise ConfigError("the JSON Schema is no object", what_to_do='write {"type": "object", ...}')

    @property
    def _has_schema(self) -> bool:
        return bool(self.schema)

    def _make_reader(self, part: str, schema: RegistrySchema | None) -> PartReader:
        given = schema or RegistrySchema("JSON", self.schema)
        validator_of(given.text, given.references)  # Raises if the schema cannot be used.
        fields = parse_fields(self.fields) if self.fields else fields_of(given.text, given.references)
        reader = JsonSchemaReader(
            given.text, given.references, fields.json(), self.registry, self.on_schema_change
        )
        return ConvertingReader(part, fields, reader)

    def _choose(self, schema: T.StructType, whose: str) -> T.StructType:
        if self.fields or not self.schema:
            return choose_fields(schema, self.fields, whose)
        return T.StructType([find_field(schema, name, whose) for name in fields_of(self.schema).names])

    def check_fields(self, schema: T.StructType, whose: str) -> None:
        check_exact(self._choose(schema, whose), unfit_for_json, whose)
        for one in fields_of(self.schema) if self.schema and not self.fields else ():
            if (why := why_never_valid(schema[one.name].dataType, one.dataType, one.name)) is not None:
                raise SchemaError(
                    f"{whose} can never be valid by its JSON Schema",
                    why=why,
                    what_to_do="cast it in a transform, or name the columns: JsonSchema(..., fields=...)",
                )

    def check_start(self, spark: SparkSession, schema: T.StructType, whose: str) -> None:
        # Derived schemas are checked too, since that fails if the library is missing.
        check_references(self._text(schema))

    def make_writer(self, schema: T.StructType, topics: Sequence[str], part: str) -> PartWriter:
        writer = JsonSchemaWriter(self._text(schema), self._prefix(schema, topics, part))
        # In users' schemas fields may often be left out, but seldom be null.
        return _ValidatingWriter(self._choose(schema, part), writer, not self.schema)

    def _find_written(self, schema: T.StructType) -> tuple[RegistrySchema, str]:
        written = RegistrySchema("JSON", self._text(schema))
        return written, record_name("JSON", written.text)

    def _text(self, schema: T.StructType) -> str:
        return self.schema or derive_schema(self._choose(schema, type(self).__name__))


@dataclass(frozen=True)
class _ValidatingWriter(ConvertingWriter):
    null_fields: bool

    @functools.cached_property
    def _json(self) -> JsonWriter:
        return JsonWriter(self.fields, null_fields=self.null_fields)

    def _rows(self, records: pa.RecordBatch) -> pa.Array:
        return self._json.write(self.columns(records), records.num_rows).cast(pa.binary())
