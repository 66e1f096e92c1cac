"""Chained sources over logs of chance: every checkpoint is a cut, nothing is lost, nothing comes twice.

The log is what an upstream job leaves; what a checkpoint must hold is read off the log itself, so
this is a second opinion about the planner. Partitions become visible at paces of their own, are
added, and are found late; the planner's process is restarted, and the job goes back to checkpoints.
In a troubled world upstream checkpoints are aborted, compaction takes barriers away, and the job begins
in the middle, or begins late to look for cuts, or with another mode than before.
"""

from __future__ import annotations

import copy
import enum
import random

import pytest

from flinkish_spark.connectors.kafka.chaining import alignment as cut_plan
from flinkish_spark.protocol.input_gate import AlignmentMode, AlignmentSettings, BarrierKind
from tests.support.chained_log import TOPIC, Chained, Drawn, Log
from tests.support.effort import examples

MODES = list(AlignmentMode)
SEEDS = examples(30, least=12)
DRAWN_AHEAD = (AlignmentMode.UNALIGNED, AlignmentMode.ALIGNED_WITH_TIMEOUT)


class Kind(enum.Enum):
    """How much goes on in a world."""

    FIXED = "fixed"
    GROWING = "growing"
    TROUBLED = "troubled"


class World:
    """An upstream job's topic and a chained job, moved by chance.

    Parameters
    ----------
    seed
        Of everything.
    kind
        Growing: partitions are added. Troubled: everything.
    """

    def __init__(self, seed: int, mode: AlignmentMode, kind: Kind) -> None:
        self.chance = random.Random(seed)
        self.kind = kind
        self.lines: list[list[str]] = []
        self.checkpoints: list[int] = []
        self._write()
        #: What the upstream job wrote; compaction takes barriers out of `lines`.
        self.written = copy.deepcopy(self.lines)
        first = self._partitions_at_first
        start = self._start()
        self.log = Log(self.lines[:first], [start.get(p, 0) for p in range(first)])
        self.job = Chained(self.log, mode, _timeout_ms(mode), start)
        if kind is Kind.TROUBLED and self.chance.random() < 0.3:
            self.job.without_cuts()
        self.offered = 0
        self.checked = 0
        self.has_last_cut = True

    def _start(self) -> dict[int, int]:
        """Return where the job begins: sometimes behind barriers that other partitions have ahead."""
        chance, last = self.chance, self.checkpoints[-1]
        if self.kind is not Kind.TROUBLED or chance.random() < 0.5:
            return {}
        ends = [self._barrier(last, p) or 0 for p in range(self._partitions_at_first)]
        return {p: chance.randint(0, end) for p, end in enumerate(ends)}

    def _write(self) -> None:
        grows, chance, checkpoint = self.kind is not Kind.FIXED, self.chance, 0
        self.lines = [[] for _ in range(chance.randint(1, 3))]
        self._partitions_at_first = len(self.lines)
        for _ in range(chance.randint(3, 8)):
            if grows and chance.random() < 0.3:
                self.lines.append([])
            checkpoint += chance.choice((1, 1, 2))
            for number, line in enumerate(self.lines):
                for _ in range(chance.choice((0, 1, 3, 12))):
                    line.append("." if chance.random() < 0.2 else f"{number}.{len(line)}")
            if self.kind is Kind.TROUBLED and chance.random() < 0.2:
                # Aborted: no barriers, and the records belong to the next checkpoint.
                continue
            self._end_checkpoint(checkpoint)
        if self.checkpoints[-1:] != [checkpoint]:
            self._end_checkpoint(checkpoint)

    def _end_checkpoint(self, checkpoint: int) -> None:
        for line in self.lines:
            line.append(f"|{checkpoint}/{len(self.lines)}")
        self.checkpoints.append(checkpoint)

    # -- moving ---------------------------------------------------------------------------------
    def move(self) -> None:
        chance, job, log = self.chance, self.job, self.log
        job.now_ms += chance.randint(0, 20)
        if len(log.lines) < len(self.lines) and chance.random() < 0.1:
            log.lines.append(self.lines[len(log.lines)])
            log.visible.append(0)
        for number, line in enumerate(log.lines):
            log.visible[number] = min(len(line), log.visible[number] + chance.choice((0, 0, 1, 4)))
        if chance.random() < 0.3:
            self.offer()
        if self.kind is Kind.TROUBLED and chance.random() < 0.1:
            self.compact(chance.randrange(len(log.lines)))
        if chance.random() < 0.05:
            job.restart()
            if self.kind is Kind.TROUBLED:
                self.change_mode(chance.choice(MODES))
        if chance.random() < 0.05 and job.drawn:
            job.restore(job.drawn[-1])
        self.step(chance.choice((None, 1, 2, 5)))

    def change_mode(self, mode: AlignmentMode) -> None:
        counted = self.job.settings.mode is AlignmentMode.AT_LEAST_ONCE
        self.job.settings = AlignmentSettings(mode, alignment_timeout_ms=_timeout_ms(mode))
        if counted and mode is not AlignmentMode.AT_LEAST_ONCE:
            # Some partitions may be behind the last barrier already: then it waits for one more cut.
            self.has_last_cut = False

    def compact(self, number: int) -> None:
        """Lose a barrier for which there is a newer one in sight.

        Not one that is the end of channel state: such a cut has been named by then, and what is in sight
        cannot tell. That is why modes that draw cuts ahead of barriers refuse compacted topics.
        """
        line = self.log.lines[number]
        seen = [o for o in range(self.log.visible[number]) if line[o].startswith("|")]
        named = {drawn.upstream for drawn in self.job.drawn}
        kept = {self.checkpoints[-1], *named, self.job.state.gate.newest}
        old = [o for o in seen[:-1] if int(line[o][1:].partition("/")[0]) not in kept]
        if old:
            line[self.chance.choice(old)] = "."

    def offer(self) -> None:
        self.offered += 1
        kind = BarrierKind.SAVEPOINT if self.chance.random() < 0.1 else BarrierKind.CHECKPOINT
        self.job.offers(self.offered, kind)

    def step(self, most: int | None) -> bool:
        job = self.job
        must_wait = self._held() if job._is_replaying else {}
        moved = job.step(most)
        for number, position in must_wait.items():
            assert job.at[number] == position, "a partition is read before the channel state"
        for number, position in enumerate(job.at):
            assert job.delivered[number] == self._records(number, position)
        for drawn in job.drawn[self.checked :]:
            self.check(drawn)
        self.checked = len(job.drawn)
        return moved

    def _held(self) -> dict[int, int]:
        left = self.job.channel_state
        return {p: at for p, at in enumerate(self.job.at) if p not in left} if left else {}

    def finish(self) -> None:
        """Let everything become visible, and offer checkpoints until there is nothing left to do."""
        while len(self.log.lines) < len(self.lines):
            self.log.lines.append(self.lines[len(self.log.lines)])
            self.log.visible.append(0)
        self.log.visible = [len(line) for line in self.log.lines]
        for _ in range(3 * len(self.checkpoints) + 3):
            self.offer()
            self.job.now_ms += 100
            while self.step(None):
                pass
        if self.has_last_cut:
            assert self.job.at == [len(line) for line in self.log.lines]
            assert self.job.drawn[-1].upstream == self.checkpoints[-1]
            assert not self.job.channel_state

    # -- the second opinion ---------------------------------------------------------------------
    def check(self, drawn: Drawn) -> None:
        for number in range(len(self.log.lines)):
            position = drawn.positions.get((TOPIC, number), 0)
            holds = self._records(number, position)
            wanted, barrier = self._cut(drawn.upstream, number)
            if self.job.settings.mode is AlignmentMode.AT_LEAST_ONCE:
                assert holds[: len(wanted)] == wanted
                continue
            left = drawn.cut.channel_state.get((TOPIC, number)) if drawn.cut is not None else None
            if left is not None:
                assert left[0] == position
                assert left[1] in (None, barrier)
                assert barrier is not None
                holds += self.log.records(number, position, barrier)
            assert holds == wanted, f"{drawn} and partition {number}"
        if drawn.cut is not None and self.job.offer.kind is BarrierKind.SAVEPOINT:
            assert not drawn.cut.channel_state

    def _cut(self, checkpoint: int | None, number: int) -> tuple[list[str], int | None]:
        """Return the records of a partition that an upstream checkpoint holds, and its barrier there."""
        barrier = self._barrier(checkpoint, number)
        if barrier is None:
            return [], None
        assert barrier >= self.job.start.get(number, 0), "a cut that lies in front of the job's beginning"
        return self._records(number, barrier), barrier

    def _barrier(self, checkpoint: int | None, number: int) -> int | None:
        tokens = [token.partition("/")[0] for token in self.written[number]]
        return tokens.index(f"|{checkpoint}") if f"|{checkpoint}" in tokens else None

    def _records(self, number: int, end: int) -> list[str]:
        return self.log.records(number, self.job.start.get(number, 0), end)


def _timeout_ms(mode: AlignmentMode) -> int | None:
    return 50 if mode is AlignmentMode.ALIGNED_WITH_TIMEOUT else None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
def test_every_checkpoint_is_a_cut_and_every_record_comes_once(
    mode: AlignmentMode, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviours 109, 121: order and content."""
    monkeypatch.setattr(cut_plan, "MOST_MICRO_BATCHES", 12)
    drawn = unaligned = 0
    for seed in range(SEEDS):
        world = World(seed, mode, kind)
        for _ in range(60):
            world.move()
        world.finish()
        if mode is not AlignmentMode.AT_LEAST_ONCE and kind is Kind.FIXED:
            assert not world.job.skipped, f"seed {seed}"
        drawn += len({d.upstream for d in world.job.drawn})
        unaligned += sum(bool(d.cut and d.cut.channel_state) for d in world.job.drawn)
    assert drawn > 2 * SEEDS
    if kind is not Kind.TROUBLED:
        assert (unaligned > SEEDS // 3) is (mode in DRAWN_AHEAD)
