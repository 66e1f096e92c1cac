"""Avro as a format of records: read by `avro.py`, written to one binary column by Spark's own encoder.

Spark's encoder ends the task at a record that does not fit a given schema. So expressions of this module find
the records that do not fit (types were compared before the start): a null in a required field, a text that is
no symbol of an enum, bytes without the length of a fixed, a union with no member or several members set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.connectors.avro_calendar import check_calendar
from flinkish_spark.connectors.formats.avro import AvroReader, parse_schema
from flinkish_spark.connectors.formats.avro_schemas import map_parts
from flinkish_spark.connectors.formats.reader import ConvertingReader, OnSchemaChange
from flinkish_spark.connectors.formats.registered import RegisteredFormat, parse_schema_text
from flinkish_spark.connectors.formats.registry import RegistrySchema, SchemaRegistry, header, record_name
from flinkish_spark.connectors.plain_formats import find_field
from flinkish_spark.contracts.format import EncodedColumn, PartReader, PartWriter
from flinkish_spark.core.errors import ConfigError, EnvironmentFault, SchemaError
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.core.formats import BadRecordPolicy, OnBadRecord
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.schemas import PREFIX

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: What fits the four bytes of a schema's id.
_MOST_SCHEMA_ID = 2**31 - 1
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Name of the outermost record of a derived schema.
_RECORD = "Record"
_PRIMITIVES: Mapping[type[T.DataType], Any] = {
    T.BooleanType: "boolean",
    T.ByteType: "int",
    T.ShortType: "int",
    T.IntegerType: "int",
    T.LongType: "long",
    T.FloatType: "float",
    T.DoubleType: "double",
    T.StringType: "string",
    T.BinaryType: "bytes",
    T.DateType: {"type": "int", "logicalType": "date"},
    T.TimestampType: {"type": "long", "logicalType": "timestamp-micros"},
    T.TimestampNTZType: {"type": "long", "logicalType": "local-timestamp-micros"},
}
_ENCODERS_REASON = re.compile(
    r"(?:IncompatibleSchemaException|SchemaParseException|AvroTypeException|AvroRuntimeException): ([^\n]+)"
)
#: Spark's error class for a null that its encoder cannot write; the types did match.
_NULL_REFUSED = "AVRO_CANNOT_WRITE_NULL_FIELD"
_MICROS = ("timestamp-micros", "local-timestamp-micros")


@dataclass(frozen=True, slots=True)
class Avro(RegisteredFormat):
    """Avro's binary form, one record of a schema each; with a registry in Confluent's wire format.

    A sink's records are encoded by Spark, so the session needs the Avro JAR of the pinned list whichever
    engine writes. A source's are read by fastavro, of the extra ``avro``.

    Parameters
    ----------
    schema
        A record's schema as JSON text. A sink writes the fields that it names, in its order; empty: derived
        from the stream, with every field nullable. A source gives its fields, whatever the writer's schema
        had besides; empty: the newest of the registry's subject at the first start of the job.
    schema_id
        Of a sink without a registry: under which number one knows `schema`; written in front of every
        record as a zero byte and four bytes. Needs `schema`. None: nothing is written in front.
    registry
        Where the schema of each record is asked for by the number in front of it, and that of a sink is
        registered. None: a source's records were written with `schema`, and have nothing in front.
    on_schema_change
        What a source does with records of a schema that has more. EVOLVE needs a registry and no `schema`.
    on_bad_record
        What a source does with bytes that are no record; a null value counts as such.

    Examples
    --------
    >>> Avro('{"type": "record", "name": "Order", "fields": [{"name": "user", "type": "string"}]}').schema_id
    """

    schema: str = ""
    schema_id: Annotated[int | None, Range(0, _MOST_SCHEMA_ID)] = None
    registry: SchemaRegistry | None = None
    on_schema_change: OnSchemaChange = OnSchemaChange.FAIL
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL
    _kind = "AVRO"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.schema:
            found = parse_schema_text(self.schema, "Avro schema")
            is_record = isinstance(found, dict) and found.get("type") == "record"
            fields = found.get("fields") if is_record else None
            if not isinstance(fields, list) or not fields or not all(map(_is_field, fields)):
                form = '{"type": "record", "name": ..., "fields": [{"name": ..., "type": ...}, ...]}'
                raise ConfigError("the Avro schema is not that of a record", what_to_do=f"write {form}")
        self._check_change(has_fields=bool(self.schema))
        if self.schema_id is None:
            return
        if not self.schema:
            what_to_do = "give the schema that the registry has under this id"
            raise ConfigError("Avro has a schema_id and no schema", what_to_do=what_to_do)
        if self.registry is not None:
            raise ConfigError("Avro has a schema_id and a registry", what_to_do="leave one of them out")

    @property
    def _has_schema(self) -> bool:
        return bool(self.schema)

    def make_reader(self, part: str) -> PartReader | None:
        if self.schema_id is not None:
            raise ConfigError("Avro of a source has a schema_id", what_to_do="give a registry")
        return RegisteredFormat.make_reader(self, part)

    def _make_reader(self, part: str, schema: RegistrySchema | None) -> PartReader:
        given = schema or RegistrySchema("AVRO", self.schema)
        text = json.dumps(parse_schema(given.text, given.references), sort_keys=True)
        reader = AvroReader(text, part, self.registry, self.on_schema_change)
        return ConvertingReader(part, reader.kind, reader)

    def check_start(self, spark: SparkSession, schema: T.StructType, whose: str) -> None:
        check_avro(spark, self.schema, schema, whose)

    def make_writer(self, schema: T.StructType, topics: Sequence[str], part: str) -> PartWriter:
        names = f"{PREFIX}{part}_data", f"{PREFIX}{part}_misfit"
        return _AvroWriter(T.StructType(), schema, self.schema, self._prefix(schema, topics, part), *names)

    def _prefix(self, schema: T.StructType, topics: Sequence[str], part: str) -> bytes:
        if self.schema_id is not None:
            return header(self.schema_id)
        return RegisteredFormat._prefix(self, schema, topics, part)

    def _find_written(self, schema: T.StructType) -> tuple[RegistrySchema, str]:
        written = RegistrySchema("AVRO", json.dumps(avro_schema(self.schema, schema)))
        return written, record_name("AVRO", written.text)


def _is_field(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and "type" in value


@dataclass(frozen=True)
class _AvroWriter(PartWriter):
    """Takes what Spark's encoder has written."""

    schema: T.StructType
    text: str
    prefix: bytes
    #: Names of the columns that Spark computes: what it has written, and why it could not.
    data: str
    misfit: str

    @property
    def may_misfit(self) -> bool:
        return avro_misfit(self.text, self.schema) is not None

    def spark_columns(self) -> dict[str, Column]:
        misfit, data = avro_misfit(self.text, self.schema), avro_column(self.text, self.schema)
        data = F.concat(F.expr(f"X'{self.prefix.hex()}'"), data) if self.prefix else data
        if misfit is None:
            return {self.data: data}
        return {self.data: F.when(misfit.isNull(), data), self.misfit: misfit}

    def spark_column_types(self) -> dict[str, T.DataType]:
        return {self.data: T.BinaryType(), self.misfit: T.StringType()}

    def write(self, records: pa.RecordBatch) -> EncodedColumn:
        misfit = records.column(self.misfit) if self.misfit in records.schema.names else None
        return EncodedColumn(records.column(self.data), misfit)


