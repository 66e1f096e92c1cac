"""One micro-batch as one epoch: the rules of a sink that has neither barriers nor a coordinator.

A plain Spark query commits per micro-batch. Spark plans an attempt, its tasks stage, the driver
commits, and Spark writes commits/N; after a crash in between, Spark runs batch N again over the
same offsets. So the unit of decision is the *attempt*:

- Every planned attempt takes the next number. At most one attempt of a batch is decided COMMIT.
- A new attempt first seals all earlier ones that are undecided with ABORT, create-if-absent: a
  zombie driver can decide nothing once its successor has planned.
- An attempt of a batch that is decided already finishes the recorded commit and aborts itself.
- A part of a decided batch that is proven to be rolled back may be replaced by the same task's
  part of a later attempt, if rows and digest agree. That, too, is a decision (`mends`).

Pure: no file, no clock, no Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flinkish_spark.protocol.codec import Stored, StoredAlone
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.records import Digest, Json

#: Folders of Spark's log below its checkpoint.
OFFSETS, COMMITS = "offsets", "commits"
#: Folder of the state below Spark's checkpoint.
STATE = "state"


@dataclass(frozen=True, slots=True, order=True)
class AttemptNumber(StoredAlone):
    """Number of a planned attempt; rises by one with each, over all batches and drivers."""

    value: int

    def __post_init__(self) -> None:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < 1:
            raise ValueError(f"an attempt number is an integer >= 1, got {self.value!r}")

    def __int__(self) -> int:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Attempt(Stored):
    """A planned attempt and the block of transactional ids that its tasks use."""

    #: Its place in the order of all attempts.
    number: AttemptNumber
    #: Part of the transactional ids of its tasks.
    block: int
    #: Highest block that any attempt had so far.
    highest_block: int
    #: Which driver planned it; text to be compared, never parsed.
    planner: str
    #: Tells it from the attempt with the same number that a copy of the checkpoint plans; empty in one that
    #: is never staged.
    token: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.block <= self.highest_block:
            raise ValueError(f"block {self.block} is not among the blocks 1 to {self.highest_block}")


def next_attempt(
    newest: Attempt | None, planner: str, *, newest_is_confirmed: bool, token: str = ""
) -> Attempt:
    """Return the attempt that is planned after `newest`.

    A block is used again only when its last attempt is confirmed: then no handle made from it can
    be needed. The block of an attempt that was cut off is given up for ever, since its tasks may
    still be alive somewhere and would fence, or be fenced by, their successors.
    """
    if newest is None:
        return Attempt(AttemptNumber(1), 1, 1, planner, token)
    number = AttemptNumber(newest.number.value + 1)
    if newest_is_confirmed:
        return Attempt(number, newest.block, newest.highest_block, planner, token)
    return Attempt(number, newest.highest_block + 1, newest.highest_block + 1, planner, token)


@dataclass(frozen=True, slots=True)
class StagedPart(Stored):
    #: Spark partition index of the task.
    partition: int
    #: How many rows, and their order-independent 64-bit digest.
    rows: int
    digest: Digest
    #: The committable as the sink stores it; None for a task without rows.
    payload: Json | None


@dataclass(frozen=True, slots=True)
class AttemptDecision(Stored):
    """The one create-if-absent object per attempt."""

    #: ABORT seals the attempt; COMMIT makes its parts the content of the batch.
    attempt: AttemptNumber
    verdict: Verdict
    #: Spark's id of the micro-batch; None for an ABORT by a later attempt, which does not know it.
    batch: BatchId | None = None
    #: What is to be committed.
    parts: tuple[StagedPart, ...] = ()
    #: Digest of Spark's offset log entry of the batch: the same id with other offsets is another
    #: batch, which must not be taken for a repetition.
    offsets_sha256: str = ""
    #: Whether the parts replace lost parts of the batch's first COMMIT.
    mends: bool = False
    reason: str = ""

    def _check_read(self) -> None:
        if self.verdict is Verdict.COMMIT and self.batch is None:
            raise ValueError(f"the decision of attempt {self.attempt} is COMMIT without a batch")


@dataclass(frozen=True, slots=True)
class DecidedBatch:
    """A batch that was decided COMMIT: its first decision and the mends of its lost parts."""

    first: AttemptDecision
    mends: tuple[AttemptDecision, ...]

    @property
    def batch(self) -> BatchId:
        assert self.first.batch is not None
        return self.first.batch

    def candidates(self, part: StagedPart) -> tuple[StagedPart, ...]:
        later = [p for mend in self.mends for p in mend.parts if p.partition == part.partition]
        return (part, *later)


def decided_batches(decisions: Iterable[AttemptDecision]) -> tuple[DecidedBatch, ...]:
    commits = sorted((d for d in decisions if d.verdict is Verdict.COMMIT), key=lambda d: d.attempt)
    found: dict[BatchId, list[AttemptDecision]] = {}
    for decision in commits:
        assert decision.batch is not None
        of_batch = found.setdefault(decision.batch, [])
        if of_batch and not decision.mends:
            raise ValueError(
                f"attempts {of_batch[0].attempt} and {decision.attempt} both decided batch {decision.batch}"
            )
        if not of_batch and decision.mends:
            raise ValueError(f"attempt {decision.attempt} mends batch {decision.batch}, which nobody decided")
        of_batch.append(decision)
    return tuple(DecidedBatch(ds[0], tuple(ds[1:])) for _, ds in sorted(found.items()))


def why_not_replaceable(
    lost: Sequence[StagedPart], proven_aborted: frozenset[int], offered: Mapping[int, StagedPart]
) -> str:
    """Return why the lost parts cannot be replaced by an attempt's parts; empty if they can."""
    for part in lost:
        mine = offered.get(part.partition)
        if part.partition not in proven_aborted:
            return (
                f"the proof of what became of task {part.partition} is gone, "
                "so its rows may have been visible already"
            )
        if mine is None or mine.payload is None:
            return f"the attempt staged nothing in task {part.partition}"
        if (mine.rows, mine.digest) != (part.rows, part.digest):
            return (
                f"task {part.partition} staged {part.rows} rows then and {mine.rows} rows now"
                if mine.rows != part.rows
                else f"task {part.partition} staged {part.rows} rows both times, but other ones"
            )
    return ""
