"""What Kafka answers, as plain values: codes, views of transactions, slices of a log.

No kafka-python here, so that whatever decides on an answer can be tested without a broker.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

#: EndTxn v3 does not raise the epoch. Mixing it with v5, which does, makes a repeat answer
#: "fenced", so a committable stores the version it was prepared for.
END_TXN_VERSION = 3

#: (topic, partition)
Place = tuple[str, int]


class Code(enum.IntEnum):
    """Kafka's error codes that this package decides on."""

    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    UNKNOWN_TOPIC_OR_PARTITION = 3
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TXN_STATE = 48
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    PRODUCER_FENCED = 90
    TRANSACTIONAL_ID_NOT_FOUND = 105


#: "Ask again": the coordinator moves, loads, or still writes the markers of the call before.
UNSETTLED = frozenset(
    {
        Code.COORDINATOR_LOAD_IN_PROGRESS,
        Code.COORDINATOR_NOT_AVAILABLE,
        Code.NOT_COORDINATOR,
        Code.CONCURRENT_TRANSACTIONS,
    }
)


#: "You may not": retrying cannot help.
UNAUTHORIZED = frozenset(
    {
        Code.TOPIC_AUTHORIZATION_FAILED,
        Code.GROUP_AUTHORIZATION_FAILED,
        Code.CLUSTER_AUTHORIZATION_FAILED,
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)


def name_of(code: int) -> str:
    """Return `code` with its name where this package knows it."""
    try:
        return f"{code} {Code(code).name}"
    except ValueError:
        return str(code)


class EndAction(enum.Enum):
    """How a transaction is ended."""

    COMMIT = "COMMIT"
    ABORT = "ABORT"


class Isolation(enum.IntEnum):
    """What a reader sees; the numbers are the protocol's."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1


class Marker(enum.Enum):
    """What a control batch says about its producer's transaction."""

    ABORT = 0
    COMMIT = 1


@dataclass(frozen=True, slots=True)
class ProducerGrant:
    """Answer to InitProducerId; `producer_id` and `producer_epoch` count only if `code` is 0."""

    code: int
    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class TransactionView:
    """What a coordinator says about one transactional id; the rest counts only if `code` is 0.

    `began_at_ms` is the broker's wall clock when the transaction began, None if none is open.
    """

    code: int
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int | None = None
    began_at_ms: int | None = None

    @classmethod
    def of(cls, row: Any) -> TransactionView:
        """Return what a row of DescribeTransactions says."""
        began_at_ms = int(row.transaction_start_time_ms)
        return cls(
            int(row.error_code),
            row.transaction_state,
            row.producer_id,
            row.producer_epoch,
            int(row.transaction_timeout_ms),
            began_at_ms if began_at_ms >= 0 else None,
        )


@dataclass(frozen=True, slots=True)
class ListedTransaction:
    """One row of ListTransactions."""

    transactional_id: str
    producer_id: int
    state: str


@dataclass(frozen=True, slots=True)
class Batch:
    """The header of a record batch; `marker` is set for a transaction marker only."""

    base_offset: int
    last_offset: int
    producer_id: int
    producer_epoch: int
    records: int
    marker: Marker | None = None


@dataclass(frozen=True, slots=True)
class LogSlice:
    """Answer to a Fetch of one partition. Offsets are -1 where the broker did not tell them."""

    code: int
    log_start_offset: int = -1
    last_stable_offset: int = -1
    high_watermark: int = -1
    #: (producer id, first offset) of the aborted transactions that overlap what was read.
    aborted: tuple[tuple[int, int], ...] = ()
    batches: tuple[Batch, ...] = ()
