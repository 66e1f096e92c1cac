"""The answers for Flink's REST paths, in Flink's format, from a snapshot of a job.

Every member that Flink's clients may read is present. A value that Spark does not have, or that was not
measured, is -1 or left out, as in Flink; never a number with another meaning.

A task is a whole vertex, since Spark schedules its partitions itself. So a vertex has one subtask. In a
checkpoint a sink has one for each channel that sent it a barrier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flinkish_spark.core.accumulators import as_results
from flinkish_spark.core.version import __version__
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.job.stored_job import CheckpointView
from flinkish_spark.protocol.ids import CheckpointPurpose
from flinkish_spark.protocol.job_graph import JobVertex
from flinkish_spark.protocol.job_report import ReportedFailure
from flinkish_spark.protocol.job_status import JobStatus, TaskState
from flinkish_spark.protocol.statistics import (
    CheckpointStatus,
    ParticipantStatistics,
    Quantity,
    StatisticsHistory,
    find_percentile,
)
from flinkish_spark.reporters.metrics import (
    job_measurements,
    operator_measurements,
    task_measurements,
    user_measurements,
)

#: Flink's value for unknown numbers.
_UNKNOWN = -1
#: Flink's task states, by which its pages count tasks; not all of them occur here.
_TASK_STATES = (
    *("CREATED", "SCHEDULED", "DEPLOYING", "INITIALIZING", "RUNNING", "FINISHED", "CANCELING", "CANCELED"),
    *("FAILED", "RECONCILING"),
)
_VERSION = f"flinkish-spark-{__version__}"
#: Flink's thresholds of low and high back pressure.
_LOW, _HIGH = 0.1, 0.5
#: What Flink counts of its alignments, and Spark's micro-batches do not have.
_BUFFERS = ("buffered", "processed", "persisted")
_DATA = ("alignment_buffered", "processed_data", "persisted_data")
_PERMILLES = {"p50": 500, "p90": 900, "p95": 950, "p99": 990, "p999": 999}


def overview(snapshots: Iterable[JobSnapshot]) -> dict[str, Any]:
    states = [one.status for one in snapshots]
    over = (JobStatus.FINISHED, JobStatus.CANCELED, JobStatus.FAILED)
    return {
        "taskmanagers": 0,
        "slots-total": 0,
        "slots-available": 0,
        "jobs-running": sum(state not in over and state is not JobStatus.SUSPENDED for state in states),
        "jobs-finished": states.count(JobStatus.FINISHED),
        "jobs-cancelled": states.count(JobStatus.CANCELED),
        "jobs-failed": states.count(JobStatus.FAILED),
        "flink-version": _VERSION,
        "flink-commit": "unknown",
    }


def dashboard_config(*, can_change: bool) -> dict[str, Any]:
    return {
        "refresh-interval": 3_000,
        "timezone-name": "Coordinated Universal Time",
        "timezone-offset": 0,
        "flink-version": _VERSION,
        "flink-revision": "unknown",
        "features": {
            "web-submit": False,
            "web-cancel": can_change,
            "web-rescale": False,
            "web-history": False,
        },
    }


def job_id_with_status(snapshot: JobSnapshot) -> dict[str, Any]:
    return {"id": snapshot.id, "status": snapshot.status.value}


def job_overview(snapshot: JobSnapshot) -> dict[str, Any]:
    counts = {state.lower(): 0 for state in _TASK_STATES}
    for state in _states(snapshot).values():
        counts[state.value.lower()] += 1
    return {
        "jid": snapshot.id,
        "name": snapshot.job.name,
        "start-time": snapshot.began_at_ms or _UNKNOWN,
        "end-time": _end(snapshot),
        "duration": _duration(snapshot),
        "state": snapshot.status.value,
        "last-modification": snapshot.changed_at_ms,
        "tasks": {"total": len(snapshot.graph.vertices), **counts, "pending": 0},
        "pending-operators": 0,
    }


def job_details(snapshot: JobSnapshot) -> dict[str, Any]:
    since = {} if snapshot.report is None else snapshot.report.since_ms
    vertices = [_vertex(snapshot, vertex) for vertex in snapshot.graph.vertices]
    counts = dict.fromkeys(_TASK_STATES, 0)
    for one in vertices:
        counts[one["status"]] += 1
    most = [one.max_parallelism for one in snapshot.graph.vertices if one.max_parallelism is not None]
    return {
        "jid": snapshot.id,
        "name": snapshot.job.name,
        "isStoppable": False,
        "state": snapshot.status.value,
        "job-type": "STREAMING",
        "start-time": snapshot.began_at_ms or _UNKNOWN,
        "end-time": _end(snapshot),
        "duration": _duration(snapshot),
        "maxParallelism": max(most, default=_UNKNOWN),
        "now": snapshot.now_ms,
        "timestamps": {
            **{state.value: since.get(state.value, 0) for state in JobStatus},
            "INITIALIZING": snapshot.began_at_ms,
            "RECONCILING": 0,
        },
        "vertices": vertices,
        "status-counts": counts,
        "plan": job_plan(snapshot)["plan"],
        "stream-graph": {},
        "pending-operators": 0,
    }


def job_plan(snapshot: JobSnapshot) -> dict[str, Any]:
    return {"plan": snapshot.graph.job_plan(snapshot.id)}


def job_config(snapshot: JobSnapshot) -> dict[str, Any]:
    settings = _settings(snapshot)
    names = ("trigger_ms", "retained", "retention", "mode", "interval_ms")
    return {
        "jid": snapshot.id,
        "name": snapshot.job.name,
        "execution-config": {
            "execution-mode": "PIPELINED",
            "restart-strategy": str(settings.get("restart_strategy", "unknown")),
            "job-parallelism": settings.get("shuffle_partitions", _UNKNOWN),
            "object-reuse-mode": False,
            "user-config": {name: str(settings[name]) for name in names if name in settings},
        },
    }


def job_exceptions(snapshot: JobSnapshot, at_most: int) -> dict[str, Any]:
    failures = [] if snapshot.report is None else list(reversed(snapshot.report.failures))
    names = {vertex.id: vertex.name for vertex in snapshot.graph.vertices}
    entries = [_exception(one, names) for one in failures[:at_most]]
    newest = failures[0] if failures else None
    return {
        "root-exception": None if newest is None else newest.cause,
        "timestamp": None if newest is None else newest.at_ms,
        "all-exceptions": [],
        "truncated": len(failures) > at_most,
        "exceptionHistory": {"entries": entries, "truncated": len(failures) > at_most},
    }


def _exception(failure: ReportedFailure, names: Mapping[str, str]) -> dict[str, Any]:
    task = names.get(failure.vertex)
    return {
        "exceptionName": failure.cause.split("\n", 1)[0].split(". ", 1)[0],
        "stacktrace": failure.cause,
        "timestamp": failure.at_ms,
        "failureLabels": {},
        "taskName": task,
        "endpoint": None,
        "location": None,
        "taskManagerId": None,
        "concurrentExceptions": [],
    }


def job_accumulators(snapshot: JobSnapshot) -> dict[str, Any]:
    """Return `/jobs/:id/accumulators`: the values at the newest complete checkpoint."""
    newest = snapshot.newest_commits[0] if snapshot.newest_commits else None
    stored = {} if newest is None else newest.accumulators
    results = as_results(stored)
    return {
        "job-accumulators": [],
        "user-task-accumulators": [
            {"name": name, "type": stored[name].kind.value, "value": str(results[name])}
            for name in sorted(stored)
        ],
        "serialized-user-task-accumulators": {},
    }


def vertex_details(snapshot: JobSnapshot, vertex: JobVertex) -> dict[str, Any]:
    one = _vertex(snapshot, vertex)
    return {
        "id": vertex.id,
        "name": vertex.name,
        "parallelism": one["parallelism"],
        "maxParallelism": one["maxParallelism"],
        "now": snapshot.now_ms,
        "aggregated": None,
        "subtasks": [
            {
                "subtask": 0,
                "status": one["status"],
                "attempt": _attempt(snapshot, vertex) - 1,
                "host": _host(snapshot),
                "endpoint": _host(snapshot),
                "start-time": one["start-time"],
                "start_time": one["start-time"],
                "end-time": one["end-time"],
                "duration": one["duration"],
                "metrics": one["metrics"],
                "taskmanager-id": "unknown",
                "status-duration": {},
                "other-concurrent-attempts": None,
            }
        ],
    }


def vertex_times(snapshot: JobSnapshot, vertex: JobVertex) -> dict[str, Any]:
    one = _vertex(snapshot, vertex)
    reached = dict.fromkeys(_TASK_STATES, 0)
    reached[one["status"]] = max(0, one["start-time"])
    host, took = _host(snapshot), one["duration"]
    subtask = {"subtask": 0, "host": host, "endpoint": host, "duration": took, "timestamps": reached}
    return {"id": vertex.id, "name": vertex.name, "now": snapshot.now_ms, "subtasks": [subtask]}


def vertex_back_pressure(snapshot: JobSnapshot, vertex: JobVertex) -> dict[str, Any]:
    """Return `/jobs/:id/vertices/:v/backpressure`; "deprecated" before the first measurement."""
    busy, held = snapshot.shares_of(vertex)
    if busy is None or held is None:
        return {"status": "deprecated", "backpressureLevel": None, "backpressure-level": None, "subtasks": []}
    level, flow = "ok" if held <= _LOW else "low" if held <= _HIGH else "high", snapshot.flow
    levels = {"backpressureLevel": level, "backpressure-level": level}
    return {
        "status": "ok",
        **levels,
        "end-timestamp": 0 if flow is None else flow.ended_at_ms,
        "subtasks": [
            {
                "subtask": 0,
                "attempt-number": _attempt(snapshot, vertex) - 1,
                **levels,
                "ratio": held,
                "idleRatio": round(max(0.0, 1.0 - busy - held), 3),
                "busyRatio": busy,
                "other-concurrent-attempts": None,
            }
        ],
    }


def vertex_watermarks(snapshot: JobSnapshot, vertex: JobVertex) -> list[dict[str, str]]:
    watermark_ms = snapshot.watermark_of(vertex)
    return [] if watermark_ms is None else [{"id": "0.currentInputWatermark", "value": str(watermark_ms)}]


def _vertex(snapshot: JobSnapshot, vertex: JobVertex) -> dict[str, Any]:
    found = {} if snapshot.report is None else {one.vertex: one for one in snapshot.report.vertices}
    known, state = found.get(vertex.id), _states(snapshot)[vertex.id]
    began = snapshot.began_at_ms if known is None else known.since_ms
    is_over = state.is_terminal
    return {
        "id": vertex.id,
        "name": vertex.name,
        "maxParallelism": _UNKNOWN if vertex.max_parallelism is None else vertex.max_parallelism,
        "parallelism": _UNKNOWN if vertex.parallelism is None else vertex.parallelism,
        "status": state.value,
        "start-time": began or _UNKNOWN,
        "end-time": began if is_over else _UNKNOWN,
        "duration": 0 if is_over or not began else max(0, snapshot.now_ms - began),
        "tasks": {name: int(name == state.value) for name in _TASK_STATES},
        "metrics": _io_metrics(snapshot, vertex),
    }


def _io_metrics(snapshot: JobSnapshot, vertex: JobVertex) -> dict[str, Any]:
    """Return record counts between the two newest checkpoints; marked as incomplete."""
    flow = snapshot.flow
    read = {} if flow is None else flow.read_by_source
    rows = {} if flow is None else flow.rows_by_sink
    busy, held = snapshot.shares_of(vertex)
    return {
        "read-bytes": 0,
        "read-bytes-complete": False,
        "write-bytes": 0,
        "write-bytes-complete": False,
        "read-records": sum(read.get(uid, 0) for uid in snapshot.sources_of(vertex)),
        "read-records-complete": False,
        "write-records": sum(rows.get(uid, 0) for uid in snapshot.sinks_of(vertex)),
        "write-records-complete": False,
        "accumulated-backpressured-time": round((held or 0.0) * (0 if flow is None else flow.span_ms)),
        "accumulated-idle-time": 0,
        "accumulated-busy-time": round((busy or 0.0) * (0 if flow is None else flow.span_ms)),
    }


def _states(snapshot: JobSnapshot) -> dict[str, TaskState]:
    """Return the states of the vertices; those of a crashed job have ended with it."""
    report = snapshot.report
    found = {} if report is None else {one.vertex: one.state for one in report.vertices}
    default = TaskState.RUNNING if snapshot.status is JobStatus.RUNNING else TaskState.CREATED
    states = {vertex.id: found.get(vertex.id, default) for vertex in snapshot.graph.vertices}
    if snapshot.was_cut_off:
        return {vertex: s if s.is_terminal else TaskState.CANCELED for vertex, s in states.items()}
    return states


def _attempt(snapshot: JobSnapshot, vertex: JobVertex) -> int:
    vertices = () if snapshot.report is None else snapshot.report.vertices
    return next((one.attempt for one in vertices if one.vertex == vertex.id), 1)


def _end(snapshot: JobSnapshot) -> int:
    return _UNKNOWN if snapshot.ended_at_ms is None else snapshot.ended_at_ms


def _duration(snapshot: JobSnapshot) -> int:
    if not snapshot.began_at_ms:
        return 0
    ended = snapshot.now_ms if snapshot.ended_at_ms is None else snapshot.ended_at_ms
    return max(0, ended - snapshot.began_at_ms)


def _settings(snapshot: JobSnapshot) -> Mapping[str, Any]:
    return {} if snapshot.report is None else snapshot.report.settings


def job_metrics(snapshot: JobSnapshot) -> dict[str, str]:
    return {one.metric.name: str(one.value) for one in job_measurements(snapshot)}


def vertex_metrics(snapshot: JobSnapshot, vertex: JobVertex) -> dict[str, str]:
    """Return the metrics for `/jobs/:id/vertices/:v/metrics` by name; operator metrics with their uids."""
    found = {f"0.{one.metric.name}": str(one.value) for one in task_measurements(snapshot, vertex)}
    uids = {one.uid or one.name for one in vertex.operators}
    for one in (*operator_measurements(snapshot), *user_measurements(snapshot)):
        if one.operator in uids:
            found[f"0.{one.operator}.{one.metric.name}"] = str(one.value)
    return found


def aggregate_metrics(metrics: Mapping[str, str], wanted: str | None) -> list[dict[str, Any]]:
    """Return `/jobs/:id/vertices/:v/subtasks/metrics`: aggregates over the single subtask."""
    plain = {name.removeprefix("0."): value for name, value in metrics.items()}
    found = select_metrics(plain, wanted)
    ways = ("min", "max", "avg", "sum")
    return [
        {"id": one["id"], **{way: float(one["value"]) for way in ways if "value" in one}} for one in found
    ]


def select_metrics(metrics: Mapping[str, str], wanted: str | None) -> list[dict[str, str]]:
    if wanted is None:
        return [{"id": name} for name in metrics]
    return [{"id": name, "value": metrics[name]} for name in wanted.split(",") if name in metrics]


def checkpoint_config(snapshot: JobSnapshot) -> dict[str, Any]:
    settings = _settings(snapshot)
    retention = settings.get("retention", "RETAIN_ON_CANCELLATION")
    tolerable = settings.get("tolerable_failures", _UNKNOWN)
    return {
        # As in Flink's OpenAPI document.
        "mode": str(settings.get("mode", "EXACTLY_ONCE")),
        "interval": settings.get("interval_ms", _UNKNOWN),
        "timeout": settings.get("timeout_ms", _UNKNOWN),
        "min_pause": settings.get("min_pause_ms", _UNKNOWN),
        "max_concurrent": settings.get("max_concurrent", _UNKNOWN),
        "externalization": {
            "enabled": True,
            "delete_on_cancellation": retention == "DELETE_ON_CANCELLATION",
        },
        "state_backend": "spark",
        "checkpoint_storage": "job directory",
        "unaligned_checkpoints": False,
        # Flink's value for no limit.
        "tolerable_failed_checkpoints": 2**31 - 1 if tolerable is None else tolerable,
        "aligned_checkpoint_timeout": 0,
        "checkpoints_after_tasks_finish": True,
        "state_changelog_enabled": False,
        "changelog_periodic_materialization_interval": 0,
        "changelog_storage": "",
    }


def checkpoints(snapshot: JobSnapshot, at_most: int) -> dict[str, Any]:
    history = snapshot.history
    counts, newest = history.counts, snapshot.newest_checkpoints(at_most)
    latest = {
        "completed": history.newest_completed,
        "savepoint": history.newest_savepoint,
        "failed": history.newest_failed,
    }
    found = {
        name: None if one is None else snapshot.checkpoint(one.checkpoint.value)
        for name, one in latest.items()
    }
    restored = history.newest_restored
    return {
        "counts": {
            "restored": counts.restored,
            "total": counts.triggered,
            "in_progress": counts.in_progress,
            "completed": counts.completed,
            "failed": counts.failed,
        },
        "summary": _summary(history),
        "latest": {
            **{name: None if one is None else _checkpoint(snapshot, one) for name, one in found.items()},
            "restored": None
            if restored is None
            else {
                "id": int(restored.checkpoint),
                "restore_timestamp": restored.restored_at_ms,
                "is_savepoint": bool(restored.path),
                "external_path": restored.path or None,
            },
        },
        "history": [_checkpoint(snapshot, one) for one in newest],
    }


def checkpoint_details(snapshot: JobSnapshot, view: CheckpointView) -> dict[str, Any]:
    tasks = {
        vertex.id: _task_checkpoint(view, _participants(view, vertex)) for vertex in snapshot.graph.vertices
    }
    known = {vertex: task for vertex, task in tasks.items() if task["num_subtasks"]}
    return {**_checkpoint(snapshot, view), "tasks": known}


def checkpoint_subtasks(view: CheckpointView, vertex: JobVertex) -> dict[str, Any]:
    participants = _participants(view, vertex)
    durations = view.durations
    subtasks: list[dict[str, Any]] = []
    for one in participants:
        # A sink has one row per channel; other participants have one row.
        for channel in one.channels or (None,):
            name = "completed" if one.is_acknowledged else "pending"
            found = {"className": name, "clazz": name, "index": len(subtasks)}
            if not one.is_acknowledged:
                subtasks.append({**found, "status": "pending_or_failed"})
                continue
            aligned = durations.alignment_ms if channel is None else channel.alignment_ms
            subtasks.append(
                {
                    **found,
                    "status": "completed",
                    "ack_timestamp": (view.triggered_at_ms or 0) + (one.ack_ms or 0),
                    "end_to_end_duration": one.ack_ms or 0,
                    **_sizes(_number(one.bytes)),
                    "checkpoint": {"sync": _number(one.sync_ms), "async": _number(durations.async_ms)},
                    "alignment": {**dict.fromkeys(_BUFFERS, 0), "duration": _number(aligned)},
                    "start_delay": _number(durations.start_delay_ms),
                    "unaligned_checkpoint": False,
                    "aborted": view.status is CheckpointStatus.FAILED,
                }
            )
    acks = [one for one in participants if one.is_acknowledged]
    return {
        **_task_checkpoint(view, participants),
        "summary": {
            **_sizes(_summarize([one.bytes for one in acks])),
            "end_to_end_duration": _summarize([one.ack_ms for one in acks]),
            "checkpoint_duration": {
                "sync": _summarize([one.sync_ms for one in acks]),
                "async": _summarize([durations.async_ms]),
            },
            "alignment": {
                **dict.fromkeys(_BUFFERS, _summarize([])),
                "duration": _summarize([durations.alignment_ms]),
            },
            "start_delay": _summarize([durations.start_delay_ms]),
        },
        "subtasks": subtasks,
    }


def _checkpoint(snapshot: JobSnapshot, view: CheckpointView) -> dict[str, Any]:
    status, statistics = view.status, view.statistics
    began, took = view.triggered_at_ms or 0, view.durations.end_to_end_ms
    size = None if statistics is None else statistics.bytes_staged
    receipt, decision = view.receipt, view.decision
    ended = decision.decided_at_ms if decision is not None else began + (took or 0)
    confirmed = ended if receipt is None else receipt.confirmed_at_ms
    if took is None:
        took = max(0, (snapshot.now_ms if status is CheckpointStatus.IN_PROGRESS else confirmed) - began)
    asked = None if statistics is None else statistics.asked
    acked = None if statistics is None else statistics.acknowledged
    found: dict[str, Any] = {
        "className": status.value.lower(),
        "clazz": status.value.lower(),
        "id": int(view.checkpoint),
        "status": status.value,
        "is_savepoint": view.purpose.is_savepoint,
        "savepointFormat": "CANONICAL" if view.purpose.is_savepoint else None,
        "trigger_timestamp": began,
        "latest_ack_timestamp": ended if status is not CheckpointStatus.IN_PROGRESS else began,
        **_sizes(_number(size)),
        "end_to_end_duration": took,
        **dict.fromkeys(_DATA, 0),
        "num_subtasks": asked or 0,
        "num_acknowledged_subtasks": acked or 0,
        "checkpoint_type": _type(view.purpose),
        "tasks": {},
    }
    if status is CheckpointStatus.COMPLETED:
        is_there = view.commit is not None
        folder = f"{snapshot.job.place.url}/checkpoints/{view.checkpoint}"
        found |= {"external_path": folder if is_there else "", "discarded": not is_there}
    elif status is CheckpointStatus.FAILED:
        reason, text = view.failure or (None, "")
        said = ": ".join(filter(None, ("" if reason is None else reason.value, text)))
        found |= {"failure_timestamp": ended, "failure_message": said}
    return found


def _type(purpose: CheckpointPurpose) -> str:
    if purpose.stops_with_savepoint:
        return "SYNC_SAVEPOINT"
    return "SAVEPOINT" if purpose.is_savepoint else "CHECKPOINT"


def _participants(view: CheckpointView, vertex: JobVertex) -> list[ParticipantStatistics]:
    uids = {one.uid for one in vertex.operators if one.uid}
    participants = () if view.statistics is None else view.statistics.participants
    return [one for one in participants if one.uid in uids]


def _task_checkpoint(view: CheckpointView, participants: list[ParticipantStatistics]) -> dict[str, Any]:
    acks = [one for one in participants if one.is_acknowledged]
    last = max((one.ack_ms or 0 for one in acks), default=0)
    sizes = [one.bytes for one in acks if one.bytes is not None]
    return {
        "id": int(view.checkpoint),
        "status": view.status.value,
        "latest_ack_timestamp": (view.triggered_at_ms or 0) + last if acks else _UNKNOWN,
        **_sizes(sum(sizes)),
        "end_to_end_duration": last,
        **dict.fromkeys(_DATA, 0),
        "num_subtasks": sum(len(one.channels) or 1 for one in participants),
        "num_acknowledged_subtasks": sum(len(one.channels) or 1 for one in acks),
    }


def _summary(history: StatisticsHistory) -> dict[str, Any]:
    return {
        **_sizes(_summarize(history.list_values(Quantity.BYTES_STAGED))),
        "end_to_end_duration": _summarize(history.list_values(Quantity.END_TO_END_MS)),
        **dict.fromkeys(_DATA, _summarize(())),
    }


def _summarize(values: Iterable[int | None]) -> dict[str, Any]:
    """Return minimum, maximum, average and percentiles of the measured values, by nearest rank."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return dict.fromkeys(("min", "max", "avg", *_PERMILLES), 0)
    return {
        "min": known[0],
        "max": known[-1],
        "avg": round(sum(known) / len(known)),
        **{name: find_percentile(known, permille) for name, permille in _PERMILLES.items()},
    }


def _sizes(size: Any) -> dict[str, Any]:
    return {"checkpointed_size": size, "state_size": size}


def _host(snapshot: JobSnapshot) -> str:
    return str(snapshot.owner.get("host", "unknown"))


def _number(measured: int | None) -> int:
    return 0 if measured is None else measured
