"""The files that one version of Spark's state consists of (RocksDB with changelogs, format 2).

Below ``state/<operator>/<partition>/`` Spark keeps, for a version V with unique id U:

- ``V_U.changelog``: the changes since V-1. It begins with its lineage: version and id of every
  changelog back to the snapshot that was the newest when it was written.
- ``V_U.zip``: a snapshot, written by Spark's maintenance for some versions only. Its `metadata`
  names the table files, which lie in ``SSTs/`` and are shared between snapshots.
- checksum files beside each, ``.<name>.crc`` (Hadoop's) and ``<name>.crc`` (Spark's).

Beside the partitions, ``_metadata/metadata`` describes the operator. For `transformWithState`
and joins of two streams ``_metadata/v2/<batch>`` does, and names files in ``_stateSchema/``.

Spark loads V from the newest snapshot in its lineage and the later changelogs, so these files must not
be lost. commits/N names the ids of version N+1.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flinkish_spark.checkpoint.lz4_blocks import UNREADABLE, read_blocks
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.store import FileStore, ObjectMissing, Store
from flinkish_spark.protocol.bases import BASE_NAME, BASES

_METADATA, _BY_BATCH, _SCHEMAS = "_metadata", "v2", "_stateSchema"
#: Folders of an operator's files; names in all but the first begin with a micro-batch.
_OF_OPERATOR = (_METADATA, f"{_METADATA}/{_BY_BATCH}", f"{_SCHEMAS}/default")
#: How much of a changelog is read to find its lineage; enough as a rule.
_START_BYTES = 128 * 1024
#: Exceptions of reading a file of an unknown form.
_UNREADABLE = (*UNREADABLE, KeyError, TypeError, OSError)


class StateFileNotFoundError(Exception):
    """A listed file does not exist any more, since Spark's maintenance replaced it."""


class StateOnDisk:
    """Spark's state folder on a disk; each call reads its present content, names are relative to it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self, folder: str) -> Collection[str]:
        """Return the names of files directly below a folder, hidden ones too; empty if it is missing."""
        try:
            with os.scandir(self._path / folder) as entries:
                return {entry.name for entry in entries if entry.is_file()}
        except FileNotFoundError:
            return ()

    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        """Return a file, or its first bytes; raise StateFileNotFoundError if there is none."""
        try:
            with open(self._path / name, "rb") as file:
                return file.read() if most_bytes is None else file.read(most_bytes)
        except FileNotFoundError as error:
            raise StateFileNotFoundError(str(error.filename)) from error


class StateInBucket:
    """Spark's state folder in a bucket, as one listing shows it."""

    def __init__(self, store: FileStore, key: str, sizes: Mapping[str, int]) -> None:
        self._store, self._key, self.sizes = store, key, sizes
        self._by_folder: dict[str, set[str]] = {}
        for name in self.sizes:
            folder, _, plain = name.rpartition("/")
            self._by_folder.setdefault(folder, set()).add(plain)

    def names(self, folder: str) -> Collection[str]:
        return self._by_folder.get(folder, ())

    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        key = f"{self._key}/{name}"
        try:
            return self._store.read(key) if most_bytes is None else self._store.read_start(key, most_bytes)
        except ObjectMissing:
            raise StateFileNotFoundError(key) from None


StateFolder = StateOnDisk | StateInBucket


@dataclass(frozen=True, slots=True)
class StoreVersion:
    #: Where the store is, below the state folder: ``<operator>/<partition>``.
    folder: str
    #: State version; micro-batch N writes version N+1.
    version: int
    #: Distinguishes it from the same version of another attempt or lineage.
    unique_id: str

    @property
    def stem(self) -> str:
        return f"{self.version}_{self.unique_id}"


