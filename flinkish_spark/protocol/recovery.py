"""Recovery as one pure function: facts in, the next step out.

The caller gathers the facts, calls :func:`next_step`, carries the step out and starts over until the
answer is :class:`StartSpark`. Each step is idempotent and changes the facts, so a crash in the middle of
a recovery needs no special case: the next process gathers the facts again and goes on.

The rules are data, :data:`RULES`; the first one that applies gives the step, so their order matters.
`docs/protocol.md` quotes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.lineage import FIRST_LINEAGE


@dataclass(frozen=True, slots=True)
class DecidedFact:
    """A COMMIT decision in the job directory that no rewind made dead."""

    checkpoint: CheckpointId
    batch: BatchId
    has_receipt: bool
    lineage: Lineage = FIRST_LINEAGE


def drop_leftovers(decided: Iterable[DecidedFact]) -> tuple[DecidedFact, ...]:
    """Return the decided checkpoints without those of a zombie, oldest first.

    n+1 is never decided before n's receipt is durable. So a zombie wrote a COMMIT without receipt that
    is below another COMMIT, after the seal that would have stopped it had been deleted as old. The
    takeover aborted its data; nobody waits for it.
    """
    facts = sorted(decided, key=lambda fact: fact.checkpoint)
    return tuple(fact for fact in facts if fact.has_receipt or fact is facts[-1])


@dataclass(frozen=True, slots=True)
class StagedFact:
    """A staged file of the live lineage.

    `dead` names the first committable that cannot be committed any more; empty if all are alive.
    `overtakes` names a sink that must replay earlier data, which would then come after the data in this
    file; empty if there is none.
    """

    batch: BatchId
    attempt: str
    dead: str = ""
    overtakes: str = ""


@dataclass(frozen=True, slots=True)
class OrderFact:
    """A waiting order of a user to go back; `refusal` says why it cannot be carried out, if so."""

    order_id: str
    target: CheckpointId
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class RecoveryFacts:
    """State of the job directory and of the sinks' systems while Spark is not running."""

    #: True if a rewind was begun and is not finished.
    rewind_is_open: bool
    lineage: Lineage
    #: Micro-batches that have an entry in Spark's logs.
    offsets: frozenset[BatchId]
    commits: frozenset[BatchId]
    #: Live checkpoints only, without those that a rewind made dead.
    decided: tuple[DecidedFact, ...]
    #: Files of the live lineage, above the last decided micro-batch or not.
    staged: tuple[StagedFact, ...]
    #: True if this recovery has swept.
    leftovers_are_swept: bool
    #: The lineage in which Spark's checkpoint began at micro-batch 0. Decisions of earlier
    #: lineages count micro-batches of another log.
    log_began_in: Lineage = FIRST_LINEAGE
    #: Checkpoints whose state is kept from Spark's cleaning.
    pinned: frozenset[CheckpointId] = frozenset()
    #: A user's order to go back.
    order: OrderFact | None = None
    #: True if Spark's checkpoint has to begin anew, with the state of the last decided one.
    reseed_is_wanted: bool = False
    #: Decided checkpoints with lost data, as far as this recovery has found out.
    lost: frozenset[CheckpointId] = frozenset()

    @property
    def in_log(self) -> tuple[DecidedFact, ...]:
        return tuple(
            sorted((d for d in self.decided if d.lineage >= self.log_began_in), key=lambda d: d.checkpoint)
        )

    @property
    def newest(self) -> DecidedFact | None:
        return self.in_log[-1] if self.in_log else None

    @property
    def first_open(self) -> BatchId:
        return BatchId(0) if self.newest is None else self.newest.batch.next()

    @property
    def kept(self) -> tuple[BatchId, ...]:
        """Return the micro-batches that Spark committed after the last decision, in order."""
        return tuple(sorted(b for b in self.commits if b >= self.first_open))

    @property
    def next_batch(self) -> BatchId:
        return self.kept[-1].next() if self.kept else self.first_open

    @property
    def undecided(self) -> tuple[StagedFact, ...]:
        return tuple(s for s in self.staged if s.batch >= self.first_open)

    @property
    def attempts(self) -> tuple[str, ...]:
        return tuple(s.attempt for s in self.undecided)

    @property
    def unconfirmed(self) -> frozenset[CheckpointId]:
        return frozenset(d.checkpoint for d in self.decided if not d.has_receipt)

    @property
    def refusal(self) -> str:
        order = self.order
        if order is None or order.refusal or any(d.checkpoint == order.target for d in self.in_log):
            return "" if order is None else order.refusal
        return "it is not among the checkpoints that Spark's log can go back to"

    @property
    def goes_back_to(self) -> DecidedFact | None:
        wanted = None if self.order is None or self.refusal else self.order.target
        return next((d for d in self.in_log if d.checkpoint == wanted), None)


@dataclass(frozen=True, slots=True)
class FinishRewind:
    """Carry the rewind intent out, then close it."""


