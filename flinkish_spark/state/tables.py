"""Tables with the entries of a key group's states while an operator works on it."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import functools
import math
import struct
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.state.descriptors import StateTtl, TtlUpdate
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.ddl import ddl_of, is_field_list, parse_ddl
from flinkish_spark.types.hints import hints_of, is_record, strip_none
from flinkish_spark.types.row_form import RowError, RowForm, element_class
from flinkish_spark.types.to_arrow import ValueMismatch, strict_array
from flinkish_spark.types.to_python import copy_if_mutable, copy_result, to_values

#: The stored access times of an entry: that of the last access, 0 without a time to live; and one per
#: element, in their order, None if all are the same.
Touch = tuple[int, "list[int] | None"]
#: By slot, rows as :class:`~flinkish_spark.state.codec.Row` has them.
StoredRows = Mapping[Any, Any]


class KeyScope:
    """The current key and namespace of an operator; shared by its states."""

    __slots__ = ("key", "namespace", "now_ms", "slot")

    def __init__(self) -> None:
        self.key: Any = None
        self.namespace: Any = None
        #: The slot of states: the key, with its namespace if it has one.
        self.slot: Any = None
        self.now_ms = 0

    def enter(self, key: Any, namespace: Any = None) -> None:
        self.key, self.namespace = key, namespace
        self.slot = key if namespace is None else (key, namespace)


class PutValues:
    """Objects that the current call has put into states, and that the states copy after the call."""

    # A function may go on to use an object after putting it into a state: change it, put it into another
    # state, or keep it for the next record. So the states get copies after the call. An object that came from
    # the same state needs no copy.

    __slots__ = ("_added", "_put", "is_used")

    def __init__(self) -> None:
        #: Whether a state has mutable values.
        self.is_used = False
        #: By place: its dict, and its value before the call.
        self._put: dict[tuple[int, Any], tuple[dict[Any, Any], Any]] = {}
        #: By slot: its table, and the elements that the call has added to its list.
        self._added: dict[tuple[int, Any], tuple[dict[Any, Any], list[Any]]] = {}

    def put(self, entries: dict[Any, Any], at: Any, value: Any) -> None:
        before = entries.get(at)
        if value is not before:
            self._put.setdefault((id(entries), at), (entries, before))

    def add(self, entries: dict[Any, Any], slot: Any, elements: Iterable[Any]) -> None:
        self._added.setdefault((id(entries), slot), (entries, []))[1].extend(elements)

    def settle(self) -> None:
        """Replace the objects by copies; called after each call of a function."""
        if self._put:
            for (_, at), (entries, before) in self._put.items():
                if (value := entries.get(at)) is not None:
                    entries[at] = copy_result(value, before)
            self._put.clear()
        if self._added:
            for (_, slot), (entries, elements) in self._added.items():
                _own_elements(entries.get(slot) or [], elements)
            self._added.clear()


def _own_elements(values: list[Any], elements: list[Any]) -> None:
    """Replace elements of a list by copies; most often they are its last ones."""
    if len(elements) == 1 and values and values[-1] is elements[0]:
        values[-1] = copy_if_mutable(values[-1])
        return
    own, left = set(map(id, elements)), len(elements)
    for at in range(len(values) - 1, -1, -1):
        if id(values[at]) in own:
            values[at], left = copy_if_mutable(values[at]), left - 1
            if not left:
                return


class StateTable:
    """The entries of one state by slot, and the slots that have changed since they were loaded."""

    __slots__ = ("changed", "entries", "lent", "puts")

    def __init__(self) -> None:
        self.entries: dict[Any, Any] = {}
        #: Collects objects that functions put; None for an operator's own state and for immutable values.
        self.puts: PutValues | None = None
        self.changed: set[Any] = set()
        #: Slots whose entries a function got and may have changed in place.
        self.lent: set[Any] = set()

    def load(self, stored: StoredRows, now_ms: int) -> None:
        self.entries.update((slot, entry.value) for slot, entry in stored.items())

    def touch_of(self, slot: Any) -> Touch:
        return 0, None

    def read(self, scope: KeyScope) -> Any:
        return self.entries.get(scope.slot)

    def lend(self, scope: KeyScope) -> Any:
        """Return the current slot's entry, which may be changed in place; None if there is none."""
        value = self.read(scope)
        if value is not None:
            self.lent.add(scope.slot)
        return value

    def write_in_place(self, slot: Any, now_ms: int) -> None:
        self.changed.add(slot)

    def clear(self) -> None:
        self.entries.clear()
        self.changed.clear()
        self.lent.clear()

    def write(self, scope: KeyScope, value: Any) -> None:
        self.entries[scope.slot] = value
        self.changed.add(scope.slot)

    def write_rest(self, scope: KeyScope, rest: list[Any]) -> None:
        self.write(scope, rest)

    def remove(self, scope: KeyScope) -> None:
        if scope.slot in self.entries:
            del self.entries[scope.slot]
            self.changed.add(scope.slot)

    def move(self, source: Any, target: Any) -> None:
        self.entries[target] = self.entries.pop(source)
        self.changed |= {source, target}


