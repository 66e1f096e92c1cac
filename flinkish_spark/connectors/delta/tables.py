"""Delta tables by delta-rs: what they are, their marks and their history, and commits to them.

A commit names staged files, and carries Delta's own marker of who wrote what
(`SetTransaction(appId, version)`): a commit with a marker of the same id, made meanwhile, is a conflict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from flinkish_spark.connectors.delta.durable import make_durable
from flinkish_spark.connectors.delta.faults import DeltaConflict, DeltaRefused, NotAsFiles
from flinkish_spark.connectors.delta.files import TableFiles, why_no_path
from flinkish_spark.connectors.delta.table import TableInfo, Upsert, stored_fields
from flinkish_spark.connectors.delta.writer import DELETED, partition_texts
from flinkish_spark.core.clock import wall_ms
from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.store import make_directories

if TYPE_CHECKING:
    import deltalake

#: With it, a commit that somebody else was faster than fails and is tried anew, from a new look at the table.
_NO_RETRY = 0


@dataclass(frozen=True)
class Marker:
    """Whose checkpoint a commit holds, and what the table's history says of it."""

    app_id: str
    version: int
    note: str


class DeltaTables:
    """Tables of one store's options; used by one thread at a time."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = dict(options or {})

    def files(self, path: str) -> TableFiles:
        return TableFiles.of(path, self._options)

    def open(self, path: str, version: int | None = None) -> deltalake.DeltaTable | None:
        """Return the newest version of a table; None if there is no table."""
        import deltalake
        from deltalake.exceptions import TableNotFoundError

        if why := why_no_path(path):
            raise DeltaRefused(f"delta-rs cannot open it: {why}")
        files = self.files(path)
        with _translated(path):
            try:
                return deltalake.DeltaTable(
                    files.path, version=version, storage_options=files.store_options()
                )
            except TableNotFoundError:
                return None

    def info(self, path: str) -> TableInfo | None:
        table = self.open(path)
        return None if table is None else info_of(table)

    def committed_version(self, path: str, app_id: str) -> int:
        """Return the last checkpoint that `app_id` committed; -1 if none."""
        table = self.open(path)
        return -1 if table is None else seen_by(table, app_id)

    def history(self, path: str, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the table's commits, newest first; none if there is no table."""
        table = self.open(path)
        while table is not None:
            with suppress(DeltaConflict):
                return self.history_of(path, table, limit)
        return []

    def history_of(
        self, path: str, table: deltalake.DeltaTable, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the commits up to the version that is open; if it is not the newest, open that and raise."""
        version = table.version()
        with _translated(path):
            found = table.history(limit)
            # This order matters: delta-rs lists what is there, newer commits as well, and counts down from
            # the version that is open, so that each would have the number of another one.
            table.update_incremental()
        if table.version() != version:
            raise DeltaConflict(f"version {table.version()} was committed meanwhile")
        return [
            {
                "version": int(row["version"]),
                "operation": row.get("operation"),
                "userMetadata": row.get("userMetadata"),
            }
            for row in found
        ]

    def create(
        self,
        path: str,
        metadata: Mapping[str, Any],
        adds: Sequence[Mapping[str, Any]],
        marker: Marker,
    ) -> int:
        """Make the table with its first files; a table that is there by now is a conflict."""
        import deltalake
        from deltalake.transaction import create_table_with_add_actions

        files = self.files(path)
        if files.root is not None:
            make_directories(files.root)
        with _translated(path):
            create_table_with_add_actions(
                files.path,
                deltalake.Schema.from_json(metadata["schemaString"]),
                [_add(one) for one in adds],
                # With another mode, or with retries, its first version would go behind somebody else's.
                "error",
                list(metadata["partitionColumns"]),
                configuration=dict(metadata.get("configuration") or {}),
                storage_options=files.store_options(),
                commit_properties=_properties(marker, _NO_RETRY),
            )
        return 0

    def append(
        self, path: str, table: deltalake.DeltaTable, adds: Sequence[Mapping[str, Any]], marker: Marker
    ) -> int:
        """Name files beside those of others, which may come meanwhile."""
        return self._write(path, table, [_add(one) for one in adds], _properties(marker))

    def replace(
        self, path: str, table: deltalake.DeltaTable, adds: Sequence[Mapping[str, Any]], marker: Marker
    ) -> int:
        """Name files in the place of all that are in their partitions."""
        names = list(table.metadata().partition_columns)
        wanted = {
            tuple(one["partitionValues"][physical] for physical in _physical(table, names)) for one in adds
        }
        removes = _removes(table, names, lambda values: values in wanted)
        # What others add meanwhile may be in the same partitions.
        return self._write(
            path, table, [*removes, *(_add(one) for one in adds)], _properties(marker, _NO_RETRY)
        )

    def _write(self, path: str, table: deltalake.DeltaTable, actions: Sequence[Any], properties: Any) -> int:
        with _translated(path):
            table.create_write_transaction(
                list(actions),
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
        """Let rows, one of a key, replace those with their keys, or delete them, or come in."""
        info = info_of(table)
        control = {DELETED, *([mode.sequence_by] if mode.sequence_by else [])}
        names = [n for n in rows.column_names if n in stored_fields(mode, rows.column_names) and n != DELETED]
        same = " AND ".join(_same(rows.schema.field(key)) for key in mode.keys)
        newer = ""
        if mode.sequence_by in names and info.has_column(str(mode.sequence_by)):
            at = _quoted(str(mode.sequence_by))
            newer = f" AND (t.{at} IS NULL OR s.{at} >= t.{at})"
        values = {_quoted(name): f"s.{_quoted(name)}" for name in names}
        source = rows.select([*names, *sorted(control - set(names))])
        deleted = f"s.{_quoted(DELETED)}"
        with _translated(path):
            (
                table.merge(
                    source,
                    same,
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
        """Return when a commit outlives a power cut: that of an application's `version`, or with a note.

        Only on a disk there is something to do.
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
                what_to_do="see to the disk; the commit is looked at again when the job starts",
            ) from error

    def missing(self, path: str, sizes: Mapping[str, int]) -> list[str]:
        """Return files below a table that are not there with the size that is given."""
        return self.files(path).missing(sizes)

    def folders(self, path: str, folder: str) -> list[str]:
        return self.files(path).folders(folder)

    def delete(self, path: str, folder: str) -> None:
        self.files(path).delete(folder)

    def missing_at(self, path: str, version: int) -> list[str]:
        """Return files of an older version that the newest no longer has and that are gone."""
        newest, older = self.open(path), self.open(path, version)
        if newest is None or older is None:
            return []
        with _translated(path):
            now = {str(row["path"]) for row in _files_of(newest)}
            gone = {str(row["path"]): int(row["size_bytes"]) for row in _files_of(older)}
        return self.missing(path, {name: size for name, size in gone.items() if name not in now})

    def restore(self, path: str, table: deltalake.DeltaTable, version: int, note: str) -> None:
        """Commit what `version` held behind the version that is open, with `note` in its history."""
        with _translated(path):
            table.restore(version, commit_properties=_properties(None, _NO_RETRY, note))

    def delete_rows(self, path: str, table: deltalake.DeltaTable, note: str) -> None:
        """Commit a version without rows behind the version that is open."""
        names = list(table.metadata().partition_columns)
        self._write(path, table, _removes(table, names, lambda _: True), _properties(None, _NO_RETRY, note))


