"""The stored form of state: a frame of Arrow tables with checksums; typed columns only, no pickle."""

from __future__ import annotations

import enum
import json
import operator
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from typing import Any, NamedTuple, TypeGuard, cast

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.elements import TimeDomain, Timer
from flinkish_spark.state.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    StateTtl,
    ValueStateDescriptor,
    find_maker,
)
from flinkish_spark.state.tables import Touch, naming_of
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.ddl import is_field_list
from flinkish_spark.types.hints import each_of_list, each_of_map
from flinkish_spark.types.row_form import RowError, RowForm
from flinkish_spark.types.to_arrow import ColumnTooLarge, ValueMismatch, strict_array
from flinkish_spark.types.to_python import to_lists_of_rows, to_values

_MAGIC, _VERSION = b"FSKS", 3
#: Magic, version, number of sections; and per section the lengths of name and payload and their CRC32.
_HEAD, _SECTION = struct.Struct("<4sBH"), struct.Struct("<HQI")
#: Alignment of payloads, so that Arrow can use the columns of a mapped file in place.
_ALIGNED = 64

#: Sections by name; views into the bytes that were read.
Frame = Mapping[str, memoryview]


class FrameError(ValueError):
    """The bytes of a frame are torn, altered, or of another version."""


def pack_frame(sections: Mapping[str, bytes | memoryview]) -> bytes:
    parts: list[bytes | memoryview] = [_HEAD.pack(_MAGIC, _VERSION, len(sections))]
    at = _HEAD.size
    for text, payload in sections.items():
        name = text.encode("utf-8")
        head = _SECTION.pack(len(name), len(payload), zlib.crc32(payload, zlib.crc32(name))) + name
        padding = bytes(-(at + len(head)) % _ALIGNED)
        parts += [head, padding, payload]
        at += len(head) + len(padding) + len(payload)
    return b"".join(parts)


def unpack_frame(data: bytes | memoryview) -> dict[str, memoryview]:
    view = memoryview(data)
    sections: dict[str, memoryview] = {}
    try:
        magic, version, count = _HEAD.unpack_from(view)
        if magic != _MAGIC or version != _VERSION:
            raise FrameError(f"not a state value of version {_VERSION}")
        at = _HEAD.size
        for _ in range(count):
            name_length, length, checksum = _SECTION.unpack_from(view, at)
            at += _SECTION.size
            encoded = bytes(view[at : at + name_length])
            name = encoded.decode("utf-8")
            at += name_length
            begins = at + -at % _ALIGNED
            padding, payload = view[at:begins], view[begins : begins + length]
            at = begins + length
            found = zlib.crc32(payload, zlib.crc32(encoded))
            if any(padding) or len(payload) != length or found != checksum:
                raise FrameError(f"the section {name!r} is torn or altered")
            if name in sections:
                raise FrameError(f"the section {name!r} is there twice")
            sections[name] = payload
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameError(f"the state value is torn: {error}") from error
    if at != len(view):
        raise FrameError("the state value has bytes after its end")
    return sections


#: Name of the section that describes the owner of a value.
OWNER = ""
#: What Arrow raises over bytes that are no table.
_UNREADABLE = (pa.ArrowException, OSError, EOFError, StopIteration, ValueError, TypeError, MemoryError)
#: Members of the owner section, and their types.
_MEMBERS: Mapping[str, type] = {"uid": str, "kind": str, "former": list, "registered": dict}


@dataclass(frozen=True, slots=True)
class BaseRef:
    #: Name below the folder of the operator's bases; no path.
    file: str
    #: The frame's place in it, in bytes.
    offset: int
    length: int


def table_bytes(batch: pa.RecordBatch) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def read_table(what: str, payload: memoryview) -> pa.RecordBatch:
    """Return the checked table of a section; it refers to the payload's memory."""
    table = read_trusted_table(what, payload)
    # A checksum does not prove that the content is valid. Arrow reads columns without checks, and wrong
    # offsets crash the process, so the table is validated before it is used.
    try:
        table.validate(full=True)
    except pa.ArrowException as error:
        if "UTF8" not in str(error):
            raise _to_damage_error(what, error) from error
        # Strings of Spark need not be UTF-8; such columns are kept as they are.
        _validate_bytes(what, payload)
    return table