def store_versions(commits_text: str, batch: int) -> tuple[StoreVersion, ...]:
    """Return the store versions that an entry of Spark's commit log names; none for a job without state."""
    try:
        _, _, body = commits_text.strip().partition("\n")
        operators: dict[str, list[list[str]]] = (json.loads(body) if body else {}).get("stateUniqueIds") or {}
        found = []
        for operator, partitions in sorted(operators.items()):
            for partition, ids in enumerate(partitions):
                # Every operator has one store, `default`; a join, too, in the format that jobs set.
                (unique_id,) = ids
                found.append(StoreVersion(f"{int(operator)}/{partition}", batch + 1, unique_id))
        return tuple(found)
    except (ValueError, AttributeError, TypeError) as error:
        raise CorruptObjectError(
            f"Spark's commit log entry of micro-batch {batch} has an unknown form",
            why=str(error),
            what_to_do="run the Spark version that wrote this job directory",
        ) from error


def version_named(name: str) -> StoreVersion | None:
    """Parse the name of a snapshot or changelog below the state folder; None for other files."""
    folder, _, plain = name.rpartition("/")
    stem, ending = os.path.splitext(plain)
    version, _, unique_id = stem.partition("_")
    if ending not in (".zip", ".changelog") or not version.isdecimal():
        return None
    return StoreVersion(folder, int(version), unique_id)


def files_of(
    state: StateFolder, store: StoreVersion, before: Sequence[StoreVersion] | None = None
) -> tuple[str, ...]:
    """Return the files that Spark reads to load a version, without checksum files."""
    folder = store.folder
    names = state.names(folder)
    if not names:
        raise StateFileNotFoundError(folder)
    chain = _chain(state, store, names, before)
    snapshots = [one for one in chain if f"{one.stem}.zip" in names]
    if not snapshots and chain[0].version != 1:
        raise _to_corrupt_error(store, f"there is no snapshot below version {chain[0].version}")
    base = snapshots[-1].version if snapshots else 0
    found = [f"{one.stem}.changelog" for one in chain if one.version > base]
    missing = [name for name in found if name not in names]
    if missing:
        raise _to_corrupt_error(store, f"{missing[0]} is missing")
    if snapshots:
        snapshot = f"{snapshots[-1].stem}.zip"
        found += [snapshot, *tables_of(state, f"{folder}/{snapshot}")]
    metadata = sorted(state.names(f"{folder}/{_METADATA}"))
    found += [f"{_METADATA}/{name}" for name in metadata if _is_plain(name)]
    return tuple(f"{folder}/{name}" for name in found)


def bases_up_to(state: Path, batch: int) -> tuple[str, ...]:
    """Return the base files that the state after a micro-batch may name; it may name fewer."""
    return tuple(
        path.relative_to(state).as_posix()
        for path in sorted((state / BASES).glob("*/*"))
        if BASE_NAME.fullmatch(path.name) and int(path.name.split("-")[1]) <= batch
    )


def operator_files(state: StateFolder, stores: Sequence[StoreVersion]) -> tuple[str, ...]:
    versions = {store.folder.partition("/")[0]: store.version for store in stores}
    found = []
    for operator, version in sorted(versions.items()):
        for folder in _OF_OPERATOR:
            names = filter(_is_plain, sorted(state.names(f"{operator}/{folder}")))
            # Micro-batch N writes version N+1.
            is_known = folder == _METADATA
            own = [name for name in names if is_known or int(name.partition("_")[0]) < version]
            found += [f"{operator}/{folder}/{name}" for name in own]
    return tuple(found)


def correct_schema_paths(store: Store, state: str, state_url: str) -> None:
    """Let the metadata of Spark's own operators name the schema files below the same state folder.

    Spark writes absolute paths, and each owner gives the folder another name.
    """
    for operator in store.list(state):
        for key in store.list(f"{operator}/{_METADATA}/{_BY_BATCH}"):
            version, _, body = store.read(key).decode("utf-8").partition("\n")
            metadata = json.loads(body)
            for one in metadata["stateStoreInfo"]:
                names = [path.rpartition(f"/{_SCHEMAS}/")[2] for path in one["stateSchemaFilePaths"]]
                own = f"{state_url}/{operator.rpartition('/')[2]}/{_SCHEMAS}"
                one["stateSchemaFilePaths"] = [f"{own}/{name}" for name in names]
            if metadata != json.loads(body):
                folder, _, name = key.rpartition("/")
                # With the checksum of other content Spark would refuse the file.
                store.delete(f"{folder}/.{name}.crc")
                store.put(key, f"{version}\n{json.dumps(metadata)}".encode())


