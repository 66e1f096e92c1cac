"""What is known about a job's checkpoints: the statistics, and what lies in the job directory.

The two are written by one process and read by another, at different times, so they may disagree.
Where there is a decision it is right: statistics only measure. A checkpoint whose files were
deleted since is known from the statistics alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flinkish_spark.cli.exits import complain
from flinkish_spark.cli.params import Job
from flinkish_spark.errors import CorruptObjectError
from flinkish_spark.protocol.decisions import Decision, Receipt, TriggerRecord, Verdict
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.lineage import LineageHistory, RetainedCheckpoint, why_not_rewindable
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.protocol.statistics import CheckpointDurations, CheckpointStatistics, CheckpointStatus
from flinkish_spark.protocol.statistics_history import StatisticsHistory
from flinkish_spark.sealed_objects import SealedObjects


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """What the job directory holds of one id."""

    checkpoint: CheckpointId
    trigger: TriggerRecord | None
    decision: Decision | None
    receipt: Receipt | None

    @property
    def commit(self) -> Decision | None:
        """Return the decision if it is COMMIT."""
        is_commit = self.decision is not None and self.decision.verdict is Verdict.COMMIT
        return self.decision if is_commit else None


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """One checkpoint, from both.

    Parameters
    ----------
    stored
        None if nothing of it is in the job directory any more.
    statistics
        None if they do not know it.
    superseded_by
        The lineage whose rewind left it behind; None for a live one.
    why_not_rewindable
        Why the job cannot go back to it; empty if it can, as far as can be seen without looking at
        every state file.
    """

    checkpoint: CheckpointId
    stored: StoredCheckpoint | None
    statistics: CheckpointStatistics | None
    superseded_by: Lineage | None
    why_not_rewindable: str

    @property
    def decision(self) -> Decision | None:
        """Return what was decided, if that is still there."""
        return None if self.stored is None else self.stored.decision

    @property
    def commit(self) -> Decision | None:
        """Return the decision if it is still there and COMMIT."""
        return None if self.stored is None else self.stored.commit

    @property
    def receipt(self) -> Receipt | None:
        """Return the receipt, if it is still there."""
        return None if self.stored is None else self.stored.receipt

    @property
    def status(self) -> CheckpointStatus:
        """What has become of it."""
        if self.decision is None:
            return CheckpointStatus.IN_PROGRESS if self.statistics is None else self.statistics.status
        if self.decision.verdict is Verdict.ABORT:
            return CheckpointStatus.FAILED
        is_confirmed = self.receipt is not None
        return CheckpointStatus.COMPLETED if is_confirmed else CheckpointStatus.IN_PROGRESS

    @property
    def purpose(self) -> CheckpointPurpose:
        """What it was taken for."""
        trigger = None if self.stored is None else self.stored.trigger
        known = (self.statistics, trigger, self.decision)
        # One of them is there, or nobody would know of the checkpoint.
        return next(one.purpose for one in known if one is not None)

    @property
    def triggered_at_ms(self) -> int | None:
        """Wall-clock time of its trigger; None where nobody wrote it down."""
        trigger = None if self.stored is None else self.stored.trigger
        if self.statistics is not None:
            return self.statistics.trigger_at_ms
        if trigger is not None:
            return trigger.triggered_at_ms
        return None if self.decision is None else self.decision.triggered_at_ms or None

    @property
    def rows(self) -> int | None:
        """Rows that all sinks staged for it; None where it is not known."""
        if self.statistics is not None and self.statistics.status is CheckpointStatus.COMPLETED:
            return self.statistics.rows
        if self.decision is None or self.decision.verdict is Verdict.ABORT:
            return None
        return sum(ack.rows for batch in self.decision.batches for ack in batch.acks)

    @property
    def durations(self) -> CheckpointDurations:
        """How long its phases took, as far as it was measured."""
        return CheckpointDurations() if self.statistics is None else self.statistics.durations

    @property
    def failure(self) -> tuple[CheckpointFailureReason | None, str] | None:
        """Why it failed, for programs and for people; None if it did not."""
        if self.status is not CheckpointStatus.FAILED:
            return None
        if self.statistics is not None and self.statistics.failure is not None:
            return self.statistics.failure.reason, self.statistics.failure.text
        text = "" if self.decision is None else self.decision.reason
        name, _, rest = text.partition(": ")
        known = CheckpointFailureReason.__members__.get(name)
        return (None, text) if known is None else (known, rest)

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` says; see `docs/command-line.md`."""
        decision, receipt, commit = self.decision, self.receipt, self.commit
        reason, text = self.failure or (None, "")
        return {
            "id": int(self.checkpoint),
            "purpose": self.purpose.value,
            "status": self.status.value,
            "triggered_at_ms": self.triggered_at_ms,
            "decided_at_ms": None if decision is None else decision.decided_at_ms,
            "confirmed_at_ms": None if receipt is None else receipt.confirmed_at_ms,
            "durations": self.durations.to_json(),
            "rows": self.rows,
            "bytes_staged": None if self.statistics is None else self.statistics.bytes_staged,
            "asked": None if self.statistics is None else self.statistics.asked,
            "acknowledged": None if self.statistics is None else self.statistics.acknowledged,
            "failure": None
            if self.failure is None
            else {"reason": None if reason is None else reason.value, "text": text},
            "is_retained": commit is not None,
            "lineage": None if commit is None else int(commit.lineage),
            "batch": None if commit is None else int(commit.batch),
            "superseded_by_lineage": None if self.superseded_by is None else int(self.superseded_by),
            "can_be_rewound_to": not self.why_not_rewindable,
            "why_not": self.why_not_rewindable,
        }


