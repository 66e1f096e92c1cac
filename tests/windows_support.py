"""Windows of tests: combinations by name, and a model that recomputes them by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.functions import AggregateFunction
from flinkish_spark.operators.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, OutputTag
from flinkish_spark.operators.group_state import BasePolicy
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator
from flinkish_spark.operators.window_operator import WindowOperator, window_operator
from flinkish_spark.testing.operator_harness import OperatorHarness
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
    ProcessWindow,
    ProcessWindowFunction,
    PurgingTrigger,
    ReduceWindow,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TimeEvictor,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowComputation,
    WindowSpec,
)

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
}
TRIGGERS = ("default", "count", "continuous")
CLOCKS = ("event time", "processing time")
COMPUTATIONS = ("process", "reduce", "aggregate")


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

    def __str__(self) -> str:
        mode = "discarding" if self.is_discarding else "accumulating"
        late = f"lateness {self.lateness_ms}"
        evictor = "-evictor" if self.evicts else ""
        return f"{self.kind}-{self.trigger}-{self.clock}-{late}-{mode}-{self.computation}{evictor}"

    @property
    def by_event_time(self) -> bool:
        return self.clock == "event time"

    @property
    def merges(self) -> bool:
        return KINDS[self.kind][3]

    def spec(self) -> WindowSpec:
        assigner = KINDS[self.kind][0 if self.by_event_time else 1]()
        continuous = ContinuousEventTimeTrigger if self.by_event_time else ContinuousProcessingTimeTrigger
        trigger = {
            "default": assigner.default_trigger(),
            "count": CountTrigger(3),
            "continuous": continuous(INTERVAL_MS),
        }[self.trigger]
        if self.is_discarding:
            trigger = PurgingTrigger(trigger)
        evictor = TimeEvictor(6) if self.evicts else None
        return WindowSpec(assigner, trigger, evictor, self.lateness_ms, LATE)

    def computation_of(self) -> WindowComputation:
        if self.computation == "process":
            return ProcessWindow(Numbers())
        if self.computation == "reduce":
            return ReduceWindow(lambda a, b: (a.k, a.n + b.n))
        return AggregateWindow(Sum(), "total LONG, n LONG")

    def operator(self) -> WindowOperator:
        return window_operator(self.spec(), self.computation_of(), INPUT)

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
    if not (line[0] == "global" and line[1] == "default")
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


@dataclass
class Item:
    """An element in one window, as the model sees it."""

    key: str
    number: int
    time_ms: int | None
    own: tuple[int, int]
    is_gone: bool = False
    is_counted: bool = False
    planned_ms: int | None = None


@dataclass
class Model:
    """Recomputes all windows from all elements at each step."""

    of: Combination
    items: list[Item] = field(default_factory=list)
    watermark_ms: int = MIN_WATERMARK_MS
    clock_ms: int = 0
    rows: list[tuple[Any, int]] = field(default_factory=list)
    late: list[Any] = field(default_factory=list)

    def step(self, step: Step) -> tuple[list[Any], list[Any]]:
        """Return sorted (row, time) and the late elements."""
        self.rows, self.late = [], []
        what, argument = step
        before = self.now_ms
        if what == "watermark":
            if argument <= self.watermark_ms:
                return [], []
            self.watermark_ms = argument
        elif what == "time":
            if argument < self.clock_ms:
                return [], []
            self.clock_ms = argument
        self._advance(before)
        for element in argument if what == "push" else ():
            self._add(*element)
        return sorted(self.rows, key=repr), self.late

    @property
    def now_ms(self) -> int:
        return self.watermark_ms if self.of.by_event_time else self.clock_ms

    def _groups(self) -> list[tuple[str, tuple[int, int], list[Item]]]:
        """Return key, window and items of all windows."""
        groups: list[tuple[str, tuple[int, int], list[Item]]] = []
        for item in sorted(self.items, key=lambda item: (item.key, item.own)):
            if groups and groups[-1][0] == item.key and self._is_one(groups[-1][1], item.own):
                key, window, items = groups.pop()
                groups.append((key, (window[0], max(window[1], item.own[1])), [*items, item]))
            else:
                groups.append((item.key, item.own, [item]))
        return groups

    def _is_one(self, window: tuple[int, int], other: tuple[int, int]) -> bool:
        return other[0] <= window[1] if self.of.merges else window == other

    @staticmethod
    def _last_ms(window: tuple[int, int]) -> int:
        return MAX_WATERMARK_MS if window[1] == MAX_WATERMARK_MS else window[1] - 1

    def _over_ms(self, window: tuple[int, int]) -> int:
        return self._last_ms(window) + (self.of.lateness_ms if self.of.by_event_time else 0)

    def _add(self, key: str, number: int, time_ms: int) -> None:
        windows = KINDS[self.of.kind][2]((key, number), time_ms if self.of.by_event_time else self.clock_ms)
        is_taken = False
        for own in windows:
            added = Item(key, number, time_ms, own)
            self.items.append(added)
            window, items = next((w, i) for _, w, i in self._groups() if any(one is added for one in i))
            if self.of.by_event_time and self.of.kind != "global" and self._over_ms(window) <= self.now_ms:
                self.items.remove(added)
                continue
            is_taken = True
            self._on_element(key, window, items, time_ms)
        is_late = self.of.by_event_time and self.of.kind != "global"
        if not is_taken and is_late and time_ms + self.of.lateness_ms <= self.now_ms:
            self.late.append((key, number))

    def _on_element(self, key: str, window: tuple[int, int], items: list[Item], time_ms: int) -> None:
        if self.of.trigger == "count":
            uncounted = [item for item in items if not item.is_counted]
            if len(uncounted) >= 3:
                self._fire(key, window, items)
                for item in uncounted:
                    item.is_counted = True
        elif self.of.by_event_time and self._last_ms(window) <= self.now_ms:
            self._fire(key, window, items)
        elif self.of.trigger == "continuous" and all(item.planned_ms is None for item in items):
            begin_ms = time_ms if self.of.by_event_time else self.clock_ms
            following = next(t for t in itertools.count(begin_ms + 1) if t % INTERVAL_MS == 0)
            items[0].planned_ms = min(following, self._last_ms(window))

    def _advance(self, before_ms: int) -> None:
        now_ms = self.now_ms
        for key, window, items in self._groups():
            last_ms = self._last_ms(window)
            if self.of.trigger == "continuous":
                self._fire_planned(key, window, items)
            is_ending = before_ms < last_ms or not self.of.by_event_time
            if self.of.trigger != "count" and is_ending and last_ms <= now_ms:
                self._fire(key, window, items)
            if last_ms <= now_ms:
                for item in items:
                    item.planned_ms = None
            if self._over_ms(window) <= now_ms and self.of.kind != "global":
                self.items = [one for one in self.items if not any(one is item for item in items)]

    def _fire_planned(self, key: str, window: tuple[int, int], items: list[Item]) -> None:
        last_ms = self._last_ms(window)
        if last_ms == self.now_ms == MAX_WATERMARK_MS:
            return
        planned = min((item.planned_ms for item in items if item.planned_ms is not None), default=None)
        if planned is None:
            return
        while planned <= self.now_ms and planned < last_ms:
            self._fire(key, window, items)
            planned = min(planned + INTERVAL_MS, last_ms)
        for item in items:
            item.planned_ms = None
        items[0].planned_ms = planned

    def _fire(self, key: str, window: tuple[int, int], items: list[Item]) -> None:
        there = [item for item in items if not item.is_gone]
        if self.of.evicts and there:
            limit_ms = max(item.time_ms or 0 for item in there) - 6
            for item in there:
                item.is_gone = (item.time_ms or 0) <= limit_ms
            there = [item for item in there if not item.is_gone]
        if there:
            row = self.of.result(key, window, [item.number for item in there])
            self.rows.append((row, self._last_ms(window)))
        if self.of.is_discarding:
            for item in there:
                item.is_gone = True


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
    rows = [(tuple(row), time_ms) for row, time_ms in rows]
    return sorted(rows, key=repr), output.side.get("late", [])


def left(harness: OperatorHarness) -> dict[str, Any]:
    """Return all entries of all states that have any."""
    names = harness._run.states.descriptors
    return {name: entries for name in names if (entries := harness.entries(name))}
