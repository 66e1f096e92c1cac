"""What has a name of a micro-batch that nobody writes any more is a leftover."""

from __future__ import annotations

import pytest

from flinkish_spark.connectors.staged_ids import StagedId
from flinkish_spark.protocol.ids import OwnerEpoch


def test_names_of_folders_of_staged_rows() -> None:
    staged = StagedId(OwnerEpoch(3), 7, "0badcafe")
    assert str(staged) == "3-7-0badcafe" and StagedId.parse("3-7-0badcafe") == staged
    assert StagedId.new(OwnerEpoch(3), 7) != StagedId.new(OwnerEpoch(3), 7)
    for other in ("_temporary", "3-7", "3-7-0Badcafe", "3-7-0badcafe-x", "-1-7-0badcafe"):
        assert StagedId.parse(other) is None


@pytest.mark.parametrize(
    ("epoch", "block", "is_leftover"),
    [(2, 7, True), (2, 8, True), (3, 7, False), (3, 8, True), (4, 8, False)],
)
def test_leftovers_are_those_of_older_owners_and_of_blocks_that_nobody_writes(
    epoch: int, block: int, is_leftover: bool
) -> None:
    staged = StagedId.new(OwnerEpoch(epoch), block)
    assert staged.is_leftover(OwnerEpoch(3), frozenset({7})) is is_leftover
