"""The checkpoint coordinator: reads messages, asks the protocol what follows, carries out its effects."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from flinkish_spark.checkpoint.answers import CheckpointAnswer, CheckpointTriggerRequest
from flinkish_spark.checkpoint.barriers import BarrierCounter, SourceWaits
from flinkish_spark.checkpoint.commit import JobInterruptedError
from flinkish_spark.checkpoint.completion import Completion, CoordinatorParts, make_decision
from flinkish_spark.checkpoint.decision_point import DeadCommittableError, DecisionError
from flinkish_spark.checkpoint.hooks import HookError
from flinkish_spark.checkpoint.statistics import StagedAges
from flinkish_spark.core.clock import RunningThread, Threads
from flinkish_spark.core.errors import (
    CommittableLostError,
    EnvironmentFault,
    FencedError,
    RetriableError,
    StoreError,
)
from flinkish_spark.core.log_context import add_log_facts
from flinkish_spark.core.steps import Step
from flinkish_spark.core.store import CreateResult
from flinkish_spark.core.watchdog import Wait, Waiting, skip_watch
from flinkish_spark.protocol import coordination as P
from flinkish_spark.protocol.checkpoint import (
    CheckpointRequest,
    JobPhase,
    ParticipantStatus,
    PendingCheckpoint,
    Schedule,
)
from flinkish_spark.protocol.decisions import Decision, Receipt, TriggerRecord, Verdict
from flinkish_spark.protocol.failures import CheckpointFailureReason as Reason
from flinkish_spark.protocol.failures import FailureManager, FailureVerdict
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.micro_batches import COMMITS
from flinkish_spark.protocol.records import StagedBatch

LOG = logging.getLogger(__name__)

Message = Callable[[], None]


class Mailbox:
    """A queue of calls that one thread makes later, in their order."""

    def __init__(self) -> None:
        self.stirred = threading.Event()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, message: Message) -> bool:
        """Queue a call; return False if the mailbox is closed."""
        with self._lock:
            if not self._is_closed:
                self._messages.put(message)
                self.stirred.set()
            return not self._is_closed

    def close(self) -> None:
        """Refuse new messages; queued ones can still be read."""
        with self._lock:
            self._is_closed = True

    def __len__(self) -> int:
        return self._messages.qsize()

    def read(self, on_error: Callable[[BaseException], None]) -> None:
        """Make all queued calls; an error of one goes to `on_error` and the rest are still made."""
        # This order matters: a message that comes from here on is read below or sets the event again.
        self.stirred.clear()
        while not self._messages.empty():
            try:
                self._messages.get()()
            except BaseException as error:
                on_error(error)


class Workers:
    """Starts threads for one coordinator and waits for them at its end."""

    def __init__(
        self, threads: Threads, on_failure: Callable[[BaseException], None], waiting: Waiting = skip_watch
    ) -> None:
        self._threads, self._on_failure, self._waiting = threads, on_failure, waiting
        self._awaited: dict[str, RunningThread] = {}

    def begin(self, name: str, work: Callable[[], None]) -> None:
        self._awaited = {known: one for known, one in self._awaited.items() if one.is_alive()}
        self._awaited[name] = self.begin_unawaited(name, work)

    def begin_unawaited(self, name: str, work: Callable[[], None]) -> RunningThread:
        """Start work that :meth:`join` does not wait for, because a user's code in it may hang."""

        def run() -> None:
            try:
                with self._waiting(f"{name} to end"):
                    work()
            except JobInterruptedError:
                LOG.info("%s was interrupted; the next start finishes decided checkpoints", name)
            except BaseException as error:
                self._on_failure(error)

        return self._threads.start(f"flinkish-{name}", run)

    def join(self) -> None:
        for name, worker in tuple(self._awaited.items()):
            with self._waiting(f"the thread of {name} to end"):
                worker.join()


