"""Timers: the queue of one key group, how it is stored, vectorised timers, and the service of functions."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, TimeDomain, Timer
from flinkish_spark.state import codec
from flinkish_spark.state.layered import Array, KeyIndex, LayeredTable
from flinkish_spark.state.tables import KeyScope
from flinkish_spark.types.to_python import to_values

_NONE: Array = np.empty(0, dtype=np.int64)
_NO_PLACE = -1
#: Faster than a lookup in the enum in each call.
_EVENT_TIME, _PROCESSING_TIME = TimeDomain.EVENT_TIME, TimeDomain.PROCESSING_TIME
_new = tuple.__new__


class TimerQueue:
    """The timers of one clock; they fire by time, then in the order of registration, which is stored.

    Flink's rules: a timer is unique by (time, key, namespace); registering it again and deleting a missing
    one do nothing. A timer in the past fires with the next watermark or processing time, or, while timers
    fire, in the same round.
    """

    __slots__ = ("_heap", "_live", "_stored", "registered")

    def __init__(self, timers: Mapping[Timer, int] = MappingProxyType({}), registered: int = 0) -> None:
        self._stored = timers
        #: The present timers with their places; a heap entry with another place is of a deleted timer.
        self._live = dict(timers)
        self._heap = [(timer.time_ms, place, timer) for timer, place in timers.items()]
        heapq.heapify(self._heap)
        self.registered = registered

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, timer: Timer) -> bool:
        return timer in self._live

    @property
    def next_ms(self) -> int | None:
        while self._heap and self._live.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def register(self, timer: Timer) -> bool:
        """Add a timer; return whether it is new."""
        if timer in self._live:
            return False
        self._live[timer] = self.registered
        heapq.heappush(self._heap, (timer.time_ms, self.registered, timer))
        self.registered += 1
        return True

    def delete(self, timer: Timer) -> bool:
        """Remove a timer; return whether it was there."""
        if self._live.pop(timer, None) is None:
            return False
        if len(self._heap) > 4 * len(self._live) + 64:
            self._heap = sorted((timer.time_ms, place, timer) for timer, place in self._live.items())
        return True

    def due(self, now_ms: int) -> Iterator[Timer]:
        """Remove and yield the timers up to and including `now_ms`; each may delete later ones."""
        while (next_ms := self.next_ms) is not None and next_ms <= now_ms:
            timer = heapq.heappop(self._heap)[2]
            del self._live[timer]
            yield timer

    def add_of_entries(self, timers: Sequence[tuple[Timer, int | None]]) -> None:
        placed = [(timer, place) for timer, place in timers if place is not None]
        if len({*(place for _, place in placed), *self._live.values()}) < len(timers) + len(self._live):
            # A savepoint writer gave them no places, or places that other timers have.
            placed = [(timer, self.registered + at) for at, (timer, _) in enumerate(timers)]
            self.registered += len(placed)
        self._live.update(placed)
        self._heap += [(timer.time_ms, place, timer) for timer, place in placed]
        heapq.heapify(self._heap)

    def first_of_entries(self, entries: Container[Any]) -> dict[Any, tuple[int, int]]:
        """Return time and place of the first timer of each entry, by key and namespace."""
        first: dict[Any, tuple[int, int]] = {}
        for (time_ms, key, namespace), place in self._live.items():
            slot = key, namespace
            if namespace is not None and slot in entries:
                before = first.get(slot)
                if before is None or time_ms < before[0]:
                    first[slot] = time_ms, place
        return first

    def find_gone(self, with_entries: Container[Timer] = ()) -> dict[Timer, int]:
        """Return the stored timers that are deleted or now stored in entries, with their places."""
        live = self._live
        return {
            timer: place
            for timer, place in self._stored.items()
            if timer not in live or timer in with_entries
        }

    def find_new(self, with_entries: Container[Timer] = ()) -> dict[Timer, int]:
        """Return the timers that are not stored yet, or at another place, with their places."""
        place_of = self._stored.get
        return {
            timer: place
            for timer, place in self._live.items()
            if place_of(timer) != place and timer not in with_entries
        }


class BatchTimers:
    """The timers of a key group while a vectorised function works on it."""

    def __init__(
        self,
        queues: Mapping[TimeDomain, TimerQueue],
        hash_of: Mapping[Any, int],
        key_types: Sequence[pa.DataType],
    ) -> None:
        self.queues, self.hash_of = queues, dict(hash_of)
        self._key_types = tuple(key_types)

    def register(
        self, domain: TimeDomain, index: KeyIndex, times_ms: Array | int, where: Array | None
    ) -> None:
        """Register a timer for each chosen key; an existing one keeps its place."""
        for key, hashed, time_ms in _choose(index, times_ms, where):
            self.queues[domain].register(Timer(time_ms, key, None))
            self.hash_of[key] = hashed

    def delete(self, domain: TimeDomain, index: KeyIndex, times_ms: Array | int, where: Array | None) -> None:
        """Delete a timer of each chosen key; a missing one is no error."""
        for key, _, time_ms in _choose(index, times_ms, where):
            self.queues[domain].delete(Timer(time_ms, key, None))

    def take_due(self, domain: TimeDomain, now_ms: int) -> tuple[KeyIndex, Array] | None:
        """Remove the timers up to and including `now_ms`; return their keys and times, in their order."""
        due = list(self.queues[domain].due(now_ms))
        if not due:
            return None
        keys = [timer.key for timer in due]
        parts = [keys] if len(self._key_types) == 1 else list(zip(*keys, strict=True))
        columns = [pa.array(list(part), kind) for part, kind in zip(parts, self._key_types, strict=True)]
        hashes = np.array([self.hash_of[key] for key in keys], dtype=np.int64)
        times_ms = np.array([timer.time_ms for timer in due], dtype=np.int64)
        return KeyIndex.of(hashes, columns), times_ms


def _choose(index: KeyIndex, times_ms: Array | int, where: Array | None) -> list[tuple[Any, int, int]]:
    chosen = index.choose(where)
    times = np.broadcast_to(np.asarray(times_ms), len(index))[chosen]
    if times.dtype.kind not in "iu":
        raise TypeError(f"times of timers are milliseconds as whole numbers, not {times.dtype}")
    if times.dtype.kind == "u" and (times > MAX_WATERMARK_MS).any():
        raise ValueError(f"a timer's time is {times.max()}; 64 bits with a sign must hold it")
    parts = [to_values(column.take(pa.array(chosen))) for column in index.keys]
    keys = parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
    return list(zip(keys, index.hashes[chosen].tolist(), times.tolist(), strict=True))


class Timers:
    """The timer service of functions, for the current key and namespace."""

    __slots__ = ("_scope", "processing_time_ms", "queues", "watermark_ms")

    def __init__(self, scope: KeyScope) -> None:
        self._scope = scope
        self.queues: dict[TimeDomain, TimerQueue] = {domain: TimerQueue() for domain in TimeDomain}
        self.watermark_ms = MIN_WATERMARK_MS
        self.processing_time_ms = 0

    def current_watermark(self) -> int:
        return self.watermark_ms

    def current_processing_time(self) -> int:
        return self.processing_time_ms

    def register_event_time_timer(self, time_ms: int) -> None:
        self.queues[_EVENT_TIME].register(self._timer(time_ms))

    def register_processing_time_timer(self, time_ms: int) -> None:
        self.queues[_PROCESSING_TIME].register(self._timer(time_ms))

    def delete_event_time_timer(self, time_ms: int) -> None:
        self.queues[_EVENT_TIME].delete(self._timer(time_ms))

    def delete_processing_time_timer(self, time_ms: int) -> None:
        self.queues[_PROCESSING_TIME].delete(self._timer(time_ms))

    def _timer(self, time_ms: int) -> Timer:
        if type(time_ms) is not int or not MIN_WATERMARK_MS <= time_ms <= MAX_WATERMARK_MS:
            time_ms = _whole_ms(time_ms)
        scope = self._scope
        # Takes half the time of `Timer(...)`; most calls for timers come here.
        return _new(Timer, (time_ms, scope.key, scope.namespace))


def _whole_ms(time_ms: Any) -> int:
    try:
        found = operator.index(time_ms)
    except TypeError:
        found = None
    if found is None or isinstance(time_ms, bool) or not MIN_WATERMARK_MS <= found <= MAX_WATERMARK_MS:
        raise ValueError(
            f"a timer's time is {time_ms!r} ({type(time_ms).__name__}); it must be a whole number of "
            "milliseconds since 1970, which 64 bits can hold"
        )
    return found


class StoredTimers:
    def __init__(
        self, tables: Mapping[TimeDomain, LayeredTable], registered: Mapping[TimeDomain, int]
    ) -> None:
        self._tables = tables
        self.registered = dict(registered)
        #: The hash of each key of the selected timers.
        self.hash_of: dict[Any, int] = {}

    def living(self, domain: TimeDomain) -> tuple[Array, Array]:
        """Return times and hashes of a clock's timers, as arrays."""
        table = self._tables[domain]
        if not len(table):
            return _NONE, _NONE
        living = table.delta.filter(table.delta.column(codec.ALIVE))
        times, hashes = (living.column(name).to_numpy() for name in (codec.TIME, codec.HASH))
        if table.base is None:
            return times, hashes
        # A fired or deleted timer stays in the base until the next base; a row of the delta has its place.
        covered = table.delta.column("value_1").drop_null().to_numpy()
        kept = ~np.isin(table.base.column("value_0").to_numpy(), covered)
        below = [table.base.column(name).to_numpy()[kept] for name in (codec.TIME, codec.HASH)]
        return np.concatenate([times, below[0]]), np.concatenate([hashes, below[1]])

    def due(self, domain: TimeDomain, limit_ms: int) -> Array:
        times, hashes = self.living(domain)
        return hashes[times <= limit_ms]

    def select(self, hashes: Array) -> dict[TimeDomain, TimerQueue]:
        """Return the timers of keys with these hashes (sorted, unique)."""
        queues = {}
        for domain, table in self._tables.items():
            found = table.select(hashes)
            self.hash_of.update((timer.key, row.hash) for timer, row in found.items())
            stored = {timer: row.value[0] for timer, row in found.items()}
            queues[domain] = TimerQueue(stored, self.registered[domain])
        return queues

    def replace(
        self,
        queues: Mapping[TimeDomain, TimerQueue],
        hash_of: Mapping[Any, int],
        with_entries: Mapping[TimeDomain, Container[Timer]] = MappingProxyType({}),
    ) -> None:
        """Store the timers of queues, except those that are stored with their entries."""
        for domain, queue in queues.items():
            self.registered[domain] = queue.registered
            stored = self._tables[domain]
            in_base = stored.in_base
            own = with_entries.get(domain, ())
            new, gone = queue.find_new(own), queue.find_gone(own)
            below = [in_base[timer].value[0] if timer in in_base else None for timer in new]
            values = list(zip(new.values(), below, strict=True))
            rows = codec.rows_by_slot(list(new), values, [hash_of[timer.key] for timer in new])
            for timer in gone.keys() & in_base.keys():
                value = (gone.pop(timer), in_base[timer].value[0])
                rows[timer] = codec.Row(timer, value, hash_of[timer.key], alive=False)
            stored.replace(rows, gone)

    def set_single_timers(self, domain: TimeDomain, index: KeyIndex, times_ms: Array, where: Array) -> None:
        """Replace all timers of keys by one each; called after :meth:`replace`."""
        table = self._tables[domain]
        rows = _TimerRows.of(table, index, where)
        wanted = where & (times_ms < MAX_WATERMARK_MS)
        # Places of the wanted timers among those of each layer.
        is_same = rows.times_ms == times_ms[rows.keys]
        is_kept = is_same & rows.is_living & wanted[rows.keys]
        has = np.zeros(len(index), dtype=bool)
        has[rows.keys[is_kept]] = True
        new = np.flatnonzero(wanted & ~has)
        below = rows.is_in_base
        in_base = np.full(len(index), _NO_PLACE)
        again = np.flatnonzero(below & is_same & wanted[rows.keys])
        in_base[rows.keys[again]] = rows.places[again]
        # Mark base timers as removed unless they are the wanted timer at an unchanged place.
        goes = np.flatnonzero(below & ~(is_same & wanted[rows.keys]))
        stays_above = ~below & is_kept
        gone_above = rows.rows[~below & ~stays_above]
        if not len(new) and not len(goes[rows.is_living[goes]]) and not len(gone_above):
            return
        # Rows that marked base timers as removed are deleted with the others and written again.
        places = np.concatenate([np.arange(len(new)) + self.registered[domain], rows.places[goes]])
        self.registered[domain] += len(new)
        covered = np.concatenate([in_base[new], rows.places[goes]])
        numbers = np.concatenate([new, rows.keys[goes]])
        own_ms = np.concatenate([times_ms[new], rows.times_ms[goes]])
        alive = np.arange(len(numbers)) < len(new)
        taken, nothing = pa.array(numbers), pa.nulls(len(numbers), pa.int64())
        columns = {
            codec.HASH: pa.array(index.hashes[numbers]),
            codec.TIME: pa.array(own_ms, pa.int64()),
            "value_0": pa.array(places, pa.int64()),
            "value_1": pa.array(covered, pa.int64(), mask=covered == _NO_PLACE),
            codec.ALIVE: pa.array(alive),
        } | {
            f"key_{at}": column.take(taken).cast(kind)
            for at, (column, kind) in enumerate(zip(index.keys, table.layout.keys, strict=True))
        }
        schema = table.layout.schema
        arrays = [columns.get(field.name, nothing) for field in schema]
        table.put_rows(pa.RecordBatch.from_arrays(arrays, schema=schema), gone_above)


