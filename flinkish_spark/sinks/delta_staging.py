"""The staging half of a Delta sink: data files where they will stay, or rows that wait in a folder."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from flinkish_spark.bridge.delta import DeltaTables
from flinkish_spark.bridge.delta_alignment import aligned_columns
from flinkish_spark.bridge.delta_errors import VIOLATION_MARKER, DeltaRefused, DeltaViolated
from flinkish_spark.bridge.delta_files import TableFiles
from flinkish_spark.bridge.delta_rows import DeltaRows
from flinkish_spark.bridge.delta_staged_rows import write_rows
from flinkish_spark.bridge.shim import TappedRows
from flinkish_spark.errors import BadRecordError, EnvironmentFault, SchemaError
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.columns import quoted
from flinkish_spark.sinks.base import SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.sinks.delta_folders import StagedFolder, folder_of_sink
from flinkish_spark.sinks.delta_modes import OverwritePartitions, Upsert
from flinkish_spark.sinks.delta_restore import app_id
from flinkish_spark.sinks.delta_sink_settings import DeltaSinkSettings
from flinkish_spark.sinks.delta_table import TableInfo, fit
from flinkish_spark.sinks.partition_values import refusing
from flinkish_spark.sinks.python_tasks import count_in_python, reports

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


#: Control columns in front of the fields, see StageRequest.
_CONTROL_WIDTH = 4


class RowsDifferError(EnvironmentFault):
    """Rows were counted that were not written, or the other way round; the micro-batch is run again."""

    restartable = True
    ends_when_repeated = True


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


class StagingTools:
    """What a writer stages with.

    Parameters
    ----------
    native
        Delta's transactions; None to stage rows always.
    has_shim
        Whether tasks can count rows while they write them.
    """

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
        """Write the records; the tap in front counts rows and takes the barriers out.

        Raises
        ------
        BadRecordError
            A record breaks a rule of the table, or has a null key.
        SchemaError
            The table was changed so that it does not take the stream.
        """
        tapped = self._tapped(request)
        fields = [F.col(quoted(n)) for n in request.rows.columns[_CONTROL_WIDTH:]]
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
        """Compare what was counted with what Delta says it wrote."""
        stats = [a["add"].get("stats") for a in staged.get("actions", ()) if "add" in a]
        if not stats or not all(stats):
            return
        written = sum(int(json.loads(text).get("numRecords", 0)) for text in stats)
        if written != counted:
            raise RowsDifferError(
                f"sink '{self._context.uid}' wrote {written} rows of micro-batch {request.batch}, "
                f"and {counted} were counted",
                why="the micro-batch was evaluated twice with different results",
                what_to_do="make functions deterministic: no clock, no unseeded random",
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
