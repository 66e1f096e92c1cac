"""Delta tables by delta-rs: their schema, their history, commits to them, and marks of checkpoints.

A commit adds staged files, and carries Delta's own transaction marker (`SetTransaction(appId, version)`): if
somebody commits a marker of the same id meanwhile, the commit is a conflict.
"""

from __future__ import annotations

import base64
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from flinkish_spark.connectors.delta.files import TableFiles, why_no_path
from flinkish_spark.connectors.delta.table import (
    DeltaConflict,
    DeltaTableError,
    NotAsFiles,
    TableCommit,
    TableInfo,
    mark_in,
)
from flinkish_spark.connectors.delta.writer import partition_texts
from flinkish_spark.connectors.staged_rows import DELETED
from flinkish_spark.connectors.write_modes import Upsert, list_stored_names
from flinkish_spark.core.clock import wall_ms
from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.store import make_directories, sync_directory
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.timeline import Mark

if TYPE_CHECKING:
    import deltalake


#: How many recent commits are searched for a checkpoint, and the first page size of a long history.
_RECENT, _FIRST_PAGE = 20, 100
#: A commit that loses a race then fails, and is tried again on the newest version of the table.
_NO_RETRY = 0


@dataclass(frozen=True)
class Marker:
    """Delta's transaction marker of a checkpoint, and the commit's note in the table's history."""

    app_id: str
    version: int
    note: str


