"""Window assigners, which choose the windows of each element."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Annotated, Any, Self

from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.core.fields import Arity, check_arguments
from flinkish_spark.protocol.durations import Duration, Milliseconds
from flinkish_spark.windows.evictors import CountEvictor, Evictor
from flinkish_spark.windows.time_window import (
    GLOBAL_WINDOW,
    POSITIVE,
    NoEventTime,
    TimeWindow,
    check_offset_ms,
    window_at,
)
from flinkish_spark.windows.triggers import (
    CountTrigger,
    EventTimeTrigger,
    NeverTrigger,
    ProcessingTimeTrigger,
    Trigger,
)

#: The most windows that an assigner caches.
_REMEMBERED = 1024


Windows = Sequence[TimeWindow]


class WindowAssigner(ABC):
    """An assigner of windows to elements. A custom one must keep nothing of an element in its attributes.

    `clock` is the time with which its windows' ends are compared: for the cleanup of state and for lateness.
    """

    clock: TimeDomain

    @abstractmethod
    def assign_windows(self, value: Any, timestamp_ms: int | None, processing_time_ms: int) -> Windows:
        """Return an element's windows; with none it is dropped."""

    @abstractmethod
    def default_trigger(self) -> Trigger:
        """Return the default trigger."""

    def default_evictor(self) -> Evictor | None:
        """Return the default evictor."""
        return None


class MergingWindowAssigner(WindowAssigner):
    """An assigner whose windows may merge: each element begins with its own window."""

    def merge_windows(self, windows: Iterable[TimeWindow]) -> Iterable[tuple[TimeWindow, Windows]]:
        """Return merges of a key's windows: each new window, with the two or more windows that it replaces.

        Called with all windows of a key whenever a window is added. This implementation merges windows that
        overlap or touch; an override must name windows in the order of their starts.
        """
        merged: list[tuple[TimeWindow, list[TimeWindow]]] = []
        for window in sorted(set(windows)):
            if merged and merged[-1][0].intersects(window):
                cover, parts = merged[-1]
                parts.append(window)
                merged[-1] = cover.cover(window), parts
            else:
                merged.append((window, [window]))
        return [(cover, parts) for cover, parts in merged if len(parts) > 1]


class _EventTime(WindowAssigner):
    clock = TimeDomain.EVENT_TIME

    def default_trigger(self) -> Trigger:
        return EventTimeTrigger()

    @staticmethod
    def _choose_time(timestamp_ms: int | None, processing_time_ms: int) -> int:
        if timestamp_ms is None:
            raise NoEventTime
        return timestamp_ms


class _ProcessingTime(WindowAssigner):
    clock = TimeDomain.PROCESSING_TIME

    def default_trigger(self) -> Trigger:
        return ProcessingTimeTrigger()

    @staticmethod
    def _choose_time(timestamp_ms: int | None, processing_time_ms: int) -> int:
        return processing_time_ms


class _ClockAssigner(WindowAssigner):
    @staticmethod
    @abstractmethod
    def _choose_time(timestamp_ms: int | None, processing_time_ms: int) -> int:
        """Return the time that decides the element's windows."""


class _Tumbling(_ClockAssigner):
    @check_arguments()
    def __init__(self, size_ms: Annotated[Milliseconds, POSITIVE], offset_ms: Milliseconds = 0) -> None:
        self._size_ms, self._offset_ms = size_ms, check_offset_ms(offset_ms, size_ms)
        self._made: dict[int, Windows] = {}

    @classmethod
    def of(cls, size: Duration, offset: Duration = 0) -> Self:
        """Return windows of a size: Flink's name of the constructor."""
        return cls(size, offset)

    @property
    def periods_ms(self) -> tuple[int, int, int]:
        return self._size_ms, self._size_ms, self._offset_ms

    def assign_windows(self, value: Any, timestamp_ms: int | None, processing_time_ms: int) -> Windows:
        time_ms = self._choose_time(timestamp_ms, processing_time_ms)
        start_ms = time_ms - (time_ms - self._offset_ms) % self._size_ms
        made = self._made.get(start_ms)
        return made or _remember(self._made, start_ms, (window_at(start_ms, self._size_ms),))


