"""The committing half of a Delta sink: one table version per checkpoint, and the way back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from flinkish_spark.bridge.session import has_delta_format
from flinkish_spark.connectors.delta.faults import (
    DeltaConflict,
    DeltaRefused,
    NotAsFiles,
)
from flinkish_spark.connectors.delta.rows import (
    DeltaRows,
    staged_files,
)
from flinkish_spark.connectors.delta.sink_settings import DeltaSinkSettings
from flinkish_spark.connectors.delta.staging import (
    FOLDER,
    StagedFolder,
    new_metadata,
    stored_of,
    table_defaults,
)
from flinkish_spark.connectors.delta.table import (
    Append,
    DeleteRows,
    NoRestore,
    NothingToRestore,
    OverwritePartitions,
    RestorePlan,
    RestoreVersion,
    SchemaEvolution,
    TableCommit,
    TableInfo,
    Upsert,
    app_id,
    checkpoint_note,
    fit,
    mark_in,
    mode_from_json,
    note_of,
    plan_restore,
    stored_fields,
    why_by_spark,
    why_not_as_files,
    why_not_made,
    why_not_merged,
    why_stricter,
)
from flinkish_spark.connectors.delta.tables import DeltaTables, Marker, info_of, metadata_of, seen_by
from flinkish_spark.connectors.delta.upserts import newest_per_key
from flinkish_spark.connectors.delta.writer import DELETED, FilesToWrite, stats_columns
from flinkish_spark.contracts.sink import (
    Committer,
    ShownOrder,
    SinkContext,
)
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome
from flinkish_spark.protocol.timeline import Mark

if TYPE_CHECKING:
    import deltalake

#: How far back a commit is looked for when only its version is wanted.
_RECENT = 20


@dataclass(frozen=True, slots=True)
class CommitResult:
    #: Whether this call did it; otherwise the marker was there.
    is_new: bool
    #: The table version that holds the checkpoint; None if that was not cheap to find out.
    version: int | None


class DeltaCommits:
    """Ends what a Delta sink staged; one per process and sink, used by one thread at a time."""

    def __init__(self, tables: DeltaTables, spark: SparkSession) -> None:
        self._tables, self._rows = tables, DeltaRows(spark)
        self._has_delta, self._defaults = has_delta_format(spark), table_defaults(spark)
        #: By table, the checkpoint that this object has committed last: nobody else's.
        self._own: dict[str, int] = {}

    def info(self, path: str) -> TableInfo | None:
        return self._tables.info(path)

    def committed_version(self, path: str, app_id: str) -> int:
        """Return the last checkpoint that `app_id` committed; -1 if none."""
        return self._tables.committed_version(path, app_id)

    def newest_mark(self, path: str, app_id: str) -> Mark | None:
        version = self.committed_version(path, app_id)
        return None if version < 0 else self._mark(path, app_id, version)

    def _mark(self, path: str, app_id: str, version: int) -> Mark:
        found = self._commit_of(path, app_id, version)
        return (None if found is None else _mark_of(found, app_id)) or Mark(CheckpointId(version))

    def missing_files(self, staged: Mapping[str, Any]) -> list[str]:
        return self._tables.missing(str(staged["path"]), staged_files(staged))

    def why_unfit(self, path: str, staged: Sequence[Mapping[str, Any]]) -> Mapping[int, str]:
        """Return why the table would refuse staged sets now, by their place; empty if it would take all."""
        table = self.info(path)
        if table is None:
            return {}
        reasons = {place: _why_unfit(table, one) for place, one in enumerate(staged)}
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
        table = self._tables.open(path)
        # Of the version that the commit is tried on: a mark of the same id behind it is a conflict.
        seen = -1 if table is None else seen_by(table, app_id)
        if seen >= 0 and seen != self._own.get(path):
            require_ours(self._mark(path, app_id, seen))
        if seen >= version:
            return CommitResult(False, self.version_of(path, app_id, version))
        marker = Marker(app_id, version, checkpoint_note(app_id, mark))
        try:
            self._by_delta_rs(path, table, staged, marker)
        except NotAsFiles as why:
            if not self._has_delta:
                raise DeltaRefused(
                    f"it needs Delta's own writer, whose JAR this session has not: {why}"
                ) from why
            return self._by_spark(
                path, None if table is None else info_of(table), staged, marker, require_ours
            )
        self._own[path] = version
        return CommitResult(True, self.version_of(path, app_id, version))

    def _by_delta_rs(
        self, path: str, table: Any, staged: Sequence[Mapping[str, Any]], marker: Marker
    ) -> None:
        """Commit; raise NotAsFiles if that is not for delta-rs."""
        mode = mode_from_json(staged[0]["mode"])
        info = None if table is None else info_of(table)
        if info is None:
            fields = tuple(stored_of(mode, staged[0]["schema"]["fields"]))
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
        adds = [action["add"] for one in staged for action in one["actions"] if "add" in action]
        first = staged[0]["metadata"]
        if table is None:
            if any(TableInfo.from_log(one["metadata"]) != TableInfo.from_log(first) for one in staged):
                raise NotAsFiles("the files were staged for different tables")
            self._tables.create(path, first["metaData"], adds, marker)
            return
        current = {"metaData": metadata_of(table)}
        for one in staged:
            names = [str(field["name"]) for field in one["schema"]["fields"]]
            if why := why_not_as_files(one["metadata"], current, names):
                raise NotAsFiles(why)
        if isinstance(mode, OverwritePartitions):
            self._tables.replace(path, table, adds, marker)
        else:
            self._tables.append(path, table, adds, marker)

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
            # New columns, too, are such that differ.
            if why := why_not_merged(info, stored_of(mode, one["schema"]["fields"])):
                raise NotAsFiles(why)
        files = self._tables.files(path)
        rows = newest_per_key(files.read([name for one in staged for name in staged_files(one)]), mode)
        if table is not None:
            self._tables.merge(path, table, rows, mode, marker)
            return
        schema = T.StructType.fromJson(staged[0]["schema"])
        kept = T.StructType([schema[name] for name in stored_fields(mode, schema.names)])
        metadata = new_metadata(kept, staged[0]["partition_by"], self._defaults)
        made = TableInfo.from_log({"metaData": metadata})
        stats = stats_columns(made.fields, made.properties)
        target = FilesToWrite(files, partition_by=made.partition_by, with_stats=stats)
        there = rows.filter(pc.invert(rows.column(DELETED))).select(kept.names)
        # In one piece, which has the rows of a partition together.
        self._tables.create(path, metadata, target.write(there.combine_chunks().to_batches(), 0), marker)

    def _by_spark(
        self,
        path: str,
        info: TableInfo | None,
        staged: Sequence[Mapping[str, Any]],
        marker: Marker,
        require_ours: Callable[[Mark], None],
    ) -> CommitResult:
        why = "" if info is None else _why_other_partitions(info, staged)
        if why:
            raise DeltaRefused(why)
        # Delta does not say whether it skipped a write; whose note is in the history does.
        mine = f"{marker.note} {secrets.token_hex(4)}"
        self._rows.commit(path, staged, marker.app_id, marker.version, mine, info)
        found = self._commit_of(path, marker.app_id, marker.version)
        if found is None:
            return CommitResult(False, None)
        is_new = found["userMetadata"] == mine
        if is_new:
            self._own[path] = marker.version
        else:
            require_ours(self._mark(path, marker.app_id, marker.version))
        return CommitResult(is_new, int(found["version"]))

    def make_durable(self, path: str, app_id: str, version: int) -> None:
        self._tables.make_durable(path, app_id, version)

    def interrupt(self) -> None:
        self._rows.interrupt()

    def version_of(self, path: str, app_id: str, version: int) -> int | None:
        found = self._commit_of(path, app_id, version)
        return None if found is None else int(found["version"])

    def _commit_of(self, path: str, app_id: str, version: int) -> Mapping[str, Any] | None:
        # Most often it is the newest.
        for limit in (1, _RECENT):
            for row in self._tables.history(path, limit):
                found = _mark_of(row, app_id)
                if found is not None and int(found.checkpoint) == version:
                    return row
        return None

    def leftovers(self, path: str, app_id: str) -> list[str]:
        return self._tables.folders(path, f"{FOLDER}/{app_id}")

    def discard(self, path: str, app_id: str, name: str) -> None:
        self._tables.delete(path, f"{FOLDER}/{app_id}/{name}")


class DeltaHistory:
    """The history of a table, and the way back in it."""

    def __init__(self, tables: DeltaTables, spark: SparkSession) -> None:
        self._tables, self._spark = tables, spark

    def open(self, path: str) -> deltalake.DeltaTable | None:
        return self._tables.open(path)

    def commits(self, path: str, table: deltalake.DeltaTable) -> Iterator[dict[str, Any]]:
        """Yield commits, newest first; raise DeltaConflict if `table` is not the newest: then it is."""
        # In growing pages: whoever stops early has not waited for all of a long history.
        read, page = 0, _FIRST_PAGE
        while True:
            rows = self._tables.history_of(path, table, page)
            yield from rows[read:]
            if len(rows) < page:
                return
            read, page = page, page * 10

    def missing_at(self, path: str, version: int) -> list[str]:
        """Return files of an older version that the newest no longer has and that are gone."""
        return self._tables.missing_at(path, version)

    def make_durable(self, path: str, note: str) -> None:
        self._tables.make_durable(path, note)

    def restore(self, path: str, table: deltalake.DeltaTable, version: int | None, note: str) -> None:
        """Commit what `version` held, of None no rows, behind the version that is open, with `note`.

        A commit that somebody made since is a conflict, and is not taken back.
        """
        if why := why_by_spark(info_of(table), None):
            if not has_delta_format(self._spark):
                raise DeltaRefused(f"it needs Delta's own writer, whose JAR this session has not: {why}")
            # Delta's statements take the newest version, whichever it is: all that can be done is to look
            # right before.
            self._tables.history_of(path, table, 1)
            rows = DeltaRows(self._spark)
            if version is None:
                rows.delete_rows(path, note)
            else:
                rows.restore(path, version, note)
        elif version is None:
            self._tables.delete_rows(path, table, note)
        else:
            self._tables.restore(path, table, version, note)


_FIRST_PAGE = 100


def _why_unfit(table: TableInfo, staged: Mapping[str, Any]) -> str:
    mode = mode_from_json(staged["mode"])
    stored = stored_of(mode, staged["schema"]["fields"])
    problems = fit(table, stored, SchemaEvolution(staged["schema_evolution"])).problems
    if problems:
        return problems[0]
    if isinstance(mode, Upsert):
        missing = [key for key in mode.keys if not table.has_column(key)]
        if missing:
            return f"the table has no column {missing[0]}, which is a key"
    if table.is_append_only and not isinstance(mode, Append):
        return "the table became append-only"
    return _why_other_partitions(table, [staged]) or why_stricter(_rules(staged), table)


def _why_other_partitions(table: TableInfo, staged: Sequence[Mapping[str, Any]]) -> str:
    """Return why rows would replace others than they were staged for: in the end the whole table."""
    if not isinstance(mode_from_json(staged[0]["mode"]), OverwritePartitions):
        return ""
    if all(list(table.partition_by) == list(_partitions(one)) for one in staged):
        return ""
    return "the table's partitioning changed since the rows were staged"


def _mark_of(row: Mapping[str, Any], app_id: str) -> Mark | None:
    return mark_in(str(row["userMetadata"] or ""), app_id)


def _partitions(staged: Mapping[str, Any]) -> Sequence[str]:
    if staged["form"] == "ROWS":
        return [str(name) for name in staged["table_partitions"]]
    return TableInfo.from_log(staged["metadata"]).partition_by


def _rules(staged: Mapping[str, Any]) -> Mapping[str, Any]:
    if staged["form"] == "ROWS":
        rules: Mapping[str, Any] = staged["rules"]
        return rules
    return TableInfo.from_log(staged["metadata"]).rules()


class DeltaCommitter(Committer):
    shown_order = ShownOrder.OF_COMMITS

    def __init__(
        self, sink: DeltaSinkSettings, commits: DeltaCommits, history: DeltaHistory, context: SinkContext
    ) -> None:
        self._sink, self._commits, self._history, self._context = sink, commits, history, context
        self._app_id = app_id(context.job, context.uid)

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        if not committables:
            return ()
        path = str(committables[0].payload["path"])
        staged: list[Mapping[str, Any]] = [c.payload for c in committables]
        answer = self._commit(path, staged, checkpoint)
        return tuple(answer for _ in committables)

    def newest_marks(self) -> Sequence[Mark]:
        mark = self._commits.newest_mark(self._sink.path, self._app_id)
        return () if mark is None else (mark,)

    def _require_ours(self, checkpoint: CheckpointId) -> Callable[[Mark], None]:
        return lambda mark: self._context.require_ours(mark, checkpoint)

    def _commit(self, path: str, staged: list[Mapping[str, Any]], checkpoint: CheckpointId) -> CommitAnswer:
        version, timeline = int(checkpoint), self._context.timeline
        missing = [m for s in staged for m in self._commits.missing_files(s)]
        if missing:
            why = f"{len(missing)} staged files are gone from {path} or damaged, first {missing[0]}"
            return self._lost_unless_committed(path, staged, version, why)
        try:
            done = self._commits.commit(
                path, staged, self._app_id, timeline.mark_of(checkpoint), self._require_ours(checkpoint)
            )
        except DeltaConflict as error:
            return CommitAnswer(Outcome.RETRY, str(error))
        except DeltaRefused as error:
            why = f"the table {path} no longer takes the rows: {error}"
            # Staging again finds these reasons and names them. Any other it does not find: its replay would
            # be lost in turn, for ever. The table may take the rows when it was seen to.
            explained = bool(self._commits.why_unfit(path, staged))
            return self._lost_unless_committed(path, staged, version, why, is_final=explained)
        outcome = Outcome.COMMITTED if done.is_new else Outcome.ALREADY_COMMITTED
        return self._done(outcome, path, staged, version, done.version)

    def _done(
        self,
        outcome: Outcome,
        path: str,
        staged: list[Mapping[str, Any]],
        checkpoint: int,
        version: int | None,
    ) -> CommitAnswer:
        # This order matters: a receipt is durable, and says that the commit is. Whose it was does not matter:
        # whoever made it may have died before it was synced.
        self._commits.make_durable(path, self._app_id, checkpoint)
        return CommitAnswer(outcome, facts=_facts(staged, version))

    def _lost_unless_committed(
        self, path: str, staged: list[Mapping[str, Any]], version: int, why: str, *, is_final: bool = True
    ) -> CommitAnswer:
        """Answer LOST, proven if the marker says that this checkpoint is not in the table."""
        # This order matters: asked behind the files. Whoever could still commit them would have to find them
        # all, and writes the same marker as a replay, so that only one of the two becomes visible.
        seen = self._commits.committed_version(path, self._app_id)
        if seen >= version:
            mark = self._commits.newest_mark(path, self._app_id)
            if mark is not None:
                self._context.require_ours(mark, CheckpointId(version))
            known = self._commits.version_of(path, self._app_id, version)
            return self._done(Outcome.ALREADY_COMMITTED, path, staged, version, known)
        return CommitAnswer(Outcome.LOST, why, is_proven_aborted=is_final)

    def interrupt(self) -> None:
        self._commits.interrupt()

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Forget the files: they are in no log, and VACUUM or a sweep removes them later."""
        # Not deleted here, because a decision may be unknown to a fenced process.
        return tuple(CommitAnswer(Outcome.COMMITTED, "left to VACUUM") for _ in committables)

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Find committables whose files are gone, or that do not fit the table or the sink any more."""
        dead: dict[int, str] = {}
        for index, committable in enumerate(committables):
            reason = self._why_other(committable.payload)
            if not reason:
                missing = self._commits.missing_files(committable.payload)
                reason = f"the staged file {missing[0]} is gone or damaged" if missing else ""
            if reason:
                dead[index] = reason
        alive = [index for index in range(len(committables)) if index not in dead]
        if alive:
            unfit = self._commits.why_unfit(self._sink.path, [committables[i].payload for i in alive])
            dead.update({alive[place]: reason for place, reason in unfit.items()})
        return {index: f"sink '{self._context.uid}': {reason}" for index, reason in dead.items()}

    def _why_other(self, payload: Mapping[str, Any]) -> str:
        """Return how a committable differs from the sink now: one commit has one table and one mode."""
        if payload["path"] != self._sink.path:
            return f"the rows were staged for the table {payload['path']}"
        if mode_from_json(payload["mode"]) != self._sink.mode:
            return "the rows were staged under another mode"
        return ""

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Delete folders of staged rows that nobody will commit. Data files are left to VACUUM."""
        path, deleted = self._sink.path, 0
        names = {str(c.payload.get("folder", "")).rpartition("/")[2] for c in kept}
        found = self._commits.leftovers(path, self._app_id)
        # This order matters: a block that is leased after the listing has no folder in it.
        leased = running_blocks()
        for name in found:
            folder = StagedFolder.parse(name)
            if folder is None or name in names:
                continue
            mine = folder.owner_epoch == int(self._context.owner_epoch)
            if folder.owner_epoch > int(self._context.owner_epoch) or (mine and folder.block in leased):
                continue
            self._commits.discard(path, self._app_id, name)
            deleted += 1
        return deleted

    def why_not_superseded(self, target: CheckpointId) -> str:
        # No rewind has started this lineage, so no note can be found.
        _, plan = self._plan(target, Lineage(0))
        why = plan.why if isinstance(plan, NoRestore) else ""
        if isinstance(plan, RestoreVersion):
            missing = self._history.missing_at(self._sink.path, plan.version)
            why = f"the file {missing[0]} of version {plan.version} is gone" if missing else ""
        if not why and isinstance(plan, RestoreVersion | DeleteRows):
            table = self._commits.info(self._sink.path)
            why = "it is append-only" if table is not None and table.is_append_only else ""
        return why and f"the table {self._sink.path} of sink '{self._context.uid}' cannot be restored: {why}"

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        """Restore the table to what `target` left, once per lineage."""
        path, note = self._sink.path, note_of(self._context.job, lineage)
        # This order matters: what is restored is the version that was looked at. With a new look here, the
        # commit of somebody else in between would be taken back.
        table, plan = self._plan(target, lineage)
        try:
            match plan:
                case NothingToRestore():
                    if table is not None:
                        self._history.make_durable(path, note)
                    return CommitAnswer(Outcome.ALREADY_COMMITTED)
                case NoRestore(why):
                    return CommitAnswer(Outcome.LOST, f"the table {path} cannot be restored: {why}")
                case DeleteRows():
                    self._history.restore(path, table, None, note)
                case RestoreVersion(version):
                    self._history.restore(path, table, version, note)
        except DeltaConflict as error:
            return CommitAnswer(Outcome.RETRY, str(error))
        except DeltaRefused as error:
            return CommitAnswer(Outcome.LOST, f"the table {path} cannot be restored: {error}")
        self._history.make_durable(path, note)
        return CommitAnswer(Outcome.COMMITTED)

    def _plan(self, target: CheckpointId, lineage: Lineage) -> tuple[Any, RestorePlan]:
        """Return the newest version of the table, open, and what is to be done to it."""
        table = self._history.open(self._sink.path)
        if table is None:
            return None, NothingToRestore()
        while True:
            commits = (
                TableCommit(int(row["version"]), str(row["operation"]), str(row["userMetadata"] or ""))
                for row in self._history.commits(self._sink.path, table)
            )
            with suppress(DeltaConflict):
                return table, plan_restore(commits, self._context.job, target, lineage)


def _facts(staged: Sequence[Mapping[str, Any]], version: int | None) -> dict[str, Any]:
    facts: dict[str, Any] = {} if version is None else {"version": version}
    facts["rows"] = sum(int(one["rows"]) for one in staged)
    facts["files"] = sum(
        len(one["files"]) if "files" in one else sum("add" in action for action in one["actions"])
        for one in staged
    )
    return facts