def read_entries(what: str, payload: memoryview) -> pa.RecordBatch:
    """Return the entries in a section of a key group, sorted by the keys' hashes; see :func:`read_table`."""
    table = read_table(what, payload)
    if table.num_columns < 2 or table.schema.field(0).type != pa.int64():
        raise _to_damage_error(what, "it has no hashes")
    touched = table.schema.get_field_index("touched")
    for at in (0, touched, table.num_columns - 1):
        if at >= 0 and table.column(at).null_count:
            raise _to_damage_error(what, f"{table.schema.names[at]} is null")
    hashes = table.column(0).to_numpy()
    if (hashes[1:] < hashes[:-1]).any():
        raise _to_damage_error(what, "it is not in the order of its hashes")
    return table


def read_trusted_table(what: str, payload: memoryview) -> pa.RecordBatch:
    """Return the table of a section that was validated before, such as one of a base; see `read_table`."""
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            table = reader.read_next_batch()
            # Names that are no text would fail at their first use.
            _ = table.schema.names
            return table
    except _UNREADABLE as error:
        raise _to_damage_error(what, error) from error


def values_in(state: str, column: pa.Array, element: Convert | None = None) -> list[Any]:
    """Return the values of a column; with `element` those of a list state, made of their fields' values."""
    try:
        return to_values(column) if element is None else to_lists_of_rows(column, element)
    except (KeyError, ValueError, OverflowError) as error:
        raise FrameError(f"the stored values of state {state!r} cannot be read: {error}") from error


def check_frame(data: bytes | memoryview) -> Frame:
    """Return the sections of a base after checking all of its tables."""
    frame = unpack_frame(data)
    for name, payload in frame.items():
        if name != OWNER:
            read_entries(name, payload)
    return frame


def read_owner(frame: Frame) -> dict[str, Any]:
    """Return the owner section of a value: `uid`, `kind`, `base`, `former`, `registered`, each optional."""
    try:
        owner = json.loads(bytes(frame.get(OWNER, b"{}")))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the section with the owner of the state cannot be read: {error}") from error
    if not isinstance(owner, dict) or not _is_owner(owner):
        raise FrameError(f"the section with the owner of the state is damaged: {owner!r:.200}")
    return owner


def base_of(owner: Mapping[str, Any]) -> BaseRef | None:
    return BaseRef(**owner["base"]) if owner.get("base") else None


def _validate_bytes(what: str, payload: memoryview) -> None:
    """Validate a table in all but whether its strings are UTF-8."""
    try:
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(payload))
        schema = pa.ipc.read_schema(messages.read_next_message())
        bytewise = pa.schema([field.with_type(_to_bytes_type(field.type)) for field in schema])
        pa.ipc.read_record_batch(messages.read_next_message(), bytewise).validate(full=True)
    except _UNREADABLE as error:
        raise _to_damage_error(what, error) from error


def _to_damage_error(what: str, why: object) -> FrameError:
    return FrameError(f"the section {what!r} is damaged: {str(why) or type(why).__name__}")


def _to_bytes_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_map(kind):
        return pa.map_(_to_bytes_type(kind.key_type), _to_bytes_type(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_to_bytes_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_to_bytes_type(field.type)) for field in kind])
    return kind


def _is_owner(owner: Mapping[str, Any]) -> bool:
    if not all(isinstance(owner[name], kind) for name, kind in _MEMBERS.items() if name in owner):
        return False
    counts, base = [*owner.get("registered", {}).values()], owner.get("base")
    if base is not None:
        if not isinstance(base, dict) or base.keys() != {"file", "offset", "length"}:
            return False
        if not isinstance(base["file"], str):
            return False
        counts += [base["offset"], base["length"]]
    former = owner.get("former", ())
    are_former = (isinstance(one, list) and list(map(type, one)) == [str, int] for one in former)
    return all(are_former) and all(type(one) is int and 0 <= one < 1 << 63 for one in counts)


class Row(NamedTuple):
    """One entry; `touches` are the access times of its elements, None if all are the same."""

    slot: Any
    value: Any
    hash: int
    touched_ms: int = 0
    alive: bool = True
    touches: list[int] | None = None


#: Makes a row of a tuple of its fields; `Row(*fields)` would cost a Python call for each.
to_row = cast(Callable[[tuple[Any, ...]], Row], partial(tuple.__new__, Row))


def rows_by_slot(
    slots: Sequence[Any], values: Iterable[Any], hashes: Iterable[int], touches: Iterable[Touch] | None = None
) -> dict[Any, Row]:
    given = repeat((0, None)) if touches is None else touches
    rows = (
        (slot, value, hashed, touched_ms, True, each)
        for slot, value, hashed, (touched_ms, each) in zip(slots, values, hashes, given, strict=False)
    )
    return dict(zip(slots, map(to_row, rows), strict=True))


