"""Tasks of a Delta sink: they write Parquet files, and make `add` actions with statistics and partitions."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark import __version__ as spark_version
from pyspark.sql import types as T

from flinkish_spark.connectors.delta.files import TableFiles
from flinkish_spark.connectors.delta.table import DeltaRuleError, physical_name
from flinkish_spark.connectors.staged_rows import DELETED, add_places
from flinkish_spark.connectors.task_staging import TaskStage
from flinkish_spark.core.changelogs import RETRACTIONS, RowKind
from flinkish_spark.core.clock import wall_ms
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.transport.columns import SINK_CONTROL
from flinkish_spark.types.arrow_types import arrow_schema, as_schema, nullable_within
from flinkish_spark.types.exact_text import JsonWriter

#: Size of Parquet at which a file is closed, and size in memory at which a row group is written.
_FILE_BYTES, _GROUP_BYTES = 128 * 1024 * 1024, 32 * 1024 * 1024


@dataclass(frozen=True)
class FilesToWrite:
    """Settings of the files that tasks write; sent to them."""

    files: TableFiles
    #: Folder within the table; empty for the table's own folder, in which data files stay.
    folder: str = ""
    #: Names in the log, which under column mapping differ from those that users see.
    partition_by: tuple[str, ...] = ()
    compression: str = "snappy"
    max_rows: int = 0
    page_version: str = "1.0"
    with_stats: tuple[str, ...] = ()

    def write(self, batches: Iterable[pa.RecordBatch], task: int) -> list[dict[str, Any]]:
        """Write batches, in which the rows of a partition are together; return the `add` of each file."""
        out = _Files(self, task)
        for batch in batches:
            out.add(batch)
        return out.finish()


@dataclass(frozen=True)
class UpsertRows:
    """Makes the rows that an upsert's commit reads, and refuses records that it could not write."""

    #: Begins the message of a refusal.
    marker: str
    fields: T.StructType
    keys: tuple[str, ...]
    row_kind: str | None
    stored: tuple[str, ...]

    def make(self, records: pa.RecordBatch) -> pa.RecordBatch:
        for key in self.keys:
            # Also of a record that deletes: with such a value it would not find its row.
            self._require(records, records.column(key).is_valid(), f"the key {key} IS NOT NULL")
        deletes = pa.array(np.zeros(records.num_rows, np.bool_))
        if self.row_kind is not None:
            kinds = [kind.value for kind in RowKind]
            said = records.column(self.row_kind).cast(pa.string())
            what = f"the row kind {self.row_kind} IN {', '.join(kinds)}"
            self._require(records, pc.is_in(said, pa.array(kinds)), what)
            deletes = pc.is_in(said, pa.array(RETRACTIONS))
        return records.select(list(self.stored)).append_column(DELETED, deletes)

    def _require(self, records: pa.RecordBatch, is_kept: pa.Array, what: str) -> None:
        if is_kept.true_count == len(is_kept):
            return
        row = records.slice(is_kept.index(False).as_py(), 1).select(self.fields.names)
        # A session may use large strings.
        columns = as_schema(row, arrow_schema(self.fields)).columns
        (shown,) = JsonWriter(self.fields).write(columns, 1).to_pylist()
        raise DeltaRuleError(f"{self.marker} {what} is violated by the record {shown[:1_000]}")


@dataclass(frozen=True)
class FilesWork:
    target: FilesToWrite
    #: The micro-batch, if rows are staged; None for data files.
    batch: int | None = None
    upsert: UpsertRows | None = None

    def begin(self, task: TaskContext, sinks: int) -> TaskStage:
        return _FilesStage(self, task.partitionId())


class _FilesStage(TaskStage):
    def __init__(self, work: FilesWork, task: int) -> None:
        self._work, self._place = work, task << 33
        self._files = _Files(work.target, task)

    def write(self, records: pa.RecordBatch) -> None:
        rows, work = records, self._work
        rows = rows.select([name for name in rows.schema.names if name not in SINK_CONTROL])
        if work.upsert is not None:
            rows = work.upsert.make(rows)
        if work.batch is not None:
            rows = add_places(rows, work.batch, self._place)
        self._place += rows.num_rows
        self._files.add(rows)

    def finish(self, ack: TaskAck) -> Mapping[str, Any]:
        return {**ack.to_json(), "adds": self._files.finish()}


