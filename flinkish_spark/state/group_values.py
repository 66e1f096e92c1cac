"""Whole stored values of key groups, read and changed outside of an operator: for bundles and savepoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.state import codec
from flinkish_spark.state.base_files import Bases
from flinkish_spark.state.evolution import StateMismatch, types_text
from flinkish_spark.state.key_group import (
    STATE_SECTION,
    TIMERS,
    GroupLayout,
    GroupState,
    NoBases,
    encode_owner,
    merge_layers,
)
from flinkish_spark.state.operator_state import BROADCAST_KIND, LIST_KIND, pack_tables

#: Prefixes for states without keys, which may have the names of keyed states.
BROADCAST, LISTS = "broadcast/", "lists/"
PREFIXES = {BROADCAST_KIND: BROADCAST, LIST_KIND: LISTS}


def bundle_groups(layout: GroupLayout, values: Sequence[bytes]) -> bytes:
    groups = [GroupState(layout, value, NoBases()) for value in values]
    if len(values) == 1:
        return values[0]
    bundle = GroupState(layout, None, NoBases())
    for group in groups:
        bundle.add_group(group)
    return bundle.dump_whole()


@dataclass(frozen=True, slots=True)
class StoredGroup:
    owner: str
    types: Mapping[str, str]


def describe_group(value: bytes | memoryview, operator: str | None = None) -> StoredGroup:
    """Check a whole value, and its owner if given; return the owner and the types of its states."""
    sections = codec.unpack_frame(value)
    owner = str(codec.read_owner(sections).get("uid", ""))
    if operator not in (None, owner):
        raise StateMismatch(f"state of {owner!r} is where that of {operator!r} has to be")
    types = {}
    for name, payload in sections.items():
        if name != codec.OWNER:
            table = codec.read_table(name, payload)
            if name.startswith(STATE_SECTION):
                types[name.removeprefix(STATE_SECTION)] = types_text(table.schema)
    return StoredGroup(owner, types)


def read_tables(value: bytes | memoryview) -> dict[str, pa.RecordBatch]:
    sections = codec.unpack_frame(value)
    prefix = PREFIXES.get(codec.read_owner(sections).get("kind", ""), STATE_SECTION)
    return {
        prefix + name.removeprefix(STATE_SECTION)
        if name.startswith(STATE_SECTION)
        else name: codec.read_table(name, payload)
        for name, payload in sections.items()
        if name != codec.OWNER
    }


def kind_of(value: bytes | memoryview) -> str | None:
    kind = codec.read_owner(codec.unpack_frame(value)).get("kind")
    return None if kind is None else str(kind)


def change_partition(
    value: bytes | memoryview | None, owner: str, kind: str | None, changes: Mapping[str, pa.RecordBatch]
) -> bytes | None:
    found = kind if value is None else kind_of(value)
    if found is None or kind not in (None, found):
        raise StateMismatch(f"operator {owner!r} keeps {found or 'keyed state'} where {kind} was to be")
    stored = {} if value is None else read_tables(value)
    tables = {name.removeprefix(PREFIXES[found]): table for name, table in stored.items()} | dict(changes)
    if not any(table.num_rows for table in tables.values()):
        return None
    return pack_tables(owner, found, tables)


def change_group(
    value: bytes | memoryview | None, owner: str, changes: Mapping[str, pa.RecordBatch]
) -> bytes | None:
    """Return a whole value with some sections replaced, and perhaps another owner."""
    frame = {} if value is None else codec.unpack_frame(value)
    registered = codec.read_owner(frame).get("registered", {})
    sections: dict[str, bytes | memoryview] = {
        name: part for name, part in frame.items() if name != codec.OWNER
    }
    for name, table in changes.items():
        sections.pop(name, None)
        if table.num_rows:
            sections[name] = codec.table_bytes(table)
        if name.startswith(TIMERS):
            # The places of the new timers count from 0.
            clock = name.removeprefix(TIMERS)
            registered[clock] = max(registered.get(clock, 0), table.num_rows)
    if not sections:
        return None
    return codec.pack_frame({codec.OWNER: encode_owner(owner, registered), **sections})


def unbundle_groups(value: bytes, owner: str, bundling: Bundling) -> dict[int, bytes]:
    """Split the whole value of a bundle into its key groups; those without state are left out."""
    found: dict[int, dict[str, bytes | memoryview]] = {}
    for name, table in read_tables(value).items():
        groups = np.mod(table.column(codec.HASH).to_numpy(), bundling.key_groups)
        for group in np.unique(groups).tolist():
            found.setdefault(group, {})[name] = codec.table_bytes(table.filter(pa.array(groups == group)))
    # Places in the order of registration stay those of the bundle.
    owned = encode_owner(owner, codec.read_owner(codec.unpack_frame(value)).get("registered", {}))
    return {group: codec.pack_frame({codec.OWNER: owned, **own}) for group, own in sorted(found.items())}


def inline_base(value: bytes | memoryview, bases: Bases) -> bytes:
    """Merge the base of a value into it; savepoints hold all of their state themselves."""
    upper = codec.unpack_frame(value)
    owner = codec.read_owner(upper)
    base = codec.base_of(owner)
    if base is None:
        return bytes(value)
    lower = bases.read(base)
    kept = encode_owner(owner.get("uid", ""), owner.get("registered", {}))
    sections: dict[str, bytes | memoryview] = {codec.OWNER: kept}
    for name in dict.fromkeys([*lower, *upper]):
        if name != codec.OWNER:
            table = merge_layers(name, lower.get(name), upper.get(name))
            if table.num_rows:
                sections[name] = codec.table_bytes(table)
    return codec.pack_frame(sections)
