"""Event time of a job: from what micro-batches report to the watermark of the next one.

Each micro-batch is one step, a function of the state before it and its :class:`BatchTimes`. So any process
that has a stored state and the reports of the micro-batches after it continues exactly, and a micro-batch
that runs again leads to the same watermark.

    reports -> watermark of each channel -> valve over an assigner's channels
            -> for each operator, a valve over the assigners before it

Idleness is measured in processing times of micro-batches. Every micro-batch reads all records that there are,
so a micro-batch without records of a channel shows that none came since the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from flinkish_spark.protocol.codec import (
    INLINE,
    LEFT_OUT,
    Form,
    StoredObject,
    get_member,
    read,
    store_as,
    whole,
    write,
)
from flinkish_spark.protocol.event_time import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    AssignerInput,
    AssignerRules,
    BatchTimes,
    ChannelStatus,
    NoWatermarkStrategy,
    Place,
    TimeMs,
    Valve,
    ValveChannel,
    WatermarkMs,
    Watermarks,
    check_unique,
)
from flinkish_spark.protocol.ids import Instance, Uid
from flinkish_spark.protocol.timer_index import Agenda


@dataclass(frozen=True, slots=True)
class AssignerTime:
    #: Processing time of the first micro-batch that knew the assigner; once all of its channels are gone, of
    #: the last one in which they had records.
    known_since_ms: int
    valve: Valve[int] = field(default_factory=Valve)
    #: By channel, the processing time of the last micro-batch in which it had records, was held back,
    #: or was new.
    silent_since_ms: Mapping[int, int] = field(default_factory=dict)
    #: True if its input has ended.
    has_ended: bool = False

    def status(self, rules: AssignerRules, now_ms: int) -> ChannelStatus:
        """Return if the assigner is active; without channels it becomes idle after the idleness timeout."""
        if isinstance(rules.generation, NoWatermarkStrategy):
            return ChannelStatus.IDLE
        if self.valve.channels:
            return self.valve.status
        return ChannelStatus.IDLE if _is_silent(rules, self.known_since_ms, now_ms) else ChannelStatus.ACTIVE

    def advance(
        self,
        rules: AssignerRules,
        now_ms: int,
        times_ms: Mapping[int, int | None],
        known: AssignerInput | None,
        held_back: Collection[int],
    ) -> AssignerTime:
        present = None if known is None else known.channels
        has_ended = self.has_ended if known is None else known.has_ended
        new = (times_ms.keys() | (present or frozenset())) - self.valve.channels.keys()
        generation = rules.generation
        watermarks = {
            channel: generation.watermark_ms(time_ms)
            for channel, time_ms in times_ms.items()
            if time_ms is not None
        }
        valve = self.valve.add_channels(sorted(new)).resume(times_ms).advance(watermarks)
        stirred = times_ms.keys() | new | set(held_back)
        silent_since_ms = {
            channel: now_ms if channel in stirred else self.silent_since_ms[channel]
            for channel in valve.channels
        }
        known_since_ms = self.known_since_ms
        if present is not None:
            # The records of a channel that ends in this micro-batch were part of it.
            valve = valve.remove_channels(valve.channels.keys() - present)
            if not valve.channels:
                # The next split may come at once, so the assigner stays active for the idleness timeout.
                known_since_ms = max(silent_since_ms.values(), default=known_since_ms)
            silent_since_ms = {channel: silent_since_ms[channel] for channel in valve.channels}
        quiet = [c for c, since_ms in silent_since_ms.items() if _is_silent(rules, since_ms, now_ms)]
        return AssignerTime(known_since_ms, valve.mark_idle(quiet), silent_since_ms, has_ended)

    def to_json(self) -> Any:
        channels = tuple(
            (number, one.watermark_ms, one.status, one.counts, self.silent_since_ms[number])
            for number, one in sorted(self.valve.channels.items())
        )
        return _Members(self.known_since_ms, self.valve.watermark_ms, self.has_ended, channels).to_json()

    @classmethod
    def from_json(cls, value: Any) -> AssignerTime:
        found = _Members.from_json(value)
        check_unique("channel", (number for number, *_ in found.channels))
        valve = Valve({one[0]: ValveChannel(*one[1:4]) for one in found.channels}, found.watermark_ms)
        silent_since_ms = {number: since_ms for number, *_, since_ms in found.channels}
        return cls(found.known_since_ms, valve, silent_since_ms, found.has_ended)


_Channel = tuple[Annotated[int, whole(0)], WatermarkMs, ChannelStatus, bool, TimeMs]


@dataclass(frozen=True, slots=True)
class _Members(StoredObject):
    """Stored form of an :class:`AssignerTime`, with one row per channel."""

    known_since_ms: TimeMs
    watermark_ms: WatermarkMs
    has_ended: bool
    channels: tuple[_Channel, ...]


def _is_silent(rules: AssignerRules, since_ms: int, now_ms: int) -> bool:
    return rules.idleness_ms is not None and now_ms - since_ms >= rules.idleness_ms


_ROWS = tuple[tuple[Instance, WatermarkMs, ChannelStatus, bool], ...]


def _write_valve(valve: Valve[str]) -> dict[str, Any]:
    rows = [(uid, one.watermark_ms, one.status, one.counts) for uid, one in sorted(valve.channels.items())]
    return {"watermark_ms": valve.watermark_ms, "valve": write(_ROWS, rows)}


def _read_valve(stored: Mapping[str, Any]) -> Valve[str]:
    rows = read(_ROWS, get_member(stored, "valve"))
    check_unique("assigner", (uid for uid, *_ in rows))
    watermark_ms = read(WatermarkMs, get_member(stored, "watermark_ms"))
    return Valve({uid: ValveChannel(*channel) for uid, *channel in rows}, watermark_ms)


#: A valve over assigners, stored as two members of its object.
StoredValve = Annotated[Valve[str], Form(_write_valve, _read_valve)]


# Two parts of a job that share no input do not wait for each other. An operator after another one has all
# inputs of the other, so its watermark is at most the other's: records that timers of the first one emit are
# never late at the second. (Except for inputs that come back from being idle: they do not hold back an
# operator that is ahead of them, and as in Flink that may be the second one alone.)
@dataclass(frozen=True, slots=True)
class OperatorTime(StoredObject):
    """Event time of one operator between two micro-batches."""

    #: The assigners before it.
    inputs: frozenset[Instance]
    #: Names of its timers: Spark runs an operator that is in two chains twice.
    instances: frozenset[Instance]
    #: Over its inputs that have not ended; at the end of all inputs its watermark is the greatest there is.
    valve: StoredValve = field(default_factory=Valve, metadata=INLINE)
    #: The watermark that the last micro-batch carried for it.
    carried_ms: WatermarkMs = MIN_WATERMARK_MS

    @property
    def watermark_ms(self) -> int:
        return self.valve.watermark_ms

    def advance(
        self,
        assigners: Mapping[str, AssignerTime],
        there: Mapping[str, AssignerTime],
        active: Collection[str],
        carried_ms: int,
    ) -> OperatorTime:
        own = {uid: one for uid, one in there.items() if uid in self.inputs}
        valve = advance_valve(self.valve, carried_ms, own, active)
        if self.inputs and all(uid in assigners and assigners[uid].has_ended for uid in self.inputs):
            valve = replace(valve, watermark_ms=MAX_WATERMARK_MS)
        return replace(self, valve=valve, carried_ms=carried_ms)


def advance_valve(
    valve: Valve[str], seen_ms: int, there: Mapping[str, AssignerTime], active: Collection[str]
) -> Valve[str]:
    """Return a valve over assigners after a micro-batch."""
    taking_part = there.keys() & active
    valve = replace(valve, watermark_ms=max(valve.watermark_ms, seen_ms))
    valve = valve.add_channels(sorted(there))
    # This order matters: as an assigner becomes idle, its greatest watermark may come out.
    valve = valve.resume(taking_part).advance({uid: one.valve.watermark_ms for uid, one in there.items()})
    valve = valve.mark_idle(there.keys() - taking_part)
    return valve.remove_channels(uid for uid in valve.channels if uid not in there or there[uid].has_ended)


#: Settings of all assigners of a job, by uid.
Rules = Mapping[str, AssignerRules]


@dataclass(frozen=True, slots=True)
class EventTime(StoredObject):
    """Event time of a job between two micro-batches; stored with checkpoints."""

    assigners: Mapping[Instance, AssignerTime] = field(default_factory=dict)
    #: Valve of the whole job, over the assigners that have not ended.
    valve: StoredValve = field(default_factory=Valve, metadata=INLINE)
    #: Processing time of the last micro-batch; None before the first.
    processing_time_ms: TimeMs | None = None
    #: The least watermark that the last micro-batch carried.
    carried_ms: WatermarkMs = MIN_WATERMARK_MS
    agenda: Agenda = field(default_factory=Agenda, metadata=store_as("timers"))
    operators: Mapping[Uid, OperatorTime] = field(default_factory=dict, metadata=LEFT_OUT)
    #: Current levels of operators by uid and name, such as open partial matches; see `protocol/time_plan.py`.
    levels: Mapping[Uid, Mapping[str, int]] = field(default_factory=dict, metadata=LEFT_OUT)

    def _check_read(self) -> None:
        if self.valve.channels.keys() != {uid for uid, one in self.assigners.items() if not one.has_ended}:
            raise ValueError("the valve and the assigners that have not ended differ")

    @property
    def has_ended(self) -> bool:
        return bool(self.assigners) and all(one.has_ended for one in self.assigners.values())

    @property
    def watermark_ms(self) -> int:
        return MAX_WATERMARK_MS if self.has_ended else self.valve.watermark_ms

    @property
    def watermarks(self) -> Watermarks:
        if not self.operators:
            return Watermarks(self.watermark_ms)
        return Watermarks.of({uid: one.watermark_ms for uid, one in self.operators.items()})

    @property
    def carried(self) -> Watermarks:
        if not self.operators:
            return Watermarks(self.carried_ms)
        return Watermarks.of({uid: one.carried_ms for uid, one in self.operators.items()})

    @property
    def has_carried_all(self) -> bool:
        return self.has_ended and self.carried.least_ms == MAX_WATERMARK_MS

    @property
    def is_told_all_next(self) -> bool:
        return self.has_ended and not self.has_carried_all and self.watermarks.least_ms == MAX_WATERMARK_MS

    def due(self, processing_time_ms: int) -> frozenset[Place]:
        """Return the operators and key groups that the next micro-batch must call even without records."""
        return self.agenda.due(self.watermark_ms, processing_time_ms, self._by_instance)

    def is_awaited(self, carried: Watermarks) -> bool:
        """Return if an operator with event-time timers has a greater watermark than the carried one."""
        waiting = self.agenda.next_event_times_ms.keys()
        if not self.operators:
            return bool(waiting) and self.watermark_ms > carried.least_ms
        risen = (one for uid, one in self.operators.items() if one.watermark_ms > carried.get(uid))
        return any(waiting & one.instances for one in risen)

    @property
    def is_due_at_once(self) -> bool:
        """True if a micro-batch is due now: an event-time timer is due, or all input has ended."""
        found = self._by_instance
        next_ms = self.agenda.next_event_times_ms
        has_reached_timer = any(ms <= found.get(name, self.watermark_ms) for name, ms in next_ms.items())
        return has_reached_timer or (self.has_ended and not self.has_carried_all)

    @property
    def _by_instance(self) -> dict[str, int]:
        return {name: one.watermark_ms for one in self.operators.values() for name in one.instances}

    def next_processing_time_ms(self, now_ms: int) -> int:
        """Return the processing time of a micro-batch that begins now; it never goes back, unlike clocks."""
        return now_ms if self.processing_time_ms is None else max(now_ms, self.processing_time_ms)

    def adapt_to_job(self, rules: Rules, operators: Mapping[str, OperatorTime]) -> EventTime:
        """Adapt a stored state to a job that may have other assigners and operators.

        Removed ones are left out, and new ones begin. Watermarks stay: the operators' state has seen them. A
        new operator has seen no watermark, so no record is late for it; if the stored state has no operators
        at all, each operator gets the watermark of the job.
        """
        kept = {uid: one for uid, one in self.assigners.items() if uid in rules}
        whole = replace(self.valve, watermark_ms=self.watermark_ms)
        known = {uid: (one.valve, one.carried_ms) for uid, one in self.operators.items()}
        unknown = (Valve[str](), MIN_WATERMARK_MS) if known else (whole, self.carried_ms)
        names = {name for one in operators.values() for name in one.instances}
        going_on = {}
        for uid, one in operators.items():
            # The inputs of the valve may change; its watermark stays.
            valve, carried_ms = known.get(uid, unknown)
            valve = valve.remove_channels(valve.channels.keys() - one.inputs)
            going_on[uid] = replace(one, valve=valve, carried_ms=carried_ms)
        return replace(
            self,
            assigners=kept,
            # New assigners join with the next micro-batch.
            valve=whole.remove_channels(whole.channels.keys() - rules.keys()),
            agenda=self.agenda.of(names),
            operators=going_on,
        )


def step(rules: Rules, state: EventTime, batch: BatchTimes) -> EventTime:
    """Return the state after a micro-batch; the next micro-batch carries its `watermarks`."""
    now_ms = batch.processing_time_ms
    if state.next_processing_time_ms(now_ms) > now_ms:
        raise ValueError(f"processing time went back from {state.processing_time_ms} to {now_ms}")
    reported = batch.group_by_assigner()
    known = {one.assigner: one for one in batch.inputs}
    held_back = find_channels_to_hold(rules, state)
    assigners = {}
    for uid, of_assigner in rules.items():
        before = state.assigners.get(uid) or AssignerTime(known_since_ms=now_ms)
        held = [channel for assigner, channel in held_back if assigner == uid]
        assigners[uid] = before.advance(of_assigner, now_ms, reported.get(uid, {}), known.get(uid), held)
    over = {uid for uid, one in state.assigners.items() if one.has_ended}
    there = {uid: one for uid, one in assigners.items() if uid not in over or not one.has_ended}
    active = {uid for uid, one in there.items() if one.status(rules[uid], now_ms) is ChannelStatus.ACTIVE}
    carried = batch.carried
    return EventTime(
        assigners,
        # The watermark never goes back, even if an input that had ended continues.
        advance_valve(state.valve, max(state.watermark_ms, batch.carried_ms), there, active),
        now_ms,
        batch.carried_ms,
        state.agenda.update(batch.timers),
        {
            uid: one.advance(assigners, there, active, carried.get(uid))
            for uid, one in state.operators.items()
        },
        state.levels,
    )


def find_channels_to_hold(rules: Rules, state: EventTime) -> frozenset[Place]:
    """Return the assigners and channels to hold back in the next micro-batch: those ahead of their group."""
    slowest_ms: dict[str, int] = {}
    running = _find_running(rules, state)
    for uid, one in running:
        alignment = rules[uid].alignment
        if alignment is not None and state.valve.channels[uid].status is ChannelStatus.ACTIVE:
            # Without channels the watermark is that of the channels that have gone.
            least_ms = min(_find_active_ms(one).values(), default=one.valve.watermark_ms)
            slowest_ms[alignment.group] = min(least_ms, slowest_ms.get(alignment.group, least_ms))
    ahead: set[Place] = set()
    for uid, one in running:
        alignment = rules[uid].alignment
        if alignment is not None and alignment.group in slowest_ms:
            most_ms = slowest_ms[alignment.group] + alignment.max_drift_ms
            ahead |= {
                (uid, channel) for channel, mark_ms in _find_active_ms(one).items() if mark_ms > most_ms
            }
    return frozenset(ahead)


def next_micro_batch_ms(rules: Rules, state: EventTime) -> int | None:
    """Return the processing time at which a micro-batch is due even without records; None for never."""
    if state.processing_time_ms is None:
        return None
    if state.is_due_at_once:
        return state.processing_time_ms
    held_back = find_channels_to_hold(rules, state)
    awaited: Collection[str] = rules.keys()
    if not held_back:
        waiting = state.agenda.next_event_times_ms.keys()
        timed = [one for one in state.operators.values() if waiting & one.instances]
        awaited = {uid for one in timed for uid in one.inputs} if state.operators or not waiting else awaited
    times_ms = (state.agenda.next_processing_time_ms, _find_next_idle_ms(rules, state, awaited, held_back))
    return min((time_ms for time_ms in times_ms if time_ms is not None), default=None)


def _find_next_idle_ms(
    rules: Rules, state: EventTime, awaited: Collection[str], held_back: Collection[Place]
) -> int | None:
    """Return the time at which the next channel of the awaited assigners becomes idle without records."""
    times_ms: list[int] = []
    for uid, one in _find_running(rules, state):
        idleness_ms = rules[uid].idleness_ms
        is_idle = state.valve.channels[uid].status is ChannelStatus.IDLE
        if uid not in awaited or idleness_ms is None or is_idle:
            continue
        waiting = [one.silent_since_ms[c] for c in _find_active_ms(one) if (uid, c) not in held_back]
        since_ms = waiting if one.valve.channels else [one.known_since_ms]
        times_ms += [silent_since_ms + idleness_ms for silent_since_ms in since_ms]
    return min(times_ms, default=None)


def _find_running(rules: Rules, state: EventTime) -> list[tuple[str, AssignerTime]]:
    return [(uid, one) for uid, one in state.assigners.items() if uid in rules and not one.has_ended]


def _find_active_ms(one: AssignerTime) -> dict[int, int]:
    channels = one.valve.channels.items()
    return {number: c.watermark_ms for number, c in channels if c.status is ChannelStatus.ACTIVE}