def avro_schema(text: str, schema: T.StructType) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text) if text else derive_schema(schema)
    return found


def derive_schema(schema: T.StructType) -> dict[str, Any]:
    """Return an Avro schema for a stream: every field may be null; nested records are named by their path."""
    return _derive_record(schema, _RECORD, set())


def _derive_record(schema: T.StructType, path: str, taken: set[str]) -> dict[str, Any]:
    # If two paths make the same name, like a.b_c and a_b.c, the later one gets underscores at its end.
    name = path
    while name in taken:
        name += "_"
    taken.add(name)
    fields = []
    for one in schema.fields:
        if not _NAME.fullmatch(one.name):
            raise SchemaError(
                f"the field '{one.name}' cannot be written as Avro",
                why="an Avro name has letters, digits and underscores only",
                what_to_do="rename it in a transform",
            )
        kind = _derive_type(one.dataType, f"{path}_{one.name}", taken)
        fields.append({"name": one.name, "type": ["null", kind]})
    return {"type": "record", "name": name, "fields": fields}


def _derive_type(kind: T.DataType, path: str, taken: set[str]) -> Any:
    match kind:
        case T.StructType():
            return _derive_record(kind, path, taken)
        case T.ArrayType():
            return {"type": "array", "items": ["null", _derive_type(kind.elementType, path, taken)]}
        case T.MapType() if isinstance(kind.keyType, T.StringType):
            return {"type": "map", "values": ["null", _derive_type(kind.valueType, path, taken)]}
        case T.DecimalType():
            return {
                "type": "bytes",
                "logicalType": "decimal",
                "precision": kind.precision,
                "scale": kind.scale,
            }
    if type(kind) not in _PRIMITIVES:
        name = path.removeprefix(f"{_RECORD}_")
        raise SchemaError(
            f"the field '{name}' of type {kind.simpleString()} cannot be written as Avro",
            what_to_do="cast it in a transform() before the sink, or leave it out",
        )
    return _PRIMITIVES[type(kind)]


