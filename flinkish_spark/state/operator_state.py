"""State without keys: operator list state and broadcast state."""

from __future__ import annotations

import enum
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import pyarrow as pa

from flinkish_spark.core.iterators import elements_of, pairs_of
from flinkish_spark.core.validation import instance_of
from flinkish_spark.state import codec
from flinkish_spark.state.descriptors import MapStateDescriptor, find_maker, set_fields, state_type
from flinkish_spark.state.evolution import StateMismatch, misfit
from flinkish_spark.state.states import MapKeys
from flinkish_spark.state.tables import PutValues, may_change, naming_of
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.ddl import is_field_list, parse_ddl
from flinkish_spark.types.hints import StateType
from flinkish_spark.types.to_arrow import ValueMismatch, strict_array
from flinkish_spark.types.to_python import copy_if_mutable, to_values


def pack_tables(uid: str, kind: str, tables: Mapping[str, pa.RecordBatch]) -> bytes:
    """Encode tables as bytes, without those that have no rows."""
    sections: dict[str, bytes | memoryview] = {codec.OWNER: json.dumps({"uid": uid, "kind": kind}).encode()}
    for name, batch in tables.items():
        if batch.num_rows:
            sections[f"state/{name}"] = codec.table_bytes(batch)
    return codec.pack_frame(sections)


def unpack_tables(
    uid: str, kind: str, schemas: Mapping[str, pa.Schema], value: bytes | memoryview | None
) -> dict[str, pa.RecordBatch]:
    """Return the stored tables that have rows; empty if nothing was stored."""
    stored = {} if value is None else codec.unpack_frame(value)
    owner = codec.read_owner(stored)
    stored.pop(codec.OWNER, None)
    for fact, declared in (("uid", uid), ("kind", kind)):
        if owner.get(fact, declared) != declared:
            raise StateMismatch(
                f"the {kind} belongs to operator {owner.get('uid')!r} as {owner.get('kind')!r}, "
                f"not to {uid!r}"
            )
    unknown = sorted(stored.keys() - {f"state/{name}" for name in schemas})
    if unknown:
        raise StateMismatch(f"the stored {kind} {unknown[0][6:]!r} is no longer declared, or damaged")
    return {
        name: _read(f"{kind} {name!r}", schema, stored[f"state/{name}"])
        for name, schema in schemas.items()
        if f"state/{name}" in stored
    }


