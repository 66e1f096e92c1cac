"""Evictors, which remove elements of a window before or after its function runs."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from flinkish_spark.core.fields import Arity, Range, check_arguments
from flinkish_spark.functions.keyed import TimeContext
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.windows.time_window import (
    POSITIVE,
    TimeWindow,
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
    _when: Evict

    def evict_before(self, elements: Elements, window: TimeWindow, ctx: EvictorContext) -> Elements:
        return self._keep(elements) if self._when is Evict.BEFORE else elements

    def evict_after(self, elements: Elements, window: TimeWindow, ctx: EvictorContext) -> Elements:
        return self._keep(elements) if self._when is Evict.AFTER else elements

    @abstractmethod
    def _keep(self, elements: Elements) -> Elements:
        """Return the elements that stay; there is at least one element."""


class CountEvictor(_BaseEvictor):
    """An evictor that keeps the last `count` elements."""

    @check_arguments()
    def __init__(self, count: Annotated[int, POSITIVE], when: Evict = Evict.BEFORE) -> None:
        self._count, self._when = count, when

    def _keep(self, elements: Elements) -> Elements:
        return elements[-self._count :]


class TimeEvictor(_BaseEvictor):
    """An evictor that keeps elements less than `keep_ms` older than the newest one, by event time.

    Elements without a timestamp all stay.
    """

    @check_arguments()
    def __init__(self, keep_ms: Annotated[Milliseconds, POSITIVE], when: Evict = Evict.BEFORE) -> None:
        self._keep_ms, self._when = keep_ms, when

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

    @check_arguments()
    def __init__(
        self,
        threshold: Annotated[float, Range(-math.inf, math.inf)],
        delta: Annotated[Callable[[Any, Any], float], Arity(2)],
        when: Evict = Evict.BEFORE,
    ) -> None:
        self._delta, self._threshold, self._when = delta, threshold, when

    def _keep(self, elements: Elements) -> Elements:
        last = elements[-1].value
        return [one for one in elements if not self._delta(one.value, last) >= self._threshold]
