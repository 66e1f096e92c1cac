"""The staging half: Spark's own writers write, below a hidden folder, and the driver lists what counts.

Spark commits one attempt per task. Its write job has succeeded before the folder is listed, and only
what is listed then enters the committable. The folder is renamed before that: whatever a task that
was given up still writes goes to the old name, which nobody reads and the next sweep removes.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from flinkish_spark.bridge.shim import TappedRows
from flinkish_spark.connectors.files.buckets import BucketAssigner
from flinkish_spark.connectors.files.disk import Disk, SinkFiles, StagedId, is_hidden, task_file
from flinkish_spark.connectors.files.output_formats import FileFormat, exact_options, line_condition
from flinkish_spark.connectors.partition_values import folder_conditions, refusing, refusing_others
from flinkish_spark.connectors.row_count import CONTROL_WIDTH, CountedRows, RowsDifferError
from flinkish_spark.contracts.sink import SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.core.errors import BAD_RECORD_MARKER, MAKE_DETERMINISTIC, EnvironmentFault
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.types.ddl import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


LOG = logging.getLogger(__name__)
#: How much larger than wanted a file may be before the micro-batch is written again.
_TOLERANCE = 1.5
#: How often at most: sizes per record are known better each time.
_TRIES = 3


class FilesNotSeenError(EnvironmentFault):
    """Tasks wrote files that the driver does not see."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file of a task that succeeded: its path relative to the staging folder, and its size."""

    name: str
    task: int
    bytes: int
    rows: int | None

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.bytes, "rows": self.rows}


@dataclass(frozen=True)
class WriteSettings:
    kind: FileFormat
    options: Mapping[str, str]
    assigners: tuple[BucketAssigner, ...]
    #: Above which a file is split; None for no limit.
    part_bytes: int | None

    @property
    def bucket_names(self) -> tuple[str, ...]:
        return tuple(name for one in self.assigners for name in one.names)


