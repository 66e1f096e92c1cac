"""A snapshot of one job: each fact is read at most once per request, and only if it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from flinkish_spark.checkpoint.ownership import OwnerLife, life_of_owner
from flinkish_spark.core.errors import CorruptObjectError, FlinkishError
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.job.stored_job import CheckpointView, StoredJob, checkpoint_views, list_checkpoint_ids
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.event_time import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from flinkish_spark.protocol.job_graph import JobGraph, JobVertex, OperatorKind
from flinkish_spark.protocol.job_report import JobReport, ReportedWait
from flinkish_spark.protocol.job_status import JobStatus
from flinkish_spark.protocol.plan_layout import PlanLayout, ScanRole, offsets_in, source_of
from flinkish_spark.protocol.series import Series
from flinkish_spark.protocol.statistics import StatisticsHistory

#: An owner on another machine that has written nothing for this long is reported as gone.
_SILENT_MS = 600_000
#: Number of newest checkpoints among which the newest commits are searched.
_MOST_LOOKED_AT = 50


@dataclass(frozen=True, slots=True)
class Flow:
    """Rates of a job between its two newest complete checkpoints."""

    # Spark runs all vertices of a micro-batch as one query, so the vertices before the sinks share its
    # figures.

    #: Time from one decision to the next.
    span_ms: int
    #: Wall-clock time of the newer decision.
    ended_at_ms: int
    #: Shares of the time in which micro-batches ran, and in which they waited since too many were undecided;
    #: None if not measured.
    busy: float | None
    back_pressured: float | None
    #: Numbers of records; for sources only those that can be computed from topic offsets.
    rows_by_sink: Mapping[str, int]
    read_by_source: Mapping[str, int]
    #: Share of the time by sink in which it staged.
    sink_busy: Mapping[str, float]

    def to_rate(self, count: int) -> float:
        return round(count * 1_000 / self.span_ms, 1)


class JobSnapshot:
    """Facts of a job for one request; errors of the job directory are raised."""

    def __init__(self, job_id: str, job: StoredJob) -> None:
        self.id, self.job = job_id, job
        self.now_ms = job.clock.wall_ms()

    @cached_property
    def owner_epoch(self) -> OwnerEpoch:
        """The newest owner; 0 for a job that has never run."""
        return self.job.job_dir.newest_owner()

    @cached_property
    def owner(self) -> Mapping[str, Any]:
        return self.job.job_dir.owner(self.owner_epoch) or {}

    @cached_property
    def life(self) -> OwnerLife:
        if self.owner_epoch.value == 0:
            return OwnerLife.ENDED
        return life_of_owner(self.job.job_dir, self.owner_epoch)

    def fingerprint(self) -> tuple[object, ...]:
        return self.owner_epoch, self.life, self.job.job_dir.digest_state()

    @cached_property
    def heard_at_ms(self) -> int:
        """Wall-clock time of the newest object that an owner has written, among those with a time."""
        entries = self.history.entries[-1:]
        found = [self.began_at_ms, *(one.decided_at_ms for one in self.newest_commits[:1])]
        found += [one.trigger_at_ms + (one.durations.end_to_end_ms or 0) for one in entries]
        return max([*found, *({} if self.report is None else self.report.since_ms).values()])

    @property
    def is_silent(self) -> bool:
        """Return True if the owner has not written for long, by this machine's clock; for display only."""
        settings = {} if self.report is None else self.report.settings
        usual_ms = int(settings.get("timeout_ms", 0)) + 3 * int(settings.get("interval_ms", 0))
        return self.now_ms - self.heard_at_ms > max(_SILENT_MS, usual_ms)

    @property
    def is_over(self) -> bool:
        """Return True if the job certainly does not run."""
        return self.life is OwnerLife.ENDED or self._says_its_end

    @property
    def seems_gone(self) -> bool:
        return self.life is OwnerLife.ENDED or (self.life is OwnerLife.UNKNOWN and self.is_silent)

    @cached_property
    def report(self) -> JobReport | None:
        """The newest owner's report; None if it is missing or damaged."""
        try:
            return self.job.job_dir.newest_report()
        except CorruptObjectError:
            return None

    @property
    def _says_its_end(self) -> bool:
        report = self.report
        return report is not None and report.owner_epoch == self.owner_epoch and report.status.is_terminal

    @cached_property
    def status(self) -> JobStatus:
        """The job's status; SUSPENDED if its process ended first: the next start continues it."""
        report = self.report
        if self.owner_epoch.value == 0:
            return JobStatus.CREATED
        if report is not None and self._says_its_end:
            return report.status
        if self.seems_gone:
            return JobStatus.SUSPENDED
        if report is None:
            # The job runs, but its report is damaged or could not be stored.
            return JobStatus.RUNNING
        return report.status if report.owner_epoch == self.owner_epoch else JobStatus.CREATED

    @property
    def was_cut_off(self) -> bool:
        return self.owner_epoch.value > 0 and self.seems_gone and not self._says_its_end

    @property
    def waits(self) -> tuple[ReportedWait, ...]:
        report = self.report
        return () if report is None or self.is_over or self.was_cut_off else report.waits

    @cached_property
    def began_at_ms(self) -> int:
        """Wall-clock time at which the newest owner took the job over; 0 for a job that has never run."""
        return int(self.owner.get("taken_at_ms", 0))

    @cached_property
    def ended_at_ms(self) -> int | None:
        """Wall-clock time of the job's end, or of its last sign of life; None if it has not ended."""
        if not self.status.is_terminal:
            return None
        report = self.report
        if report is not None and not self.was_cut_off:
            return report.since_ms.get(report.status.value, 0)
        return self.heard_at_ms

    @property
    def changed_at_ms(self) -> int:
        return max([self.began_at_ms, *({} if self.report is None else self.report.since_ms).values()])

    @cached_property
    def lineage(self) -> int:
        return self.job.job_dir.lineage().value

    @cached_property
    def graph(self) -> JobGraph:
        return self.job.job_dir.job_graph() or JobGraph(self.job.name, ())

    @cached_property
    def history(self) -> StatisticsHistory:
        """Statistics of checkpoints; empty if they are missing or damaged."""
        try:
            return self.job.job_dir.statistics() or StatisticsHistory()
        except CorruptObjectError:
            return StatisticsHistory()

    @cached_property
    def series(self) -> Series:
        """The lines over time; empty if they are missing or damaged."""
        try:
            return self.job.job_dir.series() or Series()
        except CorruptObjectError:
            return Series()

    @cached_property
    def checkpoint_ids(self) -> tuple[CheckpointId, ...]:
        return list_checkpoint_ids(self.job, self.history)

    def newest_checkpoints(self, at_most: int, before: int | None = None) -> tuple[CheckpointView, ...]:
        ids = self.checkpoint_ids if before is None else [c for c in self.checkpoint_ids if c.value < before]
        wanted = frozenset(ids[max(0, len(ids) - at_most) :])
        return tuple(reversed(checkpoint_views(self.job, self.history, wanted)))

    def checkpoint(self, number: int) -> CheckpointView | None:
        found = checkpoint_views(self.job, self.history, frozenset({CheckpointId(number)}))
        return found[0] if found else None

    @cached_property
    def newest_commits(self) -> tuple[Decision, ...]:
        """The two newest live COMMIT decisions, newest first."""
        job_dir, lineages = self.job.job_dir, self.job.job_dir.history()
        looked_at = (
            job_dir.decision(one) for one in reversed(job_dir.list_checkpoint_ids()[-_MOST_LOOKED_AT:])
        )
        commits = (one for one in looked_at if one is not None and one.batches)
        live = (one for one in commits if lineages.find_superseding(one.checkpoint, one.lineage) is None)
        return tuple(islice(live, 2))

    @cached_property
    def pending_committables(self) -> dict[str, int]:
        newest = self.newest_commits[:1]
        waiting = [one for one in newest if self.job.job_dir.receipt(one.checkpoint) is None]
        return {uid: len(found) for one in waiting for uid, found in one.group_by_sink().items()}

    @cached_property
    def flow(self) -> Flow | None:
        """The newest rates; None before the second checkpoint."""
        if len(self.newest_commits) < 2:
            return None
        newest, before = self.newest_commits
        span_ms = newest.decided_at_ms - before.decided_at_ms
        if span_ms <= 0 or newest.lineage != before.lineage:
            return None
        acks = [ack for batch in newest.batches for ack in batch.acks]
        rows = {uid: sum(a.rows for a in acks if a.sink == uid) for uid in {ack.sink for ack in acks}}
        staging = {uid: sum(a.sync_ms or 0 for a in acks if a.sink == uid) for uid in rows}
        is_measured = any(batch.staging_ms is not None for batch in newest.batches)
        return Flow(
            span_ms,
            newest.decided_at_ms,
            _share(sum(batch.staging_ms or 0 for batch in newest.batches), span_ms) if is_measured else None,
            _share(sum(batch.held_ms or 0 for batch in newest.batches), span_ms) if is_measured else None,
            rows,
            self._read_between(before, newest),
            {uid: _share(took_ms, span_ms) for uid, took_ms in staging.items()},
        )

    def _read_between(self, before: Decision, newest: Decision) -> dict[str, int]:
        recorded = self.job.job_dir.find_fact(f"layout-{self.job.job_dir.history().log_began_in}")
        if recorded is None:
            return {}
        try:
            scans = PlanLayout.from_json(recorded).scans
            logged = [LoggedOffsets.parse(one.offsets_text).sources for one in (before, newest)]
        except (ValueError, FlinkishError):
            return {}
        found: dict[str, int] = {}
        if any(len(positions) != len(scans) for positions in logged):
            return {}
        for scan, begin, end in zip(scans, *logged, strict=True):
            if scan.role is ScanRole.RECORDS and isinstance(end, dict):
                count = _records_between(begin, end)
                # A source that is scanned several times counts each record once.
                if count is not None:
                    found[source_of(scan.uid)] = max(count, found.get(source_of(scan.uid), 0))
        return found

    @cached_property
    def watermarks_ms(self) -> dict[str, int | None]:
        """Watermarks at the newest complete checkpoint by operator; None for an operator without one yet."""
        times = self.newest_commits[0].times if self.newest_commits else None
        if times is None:
            return {}
        known = {uid: one.watermark_ms for uid, one in times.operators.items()}
        return {
            uid: None if watermark_ms == MIN_WATERMARK_MS else watermark_ms
            for uid, watermark_ms in (known or {"": times.watermark_ms}).items()
        }

    def watermark_of(self, vertex: JobVertex) -> int | None:
        found = [self.watermarks_ms.get(one.uid) for one in vertex.operators if one.uid in self.watermarks_ms]
        known = [watermark_ms for watermark_ms in found if watermark_ms is not None]
        return min(known) if known and len(known) == len(found) else None

    def lag_ms(self, watermark_ms: int | None) -> int | None:
        if watermark_ms is None or watermark_ms == MAX_WATERMARK_MS or not self.newest_commits:
            return None
        return max(0, self.newest_commits[0].decided_at_ms - watermark_ms)

    def sinks_of(self, vertex: JobVertex) -> list[str]:
        return [one.uid for one in vertex.operators if one.kind is OperatorKind.SINK]

    def sources_of(self, vertex: JobVertex) -> list[str]:
        return [one.uid for one in vertex.operators if one.kind is OperatorKind.SOURCE]

    def shares_of(self, vertex: JobVertex) -> tuple[float | None, float | None]:
        """Return the shares of the time in which a vertex was busy, and was held back."""
        flow = self.flow
        if flow is None or self.status is not JobStatus.RUNNING:
            return None, None
        sinks = self.sinks_of(vertex)
        if len(sinks) == len(vertex.operators):
            return max((flow.sink_busy.get(uid, 0.0) for uid in sinks), default=None), 0.0
        return flow.busy, flow.back_pressured


def _share(part_ms: int, span_ms: int) -> float:
    return round(min(1.0, part_ms / span_ms), 3)


def _records_between(begin: Any, end: Mapping[str, Any]) -> int | None:
    """Return the number of topic offsets between two positions; None if a position has no topics."""
    first, total, is_known = begin if isinstance(begin, dict) else {}, 0, False
    for topic, partitions in offsets_in(end).items():
        if not isinstance(partitions, dict):
            return None
        known = first.get(topic, {})
        for partition, offset in partitions.items():
            since = known.get(partition, offset)
            if not isinstance(offset, int) or not isinstance(since, int):
                return None
            total, is_known = total + max(0, offset - since), True
    return total if is_known else None
