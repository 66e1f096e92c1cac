"""What a coordinator works with, and the errors by which it ends a query."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flinkish_spark.checkpoint.commit import Confirmation
from flinkish_spark.checkpoint.control import ControlFile
from flinkish_spark.checkpoint.epoch_writer import AdmissionGate
from flinkish_spark.checkpoint.event_time import NO_TIME, Timekeeping
from flinkish_spark.checkpoint.hooks import MasterHooks
from flinkish_spark.checkpoint.ownership import Ownership
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.checkpoint.statistics import CheckpointTracker, StagedAge
from flinkish_spark.checkpoint.transactional_ids import BlockPool
from flinkish_spark.contracts.sink import Committer
from flinkish_spark.core.clock import Clock, Threads
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import CommittableLostError, EnvironmentFault, FencedError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import Observer
from flinkish_spark.core.watchdog import Waiting, unwatched
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.protocol.decisions import Decision, Receipt
from flinkish_spark.protocol.failures import CheckpointFailureReason as Reason
from flinkish_spark.protocol.failures import FailureManager
from flinkish_spark.protocol.ids import CheckpointId

#: Undecided micro-batches after which a checkpoint is taken without waiting for the interval, and
#: after which no more are admitted: Spark purges its log behind 200 micro-batches (query.py).
BACKLOG_TRIGGER, BACKLOG_LIMIT = 40, 80
#: How long the last checkpoint of a job waits after one that was aborted.
FINAL_PAUSE_MS = 500
#: Reasons behind which somebody has to decide soon what the aborted checkpoint staged. Where the
#: barrier never went out the timer comes anyway, and a hook that fails is left in peace till then;
#: what subsumes a checkpoint decides its micro-batches; behind dead data comes a rewind.
LEAVES_WORK = frozenset(
    {Reason.DECLINED, Reason.BARRIERS_DO_NOT_ADD_UP, Reason.EXPIRED, Reason.DECISION_FAILED}
)


class TooManyCheckpointFailures(EnvironmentFault):
    """More checkpoints in a row failed than the job tolerates; the restart strategy goes on from here."""

    restartable = True
    ends_when_repeated = True


class StopFailed(EnvironmentFault):
    """A stop with savepoint did not come through; the job goes back to its last checkpoint."""

    restartable = True


def why_ended(failure: BaseException | None) -> tuple[Reason, str]:
    """Return the reason, and its text, of checkpoints that end with their coordinator."""
    if failure is None:
        return Reason.JOB_STOPPED, "the job was stopped"
    if isinstance(failure, FencedError):
        return Reason.OWNER_LOST, str(failure)
    if isinstance(failure, CommittableLostError):
        return Reason.COMMITTABLE_LOST, str(failure)
    return Reason.TASK_FAILED, f"the job failed: {failure}"


@dataclass(frozen=True)
class CoordinatorParts:
    """What the coordinator works with.

    Parameters
    ----------
    channels
        By sink uid, the channels whose barriers it must see.
    operators
        Uids of the keyed operators.
    write_savepoint
        Exports a confirmed checkpoint to a target; called in a thread of its own.
    time
        Says where event time stands.
    on_decided
        Called after a decision and before its first commit, in the thread that made it; may take a while.
        Returns whether the checkpoint's state is pinned.
    on_receipt
        Called after a receipt, in the thread that wrote it.
    on_aging
        Told of staged data that has waited for half of its lifetime.
    waiting
        Notes what threads wait for.
    """

    config: CheckpointConfig
    clock: Clock
    threads: Threads
    job_dir: JobDir
    ownership: Ownership
    log: SparkLog
    control: ControlFile
    confirmation: Confirmation
    committers: Mapping[str, Committer]
    channels: Mapping[str, ExpectedChannels]
    operators: tuple[str, ...]
    uids: tuple[str, ...]
    hooks: MasterHooks
    blocks: BlockPool
    gate: AdmissionGate
    observer: Observer
    failures: FailureManager
    tracker: CheckpointTracker
    on_confirmed: Callable[[Decision, Receipt], None]
    on_aborted: Callable[[CheckpointId], None]
    write_savepoint: Callable[[Decision, str], None]
    on_receipt: Callable[[Decision], None]
    time: Timekeeping = NO_TIME
    on_aging: Callable[[StagedAge], None] = lambda age: None
    on_decided: Callable[[Decision], bool] = lambda decision: False
    waiting: Waiting = unwatched
