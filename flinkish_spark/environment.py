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
from flinkish_spark.hooks import MasterHook
from flinkish_spark.job_client import JobClient
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.ids import checked_name
from flinkish_spark.protocol.restart import ExponentialDelay, RestartStrategy
from flinkish_spark.runtime.listeners import JobListener
from flinkish_spark.runtime.master_hooks import MasterHooks, UnknownHookState
from flinkish_spark.runtime.settings import JobSettings, Standby
from flinkish_spark.runtime.spark_engine import SparkEngine
from flinkish_spark.runtime.steps import Observer, SilentObserver
from flinkish_spark.runtime.supervisor import Supervisor
from flinkish_spark.runtime.threads import SystemThreads
from flinkish_spark.savepoints.settings import RestoreSettings
from flinkish_spark.sources.base import Source
from flinkish_spark.sources.dataframe import DataFrameSource
from flinkish_spark.store import LocalStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFAULT_MAX_PARALLELISM = 128


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
    restore
        A savepoint that a new `job_dir` begins with. Later starts go on from the job's own checkpoints.
    standby
        What to do while another driver owns `job_dir`: refuse to start, or wait until its process
        has ended and take the job over.
    unknown_hook_state
        Whether to start from a checkpoint with the state of a master hook that is not added.

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
        restore: RestoreSettings | None = None,
        standby: Standby = Standby.REFUSE,
        unknown_hook_state: UnknownHookState = UnknownHookState.REFUSE,
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
        self.restore, self.standby = restore, standby
        self._hooks = MasterHooks(unknown=unknown_hook_state)
        self._listeners: list[JobListener] = []
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

    def add_master_hook(self, hook: MasterHook) -> None:
        """Let a system outside Spark take part in every checkpoint; before `execute`.

        Raises
        ------
        ConfigError
            It is no hook, or its name cannot be used or is taken.
        """
        self._hooks.add(hook)

    def add_listener(self, listener: JobListener) -> None:
        """Tell `listener` of status changes and of complete and aborted checkpoints."""
        self._listeners.append(listener)

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
            threads=SystemThreads(),
            observer=self._observer,
            hooks=self._hooks,
            listeners=tuple(self._listeners),
            standby=self.standby,
            restore=self.restore,
        )
        job_dir = JobDir(LocalStore(settings.root))
        return Supervisor(SparkEngine(self.spark, self.graph, settings, job_dir), settings, job_dir)


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
