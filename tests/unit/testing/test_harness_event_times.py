"""Columns of event times in a harness: those that a job takes, and no others."""

from __future__ import annotations

import datetime

import pytest

from flinkish_spark import KeyedProcessFunction, WatermarkStrategy
from flinkish_spark.core.errors import GraphError
from flinkish_spark.testing import ProgramHarness

BEFORE_1970 = datetime.datetime(1969, 12, 31, 23, 59, 59, 999_500, tzinfo=datetime.UTC)


class Times(KeyedProcessFunction):
    def process_element(self, value, ctx):
        yield (ctx.timestamp(),)


def program(orders):
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    keyed = orders.assign_timestamps_and_watermarks(strategy).key_by("user")
    return keyed.process(Times(), output="at_ms LONG", uid="times")


@pytest.mark.parametrize("kind", ["INT", "DOUBLE", "STRING", "DATE", "DECIMAL(20, 0)", "TIMESTAMP_NTZ"])
def test_a_column_that_a_job_refuses_is_refused_before_the_first_element(kind) -> None:
    with pytest.raises(GraphError, match=r"the event time at is a .*a TIMESTAMP, or a LONG"):
        ProgramHarness(program, f"user STRING, at {kind}")


@pytest.mark.parametrize(("kind", "at", "at_ms"), [("LONG", -7, -7), ("TIMESTAMP", BEFORE_1970, -1)])
def test_one_that_a_job_takes_is_taken(kind, at, at_ms) -> None:
    run = ProgramHarness(program, f"user STRING, at {kind}")
    run.push(("ann", at))
    assert run.take().rows == [(at_ms,)]
