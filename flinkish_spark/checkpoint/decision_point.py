"""The create of one object that decides a checkpoint of a job, or a micro-batch of the drop-in sink."""

from __future__ import annotations

import logging

from flinkish_spark.checkpoint.ownership import Ownership
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import EnvironmentFault, FencedError, StoreError
from flinkish_spark.core.steps import Observer, Step
from flinkish_spark.core.store import CreateResult
from flinkish_spark.protocol.decisions import Decision, Verdict

LOG = logging.getLogger(__name__)


class DeadCommittableError(EnvironmentFault):
    """A committable is dead before its checkpoint was decided, so the job rewinds."""

    restartable = True
    ends_when_repeated = True


class DecisionError(EnvironmentFault):
    """The store did not accept the decision, so the checkpoint is aborted for good."""

    restartable = True
    ends_when_repeated = True


def decide(
    decision: Decision, ownership: Ownership, clock: Clock, observer: Observer, if_refused: str
) -> None:
    """Decide a checkpoint; raise FencedError or DecisionError if another verdict stands.

    `if_refused` is the advice in the error: only the caller knows what becomes of the staged data.
    """
    ownership.check()
    job_dir = ownership.job_dir
    observer.on_step_start(Step.DECISION, str(decision.checkpoint))
    try:
        # DECISION POINT: with this create the checkpoint is complete and must be finished by
        # whoever owns the job. Before it the epoch can vanish as a whole; after it, never.
        created = job_dir.create_decision(decision)
    except StoreError as error:
        created = resolve(decision, error, ownership, clock, if_refused)
    observer.on_step_end(Step.DECISION, str(decision.checkpoint))
    if created is CreateResult.EXISTS:
        ownership.check()
        found = job_dir.decision(decision.checkpoint)
        if found is not None and found.verdict is Verdict.ABORT and found.owner_epoch < ownership.epoch:
            # A zombie sealed the id: it took it for one of its predecessor's.
            raise DecisionError(
                f"checkpoint {decision.checkpoint} was aborted by owner epoch {found.owner_epoch}, "
                "which does not own the job any more",
                what_to_do=if_refused,
            )
        raise FencedError(
            f"checkpoint {decision.checkpoint} was decided by another owner",
            what_to_do="let this process end; the newer owner goes on",
        )
    # A newer owner that took over between the check above and the create has either found the
    # id and sealed it, and the create lost, or will find this decision and finish it.


def resolve(
    decision: Decision, error: StoreError, ownership: Ownership, clock: Clock, if_refused: str
) -> CreateResult:
    """Find out whether a create with unknown outcome succeeded, and make its result final."""
    # The write may have arrived although its answer did not, or may arrive later. The first of COMMIT and
    # ABORT stands, so trying to create an ABORT tells which one is there.
    job_dir, checkpoint = ownership.job_dir, decision.checkpoint
    LOG.warning("the store did not say whether checkpoint %s is decided: %s", checkpoint, error)
    reason = "the store did not take the decision"
    offered = Decision(checkpoint, Verdict.ABORT, ownership.epoch, clock.wall_ms(), reason=reason)
    if job_dir.create_decision(offered) is CreateResult.EXISTS:
        found = job_dir.decision(checkpoint)
        if found is not None and (found.verdict, found.owner_epoch) == (Verdict.COMMIT, ownership.epoch):
            return CreateResult.CREATED
        if found is None or found.owner_epoch != ownership.epoch:
            return CreateResult.EXISTS
    raise DecisionError(
        f"checkpoint {checkpoint} could not be decided",
        why=str(error),
        what_to_do=f"check the disk of the job directory; {if_refused}",
    ) from error
