"""The write-ahead buffer: base of sinks whose system cannot keep a transaction open until the checkpoint.

Each task stages its rows in a durable file of the buffer that no reader sees. The commit of a checkpoint
reads its files in order and writes all rows to the system at once. The sweep after the receipt deletes the
files: until the receipt the commit may be repeated, by this process or another.

The result is as exact as :meth:`BufferedCommitter.apply`: a system that keeps the id of the last checkpoint
in the same transaction as its rows gets each row exactly once; any other gets it at least once.
"""

from __future__ import annotations

import enum
import hashlib
import os
import re
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from flinkish_spark.connectors.row_count import CONTROL_WIDTH
from flinkish_spark.connectors.task_staging import JoiningWriter, StagePlan, TaskStage
from flinkish_spark.contracts.sink import (
    Committer,
    ShownOrder,
    Sink,
    SinkContext,
    SinkWriter,
    StageRequest,
    StageResult,
)
from flinkish_spark.core.errors import EnvironmentFault, SchemaError, StoreError, UnavailableError
from flinkish_spark.core.store import CachedReads, ObjectMissing, make_directories, sync_directory
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, TaskAck
from flinkish_spark.types.arrow_types import arrow_schema
from flinkish_spark.types.hints import parts_of

#: Owner epoch, block, task, attempt, random: the name of a leftover file tells which attempt wrote it, and no
#: two attempts share a file. A file is read only through the committable that names it, with its size and
#: checksum, so an incomplete file is never taken for a complete one.
_NAME = re.compile(r"(\d{1,18})-(\d{1,18})-(\d{1,9})-(\d{1,9})-[0-9a-f]{16}\.arrow")
_HEX = re.compile(r"[0-9a-f]{64}")


class BufferedFileError(Exception):
    """A file that a committable names is missing or damaged, for good."""


@dataclass(frozen=True, slots=True)
class BufferName:
    owner_epoch: OwnerEpoch
    block: int
    task: int
    attempt: int
    random: str

    @classmethod
    def new(cls, owner_epoch: OwnerEpoch, block: int, task: int, attempt: int) -> BufferName:
        return cls(owner_epoch, block, task, attempt, os.urandom(8).hex())

    @classmethod
    def parse(cls, text: str) -> BufferName | None:
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        owner, block, task, attempt = map(int, match.groups())
        return cls(OwnerEpoch(owner), block, task, attempt, text[-22:-6])

    def __str__(self) -> str:
        return f"{self.owner_epoch}-{self.block}-{self.task}-{self.attempt}-{self.random}.arrow"


@dataclass(frozen=True, slots=True)
class BufferedFile:
    name: str
    #: The micro-batch, and the Spark partition whose rows it holds.
    lineage: int
    batch: int
    task: int
    rows: int
    bytes: int
    sha256: str

    def to_payload(self) -> dict[str, Any]:
        return {"file" if name == "name" else name: value for name, value in asdict(self).items()}

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> BufferedFile:
        """Parse a payload; raise ValueError if no buffer wrote it."""
        name, digest = str(payload["file"]), str(payload["sha256"])
        if BufferName.parse(name) is None or _HEX.fullmatch(digest) is None:
            raise ValueError(f"not a file of a write-ahead buffer: {name!r}")
        lineage, batch, task, rows, size = (
            int(payload[key]) for key in ("lineage", "batch", "task", "rows", "bytes")
        )
        return cls(name, lineage, batch, task, rows, size, digest)


class BufferFileWriter:
    def __init__(self, place: StoreSpec, name: BufferName) -> None:
        self._place, self._name, self._rows = place, str(name), 0
        self._file: _HashedFile | None = None
        self._arrow: Any = None

    def write(self, records: pa.RecordBatch) -> None:
        if self._file is None:
            if self._place.is_local:
                make_directories(self._place.folder)
                self._file = _HashedFile((self._place.folder / self._name).open("xb"))
            else:
                # An object in a bucket is written in one piece.
                self._file = _HashedFile(tempfile.TemporaryFile(prefix="flinkish-buffer-"))  # noqa: SIM115
            self._arrow = pa.ipc.new_stream(self._file, records.schema)
        self._arrow.write_batch(records)
        self._rows += records.num_rows

    def finish(self) -> dict[str, Any] | None:
        """Make the file and its name durable; return its report, or None if nothing was written."""
        if self._file is None:
            return None
        self._arrow.close()
        self._file.flush()
        if self._place.is_local:
            os.fsync(self._file.fileno())
            sync_directory(self._place.folder)
        else:
            self._file.seek(0)
            # The name is new, so a reader that finds the object finds all of it.
            self._place.open().put(self._name, self._file.read())
        self._file.close()
        return {
            "file": self._name,
            "rows": self._rows,
            "bytes": self._file.bytes,
            "sha256": self._file.sha256,
        }


