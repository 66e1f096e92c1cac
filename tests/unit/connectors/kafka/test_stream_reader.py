"""The source's planner over a log that changes between its questions."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flinkish_spark.checkpoint.control import ControlFile
from flinkish_spark.connectors.kafka import stream_offsets as topic_watch
from flinkish_spark.connectors.kafka import stream_reader
from flinkish_spark.connectors.kafka.client import client as _pace
from flinkish_spark.connectors.kafka.client.client import Isolation
from flinkish_spark.connectors.kafka.ranges import ReadRanges
from flinkish_spark.connectors.kafka.stream_options import parse_stream
from flinkish_spark.connectors.kafka.stream_reader import KafkaPiece, KafkaStreamReader
from flinkish_spark.core.errors import GraphError, InputLostError
from flinkish_spark.core.stream_readers import ReadAllAvailable, ReadMaxRows
from flinkish_spark.protocol.alignment import encode_announced_channel
from flinkish_spark.protocol.control_offset import TimeOffer, Wake
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from flinkish_spark.transport.columns import PIECE, Kind

Place = tuple[str, int]
ALL = ReadAllAvailable()


class Log:
    """Stands in for OffsetFinder: first and last offsets by partition."""

    def __init__(self, **ends: int) -> None:
        self.first: dict[Place, int] = {(t, 0): 0 for t in ends}
        self.end: dict[Place, int] = {(t, 0): end for t, end in ends.items()}
        self.hidden: dict[Place, int] = {}
        self.wanted: set[str] = set(ends)

    def places(self) -> frozenset[Place]:
        missing = self.wanted - {t for t, _ in self.end}
        if missing:
            raise GraphError(f"the topic '{missing.pop()}' does not exist")
        return frozenset(self.end)

    def existing_places(self) -> frozenset[Place]:
        return frozenset(self.end)

    def starting(self) -> dict[Place, int]:
        return dict(self.end if self.starts_at_latest else self.first)

    starts_at_latest = False

    def earliest(self, places: Iterable[Place]) -> dict[Place, int]:
        return {place: self._known(self.first, place) for place in places}

    def latest(self, places: Iterable[Place], isolation: Isolation | None = None) -> dict[Place, int]:
        ends = self.end if isolation is None else {**self.end, **self.hidden}
        return {place: self._known(ends, place) for place in places}

    @staticmethod
    def _known(offsets: dict[Place, int], place: Place) -> int:
        if place not in offsets:
            raise InputLostError(f"{place} does not exist")
        return offsets[place]


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pace, "_LOSS_PAUSE_MS", 0)
    monkeypatch.setattr(topic_watch, "_LOOK_FOR_PARTITIONS_S", -1.0)


def reader(log: Log, **options: str) -> KafkaStreamReader:
    given = {"kafka.bootstrap.servers": "localhost:9092", "subscribe": "a", **options}
    return KafkaStreamReader(parse_stream(given), log)  # type: ignore[arg-type]


def ranges(pieces: Iterable[Any]) -> list[tuple[str, int, int, int]]:
    assert all(isinstance(p, KafkaPiece) for p in pieces)
    return [(p.range.topic, p.range.partition, p.range.start, p.range.end) for p in pieces]


def test_the_first_micro_batch_is_empty_and_logs_where_the_query_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_reader, "TELLS_READERS", True)
    log = Log(a=100)
    start = reader(log).initialOffset()
    logged = reader(log).latestOffset(start, ALL)
    assert logged == {"a": {"0": 0}}
    assert logged != start
    # Spark asks for the beginning again when it runs the micro-batch after a crash.
    log.first["a", 0] = 60
    again = reader(log)
    assert again.partitions(again.initialOffset(), logged) == []
    # What retention took meanwhile is noticed where it is read, and not skipped silently.
    end = again.latestOffset(logged, ALL)
    assert ranges(again.partitions(logged, end)) == [("a", 0, 0, 100)]


def test_where_available_now_is_one_micro_batch_the_first_one_has_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_reader, "TELLS_READERS", False)
    log = Log(a=100)
    log.starts_at_latest = True
    start = reader(log).initialOffset()
    log.end["a", 0] = 130
    one = reader(log)
    logged = one.latestOffset(start, ALL)
    assert ranges(one.partitions(start, logged)) == [("a", 0, 100, 130)]
    # Spark asks for the beginning again when it runs the micro-batch after a crash; 4.2 may be who does.
    monkeypatch.setattr(stream_reader, "TELLS_READERS", True)
    log.end["a", 0] = 150
    again = reader(log)
    assert ranges(again.partitions(again.initialOffset(), logged)) == [("a", 0, 100, 130)]
    # What comes then has the form of Spark's own source.
    end = again.latestOffset(logged, ALL)
    assert end == {"a": {"0": 150}}
    assert ranges(again.partitions(logged, end)) == [("a", 0, 130, 150)]


def test_its_first_micro_batch_keeps_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "TELLS_READERS", False)
    one = reader(Log(a=100), maxOffsetsPerTrigger="30")
    start = one.initialOffset()
    assert ranges(one.partitions(start, one.latestOffset(start, one.getDefaultReadLimit()))) == [
        ("a", 0, 0, 30)
    ]


def test_a_job_begins_again_where_it_began(tmp_path: Path) -> None:
    log = Log(a=10)
    log.starts_at_latest = True
    own = {"flinkish.first.offsets": str(tmp_path), "flinkish.control.path": str(tmp_path / "1.json")}
    start = reader(log, **own).initialOffset()
    log.end["a", 0] = 50
    # A rewind to before the first micro-batch; by another owner, with another control file.
    own["flinkish.control.path"] = str(tmp_path / "2.json")
    assert reader(log, **own).initialOffset() == start == {"a": {"0": 10}, "flinkish:checkpoint": 0}


def test_a_barrier_ends_every_partition_also_an_empty_one(tmp_path: Path) -> None:
    log = Log(a=10)
    log.first["a", 1], log.end["a", 1] = 0, 0
    control = tmp_path / "control.json"
    source = reader(
        log,
        minPartitions="4",
        **{"flinkish.control.path": str(control), "flinkish.first.offsets": str(tmp_path)},
    )
    start = source.initialOffset()
    control.write_text('{"checkpoint": 3}')
    end = source.latestOffset(start, ALL)
    pieces = source.partitions(start, end)
    assert ranges(pieces)[-1] == ("a", 1, 0, 0)
    assert [row for p in pieces for row in p.rows] == [
        (Kind.BARRIER, 3, encode_announced_channel(0, 2), 0),
        (Kind.BARRIER, 3, encode_announced_channel(1, 2), 0),
    ]
    # No trigger, no barrier; and nothing new is no micro-batch.
    assert source.latestOffset(end, ALL) == end
    log.end["a", 1] = 5
    later = source.latestOffset(end, ALL)
    assert ranges(source.partitions(end, later)) == [
        ("a", 1, 0, 1), ("a", 1, 1, 2), ("a", 1, 2, 3), ("a", 1, 3, 5),
    ]  # fmt: skip
    assert not any(p.rows for p in source.partitions(end, later))


def test_limits_and_the_least_number_of_records() -> None:
    log = Log(a=100)
    source = reader(log, minOffsetsPerTrigger="50", maxTriggerDelay="1h")
    # The first micro-batch with records does not wait.
    assert source.latestOffset({"a": {"0": 90}}, ALL) == {"a": {"0": 100}}
    log.end["a", 0] = 140
    assert source.latestOffset({"a": {"0": 100}}, ALL) == {"a": {"0": 100}}
    log.end["a", 0] = 150
    assert source.latestOffset({"a": {"0": 100}}, ALL) == {"a": {"0": 150}}
    assert source.latestOffset({"a": {"0": 100}}, ReadMaxRows(7)) == {"a": {"0": 107}}


def test_available_now_ends_where_it_was_when_it_began() -> None:
    log = Log(a=100)
    source = reader(log)
    source.prepareForTriggerAvailableNow()
    log.end["a", 0] = 200
    log.first["a", 1], log.end["a", 1] = 0, 9
    assert source.latestOffset({"a": {"0": 0}}, ALL) == {"a": {"0": 100}}
    assert source.latestOffset({"a": {"0": 100}}, ALL) == {"a": {"0": 100}}
    # A restart may have read beyond.
    assert source.latestOffset({"a": {"0": 150}}, ALL) == {"a": {"0": 150}}


def test_a_new_partition_is_read_from_its_beginning() -> None:
    log = Log(a=10)
    source = reader(log)
    log.first["a", 1], log.end["a", 1] = 0, 7
    end = source.latestOffset({"a": {"0": 10}}, ALL)
    assert end == {"a": {"0": 10, "1": 7}}
    assert ranges(source.partitions({"a": {"0": 10}}, end)) == [("a", 1, 0, 7)]
    log.first["a", 1] = 3
    with pytest.raises(InputLostError, match="a-1 from 0 to 2"):
        source.partitions({"a": {"0": 10}}, end)
    lenient = reader(log, failOnDataLoss="false")
    assert ranges(lenient.partitions({"a": {"0": 10}}, end)) == [("a", 1, 3, 7)]
    del log.first["a", 1], log.end["a", 1]
    assert ranges(lenient.partitions({"a": {"0": 10}}, end)) == []


@pytest.mark.parametrize("what", ["deleted", "made anew"])
def test_a_loss_stops_the_query(what: str) -> None:
    log = Log(a=100, b=100)
    source = reader(log, subscribe="a,b")
    start = {"a": {"0": 100}, "b": {"0": 100}}
    if what == "deleted":
        del log.end["b", 0]
    else:
        log.end["b", 0] = 40
    with pytest.raises(InputLostError, match=r"'b'|b-0 from 40 to 99"):
        source.latestOffset(start, ALL)


def test_without_fail_on_data_loss_the_rest_goes_on() -> None:
    log = Log(a=100, b=100)
    source = reader(log, subscribe="a,b", failOnDataLoss="false")
    start = {"a": {"0": 100}, "b": {"0": 100}}
    del log.end["b", 0]
    log.end["a", 0] = 120
    end = source.latestOffset(start, ALL)
    assert end == {"a": {"0": 120}}
    assert ranges(source.partitions(start, end)) == [("a", 0, 100, 120)]
    # Made anew and shorter: it goes on where it is now, and nothing is read twice or backwards.
    log.end["a", 0] = 40
    lower = source.latestOffset(end, ALL)
    assert lower == {"a": {"0": 40}}
    assert ranges(source.partitions(end, lower)) == []
    log.end["a", 0] = 45
    assert ranges(source.partitions(lower, source.latestOffset(lower, ALL))) == [("a", 0, 40, 45)]


@pytest.mark.parametrize("fails", ["true", "false"])
def test_an_open_transaction_is_no_loss_for_who_read_beyond_it(fails: str) -> None:
    """A checkpoint of Spark's own source, which reads uncommitted records, is continued."""
    log = Log(a=80)
    log.hidden["a", 0] = 100
    source = reader(log, failOnDataLoss=fails)
    assert source.latestOffset({"a": {"0": 100}}, ALL) == {"a": {"0": 100}}
    log.end["a", 0] = 130
    assert source.latestOffset({"a": {"0": 100}}, ALL) == {"a": {"0": 130}}


