"""Encoding of a stream's rows as Kafka records, in the pass that stages them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.connectors.bad_records import make_reasons
from flinkish_spark.connectors.kafka.sink_settings import KafkaSinkSettings
from flinkish_spark.connectors.plain_formats import find_field
from flinkish_spark.contracts.format import EncodedColumn, PartWriter
from flinkish_spark.core.changelogs import RETRACTIONS, RowKind
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.sink_rows import CONTROL
from flinkish_spark.types.arrow_types import arrow_schema, arrow_type, as_schema
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.exact_text import JsonWriter
from flinkish_spark.types.json_columns import has_intervals, replace_intervals, replace_months

#: Columns of encoded records that every sink has; the optional ones follow below.
KEY, VALUE, TOPIC = "key", "value", "topic"
_LIST_OF_HEADERS = "array<struct<key:string,value:binary>>"
_MAPS_OF_HEADERS = ("map<string,binary>", "map<string,array<binary>>")
PARTITION, TIMESTAMP, HEADERS, MISFIT = "partition", "timestamp", "headers", "misfit"


def check_columns(sink: KafkaSinkSettings, schema: T.StructType, uid: str) -> None:
    fields = sink.fields_of(schema)
    for part, form in sink.formats:
        form.check_fields(fields, f"the {part} of sink '{uid}'")
    wanted: list[tuple[str, str, Sequence[str]]] = [
        ("row kind", sink.row_kind, ("string",)),
        ("topic", sink.topic_column, ("string",)),
        ("partition", sink.partition, ("int", "smallint", "tinyint")),
        ("timestamp", sink.timestamp, ("timestamp", "bigint")),
    ]
    if isinstance(sink.headers, str):
        wanted.append(("list of headers", sink.headers, (_LIST_OF_HEADERS, *_MAPS_OF_HEADERS)))
    else:
        wanted += [
            (f"header '{name}'", column, ("string", "binary")) for name, column in sink.headers.items()
        ]
    for role, column, kinds in wanted:
        if column:
            find_field(schema, column, f"the {role} of sink '{uid}'", kinds)


class _NullWriter(PartWriter):
    def write(self, records: pa.RecordBatch) -> EncodedColumn:
        return EncodedColumn(pa.nulls(records.num_rows, pa.binary()))


@dataclass(frozen=True)
class RecordEncoder:
    """Encodes a sink's rows as key, value and topic, and the optional parts that the sink has."""

    fields: T.StructType
    key: PartWriter
    value: PartWriter
    row_kind: str
    topic_column: str
    partition: str
    timestamp: str
    headers: Mapping[str, str] | str = field(hash=False)
    #: Whether a record can fail to fit its format.
    may_misfit: bool = False

    @classmethod
    def of(cls, sink: KafkaSinkSettings, schema: T.StructType) -> RecordEncoder:
        fields = sink.fields_of(schema)
        made = {part: form.make_writer(fields, sink.data_topics, part) for part, form in sink.formats}
        key, value = made.get("key", _NullWriter(T.StructType())), made["value"]
        named = sink.headers if isinstance(sink.headers, str) else ""
        lacks_names = bool(named) and _may_lack_names(schema[named])
        return cls(
            schema,
            key,
            value,
            sink.row_kind,
            sink.topic_column,
            sink.partition,
            sink.timestamp,
            sink.headers,
            bool(sink.row_kind) or key.may_misfit or value.may_misfit or lacks_names,
        )

    def column_names(self) -> tuple[str, ...]:
        """Return the names of the columns that the encoding pass gets."""
        return (*self._field_names(), *self.key.spark_columns(), *self.value.spark_columns())

    def spark_columns(self) -> dict[str, Column]:
        given = {
            name: replace_intervals(F.col(quote_name(name)), self.fields[name].dataType)
            for name in self._field_names()
        }
        return given | self.key.spark_columns() | self.value.spark_columns()

    def _field_names(self) -> Sequence[str]:
        # The dead letter of a record that does not fit has all of its fields.
        of_headers = [self.headers] if isinstance(self.headers, str) else self.headers.values()
        others = [self.row_kind, self.topic_column, self.partition, self.timestamp, *of_headers]
        read = (name for name in (*self.key.fields.names, *self.value.fields.names, *others) if name)
        return self.fields.names if self.may_misfit else tuple(dict.fromkeys(read))

    @property
    def reads_fields_alone(self) -> bool:
        """True if the encoding pass gets fields only, and no column that Spark computes."""
        computed = self.key.spark_columns() or self.value.spark_columns()
        return not computed and not any(has_intervals(one.dataType) for one in self.fields)

    def find_input_types(self, names: Iterable[str]) -> T.StructType:
        computed = self.key.spark_column_types() | self.value.spark_column_types()
        kinds = {one.name: replace_months(one.dataType, T.IntegerType()) for one in self.fields} | computed
        return T.StructType([T.StructField(name, kinds[name]) for name in names])

    def schema(self) -> T.StructType:
        kinds: dict[str, T.DataType] = {KEY: T.BinaryType(), VALUE: T.BinaryType(), TOPIC: T.StringType()}
        if self.partition:
            kinds[PARTITION] = T.IntegerType()
        if self.timestamp:
            kinds[TIMESTAMP] = T.LongType()
        if self.headers:
            kinds[HEADERS] = _HEADERS
        if self.may_misfit:
            kinds[MISFIT] = T.StringType()
        return T.StructType([T.StructField(name, kind) for name, kind in kinds.items()])

    def encode(self, records: pa.RecordBatch) -> dict[str, pa.Array]:
        key, value = self.key.write(records), self.value.write(records)
        data, of_value = value.data, value.misfit
        misfits = [key.misfit]
        if self.row_kind:
            kind = records.column(self.row_kind).cast(pa.string())
            is_retraction = pc.is_in(kind, pa.array(RETRACTIONS, pa.string()))
            # A retraction is a tombstone: it has no value that might not fit.
            data = _null_where(is_retraction, data)
            of_value = None if of_value is None else _null_where(is_retraction, of_value)
            kinds = pa.array([one.value for one in RowKind], pa.string())
            no_kind = make_reasons(pc.invert(pc.is_in(kind, kinds)), "it has no row kind")
            misfits = [no_kind, key.misfit, make_reasons(key.data.is_null(), "it has no key")]
        topics = records.column(self.topic_column).cast(pa.string()) if self.topic_column else None
        made = {TOPIC: pa.nulls(records.num_rows, pa.string()) if topics is None else topics}
        if self.partition:
            made[PARTITION] = records.column(self.partition).cast(pa.int32())
        if self.timestamp:
            made[TIMESTAMP] = self._milliseconds(records)
        if self.headers:
            made[HEADERS], nameless = self._headers(records)
            misfits.append(nameless)
        found = [one for one in (*misfits, of_value) if one is not None and one.null_count < len(one)]
        misfit = pc.coalesce(*found) if found else None
        if misfit is not None:
            # The dead letter of a record that does not fit its format has the fields as JSON.
            does_not_fit = misfit.is_valid()
            refused = records.filter(does_not_fit)
            columns = [refused.column(name) for name in self.fields.names]
            told = JsonWriter(self.fields).write(columns, refused.num_rows).cast(pa.binary())
            data = pc.replace_with_mask(data, does_not_fit, told)
        if self.may_misfit:
            made[MISFIT] = pa.nulls(records.num_rows, pa.string()) if misfit is None else misfit
        return {KEY: key.data, VALUE: data, **made}

    def _milliseconds(self, records: pa.RecordBatch) -> pa.Array:
        column = records.column(self.timestamp)
        if not isinstance(self.fields[self.timestamp].dataType, T.TimestampType):
            return column.cast(pa.int64())
        # Round down, as Spark does.
        millis = column.view(pa.int64()).fill_null(0).to_numpy() // 1000
        return pa.array(millis, mask=column.is_null().to_numpy(zero_copy_only=False))

    def _headers(self, records: pa.RecordBatch) -> tuple[pa.Array, pa.Array | None]:
        """Return each record's valid headers, and the reason if it has invalid ones."""
        if isinstance(self.headers, str):
            return _to_header_lists(records.column(self.headers))
        given = {name: records.column(column).cast(pa.binary()) for name, column in self.headers.items()}
        size, count = records.num_rows, len(given)
        # Order the values row by row.
        order = np.arange(size * count).reshape(count, size).T.ravel()
        values = pa.concat_arrays([*given.values()]).take(pa.array(order))
        names = pa.array([*given], pa.string()).take(pa.array(np.tile(np.arange(count), size)))
        rows = np.repeat(np.arange(size), count)
        return _make_lists(size, rows, names, values, values.is_valid()), None