_TICK_MS = 20
#: The same while Spark is about to write commits/N of a staged micro-batch: no event tells of that file.
_LOG_TICK_MS = 5
#: Undecided micro-batches after which a checkpoint is taken without waiting for the interval, and
#: after which no more are admitted: Spark purges log entries older than 200 micro-batches (query.py).
BACKLOG_TRIGGER, BACKLOG_LIMIT = 40, 80
#: Pause before the final checkpoint of a job is tried again after an aborted one.
FINAL_PAUSE_MS = 500
#: Reasons after which a follow-up checkpoint is taken soon, since the aborted one has staged data. After
#: other reasons the barrier never went out, or a hook failed, and the timer is soon enough; a checkpoint
#: that subsumes another decides its micro-batches; dead data ends in a rewind.
LEAVES_WORK = frozenset(
    {Reason.DECLINED, Reason.BARRIERS_DO_NOT_ADD_UP, Reason.EXPIRED, Reason.DECISION_FAILED}
)


class StopWithSavepointError(EnvironmentFault):
    """A stop with savepoint failed; the job goes back to its last checkpoint and runs on."""

    restartable = True


def why_ended(failure: BaseException | None) -> tuple[Reason, str]:
    """Return the abort reason, and its text, for checkpoints that are open when the coordinator ends."""
    if failure is None:
        return Reason.JOB_STOPPED, "the job was stopped"
    if isinstance(failure, FencedError):
        return Reason.OWNER_LOST, str(failure)
    if isinstance(failure, CommittableLostError):
        return Reason.COMMITTABLE_LOST, str(failure)
    return Reason.TASK_FAILED, f"the job failed: {failure}"


