"""A parser of Spark's DDL types that needs no JVM, unlike pyspark's own: for `open` in a Python worker.

It gives the same results as Spark's parser, except for empty types (no text, ``STRUCT<>``, DECIMAL(0)),
GEOMETRY and GEOGRAPHY. :mod:`.hints` says which types states and rows of functions may have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.protocol.choices import closest

_BLANK = re.compile(r"(?:\s|--[^\n]*|/\*.*?\*/)+", re.DOTALL)
_TEXT = r"""[rR]?(?:'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")"""
_TOKEN = re.compile(rf"{_TEXT}|[0-9]*[A-Za-z_][A-Za-z0-9_]*|\d+|[<>(),:]|`(?:[^`]|``)+`", re.DOTALL)
_WORD = re.compile(r"[0-9]*[A-Za-z_][A-Za-z0-9_]*")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ESCAPED = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_ESCAPES = {"0": "\0", "b": "\b", "n": "\n", "r": "\r", "t": "\t", "Z": "\x1a", "%": "\\%", "_": "\\_"}

_ATOMIC: dict[str, T.DataType] = {
    "boolean": T.BooleanType(),
    "tinyint": T.ByteType(),
    "byte": T.ByteType(),
    "smallint": T.ShortType(),
    "short": T.ShortType(),
    "int": T.IntegerType(),
    "integer": T.IntegerType(),
    "bigint": T.LongType(),
    "long": T.LongType(),
    "float": T.FloatType(),
    "real": T.FloatType(),
    "double": T.DoubleType(),
    "binary": T.BinaryType(),
    "date": T.DateType(),
    "timestamp_ltz": T.TimestampType(),
    "timestamp_ntz": T.TimestampNTZType(),
    "void": T.NullType(),
    "variant": T.VariantType(),
}
_YEAR_MONTH = ("year", "month")
_DAY_TIME = ("day", "hour", "minute", "second")


class DdlError(ValueError):
    """The text is neither a type nor a list of fields."""


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._tokens, at = text, list[str](), 0
        while at < len(text):
            if (blank := _BLANK.match(text, at)) is not None:
                at = blank.end()
                continue
            match = _TOKEN.match(text, at)
            if match is None:
                raise DdlError(f"cannot read {text[at:].rstrip()!r} in the type {text!r}")
            self._tokens.append(match.group())
            at = match.end()
        #: Number of tokens read.
        self.at = 0

    @property
    def is_at_end(self) -> bool:
        return self.at == len(self._tokens)

    def peek(self, ahead: int = 0) -> str:
        index = self.at + ahead
        return self._tokens[index].lower() if index < len(self._tokens) else ""

    def take(self, *wanted: str) -> str:
        """Return the next token as it is written; raise DdlError unless it is one of `wanted`, if given."""
        token = self.peek()
        if not token or (wanted and token not in wanted):
            found = f", not {self._tokens[self.at]!r}," if token else ""
            raise DdlError(f"expected {' or '.join(wanted) or 'more'}{found} in the type {self._text!r}")
        self.at += 1
        return self._tokens[self.at - 1]

    def takes(self, *words: str) -> bool:
        """Skip these tokens if they come next; return if they did."""
        if all(self.peek(ahead) == word for ahead, word in enumerate(words)):
            self.at += len(words)
            return True
        return False

    def fields(self) -> T.StructType:
        found = [self._field()]
        while self.takes(","):
            found.append(self._field())
        return T.StructType(found)

    def _field(self) -> T.StructField:
        name = self.take()
        if name.startswith("`"):
            name = name[1:-1].replace("``", "`")
        elif _WORD.fullmatch(name) is None:
            raise DdlError(f"expected the name of a field, not {name!r}, in the type {self._text!r}")
        self.takes(":")
        kind = self.type()
        is_required = self.takes("not", "null")
        metadata = {"comment": self._string()} if self.takes("comment") else None
        return T.StructField(name, kind, not is_required, metadata)

    def _string(self) -> str:
        """Return a quoted text; adjacent texts are concatenated."""
        parts = []
        while self.peek()[-1:] in ("'", '"'):
            token = self.take()
            parts.append(token[2:-1] if token[0] in "rR" else _unescape(token[1:-1], token[0]))
        if not parts:
            raise DdlError(f"expected a text in quotes after COMMENT in the type {self._text!r}")
        return "".join(parts)

    def type(self) -> T.DataType:
        name = self.take().lower()
        if name in _ATOMIC:
            return _ATOMIC[name]
        read = _READ.get(name)
        if read is None:
            near = closest(name.upper(), [one.upper() for one in (*_ATOMIC, *_READ)])
            raise DdlError(f"unknown type {name!r} in {self._text!r}" + (f". {near}" if near else ""))
        return read(self)

    def _read_brackets(self, brackets: str, *parts: Callable[[_Parser], Any]) -> list[Any]:
        self.take(brackets[0])
        found = [parts[0](self)]
        for part in parts[1:]:
            self.take(",")
            found.append(part(self))
        self.take(brackets[1])
        return found

    def _length(self) -> int:
        (length,) = self._read_brackets("()", _Parser._number)
        return int(length)

    def _number(self) -> int:
        token = self.take()
        if not token.isdecimal():
            raise DdlError(f"expected a number, not {token!r}, in the type {self._text!r}")
        return int(token)

    def _decimal(self) -> T.DataType:
        precision, scale = 10, 0
        if self.takes("("):
            precision = self._number()
            if self.takes(","):
                scale = self._number()
            self.take(")")
        if not 1 <= precision <= 38 or scale > precision:
            raise DdlError(
                f"DECIMAL({precision}, {scale}) must have 1 to 38 digits, and no more of them after the "
                f"point, in the type {self._text!r}"
            )
        return T.DecimalType(precision, scale)

    def _timestamp(self) -> T.DataType:
        if self.takes("without", "time", "zone"):
            return T.TimestampNTZType()
        self.takes("with", "local", "time", "zone")
        return T.TimestampType()

    def _time(self) -> T.DataType:
        precision = self._length() if self.peek() == "(" else 6
        if precision > 6:
            raise DdlError(f"TIME({precision}) has more than 6 digits in the type {self._text!r}")
        self.takes("without", "time", "zone")
        return T.TimeType(precision)

    def _interval(self) -> T.DataType:
        units: tuple[str, ...] = next((one for one in (_YEAR_MONTH, _DAY_TIME) if self.peek() in one), ())
        if not units:
            return T.CalendarIntervalType()
        first = last = units.index(self.take().lower())
        if first + 1 < len(units) and self.takes("to"):
            last = units.index(self.take(*units[first + 1 :]).lower())
        if units is _YEAR_MONTH:
            return T.YearMonthIntervalType(first, last)
        return T.DayTimeIntervalType(first, last)


_READ: dict[str, Callable[[_Parser], T.DataType]] = {
    "string": lambda parser: T.StringType(*([parser.take()] if parser.takes("collate") else [])),
    "varchar": lambda parser: T.VarcharType(parser._length()),
    "char": lambda parser: T.CharType(parser._length()),
    "character": lambda parser: T.CharType(parser._length()),
    "decimal": _Parser._decimal,
    "dec": _Parser._decimal,
    "numeric": _Parser._decimal,
    "timestamp": _Parser._timestamp,
    "time": _Parser._time,
    "interval": _Parser._interval,
    "array": lambda parser: T.ArrayType(*parser._read_brackets("<>", _Parser.type)),
    "map": lambda parser: T.MapType(*parser._read_brackets("<>", _Parser.type, _Parser.type)),
    "struct": lambda parser: parser._read_brackets("<>", _Parser.fields)[0],
}


def _unescape(text: str, quote: str) -> str:
    def one(match: re.Match[str]) -> str:
        what = match.group(1)
        return chr(int(what[1:], 16)) if len(what) > 1 else _ESCAPES.get(what, what)

    return _ESCAPED.sub(one, text.replace(quote * 2, quote))


def ddl_of(kind: T.DataType) -> str:
    if isinstance(kind, T.StructType):
        return ", ".join(f"{name_text(field.name)} {type_text(field.dataType)}" for field in kind)
    return type_text(kind)


def type_text(kind: T.DataType) -> str:
    """Return a type as text that may be the type of a field: a StructType as `struct<...>`."""
    if isinstance(kind, T.StructType):
        return f"struct<{','.join(f'{name_text(f.name)}:{type_text(f.dataType)}' for f in kind)}>"
    if isinstance(kind, T.ArrayType):
        return f"array<{type_text(kind.elementType)}>"
    if isinstance(kind, T.MapType):
        return f"map<{type_text(kind.keyType)},{type_text(kind.valueType)}>"
    return kind.simpleString()


def name_text(text: str) -> str:
    return text if _PLAIN_NAME.fullmatch(text) else quote_name(text)


def parse_ddl(text: str) -> T.DataType:
    kind = _parse(text)[0]
    # A copy, since callers may add fields and the parsed type is cached.
    return T.StructType(list(kind)) if isinstance(kind, T.StructType) else kind


def is_field_list(text: str) -> bool:
    return _parse(text)[1]


# Each key group of each micro-batch parses the same few texts.
@lru_cache(maxsize=1024)
def _parse(text: str) -> tuple[T.DataType, bool]:
    one = _Parser(text)
    try:
        kind = one.type()
        if one.is_at_end:
            return kind, False
        read, wrong = one.at + 1, DdlError(f"unexpected {one.peek()!r} in the type {text!r}")
    except DdlError as error:
        read, wrong = one.at, error
    several = _Parser(text)
    try:
        fields = several.fields()
    except DdlError as error:
        # Report the error of the attempt that read further.
        raise (error if several.at > read else wrong) from None
    if not several.is_at_end:
        raise DdlError(f"unexpected {several.peek()!r} in the type {text!r}")
    return fields, True


def quote_name(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