class _Sliding(_ClockAssigner):
    @check_arguments()
    def __init__(
        self,
        size_ms: Annotated[Milliseconds, POSITIVE],
        slide_ms: Annotated[Milliseconds, POSITIVE],
        offset_ms: Milliseconds = 0,
    ) -> None:
        self._size_ms, self._slide_ms = size_ms, slide_ms
        self._offset_ms = check_offset_ms(offset_ms, slide_ms)
        self._made: dict[int, Windows] = {}

    @classmethod
    def of(cls, size: Duration, slide: Duration, offset: Duration = 0) -> Self:
        """Return windows of a size and a slide: Flink's name of the constructor."""
        return cls(size, slide, offset)

    @property
    def periods_ms(self) -> tuple[int, int, int]:
        return self._size_ms, self._slide_ms, self._offset_ms

    def assign_windows(self, value: Any, timestamp_ms: int | None, processing_time_ms: int) -> Windows:
        """Return all windows around an element's time, the latest first."""
        time_ms = self._choose_time(timestamp_ms, processing_time_ms)
        last_ms = time_ms - (time_ms - self._offset_ms) % self._slide_ms
        # The number of windows may depend on the time; the first start and the number identify them.
        starts = range(last_ms, time_ms - self._size_ms, -self._slide_ms)
        made = self._made.get(last_ms)
        if made is not None and len(made) == len(starts):
            return made
        return _remember(self._made, last_ms, [window_at(start_ms, self._size_ms) for start_ms in starts])


class _Session(_ClockAssigner, MergingWindowAssigner):
    @check_arguments()
    def __init__(self, gap_ms: Annotated[Milliseconds, POSITIVE]) -> None:
        self._gap_ms = gap_ms

    @classmethod
    def with_gap(cls, size: Duration) -> Self:
        """Return sessions with a gap: Flink's name of the constructor."""
        return cls(size)

    @property
    def gap_ms(self) -> int:
        return self._gap_ms

    def assign_windows(self, value: Any, timestamp_ms: int | None, processing_time_ms: int) -> Windows:
        return (window_at(self._choose_time(timestamp_ms, processing_time_ms), self._gap_ms),)


class _DynamicSession(_ClockAssigner, MergingWindowAssigner):
    @check_arguments()
    def __init__(self, gap_ms_of: Annotated[Callable[[Any], int], Arity(1)]) -> None:
        self._gap_ms_of = gap_ms_of

    @classmethod
    def with_dynamic_gap(cls, session_gap: Any) -> Self:
        """Return sessions whose gaps a function, or an object with `extract`, returns: Flink's name."""
        return cls(getattr(session_gap, "extract", session_gap))

    def assign_windows(self, value: Any, timestamp_ms: int | None, processing_time_ms: int) -> Windows:
        gap_ms: object = self._gap_ms_of(value)
        if isinstance(gap_ms, bool) or not isinstance(gap_ms, int) or gap_ms <= 0:
            raise ValueError(f"an element's gap must be a positive number of milliseconds, not {gap_ms!r}")
        return (window_at(self._choose_time(timestamp_ms, processing_time_ms), gap_ms),)


class TumblingEventTimeWindows(_EventTime, _Tumbling):
    """Tumbling windows by event time.

    Parameters
    ----------
    size_ms
        Positive.
    offset_ms
        Where the first one after 1970 begins; smaller than the size, may be negative.

    Examples
    --------
    >>> TumblingEventTimeWindows(60_000).assign_windows("value", 61_000, 0)
    (TimeWindow(start_ms=60000, end_ms=120000),)
    """


class TumblingProcessingTimeWindows(_ProcessingTime, _Tumbling):
    """Tumbling windows by processing time; see :class:`TumblingEventTimeWindows`."""


class SlidingEventTimeWindows(_EventTime, _Sliding):
    """Sliding windows by event time: one begins every `slide_ms`; longer ones overlap.

    Parameters
    ----------
    size_ms, slide_ms
        Positive. With a slide that is greater than the size, elements between windows are dropped.
    offset_ms
        Where the first one after 1970 begins; smaller than the slide, may be negative.

    Examples
    --------
    >>> SlidingEventTimeWindows(10, 5).assign_windows("value", 12, 0)
    [TimeWindow(start_ms=10, end_ms=20), TimeWindow(start_ms=5, end_ms=15)]
    """


