"""Encoding of a sink's keys and values, in any format, with a reason for each row that cannot be encoded.

Columns are encoded in the Python task that stages them; Avro is encoded before that by Spark's own encoder.
Protobuf is written by its own library, and JSON is validated by the library of JSON Schema. A schema is
registered before the job starts, and looked up again at each start; so no task has to ask for the schema id
that its records begin with.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.connectors.formats import protobuf
from flinkish_spark.connectors.formats.avro_encoder import avro_column, avro_misfit, avro_schema, check_avro
from flinkish_spark.connectors.formats.csv import CsvForm, check_flat, lines_of
from flinkish_spark.connectors.formats.json_schema import (
    JsonSchemaWriter,
    check_references,
    derive_schema,
    fields_of,
    why_never_valid,
)
from flinkish_spark.connectors.formats.plain_json import json_schema
from flinkish_spark.connectors.formats.reader import Writer, write_values
from flinkish_spark.connectors.formats.registry import (
    RegistrySchema,
    client_of,
    header,
    record_name,
    subject_of,
)
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.formats import (
    Avro,
    Csv,
    Format,
    Json,
    JsonSchema,
    Protobuf,
    Raw,
    RegisteredFormat,
    SchemaRegistry,
    String,
)
from flinkish_spark.types.exact_text import JsonWriter, exact_text, unfit_for_json, unfit_for_text
from flinkish_spark.types.schemas import PREFIX

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class EncodedColumn:
    #: The encoded bytes; undefined for rows with a misfit.
    data: pa.Array
    #: The reason why a row cannot be encoded, null if it was; None if every row was.
    misfit: pa.Array | None = None


def find_named_columns(form: Format) -> list[str]:
    match form:
        case Raw() | String():
            return [form.column]
        case Json() | Csv() if form.schema:
            return list(json_schema(Json(form.schema)).names)
        case JsonSchema() if form.fields:
            return list(json_schema(Json(form.fields)).names)
        case JsonSchema() if form.schema:
            return list(fields_of(form.schema).names)
    return []


def check_encodable(form: Format, schema: T.StructType, whose: str) -> None:
    """Refuse a format that does not fit a stream's fields; :func:`check_written` checks Avro."""
    match form:
        case Raw() | String():
            unfit, names = unfit_for_text, [form.column]
        case Json() | Csv() | JsonSchema():
            unfit, names = unfit_for_json, find_named_columns(form) or schema.names
        case Protobuf():
            _check_message(form, schema, whose)
            return
        case Avro():
            return
    for name in names:
        if (why := unfit(schema[name].dataType)) is not None:
            raise SchemaError(
                f"{whose} has the field '{name}', which cannot be written exactly",
                why=why,
                what_to_do="convert it in a transform, for example by a cast to STRING",
                column=name,
            )
    if isinstance(form, Csv):
        check_flat(T.StructType([schema[name] for name in names]), whose)
    if isinstance(form, JsonSchema) and form.schema and not form.fields:
        for one in fields_of(form.schema):
            if (why := why_never_valid(schema[one.name].dataType, one.dataType, one.name)) is not None:
                raise SchemaError(
                    f"{whose} can never be valid by its JSON Schema",
                    why=why,
                    what_to_do="cast it in a transform, or name the columns: JsonSchema(..., fields=...)",
                    column=one.name,
                )


def _check_message(form: Protobuf, schema: T.StructType, whose: str) -> None:
    if not form.descriptor:
        raise ConfigError(
            f"{whose} is Protobuf without a descriptor",
            what_to_do="take Protobuf.of(orders_pb2.Order), or give what protoc writes",
        )
    message = protobuf.descriptor_of(form.descriptor, form.message)
    wanted = protobuf.fields_of(message)
    missing = [name for name in wanted.names if name not in schema.names]
    if missing:
        raise SchemaError(
            f"{whose} has the field '{missing[0]}' in its Protobuf message, and its stream does not",
            what_to_do=f"choose from {', '.join(schema.names)}",
            column=missing[0],
        )
    given = T.StructType([schema[name] for name in wanted.names])
    if (why := protobuf.why_unfit(given, wanted, "")) is not None:
        raise SchemaError(
            f"{whose} cannot be written as its Protobuf message",
            why=why,
            what_to_do="cast it in a transform; docs/formats.md says what each type of Protobuf is",
        )
    if (name := protobuf.find_missing_required(message, given)) is not None:
        raise SchemaError(
            f"{whose} has the required field '{name}' in its Protobuf message, and its stream does not",
            what_to_do="add it in a transform",
            column=name,
        )


