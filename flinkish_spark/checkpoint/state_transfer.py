"""State of a plain Spark query made into state of a job: the files of one store at one version.

A plain query keeps its state in one of three ways, of which a job reads the second only:

- `HDFSBackedStateStoreProvider`: `V.snapshot` with all rows, `V.delta` with the changes since V-1;
- `RocksDBStateStoreProvider` in checkpoint format 2: see `checkpoint/state_files.py`;
- the same in format 1: `V.zip` and `V.changelog`, without unique ids and without lineage.

What is written has version 2, as after micro-batch 1, whatever version it had. Changelogs after a snapshot
become one; without a snapshot version 1 is a changelog, too. So each store has the version that Spark's log
names, and Spark finds it from a snapshot or from version 1.
"""

from __future__ import annotations

import json
import re
import struct
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from flinkish_spark.checkpoint.lz4_blocks import UNREADABLE, compress, read_blocks
from flinkish_spark.checkpoint.state_files import StateOnDisk, StoreVersion, files_of, tables_of
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.store import Store

#: The micro-batch after which the written state stands.
LAST_BATCH = 1
_LENGTH = struct.Struct(">i")
#: What ends a changelog, by whether its records begin with their kind.
_END = {False: _LENGTH.pack(-1), True: b"\0"}
#: RocksDB's encoders put the version of their encoding before each row.
_ENCODING = b"\0"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreContent:
    #: Name of a snapshot below the state folder; empty without one.
    snapshot: str
    #: Records of a changelog since the snapshot, without its beginning and end.
    changes: bytes
    #: Whether a record begins with its kind, as in stores with several column families.
    has_kinds: bool = False


def read_rocksdb(state: StateOnDisk, store: StoreVersion) -> StoreContent:
    """Read a version; one without a unique id is of format 1."""
    is_plain = not store.unique_id
    names = _plain_files(state, store, "zip", "changelog") if is_plain else files_of(state, store)
    snapshot = next((name for name in names if name.endswith(".zip")), "")
    changelogs = [name for name in names if name.endswith(".changelog")]
    found = [_read_whole(state, name, _records_of) for name in changelogs]
    records = b"".join(own for own, _ in found)
    return StoreContent(snapshot, records, any(has_kinds for _, has_kinds in found))


def read_hdfs_backed(state: StateOnDisk, store: StoreVersion) -> StoreContent:
    """Read a version as the changelog that puts each of its rows."""
    rows = dict[bytes, bytes]()
    for name in _plain_files(state, store, "snapshot", "delta"):
        for key, value in _read_whole(state, name, lambda data: list(_rows_of(data))):
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value
    puts = (_add_size(_ENCODING + key) + _add_size(_ENCODING + value) for key, value in rows.items())
    return StoreContent("", b"".join(puts))


def _plain_files(state: StateOnDisk, store: StoreVersion, whole: str, change: str) -> list[str]:
    """Return the names of the newest snapshot up to a version, and of the changes after it, in order."""
    names = state.names(store.folder)
    found = [int(name.partition(".")[0]) for name in names if re.fullmatch(rf"\d+\.{whole}", name)]
    base = max((one for one in found if one <= store.version), default=0)
    wanted = [f"{base}.{whole}"] if base else []
    wanted += [f"{version}.{change}" for version in range(base + 1, store.version + 1)]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise CorruptObjectError(
            f"version {store.version} of state {store.folder} cannot be read: {missing[0]} is missing",
            what_to_do="restore the checkpoint from a backup",
        )
    return [f"{store.folder}/{name}" for name in wanted]


def write_rocksdb(state: StateOnDisk, content: StoreContent, store: Store, key: str) -> str:
    """Write the files of version 2 in format 2 below a key; return its unique id."""
    ids = [str(uuid.uuid4()), str(uuid.uuid4())]
    first, last = (f"{key}/{number}_{one}" for number, one in enumerate(ids, 1))
    since = content.changes
    if content.snapshot:
        folder = content.snapshot.rpartition("/")[0]
        for name in tables_of(state, content.snapshot):
            store.put(f"{key}/{name}", state.read(f"{folder}/{name}"))
        store.put(f"{first if since else last}.zip", state.read(content.snapshot))
        if not since:
            return ids[1]
    else:
        store.put(f"{first}.changelog", _make_changelog(since, content.has_kinds, []))
        since = b""
    lineage = [{"version": 1, "checkpointUniqueId": ids[0]}]
    store.put(f"{last}.changelog", _make_changelog(since, content.has_kinds, lineage))
    return ids[1]


def _make_changelog(records: bytes, has_kinds: bool, lineage: list[dict[str, object]]) -> bytes:
    texts = ["v4" if has_kinds else "v3", json.dumps(lineage)]
    begin = (struct.pack(">H", len(text)) + text.encode("ascii") for text in texts)
    return compress(b"".join([*begin, records, _END[has_kinds]]))


def _add_size(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _read_whole(state: StateOnDisk, name: str, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(b"".join(read_blocks(state.read(name))))
    except UNREADABLE as error:
        raise CorruptObjectError(
            f"the state file {name} cannot be read",
            why=str(error),
            what_to_do="restore the checkpoint from a backup",
        ) from error


def _records_of(data: bytes) -> tuple[bytes, bool]:
    """Return the records of a changelog, and whether they begin with their kind."""
    # The first form has no version, and begins with the length of a key.
    named = re.match(rb"\0\x02v(\d)", data)
    version = int(named.group(1)) if named else 1
    begin = 4 if named else 0
    if version > 2:
        begin += 2 + int.from_bytes(data[begin : begin + 2])
    end = _END[version in (2, 4)]
    if version > 4 or not data[begin:].endswith(end):
        raise ValueError("it is no changelog of a known version")
    return data[begin : len(data) - len(end)], version in (2, 4)


def _rows_of(data: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield key and value of each row; None as the value of one that was removed."""
    at = 0

    def read(size: int) -> bytes:
        nonlocal at
        at += size
        if at > len(data):
            raise ValueError("it ends within a row")
        return data[at - size : at]

    while (size := _LENGTH.unpack(read(4))[0]) >= 0:
        key, (length,) = read(size), _LENGTH.unpack(read(4))
        # Rows of some versions of Spark have further bytes, which it leaves out as well.
        yield key, None if length < 0 else read(length)[: length // 8 * 8]
