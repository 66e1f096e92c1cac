"""What has expired goes, too, where a key group gets nothing more: the group is called for that."""

from __future__ import annotations

from collections import namedtuple

import pytest

from flinkish_spark.core.elements import MAX_WATERMARK_MS, Progress, TimeDomain
from flinkish_spark.functions.keyed import KeyedProcessFunction
from flinkish_spark.state import ListStateDescriptor, StateTtl, ValueStateDescriptor
from flinkish_spark.state.key_group import BasePolicy, GroupState
from flinkish_spark.testing import ProgramHarness
from tests.support.operator_harness import OperatorHarness
from tests.unit.checkpoint.test_time_keeper import Query, plan
from tests.unit.operators.test_timers_in_a_job import Tasks

Seen = namedtuple("Seen", "user at")
#: A base from the first entry on.
BASED = BasePolicy(smallest_bytes=1, delta_share=100)


class Keeps(KeyedProcessFunction):
    """A value for a second, a list for ten, a value for ever."""

    def open(self, context):
        self.short = context.get_state(ValueStateDescriptor("short", "LONG", ttl=StateTtl(1_000)))
        self.long = context.get_list_state(ListStateDescriptor("long", "LONG", StateTtl(10_000)))
        self.kept = context.get_state(ValueStateDescriptor("kept", "LONG"))

    def process_element(self, seen, ctx):
        self.short.update(1)
        self.long.add(seen.at)
        self.kept.update(1)


class Forever(KeyedProcessFunction):
    def open(self, context):
        self.kept = context.get_state(ValueStateDescriptor("kept", "LONG"))

    def process_element(self, seen, ctx):
        self.kept.update(1)


def group_of(harness, group=0):
    return GroupState(harness._layout, harness._values[group], harness.bases)


def call_ms(harness):
    return group_of(harness).next_call_ms(TimeDomain.PROCESSING_TIME)


@pytest.mark.parametrize("policy", [BasePolicy(), BASED])
def test_a_state_goes_when_all_of_it_has_expired(policy) -> None:
    run = OperatorHarness(
        Keeps(), key=lambda seen: seen.user, key_type="STRING", max_parallelism=1, policy=policy
    )
    for at_ms, user in ((0, "ann"), (300, "ben"), (310, "ann")):
        run.processing_time(at_ms)
        run.push(Seen(user, at_ms))
    # At the next quarter of a second behind that.
    assert call_ms(run) == 1_500
    run.processing_time(1_309)
    assert set(run.entries("short")) == {"ann", "ben"}
    run.processing_time(1_500)
    assert run.entries("short") == {}
    assert set(run.entries("long")) == set(run.entries("kept")) == {"ann", "ben"}
    assert call_ms(run) == 12_500
    run.processing_time(12_500)
    assert run.entries("long") == {} and set(run.entries("kept")) == {"ann", "ben"}
    assert call_ms(run) is None
    run.push(Seen("cem", 0))
    assert set(run.entries("kept")) == {"ann", "ben", "cem"} and call_ms(run) == 13_500


def test_a_group_without_a_time_to_live_is_not_called() -> None:
    run = OperatorHarness(Forever(), key=lambda seen: seen.user, key_type="STRING", max_parallelism=1)
    run.push(Seen("ann", 0))
    assert call_ms(run) is None


def test_a_time_beyond_all_times_is_never() -> None:
    run = OperatorHarness(Keeps(), key=lambda seen: seen.user, key_type="STRING", max_parallelism=1)
    run.processing_time(MAX_WATERMARK_MS - 1)
    run.push(Seen("ann", 0))
    assert call_ms(run) == MAX_WATERMARK_MS


def test_an_idle_stream_gets_a_few_micro_batches_and_then_none(tmp_path) -> None:
    """Key groups that got their last entries one after the other let go together."""
    query = Query(tmp_path, plan())
    tasks = Tasks(Keeps(), key=lambda seen: seen.user, key_type="STRING", max_parallelism=128)
    users = [f"user-{number}" for number in range(40)]
    for user in users:
        query.clock.now_ms += 10
        micro_batch(query, tasks, [Seen(user, 0)])
    assert len(tasks.entries("short")) == len(tasks.entries("long")) == 40
    ran = []
    for _ in range(3_000):
        query.clock.now_ms += 10
        query.keeper.wake()
        if query.is_wanted:
            ran.append(query.clock.now_ms)
            micro_batch(query, tasks, [])
    assert tasks.entries("short") == tasks.entries("long") == {}
    assert len(tasks.entries("kept")) == 40
    # Written from 1.01 to 1.4 s: values have expired by 2.4 s, lists by 11.4 s; then the quarter is awaited.
    assert ran == [2_250, 2_500, 12_500]


def micro_batch(query, tasks, given) -> None:
    (called,) = query.plan_next()
    tasks._time_ms = query.clock.now_ms
    progress = Progress(query.carried_ms, query.carried_ms, query.clock.now_ms)
    query.stage(*tasks.micro_batch(given, {group for _, group in called}, progress))


def test_a_program_of_a_test_lets_go_as_a_job_does() -> None:
    def program(orders):
        return orders.key_by("user").process(Keeps(), output="n LONG", uid="keeps")

    run = ProgramHarness(program, "user STRING, at LONG")
    run.push(("ann", 0))
    run.processing_time(999)
    assert run.entries("short", "keeps") == {"ann": 1}
    run.processing_time(1_250)
    assert run.entries("short", "keeps") == {} and run.entries("long", "keeps") == {"ann": [0]}
