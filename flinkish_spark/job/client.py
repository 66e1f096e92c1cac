"""A running job, as its environment hands it out."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from flinkish_spark.checkpoint.answers import CheckpointTriggerRequest, PendingAnswer
from flinkish_spark.checkpoint.event_time import LatencyTracker
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.core.remote_store import requests_of_this_process
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.validation import to_ms, to_path
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
from flinkish_spark.protocol.limits import MOST_MS
from flinkish_spark.protocol.lineage import Tables
from flinkish_spark.protocol.statistics import StatisticsHistory

LOG = logging.getLogger(__name__)
#: Time limit from the job's last status to its end: it releases the lock and closes the hooks.
_GIVING_BACK_S = 10


@dataclass(frozen=True)
class JobExecutionResult:
    """The result of an execution that succeeded; named as in Flink.

    Parameters
    ----------
    job_id
        Id of the job, the same for the life of its directory: 32 hexadecimal digits.
    status
        FINISHED, CANCELED, or SUSPENDED where the job goes on at its next start.
    net_runtime_ms
        How long this execution took, restarts included.
    accumulators
        Values by name at the last checkpoint, accumulated since the first start.
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
        """Return the final value of an accumulator.

        Raises
        ------
        KeyError
            No function has added to one of that name.
        """
        return self.accumulators[name]

    def get_all_accumulator_results(self) -> dict[str, Any]:
        """Return the final values of all accumulators, by name."""
        return dict(self.accumulators)


class ExecutionListener:
    """A listener for the submission and the end of a job, to derive from; Flink's `JobListener`.

    An exception that it raises is logged and has no other effect.
    """

    def on_job_submitted(self, client: JobClient | None, error: BaseException | None) -> None:
        """React to a submitted job, or to the error of its submission; called by the submitting thread."""

    def on_job_executed(self, result: JobExecutionResult | None, error: BaseException | None) -> None:
        """React to the end of an execution; called by a thread of the job, with the error if it failed."""


