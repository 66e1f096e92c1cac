"""Event time of a job: from what micro-batches report to the watermark of the next one.

One step per micro-batch, a function of the state before it and its :class:`BatchTimes`. So whoever has
a stored state and the facts of the micro-batches behind it continues exactly, in any process, and a
micro-batch that runs again leads to the same watermark.

    reports -> watermark of each channel -> valve over an assigner's channels -> valve over assigners

Idleness is measured in processing times of micro-batches, and every micro-batch reads what there is: one
that carries nothing of a channel shows that nothing came since the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flinkish_spark.protocol.agenda import Agenda
from flinkish_spark.protocol.ids import checked_name
from flinkish_spark.protocol.json_values import member, object_of
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.protocol.time_facts import (
    AssignerInput,
    AssignerRules,
    BatchTimes,
    Place,
    Untimed,
    once_each,
    rows_of,
)
from flinkish_spark.protocol.watermark_valve import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    ChannelStatus,
    Valve,
    ValveChannel,
)

#: Of all assigners of a job, by uid.
Rules = Mapping[str, AssignerRules]


@dataclass(frozen=True, slots=True)
class AssignerTime:
    """Where one assigner stands.

    Parameters
    ----------
    valve
        Over its channels.
    known_since_ms
        Processing time of the first micro-batch that knew it.
    silent_since_ms
        By channel, the processing time of the last micro-batch in which it had records, was held back,
        or was new.
    has_ended
        Whether its input is over.
    """

    known_since_ms: int
    valve: Valve[int] = field(default_factory=Valve)
    silent_since_ms: Mapping[int, int] = field(default_factory=dict)
    has_ended: bool = False

    def status(self, rules: AssignerRules, now_ms: int) -> ChannelStatus:
        """Return whether it takes part; without channels, it is idle when it has been so for long enough."""
        if isinstance(rules.generation, Untimed):
            return ChannelStatus.IDLE
        if self.valve.channels:
            return self.valve.status
        return ChannelStatus.IDLE if _is_silent(rules, self.known_since_ms, now_ms) else ChannelStatus.ACTIVE

    def after(
        self,
        rules: AssignerRules,
        now_ms: int,
        times_ms: Mapping[int, int | None],
        known: AssignerInput | None,
        held_back: Collection[int],
    ) -> AssignerTime:
        """Return where it stands behind a micro-batch."""
        present = None if known is None else known.channels
        has_ended = self.has_ended if known is None else known.has_ended
        new = (times_ms.keys() | (present or frozenset())) - self.valve.channels.keys()
        generation = rules.generation
        watermarks = {
            channel: generation.watermark_ms(time_ms)
            for channel, time_ms in times_ms.items()
            if time_ms is not None
        }
        valve = self.valve.with_channels(sorted(new)).resumed(times_ms).advanced(watermarks)
        if present is not None:
            # The records of a channel that ends in this micro-batch were part of it.
            valve = valve.without(valve.channels.keys() - present)
        stirred = times_ms.keys() | new | set(held_back)
        silent_since_ms = {
            channel: now_ms if channel in stirred else self.silent_since_ms[channel]
            for channel in valve.channels
        }
        quiet = [c for c, since_ms in silent_since_ms.items() if _is_silent(rules, since_ms, now_ms)]
        return replace(
            self,
            valve=valve.silenced(quiet),
            silent_since_ms=silent_since_ms,
            has_ended=has_ended,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "known_since_ms": self.known_since_ms,
            "watermark_ms": self.valve.watermark_ms,
            "has_ended": self.has_ended,
            "channels": [
                [number, one.watermark_ms, one.status.value, one.counts, self.silent_since_ms[number]]
                for number, one in sorted(self.valve.channels.items())
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> AssignerTime:
        """Read the stored form; raise ValueError if it is none."""
        stored = object_of(value, "an assigner")
        rows = rows_of(stored, "channels", 5)
        numbers = [checked_whole("channel", row[0], least=0) for row in rows]
        once_each("channel", numbers)
        return cls(
            _processing_time("known_since_ms", member(stored, "known_since_ms")),
            Valve(
                {number: _channel_of(*row[1:4]) for number, row in zip(numbers, rows, strict=True)},
                _watermark("watermark_ms", member(stored, "watermark_ms")),
            ),
            {
                number: _processing_time("silent_since_ms", row[4])
                for number, row in zip(numbers, rows, strict=True)
            },
            _flag("has_ended", member(stored, "has_ended")),
        )


@dataclass(frozen=True, slots=True)
class EventTime:
    """Where time stands between two micro-batches; stored with checkpoints.

    Make the first one with `EventTime()`, one for a job that starts again with :meth:`of_job`.

    Parameters
    ----------
    assigners
        By uid.
    valve
        Over the assigners that have not ended.
    processing_time_ms
        Of the last micro-batch; None before the first.
    carried_ms
        The watermark that the last micro-batch carried.
    agenda
        The timers that wait.
    """

    assigners: Mapping[str, AssignerTime] = field(default_factory=dict)
    valve: Valve[str] = field(default_factory=Valve)
    processing_time_ms: int | None = None
    carried_ms: int = MIN_WATERMARK_MS
    agenda: Agenda = field(default_factory=Agenda)

    @property
    def has_ended(self) -> bool:
        """Whether all input is over."""
        return bool(self.assigners) and all(one.has_ended for one in self.assigners.values())

    @property
    def watermark_ms(self) -> int:
        """The watermark of the next micro-batch."""
        return MAX_WATERMARK_MS if self.has_ended else self.valve.watermark_ms

    def next_processing_time_ms(self, now_ms: int) -> int:
        """Return the processing time of a micro-batch that begins now; never back, as clocks may go."""
        return now_ms if self.processing_time_ms is None else max(now_ms, self.processing_time_ms)

    def of_job(self, rules: Rules, operators: Iterable[str]) -> EventTime:
        """Return a stored state as a job goes on from it, which may have other assigners and operators.

        What the job no longer has is left out, and what is new begins. The watermark stays: operators'
        state has seen it.
        """
        kept = {uid: one for uid, one in self.assigners.items() if uid in rules}
        valve = replace(self.valve, watermark_ms=self.watermark_ms)
        return replace(
            self,
            assigners=kept,
            # New ones join with the next micro-batch.
            valve=valve.without(valve.channels.keys() - rules.keys()),
            agenda=self.agenda.of(operators),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "processing_time_ms": self.processing_time_ms,
            "carried_ms": self.carried_ms,
            "watermark_ms": self.valve.watermark_ms,
            "assigners": {uid: one.to_json() for uid, one in sorted(self.assigners.items())},
            "valve": [
                [uid, one.watermark_ms, one.status.value, one.counts]
                for uid, one in sorted(self.valve.channels.items())
            ],
            "timers": self.agenda.to_json(),
        }

    @classmethod
    def from_json(cls, value: Any) -> EventTime:
        """Read the stored form; raise ValueError if it is none."""
        stored = object_of(value, "event time")
        now_ms = member(stored, "processing_time_ms")
        listed = object_of(member(stored, "assigners"), "assigners")
        assigners = {
            checked_name(uid, "assigner"): AssignerTime.from_json(one) for uid, one in listed.items()
        }
        rows = rows_of(stored, "valve", 4)
        once_each("assigner", (checked_name(row[0], "assigner") for row in rows))
        valve = Valve(
            {row[0]: _channel_of(*row[1:]) for row in rows},
            _watermark("watermark_ms", member(stored, "watermark_ms")),
        )
        if valve.channels.keys() != {uid for uid, one in assigners.items() if not one.has_ended}:
            raise ValueError("the valve and the assigners that have not ended differ")
        return cls(
            assigners,
            valve,
            None if now_ms is None else _processing_time("processing_time_ms", now_ms),
            _watermark("carried_ms", member(stored, "carried_ms")),
            Agenda.from_json(stored, "timers"),
        )


def step(rules: Rules, state: EventTime, batch: BatchTimes) -> EventTime:
    """Return the state behind a micro-batch; its `watermark_ms` is what the next one carries.

    Parameters
    ----------
    rules
        Of the job.
    state
        Before the micro-batch: what this gave for the one before, of the same job.
    batch
        What it says. Reports of assigners that the job no longer has are left out.

    Raises
    ------
    ValueError
        The processing time went back, so these are not the facts of the next micro-batch.

    Examples
    --------
    >>> from flinkish_spark.protocol.time_facts import BoundedOutOfOrderness, ChannelReport
    >>> rules = {"orders": AssignerRules(BoundedOutOfOrderness(1_000))}
    >>> batch = BatchTimes(0, (ChannelReport("orders", 0, 61_001), ChannelReport("orders", 1, 90_000)))
    >>> step(rules, EventTime(), batch).watermark_ms
    60000
    """
    now_ms = batch.processing_time_ms
    if state.next_processing_time_ms(now_ms) > now_ms:
        raise ValueError(f"processing time went back from {state.processing_time_ms} to {now_ms}")
    reported = batch.by_assigner()
    known = {one.assigner: one for one in batch.inputs}
    held_back = to_hold_back(rules, state)
    assigners = {}
    for uid, of_assigner in rules.items():
        before = state.assigners.get(uid) or AssignerTime(known_since_ms=now_ms)
        held = [channel for assigner, channel in held_back if assigner == uid]
        assigners[uid] = before.after(of_assigner, now_ms, reported.get(uid, {}), known.get(uid), held)
    return EventTime(
        assigners,
        _joined(rules, state, assigners, batch),
        now_ms,
        batch.carried_ms,
        state.agenda.after(batch.timers),
    )


def to_hold_back(rules: Rules, state: EventTime) -> frozenset[Place]:
    """Return the assigners and channels that bring no records in the next micro-batch: they are ahead.

    A channel is ahead if it is more than its assigner's drift above the slowest active channel of the
    group. That one is never ahead itself, so the group goes on. An assigner that has brought nothing yet,
    and is not idle, is the slowest.

    Examples
    --------
    >>> to_hold_back({}, EventTime())
    frozenset()
    """
    slowest_ms: dict[str, int] = {}
    running = _running(rules, state)
    for uid, one in running:
        alignment = rules[uid].alignment
        if alignment is not None and state.valve.channels[uid].status is ChannelStatus.ACTIVE:
            least_ms = min(_active_ms(one).values(), default=MIN_WATERMARK_MS)
            slowest_ms[alignment.group] = min(least_ms, slowest_ms.get(alignment.group, least_ms))
    ahead: set[Place] = set()
    for uid, one in running:
        alignment = rules[uid].alignment
        if alignment is not None and alignment.group in slowest_ms:
            most_ms = slowest_ms[alignment.group] + alignment.max_drift_ms
            ahead |= {(uid, channel) for channel, mark_ms in _active_ms(one).items() if mark_ms > most_ms}
    return frozenset(ahead)


def next_micro_batch_ms(rules: Rules, state: EventTime) -> int | None:
    """Return the processing time at which a micro-batch is due even if no record comes; None for never.

    It is due at once (at a time that is over) if the watermark has reached a timer, or all input has
    ended and the last watermark is still to be carried; else at the next processing-time timer, or when a
    channel becomes idle for which somebody waits: an event-time timer, or a channel that is held back.
    """
    if state.processing_time_ms is None:
        return None
    agenda = state.agenda
    event_ms = agenda.next_event_time_ms
    has_reached_timer = event_ms is not None and event_ms <= state.watermark_ms
    if has_reached_timer or (state.has_ended and state.carried_ms < MAX_WATERMARK_MS):
        return state.processing_time_ms
    times_ms = [agenda.next_processing_time_ms]
    held_back = to_hold_back(rules, state)
    if event_ms is not None or held_back:
        times_ms.append(_next_idle_ms(rules, state, held_back))
    return min((time_ms for time_ms in times_ms if time_ms is not None), default=None)


def _next_idle_ms(rules: Rules, state: EventTime, held_back: Collection[Place]) -> int | None:
    """Return when the next channel becomes idle that is not idle yet, if no record comes."""
    times_ms: list[int] = []
    for uid, one in _running(rules, state):
        idleness_ms = rules[uid].idleness_ms
        if idleness_ms is None or state.valve.channels[uid].status is ChannelStatus.IDLE:
            continue
        waiting = [one.silent_since_ms[c] for c in _active_ms(one) if (uid, c) not in held_back]
        since_ms = waiting if one.valve.channels else [one.known_since_ms]
        times_ms += [silent_since_ms + idleness_ms for silent_since_ms in since_ms]
    return min(times_ms, default=None)


def _joined(
    rules: Rules, state: EventTime, assigners: Mapping[str, AssignerTime], batch: BatchTimes
) -> Valve[str]:
    """Return the valve over assigners behind a micro-batch."""
    now_ms = batch.processing_time_ms
    over = {uid for uid, one in state.assigners.items() if one.has_ended}
    # One that ends in this micro-batch still says how far it came.
    there = {uid: one for uid, one in assigners.items() if uid not in over or not one.has_ended}
    active = {uid for uid, one in there.items() if one.status(rules[uid], now_ms) is ChannelStatus.ACTIVE}
    # From what operators may have seen, also where an input that had ended goes on.
    valve = replace(state.valve, watermark_ms=max(state.watermark_ms, batch.carried_ms))
    valve = valve.with_channels(sorted(there))
    # This order matters: an assigner lets its greatest watermark out as it becomes idle.
    valve = valve.resumed(active).advanced({uid: one.valve.watermark_ms for uid, one in there.items()})
    valve = valve.silenced(there.keys() - active)
    return valve.without(uid for uid in valve.channels if uid not in there or assigners[uid].has_ended)


def _running(rules: Rules, state: EventTime) -> list[tuple[str, AssignerTime]]:
    return [(uid, one) for uid, one in state.assigners.items() if uid in rules and not one.has_ended]


def _active_ms(one: AssignerTime) -> dict[int, int]:
    """Return the watermarks of the active channels."""
    channels = one.valve.channels.items()
    return {number: c.watermark_ms for number, c in channels if c.status is ChannelStatus.ACTIVE}


def _is_silent(rules: AssignerRules, since_ms: int, now_ms: int) -> bool:
    return rules.idleness_ms is not None and now_ms - since_ms >= rules.idleness_ms


def _channel_of(watermark_ms: Any, status: Any, counts: Any) -> ValveChannel:
    return ValveChannel(
        _watermark("watermark_ms", watermark_ms), ChannelStatus(status), _flag("counts", counts)
    )


def _watermark(name: str, value: Any) -> int:
    return checked_whole(name, value, least=MIN_WATERMARK_MS, most=MAX_WATERMARK_MS)


def _processing_time(name: str, value: Any) -> int:
    return checked_whole(name, value, least=0, most=MAX_WATERMARK_MS)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value
