"""Values of the drop-in sink's attempts that nobody may make; their rules are in test_micro_batches.py."""

from __future__ import annotations

import pytest

from flinkish_spark.protocol.micro_batches import Attempt, AttemptNumber, StagedPart


@pytest.mark.parametrize("wrong", [0, -1, True, "1", 1.0, None])
def test_an_attempt_number_is_a_whole_number_from_one(wrong) -> None:
    with pytest.raises(ValueError, match="an attempt number is an integer >= 1"):
        AttemptNumber(wrong)


@pytest.mark.parametrize("block", [0, 3])
def test_a_block_is_among_those_that_were_given_out(block) -> None:
    with pytest.raises(ValueError, match=f"block {block} is not among the blocks 1 to 2"):
        Attempt(AttemptNumber(1), block, 2, "driver")


@pytest.mark.parametrize("payload", ["text", 7, []])
def test_a_part_holds_an_object_or_nothing(payload) -> None:
    stored = StagedPart(0, 1, 2, {"a": 1}).to_json()
    assert StagedPart.from_json(stored).payload == {"a": 1}
    assert StagedPart.from_json({**stored, "payload": None}).payload is None
    with pytest.raises(ValueError, match="payload must be an object, got"):
        StagedPart.from_json({**stored, "payload": payload})
