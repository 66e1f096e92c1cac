"""Loss of a job's process, or of its memory, recognised in the text of a Spark error.

Symptoms of each process:

- A Python worker that the kernel kills leaves no message: Spark finds the end of its stream. A worker with
  limited memory (`spark.executor.pyspark.memory`) raises MemoryError.
- An executor ends itself with status 52 when its JVM has no memory left. The kernel, or a cluster manager
  that counts all of its processes, kills it with SIGKILL, which is status 137.
- A driver with local executors ends as an executor does. Any other driver goes on without the thread that
  failed, in an unknown state, unless it was started with ``-XX:+ExitOnOutOfMemoryError`` (status 3).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.errors import Cause, Chain


class JobProcess(Choice):
    """A process that works for a job."""

    DRIVER = "DRIVER"
    EXECUTOR = "EXECUTOR"
    #: A Python process of an executor.
    WORKER = "WORKER"


#: Exit statuses of a JVM that ends itself without memory: Spark's own, and the JVM's.
_OWN_STATUSES = frozenset({52, 3})
_SIGKILL = 9
_OUT_OF_MEMORY = re.compile(r"(?:^|[a-z_])MemoryError$|OutOfMemoryError$")
_CRASHED = "Python worker exited unexpectedly (crashed)"
_EXECUTOR_LOST = re.compile(r"exited caused by one of the running tasks\b.*?Reason: (.*)")
_STATUS = re.compile(r"(?:exit(?:ed)?[ _](?:with )?(?:exit )?(?:code|status):? ?|code )(\d+)", re.IGNORECASE)
_COUNTED = re.compile(r"memory limits|OOMKilled|container OOM|JVM OOM|memory overhead", re.IGNORECASE)
_IN_A_TASK = re.compile(r"Lost task \S+ in stage|Job aborted due to stage failure")


@dataclass(frozen=True, slots=True)
class ProcessLoss:
    process: JobProcess
    #: True if memory is certainly the reason. For a killed process it is the likely reason.
    is_of_memory: bool
    #: Exit status; None if it is unknown or the process goes on. A signal is 128 plus its number.
    exit_code: int | None = None

    @property
    def was_killed(self) -> bool:
        return self.exit_code == 128 + _SIGKILL

    @classmethod
    def from_exit_code(cls, exit_code: int | None) -> ProcessLoss:
        code = 128 - exit_code if exit_code is not None and exit_code < 0 else exit_code
        return cls(JobProcess.DRIVER, code in _OWN_STATUSES, code)


def find_process_loss(text: str, chain: Chain) -> ProcessLoss | None:
    """Return the loss that a failure reports; None for any other failure."""
    for cause in chain.from_inside:
        # Java classes have a package; classes of a Python library may have one, too.
        if not _OUT_OF_MEMORY.search(cause.name):
            continue
        if not cause.kind.startswith(("java.", "org.apache.spark.")):
            return ProcessLoss(JobProcess.WORKER, is_of_memory=True)
        is_of_task = _IN_A_TASK.search(text) is not None or cause.name != "OutOfMemoryError"
        return ProcessLoss(JobProcess.EXECUTOR if is_of_task else JobProcess.DRIVER, is_of_memory=True)
    lost = _EXECUTOR_LOST.search(text)
    if lost is not None:
        reason = lost.group(1)
        status = _STATUS.search(reason)
        code = None if status is None else int(status.group(1))
        return ProcessLoss(JobProcess.EXECUTOR, code == 52 or _COUNTED.search(reason) is not None, code)
    return None if _find_crash(chain) is None else ProcessLoss(JobProcess.WORKER, is_of_memory=False)


def describe_loss(chain: Chain) -> str:
    """Return the headline of a loss: the crash of a worker, rather than the end of its connection."""
    crash = _find_crash(chain)
    return chain.headline if crash is None or crash is chain.root else f"{crash} ({chain.root.name})"


def _find_crash(chain: Chain) -> Cause | None:
    return next((cause for cause in chain.causes if _CRASHED in cause.message), None)


def is_out_of_memory(name: str) -> bool:
    return _OUT_OF_MEMORY.search(name) is not None


#: Advice for people, by process; each is a sentence without a full stop.
WHAT_TO_DO = {
    JobProcess.WORKER: "let a micro-batch take fewer records, keep less in the function, or give Python "
    "more: raise spark.executor.pyspark.memory where it is set (all workers of an executor share it), else "
    "spark.executor.memoryOverhead",
    JobProcess.EXECUTOR: "raise spark.executor.memory where the heap was full (exit code 52), and "
    "spark.executor.memoryOverhead where the process was killed (137: Python workers, Arrow and RocksDB are "
    "outside of the heap); or let a micro-batch take fewer records, in more tasks",
    JobProcess.DRIVER: "raise spark.driver.memory, which has to be said before the JVM starts "
    "(spark-submit --driver-memory), or spark.driver.memoryOverhead where it was killed; the next start, or "
    "a standby, goes on from the last checkpoint",
}
