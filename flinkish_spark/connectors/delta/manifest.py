"""A manifest in a small Delta table: one row per checkpoint, by Delta's own idempotency marker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pyspark.sql import types as T

from flinkish_spark.connectors.delta.table import Append, checkpoint_note, mark_in
from flinkish_spark.connectors.delta.transactions import DeltaConflict, DeltaRefused, DeltaTables
from flinkish_spark.contracts.manifest import Manifest, ManifestContext, ManifestWriter
from flinkish_spark.contracts.sink import another_timeline
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.validation import hold_plain_values
from flinkish_spark.protocol.decisions import ManifestRecord
from flinkish_spark.protocol.durations import PathText
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import CommitAnswer, Outcome
from flinkish_spark.protocol.timeline import Mark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


#: `facts` is JSON: each kind of sink says what it can.
_SHARE = "STRUCT<rows: BIGINT, dropped: BIGINT, dead_lettered: BIGINT, facts: STRING>"
SCHEMA = (
    "job STRING, job_name STRING, checkpoint BIGINT, lineage BIGINT, log_began_in BIGINT, "
    "first_batch BIGINT, last_batch BIGINT, decided_at TIMESTAMP, purpose STRING, "
    f"sinks MAP<STRING, {_SHARE}>, offsets MAP<STRING, MAP<INT, BIGINT>>"
)
#: How many commits of the table are looked at for the token of the job's newest one.
_RECENT = 20
_COUNTERS = ("checkpoint", "lineage", "log_began_in", "first_batch", "last_batch")


@dataclass(frozen=True)
class DeltaManifest(Manifest):
    """Write a row per confirmed checkpoint to a Delta table.

    Parameters
    ----------
    path
        Absolute path or URI; made with the first checkpoint if it is missing. Several jobs may share it.

    Examples
    --------
    Read what the newest whole checkpoint shows of a Delta sink ``totals``:

    >>> newest = "SELECT max_by(sinks['totals'].facts, checkpoint) FROM delta.`/lake/checkpoints`"
    >>> DeltaManifest("/lake/checkpoints").path
    '/lake/checkpoints'
    """

    path: PathText

    def __post_init__(self) -> None:
        hold_plain_values(self)
        is_absolute = "://" in self.path or self.path.startswith("file:")
        if not is_absolute and not PurePosixPath(self.path).is_absolute():
            raise ConfigError(
                f"the manifest's path {self.path!r} is relative",
                why="it would mean different places in different processes",
                what_to_do="give an absolute path or a URI",
            )

    @property
    def needs_delta(self) -> bool:
        """It is a Delta table."""
        return True

    def preflight(self, spark: SparkSession, context: ManifestContext) -> None:
        """Refuse a table that has other columns."""
        try:
            DeltaTables(spark).check_schema(_schema(), self.path, (), {})
        except DeltaRefused as error:
            raise SchemaError(
                f"the Delta table {self.path} is no manifest",
                why=str(error).split("\n\n")[0].strip(),
                what_to_do="name another path; the table is made with the first checkpoint",
            ) from error

    def create_writer(self, spark: SparkSession, context: ManifestContext) -> ManifestWriter:
        """Return the writer."""
        return _DeltaManifestWriter(spark, self.path, context)


class _DeltaManifestWriter(ManifestWriter):
    def __init__(self, spark: SparkSession, path: str, context: ManifestContext) -> None:
        self._spark, self._path, self._context = spark, path, context
        self._tables = DeltaTables(spark)
        self._app_id = f"flinkish-manifest-{context.job}"

    def write(self, record: ManifestRecord) -> CommitAnswer:
        version, mark = int(record.checkpoint), self._context.timeline.mark_of(record.checkpoint)
        if self._tables.committed_version(self._path, self._app_id) >= version:
            self._check(record.checkpoint)
            return CommitAnswer(Outcome.ALREADY_COMMITTED)
        row = self._row(record)
        staged = self._tables.stage(row, self._path, (), {}, lambda table: row)
        try:
            if staged is None:
                return CommitAnswer(Outcome.RETRY, f"the table {self._path} takes no row now")
            staged = {"mode": Append().to_json(), "schema": row.schema.jsonValue(), **staged}
            note = checkpoint_note(self._app_id, mark)
            done = self._tables.commit(
                self._path, [staged], self._app_id, version, note, lambda seen: self._check(record.checkpoint)
            )
        except DeltaConflict as error:
            return CommitAnswer(Outcome.RETRY, str(error))
        return CommitAnswer(Outcome.ALREADY_COMMITTED if done is None else Outcome.COMMITTED)

    def newest_marks(self) -> Sequence[Mark]:
        version = self._tables.committed_version(self._path, self._app_id)
        if version < 0:
            return ()
        for row in self._tables.recent(self._path, _RECENT):
            mark = mark_in(str(row["userMetadata"] or ""), self._app_id)
            if mark is not None:
                return (mark,)
        return (Mark(CheckpointId(version)),)

    def _check(self, checkpoint: CheckpointId) -> None:
        for mark in self.newest_marks():
            why = self._context.timeline.why_not_ours(mark, checkpoint)
            if why:
                raise another_timeline("the manifest", mark, checkpoint, why)

    def _row(self, record: ManifestRecord) -> DataFrame:
        context, stored = self._context, record.to_json()
        shares = {
            uid: {**share, "facts": json.dumps(share["facts"])} for uid, share in stored["sinks"].items()
        }
        head = [str(context.job), context.job_name]
        counters = [stored[name] for name in _COUNTERS]
        values = [*head, *counters, record.decided_at_ms, stored["purpose"], shares, dict(record.offsets)]
        # The time as a number: Python's own would be taken for one of the session's time zone.
        plain = SCHEMA.replace("decided_at TIMESTAMP", "decided_at BIGINT")
        row = self._spark.createDataFrame([tuple(values)], plain).coalesce(1)
        return row.selectExpr(*[_as_it_is(name) for name in row.columns])


def _as_it_is(name: str) -> str:
    return f"timestamp_millis({name}) AS {name}" if name == "decided_at" else name


def _schema() -> T.StructType:
    from flinkish_spark.types.ddl import parse_ddl

    parsed = parse_ddl(SCHEMA)
    assert isinstance(parsed, T.StructType)
    return parsed