class DeltaTables:
    """Tables that share store options; used by one thread at a time."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = dict(options or {})

    def files(self, path: str) -> TableFiles:
        return TableFiles.of(path, self._options)

    def open(self, path: str, version: int | None = None) -> deltalake.DeltaTable | None:
        import deltalake
        from deltalake.exceptions import TableNotFoundError

        if why := why_no_path(path):
            raise DeltaTableError(f"delta-rs cannot open it: {why}")
        files = self.files(path)
        with _translate_errors(path):
            try:
                return deltalake.DeltaTable(
                    files.path, version=version, storage_options=files.store_options()
                )
            except TableNotFoundError:
                return None

    def info(self, path: str) -> TableInfo | None:
        table = self.open(path)
        return None if table is None else info_of(table)

    def find_committed_version(self, path: str, app_id: str) -> int:
        """Return the last checkpoint that `app_id` has committed; -1 if none."""
        table = self.open(path)
        return -1 if table is None else find_last_version(table, app_id)

    def newest_mark(self, path: str, app_id: str) -> Mark | None:
        version = self.find_committed_version(path, app_id)
        return None if version < 0 else self.mark_at(path, app_id, version)

    def mark_at(self, path: str, app_id: str, version: int) -> Mark:
        found = self.commit_of(path, app_id, version)
        return (None if found is None else mark_in(found.note, app_id)) or Mark(CheckpointId(version))

    def version_of(self, path: str, app_id: str, version: int) -> int | None:
        found = self.commit_of(path, app_id, version)
        return None if found is None else found.version

    def commit_of(self, path: str, app_id: str, version: int) -> TableCommit | None:
        # Mostly it is the newest.
        for limit in (1, _RECENT):
            for commit in self.history(path, limit):
                mark = mark_in(commit.note, app_id)
                if mark is not None and int(mark.checkpoint) == version:
                    return commit
        return None

    def history(self, path: str, limit: int | None = None) -> list[TableCommit]:
        table = self.open(path)
        while table is not None:
            with suppress(DeltaConflict):
                return self.history_of(path, table, limit)
        return []

    def commits(self, path: str, table: deltalake.DeltaTable) -> Iterator[TableCommit]:
        """Yield commits, newest first; if `table` is older, open the newest one and raise DeltaConflict."""
        # In growing pages: a caller that stops early need not wait for all of a long history.
        read, page = 0, _FIRST_PAGE
        while True:
            found = self.history_of(path, table, page)
            yield from found[read:]
            if len(found) < page:
                return
            read, page = page, page * 10

    def history_of(
        self, path: str, table: deltalake.DeltaTable, limit: int | None = None
    ) -> list[TableCommit]:
        """Return the commits up to the version that is open; if it is not the newest, open that and raise."""
        version = table.version()
        with _translate_errors(path):
            found = table.history(limit)
            # This order matters: delta-rs lists all commits, newer ones as well, and counts down from the
            # version that is open, so that each would have the number of another one.
            table.update_incremental()
        if table.version() != version:
            raise DeltaConflict(f"version {table.version()} was committed meanwhile")
        return [
            TableCommit(int(row["version"]), str(row.get("operation")), str(row.get("userMetadata") or ""))
            for row in found
        ]

    def create(
        self, path: str, metadata: Mapping[str, Any], adds: Sequence[Mapping[str, Any]], marker: Marker
    ) -> None:
        """Create the table with its first files; a table that exists by now is a conflict."""
        import deltalake
        from deltalake.transaction import create_table_with_add_actions

        files = self.files(path)
        if files.root is not None:
            make_directories(files.root)
        with _translate_errors(path):
            create_table_with_add_actions(
                files.path,
                deltalake.Schema.from_json(metadata["schemaString"]),
                [_add(one) for one in adds],
                # With another mode, or with retries, the commit would follow somebody else's first version.
                "error",
                list(metadata["partitionColumns"]),
                configuration=dict(metadata.get("configuration") or {}),
                storage_options=files.store_options(),
                commit_properties=_properties(marker, _NO_RETRY),
            )

    def append(
        self, path: str, table: deltalake.DeltaTable, adds: Sequence[Mapping[str, Any]], marker: Marker
    ) -> int:
        """Add files; others may commit files meanwhile."""
        _refuse_repeat(table, marker)
        return self._write(path, table, [*map(_add, adds)], _properties(marker))

    def replace(
        self, path: str, table: deltalake.DeltaTable, adds: Sequence[Mapping[str, Any]], marker: Marker
    ) -> int:
        """Add files in place of all other files of their partitions."""
        _refuse_repeat(table, marker)
        wanted = {frozenset(one["partitionValues"].items()) for one in adds}
        removes = _removes(table, lambda values: frozenset(values.items()) in wanted)
        # Files that others add meanwhile may be in the same partitions.
        return self._write(path, table, [*removes, *map(_add, adds)], _properties(marker, _NO_RETRY))

    def _write(self, path: str, table: deltalake.DeltaTable, actions: list[Any], properties: Any) -> int:
        with _translate_errors(path):
            table.create_write_transaction(
                actions,
                "append",
                table.schema(),
                list(table.metadata().partition_columns),
                commit_properties=properties,
            )
            table.update_incremental()
        return int(table.version())

    def merge(
        self, path: str, table: deltalake.DeltaTable, rows: pa.Table, mode: Upsert, marker: Marker
    ) -> None:
        """Merge rows, one per key: update or delete the rows with their keys, or insert them."""
        _refuse_repeat(table, marker)
        info = info_of(table)
        control = {DELETED, *([mode.sequence_by] if mode.sequence_by else [])}
        names = [
            n for n in rows.column_names if n in list_stored_names(mode, rows.column_names) and n != DELETED
        ]
        same = []
        for key in map(rows.schema.field, mode.keys):
            # In SQL 0.0 and -0.0 are equal, and NaN is equal to itself.
            more = " + 0.0" if pa.types.is_floating(key.type) else ""
            same.append(f"t.{_quote(key.name)}{more} = s.{_quote(key.name)}{more}")
        newer = ""
        if mode.sequence_by in names and info.has_column(str(mode.sequence_by)):
            at = _quote(str(mode.sequence_by))
            newer = f" AND (t.{at} IS NULL OR s.{at} >= t.{at})"
        values = {_quote(name): f"s.{_quote(name)}" for name in names}
        source = rows.select([*names, *sorted(control - set(names))])
        deleted = f"s.{_quote(DELETED)}"
        with _translate_errors(path):
            (
                table.merge(
                    source,
                    " AND ".join(same),
                    source_alias="s",
                    target_alias="t",
                    commit_properties=_properties(marker, _NO_RETRY),
                )
                .when_matched_delete(f"{deleted}{newer}")
                .when_matched_update(values, f"NOT {deleted}{newer}")
                .when_not_matched_insert(values, f"NOT {deleted}")
                .execute()
            )

    def make_durable(self, path: str, whose: str, version: int | None = None) -> None:
        """Return when a commit survives a power cut: that of an application's `version`, or with a note.

        Does nothing for a table in a store.
        """
        root = self.files(path).root
        if root is None:
            return
        try:
            make_durable(root, whose, version)
        except OSError as error:
            raise StoreError(
                f"a commit to the Delta table {path} could not be made durable",
                why=str(error),
                what_to_do="check the disk; the job makes the commit durable when it starts again",
            ) from error

    def missing_at(self, path: str, version: int) -> list[str]:
        """Return missing files of an older version that the newest version no longer has."""
        newest, older = self.open(path), self.open(path, version)
        if newest is None or older is None:
            return []
        with _translate_errors(path):
            now, then = _files_of(newest), _files_of(older)
        return self.files(path).missing({name: size for name, size in then.items() if name not in now})

    def restore(self, path: str, table: deltalake.DeltaTable, version: int, note: str) -> None:
        """Commit the rows of `version` on top of the open version, with `note` in the table's history."""
        with _translate_errors(path):
            table.restore(version, commit_properties=_properties(None, _NO_RETRY, note))

    def delete_rows(self, path: str, table: deltalake.DeltaTable, note: str) -> None:
        """Commit a version without rows on top of the open version."""
        self._write(path, table, _removes(table, lambda _: True), _properties(None, _NO_RETRY, note))