class _HashedFile:
    """A file for Arrow to write into that counts the bytes written and hashes them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.write(view)
        self._hash.update(view)
        self.bytes += view.nbytes
        return view.nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


#: Most bytes of a bucket's buffer files that a process caches: each is checked before the decision, then
#: applied.
_KEPT_BYTES = 64 * 1024 * 1024


class BufferFolder:
    """The files at a sink's place, on a disk or in a bucket."""

    def __init__(self, place: StoreSpec) -> None:
        self._place = place
        # No file is written twice, so cached contents stay valid, even after another process deleted the
        # file.
        self._bucket: CachedReads | None = None
        if not place.is_local:
            self._bucket = CachedReads(place.open_bucket(), lambda key: True, _KEPT_BYTES)
        #: One sweep in this many lists the folder, which costs a request in a bucket; the others delete only
        #: files that this process has committed.
        self.sweeps_for_a_listing = 1 if place.is_local else 10

    def why_gone(self, file: BufferedFile) -> str:
        with self._faults("read"):
            try:
                with self._open(file) as source:
                    if (size := source.size()) != file.bytes:
                        return f"the buffer file {file.name} has {size} bytes instead of {file.bytes}"
                    if hashlib.file_digest(source, "sha256").hexdigest() != file.sha256:
                        return f"the buffer file {file.name} is damaged"
            except (FileNotFoundError, ObjectMissing):
                return f"the buffer file {file.name} is gone"
        return ""

    def batches(self, file: BufferedFile) -> Iterator[pa.RecordBatch]:
        rows = 0
        with self._faults("read"):
            try:
                with self._open(file) as source, pa.ipc.open_stream(source) as reader:
                    for batch in reader:
                        rows += batch.num_rows
                        yield batch
            except (FileNotFoundError, ObjectMissing, pa.ArrowInvalid) as error:
                raise BufferedFileError(f"the buffer file {file.name} cannot be read: {error}") from error
        if rows != file.rows:
            raise BufferedFileError(f"the buffer file {file.name} has {rows} rows instead of {file.rows}")

    def _open(self, file: BufferedFile) -> Any:
        if self._bucket is not None:
            return pa.BufferReader(self._bucket.read(file.name))
        return pa.OSFile(str(self._place.folder / file.name))

    def names(self) -> list[BufferName]:
        with self._faults("list"):
            try:
                bucket, place = self._bucket, self._place
                listed = os.listdir(place.folder) if bucket is None else bucket.sizes_below("")
            except FileNotFoundError:
                return []
        return [name for name in map(BufferName.parse, sorted(listed)) if name is not None]

    def delete(self, names: list[str]) -> int:
        with self._faults("delete from"):
            if self._bucket is not None:
                self._bucket.delete_all(names)
                return len(names)
            deleted = 0
            for name in names:
                with suppress(FileNotFoundError):
                    (self._place.folder / name).unlink()
                    deleted += 1
            if deleted:
                sync_directory(self._place.folder)
            return deleted

    @contextmanager
    def _faults(self, verb: str) -> Iterator[None]:
        what = f"cannot {verb} the write-ahead buffer {self._place.url}"
        try:
            yield
        except StoreError as error:
            raise UnavailableError(what, why=error.why or error.what, what_to_do=error.what_to_do) from error
        except OSError as error:
            to_do = "check that the job directory's disk is there, has room, and may be used by this user"
            raise UnavailableError.from_os_error(error, what, what_to_do=to_do) from error


#: Checks rows in a task before their checkpoint is decided; raises an error for a row that must be refused.
RowsCheck = Callable[["pa.RecordBatch"], None]


