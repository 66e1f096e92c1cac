"""What is measured of each checkpoint, and what becomes of it over restarts and crashes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from flinkish_spark.checkpoint.statistics import CheckpointTracker, PendingRecords, UserMetricKeeper
from flinkish_spark.contracts.source import Extent, Source, SourceNode
from flinkish_spark.core.config import CheckpointingMode
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.upstream_cut import (
    CHANNEL_STATE_KEY,
    UPSTREAM_KEY,
    Cut,
    CutPhase,
    slowest_cut,
    upstream_cut,
)
from flinkish_spark.protocol.checkpoint import CheckpointRequest, Participant, ParticipantKind
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, SinkAck, StagedBatch
from flinkish_spark.protocol.statistics import ChannelStatistics, CheckpointDurations, Quantity
from flinkish_spark.protocol.user_metrics import UserMetric, UserMetricKind
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import Fault, MemoryStore, Rig, ack, by_hand

ID, REQUEST = CheckpointId(1), CheckpointRequest(1, CheckpointPurpose.PERIODIC, 1_000)
ASKED = (
    Participant(ParticipantKind.HOOK, "catalog"),
    Participant(ParticipantKind.SINK, "a"),
    Participant(ParticipantKind.OPERATOR, "sum"),
)
CLOCK = ManualClock(1_000)


def tracker_of() -> CheckpointTracker:
    """Return a tracker that the test drives, at the time of `REQUEST`."""
    CLOCK.now_ms = REQUEST.asked_at_ms
    return CheckpointTracker(JobDir(MemoryStore()), CLOCK)


def begin(tracker: CheckpointTracker, after_ms: int = 0) -> None:
    """Let the barrier of checkpoint 1 go out."""
    tracker.on_triggered(ID, REQUEST, ASKED)
    CLOCK.now_ms += after_ms
    tracker.on_offered(ID)


def batch(*acks: SinkAck) -> StagedBatch:
    return StagedBatch(Lineage(0), BatchId(0), OwnerEpoch(1), 1, acks, ())


def decision(*batches: StagedBatch, offsets_text: str = "v1\n{}\n-") -> Decision:
    return Decision(
        ID, Verdict.COMMIT, OwnerEpoch(1), 0, batches=batches, offsets_text=offsets_text, commits_text="v1"
    )


def chained(start_delay_ms: int, alignment_ms: int) -> str:
    """Return an entry of the offset log of a job that was drawn at checkpoint 9 of its upstream."""
    cut = Cut(CheckpointId(9), CutPhase.TAKEN, start_delay_ms, alignment_ms)
    state = {"job": "0" * 32, "cut": cut.to_json()}
    return "v1\n{}\n" + json.dumps({"orders": {"0": 5}, UPSTREAM_KEY: state})


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


def test_one_micro_batch_with_all_barriers_has_no_alignment_that_could_be_measured() -> None:
    """Behaviour 108: what happens inside of it cannot be seen, so it is unknown and not 0."""
    rig = Rig()
    rig.take()
    assert entry(rig, 1).durations.alignment_ms is None
    assert Quantity.ALIGNMENT_MS not in rig.tracker.history.summary()


def test_a_chained_checkpoint_shows_the_alignment_with_its_upstream() -> None:
    """Behaviour 108 where a job is chained to another one."""
    for times_ms, expected in (((30, 40), (30, 40)), ((0, 0), (0, 0))):
        tracker = tracker_of()
        begin(tracker)
        tracker.on_decided(ID)
        tracker.on_confirmed(decision(offsets_text=chained(*times_ms)))
        measured = tracker.history.entries[0].durations
        assert (measured.start_delay_ms, measured.alignment_ms) == expected
        assert tracker.history.summary()[Quantity.ALIGNMENT_MS].maximum == expected[1]


def test_of_several_upstreams_the_slowest_is_shown() -> None:
    slow, quick = chained(5, 90).split("\n")[2], chained(60, 2).split("\n")[2].replace("orders", "returns")
    cut = slowest_cut(f"v1\n{{}}\n{quick}\n{slow}")
    assert cut is not None and (cut.start_delay_ms, cut.alignment_ms) == (5, 90)
    assert slowest_cut("v1\n{}\n-") is None


def test_an_unaligned_cut_is_not_measured_before_its_last_barrier_is_visible() -> None:
    """Behaviour 108: the alignment goes on behind the checkpoint, so 0 would be wrong."""
    offset = json.loads(chained(0, 0).split("\n")[2])
    for end, is_measured in ((8, True), (None, False)):
        text = "v1\n{}\n" + json.dumps(offset | {CHANNEL_STATE_KEY: {"orders": {"1": [4, end]}}})
        [cut] = upstream_cut(text).values()
        assert (cut.channel_state, cut.alignment_ms is not None) == ({("orders", 1): (4, end)}, is_measured)
        assert (slowest_cut(text) is not None) is is_measured


def test_rows_and_barriers_are_counted_by_sink_and_channel() -> None:
    rig = Rig()
    rig.run_batch()
    rig.take(CheckpointPurpose.SAVEPOINT, "/sp")
    statistics = entry(rig, 1)
    assert (statistics.rows, statistics.purpose) == (4, CheckpointPurpose.SAVEPOINT)
    sinks = [p for p in statistics.participants if p.kind is ParticipantKind.SINK]
    assert [(p.uid, p.rows, p.barriers, p.channels) for p in sinks] == [
        ("a", 2, 1, (ChannelStatistics("0", 1, rows=1),)),
        ("b", 2, 1, (ChannelStatistics("0", 1, rows=1),)),
    ]


def test_bytes_that_no_sink_tells_are_unknown() -> None:
    rig = Rig()
    rig.take()
    assert entry(rig, 1).bytes_staged is None
    assert Quantity.BYTES_STAGED not in rig.tracker.history.summary()


def test_everybody_who_was_asked_is_listed_with_the_time_of_the_acknowledgement() -> None:
    tracker, clock = tracker_of(), CLOCK
    begin(tracker, after_ms=20)
    clock.now_ms += 30
    tracker.on_staged(ID, batch(ack("a", 1)), 7)
    tracker.on_acknowledged(ID, ASKED[1:])
    tracker.on_decided(ID)
    tracker.on_confirmed(decision(batch(ack("a", 1))))
    [found] = tracker.history.entries
    assert (found.asked, found.acknowledged) == (3, 3)
    assert [(p.uid, p.kind.value, p.ack_ms, p.rows, p.barriers) for p in found.participants] == [
        ("a", "sink", 50, 1, 1),
        ("catalog", "hook", 20, None, None),
        ("sum", "operator", 50, None, None),
    ]


def test_a_failed_checkpoint_says_whom_it_waited_for() -> None:
    """Behaviour 108, and what a person wants to know of a checkpoint that expired."""
    tracker = tracker_of()
    begin(tracker, after_ms=20)
    tracker.on_staged(ID, batch(ack("a", 1, channels=(0, 2))), 7)
    tracker.on_failed(ID, CheckpointFailureReason.EXPIRED, "not decided within 60 s")
    [found] = tracker.history.entries
    assert (found.asked, found.acknowledged, found.rows, found.durations.sync_ms) == (3, 1, None, 7)
    assert [(p.uid, p.is_acknowledged, p.ack_ms, p.barriers) for p in found.participants] == [
        ("sum", False, None, None),
        ("a", False, None, 2),
        ("catalog", True, 20, None),
    ]
    assert [c.channel for c in found.participants[1].channels] == ["0", "2"]


def test_a_checkpoint_that_was_never_offered_waited_for_its_hooks() -> None:
    tracker = tracker_of()
    tracker.on_triggered(ID, REQUEST, ASKED)
    tracker.on_failed(ID, CheckpointFailureReason.HOOK_FAILED, "the catalog is away")
    [found] = tracker.history.entries
    assert (found.asked, found.acknowledged) == (3, 0)


def test_the_commit_of_each_sink_is_that_of_this_checkpoint() -> None:
    tracker = tracker_of()
    begin(tracker)
    tracker.on_committed("b", 30)  # of a recovery, before this checkpoint
    tracker.on_decided(ID)
    tracker.on_committed("a", 40)
    CLOCK.now_ms += 54
    tracker.on_confirmed(decision(batch(ack("a", 1), ack("b", 1))))
    [found] = tracker.history.entries
    assert {p.uid: p.commit_ms for p in found.participants if p.kind is ParticipantKind.SINK} == {
        "a": 40,
        "b": None,
    }
    assert found.durations.commit_ms == 54


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
    rig.tracker.on_failed(CheckpointId(1), CheckpointFailureReason.DECLINED, "late")
    rig.tracker.on_failed(CheckpointId(99), CheckpointFailureReason.DECLINED, "never heard of")
    assert rig.tracker.history == before
    assert rig.tracker.find_trigger_time_ms(CheckpointId(1)) == 0


def test_the_history_outlives_the_process() -> None:
    """Behaviour 11: and with it the ids that it knows of."""
    rig = Rig()
    rig.take()
    rig.tracker.on_restored(CheckpointId(1), "/sp")
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


def test_an_earlier_start_in_this_process_is_remembered_when_it_is_settled() -> None:
    """Who had acknowledged is known here, and not in another process."""
    tracker = tracker_of()
    begin(tracker)
    tracker.settle()
    assert (tracker.history.entries[0].asked, tracker.history.entries[0].acknowledged) == (3, 1)
    rig = Rig(by_hand(max_concurrent=3))
    rig.threads.held = ("complete",)
    rig.ask()
    rig.run_batch(1)
    rig.tracker.on_refused()
    rig.tracker.store()
    rig.threads.let("complete-1")
    again = CheckpointTracker(rig.job_dir, rig.clock)
    again.settle()
    [found] = again.history.entries
    assert [(p.uid, p.kind.value, p.ack_ms, p.rows) for p in found.participants] == [
        ("a", "sink", None, 1),
        ("b", "sink", None, 1),
    ]
    assert again.history.counts.refused == 1


def test_refusals_are_stored_and_do_not_cost_a_file_each() -> None:
    tracker, clock = tracker_of(), CLOCK
    store = tracker._job_dir.store
    clock.now_ms += 1_000
    tracker.on_refused()
    assert tracker._load().counts.refused == 1
    for _ in range(50):
        tracker.on_refused()
    # As often as somebody may ask: what comes in a row is written with what is stored next.
    assert tracker._load().counts.refused == 1
    tracker.store()
    assert tracker._load().counts.refused == 51
    assert list(store.objects) == ["statistics.json"]


def test_the_savepoint_that_a_job_began_with_is_remembered() -> None:
    tracker = tracker_of()
    tracker.on_restored(CheckpointId(7), "/savepoints/first")
    restored = CheckpointTracker(tracker._job_dir, CLOCK).history.newest_restored
    assert restored is not None and (int(restored.checkpoint), restored.path) == (7, "/savepoints/first")


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


# -- what goes through ----------------------------------------------------------------------------------


class Counted(Source):
    """A source whose position is a number, and that has 50 records in all."""

    def extent(self, position: LoggedOffsets | None) -> Extent | None:
        return Extent(0 if position is None else int(position.sources[0]["at"]), 50)

    def load(self, spark: object, place: object) -> Any:
        raise NotImplementedError


def at(number: int) -> str:
    return f'v1\n{{}}\n{{"at":{number}}}'


def test_totals_go_on_over_checkpoints_and_processes(caplog: pytest.LogCaptureFixture) -> None:
    store, keeper = MemoryStore(), UserMetricKeeper()
    sources = (SourceNode("orders", Counted()),)
    tracker = CheckpointTracker(JobDir(store), CLOCK, sources, keeper)
    CLOCK.now_ms = REQUEST.asked_at_ms
    begin(tracker)
    tracker.on_decided(ID)
    tracker.on_answers("a", [CommitAnswer(Outcome.RETRY), CommitAnswer(Outcome.COMMITTED)])
    tracker.on_answers("a", [CommitAnswer(Outcome.COMMITTED), CommitAnswer(Outcome.ALREADY_COMMITTED)])
    keeper.on_staged({"parse": {"broken": UserMetric(UserMetricKind.COUNTER, 4)}})
    staged = replace(
        batch(ack("a", 1)),
        committables=(Committable("a", {}), Committable("a", {})),
        late_dropped={"windows": 3},
    )
    first = decision(staged, offsets_text=at(20))
    tracker._job_dir.create_decision(first)
    tracker.on_confirmed(first)
    assert tracker.history.totals == {
        "a": {
            "retriedCommittables": 1,
            "successfulCommittables": 2,
            "alreadyCommittedCommittables": 1,
            "numRecordsOut": 1,
            "totalCommittables": 2,
        },
        "windows": {"numLateRecordsDropped": 3},
        "orders": {"position": 20, "numRecordsIn": 20, "pendingRecords": 30},
    }
    # Another process goes on.
    again = UserMetricKeeper()
    tracker = CheckpointTracker(JobDir(store), CLOCK, sources, again)
    again.on_staged({"parse": {"broken": UserMetric(UserMetricKind.COUNTER, 1)}})
    tracker.pending = lambda: PendingRecords({"topic": 7})
    second = replace(decision(batch(ack("a", 1)), offsets_text=at(32)), checkpoint=CheckpointId(2))
    tracker.on_triggered(CheckpointId(2), REQUEST, ASKED)
    tracker._job_dir.create_decision(second)
    tracker.on_decided(CheckpointId(2))
    tracker.on_confirmed(second)
    stored = tracker._job_dir.statistics()
    assert stored is not None
    assert stored.totals["orders"] == {"position": 32, "numRecordsIn": 32, "pendingRecords": 18}
    assert stored.totals["topic"] == {"pendingRecords": 7} and stored.totals["a"]["numRecordsOut"] == 2
    assert stored.user_metrics["parse"]["broken"].count == 5
    # A failure to count is only logged: none may hide here.
    assert not caplog.records


def test_what_is_read_once_more_behind_a_rewind_counts_again() -> None:
    tracker = CheckpointTracker(JobDir(MemoryStore()), CLOCK, (SourceNode("orders", Counted()),))
    for number, upto, wanted in ((1, 20, 20), (2, 30, 30), (3, 25, 45)):
        if number == 3:
            # Back to a position of 10; what lies before it is not read again.
            tracker.on_start_after(decision(offsets_text=at(10)))
        tracker.on_triggered(CheckpointId(number), REQUEST, ASKED)
        tracker.on_decided(CheckpointId(number))
        tracker.on_confirmed(replace(decision(offsets_text=at(upto)), checkpoint=CheckpointId(number)))
        assert tracker.history.totals["orders"]["numRecordsIn"] == wanted
    assert "numRecordsIn" not in _begun_at_a_savepoint().history.totals["orders"]


def _begun_at_a_savepoint() -> CheckpointTracker:
    """Return a tracker of a job that has not read itself what lies in front of its first checkpoint."""
    tracker = CheckpointTracker(JobDir(MemoryStore()), CLOCK, (SourceNode("orders", Counted()),))
    tracker.on_restored(CheckpointId(7), "/savepoints/first")
    begin(tracker)
    tracker.on_decided(ID)
    tracker.on_confirmed(decision(offsets_text=at(20)))
    return tracker


def test_positions_that_cannot_be_read_stop_no_start() -> None:
    tracker = CheckpointTracker(JobDir(MemoryStore()), CLOCK, (SourceNode("orders", Counted()),))
    tracker.on_start_after(decision(offsets_text="v9"))
    assert tracker.history.totals == {}


def test_who_cannot_say_what_was_read_ends_no_checkpoint() -> None:
    tracker = CheckpointTracker(JobDir(MemoryStore()), CLOCK)
    CLOCK.now_ms = REQUEST.asked_at_ms

    def gone() -> PendingRecords:
        raise RuntimeError("Spark is gone")

    tracker.pending = gone
    begin(tracker)
    tracker.on_decided(ID)
    tracker.on_confirmed(decision(batch(ack("a", 1))))
    assert tracker.history.counts.completed == 1 and tracker.history.totals["a"] == {"numRecordsOut": 1}
