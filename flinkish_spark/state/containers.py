"""States with a list or a map per key, used like Python's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

from flinkish_spark.state.tables import KeyScope, StateTable

V = TypeVar("V")
K = TypeVar("K")


class ListState(Generic[V]):
    """A list per key: iterate, `len`, `add`, `update`.

    An empty list and none are the same. Not thread-safe; valid only for the current key.
    """

    __slots__ = ("_scope", "_table")

    def __init__(self, scope: KeyScope, table: StateTable) -> None:
        self._scope, self._table = scope, table

    def __iter__(self) -> Iterator[V]:
        # Over a copy: whoever adds while iterating does not meet what was added.
        return iter(list(self._table.read(self._scope) or ()))

    def __len__(self) -> int:
        return len(self._table.read(self._scope) or ())

    def __bool__(self) -> bool:
        return len(self) > 0

    def get(self) -> list[V]:
        """Return a copy of the current key's list."""
        return list(self)

    def add(self, value: V) -> None:
        """Append to the current key's list; None is refused, as Flink does."""
        self.add_all((value,))

    def add_all(self, values: Iterable[V]) -> None:
        """Append several to the current key's list."""
        added = _no_nones(values)
        if added:
            before = self._table.read(self._scope)
            if before is None:
                self._table.write(self._scope, added)
            else:
                before.extend(added)
                self._table.write(self._scope, before)

    def update(self, values: Iterable[V]) -> None:
        """Replace the current key's list; an empty one clears it."""
        replaced = _no_nones(values)
        if replaced:
            self._table.write(self._scope, replaced)
        else:
            self._table.remove(self._scope)

    def clear(self) -> None:
        """Remove the current key's list."""
        self._table.remove(self._scope)

    def merge(self, slot: Any, into: Any) -> None:
        """Append one slot's list to another's; for windows that merge."""
        entries = self._table.entries
        if slot in entries:
            before = entries.get(into)
            self._table.move(slot, into)
            if before is not None:
                entries[into] = [*before, *entries[into]]


def _no_nones(values: Iterable[V]) -> list[V]:
    kept = list(values)
    if None in kept:
        raise ValueError("a list state takes no None")
    return kept


class MapState(MutableMapping[K, V]):
    """A dict per key: ``state[k] = v``, ``k in state``, ``del state[k]``, iteration, `len`.

    Iterates in the order of insertion. An empty map and none are the same. Not thread-safe; valid only
    for the current key. Also speaks Flink's names: `put`, `contains`, `remove`, `entries`.
    """

    __slots__ = ("_scope", "_table")

    def __init__(self, scope: KeyScope, table: StateTable) -> None:
        self._scope, self._table = scope, table

    def __getitem__(self, key: K) -> V:
        value: V = self._map()[key]
        return value

    def __setitem__(self, key: K, value: V) -> None:
        held = self._table.read(self._scope)
        if held is None:
            held = {}
        held[key] = value
        self._table.write(self._scope, held)

    def __delitem__(self, key: K) -> None:
        held = self._map()
        del held[key]
        if held:
            self._table.write(self._scope, held)
        else:
            self._table.remove(self._scope)

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._map()))

    def __len__(self) -> int:
        return len(self._map())

    def __contains__(self, key: object) -> bool:
        return key in self._map()

    def put(self, key: K, value: V) -> None:
        """Set a value."""
        self[key] = value

    def put_all(self, values: Mapping[K, V]) -> None:
        """Set several values."""
        self.update(values)

    def contains(self, key: K) -> bool:
        """Return whether there is a value."""
        return key in self

    def remove(self, key: K) -> None:
        """Remove a value, if there is one."""
        self.pop(key, None)

    def entries(self) -> list[tuple[K, V]]:
        """Return the current key's entries."""
        return list(self._map().items())

    def is_empty(self) -> bool:
        """Return whether the current key's map has no entry."""
        return not self._map()

    def clear(self) -> None:
        """Remove the current key's map."""
        self._table.remove(self._scope)

    def _map(self) -> dict[K, V]:
        held: dict[K, V] | None = self._table.read(self._scope)
        return {} if held is None else held
