"""Open windows of a key group that a function of the user's folds element by element, in one loop.

What a window has are a few attributes of an object: no state is asked for, no timer registered. They fire in
the order of timers all the same (see :mod:`flinkish_spark.operators.timers`): by time, and at the same time
in the order in which the windows became what they are.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, length_hint
from typing import Any

from flinkish_spark.operators.column_windows import AlignedWindows, ColumnWindows, SessionWindows
from flinkish_spark.operators.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from flinkish_spark.operators.group_run import ElementFailed
from flinkish_spark.operators.key_index import Array
from flinkish_spark.user_iterators import USER_ERRORS


class OpenWindow:
    """A window of a key, and what its elements were folded to.

    Parameters
    ----------
    key
        Number of its key.
    order
        Its place among all windows of the key group, by when it got its present bounds.
    row
        Which of the stored rows says the same; None if there is none, since something has changed.
    """

    __slots__ = ("accumulator", "end_ms", "key", "order", "row", "start_ms")

    def __init__(
        self, key: int, start_ms: int, end_ms: int, order: int, accumulator: Any, row: int | None = None
    ) -> None:
        self.key, self.start_ms, self.end_ms = key, start_ms, end_ms
        self.order, self.accumulator, self.row = order, accumulator, row


@dataclass(frozen=True)
class Folding:
    """What folds the elements of a window.

    Parameters
    ----------
    begin
        From the first element to the accumulator.
    add
        From an element and the accumulator to the next one; never called with None for that.
    merge
        From the accumulators of two windows, the earlier one first, to that of both.
    result
        From the accumulator to the result; None for none.
    elements
        From the result to what a window function is given.
    """

    begin: Callable[[Any], Any]
    add: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any]
    result: Callable[[Any], Any]
    elements: Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Arrived:
    """Elements on one side of the watermark, in their order.

    Parameters
    ----------
    keys, times_ms, values
        Number of each one's key, its time by the windows' clock, and the element. If there are fewer times
        than elements, the others are not looked at.
    """

    keys: Sequence[int]
    times_ms: Array
    values: Iterable[Any]
    is_before: bool

    def place(self, left: Iterator[int]) -> int:
        """Return which element it is, of whose keys these are left: nobody has to count in the loop."""
        return len(self.keys) - length_hint(left) - 1


_START = attrgetter("start_ms")
#: Times so far from the ends of 64 bits that windows around them can be reckoned with in those.
_NEAR_NOW_MS = 1 << 62

#: Place, element and time of one that came too late.
Late = tuple[int, Any, int]


class OpenWindows(ABC):
    """All open windows of the keys at hand.

    Parameters
    ----------
    keys
        How many keys there are.
    registered
        How many places in the order of windows were given out.
    """

    def __init__(self, folding: Folding, keys: int, registered: int) -> None:
        self._folding = folding
        self._orders = itertools.count(registered)

    @property
    def registered(self) -> int:
        """How many places were given out; asked once, behind all that has happened."""
        return next(self._orders)

    @abstractmethod
    def put(self, windows: Iterable[OpenWindow]) -> None:
        """Take over stored windows."""

    def add(self, arrived: Arrived, watermark_ms: int) -> list[Late]:
        """Add elements; return those that came too late.

        Raises
        ------
        ElementFailed
            The function raised at one.
        """
        late: list[Late] = []
        keys = iter(arrived.keys)
        try:
            self._add(keys, arrived, watermark_ms, late)
        except USER_ERRORS as error:
            raise ElementFailed(arrived.place(keys), arrived.is_before, error) from error
        return late

    def due(self, now_ms: int) -> list[OpenWindow]:
        """Take the windows that end up to that time, in the order in which they fire."""
        found = self._taken(over_by(now_ms))
        found.sort(key=attrgetter("end_ms", "order"))
        return found

    @abstractmethod
    def living(self) -> Iterator[OpenWindow]:
        """Yield the windows that are still open."""

    @abstractmethod
    def _add(self, keys: Iterator[int], arrived: Arrived, watermark_ms: int, late: list[Late]) -> None:
        """Add elements; `keys` are those of `arrived`."""

    @abstractmethod
    def _taken(self, over_ms: int) -> list[OpenWindow]:
        """Take the windows with an end up to that one."""


class OpenSessions(OpenWindows):
    """Windows that are one where they overlap or touch.

    Those of a key are in the order of their times: so nearly every element belongs to the last, or behind it.
    """

    def __init__(self, windows: SessionWindows, folding: Folding, keys: int, registered: int) -> None:
        super().__init__(folding, keys, registered)
        self._gap_ms = windows.gap_ms
        self._of_key: list[list[OpenWindow]] = [[] for _ in range(keys)]

    def put(self, windows: Iterable[OpenWindow]) -> None:
        """Take over stored windows."""
        for window in sorted(windows, key=_START):
            self._of_key[window.key].append(window)

    def living(self) -> Iterator[OpenWindow]:
        """Yield the windows that are still open."""
        return itertools.chain.from_iterable(self._of_key)

    def _add(self, keys: Iterator[int], arrived: Arrived, watermark_ms: int, late: list[Late]) -> None:
        of_key, gap_ms, over_ms = self._of_key, self._gap_ms, over_by(watermark_ms)
        begin, add, orders = self._folding.begin, self._folding.add, self._orders
        for key, time_ms, value in zip(keys, arrived.times_ms.tolist(), arrived.values, strict=False):
            windows = of_key[key]
            end_ms = time_ms + gap_ms
            if end_ms > MAX_WATERMARK_MS:
                end_ms = MAX_WATERMARK_MS
            window = windows[-1] if windows else None
            if window is not None and time_ms < window.start_ms:
                window = self._near(windows, time_ms, end_ms)
            if window is not None and time_ms <= window.end_ms:
                if end_ms > window.end_ms:
                    window.end_ms, window.order = end_ms, next(orders)
                before = window.accumulator
                window.accumulator = begin(value) if before is None else add(value, before)
                window.row = None
            elif end_ms <= over_ms:
                late.append((arrived.place(keys), value, time_ms))
            else:
                new = OpenWindow(key, time_ms, end_ms, next(orders), begin(value))
                if windows and time_ms < windows[-1].start_ms:
                    insort(windows, new, key=_START)
                else:
                    windows.append(new)

    def _near(self, windows: list[OpenWindow], time_ms: int, end_ms: int) -> OpenWindow | None:
        """Return what the windows near an element that is before the last one became; None without any."""
        at = bisect_right(windows, time_ms, key=_START)
        first = max(at - 1, 0)
        if windows[first].end_ms < time_ms:
            first += 1
        behind = first
        while behind < len(windows) and windows[behind].start_ms <= end_ms:
            behind += 1
        if behind == first:
            return None
        window = windows[first]
        if behind - first > 1 or time_ms < window.start_ms:
            self._merge(windows[first:behind], time_ms, end_ms)
            del windows[first + 1 : behind]
        return window

    def _merge(self, near: list[OpenWindow], time_ms: int, end_ms: int) -> None:
        """Let the first of some windows be all of them, and the element's."""
        first, *others = near
        for other in others:
            before = first.accumulator
            merged = other.accumulator if before is None else self._folding.merge(before, other.accumulator)
            first.accumulator = merged
        first.start_ms = min(first.start_ms, time_ms)
        first.end_ms = max(near[-1].end_ms, end_ms)
        first.order = next(self._orders)

    def _taken(self, over_ms: int) -> list[OpenWindow]:
        found: list[OpenWindow] = []
        for windows in self._of_key:
            count = 0
            for window in windows:
                if window.end_ms > over_ms:
                    break
                count += 1
            if count:
                found += windows[:count]
                del windows[:count]
        return found


