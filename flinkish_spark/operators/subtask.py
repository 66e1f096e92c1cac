"""Which part of an operator a function runs in: what a runtime context tells of the task at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from pyspark import TaskContext


@dataclass(frozen=True, slots=True)
class Subtask:
    """One of an operator's parallel parts.

    Parameters
    ----------
    index, parallelism
        Its number, from 0, and how many there are.
    attempt
        How often Spark has begun this task before, in its micro-batch.
    """

    index: int = 0
    parallelism: int = 1
    attempt: int = 0


_IN_HARNESS: ContextVar[Subtask | None] = ContextVar("_IN_HARNESS", default=None)


def current_subtask() -> Subtask:
    """Return the subtask of Spark's task, or of a harness; else there is one only."""
    given = _IN_HARNESS.get()
    if given is not None:
        return given
    task = TaskContext.get()
    if task is None:
        return Subtask()
    return Subtask(task.partitionId(), task.numPartitions(), task.attemptNumber())


@contextmanager
def running_as(subtask: Subtask) -> Iterator[None]:
    """Let functions that are called within see a subtask; for harnesses."""
    token = _IN_HARNESS.set(subtask)
    try:
        yield
    finally:
        _IN_HARNESS.reset(token)


class SubtaskFacts:
    """The part of a runtime context that is about the task; names as in PyFlink."""

    uid: str
    max_parallelism: int

    def get_index_of_this_subtask(self) -> int:
        """Return the number of the current subtask, from 0."""
        return current_subtask().index

    def get_number_of_parallel_subtasks(self) -> int:
        """Return how many subtasks the operator has."""
        return current_subtask().parallelism

    def get_max_number_of_parallel_subtasks(self) -> int:
        """Return the number of key groups."""
        return self.max_parallelism

    def get_attempt_number(self) -> int:
        """Return how often Spark has begun the current task before, in its micro-batch."""
        return current_subtask().attempt

    def get_task_name(self) -> str:
        """Return what errors call the operator: its uid, or its name."""
        return self.uid

    def get_task_name_with_subtasks(self) -> str:
        """Return the name with the current subtask, counted from 1: ``totals (1/4)``."""
        subtask = current_subtask()
        return f"{self.uid} ({subtask.index + 1}/{subtask.parallelism})"