def stored_checkpoints(job: Job) -> tuple[StoredCheckpoint, ...]:
    """Return what the job directory holds, by rising id.

    Raises
    ------
    CorruptObjectError
        An object cannot be trusted.
    """
    objects = SealedObjects(job.job_dir.store, "the job directory")
    found = []
    for checkpoint in job.job_dir.decided_ids():
        key = f"checkpoints/{checkpoint}/trigger.json"
        stored = StoredCheckpoint(
            checkpoint,
            objects.optional(key, "trigger", TriggerRecord.from_json),
            job.job_dir.decision(checkpoint),
            job.job_dir.receipt(checkpoint),
        )
        # The job deletes trigger, decision and receipt in this order, maybe at this moment.
        if stored.trigger is not None or stored.decision is not None:
            found.append(stored)
    return tuple(found)


def statistics_of(job: Job) -> StatisticsHistory | None:
    """Return the stored statistics; None if there are none, or with a warning if they are damaged."""
    try:
        return job.job_dir.statistics()
    except CorruptObjectError as error:
        complain(f"going on without statistics: {error}")
        return None


def checkpoint_views(job: Job, history: StatisticsHistory | None) -> tuple[CheckpointView, ...]:
    """Return every checkpoint that is known, by rising id.

    Raises
    ------
    CorruptObjectError
        An object cannot be trusted.
    """
    stored = {one.checkpoint: one for one in stored_checkpoints(job)}
    measured = {one.checkpoint: one for one in _all_of(history)}
    lineages = job.job_dir.history()
    commits = _retained(job, stored.values())
    return tuple(
        CheckpointView(
            checkpoint,
            stored.get(checkpoint),
            measured.get(checkpoint),
            _superseded_by(stored.get(checkpoint), lineages),
            why_not_rewindable(checkpoint, stored, commits, lineages),
        )
        for checkpoint in sorted(stored.keys() | measured.keys())
    )


def _all_of(history: StatisticsHistory | None) -> Iterable[CheckpointStatistics]:
    if history is None:
        return ()
    newest = (history.newest_completed, history.newest_failed, history.newest_savepoint)
    # The entries come last: they have the details.
    return (*(one for one in newest if one is not None), *history.entries)


def _retained(job: Job, stored: Iterable[StoredCheckpoint]) -> tuple[RetainedCheckpoint, ...]:
    pinned = job.pins().pinned()
    return tuple(
        RetainedCheckpoint(
            one.checkpoint, one.commit.lineage, one.receipt is not None, one.checkpoint in pinned
        )
        for one in stored
        if one.commit is not None
    )


def _superseded_by(stored: StoredCheckpoint | None, lineages: LineageHistory) -> Lineage | None:
    if stored is None or stored.commit is None:
        return None
    rewind = lineages.superseded_by(stored.checkpoint, stored.commit.lineage)
    return None if rewind is None else rewind.lineage
