"""Due times of timers: the key groups that a micro-batch must call, and when an idle stream needs one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.protocol.codec import read
from flinkish_spark.protocol.event_time import Place, TimerReport, check_unique

_NOBODYS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class NextTimers:
    """The earliest timer of a key group by each clock; None for none."""

    event_time_ms: int | None
    processing_time_ms: int | None

    def is_due(self, watermark_ms: int, processing_time_ms: int) -> bool:
        is_due = self.event_time_ms is not None and self.event_time_ms <= watermark_ms
        return is_due or (
            self.processing_time_ms is not None and self.processing_time_ms <= processing_time_ms
        )

    def or_earlier(self, other: NextTimers) -> NextTimers:
        """Return the earlier timer by each clock. A timer at the end of time counts, too."""
        return NextTimers(
            _find_earliest([self.event_time_ms, other.event_time_ms]),
            _find_earliest([self.processing_time_ms, other.processing_time_ms]),
        )


_NO_TIMERS = NextTimers(None, None)


@dataclass(frozen=True, slots=True)
class Agenda:
    #: By operator and key group.
    groups: Mapping[Place, NextTimers] = field(default_factory=dict)

    def update(self, reports: Iterable[TimerReport]) -> Agenda:
        """Return the agenda after the reports of a micro-batch; a group that reports no timer is removed."""
        groups = dict(self.groups)
        for report in reports:
            place = report.operator, report.group
            groups.pop(place, None)
            timers = NextTimers(report.event_time_ms, report.processing_time_ms)
            if timers != _NO_TIMERS:
                groups[place] = timers
        return Agenda(groups)

    def of(self, operators: Iterable[str]) -> Agenda:
        """Leave out timers of operators that the job no longer has: nobody would ever report them as done."""
        kept = set(operators)
        return Agenda({place: timers for place, timers in self.groups.items() if place[0] in kept})

    @property
    def next_event_time_ms(self) -> int | None:
        return _find_earliest(timers.event_time_ms for timers in self.groups.values())

    @property
    def next_event_times_ms(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for (operator, _), timers in self.groups.items():
            if timers.event_time_ms is not None:
                found[operator] = min(timers.event_time_ms, found.get(operator, timers.event_time_ms))
        return found

    @property
    def next_processing_time_ms(self) -> int | None:
        return _find_earliest(timers.processing_time_ms for timers in self.groups.values())

    def due(
        self, watermark_ms: int, processing_time_ms: int, own: Mapping[str, int] = _NOBODYS
    ) -> frozenset[Place]:
        """Return the operators and key groups that a micro-batch must call even without records."""
        return frozenset(
            place
            for place, timers in self.groups.items()
            if timers.is_due(own.get(place[0], watermark_ms), processing_time_ms)
        )

    def to_json(self) -> list[list[Any]]:
        found = sorted(self.groups.items(), key=lambda item: item[0])
        return [[*place, one.event_time_ms, one.processing_time_ms] for place, one in found]

    @classmethod
    def from_json(cls, value: Any) -> Agenda:
        # As reports, which check their fields.
        reports = read(tuple[TimerReport, ...], value)
        check_unique("the key group", ((one.operator, one.group) for one in reports))
        found = cls().update(reports)
        if len(found.groups) != len(reports):
            raise ValueError("a key group without timers is named")
        return found


def _find_earliest(times_ms: Iterable[int | None]) -> int | None:
    return min((time_ms for time_ms in times_ms if time_ms is not None), default=None)
