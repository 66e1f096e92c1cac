"""What a recovery finds: on disk, in Spark's logs, at the brokers. Gathered with Spark not running."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.lineage import FIRST_LINEAGE


@dataclass(frozen=True, slots=True)
class DecidedFact:
    """A COMMIT decision on disk that no rewind left behind."""

    checkpoint: CheckpointId
    batch: BatchId
    has_receipt: bool
    lineage: Lineage = FIRST_LINEAGE


def without_leftovers(decided: Iterable[DecidedFact]) -> tuple[DecidedFact, ...]:
    """Return the decided checkpoints without what a zombie left behind, oldest first.

    n+1 is never decided before n's receipt is durable. So a COMMIT without receipt below another one
    was written by a zombie, after the seal that was to keep it from that had been deleted as old.
    Its data was aborted when the job was taken over; nobody waits for it.

    Examples
    --------
    >>> zombie = DecidedFact(CheckpointId(3), BatchId(7), has_receipt=False)
    >>> newest = DecidedFact(CheckpointId(5), BatchId(9), has_receipt=False)
    >>> without_leftovers([zombie, newest]) == (newest,)
    True
    """
    facts = sorted(decided, key=lambda fact: fact.checkpoint)
    return tuple(fact for fact in facts if fact.has_receipt or fact is facts[-1])


@dataclass(frozen=True, slots=True)
class StagedFact:
    """A staged file of the live lineage.

    `dead` names the first committable that cannot be committed any more; empty if all are alive.
    `overtakes` names the sink that is about to stage again, behind what this file names, what was to come
    before it; empty if there is none.
    """

    batch: BatchId
    attempt: str
    dead: str = ""
    overtakes: str = ""


@dataclass(frozen=True, slots=True)
class OrderFact:
    """A user's order to go back that waits; `refusal` says why it cannot be carried out, if so."""

    order_id: str
    target: CheckpointId
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class RecoveryFacts:
    """What is on disk and at the brokers, with Spark not running.

    Parameters
    ----------
    rewind_is_open
        Whether a rewind was begun and is not finished.
    lineage
        The live lineage.
    offsets, commits
        Micro-batches that have an entry in Spark's logs.
    decided
        Live checkpoints only: what a rewind left behind is no fact any more.
    staged
        Files of the live lineage, above the last decided micro-batch or not.
    leftovers_are_swept
        Whether this recovery has swept.
    log_began_in
        The lineage in which Spark's checkpoint began at micro-batch 0. Decisions of earlier
        lineages count micro-batches of another log.
    pinned
        Checkpoints whose state is kept from Spark's cleaning.
    order
        A user's order to go back.
    reseed_is_wanted
        Whether Spark's checkpoint has to begin anew, from the state of the last decided one.
    lost
        Decided checkpoints of which this recovery has learned that something of them is lost.
    """

    rewind_is_open: bool
    lineage: Lineage
    offsets: frozenset[BatchId]
    commits: frozenset[BatchId]
    decided: tuple[DecidedFact, ...]
    staged: tuple[StagedFact, ...]
    leftovers_are_swept: bool
    log_began_in: Lineage = FIRST_LINEAGE
    pinned: frozenset[CheckpointId] = frozenset()
    order: OrderFact | None = None
    reseed_is_wanted: bool = False
    lost: frozenset[CheckpointId] = frozenset()

    @property
    def in_log(self) -> tuple[DecidedFact, ...]:
        """Return the decided checkpoints whose micro-batches Spark's log counts, oldest first."""
        return tuple(
            sorted((d for d in self.decided if d.lineage >= self.log_began_in), key=lambda d: d.checkpoint)
        )

    @property
    def newest(self) -> DecidedFact | None:
        """Return the last decided checkpoint of Spark's log."""
        return self.in_log[-1] if self.in_log else None

    @property
    def first_open(self) -> BatchId:
        """Return the first micro-batch that no decision covers."""
        return BatchId(0) if self.newest is None else self.newest.batch.next()

    @property
    def kept(self) -> tuple[BatchId, ...]:
        """Return the micro-batches that Spark committed after the last decision, in order."""
        return tuple(sorted(b for b in self.commits if b >= self.first_open))

    @property
    def next_batch(self) -> BatchId:
        """Return the micro-batch that Spark runs next."""
        return self.kept[-1].next() if self.kept else self.first_open

    @property
    def undecided(self) -> tuple[StagedFact, ...]:
        """Return the staged files that no decision covers."""
        return tuple(s for s in self.staged if s.batch >= self.first_open)

    @property
    def refusal(self) -> str:
        """Return why the waiting order cannot be carried out; empty without an order, or if it can."""
        if self.order is None or self.order.refusal:
            return "" if self.order is None else self.order.refusal
        if self.order.target not in {d.checkpoint for d in self.in_log}:
            return "it is not among the checkpoints that Spark's log can go back to"
        return ""

    @property
    def goes_back_to(self) -> DecidedFact | None:
        """Return the target of an order that can be carried out."""
        if self.order is None or self.refusal:
            return None
        return next(d for d in self.in_log if d.checkpoint == self.order.target)
