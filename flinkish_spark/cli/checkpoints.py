"""`flinkish checkpoints`: list them, show one with all that took part in it, ask for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import click

from flinkish_spark.cli.client import (
    ExitStatus,
    Job,
    Patience,
    ask,
    checkpoint_argument,
    complain,
    end_with,
    job_argument,
    json_option,
    local_time,
    print_facts,
    print_json,
    print_line,
    print_table,
    report,
    timeout_option,
)
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.store import SealedObjects
from flinkish_spark.core.upstream_cut import upstream_cut
from flinkish_spark.job.requests import RequestKind
from flinkish_spark.protocol.decisions import Decision, Receipt, TriggerRecord, Verdict
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, Lineage
from flinkish_spark.protocol.lineage import LineageHistory, RetainedCheckpoint, why_not_rewindable
from flinkish_spark.protocol.statistics import (
    CheckpointDurations,
    CheckpointStatistics,
    CheckpointStatus,
    ParticipantStatistics,
    StatisticsHistory,
)
from flinkish_spark.protocol.time_plan import counts_of, late_of

# ----------------------------------------------------------------------------------------------------------
# What is known about a job's checkpoints: the statistics, and what lies in the job directory.
#
# The two are written by one process and read by another, at different times, so they may disagree. Where
# there is a decision it is right: statistics only measure. A checkpoint whose files were deleted since is
# known from the statistics alone.


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


# ----------------------------------------------------------------------------------------------------------
# Everything about one checkpoint: who took part, what it holds, what came of it.


def details_of(job: Job, view: CheckpointView) -> dict[str, Any]:
    """Return what `checkpoints show --json` says; see `docs/command-line.md`.

    Committables are counted and hooks are named: what is in them belongs to systems outside.
    """
    commit = None if view.stored is None else view.stored.commit
    why_not = view.why_not_rewindable or job.pins().why_not_restorable(view.checkpoint)
    participants = () if view.statistics is None else view.statistics.participants
    return {
        **view.to_json(),
        "can_be_rewound_to": not why_not,
        "why_not": why_not,
        "owner_epoch": None if view.decision is None else int(view.decision.owner_epoch),
        "participants": [_participant(one) for one in participants],
        "unlisted": None if view.statistics is None else view.statistics.unlisted,
        **({} if commit is None else _of_commit(commit)),
        **({} if view.receipt is None else _of_receipt(view)),
    }


def _participant(one: ParticipantStatistics) -> dict[str, Any]:
    """Return all fields: what was not measured is null, as everywhere on the command line."""
    return asdict(one) | {"kind": one.kind.value}


def _of_commit(commit: Decision) -> dict[str, Any]:
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
        "late_dropped": late_of(commit.batches),
        "counts": counts_of(commit.batches, commit.times),
    }


def _upstream(offsets_text: str) -> list[dict[str, Any]]:
    """Return the cuts of upstream jobs that the checkpoint is, by topic."""
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


def _of_receipt(view: CheckpointView) -> dict[str, Any]:
    receipt = view.receipt
    assert receipt is not None
    return {
        "answers": {sink: dict(Counter(answers)) for sink, answers in receipt.answers.items()},
        "group_offsets": {
            group: {topic: dict(partitions) for topic, partitions in topics.items()}
            for group, topics in receipt.group_offsets.items()
        },
    }


def print_details(view: CheckpointView, details: dict[str, Any]) -> None:
    """Print what :func:`details_of` returned, for people."""
    print_facts(_facts(view, details))
    for title, columns, rows in (
        ("participants", _PARTICIPANTS, _participant_rows(details)),
        ("channels", _CHANNELS, _channel_rows(details)),
        ("micro-batches", _BATCHES, _batch_rows(details)),
        ("sinks", ("sink", "committables", "answers"), _sink_rows(details)),
        ("upstream cuts", _UPSTREAM, _upstream_rows(details)),
        ("group offsets", ("group", "topic", "partition", "offset"), _offset_rows(details)),
    ):
        if rows:
            print_line()
            print_line(title)
            print_table(columns, rows)


_PARTICIPANTS = (
    *("uid", "kind", "acknowledged", "ack ms", "rows", "bytes", "sync ms", "commit ms", "barriers"),
    "late dropped",
)
_CHANNELS = ("uid", "channel", "barriers", "rows", "bytes", "align ms")
_UPSTREAM = ("topic", "job", "checkpoint", "start delay ms", "align ms", "ranges to replay")
_BATCHES = ("lineage", "batch", "owner", "attempt", "rows", "committables")


def _facts(view: CheckpointView, details: dict[str, Any]) -> list[tuple[str, object]]:
    durations = [
        f"{name.removesuffix('_ms')} {ms}" for name, ms in details["durations"].items() if ms is not None
    ]
    failure, late = details["failure"] or {}, details.get("late_dropped", {})
    return [
        ("checkpoint", details["id"]),
        ("purpose", details["purpose"]),
        ("status", details["status"]),
        ("reason", ", ".join(filter(None, (failure.get("reason"), failure.get("text"))))),
        ("triggered", local_time(view.triggered_at_ms)),
        ("decided", local_time(details["decided_at_ms"])),
        ("confirmed", local_time(details["confirmed_at_ms"])),
        ("durations, ms", ", ".join(durations)),
        ("rows", details["rows"]),
        ("bytes staged", details["bytes_staged"]),
        ("acknowledged", _acknowledged(details)),
        ("not listed", _unlisted(details)),
        ("owner epoch", details["owner_epoch"]),
        ("lineage", details["lineage"]),
        ("micro-batch", details["batch"]),
        ("left behind by lineage", details["superseded_by_lineage"]),
        ("can be gone back to", "yes" if details["can_be_rewound_to"] else f"no: {details['why_not']}"),
        ("hooks", ", ".join(details.get("hooks", ()))),
        ("late records dropped", ", ".join(f"{uid} {n}" for uid, n in late.items())),
        ("counted", _counted(details.get("counts", {}))),
        ("had finished", ", ".join(details.get("finished", ()))),
    ]


def _counted(counts: dict[str, dict[str, int]]) -> str:
    told = {uid: ", ".join(f"{name} {count}" for name, count in own.items()) for uid, own in counts.items()}
    return "; ".join(f"{uid}: {text}" for uid, text in told.items())


def _acknowledged(details: dict[str, Any]) -> str:
    asked = details["asked"]
    return "" if asked is None else f"{details['acknowledged']} of {asked}"


def _unlisted(details: dict[str, Any]) -> str:
    count = details["unlisted"]
    return f"{count} participants and channels" if count else ""


def _participant_rows(details: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            p["uid"],
            p["kind"],
            p["is_acknowledged"],
            p["ack_ms"],
            p["rows"],
            p["bytes"],
            p["sync_ms"],
            p["commit_ms"],
            p["barriers"],
            p["late_dropped"],
        )
        for p in details["participants"]
    ]


def _channel_rows(details: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (p["uid"], c["channel"], c["barriers"], c["rows"], c["bytes"], c["alignment_ms"])
        for p in details["participants"]
        for c in p["channels"]
    ]


def _batch_rows(details: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            b["lineage"],
            b["batch"],
            b["owner_epoch"],
            b["attempt"],
            sum(b["rows"].values()),
            sum(b["committables"].values()),
        )
        for b in details.get("batches", ())
    ]


def _sink_rows(details: dict[str, Any]) -> list[tuple[object, ...]]:
    staged, answers = details.get("committables", {}), details.get("answers", {})
    return [
        (sink, staged.get(sink, 0), ", ".join(f"{n} {name}" for name, n in answers.get(sink, {}).items()))
        for sink in sorted(staged.keys() | answers.keys())
    ]


def _upstream_rows(details: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            cut["topic"],
            cut["job_uuid"],
            cut["checkpoint"],
            cut["start_delay_ms"],
            cut["alignment_ms"],
            len(cut["channel_state"]),
        )
        for cut in details.get("upstream", ())
    ]


def _offset_rows(details: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (group, topic, partition, offset)
        for group, topics in details.get("group_offsets", {}).items()
        for topic, partitions in topics.items()
        for partition, offset in partitions.items()
    ]


# ----------------------------------------------------------------------------------------------------------
# `flinkish checkpoints`: list them, show one, ask for one.


_LIST = (
    "id",
    "purpose",
    "status",
    "triggered",
    "end to end ms",
    "trigger",
    "align",
    "sync",
    "async",
    "commit",
    "rows",
    "go back",
    "reason",
)
_SUMMARY = ("quantity", "count", "min", "avg", "p50", "p99", "max")


@click.group()
def checkpoints() -> None:
    """Look at the checkpoints of a job, or ask for one."""


@checkpoints.command("list")
@job_argument
@json_option
def list_checkpoints(job: Job, as_json: bool) -> None:
    """List the checkpoints of a job, oldest first, and sum them up.

    Works whether the job runs or not. Durations are milliseconds; "go back" says whether
    `flinkish rewind` can go back to it.
    """
    history = statistics_of(job)
    views = checkpoint_views(job, history)
    if as_json:
        listed = [view.to_json() for view in views]
        print_json({**job.to_json(), "checkpoints": listed, **_summary_json(history)})
        return
    if not views:
        print_line(f"the job '{job.name}' has no checkpoints")
        return
    print_table(_LIST, [_row(view) for view in views])
    if history is not None:
        print_line()
        print_line(_counts(history))
        summary = history.summary()
        if summary:
            print_line()
            print_table(
                _SUMMARY,
                [
                    (q.value, s.count, s.minimum, round(s.average, 1), s.p50, s.p99, s.maximum)
                    for q, s in summary.items()
                ],
            )


@checkpoints.command("show")
@job_argument
@checkpoint_argument
@json_option
def show_checkpoint(job: Job, checkpoint: int, as_json: bool) -> None:
    """Show all that is known about one checkpoint."""
    views = checkpoint_views(job, statistics_of(job))
    view = next((one for one in views if one.checkpoint == CheckpointId(checkpoint)), None)
    if view is None:
        known = f"known are {views[0].checkpoint} to {views[-1].checkpoint}" if views else "it has none"
        complain(f"nothing is known of checkpoint {checkpoint} of the job '{job.name}': {known}")
        end_with(ExitStatus.NOT_DONE)
    details = details_of(job, view)
    if as_json:
        print_json({**job.to_json(), **details})
    else:
        print_details(view, details)


@checkpoints.command("trigger")
@job_argument
@timeout_option
@json_option
def trigger_checkpoint(job: Job, timeout_s: float, as_json: bool) -> None:
    """Ask a running job for a checkpoint now, and wait until it is confirmed."""
    reply = ask(job, RequestKind.CHECKPOINT, Patience.of_seconds(timeout_s))
    report(reply, job.to_json(), lambda r: f"checkpoint {r.checkpoint} is confirmed", as_json)


def _row(view: CheckpointView) -> tuple[object, ...]:
    d = view.durations
    phases = (d.end_to_end_ms, d.trigger_ms, d.alignment_ms, d.sync_ms, d.async_ms, d.commit_ms)
    return (
        int(view.checkpoint),
        view.purpose.value,
        view.status.value,
        local_time(view.triggered_at_ms),
        *phases,
        view.rows,
        not view.why_not_rewindable,
        _reason(view),
    )


def _reason(view: CheckpointView) -> str:
    """Return what is special about a checkpoint."""
    if view.superseded_by is not None:
        return f"left behind by the rewind that began lineage {view.superseded_by}"
    if view.failure is None:
        return ""
    reason, text = view.failure
    return ", ".join(filter(None, ("" if reason is None else reason.value, text)))


def _counts(history: StatisticsHistory) -> str:
    counts = history.counts
    text = (
        f"{counts.triggered} triggered: {counts.completed} completed, {counts.failed} failed, "
        f"{counts.in_progress} in progress; {counts.refused} refused; {counts.restored} restored"
    )
    restored = history.newest_restored
    if restored is None:
        return text
    place = f" from {restored.path}" if restored.path else ""
    return f"{text}, last checkpoint {restored.checkpoint}{place} at {local_time(restored.restored_at_ms)}"


def _summary_json(history: StatisticsHistory | None) -> dict[str, Any]:
    if history is None:
        return {"counts": None, "newest_restored": None, "summary": {}}
    restored = history.newest_restored
    return {
        "counts": {**history.counts.to_json(), "in_progress": history.counts.in_progress},
        "newest_restored": None if restored is None else restored.to_json(),
        "summary": {
            quantity.value: {
                "count": s.count,
                "min": s.minimum,
                "avg": s.average,
                "p50": s.p50,
                "p99": s.p99,
                "max": s.maximum,
            }
            for quantity, s in history.summary().items()
        },
    }
