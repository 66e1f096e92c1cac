"""States with a list or a map per key whose elements expire one by one.

What is written is touched, and nothing beside it. Where reads count, what is read is touched: one element by
its place or key, all by whatever goes over all. How many there are is no read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex, TypeVar, overload

from flinkish_spark.state.containers import ListState, MapState
from flinkish_spark.state.element_tables import ExpiringLists, ExpiringMaps
from flinkish_spark.state.handed_out import HandedOut
from flinkish_spark.state.map_keys import ANY_KEYS, AnyKeys, MapKeys
from flinkish_spark.state.tables import KeyScope, StateTable

V = TypeVar("V")
K = TypeVar("K")


class ExpiringListState(ListState[V]):
    """A list state whose elements expire."""

    __slots__ = ("_lends",)
    _table: ExpiringLists

    def __init__(
        self, scope: KeyScope, table: StateTable, naming: HandedOut | None = None, lends: bool = False
    ) -> None:
        super().__init__(scope, table, naming, lends)
        self._lends = lends

    @overload
    def __getitem__(self, at: SupportsIndex) -> V: ...
    @overload
    def __getitem__(self, at: slice) -> list[V]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> V | list[V]:
        found: V | list[V] = self._look()[at]
        slot, table = self._scope.slot, self._table
        if table.is_renewed_by_reads and slot in table.entries:
            _set_times(table.touches[slot], at, self._scope.now_ms)
            table.changed.add(slot)
        if self._lends:
            table.lent.add(slot)
        return found

    @overload
    def __setitem__(self, at: SupportsIndex, value: V) -> None: ...
    @overload
    def __setitem__(self, at: slice, value: Iterable[V]) -> None: ...
    def __setitem__(self, at: Any, value: Any) -> None:
        values, touches = self._copies()
        if isinstance(at, slice):
            value = self._elements(value)
            values[at], touches[at] = value, [self._scope.now_ms] * len(value)
        else:
            (values[at],), touches[at] = self._elements((value,)), self._scope.now_ms
        self._table.put(self._scope, values, touches)

    def __delitem__(self, at: SupportsIndex | slice) -> None:
        values, touches = self._copies()
        del values[at]
        del touches[at]
        self._table.put(self._scope, values, touches)

    def insert(self, index: SupportsIndex, value: V) -> None:
        """Insert before the element of that number."""
        values, touches = self._copies()
        values[index:index], touches[index:index] = self._elements((value,)), [self._scope.now_ms]
        self._table.put(self._scope, values, touches)

    def reverse(self) -> None:
        """Reverse the current key's list; its elements keep their times."""
        values, touches = self._copies()
        self._table.put(self._scope, values[::-1], touches[::-1])

    def add_all(self, values: Iterable[V]) -> None:
        """Append several to the current key's list."""
        added = self._elements(values)
        if added:
            self._table.append(self._scope, added)

    def merge(self, slot: Any, into: Any) -> None:
        """Append one slot's list to another's; elements keep their times."""
        touches = self._table.touches
        behind, before = touches.get(slot), touches.get(into, [])
        super().merge(slot, into)
        if behind is not None:
            touches[into] = [*before, *behind]

    def _copies(self) -> tuple[list[V], list[int]]:
        """Return the current key's elements, and their times."""
        return [*self._look()], [*self._table.touches.get(self._scope.slot, ())]


class ExpiringMapState(MapState[K, V]):
    """A map state whose entries expire."""

    __slots__ = ("_lends",)
    _table: ExpiringMaps

    def __init__(
        self,
        scope: KeyScope,
        table: StateTable,
        naming: HandedOut | None = None,
        lends: bool = False,
        keys: MapKeys | AnyKeys = ANY_KEYS,
    ) -> None:
        super().__init__(scope, table, naming, lends, keys)
        self._lends = lends

    def __getitem__(self, key: K) -> V:
        if type(key) is not self._kept:
            key = self._keys.sought(key)
        value = self._look()[key]
        self._on_read(key)
        if self._lends:
            self._table.lent.add(self._scope.slot)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if type(key) is not self._kept:
            key = self._keys.put(key)
        slot, table = self._scope.slot, self._table
        table.entries.setdefault(slot, {})[key] = value if self._naming is None else self._naming(value)
        table.touches.setdefault(slot, {})[key] = self._scope.now_ms
        table.changed.add(slot)

    def __delitem__(self, key: K) -> None:
        if type(key) is not self._kept:
            key = self._keys.sought(key)
        held = self._look()
        del held[key]
        touches = self._table.touches[self._scope.slot]
        del touches[key]
        self._table.put(self._scope, held, touches)

    def __contains__(self, key: object) -> bool:
        if type(key) is not self._kept:
            key = self._keys.sought(key)
        found = key in self._look()
        if found:
            self._on_read(key)
        return found

    def _on_read(self, key: object) -> None:
        """Touch an entry that is read, where that counts."""
        if self._table.is_renewed_by_reads:
            slot = self._scope.slot
            self._table.touches[slot][key] = self._scope.now_ms
            self._table.changed.add(slot)


def _set_times(touches: list[int], at: SupportsIndex | slice, now_ms: int) -> None:
    for place in range(len(touches))[at] if isinstance(at, slice) else (at,):
        touches[place] = now_ms
