"""How the state of one key group is stored: typed Arrow tables in a checked frame.

Frame: magic, version, number of sections; then per section its name, length, CRC32 and payload.
The first section holds the operator's uid, so that state never reaches another operator; each
further one is a state's Arrow IPC stream with the columns ``key_0..key_n`` and
``value_0..value_m``. Everything is typed, so a changed declaration is found when the state is
read, and reading never runs code: no pickle.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from flinkish_spark.runtime.arrow_values import ValueMismatch, strict_array

_MAGIC = b"FSKS"
_VERSION = 1
_HEAD = struct.Struct("<4sBH")
#: Name of the section with the operator's uid; no state can have it.
_OWNER = ""
_SECTION = struct.Struct("<HQI")


class StateCodecError(ValueError):
    """The state value is torn, altered, or written by another version or declaration."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Arrow types of one keyed state: of the key's columns and of the value's columns."""

    name: str
    keys: tuple[pa.DataType, ...]
    values: tuple[pa.DataType, ...]

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the section."""
        fields = [pa.field(f"key_{i}", t) for i, t in enumerate(self.keys)]
        return pa.schema(fields + [pa.field(f"value_{i}", t) for i, t in enumerate(self.values)])


@dataclass(frozen=True, slots=True)
class StoredState:
    """What a state value says about itself: whose it is, and the stored types of each state."""

    owner: str
    types: Mapping[str, str]


#: Entries of one state: key -> value. A key or value of one column is a scalar, else a tuple.
Entries = Mapping[Any, Any]


def encode_states(uid: str, layouts: Sequence[StateLayout], entries: Mapping[str, Entries]) -> bytes:
    """Return the state value of a key group of operator `uid`.

    Raises
    ------
    StateCodecError
        A value does not fit its declared type; the message names state, column and type.
    """
    sections = [(_OWNER, uid.encode("utf-8"))]
    sections += [(layout.name, _encode_section(layout, entries[layout.name])) for layout in layouts]
    parts = [_HEAD.pack(_MAGIC, _VERSION, len(sections))]
    for text, payload in sections:
        name = text.encode("utf-8")
        parts += [_SECTION.pack(len(name), len(payload), zlib.crc32(payload)), name, payload]
    return b"".join(parts)


def decode_states(uid: str, layouts: Sequence[StateLayout], data: bytes) -> dict[str, dict[Any, Any]]:
    """Return the entries of every declared state; a state that was never stored is empty.

    Raises
    ------
    StateCodecError
        The frame is damaged, belongs to another operator, or a stored state has other types than
        its declaration.
    """
    sections = _split(data)
    owner = bytes(sections.pop(_OWNER, b"")).decode("utf-8", "replace")
    if owner != uid:
        raise StateCodecError(f"the state value belongs to operator {owner!r}, not to {uid!r}")
    known = {layout.name for layout in layouts}
    unknown = sorted(sections.keys() - known)
    if unknown:
        raise StateCodecError(f"the stored state {unknown[0]!r} is no longer declared by the function")
    return {
        layout.name: _decode_section(layout, sections[layout.name]) if layout.name in sections else {}
        for layout in layouts
    }


def describe_state(data: bytes) -> StoredState:
    """Return whose a state value is and what it holds, without a declaration; checks all of it.

    Raises
    ------
    StateCodecError
        The frame is damaged.
    """
    sections = _split(data)
    owner = bytes(sections.pop(_OWNER, b"")).decode("utf-8", "replace")
    types = {}
    for name, payload in sections.items():
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            types[name] = _types(reader.schema)
    return StoredState(owner, types)


def _columns(rows: Sequence[Any], width: int) -> list[Sequence[Any]]:
    if width == 1:
        return [rows]
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]


def _encode_section(layout: StateLayout, entries: Entries) -> bytes:
    schema = layout.schema
    columns = _columns(list(entries.keys()), len(layout.keys))
    columns += _columns(list(entries.values()), len(layout.values))
    arrays = []
    for field, column in zip(schema, columns, strict=True):
        try:
            arrays.append(strict_array(column, field.type))
        except ValueMismatch as error:
            raise StateCodecError(f"state {layout.name!r}: {field.name} of {error}") from error
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return bytes(sink.getvalue())


def _split(data: bytes) -> dict[str, memoryview]:
    view = memoryview(data)
    try:
        magic, version, count = _HEAD.unpack_from(view)
        if magic != _MAGIC or version != _VERSION:
            raise StateCodecError(f"not a state value of version {_VERSION}")
        at, sections = _HEAD.size, {}
        for _ in range(count):
            name_length, length, checksum = _SECTION.unpack_from(view, at)
            at += _SECTION.size
            name = bytes(view[at : at + name_length]).decode("utf-8")
            payload = view[at + name_length : at + name_length + length]
            at += name_length + length
            if len(payload) != length or zlib.crc32(payload) != checksum:
                raise StateCodecError(f"state {name!r} is torn or altered")
            sections[name] = payload
    except (struct.error, UnicodeDecodeError) as error:
        raise StateCodecError(f"the state value is torn: {error}") from error
    if at != len(view):
        raise StateCodecError("the state value has bytes after its end")
    return sections


def _decode_section(layout: StateLayout, payload: memoryview) -> dict[Any, Any]:
    with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
        if not reader.schema.equals(layout.schema):
            raise StateCodecError(
                f"state {layout.name!r} is stored as {_types(reader.schema)} "
                f"but declared as {_types(layout.schema)}"
            )
        table = reader.read_all()
    columns = [column.to_pylist() for column in table.columns]
    width = len(layout.keys)
    keys = columns[0] if width == 1 else list(zip(*columns[:width], strict=True))
    values = columns[width] if len(layout.values) == 1 else list(zip(*columns[width:], strict=True))
    return dict(zip(keys, values, strict=True))


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
