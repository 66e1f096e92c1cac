"""The lines over time in the job directory: how often they are written, starts, damage, a failing store."""

from __future__ import annotations

from typing import Any

import pytest

from flinkish_spark.checkpoint.series import SeriesKeeper
from flinkish_spark.checkpoint.statistics import PendingRecords
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.protocol.series import Series, SeriesPoint
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import Fault, MemoryStore, Rig

COUNTS = {
    "orders": {"numRecordsIn": 600, "pendingRecords": 30, "position": 5},
    "users": {"numRecordsIn": 200, "pendingRecords": 10},
    "table": {"numRecordsOut": 40, "numBytesOut": 1},
}


@pytest.fixture
def rig() -> tuple[JobDir, ManualClock, MemoryStore]:
    store = MemoryStore()
    return JobDir(store), ManualClock(900_000), store


def test_a_checkpoint_is_a_point_and_a_slot_costs_one_write(rig: Any) -> None:
    job_dir, clock, store = rig
    keeper = SeriesKeeper(job_dir, clock)
    keeper.store(is_last=True)
    assert not store.objects, "a job without a checkpoint writes nothing"
    for _ in range(3):
        clock.now_ms += 4_000
        keeper.on_confirmed(COUNTS, 25, 3_000)
        keeper.store(is_last=False)
    assert not store.objects
    clock.now_ms += 4_000
    keeper.on_confirmed({}, None, 2_000)
    keeper.store(is_last=False)
    assert list(store.objects) == ["series.json"]
    first, second = job_dir.series().hour
    assert first == SeriesPoint(900_000, 12_000, 2_400, 120, 40, 25, 3_000)
    # Nobody said what was read: that is not 0.
    assert second == SeriesPoint(915_000, 4_000, took_ms=2_000)
    store.objects.clear()
    keeper.store(is_last=True)
    assert not store.objects, "nothing has changed since"


def test_a_start_goes_on_from_what_was_kept_and_counts_no_time_that_was_down(rig: Any) -> None:
    job_dir, clock, _ = rig
    keeper = SeriesKeeper(job_dir, clock)
    clock.now_ms += 10_000
    keeper.on_confirmed(COUNTS, 25, 3_000)
    keeper.store(is_last=True)
    clock.now_ms += 600_000
    again = SeriesKeeper(job_dir, clock)
    clock.now_ms += 20_000
    again.on_start()
    clock.now_ms += 2_000
    again.on_confirmed(COUNTS, 25, 3_000)
    again.store(is_last=True)
    before, behind = job_dir.series().hour
    assert (before.span_ms, before.starts) == (10_000, 0)
    assert (behind.at_ms, behind.span_ms, behind.starts) == (1_530_000, 2_000, 1)


@pytest.mark.parametrize("torn", [b"torn", b""])
def test_damaged_lines_begin_anew(rig: Any, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    job_dir, clock, store = rig
    store.objects["series.json"] = torn
    keeper = SeriesKeeper(job_dir, clock)
    assert "begin anew" in caplog.text
    keeper.on_start()
    keeper.store(is_last=True)
    assert job_dir.series() == Series().add(SeriesPoint(900_000, starts=1))


def test_a_store_that_fails_is_logged_and_tried_again(rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    job_dir, clock, store = rig
    keeper = SeriesKeeper(job_dir, clock)
    keeper.on_start()
    store.faults = [("series.json", Fault.REFUSED)]
    keeper.store(is_last=True)
    assert "the lines over time are not stored" in caplog.text
    keeper.store(is_last=False)
    assert not store.objects, "not before the next slot"
    clock.now_ms += 15_000
    keeper.store(is_last=False)
    assert list(store.objects) == ["series.json"]


def test_a_job_keeps_its_checkpoints_as_lines() -> None:
    rig = Rig()
    rig.tracker.pending = lambda: PendingRecords(worst_partition=9)
    rig.take()
    rig.tracker.store(is_last=True)
    (point,) = rig.job_dir.series().hour
    assert (point.worst_lag, point.starts) == (9, 0) and point.took_ms is not None
    # Where the statistics cannot be stored, the lines are not tried either.
    del rig.store.objects["series.json"]
    rig.take()
    rig.store.faults = [("statistics.json", Fault.REFUSED)]
    rig.tracker.store(is_last=True)
    assert "series.json" not in rig.store.objects
