"""A job as its directory describes it, running or not, read by any process: its identity and checkpoints.

Statistics and decisions are written at different times, so another process may see them disagree. A decision,
if there is one, is right: statistics only measure. A checkpoint whose files are deleted is known from the
statistics alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flinkish_spark.core.clock import Clock, SystemClock
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.job_dir import BY_MICRO_BATCH, JOB_KEY, JobDir, open_job_dir
from flinkish_spark.core.store import SealedObjects
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.upstream_cut import upstream_cut
from flinkish_spark.protocol.decisions import Decision, Receipt, TriggerRecord, Verdict
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, JobUuid, Lineage, check_name
from flinkish_spark.protocol.lineage import RetainedCheckpoint, why_not_rewindable
from flinkish_spark.protocol.statistics import (
    CheckpointDurations,
    CheckpointStatistics,
    CheckpointStatus,
    StatisticsHistory,
)
from flinkish_spark.protocol.time_plan import sum_counts, sum_late_records

if TYPE_CHECKING:
    from flinkish_spark.checkpoint.pins import CheckpointPins


#: Exceptions of decoding a stored value with a structure that no job writes.
WRONG_SHAPE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@contextmanager
def raise_as_corrupt(what: str) -> Iterator[None]:
    """Raise CorruptObjectError if decoding `what` fails because of its structure."""
    try:
        yield
    except WRONG_SHAPE as error:
        raise CorruptObjectError(
            f"{what} is damaged",
            why=f"{type(error).__name__}: {error}",
            what_to_do="restore the file from a backup",
        ) from error


@dataclass(frozen=True, slots=True)
class StoredJob:
    place: StoreSpec
    job_dir: JobDir
    name: str
    uuid: JobUuid
    clock: Clock

    @classmethod
    def read(cls, place: StoreSpec) -> StoredJob:
        job_dir = open_job_dir(place)
        with raise_as_corrupt(f"{JOB_KEY} in the job directory"):
            settings = job_dir.find_settings() or {}
            name = check_name(settings["job"], "job name")
            return cls(place, job_dir, name, JobUuid(settings["uuid"]), SystemClock())

    @property
    def is_plain_query(self) -> bool:
        return bool((self.job_dir.find_settings() or {}).get(BY_MICRO_BATCH))

    def pins(self) -> CheckpointPins:
        """Return the pins of checkpoints, for reading only."""
        # Imported here since it imports Arrow, which most commands do not need.
        from flinkish_spark.checkpoint.retention import pins_of
        from flinkish_spark.checkpoint.spark_log import log_of

        log = log_of(self.job_dir.store, self.place, self.job_dir.newest_owner())
        return pins_of(log, self.place, self.clock)

    def to_json(self) -> dict[str, Any]:
        return {"job_dir": self.place.url, "job": self.name, "job_uuid": str(self.uuid)}


@dataclass(frozen=True, slots=True)
class CheckpointView:
    checkpoint: CheckpointId
    #: None each if the job directory does not have it, or no longer.
    trigger: TriggerRecord | None
    decision: Decision | None
    receipt: Receipt | None
    #: None if the statistics do not have the checkpoint.
    statistics: CheckpointStatistics | None
    #: The lineage whose rewind made the checkpoint dead; None for a live one.
    superseded_by: Lineage | None
    #: Why the job cannot rewind to it; empty if it can, as far as is known without a check of every state
    #: file.
    why_not_rewindable: str

    @property
    def commit(self) -> Decision | None:
        is_commit = self.decision is not None and self.decision.verdict is Verdict.COMMIT
        return self.decision if is_commit else None

    @property
    def status(self) -> CheckpointStatus:
        if self.decision is None:
            return CheckpointStatus.IN_PROGRESS if self.statistics is None else self.statistics.status
        if self.decision.verdict is Verdict.ABORT:
            return CheckpointStatus.FAILED
        is_confirmed = self.receipt is not None
        return CheckpointStatus.COMPLETED if is_confirmed else CheckpointStatus.IN_PROGRESS

    @property
    def purpose(self) -> CheckpointPurpose:
        known = (self.statistics, self.trigger, self.decision)
        # One of the two exists, or the checkpoint would not be known.
        return next(one.purpose for one in known if one is not None)

    @property
    def triggered_at_ms(self) -> int | None:
        if self.statistics is not None:
            return self.statistics.trigger_at_ms
        if self.trigger is not None:
            return self.trigger.triggered_at_ms
        return None if self.decision is None else self.decision.triggered_at_ms or None

    @property
    def rows(self) -> int | None:
        if self.statistics is not None and self.statistics.status is CheckpointStatus.COMPLETED:
            return self.statistics.rows
        if self.decision is None or self.decision.verdict is Verdict.ABORT:
            return None
        return sum(ack.rows for batch in self.decision.batches for ack in batch.acks)

    @property
    def durations(self) -> CheckpointDurations:
        return CheckpointDurations() if self.statistics is None else self.statistics.durations

    @property
    def failure(self) -> tuple[CheckpointFailureReason | None, str] | None:
        """Reason and message of the failure; None if it did not fail."""
        if self.status is not CheckpointStatus.FAILED:
            return None
        if self.statistics is not None and self.statistics.failure is not None:
            return self.statistics.failure.reason, self.statistics.failure.text
        text = "" if self.decision is None else self.decision.reason
        name, _, rest = text.partition(": ")
        known = CheckpointFailureReason.__members__.get(name)
        return (None, text) if known is None else (known, rest)

    def to_json(self) -> dict[str, Any]:
        """Return the value that `--json` prints; see `docs/command-line.md`."""
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


def list_checkpoint_ids(job: StoredJob, history: StatisticsHistory | None) -> tuple[CheckpointId, ...]:
    known = () if history is None else history.known
    return tuple(sorted({*job.job_dir.list_checkpoint_ids(), *known}))


def checkpoint_views(
    job: StoredJob, history: StatisticsHistory | None, wanted: Collection[CheckpointId] | None = None
) -> tuple[CheckpointView, ...]:
    """Return the known ones of the wanted checkpoints, by rising id; all known ones for None."""
    job_dir, objects = job.job_dir, SealedObjects(job.job_dir.store, "the job directory")
    listed = job_dir.list_checkpoint_ids()
    stored: dict[CheckpointId, tuple[TriggerRecord | None, Decision | None, Receipt | None]] = {}
    unread = set[CheckpointId]()
    for checkpoint in listed:
        if wanted is not None and checkpoint not in wanted:
            unread.add(checkpoint)
            continue
        key = f"checkpoints/{checkpoint}/trigger.json"
        trigger = objects.optional(key, "trigger", TriggerRecord.from_json)
        found = trigger, job_dir.decision(checkpoint), job_dir.receipt(checkpoint)
        # The job deletes trigger, decision and receipt in this order, perhaps at this moment.
        if trigger is not None or found[1] is not None:
            stored[checkpoint] = found
    measured = {} if history is None else history.known
    if wanted is not None:
        measured = {checkpoint: one for checkpoint, one in measured.items() if checkpoint in wanted}
    lineages, pinned = job_dir.history(), job.pins().list_pinned()
    commits = {
        checkpoint: RetainedCheckpoint(
            checkpoint, decision.lineage, receipt is not None, checkpoint in pinned
        )
        for checkpoint, (_, decision, receipt) in stored.items()
        if decision is not None and decision.verdict is Verdict.COMMIT
    }
    known = stored.keys() | unread
    views = []
    for checkpoint in sorted(stored.keys() | measured.keys()):
        commit = commits.get(checkpoint)
        rewind = None if commit is None else lineages.find_superseding(checkpoint, commit.lineage)
        superseded_by = None if rewind is None else rewind.lineage
        why_not = why_not_rewindable(checkpoint, known, tuple(commits.values()), lineages)
        parts = stored.get(checkpoint, (None, None, None))
        views.append(CheckpointView(checkpoint, *parts, measured.get(checkpoint), superseded_by, why_not))
    return tuple(views)


def counts_json(history: StatisticsHistory) -> dict[str, int]:
    return {**history.counts.to_json(), "in_progress": history.counts.in_progress}


def summary_json(history: StatisticsHistory, digits: int | None = None) -> dict[str, dict[str, float]]:
    return {quantity.value: one.to_json(digits) for quantity, one in history.summary().items()}


def details_of(job: StoredJob, view: CheckpointView) -> dict[str, Any]:
    """Return the value that `checkpoints show --json` prints; see `docs/command-line.md`."""
    # Committables are only counted and hooks only named: their contents belong to external systems.
    commit, receipt = view.commit, view.receipt
    why_not = view.why_not_rewindable or job.pins().why_not_restorable(view.checkpoint)
    participants = () if view.statistics is None else view.statistics.participants
    return {
        **view.to_json(),
        "can_be_rewound_to": not why_not,
        "why_not": why_not,
        "owner_epoch": None if view.decision is None else int(view.decision.owner_epoch),
        # A value that was not measured is null, as everywhere on the command line.
        "participants": [asdict(one) | {"kind": one.kind.value} for one in participants],
        "unlisted": None if view.statistics is None else view.statistics.unlisted,
        **({} if commit is None else _commit_to_json(commit)),
        **({} if receipt is None else _receipt_to_json(receipt)),
    }


def _commit_to_json(commit: Decision) -> dict[str, Any]:
    staged = Counter(c.sink for batch in commit.batches for c in batch.committables)
    return {
        "batches": [
            {
                "lineage": int(batch.lineage),
                "batch": int(batch.batch),
                "owner_epoch": int(batch.owner_epoch),
                "attempt": batch.attempt,
                "rows": {ack.sink: ack.rows for ack in batch.acks},
                "committables": dict(Counter(c.sink for c in batch.committables)),
            }
            for batch in commit.batches
        ],
        "committables": dict(staged),
        "upstream": _upstream(commit.offsets_text),
        "hooks": sorted(commit.hook_states),
        "uids": list(commit.uids),
        "finished": list(commit.finished),
        "late_dropped": sum_late_records(commit.batches),
        "counts": sum_counts(commit.batches, commit.times),
    }


def _upstream(offsets_text: str) -> list[dict[str, Any]]:
    return [
        {
            "topic": topic,
            "job_uuid": str(cut.job),
            "checkpoint": int(cut.checkpoint),
            "start_delay_ms": cut.start_delay_ms,
            "alignment_ms": cut.alignment_ms,
            "channel_state": [
                {"topic": name, "partition": partition, "start": start, "end": end}
                for (name, partition), (start, end) in sorted(cut.channel_state.items())
            ],
        }
        for topic, cut in sorted(upstream_cut(offsets_text).items())
    ]


def _receipt_to_json(receipt: Receipt) -> dict[str, Any]:
    return {
        "answers": {sink: dict(Counter(answers)) for sink, answers in receipt.answers.items()},
        "group_offsets": {
            group: {topic: dict(partitions) for topic, partitions in topics.items()}
            for group, topics in receipt.group_offsets.items()
        },
    }
