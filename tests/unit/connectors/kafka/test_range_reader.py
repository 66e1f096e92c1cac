"""Reading a range: what a reader may see, how far it reads ahead, and when it believes in a loss."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

from flinkish_spark.connectors.kafka.client.admin import TopicPattern
from flinkish_spark.connectors.kafka.client.batch_decoder import UnreadableBatchError, batches
from flinkish_spark.connectors.kafka.client.batches import encode_batches
from flinkish_spark.connectors.kafka.client.client import Isolation, WirePool
from flinkish_spark.connectors.kafka.client.codecs import Codec
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.fetch import FetchAnswer, FetchLimits, Marker, RawSlice
from flinkish_spark.connectors.kafka.client.reader import (
    FetchedBatches,
    OffsetRange,
    RangeFetches,
    RangeReader,
    _groups,
    record_schema,
    select_visible,
)
from flinkish_spark.connectors.kafka.client.settings import HARMLESS_OPTIONS, READER_OPTIONS, ReaderSettings
from flinkish_spark.core.errors import (
    AuthorizationError,
    BadRecordError,
    BrokerUnavailableError,
    ConfigError,
    EnvironmentFault,
    InputLostError,
)
from flinkish_spark.protocol.ids import Place
from tests.support.clocks import ManualClock
from tests.support.effort import seeds

COMMITTED, UNCOMMITTED = Isolation.READ_COMMITTED, Isolation.READ_UNCOMMITTED
PLACE: Place = ("t", 0)


# -- what a reader may see ----------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A batch as `select_visible` sees it, and what became of its transaction."""

    base_offset: int
    last_offset: int
    producer_id: int = -1
    is_transactional: bool = False
    marker: Marker | None = None
    transaction: int = -1

    @property
    def is_control(self) -> bool:
        return self.marker is not None

    @property
    def header(self) -> Entry:
        return self


@dataclass
class History:
    """A log that random producers wrote, and the end of each transaction: (first, end, how)."""

    log: list[Entry] = field(default_factory=list)
    transactions: dict[int, tuple[int, int, Marker | None]] = field(default_factory=dict)

    @classmethod
    def random(cls, rng: random.Random, steps: int = 60) -> History:
        history, offset = cls(), 0
        open_of: dict[int, int] = {}  # producer id -> number of its open transaction
        for _ in range(steps):
            producer = rng.randrange(4)
            ends = producer in open_of and rng.random() < 0.35
            records = 1 if ends else rng.randint(1, 5)
            last = offset + records - 1
            if ends:
                number, how = open_of.pop(producer), rng.choice(list(Marker))
                history.transactions[number] = (history.transactions[number][0], last, how)
                history.log.append(Entry(offset, last, producer, True, how))
            elif rng.random() < 0.2:
                history.log.append(Entry(offset, last, rng.choice([-1, 9])))
            else:
                number = open_of.setdefault(producer, len(history.transactions))
                history.transactions.setdefault(number, (offset, -1, None))
                history.log.append(Entry(offset, last, producer, True, None, number))
            offset = last + 1 + (rng.random() < 0.1)  # compaction leaves gaps
        return history

    @property
    def last_stable_offset(self) -> int:
        still_open = [first for first, _, how in self.transactions.values() if how is None]
        return min([self.log[-1].last_offset + 1, *still_open])

    def fetch(self, start: int, size: int) -> tuple[list[Entry], list[tuple[int, int]]]:
        """Answer as a broker under read_committed: batches and the aborted transactions they overlap."""
        found = [e for e in self.log if e.last_offset >= start and e.base_offset < self.last_stable_offset]
        found = found[:size]
        upper = found[-1].last_offset + 1 if found else start
        aborted = [
            (self.producer_of(number), first)
            for number, (first, end, how) in self.transactions.items()
            if how is Marker.ABORT and end >= start and first < upper
        ]
        return found, aborted

    def producer_of(self, transaction: int) -> int:
        return next(e.producer_id for e in self.log if e.transaction == transaction)

    def is_committed(self, entry: Entry) -> bool:
        return not entry.is_transactional or self.transactions[entry.transaction][2] is Marker.COMMIT