class OpenAligned(OpenWindows):
    """Tumbling and sliding windows: those of a key by their starts, as they are where time has no end."""

    def __init__(self, windows: AlignedWindows, folding: Folding, keys: int, registered: int) -> None:
        super().__init__(folding, keys, registered)
        self._windows = windows
        self._of_key: list[dict[object, OpenWindow]] = [{} for _ in range(keys)]

    def put(self, windows: Iterable[OpenWindow]) -> None:
        """Take over stored windows."""
        size_ms = self._windows.size_ms
        for window in windows:
            start_ms, end_ms = bounds = window.start_ms, window.end_ms
            if start_ms == MIN_WATERMARK_MS:
                start_ms = end_ms - size_ms
            is_own = end_ms - start_ms == size_ms or bounds == _cut(start_ms, size_ms)
            # One of an earlier program, of another size, takes no more elements.
            self._of_key[window.key][start_ms if is_own else bounds] = window

    def living(self) -> Iterator[OpenWindow]:
        """Yield the windows that are still open."""
        for windows in self._of_key:
            yield from windows.values()

    def _add(self, keys: Iterator[int], arrived: Arrived, watermark_ms: int, late: list[Late]) -> None:
        times_ms = arrived.times_ms
        slices = self._windows.slices(times_ms) if _is_near_now(times_ms) else times_ms
        begin, add = self._folding.begin, self._folding.add
        # By key and slice, the windows that take its elements: none of them ends in here.
        taking: list[dict[int, list[OpenWindow]]] = [{} for _ in self._of_key]
        given = zip(keys, slices.tolist(), times_ms.tolist(), arrived.values, strict=False)
        for key, slice_ms, time_ms, value in given:
            windows = taking[key].get(slice_ms)
            if windows is None:
                windows = taking[key][slice_ms] = self._around(key, time_ms, watermark_ms)
            for window in windows:
                before = window.accumulator
                window.accumulator = begin(value) if before is None else add(value, before)
            if not windows and time_ms <= watermark_ms:
                late.append((arrived.place(keys), value, time_ms))

    def _around(self, key: int, time_ms: int, watermark_ms: int) -> list[OpenWindow]:
        """Return the windows around a time that are not over, the latest first; those that are new, too."""
        if watermark_ms == MAX_WATERMARK_MS:
            return []
        windows, found = self._of_key[key], list[OpenWindow]()
        size_ms, slide_ms = self._windows.size_ms, self._windows.slide_ms
        latest_ms = time_ms - (time_ms - self._windows.offset_ms) % slide_ms
        before_ms = max(time_ms, over_by(watermark_ms)) - size_ms
        for start_ms in range(latest_ms, before_ms, -slide_ms):
            window = windows.get(start_ms)
            if window is None:
                bounds = _cut(start_ms, size_ms)
                window = windows[start_ms] = OpenWindow(key, *bounds, next(self._orders), None)
            # Something is added to each of them at once.
            window.row = None
            found.append(window)
        return found

    def _taken(self, over_ms: int) -> list[OpenWindow]:
        found: list[OpenWindow] = []
        for windows in self._of_key:
            over = [start_ms for start_ms, window in windows.items() if window.end_ms <= over_ms]
            found += map(windows.pop, over)
        return found


