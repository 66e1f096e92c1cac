"""What SQL makes of values: some facts of Spark's ANSI mode; the whole comparison has Spark in it."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest

from flinkish_spark.cep.match_recognize import match_recognize
from flinkish_spark.cep.rows import RowMatcher, RowState
from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.core.errors import PatternError
from flinkish_spark.types.ddl import parse_ddl

FIELDS = "i INT, l LONG, b TINYINT, f FLOAT, d DOUBLE, p DECIMAL(10,2), q DECIMAL(4,3), s STRING, y DATE"
ROW = (7, 9, -128, 0.10000000149011612, math.nan, Decimal("1.25"), Decimal("2.125"), " 12 ", None)


def measured(text: str, rows: list[tuple[Any, ...]] | None = None) -> tuple[Any, str]:
    """Return a measure of a match of all rows, and its type."""
    search, fields = match_recognize(f"MEASURES {text} AS m PATTERN (A+)").search(parse_ddl(FIELDS))
    own = [ROW] if rows is None else rows
    (told,) = RowMatcher(search).run(RowState(list(own), list(range(len(own)))), MAX_WATERMARK_MS)
    return told.values[0], fields[0].dataType.simpleString()


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("i + 1", 8, "int"),
        ("i + l", 16, "bigint"),
        ("i / 2", 3.5, "double"),
        ("-i % 4", -3, "int"),
        ("i + 1.5", Decimal("8.5"), "decimal(12,1)"),
        ("p + q", Decimal("3.375"), "decimal(12,3)"),
        ("p / q", Decimal("0.5882353"), "decimal(18,7)"),
        ("p * q", Decimal("2.65625"), "decimal(15,5)"),
        ("p * 2", Decimal("2.50"), "decimal(12,2)"),
        ("f * f", 0.010000000707805157, "float"),
        ("f + i", 7.100000001490116, "double"),
        ("d = d", True, "boolean"),
        ("d > 1e308", True, "boolean"),
        ("NULL AND i = 8", False, "boolean"),
        ("i IN (8, NULL)", None, "boolean"),
        ("CAST(-7.9 AS INT)", -7, "int"),
        ("CAST(s AS INT)", 12, "int"),
        ("CAST(2.5 AS DECIMAL(3,0))", Decimal(3), "decimal(3,0)"),
        ("CAST(f AS DECIMAL(6,3))", Decimal("0.100"), "decimal(6,3)"),
        ("CASE WHEN i = 7 THEN i ELSE d END", 7.0, "double"),
        ("COALESCE(NULL, p, i)", Decimal("1.25"), "decimal(12,2)"),
        ("i || 'x'", "7x", "string"),
        ("LENGTH(s)", 4, "int"),
        ("SUM(b)", -128, "bigint"),
        ("AVG(p)", Decimal("1.250000"), "decimal(14,6)"),
        ("MAX(d)", math.nan, "double"),
    ],
)  # fmt: skip
def test_an_expression_has_spark_s_value_and_type(text: str, value: Any, kind: str) -> None:
    found = measured(text)
    assert found[1] == kind and (repr(found[0]) == repr(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("i IN (1, 7)", True), ("i IN (1,2)", False), ("i NOT IN(1)", True), ("i BETWEEN 7 AND 8", True),
        ("A.i > 3 AND A.l > 9", False), ("A.i<A.l OR A.i=0", True), ("i -- a word\n > 3", True),
        ("`A`.`i` = 7", True), ('"A"."i" = 7', True), ("A . i = 7", True), ("NOT A.i=7", False),
        ("FINAL LAST(A.i) = 7 AND RUNNING  LAST(A.i) IN (7)", True), ("'a''b' = 'a''b'", True),
        ("s LIKE ' 12 '", True), ("s LIKE '12'", False), ("s LIKE '%1_ '", True), ("s NOT LIKE '_1%'", False),
        ("s LIKE ''", False), ("s LIKE '%'", True), ("'a\nb' LIKE 'a_b'", True), ("'a.b' LIKE 'a_b'", True),
        ("'axb' LIKE 'a.b'", False), ("'a%b' LIKE 'a!%b' ESCAPE '!'", True), ("NULL LIKE 'a'", None),
        ("'axb' LIKE 'a!%b' ESCAPE '!'", False), ("'a!' LIKE 'a!!' ESCAPE '!'", True),
        ("'A' LIKE 'a'", False),
    ],
)  # fmt: skip
def test_a_condition_is_read_as_it_is_written(text: str, value: Any) -> None:
    assert measured(text) == (value, "boolean")


@pytest.mark.parametrize(
    "text",
    ["i BETWEEN SYMMETRIC 9 AND 1", "i IN (SELECT 7)", "i IN UNNEST(s)", "MIN(i, 2)", "x.A.i = 7",
     "LAST(i, 0, 1)", "CAST(s AS VARCHAR(1))", "PREV(i, 1, 2)", "PREV()", "COUNT(DISTINCT i)",
     "SUM(i) FILTER (WHERE i > 1)",
     "i LIKE '7'", "s LIKE s", r"s LIKE 'a\%'", "s LIKE 'a!b' ESCAPE '!'", "s LIKE 'a!' ESCAPE '!'",
     "s LIKE 'a' ESCAPE '!!'", "s ILIKE 'a'", "s LIKE ANY ('a', 'b')", "s RLIKE 'a'", "s SIMILAR TO 'a'"],
)  # fmt: skip
def test_what_says_more_than_is_known_is_refused(text: str) -> None:
    with pytest.raises(PatternError, match="MATCH_RECOGNIZE has"):
        measured(text)


@pytest.mark.parametrize(
    "text",
    ["b - CAST(1 AS TINYINT)", "-b", "ABS(b)", "i / 0", "i % 0", "d / 0", "p / 0",
     "CAST(i AS TINYINT) * CAST(100 AS TINYINT)", "l * 9223372036854775807",
     "CAST('1.5' AS INT)", "CAST('x' AS DOUBLE)", "CAST(d AS INT)", "CAST('maybe' AS BOOLEAN)",
     "CAST(99.95 AS DECIMAL(3,1))"],
)  # fmt: skip
def test_what_spark_refuses_is_refused(text: str) -> None:
    with pytest.raises(PatternError):
        measured(text)


@pytest.mark.parametrize("text", ["CAST(d AS VARCHAR)", "CAST(y AS VARCHAR)", "i = s", "y < 1", "i + s"])
def test_what_would_not_be_the_same_is_refused_before_anything_starts(text: str) -> None:
    with pytest.raises(PatternError, match="MATCH_RECOGNIZE has"):
        match_recognize(f"MEASURES {text} AS m PATTERN (A)").search(parse_ddl(FIELDS))


def test_a_sum_that_leaves_its_type_is_refused_on_its_way() -> None:
    most = (1 << 63) - 1
    rows = [(0, value, 0, 0.0, 0.0, None, None, "", None) for value in (most, 1, -5)]
    with pytest.raises(PatternError, match="BIGINT"):
        measured("SUM(l)", rows)