@pytest.mark.parametrize("seed", seeds(200))
def test_read_committed_shows_exactly_the_committed_batches(seed: int) -> None:
    rng = random.Random(seed)
    history = History.random(rng)
    expected = [
        e
        for e in history.log
        if e.base_offset < history.last_stable_offset and not e.is_control and history.is_committed(e)
    ]
    start = rng.randrange(history.log[-1].last_offset)
    position, seen = start, []
    while True:
        found, aborted = history.fetch(position, rng.randint(1, 6))
        if not found:
            break
        rng.shuffle(aborted)
        seen += list(select_visible(found, aborted, COMMITTED, lambda e: e.marker))
        position = found[-1].last_offset + 1
    assert seen == [e for e in expected if e.last_offset >= start]


@pytest.mark.parametrize("seed", seeds(20))
def test_read_uncommitted_shows_all_but_markers(seed: int) -> None:
    log = History.random(random.Random(seed)).log
    seen = select_visible(log, [(0, 0), (1, 0)], UNCOMMITTED, lambda e: e.marker)
    assert list(seen) == [e for e in log if not e.is_control]


def test_a_commit_marker_ends_no_aborted_transaction() -> None:
    # What the Java consumer does with a log that no coordinator writes: only ABORT ends the hiding.
    log = [
        Entry(0, 0, 7, True),
        Entry(1, 1, 7, True, Marker.COMMIT),
        Entry(2, 2, 7, True),
        Entry(3, 3, 7),
        Entry(4, 4, 7, True, Marker.ABORT),
        Entry(5, 5, 7, True),
    ]
    seen = select_visible(log, [(7, 0)], COMMITTED, lambda e: e.marker)
    assert [e.base_offset for e in seen] == [3, 5]


def test_only_markers_that_matter_are_looked_into() -> None:
    asked: list[int] = []

    def marker_of(entry: Entry) -> Marker | None:
        asked.append(entry.base_offset)
        return entry.marker

    log = [Entry(0, 0, 7, True), Entry(1, 1, 8, True, Marker.COMMIT), Entry(2, 2, 7, True, Marker.ABORT)]
    assert not list(select_visible(log, [(7, 0)], COMMITTED, marker_of))
    assert asked == [2]


# -- a log in memory ----------------------------------------------------------------------------


def batch(
    base_offset: int,
    records: int,
    *,
    codec: Codec = Codec.NONE,
    value: bytes = b"v" * 20,
    timestamp_ms: int = 1_000,
) -> bytes:
    values = pa.array([value] * records, pa.binary())
    keys = pa.array([None] * records, pa.binary())
    (made,) = encode_batches(
        keys,
        values,
        None,
        timestamp_ms,
        producer_id=1,
        producer_epoch=0,
        base_sequence=0,
        codec=codec,
        max_batch_bytes=10**9,
    )
    return struct.pack(">q", base_offset) + made.data[8:]


class Answered(bytes):
    """The records of an answer, which count themselves as long as somebody has them."""

    alive = 0
    most_alive = 0

    def __new__(cls, data: bytes) -> Answered:
        cls.alive += 1
        cls.most_alive = max(cls.most_alive, cls.alive)
        return super().__new__(cls, data)

    def __del__(self) -> None:
        type(self).alive -= 1


@dataclass
class FakeLog:
    """A partition that answers Fetches; `faults` are what the next answers are instead."""

    batches: list[tuple[int, int, bytes]] = field(default_factory=list)  # (first, last, data)
    start: int = 0
    high_watermark: int = 0
    last_stable_offset: int | None = None
    faults: list[Any] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    limits: list[FetchLimits] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    @classmethod
    def of(cls, *sizes: int) -> FakeLog:
        log = cls()
        for records in sizes:
            first = log.high_watermark
            log.high_watermark = first + records
            log.batches.append((first, first + records - 1, batch(first, records)))
        return log

    def send(self, offsets: Mapping[Place, int], limits: FetchLimits, *, connect_within_ms: int) -> Sent:
        self.asked.append(offsets[PLACE])
        self.limits.append(limits)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        # The broker answers at once: what is in flight may be in memory already.
        return Sent(self, self.answer(offsets[PLACE]))

    def answer(self, offset: int) -> FetchAnswer | Exception:
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, int):
                return {PLACE: RawSlice(fault)}
            if fault is not None:
                return fault
        stable = self.high_watermark if self.last_stable_offset is None else self.last_stable_offset
        if not self.start <= offset <= self.high_watermark:
            return {PLACE: RawSlice(1)}
        found = next((data for _, last, data in self.batches if last >= offset), b"")
        cut_off = batch(10**6, 3)[:40] if found else b""
        records = Answered(found + cut_off) if found else b""
        return {PLACE: RawSlice(0, self.start, stable, self.high_watermark, (), records)}

    def bounds(self) -> tuple[int, int]:
        return self.start, self.high_watermark


