"""Windows of tests: combinations by name, and a model that recomputes them by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from flinkish_spark.core.elements import OutputTag
from flinkish_spark.functions.keyed import AggregateFunction, ReduceFunction
from flinkish_spark.operators.process import KeyedStreamOperator
from flinkish_spark.operators.windowing import WindowOperator, window_operator
from flinkish_spark.state import ReducingStateDescriptor
from flinkish_spark.state.key_group import BasePolicy
from flinkish_spark.windows import (
    GLOBAL_WINDOW,
    AggregateWindow,
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    CountTrigger,
    DynamicEventTimeSessionWindows,
    DynamicProcessingTimeSessionWindows,
    EventTimeSessionWindows,
    GlobalWindows,
    ProcessingTimeSessionWindows,
    ProcessingTimeTrigger,
    ProcessWindow,
    ProcessWindowFunction,
    PurgingTrigger,
    ReduceWindow,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TimeEvictor,
    Trigger,
    TriggerResult,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowComputation,
    WindowSpec,
    count_window,
    sliding_count_window,
)
from tests.support.operator_harness import OperatorHarness

INPUT = "k STRING, n LONG"
LATE = OutputTag("late", INPUT)
#: Bases from the second entry on, and new ones all the time.
TINY = BasePolicy(smallest_bytes=1, delta_share=0.5, smallest_delta_rows=2)
INTERVAL_MS = 4
#: A step: elements (key, number, event time), a watermark, or a processing time.
Step = tuple[str, Any]


def gap_ms_of(element: Any) -> int:
    return 3 + element[1] % 5


def tumbling(time_ms: int, size: int, offset: int) -> Iterator[tuple[int, int]]:
    """Yield by trying; so the model shares no arithmetic with what it checks."""
    for start in range(time_ms - size, time_ms + 1):
        if (start - offset) % size == 0 and start <= time_ms < start + size:
            yield start, start + size


def sliding(time_ms: int, size: int, slide: int, offset: int) -> Iterator[tuple[int, int]]:
    for start in range(time_ms - size, time_ms + 1):
        if (start - offset) % slide == 0 and start <= time_ms < start + size:
            yield start, start + size


#: Name; assigners by event and processing time; windows of an element for the model; whether they merge.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Any, int], Iterable[Any]], bool]] = {
    "tumbling": (
        lambda: TumblingEventTimeWindows(10),
        lambda: TumblingProcessingTimeWindows(10),
        lambda e, t: tumbling(t, 10, 0),
        False,
    ),
    "tumbling with offset": (
        lambda: TumblingEventTimeWindows(10, -3),
        lambda: TumblingProcessingTimeWindows(10, -3),
        lambda e, t: tumbling(t, 10, -3),
        False,
    ),
    "sliding": (
        lambda: SlidingEventTimeWindows(12, 5),
        lambda: SlidingProcessingTimeWindows(12, 5),
        lambda e, t: sliding(t, 12, 5, 0),
        False,
    ),
    "sliding with holes": (
        lambda: SlidingEventTimeWindows(4, 6, 1),
        lambda: SlidingProcessingTimeWindows(4, 6, 1),
        lambda e, t: sliding(t, 4, 6, 1),
        False,
    ),
    "session": (
        lambda: EventTimeSessionWindows(5),
        lambda: ProcessingTimeSessionWindows(5),
        lambda e, t: [(t, t + 5)],
        True,
    ),
    "dynamic session": (
        lambda: DynamicEventTimeSessionWindows(gap_ms_of),
        lambda: DynamicProcessingTimeSessionWindows(gap_ms_of),
        lambda e, t: [(t, t + gap_ms_of(e))],
        True,
    ),
    "global": (GlobalWindows, GlobalWindows, lambda e, t: [GLOBAL_WINDOW], False),
    "count": (GlobalWindows, GlobalWindows, lambda e, t: [GLOBAL_WINDOW], False),
    "sliding count": (GlobalWindows, GlobalWindows, lambda e, t: [GLOBAL_WINDOW], False),
}
#: Windows that are more than an assigner.
COUNTED = {"count": count_window(3), "sliding count": sliding_count_window(3, 2)}
TRIGGERS = ("default", "count", "continuous")
#: With some kinds only: one of a user's, and the clock that the windows do not go by.
MORE_TRIGGERS = ("own", "processing time")
CLOCKS = ("event time", "processing time")
#: Fields of what a computation makes.
FIELDS = {
    "process": "k STRING, begin_ms LONG, end_ms LONG, numbers ARRAY<LONG>",
    "reduce": "k STRING, n LONG",
    "aggregate": "total LONG, n LONG",
}
COMPUTATIONS = tuple(FIELDS)


@dataclass(frozen=True)
class Combination:
    """One line of the table."""

    kind: str
    trigger: str
    clock: str
    lateness_ms: int
    is_discarding: bool
    computation: str = "process"
    evicts: bool = False
    retracts: bool = False

    def __str__(self) -> str:
        mode = "discarding" if self.is_discarding else "accumulating"
        late = f"lateness {self.lateness_ms}"
        evictor = "-evictor" if self.evicts else ""
        gone = "-retractions" if self.retracts else ""
        return f"{self.kind}-{self.trigger}-{self.clock}-{late}-{mode}-{self.computation}{evictor}{gone}"

    @property
    def by_event_time(self) -> bool:
        return self.clock == "event time"

    @property
    def has_end(self) -> bool:
        return KINDS[self.kind][0] is not GlobalWindows

    @property
    def merges(self) -> bool:
        return KINDS[self.kind][3]

    def spec(self) -> WindowSpec:
        if self.kind in COUNTED:
            return replace(COUNTED[self.kind], late_output=LATE)
        assigner = KINDS[self.kind][0 if self.by_event_time else 1]()
        continuous = ContinuousEventTimeTrigger if self.by_event_time else ContinuousProcessingTimeTrigger
        trigger = {
            "default": assigner.default_trigger(),
            "count": CountTrigger(3),
            "continuous": continuous(INTERVAL_MS),
            "own": EvenTrigger(self.clock),
            "processing time": ProcessingTimeTrigger(),
        }[self.trigger]
        if self.is_discarding:
            trigger = PurgingTrigger(trigger)
        evictor = TimeEvictor(6) if self.evicts else None
        field = "is_gone" if self.retracts else None
        return WindowSpec(assigner, trigger, evictor, self.lateness_ms, LATE, field)

    def computation_of(self) -> WindowComputation:
        if self.computation == "process":
            return ProcessWindow(Numbers())
        if self.computation == "reduce":
            return ReduceWindow(lambda a, b: (a.k, a.n + b.n))
        return AggregateWindow(Sum(), "total LONG, n LONG")

    def operator(self) -> WindowOperator:
        return window_operator(self.spec(), self.computation_of(), INPUT, FIELDS[self.computation])

    def run(self, operator: KeyedStreamOperator | None = None, **settings: Any) -> OperatorHarness:
        return OperatorHarness(
            operator or self.operator(),
            key=lambda e: e[0],
            key_type="STRING",
            max_parallelism=1,
            **settings,
        )

    def result(self, key: str, window: tuple[int, int], numbers: list[int]) -> Any:
        """Return the row that a firing with these numbers emits."""
        if self.computation == "process":
            return (key, *window, tuple(sorted(numbers)))
        if self.computation == "reduce":
            return (key, sum(numbers))
        return (sum(numbers), len(numbers))


TABLE = [
    Combination(*line)
    for line in itertools.product(KINDS, TRIGGERS, CLOCKS, (0, 7), (False, True))
    if line[0] not in COUNTED
    and not (line[0] == "global" and line[1] == "default")
    and not (line[2] == "processing time" and line[3])
    and not (line[0] == "global" and line[3])
]
TABLE += [
    Combination(kind, trigger, "event time", 7, is_discarding, computation, evicts)
    for kind, trigger in itertools.product(("tumbling", "sliding", "session"), TRIGGERS)
    for is_discarding in (False, True)
    for computation, evicts in itertools.product(COMPUTATIONS, (False, True))
    if (computation, evicts) != ("process", False)
]
TABLE += [
    Combination(kind, "own", clock, lateness_ms, is_discarding)
    for kind in ("tumbling", "sliding", "session", "global")
    for clock, lateness_ms in (("event time", 0), ("event time", 7), ("processing time", 0))
    for is_discarding in (False, True)
    if not (kind == "global" and lateness_ms)
]
TABLE += [
    Combination(kind, "processing time", "event time", lateness_ms, is_discarding)
    for kind, lateness_ms in itertools.product(("tumbling", "sliding", "session"), (0, 7))
    for is_discarding in (False, True)
]
TABLE += [
    Combination(kind, "default", clock, 0, kind == "count")
    for kind, clock in itertools.product(("global", *COUNTED), CLOCKS)
]
TABLE += [
    Combination(kind, trigger, "event time", 7, is_discarding, retracts=True)
    for kind, trigger in itertools.product(("tumbling", "sliding", "session"), (*TRIGGERS, "own"))
    for is_discarding in (False, True)
]
TABLE += [
    Combination("dynamic session", "default", "event time", 7, False, retracts=True),
    Combination("session", "continuous", "processing time", 0, False, retracts=True),
    Combination("session", "default", "event time", 7, False, "process", True, retracts=True),
    *(
        Combination("session", "default", "event time", 7, False, one, retracts=True)
        for one in COMPUTATIONS[1:]
    ),
]


class AddUp(ReduceFunction):
    def reduce(self, first, second):
        return first + second


class EvenTrigger(Trigger):
    """A user's: fires at even numbers, and at the window's end if something came since it fired."""

    def __init__(self, clock: str) -> None:
        self._by_event_time = clock == CLOCKS[0]
        self._news = ReducingStateDescriptor("news", AddUp(), "LONG")

    def states(self):
        return (self._news,)

    def on_element(self, value, timestamp_ms, window, ctx):
        news = ctx.get_partitioned_state(self._news)
        if value[1] % 2 == 0:
            news.clear()
            return TriggerResult.FIRE
        news.add(1)
        self._await_end(window, ctx)
        return TriggerResult.CONTINUE

    def on_event_time(self, time_ms, window, ctx):
        return self._at(time_ms, window, ctx)

    def on_processing_time(self, time_ms, window, ctx):
        return self._at(time_ms, window, ctx)

    def can_merge(self):
        return True

    def on_merge(self, window, ctx):
        ctx.merge_partitioned_state(self._news)
        self._await_end(window, ctx)

    def clear(self, window, ctx):
        ctx.get_partitioned_state(self._news).clear()
        ctx.delete_event_time_timer(window.max_timestamp_ms)
        ctx.delete_processing_time_timer(window.max_timestamp_ms)

    def _await_end(self, window, ctx):
        if not self._by_event_time:
            ctx.register_processing_time_timer(window.max_timestamp_ms)
        elif window.max_timestamp_ms > ctx.current_watermark():
            ctx.register_event_time_timer(window.max_timestamp_ms)

    def _at(self, time_ms, window, ctx):
        news = ctx.get_partitioned_state(self._news)
        if time_ms != window.max_timestamp_ms or news.get() is None:
            return TriggerResult.CONTINUE
        news.clear()
        return TriggerResult.FIRE


class Numbers(ProcessWindowFunction):
    def process(self, key, context, elements):
        yield (key, *context.window, tuple(sorted(element.n for element in elements)))


class Sum(AggregateFunction):
    def create_accumulator(self):
        return 0, 0

    def add(self, value, accumulator):
        return accumulator[0] + value[1], accumulator[1] + 1

    def get_result(self, accumulator):
        return accumulator

    def merge(self, first, second):
        return first[0] + second[0], first[1] + second[1]


def apply(harness: OperatorHarness, step: Step) -> None:
    """Do a step."""
    what, argument = step
    if what == "push":
        harness.push_all([((key, number), time_ms) for key, number, time_ms in argument])
    elif what == "watermark":
        harness.watermark(argument)
    elif argument >= harness.snapshot().processing_time_ms:
        harness.processing_time(argument)


def taken(harness: OperatorHarness) -> tuple[list[Any], list[Any]]:
    """Return sorted (row, time), and the late elements, as the model does."""
    output = harness.take()
    rows = sorted(zip(output.rows, output.times_ms, strict=True), key=repr)
    # Rows that are taken back come out of the state, where tuples are lists.
    rows = [(tuple(tuple(v) if isinstance(v, list) else v for v in row), time_ms) for row, time_ms in rows]
    return sorted(rows, key=repr), output.side.get("late", [])


def left(harness: OperatorHarness) -> dict[str, Any]:
    """Return all entries of all states that have any."""
    names = harness._run.states.descriptors
    return {name: entries for name in names if (entries := harness.entries(name))}
