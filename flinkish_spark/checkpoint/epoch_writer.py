"""The function for foreachBatch: wait for admission, stage every sink, write the staged file.

It is the synchronous phase of a checkpoint: from the micro-batch's rows to the durable staged file.
The decision comes later, in other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from flinkish_spark.checkpoint.commit import JobInterruptedError
from flinkish_spark.checkpoint.context import JobContext
from flinkish_spark.checkpoint.event_time import TimeKeeper
from flinkish_spark.checkpoint.staging import Staging
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import InternalError
from flinkish_spark.core.log_context import add_log_facts, log_facts
from flinkish_spark.core.steps import Step
from flinkish_spark.protocol.ids import BatchId, CheckpointId
from flinkish_spark.protocol.records import StagedBatch

_GATE_POLL_MS = 20


class AdmissionGate:
    """Holds micro-batches back after the final checkpoint, and while too many are undecided.

    Every field is written by one thread, or only ever set.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._opened = threading.Event()
        self._opened.set()
        self._stopping = threading.Event()
        self._final = CheckpointId(0)
        #: Sinks whose tasks have seen its barrier.
        self._shown: set[str] = set()

    def close_after(self, checkpoint: CheckpointId) -> None:
        self._shown = set()
        self._final = checkpoint

    def on_staged(self, staged: StagedBatch) -> None:
        self._shown |= {a.sink for a in staged.acks if self._final in {b.checkpoint for b in a.barriers}}
        if self._shown and self._shown >= {ack.sink for ack in staged.acks}:
            self._opened.clear()

    def reopen(self) -> None:
        self._final, self._shown = CheckpointId(0), set()
        self._opened.set()

    def stop(self) -> None:
        """Raise JobInterruptedError in every waiting and later call of :meth:`enter`."""
        self._stopping.set()

    def enter(self, must_wait: Callable[[], bool]) -> None:
        while not self._stopping.is_set() and (not self._opened.is_set() or must_wait()):
            self._clock.wait(self._stopping, _GATE_POLL_MS)
        self.raise_if_stopped()

    def raise_if_stopped(self) -> None:
        """Raise JobInterruptedError if the job stops, without the handled error as its context."""
        if self._stopping.is_set():
            # When Spark stops a query it searches the error's text for an interrupt, with a pattern that
            # needs several stack frames per character: a JVM's trace in the text would overflow the stack.
            raise JobInterruptedError from None


@dataclass(frozen=True)
class EpochWriterParts:
    staging: Staging
    #: Numbers the attempts of one owner, each once.
    attempts: Iterator[int]
    gate: AdmissionGate
    #: Called with a staged micro-batch after its staged file is durable.
    notify: Callable[[StagedBatch, int], None]
    #: Returns whether to hold the next micro-batch back.
    must_wait: Callable[[], bool]
    #: Computes the times of the next micro-batch from the reports of tasks.
    time: TimeKeeper
    #: Called before a micro-batch is staged.
    begins: Callable[[], None] = lambda: None
    #: Names of the operators that call systems outside within a micro-batch.
    async_calls: tuple[str, ...] = ()


class EpochWriter:
    """The function given to foreachBatch; called by Spark in a thread of its own, one at a time."""

    def __init__(self, first_batch: BatchId, job: JobContext, parts: EpochWriterParts) -> None:
        #: The first micro-batch that is not staged.
        self.expected = first_batch
        self._job, self._parts = job, parts
        # Spark calls in threads that do not have the job's log context.
        self._log_facts = log_facts()
        #: The error that ended a micro-batch; Spark passes on only its text.
        self.failure: BaseException | None = None

    def __call__(self, frame: Any, batch_id: int) -> None:
        try:
            with add_log_facts(**self._log_facts, micro_batch=batch_id):
                self._stage(frame, BatchId(batch_id))
        except BaseException as error:
            self.failure = error
            self._parts.gate.raise_if_stopped()
            raise

    def _stage(self, frame: Any, batch: BatchId) -> None:
        job, parts = self._job, self._parts
        if batch != self.expected:
            # A batch that was decided already, or a gap: Spark's log has changed since the recovery read
            # it. Staging would commit rows twice or skip some.
            raise InternalError(
                f"Spark runs micro-batch {batch}, expected is {self.expected}",
                why="Spark's checkpoint was changed by another process",
                what_to_do="make sure that only this job uses the job directory",
            )
        came_ms = job.clock.monotonic_ms()
        with job.waiting(f"checkpoints to be confirmed, before micro-batch {batch} may be staged"):
            parts.gate.enter(parts.must_wait)
        began_ms = job.clock.monotonic_ms()
        job.ownership.check()
        parts.begins()
        calls = f", with the calls of {', '.join(parts.async_calls)}" if parts.async_calls else ""
        with job.waiting(f"micro-batch {batch} to be staged{calls}"):
            staged = parts.time.add_times(parts.staging.stage(frame, batch, next(parts.attempts)))
        took_ms = job.clock.monotonic_ms() - began_ms
        staged = replace(staged, held_ms=began_ms - came_ms or None, staging_ms=took_ms or None)
        job.observer.on_step_start(Step.STAGED_FILE, str(batch))
        job.job_dir.write_staged(staged)
        job.observer.on_step_end(Step.STAGED_FILE, str(batch))
        self.expected = batch.next()
        # After the staged file, in which a restart finds the times; before Spark plans the next micro-batch.
        parts.time.on_staged(staged)
        parts.gate.on_staged(staged)
        with job.waiting(f"the sources to be asked after micro-batch {batch}"):
            parts.notify(staged, job.clock.monotonic_ms() - began_ms)
        job.observer.on_step_start(Step.SPARK_COMMIT, str(batch))