def check_written(
    spark: SparkSession, form: Format, schema: T.StructType, topics: Sequence[str], part: str, whose: str
) -> None:
    """Make the checks that need Spark or the registry; called before anything starts."""
    if isinstance(form, Avro):
        check_avro(spark, form, schema, whose)
    if isinstance(form, JsonSchema):
        # Derived schemas are checked too, since that fails if the library is missing.
        check_references(_json_schema_of(form, schema))
    prefix_of(form, schema, topics, part)


def prefix_of(form: Format, schema: T.StructType, topics: Sequence[str], part: str) -> bytes:
    """Return the bytes before each record; with a registry this registers the schema."""
    if isinstance(form, Avro) and form.schema_id is not None:
        return header(form.schema_id)
    if not isinstance(form, RegisteredFormat) or form.registry is None:
        return b""
    numbers = {_number_of(form, form.registry, schema, topic, part) for topic in topics}
    if len(numbers) != 1:
        raise SchemaError(
            f"the registry gives the schema of the {part} a number for each topic: {sorted(numbers)}",
            why="the topics' subjects are in different contexts of it",
            what_to_do="use a sink for each topic",
        )
    (number,) = numbers
    if isinstance(form, Protobuf):
        message = protobuf.descriptor_of(form.descriptor, form.message)
        return header(number) + protobuf.path_bytes(protobuf.index_path(message))
    return header(number)


def _number_of(
    form: RegisteredFormat, registry: SchemaRegistry, schema: T.StructType, topic: str, part: str
) -> int:
    client = client_of(registry)
    match form:
        case Avro():
            written = RegistrySchema("AVRO", json.dumps(avro_schema(form, schema)))
            name = record_name("AVRO", written.text)
        case JsonSchema():
            written = RegistrySchema("JSON", _json_schema_of(form, schema))
            name = record_name("JSON", written.text)
        case Protobuf():
            message = protobuf.descriptor_of(form.descriptor, form.message)
            written, name = _file_of(message.file), message.full_name
            subject = subject_of(registry, topic, part, name)
            return client.id_of(subject, written, _dependencies(registry, message.file))
    return client.id_of(subject_of(registry, topic, part, name), written)


def _json_schema_of(form: JsonSchema, schema: T.StructType) -> str:
    names = find_named_columns(form) or schema.names
    return form.schema or derive_schema(T.StructType([schema[name] for name in names]))


def _file_of(file: object) -> RegistrySchema:
    from google.protobuf import descriptor_pb2

    made = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(made)  # type: ignore[attr-defined]
    return RegistrySchema("PROTOBUF", base64.b64encode(made.SerializeToString(deterministic=True)).decode())


def _dependencies(registry: SchemaRegistry, file: object) -> list[tuple[str, str, int]]:
    """Register the files that a file imports, each under its own name, as Confluent's serializers do."""
    found = []
    for one in file.dependencies:  # type: ignore[attr-defined]
        if one.name.startswith("google/protobuf/"):
            continue
        needs = _dependencies(registry, one)
        written = _file_of(one)
        client_of(registry).id_of(one.name, written, needs)
        found.append((one.name, one.name, client_of(registry).version_of(one.name, written, needs)))
    return found


