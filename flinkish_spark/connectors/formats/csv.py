"""Reading and writing of CSV, one line per record; reading a written line returns the same values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.connectors.formats.reader import CodecError, Reader
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.types.exact_text import exact_text
from flinkish_spark.types.json_columns import replace_months
from flinkish_spark.types.text_values import parser_of

#: Readers remove it from the beginning of a file.
BYTE_ORDER_MARK = "\ufeff"


def check_flat(fields: T.StructType, whose: str) -> None:
    for one in fields:
        if isinstance(one.dataType, T.StructType | T.ArrayType | T.MapType):
            raise SchemaError(
                f"{whose} has the field '{one.name}' of type {one.dataType.simpleString()}",
                why="a line of CSV has single values only",
                what_to_do="leave it out, or make a STRING of it in a transform",
            )


@dataclass(frozen=True)
class CsvForm:
    """Settings of a CSV line."""

    delimiter: str = ","
    quote: str = '"'
    #: The text of a null. If it is not empty, no value may have it: Spark reads it as null even in quotes.
    null: str = ""
    quotes_all: bool = False
    #: The end of a line; texts that contain it are quoted.
    line_end: str = "\n"
    #: If lines are in files, whose readers skip U+FEFF at the beginning.
    is_in_files: bool = False

    @property
    def special(self) -> str:
        """Return a regular expression that matches texts which must be in quotes."""
        letters = re.escape(self.delimiter + self.quote + self.line_end)
        # Readers skip blank lines, and a blank value may be the only one of its line.
        mark = f"|^{BYTE_ORDER_MARK}" if self.is_in_files else ""
        return ".*" if self.quotes_all else f"[{letters}\\r\\n]|^[\\x00-\\x20]*${mark}"


class ReadAsNull(Exception):
    """A value has the same text as a null; holds the field's name and the row."""

    def __init__(self, name: str, row: int) -> None:
        super().__init__(name, row)
        self.name, self.row = name, row


def lines_of(fields: T.StructType, columns: Sequence[pa.Array], form: CsvForm) -> pa.Array:
    """Return a line for each row of the columns; raise ReadAsNull for a value that would be read as null."""
    values, quote = [], form.quote
    for one, column in zip(fields, columns, strict=True):
        text = exact_text(one.dataType)(column)
        if form.null and (at := pc.index(text, pa.scalar(form.null, text.type)).as_py()) >= 0:
            raise ReadAsNull(one.name, at)
        is_special = pc.match_substring_regex(text, form.special).fill_null(False)
        if is_special.true_count:
            doubled = pc.replace_substring(text.filter(is_special), quote, quote * 2)
            text = pc.replace_with_mask(
                text, is_special, pc.binary_join_element_wise(quote, doubled, quote, "")
            )
        values.append(text.fill_null(form.null))
    return pc.binary_join_element_wise(*values, form.delimiter)


def lines_of_files(fields: T.StructType, columns: Sequence[pa.Array], form: CsvForm) -> pa.Array:
    """Return lines for a file; none is blank, since readers of files skip blank lines."""
    lines = lines_of(fields, columns, form)
    # Blank values are in quotes, so a blank line has only nulls.
    nulls = [f"{form.quote}{form.null}{form.quote}", *[form.null] * (len(columns) - 1)]
    is_blank = pc.match_substring_regex(lines, "^[\\x00-\\x20]*$")
    return pc.if_else(is_blank, form.delimiter.join(nulls), lines)


@dataclass(frozen=True)
class CsvReader(Reader):
    fields: str
    delimiter: str
    time_zone: str = "UTC"

    @property
    def kind(self) -> T.StructType:  # type: ignore[override]
        kind: T.StructType = replace_months(T.StructType.fromJson(json.loads(self.fields)), T.IntegerType())
        return kind

    def make_converter(self) -> Callable[[bytes], tuple[Any, ...]]:
        fields = T.StructType.fromJson(json.loads(self.fields))
        split = _splitter(self.delimiter)
        values = [(one, parser_of(one.dataType, self.time_zone)) for one in fields]

        def read(data: bytes) -> tuple[Any, ...]:
            try:
                line = data.decode()
            except UnicodeDecodeError as error:
                raise CodecError(f"the line is no UTF-8: {error.reason}") from None
            found = split(line)
            if len(found) != len(values):
                raise CodecError(f"the line has {len(found)} values, and there are {len(values)} fields")
            return tuple(_value(text, *one) for text, one in zip(found, values, strict=True))

        return read


def _value(text: str | None, one: T.StructField, parse: Callable[[str], Any]) -> Any:
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError:  # Python's own, too: a number of 5,000 digits
        kind = one.dataType.simpleString()
        raise CodecError(f"the field '{one.name}' is no {kind}: {text[:100]!r}") from None


def _splitter(delimiter: str) -> Callable[[str], list[str | None]]:
    special = re.escape(delimiter)
    enclosed = re.compile(f'"((?:[^"]|"")*)"(?={special}|\\Z)')

    def split(line: str) -> list[str | None]:
        # A record may end with a line end; inside a value it is in quotes.
        line = line.removesuffix("\n").removesuffix("\r")
        if '"' not in line:
            if "\n" in line or "\r" in line:
                raise CodecError("it is more than one line")
            return [text or None for text in line.split(delimiter)]
        found: list[str | None] = []
        at = 0
        while True:
            if line.startswith('"', at):
                matched = enclosed.match(line, at)
                if matched is None:
                    raise CodecError(
                        f"value {len(found) + 1} has an unclosed quote, or text after the closing one"
                    )
                found.append(matched[1].replace('""', '"'))
                at = matched.end()
            else:
                end = line.find(delimiter, at)
                text = line[at : len(line) if end < 0 else end]
                if any(letter in text for letter in '"\r\n'):
                    raise CodecError(
                        f"value {len(found) + 1} has a quote or a line end, and no quotes around it"
                    )
                found.append(text or None)
                at += len(text)
            if at == len(line):
                return found
            at += len(delimiter)

    return split
