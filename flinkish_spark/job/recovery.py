"""The recovery: gather facts, ask the protocol for the next step, do it, start over."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from flinkish_spark.checkpoint.commit import Confirmation, JobInterruptedError, refuse_another_timeline
from flinkish_spark.checkpoint.context import JobContext
from flinkish_spark.checkpoint.failures import RetryPolicy, classify
from flinkish_spark.checkpoint.spark_log import missing_entry
from flinkish_spark.contracts.sink import ShownOrder
from flinkish_spark.core.errors import CommittableLostError, CorruptObjectError, FencedError, InternalError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.watchdog import note_failure
from flinkish_spark.job.inputs import Inputs
from flinkish_spark.job.rewind import Rewinder
from flinkish_spark.protocol import recovery as R
from flinkish_spark.protocol.decisions import Decision, RewindIntent
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.lineage import RewindKind
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS
from flinkish_spark.protocol.records import Committable, Outcome, StagedBatch
from flinkish_spark.protocol.watermarks import EventTime

LOG = logging.getLogger(__name__)


class Reseeding(Protocol):
    """Starts a new Spark checkpoint from exported state, for a change that Spark's own cannot follow."""

    def is_wanted(self, log_began_in: Lineage) -> bool:
        """Return True if that lineage needs a new log; False once the new log has begun."""

    def export(self, decision: Decision | None, lineage: Lineage) -> None:
        """Write a checkpoint's state to the place that the log of `lineage` starts from; repeatable."""
        # Without a decision the new log begins as the current one did.


class Replaying(Protocol):
    def replay(
        self,
        decision: Decision,
        lost: CommittableLostError,
        abort: Callable[[str, Sequence[Committable]], None],
        patiently: Callable[[Callable[[], str]], str],
    ) -> None: ...


T = TypeVar("T")
_PAUSE_MS = 200
#: More steps than any recovery can need; beyond it the facts do not change, which is a bug.
_MOST_STEPS = 1_000


@dataclass(frozen=True)
class RecoveryResult:
    start: R.StartSpark
    #: The kept micro-batches after the last checkpoint, in order.
    kept: list[StagedBatch]
    #: Event time at the last checkpoint; None if it has none.
    time: EventTime | None
    #: Confirms the checkpoints that this start decides.
    confirmation: Confirmation


