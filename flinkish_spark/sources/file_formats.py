"""What is in the files that a file source reads."""

from __future__ import annotations

import enum
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from flinkish_spark.arguments import instance_of, refused_as_config_errors
from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.limits import checked_choice
from flinkish_spark.sources.text_values import floats_of, infinite_fields, refuse_nanoseconds

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 10_000
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
    A DATE is ``"2026-01-31"``, a TIMESTAMP ``"2026-01-31T12:00:00Z"``, of which a TIMESTAMP_NTZ has no zone,
    a BINARY base64; objects are STRUCTs.
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
        """Refuse maps, times of day and intervals, which Arrow does not read, at any depth."""
        import pyarrow as pa

        for field in schema:
            if _has_one(field.type, pa.types.is_map):
                raise ConfigError(
                    f"JSON files cannot hold the field '{field.name}', which is {field.type}",
                    what_to_do="declare the keys of a map as fields of a STRUCT, an interval as STRING; or "
                    "read lines with TextLines(), and parse them in a map()",
                )
            if _has_one(field.type, lambda kind: pa.types.is_time(kind) or pa.types.is_duration(kind)):
                raise ConfigError(
                    f"JSON files cannot hold the field '{field.name}', which is {field.type}",
                    what_to_do="declare STRING, and take it apart in a map()",
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

        given, block_bytes, as_texts = 0, _CSV_BLOCK_BYTES, frozenset[str]()
        while True:
            try:
                for batch in _behind(given, self._batches(path, schema, block_bytes, as_texts)):
                    if infinite := set(infinite_fields(batch)) - as_texts:
                        as_texts |= infinite
                        break
                    refuse_nanoseconds(batch)
                    yield batch
                    given += batch.num_rows
                else:
                    return
            except pa.ArrowInvalid as error:
                # How long the longest row is shows only there.
                if "straddl" not in str(error) or block_bytes >= _MOST_CSV_BLOCK_BYTES:
                    raise
                block_bytes *= 16

    def _batches(
        self, path: str, schema: pa.Schema, block_bytes: int, as_texts: frozenset[str]
    ) -> Iterator[pa.RecordBatch]:
        """Yield all rows; floats that are read as texts show whether a number was too great."""
        import pyarrow as pa
        from pyarrow import csv

        names = list(schema.names)
        columns = None if self.header is CsvHeader.NAMES else names
        types = {field.name: pa.string() if field.name in as_texts else field.type for field in schema}
        with pa.input_stream(path, compression="detect") as file:
            begin = file.read(_CSV_BLOCK_BYTES)
        if not begin:
            return
        # In a line without an end Arrow finds no names.
        is_bare = len(begin) < _CSV_BLOCK_BYTES and not set(b"\r\n") & set(begin)
        with pa.input_stream(path, compression="detect") as file:
            read = csv.open_csv(
                pa.BufferReader(begin + b"\n") if is_bare else file,
                read_options=csv.ReadOptions(column_names=columns, block_size=block_bytes),
                parse_options=csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                # By itself Arrow makes nulls of "NaN", "n/a" and such.
                convert_options=csv.ConvertOptions(
                    column_types=types, include_columns=names, null_values=[""]
                ),
            )
            for batch in read:
                columns = [
                    floats_of(column, field.type, field.name) if field.name in as_texts else column
                    for field, column in zip(schema, batch.columns, strict=True)
                ]
                whole = pa.RecordBatch.from_arrays(columns, schema=schema)
                # Arrow counts a decimal's digits before it adds those of the scale.
                whole.validate(full=True)
                yield whole

    def check(self, schema: pa.Schema) -> None:
        """Refuse lists, maps, structs and intervals."""
        import pyarrow as pa

        for field in schema:
            if pa.types.is_nested(field.type) or pa.types.is_duration(field.type):
                raise ConfigError(f"CSV files cannot hold the field '{field.name}', which is {field.type}")


def _has_one(kind: pa.DataType, is_one: Callable[[pa.DataType], bool]) -> bool:
    """Return whether a type, or a part of it, is one of some kind."""
    return is_one(kind) or any(_has_one(kind.field(at).type, is_one) for at in range(kind.num_fields))


def _behind(given: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass over some rows."""
    for batch in batches:
        left = batch.slice(given)
        given -= batch.num_rows - left.num_rows
        if left.num_rows:
            yield left


@dataclass(frozen=True)
class TextLines(InputFormat):
    """A record a line, in one field of texts; maybe compressed (``.gz``)."""

    def batches(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the lines without their ends."""
        import pyarrow as pa

        with io.BufferedReader(pa.input_stream(path, compression="detect")) as file:
            while some := list(islice(file, _ROWS_AT_ONCE)):
                texts = [
                    line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "replace") for line in some
                ]
                yield pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], schema=schema)

    def check(self, schema: pa.Schema) -> None:
        """Refuse anything but one text."""
        import pyarrow as pa

        if [field.type for field in schema] != [pa.string()]:
            raise ConfigError("text files have one field", what_to_do='use the schema "value STRING"')
