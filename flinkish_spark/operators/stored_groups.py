"""Stored key groups without their operator: what a value says about itself, and how it is made whole.

For savepoints and readers, which know no declaration: entries are what their columns say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from flinkish_spark.operators.broadcast_state import BROADCAST_KIND
from flinkish_spark.operators.frames import pack_frame, unpack_frame
from flinkish_spark.operators.group_state import STATE, TIMERS, Bases
from flinkish_spark.operators.layered_table import LayeredTable
from flinkish_spark.operators.list_state import LIST_KIND
from flinkish_spark.operators.operator_values import pack_tables
from flinkish_spark.operators.payloads import OWNER, base_of, owner_in, read_table, table_bytes
from flinkish_spark.operators.state_evolution import StateMismatch, evolved, types_text
from flinkish_spark.operators.table_codec import NAME, TIME, SlotForm, TableLayout, expiry_in

#: Open the names of states without keys where they stand beside those of keyed ones.
BROADCAST, LISTS = "broadcast/", "lists/"
_PREFIXES = {BROADCAST_KIND: BROADCAST, LIST_KIND: LISTS}


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """What a key group's value says about itself: whose it is, and the stored types of each state."""

    owner: str
    types: Mapping[str, str]


def describe_group(value: bytes | memoryview) -> StoredGroup:
    """Return whose a whole value is and what it holds; checks all of it.

    Raises
    ------
    FrameError
        It is damaged.
    """
    sections = unpack_frame(value)
    owner = owner_in(sections)
    types = {}
    for name, payload in sections.items():
        if name != OWNER:
            table = read_table(name, payload)
            if name.startswith(STATE):
                types[name.removeprefix(STATE)] = types_text(table.schema)
    return StoredGroup(str(owner.get("uid", "")), types)


def stored_tables(value: bytes | memoryview) -> dict[str, pa.RecordBatch]:
    """Return the stored entries of a whole value, of each state and each clock, by the name of the section.

    What partitions keep beside their key groups are values of their own, and may have the names of keyed
    states: broadcast states begin with :data:`BROADCAST`, operator list states with :data:`LISTS`.

    Raises
    ------
    FrameError
        The value is damaged.
    """
    sections = unpack_frame(value)
    prefix = _PREFIXES.get(owner_in(sections).get("kind", ""), STATE)
    return {
        prefix + name.removeprefix(STATE) if name.startswith(STATE) else name: read_table(name, payload)
        for name, payload in sections.items()
        if name != OWNER
    }


def kind_of(value: bytes | memoryview) -> str | None:
    """Return which kind of state a partition keeps in a value; None for the value of a key group."""
    kind = owner_in(unpack_frame(value)).get("kind")
    return None if kind is None else str(kind)


def changed_partition(
    value: bytes | memoryview | None, owner: str, kind: str | None, changes: Mapping[str, pa.RecordBatch]
) -> bytes | None:
    """Return what a partition keeps, with other entries in some of its states, and maybe another owner.

    Parameters
    ----------
    value
        None for none.
    owner
        Uid of the operator whose value it becomes.
    kind
        Of the states that are changed; None if none is.
    changes
        Entries by the name of the state.

    Returns
    -------
    bytes | None
        None if nothing is left in it.

    Raises
    ------
    StateMismatch
        It is of another kind.
    """
    found = kind if value is None else kind_of(value)
    if found is None or kind not in (None, found):
        raise StateMismatch(f"operator {owner!r} keeps {found or 'keyed state'} where {kind} was to be")
    stored = {} if value is None else stored_tables(value)
    tables = {name.removeprefix(_PREFIXES[found]): table for name, table in stored.items()} | dict(changes)
    if not any(table.num_rows for table in tables.values()):
        return None
    return pack_tables(owner, found, tables)


def changed_group(
    value: bytes | memoryview | None, owner: str, changes: Mapping[str, pa.RecordBatch]
) -> bytes | None:
    """Return a whole value with other entries in some sections, and maybe another owner.

    For writers of savepoints; what is not named in `changes` stays as it is.

    Parameters
    ----------
    value
        None for a key group that had no state.
    owner
        Uid of the operator whose value it becomes.
    changes
        Entries by section, sorted by hash; a table without rows takes the section away. Of timers, the first
        value is their place in the order of registration.

    Returns
    -------
    bytes | None
        None if nothing is left in it.

    Raises
    ------
    FrameError
        The value is damaged.
    """
    frame = {} if value is None else unpack_frame(value)
    registered = owner_in(frame).get("registered", {})
    sections: dict[str, bytes | memoryview] = {name: part for name, part in frame.items() if name != OWNER}
    for name, table in changes.items():
        sections.pop(name, None)
        if table.num_rows:
            sections[name] = table_bytes(table)
        if name.startswith(TIMERS):
            # Their places in the order of registration count from 0.
            registered[name.removeprefix(TIMERS)] = table.num_rows
    if not sections:
        return None
    kept: dict[str, Any] = {"uid": owner, "base": None, "former": [], "registered": registered}
    return pack_frame({OWNER: json.dumps(kept).encode(), **sections})


def whole_group(value: bytes | memoryview, bases: Bases) -> bytes:
    """Return a value that names no base: for savepoints, which hold all of their state themselves.

    Raises
    ------
    FrameError
        The value or its base is damaged.
    """
    upper = unpack_frame(value)
    owner = owner_in(upper)
    base = base_of(owner)
    if base is None:
        return bytes(value)
    lower = bases.read(base)
    kept = {
        "uid": owner.get("uid", ""),
        "base": None,
        "former": [],
        "registered": owner.get("registered", {}),
    }
    sections: dict[str, bytes | memoryview] = {OWNER: json.dumps(kept).encode()}
    for name in dict.fromkeys([*lower, *upper]):
        if name != OWNER:
            table = _merged(name, lower.get(name), upper.get(name))
            if table.num_rows:
                sections[name] = table_bytes(table)
    return pack_frame(sections)


def _merged(name: str, lower: memoryview | None, upper: memoryview | None) -> pa.RecordBatch:
    base, delta = (None if payload is None else read_table(name, payload) for payload in (lower, upper))
    newest = delta if delta is not None else base
    assert newest is not None
    layout = stored_layout(newest.schema)
    # The base may be older than the declaration that the delta was written with.
    base = None if base is None else evolved(layout, base)
    return LayeredTable(layout, base, delta).merged() if delta is not None else newest


def stored_layout(schema: pa.Schema) -> TableLayout:
    """Return the layout that stored columns have."""
    values = [field for field in schema if field.name.startswith("value_")]
    names = tuple((field.metadata or {}).get(NAME.encode(), b"value").decode() for field in values)
    form = SlotForm.KEY
    if TIME in schema.names:
        form = SlotForm.TIMER
    elif "from" in schema.names:
        form = SlotForm.KEY_AND_WINDOW
    return TableLayout(
        "",
        tuple(field.type for field in schema if field.name.startswith("key_")),
        tuple(field.type for field in values),
        form,
        expiry_in(schema.names),
        None,
        names,
    )