class ApplyStatus(enum.Enum):
    """Visibility of a checkpoint's rows in the system, if its buffer files are missing."""

    #: Its rows are visible.
    YES = "YES"
    #: Its rows are not visible, and without the files never will be.
    NO = "NO"
    #: The system does not record which checkpoints it has.
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class BufferedRows:
    """All rows of one checkpoint, ordered by micro-batch, task, and the task's own order."""

    folder: BufferFolder
    #: Ordered by micro-batch and task.
    files: tuple[BufferedFile, ...]

    @property
    def count(self) -> int:
        return sum(file.rows for file in self.files)

    def batches(self) -> Iterator[pa.RecordBatch]:
        for file in self.files:
            yield from self.folder.batches(file)


class BufferedSink(Sink):
    """Base class of sinks over the write-ahead buffer; subclasses define `create_committer` and checks."""

    @property
    def stages_in_job_dir(self) -> bool:
        return True

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        require_bufferable(context)

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        return BufferWriter(context)


class BufferedCommitter(Committer):
    shown_order = ShownOrder.OF_COMMITS

    def __init__(self, context: SinkContext) -> None:
        self._context, self._folder = context, BufferFolder(context.place)
        #: The number of sweeps so far, and the files committed since the last one.
        self._sweeps, self._committed = 0, set[str]()

    @abstractmethod
    def apply(self, checkpoint: CheckpointId, rows: BufferedRows) -> CommitAnswer:
        """Make all rows of a decided checkpoint visible: together and once, if the system can."""
        # Called in order of checkpoints, by one thread at a time, and again with the same rows until the
        # receipt exists: by this process after RETRY, by another after a crash. An implementation must not
        # catch BufferedFileError: the caller turns it into an answer.

    def has_applied(self, checkpoint: CheckpointId) -> ApplyStatus:
        """Return if the rows of a decided checkpoint are visible; called when its files are missing."""
        return ApplyStatus.UNKNOWN

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        if not committables:
            return ()
        files = tuple(BufferedFile.from_payload(c.payload) for c in committables)
        try:
            answer = self._commit(checkpoint, BufferedRows(self._folder, files))
        except EnvironmentFault as fault:
            if not fault.restartable:
                raise
            answer = CommitAnswer(Outcome.RETRY, str(fault))
        if answer.outcome.is_done:
            self._committed |= {file.name for file in files}
        if answer.outcome is Outcome.LOST:
            # All or nothing: if one file is missing none is committed, so all files from the first on are
            # lost.
            return (answer,)
        return tuple(answer for _ in committables)

    def _commit(self, checkpoint: CheckpointId, rows: BufferedRows) -> CommitAnswer:
        gone = next((why for file in rows.files if (why := self._folder.why_gone(file))), "")
        try:
            if not gone:
                return self.apply(checkpoint, rows)
        except BufferedFileError as error:
            gone = str(error)
        match self.has_applied(checkpoint):
            case ApplyStatus.YES:
                return CommitAnswer(Outcome.ALREADY_COMMITTED)
            case ApplyStatus.NO:
                return CommitAnswer(Outcome.LOST, f"{gone}, and it was not committed", is_proven_aborted=True)
            case ApplyStatus.UNKNOWN:
                return CommitAnswer(Outcome.LOST, f"{gone}; whether it was committed is not known")

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        answers = []
        for committable in committables:
            try:
                count = self._folder.delete([BufferedFile.from_payload(committable.payload).name])
                answers.append(CommitAnswer(Outcome.COMMITTED if count else Outcome.ALREADY_COMMITTED))
            except EnvironmentFault as fault:
                answers.append(CommitAnswer(Outcome.RETRY, str(fault)))
        return answers

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        files = [BufferedFile.from_payload(one.payload) for one in committables]
        gone = {index: self._folder.why_gone(file) for index, file in enumerate(files)}
        return {index: f"sink '{self._context.uid}': {why}" for index, why in gone.items() if why}

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Delete the files of failed attempts, aborted micro-batches and confirmed checkpoints."""
        if self._sweeps % self._folder.sweeps_for_a_listing:
            known = [name for text in sorted(self._committed) if (name := BufferName.parse(text))]
        else:
            known = self._folder.names()
        self._sweeps += 1
        if not known:
            return 0
        running = running_blocks()
        wanted = {str(c.payload["file"]) for c in kept if c.sink == self._context.uid}
        gone = [
            str(name)
            for name in known
            if str(name) not in wanted and self._context.is_left_over(name.owner_epoch, name.block, running)
        ]
        count = self._folder.delete(gone) if gone else 0
        self._committed.difference_update(gone)
        return count

    def task_of(self, committable: Committable) -> int | None:
        return BufferedFile.from_payload(committable.payload).task


class BufferWriter(JoiningWriter):
    def __init__(self, context: SinkContext, check: RowsCheck | None = None) -> None:
        self._context, self._check = context, check

    def plan(self, request: StageRequest) -> StagePlan:
        context = self._context
        work = BufferWork(context.place, int(context.owner_epoch), request.block, self._check)
        return StagePlan(work, partial(_finish, context, request))


def _finish(context: SinkContext, request: StageRequest, reports: Sequence[Mapping[str, Any]]) -> StageResult:
    place = {"lineage": int(request.lineage), "batch": int(request.batch)}
    files = [
        BufferedFile.from_payload({**report["staged"], **place, "task": report["partition"]})
        for report in reports
        if report["staged"] is not None
    ]
    # A store has confirmed the write, and driver and executors see the same bucket.
    unseen = [file.name for file in files if context.place.is_local and not _has_size(context.folder, file)]
    if unseen:
        raise EnvironmentFault(
            f"sink '{context.uid}' staged {unseen[0]}, which the driver does not see in {context.place.url}",
            why="the executors write into another file system than the driver reads",
            what_to_do="put the job directory where driver and executors see the same files",
        )
    return StageResult(
        tuple(TaskAck.from_json(report) for report in reports),
        tuple(file.to_payload() for file in files),
        bytes=sum(file.bytes for file in files),
    )


def _has_size(folder: Path, file: BufferedFile) -> bool:
    try:
        return (folder / file.name).stat().st_size == file.bytes
    except FileNotFoundError:
        return False
    except OSError as error:
        to_do = "check that the job directory's disk is there, and may be used by this user"
        what = f"cannot read the write-ahead buffer {folder}"
        raise UnavailableError.from_os_error(error, what, what_to_do=to_do) from error


@dataclass(frozen=True)
class BufferWork:
    """Buffers the rows of a task in a file, which its report names."""

    place: StoreSpec
    #: Part of the files' names.
    owner_epoch: int
    block: int
    #: Called in the task before rows are buffered; raises an error for rows that no commit could write. None
    #: accepts all rows. It is pickled and sent to the workers.
    check: RowsCheck | None = None

    def begin(self, task: TaskContext, sinks: int) -> TaskStage:
        epoch = OwnerEpoch(self.owner_epoch)
        name = BufferName.new(epoch, self.block, task.partitionId(), task.attemptNumber())
        return _BufferStage(BufferFileWriter(self.place, name), self.check)


class _BufferStage(TaskStage):
    def __init__(self, writer: BufferFileWriter, check: RowsCheck | None) -> None:
        self._writer, self._check = writer, check

    def write(self, records: pa.RecordBatch) -> None:
        fields = records.select(range(CONTROL_WIDTH, records.num_columns))
        if self._check is not None:
            self._check(fields)
        self._writer.write(fields)

    def finish(self, ack: TaskAck) -> Mapping[str, Any]:
        return {**ack.to_json(), "staged": self._writer.finish()}


def require_bufferable(context: SinkContext, what: str = "buffer") -> None:
    """Raise SchemaError if Spark cannot convert a field's type to Arrow."""
    for field in context.schema.fields:
        try:
            if any(isinstance(part, T.VariantType) for part in parts_of(field.dataType)):
                raise TypeError("Arrow sees only the stored bytes of a VARIANT")
            arrow_schema(T.StructType([field]))
        except Exception as error:
            raise SchemaError(
                f"sink '{context.uid}' cannot {what} the field '{field.name}' of type "
                f"{field.dataType.simpleString()}",
                why=str(error).split("\n")[0],
                what_to_do="cast it to another type with transform(...)",
            ) from error