def info_of(table: deltalake.DeltaTable) -> TableInfo:
    return TableInfo.from_log({"metaData": metadata_of(table)}, features_of(table))


def metadata_of(table: deltalake.DeltaTable) -> dict[str, Any]:
    found = table.metadata()
    return {
        "schemaString": table.schema().to_json(),
        "partitionColumns": list(found.partition_columns),
        "configuration": dict(found.configuration),
    }


#: What a protocol from before features were named asks of writers, by version.
_BY_VERSION = {
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
    6: ("identityColumns",),
}


def features_of(table: deltalake.DeltaTable) -> frozenset[str]:
    """Return what a table asks of its writers, by the protocol's names."""
    protocol = table.protocol()
    if protocol.min_writer_version >= 7:
        return frozenset([*(protocol.reader_features or ()), *(protocol.writer_features or ())])
    known = (names for version, names in _BY_VERSION.items() if version <= protocol.min_writer_version)
    return frozenset(name for names in known for name in names)


def seen_by(table: deltalake.DeltaTable, app_id: str) -> int:
    found = table.transaction_version(app_id)
    return -1 if found is None else int(found)


def _add(action: Mapping[str, Any]) -> Any:
    from deltalake.transaction import AddAction

    return AddAction(
        # Spark's Delta escapes it in what it has staged, and delta-rs when it is written.
        path=unquote(str(action["path"])),
        size=int(action["size"]),
        partition_values=dict(action["partitionValues"]),
        modification_time=int(action["modificationTime"]),
        data_change=bool(action["dataChange"]),
        stats=str(action.get("stats") or "{}"),
    )


