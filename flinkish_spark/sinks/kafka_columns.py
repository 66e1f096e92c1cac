"""From a stream's fields to the parts of a Kafka record, as columns that both writers take.

| part | from | null |
|---|---|---|
| key | one column, or several as JSON or Avro | no key |
| value | `Raw`: one column; `Json`, `Avro`: several | of `Raw` a tombstone; the others never are |
| topic | `topic_column` | the sink's topic |
| partition | `partition` | the partitioner decides |
| timestamp | `timestamp` | the time of writing |
| a header | its column in `headers` | the record does not have it |
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.errors import SchemaError
from flinkish_spark.formats import Avro, Json, Raw
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.exact_texts import exact_text, json_of, unfit_for_json, unfit_for_text
from flinkish_spark.sinks.kafka_avro import avro_column, avro_misfit
from flinkish_spark.sinks.kafka_sink_settings import KafkaSinkSettings
from flinkish_spark.sources.json_records import json_schema

Format = Json | Raw | Avro
#: The columns that every writer gets, before those that not every sink has.
KEY, VALUE, TOPIC = "key", "value", "topic"
_LIST_OF_HEADERS = "array<struct<key:string,value:binary>>"
PARTITION, TIMESTAMP, HEADERS, MISFIT = "partition", "timestamp", "headers", "misfit"


def check_columns(sink: KafkaSinkSettings, schema: T.StructType, uid: str) -> None:
    """Refuse columns that the stream does not have, or whose type is not what they are used for.

    Raises
    ------
    SchemaError
        With the role, the column and what to choose from.
    """
    for part, form in (("key", sink.key_format), ("value", sink.value)):
        for name in _named(form):
            _kind(schema, uid, part, name)
        _check_types(part, form, schema, uid)
    wanted: list[tuple[str, str, tuple[type[T.DataType], ...], str]] = [
        ("topic", sink.topic_column, (T.StringType,), "STRING"),
        ("partition", sink.partition, (T.ByteType, T.ShortType, T.IntegerType), "INT"),
        ("timestamp", sink.timestamp, (T.TimestampType, T.LongType), "TIMESTAMP, or BIGINT in milliseconds"),
    ]
    bytes_or_text = (T.StringType, T.BinaryType)
    if isinstance(sink.headers, str):
        _check_list_of_headers(_kind(schema, uid, "list of headers", sink.headers), sink.headers, uid)
    else:
        wanted += [(f"header '{n}'", c, bytes_or_text, "STRING or BINARY") for n, c in sink.headers.items()]
    for role, column, kinds, words in wanted:
        if column and not isinstance(kind := _kind(schema, uid, role, column), kinds):
            raise SchemaError(
                f"the {role} of sink '{uid}' is the column '{column}' of type {kind.simpleString()}",
                why=f"it must be {words}",
                what_to_do="cast it in a transform",
                column=column,
            )


def _check_list_of_headers(kind: T.DataType, column: str, uid: str) -> None:
    if kind.simpleString() != _LIST_OF_HEADERS:
        raise SchemaError(
            f"the list of headers of sink '{uid}' is the column '{column}' of type {kind.simpleString()}",
            why=f"it must be {_LIST_OF_HEADERS}",
            what_to_do='cast it in a transform, or name headers one by one: headers={"name": "column"}',
            column=column,
        )


def _check_types(part: str, form: Format | None, schema: T.StructType, uid: str) -> None:
    """Refuse a field whose values have no bytes that say exactly what they are; Avro is asked elsewhere."""
    match form:
        case Raw():
            unfit, names = unfit_for_text, [form.column]
        case Json():
            unfit, names = unfit_for_json, _named(form) or schema.names
        case _:
            return
    for name in names:
        if (why := unfit(schema[name].dataType)) is not None:
            raise SchemaError(
                f"the {part} of sink '{uid}' has the field '{name}', which cannot be written exactly",
                why=why,
                what_to_do="convert it in a transform, for example by a cast to STRING",
                column=name,
            )


def _kind(schema: T.StructType, uid: str, role: str, column: str) -> T.DataType:
    if column not in schema.names:
        raise SchemaError(
            f"the {role} of sink '{uid}' is the column '{column}', which its stream does not have",
            what_to_do=f"choose from {', '.join(schema.names)}",
        )
    return schema[column].dataType


def _named(form: Format | None) -> list[str]:
    """Return the columns that a format names itself; those of an Avro schema are compared by Spark."""
    match form:
        case Raw():
            return [form.column]
        case Json() if form.schema:
            return list(json_schema(form).names)
        case _:
            return []


def record_columns(sink: KafkaSinkSettings, schema: T.StructType) -> dict[str, Column]:
    """Return the parts of a record by name, in the order in which the writers want them.

    Key, value and topic are always there; of the others those that the sink has.
    """
    key_misfit, value_misfit = _misfit(sink.key_format, schema), _misfit(sink.value, schema)
    found = {
        KEY: _encoded(sink.key_format, schema, key_misfit, instead=None),
        # What a dead letter of a record that has no Avro form tells of it.
        VALUE: _encoded(sink.value, schema, value_misfit, instead=_json(schema.names)),
        TOPIC: F.col(C.quoted(sink.topic_column)) if sink.topic_column else F.lit(None).cast("string"),
    }
    if sink.partition:
        found[PARTITION] = F.col(C.quoted(sink.partition)).cast("int")
    if sink.timestamp:
        found[TIMESTAMP] = _milliseconds(schema, sink.timestamp)
    if sink.headers:
        found[HEADERS] = _headers(sink.headers)
    misfits = [one for one in (key_misfit, value_misfit) if one is not None]
    if misfits:
        found[MISFIT] = F.coalesce(*misfits)
    return {name: column.alias(name) for name, column in found.items()}


def _misfit(form: Format | None, schema: T.StructType) -> Column | None:
    return avro_misfit(form, schema) if isinstance(form, Avro) else None


def _encoded(
    form: Format | None, schema: T.StructType, misfit: Column | None, *, instead: Column | None
) -> Column:
    match form:
        case None:
            return F.lit(None).cast("binary")
        case Raw():
            return _as_bytes(schema, form.column)
        case Json():
            return _json(list(json_schema(form).names) if form.schema else schema.names)
        case Avro() if misfit is None:
            return avro_column(form, schema)
        case Avro():
            fitting = F.when(misfit.isNull(), avro_column(form, schema))
            return fitting if instead is None else fitting.otherwise(instead)


def _json(names: list[str]) -> Column:
    fields = F.struct(*[F.col(C.quoted(n)).alias(n) for n in names])
    return json_of(fields, null_fields=True).cast("binary")


def _as_bytes(schema: T.StructType, column: str) -> Column:
    kind = schema[column].dataType
    value = F.col(C.quoted(column))
    return value if isinstance(kind, T.BinaryType) else exact_text(value, kind).cast("binary")


def _milliseconds(schema: T.StructType, column: str) -> Column:
    value = F.col(C.quoted(column))
    return F.unix_millis(value) if isinstance(schema[column].dataType, T.TimestampType) else value


def _headers(headers: Mapping[str, str] | str) -> Column:
    if isinstance(headers, str):
        return F.col(C.quoted(headers))
    entries = [
        F.struct(F.lit(name).alias("key"), F.col(C.quoted(column)).cast("binary").alias("value"))
        for name, column in headers.items()
    ]
    return F.filter(F.array(*entries), lambda entry: entry["value"].isNotNull())
