"""What a watcher of the job directory and of both sinks concludes."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from demo.decisions import DecisionBook
from demo.readers import UNMARKED, SinkReader, batch_of, checkpoint_of
from demo.verify import Difference, partial_checkpoints
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.decisions import Decision, Receipt, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import SinkAck, StagedBatch, TaskAck

KAFKA, DELTA = "totals-kafka", "totals-delta"


def staged(batch: int, rows: int, lineage: int = 0) -> StagedBatch:
    acks = tuple(SinkAck(sink, (TaskAck(0, rows, 0),)) for sink in (KAFKA, DELTA))
    return StagedBatch(Lineage(lineage), BatchId(batch), OwnerEpoch(1), batch + 1, acks, ())


def decide(job_dir: Path, checkpoint: int, *batches: StagedBatch, receipt: bool = True) -> None:
    directory = JobDir(LocalStore(job_dir))
    verdict = Verdict.COMMIT if batches else Verdict.ABORT
    decision = Decision(CheckpointId(checkpoint), verdict, OwnerEpoch(1), 0, "", batches=batches)
    directory.create_decision(decision)
    if receipt and batches:
        directory.create_receipt(Receipt(CheckpointId(checkpoint), OwnerEpoch(1), 0))


def test_the_book_remembers_what_the_job_deletes(tmp_path: Path) -> None:
    book = DecisionBook(StoreSpec(str(tmp_path)))
    decide(tmp_path, 1)
    decide(tmp_path, 2, staged(0, 10), staged(1, 5))
    book.refresh()
    (tmp_path / "checkpoints/2/decision.json").unlink()
    (tmp_path / "checkpoints/2/receipt.json").unlink()
    decide(tmp_path, 3, staged(2, 1, lineage=1), receipt=False)
    book.refresh()
    assert book.aborted == {1}
    assert book.of_batch == {"0/0": 2, "0/1": 2, "1/2": 3}
    assert (book.confirmed, book.newest_confirmed) == (1, 2)
    assert book.checkpoints[2].rows_of(KAFKA) == 15


def test_a_receipt_that_comes_later_is_noticed(tmp_path: Path) -> None:
    book = DecisionBook(StoreSpec(str(tmp_path)))
    decide(tmp_path, 1, staged(0, 10), receipt=False)
    book.refresh()
    assert book.newest_confirmed == 0
    JobDir(LocalStore(tmp_path)).create_receipt(Receipt(CheckpointId(1), OwnerEpoch(1), 0))
    book.refresh()
    assert book.newest_confirmed == 1


class TestReader:
    """The reader with its eyes replaced."""

    @pytest.fixture
    def reader(self, tmp_path: Path) -> SinkReader:
        place = StoreSpec(str(tmp_path))
        return SinkReader("none:1", "totals", 1, tmp_path, place, kafka_sink=KAFKA, delta_sink=DELTA)

    def look(self, reader: SinkReader, kafka: dict[str, int], delta: dict[str, int]) -> None:
        reader._new_in_topic = lambda consumer: Counter(kafka)  # type: ignore[method-assign]
        reader._new_in_table = lambda: Counter(delta)  # type: ignore[method-assign]
        reader._look(None)

    def test_rows_of_a_decided_checkpoint_are_fine(self, tmp_path: Path, reader: SinkReader) -> None:
        decide(tmp_path, 1, staged(0, 10), receipt=False)
        self.look(reader, {"0/0": 10}, {"1": 10})
        assert reader.undecided_rows == 0
        assert (reader.kafka_rows, reader.delta_rows) == (10, 10)

    def test_rows_without_a_decision_are_violations_for_ever(
        self, tmp_path: Path, reader: SinkReader
    ) -> None:
        self.look(reader, {"0/0": 4}, {"1": 3})
        decide(tmp_path, 1, staged(0, 4))
        self.look(reader, {}, {})
        assert reader.undecided_rows == 7
        assert "4 rows of micro-batch 0/0 visible in totals-kafka" in str(reader.violations[0])

    def test_rows_that_name_no_batch_are_violations(self, reader: SinkReader) -> None:
        self.look(reader, {UNMARKED: 1}, {UNMARKED: 1})
        assert reader.undecided_rows == 2

    def test_the_skew_is_that_of_the_slowest_pair(self, tmp_path: Path, reader: SinkReader) -> None:
        decide(tmp_path, 1, staged(0, 1), staged(1, 1))
        self.look(reader, {"0/0": 1}, {})
        time.sleep(0.03)
        self.look(reader, {"0/1": 1}, {"1": 2})
        assert 25 <= reader.max_skew_ms() < 1_000

    def test_a_checkpoint_in_part_is_counted_once_for_each_sink(
        self, tmp_path: Path, reader: SinkReader
    ) -> None:
        decide(tmp_path, 1, staged(0, 10), staged(1, 5))
        decide(tmp_path, 2, staged(2, 1), receipt=False)
        reader.book.refresh()
        whole = partial_checkpoints(reader, Counter({"0/0": 10, "0/1": 5}), Counter({1: 15}))
        torn = partial_checkpoints(reader, Counter({"0/0": 10}), Counter({1: 16}))
        assert whole == ()
        assert [(one.sink, one.decided_rows, one.visible_rows) for one in torn] == [
            (KAFKA, 15, 10),
            (DELTA, 15, 16),
        ]


def test_multisets_are_compared_not_distinct_rows() -> None:
    expected, found = Counter({("a", 1, 1): 1, ("b", 1, 1): 1}), Counter({("a", 1, 1): 2})
    difference = Difference.between(expected, found)
    assert (difference.lost, difference.duplicated) == (1, 1)


def test_origins_are_read_from_header_and_mark() -> None:
    assert batch_of([("trace", b"1"), ("flinkish-batch", b"0/7")]) == "0/7"
    assert batch_of([]) == UNMARKED
    assert checkpoint_of((("other", 9), (f"flinkish-{'0' * 32}-{DELTA}", 4)), DELTA) == "4"
    assert checkpoint_of((("flinkish-x-other", 4),), DELTA) == UNMARKED
