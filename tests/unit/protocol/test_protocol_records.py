"""What a sink measured of a micro-batch travels with its acknowledgement."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flinkish_spark.protocol.event_time import AssignerInput
from flinkish_spark.protocol.ids import BatchId, JobUuid, Lineage, OwnerEpoch, is_left_over
from flinkish_spark.protocol.records import SinkAck, StagedBatch, TaskAck


def test_what_a_sink_measured_is_part_of_its_acknowledgement() -> None:
    measured = SinkAck("out", (TaskAck(0, 5, -9),), sync_ms=30, bytes=0)
    stored = json.loads(json.dumps(measured.to_json()))
    assert (stored["sync_ms"], stored["bytes"]) == (30, 0)
    assert SinkAck.from_json(stored) == measured


def test_an_acknowledgement_without_measurements_stores_none() -> None:
    plain = SinkAck("out", (TaskAck(0, 5, -9),))
    assert plain.to_json().keys() == {"sink", "tasks"}
    assert SinkAck.from_json(plain.to_json()) == plain


def test_the_time_of_the_staging_is_stored_where_it_is_known() -> None:
    plain = StagedBatch(Lineage(1), BatchId(2), OwnerEpoch(3), 1, (), ())
    assert "began_at_ms" not in plain.to_json()
    assert StagedBatch.from_json(plain.to_json()) == plain
    timed = replace(plain, began_at_ms=1_700)
    assert StagedBatch.from_json(json.loads(json.dumps(timed.to_json()))) == timed


def test_a_digest_is_stored_as_text_since_not_every_reader_of_json_keeps_64_bits() -> None:
    stored = TaskAck(0, 5, -(1 << 63)).to_json()
    assert stored["digest"] == "-9223372036854775808"
    with pytest.raises(ValueError, match="digest: a digest is a text, got 7"):
        TaskAck.from_json({**stored, "digest": 7})


def test_what_is_read_is_checked_and_an_id_when_it_is_made_too() -> None:
    with pytest.raises(ValueError, match="must be true or false, got 1"):
        AssignerInput.from_json(["orders", None, 1])
    with pytest.raises(ValueError, match="a job uuid is 32 lower-case hex digits, got 'X'"):
        JobUuid("X")


@pytest.mark.parametrize(
    ("owner", "block", "is_over"),
    [(4, 7, True), (4, 1, True), (5, 1, True), (5, 7, False), (6, 1, False), (6, 7, False)],
)
def test_what_an_older_owner_staged_is_left_over_and_of_the_newest_what_no_block_holds(
    owner: int, block: int, is_over: bool
) -> None:
    """A newer owner than the newest that is known may be at work: its data stays."""
    assert is_left_over(OwnerEpoch(owner), block, OwnerEpoch(5), frozenset({7})) is is_over
