"""Recovery as one pure function: facts in, the next step out (DESIGN 8).

The caller gathers the facts, asks :func:`next_step`, carries the step out and starts over until
the answer is :class:`StartSpark`. Each step is idempotent and changes the facts, so a crash in
the middle of a recovery is nothing special: the next process sees what is left and goes on.

The order of the rules *is* the argument:

1. An open rewind is finished: until then Spark's logs are not to be believed.
2. A decided checkpoint whose log entries are missing gets them back from its own copy.
3. A decided checkpoint without receipt is confirmed: nothing later may be decided before.
4. The cut-off micro-batch (offsets/N without commits/N) is aborted: Spark will run it again.
5. Committed micro-batches after the last decision are kept if all they staged is alive,
   otherwise they are aborted and the job is rewound to the last decision.
6. What no kept file names is aborted.
"""

from __future__ import annotations

from dataclasses import dataclass

from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage


@dataclass(frozen=True, slots=True)
class DecidedFact:
    """A COMMIT decision on disk."""

    checkpoint: CheckpointId
    batch: BatchId
    has_receipt: bool


@dataclass(frozen=True, slots=True)
class StagedFact:
    """A staged file of the live lineage that no decision contains.

    `dead` names the first committable that cannot be committed any more; empty if all are alive.
    """

    batch: BatchId
    attempt: str
    dead: str = ""


@dataclass(frozen=True, slots=True)
class RecoveryFacts:
    """What is on disk and at the brokers, with Spark not running."""

    rewind_is_open: bool
    lineage: Lineage
    offsets: frozenset[BatchId]
    commits: frozenset[BatchId]
    decided: tuple[DecidedFact, ...]
    staged: tuple[StagedFact, ...]
    leftovers_are_swept: bool


@dataclass(frozen=True, slots=True)
class FinishRewind:
    """Carry out the deletes that rewind.json names, then close it."""


@dataclass(frozen=True, slots=True)
class RestoreLog:
    """Put offsets/N and commits/N of a decided checkpoint back from the decision."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Confirm:
    """Commit everything of a decided checkpoint again, then group offsets, then the receipt."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class AbortStaged:
    """Abort all that these staged files name, then delete the files."""

    attempts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Rewind:
    """Set Spark's logs back so that `first_removed` is the next micro-batch to be planned."""

    first_removed: BatchId
    reason: str


@dataclass(frozen=True, slots=True)
class SweepLeftovers:
    """Abort every open transaction of this job that no kept staged file names."""


@dataclass(frozen=True, slots=True)
class StartSpark:
    """Recovery is done.

    Parameters
    ----------
    next_batch
        The micro-batch that Spark must run first; anything else is an error.
    kept
        Micro-batches staged and committed but not decided, in order; if there are any, a
        checkpoint is triggered at once, since their transactions' clocks kept running.
    """

    next_batch: BatchId
    kept: tuple[BatchId, ...]


Step = FinishRewind | RestoreLog | Confirm | AbortStaged | Rewind | SweepLeftovers | StartSpark


def next_step(facts: RecoveryFacts) -> Step:
    """Return what to do next; see the rules at the head of this file."""
    if facts.rewind_is_open:
        return FinishRewind()
    decided = sorted(facts.decided, key=lambda d: d.checkpoint)
    first_open = BatchId(0)
    if decided:
        newest = decided[-1]
        first_open = newest.batch.next()
        if newest.batch not in facts.commits or newest.batch not in facts.offsets:
            return RestoreLog(newest.checkpoint)
    for fact in decided:
        if not fact.has_receipt:
            return Confirm(fact.checkpoint)

    committed = sorted(b for b in facts.commits if b >= first_open)
    next_batch = committed[-1].next() if committed else first_open
    undecided = [s for s in facts.staged if s.batch >= first_open]
    cut_off = tuple(s.attempt for s in undecided if s.batch >= next_batch)
    if cut_off:
        return AbortStaged(cut_off, "Spark did not commit this micro-batch and will run it again")

    reason = _why_not_kept(committed, undecided, first_open)
    if reason:
        # This order matters: while the log entries still exist the staged files are found again
        # by the next recovery; once they are gone, the batches are planned anew.
        attempts = tuple(s.attempt for s in undecided)
        return AbortStaged(attempts, reason) if attempts else Rewind(first_open, reason)
    if not facts.leftovers_are_swept:
        return SweepLeftovers()
    return StartSpark(next_batch, tuple(committed))


def _why_not_kept(committed: list[BatchId], undecided: list[StagedFact], first_open: BatchId) -> str:
    """Return why the micro-batches after the last decision cannot be kept; empty if they can."""
    for position, batch in enumerate(committed):
        if batch.value != first_open.value + position:
            return f"commits/{first_open.value + position} is missing below commits/{batch}"
        files = [s for s in undecided if s.batch == batch]
        if len(files) != 1:
            return f"micro-batch {batch} is committed but has {len(files)} staged files"
        if files[0].dead:
            return f"micro-batch {batch} can no longer be committed: {files[0].dead}"
    return ""
