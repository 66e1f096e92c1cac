"""Windows that a function of the user's folds element by element, in one loop per key group.

What :class:`~flinkish_spark.operators.windowing.WindowOperator` makes of the most usual windows (each fires
once, at its end), with the same results, calls and order, and without states and timers for each. They fire
in the order of timers all the same: by time, and then in the order in which the windows became what they are.
What is stored is the same, too: a program's windows may go on in the loop, or leave it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, length_hint
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, OutputTag, TimeDomain
from flinkish_spark.core.iterators import USER_ERRORS
from flinkish_spark.operators.columnar_windows import (
    AlignedWindows,
    ColumnWindows,
    NotOverColumns,
    SessionWindows,
    StoredWindows,
    column_windows_or_why_not,
    last_of,
)
from flinkish_spark.operators.context import close_part, open_part
from flinkish_spark.operators.process import ElementFailed
from flinkish_spark.operators.window_contents import (
    OPEN,
    Folding,
    folding_of,
    function_of,
    part_of,
    stored_contents,
)
from flinkish_spark.operators.windowing import FIRED
from flinkish_spark.state.codec import decode_values, encode_values, values_in
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.layered import Array
from flinkish_spark.types.rows import ElementType
from flinkish_spark.windows.functions import ProcessWindowFunction, WithKeyAndWindow, WithWindow
from flinkish_spark.windows.spec import ProcessWindow, WindowComputation, WindowSpec


class OpenWindow:
    """A window of a key, and what its elements were folded to."""

    __slots__ = ("accumulator", "end_ms", "key", "order", "row", "start_ms")

    def __init__(
        self, key: int, start_ms: int, end_ms: int, order: int, accumulator: Any, row: int | None = None
    ) -> None:
        self.key, self.start_ms, self.end_ms = key, start_ms, end_ms
        self.order, self.accumulator, self.row = order, accumulator, row


class Arrived:
    """Elements on one side of the watermark, in their order."""

    def __init__(self, parts: Sequence[tuple[Array, pa.Array, Iterator[Any]]], *, is_before: bool) -> None:
        keys, times_ms, values = zip(*parts, strict=True)
        #: Number of each one's key, and the element.
        self.keys: Sequence[int] = np.concatenate(keys).tolist()
        self.values: Iterable[Any] = itertools.chain.from_iterable(values)
        times = pa.concat_arrays(times_ms)
        if times.null_count:
            # The loop ends at the first element without a time; what comes after it is not looked at.
            times = times.slice(0, pc.index(times.is_null(), True).as_py())
        #: Their times by the windows' clock.
        self.times_ms: Array = times.to_numpy()
        self.is_before = is_before

    def place(self, left: Iterator[int]) -> int:
        return len(self.keys) - length_hint(left) - 1


_START = attrgetter("start_ms")
_NEAR_NOW_MS = 1 << 62

#: Place, element and time of one that came too late.
Late = tuple[int, Any, int]


class OpenWindows(ABC):
    """All open windows of the keys at hand."""

    def __init__(self, folding: Folding, keys: int, registered: int) -> None:
        self._folding = folding
        self._orders = itertools.count(registered)

    @property
    def registered(self) -> int:
        return next(self._orders)

    @abstractmethod
    def put(self, windows: Iterable[OpenWindow]) -> None: ...

    def add(self, arrived: Arrived, watermark_ms: int) -> list[Late]:
        """Add elements; return those that came too late."""
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
    def living(self) -> Iterator[OpenWindow]: ...

    @abstractmethod
    def _add(self, keys: Iterator[int], arrived: Arrived, watermark_ms: int, late: list[Late]) -> None:
        """Add elements; `keys` are those of `arrived`."""

    @abstractmethod
    def _taken(self, over_ms: int) -> list[OpenWindow]:
        """Take the windows with an end up to that one."""


class OpenSessions(OpenWindows):
    """Windows that are one where they overlap or touch; those of a key in the order of their times."""

    def __init__(self, windows: SessionWindows, folding: Folding, keys: int, registered: int) -> None:
        super().__init__(folding, keys, registered)
        self._gap_ms = windows.gap_ms
        self._of_key: list[list[OpenWindow]] = [[] for _ in range(keys)]

    def put(self, windows: Iterable[OpenWindow]) -> None:
        for window in sorted(windows, key=_START):
            self._of_key[window.key].append(window)

    def living(self) -> Iterator[OpenWindow]:
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
                window = self._merged(windows, time_ms, end_ms)
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

    def _merged(self, windows: list[OpenWindow], time_ms: int, end_ms: int) -> OpenWindow | None:
        """Return the session of an element out of order, merged of those near it; None without any."""
        at = bisect_right(windows, time_ms, key=_START)
        begin = max(at - 1, 0)
        if windows[begin].end_ms < time_ms:
            begin += 1
        end = begin
        while end < len(windows) and windows[end].start_ms <= end_ms:
            end += 1
        if end == begin:
            return None
        first, *others = windows[begin:end]
        if others or time_ms < first.start_ms:
            for other in others:
                before, behind = first.accumulator, other.accumulator
                if before is None:
                    first.accumulator = behind
                elif behind is not None:
                    first.accumulator = self._folding.merge(before, behind)
            first.start_ms = min(first.start_ms, time_ms)
            first.end_ms = max(windows[end - 1].end_ms, end_ms)
            first.order = next(self._orders)
            del windows[begin + 1 : end]
        return first

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
        size_ms = self._windows.size_ms
        for window in windows:
            start_ms, end_ms = bounds = window.start_ms, window.end_ms
            if start_ms == MIN_WATERMARK_MS:
                start_ms = end_ms - size_ms
            is_own = end_ms - start_ms == size_ms or bounds == _cut(start_ms, size_ms)
            # One of an earlier program, of another size, takes no more elements.
            self._of_key[window.key][start_ms if is_own else bounds] = window

    def living(self) -> Iterator[OpenWindow]:
        for windows in self._of_key:
            yield from windows.values()

    def _add(self, keys: Iterator[int], arrived: Arrived, watermark_ms: int, late: list[Late]) -> None:
        times_ms = arrived.times_ms
        # Windows around times that are too near to the ends of 64 bits cannot be reckoned with in those.
        is_near_now = times_ms.min(initial=0) > -_NEAR_NOW_MS and times_ms.max(initial=0) < _NEAR_NOW_MS
        slices = self._windows.slices(times_ms) if is_near_now else times_ms
        begin, add, take = self._folding.begin, self._folding.add, self._folding.take
        # By key and slice, the windows that take its elements: none of them ends in here.
        taking: list[dict[int, list[OpenWindow]]] = [{} for _ in self._of_key]
        given = zip(keys, slices.tolist(), times_ms.tolist(), arrived.values, strict=False)
        for key, slice_ms, time_ms, value in given:
            windows = taking[key].get(slice_ms)
            if windows is None:
                windows = taking[key][slice_ms] = self._around(key, time_ms, watermark_ms)
            for window in windows:
                before = window.accumulator
                own = value if take is None or window is windows[-1] else take(value)
                window.accumulator = begin(own) if before is None else add(own, before)
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


def over_by(now_ms: int) -> int:
    """Return the greatest end of windows whose last instant has come; the end of all time is one itself."""
    return now_ms if now_ms == MAX_WATERMARK_MS else min(now_ms + 1, MAX_WATERMARK_MS - 1)


def _cut(start_ms: int, size_ms: int) -> tuple[int, int]:
    """Return the bounds of a window, cut where 64 bits end."""
    end_ms = start_ms + size_ms
    if start_ms < MIN_WATERMARK_MS or end_ms > MAX_WATERMARK_MS:
        return max(start_ms, MIN_WATERMARK_MS), min(end_ms, MAX_WATERMARK_MS)
    return start_ms, end_ms


@dataclass(frozen=True)
class LoopedWindows:
    """Windows and what folds their elements, as a keyed operator; travels in the plan."""

    windows: ColumnWindows
    computation: WindowComputation
    element_type: ElementType
    #: Where late elements go; None: they are dropped and counted.
    late_output: OutputTag | None = None

    @property
    def clock(self) -> TimeDomain:
        return self.windows.clock

    @property
    def bounds(self) -> WithKeyAndWindow | WithWindow | None:
        """What of ours is put around results, if that is all; of classes made of them nobody knows."""
        then = None if isinstance(self.computation, ProcessWindow) else self.computation.then
        if isinstance(then, WithKeyAndWindow | WithWindow):
            return then if type(then) in (WithKeyAndWindow, WithWindow) else None
        return None

    @property
    def function(self) -> ProcessWindowFunction | None:
        return None if self.bounds is not None else function_of(self.computation)

    def open(self, states: KeyedStates) -> Folding:
        open_part(part_of(self.computation), states.uid, states.max_parallelism)
        # Of a program that had retractions.
        states.drop_state(FIRED)
        states.declare_namespaced(OPEN, due=self.clock)
        states.any_state(stored_contents(self.computation, self.element_type))
        return folding_of(self.computation, self.element_type)

    def close(self) -> None:
        close_part(part_of(self.computation))
        function = function_of(self.computation)
        if function is not None:
            function.close()


def looped_windows(
    spec: WindowSpec, computation: WindowComputation, element_type: ElementType
) -> LoopedWindows | None:
    """Return the operator for windows that need no more than it does; None for others."""
    windows = column_windows_or_why_not(spec)
    if isinstance(windows, NotOverColumns) or spec.allowed_lateness_ms:
        return None
    function = function_of(computation)
    # What is asked for in `open` would be known in a worker only: so it must be that which asks for nothing.
    own_open = None if function is None else getattr(function.open, "__func__", None)
    if function is not None and own_open is not ProcessWindowFunction.open:
        return None
    return LoopedWindows(windows, computation, element_type, spec.late_output)


class StoredOpenWindows(StoredWindows):
    """Stored windows as the loop works on them."""

    def windows(self, keys: Sequence[Any]) -> list[OpenWindow]:
        start_ms, end_ms = self.stored.bounds
        last_ms, due_ms = last_of(end_ms), self.stored.due_ms
        # One that is due behind its end has fired, and was kept for late elements: it fires no more. That is
        # so of this trigger, and a restore refuses windows of another one: it is of the state's meaning.
        living = self.living[due_ms[self.living] <= last_ms[self.living]]
        if not len(living):
            return []
        layout = self.table.layout.contents
        order, *contents = (column.take(pa.array(living)) for column in self.stored.values)
        place = (pc.fill_null(order, 0) if order.null_count else order).to_numpy()
        number = self.stored_key[living].tolist()
        columns = [values_in(layout.name, column) for column in contents]
        is_empty = place < 0
        of_row, there = list[Any](), list[bool]()
        if layout.decode is not None:
            of_row, there = [keys[at] for at in number], (~is_empty).tolist()
        held = decode_values(layout, columns, of_row, there)
        if is_empty.any():
            place = np.where(is_empty, ~place, place)
            held = [None if empty else one for one, empty in zip(held, is_empty.tolist(), strict=True)]
        rows: list[int | None] = living.tolist()
        for at in np.flatnonzero(due_ms[living] != last_ms[living]).tolist():
            # It was to do something before its end: it is stored anew.
            rows[at] = None
        bounds = start_ms[living].tolist(), end_ms[living].tolist()
        return list(map(OpenWindow, number, *bounds, place.tolist(), held, rows))

    def store(self, windows: Iterable[OpenWindow], keys: Sequence[Any]) -> bool:
        kept, changed = list[int](), list[OpenWindow]()
        for window in windows:
            if window.row is None:
                changed.append(window)
            else:
                kept.append(window.row)
        if not changed and len(kept) == len(self.living):
            return False
        key, start_ms, end_ms = (
            np.array(list(map(attrgetter(name), changed)), dtype=np.int64)
            for name in ("key", "start_ms", "end_ms")
        )
        values = [one.accumulator for one in changed]
        order = [~one.order if one.accumulator is None else one.order for one in changed]
        owners = [keys[one.key] for one in changed]
        columns = [pa.array(order, pa.int64()), *encode_values(self.table.layout.contents, values, owners)]
        places = np.array(kept, dtype=np.int64)
        return self.write(places, key, (start_ms, end_ms), last_of(end_ms), columns)