class StateValueError(ValueError):
    """A state has a value that does not fit the declared type."""


def decode_each(
    state: str,
    decode: Callable[[Any], Any],
    values: Sequence[Any],
    keys: Sequence[Any],
    living: Sequence[Any],
) -> list[Any]:
    """Convert values to their declared classes; None for entries that are not there."""
    found: list[Any] = []
    try:
        # Values before a failing one stay in the list, so its length tells which one failed.
        found.extend(
            decode(one) if one is not None and is_there else None
            for one, is_there in zip(values, living, strict=True)
        )
    except Exception as error:
        raise StateValueError(
            f"state {state!r}: the stored value of key {keys[len(found)]!r:.200} cannot be converted to the "
            f"declared class: {type(error).__name__}: {error}"
        ) from error
    return found


# Columns of a table, in this order:
#
#     hash          the key's hash, by which rows are sorted and found
#     key_0..       the key
#     time          when a timer is due
#     from, to      the window, for timers and for states with an entry per window
#     touched       time of the last access, for states with a time to live
#     touches       the same per element of a list or entry of a map, in order; null if all of them equal
#                   `touched`, which is the latest of them in any case
#     value_0..     the value; null in every column where `alive` is false. For a timer: its place in the
#                   order of registration, and its place in the base. For an entry with a due time: that time,
#                   its place in the order of registration, and then the value
#     alive         false if the entry was removed (only in a delta over a base)
HASH, ALIVE, TOUCHED, TOUCHES, TIME = "hash", "alive", "touched", "touches", "time"
#: In the metadata of a value's column: its field's name.
NAME = "name"
#: In the metadata of a table: the kind of its state.
KIND = "kind"
_WINDOW = ("from", "to")

#: Name of the first value field of entries with a due time, by clock. Such an entry has no separate timer.
#: The name is stored, so readers see it.
DUE_FIELDS = {
    TimeDomain.EVENT_TIME: "_fs_due_by_event_time_ms",
    TimeDomain.PROCESSING_TIME: "_fs_due_by_processing_time_ms",
}
#: Name of the second field, if entries are objects: the place in the order of registration, as for a timer. A
#: place below zero (-1 stands for 0) marks an entry that exists without a value.
ORDER_FIELD = "_fs_order"

Convert = Callable[[Any], Any]


_SLOT_COLUMNS = {"key": (), "key and window": _WINDOW, "timer": (TIME, *_WINDOW)}


class SlotForm(enum.Enum):
    """The slot that identifies an entry of a state, and its columns besides the key's."""

    KEY = "key"
    KEY_AND_WINDOW = "key and window"
    #: A slot is a Timer; its window may be null.
    TIMER = "timer"

    @property
    def columns(self) -> tuple[str, ...]:
        # Not as values of the members: Python 3.11.2 makes an object of a member whose value is `()`.
        return _SLOT_COLUMNS[self.value]

    def split(self, slots: Sequence[Any]) -> tuple[Sequence[Any], list[Sequence[Any]]]:
        """Return the keys of one or more slots, and the other columns."""
        if self is SlotForm.KEY:
            return slots, []
        *times, keys, windows = zip(*slots, strict=True)
        bounds = zip(*(window or (None, None) for window in windows), strict=True)
        return keys, [*times, *bounds]

    def join(self, keys: Sequence[Any], others: Sequence[Sequence[Any]]) -> Sequence[Any]:
        if self is SlotForm.KEY:
            return keys
        windows = [None if a is None else (a, b) for a, b in zip(*others[-2:], strict=True)]
        if self is SlotForm.KEY_AND_WINDOW:
            return list(zip(keys, windows, strict=True))
        # `Timer(...)` would cost a Python call for each.
        return list(map(partial(tuple.__new__, Timer), zip(others[0], keys, windows, strict=True)))


_EXPIRY_COLUMNS = {"nothing": (), "whole": (TOUCHED,), "elements": (TOUCHED, TOUCHES)}


class Expiry(enum.Enum):
    """The unit that expires, and the columns with its access times."""

    NOTHING = "nothing"
    WHOLE = "whole"
    #: Each element of a list, each entry of a map.
    ELEMENTS = "elements"

    @property
    def columns(self) -> tuple[str, ...]:
        return _EXPIRY_COLUMNS[self.value]


