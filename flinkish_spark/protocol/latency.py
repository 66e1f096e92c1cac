"""Measurements of latency markers, as histograms of bounded size.

A marker is a row with the planning time of its micro-batch and the number of its source. Each subtask of a
keyed operator, and each sink's task, reports when the marker has reached it:

marker rows -> reports in TaskAck.reports -> find_measurements -> Latencies

Numbers of sources and operators are those of `protocol/time_plan.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.limits import MOST_MS, check_factor
from flinkish_spark.protocol.records import SinkAck, TimeReport, iterate_reports, keep_reports

# Up to 63 ms each millisecond has a bucket of its own; above, a bucket is as wide as a 32nd of its values.
#: Buckets per doubling, as a power of two.
_BITS = 5
_EXACT = 1 << (_BITS + 1)


@dataclass(frozen=True, slots=True)
class LatencyHistogram:
    """An immutable histogram of at most 1,000 buckets.

    Parameters
    ----------
    buckets
        Number of latencies by bucket; empty buckets are left out.
    sum_ms
        Sum of all latencies.
    min_ms, max_ms
        The smallest and the greatest latency; None while the histogram is empty.

    Examples
    --------
    >>> seen = LatencyHistogram()
    >>> for latency_ms in (40, 55, 1_000):
    ...     seen = seen.add(latency_ms)
    >>> seen.count, seen.min_ms, seen.mean_ms, seen.quantile_ms(0.5), seen.max_ms
    (3, 40, 365.0, 55, 1000)
    """

    buckets: Mapping[int, int] = field(default_factory=dict)
    sum_ms: int = 0
    min_ms: int | None = None
    max_ms: int | None = None

    @property
    def count(self) -> int:
        """Number of latencies."""
        return sum(self.buckets.values())

    @property
    def mean_ms(self) -> float | None:
        """Mean latency; None if the histogram is empty."""
        return self.sum_ms / self.count if self.buckets else None

    def add(self, latency_ms: int) -> LatencyHistogram:
        """Return the histogram with one more latency, cut to the range from 0 to 365 days."""
        known_ms = max(0, min(latency_ms, MOST_MS))
        number = _find_bucket(known_ms)
        buckets = {**self.buckets, number: self.buckets.get(number, 0) + 1}
        least_ms = known_ms if self.min_ms is None else min(self.min_ms, known_ms)
        most_ms = known_ms if self.max_ms is None else max(self.max_ms, known_ms)
        return LatencyHistogram(buckets, self.sum_ms + known_ms, least_ms, most_ms)

    @classmethod
    def of(cls, latencies_ms: Iterable[int]) -> LatencyHistogram:
        """Return the histogram of the latencies.

        Examples
        --------
        >>> LatencyHistogram.of([5, 9]).count
        2
        """
        found = cls()
        for latency_ms in latencies_ms:
            found = found.add(latency_ms)
        return found

    def merge(self, other: LatencyHistogram) -> LatencyHistogram:
        """Return a histogram of the latencies of both.

        Examples
        --------
        >>> LatencyHistogram().add(5).merge(LatencyHistogram().add(9)).count
        2
        """
        buckets = dict(sorted((Counter(self.buckets) + Counter(other.buckets)).items()))
        least = [ms for ms in (self.min_ms, other.min_ms) if ms is not None]
        most = [ms for ms in (self.max_ms, other.max_ms) if ms is not None]
        sum_ms = self.sum_ms + other.sum_ms
        return LatencyHistogram(buckets, sum_ms, min(least, default=None), max(most, default=None))

    def subtract(self, earlier: LatencyHistogram) -> LatencyHistogram:
        """Return the latencies added after an earlier copy; its minimum and maximum are as exact as a bucket.

        Raises
        ------
        ValueError
            `earlier` holds latencies that this histogram does not.

        Examples
        --------
        >>> before = LatencyHistogram().add(5)
        >>> now = before.add(60).add(61)
        >>> now.subtract(before).count, now.subtract(before).min_ms
        (2, 60)
        """
        if any(count > self.buckets.get(number, 0) for number, count in earlier.buckets.items()):
            raise ValueError("a histogram holds fewer latencies than its earlier copy")
        buckets = dict(sorted((Counter(self.buckets) - Counter(earlier.buckets)).items()))
        if not buckets:
            return LatencyHistogram()
        assert self.min_ms is not None and self.max_ms is not None
        least_ms = max(self.min_ms, _find_lowest_ms(min(buckets)))
        most_ms = min(self.max_ms, _find_highest_ms(max(buckets)))
        return LatencyHistogram(buckets, self.sum_ms - earlier.sum_ms, least_ms, most_ms)

    def quantile_ms(self, share: float) -> int | None:
        """Return the latency that a share of all does not exceed; None if the histogram is empty.

        It is at least the true quantile, and above it by at most a 32nd.

        Parameters
        ----------
        share
            From 0 to 1: 0.5 for the median, 0.99 for the 99th percentile.

        Raises
        ------
        ValueError
            `share` is not a number from 0 to 1.
        """
        rank = max(1, math.ceil(check_factor("share", share, 0, 1) * self.count))
        seen = 0
        for number, count in sorted(self.buckets.items()):
            seen += count
            if seen >= rank:
                assert self.max_ms is not None
                return min(_find_highest_ms(number), self.max_ms)
        return None

    def to_json(self) -> dict[str, Any]:
        """Return count, minimum, maximum, mean and percentiles, for people and metrics.

        Examples
        --------
        >>> LatencyHistogram().add(5).to_json()["p99_ms"]
        5
        """
        return {
            "count": self.count,
            "min_ms": self.min_ms,
            "mean_ms": self.mean_ms,
            "p50_ms": self.quantile_ms(0.5),
            "p95_ms": self.quantile_ms(0.95),
            "p99_ms": self.quantile_ms(0.99),
            "max_ms": self.max_ms,
        }


def _find_bucket(latency_ms: int) -> int:
    shift = max(0, latency_ms.bit_length() - _BITS - 1)
    return (shift << _BITS) + (latency_ms >> shift)


def _find_lowest_ms(bucket: int) -> int:
    shift = 0 if bucket < _EXACT else (bucket >> _BITS) - 1
    return (bucket - (shift << _BITS)) << shift


def _find_highest_ms(bucket: int) -> int:
    return _find_lowest_ms(bucket + 1) - 1


#: Reporters with these numbers measure latency: first the sink itself, then the operators.
SINK_REPORTER = 1 << 20
FIRST_OPERATOR_REPORTER = SINK_REPORTER + 1
#: Reporters from this number on count late records; see `protocol/time_plan.py`.
FIRST_LATE_REPORTER = 1 << 22
_SUBTASK_BITS = 31
#: The bits of a place that hold the subtask; a subtask fits an INT of Spark's.
SUBTASK_MASK = (1 << _SUBTASK_BITS) - 1
_NOTHING = LatencyHistogram()


class LatencyGranularity(Choice):
    """Granularity of latency histograms, as Flink's `metrics.latency.granularity`."""

    #: One histogram per operator or sink.
    SINGLE = "SINGLE"
    #: One histogram per operator or sink and source.
    OPERATOR = "OPERATOR"
    #: One histogram per operator or sink, source and subtask.
    SUBTASK = "SUBTASK"


