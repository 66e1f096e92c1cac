"""States with a list or a map per key, used like Python's own."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, Self, SupportsIndex, TypeVar, overload

from flinkish_spark.state.handed_out import HandedOut
from flinkish_spark.state.map_keys import ANY_KEYS, AnyKeys, MapKeys
from flinkish_spark.state.tables import KeyScope, StateTable
from flinkish_spark.user_iterators import elements_of, pairs_of

V = TypeVar("V")
K = TypeVar("K")


class ListState(MutableSequence[V]):
    """A list per key, used like one: iteration, `len`, `append`, ``state[-1]``, ``state[:2] = ()``, ``==``.

    An empty list and none are the same. Not thread-safe; valid only for the current key. Also speaks Flink's
    names: `get`, `add`, `add_all`, `update`. What a slice or `get` returns is a list of its own, which does
    not change with the state.
    """

    __slots__ = ("_lend", "_naming", "_scope", "_table")

    def __init__(
        self, scope: KeyScope, table: StateTable, naming: HandedOut | None = None, lends: bool = False
    ) -> None:
        self._scope, self._table, self._naming = scope, table, naming
        #: For elements that go out and may be changed there.
        self._lend = table.lend if lends else table.read

    def __iter__(self) -> Iterator[V]:
        # Over a copy: whoever adds while iterating does not meet what was added.
        return iter(list(self._lend(self._scope) or ()))

    def __len__(self) -> int:
        return len(self._look())

    @overload
    def __getitem__(self, at: SupportsIndex) -> V: ...
    @overload
    def __getitem__(self, at: slice) -> list[V]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> V | list[V]:
        # An empty list raises what a list raises, and its slices are lists, too.
        found: V | list[V] = (self._lend(self._scope) or [])[at]
        return found

    @overload
    def __setitem__(self, at: SupportsIndex, value: V) -> None: ...
    @overload
    def __setitem__(self, at: slice, value: Iterable[V]) -> None: ...
    def __setitem__(self, at: Any, value: Any) -> None:
        changed = self.get()
        changed[at] = elements_of(value) if isinstance(at, slice) else value
        self.update(changed)

    def __delitem__(self, at: SupportsIndex | slice) -> None:
        changed = self.get()
        del changed[at]
        self.update(changed)

    def __reversed__(self) -> Iterator[V]:
        return reversed(self.get())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ListState):
            other = other.get()
        return self.get() == other if isinstance(other, list) else NotImplemented

    # What changes has no hash, as a list has none.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ListState({self._look()})"

    def __copy__(self) -> list[V]:
        return self.get()

    def __deepcopy__(self, memo: dict[int, Any]) -> list[V]:
        # What is emitted is copied: what one key has, and not the states of all.
        return copy.deepcopy(self.get(), memo)

    def get(self) -> list[V]:
        """Return a copy of the current key's list."""
        return list(self)

    def add(self, value: V) -> None:
        """Append to the current key's list; None is refused, as Flink does."""
        self.add_all((value,))

    def append(self, value: V) -> None:
        """Append to the current key's list; the same as `add`."""
        self.add_all((value,))

    def extend(self, values: Iterable[V]) -> None:
        """Append several to the current key's list; the same as `add_all`."""
        self.add_all(values)

    def insert(self, index: SupportsIndex, value: V) -> None:
        """Insert before the element of that number."""
        changed = self.get()
        changed.insert(index, value)
        self.update(changed)

    def reverse(self) -> None:
        """Reverse the current key's list."""
        self.update(reversed(self))

    def add_all(self, values: Iterable[V]) -> None:
        """Append several to the current key's list."""
        added = self._elements(values)
        if added:
            before = self._table.read(self._scope)
            if before is None:
                self._table.write(self._scope, added)
            else:
                before.extend(added)
                self._table.write(self._scope, before)

    def update(self, values: Iterable[V]) -> None:
        """Replace the current key's list; an empty one clears it."""
        replaced = self._elements(values)
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

    def _look(self) -> list[V]:
        """Return the current key's list, which is not to be changed; where reads count, this is none."""
        held: list[V] = self._table.entries.get(self._scope.slot, [])
        return held

    def _elements(self, values: Iterable[V]) -> list[V]:
        """Return values as the state keeps them; refuse None."""
        kept = list(elements_of(values))
        if None in kept:
            raise ValueError("a list state takes no None")
        return kept if self._naming is None else list(map(self._naming, kept))