_TOUCH_TYPES = {TOUCHED: pa.int64(), TOUCHES: pa.list_(pa.int64())}


@dataclass(frozen=True)
class TableLayout:
    name: str
    keys: tuple[pa.DataType, ...]
    values: tuple[pa.DataType, ...]
    #: The form of slots; a window is a tuple of two integers.
    form: SlotForm = SlotForm.KEY
    #: The unit that has an access time.
    expiry: Expiry = Expiry.NOTHING
    #: Converts Arrow's Python value to that of the state; None if both are the same.
    decode: Convert | None = None
    #: Names of the values' fields for readers; stored with the types, and never compared.
    value_names: tuple[str, ...] = ()
    #: How long entries live, for code that works on columns; None for ever.
    ttl: StateTtl | None = None
    #: The kind, such as "list state"; stored, since a value means something else in another kind. Empty if
    #: unknown.
    kind: str = ""
    #: Makes an element of a list state from the tuple of its fields; None if elements have no fields, or have
    #: a declared class.
    element: Convert | None = None

    @property
    def expires(self) -> bool:
        return self.expiry is not Expiry.NOTHING

    @property
    def is_due(self) -> bool:
        """Return whether a row's value begins with a due time and a place in the order of registration."""
        return self.value_names[1:2] == (ORDER_FIELD,)

    @cached_property
    def contents(self) -> TableLayout:
        """The layout without due time and place."""
        return replace(self, values=self.values[2:], value_names=self.value_names[2:])

    @cached_property
    def schema(self) -> pa.Schema:
        fields = [pa.field(HASH, pa.int64())]
        fields += [pa.field(f"key_{i}", kind) for i, kind in enumerate(self.keys)]
        fields += [pa.field(name, pa.int64()) for name in self.form.columns]
        fields += [pa.field(name, _TOUCH_TYPES[name]) for name in self.expiry.columns]
        names = self.value_names or ("value",) * len(self.values)
        fields += [
            pa.field(f"value_{i}", kind, metadata={NAME: name})
            for i, (kind, name) in enumerate(zip(self.values, names, strict=True))
        ]
        return pa.schema([*fields, pa.field(ALIVE, pa.bool_())], {KIND: self.kind} if self.kind else None)

    @cached_property
    def empty(self) -> pa.RecordBatch:
        arrays = [pa.array([], kind) for kind in self.schema.types]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def layout_of(
    descriptor: StateDescriptor,
    key_types: Sequence[T.DataType],
    form: SlotForm = SlotForm.KEY,
    named: bool = False,
    due: TimeDomain | None = None,
) -> TableLayout:
    stored = descriptor.stored_type
    # A value with several fields has a column for each; with one column a single field would look like a
    # scalar.
    fields = stored.fields if _has_several_fields(stored) else []
    kinds = [field.dataType for field in fields] or [stored]
    has_elements = isinstance(descriptor, ListStateDescriptor | MapStateDescriptor)
    layout = TableLayout(
        descriptor.name,
        tuple(arrow_type(kind) for kind in key_types),
        tuple(arrow_type(kind) for kind in kinds),
        form,
        Expiry.NOTHING if descriptor.ttl is None else Expiry.ELEMENTS if has_elements else Expiry.WHOLE,
        _decoder(descriptor, named),
        tuple(field.name for field in fields),
        descriptor.ttl,
        _KINDS[type(descriptor)],
        _find_element(descriptor, named),
    )
    if due is None:
        return layout
    names = DUE_FIELDS[due], ORDER_FIELD, *(layout.value_names or ("value",))
    return replace(layout, values=(pa.int64(), pa.int64(), *layout.values), value_names=names)


_KINDS: dict[type, str] = {
    ValueStateDescriptor: "value state",
    ListStateDescriptor: "list state",
    MapStateDescriptor: "map state",
    ReducingStateDescriptor: "reducing state",
    AggregatingStateDescriptor: "aggregating state",
}


def reader_name(field: pa.Field) -> str:
    """Return the readers' name of a value's column: its field's name, or `value` without fields."""
    return str((field.metadata or {}).get(NAME.encode(), b"value").decode())


def value_fields(schema: pa.Schema) -> list[pa.Field]:
    return [field for field in schema if field.name.startswith("value_")]


def read_kind(schema: pa.Schema) -> str:
    return str((schema.metadata or {}).get(KIND.encode(), b"").decode())


