"""What one micro-batch says about time, and the rules that make watermarks of it.

An *assigner* gives the records of a stream their timestamps: a source, or an
`assign_timestamps_and_watermarks` behind it. Its channels are those of the stream there: Kafka
partitions, for example.

Facts are stored with what the micro-batch staged. `to_json` and `from_json` are exact inverses, and
`from_json` raises ValueError for whatever is not what it expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flinkish_spark.protocol.codec import Presence, Stored, StoredRow
from flinkish_spark.protocol.ids import checked_instance, checked_name
from flinkish_spark.protocol.limits import MOST_MS, checked_whole
from flinkish_spark.protocol.operator_watermarks import Watermarks
from flinkish_spark.protocol.watermark_valve import MAX_WATERMARK_MS, MIN_WATERMARK_MS

#: Of an assigner, or of an operator: its uid and the number of a channel, or of a key group.
Place = tuple[str, int]

# -- rules: of the job, never stored -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BoundedOutOfOrderness:
    """Records may come up to `max_out_of_orderness_ms` late; workers report event times.

    With 0 times never fall; they may be equal, so the watermark is always one below the greatest.
    """

    max_out_of_orderness_ms: int

    def __post_init__(self) -> None:
        checked_whole("max_out_of_orderness_ms", self.max_out_of_orderness_ms, least=0, most=MOST_MS)

    def watermark_ms(self, time_ms: int) -> int:
        """Return the watermark after an event time."""
        return max(MIN_WATERMARK_MS, time_ms - self.max_out_of_orderness_ms - 1)


@dataclass(frozen=True, slots=True)
class AsReported:
    """Workers report watermarks, which a generator of the user's has emitted."""

    def watermark_ms(self, time_ms: int) -> int:
        """Return the reported watermark."""
        return time_ms


@dataclass(frozen=True, slots=True)
class NoWatermarks:
    """There are never any, so event time of the job stands still while records come."""

    def watermark_ms(self, time_ms: int) -> int:
        """Return the watermark before any."""
        return MIN_WATERMARK_MS


@dataclass(frozen=True, slots=True)
class Untimed(NoWatermarks):
    """Nothing was said about time: nobody waits for its watermarks, but for the end of its input."""


Generation = BoundedOutOfOrderness | AsReported | NoWatermarks


@dataclass(frozen=True, slots=True)
class Alignment:
    """Keeps the channels of all assigners of a group close to each other.

    Parameters
    ----------
    group
        Name that the assigners share.
    max_drift_ms
        How far a channel of this one may be ahead of the group's slowest.
    """

    group: str
    max_drift_ms: int

    def __post_init__(self) -> None:
        checked_name(self.group, "alignment group")
        checked_whole("max_drift_ms", self.max_drift_ms, least=0, most=MOST_MS)


@dataclass(frozen=True, slots=True)
class AssignerRules:
    """What a user has said about one assigner.

    Parameters
    ----------
    generation
        How reports become watermarks.
    idleness_ms
        After how much processing time without records a channel is idle; None for never.
    alignment
        None for none.
    """

    generation: Generation
    idleness_ms: int | None = None
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        if self.idleness_ms is not None:
            checked_whole("idleness_ms", self.idleness_ms, least=1, most=MOST_MS)


# -- facts: of one micro-batch, stored ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChannelReport(StoredRow):
    """A channel had records in the micro-batch.

    Parameters
    ----------
    assigner, channel
        Which.
    time_ms
        The greatest event time, or the greatest watermark that its generator has emitted; None if its
        generator emitted none.
    """

    assigner: str
    channel: int
    time_ms: int | None

    def __post_init__(self) -> None:
        _check_place("assigner", self.assigner, "channel", self.channel)
        checked_time("time_ms", self.time_ms)


@dataclass(frozen=True, slots=True)
class AssignerInput(StoredRow):
    """What the driver knows of an assigner's source behind the micro-batch.

    Parameters
    ----------
    assigner
        Its uid.
    channels
        Those that may still bring records; channels that have ended or are gone are not among them. None:
        as they were before, and those that report join them.
    has_ended
        Whether it is bounded and the micro-batch was its last.
    """

    assigner: str
    channels: frozenset[int] | None = None
    has_ended: bool = False

    def __post_init__(self) -> None:
        checked_instance(self.assigner, "assigner")
        for channel in self.channels or ():
            checked_whole("channel", channel, least=0)
        checked_flag("has_ended", self.has_ended)


