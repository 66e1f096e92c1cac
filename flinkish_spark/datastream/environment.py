"""The entry point: an environment collects the stream graph and executes it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from flinkish_spark.bridge import session
from flinkish_spark.bridge.settings import find_submitted_settings
from flinkish_spark.checkpoint.event_time import LatencyTracker
from flinkish_spark.checkpoint.hooks import JobListener, MasterHooks, UnknownHookState
from flinkish_spark.checkpoint.ownership import JobLock
from flinkish_spark.connectors.collection import CollectionSource
from flinkish_spark.connectors.dataframe import DataFrameSource
from flinkish_spark.contracts.hooks import MasterHook
from flinkish_spark.contracts.manifest import Manifest
from flinkish_spark.contracts.source import Source, SourceNode
from flinkish_spark.core.clock import SystemClock, SystemThreads
from flinkish_spark.core.config import CancellationConfig, CheckpointConfig, ExponentialDelay, UiConfig
from flinkish_spark.core.errors import (
    ConfigError,
    FlinkishError,
    GraphError,
    JobCancelledError,
    OwnedElsewhereError,
    UserError,
)
from flinkish_spark.core.fields import Range, check_arguments
from flinkish_spark.core.forks import own_handler
from flinkish_spark.core.job_dir import job_place, open_job_dir
from flinkish_spark.core.steps import Observer, SilentObserver
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.terminal import CLEAR_LINE, can_show, is_notebook
from flinkish_spark.core.validation import raise_config_errors, to_path, unusable
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.datastream.job_plans import JobPlans
from flinkish_spark.datastream.queries import Queries
from flinkish_spark.functions.watermark_strategy import WatermarkStrategy
from flinkish_spark.job.cancellation import SignalledStop
from flinkish_spark.job.catch_up import CaughtUp, check_can_catch_up
from flinkish_spark.job.client import (
    ExecutionListener,
    JobClient,
    JobExecutionResult,
    JobPage,
    call_listener,
)
from flinkish_spark.job.configuration import fill_arguments, read_configuration, take_configuration
from flinkish_spark.job.dependencies import Dependencies
from flinkish_spark.job.engine import JobSettings, Standby
from flinkish_spark.job.face import ReportedJob, Reporter, Reporting, job_face
from flinkish_spark.job.reporting import JobReporter, collect_reported_settings
from flinkish_spark.job.spark_engine import SparkEngine
from flinkish_spark.job.supervisor import Supervisor
from flinkish_spark.job.trace_log import write_trace_file
from flinkish_spark.planning.declare import KEY_GROUPS_ADVICE, KeyGroups, check_strategy, resolve_uid
from flinkish_spark.planning.partitioning import (
    Parallelism,
    check_is_shuffle_partitions,
    read_shuffle_partitions,
)
from flinkish_spark.planning.stream_graph import DEFAULT_MAX_PARALLELISM, StreamGraph, find_sources
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.ids import check_name
from flinkish_spark.protocol.job_status import JobStatus
from flinkish_spark.protocol.limits import MOST_MS, Limit
from flinkish_spark.protocol.restart import TRIES_WITHOUT_PROGRESS, RestartStrategy
from flinkish_spark.savepoints.files import RestoreSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import types as T


LOG = logging.getLogger(__name__)

_NAME = 'give the job a name like "orders"'


class StreamExecutionEnvironment(JobPlans, Queries):
    """An environment that collects sources, operators and sinks of one job, and runs them as one Spark query.

    What the program leaves out may come from outside: from `flinkish run -D`, Spark's settings, variables or
    a file `flinkish.toml` (`docs/configuration.md`).

    Parameters
    ----------
    spark
        A classic SparkSession with the JARs of `configure_spark_with_jars`.
    job
        Name of the job; fixed for the life of `job_dir`.
    job_dir
        The job's own directory: checkpoints, state, decisions. One job, one directory; created at the first
        start. An absolute path, as a str, or a folder in a bucket: ``s3://bucket/jobs/orders``, or with
        ``abfss://`` or ``gs://``. For a bucket Spark needs Hadoop's file system (`docs/buckets.md`). On HDFS:
        ``hdfs://namenode:8020/jobs/orders`` (`docs/hdfs.md`).
    store_options
        Options of the bucket, by obstore's names: ``{"region": "eu-central-1"}``; secrets by the name of an
        environment variable, ``env:NAME``. Other credentials are looked up as the cloud's tools do.
    checkpoint
        When checkpoints are taken.
    restart_strategy
        Restart strategy for failures that a restart may fix: ExponentialDelay, FixedDelay,
        FailureRate or NoRestart, or an object of yours with their `decide`.
    tries_without_progress
        How often a micro-batch may fail with the same error, without a checkpoint in between, before the
        job fails whatever the strategy is; at least 1, UNLIMITED for any number. Errors with different
        texts are allowed three times as often. A system that does not answer, and a full disk, do not count.
    max_parallelism
        Default number of key groups of operators.
    trigger_interval_ms
        Minimum time between the starts of two micro-batches, up to 365 days; 0 for as fast as possible.
    restore
        A savepoint that a new `job_dir` begins with. Later starts go on from the job's own checkpoints.
    standby
        What to do while another driver owns `job_dir`: refuse to start, or wait until its process
        has ended and take the job over.
    unknown_hook_state
        Whether to start from a checkpoint that has state of a master hook that was not added.
    manifest
        Target of one record per confirmed checkpoint, for readers: a DeltaManifest or a KafkaManifest.
    latency_tracking_interval_ms
        How often latency is measured by markers, at most once per micro-batch, from 1 ms up to 365 days;
        see `JobClient.latencies`. None for never.
    cancellation
        How long a micro-batch may take to end when the job is cancelled or fails, and what happens then.

    """

    @take_configuration
    @check_arguments(
        job=_NAME,
        checkpoint="give CheckpointConfig(interval_ms=...), or leave it out",
        restart_strategy="give an instance, for example FixedDelay(attempts=3) or NoRestart()",
        tries_without_progress="leave it out for 3 tries, or give UNLIMITED",
        max_parallelism=KEY_GROUPS_ADVICE,
        restore='give RestoreSettings("/absolute/path"), or leave it out',
        manifest="give a DeltaManifest or a KafkaManifest",
        cancellation="give CancellationConfig(timeout_ms=...), or leave it out",
    )
    def __init__(
        self,
        spark: SparkSession,
        job: str = "",
        job_dir: str | os.PathLike[str] = "",
        *,
        store_options: Mapping[str, str] | None = None,
        checkpoint: CheckpointConfig | None = None,
        restart_strategy: RestartStrategy | None = None,
        tries_without_progress: Annotated[Limit, Range(1)] = TRIES_WITHOUT_PROGRESS,
        max_parallelism: KeyGroups = DEFAULT_MAX_PARALLELISM,
        trigger_interval_ms: Annotated[Milliseconds, Range(0, MOST_MS)] = 0,
        restore: RestoreSettings | None = None,
        standby: Standby = Standby.REFUSE,
        unknown_hook_state: UnknownHookState = UnknownHookState.REFUSE,
        manifest: Manifest | None = None,
        latency_tracking_interval_ms: Annotated[Milliseconds, Range(1, MOST_MS)] | None = None,
        cancellation: CancellationConfig | None = None,
    ) -> None:
        _check_session(spark)
        with raise_config_errors(_NAME):
            check_name(job, "job name")
        session.run_tasks_in_this_python(spark)
        self.spark = spark
        self.job = job
        self._place = job_place(job_dir, store_options or {})
        self.checkpoint = CheckpointConfig() if checkpoint is None else checkpoint
        self.restart_strategy = ExponentialDelay() if restart_strategy is None else restart_strategy
        self.tries_without_progress = tries_without_progress
        self.cancellation = CancellationConfig() if cancellation is None else cancellation
        self.trigger_interval_ms = trigger_interval_ms
        self.latency_tracking_interval_ms = latency_tracking_interval_ms
        self.graph = StreamGraph(max_parallelism=max_parallelism)
        self._views = {}
        self.restore, self.standby = restore, standby
        self._hooks = MasterHooks(unknown=unknown_hook_state)
        self.manifest = manifest
        self._dependencies = Dependencies(spark, self._place)
        self._listeners: list[JobListener] = []
        self._execution_listeners: list[ExecutionListener] = []
        self._reporters: list[Reporter] = []
        self._observer: Observer = SilentObserver()
        self._parallelism: int | None = None
        self._executing, self._process = threading.Lock(), os.getpid()
        self._client: JobClient | None = None
        self._ui: JobPage | None = None

    @classmethod
    def get_execution_environment(
        cls,
        job: str = "",
        job_dir: str | os.PathLike[str] = "",
        *,
        builder: SparkSession.Builder | None = None,
        **settings: Any,
    ) -> Self:
        """Return an environment in the active session, or in the session that `flinkish run` has prepared.

        A program that uses this runs anywhere without changes: ``flinkish run --target local app.py`` and
        ``flinkish run --target yarn-cluster app.py`` run the same program (`docs/running.md`). Without
        `flinkish run` the session is that of a notebook, or a new one by ``spark-defaults.conf``.

        Parameters
        ----------
        job, job_dir, settings
            Arguments of the class, except the session.
        builder
            Builder of a new session, for example ``configure_spark_with_packages(SparkSession.builder)``. A
            JVM is started only if Java is installed, and the job does not run already.

        Examples
        --------
        >>> env = StreamExecutionEnvironment.get_execution_environment(  # doctest: +SKIP
        ...     "orders", "s3://jobs/orders", checkpoint=CheckpointConfig(interval_ms=10_000)
        ... )
        """
        from pyspark.sql import SparkSession

        settings |= {name: one for name, one in (("job", job), ("job_dir", job_dir)) if one}
        filled: Mapping[str, Any] = settings
        if SparkSession.getActiveSession() is None and not session.has_gateway():
            # Checked before a JVM is started in vain.
            session.check_java()
            filled, _ = fill_arguments(settings, read_configuration(find_submitted_settings()))
            if "job_dir" in filled:
                place = job_place(filled["job_dir"], filled.get("store_options") or {})
                _refuse_second(place, filled.get("standby", Standby.REFUSE))
        given = SparkSession.builder if builder is None else builder
        if "job" in filled:
            given = given.appName(filled["job"])
        return cls(given.getOrCreate(), **settings)

    @check_arguments(source="give a KafkaSource, or an instance of a SplitSource of your own")
    def from_source(
        self, source: Source, watermark_strategy: WatermarkStrategy | None = None, *, uid: str | None = None
    ) -> DataStream:
        """Add a source, for example a KafkaSource.

        Parameters
        ----------
        watermark_strategy
            As if `assign_timestamps_and_watermarks` were called right after the source; None: no timestamps.
        uid
            Stable name of this source in this job. If left out, it is derived from the place in the program,
            with a warning.
        """
        known = self.graph.check_uid(resolve_uid(self.graph, uid, "source", type(source).__name__))
        if watermark_strategy is not None:
            check_strategy(watermark_strategy, known)
        node = SourceNode(known, source.bind(known))
        self.graph.sources.append(node)
        stream = DataStream(self, node)
        if watermark_strategy is None:
            return stream
        return stream.assign_timestamps_and_watermarks(watermark_strategy)

    def from_collection(
        self, values: Iterable[Any], schema: str | T.StructType, *, uid: str | None = None
    ) -> DataStream:
        """Add records from memory; the job ends after the last one, unless another source goes on.

        Parameters
        ----------
        values
            Tuples, dicts or Rows; single values for a schema with one field. The same at every start.
        schema
            ``"user STRING, amount LONG"``, or a StructType.
        """
        return self.from_source(CollectionSource(values, schema), uid=uid)

    def from_dataframe(
        self, frame: DataFrame, *, output_mode: str = "append", uid: str | None = None
    ) -> DataStream:
        """Add an existing streaming DataFrame, with whatever Spark keeps state for.

        Aggregates, dropDuplicates, joins of two streams and stateful functions of Spark's stay as they are.
        Their state and watermarks are part of the job's checkpoints: a micro-batch of Spark's and its state
        are committed with the sinks, or not at all.

        Parameters
        ----------
        output_mode
            ``"append"``: rows that will not change any more. ``"update"``: each changed row of an aggregate,
            with a field `_row_kind` that is ``"+U"``, for a sink that upserts.

        Raises
        ------
        GraphError
            It is no streaming DataFrame, cannot be replayed, or Spark cannot run it in this output mode.
        """
        if not hasattr(type(frame), "isStreaming"):
            raise GraphError(
                f"from_dataframe() got a {type(frame).__name__}",
                what_to_do="give it the DataFrame that spark.readStream makes",
            )
        return self.from_source(DataFrameSource(frame, output_mode), uid=uid)

    @check_arguments()
    def set_parallelism(self, parallelism: Parallelism) -> Self:
        """Set the number of tasks of keyed operators, which must be the number of Spark's shuffle partitions.

        Other queries may run in the session. So its setting is checked here and at the start, and never
        changed.
        """
        check_is_shuffle_partitions(parallelism, self._partitions(), f"the job '{self.job}'")
        self._parallelism = parallelism
        return self

    @property
    def job_dir(self) -> Path | str:
        """The job directory: a folder on a disk, or the URL of one in a bucket."""
        return self._place.folder if self._place.is_local else self._place.url

    @property
    def max_parallelism(self) -> int:
        """Default number of key groups of operators."""
        return self.graph.max_parallelism

    @check_arguments(max_parallelism=KEY_GROUPS_ADVICE)
    def set_max_parallelism(self, max_parallelism: KeyGroups) -> Self:
        """Set the default number of key groups of operators; call it before the first operator."""
        if self.graph.operators and max_parallelism != self.graph.max_parallelism:
            raise GraphError(
                f"set_max_parallelism({max_parallelism}) was called after an operator was added",
                why=f"'{self.graph.operators[0].uid}' has its key groups already",
                what_to_do="call it before key_by(), or give the environment max_parallelism=...",
            )
        self.graph.max_parallelism = max_parallelism
        return self

    # -- files and packages of functions -------------------------------------------------------------
    def register_cached_file(
        self, file_path: str | os.PathLike[str], name: str, executable: bool = False
    ) -> None:
        """Ship a file or folder to all tasks; functions find it by `get_distributed_cache().get_file(name)`.

        The current content is copied, and Spark sends it from the driver to each executor. A running job
        never sees a later change of the file; the next program that registers it does.

        Parameters
        ----------
        file_path
            A file or folder: a path on the driver, ``file:///...``, or a URL that the driver reads by Hadoop:
            ``hdfs://namenode:8020/model``, ``s3://bucket/model``.
        name
            Name by which functions find it; up to 200 characters.
        executable
            Whether to make the file, or all files of the folder, executable; by default permissions stay.

        Examples
        --------
        >>> env.register_cached_file("s3://models/fraud-7.onnx", "model")  # doctest: +SKIP
        """
        self._dependencies.register_cached_file(to_path(file_path), name, executable)

    def add_python_file(self, file_path: str | os.PathLike[str]) -> None:
        """Add a module, a package or a folder of modules to the Python path of workers and this process.

        The last one added is found first, and all of them before installed packages. The current content is
        used: after a change, start the program again.

        Parameters
        ----------
        file_path
            A ``.py`` file; a folder with ``__init__.py``, which is a package; another folder, whose content
            can be imported; a ``.zip``, ``.egg`` or ``.whl``, which is unpacked. A path or a URL, as for
            :meth:`register_cached_file`.
        """
        self._dependencies.add_python_file(to_path(file_path))

    def add_python_archive(self, archive_path: str | os.PathLike[str], target_dir: str | None = None) -> None:
        """Ship an archive, unpacked, to all tasks; functions find it by ``SparkFiles.get(target_dir)``.

        On a cluster it is in the working directory of workers, so ``target_dir/file`` finds it as in PyFlink;
        with a local Spark it is not.

        Parameters
        ----------
        archive_path
            A ``.zip``, ``.tar``, ``.tar.gz`` or ``.tgz``; a path or a URL.
        target_dir
            Name of its folder; by default the name of the archive with its suffix.
        """
        self._dependencies.add_python_archive(to_path(archive_path), target_dir)

    def set_python_executable(self, python_exec: str | os.PathLike[str]) -> None:
        """Set the Python executable of workers, which must be the one of the session.

        Spark sets it when a session is made, for all jobs in it. So it is checked here, and never changed.
        """
        self._dependencies.set_python_executable(to_path(python_exec))

    @check_arguments(ui="give True, or UiConfig(port=...)", until="give CaughtUp(), or leave it out")
    def execute_async(self, *, ui: bool | UiConfig = False, until: CaughtUp | None = None) -> JobClient:
        """Start the job and return at once; for notebooks and services.

        Later additions to the environment belong to its next execution.

        Parameters
        ----------
        ui
            Whether this process also serves the job's page, and Flink's REST paths; see `JobClient.ui`. By
            default on loopback and a free port; a UiConfig changes that. The page stays until the process
            ends, or this environment serves another one.
        until
            CaughtUp() for a run that ends when all input that was there at its start has been processed; the
            next run goes on. None: the job runs until it is stopped, or all of its sources have come to their
            end; or as `flinkish run --until-caught-up` says.
        """
        with self._executing:
            self._check_idle("start it twice")
            interval_ms = self.latency_tracking_interval_ms
            latencies = None if interval_ms is None else LatencyTracker(interval_ms)
            reporting = (
                job_face().make_reporting(self._place, self._reporters) if self._reporters else Reporting()
            )
            try:
                page = self._page(ui)
                supervisor = self._supervisor(latencies, reporting, self._choose_end(until))
                self._hooks.claim()
            except Exception as error:
                reporting.end()
                self._close_page()
                for listener in self._execution_listeners:
                    call_listener(listener.on_job_submitted, None, error)
                raise
            listeners = (reporting, *self._execution_listeners)
            self._client = JobClient(supervisor, latencies, listeners, page)
            for listener in self._execution_listeners:
                call_listener(listener.on_job_submitted, self._client, None)
            return self._client

    def _choose_end(self, given: CaughtUp | None) -> CaughtUp | None:
        """Return when the run ends, as the program or else `flinkish run` says; refuse what cannot end so."""
        if given is None:
            given = CaughtUp() if session.is_until_caught_up(self.spark) else None
        if given is not None:
            timed = [node for node in self.graph.timed if node.strategy.alignment is not None]
            aligned = [source.uid for node in timed for source in find_sources(node)]
            check_can_catch_up(self.graph.read_sources, aligned)
        return given

    def _page(self, ui: bool | UiConfig) -> JobPage | None:
        """Close an earlier page of the job, and serve a new one if wanted."""
        self._close_page()
        if ui is False:
            return None
        self._ui = job_face().serve_page(self._place, UiConfig() if ui is True else ui)
        LOG.info("the page of the job '%s' is at %s", self.job, self._ui.url)
        return self._ui

    def _close_page(self) -> None:
        if self._ui is not None:
            self._ui.stop()
            self._ui = None

    def _check_idle(self, what: str) -> None:
        """Refuse `what` while this environment's job runs."""
        if os.getpid() != self._process:
            raise ConfigError(
                f"the environment of the job '{self.job}' belongs to another process",
                why="this process was forked from it, and would use that process's connections to Spark",
                what_to_do="run the job in the process that made the session, or start this process "
                'with multiprocessing.get_context("spawn") and make a session here',
            )
        if self._client is not None and not self._client.has_ended():
            raise OwnedElsewhereError(
                f"the job '{self.job}' of this environment runs",
                why=f"nobody can {what}: hooks, listeners and the directory {self._place.url} are in use",
                what_to_do="use the JobClient that execute_async() returned; stop the job and wait for its "
                "end before it is executed again, or make another environment with another job_dir",
                holder=f"process {os.getpid()} on {socket.gethostname()}",
            )

    def execute(
        self, *, ui: bool | UiConfig = False, live_line: bool = True, until: CaughtUp | None = None
    ) -> JobExecutionResult:
        """Run the job until it ends; SIGTERM and Ctrl-C stop it with a last checkpoint.

        With `ui` the link to its page, with the token for changes, is printed to standard error. The last
        checkpoint waits for the running micro-batch. A second signal cancels the job; so does the time-out of
        `CancellationConfig` if no micro-batch and no checkpoint ends within it.

        Parameters
        ----------
        live_line
            Whether a terminal shows a status line on standard error, in place of Spark's progress bars:
            records in and out at the newest checkpoint, the checkpoint, lag, restarts, and the share of a
            bounded input that was read. There is none in a notebook, or if standard error is no terminal.

        Returns
        -------
        JobExecutionResult
            The final status (FINISHED, or SUSPENDED if the job continues at its next start), the duration,
            and the values of accumulators.

        Raises
        ------
        FlinkishError
            The job was refused, or failed and is not restarted. Everything up to the last checkpoint is
            committed, nothing after it is visible. For an error of the program, and for any error in a
            terminal or notebook, the traces of Python and Spark are in a file that a line on stderr names.
        JobCancelledError
            The job was cancelled: by `flinkish cancel`, a second signal or the client.
        """
        self._check_idle("start it twice")
        _refuse_second(self._place, self.standby)
        self._say_partitions()
        client = self.execute_async(ui=ui, until=until)
        if client.ui is not None:
            _say(f"the page of the job '{self.job}': {client.ui.link}")
        stop = SignalledStop(client, self.cancellation, SystemClock(), _say)
        try:
            with _stop_signals(stop), self._line(client, live_line):
                while not client.wait(timeout_ms=200):
                    stop.look()
        except FlinkishError as error:
            if not isinstance(error, UserError) and not can_show(sys.stderr) and not is_notebook():
                # A log should contain the whole trace of a failure that is not the program's.
                raise
            raise write_trace_file(error, self.job) from None
        result = client.get_job_execution_result()
        if result.status is JobStatus.CANCELED:
            raise JobCancelledError(
                f"the job '{self.job}' was cancelled",
                what_to_do="start it again: it goes on from its last checkpoint",
            )
        return result

    def _say_partitions(self) -> None:
        with contextlib.suppress(FlinkishError):
            if read_shuffle_partitions(self.spark) is None and open_job_dir(self._place).find_uuid() is None:
                _say(
                    f"the job '{self.job}' begins with {self._partitions()} shuffle partitions, two for each "
                    "core, and keeps them; set spark.sql.shuffle.partitions for another number"
                )

    @contextlib.contextmanager
    def _line(self, client: JobClient, is_wanted: bool) -> Iterator[None]:
        if not is_wanted or not can_show(sys.stderr):
            yield
            return
        hold_bars = partial(session.hold_stage_bars, self.spark)
        line = job_face().show_line(self.job, client, self.graph.sources, hold_bars)
        with session.suppress_traces(self.spark), line:
            yield

    @check_arguments(hook="derive it from flinkish_spark.MasterHook, and give an instance")
    def add_master_hook(self, hook: MasterHook) -> None:
        """Let an external system take part in every checkpoint; call it before `execute`."""
        self._check_idle("add a master hook")
        self._hooks.add(hook)

    @check_arguments(listener="derive it from flinkish_spark.ExecutionListener, and give an instance")
    def register_job_listener(self, listener: ExecutionListener) -> None:
        """Notify `listener` when a job is submitted and when it has ended; see also :meth:`add_listener`."""
        self._execution_listeners.append(listener)

    def clear_job_listeners(self) -> None:
        """Remove all listeners added by :meth:`register_job_listener`."""
        self._execution_listeners.clear()

    @check_arguments(listener="derive it from flinkish_spark.QuietListener, and give an instance")
    def add_listener(self, listener: JobListener) -> None:
        """Notify `listener` of status changes, and of complete and aborted checkpoints."""
        self._listeners.append(listener)

    @check_arguments(reporter="give a PrometheusReporter(), for example")
    def add_reporter(self, reporter: Reporter) -> None:
        """Add a reporter of the job's metrics, such as a PrometheusReporter(); see docs/metrics.md."""
        self._check_idle("add a reporter")
        self._reporters.append(reporter)

    @check_arguments(observer="derive it from flinkish_spark.core.steps.SilentObserver, and give an instance")
    def observe(self, observer: Observer) -> None:
        """Let `observer` watch the steps of the checkpoints; see `core.steps`."""
        self._observer = observer

    def _supervisor(
        self,
        latencies: LatencyTracker | None = None,
        reporting: Reporting | None = None,
        until: CaughtUp | None = None,
    ) -> Supervisor:
        partitions = self._partitions()
        if self._parallelism is not None:
            check_is_shuffle_partitions(self._parallelism, partitions, f"the job '{self.job}'")
        settings = JobSettings(
            name=self.job,
            job_dir=self._place,
            checkpoint=self.checkpoint,
            restart=self.restart_strategy,
            tries_without_progress=self.tries_without_progress,
            cancellation=self.cancellation,
            trigger_ms=self.trigger_interval_ms,
            shuffle_partitions=partitions,
            clock=SystemClock(),
            threads=SystemThreads(),
            observer=self._observer,
            scratch=session.scratch_folder(self.spark),
            hooks=self._hooks,
            listeners=tuple(self._listeners),
            standby=self.standby,
            restore=self.restore,
            until=until,
            manifest=self.manifest,
            latencies=latencies,
            cached_files=self._dependencies.cached_files,
        )
        job_dir = open_job_dir(settings.job_dir)
        engine = SparkEngine(self.spark, self.graph.copy_declared(), settings, job_dir)
        if reporting is not None:
            reporting.begin(ReportedJob(self.job, tuple(engine.sources), lambda: engine.planned))
        reported = collect_reported_settings(
            self.checkpoint,
            self.restart_strategy,
            settings.trigger_ms,
            partitions,
            session.find_spark_ui(self.spark),
        )
        reporter = JobReporter(job_dir, settings.clock, engine.vertices, reported)
        # It comes first, so that the report is up to date when the user's listeners are called.
        told = (reporter,) if reporting is None else (reporter, reporting)
        listeners = (*told, *settings.listeners)
        return Supervisor(engine, replace(settings, listeners=listeners), job_dir)


def _check_session(spark: SparkSession) -> None:
    # Checked by its methods: a Spark Connect session is no SparkSession, and is refused with its own reason.
    if not hasattr(type(spark), "readStream"):
        what_to_do = "give the session that SparkSession.builder.getOrCreate() returns"
        raise unusable("spark", spark, wanted="a SparkSession", what_to_do=what_to_do)
    if type(spark).__module__.startswith("pyspark.sql.connect."):
        session.jvm(spark)
    session.refuse_other_target(spark)


def _refuse_second(place: StoreSpec, standby: Standby) -> None:
    """Refuse at once to start a running job; in a bucket only the start itself can find out."""
    if place.is_local and standby is Standby.REFUSE:
        JobLock.from_folder(place.folder).check_free()


def _say(text: str) -> None:
    print(f"{CLEAR_LINE if can_show(sys.stderr) else ''}flinkish: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _stop_signals(stop: SignalledStop) -> Iterator[None]:
    """Let SIGTERM and SIGINT stop the job, if this thread may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with own_handler(lambda number, frame: stop.on_signal(), signal.SIGTERM, signal.SIGINT):
        yield
