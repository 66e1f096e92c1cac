"""Spark type names parsed without a JVM.

State is declared in `open`, which runs in a Python worker; pyspark's own DDL parser needs the
JVM's. Supported: the atomic types, DECIMAL(p, s), ARRAY<t>, MAP<k, v>, STRUCT<name: t, ...>, and
a list of fields ``name TYPE, name TYPE``.
"""

from __future__ import annotations

import re

from pyspark.sql import types as T

_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*|\d+|[<>(),:]|`(?:[^`]|``)+`)")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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
    "string": T.StringType(),
    "binary": T.BinaryType(),
    "date": T.DateType(),
    "timestamp": T.TimestampType(),
    "timestamp_ntz": T.TimestampNTZType(),
}


class DdlError(ValueError):
    """The text is not a type or a list of fields."""


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._tokens, at = text, [], 0
        stripped = text.rstrip()
        while at < len(stripped):
            match = _TOKEN.match(stripped, at)
            if match is None:
                raise DdlError(f"cannot read {stripped[at:]!r} in the type {text!r}")
            self._tokens.append(match.group(1))
            at = match.end()
        self._at = 0

    def peek(self, ahead: int = 0) -> str:
        index = self._at + ahead
        return self._tokens[index] if index < len(self._tokens) else ""

    def take(self, *wanted: str) -> str:
        token = self.peek()
        if not token or (wanted and token not in wanted):
            raise DdlError(f"expected {' or '.join(wanted) or 'more'} in the type {self._text!r}")
        self._at += 1
        return token

    def fields(self, separator: str, end: str) -> T.StructType:
        found = []
        while True:
            name = self.take()
            if name.startswith("`"):
                name = name[1:-1].replace("``", "`")
            if separator:
                self.take(separator)
            elif self.peek() == ":":
                self.take(":")
            found.append(T.StructField(name, self.type()))
            if self.peek() != ",":
                break
            self.take(",")
        if end:
            self.take(end)
        return T.StructType(found)

    def type(self) -> T.DataType:
        name = self.take().lower()
        if name in ("decimal", "numeric"):
            precision, scale = 10, 0
            if self.peek() == "(":
                self.take("(")
                precision = int(self.take())
                if self.peek() == ",":
                    self.take(",")
                    scale = int(self.take())
                self.take(")")
            return T.DecimalType(precision, scale)
        if name == "array":
            self.take("<")
            element = self.type()
            self.take(">")
            return T.ArrayType(element)
        if name == "map":
            self.take("<")
            key = self.type()
            self.take(",")
            value = self.type()
            self.take(">")
            return T.MapType(key, value)
        if name == "struct":
            self.take("<")
            return self.fields(":", ">")
        if name not in _ATOMIC:
            raise DdlError(f"unknown type {name!r} in {self._text!r}")
        return _ATOMIC[name]

    def is_one_word(self) -> bool:
        return len(self._tokens) == 1

    def is_at_end(self) -> bool:
        return self._at == len(self._tokens)


def ddl_of(kind: T.DataType) -> str:
    """Return a type as text that :func:`parse_ddl` reads, a StructType as a list of fields.

    Examples
    --------
    >>> text = ddl_of(parse_ddl("`first name` STRING, tags ARRAY<STRUCT<a: INT>>"))
    >>> text
    '`first name` string, tags array<struct<a:int>>'
    """
    if isinstance(kind, T.StructType):
        return ", ".join(f"{_name(field.name)} {_type_text(field.dataType)}" for field in kind)
    return _type_text(kind)


def _type_text(kind: T.DataType) -> str:
    if isinstance(kind, T.StructType):
        return f"struct<{','.join(f'{_name(f.name)}:{_type_text(f.dataType)}' for f in kind)}>"
    if isinstance(kind, T.ArrayType):
        return f"array<{_type_text(kind.elementType)}>"
    if isinstance(kind, T.MapType):
        return f"map<{_type_text(kind.keyType)},{_type_text(kind.valueType)}>"
    return kind.simpleString()


def _name(text: str) -> str:
    return text if _PLAIN_NAME.fullmatch(text) else "`" + text.replace("`", "``") + "`"


def parse_ddl(text: str) -> T.DataType:
    """Return the type, a StructType for a list of fields.

    Raises
    ------
    DdlError
        The text is neither.

    Examples
    --------
    >>> parse_ddl("LONG").simpleString()
    'bigint'
    >>> parse_ddl("total LONG, tags ARRAY<STRING>").simpleString()
    'struct<total:bigint,tags:array<string>>'
    """
    attempt = _Parser(text)
    try:
        parsed = attempt.type()
        if attempt.is_at_end():
            return parsed
    except DdlError:
        if attempt.is_one_word():
            raise
    again = _Parser(text)
    fields = again.fields("", "")
    if not again.is_at_end():
        raise DdlError(f"unexpected {again.peek()!r} in the type {text!r}")
    return fields
