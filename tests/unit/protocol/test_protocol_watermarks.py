"""From what micro-batches report to the watermark of the next one."""

from __future__ import annotations

import pytest

from flinkish_spark.core import elements
from flinkish_spark.protocol.event_time import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    Alignment,
    AssignerInput,
    AssignerRules,
    BatchTimes,
    BoundedOutOfOrderness,
    ChannelReport,
    NoWatermarks,
    NoWatermarkStrategy,
    ReportedWatermarks,
    TimerReport,
)
from flinkish_spark.protocol.timer_index import Agenda
from flinkish_spark.protocol.watermarks import (
    EventTime,
    Rules,
    find_channels_to_hold,
    next_micro_batch_ms,
    step,
)

BOUNDED = BoundedOutOfOrderness(1_000)


class Job:
    """A job whose micro-batches are given as {(assigner, channel): time}."""

    def __init__(self, state: EventTime | None = None, **rules: AssignerRules) -> None:
        self.rules: Rules = rules
        self.state = EventTime() if state is None else state

    def batch(
        self,
        now_ms: int,
        times: dict[tuple[str, int], int | None] | None = None,
        *inputs: AssignerInput,
        timers: tuple[TimerReport, ...] = (),
    ) -> int:
        reports = tuple(ChannelReport(*place, time_ms) for place, time_ms in (times or {}).items())
        batch = BatchTimes(now_ms, reports, inputs, timers, carried_ms=self.state.watermark_ms)
        self.state = step(self.rules, self.state, batch)
        return self.state.watermark_ms

    @property
    def held_back(self) -> set[tuple[str, int]]:
        return set(find_channels_to_hold(self.rules, self.state))

    @property
    def next_ms(self) -> int | None:
        return next_micro_batch_ms(self.rules, self.state)


def job(generation=BOUNDED, idleness_ms=None, alignment=None) -> Job:
    return Job(a=AssignerRules(generation, idleness_ms, alignment))


def channels(*numbers: int, has_ended: bool = False) -> AssignerInput:
    return AssignerInput("a", frozenset(numbers), has_ended)


# -- generation ---------------------------------------------------------------------------------------


def test_bounded_out_of_orderness_stays_behind_the_greatest_time() -> None:
    one = job()
    assert one.state.watermark_ms == MIN_WATERMARK_MS
    assert one.batch(0, {("a", 0): 5_000}) == 3_999
    assert one.batch(1, {("a", 0): 4_000}) == 3_999
    assert one.batch(2, {("a", 0): 7_000}) == 5_999
    assert one.batch(3) == 5_999


def test_monotonous_times_are_the_bound_0_and_equal_ones_are_on_time() -> None:
    assert job(BoundedOutOfOrderness(0)).batch(0, {("a", 0): 5_000}) == 4_999


def test_a_generator_s_watermarks_are_taken_as_they_are() -> None:
    one = job(ReportedWatermarks())
    assert one.batch(0, {("a", 0): None}) == MIN_WATERMARK_MS
    assert one.batch(1, {("a", 0): 5_000}) == 5_000
    assert one.batch(2, {("a", 0): 4_000}) == 5_000


def test_without_watermarks_event_time_stands_still_until_the_channel_is_idle() -> None:
    rules = {"a": AssignerRules(NoWatermarks(), idleness_ms=10), "b": AssignerRules(BOUNDED)}
    both = Job(**rules)
    assert both.batch(0, {("a", 0): 5_000, ("b", 0): 5_000}) == MIN_WATERMARK_MS
    assert both.batch(10) == 3_999


def test_nobody_waits_for_a_source_without_a_strategy() -> None:
    both = Job(a=AssignerRules(NoWatermarkStrategy()), b=AssignerRules(BOUNDED))
    assert both.batch(0, {("b", 0): 5_000}) == 3_999
    assert both.batch(1, {("a", 0): 9, ("b", 0): 6_000}) == 4_999
    assert job(NoWatermarkStrategy()).batch(0, {("a", 0): 9}) == MIN_WATERMARK_MS


def test_the_earliest_times_do_not_leave_64_bits() -> None:
    assert job().batch(0, {("a", 0): MIN_WATERMARK_MS}) == MIN_WATERMARK_MS


def test_the_greatest_of_several_reports_counts() -> None:
    reports = [ChannelReport("a", 0, time_ms) for time_ms in (None, 7_000, 9_000, 8_000, None)]
    assert step(job().rules, EventTime(), BatchTimes(0, tuple(reports))).watermark_ms == 7_999


