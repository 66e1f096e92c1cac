"""Accumulators as functions see them, and how a task's part of them comes to the driver.

A function adds to its accumulators in a Python worker. The values of a task travel with Spark's own
accumulator updates, of which the driver keeps one for each operator and subtask: a task that is repeated
reports the same again, and counts once. The staged micro-batch keeps the sum, so a decision includes it.

The same updates carry the metrics of functions (:mod:`flinkish_spark.core.metric_group`), and the names of
the bases of key groups that a task has written to a bucket. Spark learns in the same way which version of a
state store a task has written, so if a task ran twice, the driver knows both versions or neither.
"""

from __future__ import annotations

import logging
import math
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pyspark import TaskContext
from pyspark.accumulators import Accumulator as SparkAccumulator
from pyspark.accumulators import AccumulatorParam, _accumulatorRegistry

from flinkish_spark.protocol.accumulators import (
    AccumulatorKind,
    AccumulatorValue,
    add_value,
    compute_result,
    merge_accumulators,
)
from flinkish_spark.protocol.user_metrics import UserMetric, UserMetricKind, merge_subtasks

LOG = logging.getLogger(__name__)
#: Local property of a query of ours: the number of Spark's accumulator that carries what tasks add.
ACCUMULATORS_PROPERTY = "flinkish.accumulators"

_LONGEST_NAME = 200


@dataclass(slots=True)
class TaskMetric:
    kind: UserMetricKind
    count: int = 0
    total: float = 0.0
    least: float | None = None
    most: float | None = None
    #: Returns the value of a gauge; called when the task is done, which is when this is pickled.
    show: Callable[[], float] | None = None

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.least = value if self.least is None else min(self.least, value)
        self.most = value if self.most is None else max(self.most, value)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.show is None:
            return TaskMetric, (self.kind, self.count, self.total, self.least, self.most)
        shown = TaskMetric(self.kind)
        try:
            shown.add(float(self.show()))
        except Exception as error:
            LOG.warning("a gauge is left out: %s: %s", type(error).__name__, error)
        return TaskMetric, (self.kind, shown.count, shown.total, shown.least, shown.most)


@dataclass
class Tally:
    """Accumulators, metrics and base files that tasks report to the driver beside their rows."""

    #: By place (operator and subtask) and name: the accumulator's kind and its value.
    counts: dict[str, dict[str, tuple[str, Any]]] = field(default_factory=dict)
    #: Files of big key groups that were written.
    bases: set[str] = field(default_factory=set)
    #: By place and uid of an operator, and by name: the values of its metrics.
    metrics: dict[tuple[str, str], dict[str, TaskMetric]] = field(default_factory=dict)


class TallyParam(AccumulatorParam[Tally]):
    """Merges the tallies of tasks: the newest of each place, and all bases."""

    def zero(self, value: Tally) -> Tally:
        return Tally()

    def addInPlace(self, value1: Tally, value2: Tally) -> Tally:
        value1.counts.update(value2.counts)
        value1.bases.update(value2.bases)
        value1.metrics.update(value2.metrics)
        return value1


def tally_of_task() -> Tally:
    """Return the tally of this worker's current task; Spark sends it when the task is done."""
    task = TaskContext.get()
    number = None if task is None else task.getLocalProperty(ACCUMULATORS_PROPERTY)
    if number is None:
        return Tally()
    # Spark forgets them at the beginning of a task, and sends what is there at its end.
    known: SparkAccumulator[Tally] | None = _accumulatorRegistry.get(int(number))
    if known is None:
        known = SparkAccumulator(int(number), Tally(), TallyParam())
    return known._value


def tell_base(name: str) -> None:
    tally_of_task().bases.add(name)


def sum_counts(tally: Tally) -> dict[str, AccumulatorValue]:
    parts = (
        {name: AccumulatorValue.of(AccumulatorKind(kind), held) for name, (kind, held) in own.items()}
        for _, own in sorted(tally.counts.items())
    )
    return merge_accumulators(parts)


def merge_metrics(tally: Tally) -> dict[str, dict[str, UserMetric]]:
    return merge_subtasks(
        (uid, name, UserMetric(one.kind, one.count, one.total, one.least, one.most))
        for (_, uid), own in sorted(tally.metrics.items())
        for name, one in own.items()
        if is_finite(one)
    )


def is_finite(one: TaskMetric) -> bool:
    is_gauge = one.kind is UserMetricKind.GAUGE
    return math.isfinite(one.total) and not (is_gauge and one.count == 0)


