"""What users ask of a running job, from their own thread or from another process."""

from __future__ import annotations

import pytest

from flinkish_spark.checkpoint.answers import CheckpointTriggerRequest
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.job.job_control import JobControl
from flinkish_spark.protocol.checkpoint import CheckpointRequest, Schedule
from flinkish_spark.protocol.ids import CheckpointPurpose as P
from tests.support.coordinator_rig import Rig


@pytest.mark.parametrize("purpose", P)
def test_savepoints_are_forced_and_nothing_else_is(purpose: P) -> None:
    """Behaviours 26, 58: as in Flink."""
    forced = purpose in (P.SAVEPOINT, P.FINAL_SAVEPOINT, P.DRAINED_SAVEPOINT)
    assert CheckpointRequest(1, purpose, 0, "/sp").is_forced is forced


def control_of(rig: Rig) -> JobControl:
    control = JobControl(lambda target: "")
    control.attach(rig.coordinator)
    return control


def ask(control: JobControl, rig: Rig, purpose: P, target: str = "") -> None:
    control.ask(
        CheckpointTriggerRequest(purpose, lambda answer: rig.answers.append(answer.kind.value), target)
    )
    rig.tick()


def test_savepoints_of_a_user_ignore_limit_and_pause_and_checkpoints_wait() -> None:
    """Behaviours 26, 58: asked as a user asks, while one is in flight and the pause runs."""
    rig = Rig(CheckpointConfig(interval_ms=10**9, min_pause_ms=10**8, max_concurrent=1))
    control = control_of(rig)
    rig.threads.held = ("complete",)
    ask(control, rig, P.USER)
    rig.run_batch(1)
    ask(control, rig, P.USER)
    assert rig.control.offered == [1]
    for checkpoint in (2, 3):
        ask(control, rig, P.SAVEPOINT, f"/sp{checkpoint}")
        rig.run_batch(checkpoint)
    assert rig.open == "1:DECIDING 2:LOGGED 3:LOGGED"
    for checkpoint in (1, 2, 3):
        rig.threads.let(f"complete-{checkpoint}")
        rig.tick()
    assert rig.savepoints == [(2, "/sp2"), (3, "/sp3")]
    # Now it is the turn of the one that waited.
    assert rig.control.offered == [1, 2, 3, 4]


def test_a_paused_timer_stays_paused_for_the_next_start_and_requests_are_taken() -> None:
    """Behaviour 12: what it had queued goes; savepoints and checkpoints by hand work."""
    config = CheckpointConfig(interval_ms=100)
    rig = Rig(config)
    control = control_of(rig)
    rig.tick(100)
    assert rig.control.offered == [1]
    # The timer's next request waits behind the barrier of the first.
    rig.tick(100)
    control.schedule(Schedule.OFF)
    rig.tick()
    rig.run_batch(1)
    rig.tick(10_000)
    assert (rig.confirmed, rig.control.offered) == ([1], [1])
    ask(control, rig, P.SAVEPOINT, "/sp")
    rig.run_batch(2)
    assert rig.savepoints == [(2, "/sp")]

    again = Rig(config, store=rig.store)
    control.attach(again.coordinator)
    again.tick(10_000)
    assert again.control.offered == []
    ask(control, again, P.USER)
    again.run_batch(3)
    assert (again.confirmed, again.answers) == ([3], ["COMPLETED"])
    control.schedule(Schedule.ON)
    again.tick(10_000)
    assert again.control.offered == [3, 4]
