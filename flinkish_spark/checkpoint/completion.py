"""The asynchronous phase of a checkpoint: check, decide, commit, write the receipt, clean up.

Runs in a thread of its own while Spark runs the next micro-batches, one checkpoint at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flinkish_spark.checkpoint.accumulators import AccumulatorKeeper
from flinkish_spark.checkpoint.commit import JobInterruptedError
from flinkish_spark.checkpoint.context import JobContext
from flinkish_spark.checkpoint.control import ControlFile
from flinkish_spark.checkpoint.decision_point import DeadCommittableError, decide
from flinkish_spark.checkpoint.epoch_writer import AdmissionGate
from flinkish_spark.checkpoint.event_time import TimeKeeper
from flinkish_spark.checkpoint.failures import RetryPolicy, classify
from flinkish_spark.checkpoint.statistics import StagedAge
from flinkish_spark.core.clock import backoff_ms
from flinkish_spark.core.errors import (
    EnvironmentFault,
    InternalError,
    SparkGoneError,
    StoreError,
    raise_translated,
)
from flinkish_spark.core.watchdog import note_failure
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.protocol.checkpoint import PendingCheckpoint
from flinkish_spark.protocol.decisions import Decision, Receipt, Verdict
from flinkish_spark.protocol.failures import FailureManager
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS
from flinkish_spark.protocol.records import Committable, StagedBatch

LOG = logging.getLogger(__name__)
_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 50, 2_000


@dataclass(frozen=True)
class CoordinatorParts:
    """The collaborators of the coordinator for one start of the query, besides the job's context."""

    job: JobContext
    #: What the next micro-batch carries.
    control: ControlFile
    #: Finishes a decided checkpoint (:meth:`.Confirmation.confirm`).
    confirm: Callable[[Decision], Receipt]
    #: By sink uid, the channels whose barriers it must see.
    channels: Mapping[str, ExpectedChannels]
    gate: AdmissionGate
    #: How many checkpoints in a row have failed.
    failures: FailureManager
    #: Called by the coordinator's thread when a checkpoint has ended.
    on_confirmed: Callable[[Decision, Receipt], None]
    on_aborted: Callable[[CheckpointId], None]
    #: Exports a confirmed checkpoint to a target; called in a thread of its own.
    write_savepoint: Callable[[Decision, str], None]
    #: Called after a receipt, in the thread that wrote it.
    on_receipt: Callable[[Decision], None]
    time: TimeKeeper
    accumulators: AccumulatorKeeper
    #: Called for staged data that has waited for half of its lifetime.
    on_aging: Callable[[StagedAge], None] = lambda age: None
    #: Called after a decision and before its first commit, in the deciding thread; may take a while.
    #: Returns whether the checkpoint's state is pinned.
    on_decided: Callable[[Decision], bool] = lambda decision: False
    #: Wall-clock time of the newest decision; None if there is none. The first interval counts from it.
    decided_at_ms: int | None = None


