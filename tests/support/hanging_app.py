"""A job that hangs in this process or its JVM, is told to end, and says what became of that."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from flinkish_spark import (
    CancellationConfig,
    CheckpointConfig,
    DeltaSink,
    ExecutionListener,
    ForeachCheckpointSink,
    JobClient,
    JobStatus,
    KeyedProcessFunction,
    MemorySink,
    StreamExecutionEnvironment,
)
from flinkish_spark.bridge.session import configure_spark_with_jars
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.core.steps import SilentObserver, Step
from tests.conftest import spark_test_conf
from tests.support.services import BUILD

TEXT = "text STRING"
_TEXTS = [("a",), ("b",), ("c",)]
_FOR_LONG_S = 600


class Kept(KeyedProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        yield (value.text,)


class HangOnTheDriver:
    """A DataFrame function behind state: called when the job is planned, and once in each micro-batch."""

    def __init__(self) -> None:
        self.hangs = threading.Event()

    def hang_on_the_driver(self, frame: DataFrame) -> DataFrame:
        if any(one.filename.endswith("epoch_writer.py") for one in traceback.extract_stack()):
            self.hangs.set()
            time.sleep(_FOR_LONG_S)
        return frame.select("text").distinct()


class HangInTheCommit(SilentObserver):
    """Lets a sink's first commit hang: in a function of the user's, or where Delta reads its log."""

    def __init__(self, table: Path) -> None:
        self.table, self.hangs = table, threading.Event()

    def on_step_start(self, step: Any, subject: str) -> None:
        if step is Step.SINK_COMMIT and subject == "table":
            # Whoever opens a pipe to read it waits for a writer; no interrupt ends that in Java.
            log = self.table / "_delta_log"
            os.mkfifo(log / f"{len(list(log.glob('*.json'))):020}.json")
            self.hangs.set()

    def hang_in_the_commit(self, rows: Any, checkpoint: Any) -> None:
        self.hangs.set()
        time.sleep(_FOR_LONG_S)


class Submitted(ExecutionListener):
    """Has the client of a job that `execute` runs."""

    client: JobClient

    def on_job_submitted(self, client: Any, error: Any) -> None:
        self.client = client


def _for_long(frame: DataFrame) -> DataFrame:
    """Add up a million numbers a million times, within one row; no interrupt ends that."""
    once = "aggregate(sequence(0L, 1000000L), {}, (sum, one) -> sum + {})"
    added = once.format("length(text) + 0L", once.format("one", "one").replace("sum", "inner"))
    return frame.where(F.expr(f"{added} > 0"))


def main(folder: Path, where: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        builder = SparkSession.builder.master("local[2,4]").config(map={**spark_test_conf(Path(scratch))})
        spark = configure_spark_with_jars(builder, BUILD / "jars").getOrCreate()
        env = StreamExecutionEnvironment(
            spark,
            "hanging",
            str(folder / "job"),
            checkpoint=CheckpointConfig(interval_ms=500),
            cancellation=CancellationConfig(interval_ms=1_000, timeout_ms=5_000),
        )
        submitted = Submitted()
        env.register_job_listener(submitted)
        driver, commit = HangOnTheDriver(), HangInTheCommit(folder / "table")
        is_free = (folder / "go on").exists()
        stream = env.from_collection(_TEXTS, TEXT, uid="texts")
        if where == "an expression" and not is_free:
            stream = stream.transform(_for_long)
        kept = stream.key_by("text").process(Kept(), output=TEXT, uid="kept")
        if where in ("a function on the driver", "a signal") and not is_free:
            kept = kept.transform(driver.hang_on_the_driver)
        if where == "a commit":
            call = commit.hang_in_the_commit if not is_free else lambda rows, checkpoint: list(rows)
            kept.sink_to(ForeachCheckpointSink(call), uid="called")
        if "commit" in where:
            kept.sink_to(DeltaSink(str(folder / "table")), uid="table")
        if where == "a commit of Delta's" and not is_free:
            env.observe(commit)
        kept.sink_to(MemorySink("hanging"), uid="out")

        def hang_and_end() -> None:
            client = submitted.client
            if where == "an expression":
                _await_a_long_job(spark, client)
            else:
                (commit if "commit" in where else driver).hangs.wait(120)
            if where == "a signal":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                client.cancel()

        if not is_free:
            threading.Timer(0, lambda: _when_submitted(submitted, hang_and_end)).start()
        try:
            env.execute()
        except FlinkishError as error:
            print(f"@error={type(error).__name__}")
            for name in ("for_ms", "hangs_in"):
                print(f"@{name}={getattr(error, name, '')}".replace("\n", " "))
        else:
            print(f"@rows={submitted.client.progress.rows_by_sink.get('out', 0)}")
        process: Any = getattr(SparkContext._gateway, "proc", None)
        print("@jvm=" + ("runs" if process.poll() is None else "ended"))
        print(f"@status={submitted.client.status.value}", flush=True)
        if is_free:
            spark.stop()


def _when_submitted(submitted: Submitted, act: Callable[[], None]) -> None:
    while not hasattr(submitted, "client"):
        time.sleep(0.1)
    act()


def _await_a_long_job(spark: SparkSession, client: JobClient) -> None:
    """Wait until the same job of Spark's has run for three seconds, within the query."""
    tracker, since, known = spark.sparkContext.statusTracker(), time.monotonic(), None
    until = since + 120
    while time.monotonic() < until and time.monotonic() - since < 3:
        active = tuple(sorted(tracker.getActiveJobsIds()))
        if not active or active != known or client.status is not JobStatus.RUNNING:
            since, known = time.monotonic(), active
        time.sleep(0.2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
