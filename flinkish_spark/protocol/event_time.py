"""Event time of micro-batches: reports, watermarks of operators, the valve over watermarks of channels.

An *assigner* gives the records of a stream their timestamps: a source, or an
`assign_timestamps_and_watermarks` after it. Its channels are those of the stream at that place: Kafka
partitions, for example.

The rules of the valve are those of Flink's `StatusWatermarkValve`. An active channel *counts* (in Flink it is
aligned) once it has caught up with the valve's output: a channel that was idle and comes back with an older
watermark does not hold the others back until it has caught up. A transition takes all reports of one
micro-batch at once, so its result does not depend on their order.

Most operators of most jobs share one watermark, so there is a least one for all, and the greater ones by uid.
Operators are named and not numbered: Spark's log keeps what a micro-batch carries, and numbers change with
the plan.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from flinkish_spark.protocol.codec import Presence, StoredObject, StoredRow, whole
from flinkish_spark.protocol.ids import Instance, check_name
from flinkish_spark.protocol.limits import check_whole

#: The watermark before the first one: nothing is late.
MIN_WATERMARK_MS = -(1 << 63)
#: The watermark at the end of a bounded input; it fires every event-time timer.
MAX_WATERMARK_MS = (1 << 63) - 1
WatermarkMs = Annotated[int, whole(MIN_WATERMARK_MS, MAX_WATERMARK_MS)]
TimeMs = Annotated[int, whole(0, MAX_WATERMARK_MS)]
_Number = Annotated[int, whole(0)]

_K = TypeVar("_K")


class ChannelStatus(enum.Enum):
    ACTIVE = "ACTIVE"
    #: No records came for some time, so the valve does not wait for the channel.
    IDLE = "IDLE"


@dataclass(frozen=True, slots=True)
class ValveChannel:
    #: The greatest watermark that came while it was active.
    watermark_ms: int = MIN_WATERMARK_MS
    #: An idle channel never counts.
    status: ChannelStatus = ChannelStatus.ACTIVE
    #: True if it has caught up with the valve's output.
    counts: bool = True

    def __post_init__(self) -> None:
        if self.counts and self.status is ChannelStatus.IDLE:
            raise ValueError("an idle channel cannot count")


# Without slots: Python 3.11 cannot make a `Valve[str]()` that is frozen and has them.
@dataclass(frozen=True)
class Valve(Generic[_K]):
    """Channels and their common watermark. A value: every method returns another valve."""

    #: By name; each begins as active, and counts.
    channels: Mapping[_K, ValveChannel] = field(default_factory=dict)
    #: The last watermark that was put out.
    watermark_ms: int = MIN_WATERMARK_MS

    @property
    def status(self) -> ChannelStatus:
        """IDLE if every channel is; a valve without channels is active."""
        is_active = self._has_active(self.channels) or not self.channels
        return ChannelStatus.ACTIVE if is_active else ChannelStatus.IDLE

    def add_channels(self, added: Iterable[_K]) -> Valve[_K]:
        """Add missing channels; each counts at once, since its first records may be old."""
        new = {key: ValveChannel() for key in added if key not in self.channels}
        return replace(self, channels={**self.channels, **new})

    def resume(self, keys: Iterable[_K]) -> Valve[_K]:
        back = {
            key: self._make_active(self.channels[key].watermark_ms)
            for key in keys
            if self.channels[key].status is ChannelStatus.IDLE
        }
        return self._output_watermark({**self.channels, **back})

    def advance(self, watermarks_ms: Mapping[_K, int]) -> Valve[_K]:
        """Take new watermarks, except those of idle channels and those that go back."""
        moved = {}
        for key, watermark_ms in watermarks_ms.items():
            channel = self.channels[key]
            if channel.status is ChannelStatus.ACTIVE and watermark_ms > channel.watermark_ms:
                came = self._make_active(watermark_ms)
                moved[key] = replace(came, counts=came.counts or channel.counts)
        return self._output_watermark({**self.channels, **moved})

    def mark_idle(self, keys: Iterable[_K]) -> Valve[_K]:
        """Make channels idle; if no active channel is left, put the greatest of all watermarks out."""
        marks_ms = {key: self.channels[key].watermark_ms for key in keys}
        idle = {key: ValveChannel(ms, ChannelStatus.IDLE, counts=False) for key, ms in marks_ms.items()}
        return self._output_after_removal({**self.channels, **idle})

    def remove_channels(self, keys: Iterable[_K]) -> Valve[_K]:
        gone = set(keys)
        return self._output_after_removal({key: one for key, one in self.channels.items() if key not in gone})

    def _make_active(self, watermark_ms: int) -> ValveChannel:
        return ValveChannel(watermark_ms, counts=watermark_ms >= self.watermark_ms)

    def _output_after_removal(self, channels: dict[_K, ValveChannel]) -> Valve[_K]:
        if self._has_active(channels):
            return self._output_watermark(channels)
        # No active channel is left that the greatest watermark could overtake. Neither the channel that left
        # last matters nor if it had caught up: the order in which channels become idle says nothing about
        # time.
        greatest_ms = max((one.watermark_ms for one in channels.values()), default=self.watermark_ms)
        return Valve(channels, max(self.watermark_ms, greatest_ms))

    def _output_watermark(self, channels: dict[_K, ValveChannel]) -> Valve[_K]:
        counting = [one.watermark_ms for one in channels.values() if one.counts]
        return Valve(channels, max(self.watermark_ms, min(counting, default=self.watermark_ms)))

    @staticmethod
    def _has_active(channels: Mapping[_K, ValveChannel]) -> bool:
        return any(one.status is ChannelStatus.ACTIVE for one in channels.values())


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Watermarks of all operators. Equal values mean equal watermarks of every operator."""

    #: Watermark of all operators that are not in `above`.
    least_ms: int = MIN_WATERMARK_MS
    #: By uid, the watermarks that are greater than `least_ms`.
    above: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for uid, watermark_ms in self.above.items():
            check_name(uid, "operator")
            check_time(f"the watermark of '{uid}'", watermark_ms)
            if watermark_ms <= self.least_ms:
                raise ValueError(f"the watermark of '{uid}' is {watermark_ms}, not above {self.least_ms}")

    @classmethod
    def of(cls, by_operator: Mapping[str, int]) -> Watermarks:
        return cls(min(by_operator.values(), default=MIN_WATERMARK_MS))._set_above(by_operator)

    def get(self, uid: str) -> int:
        return self.above.get(uid, self.least_ms)

    def merge_max(self, other: Watermarks) -> Watermarks:
        least = Watermarks(max(self.least_ms, other.least_ms))
        uids = self.above.keys() | other.above
        return least._set_above({uid: max(self.get(uid), other.get(uid)) for uid in uids})

    def _set_above(self, by_operator: Mapping[str, int]) -> Watermarks:
        above = {uid: ms for uid, ms in sorted(by_operator.items()) if ms > self.least_ms}
        return Watermarks(self.least_ms, above)


