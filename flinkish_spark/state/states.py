"""The states of functions: a value, a list or a map per key."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import TYPE_CHECKING, Any, Generic, Self, SupportsIndex, TypeVar, overload

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.errors import SchemaError
from flinkish_spark.core.iterators import elements_of, pairs_of, refuse_not_run
from flinkish_spark.state.tables import ExpiringLists, ExpiringMaps, KeyScope, ReadForm, StateTable, quick_of
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.to_arrow import ValueMismatch, strict_array
from flinkish_spark.types.to_python import as_it_is, copy_if_mutable, copy_result, to_values

if TYPE_CHECKING:
    from flinkish_spark.state.descriptors import Aggregate, Reducer


V = TypeVar("V")


class ValueState(Generic[V]):
    """One value per key.

    Valid only while an element or a timer is processed, for its key. Not thread-safe.
    """

    __slots__ = ("_changed", "_default", "_entries", "_scope")

    def __init__(self, scope: KeyScope, table: StateTable, default: V | None = None) -> None:
        # The table's own dict and set save a lookup per call, of which there are a million a second.
        self._scope, self._entries, self._changed = scope, table.entries, table.changed
        self._default = default

    def value(self) -> V | None:
        """Return the current key's value; the descriptor's default, or None, if there is none."""
        value: V | None = self._entries.get(self._scope.slot)
        # A copy: a key that changes a mutable default must not change it for other keys.
        return copy_if_mutable(self._default) if value is None else value

    def update(self, value: V | None) -> None:
        """Set the current key's value; None clears it."""
        if value is None:
            self.clear()
            return
        slot = self._scope.slot
        self._entries[slot] = value
        self._changed.add(slot)

    def clear(self) -> None:
        """Remove the current key's value."""
        slot = self._scope.slot
        if self._entries.pop(slot, None) is not None:
            self._changed.add(slot)


class TabledValueState(ValueState[V]):
    """A value state with a time to live, named fields, or mutable values."""

    __slots__ = ("_naming", "_read", "_table")

    def __init__(
        self,
        scope: KeyScope,
        table: StateTable,
        default: V | None = None,
        naming: ReadForm | None = None,
        lends: bool = False,
    ) -> None:
        super().__init__(scope, table, default if naming is None else naming(default))
        self._table, self._naming = table, naming
        self._read = table.lend if lends else table.read

    def value(self) -> V | None:
        """Return the current key's value unless it is expired."""
        value: V | None = self._read(self._scope)
        if value is None:
            default: V | None = copy_if_mutable(self._default)
            return default
        naming = self._naming
        if naming is not None and type(value) is not naming.kind:
            # Stored back, since most values are read again.
            named: V = naming(value)
            self._entries[self._scope.slot] = named
            return named
        return value

    def update(self, value: V | None) -> None:
        """Set the current key's value, touched now; None clears it."""
        if value is None:
            self._table.remove(self._scope)
            return
        table = self._table
        if table.puts is not None:
            table.puts.put(table.entries, self._scope.slot, value)
        if self._naming is None or type(value) is tuple:
            table.write(self._scope, value)
        else:
            # A value that the next micro-batch reads as a named tuple becomes one now.
            table.write(self._scope, self._naming(value))

    def clear(self) -> None:
        self._table.remove(self._scope)


class _FoldedState:
    """One value per key, combined from all added values."""

    __slots__ = ("_combine", "_lends", "_named", "_read", "_scope", "_table")

    def __init__(
        self,
        scope: KeyScope,
        table: StateTable,
        combine: Callable[[Any, Any], Any],
        naming: ReadForm | None,
        lends: bool,
    ) -> None:
        self._scope, self._table, self._combine = scope, table, combine
        self._named = naming or as_it_is
        self._read, self._lends = table.lend if lends else table.read, lends

    def clear(self) -> None:
        """Remove the current key's value."""
        self._table.remove(self._scope)

    def merge(self, slot: Any, into: Any) -> None:
        """Combine one slot's value into another's; for merging windows."""
        table, named = self._table, self._named
        if slot not in table.entries:
            return
        before = table.entries.get(into)
        table.move(slot, into)
        if before is not None:
            first, second = named(before), named(table.entries[into])
            made = self._combine(first, second)
            table.entries[into] = copy_result(made, first, second) if self._lends else made


