"""The supervisor of a job: its phases, in their order.

    check      refuse a job that cannot work; nothing is written
    own        take the lock, the owner epoch, the fence; check that external systems fit the directory
    recover    commit what is decided, abort the rest, restore the hooks
    plan       one streaming DataFrame, the sinks' writers, the coordinator
    run        the query, until it ends, fails, or the job is stopped
    finish     end query and coordinator; abort the output of an unfinished micro-batch

A start of the query runs recover to finish; after a failure it is repeated under the same ownership. A rewind
order begins a new ownership. One object per `execute`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from flinkish_spark.checkpoint.accumulators import AccumulatorKeeper, AccumulatorTotals
from flinkish_spark.checkpoint.commit import Confirmation, JobInterruptedError
from flinkish_spark.checkpoint.completion import CoordinatorParts
from flinkish_spark.checkpoint.context import JobContext
from flinkish_spark.checkpoint.control import ControlFile
from flinkish_spark.checkpoint.coordinator import CheckpointCoordinator
from flinkish_spark.checkpoint.epoch_writer import AdmissionGate, EpochWriter, EpochWriterParts
from flinkish_spark.checkpoint.event_time import TimeKeeper
from flinkish_spark.checkpoint.failures import QueryError, classify, classify_alive
from flinkish_spark.checkpoint.hooks import JobStates
from flinkish_spark.checkpoint.ownership import seal_open_ids, take_over
from flinkish_spark.checkpoint.retention import CompletedCheckpoints
from flinkish_spark.checkpoint.spark_log import log_of
from flinkish_spark.checkpoint.staging import OwnerLock, StagingContext
from flinkish_spark.checkpoint.statistics import CheckpointTracker
from flinkish_spark.checkpoint.transactional_ids import BlockPool
from flinkish_spark.core.clock import GivenUp, RunningThread, outcome_of
from flinkish_spark.core.errors import (
    CancellationTimedOut,
    FencedError,
    FlinkishError,
    InputLostError,
    NoProgressError,
    raise_translated,
)
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.log_context import add_log_facts
from flinkish_spark.core.watchdog import Wait, Watchdog
from flinkish_spark.job.cancellation import make_timeout_error
from flinkish_spark.job.catch_up import CatchUp
from flinkish_spark.job.engine import JobProgress, JobSettings, QueryEngine, QueryPlan, RunningQuery
from flinkish_spark.job.inputs import Inputs, ask_until_answered
from flinkish_spark.job.job_control import JobControl, LastCheckpoint, QueryEnd
from flinkish_spark.job.recovery import (
    Recovery,
    RecoveryResult,
    RestoredSavepoint,
    notify_restored,
    sweep_after_stop,
)
from flinkish_spark.job.replay import Replayer
from flinkish_spark.job.requests import LOOK_IN_BUCKET_MS, LOOK_MS, RequestWatcher, RestartForRewind
from flinkish_spark.job.restart_policy import RestartPolicy
from flinkish_spark.job.rewind import PendingRewind, RewindError, order_rewind
from flinkish_spark.job.standby import LockWait, wait_for_lock
from flinkish_spark.job.timeline import settle_timeline
from flinkish_spark.protocol.checkpoint import IllegalTransitionError
from flinkish_spark.protocol.decisions import Decision, Receipt
from flinkish_spark.protocol.failures import FailureManager
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.job_status import JobEvent, JobStatus
from flinkish_spark.protocol.limits import exceeds
from flinkish_spark.protocol.lineage import Tables
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.statistics import StatisticsHistory
from flinkish_spark.protocol.watermarks import EventTime

LOG = logging.getLogger(__name__)


_WATCH_MS = 100
#: Time limit for notifying listeners of a job that is given up.
_TOLD_MS = 1_000


@dataclass(frozen=True)
class _OwnedJob:
    job: JobContext
    inputs: Inputs
    completed: CompletedCheckpoints


@dataclass(frozen=True)
class _Start:
    plan: QueryPlan
    lineage: Lineage
    gate: AdmissionGate
    coordinator: CheckpointCoordinator
    writer: EpochWriter
    last: LastCheckpoint


class Supervisor:
    def __init__(self, engine: QueryEngine, settings: JobSettings, job_dir: JobDir) -> None:
        self._engine, self._settings, self._job_dir = engine, settings, job_dir
        self._attempts, self._starts, self._blocks = itertools.count(1), itertools.count(), BlockPool()
        self._tracker: CheckpointTracker | None = None
        self._failures = FailureManager(settings.checkpoint.tolerable_failures)
        self._dropped_by_sinks = 0
        self._restarts = RestartPolicy(settings.restart, settings.random, settings.tries_without_progress)
        #: The writer of the running or last query.
        self._writer: EpochWriter | None = None
        self.progress = JobProgress()
        self.control = JobControl(engine.why_no_savepoint_at)
        is_endless = settings.until is None
        self._catch_up = CatchUp(is_wanted=False) if is_endless else CatchUp(len(engine.operators))
        look_ms = LOOK_MS if settings.job_dir.is_local else LOOK_IN_BUCKET_MS
        self._outside = RequestWatcher(
            job_dir,
            settings.clock,
            self.control.ask,
            self.control.cancel,
            look_ms,
            lambda: self.states.on_waits(self.progress.waits),
        )
        self._watchdog = Watchdog(
            settings.clock,
            self._note_waits,
            self.control.cancel_wanted.is_set,
            2 * settings.checkpoint.interval_ms,
            self.control.find_waits,
        )
        self._waiting = self._watchdog.waiting
        self.states = JobStates(engine.vertices, settings.listeners, settings.clock, self._waiting)
        self._owned: _OwnedJob | None = None
        self._lock: OwnerLock | None = None
        #: Time at which the watchdog saw that the job is cancelled.
        self._cancelled_ms: int | None = None
        self._interrupter: RunningThread | None = None
        #: The end of the query has its own watchdog, which ends the JVM.
        self._is_ending_query = False
        self._left: CancellationTimedOut | None = None
        self._on_left: Callable[[CancellationTimedOut], None] = lambda error: None

    @property
    def statistics(self) -> StatisticsHistory:
        return StatisticsHistory() if self._tracker is None else self._tracker.history

    @property
    def name(self) -> str:
        return self._settings.name

    @property
    def job_id(self) -> str:
        known = self._job_dir.find_uuid()
        return "" if known is None else str(known)

    def order_rewind(self, target: CheckpointId, tables: Tables) -> PendingRewind:
        job_dir, clock = self._job_dir, self._settings.clock
        pins = self._engine.pins(log_of(job_dir.store, self._settings.job_dir, job_dir.newest_owner()))
        order = order_rewind(job_dir, pins, clock, target, tables, "ordered by the job's client")
        return PendingRewind(job_dir, order, clock)

    def run(self, on_left: Callable[[CancellationTimedOut], None] = lambda error: None) -> None:
        self._on_left = on_left
        with add_log_facts(job=self._settings.name):
            self._live()

    def _live(self) -> None:
        self._watchdog.start(self._settings.threads)
        try:
            with self._waiting("the checks before the start to end"):
                self._engine.check()
            waiting = self._engine.lock()
            with self._waiting("the driver that owns the job to end"):
                lock = wait_for_lock(waiting, self._settings, self.control.end_wanted)
            if lock is LockWait.GIVEN_UP:
                self.states.on(JobEvent.SUSPEND, "stopped while it was a standby")
                return
            self._lock = waiting
            while self._run_owned():
                self._blocks.forget()
        except FencedError:
            self.states.on(JobEvent.SUSPEND, "a newer owner has the job")
            raise
        except Exception as error:
            # An error before the query's first attempt is not classified yet.
            known = classify(error)
            self.states.end(known)
            raise_translated(known, error)
        except BaseException as error:
            self.states.end(error)
            raise
        finally:
            self.progress.is_running = False
            self.control.close()
            if self._lock is not None:
                self._lock.release()
            with self._waiting("the master hooks to be closed"):
                self._settings.hooks.close()
            self._watchdog.stop()
            self.progress.waits = ()

    def _note_waits(self, waits: tuple[Wait, ...]) -> None:
        self.progress.waits = waits
        self.progress.start_waits_for = "" if self.progress.is_running else self._watchdog.longest
        if not self.control.cancel_wanted.is_set():
            return
        now_ms = self._settings.clock.monotonic_ms()
        if self._cancelled_ms is None:
            self._cancelled_ms = now_ms
        if not waits or self._is_ending_query or self._left is not None:
            return
        owned, for_ms = self._owned, now_ms - self._cancelled_ms
        if owned is not None and (self._interrupter is None or not self._interrupter.is_alive()):
            # A cancel does not wait for a running commit; the next start finishes it.
            self._interrupter = self._settings.threads.start("flinkish-interrupter", owned.job.interrupt)
        if exceeds(for_ms, self._settings.cancellation.timeout_ms):
            self._leave(make_timeout_error(waits, for_ms))

    def _leave(self, error: CancellationTimedOut) -> None:
        """Give the job up although its threads have not ended; called by the watchdog's thread."""
        # Owner epochs, seals and the sinks' fences protect against these threads, and their next check of the
        # ownership ends them.
        LOG.error("%s", error)
        self._left, self.progress.last_error = error, str(error)
        if self._owned is not None:
            self._owned.job.ownership.leave()
        self.progress.is_running = False
        self.control.close()
        # The hanging thread may be a listener's; then listeners cannot be notified.
        told = threading.Event()

        def tell() -> None:
            for change in (partial(self.states.on, JobEvent.CANCEL), partial(self.states.end, error)):
                with contextlib.suppress(IllegalTransitionError):
                    change()
            told.set()

        self._settings.threads.start("flinkish-left", tell)
        self._settings.clock.wait(told, _TOLD_MS)
        if self._lock is not None:
            self._lock.release()
        self._on_left(error)

    def _run_owned(self) -> bool:
        """Run the job under one ownership; return True if it must be taken over once more."""
        self._owned = owned = self._own()
        job = owned.job
        try:
            # This order matters: nothing is recovered, committed or aborted if external systems hold another
            # timeline.
            with self._waiting("sinks and sources to report their newest checkpoints"):
                is_to_be_taken_over_again = settle_timeline(job)
            if is_to_be_taken_over_again:
                return True
            self._outside.start(self._settings.threads, job.ownership.epoch)
            try:
                is_ordered_back = self._run_queries(owned)
                if not is_ordered_back:
                    self._report_end(owned)
                return is_ordered_back
            finally:
                with self._waiting("the thread that takes requests to end"):
                    self._outside.stop()
        except JobInterruptedError:
            self._report_end(owned)
            return False
        finally:
            self._owned = None
            with self._waiting("the sinks' connections to be closed"):
                job.close()

    def _run_queries(self, owned: _OwnedJob) -> bool:
        """Restart the query until the job has ended; return True if a rewind is ordered."""
        ownership = owned.job.ownership
        while True:
            try:
                if self._run_query(owned) is QueryEnd.OVER:
                    return False
                self._restart("after the last checkpoint timers were left, or the input continued")
            except JobInterruptedError:
                return False
            except RestartForRewind as order:
                self._restart(str(order))
                # Spark continues to clean the folder of an ended query by the highest version that it saw, so
                # the rewound query gets a folder that Spark does not know.
                return True
            except Exception as error:
                if not self._try_restart(classify(error, self._place()), owned.inputs):
                    return False
            # A zombie must not seal an id that the newer owner is about to decide.
            ownership.check()
            # Pending ids are never used again, whatever happened to their barriers.
            seal_open_ids(ownership, self._settings.clock)
            self._blocks.forget()

    def _run_query(self, owned: _OwnedJob) -> QueryEnd:
        self.control.detach()
        recovered = self._recover(owned)
        self._check_input(owned)
        if self._has_nothing_to_do(recovered):
            LOG.info("the sources have nothing new: no query is started")
            return QueryEnd.OVER
        start = self._plan(owned, recovered)
        with add_log_facts(lineage=start.lineage.value):
            self._run(owned, start)
            return self._finish(owned, start)

    def _has_nothing_to_do(self, recovered: RecoveryResult) -> bool:
        """Return whether a run that ends when it has caught up can end before it starts a query."""
        if not self._catch_up.is_reached or recovered.kept:
            return False
        time = recovered.time
        return time is None or not time.due(self._settings.clock.wall_ms())

    def _own(self) -> _OwnedJob:
        """Take the job directory over, and build the context of all later phases."""
        settings, waiting, engine = self._settings, self._waiting, self._engine
        with waiting("the job directory to take the record of the job"):
            job = engine.record_job()
        with waiting("the job directory to be taken over"):
            ownership = take_over(self._job_dir, settings.clock, settings.token)
            if self._lock is not None:
                self._lock.on_taken_over(ownership.epoch)
        self.states.on_taken_over(ownership.epoch)
        with waiting("Spark's log to be fenced"):
            log = engine.fence_log(ownership)
        with waiting("the sinks to be connected"):
            committers = engine.committers(job, ownership)
        with waiting("the manifest to be connected"):
            manifest = engine.manifest(job, ownership)
        self._tracker = tracker = CheckpointTracker(
            self._job_dir, settings.clock, engine.sources, settings.user_metrics
        )
        context = JobContext(
            job=job,
            job_dir=self._job_dir,
            ownership=ownership,
            log=log,
            pins=engine.pins(log),
            committers=committers,
            sources=engine.sources,
            tracker=tracker,
            hooks=settings.hooks,
            blocks=self._blocks,
            config=settings.checkpoint,
            clock=settings.clock,
            threads=settings.threads,
            observer=settings.observer,
            must_give_up=self.control.must_give_up,
            is_cancelled=self.control.cancel_wanted.is_set,
            uids=engine.uids,
            operators=engine.operators,
            manifest=manifest,
            waiting=waiting,
        )
        keeping = (settings.checkpoint, context.pins, lambda: self.control.exporting, ownership)
        completed = CompletedCheckpoints(self._job_dir, *keeping)
        return _OwnedJob(context, Inputs(engine.sources, self._job_dir, log), completed)

    def _restart(self, why: str) -> None:
        LOG.warning("%s", why)
        self.states.on(JobEvent.FAILURE, why)
        self.states.on(JobEvent.RESTART, why)

    def _report_end(self, owned: _OwnedJob) -> None:
        if not self.control.cancel_wanted.is_set():
            is_running = self.states.status is JobStatus.RUNNING
            self.states.on(JobEvent.FINISH if is_running else JobEvent.SUSPEND)
            return
        self.states.on(JobEvent.CANCEL)
        owned.completed.on_cancelled(self._settings.clock)
        self.states.on(JobEvent.ALL_ENDED)

    def _try_restart(self, error: FlinkishError, inputs: Inputs) -> bool:
        """Wait before the next attempt; return False if there is none, raise if the job has failed."""
        control, clock = self.control, self._settings.clock
        self.progress.last_error = str(error)
        if isinstance(error, FencedError):
            raise error
        self.states.on_failure(error)
        if trace := error.facts.get("trace"):
            LOG.info("from the inside out:\n%s", trace)
        if isinstance(error, InputLostError | QueryError):
            # Spark's error about lost input names no ranges; the source's does.
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
            # Spark's own error is not printed, but stays for the trace file.
            error.__context__ = error.__cause__
            raise error from None
        self.progress.restarts += 1
        LOG.warning("restarting in %s ms after: %s", delay_ms, error)
        self.states.on(JobEvent.RESTART, str(error))
        # A stopped job restarts at once, to take its last checkpoint.
        clock.wait(control.end_wanted, delay_ms)
        return not control.cancel_wanted.is_set()

    def _raise_if_lost(self, inputs: Inputs) -> None:
        """Raise the sources' error about their input if a restart cannot mend it."""
        try:
            with self._waiting("the sources to check their input"):
                inputs.check()
        except Exception as error:
            known = classify_alive(error)
            if not known.restartable:
                raise_translated(known, error)
            # The next start checks again first.
            LOG.warning("the input cannot be checked now: %s", known)

    def _place(self) -> str:
        """Return the micro-batch at which the query ended, in words; empty before the first."""
        return "" if self._writer is None else f"at micro-batch {self._writer.expected}"

    def _recover(self, owned: _OwnedJob) -> RecoveryResult:
        job, confirmation = owned.job, Confirmation(owned.job)
        replayer = Replayer(
            self._engine, job, owned.inputs.why_lost, partial(self._control_file, job), self._attempts
        )
        recovery = Recovery(
            job,
            confirmation,
            owned.inputs,
            on_confirmed=self._on_recovered,
            reseeding=self._engine.reseeding(job.log),
            replaying=replayer,
        )
        with self._waiting("the recovery to end"):
            try:
                start, kept = recovery.run()
            except RewindError as refused:
                if self.states.status is JobStatus.CREATED:
                    raise
                # The order is closed. A healthy job does not end because of an impossible order.
                LOG.error("the order is not carried out: %s", refused)
                start, kept = recovery.run()
            newest = self._job_dir.newest_commit()
            self.states.on_restored(None if newest is None else newest.checkpoint)
            savepoint = self._engine.find_restored() if newest is None else None
            with self._waiting("the master hooks to be restored"):
                stored = self._restore_hooks(job, newest, savepoint)
            if newest is not None:
                self._failures = self._failures.on_completion(newest.checkpoint)
        return RecoveryResult(start, kept, stored, confirmation)

    def _restore_hooks(
        self, job: JobContext, newest: Decision | None, savepoint: RestoredSavepoint | None
    ) -> EventTime | None:
        tell = partial(notify_restored, job, newest, savepoint)
        try:
            # A stop waits for the hooks: it needs a last checkpoint, and most hooks are quick.
            return outcome_of(tell, "flinkish-restore-hooks", job.threads, job.clock, job.is_cancelled)
        except GivenUp:
            raise JobInterruptedError("restoring the master hooks") from None

    def _check_input(self, owned: _OwnedJob) -> None:
        # This order matters: source positions are read from entries of the log, and a damaged entry must be
        # reported with its file.
        owned.job.log.check()
        with self._waiting("the sources to be checked before the start"):
            if not ask_until_answered(owned.inputs.check, owned.job.must_give_up, owned.job.clock):
                raise JobInterruptedError("waiting for the input")
            if self._catch_up.is_wanted:
                fix_ends = partial(self._catch_up.fix_ends, owned.inputs)
                if not ask_until_answered(fix_ends, owned.job.must_give_up, owned.job.clock):
                    raise JobInterruptedError("waiting for the ends of the input")

    def _plan(self, owned: _OwnedJob, recovered: RecoveryResult) -> _Start:
        job, control = owned.job, self._control_file(owned.job)
        with self._waiting("Spark to plan the query"):
            plan = self._engine.plan(control)
        newest = self._job_dir.newest_commit()
        if newest is not None:
            self._engine.on_confirmed(newest)
        time = TimeKeeper(
            plan.time,
            job.sources,
            control,
            job.log,
            job.clock,
            recovered.time,
            recovered.kept,
            recovered.start.next_batch,
            needs_first=self._catch_up.is_wanted,
        )
        time.begin()
        totals = AccumulatorTotals.from_decision(newest, self._job_dir.history().log_began_in)
        accumulators = AccumulatorKeeper(totals, recovered.kept)
        if newest is not None:
            self.progress.record_position(newest)
        gate = AdmissionGate(job.clock)
        coordinator = CheckpointCoordinator(
            CoordinatorParts(
                job=job,
                control=control,
                confirm=recovered.confirmation.confirm,
                channels=plan.channels,
                gate=gate,
                failures=self._failures,
                on_confirmed=self._on_confirmed,
                on_aborted=self.states.on_checkpoint_aborted,
                write_savepoint=lambda decision, target: self._engine.write_savepoint(
                    decision, target, job.log
                ),
                on_receipt=owned.completed.on_confirmed,
                time=time,
                on_aging=self.states.on_staged_data_aging,
                on_decided=owned.completed.on_decided,
                accumulators=accumulators,
                decided_at_ms=None if newest is None else newest.decided_at_ms,
            ),
            recovered.kept,
        )
        last = LastCheckpoint(self.control, time, coordinator, self._catch_up)
        lineage = self._job_dir.lineage()
        staging = plan.staging(
            StagingContext(job.job, job.ownership, lineage, job.blocks, job.clock, job.log)
        )

        def note(staged: StagedBatch, sync_ms: int) -> None:
            if staged.checkpoints and not ask_until_answered(
                owned.inputs.check_identity, job.must_give_up, job.clock
            ):
                raise JobInterruptedError("looking for the input")
            accumulators.on_staged(staged)
            self.states.run_tasks()
            self.progress.batches += 1
            coordinator.on_staged(staged, sync_ms)
            self._catch_up.look(owned.inputs, staged.batch)
            last.look()

        parts = EpochWriterParts(
            staging,
            self._attempts,
            gate,
            note,
            coordinator.must_wait,
            time,
            self.states.initialize_tasks,
            tuple(
                f"'{one.uid or one.title}'"
                for vertex in self._engine.vertices
                for one in vertex.operators
                if one.does == "async function"
            ),
        )
        with add_log_facts(lineage=lineage.value):
            writer = EpochWriter(recovered.start.next_batch, job, parts)
        return _Start(plan, lineage, gate, coordinator, writer, last)

    def _control_file(self, job: JobContext) -> ControlFile:
        return ControlFile.create_for_start(self._settings.scratch, job.ownership.epoch, next(self._starts))

    def _run(self, owned: _OwnedJob, start: _Start) -> None:
        self._writer, self.control.is_starting = start.writer, False
        # This order matters: a checkpoint that is due, or kept micro-batches, get a barrier in the first
        # micro-batch.
        self.control.prepare(start.coordinator)
        start.coordinator.start()
        try:
            with self._waiting("Spark to start the query"):
                query = start.plan.start(owned.job.log, start.writer)
        except BaseException:
            start.gate.stop()
            start.coordinator.stop()
            start.coordinator.join()
            self._failures = start.coordinator.failures
            raise
        owned.job.tracker.pending = query.pending_records
        # Not before: a request to a coordinator that never starts would wait for ever.
        self.control.attach(start.coordinator)
        self.progress.is_running = True
        self.states.on(JobEvent.STARTED)
        try:
            self._watch(query, start)
            if self.control.cancel_wanted.is_set():
                self.states.on(JobEvent.CANCEL)
        finally:
            self.progress.is_running = False
            self._tear_down(query, start)
            self._failures = start.coordinator.failures

    def _watch(self, query: RunningQuery, start: _Start) -> None:
        control = self.control
        while not control.cancel_wanted.is_set():
            self._outside.raise_if_ordered()
            if start.coordinator.failure is not None:
                raise start.coordinator.failure
            if start.last.is_confirmed:
                return
            start.last.look()
            with self._waiting("Spark to report the status of the query"):
                if not query.is_active:
                    self._raise_failure(query, start.writer)
                self.progress.dropped = query.count_dropped() + self._dropped_by_sinks
                self.progress.async_calls = query.async_calls()
            self._settings.clock.wait(control.cancel_wanted, _WATCH_MS)

    def _raise_failure(self, query: RunningQuery, writer: EpochWriter) -> NoReturn:
        if isinstance(writer.failure, FlinkishError):
            raise writer.failure
        # This call raises if the JVM is gone.
        told = query.exception()
        if writer.failure is not None:
            # Spark passes on only the text of an error in foreachBatch, inside Py4J's message.
            raise classify_alive(writer.failure, self._place()) from writer.failure
        raise told or QueryError("the query ended by itself")

    def _tear_down(self, query: RunningQuery, start: _Start) -> None:
        """End query and coordinator; when this returns, both have ended, or the JVM is gone."""
        start.gate.stop()
        start.coordinator.stop()
        with self._waiting("Spark to end the query"):
            self._is_ending_query = True
            try:
                query.stop()
            finally:
                self._is_ending_query = False
            self.progress.dropped = query.count_dropped() + self._dropped_by_sinks
            self.progress.async_calls = query.async_calls()
        start.coordinator.join()

    def _on_recovered(self, decision: Decision) -> None:
        # A checkpoint confirmed by the recovery is progress, too.
        self._dropped_by_sinks += self.progress.add_checkpoint(decision)
        self._restarts.ran_well()
        self.states.on_checkpoint_complete(decision.checkpoint)

    def _on_confirmed(self, decision: Decision, receipt: Receipt) -> None:
        self._dropped_by_sinks += self.progress.add_checkpoint(decision)
        self._restarts.ran_well()
        self._engine.on_confirmed(decision)
        self.states.on_checkpoint_complete(decision.checkpoint)

    def _finish(self, owned: _OwnedJob, start: _Start) -> QueryEnd:
        if self.control.stop_wanted.is_set() or start.last.is_confirmed:
            # Open transactions of a newer owner are not leftovers of this one.
            owned.job.ownership.check()
            sweep_after_stop(owned.job)
        return start.last.end()
