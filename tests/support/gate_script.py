"""Plays literal sequences of stream elements through an input gate.

A script is a line of words, one per event, in the order in which the gate meets them; each takes 1 ms.

    a.      one record of channel a                    a3      barrier 3 on channel a
    a3S     barrier of a savepoint                     a?3:8   barrier 3 announced at position 8 of a
    +d      new channel d that awaits the barriers     |d      new channel d behind the barriers
    x3      the coordinator aborts 3                   @50     the clock shows 50

`play` returns what the gate answered, word by word; events without an answer are left out. Behind the answers
to an event stands which channels it has opened and blocked.

    -a, +b      channel a blocked, channel b opened
    take3       checkpoint 3 taken; take3(b:2) with channel state of b from position 2 on
    done3       alignment complete; done3(b:2-5) with that channel state
    SUBSUMED3   aborted, with the reason
"""

from __future__ import annotations

import re

from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.input_gate import (
    AbortAlignment,
    AlignmentComplete,
    AlignmentMode,
    AlignmentSettings,
    BarrierKind,
    CheckpointBarrier,
    Effect,
    InputGate,
    NewChannel,
    TakeCheckpoint,
)

_BARRIER = re.compile(r"([a-w])(\d+)(S?)")
_ANNOUNCEMENT = re.compile(r"([a-z])\?(\d+):(\d+)")


def gate(
    channels: str,
    mode: AlignmentMode = AlignmentMode.ALIGNED,
    timeout_ms: int | None = None,
) -> InputGate:
    """Return a gate with one channel per letter, all at position 0."""
    return InputGate.of(dict.fromkeys(channels, 0), AlignmentSettings(mode, timeout_ms))


def word(effect: Effect) -> str:
    match effect:
        case TakeCheckpoint(checkpoint, _, in_flight):
            places = ",".join(f"{c}:{start}" for c, start in in_flight.items())
            return f"take{checkpoint}" + f"({places})" * bool(places)
        case AlignmentComplete(checkpoint, _, channel_state, _):
            places = ",".join(f"{c}:{r.start}-{r.end}" for c, r in channel_state.items())
            return f"done{checkpoint}" + f"({places})" * bool(places)
        case AbortAlignment(checkpoint, reason):
            return f"{reason.value}{checkpoint}"


class Player:
    """A gate, its clock, and everything it answered; after every event it goes through its JSON."""

    def __init__(self, start: InputGate) -> None:
        self.gate, self.now_ms = start, 0
        self.effects: list[Effect] = []

    def play(self, script: str) -> str:
        """Play a script and return the answers."""
        answers = []
        for event in script.split():
            self.now_ms += 1
            before = self.gate.blocked
            after, effects = self._answer(event)
            self.gate = InputGate.from_json(after.to_json(), after.settings)
            assert self.gate == after
            self.effects += effects
            answers += [word(effect) for effect in effects]
            answers += [f"+{channel}" for channel in sorted(before - after.blocked)]
            answers += [f"-{channel}" for channel in sorted(after.blocked - before)]
        return " ".join(answers)

    def last(self, kind: type[Effect]) -> Effect:
        """Return the newest effect of a kind."""
        return [effect for effect in self.effects if isinstance(effect, kind)][-1]

    def _answer(self, event: str) -> tuple[InputGate, tuple[Effect, ...]]:
        gate, now_ms, channel = self.gate, self.now_ms, event[0]
        here = gate.channels.get(channel, 0)
        if found := _BARRIER.fullmatch(event):
            kind = BarrierKind.SAVEPOINT if found[3] else BarrierKind.CHECKPOINT
            return gate.on_barrier(
                channel, CheckpointBarrier(CheckpointId(int(found[2])), 0, kind), here, now_ms
            )
        if found := _ANNOUNCEMENT.fullmatch(event):
            return gate.on_announcement(channel, CheckpointId(int(found[2])), int(found[3]), now_ms)
        if event[0] == "x":
            return gate.on_abort(CheckpointId(int(event[1:])), now_ms)
        if event[0] == "@":
            self.now_ms = int(event[1:])
            return gate.on_time(self.now_ms)
        if event[0] in "+|":
            stands = NewChannel.AWAITS_BARRIERS if event[0] == "+" else NewChannel.BEHIND_BARRIERS
            return gate.on_new_channel(event[1], 0, stands, now_ms)
        assert event[1:] == ".", event
        return gate.on_records(channel, here + 1, now_ms)