@dataclass(frozen=True, slots=True)
class TimerReport(StoredRow):
    """When the next timers of a key group are due; a group that was not called reports nothing.

    Parameters
    ----------
    operator, group
        Which.
    event_time_ms, processing_time_ms
        The earliest by each clock; None where the group has none, which is a report, too.
    """

    operator: str
    group: int
    event_time_ms: int | None
    processing_time_ms: int | None

    def __post_init__(self) -> None:
        _check_place("operator", self.operator, "group", self.group)
        checked_time("event_time_ms", self.event_time_ms)
        checked_time("processing_time_ms", self.processing_time_ms)


@dataclass(frozen=True, slots=True)
class BatchTimes(Stored):
    """Everything that a micro-batch says about time; all that the driver needs of it.

    Parameters
    ----------
    processing_time_ms
        Of the control offset that it carried; wall clock.
    reports
        Of its workers. A channel may be in several, one per task and sink: the greatest counts.
    inputs
        What the driver knows of sources; one that is left out is as it was.
    timers
        Of the key groups that were called. The same group may report to several sinks, the same each time.
    carried_ms
        The watermark of the control offset that it carried: what operators have seen.
    carried_above
        Of operators that saw a greater one than that, by uid.
    drained
        The checkpoint for which event time was brought to its end behind the records; 0 for none.
    """

    DEFAULTS: ClassVar = Presence.LEFT_OUT

    processing_time_ms: int
    reports: tuple[ChannelReport, ...] = ()
    inputs: tuple[AssignerInput, ...] = ()
    timers: tuple[TimerReport, ...] = ()
    carried_ms: int = MIN_WATERMARK_MS
    carried_above: Mapping[str, int] = field(default_factory=dict)
    drained: int = 0

    def __post_init__(self) -> None:
        checked_watermark("carried_ms", self.carried_ms)
        checked_processing_time("processing_time_ms", self.processing_time_ms)
        checked_whole("drained", self.drained, least=0)
        once_each("the input of assigner", (one.assigner for one in self.inputs))
        Watermarks(self.carried_ms, self.carried_above)

    @property
    def carried(self) -> Watermarks:
        """What each operator has seen."""
        return Watermarks(self.carried_ms, self.carried_above)

    def by_assigner(self) -> dict[str, dict[int, int | None]]:
        """Return the greatest time per channel, by assigner."""
        found: dict[str, dict[int, int | None]] = {}
        for report in self.reports:
            times = found.setdefault(report.assigner, {})
            times[report.channel] = _greater(times.get(report.channel), report.time_ms)
        return found


# -- checks that stored values share -----------------------------------------------------------------


def checked_time(name: str, value: Any) -> int | None:
    """Return `value` if it is None or a time in 64 bits, else raise ValueError."""
    if value is None:
        return None
    return checked_whole(name, value, least=MIN_WATERMARK_MS, most=MAX_WATERMARK_MS)


def checked_watermark(name: str, value: Any) -> int:
    """Return `value` if it is a watermark, else raise ValueError."""
    return checked_whole(name, value, least=MIN_WATERMARK_MS, most=MAX_WATERMARK_MS)


def checked_processing_time(name: str, value: Any) -> int:
    """Return `value` if it is a processing time, else raise ValueError."""
    return checked_whole(name, value, least=0, most=MAX_WATERMARK_MS)


def checked_flag(name: str, value: Any) -> bool:
    """Return `value` if it is true or false, else raise ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def once_each(name: str, keys: Iterable[Any]) -> None:
    """Raise ValueError if a key comes twice."""
    seen = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"{name} {key!r} is there twice")
        seen.add(key)


def _check_place(what: str, uid: Any, number_name: str, number: Any) -> None:
    checked_instance(uid, what)
    checked_whole(number_name, number, least=0)


def _greater(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return max(one, other)