class _Files:
    """Writes the files of a task; one at a time is open, however many partitions there are."""

    def __init__(self, target: FilesToWrite, task: int) -> None:
        self._target, self._task = target, task
        self._file: _File | None = None
        self._values: tuple[str | None, ...] = ()
        self._adds: list[dict[str, Any]] = []

    def add(self, batch: pa.RecordBatch) -> None:
        names, most = self._target.partition_by, self._target.max_rows
        for values, rows in _split_by_partition(batch, names):
            if values != self._values:
                self.close()
                self._values = values
            at = 0
            while at < rows.num_rows:
                if self._file is None:
                    partition = dict(zip(names, values, strict=True))
                    self._file = _File(self._target, self._task, partition, rows.schema)
                part = rows.slice(at, most - self._file.rows) if most else rows
                self._file.write(part)
                at += part.num_rows
                if self._file.is_full or (most and self._file.rows >= most):
                    self.close()

    def close(self) -> None:
        if self._file is not None:
            self._adds.append(self._file.close())
        self._file = None

    def finish(self) -> list[dict[str, Any]]:
        """Make the files and their names durable; return the `add` of each."""
        self.close()
        if self._adds:
            self._target.files.sync_names(self._target.folder)
        return self._adds


class _File:
    def __init__(
        self, target: FilesToWrite, task: int, partition: Mapping[str, str | None], schema: pa.Schema
    ) -> None:
        self._target, self._partition, self.rows = target, partition, 0
        name = f"part-{task:05d}-{uuid.uuid4()}-c000.{target.compression}.parquet"
        self._path = f"{target.folder}/{name}" if target.folder else name
        self._sink = target.files.output(self._path)
        # A null struct has nulls in all fields, so files declare all nested fields as nullable.
        self._schema = pa.schema([pa.field(one.name, nullable_within(one.type)) for one in schema])
        codec = {"uncompressed": "none"}.get(target.compression, target.compression)
        self._writer = pq.ParquetWriter(
            self._sink,
            self._schema,
            compression=codec,
            store_schema=False,
            data_page_version=target.page_version,
        )
        # Without this entry, a reader may read dates before 1582 by the Julian calendar.
        self._writer.add_key_value_metadata({"org.apache.spark.version": spark_version})
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._stats = Statistics(target.with_stats)

    @property
    def is_full(self) -> bool:
        return bool(self._sink.tell() >= _FILE_BYTES)

    def write(self, rows: pa.RecordBatch) -> None:
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        self.rows += rows.num_rows
        if self._held_bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            table = pa.Table.from_batches(self._held)
            self._stats.add(table)
            self._writer.write_table(table.cast(self._schema))
        self._held, self._held_bytes = [], 0

    def close(self) -> dict[str, Any]:
        self._flush()
        self._writer.close()
        size = int(self._sink.tell())
        self._target.files.finish(self._path, self._sink)
        return {
            "path": self._path,
            "partitionValues": dict(self._partition),
            "size": size,
            "modificationTime": wall_ms(),
            "dataChange": True,
            "stats": self._stats.to_text(),
        }


def _split_by_partition(
    batch: pa.RecordBatch, names: Sequence[str]
) -> Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]:
    """Yield the rows of each partition in their order, without the partition columns."""
    if not names:
        yield (), batch
        return
    texts = [partition_texts(batch.column(name)) for name in names]
    rest = batch.drop_columns(list(names))
    place = pa.array(range(batch.num_rows), pa.int64())
    keys = [f"k{at}" for at in range(len(names))]
    grouped = pa.table([*texts, place], names=[*keys, "place"]).group_by(keys, use_threads=False)
    found = grouped.aggregate([("place", "list")]).to_pydict()
    groups = zip(*(found[key] for key in keys), found["place_list"], strict=True)
    # By first row, since Arrow sorts nulls last: the last partition may go on in the next batch.
    for *values, rows in sorted(groups, key=lambda group: int(group[-1][0])):
        yield tuple(values), rest.take(pa.array(rows, pa.int64()))


def partition_texts(column: pa.Array) -> pa.Array:
    """Return partition values as texts in the form of a Delta log."""
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        # With its zone, it is the same instant for every reader.
        plain = column.cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us")).cast(pa.string())
        return pc.binary_join_element_wise(pc.replace_substring(plain, " ", "T"), pa.scalar("Z"), "")
    if pa.types.is_floating(kind):
        texts = [None if one is None else _NAMED.get(repr(one), repr(one)) for one in column.to_pylist()]
        return pa.array(texts, pa.string())
    return column.cast(pa.string())


_NAMED = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}


