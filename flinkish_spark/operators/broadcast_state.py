"""Broadcast states: maps that every partition has a copy of; the broadcast side writes, the other reads.

They are a value of their own, beside those of the key groups: loaded once per partition and micro-batch,
handed to all key groups of the partition, and stored again if the broadcast side has changed something.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type

from flinkish_spark.arguments import instance_of
from flinkish_spark.operators.operator_values import (
    OperatorValueMismatch,
    declared_values,
    pack_tables,
    table_of,
    unpack_tables,
    values_of,
)
from flinkish_spark.runtime.ddl import parse_ddl
from flinkish_spark.state import MapStateDescriptor
from flinkish_spark.state.handed_out import may_change, naming_of
from flinkish_spark.state.map_keys import ANY_KEYS, AnyKeys, MapKeys
from flinkish_spark.user_iterators import pairs_of

K = TypeVar("K")
V = TypeVar("V")

#: What a stored value says of itself.
BROADCAST_KIND = "broadcast state"


class BroadcastStateIsReadOnly(TypeError):
    """The element side of a broadcast function has tried to write broadcast state."""


class BroadcastState(MutableMapping[K, V], Generic[K, V]):
    """A broadcast state, to read and to write; a dict, which iterates in the order of insertion.

    Also speaks Flink's names: `put`, `contains`, `remove`, `entries`.

    Parameters
    ----------
    entries
        Its content.
    value_type
        As of the descriptor.
    keys
        What it makes of keys.
    """

    __slots__ = ("_entries", "_keys", "_lends", "_naming", "is_changed")

    def __init__(self, entries: dict[K, V], value_type: str, keys: MapKeys | AnyKeys = ANY_KEYS) -> None:
        self._entries, self._keys = entries, keys
        self._naming, self._lends = naming_of(value_type), may_change(value_type)
        self.is_changed = False

    def __getitem__(self, key: K) -> V:
        value = self._entries[self._keys.sought(key)]
        # Whoever changes it in place need not put it back.
        self.is_changed |= self._lends
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if key is None or value is None:
            raise ValueError("a broadcast state takes no None, neither as key nor as value")
        self._entries[self._keys.put(key)] = value if self._naming is None else self._naming(value)
        self.is_changed = True

    def __delitem__(self, key: K) -> None:
        del self._entries[self._keys.sought(key)]
        self.is_changed = True

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return self._keys.sought(key) in self._entries

    def put(self, key: K, value: V) -> None:
        """Set a value."""
        self[key] = value

    def update(self, values: Any = (), /, **named: Any) -> None:
        """Set several values, as `dict.update` does: of a mapping, or of pairs."""
        super().update(pairs_of(values), **named)

    def contains(self, key: K) -> bool:
        """Return whether there is a value."""
        return self._keys.sought(key) in self._entries

    def remove(self, key: K) -> None:
        """Remove a value, if there is one."""
        self.pop(key, None)

    def entries(self) -> list[tuple[K, V]]:
        """Return all entries."""
        return list(self.items())


class ReadOnlyBroadcastState(Mapping[K, V], Generic[K, V]):
    """A broadcast state, to read. A value out of it must not be changed in place: that is not kept.

    Parameters
    ----------
    name
        Of the state.
    entries
        Its content.
    value_type
        As of the descriptor.
    keys
        What it makes of keys.
    """

    __slots__ = ("_entries", "_keys", "_lends", "_name", "is_lent")

    def __init__(
        self, name: str, entries: dict[K, V], value_type: str, keys: MapKeys | AnyKeys = ANY_KEYS
    ) -> None:
        self._name, self._entries, self._keys = name, entries, keys
        self._lends = may_change(value_type)
        #: Whether somebody has had a value in hand that can be changed.
        self.is_lent = False

    def __getitem__(self, key: K) -> V:
        self.is_lent |= self._lends
        return self._entries[self._keys.sought(key)]

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return self._keys.sought(key) in self._entries

    def contains(self, key: K) -> bool:
        """Return whether there is a value."""
        return self._keys.sought(key) in self._entries

    def entries(self) -> list[tuple[K, V]]:
        """Return all entries."""
        return list(self.items())

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise BroadcastStateIsReadOnly(
            f"the broadcast state '{self._name}' can be written in process_broadcast_element() only: every "
            "partition has a copy of it, and the copies must stay equal"
        )

    __setitem__ = __delitem__ = _refuse
    put = remove = pop = update = setdefault = clear = popitem = _refuse


class BroadcastTables:
    """The broadcast states of one operator in one partition.

    Parameters
    ----------
    uid
        Of the operator.
    descriptors
        Of the states.
    value
        What :meth:`dump` returned, by any partition; None at the beginning.

    Raises
    ------
    FrameError
        The value is damaged.
    OperatorValueMismatch
        It belongs to another operator, or a state is stored with other types than it is declared with.
    """

    def __init__(
        self, uid: str, descriptors: Sequence[MapStateDescriptor], value: bytes | memoryview | None
    ) -> None:
        self._uid = uid
        self._schemas = {descriptor.name: _schema_of(descriptor) for descriptor in descriptors}
        stored = unpack_tables(uid, BROADCAST_KIND, self._schemas, value)
        self._writable: dict[str, BroadcastState[Any, Any]] = {}
        self._readable: dict[str, ReadOnlyBroadcastState[Any, Any]] = {}
        for descriptor in descriptors:
            name = descriptor.name
            entries = _entries_of(descriptor, stored[name]) if name in stored else {}
            kind = descriptor.value_type
            keys = MapKeys(f"operator '{uid}'", name, descriptor.key_type)
            self._writable[name] = BroadcastState(entries, kind, keys)
            self._readable[name] = ReadOnlyBroadcastState(name, entries, kind, keys)

    def writable(self, descriptor: MapStateDescriptor) -> BroadcastState[Any, Any]:
        """Return a state for the broadcast side."""
        return self._writable[_known(descriptor, self._writable)]

    def readable(self, descriptor: MapStateDescriptor) -> ReadOnlyBroadcastState[Any, Any]:
        """Return a state for the element side."""
        return self._readable[_known(descriptor, self._readable)]

    @property
    def is_changed(self) -> bool:
        """Whether there is something to store."""
        return any(state.is_changed for state in self._writable.values())

    @property
    def is_lent(self) -> bool:
        """Whether the element side may have changed a value in place, which is not kept."""
        return any(state.is_lent for state in self._readable.values())

    def settle(self) -> None:
        """Take the states for stored, as they are."""
        for state in self._writable.values():
            state.is_changed = False

    def dump(self) -> bytes:
        """Return the value to store; the same for equal states that were filled in the same order.

        Raises
        ------
        StateValueError
            A key or value does not fit its declared type.
        """
        tables = {
            name: table_of(
                f"{BROADCAST_KIND} {name!r}",
                self._schemas[name],
                (list(state._entries), list(state._entries.values())),
            )
            for name, state in self._writable.items()
        }
        return pack_tables(self._uid, BROADCAST_KIND, tables)


def any_copy(values: Sequence[bytes | None]) -> bytes | None:
    """Return the value that all partitions begin with when their number has changed; None if there is none.

    The copies are equal, except that a partition may have stored nothing yet.
    """
    return next((value for value in values if value is not None), None)


def _known(descriptor: MapStateDescriptor, states: Mapping[str, Any]) -> str:
    what_to_do = "give one of those that broadcast() was given"
    instance_of("descriptor", descriptor, MapStateDescriptor, what_to_do=what_to_do)
    if descriptor.name not in states:
        raise OperatorValueMismatch(
            f"there is no broadcast state '{descriptor.name}'; give its descriptor to broadcast(). "
            f"Known: {', '.join(sorted(states)) or 'none'}"
        )
    return descriptor.name


def _schema_of(descriptor: MapStateDescriptor) -> pa.Schema:
    if descriptor.ttl is not None:
        raise OperatorValueMismatch(f"the broadcast state '{descriptor.name}' cannot have a time to live")
    kinds = (parse_ddl(descriptor.key_type), parse_ddl(descriptor.value_type))
    arrow = [to_arrow_type(kind, timezone="UTC") for kind in kinds]
    return pa.schema([pa.field("key", arrow[0]), pa.field("value", arrow[1])])


def _entries_of(descriptor: MapStateDescriptor, table: pa.RecordBatch) -> dict[Any, Any]:
    # A key is never a dict, however its type is written.
    keys = values_of(table.column(0), has_fields=pa.types.is_struct(table.column(0).type))
    values = declared_values(table.column(1), descriptor.value_type)
    # The NaN that can be looked for.
    keys = [key if key == key else math.nan for key in keys]
    return dict(zip(keys, values, strict=True))