def test_reports_of_what_the_job_no_longer_has_are_left_out() -> None:
    assert job().batch(0, {("a", 0): 5_000, ("gone", 0): 1}, AssignerInput("gone")) == 3_999


# -- channels and assigners ---------------------------------------------------------------------------


def test_the_slowest_channel_of_the_slowest_assigner_counts() -> None:
    both = Job(a=AssignerRules(BOUNDED), b=AssignerRules(BoundedOutOfOrderness(0)))
    assert both.batch(0, {("a", 0): 5_000, ("a", 1): 9_000}) == MIN_WATERMARK_MS
    assert both.batch(1, {("b", 3): 3_000}) == 2_999
    assert both.batch(2, {("b", 3): 30_000}) == 3_999
    assert both.batch(3, {("a", 0): 20_000}) == 7_999


def test_a_channel_that_is_known_and_has_brought_nothing_holds_the_watermark_back() -> None:
    one = job()
    assert one.batch(0, {("a", 0): 5_000}, channels(0, 1)) == MIN_WATERMARK_MS
    assert one.batch(1, {("a", 1): 4_000}) == 2_999


@pytest.mark.parametrize(("a_ms", "b_ms"), [(60, 61), (61, 60)])
def test_all_idle_is_all_idle_whichever_channel_is_the_last(a_ms: int, b_ms: int) -> None:
    """FLINK-40475: it stood at 10 for ever where the last one to become idle had not caught up."""
    one = job(BoundedOutOfOrderness(0), idleness_ms=60)
    assert one.batch(0, {("a", 0): 11, ("a", 1): 6, ("a", 2): 31}) == 5
    # Channels 1 and 2 are idle; then the first of them comes back, and is behind.
    assert one.batch(60, {("a", 0): 11}) == 10
    for now_ms, place, time_ms in sorted([(a_ms, 0, 11), (b_ms, 1, 7)]):
        assert one.batch(now_ms, {("a", place): time_ms}) == 10
    assert one.batch(120) in (10, 30)
    assert one.batch(121) == 30


@pytest.mark.parametrize(("a_ms", "b_ms"), [(60, 61), (61, 60)])
def test_all_idle_is_all_idle_over_sources_too(a_ms: int, b_ms: int) -> None:
    rules = AssignerRules(BoundedOutOfOrderness(0), idleness_ms=60)
    three = Job(a=rules, b=rules, c=rules)
    assert three.batch(0, {("a", 0): 11, ("b", 0): 6, ("c", 0): 31}) == 5
    assert three.batch(60, {("a", 0): 11}) == 10
    for now_ms, place, time_ms in sorted([(a_ms, "a", 11), (b_ms, "b", 7)]):
        assert three.batch(now_ms, {(place, 0): time_ms}) == 10
    assert three.batch(120) in (10, 30)
    assert three.batch(121) == 30


def test_a_partition_that_is_added_holds_the_watermark_where_it_is() -> None:
    one = job(idleness_ms=100)
    assert one.batch(0, {("a", 0): 5_000}, channels(0)) == 3_999
    assert one.batch(50, {("a", 0): 6_000}, channels(0, 1)) == 3_999
    assert one.batch(149, {("a", 0): 7_000}) == 3_999
    assert one.batch(150, {("a", 0): 7_000}) == 5_999


def test_a_partition_that_is_gone_is_not_waited_for() -> None:
    one = job()
    assert one.batch(0, {("a", 0): 5_000, ("a", 1): 9_000}, channels(0, 1)) == 3_999
    assert one.batch(1, {}, channels(1)) == 7_999


def test_a_source_without_channels_is_waited_for_until_it_is_idle() -> None:
    both = Job(a=AssignerRules(BOUNDED, idleness_ms=10), b=AssignerRules(BOUNDED))
    assert both.batch(0, {("b", 0): 5_000}) == MIN_WATERMARK_MS
    assert both.batch(9) == MIN_WATERMARK_MS
    assert both.batch(10) == 3_999
    assert both.batch(11, {("a", 0): 7_000}) == 3_999
    assert both.batch(12, {("b", 0): 90_000}) == 5_999


