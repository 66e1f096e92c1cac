"""Latencies as a histogram of bounded size: fixed buckets, so that two can be added and taken apart.

Up to 63 ms each millisecond has a bucket of its own; above, a bucket is as wide as a 32nd of what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.protocol.limits import MOST_MS, checked_factor

#: Buckets per doubling, as a power of two.
_BITS = 5
_EXACT = 1 << (_BITS + 1)


@dataclass(frozen=True, slots=True)
class LatencyHistogram:
    """Immutable; holds at most 1,000 buckets, whatever is put in.

    Parameters
    ----------
    buckets
        How many latencies fell into each bucket; none with 0.
    sum_ms
        Of all of them.
    min_ms, max_ms
        The smallest and the greatest; None while there is none.

    Examples
    --------
    >>> seen = LatencyHistogram()
    >>> for latency_ms in (40, 55, 1_000):
    ...     seen = seen.noted(latency_ms)
    >>> seen.count, seen.min_ms, seen.mean_ms, seen.quantile_ms(0.5), seen.max_ms
    (3, 40, 365.0, 55, 1000)
    """

    buckets: Mapping[int, int] = field(default_factory=dict)
    sum_ms: int = 0
    min_ms: int | None = None
    max_ms: int | None = None

    @property
    def count(self) -> int:
        """How many latencies it holds."""
        return sum(self.buckets.values())

    @property
    def mean_ms(self) -> float | None:
        """Return their mean; None for none."""
        return self.sum_ms / self.count if self.buckets else None

    def noted(self, latency_ms: int) -> LatencyHistogram:
        """Return the histogram with one more; a negative one counts as 0, none as more than 365 days."""
        known_ms = max(0, min(latency_ms, MOST_MS))
        number = _bucket(known_ms)
        buckets = {**self.buckets, number: self.buckets.get(number, 0) + 1}
        least_ms = known_ms if self.min_ms is None else min(self.min_ms, known_ms)
        most_ms = known_ms if self.max_ms is None else max(self.max_ms, known_ms)
        return LatencyHistogram(buckets, self.sum_ms + known_ms, least_ms, most_ms)

    def merged(self, other: LatencyHistogram) -> LatencyHistogram:
        """Return what both hold.

        Examples
        --------
        >>> LatencyHistogram().noted(5).merged(LatencyHistogram().noted(9)).count
        2
        """
        numbers = self.buckets.keys() | other.buckets.keys()
        buckets = {n: self.buckets.get(n, 0) + other.buckets.get(n, 0) for n in sorted(numbers)}
        least = [ms for ms in (self.min_ms, other.min_ms) if ms is not None]
        most = [ms for ms in (self.max_ms, other.max_ms) if ms is not None]
        sum_ms = self.sum_ms + other.sum_ms
        return LatencyHistogram(buckets, sum_ms, min(least, default=None), max(most, default=None))

    def since(self, earlier: LatencyHistogram) -> LatencyHistogram:
        """Return what came behind an earlier look at the same histogram; its ends are as exact as a bucket.

        Raises
        ------
        ValueError
            `earlier` holds what this one does not.

        Examples
        --------
        >>> before = LatencyHistogram().noted(5)
        >>> now = before.noted(60).noted(61)
        >>> now.since(before).count, now.since(before).min_ms
        (2, 60)
        """
        if any(count > self.buckets.get(number, 0) for number, count in earlier.buckets.items()):
            raise ValueError("a histogram holds less than what is said to be an earlier one")
        left = {n: count - earlier.buckets.get(n, 0) for n, count in sorted(self.buckets.items())}
        buckets = {number: count for number, count in left.items() if count}
        if not buckets:
            return LatencyHistogram()
        assert self.min_ms is not None and self.max_ms is not None
        least_ms = max(self.min_ms, _lowest_ms(min(buckets)))
        most_ms = min(self.max_ms, _highest_ms(max(buckets)))
        return LatencyHistogram(buckets, self.sum_ms - earlier.sum_ms, least_ms, most_ms)

    def quantile_ms(self, share: float) -> int | None:
        """Return the latency that a share of all does not exceed; None for none.

        It is never less than the true one, and more by a 32nd of it at most.

        Parameters
        ----------
        share
            From 0 to 1: 0.5 for the median, 0.99 for the 99th percentile.

        Raises
        ------
        ValueError
            It is no number from 0 to 1.
        """
        rank = max(1, math.ceil(checked_factor("share", share, 0, 1) * self.count))
        seen = 0
        for number, count in sorted(self.buckets.items()):
            seen += count
            if seen >= rank:
                assert self.max_ms is not None
                return min(_highest_ms(number), self.max_ms)
        return None

    def to_json(self) -> dict[str, Any]:
        """Return count, ends, mean and percentiles, for people and metrics.

        Examples
        --------
        >>> LatencyHistogram().noted(5).to_json()["p99_ms"]
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


def _bucket(latency_ms: int) -> int:
    """Return the bucket of a latency; buckets rise with latencies and leave no gap."""
    shift = max(0, latency_ms.bit_length() - _BITS - 1)
    return (shift << _BITS) + (latency_ms >> shift)


def _lowest_ms(bucket: int) -> int:
    shift = 0 if bucket < _EXACT else (bucket >> _BITS) - 1
    return (bucket - (shift << _BITS)) << shift


def _highest_ms(bucket: int) -> int:
    return _lowest_ms(bucket + 1) - 1
