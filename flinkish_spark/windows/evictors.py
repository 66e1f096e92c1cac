"""Evictors, which remove elements of a window before or after its function runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from flinkish_spark.core.validation import function_of_two, instance_of
from flinkish_spark.functions.keyed import TimeContext
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.durations import Duration
from flinkish_spark.windows.time_window import (
    TimeWindow,
    check_number,
    check_positive_count,
    check_positive_ms,
)


class TimestampedValue(NamedTuple):
    """An element of a window, and its event time; None if the stream has none."""

    value: Any
    timestamp_ms: int | None


class EvictorContext(TimeContext, Protocol):
    """The context of an evictor."""


Elements = Sequence[TimestampedValue]


class Evictor:
    """An evictor, which removes elements of a window for good when it fires.

    A window with an evictor stores all its elements, also for reduce and aggregate. If no element is left
    before the function, the function is not called.
    """

    def evict_before(self, elements: Elements, window: TimeWindow, ctx: EvictorContext) -> Elements:
        """Return the elements for the function, in their order of arrival."""
        return elements

    def evict_after(self, elements: Elements, window: TimeWindow, ctx: EvictorContext) -> Elements:
        """Return the elements that stay, of the elements that the window function has seen."""
        return elements


class Evict(Choice):
    """When an evictor removes elements: before or after the window function."""

    BEFORE = "BEFORE"
    AFTER = "AFTER"


class _BaseEvictor(Evictor):
    def __init__(self, when: Evict) -> None:
        self._when = instance_of("when", when, Evict, what_to_do="give Evict.BEFORE or Evict.AFTER")

    def evict_before(self, elements: Elements, window: TimeWindow, ctx: EvictorContext) -> Elements:
        return self._keep(elements) if self._when is Evict.BEFORE else elements

    def evict_after(self, elements: Elements, window: TimeWindow, ctx: EvictorContext) -> Elements:
        return self._keep(elements) if self._when is Evict.AFTER else elements

    @abstractmethod
    def _keep(self, elements: Elements) -> Elements:
        """Return the elements that stay; there is at least one element."""


class CountEvictor(_BaseEvictor):
    """An evictor that keeps the last `count` elements."""

    def __init__(self, count: int, when: Evict = Evict.BEFORE) -> None:
        super().__init__(when)
        self._count = check_positive_count("count", count)

    def _keep(self, elements: Elements) -> Elements:
        return elements[-self._count :]


class TimeEvictor(_BaseEvictor):
    """An evictor that keeps elements less than `keep_ms` older than the newest one, by event time.

    Elements without a timestamp all stay.
    """

    def __init__(self, keep_ms: Duration, when: Evict = Evict.BEFORE) -> None:
        super().__init__(when)
        self._keep_ms = check_positive_ms("keep_ms", keep_ms)

    def _keep(self, elements: Elements) -> Elements:
        times = [one.timestamp_ms for one in elements if one.timestamp_ms is not None]
        if not times:
            return elements
        limit_ms = max(times) - self._keep_ms
        return [one for one in elements if one.timestamp_ms is None or one.timestamp_ms > limit_ms]


class DeltaEvictor(_BaseEvictor):
    """An evictor that keeps elements that differ from the last one by less than a threshold.

    Parameters
    ----------
    threshold
        An element with this difference or more is removed.
    delta
        From an element and the last one to their difference.
    """

    def __init__(
        self, threshold: float, delta: Callable[[Any, Any], float], when: Evict = Evict.BEFORE
    ) -> None:
        super().__init__(when)
        self._delta, self._threshold = function_of_two("delta", delta), check_number("threshold", threshold)

    def _keep(self, elements: Elements) -> Elements:
        last = elements[-1].value
        return [one for one in elements if not self._delta(one.value, last) >= self._threshold]
