"""The checkpoint behind which a query ends: when it is asked for, and what its end means."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.job.catch_up import CatchUp
from flinkish_spark.job.job_control import JobControl, LastCheckpoint, QueryEnd
from flinkish_spark.protocol.ids import CheckpointPurpose
from tests.support.null_parts import NoTime


class Time(NoTime):
    """A keeper whose input ends when the test says so."""

    can_end = has_ended = is_due_at_once = False


class Coordinator:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.ended_with: CheckpointPurpose | None = None
        self.asked: list[CheckpointPurpose] = []

    def ask(self, asked) -> None:
        self.asked.append(asked.purpose)


@pytest.fixture
def parts() -> tuple[LastCheckpoint, JobControl, Time, Coordinator]:
    control, time, coordinator = JobControl(lambda target: ""), Time(), Coordinator()
    asked: Any = coordinator
    return LastCheckpoint(control, time, asked, CatchUp(is_wanted=False)), control, time, coordinator


def test_it_is_asked_for_once_whoever_wants_it_first(parts) -> None:
    last, control, time, coordinator = parts
    last.look()
    assert coordinator.asked == []
    time.can_end = True
    threads = [threading.Thread(target=last.look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    control.stop_with_checkpoint()
    last.look()
    assert coordinator.asked == [CheckpointPurpose.FINAL]


def test_a_user_who_stops_a_job_asks_for_it(parts) -> None:
    last, control, _, coordinator = parts
    control.stop_with_checkpoint()
    last.look()
    assert coordinator.asked == [CheckpointPurpose.FINAL]
    coordinator.ended_with = CheckpointPurpose.FINAL
    # Its input goes on, and timers wait; it was told to end all the same.
    assert last.is_confirmed and last.end() is QueryEnd.OVER


def test_a_job_whose_input_is_over_ends_when_nothing_is_left_to_fire(parts) -> None:
    last, _, time, coordinator = parts
    time.can_end = True
    last.look()
    assert not last.is_confirmed
    coordinator.ended_with = CheckpointPurpose.FINAL
    assert last.end() is QueryEnd.NOT_OVER
    time.has_ended = True
    assert last.end() is QueryEnd.OVER


def test_a_savepoint_stops_a_job_wherever_its_input_stands(parts) -> None:
    """Its barrier may have come through before the one of the end, which was asked for, too."""
    last, _, time, coordinator = parts
    time.can_end = True
    last.look()
    coordinator.ended_with = CheckpointPurpose.FINAL_SAVEPOINT
    assert last.is_confirmed and last.end() is QueryEnd.OVER


def test_a_cancelled_job_has_no_last_checkpoint(parts) -> None:
    last, control, time, coordinator = parts
    control.cancel()
    last.look()
    time.can_end = True
    assert coordinator.asked == [] and last.end() is QueryEnd.OVER


def test_a_job_that_has_caught_up_fires_first_what_its_watermark_has_passed(parts) -> None:
    _, control, time, coordinator = parts
    catch_up = CatchUp()
    asked: Any = coordinator
    last = LastCheckpoint(control, time, asked, catch_up)
    last.look()
    assert coordinator.asked == []
    catch_up.is_reached, time.is_due_at_once = True, True
    last.look()
    assert coordinator.asked == []
    time.is_due_at_once = False
    last.look()
    last.look()
    assert coordinator.asked == [CheckpointPurpose.FINAL]
    coordinator.ended_with = CheckpointPurpose.FINAL
    # Its input goes on; the next run reads it.
    assert last.is_confirmed and last.end() is QueryEnd.OVER


def test_an_input_that_makes_timers_due_for_ever_does_not_keep_a_run(parts) -> None:
    """A watermark passes an operator with each micro-batch; then what was due at the end has fired."""
    _, control, time, coordinator = parts
    catch_up = CatchUp(operators=2)
    asked: Any = coordinator
    last = LastCheckpoint(control, time, asked, catch_up)
    catch_up.is_reached, time.is_due_at_once = True, True
    for _ in range(2):
        catch_up.look([], LoggedOffsets(()))
        last.look()
    assert coordinator.asked == []
    catch_up.look([], LoggedOffsets(()))
    last.look()
    assert coordinator.asked == [CheckpointPurpose.FINAL]
