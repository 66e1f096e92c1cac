"""JSON Schema: what each type becomes, records held against their writer's schema, and schemas of rows.

A record is looked at here, and then read as JSON of the fields: by the same parser, as exactly, as any other.
A schema names others only among those that came with it; nothing is fetched.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.connectors.formats.reader import (
    Difference,
    Reader,
    Unreadable,
    Writer,
    WriterSchemas,
    check_difference,
)
from flinkish_spark.connectors.formats.registry import HEADER_BYTES, Registered, needed
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.core.formats import OnSchemaChange, SchemaRegistry
from flinkish_spark.types.schemas import check_field_names

_SIMPLE: Mapping[str, T.DataType] = {
    "string": T.StringType(),
    "integer": T.LongType(),
    "number": T.DoubleType(),
    "boolean": T.BooleanType(),
}
_MOST_VALIDATED = 5
_DEEPEST = 64
# As many as Python takes of an integer. To compare or to divide 1e999999999 would need all of its digits.
_MOST_DIGITS = 4300


def validator_of(text: str, references: Sequence[tuple[str, str]] = ()) -> Any:
    """Return what holds values against a schema.

    Raises
    ------
    SchemaError
        It is no JSON Schema.
    """
    try:
        import jsonschema
        import referencing
        from referencing.jsonschema import DRAFT202012
    except ImportError as missing:
        raise needed("json-schema", "jsonschema", missing) from None
    try:
        schema = _DECODER.decode(text)
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft7Validator)
        kind.check_schema(schema)
        # Without a way to retrieve anything else.
        known: Any = referencing.Registry()
        for name, one in references:
            resource = referencing.Resource.from_contents(_DECODER.decode(one), DRAFT202012)
            known = known.with_resource(name, resource)
        return kind(schema, registry=known)
    except (ValueError, jsonschema.SchemaError) as wrong:
        raise SchemaError("a JSON Schema cannot be read", why=str(wrong).partition("\n")[0]) from None


# Numbers are held against a schema as they are written. A float would be another number.


class _Number(Decimal):
    """One with decimal places."""

    def __repr__(self) -> str:
        """Return it as reasons tell it."""
        return str(self)

    def __mod__(self, other: Decimal | int) -> Decimal:
        """Return what is left, exactly: for `multipleOf`."""
        return _EXACT.remainder(self, other)

    def __rmod__(self, other: Decimal | int) -> Decimal:
        """Return what is left of an integer."""
        return _EXACT.remainder(other, self)


# The quotient of the largest by the smallest has twice as many digits.
_EXACT = Context(prec=3 * _MOST_DIGITS)


def _number(text: str) -> _Number:
    if len(text) + abs(int(text.lower().partition("e")[2] or 0)) > _MOST_DIGITS:
        raise ValueError(f"a number has more than {_MOST_DIGITS} digits")
    return _Number(text)


def _number_or_integer(text: str) -> _Number | int:
    value = _number(text)
    return int(value) if value == value.to_integral_value() else value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_constant, parse_float=_number_or_integer)
# In which 1.0 is no integer.
_DECODER_OF_DRAFT_4 = json.JSONDecoder(parse_constant=_constant, parse_float=_number)


# ----------------------------------------------------------------------------------------------------------
# What each type becomes.


def fields_of(text: str, references: Sequence[tuple[str, str]] = ()) -> T.StructType:
    """Return the columns of the objects that a schema describes.

    Raises
    ------
    SchemaError
        It describes no object, or a value that could be of several types.
    """
    found = _Types(json.loads(text), {name: json.loads(one) for name, one in references}).of(None, "")
    if not isinstance(found, T.StructType):
        raise SchemaError(
            "the JSON Schema describes no object with properties",
            what_to_do='write {"type": "object", "properties": {...}}, or name fields="a STRING, b BIGINT"',
        )
    return found


@dataclass
class _Types:
    root: Any
    others: Mapping[str, Any]
    depth: int = 0

    def of(self, schema: Any, path: str) -> T.DataType:
        self.depth += 1
        try:
            if self.depth > _DEEPEST:
                raise self._error(path, "has itself within it, and Spark has no type that does")
            return self._of(self.root if schema is None else schema, path)
        finally:
            self.depth -= 1

    def _of(self, schema: Any, path: str) -> T.DataType:
        schema = self.resolved(schema, path)
        choices = [one for name in ("oneOf", "anyOf") for one in schema.get(name, ())]
        if choices and "type" not in schema and "properties" not in schema:
            left = [one for one in choices if self.resolved(one, path).get("type") != "null"]
            if len(left) != 1:
                raise self._error(path, f"may be of {len(left)} types")
            return self.of(left[0], path)
        kind = schema.get("type", "object" if "properties" in schema else None)
        kinds = [one for one in (kind if isinstance(kind, list) else [kind]) if one != "null"]
        if sorted(map(str, kinds)) == ["integer", "number"]:
            kinds = ["number"]
        if (
            kinds == [None]
            and schema.get("enum")
            and all(isinstance(e, str) for e in schema["enum"] if e is not None)
        ):
            return T.StringType()
        if len(kinds) != 1:
            raise self._error(path, f"may be of {len(kinds)} types")
        return self._of_one(str(kinds[0]), schema, path)

    def _of_one(self, kind: str, schema: Any, path: str) -> T.DataType:
        if kind == "object" and schema.get("properties"):
            fields = [
                T.StructField(name, self.of(one, f"{path}.{name}" if path else name))
                for name, one in schema["properties"].items()
            ]
            struct = T.StructType(fields)
            check_field_names(struct, "the JSON Schema" + (f", in '{path}'," if path else ""))
            return struct
        if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
            return T.MapType(T.StringType(), self.of(schema["additionalProperties"], f"{path}[]"))
        if kind == "array" and isinstance(schema.get("items"), dict):
            return T.ArrayType(self.of(schema["items"], f"{path}[]"))
        if kind not in _SIMPLE:
            raise self._error(path, f"is of type {kind}, of which the schema says no more")
        return _SIMPLE[kind]

    def resolved(self, schema: Any, path: str) -> Mapping[str, Any]:
        """Return a schema in the place of a reference to it, or of one that alone says anything."""
        for _ in range(_DEEPEST):
            if not isinstance(schema, dict):
                raise self._error(path, "may be anything")
            if "$ref" in schema:
                schema = self._at(str(schema["$ref"]), path)
            elif len(schema.get("allOf", ())) == 1 and "properties" not in schema:
                schema = schema["allOf"][0]
            else:
                return schema
        raise self._error(path, "refers to itself")

    def _at(self, reference: str, path: str) -> Any:
        name, _, pointer = reference.partition("#")
        found = self.others.get(name) if name else self.root
        for step in filter(None, pointer.split("/")):
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, dict) else None
        if found is None:
            raise self._error(path, f"refers to {reference!r}, which is not there")
        return found

    def _error(self, path: str, why: str) -> SchemaError:
        return SchemaError(
            f"no column follows from the JSON Schema for '{path}'",
            why=f"it {why}",
            what_to_do='name the fields: JsonSchema(..., fields="a STRING, b DECIMAL(10,2)")',
        )


def differences(text: str, references: Sequence[tuple[str, str]], reader: T.StructType) -> Difference:
    """Return which properties of a writer's schema the fields that are read do not have.

    Whether its values are what the fields hold is seen record by record.
    """
    found = Difference()
    types = _Types(json.loads(text), {name: json.loads(one) for name, one in references})
    _compare(types, types.root, reader, "", found)
    return found


def _compare(types: _Types, schema: Any, reader: T.DataType, path: str, found: Difference) -> None:
    try:
        schema = types.resolved(schema, path)
    except SchemaError:
        # It says nothing about properties.
        return
    for choice in (one for name in ("oneOf", "anyOf", "allOf") for one in schema.get(name, ())):
        _compare(types, choice, reader, path, found)
    match reader:
        case T.StructType():
            known = {one.name: one.dataType for one in reader}
            for each, inner in schema.get("properties", {}).items():
                name = f"{path}.{each}" if path else each
                if each in known:
                    _compare(types, inner, known[each], name, found)
                elif name not in found.left_out:
                    found.left_out.append(name)
        case T.ArrayType():
            _compare(types, schema.get("items"), reader.elementType, f"{path}[]", found)
        case T.MapType():
            _compare(types, schema.get("additionalProperties"), reader.valueType, f"{path}[]", found)


# ----------------------------------------------------------------------------------------------------------
# Reading.


@dataclass(frozen=True)
class JsonSchemaReader(Reader):
    """Gives the text of each record that is valid.

    Parameters
    ----------
    text, references
        The schema of the source.
    fields
        What its objects are read as, as JSON of Spark's.
    registry
        Who knows the schemas that records name. None: they were written with `text`, and name none.
    """

    text: str
    references: tuple[tuple[str, str], ...]
    fields: str
    registry: SchemaRegistry | None
    on_schema_change: OnSchemaChange

    kind = T.StringType()

    def opened(self) -> Callable[[bytes], str]:
        """Make what looks at records."""
        if self.registry is None:
            validator = validator_of(self.text, self.references)
            return lambda data: _valid(data, 0, validator)
        writers = WriterSchemas(self.registry, "JSON", self._looked_at)
        return lambda data: _valid(data, HEADER_BYTES, writers.of(data))

    def _looked_at(self, found: Registered) -> Any:
        """Return what holds a record against the schema it was written with."""
        if self.on_schema_change is not OnSchemaChange.LEAVE_OUT:
            read = T.StructType.fromJson(json.loads(self.fields))
            left_out = differences(found.text, found.references, read)
            check_difference(found, left_out, self.on_schema_change)
        return validator_of(found.text, found.references)


def _valid(data: bytes, start: int, validator: Any) -> str:
    try:
        text = data[start:].decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is no UTF-8: {error.reason}") from None
    why = invalid(text, validator)
    if why is not None:
        raise Unreadable(why)
    return text


def invalid(text: str, validator: Any) -> str | None:
    """Return why a text is no JSON that a schema allows; None if it is."""
    try:
        decoder = _DECODER if validator.is_type(1.0, "integer") else _DECODER_OF_DRAFT_4
        value = decoder.decode(text)
        errors = sorted(
            validator.iter_errors(value), key=lambda one: [str(step) for step in one.absolute_path]
        )
    except (ValueError, RecursionError) as error:
        return f"it is no JSON: {error}"
    except Exception as error:
        # A reference within the schema that leads nowhere.
        raise SchemaError(
            "a JSON Schema cannot be used", why=f"{type(error).__name__}: {error}"[:500].rstrip(".")
        ) from None
    if not errors:
        return None
    told = [f"{'.'.join(map(str, one.absolute_path)) or 'the object'}: {one.message}" for one in errors]
    return f"it is not valid by its JSON Schema: {'; '.join(told[:_MOST_VALIDATED])}"


# ----------------------------------------------------------------------------------------------------------
# Writing.


@dataclass(frozen=True)
class JsonSchemaWriter(Writer):
    """Holds the text of each row against the schema, and puts its number in front."""

    text: str
    prefix: bytes = b""

    def opened(self) -> Callable[[Any], bytes]:
        """Make what looks at texts."""
        validator = validator_of(self.text)

        def write(data: bytes) -> bytes:
            why = invalid(data.decode(), validator)
            if why is not None:
                raise Unreadable(why)
            return self.prefix + data

        return write


def derived_schema(fields: T.StructType) -> str:
    """Return a schema of rows, in which every field may be null.

    Examples
    --------
    >>> derived_schema(T.StructType().add("n", "long"))[-61:]
    '"object", "properties": {"n": {"type": ["integer", "null"]}}}'
    """
    draft = "http://json-schema.org/draft-07/schema#"
    return json.dumps({"$schema": draft, "title": "Record", **_described(fields)})


@functools.singledispatch
def _described(kind: T.DataType) -> dict[str, Any]:
    if isinstance(kind, T.IntegralType):
        return {"type": "integer"}
    if isinstance(kind, T.DecimalType | T.DoubleType | T.FloatType):
        # JSON has no NaN and no infinities: rows with these do not fit.
        return {"type": "number"}
    return {"type": "boolean"} if isinstance(kind, T.BooleanType) else {"type": "string"}


@_described.register
def _(kind: T.StructType) -> dict[str, Any]:
    return {"type": "object", "properties": {one.name: _nullable(one.dataType) for one in kind}}


@_described.register
def _(kind: T.ArrayType) -> dict[str, Any]:
    return {"type": "array", "items": _nullable(kind.elementType)}


@_described.register
def _(kind: T.MapType) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": _nullable(kind.valueType)}


def _nullable(kind: T.DataType) -> dict[str, Any]:
    found = _described(kind)
    return {**found, "type": [found["type"], "null"]}