@dataclass(frozen=True)
class PartEncoder:
    """Encodes the keys or the values of records. It is pickled into tasks."""

    form: Format | None
    #: The fields of the records.
    fields: T.StructType
    #: The bytes before each record if the format has a registry.
    prefix: bytes = b""
    #: Prefix of the names of columns that Spark computes.
    part: str = ""

    def spark_columns(self) -> dict[str, Column]:
        """Return the columns that Spark computes before Python encodes: Avro by Spark's own encoder."""
        if not isinstance(self.form, Avro):
            return {}
        misfit = avro_misfit(self.form, self.fields)
        bare = avro_column(replace(self.form, schema_id=None), self.fields)
        data = F.concat(F.expr(f"X'{self.prefix.hex()}'"), bare) if self.prefix else bare
        found = {self._data: data if misfit is None else F.when(misfit.isNull(), data)}
        return found if misfit is None else {**found, self._misfit: misfit}

    def spark_column_types(self) -> dict[str, T.DataType]:
        """Return the types of the columns that :meth:`spark_columns` may return."""
        return {self._data: T.BinaryType(), self._misfit: T.StringType()}

    @property
    def may_misfit(self) -> bool:
        if isinstance(self.form, Avro):
            return avro_misfit(self.form, self.fields) is not None
        return isinstance(self.form, Protobuf | JsonSchema)

    @cached_property
    def names(self) -> list[str]:
        """Names of the fields that :meth:`encode` reads."""
        match self.form:
            case None | Avro():
                return []
            case Protobuf():
                return protobuf.fields_of(
                    protobuf.descriptor_of(self.form.descriptor, self.form.message)
                ).names
        return find_named_columns(self.form) or self.fields.names

    def encode(self, records: pa.RecordBatch) -> EncodedColumn:
        columns = [records.column(name) for name in self.names]
        match self.form:
            case None:
                return EncodedColumn(pa.nulls(records.num_rows, pa.binary()))
            case Avro():
                has_misfit = self._misfit in records.schema.names
                misfit = records.column(self._misfit) if has_misfit else None
                return EncodedColumn(records.column(self._data), misfit)
            case Raw() | String():
                (column,), kind = columns, self.fields[self.names[0]].dataType
                is_binary = isinstance(kind, T.BinaryType)
                return EncodedColumn(column if is_binary else exact_text(kind)(column).cast(pa.binary()))
            case Json():
                return EncodedColumn(self._json.write(columns, records.num_rows).cast(pa.binary()))
            case Csv():
                own = T.StructType([self.fields[name] for name in self.names])
                return EncodedColumn(lines_of(own, columns, CsvForm(self.form.delimiter)).cast(pa.binary()))
            case Protobuf():
                # Arrow takes the number of rows from the first column.
                nothing = pa.array([{}] * records.num_rows, pa.struct([]))
                return self._write(pa.StructArray.from_arrays(columns, self.names) if columns else nothing)
            case JsonSchema():
                return self._write(self._json.write(columns, records.num_rows).cast(pa.binary()))

    def _write(self, rows: pa.Array) -> EncodedColumn:
        assert self._writer is not None
        return EncodedColumn(*write_values(self._writer, rows))

    @cached_property
    def _writer(self) -> Writer | None:
        if isinstance(self.form, Protobuf):
            message = protobuf.descriptor_of(self.form.descriptor, self.form.message)
            return protobuf.ProtobufWriter(self.form.descriptor, message.full_name, self.prefix)
        if isinstance(self.form, JsonSchema):
            return JsonSchemaWriter(_json_schema_of(self.form, self.fields), self.prefix)
        return None

    @cached_property
    def _json(self) -> JsonWriter:
        fields = T.StructType([self.fields[name] for name in self.names])
        # In users' schemas fields may often be left out, but seldom be null.
        is_of_user = isinstance(self.form, JsonSchema) and bool(self.form.schema)
        return JsonWriter(fields, null_fields=not is_of_user)

    @property
    def _data(self) -> str:
        return f"{PREFIX}{self.part}_data"

    @property
    def _misfit(self) -> str:
        return f"{PREFIX}{self.part}_misfit"
