"""Compares the decision for each checkpoint and sink with what the outputs show.

Reads decisions and receipts before the outputs are read, and once more afterwards: what is confirmed by the
first look must be whole, what is visible must be decided by the second.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flinkish_spark.audit.counting import Place
from flinkish_spark.core.errors import CorruptObjectError, UserError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.lineage import LineageHistory, RewindKind

#: Longer numbers are none of ours, and some are longer than Python reads.
_BATCH_NAME = re.compile(r"([0-9]{1,18})/([0-9]{1,18})")
#: Lineage and micro-batch; of checkpoints 0 and the id.
_Order = tuple[int, int]


class NothingToAudit(UserError):
    """The job has no confirmed checkpoint yet, or its checkpoints have no such sink."""


@dataclass(frozen=True, slots=True)
class BatchName:
    """A micro-batch as records name it."""

    lineage: Lineage
    batch: BatchId

    @classmethod
    def of(cls, text: str) -> BatchName | None:
        match = _BATCH_NAME.fullmatch(text)
        return None if match is None else cls(Lineage(int(match[1])), BatchId(int(match[2])))

    def __str__(self) -> str:
        return f"{self.lineage}/{self.batch}"


@dataclass(frozen=True, slots=True)
class DecidedCheckpoint:
    checkpoint: int
    lineage: Lineage
    is_confirmed: bool
    #: What each sink wrote, by micro-batch.
    rows: Mapping[str, Mapping[str, int]]
    #: Up to where it has read.
    offsets_text: str = ""

    @classmethod
    def of(cls, decision: Decision, *, is_confirmed: bool) -> DecidedCheckpoint:
        rows: dict[str, dict[str, int]] = {}
        for staged in decision.batches:
            name = str(BatchName(staged.lineage, staged.batch))
            for ack in staged.acks:
                written = sum(task.rows - task.dropped - task.dead_lettered for task in ack.tasks)
                rows.setdefault(ack.sink, {})[name] = written
        number, position = int(decision.checkpoint), decision.offsets_text
        return cls(number, decision.lineage, is_confirmed, rows, position)

    @property
    def batches(self) -> frozenset[str]:
        return frozenset(name for of_sink in self.rows.values() for name in of_sink)


@dataclass(frozen=True, slots=True)
class JobDecisions:
    """One look at the decisions of a job that are still there."""

    checkpoints: Mapping[int, DecidedCheckpoint]
    #: The newest live decision that is confirmed; None before the first.
    newest: Decision | None
    history: LineageHistory

    @classmethod
    def read(cls, job_dir: JobDir) -> JobDecisions:
        """Read the decisions; one that is deleted meanwhile is left out."""
        found, newest = {}, None
        history = job_dir.history()
        for checkpoint, decision in _commits(job_dir):
            is_confirmed = job_dir.receipt(checkpoint) is not None
            found[int(checkpoint)] = DecidedCheckpoint.of(decision, is_confirmed=is_confirmed)
            if is_confirmed and history.superseded_by(checkpoint, decision.lineage) is None:
                newest = decision
        return cls(found, newest, history)

    def is_dead(self, one: DecidedCheckpoint) -> bool:
        return self.history.superseded_by(CheckpointId(one.checkpoint), one.lineage) is not None

    def may_be_dead(self, checkpoint: int) -> bool:
        """Return whether a checkpoint may be one that a rewind left behind, whose decision is deleted."""
        if checkpoint in self.checkpoints:
            return False
        # Decisions that were left behind are the first to go. Between the rewind's target and the first id
        # that is known of a later lineage there may be live ones, too, if those are deleted by now.
        for rewind in self.history.rewinds:
            if rewind.kind is RewindKind.TO_CHECKPOINT and rewind.target is not None:
                later = (n for n, one in self.checkpoints.items() if one.lineage >= rewind.lineage)
                if int(rewind.target) < checkpoint < min(later, default=checkpoint + 1):
                    return True
        return False

    def is_dead_batch(self, text: str) -> bool:
        """Return whether a micro-batch is of a checkpoint that a rewind left behind."""
        name = BatchName.of(text)
        if name is None:
            return False
        # What was given up without a decision is not meant: it must not be visible at all.
        for rewind in self.history.rewinds:
            if rewind.lineage > name.lineage:
                if name.batch >= rewind.first_removed:
                    return rewind.kind is RewindKind.TO_CHECKPOINT
                if rewind.kind is RewindKind.RESEED:
                    # Later rewinds count micro-batches from another beginning.
                    return False
        return False

    def check_sink(self, uid: str) -> None:
        """Raise NothingToAudit unless some checkpoint has rows of a sink, or says that it has none."""
        known = {sink for one in self.checkpoints.values() for sink in one.rows}
        if uid not in known:
            raise NothingToAudit(
                f"the job's checkpoints have no sink '{uid}'",
                what_to_do=f"choose from {', '.join(sorted(known)) or 'none: nothing is decided yet'}",
            )


def _commits(job_dir: JobDir) -> Iterator[tuple[CheckpointId, Decision]]:
    for checkpoint in job_dir.decided_ids():
        decision = job_dir.decision(checkpoint)
        if decision is not None and decision.verdict is Verdict.COMMIT:
            yield checkpoint, decision


@dataclass(frozen=True, slots=True)
class Partial:
    """A checkpoint, or a micro-batch without one, that an output does not show exactly."""

    sink: str
    what: str
    #: 0 for what no decision names.
    decided_rows: int
    visible_rows: int
    #: A record of the input that it shows and had not read; then the numbers of rows may be right.
    unread: str = ""

    def __str__(self) -> str:
        if self.unread:
            return f"'{self.sink}' shows in {self.what} a row of {self.unread}, which that had not read"
        return f"'{self.sink}' shows {self.visible_rows} rows of {self.what}, decided are {self.decided_rows}"


@dataclass(frozen=True, slots=True)
class Visible:
    """The numbers of rows that an output shows, by micro-batch or by checkpoint; the other one is None."""

    sink: str
    by_batch: Counter[str] | None = None
    by_checkpoint: Counter[int] | None = None
    #: The last record of the input that it names, by micro-batch (or checkpoint, as text) and partition.
    newest: Mapping[tuple[str, Place], int] = field(default_factory=dict)


def partial_checkpoints(before: JobDecisions, visible: Visible, after: JobDecisions) -> list[Partial]:
    """Return what an output shows in part, too much of, or without a decision."""
    known = {**before.checkpoints, **after.checkpoints}
    whole = [one for one in before.checkpoints.values() if one.is_confirmed and not after.is_dead(one)]
    found = []
    for one in whole:
        rows = one.rows.get(visible.sink)
        if rows is None:
            # The sink was added to the job later.
            continue
        found += list(_differing(one, rows, visible))
    return found + _find_undecided(before, after, visible) + list(_too_new(known, visible))


def _too_new(known: Mapping[int, DecidedCheckpoint], visible: Visible) -> Iterator[Partial]:
    """Yield checkpoints that show input which they had not read: it comes from a later one."""
    of_sink = [one for one in known.values() if visible.sink in one.rows]
    by_batch = {name: one for one in of_sink for name in one.rows[visible.sink]}
    by_batch.update((str(one.checkpoint), one) for one in of_sink)
    for (name, (topic, partition)), newest in sorted(visible.newest.items()):
        one = by_batch.get(name)
        if one is None:
            continue
        ends = LoggedOffsets.parse(one.offsets_text).kafka(frozenset([topic])).get(topic, {})
        if newest >= ends.get(partition, newest + 1):
            decided = sum(one.rows[visible.sink].values())
            by_batch_name, by_id = visible.by_batch or Counter(), visible.by_checkpoint or Counter()
            shown = by_batch_name[name] or by_id[one.checkpoint]
            unread = f"{topic}-{partition} offset {newest}"
            yield Partial(visible.sink, f"checkpoint {one.checkpoint}", decided, shown, unread)


def _differing(one: DecidedCheckpoint, rows: Mapping[str, int], visible: Visible) -> Iterator[Partial]:
    decided = sum(rows.values())
    if visible.by_batch is not None:
        there = {name: visible.by_batch[name] for name in rows}
        if there != dict(rows):
            yield Partial(visible.sink, f"checkpoint {one.checkpoint}", decided, sum(there.values()))
    elif visible.by_checkpoint is not None and visible.by_checkpoint[one.checkpoint] != decided:
        shown = visible.by_checkpoint[one.checkpoint]
        yield Partial(visible.sink, f"checkpoint {one.checkpoint}", decided, shown)


def _find_undecided(before: JobDecisions, after: JobDecisions, visible: Visible) -> list[Partial]:
    """Return what is visible without a decision."""
    # What is older than the oldest decision cannot be judged, nor what lies between the two looks, if all
    # that the first one saw was deleted before the second.
    known = {**before.checkpoints, **after.checkpoints}
    if not known:
        return []
    if visible.by_batch is not None:
        decided = {name for one in known.values() for name in one.batches}
        places = [
            [_place(n) for one in look.checkpoints.values() for n in one.batches] for look in (before, after)
        ]
        return [
            Partial(visible.sink, f"micro-batch {name}", 0, rows)
            for name, rows in sorted(visible.by_batch.items())
            if name not in decided and not after.is_dead_batch(name) and _is_judged(_place(name), *places)
        ]
    ids = [[(0, number) for number in look.checkpoints] for look in (before, after)]
    return [
        Partial(visible.sink, f"checkpoint {number}", 0, rows)
        for number, rows in sorted((visible.by_checkpoint or {}).items())
        if rows and number not in known and not after.may_be_dead(number) and _is_judged((0, number), *ids)
    ]


def _is_judged(place: _Order, before: list[_Order], after: list[_Order]) -> bool:
    """Return whether one of two looks, which saw these, would have seen a decision of `place`."""
    known = [*before, *after]
    if not known:
        return True
    return place > min(known) and not (before and after and max(before) < place < min(after))


def _place(text: str) -> _Order:
    name = BatchName.of(text)
    if name is None:
        raise CorruptObjectError(f"{text!r} names no micro-batch")
    return int(name.lineage), int(name.batch)
