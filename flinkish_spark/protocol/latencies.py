"""What latency markers have measured, by source, operator and subtask; and how it is found among reports.

A marker is a row that says when its micro-batch was planned and which source it stands for. Each subtask of
a keyed operator, and each sink's task, reports when the marker has reached it:

    marker rows -> reports in TaskAck.reports -> measured_in -> Latencies

Numbers of sources and operators are those of `protocol/time_plan.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flinkish_spark.protocol.latency_histogram import LatencyHistogram
from flinkish_spark.protocol.records import SinkAck, TimeReport

#: Reporters from here on measure latency: first a sink about itself, then the operators.
SINK_REPORTER = 1 << 20
FIRST_OPERATOR_REPORTER = SINK_REPORTER + 1
#: And from here on they count late records; see `protocol/late_records.py`.
FIRST_LATE_REPORTER = 1 << 22
_SUBTASK_BITS = 31
#: What of a place is the subtask; it fits an INT of Spark's.
SUBTASK_MASK = (1 << _SUBTASK_BITS) - 1
_NOTHING = LatencyHistogram()


class LatencyGranularity(enum.Enum):
    """What histograms tell apart beside the operators."""

    #: Nothing: one histogram per operator or sink.
    SINGLE = "SINGLE"
    #: Sources.
    OPERATOR = "OPERATOR"
    #: Sources and subtasks.
    SUBTASK = "SUBTASK"


@dataclass(frozen=True, slots=True, order=True)
class MeasuredAt:
    """What a histogram is about.

    Parameters
    ----------
    operator
        Uid of a keyed operator or a sink.
    source
        Uid of the source that markers came from; None for any.
    subtask
        The shuffle partition of an operator; of a sink, that of the operator in front of it, 0 if there is
        none. None for any.
    """

    operator: str
    source: str | None = None
    subtask: int | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One marker at one place.

    Parameters
    ----------
    marked_ms
        When the micro-batch was planned, by the wall clock of the driver.
    reached_ms
        When the marker was there, by the wall clock of the executor.
    """

    at: MeasuredAt
    marked_ms: int
    reached_ms: int

    @property
    def latency_ms(self) -> int:
        """How long it took; negative where two machines' clocks differ by more than that."""
        return self.reached_ms - self.marked_ms


@dataclass(frozen=True)
class Latencies:
    """Histograms of latencies by place; immutable, so it is a look at one moment.

    Parameters
    ----------
    histograms
        None of them is empty.

    Examples
    --------
    >>> seen = Latencies()
    >>> for subtask, latency_ms in ((0, 310), (1, 290), (0, 450)):
    ...     at = MeasuredAt("totals", "orders", subtask)
    ...     seen = seen.noted([Measurement(at, 1_000, 1_000 + latency_ms)])
    >>> [(at.subtask, one.count, one.max_ms) for at, one in seen.items()]
    [(0, 2, 450), (1, 1, 290)]
    >>> seen.of("totals").count
    3
    """

    histograms: Mapping[MeasuredAt, LatencyHistogram] = field(default_factory=dict)

    def __iter__(self) -> Iterator[MeasuredAt]:
        """Yield what there are histograms about, in order."""
        return iter(sorted(self.histograms))

    def __len__(self) -> int:
        """Return how many histograms there are."""
        return len(self.histograms)

    def __getitem__(self, at: MeasuredAt) -> LatencyHistogram:
        """Return a histogram; raise KeyError if there is none."""
        return self.histograms[at]

    def items(self) -> list[tuple[MeasuredAt, LatencyHistogram]]:
        """Return what each histogram is about with the histogram, in order."""
        return [(at, self.histograms[at]) for at in self]

    def of(self, operator: str) -> LatencyHistogram:
        """Return everything about one operator or sink; an empty histogram if nothing was measured."""
        return self.by(LatencyGranularity.SINGLE).histograms.get(MeasuredAt(operator), _NOTHING)

    def by(self, granularity: LatencyGranularity) -> Latencies:
        """Return the same with fewer histograms, each of which holds what it stands for."""
        if granularity is LatencyGranularity.SUBTASK:
            return self
        found: dict[MeasuredAt, LatencyHistogram] = {}
        for at, histogram in self.histograms.items():
            source = at.source if granularity is LatencyGranularity.OPERATOR else None
            wider = MeasuredAt(at.operator, source)
            found[wider] = found.get(wider, _NOTHING).merged(histogram)
        return Latencies(found)

    def since(self, earlier: Latencies) -> Latencies:
        """Return what was measured behind an earlier look at the same job.

        Raises
        ------
        ValueError
            `earlier` holds what this one does not.
        """
        if not earlier.histograms.keys() <= self.histograms.keys():
            raise ValueError("latencies lack what is said to be earlier ones")
        found = {at: one.since(earlier.histograms.get(at, _NOTHING)) for at, one in self.histograms.items()}
        return Latencies({at: one for at, one in found.items() if one.buckets})

    def noted(self, measured: Iterable[Measurement]) -> Latencies:
        """Return them with what one micro-batch's markers have measured."""
        found = dict(self.histograms)
        for one in measured:
            found[one.at] = found.get(one.at, _NOTHING).noted(one.latency_ms)
        return Latencies(found)

    def to_json(self) -> list[dict[str, Any]]:
        """Return one object per histogram, for people and metrics."""
        return [
            {"operator": at.operator, "source": at.source, "subtask": at.subtask, **one.to_json()}
            for at, one in self.items()
        ]


