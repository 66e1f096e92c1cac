"""The process under test: one job per sink, all of them watched, doing what its parent says.

Speaks lines of JSON over a Unix socket. Commands name a job: ``begin`` (open a window, maybe with a
fault), ``end`` (close it and tell what came by), ``trigger`` (ask for a checkpoint), ``start`` (again,
after it ended). Events: ``up``, ``begun``, ``reached``, ``fired``, ``trace``,
``answer``, ``ended``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from demo.app import RunningTotal
from flinkish_spark import (
    UNLIMITED,
    CheckpointConfig,
    FixedDelay,
    JobClient,
    JobStatus,
    Json,
    KafkaSource,
    StreamExecutionEnvironment,
)
from flinkish_spark.bridge.session import delta_conf
from flinkish_spark.checkpoint import retention
from flinkish_spark.connectors.delta.rows import DeltaRows
from flinkish_spark.connectors.delta.tables import DeltaTables
from flinkish_spark.core.errors import StoreError
from tests.crash.sweep import committers, databases, files, gateway, hooks
from tests.crash.sweep.places import JVM_VARIABLE, Fleet, Place
from tests.crash.sweep.points import Fault, Point, Run, trace_to_json
from tests.crash.sweep.sinks import SINKS
from tests.crash.sweep.switch import Switch
from tests.crash.sweep.tasks import Answers
from tests.crash.sweep.wire import KafkaProxy
from tests.support.buckets import S3A_CONF

ORDER = "user STRING, product STRING, amount LONG, at TIMESTAMP"
_TOTAL = "user STRING, total LONG, orders LONG"
_DELTA_WRITES = ("create", "append", "replace", "commit", "merge", "restore", "set_back", "delete")
#: Checkpoints are taken when they are asked for. The broker lets a transaction live for 15 minutes.
_NEVER_MS, _BUDGET_MS = 700_000, 100_000
_STARTS_S, _SETTLES_S = 30.0, 0.7


class Channel:
    """Lines of JSON to the parent, from any thread."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._lock = threading.Lock()
        self.commands = self._socket.makefile("r", encoding="utf-8")

    def tell(self, event: str, job: str = "", **facts: Any) -> None:
        line = json.dumps({"event": event, "job": job, **facts}) + "\n"
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(line.encode())


class JobUnderTest:
    """One job: started, told when to take a checkpoint, started again when it ended."""

    def __init__(
        self, place: Place, spark: SparkSession, jobs: files.Jobs, tell: Callable[..., None]
    ) -> None:
        self._place, self._spark, self._jobs, self._tell = place, spark, jobs, tell
        self._switch = jobs.switches[place.sink]
        self._client: JobClient | None = None
        self._waiting: threading.Thread | None = None

    def start(self) -> None:
        """Start the job; how it ends is told."""
        self._client = self._environment().execute_async()
        self._waiting = threading.Thread(target=self._wait, args=(self._client,), daemon=True)
        self._waiting.start()

    def await_running(self) -> None:
        """Return when the query runs, has ended, or takes too long."""
        deadline = time.monotonic() + _STARTS_S
        while time.monotonic() < deadline and self._client is not None and self._client.is_running:
            if self._client.status is JobStatus.RUNNING:
                # What the query begins with: its sources' processes.
                time.sleep(_SETTLES_S)
                return
            time.sleep(0.05)

    def await_ended(self) -> None:
        """Return when the job has ended, however it did, and has told so."""
        if self._waiting is not None:
            self._waiting.join()

    def _wait(self, client: JobClient) -> None:
        try:
            client.wait()
            self._tell("ended", text="by itself")
        except BaseException as error:
            print(f"{self._place.sink} ended: {error}", flush=True)
            self._tell("ended", text=f"{type(error).__name__}: {error}")

    def _environment(self) -> StreamExecutionEnvironment:
        place, sink = self._place, SINKS[self._place.sink]
        env = StreamExecutionEnvironment(
            self._spark,
            job=place.sink,
            job_dir=place.job_dir.url,
            store_options=dict(place.job_dir.options),
            checkpoint=CheckpointConfig(
                interval_ms=_NEVER_MS, restart_budget_ms=_BUDGET_MS, retained=2, tolerable_failures=UNLIMITED
            ),
            restart_strategy=FixedDelay(attempts=50, delay_ms=100),
            max_parallelism=4,
            trigger_interval_ms=50,
        )
        orders = env.from_source(
            KafkaSource(
                place.servers,
                [place.source_topic],
                group_id=place.group,
                value=Json(ORDER),
            ),
            uid="orders",
        )
        totals = orders.key_by("user").process(RunningTotal(), output=_TOTAL, uid="totals")
        output = sink.make(place)
        committers.hook_sink(self._jobs, type(output))
        totals.sink_to(output, uid="out")
        env.observe(hooks.SparkSteps(self._switch))
        return env

    def obey(self, command: dict[str, Any]) -> None:
        """Carry out one command; returns at once."""
        match command["op"]:
            case "begin":
                point, fault = command.get("point"), command.get("fault")
                run = Run(Point.parse(point), Fault(fault)) if point else None
                self._switch.begin(run)
                self._tell("begun")
            case "end":
                self._tell("trace", calls=trace_to_json(self._switch.end()))
            case "trigger":
                threading.Thread(target=self._trigger, daemon=True).start()
            case "start":
                self.start()

    def _trigger(self) -> None:
        assert self._client is not None
        answer = self._client.trigger_checkpoint().wait(600_000)
        if answer is None:
            return
        checkpoint = None if answer.checkpoint is None else int(answer.checkpoint)
        self._tell("answer", kind=answer.kind.value, checkpoint=checkpoint, text=answer.text)


