"""Compares the decision for each checkpoint and sink with what the outputs show.

Reads decisions and receipts before the outputs, and once more afterwards: a checkpoint confirmed at the first
look must be complete, and visible data must be decided at the second look.
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

#: Longer numbers are not ours, and very long ones fail in Python.
_BATCH_NAME = re.compile(r"([0-9]{1,18})/([0-9]{1,18})")
#: Lineage and micro-batch; for checkpoints 0 and the id.
_Order = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BatchName:
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
    #: Numbers of rows by micro-batch and sink.
    rows: Mapping[str, Mapping[str, int]]
    #: The position up to which it has read.
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
    checkpoints: Mapping[int, DecidedCheckpoint]
    #: The newest live confirmed decision; None before the first.
    newest: Decision | None
    history: LineageHistory

    @classmethod
    def read(cls, job_dir: JobDir) -> JobDecisions:
        """Read the decisions; one that is deleted meanwhile is skipped."""
        found, newest = {}, None
        history = job_dir.history()
        for checkpoint, decision in _commits(job_dir):
            is_confirmed = job_dir.receipt(checkpoint) is not None
            found[int(checkpoint)] = DecidedCheckpoint.of(decision, is_confirmed=is_confirmed)
            if is_confirmed and history.find_superseding(checkpoint, decision.lineage) is None:
                newest = decision
        return cls(found, newest, history)

    def is_dead(self, one: DecidedCheckpoint) -> bool:
        return self.history.find_superseding(CheckpointId(one.checkpoint), one.lineage) is not None

    def may_be_dead(self, checkpoint: int) -> bool:
        """Return True if a checkpoint without decision may be one that a rewind made dead."""
        if checkpoint in self.checkpoints:
            return False
        # Decisions of dead checkpoints are deleted first. Between the rewind's target and the first known id
        # of a later lineage there may be live ones, too, if those are deleted by now.
        for rewind in self.history.rewinds:
            if rewind.kind is RewindKind.TO_CHECKPOINT and rewind.target is not None:
                later = (n for n, one in self.checkpoints.items() if one.lineage >= rewind.lineage)
                if int(rewind.target) < checkpoint < min(later, default=checkpoint + 1):
                    return True
        return False

    def is_dead_batch(self, text: str) -> bool:
        """Return True if a micro-batch belongs to a checkpoint that a rewind made dead."""
        name = BatchName.of(text)
        if name is None:
            return False
        # This excludes undecided micro-batches, which must not be visible at all.
        for rewind in self.history.rewinds:
            if rewind.lineage > name.lineage:
                if name.batch >= rewind.first_removed:
                    return rewind.kind is RewindKind.TO_CHECKPOINT
                if rewind.kind is RewindKind.RESEED:
                    # Later lineages count micro-batches from another beginning.
                    return False
        return False

    def check_sink(self, uid: str) -> None:
        """Raise UserError unless some checkpoint has acknowledged rows of a sink, even none."""
        known = {sink for one in self.checkpoints.values() for sink in one.rows}
        if uid not in known:
            raise UserError(
                f"the job's checkpoints have no sink '{uid}'",
                what_to_do=f"choose from {', '.join(sorted(known)) or 'none: nothing is decided yet'}",
            )


def _commits(job_dir: JobDir) -> Iterator[tuple[CheckpointId, Decision]]:
    for checkpoint in job_dir.list_checkpoint_ids():
        decision = job_dir.decision(checkpoint)
        if decision is not None and decision.verdict is Verdict.COMMIT:
            yield checkpoint, decision


@dataclass(frozen=True, slots=True)
class Partial:
    """A checkpoint, or a micro-batch without one, whose rows in an output are wrong."""

    sink: str
    what: str
    #: 0 for undecided ones.
    decided_rows: int
    visible_rows: int
    #: A visible input record that the checkpoint had not read; then the numbers of rows may be right.
    unread: str = ""

    def __str__(self) -> str:
        if self.unread:
            return f"'{self.sink}' shows in {self.what} a row of {self.unread}, which it had not read"
        return f"'{self.sink}' shows {self.visible_rows} rows of {self.what}, decided are {self.decided_rows}"


@dataclass(frozen=True, slots=True)
class Visible:
    """Numbers of visible rows of an output, by micro-batch or by checkpoint; the other one is None."""

    sink: str
    by_batch: Counter[str] | None = None
    by_checkpoint: Counter[int] | None = None
    #: The last input record that it names, by micro-batch (or checkpoint, as text) and partition.
    newest: Mapping[tuple[str, Place], int] = field(default_factory=dict)


def partial_checkpoints(before: JobDecisions, visible: Visible, after: JobDecisions) -> list[Partial]:
    """Return the checkpoints and micro-batches that an output shows incompletely, twice, or undecided."""
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
    """Yield checkpoints with visible input that they had not read, which comes from a later one."""
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
    """Return visible rows without a decision."""
    # Data older than the oldest decision cannot be judged, nor data between the two looks if all decisions of
    # the first one are deleted before the second.
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
    """Return True if one of the two looks would have seen a decision of `place`."""
    known = [*before, *after]
    if not known:
        return True
    return place > min(known) and not (before and after and max(before) < place < min(after))


def _place(text: str) -> _Order:
    name = BatchName.of(text)
    if name is None:
        raise CorruptObjectError(f"{text!r} names no micro-batch")
    return int(name.lineage), int(name.batch)