# -- marker rows and their reports ---------------------------------------------------------------------


def place_of(source: int, subtask: int) -> int:
    """Return source and subtask as the one number by which rows carry them.

    Examples
    --------
    >>> moved_to(place_of(2, 5), 7) == place_of(2, 7)
    True
    """
    return source << _SUBTASK_BITS | subtask


def moved_to(place: int, subtask: int) -> int:
    """Return the place of a marker that has come to another subtask."""
    return place_of(place >> _SUBTASK_BITS, subtask)


def measured_in(acks: Iterable[SinkAck], uids: Sequence[str]) -> list[Measurement]:
    """Return what the markers of a micro-batch have measured.

    Every sink behind an operator shows the operator's reports, so each counts once.

    Parameters
    ----------
    uids
        Of operators and sources, by number.

    Raises
    ------
    ValueError
        A report comes from none of them.

    Examples
    --------
    >>> from flinkish_spark.protocol.records import TaskAck
    >>> reports = (
    ...     TimeReport(FIRST_OPERATOR_REPORTER, place_of(1, 3), 1_000, 1_250),
    ...     TimeReport(SINK_REPORTER, place_of(1, 3), 1_000, 1_400),
    ... )
    >>> found = measured_in([SinkAck("out", (TaskAck(0, 5, 0, reports=reports),))], ["sums", "orders"])
    >>> [(one.at.operator, one.at.source, one.at.subtask, one.latency_ms) for one in found]
    [('out', 'orders', 3, 400), ('sums', 'orders', 3, 250)]
    """
    found = {
        _measurement(report, ack.sink, uids)
        for ack in acks
        for task in ack.tasks
        for report in task.reports
        if is_latency(report)
    }
    return sorted(found, key=lambda one: (one.at, one.marked_ms, one.reached_ms))


def marked_in(acks: Iterable[SinkAck]) -> int | None:
    """Return when the markers of a micro-batch were put into it, all at once; None without markers."""
    reports = (one for ack in acks for task in ack.tasks for one in task.reports)
    return next((one.first for one in reports if is_latency(one)), None)


def is_latency(report: TimeReport) -> bool:
    """Whether a report is about latency."""
    return SINK_REPORTER <= report.reporter < FIRST_LATE_REPORTER


def without_latencies(acks: Sequence[SinkAck]) -> tuple[SinkAck, ...]:
    """Return acknowledgements as the rest of a job knows them: latencies are not stored."""
    return tuple(
        replace(
            ack,
            tasks=tuple(
                replace(task, reports=tuple(one for one in task.reports if not is_latency(one)))
                for task in ack.tasks
            ),
        )
        for ack in acks
    )


def _measurement(report: TimeReport, sink: str, uids: Sequence[str]) -> Measurement:
    source, subtask = report.place >> _SUBTASK_BITS, report.place & SUBTASK_MASK
    if source >= len(uids):
        raise ValueError(f"a latency marker comes from source {source}, which is not one of {len(uids)}")
    is_sink = report.reporter == SINK_REPORTER
    # A sink's parts number their reporters one after the other.
    operator = sink if is_sink else uids[(report.reporter - FIRST_OPERATOR_REPORTER) % len(uids)]
    return Measurement(MeasuredAt(operator, uids[source], subtask), report.first, report.second)
