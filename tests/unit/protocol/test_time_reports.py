"""From rows that say something about time to the facts of a micro-batch."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from flinkish_spark.connectors.row_count import RowCount
from flinkish_spark.protocol.event_time import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    AssignerRules,
    BatchTimes,
    BoundedOutOfOrderness,
    NoWatermarkStrategy,
    TimerReport,
)
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Barrier, SinkAck, StagedBatch, TaskAck, TimeReport
from flinkish_spark.protocol.time_plan import (
    Assigner,
    TimePlan,
    drop_reports,
    find_known_channels,
    find_reports,
    has_reports,
    make_reporters,
)
from flinkish_spark.protocol.timer_index import Agenda
from flinkish_spark.protocol.watermarks import EventTime
from flinkish_spark.transport import columns as C

TIMED = AssignerRules(BoundedOutOfOrderness(0))
PLAN = TimePlan(
    make_reporters(["sums", "tops"], ["orders", "clicks"]),
    {"left": ("sums",), "right": ("tops",)},
    {"sums": ("sums",), "tops": ("tops",)},
    {"orders.sums": Assigner("orders", TIMED), "clicks.tops": Assigner("clicks", TIMED, has_channels=False)},
)
SHARED = TimePlan(
    make_reporters(["first", "sums", "tops"], ["orders"]),
    {"left": ("sums",), "right": ("tops",)},
    {"sums": ("first", "sums"), "tops": ("first", "tops")},
)
NONE_MS = MAX_WATERMARK_MS


def acks(*reports: TimeReport, sink: str = "left") -> list[SinkAck]:
    return [SinkAck(sink, (TaskAck(0, 1, 2, reports=reports),))]


def test_reports_are_taken_out_of_a_batch_of_rows() -> None:
    count = RowCount(4)
    rows = pa.record_batch(
        {
            C.KIND: pa.array([0, 1, 17, 2, 0, 16], pa.int32()),
            C.CHECKPOINT: pa.array([0, 8, 61_000, 0, 0, MIN_WATERMARK_MS], pa.int64()),
            C.CHANNEL: pa.array([0, 3, 5, 1, 0, 6], pa.int64()),
            C.HASH: pa.array([10, 0, 40, 7, -3, MAX_WATERMARK_MS], pa.int64()),
            "name": pa.array(["a", None, None, None, "b", None]),
        }
    )
    assert count.admit(rows).column("name").to_pylist() == ["a", "b"]
    found = count.finish()
    assert (found.rows, found.digest, found.barriers) == (2, 7, (Barrier(CheckpointId(8), 3),))
    assert found.reports == (TimeReport(1, 5, 61_000, 40), TimeReport(0, 6, MIN_WATERMARK_MS, NONE_MS))
    assert TaskAck.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_batch_of_calls_alone_holds_no_record() -> None:
    columns = {name: pa.array([2], pa.int64()) for name in C.SINK_CONTROL}
    assert RowCount(0).admit(pa.record_batch(columns)).num_rows == 0


def test_an_ack_without_reports_stores_none() -> None:
    assert "reports" not in TaskAck(0, 1, 2).to_json()


def test_the_greatest_time_of_a_channel_counts() -> None:
    one, other = TimeReport(2, 7, 100, 5), TimeReport(2, 7, 90, 1)
    channels, timers = find_reports(PLAN, acks(one, other))
    assert [(c.assigner, c.channel, c.time_ms) for c in channels] == [("orders.sums", 7, 100)]
    assert timers == ()
    assert find_reports(PLAN, acks(other, one)) == (channels, timers)


def test_a_channel_without_a_watermark_had_records_all_the_same() -> None:
    (channel,), _ = find_reports(PLAN, acks(TimeReport(2, 7, MIN_WATERMARK_MS, 5)))
    assert channel.time_ms is None


def test_channels_that_are_not_known_are_one() -> None:
    channels, _ = find_reports(PLAN, acks(TimeReport(3, 7, 100, 5), TimeReport(3, 8, 90, 5), sink="right"))
    assert [(c.assigner, c.channel, c.time_ms) for c in channels] == [("clicks.tops", 0, 100)]


def test_two_sinks_of_a_chain_report_the_same_timers() -> None:
    one, other = TimeReport(0, 3, 500, NONE_MS), TimeReport(0, 3, NONE_MS, 70)
    _, (timer,) = find_reports(PLAN, [*acks(one), *acks(other)])
    assert (timer.operator, timer.group, timer.event_time_ms, timer.processing_time_ms) == (
        "sums",
        3,
        500,
        70,
    )
    _, (nothing,) = find_reports(PLAN, acks(TimeReport(1, 3, NONE_MS, NONE_MS)))
    assert (nothing.event_time_ms, nothing.processing_time_ms) == (None, None)


def test_an_operator_in_two_chains_has_two_sets_of_timers() -> None:
    """One instance may fire in a micro-batch in which the other is not called."""
    _, timers = find_reports(
        SHARED, [*acks(TimeReport(0, 3, 500, NONE_MS)), *acks(TimeReport(0, 3, 7, 8), sink="right")]
    )
    assert [(t.operator, t.event_time_ms) for t in timers] == [("first.sums", 500), ("first.tops", 7)]
    assert SHARED.number_groups({("first.sums", 3), ("first.tops", 4)}) == {0: frozenset({3, 4})}


def test_timers_follow_an_operator_into_other_chains() -> None:
    alone = EventTime(agenda=Agenda().update([TimerReport("first", 3, 500, None)]))
    there = SHARED.adapt_to_plan(alone)
    assert there.agenda.due(500, 0) == {("first.sums", 3), ("first.tops", 3)}
    assert SHARED.adapt_to_plan(there) == there
    back = replace(SHARED, operators={"sums": ("first", "sums")}).adapt_to_plan(there)
    assert back.agenda.due(500, 0) == {("first", 3)}
    assert TimePlan().adapt_to_plan(there).agenda == Agenda()


def test_a_reporter_that_the_plan_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="reporter 4"):
        find_reports(PLAN, acks(TimeReport(4, 0, 0, 0)))


def test_what_is_stored_goes_by_uid() -> None:
    found = acks(TimeReport(2, 7, 100, 5))
    channels, _ = find_reports(PLAN, found)
    times = BatchTimes(1_000, channels, carried_ms=5)
    staged = StagedBatch(
        Lineage(0), BatchId(3), OwnerEpoch(1), 1, drop_reports(found), (), times=times, began_at_ms=7
    )
    assert has_reports(found) and not has_reports(staged.acks)
    assert StagedBatch.from_json(json.loads(json.dumps(staged.to_json()))) == staged


def test_a_staged_file_without_event_time_is_read() -> None:
    staged = StagedBatch(Lineage(0), BatchId(3), OwnerEpoch(1), 1, (), ())
    assert "times" not in staged.to_json()
    assert StagedBatch.from_json(staged.to_json()).times is None


def test_called_key_groups_go_by_number() -> None:
    places = {("tops", 3), ("sums", 1), ("sums", 0), ("gone", 5)}
    assert PLAN.number_groups(places) == {0: frozenset({0, 1}), 1: frozenset({3})}
    assert (PLAN.number_of("sums"), PLAN.number_of("clicks")) == (0, 3)


def test_channels_matter_only_where_somebody_waits_for_them() -> None:
    assert find_known_channels({1, 2}, Assigner("a", TIMED)) == frozenset({1, 2})
    assert find_known_channels({1, 2}, Assigner("a", TIMED, has_channels=False)) is None
    assert find_known_channels({1, 2}, Assigner("a", AssignerRules(NoWatermarkStrategy()))) is None
    assert find_known_channels(None, Assigner("a", TIMED)) is None
