"""foreachBatch: evaluate the micro-batch once, stage every sink, write the staged file.

When this returns, Spark writes commits/N. Nothing is visible yet, and nothing that was staged is
forgotten: the staged file names it all. If this raises, no staged file exists and everything the
attempt left behind is aborted by the recovery.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from flinkish_spark.errors import EnvironmentFault, InternalError
from flinkish_spark.graph.planner import PlannedSink, select_sink_rows
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.records import Committable, SinkAck, StagedBatch
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.blocks import BlockPool
from flinkish_spark.runtime.ownership import Ownership
from flinkish_spark.runtime.steps import Observer, Step
from flinkish_spark.sinks.base import SinkWriter, StageRequest


class JobStopping(Exception):
    """Ends a micro-batch that was held back while the job stops; expected, never reported."""


class StagingMismatchError(EnvironmentFault):
    """Two sinks saw different rows of one micro-batch; it is run again."""

    restartable = True


class AdmissionGate:
    """Holds micro-batches back behind the final checkpoint, and when too many are undecided.

    Touched by the epoch writer's thread, the coordinator's and the supervisor's.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_closed = False
        self._is_stopping = False
        self._final = CheckpointId(0)

    def close_behind(self, checkpoint: CheckpointId) -> None:
        """Let nothing pass behind the micro-batch that carries `checkpoint`."""
        with self._condition:
            self._final = checkpoint

    def passed(self, checkpoints: frozenset[CheckpointId]) -> None:
        """Note the barriers of a staged micro-batch."""
        with self._condition:
            self._is_closed = self._is_closed or self._final in checkpoints

    def reopen(self) -> None:
        """Let micro-batches pass again: the final checkpoint was aborted."""
        with self._condition:
            self._is_closed = False
            self._condition.notify_all()

    def stop(self) -> None:
        """Turn away whoever waits and whoever comes."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify_all()

    def enter(self, must_wait: Callable[[], bool]) -> None:
        """Wait until a micro-batch may be staged; raise JobStopping if none may any more."""
        with self._condition:
            while not self._is_stopping and (self._is_closed or must_wait()):
                self._condition.wait(0.05)
            if self._is_stopping:
                raise JobStopping


@dataclass(frozen=True)
class EpochWriterParts:
    """What an epoch writer works with; all but `lineage` and `notify` live as long as the process."""

    job_dir: JobDir
    ownership: Ownership
    lineage: Lineage
    writers: Mapping[str, SinkWriter]
    blocks: BlockPool
    attempts: Iterator[int]
    observer: Observer
    gate: AdmissionGate
    notify: Callable[[StagedBatch], None]
    must_wait: Callable[[], bool]


class EpochWriter:
    """The function given to foreachBatch; called by Spark in a thread of its own, one at a time."""

    def __init__(self, sinks: Sequence[PlannedSink], first_batch: BatchId, parts: EpochWriterParts) -> None:
        self._sinks = tuple(sinks)
        self._streams = len({sink.stream for sink in sinks})
        self._expected = first_batch
        self._parts = parts
        #: The typed error of a failed micro-batch; Spark passes on only its text.
        self.failure: BaseException | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Stage one micro-batch."""
        try:
            self._stage(frame, BatchId(batch_id))
        except BaseException as error:
            self.failure = error
            raise

    def _stage(self, frame: DataFrame, batch: BatchId) -> None:
        if batch != self._expected:
            # A batch at or below the last decided one, or a gap: Spark's log is not what the
            # recovery saw. Staging it would commit rows twice or skip some.
            raise InternalError(
                f"Spark runs micro-batch {batch}, expected is {self._expected}",
                why="its checkpoint changed behind this owner's back",
                what_to_do="make sure that only this job uses the job directory",
            )
        self._parts.gate.enter(self._parts.must_wait)
        self._parts.ownership.check()
        passes = sum(writer.passes for writer in self._parts.writers.values())
        if passes > 1:
            # Otherwise each sink would run the operators again, and a task that is retried in
            # between could stage other rows for one sink than for the other.
            frame = frame.persist()
        try:
            staged = self._stage_sinks(frame, batch)
        finally:
            if passes > 1:
                frame.unpersist()
        self._check_digests(staged)
        parts = self._parts
        parts.observer.before(Step.STAGED_FILE, str(batch))
        parts.job_dir.write_staged(staged)
        parts.observer.after(Step.STAGED_FILE, str(batch))
        self._expected = batch.next()
        parts.gate.passed(staged.checkpoints)
        parts.notify(staged)
        parts.observer.before(Step.SPARK_COMMIT, str(batch))

    def _stage_sinks(self, frame: DataFrame, batch: BatchId) -> StagedBatch:
        parts = self._parts
        acks, committables, blocks = [], [], []
        counted: dict[int, int] = {}
        for sink in self._sinks:
            block = parts.blocks.lease()
            blocks.append(block)
            rows = select_sink_rows(frame, sink, self._streams)
            count = partial(self._count_records, rows)
            if not sink.transforms and sink.stream in counted:
                # A sink of the same stream has counted them; the digests must agree in the end.
                count = partial(counted.__getitem__, sink.stream)
            result = parts.writers[sink.uid].stage(StageRequest(rows, parts.lineage, batch, block, count))
            acks.append(SinkAck(sink.uid, result.tasks))
            if not sink.transforms:
                counted[sink.stream] = acks[-1].rows
            committables += [Committable(sink.uid, payload) for payload in result.payloads]
        return StagedBatch(
            parts.lineage,
            batch,
            parts.ownership.epoch,
            next(parts.attempts),
            tuple(acks),
            tuple(committables),
            tuple(blocks),
        )

    @staticmethod
    def _count_records(rows: DataFrame) -> int:
        return rows.where(F.col(C.KIND) == int(C.Kind.RECORD)).count()

    def _check_digests(self, staged: StagedBatch) -> None:
        """Compare what the sinks of one stream saw; transforms make a stream of their own."""
        acks = {ack.sink: ack for ack in staged.acks}
        plain = [sink for sink in self._sinks if not sink.transforms]
        for left, right in itertools.combinations(plain, 2):
            one, other = acks[left.uid], acks[right.uid]
            same = (one.rows, one.digest) == (other.rows, other.digest)
            if left.stream == right.stream and not same:
                raise StagingMismatchError(
                    f"in micro-batch {staged.batch} sink '{left.uid}' saw {one.rows} rows and "
                    f"sink '{right.uid}' {other.rows}, or other ones",
                    why="the micro-batch was evaluated twice with different results",
                    what_to_do="make functions deterministic: no clock, no unseeded random",
                )