class Completion:
    """Completes checkpoints; one thread at a time."""

    def __init__(
        self,
        parts: CoordinatorParts,
        undecided: Callable[[], tuple[StagedBatch, ...]],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._parts, self._job = parts, parts.job
        self._undecided, self._is_stopping = undecided, is_stopping

    def complete(self, decision: Decision, on_decided: Callable[[], None]) -> Receipt:
        """Decide a checkpoint and finish it. The order of these calls is the protocol."""
        self._check_alive(decision)
        job, passes_on = self._job, "let the job run on: the staged data passes to the next checkpoint"
        with job.waiting(f"the job directory to take the decision of checkpoint {decision.checkpoint}"):
            decide(decision, job.ownership, job.clock, job.observer, passes_on)
        on_decided()
        if self._parts.on_decided(decision):
            # From now on no task needs files that only older states name: a rewind further back takes them
            # from the pins.
            self._parts.control.keep_pinned(decision.batch)
        receipt = self._parts.confirm(decision)
        self._clean_up(decision)
        return receipt

    def _check_alive(self, decision: Decision) -> None:
        """Check every committable right before the decision: a rewind is cheaper than a replay."""
        staged = decision.group_by_sink()
        for uid in self._job.committers:
            committables = [c for _, c in staged.get(uid, ())]
            if not committables:
                continue
            # Around all tries, so that the watchdog sees one wait.
            with self._job.waiting(f"sink '{uid}' to check its data of checkpoint {decision.checkpoint}"):
                dead = self._why_dead(decision.checkpoint, uid, committables)
            if dead:
                raise DeadCommittableError(
                    f"checkpoint {decision.checkpoint} was declined before its decision",
                    why=next(iter(dead.values())),
                    what_to_do="none: the job goes back to the last checkpoint and stages again",
                    sink=uid,
                )

    def _why_dead(
        self, checkpoint: CheckpointId, uid: str, committables: Sequence[Committable]
    ) -> Mapping[int, str]:
        committer, retries = self._job.committers[uid], RetryPolicy()
        pauses_ms = backoff_ms(_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        while True:
            try:
                return committer.why_dead(committables)
            except Exception as error:
                fault = retries.check(error)
                if self._is_stopping():
                    raise JobInterruptedError(f"checkpoint {checkpoint}") from error
                LOG.warning("checkpoint %s waits for sink '%s': %s", checkpoint, uid, fault)
                note_failure(str(fault))
                self._job.clock.sleep_ms(next(pauses_ms))

    def _clean_up(self, decision: Decision) -> None:
        parts = self._parts
        try:
            parts.job.job_dir.delete_all(map(parts.job.job_dir.make_staged_key, decision.batches))
        except StoreError as error:
            LOG.warning("staged files that are not needed any more are deleted later: %s", error)
        parts.on_receipt(decision)
        mine = [b for s in decision.batches if s.owner_epoch == parts.job.ownership.epoch for b in s.blocks]
        # This order matters. Only after the receipt may a transactional id be used again: until then
        # its handle may be committed once more, and would commit whatever is open under that id. And
        # only after the sweep: a transaction under an id that no block leases is a leftover.
        if self._sweep(decision, frozenset(mine)):
            parts.job.blocks.give_back(mine)

    def _sweep(self, decision: Decision, mine: frozenset[int]) -> bool:
        """Abort transactions that failed task attempts left open; return whether all sinks were swept."""
        undecided = [s for s in self._undecided() if s.batch > decision.batch]
        kept = [c for s in undecided for c in s.committables]
        # Kept micro-batches of an earlier owner may have the same numbers, under other ids.
        epoch = self._job.ownership.epoch
        known = mine | {b for s in undecided if s.owner_epoch == epoch for b in s.blocks}
        is_all_swept = True
        for committer in self._job.committers.values():
            try:
                # Blocks that no staged file names yet belong to the micro-batch that runs now.
                committer.sweep(kept, lambda: self._job.blocks.leased - known)
            except Exception as error:
                # Mostly errors of the JVM. A failed sweep does no harm: only a JVM that is gone ends the job.
                meant = classify(error)
                if meant is error and not (isinstance(meant, EnvironmentFault) and meant.restartable):
                    raise
                if isinstance(meant, SparkGoneError):
                    raise_translated(meant, error)
                LOG.warning("leftovers are swept later: %s", meant)
                is_all_swept = False
        return is_all_swept


def make_decision(
    pending: PendingCheckpoint, batches: tuple[StagedBatch, ...], parts: CoordinatorParts
) -> Decision:
    """Return the COMMIT of a checkpoint whose turn has come."""
    batch = batches[-1].batch
    totals = parts.accumulators.find_totals(batch)
    offsets, commits = parts.job.log.read(OFFSETS, batch), parts.job.log.read(COMMITS, batch)
    if offsets is None or commits is None:
        raise InternalError(f"Spark's log entries of micro-batch {batch} are gone")
    return Decision(
        pending.checkpoint,
        Verdict.COMMIT,
        parts.job.ownership.epoch,
        parts.job.clock.wall_ms(),
        lineage=batches[-1].lineage,
        # Their times are in `times` once: with many key groups they are larger than all the rest. The same
        # goes for accumulators and bases.
        batches=tuple(replace(staged, times=None, accumulators={}, bases=()) for staged in batches),
        offsets_text=offsets,
        commits_text=commits,
        uids=parts.job.uids,
        purpose=pending.request.purpose,
        triggered_at_ms=parts.job.tracker.find_trigger_time_ms(pending.checkpoint),
        finished=pending.finished,
        hook_states=pending.hook_states,
        times=parts.time.find_event_time(batch),
        accumulators=totals.accumulators,
        bases=totals.bases,
    )