@dataclass
class Sent:
    log: FakeLog
    answered: FetchAnswer | Exception | None

    def result(self) -> FetchAnswer:
        self.log.in_flight -= 1
        answer, self.answered = self.answered, None
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer


class Reading:
    """A reading of a fake log, and how long it took."""

    def __init__(self, log: FakeLog, start: int, end: int, **settings: Any) -> None:
        self.clock = ManualClock()
        wanted = OffsetRange(*PLACE, start, end)
        self.fetches = RangeFetches(log, log.bounds, wanted, ReaderSettings(**settings), self.clock)

    def bases(self) -> list[int]:
        found = []
        while (taken := self.fetches.take()) is not None:
            found += [raw.header.base_offset for raw in taken.batches]
        return found


LOST = BrokerUnavailableError("gone", why="the connection was lost")


# -- reading ahead ------------------------------------------------------------------------------


def test_the_next_fetch_is_sent_before_the_batches_are_handed_out() -> None:
    log = FakeLog.of(5, 5, 5)
    reading = Reading(log, 0, 15)
    assert reading.fetches.take() is not None
    assert (log.asked, log.in_flight) == ([0, 5], 1)
    assert reading.bases() == [5, 10]
    assert log.asked == [0, 5, 10]


def test_two_answers_are_in_memory_at_most() -> None:
    Answered.most_alive = Answered.alive = 0
    log = FakeLog.of(*[3] * 50)
    fetches = Reading(log, 0, 150).fetches
    count = 0
    while (taken := fetches.take()) is not None:
        count += len(taken.batches)
        del taken
    assert count == 50
    assert (log.most_in_flight, Answered.most_alive, Answered.alive) == (1, 2, 0)


def test_nothing_is_asked_beyond_the_end_of_the_range() -> None:
    log = FakeLog.of(5, 5, 5)
    assert Reading(log, 2, 10).bases() == [0, 5]
    assert Reading(log, 7, 8).bases() == [5]
    assert log.asked == [2, 5, 7]


def test_a_fetch_of_what_is_there_never_waits() -> None:
    log = FakeLog.of(5, 5)
    Reading(log, 0, 10, fetch_max_wait_ms=9_000, fetch_min_bytes=10**6).bases()
    assert {(limits.max_wait_ms, limits.min_bytes) for limits in log.limits} == {(0, 0)}


def test_a_small_range_asks_for_little() -> None:
    log = FakeLog.of(5, 5, 5)
    Reading(log, 0, 5).bases()
    Reading(log, 0, 15, max_partition_fetch_bytes=70_000).bases()
    assert [limits.partition_max_bytes for limits in log.limits] == [65_536] * 4
    log.batches = [(0, 4, batch(0, 5, value=b"x" * 100_000)), *log.batches[1:]]
    log.limits.clear()
    Reading(log, 0, 15).bases()
    first, second, third = (limits.partition_max_bytes for limits in log.limits)
    assert first == third == 65_536
    assert 1_000_000 < second < 1_010_000  # ten more of what the first answer held


def test_a_range_whose_rest_holds_no_record_ends() -> None:
    log = FakeLog.of(5)
    log.high_watermark = 9  # the last segment was compacted to nothing
    reading = Reading(log, 0, 9)
    assert (reading.bases(), reading.clock.now_ms) == ([0], 0)
    assert Reading(FakeLog(high_watermark=9), 3, 8).bases() == []
    assert Reading(log, 4, 4).bases() == []


def test_after_a_lost_connection_reading_goes_on_where_it_was() -> None:
    log = FakeLog.of(5, 5, 5)
    log.faults = [LOST, None, LOST, 6, LOST]
    assert Reading(log, 0, 15).bases() == [0, 5, 10]


def test_a_throttled_client_asks_again() -> None:
    log = FakeLog.of(5)
    log.faults = [{}, {}]
    assert Reading(log, 0, 5).bases() == [0]


def test_without_progress_reading_fails_in_time() -> None:
    log = FakeLog.of(5)
    log.faults = [LOST] * 10_000
    reading = Reading(log, 0, 5, default_api_timeout_ms=5_000)
    with pytest.raises(BrokerUnavailableError, match=r"t-0 offsets 0 to 4.*connection was lost"):
        reading.bases()
    assert 5_000 <= reading.clock.now_ms < 6_000