class ExpiringTable(StateTable):
    """Entries that expire as a whole; `touched_ms` has the time of each one's last access."""

    __slots__ = ("_ttl", "touched_ms")

    def __init__(self, ttl: StateTtl) -> None:
        super().__init__()
        self._ttl = ttl
        self.touched_ms: dict[Any, int] = {}

    def load(self, stored: StoredRows, now_ms: int) -> None:
        super().load(stored, now_ms)
        self.touched_ms.update((slot, entry.touched_ms) for slot, entry in stored.items())

    def touch_of(self, slot: Any) -> Touch:
        return self.touched_ms.get(slot, 0), None

    def clear(self) -> None:
        super().clear()
        self.touched_ms.clear()

    def read(self, scope: KeyScope) -> Any:
        slot = scope.slot
        if slot not in self.entries:
            return None
        if self._ttl.is_expired(self.touched_ms[slot], scope.now_ms):
            self.remove(scope)
            return None
        if self._ttl.update is TtlUpdate.ON_READ_AND_WRITE and self.touched_ms[slot] != scope.now_ms:
            self.touched_ms[slot] = scope.now_ms
            self.changed.add(slot)
        return self.entries[slot]

    def write_in_place(self, slot: Any, now_ms: int) -> None:
        super().write_in_place(slot, now_ms)
        self.touched_ms[slot] = now_ms

    def write(self, scope: KeyScope, value: Any) -> None:
        super().write(scope, value)
        self.touched_ms[scope.slot] = scope.now_ms

    def remove(self, scope: KeyScope) -> None:
        super().remove(scope)
        self.touched_ms.pop(scope.slot, None)

    def move(self, source: Any, target: Any) -> None:
        super().move(source, target)
        self.touched_ms[target] = self.touched_ms.pop(source)


class ExpiringElements(StateTable, ABC):
    """Lists or maps by slot; `touches` has the access times of their elements, at the same places."""

    # Expired elements are dropped when a key group's entries are loaded. The clock then stands still until
    # the next key group, so no further checks are needed.

    __slots__ = ("_ttl", "touches")

    def __init__(self, ttl: StateTtl) -> None:
        super().__init__()
        self._ttl = ttl
        self.touches: dict[Any, Any] = {}

    def load(self, stored: StoredRows, now_ms: int) -> None:
        """Load stored entries, by slot, without their expired elements."""
        for slot, entry in stored.items():
            times = entry.touches or [entry.touched_ms] * len(entry.value)
            lives = [not self._ttl.is_expired(time_ms, now_ms) for time_ms in times]
            if not all(lives):
                self.changed.add(slot)
            if any(lives):
                self.entries[slot], self.touches[slot] = self._living(entry.value, times, lives)

    def touch_of(self, slot: Any) -> Touch:
        """Return the access times of an entry to store."""
        if slot not in self.entries:
            return 0, None
        times = self._times(slot)
        latest_ms = max(times)
        return latest_ms, None if min(times) == latest_ms else times

    def clear(self) -> None:
        super().clear()
        self.touches.clear()

    def read(self, scope: KeyScope) -> Any:
        """Return the current slot's entry; with ON_READ_AND_WRITE, restart the time to live of all of it."""
        found = self.entries.get(scope.slot)
        if found is not None and self.is_renewed_by_reads:
            self.write(scope, found)
        return found

    def write(self, scope: KeyScope, value: Any) -> None:
        """Set the current slot's entry, not empty, and the access time of all its elements to now."""
        super().write(scope, value)
        self.touches[scope.slot] = self._all_at(value, scope.now_ms)

    def remove(self, scope: KeyScope) -> None:
        super().remove(scope)
        self.touches.pop(scope.slot, None)

    def move(self, source: Any, target: Any) -> None:
        super().move(source, target)
        self.touches[target] = self.touches.pop(source)

    def put(self, scope: KeyScope, value: Any, touches: Any) -> None:
        """Set the current slot's entry and its elements' times; remove an empty entry."""
        if value:
            super().write(scope, value)
            self.touches[scope.slot] = touches
        else:
            self.remove(scope)

    @property
    def is_renewed_by_reads(self) -> bool:
        return self._ttl.update is TtlUpdate.ON_READ_AND_WRITE

    @abstractmethod
    def _living(self, value: Any, times: Sequence[int], lives: Sequence[bool]) -> tuple[Any, Any]:
        """Return the unexpired elements, and their times."""

    @abstractmethod
    def _all_at(self, value: Any, time_ms: int) -> Any: ...

    @abstractmethod
    def _times(self, slot: Any) -> list[int]:
        """Return the times of an entry's elements in their order."""


