"""Reporters, which tell other systems how a job is, and the threads in which they do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flinkish_spark.checkpoint.hooks import QuietListener
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.client import ExecutionListener
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.job.stored_job import StoredJob
from flinkish_spark.protocol.statistics import CheckpointStatus

if TYPE_CHECKING:
    from flinkish_spark.job.client import JobExecutionResult
    from flinkish_spark.planning.sink_rows import PlannedJob
    from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
    from flinkish_spark.protocol.job_status import Change
    from flinkish_spark.protocol.statistics import CheckpointStatistics, StatisticsHistory

LOG = logging.getLogger(__name__)
#: How often reporters are told although nothing has happened: uptime goes on. In a bucket a look has a price.
_IDLE_S, _IDLE_IN_BUCKET_S = 10.0, 60.0
#: Changes come in groups: those that follow so soon are told of together.
_TOGETHER_S = 0.2
#: How long the end of a job may take because of its reporters.
_LAST_REPORT_MS = 10_000


@dataclass(frozen=True)
class ReportedJob:
    """The execution that a reporter tells of."""

    name: str
    sources: Sequence[SourceNode] = ()
    #: Returns what it runs; None until its checks have passed.
    planned: Callable[[], PlannedJob | None] = lambda: None


class Reporter:
    """Tells another system how a job is, in a thread of its own, which is none of the job's.

    What it raises in `report` is logged and changes nothing. A job never waits for a reporter but for its
    last report, and for that ten seconds at most.
    """

    def open(self, job: ReportedJob) -> None:
        """Connect; called before the job is submitted, in the user's thread.

        Raises
        ------
        FlinkishError
            It cannot work: the job is refused.
        """

    def report(self, snapshot: JobSnapshot) -> None:
        """Tell how the job is: behind each checkpoint and each change of its status, and every ten seconds.

        In a job directory that is a bucket every minute, since a look has its price there.
        """

    def close(self) -> None:
        """Say the last and disconnect; called once the job has ended, also where it was refused."""


class EndedCheckpoints:
    """Tells of each checkpoint of this execution once, when it has ended."""

    def __init__(self) -> None:
        self._since_ms = SystemClock().wall_ms()
        self._told: set[int] = set()

    def new_in(self, history: StatisticsHistory) -> list[CheckpointStatistics]:
        ended = [one for one in history.entries if one.status is not CheckpointStatus.IN_PROGRESS]
        found = [
            one
            for one in ended
            # What an earlier process began is told of by that one, or by nobody.
            if one.trigger_at_ms >= self._since_ms and int(one.checkpoint) not in self._told
        ]
        self._told = {int(one.checkpoint) for one in ended}
        return found


class _Telling:
    """One reporter and its thread: a system that hangs keeps no other from being told."""

    def __init__(self, reporter: Reporter, place: StoreSpec) -> None:
        self.reporter, self._place = reporter, place
        #: Set when something has happened, and when the job has ended.
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
                # Before its first start has written who it is.
                return
        self.reporter.report(JobSnapshot(str(self._job.uuid), self._job))

    def _safely(self, call: Callable[[], None], what: str) -> None:
        try:
            call()
        except Exception as error:
            LOG.warning("%s could not be %s: %s", type(self.reporter).__name__, what, error)
            LOG.debug("the trace", exc_info=True)


class Reporting(QuietListener, ExecutionListener):
    """Has the reporters of one execution told."""

    def __init__(self, place: StoreSpec, reporters: Sequence[Reporter]) -> None:
        self._tellings = [_Telling(reporter, place) for reporter in reporters]
        self._opened: list[_Telling] = []

    def begin(self, job: ReportedJob) -> None:
        """Open all reporters; where one refuses, :meth:`end` closes those that are open."""
        for one in self._tellings:
            one.reporter.open(job)
            one.thread.start()
            self._opened.append(one)

    def end(self) -> None:
        """Have the last report made; waits for it, but not for long. A second call does nothing."""
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
        # The last report is made before whoever waits for the job's end goes on.
        self.end()
