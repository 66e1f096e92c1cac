"""`flinkish checkpoints`: list checkpoints, show one with its participants, trigger one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from flinkish_spark.job.asking import RequestTimeouts, ask
from flinkish_spark.job.requests import RequestKind
from flinkish_spark.job.stored_job import (
    CheckpointView,
    StoredJob,
    checkpoint_views,
    counts_json,
    details_of,
    summary_json,
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
    participants = details["participants"]
    channels = [{**one, **channel} for one in participants for channel in one["channels"]]
    batches = [
        {**one, "rows": sum(one["rows"].values()), "committables": sum(one["committables"].values())}
        for one in details.get("batches", ())
    ]
    upstream = [{**cut, "ranges": len(cut["channel_state"])} for cut in details.get("upstream", ())]
    for title, columns, rows in (
        ("participants", tuple(_PARTICIPANTS), _select(_PARTICIPANTS, participants)),
        ("channels", tuple(_CHANNELS), _select(_CHANNELS, channels)),
        ("micro-batches", tuple(_BATCHES), _select(_BATCHES, batches)),
        ("sinks", ("sink", "committables", "answers"), _sink_rows(details)),
        ("upstream cuts", tuple(_UPSTREAM), _select(_UPSTREAM, upstream)),
        ("group offsets", ("group", "topic", "partition", "offset"), _offset_rows(details)),
    ):
        if rows:
            print_line()
            print_line(title)
            print_table(columns, rows)


#: Members of the JSON document by the headings of their columns.
_PARTICIPANTS = {
    **{"uid": "uid", "kind": "kind", "acknowledged": "is_acknowledged", "ack ms": "ack_ms", "rows": "rows"},
    **{"bytes": "bytes", "sync ms": "sync_ms", "commit ms": "commit_ms", "barriers": "barriers"},
    "late dropped": "late_dropped",
}
_CHANNELS = {
    **{"uid": "uid", "channel": "channel", "barriers": "barriers", "rows": "rows", "bytes": "bytes"},
    "align ms": "alignment_ms",
}
_BATCHES = {
    **{"lineage": "lineage", "batch": "batch", "owner": "owner_epoch", "attempt": "attempt"},
    **{"rows": "rows", "committables": "committables"},
}
_UPSTREAM = {
    **{"topic": "topic", "job": "job_uuid", "checkpoint": "checkpoint", "start delay ms": "start_delay_ms"},
    **{"align ms": "alignment_ms", "ranges to replay": "ranges"},
}


def _select(columns: Mapping[str, str], rows: Iterable[Mapping[str, object]]) -> list[list[object]]:
    return [[row[name] for name in columns.values()] for row in rows]


def _facts(view: CheckpointView, details: dict[str, Any]) -> list[tuple[str, object]]:
    durations = [
        f"{name.removesuffix('_ms')} {ms}" for name, ms in details["durations"].items() if ms is not None
    ]
    failure, late = details["failure"] or {}, details.get("late_dropped", {})
    asked, unlisted = details["asked"], details["unlisted"]
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
        ("acknowledged", "" if asked is None else f"{details['acknowledged']} of {asked}"),
        ("not listed", f"{unlisted} participants and channels" if unlisted else ""),
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


def _sink_rows(details: dict[str, Any]) -> list[list[object]]:
    staged, answers = details.get("committables", {}), details.get("answers", {})
    return [
        [sink, staged.get(sink, 0), ", ".join(f"{n} {name}" for name, n in answers.get(sink, {}).items())]
        for sink in sorted(staged.keys() | answers.keys())
    ]


def _offset_rows(details: dict[str, Any]) -> list[list[object]]:
    return [
        [group, topic, partition, offset]
        for group, topics in details.get("group_offsets", {}).items()
        for topic, partitions in topics.items()
        for partition, offset in partitions.items()
    ]


_LIST = (
    *("id", "purpose", "status", "triggered", "end to end ms", "trigger", "align", "sync", "async", "commit"),
    *("rows", "go back", "reason"),
)


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
        summary = summary_json(history)
        if summary:
            print_line()
            columns = ("quantity", *next(iter(summary.values())))
            print_table(columns, [(name, *one.values()) for name, one in summary.items()])


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
        "counts": counts_json(history),
        "newest_restored": None if restored is None else restored.to_json(),
        "summary": summary_json(history),
    }
