"""Accumulators as functions see them, outside of Spark, and what the driver makes of what tasks send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pyspark import cloudpickle

from flinkish_spark import (
    AverageAccumulator,
    DoubleCounter,
    Histogram,
    IntCounter,
    KeyedProcessFunction,
    LongCounter,
)
from flinkish_spark.bridge.accumulators import TaskTallies
from flinkish_spark.checkpoint.accumulators import AccumulatorKeeper, AccumulatorTotals
from flinkish_spark.core.accumulators import Accumulator, Tally, TallyParam, as_results, sum_counts
from flinkish_spark.core.errors import UserFunctionError
from flinkish_spark.protocol.accumulators import AccumulatorKind, AccumulatorValue
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.worker.functions import StatelessContext


def long(value: int) -> AccumulatorValue:
    return AccumulatorValue(AccumulatorKind.LONG_COUNTER, (str(value),))


@pytest.fixture(params=[lambda: StatelessContext("f"), lambda: KeyedStates("f", 4).view_for_function()])
def context(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_a_function_adds_and_asks(context: Any) -> None:
    seen = context.add_accumulator("seen", LongCounter())
    seen.add(2)
    seen.add()
    assert context.get_accumulator("seen") is context.get_long_counter("seen") is seen
    assert seen.get_local_value() == 3
    average = context.add_accumulator("average", AverageAccumulator())
    average.add(1)
    average.add(2)
    assert average.get_local_value() == 1.5
    kinds = (context.get_int_counter("i"), context.get_double_counter("d"), context.get_histogram("h"))
    assert [type(one) for one in kinds] == [IntCounter, DoubleCounter, Histogram]


def test_mistakes_are_named(context: Any) -> None:
    context.add_accumulator("seen", LongCounter())
    with pytest.raises(ValueError, match="'f' adds the accumulator 'seen' twice"):
        context.add_accumulator("seen", LongCounter())
    with pytest.raises(ValueError, match="is a LongCounter"):
        context.get_histogram("seen")
    with pytest.raises(KeyError):
        context.get_accumulator("other")
    for name in ("", "a\nb", 5, "x" * 201):
        with pytest.raises(ValueError, match="a name has 1 to 200 characters"):
            context.add_accumulator(name, LongCounter())

    class Own(Accumulator):
        pass

    for mine in (Own(), 5, LongCounter):
        with pytest.raises(ValueError, match="it must be one of flinkish_spark's"):
            context.add_accumulator("mine", mine)
    with pytest.raises(TypeError, match="whole number"):
        context.get_accumulator("seen").add(1.5)


def test_one_made_with_the_function_travels_with_it() -> None:
    made = cloudpickle.loads(cloudpickle.dumps(LongCounter()))
    StatelessContext("f").add_accumulator("seen", made).add(1)
    assert made.get_local_value() == 1


def test_in_a_harness_they_count_apart() -> None:
    class Counts(KeyedProcessFunction):
        def open(self, context):
            self.seen = context.get_long_counter("seen")

        def process_element(self, order, ctx):
            self.seen.add(1)
            yield order.user, self.seen.get_local_value()

    harness = ProgramHarness(
        lambda stream: stream.key_by("user").process(Counts(), output="user STRING, n LONG", uid="counts"),
        "user STRING",
    )
    harness.push_all([(("ann",), 0), (("ann",), 1)])
    assert [row.n for row in harness.take().rows] == [1, 2]


# -- the driver's ------------------------------------------------------------------------------------------


def test_what_a_repeated_task_says_again_counts_once() -> None:
    param = TallyParam()
    kind = AccumulatorKind.LONG_COUNTER.value
    tally = param.zero(Tally())
    for place, value in (("a/000000", 3), ("a/000001", 4), ("a/000000", 3), ("b/000000", 5)):
        tally = param.addInPlace(tally, Tally({place: {"seen": (kind, value)}}, {f"base of {place}"}))
    assert as_results(sum_counts(tally)) == {"seen": 12}
    assert tally.bases == {"base of a/000000", "base of a/000001", "base of b/000000"}


def test_two_kinds_under_one_name_end_the_job_by_name() -> None:
    class Context:
        def accumulator(self, zero: Any, param: Any) -> Any:
            self.value, self.aid = zero, 7
            return self

        def setLocalProperty(self, name: str, value: str) -> None:
            self.told = name, value

    session: Any = type("Session", (), {"sparkContext": Context()})()
    tallies = TaskTallies(session)
    carrier = session.sparkContext
    carrier.value.counts["old/0"] = {"n": ("LongCounter", 9)}
    carrier.value.bases.add("old")
    tallies.begin()
    assert carrier.told == ("flinkish.accumulators", "7")
    assert (tallies.collect(), tallies.bases()) == ({}, ())
    carrier.value.counts.update({"a/0": {"n": ("LongCounter", 1)}, "b/0": {"n": ("Histogram", {1: 1})}})
    with pytest.raises(UserFunctionError, match="'n' was added twice"):
        tallies.collect()


def staged(number: int, **values: int) -> StagedBatch:
    held = {name: long(value) for name, value in values.items()}
    return StagedBatch(Lineage(0), BatchId(number), OwnerEpoch(1), 1, (), (), accumulators=held)


def base(group: int, batch: int) -> str:
    return f"sums/sums/{group}-{batch}-00112233445566ff"


def test_a_checkpoint_has_what_was_counted_up_to_it_and_a_start_goes_on_from_there() -> None:
    began = AccumulatorTotals({"a": long(10)}, (base(1, 2), base(2, 2)))
    keeper = AccumulatorKeeper(began, [replace(staged(3, a=1), bases=(base(2, 3),))])
    keeper.on_staged(staged(4, a=1, b=5))
    keeper.on_staged(staged(5))
    keeper.on_staged(staged(6, b=1))
    keeper.on_staged(replace(staged(7), bases=(base(1, 7),)))
    assert as_results(keeper.find_totals(BatchId(3)).accumulators) == {"a": 11}
    assert as_results(keeper.find_totals(BatchId(5)).accumulators) == {"a": 12, "b": 5}
    assert as_results(keeper.find_totals(BatchId(6)).accumulators) == {"a": 12, "b": 6}
    assert keeper.find_totals(BatchId(6)).bases == (base(1, 2), base(2, 3))
    assert keeper.find_totals(BatchId(7)).bases == (base(1, 7), base(2, 3))
    # A rewind begins anew from what the checkpoint held.
    assert AccumulatorKeeper(began).find_totals(BatchId(3)) == began


def test_a_log_that_begins_anew_goes_on_with_accumulators_and_without_bases() -> None:
    held = {"a": long(10)}
    batches = (StagedBatch(Lineage(1), BatchId(3), OwnerEpoch(1), 1, (), ()),)
    told = {"accumulators": held, "bases": (base(1, 2),)}
    own = {"lineage": Lineage(1), "batches": batches, **told}
    decision = Decision(CheckpointId(2), Verdict.COMMIT, OwnerEpoch(1), 0, **own)
    assert AccumulatorTotals.from_decision(decision, Lineage(1)) == AccumulatorTotals(held, (base(1, 2),))
    assert AccumulatorTotals.from_decision(decision, Lineage(2)) == AccumulatorTotals(held)
    assert AccumulatorTotals.from_decision(None, Lineage(0)) == AccumulatorTotals()


def test_staged_micro_batches_and_decisions_keep_them() -> None:
    one = replace(staged(1, a=3), bases=(base(1, 1),))
    assert StagedBatch.from_json(one.to_json()) == one
    assert not {"accumulators", "bases"} & staged(1).to_json().keys()


def test_where_nothing_counts_it_is_refused() -> None:
    states = KeyedStates("f", 4).view_for_function()
    states.why_no_accumulators = "there is no job"
    for ask in (states.get_long_counter, lambda name: states.add_accumulator(name, LongCounter())):
        with pytest.raises(RuntimeError, match="'f' adds the accumulator 'seen', and there is no job"):
            ask("seen")