class ReducingState(_FoldedState, Generic[V]):
    """One value per key, reduced from all added values."""

    __slots__ = ()

    def __init__(
        self,
        scope: KeyScope,
        table: StateTable,
        reduce: Reducer | Callable[[V, V], V],
        naming: ReadForm | None = None,
        lends: bool = False,
    ) -> None:
        given: Any = reduce
        super().__init__(scope, table, getattr(given, "reduce", given), naming, lends)

    def add(self, value: V) -> None:
        """Reduce the current key's value and a new one to one."""
        before, named = self._table.read(self._scope), self._named
        added = named(value)
        if self._table.puts is not None:
            # A copy: the caller may change the object later.
            added = copy_if_mutable(added)
        if before is not None:
            before = named(before)
            reduced = refuse_not_run(self._combine(before, added), "reduce()")
            added = copy_result(reduced, before, added) if self._lends else reduced
        self._table.write(self._scope, added)

    def get(self) -> V | None:
        """Return the reduced value of the current key; None if nothing was added."""
        value: V | None = self._read(self._scope)
        return None if value is None else self._named(value)


class AggregatingState(_FoldedState):
    """One accumulator per key, to which values are added."""

    __slots__ = ("_aggregate",)

    def __init__(
        self,
        scope: KeyScope,
        table: StateTable,
        aggregate: Aggregate,
        naming: ReadForm | None = None,
        lends: bool = False,
    ) -> None:
        # An aggregate whose windows never merge may have no `merge`.
        super().__init__(scope, table, lambda one, other: aggregate.merge(one, other), naming, lends)
        self._aggregate = aggregate

    def add(self, value: Any) -> None:
        """Add a value to the current key's accumulator, which is created for the first one."""
        before = self._table.read(self._scope)
        if before is None:
            # A copy, in case the function always returns the same object.
            before = copy_if_mutable(self._aggregate.create_accumulator())
        before = self._named(before)
        if self._table.puts is not None:
            # A copy: the caller may change the object later.
            value = copy_if_mutable(value)
        made = refuse_not_run(self._aggregate.add(value, before), "add()")
        self._table.write(self._scope, copy_result(made, before, value) if self._lends else made)

    def get(self) -> Any:
        """Return the result of the current key's accumulator; None if nothing was added."""
        accumulator = self._read(self._scope)
        return None if accumulator is None else self._aggregate.get_result(self._named(accumulator))


# Keys of map states are converted to the form in which they are read back (a FLOAT rounds, bytes become
# text), when they are put and when they are looked up: else a map would have two keys for one. Most keys have
# a type whose values need no conversion; checking that costs less than a call.

#: Python types whose values need no conversion; a value that does not fit into the declared type is refused
#: when it is stored.
_KEPT: tuple[tuple[tuple[type[T.DataType], ...], type], ...] = (
    ((T.ByteType, T.ShortType, T.IntegerType, T.LongType), int),
    ((T.StringType,), str),
    ((T.BinaryType,), bytes),
    ((T.BooleanType,), bool),
    ((T.DateType,), datetime.date),
    ((T.DayTimeIntervalType,), datetime.timedelta),
)


