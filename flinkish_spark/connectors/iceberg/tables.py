"""Tables of an Iceberg catalog by pyiceberg: how they are opened and created, marked and committed to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from pyiceberg.catalog import _ENV_CONFIG, Catalog, load_catalog
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchNamespaceError,
    NoSuchTableError,
    ServerError,
    ServiceUnavailableError,
    TableAlreadyExistsError,
    TooManyRequestsError,
    WaitingForLockException,
)
from pyiceberg.manifest import ManifestEntry, ManifestEntryStatus, ManifestFile
from pyiceberg.table import Table, TableProperties, Transaction
from pyiceberg.table.locations import SimpleLocationProvider
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.table.update.snapshot import _FastAppendFiles, _MergeAppendFiles
from pyiceberg.transforms import parse_transform
from pyspark.sql import types as T

from flinkish_spark.connectors.iceberg.data_files import StagedFolders, path_on_disk, store_of, sync_files
from flinkish_spark.connectors.iceberg.live_files import TableChange, TableRefusal
from flinkish_spark.connectors.iceberg.schemas import new_schema
from flinkish_spark.connectors.iceberg.settings import PartitionTransform, TableName, redact
from flinkish_spark.connectors.staged_ids import TransactionName
from flinkish_spark.core.errors import ConfigError, EnvironmentFault, FlinkishError, may_pass
from flinkish_spark.core.store_spec import resolve_options
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.timeline import Mark

#: What the next try may find mended, beside what an operating system or a database says.
_MAY_PASS = (
    CommitStateUnknownException,
    ServerError,
    ServiceUnavailableError,
    TooManyRequestsError,
    WaitingForLockException,
)


class CommitConflict(Exception):
    """Somebody else has committed meanwhile; nothing of this commit is in the table."""


def app_id(job: JobUuid, uid: str) -> str:
    """Return the name of a job's sink: of its mark in a table, and of its folder."""
    return f"flinkish-{job}-{TransactionName.mark_of(uid)}"


class IcebergTables:
    """Tables of one catalog; used by one thread."""

    def __init__(self, name: TableName, properties: Mapping[str, str]) -> None:
        self._name, self._given = name.catalog, properties
        #: What pyiceberg, the catalog and a table's store have beside the given properties, maybe secrets.
        self._others: list[Mapping[str, Any]] = []
        self._store: Mapping[str, Any] = {}

    @cached_property
    def _properties(self) -> dict[str, str]:
        return resolve_options(tuple(self._given.items()))

    @cached_property
    def _catalog(self) -> Catalog:
        try:
            self._others = [_ENV_CONFIG.get_catalog_config(self._name) or {}]
            catalog = load_catalog(self._name, **self._properties)
            self._others.append(catalog.properties)
            return catalog
        except (ValueError, ImportError) as error:
            why = self._redact(str(error))
            raise ConfigError(
                f"the Iceberg catalog '{self._name}' is not configured",
                why=why,
                what_to_do="give its properties to the sink, or configure it for pyiceberg: in "
                f".pyiceberg.yaml, or by variables such as PYICEBERG_CATALOG__{self._name.upper()}__URI",
            ) from None

    def _redact(self, text: str) -> str:
        return redact(text, self._given, self._properties, *self._others, self._store)

    def find(self, name: TableName) -> Table | None:
        with self.translate_errors(f"the table {name} cannot be loaded"):
            try:
                table = self._catalog.load_table(name.path)
            except NoSuchTableError:
                return None
            # A catalog may give keys of the store for a while.
            self._store = table.io.properties
            return table

    def create(
        self,
        name: TableName,
        stream: T.StructType,
        partition_by: Sequence[PartitionTransform],
        properties: Mapping[str, str],
    ) -> None:
        with self.translate_errors(f"the table {name} cannot be created"):
            try:
                creation = self._catalog.create_table_transaction(
                    name.path, schema=new_schema(stream), properties=dict(properties)
                )
                with creation, creation.update_spec() as spec:
                    for one in partition_by:
                        spec.add_field(one.column, parse_transform(one.transform), one.name)
            except TableAlreadyExistsError:
                return
            except NoSuchNamespaceError as error:
                raise ConfigError(
                    f"the table {name} cannot be created",
                    why=f"there is no namespace {'.'.join(name.path[:-1])} in the catalog",
                    what_to_do="create it, such as by pyiceberg's catalog.create_namespace(...)",
                ) from error
            except ValueError as error:
                raise ConfigError(
                    f"the table {name} cannot be created",
                    why=self._redact(str(error)).split("\n")[0],
                    what_to_do="correct partition_by and table_properties",
                ) from None

    def commit(self, table: Table, change: TableChange, name: str, text: str, branch: str) -> Table:
        """Commit a change by one snapshot with a named mark, on top of the branch as it is in `table`.

        Raises CommitConflict if the branch has moved on.
        """
        base = _disable_retries(table)
        transaction = base.transaction()
        made: list[Any] = []
        with self.translate_errors(f"the catalog '{self._name}' does not take a commit"):
            try:
                with _begin_snapshot(transaction, change, {name: text}, branch) as snapshot:
                    for file in change.added:
                        snapshot.append_data_file(file)
                # In the same commit, since snapshots expire.
                transaction.set_properties({name: text})
                # This order matters: pyiceberg would delete the manifests of a commit that is refused, and a
                # request that was sent twice on its way may be refused after it was taken.
                made, transaction._snapshot_producers = transaction._snapshot_producers, []
                return transaction.commit_transaction()
            except CommitFailedException as error:
                now = self._catalog.load_table(table.name())
                if made and all(now.snapshot_by_id(one._snapshot_id) is not None for one in made):
                    return now
                for one in made:
                    one._clean_all_uncommitted()
                raise CommitConflict(self._redact(str(error))) from None

    @contextmanager
    def translate_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (FlinkishError, CommitConflict, TableRefusal):
            raise
        except Exception as error:
            said = self._redact(f"{type(error).__name__}: {error}")
            fault = EnvironmentFault(
                what,
                why=said.split("\n")[0],
                what_to_do=f"check the catalog '{self._name}', the table's store, and the rights to both",
            )
            fault.ends_when_repeated = not _may_pass(error)
            # An error that shows a secret is not shown.
            raise fault from (error if str(error) in said else None)