class Accumulator(ABC):
    """Counts over all tasks of a job; made by a function, and added to its runtime context in `open`.

    Examples
    --------
    >>> from flinkish_spark import FlatMapFunction, LongCounter
    >>> class Parse(FlatMapFunction):
    ...     def open(self, context):
    ...         self.broken = context.add_accumulator("broken", LongCounter())
    ...     def flat_map(self, line):
    ...         if line.isdigit():
    ...             yield (int(line),)
    ...         else:
    ...             self.broken.add(1)
    """

    kind: ClassVar[AccumulatorKind]

    def __init__(self) -> None:
        self._name = ""
        self._place: Callable[[], str | None] | None = None
        #: Values that do not count: added in a harness, or where a function runs once more.
        self._apart: dict[str, tuple[str, Any]] = {}

    def bind(self, name: str, place: Callable[[], str | None]) -> None:
        """Give it a name; called by the runtime context.

        Parameters
        ----------
        place
            Returns the operator and the subtask in which the function runs; None where it does not count.
        """
        self._name, self._place = name, place

    def add(self, value: Any = 1) -> None:
        """Add a value; an average or a histogram counts it as one more value.

        Raises
        ------
        TypeError
            The value is no number, or not the whole number that this kind needs.
        """
        own = self._own()
        _, held = own.get(self._name, (self.kind.value, None))
        own[self._name] = self.kind.value, add_value(self.kind, held, value)

    def get_local_value(self) -> Any:
        """Return the value that the current task has added so far."""
        _, held = self._own().get(self._name, (self.kind.value, None))
        return compute_result(self.kind, held)

    def _own(self) -> dict[str, tuple[str, Any]]:
        place = None if self._place is None else self._place()
        if place is None:
            return self._apart
        return tally_of_task().counts.setdefault(place, {})


class IntCounter(Accumulator):
    """The sum of whole numbers."""

    kind = AccumulatorKind.INT_COUNTER


class LongCounter(Accumulator):
    """The sum of whole numbers; in Python the same as an :class:`IntCounter`."""

    kind = AccumulatorKind.LONG_COUNTER


class DoubleCounter(Accumulator):
    """The sum of numbers."""

    kind = AccumulatorKind.DOUBLE_COUNTER


class AverageAccumulator(Accumulator):
    """The average of numbers; None without any."""

    kind = AccumulatorKind.AVERAGE


class LongMinimum(Accumulator):
    """The least of whole numbers; None without any."""

    kind = AccumulatorKind.LONG_MINIMUM


class LongMaximum(Accumulator):
    """The greatest of whole numbers; None without any."""

    kind = AccumulatorKind.LONG_MAXIMUM


class DoubleMinimum(Accumulator):
    """The least of numbers; None without any."""

    kind = AccumulatorKind.DOUBLE_MINIMUM


class DoubleMaximum(Accumulator):
    """The greatest of numbers; None without any."""

    kind = AccumulatorKind.DOUBLE_MAXIMUM


class Histogram(Accumulator):
    """How often each whole number was added; for few different ones, since all of them are stored."""

    kind = AccumulatorKind.HISTOGRAM


_A = TypeVar("_A", bound=Accumulator)


class Accumulators:
    """The part of a runtime context that is about accumulators; see `TaskFacts`."""

    uid: str
    #: Where accumulators would not count, the reason and what to do, as it reads after "and"; else empty.
    why_no_accumulators = ""

    def _place(self) -> str | None:
        raise NotImplementedError

    def _get_accumulators(self) -> dict[str, Accumulator]:
        # Contexts are made in many places; each has its own.
        known: dict[str, Accumulator] = self.__dict__.setdefault("_accumulators", {})
        return known

    def add_accumulator(self, name: str, accumulator: Accumulator) -> Any:
        """Give an accumulator a name in the job, and return it. Called in `open`.

        What functions of the same name and kind add is one number.
        """
        if self.why_no_accumulators:
            raise RuntimeError(f"'{self.uid}' adds the accumulator '{name}', and {self.why_no_accumulators}")
        if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
            raise ValueError(
                f"'{self.uid}' calls an accumulator {name!r:.200}; a name has 1 to {_LONGEST_NAME} characters"
            )
        if not isinstance(accumulator, Accumulator) or not hasattr(type(accumulator), "kind"):
            raise ValueError(
                f"the accumulator '{name}' of '{self.uid}' is a {type(accumulator).__name__}; its values are "
                "stored in checkpoints, so it must be one of flinkish_spark's: LongCounter(), Histogram()..."
            )
        if name in self._get_accumulators():
            raise ValueError(f"'{self.uid}' adds the accumulator '{name}' twice")
        accumulator.bind(name, self._place)
        self._get_accumulators()[name] = accumulator
        return accumulator

    def get_accumulator(self, name: str) -> Any:
        return self._get_accumulators()[name]

    def get_int_counter(self, name: str) -> IntCounter:
        return self._get_or_add(name, IntCounter)

    def get_long_counter(self, name: str) -> LongCounter:
        return self._get_or_add(name, LongCounter)

    def get_double_counter(self, name: str) -> DoubleCounter:
        return self._get_or_add(name, DoubleCounter)

    def get_histogram(self, name: str) -> Histogram:
        return self._get_or_add(name, Histogram)

    def _get_or_add(self, name: str, kind: type[_A]) -> _A:
        known = self._get_accumulators().get(name)
        if known is None:
            known = self.add_accumulator(name, kind())
        if type(known) is not kind:
            raise ValueError(f"the accumulator '{name}' of '{self.uid}' is a {type(known).__name__}")
        return known


def as_results(values: Mapping[str, AccumulatorValue]) -> dict[str, Any]:
    return {name: one.value for name, one in values.items()}
