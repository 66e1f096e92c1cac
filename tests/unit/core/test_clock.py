"""The wall clock may jump either way: intervals, timeouts and restarts follow the monotonic clock."""

from __future__ import annotations

import pytest

from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.restart import FailureRate, GiveUp, RestartAfter, RestartHistory
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import Rig

YEAR_MS = 365 * 86_400_000


class JumpyClock(ManualClock):
    """Monotonic time moves as told; the wall clock is wherever the test puts it."""

    def __init__(self) -> None:
        super().__init__(1_000_000)
        self.wall = 50 * YEAR_MS

    def wall_ms(self) -> int:
        return self.wall


@pytest.fixture
def rig() -> Rig:
    return Rig(CheckpointConfig(interval_ms=1_000, timeout_ms=5_000), clock=JumpyClock())


@pytest.mark.parametrize("jump_ms", [-YEAR_MS, -1, YEAR_MS])
def test_the_interval_does_not_follow_the_wall_clock(rig, jump_ms) -> None:
    rig.tick(500)
    rig.clock.wall += jump_ms
    rig.tick(499)
    assert rig.open == ""
    rig.tick(1)
    assert rig.open == "1:TRIGGERED"


@pytest.mark.parametrize("jump_ms", [-YEAR_MS, YEAR_MS])
def test_the_timeout_does_not_follow_the_wall_clock(rig, jump_ms) -> None:
    rig.tick(1_000)
    rig.clock.wall += jump_ms
    rig.tick(4_999)
    assert rig.verdict(1) is None
    rig.tick(1)
    assert rig.verdict(1) is Verdict.ABORT


def test_checkpoints_go_on_while_the_wall_clock_runs_backwards(rig) -> None:
    """Behaviour 11: ids rise and all are decided, although each was "decided before" the last."""
    for checkpoint in (1, 2, 3):
        rig.clock.wall -= YEAR_MS
        rig.tick(1_000)
        rig.run_batch(checkpoint)
    assert rig.confirmed == [1, 2, 3]
    decided = [rig.job_dir.decision(CheckpointId(c)) for c in rig.confirmed]
    assert [d.verdict for d in decided] == [Verdict.COMMIT] * 3
    assert decided[2].decided_at_ms < decided[1].decided_at_ms < decided[0].decided_at_ms


def test_a_failure_rate_counts_monotonic_time() -> None:
    history, strategy = RestartHistory(), FailureRate(max_failures=2, interval_ms=60_000)
    for now_ms in (0, 40_000, 80_000):
        history = history.add_failure(now_ms)
        assert isinstance(strategy.decide(history), RestartAfter)
    assert isinstance(strategy.decide(history.add_failure(80_001)), GiveUp)
