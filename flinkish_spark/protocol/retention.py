"""What may be deleted of completed checkpoints, and in which order.

Rules:

1. Only checkpoints that are completed (decided COMMIT, with receipt) and live take one of the
   `retained` places, the newest ones, by id. Aborted ids use up no place, and neither do savepoints:
   their files are the user's and are never touched here; their entry goes when it is old.
2. The newest completed checkpoint is never deleted, and neither is the newest that is no savepoint.
3. A decision without receipt is never deleted: it still has to be finished. Neither is an id without
   a decision: nobody knows what became of the write. The completed one before it stays with it, also
   when a job is cancelled: from there it is replayed if something of it is lost.
4. The highest id stays, whatever became of it, because ids are counted from what is there.
5. Nothing that an open rewind, an order or a restore needs is deleted, and deleting never passes an
   id that somebody is reading.
6. A dead checkpoint, one that a rewind left behind, takes no place and goes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.lineage import FIRST_LINEAGE, LineageHistory


class CheckpointRetention(Choice):
    """What becomes of a cancelled job's checkpoints; named as in Flink."""

    #: They stay, and the next start goes on from the newest.
    RETAIN_ON_CANCELLATION = "RETAIN_ON_CANCELLATION"
    #: They go; the next start begins anew, that of a restored job with its savepoint given again.
    DELETE_ON_CANCELLATION = "DELETE_ON_CANCELLATION"


class Part(enum.Enum):
    """What a checkpoint has in the job directory, in the order in which it is deleted.

    This order matters. A trigger record without decision would be sealed, so it goes first. A
    decision without its receipt would be committed again, so the receipt goes after it. What was
    staged again for a decision, and its pin, are garbage without it, so they go last.
    """

    TRIGGER = "trigger.json"
    DECISION = "decision.json"
    RECEIPT = "receipt.json"
    RESTAGED = "restaged"
    PIN = "pin"


@dataclass(frozen=True, slots=True)
class CheckpointFact:
    #: The id; it has a folder.
    checkpoint: CheckpointId
    #: None while there is no decision, or where it is not known whether one was written.
    verdict: Verdict | None
    #: Of the decision; of no meaning without one.
    lineage: Lineage = FIRST_LINEAGE
    has_receipt: bool = False
    #: Whether it was taken for a savepoint.
    is_savepoint: bool = False


@dataclass(frozen=True, slots=True)
class RetentionFacts:
    #: All ids with a folder, in any order.
    checkpoints: tuple[CheckpointFact, ...]
    history: LineageHistory
    #: How many completed checkpoints keep their place; at least 1.
    retained: int
    #: Ids that have a pin.
    pinned: frozenset[CheckpointId] = frozenset()
    #: Ids that somebody reads now, such as the export of a savepoint.
    in_use: frozenset[CheckpointId] = frozenset()
    #: Ids that an open rewind, an order or a restore names.
    referenced: frozenset[CheckpointId] = frozenset()


@dataclass(frozen=True, slots=True)
class Deletion:
    """Everything of a checkpoint that goes, in the order in which it goes."""

    checkpoint: CheckpointId
    parts: tuple[Part, ...]


def to_delete(facts: RetentionFacts) -> tuple[Deletion, ...]:
    """Return what may be deleted now, oldest first. Deleting may stop anywhere and start over."""
    if facts.retained < 1:
        raise ValueError(f"at least one checkpoint is retained, got {facts.retained}")
    completed = [f for f in _by_id(facts) if _is_completed(f, facts.history)]
    plain = [f for f in completed if not f.is_savepoint]
    places = {f.checkpoint for f in (*plain[-facts.retained :], *completed[-1:])}
    oldest_kept = min(places, default=CheckpointId(0))
    goes = [f.checkpoint for f in _by_id(facts) if _may_go(f, facts.history, oldest_kept)]
    return _deletions(facts, goes)


def to_delete_on_cancel(facts: RetentionFacts, retention: CheckpointRetention) -> tuple[Deletion, ...]:
    """Return what goes when a job has been cancelled for good; nothing under RETAIN.

    The caller seals one more id with ABORT before: ids must go on from there, since sinks tell
    repeated commits by them. Only for the state CANCELED: a job that is suspended, has failed or
    has finished keeps everything, so that it can be started again.
    """
    if retention is CheckpointRetention.RETAIN_ON_CANCELLATION or not facts.checkpoints:
        return ()
    if _by_id(facts)[-1].verdict is not Verdict.ABORT:
        raise ValueError(f"seal an id above {_by_id(facts)[-1].checkpoint} first: ids are counted from it")
    # The completed checkpoints that decisions without receipt are replayed from, if need be.
    needed: set[CheckpointId] = set()
    newest: CheckpointId | None = None
    for fact in _by_id(facts):
        if _is_completed(fact, facts.history):
            newest = fact.checkpoint
        elif fact.verdict is Verdict.COMMIT and not fact.has_receipt and newest is not None:
            needed.add(newest)
    goes = [
        f.checkpoint
        for f in _by_id(facts)
        if f.verdict is Verdict.ABORT or (f.verdict is Verdict.COMMIT and f.has_receipt)
        if f.checkpoint not in needed
    ]
    return _deletions(facts, goes)


def _by_id(facts: RetentionFacts) -> list[CheckpointFact]:
    return sorted(facts.checkpoints, key=lambda fact: fact.checkpoint)


def _is_completed(fact: CheckpointFact, history: LineageHistory) -> bool:
    is_dead = history.superseded_by(fact.checkpoint, fact.lineage) is not None
    return fact.verdict is Verdict.COMMIT and fact.has_receipt and not is_dead


def _may_go(fact: CheckpointFact, history: LineageHistory, oldest_kept: CheckpointId) -> bool:
    if fact.verdict is None:
        # A receipt without decision is what a crash left of a deletion; without either, who knows.
        return fact.has_receipt and fact.checkpoint < oldest_kept
    if fact.verdict is Verdict.COMMIT and not fact.has_receipt:
        return False
    is_dead = history.superseded_by(fact.checkpoint, fact.lineage) is not None
    return fact.checkpoint < oldest_kept or (fact.verdict is Verdict.COMMIT and is_dead)


def _deletions(facts: RetentionFacts, goes: Iterable[CheckpointId]) -> tuple[Deletion, ...]:
    known = {f.checkpoint for f in facts.checkpoints}
    kept = facts.referenced | {max(known, default=CheckpointId(0))}
    whole = [Deletion(one, tuple(Part)) for one in goes if one not in kept]
    # What a crash left of a deletion: the last parts of an id whose folder is gone already.
    orphans = [Deletion(one, (Part.RESTAGED, Part.PIN)) for one in facts.pinned - known - facts.referenced]
    end = min(facts.in_use, default=None)
    found = sorted((*whole, *orphans), key=lambda deletion: deletion.checkpoint)
    return tuple(d for d in found if end is None or d.checkpoint < end)