def test_processing_time_cannot_go_back() -> None:
    one = job()
    assert one.state.next_processing_time_ms(5) == 5
    one.batch(100)
    assert (one.state.next_processing_time_ms(5), one.state.next_processing_time_ms(105)) == (100, 105)
    one.batch(100)
    with pytest.raises(ValueError, match="went back from 100 to 99"):
        one.batch(99)


# -- idleness -----------------------------------------------------------------------------------------


def test_a_silent_channel_is_idle_after_its_time_and_back_with_its_next_record() -> None:
    one = job(idleness_ms=100)
    assert one.batch(0, {("a", 0): 5_000, ("a", 1): 9_000}) == 3_999
    assert one.batch(99, {("a", 1): 10_000}) == 3_999
    assert one.batch(100, {("a", 1): 11_000}) == 9_999
    # It comes back with older records: late ones, which hold nobody back.
    assert one.batch(110, {("a", 0): 6_000, ("a", 1): 12_000}) == 10_999
    assert one.batch(120, {("a", 0): 12_100, ("a", 1): 20_000}) == 11_099
    assert one.batch(130, {("a", 1): 30_000}) == 11_099


def test_records_without_a_watermark_keep_a_channel_active() -> None:
    one = job(ReportedWatermarks(), idleness_ms=100)
    one.batch(0, {("a", 0): 5, ("a", 1): 9})
    assert one.batch(100, {("a", 0): None, ("a", 1): 20}) == 5


def test_when_all_channels_are_idle_the_greatest_watermark_counts_and_the_others_go_on() -> None:
    both = Job(a=AssignerRules(BOUNDED, idleness_ms=100), b=AssignerRules(BOUNDED))
    both.batch(0, {("a", 0): 5_000, ("a", 1): 9_000, ("b", 0): 90_000})
    assert both.state.watermark_ms == 3_999
    assert both.batch(100) == 88_999
    assert both.batch(101, {("a", 0): 91_000, ("b", 0): 99_000}) == 89_999


def test_a_whole_job_that_is_idle_has_let_everything_out() -> None:
    both = Job(a=AssignerRules(BOUNDED, 100), b=AssignerRules(BOUNDED, 100))
    both.batch(0, {("a", 0): 5_000, ("b", 0): 9_000})
    assert both.batch(100) == 7_999
    assert both.batch(200, {("b", 0): 12_000}) == 10_999


# -- alignment ----------------------------------------------------------------------------------------

DRIFT = Alignment("orders", 1_000)


def test_channels_that_are_ahead_of_their_group_are_held_back() -> None:
    both = Job(
        a=AssignerRules(ReportedWatermarks(), alignment=DRIFT),
        b=AssignerRules(ReportedWatermarks(), alignment=Alignment("orders", 3_000)),
        c=AssignerRules(ReportedWatermarks(), alignment=Alignment("other", 0)),
        d=AssignerRules(ReportedWatermarks()),
    )
    assert both.held_back == set()
    both.batch(0, {("a", 0): 1_000, ("a", 1): 2_001, ("b", 0): 4_000, ("c", 0): 90_000, ("d", 0): 95_000})
    assert both.held_back == {("a", 1)}
    both.batch(1, {("b", 0): 4_001})
    assert both.held_back == {("a", 1), ("b", 0)}
    both.batch(2, {("a", 0): 1_001})
    assert both.held_back == set()


def test_a_source_that_has_brought_nothing_is_the_slowest_unless_it_is_idle() -> None:
    both = Job(
        a=AssignerRules(ReportedWatermarks(), 10, DRIFT), b=AssignerRules(ReportedWatermarks(), None, DRIFT)
    )
    both.batch(0, {("b", 0): 5_000})
    assert both.held_back == {("b", 0)}
    both.batch(10)
    assert both.held_back == set()


def test_a_channel_that_is_held_back_does_not_become_idle() -> None:
    both = Job(
        a=AssignerRules(ReportedWatermarks(), 100, DRIFT), b=AssignerRules(ReportedWatermarks(), None, DRIFT)
    )
    both.batch(0, {("a", 0): 5_000, ("b", 0): 1_000})
    assert both.held_back == {("a", 0)}
    # It is let go on behind the second one, so from there on its silence counts.
    assert both.batch(150, {("b", 0): 2_000}) == 2_000
    assert both.held_back == {("a", 0)}
    assert both.batch(160, {("b", 0): 4_500}) == 4_500
    assert both.held_back == set()
    assert both.batch(200, {("b", 0): 9_000}) == 5_000
    assert both.batch(259, {("b", 0): 9_000}) == 5_000
    assert both.batch(260, {("b", 0): 9_000}) == 9_000