class Recovery:
    """Brings the job directory into a state from which Spark may start; no query runs."""

    def __init__(
        self,
        job: JobContext,
        confirmation: Confirmation,
        inputs: Inputs,
        *,
        reseeding: Reseeding,
        replaying: Replaying,
        on_confirmed: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        self._job_dir, self._log, self._ownership = job.job_dir, job.log, job.ownership
        self._committers, self._pins, self._confirmation = job.committers, job.pins, confirmation
        self._clock, self._must_give_up = job.clock, job.must_give_up
        self._reseeding, self._replaying = reseeding, replaying
        self._rewinder = Rewinder(job, inputs, self._patiently, self._wait)
        self._on_confirmed, self._is_swept = on_confirmed, False
        #: Checkpoints that could not be confirmed, with their decisions at that time.
        self._lost: dict[CheckpointId, tuple[Decision, CommittableLostError]] = {}
        self._unpinnable: set[CheckpointId] = set()

    def run(self) -> tuple[R.StartSpark, list[StagedBatch]]:
        """Recover the job; return the start position of Spark, and the kept micro-batches in order."""
        self._is_swept = False
        self._ownership.check()
        self._job_dir.forget_finished_order()
        for _ in range(_MOST_STEPS):
            self._ownership.check()
            lineage = self._job_dir.lineage()
            staged = self._job_dir.list_staged(lineage)
            decisions = {d.checkpoint: d for d in self._job_dir.live_commits()}
            facts = self._facts(staged, decisions)
            step = R.next_step(facts)
            if lineage != facts.lineage:
                # A rewind that an earlier owner finished became visible while the facts were read.
                continue
            LOG.info("recovery: %s", step)
            if isinstance(step, R.StartSpark):
                kept = sorted((s for s in staged.values() if s.batch in step.kept), key=lambda s: s.batch)
                return step, kept
            # Facts count only if this process is still the owner after it has read them: a newer owner
            # renames Spark's folder, and an empty log looks like micro-batches to abort.
            self._ownership.check()
            self._do(step, facts, staged, decisions)
        raise InternalError("the recovery does not come to an end", what_to_do="report this with its log")

    def _facts(
        self, staged: Mapping[str, StagedBatch], decisions: Mapping[CheckpointId, Decision]
    ) -> R.RecoveryFacts:
        history = self._job_dir.history()
        decided = R.drop_leftovers(
            R.DecidedFact(d.checkpoint, d.batch, self._job_dir.receipt(d.checkpoint) is not None, d.lineage)
            for d in decisions.values()
        )
        commits = self._log.batches(COMMITS)
        newest = max((d.batch for d in decided if d.lineage >= history.log_began_in), default=None)
        return R.RecoveryFacts(
            rewind_is_open=self._open_rewind(newest) is not None,
            lineage=history.live,
            offsets=self._log.batches(OFFSETS),
            commits=commits,
            decided=decided,
            staged=tuple(
                R.StagedFact(
                    s.batch, name, self._why_dead(s) if s.batch in commits else "", self._find_overtaking(s)
                )
                for name, s in staged.items()
                if newest is None or s.batch > newest
            ),
            leftovers_are_swept=self._is_swept,
            log_began_in=history.log_began_in,
            pinned=self._pins.list_pinned() | self._unpinnable,
            order=self._order(decided),
            reseed_is_wanted=self._reseeding.is_wanted(history.log_began_in),
            lost=frozenset(self._lost),
        )

    def _open_rewind(self, newest: BatchId | None) -> RewindIntent | None:
        """Return the unfinished rewind; delete one that a zombie wrote too late."""
        intent = self._job_dir.open_rewind()
        if intent is None or intent.kind is not RewindKind.PLAIN or newest is None:
            return intent
        if intent.first_removed > newest:
            return intent
        # An owner that did not see it has decided since about the micro-batches to remove.
        self._ownership.check()
        LOG.warning("a rewind to before micro-batch %s came too late and is dropped", intent.first_removed)
        self._job_dir.drop_rewind(intent)
        return None

    def _order(self, decided: Sequence[R.DecidedFact]) -> R.OrderFact | None:
        order = self._job_dir.rewind_order()
        if order is None:
            return None
        is_ready = all(d.has_receipt or d.checkpoint in self._lost for d in decided)
        # Any earlier, the target might be unconfirmed or a sink not up to date.
        refusal = self._rewinder.why_refused(order) if is_ready else ""
        return R.OrderFact(order.order_id, order.target, refusal)

    def _why_dead(self, staged: StagedBatch) -> str:
        if staged.times is not None and staged.times.drained:
            return f"it was drained for checkpoint {staged.times.drained}, after which the job did not stop"
        for sink, committables in _group_by_sink(staged.committables).items():
            if sink not in self._committers:
                return f"the job has no sink '{sink}' any more"
            if self._committers[sink].shows_whole:
                return f"sink '{sink}' shows a checkpoint as one, and an earlier start staged this part of it"
            dead = self._patiently(partial(self._committers[sink].why_dead, committables))
            if dead:
                return str(next(iter(dead.values())))
        return ""

    def _find_overtaking(self, staged: StagedBatch) -> str:
        """Return a sink whose lost data would be staged again after this commit; empty if there is none."""
        # Without the state there is no replay: later data becomes visible first, or the job never runs again.
        lost = {str(e.facts["sink"]) for c, (_, e) in self._lost.items() if c not in self._unpinnable}
        mine = (c.sink for c in staged.committables if c.sink in lost)
        ordered = (s for s in mine if self._committers[s].shown_order is ShownOrder.OF_STAGING)
        return next(ordered, "")

    def _do(
        self,
        step: R.Step,
        facts: R.RecoveryFacts,
        staged: Mapping[str, StagedBatch],
        decisions: Mapping[CheckpointId, Decision],
    ) -> None:
        is_stale = isinstance(step, R.Rewind | R.Reseed) and self._job_dir.lineage() != facts.lineage
        if is_stale:
            # A rewind has become visible late. The next one must not get another number than its seed, nor
            # replace the seed that the late one began with.
            return
        match step:
            case R.FinishRewind():
                intent = self._job_dir.open_rewind()
                if intent is not None:  # else another read of the store has shown that it is finished
                    self._rewinder.finish(intent)
            case R.RestoreLog(checkpoint):
                self._restore_log(decisions[checkpoint])
            case R.Confirm(checkpoint):
                self._confirm(decisions[checkpoint])
            case R.Replay(checkpoint):
                self._replay(checkpoint)
            case R.Pin(checkpoint):
                self._pin(decisions[checkpoint])
            case R.AbortStagedFiles(attempts, reason):
                for name in attempts:
                    self._abort(staged[name], reason)
                    self._ownership.check()
                    self._job_dir.delete_staged(staged[name].lineage, name)
            case R.RefuseOrder(_, reason):
                order = self._job_dir.rewind_order()
                if order is not None:  # else it was closed meanwhile
                    self._rewinder.refuse(order, reason)
            case R.Rewind(first_removed, reason, target, order_id):
                order = self._job_dir.rewind_order() if order_id else None
                kind = RewindKind.PLAIN if order is None else RewindKind.TO_CHECKPOINT
                self._rewinder.open(kind, facts.lineage.next(), first_removed, target, reason, order)
            case R.Reseed(first_removed, target):
                decision = None if target is None else decisions[target]
                if decision is not None and not self._pins.why_not_restorable(decision.checkpoint):
                    # Spark may have deleted its state; the micro-batches after it are aborted by now.
                    self._ownership.check()
                    self._pins.restore(decision.checkpoint)
                self._reseeding.export(decision, facts.lineage.next())
                reason = "Spark's checkpoint has to begin anew"
                self._rewinder.open(RewindKind.RESEED, facts.lineage.next(), first_removed, target, reason)
            case R.TrimLog(entries):
                for batch in entries:
                    self._ownership.check()
                    self._log.remove(f"{OFFSETS}/{batch}")
            case R.SweepLeftovers():
                self._sweep(facts, staged)
                self._forget_confirmed(facts, staged)
                self._is_swept = True

    def _pin(self, decision: Decision) -> None:
        try:
            self._pins.pin(decision)
        except CorruptObjectError as error:
            # Later checkpoints may be complete; the start fails only if it needs this state.
            LOG.error("checkpoint %s cannot be gone back to: %s", decision.checkpoint, error)
            self._unpinnable.add(decision.checkpoint)

    def _restore_log(self, decision: Decision) -> None:
        at = decision.batch
        self._log.restore(OFFSETS, at, decision.offsets_text)
        self._log.restore(COMMITS, at, decision.commits_text)
        if at == BatchId(0):
            return
        before = BatchId(at.value - 1)
        if self._log.read(OFFSETS, before) is None:
            text = self._pins.log_entries(decision.checkpoint).get(f"{OFFSETS}/{before}")
            if text is None:
                raise missing_entry(OFFSETS, before, decision.checkpoint)
            self._log.restore(OFFSETS, before, text)

    def _confirm(self, decision: Decision) -> None:
        try:
            self._confirmation.confirm(decision)
        except CommittableLostError as lost:
            LOG.warning("checkpoint %s cannot be confirmed as it is: %s", decision.checkpoint, lost)
            self._lost[decision.checkpoint] = decision, lost
            return
        for batch in decision.batches:
            self._job_dir.delete_staged(batch.lineage, JobDir.attempt_name(batch))
        self._on_confirmed(decision)

    def _replay(self, checkpoint: CheckpointId) -> None:
        # The next step confirms the data that was staged again, or finds it lost once more.
        decision, lost = self._lost[checkpoint]
        self._replaying.replay(decision, lost, self._abort_sink, self._patiently)
        del self._lost[checkpoint]

    def _abort(self, staged: StagedBatch, reason: str) -> None:
        LOG.info("aborting micro-batch %s of owner %s: %s", staged.batch, staged.owner_epoch, reason)
        for sink, committables in _group_by_sink(staged.committables).items():
            if sink not in self._committers:
                continue
            self._abort_sink(sink, committables)

    def _abort_sink(self, sink: str, committables: Sequence[Committable]) -> None:
        while True:
            self._ownership.check()
            answers = self._committers[sink].abort(committables)
            for answer in answers:
                if answer.outcome is Outcome.FENCED:
                    self._ownership.check()
                    timeline = self._ownership.timeline
                    refuse_another_timeline(self._committers[sink], sink, self._ownership, timeline.newest)
                    raise FencedError(
                        f"an undecided committable of sink '{sink}' was committed by somebody else",
                        why=answer.detail,
                        what_to_do="find out which process did; the job's output may hold rows twice",
                    )
            if all(a.outcome.is_done for a in answers):
                return
            self._wait(f"aborting leftovers of sink '{sink}'", answers[-1].detail)

    def _sweep(self, facts: R.RecoveryFacts, staged: Mapping[str, StagedBatch]) -> None:
        # Everything decided is committed by now, so no other transaction may stay open.
        kept = [c for s in staged.values() if s.batch >= facts.first_open for c in s.committables]
        for committer in self._committers.values():
            self._ownership.check()
            count = self._patiently(partial(committer.sweep, kept, frozenset))
            if count:
                LOG.info("aborted %s leftover transactions, as expected after a crash", count)

    def _forget_confirmed(self, facts: R.RecoveryFacts, staged: Mapping[str, StagedBatch]) -> None:
        """Delete staged files that a crash left after the receipt; every decision has a receipt by now."""
        for name, batch in staged.items():
            if batch.batch < facts.first_open:
                self._job_dir.delete_staged(batch.lineage, name)
        if facts.newest is not None:
            self._log.forget_retired()
        # Left by a replay that was cut off after its end, or whose checkpoint a rewind left behind.
        self._log.end_replay()

    def _patiently(self, ask: Callable[[], T]) -> T:
        retries = RetryPolicy()
        while True:
            try:
                return ask()
            except JobInterruptedError:
                raise
            except Exception as error:
                self._wait("recovery", str(retries.check(error)))

    def _wait(self, what: str, detail: str) -> None:
        if self._must_give_up():
            raise JobInterruptedError(what)
        LOG.warning("%s has to wait, which is expected while brokers restart: %s", what, detail)
        note_failure(detail)
        self._clock.sleep_ms(_PAUSE_MS)


def _group_by_sink(committables: Sequence[Committable]) -> dict[str, list[Committable]]:
    grouped: dict[str, list[Committable]] = defaultdict(list)
    for committable in committables:
        grouped[committable.sink].append(committable)
    return dict(grouped)


@dataclass(frozen=True)
class RestoredSavepoint:
    checkpoint: CheckpointId
    hooks: Mapping[str, Any]
    path: str
    times: EventTime | None = None


def notify_restored(
    job: JobContext, newest: Decision | None, savepoint: RestoredSavepoint | None
) -> EventTime | None:
    """Restore hooks and statistics to the checkpoint that the query starts from; return its event time."""
    job.tracker.settle()
    if newest is not None:
        job.hooks.restore(newest.checkpoint, newest.hook_states)
        job.tracker.on_start_after(newest)
        job.tracker.on_restored(newest.checkpoint)
        return newest.times
    if savepoint is not None:
        job.hooks.restore(savepoint.checkpoint, savepoint.hooks)
        job.tracker.on_restored(savepoint.checkpoint, savepoint.path)
        return savepoint.times
    job.hooks.restore(None, {})
    return None


def sweep_after_stop(job: JobContext) -> None:
    """Abort output of the micro-batch after the final barrier; no query runs."""
    job_dir = job.job_dir
    staged, newest = job_dir.list_staged(job_dir.lineage()).values(), job_dir.newest_commit()
    if newest is not None and job_dir.receipt(newest.checkpoint) is None:
        # A decided checkpoint was interrupted: the next start commits it.
        newest = None
    behind = [s for s in staged if newest is None or s.lineage > newest.lineage or s.batch > newest.batch]
    kept = [c for s in behind for c in s.committables]
    for committer in job.committers.values():
        try:
            committer.sweep(kept, frozenset)
        except Exception as error:
            # This only cleans up; the job's work is done.
            LOG.warning("leftovers are swept by the next start: %s", classify(error))