class SlidingProcessingTimeWindows(_ProcessingTime, _Sliding):
    """Sliding windows by processing time; see :class:`SlidingEventTimeWindows`."""


class EventTimeSessionWindows(_EventTime, _Session):
    """Sessions by event time, which end when a key has no element for longer than `gap_ms`."""

    @classmethod
    def with_dynamic_gap(cls, session_gap: Any) -> DynamicEventTimeSessionWindows:
        """Return sessions with a gap per element: Flink's name of another constructor."""
        return DynamicEventTimeSessionWindows.with_dynamic_gap(session_gap)


class ProcessingTimeSessionWindows(_ProcessingTime, _Session):
    """Sessions by processing time; see :class:`EventTimeSessionWindows`."""

    @classmethod
    def with_dynamic_gap(cls, session_gap: Any) -> DynamicProcessingTimeSessionWindows:
        """Return sessions with a gap per element: Flink's name of another constructor."""
        return DynamicProcessingTimeSessionWindows.with_dynamic_gap(session_gap)


class DynamicEventTimeSessionWindows(_EventTime, _DynamicSession):
    """Sessions by event time with a gap per element.

    Parameters
    ----------
    gap_ms_of
        From an element to the gap after it, in milliseconds; must be positive.
    """


class DynamicProcessingTimeSessionWindows(_ProcessingTime, _DynamicSession):
    """Dynamic sessions by processing time; see :class:`DynamicEventTimeSessionWindows`."""


class GlobalWindows(WindowAssigner):
    """One window per key for all elements. It never ends: without a trigger it emits nothing."""

    clock = TimeDomain.PROCESSING_TIME

    @classmethod
    def create(cls) -> Self:
        """Return the assigner: Flink's name of the constructor."""
        return cls()

    def assign_windows(self, value: Any, timestamp_ms: int | None, processing_time_ms: int) -> Windows:
        return (GLOBAL_WINDOW,)

    def default_trigger(self) -> Trigger:
        return NeverTrigger()


class CountSlidingWindowAssigner(GlobalWindows):
    """Windows of `size` elements of a key, each `slide` elements after the last; as PyFlink's `count_window`.

    The first fires when there are `size` elements. `KeyedStream.count_window(size, slide)` is Java's: it
    fires at each `slide` elements from the first on, with fewer than `size` at the beginning.
    """

    @check_arguments()
    def __init__(self, size: Annotated[int, POSITIVE], slide: Annotated[int, POSITIVE]) -> None:
        self._size, self._slide = size, slide

    @classmethod
    def of(cls, window_size: int, window_slide: int) -> Self:
        """Return the assigner: Flink's name of the constructor."""
        return cls(window_size, window_slide)

    def default_trigger(self) -> Trigger:
        return CountTrigger(self._slide, first=self._size)

    def default_evictor(self) -> Evictor:
        return CountEvictor(self._size)


def make_assign(assigner: WindowAssigner) -> Callable[[Any, int | None, int], Windows]:
    """Return the assigner's method; if the assigner is the user's, with a check of its results."""
    if type(assigner).__module__ == __name__:
        return assigner.assign_windows

    def check_windows(value: Any, timestamp_ms: int | None, processing_time_ms: int) -> Windows:
        windows: Windows = assigner.assign_windows(value, timestamp_ms, processing_time_ms)
        are_windows = isinstance(windows, list | tuple) and all(
            isinstance(one, TimeWindow) and all(isinstance(bound_ms, Integral) for bound_ms in one)
            for one in windows
        )
        if not are_windows:
            raise TypeError(
                f"assign_windows() of {type(assigner).__name__} has returned {windows!r}; it must return a "
                "list of TimeWindow(start_ms, end_ms), both whole numbers; an empty one drops the element"
            )
        return windows

    return check_windows


def _remember(made: dict[int, Windows], at_ms: int, windows: Windows) -> Windows:
    """Cache windows by time, since most elements belong to windows of recent elements."""
    if len(made) >= _REMEMBERED:
        made.clear()
    made[at_ms] = windows
    return windows
