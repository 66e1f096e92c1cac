"""Both halves of a Delta sink: staging files or rows, and one table version per checkpoint."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from flinkish_spark.bridge.shim import TappedRows
from flinkish_spark.connectors.delta.rows import (
    DeltaHistory,
    DeltaRows,
    aligned_columns,
    rule_conditions,
    staged_files,
    write_rows,
)
from flinkish_spark.connectors.delta.sink_settings import DeltaSinkSettings
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
    why_stricter,
)
from flinkish_spark.connectors.delta.transactions import (
    VIOLATION_MARKER,
    DeltaConflict,
    DeltaRefused,
    DeltaTables,
    DeltaViolated,
    NotAsFiles,
    TableFiles,
    files_of,
)
from flinkish_spark.connectors.partition_values import refusing, refusing_others
from flinkish_spark.connectors.row_count import CONTROL_WIDTH, CountedRows, RowsDifferError
from flinkish_spark.contracts.sink import (
    Committer,
    ShownOrder,
    SinkContext,
    SinkWriter,
    StageRequest,
    StageResult,
)
from flinkish_spark.core.errors import MAKE_DETERMINISTIC, BadRecordError, SchemaError
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.types.ddl import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


#: Below the table, where rows wait for their checkpoint: Delta and its VACUUM pass over folders whose names
#: begin with an underscore.
FOLDER = "_flinkish"
_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class StagedFolder:
    """Name of the rows of one attempt: it says whose they are, so that a sweep knows a leftover."""

    owner_epoch: int
    lineage: int
    batch: int
    block: int
    #: Eight hexadecimal digits that no other attempt has.
    token: str

    @property
    def name(self) -> str:
        return f"{self.owner_epoch}-{self.lineage}-{self.batch}-{self.block}-{self.token}"

    @classmethod
    def parse(cls, name: str) -> StagedFolder | None:
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        return cls(int(found[1]), int(found[2]), int(found[3]), int(found[4]), found[5])


def folder_of_sink(path: str, app_id: str) -> str:
    return f"{path.rstrip('/')}/{FOLDER}/{app_id}"


class StagingTools:
    def __init__(
        self, native: DeltaTables | None, rows: DeltaRows, files: TableFiles, *, has_shim: bool
    ) -> None:
        self.native, self.rows, self.files, self.has_shim = native, rows, files, has_shim


class DeltaStaging(SinkWriter):
    """Stages micro-batches of one Delta sink, for one start of the query."""

    passes = 2

    def __init__(self, sink: DeltaSinkSettings, context: SinkContext, tools: StagingTools) -> None:
        self._sink, self._context, self._tools = sink, context, tools
        self._known: TableInfo | None = None

    def stage(self, request: StageRequest) -> StageResult:
        tapped = self._tapped(request)
        fields = [F.col(quoted(n)) for n in request.rows.columns[CONTROL_WIDTH:]]
        if request.count_records() == 0:
            # Spark writes an empty file for an empty DataFrame, which no log would ever name.
            tapped.records.write.format("noop").mode("overwrite").save()
            return StageResult(tuple(tapped.acks()), (), bytes=0)
        frame = tapped.records.select(*fields)
        try:
            staged = self._as_files(frame) or self._as_rows(frame, request)
        except DeltaViolated as error:
            raise self._violated(error) from error
        except DeltaRefused as error:
            raise self._refused(error) from error
        acks = tuple(tapped.acks())
        rows = sum(ack.rows for ack in acks)
        self._check_rows(request, rows, staged)
        payload = {
            "path": self._sink.path,
            "mode": self._sink.mode.to_json(),
            "schema_evolution": self._sink.schema_evolution.value,
            "partition_by": list(self._sink.partition_by),
            "options": dict(self._sink.options),
            "rows": rows,
            **staged,
        }
        return StageResult(acks, (payload,), bytes=_bytes(staged))

    def _as_files(self, frame: DataFrame) -> dict[str, Any] | None:
        """Stage data files where they will stay; None where that cannot end well, and nothing is written."""
        sink, native = self._sink, self._tools.native
        if native is None or isinstance(sink.mode, Upsert):
            return None
        stream = json.loads(frame.schema.json())["fields"]

        def aligned(table: TableInfo | None) -> DataFrame | None:
            if table is None:
                return refusing(frame, sink.partition_by, VIOLATION_MARKER)
            self._require_partitions(table)
            # New columns get their physical names from the commit that adds them, and numbers are given
            # out by it: files written before could have others.
            if table.has_identity or fit(table, stream, sink.schema_evolution).changes:
                return None
            kept = refusing(frame, table.partition_by, VIOLATION_MARKER)
            # Delta checks these, too, and does not say in which record.
            rules = {"not_null": table.not_null, "lengths": table.lengths}
            kept = refusing_others(kept, rule_conditions(kept, rules), VIOLATION_MARKER)
            return kept.select(*aligned_columns(kept, kept.columns, table))

        staged = native.stage(frame, sink.path, sink.partition_by, sink.options, aligned)
        return None if staged is None else {"form": "FILES", "schema": frame.schema.jsonValue(), **staged}

    def _as_rows(self, frame: DataFrame, request: StageRequest) -> dict[str, Any]:
        sink, context = self._sink, self._context
        table = self._table()
        if table is not None:
            self._require_partitions(table)
        rules = {} if table is None else table.rules()
        name = StagedFolder(
            int(context.owner_epoch),
            int(request.lineage),
            int(request.batch),
            request.block,
            secrets.token_hex(4),
        ).name
        folder = f"{folder_of_sink(sink.path, app_id(context.job, context.uid))}/{name}"
        partition_by = sink.partition_by if table is None else table.partition_by
        write_rows(frame, folder, int(request.batch), sink.mode, rules, partition_by)
        sizes = self._tools.files.sizes(folder)
        return {
            "form": "ROWS",
            "folder": folder,
            "files": dict(sorted(sizes.items())),
            "schema": frame.schema.jsonValue(),
            "rules": rules,
            "table_partitions": list(partition_by),
            "bytes": sum(sizes.values()),
        }

    def _require_partitions(self, table: TableInfo) -> None:
        if isinstance(self._sink.mode, OverwritePartitions) and not table.partition_by:
            raise DeltaRefused("it has no partitions any more, and would be overwritten as a whole")

    def _table(self) -> TableInfo | None:
        if self._tools.native is not None:
            return self._tools.native.info(self._sink.path)
        # Asking costs more than staging here. A table that changes is noticed before the decision.
        self._known = self._known or self._tools.rows.info(self._sink.path)
        return self._known

    def _tapped(self, request: StageRequest) -> TappedRows | CountedRows:
        if self._tools.has_shim:
            return TappedRows(request.rows, f"flinkish {self._context.uid} batch {request.batch}")
        return CountedRows(request.rows)

    def _check_rows(self, request: StageRequest, counted: int, staged: Mapping[str, Any]) -> None:
        stats = [a["add"].get("stats") for a in staged.get("actions", ()) if "add" in a]
        if not stats or not all(stats):
            return
        written = sum(int(json.loads(text).get("numRecords", 0)) for text in stats)
        if written != counted:
            raise RowsDifferError(
                f"sink '{self._context.uid}' wrote {written} rows of micro-batch {request.batch}, "
                f"and {counted} were counted",
                why="the micro-batch was evaluated twice with different results",
                what_to_do=MAKE_DETERMINISTIC,
            )

    def _violated(self, error: DeltaViolated) -> BadRecordError:
        return BadRecordError(
            f"a record of sink '{self._context.uid}' breaks a rule of the Delta table {self._sink.path}",
            why=" ".join(str(error).split()),
            what_to_do="correct or filter such records in front of the sink, or change the table; "
            "the job goes on from its last checkpoint",
            uid=self._context.uid,
        )

    def _refused(self, error: DeltaRefused) -> SchemaError:
        return SchemaError(
            f"the Delta table {self._sink.path} refuses the stream of sink '{self._context.uid}'",
            why=str(error).split("\n\n")[0].strip(),
            what_to_do="change the stream's fields, or the table with ALTER TABLE",
            uid=self._context.uid,
        )


def _bytes(staged: Mapping[str, Any]) -> int:
    if "bytes" in staged:
        return int(staged["bytes"])
    return sum(int(action["add"]["size"]) for action in staged["actions"] if "add" in action)


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

    def __init__(
        self, native: DeltaTables | None, rows: DeltaRows, files: TableFiles, history: DeltaHistory
    ) -> None:
        self._native, self._rows, self._files, self._history = native, rows, files, history
        #: By table, the checkpoint that this object has committed last: nobody else's.
        self._own: dict[str, int] = {}

    @classmethod
    def of(cls, spark: SparkSession, *, native: DeltaTables | None) -> DeltaCommits:
        return cls(native, DeltaRows(spark), files_of(spark), DeltaHistory(spark))

    def info(self, path: str) -> TableInfo | None:
        return self._rows.info(path) if self._native is None else self._native.info(path)

    def committed_version(self, path: str, app_id: str) -> int | None:
        """Return the last checkpoint that `app_id` committed; -1 if none, None if it cannot be known."""
        if self._native is not None:
            return self._native.committed_version(path, app_id)
        is_whole = False
        for row in self._history.commits(path):
            found = _mark_of(row, app_id)
            if found is not None:
                return int(found.checkpoint)
            is_whole = int(row["version"]) == 0
        # A history whose beginning was cleaned away may have had one.
        return -1 if is_whole or self._history.newest(path) < 0 else None

    def newest_mark(self, path: str, app_id: str) -> Mark | None:
        version = self.committed_version(path, app_id)
        return None if version is None or version < 0 else self._mark(path, app_id, version)

    def _mark(self, path: str, app_id: str, version: int) -> Mark:
        found = self._commit_of(path, app_id, version)
        return (None if found is None else _mark_of(found, app_id)) or Mark(CheckpointId(version))

    def missing_files(self, staged: Mapping[str, Any]) -> list[str]:
        return self._files.missing(staged_files(staged))

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
        note, version = checkpoint_note(app_id, mark), int(mark.checkpoint)

        def check(seen: int) -> None:
            if seen >= 0 and seen != self._own.get(path):
                require_ours(self._mark(path, app_id, seen))

        if self._native is not None and all(one["form"] != "ROWS" for one in staged):
            try:
                done = self._native.commit(path, staged, app_id, version, note, check)
                if done is not None:
                    self._own[path] = version
                    return CommitResult(True, done)
                return CommitResult(False, self.version_of(path, app_id, version))
            except NotAsFiles:
                pass
        info = self.info(path)
        why = "" if info is None else _why_other_partitions(info, staged)
        if why:
            raise DeltaRefused(why)
        check(self.committed_version(path, app_id) or -1)
        # Delta does not say whether it skipped a write; whose note is in the history does.
        mine = f"{note} {secrets.token_hex(4)}"
        self._rows.commit(path, staged, app_id, version, mine, info)
        found = self._commit_of(path, app_id, version)
        if found is None:
            return CommitResult(False, None)
        is_new = found["userMetadata"] == mine
        if is_new:
            self._own[path] = version
        else:
            require_ours(self._mark(path, app_id, version))
        return CommitResult(is_new, int(found["version"]))

    def interrupt(self) -> None:
        self._rows.interrupt()

    def version_of(self, path: str, app_id: str, version: int) -> int | None:
        found = self._commit_of(path, app_id, version)
        return None if found is None else int(found["version"])

    def _commit_of(self, path: str, app_id: str, version: int) -> Mapping[str, Any] | None:
        for row in self._recent(path):
            found = _mark_of(row, app_id)
            if found is not None and int(found.checkpoint) == version:
                return row
        return None

    def _recent(self, path: str) -> Iterator[Mapping[str, Any]]:
        read: list[int] = []
        if self._native is not None:
            for row in self._native.recent(path, _RECENT):
                yield row
                read.append(int(row["version"]))
        if len(read) < _RECENT and 0 not in read:
            yield from self._history.recent(path, _RECENT)[len(read) :]

    def leftovers(self, path: str, app_id: str) -> list[str]:
        return self._files.folders(folder_of_sink(path, app_id))

    def discard(self, path: str, app_id: str, name: str) -> None:
        self._files.delete(f"{folder_of_sink(path, app_id)}/{name}")


def _why_unfit(table: TableInfo, staged: Mapping[str, Any]) -> str:
    mode = mode_from_json(staged["mode"])
    schema = staged["schema"]["fields"]
    names = stored_fields(mode, [str(f["name"]) for f in schema])
    stored = [f for f in schema if f["name"] in names]
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
        return CommitAnswer(outcome, facts=_facts(staged, done.version))

    def _lost_unless_committed(
        self, path: str, staged: list[Mapping[str, Any]], version: int, why: str, *, is_final: bool = True
    ) -> CommitAnswer:
        """Answer LOST, proven if the marker says that this checkpoint is not in the table."""
        # This order matters: asked behind the files. Whoever could still commit them would have to find them
        # all, and writes the same marker as a replay, so that only one of the two becomes visible.
        seen = self._commits.committed_version(path, self._app_id)
        if seen is not None and seen >= version:
            mark = self._commits.newest_mark(path, self._app_id)
            if mark is not None:
                self._context.require_ours(mark, CheckpointId(version))
            known = self._commits.version_of(path, self._app_id, version)
            return CommitAnswer(Outcome.ALREADY_COMMITTED, facts=_facts(staged, known))
        return CommitAnswer(Outcome.LOST, why, is_proven_aborted=is_final and seen is not None)

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
        plan = self._plan(target, Lineage(0))
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
        plan = self._plan(target, lineage)
        try:
            match plan:
                case NothingToRestore():
                    return CommitAnswer(Outcome.ALREADY_COMMITTED)
                case NoRestore(why):
                    return CommitAnswer(Outcome.LOST, f"the table {path} cannot be restored: {why}")
                case DeleteRows():
                    self._history.delete_rows(path, note)
                case RestoreVersion(version):
                    self._history.restore(path, version, note)
        except DeltaConflict as error:
            return CommitAnswer(Outcome.RETRY, str(error))
        except DeltaRefused as error:
            return CommitAnswer(Outcome.LOST, f"the table {path} cannot be restored: {error}")
        return CommitAnswer(Outcome.COMMITTED)

    def _plan(self, target: CheckpointId, lineage: Lineage) -> RestorePlan:
        commits = (
            TableCommit(int(row["version"]), str(row["operation"]), str(row["userMetadata"] or ""))
            for row in self._history.commits(self._sink.path)
        )
        return plan_restore(commits, self._context.job, target, lineage)


def _facts(staged: Sequence[Mapping[str, Any]], version: int | None) -> dict[str, Any]:
    facts: dict[str, Any] = {} if version is None else {"version": version}
    facts["rows"] = sum(int(one["rows"]) for one in staged)
    facts["files"] = sum(
        len(one["files"]) if "files" in one else sum("add" in action for action in one["actions"])
        for one in staged
    )
    return facts