class ExpiringLists(ExpiringElements):
    """Lists; `touches` holds lists of the same length."""

    __slots__ = ()

    def append(self, scope: KeyScope, added: list[Any]) -> None:
        """Append to the current slot's list; only the added elements get a new time."""
        slot = scope.slot
        self.entries.setdefault(slot, []).extend(added)
        self.touches.setdefault(slot, []).extend([scope.now_ms] * len(added))
        self.changed.add(slot)

    def write_rest(self, scope: KeyScope, rest: list[Any]) -> None:
        self.put(scope, rest, self.touches[scope.slot][-len(rest) :])

    def _living(self, value: Any, times: Sequence[int], lives: Sequence[bool]) -> tuple[Any, Any]:
        return [*compress(value, lives)], [*compress(times, lives)]

    def _all_at(self, value: Any, time_ms: int) -> list[int]:
        return [time_ms] * len(value)

    def _times(self, slot: Any) -> list[int]:
        times: list[int] = self.touches[slot]
        return times


class ExpiringMaps(ExpiringElements):
    """Maps; `touches` holds dicts with the same keys."""

    __slots__ = ()

    def _living(self, value: Any, times: Sequence[int], lives: Sequence[bool]) -> tuple[Any, Any]:
        return dict(compress(value.items(), lives)), dict(compress(zip(value, times, strict=True), lives))

    def _all_at(self, value: Any, time_ms: int) -> dict[Any, int]:
        return dict.fromkeys(value, time_ms)

    def _times(self, slot: Any) -> list[int]:
        touches = self.touches[slot]
        return [touches[key] for key in self.entries[slot]]


#: Converts a value to what the next micro-batch will read, for common Python types: a FLOAT rounds, a DATE
#: drops the time of day. Returns None if it does not know.
Quick = Callable[[Any], Any]

_SINGLE = struct.Struct("<f")


def quick_of(kind: T.DataType) -> Quick | None:
    return _decimal_of(kind.scale) if isinstance(kind, T.DecimalType) else _QUICK.get(type(kind))


class StoredForm:
    """Converts a value to what the next micro-batch will read; leaves values that do not fit unchanged."""

    __slots__ = ("_arrow", "_quick", "kind")

    def __init__(self, kind: T.DataType) -> None:
        #: The class of values that are read.
        self.kind: Any = next(own for one, own in _CHANGING.items() if isinstance(kind, one))
        self._quick = _QUICK[type(kind)]
        self._arrow: pa.DataType = arrow_type(kind)

    def __call__(self, value: Any) -> Any:
        found = self._quick(value)
        if found is not None or value is None:
            return found
        try:
            return to_values(strict_array([value], self._arrow))[0]
        except (ValueMismatch, pa.ArrowException, TypeError, ValueError, OverflowError):
            # Storing it raises an error with operator, field and key.
            return value


def changes(kind: T.DataType) -> bool:
    """Return whether stored values of a type may be read as other Python values than were put."""
    return isinstance(kind, tuple(_CHANGING))


def _double(value: Any) -> float | None:
    if type(value) is not float:
        return None
    # NaN is one key, as in Spark and Java: always this object.
    return value if value == value else math.nan


def _float(value: Any) -> float | None:
    if type(value) is not float:
        return None
    try:
        single: float = _SINGLE.unpack(_SINGLE.pack(value))[0]
    except OverflowError:
        # The slower conversion raises a full error.
        return None
    return single if single == single else math.nan


def _utc(value: Any) -> datetime.datetime | None:
    if type(value) is not datetime.datetime:
        return None
    if value.tzinfo is None:
        return value.replace(tzinfo=datetime.UTC, fold=0)
    return value if value.tzinfo is datetime.UTC else None


def _local(value: Any) -> datetime.datetime | None:
    return value if type(value) is datetime.datetime and value.tzinfo is None and not value.fold else None


def _date(value: Any) -> datetime.date | None:
    if type(value) is datetime.date:
        return value
    return value.date() if type(value) is datetime.datetime else None


def _bytes(value: Any) -> bytes | None:
    if type(value) is bytes:
        return value
    return bytes(value) if isinstance(value, bytearray | memoryview) else None


