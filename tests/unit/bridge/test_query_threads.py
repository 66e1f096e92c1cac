"""Which threads of a JVM are at work for a query."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.bridge import query_threads
from flinkish_spark.bridge.query_threads import QueryThreads

_TASK = "Executor task launch worker for task {}.0 in stage {}.0 (TID {})"
_AT_WORK = [
    "java.net.SocketInputStream.read(SocketInputStream.java)",
    "org.apache.spark.executor.Executor.run",
]
_IDLE = ["jdk.internal.misc.Unsafe.park", "java.util.concurrent.ThreadPoolExecutor.getTask(...:1061)"]


class Thread:
    def __init__(self, name: str, frames: list[str]) -> None:
        self.name, self.frames = name, frames

    def getName(self) -> str:
        return self.name

    def getStackTrace(self) -> list[Any]:
        return [SimpleNamespace(toString=lambda one=one: one) for one in self.frames]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[Thread]:
    """The threads of the JVM, in which the run `run` has the stages 7 and 8."""
    found: list[Thread] = []
    keys = SimpleNamespace(toString=lambda: str([one.name for one in found]), toArray=lambda: list(found))
    of_java = SimpleNamespace(getAllStackTraces=lambda: SimpleNamespace(keySet=lambda: keys))
    java = SimpleNamespace(lang=SimpleNamespace(Thread=of_java))
    monkeypatch.setattr(query_threads, "jvm", lambda spark: SimpleNamespace(java=java))
    monkeypatch.setattr(query_threads, "runs_tasks_itself", lambda spark: True)
    monkeypatch.setattr(QueryThreads, "_stages", lambda self: {7, 8})
    return found


def test_a_pooled_thread_that_kept_the_name_of_its_last_task_is_not_at_work(threads: list[Thread]) -> None:
    """On Spark 4.1 each stop waited for it, until the JVM was ended after three minutes."""
    query: Any = QueryThreads(None, "run")  # type: ignore[arg-type]
    threads += [Thread(_TASK.format(0, 7, 1), _IDLE), Thread("main", _AT_WORK)]
    assert query.tasks() == ()
    threads += [Thread(_TASK.format(0, 8, 2), _AT_WORK), Thread(_TASK.format(0, 5, 3), _AT_WORK)]
    assert query.tasks() == (_TASK.format(0, 8, 2),)
    threads.append(Thread("stream execution thread for [runId = run]", _AT_WORK))
    assert [one.split(":")[0] for one in query.stacks()] == [threads[2].name, threads[-1].name]
