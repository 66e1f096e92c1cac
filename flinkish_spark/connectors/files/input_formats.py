"""Formats of a file source: checks that Arrow does not make, and the division of large files into parts."""

from __future__ import annotations

import codecs
import csv
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Annotated

from pyspark.sql import types as T

from flinkish_spark.connectors.parquet_calendar import open_parquet, read_batches
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import TextPattern, check_fields
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.types.arrow_columns import find_beyond_years
from flinkish_spark.types.arrow_types import spark_type
from flinkish_spark.types.json_columns import JsonReader

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    import pyarrow.parquet as pq


#: Least size of a part.
_LEAST_PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class FilePart:
    #: Range of row groups, or of bytes. None for the end of the file.
    begin: int = 0
    end: int | None = None
    #: Number of records; None if that is not known.
    rows: int | None = None
    #: Approximate size on disk, if it is not the whole file.
    bytes: int = 0
    #: Number of records before it in the file, where that is known.
    first: int = 0


def is_large(size_bytes: int) -> bool:
    """Return whether a file may have more than one part."""
    return size_bytes >= 2 * _LEAST_PART_BYTES


def parts_of_parquet(file: pq.ParquetFile, size_bytes: int) -> Sequence[FilePart]:
    footer, found = file.metadata, list[FilePart]()
    groups = [footer.row_group(at) for at in range(footer.num_row_groups if is_large(size_bytes) else 0)]
    # Factor from the groups' uncompressed sizes to their sizes on disk.
    ratio = size_bytes / (sum(one.total_byte_size for one in groups) or 1)
    begin, first, rows, held, left = 0, 0, 0, 0.0, float(size_bytes)
    for at, one in enumerate(groups, 1):
        own = one.total_byte_size * ratio
        rows, held, left = rows + one.num_rows, held + own, left - own
        if at == len(groups) or min(held, left) >= _LEAST_PART_BYTES:
            found.append(FilePart(begin, at, rows, int(held), first))
            begin, first, rows, held = at, first + rows, 0, 0.0
    return found if len(found) > 1 else [FilePart(rows=footer.num_rows)]


def parts_of_lines(path: str) -> Sequence[FilePart]:
    """Return parts that are ranges of bytes, each of which ends after a line."""
    size, borders = os.path.getsize(path), [0]
    if not is_large(size):
        return [FilePart()]
    with open(path, "rb") as file:
        while is_large(size - borders[-1]):
            file.seek(borders[-1] + _LEAST_PART_BYTES - 1)
            # A line may be longer than the memory.
            while (some := file.readline(1 << 20)) and not some.endswith(b"\n"):
                pass
            borders.append(file.tell())
    ends = [*borders, size] if borders[-1] < size else borders
    found = [FilePart(begin, end, None, end - begin) for begin, end in pairwise(ends)]
    return found if len(found) > 1 else [FilePart()]


def lines_in(file: io.BufferedIOBase, end: int) -> int:
    """Return the number of lines that end before a byte position; the file is read from its beginning."""
    count = 0
    while end > 0 and (some := file.read(min(end, 1 << 20))):
        count, end = count + some.count(b"\n"), end - len(some)
    return count