def test_an_ended_source_is_not_waited_for_in_its_group() -> None:
    both = Job(
        a=AssignerRules(ReportedWatermarks(), None, DRIFT), b=AssignerRules(ReportedWatermarks(), None, DRIFT)
    )
    both.batch(0, {("a", 0): 1_000, ("b", 0): 5_000}, channels(has_ended=True))
    assert both.held_back == set()


# -- end of input -------------------------------------------------------------------------------------


def test_channels_end_one_by_one_and_with_the_last_one_comes_the_greatest_watermark() -> None:
    one = job()
    assert one.batch(0, {("a", 0): 5_000, ("a", 1): 9_000}, channels(0, 1)) == 3_999
    assert one.batch(1, {("a", 0): 6_000}, channels(1)) == 7_999
    assert one.batch(2, {("a", 1): 9_500}, channels(has_ended=True)) == MAX_WATERMARK_MS
    assert one.state.has_ended
    assert one.batch(3) == MAX_WATERMARK_MS


def test_all_sources_must_have_ended_also_those_without_a_strategy() -> None:
    both = Job(a=AssignerRules(BOUNDED), b=AssignerRules(NoWatermarkStrategy()))
    assert both.batch(0, {("a", 0): 5_000}, channels(has_ended=True)) == 3_999
    assert both.batch(1, {}, AssignerInput("b", has_ended=True)) == MAX_WATERMARK_MS


def test_an_empty_bounded_source_ends_at_once() -> None:
    assert job().batch(0, {}, channels(has_ended=True)) == MAX_WATERMARK_MS


def test_a_job_without_assigners_does_not_end() -> None:
    nothing = Job()
    assert nothing.batch(0) == MIN_WATERMARK_MS and not nothing.state.has_ended


def test_input_that_goes_on_after_its_end_does_not_set_time_back() -> None:
    one = job()
    one.batch(0, {("a", 0): 5_000}, channels(has_ended=True))
    assert one.batch(1, {("a", 0): 6_000}, channels(0)) == MAX_WATERMARK_MS
    assert not one.state.has_ended


# -- a job that starts again --------------------------------------------------------------------------


def test_a_job_with_another_source_never_goes_back() -> None:
    one = Job(a=AssignerRules(BOUNDED), b=AssignerRules(BOUNDED))
    one.batch(0, {("a", 0): 5_000, ("b", 0): 9_000})
    after = Job(one.state.adapt_to_job({"b": AssignerRules(BOUNDED)}, {}), b=AssignerRules(BOUNDED))
    assert after.state.watermark_ms == 7_999
    assert after.batch(1, {("b", 0): 10_000}) == 8_999
    rules = {"b": AssignerRules(BOUNDED), "c": AssignerRules(BOUNDED)}
    more = Job(after.state.adapt_to_job(rules, {}), **rules)
    assert more.batch(2, {("b", 0): 20_000}) == 8_999
    assert more.batch(3, {("c", 0): 12_000}) == 10_999


def test_a_strategy_that_was_changed_never_goes_back() -> None:
    one = job(BoundedOutOfOrderness(0))
    one.batch(0, {("a", 0): 5_000})
    wider = Job(one.state.adapt_to_job(job().rules, {}), a=AssignerRules(BoundedOutOfOrderness(4_000)))
    assert wider.batch(1, {("a", 0): 6_000}) == 4_999
    assert wider.batch(2, {("a", 0): 9_500}) == 5_499


def test_a_job_that_had_ended_stays_at_the_end() -> None:
    one = job()
    one.batch(0, {}, channels(has_ended=True))
    assert one.state.adapt_to_job(one.rules, {}).watermark_ms == MAX_WATERMARK_MS
    assert one.state.adapt_to_job({"b": AssignerRules(BOUNDED)}, {}).watermark_ms == MAX_WATERMARK_MS


def test_what_operators_have_seen_is_never_taken_back() -> None:
    """Whatever the state says: the control offset of a micro-batch that ran is the truth."""
    batch = BatchTimes(0, (ChannelReport("a", 0, 5_000),), carried_ms=9_000)
    after = step(job().rules, EventTime(), batch)
    assert (after.watermark_ms, after.carried_ms) == (9_000, 9_000)


