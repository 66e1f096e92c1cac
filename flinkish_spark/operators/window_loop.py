"""Windows folded by a function of the user, in one loop per key group.

A faster :class:`~flinkish_spark.operators.windowing.WindowOperator` for the usual windows, which fire once,
at their end: the same results, calls, order and stored state, without a state object and a timer per window.
Windows fire in the order of timers: by time, then by when they got their current bounds. A changed program
may continue with either operator.
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
    NoColumnWindows,
    SessionWindows,
    StoredWindows,
    find_column_windows,
    find_last_ms,
)
from flinkish_spark.operators.context import close_part, open_part
from flinkish_spark.operators.process import ElementError
from flinkish_spark.operators.window_contents import (
    OPEN,
    Folding,
    get_part_function,
    get_window_function,
    make_contents_descriptor,
    make_folding,
)
from flinkish_spark.operators.windowing import FIRED
from flinkish_spark.state.codec import decode_values, encode_values, values_in
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.layered import Array
from flinkish_spark.types.rows import ElementType
from flinkish_spark.windows.functions import KeyAndWindowBounds, ProcessWindowFunction, WindowBounds
from flinkish_spark.windows.spec import ProcessWindow, WindowComputation, WindowSpec


class OpenWindow:
    __slots__ = ("accumulator", "end_ms", "key", "order", "row", "start_ms")

    def __init__(
        self, key: int, start_ms: int, end_ms: int, order: int, accumulator: Any, row: int | None = None
    ) -> None:
        self.key, self.start_ms, self.end_ms = key, start_ms, end_ms
        self.order, self.accumulator, self.row = order, accumulator, row


class ArrivedElements:
    """Elements on one side of the watermark, in their order."""

    def __init__(self, parts: Sequence[tuple[Array, pa.Array, Iterator[Any]]], *, is_before: bool) -> None:
        keys, times_ms, values = zip(*parts, strict=True)
        #: Number of each element's key, and the elements.
        self.keys: Sequence[int] = np.concatenate(keys).tolist()
        self.values: Iterable[Any] = itertools.chain.from_iterable(values)
        times = pa.concat_arrays(times_ms)
        if times.null_count:
            # The loop ends at the first element without a time.
            times = times.slice(0, pc.index(times.is_null(), True).as_py())
        #: Times by the windows' clock, up to the first element without one.
        self.times_ms: Array = times.to_numpy()
        self.is_before = is_before

    def find_place(self, left: Iterator[int]) -> int:
        return len(self.keys) - length_hint(left) - 1


_START = attrgetter("start_ms")
_NEAR_NOW_MS = 1 << 62

#: Position, value and time of a late element.
Late = tuple[int, Any, int]


class OpenWindows(ABC):
    def __init__(self, folding: Folding, keys: int, registered: int) -> None:
        self._folding = folding
        self._orders = itertools.count(registered)

    @property
    def registered(self) -> int:
        return next(self._orders)

    @abstractmethod
    def put(self, windows: Iterable[OpenWindow]) -> None: ...

    def add(self, arrived: ArrivedElements, watermark_ms: int) -> list[Late]:
        late: list[Late] = []
        keys = iter(arrived.keys)
        try:
            self._add(keys, arrived, watermark_ms, late)
        except USER_ERRORS as error:
            raise ElementError(arrived.find_place(keys), arrived.is_before, error) from error
        return late

    def take_due(self, now_ms: int) -> list[OpenWindow]:
        found = self._take_ended(find_greatest_end(now_ms))
        found.sort(key=attrgetter("end_ms", "order"))
        return found

    @abstractmethod
    def living(self) -> Iterator[OpenWindow]: ...

    @abstractmethod
    def _add(
        self, keys: Iterator[int], arrived: ArrivedElements, watermark_ms: int, late: list[Late]
    ) -> None:
        """Add elements; `keys` iterates over the keys of `arrived`."""

    @abstractmethod
    def _take_ended(self, over_ms: int) -> list[OpenWindow]:
        """Remove and return the windows that end at `over_ms` or before."""


class OpenSessions(OpenWindows):
    """Sessions, which merge where they overlap or touch; sorted by time per key."""

    def __init__(self, windows: SessionWindows, folding: Folding, keys: int, registered: int) -> None:
        super().__init__(folding, keys, registered)
        self._gap_ms = windows.gap_ms
        self._of_key: list[list[OpenWindow]] = [[] for _ in range(keys)]

    def put(self, windows: Iterable[OpenWindow]) -> None:
        for window in sorted(windows, key=_START):
            self._of_key[window.key].append(window)

    def living(self) -> Iterator[OpenWindow]:
        return itertools.chain.from_iterable(self._of_key)

    def _add(
        self, keys: Iterator[int], arrived: ArrivedElements, watermark_ms: int, late: list[Late]
    ) -> None:
        of_key, gap_ms, over_ms = self._of_key, self._gap_ms, find_greatest_end(watermark_ms)
        begin, add, orders = self._folding.begin, self._folding.add, self._orders
        for key, time_ms, value in zip(keys, arrived.times_ms.tolist(), arrived.values, strict=False):
            windows = of_key[key]
            end_ms = time_ms + gap_ms
            if end_ms > MAX_WATERMARK_MS:
                end_ms = MAX_WATERMARK_MS
            window = windows[-1] if windows else None
            if window is not None and time_ms < window.start_ms:
                window = self._merge_sessions_near(windows, time_ms, end_ms)
            if window is not None and time_ms <= window.end_ms:
                if end_ms > window.end_ms:
                    window.end_ms, window.order = end_ms, next(orders)
                before = window.accumulator
                window.accumulator = begin(value) if before is None else add(value, before)
                window.row = None
            elif end_ms <= over_ms:
                late.append((arrived.find_place(keys), value, time_ms))
            else:
                new = OpenWindow(key, time_ms, end_ms, next(orders), begin(value))
                if windows and time_ms < windows[-1].start_ms:
                    insort(windows, new, key=_START)
                else:
                    windows.append(new)

    def _merge_sessions_near(self, windows: list[OpenWindow], time_ms: int, end_ms: int) -> OpenWindow | None:
        """Merge the sessions near an out-of-order element; return the merged one, or None without any."""
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

    def _take_ended(self, over_ms: int) -> list[OpenWindow]:
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


class OpenAlignedWindows(OpenWindows):
    """Tumbling and sliding windows per key, by their starts before these are cut at the ends of 64 bits."""

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
            # A window of an earlier program with another size gets no more elements.
            self._of_key[window.key][start_ms if is_own else bounds] = window

    def living(self) -> Iterator[OpenWindow]:
        for windows in self._of_key:
            yield from windows.values()

    def _add(
        self, keys: Iterator[int], arrived: ArrivedElements, watermark_ms: int, late: list[Late]
    ) -> None:
        times_ms = arrived.times_ms
        # Slices of times too near to the ends of 64 bits would overflow.
        is_near_now = times_ms.min(initial=0) > -_NEAR_NOW_MS and times_ms.max(initial=0) < _NEAR_NOW_MS
        slices = self._windows.find_slices(times_ms) if is_near_now else times_ms
        begin, add, take = self._folding.begin, self._folding.add, self._folding.take
        # By key and slice, the windows of its elements; none of them fires in this loop.
        taking: list[dict[int, list[OpenWindow]]] = [{} for _ in self._of_key]
        given = zip(keys, slices.tolist(), times_ms.tolist(), arrived.values, strict=False)
        for key, slice_ms, time_ms, value in given:
            windows = taking[key].get(slice_ms)
            if windows is None:
                windows = taking[key][slice_ms] = self._open_around(key, time_ms, watermark_ms)
            for window in windows:
                before = window.accumulator
                own = value if take is None or window is windows[-1] else take(value)
                window.accumulator = begin(own) if before is None else add(own, before)
            if not windows and time_ms <= watermark_ms:
                late.append((arrived.find_place(keys), value, time_ms))

    def _open_around(self, key: int, time_ms: int, watermark_ms: int) -> list[OpenWindow]:
        """Return the windows of a time that are not over, latest first; open missing ones."""
        if watermark_ms == MAX_WATERMARK_MS:
            return []
        windows, found = self._of_key[key], list[OpenWindow]()
        size_ms, slide_ms = self._windows.size_ms, self._windows.slide_ms
        latest_ms = time_ms - (time_ms - self._windows.offset_ms) % slide_ms
        before_ms = max(time_ms, find_greatest_end(watermark_ms)) - size_ms
        for start_ms in range(latest_ms, before_ms, -slide_ms):
            window = windows.get(start_ms)
            if window is None:
                bounds = _cut(start_ms, size_ms)
                window = windows[start_ms] = OpenWindow(key, *bounds, next(self._orders), None)
            # The caller adds an element to each of them.
            window.row = None
            found.append(window)
        return found

    def _take_ended(self, over_ms: int) -> list[OpenWindow]:
        found: list[OpenWindow] = []
        for windows in self._of_key:
            over = [start_ms for start_ms, window in windows.items() if window.end_ms <= over_ms]
            found += map(windows.pop, over)
        return found


def find_greatest_end(now_ms: int) -> int:
    return now_ms if now_ms == MAX_WATERMARK_MS else min(now_ms + 1, MAX_WATERMARK_MS - 1)


def _cut(start_ms: int, size_ms: int) -> tuple[int, int]:
    end_ms = start_ms + size_ms
    if start_ms < MIN_WATERMARK_MS or end_ms > MAX_WATERMARK_MS:
        return max(start_ms, MIN_WATERMARK_MS), min(end_ms, MAX_WATERMARK_MS)
    return start_ms, end_ms


@dataclass(frozen=True)
class LoopedWindows:
    """Windows with their computation, as a keyed operator; pickled into the plan."""

    windows: ColumnWindows
    computation: WindowComputation
    element_type: ElementType
    #: Side output of late elements; None: they are dropped and counted.
    late_output: OutputTag | None = None

    @property
    def clock(self) -> TimeDomain:
        return self.windows.clock

    @property
    def bounds(self) -> KeyAndWindowBounds | WindowBounds | None:
        """Return the built-in function that adds key or window bounds, if it is the only window function."""
        then = None if isinstance(self.computation, ProcessWindow) else self.computation.then
        if isinstance(then, KeyAndWindowBounds | WindowBounds):
            return then if type(then) in (KeyAndWindowBounds, WindowBounds) else None
        return None

    @property
    def function(self) -> ProcessWindowFunction | None:
        return None if self.bounds is not None else get_window_function(self.computation)

    def open(self, states: KeyedStates) -> Folding:
        open_part(get_part_function(self.computation), states.uid, states.max_parallelism)
        # State of an earlier program with retractions.
        states.drop_state(FIRED)
        states.declare_namespaced(OPEN, due=self.clock)
        states.any_state(make_contents_descriptor(self.computation, self.element_type))
        return make_folding(self.computation, self.element_type)

    def close(self) -> None:
        close_part(get_part_function(self.computation))
        function = get_window_function(self.computation)
        if function is not None:
            function.close()


def make_looped_windows(
    spec: WindowSpec, computation: WindowComputation, element_type: ElementType
) -> LoopedWindows | None:
    """Return the loop operator for windows that it supports; None for others."""
    windows = find_column_windows(spec)
    if isinstance(windows, NoColumnWindows) or spec.allowed_lateness_ms:
        return None
    function = get_window_function(computation)
    # An overridden `open` may declare states, which only a worker would find out.
    own_open = None if function is None else getattr(function.open, "__func__", None)
    if function is not None and own_open is not ProcessWindowFunction.open:
        return None
    return LoopedWindows(windows, computation, element_type, spec.late_output)


class StoredOpenWindows(StoredWindows):
    """Stored windows as :class:`OpenWindow` objects."""

    def windows(self, keys: Sequence[Any]) -> list[OpenWindow]:
        start_ms, end_ms = self.stored.bounds
        last_ms, due_ms = find_last_ms(end_ms), self.stored.due_ms
        # A window whose timer is after its end has fired and is kept for late elements; it does not fire
        # again. This holds for the default trigger, and a restore refuses windows of another trigger.
        living = self.living[due_ms[self.living] <= last_ms[self.living]]
        if not len(living):
            return []
        layout = self.table.layout.contents
        order, *contents = (column.take(pa.array(living)) for column in self.stored.values)
        place = (pc.fill_null(order, 0) if order.null_count else order).to_numpy()
        number = self.stored_key[living].tolist()
        columns = [values_in(layout.name, column, layout.element) for column in contents]
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
            # Its stored timer is not its end: store it again.
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
        return self.write(places, key, (start_ms, end_ms), find_last_ms(end_ms), columns)
