"""`flinkish checkpoints`: list them, show one, ask for one."""

from __future__ import annotations

from typing import Any

import click

from flinkish_spark.cli.asking import Patience, ask
from flinkish_spark.cli.checkpoint_details import details_of, print_details
from flinkish_spark.cli.checkpoint_views import CheckpointView, checkpoint_views, statistics_of
from flinkish_spark.cli.exits import ExitStatus, complain, end_with
from flinkish_spark.cli.params import Job, checkpoint_argument, job_argument, json_option, timeout_option
from flinkish_spark.cli.replies import print_json, report
from flinkish_spark.cli.tables import local_time, print_line, print_table
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.statistics_history import StatisticsHistory
from flinkish_spark.runtime.outside_requests import RequestKind

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