class MapKeys:
    """Converts keys of a map state to the form in which they are read back."""

    __slots__ = ("_arrow", "_ddl", "_owner", "_quick", "_state", "kept")

    def __init__(self, owner: str, state: str, ddl: str) -> None:
        kind = parse_ddl(ddl)
        self._owner, self._state, self._ddl = owner, state, ddl
        self._arrow: pa.DataType = arrow_type(kind)
        #: Values of this type stay what they are; for other keys callers use `put` or `to_lookup_key`.
        self.kept: type | None = next((own for kinds, own in _KEPT if isinstance(kind, kinds)), None)
        self._quick = quick_of(kind)

    def put(self, key: Any) -> Any:
        """Convert a key to the form in which it is read back."""
        if type(key) is self.kept:
            return key
        quick = self._quick
        if quick is not None and (found := quick(key)) is not None:
            return _one_zero(found)
        if key is None:
            raise self._to_key_error(key, "a key is never null")
        try:
            [kept] = to_values(strict_array([key], self._arrow))
        except (ValueMismatch, pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise self._to_key_error(key, str(error)) from error
        if kept is None:
            raise self._to_key_error(key, "it would be null")
        if quick is not None and (found := quick(kept)) is not None:
            return _one_zero(found)
        return kept

    def to_lookup_key(self, key: Any) -> Any:
        """Convert a key for a lookup; None, which no map contains, stays None."""
        return None if key is None else self.put(key)

    def _to_key_error(self, key: Any, why: str) -> SchemaError:
        return SchemaError(
            f"the state '{self._state}' of {self._owner} cannot have the key {key!r:.200} "
            f"({type(key).__name__})",
            why=why,
            what_to_do=f"use keys of the declared type, {self._ddl}, or declare another one",
            state=self._state,
        )


def _one_zero(key: Any) -> Any:
    """Return 0.0 for -0.0, which is the same key; else the first one that is put would decide."""
    return 0.0 if type(key) is float and key == 0 else key


K = TypeVar("K")


class ListState(MutableSequence[V]):
    """A list per key, used like one: iteration, `len`, `append`, ``state[-1]``, ``state[:2] = ()``, ``==``.

    An empty list and none are the same. Not thread-safe; valid only for the current key. Also has Flink's
    methods: `get`, `add`, `add_all`, `update`. A slice and `get` return copies, which do not change with the
    state.
    """

    __slots__ = ("_lend", "_lends", "_naming", "_scope", "_table")

    def __init__(
        self, scope: KeyScope, table: StateTable, naming: ReadForm | None = None, lends: bool = False
    ) -> None:
        self._scope, self._table, self._naming, self._lends = scope, table, naming, lends
        #: Returns the list for callers that may change its elements.
        self._lend = table.lend if lends else table.read

    def __iter__(self) -> Iterator[V]:
        # Over a copy: elements that are added meanwhile do not show up.
        return iter(list(self._lend(self._scope) or ()))

    def __len__(self) -> int:
        return len(self._look())

    @overload
    def __getitem__(self, at: SupportsIndex) -> V: ...
    @overload
    def __getitem__(self, at: slice) -> list[V]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> V | list[V]:
        # An empty state behaves like an empty list.
        return (self._lend(self._scope) or [])[at]

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

    # Mutable, so without a hash, as a list.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ListState({self._look()})"

    def __copy__(self) -> list[V]:
        return self.get()

    def __deepcopy__(self, memo: dict[int, Any]) -> list[V]:
        # For emitted values: copies the list of one key, and not the states of all.
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
            self._note(added)
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
            if self._table.puts is not None:
                # Elements that stay belong to the state already.
                own = set(map(id, self._look()))
                self._note([one for one in replaced if id(one) not in own])
            self._table.write(self._scope, replaced)
        else:
            self._table.remove(self._scope)

    def clear(self) -> None:
        """Remove the current key's list."""
        self._table.remove(self._scope)

    def merge(self, slot: Any, into: Any) -> None:
        """Append one slot's list to another's; for merging windows."""
        entries = self._table.entries
        if slot in entries:
            before = entries.get(into)
            self._table.move(slot, into)
            if before is not None:
                entries[into] = [*before, *entries[into]]

    def _look(self) -> list[V]:
        """Return the current key's list, not to be changed; does not count as a read for the time to live."""
        held: list[V] = self._table.entries.get(self._scope.slot, [])
        return held

    def _note(self, added: Iterable[V]) -> None:
        table = self._table
        if table.puts is not None:
            table.puts.add(table.entries, self._scope.slot, added)

    def _elements(self, values: Iterable[V]) -> list[V]:
        """Return values in the state's form; refuse None."""
        kept = list(elements_of(values))
        if None in kept:
            raise ValueError("a list state takes no None")
        return kept if self._naming is None else list(map(self._naming, kept))


class MapState(MutableMapping[K, V]):
    """A dict per key: ``state[k] = v``, ``k in state``, ``del state[k]``, iteration, `len`, ``|=``, ``==``.

    Iterates in the order of insertion. An empty map and none are the same. A key that is put gets the form in
    which the next micro-batch reads it. Not thread-safe; valid only for the current key. Also has Flink's
    methods: `put`, `contains`, `remove`, `entries`.
    """

    __slots__ = ("_kept", "_keys", "_lend", "_lends", "_naming", "_scope", "_table")

    def __init__(
        self, scope: KeyScope, table: StateTable, naming: ReadForm | None, lends: bool, keys: MapKeys
    ) -> None:
        self._scope, self._table, self._naming, self._lends = scope, table, naming, lends
        self._keys, self._kept = keys, keys.kept
        #: Returns the map for callers that may change its values.
        self._lend = table.lend if lends else table.read

    def __getitem__(self, key: K) -> V:
        return self._lend_map()[key if type(key) is self._kept else self._keys.to_lookup_key(key)]

    def __setitem__(self, key: K, value: V) -> None:
        if type(key) is not self._kept:
            key = self._keys.put(key)
        held = self._table.read(self._scope)
        if held is None:
            held = {}
        if self._table.puts is not None:
            self._table.puts.put(held, key, value)
        held[key] = value if self._naming is None else self._naming(value)
        self._table.write(self._scope, held)

    def __delitem__(self, key: K) -> None:
        held = self._map()
        del held[key if type(key) is self._kept else self._keys.to_lookup_key(key)]
        if held:
            self._table.write(self._scope, held)
        else:
            self._table.remove(self._scope)

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._map()))

    def __len__(self) -> int:
        return len(self._look())

    def __contains__(self, key: object) -> bool:
        return (key if type(key) is self._kept else self._keys.to_lookup_key(key)) in self._map()

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
        # For emitted values: copies the map of one key, and not the states of all.
        return copy.deepcopy(self._map(), memo)

    def copy(self) -> dict[K, V]:
        """Return a copy of the current key's entries as a dict."""
        return dict(self._lend_map())

    def popitem(self) -> tuple[K, V]:
        """Remove and return the last entry; raise KeyError if there is none."""
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
        return list(self._lend_map().items())

    def is_empty(self) -> bool:
        """Return whether the current key's map has no entry."""
        return not self._look()

    def clear(self) -> None:
        """Remove the current key's map."""
        self._table.remove(self._scope)

    def _lend_map(self) -> dict[K, V]:
        held: dict[K, V] | None = self._lend(self._scope)
        return {} if held is None else held

    def _map(self) -> dict[K, V]:
        held: dict[K, V] | None = self._table.read(self._scope)
        return {} if held is None else held

    def _look(self) -> dict[K, V]:
        """Return the current key's map, not to be changed; does not count as a read for the time to live."""
        held: dict[K, V] = self._table.entries.get(self._scope.slot, {})
        return held