@dataclass(frozen=True, slots=True)
class RestoreLog:
    """Put offsets/N-1, offsets/N and commits/N of a decided checkpoint back from their copies."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Confirm:
    """Commit all data of a decided checkpoint again, then group offsets, then the receipt."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Replay:
    """Stage the lost data of one sink in a decided checkpoint again, over the recorded ranges."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the state that a checkpoint needs from Spark's cleaning."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class RefuseOrder:
    """Close an order that cannot be carried out, and report it; change nothing else."""

    order_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbortStagedFiles:
    """Abort all committables in these staged files, then delete the files."""

    attempts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Rewind:
    """Write the intent to set Spark's logs back, so that `first_removed` is planned next.

    `target` is the checkpoint that becomes the newest, None for the very beginning; `order_id` is
    empty unless a user ordered it.
    """

    first_removed: BatchId
    reason: str
    target: CheckpointId | None = None
    order_id: str = ""


@dataclass(frozen=True, slots=True)
class Reseed:
    """Export the state of `target`, then write the intent to start a new Spark checkpoint."""

    first_removed: BatchId
    target: CheckpointId | None


@dataclass(frozen=True, slots=True)
class TrimLog:
    """Remove offsets entries above the micro-batch that Spark runs next, the newest first."""

    entries: tuple[BatchId, ...]


@dataclass(frozen=True, slots=True)
class SweepLeftovers:
    """Abort every open transaction of this job that is not in a kept staged file."""


@dataclass(frozen=True, slots=True)
class StartSpark:
    #: The micro-batch that Spark must run first; anything else is an error.
    next_batch: BatchId
    #: Micro-batches staged and committed but not decided, in order; if there are any, a
    #: checkpoint is triggered at once, since their transactions' clocks kept running.
    kept: tuple[BatchId, ...]


Step = (
    FinishRewind
    | RestoreLog
    | Confirm
    | Replay
    | Pin
    | RefuseOrder
    | AbortStagedFiles
    | Rewind
    | Reseed
    | TrimLog
    | SweepLeftovers
    | StartSpark
)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the recovery: `applies` returns its step or None. The texts are for the documentation."""

    condition: str
    step: str
    why: str
    applies: Callable[[RecoveryFacts], Step | None]


def next_step(facts: RecoveryFacts) -> Step:
    return next(step for rule in RULES if (step := rule.applies(facts)) is not None)


def _restore_log(facts: RecoveryFacts) -> Step | None:
    if facts.newest is None:
        return None
    at = facts.newest.batch
    needed = {at} if at == BatchId(0) else {at, BatchId(at.value - 1)}
    is_whole = needed <= facts.offsets and at in facts.commits
    return None if is_whole else RestoreLog(facts.newest.checkpoint)


def _confirm(facts: RecoveryFacts) -> Step | None:
    first = min((c for c in facts.unconfirmed if c not in facts.lost), default=None)
    return None if first is None else Confirm(first)


def _to_replay(facts: RecoveryFacts) -> CheckpointId | None:
    target = facts.order.target if facts.order is not None else None
    lost = [c for c in facts.unconfirmed if c in facts.lost and (target is None or c <= target)]
    return min(lost, default=None)


def _abort_overtaking(facts: RecoveryFacts) -> Step | None:
    sink, lost = next((s.overtakes for s in facts.undecided if s.overtakes), ""), _to_replay(facts)
    if not sink or lost is None:
        return None
    if lost not in facts.pinned:
        return Pin(lost)
    return AbortStagedFiles(facts.attempts, f"sink '{sink}' must stage earlier data again")


def _replay(facts: RecoveryFacts) -> Step | None:
    lost = _to_replay(facts)
    return None if lost is None else Replay(lost)


def _pin(facts: RecoveryFacts) -> Step | None:
    newest = facts.newest
    if newest is None or not newest.has_receipt or newest.checkpoint in facts.pinned:
        return None
    return Pin(newest.checkpoint)


def _refuse(facts: RecoveryFacts) -> Step | None:
    return RefuseOrder(facts.order.order_id, facts.refusal) if facts.order and facts.refusal else None


def _drop_undecided(facts: RecoveryFacts) -> Step | None:
    if not facts.undecided or not (facts.order or facts.reseed_is_wanted):
        return None
    return AbortStagedFiles(facts.attempts, "the job goes back to a decided checkpoint")


def _go_back(facts: RecoveryFacts) -> Step | None:
    target = facts.goes_back_to
    if facts.order is None or target is None:
        return None
    reason = f"ordered to go back to checkpoint {target.checkpoint}"
    return Rewind(target.batch.next(), reason, target.checkpoint, facts.order.order_id)


def _reseed(facts: RecoveryFacts) -> Step | None:
    if not facts.reseed_is_wanted:
        return None
    return Reseed(facts.first_open, None if facts.newest is None else facts.newest.checkpoint)


