"""What functions of a job have measured: metrics by operator and name, as values that are put together.

A metric measures and decides nothing: it is no part of a checkpoint's decision. It counts from the job's
first micro-batch, as far as its statistics were carried on; a micro-batch that runs again counts again.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from flinkish_spark.protocol.codec import Presence, Stored

_MOST = sys.float_info.max
#: Metrics of one job that are kept, over all operators; what comes later is left out.
MOST_USER_METRICS = 500


class UserMetricKind(enum.Enum):
    """What a metric is; the words are those of PyFlink's metric groups."""

    COUNTER = "counter"
    METER = "meter"
    GAUGE = "gauge"
    DISTRIBUTION = "distribution"


@dataclass(frozen=True, slots=True)
class UserMetric(Stored):
    """What one metric of one operator shows."""

    DEFAULTS: ClassVar = Presence.LEFT_OUT

    kind: UserMetricKind
    #: Of a counter its value, of a meter how many events were marked, of a distribution how many values were
    #: given; of a gauge, how many subtasks have one.
    count: int
    #: Of the values of a distribution since the job began, and of a gauge over its subtasks; 0 and None for
    #: the other kinds, and without any value.
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

    def merged(self, other: UserMetric) -> UserMetric:
        """Return what two parts of a metric show together; the second one's kind is the first's."""
        least = [one for one in (self.least, other.least) if one is not None]
        most = [one for one in (self.most, other.most) if one is not None]
        return replace(
            self,
            count=self.count + other.count,
            # What a float cannot hold any more stays at its end: a metric never fails a job.
            total=max(-_MOST, min(_MOST, self.total + other.total)),
            least=min(least, default=None),
            most=max(most, default=None),
        )

    def after(self, newer: UserMetric) -> UserMetric:
        is_other = newer.kind is not self.kind
        return newer if is_other or self.kind is UserMetricKind.GAUGE else self.merged(newer)


#: What functions have measured, by uid of the operator and name of the metric, groups in front with dots.
UserMetrics = Mapping[str, Mapping[str, UserMetric]]


def measured_together(parts: Iterable[tuple[str, str, UserMetric]]) -> dict[str, dict[str, UserMetric]]:
    """Return what the subtasks of one micro-batch have measured, by uid and name."""
    found: dict[str, dict[str, UserMetric]] = {}
    for uid, name, one in parts:
        own = found.setdefault(uid, {})
        known = own.get(name)
        if known is None:
            own[name] = one
        elif known.kind is one.kind:
            own[name] = known.merged(one)
    return found


def measured_after(before: UserMetrics, batch: UserMetrics) -> dict[str, dict[str, UserMetric]]:
    """Return all metrics behind one more micro-batch; at most :data:`MOST_USER_METRICS` of them."""
    found = {uid: dict(own) for uid, own in before.items()}
    room = MOST_USER_METRICS - sum(map(len, found.values()))
    for uid, own in batch.items():
        for name, one in own.items():
            known = found.get(uid, {}).get(name)
            if known is None and room <= 0:
                continue
            room -= known is None
            found.setdefault(uid, {})[name] = one if known is None else known.after(one)
    return found
