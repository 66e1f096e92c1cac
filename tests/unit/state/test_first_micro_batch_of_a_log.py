"""What operators are told to have seen in the first micro-batch of a log that begins with stored state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flinkish_spark import KeyedProcessFunction
from flinkish_spark.core.elements import TimeDomain, Timer
from flinkish_spark.operators.process import GroupRun, KeyedProcessOperator
from flinkish_spark.protocol.control_offset import ControlOffset, TimeOffer
from flinkish_spark.protocol.event_time import MIN_WATERMARK_MS, Watermarks
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.watermarks import EventTime
from flinkish_spark.state.timers import TimerQueue
from tests.unit.checkpoint.test_operator_watermarks_kept import OPERATORS, Query, plan, record


class WhatTimeIsIt(KeyedProcessFunction):
    def process_element(self, value, ctx):
        return ()

    def on_timer(self, time_ms, ctx):
        yield ctx.time_domain(), ctx.timer_service().current_watermark()


@pytest.fixture
def query(tmp_path: Path) -> Query:
    """A job whose last micro-batch carried 49_999 and 3_999, and has shown 59_999 and 4_999."""
    one = Query(tmp_path, plan())
    one.run(record("left", 50_000), record("right", 4_000))
    one.control.offer_time(TimeOffer.of(one.keeper.find_event_time(BatchId(0)).watermarks))  # type: ignore[union-attr]
    one.run(record("left", 60_000), record("right", 5_000))
    assert one.seen == [49_999, 3_999]
    return one


def begin_again(query: Query) -> None:
    """Start with a new log from what was stored, as a savepoint's job does."""
    stored = query.keeper.find_event_time(BatchId(1))
    assert stored is not None
    query.stored = EventTime.from_json(json.loads(json.dumps(stored.to_json())))
    query.next, query.controls = 0, [{"flinkish:checkpoint": 0}] * 2
    query.start()


def progress(query: Query, number: int) -> list[tuple[int, int]]:
    found = [query.micro_batch(number).progress(uid) for uid in OPERATORS]
    return [(one.watermark_before_ms, one.watermark_ms) for one in found]


def test_an_operator_goes_on_from_the_watermark_that_its_state_has_seen(query: Query) -> None:
    before = progress(query, 1)
    begin_again(query)
    query.run(record("left", 70_000))
    assert before == [(MIN_WATERMARK_MS, 49_999), (MIN_WATERMARK_MS, 3_999)]
    assert progress(query, 0) == [(49_999, 59_999), (3_999, 4_999)]
    query.run()
    assert progress(query, 1) == [(59_999, 59_999), (4_999, 4_999)]
    assert not query.is_wanted


def test_a_processing_time_timer_of_that_micro_batch_sees_it(query: Query) -> None:
    begin_again(query)
    query.run()
    run = GroupRun(KeyedProcessOperator(WhatTimeIsIt()), "left", 16)
    queues = {clock: TimerQueue() for clock in TimeDomain}
    for clock in TimeDomain:
        queues[clock].register(Timer(500, "ann", None))
    run.timers.queues = queues
    rows = run.run([], query.micro_batch(0).progress("left"), []).rows
    assert rows == [(TimeDomain.PROCESSING_TIME, 49_999), (TimeDomain.EVENT_TIME, 59_999)]


def test_it_is_the_same_if_the_start_is_cut_off_before_that_micro_batch(query: Query) -> None:
    begin_again(query)
    query.start()
    query.run()
    assert progress(query, 0) == [(49_999, 59_999), (3_999, 4_999)]


def test_nothing_is_said_where_nothing_was_seen(tmp_path: Path) -> None:
    one = Query(tmp_path, plan())
    one.run(record("left", 50_000))
    one.run()
    assert all("flinkish:seen" not in control for control in one.controls)
    assert progress(one, 0) == [(MIN_WATERMARK_MS, MIN_WATERMARK_MS)] * 2


def test_what_was_seen_comes_back_from_a_log(query: Query) -> None:
    seen = Watermarks.of({"left": 7, "right": 3})
    told = ControlOffset(2, TimeOffer(9, seen=seen))
    assert told.to_json()["flinkish:seen"] == [3, {"left": 7}]
    assert ControlOffset.from_json(json.loads(json.dumps(told.to_json()))) == told
    assert told.merge_max(ControlOffset(3, TimeOffer(11))).time == TimeOffer(11, seen=seen)
    with pytest.raises(ValueError, match="must be a list of 2 values"):
        ControlOffset.from_json({"flinkish:checkpoint": 1, "flinkish:seen": [3]})
