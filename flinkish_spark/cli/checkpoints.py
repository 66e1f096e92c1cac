"""`flinkish checkpoints`: list checkpoints, show one with its participants, trigger one."""

from __future__ import annotations

from typing import Any

import click

from flinkish_spark.cli.client import (
    ExitStatus,
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
from flinkish_spark.job.asking import (
    RequestTimeouts,
    ask,
)
from flinkish_spark.job.requests import RequestKind
from flinkish_spark.job.stored_job import (
    CheckpointView,
    StoredJob,
    checkpoint_views,
    details_of,
)
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.statistics import StatisticsHistory


def statistics_of(job: StoredJob) -> StatisticsHistory | None:
    """Return the stored statistics; None if there are none, or with a warning if they are damaged."""
    try:
        return job.job_dir.statistics()
    except CorruptObjectError as error:
        complain(f"going on without statistics: {error}")
        return None


def print_details(view: CheckpointView, details: dict[str, Any]) -> None:
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
        ("acknowledged", _format_acknowledged(details)),
        ("not listed", _format_unlisted(details)),
        ("owner epoch", details["owner_epoch"]),
        ("lineage", details["lineage"]),
        ("micro-batch", details["batch"]),
        ("left behind by lineage", details["superseded_by_lineage"]),
        ("can be gone back to", "yes" if details["can_be_rewound_to"] else f"no: {details['why_not']}"),
        ("hooks", ", ".join(details.get("hooks", ()))),
        ("late records dropped", ", ".join(f"{uid} {n}" for uid, n in late.items())),
        ("counted", _format_counts(details.get("counts", {}))),
        ("had finished", ", ".join(details.get("finished", ()))),
    ]


def _format_counts(counts: dict[str, dict[str, int]]) -> str:
    told = {uid: ", ".join(f"{name} {count}" for name, count in own.items()) for uid, own in counts.items()}
    return "; ".join(f"{uid}: {text}" for uid, text in told.items())


def _format_acknowledged(details: dict[str, Any]) -> str:
    asked = details["asked"]
    return "" if asked is None else f"{details['acknowledged']} of {asked}"


def _format_unlisted(details: dict[str, Any]) -> str:
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
    """Show the checkpoints of a job, or trigger one."""


@checkpoints.command("list")
@job_argument
@json_option
def list_checkpoints(job: StoredJob, as_json: bool) -> None:
    """List the checkpoints of a job, oldest first, with a summary.

    The job may run or not. Durations are in milliseconds; "go back" tells whether `flinkish rewind` can go
    back to the checkpoint.
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
def show_checkpoint(job: StoredJob, checkpoint: int, as_json: bool) -> None:
    """Show the details of one checkpoint."""
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
def trigger_checkpoint(job: StoredJob, timeout_s: float, as_json: bool) -> None:
    reply = ask(job, RequestKind.CHECKPOINT, RequestTimeouts.from_seconds(timeout_s))
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
    """Return the remark on a checkpoint."""
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
