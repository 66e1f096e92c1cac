"""A running job, as its environment hands it out."""

from __future__ import annotations

import threading

from flinkish_spark.answers import Asked, CheckpointAnswer, PendingAnswer
from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.job_status import JobStatus, TaskState
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.protocol.statistics_history import StatisticsHistory
from flinkish_spark.runtime.settings import JobProgress
from flinkish_spark.runtime.supervisor import Supervisor


class JobClient:
    """A running job, as `execute_async` returns it.

    Every method may be called by any thread, at any time.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="flinkish-supervisor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except BaseException as error:
            self._failure = error

    # -- looking --------------------------------------------------------------------------------
    @property
    def progress(self) -> JobProgress:
        """Counters of this process's part of the job."""
        return self._supervisor.progress

    @property
    def status(self) -> JobStatus:
        """What the job does."""
        return self._supervisor.states.status

    @property
    def tasks(self) -> dict[str, TaskState]:
        """What its sources, operators and sinks do, by uid."""
        return self._supervisor.states.tasks

    @property
    def statistics(self) -> StatisticsHistory:
        """Return what checkpoints cost so far: a history with a bound, and a summary."""
        return self._supervisor.statistics

    @property
    def is_running(self) -> bool:
        """Whether the job has not ended; also true while it restarts."""
        return self._thread.is_alive()

    # -- checkpoints ----------------------------------------------------------------------------
    def trigger_checkpoint(self) -> PendingAnswer:
        """Ask for a checkpoint now. Returns at once; the answer says its id, or why there is none."""
        return self._ask(CheckpointPurpose.USER, "")

    def trigger_savepoint(self, target: str) -> PendingAnswer:
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

    def stop_with_savepoint(self, target: str) -> PendingAnswer:
        """Take a savepoint and stop behind its barrier; nothing behind it is committed.

        If the savepoint fails the job does not stop: it goes back to its last checkpoint.
        """
        return self._ask(CheckpointPurpose.FINAL_SAVEPOINT, _target(target))

    def _ask(self, purpose: CheckpointPurpose, target: str) -> PendingAnswer:
        pending = PendingAnswer()
        self._supervisor.ask(Asked(purpose, pending.resolve, target=target))
        return pending

    # -- ending ---------------------------------------------------------------------------------
    def stop_with_checkpoint(self) -> None:
        """Take a last checkpoint, commit it everywhere, and stop. Returns at once; see `wait`."""
        self._supervisor.stop_with_checkpoint()

    def cancel(self) -> None:
        """Stop at once. What was staged is finished or given up by the next start."""
        self._supervisor.cancel()

    def wait(self, timeout_ms: int | None = None) -> bool:
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
        self._thread.join(None if timeout_ms is None else timeout_ms / 1000)
        if self._failure is not None:
            raise self._failure
        return not self._thread.is_alive()


def wait_for(pending: PendingAnswer, timeout_ms: int) -> CheckpointAnswer:
    """Return the answer of a request.

    Raises
    ------
    TimeoutError
        None has come within `timeout_ms`; the request is not taken back.
    """
    answer = pending.wait(timeout_ms)
    if answer is None:
        raise TimeoutError(f"no answer within {timeout_ms} ms")
    return answer


def _target(path: str) -> str:
    text = path.removeprefix("file://")
    if not text.startswith("/"):
        raise ConfigError(
            f"a savepoint cannot be written to {path!r}",
            why="it must be an absolute path on a file system that driver and executors share",
            what_to_do="give an absolute path",
        )
    return text
