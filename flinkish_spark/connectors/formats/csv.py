"""CSV: one line of values per record, read and written so that a line read is the line that was written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.connectors.formats.reader import Reader, Unreadable
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.types.ddl import quoted
from flinkish_spark.types.exact_text import exact_text

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NAMES_OF_NUMBERS = frozenset({"NaN", "Infinity", "-Infinity"})
_BOOLEANS = frozenset({"true", "false"})
_WHOLE = re.compile(r"[+-]?[0-9]+")


def check_flat(fields: T.StructType, whose: str) -> None:
    for one in fields:
        if isinstance(one.dataType, T.StructType | T.ArrayType | T.MapType):
            raise SchemaError(
                f"{whose} has the field '{one.name}' of type {one.dataType.simpleString()}",
                why="a line of CSV has single values only",
                what_to_do="leave it out, or make a STRING of it in a transform",
            )


def line_of(fields: T.StructType, delimiter: str) -> Column:
    values = []
    for one in fields:
        column = F.col(quoted(one.name))
        # As in JSON: a line is text.
        is_binary = isinstance(one.dataType, T.BinaryType)
        text = F.base64(column) if is_binary else exact_text(column, one.dataType)
        special = re.escape(delimiter)
        is_special = text.rlike(f'[{special}"\\r\\n]') | (text == "")
        enclosed = F.concat(F.lit('"'), F.replace(text, F.lit('"'), F.lit('""')), F.lit('"'))
        values.append(F.coalesce(F.when(is_special, enclosed).otherwise(text), F.lit("")))
    return F.concat_ws(delimiter, *values)


@dataclass(frozen=True)
class CsvReader(Reader):
    """Gives each line as a JSON object of the fields, whose values Spark then reads exactly."""

    fields: str
    delimiter: str

    kind = T.StringType()

    def opened(self) -> Callable[[bytes], str]:
        fields = T.StructType.fromJson(json.loads(self.fields))
        split, values = _splitter(self.delimiter), [(one.name, _value(one)) for one in fields]
        names = [json.dumps(name) for name, _ in values]

        def read(data: bytes) -> str:
            try:
                line = data.decode()
            except UnicodeDecodeError as error:
                raise Unreadable(f"the line is no UTF-8: {error.reason}") from None
            found = split(line)
            if len(found) != len(values):
                raise Unreadable(f"the line has {len(found)} values, and there are {len(values)} fields")
            made = [one(text) for text, (_, one) in zip(found, values, strict=True)]
            return "{" + ",".join(f"{n}:{v}" for n, v in zip(names, made, strict=True)) + "}"

        return read


def _splitter(delimiter: str) -> Callable[[str], list[str | None]]:
    special = re.escape(delimiter)
    enclosed = re.compile(f'"((?:[^"]|"")*)"(?={special}|\\Z)')

    def split(line: str) -> list[str | None]:
        # The end of a line that a record may have; within a value it is in quotes.
        line = line.removesuffix("\n").removesuffix("\r")
        if '"' not in line:
            if "\n" in line or "\r" in line:
                raise Unreadable("it is more than one line")
            return [text or None for text in line.split(delimiter)]
        found: list[str | None] = []
        at = 0
        while True:
            if line.startswith('"', at):
                matched = enclosed.match(line, at)
                if matched is None:
                    raise Unreadable(
                        f"value {len(found) + 1} has a quote that nothing closes, or text behind it"
                    )
                found.append(matched[1].replace('""', '"'))
                at = matched.end()
            else:
                end = line.find(delimiter, at)
                text = line[at : len(line) if end < 0 else end]
                if any(letter in text for letter in '"\r\n'):
                    raise Unreadable(
                        f"value {len(found) + 1} has a quote or the end of a line, and no quotes around it"
                    )
                found.append(text or None)
                at += len(text)
            if at == len(line):
                return found
            at += len(delimiter)

    return split


def _value(one: T.StructField) -> Callable[[str | None], str]:
    kind = one.dataType
    if isinstance(kind, T.IntegralType):
        check: Callable[[str], str | None] = partial(_matching, _WHOLE)
    elif isinstance(kind, T.DecimalType):
        check = partial(_matching, _NUMBER)
    elif isinstance(kind, T.DoubleType | T.FloatType):
        check = _float
    elif isinstance(kind, T.BooleanType):
        check = _boolean
    else:
        check = _text

    def value(text: str | None) -> str:
        if text is None:
            return "null"
        found = check(text)
        if found is None:
            raise Unreadable(f"the field '{one.name}' is no {kind.simpleString()}: {text[:100]!r}")
        return found

    return value


def _matching(pattern: re.Pattern[str], text: str) -> str | None:
    if pattern.fullmatch(text) is None:
        return None
    # JSON has no plus, no zeros in front, and digits on both sides of the point.
    sign, digits = ("-" if text[0] == "-" else ""), text.lstrip("+-")
    whole, point, rest = digits.partition(".")
    if not point:
        whole, letter, exponent = _apart(digits)
        return f"{sign}{whole.lstrip('0') or '0'}{letter}{exponent}"
    behind, letter, exponent = _apart(rest)
    return f"{sign}{whole.lstrip('0') or '0'}.{behind or '0'}{letter}{exponent}"


def _apart(digits: str) -> tuple[str, str, str]:
    for letter in "eE":
        if letter in digits:
            return digits.partition(letter)
    return digits, "", ""


def _float(text: str) -> str | None:
    return json.dumps(text) if text in _NAMES_OF_NUMBERS else _matching(_NUMBER, text)


def _boolean(text: str) -> str | None:
    return text if text in _BOOLEANS else None


def _text(text: str) -> Any:
    return json.dumps(text, ensure_ascii=False)