def test_a_task_gets_the_options_and_no_connection() -> None:
    source = reader(Log(a=1))
    copy = pickle.loads(pickle.dumps(source))
    assert vars(copy) == {"_options": vars(source)["_options"]}


def test_time_travels_in_the_offset_and_calls_are_a_piece_of_their_own(tmp_path: Path) -> None:
    log = Log(a=10)
    file = ControlFile.create_for_start(tmp_path, OwnerEpoch(1), 0)
    own = {"flinkish.first.offsets": str(tmp_path), "flinkish.control.path": str(file.path)}
    source = reader(log, **own)
    at = source.latestOffset(source.initialOffset(), ALL)
    assert at == {"a": {"0": 10}, "flinkish:checkpoint": 0}
    file.offer_time(TimeOffer(60_000, wake=Wake(4, {1: frozenset({0, 9})})))
    end = source.latestOffset(at, ALL)
    assert end["flinkish:watermark"] == 60_000
    (piece,) = source.partitions(at, end)
    again = KafkaPiece.of(pickle.loads(pickle.dumps(piece)).to_text())
    assert (again.range, again.rows) == (None, ((2, 0, 1, 0), (2, 0, 1, 9)))
    read = ReadRanges(replace(source._options, gives_pieces=True), ("a",), None, ("offset", "timestamp"))
    (rows,) = read(iter([pa.record_batch([pa.array([again.to_text()])], names=[PIECE])]))
    assert rows.schema.names == read.columns.names
    columns = ("_fs_kind", "_fs_checkpoint", "_fs_channel", "_fs_seq", "topic", "value", "_offset")
    found = [tuple(row[name] for name in columns) for row in rows.to_pylist()]
    assert found == [(2, 0, 1, 0, None, None, None), (2, 0, 1, 9, None, None, None)]
    file.offer(CheckpointId(3))
    later = source.latestOffset(end, ALL)
    assert later == {**end, "flinkish:checkpoint": 3}
    assert [type(piece) for piece in source.partitions(end, later)] == [KafkaPiece]
    assert source.latestOffset(later, ALL) == later


