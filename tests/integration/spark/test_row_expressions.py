"""Expressions of row patterns, which Python evaluates, beside Spark's: the same values, types and refusals."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from flinkish_spark.cep.rows import RowMatcher, RowState
from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.core.errors import PatternError
from flinkish_spark.functions.match_recognize import match_recognize
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.types.to_python import to_values

pytestmark = pytest.mark.timeout(600)

FIELDS = (
    "b TINYINT, h SMALLINT, i INT, j INT, l LONG, m LONG, f FLOAT, d DOUBLE, c DOUBLE, p DECIMAL(10,2), "
    "q DECIMAL(4,3), w DECIMAL(38,10), s STRING, u STRING, t BOOLEAN, v BOOLEAN, x TIMESTAMP, y DATE"
)
REFUSED, SCHEMA = "refused", arrow_schema(parse_ddl(FIELDS))
DAY, NOON = datetime.date(2026, 2, 28), datetime.datetime(2026, 2, 28, 12, 0, 0, 1, tzinfo=datetime.UTC)
MAX_INT, MAX_LONG = (1 << 31) - 1, (1 << 63) - 1
NAN, INF = math.nan, math.inf
ROWS: list[tuple[Any, ...]] = [
    (1, 2, 7, 2, 9, 4, 1.5, 2.5, 0.5, Decimal("1.25"), Decimal("2.125"), Decimal(1), "a", "b", True, False, NOON, DAY),
    (-7, -3, -7, 2, -9, 4, -1.5, -2.5, 0.0, Decimal("-7.55"), Decimal("2.000"), Decimal("0.1"), "Ab", "aB", False, False, NOON, DAY),
    (0, 0, 0, 0, 0, 0, 0.0, 0.0, -0.0, Decimal(0), Decimal(0), Decimal(0), "", " ", True, True, NOON, DAY),
    (127, 32767, MAX_INT, 1, MAX_LONG, 1, 3.4e38, 1.7e308, 10.0, Decimal("99999999.99"), Decimal("9.999"), Decimal(10) ** 27, "ß", "İ", None, True, NOON, DAY),
    (-128, -32768, -MAX_INT - 1, -1, -MAX_LONG - 1, -1, INF, NAN, NAN, Decimal("-99999999.99"), Decimal("-9.999"), -(Decimal(10) ** 27), "😀", "é", False, None, NOON, DAY),
    (5, 5, 5, None, 5, None, NAN, -INF, 1e20, Decimal("12.50"), None, Decimal("3.3333333333"), "12", None, True, None, NOON, None),
    (None,) * 18,
    (10, 10, 10, 3, 10, 3, 0.1, 0.1, 3.0, Decimal("10.00"), Decimal("3.000"), Decimal("2.5"), " 7 ", "7.5", True, True, NOON, DAY),
    (3, 3, 3, 10, 3, 10, 16777217.0, 1e300, 1e-300, Decimal("0.01"), Decimal("0.001"), Decimal("0.0000000001"), "true", "1e3", False, True, NOON, DAY),
]  # fmt: skip
_NUMBERS = ("b", "h", "i", "l", "f", "d", "p", "q", "w")
_PAIRS = [
    *(("i", other) for other in ("j", "b", "l", "d", "f", "p", "q")),
    ("b", "h"), ("l", "m"), ("d", "c"), ("p", "q"), ("p", "w"), ("l", "p"), ("f", "d"), ("h", "w"),
]  # fmt: skip
EXPRESSIONS = [
    *(f"{one} {of} {other}" for one, other in _PAIRS for of in ("+", "-", "*", "/", "%")),
    *(f"{one} {of} {other}" for one, other in _PAIRS for of in ("=", "<>", "<", "<=", ">", ">=")),
    *(f"-{one}" for one in _NUMBERS),
    *(f"ABS({one})" for one in _NUMBERS),
    *(f"CAST({one} AS {kind})" for one in (*_NUMBERS, "t", "s", "u") for kind in ("BIGINT", "INT", "SMALLINT", "TINYINT", "DOUBLE", "FLOAT", "VARCHAR", "DECIMAL(6,1)", "DECIMAL(38,18)", "BOOLEAN")),
    "i + 1", "l + 1", "b * 2", "d * 2", "p * 2", "f + 1.5", "p + 1.5", "i / 2", "i % 2", "1.5 * 2",
    "t AND v", "t OR v", "NOT t", "NOT (t AND v)", "(t AND v) IS NULL", "t = v", "t IS NULL", "t IS NOT NULL",
    "i IS NULL", "i BETWEEN j AND 7", "i NOT BETWEEN 1 AND 5", "d BETWEEN c AND 3", "i IN (1, 7, j)",
    "i NOT IN (1, NULL)", "s IN ('a', u)", "d IN (c, 2.5)", "i = 7.0", "d = d", "d < c", "d > 1", "f = d",
    "s = u", "s < u", "s || u", "s || 'x'", "LOWER(s)", "UPPER(s)", "UPPER(u)", "LOWER(u)", "LENGTH(s)", "s >= 'a'",
    "CASE WHEN t THEN i ELSE j END", "CASE WHEN t THEN i WHEN v THEN 0 END", "CASE i WHEN 7 THEN 'x' ELSE s END",
    "CASE WHEN t THEN i ELSE l END", "CASE WHEN t THEN i ELSE d END", "COALESCE(j, i, 0)", "COALESCE(j, l)",
    "COALESCE(u, s)", "COALESCE(q, p)", "COALESCE(NULL, i)", "x = x", "y = y", "x < x", "y IS NULL", "NULL IS NULL",
    "i + j * 2", "(i + j) * 2", "-(i + j)", "i / j / 2", "p / q", "p * q + 1", "l * l", "i * i",
]  # fmt: skip


def in_spark(spark: SparkSession, text: str) -> tuple[list[Any], T.DataType | None]:
    """Return the value for each row, or `REFUSED`, and their type; None if Spark does not take the expression."""
    text = f"{text.replace('VARCHAR', 'STRING')} AS m"
    try:
        kind = _frame(spark, ROWS).selectExpr(text).schema[0].dataType
    except PySparkException:
        return [], None
    try:
        return [row.m for row in _frame(spark, ROWS).selectExpr(text).collect()], kind
    except PySparkException:
        pass
    found: list[Any] = []
    for row in ROWS:
        try:
            found.append(_frame(spark, [row]).selectExpr(text).collect()[0].m)
        except PySparkException:
            found.append(REFUSED)
    return found, kind


def _frame(spark: SparkSession, rows: list[tuple[Any, ...]]) -> DataFrame:
    """Return rows as a local relation, which is evaluated without a job."""
    columns = [pa.array(list(one), field.type) for one, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)]
    return spark.createDataFrame(pa.Table.from_arrays(columns, schema=SCHEMA))


def _frame_rows() -> list[tuple[Any, ...]]:
    """Return rows as a worker reads them: of FLOAT what that holds."""
    batch = pa.record_batch([pa.array(list(one), field.type) for one, field in zip(zip(*ROWS, strict=True), SCHEMA, strict=True)], schema=SCHEMA)
    return list(zip(*map(to_values, batch.columns), strict=True))


def in_python(text: str) -> tuple[list[Any], T.DataType]:
    said = match_recognize(f"MEASURES {text} AS m PATTERN (A)")
    search, fields = said.search(parse_ddl(FIELDS))
    found: list[Any] = []
    for row in _frame_rows():
        try:
            (told,) = RowMatcher(search).run(RowState([row], [0]), MAX_WATERMARK_MS)
            found.append(told.values[0])
        except (PatternError, ArithmeticError, ValueError):
            found.append(REFUSED)
    return found, fields[0].dataType
