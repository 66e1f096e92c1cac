"""Ids are types, validated on construction, and checked before they become paths."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import Check, StoredScalar

#: (topic, partition)
Place = tuple[str, int]


#: A job name or a uid, also as a part of a file name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
#: The uid of an input or an operator, optionally with the number of the scan, and with the chain.
_INSTANCE = re.compile(rf"{_NAME.pattern}(#[0-9]{{1,6}})?(\.{_NAME.pattern})?")
_UUID_HEX = re.compile(r"[0-9a-f]{32}")


def check_name(value: str, what: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value) or ".." in value:
        raise ValueError(
            f"{what} {value!r} is not usable: use 1 to 128 letters, digits, '_', '-' or '.', "
            "starting with a letter or digit and without '..'"
        )
    return value


def check_instance(value: str, what: str) -> str:
    """Check the name of an input's or operator's instance in a chain; it is not used in paths."""
    if not isinstance(value, str) or not _INSTANCE.fullmatch(value):
        raise ValueError(f"{what} {value!r} is neither a uid nor a scan or operator of a chain")
    return value


#: Type hints of stored names.
Uid = Annotated[str, Check(partial(check_name, what="uid"))]
Instance = Annotated[str, Check(partial(check_instance, what="name"))]
SinkUid = Annotated[str, Check(partial(check_name, what="sink uid"))]


@dataclass(frozen=True, slots=True, order=True)
class _Counter(StoredScalar):
    value: int

    def __post_init__(self) -> None:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < 0:
            raise ValueError(f"{type(self).__name__} must be an integer >= 0, got {self.value!r}")

    def __int__(self) -> int:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


class CheckpointId(_Counter):
    """Number of a checkpoint; rises by one with each trigger, never reused, 1 is the first."""

    __slots__ = ()

    def next(self) -> CheckpointId:
        """Return the id after this one."""
        return CheckpointId(self.value + 1)


class BatchId(_Counter):
    """Spark's micro-batch id, as in its offset and commit log."""

    __slots__ = ()

    def next(self) -> BatchId:
        return BatchId(self.value + 1)


class OwnerEpoch(_Counter):
    """Number of a process's ownership of the job directory; a higher one fences all lower ones."""

    __slots__ = ()


class Lineage(_Counter):
    """How many times the job was rewound; micro-batch ids are unique only within one lineage."""

    __slots__ = ()

    def next(self) -> Lineage:
        return Lineage(self.value + 1)


@dataclass(frozen=True, slots=True, order=True)
class JobUuid(StoredScalar):
    """Permanent id of a job, 32 hex digits; part of every transactional id and Delta app id."""

    value: str

    def __post_init__(self) -> None:
        if not _UUID_HEX.fullmatch(self.value):
            raise ValueError(f"a job uuid is 32 lower-case hex digits, got {self.value!r}")

    def __str__(self) -> str:
        return self.value


_TRANSACTIONAL_ID = re.compile(r"flinkish-([0-9a-f]{32})-(\d{1,18})-(\d{1,18})-(\d{1,9})-(\d{1,9})")


@dataclass(frozen=True, slots=True, order=True)
class TransactionalId:
    """A Kafka transactional id of ours: job uuid, owner epoch, slot block, task, attempt.

    `block` is leased from a pool per (sink, micro-batch) and returns there only after the
    receipt; `task` and `attempt` make the id of every task attempt unique, so that the loser of a
    speculative race cannot fence the winner. Ids are parsed, never matched by prefix.
    """

    job: JobUuid
    owner_epoch: OwnerEpoch
    block: int
    task: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.prefix(self.job, self.owner_epoch, self.block)}-{self.task}-{self.attempt}"

    @staticmethod
    def prefix(job: JobUuid, owner_epoch: OwnerEpoch, block: int) -> str:
        return f"flinkish-{job}-{owner_epoch}-{block}"

    @classmethod
    def parse(cls, text: str) -> TransactionalId | None:
        match = _TRANSACTIONAL_ID.fullmatch(text)
        if match is None:
            return None
        job, owner, block, task, attempt = match.groups()
        return cls(JobUuid(job), OwnerEpoch(int(owner)), int(block), int(task), int(attempt))


def is_left_over(
    owner_epoch: OwnerEpoch, block: int, newest_owner: OwnerEpoch, running: Collection[int]
) -> bool:
    """Return whether the data that an owner of the job staged in a block will never be decided.

    Data of a newer owner is never left over, even if the newest one known believes that it owns the job.
    """
    return owner_epoch < newest_owner or (owner_epoch == newest_owner and block not in running)


class CheckpointPurpose(Choice):
    """Purpose of a checkpoint: who requested it, and for what.

    The purpose gives a request its rank: savepoints and last checkpoints go before other requests of
    a user or the job, and all of these before periodic ones.
    """

    PERIODIC = "PERIODIC"
    #: Requested by the job to decide staged data soon: kept micro-batches after a recovery, a long
    #: backlog, or the data of an aborted checkpoint.
    FOLLOW_UP = "FOLLOW_UP"
    #: Requested by a user or a program; the job owns it like any other checkpoint.
    USER = "USER"
    #: Requested by a user, who owns it: it is exported to a directory of the user's.
    SAVEPOINT = "SAVEPOINT"
    #: The last checkpoint: the job stops after it.
    FINAL = "FINAL"
    #: The last checkpoint, which is also exported.
    FINAL_SAVEPOINT = "FINAL_SAVEPOINT"
    #: As FINAL_SAVEPOINT, and event time ends after the last records: it commits the results of all windows.
    DRAINED_SAVEPOINT = "DRAINED_SAVEPOINT"

    @property
    def is_savepoint(self) -> bool:
        """True if it is exported; such a checkpoint is never subsumed."""
        return self is CheckpointPurpose.SAVEPOINT or self.stops_with_savepoint

    @property
    def is_final(self) -> bool:
        """True if the job ends after its barrier."""
        return self is CheckpointPurpose.FINAL or self.stops_with_savepoint

    @property
    def stops_with_savepoint(self) -> bool:
        """True if it is a savepoint and final; the job goes on if it fails."""
        return self in (CheckpointPurpose.FINAL_SAVEPOINT, CheckpointPurpose.DRAINED_SAVEPOINT)

    @property
    def rank(self) -> int:
        """Rank of a request; the lowest goes first."""
        if self.is_savepoint or self.is_final:
            return 0
        return 2 if self is CheckpointPurpose.PERIODIC else 1
