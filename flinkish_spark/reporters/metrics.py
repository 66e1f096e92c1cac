"""The metrics of a job with Flink's names: the catalogue, and the values from a snapshot of the job.

All metric values are computed here; the REST server, the Prometheus endpoint, OpenTelemetry and Spark's
metric system show them. They come from the job directory, so they are the same in any process, also for a job
that is down, and are those of the newest complete checkpoint.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.protocol.job_graph import JobVertex
from flinkish_spark.protocol.job_status import JobStatus
from flinkish_spark.protocol.user_metrics import UserMetric, UserMetricKind

Number = int | float


class Scope(enum.Enum):
    """The scope of a metric, as in Flink. A task is a whole vertex of the job graph."""

    JOB = "job"
    TASK = "task"
    OPERATOR = "operator"


class Kind(enum.Enum):
    """The type of a metric; a counter only grows during the life of the job directory."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    scope: Scope
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Measurement:
    metric: Metric
    value: Number
    #: The vertex of a task metric.
    task: JobVertex | None = None
    #: The uid of an operator metric; empty if all operators share the value.
    operator: str = ""


def _all(scope: Scope, *rows: tuple[str, Kind, str, str]) -> list[Metric]:
    return [Metric(name, kind, scope, unit, meaning) for name, kind, unit, meaning in rows]


_COUNTER, _GAUGE = Kind.COUNTER, Kind.GAUGE
_RECORDS, _SHARE = "{record}", "ms/s"
#: The catalogue of all metrics.
CATALOGUE: tuple[Metric, ...] = (
    *_all(
        Scope.JOB,
        ("uptime", _GAUGE, "ms", "since when the job runs without a restart; 0 while it does not run"),
        ("downtime", _GAUGE, "ms", "for how long a job that does not run has not; 0 while it runs"),
        ("numRestarts", _COUNTER, "{restart}", "restarts of the query, over all processes"),
        ("fullRestarts", _COUNTER, "{restart}", "the same, by its older name"),
        ("totalNumberOfCheckpoints", _COUNTER, "{checkpoint}", "checkpoints that were triggered"),
        ("numberOfInProgressCheckpoints", _GAUGE, "{checkpoint}", "checkpoints that have not ended"),
        ("numberOfCompletedCheckpoints", _COUNTER, "{checkpoint}", "checkpoints that every sink shows"),
        ("numberOfFailedCheckpoints", _COUNTER, "{checkpoint}", "checkpoints that were aborted"),
        ("lastCompletedCheckpointId", _GAUGE, "1", "id of the newest complete checkpoint"),
        ("lastCheckpointDuration", _GAUGE, "ms", "from its request to its receipt"),
        ("lastCheckpointSize", _GAUGE, "By", "what its sinks staged; missing where one does not tell"),
        ("lastCheckpointFullSize", _GAUGE, "By", "the same"),
        ("lastCheckpointRestoreTimestamp", _GAUGE, "ms", "when the job went on from a checkpoint; -1: never"),
        ("busyTimeMsPerSecond", _GAUGE, _SHARE, "share of the time in which micro-batches were worked on"),
        ("backPressuredTimeMsPerSecond", _GAUGE, _SHARE, "share in which they waited for open checkpoints"),
        ("heldBackTime", _GAUGE, "ms", "for how long a checkpoint has been held back; 0 while none is"),
    ),
    *_all(
        Scope.TASK,
        ("numRecordsIn", _COUNTER, _RECORDS, "records that its sources have read, or its sinks got"),
        ("numRecordsOut", _COUNTER, _RECORDS, "records that its sinks have written"),
        ("numRecordsInPerSecond", _GAUGE, "{record}/s", "between the two newest checkpoints"),
        ("numRecordsOutPerSecond", _GAUGE, "{record}/s", "between the two newest checkpoints"),
        ("busyTimeMsPerSecond", _GAUGE, _SHARE, "of a sink, the share in which it staged; else the job's"),
        ("backPressuredTimeMsPerSecond", _GAUGE, _SHARE, "the job's; 0 for a sink"),
        ("idleTimeMsPerSecond", _GAUGE, _SHARE, "what is left"),
        ("currentInputWatermark", _GAUGE, "ms", "least watermark of its operators"),
    ),
    *_all(
        Scope.OPERATOR,
        ("numRecordsIn", _COUNTER, _RECORDS, "of a source: records that it has read"),
        ("pendingRecords", _GAUGE, _RECORDS, "of a source: records that are there and not read"),
        ("numRecordsOut", _COUNTER, _RECORDS, "of a sink: records that it has written"),
        ("numBytesOut", _COUNTER, "By", "of a sink: bytes that it has written, where it tells"),
        ("numLateRecordsDropped", _COUNTER, _RECORDS, "of a window or a join: late records"),
        ("currentInputWatermark", _GAUGE, "ms", "its watermark"),
        ("watermarkLag", _GAUGE, "ms", "lag of the watermark behind the wall clock"),
        ("totalCommittables", _COUNTER, "{committable}", "of a sink: what was staged and decided"),
        (
            "successfulCommittables",
            _COUNTER,
            "{committable}",
            "of a sink: what was committed at its first sight",
        ),
        ("alreadyCommittedCommittables", _COUNTER, "{committable}", "of a sink: what was so already"),
        (
            "retriedCommittables",
            _COUNTER,
            "{committable}",
            "of a sink: answers that its system cannot tell now",
        ),
        ("failedCommittables", _COUNTER, "{committable}", "of a sink: what is lost, or a newer owner has"),
        ("pendingCommittables", _GAUGE, "{committable}", "of a sink: what is decided and not confirmed"),
    ),
)
_BY_NAME = {(one.scope, one.name): one for one in CATALOGUE}
#: Metrics of the catalogue whose values the job's statistics contain unchanged.
_OPERATORS_TOTALS = frozenset(one.name for one in CATALOGUE if one.scope is Scope.OPERATOR)


