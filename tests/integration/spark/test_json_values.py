"""JSON in columns of Spark is exactly what stands there, of all types, or bad with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.session import session_time_zone
from flinkish_spark.connectors.plain_formats import read_json
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.json_columns import replace_months, restore_intervals
from tests.support.json_cases import BAD, EXACT, NEVER, NOT_ONE, SCHEMA, TYPES


def read(spark: Any, schema: str, texts: list[str | None], *shown: Column) -> list[Any]:
    """Return columns of the fields, which are in the column `row`, and of what is wrong."""
    fields, time_zone = parse_ddl(schema), session_time_zone(spark)
    kind = T.StructType([T.StructField("read", replace_months(fields, T.IntegerType())), *_BESIDE])

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found, why = read_json(batch.column("value").cast(pa.binary()), fields, "the value", time_zone)
            yield pa.record_batch([found, why, batch.column("number")], names=kind.names)

    frame = spark.createDataFrame([*enumerate(texts)], "number INT, value STRING").mapInArrow(rows, kind)
    frame = frame.withColumn("row", restore_intervals(F.col("read"), fields))
    assert frame.schema["row"].dataType == fields
    return frame.orderBy("number").select(*shown, "why").collect()


_BESIDE = (T.StructField("why", T.StringType()), T.StructField("number", T.IntegerType()))


def test_values_are_exact_or_bad(spark: Any) -> None:
    bad = [f'{{"{column}": {value}}}' for column, value in (*BAD, *NEVER)] + [*NOT_ONE]
    columns = [F.col(f"row.{name}").cast("string").alias(name) for name in TYPES]
    rows = read(spark, SCHEMA, [case.record for case in EXACT] + bad, *columns)
    good, others = rows[: len(EXACT)], rows[len(EXACT) :]
    found = [(case.record, row.why, row[case.column]) for case, row in zip(EXACT, good, strict=True)]
    assert found == [(case.record, None, case.shown) for case in EXACT]
    for text, row in zip(bad, others, strict=True):
        assert row.why.startswith("the value ") and row[:-1] == (None,) * len(TYPES), text


def test_null_is_null_and_a_reason_is_said_once(spark: Any) -> None:
    rows = read(spark, "l LONG", ['{"l":1}', None, "[1]", "{}", '{"l":"x"}'], F.col("row.l").alias("l"))
    assert [(row.l, row.why) for row in rows] == [
        (1, None),
        (None, None),
        (None, "the value is no JSON object"),
        (None, None),
        (None, "the value cannot be read: its field 'l' is \"x\", which is no bigint: it is no whole number"),
    ]


#: Seconds since 1970 of texts in Berlin; clocks went from 02:00 to 03:00 in March, back in October.
IN_BERLIN = {
    "2026-03-29T01:59:59": 1774745999,
    "2026-03-29T02:00:00": None,
    "2026-03-29T02:30:00": None,
    "2026-03-29 2:59:59.999999": None,
    "2026-03-29T03:00:00": 1774746000,
    "2026-03-29T02:30:00+01:00": 1774747800,
    "2026-10-25T02:30:00": 1792888200,
    "2026-10-25T02:30:00+01:00": 1792891800,
}


@pytest.fixture
def in_berlin(spark: Any) -> Iterator[None]:
    own = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    yield
    spark.conf.set("spark.sql.session.timeZone", own)


def test_a_time_that_no_clock_of_the_session_has_shown_is_bad(spark: Any, in_berlin: None) -> None:
    texts: list[str | None] = [f'{{"at":"{text}"}}' for text in IN_BERLIN]
    rows = read(spark, "at TIMESTAMP", texts, F.unix_seconds("row.at").alias("s"))
    assert [row.s for row in rows] == list(IN_BERLIN.values())
    assert [row.why is None for row in rows] == [at is not None for at in IN_BERLIN.values()]
