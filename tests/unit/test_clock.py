"""The wall clock may jump either way: intervals, timeouts and restarts follow the monotonic clock."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flinkish_spark import CheckpointConfig
from flinkish_spark.coordinator import CheckpointCoordinator, CoordinatorParts
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import Receipt, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.records import Barrier, SinkAck, StagedBatch, TaskAck
from flinkish_spark.protocol.restart import FailureRate, GiveUp, RestartAfter, RestartHistory
from flinkish_spark.protocol.trigger import JobPhase
from flinkish_spark.runtime.blocks import BlockPool
from flinkish_spark.runtime.control_source import ControlFile
from flinkish_spark.runtime.epoch_writer import AdmissionGate
from flinkish_spark.runtime.ownership import take_over
from flinkish_spark.runtime.spark_log import COMMITS, OFFSETS, SparkLog
from flinkish_spark.runtime.steps import SilentObserver
from flinkish_spark.store import LocalStore

YEAR_MS = 365 * 86_400_000


class JumpyClock:
    """Monotonic time moves as told; the wall clock is wherever the test puts it."""

    def __init__(self) -> None:
        self.now_ms, self.wall = 1_000_000, 50 * YEAR_MS

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.wall

    def sleep_ms(self, duration_ms: int) -> None:
        self.now_ms += duration_ms


class Rig:
    """A coordinator with one sink, driven by hand."""

    def __init__(self, root: Path) -> None:
        self.clock, self.job_dir = JumpyClock(), JobDir(LocalStore(root))
        self.ownership = take_over(self.job_dir, self.clock)
        self.log = SparkLog(self.job_dir.store, "spark/1", str(root / "spark" / "1"))
        self.confirmed: list[int] = []
        parts = CoordinatorParts(
            config=CheckpointConfig(interval_ms=1_000, timeout_ms=5_000),
            clock=self.clock,
            job_dir=self.job_dir,
            ownership=self.ownership,
            log=self.log,
            control=ControlFile(root / "control" / "1.json"),
            confirmation=SimpleNamespace(confirm=self._confirm),
            committers={},
            channels={"out": frozenset({0})},
            uids=("out",),
            blocks=BlockPool(),
            gate=AdmissionGate(),
            observer=SilentObserver(),
            on_confirmed=lambda decision, receipt: self.confirmed.append(int(decision.checkpoint)),
        )
        self.coordinator = CheckpointCoordinator(parts, ())
        self.coordinator._phase = JobPhase.RUNNING

    def _confirm(self, decision) -> Receipt:
        return Receipt(decision.checkpoint, self.ownership.epoch, self.clock.wall_ms())

    @property
    def pending(self) -> int | None:
        pending = self.coordinator._pending
        return None if pending is None else int(pending.checkpoint)

    def stage(self, batch: int, checkpoint: int) -> None:
        """Let Spark run and commit the micro-batch that carries the barrier."""
        for log in (OFFSETS, COMMITS):
            self.log.restore(log, BatchId(batch), "v1\n{}")
        ack = SinkAck("out", (TaskAck(0, 0, 0, (Barrier(CheckpointId(checkpoint), 0),)),))
        self.coordinator.on_staged(
            StagedBatch(Lineage(0), BatchId(batch), self.ownership.epoch, batch, (ack,), ())
        )

    def tick_after(self, duration_ms: int) -> None:
        self.clock.now_ms += duration_ms
        self.coordinator.tick()


@pytest.fixture
def rig(tmp_path) -> Rig:
    return Rig(tmp_path / "job")


@pytest.mark.parametrize("jump_ms", [-YEAR_MS, -1, YEAR_MS])
def test_the_interval_does_not_follow_the_wall_clock(rig, jump_ms) -> None:
    rig.tick_after(500)
    rig.clock.wall += jump_ms
    rig.tick_after(499)
    assert rig.pending is None
    rig.tick_after(1)
    assert rig.pending is not None


@pytest.mark.parametrize("jump_ms", [-YEAR_MS, YEAR_MS])
def test_the_timeout_does_not_follow_the_wall_clock(rig, jump_ms) -> None:
    rig.tick_after(1_000)
    first = rig.pending
    rig.clock.wall += jump_ms
    rig.tick_after(4_999)
    assert rig.pending == first
    rig.tick_after(2)
    assert rig.job_dir.decision(CheckpointId(first)).verdict is Verdict.ABORT


def test_checkpoints_go_on_while_the_wall_clock_runs_backwards(rig) -> None:
    """Ids rise and all are decided, although each was "decided before" the last."""
    for batch in range(3):
        rig.clock.wall -= YEAR_MS
        rig.tick_after(1_000)
        rig.stage(batch, rig.pending)
        rig.tick_after(1)
        assert rig.pending is None
    first = rig.confirmed[0]
    assert rig.confirmed == [first, first + 1, first + 2]
    decided = [rig.job_dir.decision(CheckpointId(c)) for c in rig.confirmed]
    assert [d.verdict for d in decided] == [Verdict.COMMIT] * 3
    assert decided[2].decided_at_ms < decided[1].decided_at_ms < decided[0].decided_at_ms


def test_a_failure_rate_counts_monotonic_time() -> None:
    history, strategy = RestartHistory(), FailureRate(max_failures=2, interval_ms=60_000)
    for now_ms in (0, 40_000, 80_000):
        history = history.failed(now_ms)
        assert isinstance(strategy.decide(history), RestartAfter)
    assert isinstance(strategy.decide(history.failed(80_001)), GiveUp)
