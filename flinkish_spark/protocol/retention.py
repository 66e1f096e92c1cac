"""Retention: which files of completed checkpoints may be deleted, and in which order.

Rules:

1. The newest `retained` checkpoints, by id, are kept. Only completed (decided COMMIT, with receipt) and
   live ones count; neither aborted ids nor savepoints do. A savepoint's files belong to the user and
   are never touched here; its entry in the job directory is deleted when it is old.
2. The newest completed checkpoint is never deleted, and neither is the newest that is not a savepoint.
3. A decision without receipt is never deleted: it still has to be finished. Neither is an id without
   a decision: its write may have succeeded. The completed checkpoint before it is kept with it, also
   when a job is cancelled: a replay of lost data starts there.
4. The highest id is kept, even if it was aborted, because new ids are counted from it.
5. Nothing that an open rewind, an order or a restore needs is deleted, and deleting never passes an
   id that is being read.
6. A dead checkpoint, which a rewind left behind, does not count and is deleted.
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
    """Policy for a cancelled job's checkpoints; named as in Flink."""

    #: They are kept, and the next start goes on from the newest.
    RETAIN_ON_CANCELLATION = "RETAIN_ON_CANCELLATION"
    #: They are deleted; the next start begins anew, and a restored job needs its savepoint again.
    DELETE_ON_CANCELLATION = "DELETE_ON_CANCELLATION"


class CheckpointPart(enum.Enum):
    """Files of a checkpoint in the job directory, in the order of their deletion.

    This order matters. A trigger record without decision would be sealed, so it goes first. A
    decision without its receipt would be committed again, so the receipt goes after it. The data
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
    #: None if there is no decision, or the result of its write is unknown.
    verdict: Verdict | None
    #: Lineage of the decision; meaningless without one.
    lineage: Lineage = FIRST_LINEAGE
    has_receipt: bool = False
    #: True if it was taken for a savepoint.
    is_savepoint: bool = False


@dataclass(frozen=True, slots=True)
class RetentionFacts:
    #: All ids with a folder, in any order.
    checkpoints: tuple[CheckpointFact, ...]
    history: LineageHistory
    #: Number of completed checkpoints to keep; at least 1.
    retained: int
    #: Ids that have a pin.
    pinned: frozenset[CheckpointId] = frozenset()
    #: Ids that are being read, for example by the export of a savepoint.
    in_use: frozenset[CheckpointId] = frozenset()
    #: Ids that an open rewind, an order or a restore needs.
    referenced: frozenset[CheckpointId] = frozenset()


@dataclass(frozen=True, slots=True)
class Deletion:
    checkpoint: CheckpointId
    parts: tuple[CheckpointPart, ...]


def find_deletions(facts: RetentionFacts) -> tuple[Deletion, ...]:
    """Return the checkpoints to delete now, oldest first. Deleting may be interrupted and repeated."""
    if facts.retained < 1:
        raise ValueError(f"at least one checkpoint is retained, got {facts.retained}")
    completed = [f for f in _sort_by_id(facts) if _is_completed(f, facts.history)]
    plain = [f for f in completed if not f.is_savepoint]
    places = {f.checkpoint for f in (*plain[-facts.retained :], *completed[-1:])}
    oldest_kept = min(places, default=CheckpointId(0))
    goes = [f.checkpoint for f in _sort_by_id(facts) if _may_go(f, facts.history, oldest_kept)]
    return _make_deletions(facts, goes)


def find_deletions_on_cancel(facts: RetentionFacts, retention: CheckpointRetention) -> tuple[Deletion, ...]:
    """Return the checkpoints to delete after a job was cancelled; none under RETAIN_ON_CANCELLATION.

    The caller seals one more id with ABORT before: new ids must be above it, since sinks recognise
    repeated commits by their id. Only for the state CANCELED: a job that is suspended, has failed or
    has finished keeps all checkpoints, so that it can be started again.
    """
    if retention is CheckpointRetention.RETAIN_ON_CANCELLATION or not facts.checkpoints:
        return ()
    if _sort_by_id(facts)[-1].verdict is not Verdict.ABORT:
        newest_id = _sort_by_id(facts)[-1].checkpoint
        raise ValueError(f"seal an id above {newest_id} first: ids are counted from it")
    # The completed checkpoints from which decisions without receipt may have to be replayed.
    needed: set[CheckpointId] = set()
    newest: CheckpointId | None = None
    for fact in _sort_by_id(facts):
        if _is_completed(fact, facts.history):
            newest = fact.checkpoint
        elif fact.verdict is Verdict.COMMIT and not fact.has_receipt and newest is not None:
            needed.add(newest)
    goes = [
        f.checkpoint
        for f in _sort_by_id(facts)
        if f.verdict is Verdict.ABORT or (f.verdict is Verdict.COMMIT and f.has_receipt)
        if f.checkpoint not in needed
    ]
    return _make_deletions(facts, goes)


def _sort_by_id(facts: RetentionFacts) -> list[CheckpointFact]:
    return sorted(facts.checkpoints, key=lambda fact: fact.checkpoint)


def _is_completed(fact: CheckpointFact, history: LineageHistory) -> bool:
    is_dead = history.find_superseding(fact.checkpoint, fact.lineage) is not None
    return fact.verdict is Verdict.COMMIT and fact.has_receipt and not is_dead


def _may_go(fact: CheckpointFact, history: LineageHistory, oldest_kept: CheckpointId) -> bool:
    if fact.verdict is None:
        # A crash of a deletion may leave a receipt without decision. Without either, the state is unknown.
        return fact.has_receipt and fact.checkpoint < oldest_kept
    if fact.verdict is Verdict.COMMIT and not fact.has_receipt:
        return False
    is_dead = history.find_superseding(fact.checkpoint, fact.lineage) is not None
    return fact.checkpoint < oldest_kept or (fact.verdict is Verdict.COMMIT and is_dead)


def _make_deletions(facts: RetentionFacts, goes: Iterable[CheckpointId]) -> tuple[Deletion, ...]:
    known = {f.checkpoint for f in facts.checkpoints}
    kept = facts.referenced | {max(known, default=CheckpointId(0))}
    whole = [Deletion(one, tuple(CheckpointPart)) for one in goes if one not in kept]
    # A crash of a deletion may leave the last parts of an id whose folder is gone already.
    last = (CheckpointPart.RESTAGED, CheckpointPart.PIN)
    orphans = [Deletion(one, last) for one in facts.pinned - known - facts.referenced]
    end = min(facts.in_use, default=None)
    found = sorted((*whole, *orphans), key=lambda deletion: deletion.checkpoint)
    return tuple(d for d in found if end is None or d.checkpoint < end)