def table_of(what: str, schema: pa.Schema, columns: Sequence[Sequence[Any]]) -> pa.RecordBatch:
    try:
        arrays = [strict_array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    except ValueMismatch as error:
        raise codec.StateValueError(f"{what} got a wrong value: {error}") from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def values_of(column: pa.Array, *, has_fields: bool) -> list[Any]:
    values = to_values(column)
    return [tuple(value.values()) for value in values] if has_fields else values


def decode_declared(column: pa.Array, ddl: str) -> list[Any]:
    """Return a column's values in their declared form: named tuples, or instances of classes."""
    made, naming = find_maker(ddl), naming_of(ddl)
    if made is not None:
        return [made(value) for value in values_of(column, has_fields=False)]
    values = values_of(column, has_fields=is_field_list(ddl))
    return values if naming is None else list(map(naming, values))


def _read(what: str, schema: pa.Schema, payload: memoryview) -> pa.RecordBatch:
    table = codec.read_table(what, payload)
    stored, declared = codec.read_kind(table.schema), codec.read_kind(schema)
    if stored and stored != declared:
        raise StateMismatch(
            f"{what} is stored as {stored} and declared as {declared}, so its items would go to other "
            "copies; give it another name"
        )
    if table.schema.equals(schema):
        return table
    if table.schema.names != schema.names:
        raise StateMismatch(f"{what} has the columns {', '.join(table.schema.names)}; it is damaged")
    # Other fields, or wider types, as in keyed state.
    for field, own in zip(schema, table.schema, strict=True):
        if wrong := misfit(own.type, field.type, (field.name,)):
            raise StateMismatch(f"{what}: {wrong}")
    return table.cast(schema)


#: Kind of a stored value.
LIST_KIND = "operator list state"


class Redistribution(enum.Enum):
    """How the items are distributed when the number of parallel copies has changed."""

    #: Each item goes to one copy, evenly and in order.
    SPLIT = "SPLIT"
    #: Every copy gets all items and chooses, even if the number has not changed, as in Flink.
    UNION = "UNION"


@dataclass(frozen=True, slots=True, init=False)
class OperatorListDescriptor:
    name: str
    #: Type of an item, as in :class:`~flinkish_spark.state.ValueStateDescriptor`; the attribute is its DDL.
    element_type: str
    #: How a restore distributes the items.
    redistribution: Redistribution = Redistribution.SPLIT

    def __init__(
        self, name: str, element_type: StateType, redistribution: Redistribution = Redistribution.SPLIT
    ) -> None:
        what_to_do = "give Redistribution.SPLIT or Redistribution.UNION"
        instance_of("redistribution", redistribution, Redistribution, what_to_do=what_to_do)
        set_fields(
            self, name=name, element_type=state_type(name, element_type), redistribution=redistribution
        )

    @property
    def schema(self) -> pa.Schema:
        kind = arrow_type(parse_ddl(self.element_type))
        return pa.schema([pa.field("item", kind)], {codec.KIND: f"{self.redistribution.value} {LIST_KIND}"})


class OperatorListState:
    """The items of one parallel copy: iterate, `len`, `add`, `add_all`, `update`, `clear`."""

    __slots__ = ("_items", "_lends", "_naming", "is_changed")

    def __init__(self, items: Iterable[Any], element_type: str) -> None:
        self._naming, self._lends = naming_of(element_type), may_change(element_type)
        self.load(items)

    def load(self, items: Iterable[Any]) -> None:
        self._items, self.is_changed = list(items), False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __len__(self) -> int:
        return len(self._items)

    def get(self) -> list[Any]:
        # A caller may change an item in place without putting it back.
        self.is_changed |= self._lends and bool(self._items)
        return list(self._items)

    def add(self, item: Any) -> None:
        """Append an item; None is refused, as Flink does."""
        self.add_all((item,))

    def add_all(self, items: Iterable[Any]) -> None:
        self.update([*self._items, *elements_of(items)])

    def update(self, items: Iterable[Any]) -> None:
        replaced = list(elements_of(items))
        if None in replaced:
            raise ValueError("an operator list state takes no None")
        named = replaced if self._naming is None else list(map(self._naming, replaced))
        if self._lends:
            own = set(map(id, self._items))
            named = [one if id(one) in own else copy_if_mutable(one) for one in named]
        self._items, self.is_changed = named, True

    def clear(self) -> None:
        self.update(())


class OperatorLists:
    def __init__(
        self, uid: str, descriptors: Sequence[OperatorListDescriptor], value: bytes | memoryview | None
    ) -> None:
        self._uid = uid
        self._descriptors: dict[str, OperatorListDescriptor] = {}
        self._states: dict[str, OperatorListState] = {}
        for descriptor in descriptors:
            self.declare(descriptor)
        self.load(value)

    @property
    def descriptors(self) -> Sequence[OperatorListDescriptor]:
        return list(self._descriptors.values())

    def declare(self, descriptor: OperatorListDescriptor) -> OperatorListState:
        name = descriptor.name
        if name in self._descriptors:
            raise StateMismatch(f"the operator list state '{name}' is declared twice")
        self._descriptors[name] = descriptor
        self._states[name] = OperatorListState((), descriptor.element_type)
        return self._states[name]

    def load(self, value: bytes | memoryview | None) -> None:
        schemas = {name: one.schema for name, one in self._descriptors.items()}
        stored = unpack_tables(self._uid, LIST_KIND, schemas, value)
        for name, one in self._descriptors.items():
            items = decode_declared(stored[name].column(0), one.element_type) if name in stored else ()
            self._states[name].load(items)

    def state(self, descriptor: OperatorListDescriptor) -> OperatorListState:
        if self._descriptors.get(descriptor.name) != descriptor:
            raise StateMismatch(f"there is no {LIST_KIND} '{descriptor.name}' as {descriptor}")
        return self._states[descriptor.name]

    @property
    def is_changed(self) -> bool:
        return any(state.is_changed for state in self._states.values())

    def dump(self) -> bytes:
        tables = {
            name: table_of(f"{LIST_KIND} {name!r}", self._descriptors[name].schema, [state.get()])
            for name, state in self._states.items()
        }
        return pack_tables(self._uid, LIST_KIND, tables)


def redistribute(
    uid: str,
    descriptors: Sequence[OperatorListDescriptor],
    values: Sequence[bytes | memoryview | None],
    parallelism: int,
) -> list[bytes]:
    if parallelism < 1:
        raise ValueError(f"an operator has at least one copy, not {parallelism}")
    before = [OperatorLists(uid, descriptors, value) for value in values]
    after = [OperatorLists(uid, descriptors, None) for _ in range(parallelism)]
    for descriptor in descriptors:
        items = [one.state(descriptor).get() for one in before]
        for copy, own in zip(after, deal(items, descriptor.redistribution, parallelism), strict=True):
            copy.state(descriptor).update(own)
    return [copy.dump() for copy in after]


def deal(items: Sequence[list[Any]], how: Redistribution, parallelism: int) -> list[list[Any]]:
    """Distribute the items of the former copies; return those of each new copy."""
    together = [item for own in items for item in own]
    if how is Redistribution.UNION:
        return [list(together) for _ in range(parallelism)]
    if len(items) == parallelism:
        return [list(own) for own in items]
    least, more = divmod(len(together), parallelism)
    bounds = [at * least + min(at, more) for at in range(parallelism + 1)]
    return [together[begin:end] for begin, end in itertools.pairwise(bounds)]


K = TypeVar("K")
V = TypeVar("V")

#: Kind of a stored value.
BROADCAST_KIND = "broadcast state"


class _Entries(Mapping[K, V]):
    """The entries of a broadcast state, for its writable and its read-only view."""

    __slots__ = ("_entries", "_keys")

    def __init__(self, entries: dict[K, V], keys: MapKeys) -> None:
        self._entries, self._keys = entries, keys

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return self._keys.to_lookup_key(key) in self._entries

    contains = __contains__

    def entries(self) -> list[tuple[K, V]]:
        return list(self.items())


class BroadcastState(_Entries[K, V], MutableMapping[K, V], Generic[K, V]):
    """A writable broadcast state; a mapping, which iterates in the order of insertion."""

    __slots__ = ("_lends", "_naming", "_puts", "is_changed")

    def __init__(self, entries: dict[K, V], value_type: str, keys: MapKeys, puts: PutValues) -> None:
        super().__init__(entries, keys)
        self._puts = puts
        self._naming, self._lends = naming_of(value_type), may_change(value_type)
        self.is_changed = False

    def __getitem__(self, key: K) -> V:
        value = self._entries[self._keys.to_lookup_key(key)]
        # A caller may change it in place without putting it back.
        self.is_changed |= self._lends
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if key is None or value is None:
            raise ValueError("a broadcast state takes no None, neither as key nor as value")
        key = self._keys.put(key)
        if self._lends:
            self._puts.put(self._entries, key, value)
        self._entries[key] = value if self._naming is None else self._naming(value)
        self.is_changed = True

    def __delitem__(self, key: K) -> None:
        del self._entries[self._keys.to_lookup_key(key)]
        self.is_changed = True

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._entries))

    def put(self, key: K, value: V) -> None:
        self[key] = value

    def update(self, values: Any = (), /, **named: Any) -> None:
        super().update(pairs_of(values), **named)

    def remove(self, key: K) -> None:
        self.pop(key, None)


