"""Broadcast states: maps that every partition has a copy of; the broadcast side writes, the other reads.

They are a value of their own, beside those of the key groups: loaded once per partition and micro-batch,
handed to all key groups of the partition, and stored again if the broadcast side has changed something.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type

from flinkish_spark.operators.frames import pack_frame, unpack_frame
from flinkish_spark.runtime.arrow_values import ValueMismatch, strict_array
from flinkish_spark.runtime.ddl import parse_ddl
from flinkish_spark.state import MapStateDescriptor
from flinkish_spark.state.descriptors import is_list_of_fields

K = TypeVar("K")
V = TypeVar("V")

_OWNER = ""
_STATE = "broadcast/"


class BroadcastStateIsReadOnly(TypeError):
    """The element side of a broadcast function has tried to write broadcast state."""


class BroadcastStateMismatch(ValueError):
    """What is stored belongs to another operator or declaration, or a value does not fit its type."""


class BroadcastState(MutableMapping[K, V], Generic[K, V]):
    """A broadcast state, to read and to write; a dict, which iterates in the order of insertion.

    Also speaks Flink's names: `put`, `contains`, `remove`, `entries`.
    """

    __slots__ = ("_entries", "is_changed")

    def __init__(self, entries: dict[K, V]) -> None:
        self._entries = entries
        self.is_changed = False

    def __getitem__(self, key: K) -> V:
        return self._entries[key]

    def __setitem__(self, key: K, value: V) -> None:
        if key is None or value is None:
            raise ValueError("a broadcast state takes no None, neither as key nor as value")
        self._entries[key] = value
        self.is_changed = True

    def __delitem__(self, key: K) -> None:
        del self._entries[key]
        self.is_changed = True

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def put(self, key: K, value: V) -> None:
        """Set a value."""
        self[key] = value

    def contains(self, key: K) -> bool:
        """Return whether there is a value."""
        return key in self._entries

    def remove(self, key: K) -> None:
        """Remove a value, if there is one."""
        self.pop(key, None)

    def entries(self) -> list[tuple[K, V]]:
        """Return all entries."""
        return list(self._entries.items())


class ReadOnlyBroadcastState(Mapping[K, V], Generic[K, V]):
    """A broadcast state, to read. A value out of it must not be changed in place."""

    __slots__ = ("_entries", "_name")

    def __init__(self, name: str, entries: dict[K, V]) -> None:
        self._name, self._entries = name, entries

    def __getitem__(self, key: K) -> V:
        return self._entries[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def contains(self, key: K) -> bool:
        """Return whether there is a value."""
        return key in self._entries

    def entries(self) -> list[tuple[K, V]]:
        """Return all entries."""
        return list(self._entries.items())

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
    BroadcastStateMismatch
        It belongs to another operator, or a state is stored with other types than it is declared with.
    """

    def __init__(
        self, uid: str, descriptors: Sequence[MapStateDescriptor], value: bytes | memoryview | None
    ) -> None:
        self._uid = uid
        self._schemas = {descriptor.name: _schema_of(descriptor) for descriptor in descriptors}
        has_fields = {one.name: is_list_of_fields(one.value_type) for one in descriptors}
        stored = {} if value is None else unpack_frame(value)
        owner = json.loads(bytes(stored.pop(_OWNER, b"{}")))
        if owner.get("uid", uid) != uid:
            raise BroadcastStateMismatch(
                f"the broadcast state belongs to operator {owner['uid']!r}, not {uid!r}"
            )
        unknown = sorted(stored.keys() - {_STATE + name for name in self._schemas})
        if unknown:
            raise BroadcastStateMismatch(
                f"the stored broadcast state {unknown[0].removeprefix(_STATE)!r} is no longer declared"
            )
        self._writable: dict[str, BroadcastState[Any, Any]] = {}
        self._readable: dict[str, ReadOnlyBroadcastState[Any, Any]] = {}
        for name, schema in self._schemas.items():
            entries = _read(name, schema, stored.get(_STATE + name), _VALUES[has_fields[name]])
            self._writable[name] = BroadcastState(entries)
            self._readable[name] = ReadOnlyBroadcastState(name, entries)

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

    def dump(self) -> bytes:
        """Return the value to store; the same for equal states that were filled in the same order.

        Raises
        ------
        BroadcastStateMismatch
            A key or value does not fit its declared type.
        """
        sections: dict[str, bytes | memoryview] = {_OWNER: json.dumps({"uid": self._uid}).encode()}
        for name, state in self._writable.items():
            if state:
                sections[_STATE + name] = _write(name, self._schemas[name], state)
        return pack_frame(sections)


def _known(descriptor: MapStateDescriptor, states: Mapping[str, Any]) -> str:
    if descriptor.name not in states:
        raise BroadcastStateMismatch(
            f"there is no broadcast state '{descriptor.name}'; give its descriptor to broadcast(). "
            f"Known: {', '.join(sorted(states)) or 'none'}"
        )
    return descriptor.name


def _schema_of(descriptor: MapStateDescriptor) -> pa.Schema:
    if descriptor.ttl is not None:
        raise BroadcastStateMismatch(f"the broadcast state '{descriptor.name}' cannot have a time to live")
    kinds = (parse_ddl(descriptor.key_type), parse_ddl(descriptor.value_type))
    arrow = [to_arrow_type(kind, timezone="UTC") for kind in kinds]
    return pa.schema([pa.field("key", arrow[0]), pa.field("value", arrow[1])])


def _write(name: str, schema: pa.Schema, state: Mapping[Any, Any]) -> memoryview:
    columns = (list(state), list(state.values()))
    try:
        arrays = [strict_array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    except ValueMismatch as error:
        raise BroadcastStateMismatch(f"broadcast state {name!r}: {error}") from error
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return memoryview(sink.getvalue())


def _read(name: str, schema: pa.Schema, payload: memoryview | None, values_of: _ValuesOf) -> dict[Any, Any]:
    if payload is None:
        return {}
    with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
        if not reader.schema.equals(schema):
            raise BroadcastStateMismatch(
                f"broadcast state {name!r} is stored as {reader.schema.types} but declared as {schema.types}"
            )
        batch = reader.read_next_batch()
    keys = _tuples(batch.column(0)) if pa.types.is_struct(schema.types[0]) else _plain(batch.column(0))
    return dict(zip(keys, values_of(batch.column(1)), strict=True))


def _plain(column: pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return values


def _tuples(column: pa.Array) -> list[Any]:
    return [tuple(value.values()) for value in _plain(column)]


_ValuesOf = Callable[[pa.Array], list[Any]]
#: How a column is read, by whether its type was given as a list of fields.
_VALUES: dict[bool, _ValuesOf] = {False: _plain, True: _tuples}
