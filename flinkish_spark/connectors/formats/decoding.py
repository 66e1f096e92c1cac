"""Decoding of a source's keys and values into columns, in any format, with a reason for each bad record.

Arrow columns are decoded by Python libraries of the formats: Spark's own functions do not know records that
name their writer's schema, and do not say why a record is bad.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.connectors.formats import avro, json_schema, plain_json, protobuf
from flinkish_spark.connectors.formats.csv import CsvReader, check_flat
from flinkish_spark.connectors.formats.reader import Reader, read_values
from flinkish_spark.connectors.formats.registry import NoSuchSchema, RegistrySchema, client_of, subject_of
from flinkish_spark.contracts.source import JobPlace
from flinkish_spark.core.errors import UNREADABLE_MARKER, ConfigError, SchemaError
from flinkish_spark.core.formats import (
    Avro,
    BadRecordPolicy,
    Csv,
    Format,
    Json,
    JsonSchema,
    OnBadRecord,
    OnSchemaChange,
    Protobuf,
    Raw,
    RegisteredFormat,
    SchemaRegistry,
    String,
)
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.types.json_columns import has_intervals
from flinkish_spark.types.schemas import PREFIX

#: The column with the reason why a record is bad.
REASON = f"{PREFIX}reason"


@dataclass(frozen=True)
class RecordPart:
    """The key or the value of records, its format, and the columns that it is decoded into."""

    #: ``key`` or ``value``: the column with the bytes.
    name: str
    form: Format
    fields: T.StructType
    #: Reads the bytes; None for bytes, texts and JSON.
    reader: Reader | None = None

    @property
    def read(self) -> str:
        return f"{PREFIX}read_{self.name}"

    @property
    def has_intervals(self) -> bool:
        return has_intervals(self.fields)


def make_declared_part(form: Format, name: str) -> RecordPart | None:
    """Return a part whose format declares its columns; None if a registry's subject does."""
    match form:
        case Raw():
            return RecordPart(name, form, T.StructType([T.StructField(form.column, T.BinaryType())]))
        case String():
            return RecordPart(name, form, T.StructType([T.StructField(form.column, T.StringType())]))
        case Json():
            return RecordPart(name, form, plain_json.json_schema(form))
        case Csv():
            fields = plain_json.json_schema(Json(form.schema), "CSV")
            check_flat(fields, "the CSV schema")
            return RecordPart(name, form, fields, CsvReader(fields.json(), form.delimiter))
        case Avro() if form.schema_id is not None:
            raise ConfigError(
                "Avro of a source has a schema_id",
                why="each of its records names its own schema",
                what_to_do="give a registry",
            )
        case Avro(schema="") | Protobuf(descriptor=b"") | JsonSchema(schema="") if form.registry is not None:
            return None
        case Avro(schema="") | Protobuf(descriptor=b"") | JsonSchema(schema=""):
            raise ConfigError(
                f"{type(form).__name__} of a source has neither a schema nor a registry",
                what_to_do="give one of them",
            )
        case Avro():
            return _make_text_part(form, name, RegistrySchema("AVRO", form.schema))
        case Protobuf():
            return _make_protobuf_part(form, name, form.descriptor, form.message)
        case JsonSchema():
            return _make_text_part(form, name, RegistrySchema("JSON", form.schema))


def _make_text_part(form: Avro | JsonSchema, name: str, schema: RegistrySchema) -> RecordPart:
    if isinstance(form, Avro):
        text = json.dumps(avro.parse_schema(schema.text, schema.references), sort_keys=True)
        reader = avro.AvroReader(text, name, form.registry, form.on_schema_change)
        return RecordPart(name, form, reader.kind, reader)
    json_schema.validator_of(schema.text, schema.references)
    if form.fields:
        fields = plain_json.json_schema(Json(form.fields))
    else:
        fields = json_schema.fields_of(schema.text, schema.references)
    of_json = json_schema.JsonSchemaReader(
        schema.text, schema.references, fields.json(), form.registry, form.on_schema_change
    )
    return RecordPart(name, form, fields, of_json)


def _make_protobuf_part(form: Protobuf, name: str, files: bytes, message: str) -> RecordPart:
    descriptor = protobuf.descriptor_of(files, message)
    reader = protobuf.ProtobufReader(files, descriptor.full_name, form.registry, form.on_schema_change)
    return RecordPart(name, form, reader.kind, reader)