class JobPage(Protocol):
    """The web page of a job, served by the job's process."""

    @property
    def url(self) -> str: ...

    @property
    def link(self) -> str:
        """The URL with the token that changes need: whoever has it may stop the job."""

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
        self._run_id = str(uuid.uuid4())
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
        """Record how the job ended; ignore later results from the threads of a job that was given up."""
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
        """Status of the job."""
        return self._supervisor.states.status

    @property
    def vertices(self) -> tuple[VertexStatus, ...]:
        """The vertices of the job graph with their states, in topological order.

        Examples
        --------
        >>> [(one.name, one.state.value) for one in client.vertices]  # doctest: +SKIP
        [('Source: orders -> map cents', 'RUNNING'), ('totals', 'RUNNING'), ('Sink: out', 'RUNNING')]
        """
        return self._supervisor.states.vertices

    @property
    def tasks(self) -> dict[str, TaskState]:
        """States of the tasks by operator uid; operators of one vertex share its state."""
        return {one: vertex.state for vertex in self.vertices for one in vertex.operators}

    @property
    def statistics(self) -> StatisticsHistory:
        """Return the statistics of the checkpoints so far: a bounded history, and a summary."""
        return self._supervisor.statistics

    @property
    def job_id(self) -> str:
        """Id of the job, the same for the life of its directory; empty until its first start."""
        return self._supervisor.job_id

    def get_accumulators(self) -> dict[str, Any]:
        """Return accumulator values by name at the newest confirmed checkpoint, since the first start.

        Examples
        --------
        >>> client.get_accumulators()  # doctest: +SKIP
        {'broken': 3, 'orders': 1200}
        """
        return dict(self.progress.accumulators)

    def get_job_execution_result(self) -> JobExecutionResult:
        """Wait for the end of the job, and return its result.

        Raises
        ------
        FlinkishError
            The job failed.
        """
        self.wait()
        return self._result()

    @property
    def latencies(self) -> Latencies:
        """Return the latencies that this process has measured so far, by source, operator and subtask.

        Empty in an environment without `latency_tracking_interval_ms`.

        Examples
        --------
        >>> client.latencies.of("totals").quantile_ms(0.99)  # doctest: +SKIP
        640
        """
        return Latencies() if self._latencies is None else self._latencies.latencies

    @property
    def is_running(self) -> bool:
        """Return True until the job has ended, also while it restarts."""
        return not self._ended.is_set()

    def has_ended(self) -> bool:
        """Return True if the job has ended and released its directory; wait if it is just releasing it."""
        if self.status.is_terminal and not self._is_told_by_this_thread():
            self._ended.wait(_GIVING_BACK_S)
        return self._ended.is_set()

    def trigger_checkpoint(self) -> PendingAnswer:
        """Trigger a checkpoint. Returns at once; the future answer has its id, or why there is none."""
        return self._ask(CheckpointPurpose.USER, "")

    def trigger_savepoint(self, target: str | os.PathLike[str]) -> PendingAnswer:
        """Trigger a savepoint: a complete checkpoint, exported to a directory of yours. Returns at once.

        Parameters
        ----------
        target
            Absolute path of a directory that does not exist or is empty.
        """
        return self._ask(CheckpointPurpose.SAVEPOINT, _target(target))

    @check_arguments("target")
    def stop_with_savepoint(
        self, target: str | os.PathLike[str], mode: StopMode = StopMode.SUSPEND
    ) -> PendingAnswer:
        """Take a savepoint and stop at its barrier; no record after the barrier is committed.

        If the savepoint fails, the job does not stop: it restarts from its last checkpoint.

        Parameters
        ----------
        target
            As of :meth:`trigger_savepoint`.
        mode
            With `StopMode.DRAIN` the watermark rises to its maximum after the last records: all event-time
            timers and windows fire, and their results are committed with the savepoint.
        """
        return self._ask(mode.purpose, _target(target))

    def _ask(self, purpose: CheckpointPurpose, target: str) -> PendingAnswer:
        pending = PendingAnswer()
        self._supervisor.control.ask(CheckpointTriggerRequest(purpose, pending.resolve, target))
        return pending

    @check_arguments("checkpoint")
    def rewind(self, checkpoint: CheckpointId | int, tables: Tables = Tables.KEEP) -> PendingRewind:
        """Order the job to restart from a retained checkpoint. Returns at once.

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
        return self._supervisor.order_rewind(target, tables)

    def pause_periodic_checkpoints(self) -> None:
        """Trigger no periodic checkpoints until they are resumed, not even after a restart of the query.

        Requested checkpoints are still taken, and those that the job itself needs: with too many undecided
        micro-batches the stream would stand still.
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
        """Number of requests of this process to buckets, by kind; empty if the job directory is on a disk.

        Requests for Spark's own files and by tasks on executors are not counted. A request that the store's
        client retries counts once.

        Examples
        --------
        >>> client.store_requests  # doctest: +SKIP
        {'read': 120, 'put': 31, 'create': 44, 'list': 60, 'delete': 12, 'copy': 0}
        """
        return requests_of_this_process()

    def cancel(self) -> None:
        """Stop at once. The next start commits or aborts what was staged.

        The running micro-batch with its functions, or a running commit, is interrupted; `CancellationConfig`
        says what happens if it does not end.
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
        self._refuse_own_thread()
        has_ended = self._ended.wait(None if timeout_ms is None else to_ms("timeout_ms", timeout_ms) / 1000)
        if has_ended and self._failure is not None:
            raise self._failure
        return has_ended

    # The words of Spark's StreamingQuery, for programs that have them:
    @property
    def name(self) -> str:
        """Name of the job; Spark's word."""
        return self._supervisor.name

    @property
    def id(self) -> str:
        """Id of the job, the same for the life of its directory; Spark's word for `job_id`."""
        return self.job_id

    @property
    def runId(self) -> str:
        """Id of this execution, another one at each start of the program; Spark's word."""
        return self._run_id

    @property
    def isActive(self) -> bool:
        """Return True until the job has ended; Spark's word for `is_running`."""
        return self.is_running

    @property
    def lastProgress(self) -> dict[str, Any] | None:
        """The newest figures of `progress`, under its names, as a dict; None before the first micro-batch."""
        progress = self.progress
        ids = {"id": self.id, "runId": self.runId, "name": self.name}
        return {**ids, **vars(progress)} if progress.batches else None

    @property
    def recentProgress(self) -> list[dict[str, Any]]:
        """A list with `lastProgress` alone: earlier figures are kept in `statistics`."""
        return [one for one in (self.lastProgress,) if one is not None]

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        """Wait for the end of the job, for `timeout` seconds at most; Spark's word for `wait`.

        Returns
        -------
        bool | None
            None without a time-out, otherwise whether the job has ended.

        Raises
        ------
        FlinkishError
            The job failed.
        """
        if timeout is None:
            self.wait()
            return None
        return self.wait(round(min(timeout * 1000, MOST_MS)))

    def exception(self) -> BaseException | None:
        """Return the error that ended the job; None if it runs or was stopped. Spark's word."""
        return self._failure if self._ended.is_set() else None

    def stop(self) -> None:
        """Take a last checkpoint, stop, and wait for the end; the next start goes on. Spark's word.

        An error that ends the job meanwhile is not raised: :meth:`exception` has it.
        """
        self._refuse_own_thread()
        self.stop_with_checkpoint()
        self._ended.wait()

    def _refuse_own_thread(self) -> None:
        if self._is_told_by_this_thread():
            raise RuntimeError("a listener cannot wait for the end of the job that calls it")

    def _is_told_by_this_thread(self) -> bool:
        return threading.current_thread() in (self._thread, self._teller)


def call_listener(tell: Callable[..., None], *what: Any) -> None:
    """Call a method of the user's listener, and log its exceptions."""
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
