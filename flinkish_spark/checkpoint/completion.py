"""The asynchronous phase of a checkpoint: look, decide, commit, receipt, clean up.

Runs in a thread of its own while Spark runs the next micro-batches, one checkpoint at a time.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import replace

from flinkish_spark.checkpoint.commit import Interrupted
from flinkish_spark.checkpoint.context import CoordinatorParts
from flinkish_spark.checkpoint.failures import Patience, classify
from flinkish_spark.core.errors import (
    EnvironmentFault,
    FencedError,
    FlinkishError,
    InternalError,
    SparkGoneError,
    StoreError,
    raise_translated,
)
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import Step
from flinkish_spark.core.store import CreateResult
from flinkish_spark.protocol.checkpoint import PendingCheckpoint
from flinkish_spark.protocol.decisions import Decision, Receipt, Verdict
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS
from flinkish_spark.protocol.records import StagedBatch

LOG = logging.getLogger(__name__)
_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 50, 2_000


class StagedDataDied(EnvironmentFault):
    """Something staged cannot be committed any more; nothing was decided, so the job rewinds."""

    restartable = True
    ends_when_repeated = True


class DecisionRefused(EnvironmentFault):
    """The store did not take the decision; the checkpoint is aborted, what it staged is kept."""

    restartable = True
    ends_when_repeated = True


class _Swept(enum.Enum):
    """Whether every sink could be swept."""

    EVERYTHING = "EVERYTHING"
    NOT_EVERYTHING = "NOT_EVERYTHING"


class Completion:
    """Completes checkpoints; one thread at a time.

    Parameters
    ----------
    parts
        The coordinator's.
    undecided
        Returns the micro-batches that no decision contains, as far as the coordinator knows.
    is_stopping
        Asked while waiting for a system that cannot answer.
    """

    def __init__(
        self,
        parts: CoordinatorParts,
        undecided: Callable[[], tuple[StagedBatch, ...]],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._parts, self._undecided, self._is_stopping = parts, undecided, is_stopping

    def complete(self, decision: Decision, on_decided: Callable[[], None]) -> Receipt:
        """Decide a checkpoint and finish it. The order of these calls is the protocol.

        Parameters
        ----------
        on_decided
            Called between the decision and the first commit.

        Raises
        ------
        StagedDataDied, DecisionRefused
            It is not decided and will not be by this call.
        FencedError
            Somebody else owns the job.
        Interrupted
            The job is being torn down; if it is decided, the next start finishes it.
        """
        self._check_alive(decision)
        self._decide(decision)
        on_decided()
        if self._parts.on_decided(decision):
            # From now on no task needs files that only older states name: who goes back further takes
            # them from the pins.
            self._parts.control.keep_pinned(decision.batch)
        receipt = self._parts.confirmation.confirm(decision)
        self._clean_up(decision)
        return receipt

    # -- before the decision --------------------------------------------------------------------
    def _check_alive(self, decision: Decision) -> None:
        """Check every committable right before the decision: a rewind is cheaper than a replay."""
        staged = decision.by_sink()
        for uid, committer in self._parts.committers.items():
            committables = [c for _, c in staged.get(uid, ())]
            if not committables:
                continue
            pause_ms, patience = _FIRST_PAUSE_MS, Patience()
            while True:
                try:
                    with self._parts.waiting(
                        f"sink '{uid}' to say what of checkpoint {decision.checkpoint} is left"
                    ):
                        dead = committer.why_dead(committables)
                    break
                except Exception as error:
                    fault = patience.takes(error)
                    if self._is_stopping():
                        raise Interrupted(f"checkpoint {decision.checkpoint}") from error
                    LOG.warning("checkpoint %s waits for sink '%s': %s", decision.checkpoint, uid, fault)
                    self._parts.clock.sleep_ms(pause_ms)
                    pause_ms = min(_LONGEST_PAUSE_MS, pause_ms * 2)
            if dead:
                raise StagedDataDied(
                    f"checkpoint {decision.checkpoint} was declined before its decision",
                    why=next(iter(dead.values())),
                    what_to_do="none: the job goes back to the last checkpoint and stages again",
                    sink=uid,
                )

    # -- the decision ---------------------------------------------------------------------------
    def _decide(self, decision: Decision) -> None:
        parts = self._parts
        parts.ownership.check()
        parts.observer.before(Step.DECISION, str(decision.checkpoint))
        try:
            # DECISION POINT: with this create the checkpoint is complete and must be finished by
            # whoever owns the job. Before it the epoch can vanish as a whole; after it, never.
            created = parts.job_dir.create_decision(decision)
        except StoreError as error:
            created = self._resolve(decision, error)
        parts.observer.after(Step.DECISION, str(decision.checkpoint))
        if created is CreateResult.EXISTS:
            parts.ownership.check()
            found = parts.job_dir.decision(decision.checkpoint)
            if (
                found is not None
                and found.verdict is Verdict.ABORT
                and found.owner_epoch < parts.ownership.epoch
            ):
                # A zombie was still sealing what it took to be its predecessor's.
                raise DecisionRefused(
                    f"checkpoint {decision.checkpoint} was sealed by owner {found.owner_epoch}, who has "
                    "lost the job",
                    what_to_do="none: what was staged passes to the next checkpoint",
                )
            raise FencedError(
                f"checkpoint {decision.checkpoint} was decided by somebody else",
                what_to_do="let this process end; the newer owner goes on",
            )
        # A newer owner that took over between the check above and the create has either found the
        # id and sealed it, and the create lost, or will find this decision and finish it.

    def _resolve(self, decision: Decision, error: StoreError) -> CreateResult:
        """Find out what a create with unknown outcome did, and make it final.

        The write may have arrived although its answer did not, or may arrive later. Whichever of
        COMMIT and ABORT is there first stands, so an ABORT is offered: it answers the question.
        """
        parts, checkpoint = self._parts, decision.checkpoint
        LOG.warning("the store did not say whether checkpoint %s is decided: %s", checkpoint, error)
        offered = Decision(
            checkpoint,
            Verdict.ABORT,
            parts.ownership.epoch,
            parts.clock.wall_ms(),
            reason="the store did not take the decision",
        )
        if parts.job_dir.create_decision(offered) is CreateResult.EXISTS:
            found = parts.job_dir.decision(checkpoint)
            if found is not None and (found.verdict, found.owner_epoch) == (
                Verdict.COMMIT,
                parts.ownership.epoch,
            ):
                return CreateResult.CREATED
            if found is None or found.owner_epoch != parts.ownership.epoch:
                return CreateResult.EXISTS
        raise DecisionRefused(
            f"checkpoint {checkpoint} could not be decided",
            why=str(error),
            what_to_do="see to the job directory's disk; what was staged passes to the next checkpoint",
        ) from error

    # -- after the receipt ----------------------------------------------------------------------
    def _clean_up(self, decision: Decision) -> None:
        parts = self._parts
        try:
            for staged in decision.batches:
                parts.job_dir.delete_staged(staged.lineage, JobDir.attempt_name(staged))
        except StoreError as error:
            LOG.warning("what is not needed any more is deleted later: %s", error)
        parts.on_receipt(decision)
        mine = [b for s in decision.batches if s.owner_epoch == parts.ownership.epoch for b in s.blocks]
        # This order matters. Only behind the receipt may a transactional id be used again: until then
        # its handle may be committed once more, and would commit whatever is open under that id. And
        # only behind the sweep: what it finds under these ids is a leftover as long as nobody has them.
        if self._sweep(decision, frozenset(mine)) is _Swept.EVERYTHING:
            parts.blocks.give_back(mine)

    def _sweep(self, decision: Decision, mine: frozenset[int]) -> _Swept:
        """Abort what failed task attempts left open: it hides later records from readers."""
        undecided = [s for s in self._undecided() if s.batch > decision.batch]
        kept = [c for s in undecided for c in s.committables]
        # Kept micro-batches of an earlier owner may have the same numbers, under other ids.
        epoch = self._parts.ownership.epoch
        known = mine | {b for s in undecided if s.owner_epoch == epoch for b in s.blocks}
        result = _Swept.EVERYTHING
        for committer in self._parts.committers.values():
            try:
                # Blocks that no staged file names yet belong to the micro-batch that runs now.
                committer.sweep(kept, lambda: self._parts.blocks.leased - known)
            except EnvironmentFault as fault:
                if not fault.restartable:
                    raise
                LOG.warning("leftovers are swept later: %s", fault)
                result = _Swept.NOT_EVERYTHING
            except FlinkishError:
                raise
            except Exception as error:
                # Of the JVM's, most of all. It is mere cleaning: only a JVM that is gone ends anything.
                meant = classify(error)
                if isinstance(meant, SparkGoneError):
                    raise_translated(meant, error)
                LOG.warning("leftovers are swept later: %s", meant)
                result = _Swept.NOT_EVERYTHING
        return result


def decision_of(
    pending: PendingCheckpoint, batches: tuple[StagedBatch, ...], parts: CoordinatorParts
) -> Decision:
    """Return the COMMIT of a checkpoint whose turn has come.

    Parameters
    ----------
    batches
        The undecided micro-batches up to the checkpoint's own, in order.
    """
    batch = batches[-1].batch
    offsets, commits = parts.log.read(OFFSETS, batch), parts.log.read(COMMITS, batch)
    if offsets is None or commits is None:
        raise InternalError(f"Spark's log entries of micro-batch {batch} are gone")
    return Decision(
        pending.checkpoint,
        Verdict.COMMIT,
        parts.ownership.epoch,
        parts.clock.wall_ms(),
        lineage=batches[-1].lineage,
        # What they say about time is in `times`: of many key groups it is more than all the rest.
        batches=tuple(replace(staged, times=None) for staged in batches),
        offsets_text=offsets,
        commits_text=commits,
        uids=parts.uids,
        purpose=pending.request.purpose,
        triggered_at_ms=parts.tracker.triggered_at_ms(pending.checkpoint),
        finished=pending.finished,
        hook_states=pending.hook_states,
        times=parts.time.behind(batch),
    )
