"""Expressions of row patterns, which Python evaluates, beside Spark's: the same values, types, refusals."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from flinkish_spark.cep.rows import RowMatcher, RowState
from flinkish_spark.cep.values import NoSuchValue
from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.core.errors import PatternError
from flinkish_spark.functions.match_recognize import match_recognize
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.to_python import to_values
from tests.support import effort
from tests.support.row_expressions import (
    AGGREGATES,
    EXPRESSIONS,
    FIELDS,
    ROWS,
    WRITTEN_BY_JAVA,
    Row,
    record_batch,
)

pytestmark = pytest.mark.timeout(600)

REFUSED = "refused"


def in_spark(spark: SparkSession, text: str, rows: list[Row]) -> tuple[list[Any], T.DataType | None]:
    """Return the values, and their type; `REFUSED` in place of the values, or no type, if Spark refuses.

    A relation that is local is evaluated without a job. In one partition, so that sums are in order.
    """
    frame = spark.createDataFrame(pa.Table.from_batches([record_batch(rows)])).coalesce(1)
    try:
        made = frame.selectExpr(f"{text.replace('VARCHAR', 'STRING')} AS m")
        kind = made.schema[0].dataType
    except PySparkException:
        return [], None
    try:
        return [_in_utc(row.m) for row in made.collect()], kind
    except PySparkException:
        return [REFUSED], kind


def _in_utc(value: Any) -> Any:
    """Return a time as ours are told: PySpark's are of the local zone and do not say so."""
    return value.astimezone(datetime.UTC) if isinstance(value, datetime.datetime) else value


def in_python(text: str, rows: list[Row]) -> tuple[Any, T.DataType]:
    """Return a measure of one match of all rows, and its type."""
    search, fields = match_recognize(f"MEASURES {text} AS m PATTERN (A+)").search(parse_ddl(FIELDS))
    own = list(zip(*map(to_values, record_batch(rows).columns), strict=True))
    try:
        (told,) = RowMatcher(search).run(RowState(own, list(range(len(own)))), MAX_WATERMARK_MS)
    except NoSuchValue:
        return REFUSED, fields[0].dataType
    return told.values[0], fields[0].dataType


@pytest.mark.parametrize("text", effort.sampled(EXPRESSIONS, 12))
def test_an_expression_of_a_row_is_in_python_what_it_is_in_spark(spark: SparkSession, text: str) -> None:
    wanted, kind = in_spark(spark, text, ROWS)
    if wanted == [REFUSED]:
        wanted = [in_spark(spark, text, [row])[0][0] for row in ROWS]
    found = [in_python(text, [row]) for row in ROWS]
    assert {own for _, own in found} == {kind}
    assert list(map(repr, wanted)) == [repr(value) for value, _ in found]


@pytest.mark.parametrize("text", effort.sampled(AGGREGATES, 6))
def test_an_aggregate_is_in_python_what_it_is_in_spark(spark: SparkSession, text: str) -> None:
    for rows in (ROWS, ROWS[:2], ROWS[6:7], ROWS[5:8]):
        (wanted,), kind = in_spark(spark, text, rows)
        assert in_python(text, rows)[1] == kind
        assert repr(in_python(text, rows)[0]) == repr(wanted)


@pytest.mark.parametrize("text", WRITTEN_BY_JAVA)
def test_what_java_writes_in_its_own_way_is_refused(text: str) -> None:
    with pytest.raises(PatternError, match="is not cast to string here"):
        in_python(text, ROWS[:1])
