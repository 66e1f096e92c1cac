"""A running job, as its environment hands it out."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from flinkish_spark.checkpoint.answers import Asked, PendingAnswer
from flinkish_spark.checkpoint.event_time import LatencyTracker
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.object_store import requests_of_this_process
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.validation import instance_of, to_ms, to_path
from flinkish_spark.job.engine import JobProgress
from flinkish_spark.job.requests import StopMode
from flinkish_spark.job.rewind import PendingRewind
from flinkish_spark.job.supervisor import Supervisor
from flinkish_spark.protocol.checkpoint import Schedule
from flinkish_spark.protocol.durations import Duration
from flinkish_spark.protocol.html import html_table
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.job_status import JobStatus, TaskState, VertexStatus
from flinkish_spark.protocol.latency import Latencies
from flinkish_spark.protocol.lineage import Tables
from flinkish_spark.protocol.statistics import StatisticsHistory

LOG = logging.getLogger(__name__)
#: How long the end of a job may take behind its last status: it gives up the lock and closes the hooks.
_GIVING_BACK_S = 10


@dataclass(frozen=True)
class JobExecutionResult:
    """What came of an execution that has ended well; names as in Flink.

    Parameters
    ----------
    job_id
        Of the job, for the life of its directory: 32 hexadecimal digits.
    status
        FINISHED, CANCELED, or SUSPENDED where the job goes on at its next start.
    net_runtime_ms
        How long this execution took, restarts included.
    accumulators
        What they held at the last checkpoint, since the job began, by name.
    """

    job_id: str
    status: JobStatus
    net_runtime_ms: int
    accumulators: Mapping[str, Any]

    def _repr_html_(self) -> str:
        facts = [("took", f"{self.net_runtime_ms} ms"), *sorted(self.accumulators.items())]
        return html_table(facts, caption=f"Job {self.job_id}: {self.status.value}")

    def get_job_id(self) -> str:
        """Return the job's id."""
        return self.job_id

    def get_net_runtime(self) -> int:
        """Return how long this execution took, in milliseconds."""
        return self.net_runtime_ms

    def get_accumulator_result(self, name: str) -> Any:
        """Return what an accumulator held at the end.

        Raises
        ------
        KeyError
            No function has added to one of that name.
        """
        return self.accumulators[name]

    def get_all_accumulator_results(self) -> dict[str, Any]:
        """Return what all of them held, by name."""
        return dict(self.accumulators)


class ExecutionListener:
    """Told when a job is submitted and when its execution has ended; derive from it. Flink's `JobListener`.

    What it raises is logged, and changes nothing.
    """

    def on_job_submitted(self, client: JobClient | None, error: BaseException | None) -> None:
        """Note a job that was submitted, or the error if it was refused at once; called by who submits it."""

    def on_job_executed(self, result: JobExecutionResult | None, error: BaseException | None) -> None:
        """Note the end of an execution; called by a thread of the job, with the error if it failed."""


class JobPage(Protocol):
    """The page of a job, served by its process."""

    @property
    def url(self) -> str: ...

    @property
    def link(self) -> str:
        """The same with the token that changes need: whoever has it may stop the job."""

    def stop(self) -> None: ...


