"""The threads of one query in the driver's JVM, and the end of that JVM."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark import SparkContext

from flinkish_spark.bridge.session import jvm, runs_tasks_itself

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Spark's name of a thread that runs a task.
_TASK = re.compile(r"Executor task launch worker for task [\w.]+ in stage (\d+)\.\d+ \(TID \d+\)")
#: Jobs of a query that may still have tasks: those of its last micro-batch are the newest.
_NEWEST_JOBS = 20
#: Of a stack, the innermost frames that are told.
_MOST_FRAMES = 12
_KILLED_S = 10
#: Set in each driver of Databricks, whose JVM belongs to all notebooks of its cluster.
_ON_DATABRICKS = "DATABRICKS_RUNTIME_VERSION"


class QueryThreads:
    """The thread of a query, and those of its tasks where they run in this JVM.

    Parameters
    ----------
    run_id
        Of the query's run, by which Spark groups its jobs.
    """

    def __init__(self, spark: SparkSession, run_id: str) -> None:
        self._spark, self._run_id = spark, run_id
        self._has_tasks = runs_tasks_itself(spark)

    def tasks(self) -> tuple[str, ...]:
        """Return the names of task threads that have not ended; on a cluster none is seen."""
        if not self._has_tasks:
            return ()
        alive = str(jvm(self._spark).java.lang.Thread.getAllStackTraces().keySet().toString())
        found = {one.group(): int(one.group(1)) for one in _TASK.finditer(alive)}
        own = self._stages() if found else set()
        return tuple(sorted(name for name, stage in found.items() if stage in own))

    def interrupt(self) -> None:
        """Cancel the query's jobs once more, and interrupt its threads in this JVM."""
        self._spark.sparkContext.cancelJobGroup(self._run_id)
        for thread in self._own():
            thread.interrupt()

    def stacks(self) -> tuple[str, ...]:
        """Return where the threads stand, each with its innermost frames, for people."""
        return tuple(f"{thread.getName()}: {self._frames(thread)}" for thread in self._own())

    def _frames(self, thread: Any) -> str:
        frames = list(thread.getStackTrace())[:_MOST_FRAMES]
        return " < ".join(str(frame.toString()) for frame in frames)

    def _own(self) -> Iterator[Any]:
        tasks = self.tasks()
        for thread in jvm(self._spark).java.lang.Thread.getAllStackTraces().keySet().toArray():
            name = str(thread.getName())
            if name in tasks or f"runId = {self._run_id}" in name:
                yield thread

    def _stages(self) -> set[int]:
        tracker = self._spark.sparkContext.statusTracker()
        jobs = sorted(tracker.getJobIdsForGroup(self._run_id))[-_NEWEST_JOBS:]
        known = [info for info in map(tracker.getJobInfo, jobs) if info is not None]
        return {int(stage) for info in known for stage in info.stageIds}


def end_jvm(spark: SparkSession) -> bool:
    """End the driver's JVM as it stands, with all that runs in it; return whether that could be done.

    On Databricks it is not: other people's notebooks run there.
    """
    if _ON_DATABRICKS in os.environ:
        return False
    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None:
        process.kill()
        try:
            process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            return False
        return True
    try:
        # Below spark-submit the JVM has started this process.
        jvm(spark).java.lang.Runtime.getRuntime().halt(1)
    except (Py4JError, OSError):
        # It answers no more.
        return True
    return False