@dataclass(frozen=True, slots=True, order=True)
class MeasuredAt:
    """Place of a histogram's measurements.

    Parameters
    ----------
    operator
        Uid of a keyed operator or a sink.
    source
        Uid of the source of the markers; None for all sources.
    subtask
        The shuffle partition of an operator; of a sink, that of the operator before it, 0 if there is none.
        None for all subtasks.
    """

    operator: str
    source: str | None = None
    subtask: int | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    at: MeasuredAt
    #: When the micro-batch was planned, by the wall clock of the driver.
    marked_ms: int
    #: When the marker arrived, by the wall clock of the executor.
    reached_ms: int

    @property
    def latency_ms(self) -> int:
        return self.reached_ms - self.marked_ms


@dataclass(frozen=True)
class Latencies:
    """Histograms of latencies by place; immutable.

    Parameters
    ----------
    histograms
        The histograms by place; none of them is empty.

    Examples
    --------
    >>> seen = Latencies()
    >>> for subtask, latency_ms in ((0, 310), (1, 290), (0, 450)):
    ...     at = MeasuredAt("totals", "orders", subtask)
    ...     seen = seen.add([Measurement(at, 1_000, 1_000 + latency_ms)])
    >>> [(at.subtask, one.count, one.max_ms) for at, one in seen.items()]
    [(0, 2, 450), (1, 1, 290)]
    >>> seen.of("totals").count
    3
    """

    histograms: Mapping[MeasuredAt, LatencyHistogram] = field(default_factory=dict)

    def __iter__(self) -> Iterator[MeasuredAt]:
        return iter(sorted(self.histograms))

    def __len__(self) -> int:
        return len(self.histograms)

    def __getitem__(self, at: MeasuredAt) -> LatencyHistogram:
        return self.histograms[at]

    def items(self) -> list[tuple[MeasuredAt, LatencyHistogram]]:
        """Return each place with its histogram, in order."""
        return [(at, self.histograms[at]) for at in self]

    def of(self, operator: str) -> LatencyHistogram:
        """Return the histogram of one operator or sink; an empty one if nothing was measured."""
        return self.group_by(LatencyGranularity.SINGLE).histograms.get(MeasuredAt(operator), _NOTHING)

    def group_by(self, granularity: LatencyGranularity) -> Latencies:
        """Merge the histograms of places that the granularity does not tell apart."""
        if granularity is LatencyGranularity.SUBTASK:
            return self
        found: dict[MeasuredAt, LatencyHistogram] = {}
        for at, histogram in self.histograms.items():
            source = at.source if granularity is LatencyGranularity.OPERATOR else None
            wider = MeasuredAt(at.operator, source)
            found[wider] = found.get(wider, _NOTHING).merge(histogram)
        return Latencies(found)

    def subtract(self, earlier: Latencies) -> Latencies:
        """Return the latencies measured after an earlier copy of the same job's latencies.

        Raises
        ------
        ValueError
            `earlier` holds latencies that these do not.
        """
        if not earlier.histograms.keys() <= self.histograms.keys():
            raise ValueError("latencies lack a place of their earlier copy")
        before = earlier.histograms
        found = {at: one.subtract(before.get(at, _NOTHING)) for at, one in self.histograms.items()}
        return Latencies({at: one for at, one in found.items() if one.buckets})

    def add(self, measured: Iterable[Measurement]) -> Latencies:
        """Return the latencies with the measurements of one more micro-batch."""
        found = dict(self.histograms)
        for one in measured:
            found[one.at] = found.get(one.at, _NOTHING).add(one.latency_ms)
        return Latencies(found)

    def to_json(self) -> list[dict[str, Any]]:
        """Return one object per histogram, for people and metrics."""
        return [
            {"operator": at.operator, "source": at.source, "subtask": at.subtask, **one.to_json()}
            for at, one in self.items()
        ]


