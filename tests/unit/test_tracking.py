"""What is measured of each checkpoint, and what becomes of it over restarts and crashes."""

from __future__ import annotations

from flinkish_spark.config import CheckpointingMode
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.protocol.statistics import CheckpointDurations
from flinkish_spark.runtime.tracking import CheckpointTracker
from tests.coordinator_rig import Fault, Rig, by_hand


def entry(rig: Rig, checkpoint: int):
    found = rig.tracker.history.find(CheckpointId(checkpoint))
    assert found is not None
    return found


def test_each_phase_is_measured() -> None:
    """Behaviour 108 where a checkpoint of a whole job is concerned."""
    rig = Rig(by_hand(mode=CheckpointingMode.AT_LEAST_ONCE))
    rig.threads.held = ("initialise", "complete")
    rig.ask()
    rig.clock.now_ms += 5
    rig.threads.let("initialise-1")
    rig.tick(30)
    rig.run_batch(1, sinks="a")
    rig.clock.now_ms += 11
    rig.run_batch(1, sinks="b")
    rig.committers["b"].on_call = lambda call: rig.clock.sleep_ms(100 if call == "commit" else 1)
    rig.clock.now_ms += 60
    rig.threads.let("complete-1")
    rig.tick()
    # The thread said "ready" at once; the coordinator heard of it 30 ms later.
    assert entry(rig, 1).durations == CheckpointDurations(
        trigger_ms=35, alignment_ms=11, sync_ms=7, async_ms=61, commit_ms=101, end_to_end_ms=208
    )


def test_rows_and_barriers_are_counted_by_sink_and_channel() -> None:
    rig = Rig()
    rig.run_batch()
    rig.take(CheckpointPurpose.SAVEPOINT, "/sp")
    statistics = entry(rig, 1)
    assert (statistics.rows, statistics.purpose) == (4, CheckpointPurpose.SAVEPOINT)
    seen = [(p.uid, p.rows, [(c.channel, c.barriers) for c in p.channels]) for p in statistics.participants]
    assert seen == [
        ("a", 2, [("0", 1)]),
        ("b", 2, [("0", 1)]),
    ]


def test_a_failure_keeps_its_reason_and_what_was_measured() -> None:
    rig = Rig(by_hand(timeout_ms=1_000))
    rig.ask()
    rig.tick(1_000)
    failed = entry(rig, 1)
    assert failed.failure is not None
    assert (failed.failure.reason.value, failed.durations.end_to_end_ms) == ("EXPIRED", 1_000)
    assert failed.durations.commit_ms is None


def test_what_is_unknown_is_left_alone() -> None:
    rig = Rig()
    rig.take()
    before = rig.tracker.history
    rig.tracker.failed(CheckpointId(1), CheckpointFailureReason.DECLINED, "late")
    rig.tracker.failed(CheckpointId(99), CheckpointFailureReason.DECLINED, "never heard of")
    assert rig.tracker.history == before
    assert rig.tracker.triggered_at_ms(CheckpointId(1)) == 0


def test_the_history_outlives_the_process() -> None:
    """Behaviour 11: and with it the ids that it knows of."""
    rig = Rig()
    rig.take()
    rig.tracker.restored(CheckpointId(1), "/sp")
    again = CheckpointTracker(rig.job_dir, rig.clock)
    assert (again.history, again.highest) == (rig.tracker.history, CheckpointId(1))
    assert again.history.newest_restored is not None
    assert CheckpointTracker(Rig().job_dir, rig.clock).highest == CheckpointId(0)


def test_what_an_earlier_start_left_is_settled_by_what_was_decided() -> None:
    """Behaviours 44, 57: the recovery has confirmed what was decided and sealed the rest."""
    rig = Rig(by_hand(max_concurrent=3))
    rig.threads.held = ("complete",)
    rig.ask()
    rig.run_batch(1)
    rig.ask()
    rig.run_batch(2)
    # Its process is killed right behind the decision of 1.
    decided = rig.job_dir.decision
    rig.threads.let("complete-1")
    assert decided(CheckpointId(1)).verdict is Verdict.COMMIT
    rig.tracker.settle()
    assert rig.statistics == ["1:COMPLETED", "2:FAILED:TASK_FAILED"]
    assert (entry(rig, 1).rows, entry(rig, 1).durations) == (2, CheckpointDurations())


def test_statistics_that_cannot_be_written_decide_nothing(caplog) -> None:
    rig = Rig()
    rig.store.faults = [("statistics.json", Fault.REFUSED)]
    rig.take()
    assert rig.answers == ["user=COMPLETED"]
    assert "the statistics are not stored" in caplog.text


def test_statistics_that_cannot_be_read_begin_anew(caplog) -> None:
    rig = Rig()
    rig.take()
    rig.store.objects["statistics.json"] = b"torn"
    assert CheckpointTracker(rig.job_dir, rig.clock).history.entries == ()
    assert "the statistics begin anew" in caplog.text
