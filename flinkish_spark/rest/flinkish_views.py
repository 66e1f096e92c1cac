"""Answers without a counterpart in Flink's REST API: sinks, decisions, rewinds, lineages, chained jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median_low
from typing import Any

from flinkish_spark.core.clock import duration_text
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.upstream_cut import upstream_cut
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.job.stored_job import CheckpointView, counts_json, details_of, summary_json
from flinkish_spark.protocol.decisions import Decision, Receipt, Verdict
from flinkish_spark.protocol.event_time import MAX_WATERMARK_MS
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.job_graph import JobGraph, JobVertex, OperatorKind
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.series import HOUR_SLOT_MS, WEEK_SLOT_MS, SeriesPoint, sum_known
from flinkish_spark.protocol.statistics import CheckpointDurations, CheckpointStatus
from flinkish_spark.rest.jobs import FoundJobs

#: Least number of distances between checkpoints, and least factor of the interval, to say it is never kept.
_JUDGED, _NEVER_KEPT = 5, 1.2
#: Parts of a checkpoint; the last is what the others leave.
_PARTS = (
    *("the trigger", "staging", "the decision", "the commit"),
    "the wait for the micro-batch that carries the barrier",
)


def summarize_job(snapshot: JobSnapshot) -> dict[str, Any]:
    history, report = snapshot.history, snapshot.report
    newest = history.newest_completed
    return {
        "id": snapshot.id,
        "name": snapshot.job.name,
        "status": snapshot.status.value,
        "began_at_ms": snapshot.began_at_ms or None,
        "now_ms": snapshot.now_ms,
        "restarts": 0 if report is None else report.restarts,
        "completed": history.counts.completed,
        "failed": history.counts.failed,
        "newest_at_ms": None if newest is None else newest.trigger_at_ms,
        "newest_took_ms": None if newest is None else newest.durations.end_to_end_ms,
    }


def job(snapshot: JobSnapshot) -> dict[str, Any]:
    report, owner = snapshot.report, snapshot.owner
    names = {vertex.id: vertex.name for vertex in snapshot.graph.vertices}
    return {
        "id": snapshot.id,
        "name": snapshot.job.name,
        "uuid": str(snapshot.job.uuid),
        "job_dir": snapshot.job.place.url,
        "status": snapshot.status.value,
        "was_cut_off": snapshot.was_cut_off,
        "heard_at_ms": snapshot.heard_at_ms or None,
        "began_at_ms": snapshot.began_at_ms or None,
        "ended_at_ms": snapshot.ended_at_ms,
        "now_ms": snapshot.now_ms,
        "owner": {
            "epoch": snapshot.owner_epoch.value,
            "host": owner.get("host"),
            "pid": owner.get("pid"),
            "life": snapshot.life.value,
        },
        "lineage": snapshot.job.job_dir.lineage().value,
        "restarts": 0 if report is None else report.restarts,
        "failures": []
        if report is None
        else [
            {
                "at_ms": one.at_ms,
                "cause": one.cause,
                "vertex": one.vertex or None,
                "name": names.get(one.vertex),
                "attempt": one.attempt,
            }
            for one in reversed(report.failures)
        ],
        "waits": [
            {"who": one.who, "what": one.what, "since_ms": one.since_ms, "error": one.error or None}
            for one in snapshot.waits
        ],
        "settings": {} if report is None else dict(report.settings),
    }


def graph(snapshot: JobSnapshot) -> dict[str, Any]:
    found, flow = snapshot.graph, snapshot.flow
    return {
        "vertices": [_vertex(snapshot, found, vertex) for vertex in found.vertices],
        "span_ms": None if flow is None else flow.span_ms,
        "ended_at_ms": None if flow is None else flow.ended_at_ms,
    }


def series(snapshot: JobSnapshot) -> dict[str, Any]:
    """Return the lines over time: of the last hour, and of the last week."""
    report, found = snapshot.report, snapshot.series
    return {
        "now_ms": snapshot.now_ms,
        "interval_ms": None if report is None else report.settings.get("interval_ms"),
        "hour": {"slot_ms": HOUR_SLOT_MS, "points": [_point(one) for one in found.hour]},
        "week": {"slot_ms": WEEK_SLOT_MS, "points": [_point(one) for one in found.week]},
    }


def _point(one: SeriesPoint) -> dict[str, Any]:
    return {
        "at_ms": one.at_ms,
        "in_per_second": one.to_rate(one.read),
        "out_per_second": one.to_rate(one.written),
        "lag": one.lag,
        "worst_lag": one.worst_lag,
        "took_ms": one.took_ms,
        "starts": one.starts,
    }


def _vertex(snapshot: JobSnapshot, found: JobGraph, vertex: JobVertex) -> dict[str, Any]:
    flow, is_running = snapshot.flow, snapshot.status.value == "RUNNING"
    busy, held = snapshot.shares_of(vertex)

    def rate(counts: Mapping[str, int], uids: Iterable[str]) -> float | None:
        known = [counts[uid] for uid in uids if uid in counts]
        return flow.to_rate(sum(known)) if flow is not None and known and is_running else None

    report = snapshot.report
    states = {} if report is None else {one.vertex: one.state.value for one in report.vertices}
    return {
        "id": vertex.id,
        "name": vertex.name,
        "state": "CANCELED" if snapshot.was_cut_off else states.get(vertex.id),
        "kind": _kind(vertex),
        "parallelism": vertex.parallelism,
        "max_parallelism": vertex.max_parallelism,
        "operators": [
            {"uid": one.uid, "title": one.title, "does": one.does, "runs_in": one.runs_in.value}
            for one in vertex.operators
        ],
        "inputs": [{"id": way.vertex, "ship": way.ship.value} for way in vertex.inputs],
        "records_in_per_second": None
        if flow is None
        else rate(flow.read_by_source, snapshot.sources_of(vertex)),
        "records_out_per_second": None
        if flow is None
        else rate(flow.rows_by_sink, snapshot.sinks_of(vertex)),
        "busy": busy,
        "back_pressured": held,
        "totals": _totals(snapshot, vertex),
        "watermark_ms": snapshot.watermark_of(vertex),
    }


def _totals(snapshot: JobSnapshot, vertex: JobVertex) -> dict[str, int | None]:
    """Return sums over a vertex's operators since the job's first start; None for what is not counted."""
    totals = snapshot.history.totals
    owned = [totals[one.uid] for one in vertex.operators if one.uid in totals]

    def total(name: str) -> int | None:
        return sum_known(own.get(name) for own in owned)

    return {
        "read": total("numRecordsIn"),
        "written": total("numRecordsOut"),
        "unread": total("pendingRecords"),
        "late": total("numLateRecordsDropped"),
    }


def _kind(vertex: JobVertex) -> str:
    kinds = {one.kind for one in vertex.operators}
    for kind in (OperatorKind.STATEFUL, OperatorKind.SOURCE, OperatorKind.SINK):
        if kind in kinds:
            return str(kind.value)
    return OperatorKind.FUNCTION.value


def watermarks(snapshot: JobSnapshot) -> dict[str, Any]:
    commits = snapshot.newest_commits
    by_uid = snapshot.graph.by_uid
    return {
        "checkpoint": int(commits[0].checkpoint) if commits else None,
        "at_ms": commits[0].decided_at_ms if commits else None,
        "operators": [
            {
                "uid": uid or None,
                "name": by_uid[uid].title if uid in by_uid else "all operators",
                "watermark_ms": None if watermark_ms == MAX_WATERMARK_MS else watermark_ms,
                "is_at_end": watermark_ms == MAX_WATERMARK_MS,
                "lag_ms": snapshot.lag_ms(watermark_ms),
            }
            for uid, watermark_ms in sorted(snapshot.watermarks_ms.items())
        ],
    }


def checkpoints(snapshot: JobSnapshot, at_most: int, before: int | None) -> dict[str, Any]:
    ids = snapshot.checkpoint_ids
    views = snapshot.newest_checkpoints(at_most, before)
    older = bool(views) and views[-1].checkpoint > ids[0]
    return {
        "known": len(ids),
        "checkpoints": [_add_participants(view) for view in views],
        "older_than": int(views[-1].checkpoint) if older else None,
        "counts": counts_json(snapshot.history),
        "summary": summary_json(snapshot.history, digits=1),
        "hint": _hint(snapshot),
    }


def _hint(snapshot: JobSnapshot) -> str | None:
    """Say that the interval is never kept, and why; None if it is, or if too little is known."""
    settings = {} if snapshot.report is None else snapshot.report.settings
    interval_ms = settings.get("interval_ms")
    ended = [
        one
        for one in snapshot.history.entries
        if one.purpose is CheckpointPurpose.PERIODIC and one.status is not CheckpointStatus.IN_PROGRESS
    ]
    gaps_ms = [later.trigger_at_ms - one.trigger_at_ms for one, later in pairwise(ended)]
    if not interval_ms or len(gaps_ms) < _JUDGED or min(gaps_ms) < interval_ms * _NEVER_KEPT:
        return None
    parts = _parts([one.durations for one in ended if one.status is CheckpointStatus.COMPLETED])
    name = max(parts, key=lambda part: parts[part], default=None)
    longest = "" if name is None else f" The longest part is {name}: {duration_text(parts[name])}."
    return (
        f"The interval of {duration_text(interval_ms)} is never kept: the newest {len(ended)} checkpoints "
        f"began at least {duration_text(min(gaps_ms))} apart.{longest} "
        "To do: shorten that part, such as by smaller micro-batches, or make the interval longer."
    )


def _parts(durations: Sequence[CheckpointDurations]) -> dict[str, int]:
    """Return the median duration of each part of checkpoints that were measured completely."""
    found: dict[str, list[int]] = {}
    for one in durations:
        parts = (one.trigger_ms, one.sync_ms, one.async_ms, one.commit_ms)
        known = [part for part in parts if part is not None]
        if one.end_to_end_ms is not None and len(known) == len(parts):
            for name, part in zip(_PARTS, (*known, one.end_to_end_ms - sum(known)), strict=True):
                found.setdefault(name, []).append(part)
    return {name: median_low(values) for name, values in found.items()}


def _add_participants(view: CheckpointView) -> dict[str, Any]:
    participants = () if view.statistics is None else view.statistics.participants
    known = ({name: getattr(one, name) for name in _LISTED} for one in participants)
    return {**view.to_json(), "participants": [one | {"kind": one["kind"].value} for one in known]}


#: Members of participants in a list of checkpoints; the details of one checkpoint have all.
_LISTED = ("uid", "kind", "is_acknowledged", "ack_ms", "sync_ms", "commit_ms", "rows", "bytes")


def checkpoint(snapshot: JobSnapshot, view: CheckpointView) -> dict[str, Any]:
    return {**snapshot.job.to_json(), **details_of(snapshot.job, view)}


def decisions(snapshot: JobSnapshot, at_most: int, before: int | None) -> dict[str, Any]:
    return {
        "decisions": [
            {
                "checkpoint": int(view.checkpoint),
                "verdict": view.decision.verdict.value,
                "purpose": view.purpose.value,
                "owner_epoch": int(view.decision.owner_epoch),
                "lineage": int(view.decision.lineage),
                "decided_at_ms": view.decision.decided_at_ms,
                "confirmed_at_ms": None if view.receipt is None else view.receipt.confirmed_at_ms,
                "rows": view.rows,
                "reason": view.decision.reason,
                "superseded_by_lineage": None if view.superseded_by is None else int(view.superseded_by),
            }
            for view in snapshot.newest_checkpoints(at_most, before)
            if view.decision is not None
        ]
    }


def sinks(snapshot: JobSnapshot) -> dict[str, Any]:
    """Return the staged, the decided unconfirmed, and the confirmed data by sink."""
    job_dir = snapshot.job.job_dir
    staged = list(job_dir.list_staged(job_dir.lineage()).values())
    commits = snapshot.newest_commits
    waiting = [one for one in commits if job_dir.receipt(one.checkpoint) is None]
    confirmed = next((one for one in commits if one not in waiting), None)
    receipt = None if confirmed is None else job_dir.receipt(confirmed.checkpoint)
    decided = {(batch.lineage, batch.batch) for one in commits for batch in one.batches}
    undecided = [one for one in staged if (one.lineage, one.batch) not in decided]
    uids = [one.uid for one in snapshot.graph.operators if one.kind is OperatorKind.SINK]
    seen = [ack.sink for batch in undecided for ack in batch.acks]
    seen += [ack.sink for one in commits for batch in one.batches for ack in batch.acks]
    return {
        "sinks": [
            _sink(snapshot, uid, undecided, waiting, confirmed, receipt)
            for uid in dict.fromkeys([*uids, *seen])
        ],
        "now_ms": snapshot.now_ms,
    }


def _sink(
    snapshot: JobSnapshot,
    uid: str,
    undecided: list[StagedBatch],
    waiting: list[Decision],
    confirmed: Decision | None,
    receipt: Receipt | None,
) -> dict[str, Any]:
    unconfirmed = [*undecided, *(batch for one in waiting for batch in one.batches)]
    open_in = [batch for batch in unconfirmed if any(c.sink == uid for c in batch.committables)]
    began = [batch.began_at_ms for batch in open_in if batch.began_at_ms is not None]
    known = snapshot.graph.by_uid.get(uid)
    flow = snapshot.flow
    return {
        "uid": uid,
        "does": None if known is None else known.does,
        "staged_rows": _rows(undecided, uid),
        "decided_rows": sum(_rows(one.batches, uid) for one in waiting),
        "open_committables": sum(c.sink == uid for batch in open_in for c in batch.committables),
        "oldest_open_ms": max(0, snapshot.now_ms - min(began)) if began else None,
        "confirmed_checkpoint": None if confirmed is None else int(confirmed.checkpoint),
        "confirmed_at_ms": None if receipt is None else receipt.confirmed_at_ms,
        "confirmed_rows": None if confirmed is None else _rows(confirmed.batches, uid),
        "answers": {} if receipt is None else dict(Counter(receipt.answers.get(uid, ()))),
        "facts": {} if receipt is None else dict(receipt.facts.get(uid, {})),
        "rows_per_second": None
        if flow is None or uid not in flow.rows_by_sink
        else flow.to_rate(flow.rows_by_sink[uid]),
    }


def _rows(batches: Iterable[StagedBatch], uid: str) -> int:
    return sum(ack.rows for batch in batches for ack in batch.acks if ack.sink == uid)


def rewind(snapshot: JobSnapshot, at_most: int) -> dict[str, Any]:
    """Return the waiting rewind order, and the newest checkpoints to which the job can rewind."""
    order = snapshot.job.job_dir.rewind_order()
    views = snapshot.newest_checkpoints(at_most)
    return {
        "order": None
        if order is None
        else {
            "order_id": order.order_id,
            "checkpoint": int(order.target),
            "tables": order.tables.value,
            "ordered_at_ms": order.ordered_at_ms,
        },
        "targets": [
            {"checkpoint": int(view.checkpoint), "triggered_at_ms": view.triggered_at_ms, "rows": view.rows}
            for view in views
            if not view.why_not_rewindable
        ],
    }


def lineages(snapshot: JobSnapshot) -> dict[str, Any]:
    history = snapshot.job.job_dir.history()
    return {
        "live": int(history.live),
        "rewinds": [
            {
                "lineage": int(one.lineage),
                "kind": one.kind.value,
                "checkpoint": None if one.target is None else int(one.target),
                "first_removed": int(one.first_removed),
            }
            for one in history.rewinds
        ],
    }


def audit(snapshot: JobSnapshot, at_most: int) -> dict[str, Any]:
    """Return the outputs that the newest decisions promise; `flinkish audit` checks the real ones."""
    views = [view for view in snapshot.newest_checkpoints(at_most) if view.commit is not None]
    return {
        "checkpoints": [
            {
                "checkpoint": int(view.checkpoint),
                "is_confirmed": view.receipt is not None,
                "is_live": view.superseded_by is None,
                "rows": _rows_by_sink(view.commit),
            }
            for view in views
            if view.commit is not None
        ],
        "unconfirmed": [int(view.checkpoint) for view in views if view.receipt is None],
    }


def _rows_by_sink(decision: Decision) -> dict[str, int]:
    assert decision.verdict is Verdict.COMMIT
    return {
        uid: _rows(decision.batches, uid)
        for uid in dict.fromkeys(ack.sink for batch in decision.batches for ack in batch.acks)
    }


def find_chained_jobs(snapshot: JobSnapshot, jobs: FoundJobs) -> dict[str, Any]:
    """Return the upstream and downstream jobs among the jobs of this server."""
    own = str(snapshot.job.uuid)
    by_uuid = {str(one.uuid): (job_id, one) for job_id, one in jobs.by_id.items()}
    downstream = []
    for job_id, other in jobs.by_id.items():
        if job_id != snapshot.id:
            cuts = _cuts(JobSnapshot(job_id, other))
            downstream += [
                {"id": job_id, "name": other.name, **cut} for cut in cuts if cut["job_uuid"] == own
            ]
    return {
        "upstream": [
            {
                "id": by_uuid[cut["job_uuid"]][0] if cut["job_uuid"] in by_uuid else None,
                "name": by_uuid[cut["job_uuid"]][1].name if cut["job_uuid"] in by_uuid else None,
                **cut,
            }
            for cut in _cuts(snapshot)
        ],
        "downstream": downstream,
    }


def _cuts(snapshot: JobSnapshot) -> list[dict[str, Any]]:
    try:
        commits = snapshot.newest_commits
        cuts = upstream_cut(commits[0].offsets_text) if commits else {}
    except CorruptObjectError:
        return []
    return [
        {
            "topic": topic,
            "job_uuid": str(cut.job),
            "upstream_checkpoint": int(cut.checkpoint),
            "alignment_ms": cut.alignment_ms,
        }
        for topic, cut in sorted(cuts.items())
    ]


def change_mark(snapshot: JobSnapshot) -> dict[str, Any]:
    """Return a value that changes with everything that the page shows; costs three reads."""
    history, report = snapshot.history, snapshot.report
    newest = history.entries[-1] if history.entries else None
    return {
        "status": snapshot.status.value,
        "restarts": 0 if report is None else report.restarts,
        "changed_at_ms": snapshot.changed_at_ms,
        "checkpoint": None if newest is None else int(newest.checkpoint),
        "checkpoint_status": None if newest is None else newest.status.value,
        "completed": history.counts.completed,
        "failed": history.counts.failed,
        "lineage": snapshot.job.job_dir.lineage().value,
    }


def checkpoint_id(text: str) -> CheckpointId | None:
    is_id = text.isascii() and text.isdecimal() and len(text) <= 18 and int(text) > 0
    return CheckpointId(int(text)) if is_id else None