class FileWriter(SinkWriter):
    def __init__(
        self, files: SinkFiles, settings: WriteSettings, context: SinkContext, disk: Disk, has_shim: bool
    ) -> None:
        self._files, self._settings, self._context = files, settings, context
        self._disk, self._has_shim = disk, has_shim
        # A micro-batch whose files turn out too large is written again, from the same rows.
        self.passes = 1 if has_shim and settings.part_bytes is None else 2
        #: Of the newest files that were large enough to tell; None before there was one.
        self._bytes_per_row: float | None = None

    def stage(self, request: StageRequest) -> StageResult:
        for _ in range(_TRIES - 1):
            staged = self._Attempt(self, request)
            if not self._is_too_large(staged.found, staged.acks):
                break
            LOG.info("micro-batch %s is written again with smaller files", request.batch)
            self._disk.remove_tree(staged.folder)
        else:
            staged = self._Attempt(self, request)
        rows = sum(ack.rows for ack in staged.acks)
        self._check(request, staged.acks, staged.found)
        if not staged.found:
            self._disk.remove_tree(staged.folder)
            return StageResult(staged.acks, (), bytes=0)
        self._make_pending(staged.folder, staged.found)
        size = sum(file.bytes for file in staged.found)
        payload = {
            "root": str(self._files.root),
            "staged": staged.folder.name,
            "rows": rows,
            "bytes": size,
            "files": [file.to_json() for file in staged.found],
        }
        return StageResult(staged.acks, (payload,), bytes=size)

    class _Attempt:
        """One time writing a micro-batch: the folder, what is in it, and what the tasks saw."""

        def __init__(self, writer: FileWriter, request: StageRequest) -> None:
            staged = StagedId(writer._context.owner_epoch, request.block, uuid.uuid4().hex[:8])
            self.folder = writer._files.in_progress / str(staged)
            writer._disk.make_folder(self.folder.parent)
            tapped = writer._tapped(request)
            writer._write(tapped.records, request, self.folder)
            self.acks: tuple[TaskAck, ...] = tuple(tapped.acks())
            self.found = writer._listed(self.folder, self.acks)

    def _tapped(self, request: StageRequest) -> TappedRows | CountedRows:
        if self._has_shim:
            return TappedRows(request.rows, f"flinkish {self._context.uid} batch {request.batch}")
        return CountedRows(request.rows)

    def _write(self, records: DataFrame, request: StageRequest, folder: Path) -> None:
        added: dict[str, Column] = {}
        for one in self._settings.assigners:
            added.update(one.columns(self._context.clock.wall_ms()))
        fields = [F.col(quoted(name)) for name in request.rows.columns[CONTROL_WIDTH:]]
        rows = records.select(*fields, *(column.alias(name) for name, column in added.items()))
        # Fields that are folders are in no file; what an assigner makes is beside the fields that it is of.
        only_in_names = [name for name in self._settings.bucket_names if name not in added]
        marker = f"{BAD_RECORD_MARKER} in sink '{self._context.uid}',"
        rows = refusing(rows, only_in_names, marker)
        rows = refusing_others(rows, folder_conditions(rows, added), marker)
        kind = self._settings.kind
        if kind is FileFormat.TEXT:
            left_out = {name.lower() for name in self._settings.bucket_names}
            texts = [name for name in rows.columns if name.lower() not in left_out]
            conditions = [line_condition(name, self._settings.options) for name in texts]
            rows = refusing_others(rows, conditions, marker)
        # A user's own options go before ours, in whatever case he writes them.
        writer = (
            rows.write.format(kind.value).options(**exact_options(kind)).options(**self._settings.options)
        )
        writer = writer.option("maxRecordsPerFile", self._records_per_file())
        if self._settings.bucket_names:
            writer = writer.partitionBy(*self._settings.bucket_names)
        # With its scheme: without, the path could mean another file system of the cluster.
        writer.save(f"file://{folder}")

    def _records_per_file(self) -> int:
        if self._settings.part_bytes is None or self._bytes_per_row is None:
            return 0
        return max(1, int(self._settings.part_bytes / self._bytes_per_row))

    def _listed(self, folder: Path, acks: Sequence[TaskAck]) -> tuple[StagedFile, ...]:
        """Return the files with records in them; Spark writes one for an empty micro-batch, too."""
        rows = {ack.partition: ack.rows for ack in acks}
        found: list[tuple[str, int, int]] = []
        for path in self._disk.files_below(folder):
            relative = path.relative_to(folder)
            task = task_file(path.name)
            if task is None or any(is_hidden(part) for part in relative.parts) or rows.get(task[0], 1) == 0:
                continue
            found.append((str(relative), task[0], self._disk.size(path)))
        of_task = Counter(task for _, task, _ in found)
        return tuple(
            StagedFile(
                name, task, size, self._rows(folder / name, rows.get(task) if of_task[task] == 1 else None)
            )
            for name, task, size in found
        )

    def _rows(self, path: Path, of_task: int | None) -> int | None:
        if self._settings.kind is FileFormat.PARQUET:
            import pyarrow.parquet as pq

            return int(pq.read_metadata(path).num_rows)
        return of_task

    def _is_too_large(self, found: Sequence[StagedFile], acks: Sequence[TaskAck]) -> bool:
        """Compare with the wanted size, and note bytes per record where files are large enough to tell."""
        limit = self._settings.part_bytes
        largest = max((file.bytes for file in found), default=0)
        if limit is None or largest < limit / 4:
            return False
        rows = sum(ack.rows for ack in acks)
        known = [f.bytes / f.rows for f in found if f.rows and f.bytes >= limit / 4]
        self._bytes_per_row = max(known) if known else sum(f.bytes for f in found) / max(1, rows)
        return largest > limit * _TOLERANCE and rows > 1

    def _check(self, request: StageRequest, acks: Sequence[TaskAck], found: Sequence[StagedFile]) -> None:
        folder = self._files.in_progress
        counted = sum(ack.rows for ack in acks)
        if counted and not found:
            raise FilesNotSeenError(
                f"sink '{self._context.uid}' wrote {counted} records and no file is in {folder}",
                why="the executors write to another file system than the driver looks at",
                what_to_do="choose a path that all machines mount",
                uid=self._context.uid,
            )
        known = [file.rows for file in found if file.rows is not None]
        if len(known) == len(found) and sum(known) != counted:
            raise RowsDifferError(
                f"sink '{self._context.uid}' wrote {sum(known)} rows of micro-batch {request.batch}, "
                f"and {counted} were counted",
                why="the micro-batch was evaluated twice with different results",
                what_to_do=MAKE_DETERMINISTIC,
            )

    def _make_pending(self, folder: Path, found: Sequence[StagedFile]) -> None:
        paths = [folder / file.name for file in found]
        self._disk.sync_files(paths)
        # Up to and with the folder itself: a name that a power cut takes away is a file that is gone.
        parents = {parent for path in paths for parent in path.parents if parent.is_relative_to(folder)}
        self._disk.sync_folders(sorted(parents))
        self._disk.make_folder(self._files.pending)
        self._disk.rename(folder, self._files.pending / folder.name)
        self._disk.sync_folders([self._files.in_progress, self._files.pending])
