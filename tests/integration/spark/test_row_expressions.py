"""Expressions of row patterns, which Python evaluates, beside Spark's: the same values, types, refusals."""

from __future__ import annotations

import datetime
from decimal import Context, Decimal, Inexact
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from flinkish_spark.cep.match_recognize import match_recognize
from flinkish_spark.cep.rows import RowMatcher, RowState
from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.core.errors import PatternError
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


def frame_of(spark: SparkSession, rows: list[Row]) -> DataFrame:
    """Return rows as a relation that is local: it is evaluated without a job."""
    return spark.createDataFrame(pa.Table.from_batches([record_batch(rows)]))


def in_spark(frame: DataFrame, text: str) -> tuple[list[Any], T.DataType | None]:
    """Return the values, and their type; `REFUSED` in place of the values, or no type, if Spark refuses."""
    try:
        made = frame.selectExpr(f"{text.replace('VARCHAR', 'STRING')} AS m")
        kind = made.schema[0].dataType
    except PySparkException:
        return [], None
    try:
        return [_as_told(row.m, kind) for row in made.collect()], kind
    except PySparkException:
        return [REFUSED], kind


def _as_told(value: Any, kind: T.DataType) -> Any:
    """Return a value of Spark's as ours are told.

    PySpark's times are of the local zone and do not say so, and its decimals close to zero have a digit more
    than their type.
    """
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC)
    if isinstance(value, Decimal) and isinstance(kind, T.DecimalType):
        return value.quantize(Decimal(1).scaleb(-kind.scale), context=Context(prec=60, traps=[Inexact]))
    return value


def in_python(text: str, rows: list[Row]) -> tuple[Any, T.DataType]:
    """Return a measure of one match of all rows, and its type."""
    search, fields = match_recognize(f"MEASURES {text} AS m PATTERN (A+)").search(parse_ddl(FIELDS))
    own = list(zip(*map(to_values, record_batch(rows).columns), strict=True))
    try:
        (told,) = RowMatcher(search).run(RowState(own, list(range(len(own)))), MAX_WATERMARK_MS)
    except PatternError:
        return REFUSED, fields[0].dataType
    return told.values[0], fields[0].dataType


@pytest.mark.parametrize("text", effort.sampled(EXPRESSIONS, 12))
def test_an_expression_of_a_row_is_in_python_what_it_is_in_spark(spark: SparkSession, text: str) -> None:
    wanted, kind = in_spark(frame_of(spark, ROWS), text)
    if wanted == [REFUSED]:
        wanted = [in_spark(frame_of(spark, [row]), text)[0][0] for row in ROWS]
    found = [in_python(text, [row]) for row in ROWS]
    assert {own for _, own in found} == {kind}
    assert list(map(repr, wanted)) == [repr(value) for value, _ in found]


@pytest.mark.parametrize("text", effort.sampled(AGGREGATES, 6))
def test_an_aggregate_is_in_python_what_it_is_in_spark(spark: SparkSession, text: str) -> None:
    for rows in (ROWS, ROWS[:2], ROWS[6:7], ROWS[5:8]):
        # In one partition sums of DOUBLE are in the order of the rows, as ours are.
        (wanted,), kind = in_spark(frame_of(spark, rows).coalesce(1), text)
        assert in_python(text, rows)[1] == kind
        assert repr(in_python(text, rows)[0]) == repr(wanted)


@pytest.mark.parametrize("text", WRITTEN_BY_JAVA)
def test_what_java_writes_in_its_own_way_is_refused(text: str) -> None:
    with pytest.raises(PatternError, match="is not cast to string here"):
        in_python(text, ROWS[:1])
