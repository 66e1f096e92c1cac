"""States with one value per key: plain, reduced, aggregated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flinkish_spark.runtime.taken_values import taken
from flinkish_spark.state.handed_out import HandedOut
from flinkish_spark.state.tables import KeyScope, StateTable

if TYPE_CHECKING:
    from flinkish_spark.state.descriptors import Aggregate, Reducer

V = TypeVar("V")


class ValueState(Generic[V]):
    """One value per key.

    Valid only while an element or a timer is processed, for its key. Not thread-safe.
    """

    __slots__ = ("_changed", "_default", "_entries", "_scope")

    def __init__(self, scope: KeyScope, table: StateTable, default: V | None = None) -> None:
        # The table's own dict and set: one look-up per call, of which there are a million a second.
        self._scope, self._entries, self._changed = scope, table.entries, table.changed
        self._default = default

    def value(self) -> V | None:
        """Return the current key's value; the descriptor's default, or None, if there is none."""
        value: V | None = self._entries.get(self._scope.slot)
        # A list that one key changes must not be what another one begins with.
        return taken(self._default) if value is None else value

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
    """A value state whose values expire, have fields with names, or may be changed in place.

    Parameters
    ----------
    naming
        Names the fields of values; None where they have none.
    lends
        Whether a value that is read may be changed in place.
    """

    __slots__ = ("_naming", "_read", "_table")

    def __init__(
        self,
        scope: KeyScope,
        table: StateTable,
        default: V | None = None,
        naming: HandedOut | None = None,
        lends: bool = False,
    ) -> None:
        super().__init__(scope, table, default if naming is None else naming(default))
        self._table, self._naming = table, naming
        self._read = table.lend if lends else table.read

    def value(self) -> V | None:
        """Return the current key's value unless it is expired."""
        value: V | None = self._read(self._scope)
        if value is None:
            default: V | None = taken(self._default)
            return default
        naming = self._naming
        if naming is not None and type(value) is not naming.kind:
            # Kept, since it is read again more often than not.
            named: V = naming(value)
            self._entries[self._scope.slot] = named
            return named
        return value

    def update(self, value: V | None) -> None:
        """Set the current key's value, touched now; None clears it."""
        if value is None:
            self._table.remove(self._scope)
        elif self._naming is None or type(value) is tuple:
            self._table.write(self._scope, value)
        else:
            # What will be a tuple in the next micro-batch is one from now on.
            self._table.write(self._scope, self._naming(value))

    def clear(self) -> None:
        """Remove the current key's value."""
        self._table.remove(self._scope)


class ReducingState(Generic[V]):
    """One value per key, to which every added one is reduced."""

    __slots__ = ("_named", "_read", "_reduce", "_scope", "_table")

    def __init__(
        self,
        scope: KeyScope,
        table: StateTable,
        reduce: Reducer | Callable[[V, V], V],
        naming: HandedOut | None = None,
        lends: bool = False,
    ) -> None:
        self._scope, self._table = scope, table
        given: Any = reduce
        self._reduce: Callable[[V, V], V] = getattr(given, "reduce", given)
        self._named = naming or _same
        self._read = table.lend if lends else table.read

    def add(self, value: V) -> None:
        """Reduce the current key's value and this one to one."""
        before, named = self._table.read(self._scope), self._named
        added = named(value)
        self._table.write(self._scope, added if before is None else self._reduce(named(before), added))

    def get(self) -> V | None:
        """Return what the current key's values were reduced to; None if there were none."""
        value: V | None = self._read(self._scope)
        return None if value is None else self._named(value)

    def clear(self) -> None:
        """Remove the current key's value."""
        self._table.remove(self._scope)

    def merge(self, slot: Any, into: Any) -> None:
        """Reduce one slot's value into another's; for windows that merge."""
        _merge(self._table, slot, into, self._reduce, self._named)


class AggregatingState:
    """One accumulator per key, to which values are added."""

    __slots__ = ("_aggregate", "_named", "_read", "_scope", "_table")

    def __init__(
        self,
        scope: KeyScope,
        table: StateTable,
        aggregate: Aggregate,
        naming: HandedOut | None = None,
        lends: bool = False,
    ) -> None:
        self._scope, self._table, self._aggregate = scope, table, aggregate
        self._named = naming or _same
        self._read = table.lend if lends else table.read

    def add(self, value: Any) -> None:
        """Add to the current key's accumulator, which is made if there is none."""
        before = self._table.read(self._scope)
        if before is None:
            before = self._aggregate.create_accumulator()
        self._table.write(self._scope, self._aggregate.add(value, self._named(before)))

    def get(self) -> Any:
        """Return the result of the current key's accumulator; None if nothing was added."""
        accumulator = self._read(self._scope)
        return None if accumulator is None else self._aggregate.get_result(self._named(accumulator))

    def clear(self) -> None:
        """Remove the current key's accumulator."""
        self._table.remove(self._scope)

    def merge(self, slot: Any, into: Any) -> None:
        """Merge one slot's accumulator into another's; for windows that merge."""
        _merge(self._table, slot, into, self._aggregate.merge, self._named)


def _merge(table: StateTable, slot: Any, into: Any, combine: Any, named: Callable[[Any], Any]) -> None:
    if slot not in table.entries:
        return
    before = table.entries.get(into)
    table.move(slot, into)
    if before is not None:
        table.entries[into] = combine(named(before), named(table.entries[into]))


def _same(value: Any) -> Any:
    return value
