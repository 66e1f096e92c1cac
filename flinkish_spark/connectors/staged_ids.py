"""Names of staging folders; a name tells which attempt owns the folder, so a sweep recognises leftovers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from flinkish_spark.protocol.ids import OwnerEpoch, is_left_over

_NAME = re.compile(r"(\d{1,18})-(\d{1,18})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class StagedId:
    owner_epoch: OwnerEpoch
    #: The block, leased until the receipt.
    block: int
    #: Distinguishes two uses of the same block.
    nonce: str

    @classmethod
    def new(cls, owner_epoch: OwnerEpoch, block: int) -> StagedId:
        return cls(owner_epoch, block, uuid.uuid4().hex[:8])

    def __str__(self) -> str:
        return f"{self.owner_epoch}-{self.block}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> StagedId | None:
        found = _NAME.fullmatch(text)
        return None if found is None else cls(OwnerEpoch(int(found[1])), int(found[2]), found[3])

    def is_leftover(self, own: OwnerEpoch, running_blocks: Collection[int]) -> bool:
        """Return if no task can write into it: an older owner's folder, or ours without a leased block."""
        return is_left_over(self.owner_epoch, self.block, own, running_blocks)
