"""Names of what tasks stage: they tell which attempt it belongs to, so a sweep recognises leftovers."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch, is_left_over

_NAME = re.compile(r"(\d{1,18})-(\d{1,18})-([0-9a-f]{8})")
#: At most 130 characters, so that it can be the name of a file, a table's key or a global transaction id.
_TRANSACTION = re.compile(r"flinkish-([0-9a-f]{32})-([0-9a-f]{8})-(\d{1,18})-(\d{1,18})-(\d{1,9})-(\d{1,18})")


@dataclass(frozen=True, slots=True)
class StagedId:
    """Name of a folder with staged rows: owner epoch, block, and a random part."""

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


@dataclass(frozen=True, slots=True, order=True)
class TransactionName:
    job: JobUuid
    #: Eight hex digits made from the sink's uid, see :meth:`mark_of`.
    sink: str
    owner_epoch: OwnerEpoch
    #: Leased for the micro-batch; reused only after its receipt.
    block: int
    task: int
    #: Spark's task attempt id, which is unique in its application. The attempt number is not: it starts at 0
    #: again when a stage runs again while old tasks still write.
    attempt: int

    def __str__(self) -> str:
        parts = (self.owner_epoch, self.block, self.task, self.attempt)
        return self.prefix(self.job, self.sink) + "-".join(map(str, parts))

    @staticmethod
    def mark_of(uid: str) -> str:
        return hashlib.sha256(uid.encode()).hexdigest()[:8]

    @staticmethod
    def prefix(job: JobUuid, sink: str) -> str:
        return f"flinkish-{job}-{sink}-"

    @classmethod
    def parse(cls, text: str) -> TransactionName | None:
        match = _TRANSACTION.fullmatch(text)
        if match is None:
            return None
        job, sink, owner, block, task, attempt = match.groups()
        return cls(JobUuid(job), sink, OwnerEpoch(int(owner)), int(block), int(task), int(attempt))
