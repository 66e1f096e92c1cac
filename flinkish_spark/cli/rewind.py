"""`flinkish rewind` and `flinkish timeline`: go back to a checkpoint, or accept an external timeline.

The rewind order is an object in the job directory, and the next start of the query carries it out. A running
job gets a request, so that it restarts its query. The outcome is read from the job directory and not from the
answer: the process that takes the request may end before it has carried out the order.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import click

from flinkish_spark.cli.client import (
    UNKNOWN,
    ExitStatus,
    checkpoint_argument,
    complain,
    confirm,
    end_with,
    job_argument,
    json_option,
    local_time,
    print_json,
    refuse_plain_query,
    say,
    timeout_option,
    yes_option,
)
from flinkish_spark.core.store import CreateResult
from flinkish_spark.job.asking import RequestTimeouts, describe, follow_rewind
from flinkish_spark.job.requests import ReplyKind
from flinkish_spark.job.rewind import RewindStatus, find_rewind_status
from flinkish_spark.job.stored_job import CheckpointView, StoredJob, checkpoint_views
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.lineage import RewindOrder, Tables
from flinkish_spark.protocol.statistics import CheckpointStatus

#: A running query takes the request within half a second; a starting one finds the order itself.
_TAKEN_WITHIN_MS = 5_000
#: Number of checkpoints that are listed one by one.
_MOST_NAMED = 5


class OrderOutcome(enum.Enum):
    #: The job has been rewound.
    DONE = "DONE"
    #: The job does not run; its next start carries out the order.
    WAITS_FOR_START = "WAITS_FOR_START"
    #: The job cannot go back to that checkpoint; nothing was changed.
    REFUSED = "REFUSED"
    #: Somebody deleted the order by hand before the job carried it out.
    GONE = "GONE"
    #: The job has not finished in time, or the command did not wait; the order stays.
    NOT_ANSWERED = "NOT_ANSWERED"

    @property
    def exit_status(self) -> ExitStatus:
        if self in (OrderOutcome.DONE, OrderOutcome.WAITS_FOR_START):
            return ExitStatus.DONE
        return ExitStatus.NO_ANSWER if self is OrderOutcome.NOT_ANSWERED else ExitStatus.NOT_DONE


@dataclass(frozen=True, slots=True)
class OrderReport:
    outcome: OrderOutcome
    text: str
    lineage: Lineage | None = None
    first_removed: BatchId | None = None


@click.command()
@job_argument
@checkpoint_argument
@click.option(
    "--tables",
    type=click.Choice([tables.value.lower() for tables in Tables]),
    default=Tables.KEEP.value.lower(),
    show_default=True,
    help="Whether tables keep the rows that later checkpoints committed, or are restored, too.",
)
@yes_option
@timeout_option
@json_option
def rewind(job: StoredJob, checkpoint: int, tables: str, yes: bool, timeout_s: float, as_json: bool) -> None:
    """Set a job back to checkpoint ID.

    Its state and input positions go back; all later checkpoints are dead for good. A running job carries out
    the order at once, another one at its next start. Repeat the command to wait longer for the same order.
    """
    refuse_plain_query(job)
    target, choice = CheckpointId(checkpoint), Tables(tables.upper())
    owner, waiting = job.job_dir.newest_owner(), _same_order(job, target, choice)
    left_behind = _find_left_behind(checkpoint_views(job, None), target)
    if waiting is None:
        _check(job, target)
        confirm(_what_happens(job, target, choice, left_behind), "Go back?", yes, as_json)
    else:
        complain(f"it was ordered before, at {local_time(waiting.ordered_at_ms)}; waiting for it")
    try:
        order = waiting or _order(job, target, choice)
        report = _follow(job, order, owner, timeout_s)
    except KeyboardInterrupt:
        ordered = waiting or _same_order(job, target, choice)
        if ordered is None:
            raise
        order, report = ordered, _report_interrupt(job, ordered)
    if as_json:
        print_json(_to_json(job, order, left_behind, report))
    elif report.outcome.exit_status is ExitStatus.DONE:
        say(report.text)
    else:
        complain(report.text)
    end_with(report.outcome.exit_status)


def _same_order(job: StoredJob, target: CheckpointId, tables: Tables) -> RewindOrder | None:
    order = job.job_dir.rewind_order()
    return order if order is not None and (order.target, order.tables) == (target, tables) else None


def _check(job: StoredJob, target: CheckpointId) -> None:
    """Refuse an impossible order before the confirmation."""
    # Imported here, since it imports Arrow, which other commands do not need.
    from flinkish_spark.job.rewind import RewindError, why_refused

    why = why_refused(job.job_dir, job.pins(), target)
    order = job.job_dir.rewind_order()
    if not why and order is not None:
        why = (
            f"an order to go back to checkpoint {order.target} waits, and the next start carries it out; "
            "give this one afterwards"
        )
    if why:
        raise RewindError(
            f"the job cannot go back to checkpoint {target}",
            why=why,
            what_to_do="choose one from `flinkish checkpoints list`; nothing was changed",
            target=target,
        )


def _order(job: StoredJob, target: CheckpointId, tables: Tables) -> RewindOrder:
    from flinkish_spark.job.rewind import order_rewind

    return order_rewind(job.job_dir, job.pins(), job.clock, target, tables, "ordered by `flinkish rewind`")


def _find_left_behind(views: tuple[CheckpointView, ...], target: CheckpointId) -> tuple[CheckpointId, ...]:
    """Return the completed checkpoints that a rewind would make dead now."""
    return tuple(
        view.checkpoint
        for view in views
        if view.checkpoint > target
        and view.status is CheckpointStatus.COMPLETED
        and view.superseded_by is None
    )


def _what_happens(
    job: StoredJob, target: CheckpointId, tables: Tables, left_behind: tuple[CheckpointId, ...]
) -> str:
    decision = job.job_dir.decision(target)
    taken = UNKNOWN if decision is None else local_time(decision.decided_at_ms)
    later = ", ".join(str(one) for one in left_behind) or "none so far"
    if len(left_behind) > _MOST_NAMED:
        later = f"{len(left_behind):,}, from {left_behind[0]} to {left_behind[-1]}"
    rows = "keep rows that were committed since" if tables is Tables.KEEP else "become what they were then"
    return "\n".join(
        (
            f"The job '{job.name}' goes back to checkpoint {target}, decided at {taken}:",
            f"- completed checkpoints that become dead for good: {later}",
            "- state, and the positions of sources and consumer groups, become what they were then",
            "- data staged since the last checkpoint is aborted",
            f"- tables {rows}",
            "- topics keep what was committed since; its header `flinkish-batch`, if written, tells readers",
            "- savepoints stay",
        )
    )


def _follow(job: StoredJob, order: RewindOrder, owner: OwnerEpoch, timeout_s: float) -> OrderReport:
    patience = RequestTimeouts.from_seconds(timeout_s, _TAKEN_WITHIN_MS)
    status, reply = follow_rewind(job, order, owner, patience)
    if status is None:
        text = f"ordered: the next start goes back to checkpoint {order.target}; the job does not run"
        return OrderReport(OrderOutcome.WAITS_FOR_START, text)
    if status.state.is_closed:
        return _report_closed(status)
    # An untaken request does not matter: the order stays.
    heard = {
        ReplyKind.COMPLETED: "the job has begun to obey",
        ReplyKind.NOT_TAKEN: "the job has not begun to obey",
    }.get(reply.kind, describe(reply))
    text = f"ordered, and not done within {timeout_s:g} s: {heard}; the order stays"
    return OrderReport(OrderOutcome.NOT_ANSWERED, text)


def _report_interrupt(job: StoredJob, order: RewindOrder) -> OrderReport:
    """Return the report after Ctrl-C, which withdraws the request but not the order."""
    status = find_rewind_status(job.job_dir, order)
    if status.state.is_closed:
        return _report_closed(status)
    text = (
        f"interrupted; the order to go back to checkpoint {order.target} stays: a job that runs obeys it "
        "now, another one at its next start. The same command waits for it"
    )
    return OrderReport(OrderOutcome.NOT_ANSWERED, text)


def _report_closed(status: RewindStatus) -> OrderReport:
    return OrderReport(OrderOutcome(status.state.value), status.text, status.lineage, status.first_removed)


def _to_json(
    job: StoredJob, order: RewindOrder, left_behind: tuple[CheckpointId, ...], report: OrderReport
) -> dict[str, Any]:
    return {
        **job.to_json(),
        "outcome": report.outcome.value,
        "text": report.text,
        "order_id": order.order_id,
        "checkpoint": int(order.target),
        "tables": order.tables.value,
        "left_behind": [int(one) for one in left_behind],
        "lineage": None if report.lineage is None else int(report.lineage),
        "first_removed": None if report.first_removed is None else int(report.first_removed),
    }


@click.group()
def timeline() -> None:
    """Repair a job directory that is an older copy of itself."""


@timeline.command()
@job_argument
@yes_option
@json_option
def accept(job: StoredJob, yes: bool, as_json: bool) -> None:
    """Let the next start continue, whatever the sinks hold.

    For a job that refuses to start because a sink, a source or the manifest has a checkpoint that the
    directory does not know. If you have the newest directory, restore it instead: then no record is lost or
    duplicated.
    """
    refuse_plain_query(job)
    newest = max(job.job_dir.list_checkpoint_ids(), default=None)
    behind = "its beginning" if newest is None else f"checkpoint {newest}"
    confirm(
        f"The next start of the job '{job.name}' continues from {behind} of this directory:\n"
        "- sinks keep what they have; nothing is taken back\n"
        "- input after that checkpoint is read and written again, so rows may be duplicated\n"
        "- new checkpoints have ids above all ids that sinks, sources and manifest have",
        "Accept the external timeline?",
        yes,
        as_json,
    )
    created = job.job_dir.order_timeline(job.clock.wall_ms())
    if as_json:
        print_json({**job.to_json(), "outcome": "WAITS_FOR_START"})
        return
    again = " (it was ordered before)" if created is CreateResult.EXISTS else ""
    say(f"ordered{again}: the next start accepts the checkpoints of sinks, sources and manifest")