_HEADERS = T.ArrayType(
    T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])
)


def _may_lack_names(headers: T.StructField) -> bool:
    kind = headers.dataType
    if not isinstance(kind, T.ArrayType) or not isinstance(kind.elementType, T.StructType):
        return False
    return kind.containsNull or kind.elementType["key"].nullable


def _to_header_lists(column: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    rows, first, last = _find_rows(column)
    if pa.types.is_map(column.type):
        names, values = column.keys.slice(first, last - first), column.items.slice(first, last - first)
        if pa.types.is_list(values.type):
            at, begin, end = _find_rows(values)
            rows, names, values = rows[at], names.take(pa.array(at)), values.values.slice(begin, end - begin)
    else:
        names, values = column.values.slice(first, last - first).flatten()
    nameless = np.unique(rows[names.is_null().to_numpy(zero_copy_only=False)])
    mask = column.is_null() if column.null_count else None
    lists = _make_lists(len(column), rows, names, values, names.is_valid(), mask)
    if not len(nameless):
        return lists, None
    is_nameless = np.isin(np.arange(len(column)), nameless)
    return lists, make_reasons(pa.array(is_nameless), "a header of it has no name")


def _find_rows(column: pa.Array) -> tuple[np.ndarray[Any, Any], int, int]:
    """Return each list or map entry's row, and where the column's entries begin and end."""
    offsets = column.offsets.to_numpy()
    return np.repeat(np.arange(len(column)), np.diff(offsets)), int(offsets[0]), int(offsets[-1])


def _make_lists(
    size: int,
    rows: np.ndarray[Any, Any],
    names: pa.Array,
    values: pa.Array,
    are_kept: pa.Array,
    mask: pa.Array | None = None,
) -> pa.Array:
    counts = np.bincount(rows[are_kept.to_numpy(zero_copy_only=False)], minlength=size)
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    kind = arrow_type(_HEADERS)
    parts = [names.filter(are_kept), values.filter(are_kept)]
    entries = pa.StructArray.from_arrays(parts, fields=[kind.value_type.field(at) for at in range(2)])
    return pa.ListArray.from_arrays(offsets, entries, type=kind, mask=mask)


def _null_where(condition: pa.Array, column: pa.Array) -> pa.Array:
    return pc.if_else(condition, pa.scalar(None, column.type), column)


@dataclass(frozen=True)
class EncodeRecords:
    """Encodes records over their columns. For mapInArrow it passes control columns through."""

    encoder: RecordEncoder
    names: tuple[str, ...]

    def columns(self) -> T.StructType:
        return T.StructType([*CONTROL, *self.encoder.schema()])

    @cached_property
    def _input_schema(self) -> pa.Schema:
        return arrow_schema(self.encoder.find_input_types(self.names))

    @cached_property
    def _output_schema(self) -> pa.Schema:
        return arrow_schema(self.encoder.schema())

    def encode(self, records: pa.RecordBatch) -> pa.RecordBatch:
        # Cast to the types that encoders know: a session may use large strings.
        parts = self.encoder.encode(as_schema(records.select(list(self.names)), self._input_schema))
        control = records.select(list(C.SINK_CONTROL))
        return _append_columns(control, [parts[one.name] for one in self._output_schema], self._output_schema)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield encoded records, then control rows with null parts."""
        for batch in batches:
            is_record = pc.equal(batch.column(C.KIND), int(C.Kind.RECORD))
            has_others = is_record.true_count < batch.num_rows
            records = batch.filter(is_record) if has_others else batch
            if records.num_rows:
                yield self.encode(records)
            if has_others:
                others = batch.filter(pc.invert(is_record)).select(list(C.SINK_CONTROL))
                nulls = [pa.nulls(others.num_rows, one.type) for one in self._output_schema]
                yield _append_columns(others, nulls, self._output_schema)


def _append_columns(control: pa.RecordBatch, arrays: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*control.columns, *arrays], [*control.schema.names, *schema.names])
