"""What a user says about event time, and generators as workers run them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from pyspark.sql.classic.column import Column

from flinkish_spark import WatermarkGenerator, WatermarkStrategy
from flinkish_spark.core.errors import ConfigError, UserFunctionError
from flinkish_spark.functions.watermark_strategy import ChannelGenerators
from flinkish_spark.protocol.event_time import (
    Alignment,
    AssignerRules,
    BoundedOutOfOrderness,
    NoWatermarks,
    ReportedWatermarks,
)

DAY_MS = 24 * 3_600_000


class EveryTenth(WatermarkGenerator):
    """Emits each time that can be divided by 10, and behind all of them one less than the last."""

    def __init__(self) -> None:
        self.last_ms = 0

    def on_event(self, event, timestamp_ms):
        self.last_ms = timestamp_ms
        return timestamp_ms if timestamp_ms % 10 == 0 else None

    def on_periodic(self):
        return self.last_ms - 1 if self.last_ms else None


def times(event, source_ms):
    return event.at


async def later(event, source_ms):
    return 0


def several(event, source_ms):
    yield 0


def test_each_strategy_has_its_rules() -> None:
    bounded = WatermarkStrategy.for_bounded_out_of_orderness(5_000)
    assert bounded.rules == AssignerRules(BoundedOutOfOrderness(5_000))
    assert WatermarkStrategy.for_monotonous_timestamps().rules == AssignerRules(BoundedOutOfOrderness(0))
    assert WatermarkStrategy.no_watermarks().rules == AssignerRules(NoWatermarks())
    own = WatermarkStrategy.for_generator(EveryTenth)
    assert (own.rules, own.generator) == (AssignerRules(ReportedWatermarks()), EveryTenth)
    full = bounded.with_idleness(60_000).with_watermark_alignment("orders", 1_000)
    assert full.rules == AssignerRules(BoundedOutOfOrderness(5_000), 60_000, Alignment("orders", 1_000))
    assert full.with_timestamp_assigner("at").rules == full.rules


def test_a_strategy_is_a_value() -> None:
    bounded = WatermarkStrategy.for_bounded_out_of_orderness(5_000)
    bounded.with_idleness(60_000)
    assert bounded.idleness_ms is None
    with pytest.raises(FrozenInstanceError):
        bounded.idleness_ms = 1


@pytest.mark.parametrize("timestamps", ["at", Column(object()), times, lambda event, source_ms: 0])
def test_times_come_from_a_column_or_a_function(timestamps) -> None:
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(timestamps)
    assert strategy.timestamps is timestamps


@pytest.mark.parametrize("timestamps", ["", None, 7, int, later, several, lambda event: 0])
def test_times_from_something_else_are_refused(timestamps) -> None:
    with pytest.raises(ConfigError, match="To do: "):
        WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(timestamps)


@pytest.mark.parametrize("bound_ms", [-1, None, True, 5.0, "5", 366 * DAY_MS])
def test_a_bound_out_of_range_is_refused(bound_ms) -> None:
    with pytest.raises(ConfigError, match=r"max_out_of_orderness_ms is .*milliseconds.*To do: "):
        WatermarkStrategy.for_bounded_out_of_orderness(bound_ms)


@pytest.mark.parametrize("idleness_ms", [0, -1, None, True, 5.0, "5", 366 * DAY_MS])
def test_an_idleness_out_of_range_is_refused(idleness_ms) -> None:
    with pytest.raises(ConfigError, match=r"idleness_ms is .*milliseconds.*To do: "):
        WatermarkStrategy.no_watermarks().with_idleness(idleness_ms)


@pytest.mark.parametrize(
    ("group", "drift_ms"), [("", 1), ("a b", 1), (None, 1), ("a", -1), ("a", None), ("a", 1.0)]
)
def test_an_alignment_that_cannot_be_is_refused(group, drift_ms) -> None:
    with pytest.raises(ConfigError, match="To do: "):
        WatermarkStrategy.no_watermarks().with_watermark_alignment(group, drift_ms)


@pytest.mark.parametrize("factory", [None, EveryTenth(), dict, "EveryTenth", later, several])
def test_a_factory_that_makes_no_generator_is_refused(factory) -> None:
    with pytest.raises(ConfigError, match="To do: "):
        WatermarkStrategy.for_generator(factory)


def test_a_generator_sees_one_channel_of_one_micro_batch() -> None:
    task = ChannelGenerators(EveryTenth, "orders")
    for channel, time_ms in [(0, 20), (1, 7), (0, 10), (2, 30), (2, 39)]:
        task.on_event(channel, "event", time_ms)
    assert task.finish() == {0: 20, 1: 6, 2: 38}
    assert ChannelGenerators(EveryTenth, "orders").finish() == {}


def test_a_generator_may_emit_nothing() -> None:
    task = ChannelGenerators(WatermarkGenerator, "orders")
    task.on_event(0, "event", 5)
    assert task.finish() == {0: None}


class Ended(WatermarkGenerator, set):
    """Keeps which orders are open, and emits a time when none is: then it is false, as any empty set."""

    def on_event(self, event, timestamp_ms):
        self ^= {event}
        return None if self else timestamp_ms


def test_a_generator_may_be_a_collection_which_is_false_while_it_is_empty() -> None:
    """It was made anew for each record, and the channel's greatest watermark was forgotten."""
    task = ChannelGenerators(Ended, "orders")
    for event, time_ms in [("a", 90), ("a", 80), ("b", 50)]:
        task.on_event(0, event, time_ms)
    assert task.finish() == {0: 80}


class Raising(WatermarkGenerator):
    def on_event(self, event, timestamp_ms):
        return event()

    def on_periodic(self):
        return 1.5


def test_what_a_generator_does_wrong_names_it() -> None:
    task = ChannelGenerators(Raising, "orders")
    with pytest.raises(UserFunctionError, match=r"on_event\(\) of .* 'orders' failed.*ZeroDivisionError"):
        task.on_event(0, lambda: 1 // 0, 5)
    for wrong in ("5", 1 << 63, True):
        with pytest.raises(UserFunctionError, match=r"on_event\(\).*the watermark must be a whole number"):
            task.on_event(0, lambda wrong=wrong: wrong, 5)
    with pytest.raises(UserFunctionError, match=r"on_periodic\(\) .*1\.5"):
        task.finish()


@pytest.mark.parametrize(("factory", "why"), [(lambda: 7, "it returned 7"), (lambda: 1 // 0, "ZeroDivision")])
def test_what_a_factory_does_wrong_names_it(factory, why) -> None:
    task = ChannelGenerators(WatermarkStrategy.for_generator(factory).generator, "orders")
    with pytest.raises(UserFunctionError, match=f"the factory of .* 'orders' failed.*{why}"):
        task.on_event(0, "event", 5)
