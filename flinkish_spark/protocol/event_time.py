"""What micro-batches say about time: facts, watermarks of operators, one watermark out of many.

An *assigner* gives the records of a stream their timestamps: a source, or an
`assign_timestamps_and_watermarks` behind it. Its channels are those of the stream there: Kafka partitions,
for example.

The rules of the valve are Flink's. Of the active channels those *count* that have once caught up with what
the valve has put out: a channel that was idle, and comes back with an older watermark than that, holds nobody
back until it is there. A transition takes all that one micro-batch says at once, so its result depends on no
order.

Most operators of most jobs share one watermark, so there is a least one for all, and the greater ones by uid.
Operators are named and not numbered: what a micro-batch carries stands in Spark's log, and numbers are of one
plan.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from flinkish_spark.protocol.codec import Presence, Stored, StoredRow, whole
from flinkish_spark.protocol.ids import Instance, checked_name
from flinkish_spark.protocol.limits import MOST_MS, checked_whole

#: Before any watermark was seen: nothing is late.
MIN_WATERMARK_MS = -(1 << 63)
#: No record comes any more: the end of a bounded input. Fires every event-time timer.
MAX_WATERMARK_MS = (1 << 63) - 1
WatermarkMs = Annotated[int, whole(MIN_WATERMARK_MS, MAX_WATERMARK_MS)]
TimeMs = Annotated[int, whole(0, MAX_WATERMARK_MS)]
_Number = Annotated[int, whole(0)]

_K = TypeVar("_K")


class ChannelStatus(enum.Enum):
    ACTIVE = "ACTIVE"
    #: Nothing came for some time; the others go on without it.
    IDLE = "IDLE"


@dataclass(frozen=True, slots=True)
class ValveChannel:
    """What the valve knows of a channel."""

    #: The greatest that came while it was active.
    watermark_ms: int = MIN_WATERMARK_MS
    #: An idle channel never counts.
    status: ChannelStatus = ChannelStatus.ACTIVE
    #: Whether it has caught up.
    counts: bool = True

    def __post_init__(self) -> None:
        if self.counts and self.status is ChannelStatus.IDLE:
            raise ValueError("an idle channel cannot count")


# Without slots: Python 3.11 cannot make a `Valve[str]()` that is frozen and has them.
@dataclass(frozen=True)
class Valve(Generic[_K]):
    """Channels, and the watermark that came of them. A value: every method returns another valve."""

    #: By name; each begins as active, and counts.
    channels: Mapping[_K, ValveChannel] = field(default_factory=dict)
    #: What was put out last.
    watermark_ms: int = MIN_WATERMARK_MS

    @property
    def status(self) -> ChannelStatus:
        """IDLE if every channel is; a valve without channels is active."""
        is_active = self._has_active(self.channels) or not self.channels
        return ChannelStatus.ACTIVE if is_active else ChannelStatus.IDLE

    def with_channels(self, added: Iterable[_K]) -> Valve[_K]:
        """Add channels that are not there: each counts at once, as its first records may be as old as any."""
        new = {key: ValveChannel() for key in added if key not in self.channels}
        return replace(self, channels={**self.channels, **new})

    def resumed(self, keys: Iterable[_K]) -> Valve[_K]:
        back = {
            key: self._active_at(self.channels[key].watermark_ms)
            for key in keys
            if self.channels[key].status is ChannelStatus.IDLE
        }
        return self._settled({**self.channels, **back})

    def advanced(self, watermarks_ms: Mapping[_K, int]) -> Valve[_K]:
        """Take watermarks. Those of idle channels, and those that go back, are left out."""
        moved = {}
        for key, watermark_ms in watermarks_ms.items():
            channel = self.channels[key]
            if channel.status is ChannelStatus.ACTIVE and watermark_ms > channel.watermark_ms:
                came = self._active_at(watermark_ms)
                moved[key] = replace(came, counts=came.counts or channel.counts)
        return self._settled({**self.channels, **moved})

    def silenced(self, keys: Iterable[_K]) -> Valve[_K]:
        """Make active channels idle; with the last one the greatest watermark of all comes out."""
        marks_ms = {key: self.channels[key].watermark_ms for key in keys}
        idle = {key: ValveChannel(ms, ChannelStatus.IDLE, counts=False) for key, ms in marks_ms.items()}
        return self._left_by({**self.channels, **idle})

    def without(self, keys: Iterable[_K]) -> Valve[_K]:
        gone = set(keys)
        return self._left_by({key: one for key, one in self.channels.items() if key not in gone})

    def _active_at(self, watermark_ms: int) -> ValveChannel:
        return ValveChannel(watermark_ms, counts=watermark_ms >= self.watermark_ms)

    def _left_by(self, channels: dict[_K, ValveChannel]) -> Valve[_K]:
        if self._has_active(channels):
            return self._settled(channels)
        # Nobody is left whom those that wait could overtake. It does not matter who left last, nor whether
        # that one had caught up: the order in which channels become idle says nothing about time.
        greatest_ms = max((one.watermark_ms for one in channels.values()), default=self.watermark_ms)
        return Valve(channels, max(self.watermark_ms, greatest_ms))

    def _settled(self, channels: dict[_K, ValveChannel]) -> Valve[_K]:
        counting = [one.watermark_ms for one in channels.values() if one.counts]
        return Valve(channels, max(self.watermark_ms, min(counting, default=self.watermark_ms)))

    @staticmethod
    def _has_active(channels: Mapping[_K, ValveChannel]) -> bool:
        return any(one.status is ChannelStatus.ACTIVE for one in channels.values())


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Of each operator. A value: equal ones mean the same for every operator."""

    #: Of all operators that are not named.
    least_ms: int = MIN_WATERMARK_MS
    #: By uid, of those that are further; each is greater than `least_ms`.
    above: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for uid, watermark_ms in self.above.items():
            checked_name(uid, "operator")
            checked_time(f"the watermark of '{uid}'", watermark_ms)
            if watermark_ms <= self.least_ms:
                raise ValueError(f"the watermark of '{uid}' is {watermark_ms}, not above {self.least_ms}")

    @classmethod
    def of(cls, by_operator: Mapping[str, int]) -> Watermarks:
        return cls(min(by_operator.values(), default=MIN_WATERMARK_MS))._with(by_operator)

    def at(self, uid: str) -> int:
        return self.above.get(uid, self.least_ms)

    def raised_to(self, other: Watermarks) -> Watermarks:
        least = Watermarks(max(self.least_ms, other.least_ms))
        return least._with({uid: max(self.at(uid), other.at(uid)) for uid in self.above.keys() | other.above})

    def _with(self, by_operator: Mapping[str, int]) -> Watermarks:
        above = {uid: ms for uid, ms in sorted(by_operator.items()) if ms > self.least_ms}
        return Watermarks(self.least_ms, above)


