"""Metrics as functions see them: groups of counters, gauges, meters and distributions, by PyFlink's names.

They travel as accumulators do (:mod:`flinkish_spark.core.accumulators`): the values of a task come to the
driver with Spark's own accumulator updates, and count once however often the task ran.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flinkish_spark.core.accumulators import TaskMetric, tally_of_task
from flinkish_spark.core.validation import check_function
from flinkish_spark.protocol.user_metrics import UserMetricKind

_LONGEST_NAME = 200
#: Returns the current operator and subtask; None where nobody reads a metric: in a harness, or where a
#: function runs once more.
_Place = Callable[[], str | None]
#: Gauges in this worker, by the name under which their operator counts, and by uid and name. If an operator
#: is opened again, those of the newer copy.
_GAUGES: dict[str, dict[tuple[str, str], Gauge]] = {}


def ask_gauges(counts_as: str) -> None:
    for gauge in _GAUGES.get(counts_as, {}).values():
        gauge.ask_here()


class _Metric:
    kind: UserMetricKind

    def __init__(self, uid: str, name: str, place: _Place) -> None:
        self._uid, self._name, self._place = uid, name, place
        self._apart = TaskMetric(self.kind)

    def _here(self) -> TaskMetric:
        place = self._place()
        if place is None:
            return self._apart
        own = tally_of_task().metrics.setdefault((place, self._uid), {})
        known = own.get(self._name)
        if known is None or known.kind is not self.kind:
            known = own[self._name] = TaskMetric(self.kind)
        return known


class Counter(_Metric):
    kind = UserMetricKind.COUNTER

    def inc(self, n: int = 1) -> None:
        self._here().count += _whole(n, "a counter is changed by")

    def dec(self, n: int = 1) -> None:
        self._here().count -= _whole(n, "a counter is changed by")

    def get_count(self) -> int:
        return self._here().count


class Meter(_Metric):
    """Counts events; its reader computes a rate from the count."""

    kind = UserMetricKind.METER

    def mark_event(self, value: int = 1) -> None:
        self._here().count += _whole(value, "a meter marks")

    def get_count(self) -> int:
        return self._here().count


class Distribution(_Metric):
    """The number, sum, least and greatest of values."""

    kind = UserMetricKind.DISTRIBUTION

    def update(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TypeError(f"a distribution takes finite numbers, not {value!r:.100}")
        self._here().add(float(value))


class Gauge(_Metric):
    """Shows what a function returns, asked at the end of each task in which its operator has had a turn."""

    kind = UserMetricKind.GAUGE

    def __init__(self, uid: str, name: str, place: _Place, show: Callable[[], float]) -> None:
        super().__init__(uid, name, place)
        self._show = show

    def register(self) -> None:
        """Have this task report the gauge, and later tasks in which the operator runs."""
        place = self._place()
        if place is not None:
            _GAUGES.setdefault(place.rpartition("/")[0], {})[self._uid, self._name] = self
        self.ask_here()

    def ask_here(self) -> None:
        self._here().show = self._show


def _whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} a whole number, not {value!r:.100}")
    return value


class MetricGroup:
    """Makes metrics of one function; as PyFlink's, `RuntimeContext.get_metrics_group()` returns one.

    What functions of an operator measure under one name is one metric. Names are few and known beforehand:
    a name must not hold a key or any other value of a record.

    Examples
    --------
    >>> from flinkish_spark import FlatMapFunction
    >>> class Parse(FlatMapFunction):
    ...     def open(self, context):
    ...         group = context.get_metrics_group().add_group("parser")
    ...         self.broken = group.counter("broken")
    ...         self.lengths = group.distribution("lengths")
    ...     def flat_map(self, line):
    ...         self.lengths.update(len(line))
    ...         if line.isdigit():
    ...             yield (int(line),)
    ...         else:
    ...             self.broken.inc()
    """

    def __init__(self, uid: str, place: _Place, prefix: str = "") -> None:
        self._uid, self._place, self._prefix = uid, place, prefix

    def add_group(self, name: str, extra: str | None = None) -> MetricGroup:
        """Return the group below this one; with `extra`, of a key and its value, the group below both.

        Raises
        ------
        ValueError
            A name cannot be used.
        """
        below = self._qualify(name) if extra is None else f"{self._qualify(name)}.{self._check_name(extra)}"
        return MetricGroup(self._uid, self._place, f"{below}.")

    def counter(self, name: str) -> Counter:
        """Return the counter of that name."""
        return Counter(self._uid, self._qualify(name), self._place)

    def meter(self, name: str, time_span_in_seconds: int = 60) -> Meter:
        """Return the meter of that name; the time span is not used, since the reader chooses one."""
        return Meter(self._uid, self._qualify(name), self._place)

    def distribution(self, name: str) -> Distribution:
        """Return the distribution of that name."""
        return Distribution(self._uid, self._qualify(name), self._place)

    def gauge(self, name: str, obj: Callable[[], float]) -> None:
        """Show what `obj` returns, a number, at the end of each micro-batch's task.

        What it raises is left out, and so is what is no finite number: a metric never fails a job.
        """
        if not callable(obj):
            raise TypeError(f"the gauge '{name}' of '{self._uid}' is nothing that can be called")
        check_function(obj, f"the gauge '{name}' of '{self._uid}'", 0)
        Gauge(self._uid, self._qualify(name), self._place, obj).register()

    def _qualify(self, name: str) -> str:
        return f"{self._prefix}{self._check_name(name)}"

    def _check_name(self, name: str) -> str:
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            raise ValueError(f"'{self._uid}' calls a metric or a group {name!r:.100}; a name has letters")
        if len(self._prefix) + len(name) > _LONGEST_NAME:
            raise ValueError(f"a metric of '{self._uid}' has a name of more than {_LONGEST_NAME} characters")
        return name
