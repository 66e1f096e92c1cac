"""The Delta sink: files are staged per micro-batch and enter the log with the checkpoint.

One table version per checkpoint, however many micro-batches it has, marked with
SetTransaction(appId = job uuid and sink uid, version = checkpoint id): a repeated commit, by this
process or any other, changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from flinkish_spark.bridge import probe
from flinkish_spark.bridge.delta import DeltaConflict, DeltaRefused, DeltaTables
from flinkish_spark.bridge.delta_history import DeltaHistory
from flinkish_spark.bridge.shim import TappedRows
from flinkish_spark.errors import ConfigError, EnvironmentFault, SchemaError
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.protocol.records import Committable, TaskAck
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.columns import quoted
from flinkish_spark.sinks.base import Committer, Sink, SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.sinks.delta_restore import (
    DeleteRows,
    NoRestore,
    NothingToRestore,
    RestorePlan,
    RestoreVersion,
    TableCommit,
    app_id,
    note_of,
    plan_restore,
)
from flinkish_spark.sinks.python_tasks import count_in_python, reports

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SCHEMA_OPTIONS = frozenset({"mergeschema", "overwriteschema", "replacewhere", "partitionoverwritemode"})
#: Control columns in front of the fields, see StageRequest.
_CONTROL_WIDTH = 4


@dataclass(frozen=True)
class DeltaSink(Sink):
    """Append to a Delta table, exactly once.

    Parameters
    ----------
    path
        Absolute path or URI of the table; created with the first checkpoint if it is missing.
    partition_by
        Partition columns.
    options
        Options of Delta's writer, such as ``{"maxRecordsPerFile": "100000"}``. Options that change
        the table's schema are refused: a decided checkpoint could then be refused by the table.

    Examples
    --------
    >>> DeltaSink("/lake/totals", partition_by=("day",)).path
    '/lake/totals'
    """

    path: str
    partition_by: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.options:
            if name.lower() in _SCHEMA_OPTIONS:
                raise ConfigError(
                    f"the Delta option '{name}' cannot be used",
                    why="the schema of the table must be the same at staging and at commit",
                    what_to_do="change the table with ALTER TABLE while the job is stopped",
                )
        if (
            "://" not in self.path
            and not self.path.startswith("file:")
            and not PurePosixPath(self.path).is_absolute()
        ):
            raise ConfigError(
                f"the Delta path {self.path!r} is relative",
                why="it would mean different places in different processes",
                what_to_do="give an absolute path or a URI",
            )

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Let Delta check the schema, by staging no rows."""
        missing = [c for c in self.partition_by if c not in context.schema.names]
        if missing:
            raise SchemaError(
                f"sink '{context.uid}' is partitioned by '{missing[0]}', which its stream does not have",
                what_to_do=f"choose from {', '.join(context.schema.names)}",
            )
        try:
            DeltaTables(spark).check_schema(context.schema, self.path, self.partition_by, self.options)
        except DeltaRefused as error:
            raise SchemaError(
                f"the Delta table {self.path} refuses the stream of sink '{context.uid}'",
                why=str(error).split("\n\n")[0].strip(),
                what_to_do="change the stream's fields, or the table with ALTER TABLE",
                uid=context.uid,
            ) from error

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half."""
        return _DeltaWriter(self, DeltaTables(spark), context, probe(spark).has_shim)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half."""
        return _DeltaCommitter(self, DeltaTables(spark), DeltaHistory(spark), context)


class RowsDifferError(EnvironmentFault):
    """Rows were counted that were not written, or the other way round; the micro-batch is run again."""

    restartable = True


class CountedRows:
    """Stands in for the JAR's row tap: counts in a pass of its own over the kept micro-batch.

    Parameters
    ----------
    rows
        Control columns and fields of a micro-batch.
    """

    def __init__(self, rows: DataFrame) -> None:
        self._rows = rows
        self.records = rows.where(F.col(C.KIND) == int(C.Kind.RECORD))

    def acks(self) -> Sequence[TaskAck]:
        """Return one ack per partition."""
        control = self._rows.select(C.KIND, C.CHECKPOINT, C.CHANNEL, C.HASH)
        return tuple(TaskAck.from_json(report) for report in reports(control, count_in_python))


