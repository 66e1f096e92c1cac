"""One key group in one micro-batch: timers, elements, the watermark, in the one order that counts.

    processing-time timers -> elements before -> watermark, event-time timers -> elements behind

A micro-batch has one watermark for an operator, which is known before it runs. Records of a source are behind
it (the watermark is what earlier micro-batches have shown), and what an operator emits while timers of that
watermark fire is before it. So an operator behind a window sees the window's result on time.

The last micro-batch of a job that is drained goes on: behind all elements the watermark becomes the last one,
and every event-time timer fires. What that emits is behind, too: the next operator has it before its own last
watermark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from flinkish_spark.core.elements import OutputTag, Progress, TimeDomain, Timer, tag_name
from flinkish_spark.core.iterators import NOT_RUN, USER_ERRORS, elements_of, is_true, refuse_not_run
from flinkish_spark.functions.keyed import (
    Context,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    RichFunction,
    RuntimeContext,
)
from flinkish_spark.operators.context import FunctionContext
from flinkish_spark.state.key_group import GroupState
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.layered import Array
from flinkish_spark.state.timers import Timers
from flinkish_spark.types.to_python import Take, taken

#: Takes an element and the context; returns what is emitted.
Processor = Callable[[Any, FunctionContext], Iterable[Any] | None]


class KeyedStreamOperator(ABC):
    """One keyed operator, the same for all key groups; it keeps nothing of a key in its own attributes."""

    @abstractmethod
    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Declare state; called once per copy, before anything else."""

    def processors(self) -> tuple[Processor, ...]:
        return (self.process_element,)

    def process_element(self, value: Any, context: FunctionContext) -> Iterable[Any] | None:
        raise NotImplementedError

    def on_timer(self, timer: Timer, domain: TimeDomain) -> Iterable[Any] | None:
        """Do nothing: an operator without this registers no timers."""

    def level_in(self, state: str, rows: pa.RecordBatch) -> int | None:
        return None

    def hashes_to_load(self, group: GroupState) -> Array:
        """Return the hashes of keys that are to be loaded besides those that have something to do."""
        return np.empty(0, dtype=np.int64)

    def apply(self, run: GroupRun, progress: Progress) -> None:
        """Do what is to be done with a key group that is loaded, before any of its elements."""

    def close(self) -> None:
        """Give back what `open` made."""


