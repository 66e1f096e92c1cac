"""How many records a micro-batch may take: per micro-batch, and per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flinkish_spark.core.validation import raise_config_errors, unusable
from flinkish_spark.protocol.limits import UNLIMITED, Limit, Unlimited, checked_limit

#: So much of what was not used is kept for later: a pause is not made up for by a flood.
_LONGEST_SAVING_S = 1.0


@dataclass(frozen=True)
class RateLimit:
    """At most so many records of one source.

    Both are kept by the place where a micro-batch ends, before it is logged: a micro-batch that is run
    again has the same records, however fast.

    Parameters
    ----------
    records_per_second
        On average; up to a second's worth that was not used may come at once.
    records_per_batch
        In one micro-batch.

    Raises
    ------
    ConfigError
        A limit is no number above zero.

    Examples
    --------
    >>> RateLimit(records_per_second=1_000).records_per_batch
    <Unlimited.UNLIMITED: 'UNLIMITED'>
    """

    records_per_second: float | Unlimited = UNLIMITED
    records_per_batch: Limit = UNLIMITED

    def __post_init__(self) -> None:
        with raise_config_errors("give a whole number above zero, or leave it out"):
            checked_limit("records_per_batch", self.records_per_batch, least=1)
        rate = self.records_per_second
        if isinstance(rate, Unlimited):
            return
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < float("inf"):
            raise unusable(
                "records_per_second",
                rate,
                wanted="a number above zero, or UNLIMITED",
                what_to_do="give for example RateLimit(records_per_second=500)",
            )


class Pace:
    """Counts what a limit allows while time passes; of one reader, in one process."""

    def __init__(self, limit: RateLimit, now_s: float) -> None:
        self._limit, self._saved, self._at_s = limit, 0.0, now_s

    def allowance(self, now_s: float) -> int | None:
        """Return how many records may be taken now; None if nothing limits them."""
        rate, most = self._limit.records_per_second, self._limit.records_per_batch
        if isinstance(rate, Unlimited):
            return None if isinstance(most, Unlimited) else most
        gained = max(0.0, now_s - self._at_s) * rate
        # Less than one record a second would otherwise never save up one.
        self._saved = min(self._saved + gained, max(1.0, rate * _LONGEST_SAVING_S))
        self._at_s = now_s
        allowed = max(0, int(self._saved))
        return allowed if isinstance(most, Unlimited) else min(allowed, most)

    def took(self, records: int) -> None:
        # May fall below nothing: a source that takes whole files is given nothing for a while.
        self._saved -= records


def shares(allowance: int | None, wanting: Sequence[str], turn: int) -> dict[str, int | None]:
    """Split an allowance among splits, the odd ones in turns."""
    if allowance is None:
        return dict.fromkeys(wanting)
    each, odd = divmod(allowance, max(1, len(wanting)))
    return {
        name: each + (1 if (index - turn) % len(wanting) < odd else 0) for index, name in enumerate(wanting)
    }
