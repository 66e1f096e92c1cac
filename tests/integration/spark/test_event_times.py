"""Times of records, and how far each channel is, by columns, expressions, functions and generators."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import functions as F

from flinkish_spark import WatermarkGenerator, WatermarkStrategy
from flinkish_spark.core.errors import GraphError
from flinkish_spark.planning.between import RecordStream, assign_times, transform_records
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.columns import Origins

BOUNDED = WatermarkStrategy.for_bounded_out_of_orderness(0)


class Odd(WatermarkGenerator):
    """Emits odd times, and at the end the number of records."""

    def __init__(self) -> None:
        self.count = 0

    def on_event(self, event: Any, timestamp_ms: int) -> int | None:
        self.count += 1
        return timestamp_ms if timestamp_ms % 2 else None

    def on_periodic(self) -> int | None:
        return 1_000 * self.count


@pytest.fixture
def stream(spark: Any) -> RecordStream:
    values = [("a", 5, 0, 0), ("b", 8, 0, 1), ("c", 7, 1, 0), ("d", 6, 1, 1)]
    frame = spark.createDataFrame(
        values, f"name STRING, at LONG, {C.CHANNEL} LONG, {C.SEQUENCE} LONG"
    ).coalesce(1)
    return RecordStream("files", frame, Origins(), lambda: frame, frozenset({0}))


def times(found: RecordStream, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in found.frame.orderBy("name").select("name", *columns).collect()]


def test_times_come_from_columns_expressions_and_functions(spark: Any, stream: RecordStream) -> None:
    wanted = [("a", 5), ("b", 8), ("c", 7), ("d", 6)]
    assert times(assign_times(stream, BOUNDED.with_timestamp_assigner("at")), C.TIME) == wanted
    expression = BOUNDED.with_timestamp_assigner(F.timestamp_millis("at"))
    assert times(assign_times(stream, expression), C.TIME) == wanted
    named = assign_times(
        stream, BOUNDED.with_timestamp_assigner(lambda record, known: record.at + (known or 0))
    )
    assert times(named, C.TIME) == wanted
    again = assign_times(named, BOUNDED.with_timestamp_assigner(lambda record, known: known * 10))
    assert times(again, C.TIME) == [(name, at * 10) for name, at in wanted]


def test_a_generator_marks_how_far_each_channel_is(stream: RecordStream) -> None:
    marked = assign_times(stream, WatermarkStrategy.for_generator(Odd).with_timestamp_assigner("at"))
    assert times(marked, C.TIME, C.MARK) == [("a", 5, 5), ("b", 8, 2_000), ("c", 7, 7), ("d", 6, 2_000)]
    plain = assign_times(marked, BOUNDED.with_timestamp_assigner("at"))
    assert C.MARK not in plain.frame.columns


def test_a_record_without_a_time_fails_the_job(spark: Any, stream: RecordStream) -> None:
    nothing = assign_times(stream, BOUNDED.with_timestamp_assigner(F.lit(None).cast("long")))
    with pytest.raises(Exception, match="its event time is null"):
        times(nothing, C.TIME)


def test_what_is_no_time_is_refused(stream: RecordStream) -> None:
    for strategy, why in (
        (BOUNDED.with_timestamp_assigner("when"), "no column 'when'"),
        (BOUNDED.with_timestamp_assigner("name"), "is a string"),
        (BOUNDED, "no time of their own"),
    ):
        with pytest.raises(GraphError, match=why):
            assign_times(stream, strategy)


def test_a_transform_must_keep_the_times(stream: RecordStream) -> None:
    timed = assign_times(stream, BOUNDED.with_timestamp_assigner("at"))
    kept = transform_records(timed, lambda df: df.withColumn("more", F.lit(1)))
    assert times(kept, C.TIME)[0] == ("a", 5) and kept.has_channels
    chosen = transform_records(timed, lambda df: df.select("name"))
    assert times(chosen, C.TIME)[0] == ("a", 5) and chosen.has_channels and chosen.schema.names == ["name"]
    with pytest.raises(GraphError, match="dropped the event times"):
        transform_records(timed, lambda df: df.coalesce(1).select("name"))
    assert transform_records(stream, lambda df: df.select("name")).has_channels
    assert not transform_records(stream, lambda df: df.coalesce(1).select("name")).has_channels


def test_what_a_transform_drops_leaves_its_time_if_it_looks_at_each_row(stream: RecordStream) -> None:
    timed = assign_times(stream, BOUNDED.with_timestamp_assigner("at"))
    named = F.when(F.col("at") > 6, F.raise_error(F.lit("it was dropped"))).otherwise(F.col("name"))
    early = transform_records(timed, lambda df: df.where("at < 7").select(named.alias("name"), "at"))
    only_a = transform_records(early, lambda df: df.where("name = 'a'").withColumn("more", F.length("name")))
    found = only_a.frame.orderBy(C.CHANNEL, C.TIME).select(C.CHANNEL, C.SEQUENCE, C.TIME, "name", "more")
    left = [(0, None, 8, None, None), (1, None, 6, None, None), (1, None, 7, None, None)]
    assert [tuple(row) for row in found.collect()] == [(0, 0, 5, "a", 1), *left]
    assert early.has_kept_times and only_a.has_kept_times and not only_a.schema["name"].metadata
    apart = transform_records(only_a, lambda df: df.coalesce(1).withColumn("name", F.upper("name")))
    assert times(apart, C.TIME) == [("A", 5)] and not apart.has_kept_times