def test_so_many_offsets_a_second_and_no_flood_behind_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("flinkish_spark.connectors.kafka.stream_reader.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("flinkish_spark.connectors.kafka.stream_reader.time.sleep", lambda s: None)
    log = Log(a=1_000)
    paced = reader(log, **{"flinkish.max.offsets.per.second": "10"})
    at = paced.latestOffset(paced.initialOffset(), ALL)
    assert paced.latestOffset(at, ALL) == at == {"a": {"0": 0}}
    read = []
    for seconds in (0.5, 0.25, 0.01, 60, 0.15):
        clock[0] += seconds
        end = paced.latestOffset(at, ALL)
        read.append(end["a"]["0"] - at["a"]["0"])
        at = end
    assert read == [5, 2, 0, 10, 1]
    assert reader(log).latestOffset(at, ALL) == {"a": {"0": 1_000}}


def test_a_partition_is_not_left_behind_by_a_small_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("flinkish_spark.connectors.kafka.stream_reader.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("flinkish_spark.connectors.kafka.stream_reader.time.sleep", lambda s: None)
    log = Log(a=50, b=2)
    paced = reader(log, subscribe="a,b", **{"flinkish.max.offsets.per.second": "1"})
    at = paced.latestOffset(paced.initialOffset(), ALL)
    for _ in range(120):
        clock[0] += 1
        at = paced.latestOffset(at, ALL)
    assert at == {"a": {"0": 50}, "b": {"0": 2}}