class _DeltaWriter(SinkWriter):
    passes = 2

    def __init__(self, sink: DeltaSink, tables: DeltaTables, context: SinkContext, has_shim: bool) -> None:
        self._sink, self._tables, self._context = sink, tables, context
        self._has_shim = has_shim

    def stage(self, request: StageRequest) -> StageResult:
        """Write the records' files; the tap in front counts rows and takes the barriers out."""
        tapped = self._tapped(request)
        fields = [F.col(quoted(n)) for n in request.rows.columns[_CONTROL_WIDTH:]]
        if request.count_records() == 0:
            # Spark writes an empty file for an empty DataFrame, which no log would ever name.
            tapped.records.write.format("noop").mode("overwrite").save()
            return StageResult(tuple(tapped.acks()), (), bytes=0)
        staged = self._tables.stage(
            tapped.records.select(*fields), self._sink.path, self._sink.partition_by, self._sink.options
        )
        acks = tuple(tapped.acks())
        self._check_rows(request, acks, staged["actions"])
        size = sum(int(action["add"]["size"]) for action in staged["actions"] if "add" in action)
        return StageResult(acks, ({"path": self._sink.path, **staged},), bytes=size)

    def _tapped(self, request: StageRequest) -> TappedRows | CountedRows:
        if self._has_shim:
            return TappedRows(request.rows, f"flinkish {self._context.uid} batch {request.batch}")
        return CountedRows(request.rows)

    def _check_rows(
        self, request: StageRequest, acks: Sequence[TaskAck], actions: Sequence[Mapping[str, Any]]
    ) -> None:
        """Compare what was counted with what Delta says it wrote."""
        stats = [a["add"].get("stats") for a in actions if "add" in a]
        if not all(stats):
            return
        written = sum(int(json.loads(text).get("numRecords", 0)) for text in stats)
        counted = sum(ack.rows for ack in acks)
        if written != counted:
            raise RowsDifferError(
                f"sink '{self._context.uid}' wrote {written} rows of micro-batch {request.batch}, "
                f"and {counted} were counted",
                why="the micro-batch was evaluated twice with different results",
                what_to_do="make functions deterministic: no clock, no unseeded random",
            )


class _DeltaCommitter(Committer):
    def __init__(
        self, sink: DeltaSink, tables: DeltaTables, history: DeltaHistory, context: SinkContext
    ) -> None:
        self._sink, self._tables, self._history, self._context = sink, tables, history, context
        self._app_id = app_id(context.job, context.uid)

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit all as one table version with the checkpoint's id."""
        if not committables:
            return ()
        path = str(committables[0].payload["path"])
        staged: list[Mapping[str, Any]] = [c.payload for c in committables]
        answer = self._commit(path, staged, int(checkpoint))
        return tuple(answer for _ in committables)

    def _commit(self, path: str, staged: list[Mapping[str, Any]], version: int) -> CommitAnswer:
        if self._tables.committed_version(path, self._app_id) >= version:
            return CommitAnswer(Outcome.ALREADY_COMMITTED)
        missing = [m for s in staged for m in self._tables.missing_files(path, s["actions"])]
        if missing:
            return CommitAnswer(
                Outcome.LOST, f"{len(missing)} staged files are gone from {path}, first {missing[0]}"
            )
        try:
            done = self._tables.commit(path, staged, self._app_id, version)
        except DeltaConflict as error:
            return CommitAnswer(Outcome.RETRY, str(error))
        except DeltaRefused as error:
            return CommitAnswer(Outcome.LOST, f"the table {path} no longer takes the files: {error}")
        return CommitAnswer(Outcome.COMMITTED if done else Outcome.ALREADY_COMMITTED)

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Forget the files: they are in no log, and VACUUM removes them later.

        Not deleted here, because a decision may be unknown to a fenced process.
        """
        return tuple(CommitAnswer(Outcome.COMMITTED, "left to VACUUM") for _ in committables)

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Find committables whose files are gone, or no longer fit the table."""
        dead = {}
        for index, committable in enumerate(committables):
            path = str(committable.payload["path"])
            missing = self._tables.missing_files(path, committable.payload["actions"])
            reason = f"the staged file {missing[0]} is gone" if missing else ""
            reason = reason or self._tables.why_unfit(path, committable.payload)
            if reason:
                dead[index] = f"sink '{self._context.uid}': {reason}"
        return dead

    def why_not_superseded(self, target: CheckpointId) -> str:
        """Ask the table's history who committed since then, and the file system what is left."""
        # No rewind has started this lineage, so no note can be found.
        plan = self._plan(target, Lineage(0))
        why = plan.why if isinstance(plan, NoRestore) else ""
        if isinstance(plan, RestoreVersion):
            missing = self._history.missing_at(self._sink.path, plan.version)
            why = f"the file {missing[0]} of version {plan.version} is gone" if missing else ""
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
            TableCommit(
                int(row["version"]),
                str(row["operation"]),
                {str(k): str(v) for k, v in (row["operationParameters"] or {}).items()},
                str(row["userMetadata"] or ""),
            )
            for row in self._history.commits(self._sink.path)
        )
        return plan_restore(commits, self._context.job, target, lineage)


def require_delta(has_delta: bool) -> None:
    """Raise EnvironmentFault if the session was started without Delta's JARs."""
    if not has_delta:
        raise EnvironmentFault(
            "this Spark session has no Delta Lake",
            what_to_do="start the session with flinkish_spark.configure_spark_with_jars(...)",
        )
