"""The checkpoint coordinator: read facts, let the protocol decide, persist, then act.

One thread of the user's process, one loop. It triggers, counts barriers, waits for commits/N,
decides, and has the decision finished; the next checkpoint is decided only after the receipt of
this one. Made anew for every start of the query, from what the recovery found.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flinkish_spark.clock import Clock
from flinkish_spark.config import CheckpointConfig
from flinkish_spark.errors import EnvironmentFault, FencedError, InternalError
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.alignment import Alignment, ExpectedChannels, count_barriers
from flinkish_spark.protocol.checkpoint import CheckpointEvent, CheckpointState, PendingCheckpoint
from flinkish_spark.protocol.decisions import Decision, Receipt, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId
from flinkish_spark.protocol.records import Committable, StagedBatch
from flinkish_spark.protocol.trigger import JobPhase, TriggerFacts, TriggerReason, decide_trigger
from flinkish_spark.runtime.blocks import BlockPool
from flinkish_spark.runtime.confirmation import Confirmation, Interrupted
from flinkish_spark.runtime.control_source import ControlFile
from flinkish_spark.runtime.epoch_writer import AdmissionGate
from flinkish_spark.runtime.ownership import Ownership
from flinkish_spark.runtime.spark_log import COMMITS, OFFSETS, SparkLog
from flinkish_spark.runtime.steps import Observer, Step
from flinkish_spark.sinks.base import Committer
from flinkish_spark.store import CreateResult

LOG = logging.getLogger(__name__)
_TICK_SECONDS = 0.02
#: Undecided micro-batches after which a checkpoint is taken without waiting for the interval, and
#: after which no more are admitted: Spark purges its log behind 200 micro-batches (query.py).
BACKLOG_TRIGGER, BACKLOG_LIMIT = 40, 80


class StagedDataDied(EnvironmentFault):
    """Something staged cannot be committed any more; nothing was decided, so the job rewinds."""

    restartable = True


@dataclass(frozen=True)
class CoordinatorParts:
    """What the coordinator works with."""

    config: CheckpointConfig
    clock: Clock
    job_dir: JobDir
    ownership: Ownership
    log: SparkLog
    control: ControlFile
    confirmation: Confirmation
    committers: Mapping[str, Committer]
    channels: Mapping[str, ExpectedChannels]
    uids: tuple[str, ...]
    blocks: BlockPool
    gate: AdmissionGate
    observer: Observer
    on_confirmed: Callable[[Decision, Receipt], None]


class CheckpointCoordinator(threading.Thread):
    """Runs until :meth:`stop`, or until :attr:`failure` is set.

    Parameters
    ----------
    parts
        See :class:`CoordinatorParts`.
    kept
        Micro-batches staged and committed by Spark but not decided; checkpointed at once.
    """

    def __init__(self, parts: CoordinatorParts, kept: Sequence[StagedBatch]) -> None:
        super().__init__(name="flinkish-coordinator", daemon=True)
        self._parts = parts
        self._staged: queue.SimpleQueue[StagedBatch] = queue.SimpleQueue()
        self._undecided = list(kept)
        self._pending: PendingCheckpoint | None = None
        self._requested = 1 if kept else 0
        self._phase = JobPhase.STARTING
        known = parts.job_dir.decided_ids()
        self._next_id = known[-1].next() if known else CheckpointId(1)
        self._last_trigger_ms = self._last_end_ms = parts.clock.monotonic_ms()
        self._stop_requested = threading.Event()
        self._final_wanted = threading.Event()
        self.final_confirmed = threading.Event()
        self._final_id = CheckpointId(0)
        self.failure: BaseException | None = None

    # -- called by other threads ----------------------------------------------------------------
    def on_staged(self, staged: StagedBatch) -> None:
        """Take note of a staged micro-batch; called by the epoch writer."""
        self._staged.put(staged)

    def must_wait(self) -> bool:
        """Whether to hold back a micro-batch: too many are undecided, and it can carry no barrier.

        While a barrier is on its way nothing is held back, or the checkpoint that would clear the
        backlog could never complete.
        """
        pending = self._pending
        awaits_barrier = pending is not None and pending.state is CheckpointState.TRIGGERED
        staged = len(self._undecided) + self._staged.qsize()
        return staged >= BACKLOG_LIMIT and not awaits_barrier and self.failure is None

    def trigger_final(self) -> None:
        """Take one more checkpoint and hold back everything behind its barrier."""
        self._final_wanted.set()

    def stop(self) -> None:
        """End the loop after the step at hand; what is decided stays decided."""
        self._stop_requested.set()

    @property
    def is_stopping(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stop_requested.is_set()

    # -- the loop -------------------------------------------------------------------------------
    def run(self) -> None:
        """Tick until stopped; an error ends the loop and is left in :attr:`failure`."""
        self._phase = JobPhase.RUNNING
        try:
            while not self._stop_requested.is_set():
                self.tick()
                self._stop_requested.wait(_TICK_SECONDS)
        except Interrupted:
            LOG.info("the coordinator was interrupted; the next start finishes the decided checkpoint")
        except BaseException as error:
            self.failure = error
        finally:
            self._phase = JobPhase.STOPPED

    def tick(self) -> None:
        """Do everything that can be done now."""
        while not self._staged.empty():
            self._note(self._staged.get())
        self._advance()
        self._expire()
        self._trigger()

    def _note(self, staged: StagedBatch) -> None:
        self._undecided.append(staged)
        pending = self._pending
        if pending is None or pending.checkpoint not in staged.checkpoints:
            return
        if pending.state is not CheckpointState.TRIGGERED:
            raise InternalError(f"barrier {pending.checkpoint} came again in micro-batch {staged.batch}")
        report = count_barriers(pending.checkpoint, staged.acks, self._parts.channels)
        if report.alignment is Alignment.ALIGNED:
            self._pending = pending.acknowledged_by(staged.batch)
        else:
            self._abort(CheckpointEvent.DECLINED, report.detail)

    def _advance(self) -> None:
        """Wait for commits/N, then decide and finish."""
        pending = self._pending
        if pending is None or pending.batch is None:
            return
        if pending.state is CheckpointState.ACKNOWLEDGED:
            if self._parts.log.read(COMMITS, pending.batch) is None:
                return
            self._parts.observer.after(Step.SPARK_COMMIT, str(pending.batch))
            self._pending = pending = pending.on(CheckpointEvent.COMMIT_LOG_READ)
        if pending.state is CheckpointState.LOGGED:
            assert pending.batch is not None
            decision = self._decision(pending, pending.batch)
            if self._all_alive(decision):
                self._complete(decision)

    def _decision(self, pending: PendingCheckpoint, batch: BatchId) -> Decision:
        parts = self._parts
        offsets, commits = parts.log.read(OFFSETS, batch), parts.log.read(COMMITS, batch)
        if offsets is None or commits is None:
            raise InternalError(f"Spark's log entries of micro-batch {batch} are gone")
        batches = tuple(s for s in self._undecided if s.batch <= batch)
        return Decision(
            pending.checkpoint,
            Verdict.COMMIT,
            parts.ownership.epoch,
            parts.clock.wall_ms(),
            lineage=batches[-1].lineage,
            batches=batches,
            offsets_text=offsets,
            commits_text=commits,
            uids=parts.uids,
        )

    def _all_alive(self, decision: Decision) -> bool:
        """Check every committable right before the decision: a rewind is cheaper than a replay."""
        for uid, committer in self._parts.committers.items():
            committables = [c for _, c in decision.committables_of(uid)]
            if not committables:
                continue
            try:
                dead = committer.why_dead(committables)
            except EnvironmentFault as fault:
                if not fault.restartable:
                    raise
                LOG.warning("checkpoint %s waits for sink '%s': %s", decision.checkpoint, uid, fault)
                return False
            if dead:
                reason = next(iter(dead.values()))
                self._abort(CheckpointEvent.DECLINED, reason)
                raise StagedDataDied(
                    f"checkpoint {decision.checkpoint} was declined before its decision",
                    why=reason,
                    what_to_do="none: the job goes back to the last checkpoint and stages again",
                )
        return True

    def _complete(self, decision: Decision) -> None:
        """Decide, finish, and forget. The order of these three calls is the protocol."""
        self._decide(decision)
        receipt = self._parts.confirmation.confirm(decision)
        self._finished(decision, receipt)

    def _decide(self, decision: Decision) -> None:
        parts, pending = self._parts, self._pending
        assert pending is not None
        parts.ownership.check()
        parts.observer.before(Step.DECISION, str(decision.checkpoint))
        # DECISION POINT: with this create the checkpoint is complete and must be finished by
        # whoever owns the job. Before it the epoch can vanish as a whole; after it, never.
        created = parts.job_dir.create_decision(decision)
        parts.observer.after(Step.DECISION, str(decision.checkpoint))
        if created is CreateResult.EXISTS:
            parts.ownership.check()
            raise FencedError(
                f"checkpoint {decision.checkpoint} was decided by somebody else",
                what_to_do="let this process end; the newer owner goes on",
            )
        self._pending = pending.on(CheckpointEvent.DECISION_WON)

    def _finished(self, decision: Decision, receipt: Receipt) -> None:
        parts = self._parts
        if self._pending is not None and self._pending.state is CheckpointState.DECIDED:
            self._pending.on(CheckpointEvent.RECEIPT_WRITTEN)
        self._end_pending()
        self._undecided = [s for s in self._undecided if s.batch > decision.batch]
        for staged in decision.batches:
            parts.job_dir.delete_staged(staged.lineage, JobDir.attempt_name(staged))
            # Only now may a transactional id be used again: until the receipt its handle may be
            # committed once more, and would commit whatever is open under that id.
            if staged.owner_epoch == parts.ownership.epoch:
                parts.blocks.give_back(staged.blocks)
        self._retire(decision.checkpoint)
        self._sweep()
        if decision.checkpoint == self._final_id:
            self.final_confirmed.set()
        parts.on_confirmed(decision, receipt)

    def _abort(self, event: CheckpointEvent, reason: str) -> None:
        """Seal the pending id with ABORT; what it staged passes to the next checkpoint."""
        pending, parts = self._pending, self._parts
        assert pending is not None
        ended = pending.on(event)
        LOG.warning("checkpoint %s: %s, %s", pending.checkpoint, event.value, reason)
        decision = Decision(
            ended.checkpoint, Verdict.ABORT, parts.ownership.epoch, parts.clock.wall_ms(), reason=reason
        )
        parts.job_dir.create_decision(decision)
        parts.ownership.check()
        if pending.checkpoint == self._final_id:
            parts.gate.reopen()
            self._final_wanted.set()
        self._end_pending()
        self._requested += 1

    def _end_pending(self) -> None:
        self._pending = None
        self._last_end_ms = self._parts.clock.monotonic_ms()

    def _expire(self) -> None:
        pending, now_ms = self._pending, self._parts.clock.monotonic_ms()
        if pending is not None and pending.is_expired(now_ms, self._parts.config.timeout_ms):
            self._abort(CheckpointEvent.EXPIRED, f"not decided within {self._parts.config.timeout_ms} ms")

    def _trigger(self) -> None:
        config, now_ms = self._parts.config, self._parts.clock.monotonic_ms()
        backlog = 1 if len(self._undecided) >= BACKLOG_TRIGGER else 0
        final = 1 if self._final_wanted.is_set() else 0
        facts = TriggerFacts(
            now_ms=now_ms,
            phase=self._phase,
            pending=0 if self._pending is None else 1,
            requested=self._requested + backlog + final,
            last_trigger_ms=self._last_trigger_ms,
            last_end_ms=self._last_end_ms,
            interval_ms=config.interval_ms,
            min_pause_ms=config.min_pause_ms,
        )
        reason: TriggerReason = decide_trigger(facts)
        if not reason.starts:
            return
        checkpoint = self._next_id
        if final:
            self._final_id = checkpoint
            self._final_wanted.clear()
            self._parts.gate.close_behind(checkpoint)
        self._next_id = checkpoint.next()
        self._requested = 0
        self._last_trigger_ms = now_ms
        self._pending = PendingCheckpoint(checkpoint, now_ms)
        self._parts.observer.before(Step.TRIGGER, str(checkpoint))
        self._parts.control.offer(checkpoint)
        self._parts.observer.after(Step.TRIGGER, str(checkpoint))

    def _retire(self, newest: CheckpointId) -> None:
        """Delete metadata of checkpoints beyond the retained ones; the newest is never touched."""
        oldest_kept = int(newest) - self._parts.config.retained
        for checkpoint in self._parts.job_dir.decided_ids():
            if int(checkpoint) >= oldest_kept:
                break
            # This order matters: a decision without its receipt would be committed again.
            self._parts.job_dir.store.delete(f"checkpoints/{checkpoint}/decision.json")
            self._parts.job_dir.store.delete(f"checkpoints/{checkpoint}/receipt.json")

    def _sweep(self) -> None:
        """Abort what failed task attempts left open: it hides later records from readers."""
        kept: list[Committable] = [c for s in self._undecided for c in s.committables]
        staged = {b for s in self._undecided for b in s.blocks}
        for committer in self._parts.committers.values():
            try:
                # Blocks that no staged file names yet belong to the micro-batch that runs now.
                committer.sweep(kept, lambda: self._parts.blocks.leased - staged)
            except EnvironmentFault as fault:
                if not fault.restartable:
                    raise
                LOG.warning("leftovers are swept later: %s", fault)
