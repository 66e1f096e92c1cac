"""Chained sources over logs of chance: every checkpoint is a cut, nothing is lost, nothing comes twice.

The log is what an upstream job leaves; what a checkpoint must hold is read off the log itself, so
this is a second opinion about the planner. Partitions become visible at paces of their own, are
added, and are found late; the planner's process is restarted, and the job goes back to checkpoints.
"""

from __future__ import annotations

import random

import pytest

from flinkish_spark.chaining import cut_plan
from flinkish_spark.protocol.gate_values import AlignmentMode, BarrierKind
from tests.chained_log import TOPIC, Chained, Drawn, Log

MODES = list(AlignmentMode)


class World:
    """An upstream job's topic and a chained job, moved by chance.

    Parameters
    ----------
    seed
        Of everything.
    grows
        Whether partitions are added.
    """

    def __init__(self, seed: int, mode: AlignmentMode, grows: bool) -> None:
        self.chance = random.Random(seed)
        self.lines: list[list[str]] = []
        self.checkpoints: list[int] = []
        self._write(grows)
        first = self._partitions_at_first
        self.log = Log(self.lines[:first], [0] * first)
        timeout_ms = 50 if mode is AlignmentMode.ALIGNED_WITH_TIMEOUT else None
        self.mode = mode
        self.job = Chained(self.log, mode, timeout_ms)
        self.offered = 0
        self.checked = 0

    def _write(self, grows: bool) -> None:
        chance, checkpoint = self.chance, 0
        self.lines = [[] for _ in range(chance.randint(1, 3))]
        self._partitions_at_first = len(self.lines)
        for _ in range(chance.randint(3, 8)):
            if grows and chance.random() < 0.3:
                self.lines.append([])
            checkpoint += chance.choice((1, 1, 2))
            for number, line in enumerate(self.lines):
                for _ in range(chance.choice((0, 1, 3, 12))):
                    line.append("." if chance.random() < 0.2 else f"{number}.{len(line)}")
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
        if chance.random() < 0.05:
            job.restart()
        if chance.random() < 0.05 and job.drawn:
            job.restore(job.drawn[-1])
        self.step(chance.choice((None, 1, 2, 5)))

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
            assert job.delivered[number] == self.log.records(number, 0, position)
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
        assert self.job.at == [len(line) for line in self.log.lines]
        assert self.job.drawn[-1].upstream == self.checkpoints[-1]
        assert not self.job.channel_state

    # -- the second opinion ---------------------------------------------------------------------
    def check(self, drawn: Drawn) -> None:
        for number in range(len(self.log.lines)):
            position = drawn.positions.get((TOPIC, number), 0)
            holds = self.log.records(number, 0, position)
            wanted, barrier = self._cut(drawn.upstream, number)
            if self.mode is AlignmentMode.AT_LEAST_ONCE:
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
        tokens = [token.partition("/")[0] for token in self.lines[number]]
        if f"|{checkpoint}" not in tokens:
            return [], None
        barrier = tokens.index(f"|{checkpoint}")
        return self.log.records(number, 0, barrier), barrier


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grows", [False, True], ids=["fixed", "growing"])
def test_every_checkpoint_is_a_cut_and_every_record_comes_once(
    mode: AlignmentMode, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviours 109, 121: order and content."""
    monkeypatch.setattr(cut_plan, "MOST_MICRO_BATCHES", 12)
    drawn = unaligned = 0
    for seed in range(50):
        world = World(seed, mode, grows)
        for _ in range(60):
            world.move()
        world.finish()
        if mode is not AlignmentMode.AT_LEAST_ONCE and not grows:
            assert not world.job.skipped, f"seed {seed}"
        drawn += len({d.upstream for d in world.job.drawn})
        unaligned += sum(bool(d.cut and d.cut.channel_state) for d in world.job.drawn)
    assert drawn > 100
    takes_early = mode in (AlignmentMode.UNALIGNED, AlignmentMode.ALIGNED_WITH_TIMEOUT)
    assert (unaligned > 20) is takes_early