def json_text(value: Any) -> str:
    """Return JSON in which a decimal is a number with all its digits."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{json.dumps(name)}:{json_text(one)}' for name, one in value.items())}}}"
    return format(value, "f") if isinstance(value, Decimal) else json.dumps(value, allow_nan=False)


#: Types, by Arrow's names, whose least and greatest values a log can hold.
_ORDERED = re.compile("u?int|halffloat|float|double|decimal|date|timestamp|string")
_MOST_OF_A_TEXT = 32
_GREATEST = "\U0010ffff"


@dataclass
class Statistics:
    """Row count, null counts, and least and greatest values of a file's columns."""

    #: Leaf columns, dotted by :data:`_DOT`, in the table's order.
    columns: tuple[str, ...]
    rows: int = 0
    _nulls: dict[str, int] = field(default_factory=dict)
    _least: dict[str, Any] = field(default_factory=dict)
    _greatest: dict[str, Any] = field(default_factory=dict)
    #: Columns with a value that has no order, such as NaN.
    _unordered: set[str] = field(default_factory=set)

    def add(self, table: pa.Table) -> None:
        self.rows += table.num_rows
        for path in self.columns:
            column = _leaf(table, path.split(_DOT))
            if column is None:
                continue
            self._nulls[path] = self._nulls.get(path, 0) + column.null_count
            if not _ORDERED.match(str(column.type)) or column.null_count == len(column):
                continue
            if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
                self._unordered.add(path)
                continue
            ends = pc.min_max(column)
            for found, end, better in ((self._least, "min", min), (self._greatest, "max", max)):
                value = _to_python(ends[end])
                if value is None:
                    self._unordered.add(path)
                else:
                    found[path] = better(found[path], value) if path in found else value

    def to_text(self) -> str:
        ordered = [path for path in self.columns if path in self._least and path not in self._unordered]
        least = {path: _lower(self._least[path]) for path in ordered}
        greatest = {path: _upper(self._greatest[path]) for path in ordered}
        found: dict[str, Any] = {"numRecords": self.rows}
        for name, values in (("minValues", least), ("maxValues", greatest), ("nullCount", self._nulls)):
            found[name] = _nest({path: one for path, one in values.items() if one is not None})
        return json_text(found)


#: Separates the names of a path; no column name has it.
_DOT = "\0"


def stats_columns(fields: Sequence[Mapping[str, Any]], properties: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths, by names in files, of the leaf columns for which a table wants statistics."""
    said = properties.get("delta.dataSkippingStatsColumns")
    found = list(_leaves(fields, (), ()))
    if said is not None:
        wanted = [name.strip().replace("`", "").lower() for name in said.split(",")]
        return tuple(
            path
            for path, shown in found
            if any(shown == one or shown.startswith(f"{one}.") for one in wanted)
        )
    most = int(properties.get("delta.dataSkippingNumIndexedCols", "32"))
    return tuple(path for path, _ in (found if most < 0 else found[:most]))


def _leaves(
    fields: Sequence[Mapping[str, Any]], at: tuple[str, ...], shown: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    for one in fields:
        path, seen = (*at, physical_name(one)), (*shown, str(one["name"]).lower())
        if isinstance(one["type"], Mapping) and one["type"]["type"] == "struct":
            yield from _leaves(one["type"]["fields"], path, seen)
        else:
            yield _DOT.join(path), ".".join(seen)


def _leaf(table: pa.Table, path: Sequence[str]) -> Any:
    if path[0] not in table.column_names:
        return None
    column = table.column(path[0])
    for name in path[1:]:
        if not pa.types.is_struct(column.type) or column.type.get_field_index(name) < 0:
            return None
        column = pc.struct_field(column, name)
    return column


def _to_python(value: pa.Scalar) -> Any:
    """Return a scalar as a Python value; None for a time that Python cannot represent."""
    try:
        if pa.types.is_timestamp(value.type):
            return value.cast(pa.timestamp("us", value.type.tz and "UTC")).as_py()
        return value.as_py()
    except (ValueError, OverflowError, pa.ArrowInvalid):
        return None


def _lower(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isinf(value) else -0.0 if value == 0 else value
    return value[:_MOST_OF_A_TEXT] if isinstance(value, str) else _format_time(value, 0)


def _upper(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isinf(value) else 0.0 if value == 0 else value
    if not isinstance(value, str):
        return _format_time(value, 1)
    if len(value) <= _MOST_OF_A_TEXT:
        return value
    # Greater than every text with this prefix, unless it goes on with the greatest character.
    return None if value[_MOST_OF_A_TEXT] == _GREATEST else value[:_MOST_OF_A_TEXT] + _GREATEST


def _format_time(value: Any, more_ms: int) -> Any:
    """Return a time as text in whole milliseconds, rounded down, and up if `more_ms` is 1."""
    if isinstance(value, datetime):
        if value.microsecond % 1_000:
            try:
                value = value.replace(microsecond=value.microsecond // 1_000 * 1_000)
                value += timedelta(milliseconds=more_ms)
            except OverflowError:
                return None
        text = value.replace(tzinfo=None).isoformat(timespec="milliseconds")
        return text if value.tzinfo is None else f"{text}Z"
    return value.isoformat() if isinstance(value, date) else value


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in values.items():
        *above, name = path.split(_DOT)
        inner = found
        for one in above:
            inner = inner.setdefault(one, {})
        inner[name] = value
    return found
