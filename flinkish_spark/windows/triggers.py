"""Triggers, which decide when a window's result is emitted and when its content is purged."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Protocol, Self

from flinkish_spark.core.elements import MAX_WATERMARK_MS, TimeDomain
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.functions.keyed import TimerService
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.state.descriptors import ReducingStateDescriptor, StateDescriptor
from flinkish_spark.windows.time_window import (
    POSITIVE,
    NoEventTime,
    TimeWindow,
)


class TriggerResult(Choice):
    """A trigger's decision about a window."""

    CONTINUE = (False, False)
    FIRE = (True, False)
    PURGE = (False, True)
    FIRE_AND_PURGE = (True, True)

    def __init__(self, is_fire: bool, is_purge: bool) -> None:
        #: True if the function is called with the window's content.
        self.is_fire = is_fire
        #: True if the window's content is removed; the trigger's own state stays.
        self.is_purge = is_purge


class TriggerContext(TimerService, Protocol):
    """The context of a trigger: times, and timers and states of the current key and window.

    A timer calls the trigger's `on_event_time` or `on_processing_time`.
    """

    def get_partitioned_state(self, descriptor: StateDescriptor) -> Any:
        """Return a state of the current key and window; :meth:`Trigger.states` must name it."""

    def merge_partitioned_state(self, descriptor: StateDescriptor) -> None:
        """Merge a state of the merging windows into the current window's; only in `on_merge`.

        The state must be a reducing, aggregating or list state.
        """

    def visit_merged_windows(self) -> Iterator[TimeWindow]:
        """Iterate over the windows that merge, and make each the current window; only in `on_merge`."""


class Trigger(ABC):
    """A trigger, which decides per key and window when to fire; a custom one keeps its data in states.

    One object serves all keys and windows: its attributes are settings only. Calls for one key come one
    after the other, each for the given window.
    """

    def states(self) -> Sequence[StateDescriptor]:
        """Return the states that the trigger uses; the same objects at each call."""
        return ()

    @abstractmethod
    def on_element(
        self, value: Any, timestamp_ms: int | None, window: TimeWindow, ctx: TriggerContext
    ) -> TriggerResult:
        """Decide after an element was added to a window; also for a late element."""

    @abstractmethod
    def on_event_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        """Decide when an event-time timer of a window fires: the trigger's, or the cleanup's."""

    @abstractmethod
    def on_processing_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        """Decide when a processing-time timer of a window fires."""

    def can_merge(self) -> bool:
        """Return whether the trigger can be used with windows that merge; then `on_merge` is called."""
        return False

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        """Take over the states of windows that become `window`, and register its timers.

        The merged windows are cleared after this. `on_element` follows, for the element that caused it.
        """
        raise NotImplementedError(f"{type(self).__name__} says that it can merge but has no on_merge()")

    @abstractmethod
    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        """Remove all timers and states of a window, at its cleanup or after a merge into another one."""


class _Calm(Trigger):
    """The common base of triggers: it continues when a timer fires, and can merge."""

    @classmethod
    def create(cls) -> Self:
        """Return the trigger: Flink's name of a constructor without parameters."""
        return cls()

    @classmethod
    def of(cls, *settings: Any) -> Self:
        """Return the trigger: Flink's name of a constructor with parameters."""
        return cls(*settings)

    def on_event_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.CONTINUE

    def on_processing_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.CONTINUE

    def can_merge(self) -> bool:
        return True


class EventTimeTrigger(_Calm):
    """A trigger that fires when the watermark reaches a window's end, and for each later element."""

    def on_element(
        self, value: Any, timestamp_ms: int | None, window: TimeWindow, ctx: TriggerContext
    ) -> TriggerResult:
        end_ms = window.max_timestamp_ms
        if end_ms <= ctx.current_watermark():
            return TriggerResult.FIRE
        ctx.register_event_time_timer(end_ms)
        return TriggerResult.CONTINUE

    def on_event_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.FIRE if time_ms == window.max_timestamp_ms else TriggerResult.CONTINUE

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        """Wait for the new end; if it is past, the element that caused the merge fires."""
        if window.max_timestamp_ms > ctx.current_watermark():
            ctx.register_event_time_timer(window.max_timestamp_ms)

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        ctx.delete_event_time_timer(window.max_timestamp_ms)