def measurements(snapshot: JobSnapshot) -> Iterator[Measurement]:
    yield from job_measurements(snapshot)
    for vertex in snapshot.graph.vertices:
        yield from task_measurements(snapshot, vertex)
    yield from operator_measurements(snapshot)
    yield from user_measurements(snapshot)


def job_measurements(snapshot: JobSnapshot) -> list[Measurement]:
    history, report = snapshot.history, snapshot.report
    counts, newest, restored = history.counts, history.newest_completed, history.newest_restored
    is_running = snapshot.status is JobStatus.RUNNING
    since = snapshot.began_at_ms if report is None else report.since_ms.get("RUNNING", 0)
    restarts = 0 if report is None else report.restarts
    found: dict[str, Number | None] = {
        "uptime": max(0, snapshot.now_ms - since) if is_running else 0,
        "downtime": 0 if is_running or not since else max(0, snapshot.now_ms - snapshot.changed_at_ms),
        "heldBackTime": max([0, *(snapshot.now_ms - one.since_ms for one in snapshot.waits)]),
        "numRestarts": restarts,
        "fullRestarts": restarts,
        "totalNumberOfCheckpoints": counts.triggered,
        "numberOfInProgressCheckpoints": counts.in_progress,
        "numberOfCompletedCheckpoints": counts.completed,
        "numberOfFailedCheckpoints": counts.failed,
        "lastCheckpointRestoreTimestamp": -1 if restored is None else restored.restored_at_ms,
    }
    if newest is not None:
        found["lastCompletedCheckpointId"] = int(newest.checkpoint)
        found["lastCheckpointDuration"] = newest.durations.end_to_end_ms
        found["lastCheckpointSize"] = found["lastCheckpointFullSize"] = newest.bytes_staged
    flow = snapshot.flow
    if flow is not None and is_running:
        found["busyTimeMsPerSecond"] = _to_ms_per_second(flow.busy)
        found["backPressuredTimeMsPerSecond"] = _to_ms_per_second(flow.back_pressured)
    return _measure(Scope.JOB, found)