def avro_fields(text: str, schema: T.StructType) -> list[str]:
    return [str(one["name"]) for one in avro_schema(text, schema)["fields"]]


def avro_column(text: str, schema: T.StructType) -> Column:
    """Return the encoded record of each row; a row that does not fit the schema ends the task."""
    wanted = avro_schema(text, schema)
    record = F.struct(*[F.col(quote_name(n)).alias(n) for n in avro_fields(text, schema)])
    return F.call_function("to_avro", record, F.lit(json.dumps(wanted)))


def avro_misfit(text: str, schema: T.StructType) -> Column | None:
    """Return a column with the reason why a row does not fit, null if it fits; None if every row fits."""
    wanted = _inline_types(avro_schema(text, schema), "", {})
    kinds = {one.name: one.dataType for one in schema.fields}
    found: list[Column] = []
    for one in wanted["fields"]:
        name = str(one["name"])
        found += _find_misfits(F.col(quote_name(name)), kinds[name], one["type"], name)
    return F.coalesce(*found) if found else None


def _inline_types(avro: Any, space: str, named: dict[str, Any]) -> Any:
    """Return a schema with each type name replaced by its definition; it may contain itself."""
    if isinstance(avro, list):
        return [_inline_types(one, space, named) for one in avro]
    name = str(avro if isinstance(avro, str) else avro["type"])
    if isinstance(avro, str) or not {"name", "items", "values"} & avro.keys():
        return named.get(_full(name, space), named.get(name, "null" if name == "null" else avro))
    made = dict(avro)
    if "name" in avro:
        given = avro.get("namespace")
        full = _full(str(avro["name"]), space if given is None else str(given))
        named[full], space = made, full.rpartition(".")[0]
    # Updated in place, since names inside it already refer to this object.
    made.update(map_parts(avro, lambda one: _inline_types(one, space, named)))
    return made


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _find_misfits(column: Column, kind: T.DataType, avro: Any, path: str) -> Iterator[Column]:
    """Yield one column per possible error: its message, or null if the value is right."""
    branches = [one for one in avro if one != "null"] if isinstance(avro, list) else [avro]
    takes_null = isinstance(avro, list) and len(branches) < len(avro)
    if not takes_null:
        yield F.when(column.isNull(), f"the field '{path}' is null")
    if len(branches) == 1:
        yield from _find_value_misfits(column, kind, branches[0], path)
    elif isinstance(kind, T.StructType):
        # Spark's encoder would write the first member that is set, and nothing of the others.
        members = [column.getField(one.name) for one in kind.fields]
        given = F.array_size(F.array_compact(F.array(*[F.when(one.isNotNull(), 1) for one in members])))
        yield F.when(column.isNotNull() & (given > 1), f"of the union '{path}' more than one member is set")
        if not takes_null:
            yield F.when(column.isNotNull() & (given == 0), f"of the union '{path}' no member is set")
        for member, one, branch in zip(members, kind.fields, branches, strict=True):
            yield from _find_value_misfits(member, one.dataType, branch, f"{path}.{one.name}")


