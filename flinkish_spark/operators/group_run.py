"""One key group in one micro-batch: timers, elements, the watermark, in the one order that counts.

A micro-batch has one watermark for an operator, which is known before it runs. An element is *before* it or
*behind* it: records of a source are behind (the watermark is what earlier micro-batches have shown), and what
an operator emits while timers of that watermark fire is before. So an operator behind a window sees the
window's result on time, as it does where watermarks flow between elements.

    processing-time timers  ->  elements before  ->  watermark, event-time timers  ->  elements behind

The last micro-batch of a job that is drained goes on: behind all elements the watermark becomes the last one,
and every event-time timer fires. What that emits is behind, too, so the next operator has it before its own
last watermark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.operators.elements import MIN_WATERMARK_MS, OutputTag, TimeDomain, Timer, tag_name
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator
from flinkish_spark.runtime.taken_values import Take, taken
from flinkish_spark.user_iterators import USER_ERRORS, elements_of


@dataclass(frozen=True, slots=True)
class Progress:
    """Where time stands in a micro-batch, in milliseconds.

    Parameters
    ----------
    watermark_before_ms
        What the last micro-batch reached.
    watermark_ms
        What this one reaches; never less.
    processing_time_ms
        When it began.
    drained_to_ms
        What the watermark becomes behind the elements, if that is more.
    processing_timers_to_ms
        Up to when processing-time timers fire; None: up to `processing_time_ms`, as in Flink's harnesses.
        In a job, as in Flink's, those of the very millisecond wait: elements of it are still to come.
    """

    watermark_before_ms: int
    watermark_ms: int
    processing_time_ms: int
    drained_to_ms: int = MIN_WATERMARK_MS
    processing_timers_to_ms: int | None = None

    @property
    def limits_ms(self) -> dict[TimeDomain, int]:
        """Up to when timers are due, by their clock."""
        return {
            TimeDomain.EVENT_TIME: max(self.watermark_ms, self.drained_to_ms),
            TimeDomain.PROCESSING_TIME: self.processing_limit_ms,
        }

    @property
    def processing_limit_ms(self) -> int:
        """Up to when processing-time timers are due."""
        limit_ms = self.processing_timers_to_ms
        return self.processing_time_ms if limit_ms is None else limit_ms


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of one input in their order, column by column.

    Parameters
    ----------
    keys, values
        Of each element.
    times_ms
        Event times; None if the stream has none.
    source
        Number of the input.
    """

    keys: Sequence[Any]
    values: Iterable[Any]
    times_ms: Sequence[int | None] | None = None
    source: int = 0


NO_ELEMENTS = Elements((), ())


def _joined(first: list[Any], before: int, second: list[Any], then: int) -> list[Any]:
    """Return two lists as one, of which so many are in front of all others."""
    return [*first[:before], *second[:then], *first[before:], *second[then:]]


@dataclass
class Emitted:
    """What a key group emitted, in order.

    Parameters
    ----------
    rows, times_ms
        As long as each other; a row has the time of its element or timer, or what the operator said.
    before
        How many of the rows are before the watermark.
    side
        Rows and times by name of the side output, and how many of them are before the watermark.
    counts
        What the operator has counted, by name.
    """

    rows: list[Any] = field(default_factory=list)
    times_ms: list[int | None] = field(default_factory=list)
    before: int = 0
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
    """Return a function that has what it emits checked, behind each call.

    Parameters
    ----------
    emitted_now
        Returns what was emitted so far; what the function returns is not yet among it.
    """

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
    """The function raised at a timer."""

    def __init__(self, timer: Timer, domain: TimeDomain, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.timer, self.domain, self.error = timer, domain, error


class GroupRun:
    """An opened operator, with whatever key group's state and timers are put into it.

    Whoever calls :meth:`run` has loaded the entries of all keys that will have their turn into
    `states.tables`: those of the elements, and those whose timers are due.

    Parameters
    ----------
    take
        Makes a row that does not change behind the call that has emitted it.
    """

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

    def run(self, before: Sequence[Elements], progress: Progress, behind: Sequence[Elements]) -> Emitted:
        """Work through a micro-batch of the current key group.

        Raises
        ------
        ElementFailed, TimerFailed
            The function raised; nothing of the micro-batch counts.
        """
        self._emitted = emitted = Emitted()
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
        return emitted

    def run_checked(
        self,
        before: Sequence[Elements],
        progress: Progress,
        behind: Sequence[Elements],
        check: Check,
    ) -> None:
        """Work through a micro-batch, and have what each call of the function emits checked before the next.

        For finding out which call has emitted what cannot be written: nothing is noted of that while all is
        well. Whoever calls it has loaded the entries once more.

        Raises
        ------
        ElementFailed, TimerFailed
            The function raised, or the check did; `error` says what.
        """
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

    def _to_side(self, tag: OutputTag, value: Any, time_ms: int | None) -> None:
        self._emitted.side.setdefault(tag_name(tag), []).append((taken(value), time_ms))

    def _to_main(self, rows: Iterable[Any], time_ms: int | None) -> None:
        emitted = self._emitted
        emitted.rows.extend(map(self._take, elements_of(rows)))
        emitted.times_ms.extend([time_ms] * (len(emitted.rows) - len(emitted.times_ms)))

    def _count(self, name: str) -> None:
        counts = self._emitted.counts
        counts[name] = counts.get(name, 0) + 1
