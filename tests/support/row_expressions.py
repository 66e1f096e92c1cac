"""Rows with numbers of all types at their limits, and expressions over them, as row patterns have them."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa

from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import arrow_schema

FIELDS = (
    "b TINYINT, h SMALLINT, i INT, j INT, l LONG, m LONG, f FLOAT, d DOUBLE, c DOUBLE, p DECIMAL(10,2), "
    "q DECIMAL(4,3), w DECIMAL(38,10), s STRING, u STRING, t BOOLEAN, v BOOLEAN, x TIMESTAMP, y DATE"
)
SCHEMA = arrow_schema(parse_ddl(FIELDS))
DAY, NOON = datetime.date(2026, 2, 28), datetime.datetime(2026, 2, 28, 12, 0, 0, 1, tzinfo=datetime.UTC)
MAX_INT, MAX_LONG = (1 << 31) - 1, (1 << 63) - 1
NAN, INF = math.nan, math.inf
Row = tuple[Any, ...]
ROWS: list[Row] = [
    (1, 2, 7, 2, 9, 4, 1.5, 2.5, 0.5, Decimal("1.25"), Decimal("2.125"), Decimal(1), "a", "b",
     True, False, NOON, DAY),
    (-7, -3, -7, 2, -9, 4, -1.5, -2.5, 0.0, Decimal("-7.55"), Decimal("2.000"), Decimal("0.1"),
     "Ab", "aB", False, False, NOON, DAY),
    (0, 0, 0, 0, 0, 0, 0.0, 0.0, -0.0, Decimal(0), Decimal(0), Decimal(0), "", " ", True, True, NOON, DAY),
    (127, 32767, MAX_INT, 1, MAX_LONG, 1, 3.4e38, 1.7e308, 10.0, Decimal("99999999.99"),
     Decimal("9.999"), Decimal(10) ** 27, "ß", "İ", None, True, NOON, DAY),
    (-128, -32768, -MAX_INT - 1, -1, -MAX_LONG - 1, -1, INF, NAN, NAN, Decimal("-99999999.99"),
     Decimal("-9.999"), -(Decimal(10) ** 27), "😀", "é", False, None, NOON, DAY),
    (5, 5, 5, None, 5, None, NAN, -INF, 1e20, Decimal("12.50"), None, Decimal("3.3333333333"),
     "12", None, True, None, NOON, None),
    (None,) * 18,
    (10, 10, 10, 3, 10, 3, 0.1, 0.1, 3.0, Decimal("10.00"), Decimal("3.000"), Decimal("2.5"),
     " 7 ", "7.5", True, True, NOON, DAY),
    (3, 3, 3, 10, 3, 10, 16777217.0, 1e300, 1e-300, Decimal("0.01"), Decimal("0.001"),
     Decimal("0.0000000001"), "true", "1e3", False, True, NOON, DAY),
]  # fmt: skip
_NUMBERS = ("b", "h", "i", "l", "f", "d", "p", "q", "w")
_PAIRS = [
    *(("i", other) for other in ("j", "b", "l", "d", "f", "p", "q")),
    ("b", "h"), ("l", "m"), ("d", "c"), ("p", "q"), ("p", "w"), ("l", "p"), ("f", "d"), ("h", "w"),
]  # fmt: skip
_KINDS = (
    "BIGINT", "INT", "SMALLINT", "TINYINT", "DOUBLE", "FLOAT", "VARCHAR", "DECIMAL(6,1)", "DECIMAL(38,18)",
    "BOOLEAN",
)  # fmt: skip
EXPRESSIONS = [
    *(f"{one} {of} {other}" for one, other in _PAIRS for of in ("+", "-", "*", "/", "%")),
    *(f"{one} {of} {other}" for one, other in _PAIRS for of in ("=", "<>", "<", "<=", ">", ">=")),
    *(f"-{one}" for one in _NUMBERS),
    *(f"ABS({one})" for one in _NUMBERS),
    *(
        f"CAST({one} AS {kind})"
        for one in (*_NUMBERS, "t", "s", "u")
        for kind in _KINDS
        if kind != "VARCHAR" or one not in ("f", "d")
    ),
    # Digits of another script, and characters at the ends that Spark ignores or does not.
    *(
        f"CAST('{text}' AS {kind})"
        for text in ("\u0663", "\u0663.\u0665", "\xa03", "\x1f3", "\x7f3", "3\u2003", "\x003", " 3.", "t\x7f")
        for kind in ("INT", "DOUBLE", "DECIMAL(10,2)", "BOOLEAN")
    ),
    "i + 1", "l + 1", "b * 2", "d * 2", "p * 2", "f + 1.5", "p + 1.5", "i / 2", "i % 2", "1.5 * 2",
    "t AND v", "t OR v", "NOT t", "NOT (t AND v)", "(t AND v) IS NULL", "t = v", "t IS NULL", "t IS NOT NULL",
    "i IS NULL", "i BETWEEN j AND 7", "i NOT BETWEEN 1 AND 5", "d BETWEEN c AND 3", "i IN (1, 7, j)",
    "i NOT IN (1, NULL)", "s IN ('a', u)", "d IN (c, 2.5)", "i = 7.0", "d = d", "d < c", "d > 1", "f = d",
    "s = u", "s < u", "s || u", "s || 'x'", "LOWER(s)", "UPPER(s)", "UPPER(u)", "LOWER(u)", "LENGTH(s)",
    "s LIKE '%a_'", "s NOT LIKE 'A%'", "u LIKE '_%' ", "s LIKE '!_%' ESCAPE '!'", "s LIKE '%.%'",
    "s >= 'a'",
    "CASE WHEN t THEN i ELSE j END", "CASE WHEN t THEN i WHEN v THEN 0 END",
    "CASE i WHEN 7 THEN 'x' ELSE s END",
    "CASE WHEN t THEN i ELSE l END", "CASE WHEN t THEN i ELSE d END", "COALESCE(j, i, 0)", "COALESCE(j, l)",
    "COALESCE(u, s)", "COALESCE(q, p)", "COALESCE(NULL, i)", "x = x", "y = y", "x < x", "y IS NULL",
    "NULL IS NULL",
    "i + j * 2", "(i + j) * 2", "-(i + j)", "i / j / 2", "p / q", "p * q + 1", "l * l", "i * i",
]  # fmt: skip


#: Java writes these in a way of its own; Python does not know which, so they are refused.
WRITTEN_BY_JAVA = ["CAST(f AS VARCHAR)", "CAST(d AS VARCHAR)", "d || 'x'"]
AGGREGATES = [
    *(f"{of}({one})" for of in ("COUNT", "SUM", "AVG", "MIN", "MAX") for one in _NUMBERS if one != "w"),
    "MIN(s)", "MAX(s)", "MIN(t)", "MAX(x)", "MIN(y)", "COUNT(*)", "SUM(i * 2)", "AVG(p * q)", "COUNT(u)",
]  # fmt: skip


def record_batch(rows: list[Row]) -> pa.RecordBatch:
    """Return rows as columns."""
    columns = zip(zip(*rows, strict=True) if rows else [()] * len(SCHEMA), SCHEMA, strict=True)
    return pa.RecordBatch.from_arrays([pa.array(list(one), of.type) for one, of in columns], schema=SCHEMA)
