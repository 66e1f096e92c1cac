"""A process that is killed or has no memory left is named, and restarted by rule."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import JobProcess, JobStatus, MemorySink, TaskState
from flinkish_spark.core.errors import MemoryExhaustedError, NoProgressError, ProcessLostError
from tests.support.jobs import ORDER, TOTAL, RunningTotal, environment, running

pytestmark = pytest.mark.timeout(600)
ROWS = [("ann", 1), ("bob", 2), ("ann", 3)]


class Hungry(RunningTotal):
    """Asks for more memory than there are addresses."""

    def process_element(self, order: Any, ctx: Any) -> Any:
        if order.user == "bob":
            bytearray(1 << 47)
        return super().process_element(order, ctx)


class Killed(RunningTotal):
    """Dies as the kernel lets a process die that takes too much memory."""

    def process_element(self, order: Any, ctx: Any) -> Any:
        if order.user == "bob":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().process_element(order, ctx)


@pytest.mark.parametrize(
    ("function", "kind", "operator"),
    [(Hungry, MemoryExhaustedError, "totals"), (Killed, ProcessLostError, None)],
)
def test_a_worker_without_memory_is_named_and_restarted(
    spark: Any, tmp_path: Path, function: Any, kind: type, operator: str | None
) -> None:
    env = environment(spark, tmp_path / "job")
    orders = env.from_collection(ROWS, ORDER, uid="orders")
    totals = orders.key_by("user").process(function(), output=TOTAL, uid="totals")
    totals.sink_to(MemorySink(f"{tmp_path}"), uid="out")
    with running(env) as client:
        with pytest.raises(NoProgressError) as caught:
            client.wait(timeout_ms=300_000)
        assert client.progress.restarts == 2
        assert client.status is JobStatus.FAILED
        failed = {one.operators for one in client.vertices if one.state is TaskState.FAILED}
        assert failed == (set() if operator is None else {(operator,)})
    first = caught.value.__cause__
    assert type(first) is kind
    assert first.process is caught.value.process is JobProcess.WORKER  # type: ignore[attr-defined]
    assert "spark.executor.pyspark.memory" in str(first)
    if operator is not None:
        assert first.what.startswith("the function of operator 'totals' ran out of memory on the record at")
        assert first.why.startswith("MemoryError")


_APP = Path(__file__).parents[2] / "support" / "hungry_app.py"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("master", "where", "error", "process", "exit_code"),
    [
        # A limit of addresses for all workers of an executor, as Spark sets it.
        ("local-cluster[1,1,1024]", "worker", "MemoryExhaustedError", "WORKER", "None"),
        ("local-cluster[1,1,1024]", "executor", "MemoryExhaustedError", "EXECUTOR", "52 None"),
        ("local[2,4]", "executor", "DriverOutOfMemory", "DRIVER", "52"),
        ("local[2,4]", "killed driver", "SparkGoneError", "DRIVER", "137"),
    ],
)
def test_real_processes_run_out_of_memory(
    tmp_path: Path, master: str, where: str, error: str, process: str, exit_code: str
) -> None:
    told = _told(tmp_path, master, where)
    assert (told["error"], told["process"]) == (error, process), told
    # A full heap is told by its task, or by the end of the executor: whichever Spark hears first.
    assert told["exit_code"] in exit_code.split(), told
    # Restarted as often as it may, or not at all where the driver is gone.
    assert told["restarts"] == ("0" if process == "DRIVER" else "2")
    setting = {"WORKER": "pyspark.memory", "EXECUTOR": "executor.memory", "DRIVER": "driver.memory"}[process]
    assert setting in told["message"]


@pytest.mark.nightly
def test_a_job_goes_on_behind_executors_that_are_killed(tmp_path: Path) -> None:
    """Four in a row, which is what a task of Spark's may lose."""
    told = _told(tmp_path, "local-cluster[1,1,1024]", "killed executor")
    assert (told["status"], told["restarts"]) == ("FINISHED", "1"), told
    assert "Command exited with code 137" in told["message"]
    assert "An executor was killed, most often because memory ran out" in told["message"]
    assert "spark.executor.memoryOverhead" in told["message"]


def _told(folder: Path, master: str, where: str) -> dict[str, str]:
    command = [sys.executable, str(_APP), str(folder), master, where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    lines = [line[1:].split("=", 1) for line in done.stdout.splitlines() if line.startswith("@")]
    assert lines, done.stderr[-3000:]
    return {name: value for name, value in lines}