class ProcessingTimeTrigger(_Calm):
    """A trigger that fires when the processing time reaches a window's end."""

    def on_element(
        self, value: Any, timestamp_ms: int | None, window: TimeWindow, ctx: TriggerContext
    ) -> TriggerResult:
        ctx.register_processing_time_timer(window.max_timestamp_ms)
        return TriggerResult.CONTINUE

    def on_processing_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.FIRE

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        if window.max_timestamp_ms > ctx.current_processing_time():
            ctx.register_processing_time_timer(window.max_timestamp_ms)

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        ctx.delete_processing_time_timer(window.max_timestamp_ms)


class NeverTrigger(_Calm):
    """A trigger that never fires, the default of global windows."""

    def on_element(
        self, value: Any, timestamp_ms: int | None, window: TimeWindow, ctx: TriggerContext
    ) -> TriggerResult:
        return TriggerResult.CONTINUE

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        """Do nothing."""

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        """Do nothing."""


class CountTrigger(_Calm):
    """A trigger that fires whenever a window has `count` more elements.

    Parameters
    ----------
    first
        Number of elements at the first firing; None: `count`.
    """

    @check_arguments()
    def __init__(
        self, count: Annotated[int, POSITIVE], first: Annotated[int, POSITIVE] | None = None
    ) -> None:
        self._count, self._first = count, first
        self._seen = ReducingStateDescriptor("count", operator.add, "LONG")

    def states(self) -> Sequence[StateDescriptor]:
        return (self._seen,)

    def on_element(
        self, value: Any, timestamp_ms: int | None, window: TimeWindow, ctx: TriggerContext
    ) -> TriggerResult:
        seen = ctx.get_partitioned_state(self._seen)
        if self._first is not None and seen.get() is None:
            seen.add(self._count - self._first)
        seen.add(1)
        if seen.get() < self._count:
            return TriggerResult.CONTINUE
        seen.clear()
        if self._first is not None:
            seen.add(0)
        return TriggerResult.FIRE

    def can_merge(self) -> bool:
        """Return True, unless the first firing has its own count, which merged windows cannot share."""
        return self._first is None

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        """Add the counts up; the element that caused the merge fires if the sum is high enough."""
        ctx.merge_partitioned_state(self._seen)

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        ctx.get_partitioned_state(self._seen).clear()


class PurgingTrigger(Trigger):
    """A trigger that acts as another one, and purges a window's content whenever that one fires.

    So each firing has only the elements since the last one: results are discarding, not accumulating.
    """

    @check_arguments()
    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger

    @classmethod
    def of(cls, nested_trigger: Any) -> Self:
        """Return the trigger: Flink's name of the constructor."""
        return cls(nested_trigger)

    def states(self) -> Sequence[StateDescriptor]:
        return self._trigger.states()

    def on_element(
        self, value: Any, timestamp_ms: int | None, window: TimeWindow, ctx: TriggerContext
    ) -> TriggerResult:
        return self._purging(self._trigger.on_element(value, timestamp_ms, window, ctx))

    def on_event_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        return self._purging(self._trigger.on_event_time(time_ms, window, ctx))

    def on_processing_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        return self._purging(self._trigger.on_processing_time(time_ms, window, ctx))

    def can_merge(self) -> bool:
        return self._trigger.can_merge()

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        self._trigger.on_merge(window, ctx)

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        self._trigger.clear(window, ctx)

    def _purging(self, result: TriggerResult) -> TriggerResult:
        check_result(self._trigger, result)
        return TriggerResult.FIRE_AND_PURGE if result.is_fire else result


def check_result(trigger: Trigger, result: object) -> None:
    if not isinstance(result, TriggerResult):
        names = [f"TriggerResult.{one.name}" for one in TriggerResult]
        raise TypeError(
            f"the trigger {type(trigger).__name__} has returned {result!r}; its on_element, on_event_time "
            f"and on_processing_time must return {', '.join(names[:-1])} or {names[-1]}"
        )


class _Least:
    def reduce(self, first: int, second: int) -> int:
        return min(first, second)