def test_an_open_transaction_in_the_range_is_waited_for_then_named() -> None:
    log = FakeLog.of(5, 5)
    log.batches.pop()
    log.last_stable_offset = 5
    reading = Reading(log, 0, 10, default_api_timeout_ms=5_000)
    with pytest.raises(BrokerUnavailableError, match="A transaction is open at offset 5"):
        reading.bases()
    assert log.limits[-1].max_wait_ms == 500


@pytest.mark.parametrize(("code", "error"), [(29, AuthorizationError), (76, EnvironmentFault)])
def test_what_asking_again_cannot_change_fails_at_once(code: int, error: type[Exception]) -> None:
    log = FakeLog.of(5)
    log.faults = [code]
    reading = Reading(log, 0, 5)
    with pytest.raises(error, match=str(code)):
        reading.bases()
    assert reading.clock.now_ms == 0


# -- losses -------------------------------------------------------------------------------------


def test_a_start_below_the_log_is_a_loss_after_two_seconds() -> None:
    log = replace(FakeLog.of(5, 5), start=5)
    reading = Reading(log, 2, 10)
    with pytest.raises(
        InputLostError, match=r"offsets 2 to 4 of topic 't' partition 0.*starts at 5"
    ) as caught:
        reading.bases()
    assert 2_000 <= reading.clock.now_ms < 3_000
    assert (caught.value.facts["missing_start"], caught.value.facts["missing_end"]) == (2, 5)


def test_an_end_beyond_the_log_is_a_loss_after_two_seconds() -> None:
    reading = Reading(FakeLog.of(5), 0, 9)
    with pytest.raises(InputLostError, match=r"offsets 5 to 8.*ends at 5"):
        reading.bases()
    assert 2_000 <= reading.clock.now_ms < 3_000


def test_losses_are_skipped_and_noted_if_that_is_wanted() -> None:
    log = replace(FakeLog.of(5, 5, 5), start=5)
    log.batches.pop(0)
    reading = Reading(log, 2, 20, fail_on_data_loss=False)
    assert reading.bases() == [5, 10]
    assert [str(loss.range) for loss in reading.fetches.losses] == [
        "t-0 offsets 2 to 4",
        "t-0 offsets 15 to 19",
    ]


@pytest.mark.parametrize("settings", [{}, {"fail_on_data_loss": False}])
def test_a_range_that_lies_outside_the_log_is_lost_as_a_whole(settings: dict[str, Any]) -> None:
    for log in (replace(FakeLog.of(5), start=5), FakeLog.of(2), FakeLog()):
        reading = Reading(log, 3, 5, **settings)
        if settings:
            assert reading.bases() == []
            assert [(loss.range.start, loss.range.end) for loss in reading.fetches.losses] == [(3, 5)]
        else:
            with pytest.raises(InputLostError, match="offsets 3 to 4"):
                reading.bases()


def test_a_topic_that_is_gone_is_a_loss() -> None:
    log = FakeLog.of(5, 5)
    log.faults = [None, *[3] * 1_000]
    with pytest.raises(InputLostError, match=r"offsets 5 to 9.*does not know the topic"):
        Reading(log, 0, 10).bases()


def test_a_broker_that_comes_up_is_not_a_loss() -> None:
    """For a moment it knows no topic, then an early end of the log, then all."""
    log = FakeLog.of(5, 5)
    short = {PLACE: RawSlice(0, 0, 5, 5)}
    log.faults = [None, LOST, 3, 3, 5, short, short, {PLACE: RawSlice(0, 0, 6, 6)}]
    assert Reading(log, 0, 10).bases() == [0, 5]


def test_a_doubt_starts_anew_when_less_is_missing() -> None:
    """A log that is still being opened shows a little more with every answer."""
    log = FakeLog.of(10)
    ends = [{PLACE: RawSlice(0, 0, end, end)} for end in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)]
    log.faults = list(ends)
    reading = Reading(log, 0, 10)
    assert reading.bases() == [0]
    assert reading.clock.now_ms > 2_000


# -- columns ------------------------------------------------------------------------------------


def decoded(data: bytes, start: int, end: int, asked: int = 0, **settings: Any) -> list[Any]:
    reader = RangeReader(KafkaConnection("a:1"), ReaderSettings(**settings))
    fetched = FetchedBatches(list(batches(data)), (), asked)
    return list(reader._decode(OffsetRange("t", 3, start, end), fetched))