def place_of(source: int, subtask: int) -> int:
    return source << _SUBTASK_BITS | subtask


def replace_subtask(place: int, subtask: int) -> int:
    return place_of(place >> _SUBTASK_BITS, subtask)


def find_measurements(acks: Iterable[SinkAck], uids: Sequence[str]) -> list[Measurement]:
    """Return the measurements of a micro-batch, each once: several sinks may report the same."""
    found = set()
    for sink, report in iterate_reports(acks):
        if is_latency(report):
            source, subtask = report.place >> _SUBTASK_BITS, report.place & SUBTASK_MASK
            if source >= len(uids):
                raise ValueError(
                    f"a latency marker comes from source {source}, which is not one of {len(uids)}"
                )
            # A sink's parts number their reporters consecutively.
            number = (report.reporter - FIRST_OPERATOR_REPORTER) % len(uids)
            operator = sink if report.reporter == SINK_REPORTER else uids[number]
            at = MeasuredAt(operator, uids[source], subtask)
            found.add(Measurement(at, report.first, report.second))
    return sorted(found, key=lambda one: (one.at, one.marked_ms, one.reached_ms))


def find_marked_ms(acks: Iterable[SinkAck]) -> int | None:
    return next((report.first for _, report in iterate_reports(acks) if is_latency(report)), None)


def is_latency(report: TimeReport) -> bool:
    return SINK_REPORTER <= report.reporter < FIRST_LATE_REPORTER


def drop_latencies(acks: Sequence[SinkAck]) -> tuple[SinkAck, ...]:
    """Return the acknowledgements without reports of latencies, which are not stored."""
    return keep_reports(acks, lambda report: not is_latency(report))
