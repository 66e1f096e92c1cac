"""The subtask that a function runs in, and the facts about it in a runtime context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from pyspark import TaskContext

from flinkish_spark.core.accumulators import (
    Accumulator,
    Accumulators,
    DoubleCounter,
    Histogram,
    IntCounter,
    LongCounter,
)
from flinkish_spark.core.distributed_cache import DistributedCache, find_cached_files
from flinkish_spark.core.metric_group import MetricGroup, ask_gauges


@dataclass(frozen=True, slots=True)
class Subtask:
    #: Its number, from 0, and the number of subtasks; None if a worker cannot know it.
    index: int = 0
    parallelism: int | None = 1
    #: How often Spark has begun this task before, in its micro-batch.
    attempt: int = 0
    #: The operator's name, beside its uid; empty without a name.
    name: str = ""


#: Number of subtasks and name of the running operator: PySpark does not tell how many tasks there are.
_OPERATOR: ContextVar[tuple[int | None, str]] = ContextVar("_OPERATOR", default=(None, ""))
#: Name of that operator in tallies of accumulators; empty where it does not count.
_COUNTS_AS: ContextVar[str] = ContextVar("_COUNTS_AS", default="")
_IN_HARNESS: ContextVar[Subtask | None] = ContextVar("_IN_HARNESS", default=None)


def current_subtask() -> Subtask:
    """Return the subtask of Spark's task, or of a harness; outside of both the only one."""
    given = _IN_HARNESS.get()
    if given is not None:
        return given
    task = TaskContext.get()
    if task is None:
        return Subtask()
    number, (parallelism, name) = task.partitionId(), _OPERATOR.get()
    # In one stage with other operators its tasks may have higher numbers.
    index = number if parallelism is None else number % parallelism
    return Subtask(index, parallelism, task.attemptNumber(), name)


@contextmanager
def running_in(parallelism: int, name: str = "", counts_as: str = "") -> Iterator[None]:
    """Set the number of subtasks that functions see in the block; their own number is that of the task."""
    token = _OPERATOR.set((parallelism, name))
    try:
        with counting_as(counts_as):
            yield
    finally:
        _OPERATOR.reset(token)


@contextmanager
def counting_as(counts_as: str) -> Iterator[None]:
    """Let functions in the block add to accumulators as `counts_as`; not at all if it is empty."""
    token = _COUNTS_AS.set(counts_as)
    try:
        ask_gauges(counts_as)
        yield
    finally:
        _COUNTS_AS.reset(token)


@contextmanager
def running_as(subtask: Subtask) -> Iterator[None]:
    token = _IN_HARNESS.set(subtask)
    try:
        yield
    finally:
        _IN_HARNESS.reset(token)


class TaskFacts(Protocol):
    """Facts about the current task in a runtime context; names as in PyFlink."""

    def get_index_of_this_subtask(self) -> int:
        """Return the number of the current subtask, from 0; see also the six that follow.

        These seven may be asked later, too, of a context that `open` has kept: a copy of a function may serve
        other subtasks in later micro-batches. A result must not follow from them.
        """

    def get_number_of_parallel_subtasks(self) -> int:
        """Return the number of subtasks; of a function without state only after `set_parallelism`."""

    def get_max_number_of_parallel_subtasks(self) -> int:
        """Return the number of key groups."""

    def get_attempt_number(self) -> int:
        """Return how often Spark has begun the current task before, in its micro-batch."""

    def get_task_name(self) -> str:
        """Return the operator's name in errors."""

    def get_task_name_with_subtasks(self) -> str:
        """Return the task name with the current subtask, counted from 1: ``totals (1/4)``."""

    def get_distributed_cache(self) -> DistributedCache:
        """Return the files that `env.register_cached_file` has registered."""

    def add_accumulator(self, name: str, accumulator: Accumulator) -> Any:
        """Give an accumulator a name in the job, and return it; see docs/keyed-functions.md."""

    def get_accumulator(self, name: str) -> Any:
        """Return an accumulator that this function has added; raise KeyError if it has not."""

    def get_int_counter(self, name: str) -> IntCounter:
        """Return a counter of whole numbers, added if it is not there yet."""

    def get_long_counter(self, name: str) -> LongCounter:
        """Return a counter of whole numbers, added if it is not there yet."""

    def get_double_counter(self, name: str) -> DoubleCounter:
        """Return a counter of numbers, added if it is not there yet."""

    def get_histogram(self, name: str) -> Histogram:
        """Return a histogram, added if it is not there yet."""

    def get_metrics_group(self) -> MetricGroup:
        """Return the group in which this function registers metrics; see docs/metrics.md."""


class SubtaskFacts(Accumulators):
    """The :class:`TaskFacts` of a runtime context."""

    uid: str
    max_parallelism: int

    def _counts_as(self) -> str:
        return _COUNTS_AS.get()

    def _place(self) -> str | None:
        counts_as, task = self._counts_as(), TaskContext.get()
        return None if not counts_as or task is None else f"{counts_as}/{task.partitionId():06}"

    def _subtask(self) -> Subtask:
        return current_subtask()

    def get_metrics_group(self) -> MetricGroup:
        return MetricGroup(self.uid, lambda: None if self.why_no_accumulators else self._place())

    def get_index_of_this_subtask(self) -> int:
        return self._subtask().index

    def get_number_of_parallel_subtasks(self) -> int:
        parallelism = self._subtask().parallelism
        if parallelism is None:
            raise RuntimeError(
                f"a worker does not know the number of tasks of '{self.uid}': PySpark does not tell it; call "
                "set_parallelism(n) on it, or ask in a function on a keyed stream"
            )
        return parallelism

    def get_max_number_of_parallel_subtasks(self) -> int:
        return self.max_parallelism

    def get_attempt_number(self) -> int:
        return self._subtask().attempt

    def get_distributed_cache(self) -> DistributedCache:
        return find_cached_files(self.uid)

    def get_task_name(self) -> str:
        """Return the operator's name in errors: its name, else its uid."""
        return self._subtask().name or self.uid

    def get_task_name_with_subtasks(self) -> str:
        subtask = self._subtask()
        total = "?" if subtask.parallelism is None else subtask.parallelism
        return f"{self.get_task_name()} ({subtask.index + 1}/{total})"
