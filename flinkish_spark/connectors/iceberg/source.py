"""The Iceberg source: a table as it is, and the rows that later snapshots append."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from flinkish_spark.connectors.files.input_formats import ParquetFiles
from flinkish_spark.connectors.files.source import Discovery, FileList, FileSource, FoundFile
from flinkish_spark.connectors.iceberg.settings import BRANCH, TABLE, TableName, check_properties
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.connectors.splits import SourceUnavailable
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.core.errors import ConfigError, EnvironmentFault, InputLostError
from flinkish_spark.core.fields import Range, check_arguments
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.limits import UNLIMITED, Limit

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.manifest import ManifestEntry
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

#: Entries of a listed file: its snapshot, files with positions of deleted rows, ids of fields it must have.
_SNAPSHOT, _DELETES, _NEEDED = "flinkish:snapshot", "flinkish:deletes", "flinkish:needed"
#: Path of an entry that stands for a snapshot without new rows.
_NO_FILE = ""


@dataclass(frozen=True)
class _Stat:
    st_size: int
    #: Iceberg's files never change, and a snapshot has their sizes.
    st_mtime_ns: int = 0


class _Place:
    """A file of a table, or the table, with the methods of `Path` that a file source calls."""

    def __init__(self, store: Mapping[str, str], location: str) -> None:
        self._store, self._location = store, location

    def is_dir(self) -> bool:
        return True

    def stat(self) -> _Stat:
        from pyiceberg.io.pyarrow import PyArrowFileIO

        return _Stat(len(PyArrowFileIO(dict(self._store)).new_input(self._location)))


class IcebergSource(FileSource):
    """Reads an Iceberg table, and goes on with the rows that are appended to it.

    The source lists the files of each snapshot durably before it reads them, so a position is a number of
    files, as of a :class:`~flinkish_spark.sources.FileSource`. Snapshots that only rewrite files, such as
    compactions, are passed over. One that updates, overwrites or deletes rows fails the job.

    Parameters
    ----------
    table, properties, branch
        As for an :class:`~flinkish_spark.IcebergSink`.
    starting_snapshot
        Id of the first snapshot whose rows are read; None for the table as it is at the first start, and then
        what is appended to it.
    discovery
        ``Discovery.ONCE``: the table as it is at the first start; the job ends after it.
    skip_overwrites
        Pass over snapshots that update, overwrite or delete rows. The rows that they add are not read.
    max_files_per_trigger, max_bytes_per_trigger
        Most files of each split in one micro-batch, and about most bytes.
    splits, discover_every_ms, rate
        As for a :class:`~flinkish_spark.sources.FileSource`.

    Raises
    ------
    ConfigError
        There is no such table or snapshot, a field of a type that Spark has not, or an argument that cannot
        be used.
    """

    kind = "iceberg"

    @check_arguments()
    def __init__(
        self,
        table: TABLE,
        properties: Mapping[str, str] | None = None,
        *,
        branch: BRANCH = "main",
        starting_snapshot: int | None = None,
        discovery: Discovery = Discovery.CONTINUOUS,
        skip_overwrites: bool = False,
        max_files_per_trigger: Annotated[int, Range(1)] = 1_000,
        max_bytes_per_trigger: Annotated[Limit, Range(1)] = UNLIMITED,
        splits: int = 1,
        discover_every_ms: Milliseconds = 1_000,
        rate: RateLimit | None = None,
    ) -> None:
        from flinkish_spark.connectors.iceberg.data_files import store_of
        from flinkish_spark.connectors.iceberg.schemas import spark_schema

        if starting_snapshot is not None and discovery is Discovery.ONCE:
            raise ConfigError(
                f"starting_snapshot is given, and only the table {table} as it is now is to be read",
                what_to_do="leave starting_snapshot out, or read with Discovery.CONTINUOUS",
            )
        check_properties(table, properties or {})
        self._name, self._properties = TableName.parse(table), dict(properties or {})
        self._branch, self._starting, self._skips = branch, starting_snapshot, skip_overwrites
        self._tables: Any = None
        found = self._load()
        #: What a task reads by; a copy of the store's properties, maybe with secrets.
        self._fields, self._store = found.schema().fields, dict(store_of(found).properties)
        self._uuid = str(found.metadata.table_uuid)
        super().__init__(
            table,
            ParquetFiles(),
            spark_schema(found.schema(), table),
            discovery=discovery,
            splits=splits,
            discover_every_ms=discover_every_ms,
            max_files_per_batch=max_files_per_trigger,
            max_bytes_per_batch=max_bytes_per_trigger,
            rate=rate,
        )
        if branch != "main" and branch not in found.metadata.refs:
            self._refuse(f"it has no branch '{branch}'", "create it, or correct it")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_tables": None}

    def _check_path(self, path: Any) -> str:
        # A snapshot has the whole locations of its files.
        return ""

    def _place(self, name: str = "") -> Any:
        return _Place(self._store, name)

    def _load(self) -> Table:
        from flinkish_spark.connectors.iceberg.schemas import NEWEST_FORMAT
        from flinkish_spark.connectors.iceberg.tables import IcebergTables

        self._tables = self._tables or IcebergTables(self._name, self._properties)
        table: Table | None = self._tables.find(self._name)
        if table is None:
            raise ConfigError(
                f"there is no Iceberg table {self._name}", what_to_do="create it, or correct it"
            )
        if table.metadata.format_version > NEWEST_FORMAT:
            # Its fields have default values, and its deletion vectors are in other files.
            why = f"its format version is {table.metadata.format_version}, and versions 1 and 2 are read"
            self._refuse(why, "read it with Spark and env.from_dataframe")
        return table

    def _refuse(self, why: str, what_to_do: str) -> NoReturn:
        raise ConfigError(f"the Iceberg table {self._name} cannot be read", why=why, what_to_do=what_to_do)

    def _history(self, table: Table) -> list[Snapshot]:
        """Return the snapshots of the branch, the newest first."""
        from pyiceberg.table.snapshots import ancestors_of

        return list(ancestors_of(table.metadata.snapshot_by_name(self._branch), table.metadata))

    # Between micro-batches:
    def _look(self, known: FileList) -> tuple[Sequence[FoundFile], bool]:
        from flinkish_spark.connectors.iceberg.live_files import TableRefusal

        try:
            table = self._load()
            if str(table.metadata.table_uuid) != self._uuid:
                raise InputLostError(
                    f"the Iceberg table {self._name} is not the one that the job has read so far",
                    why="it was dropped and created again",
                    what_to_do="put the old table back, or start a new job with a new job_dir",
                )
            return self._find_new(table, known), self.is_bounded
        except TableRefusal as error:
            self._refuse(str(error), "write its files anew, and begin after that in a new job_dir")
        except EnvironmentFault as error:
            if error.ends_when_repeated or isinstance(error, InputLostError):
                raise
            raise SourceUnavailable(
                f"the Iceberg table {self._name} cannot be read", why=error.why
            ) from error

    def _find_new(self, table: Table, known: FileList) -> list[FoundFile]:
        history, found = self._history(table), list[FoundFile]()
        after = int(known[len(known) - 1].partition[_SNAPSHOT] or 0) if len(known) else None
        unread = self._list_after(history, after) if len(known) or self._starting is not None else history[:1]
        for one in unread:
            is_whole = after is None and self._starting is None
            found += self._files_of(table, one) if is_whole else self._files_in(table, one)
            after = one.snapshot_id
        if unread and (not found or found[-1].partition[_SNAPSHOT] != str(after)):
            # The next look goes on after it, also if it has expired by then.
            found.append(FoundFile(_NO_FILE, 0, 0, 0, {_SNAPSHOT: str(after)}))
        return found

    def _list_after(self, history: Sequence[Snapshot], after: int | None) -> list[Snapshot]:
        """Return the snapshots that came after one, oldest first; after none, the first and all later."""
        found: list[Snapshot] = []
        for one in history:
            if one.snapshot_id == after:
                return found[::-1]
            found.append(one)
            if after is None and one.snapshot_id == self._starting:
                return found[::-1]
        # The last one that was read may have expired itself.
        if after is not None and found and found[-1].parent_snapshot_id == after:
            return found[::-1]
        raise InputLostError(
            f"the branch '{self._branch}' of the Iceberg table {self._name} has lost snapshots that the job "
            "has not read",
            why=f"snapshot {self._starting if after is None else after} is not in its history: newer ones "
            "have expired, or the branch was set back",
            what_to_do="keep snapshots longer than a job may be down; begin at a newer one in a new job_dir",
        )

    def _files_of(self, table: Table, snapshot: Snapshot) -> list[FoundFile]:
        """Return all files of a snapshot, in the order in which they came into the table."""
        from flinkish_spark.connectors.iceberg.live_files import LiveFiles

        times = {one.snapshot_id: one.timestamp_ms for one in table.metadata.snapshots}
        live = LiveFiles.read(table, snapshot)
        entries = sorted(
            live.data(), key=lambda one: (one.sequence_number or 0, times.get(one.snapshot_id or 0, 0))
        )
        return [self._make_found(table, snapshot.snapshot_id, one, live.deletes_of(one)) for one in entries]

    def _files_in(self, table: Table, snapshot: Snapshot) -> list[FoundFile]:
        """Return the files that a snapshot appends."""
        from pyiceberg.manifest import ManifestContent, ManifestEntryStatus

        at = snapshot.snapshot_id
        operation = "overwrite" if snapshot.summary is None else snapshot.summary.operation.value
        if operation == "replace" or (operation != "append" and self._skips):
            return []
        if operation != "append":
            self._refuse(
                f"its snapshot {at} is of the kind {operation}: rows are updated, overwritten or deleted, "
                "and a source of rows that are added cannot say that others are gone",
                "pass over such snapshots with skip_overwrites=True, or begin after it in a new job_dir",
            )
        manifests = [one for one in snapshot.manifests(table.io) if one.added_snapshot_id == at]
        if any(one.content != ManifestContent.DATA for one in manifests):
            self._refuse(f"its snapshot {at} appends and deletes rows", "begin after it in a new job_dir")
        entries = (entry for one in manifests for entry in one.fetch_manifest_entry(table.io))
        added = (one for one in entries if (one.status, one.snapshot_id) == (ManifestEntryStatus.ADDED, at))
        return [self._make_found(table, at, one, ()) for one in added]

    def _make_found(self, table: Table, at: int, entry: ManifestEntry, deletes: Any) -> FoundFile:
        from flinkish_spark.connectors.iceberg.live_files import check_readable

        for one in deletes:
            check_readable(table, one)
        file = entry.data_file
        more = {_SNAPSHOT: str(at)}
        if needed := check_readable(table, file):
            more[_NEEDED] = " ".join(map(str, sorted(needed)))
        if paths := sorted(one.file_path for one in deletes):
            more[_DELETES] = json.dumps(paths)
        return FoundFile(file.file_path, file.file_size_in_bytes, 0, file.record_count, more)

    def _may_come_again(self, path: str) -> bool:
        return False

    # In a task:
    def _check_unchanged(self, file: FoundFile) -> str:
        return file.path if file.path == _NO_FILE else super()._check_unchanged(file)

    def _records(self, file: FoundFile, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.compute as pc
        from pyiceberg.io.pyarrow import PyArrowFileIO
        from pyiceberg.manifest import DataFile, FileFormat

        from flinkish_spark.connectors.iceberg.live_files import find_deleted, read_rows

        if path == _NO_FILE:
            return
        io = PyArrowFileIO(dict(self._store))
        paths = json.loads(file.partition.get(_DELETES) or "[]")
        deletes = [DataFile.from_args(file_path=one, file_format=FileFormat.PARQUET) for one in paths]
        try:
            deleted, place = find_deleted(io, file.path, deletes), 0
        except FileNotFoundError as error:
            raise InputLostError(
                f"a file with deleted rows of {path} is gone",
                why=str(error),
                what_to_do="restore the file; or start a new job with a new job_dir",
            ) from error
        needed = [*map(int, (file.partition.get(_NEEDED) or "").split())]
        for batch in read_rows(io, file.path, self._fields, needed=needed):
            kept = batch
            if len(deleted):
                mine = pa.array(range(place, place + batch.num_rows), pa.int64())
                kept = batch.filter(pc.invert(pc.is_in(mine, pa.array(deleted))))
            place += batch.num_rows
            yield kept

    # On the driver:
    def datasets(self) -> tuple[Dataset, ...]:
        """Return the table."""
        return (Dataset(f"iceberg://{self._name.catalog}", ".".join(self._name.path)),)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the settings that the list of files depends on, and the table's id."""
        return {
            **super().fingerprint(),
            "table": self._uuid,
            "branch": self._branch,
            "starting_snapshot": self._starting,
            "skip_overwrites": self._skips,
        }