def is_of_operator(name: str) -> bool:
    folders = name.split("/")[:-1]
    return _SCHEMAS in folders or (_METADATA in folders and _BY_BATCH in folders)


def is_versioned(name: str) -> bool:
    """Return whether a file belongs to certain versions, unlike an operator's only metadata."""
    return _METADATA not in name.split("/")[:-1] or is_of_operator(name)


def checksum_names(name: str) -> tuple[str, ...]:
    return (f".{name}.crc", f"{name}.crc", f".{name}.crc.crc")


def lineage_of(state: StateFolder, changelog: str) -> tuple[tuple[int, str], ...]:
    """Return version and id of the changelogs before this one, back to a snapshot."""
    data = state.read(changelog, _START_BYTES)
    try:
        try:
            return _lineage(data)
        except _UNREADABLE:
            if len(data) < _START_BYTES:
                raise
            # A long lineage: it does not end within these bytes.
            return _lineage(state.read(changelog))
    except _UNREADABLE as error:
        raise CorruptObjectError(
            f"the state changelog {changelog} cannot be read",
            why=str(error),
            what_to_do="run the Spark version that wrote it, with lz4 as codec of the state store",
        ) from error


def _lineage(data: bytes) -> tuple[tuple[int, str], ...]:
    texts = _read_texts(data)
    written_as = next(texts)
    if not written_as.startswith("v"):
        raise ValueError(f"it begins with {written_as!r} instead of a version")
    items: list[dict[str, Any]] = json.loads(next(texts))
    return tuple((int(item["version"]), str(item["checkpointUniqueId"])) for item in items)


def _chain(
    state: StateFolder, store: StoreVersion, names: Collection[str], before: Sequence[StoreVersion] | None
) -> list[StoreVersion]:
    """Return the versions from a snapshot, or from the first one, up to the wanted one, in order."""
    if f"{store.stem}.zip" in names:
        return [store]
    if f"{store.stem}.changelog" not in names:
        raise _to_corrupt_error(store, f"{store.stem}.changelog is missing")
    if before is None:
        lineage = lineage_of(state, f"{store.folder}/{store.stem}.changelog")
        before = [StoreVersion(store.folder, version, unique_id) for version, unique_id in lineage]
    return sorted([*before, store], key=lambda one: one.version)


def tables_of(state: StateFolder, snapshot: str) -> list[str]:
    """Return the shared files that a snapshot names, relative to its folder."""
    data = state.read(snapshot)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _, _, body = archive.read("metadata").decode("utf-8").partition("\n")
        named = json.loads(body)
        tables = [f"SSTs/{item['dfsSstFileName']}" for item in named.get("sstFiles") or ()]
        return tables + [f"logs/{item['dfsLogFileName']}" for item in named.get("logFiles") or ()]
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError) as error:
        raise CorruptObjectError(
            f"the state snapshot {snapshot} cannot be read",
            why=str(error),
            what_to_do="go back to another checkpoint; this one's state is damaged",
        ) from error


def _is_plain(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(".crc")


def _to_corrupt_error(store: StoreVersion, why: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"version {store.version} of state {store.folder} cannot be loaded any more",
        why=why,
        what_to_do="go back to a retained checkpoint; `flinkish checkpoints list` shows them",
        folder=store.folder,
        version=store.version,
    )


def _read_texts(data: bytes) -> Iterator[str]:
    """Yield texts from an lz4-java stream, decompressing no more than needed."""
    blocks, plain = read_blocks(data), b""
    while True:
        # A text follows its length in two bytes.
        while len(plain) < 2 or len(plain) < 2 + int.from_bytes(plain[:2]):
            block = next(blocks, b"")
            if not block:
                raise ValueError("it ends too early")
            plain += block
        length = int.from_bytes(plain[:2])
        yield plain[2 : 2 + length].decode("ascii")
        plain = plain[2 + length :]
