"""Kafka as a source of splits; the brokers are a stub (real ones in tests/integration/broker)."""

from __future__ import annotations

import pytest

from flinkish_spark import DeadLetter, Json, OnBadRecord, Raw, StartingOffsets
from flinkish_spark.connectors.kafka import split_source as module
from flinkish_spark.connectors.kafka.split_source import _group_by_topic
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.contracts.source import SourceStart
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import ConfigError, InputLostError, SchemaError
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.sources import (
    EndAtLatest,
    HybridSource,
    KafkaRecordsSource,
    StartAtCommittedOffsets,
    StartAtOffsets,
)


class Brokers:
    """Partitions that begin and end where the test says."""

    def __init__(self, **topics: list[tuple[int, int]]) -> None:
        self.there, self.asked = topics, 0

    def partition_counts(self, names):
        self.asked += 1
        return {n: len(self.there[n]) for n in names if n in self.there}

    def find_matching_topics(self, pattern):
        self.asked += 1
        return {n: len(of) for n, of in self.there.items() if pattern.matches(n)}

    def beginning_offsets(self, places):
        return {(t, p): self.there[t][p][0] for t, p in places}

    def end_offsets(self, places):
        return {(t, p): self.there[t][p][1] for t, p in places}

    def offsets_at(self, wanted):
        return {(t, p): 5 if self.there[t][p][1] > 5 else None for t, p in wanted}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(SystemClock, "sleep_ms", lambda self, ms: None)


class Admin:
    """The same partitions, as the driver asks for them; and a group."""

    def __init__(self, brokers: Brokers, **group: int) -> None:
        self.brokers, self.group = brokers, group

    def beginning_offsets(self, places):
        return self.brokers.beginning_offsets(places)

    def end_offsets(self, places):
        return self.brokers.end_offsets(places)

    def offsets_at(self, wanted):
        return self.brokers.offsets_at(wanted)

    def committed_offsets(self, group, isolation=None):
        return {(topic, 0): at for topic, at in self.group.items()}

    def close(self):
        pass


def source_of(brokers, topics=("a:b", "c"), folder="", **settings):
    source = KafkaRecordsSource("nowhere:1", list(topics), **settings).bind("in")
    return connected(source._replace("_fs_folder", str(folder)), brokers)


def connected(source, brokers, **group):
    source.__dict__["_planning_admin"], source.__dict__["_admin"] = brokers, Admin(brokers, **group)
    return source


def test_partitions_are_splits_that_are_added(monkeypatch) -> None:
    brokers = Brokers(**{"a:b": [(3, 9)], "c": [(0, 2), (1, 1)]})
    source = source_of(brokers)
    assert source.splits() == ["a:b:0", "c:0", "c:1"] == source.splits() and brokers.asked == 1
    assert [source.first(split) for split in source.splits()] == [3, 0, 1]
    assert source.latest("a:b:0", 3, None) == 9 and source.latest("a:b:0", 3, 2) == 5
    brokers.there["c"].append((0, 7))
    monkeypatch.setattr(module, "_TOPICS_EVERY_S", 0)
    assert set(source.splits()) > {"c:1", "c:2"}
    assert _group_by_topic({"a:b:0": 3, "c:1": 4, "c:0": 5}) == {"a:b": {"0": 3}, "c": {"1": 4, "0": 5}}


def test_it_may_begin_at_a_time() -> None:
    source = source_of(Brokers(**{"a:b": [(3, 9)], "c": [(0, 2)]}), starting_at_ms=100)
    assert source.first("a:b:0") == 5 and source.first("c:0") == 2


def test_what_is_gone_is_believed_when_it_stays(impatient) -> None:
    source = source_of(Brokers(c=[(0, 2)]))
    with pytest.raises(InputLostError, match="'a:b' was deleted"):
        source.splits()
    assert source.latest("c:0", 7, None) == 2, "the reader refuses an end that lies before the start"


