"""The threads of reporters, which send the state of a job to other systems."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.client import JobExecutionResult
from flinkish_spark.job.face import ReportedJob, Reporter, Reporting
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.job.stored_job import StoredJob
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from flinkish_spark.protocol.job_status import Change
from flinkish_spark.protocol.statistics import CheckpointStatistics, CheckpointStatus, StatisticsHistory

LOG = logging.getLogger(__name__)
#: Report intervals without changes, since the uptime grows; longer in a bucket, where each look costs
#: requests.
_IDLE_S, _IDLE_IN_BUCKET_S = 10.0, 60.0
#: Changes within this time are reported together.
_TOGETHER_S = 0.2
#: Maximum delay of a job's end by its reporters.
_LAST_REPORT_MS = 10_000


class EndedCheckpoints:
    """Yields each ended checkpoint of this execution once."""

    def __init__(self) -> None:
        self._since_ms = SystemClock().wall_ms()
        self._told: set[int] = set()

    def new_in(self, history: StatisticsHistory) -> list[CheckpointStatistics]:
        ended = [one for one in history.entries if one.status is not CheckpointStatus.IN_PROGRESS]
        found = [
            one
            for one in ended
            # A checkpoint that an earlier process triggered is not this execution's.
            if one.trigger_at_ms >= self._since_ms and int(one.checkpoint) not in self._told
        ]
        self._told = {int(one.checkpoint) for one in ended}
        return found


class _ReporterThread:
    """One reporter with its thread, so that a system that hangs does not block the others."""

    def __init__(self, reporter: Reporter, place: StoreSpec) -> None:
        self.reporter, self._place = reporter, place
        #: Set after a change, and at the end of the job.
        self.news, self.over = threading.Event(), threading.Event()
        name = f"flinkish-{type(reporter).__name__}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._job: StoredJob | None = None

    def _run(self) -> None:
        idle_s = _IDLE_S if self._place.is_local else _IDLE_IN_BUCKET_S
        while not self.over.is_set():
            self.news.wait(idle_s)
            self.over.wait(_TOGETHER_S)
            self.news.clear()
            self._safely(self._report, "told")
        self._safely(self.reporter.close, "closed")

    def _report(self) -> None:
        if self._job is None:
            try:
                self._job = StoredJob.read(self._place)
            except FlinkishError:
                # The first start has not recorded the job yet.
                return
        self.reporter.report(JobSnapshot(str(self._job.uuid), self._job))

    def _safely(self, call: Callable[[], None], what: str) -> None:
        try:
            call()
        except Exception as error:
            LOG.warning("%s could not be %s: %s", type(self.reporter).__name__, what, error)
            LOG.debug("the trace", exc_info=True)


class ReporterGroup(Reporting):
    def __init__(self, place: StoreSpec, reporters: Sequence[Reporter]) -> None:
        self._tellings = [_ReporterThread(reporter, place) for reporter in reporters]
        self._opened: list[_ReporterThread] = []

    def begin(self, job: ReportedJob) -> None:
        for one in self._tellings:
            one.reporter.open(job)
            one.thread.start()
            self._opened.append(one)

    def end(self) -> None:
        for one in self._opened:
            one.over.set()
            one.news.set()
        until_ms = SystemClock().monotonic_ms() + _LAST_REPORT_MS
        while self._opened:
            one = self._opened.pop()
            one.thread.join(max(0, until_ms - SystemClock().monotonic_ms()) / 1_000)
            if one.thread.is_alive():
                LOG.warning("%s does not end: its last report may be lost", type(one.reporter).__name__)

    def _tell(self) -> None:
        for one in self._tellings:
            one.news.set()

    def on_taken_over(self, epoch: OwnerEpoch) -> None:
        self._tell()

    def on_change(self, change: Change) -> None:
        self._tell()

    def on_checkpoint_complete(self, checkpoint: CheckpointId) -> None:
        self._tell()

    def on_checkpoint_aborted(self, checkpoint: CheckpointId, newest: CheckpointId | None) -> None:
        self._tell()

    def on_job_executed(self, result: JobExecutionResult | None, error: BaseException | None) -> None:
        # The last report is sent before callers that wait for the job's end continue.
        self.end()
