"""The committer of a Delta sink: one table version per checkpoint, and its restore at a rewind."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from flinkish_spark.bridge.session import has_delta_format
from flinkish_spark.connectors.delta.files import FOLDER
from flinkish_spark.connectors.delta.rows import DeltaRows, list_staged_files
from flinkish_spark.connectors.delta.sink_settings import DeltaSinkSettings
from flinkish_spark.connectors.delta.staging import new_metadata, table_defaults
from flinkish_spark.connectors.delta.table import (
    DeltaConflict,
    DeltaTableError,
    NoRestore,
    NotAsFiles,
    NothingToRestore,
    RestorePlan,
    RestoreVersion,
    SchemaEvolution,
    TableInfo,
    app_id,
    checkpoint_note,
    list_stored_fields,
    note_of,
    plan_restore,
    why_by_spark,
    why_not_as_files,
    why_not_made,
    why_not_merged,
    why_stricter,
    why_unfit,
)
from flinkish_spark.connectors.delta.tables import (
    DeltaTables,
    Marker,
    find_last_version,
    info_of,
    metadata_of,
)
from flinkish_spark.connectors.delta.writer import FilesToWrite, stats_columns
from flinkish_spark.connectors.staged_ids import StagedId
from flinkish_spark.connectors.staged_rows import DELETED, newest_per_key
from flinkish_spark.connectors.write_modes import (
    OverwritePartitions,
    Upsert,
    list_stored_names,
    mode_from_json,
)
from flinkish_spark.contracts.sink import Committer, ShownOrder, SinkContext
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome
from flinkish_spark.protocol.timeline import Mark

if TYPE_CHECKING:
    import deltalake


@dataclass(frozen=True, slots=True)
class CommitResult:
    #: Whether this call has committed; otherwise the table had the marker already.
    is_new: bool
    #: The table version that holds the checkpoint; None if it is not among the newest.
    version: int | None


class DeltaCommits(DeltaTables):
    """Commits staged files and rows of a Delta sink, by delta-rs or by Spark; used by one thread."""

    def __init__(self, options: Mapping[str, str], spark: SparkSession) -> None:
        super().__init__(options)
        self._spark, self._rows = spark, DeltaRows(spark)
        self._has_delta, self._defaults = has_delta_format(spark), table_defaults(spark)
        #: By table, the last checkpoint that this object itself has committed.
        self._own: dict[str, int] = {}

    def missing_files(self, staged: Mapping[str, Any]) -> list[str]:
        return self.files(str(staged["path"])).missing(list_staged_files(staged))

    def why_unfit(self, path: str, staged: Sequence[Mapping[str, Any]]) -> Mapping[int, str]:
        """Return why the table would refuse staged sets now, by their index; empty if it would take all."""
        table = self.info(path)
        reasons = {} if table is None else {at: _why_unfit(table, one) for at, one in enumerate(staged)}
        return {place: reason for place, reason in reasons.items() if reason}

    def commit(
        self,
        path: str,
        staged: Sequence[Mapping[str, Any]],
        app_id: str,
        mark: Mark,
        require_ours: Callable[[Mark], None],
    ) -> CommitResult:
        """Commit several staged sets as one table version, unless `app_id` has committed it."""
        version = int(mark.checkpoint)
        table = self.open(path)
        # Read from the version that the commit is based on: a newer mark of the same id is a conflict.
        seen = -1 if table is None else find_last_version(table, app_id)
        if seen >= 0 and seen != self._own.get(path):
            require_ours(self.mark_at(path, app_id, seen))
        if seen >= version:
            return CommitResult(False, self.version_of(path, app_id, version))
        marker = Marker(app_id, version, checkpoint_note(app_id, mark))
        info = None if table is None else info_of(table)
        try:
            self._commit_by_delta_rs(path, table, info, staged, marker)
        except NotAsFiles as why:
            self._require_delta(str(why))
            return self._commit_by_spark(path, info, staged, marker, require_ours)
        self._own[path] = version
        return CommitResult(True, self.version_of(path, app_id, version))

    def _require_delta(self, why: str) -> None:
        if not self._has_delta:
            raise DeltaTableError(f"it needs Delta's own writer, whose JAR this session has not: {why}")

    def _commit_by_delta_rs(
        self,
        path: str,
        table: Any,
        info: TableInfo | None,
        staged: Sequence[Mapping[str, Any]],
        marker: Marker,
    ) -> None:
        """Commit; raise NotAsFiles if delta-rs cannot commit it."""
        mode = mode_from_json(staged[0]["mode"])
        if info is None:
            fields = tuple(list_stored_fields(mode, staged[0]["schema"]["fields"]))
            why = why_not_made(TableInfo(fields, tuple(staged[0]["partition_by"]), self._defaults), mode)
        else:
            why = why_by_spark(info, mode)
        if why:
            raise NotAsFiles(why)
        if isinstance(mode, Upsert):
            self._upsert(path, table, info, staged, mode, marker)
            return
        if any(one["form"] == "ROWS" for one in staged):
            raise NotAsFiles("rows were staged for another schema of the table")
        adds = [action["add"] for one in staged for action in one["actions"]]
        first = staged[0]["metadata"]
        if table is None:
            if any(TableInfo.from_log(one["metadata"]) != TableInfo.from_log(first) for one in staged):
                raise NotAsFiles("the files were staged for different tables")
            self.create(path, first["metaData"], adds, marker)
            return
        current = {"metaData": metadata_of(table)}
        for one in staged:
            names = [str(field["name"]) for field in one["schema"]["fields"]]
            if why := why_not_as_files(one["metadata"], current, names):
                raise NotAsFiles(why)
        write = self.replace if isinstance(mode, OverwritePartitions) else self.append
        write(path, table, adds, marker)

    def _upsert(
        self,
        path: str,
        table: Any,
        info: TableInfo | None,
        staged: Sequence[Mapping[str, Any]],
        mode: Upsert,
        marker: Marker,
    ) -> None:
        for one in staged if info is not None else ():
            assert info is not None
            # New columns count as different ones.
            if why := why_not_merged(info, list_stored_fields(mode, one["schema"]["fields"])):
                raise NotAsFiles(why)
        files = self.files(path)
        rows = newest_per_key(files.read([name for one in staged for name in list_staged_files(one)]), mode)
        if table is not None:
            self.merge(path, table, rows, mode, marker)
            return
        schema = T.StructType.fromJson(staged[0]["schema"])
        kept = T.StructType([schema[name] for name in list_stored_names(mode, schema.names)])
        metadata = new_metadata(kept, staged[0]["partition_by"], self._defaults)
        made = TableInfo.from_log({"metaData": metadata})
        stats = stats_columns(made.fields, made.properties)
        target = FilesToWrite(files, partition_by=made.partition_by, with_stats=stats)
        there = rows.filter(pc.invert(rows.column(DELETED))).select(kept.names)
        # As one batch, so that the rows of a partition are together.
        self.create(path, metadata, target.write(there.combine_chunks().to_batches(), 0), marker)

    def _commit_by_spark(
        self,
        path: str,
        info: TableInfo | None,
        staged: Sequence[Mapping[str, Any]],
        marker: Marker,
        require_ours: Callable[[Mark], None],
    ) -> CommitResult:
        if info is not None and (why := _why_other_partitions(info, staged)):
            raise DeltaTableError(why)
        # Delta does not say whether it skipped a write; the note in the history says whose write it has.
        mine = f"{marker.note} {secrets.token_hex(4)}"
        self._rows.commit(path, staged, marker.app_id, marker.version, mine, info)
        found = self.commit_of(path, marker.app_id, marker.version)
        if found is None:
            return CommitResult(False, None)
        is_new = found.note == mine
        if is_new:
            self._own[path] = marker.version
        else:
            require_ours(self.mark_at(path, marker.app_id, marker.version))
        return CommitResult(is_new, found.version)

    def interrupt(self) -> None:
        self._rows.interrupt()

    def set_back(self, path: str, table: deltalake.DeltaTable, version: int | None, note: str) -> None:
        """Commit the rows of `version` (None: no rows) on top of the open version, with `note`.

        A commit that somebody else made since is a conflict, and is not undone.
        """
        if why := why_by_spark(info_of(table), None):
            self._require_delta(why)
            # Delta's statements work on the newest version, whichever it is: all that can be done is to
            # check right before.
            self.history_of(path, table, 1)
            DeltaRows(self._spark).set_back(path, version, note)
        elif version is None:
            self.delete_rows(path, table, note)
        else:
            self.restore(path, table, version, note)


def _why_unfit(table: TableInfo, staged: Mapping[str, Any]) -> str:
    mode, evolution = mode_from_json(staged["mode"]), SchemaEvolution(staged["schema_evolution"])
    return (
        _why_other_partitions(table, [staged])
        or why_unfit(table, mode, staged["schema"]["fields"], evolution)
        or why_stricter(_find_staged_target(staged)[1], table)
    )


def _why_other_partitions(table: TableInfo, staged: Sequence[Mapping[str, Any]]) -> str:
    """Return why rows would replace other partitions than they were staged for; empty if they would not."""
    if not isinstance(mode_from_json(staged[0]["mode"]), OverwritePartitions):
        return ""
    if all(table.partition_by == _find_staged_target(one)[0] for one in staged):
        return ""
    return "the table's partitioning changed since the rows were staged"


def _find_staged_target(staged: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return the partition columns and the rules of the table that rows were staged for."""
    if staged["form"] == "ROWS":
        return tuple(staged["table_partitions"]), staged["rules"]
    table = TableInfo.from_log(staged["metadata"])
    return table.partition_by, table.rules()