def session(fleet: Fleet) -> SparkSession:
    builder = (
        # A task that is frozen keeps its slot: there are enough for all tasks of all jobs.
        SparkSession.builder.appName("sweep")
        .master(f"local[{4 * len(fleet.places) + 2}]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.driver.extraJavaOptions", os.environ[JVM_VARIABLE])
        .config("spark.local.dir", str(fleet.scratch / "local"))
        .config("spark.sql.warehouse.dir", str(fleet.scratch / "warehouse"))
        .config("spark.databricks.delta.snapshotPartitions", "1")
        .config("spark.databricks.delta.properties.defaults.checkpointInterval", "1000")
        # Whoever looks at the table reads whole files.
        .config("spark.databricks.delta.properties.defaults.enableDeletionVectors", "false")
        # A dozen micro-batches live shorter than their generated code takes to compile.
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    )
    # The JARs are on the class path: `tests/crash/class_path.py`.
    spark = builder.config(map={**delta_conf(), **S3A_CONF}).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _hook(jobs: files.Jobs, spark: SparkSession) -> None:

    def outage() -> BaseException:
        java = spark._jvm.java.io.IOException("the sweep lets this call fail")  # type: ignore[union-attr]
        return Py4JJavaError("the sweep lets this call fail", java)

    def unreachable() -> BaseException:
        return StoreError("the sweep lets this call fail", why=files.OUTAGE)

    hooks.hook_store(jobs)
    for kind, error in ((DeltaTables, unreachable), (DeltaRows, outage)):
        hooks.hook_methods(jobs, kind, "delta", _DELTA_WRITES, error)
    gateway.hook_gateway(spark)
    databases.hook_sqlite(jobs)
    databases.hook_postgres(jobs)
    files.hook_files(jobs)


def main() -> None:
    fleet = Fleet.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    channel = Channel(fleet.control)
    tells = {place.sink: _told_by(channel, place.sink) for place in fleet.places}
    switches = {sink: Switch(tell) for sink, tell in tells.items()}
    for place in fleet.places:
        KafkaProxy(place.proxy_port, place.upstream_port, switches[place.sink])
    Answers(Path(f"{fleet.control}.tasks"), fleet.base, switches)
    spark = session(fleet)
    buckets = {place.sink: place.job_dir.url for place in fleet.places if place.bucket}
    watched = files.Jobs(fleet.base, switches, buckets=buckets)
    # Every checkpoint makes every call.
    retention._AT_ONCE_IN_BUCKETS = 1
    _hook(watched, spark)
    jobs = {}
    for place in fleet.places:
        # A session of its own: jobs set what their queries need while they start.
        own = spark.newSession()
        jobs[place.sink] = JobUnderTest(place, own, watched, tells[place.sink])
    for sink, job in jobs.items():
        # One after the other: Spark gives a Python process ten seconds to connect, and each start of a
        # query needs several, which two processors cannot bring up for eight jobs at once.
        job.start()
        job.await_running()
        channel.tell("up", sink)
    threading.Thread(target=_end_with_jvm, args=(spark, tuple(jobs.values())), daemon=True).start()
    for line in channel.commands:
        command = json.loads(line)
        jobs[command["job"]].obey(command)
    # The parent is gone, and nobody will end what it has started.
    os.killpg(0, signal.SIGKILL)


def _end_with_jvm(spark: SparkSession, jobs: Iterable[JobUnderTest]) -> None:
    """End this process as a job's driver ends: when the JVM is gone, and every job has noticed."""
    jvm: Any = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    jvm.wait()
    for job in jobs:
        job.await_ended()
    os._exit(1)


def _told_by(channel: Channel, job: str) -> Callable[..., None]:
    return lambda event, **facts: channel.tell(event, job, **facts)


if __name__ == "__main__":
    main()