class _Continuous(_Calm):
    """The base of continuous triggers; a state has the next firing: an interval's multiple, or the end."""

    clock: TimeDomain

    @check_arguments()
    def __init__(self, interval_ms: Annotated[Milliseconds, POSITIVE]) -> None:
        self._interval_ms = interval_ms
        self._next_ms = ReducingStateDescriptor("next_ms", _Least(), "LONG")

    def states(self) -> Sequence[StateDescriptor]:
        return (self._next_ms,)

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        """Fire next at the earliest next firing of the merged windows."""
        next_ms = ctx.get_partitioned_state(self._next_ms)
        for _ in ctx.visit_merged_windows():
            if (merged_ms := next_ms.get()) is not None:
                self._delete(merged_ms, ctx)
        ctx.merge_partitioned_state(self._next_ms)
        if (first_ms := next_ms.get()) is not None:
            self._register(first_ms, ctx)

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        next_ms = ctx.get_partitioned_state(self._next_ms)
        self._delete(window.max_timestamp_ms, ctx)
        if (time_ms := next_ms.get()) is not None:
            self._delete(time_ms, ctx)
            next_ms.clear()

    def _begin(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> None:
        if ctx.get_partitioned_state(self._next_ms).get() is None:
            first_ms = time_ms - time_ms % self._interval_ms + self._interval_ms
            # Not after the end, when the window is cleared: an element may come in its last millisecond.
            self._set(min(first_ms, _limit_ms(time_ms, window)), ctx)

    def _fire_at(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        next_ms = ctx.get_partitioned_state(self._next_ms)
        if next_ms.get() != time_ms:
            return TriggerResult.CONTINUE
        next_ms.clear()
        self._plan(time_ms, window, ctx)
        return TriggerResult.FIRE

    def _plan(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> None:
        """Plan the next firing after one, at the latest at the window's end, unless that is past."""
        limit_ms = _limit_ms(time_ms + 1, window)
        planned_ms = min(time_ms + self._interval_ms, limit_ms)
        if planned_ms > time_ms:
            self._set(planned_ms, ctx)

    def _set(self, planned_ms: int, ctx: TriggerContext) -> None:
        ctx.get_partitioned_state(self._next_ms).add(planned_ms)
        self._register(planned_ms, ctx)

    def _register(self, time_ms: int, ctx: TriggerContext) -> None:
        if self.clock is TimeDomain.EVENT_TIME:
            ctx.register_event_time_timer(time_ms)
        else:
            ctx.register_processing_time_timer(time_ms)

    def _delete(self, time_ms: int, ctx: TriggerContext) -> None:
        if self.clock is TimeDomain.EVENT_TIME:
            ctx.delete_event_time_timer(time_ms)
        else:
            ctx.delete_processing_time_timer(time_ms)


def _limit_ms(time_ms: int, window: TimeWindow) -> int:
    """Return the time of a window's last firing from a time on: its end, unless that is past."""
    # The end is past if windows use event time and the trigger the clock: records may be days old. Then there
    # is no firing at the end, nor one for each interval since.
    end_ms = window.max_timestamp_ms
    return end_ms if time_ms <= end_ms else MAX_WATERMARK_MS


class ContinuousEventTimeTrigger(_Continuous):
    """A trigger that fires whenever the watermark passes a multiple of `interval_ms`, and at a window's end.

    A watermark that passes several multiples at once fires for each. An element that comes when the
    watermark is past the window fires at once.
    """

    clock = TimeDomain.EVENT_TIME

    def on_element(
        self, value: Any, timestamp_ms: int | None, window: TimeWindow, ctx: TriggerContext
    ) -> TriggerResult:
        if window.max_timestamp_ms <= ctx.current_watermark():
            return TriggerResult.FIRE
        if timestamp_ms is None:
            raise NoEventTime
        ctx.register_event_time_timer(window.max_timestamp_ms)
        self._begin(timestamp_ms, window, ctx)
        return TriggerResult.CONTINUE

    def on_event_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        end_ms = window.max_timestamp_ms
        next_ms = ctx.get_partitioned_state(self._next_ms)
        if time_ms == end_ms:
            next_ms.clear()
            return TriggerResult.FIRE
        if ctx.current_watermark() == end_ms == MAX_WATERMARK_MS:
            # At the end of the input, a window without end fires once more, not once per interval.
            next_ms.clear()
            return TriggerResult.CONTINUE
        return self._fire_at(time_ms, window, ctx)


class ContinuousProcessingTimeTrigger(_Continuous):
    """A trigger that fires when the processing time passes a multiple of `interval_ms` after an element."""

    clock = TimeDomain.PROCESSING_TIME

    def on_element(
        self, value: Any, timestamp_ms: int | None, window: TimeWindow, ctx: TriggerContext
    ) -> TriggerResult:
        self._begin(ctx.current_processing_time(), window, ctx)
        return TriggerResult.CONTINUE

    def on_processing_time(self, time_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        return self._fire_at(time_ms, window, ctx)