def find_expiry(names: Collection[str]) -> Expiry:
    return next(one for one in reversed(Expiry) if set(one.columns) <= set(names))


def timer_layout(domain: TimeDomain, key_types: Sequence[T.DataType]) -> TableLayout:
    keys = tuple(arrow_type(kind) for kind in key_types)
    return TableLayout(domain.value, keys, (pa.int64(), pa.int64()), SlotForm.TIMER)


def encode_rows(layout: TableLayout, rows: Sequence[Row]) -> pa.RecordBatch:
    """Return rows as a batch, sorted stably by hash."""
    if not rows:
        return layout.empty
    slots, values, hashes, touched, alive, touches = zip(*rows, strict=True)
    keys, others = layout.form.split(slots)
    columns: list[Sequence[Any]] = [hashes, *_split_columns(keys, len(layout.keys)), *others]
    if layout.expires:
        columns.append(touched)
    if layout.expiry is Expiry.ELEMENTS:
        columns.append(touches)
    width = 3 if layout.is_due else len(layout.values)
    nothing = (None,) * width if width > 1 else None
    # A removed timer keeps its value, which tells the timer of the base that it removes.
    keeps = layout.form is SlotForm.TIMER
    if not keeps and not all(alive):
        values = tuple(one if there else nothing for one, there in zip(values, alive, strict=True))
    columns += [*_to_value_columns(layout, values, keys), alive]
    batch = pa.RecordBatch.from_arrays(
        [
            _to_array(layout, field, column, keys)
            for field, column in zip(layout.schema, columns, strict=True)
        ],
        schema=layout.schema,
    )
    return batch.take(pa.array(np.argsort(batch.column(0).to_numpy(), kind="stable")))


