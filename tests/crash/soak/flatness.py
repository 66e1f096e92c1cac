"""The rule by which a series counts as flat, and the series that it is asked about.

A series grows if its slope is above :data:`BOUND` for certain: more than 10 % of its median an hour, with the
lower end of the slope's 95 % interval. The slope is the median of those of all pairs (Theil and Sen), so that
a few odd values change nothing. A short run has few values, so only what grows fast is noticed.

A killed process begins anew, and grows while it warms up. So what belongs to processes is compared between
lives, at like age: one value for each life, the median of its samples 15 to 40 s after its first checkpoint.
What belongs to the job has one value for each minute. The first fifth of a run does not count, up to ten
minutes; and what belongs to the job counts only when Spark has begun to delete the first entries of its logs:
until then they fill. In the long life of a driver, in which only workers are killed, each minute from the
fifth on has a value.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tests.crash.soak.samples import Sample

#: Part of the median that a series may grow in an hour.
BOUND = 0.10
#: With fewer values than these there is no interval.
LEAST_VALUES = 4
#: One-sided, 95 %.
_Z = 1.645
LIKE_AGE_S = (15.0, 40.0)
_WARM_UP_SHARE, _LONGEST_WARM_UP_S = 0.2, 600.0
#: From here on a driver has seen all that it does, and its JVM has compiled it.
_SETTLED_S, _LEAST_OF_A_LONG_LIFE = 300.0, 8

PROCESSES = tuple(
    f"{role} {what}" for role in ("driver", "jvm", "workers") for what in ("MB", "threads", "files")
)
JOB = (
    "open transactions",
    "job directory files",
    "job directory KB",
    "Spark log files",
    "state files",
    "state KB",
)
LOG = "driver.log KB"
#: The first micro-batch in Spark's logs.
LOG_BEGINS = "Spark log begins"
#: A JVM takes memory up to its limit before it collects more: over one life that says nothing.
_NOT_IN_ONE_LIFE = frozenset({"jvm MB"})


class Answer(enum.Enum):
    FLAT = "flat"
    GROWS = "GROWS"
    TOO_SHORT = "too short"


@dataclass(frozen=True, slots=True)
class Slope:
    """How a series changed; slopes are per hour, as parts of the median."""

    values: int
    median: float
    slope: float = 0.0
    low: float = 0.0

    @property
    def answer(self) -> Answer:
        if self.values < LEAST_VALUES:
            return Answer.TOO_SHORT
        return Answer.GROWS if self.low > BOUND else Answer.FLAT

    def to_json(self) -> dict[str, Any]:
        numbers = {"median": self.median, "per_hour": self.slope, "low": self.low}
        return {
            "values": self.values,
            **{k: round(v, 3) for k, v in numbers.items()},
            "is": self.answer.value,
        }


def find_slope(points: Sequence[tuple[float, float]]) -> Slope:
    """Return the slope of (seconds, value); a series without values, or of zeros, has none."""
    median = statistics.median(value for _, value in points) if points else 0.0
    if len(points) < LEAST_VALUES:
        return Slope(len(points), median)
    pairs = sorted(
        3600 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(sorted(points), 2) if b[0] > a[0]
    )
    n = len(points)
    spread = _Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    lower = pairs[max(0, math.floor((len(pairs) - spread) / 2))]
    # Few open transactions are whole numbers around none: one more is no growth by itself.
    scale = max(abs(median), 1.0)
    return Slope(n, median, statistics.median(pairs) / scale, lower / scale)


def find_slopes(samples: Sequence[Sample]) -> dict[str, Slope]:
    """Return the slope of every series that has to be flat."""
    end_s = max((sample.at_s for sample in samples), default=0.0)
    warm_s = min(end_s * _WARM_UP_SHARE, _LONGEST_WARM_UP_S)
    warm = [sample for sample in samples if sample.at_s >= warm_s]
    of_age = [s for s in warm if s.age_s is not None and LIKE_AGE_S[0] <= s.age_s < LIKE_AGE_S[1]]
    full_s = next((s.at_s for s in samples if s.values.get(LOG_BEGINS, 0) > 0), math.inf)
    at_work = [sample for sample in warm if sample.age_s is not None and sample.at_s >= full_s]
    found = {name: find_slope(_medians(of_age, name, lambda sample: sample.start)) for name in PROCESSES}
    found |= {name: find_slope(_medians(at_work, name, lambda sample: sample.minute)) for name in JOB}
    found[f"{LOG} a minute"] = find_slope(_rates(warm, LOG))
    return found | _of_the_long_life(samples)


def _of_the_long_life(samples: Sequence[Sample]) -> dict[str, Slope]:
    """Return slopes within the life that lasted longest, if it was a long one."""
    lives: defaultdict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.age_s is not None and sample.age_s >= _SETTLED_S:
            lives[sample.start].append(sample)
    longest = max(lives.values(), key=len, default=[])
    found = {}
    for name in PROCESSES:
        points = _medians(longest, name, lambda sample: sample.minute)
        if len(points) >= _LEAST_OF_A_LONG_LIFE and name not in _NOT_IN_ONE_LIFE:
            found[f"{name}, one life"] = find_slope(points)
    return found


def _medians(
    samples: Iterable[Sample], name: str, group: Callable[[Sample], int]
) -> list[tuple[float, float]]:
    """Return one point per group: the medians of its times and of its values."""
    groups: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        if name in sample.values:
            groups[group(sample)].append((sample.at_s, sample.values[name]))
    return [
        (statistics.median(at for at, _ in points), statistics.median(value for _, value in points))
        for points in groups.values()
    ]


def _rates(samples: Iterable[Sample], name: str) -> list[tuple[float, float]]:
    """Return how much a growing number grew in each minute, per minute."""
    groups: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        groups[sample.minute].append((sample.at_s, sample.values[name]))
    rates = []
    for points in groups.values():
        (first_s, first), (last_s, last) = points[0], points[-1]
        if last_s - first_s >= 20:
            rates.append((last_s, 60 * (last - first) / (last_s - first_s)))
    return rates