class DeltaCommitter(Committer):
    shown_order = ShownOrder.OF_COMMITS

    def __init__(self, sink: DeltaSinkSettings, commits: DeltaCommits, context: SinkContext) -> None:
        self._sink, self._commits, self._context = sink, commits, context
        self._app_id = app_id(context.job, context.uid)

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        staged = [one.payload for one in committables]
        return [self._commit(staged, checkpoint)] * len(staged) if staged else ()

    def newest_marks(self) -> Sequence[Mark]:
        mark = self._commits.newest_mark(self._sink.path, self._app_id)
        return () if mark is None else (mark,)

    def _commit(self, staged: Sequence[Mapping[str, Any]], checkpoint: CheckpointId) -> CommitAnswer:
        path, mark = str(staged[0]["path"]), self._context.timeline.mark_of(checkpoint)
        missing = [m for s in staged for m in self._commits.missing_files(s)]
        if missing:
            why = f"{len(missing)} staged files are gone from {path} or damaged, first {missing[0]}"
            return self._answer_lost_or_committed(staged, checkpoint, why)
        require_ours = partial(self._context.require_ours, upto=checkpoint)
        try:
            done = self._commits.commit(path, staged, self._app_id, mark, require_ours)
        except DeltaConflict as error:
            return CommitAnswer(Outcome.RETRY, str(error))
        except DeltaTableError as error:
            why = f"the table {path} no longer takes the rows: {error}"
            # Staging again finds these reasons and names them. It would not find any other: the replay would
            # be lost in turn, for ever. The table may take the rows once somebody has repaired it.
            explained = bool(self._commits.why_unfit(path, staged))
            return self._answer_lost_or_committed(staged, checkpoint, why, is_final=explained)
        outcome = Outcome.COMMITTED if done.is_new else Outcome.ALREADY_COMMITTED
        return self._answer_committed(outcome, staged, checkpoint, done.version)

    def _answer_committed(
        self,
        outcome: Outcome,
        staged: Sequence[Mapping[str, Any]],
        checkpoint: CheckpointId,
        version: int | None,
    ) -> CommitAnswer:
        # This order matters: a receipt is durable, and promises that the commit is. Sync also a commit that
        # another process made: it may have died before it could.
        self._commits.make_durable(str(staged[0]["path"]), self._app_id, int(checkpoint))
        facts = {} if version is None else {"version": version}
        files = sum(len(one["files"] if "files" in one else one["actions"]) for one in staged)
        facts |= {"rows": sum(int(one["rows"]) for one in staged), "files": files}
        return CommitAnswer(outcome, facts=facts)

    def _answer_lost_or_committed(
        self,
        staged: Sequence[Mapping[str, Any]],
        checkpoint: CheckpointId,
        why: str,
        *,
        is_final: bool = True,
    ) -> CommitAnswer:
        """Answer LOST, proven if the marker says that this checkpoint is not in the table."""
        # This order matters: the marker is read after the files were missed. A process that could still
        # commit them would have to find them all, and writes the same marker as a replay, so only one of the
        # two becomes visible.
        path, version = str(staged[0]["path"]), int(checkpoint)
        mark = self._commits.newest_mark(path, self._app_id)
        if mark is None or int(mark.checkpoint) < version:
            return CommitAnswer(Outcome.LOST, why, is_proven_aborted=is_final)
        self._context.require_ours(mark, checkpoint)
        known = self._commits.version_of(path, self._app_id, version)
        return self._answer_committed(Outcome.ALREADY_COMMITTED, staged, checkpoint, known)

    def interrupt(self) -> None:
        self._commits.interrupt()

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Forget the files: they are in no log, and VACUUM or a sweep removes them later."""
        # Not deleted here, because a decision may be unknown to a fenced process.
        return tuple(CommitAnswer(Outcome.COMMITTED, "left to VACUUM") for _ in committables)

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Find committables whose files are gone, or that do not fit the table or the sink any more."""
        payloads = [one.payload for one in committables]
        reasons = [self._why_dead(one) for one in payloads]
        unfit = {} if all(reasons) else self._commits.why_unfit(self._sink.path, payloads)
        found = {at: reason or unfit.get(at, "") for at, reason in enumerate(reasons)}
        return {at: f"sink '{self._context.uid}': {reason}" for at, reason in found.items() if reason}

    def _why_dead(self, payload: Mapping[str, Any]) -> str:
        # One commit has one table and one mode.
        if payload["path"] != self._sink.path:
            return f"the rows were staged for the table {payload['path']}"
        if mode_from_json(payload["mode"]) != self._sink.mode:
            return "the rows were staged under another mode"
        missing = self._commits.missing_files(payload)
        return f"the staged file {missing[0]} is gone or damaged" if missing else ""

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Delete folders of staged rows that no commit needs. Data files are left to VACUUM."""
        path, deleted = self._sink.path, 0
        names = {str(c.payload.get("folder", "")).rpartition("/")[2] for c in kept}
        below = f"{FOLDER}/{self._app_id}"
        found = self._commits.files(path).folders(below)
        # This order matters: a block that is leased after the listing has no folder in it.
        leased = running_blocks()
        for name in found:
            staged = StagedId.parse(name)
            if staged is None or name in names or not staged.is_leftover(self._context.owner_epoch, leased):
                continue
            self._commits.files(path).delete(f"{below}/{name}")
            deleted += 1
        return deleted

    def why_not_superseded(self, target: CheckpointId) -> str:
        # No rewind has started this lineage, so there is no note of it.
        _, plan = self._plan(target, Lineage(0))
        why = plan.why if isinstance(plan, NoRestore) else ""
        if isinstance(plan, RestoreVersion) and plan.version is not None:
            missing = self._commits.missing_at(self._sink.path, plan.version)
            why = f"the file {missing[0]} of version {plan.version} is gone" if missing else ""
        if not why and isinstance(plan, RestoreVersion):
            table = self._commits.info(self._sink.path)
            why = "it is append-only" if table is not None and table.is_append_only else ""
        return why and f"the table {self._sink.path} of sink '{self._context.uid}' cannot be restored: {why}"

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        """Restore the table to its state at `target`, once per lineage."""
        path, note = self._sink.path, note_of(self._context.job, lineage)
        # This order matters: the restore is based on the version that was checked. If the table were opened
        # again here, a commit of somebody else in between would be undone.
        table, plan = self._plan(target, lineage)
        try:
            match plan:
                case NothingToRestore():
                    if table is not None:
                        self._commits.make_durable(path, note)
                    return CommitAnswer(Outcome.ALREADY_COMMITTED)
                case NoRestore(why):
                    return CommitAnswer(Outcome.LOST, f"the table {path} cannot be restored: {why}")
                case RestoreVersion(version):
                    self._commits.set_back(path, table, version, note)
        except DeltaConflict as error:
            return CommitAnswer(Outcome.RETRY, str(error))
        except DeltaTableError as error:
            return CommitAnswer(Outcome.LOST, f"the table {path} cannot be restored: {error}")
        self._commits.make_durable(path, note)
        return CommitAnswer(Outcome.COMMITTED)

    def _plan(self, target: CheckpointId, lineage: Lineage) -> tuple[Any, RestorePlan]:
        table = self._commits.open(self._sink.path)
        if table is None:
            return None, NothingToRestore()
        while True:
            commits = self._commits.commits(self._sink.path, table)
            with suppress(DeltaConflict):
                return table, plan_restore(commits, self._context.job, target, lineage)
