"""What has expired does not stay in the state of a key group for ever."""

from __future__ import annotations

import random

import pytest

from flinkish_spark.functions.keyed import KeyedProcessFunction
from flinkish_spark.state import MapStateDescriptor, StateTtl, TtlUpdate, ValueStateDescriptor
from flinkish_spark.state.key_group import BasePolicy
from tests.support.effort import seeds
from tests.support.operator_harness import OperatorHarness

TTL_MS = 100
#: A base from the first entry on; the delta moves into a new one when it has half as many rows, and over 20.
BASED = BasePolicy(smallest_bytes=1, delta_share=0.5, smallest_delta_rows=20)


class Remember(KeyedProcessFunction):
    """Keeps a value and a map that expire, and a value that does not; reads only what it is told to."""

    def __init__(self, update: TtlUpdate = TtlUpdate.ON_CREATE_AND_WRITE) -> None:
        self.ttl = StateTtl(TTL_MS, update)

    def open(self, context):
        self.value = context.get_state(ValueStateDescriptor("value", "LONG", ttl=self.ttl))
        self.map = context.get_map_state(MapStateDescriptor("map", "STRING", "LONG", ttl=self.ttl))
        self.kept = context.get_state(ValueStateDescriptor("kept", "LONG"))

    def process_element(self, element, ctx):
        key, what = element
        if what == "read":
            yield key, self.value.value()
        else:
            self.value.update(1)
            self.map["a"] = 1
            self.kept.update(1)


def harness(policy, **given):
    return OperatorHarness(
        Remember(**given), key=lambda one: one[0], key_type="STRING", max_parallelism=1, policy=policy
    )


def fill(run, first, count, what="write"):
    run.push_all([((f"key-{number}", what), None) for number in range(first, first + count)])


def test_a_small_group_lets_go_at_once():
    run = harness(BasePolicy())
    fill(run, 0, 10)
    run.processing_time(TTL_MS - 1)
    fill(run, 10, 1)
    assert len(run.entries("value")) == len(run.entries("map")) == 11
    run.processing_time(TTL_MS)
    fill(run, 11, 1)
    assert set(run.entries("value")) == set(run.entries("map")) == {"key-10", "key-11"}
    assert len(run.entries("kept")) == 12


def test_a_base_that_has_expired_is_written_anew():
    run = harness(BASED)
    fill(run, 0, 200)
    run.processing_time(TTL_MS)
    fill(run, 1_000, 1)
    assert set(run.entries("value")) == set(run.entries("map")) == {"key-1000"}
    assert len(run.entries("kept")) == 201


def test_a_few_keys_that_come_again_and_again_do_not_keep_the_others():
    """Their entries alone would never fill the layer over the base."""
    run = harness(BASED, update=TtlUpdate.ON_READ_AND_WRITE)
    fill(run, 0, 200)
    for step in range(1, 12):
        run.processing_time(step * 30)
        fill(run, 0, 3, "read")
        assert run.take().rows == [(f"key-{number}", 1) for number in range(3)]
    assert set(run.entries("value")) == {"key-0", "key-1", "key-2"}


def test_a_base_that_has_become_small_is_no_base_any_more():
    policy = BasePolicy(smallest_bytes=20_000, delta_share=0.5, smallest_delta_rows=20)
    run = OperatorHarness(Only(), key=lambda one: one[0], key_type="STRING", max_parallelism=1, policy=policy)
    fill(run, 0, 1_000)
    assert len(run.snapshot().values[0]) < 2_000
    run.processing_time(TTL_MS)
    fill(run, 5_000, 1)
    assert set(run.entries("value")) == {"key-5000"}
    alone = OperatorHarness(
        Only(), key=lambda one: one[0], key_type="STRING", max_parallelism=1, restore=run.snapshot()
    )
    assert set(alone.entries("value")) == {"key-5000"}


class Only(KeyedProcessFunction):
    def open(self, context):
        self.value = context.get_state(ValueStateDescriptor("value", "LONG", ttl=StateTtl(TTL_MS)))

    def process_element(self, element, ctx):
        self.value.update(1)


@pytest.mark.parametrize("seed", seeds(5))
def test_nothing_that_lives_is_lost(seed):
    """Beside a model that knows when each key was written."""
    rng = random.Random(seed)
    policy = BasePolicy(smallest_bytes=rng.choice([1, 3_000]), delta_share=0.3, smallest_delta_rows=5)
    run, written, now_ms = harness(policy), {}, 0
    for _ in range(60):
        now_ms += rng.randrange(40)
        run.processing_time(now_ms)
        keys = rng.sample(range(60), rng.randrange(1, 12))
        run.push_all([((f"key-{number}", "write"), None) for number in keys])
        written.update(dict.fromkeys(keys, now_ms))
        living = {f"key-{number}" for number, at_ms in written.items() if at_ms + TTL_MS > now_ms}
        assert living <= set(run.entries("value"))
        asked = rng.sample(range(60), 8)
        run.push_all([((f"key-{number}", "read"), None) for number in asked])
        assert run.take().rows == [(f"key-{n}", 1 if f"key-{n}" in living else None) for n in asked]
    assert len(run.entries("kept")) == len(written)