def test_a_micro_batch_may_carry_an_older_watermark_than_the_next_one_could() -> None:
    one = job()
    one.batch(0, {("a", 0): 5_000}, channels(has_ended=True))
    late = step(one.rules, one.state, BatchTimes(1, carried_ms=MIN_WATERMARK_MS))
    assert (late.watermark_ms, next_micro_batch_ms(one.rules, late)) == (MAX_WATERMARK_MS, 1)


# -- timers -------------------------------------------------------------------------------------------


def timer(group: int, event_ms: int | None = None, processing_ms: int | None = None) -> TimerReport:
    return TimerReport("sums", group, event_ms, processing_ms)


def test_the_agenda_knows_the_next_timers_of_every_group() -> None:
    agenda = Agenda().update([timer(0, 500, 70), timer(1, 400), timer(2, None, 60), timer(3)])
    assert (agenda.next_event_time_ms, agenda.next_processing_time_ms) == (400, 60)
    assert agenda.due(399, 59) == frozenset()
    assert agenda.due(400, 65) == {("sums", 1), ("sums", 2)}
    assert agenda.due(MAX_WATERMARK_MS, 70) == {("sums", 0), ("sums", 1), ("sums", 2)}
    later = agenda.update([timer(1), timer(2)])
    assert later.groups.keys() == {("sums", 0)}
    assert Agenda().next_event_time_ms is Agenda().next_processing_time_ms is None
    assert agenda.of(["other"]) == Agenda() and agenda.of(["sums"]) == agenda


def test_a_timer_that_the_watermark_has_reached_is_due_at_once() -> None:
    one = job()
    assert one.next_ms is None
    one.batch(100, {("a", 0): 5_000}, timers=(timer(0, 3_999),))
    assert one.next_ms == 100
    one.batch(105, timers=(timer(0, 4_000),))
    assert one.next_ms is None
    one.batch(110, {("a", 0): 5_001})
    assert one.next_ms == 110
    one.batch(115, timers=(timer(0),))
    assert one.next_ms is None


def test_a_processing_time_timer_wakes_an_idle_stream() -> None:
    one = job(idleness_ms=50)
    one.batch(100, timers=(timer(0, 9_000, 900), timer(1, None, 800)))
    # A channel that becomes idle could let the event-time timer fire before that.
    assert one.next_ms == 150
    assert job(idleness_ms=50).next_ms is None
    other = job()
    other.batch(100, timers=(timer(0, 9_000, 900), timer(1, None, 800)))
    assert other.next_ms == 800
    other.batch(801, timers=(timer(1),))
    assert other.next_ms == 900


def test_a_stream_wakes_when_a_channel_becomes_idle_for_which_a_timer_waits() -> None:
    both = Job(
        a=AssignerRules(BOUNDED, 100), b=AssignerRules(BOUNDED), c=AssignerRules(NoWatermarkStrategy(), 5)
    )
    both.batch(0, {("a", 0): 5_000, ("a", 1): 90_000, ("b", 0): 90_000})
    assert both.next_ms is None
    both.batch(20, {("a", 1): 90_000}, timers=(timer(0, 70_000),))
    assert both.next_ms == 100
    both.batch(100)
    assert both.next_ms == 100
    assert both.state.agenda.due(both.state.watermark_ms, 100) == {("sums", 0)}


def test_a_channel_that_is_held_back_wakes_the_stream_when_the_slow_one_is_idle() -> None:
    both = Job(
        a=AssignerRules(ReportedWatermarks(), 100, DRIFT), b=AssignerRules(ReportedWatermarks(), 100, DRIFT)
    )
    both.batch(0, {("a", 0): 5_000, ("b", 0): 1_000})
    assert (both.held_back, both.next_ms) == ({("a", 0)}, 100)
    both.batch(100)
    assert (both.held_back, both.next_ms) == (set(), None)


def test_the_end_of_input_is_carried_by_one_more_micro_batch() -> None:
    one = job()
    one.batch(100, {("a", 0): 5_000}, channels(has_ended=True))
    assert (one.next_ms, one.state.carried_ms) == (100, MIN_WATERMARK_MS)
    one.batch(101)
    assert (one.next_ms, one.state.carried_ms) == (None, MAX_WATERMARK_MS)


def test_operators_and_rules_mean_the_same_ends_of_time() -> None:
    assert (elements.MIN_WATERMARK_MS, elements.MAX_WATERMARK_MS) == (MIN_WATERMARK_MS, MAX_WATERMARK_MS)