def _abort_cut_off(facts: RecoveryFacts) -> Step | None:
    cut_off = tuple(s.attempt for s in facts.undecided if s.batch >= facts.next_batch)
    why = "Spark did not commit this micro-batch and will run it again"
    return AbortStagedFiles(cut_off, why) if cut_off else None


def _abort_dead(facts: RecoveryFacts) -> Step | None:
    reason = why_not_kept(facts)
    return AbortStagedFiles(facts.attempts, reason) if reason and facts.undecided else None


def _rewind(facts: RecoveryFacts) -> Step | None:
    reason = why_not_kept(facts)
    target = None if facts.newest is None else facts.newest.checkpoint
    return Rewind(facts.first_open, reason, target) if reason else None


def _trim_log(facts: RecoveryFacts) -> Step | None:
    beyond = tuple(sorted((b for b in facts.offsets if b > facts.next_batch), reverse=True))
    return TrimLog(beyond) if beyond else None


def why_not_kept(facts: RecoveryFacts) -> str:
    """Return why the micro-batches after the last decision cannot be kept; empty if they can."""
    for position, batch in enumerate(facts.kept):
        expected = facts.first_open.value + position
        if batch.value != expected:
            return f"commits/{expected} is missing below commits/{batch}"
        files = [s for s in facts.undecided if s.batch == batch]
        if len(files) != 1:
            return f"micro-batch {batch} is committed but has {len(files)} staged files"
        if files[0].dead:
            return f"micro-batch {batch} can no longer be committed: {files[0].dead}"
    return ""


RULES = (
    Rule(
        "a rewind was begun (`rewinding/<lineage>.json`)",
        "finish the rewind, close it",
        "until then Spark's logs and state are between two versions",
        lambda facts: FinishRewind() if facts.rewind_is_open else None,
    ),
    Rule(
        "the newest decided micro-batch N lacks `offsets/N-1`, `offsets/N` or `commits/N`",
        "restore them from the decision's and the pin's copies",
        "a decided micro-batch must not run again, and later rules read the logs",
        _restore_log,
    ),
    Rule(
        "a COMMIT without receipt",
        "commit all sinks again, group offsets, receipt",
        "no later checkpoint may be decided before; its transactional ids must not be reused",
        _confirm,
    ),
    Rule(
        "an order to go back that cannot be carried out",
        "close it, and end the start with its reason",
        "refused before any change, and before steps that may end the start: no order waits for ever",
        _refuse,
    ),
    Rule(
        "the next fact, and later staged micro-batches of a sink whose readers see the order of staging",
        "pin its state; abort the undecided staged files, delete them",
        "data that is staged again must come before that of later micro-batches; they run again from the pin",
        _abort_overtaking,
    ),
    Rule(
        "a COMMIT with data that a sink's system has lost, unless an order goes back to before it",
        "replay its micro-batches beside the job's log, stage the lost data again, confirm it",
        "after the confirmation that found the loss, and before steps that need it confirmed",
        _replay,
    ),
    Rule(
        "the newest confirmed checkpoint is not pinned",
        "pin its state",
        "Spark is not running, so it cannot delete the state meanwhile",
        _pin,
    ),
    Rule(
        "an order to go back or a new beginning is wanted, and staged files are undecided",
        "abort their committables, delete them",
        "the next steps remove the log entries that staged files refer to",
        _drop_undecided,
    ),
    Rule(
        "an order to go back",
        "write the intent to rewind to its target",
        "every decided checkpoint is confirmed and all other staged data is aborted",
        _go_back,
    ),
    Rule(
        "Spark's checkpoint has to begin anew (another number of shuffle partitions)",
        "export the state of the newest checkpoint, write the intent",
        "after an order, since that changes the state to export",
        _reseed,
    ),
    Rule(
        "staged files above the newest committed micro-batch",
        "abort their committables, delete them",
        "Spark will run that micro-batch again",
        _abort_cut_off,
    ),
    Rule(
        "committed micro-batches after the last decision; one is dead, has no staged file or follows a gap",
        "abort them all",
        "they can only be removed together; aborted first, while their staged files exist",
        _abort_dead,
    ),
    Rule(
        "the same, and nothing is staged any more",
        "write the intent to rewind to the last decided micro-batch",
        "without the log entries, Spark plans the micro-batches anew",
        _rewind,
    ),
    Rule(
        "an `offsets` entry above the micro-batch that Spark has to run next",
        "remove it",
        "Spark goes on from its newest entry, even after a gap; such an entry was written late",
        _trim_log,
    ),
    Rule(
        "leftovers not swept yet",
        "abort open transactions of this job that are not in a kept staged file",
        "only now the kept files are known",
        lambda facts: None if facts.leftovers_are_swept else SweepLeftovers(),
    ),
    Rule(
        "nothing left",
        "start Spark",
        "kept micro-batches get a checkpoint at once, since their transactions may time out",
        lambda facts: StartSpark(facts.next_batch, facts.kept),
    ),
)
