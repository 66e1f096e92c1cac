"""The staging half: tasks write below a hidden folder and report their files, and only these count.

Spark takes the report of one attempt per task. Behind the last one the folder is renamed: whatever a task
that was given up still writes goes to the old name, which nobody reads and the next sweep removes, or into
a file that no report names.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from flinkish_spark.bridge.session import calls_python
from flinkish_spark.connectors.files.disk import Disk, SinkFiles, StagedId
from flinkish_spark.connectors.files.frame_files import FrameFiles, WriteSettings
from flinkish_spark.connectors.files.output_formats import FileFormat, line_condition
from flinkish_spark.connectors.partition_values import folder_conditions, refusing, refusing_others
from flinkish_spark.connectors.row_count import CONTROL_WIDTH
from flinkish_spark.contracts.sink import SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.core.errors import BAD_RECORD_MARKER, EnvironmentFault
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql import types as T


class FilesNotSeenError(EnvironmentFault):
    """Tasks wrote files that the driver does not see."""


class FileWriter(SinkWriter):
    def __init__(
        self,
        files: SinkFiles,
        settings: WriteSettings,
        context: SinkContext,
        disk: Disk,
        spark: SparkSession,
        in_files: T.StructType,
    ) -> None:
        self._files, self._settings, self._context, self._disk = files, settings, context, disk
        self._frames = FrameFiles.of(spark, settings, in_files, settings.bucket_names)
        added = self._added(0)
        nothing = [F.lit(None).cast(one.dataType).alias(one.name) for one in context.schema]
        self._calls_python = bool(added) and calls_python(
            spark.range(1).select(*nothing).select(*added.values())
        )
        self.passes = 2 if self._calls_python else 1

    def stage(self, request: StageRequest) -> StageResult:
        staged = StagedId(self._context.owner_epoch, request.block, uuid.uuid4().hex[:8])
        folder = self._files.in_progress / str(staged)
        self._disk.make_folder(folder)
        found = self._frames.write(self._placed(request.rows), folder)
        acks = tuple(TaskAck.from_json(report) for report in found)
        files = [file for report in found for file in report["files"]]
        if not files:
            self._disk.remove_tree(folder)
            return StageResult(acks, (), bytes=0)
        self._check_seen(folder, files)
        self._make_pending(folder, files)
        size = sum(file["bytes"] for file in files)
        payload = {
            "root": str(self._files.root),
            "staged": folder.name,
            "rows": sum(ack.rows for ack in acks),
            "bytes": size,
            "files": files,
        }
        return StageResult(acks, (payload,), bytes=size)

    def _placed(self, rows: DataFrame) -> DataFrame:
        """Return rows with the columns of all folders; it fails at a record that has none."""
        added = self._added(self._context.clock.wall_ms())
        is_record = F.col(C.KIND) == int(C.Kind.RECORD)
        fields = [F.col(quoted(name)) for name in rows.columns]
        # An expression of the user's sees records only.
        columns = [F.when(is_record, column).alias(name) for name, column in added.items()]
        if self._calls_python:
            # Spark calls Python before it looks at any condition but a filter's.
            placed = rows.where(is_record).select(*fields, *columns)
            placed = placed.unionByName(rows.where(~is_record), allowMissingColumns=True)
        else:
            placed = rows.select(*fields, *columns)
        return self._refusing(placed, added)

    def _added(self, now_ms: int) -> dict[str, Column]:
        added: dict[str, Column] = {}
        for one in self._settings.assigners:
            added.update(one.columns(now_ms))
        return added

    def _refusing(self, rows: DataFrame, added: Mapping[str, Column]) -> DataFrame:
        # Fields that are folders are in no file; what an assigner makes is beside the fields that it is of.
        only_in_names = [name for name in self._settings.bucket_names if name not in added]
        marker = f"{BAD_RECORD_MARKER} in sink '{self._context.uid}',"
        shown = rows.columns[CONTROL_WIDTH:]
        rows = refusing(rows, only_in_names, marker, shown)
        rows = refusing_others(rows, folder_conditions(rows, added), marker, shown)
        if self._settings.kind is FileFormat.TEXT:
            texts = self._frames.fields.names
            conditions = [line_condition(name, self._settings.options) for name in texts]
            rows = refusing_others(rows, conditions, marker, shown)
        return rows

    def _check_seen(self, folder: Path, files: Sequence[Mapping[str, Any]]) -> None:
        for file in files:
            path = folder / file["name"]
            if not self._disk.exists(path) or self._disk.size(path) != file["bytes"]:
                raise FilesNotSeenError(
                    f"sink '{self._context.uid}' wrote {path}, and it is not there as it was written",
                    why="the executors write to another file system than the driver looks at",
                    what_to_do="choose a path that all machines mount",
                    uid=self._context.uid,
                )

    def _make_pending(self, folder: Path, files: Sequence[Mapping[str, Any]]) -> None:
        # Each task has synced its files. Up to and with the folder itself: a name that a power cut takes away
        # is a file that is gone.
        paths = [folder / file["name"] for file in files]
        parents = {parent for path in paths for parent in path.parents if parent.is_relative_to(folder)}
        self._disk.sync_folders(sorted(parents))
        self._disk.make_folder(self._files.pending)
        self._disk.rename(folder, self._files.pending / folder.name)
        self._disk.sync_folders([self._files.in_progress, self._files.pending])
