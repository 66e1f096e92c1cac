"""Mistakes in functions and triggers are errors that say what to do, not bare ones of Python's."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from flinkish_spark import (
    AggregateFunction,
    BroadcastProcessFunction,
    Emit,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    ReduceFunction,
    ReducingStateDescriptor,
    ValueStateDescriptor,
    VectorizedProcessFunction,
)
from flinkish_spark.core.errors import ConfigError, UserFunctionError
from flinkish_spark.functions.stream import CheckpointedProcessFunction, ProcessFunction
from flinkish_spark.joins import CoGroupFunction, LookupTable, ProcessJoinFunction
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import (
    EventTimeSessionWindows,
    EventTimeTrigger,
    ProcessWindowFunction,
    PurgingTrigger,
    Trigger,
    TriggerResult,
    TumblingEventTimeWindows,
)

ORDERS = "user STRING, amount LONG"
KNOWN, OTHER = ValueStateDescriptor("known", "LONG"), MapStateDescriptor("other", "STRING", "LONG")


class Asking(KeyedProcessFunction):
    """Keeps what `open` was given, and asks it for a state at each element."""

    def __init__(self, ask: Any) -> None:
        self.ask = ask

    def open(self, context: Any) -> None:
        self.context = context
        context.get_state(KNOWN)

    def process_element(self, value: Any, ctx: Any) -> Any:
        self.ask(self.context)
        yield (1,)


class AskingByBatch(VectorizedProcessFunction):
    def __init__(self, ask: Any) -> None:
        self.ask = ask

    def open(self, context: Any) -> None:
        self.context = context
        context.get_state(KNOWN)

    def process_batch(self, batch: Any, ctx: Any) -> Any:
        self.ask(self.context, ctx)
        return []


def asked(function: Any) -> ProgramHarness:
    harness = ProgramHarness.of(function, ORDERS, key="user", output="n LONG", uid="asks")
    harness.push(("ann", 1))
    return harness


@pytest.mark.parametrize(
    "function",
    [
        Asking(lambda context: context.get_map_state(OTHER)),
        AskingByBatch(lambda context, ctx: context.get_map_state(OTHER)),
        AskingByBatch(lambda context, ctx: ctx.state("other")),
    ],
)
def test_a_state_that_open_has_not_asked_for_is_refused_by_name(function: Any) -> None:
    with pytest.raises(
        ValueError, match=r"'asks' uses the state 'other', which its open\(\) has not declared"
    ):
        asked(function)


def test_a_state_that_open_has_asked_for_may_be_asked_for_again() -> None:
    harness = asked(Asking(lambda context: context.get_state(KNOWN).update(3)))
    assert harness.entries("known") == {"ann": 3}
    with pytest.raises(ValueError, match="declares the state 'known' as"):
        asked(Asking(lambda context: context.get_state(ValueStateDescriptor("known", "STRING"))))


def test_a_state_is_given_up_in_open_only() -> None:
    with pytest.raises(ValueError, match=r"drops the state 'old' too late: call it in open\(\)"):
        asked(Asking(lambda context: context.drop_state("old")))


class Silent(Trigger):
    """Returns nothing in one of its methods."""

    def __init__(self, silent_in: str, said: object = None) -> None:
        self.silent_in, self.said = silent_in, said

    def _said(self, method: str, otherwise: Any) -> Any:
        return self.said if method == self.silent_in else otherwise

    def on_element(self, value, timestamp_ms, window, ctx):
        ctx.register_event_time_timer(window.max_timestamp_ms)
        ctx.register_processing_time_timer(50)
        return self._said("on_element", TriggerResult.CONTINUE)

    def on_event_time(self, time_ms, window, ctx):
        return self._said("on_event_time", TriggerResult.FIRE)

    def on_processing_time(self, time_ms, window, ctx):
        return self._said("on_processing_time", TriggerResult.CONTINUE)

    def can_merge(self):
        return True

    def on_merge(self, window, ctx):
        pass

    def clear(self, window, ctx):
        pass


@pytest.mark.parametrize("method", ["on_element", "on_event_time", "on_processing_time"])
@pytest.mark.parametrize("windows", [TumblingEventTimeWindows(10), EventTimeSessionWindows(10)])
@pytest.mark.parametrize("wrap", [lambda one: one, PurgingTrigger])
@pytest.mark.parametrize("said", [None, True])
def test_a_trigger_that_returns_no_result_is_named(method: str, windows: Any, wrap: Any, said: Any) -> None:
    def program(orders: Any) -> Any:
        own = wrap(Silent(method, said))
        return (
            orders.key_by("user")
            .window(windows)
            .trigger(own)
            .reduce(lambda first, second: first, uid="first")
        )

    harness = ProgramHarness(program, ORDERS)
    with pytest.raises(
        TypeError, match=f"the trigger Silent has returned {said}; .* must return TriggerResult.CONTINUE, "
    ):
        harness.push(("ann", 1), 1)
        harness.processing_time(60)
        harness.watermark(100)


def test_window_functions_with_states_of_their_own_go_on() -> None:
    class Counted(ProcessWindowFunction):
        """Asks for its states at each window: those that `open` has asked for."""

        def open(self, context: Any) -> None:
            context.get_state(KNOWN)
            context.window_state.get_map_state(OTHER)

        def process(self, key, context, elements):
            known = context.global_state.get_state(KNOWN)
            known.update((known.value() or 0) + 1)
            fired = context.window_state.get_map_state(OTHER)
            fired["n"] = fired.get("n", 0) + 1
            yield key, known.value(), fired["n"]

        def clear(self, context):
            context.window_state.get_map_state(OTHER).clear()

    def program(orders: Any) -> Any:
        windows = orders.key_by("user").window(TumblingEventTimeWindows(10)).trigger(EventTimeTrigger())
        return windows.process(Counted(), output="user STRING, known LONG, n LONG", uid="counted")

    harness = ProgramHarness(program, ORDERS)
    for time_ms in (1, 11):
        harness.push(("ann", 1), time_ms)
        harness.watermark(time_ms + 8)
    assert [tuple(row) for row in harness.take().rows] == [("ann", 1, 1), ("ann", 2, 1)]


# -- functions that emit ----------------------------------------------------------------------------------


LATE = OutputTag("late", ORDERS)


def keyed(method: Any) -> Any:
    return type("Own", (KeyedProcessFunction,), {"process_element": method})()


def plain(method: Any) -> Any:
    return type("Own", (ProcessFunction,), {"process_element": method})()


def pushed(function: Any) -> ProgramHarness:
    more = {"key": "user"} if isinstance(function, KeyedProcessFunction) else {}
    harness = ProgramHarness.of(function, ORDERS, output=ORDERS, uid="own", side_outputs=[LATE], **more)
    harness.push(("ann", 1))
    return harness


@pytest.mark.parametrize("make", [keyed, plain])
def test_a_row_that_is_returned_and_not_yielded_says_what_to_write(make: Any) -> None:
    for returned in (("ann", 1), {"user": "ann", "amount": 1}):
        with pytest.raises(UserFunctionError, match=r"emitted a str; .* yields each, or returns a list"):
            pushed(make(lambda self, value, ctx, returned=returned: returned))


@pytest.mark.parametrize("make", [keyed, plain])
def test_a_side_output_is_named_by_its_tag_and_is_no_row(make: Any) -> None:
    with pytest.raises(TypeError, match=r"output\(\) got a str as its tag; give it the OutputTag"):
        pushed(make(lambda self, value, ctx: ctx.output("late", value)))
    # As PyFlink does it.
    with pytest.raises(UserFunctionError, match=r"is emitted to by ctx.output\(tag, row\)"):
        pushed(make(lambda self, value, ctx: [(LATE, value)]))
    assert pushed(make(lambda self, value, ctx: ctx.output(LATE, value))).take().side["late"]


async def waiting(self: Any, value: Any, ctx: Any) -> Any:
    return value


async def waiting_for_each(self: Any, value: Any, ctx: Any) -> Any:
    yield value


@pytest.mark.parametrize("method", [waiting, waiting_for_each])
def test_functions_that_nobody_awaits_are_refused(method: Any) -> None:
    for make in (keyed, plain):
        with pytest.raises(ConfigError, match=r"would never run\. It is async"):
            pushed(make(method))
    for call in ("flat_map", "key_by"):
        with pytest.raises(ConfigError, match="would never run"):
            ProgramHarness(lambda orders, call=call: getattr(orders, call)(method), ORDERS)
    counting = type("Counting", (CheckpointedProcessFunction,), {"process_element": method})()
    methods = {"process_element": lambda self, value, ctx: (), "process_broadcast_element": method}
    filling = type("Filling", (BroadcastProcessFunction,), methods)()
    for program in (
        lambda orders: orders.process_with_state(counting, output=ORDERS, uid="counted"),
        lambda orders: orders.connect(orders.broadcast(OTHER)).process(filling, output=ORDERS, uid="filled"),
    ):
        with pytest.raises(ConfigError, match="would never run"):
            ProgramHarness(program, ORDERS)


async def waiting_for_one(value: Any, accumulator: Any) -> Any:
    return accumulator


async def waiting_for_the_sum(self: Any, first: Any, second: Any) -> Any:
    return second


def test_functions_of_windows_and_folds_that_nobody_awaits_are_refused() -> None:
    methods: dict[str, Any] = {
        "create_accumulator": lambda self: 0,
        "add": lambda self, value, accumulator: accumulator,
        "get_result": lambda self, accumulator: (accumulator,),
    }
    adding = type("Adding", (AggregateFunction,), {**methods, "add": waiting_for_the_sum})()
    reducing = type("Reducing", (ReduceFunction,), {"reduce": waiting_for_the_sum})()
    processing = type("Processing", (ProcessWindowFunction,), {"process": waiting_for_each})()
    summed: dict[str, Any] = {"accumulator": "LONG", "output": "n LONG", "uid": "x"}
    windows: list[Any] = [
        lambda given: given.process(processing, output=ORDERS, uid="x"),
        lambda given: given.reduce(lambda one, other: other, processing, output=ORDERS, uid="x"),
    ]
    either: list[Any] = [
        lambda given: given.aggregate(adding, **summed),
        lambda given: given.reduce(reducing, uid="x"),
        lambda given: given.reduce(waiting_for_one, uid="x"),
    ]
    for fold in either:
        with pytest.raises(ConfigError, match=r"would never run\. It is async"):
            ProgramHarness(lambda orders, fold=fold: fold(orders.key_by("user")), ORDERS)
    for fold in [*either, *windows]:
        with pytest.raises(ConfigError, match=r"would never run\. It is async"):
            ProgramHarness(
                lambda orders, fold=fold: fold(orders.key_by("user").window(TumblingEventTimeWindows(60))),
                ORDERS,
            )
    with pytest.raises(ConfigError, match=r"the_sum\(\) of the Reducing that is given as reduce would never"):
        ReducingStateDescriptor("s", reducing, "LONG")


@pytest.mark.parametrize("method", [waiting, waiting_for_each])
def test_functions_of_joins_that_nobody_awaits_are_refused(method: Any) -> None:
    minutes = TumblingEventTimeWindows(60_000)
    pairs = type("Pairs", (ProcessJoinFunction,), {"process_element": method})()
    groups = type("Groups", (CoGroupFunction,), {"co_group": method})()
    table = type("Table", (LookupTable,), {"lookup": lambda self, keys: {}})()
    waiting_table = type("Waiting", (LookupTable,), {"lookup": method})()
    by_user: Any = {"key": lambda order: order.user}
    of_function: Any = {"function": pairs, "output": ORDERS}
    programs: list[Any] = [
        lambda left, right: left.interval_join(right, lower_ms=0, upper_ms=1, uid="x", **of_function),
        lambda left, right: left.join(right).window(minutes, uid="x", **of_function),
        lambda left, right: left.join(right).temporal(uid="x", **of_function),
        lambda left, right: left.join(right).co_group(minutes, groups, output=ORDERS, uid="x"),
    ]
    for join in programs:
        with pytest.raises(ConfigError, match=r"is given as (function|table) would never run\. It is async"):
            ProgramHarness(
                lambda orders, join=join: join(orders.key_by("user"), orders.key_by("user")), ORDERS
            )
    for given in ((table, of_function), (waiting_table, {})):
        with pytest.raises(ConfigError, match=r"is given as (function|table) would never run\. It is async"):
            ProgramHarness(
                lambda orders, given=given: orders.lookup_join(
                    given[0], "n LONG", name="found", **by_user, **given[1]
                ),
                ORDERS,
            )


@pytest.mark.parametrize("call", ["sum", "max_by", "reduce"])
@pytest.mark.parametrize("emit", ["PER_ELEMENT", "PER_KEY", None])
def test_a_text_chooses_no_way_of_emitting(call: str, emit: Any) -> None:
    given: Any = (lambda first, second: first) if call == "reduce" else "amount"

    def program(orders: Any) -> Any:
        return getattr(orders.key_by("user"), call)(given, uid="own", emit=emit)

    with pytest.raises(ConfigError, match=r"one of Emit\.PER_ELEMENT, Emit\.PER_KEY"):
        ProgramHarness(program, ORDERS)


def test_the_slide_of_a_count_window_is_named() -> None:
    with pytest.raises(ConfigError, match="slide is 0"):
        ProgramHarness(lambda orders: orders.key_by("user").count_window(2, 0), ORDERS)


@pytest.mark.parametrize("emit", Emit)
@pytest.mark.parametrize(("call", "days"), [("sum", 3), ("min", 1), ("max", 2), ("min_by", 1), ("max_by", 2)])
def test_spans_of_time_are_aggregated_on_both_ways(call: str, days: int, emit: Emit) -> None:
    def program(calls: Any) -> Any:
        return getattr(calls.key_by("user"), call)("lasted", uid="own", emit=emit)

    harness = ProgramHarness(program, "user STRING, lasted INTERVAL DAY TO SECOND")
    harness.push_all([(("ann", datetime.timedelta(days=one)), None) for one in (1, 2)])
    harness.push(("ann", None))
    assert tuple(harness.take().rows[-1]) == ("ann", datetime.timedelta(days=days))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        # Arrow would take them for microseconds, or days.
        ("TIMESTAMP", 1_577_836_800_000),
        ("DATE", 20_200_101),
        ("INTERVAL DAY TO SECOND", 1.5),
        # Arrow would make it UTC's, Spark keeps the wall clock's.
        (
            "TIMESTAMP_NTZ",
            datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        ),
    ],
)
def test_times_are_never_guessed(kind: str, value: Any) -> None:
    harness = ProgramHarness(lambda orders: orders.map(lambda order: (value,), output=f"at {kind}"), ORDERS)
    with pytest.raises(UserFunctionError, match=r"field 'at' of type .* cannot hold .*: it (is a n|has a)"):
        harness.push(("ann", 1))


def test_a_function_without_a_key_is_told_of_operator_list_state() -> None:
    class Wants(CheckpointedProcessFunction):
        def open(self, context: Any) -> None:
            context.get_list_state(ListStateDescriptor("seen", "LONG"))

        def process_element(self, value: Any, ctx: Any) -> Any:
            yield value

    with pytest.raises(TypeError, match=r"call get_operator_list_state\(.*\"seen\""):
        ProgramHarness.of(Wants(), ORDERS, output=ORDERS, uid="own").push(("ann", 1))