def task_measurements(snapshot: JobSnapshot, vertex: JobVertex) -> list[Measurement]:
    totals, sources, sinks = snapshot.history.totals, snapshot.sources_of(vertex), snapshot.sinks_of(vertex)
    busy, held = snapshot.shares_of(vertex)
    written = _sum(totals.get(uid, {}).get("numRecordsOut") for uid in sinks)
    read = _sum(totals.get(uid, {}).get("numRecordsIn") for uid in sources)
    found: dict[str, Number | None] = {
        # The input of a vertex of sinks is what it writes.
        "numRecordsIn": written if len(sinks) == len(vertex.operators) else read,
        "numRecordsOut": written,
        "busyTimeMsPerSecond": _to_ms_per_second(busy),
        "backPressuredTimeMsPerSecond": _to_ms_per_second(held),
        "currentInputWatermark": snapshot.watermark_of(vertex),
    }
    if busy is not None and held is not None:
        found["idleTimeMsPerSecond"] = _to_ms_per_second(max(0.0, 1.0 - busy - held))
    flow = snapshot.flow
    if flow is not None and snapshot.status is JobStatus.RUNNING:
        for name, counts, uids in (
            ("numRecordsInPerSecond", flow.read_by_source, sources),
            ("numRecordsOutPerSecond", flow.rows_by_sink, sinks),
        ):
            count = _sum(counts.get(uid) for uid in uids)
            found[name] = None if count is None else flow.to_rate(count)
    return _measure(Scope.TASK, found, task=vertex)


def operator_measurements(snapshot: JobSnapshot) -> Iterator[Measurement]:
    pending = snapshot.pending_committables
    totals, watermarks = snapshot.history.totals, snapshot.watermarks_ms
    # Measurements of removed operators stay in the totals only.
    known = snapshot.graph.by_uid
    for uid in [uid for uid in known if uid in totals or uid in watermarks or uid in pending]:
        found: dict[str, Number | None] = {
            name: count for name, count in totals.get(uid, {}).items() if name in _OPERATORS_TOTALS
        }
        if "totalCommittables" in found or uid in pending:
            found["pendingCommittables"] = pending.get(uid, 0)
        yield from _measure(Scope.OPERATOR, {**found, **_times(snapshot, uid)}, operator=uid)
    if "" in watermarks:
        yield from _measure(Scope.OPERATOR, _times(snapshot, ""))


def _times(snapshot: JobSnapshot, uid: str) -> dict[str, Number | None]:
    watermark_ms = snapshot.watermarks_ms.get(uid)
    return {"currentInputWatermark": watermark_ms, "watermarkLag": snapshot.lag_ms(watermark_ms)}


def user_measurements(snapshot: JobSnapshot) -> Iterator[Measurement]:
    """Yield users' metrics; a gauge and a distribution give several aggregates."""
    for uid, own in snapshot.history.user_metrics.items():
        for name, one in own.items():
            for end, kind, value in _values(one):
                if (Scope.OPERATOR, f"{name}{end}") in _BY_NAME:
                    # Two values with the same name would be wrong.
                    continue
                metric = Metric(f"{name}{end}", kind, Scope.OPERATOR, "1", f"{one.kind.value} of a function")
                yield Measurement(metric, value, operator=uid)


def _values(one: UserMetric) -> Iterator[tuple[str, Kind, Number]]:
    match one.kind:
        case UserMetricKind.COUNTER:
            # A counter may be decremented, so it is a gauge.
            yield "", Kind.GAUGE, one.count
        case UserMetricKind.METER:
            yield ".count", Kind.COUNTER, one.count
        case _:
            is_gauge = one.kind is UserMetricKind.GAUGE
            yield ".count", Kind.GAUGE if is_gauge else Kind.COUNTER, one.count
            yield ".sum", Kind.GAUGE, one.total
            for end, value in ((".min", one.least), (".max", one.most), (".mean", one.mean)):
                if value is not None:
                    yield end, Kind.GAUGE, value


def _measure(
    scope: Scope, found: dict[str, Number | None], task: JobVertex | None = None, operator: str = ""
) -> list[Measurement]:
    return [
        Measurement(_BY_NAME[scope, name], value, task, operator)
        for name, value in found.items()
        if value is not None
    ]


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _to_ms_per_second(share: float | None) -> int | None:
    return None if share is None else round(share * 1_000)