#: The uid of an assigner and a channel's number, or the uid of an operator and a key group's number.
Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class BoundedOutOfOrderness:
    """Watermarks for records that come up to `max_out_of_orderness_ms` late; 0 allows equal times."""

    max_out_of_orderness_ms: int

    def watermark_ms(self, time_ms: int) -> int:
        return max(MIN_WATERMARK_MS, time_ms - self.max_out_of_orderness_ms - 1)


@dataclass(frozen=True, slots=True)
class ReportedWatermarks:
    """Watermarks that a generator of the user's emits in the workers."""

    def watermark_ms(self, time_ms: int) -> int:
        return time_ms


@dataclass(frozen=True, slots=True)
class NoWatermarks:
    """No watermarks, so event time of the job stands still while records come."""

    def watermark_ms(self, time_ms: int) -> int:
        return MIN_WATERMARK_MS


@dataclass(frozen=True, slots=True)
class NoWatermarkStrategy(NoWatermarks):
    """A source without a watermark strategy: the job waits for the end of its input only."""


Generation = BoundedOutOfOrderness | ReportedWatermarks | NoWatermarks


@dataclass(frozen=True, slots=True)
class Alignment:
    """Watermark alignment: keeps the channels of all assigners of a group close to each other."""

    group: str
    #: How far a channel of this assigner may be ahead of the group's slowest.
    max_drift_ms: int

    def __post_init__(self) -> None:
        check_name(self.group, "alignment group")


@dataclass(frozen=True, slots=True)
class AssignerRules:
    generation: Generation
    #: Processing time without records after which a channel is idle; None for never.
    idleness_ms: int | None = None
    alignment: Alignment | None = None


@dataclass(frozen=True, slots=True)
class ChannelReport(StoredRow):
    """Report of a channel that had records in the micro-batch."""

    assigner: Instance
    channel: _Number
    #: The greatest event time, or the greatest watermark that its generator has emitted; None if its
    #: generator emitted none.
    time_ms: WatermarkMs | None


@dataclass(frozen=True, slots=True)
class AssignerInput(StoredRow):
    """State of an assigner's source after the micro-batch, as the driver knows it."""

    assigner: Instance
    #: Channels that may still bring records, without those that have ended or are gone. None: the channels
    #: known before, and those that report.
    channels: frozenset[_Number] | None = None
    #: True if the source is bounded and the micro-batch was its last.
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class TimerReport(StoredRow):
    """The next timers of a key group; a group that was not called reports nothing."""

    operator: Instance
    group: _Number
    #: Time of the earliest timer by each clock; None if the group has no timer.
    event_time_ms: WatermarkMs | None
    processing_time_ms: WatermarkMs | None


@dataclass(frozen=True, slots=True)
class BatchTimes(StoredObject):
    DEFAULTS: ClassVar = Presence.LEFT_OUT

    #: Wall clock of the control offset that the micro-batch carried.
    processing_time_ms: TimeMs
    #: Reports of its workers. A channel may have several, one per task and sink: the greatest counts.
    reports: tuple[ChannelReport, ...] = ()
    #: State of sources; a source that is left out is unchanged.
    inputs: tuple[AssignerInput, ...] = ()
    #: Reports of the key groups that were called. A group reports the same to each of several sinks.
    timers: tuple[TimerReport, ...] = ()
    #: The least watermark of the control offset that it carried: operators have seen it.
    carried_ms: WatermarkMs = MIN_WATERMARK_MS
    #: By uid, the greater watermarks that operators have seen.
    carried_above: Mapping[str, int] = field(default_factory=dict)
    #: The checkpoint for which event time ended after the records; 0 for none.
    drained: _Number = 0

    def _check_read(self) -> None:
        check_unique("the input of assigner", (one.assigner for one in self.inputs))
        _ = self.carried

    @property
    def carried(self) -> Watermarks:
        return Watermarks(self.carried_ms, self.carried_above)

    def group_by_assigner(self) -> dict[str, dict[int, int | None]]:
        found: dict[str, dict[int, int | None]] = {}
        for report in self.reports:
            times = found.setdefault(report.assigner, {})
            known = [ms for ms in (times.get(report.channel), report.time_ms) if ms is not None]
            times[report.channel] = max(known, default=None)
        return found


def check_time(name: str, value: Any) -> int | None:
    if value is None:
        return None
    return check_whole(name, value, least=MIN_WATERMARK_MS, most=MAX_WATERMARK_MS)


def check_unique(name: str, keys: Iterable[Any]) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"{name} {key!r} is there twice")
        seen.add(key)