def _decimal_of(scale: int) -> Quick:
    def decimal_of(value: Any) -> decimal.Decimal | None:
        if type(value) is not decimal.Decimal:
            return None
        # Equal to the value that is read, which may have more zeros.
        exponent = value.as_tuple().exponent
        return value if isinstance(exponent, int) and exponent >= -scale else None

    return decimal_of


_QUICK: dict[type[T.DataType], Quick] = {
    T.DoubleType: _double,
    T.FloatType: _float,
    T.TimestampType: _utc,
    T.TimestampNTZType: _local,
    T.DateType: _date,
    T.BinaryType: _bytes,
}
_CHANGING: dict[type[T.DataType], type] = {
    T.BinaryType: bytes,
    T.FloatType: float,
    T.TimestampType: datetime.datetime,
    T.DateType: datetime.date,
}


_NESTED = (T.ArrayType, T.MapType, T.StructType)


class Naming:
    """Converts rows of a field list to named tuples."""

    __slots__ = ("_forms", "_make", "_row_form", "_width", "kind")

    def __init__(self, fields: T.StructType) -> None:
        names = list(fields.names)
        self.kind: Any = element_class(names)
        self._make, self._row_form, self._width = self.kind._make, RowForm(names), len(names)
        #: By place, the conversions of fields whose values change when they are stored.
        self._forms = [
            (at, StoredForm(one.dataType)) for at, one in enumerate(fields) if changes(one.dataType)
        ]

    def __call__(self, value: Any) -> Any:
        """Return a row as a named tuple, with its fields as they will be read.

        A row with other fields is returned unchanged; storing it raises an error.
        """
        kind = type(value)
        if kind is not self.kind:
            if kind is not tuple:
                try:
                    value = self._row_form.tuple_of(value)
                except RowError:
                    return value
            if len(value) != self._width:
                return value
            value = self._make(value)
        if not self._forms:
            return value
        fields = list(value)
        for at, form in self._forms:
            fields[at] = form(fields[at])
        return self._make(fields)


#: Converts values that a function puts into a state to what it reads, in this micro-batch and the next.
ReadForm = Naming | StoredForm


def naming_of(ddl: str) -> ReadForm | None:
    """Return the conversion from values of a declared type to what functions read; None for none."""
    return None if getattr(ddl, "hint", None) is not None else _naming(str(ddl))


@functools.lru_cache(maxsize=256)
def _naming(ddl: str) -> ReadForm | None:
    kind = parse_ddl(ddl)
    if not isinstance(kind, T.StructType) or not is_field_list(ddl):
        return StoredForm(kind) if changes(kind) else None
    return Naming(kind)


def as_fields(ddl: str) -> str:
    if getattr(ddl, "hint", None) is not None:
        return ddl
    kind = parse_ddl(ddl)
    return ddl_of(kind) if isinstance(kind, T.StructType) else ddl


def may_change(ddl: str) -> bool:
    """Return whether values of a declared type, as functions read them, are mutable."""
    hint = getattr(ddl, "hint", None)
    if hint is not None:
        return _instance_may_change(hint)
    kind = parse_ddl(ddl)
    if isinstance(kind, T.StructType) and is_field_list(ddl):
        return any(isinstance(field.dataType, _NESTED) for field in kind)
    return isinstance(kind, _NESTED)


def owner_of(ddl: str) -> Callable[..., Any]:
    return copy_result if may_change(ddl) else lambda made, *given: made


def _instance_may_change(hint: Any) -> bool:
    hint = strip_none(hint)
    if is_record(hint):
        if dataclasses.is_dataclass(hint) and not hint.__dataclass_params__.frozen:  # type: ignore[union-attr]
            return True
        return any(map(_instance_may_change, hints_of(hint).values()))
    if typing.get_origin(hint) is tuple:
        return any(map(_instance_may_change, typing.get_args(hint)))
    return typing.get_origin(hint) is not None


def same(one: Any, other: Any) -> bool:
    """Return whether two values of a state have the same stored form."""
    # More than equality: a field that a class does not compare is stored, too; NaN is NaN.
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return _all_same(one, other)
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is list:
        return _all_same(one, other)
    if kind is dict:
        return list(one) == list(other) and _all_same(one.values(), other.values())
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return all(same(getattr(one, name, None), getattr(other, name, None)) for name in names)
    if kind is float:
        return bool(one == other or (one != one and other != other))
    try:
        return bool(one == other)
    except Exception:
        # Values that cannot be compared are stored again.
        return False


def _all_same(ones: Any, others: Any) -> bool:
    return len(ones) == len(others) and all(map(same, ones, others))
