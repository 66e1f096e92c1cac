"""Operators of joins and aggregates travel to workers before they are opened there."""

from __future__ import annotations

import pickle

import pytest
from pyspark import cloudpickle

from flinkish_spark.functions.aggregates import FieldAggregate, Fold
from flinkish_spark.joins import (
    CoGroupFunction,
    IntervalJoin,
    JoinType,
    TemporalJoin,
    WindowCoGroup,
    WindowJoin,
)
from flinkish_spark.operators.aggregates import ReduceOperator, make_element_reduce
from flinkish_spark.operators.columnar_aggregates import MergePartials, make_element_aggregation
from flinkish_spark.operators.joins import IntervalJoinOperator, TemporalJoinOperator, WindowCoGroupOperator
from flinkish_spark.windows import EventTimeSessionWindows, TumblingEventTimeWindows, WindowSpec
from tests.support.joins_support import END, LEFT, RIGHT, apply, harness, script

TUMBLING = WindowSpec(TumblingEventTimeWindows(10), allowed_lateness_ms=2)


class Lengths(CoGroupFunction):
    def co_group(self, key, context, lefts, rights):
        yield key, len(lefts), len(rights)


JOINS = {
    "interval": lambda: IntervalJoinOperator(IntervalJoin(LEFT, RIGHT, -2, 3, join_type=JoinType.FULL)),
    "temporal": lambda: TemporalJoinOperator(TemporalJoin(LEFT, RIGHT, is_deletion=lambda e: e[1] == 3)),
    "window": lambda: WindowCoGroupOperator(WindowJoin(LEFT, RIGHT, TUMBLING, JoinType.LEFT)),
    "sessions": lambda: WindowCoGroupOperator(
        WindowCoGroup(LEFT, RIGHT, WindowSpec(EventTimeSessionWindows(3)), Lengths())
    ),
}


@pytest.mark.parametrize("name", JOINS)
def test_a_join_travels_and_does_the_same_there(name) -> None:
    here, there = JOINS[name](), pickle.loads(cloudpickle.dumps(JOINS[name]()))
    plain, copied = harness(here), harness(there)
    rows = 0
    for step in [*script(3, 25), *END]:
        apply(plain, step)
        apply(copied, step)
        expected, output = plain.take(), copied.take()
        assert output == expected
        rows += len(output.rows)
    assert rows


def test_aggregates_travel() -> None:
    total = FieldAggregate(Fold.SUM, "n")
    one = pickle.loads(cloudpickle.dumps(ReduceOperator(make_element_reduce(total, LEFT), LEFT)))
    run = harness(one)
    run.push_all([(("a", 1), None), (("a", 2), None)])
    assert run.take().rows == [("a", 1), ("a", 3)]
    merging = pickle.loads(cloudpickle.dumps(MergePartials(make_element_aggregation(total, LEFT))))
    assert merging._aggregation.state_type() == "k string, n bigint"