#: Names that are the same in a log, whoever escapes them.
_SAME_WHEN_ESCAPED = re.compile(r"[A-Za-z0-9._=/-]+")


def _files_of(table: deltalake.DeltaTable) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist()
    return found


def _removes(table: deltalake.DeltaTable, names: Sequence[str], is_wanted: Any) -> list[Any]:
    from deltalake.transaction import RemoveAction

    found = pa.table(table.get_add_actions())
    texts: list[list[str | None]] = [[] for _ in names]
    if names:
        partition = found.column("partition").combine_chunks()
        texts = [partition_texts(partition.field(name)).to_pylist() for name in names]
    physical, now = _physical(table, names), wall_ms()
    removes = []
    for at, (path, size) in enumerate(
        zip(found.column("path").to_pylist(), found.column("size_bytes").to_pylist(), strict=True)
    ):
        values = tuple(column[at] for column in texts)
        if is_wanted(values):
            if not _SAME_WHEN_ESCAPED.fullmatch(path):
                # delta-rs escapes it once more: the file would stay, without a word.
                raise NotAsFiles(
                    f"the file {path} is to be replaced, whose name delta-rs writes in another way"
                )
            removes.append(RemoveAction(path, True, now, size, dict(zip(physical, values, strict=True))))
    return removes


def _physical(table: deltalake.DeltaTable, names: Sequence[str]) -> list[str]:
    info = info_of(table)
    return [info.physical_name(name) for name in names]


def _properties(
    marker: Marker | None, retries: int | None = None, note: str = ""
) -> deltalake.CommitProperties:
    import deltalake

    marks = [] if marker is None else [deltalake.Transaction(marker.app_id, marker.version, wall_ms())]
    text = note if marker is None else marker.note
    return deltalake.CommitProperties({"userMetadata": text}, retries, marks or None)


def _quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def _same(key: pa.Field) -> str:
    name = _quoted(key.name)
    # To SQL the two zeros of floating point numbers are one; NaN is equal to itself.
    more = " + 0.0" if pa.types.is_floating(key.type) else ""
    return f"t.{name}{more} = s.{name}{more}"


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Raise what delta-rs says as an error of ours."""
    from deltalake.exceptions import CommitFailedError, DeltaError, DeltaProtocolError, SchemaMismatchError

    try:
        yield
    except CommitFailedError as error:
        if "Unsupported table features" in str(error) or "append-only" in str(error):
            raise DeltaRefused(str(error)) from error
        raise DeltaConflict(str(error)[:500]) from error
    except (DeltaProtocolError, SchemaMismatchError) as error:
        raise DeltaRefused(str(error)[:2000]) from error
    except (DeltaError, OSError) as error:
        # Perhaps our own write, whose answer was lost.
        if "already exists" in str(error):
            raise DeltaConflict("somebody made the table at the same moment") from error
        raise _failed(path, error) from error
    except Exception:
        raise
    except BaseException as error:
        # A panic of Rust's is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise _failed(path, error) from error


def _failed(path: str, error: BaseException) -> StoreError:
    return StoreError(
        f"the Delta table {path} could not be read or written",
        why=f"delta-rs says: {str(error)[:1000]}",
        what_to_do="see to the store; what is decided is committed when it answers again",
    )
