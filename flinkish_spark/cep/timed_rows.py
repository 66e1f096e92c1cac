"""Rows of many keys, stored as columns, that wait for the watermark to reach their times."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, OutputTag
from flinkish_spark.operators.context import FunctionContext, put_aside
from flinkish_spark.state.columnar import ColumnarState
from flinkish_spark.state.descriptors import ListStateDescriptor
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.layered import Array, KeyIndex
from flinkish_spark.types.exact_columns import exact_cast
from flinkish_spark.types.rows import ElementType
from flinkish_spark.types.to_python import to_values


@dataclass
class DueRows:
    """Rows that are due in a micro-batch, sorted by key, time and arrival."""

    #: Fields of the elements as tuples, and their times.
    rows: Sequence[Any] = ()
    times_ms: Sequence[int] = ()
    #: Further facts about them, column by column.
    facts: Sequence[Sequence[Any]] = ()
    #: Their fields as columns; empty if rows come one by one.
    columns: Sequence[pa.Array] = ()
    _of_key: dict[Any, tuple[int, int]] = field(default_factory=dict)
    #: By key, the time of its first row that is not due.
    _later_ms: dict[Any, int] = field(default_factory=dict)

    def take(self, key: Any, now_ms: int) -> range:
        begin, end = self._of_key.pop(key, (0, 0))
        until = bisect_right(self.times_ms, now_ms, begin, end)
        if until < end:
            self._of_key[key] = until, end
        return range(begin, until)

    @property
    def begins(self) -> Array:
        return np.array([begin for begin, _ in self._of_key.values()], dtype=np.int64)

    def next_ms(self, key: Any) -> int | None:
        if key in self._of_key:
            return self.times_ms[self._of_key[key][0]]
        return self._later_ms.get(key)


@dataclass
class DueColumns:
    """Rows that are due in a micro-batch as columns, in the order of :class:`DueRows`."""

    #: Fields of all waiting rows, and the positions of the due rows in them; unused columns are not copied.
    fields: list[pa.Array]
    rows: Array
    #: Further facts about the due rows, and their times.
    facts: list[pa.Array]
    times_ms: Array
    #: By key, the position of its first row, and the number of its rows.
    begins: Array
    counts: Array
    #: By key, the time of its first row that is not due; MAX_WATERMARK_MS if there is none.
    later_ms: Array


class TimedRows:
    """Stored waiting rows of an operator: a list per key, sorted by time."""

    def __init__(
        self,
        name: str,
        element: ElementType,
        facts: str,
        time_field: int | None,
        late_output: OutputTag | None,
    ) -> None:
        fields = [element.stored_fields, *([facts] if facts else []), "__time_ms LONG"]
        self.state = ListStateDescriptor(name, ", ".join(fields))
        self.time_field, self._late_output = time_field, late_output
        self.width = len(element.fields)
        #: The due rows of the current key group.
        self.due = DueRows()

    def open(self, states: KeyedStates) -> None:
        states.get_list_state(self.state)

    def late(self, value: Any, context: FunctionContext) -> None:
        """Put a late row aside; refuse one without a time. This is a :data:`Processor`."""
        if context.timestamp_ms in (None, MIN_WATERMARK_MS):
            raise ValueError(
                "patterns by event time need events with a time: assign timestamps and watermarks, and let "
                "none be null; or call in_processing_time()"
            )
        put_aside(context, self._late_output, value[: self.width])


class WaitingRows:
    """Stored and new waiting rows of some keys of a key group."""

    def __init__(
        self,
        timed: TimedRows,
        index: KeyIndex,
        state: ColumnarState,
        columns: Sequence[pa.Array],
        times_ms: Array,
    ) -> None:
        self._timed, self.index, self._state = timed, index, state
        count = len(times_ms)
        stored: pa.ListArray = state.column()
        lengths = pc.fill_null(pc.list_value_length(stored), 0).to_numpy()
        entries: pa.StructArray = stored.flatten()
        kinds = [one.type for one in entries.type]
        own = [*columns, pa.array(times_ms)]
        own = [exact_cast(one, kind) for one, kind in zip(own, kinds, strict=True)]
        if len(entries):
            own = [pa.concat_arrays(parts) for parts in zip(entries.flatten(), own, strict=True)]
        self._columns, self._type = own, entries.type
        self._had, self._has_new = lengths > 0, np.zeros(len(index), dtype=bool)
        new_keys = index.of_row[:count]
        self._has_new[new_keys] = True
        keys = np.concatenate([np.repeat(np.arange(len(index)), lengths), new_keys])
        times = own[-1].to_numpy()
        # Stored rows come first, so rows of the same time stay in the order of arrival.
        self._order = _sort_rows(keys, times)
        self._key, self._times_ms = keys[self._order], times[self._order]
        # Rows are sorted, so the first row of a key begins its run.
        begins = np.array([begin for _, begin, _ in _find_runs(self._key)], dtype=np.int64)
        is_new = self._order >= len(keys) - count
        self._first_new = begins[is_new[begins]]

    @cached_property
    def keys(self) -> Sequence[Any]:
        parts = [to_values(column) for column in self.index.keys]
        return parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))

    def list_first_new(self, where: Array | None = None) -> Iterable[tuple[Any, int]]:
        first = self._first_new if where is None else self._first_new[where[self._key[self._first_new]]]
        return zip((self.keys[at] for at in self._key[first]), self._times_ms[first].tolist(), strict=True)

    def take_due(self, limit_ms: int, where: Array | None = None) -> DueRows:
        """Return the rows up to a time, of all keys or only of those in `where`."""
        self._is_due = is_due = self._times_ms <= limit_ms
        own = True if where is None else where[self._key]
        places, later = np.flatnonzero(is_due & own), np.flatnonzero(~is_due & own)
        taken, width = pa.array(self._order[places]), self._timed.width
        arrays = [column.take(taken) for column in self._columns]
        columns = [to_values(one) for one in arrays]
        rows = list(zip(*columns[:width], strict=True))
        found = DueRows(rows, columns[-1], columns[width:-1], arrays[:width])
        for number, begin, end in _find_runs(self._key[places]):
            found._of_key[self.keys[number]] = begin, end
        for number, begin, _ in _find_runs(self._key[later]):
            found._later_ms[self.keys[number]] = int(self._times_ms[later[begin]])
        return found

    def take_due_columns(self, limit_ms: int) -> DueColumns:
        self._is_due = is_due = self._times_ms <= limit_ms
        places, later = np.flatnonzero(is_due), np.flatnonzero(~is_due)
        counts = np.bincount(self._key[places], minlength=len(self.index))
        later_ms = np.full(len(self.index), MAX_WATERMARK_MS)
        of_later = self._key[later]
        first = np.flatnonzero(np.append(True, of_later[1:] != of_later[:-1])) if len(later) else later
        later_ms[of_later[first]] = self._times_ms[later[first]]
        width, rows = self._timed.width, self._order[places]
        facts = [column.take(pa.array(rows)) for column in self._columns[width:-1]]
        return DueColumns(
            *(self._columns[:width], rows, facts, self._times_ms[places]),
            *(np.cumsum(counts) - counts, counts, later_ms),
        )

    def store(self) -> None:
        later = np.flatnonzero(~self._is_due)
        counts = np.bincount(self._key[later], minlength=len(self.index))
        lost = np.bincount(self._key[self._is_due], minlength=len(self.index)) > 0
        changed, left = self._has_new | lost, counts > 0
        written = changed & left
        if written.any():
            rows = later[written[self._key[later]]]
            taken = pa.array(self._order[rows])
            parts = [column.take(taken) for column in self._columns]
            entries = pa.StructArray.from_arrays(parts, fields=list(self._type))
            offsets = np.concatenate([[0], np.cumsum(counts[written])]).astype(np.int32)
            self._state.put([pa.ListArray.from_arrays(pa.array(offsets), entries)], where=written)
        gone = changed & ~left & self._had
        if gone.any():
            self._state.remove(gone)


def _sort_rows(keys: Array, times_ms: Array) -> Array:
    count = len(keys)
    if not count:
        return np.empty(0, dtype=np.int64)
    first_ms, bits = int(times_ms.min()), count.bit_length()
    span = (int(times_ms.max()) - first_ms).bit_length()
    if int(keys.max()).bit_length() + span + bits > 62:
        return np.lexsort((times_ms, keys))
    # Key, time and position as one number: sorting numbers takes a tenth of the time of lexsort.
    whole: Array = ((keys << span) + (times_ms - first_ms) << bits) + np.arange(count)
    whole.sort()
    return whole & ((1 << bits) - 1)


def _find_runs(numbers: Array) -> Iterable[tuple[int, int, int]]:
    if not len(numbers):
        return ()
    begins = np.concatenate([[0], np.flatnonzero(np.diff(numbers)) + 1])
    ends = np.append(begins[1:], len(numbers))
    return zip(numbers[begins].tolist(), begins.tolist(), ends.tolist(), strict=True)
