"""The valve: behaviour 124, and what must hold whatever comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.event_time import MIN_WATERMARK_MS, ChannelStatus, Valve, ValveChannel
from tests.support.effort import examples

IDLE, ACTIVE = ChannelStatus.IDLE, ChannelStatus.ACTIVE


class Play:
    """A valve to which one thing at a time is done; each call returns what comes out."""

    def __init__(self, channels: int) -> None:
        self.valve = Valve[int]().add_channels(range(channels))

    def mark(self, channel: int, watermark_ms: int) -> list[object]:
        return self._then(self.valve.advance({channel: watermark_ms}))

    def idle(self, channel: int) -> list[object]:
        return self._then(self.valve.mark_idle([channel]))

    def active(self, channel: int) -> list[object]:
        return self._then(self.valve.resume([channel]))

    def _then(self, after: Valve[int]) -> list[object]:
        before, self.valve = self.valve, after
        came: list[object] = [after.watermark_ms] if after.watermark_ms != before.watermark_ms else []
        return came + ([after.status] if after.status is not before.status else [])


# -- Flink's StatusWatermarkValveTest, by behaviour ---------------------------------------------------


def test_one_channel_rising_watermarks_come_out() -> None:
    play = Play(1)
    assert play.mark(0, 0) == [0]
    assert play.mark(0, 25) == [25]


def test_one_channel_a_falling_watermark_changes_nothing() -> None:
    play = Play(1)
    assert play.mark(0, 25) == [25]
    assert play.mark(0, 18) == []
    assert play.mark(0, 42) == [42]


def test_one_channel_its_status_comes_out_when_it_changes() -> None:
    play = Play(1)
    assert play.active(0) == []
    assert play.idle(0) == [IDLE]
    assert play.idle(0) == []
    assert play.active(0) == [ACTIVE]


def test_one_channel_keeps_its_watermark_while_it_is_idle() -> None:
    play = Play(1)
    assert play.mark(0, 25) == [25]
    assert play.idle(0) == [IDLE]
    assert play.mark(0, 50) == []
    assert play.valve.channels[0].watermark_ms == 25
    assert play.active(0) == [ACTIVE]
    assert play.mark(0, 50) == [50]


def test_nothing_comes_before_every_channel_has_a_watermark() -> None:
    play = Play(3)
    assert play.mark(0, 0) == play.mark(1, 0) == []
    assert play.mark(2, 0) == [0]


def test_the_smallest_of_several_channels_comes_out() -> None:
    play = Play(3)
    assert [play.mark(channel, 0) for channel in range(3)] == [[], [], [0]]
    assert play.mark(0, 12) == play.mark(2, 8) == play.mark(2, 10) == []
    assert play.mark(1, 15) == [10]
    assert play.mark(2, 17) == [12]
    assert play.mark(0, 20) == [15]


def test_falling_watermarks_of_several_channels_change_nothing() -> None:
    play = Play(3)
    assert [play.mark(0, 25), play.mark(1, 10), play.mark(2, 17)] == [[], [], [10]]
    assert play.mark(0, 12) == play.mark(1, 8) == play.mark(2, 15) == []


def test_several_channels_are_idle_when_all_are() -> None:
    play = Play(2)
    assert play.active(0) == play.active(1) == play.idle(1) == []
    assert play.idle(0) == [IDLE]
    assert play.idle(0) == play.idle(1) == []
    assert play.active(1) == [ACTIVE]
    assert play.active(0) == []


def test_the_others_go_on_without_an_idle_channel() -> None:
    play = Play(3)
    assert play.mark(0, 15) == play.mark(1, 10) == []
    assert play.idle(2) == [10]
    assert play.mark(1, 18) == [15]
    assert play.mark(0, 20) == [18]


def test_the_watermark_rises_as_one_channel_after_the_other_becomes_idle() -> None:
    play = Play(3)
    assert [play.mark(0, 25), play.mark(1, 10), play.mark(2, 17)] == [[], [], [10]]
    assert play.idle(1) == [17]
    assert play.idle(2) == [25]


def test_the_greatest_watermark_comes_out_when_the_last_channel_becomes_idle() -> None:
    play = Play(3)
    assert [play.mark(0, 10), play.mark(1, 5), play.mark(2, 3)] == [[], [], [3]]
    assert play.idle(0) == play.idle(1) == []
    assert play.idle(2) == [10, IDLE]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_in_which_order_channels_become_idle_does_not_matter_in_the_end(order: tuple[int, ...]) -> None:
    play = Play(3)
    for channel, watermark_ms in enumerate((10, 5, 3)):
        play.mark(channel, watermark_ms)
    for channel in order:
        play.idle(channel)
    assert (play.valve.watermark_ms, play.valve.status) == (10, IDLE)
    together = Valve[int]().add_channels(range(3)).advance({0: 10, 1: 5, 2: 3}).mark_idle(range(3))
    assert together == play.valve


def test_a_channel_that_is_active_again_counts_when_it_has_caught_up() -> None:
    play = Play(3)
    assert [play.mark(0, 10), play.mark(1, 7), play.mark(2, 3)] == [[], [], [3]]
    assert play.idle(2) == [7]
    assert play.active(2) == []
    assert not play.valve.channels[2].counts
    assert play.mark(2, 5) == []
    assert play.valve.channels[2] == ValveChannel(5, ACTIVE, counts=False)
    assert play.mark(2, 9) == []
    assert play.valve.channels[2].counts
    assert play.mark(1, 12) == [9]


def test_nothing_comes_while_no_active_channel_has_caught_up() -> None:
    play = Play(3)
    assert [play.mark(0, 10), play.mark(1, 7)] == [[], []]
    assert play.idle(2) == [7]
    assert play.active(2) == play.idle(0) == play.idle(1) == []
    # The last one to become idle had not caught up; what the others had waited with comes out all the same.
    assert play.idle(2) == [10, IDLE]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_channel_to_become_idle_need_not_have_caught_up(order: tuple[int, int]) -> None:
    """FLINK-40475: the watermark stood at 10 for ever where the one that had not caught up was the last."""
    play = Play(3)
    assert [play.mark(0, 10), play.mark(1, 5), play.mark(2, 30)] == [[], [], [5]]
    assert [play.idle(1), play.idle(2)] == [[10], []]
    assert [play.active(1), play.mark(1, 6)] == [[], []]
    assert [play.idle(channel) for channel in order][1] == [30, IDLE]
    assert play.valve.watermark_ms == 30


def test_what_waits_comes_out_when_the_last_active_channel_is_gone() -> None:
    valve = Valve[str]().add_channels("abc").advance({"a": 10, "b": 5, "c": 30}).mark_idle("bc")
    late = valve.resume("b").mark_idle("a")
    assert (late.watermark_ms, late.remove_channels("b").watermark_ms) == (10, 30)


def test_a_channel_that_has_not_caught_up_becomes_idle_again() -> None:
    play = Play(2)
    assert [play.mark(0, 7), play.mark(1, 10)] == [[], [7]]
    assert play.idle(0) == [10]
    assert play.active(0) == play.mark(0, 9) == play.idle(0) == []
    assert play.mark(1, 12) == [12]


# -- ours: channels that come and go ------------------------------------------------------------------


def test_a_new_channel_holds_the_watermark_where_it_is() -> None:
    valve = Valve[str]().add_channels("a").advance({"a": 50})
    valve = valve.add_channels("ab").advance({"a": 80})
    assert (valve.watermark_ms, valve.channels["a"].watermark_ms) == (50, 80)
    assert valve.advance({"b": 20}).watermark_ms == 50
    assert valve.advance({"b": 70}).watermark_ms == 70
    assert valve.mark_idle("b").watermark_ms == 80


def test_a_channel_that_is_gone_holds_nobody_back() -> None:
    valve = Valve[str]().add_channels("abc").advance({"a": 10, "b": 20, "c": 30})
    assert valve.remove_channels("a").watermark_ms == 20
    assert valve.remove_channels("ab").watermark_ms == 30
    idle = valve.mark_idle("c")
    assert idle.remove_channels("ab").watermark_ms == 30
    assert idle.remove_channels("ab").status is IDLE
    assert valve.remove_channels("abc") == Valve({}, 10)
    assert valve.remove_channels("abc").status is ACTIVE
    assert valve.remove_channels("x") == valve


def test_an_idle_channel_cannot_count() -> None:
    with pytest.raises(ValueError, match="idle channel cannot count"):
        ValveChannel(0, IDLE)


CHANNELS = st.sets(st.integers(0, 4))
ACTIONS = st.one_of(
    st.tuples(st.just("add_channels"), CHANNELS),
    st.tuples(st.just("resume"), CHANNELS),
    st.tuples(st.just("mark_idle"), CHANNELS),
    st.tuples(st.just("remove_channels"), CHANNELS),
    st.tuples(st.just("advance"), st.dictionaries(st.integers(0, 4), st.integers(-50, 50))),
)


@given(st.lists(ACTIONS, max_size=20))
@settings(max_examples=examples(100), deadline=None)
def test_a_valve_never_goes_back_and_is_the_smallest_of_those_that_count(actions) -> None:
    valve = Valve[int]().add_channels([0, 1])
    for name, given_channels in actions:
        known = (
            {key: given_channels[key] for key in given_channels if key in valve.channels}
            if isinstance(given_channels, dict)
            else given_channels & (valve.channels.keys() if name != "add_channels" else given_channels)
        )
        after = getattr(valve, name)(known)
        assert after.watermark_ms >= valve.watermark_ms
        counting = [one.watermark_ms for one in after.channels.values() if one.counts]
        if counting:
            assert after.watermark_ms == max(valve.watermark_ms, min(counting))
        for one in after.channels.values():
            # Whoever was heard and did not count was behind what had come out.
            assert one.counts or one.status is IDLE or one.watermark_ms < after.watermark_ms
        greatest = max((one.watermark_ms for one in after.channels.values()), default=MIN_WATERMARK_MS)
        assert after.watermark_ms <= max(valve.watermark_ms, greatest)
        valve = after


class Model:
    """Flink's rules, one thing at a time, as its valve's source has them; written down anew."""

    def __init__(self, channels: int) -> None:
        self.marks, self.idle = [MIN_WATERMARK_MS] * channels, [False] * channels
        self.aligned, self.out = [True] * channels, MIN_WATERMARK_MS

    def do(self, name: str, channel: int, watermark_ms: int) -> None:
        if name == "mark" and not self.idle[channel] and watermark_ms > self.marks[channel]:
            self.marks[channel] = watermark_ms
            self.aligned[channel] = self.aligned[channel] or watermark_ms >= self.out
            self._least()
        elif name == "idle" and not self.idle[channel]:
            self.idle[channel], self.aligned[channel] = True, False
            # Without looking whether this one had caught up (FLINK-40475): all idle is all idle.
            self._greatest() if all(self.idle) else self._least()
        elif name == "active" and self.idle[channel]:
            self.idle[channel], self.aligned[channel] = False, self.marks[channel] >= self.out
            # The one place where ours is earlier: Flink waits for the channel's next watermark.
            self._least()

    def _least(self) -> None:
        aligned = [mark for mark, counts in zip(self.marks, self.aligned, strict=True) if counts]
        self.out = max(self.out, min(aligned, default=self.out))

    def _greatest(self) -> None:
        self.out = max(self.out, *self.marks)


STEPS = st.tuples(st.sampled_from(["mark", "mark", "idle", "active"]), st.integers(0, 2), st.integers(0, 30))


@given(st.lists(STEPS, max_size=60))
@settings(max_examples=examples(200), deadline=None)
def test_one_thing_at_a_time_a_valve_does_what_flink_s_does(steps) -> None:
    """Behaviour 124; its 14 cases are above, one by one."""
    play, model = Play(3), Model(3)
    for name, channel, watermark_ms in steps:
        getattr(play, name)(channel, *[watermark_ms] * (name == "mark"))
        model.do(name, channel, watermark_ms)
        assert play.valve.watermark_ms == model.out
        assert (play.valve.status is IDLE) == all(model.idle)
        assert [one.counts for one in play.valve.channels.values()] == model.aligned


@given(st.lists(STEPS, max_size=40), st.sets(st.integers(0, 2)), st.permutations(range(3)), st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_in_which_order_channels_leave_does_not_matter(steps, leaving, order, for_good) -> None:
    """Whatever came before: the least of those that count, or the greatest that came if all are idle."""
    play = Play(3)
    for name, channel, watermark_ms in steps:
        getattr(play, name)(channel, *[watermark_ms] * (name == "mark"))
    before = play.valve
    one_by_one = before
    for channel in order:
        if channel in leaving:
            one_by_one = (
                one_by_one.remove_channels([channel]) if for_good else one_by_one.mark_idle([channel])
            )
    stay = [one for key, one in before.channels.items() if key not in leaving]
    left = stay if for_good else list(before.channels.values())
    if any(one.status is ACTIVE for one in stay):
        found = min((one.watermark_ms for one in stay if one.counts), default=before.watermark_ms)
    else:
        found = max((one.watermark_ms for one in left), default=before.watermark_ms)
    if not (for_good and not stay):
        assert one_by_one.watermark_ms == max(before.watermark_ms, found)
    together = before.remove_channels(leaving) if for_good else before.mark_idle(leaving)
    assert together.channels == one_by_one.channels
    assert for_good or together == one_by_one
