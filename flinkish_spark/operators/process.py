"""One key group in one micro-batch: timers, elements and the watermark, in a fixed order.

    processing-time timers -> elements before -> watermark, event-time timers -> elements behind

A micro-batch has one watermark per operator, known before it runs. Records of a source are behind it, since
the watermark comes from earlier micro-batches. Rows that an operator emits when timers of the watermark fire
are before it, so the operator after a window sees the window's result in time.

The last micro-batch of a drained job continues: after all elements the watermark becomes the greatest one,
and all event-time timers fire. Their rows are behind the watermark; the next operator gets them before its
own last watermark.
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
from flinkish_spark.types.to_python import Copier, copy_if_mutable

#: Takes an element and the context; returns the rows to emit.
Processor = Callable[[Any, FunctionContext], Iterable[Any] | None]


class KeyedStreamOperator(ABC):
    """A keyed operator, shared by all key groups; its attributes hold no data of a key."""

    @abstractmethod
    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Declare state; called once per copy, before anything else."""

    def processors(self) -> tuple[Processor, ...]:
        return (self.process_element,)

    def process_element(self, value: Any, context: FunctionContext) -> Iterable[Any] | None:
        raise NotImplementedError

    def on_timer(self, timer: Timer, domain: TimeDomain) -> Iterable[Any] | None:
        """Do nothing: an operator without this registers no timers."""

    def count_open_items(self, state: str, rows: pa.RecordBatch) -> int | None:
        return None

    def hashes_to_load(self, group: GroupState) -> Array:
        return np.empty(0, dtype=np.int64)

    def apply(self, run: GroupRun, progress: Progress) -> None:
        """Process a loaded key group before any of its elements."""

    def close(self) -> None:
        """Release what `open` has acquired."""


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


#: The elements before the watermark, and those behind it.
Sides = tuple[Elements, Elements]


def _interleave(first: list[Any], before: int, second: list[Any], then: int) -> list[Any]:
    return [*first[:before], *second[:then], *first[before:], *second[then:]]


@dataclass
class OperatorOutput:
    """The rows that an operator emitted for a key group, in order."""

    #: Rows and their times: that of the element or timer, unless the operator chose another one.
    rows: list[Any] = field(default_factory=list)
    times_ms: list[int | None] = field(default_factory=list)
    #: Number of the rows that are before the watermark.
    before: int = 0
    #: Rows and times by side output, and the number of those that are before the watermark.
    side: dict[str, list[tuple[Any, int | None]]] = field(default_factory=dict)
    side_before: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def then(self, later: OperatorOutput) -> OperatorOutput:
        """Return this output followed by a later one, on each side of the watermark; without counts."""
        names = dict.fromkeys([*self.side, *later.side])
        own = {name: (self.side.get(name, []), self.side_before.get(name, 0)) for name in names}
        others = {name: (later.side.get(name, []), later.side_before.get(name, 0)) for name in names}
        return OperatorOutput(
            _interleave(self.rows, self.before, later.rows, later.before),
            _interleave(self.times_ms, self.before, later.times_ms, later.before),
            self.before + later.before,
            {name: _interleave(*own[name], *others[name]) for name in names},
            {name: own[name][1] + others[name][1] for name in names},
        )


#: Raises if the rows of one call cannot be written.
Check = Callable[[OperatorOutput], object]


def wrap_with_check(
    function: Callable[..., Iterable[Any] | None], emitted_now: Callable[[], OperatorOutput], check: Check
) -> Callable[..., list[Any]]:
    """Wrap a function so that the rows of each call are checked after it."""

    def call(*given: Any) -> list[Any]:
        emitted = emitted_now()
        main, sides = len(emitted.rows), {name: len(rows) for name, rows in emitted.side.items()}
        rows = list(elements_of(function(*given) or ()))
        own = [*emitted.rows[main:], *rows]
        side = {name: found[sides.get(name, 0) :] for name, found in emitted.side.items()}
        check(OperatorOutput(own, [None] * len(own), side=side))
        return rows

    return call


