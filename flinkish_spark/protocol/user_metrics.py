"""Metrics of a job's functions by operator and name, as values that can be merged.

Metrics decide nothing: they are not part of a checkpoint's decision. They count from the job's first
micro-batch, as far as its statistics were kept; a micro-batch that runs again counts again.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from flinkish_spark.protocol.codec import Presence, StoredObject

_MOST = sys.float_info.max
#: The most metrics of one job, over all operators; further ones are ignored.
MOST_USER_METRICS = 500


class UserMetricKind(enum.Enum):
    """Kind of a metric, named as in PyFlink's metric groups."""

    COUNTER = "counter"
    METER = "meter"
    GAUGE = "gauge"
    DISTRIBUTION = "distribution"


@dataclass(frozen=True, slots=True)
class UserMetric(StoredObject):
    DEFAULTS: ClassVar = Presence.LEFT_OUT

    kind: UserMetricKind
    #: Value of a counter, number of a meter's events, number of a distribution's values, or number of
    #: subtasks that have the gauge.
    count: int
    #: Sum, minimum and maximum of a distribution's values since the job began, or of a gauge over its
    #: subtasks; 0 and None for the other kinds, and without any value.
    total: float = 0.0
    least: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        # A counter may be decremented, as in Flink.
        if isinstance(self.count, bool) or not isinstance(self.count, int):
            raise ValueError(f"the count of a metric is a whole number, not {self.count!r}")
        for number in (self.total, self.least, self.most):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"a metric has finite numbers, not {number!r}")

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count > 0 else None

    def merge(self, other: UserMetric) -> UserMetric:
        least = [one for one in (self.least, other.least) if one is not None]
        most = [one for one in (self.most, other.most) if one is not None]
        return replace(
            self,
            count=self.count + other.count,
            # An overflow stays at the greatest float: a metric never fails a job.
            total=max(-_MOST, min(_MOST, self.total + other.total)),
            least=min(least, default=None),
            most=max(most, default=None),
        )

    def update(self, newer: UserMetric) -> UserMetric:
        is_other = newer.kind is not self.kind
        return newer if is_other or self.kind is UserMetricKind.GAUGE else self.merge(newer)


#: Metrics by uid of the operator and name of the metric, with its groups as a dotted prefix.
UserMetrics = Mapping[str, Mapping[str, UserMetric]]


def merge_subtasks(parts: Iterable[tuple[str, str, UserMetric]]) -> dict[str, dict[str, UserMetric]]:
    """Merge the metrics of one micro-batch's subtasks by uid and name."""
    found: dict[str, dict[str, UserMetric]] = {}
    for uid, name, one in parts:
        own = found.setdefault(uid, {})
        known = own.get(name)
        if known is None:
            own[name] = one
        elif known.kind is one.kind:
            own[name] = known.merge(one)
    return found


def update_metrics(before: UserMetrics, batch: UserMetrics) -> dict[str, dict[str, UserMetric]]:
    """Return all metrics after one more micro-batch; at most :data:`MOST_USER_METRICS` of them."""
    found = {uid: dict(own) for uid, own in before.items()}
    room = MOST_USER_METRICS - sum(map(len, found.values()))
    for uid, own in batch.items():
        for name, one in own.items():
            known = found.get(uid, {}).get(name)
            if known is None and room <= 0:
                continue
            room -= known is None
            found.setdefault(uid, {})[name] = one if known is None else known.update(one)
    return found
