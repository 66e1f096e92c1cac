"""Sources that run ahead are held back until the others of their group have caught up."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import KafkaSource
from flinkish_spark.checkpoint.control import read_held, to_held_path, write_held
from flinkish_spark.connectors.collection import CollectionSource
from flinkish_spark.connectors.kafka import stream_offsets as topic_watch
from flinkish_spark.connectors.kafka.source import to_subscription_options
from flinkish_spark.connectors.kafka.stream_options import parse_stream
from flinkish_spark.connectors.kafka.stream_reader import KafkaStreamReader
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.connectors.splits import SplitStreamReader
from flinkish_spark.contracts.source import Source
from flinkish_spark.core.stream_readers import ReadAllAvailable
from flinkish_spark.protocol.event_time import (
    MIN_WATERMARK_MS,
    Alignment,
    AssignerInput,
    AssignerRules,
    BatchTimes,
    BoundedOutOfOrderness,
    ChannelReport,
)
from flinkish_spark.protocol.time_plan import Assigner, TimePlan
from flinkish_spark.protocol.watermark_alignment import (
    NONE_HELD,
    Channels,
    HeldChannels,
    decode_held,
    encode_held,
    find_held_sources,
)
from flinkish_spark.protocol.watermarks import EventTime, next_micro_batch_ms, step
from flinkish_spark.transport.channels import channel_by_name
from tests.support.effort import seeds
from tests.unit.connectors.kafka.test_stream_reader import Log
from tests.unit.connectors.test_split_source import Counters

IN_ORDER = BoundedOutOfOrderness(0)


def rules(drift_ms: int = 100, idleness_ms: int | None = None, group: str = "g") -> AssignerRules:
    return AssignerRules(IN_ORDER, idleness_ms, Alignment(group, drift_ms))


def plan(**assigners: Assigner) -> TimePlan:
    return TimePlan(assigners={uid.replace("_", "."): one for uid, one in assigners.items()})


def behind(
    given: TimePlan, *reports: tuple[str, int, int], inputs: tuple[AssignerInput, ...] = ()
) -> EventTime:
    channels = tuple(ChannelReport(*one) for one in reports)
    return step(given.rules, EventTime(), BatchTimes(0, channels, inputs))


# -- from assigners to sources -------------------------------------------------------------------------


def test_the_channel_that_is_ahead_is_held_back_and_no_other() -> None:
    two = plan(a=Assigner("a", rules()), b=Assigner("b", rules()))
    state = behind(two, ("a", 0, 500), ("a", 1, 90), ("b", 0, 1))
    assert find_held_sources(two, state) == {"a": HeldChannels(frozenset({0}))}


def test_a_source_without_channels_of_its_own_is_held_back_whole() -> None:
    two = plan(a=Assigner("a", rules(), has_channels=False), b=Assigner("b", rules()))
    held = find_held_sources(two, behind(two, ("a", 0, 500), ("b", 0, 1)))
    assert held == {"a": HeldChannels(Channels.ALL)}
    assert held["a"].holds(7)


def test_a_source_that_two_chains_read_is_held_back_where_both_are_ahead() -> None:
    both = plan(a_x=Assigner("a", rules()), a_y=Assigner("a", rules()), b=Assigner("b", rules()))
    # One scan of the source is behind the other: holding it back would be for ever.
    one_behind = behind(both, ("a.x", 0, 500), ("a.y", 0, 1), ("b", 0, 1))
    assert find_held_sources(both, one_behind) == {}
    both_ahead = behind(both, ("a.x", 0, 500), ("a.x", 1, 500), ("a.y", 0, 700), ("a.y", 1, 2), ("b", 0, 1))
    assert find_held_sources(both, both_ahead) == {"a": HeldChannels(frozenset({0}))}
    whole = plan(
        a_x=Assigner("a", rules()), a_y=Assigner("a", rules(), has_channels=False), b=Assigner("b", rules())
    )
    assert find_held_sources(whole, both_ahead) == {"a": HeldChannels(frozenset({0, 1}))}


def test_groups_do_not_wait_for_each_other() -> None:
    two = plan(a=Assigner("a", rules(group="one")), b=Assigner("b", rules(group="two")))
    assert find_held_sources(two, behind(two, ("a", 0, 500), ("b", 0, 1))) == {}


def test_what_has_ended_or_was_never_aligned_holds_nobody_back() -> None:
    given = plan(a=Assigner("a", rules()), b=Assigner("b", rules()), c=Assigner("c", AssignerRules(IN_ORDER)))
    state = behind(
        given, ("a", 0, 500), ("b", 0, 1), ("c", 0, 1), inputs=(AssignerInput("b", frozenset(), True),)
    )
    assert find_held_sources(given, state) == {}
    assert find_held_sources(TimePlan(), EventTime()) == {}


# -- what sources are told -----------------------------------------------------------------------------


def test_what_is_written_is_read_and_what_is_not_there_holds_nobody_back(tmp_path: Path) -> None:
    control = tmp_path / "3-1.json"
    held = {"a": HeldChannels(frozenset({0, 4})), "b": HeldChannels(Channels.ALL)}
    assert decode_held(json.loads(json.dumps(encode_held(held)))) == held
    assert read_held(str(control), "a") == NONE_HELD == read_held("", "a")
    write_held(control, held)
    assert read_held(str(control), "a") == held["a"]
    assert read_held(str(control), "c") == NONE_HELD
    write_held(control, {})
    assert not to_held_path(control).exists()
    write_held(control, {})


@pytest.mark.parametrize("value", [[], {"a": "SOME"}, {"a": [-1]}, {"a": [1, 1]}, {"../a": [1]}, {"a": {}}])
def test_advice_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        decode_held(value)


def test_a_split_that_is_held_back_stays_where_it_is_and_the_others_go_on(tmp_path: Path) -> None:
    control = tmp_path / "1-0.json"
    source = Counters({"x": 10, "y": 10})
    reader = SplitStreamReader(source.bind("in"), str(tmp_path), str(control))
    start = reader.initialOffset()
    write_held(control, {"in": HeldChannels(frozenset({0}))})
    end = reader.latestOffset(start, ReadAllAvailable())
    assert SplitPosition.from_json(end).offsets == {"x": 0, "y": 10}
    write_held(control, {"in": HeldChannels(Channels.ALL)})
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    write_held(control, {})
    assert SplitPosition.from_json(reader.latestOffset(end, ReadAllAvailable())).offsets == {"x": 10, "y": 10}


def test_a_source_that_is_held_back_at_its_end_still_says_that_it_has_ended(tmp_path: Path) -> None:
    control = tmp_path / "1-0.json"
    source = CollectionSource([(1,), (2,)], "n LONG").bind("in")
    first = SplitStreamReader(source, str(tmp_path), str(control))
    end = first.latestOffset(first.initialOffset(), ReadAllAvailable())
    assert SplitPosition.from_json(end).is_ended
    write_held(control, {"in": HeldChannels(Channels.ALL)})
    read = {**end, "flinkish:splits": end["flinkish:splits"]}
    del read["flinkish:ended"], read["flinkish:done"]
    again = SplitPosition.from_json(first.latestOffset(read, ReadAllAvailable()))
    assert again.is_ended and again.open_numbers() == frozenset()


def test_a_kafka_partition_that_is_held_back_brings_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_watch, "_LOOK_FOR_PARTITIONS_S", -1.0)
    control, log = tmp_path / "1-0.json", Log(a=10, b=10)
    log.first["b", 1], log.end["b", 1] = 0, 10
    options = {
        "kafka.bootstrap.servers": "localhost:9092",
        "subscribe": "a,b",
        "flinkish.first.offsets": str(tmp_path),
        "flinkish.held.path": str(control),
        "flinkish.held.source": "in",
    }
    reader = KafkaStreamReader(parse_stream(options), log)  # type: ignore[arg-type]
    start = reader.initialOffset()
    write_held(control, {"in": HeldChannels(frozenset({channel_by_name("a", 0), channel_by_name("b", 1)}))})
    end = reader.latestOffset({"a": {"0": 0}, "b": {"0": 0, "1": 0}}, ReadAllAvailable())
    assert end == {"a": {"0": 0}, "b": {"0": 10, "1": 0}}
    write_held(control, {})
    assert reader.latestOffset(end, ReadAllAvailable()) == {"a": {"0": 10}, "b": {"0": 10, "1": 10}}
    assert start is not None


def test_single_partitions_have_the_numbers_that_their_source_gives_them(tmp_path: Path) -> None:
    source = KafkaSource("nowhere:1", ["b", "a"], partitions={"b": [1], "a": [0, 2]})
    wanted = {channel_by_name("a", 2), channel_by_name("b", 1)}
    assert source.channels_of([("a", 2), ("b", 1)]) == wanted
    options = {
        "kafka.bootstrap.servers": "localhost:9092",
        **to_subscription_options(source.wanted),
        "flinkish.held.path": str(tmp_path / "1-0.json"),
        "flinkish.held.source": "in",
    }
    log = Log()
    for place in (("a", 0), ("a", 2), ("b", 1)):
        log.first[place], log.end[place] = 0, 10
    reader = KafkaStreamReader(parse_stream(options), log)  # type: ignore[arg-type]
    write_held(tmp_path / "1-0.json", {"in": HeldChannels(source.channels_of([("a", 2), ("b", 1)]))})
    end = reader.latestOffset({"a": {"0": 0, "2": 0}, "b": {"1": 0}}, ReadAllAvailable())
    assert end == {"a": {"0": 10, "2": 0}, "b": {"1": 0}}


def test_a_source_that_spark_reads_alone_says_which_one_to_take() -> None:
    with pytest.raises(Exception, match="Kafka with KafkaSource"):
        Source.check_alignable(Counters({}), "in")
    Counters({}).check_alignable("in")


# -- a model: many seeds, sources, splits, rates ---------------------------------------------------------


@dataclass
class Input:
    """A source of the model: event times by channel, and how many a micro-batch takes of each."""

    times: list[list[int]]
    most: int
    arrives_at: list[int]
    read: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.read = [0] * len(self.times)

    def is_open(self, channel: int) -> bool:
        return self.read[channel] < len(self.times[channel])

    @property
    def has_ended(self) -> bool:
        return not any(self.is_open(channel) for channel in range(len(self.times)))


class Model:
    """Micro-batches of a job with one group; sources hear nothing but what the file would say."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.drift_ms = self.chance.choice([0, 10, 100])
        self.idleness_ms = self.chance.choice([None, 30])
        self.inputs = {f"s{number}": self._input() for number in range(self.chance.randint(2, 4))}
        given = rules(self.drift_ms, self.idleness_ms)
        self.plan = TimePlan(assigners={uid: Assigner(uid, given) for uid in self.inputs})
        self.state, self.now_ms = EventTime(), 0

    def _input(self) -> Input:
        speed, channels = self.chance.choice([1, 7, 60]), self.chance.randint(1, 3)
        lengths = [self.chance.randint(0, 25) for _ in range(channels)]
        times = [sorted(self.chance.randint(0, speed * 20) for _ in range(length)) for length in lengths]
        # Channels of which nothing comes for a while are waited for, or idle.
        pauses = [self.chance.choice([0, 0, 5, 120]) for _ in range(channels)]
        return Input(times, self.chance.randint(1, 6), pauses)

    def run(self) -> int:
        """Run until every input has ended; return in how many micro-batches."""
        for count in range(2_000):
            if all(one.has_ended for one in self.inputs.values()) and self.state.has_ended:
                return count
            self.now_ms += self.chance.randint(0, 9)
            before = [one.has_ended for one in self.inputs.values()]
            reports = list(self._read(find_held_sources(self.plan, self.state)))
            has_changed = before != [one.has_ended for one in self.inputs.values()]
            due_ms = next_micro_batch_ms(self.plan.rules, self.state)
            is_due = due_ms is not None and due_ms <= self.now_ms
            if not (reports or has_changed or is_due or self.state.processing_time_ms is None):
                # Nothing makes Spark run a micro-batch.
                continue
            inputs = tuple(
                AssignerInput(uid, frozenset(filter(one.is_open, range(len(one.times)))), one.has_ended)
                for uid, one in self.inputs.items()
            )
            # As after a crash: what goes on is what was stored.
            stored = json.loads(json.dumps(self.state.to_json()))
            batch = BatchTimes(self.now_ms, tuple(reports), inputs, carried_ms=self.state.watermark_ms)
            self.state = step(self.plan.rules, EventTime.from_json(stored), batch)
        raise AssertionError("nobody goes on")

    def _read(self, held: Any) -> Iterator[ChannelReport]:
        slowest_ms = self._slowest_ms()
        for uid, one in self.inputs.items():
            for channel, times in enumerate(one.times):
                if one.arrives_at[channel] > self.now_ms or not one.is_open(channel):
                    continue
                stood_ms = self._stands_at(uid, channel)
                is_ahead = (
                    stood_ms is not None
                    and slowest_ms is not None
                    and (stood_ms > slowest_ms + self.drift_ms)
                )
                assert held.get(uid, NONE_HELD).holds(channel) == is_ahead
                if is_ahead:
                    continue
                end = min(len(times), one.read[channel] + one.most)
                yield ChannelReport(uid, channel, max(times[one.read[channel] : end]))
                one.read[channel] = end

    def _slowest_ms(self) -> int | None:
        marks = [
            ms
            for uid in self.inputs
            for channel in range(len(self.inputs[uid].times))
            if (ms := self._stands_at(uid, channel)) is not None
        ]
        unknown = [uid for uid in self.inputs if uid not in self.state.assigners]
        return MIN_WATERMARK_MS if unknown and marks else min(marks, default=None)

    def _stands_at(self, uid: str, channel: int) -> int | None:
        """Return an active channel's watermark."""
        assigner = self.state.assigners.get(uid)
        if assigner is None or assigner.has_ended or channel not in assigner.valve.channels:
            return None
        one = assigner.valve.channels[channel]
        return one.watermark_ms if one.status.value == "ACTIVE" else None


@pytest.mark.parametrize("seed", seeds(120))
def test_an_aligned_group_never_stands_still_and_nobody_starts_ahead(seed: int) -> None:
    model = Model(seed)
    model.run()
    assert all(one.has_ended for one in model.inputs.values())
