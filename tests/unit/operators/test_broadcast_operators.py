"""Broadcast state: what each side may do with it, copies in partitions, what is applied to keyed state."""

from __future__ import annotations

import random

import pytest

from flinkish_spark.core.elements import MIN_WATERMARK_MS, OutputTag, Progress
from flinkish_spark.functions.keyed import BroadcastProcessFunction, KeyedBroadcastProcessFunction
from flinkish_spark.operators.broadcast import BroadcastRun
from flinkish_spark.operators.process import ElementError, Elements
from flinkish_spark.state import ListStateDescriptor, MapStateDescriptor, StateTtl, ValueStateDescriptor
from flinkish_spark.state.codec import FrameError, StateValueError
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.state.operator_state import BroadcastTables
from tests.support.effort import seeds
from tests.support.operator_harness import BroadcastHarness
from tests.support.windows_support import TINY

RULES = MapStateDescriptor("rules", "STRING", "least LONG, name STRING")
SEEN = MapStateDescriptor("seen", "LONG", "LONG")
TOTAL = ValueStateDescriptor("total", "LONG", default=0)
NEWS = OutputTag("news", "text STRING")


class Limits(KeyedBroadcastProcessFunction):
    """Adds what is above the least amount of its kind; a rule of the kind `reset` sets all totals to its."""

    def open(self, context):
        self.total = context.get_state(TOTAL)

    def process_element(self, value, ctx):
        least, name = ctx.get_broadcast_state(RULES).get(value[2], (0, "none"))
        if value[1] >= least:
            self.total.update(self.total.value() + value[1])
            yield value[0], self.total.value(), name
        ctx.timer_service().register_event_time_timer((ctx.timestamp() or 0) + 10)

    def process_broadcast_element(self, rule, ctx):
        kind, least = rule
        if kind == "reset":
            ctx.apply_to_keyed_state(TOTAL, lambda key, total: total.update(least))
        elif least is None:
            ctx.get_broadcast_state(RULES).remove(kind)
        else:
            ctx.get_broadcast_state(RULES)[kind] = (least, kind.upper())
        ctx.output(NEWS, kind)

    def on_timer(self, time_ms, ctx):
        yield "timer", ctx.get_current_key(), len(ctx.get_broadcast_state(RULES))


def make(function=None, descriptors=(RULES,), **given):
    return BroadcastHarness(
        function or Limits(),
        descriptors,
        key=lambda e: e[0],
        key_type="STRING",
        max_parallelism=4,
        policy=TINY,
        **given,
    )


class Model:
    def __init__(self):
        self.rules, self.totals, self.timers = {}, {}, set()

    def step(self, rules, elements):
        rows = []
        for kind, least in rules:
            if kind == "reset":
                self.totals = dict.fromkeys(self.totals, least)
            elif least is None:
                self.rules.pop(kind, None)
            else:
                self.rules[kind] = (least, kind.upper())
        for (key, amount, kind), time_ms in elements:
            least, name = self.rules.get(kind, (0, "none"))
            if amount >= least:
                self.totals[key] = self.totals.get(key, 0) + amount
                rows.append((key, self.totals[key], name))
            self.timers.add((time_ms + 10, key))
        return sorted(rows)

    def watermark(self, time_ms):
        due = {timer for timer in self.timers if timer[0] <= time_ms}
        self.timers -= due
        return sorted(("timer", key, len(self.rules)) for _, key in due)


@pytest.mark.parametrize("seed", seeds(6))
def test_both_sides_do_what_the_model_says_with_a_restore_at_another_parallelism_after_every_step(
    seed,
) -> None:
    """Behaviour 90: any partition's copy is everybody's."""
    chance, model, one, now = random.Random(seed), Model(), make(), 0
    for number in range(40):
        now += chance.choice((0, 3, 8))
        if chance.random() < 0.25:
            one.watermark(now)
            expected = model.watermark(now)
        else:
            rules = [
                (
                    kind := chance.choice(("x", "y", "reset")),
                    chance.choice((number, 5, 5 if kind == "reset" else None)),
                )
                for _ in range(chance.choice((0, 0, 1, 2)))
            ]
            elements = [
                ((chance.choice("abcdef"), chance.randrange(40), chance.choice("xy")), now)
                for _ in range(chance.randrange(4))
            ]
            one.micro_batch([(rule, None) for rule in rules], elements)
            expected = model.step(rules, elements)
        assert sorted(one.take().rows) == expected, number
        assert all(copy == model.rules for copy in one.copies(RULES))
        assert one.entries("total") == model.totals
        parallelism = chance.randrange(1, 5)
        one = make(restore=one.snapshot(), bases=one.bases, parallelism=parallelism)
    assert model.rules and model.totals


