"""Which process of a job is gone or has no memory left, by what Spark says of it."""

from __future__ import annotations

import pytest

from flinkish_spark.protocol.errors import Chain
from flinkish_spark.protocol.process_loss import (
    WHAT_TO_DO,
    JobProcess,
    ProcessLoss,
    describe_loss,
    find_process_loss,
)

P = JobProcess
_CRASH = "Python worker exited unexpectedly (crashed)"
_TASK = (
    "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 5.0 failed 4 times, "
    "most recent failure: Lost task 0.3 in stage 5.0 (TID 9) (10.0.0.1 executor 1): "
)
_LOST = _TASK + "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: "


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        (_LOST + "Command exited with code 52", ProcessLoss(P.EXECUTOR, True, 52)),
        (_LOST + "Command exited with code 137", ProcessLoss(P.EXECUTOR, False, 137)),
        (
            _LOST + "Remote RPC client disassociated. Likely due to containers exceeding thresholds",
            ProcessLoss(P.EXECUTOR, False),
        ),
        (
            _LOST + "Container killed by YARN for exceeding physical memory limits. 2.1 GB of 2 GB used.",
            ProcessLoss(P.EXECUTOR, True),
        ),
        (
            _LOST
            + "Container from a bad node: container_1 on host: a. Exit status: 143. Diagnostics: killed",
            ProcessLoss(P.EXECUTOR, False, 143),
        ),
        (
            _LOST + "The executor with id 1 exited with exit code 137(SIGKILL, possible container OOM).",
            ProcessLoss(P.EXECUTOR, True, 137),
        ),
        (
            _TASK + "java.lang.OutOfMemoryError: Java heap space\n\tat a.B.c(D.java:1)",
            ProcessLoss(P.EXECUTOR, True),
        ),
        (
            "org.apache.spark.memory.SparkOutOfMemoryError: [UNABLE_TO_ACQUIRE_MEMORY] Unable to acquire 16 "
            "bytes. SQLSTATE: 53200",
            ProcessLoss(P.EXECUTOR, True),
        ),
        (
            "a.StreamingQueryException: x\n\tat a.B.c(D.java:1)\nCaused by: java.lang.OutOfMemoryError: "
            "Metaspace\n\tat a.B.c(D.java:1)",
            ProcessLoss(P.DRIVER, True),
        ),
        (
            _TASK + "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
            '  File "/app/job.py", line 3, in f\nMemoryError\n',
            ProcessLoss(P.WORKER, True),
        ),
        (
            _TASK + "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
            '  File "/app/job.py", line 3, in f\npyarrow.lib.ArrowMemoryError: malloc of size 9 failed\n',
            ProcessLoss(P.WORKER, True),
        ),
        (
            _TASK + "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider\n"
            "\tat a.B.c(D.java:1)\nCaused by: java.io.EOFException\n\tat a.B.c(D.java:1)",
            ProcessLoss(P.WORKER, False),
        ),
        # Taken away for another reason, or another failure that only speaks of memory.
        (
            _TASK + "ExecutorLostFailure (executor 1 exited unrelated to the running tasks) Reason: exit 137",
            None,
        ),
        (_TASK + "java.io.IOException: the OutOfMemoryError of yesterday", None),
        ("ValueError: MemoryError", None),
    ],
)
def test_what_spark_says_of_a_process(text: str, loss: ProcessLoss | None) -> None:
    assert find_process_loss(text, Chain.of(text)) == loss


@pytest.mark.parametrize(
    ("exit_code", "loss"),
    [
        (None, ProcessLoss(P.DRIVER, False)),
        (0, ProcessLoss(P.DRIVER, False, 0)),
        (52, ProcessLoss(P.DRIVER, True, 52)),
        (3, ProcessLoss(P.DRIVER, True, 3)),
        (-9, ProcessLoss(P.DRIVER, False, 137)),
        (-6, ProcessLoss(P.DRIVER, False, 134)),
    ],
)
def test_how_a_drivers_jvm_has_ended(exit_code: int | None, loss: ProcessLoss) -> None:
    assert ProcessLoss.from_exit_code(exit_code) == loss
    assert loss.was_killed == (exit_code == -9)


def test_a_person_can_do_something_about_each() -> None:
    assert WHAT_TO_DO.keys() == set(P)


@pytest.mark.parametrize(
    ("text", "headline"),
    [
        (f"a.SparkException: {_CRASH}", f"SparkException: {_CRASH}"),
        # How its connection ended is by chance.
        (
            f"a.SparkException: {_CRASH}\nCaused by: java.io.EOFException",
            f"SparkException: {_CRASH} (EOFException)",
        ),
        (
            f"a.SparkException: {_CRASH}\nCaused by: java.net.SocketException: Connection reset",
            f"SparkException: {_CRASH} (SocketException)",
        ),
        ("a.B: x\nCaused by: java.lang.OutOfMemoryError: full", "OutOfMemoryError: full"),
    ],
)
def test_a_crash_is_told_and_not_how_it_was_noticed(text: str, headline: str) -> None:
    assert describe_loss(Chain.of(text)) == headline