def test_small_batches_become_one_and_are_cut_to_the_range() -> None:
    data = batch(10, 5) + batch(15, 5) + batch(30, 5) + batch(40, 5)
    (found,) = decoded(data, 12, 33)
    assert found.schema == record_schema(include_headers=False)
    assert found["offset"].to_pylist() == [12, 13, 14, 15, 16, 17, 18, 19, 30, 31, 32]
    assert set(found["timestamp"].cast(pa.int64()).to_pylist()) == {1_000_000}
    assert set(zip(found["topic"].to_pylist(), found["partition"].to_pylist(), strict=True)) == {("t", 3)}
    assert decoded(data, 20, 30) == decoded(b"", 0, 9) == []
    (found,) = decoded(data, 41, 42, include_headers=True)
    assert found["headers"].to_pylist() == [None]


def with_time(base_offset: int, timestamp_ms: int) -> bytes:
    """Return a batch with one record, whatever its time: not even ours would write each."""
    made = bytearray(batch(base_offset, 1))
    made[27:43] = struct.pack(">qq", timestamp_ms, timestamp_ms)
    made[17:21] = struct.pack(">I", crc32c(bytes(made[21:])))
    return bytes(made)


@pytest.mark.parametrize(
    ("timestamp_ms", "micros"),
    [
        (-62_135_596_800_000, -62_135_596_800_000_000),  # 0001-01-01
        (253_402_300_799_999, 253_402_300_799_999_000),  # 9999-12-31T23:59:59.999
        (-5, -5_000),
        (-1, -1_000),  # what Spark's reader gives of a record without a time, too
    ],
)
def test_times_of_the_years_1_to_9999_are_exact(timestamp_ms: int, micros: int) -> None:
    (found,) = decoded(with_time(7, timestamp_ms), 0, 9)
    assert found["timestamp"].cast(pa.int64()).to_pylist() == [micros]


@pytest.mark.parametrize(
    "timestamp_ms",
    [1_767_225_600_000_000_000, 1_767_225_600_000_000, 253_402_300_800_000, -62_135_596_800_001, -(2**63)],
)
def test_any_other_time_is_a_bad_record_with_its_place(timestamp_ms: int) -> None:
    data = batch(5, 2) + with_time(7, timestamp_ms) + batch(8, 1)
    with pytest.raises(
        BadRecordError, match=f"topic t, partition 3, offset 7 has the timestamp {timestamp_ms}"
    ):
        decoded(data, 5, 9)
    assert sum(len(part) for part in decoded(data, 5, 7)) == 2, "of what is not read nothing is said"


def test_deleted_records_that_their_batch_still_holds_are_not_read() -> None:
    """DeleteRecords moves the log's start into a batch; the broker sends the batch whole."""
    (found,) = decoded(batch(10, 10), 10, 30, asked=16)
    assert found["offset"].to_pylist() == [16, 17, 18, 19]


def test_damaged_batches_are_noticed_unless_nobody_wants_to_know() -> None:
    data = bytearray(batch(0, 1, value=b"abc"))
    data[data.index(b"abc")] ^= 1
    with pytest.raises(UnreadableBatchError, match="offset 0"):
        decoded(bytes(data), 0, 1)
    assert decoded(bytes(data), 0, 1, check_crcs=False)[0]["value"].to_pylist() == [b"`bc"]


# -- settings -----------------------------------------------------------------------------------


