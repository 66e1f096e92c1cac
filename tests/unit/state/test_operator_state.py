"""State and timers of operators, through the format in which they are stored."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.functions.keyed import KeyedProcessFunction
from flinkish_spark.state import (
    ListStateDescriptor,
    MapStateDescriptor,
    StateTtl,
    TtlUpdate,
    ValueStateDescriptor,
)
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.state.key_group import BasePolicy
from tests.support.effort import examples
from tests.support.operator_harness import OperatorHarness

#: Bases from the second entry on, and new ones all the time.
TINY = BasePolicy(smallest_bytes=1, delta_share=0.5, smallest_delta_rows=2)
NEVER = BasePolicy(smallest_bytes=1 << 40)


class Commands(KeyedProcessFunction):
    """Does what an element says: (key, command, argument)."""

    def open(self, context):
        self.value = context.get_state(ValueStateDescriptor("value", "LONG"))
        self.pair = context.get_state(ValueStateDescriptor("pair", "a LONG, b STRING"))
        self.list = context.get_list_state(ListStateDescriptor("list", "n LONG, s STRING"))
        self.map = context.get_map_state(MapStateDescriptor("map", "STRING", "DOUBLE"))

    def process_element(self, element, ctx):
        _, command, argument = element
        timers = ctx.timer_service()
        match command:
            case "set":
                self.value.update(argument)
                self.pair.update((argument, str(argument)))
            case "clear":
                self.value.clear()
                self.pair.clear()
                self.list.clear()
                self.map.clear()
            case "add":
                self.list.add((argument, f"<{argument}>"))
                self.map[str(argument % 3)] = argument / 2
            case "timer":
                timers.register_event_time_timer(argument)
            case "delete":
                timers.delete_event_time_timer(argument)
            case "processing":
                timers.register_processing_time_timer(argument)
        yield self.value.value(), self.pair.value(), self.list.get(), dict(self.map)

    def on_timer(self, time_ms, ctx):
        yield ctx.get_current_key(), time_ms, ctx.time_domain().value, self.value.value()


def harness(**settings):
    return OperatorHarness(Commands(), key=lambda e: e[0], key_type="LONG", max_parallelism=3, **settings)


COMMANDS = st.tuples(
    st.integers(0, 6),
    st.sampled_from(["set", "clear", "add", "timer", "delete", "processing"]),
    st.integers(0, 30),
)
STEPS = st.one_of(
    st.lists(COMMANDS, min_size=1, max_size=6),
    st.integers(0, 40).map(lambda time_ms: ("watermark", time_ms)),
    st.integers(0, 40).map(lambda time_ms: ("time", time_ms)),
    st.just("restore"),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_layers_and_restores_make_no_difference(steps) -> None:
    """What is in one piece for ever, and what moves into bases and is restored, does the same."""
    plain, layered = harness(policy=NEVER), harness(policy=TINY)
    clock = 0
    for step in steps:
        if step == "restore":
            layered = harness(policy=TINY, restore=layered.snapshot(), bases=layered.bases)
            continue
        for one in (plain, layered):
            if isinstance(step, list):
                one.push_all([(command, None) for command in step])
            elif step[0] == "watermark":
                one.watermark(step[1])
            else:
                one.processing_time(max(clock, step[1]))
        if isinstance(step, tuple) and step[0] == "time":
            clock = max(clock, step[1])
        assert plain.take() == layered.take()
        for name in ("value", "pair", "list", "map"):
            assert plain.entries(name) == layered.entries(name)
        assert plain.timer_count() == layered.timer_count()
    for one in (plain, layered):
        one.watermark(MAX_WATERMARK_MS)
    assert plain.take() == layered.take()
    assert plain.timer_count() == layered.timer_count()


def test_timers_fire_in_order_once_and_can_be_deleted() -> None:
    """Behaviour 161."""
    one = harness()
    for time_ms in (30, 10, 20, 10):
        one.push((1, "timer", time_ms))
    one.push((1, "delete", 20))
    one.push((1, "delete", 25))
    one.take()
    one.watermark(9)
    assert one.take().rows == []
    one.watermark(10)
    assert one.take().rows == [(1, 10, "EVENT_TIME", None)]
    one.watermark(10)
    one.push((1, "timer", 5))
    assert one.take().rows == [(None, None, [], {})]
    one.watermark(11)
    assert one.take().rows == [(1, 5, "EVENT_TIME", None)]
    one.watermark(MAX_WATERMARK_MS)
    assert one.take().rows == [(1, 30, "EVENT_TIME", None)]
    assert one.timer_count() == 0


@pytest.mark.parametrize("update", list(TtlUpdate))
def test_an_expired_entry_is_never_returned(update) -> None:
    class Expiring(KeyedProcessFunction):
        def open(self, context):
            ttl = StateTtl(ttl_ms=100, update=update)
            self.value = context.get_state(ValueStateDescriptor("value", "LONG", ttl=ttl))

        def process_element(self, element, ctx):
            if element is not None:
                self.value.update(element)
            yield self.value.value()

    one = OperatorHarness(Expiring(), key=lambda e: "k", key_type="STRING", policy=TINY)

    def at(time_ms, element=None):
        one.processing_time(time_ms)
        one.push(element)
        return one.take().rows[0]

    assert at(0, 7) == 7
    assert at(60) == 7
    is_read = update is TtlUpdate.ON_READ_AND_WRITE
    assert at(120) == (7 if is_read else None)
    assert at(219) == (7 if is_read else None)
    assert at(400) is None
    assert one.entries("value") == {}


def test_state_of_another_declaration_or_operator_is_refused() -> None:
    class Other(KeyedProcessFunction):
        def open(self, context):
            context.get_state(ValueStateDescriptor("value", "STRING"))
            context.get_state(ValueStateDescriptor("pair", "a LONG, b STRING"))

        def process_element(self, element, ctx):
            return None

    one = harness()
    one.push((1, "set", 5))
    other = OperatorHarness(
        Other(), key=lambda e: 1, key_type="LONG", restore=one.snapshot(), max_parallelism=3
    )
    with pytest.raises(StateMismatch, match=r"'value' is stored as int64 but declared as string"):
        other.push("x")
    other = OperatorHarness(
        Commands(), key=lambda e: 1, key_type="LONG", uid="b", restore=one.snapshot(), max_parallelism=3
    )
    with pytest.raises(StateMismatch, match="belongs to operator 'operator', not to 'b'"):
        other.push((1, "set", 5))


def test_a_value_with_one_field_is_a_tuple_too() -> None:
    class Single(KeyedProcessFunction):
        def open(self, context):
            self.value = context.get_state(ValueStateDescriptor("value", "n LONG"))

        def process_element(self, element, ctx):
            yield self.value.value()
            self.value.update((element,))

    one = OperatorHarness(Single(), key=lambda e: "k", key_type="STRING")
    one.push(1)
    one.push(None)
    one.push(3)
    assert one.take().rows == [None, (1,), (None,)]


def test_an_operator_says_the_time_of_what_it_emits_and_counts() -> None:
    class Saying(KeyedProcessFunction):
        def process_element(self, element, ctx):
            ctx.emit([element, element], element + 1)
            ctx.emit([element], None)
            ctx.count("seen")
            return [-element]

    one = OperatorHarness(Saying(), key=lambda e: "k", key_type="STRING")
    one.push_all([(1, 10), (2, 20)])
    output = one.take()
    assert output.rows == [1, 1, 1, -1, 2, 2, 2, -2]
    assert output.times_ms == [2, 2, None, 10, 3, 3, None, 20]
    assert output.counts == {"seen": 2}
