"""The supervisor: take over, recover, start the query, watch it, start it again.

One object per `execute`. The order of a start is the protocol's: preflight, lock, settings, owner
epoch, fence, recovery, and only then Spark. Up to the lock nothing is written anywhere.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flinkish_spark.bridge import is_gateway_gone
from flinkish_spark.coordinator import CheckpointCoordinator, CoordinatorParts
from flinkish_spark.errors import EnvironmentFault, FlinkishError, InputLostError, SparkGoneError
from flinkish_spark.graph.planner import PlannedJob, Planner
from flinkish_spark.graph.stream_graph import StreamGraph
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import Decision, Receipt
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.recovery import StartSpark
from flinkish_spark.protocol.restart import GiveUp, RestartHistory
from flinkish_spark.runtime.blocks import BlockPool
from flinkish_spark.runtime.confirmation import Confirmation, Interrupted
from flinkish_spark.runtime.control_source import ControlFile, ControlSource
from flinkish_spark.runtime.epoch_writer import AdmissionGate, EpochWriter, EpochWriterParts
from flinkish_spark.runtime.failures import QueryFailed, RepeatableUserError, classify
from flinkish_spark.runtime.inputs import DroppedRecords, Inputs, until_answered
from flinkish_spark.runtime.ownership import JobLock, Ownership, seal_next_checkpoint, take_over
from flinkish_spark.runtime.preflight import check_before_start, record_job
from flinkish_spark.runtime.query import query_conf, start_query
from flinkish_spark.runtime.recovering import Recovery
from flinkish_spark.runtime.settings import JobProgress, JobSettings
from flinkish_spark.runtime.spark_log import SparkLog, fence_spark_folder
from flinkish_spark.sinks.base import Committer, SinkContext
from flinkish_spark.store import LocalStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

LOG = logging.getLogger(__name__)
_WATCH_SECONDS = 0.1
#: How often Spark is asked for its progress; it keeps the last hundred micro-batches.
_PROGRESS_MS = 1_000


class Supervisor:
    """Runs a job until it is stopped or fails for good."""

    def __init__(self, spark: SparkSession, graph: StreamGraph, settings: JobSettings) -> None:
        self._spark, self._graph, self._settings = spark, graph, settings
        self._job_dir = JobDir(LocalStore(settings.root))
        self._stop_wanted = threading.Event()
        self._cancel_wanted = threading.Event()
        self._attempts = itertools.count(1)
        self._blocks = BlockPool()
        self._coordinator: CheckpointCoordinator | None = None
        #: Records on which a user function raised: the second time ends the job.
        self._failed_records: set[tuple[object, ...]] = set()
        #: Those of them that name no record; after a checkpoint it is another one.
        self._unplaced_failures: set[tuple[object, ...]] = set()
        self._dropped, self._dropped_by_sinks = DroppedRecords(), 0
        self.history = RestartHistory()
        self.progress = JobProgress()

    # -- called by other threads ----------------------------------------------------------------
    def stop_with_checkpoint(self) -> None:
        """Take a last checkpoint, finish it, stop."""
        self._stop_wanted.set()

    def cancel(self) -> None:
        """Stop at once; the next start goes on from the last checkpoint."""
        self._cancel_wanted.set()

    def _is_stopping(self) -> bool:
        coordinator = self._coordinator
        return self._cancel_wanted.is_set() or (coordinator is not None and coordinator.is_stopping)

    # -- life -----------------------------------------------------------------------------------
    def run(self) -> None:
        """Run the job; return when it was stopped.

        Raises
        ------
        FlinkishError
            The job cannot start, or failed in a way that a restart does not mend.
        """
        planned = check_before_start(self._spark, self._graph, self._settings, self._job_dir)
        lock = JobLock(self._settings.root / "owner.lock")
        lock.acquire()
        try:
            self._run_owned(planned)
        finally:
            self.progress.is_running = False
            lock.release()

    def _run_owned(self, planned: PlannedJob) -> None:
        settings = self._settings
        job = record_job(self._spark, self._graph, planned, settings, self._job_dir)
        ownership = take_over(self._job_dir, settings.clock)
        folder = fence_spark_folder(settings.root, ownership.epoch)
        log = SparkLog(self._job_dir.store, folder, settings.root / folder)
        inputs = Inputs(self._graph.sources, self._job_dir, log)
        committers = self._committers(planned, job, ownership)
        try:
            while True:
                try:
                    self._run_query(job, ownership, log, inputs, committers)
                    return
                except Interrupted:
                    return
                except Exception as error:
                    self._survive(classify(error), inputs)
                    # A zombie must not seal the id that the newer owner is about to decide.
                    ownership.check()
                    # The id that was pending is never used again, whatever became of its barrier.
                    seal_next_checkpoint(ownership, settings.clock)
                    self._blocks.forget()
        finally:
            for committer in committers.values():
                committer.close()

    def _survive(self, error: FlinkishError, inputs: Inputs) -> None:
        """Wait before the next attempt, or raise."""
        self.progress.last_error = str(error)
        if isinstance(error, InputLostError | QueryFailed):
            # What Spark says about lost input names no ranges; the source does.
            inputs.check()
        if isinstance(error, SparkGoneError) or not error.restartable or self._cancel_wanted.is_set():
            raise inputs.named(self._spark, error)
        if isinstance(error, RepeatableUserError):
            if error.record in self._failed_records:
                raise error
            self._failed_records.add(error.record)
            if not error.is_placed:
                self._unplaced_failures.add(error.record)
        self.history = self.history.failed(self._settings.clock.monotonic_ms())
        verdict = self._settings.restart.decide(self.history)
        if isinstance(verdict, GiveUp):
            LOG.error("not restarting: %s", verdict.reason)
            raise error
        self.progress.restarts += 1
        LOG.warning("restarting in %s ms after: %s", verdict.delay_ms, error)
        self._cancel_wanted.wait(verdict.delay_ms / 1000)
        if self._cancel_wanted.is_set():
            raise error

    # -- one start of the query -----------------------------------------------------------------
    def _run_query(
        self,
        job: JobUuid,
        ownership: Ownership,
        log: SparkLog,
        inputs: Inputs,
        committers: Mapping[str, Committer],
    ) -> None:
        settings = self._settings
        confirmation = Confirmation(
            self._job_dir,
            ownership,
            committers,
            self._graph.sources,
            settings.clock,
            settings.observer,
            self._is_stopping,
        )
        self._coordinator = None
        start, kept = Recovery(
            self._job_dir,
            log,
            ownership,
            committers,
            confirmation,
            settings.clock,
            settings.observer,
            self._is_stopping,
        ).run()
        if not until_answered(inputs.check, lambda: self._is_stopping() or self._stop_wanted.is_set()):
            raise Interrupted("waiting for the input")
        control = ControlFile(settings.root / "control" / f"{ownership.epoch}.json")
        with query_conf(self._spark, settings.shuffle_partitions):
            self._spark.dataSource.register(ControlSource)
            planned = Planner(self._spark, str(control.path), settings.shuffle_partitions).plan(self._graph)
            gate = AdmissionGate()
            coordinator = CheckpointCoordinator(
                CoordinatorParts(
                    config=settings.checkpoint,
                    clock=settings.clock,
                    job_dir=self._job_dir,
                    ownership=ownership,
                    log=log,
                    control=control,
                    confirmation=confirmation,
                    committers=committers,
                    channels={sink.uid: sink.channels for sink in planned.sinks},
                    uids=self._graph.uids(),
                    blocks=self._blocks,
                    gate=gate,
                    observer=settings.observer,
                    on_confirmed=self._on_confirmed,
                ),
                kept,
            )
            self._coordinator = coordinator
            writer = self._epoch_writer(planned, job, ownership, start, gate, coordinator, inputs)
            query = start_query(
                self._spark,
                planned,
                writer,
                name=settings.name,
                checkpoint_location=str(log.location),
                trigger_ms=settings.trigger_ms,
            )
        coordinator.start()
        self.progress.is_running = True
        try:
            self._watch(query, writer, coordinator)
        finally:
            self.progress.is_running = False
            self._tear_down(query, gate, coordinator)
        if self._stop_wanted.is_set():
            self._sweep_after_stop(committers)

    def _watch(self, query: StreamingQuery, writer: EpochWriter, coordinator: CheckpointCoordinator) -> None:
        final_triggered, clock = False, self._settings.clock
        asked_ms = clock.monotonic_ms()
        while not self._cancel_wanted.is_set():
            if coordinator.failure is not None:
                raise coordinator.failure
            if coordinator.final_confirmed.is_set():
                return
            if self._stop_wanted.is_set() and not final_triggered:
                coordinator.trigger_final()
                final_triggered = True
            if not query.isActive:
                failure = writer.failure if isinstance(writer.failure, FlinkishError) else None
                raise failure or query.exception() or QueryFailed("the query ended by itself")
            if clock.monotonic_ms() - asked_ms >= _PROGRESS_MS:
                self._count_dropped(query)
                asked_ms = clock.monotonic_ms()
            self._cancel_wanted.wait(_WATCH_SECONDS)

    def _count_dropped(self, query: StreamingQuery) -> None:
        if any(node.source.drops_records for node in self._graph.sources):
            self._dropped.read(query)
            self.progress.dropped = self._dropped.total + self._dropped_by_sinks

    def _tear_down(
        self, query: StreamingQuery, gate: AdmissionGate, coordinator: CheckpointCoordinator
    ) -> None:
        """End query and coordinator; both have ended when this returns, or the JVM is gone."""
        gate.stop()
        coordinator.stop()
        try:
            query.stop()
            self._count_dropped(query)
        except Exception as error:
            if not is_gateway_gone(error):
                LOG.warning("stopping the query failed: %s", error)
        if coordinator.is_alive():
            coordinator.join()

    def _sweep_after_stop(self, committers: Mapping[str, Committer]) -> None:
        """Abort what the micro-batch behind the final barrier had begun to write."""
        staged = self._job_dir.staged_batches(self._job_dir.lineage()).values()
        kept = [c for s in staged for c in s.committables]
        for committer in committers.values():
            try:
                committer.sweep(kept, frozenset)
            except EnvironmentFault as fault:
                LOG.warning("leftovers are swept by the next start: %s", fault)

    def _on_confirmed(self, decision: Decision, receipt: Receipt) -> None:
        progress = self.progress
        progress.checkpoints += 1
        progress.newest = decision.checkpoint
        for batch in decision.batches:
            for ack in batch.acks:
                progress.rows_by_sink[ack.sink] = progress.rows_by_sink.get(ack.sink, 0) + ack.rows
                self._dropped_by_sinks += sum(t.dropped for t in ack.tasks)
        progress.dropped = self._dropped.total + self._dropped_by_sinks
        self._failed_records -= self._unplaced_failures
        self._unplaced_failures.clear()
        self.history = self.history.ran_well()

    # -- parts ----------------------------------------------------------------------------------
    def _contexts(self, planned: PlannedJob, job: JobUuid, ownership: Ownership) -> dict[str, SinkContext]:
        return {
            sink.uid: SinkContext(job, ownership.epoch, sink.uid, sink.schema, self._settings.checkpoint)
            for sink in planned.sinks
        }

    def _committers(self, planned: PlannedJob, job: JobUuid, ownership: Ownership) -> dict[str, Committer]:
        """Return the committers in the order in which sinks commit: as declared."""
        contexts = self._contexts(planned, job, ownership)
        return {s.uid: s.sink.create_committer(self._spark, contexts[s.uid]) for s in planned.sinks}

    def _epoch_writer(
        self,
        planned: PlannedJob,
        job: JobUuid,
        ownership: Ownership,
        start: StartSpark,
        gate: AdmissionGate,
        coordinator: CheckpointCoordinator,
        inputs: Inputs,
    ) -> EpochWriter:
        contexts = self._contexts(planned, job, ownership)
        notify = coordinator.on_staged

        def note(staged: StagedBatch) -> None:
            if staged.checkpoints and not until_answered(inputs.check_identity, self._is_stopping):
                raise Interrupted("looking for the input")
            notify(staged)

        parts = EpochWriterParts(
            job_dir=self._job_dir,
            ownership=ownership,
            lineage=self._job_dir.lineage(),
            writers={s.uid: s.sink.create_writer(self._spark, contexts[s.uid]) for s in planned.sinks},
            blocks=self._blocks,
            attempts=self._attempts,
            observer=self._settings.observer,
            gate=gate,
            notify=note,
            must_wait=coordinator.must_wait,
        )
        return EpochWriter(planned.sinks, start.next_batch, parts)
