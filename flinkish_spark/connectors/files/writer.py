"""The writer of the file sink: tasks write files below a hidden folder and report them; only these count.

Spark takes the report of one attempt per task. After the last one the folder is renamed: an abandoned task
that still writes does so under the old name, which no reader uses and the next sweep removes, or to a file
that no report names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.session import avro_schema_of, calls_python
from flinkish_spark.connectors.files.buckets import BucketAssigner
from flinkish_spark.connectors.files.disk import Disk, SinkFiles
from flinkish_spark.connectors.files.output_formats import (
    CODECS,
    CODECS_OF_LINES,
    OF_PARQUET,
    FileFormat,
    codec_of,
    line_condition,
    lower_names,
    parse_option,
)
from flinkish_spark.connectors.files.task_files import FOLDER, RECORD, FileSettings, FilesWork, LineTexts
from flinkish_spark.connectors.partition_values import (
    check_conditions,
    folder_conditions,
    partition_conditions,
)
from flinkish_spark.connectors.row_count import CONTROL_WIDTH, collect_reports
from flinkish_spark.connectors.staged_ids import StagedId
from flinkish_spark.connectors.task_staging import JoiningWriter, StageInTasks, StagePlan
from flinkish_spark.contracts.sink import SinkContext, StageRequest, StageResult
from flinkish_spark.core.errors import BAD_RECORD_MARKER, EnvironmentFault
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.json_columns import has_intervals, replace_intervals

AVRO_SCHEMA = "avro.schema"


@dataclass(frozen=True)
class FrameFiles:
    """Writes a frame by tasks, each record to the folder that its folder columns name."""

    settings: FileSettings
    #: Fields of the files: without folder columns, and without columns that are left out.
    fields: T.StructType

    @classmethod
    def of(
        cls,
        spark: SparkSession,
        kind: FileFormat,
        options: Mapping[str, str],
        fields: T.StructType,
        folders: tuple[str, ...],
        part_bytes: int | None = None,
    ) -> FrameFiles:
        """Return the writer of such fields; missing options are taken from the session.

        `folders` are columns, outermost first.
        """
        found, says = lower_names(options), {"org.apache.spark.version": spark.version}
        codec, texts, more = codec_of(kind, found), None, dict[str, Any]()
        if kind.is_lines:
            texts = LineTexts(kind, options, fields)
            extension = ".txt" if kind is FileFormat.TEXT else f".{kind.value}"
            extension += CODECS_OF_LINES[codec or "none"]
        else:
            codec = codec or session_codec(spark, kind) or "snappy"
            extension = f"{CODECS[kind][codec]}.{kind.value}"
        if kind is FileFormat.AVRO:
            name, namespace = found.get("recordname", "topLevelRecord"), found.get("recordnamespace", "")
            says[AVRO_SCHEMA] = avro_schema_of(spark, fields, name, namespace)
        elif kind is FileFormat.PARQUET:
            says["org.apache.spark.sql.parquet.row.metadata"] = fields.json()
            given = {
                to: parse_option(name, found[name]) for name, (to, _) in OF_PARQUET.items() if name in found
            }
            more = {"group_bytes": given.pop("")} if "" in given else {}
            more["parquet"] = {**given, "store_decimal_as_integer": True}
        none = "none" if kind is FileFormat.PARQUET else ""
        packed = none if codec in (None, "none", "uncompressed") else str(codec).removesuffix("_raw")
        settings = FileSettings(kind, packed, extension, folders, part_bytes, texts, says, **more)
        return cls(settings, fields)

    @property
    def takes_fields(self) -> bool:
        """Return whether tasks can write the fields as they are."""
        is_plain = self.settings.kind not in (FileFormat.AVRO, FileFormat.TEXT)
        return (
            is_plain
            and not self.settings.folders
            and not any(has_intervals(one.dataType) for one in self.fields)
        )

    def write(self, rows: DataFrame, folder: Path) -> Sequence[dict[str, Any]]:
        """Write rows, which begin with a sink's control columns; return each task's report."""
        return collect_reports(self.select(rows), StageInTasks((FilesWork(self.settings, str(folder)),)))

    def select(self, rows: DataFrame) -> DataFrame:
        """Return rows with the columns that tasks write, sorted by folder."""
        is_record, folders = F.col(C.KIND) == int(C.Kind.RECORD), self.settings.folders
        records = {one.name: F.col(quote_name(one.name)) for one in self.fields}
        if self.settings.kind is FileFormat.AVRO:
            struct = F.struct(*(column.alias(name) for name, column in records.items()))
            records = {RECORD: F.call_function("to_avro", struct, F.lit(self.settings.says[AVRO_SCHEMA]))}
        else:
            # PySpark has no Arrow type for an interval of months, and Parquet stores it as a number.
            records = {one.name: replace_intervals(records[one.name], one.dataType) for one in self.fields}
        # A control row is not converted: it has no values, and a format may have no nulls.
        made = [F.when(is_record, column).alias(name) for name, column in records.items()]
        # An empty text has the folder of null.
        texts = [F.coalesce(F.col(quote_name(name)).cast("string"), F.lit("")) for name in folders]
        places = [text.alias(f"{FOLDER}{at}") for at, text in enumerate(texts)]
        frame = rows.select(*(F.col(name) for name in C.SINK_CONTROL), *made, *places)
        if places:
            # One file at a time is open in a task, however many folders there are.
            frame = frame.sortWithinPartitions(*(f"{FOLDER}{at}" for at in range(len(places))))
        return frame


def _make_nulls(fields: T.StructType) -> list[Column]:
    return [F.lit(None).cast(one.dataType).alias(one.name) for one in fields]


def session_codec(spark: SparkSession, kind: FileFormat) -> str | None:
    found = None if kind.is_lines else spark.conf.get(f"spark.sql.{kind.value}.compression.codec", None)
    return None if found is None else found.lower()


class FileWriter(JoiningWriter):
    def __init__(
        self,
        files: SinkFiles,
        frames: FrameFiles,
        assigners: Sequence[BucketAssigner],
        context: SinkContext,
        disk: Disk,
        spark: SparkSession,
    ) -> None:
        self._files, self._frames, self._assigners = files, frames, assigners
        self._context, self._disk = context, disk
        added = self._make_folder_columns(0)
        self._calls_python = bool(added) and calls_python(
            spark.range(1).select(*_make_nulls(context.schema)).select(*added.values())
        )
        self.passes = 2 if self._calls_python else 1

    def plan(self, request: StageRequest) -> StagePlan:
        """Plan files below a hidden folder; Spark prepares rows that name folders or have no Arrow type."""
        folder = self._files.in_progress / str(StagedId.new(self._context.owner_epoch, request.block))
        self._disk.make_folder(folder)
        work = FilesWork(self._frames.settings, str(folder))
        select = None if self._frames.takes_fields else self._select
        return StagePlan(work, partial(self._finish, folder), select)

    def _select(self, rows: DataFrame) -> DataFrame:
        return self._frames.select(self._add_folder_columns(rows))

    def _finish(self, folder: Path, found: Sequence[Mapping[str, Any]]) -> StageResult:
        acks = tuple(TaskAck.from_json(report) for report in found)
        files = [file for report in found for file in report["files"]]
        if not files:
            self._disk.remove_tree(folder)
            return StageResult(acks, (), bytes=0)
        paths = {folder / file["name"]: file["bytes"] for file in files}
        for path, size in paths.items():
            if not self._disk.exists(path) or self._disk.size(path) != size:
                raise EnvironmentFault(
                    f"sink '{self._context.uid}' wrote {path}, and it is not there as it was written",
                    why="the executors write to another file system than the driver looks at",
                    what_to_do="choose a path that all machines mount",
                )
        # Each task has synced its files. Up to and with the folder itself: a name that a power cut takes away
        # is a file that is gone.
        parents = {parent for path in paths for parent in path.parents if parent.is_relative_to(folder)}
        self._disk.sync_folders(sorted(parents))
        self._disk.make_folder(self._files.pending)
        self._disk.rename(folder, self._files.pending / folder.name)
        self._disk.sync_folders([self._files.in_progress, self._files.pending])
        size = sum(file["bytes"] for file in files)
        payload = {
            "root": str(self._files.root),
            "staged": folder.name,
            "rows": sum(ack.rows for ack in acks),
            "bytes": size,
            "files": files,
        }
        return StageResult(acks, (payload,), bytes=size)

    def _add_folder_columns(self, rows: DataFrame) -> DataFrame:
        """Return rows with the columns of all bucket folders; a record without a value fails the task."""
        added = self._make_folder_columns(self._context.clock.wall_ms())
        is_record = F.col(C.KIND) == int(C.Kind.RECORD)
        fields = [F.col(quote_name(name)) for name in rows.columns]
        # A user's expression gets records only, no control rows.
        columns = [F.when(is_record, column).alias(name) for name, column in added.items()]
        if self._calls_python:
            # Spark calls Python before it evaluates any condition but a filter.
            placed = rows.where(is_record).select(*fields, *columns)
            placed = placed.unionByName(rows.where(~is_record), allowMissingColumns=True)
        else:
            placed = rows.select(*fields, *columns)
        return self._refusing(placed, added)

    def _make_folder_columns(self, now_ms: int) -> dict[str, Column]:
        added: dict[str, Column] = {}
        for one in self._assigners:
            added.update(one.columns(now_ms))
        return added

    def _refusing(self, rows: DataFrame, added: Mapping[str, Column]) -> DataFrame:
        # A field that is a folder is in no file; a column that an assigner adds is beside its field.
        only_in_names = [name for name in self._frames.settings.folders if name not in added]
        marker = f"{BAD_RECORD_MARKER} in sink '{self._context.uid}',"
        shown = rows.columns[CONTROL_WIDTH:]
        rows = check_conditions(rows, partition_conditions(rows, only_in_names), marker, shown)
        rows = check_conditions(rows, folder_conditions(rows, added), marker, shown)
        texts = self._frames.settings.texts
        if texts is not None and texts.kind is FileFormat.TEXT:
            conditions = [line_condition(name, texts.options) for name in texts.fields.names]
            rows = check_conditions(rows, conditions, marker, shown)
        return rows