def open_windows(windows: ColumnWindows, folding: Folding, keys: int, registered: int) -> OpenWindows:
    """Return what has the open windows of that kind; parameters as of :class:`OpenWindows`."""
    if isinstance(windows, SessionWindows):
        return OpenSessions(windows, folding, keys, registered)
    assert isinstance(windows, AlignedWindows)
    return OpenAligned(windows, folding, keys, registered)


def over_by(now_ms: int) -> int:
    """Return the greatest end of windows whose last instant has come; the end of all time is one itself.

    Examples
    --------
    >>> over_by(9), over_by(MAX_WATERMARK_MS) == MAX_WATERMARK_MS
    (10, True)
    """
    return now_ms if now_ms == MAX_WATERMARK_MS else min(now_ms + 1, MAX_WATERMARK_MS - 1)


def _cut(start_ms: int, size_ms: int) -> tuple[int, int]:
    """Return the bounds of a window, cut where 64 bits end."""
    end_ms = start_ms + size_ms
    if start_ms < MIN_WATERMARK_MS or end_ms > MAX_WATERMARK_MS:
        return max(start_ms, MIN_WATERMARK_MS), min(end_ms, MAX_WATERMARK_MS)
    return start_ms, end_ms


def _is_near_now(times_ms: Array) -> bool:
    if not len(times_ms):
        return True
    return bool(times_ms.min() > -_NEAR_NOW_MS and times_ms.max() < _NEAR_NOW_MS)
