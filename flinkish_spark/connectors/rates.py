"""Limits on the number of records that a source reads per micro-batch and per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.core.validation import unusable
from flinkish_spark.protocol.limits import UNLIMITED, Limit, NoLimit

#: An unused allowance is kept for this long, so that no flood follows a pause.
_LONGEST_SAVING_S = 1.0


@dataclass(frozen=True)
class RateLimit:
    """The most records that a job reads from one source.

    The limits decide where a micro-batch ends, before its offsets are logged: a micro-batch that runs again
    has the same records.

    Parameters
    ----------
    records_per_second
        On average; an unused allowance of up to one second may be read at once.
    records_per_batch
        In each micro-batch.

    Examples
    --------
    >>> RateLimit(records_per_second=1_000).records_per_batch
    <NoLimit.UNLIMITED: 'UNLIMITED'>
    """

    records_per_second: float | NoLimit = UNLIMITED
    records_per_batch: Annotated[Limit, Range(1)] = UNLIMITED

    def __post_init__(self) -> None:
        check_fields(self, records_per_batch="give a whole number above zero, or leave it out")
        rate = self.records_per_second
        if isinstance(rate, NoLimit):
            return
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < float("inf"):
            raise unusable(
                "records_per_second",
                rate,
                wanted="a number above zero, or UNLIMITED",
                what_to_do="give for example RateLimit(records_per_second=500)",
            )


class TokenBucket:
    """A token bucket for a rate limit; belongs to one reader in one process."""

    def __init__(self, limit: RateLimit, now_s: float) -> None:
        self._limit, self._saved, self._at_s = limit, 0.0, now_s

    def allowance(self, now_s: float) -> int | None:
        """Return how many records may be read now; None for any number."""
        rate, most = self._limit.records_per_second, self._limit.records_per_batch
        if isinstance(rate, NoLimit):
            return None if isinstance(most, NoLimit) else most
        gained = max(0.0, now_s - self._at_s) * rate
        # At least one record can be saved up, so that a rate below one per second works.
        self._saved = min(self._saved + gained, max(1.0, rate * _LONGEST_SAVING_S))
        self._at_s = now_s
        allowed = max(0, int(self._saved))
        return allowed if isinstance(most, NoLimit) else min(allowed, most)

    def spend(self, records: int) -> None:
        # May become negative: a source that reads whole files then gets no allowance for a while.
        self._saved -= records


def divide_allowance(allowance: int | None, wanting: Sequence[str], turn: int) -> dict[str, int | None]:
    """Divide an allowance among splits; the remainder rotates among them."""
    if allowance is None:
        return dict.fromkeys(wanting)
    each, odd = divmod(allowance, max(1, len(wanting)))
    return {
        name: each + (1 if (index - turn) % len(wanting) < odd else 0) for index, name in enumerate(wanting)
    }
