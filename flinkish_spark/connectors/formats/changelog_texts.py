"""Parsers for the texts in Debezium's, Canal's and Maxwell's records; a text that does not fit is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.types import text_values as values
from flinkish_spark.types.json_columns import JsonReader
from flinkish_spark.types.text_values import NoValue

_Parse = Callable[[str], Any]
_WITHIN_JSON = (T.ArrayType, T.MapType, T.StructType)
_LONG = (T.StringType, T.BinaryType, *_WITHIN_JSON)
_WHOLE = re.compile(r"-?[0-9]+")
_DAY = re.compile(r"\s*[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}\s*")
_TRUE, _FALSE = ("t", "true", "y", "yes", "1"), ("f", "false", "n", "no", "0")
_NANOS_PER_MICRO, _MICROS_PER_MILLI = 1_000, 1_000
#: MongoDB's extended JSON writes a number as an object with one member; these are the members' names.
_WHOLE_NUMBERS, _NUMBERS = "numberInt|numberLong", "numberInt|numberLong|numberDouble"
#: The number in a time may be such an object.
_DATE_WITHIN = re.compile(r'\{\s*"\$date"\s*:\s*(\{.*\})\s*\}', re.DOTALL)


class EpochUnit(Choice):
    """Unit of a number that stands for a time since 1970."""

    MILLISECONDS = 1_000
    MICROSECONDS = 1_000_000
    NANOSECONDS = 1_000_000_000


class DecimalHandling(Choice):
    """How Debezium writes decimals: its `decimal.handling.mode`."""

    #: The unscaled number in base64. The declared scale is the column's, which the number does not say.
    PRECISE = "precise"
    STRING = "string"
    DOUBLE = "double"


@dataclass(frozen=True)
class Texts:
    #: For Debezium: if whole numbers are DATEs, the units of TIMESTAMPs, and the form of DECIMALs.
    days: bool = False
    epoch_units: Mapping[str, EpochUnit] | None = None
    decimals: DecimalHandling | Mapping[str, DecimalHandling] = DecimalHandling.STRING
    #: Placeholders for values that the connector could not read.
    unavailable: Sequence[str] = ()

    def parser(self, fields: T.StructType, time_zone: str) -> Callable[[Mapping[str, str]], dict[str, Any]]:
        """Return a function from texts by column to a row; it raises NoValue if one does not parse."""
        columns = [
            (one.name, self._parse(one.name, one.dataType, time_zone), isinstance(one.dataType, _LONG))
            for one in fields
        ]

        def parse(texts: Mapping[str, str]) -> dict[str, Any]:
            row: dict[str, Any] = {}
            for name, parse_one, is_long in columns:
                text = texts.get(name)
                if is_long and text in self.unavailable:
                    raise NoValue("the connector did not get it")
                row[name] = None if text is None else parse_one(text)
            return row

        return parse

    def _parse(self, name: str, kind: T.DataType, time_zone: str) -> _Parse:
        parse = values.parser_of(kind, time_zone) if not isinstance(kind, _WITHIN_JSON) else str
        match kind:
            case T.FloatType() | T.DoubleType():
                return lambda text: parse(text.strip())
            case T.DecimalType():
                return self._decimal(name, kind, parse)
            case T.BinaryType():
                return lambda text: parse("".join(text.split()))
            case T.BooleanType():
                return _boolean
            case T.DateType():
                return _days if self.days else _date
            case T.TimestampType() | T.TimestampNTZType():
                return partial(_time, parse, (self.epoch_units or {}).get(name))
            case T.ArrayType() | T.MapType() | T.StructType():
                return partial(_parse_json, JsonReader(T.StructType([T.StructField("v", kind)]), time_zone))
        return parse

    def _decimal(self, name: str, kind: T.DecimalType, parse: _Parse) -> _Parse:
        handling = self.decimals
        if isinstance(handling, Mapping):
            handling = handling.get(name, DecimalHandling.PRECISE)
        if handling is DecimalHandling.PRECISE:
            return lambda text: parse(_to_decimal_text(text, kind.scale))
        return lambda text: parse(text.strip())


class DocumentTexts(Texts):
    """Parses the texts of a MongoDB document, in which types that JSON lacks are objects with one member."""

    def _parse(self, name: str, kind: T.DataType, time_zone: str) -> _Parse:
        parse = super()._parse(name, kind, time_zone)
        match kind:
            case T.StringType():
                return lambda text: parse(_member_of(text, "oid|symbol|uuid"))
            case T.ByteType() | T.ShortType() | T.IntegerType() | T.LongType():
                return lambda text: parse(_member_of(text, _WHOLE_NUMBERS))
            case T.FloatType() | T.DoubleType():
                return lambda text: parse(_member_of(text, _NUMBERS))
            case T.DecimalType():
                return lambda text: parse(_member_of(text, f"{_NUMBERS}|numberDecimal"))
            case T.TimestampType():
                of_number = partial(_time, values.parser_of(kind, time_zone), EpochUnit.MILLISECONDS)
                return partial(_document_time, of_number)
            case T.BinaryType():
                return lambda text: parse(_binary_of(text))
        return parse


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise NoValue("it is no boolean")
    return word in _TRUE


def _date(text: str) -> int:
    if not _DAY.fullmatch(text):
        raise NoValue("it is no date")
    return values.parse_date(text)


def _days(text: str) -> int:
    if not _WHOLE.fullmatch(text):
        return _date(text)
    days = int(text)
    values.check_years(days * 86_400)
    return days


def _time(parse: _Parse, unit: EpochUnit | None, text: str) -> int:
    if not _WHOLE.fullmatch(text):
        if "-" not in text:
            raise NoValue("it is no time with a date")
        return int(parse(text))
    match unit:
        case None:
            raise NoValue("epoch_units does not say its unit")
        case EpochUnit.MILLISECONDS:
            micros, rest = int(text) * _MICROS_PER_MILLI, 0
        case EpochUnit.MICROSECONDS:
            micros, rest = int(text), 0
        case EpochUnit.NANOSECONDS:
            micros, rest = divmod(int(text), _NANOS_PER_MICRO)
    if rest:
        raise NoValue("it is finer than a microsecond")
    values.check_years(micros // 1_000_000)
    return micros


def _to_decimal_text(text: str, scale: int) -> str:
    """Return Debezium's decimal as text; it comes as base64 of the unscaled number, maybe with its scale."""
    if text.startswith("{"):
        # If the column has no scale, each value has its own.
        match json.loads(text):
            case {"scale": int(own), "value": str(unscaled)} if type(own) is int:
                text, scale = unscaled, own
            case _:
                raise NoValue("it is no decimal")
    data = values.parse_base64(text)
    if not data:
        raise NoValue("it is no number")
    return f"{int.from_bytes(data, 'big', signed=True)}e{-scale}"


def _parse_json(reader: JsonReader, text: str) -> Any:
    found = reader.record(f'{{"v":{text}}}'.encode())
    if found is None:
        raise NoValue("its text is no JSON of it")
    return found["v"]


def _member_of(text: str, names: str) -> str:
    """Return the value of an object with one member of one of these names; else the text itself."""
    found = re.fullmatch(rf'\{{\s*"\$(?:{names})"\s*:\s*"?([^"{{}}]*)"?\s*\}}', text)
    return found[1] if found else text


def _document_time(parse: _Parse, text: str) -> int:
    if not text.startswith("{"):
        raise NoValue("it is no time")
    within = _DATE_WITHIN.fullmatch(text)
    return int(parse(_member_of(within[1] if within else text, "numberLong|date")))


def _binary_of(text: str) -> str:
    match json.loads(text):
        case {"$binary": {"base64": str(in_base64)}} | {"$binary": str(in_base64)}:
            return in_base64
    raise NoValue("it is no BINARY")