class ElementError(Exception):
    """The function raised at an element; `at` is its position among those on its side of the watermark."""

    def __init__(self, at: int, is_before: bool, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.at, self.is_before, self.error = at, is_before, error
        #: Whether `at` counts broadcast elements.
        self.is_broadcast = False


class TimerError(Exception):
    def __init__(self, timer: Timer, domain: TimeDomain, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.timer, self.domain, self.error = timer, domain, error


class GroupRun:
    """An opened operator; the caller has loaded the state of all keys that it will process."""

    def __init__(
        self, operator: KeyedStreamOperator, uid: str, max_parallelism: int, take: Copier = copy_if_mutable
    ) -> None:
        self._take = take
        self.states = KeyedStates(uid, max_parallelism)
        self.timers = Timers(self.states.scope)
        self._context = FunctionContext(
            self.states.scope, self.timers, self._to_side, self._to_main, self._count
        )
        self._emitted = OperatorOutput()
        operator.open(self.states, self._context, self.timers)
        self._processors, self._on_timer = operator.processors(), operator.on_timer
        #: Called after each call of a function; None if values in its states cannot change.
        self._settle = self.states.puts.settle if self.states.puts.is_used else None

    def run(
        self, before: Sequence[Elements], progress: Progress, behind: Sequence[Elements]
    ) -> OperatorOutput:
        # Keep counts of functions that were applied to keyed state before this.
        self._emitted = emitted = OperatorOutput(counts=self._emitted.counts)
        self.states.scope.now_ms = self.timers.processing_time_ms = progress.processing_time_ms
        self.timers.watermark_ms = progress.watermark_before_ms
        self._fire(TimeDomain.PROCESSING_TIME, progress.processing_limit_ms)
        self._process(before, is_before=True)
        # This order matters: the watermark is set before the timers fire that it makes due.
        self.timers.watermark_ms = progress.watermark_ms
        self._fire(TimeDomain.EVENT_TIME, progress.watermark_ms)
        emitted.before = len(emitted.rows)
        emitted.side_before = {name: len(rows) for name, rows in emitted.side.items()}
        self._process(behind, is_before=False)
        if progress.drained_to_ms > progress.watermark_ms:
            self.timers.watermark_ms = progress.drained_to_ms
            self._fire(TimeDomain.EVENT_TIME, progress.drained_to_ms)
        self._emitted = OperatorOutput()
        return emitted

    def run_checked(
        self, before: Sequence[Elements], progress: Progress, behind: Sequence[Elements], check: Check
    ) -> None:
        """Run a micro-batch again to find the call that emitted a row which cannot be written."""
        processors, on_timer = self._processors, self._on_timer
        self._processors = tuple(
            wrap_with_check(process, lambda: self._emitted, check) for process in processors
        )
        self._on_timer = wrap_with_check(on_timer, lambda: self._emitted, check)
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
            raise ElementError(at, is_before, error) from error

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
                raise TimerError(timer, domain, error) from error
            times.extend([timer.time_ms] * (len(rows) - len(times)))
            if self._settle is not None:
                self._settle()

    def _to_side(self, tag: OutputTag, value: Any, time_ms: int | None) -> None:
        self._emitted.side.setdefault(tag_name(tag), []).append((copy_if_mutable(value), time_ms))

    def _to_main(self, rows: Iterable[Any], time_ms: int | None) -> None:
        emitted = self._emitted
        emitted.rows.extend(map(self._take, elements_of(rows)))
        emitted.times_ms.extend([time_ms] * (len(emitted.rows) - len(emitted.times_ms)))

    def _count(self, name: str, by: int = 1) -> None:
        counts = self._emitted.counts
        counts[name] = counts.get(name, 0) + by


class _CallsFunctions(RichFunction):
    """Opens and closes the user's functions that are called for records."""

    _rich: Sequence[RichFunction]

    def open(self, context: RuntimeContext) -> None:
        for one in self._rich:
            one.open(context)

    def close(self) -> None:
        for one in self._rich:
            one.close()


class RecordFunction(_CallsFunctions, KeyedProcessFunction):
    """Calls a function of one record, which cannot register timers."""

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
    #: Copies the record for the function; None if records cannot change.
    take: Copier | None = staticmethod(copy_if_mutable)

    def process_element(self, value: Any, ctx: Context) -> Iterable[Any]:
        answer = self._call(value if self.take is None else self.take(value))
        keeps = answer if type(answer) is bool else is_true(answer, "the function of filter()")
        return (value,) if keeps else ()


class CoFlatMapRecords(_CallsFunctions, KeyedCoProcessFunction):
    """Calls a function for each record of two inputs; it returns any number of rows."""

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
    """Calls a function for each record of two inputs; it returns one row."""

    def _rows(self, result: Any) -> Iterable[Any]:
        return (refuse_not_run(result, "the function of map()"),)