LOG = "_delta_log"
_OF_VERSION = re.compile(r"(\d{20})\..+")
_ENTRY = re.compile(r"\d{20}\.json")


def make_durable(root: Path, whose: str, version: int | None = None) -> None:
    """Sync a commit (of an application's `version`, or with a note) and the files that lead readers to it.

    These are the files that it added, its entry in the log, newer entries, all entries since the log's last
    checkpoint, that checkpoint, and their folders.
    """
    log = root / LOG
    names = sorted((name for name in os.listdir(log) if _OF_VERSION.fullmatch(name)), reverse=True)
    checkpoint = max((int(name[:20]) for name in names if ".checkpoint" in name), default=0)
    needed, files, own = [], [], None
    for name in names:
        at = int(name[:20])
        if own is not None and at < min(own, checkpoint):
            break
        needed.append(log / name)
        if own is None and _ENTRY.fullmatch(name):
            found = _find_added_files(root, log / name, whose, version)
            own, files = (None, []) if found is None else (at, found)
    # This order matters: a log never names files that are not there.
    for path in files:
        _sync(path)
    folders = {above for path in files for above in path.parents if above.is_relative_to(root)}
    for folder in sorted(folders - {root}, reverse=True):
        _sync(folder)
    _sync(root)
    sidecars = log / "_sidecars"
    if sidecars.is_dir():
        needed += [*sidecars.iterdir(), sidecars]
    # Oldest first: no entry is durable without those before it.
    for path in reversed(needed):
        _sync(path)
    _sync(log / "_last_checkpoint")
    _sync(log)


def _sync(path: Path) -> None:
    # A file that was cleaned up meanwhile is not needed any more. Hadoop keeps checksums beside files.
    for one in (path, path.with_name(f".{path.name}.crc")):
        with suppress(FileNotFoundError):
            sync_directory(one)


def _find_added_files(root: Path, entry: Path, whose: str, version: int | None) -> list[Path] | None:
    """Return the files that a commit added; None if it is another commit."""
    text = ""
    with suppress(FileNotFoundError):
        text = entry.read_text(encoding="utf-8")
    if whose not in text:
        return None
    actions = [json.loads(line) for line in text.splitlines() if line.strip()]
    infos, marks = ([one[kind] for one in actions if kind in one] for kind in ("commitInfo", "txn"))
    noted = [(one.get("userMetadata"), None) for one in infos]
    if (whose, version) not in [*noted, *((one["appId"], one["version"]) for one in marks)]:
        return None
    return [path for action in actions for path in _files(root, action)]


def _files(root: Path, action: Mapping[str, Any]) -> Iterator[Path]:
    for kind in ("add", "cdc"):
        if kind not in action:
            continue
        yield from _on_disk(root, action[kind]["path"])
        vector = action[kind].get("deletionVector") or {}
        if vector.get("storageType") == "u":
            yield root / vector_name(vector["pathOrInlineDv"])
        elif vector.get("storageType") == "p":
            yield from _on_disk(root, vector["pathOrInlineDv"])


def _on_disk(root: Path, given: str) -> Iterator[Path]:
    """Yield the file that a log names; nothing if it is in another store, where files are durable."""
    given = re.sub("^file:/+", "/", given)
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", given):
        yield root / unquote(given)


_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_UUID_LETTERS = 20


def vector_name(given: str) -> str:
    """Return the file of a deletion vector, below the table, from its description in the log."""
    folder, letters = given[:-_UUID_LETTERS], given[-_UUID_LETTERS:]
    found = uuid.UUID(bytes=base64.b85decode(letters.translate(str.maketrans(_Z85, _B85))))
    return f"{folder}/deletion_vector_{found}.bin" if folder else f"deletion_vector_{found}.bin"


def info_of(table: deltalake.DeltaTable) -> TableInfo:
    return TableInfo.from_log({"metaData": metadata_of(table)}, features_of(table))


def metadata_of(table: deltalake.DeltaTable) -> dict[str, Any]:
    found = table.metadata()
    return {
        "schemaString": table.schema().to_json(),
        "partitionColumns": list(found.partition_columns),
        "configuration": dict(found.configuration),
    }


#: Features of writer versions from before protocols named features.
_BY_VERSION = {
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
    6: ("identityColumns",),
}


