"""The watermarks of all operators of a job in one micro-batch, written down in few words.

An operator's watermark says how far the inputs in front of *it* have come. Most operators of most jobs share
one, so there is a least one for all, and the greater ones by uid. Operators are named and not numbered: what
a micro-batch carries stands in Spark's log, and numbers are of one plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flinkish_spark.protocol.ids import checked_name
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.protocol.watermark_valve import MAX_WATERMARK_MS, MIN_WATERMARK_MS


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Of each operator. A value: equal ones mean the same for every operator.

    Parameters
    ----------
    least_ms
        Of all operators that are not named.
    above
        By uid, of those that are further; each is greater than `least_ms`.

    Examples
    --------
    >>> found = Watermarks.of({"sums": 60_000, "tops": 90_000})
    >>> found.least_ms, found.above, found.at("sums")
    (60000, {'tops': 90000}, 60000)
    >>> found.raised_to(Watermarks(70_000)).at("sums")
    70000
    """

    least_ms: int = MIN_WATERMARK_MS
    above: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for uid, watermark_ms in self.above.items():
            checked_name(uid, "operator")
            checked_whole(
                f"the watermark of '{uid}'", watermark_ms, least=MIN_WATERMARK_MS, most=MAX_WATERMARK_MS
            )
            if watermark_ms <= self.least_ms:
                raise ValueError(f"the watermark of '{uid}' is {watermark_ms}, not above {self.least_ms}")

    @classmethod
    def of(cls, by_operator: Mapping[str, int]) -> Watermarks:
        """Return the watermarks of a job's operators, all of which are given."""
        return cls(min(by_operator.values(), default=MIN_WATERMARK_MS))._with(by_operator)

    def at(self, uid: str) -> int:
        """Return the watermark of an operator."""
        return self.above.get(uid, self.least_ms)

    def raised_to(self, other: Watermarks) -> Watermarks:
        """Return what is further, operator by operator."""
        least = Watermarks(max(self.least_ms, other.least_ms))
        return least._with({uid: max(self.at(uid), other.at(uid)) for uid in self.above.keys() | other.above})

    def _with(self, by_operator: Mapping[str, int]) -> Watermarks:
        """Return these with those that are greater."""
        above = {uid: ms for uid, ms in sorted(by_operator.items()) if ms > self.least_ms}
        return Watermarks(self.least_ms, above)
