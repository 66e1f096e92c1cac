"""Rewinds: order one, write its intent, carry it out, report its outcome.

    orders/rewind.json         the waiting order; at most one
    rewinding/<lineage>.json   the begun rewind
    rewinds/<lineage>.json     the finished rewind
    orders/refused/<id>.json   the refused order, with the reason

The intent is durable before anything changes, and every step that it names may be repeated, so the next start
of the job finishes a begun rewind. All reasons to refuse an order are checked before the intent is written
(:func:`why_refused`).

A rewind to a checkpoint happens in a folder to which no earlier query of this process has written: Spark's
maintenance runs for a minute after a query has stopped, and deletes files by the highest version that *it*
has seen. The supervisor therefore takes the job over once more, which renames the folder, before the recovery
carries out an order (`ownership.take_over`).
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from flinkish_spark.contracts.sink import Committer
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import EnvironmentFault, InternalError, UserError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.steps import Step
from flinkish_spark.core.store import CreateResult, SealedObjects
from flinkish_spark.core.validation import to_ms
from flinkish_spark.protocol.decisions import RewindIntent, Verdict
from flinkish_spark.protocol.durations import Duration
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.lineage import (
    RetainedCheckpoint,
    RewindKind,
    RewindOrder,
    Tables,
    why_not_rewindable,
)
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS
from flinkish_spark.protocol.records import Outcome

if TYPE_CHECKING:
    from flinkish_spark.checkpoint.context import JobContext
    from flinkish_spark.checkpoint.pins import CheckpointPins
    from flinkish_spark.job.inputs import Inputs

LOG = logging.getLogger(__name__)


class RewindError(UserError):
    """The job cannot be rewound to that checkpoint; nothing was changed."""


def order_rewind(
    job_dir: JobDir, pins: CheckpointPins, clock: Clock, target: CheckpointId, tables: Tables, reason: str
) -> RewindOrder:
    """Order the job to rewind to a retained checkpoint at its next start; any process may call this."""
    why = why_refused(job_dir, pins, target)
    if why:
        raise _make_error(target, why)
    order = RewindOrder(uuid.uuid4().hex, target, tables, reason, clock.wall_ms())
    if job_dir.create_rewind_order(order) is CreateResult.EXISTS:
        raise _make_error(target, "another order to go back is waiting")
    return order


def why_refused(job_dir: JobDir, pins: CheckpointPins, target: CheckpointId) -> str:
    """Return why the job cannot rewind to `target`, as far as its directory shows; empty if it can."""
    known = job_dir.list_checkpoint_ids()
    pinned = pins.list_pinned()
    found = {c: job_dir.decision(c) for c in known}
    commits = [
        RetainedCheckpoint(c, d.lineage, job_dir.receipt(c) is not None, c in pinned)
        for c, d in found.items()
        if d is not None and d.verdict is Verdict.COMMIT
    ]
    return why_not_rewindable(target, known, commits, job_dir.history()) or pins.why_not_restorable(target)


@dataclass(frozen=True)
class Rewinder:
    """Writes intents and carries them out; no query runs."""

    #: The job whose log and sinks are set back.
    job: JobContext
    #: The inputs whose offsets are set back.
    inputs: Inputs
    #: Repeats a request to an external system until it is answered.
    patiently: Callable[[Callable[[], None]], None]
    #: Called before an external system is asked again; raises if the job is being torn down.
    wait: Callable[[str, str], None]

    def why_refused(self, order: RewindOrder) -> str:
        """Return why an order cannot be carried out; also checks sources and tables."""
        answers: list[str] = []
        why = why_refused(self.job.job_dir, self.job.pins, order.target)
        if not why:
            position = self._position(order.target)
            self.patiently(lambda: answers.append(self.inputs.why_lost(position)))
            why = answers[-1]
        if why or order.tables is Tables.KEEP:
            return why

        def ask(committer: Committer) -> None:
            answers.append(committer.why_not_superseded(order.target))

        for committer in self.job.committers.values():
            self.patiently(partial(ask, committer))
        return next(filter(None, answers), "")

    def refuse(self, order: RewindOrder, reason: str) -> None:
        self.job.job_dir.refuse_rewind_order(order, reason)
        raise _make_error(order.target, reason)

    def open(
        self,
        kind: RewindKind,
        lineage: Lineage,
        first_removed: BatchId,
        target: CheckpointId | None,
        reason: str,
        order: RewindOrder | None = None,
    ) -> None:
        """Write the intent of a rewind that starts `lineage`; from then on it will be finished.

        The number is that of the facts which led here, and of the seed that was written for it.
        """
        intent = RewindIntent(
            first_removed,
            lineage,
            reason,
            {} if kind is RewindKind.RESEED else self._entries_from(first_removed),
            kind,
            target,
            Tables.KEEP if order is None else order.tables,
            "" if order is None else order.order_id,
        )
        LOG.warning("rewinding so that micro-batch %s is planned again: %s", first_removed, reason)
        # This order matters: if a commits/ entry were deleted before the intent is durable, Spark would run
        # the newest micro-batch again and skip the input of the deleted ones.
        self.job.observer.on_step_start(Step.REWIND_INTENT, str(first_removed))
        self.job.ownership.check()
        self.job.job_dir.create_rewind(intent)
        self.job.observer.on_step_end(Step.REWIND_INTENT, str(first_removed))

    def _entries_from(self, first: BatchId) -> dict[str, str]:
        removed = {}
        for log in (OFFSETS, COMMITS):
            for batch in self.job.log.batches(log):
                text = self.job.log.read(log, batch) if batch >= first else None
                if text is not None:
                    removed[f"{log}/{batch}"] = text
        return removed

    def finish(self, intent: RewindIntent) -> None:
        # Spark's side comes first: if it fails, no external system has changed.
        if intent.kind is RewindKind.RESEED:
            self._begin_anew(intent)
        else:
            self._set_log_back(intent)
        if intent.kind is RewindKind.TO_CHECKPOINT and intent.target is not None:
            if intent.tables is Tables.RESTORE:
                for uid, committer in self.job.committers.items():
                    self._supersede(uid, committer, intent.target, intent.lineage)
            self._lower_offsets(intent.target)
        self.job.ownership.check()
        self.job.job_dir.close_rewind(intent)

    def _begin_anew(self, intent: RewindIntent) -> None:
        self.job.ownership.check()
        self.job.log.retire(intent.lineage)
        for checkpoint in self.job.pins.list_pinned():
            # A zombie that wakes up here must not remove pins of a newer owner.
            self.job.ownership.check()
            self.job.pins.unpin(checkpoint)

    def _set_log_back(self, intent: RewindIntent) -> None:
        newest_first = sorted(intent.removed, key=lambda e: (-int(e.split("/")[1]), e))
        for entry in newest_first:
            self.job.ownership.check()
            self.job.observer.on_step_start(Step.REWIND_DELETE, entry)
            self.job.log.remove(entry)
            self.job.observer.on_step_end(Step.REWIND_DELETE, entry)
        if intent.first_removed == BatchId(0):
            self.job.log.clear_state()
        elif intent.target is not None and intent.target in self.job.pins.list_pinned():
            self.job.pins.restore(intent.target)

    def _supersede(self, uid: str, committer: Committer, target: CheckpointId, lineage: Lineage) -> None:
        while True:
            answer = committer.supersede(target, lineage)
            if answer.outcome.is_done:
                return
            if answer.outcome is not Outcome.RETRY:
                raise EnvironmentFault(
                    f"sink '{uid}' cannot take back what was committed after checkpoint {target}",
                    why=answer.detail,
                    what_to_do="make it possible again and start the job: the rewind is finished then",
                )
            self.wait(f"taking back what sink '{uid}' committed", answer.detail)

    def _lower_offsets(self, target: CheckpointId) -> None:
        position = self._position(target)
        self.patiently(lambda: self.inputs.lower(position))

    def _position(self, target: CheckpointId) -> LoggedOffsets:
        decision = self.job.job_dir.decision(target)
        if decision is None:
            raise InternalError(f"the decision of checkpoint {target}, which an order names, was deleted")
        return LoggedOffsets.parse(decision.offsets_text)


def _make_error(target: CheckpointId, why: str) -> RewindError:
    return RewindError(
        f"the job cannot go back to checkpoint {target}",
        why=why,
        what_to_do="choose one from `flinkish checkpoints list`; nothing was changed",
        target=target,
    )


_POLL_MS = 100


class RewindState(enum.Enum):
    #: Nothing has changed yet; the next start of the query carries the order out.
    WAITING = "WAITING"
    #: Its intent is durable: this start or a later one finishes it.
    BEGUN = "BEGUN"
    DONE = "DONE"
    #: The job cannot rewind to that checkpoint; nothing was changed.
    REFUSED = "REFUSED"
    #: The order is in none of its places: somebody deleted it by hand.
    GONE = "GONE"

    @property
    def is_closed(self) -> bool:
        return self in (RewindState.DONE, RewindState.REFUSED, RewindState.GONE)


@dataclass(frozen=True, slots=True)
class RewindStatus:
    state: RewindState
    #: The state in words, without a full stop.
    text: str
    #: The lineage that the rewind started; None unless DONE.
    lineage: Lineage | None = None
    #: The first micro-batch that the rewind undid, of any older lineage; None unless DONE. A record is
    #: superseded if its header `flinkish-batch` has an older lineage and this micro-batch or a later one.
    first_removed: BatchId | None = None


def find_rewind_status(job_dir: JobDir, order: RewindOrder) -> RewindStatus:
    target = order.target
    # This order matters: an order is closed by creating a new object, and deleted only then. If it were read
    # last, an order closed meanwhile would be found in none of its places.
    waiting = job_dir.rewind_order()
    begun = job_dir.open_rewind()
    if begun is not None and begun.order_id == order.order_id:
        return RewindStatus(RewindState.BEGUN, f"the job is going back to checkpoint {target}")
    if waiting is not None and waiting.order_id == order.order_id:
        text = f"the next start of the query goes back to checkpoint {target}"
        return RewindStatus(RewindState.WAITING, text)
    objects = SealedObjects(job_dir.store, "the job directory")
    numbers = sorted(objects.numbers("rewinds"), reverse=True)
    rewinds = (objects.optional(f"rewinds/{n}.json", "rewind", RewindIntent.from_json) for n in numbers)
    done = next((one for one in rewinds if one is not None and one.order_id == order.order_id), None)
    if done is not None:
        text = f"the job has gone back to checkpoint {target}: lineage {done.lineage}"
        return RewindStatus(RewindState.DONE, text, done.lineage, done.first_removed)
    refused = objects.optional(f"orders/refused/{order.order_id}.json", "refused-order", dict)
    if refused is not None:
        text = f"the job cannot go back to checkpoint {target}: {refused.get('refused', '')}"
        return RewindStatus(RewindState.REFUSED, text)
    return RewindStatus(
        RewindState.GONE,
        f"the order to go back to checkpoint {target} is gone: somebody deleted it by hand, "
        "and the job has neither carried it out nor refused it",
    )


class PendingRewind:
    def __init__(self, job_dir: JobDir, order: RewindOrder, clock: Clock) -> None:
        self._job_dir, self.order, self._clock = job_dir, order, clock

    @property
    def status(self) -> RewindStatus:
        return find_rewind_status(self._job_dir, self.order)

    def wait(self, timeout_ms: Duration) -> RewindStatus:
        """Wait until the order is closed, at most `timeout_ms`; return its status. The order stays."""
        deadline_ms = self._clock.monotonic_ms() + to_ms("timeout_ms", timeout_ms)
        while True:
            status = self.status
            if status.state.is_closed or self._clock.monotonic_ms() >= deadline_ms:
                return status
            self._clock.sleep_ms(_POLL_MS)
