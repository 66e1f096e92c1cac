"""A value that can change has one owner: functions that change what they get make no difference to others.

Each program runs twice: with functions that change all that they are given, and with the same functions over
deep copies, which cannot disturb anybody. Both give the same, in one micro-batch and in many.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark import (
    AggregateFunction,
    AsyncDataStream,
    AsyncFunction,
    AsyncRetryStrategy,
    Emit,
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    ReducingStateDescriptor,
    StateTtl,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from flinkish_spark.cep import CEP, AfterMatchSkip, Pattern
from flinkish_spark.functions.watermark_strategy import WatermarkGenerator
from flinkish_spark.joins import CoGroupFunction, LookupCache, LookupTable, ProcessJoinFunction
from flinkish_spark.operators.aggregates import AggregateOperator
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.types.to_python import copy_if_mutable, copy_result
from flinkish_spark.windows import (
    CountEvictor,
    CountTrigger,
    EventTimeSessionWindows,
    GlobalWindows,
    ProcessWindowFunction,
    SlidingEventTimeWindows,
    Trigger,
    TriggerResult,
)
from tests.support import effort
from tests.support.operator_harness import OperatorHarness

ROWS = "k STRING, n LONG, xs ARRAY<LONG>, m MAP<STRING, ARRAY<LONG>>, s STRUCT<a: ARRAY<LONG>>, b BINARY"
TOLD = "told STRING"
Function = Callable[..., Any]


# -- functions that change what they get -----------------------------------------------------------------
def spoil(value: Any) -> Any:
    """Change all that can be changed in a value, and return it."""
    for part in value if isinstance(value, tuple | list) else ():
        spoil(part)
    if isinstance(value, dict):
        for part in value.values():
            spoil(part)
        value["spoilt"] = [len(value)]
    elif isinstance(value, list):
        value.append(len(value))
    return value


def told(*values: Any) -> tuple[str]:
    """Return a row that says what values are, and then change these."""
    row = (repr([tuple(one) if isinstance(one, tuple) else one for one in values]),)
    for one in values:
        spoil(one)
    return row


def over_copies(function: Function) -> Function:
    """Return the same function over copies of what it is given."""
    return lambda *given: copy.deepcopy(function(*copy.deepcopy(given)))


def extended(first: Any, second: Any) -> Any:
    """Add a record to another one in place: what P30 does."""
    first.xs.extend(second.xs)
    first.s["a"].extend(second.s["a"])
    first.m.update(second.m)
    spoil(second)
    return first


def taken_over(first: Any, second: Any) -> Any:
    """Let the second one be what both become, with parts of the first."""
    second.xs.extend(first.xs)
    second.m["first"] = first.xs
    return second


class Collected(AggregateFunction):
    """Adds in place, begins with one object for all, and gives away what it keeps."""

    def __init__(self, wrap: Function) -> None:
        self.zero: list[Any] = []
        self.wrap = wrap

    def create_accumulator(self) -> Any:
        return self.wrap(lambda: self.zero)()

    def add(self, value: Any, accumulator: Any) -> Any:
        return self.wrap(self._add)(value, accumulator)

    def _add(self, value: Any, accumulator: Any) -> Any:
        accumulator.append(value.xs)
        accumulator.append([value.xs.pop() if value.xs else -1])
        spoil(value.s)
        return accumulator

    def get_result(self, accumulator: Any) -> Any:
        return (repr(accumulator),)

    def merge(self, first: Any, second: Any) -> Any:
        first.extend(second)
        return first


class Windows(ProcessWindowFunction):
    def __init__(self, wrap: Function) -> None:
        self.wrap = wrap

    def process(self, key: Any, context: Any, elements: Any) -> Any:
        yield self.wrap(told)(*elements)


class Pairs(ProcessJoinFunction):
    def __init__(self, wrap: Function) -> None:
        self.wrap = wrap

    def process_element(self, left: Any, right: Any, context: Any) -> Any:
        yield self.wrap(told)(left, right)


class Groups(CoGroupFunction):
    def __init__(self, wrap: Function) -> None:
        self.wrap = wrap

    def co_group(self, key: Any, context: Any, lefts: Any, rights: Any) -> Any:
        yield self.wrap(told)(*lefts, *rights)


class Remembers(LookupTable):
    """Has its rows itself, and hands them out."""

    def __init__(self) -> None:
        self.rows = {key: [[key, [1, 2]]] for key in "ab"}

    def lookup(self, keys: Any) -> Any:
        return {key: self.rows[key] for key in keys}


class Attempts(AsyncFunction):
    def __init__(self, wrap: Function) -> None:
        self.wrap = wrap

    async def async_invoke(self, value: Any) -> Any:
        await asyncio.sleep(0)
        row = self.wrap(told)(value)
        from flinkish_spark.async_io.functions import current_call

        if current_call().attempt < 2:
            raise OSError
        return [row]


class Marked(Trigger):
    """Waits for the end, and changes each element on the way."""

    def __init__(self, wrap: Function) -> None:
        self.wrap = wrap

    def on_element(self, element: Any, timestamp_ms: Any, window: Any, ctx: Any) -> TriggerResult:
        self.wrap(spoil)(element)
        ctx.register_event_time_timer(window.max_timestamp_ms)
        return TriggerResult.CONTINUE

    def on_event_time(self, time_ms: int, window: Any, ctx: Any) -> TriggerResult:
        return TriggerResult.FIRE

    def on_processing_time(self, time_ms: int, window: Any, ctx: Any) -> TriggerResult:
        return TriggerResult.CONTINUE

    def clear(self, window: Any, ctx: Any) -> None:
        ctx.delete_event_time_timer(window.max_timestamp_ms)


RULES = MapStateDescriptor("rules", "STRING", "ARRAY<LONG>")


class Ruled(KeyedBroadcastProcessFunction):
    def __init__(self, wrap: Function) -> None:
        self.wrap = wrap

    def process_element(self, value: Any, ctx: Any) -> Any:
        rules = ctx.get_broadcast_state(RULES)
        yield self.wrap(told)(*(rules[name] for name in rules))

    def process_broadcast_element(self, value: Any, ctx: Any) -> Any:
        return ()


class Kept(KeyedProcessFunction):
    """Puts one object into several states, and goes on with it; changes all that it reads."""

    def __init__(self, ttl: StateTtl | None) -> None:
        self.ttl = ttl
        self.again: list[Any] = []

    def open(self, context: Any) -> None:
        nested = "ARRAY<ARRAY<LONG>>"
        self.one = context.get_state(ValueStateDescriptor("one", nested, ttl=self.ttl))
        self.two = context.get_state(ValueStateDescriptor("two", f"n LONG, at {nested}", ttl=self.ttl))
        self.many = context.get_list_state(ListStateDescriptor("many", nested, ttl=self.ttl))
        self.named = context.get_map_state(MapStateDescriptor("named", "STRING", nested, ttl=self.ttl))
        self.sums = [
            context.get_reducing_state(ReducingStateDescriptor(name, in_place, nested, ttl=self.ttl))
            for name in ("first", "second")
        ]

    def process_element(self, value: Any, ctx: Any) -> Any:
        # One object for all keys, and in all states.
        self.again[:] = [list(value.xs)]
        row = (value.n, self.again)
        found = [self.one.value(), self.two.value(), list(self.many), dict(self.named)]
        found += [state.get() for state in self.sums]
        yield (repr([tuple(one) if isinstance(one, tuple) else one for one in found]),)
        self._change(*found)
        for state in self.sums:
            state.add(self.again)
        self.one.update(self.again)
        self.two.update(row)
        self.many.add(self.again)
        self.many.append(self.again)
        self.named["a"] = self.again
        self.named["b"] = self.again
        # What is put is the caller's until the call is over.
        self.again.append([-1])

    @staticmethod
    def _change(one: Any, two: Any, many: Any, named: Any, *sums: Any) -> None:
        """Change what is read, and put nothing back."""
        for read in (one, two and two.at, *many, *named.values(), *sums):
            if read is not None:
                read.append([7])


def in_place(first: Any, second: Any) -> Any:
    first.extend(second)
    return first


# -- programs ----------------------------------------------------------------------------------------
Wrap = Callable[[Function], Function]
PROGRAMS: dict[str, Callable[[Wrap], Function]] = {}


def program(make: Any) -> Any:
    PROGRAMS[make.__name__] = make
    return make


def sliding(stream: Any) -> Any:
    return stream.key_by("k").window(SlidingEventTimeWindows(10, 5))


def last_three(stream: Any) -> Any:
    return stream.key_by("k").window(GlobalWindows()).trigger(CountTrigger(1)).evictor(CountEvictor(3))


@program
def reduced_in_a_loop(wrap: Wrap) -> Function:
    return lambda s: sliding(s).reduce(wrap(extended), uid="u")


@program
def reduced_with_timers(wrap: Wrap) -> Function:
    return lambda s: sliding(s).allowed_lateness(3).reduce(wrap(extended), uid="u")


@program
def reduced_to_the_second(wrap: Wrap) -> Function:
    return lambda s: sliding(s).reduce(wrap(taken_over), uid="u")


@program
def reduced_with_retractions(wrap: Wrap) -> Function:
    return lambda s: sliding(s).trigger(CountTrigger(1)).emit_retractions().reduce(wrap(extended), uid="u")


@program
def reduced_then_processed(wrap: Wrap) -> Function:
    return lambda s: (
        sliding(s).trigger(CountTrigger(1)).reduce(wrap(extended), Windows(wrap), output=TOLD, uid="u")
    )


@program
def aggregated_in_a_loop(wrap: Wrap) -> Function:
    return lambda s: sliding(s).aggregate(
        Collected(wrap), accumulator="ARRAY<ARRAY<LONG>>", output=TOLD, uid="u"
    )


@program
def aggregated_with_timers(wrap: Wrap) -> Function:
    return lambda s: (
        sliding(s)
        .allowed_lateness(3)
        .aggregate(Collected(wrap), accumulator="ARRAY<ARRAY<LONG>>", output=TOLD, uid="u")
    )


@program
def aggregated_sessions(wrap: Wrap) -> Function:
    windows = EventTimeSessionWindows(3)
    return lambda s: (
        s.key_by("k")
        .window(windows)
        .aggregate(Collected(wrap), accumulator="ARRAY<ARRAY<LONG>>", output=TOLD, uid="u")
    )


@program
def reduced_sessions_with_timers(wrap: Wrap) -> Function:
    return lambda s: (
        s.key_by("k").window(EventTimeSessionWindows(3)).allowed_lateness(2).reduce(wrap(extended), uid="u")
    )


@program
def reduced_over_what_an_evictor_leaves(wrap: Wrap) -> Function:
    return lambda s: last_three(s).reduce(wrap(extended), uid="u")


@program
def aggregated_over_what_an_evictor_leaves(wrap: Wrap) -> Function:
    return lambda s: last_three(s).aggregate(
        Collected(wrap), accumulator="ARRAY<ARRAY<LONG>>", output=TOLD, uid="u"
    )


@program
def processed(wrap: Wrap) -> Function:
    return lambda s: sliding(s).process(Windows(wrap), output=TOLD, uid="u")


@program
def processed_behind_a_trigger(wrap: Wrap) -> Function:
    return lambda s: sliding(s).trigger(Marked(wrap)).process(Windows(wrap), output=TOLD, uid="u")


@program
def running_reduction(wrap: Wrap) -> Function:
    return lambda s: s.key_by("k").reduce(wrap(extended), uid="u")


@program
def running_aggregate(wrap: Wrap) -> Function:
    return lambda s: s.key_by("k").aggregate(
        Collected(wrap), accumulator="ARRAY<ARRAY<LONG>>", output=TOLD, uid="u"
    )


@program
def filtered(wrap: Wrap) -> Function:
    return lambda s: (
        s.filter(wrap(lambda one: bool(spoil(one))))
        .key_by("k")
        .filter(wrap(lambda one: bool(spoil(one))), uid="u")
    )


@program
def joined_in_an_interval(wrap: Wrap) -> Function:
    return lambda s: (
        s.key_by("k")
        .join(s.key_by("k"))
        .interval(lower_ms=-5, upper_ms=5, function=Pairs(wrap), output=TOLD, uid="u")
    )


@program
def joined_in_windows(wrap: Wrap) -> Function:
    return lambda s: (
        s.key_by("k")
        .join(s.key_by("k"))
        .window(SlidingEventTimeWindows(10, 5), function=Pairs(wrap), output=TOLD, uid="u")
    )


@program
def grouped_in_windows(wrap: Wrap) -> Function:
    return lambda s: (
        s.key_by("k")
        .join(s.key_by("k"))
        .co_group(SlidingEventTimeWindows(10, 5), Groups(wrap), output=TOLD, uid="u")
    )


@program
def joined_with_versions(wrap: Wrap) -> Function:
    return lambda s: (
        s.key_by("k")
        .join(s.key_by("k"))
        .temporal(function=Pairs(wrap), is_deletion=wrap(lambda one: not spoil(one)), output=TOLD, uid="u")
    )


@program
def looked_up(wrap: Wrap) -> Function:
    def key(one: Any) -> Any:
        return spoil(one).k

    return lambda s: s.lookup_join(
        Remembers(), "name STRING, at ARRAY<LONG>", key=wrap(key), function=Pairs(wrap), output=TOLD,
        cache=LookupCache(1_000_000, 10),
    )  # fmt: skip


@program
def matched(wrap: Wrap) -> Function:
    def looks_back(one: Any, ctx: Any) -> bool:
        events = ctx.events_for("first")
        wrap(told)(one, *events)
        return bool(events)

    first = Pattern.begin("first", AfterMatchSkip.no_skip()).where(wrap(lambda one: bool(spoil(one))))
    rest = first.followed_by_any("second").where(looks_back)
    return lambda s: CEP.pattern(s.key_by("k"), rest).select(
        wrap(lambda match: told(*(one for events in match.values() for one in events))), output=TOLD, uid="u"
    )


@program
def matched_over_columns(wrap: Wrap) -> Function:
    first = Pattern.begin("first", AfterMatchSkip.no_skip())
    rest = first.followed_by_any("second")
    return lambda s: CEP.pattern(s.key_by("k"), rest).select(
        wrap(lambda match: told(*(one for events in match.values() for one in events))), output=TOLD, uid="u"
    )


@program
def asked_again(wrap: Wrap) -> Function:
    retry = AsyncRetryStrategy.fixed_delay(5, 1)
    return lambda s: AsyncDataStream.ordered_wait_with_retry(
        s, Attempts(wrap), 10_000, 5, retry, output=TOLD, uid="u"
    )


@program
def stamped(wrap: Wrap) -> Function:
    class Ends(WatermarkGenerator):
        def on_event(self, event: Any, timestamp_ms: int) -> int:
            assert "spoilt" not in event.m
            return timestamp_ms

    strategy = WatermarkStrategy.for_generator(Ends).with_timestamp_assigner(
        wrap(lambda one, known: spoil(one).n)
    )
    return lambda s: sliding(s.assign_timestamps_and_watermarks(strategy)).reduce(wrap(extended), uid="u")


LISTS = st.lists(st.integers(0, 9), max_size=2)
RECORDS = st.builds(
    lambda k, n, xs, m, a: ((k, n, xs, m, {"a": a}, b"b"), n),
    st.sampled_from("ab"), st.integers(0, 12), LISTS, st.dictionaries(st.sampled_from("xy"), LISTS), LISTS,
)  # fmt: skip


def ran(make: Function, records: list[Any], cuts: Iterator[int] | list[int]) -> list[str]:
    """Return the rows of a program over records in micro-batches that begin at these places."""
    harness = ProgramHarness(make, ROWS)
    bounds = [0, *sorted(set(cuts)), len(records)]
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            harness.push_all(records[begin:end])
    harness.watermark(1_000)
    return sorted(repr(tuple(row)) for row in harness.take().rows)


@pytest.mark.parametrize("name", PROGRAMS)
def test_functions_that_change_what_they_get_disturb_nobody(name: str) -> None:
    make = PROGRAMS[name]

    @settings(max_examples=effort.examples(12))
    @given(st.lists(RECORDS, min_size=1, max_size=6), st.lists(st.integers(1, 5), max_size=3))
    def check(records: list[Any], cuts: list[int]) -> None:
        records = sorted(records, key=lambda one: one[1])
        places = [one for one in cuts if one < len(records)]
        pure = ran(make(over_copies), records, [])
        for way in ([], places, range(1, len(records))):
            assert ran(make(lambda function: function), records, list(way)) == pure

    check()


# -- by hand -------------------------------------------------------------------------------------------
LATE = OutputTag("late", "k STRING, xs ARRAY<LONG>")


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("lateness_ms", [0, 3], ids=["in a loop", "with timers"])
def test_sliding_windows_reduce_in_place(cut: bool, lateness_ms: int) -> None:
    def windows(stream: Any) -> Any:
        sliding = stream.key_by("k").window(SlidingEventTimeWindows(10, 5)).allowed_lateness(lateness_ms)
        return sliding.reduce(lambda a, b: a.xs.extend(b.xs) or a, uid="u")

    harness = ProgramHarness(windows, "k STRING, xs ARRAY<LONG>")
    rows = [(("a", [0]), 6), (("a", [1]), 7)]
    for part in [rows[:1], rows[1:]] if cut else [rows]:
        harness.push_all(part)
    harness.watermark(100)
    assert [tuple(row) for row in harness.take().rows] == [("a", [0, 1]), ("a", [0, 1])]


@pytest.mark.parametrize("ttl", [None, StateTtl(1_000_000)], ids=["for ever", "with a time to live"])
def test_one_object_in_several_states_and_used_again(ttl: StateTtl | None) -> None:
    records: list[Any] = [((key, n, [n], {}, {"a": []}, b""), n) for n, key in enumerate("ababab")]

    def rows(sizes: list[int]) -> list[Any]:
        named = ProgramHarness.of(Kept(ttl), ROWS, key="k", output=TOLD, uid="u")
        at = 0
        for size in sizes:
            named.push_all(records[at : at + size])
            at += size
        return [row[0] for row in named.take().rows]

    alone = rows([1] * 6)
    # Of each key: nothing yet; and what stood in the states when the call before was over.
    assert alone[0] == alone[1] == "[None, None, [], {}, None, None]"
    # Both sums have added it in place, each to its own.
    one = "[[0], [-1]]"
    assert alone[2] == f"[{one}, (0, {one}), [{one}, {one}], {{'a': {one}, 'b': {one}}}, [[0]], [[0]]]"
    # What was read and changed is kept, but where another value was put then.
    old, new = "[[0], [-1], [7]]", "[[2], [-1]]"
    assert alone[4] == (
        f"[{new}, (2, {new}), [{old}, {old}, {new}, {new}], {{'a': {new}, 'b': {new}}}, "
        "[[0], [7], [2]], [[0], [7], [2]]]"
    )
    for sizes in ([6], [2, 4], [3, 3], [1, 5]):
        assert sorted(rows(sizes)) == sorted(alone)


def test_a_new_list_in_a_state_can_be_filled_in_the_call_that_puts_it() -> None:
    class Fills(KeyedProcessFunction):
        def open(self, context: Any) -> None:
            self.map = context.get_map_state(MapStateDescriptor("map", "STRING", "ARRAY<LONG>"))

        def process_element(self, value: Any, ctx: Any) -> Any:
            self.map.setdefault("all", []).append(value.n)
            found = self.map["all"]
            yield (repr(found),)

    harness = ProgramHarness.of(Fills(), "k STRING, n LONG", key="k", output=TOLD, uid="u")
    harness.push_all([(("a", 1), None), (("a", 2), None)])
    harness.push(("a", 3))
    assert [row[0] for row in harness.take().rows] == ["[1]", "[1, 2]", "[1, 2, 3]"]


def test_bytes_in_a_state_are_what_they_will_be() -> None:
    class Bytes(KeyedProcessFunction):
        def open(self, context: Any) -> None:
            self.value = context.get_state(ValueStateDescriptor("value", "BINARY"))
            self.list = context.get_list_state(ListStateDescriptor("list", "BINARY"))
            self.row = context.get_state(ValueStateDescriptor("row", "n LONG, b BINARY"))
            self.again = bytearray()

        def process_element(self, value: Any, ctx: Any) -> Any:
            yield (repr([self.value.value(), list(self.list), self.row.value()]),)
            self.again.append(65 + value.n)
            self.value.update(self.again)
            self.list.add(self.again)
            self.row.update((1, self.again))

    found = []
    for sizes in ([3], [1, 1, 1]):
        harness = ProgramHarness.of(Bytes(), "k STRING, n LONG", key="k", output=TOLD, uid="u")
        at = 0
        for size in sizes:
            harness.push_all([(("a", n), None) for n in range(at, at + size)])
            at += size
        found.append([row[0] for row in harness.take().rows])
    assert found[0][2] == "[b'AB', [b'A', b'AB'], Record(n=1, b=b'AB')]"
    # Where it is one micro-batch the object is the same, and the function has gone on with it.
    assert found[0][:2] == ["[None, [], None]", "[b'A', [b'A'], Record(n=1, b=b'A')]"]


def test_emitted_bytes_stay_as_they_were() -> None:
    def rows(one: Any) -> Iterator[Any]:
        filled = bytearray()
        for n in range(3):
            filled.append(65 + n)
            yield one.k, filled

    harness = ProgramHarness(lambda s: s.flat_map(rows, output="k STRING, b BINARY"), "k STRING")
    harness.push(("a",))
    assert [row[1] for row in harness.take().rows] == [b"A", b"AB", b"ABC"]


def test_rules_are_the_same_for_each_element() -> None:
    def fed(wrap: Wrap, sizes: list[int]) -> list[Any]:
        class Feeds(Ruled):
            def process_broadcast_element(self, value: Any, ctx: Any) -> Any:
                rules = ctx.get_broadcast_state(RULES)
                given = list(value.xs)
                rules["one"] = given
                rules["two"] = given
                rules["two"].append(9)

        harness = ProgramHarness.of(
            Feeds(wrap), "k STRING", "xs ARRAY<LONG>", key="k", output=TOLD, broadcast=[RULES], uid="u"
        )
        harness.push_all([(([1],), None)], 1)
        for size in sizes:
            harness.push_all([(("a",), None)] * size)
        return [row[0] for row in harness.take().rows]

    assert fed(lambda one: one, [3]) == fed(lambda one: one, [1, 2]) == fed(over_copies, [3])
    # In the call both names are one list, as anywhere in Python; from then on they are two.
    assert fed(over_copies, [1]) == ["[[1, 9], [1, 9]]"]


@dataclasses.dataclass
class Total:
    n: int
    parts: list[int]


def test_a_copy_is_made_only_of_what_can_change() -> None:
    flat = ("a", 1, None, b"b")
    assert copy_if_mutable(flat) is flat
    before = Total(1, [2])
    assert copy_result(before, before) is before
    made = copy_result((1, before.parts), (0, before.parts), None)
    assert made[1] is before.parts
    assert copy_result((1, before.parts), None)[1] is not before.parts
    shared = Total(0, [])
    assert copy_result(shared, before) is not shared


def test_keys_of_one_micro_batch_begin_with_their_own_where_they_are_merged() -> None:
    def aggregated(stream: Any) -> Any:
        return stream.key_by("k").aggregate(
            Collected(lambda function: function),
            accumulator="ARRAY<ARRAY<LONG>>",
            output=TOLD,
            emit=Emit.PER_KEY,
            uid="u",
        )

    harness = ProgramHarness(aggregated, ROWS)
    harness.push_all([((key, 1, [n], {}, {"a": []}, b""), None) for n, key in enumerate("abab")])
    assert sorted(row[0] for row in harness.take().rows) == [
        "[[], [0], [], [2]]",
        "[[], [1], [], [3]]",
    ]


def test_keys_begin_with_accumulators_of_their_own() -> None:
    harness = OperatorHarness(
        AggregateOperator(Collected(lambda function: function), "ARRAY<ARRAY<LONG>>"),
        key=lambda one: one.k,
        key_type="STRING",
    )

    @dataclasses.dataclass
    class Record:
        k: str
        xs: list[int]
        s: dict[str, Any]

    harness.push_all([(Record("a", [1], {}), None), (Record("b", [2], {}), None)])
    assert sorted(harness.take().rows) == [("[[], [1]]",), ("[[], [2]]",)]
