"""The supervisor: take over, recover, start the query, watch it, start it again.

One object per `execute`. The order of a start is the protocol's: preflight, lock, settings, owner
epoch, fence, recovery, hooks, and only then the query. Up to the lock nothing is written anywhere.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from flinkish_spark.coordinator import CheckpointCoordinator
from flinkish_spark.errors import (
    FencedError,
    FlinkishError,
    InputLostError,
    NoProgressError,
    raise_translated,
)
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import Decision, Receipt
from flinkish_spark.protocol.failures import FailureManager
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.job_status import JobEvent, JobStatus
from flinkish_spark.protocol.lineage import Tables
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.recovery import StartSpark
from flinkish_spark.protocol.statistics_history import StatisticsHistory
from flinkish_spark.protocol.watermarks import EventTime
from flinkish_spark.runtime.blocks import BlockPool
from flinkish_spark.runtime.confirmation import Confirmation, Interrupted
from flinkish_spark.runtime.control_source import ControlFile
from flinkish_spark.runtime.coordinator_parts import CoordinatorParts
from flinkish_spark.runtime.engine import OwnerLock, QueryEngine, QueryPlan, RunningQuery, StagingContext
from flinkish_spark.runtime.epoch_writer import AdmissionGate, EpochWriter, EpochWriterParts
from flinkish_spark.runtime.failures import QueryFailed, classify, classify_alive
from flinkish_spark.runtime.inputs import Inputs, until_answered
from flinkish_spark.runtime.job_control import JobControl
from flinkish_spark.runtime.last_checkpoint import LastCheckpoint, QueryEnd
from flinkish_spark.runtime.listeners import JobStates
from flinkish_spark.runtime.outside import Outside, RewindOrdered
from flinkish_spark.runtime.owned import OwnedJob
from flinkish_spark.runtime.ownership import seal_open_ids, take_over
from flinkish_spark.runtime.recovering import Recovered, Recovery, sweep_after_stop
from flinkish_spark.runtime.replaying import Replayer
from flinkish_spark.runtime.restarting import RestartPolicy
from flinkish_spark.runtime.retiring import CompletedCheckpoints
from flinkish_spark.runtime.rewind_orders import PendingRewind
from flinkish_spark.runtime.rewinding import RewindRefused, SourcePositions, order_rewind
from flinkish_spark.runtime.settings import JobProgress, JobSettings
from flinkish_spark.runtime.spark_log import SparkLog
from flinkish_spark.runtime.standby import LockWait, wait_for_lock
from flinkish_spark.runtime.threads import GivenUp, outcome_of
from flinkish_spark.runtime.time_keeper import TimeKeeper
from flinkish_spark.runtime.timelines import settle_timeline
from flinkish_spark.runtime.tracking import CheckpointTracker
from flinkish_spark.runtime.watchdog import Wait, Watchdog

LOG = logging.getLogger(__name__)
_WATCH_MS = 100


class _Turn(enum.Enum):
    """How an ownership of the job directory ended."""

    OVER = "OVER"
    TAKE_OVER_AGAIN = "TAKE_OVER_AGAIN"


class Supervisor:
    """Runs a job until it is stopped or fails for good.

    Parameters
    ----------
    engine
        Runs the queries.
    settings
        Of this `execute`.
    job_dir
        The job's directory.
    """

    def __init__(self, engine: QueryEngine, settings: JobSettings, job_dir: JobDir) -> None:
        self._engine, self._settings, self._job_dir = engine, settings, job_dir
        self._attempts, self._starts, self._blocks = itertools.count(1), itertools.count(), BlockPool()
        self._tracker: CheckpointTracker | None = None
        self._failures = FailureManager(settings.checkpoint.tolerable_failures)
        self._dropped_by_sinks = 0
        self._restarts = RestartPolicy(settings.restart, settings.random, settings.tries_without_progress)
        #: Of the query that runs, or has ended last.
        self._writer: EpochWriter | None = None
        self.progress = JobProgress()
        self.control = JobControl(engine.why_no_savepoint_at)
        self._outside = Outside(job_dir, settings.clock, self.control.ask, self.control.cancel)
        self._watchdog = Watchdog(settings.clock, self._note_waits, self.control.cancel_wanted.is_set)
        self._waiting = self._watchdog.waiting
        self.states = JobStates(engine.uids, settings.listeners, self._waiting)
        self._owned: OwnedJob | None = None

    @property
    def statistics(self) -> StatisticsHistory:
        """Return the history of checkpoints; empty before the takeover."""
        return StatisticsHistory() if self._tracker is None else self._tracker.history

    def order_rewind(self, target: CheckpointId, tables: Tables) -> PendingRewind:
        """Order the job to go back; called by any thread. See :meth:`JobClient.rewind`."""
        folder = f"spark/{self._job_dir.newest_owner()}"
        pins = self._engine.pins(SparkLog(self._job_dir.store, folder, self._settings.root / folder))
        clock = self._settings.clock
        order = order_rewind(self._job_dir, pins, clock, target, tables, "ordered by the job's client")
        return PendingRewind(self._job_dir, order, clock)

    # -- life -----------------------------------------------------------------------------------
    def run(self) -> None:
        """Run the job; return when it was stopped.

        Raises
        ------
        FlinkishError
            The job cannot start, or failed in a way that a restart does not mend.
        """
        lock: OwnerLock | None = None
        self._watchdog.start(self._settings.threads)
        try:
            with self._waiting("the checks before the start to end"):
                self._engine.check()
            waiting = self._engine.lock()
            if wait_for_lock(waiting, self._settings, self.control.end_wanted) is LockWait.GIVEN_UP:
                self.states.on(JobEvent.SUSPEND, "told to end while it stood by")
                return
            lock = waiting
            while self._run_owned() is _Turn.TAKE_OVER_AGAIN:
                self._blocks.forget()
        except FencedError:
            self.states.on(JobEvent.SUSPEND, "a newer owner has the job")
            raise
        except Exception as error:
            # What comes up before the query is tried has not met a type yet.
            known = classify(error)
            self.states.over(str(known))
            raise_translated(known, error)
        except BaseException as error:
            self.states.over(str(error))
            raise
        finally:
            self.progress.is_running = False
            self.control.over()
            if lock is not None:
                lock.release()
            with self._waiting("the master hooks to be closed"):
                self._settings.hooks.close()
            self._watchdog.stop()
            self.progress.waits = ()

    def _note_waits(self, waits: tuple[Wait, ...]) -> None:
        self.progress.waits = waits
        if waits and self._owned is not None and self.control.cancel_wanted.is_set():
            # What was decided is finished by the next start; whoever cancels a job does not wait for it.
            self._owned.interrupt()

    def _run_owned(self) -> _Turn:
        settings, waiting = self._settings, self._waiting
        with waiting("the job directory to take the record of the job"):
            job = self._engine.record_job()
        with waiting("the job directory to be taken over"):
            ownership = take_over(self._job_dir, settings.clock, settings.token)
        with waiting("Spark's log to be fenced"):
            log = self._engine.fenced_log(ownership)
        self._inputs = inputs = Inputs(self._engine.sources, self._job_dir, log)
        with waiting("the sinks to be connected"):
            committers = self._engine.committers(job, ownership)
        tracker = CheckpointTracker(self._job_dir, settings.clock)
        pins = self._engine.pins(log)
        with waiting("the manifest to be connected"):
            manifest = self._engine.manifest(job, ownership)
        owned = OwnedJob(job, ownership, log, pins, inputs, committers, tracker, manifest)
        self._owned = owned
        keeping = (settings.checkpoint, pins, lambda: self.control.exporting, ownership)
        self._completed = CompletedCheckpoints(self._job_dir, *keeping)
        self._tracker = tracker
        try:
            # This order matters: nothing is recovered, committed or aborted over what another timeline holds.
            with waiting("sinks and sources to say what they hold"):
                is_to_be_taken_over_again = settle_timeline(
                    owned,
                    self._engine.sources,
                    settings.clock,
                    settings.threads,
                    self.control.must_give_up,
                    self.control.cancel_wanted.is_set,
                )
            if is_to_be_taken_over_again:
                return _Turn.TAKE_OVER_AGAIN
        except Interrupted:
            owned.close()
            self._ended()
            return _Turn.OVER
        except BaseException:
            owned.close()
            raise
        self._outside.start(settings.threads, ownership.epoch)
        try:
            while True:
                try:
                    if self._run_query(owned) is QueryEnd.OVER:
                        break
                    self._goes_on("behind the last checkpoint timers were left, or input went on")
                except Interrupted:
                    break
                except RewindOrdered as order:
                    self._goes_on(str(order))
                    # Spark goes on cleaning the folder of a query that has ended, by the highest
                    # version that it saw: the rewound one gets a folder that Spark does not know.
                    return _Turn.TAKE_OVER_AGAIN
                except Exception as error:
                    if not self._survives(classify(error, self._place()), inputs):
                        break
                # A zombie must not seal the id that the newer owner is about to decide.
                ownership.check()
                # Ids that were pending are never used again, whatever became of their barriers.
                seal_open_ids(ownership, settings.clock)
                self._blocks.forget()
            self._ended()
            return _Turn.OVER
        finally:
            with self._waiting("the thread that takes requests to end"):
                self._outside.stop()
            self._owned = None
            with self._waiting("the sinks' connections to be closed"):
                owned.close()

    def _goes_on(self, why: str) -> None:
        """Say that the query starts again although nothing has failed."""
        LOG.warning("%s", why)
        self.states.on(JobEvent.FAILURE, why)
        self.states.on(JobEvent.RESTART, why)

    def _ended(self) -> None:
        if not self.control.cancel_wanted.is_set():
            is_running = self.states.status is JobStatus.RUNNING
            self.states.on(JobEvent.FINISH if is_running else JobEvent.SUSPEND)
            return
        self.states.on(JobEvent.CANCEL)
        self._completed.cancelled(self._settings.clock)
        self.states.on(JobEvent.ALL_ENDED)

    def _survives(self, error: FlinkishError, inputs: Inputs) -> bool:
        """Wait before the next attempt; return whether there is one, or raise."""
        control, clock = self.control, self._settings.clock
        self.progress.last_error = str(error)
        if isinstance(error, FencedError):
            raise error
        self.states.failed(error)
        self._log_trace(error)
        if isinstance(error, InputLostError | QueryFailed):
            # What Spark says about lost input names no ranges; the source does.
            self._raise_if_lost(inputs)
        if self._restarts.gives_up(error, control):
            return False
        try:
            batch = None if self._writer is None else self._writer.expected
            delay_ms = self._restarts.delay_ms_after(error, clock.monotonic_ms(), batch)
        except NoProgressError as stuck:
            self.progress.last_error = str(stuck)
            raise
        except FlinkishError:
            with self._waiting("the record to be found that failed"):
                placed = self._engine.place_of(error, inputs)
            raise placed from None
        self.progress.restarts += 1
        LOG.warning("restarting in %s ms after: %s", delay_ms, error)
        self.states.on(JobEvent.RESTART, str(error))
        # Told to stop, it is started once more at once, to take its last checkpoint.
        clock.wait(control.end_wanted, delay_ms)
        return not control.cancel_wanted.is_set()

    def _raise_if_lost(self, inputs: Inputs) -> None:
        """Raise what the sources say is wrong with their input, if no restart mends it."""
        try:
            with self._waiting("the sources to be asked what is left of their input"):
                inputs.check()
        except Exception as error:
            known = classify_alive(error)
            if not known.restartable:
                raise_translated(known, error)
            # The next start asks again, before it does anything else.
            LOG.warning("the input cannot be checked now: %s", known)

    def _place(self) -> str:
        """Return at which micro-batch the query has ended; empty if it did not come so far."""
        return "" if self._writer is None else f"at micro-batch {self._writer.expected}"

    def _log_trace(self, error: FlinkishError) -> None:
        trace = error.facts.get("trace")
        if trace:
            LOG.info("from the inside out:\n%s", trace)

    # -- one start of the query -----------------------------------------------------------------
    def _run_query(self, owned: OwnedJob) -> QueryEnd:
        settings, ownership, log, inputs = self._settings, owned.ownership, owned.log, owned.inputs
        committers, tracker, clock = owned.committers, owned.tracker, settings.clock
        confirmation = Confirmation(
            self._job_dir,
            ownership,
            committers,
            self._engine.sources,
            settings.clock,
            tracker.timing(settings.observer),
            self.control.must_give_up,
            owned.manifest,
            owned.job,
            self._waiting,
        )
        self.control.detach()
        with self._waiting("the recovery to end"):
            start, kept, stored = self._recover(owned, confirmation)
        with self._waiting("the sources to be asked before the start"):
            if not until_answered(inputs.check, self.control.must_give_up, clock):
                raise Interrupted("waiting for the input")
        log.check()
        control = self._control_file(owned)
        with self._waiting("Spark to plan the query"):
            plan = self._engine.plan(control)
        newest = self._job_dir.newest_commit()
        if newest is not None:
            self._engine.confirmed(newest)
        gate = AdmissionGate(settings.clock)
        facts = (plan.time, self._engine.sources, control, log, clock)
        time = TimeKeeper(*facts, stored, kept, start.next_batch)
        time.begin()
        coordinator = CheckpointCoordinator(
            CoordinatorParts(
                config=settings.checkpoint,
                clock=settings.clock,
                threads=settings.threads,
                job_dir=self._job_dir,
                ownership=ownership,
                log=log,
                control=control,
                confirmation=confirmation,
                committers=committers,
                channels=plan.channels,
                operators=self._engine.operators,
                uids=self._engine.uids,
                hooks=settings.hooks,
                blocks=self._blocks,
                gate=gate,
                observer=settings.observer,
                failures=self._failures,
                tracker=tracker,
                on_confirmed=self._on_confirmed,
                on_aborted=self.states.aborted,
                write_savepoint=lambda decision, target: self._engine.write_savepoint(decision, target, log),
                on_decided=self._completed.decided,
                on_receipt=self._completed.completed,
                on_aging=self.states.aging,
                time=time,
                waiting=self._waiting,
            ),
            kept,
        )
        context = StagingContext(owned.job, ownership, self._job_dir.lineage(), self._blocks, clock, log)
        self._last = last = LastCheckpoint(self.control, time, coordinator)
        self._writer = writer = self._epoch_writer(plan, context, start, gate, coordinator, inputs, time)
        self.control.is_starting = False
        with self._waiting("Spark to start the query"):
            query = plan.start(log, writer)
        coordinator.start()
        # Not before: whoever asks a coordinator that never starts would wait for ever.
        self.control.attach(coordinator)
        self.progress.is_running = True
        self.states.on(JobEvent.STARTED)
        try:
            self._watch(query, writer, coordinator)
            if self.control.cancel_wanted.is_set():
                self.states.on(JobEvent.CANCEL)
        finally:
            self.progress.is_running = False
            self._tear_down(query, gate, coordinator)
            self._failures = coordinator.failures
        if self.control.stop_wanted.is_set() or last.is_confirmed:
            sweep_after_stop(self._job_dir, committers)
        return last.end()

    def _recover(self, owned: OwnedJob, confirmation: Confirmation) -> Recovered:
        settings, inputs = self._settings, owned.inputs
        recovery = Recovery(
            self._job_dir,
            owned.log,
            owned.ownership,
            owned.committers,
            confirmation,
            settings.clock,
            settings.observer,
            self.control.must_give_up,
            pins=owned.pins,
            positions=SourcePositions(inputs.lower, inputs.why_lost),
            on_confirmed=self._on_recovered,
            reseeding=self._engine.reseeding(owned.log),
            replaying=Replayer(
                self._engine,
                self._job_dir,
                owned,
                self._blocks,
                partial(self._control_file, owned),
                self._attempts,
                settings.clock,
                settings.observer,
                self.control.cancel_wanted.is_set,
            ),
        )
        try:
            start, kept = recovery.run()
        except RewindRefused as refused:
            if self.states.status is JobStatus.CREATED:
                raise
            # The order is closed. A job that runs well does not end because of a wrong wish.
            LOG.error("the order is not carried out: %s", refused)
            start, kept = recovery.run()
        newest = self._job_dir.newest_commit()
        self.states.goes_on_from(None if newest is None else newest.checkpoint)
        savepoint = self._engine.restored_from() if newest is None else None
        with self._waiting("the master hooks to be restored"):
            stored = self._restored(partial(owned.restore, newest, savepoint, settings.hooks))
        if newest is not None:
            self._failures = self._failures.completed(newest.checkpoint)
        return start, kept, stored

    def _restored(self, restore: Callable[[], EventTime | None]) -> EventTime | None:
        settings = self._settings
        # A stop waits for them: it wants a last checkpoint, and most hooks are quick.
        give_up = self.control.cancel_wanted.is_set
        try:
            return outcome_of(restore, "flinkish-restore-hooks", settings.threads, settings.clock, give_up)
        except GivenUp:
            raise Interrupted("restoring the master hooks") from None

    def _control_file(self, owned: OwnedJob) -> ControlFile:
        folder = self._settings.root / "control"
        return ControlFile.of_start(folder, owned.ownership.epoch, next(self._starts))

    def _watch(self, query: RunningQuery, writer: EpochWriter, coordinator: CheckpointCoordinator) -> None:
        control = self.control
        while not control.cancel_wanted.is_set():
            self._outside.raise_if_ordered()
            if coordinator.failure is not None:
                raise coordinator.failure
            if self._last.is_confirmed:
                return
            self._last.look()
            with self._waiting("Spark to say how the query is"):
                if not query.is_active:
                    self._raise_failure(query, writer)
                self.progress.dropped = query.dropped_records() + self._dropped_by_sinks
            self._settings.clock.wait(control.cancel_wanted, _WATCH_MS)

    def _raise_failure(self, query: RunningQuery, writer: EpochWriter) -> NoReturn:
        """Raise what ended the query."""
        if isinstance(writer.failure, FlinkishError):
            raise writer.failure
        # Raises if the JVM is gone.
        told = query.exception()
        if writer.failure is not None:
            # Of a failure in foreachBatch Spark passes on the text only, within what Py4J says.
            raise classify_alive(writer.failure, self._place()) from writer.failure
        raise told or QueryFailed("the query ended by itself")

    def _tear_down(
        self, query: RunningQuery, gate: AdmissionGate, coordinator: CheckpointCoordinator
    ) -> None:
        """End query and coordinator; both have ended when this returns, or the JVM is gone."""
        gate.stop()
        coordinator.stop()
        with self._waiting("Spark to end the query"):
            query.stop()
            self.progress.dropped = query.dropped_records() + self._dropped_by_sinks
        coordinator.join()

    def _on_recovered(self, checkpoint: CheckpointId) -> None:
        # A checkpoint that the recovery confirms is progress like any other.
        self._restarts.ran_well()
        self.states.completed(checkpoint)

    def _on_confirmed(self, decision: Decision, receipt: Receipt) -> None:
        self._dropped_by_sinks += self.progress.confirmed(decision)
        self._restarts.ran_well()
        self._engine.confirmed(decision)
        self.states.completed(decision.checkpoint)

    def _epoch_writer(
        self,
        plan: QueryPlan,
        context: StagingContext,
        start: StartSpark,
        gate: AdmissionGate,
        coordinator: CheckpointCoordinator,
        inputs: Inputs,
        time: TimeKeeper,
    ) -> EpochWriter:
        def note(staged: StagedBatch, sync_ms: int) -> None:
            if staged.checkpoints:
                must_give_up, clock = self.control.must_give_up, self._settings.clock
                if not until_answered(inputs.check_identity, must_give_up, clock):
                    raise Interrupted("looking for the input")
            self.states.tasks_run()
            coordinator.on_staged(staged, sync_ms)
            self._last.look()

        parts = EpochWriterParts(
            job_dir=self._job_dir,
            ownership=context.ownership,
            staging=plan.staging(context),
            attempts=self._attempts,
            clock=self._settings.clock,
            observer=self._settings.observer,
            gate=gate,
            notify=note,
            must_wait=coordinator.must_wait,
            time=time,
            waiting=self._waiting,
        )
        return EpochWriter(start.next_batch, parts)
