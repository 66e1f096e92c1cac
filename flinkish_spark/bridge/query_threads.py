"""The threads of one query in the driver's JVM, and the end of that JVM."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from py4j.clientserver import ClientServer
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from flinkish_spark.bridge.session import jvm, runs_tasks_itself

R = TypeVar("R")

#: Prefix of Spark's task threads.
_TASK = re.compile(r"Executor task launch worker for task [\w.]+ in stage (\d+)\.\d+ \(TID \d+\)")
#: Number of the newest Spark jobs of a query that may still have tasks.
_NEWEST_JOBS = 20
#: Number of the innermost frames of a stack in messages.
_MOST_FRAMES = 12
_KILLED_S = 10
#: Number of a query's jobs in our threads.
_MOST_JOBS = 8
#: Spark's local property with the job group, which is the run id of the query.
_GROUP = "spark.jobGroup.id"
#: Set in every driver on Databricks, whose JVM is shared by all notebooks of the cluster.
_ON_DATABRICKS = "DATABRICKS_RUNTIME_VERSION"


class QueryThreads:
    """The thread of a query, and the threads of its tasks that run in this JVM."""

    def __init__(self, spark: SparkSession, run_id: str) -> None:
        self._spark, self._run_id = spark, run_id
        self._has_tasks = runs_tasks_itself(spark)

    def tasks(self) -> tuple[str, ...]:
        """Return the names of task threads that have not ended; empty on a cluster."""
        if not self._has_tasks:
            return ()
        alive = str(jvm(self._spark).java.lang.Thread.getAllStackTraces().keySet().toString())
        found = {one.group(): int(one.group(1)) for one in _TASK.finditer(alive)}
        own = self._stages() if found else set()
        names = {name for name, stage in found.items() if stage in own}
        # A thread of the pool may keep the name of its last task, for a minute or until the next one.
        return tuple(sorted(name for name, thread in self._find(names) if not _is_idle(thread)))

    def interrupt(self) -> None:
        """Cancel the query's jobs once more, and interrupt its threads in this JVM."""
        self._spark.sparkContext.cancelJobGroup(self._run_id)
        for thread in self._own():
            thread.interrupt()

    def stacks(self) -> tuple[str, ...]:
        found = []
        for thread in self._own():
            frames = list(thread.getStackTrace())[:_MOST_FRAMES]
            found.append(f"{thread.getName()}: {' < '.join(str(frame.toString()) for frame in frames)}")
        return tuple(found)

    def _own(self) -> Iterator[Any]:
        return (thread for _, thread in self._find(self.tasks(), f"runId = {self._run_id}"))

    def _find(self, names: Collection[str], part: str = "") -> Iterator[tuple[str, Any]]:
        if not names and not part:
            return
        for thread in jvm(self._spark).java.lang.Thread.getAllStackTraces().keySet().toArray():
            name = str(thread.getName())
            if name in names or (part and part in name):
                yield name, thread

    def _stages(self) -> set[int]:
        tracker = self._spark.sparkContext.statusTracker()
        jobs = sorted(tracker.getJobIdsForGroup(self._run_id))[-_NEWEST_JOBS:]
        known = [info for info in map(tracker.getJobInfo, jobs) if info is not None]
        return {int(stage) for info in known for stage in info.stageIds}


def _is_idle(thread: Any) -> bool:
    return any("ThreadPoolExecutor.getTask" in str(one.toString()) for one in thread.getStackTrace())


class JobThreads:
    """Runs Spark jobs of one query in parallel: in the calling thread, and in daemon threads."""

    # The daemons have the caller's session, job group, micro-batch and description; `QueryThreads` finds them
    # by their names in the JVM.

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __call__(self, works: Sequence[Callable[[], R]]) -> list[R]:
        context = self._spark.sparkContext
        # Without pinned threads (one in the JVM for each in Python) local properties would be mixed up.
        if len(works) < 2 or not isinstance(context._gateway, ClientServer):
            return [work() for work in works]
        ends: list[Future[R]] = [Future() for _ in works]
        waiting = deque(zip(works, ends, strict=True))
        properties, session = context._jsc.sc().getLocalProperties(), self._sessions.getActiveSession()
        threads = [
            threading.Thread(
                target=self._run_in_thread, args=(properties.clone(), session, waiting), daemon=True
            )
            for _ in range(min(len(works), _MOST_JOBS) - 1)
        ]
        for thread in threads:
            thread.start()
        _do(waiting)
        for thread in threads:
            thread.join()
        return [end.result() for end in ends]

    def _run_in_thread(self, properties: Any, session: Any, waiting: _Waiting[R]) -> None:
        self._spark.sparkContext._jsc.sc().setLocalProperties(properties)
        name = f"flinkish-jobs [runId = {properties.getProperty(_GROUP, '')}]"
        jvm(self._spark).java.lang.Thread.currentThread().setName(name)
        if session.isDefined():
            self._sessions.setActiveSession(session.get())
        _do(waiting)

    @property
    def _sessions(self) -> Any:
        return jvm(self._spark).org.apache.spark.sql.classic.SparkSession


#: Waiting callables, and their results.
_Waiting = deque[tuple[Callable[[], R], "Future[R]"]]


def _do(waiting: _Waiting[R]) -> None:
    while True:
        try:
            work, end = waiting.popleft()
        except IndexError:
            return
        try:
            end.set_result(work())
        except BaseException as error:
            end.set_exception(error)


def end_jvm(spark: SparkSession) -> bool:
    """End the driver's JVM, except on Databricks; return True if it was ended."""
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
        # With spark-submit the JVM has started this process.
        jvm(spark).java.lang.Runtime.getRuntime().halt(1)
    except (Py4JError, OSError):
        # The JVM does not answer any more.
        return True
    return False