class ExpiringListState(ListState[V]):
    __slots__ = ()
    _table: ExpiringLists

    def __getitem__(self, at: Any) -> Any:
        found = self._look()[at]
        slot, table = self._scope.slot, self._table
        if table.is_renewed_by_reads and slot in table.entries:
            touches = table.touches[slot]
            for place in range(len(touches))[at] if isinstance(at, slice) else (at,):
                touches[place] = self._scope.now_ms
            table.changed.add(slot)
        if self._lends:
            table.lent.add(slot)
        return found

    def __setitem__(self, at: Any, value: Any) -> None:
        values, touches = self._copies()
        added = self._elements(value if isinstance(at, slice) else (value,))
        self._note(added)
        if isinstance(at, slice):
            values[at], touches[at] = added, [self._scope.now_ms] * len(added)
        else:
            (values[at],), touches[at] = added, self._scope.now_ms
        self._table.put(self._scope, values, touches)

    def __delitem__(self, at: SupportsIndex | slice) -> None:
        values, touches = self._copies()
        del values[at]
        del touches[at]
        self._table.put(self._scope, values, touches)

    def insert(self, index: SupportsIndex, value: V) -> None:
        """Insert before the element of that number."""
        values, touches = self._copies()
        added = self._elements((value,))
        self._note(added)
        values[index:index], touches[index:index] = added, [self._scope.now_ms]
        self._table.put(self._scope, values, touches)

    def reverse(self) -> None:
        """Reverse the current key's list; its elements keep their times."""
        values, touches = self._copies()
        self._table.put(self._scope, values[::-1], touches[::-1])

    def add_all(self, values: Iterable[V]) -> None:
        """Append several to the current key's list."""
        added = self._elements(values)
        if added:
            self._note(added)
            self._table.append(self._scope, added)

    def merge(self, slot: Any, into: Any) -> None:
        """Append one slot's list to another's; elements keep their times."""
        touches = self._table.touches
        later, before = touches.get(slot), touches.get(into, [])
        super().merge(slot, into)
        if later is not None:
            touches[into] = [*before, *later]

    def _copies(self) -> tuple[list[V], list[int]]:
        return [*self._look()], [*self._table.touches.get(self._scope.slot, ())]


class ExpiringMapState(MapState[K, V]):
    __slots__ = ()
    _table: ExpiringMaps

    def __getitem__(self, key: K) -> V:
        if type(key) is not self._kept:
            key = self._keys.to_lookup_key(key)
        value = self._look()[key]
        self._on_read(key)
        if self._lends:
            self._table.lent.add(self._scope.slot)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if type(key) is not self._kept:
            key = self._keys.put(key)
        slot, table = self._scope.slot, self._table
        held = table.entries.setdefault(slot, {})
        if table.puts is not None:
            table.puts.put(held, key, value)
        held[key] = value if self._naming is None else self._naming(value)
        table.touches.setdefault(slot, {})[key] = self._scope.now_ms
        table.changed.add(slot)

    def __delitem__(self, key: K) -> None:
        if type(key) is not self._kept:
            key = self._keys.to_lookup_key(key)
        held = self._look()
        del held[key]
        touches = self._table.touches[self._scope.slot]
        del touches[key]
        self._table.put(self._scope, held, touches)

    def __contains__(self, key: object) -> bool:
        if type(key) is not self._kept:
            key = self._keys.to_lookup_key(key)
        found = key in self._look()
        if found:
            self._on_read(key)
        return found

    def _on_read(self, key: object) -> None:
        """Restart the time to live of an entry that is read, with ON_READ_AND_WRITE."""
        if self._table.is_renewed_by_reads:
            slot = self._scope.slot
            self._table.touches[slot][key] = self._scope.now_ms
            self._table.changed.add(slot)