def test_a_micro_batch_that_fails_has_done_nothing() -> None:
    one = make(parallelism=3)
    one.micro_batch([(("x", 5), None)], [(("a", 7, "x"), 1)])
    before = one.snapshot()
    one.take()
    with pytest.raises(ElementError):
        one.micro_batch([(("x", 6), None)], [(("a", 9, "x"), 2), (("b", None, "x"), 3)])
    assert one.snapshot() == before and one.take().rows == []
    one.micro_batch([], [(("a", 5, "x"), 4)])
    assert one.take().rows == [("a", 12, "X")]


def test_the_copies_of_all_partitions_are_the_same_bytes() -> None:
    one = make(parallelism=3)
    one.micro_batch([(("x", 1), None), (("y", 2), None), (("x", None), None)], [])
    first, *others = one.snapshot().broadcast
    assert first is not None and all(copy == first for copy in others)
    assert one.take().side["news"] == ["x", "y", "x"] * 3


def test_the_element_side_cannot_write() -> None:
    class Writing(Limits):
        def process_element(self, value, ctx):
            value[1](ctx.get_broadcast_state(RULES))

    one = make(Writing())
    one.broadcast(("x", 1))
    for write in (
        lambda state: state.__setitem__("x", (1, "a")),
        lambda state: state.put("x", (1, "a")),
        lambda state: state.pop("x"),
        lambda state: state.clear(),
        lambda state: state.update(x=(1, "a")),
        lambda state: state.__delitem__("x"),
    ):
        with pytest.raises(ElementError, match="can be written in process_broadcast_element") as caught:
            one.push(("a", write, "x"))
        assert isinstance(caught.value.error, TypeError)
    assert one.copies(RULES) == [{"x": (1, "X")}] * 2


@pytest.mark.parametrize("of", ["value", "list", "map", "timer"])
def test_the_broadcast_side_has_no_key(of) -> None:
    class Keyed(Limits):
        def open(self, context):
            super().open(context)
            self.list = context.get_list_state(ListStateDescriptor("list", "LONG"))
            self.map = context.get_map_state(MapStateDescriptor("map", "LONG", "LONG"))

        def process_element(self, value, ctx):
            self.timers = ctx.timer_service()

        def process_broadcast_element(self, rule, ctx):
            if of == "value":
                self.total.update(1)
            elif of == "list":
                self.list.add(1)
            elif of == "map":
                self.map[1] = 1
            else:
                self.timers.register_event_time_timer(3)

    one = make(Keyed())
    one.push(("a", 1, "x"))
    with pytest.raises(ElementError, match="there is no current key") as caught:
        one.broadcast(("x", 1))
    assert caught.value.is_broadcast and isinstance(caught.value.error, TypeError)


def test_keyed_state_that_is_expired_is_not_applied_to() -> None:
    expiring = ValueStateDescriptor("old", "LONG", ttl=StateTtl(10))

    class Expiring(KeyedBroadcastProcessFunction):
        def open(self, context):
            self.state = context.get_state(expiring)

        def process_element(self, value, ctx):
            self.state.update(value[1])

        def process_broadcast_element(self, _, ctx):
            ctx.apply_to_keyed_state(expiring, lambda key, state: state.update(state.value() + 100))

    one = make(Expiring())
    one.push(("a", 1))
    one.processing_time(9)
    one.push(("b", 2))
    one.processing_time(10)
    # Another worker: it learns the time from this micro-batch.
    one = make(Expiring(), restore=one.snapshot(), bases=one.bases)
    one.broadcast("now")
    assert one.entries("old") == {"b": 102}


