"""What the driver tells a running query: it stands in the offset that Spark logs before a micro-batch.

So a micro-batch that runs again carries the same barrier, the same watermarks, and calls the same key
groups. Nothing of it ever goes back within one log.

Keys are those of ours in an offset, which no Kafka topic can have: the offset of a Kafka source that
injects barriers has them beside its topics. What is as at the beginning is left out, so a job without
event time logs a checkpoint and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.protocol.json_values import list_of, object_of
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.protocol.operator_watermarks import Watermarks
from flinkish_spark.protocol.watermark_valve import MAX_WATERMARK_MS, MIN_WATERMARK_MS

#: The checkpoint; the watermark in milliseconds, and those of operators that are further, by uid.
CHECKPOINT_KEY, WATERMARK_KEY, ABOVE_KEY = "flinkish:checkpoint", "flinkish:watermark", "flinkish:watermarks"
#: Whether all input is over; key groups to call.
END_KEY, WAKE_KEY = "flinkish:end", "flinkish:wake"
#: The micro-batch of the newest checkpoint whose state is kept apart.
PINNED_KEY = "flinkish:pinned"
#: What operators had seen before the log began: the least watermark, and those that are further, by uid.
SEEN_KEY = "flinkish:seen"
#: The newest checkpoint behind whose records event time comes to its end.
DRAIN_KEY = "flinkish:drain"


@dataclass(frozen=True, slots=True)
class Wake:
    """Key groups that a micro-batch calls although they may have no records: their timers are due.

    Parameters
    ----------
    batch
        The micro-batch that it was made for; one that is made for a later one replaces it.
    groups
        By the operator's reporter number. There may be none: then only the micro-batch itself is wanted.

    Examples
    --------
    >>> Wake(7, {0: frozenset({0, 3})}).to_json()
    [7, [[0, '9']]]
    """

    batch: int
    groups: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def rows(self) -> list[tuple[int, int]]:
        """Return pairs of reporter number and key group, in order."""
        return [(number, group) for number, found in sorted(self.groups.items()) for group in sorted(found)]

    def to_json(self) -> list[Any]:
        """Return the stored form: by reporter number a bit for each key group, in hexadecimal digits."""
        bits = [[number, _bits(groups)] for number, groups in sorted(self.groups.items())]
        return [self.batch, bits]

    @classmethod
    def from_json(cls, value: Any) -> Wake:
        """Read the stored form; raise ValueError if it is none."""
        batch, groups = list_of(value, "wake")
        found = {}
        for number, bits in list_of(groups, "groups"):
            found[checked_whole("number", number, least=0)] = _groups(bits)
        return cls(checked_whole("batch", batch, least=0), found)


_NOTHING_SEEN = Watermarks()


@dataclass(frozen=True, slots=True)
class TimeOffer:
    """Where time stands for a micro-batch.

    Parameters
    ----------
    watermark_ms
        Of all operators that are not further.
    has_ended
        Whether all input is over.
    wake
        None if no micro-batch was ever wanted because of time.
    above
        Watermarks of operators that are further, by uid.
    seen
        Watermarks that operators had seen before the first micro-batch of the log, which no entry of it says.

    Examples
    --------
    >>> TimeOffer.of(Watermarks.of({"sums": 60_000, "tops": 90_000})).to_json()
    {'flinkish:watermark': 60000, 'flinkish:watermarks': {'tops': 90000}}
    """

    watermark_ms: int = MIN_WATERMARK_MS
    has_ended: bool = False
    wake: Wake | None = None
    above: Mapping[str, int] = field(default_factory=dict)
    seen: Watermarks = _NOTHING_SEEN

    def __post_init__(self) -> None:
        Watermarks(self.watermark_ms, self.above)

    @classmethod
    def of(
        cls,
        watermarks: Watermarks,
        has_ended: bool = False,
        wake: Wake | None = None,
        seen: Watermarks = _NOTHING_SEEN,
    ) -> TimeOffer:
        """Return an offer of these watermarks."""
        return cls(watermarks.least_ms, has_ended, wake, watermarks.above, seen)

    @property
    def watermarks(self) -> Watermarks:
        """Of each operator."""
        return Watermarks(self.watermark_ms, self.above)

    def raised_to(self, other: TimeOffer) -> TimeOffer:
        """Return what is further, member by member and operator by operator."""
        ours, theirs = self.wake, other.wake
        is_later = theirs is not None and (ours is None or theirs.batch > ours.batch)
        return TimeOffer.of(
            self.watermarks.raised_to(other.watermarks),
            self.has_ended or other.has_ended,
            theirs if is_later else ours,
            self.seen.raised_to(other.seen),
        )

    def wakes_since(self, before: TimeOffer) -> list[tuple[int, int]]:
        """Return reporter numbers and key groups that a micro-batch between `before` and this one calls."""
        return [] if self.wake is None or self.wake == before.wake else self.wake.rows()

    def to_json(self) -> dict[str, Any]:
        """Return the stored form: members of an offset."""
        stored: dict[str, Any] = {}
        if self.watermark_ms != MIN_WATERMARK_MS:
            stored[WATERMARK_KEY] = self.watermark_ms
        if self.above:
            stored[ABOVE_KEY] = dict(sorted(self.above.items()))
        if self.has_ended:
            stored[END_KEY] = True
        if self.wake is not None:
            stored[WAKE_KEY] = self.wake.to_json()
        if self.seen != _NOTHING_SEEN:
            stored[SEEN_KEY] = [self.seen.least_ms, dict(sorted(self.seen.above.items()))]
        return stored

    @classmethod
    def from_json(cls, offset: Mapping[str, Any]) -> TimeOffer:
        """Read it out of an offset; raise ValueError if what is there is none."""
        watermark_ms = offset.get(WATERMARK_KEY, MIN_WATERMARK_MS)
        wake = offset.get(WAKE_KEY)
        least_ms, above = list_of(offset.get(SEEN_KEY, [MIN_WATERMARK_MS, {}]), SEEN_KEY)
        checked_whole(SEEN_KEY, least_ms, least=MIN_WATERMARK_MS, most=MAX_WATERMARK_MS)
        return cls(
            checked_whole(WATERMARK_KEY, watermark_ms, least=MIN_WATERMARK_MS, most=MAX_WATERMARK_MS),
            bool(offset.get(END_KEY, False)),
            None if wake is None else Wake.from_json(wake),
            object_of(offset.get(ABOVE_KEY, {}), ABOVE_KEY),
            Watermarks(least_ms, object_of(above, SEEN_KEY)),
        )


#: Before anything was said about time.
NO_TIME_YET = TimeOffer()


@dataclass(frozen=True, slots=True)
class ControlOffset:
    """Everything that the driver has said.

    Parameters
    ----------
    checkpoint
        The newest whose barrier went out; 0 before the first.
    time
        See :class:`TimeOffer`.
    pinned_batch
        The micro-batch of the newest checkpoint whose state is pinned; None before the first. Tasks delete
        files that only older states name.
    drained
        The newest checkpoint whose micro-batch fires all event-time timers behind its records; 0 for none.

    Examples
    --------
    >>> logged = ControlOffset.from_json({"flinkish:checkpoint": 3})
    >>> logged.raised_to(ControlOffset(0, TimeOffer(60_000))).to_json()
    {'flinkish:checkpoint': 3, 'flinkish:watermark': 60000}
    """

    checkpoint: int = 0
    time: TimeOffer = NO_TIME_YET
    pinned_batch: int | None = None
    drained: int = 0

    def raised_to(self, other: ControlOffset) -> ControlOffset:
        """Return what is further, member by member."""
        pinned = [batch for batch in (self.pinned_batch, other.pinned_batch) if batch is not None]
        return ControlOffset(
            max(self.checkpoint, other.checkpoint),
            self.time.raised_to(other.time),
            max(pinned, default=None),
            max(self.drained, other.drained),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the stored form: members of an offset."""
        pinned = {} if self.pinned_batch is None else {PINNED_KEY: self.pinned_batch}
        drained = {DRAIN_KEY: self.drained} if self.drained else {}
        return {CHECKPOINT_KEY: self.checkpoint, **self.time.to_json(), **pinned, **drained}

    @classmethod
    def from_json(cls, offset: Mapping[str, Any]) -> ControlOffset:
        """Read it out of an offset of any source; raise ValueError if what is there is none."""
        pinned = offset.get(PINNED_KEY)
        if pinned is not None:
            pinned = checked_whole(PINNED_KEY, pinned, least=0)
        drained = checked_whole(DRAIN_KEY, offset.get(DRAIN_KEY, 0), least=0)
        return cls(int(offset.get(CHECKPOINT_KEY, 0)), TimeOffer.from_json(offset), pinned, drained)

    @classmethod
    def newest(cls, sources: Iterable[Any]) -> ControlOffset:
        """Return what is furthest in the offsets of all sources of a micro-batch.

        Spark asks each scan of the control source on its own, so one may be behind another. It gives out
        what it has missed in the next micro-batch.
        """
        found = cls()
        for offset in sources:
            if isinstance(offset, dict):
                found = found.raised_to(cls.from_json(offset))
        return found

    @classmethod
    def drained_in(cls, sources: Iterable[Any]) -> int:
        """Return the checkpoint that all scans of a micro-batch have drawn and that drains; 0 for none.

        Where a scan is behind another, the next micro-batch has the last barrier, and drains.
        """
        given = [cls.from_json(o) for o in sources if isinstance(o, dict) and CHECKPOINT_KEY in o]
        found = {one.drained if one.drained == one.checkpoint else 0 for one in given}
        return found.pop() if len(found) == 1 else 0

    @classmethod
    def called_in(cls, batch: int, sources: Iterable[Any]) -> list[tuple[int, int]]:
        """Return reporter numbers and key groups that a micro-batch has called, from its logged offsets.

        None of them where a scan had not heard of it yet: what that one runs was not called.
        """
        given = [o for o in sources if isinstance(o, dict) and CHECKPOINT_KEY in o]
        wakes = [TimeOffer.from_json(offset).wake for offset in given]
        if not wakes or wakes[0] is None or wakes[0].batch != batch or wakes.count(wakes[0]) != len(wakes):
            return []
        return wakes[0].rows()


def _bits(groups: Iterable[int]) -> str:
    mask = 0
    for group in groups:
        mask |= 1 << group
    return f"{mask:x}"


def _groups(bits: Any) -> frozenset[int]:
    if not isinstance(bits, str):
        raise ValueError(f"key groups must be hexadecimal digits, got {bits!r}")
    mask = int(bits, 16)
    return frozenset(group for group in range(mask.bit_length()) if mask >> group & 1)