class KeyedProcessOperator(KeyedStreamOperator):
    _function: Any

    def __init__(self, function: KeyedProcessFunction | KeyedCoProcessFunction) -> None:
        self._function = function

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        self._context = context
        self._function.open(states.view_for_function())

    def processors(self) -> tuple[Processor, ...]:
        if isinstance(self._function, KeyedCoProcessFunction):
            return self._function.process_element1, self._function.process_element2
        return (self._function.process_element,)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> Iterable[Any] | None:
        rows: Iterable[Any] | None = self._function.on_timer(timer.time_ms, self._context)
        return rows

    def close(self) -> None:
        self._function.close()


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of one input in their order, column by column."""

    keys: Sequence[Any]
    values: Iterable[Any]
    #: Event times; None if the stream has none.
    times_ms: Sequence[int | None] | None = None
    source: int = 0


#: Those before the watermark, and those behind it.
Sides = tuple[Elements, Elements]


def _joined(first: list[Any], before: int, second: list[Any], then: int) -> list[Any]:
    return [*first[:before], *second[:then], *first[before:], *second[then:]]


@dataclass
class Emitted:
    """What a key group emitted, in order."""

    #: As long as each other; a row has the time of its element or timer, or what the operator said.
    rows: list[Any] = field(default_factory=list)
    times_ms: list[int | None] = field(default_factory=list)
    #: How many of the rows are before the watermark.
    before: int = 0
    #: Rows and times by name of the side output, and how many of them are before the watermark.
    side: dict[str, list[tuple[Any, int | None]]] = field(default_factory=dict)
    side_before: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def then(self, later: Emitted) -> Emitted:
        """Return this with what was emitted later, on each side of the watermark; counts are left out."""
        names = dict.fromkeys([*self.side, *later.side])
        own = {name: (self.side.get(name, []), self.side_before.get(name, 0)) for name in names}
        others = {name: (later.side.get(name, []), later.side_before.get(name, 0)) for name in names}
        return Emitted(
            _joined(self.rows, self.before, later.rows, later.before),
            _joined(self.times_ms, self.before, later.times_ms, later.before),
            self.before + later.before,
            {name: _joined(*own[name], *others[name]) for name in names},
            {name: own[name][1] + others[name][1] for name in names},
        )


#: Raises if what one call has emitted cannot be written.
Check = Callable[[Emitted], object]


def checked(
    function: Callable[..., Iterable[Any] | None], emitted_now: Callable[[], Emitted], check: Check
) -> Callable[..., list[Any]]:
    """Return a function that has what it emits checked, behind each call."""

    def call(*given: Any) -> list[Any]:
        emitted = emitted_now()
        main, sides = len(emitted.rows), {name: len(rows) for name, rows in emitted.side.items()}
        rows = list(elements_of(function(*given) or ()))
        own = [*emitted.rows[main:], *rows]
        side = {name: found[sides.get(name, 0) :] for name, found in emitted.side.items()}
        check(Emitted(own, [None] * len(own), side=side))
        return rows

    return call


class ElementFailed(Exception):
    """The function raised at an element; `at` is its place among the elements, `is_before` which ones."""

    def __init__(self, at: int, is_before: bool, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.at, self.is_before, self.error = at, is_before, error


class TimerFailed(Exception):
    def __init__(self, timer: Timer, domain: TimeDomain, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.timer, self.domain, self.error = timer, domain, error


class GroupRun:
    """An opened operator; whoever runs it has loaded the entries of all keys that will have their turn."""

    def __init__(
        self, operator: KeyedStreamOperator, uid: str, max_parallelism: int, take: Take = taken
    ) -> None:
        self._take = take
        self.states = KeyedStates(uid, max_parallelism)
        self.timers = Timers(self.states.scope)
        self._context = FunctionContext(
            self.states.scope, self.timers, self._to_side, self._to_main, self._count
        )
        self._emitted = Emitted()
        operator.open(self.states, self._context, self.timers)
        self._processors, self._on_timer = operator.processors(), operator.on_timer
        #: Behind each call of a function; None: nothing in its states can change.
        self._settle = self.states.puts.settle if self.states.puts.is_used else None

    def run(self, before: Sequence[Elements], progress: Progress, behind: Sequence[Elements]) -> Emitted:
        # What was counted in front of this counts as well: functions are applied to keyed state there.
        self._emitted = emitted = Emitted(counts=self._emitted.counts)
        self.states.scope.now_ms = self.timers.processing_time_ms = progress.processing_time_ms
        self.timers.watermark_ms = progress.watermark_before_ms
        self._fire(TimeDomain.PROCESSING_TIME, progress.processing_limit_ms)
        self._process(before, is_before=True)
        # This order matters: the watermark stands before the timers fire that it makes due.
        self.timers.watermark_ms = progress.watermark_ms
        self._fire(TimeDomain.EVENT_TIME, progress.watermark_ms)
        emitted.before = len(emitted.rows)
        emitted.side_before = {name: len(rows) for name, rows in emitted.side.items()}
        self._process(behind, is_before=False)
        if progress.drained_to_ms > progress.watermark_ms:
            self.timers.watermark_ms = progress.drained_to_ms
            self._fire(TimeDomain.EVENT_TIME, progress.drained_to_ms)
        self._emitted = Emitted()
        return emitted

    def run_checked(
        self, before: Sequence[Elements], progress: Progress, behind: Sequence[Elements], check: Check
    ) -> None:
        """Work through a micro-batch again to find the call that has emitted what cannot be written."""
        processors, on_timer = self._processors, self._on_timer
        self._processors = tuple(checked(process, lambda: self._emitted, check) for process in processors)
        self._on_timer = checked(on_timer, lambda: self._emitted, check)
        try:
            self.run(before, progress, behind)
        finally:
            self._processors, self._on_timer = processors, on_timer

    def _process(self, inputs: Sequence[Elements], *, is_before: bool) -> None:
        at = -1
        scope, context = self.states.scope, self._context
        rows, times, take = self._emitted.rows, self._emitted.times_ms, self._take
        settle = self._settle
        scope.namespace = None
        try:
            for elements in inputs:
                process = self._processors[elements.source]
                stamps: Iterable[int | None] = elements.times_ms or [None] * len(elements.keys)
                for key, value, time_ms in zip(elements.keys, elements.values, stamps, strict=True):
                    at += 1
                    scope.key = scope.slot = key
                    context.timestamp_ms = time_ms
                    result = process(value, context)
                    if result is not None:
                        # A generator runs here, with the key still current.
                        rows.extend(map(take, elements_of(result)))
                        times.extend([time_ms] * (len(rows) - len(times)))
                    if settle is not None:
                        settle()
        except USER_ERRORS as error:
            raise ElementFailed(at, is_before, error) from error

    def _fire(self, domain: TimeDomain, now_ms: int) -> None:
        scope, context, on_timer = self.states.scope, self._context, self._on_timer
        rows, times, take = self._emitted.rows, self._emitted.times_ms, self._take
        context.domain = domain
        for timer in self.timers.queues[domain].due(now_ms):
            scope.enter(timer.key, timer.namespace)
            context.timestamp_ms = timer.time_ms
            try:
                result = on_timer(timer, domain)
                if result is not None:
                    rows.extend(map(take, elements_of(result)))
            except USER_ERRORS as error:
                raise TimerFailed(timer, domain, error) from error
            times.extend([timer.time_ms] * (len(rows) - len(times)))
            if self._settle is not None:
                self._settle()

    def _to_side(self, tag: OutputTag, value: Any, time_ms: int | None) -> None:
        self._emitted.side.setdefault(tag_name(tag), []).append((taken(value), time_ms))

    def _to_main(self, rows: Iterable[Any], time_ms: int | None) -> None:
        emitted = self._emitted
        emitted.rows.extend(map(self._take, elements_of(rows)))
        emitted.times_ms.extend([time_ms] * (len(emitted.rows) - len(emitted.times_ms)))

    def _count(self, name: str, by: int = 1) -> None:
        counts = self._emitted.counts
        counts[name] = counts.get(name, 0) + by


class _CallsFunctions(RichFunction):
    """Opens and closes the functions of the user's that are called for records."""

    _rich: Sequence[RichFunction]

    def open(self, context: RuntimeContext) -> None:
        for one in self._rich:
            one.open(context)

    def close(self) -> None:
        for one in self._rich:
            one.close()