#: Approximate size of a block that is parsed at once; a longer line is a block of its own.
_BLOCK_BYTES = 1 << 20
#: Byte order marks, a longer one before its own prefix.
_MARKS = {
    codecs.BOM_UTF8: "UTF-8",
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_BLANKS = b" \t\r\n"


#: Codecs of compressed files, by file extension.
_PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


def open_file(path: str) -> pa.NativeFile:
    """Open a file, which may be compressed; the bytes of its name need not be UTF-8."""
    import pyarrow as pa

    file, codec = pa.OSFile(os.fsencode(path)), _PACKED.get(os.path.splitext(path)[1])
    return file if codec is None else pa.CompressedInputStream(file, codec)


def to_printable(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


class BadLine(ValueError):
    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line} {why}")
        self.line, self.why = line, why


def begin_of_text(data: bytes) -> int:
    """Return the position where the text of a file begins, after a byte order mark."""
    mark = next((mark for mark in _MARKS if data.startswith(mark)), b"")
    if mark and mark != codecs.BOM_UTF8:
        raise BadLine(1, f"begins with the byte order mark of {_MARKS[mark]}: write the file in UTF-8")
    return len(mark)


@contextmanager
def lines_between(path: str, begin: int, end: int | None) -> Iterator[io.BufferedIOBase]:
    """Open a range of lines of a file; a BadLine that is raised gets its line number in the file."""
    if end is None:
        with io.BufferedReader(open_file(path)) as whole:
            yield whole
        return
    with open(path, "rb") as file:
        file.seek(begin)
        try:
            yield io.BytesIO(file.read(end - begin))
        except BadLine as error:
            file.seek(0)
            raise BadLine(error.line + lines_in(file, begin), error.why) from None


def json_batches(data: bytes, schema: pa.Schema, *, is_first: bool = True) -> Iterator[pa.RecordBatch]:
    """Yield the objects of JSON lines in batches; `is_first` if they may begin with a byte order mark."""
    import pyarrow as pa

    reader = JsonReader(T.StructType([T.StructField(one.name, spark_type(one.type)) for one in schema]))
    start, number = begin_of_text(data) if is_first else 0, 1
    while start < len(data):
        end = data.rfind(b"\n", start, start + _BLOCK_BYTES) + 1
        if not end:
            end = data.find(b"\n", start + _BLOCK_BYTES) + 1 or len(data)
        lines = [line.strip(_BLANKS) for line in data[start:end].split(b"\n")]
        rows = reader.read(pa.array(filter(None, lines), pa.binary()))
        if rows.null_count:
            whys = ((at, reader.why_bad(line)) for at, line in enumerate(lines, number) if line)
            raise BadLine(*next((at, why) for at, why in whys if why))
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            yield pa.RecordBatch.from_struct_array(rows.slice(at, _ROWS_AT_ONCE)).cast(schema)
        start, number = end, number + len(lines) - 1


_ROWS_AT_ONCE = 10_000
#: Spark's TIME has microseconds, and the Arrow type for it nanoseconds.
_NANOS_PER_MICRO = 1_000
_DELIMITER = TextPattern(r'[^\r\n"\0\x80-\U0010ffff]', "one ASCII character, no quote and no end of a line")
_WHOLE, _NO_WHOLE = "^[+-]?[0-9]+$", "a whole number has decimal digits only, maybe after a sign"
#: Size of a block that Arrow parses at once; grows if a row does not fit, up to the limit of Arrow's texts.
_CSV_BLOCK_BYTES, _MOST_CSV_BLOCK_BYTES = 1 << 20, 1 << 28


class InputFormat(ABC):
    """Base of the formats that a file source reads."""

    @abstractmethod
    def batches(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the records of one file, the same each time. Called in a task."""

    def parts(self, path: str) -> Sequence[FilePart]:
        """Return the parts of a file in order. Called when the file is found."""
        return [FilePart()]

    def batches_between(
        self, path: str, schema: pa.Schema, begin: int, end: int | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of a part, the same each time. Called in a task."""
        return self.batches(path, schema)

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError if such files cannot hold these fields."""


class SplittableFormat(InputFormat):
    def batches(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return self.batches_between(path, schema, 0, None)


class LineFormat(SplittableFormat):
    """A format whose parts are ranges of lines; a compressed file is one part."""

    def parts(self, path: str) -> Sequence[FilePart]:
        return [FilePart()] if os.path.splitext(path)[1] in _PACKED else parts_of_lines(path)


@dataclass(frozen=True)
class ParquetFiles(SplittableFormat):
    """Parquet. A field that a file lacks fails the job; columns that are no fields are not read.

    A date before 1582-10-15, or a time before 1900, also fails the job if the footer says that the file uses
    the Julian calendar.
    """

    def batches_between(
        self, path: str, schema: pa.Schema, begin: int, end: int | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the fields' columns of some row groups."""
        with open_file(path) as data, open_parquet(data) as file:
            missing = sorted(set(schema.names) - set(file.schema_arrow.names))
            if missing:
                raise ValueError(f"{to_printable(path)} has no column '{missing[0]}'")
            yield from read_batches(file, schema.names, _ROWS_AT_ONCE, begin, end)

    def parts(self, path: str) -> Sequence[FilePart]:
        """Return ranges of row groups from the file's footer."""
        with open_file(path) as data, open_parquet(data) as file:
            return parts_of_parquet(file, os.path.getsize(path))


@dataclass(frozen=True)
class JsonLines(LineFormat):
    """One JSON object a line, maybe compressed (``.gz``). Other fields are ignored, missing ones are null.

    A line that is anything else, or not UTF-8, fails the job with file and line; blank lines are skipped.
    A DATE is ``"2026-01-31"``, a TIMESTAMP ``"2026-01-31T12:00:00Z"``, a BINARY base64; objects are STRUCTs.
    A number that has more digits than its type, or is too large for it, fails the job, too.
    """

    def batches_between(
        self, path: str, schema: pa.Schema, begin: int, end: int | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the objects of a range of lines, which is read at once."""
        with lines_between(path, begin, end) as file:
            yield from json_batches(file.read(), schema, is_first=not begin)

    def check(self, schema: pa.Schema) -> None:
        """Refuse maps, times of day and intervals, which Arrow does not read."""
        for field in schema:
            if any(word in str(field.type) for word in ("map<", "duration[", "time64[")):
                raise ConfigError(
                    f"JSON files cannot hold the field '{field.name}', which is {field.type}",
                    what_to_do="declare the keys of a map as fields of a STRUCT, the others as STRING; or "
                    "read lines with TextLines(), and parse them in a map()",
                )


class CsvHeader(Choice):
    """Meaning of the first line of a CSV file."""

    #: The names of the columns, in any order; a field that is not among them fails the job.
    NAMES = "NAMES"
    #: A record: the columns are the fields, in their order.
    NONE = "NONE"


@dataclass(frozen=True)
class CsvFiles(InputFormat):
    """CSV, maybe compressed (``.gz``). An empty value is null, except for texts and binary.

    Texts and binary are read as they are, without quotes; a quote within quotes is written twice.

    Parameters
    ----------
    header
        Meaning of the first line.
    delimiter
        One ASCII character between values.
    """

    header: CsvHeader = CsvHeader.NAMES
    delimiter: Annotated[str, _DELIMITER] = ","

    def __post_init__(self) -> None:
        check_fields(self, delimiter='give a comma, or another ASCII character: delimiter=";"')

    def batches(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the records."""
        import pyarrow as pa

        check_quotes(path, self.delimiter)
        given, block_bytes = 0, _CSV_BLOCK_BYTES
        while True:
            try:
                read = 0
                for batch in self._batches(path, schema, block_bytes):
                    read += batch.num_rows
                    if read > given:
                        yield batch.slice(given - read + batch.num_rows)
                        given = read
                return
            except pa.ArrowInvalid as error:
                # Only here it shows that a row is longer than a block.
                if "straddl" not in str(error) or block_bytes >= _MOST_CSV_BLOCK_BYTES:
                    raise
                block_bytes *= 16

    def _batches(self, path: str, schema: pa.Schema, block_bytes: int) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyarrow import csv

        names = list(schema.names)
        columns = None if self.header is CsvHeader.NAMES else names
        types = {field.name: pa.string() if _is_number(field.type) else field.type for field in schema}
        with open_file(path) as file:
            begin = file.read(_CSV_BLOCK_BYTES)
        if len(begin) == begin_of_text(begin):
            return
        if columns is None:
            check_names(begin, self.delimiter, names)
        record = 1 if columns is None else 0
        # Arrow finds no names in a line without a line end.
        is_bare = len(begin) < _CSV_BLOCK_BYTES and not set(b"\r\n") & set(begin)
        with open_file(path) as file:
            batches = csv.open_csv(
                pa.BufferReader(begin + b"\n") if is_bare else file,
                read_options=csv.ReadOptions(column_names=columns, block_size=block_bytes),
                parse_options=csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                # By default Arrow reads "NaN", "n/a" and others as null.
                convert_options=csv.ConvertOptions(
                    column_types=types, include_columns=names, null_values=[""]
                ),
            )
            for batch in batches:
                try:
                    numbers = _parse_numbers(batch, schema)
                except _BadValue as error:
                    raise BadLine(line_of(path, self.delimiter, record + error.row), str(error)) from None
                record += batch.num_rows
                yield numbers

    def check(self, schema: pa.Schema) -> None:
        """Refuse lists, maps, structs and intervals."""
        import pyarrow as pa

        for field in schema:
            if pa.types.is_nested(field.type) or pa.types.is_duration(field.type):
                raise ConfigError(
                    f"CSV files cannot hold the field '{field.name}', which is {field.type}",
                    what_to_do="leave the field out, or read another format",
                )


class _BadValue(ValueError):
    def __init__(self, row: int, field: pa.Field, why: str) -> None:
        super().__init__(f"cannot be read: the field {field.name!r} {why}")
        self.row = row


def _is_number(kind: pa.DataType) -> bool:
    """Say if a type is read as text first."""
    # Of an infinity Arrow does not say whether it was one, and it takes hexadecimal numbers and wraps them.
    import pyarrow as pa

    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _parse_numbers(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with numbers in the places of texts, and all values within their types."""
    import pyarrow as pa

    columns = [
        _numbers(batch.column(field.name), field) if _is_number(field.type) else batch.column(field.name)
        for field in schema
    ]
    whole = pa.RecordBatch.from_arrays(columns, schema=schema)
    # Arrow counts a decimal's digits before it adds those of the scale.
    whole.validate(full=True)
    for column, field in zip(columns, schema, strict=True):
        _refuse(
            column, field, find_beyond_years(column), "a time of a field is in a year from 1 to 9999, by UTC"
        )
        if pa.types.is_time64(column.type):
            nanos = column.cast(pa.int64()).fill_null(0).to_numpy() % _NANOS_PER_MICRO
            # They would be cut off later.
            _refuse(column, field, nanos != 0, "a TIME has no nanoseconds")
    return whole


def _refuse(column: pa.Array, field: pa.Field, wrong: npt.NDArray[np.bool_], why: str) -> None:
    import numpy as np
    import pyarrow as pa

    if len(rows := np.flatnonzero(wrong)):
        row = int(rows[0])
        raise _BadValue(row, field, f"has {column[row].cast(pa.string()).as_py()}: {why}")


def _numbers(texts: pa.Array, field: pa.Field) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    trimmed = pc.utf8_trim(texts, " \t")
    nothing = pa.scalar(None, pa.string())
    if pa.types.is_integer(field.type):
        given = pc.if_else(pc.equal(texts, ""), nothing, trimmed)
        _refuse(texts, field, _is_true(pc.invert(pc.match_substring_regex(given, _WHOLE))), _NO_WHOLE)
        # Arrow does not know the sign +.
        return _cast(pc.utf8_ltrim(given, "+"), field)
    given = pc.if_else(pc.equal(trimmed, ""), nothing, trimmed)
    numbers = _cast(given, field)
    if pc.any(pc.is_inf(numbers)).as_py():
        too_large = pc.and_(pc.is_inf(numbers), pc.match_substring_regex(given, "[0-9]"))
        _refuse(given, field, _is_true(too_large), f"that is too large for {field.type}")
    return numbers


def _is_true(found: pa.Array) -> npt.NDArray[np.bool_]:
    import numpy as np

    return np.asarray(found.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def _cast(texts: pa.Array, field: pa.Field) -> pa.Array:
    """Cast texts to numbers; find the first bad one by bisection, since Arrow does not name it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return pc.cast(texts, field.type)
    except pa.ArrowInvalid as error:
        good, bad = 0, len(texts)
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                pc.cast(texts.slice(good, middle - good), field.type)
                good = middle
            except pa.ArrowInvalid:
                bad = middle
        raise _BadValue(good, field, f"has {texts[good].as_py()!r:.200}: {error}") from None


@dataclass(frozen=True)
class TextLines(LineFormat):
    """One record per line, in one field of type STRING; maybe compressed (``.gz``).

    A line that is not UTF-8 fails the job with file and line.
    """

    def batches_between(
        self, path: str, schema: pa.Schema, begin: int, end: int | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield a range of lines without their ends."""
        import pyarrow as pa

        line = 1
        with lines_between(path, begin, end) as file:
            while some := list(islice(file, _ROWS_AT_ONCE)):
                if line == 1 and not begin:
                    some[0] = some[0][begin_of_text(some[0]) :]
                    if not some[0]:
                        return
                texts = _texts_of(some, line)
                line += len(some)
                yield pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], schema=schema)

    def check(self, schema: pa.Schema) -> None:
        """Refuse any schema but one STRING field."""
        import pyarrow as pa

        if [field.type for field in schema] != [pa.string()]:
            raise ConfigError("text files have one field", what_to_do='use the schema "value STRING"')


def _texts_of(lines: Sequence[bytes], first: int) -> list[str]:
    bare = [line.removesuffix(b"\n").removesuffix(b"\r") for line in lines]
    try:
        return [line.decode() for line in bare]
    except UnicodeDecodeError as error:
        at = bare.index(error.object)
        raise BadLine(first + at, f"is no UTF-8: {error.reason}") from None


def check_quotes(path: str, delimiter: str) -> None:
    """Check that each quoted value of a file is closed, and that no text follows its closing quote."""
    # Arrow takes everything after an open quote for one value, and adds text after a closing quote to the
    # value. A quote within a value that does not begin with one is text.
    if _are_in_pairs(path, delimiter):
        return
    with _text_of(path) as file:
        records = csv.reader(file, delimiter=delimiter, strict=True)
        line = 1
        try:
            for _ in records:
                line = records.line_num + 1
        except csv.Error as error:
            why = (
                f"begins a record of a quoted value with text after its closing quote, in line "
                f"{records.line_num}: the delimiter or the end of the line must be there"
            )
            if "end of data" in str(error):
                why = "begins a record with a quote that nothing closes: all that follows would be one value"
            raise BadLine(line, f"{why}; write a quote within quotes twice") from None


def _are_in_pairs(path: str, delimiter: str) -> bool:
    """Return whether each opening quote begins a value, and each closing quote ends one."""
    # Or is next to another quote, which escapes it. This is a fast check, which most files pass.
    import numpy as np

    is_border = np.zeros(256, np.bool_)
    is_border[[*b'\r\n"', ord(delimiter)]] = True
    held = b"\n"
    with open_file(path) as file:
        while len(held) < _MOST_HELD_BYTES:
            some = file.read(_PART_BYTES)
            held += some or b"\n"
            data = np.frombuffer(held, np.uint8, held.rfind(b"\n") + 1)
            at = np.flatnonzero(data == ord('"'))
            if len(at) % 2 == 0:
                if not (is_border[data[at[::2] - 1]].all() and is_border[data[at[1::2] + 1]].all()):
                    return False
                held = held[len(data) - 1 :]
            if not some:
                return len(held) == 1
    return False


def check_names(begin: bytes, delimiter: str, fields: list[str]) -> None:
    """Refuse a header that has the name of a field twice; `begin` has the first bytes of the file."""
    text = begin[begin_of_text(begin) :].decode("utf-8", "replace")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    line, names = 1, list[str]()
    # Arrow skips empty lines, too.
    for names in reader:
        if names:
            break
        line = reader.line_num + 1
    for field in fields:
        if names.count(field) > 1:
            why = f"has the name {field!r} {names.count(field)} times, and one column only would be read"
            raise BadLine(line, f"{why}: give the columns different names")


def line_of(path: str, delimiter: str, record: int) -> int:
    """Return the number of the line in which a record begins; counted from 0, a header is a record."""
    with _text_of(path) as file:
        records, line = csv.reader(file, delimiter=delimiter), 1
        for one in records:
            # Arrow skips empty lines, too.
            record -= bool(one)
            if record < 0:
                break
            line = records.line_num + 1
        return line


#: Size of a block that is checked at once, and the most that is kept if a quoted value does not end.
_PART_BYTES, _MOST_HELD_BYTES = 1 << 20, 1 << 26
#: Python's csv module has a limit for a value, which applies to the whole process.
_NO_LIMIT = 2**31 - 1


@contextmanager
def _text_of(path: str) -> Iterator[io.TextIOWrapper]:
    """Open a file, which may be compressed, as text after its byte order mark; each byte is one letter."""
    csv.field_size_limit(_NO_LIMIT)
    with io.BufferedReader(open_file(path)) as data:
        data.read(begin_of_text(data.peek(len(codecs.BOM_UTF32_LE))))
        with io.TextIOWrapper(data, "latin-1", newline="") as text:
            yield text