#: Of an assigner, or of an operator: its uid and the number of a channel, or of a key group.
Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class BoundedOutOfOrderness:
    """Records may come up to `max_out_of_orderness_ms` late; with 0 times never fall, but may be equal."""

    max_out_of_orderness_ms: int

    def __post_init__(self) -> None:
        checked_whole("max_out_of_orderness_ms", self.max_out_of_orderness_ms, least=0, most=MOST_MS)

    def watermark_ms(self, time_ms: int) -> int:
        return max(MIN_WATERMARK_MS, time_ms - self.max_out_of_orderness_ms - 1)


@dataclass(frozen=True, slots=True)
class AsReported:
    """Workers report watermarks, which a generator of the user's has emitted."""

    def watermark_ms(self, time_ms: int) -> int:
        return time_ms


@dataclass(frozen=True, slots=True)
class NoWatermarks:
    """There are never any, so event time of the job stands still while records come."""

    def watermark_ms(self, time_ms: int) -> int:
        return MIN_WATERMARK_MS


@dataclass(frozen=True, slots=True)
class Untimed(NoWatermarks):
    """Nothing was said about time: nobody waits for its watermarks, but for the end of its input."""


Generation = BoundedOutOfOrderness | AsReported | NoWatermarks


@dataclass(frozen=True, slots=True)
class Alignment:
    """Keeps the channels of all assigners of a group close to each other."""

    group: str
    #: How far a channel of this one may be ahead of the group's slowest.
    max_drift_ms: int

    def __post_init__(self) -> None:
        checked_name(self.group, "alignment group")
        checked_whole("max_drift_ms", self.max_drift_ms, least=0, most=MOST_MS)