class RecordFunction(_CallsFunctions, KeyedProcessFunction):
    """Calls a function of one record; it has no timers, since nothing that it is given registers any."""

    def __init__(self, call: Callable[[Any], Any], rich: RichFunction | None) -> None:
        self._call, self._rich = call, () if rich is None else (rich,)


class MapRecords(RecordFunction):
    def process_element(self, value: Any, ctx: Context) -> Iterable[Any]:
        made = self._call(value)
        if type(made) in NOT_RUN:
            refuse_not_run(made, "the function of map()")
        return (made,)


class FlatMapRecords(RecordFunction):
    def process_element(self, value: Any, ctx: Context) -> Iterable[Any] | None:
        return self._call(value)  # type: ignore[no-any-return]


class FilterRecords(RecordFunction):
    """Emits those records again for which the function says so."""

    #: Makes the record that the function sees; None: nothing in records can change.
    take: Take | None = staticmethod(taken)

    def process_element(self, value: Any, ctx: Context) -> Iterable[Any]:
        answer = self._call(value if self.take is None else self.take(value))
        keeps = answer if type(answer) is bool else is_true(answer, "the function of filter()")
        return (value,) if keeps else ()


class CoFlatMapRecords(_CallsFunctions, KeyedCoProcessFunction):
    """Calls a function of one record for each of two inputs: any number of rows of each record."""

    def __init__(
        self, calls: tuple[Callable[[Any], Any], Callable[[Any], Any]], rich: tuple[RichFunction, ...]
    ) -> None:
        self._first, self._second = calls
        self._rich = rich

    def process_element1(self, value: Any, ctx: Context) -> Iterable[Any] | None:
        return self._rows(self._first(value))

    def process_element2(self, value: Any, ctx: Context) -> Iterable[Any] | None:
        return self._rows(self._second(value))

    def _rows(self, result: Any) -> Iterable[Any] | None:
        return result  # type: ignore[no-any-return]


class CoMapRecords(CoFlatMapRecords):
    """The same, one row of each record."""

    def _rows(self, result: Any) -> Iterable[Any]:
        return (refuse_not_run(result, "the function of map()"),)