def _find_value_misfits(column: Column, kind: T.DataType, avro: Any, path: str) -> Iterator[Column]:
    shape = avro.get("type") if isinstance(avro, dict) else avro
    if shape == "enum" and isinstance(kind, T.StringType):
        symbols = [str(one) for one in avro["symbols"]]
        yield F.when(~column.isin(symbols), f"the field '{path}' is no symbol of its enum")
    elif shape == "fixed" and isinstance(kind, T.BinaryType):
        size = int(avro["size"])
        yield F.when(F.octet_length(column) != size, f"the field '{path}' does not have {size} bytes")
    elif shape == "long" and isinstance(kind, T.TimestampType | T.TimestampNTZType):
        if not (isinstance(avro, dict) and avro.get("logicalType") in _MICROS):
            # Spark's encoder would cut them off: two keys could become one.
            micros = F.unix_micros(column.cast(T.TimestampType()))
            why = f"the field '{path}' has microseconds, and its schema milliseconds"
            yield F.when(micros % 1000 != 0, why)
    elif shape == "record" and isinstance(kind, T.StructType):
        for one in avro["fields"]:
            # Like Spark's encoder: a field of a nested record may differ in case.
            name = str(one["name"])
            alike = [each for each in kind.fields if each.name.lower() == name.lower()]
            own = next((each for each in alike if each.name == name), alike[0] if alike else None)
            if own is not None:
                inner = _find_misfits(
                    column.getField(own.name), own.dataType, one["type"], f"{path}.{own.name}"
                )
                yield from (F.when(column.isNotNull(), why) for why in inner)
    elif shape == "array" and isinstance(kind, T.ArrayType):
        yield from _find_element_misfits(column, kind.elementType, avro["items"], f"{path}[]")
    elif shape == "map" and isinstance(kind, T.MapType):
        yield from _find_element_misfits(F.map_values(column), kind.valueType, avro["values"], f"{path}[]")


def _find_element_misfits(elements: Column, kind: T.DataType, avro: Any, path: str) -> Iterator[Column]:
    found: list[Column] = []

    def why(element: Column) -> Column:
        # One expression for all errors: one per error would multiply with each level of nesting.
        found.extend(_find_misfits(element, kind, avro, path))
        return F.coalesce(*found, F.lit(None).cast("string"))

    told = F.transform(elements, why)
    if found:
        yield F.get(F.array_compact(told), F.lit(0))


def check_avro(spark: SparkSession, text: str, schema: T.StructType, whose: str) -> None:
    """Compare schema and fields as Spark's encoder does, before anything starts."""
    names, field = avro_fields(text, schema), f"a field of the Avro schema of {whose}"
    written = T.StructType([find_field(schema, name, field) for name in names])
    check_calendar(spark, written, whose)
    nulls = spark.range(1).select(*[F.lit(None).cast(f.dataType).alias(f.name) for f in schema.fields])
    try:
        nulls.select(avro_column(text, schema)).collect()
    except Exception as refused:
        told = str(refused)
        if _NULL_REFUSED in told:
            return
        if "AVRO_NOT_LOADED" in told or "CatalystDataToAvro" in told.partition("\n")[0]:
            raise EnvironmentFault(
                f"{whose} is Avro, and this Spark session does not have Spark's Avro JAR",
                what_to_do="start the session with flinkish_spark.configure_spark_with_jars(...)",
            ) from None
        reasons = _ENCODERS_REASON.findall(told)
        raise SchemaError(
            f"{whose} cannot be written with its Avro schema",
            why=(reasons or [told])[-1][:500].rstrip("."),
            what_to_do="let the fields of the stream have the names and types of the schema",
        ) from None
