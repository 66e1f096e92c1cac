"""CSV as a format of records: one line each; reading a written line returns the same values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.connectors.csv_lines import CsvForm, lines_of
from flinkish_spark.connectors.formats.reader import CodecError, ConvertingReader, Reader, read_values
from flinkish_spark.connectors.plain_formats import check_exact, choose_fields, parse_fields
from flinkish_spark.contracts.format import EncodedColumn, Format, PartReader, PartWriter
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.core.fields import TextPattern, check_fields
from flinkish_spark.core.formats import BadRecordPolicy, OnBadRecord
from flinkish_spark.types.exact_text import unfit_for_json
from flinkish_spark.types.json_columns import replace_months
from flinkish_spark.types.text_values import parser_of


@dataclass(frozen=True, slots=True)
class Csv(Format):
    """A line of values, one per record, in the order of the fields, quoted as RFC 4180 says.

    Nothing between two delimiters is null, and ``""`` the empty text.

    Parameters
    ----------
    schema
        Fields as DDL; none of them nested. Needed to read; a sink writes all fields of its stream if none
        is named.
    delimiter
        Between values: one character, no quote and no end of a line.
    on_bad_record
        What a source does with a line of other values than the fields: too few, too many, or one that is no
        value of its type. A null value counts as such.

    Examples
    --------
    >>> Csv("user STRING, amount DECIMAL(10,2)", delimiter=";").delimiter
    ';'
    """

    schema: str = ""
    delimiter: Annotated[str, TextPattern(r'[^"\r\n\0]', "one character, no quote or end of a line")] = ","
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL

    def __post_init__(self) -> None:
        check_fields(self, delimiter='give a comma, or another character: delimiter=";"')

    def make_reader(self, part: str) -> PartReader:
        fields = parse_fields(self.schema, "CSV")
        _check_flat(fields, "the CSV schema")
        return ConvertingReader(part, fields, CsvReader(fields.json(), self.delimiter))

    def check_fields(self, schema: T.StructType, whose: str) -> None:
        fields = choose_fields(schema, self.schema, whose)
        check_exact(fields, unfit_for_json, whose)
        _check_flat(fields, whose)

    def make_writer(self, schema: T.StructType, topics: Sequence[str], part: str) -> PartWriter:
        return _LineWriter(choose_fields(schema, self.schema, part), CsvForm(self.delimiter))


def _check_flat(fields: T.StructType, whose: str) -> None:
    for one in fields:
        if isinstance(one.dataType, T.StructType | T.ArrayType | T.MapType):
            what = f"{whose} has the field '{one.name}' of type {one.dataType.simpleString()}"
            raise SchemaError(what, what_to_do="leave it out, or make a STRING of it in a transform")


@dataclass(frozen=True)
class _LineWriter(PartWriter):
    form: CsvForm

    def write(self, records: pa.RecordBatch) -> EncodedColumn:
        return EncodedColumn(lines_of(self.fields, self.columns(records), self.form).cast(pa.binary()))


@dataclass(frozen=True)
class CsvReader(Reader):
    fields: str
    delimiter: str
    time_zone: str = "UTC"

    def read(self, values: pa.Array, time_zone: str) -> tuple[pa.Array, pa.Array]:
        return read_values(replace(self, time_zone=time_zone), values)

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
                        f"value {len(found) + 1} has an open quote, or text after the closing one"
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