class ReadOnlyBroadcastState(_Entries[K, V], Generic[K, V]):
    """A read-only broadcast state. It returns copies of mutable values: all partitions must stay equal."""

    __slots__ = ("_name", "_take")

    def __init__(self, name: str, entries: dict[K, V], value_type: str, keys: MapKeys) -> None:
        super().__init__(entries, keys)
        self._name = name
        self._take = copy_if_mutable if may_change(value_type) else None

    def __getitem__(self, key: K) -> V:
        value = self._entries[self._keys.to_lookup_key(key)]
        if self._take is None:
            return value
        own: V = self._take(value)
        return own

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"the broadcast state '{self._name}' can be written in process_broadcast_element() only: every "
            "partition has a copy of it, and the copies must stay equal"
        )

    __setitem__ = __delitem__ = _refuse
    put = remove = pop = update = setdefault = clear = popitem = _refuse


class BroadcastTables:
    def __init__(
        self, uid: str, descriptors: Sequence[MapStateDescriptor], value: bytes | memoryview | None
    ) -> None:
        self._uid = uid
        self._schemas: dict[str, pa.Schema] = {}
        for one in descriptors:
            if one.ttl is not None:
                raise StateMismatch(f"the broadcast state '{one.name}' cannot have a time to live")
            kinds = [arrow_type(parse_ddl(ddl)) for ddl in (one.key_type, one.value_type)]
            self._schemas[one.name] = pa.schema(list(zip(("key", "value"), kinds, strict=True)))
        stored = unpack_tables(uid, BROADCAST_KIND, self._schemas, value)
        self.puts = PutValues()
        self._writable: dict[str, BroadcastState[Any, Any]] = {}
        self._readable: dict[str, ReadOnlyBroadcastState[Any, Any]] = {}
        for descriptor in descriptors:
            name = descriptor.name
            entries = _entries_of(descriptor, stored[name]) if name in stored else {}
            kind = descriptor.value_type
            keys = MapKeys(f"operator '{uid}'", name, descriptor.key_type)
            self._writable[name] = BroadcastState(entries, kind, keys, self.puts)
            self._readable[name] = ReadOnlyBroadcastState(name, entries, kind, keys)

    def writable(self, descriptor: MapStateDescriptor) -> BroadcastState[Any, Any]:
        return self._writable[_check_known(descriptor, self._writable)]

    def readable(self, descriptor: MapStateDescriptor) -> ReadOnlyBroadcastState[Any, Any]:
        return self._readable[_check_known(descriptor, self._readable)]

    @property
    def is_changed(self) -> bool:
        return any(state.is_changed for state in self._writable.values())

    def settle(self) -> None:
        for state in self._writable.values():
            state.is_changed = False

    def dump(self) -> bytes:
        """Return the value to store, which is equal for equal states that were filled in the same order."""
        tables = {
            name: table_of(
                f"{BROADCAST_KIND} {name!r}",
                self._schemas[name],
                (list(state._entries), list(state._entries.values())),
            )
            for name, state in self._writable.items()
        }
        return pack_tables(self._uid, BROADCAST_KIND, tables)


def choose_copy(values: Sequence[bytes | None]) -> bytes | None:
    """Return the value that all partitions begin with when their number has changed; None without one."""
    # The copies are equal, but a partition may have stored nothing yet.
    return next((value for value in values if value is not None), None)


def _check_known(descriptor: MapStateDescriptor, states: Mapping[str, Any]) -> str:
    what_to_do = "give a descriptor that was given to broadcast()"
    instance_of("descriptor", descriptor, MapStateDescriptor, what_to_do=what_to_do)
    if descriptor.name not in states:
        raise StateMismatch(
            f"there is no broadcast state '{descriptor.name}'; give its descriptor to broadcast(). "
            f"Known: {', '.join(sorted(states)) or 'none'}"
        )
    return descriptor.name


def _entries_of(descriptor: MapStateDescriptor, table: pa.RecordBatch) -> dict[Any, Any]:
    # A key is never a dict, however its type is written.
    keys = values_of(table.column(0), has_fields=pa.types.is_struct(table.column(0).type))
    values = decode_declared(table.column(1), descriptor.value_type)
    # Any NaN becomes math.nan, which a lookup finds.
    keys = [key if key == key else math.nan for key in keys]
    return dict(zip(keys, values, strict=True))