def test_topics_that_match_a_pattern_are_read_also_those_that_come(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(module, "_TOPICS_EVERY_S", 0)
    brokers = Brokers(**{"in-1": [(3, 9)], "out": [(0, 2)], "xin-1": [(0, 1)]})
    settings = {"topics": (), "pattern": "in-.*", "starting_offsets": StartingOffsets.LATEST}
    source = source_of(brokers, folder=tmp_path / "job" / "sources" / "in", **settings)
    assert source.splits() == ["in-1:0"] and source.first("in-1:0") == 9
    brokers.there["in-2"] = [(1, 5), (0, 7)]
    assert source.splits() == ["in-1:0", "in-2:0", "in-2:1"]
    # A topic that comes later is read whole, wherever the others began.
    assert [source.first(split) for split in source.splits()] == [9, 1, 0]
    monkeypatch.setattr(source, "topics_now", lambda: ["in-3"])
    assert source.topics_at(None) == ["in-3"]
    read = LoggedOffsets(({"in-2": {"0": 5}}, {"in-1": {"0": 9}}))
    assert source.topics_at(read) == ["in-1", "in-2", "in-3"]


def test_single_partitions_are_read_alone() -> None:
    source = source_of(Brokers(c=[(0, 2), (1, 5)]), topics=["c"], partitions={"c": [1]})
    assert source.splits() == ["c:1"] and source.first("c:1") == 1


def test_where_it_began_and_ends_is_kept(tmp_path) -> None:
    folder = tmp_path / "job" / "sources" / "in"
    settings = {"topics": ["c"], "starting_offsets": StartAtCommittedOffsets("ours"), "ending": EndAtLatest()}
    brokers = Brokers(c=[(0, 9), (1, 5)])
    source = connected(source_of(brokers, folder=folder, **settings), brokers, c=4)
    assert source.is_bounded and source.splits() == ["c:0", "c:1"]
    assert [source.first(split) for split in source.splits()] == [4, 1]
    # In another process, when everything has gone on.
    later = Brokers(c=[(2, 90), (1, 50), (0, 3)])
    again = connected(source_of(later, folder=folder, **settings), later, c=70)
    assert again.splits() == ["c:0", "c:1"], "what is added behind the end is not read"
    assert [again.first(split) for split in again.splits()] == [4, 1]
    assert [again.latest("c:0", 4, None), again.latest("c:0", 4, 2), again.end("c:1")] == [9, 6, 5]
    position = SplitPosition("in", {"c:0": 9, "c:1": 5})
    assert again.is_at_end(position) and not again.is_at_end(SplitPosition("in", {"c:0": 9, "c:1": 4}))
    assert again.__getstate__().keys().isdisjoint({"_planning_admin", "_admin", "_starts", "_ends"})


def test_what_a_savepoint_does_not_name_is_read_whole(tmp_path) -> None:
    brokers = Brokers(c=[(0, 9), (1, 5)])
    source = source_of(brokers, topics=["c"], starting_offsets=StartAtOffsets({"c": {0: 700}}))
    start = SourceStart(SplitPosition("in", {"c:0": 3}).to_json(), str(tmp_path), "x")
    assert connected(source.starting_at(start), brokers).first("c:1") == 1


def test_it_may_decode_but_not_as_a_part() -> None:
    source = KafkaRecordsSource("nowhere:1", pattern="in-.*", value=Json("n LONG", OnBadRecord.DROP))
    decoded = ["key", "value", "topic", "partition", "offset", "timestamp"]
    assert source.record_type.names == decoded
    assert source.drops_records and not source_of(Brokers()).drops_records
    assert source.add_own_time().record_type.names == [*decoded, "_fs_time"]
    assert not source.has_side_outputs and source.side_uids("in") == ()
    with_letters = KafkaRecordsSource("nowhere:1", ["in"], value=Json("n LONG", DeadLetter("bad")))
    assert with_letters.side_uids("in") == ("in-dead-letter",) and not with_letters.drops_records
    with pytest.raises(ConfigError, match="part 1 of a hybrid source decodes"):
        ended = KafkaRecordsSource("nowhere:1", ["a"], ending=EndAtLatest(), schema=source.record_type)
        HybridSource(ended, source)


def test_the_time_of_a_record_is_read_without_being_a_field() -> None:
    source = source_of(Brokers(c=[]))
    assert source.add_own_time().record_type.names == ["value", "_fs_time"]
    with_it = source_of(Brokers(c=[]), schema="value STRING, timestamp TIMESTAMP")
    assert with_it.add_own_time().record_type.names == ["value", "timestamp", "_fs_time"]


@pytest.mark.parametrize(
    "settings",
    [
        {"topics": "orders"},
        {"topics": []},
        {"pattern": "in-.*"},
        {"topics": [], "pattern": "[a&&b]"},
        {"topics": [], "pattern": "in-.*", "partitions": {"in-1": [0]}},
        {"partitions": {"out": [0]}},
        {"starting_offsets": StartAtCommittedOffsets()},
        {"starting_offsets": StartAtOffsets(), "starting_at_ms": 5},
        {"ending": "latest"},
        {"value": Raw()},
        {"value": Json("_topic STRING"), "metadata": ["topic"]},
        {"metadata": ["topic"]},
        {"schema": "value LONG"},
        {"schema": "user STRING"},
        {"schema": ""},
        {"starting_at_ms": -1},
        {"group_id": None},
        {"options": {"kafka.security.protocol": 5}},
    ],
)
def test_what_cannot_be_is_refused(settings) -> None:
    with pytest.raises((ConfigError, SchemaError)):
        KafkaRecordsSource(**{"bootstrap_servers": "nowhere:1", "topics": ["in"], **settings})