class JobClient:
    """A running job, as `execute_async` returns it.

    Every method may be called by any thread, at any time.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        latencies: LatencyTracker | None = None,
        listeners: Sequence[ExecutionListener] = (),
        ui: JobPage | None = None,
    ) -> None:
        self._ui = ui
        self._supervisor, self._latencies, self._listeners = supervisor, latencies, tuple(listeners)
        self._failure: BaseException | None = None
        self._clock, self._ended_ms = SystemClock(), 0
        self._began_ms = self._clock.monotonic_ms()
        self._ends, self._ended = threading.Lock(), threading.Event()
        #: Who tells the listeners.
        self._teller: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="flinkish-supervisor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._supervisor.run(self._end)
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, failure: BaseException | None) -> None:
        """Note how the job has ended; of a job that was left, what its threads come to counts no more."""
        if not self._ends.acquire(blocking=False):
            return
        self._failure, self._ended_ms = failure, self._clock.monotonic_ms()
        result = self._result() if failure is None else None
        self._teller = threading.current_thread()
        for listener in self._listeners:
            call_listener(listener.on_job_executed, result, failure)
        self._ended.set()

    def _result(self) -> JobExecutionResult:
        took_ms = self._ended_ms - self._began_ms
        return JobExecutionResult(self.job_id, self.status, took_ms, self.get_accumulators())

    @property
    def ui(self) -> JobPage | None:
        """The page of the job, if this process serves one: `execute_async(ui=True)`.

        Examples
        --------
        >>> client.ui.url  # doctest: +SKIP
        'http://127.0.0.1:43127/'
        """
        return self._ui

    def _repr_html_(self) -> str:
        progress, page = self.progress, self._ui
        facts: list[tuple[str, object]] = [
            ("restarts", progress.restarts),
            ("micro-batches", progress.batches),
            ("checkpoints", progress.checkpoints),
            *((f"rows of {uid}", rows) for uid, rows in progress.rows_by_sink.items()),
            *((one.name, one.state.value) for one in self.vertices),
        ]
        if progress.last_error:
            facts.append(("last error", progress.last_error))
        found = html_table(facts, caption=f"Job {self.job_id}: {self.status.value}")
        if page is None:
            return found
        link = f'<a href="{escape(page.link)}" target="_blank" rel="noopener">{escape(page.url)}</a>'
        return f"{found}<p>Its page is {link}</p>"

    @property
    def progress(self) -> JobProgress:
        """Counters of this process's part of the job."""
        return self._supervisor.progress

    @property
    def status(self) -> JobStatus:
        """What the job does."""
        return self._supervisor.states.status

    @property
    def vertices(self) -> tuple[VertexStatus, ...]:
        """Where the vertices of the job graph stand, each behind what it reads.

        Examples
        --------
        >>> [(one.name, one.state.value) for one in client.vertices]  # doctest: +SKIP
        [('Source: orders -> map cents', 'RUNNING'), ('totals', 'RUNNING'), ('Sink: out', 'RUNNING')]
        """
        return self._supervisor.states.vertices

    @property
    def tasks(self) -> dict[str, TaskState]:
        """What its operators do, by uid: each what its vertex does."""
        return {one: vertex.state for vertex in self.vertices for one in vertex.operators}

    @property
    def statistics(self) -> StatisticsHistory:
        """Return what checkpoints cost so far: a history with a bound, and a summary."""
        return self._supervisor.statistics

    @property
    def job_id(self) -> str:
        """The job's id, for the life of its directory; empty until its first start has got one."""
        return self._supervisor.job_id

    def get_accumulators(self) -> dict[str, Any]:
        """Return what accumulators held at the newest confirmed checkpoint, since the job began, by name.

        Examples
        --------
        >>> client.get_accumulators()  # doctest: +SKIP
        {'broken': 3, 'orders': 1200}
        """
        return dict(self.progress.accumulators)

    def get_job_execution_result(self) -> JobExecutionResult:
        """Wait for the end of the job, and return what came of it.

        Raises
        ------
        FlinkishError
            The job failed.
        """
        self.wait()
        return self._result()

    @property
    def latencies(self) -> Latencies:
        """Return what latency markers have measured so far in this process, by source, operator and subtask.

        Empty in an environment without `latency_tracking_interval_ms`.

        Examples
        --------
        >>> client.latencies.of("totals").quantile_ms(0.99)  # doctest: +SKIP
        640
        """
        return Latencies() if self._latencies is None else self._latencies.latencies

    @property
    def is_running(self) -> bool:
        """Return whether the job has not ended; also true while it restarts."""
        return not self._ended.is_set()

    def has_ended(self) -> bool:
        """Return whether the job has ended and given its directory back; waits while it is just doing so."""
        if self.status.is_terminal and not self._is_told_by_this_thread():
            self._ended.wait(_GIVING_BACK_S)
        return self._ended.is_set()

    def trigger_checkpoint(self) -> PendingAnswer:
        """Ask for a checkpoint now. Returns at once; the answer says its id, or why there is none."""
        return self._ask(CheckpointPurpose.USER, "")

    def trigger_savepoint(self, target: str | os.PathLike[str]) -> PendingAnswer:
        """Ask for a savepoint: a complete checkpoint in a directory of yours. Returns at once.

        Parameters
        ----------
        target
            Absolute path of a directory that does not exist or is empty.

        Raises
        ------
        ConfigError
            The path cannot be used.
        """
        return self._ask(CheckpointPurpose.SAVEPOINT, _target(target))

    def stop_with_savepoint(
        self, target: str | os.PathLike[str], mode: StopMode = StopMode.SUSPEND
    ) -> PendingAnswer:
        """Take a savepoint and stop behind its barrier; nothing behind it is committed.

        If the savepoint fails the job does not stop: it goes back to its last checkpoint.

        Parameters
        ----------
        target
            As of :meth:`trigger_savepoint`.
        mode
            With `StopMode.DRAIN` event time comes to its end behind the last records: all event-time timers
            and windows fire, and what they emit is committed with the savepoint.

        Raises
        ------
        ConfigError
            The path cannot be used, or `mode` is none.
        """
        instance_of("mode", mode, StopMode, what_to_do="give StopMode.SUSPEND or StopMode.DRAIN")
        return self._ask(mode.purpose, _target(target))

    def _ask(self, purpose: CheckpointPurpose, target: str) -> PendingAnswer:
        pending = PendingAnswer()
        self._supervisor.control.ask(Asked(purpose, pending.resolve, target))
        return pending

    def rewind(self, checkpoint: CheckpointId | int, tables: Tables = Tables.KEEP) -> PendingRewind:
        """Order the job to go back to a retained checkpoint, and its query to start again. Returns at once.

        State, the positions of sources and their consumer groups become what they were then; every
        later checkpoint is left behind for good. Topics keep what was committed since: the header
        `flinkish-batch` of a record names its lineage, if the sink writes it (`RecordHeaders.BATCH`).

        Parameters
        ----------
        checkpoint
            One of this job's, from `statistics` or `flinkish checkpoints list`.
        tables
            Whether tables keep the rows that later checkpoints committed, or are restored, too.

        Raises
        ------
        ConfigError
            `checkpoint` or `tables` is none.
        RewindError
            The job cannot go back there, or another order waits; nothing was changed.

        Examples
        --------
        >>> client.rewind(3).wait(timeout_ms=60_000).state  # doctest: +SKIP
        <RewindState.DONE: 'DONE'>
        """
        target = _checkpoint(checkpoint)
        instance_of("tables", tables, Tables, what_to_do="give Tables.KEEP or Tables.RESTORE")
        return self._supervisor.order_rewind(target, tables)

    def pause_periodic_checkpoints(self) -> None:
        """Take no checkpoint by the timer until told to resume, also behind a restart of the query.

        Checkpoints that somebody asks for are taken, and those that the job needs itself: with too
        many undecided micro-batches the stream would stand still.
        """
        self._supervisor.control.schedule(Schedule.OFF)

    def resume_periodic_checkpoints(self) -> None:
        """Let the timer trigger again; the interval counts from the last checkpoint."""
        self._supervisor.control.schedule(Schedule.ON)

    def stop_with_checkpoint(self) -> None:
        """Take a last checkpoint, commit it everywhere, and stop. Returns at once; see `wait`."""
        self._supervisor.control.stop_with_checkpoint()

    @property
    def store_requests(self) -> dict[str, int]:
        """How many requests this process has made to buckets, by kind; none where job_dir is on a disk.

        Without those of Spark's own files, and of tasks on executors. What the store's client repeats counts
        once.

        Examples
        --------
        >>> client.store_requests  # doctest: +SKIP
        {'read': 120, 'put': 31, 'create': 44, 'list': 60, 'delete': 12, 'copy': 0}
        """
        return requests_of_this_process()

    def cancel(self) -> None:
        """Stop at once. What was staged is finished or given up by the next start.

        A micro-batch that runs is interrupted, with whatever its functions do, and so is a commit;
        `CancellationConfig` says what happens if they do not end.
        """
        self._supervisor.control.cancel()

    def wait(self, timeout_ms: Duration | None = None) -> bool:
        """Wait for the end of the job.

        Returns
        -------
        bool
            Whether it has ended.

        Raises
        ------
        FlinkishError
            The job failed.
        """
        if self._is_told_by_this_thread():
            raise RuntimeError("a listener cannot wait for the end of the job that tells it")
        has_ended = self._ended.wait(None if timeout_ms is None else to_ms("timeout_ms", timeout_ms) / 1000)
        if has_ended and self._failure is not None:
            raise self._failure
        return has_ended

    def _is_told_by_this_thread(self) -> bool:
        return threading.current_thread() in (self._thread, self._teller)


def call_listener(tell: Callable[..., None], *what: Any) -> None:
    """Tell a listener of the user's something; what it raises is logged."""
    try:
        tell(*what)
    except Exception:
        LOG.exception("a listener failed")


def _checkpoint(given: CheckpointId | int) -> CheckpointId:
    if isinstance(given, CheckpointId):
        return given
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(
            f"{given!r} is no checkpoint",
            why="the id of a checkpoint is a whole number from 1 on",
            what_to_do="choose one from `JobClient.statistics` or `flinkish checkpoints list`",
        )
    return CheckpointId(given)


def _target(path: str | os.PathLike[str]) -> str:
    path = to_path(path)
    text = path.removeprefix("file://") if isinstance(path, str) else ""
    if "://" in text:
        return StoreSpec.parse(text).url
    if not text.startswith("/") or "\0" in text:
        raise ConfigError(
            f"a savepoint cannot be written to {path!r}",
            why="it must be an absolute path on a file system that driver and executors share, or a URL",
            what_to_do='give an absolute path, or a URL like "s3://bucket/savepoints/7"',
        )
    return text