class CheckpointCoordinator:
    """One thread with a mailbox; runs until :meth:`stop`, or until :attr:`failure` is set.

    Made anew for every start of the query, with the micro-batches that the recovery kept.
    """

    def __init__(self, parts: CoordinatorParts, kept: Sequence[StagedBatch]) -> None:
        self._parts, self._job, self._mailbox = parts, parts.job, Mailbox()
        self._undecided, self._failures = tuple(kept), parts.failures
        self._answers: dict[int, Callable[[CheckpointAnswer], None]] = {}
        self._counter = BarrierCounter(parts.channels, parts.job.operators, parts.job.config.mode)
        self._has_backlog_request = False
        #: The error of the checkpoint that is being declined.
        self._declined_by: EnvironmentFault | None = None
        self._final_again_ms: int | None = None
        self._stopping = threading.Event()
        self.ended_with: CheckpointPurpose | None = None  # Set when the last checkpoint is confirmed.
        self.failure: BaseException | None = None
        self._workers = Workers(parts.job.threads, self._fail, parts.job.waiting)
        #: Copies for other threads.
        self._needs_micro_batches, self._open = False, tuple[PendingCheckpoint, ...]()
        #: Checkpoints whose savepoints are being written: nothing they need may be deleted.
        self.exporting: frozenset[CheckpointId] = frozenset()
        self._exporting_lock = threading.Lock()
        self._thread: RunningThread | None = None
        self._state = P.Coordination(
            parts.job.config.rules(),
            (*self._counter.participants, *parts.job.hooks.participants()),
            self._first_id(),
            self._last_ms(),
        )
        self._waits = SourceWaits(parts.control, self._state, parts.job.clock, parts.job.config.interval_ms)
        self._ages = StagedAges(parts.job.committers, parts.job.clock, parts.on_aging)
        self._completion = Completion(parts, lambda: self._undecided, self._stopping.is_set)

    def _first_id(self) -> CheckpointId:
        # The history also knows ids whose record the store refused.
        return max([self._job.tracker.highest, *self._job.job_dir.list_checkpoint_ids()]).next()

    def _last_ms(self) -> int:
        """Return when the newest checkpoint was decided, perhaps by an earlier start; now if none was."""
        clock, decided_at_ms, config = self._job.clock, self._parts.decided_at_ms, self._job.config
        ago_ms = 0 if decided_at_ms is None else max(0, clock.wall_ms() - decided_at_ms)
        # A longer time makes no difference.
        return clock.monotonic_ms() - min(ago_ms, max(config.interval_ms, config.min_pause_ms))

    # Called by other threads:
    def on_staged(self, staged: StagedBatch, sync_ms: int) -> None:
        self._mailbox.put(lambda: self._note(staged, sync_ms))

    def must_wait(self) -> bool:
        """Return whether to hold the next micro-batch back, since too many are undecided."""
        # Never while a barrier waits for a micro-batch to carry it: that checkpoint could not complete.
        staged = len(self._undecided) + len(self._mailbox)
        return staged >= BACKLOG_LIMIT and not self._needs_micro_batches and self.failure is None

    def ask(self, request: CheckpointTriggerRequest) -> None:
        """Request a checkpoint; the answer goes to `request.on_answer`, in a thread of the job's."""
        message = partial(self._ask, request.purpose, request.target, request.on_answer)
        if not self._mailbox.put(message):
            request.on_answer(CheckpointAnswer.make_refused(Reason.SHUT_DOWN))

    def schedule(self, schedule: Schedule) -> None:
        """Switch periodic checkpoints on or off; explicit requests still work."""
        self._mailbox.put(lambda: self._carry_out(self._state.on_schedule(schedule)))

    def start(self) -> None:
        self._thread = self._job.threads.start("flinkish-coordinator", self.run)

    def stop(self) -> None:
        self._stopping.set()
        self._mailbox.stirred.set()

    def join(self) -> None:
        if self._thread is not None:
            with self._job.waiting("the coordinator to end"):
                self._thread.join()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def list_waits(self) -> Iterator[Wait]:
        """Yield what each open checkpoint waits for; called by any thread."""
        now_ms = self._job.clock.monotonic_ms()
        for pending in self._open:
            if pending.is_open:
                who, since_ms = f"checkpoint {pending.checkpoint}", pending.started_at_ms
                yield Wait(who, self._waits.describe_wait(pending), now_ms - since_ms)

    @property
    def failures(self) -> FailureManager:
        return self._failures

    def run(self) -> None:
        """Tick until stopped or failed; the error is then in :attr:`failure`."""
        try:
            if not self._stopping.is_set():
                self.begin()
            while not self._stopping.is_set() and self.failure is None:
                with self._job.waiting("the coordinator's step to end"):
                    self.tick()
                tick_ms = _LOG_TICK_MS if self._state.awaiting_log else _TICK_MS
                self._job.clock.wait(self._mailbox.stirred, tick_ms)
        except BaseException as error:
            self._fail(error)
        finally:
            self._end()

    def begin(self) -> None:
        """Accept requests from now on; request a checkpoint of kept micro-batches at once."""
        running = dict.fromkeys(self._job.uids, ParticipantStatus.RUNNING)
        self._state.on_phase(JobPhase.RUNNING, running)
        if self._undecided:
            self._ask(CheckpointPurpose.FOLLOW_UP)

    def tick(self) -> None:
        self._mailbox.read(self._fail)
        if self.failure is not None:
            return
        for pending in self._state.awaiting_log:
            if pending.batch is not None and self._job.log.read(COMMITS, pending.batch) is not None:
                self._job.observer.on_step_end(Step.SPARK_COMMIT, str(pending.batch))
                self._carry_out(self._state.on_commit_log(pending.checkpoint))
        self._ages.check(self._undecided)
        self._parts.time.wake()
        self._carry_out(self._state.on_time(self._job.clock.monotonic_ms()))
        if self._final_again_ms is not None and self._job.clock.monotonic_ms() >= self._final_again_ms:
            self._final_again_ms = None
            self._ask(CheckpointPurpose.FINAL)
        if len(self._undecided) >= BACKLOG_TRIGGER and not self._has_backlog_request:
            self._has_backlog_request = True
            self._ask(CheckpointPurpose.FOLLOW_UP)
        if self._waits.must_ask():
            self._ask(CheckpointPurpose.FOLLOW_UP)

    def _end(self) -> None:
        """Finish the decided checkpoints, abort the others, and answer every request."""
        self._stopping.set()
        # This order matters: from here on nothing starts, so the messages read below only end checkpoints.
        for effect in self._state.on_stop(*why_ended(self.failure)):
            # The next start seals their ids; it may be another process.
            if isinstance(effect, P.Refuse):
                self._carry_out((effect,))
            elif isinstance(effect, P.Abort):
                self._job.tracker.on_failed(effect.checkpoint, effect.reason, effect.text)
                self._parts.on_aborted(effect.checkpoint)
                self._answer(effect.request, CheckpointAnswer.make_aborted(effect))
        self._workers.join()
        while self._mailbox:
            # Checkpoints that were being decided are finished by now; their savepoints are written, too.
            self._mailbox.read(self._fail)
            self._workers.join()
        self._job.tracker.store(is_last=True)
        self._mailbox.close()
        self._mailbox.read(self._fail)
        for pending in self._state.open:
            self._answer(pending.request, CheckpointAnswer.make_left_to_next_start(pending.checkpoint))
        for number in tuple(self._answers):
            self._answers.pop(number)(CheckpointAnswer.make_refused(Reason.SHUT_DOWN))

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def _ask(
        self,
        purpose: CheckpointPurpose,
        target: str = "",
        on_answer: Callable[[CheckpointAnswer], None] | None = None,
    ) -> None:
        now_ms = self._job.clock.monotonic_ms()
        request = self._state.new_request(purpose, now_ms, target)
        if on_answer is not None:
            self._answers[request.number] = on_answer
        self._carry_out(self._state.on_request(request, now_ms))

    def _note(self, staged: StagedBatch, sync_ms: int) -> None:
        self._undecided = (*self._undecided, staged)
        for checkpoint in sorted(staged.checkpoints):
            if self._state.awaits(checkpoint):
                self._job.tracker.on_staged(checkpoint, staged, sync_ms)
                self._count(checkpoint, staged)

    def _count(self, checkpoint: CheckpointId, staged: StagedBatch) -> None:
        now_ms = self._job.clock.monotonic_ms()
        participants, wrong = self._counter.count(checkpoint, staged)
        if wrong:
            reason = Reason.BARRIERS_DO_NOT_ADD_UP
            self._carry_out(self._state.on_declined(checkpoint, reason, wrong, now_ms))
        else:
            self._job.tracker.on_acknowledged(checkpoint, participants)
            self._carry_out(self._state.on_barriers(checkpoint, staged.batch, participants, now_ms))

    def _carry_out(self, effects: Sequence[P.Effect]) -> None:
        for effect in effects:
            match effect:  # P.NotifyCompletion is handled in _finish
                case P.Initialise(checkpoint, request):
                    asked = next(one.missing for one in self._state.open if one.checkpoint == checkpoint)
                    self._job.tracker.on_triggered(checkpoint, request, asked)
                    # The end of the job does not wait for it: a user's hook may hang.
                    self._workers.begin_unawaited(
                        f"initialise-{checkpoint}", partial(self._initialise, effect)
                    )
                case P.Offer(checkpoint, request):
                    self._offer(checkpoint, request)
                case P.Decide(checkpoint, batch):
                    pending = next(one for one in self._state.open if one.checkpoint == checkpoint)
                    batches = tuple(s for s in self._undecided if s.batch <= batch)
                    decision = make_decision(pending, batches, self._parts)
                    self._workers.begin(f"complete-{checkpoint}", partial(self._complete, decision))
                case P.Abort():
                    self._abort(effect)
                case P.Refuse(request, reason):
                    LOG.info("a %s checkpoint is refused: %s", request.purpose.value, reason.text)
                    if request.number in self._answers:
                        self._job.tracker.on_refused()
                    self._answer(request, CheckpointAnswer.make_refused(reason))
        self._needs_micro_batches, self._open = self._state.needs_micro_batches, self._state.open

    def _initialise(self, effect: P.Initialise) -> None:
        """Create the id's record, call the hooks and report; runs in its own thread."""
        checkpoint, job = effect.checkpoint, self._job

        def decline(reason: Reason, text: str, cause: EnvironmentFault | None = None) -> None:
            self._mailbox.put(partial(self._decline, checkpoint, reason, text, cause))

        record = TriggerRecord(checkpoint, job.ownership.epoch, effect.request.purpose, job.clock.wall_ms())
        try:
            # This order matters: a new owner seals the ids that have a record. An id without record whose
            # barrier is out could still be decided after that.
            created = job.job_dir.create_trigger(record)
        except StoreError as error:
            decline(Reason.INITIALISATION_FAILED, str(error), error)
            return
        if created is CreateResult.EXISTS:
            job.ownership.check()
            decline(Reason.ID_COUNTER_FAILED, f"id {checkpoint} is in use")
            return
        try:
            hooks = job.hooks.trigger(checkpoint)
        except HookError as error:
            decline(Reason.HOOK_FAILED, str(error), error)
            return
        self._mailbox.put(lambda: self._carry_out(self._state.on_initialised(checkpoint, hooks)))

    def _decline(
        self, checkpoint: CheckpointId, reason: Reason, text: str, cause: EnvironmentFault | None
    ) -> None:
        self._declined_by = cause
        try:
            self._carry_out(self._state.on_declined(checkpoint, reason, text, self._job.clock.monotonic_ms()))
        finally:
            self._declined_by = None

    def _offer(self, checkpoint: CheckpointId, request: CheckpointRequest) -> None:
        parts = self._parts
        if request.purpose.is_final:
            # This order matters: the gate must know the last barrier before a micro-batch can carry it.
            parts.gate.close_after(checkpoint)
        parts.time.on_offer(request.purpose)
        parts.job.tracker.on_offered(checkpoint)
        parts.job.observer.on_step_start(Step.TRIGGER, str(checkpoint))
        parts.control.offer(checkpoint, request.purpose)
        parts.job.observer.on_step_end(Step.TRIGGER, str(checkpoint))

    def _abort(self, effect: P.Abort) -> None:
        """Write the verdict ABORT; the staged data passes to the next checkpoint."""
        parts, checkpoint, effect = self._parts, effect.checkpoint, self._waits.on_aborted(effect)
        with add_log_facts(checkpoint=int(checkpoint)):
            LOG.warning("checkpoint %s is aborted: %s, %s", checkpoint, effect.reason.value, effect.text)
        parts.job.tracker.on_failed(checkpoint, effect.reason, effect.text)
        decision = Decision(
            checkpoint,
            Verdict.ABORT,
            parts.job.ownership.epoch,
            parts.job.clock.wall_ms(),
            reason=f"{effect.reason.value}: {effect.text}",
            purpose=effect.request.purpose,
        )
        parts.job.job_dir.create_decision(decision)
        parts.job.ownership.check()
        parts.on_aborted(checkpoint)
        self._answer(effect.request, CheckpointAnswer.make_aborted(effect))
        self._failures, verdict = self._failures.on_failure(checkpoint, effect.reason, effect.request.purpose)
        if verdict is FailureVerdict.JOB_FAILS:
            # An outage as cause does not count as a repeated failure. A timeout may be one.
            is_late = effect.reason is Reason.EXPIRED
            cause = TimeoutError(effect.text) if is_late else self._declined_by
            raise RetriableError(
                f"checkpoint {checkpoint} failed, and more checkpoints in a row than the job tolerates",
                why=f"{effect.reason.text}; {effect.text}",
                what_to_do="see why checkpoints fail, or raise tolerable_failures",
                kind="checkpoints",
            ) from cause
        if effect.request.purpose.stops_with_savepoint:
            raise StopWithSavepointError(
                "the job could not be stopped with a savepoint",
                why=f"{effect.reason.text}; {effect.text}",
                what_to_do="find out why the checkpoint failed, and stop the job again; it runs on",
            )
        if effect.request.purpose is CheckpointPurpose.FINAL:
            parts.gate.reopen()
            self._final_again_ms = parts.job.clock.monotonic_ms() + FINAL_PAUSE_MS
        elif self._undecided and effect.reason in LEAVES_WORK:
            self._ask(CheckpointPurpose.FOLLOW_UP)

    def _answer(self, request: CheckpointRequest, answer: CheckpointAnswer) -> None:
        if request.number in self._answers:
            self._answers.pop(request.number)(answer)

    def _complete(self, decision: Decision) -> None:
        """Decide and finish a checkpoint and report; runs in its own thread."""
        checkpoint, parts = decision.checkpoint, self._parts

        def decline(reason: Reason, error: EnvironmentFault) -> None:
            self._decline(checkpoint, reason, error.why or str(error), error)
            if reason is Reason.STAGED_DATA_DEAD:
                raise error

        def on_decided() -> None:
            parts.job.tracker.on_decided(checkpoint)
            self._mailbox.put(lambda: self._state.on_decided(checkpoint))

        try:
            with add_log_facts(checkpoint=int(checkpoint)):
                receipt = self._completion.complete(decision, on_decided)
        except DeadCommittableError as error:
            self._mailbox.put(partial(decline, Reason.STAGED_DATA_DEAD, error))
        except DecisionError as error:
            self._mailbox.put(partial(decline, Reason.DECISION_FAILED, error))
        else:
            self._mailbox.put(lambda: self._finish(decision, receipt))

    def _finish(self, decision: Decision, receipt: Receipt) -> None:
        parts, checkpoint = self._parts, decision.checkpoint
        self._undecided = tuple(s for s in self._undecided if s.batch > decision.batch)
        self._has_backlog_request = False
        self._counter.forget(checkpoint)
        self._failures = self._failures.on_completion(checkpoint)
        parts.job.tracker.on_confirmed(decision)
        parts.on_confirmed(decision, receipt)
        effects = self._state.on_confirmed(checkpoint, parts.job.clock.monotonic_ms())
        completed = next(one for one in effects if isinstance(one, P.NotifyCompletion))
        # This order matters: after the next checkpoint's receipt, files that the savepoint needs may go.
        if completed.request.purpose.is_savepoint:
            with self._exporting_lock:
                self.exporting |= {checkpoint}
            self._workers.begin(f"savepoint-{checkpoint}", lambda: self._export(decision, completed.request))
        else:
            self._close_request(completed.request, CheckpointAnswer.make_completed(checkpoint))
        self._carry_out(effects)

    def _export(self, decision: Decision, request: CheckpointRequest) -> None:
        """Write the savepoint of a confirmed checkpoint; runs in its own thread."""
        checkpoint, failure = decision.checkpoint, ""
        try:
            self._parts.write_savepoint(decision, request.target)
        except Exception as error:
            # Only the savepoint fails: the checkpoint is complete and the job goes on.
            LOG.error("the savepoint of checkpoint %s failed: %s", checkpoint, error)
            failure = str(error) or type(error).__name__
        finally:
            with self._exporting_lock:
                self.exporting -= {checkpoint}
        if failure:
            failed = CheckpointAnswer.make_savepoint_failed(checkpoint, failure)
            self._mailbox.put(lambda: self._answer(request, failed))
            if request.purpose.is_final:
                raise StopWithSavepointError(
                    "the job could not be stopped with a savepoint",
                    why=failure,
                    what_to_do=f"none: checkpoint {checkpoint} is complete and the job goes on from it",
                )
            return
        answer = CheckpointAnswer.make_completed(checkpoint, request.target)
        self._mailbox.put(lambda: self._close_request(request, answer))

    def _close_request(self, request: CheckpointRequest, answer: CheckpointAnswer) -> None:
        self._answer(request, answer)
        if request.purpose.is_final:
            self.ended_with = request.purpose
