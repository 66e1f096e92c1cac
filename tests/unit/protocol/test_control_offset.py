"""What the driver tells a running query, and how sources give it out: barriers, watermarks, calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.checkpoint.control import ControlFile
from flinkish_spark.connectors.control_source import ControlReader
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.protocol.control_offset import ControlOffset, TimeOffer, Wake
from flinkish_spark.protocol.event_time import MAX_WATERMARK_MS
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, OwnerEpoch
from flinkish_spark.transport import columns as C

OLD = {"flinkish:checkpoint": 3}
WAKE, BARRIER = int(C.Kind.WAKE), int(C.Kind.BARRIER)


class Asked:
    """A control file, and the one scan that reads it."""

    def __init__(self, folder: Path) -> None:
        self.file = ControlFile.create_for_start(folder, OwnerEpoch(1), 0)
        self.reader = ControlReader(str(self.file.path))
        self.at = self.reader.initialOffset()

    def next_rows(self) -> list[tuple[int, ...]] | None:
        """Return the rows of the next micro-batch; None if there is none."""
        before, self.at = self.at, json.loads(json.dumps(self.reader.latestOffset(self.at, None)))
        if self.at == before:
            return None
        found = self.reader.partitions(before, self.at)
        assert len(found) <= 1
        return [row for partition in found for row in self.reader.read(partition)]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


def test_an_offset_without_event_time_is_a_checkpoint_and_nothing_else() -> None:
    assert ControlOffset.from_json(OLD) == ControlOffset(3)
    assert ControlOffset(3).to_json() == OLD
    assert ControlOffset().to_json() == {"flinkish:checkpoint": 0}


def test_an_offset_says_everything_again() -> None:
    wake = Wake(12, {0: frozenset({0, 5, 127}), 4: frozenset({3})})
    for time in (TimeOffer(-5), TimeOffer(MAX_WATERMARK_MS, has_ended=True), TimeOffer(7, wake=wake)):
        offset = ControlOffset(9, time)
        assert "flinkish:watermarks" not in offset.to_json()
        assert ControlOffset.from_json(json.loads(json.dumps(offset.to_json()))) == offset
    for further in (
        TimeOffer(-5, above={"tops": 6}),
        TimeOffer(above={"tops": -7, "sums": MAX_WATERMARK_MS}),
    ):
        offset = ControlOffset(9, further)
        assert ControlOffset.from_json(json.loads(json.dumps(offset.to_json()))) == offset


@pytest.mark.parametrize(
    "member",
    [
        {"flinkish:watermark": "soon"},
        {"flinkish:watermark": True},
        {"flinkish:watermarks": 5},
        {"flinkish:drain": -1},
        {"flinkish:drain": True},
        {"flinkish:watermarks": {"sums": "soon"}},
        {"flinkish:watermarks": {"../sums": 5}},
        {"flinkish:watermark": 5, "flinkish:watermarks": {"sums": 5}},
        {"flinkish:wake": [1, [[0, 3]]]},
        {"flinkish:wake": [-1, []]},
        {"flinkish:wake": 4},
    ],
)
def test_an_offset_that_is_none_is_refused(member: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ControlOffset.from_json({**OLD, **member})


def test_a_micro_batch_drains_when_all_of_its_scans_have_drawn_the_checkpoint_that_does() -> None:
    drained = ControlOffset(5, drained=5)
    assert drained.to_json() == {"flinkish:checkpoint": 5, "flinkish:drain": 5}
    assert ControlOffset.from_json(drained.to_json()) == drained
    assert ControlOffset(5).merge_max(drained) == drained == drained.merge_max(ControlOffset(4, drained=3))
    later, before = ControlOffset(6, drained=5).to_json(), ControlOffset(4).to_json()
    said = drained.to_json()
    assert ControlOffset.find_drained([said, {"logOffset": 3}, said, None]) == 5
    for apart in ([said, before], [said, later], [later], [before], [], [{"logOffset": 3}]):
        assert ControlOffset.find_drained(apart) == 0


def test_the_barrier_that_drains_says_so_in_the_offset_and_the_next_one_does_not(asked: Asked) -> None:
    asked.file.offer(CheckpointId(1), CheckpointPurpose.DRAINED_SAVEPOINT)
    assert asked.next_rows() == [(BARRIER, 1, 0, 0)]
    assert ControlOffset.find_drained([asked.at]) == 1
    asked.file.offer(CheckpointId(2), CheckpointPurpose.FINAL_SAVEPOINT)
    asked.next_rows()
    assert ControlOffset.find_drained([asked.at]) == 0


def test_nothing_of_an_offset_goes_back() -> None:
    wake = Wake(7, {0: frozenset({1})})
    at = ControlOffset(5, TimeOffer(100, has_ended=True, wake=wake))
    assert at.merge_max(ControlOffset(4, TimeOffer(90, wake=Wake(6)))) == at
    apart = ControlOffset(5, TimeOffer(90, above={"sums": 120, "tops": 95}))
    assert at.merge_max(apart) == ControlOffset(5, TimeOffer(100, True, wake, {"sums": 120}))
    later = ControlOffset(6, TimeOffer(101, wake=Wake(8)))
    assert at.merge_max(later) == ControlOffset(6, TimeOffer(101, has_ended=True, wake=Wake(8)))


def test_of_several_scans_the_furthest_counts() -> None:
    text = "\n".join(
        [
            "v1",
            '{"batchWatermarkMs":0,"batchTimestampMs":1700000000123,"conf":{}}',
            '{"flinkish:checkpoint": 4}',
            '{"orders": {"0": 5}, "flinkish:checkpoint": 5, "flinkish:watermark": 50}',
            '{"watermark": {"0": 1}}',
            "-",
        ]
    )
    logged = LoggedOffsets.parse(text)
    assert logged.control == ControlOffset(5, TimeOffer(50))
    assert logged.processing_time_ms == 1_700_000_000_123
    assert logged.checkpoint == CheckpointId(5)


def test_a_wake_is_no_topic() -> None:
    offset = {
        "orders": {"0": 5},
        **ControlOffset(5, TimeOffer(1, wake=Wake(2, {0: frozenset({1})}))).to_json(),
    }
    assert LoggedOffsets((offset,)).partitions() == {"orders": {0: 5}}


# -- the file and the source -----------------------------------------------------------------------------


def test_a_job_without_time_offers_checkpoints_and_nothing_else(asked: Asked) -> None:
    assert asked.next_rows() is None
    asked.file.offer(CheckpointId(1))
    assert json.loads(asked.file.path.read_text()) == {"checkpoint": 1, "purpose": "PERIODIC"}
    assert (asked.next_rows(), asked.at) == ([(BARRIER, 1, 0, 0)], {"flinkish:checkpoint": 1})
    assert asked.file.withdraw(CheckpointId(1))
    assert not asked.file.path.exists()
    assert asked.next_rows() is None


def test_a_watermark_alone_makes_a_micro_batch(asked: Asked) -> None:
    asked.file.offer_time(TimeOffer(60_000))
    assert asked.next_rows() == []
    assert asked.at == {"flinkish:checkpoint": 0, "flinkish:watermark": 60_000}
    assert asked.next_rows() is None


def test_key_groups_are_called_once_per_offer(asked: Asked) -> None:
    asked.file.offer_time(TimeOffer(60_000, wake=Wake(3, {1: frozenset({9, 4})})))
    assert asked.next_rows() == [(WAKE, 0, 1, 4), (WAKE, 0, 1, 9)]
    asked.file.offer(CheckpointId(1))
    assert asked.next_rows() == [(BARRIER, 1, 0, 0)]
    asked.file.offer_time(TimeOffer(60_000, wake=Wake(5)))
    assert asked.next_rows() == []


def test_a_call_that_was_not_drawn_is_replaced_by_the_next_one(asked: Asked) -> None:
    asked.file.offer_time(TimeOffer(wake=Wake(3, {1: frozenset({9})})))
    asked.file.offer_time(TimeOffer(wake=Wake(4, {1: frozenset({9, 10})})))
    assert asked.next_rows() == [(WAKE, 0, 1, 9), (WAKE, 0, 1, 10)]


def test_a_checkpoint_and_time_are_drawn_together(asked: Asked) -> None:
    asked.file.offer(CheckpointId(1), CheckpointPurpose.FINAL)
    asked.file.offer_time(TimeOffer(5, wake=Wake(0, {0: frozenset({2})})))
    assert json.loads(asked.file.path.read_text())["purpose"] == "FINAL"
    assert asked.next_rows() == [(WAKE, 0, 0, 2), (BARRIER, 1, 0, 0)]


def test_what_is_withdrawn_leaves_time_as_it_is(asked: Asked) -> None:
    asked.file.offer_time(TimeOffer(5))
    asked.file.offer(CheckpointId(1))
    assert asked.file.withdraw(CheckpointId(1))
    assert json.loads(asked.file.path.read_text()) == {"flinkish:watermark": 5}
    assert (asked.next_rows(), asked.at["flinkish:checkpoint"]) == ([], 0)


def test_a_watermark_that_can_wait_goes_along_with_the_next_checkpoint(asked: Asked) -> None:
    asked.file.keep_time(TimeOffer(5))
    assert not asked.file.path.exists()
    asked.file.offer(CheckpointId(1))
    assert asked.next_rows() == [(BARRIER, 1, 0, 0)]
    assert asked.at["flinkish:watermark"] == 5


def test_a_micro_batch_that_runs_again_calls_the_same_key_groups(asked: Asked) -> None:
    start = asked.at
    asked.file.offer_time(TimeOffer(1, wake=Wake(0, {0: frozenset({2})})))
    rows = asked.next_rows()
    asked.file.offer_time(TimeOffer(2, wake=Wake(1, {0: frozenset({3})})))
    again = ControlReader("/nowhere").partitions(start, asked.at)
    assert [row for partition in again for row in asked.reader.read(partition)] == rows
