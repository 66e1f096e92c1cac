"""What the statistics say of the checkpoints of a real coordinator: who took part, who was missing."""

from __future__ import annotations

from dataclasses import replace

from flinkish_spark.checkpoint.statistics import CheckpointTracker
from flinkish_spark.core.config import CheckpointingMode
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.ids import CheckpointPurpose as P
from flinkish_spark.protocol.records import Committable, StagedBatch
from flinkish_spark.protocol.statistics import CheckpointStatistics
from tests.support.coordinator_rig import RecordedHook, Rig, ack, by_hand


def entry(rig: Rig, checkpoint: int) -> CheckpointStatistics:
    found = rig.tracker.history.find(CheckpointId(checkpoint))
    assert found is not None
    return found


def who(found: CheckpointStatistics) -> list[str]:
    """Return the participants, as words; a plus for those that have acknowledged."""
    return [f"{'+' if p.is_acknowledged else '-'}{p.kind.value} {p.uid}" for p in found.participants]


def test_operators_sinks_and_hooks_are_participants() -> None:
    """Behaviour 108: and each with the time of its acknowledgement."""
    rig = Rig(hooks=(RecordedHook(),))
    rig.threads.held = ("initialise",)
    rig.ask()
    rig.clock.now_ms += 40
    rig.threads.let("initialise-1")
    rig.tick()
    rig.clock.now_ms += 100
    rig.run_batch(1)
    found = entry(rig, 1)
    assert (found.asked, found.acknowledged) == (4, 4)
    assert sorted((p.kind.value, p.uid, p.ack_ms) for p in found.participants) == [
        ("hook", "catalog", 40),
        ("operator", "sum", 140),
        ("sink", "a", 140),
        ("sink", "b", 140),
    ]


def test_a_checkpoint_that_expires_says_who_was_missing() -> None:
    """Behaviour 37 says that it ends; a person wants to know because of whom."""
    rig = Rig(by_hand(mode=CheckpointingMode.AT_LEAST_ONCE, timeout_ms=5_000), hooks=(RecordedHook(),))
    rig.ask()
    rig.run_batch(1, sinks="a")
    rig.tick(5_000)
    found = entry(rig, 1)
    assert found.failure is not None and found.failure.reason.value == "EXPIRED"
    assert who(found) == ["-operator sum", "-sink b", "+hook catalog", "+sink a"]
    assert (found.asked, found.acknowledged) == (4, 2)


def test_barriers_that_do_not_add_up_are_seen_in_the_statistics() -> None:
    rig = Rig()
    rig.ask()
    rig.run_batch(1, sinks="a")
    found = entry(rig, 1)
    assert who(found) == ["-operator sum", "-sink a", "-sink b"]
    assert {p.uid: p.barriers for p in found.participants if p.barriers is not None} == {"a": 1, "b": 0}


def test_staging_bytes_and_commits_of_each_sink_are_measured() -> None:
    rig = Rig()
    rig.ask()
    rig.committers["b"].on_call = lambda call: rig.clock.sleep_ms(70 if call == "commit" else 0)
    acks = (replace(ack("a", 1), sync_ms=30, bytes=400), replace(ack("b", 1), sync_ms=8, bytes=100))
    committables = tuple(Committable(uid, {"batch": 0}) for uid in "ab")
    staged = StagedBatch(Lineage(0), BatchId(0), rig.ownership.epoch, 1, acks, committables)
    rig.job_dir.write_staged(staged)
    rig.coordinator.on_staged(staged, sync_ms=40)
    rig.tick()
    rig.commit_log(0)
    found = entry(rig, 1)
    assert [(p.uid, p.sync_ms, p.bytes, p.commit_ms) for p in found.participants[:2]] == [
        ("a", 30, 400, 0),
        ("b", 8, 100, 70),
    ]
    assert (found.bytes_staged, found.durations.sync_ms) == (500, 40)


def test_the_size_is_unknown_as_soon_as_one_sink_does_not_tell_it() -> None:
    rig = Rig()
    rig.ask()
    acks = (replace(ack("a", 1), bytes=400), ack("b", 1))
    staged = StagedBatch(Lineage(0), BatchId(0), rig.ownership.epoch, 1, acks, ())
    rig.job_dir.write_staged(staged)
    rig.coordinator.on_staged(staged, sync_ms=40)
    rig.tick()
    rig.commit_log(0)
    found = entry(rig, 1)
    assert [(p.uid, p.bytes) for p in found.participants[:2]] == [("a", 400), ("b", None)]
    assert found.bytes_staged is None


def test_whoever_is_refused_when_the_job_ends_is_counted_and_stored() -> None:
    rig = Rig()
    rig.threads.held = ("initialise",)
    rig.ask()
    rig.ask(P.SAVEPOINT, "/sp")
    rig.coordinator.stop()
    rig.coordinator.run()
    assert [answer for answer in rig.answers if "REFUSED" in answer] == ["savepoint=REFUSED:SHUT_DOWN"]
    assert CheckpointTracker(rig.job_dir, rig.clock).history.counts.refused == 1
