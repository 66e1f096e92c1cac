"""Kafka as a source of splits; the brokers are a stub (real ones in tests/broker)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flinkish_spark.clock import SystemClock
from flinkish_spark.errors import ConfigError, InputLostError, SchemaError
from flinkish_spark.sources import KafkaRecordsSource
from flinkish_spark.sources import kafka_records as module
from flinkish_spark.sources.kafka_records import _by_topic


class Brokers:
    """Partitions that begin and end where the test says."""

    def __init__(self, **topics: list[tuple[int, int]]) -> None:
        self.there, self.asked = topics, 0

    def topics(self, names):
        self.asked += 1
        return {n: SimpleNamespace(partitions=len(self.there[n])) for n in names if n in self.there}

    def earliest(self, places):
        return {(t, p): self.there[t][p][0] for t, p in places}

    def latest(self, places, isolation):
        return {(t, p): self.there[t][p][1] for t, p in places}

    def at_timestamps(self, wanted, isolation):
        return {(t, p): 5 if self.there[t][p][1] > 5 else None for t, p in wanted}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(SystemClock, "sleep_ms", lambda self, ms: None)


def source_of(brokers, **settings):
    source = KafkaRecordsSource("nowhere:1", ["a:b", "c"], **settings).bound("in")
    source.__dict__["_positions"] = brokers
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
    assert _by_topic({"a:b:0": 3, "c:1": 4, "c:0": 5}) == {"a:b": {"0": 3}, "c": {"1": 4, "0": 5}}


def test_it_may_begin_at_a_time() -> None:
    source = source_of(Brokers(**{"a:b": [(3, 9)], "c": [(0, 2)]}), starting_at_ms=100)
    assert source.first("a:b:0") == 5 and source.first("c:0") == 2


def test_what_is_gone_is_believed_when_it_stays(impatient) -> None:
    source = source_of(Brokers(c=[(0, 2)]))
    with pytest.raises(InputLostError, match="'a:b' was deleted"):
        source.splits()
    assert source.latest("c:0", 7, None) == 2, "the reader refuses an end that lies before the start"


@pytest.mark.parametrize(
    "settings",
    [
        {"topics": "orders"},
        {"topics": []},
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
