"""The gate against a model that keeps whole histories, and long random runs.

`tests/support/gate_script.py` says what the words of a report mean.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.input_gate import (
    AbortAlignment,
    AlignmentComplete,
    AlignmentMode,
    AlignmentSettings,
    BarrierKind,
    CheckpointBarrier,
    InputGate,
    NewChannel,
    Step,
    TakeCheckpoint,
)
from tests.support.effort import examples
from tests.support.gate_script import word

#: A record: its channel and number; a mark: "barrier" and the checkpoint.
Element = tuple[str, int]
RECORD = "record"
TIMEOUT_MS = 6


@dataclass
class Met:
    """A pending checkpoint of the model."""

    kind: BarrierKind
    first_ms: int
    #: Channels that must show the barrier, and those that stood behind it when they appeared.
    members: set[str]
    behind: set[str] = field(default_factory=set)
    announced: dict[str, int] = field(default_factory=dict)
    #: How long the histories were when it was taken, by channel that had not shown the barrier.
    taken_at: dict[str, int] | None = None


class Model:
    """Answers from the whole history of each channel instead of from a state that moves along."""

    def __init__(self, channels: str, settings: AlignmentSettings) -> None:
        self.settings = settings
        self.counts = settings.mode is AlignmentMode.AT_LEAST_ONCE
        self.history: dict[str, list[object]] = {c: [] for c in channels}
        self.met: dict[int, Met] = {}
        self.highest = 0
        self.words: list[str] = []

    def showed(self, channel: str, checkpoint: int) -> bool:
        met = self.met[checkpoint]
        passed = ("barrier", checkpoint) in self.history[channel] or channel in met.announced
        return passed or channel in met.behind

    def went_past(self, channel: str, checkpoint: int) -> bool:
        return any(mark is not RECORD and mark[1] > checkpoint for mark in self.history[channel])

    def blocked(self) -> set[str]:
        waiting = [i for i, met in self.met.items() if met.taken_at is None and not self.counts]
        return {c for c in self.history for i in waiting if self.showed(c, i)}

    def give_up(self, checkpoint: int, reason: str) -> None:
        self.met.pop(checkpoint, None)
        self.highest = max(self.highest, checkpoint)
        self.words.append(f"{reason}{checkpoint}")

    def drop_the_impossible(self) -> None:
        for i, met in list(self.met.items()):
            if any(self.went_past(c, i) for c in met.members if not self.showed(c, i)):
                self.give_up(i, "SUBSUMED")

    def settle(self, now_ms: int) -> list[str]:
        for i, met in sorted(self.met.items()):
            if all(self.showed(c, i) for c in met.members):
                self.words += [f"take{i}"] * (met.taken_at is None) + [self.done(i, met)]
                del self.met[i]
        for i, met in self.met.items():
            patience = {AlignmentMode.UNALIGNED: 0, AlignmentMode.ALIGNED_WITH_TIMEOUT: TIMEOUT_MS}
            turns = met.first_ms + patience.get(self.settings.mode, 10**9)
            if now_ms >= turns and met.kind is BarrierKind.CHECKPOINT and met.taken_at is None:
                late = sorted(c for c in met.members if not self.showed(c, i))
                met.taken_at = {c: len(self.history[c]) for c in late}
                self.words.append(f"take{i}({','.join(f'{c}:{n}' for c, n in met.taken_at.items())})")
        words, self.words = self.words, []
        return words

    def done(self, checkpoint: int, met: Met) -> str:
        kept = []
        for channel, start in (met.taken_at or {}).items():
            history, barrier = self.history[channel], ("barrier", checkpoint)
            end = history.index(barrier) if barrier in history else len(history)
            end = met.announced.get(channel, end)
            kept += [f"{channel}:{start}-{end}"] * (end > start)
        return f"done{checkpoint}" + f"({','.join(kept)})" * bool(kept)


class GateAgainstModel(RuleBasedStateMachine):
    """Every event goes to both; reports, blocked channels and positions must agree."""

    @initialize(
        mode=st.sampled_from(AlignmentMode),
        channels=st.sampled_from(["a", "ab", "abc"]),
    )
    def begin(self, mode: AlignmentMode, channels: str) -> None:
        timeout_ms = TIMEOUT_MS if mode is AlignmentMode.ALIGNED_WITH_TIMEOUT else None
        configured = AlignmentSettings(mode, timeout_ms)
        self.gate = InputGate.of(dict.fromkeys(channels, 0), configured)
        self.model, self.now_ms = Model(channels, configured), 0
        self.last_words: list[int] = []

    def compare(self, step: Step) -> None:
        self.gate, effects = step
        reports = [e for e in effects if isinstance(e, TakeCheckpoint | AlignmentComplete | AbortAlignment)]
        assert sorted(map(word, reports)) == sorted(self.model.settle(self.now_ms))
        self.last_words += [int(e.checkpoint) for e in reports if not isinstance(e, TakeCheckpoint)]

    def is_free(self, channel: str) -> bool:
        """Whether an open channel may deliver; if not, its events must be refused."""
        if channel not in self.model.blocked():
            return True
        with pytest.raises(ValueError, match="is blocked at"):
            self.gate.on_barrier(channel, CheckpointBarrier(CheckpointId(1), 0), 10**6, self.now_ms)
        return False

    def pick(self, number: int) -> str:
        """Return one of the open channels."""
        return sorted(self.gate.channels)[number % len(self.gate.channels)]

    numbers = st.integers(0, 11)
    ids = st.sampled_from([-2, -1, 0, 0, 0, 0, 1, 1, 1, 2])

    @rule(number=numbers, count=st.integers(1, 3))
    def deliver(self, number: int, count: int) -> None:
        channel = self.pick(number)
        if self.is_free(channel):
            self.model.history[channel] += [RECORD] * count
            position = len(self.model.history[channel])
            self.compare(self.gate.on_records(channel, position, self.now_ms))

    @rule(number=numbers, above=ids, kind=st.sampled_from(BarrierKind))
    def barrier(self, number: int, above: int, kind: BarrierKind) -> None:
        channel, model, checkpoint = self.pick(number), self.model, self.model.highest + above
        if checkpoint < 1 or not self.is_free(channel):
            return
        position = len(model.history[channel])
        model.history[channel].append(("barrier", checkpoint))
        model.drop_the_impossible()
        if checkpoint > model.highest:
            for older in [] if model.counts else list(model.met):
                model.give_up(older, "SUBSUMED")
            model.met[checkpoint] = Met(kind, self.now_ms, set(model.history))
            model.highest = checkpoint
        sent = CheckpointBarrier(CheckpointId(checkpoint), 0, kind)
        self.compare(self.gate.on_barrier(channel, sent, position, self.now_ms))

    @rule(above=ids)
    def abort(self, above: int) -> None:
        checkpoint = self.model.highest + above
        if checkpoint < 1:
            return
        if checkpoint in self.model.met or checkpoint > self.model.highest:
            self.model.give_up(checkpoint, "COORDINATOR")
        self.compare(self.gate.on_abort(CheckpointId(checkpoint), self.now_ms))

    @rule(number=numbers, ahead=st.integers(0, 4))
    def announce(self, number: int, ahead: int) -> None:
        if not self.model.met:
            return
        channel = self.pick(number)
        checkpoint, met = max(self.model.met.items())
        position = len(self.model.history[channel]) + ahead
        if met.taken_at is not None and not self.model.showed(channel, checkpoint):
            met.announced[channel] = position
        self.compare(self.gate.on_announcement(channel, CheckpointId(checkpoint), position, self.now_ms))

    @precondition(lambda self: len(self.model.history) < 5)
    @rule(stands=st.sampled_from(NewChannel))
    def appear(self, stands: NewChannel) -> None:
        channel = "abcde"[len(self.model.history)]
        self.model.history[channel] = []
        for met in self.model.met.values():
            if stands is NewChannel.BEHIND_BARRIERS:
                met.behind.add(channel)
            else:
                met.members.add(channel)
                if met.taken_at is not None:
                    met.taken_at[channel] = 0
        self.compare(self.gate.on_new_channel(channel, 0, stands, self.now_ms))

    @rule(passed_ms=st.integers(0, 5))
    def wait(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        self.compare(self.gate.on_time(self.now_ms))

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "gate"):
            return
        assert self.gate.blocked == self.model.blocked()
        assert [int(a.checkpoint) for a in self.gate.pending] == sorted(self.model.met)
        assert dict(self.gate.channels) == {c: len(self.model.history[c]) for c in self.model.history}

    @invariant()
    def no_id_has_two_last_words(self) -> None:
        if hasattr(self, "gate"):
            assert len(self.last_words) == len(set(self.last_words))

    @invariant()
    def the_stored_form_is_exact(self) -> None:
        if hasattr(self, "gate"):
            assert InputGate.from_json(self.gate.to_json(), self.gate.settings) == self.gate

    @invariant()
    def somebody_can_always_go_on(self) -> None:
        if hasattr(self, "gate") and self.gate.channels:
            assert self.gate.blocked < self.gate.channels.keys()


class TestGateAgainstModel(GateAgainstModel.TestCase):
    settings = settings(
        max_examples=examples(150),
        stateful_step_count=examples(40, least=25),
        deadline=None,
        derandomize=True,
    )


# -- long random runs ---------------------------------------------------------------------------
def upstream(rng: random.Random, channels: str, length: int) -> dict[str, list[Element]]:
    """Return what an upstream job wrote into each channel; some barriers are missing."""
    written: dict[str, list[Element]] = {c: [] for c in channels}
    checkpoint = 0
    while sum(map(len, written.values())) < length:
        for channel in channels:
            written[channel] += [(channel, len(written[channel]) + i) for i in range(rng.randrange(12))]
        checkpoint += rng.choice([1, 1, 1, 2])
        fate = rng.random()
        for channel in channels:
            if fate > 0.2 or (fate > 0.1 and rng.random() < 0.5):
                written[channel].append(("barrier", checkpoint))
    # One that all channels have, so that none waits for ever.
    for channel in channels:
        written[channel].append(("barrier", checkpoint + 1))
    return written


class Downstream:
    """Polls channels at random, keeps what it got, and checks every cut against what was written."""

    def __init__(self, rng: random.Random, written: dict[str, list[Element]], gate: InputGate) -> None:
        self.rng, self.written, self.gate, self.now_ms = rng, written, gate, 0
        self.delivered: dict[str, list[Element]] = {c: [] for c in written}
        self.snapshots: dict[CheckpointId, dict[str, list[Element]]] = {}
        self.reported: list[CheckpointId] = []
        self.announced: set[CheckpointId] = set()
        #: Ids that were first met after a newer one.
        self.late: set[CheckpointId] = set()
        self.completed = 0

    def run(self) -> None:
        while unread := {c for c, at in self.gate.channels.items() if at < len(self.written[c])}:
            self.now_ms += self.rng.randrange(3)
            self.answer(self.poll(self.rng.choice(sorted(unread - self.gate.blocked))))

    def poll(self, channel: str) -> Step:
        position = self.gate.channels[channel]
        kind, number = self.written[channel][position]
        if kind == channel:
            self.delivered[channel].append((kind, number))
            return self.gate.on_records(channel, position + 1, self.now_ms)
        checkpoint = CheckpointId(number)
        if checkpoint not in self.announced and checkpoint < self.gate.newest:
            self.late.add(checkpoint)
        self.announced.add(checkpoint)
        return self.gate.on_barrier(
            channel, CheckpointBarrier(checkpoint, self.now_ms), position, self.now_ms
        )

    def look_ahead(self, taken: TakeCheckpoint) -> None:
        """Announce the barriers that are written already, as a source that can read ahead does."""
        for channel in taken.in_flight:
            barrier = ("barrier", int(taken.checkpoint))
            if barrier in self.written[channel] and self.rng.random() < 0.9:
                position = self.written[channel].index(barrier)
                self.answer(self.gate.on_announcement(channel, taken.checkpoint, position, self.now_ms))

    def answer(self, step: Step) -> None:
        self.gate, effects = step
        for effect in effects:
            if isinstance(effect, TakeCheckpoint):
                self.snapshots[effect.checkpoint] = {c: list(got) for c, got in self.delivered.items()}
                self.look_ahead(effect)
            elif isinstance(effect, AlignmentComplete):
                self.check_cut(effect)
                self.completed += 1
                self.reported.append(effect.checkpoint)
            elif isinstance(effect, AbortAlignment):
                self.snapshots.pop(effect.checkpoint, None)
                self.reported.append(effect.checkpoint)
        if self.rng.random() < 0.01:
            self.gate = InputGate.from_json(self.gate.to_json(), self.gate.settings)

    def check_cut(self, complete: AlignmentComplete) -> None:
        cut = self.snapshots.pop(complete.checkpoint)
        for channel, written in self.written.items():
            barrier = ("barrier", int(complete.checkpoint))
            end = written.index(barrier) if barrier in written else len(written)
            wanted = [record for record in written[:end] if record[0] == channel]
            kept = complete.channel_state.get(channel)
            stored = [r for r in written[kept.start : kept.end] if r[0] == channel] if kept else []
            held = cut[channel] + stored
            if self.gate.settings.mode is AlignmentMode.AT_LEAST_ONCE:
                held = held[: len(wanted)]
            assert held == wanted, (channel, complete)


@pytest.mark.parametrize("mode", AlignmentMode)
@pytest.mark.parametrize("channels", ["ab", "abcd"])
def test_random_barriers_over_long_runs_keep_order_and_content(mode, channels):
    """Behaviour 109: nothing lost, doubled or out of order, and every cut holds what its barriers say."""
    rng = random.Random(f"{mode.value} {channels}")
    written = upstream(rng, channels, examples(8_000, least=2_500))
    timeout_ms = 15 if mode is AlignmentMode.ALIGNED_WITH_TIMEOUT else None
    gate = InputGate.of(dict.fromkeys(channels, 0), AlignmentSettings(mode, alignment_timeout_ms=timeout_ms))
    downstream = Downstream(rng, written, gate)
    downstream.run()
    for channel, elements in written.items():
        assert downstream.delivered[channel] == [e for e in elements if e[0] == channel]
    assert not downstream.late & set(downstream.reported)
    assert sorted(downstream.reported) == sorted(downstream.announced - downstream.late)
    assert downstream.completed > 50
    assert not downstream.snapshots and not downstream.gate.pending
