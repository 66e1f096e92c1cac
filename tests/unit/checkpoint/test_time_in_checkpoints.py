"""Event time in what a checkpoint stores: decisions, savepoints, seeds; and who asks the keeper when."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

from flinkish_spark.checkpoint.epoch_writer import AdmissionGate, EpochWriter, EpochWriterParts
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.job.recovery import RestoredSavepoint, notify_restored
from flinkish_spark.protocol.event_time import BatchTimes, TimerReport, Valve
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.savepoints import SavepointMetadata, Seed, SeedOrigin
from flinkish_spark.protocol.timer_index import Agenda
from flinkish_spark.protocol.watermarks import EventTime
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import MemoryStore, Rig, ack, context_of

TIMES = EventTime(
    valve=Valve(watermark_ms=60_000),
    processing_time_ms=5,
    carried_ms=59_000,
    agenda=Agenda().update([TimerReport("sums", 3, 70_000, None)]),
)


class Told:
    """A keeper that notes who asks it what."""

    can_end = has_ended = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.times: dict[int, EventTime] = {}
        self.purposes: list[CheckpointPurpose] = []
        #: What is on disk when a micro-batch is noted, and when it is stepped over.
        self.store: MemoryStore | None = None

    def add_times(self, staged: StagedBatch) -> StagedBatch:
        self._note("noted")
        return replace(staged, times=BatchTimes(7))

    def on_staged(self, staged: StagedBatch) -> None:
        assert staged.times == BatchTimes(7)
        self._note("staged")

    def wake(self) -> None:
        self.calls.append("wake")

    def on_offer(self, purpose: CheckpointPurpose) -> None:
        self.purposes.append(purpose)

    def find_event_time(self, batch: BatchId) -> EventTime | None:
        self.calls.append(f"behind {batch}")
        return self.times.get(int(batch))

    def _note(self, what: str) -> None:
        files = () if self.store is None else self.store.list("staged/0")
        self.calls.append(f"{what} {len(files)}")


def test_a_decision_holds_where_time_stood_behind_its_last_micro_batch() -> None:
    told = Told()
    told.times[1] = TIMES
    kept = StagedBatch(
        Lineage(0), BatchId(0), OwnerEpoch(1), 1, (ack("a"), ack("b")), (), times=BatchTimes(7)
    )
    rig = Rig(time=told, kept=[kept])
    rig.tick()
    rig.run_batch(*rig.control.offered)
    decision = rig.job_dir.decision(CheckpointId(1))
    assert decision is not None and decision.times == TIMES
    assert [batch.times for batch in decision.batches] == [None, None], "once is enough"
    rig.take()
    without = rig.job_dir.decision(CheckpointId(2))
    assert without is not None and without.times is None and "times" not in without.to_json()
    assert [call for call in told.calls if call != "wake"] == ["behind 1", "behind 2"]


def test_the_keeper_hears_of_a_barrier_before_any_micro_batch_can_carry_it() -> None:
    """Else a job would be drained without those who have timers and no records."""
    told = Told()
    rig = Rig(time=told)
    seen: list[tuple[int, int]] = []
    offer = rig.control.offer

    def offered(checkpoint: CheckpointId, purpose: CheckpointPurpose) -> None:
        seen.append((int(checkpoint), len(told.purposes)))
        offer(checkpoint, purpose)

    rig.control.offer = offered  # type: ignore[method-assign]
    rig.take()
    rig.take(CheckpointPurpose.DRAINED_SAVEPOINT, "/sp")
    assert seen == [(1, 1), (2, 2)]
    assert told.purposes[1] is CheckpointPurpose.DRAINED_SAVEPOINT


def test_the_keeper_is_woken_with_every_tick() -> None:
    told = Told()
    rig = Rig(time=told)
    before = len(told.calls)
    rig.coordinator.tick()
    assert told.calls[before:] == ["wake"]


def test_a_micro_batch_counts_for_time_when_its_staged_file_is_durable() -> None:
    """A crash before it stages the micro-batch anew; one behind it finds what it said."""
    clock, store, told = ManualClock(1_000), MemoryStore(), Told()
    told.store = store
    job_dir = JobDir(store)
    heard: list[StagedBatch] = []

    class Stage:
        def stage(self, frame: object, batch: BatchId, attempt: int) -> StagedBatch:
            return StagedBatch(Lineage(0), batch, OwnerEpoch(1), attempt, (ack("a"),), ())

    staging: Any = Stage()
    parts = EpochWriterParts(
        staging=staging,
        attempts=itertools.count(),
        gate=AdmissionGate(clock),
        notify=lambda staged, sync_ms: heard.append(staged),
        must_wait=lambda: False,
        time=told,
    )
    writer = EpochWriter(BatchId(0), context_of(job_dir=job_dir, clock=clock), parts)
    writer(None, 0)
    assert told.calls == ["noted 0", "staged 1"]
    assert heard[0].times == BatchTimes(7)
    assert [one.times for one in job_dir.list_staged(Lineage(0)).values()] == [BatchTimes(7)]


def test_a_savepoint_and_a_seed_carry_time() -> None:
    metadata = SavepointMetadata(
        savepoint="a" * 32,
        job="orders",
        job_uuid=JobUuid("b" * 32),
        checkpoint=CheckpointId(4),
        lineage=Lineage(0),
        batch=BatchId(9),
        decided_at_ms=5,
        shuffle_partitions=2,
        operators={},
        sources={},
        chains=(),
    )
    seed = Seed(Lineage(0), SeedOrigin.SAVEPOINT, "a" * 32, CheckpointId(4), 2, ())
    for stored in (metadata, seed):
        assert "times" not in stored.to_json()
        assert type(stored).from_json(json.loads(json.dumps(stored.to_json()))) == stored
        timed = replace(stored, times=TIMES)
        assert type(stored).from_json(json.loads(json.dumps(timed.to_json()))) == timed


def test_a_start_goes_on_from_the_checkpoint_else_from_the_savepoint() -> None:
    rig = Rig(time=(told := Told()))
    told.times[0] = TIMES
    rig.take()
    savepoint = RestoredSavepoint(CheckpointId(9), {}, "/sp", replace(TIMES, processing_time_ms=8))
    newest = rig.job_dir.newest_commit()
    assert newest is not None
    assert notify_restored(rig.job, newest, savepoint) == TIMES
    assert notify_restored(rig.job, None, savepoint) == savepoint.times
    assert notify_restored(rig.job, None, None) is None
