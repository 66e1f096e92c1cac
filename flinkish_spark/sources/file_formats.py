"""What is in the files that a file source reads."""

from __future__ import annotations

import enum
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from flinkish_spark.arguments import instance_of, refused_as_config_errors
from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.limits import checked_choice

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 10_000
#: Spark's TIME has microseconds, Arrow's that stands for it nanoseconds.
_NANOS_PER_MICRO = 1_000
_NO_DELIMITERS = '\r\n"\0'
#: What Arrow parses at once; a row must fit in. Larger if one does not, up to what Arrow's texts can hold.
_CSV_BLOCK_BYTES, _MOST_CSV_BLOCK_BYTES = 1 << 20, 1 << 28


class InputFormat(ABC):
    """One of the classes below."""

    @abstractmethod
    def batches(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the records of one file; the same every time. Called in a task."""

    def rows(self, path: str) -> int | None:
        """Return how many records a file has, if that can be told without reading it."""
        return None

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError if such files cannot hold these fields."""


@dataclass(frozen=True)
class ParquetFiles(InputFormat):
    """Parquet. A field that a file does not have fails the job; columns that are no fields are not read."""

    def batches(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the fields' columns."""
        import pyarrow.parquet as pq

        # Spark writes times as INT96, of which Arrow makes nanoseconds, that end in 2262.
        with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
            missing = sorted(set(schema.names) - set(file.schema_arrow.names))
            if missing:
                raise ValueError(f"{path} has no column '{missing[0]}'")
            yield from file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=schema.names)

    def rows(self, path: str) -> int | None:
        """Return what the file says of itself."""
        import pyarrow.parquet as pq

        return int(pq.read_metadata(path).num_rows)


@dataclass(frozen=True)
class JsonLines(InputFormat):
    """One JSON object a line, maybe compressed (``.gz``). Other fields are ignored, missing ones are null.

    A line that is anything else, or no UTF-8, fails the job with file and line; blank ones are left out.
    A DATE is ``"2026-01-31"``, a TIMESTAMP ``"2026-01-31T12:00:00Z"``, a BINARY base64; objects are STRUCTs.
    A number with more digits than its type holds, or too large for it, is no value of it.
    """

    def batches(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the objects of a file, which is read whole."""
        import pyarrow as pa

        from flinkish_spark.sources.json_lines import tables_of

        with pa.input_stream(path, compression="detect") as file:
            data = file.read()
        for table in tables_of(data, schema):
            yield from table.to_batches(max_chunksize=_ROWS_AT_ONCE)

    def check(self, schema: pa.Schema) -> None:
        """Refuse maps, times of day and intervals, which Arrow does not read."""
        for field in schema:
            if any(word in str(field.type) for word in ("map<", "duration[", "time64[")):
                raise ConfigError(
                    f"JSON files cannot hold the field '{field.name}', which is {field.type}",
                    what_to_do="declare the keys of a map as fields of a STRUCT, the others as STRING; or "
                    "read lines with TextLines(), and parse them in a map()",
                )


class CsvHeader(enum.Enum):
    """What the first line of a CSV file is."""

    #: The names of the columns, in whatever order; a field that is not among them fails the job.
    NAMES = "NAMES"
    #: A record: the columns are the fields, in their order.
    NONE = "NONE"


@dataclass(frozen=True)
class CsvFiles(InputFormat):
    """CSV, maybe compressed (``.gz``). An empty value is null, but for texts and binary.

    Those are what is there, without quotes; a quote within quotes is there twice.

    Parameters
    ----------
    header
        What the first line is.
    delimiter
        Between values, one ASCII character.
    """

    header: CsvHeader = CsvHeader.NAMES
    delimiter: str = ","

    def __post_init__(self) -> None:
        with refused_as_config_errors("give CsvHeader.NAMES or CsvHeader.NONE"):
            checked_choice("header", self.header, CsvHeader)
        what_to_do = "give one ASCII character, which is no quote and no end of a line"
        text = instance_of("delimiter", self.delimiter, str, what_to_do=what_to_do)
        if len(text) != 1 or not text.isascii() or text in _NO_DELIMITERS:
            raise ConfigError(f"delimiter is {text!r}", what_to_do=what_to_do)

    def batches(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the records."""
        import pyarrow as pa

        given, block_bytes = 0, _CSV_BLOCK_BYTES
        while True:
            try:
                for batch in _behind(given, self._batches(path, schema, block_bytes)):
                    yield batch
                    given += batch.num_rows
                return
            except pa.ArrowInvalid as error:
                # How long the longest row is shows only there.
                if "straddl" not in str(error) or block_bytes >= _MOST_CSV_BLOCK_BYTES:
                    raise
                block_bytes *= 16

    def _batches(self, path: str, schema: pa.Schema, block_bytes: int) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyarrow import csv

        names = list(schema.names)
        columns = None if self.header is CsvHeader.NAMES else names
        # Floating numbers as texts first: of an infinity Arrow does not say whether it was one.
        types = {
            field.name: pa.string() if pa.types.is_floating(field.type) else field.type for field in schema
        }
        with pa.input_stream(path, compression="detect") as file:
            begin = file.read(_CSV_BLOCK_BYTES)
        if not begin:
            return
        # In a line without an end Arrow finds no names.
        is_bare = len(begin) < _CSV_BLOCK_BYTES and not set(b"\r\n") & set(begin)
        with pa.input_stream(path, compression="detect") as file:
            batches = csv.open_csv(
                pa.BufferReader(begin + b"\n") if is_bare else file,
                read_options=csv.ReadOptions(column_names=columns, block_size=block_bytes),
                parse_options=csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                # By itself Arrow makes nulls of "NaN", "n/a" and such.
                convert_options=csv.ConvertOptions(
                    column_types=types, include_columns=names, null_values=[""]
                ),
            )
            for batch in batches:
                yield _with_numbers(batch, schema)

    def check(self, schema: pa.Schema) -> None:
        """Refuse lists, maps, structs and intervals."""
        import pyarrow as pa

        for field in schema:
            if pa.types.is_nested(field.type) or pa.types.is_duration(field.type):
                raise ConfigError(f"CSV files cannot hold the field '{field.name}', which is {field.type}")


def _with_numbers(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with floating numbers in the places of texts, all of them within their types.

    Raises
    ------
    ArrowInvalid
        A number has more digits than its type, or is none.
    """
    import pyarrow as pa

    columns = [
        _floating(batch.column(field.name), field.type)
        if pa.types.is_floating(field.type)
        else batch.column(field.name)
        for field in schema
    ]
    whole = pa.RecordBatch.from_arrays(columns, schema=schema)
    # Arrow counts a decimal's digits before it adds those of the scale.
    whole.validate(full=True)
    _refuse_nanoseconds(whole)
    return whole


def _refuse_nanoseconds(batch: pa.RecordBatch) -> None:
    """Refuse times of day with more digits than a TIME has, which would be cut off later."""
    import numpy as np
    import pyarrow as pa

    for field in batch.schema:
        if pa.types.is_time64(field.type):
            column = batch.column(field.name)
            wrong = np.flatnonzero(column.cast(pa.int64()).fill_null(0).to_numpy() % _NANOS_PER_MICRO)
            if len(wrong):
                time = column[int(wrong[0])].cast(pa.string()).as_py()
                raise pa.ArrowInvalid(f"the field {field.name!r} has {time}: a TIME has no nanoseconds")


def _floating(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    trimmed = pc.utf8_trim(texts, " \t")
    given = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)
    numbers = pc.cast(given, kind)
    too_large = pc.and_(pc.is_inf(numbers), pc.match_substring_regex(given, "[0-9]"))
    if pc.any(too_large).as_py():
        first = given.filter(too_large)[0].as_py()
        raise pa.ArrowInvalid(f"{first} is too large for {kind}")
    return numbers


def _behind(given: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass over some rows."""
    for batch in batches:
        left = batch.slice(given)
        given -= batch.num_rows - left.num_rows
        if left.num_rows:
            yield left


@dataclass(frozen=True)
class TextLines(InputFormat):
    """A record a line, in one field of texts; maybe compressed (``.gz``).

    A line that is no UTF-8 fails the job with file and line.
    """

    def batches(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the lines without their ends."""
        import pyarrow as pa

        line = 1
        with io.BufferedReader(pa.input_stream(path, compression="detect")) as file:
            while some := list(islice(file, _ROWS_AT_ONCE)):
                texts = _texts_of(some, line)
                line += len(some)
                yield pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], schema=schema)

    def check(self, schema: pa.Schema) -> None:
        """Refuse anything but one text."""
        import pyarrow as pa

        if [field.type for field in schema] != [pa.string()]:
            raise ConfigError("text files have one field", what_to_do='use the schema "value STRING"')


def _texts_of(lines: Sequence[bytes], first: int) -> list[str]:
    """Return lines without their ends; raise BadLine for one that is no UTF-8."""
    from flinkish_spark.sources.json_lines import BadLine

    bare = [line.removesuffix(b"\n").removesuffix(b"\r") for line in lines]
    try:
        return [line.decode() for line in bare]
    except UnicodeDecodeError as error:
        at = bare.index(error.object)
        raise BadLine(first + at, f"is no UTF-8: {error.reason}") from None