def part_of(form: Format, name: str, uid: str, place: JobPlace, topics: Sequence[str]) -> RecordPart:
    """Return a part with its columns; if the registry declares them, its answer is recorded."""
    # Called at each start of the query. Without EVOLVE a job always reads with the schema of its first start,
    # which is recorded as a fact in its directory and savepoints. With EVOLVE it reads with the newest
    # schema, and records from which checkpoint on it has read with each.
    stated = make_declared_part(form, name)
    if stated is not None or not isinstance(form, RegisteredFormat) or form.registry is None:
        assert stated is not None
        return stated
    job_dir = None if place.job_dir is None else JobDir(place.job_dir.open(), place.job_dir)
    fact, evolves = f"schema-{uid}-{name}", form.on_schema_change is OnSchemaChange.EVOLVE
    stored = None if job_dir is None or evolves else job_dir.find_fact(fact)
    schema = _newest(form.registry, name, topics) if stored is None else RegistrySchema.from_json(stored)
    if job_dir is not None and stored is None:
        first = job_dir.record_fact(fact, schema.to_json())
        if evolves:
            _note_schema(job_dir, fact, schema)
        else:
            schema = RegistrySchema.from_json(first)
    wanted = {Avro: "AVRO", Protobuf: "PROTOBUF", JsonSchema: "JSON"}[type(form)]
    if schema.kind != wanted:
        raise SchemaError(
            f"{schema.name} is {schema.kind}, and the {name} of source '{uid}' is read as {wanted}",
            what_to_do="choose the format of the registry's schema, or another subject",
        )
    if isinstance(form, Protobuf):
        files = protobuf.files_of(schema)
        return _make_protobuf_part(form, name, files, form.message or protobuf.first_message(files))
    return _make_text_part(form, name, schema)


def _newest(registry: SchemaRegistry, name: str, topics: Sequence[str]) -> RegistrySchema:
    if not registry.subject and len(topics) != 1:
        raise ConfigError(
            f"the schema of the {name} comes from a registry, and the source reads {len(topics)} topics",
            why="each of them has a subject of its own",
            what_to_do='give the schema, or SchemaRegistry(..., subject="...")',
        )
    subject = subject_of(registry, topics[0] if topics else "", name, "")
    try:
        return client_of(registry).newest(subject)
    except NoSuchSchema:
        raise SchemaError(
            f"the registry has no subject '{subject}'",
            what_to_do="write a record first, register a schema, or give the schema to the source",
            subject=subject,
        ) from None


def schema_facts(uid: str) -> tuple[str, ...]:
    return tuple(f"schema-{uid}-{name}" for name in ("key", "value"))


def _note_schema(job_dir: JobDir, fact: str, schema: RegistrySchema) -> None:
    """Record from which checkpoint on a schema is used, unless it was in use before."""
    at = 1 + max((one.value for one in job_dir.list_checkpoint_ids()), default=0)
    numbered = re.compile(rf"facts/{re.escape(fact)}-([0-9]+)-([0-9]+)\.json")
    found = map(numbered.fullmatch, job_dir.store.list("facts"))
    past = [(int(one[1]), int(one[2])) for one in found if one is not None]
    # After a rewind there are facts about later checkpoints, whose ids come again.
    before = max((one for one in past if one[0] <= at), default=None)
    if before is None or before[1] != schema.schema_id:
        job_dir.record_fact(f"{fact}-{at}-{schema.schema_id}", schema.to_json())


def read_part(part: RecordPart, values: pa.Array, time_zone: str) -> tuple[pa.Array, pa.Array]:
    """Return a struct for each value, and the reasons of bad values; both are null for a null.

    In the struct, year-month intervals are numbers of months, see `restore_intervals`.
    """
    match part.form:
        case Raw(column=column):
            return pa.StructArray.from_arrays([values], [column]), pa.nulls(len(values), pa.string())
        case String(column=column):
            texts, reasons = _texts_of(values, f"the {part.name} is not UTF-8")
            return pa.StructArray.from_arrays([texts], [column]), reasons
        case Json():
            return plain_json.read_json(values, part.fields, f"the {part.name}", time_zone)
    reader = part.reader
    assert reader is not None
    if isinstance(reader, CsvReader):
        reader = replace(reader, time_zone=time_zone)
    rows, reasons = read_values(reader, values)
    if isinstance(reader.kind, T.StringType):
        rows, refused = plain_json.read_json(rows.cast(pa.binary()), part.fields, "it", time_zone)
        reasons = pc.coalesce(reasons, refused)
    if part.name != "value" and reasons.null_count < len(reasons):
        reasons = pc.binary_join_element_wise(f"its {part.name}: ", reasons, "")
    return rows, reasons


def _texts_of(values: pa.Array, why: str) -> tuple[pa.Array, pa.Array]:
    try:
        return values.cast(pa.string()), pa.nulls(len(values), pa.string())
    except pa.ArrowInvalid:
        texts = [None if value is None else _text_of(value) for value in values.to_pylist()]
    found = pa.array(texts, pa.string())
    bad = pc.and_(values.is_valid(), found.is_null())
    return found, pc.if_else(bad, why, pa.scalar(None, pa.string()))


def _text_of(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def raise_unreadable(reason: Column, at: Callable[[str], Column] = F.col) -> Column:
    """Return an expression that raises the error for a bad record."""
    place = [at(name).alias(name) for name in ("topic", "partition", "offset")]
    told = F.to_json(F.struct(*place, reason.alias("reason")))
    return F.raise_error(F.concat(F.lit(UNREADABLE_MARKER), told))


def drop_bad_records(found: DataFrame, policy: BadRecordPolicy, counted_as: Sequence[str]) -> DataFrame:
    """Return the rows without a :data:`REASON`; Spark counts dropped rows as an observed metric."""
    is_good = F.col(REASON).isNull()
    if policy is OnBadRecord.DROP:
        metric = plain_json.name_drop_metric(counted_as)
        found = found.observe(metric, F.count(F.when(~is_good, 1)).alias("dropped"))
    return found.where(is_good)