class MapState(MutableMapping[K, V]):
    """A dict per key: ``state[k] = v``, ``k in state``, ``del state[k]``, iteration, `len`, ``|=``, ``==``.

    Iterates in the order of insertion. An empty map and none are the same. A key is, from the moment when it
    is put, what it will be when it is read again. Not thread-safe; valid only for the current key. Also
    speaks Flink's names: `put`, `contains`, `remove`, `entries`.
    """

    __slots__ = ("_kept", "_keys", "_lend", "_naming", "_scope", "_table")

    def __init__(
        self,
        scope: KeyScope,
        table: StateTable,
        naming: HandedOut | None = None,
        lends: bool = False,
        keys: MapKeys | AnyKeys = ANY_KEYS,
    ) -> None:
        self._scope, self._table, self._naming = scope, table, naming
        self._keys, self._kept = keys, keys.kept
        #: For values that go out and may be changed there.
        self._lend = table.lend if lends else table.read

    def __getitem__(self, key: K) -> V:
        value: V = self._lent()[key if type(key) is self._kept else self._keys.sought(key)]
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if type(key) is not self._kept:
            key = self._keys.put(key)
        held = self._table.read(self._scope)
        if held is None:
            held = {}
        held[key] = value if self._naming is None else self._naming(value)
        self._table.write(self._scope, held)

    def __delitem__(self, key: K) -> None:
        held = self._map()
        del held[key if type(key) is self._kept else self._keys.sought(key)]
        if held:
            self._table.write(self._scope, held)
        else:
            self._table.remove(self._scope)

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._map()))

    def __len__(self) -> int:
        return len(self._look())

    def __contains__(self, key: object) -> bool:
        return (key if type(key) is self._kept else self._keys.sought(key)) in self._map()

    def __reversed__(self) -> Iterator[K]:
        return reversed(list(self._map()))

    def __ior__(self, other: Mapping[K, V] | Iterable[tuple[K, V]]) -> Self:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return f"MapState({self._look()})"

    def __copy__(self) -> dict[K, V]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[K, V]:
        # What is emitted is copied: what one key has, and not the states of all.
        return copy.deepcopy(self._map(), memo)

    def copy(self) -> dict[K, V]:
        """Return the current key's entries as a dict, which does not change with the state."""
        return dict(self._lent())

    def popitem(self) -> tuple[K, V]:
        """Remove the entry that came last, and return it; KeyError if there is none."""
        for key in reversed(self._look()):
            return key, self.pop(key)
        raise KeyError("the map of the current key is empty")

    def put(self, key: K, value: V) -> None:
        """Set a value."""
        self[key] = value

    def put_all(self, values: Mapping[K, V]) -> None:
        """Set several values."""
        self.update(values)

    def update(self, values: Any = (), /, **named: Any) -> None:
        """Set several values, as `dict.update` does: of a mapping, or of pairs."""
        super().update(pairs_of(values), **named)

    def contains(self, key: K) -> bool:
        """Return whether there is a value."""
        return key in self

    def remove(self, key: K) -> None:
        """Remove a value, if there is one."""
        self.pop(key, None)

    def entries(self) -> list[tuple[K, V]]:
        """Return the current key's entries."""
        return list(self._lent().items())

    def is_empty(self) -> bool:
        """Return whether the current key's map has no entry."""
        return not self._look()

    def clear(self) -> None:
        """Remove the current key's map."""
        self._table.remove(self._scope)

    def _lent(self) -> dict[K, V]:
        held: dict[K, V] | None = self._lend(self._scope)
        return {} if held is None else held

    def _map(self) -> dict[K, V]:
        held: dict[K, V] | None = self._table.read(self._scope)
        return {} if held is None else held

    def _look(self) -> dict[K, V]:
        """Return the current key's map, which is not to be changed; where reads count, this is none."""
        held: dict[K, V] = self._table.entries.get(self._scope.slot, {})
        return held