def features_of(table: deltalake.DeltaTable) -> frozenset[str]:
    """Return the features that writers of a table must support, by the protocol's names."""
    protocol = table.protocol()
    if protocol.min_writer_version >= 7:
        return frozenset([*(protocol.reader_features or ()), *(protocol.writer_features or ())])
    known = (names for version, names in _BY_VERSION.items() if version <= protocol.min_writer_version)
    return frozenset(name for names in known for name in names)


def find_last_version(table: deltalake.DeltaTable, app_id: str) -> int:
    found = table.transaction_version(app_id)
    return -1 if found is None else int(found)


def _refuse_repeat(table: deltalake.DeltaTable, marker: Marker) -> None:
    """Raise DeltaConflict if the open version holds the checkpoint: delta-rs would commit it once more."""
    # A commit moves the open table on, so a second call with it finds nothing that was committed meanwhile.
    if find_last_version(table, marker.app_id) >= marker.version:
        raise DeltaConflict(f"checkpoint {marker.version} is in version {table.version()}")


def _add(action: Mapping[str, Any]) -> Any:
    from deltalake.transaction import AddAction

    return AddAction(
        # Spark's Delta has escaped it in staged actions, and delta-rs escapes it again when it commits.
        path=unquote(str(action["path"])),
        size=int(action["size"]),
        partition_values=dict(action["partitionValues"]),
        modification_time=int(action["modificationTime"]),
        data_change=bool(action["dataChange"]),
        stats=str(action.get("stats") or "{}"),
    )


#: Names that no writer escapes in a log.
_SAME_WHEN_ESCAPED = re.compile(r"[A-Za-z0-9._=/-]+")


def _files_of(table: deltalake.DeltaTable) -> dict[str, int]:
    found = pa.table(table.get_add_actions())
    return dict(zip(found.column("path").to_pylist(), found.column("size_bytes").to_pylist(), strict=True))


def _removes(table: deltalake.DeltaTable, is_wanted: Callable[[dict[str, str | None]], bool]) -> list[Any]:
    """Return remove actions for the files whose partition values, by their names in the log, are wanted."""
    from deltalake.transaction import RemoveAction

    found, info, now = pa.table(table.get_add_actions()), info_of(table), wall_ms()
    partitions = [dict[str, str | None]()] * len(found)
    if info.partition_by:
        values = found.column("partition").combine_chunks()
        texts = [partition_texts(values.field(name)) for name in info.partition_by]
        partitions = pa.table(texts, [*map(info.physical_name, info.partition_by)]).to_pylist()
    removes = []
    columns = (found.column(name).to_pylist() for name in ("path", "size_bytes"))
    for path, size, partition in zip(*columns, partitions, strict=True):
        if not is_wanted(partition):
            continue
        if not _SAME_WHEN_ESCAPED.fullmatch(path):
            # delta-rs escapes it once more: the file would silently stay.
            raise NotAsFiles(f"the file {path} is to be removed, and delta-rs would escape its name twice")
        removes.append(RemoveAction(path, True, now, size, partition))
    return removes


def _properties(
    marker: Marker | None, retries: int | None = None, note: str = ""
) -> deltalake.CommitProperties:
    import deltalake

    marks = [] if marker is None else [deltalake.Transaction(marker.app_id, marker.version, wall_ms())]
    text = note if marker is None else marker.note
    return deltalake.CommitProperties({"userMetadata": text}, retries, marks or None)


def _quote(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


@contextmanager
def _translate_errors(path: str) -> Iterator[None]:
    from deltalake.exceptions import CommitFailedError, DeltaError, DeltaProtocolError, SchemaMismatchError

    try:
        yield
    except CommitFailedError as error:
        if "Unsupported table features" in str(error) or "append-only" in str(error):
            raise DeltaTableError(str(error)) from error
        raise DeltaConflict(str(error)[:500]) from error
    except (DeltaProtocolError, SchemaMismatchError) as error:
        raise DeltaTableError(str(error)[:2000]) from error
    except (DeltaError, OSError) as error:
        # It may be our own write, whose answer was lost.
        if "already exists" in str(error):
            raise DeltaConflict("somebody made the table at the same moment") from error
        raise _make_store_error(path, error) from error
    except Exception:
        raise
    except BaseException as error:
        # A panic in Rust is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise _make_store_error(path, error) from error


def _make_store_error(path: str, error: BaseException) -> StoreError:
    return StoreError(
        f"the Delta table {path} could not be read or written",
        why=f"delta-rs says: {str(error)[:1000]}",
        what_to_do="check the store; decided checkpoints are committed when it answers again",
    )
