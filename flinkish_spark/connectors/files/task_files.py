"""Files that one task writes: Parquet by pyarrow, lines of text, Avro from bytes that Spark has encoded.

Each attempt gives its files unique names. A file is durable when it is reported, and only the report of the
attempt that Spark takes counts: files of other attempts are never read.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql import types as T

from flinkish_spark.connectors.csv_lines import ReadAsNull, lines_of_files
from flinkish_spark.connectors.files.output_formats import (
    FileFormat,
    csv_form,
    encoding_of,
    has_header,
    line_separator,
    lower_names,
)
from flinkish_spark.connectors.partition_values import folder_of
from flinkish_spark.connectors.row_count import CONTROL_WIDTH
from flinkish_spark.connectors.task_staging import TaskStage
from flinkish_spark.connectors.varints import write_varint
from flinkish_spark.core.errors import BAD_RECORD_MARKER, BadRecordError
from flinkish_spark.core.store import sync_directory
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.types.arrow_types import arrow_schema, as_schema
from flinkish_spark.types.exact_text import JsonWriter
from flinkish_spark.types.json_columns import replace_months
from flinkish_spark.types.schemas import PREFIX

#: The column with the text or the bytes of a record, in row formats.
RECORD = f"{PREFIX}record"
#: Columns with the texts of folders' values, outermost first; empty for null.
FOLDER = f"{PREFIX}folder_"
#: A file grows to its size limit in steps of one part of this many.
_STEPS = 8
#: Default size of a row group in Arrow's memory, and size of Avro's blocks, as in Spark.
_GROUP_BYTES, _BLOCK_BYTES = 64 << 20, 64_000
#: Size of columns that are converted to texts at once.
_TEXTS_BYTES = 64 << 20


@dataclass(frozen=True)
class LineTexts:
    """Converts columns, in the order of the fields, to lines. It is pickled into tasks."""

    kind: FileFormat
    options: Mapping[str, str]
    fields: T.StructType

    def of(self, rows: pa.RecordBatch) -> pa.Array:
        """Return each record's text, without a line end; raise BadRecordError if it cannot be a line."""
        rows = as_schema(rows, self._given)
        match self.kind:
            case FileFormat.JSON:
                return self._json.write(rows.columns, rows.num_rows)
            case FileFormat.CSV:
                return self._csv(rows)
        return rows.column(0)

    def _csv(self, rows: pa.RecordBatch) -> pa.Array:
        form = csv_form(self.options)
        try:
            return lines_of_files(self.fields, rows.columns, form)
        except ReadAsNull as found:
            shown = rows.slice(found.row, 1).to_pylist()[0]
            what = (
                f"the text of {found.name} not being nullValue, {form.null!r}, which readers take for null,"
            )
            text = f"{BAD_RECORD_MARKER} {what} is violated by the record {str(shown)[:1_000]}"
            raise BadRecordError(
                " ".join(text.split()), what_to_do="give another nullValue, or write FileFormat.JSON"
            ) from None

    def header(self) -> bytes:
        if not has_header(self.kind, self.options):
            return b""
        names = [pa.array([name], pa.string()) for name in self.fields.names]
        texts = T.StructType([T.StructField(name, T.StringType()) for name in self.fields.names])
        # A column's name may be the text that stands for null.
        line: str = lines_of_files(texts, names, replace(csv_form(self.options), null=""))[0].as_py()
        return line.encode()

    @cached_property
    def _given(self) -> pa.Schema:
        return arrow_schema(replace_months(self.fields, T.IntegerType()))

    @cached_property
    def _json(self) -> JsonWriter:
        ignores_nulls = lower_names(self.options).get("ignorenullfields", "true").lower() == "true"
        return JsonWriter(self.fields, null_fields=not ignores_nulls)


