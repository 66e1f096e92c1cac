"""What a plan tells the driver about time: who reports, whose timers wait, who must be called."""

from __future__ import annotations

import json

import pytest

from flinkish_spark.protocol.control_offset import ControlOffset
from flinkish_spark.protocol.event_time import MAX_WATERMARK_MS, Watermarks
from flinkish_spark.protocol.records import SinkAck, TaskAck, TimeReport
from flinkish_spark.protocol.time_plan import TimePlan, find_reports, make_reporters
from flinkish_spark.protocol.timer_index import Agenda, NextTimers
from flinkish_spark.protocol.watermarks import AssignerTime, EventTime
from flinkish_spark.savepoints.writer_plan import rename_times, replace_due_timers

#: `first` runs in two chains, so Spark runs it twice.
SHARED = TimePlan(
    make_reporters(["first", "sums", "tops"], ["orders"]),
    {"out": ("sums",), "top": ("tops",)},
    {"sums": ("first", "sums"), "tops": ("first", "tops")},
)
ALONE = TimePlan(make_reporters(["first"], ["orders"]), {"out": ("first",)}, {"first": ("first",)})


def waiting(*places: tuple[str, int]) -> EventTime:
    return EventTime(agenda=Agenda({place: NextTimers(60_000, None) for place in places}))


def test_key_groups_of_operators_that_the_plan_lacks_are_not_called() -> None:
    places = [("sums", 3), ("sums", 5), ("gone", 1)]
    assert SHARED.number_groups(places) == {1: frozenset({3, 5})}


def test_a_report_of_nobody_is_refused() -> None:
    task = TaskAck(0, 5, 0, reports=(TimeReport(7, 0, 61_000, 5),))
    with pytest.raises(ValueError, match="reporter 7 is not one of 4"):
        find_reports(SHARED, [SinkAck("out", (task,))])


def test_timers_wait_on_where_their_operator_is_in_other_chains_now() -> None:
    """In all of them: who is called without need says so, and who is not called never fires."""
    split = SHARED.adapt_to_plan(waiting(("first", 4))).agenda
    assert set(split.groups) == {("first.sums", 4), ("first.tops", 4)}
    united = ALONE.adapt_to_plan(waiting(("first.sums", 4), ("first.tops", 5))).agenda
    assert set(united.groups) == {("first", 4), ("first", 5)}
    assert not ALONE.adapt_to_plan(waiting(("sums", 4))).agenda.groups


def test_where_no_operator_is_named_timers_wait_for_the_watermark_of_the_job() -> None:
    ended = EventTime(
        valve=EventTime().valve, agenda=Agenda({("sums", 1): NextTimers(MAX_WATERMARK_MS, None)})
    )
    assert not ended.is_awaited(ended.carried)
    behind = Watermarks(ended.watermark_ms - 1)
    assert ended.is_awaited(behind)
    assert not EventTime().is_awaited(behind)


def test_an_acknowledgement_says_what_passed_through_its_task() -> None:
    task = TaskAck(0, 5, 0, reports=(TimeReport(1, 0, 61_000, 5),))
    assert TaskAck.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert "reports" not in TaskAck(0, 5, 0).to_json()


def test_an_offset_says_which_micro_batch_is_pinned() -> None:
    offset = ControlOffset(4, pinned_batch=7)
    assert ControlOffset.from_json(json.loads(json.dumps(offset.to_json()))) == offset
    with pytest.raises(ValueError, match="pinned"):
        ControlOffset.from_json({**offset.to_json(), "flinkish:pinned": -1})


def test_a_savepoint_s_timer_at_the_end_of_time_waits_for_the_end_of_the_input() -> None:
    """What a writer of savepoints finds in a state may be due then; a job that began with it forgot it."""
    written = replace_due_timers(None, "first", "first", ["first"], [(3, MAX_WATERMARK_MS, None), (4, 5, 7)])
    assert written is not None
    again = EventTime.from_json(json.loads(json.dumps(written.to_json())))
    agenda = ALONE.adapt_to_plan(again).agenda
    assert agenda.groups == written.agenda.groups
    assert agenda.due(MAX_WATERMARK_MS, 0) == {("first", 3), ("first", 4)}
    assert agenda.due(MAX_WATERMARK_MS - 1, 0) == {("first", 4)}
    times = {("first.sums", 4): NextTimers(9, None), ("first.tops", 4): NextTimers(MAX_WATERMARK_MS, 2)}
    assert ALONE.adapt_to_plan(EventTime(agenda=Agenda(times))).agenda.groups == {
        ("first", 4): NextTimers(9, 2)
    }


def test_another_uid_renames_the_times_of_its_own_chain_only() -> None:
    """Of chains `sums` and `eu.sums` the first was taken for the second, whose source then began anew."""
    own = {name: AssignerTime(known_since_ms=1) for name in ("orders.sums", "orders.eu.sums")}
    names = {"sums": "totals", "eu.sums": "eu.sums"}
    renamed = rename_times(EventTime(assigners=own), "sums", "totals", ["sums", "eu.sums"], names)
    assert renamed is not None
    assert set(renamed.assigners) == {"orders.totals", "orders.eu.sums"}