@dataclass(frozen=True, slots=True)
class AssignerRules:
    """What a user has said about one assigner."""

    generation: Generation
    #: After how much processing time without records a channel is idle; None for never.
    idleness_ms: int | None = None
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        if self.idleness_ms is not None:
            checked_whole("idleness_ms", self.idleness_ms, least=1, most=MOST_MS)


@dataclass(frozen=True, slots=True)
class ChannelReport(StoredRow):
    """A channel had records in the micro-batch."""

    assigner: Instance
    channel: _Number
    #: The greatest event time, or the greatest watermark that its generator has emitted; None if its
    #: generator emitted none.
    time_ms: WatermarkMs | None


@dataclass(frozen=True, slots=True)
class AssignerInput(StoredRow):
    """What the driver knows of an assigner's source behind the micro-batch."""

    assigner: Instance
    #: Those that may still bring records; channels that have ended or are gone are not among them. None:
    #: as they were before, and those that report join them.
    channels: frozenset[_Number] | None = None
    #: Whether it is bounded and the micro-batch was its last.
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class TimerReport(StoredRow):
    """When the next timers of a key group are due; a group that was not called reports nothing."""

    operator: Instance
    group: _Number
    #: The earliest by each clock; None where the group has none, which is a report, too.
    event_time_ms: WatermarkMs | None
    processing_time_ms: WatermarkMs | None


@dataclass(frozen=True, slots=True)
class BatchTimes(Stored):
    """Everything that a micro-batch says about time; all that the driver needs of it."""

    DEFAULTS: ClassVar = Presence.LEFT_OUT

    #: Of the control offset that it carried; wall clock.
    processing_time_ms: TimeMs
    #: Of its workers. A channel may be in several, one per task and sink: the greatest counts.
    reports: tuple[ChannelReport, ...] = ()
    #: What the driver knows of sources; one that is left out is as it was.
    inputs: tuple[AssignerInput, ...] = ()
    #: Of the key groups that were called. The same group may report to several sinks, the same each time.
    timers: tuple[TimerReport, ...] = ()
    #: The watermark of the control offset that it carried: what operators have seen.
    carried_ms: WatermarkMs = MIN_WATERMARK_MS
    #: Of operators that saw a greater one than that, by uid.
    carried_above: Mapping[str, int] = field(default_factory=dict)
    #: The checkpoint for which event time was brought to its end behind the records; 0 for none.
    drained: _Number = 0

    def _check_read(self) -> None:
        once_each("the input of assigner", (one.assigner for one in self.inputs))
        _ = self.carried

    @property
    def carried(self) -> Watermarks:
        return Watermarks(self.carried_ms, self.carried_above)

    def by_assigner(self) -> dict[str, dict[int, int | None]]:
        found: dict[str, dict[int, int | None]] = {}
        for report in self.reports:
            times = found.setdefault(report.assigner, {})
            known = [ms for ms in (times.get(report.channel), report.time_ms) if ms is not None]
            times[report.channel] = max(known, default=None)
        return found


def checked_time(name: str, value: Any) -> int | None:
    if value is None:
        return None
    return checked_whole(name, value, least=MIN_WATERMARK_MS, most=MAX_WATERMARK_MS)


def once_each(name: str, keys: Iterable[Any]) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"{name} {key!r} is there twice")
        seen.add(key)