@dataclass(frozen=True)
class FileSettings:
    """Settings that are sent to the tasks."""

    kind: FileFormat
    codec: str
    extension: str
    #: Names of the folders, outermost first.
    folders: tuple[str, ...] = ()
    #: Size at which another file begins; None for no limit.
    part_bytes: int | None = None
    #: Converts records to lines; None for other formats.
    texts: LineTexts | None = None
    #: Metadata in the footer or header; of Avro with the schema.
    says: Mapping[str, str] = field(default_factory=dict)
    #: Arguments of `pyarrow.parquet.ParquetWriter`, and the size of a row group.
    parquet: Mapping[str, Any] = field(default_factory=dict)
    group_bytes: int = _GROUP_BYTES


@dataclass(frozen=True)
class FilesWork:
    """Writes the records of a task into files, which its report names."""

    settings: FileSettings
    folder: str

    def begin(self, task: TaskContext, sinks: int) -> TaskStage:
        return _FilesStage(self.settings, self.folder, task.partitionId())


class _FilesStage(TaskStage):
    """Writes records, which are sorted by folder, into one file at a time."""

    def __init__(self, settings: FileSettings, folder: str, task: int) -> None:
        self._settings, self._folder, self._task = settings, folder, task
        self._begin = _FILES.get(settings.kind, _LineFile)
        self._place: str | None = None
        self._file: _File | None = None
        self._names: list[str] = []
        self._found: list[dict[str, Any]] = []

    def write(self, records: pa.RecordBatch) -> None:
        if not records.num_rows:
            return
        count = len(self._settings.folders)
        folders = [records.column(f"{FOLDER}{at}") for at in range(count)]
        rows = records.select(range(CONTROL_WIDTH, records.num_columns - count))
        if self._settings.texts is not None:
            rows = pa.record_batch([_texts(self._settings.texts, rows)], [RECORD])
        for start, end in _runs(records.num_rows, folders):
            values = (one[start].as_py() for one in folders)
            pairs = zip(self._settings.folders, values, strict=True)
            place = "/".join(folder_of(name, value) for name, value in pairs)
            if place != self._place:
                self._close()
                self._place = place
            self._put(rows.slice(start, end - start))

    def _put(self, rows: pa.RecordBatch) -> None:
        limit = self._settings.part_bytes
        while rows.num_rows:
            file = self._file = self._file or self._open()
            count = rows.num_rows
            if limit is not None:
                count = min(count, max(1, file.fitting(rows, max(limit - file.size(), limit // _STEPS))))
            file.write(rows.slice(0, count))
            file.rows += count
            rows = rows.slice(count)
            if limit is not None and file.size() >= limit:
                self._close()

    def _open(self) -> _File:
        name = f"part-{self._task:05d}-{uuid.uuid4()}-c{len(self._names):03d}{self._settings.extension}"
        name = f"{self._place}/{name}" if self._place else name
        path = os.path.join(self._folder, name)
        if self._place:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        # Otherwise the folder exists, or it was renamed since, and this attempt does not count any more.
        self._names.append(name)
        return self._begin(open(path, "wb"), self._settings)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        file.close()
        path = os.path.join(self._folder, self._names[-1])
        sync_directory(Path(path))
        self._found.append({"name": self._names[-1], "bytes": os.path.getsize(path), "rows": file.rows})

    def finish(self, ack: TaskAck) -> Mapping[str, Any]:
        self._close()
        return {**ack.to_json(), "files": self._found}

    def abandon(self, within_ms: int) -> None:
        """Delete the files of this attempt: they do not count, and the disk may be full."""
        if self._file is not None:
            self._file.raw.close()
        for name in self._names:
            with suppress(OSError):
                os.unlink(os.path.join(self._folder, name))


def _texts(texts: LineTexts, rows: pa.RecordBatch) -> pa.Array:
    # By slices, since an Arrow column of texts has a limit that a batch of rows may exceed.
    count = max(1, rows.num_rows * _TEXTS_BYTES // max(1, rows.nbytes))
    slices = (rows.slice(at, count) for at in range(0, rows.num_rows, count))
    return pa.concat_arrays([texts.of(one).cast(pa.large_binary()) for one in slices])


def _runs(rows: int, folders: list[pa.Array]) -> Iterator[tuple[int, int]]:
    changes = np.zeros(rows - 1, np.bool_)
    for one in folders:
        changes |= pc.not_equal(one.slice(1), one.slice(0, rows - 1)).to_numpy(zero_copy_only=False)
    borders = [0, *(np.flatnonzero(changes) + 1).tolist(), rows]
    return pairwise(borders)


class _File(ABC):
    def __init__(self, raw: IO[bytes], settings: FileSettings) -> None:
        self.raw, self._settings, self.rows = raw, settings, 0

    @abstractmethod
    def write(self, rows: pa.RecordBatch) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def size(self) -> int:
        return self.raw.tell()

    def fitting(self, rows: pa.RecordBatch, size_bytes: int) -> int:
        ends = _ends(rows.column(RECORD))
        return int(np.searchsorted(ends, size_bytes, side="right"))


def _ends(records: pa.Array) -> npt.NDArray[np.int64]:
    return np.cumsum(
        pc.fill_null(pc.binary_length(records), 0).to_numpy(zero_copy_only=False), dtype=np.int64
    )


class _LineFile(_File):
    def __init__(self, raw: IO[bytes], settings: FileSettings) -> None:
        super().__init__(raw, settings)
        assert settings.texts is not None
        self._separator = line_separator(settings.texts.options)
        encoding = re.sub(r"^utf-?(\d+)", r"utf-\1", encoding_of(settings.texts.options).lower())
        self._encoding = _ORDERS.get(encoding, encoding)
        self._stream = _STREAMS[settings.codec](raw)
        if mark := _MARKS.get(encoding):
            self._stream.write(mark)
        if header := settings.texts.header():
            self._stream.write(self._encode(header + self._separator))

    def write(self, rows: pa.RecordBatch) -> None:
        # A null text becomes an empty line.
        lines = pc.fill_null(rows.column(RECORD), b"")
        for at in range(0, len(lines), _LINES):
            text = self._separator.join([*lines.slice(at, _LINES).to_pylist(), b""])
            self._stream.write(self._encode(text))

    def _encode(self, text: bytes) -> bytes:
        return text if self._encoding == "utf-8" else text.decode("utf-8", "replace").encode(self._encoding)

    def close(self) -> None:
        if self._stream is not self.raw:
            self._stream.close()
        self.raw.close()


#: Number of lines that are encoded at once.
_LINES = 1_000
#: Java's rules for encodings whose names have no byte order.
_MARKS, _ORDERS = {"utf-16": b"\xfe\xff"}, {"utf-16": "utf-16-be", "utf-32": "utf-32-be"}


class _BlockStream:
    """Hadoop's block stream for codecs without a stream format: both sizes of each block, and the block."""

    def __init__(self, raw: IO[bytes], codec: str) -> None:
        self._raw, self._codec = raw, pa.Codec(codec)

    def write(self, data: bytes) -> None:
        for at in range(0, len(data), _BLOCK_BYTES):
            block = data[at : at + _BLOCK_BYTES]
            packed = self._codec.compress(block, asbytes=True)
            self._raw.write(len(block).to_bytes(4, "big") + len(packed).to_bytes(4, "big") + packed)

    def close(self) -> None:
        """Nothing is held back."""


class _DeflateStream:
    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._packer = raw, zlib.compressobj()

    def write(self, data: bytes) -> None:
        self._raw.write(self._packer.compress(data))

    def close(self) -> None:
        self._raw.write(self._packer.flush())


_STREAMS: Mapping[str, Callable[[IO[bytes]], Any]] = {
    "": lambda raw: raw,
    "gzip": lambda raw: gzip.GzipFile("", "wb", 6, raw, 0),
    "bzip2": lambda raw: bz2.BZ2File(raw, "wb"),
    "deflate": _DeflateStream,
    "snappy": lambda raw: _BlockStream(raw, "snappy"),
    "lz4": lambda raw: _BlockStream(raw, "lz4_raw"),
}


class _ParquetFile(_File):
    def __init__(self, raw: IO[bytes], settings: FileSettings) -> None:
        super().__init__(raw, settings)
        self._writer: pq.ParquetWriter | None = None
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = self._given_bytes = 0

    def size(self) -> int:
        return self.raw.tell() + int(self._held_bytes * self._ratio())

    def _ratio(self) -> float:
        """Return the compression ratio of the rows that this file has so far."""
        return self.raw.tell() / self._given_bytes if self._given_bytes else 1.0

    def fitting(self, rows: pa.RecordBatch, size_bytes: int) -> int:
        each = max(1.0, rows.nbytes / rows.num_rows * self._ratio())
        return int(size_bytes / each)

    def write(self, rows: pa.RecordBatch) -> None:
        self._held.append(to_stored_columns(rows))
        self._held_bytes += rows.nbytes
        limit = self._settings.part_bytes
        if self._held_bytes >= self._settings.group_bytes or (limit is not None and self.size() >= limit):
            self._flush()

    def _flush(self) -> None:
        held, self._held = self._held, []
        if not held:
            return
        table = pa.Table.from_batches(held)
        if self._writer is None:
            # The footer has the schema; Arrow's own copy of it is not needed.
            says = {"store_schema": False, **self._settings.parquet}
            self._writer = pq.ParquetWriter(self.raw, table.schema, compression=self._settings.codec, **says)
            self._writer.add_key_value_metadata(dict(self._settings.says))
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._given_bytes, self._held_bytes = self._given_bytes + self._held_bytes, 0

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
        self.raw.close()


def to_stored_columns(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return columns with Parquet's types: Spark's intervals are stored as numbers."""
    fields = [pa.field(one.name, to_stored_type(one.type)) for one in rows.schema]
    columns = [
        column if column.type == one.type else column.cast(one.type)
        for one, column in zip(fields, rows.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def to_stored_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_struct(kind):
        # In a null struct, no field has a value.
        return pa.struct([pa.field(one.name, to_stored_type(one.type)) for one in kind])
    if pa.types.is_map(kind):
        return pa.map_(
            to_stored_type(kind.key_type), kind.item_field.with_type(to_stored_type(kind.item_type))
        )
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(to_stored_type(kind.value_type)))
    return kind


class _AvroFile(_File):
    """An Avro container file: a header, and blocks of records, each followed by a sync marker."""

    def __init__(self, raw: IO[bytes], settings: FileSettings) -> None:
        super().__init__(raw, settings)
        self._mark, self._pack = os.urandom(16), _AVRO_CODECS[settings.codec]
        says = {**settings.says, "avro.codec": settings.codec or "null"}
        pairs = (part for pair in says.items() for part in pair)
        texts = b"".join(_avro_long(len(one.encode())) + one.encode() for one in pairs)
        raw.write(b"Obj\x01" + _avro_long(len(says)) + texts + _avro_long(0) + self._mark)

    def write(self, rows: pa.RecordBatch) -> None:
        records = rows.column(RECORD).cast(pa.large_binary())
        ends, start = _ends(records), 0
        _, offsets, data = records.buffers()
        first = int(np.frombuffer(offsets, np.int64)[records.offset])
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            end = max(start + 1, int(np.searchsorted(ends, before + _BLOCK_BYTES, side="right")))
            block = self._pack(data[first + before : first + int(ends[end - 1])].to_pybytes())
            self.raw.write(_avro_long(end - start) + _avro_long(len(block)) + block + self._mark)
            start = end

    def close(self) -> None:
        self.raw.close()


def _avro_long(value: int) -> bytes:
    return write_varint(value << 1)


def _deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def _compress_snappy(data: bytes) -> bytes:
    packed: bytes = pa.Codec("snappy").compress(data, asbytes=True)
    return packed + zlib.crc32(data).to_bytes(4, "big")


_AVRO_CODECS: Mapping[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    "deflate": _deflate,
    "snappy": _compress_snappy,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstandard": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
}
_FILES: Mapping[FileFormat, Callable[[IO[bytes], FileSettings], _File]] = {
    FileFormat.PARQUET: _ParquetFile,
    FileFormat.AVRO: _AvroFile,
}
