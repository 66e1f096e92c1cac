"""What the log proves about a transaction: the judgements, and the stored form of a committable."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flinkish_spark.connectors.kafka.client import transactions
from flinkish_spark.connectors.kafka.client.fetch import Batch, LogSlice, Marker
from flinkish_spark.connectors.kafka.client.transactions import (
    Evidence,
    EvidenceReader,
    Fate,
    Finding,
    KafkaCommittable,
    judge_markers,
    judge_stable,
)
from flinkish_spark.core.errors import CorruptObjectError
from tests.support.clocks import ManualClock

PLACE = Evidence("t", 0, 100)
PRODUCER, EPOCH = 7, 3
OURS = Batch(98, 102, PRODUCER, EPOCH, 5)


def marker(kind: Marker, offset: int, producer: int = PRODUCER, epoch: int = EPOCH) -> Batch:
    return Batch(offset, offset, producer, epoch, 1, kind)


def stable(lso: int, *batches: Batch, aborted: tuple[tuple[int, int], ...] = ()) -> Fate | None:
    return fate(judge_stable(LogSlice(0, 0, lso, 999, aborted, batches), PLACE, PRODUCER, EPOCH))


def marked(*batches: Batch, there: bool = True) -> Fate | None:
    return fate(judge_markers(LogSlice(0, 0, -1, 999, (), batches), PLACE, PRODUCER, EPOCH, there))


def fate(finding: Finding | None) -> Fate | None:
    return None if finding is None else finding.fate


def test_a_record_below_the_last_stable_offset_was_committed() -> None:
    assert stable(101, OURS) is Fate.COMMITTED


def test_at_the_last_stable_offset_only_a_marker_can_tell() -> None:
    assert stable(100, OURS) is None


def test_the_brokers_list_of_aborted_transactions_decides() -> None:
    assert stable(200, OURS, aborted=((PRODUCER, 98),)) is Fate.ABORTED
    assert stable(200, OURS, aborted=((PRODUCER, 110),)) is Fate.COMMITTED  # our next transaction
    assert stable(200, OURS, aborted=((8, 90),)) is Fate.COMMITTED  # another producer's


@pytest.mark.parametrize("stranger", [Batch(98, 102, 8, EPOCH, 5), Batch(98, 102, PRODUCER, EPOCH + 1, 5)])
def test_a_strangers_record_at_our_place_is_no_evidence(stranger: Batch) -> None:
    assert stable(200, stranger) is Fate.GONE
    # Nor is it one if the stranger's transaction was aborted: ours may have been committed.
    assert stable(200, stranger, aborted=((stranger.producer_id, 98),)) is Fate.GONE


def test_a_compacted_place_is_left_to_the_markers() -> None:
    assert stable(200) is None
    assert stable(200, Batch(150, 151, 8, 0, 2)) is None
    assert stable(200, Batch(98, 102, PRODUCER, EPOCH, 0)) is None


def test_the_first_marker_of_our_producer_decides() -> None:
    others = marker(Marker.ABORT, 103, producer=8)
    assert marked(OURS, others, marker(Marker.COMMIT, 104), marker(Marker.ABORT, 110)) is Fate.COMMITTED
    assert marked(OURS, marker(Marker.ABORT, 104, epoch=EPOCH + 1)) is Fate.ABORTED  # fenced
    assert marked(OURS, others) is None


def test_a_marker_before_the_place_ended_an_earlier_transaction() -> None:
    assert marked(marker(Marker.COMMIT, 97), OURS) is None


def test_after_compaction_a_marker_of_another_epoch_proves_nothing() -> None:
    assert marked(marker(Marker.COMMIT, 120), there=False) is Fate.COMMITTED
    assert marked(marker(Marker.COMMIT, 120, epoch=EPOCH + 1), there=False) is Fate.GONE


def test_a_committable_survives_json() -> None:
    one = KafkaCommittable("id", PRODUCER, EPOCH, PLACE, 5)
    assert KafkaCommittable.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert one.to_json()["protocol_version"] == 3


@pytest.mark.parametrize(
    "change",
    [
        {"producer_id": -1},
        {"producer_epoch": "3"},
        {"records": 0},
        {"records": True},
        {"transactional_id": ""},
        {"protocol_version": 5},
        {"evidence": {"topic": "t", "partition": 0}},
        {"evidence": {"topic": "t", "partition": 0, "offset": -1}},
        {"evidence": None},
        {"more": 1},
    ],
)
def test_a_damaged_committable_is_refused(change: dict[str, object]) -> None:
    value = {**KafkaCommittable("id", PRODUCER, EPOCH, PLACE, 5).to_json(), **change}
    with pytest.raises(CorruptObjectError):
        KafkaCommittable.from_json(value)


class SlowLog:
    """A log of 1,000 records a slice, of which each takes a second to be read; a wire."""

    def __init__(self, end: int) -> None:
        self.clock, self.end, self.asked = ManualClock(), end, list[int]()

    def fetch_headers(self, _wire: object, _place: object, offset: int, *_: object) -> LogSlice:
        self.asked.append(offset)
        self.clock.now_ms += 1_000
        if offset == self.end:
            return LogSlice(0, 0, 100, self.end + 1, (), (marker(Marker.COMMIT, self.end),))
        last = min(offset + 999, self.end - 1)
        of = (PRODUCER, EPOCH) if offset == PLACE.offset else (9, 0)
        return LogSlice(0, 0, 100, self.end + 1, (), (Batch(offset, last, *of, 1_000),))


def test_a_scan_that_takes_too_long_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The marker lies ten seconds of reading behind the record: each question began anew, for ever."""
    log: Any = SlowLog(end=10_100)
    monkeypatch.setattr(transactions, "fetch_headers", log.fetch_headers)
    reader = EvidenceReader(log, patience_ms=2_000)
    fates = [reader.read(PLACE, PRODUCER, EPOCH).fate for _ in range(4)]
    assert fates[0] is Fate.UNDECIDED and fates[-1] is Fate.COMMITTED
    # Each question looks at the place first, and then behind what it has seen.
    behind = [offset for offset in log.asked if offset > PLACE.offset]
    assert behind[:10] == [*range(1_100, 10_101, 1_000)]
