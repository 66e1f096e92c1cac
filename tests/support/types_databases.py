"""A column of a database, as a way for values of a type: out by the JDBC sink, back by the driver."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import types as T

from flinkish_spark.connectors.jdbc.checks import Checks
from flinkish_spark.protocol.records import Outcome
from flinkish_spark.types.ddl import parse_ddl
from tests.support.databases import TestDatabase, commit, context_of, staged


def through(
    database: TestDatabase, columns: dict[str, tuple[str, list[Any]]], folder: Path, checkpoint: int = 1
) -> dict[str, list[Any]]:
    """Send values as columns of one table, each with its declaration; return what there is of each.

    Columns are filled up with nulls. Each checkpoint of a database has a table of its own.
    """
    table = f"t{checkpoint}"
    rows = max(len(values) for _, values in columns.values())
    fields = [T.StructField(name, parse_ddl(ddl)) for name, (ddl, _) in columns.items()]
    schema = T.StructType([T.StructField("n", T.IntegerType()), *fields])
    filled = [[*_pairs(values), *[None] * (rows - len(values))] for _, values in columns.values()]
    context = context_of(folder, schema)
    sink = database.sink(table, create_table=True, key=("n",), mode="upsert")
    Checks(sink.settings, context).run()
    given = list(zip(range(rows), *filled, strict=True))
    answer = commit(sink, context, checkpoint, staged(folder, given, schema))
    assert answer.outcome is Outcome.COMMITTED
    found = list(zip(*database.table(table, order="1"), strict=True))[1:]
    return {
        name: [back(one, field.dataType) for one in column[: len(values)]]
        for (name, (_, values)), field, column in zip(columns.items(), fields, found, strict=True)
    }


def _pairs(values: list[Any]) -> list[Any]:
    """Maps as pairs, which is what Arrow takes them as."""
    return [list(one.items()) if isinstance(one, dict) and list(one) != ["v"] else one for one in values]


def back(value: Any, kind: T.DataType, *, in_json: bool = False) -> Any:
    """Return a value as its type has it, out of what a driver returns; by the table of docs/jdbc-sink.md."""
    if value is None:
        return None
    match kind:
        case T.ArrayType() | T.MapType() | T.StructType():
            return _back_nested(json.loads(value) if isinstance(value, str) and not in_json else value, kind)
        case T.BooleanType():
            return bool(value)
        case T.FloatType() | T.DoubleType() if isinstance(value, str):
            return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}[value]
        case T.FloatType():
            # Of four bytes a driver may tell the shortest text only.
            return float(np.float32(value))
        case T.DoubleType():
            return float(value)
        case T.DecimalType():
            return Decimal(value)
        case T.BinaryType():
            return base64.b64decode(value) if in_json else bytes(value)
        case T.DateType() if isinstance(value, str):
            return dt.date.fromisoformat(value)
        case T.TimestampType() | T.TimestampNTZType() if isinstance(value, str):
            return dt.datetime.fromisoformat(value)
        case T.TimestampType() if value.tzinfo is None:
            # A DATETIME, whose values are in UTC.
            return value.replace(tzinfo=dt.UTC)
        case T.TimeType() if isinstance(value, str):
            return dt.time.fromisoformat(value)
        case T.DayTimeIntervalType() if isinstance(value, str):
            return _back_interval(value)
    return value


def _back_interval(text: str) -> dt.timedelta:
    """Return an interval out of Python's text of one."""
    found = re.fullmatch(r"(?:(-?\d+) days?, )?(\d+):(\d+):(\d+)(?:\.(\d{6}))?", text)
    assert found is not None, text
    days, hours, minutes, seconds, micros = (int(one or 0) for one in found.groups())
    return dt.timedelta(days, seconds, micros, minutes=minutes, hours=hours)


def _back_nested(value: Any, kind: T.DataType) -> Any:
    match kind:
        case T.ArrayType():
            return [back(one, kind.elementType, in_json=True) for one in value]
        case T.MapType():
            pairs = value.items() if isinstance(value, dict) else value
            return {
                back(_as_key(k, kind.keyType), kind.keyType, in_json=True): back(
                    v, kind.valueType, in_json=True
                )
                for k, v in pairs
            }
        case T.StructType():
            return {field.name: back(value[field.name], field.dataType, in_json=True) for field in kind}


def _as_key(value: Any, kind: T.DataType) -> Any:
    """Return a key as JSON has it where it is no name: names are texts."""
    is_bare = isinstance(kind, T.BooleanType | T.IntegralType | T.FloatType | T.DoubleType)
    return json.loads(value) if is_bare and isinstance(value, str) else value
