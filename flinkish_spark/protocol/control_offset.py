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
from functools import partial, reduce
from typing import Annotated, Any

from flinkish_spark.protocol.codec import (
    INLINE,
    Form,
    Presence,
    Stored,
    StoredRow,
    read,
    stored,
    whole,
    write,
)
from flinkish_spark.protocol.event_time import MIN_WATERMARK_MS, WatermarkMs, Watermarks

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
_member = partial(stored, presence=Presence.LEFT_OUT)
_Count = Annotated[int, whole(0)]


def _groups(bits: Any) -> frozenset[int]:
    if not isinstance(bits, str):
        raise ValueError(f"key groups must be hexadecimal digits, got {bits!r}")
    mask = int(bits, 16)
    return frozenset(group for group in range(mask.bit_length()) if mask >> group & 1)


#: A bit for each key group, in hexadecimal digits.
_GroupBits = Annotated[frozenset[int], Form(lambda groups: f"{sum(1 << one for one in groups):x}", _groups)]
_PAIRS = tuple[tuple[_Count, _GroupBits], ...]
#: By reporter number, as pairs and in order.
_GROUPS = Form(lambda groups: write(_PAIRS, sorted(groups.items())), lambda pairs: dict(read(_PAIRS, pairs)))


@dataclass(frozen=True, slots=True)
class Wake(StoredRow):
    """Key groups that a micro-batch calls although they may have no records: their timers are due."""

    #: The micro-batch that it was made for; one that is made for a later one replaces it.
    batch: _Count
    #: By the operator's reporter number. There may be none: then only the micro-batch itself is wanted.
    groups: Annotated[Mapping[int, frozenset[int]], _GROUPS] = field(default_factory=dict)

    def rows(self) -> list[tuple[int, int]]:
        return [(number, group) for number, found in sorted(self.groups.items()) for group in sorted(found)]


_NOTHING_SEEN = Watermarks()
_Above = Mapping[str, int]
_SORTED = Form(lambda above: dict(sorted(above.items())), partial(read, _Above))
#: Watermarks as a pair: the least, and those above it.
StoredWatermarks = Annotated[
    Watermarks,
    Form(
        lambda found: [found.least_ms, dict(sorted(found.above.items()))],
        lambda pair: Watermarks(*read(tuple[WatermarkMs, _Above], pair)),
    ),
]


@dataclass(frozen=True, slots=True)
class TimeOffer(Stored):
    #: Of all operators that are not further.
    watermark_ms: WatermarkMs = field(default=MIN_WATERMARK_MS, metadata=_member(WATERMARK_KEY))
    #: Whether all input is over.
    has_ended: bool = field(default=False, metadata=_member(END_KEY, at=2))
    #: None if no micro-batch was ever wanted because of time.
    wake: Wake | None = field(default=None, metadata=_member(WAKE_KEY))
    above: Annotated[_Above, _SORTED] = field(default_factory=dict, metadata=_member(ABOVE_KEY, at=1))
    #: Watermarks that operators had seen before the first micro-batch of the log, which no entry of it says.
    seen: StoredWatermarks = field(default=_NOTHING_SEEN, metadata=_member(SEEN_KEY))

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
        return cls(watermarks.least_ms, has_ended, wake, watermarks.above, seen)

    @property
    def watermarks(self) -> Watermarks:
        return Watermarks(self.watermark_ms, self.above)

    def raised_to(self, other: TimeOffer) -> TimeOffer:
        ours, theirs = self.wake, other.wake
        is_later = theirs is not None and (ours is None or theirs.batch > ours.batch)
        return TimeOffer.of(
            self.watermarks.raised_to(other.watermarks),
            self.has_ended or other.has_ended,
            theirs if is_later else ours,
            self.seen.raised_to(other.seen),
        )

    def wakes_since(self, before: TimeOffer) -> list[tuple[int, int]]:
        return [] if self.wake is None or self.wake == before.wake else self.wake.rows()


#: Before anything was said about time.
NO_TIME_YET = TimeOffer()


@dataclass(frozen=True, slots=True)
class ControlOffset(Stored):
    """Everything that the driver has said."""

    #: The newest whose barrier went out; 0 before the first.
    checkpoint: int = field(default=0, metadata=stored(CHECKPOINT_KEY))
    time: TimeOffer = field(default=NO_TIME_YET, metadata=INLINE)
    #: The micro-batch of the newest checkpoint whose state is pinned; None before the first. Tasks delete
    #: files that only older states name.
    pinned_batch: _Count | None = field(default=None, metadata=_member(PINNED_KEY))
    #: The newest checkpoint whose micro-batch fires all event-time timers behind its records; 0 for none.
    drained: _Count = field(default=0, metadata=_member(DRAIN_KEY))

    def raised_to(self, other: ControlOffset) -> ControlOffset:
        pinned = [batch for batch in (self.pinned_batch, other.pinned_batch) if batch is not None]
        return ControlOffset(
            max(self.checkpoint, other.checkpoint),
            self.time.raised_to(other.time),
            max(pinned, default=None),
            max(self.drained, other.drained),
        )

    @classmethod
    def newest(cls, sources: Iterable[Any]) -> ControlOffset:
        """Return what is furthest in the offsets of all sources of a micro-batch.

        Spark asks each scan of the control source on its own, so one may be behind another. It gives out
        what it has missed in the next micro-batch.
        """
        return reduce(cls.raised_to, _control_offsets(sources), cls())

    @classmethod
    def drained_in(cls, sources: Iterable[Any]) -> int:
        """Return the checkpoint that all scans of a micro-batch have drawn and that drains; 0 for none."""
        given = _control_offsets(sources)
        found = {one.drained if one.drained == one.checkpoint else 0 for one in given}
        return found.pop() if len(found) == 1 else 0

    @classmethod
    def called_in(cls, batch: int, sources: Iterable[Any]) -> list[tuple[int, int]]:
        """Return reporter numbers and key groups that a micro-batch has called, as all scans know it."""
        wakes = [offset.time.wake for offset in _control_offsets(sources)]
        wake = wakes[0] if wakes and wakes.count(wakes[0]) == len(wakes) else None
        return [] if wake is None or wake.batch != batch else wake.rows()


def _control_offsets(sources: Iterable[Any]) -> list[ControlOffset]:
    return [ControlOffset.from_json(o) for o in sources if isinstance(o, dict) and CHECKPOINT_KEY in o]
