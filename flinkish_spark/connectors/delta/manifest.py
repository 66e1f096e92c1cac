"""A manifest in a small Delta table: one row per checkpoint, by Delta's own idempotency marker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.connectors.delta.sink_settings import check_creates, check_path
from flinkish_spark.connectors.delta.table import (
    DeltaConflict,
    DeltaTableError,
    SchemaEvolution,
    TableInfo,
    checkpoint_note,
    why_by_spark,
    why_unfit,
)
from flinkish_spark.connectors.delta.tables import DeltaTables, Marker, find_last_version, info_of
from flinkish_spark.connectors.delta.writer import FilesToWrite, stats_columns
from flinkish_spark.connectors.write_modes import Append
from flinkish_spark.contracts.manifest import Manifest, ManifestContext, ManifestWriter
from flinkish_spark.contracts.sink import require_ours
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.core.fields import check_fields
from flinkish_spark.protocol.decisions import ManifestRecord
from flinkish_spark.protocol.durations import PathText
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import CommitAnswer, Outcome
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.types.arrow_types import arrow_type

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


#: `facts` is JSON: each kind of sink has its own.
_SHARE = "STRUCT<rows: BIGINT, dropped: BIGINT, dead_lettered: BIGINT, facts: STRING>"
SCHEMA = (
    "job STRING, job_name STRING, checkpoint BIGINT, lineage BIGINT, log_began_in BIGINT, "
    "first_batch BIGINT, last_batch BIGINT, decided_at TIMESTAMP, purpose STRING, "
    f"sinks MAP<STRING, {_SHARE}>, offsets MAP<STRING, MAP<INT, BIGINT>>"
)
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
        check_fields(self)
        check_path("the manifest's path", self.path)

    def preflight(self, spark: SparkSession, context: ManifestContext) -> None:
        """Refuse a table that has other columns, or whose store would lose commits."""
        try:
            info = DeltaTables().info(self.path)
            why = "" if info is None else _why_unfit(info)
        except DeltaTableError as error:
            why = str(error)
        if why:
            raise SchemaError(
                f"the Delta table {self.path} is no manifest",
                why=why,
                what_to_do="name another path; the table is made with the first checkpoint",
            )
        check_creates(self.path, {}, "a manifest")

    def create_writer(self, spark: SparkSession, context: ManifestContext) -> ManifestWriter:
        """Return the writer."""
        return _DeltaManifestWriter(self.path, context)


class _DeltaManifestWriter(ManifestWriter):
    def __init__(self, path: str, context: ManifestContext) -> None:
        self._path, self._context = path, context
        self._tables = DeltaTables()
        self._app_id = f"flinkish-manifest-{context.job}"

    def write(self, record: ManifestRecord) -> CommitAnswer:
        version, mark = int(record.checkpoint), self._context.timeline.mark_of(record.checkpoint)
        table = self._tables.open(self._path)
        if table is not None and find_last_version(table, self._app_id) >= 0:
            self._require_ours(record.checkpoint)
            if find_last_version(table, self._app_id) >= version:
                return self._finish(Outcome.ALREADY_COMMITTED, version)
        info = None if table is None else info_of(table)
        if info is not None and (why := _why_unfit(info)):
            return CommitAnswer(Outcome.RETRY, f"the table {self._path} takes no row now: {why}")
        schema = _schema()
        metadata = {"schemaString": schema.json(), "partitionColumns": [], "configuration": {}}
        made = TableInfo.from_log({"metaData": metadata})
        target = FilesToWrite(
            self._tables.files(self._path),
            with_stats=stats_columns(made.fields, {} if info is None else info.properties),
        )
        adds = target.write([self._row(record)], 0)
        marker = Marker(self._app_id, version, checkpoint_note(self._app_id, mark))
        try:
            if table is None:
                self._tables.create(self._path, metadata, adds, marker)
            else:
                self._tables.append(self._path, table, adds, marker)
        except DeltaConflict as error:
            return CommitAnswer(Outcome.RETRY, str(error))
        return self._finish(Outcome.COMMITTED, version)

    def _finish(self, outcome: Outcome, version: int) -> CommitAnswer:
        self._tables.make_durable(self._path, self._app_id, version)
        return CommitAnswer(outcome)

    def newest_marks(self) -> Sequence[Mark]:
        mark = self._tables.newest_mark(self._path, self._app_id)
        return () if mark is None else (mark,)

    def _require_ours(self, checkpoint: CheckpointId) -> None:
        for mark in self.newest_marks():
            require_ours(self._context.timeline, "the manifest", mark, checkpoint)

    def _row(self, record: ManifestRecord) -> pa.RecordBatch:
        context, stored = self._context, record.to_json()
        shares = {
            uid: {**share, "facts": json.dumps(share["facts"])} for uid, share in stored["sinks"].items()
        }
        row = {
            "job": str(context.job),
            "job_name": context.job_name,
            **{name: stored[name] for name in _COUNTERS},
            "decided_at": datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=record.decided_at_ms),
            "purpose": stored["purpose"],
            "sinks": list(shares.items()),
            "offsets": [(topic, list(places.items())) for topic, places in record.offsets.items()],
        }
        fields = pa.schema([pa.field(one.name, arrow_type(one.dataType)) for one in _schema()])
        return pa.RecordBatch.from_pylist([row], fields)


def _why_unfit(info: TableInfo) -> str:
    if why := why_unfit(info, Append(), _schema().jsonValue()["fields"], SchemaEvolution.NONE):
        return why
    if why := why_by_spark(info, Append()):
        return f"delta-rs does not know {why}"
    rules = info.rules()
    strict = next((kind for kind in rules if rules[kind]), "")
    if strict or info.partition_by or info.physical_name("job") != "job":
        return "it has rules, partitions or a mapping of its columns"
    return ""


def _schema() -> T.StructType:
    from flinkish_spark.types.ddl import parse_ddl

    parsed = parse_ddl(SCHEMA)
    assert isinstance(parsed, T.StructType)
    return parsed
