"""Offset of the control source: what the driver tells a running query, logged by Spark before a micro-batch.

So a micro-batch that runs again carries the same barrier and the same watermarks, and calls the same key
groups. No value ever goes back within one log.

The keys have a prefix that no Kafka topic can have, since the offset of a Kafka source that injects barriers
has them beside its topics. Values that are still the initial ones are left out, so a job without event time
logs a checkpoint and nothing else.
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
    StoredObject,
    StoredRow,
    read,
    store_as,
    whole,
    write,
)
from flinkish_spark.protocol.event_time import MIN_WATERMARK_MS, WatermarkMs, Watermarks

#: The checkpoint; the least watermark in milliseconds, and the greater watermarks of operators, by uid.
CHECKPOINT_KEY, WATERMARK_KEY, ABOVE_KEY = "flinkish:checkpoint", "flinkish:watermark", "flinkish:watermarks"
#: True if all input has ended; key groups to call.
END_KEY, WAKE_KEY = "flinkish:end", "flinkish:wake"
#: The micro-batch of the newest pinned checkpoint.
PINNED_KEY = "flinkish:pinned"
#: Watermarks that operators had seen before the log began: the least one, and the greater ones by uid.
SEEN_KEY = "flinkish:seen"
#: The newest checkpoint after whose records event time ends.
DRAIN_KEY = "flinkish:drain"
_member = partial(store_as, presence=Presence.LEFT_OUT)
_Count = Annotated[int, whole(0)]


def _parse_groups(bits: Any) -> frozenset[int]:
    if not isinstance(bits, str):
        raise ValueError(f"key groups must be hexadecimal digits, got {bits!r}")
    mask = int(bits, 16)
    return frozenset(group for group in range(mask.bit_length()) if mask >> group & 1)


#: A bit for each key group, in hexadecimal digits.
_GroupBits = Annotated[
    frozenset[int], Form(lambda groups: f"{sum(1 << one for one in groups):x}", _parse_groups)
]
_PAIRS = tuple[tuple[_Count, _GroupBits], ...]
#: Key groups by reporter number, as sorted pairs.
_GROUPS = Form(lambda groups: write(_PAIRS, sorted(groups.items())), lambda pairs: dict(read(_PAIRS, pairs)))


@dataclass(frozen=True, slots=True)
class Wake(StoredRow):
    """Key groups with due timers, which a micro-batch calls even if they have no records."""

    #: The micro-batch that must call them; a wake of a later micro-batch replaces this one.
    batch: _Count
    #: By the operator's reporter number. Without any, only the micro-batch itself is wanted.
    groups: Annotated[Mapping[int, frozenset[int]], _GROUPS] = field(default_factory=dict)

    def rows(self) -> list[tuple[int, int]]:
        return [(number, group) for number, found in sorted(self.groups.items()) for group in sorted(found)]


_NOTHING_SEEN = Watermarks()
_Above = Mapping[str, int]
_SORTED = Form(lambda above: dict(sorted(above.items())), partial(read, _Above))
#: Watermarks as a pair: the least one, and the greater ones by uid.
StoredWatermarks = Annotated[
    Watermarks,
    Form(
        lambda found: [found.least_ms, dict(sorted(found.above.items()))],
        lambda pair: Watermarks(*read(tuple[WatermarkMs, _Above], pair)),
    ),
]


@dataclass(frozen=True, slots=True)
class TimeOffer(StoredObject):
    #: Watermark of all operators that are not in `above`.
    watermark_ms: WatermarkMs = field(default=MIN_WATERMARK_MS, metadata=_member(WATERMARK_KEY))
    #: True if all input has ended.
    has_ended: bool = field(default=False, metadata=_member(END_KEY, at=2))
    #: None if no timer was ever due.
    wake: Wake | None = field(default=None, metadata=_member(WAKE_KEY))
    above: Annotated[_Above, _SORTED] = field(default_factory=dict, metadata=_member(ABOVE_KEY, at=1))
    #: Watermarks that operators had seen before the first micro-batch of the log.
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

    def merge_max(self, other: TimeOffer) -> TimeOffer:
        ours, theirs = self.wake, other.wake
        is_later = theirs is not None and (ours is None or theirs.batch > ours.batch)
        return TimeOffer.of(
            self.watermarks.merge_max(other.watermarks),
            self.has_ended or other.has_ended,
            theirs if is_later else ours,
            self.seen.merge_max(other.seen),
        )

    def find_new_wakes(self, before: TimeOffer) -> list[tuple[int, int]]:
        return [] if self.wake is None or self.wake == before.wake else self.wake.rows()


#: The offer of a job without event time and timers.
NO_TIME_YET = TimeOffer()


@dataclass(frozen=True, slots=True)
class ControlOffset(StoredObject):
    """Everything that the driver has told the query."""

    #: The newest checkpoint whose barrier went out; 0 before the first.
    checkpoint: int = field(default=0, metadata=store_as(CHECKPOINT_KEY))
    time: TimeOffer = field(default=NO_TIME_YET, metadata=INLINE)
    #: The micro-batch of the newest pinned checkpoint; None before the first. Tasks delete files that only
    #: older states name.
    pinned_batch: _Count | None = field(default=None, metadata=_member(PINNED_KEY))
    #: The newest checkpoint whose micro-batch fires all event-time timers after its records; 0 for none.
    drained: _Count = field(default=0, metadata=_member(DRAIN_KEY))

    def merge_max(self, other: ControlOffset) -> ControlOffset:
        pinned = [batch for batch in (self.pinned_batch, other.pinned_batch) if batch is not None]
        return ControlOffset(
            max(self.checkpoint, other.checkpoint),
            self.time.merge_max(other.time),
            max(pinned, default=None),
            max(self.drained, other.drained),
        )

    @classmethod
    def find_newest(cls, sources: Iterable[Any]) -> ControlOffset:
        """Return the newest values in the offsets of all sources of a micro-batch.

        Spark asks each scan of the control source separately, so a scan may lag behind another. It catches up
        in the next micro-batch.
        """
        return reduce(cls.merge_max, _parse_offsets(sources), cls())

    @classmethod
    def find_drained(cls, sources: Iterable[Any]) -> int:
        """Return the draining checkpoint whose barrier all scans of a micro-batch carry; 0 for none."""
        given = _parse_offsets(sources)
        found = {one.drained if one.drained == one.checkpoint else 0 for one in given}
        return found.pop() if len(found) == 1 else 0

    @classmethod
    def find_called_groups(cls, batch: int, sources: Iterable[Any]) -> list[tuple[int, int]]:
        """Return the reporter numbers and key groups that a micro-batch called, if all scans agree."""
        wakes = [offset.time.wake for offset in _parse_offsets(sources)]
        wake = wakes[0] if wakes and wakes.count(wakes[0]) == len(wakes) else None
        return [] if wake is None or wake.batch != batch else wake.rows()


def _parse_offsets(sources: Iterable[Any]) -> list[ControlOffset]:
    return [ControlOffset.from_json(o) for o in sources if isinstance(o, dict) and CHECKPOINT_KEY in o]