def decode_rows(layout: TableLayout, batch: pa.RecordBatch) -> Iterable[Row]:
    # The list of a list state is its last column, behind a due time.
    lists = f"value_{len(layout.values) - 1}"
    columns = {
        name: values_in(layout.name, column, layout.element if name == lists else None)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    keys = _gather([columns[f"key_{i}"] for i in range(len(layout.keys))])
    given = [columns[f"value_{i}"] for i in range(len(layout.values))]
    values = decode_values(layout, given, keys, columns[ALIVE])
    slots = layout.form.join(keys, [columns[name] for name in layout.form.columns])
    touched, touches = columns.get(TOUCHED, repeat(0)), columns.get(TOUCHES, repeat(None))
    return map(to_row, zip(slots, values, columns[HASH], touched, columns[ALIVE], touches, strict=False))


def encode_values(layout: TableLayout, values: Sequence[Any], keys: Sequence[Any]) -> list[pa.Array]:
    """Return the columns of values; None is an entry without a value."""
    fields = value_fields(layout.schema)
    columns = _to_value_columns(layout, _fill_nulls(values, len(fields)), keys)
    return [_to_array(layout, field, column, keys) for field, column in zip(fields, columns, strict=True)]


def decode_values(
    layout: TableLayout, columns: Sequence[list[Any]], keys: Sequence[Any], alive: Sequence[bool]
) -> list[Any]:
    """Return values from their columns, as lists; those of removed entries do not matter."""
    if not layout.is_due:
        values = _gather(columns)
        decode = layout.decode
        return values if decode is None else decode_each(layout.name, decode, values, keys, alive)
    times, stored, *given = columns
    # Entries of a savepoint writer may have no places.
    there = [place is None or place >= 0 for place in stored]
    places = [place if is_there else ~place for place, is_there in zip(stored, there, strict=True)]
    own = decode_values(layout.contents, given, keys, list(map(operator.and_, there, alive)))
    own = [one if is_there else None for one, is_there in zip(own, there, strict=True)]
    return list(zip(times, places, own, strict=True))


def find_places(batch: pa.RecordBatch, hashes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the places of rows whose hash is in `hashes` (sorted, unique); the batch is sorted by hash."""
    stored = batch.column(0).to_numpy()
    if not len(stored) or not len(hashes):
        return np.empty(0, dtype=np.int64)
    first = np.searchsorted(stored, hashes, side="left")
    counts = np.searchsorted(stored, hashes, side="right") - first
    # Places of all ranges in turn: a range's first place, repeated, plus 0, 1, 2, ...
    begins = np.cumsum(counts) - counts
    return np.repeat(first - begins, counts) + np.arange(int(counts.sum()))


def _to_array(layout: TableLayout, field: pa.Field, column: Sequence[Any], keys: Sequence[Any]) -> pa.Array:
    try:
        return strict_array(column, field.type)
    except ColumnTooLarge as error:
        raise too_large(layout.name, str(error)) from error
    except ValueMismatch as error:
        name = reader_name(field)
        what = "the value" if name == "value" else f"field {name!r}"
        at = next((at for at, one in enumerate(column) if one is error.value), None)
        of_key = "" if at is None else f" of key {keys[at]!r:.200}"
        raise StateValueError(f"state {layout.name!r} got a wrong value: {what}{of_key}: {error}") from error


def too_large(state: str, says: str) -> StateValueError:
    """Return the error for a state that has outgrown one Arrow column, which holds all keys of a bundle."""
    return StateValueError(
        f"state {state!r} is too large: {says}. All keys of one bundle of key groups share one Arrow column. "
        "If many keys are the cause, raise spark.sql.shuffle.partitions: each partition has four bundles; if "
        "one key is, split it into several states or keys, or keep its data outside"
    )


def _to_value_columns(layout: TableLayout, values: Sequence[Any], keys: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the columns of values; values with several fields may be any kind of row."""
    width = len(layout.values)
    if width == 1:
        return [values]
    if layout.is_due:
        times, places, own = zip(*values, strict=True)
        stored = [
            ~place if one is None and place is not None else place
            for place, one in zip(places, own, strict=True)
        ]
        contents = layout.contents
        return [times, stored, *_to_value_columns(contents, _fill_nulls(own, len(contents.values)), keys)]
    form = RowForm(layout.value_names or ("",) * width)
    try:
        rows = form.tuples(list(values))
        if rows and set(map(len, rows)) != {width}:
            raise RowError(f"a row with other fields than {', '.join(layout.value_names)}")
    except RowError:
        raise _to_value_error(layout, form, values, keys) from None
    return _split_columns(rows, width)


def _fill_nulls(values: Sequence[Any], width: int) -> Sequence[Any]:
    """Replace None by a tuple of None for each field."""
    if width == 1 or not any(one is None for one in values):
        return values
    return [(None,) * width if one is None else one for one in values]


def _to_value_error(
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
            return StateValueError(f"{says}: {len(row)} fields, but {width} are declared: {names}")
    raise AssertionError("a value was refused, and none is")


def _split_columns(values: Sequence[Any], width: int) -> list[Sequence[Any]]:
    if width == 1:
        return [values]
    return [list(column) for column in zip(*values, strict=True)] if values else [[] for _ in range(width)]


def _gather(columns: Sequence[list[Any]]) -> list[Any]:
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def _decoder(descriptor: StateDescriptor, named: bool) -> Convert | None:
    """Return the converter of Arrow's values, to instances of declared classes or from dicts to tuples."""
    match descriptor:
        case ListStateDescriptor(element_type=ddl):
            return each_of_list(find_maker(ddl))
        case MapStateDescriptor(value_type=ddl):
            return each_of_map(_map_value_decoder(ddl, named))
        case AggregatingStateDescriptor(accumulator_type=ddl):
            own = ddl
        case ValueStateDescriptor(value_type=ddl) | ReducingStateDescriptor(value_type=ddl):
            own = ddl
    made = find_maker(own)
    stored = descriptor.stored_type
    if made is None and isinstance(stored, T.StructType) and not _has_several_fields(stored):
        return lambda value: tuple(value.values())
    return made


def _find_element(descriptor: StateDescriptor, named: bool) -> Convert | None:
    # A call of Python for each stored element would cost as much as all else that reads it.
    if isinstance(descriptor, ListStateDescriptor) and find_maker(descriptor.element_type) is None:
        return _row_maker(descriptor.element_type, named)
    return None


def _map_value_decoder(ddl: str, named: bool) -> Convert | None:
    made, make = find_maker(ddl), _row_maker(ddl, named)
    if made is not None or make is None:
        return made
    # A map may have a key whose value is None, as in Flink.
    return lambda value: None if value is None else make(tuple(value.values()))


def _row_maker(ddl: str, named: bool) -> Convert | None:
    if not is_field_list(ddl):
        return None
    naming = naming_of(ddl) if named else None
    return tuple if naming is None else partial(tuple.__new__, naming.kind)


def _has_several_fields(kind: T.DataType) -> TypeGuard[T.StructType]:
    return isinstance(kind, T.StructType) and len(kind) > 1
