"""Going back: ordering a rewind, writing its intent, carrying it out.

An intent is durable before anything changes, and everything that it names may be repeated, so a
rewind that was begun is finished by whoever starts the job next. What can be refused is refused
before the intent is written (:func:`why_refused`).

A rewind to a checkpoint happens in a folder that no earlier query of this process has written to:
Spark's maintenance goes on for a minute after a query was stopped, and it cleans by the highest
version that *it* has seen. The supervisor therefore takes the job over once more, which renames the
folder, before it lets the recovery carry out an order (`ownership.take_over`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from flinkish_spark.clock import Clock
from flinkish_spark.errors import EnvironmentFault, InternalError, UserError
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import RewindIntent, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.lineage import (
    RetainedCheckpoint,
    RewindKind,
    RewindOrder,
    Tables,
    why_not_rewindable,
)
from flinkish_spark.protocol.outcomes import Outcome
from flinkish_spark.runtime.pins import CheckpointPins
from flinkish_spark.runtime.spark_log import COMMITS, OFFSETS, LoggedOffsets, SparkLog
from flinkish_spark.runtime.steps import Observer, Step
from flinkish_spark.sinks.base import Committer
from flinkish_spark.store import CreateResult

LOG = logging.getLogger(__name__)


class RewindRefused(UserError):
    """The job cannot go back to that checkpoint; nothing was changed."""


class NotRestorableError(EnvironmentFault):
    """A table could not be restored after all; the rewind stays open until it can."""


def order_rewind(
    job_dir: JobDir, pins: CheckpointPins, clock: Clock, target: CheckpointId, tables: Tables, reason: str
) -> RewindOrder:
    """Order the job to go back to a retained checkpoint; the next start of its query obeys.

    Called by the command line and the job's client, in any process, whether the job runs or not.

    Raises
    ------
    RewindRefused
        It cannot go back there, or another order waits.
    """
    why = why_refused(job_dir, pins, target)
    if why:
        raise _refused(target, why)
    order = RewindOrder(uuid.uuid4().hex, target, tables, reason, clock.wall_ms())
    if job_dir.create_rewind_order(order) is CreateResult.EXISTS:
        raise _refused(target, "another order to go back is waiting")
    return order


def why_refused(job_dir: JobDir, pins: CheckpointPins, target: CheckpointId) -> str:
    """Return why the job cannot go back to `target`, as far as its directory tells; empty if it can."""
    known = job_dir.decided_ids()
    pinned = pins.pinned()
    found = {c: job_dir.decision(c) for c in known}
    commits = [
        RetainedCheckpoint(c, d.lineage, job_dir.receipt(c) is not None, c in pinned)
        for c, d in found.items()
        if d is not None and d.verdict is Verdict.COMMIT
    ]
    return why_not_rewindable(target, known, commits, job_dir.history()) or pins.why_not_restorable(target)


@dataclass(frozen=True)
class SourcePositions:
    """What the sources of a job have to do with a rewind.

    Parameters
    ----------
    lower
        Sets their consumer groups back to a position, also downwards.
    why_lost
        Returns why the input from a position on cannot be read again; empty if it can. It raises an
        EnvironmentFault with `restartable` set if that cannot be said now.
    """

    lower: Callable[[LoggedOffsets], None]
    why_lost: Callable[[LoggedOffsets], str]


@dataclass(frozen=True)
class Rewinder:
    """Writes intents and carries them out; Spark is not running.

    Parameters
    ----------
    positions
        What the sources do about it.
    patiently
        Repeats a question to an outside system until it is answered.
    wait
        Called before an outside system is asked again; raises if the job is being torn down.
    check_owner
        Raises if a newer owner has the job; called before each effect.
    """

    job_dir: JobDir
    log: SparkLog
    pins: CheckpointPins
    committers: Mapping[str, Committer]
    observer: Observer
    positions: SourcePositions
    patiently: Callable[[Callable[[], None]], None]
    wait: Callable[[str, str], None]
    check_owner: Callable[[], None]

    # -- before the intent ----------------------------------------------------------------------
    def why_refused(self, order: RewindOrder) -> str:
        """Return why an order cannot be carried out; asks sources and tables, too."""
        why = why_refused(self.job_dir, self.pins, order.target) or self._why_input_is_lost(order.target)
        if why or order.tables is Tables.KEEP:
            return why
        answers: list[str] = []

        def ask(committer: Committer) -> None:
            answers.append(committer.why_not_superseded(order.target))

        for committer in self.committers.values():
            self.patiently(partial(ask, committer))
        return next(filter(None, answers), "")

    def _why_input_is_lost(self, target: CheckpointId) -> str:
        position, answers = self._position(target), list[str]()
        self.patiently(lambda: answers.append(self.positions.why_lost(position)))
        return answers[-1]

    def refuse(self, order: RewindOrder, reason: str) -> None:
        """Close an order that cannot be carried out, and raise RewindRefused."""
        self.job_dir.refuse_rewind_order(order, reason)
        raise _refused(order.target, reason)

    # -- the intent -----------------------------------------------------------------------------
    def open(
        self,
        kind: RewindKind,
        first_removed: BatchId,
        target: CheckpointId | None,
        reason: str,
        order: RewindOrder | None = None,
    ) -> None:
        """Make the intent durable. From here the rewind will be finished."""
        intent = RewindIntent(
            first_removed,
            Lineage(self.job_dir.lineage().value + 1),
            reason,
            {} if kind is RewindKind.RESEED else self._entries_from(first_removed),
            kind,
            target,
            Tables.KEEP if order is None else order.tables,
            "" if order is None else order.order_id,
        )
        LOG.warning("rewinding so that micro-batch %s is planned again: %s", first_removed, reason)
        # This order matters: if a commits/ entry vanished before the intent is durable, Spark
        # would run the newest micro-batch again and skip the input of those in between.
        self.observer.before(Step.REWIND_INTENT, str(first_removed))
        self.check_owner()
        self.job_dir.create_rewind(intent)
        self.observer.after(Step.REWIND_INTENT, str(first_removed))

    def _entries_from(self, first: BatchId) -> dict[str, str]:
        removed = {}
        for log in (OFFSETS, COMMITS):
            for batch in self.log.batches(log):
                text = self.log.read(log, batch) if batch >= first else None
                if text is not None:
                    removed[f"{log}/{batch}"] = text
        return removed

    # -- carrying out ---------------------------------------------------------------------------
    def finish(self, intent: RewindIntent) -> None:
        """Do everything that the intent names, then move it to the history.

        Spark's side comes first: if it cannot be done, nothing outside has changed.
        """
        if intent.kind is RewindKind.RESEED:
            self._begin_anew(intent)
        else:
            self._set_log_back(intent)
        if intent.kind is RewindKind.TO_CHECKPOINT and intent.target is not None:
            if intent.tables is Tables.RESTORE:
                for uid, committer in self.committers.items():
                    self._supersede(uid, committer, intent.target, intent.lineage)
            self._lower_offsets(intent.target)
        self.check_owner()
        self.job_dir.close_rewind(intent)

    def _begin_anew(self, intent: RewindIntent) -> None:
        self.check_owner()
        self.log.retire(intent.lineage)
        for checkpoint in self.pins.pinned():
            # A zombie that wakes up here must not unpin what a newer owner has pinned since.
            self.check_owner()
            self.pins.unpin(checkpoint)

    def _set_log_back(self, intent: RewindIntent) -> None:
        newest_first = sorted(intent.removed, key=lambda e: (-int(e.split("/")[1]), e))
        for entry in newest_first:
            self.check_owner()
            self.observer.before(Step.REWIND_DELETE, entry)
            self.log.remove(entry)
            self.observer.after(Step.REWIND_DELETE, entry)
        if intent.first_removed == BatchId(0):
            self.log.clear_state()
        elif intent.target is not None and intent.target in self.pins.pinned():
            self.pins.restore(intent.target)

    def _supersede(self, uid: str, committer: Committer, target: CheckpointId, lineage: Lineage) -> None:
        while True:
            answer = committer.supersede(target, lineage)
            if answer.outcome.is_done:
                return
            if answer.outcome is not Outcome.RETRY:
                raise NotRestorableError(
                    f"sink '{uid}' cannot take back what was committed after checkpoint {target}",
                    why=answer.detail,
                    what_to_do="make it possible again and start the job: the rewind is finished then",
                    uid=uid,
                )
            self.wait(f"taking back what sink '{uid}' committed", answer.detail)

    def _lower_offsets(self, target: CheckpointId) -> None:
        position = self._position(target)
        self.patiently(lambda: self.positions.lower(position))

    def _position(self, target: CheckpointId) -> LoggedOffsets:
        decision = self.job_dir.decision(target)
        if decision is None:
            raise InternalError(f"the decision of checkpoint {target}, which an order names, was deleted")
        return LoggedOffsets.parse(decision.offsets_text)


def _refused(target: CheckpointId, why: str) -> RewindRefused:
    return RewindRefused(
        f"the job cannot go back to checkpoint {target}",
        why=why,
        what_to_do="choose one from `flinkish checkpoints list`; nothing was changed",
        target=target,
    )
