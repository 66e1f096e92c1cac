"""Elements of a key that wait, sorted by their event time; what joins keep of their inputs."""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from flinkish_spark.operators.keyed_context import KeyedStates
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.state import ListStateDescriptor, StateTtl
from flinkish_spark.state.handed_out import may_change
from flinkish_spark.state.tables import StateTable

#: A waiting element: its fields, then what is known of it, then its time.
Entry = tuple[Any, ...]


#: An entry's time.
time_of: Callable[[Entry], int] = itemgetter(-1)


class TimedBuffer:
    """Waiting elements of one input, by key. At one time they stay in the order of their coming.

    Parameters
    ----------
    name
        Of the state.
    element
        Type of the elements.
    facts
        DDL of what is known of an element besides, as fields; empty for nothing.
    ttl
        How long the elements of a key live since one came, by processing time.
    """

    def __init__(self, name: str, element: ElementType, facts: str = "", ttl: StateTtl | None = None) -> None:
        self._width = len(element.fields)
        fields = [element.stored_fields, *([facts] if facts else []), "__time_ms LONG"]
        self._descriptor = ListStateDescriptor(name, ", ".join(fields), ttl)
        self._element = element
        self._gathered = element.gathering

    def open(self, states: KeyedStates) -> None:
        """Declare the state."""
        states.get_list_state(self._descriptor)
        self._scope = states.scope
        self._table: StateTable = states.tables[self._descriptor.name]
        lends = may_change(self._descriptor.element_type)
        self._read = self._table.lend if lends else self._table.read
        self._gather = self._gathered()

    def entries(self) -> list[Entry]:
        """Return the current key's entries, by time; not to be changed, but for the elements' own values."""
        found: list[Entry] | None = self._read(self._scope)
        return found or []

    def element(self, entry: Entry) -> Any:
        """Return the element of an entry."""
        return self._gather(entry[: self._width])

    def add(self, value: Any, time_ms: int, facts: Sequence[Any] = ()) -> None:
        """Add an element of the current key."""
        entry = (*self._element.spread(value), *facts, time_ms)
        entries = self._table.read(self._scope)
        if entries is None:
            entries = [entry]
        elif time_of(entries[-1]) <= time_ms:
            entries.append(entry)
        else:
            insort_right(entries, entry, key=time_of)
        self._table.write(self._scope, entries)

    def drop_first(self, count: int, now_first: Entry) -> None:
        """Remove the current key's first entries, and set what is the first one then.

        The rest lives as long as it would have without that: no element has come.
        """
        entries = self._table.entries[self._scope.slot]
        self._table.write_rest(self._scope, [now_first, *entries[count + 1 :]])

    def replace(self, entries: list[Entry]) -> None:
        """Set the current key's entries, which are in order; none removes them."""
        if entries:
            self._table.write(self._scope, entries)
        else:
            self._table.remove(self._scope)