def test_what_is_applied_and_fails_names_state_and_key() -> None:
    class Failing(Limits):
        def process_broadcast_element(self, rule, ctx):
            ctx.apply_to_keyed_state(TOTAL, lambda key, total: 1 // 0)

    one = make(Failing())
    one.push(("a", 1, "x"))
    with pytest.raises(RuntimeError, match="state 'total' of the key 'a': ZeroDivisionError"):
        one.broadcast(("x", 1))


def test_a_copy_that_is_known_is_not_read_again_and_one_that_failed_is() -> None:
    class Failing(Limits):
        def process_broadcast_element(self, rule, ctx):
            super().process_broadcast_element(rule, ctx)
            if rule[1] == 13:
                raise ValueError("unlucky")

    one = make(Failing(), parallelism=1)
    side = one._keyed.side
    one.broadcast(("x", 1))
    tables = side.context.tables
    one.push(("a", 1, "x"))
    assert side.context.tables is tables
    with pytest.raises(ElementError):
        one.broadcast(("y", 13))
    one.push(("a", 1, "x"))
    assert side.context.tables is not tables
    assert one.copies(RULES) == [{"x": (1, "X")}]


def test_what_is_applied_must_be_declared() -> None:
    class Undeclared(Limits):
        def process_broadcast_element(self, rule, ctx):
            ctx.apply_to_keyed_state(ValueStateDescriptor("other", "LONG"), print)

    with pytest.raises(ElementError, match="which open"):
        make(Undeclared()).broadcast(("x", 1))


def test_a_broadcast_element_that_fails_is_named_and_nothing_is_kept() -> None:
    class Failing(Limits):
        def process_broadcast_element(self, rule, ctx):
            super().process_broadcast_element(rule, ctx)
            if rule[1] == 13:
                raise ValueError("unlucky")

    one = make(Failing())
    with pytest.raises(ElementError, match="unlucky") as caught:
        one.micro_batch([(("x", 1), None), (("y", 13), None)], [])
    assert caught.value.is_broadcast and caught.value.at == 1
    assert one.copies(RULES) == [{}, {}]


def test_broadcast_state_is_checked_when_it_is_stored_and_read() -> None:
    tables = BroadcastTables("op", [RULES, SEEN], None)
    tables.writable(SEEN)[1] = 2
    value = tables.dump()
    assert dict(BroadcastTables("op", [RULES, SEEN], value).readable(SEEN)) == {1: 2}
    with pytest.raises(StateMismatch, match=r"belongs to operator 'op' .*not to 'other'"):
        BroadcastTables("other", [SEEN], value)
    with pytest.raises(StateMismatch, match="'seen' is no longer declared"):
        BroadcastTables("op", [RULES], value)
    with pytest.raises(StateMismatch, match=r"stored as .*int64.* but declared as .*string"):
        BroadcastTables("op", [MapStateDescriptor("seen", "LONG", "STRING")], value)
    with pytest.raises(FrameError):
        BroadcastTables("op", [SEEN], value[:-1])
    tables.writable(SEEN)[2] = "two"
    with pytest.raises(StateValueError, match="'two'"):
        tables.dump()
    with pytest.raises(StateMismatch, match=r"no broadcast state 'x'.*Known: rules, seen"):
        tables.writable(MapStateDescriptor("x", "LONG", "LONG"))
    with pytest.raises(ValueError, match="takes no None"):
        tables.writable(SEEN)[3] = None
    with pytest.raises(StateMismatch, match="time to live"):
        BroadcastTables("op", [MapStateDescriptor("x", "LONG", "LONG", StateTtl(5))], None)


class Allowed(BroadcastProcessFunction):
    def process_element(self, value, ctx):
        if ctx.get_broadcast_state(SEEN).get(value, 0) < 10:
            yield value, ctx.timestamp(), ctx.current_watermark(), ctx.current_processing_time()
        else:
            ctx.output(NEWS, str(value))

    def process_broadcast_element(self, rule, ctx):
        ctx.get_broadcast_state(SEEN)[rule[0]] = rule[1]
        yield "rule", *rule, ctx.current_watermark()


def test_a_function_without_keys_has_broadcast_state_too() -> None:
    run, progress = BroadcastRun(Allowed(), [SEEN], "op", 4), Progress(MIN_WATERMARK_MS, 7, 100)
    nothing = Elements((), ())
    rules, elements = Elements([None], [(1, 50)], [3]), Elements([None] * 2, [1, 2], [8, 9])
    emitted, value = run.run(None, (nothing, rules), (nothing, elements), progress)
    assert emitted.rows == [("rule", 1, 50, 7), (2, 9, 7, 100)]
    assert emitted.times_ms == [3, 9]
    assert emitted.side == {"news": [("1", 8)]}
    assert value is not None
    again = BroadcastRun(Allowed(), [SEEN], "op", 4)
    elements = Elements([None], [1])
    emitted, unchanged = again.run(value, (nothing, nothing), (nothing, elements), progress)
    assert (emitted.rows, emitted.side, unchanged) == ([], {"news": [("1", None)]}, None)


def test_a_function_without_keys_has_no_keyed_state() -> None:
    class Keyed(Allowed):
        def open(self, context):
            context.get_state(TOTAL)

    with pytest.raises(TypeError, match="its stream has no key"):
        BroadcastRun(Keyed(), [SEEN], "op", 4)