def test_settings_go_by_kafkas_names() -> None:
    settings = ReaderSettings.from_options(
        {
            "kafka.fetch.max.bytes": "1000",
            "max.partition.fetch.bytes": "2000",
            "fetch.max.wait.ms": "20",
            "fetch.min.bytes": "3",
            "check.crcs": "FALSE",
            "kafka.request.timeout.ms": "4000",
            "default.api.timeout.ms": "5000",
            "isolation.level": "read_uncommitted",
            "kafka.max.poll.records": "5000",
            "kafka.client.rack": " a-rack ",
        },
        include_headers=True,
    )
    known = ReaderSettings(
        UNCOMMITTED, True, True, 1000, 2000, 20, 3, False, 4000, 5000, client_rack="a-rack"
    )
    assert settings == known
    assert settings.fetch_limits() == FetchLimits(UNCOMMITTED, 1000, 2000, 4000, rack="a-rack")
    assert settings.waiting_limits() == FetchLimits(UNCOMMITTED, 1000, 2000, 4000, 20, 3, "a-rack")
    assert not READER_OPTIONS & HARMLESS_OPTIONS


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("kafka.group.id", "g", r"known are check\.crcs, .*fetch\.max\.bytes"),
        ("fetch.max.bytes", "many", "whole number"),
        ("fetch.max.bytes", "0", "at least 1"),
        ("check.crcs", "maybe", "true or false"),
        ("isolation.level", "serializable", "read_committed or read_uncommitted"),
    ],
)
def test_settings_that_cannot_be_used_are_named(option: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        ReaderSettings.from_options({option: value})
    assert option in str(caught.value)


def test_an_answer_fits_what_the_client_can_receive() -> None:
    limits = ReaderSettings(fetch_max_bytes=2**31 - 1, max_partition_fetch_bytes=2**31 - 1).fetch_limits()
    assert limits.max_bytes < 100_000_000
    assert limits.partition_max_bytes < 100_000_000


def test_no_answer_is_held_back_for_longer_than_its_request_may_take() -> None:
    settings = ReaderSettings(fetch_max_wait_ms=90_000, default_api_timeout_ms=1)
    assert settings.waiting_limits().max_wait_ms == 2_000
    assert settings.fetch_limits().request_timeout_ms == settings.patience_ms == 4_000


@pytest.mark.parametrize("numbers", [(0, 5, 4), (0, -1, 4), (-1, 0, 4)])
def test_a_range_is_checked(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="there is no range"):
        OffsetRange("t", *numbers)


def test_much_is_decoded_at_once_but_not_too_much() -> None:
    plain = batch(0, 10, value=b"x" * 100_000)
    packed = batch(0, 10, value=os.urandom(50_000) * 2, codec=Codec.ZSTD)
    raws = list(batches(plain * 20 + packed * 100))
    sizes = [len(group) for group in _groups(raws)]
    assert sum(sizes) == 120
    assert sizes[:2] == [8, 8]
    assert max(sizes[3:]) == 8 * 1024 * 1024 // (8 * len(raws[-1].body))
    assert [len(group) for group in _groups(raws[:2])] == [2]


# -- patterns, pool -----------------------------------------------------------------------------


def test_a_pattern_matches_whole_names() -> None:
    pattern = TopicPattern(r"orders-\d+|returns")
    assert [t for t in ("orders-1", "orders-", "xorders-1", "returns", "returns2") if pattern.matches(t)] == [
        "orders-1",
        "returns",
    ]


@pytest.mark.parametrize("text", ["(", r"\p{Alpha}+", "[a-z&&[^b]]", "[a[b]]", "(?<name>x)"])
def test_a_pattern_that_java_reads_otherwise_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="topic pattern"):
        TopicPattern(text)


class FakeWire:
    def __init__(self, connection: KafkaConnection) -> None:
        self.connection, self.closed = connection, 0

    def close(self) -> None:
        self.closed += 1


def test_idle_wires_are_lent_again_to_equal_connections() -> None:
    pool = WirePool(clock=ManualClock(), make=FakeWire)  # type: ignore[arg-type]
    first = pool.borrow(KafkaConnection("a:1", {"client.id": "x"}))
    assert pool.borrow(KafkaConnection("a:1", {"client.id": "x"})) is not first
    pool.give_back(first)
    assert pool.borrow(KafkaConnection("a:1")) is not first
    with pool.wire(KafkaConnection("a:1", {"kafka.client.id": "x"})) as again:
        assert again is first
    assert first.closed == 0
    pool.close()
    assert first.closed == 1


def test_as_many_wires_wait_as_were_lent_and_not_for_long() -> None:
    clock = ManualClock()
    pool = WirePool(clock=clock, make=FakeWire, idle_ms=60_000)  # type: ignore[arg-type]

    def borrowed() -> list[Any]:
        # A task whose pass has thirty sinks has thirty at a time.
        return [pool.borrow(KafkaConnection("a:1")) for _ in range(30)]

    wires = borrowed()
    for wire in wires:
        pool.give_back(wire)
    again = borrowed()
    assert {id(wire) for wire in again} == {id(wire) for wire in wires}
    for wire in again:
        pool.give_back(wire)
    clock.sleep_ms(60_001)
    assert pool.borrow(KafkaConnection("a:1")) not in wires
    assert all(wire.closed == 1 for wire in wires)


def test_a_fork_leaves_its_parents_wires_alone() -> None:
    pool = WirePool(clock=ManualClock(), make=FakeWire)  # type: ignore[arg-type]
    wire: Any = pool.borrow(KafkaConnection("a:1"))
    pool.give_back(wire)
    with pool._idle():  # another thread of the parent holds it while the child is forked
        child = os.fork()
        if child == 0:
            other: Any = pool.borrow(KafkaConnection("a:1"))
            os._exit(0 if other is not wire and wire.closed == 0 else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert pool.borrow(KafkaConnection("a:1")) is wire
