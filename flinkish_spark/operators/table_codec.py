"""Entries of one state as an Arrow table, and back; nothing but typed columns, no pickle.

Columns, in this order:

    hash          the key's hash, by which rows are sorted and found
    key_0..       the key
    time          when it is due, for timers
    from, to      the window, for timers and for states that have one per window
    touched       when the entry was touched last, for states that expire
    touches       when each element of a list or entry of a map was, in their order, for those that expire one
                  by one; null where all are as `touched` says, which is the latest of them in any case
    value_0..     the value; null in every column where `alive` is false. Of a timer: its place in the
                  order of registration, and the place that it had in the layer below
    alive         false: the entry was removed (only in what lies over older rows)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from flinkish_spark.operators.decoded_values import StateValueError, decoded
from flinkish_spark.operators.elements import TimeDomain, Timer
from flinkish_spark.operators.payloads import values_in
from flinkish_spark.operators.stored_rows import Row, to_row
from flinkish_spark.runtime.arrow_values import ValueMismatch, strict_array
from flinkish_spark.runtime.ddl import is_field_list
from flinkish_spark.runtime.hinted_types import each_of_list, each_of_map
from flinkish_spark.runtime.named_rows import RowError, RowForm
from flinkish_spark.state import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from flinkish_spark.state.descriptors import made_by
from flinkish_spark.state.handed_out import naming_of
from flinkish_spark.state.ttl import StateTtl

HASH, ALIVE, TOUCHED, TOUCHES, TIME = "hash", "alive", "touched", "touches", "time"
#: Metadata of a value's column: its field's name.
NAME = "name"
_WINDOW = ("from", "to")

Convert = Callable[[Any], Any]


_SLOT_COLUMNS = {"key": (), "key and window": _WINDOW, "timer": (TIME, *_WINDOW)}


class SlotForm(enum.Enum):
    """What tells the entries of one state apart, and which columns that is besides the key's."""

    KEY = "key"
    KEY_AND_WINDOW = "key and window"
    #: A slot is a Timer; its window may be null.
    TIMER = "timer"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        # They are no values of the members: Python 3.11.2 makes an object of a member that is `()`.
        return _SLOT_COLUMNS[self.value]

    def split(self, slots: Sequence[Any]) -> tuple[Sequence[Any], list[Sequence[Any]]]:
        """Return the keys of slots, of which there is one at least, and the other columns."""
        if self is SlotForm.KEY:
            return slots, []
        *times, keys, windows = zip(*slots, strict=True)
        bounds = zip(*(window or (None, None) for window in windows), strict=True)
        return keys, [*times, *bounds]

    def join(self, keys: Sequence[Any], others: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """Return slots again."""
        if self is SlotForm.KEY:
            return keys
        windows = [None if a is None else (a, b) for a, b in zip(*others[-2:], strict=True)]
        if self is SlotForm.KEY_AND_WINDOW:
            return list(zip(keys, windows, strict=True))
        # What `Timer(...)` does, without a call of Python for each.
        return list(map(partial(tuple.__new__, Timer), zip(others[0], keys, windows, strict=True)))


_EXPIRY_COLUMNS = {"nothing": (), "whole": (TOUCHED,), "elements": (TOUCHED, TOUCHES)}


class Expiry(enum.Enum):
    """What of an entry expires, and which columns say when that was touched."""

    NOTHING = "nothing"
    WHOLE = "whole"
    #: Each element of a list, each entry of a map.
    ELEMENTS = "elements"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return _EXPIRY_COLUMNS[self.value]


#: Types of the columns of :class:`Expiry`.
_TOUCH_TYPES = {TOUCHED: pa.int64(), TOUCHES: pa.list_(pa.int64())}


@dataclass(frozen=True)
class TableLayout:
    """The columns of one state.

    Parameters
    ----------
    name
        Of the state.
    keys, values
        Arrow types.
    form
        What a slot is; a window is a tuple of two integers.
    expiry
        What has the time of its last touch.
    decode
        From what Arrow makes of a value to what the state holds; None where that is the same.
    value_names
        What readers call the values; stored beside their types, and never compared.
    ttl
        How long entries live; None: for ever. For whoever works on columns.
    """

    name: str
    keys: tuple[pa.DataType, ...]
    values: tuple[pa.DataType, ...]
    form: SlotForm = SlotForm.KEY
    expiry: Expiry = Expiry.NOTHING
    decode: Convert | None = None
    value_names: tuple[str, ...] = ()
    ttl: StateTtl | None = None

    @property
    def expires(self) -> bool:
        """Whether something of an entry expires."""
        return self.expiry is not Expiry.NOTHING

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the table."""
        fields = [pa.field(HASH, pa.int64())]
        fields += [pa.field(f"key_{i}", kind) for i, kind in enumerate(self.keys)]
        fields += [pa.field(name, pa.int64()) for name in self.form.columns]
        fields += [pa.field(name, _TOUCH_TYPES[name]) for name in self.expiry.columns]
        names = self.value_names or ("value",) * len(self.values)
        fields += [
            pa.field(f"value_{i}", kind, metadata={NAME: name})
            for i, (kind, name) in enumerate(zip(self.values, names, strict=True))
        ]
        return pa.schema([*fields, pa.field(ALIVE, pa.bool_())])

    @cached_property
    def empty(self) -> pa.RecordBatch:
        """No row."""
        arrays = [pa.array([], kind) for kind in self.schema.types]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def layout_of(
    descriptor: StateDescriptor,
    key_types: Sequence[T.DataType],
    form: SlotForm = SlotForm.KEY,
    named: bool = False,
) -> TableLayout:
    """Return how a declared state is stored.

    Parameters
    ----------
    named
        Whether the elements of a list and the values of a map that are declared by fields get their names. A
        single value gets them from the state that hands it out.
    """
    stored = descriptor.stored_type
    # A value with several fields has a column for each; one field alone would look like no tuple.
    fields = stored.fields if _has_several_fields(stored) else []
    kinds = [field.dataType for field in fields] or [stored]
    return TableLayout(
        descriptor.name,
        tuple(to_arrow_type(kind, timezone="UTC") for kind in key_types),
        tuple(to_arrow_type(kind, timezone="UTC") for kind in kinds),
        form,
        _expiry(descriptor),
        _decoder(descriptor, named),
        tuple(field.name for field in fields),
        descriptor.ttl,
    )


def _expiry(descriptor: StateDescriptor) -> Expiry:
    if descriptor.ttl is None:
        return Expiry.NOTHING
    has_elements = isinstance(descriptor, ListStateDescriptor | MapStateDescriptor)
    return Expiry.ELEMENTS if has_elements else Expiry.WHOLE


def expiry_in(names: Collection[str]) -> Expiry:
    """Return what has times among stored columns."""
    return next(one for one in reversed(Expiry) if set(one.columns) <= set(names))


def timer_layout(domain: TimeDomain, key_types: Sequence[T.DataType]) -> TableLayout:
    """Return how the timers of one clock are stored."""
    keys = tuple(to_arrow_type(kind, timezone="UTC") for kind in key_types)
    return TableLayout(domain.value, keys, (pa.int64(), pa.int64()), SlotForm.TIMER)


def encode_rows(layout: TableLayout, rows: Sequence[Row]) -> pa.RecordBatch:
    """Return rows as a batch, sorted by hash; rows of one hash keep their order.

    Raises
    ------
    StateValueError
        A value does not fit its declared type; names field and key.
    """
    if not rows:
        return layout.empty
    slots, values, hashes, touched, alive, touches = zip(*rows, strict=True)
    keys, others = layout.form.split(slots)
    columns: list[Sequence[Any]] = [hashes, *_spread(keys, len(layout.keys)), *others]
    if layout.expires:
        columns.append(touched)
    if layout.expiry is Expiry.ELEMENTS:
        columns.append(touches)
    width = len(layout.values)
    nothing = (None,) * width if width > 1 else None
    # Of a timer that is gone it still has to be said which one of the layer below that is.
    keeps = layout.form is SlotForm.TIMER
    if not keeps and not all(alive):
        values = tuple(one if there else nothing for one, there in zip(values, alive, strict=True))
    columns += [*_values(layout, values, keys), alive]
    batch = pa.RecordBatch.from_arrays(
        [_array(layout, field, column, keys) for field, column in zip(layout.schema, columns, strict=True)],
        schema=layout.schema,
    )
    return batch.take(pa.array(np.argsort(batch.column(0).to_numpy(), kind="stable")))


def decode_rows(layout: TableLayout, batch: pa.RecordBatch) -> Iterable[Row]:
    """Return the rows of a batch that has the layout's columns, in their order."""
    columns = {
        name: values_in(layout.name, column)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    keys = _gather([columns[f"key_{i}"] for i in range(len(layout.keys))])
    values = _gather([columns[f"value_{i}"] for i in range(len(layout.values))])
    if layout.decode is not None:
        values = decoded(layout.name, layout.decode, values, keys, columns[ALIVE])
    slots = layout.form.join(keys, [columns[name] for name in layout.form.columns])
    touched, touches = columns.get(TOUCHED, repeat(0)), columns.get(TOUCHES, repeat(None))
    return map(to_row, zip(slots, values, columns[HASH], touched, columns[ALIVE], touches, strict=False))


def encode_values(layout: TableLayout, values: Sequence[Any], keys: Sequence[Any]) -> list[pa.Array]:
    """Return the columns of values alone.

    Parameters
    ----------
    keys
        Of each value, for errors.

    Raises
    ------
    StateValueError
        As of :func:`encode_rows`.
    """
    fields = [field for field in layout.schema if field.name.startswith("value_")]
    columns = _values(layout, values, keys)
    return [_array(layout, field, column, keys) for field, column in zip(fields, columns, strict=True)]


def decode_values(layout: TableLayout, columns: Sequence[pa.Array]) -> list[Any]:
    """Return the values of such columns, of entries that are all there."""
    values = _gather([values_in(layout.name, column) for column in columns])
    decode = layout.decode
    return values if decode is None else [None if one is None else decode(one) for one in values]


def places_with(batch: pa.RecordBatch, hashes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the places of a batch's rows, sorted by hash, whose hash is one of `hashes` (sorted, unique)."""
    stored = batch.column(0).to_numpy()
    if not len(stored) or not len(hashes):
        return np.empty(0, dtype=np.int64)
    first = np.searchsorted(stored, hashes, side="left")
    counts = np.searchsorted(stored, hashes, side="right") - first
    # Places of all ranges, one behind the other: a range's first place, repeated, plus 0, 1, 2, ...
    begins = np.cumsum(counts) - counts
    places: np.ndarray[Any, Any] = np.repeat(first - begins, counts) + np.arange(int(counts.sum()))
    return places


def _array(layout: TableLayout, field: pa.Field, column: Sequence[Any], keys: Sequence[Any]) -> pa.Array:
    try:
        return strict_array(column, field.type)
    except ValueMismatch as error:
        name = (field.metadata or {}).get(NAME.encode(), b"value").decode()
        what = "the value" if name == "value" else f"field {name!r}"
        at = next((at for at, one in enumerate(column) if one is error.value), None)
        of_key = "" if at is None else f" of key {keys[at]!r:.200}"
        raise StateValueError(f"state {layout.name!r} got a wrong value: {what}{of_key}: {error}") from error


def _values(layout: TableLayout, values: Sequence[Any], keys: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the columns of values; those of several fields are any rows."""
    width = len(layout.values)
    if width == 1:
        return [values]
    form = RowForm(layout.value_names or ("",) * width)
    try:
        rows = form.tuples(list(values))
        if rows and set(map(len, rows)) != {width}:
            raise RowError(f"a row with other fields than {', '.join(layout.value_names)}")
    except RowError:
        raise _refused(layout, form, values, keys) from None
    return _spread(rows, width)


def _refused(
    layout: TableLayout, form: RowForm, values: Sequence[Any], keys: Sequence[Any]
) -> StateValueError:
    width = len(layout.values)
    for key, value in zip(keys, values, strict=True):
        says = f"state {layout.name!r} got a wrong value: of key {key!r:.200}"
        try:
            row = form.tuple_of(value)
        except RowError as error:
            return StateValueError(f"{says}: {error}")
        if len(row) != width:
            names = ", ".join(layout.value_names)
            return StateValueError(f"{says}: {len(row)} fields, declared are {width}: {names}")
    raise AssertionError("a value was refused, and none is")


def _spread(values: Sequence[Any], width: int) -> list[Sequence[Any]]:
    if width == 1:
        return [values]
    return [list(column) for column in zip(*values, strict=True)] if values else [[] for _ in range(width)]


def _gather(columns: Sequence[list[Any]]) -> list[Any]:
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def _decoder(descriptor: StateDescriptor, named: bool) -> Convert | None:
    """Return what makes values of what Arrow makes: instances of declared classes, or tuples of dicts.

    A declaration that is a list of fields makes tuples.
    """
    match descriptor:
        case ListStateDescriptor(element_type=ddl):
            return each_of_list(_element_decoder(ddl, named))
        case MapStateDescriptor(value_type=ddl):
            return each_of_map(_element_decoder(ddl, named))
        case AggregatingStateDescriptor(accumulator_type=ddl):
            own = ddl
        case ValueStateDescriptor(value_type=ddl) | ReducingStateDescriptor(value_type=ddl):
            own = ddl
    made = made_by(own)
    stored = descriptor.stored_type
    if made is None and isinstance(stored, T.StructType) and not _has_several_fields(stored):
        return lambda value: tuple(value.values())
    return made


def _element_decoder(ddl: str, named: bool) -> Convert | None:
    made = made_by(ddl)
    if made is None and is_field_list(ddl):
        naming = naming_of(ddl) if named else None
        make: Convert = tuple if naming is None else naming.kind._make
        # A map may have a key whose value is None, as with Flink.
        return lambda value: None if value is None else make(value.values())
    return made


def _has_several_fields(kind: T.DataType) -> TypeGuard[T.StructType]:
    return isinstance(kind, T.StructType) and len(kind) > 1