def _begin_snapshot(
    transaction: Transaction, change: TableChange, mark: dict[str, str], branch: str
) -> _FastAppendFiles:
    if change.removed:
        return _ReplaceFiles(transaction, change, mark, branch)
    update = transaction.update_snapshot(mark, branch)
    merges = transaction.table_metadata.properties.get(TableProperties.MANIFEST_MERGE_ENABLED, "false")
    return update.merge_append() if merges.lower() == "true" else update.fast_append()


class _ReplaceFiles(_MergeAppendFiles):
    """Adds files and removes others. pyiceberg's own reads every manifest twice, and takes no NaN."""

    def __init__(
        self, transaction: Transaction, change: TableChange, mark: dict[str, str], branch: str
    ) -> None:
        io = transaction._table.io
        super().__init__(Operation.OVERWRITE, transaction, io, branch=branch, snapshot_properties=mark)
        self._change = change
        self._deleted_data_files = {one.data_file for one in change.live.data() if self._is_removed(one)}

    def _is_removed(self, entry: ManifestEntry) -> bool:
        return entry.data_file.file_path in self._change.removed

    def _manifests(self) -> list[ManifestFile]:
        made = []
        if self._added_data_files:
            with self.new_manifest_writer(self._transaction.table_metadata.spec()) as writer:
                for file in self._added_data_files:
                    writer.add(ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, data_file=file))
            made.append(writer.to_manifest_file())
        for manifest, entries in self._change.live.manifests:
            removed = [one for one in entries if self._is_removed(one)]
            if removed:
                with self.new_manifest_writer(self.spec(manifest.partition_spec_id)) as writer:
                    for one in entries:
                        if self._is_removed(one):
                            writer.delete(one)
                        else:
                            writer.existing(one)
                made.append(writer.to_manifest_file())
            elif entries:
                made.append(manifest)
        return self._process_manifests(made)


def _may_pass(error: Exception) -> bool:
    # SQLAlchemy is only there for catalogs in a database.
    is_database = any(one.__name__ == "OperationalError" for one in type(error).__mro__)
    return is_database or isinstance(error, _MAY_PASS) or (isinstance(error, OSError) and may_pass(error))


def _disable_retries(table: Table) -> Table:
    """Return a table whose commits pyiceberg does not try again.

    This order matters: a mark must be read in the same version that the commit is based on. pyiceberg's own
    retry loads a newer version and commits again, also if that version holds this checkpoint already.
    """
    properties = {**table.metadata.properties, TableProperties.COMMIT_NUM_RETRIES: "0"}
    metadata = table.metadata.model_copy(update={"properties": properties})
    return Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)


def find_marks(table: Table, app: str, job: JobUuid) -> list[tuple[Mark, Snapshot | None]]:
    """Return the marks of a sink, newest last, with the snapshots that have them; the property's has none."""
    texts: list[tuple[str | None, Snapshot | None]] = [(table.properties.get(app), None)]
    for one in table.metadata.snapshots:
        texts.append((None if one.summary is None else one.summary.additional_properties.get(app), one))
    marks = [(Mark.parse(text, job), snapshot) for text, snapshot in texts if text]
    found = [(mark, snapshot) for mark, snapshot in marks if mark is not None]
    return sorted(found, key=lambda one: (one[0].checkpoint, one[1] is not None))


def detach_catalog(table: Table) -> Table:
    """Return a table that another process can read: a catalog may hold connections."""
    return Table(table.name(), table.metadata, table.metadata_location, table.io, NoopCatalog("noop"))


def folders_of(table: Table, app: str) -> StagedFolders:
    data = SimpleLocationProvider(table.location(), table.properties).data_path
    # Without an underscore, so that Iceberg's own removal of orphan files finds what is forgotten here.
    return StagedFolders(f"{data}/flinkish/{app}", store_of(table))


def find_referenced(table: Table, is_ours: Callable[[str], bool]) -> set[str]:
    """Return the data files that any snapshot of a table names, of those that are ours."""
    manifests = {}
    for snapshot in table.metadata.snapshots:
        manifests.update({one.manifest_path: one for one in snapshot.manifests(table.io)})
    entries = (entry for one in manifests.values() for entry in one.fetch_manifest_entry(table.io))
    return {entry.data_file.file_path for entry in entries if is_ours(entry.data_file.file_path)}


def make_durable(table: Table, snapshot: Snapshot | None, known: set[str]) -> None:
    """Sync a commit, and the files that lead readers to it; does nothing for a table in a store.

    pyiceberg syncs no file, and a receipt promises that the commit survives a power cut.
    """
    files: list[Any] = [table.metadata_location]
    if snapshot is not None and path_on_disk(table.metadata_location) is not None:
        files += [snapshot.manifest_list, *(one.manifest_path for one in snapshot.manifests(table.io))]
    sync_files(files, known)
