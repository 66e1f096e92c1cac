"""The committer of an Iceberg sink: one snapshot per checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from flinkish_spark.connectors.iceberg.data_files import StagedFolders, find_missing, store_of
from flinkish_spark.connectors.iceberg.live_files import TableChange, TableRefusal
from flinkish_spark.connectors.iceberg.merging import Staged, mode_of, plan_change
from flinkish_spark.connectors.iceberg.schemas import why_not_written, why_stale
from flinkish_spark.connectors.iceberg.settings import IcebergSinkSettings, TableName
from flinkish_spark.connectors.iceberg.tables import (
    CommitConflict,
    IcebergTables,
    app_id,
    find_marks,
    find_referenced,
    folders_of,
    make_durable,
)
from flinkish_spark.connectors.staged_ids import StagedId
from flinkish_spark.connectors.write_modes import Upsert
from flinkish_spark.contracts.sink import Committer, ShownOrder, SinkContext
from flinkish_spark.core.errors import AnotherTimelineError, EnvironmentFault, StoreError
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome
from flinkish_spark.protocol.timeline import Mark


class IcebergCommitter(Committer):
    shown_order = ShownOrder.OF_COMMITS

    def __init__(self, sink: IcebergSinkSettings, context: SinkContext) -> None:
        self._sink, self._context = sink, context
        self._app = app_id(context.job, context.uid)
        self._tables = IcebergTables(sink.name, sink.properties)
        #: The newest checkpoint that this object itself has committed.
        self._own: CheckpointId | None = None
        self._durable: set[str] = set()

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        staged = [one.payload for one in committables]
        return [self._commit(staged, checkpoint)] * len(staged) if staged else ()

    def newest_marks(self) -> Sequence[Mark]:
        mark, _ = self._find_mark(self._tables.find(self._sink.name))
        return () if mark is None else (mark,)

    def _find_mark(self, table: Table | None) -> tuple[Mark | None, Snapshot | None]:
        """Return the newest mark in a table, and the snapshot that has it unless that has expired."""
        found = find_marks(table, self._app, self._context.job) if table is not None else []
        return found[-1] if found else (None, None)

    def _commit(self, staged: Staged, checkpoint: CheckpointId) -> CommitAnswer:
        name = TableName.parse(str(staged[0]["table"]))
        try:
            table = self._tables.find(name)
            done = table is not None and self._holds(table, checkpoint)
            if table is not None and not done and (why := _why_lost(table, staged)):
                # This order matters: the mark is read again after files were missed. A process that could
                # still commit them would have to find them all, and writes the same mark as a replay, so only
                # one of the two becomes visible.
                table = self._tables.find(name)
                done = table is not None and self._holds(table, checkpoint)
                if table is not None and not done:
                    self._note_decided(table, staged, checkpoint)
                    return CommitAnswer(Outcome.LOST, f"the table {name}: {why}", is_proven_aborted=True)
            if table is None:
                # Nobody knows whether it held the checkpoint: no proof, and no replay.
                return CommitAnswer(Outcome.LOST, f"the table {name} is gone, and its mark with it")
            if done:
                return self._finish(Outcome.ALREADY_COMMITTED, table, staged)
            try:
                return self._change(table, staged, checkpoint)
            except TableRefusal as why_refused:
                # The table may take the rows once somebody has repaired it.
                self._note_decided(table, staged, checkpoint)
                return CommitAnswer(Outcome.LOST, f"the table {name} no longer takes the rows: {why_refused}")
        except CommitConflict as conflict:
            return CommitAnswer(Outcome.RETRY, str(conflict))
        except EnvironmentFault as fault:
            if fault.ends_when_repeated or isinstance(fault, AnotherTimelineError):
                raise
            return CommitAnswer(Outcome.RETRY, str(fault))

    def _note_decided(self, table: Table, staged: Staged, checkpoint: CheckpointId) -> None:
        """Note that a request for the staged files may be on its way to the catalog, by an earlier try."""
        # Another table takes none of them.
        if staged[0]["table_uuid"] != str(table.metadata.table_uuid):
            return
        with self._tables.translate_errors(f"the data of the table {self._sink.table} cannot be written"):
            for name, folders in _find_folders(table, staged):
                folders.note_decided(name, checkpoint, str(staged[0]["branch"]))

    def _holds(self, table: Table, checkpoint: CheckpointId) -> bool:
        """Return whether a table holds the checkpoint; raise an error for a mark that is not ours."""
        mark, _ = self._find_mark(table)
        if mark is not None and mark.checkpoint != self._own:
            self._context.require_ours(mark, checkpoint)
        return mark is not None and mark.checkpoint >= checkpoint

    def _change(self, table: Table, staged: Staged, checkpoint: CheckpointId) -> CommitAnswer:
        mark = self._context.timeline.mark_of(checkpoint)
        text, branch = mark.to_text(self._context.job), str(staged[0]["branch"])
        if why := why_not_written(table.metadata, branch):
            raise TableRefusal(why)
        with self._tables.translate_errors(f"rows cannot be merged into the table {self._sink.table}"):
            change = plan_change(table, staged)
        # DECISION POINT of the table: the catalog takes one of two commits that are based on the same
        # version of the branch. The other one finds the mark when it tries again.
        table = self._tables.commit(table, change, self._app, text, branch)
        self._own = checkpoint
        added = [one.file_path for one in change.added]
        return self._finish(Outcome.COMMITTED, table, staged, added)

    def _finish(
        self, outcome: Outcome, table: Table, staged: Staged, added: Sequence[str] | None = None
    ) -> CommitAnswer:
        """Make a commit durable, and delete what it left behind; `added` are its files if it was ours."""
        _, snapshot = self._find_mark(table)
        # This order matters: a receipt is durable, and promises that the commit is. Sync also a commit that
        # another process made: it may have died before it could.
        try:
            make_durable(table, snapshot, self._durable)
        except OSError as error:
            raise StoreError(
                f"a commit to the Iceberg table {self._sink.table} could not be made durable",
                why=str(error),
                what_to_do="check the disk; the job makes the commit durable when it starts again",
            ) from error
        # Only now: while a folder is open, a sweep asks the table about each file in it.
        kept = [str(file["path"]) for one in staged for file in one["files"]]
        if is_merged(staged):
            # What tries wrote that others overtook is in the same folder.
            kept = list(self._find_referenced(table) if added is None else added)
        for name, folders in _find_folders(table, staged):
            folders.delete(name, [path for path in kept if f"/{name}/" in path])
            folders.close(name)
        facts = {} if snapshot is None else {"snapshot": snapshot.snapshot_id}
        facts |= {"rows": sum(int(one["rows"]) for one in staged)}
        return CommitAnswer(outcome, facts={**facts, "files": sum(len(one["files"]) for one in staged)})

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Forget the files: no snapshot names them, and a sweep deletes them later."""
        # Not deleted here, because a decision may be unknown to a fenced process.
        return tuple(CommitAnswer(Outcome.COMMITTED, "left to the next sweep") for _ in committables)

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Find committables whose files are gone, or that do not fit the table or the sink any more."""
        table = self._tables.find(self._sink.name)
        reasons = {at: self._why_dead(table, one.payload) for at, one in enumerate(committables)}
        return {at: f"sink '{self._context.uid}': {reason}" for at, reason in reasons.items() if reason}

    def _why_dead(self, table: Table | None, payload: Mapping[str, Any]) -> str:
        if (payload["table"], payload["branch"]) != (self._sink.table, self._sink.branch):
            return f"the rows were staged for the table {payload['table']}, branch {payload['branch']}"
        if mode_of(payload) != self._sink.mode:
            return "the rows were staged under another mode"
        return f"the table {self._sink.table} is gone" if table is None else _why_lost(table, [payload])

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        table = self._tables.find(self._sink.name)
        if table is None:
            return 0
        folders, names = folders_of(table, self._app), {str(one.payload.get("folder", "")) for one in kept}
        found = folders.list_open()
        # This order matters: a block that is leased after the listing has no folder in it.
        leased = running_blocks()
        left = []
        for name in found:
            staged = StagedId.parse(name)
            if staged is not None and name not in names:
                left += [name] if staged.is_leftover(self._context.owner_epoch, leased) else []
        # Data that was committed stays, whatever this process knows: a copy of the job directory may have
        # committed it. A crash between a commit and its receipt leaves such a folder open, too.
        # This order matters: the table is loaded after the listing, so a commit that came between is seen.
        table = self._tables.find(self._sink.name) if left else None
        if table is None:
            return 0
        try:
            table, left = self._outdate_requests(table, folders, left)
        except CommitConflict:
            # The next sweep tries again.
            return 0
        named = self._find_referenced(table)
        for name in left:
            folders.delete(name, [path for path in named if f"/{name}/" in path])
            folders.close(name)
        return len(left)

    def _outdate_requests(
        self, table: Table, folders: StagedFolders, left: list[str]
    ) -> tuple[Table, list[str]]:
        """Return a table that takes no request any more which names files in folders, and these folders.

        The answer to a commit may have been lost, and the catalog may take the request late. It asks for the
        snapshot that the branch had then: so an empty snapshot makes it stale, as every later commit does.
        """
        decided = {name: found for name in left if (found := folders.find_decided(name)) is not None}
        mark, _ = self._find_mark(table)
        done = None if mark is None else mark.checkpoint
        for checkpoint, branch in sorted(set(decided.values())):
            if done is not None and done >= checkpoint and branch == self._sink.branch:
                continue
            if why_not_written(table.metadata, branch):
                left = [name for name in left if decided.get(name) != (checkpoint, branch)]
                continue
            name, text = f"{self._app}-lost", str(checkpoint)
            table = self._tables.commit(table, TableChange(()), name, text, branch)
            # This order matters: a power cut after the deletion must not take the snapshot back.
            make_durable(table, table.metadata.snapshot_by_name(branch), self._durable)
        return table, left

    def _find_referenced(self, table: Table) -> set[str]:
        return find_referenced(table, lambda path: f"/flinkish/{self._app}/" in path)

    def why_not_superseded(self, target: CheckpointId) -> str:
        mark, _ = self._find_mark(self._tables.find(self._sink.name))
        if mark is None or mark.checkpoint <= target:
            return ""
        return (
            f"the table {self._sink.table} of sink '{self._context.uid}' holds checkpoint {mark.checkpoint}, "
            "and the sink takes no snapshot back"
        )


def is_merged(staged: Staged) -> bool:
    """Return whether rows were staged, which the commit writes into files of its own."""
    return isinstance(mode_of(staged[0]), Upsert)


def _find_folders(table: Table, staged: Staged) -> Iterator[tuple[str, StagedFolders]]:
    for one in staged:
        name = str(one["folder"])
        # Not that of the table as it is now: its property write.data.path may have changed.
        root = str(one["files"][0]["path"]).rpartition(f"/{name}/")[0]
        yield name, StagedFolders(root, store_of(table))


def _why_lost(table: Table, staged: Staged) -> str:
    for one in staged:
        if one["table_uuid"] != str(table.metadata.table_uuid):
            return "it is another table than the one that the rows were staged for"
        spec_id = table.metadata.default_spec_id if is_merged([one]) else one["spec_id"]
        if why := why_stale(table.metadata, one["schema_id"], spec_id, one["columns"]):
            return why
        if missing := find_missing(one["files"], store_of(table)):
            return f"the staged file {missing} is gone or damaged"
    return ""
