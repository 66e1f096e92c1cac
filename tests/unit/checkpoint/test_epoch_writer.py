"""What stands between Spark's micro-batch and its staged file: the gate, the owner, the order of steps."""

from __future__ import annotations

import itertools
import traceback

import pytest

from flinkish_spark.checkpoint.commit import JobInterruptedError
from flinkish_spark.checkpoint.epoch_writer import AdmissionGate, EpochWriter, EpochWriterParts
from flinkish_spark.checkpoint.ownership import take_over
from flinkish_spark.core.errors import FencedError, InternalError, StoreError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Barrier, SinkAck, StagedBatch, TaskAck
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import Fault, MemoryStore, StepLog, ack, context_of
from tests.support.null_parts import NO_TIME


class Writing:
    """An epoch writer whose sinks stage nothing; `barriers` are in the next micro-batch."""

    def __init__(self, first_batch: int = 3) -> None:
        self.clock, self.store, self.observer = ManualClock(1_000), MemoryStore(), StepLog()
        self.job_dir, self.gate = JobDir(self.store), AdmissionGate(self.clock)
        self.ownership = take_over(self.job_dir, self.clock)
        self.barriers: tuple[int, ...] = ()
        self.noted: list[tuple[int, int, list[str]]] = []
        self.held_back = False
        self.writer = EpochWriter(
            BatchId(first_batch),
            context_of(
                job_dir=self.job_dir, ownership=self.ownership, clock=self.clock, observer=self.observer
            ),
            EpochWriterParts(
                staging=self,
                attempts=itertools.count(7),
                gate=self.gate,
                notify=self._note,
                must_wait=lambda: self.held_back,
                time=NO_TIME,
            ),
        )

    def stage(self, frame: object, batch: BatchId, attempt: int) -> StagedBatch:
        self.clock.now_ms += 40
        acks = (ack("a", *self.barriers),)
        return StagedBatch(Lineage(0), batch, OwnerEpoch(1), attempt, acks, ())

    def _note(self, staged: StagedBatch, sync_ms: int) -> None:
        self.noted.append((int(staged.batch), sync_ms, list(self.store.list("staged/0"))))


def waits(gate: AdmissionGate, clock: ManualClock, held_back: bool = False) -> bool:
    """Whether a micro-batch is kept outside; the gate is of no use afterwards."""

    def give_up(event: object, timeout_ms: int) -> bool:
        gate.stop()
        return True

    clock.wait = give_up  # type: ignore[method-assign]
    try:
        gate.enter(lambda: held_back)
    except JobInterruptedError:
        return True
    return False


def test_the_staged_file_is_durable_before_anybody_hears_of_it() -> None:
    writing = Writing()
    writing.writer(None, 3)
    assert writing.noted == [(3, 40, ["staged/0/3-1.7.json"])]
    assert writing.observer.steps == ["-staged-file:3", "+staged-file:3", "-spark-commit:3"]
    writing.writer(None, 4)
    assert [batch for batch, _, _ in writing.noted] == [3, 4]
    assert writing.writer.failure is None


@pytest.mark.parametrize("batch", [2, 4])
def test_a_micro_batch_out_of_turn_is_a_broken_rule(batch) -> None:
    writing = Writing()
    with pytest.raises(InternalError, match=f"runs micro-batch {batch}, expected is 3") as caught:
        writing.writer(None, batch)
    assert (writing.writer.failure, writing.noted) == (caught.value, [])


def test_a_failed_micro_batch_is_expected_again() -> None:
    writing = Writing()
    writing.store.faults = [("staged/0/3-1.7.json", Fault.REFUSED)]
    with pytest.raises(StoreError):
        writing.writer(None, 3)
    writing.writer(None, 3)
    assert writing.noted == [(3, 40, ["staged/0/3-1.8.json"])]


def test_who_was_fenced_stages_nothing() -> None:
    writing = Writing()
    take_over(writing.job_dir, writing.clock)
    with pytest.raises(FencedError):
        writing.writer(None, 3)
    assert writing.store.list("staged/0") == ()


def test_the_gate_closes_behind_the_last_barrier_before_the_next_micro_batch_can_come() -> None:
    """Behaviour 61."""
    writing = Writing()
    writing.gate.close_after(CheckpointId(9))
    writing.barriers = (8,)
    writing.writer(None, 3)
    writing.barriers = (9,)
    writing.writer(None, 4)
    assert waits(writing.gate, writing.clock)


def test_the_gate_opens_again_when_the_last_checkpoint_was_aborted() -> None:
    """Behaviour 61."""
    clock = ManualClock()
    gate = AdmissionGate(clock)
    shown = SinkAck("out", (TaskAck(0, 0, 0, (Barrier(CheckpointId(9), 0),)),))
    last = StagedBatch(Lineage(0), BatchId(1), OwnerEpoch(1), 1, (shown,), ())
    gate.close_after(CheckpointId(9))
    gate.on_staged(last)
    gate.reopen()
    # A barrier of the aborted one that comes late closes nothing.
    gate.on_staged(last)
    assert not waits(gate, clock)


def test_a_long_backlog_holds_micro_batches_back_until_it_is_shorter() -> None:
    clock = ManualClock()
    gate = AdmissionGate(clock)
    answers = iter([True, True, False])
    gate.enter(lambda: next(answers))
    assert clock.now_ms == 40
    assert waits(gate, clock, held_back=True)


def test_a_stopping_job_turns_micro_batches_away() -> None:
    """Behaviour 13."""
    writing = Writing()
    writing.gate.stop()
    with pytest.raises(JobInterruptedError):
        writing.writer(None, 3)
    assert isinstance(writing.writer.failure, JobInterruptedError)
    assert writing.noted == []


def test_spark_hears_only_that_the_job_stops_of_what_a_stop_interrupts(monkeypatch) -> None:
    """The JVM's trace in it would overflow the stack of the thread of the query."""
    writing, interrupted = Writing(), RuntimeError("An error occurred while calling o7.save")

    def stage(*_: object) -> StagedBatch:
        writing.gate.stop()
        raise interrupted

    monkeypatch.setattr(writing, "stage", stage)
    with pytest.raises(JobInterruptedError) as caught:
        writing.writer(None, 3)
    assert "o7.save" not in "".join(traceback.format_exception(caught.value))
    assert writing.writer.failure is interrupted