@dataclass(frozen=True)
class _TimerRows:
    #: Number of the key, time, and place in the order of registration.
    keys: Array
    times_ms: Array
    places: Array
    #: The place of each row in its layer.
    rows: Array
    #: Whether the row is in the base, and whether its timer exists.
    is_in_base: Array
    is_living: Array

    @staticmethod
    def of(table: LayeredTable, index: KeyIndex, where: Array) -> _TimerRows:
        hashes = np.unique(index.hashes[where])
        parts = []
        for layer in table.layers:
            places = codec.find_places(layer, hashes)
            parts.append((layer.take(pa.array(places)), places, np.full(len(places), layer is table.base)))
        stored = pa.concat_batches([own for own, _, _ in parts])
        rows, is_base = (np.concatenate([part[at] for part in parts]) for at in (1, 2))
        keys = [
            pa.concat_arrays([column, stored.column(f"key_{at}").cast(column.type)])
            for at, column in enumerate(index.keys)
        ]
        both = KeyIndex.of(np.concatenate([index.hashes, stored.column(codec.HASH).to_numpy()]), keys)
        number = np.full(len(both), _NO_PLACE)
        number[both.of_row[: len(index)]] = np.arange(len(index))
        found = number[both.of_row[len(index) :]]
        times, registered = (stored.column(name).to_numpy() for name in (codec.TIME, "value_0"))
        above = stored.column("value_1")
        covered = above.filter(pa.array(~is_base)).drop_null().to_numpy()
        alive = stored.column(codec.ALIVE).to_numpy(zero_copy_only=False).astype(bool)
        is_living = np.where(is_base, ~np.isin(registered, covered), alive)
        # Leave out timers of windows, and of other keys with the same hash.
        own = (found != _NO_PLACE) & where[np.maximum(found, 0)]
        return _TimerRows(*(one[own] for one in (found, times, registered, rows, is_base, is_living)))
