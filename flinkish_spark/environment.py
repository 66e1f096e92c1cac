"""The entry point: an environment collects the stream graph and executes it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flinkish_spark.clock import SystemClock
from flinkish_spark.config import CheckpointConfig, require_positive
from flinkish_spark.datastream import DataStream
from flinkish_spark.errors import ConfigError, GraphError
from flinkish_spark.graph.declared import check_max_parallelism
from flinkish_spark.graph.stream_graph import SourceNode, StreamGraph
from flinkish_spark.protocol.ids import checked_name
from flinkish_spark.protocol.restart import ExponentialDelay, RestartStrategy
from flinkish_spark.runtime.settings import JobProgress, JobSettings
from flinkish_spark.runtime.steps import Observer, SilentObserver
from flinkish_spark.runtime.supervisor import Supervisor
from flinkish_spark.sources.base import Source
from flinkish_spark.sources.dataframe import DataFrameSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFAULT_MAX_PARALLELISM = 128


class JobClient:
    """A running job, as `execute_async` returns it."""

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

    @property
    def progress(self) -> JobProgress:
        """Counters of this process's part of the job."""
        return self._supervisor.progress

    @property
    def is_running(self) -> bool:
        """Whether the job has not ended; also true while it restarts."""
        return self._thread.is_alive()

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


class StreamExecutionEnvironment:
    """Collects sources, operators and sinks of one job, and runs them as one Spark query.

    Parameters
    ----------
    spark
        A classic SparkSession with the JARs of `configure_spark_with_jars`.
    job
        Name of the job; fixed for the life of `job_dir`.
    job_dir
        Absolute path of the job's own directory: checkpoints, state, decisions. One job, one
        directory; created at the first start.
    checkpoint
        When checkpoints are taken.
    restart_strategy
        What happens after a failure that a restart may mend.
    max_parallelism
        Number of key groups of operators that name none.
    trigger_interval_ms
        Least time between the starts of two micro-batches; 0 for as fast as possible.

    Raises
    ------
    ConfigError
        A setting cannot be used.

    Examples
    --------
    See `demo/app.py` for a whole job.
    """

    def __init__(
        self,
        spark: SparkSession,
        job: str,
        job_dir: str,
        *,
        checkpoint: CheckpointConfig | None = None,
        restart_strategy: RestartStrategy | None = None,
        max_parallelism: int = DEFAULT_MAX_PARALLELISM,
        trigger_interval_ms: int = 0,
    ) -> None:
        try:
            checked_name(job, "job name")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        check_max_parallelism(max_parallelism)
        if trigger_interval_ms:
            require_positive("trigger_interval_ms", trigger_interval_ms)
        self.spark = spark
        self.job = job
        self.job_dir = _local_path(job_dir)
        self.checkpoint = checkpoint or CheckpointConfig()
        self.restart_strategy: RestartStrategy = restart_strategy or ExponentialDelay()
        self.max_parallelism = max_parallelism
        self.trigger_interval_ms = trigger_interval_ms
        self.graph = StreamGraph()
        self._observer: Observer = SilentObserver()

    def from_source(self, source: Source, *, uid: str) -> DataStream:
        """Add a source, for example a KafkaSource.

        Parameters
        ----------
        uid
            Stable name of this source in this job.
        """
        if not isinstance(source, Source):
            raise GraphError(
                f"from_source() got a {type(source).__name__}", what_to_do="give it a KafkaSource"
            )
        node = SourceNode(self.graph.check_uid(uid), source)
        self.graph.sources.append(node)
        return DataStream(self, node)

    def from_dataframe(self, frame: DataFrame, *, uid: str) -> DataStream:
        """Add a streaming DataFrame that you already have.

        Raises
        ------
        GraphError
            It cannot be replayed, or keeps state of Spark's own (aggregates, dropDuplicates,
            watermarks, limits, joins of two streams).
        """
        return self.from_source(DataFrameSource(frame), uid=uid)

    def execute_async(self) -> JobClient:
        """Start the job and return at once; for notebooks and services."""
        return JobClient(self._supervisor())

    def execute(self) -> None:
        """Run the job until it ends; SIGTERM and Ctrl-C stop it with a last checkpoint.

        Raises
        ------
        FlinkishError
            The job was refused, or failed for good. Everything up to the last checkpoint is
            committed, nothing behind it is visible.
        """
        client = self.execute_async()
        with _stop_signals(client):
            while not client.wait(timeout_ms=200):
                pass

    def observe(self, observer: Observer) -> None:
        """Let `observer` watch the steps of the checkpoints; see `runtime.steps`."""
        self._observer = observer

    def _supervisor(self) -> Supervisor:
        partitions: Any = self.spark.conf.get("spark.sql.shuffle.partitions")
        settings = JobSettings(
            name=self.job,
            root=self.job_dir,
            checkpoint=self.checkpoint,
            restart=self.restart_strategy,
            trigger_ms=self.trigger_interval_ms,
            shuffle_partitions=int(partitions),
            clock=SystemClock(),
            observer=self._observer,
        )
        return Supervisor(self.spark, self.graph, settings)


def _local_path(text: str) -> Path:
    path = Path(text.removeprefix("file://"))
    if "://" in str(text).removeprefix("file://") or not path.is_absolute():
        raise ConfigError(
            f"the job_dir {text!r} cannot be used",
            why="it must be an absolute path on a file system that driver and executors share; "
            "half of the code runs in other processes",
            what_to_do="give an absolute path",
        )
    return path


@contextlib.contextmanager
def _stop_signals(client: JobClient) -> Iterator[None]:
    """Turn SIGTERM and SIGINT into a stop with checkpoint, where this thread may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        client.stop_with_checkpoint()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
