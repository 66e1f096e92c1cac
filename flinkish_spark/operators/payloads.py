"""What the sections of a state value are made of: tables of entries, and whose the value is.

The checksum of a section says that it is as somebody wrote it, not that this package did. Arrow reads columns
without looking at them; one whose offsets point nowhere ends the process. So everything is looked at once,
when it is read, and whatever is wrong is a :class:`~flinkish_spark.operators.frames.FrameError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from flinkish_spark.operators.frames import Frame, FrameError, unpack_frame
from flinkish_spark.runtime.python_values import to_values

#: Name of the section that says whose a value is.
OWNER = ""
#: What Arrow raises over bytes that are no table.
_UNREADABLE = (pa.ArrowException, OSError, EOFError, StopIteration, ValueError, TypeError, MemoryError)
#: Members of what says whose a value is, and their types.
_MEMBERS: Mapping[str, type] = {"uid": str, "kind": str, "former": list, "registered": dict}


@dataclass(frozen=True, slots=True)
class BaseRef:
    """Where the base of a key group lies.

    Parameters
    ----------
    file
        Name below the folder of the operator's bases; no path.
    offset, length
        The frame's place in it, in bytes.
    """

    file: str
    offset: int
    length: int


def table_bytes(batch: pa.RecordBatch) -> memoryview:
    """Return entries as the payload of a section."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def read_table(what: str, payload: memoryview) -> pa.RecordBatch:
    """Return the table of a section; it refers to its memory.

    Parameters
    ----------
    what
        Names it in errors.

    Raises
    ------
    FrameError
        It is no table, or one whose columns cannot be used.
    """
    table = known_table(what, payload)
    try:
        table.validate(full=True)
    except pa.ArrowException as error:
        if "UTF8" not in str(error):
            raise _damaged(what, error) from error
        # What Spark takes for text need not be UTF-8, and columns with it are kept as they are.
        _validate_bytes(what, payload)
    return table


def read_entries(what: str, payload: memoryview) -> pa.RecordBatch:
    """Return the entries of a key group's section: a table by the hashes of keys; see :func:`read_table`."""
    table = read_table(what, payload)
    if table.num_columns < 2 or table.schema.field(0).type != pa.int64():
        raise _damaged(what, "it has no hashes")
    touched = table.schema.get_field_index("touched")
    for at in (0, touched, table.num_columns - 1):
        if at >= 0 and table.column(at).null_count:
            raise _damaged(what, f"{table.schema.names[at]} is null")
    hashes = table.column(0).to_numpy()
    if (hashes[1:] < hashes[:-1]).any():
        raise _damaged(what, "it is not in the order of its hashes")
    return table


def known_table(what: str, payload: memoryview) -> pa.RecordBatch:
    """Return the table of a section that was looked at before, as those of a base; see `read_table`."""
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            table = reader.read_next_batch()
            # Names that are no text would fail whoever looks at them.
            _ = table.schema.names
            return table
    except _UNREADABLE as error:
        raise _damaged(what, error) from error


def values_in(state: str, column: pa.Array) -> list[Any]:
    """Return the values of a state's column as Python's.

    Raises
    ------
    FrameError
        Python takes them not: a map has a key twice, a text is no UTF-8.
    """
    try:
        return to_values(column)
    except (KeyError, ValueError, OverflowError) as error:
        raise FrameError(f"what is stored of state {state!r} cannot be read: {error}") from error


def checked_frame(data: bytes | memoryview) -> Frame:
    """Return the sections of a base, of which all tables have been looked at.

    Raises
    ------
    FrameError
        One of them is damaged.
    """
    frame = unpack_frame(data)
    for name, payload in frame.items():
        if name != OWNER:
            read_entries(name, payload)
    return frame


def owner_in(frame: Frame) -> dict[str, Any]:
    """Return what a value says about whose it is: `uid`, `kind`, `base`, `former`, `registered`, or less.

    Raises
    ------
    FrameError
        It says something that this package does not write.
    """
    try:
        owner = json.loads(bytes(frame.get(OWNER, b"{}")))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"what says whose the state is cannot be read: {error}") from error
    if not isinstance(owner, dict) or not _is_owner(owner):
        raise FrameError(f"what says whose the state is, is none: {owner!r:.200}")
    return owner


def base_of(owner: Mapping[str, Any]) -> BaseRef | None:
    """Return the base that a value names; None if it names none."""
    return BaseRef(**owner["base"]) if owner.get("base") else None


def _validate_bytes(what: str, payload: memoryview) -> None:
    """Look at a table with bytes in the place of texts: at all but whether texts are UTF-8."""
    try:
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(payload))
        schema = pa.ipc.read_schema(messages.read_next_message())
        bytewise = pa.schema([field.with_type(_with_bytes(field.type)) for field in schema])
        pa.ipc.read_record_batch(messages.read_next_message(), bytewise).validate(full=True)
    except _UNREADABLE as error:
        raise _damaged(what, error) from error


def _damaged(what: str, why: object) -> FrameError:
    return FrameError(f"the section {what!r} is damaged: {str(why) or type(why).__name__}")


def _with_bytes(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_map(kind):
        return pa.map_(_with_bytes(kind.key_type), _with_bytes(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_with_bytes(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_bytes(field.type)) for field in kind])
    return kind


def _is_owner(owner: Mapping[str, Any]) -> bool:
    if not all(isinstance(owner[name], kind) for name, kind in _MEMBERS.items() if name in owner):
        return False
    base = owner.get("base")
    if base is not None and not (isinstance(base, dict) and _is_base(base)):
        return False
    return all(_is_former(one) for one in owner.get("former", ())) and all(
        _is_count(count) for count in owner.get("registered", {}).values()
    )


def _is_base(base: Mapping[str, Any]) -> bool:
    return (
        base.keys() == {"file", "offset", "length"}
        and isinstance(base["file"], str)
        and _is_count(base["offset"])
        and _is_count(base["length"])
    )


def _is_former(one: object) -> bool:
    return isinstance(one, list) and list(map(type, one)) == [str, int]


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 63
