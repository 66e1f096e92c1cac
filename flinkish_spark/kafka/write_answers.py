"""What Kafka's answers to a transactional writer mean: one reaction for every code.

Pure, so that the table can be tested without a broker. Where a code is missing, the attempt fails:
nothing is ever assumed to be written.
"""

from __future__ import annotations

import enum


class WriteCode(enum.IntEnum):
    """Error codes of InitProducerId, AddPartitionsToTxn and Produce that a writer decides on."""

    NONE = 0
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    TOPIC_AUTHORIZATION_FAILED = 29
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    UNKNOWN_PRODUCER_ID = 59
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 76
    INVALID_RECORD = 87
    PRODUCER_FENCED = 90
    TRANSACTION_ABORTABLE = 120


class Reaction(enum.Enum):
    """What a writer does about an answer."""

    #: It is done, now or by an earlier request whose answer was lost.
    DONE = "DONE"
    #: Nothing is done yet; the same again, with the same sequence number.
    AGAIN = "AGAIN"
    #: As AGAIN, after asking who leads the partition.
    ASK_FOR_LEADER = "ASK_FOR_LEADER"
    #: The batch is larger than the topic takes; cut it, or refuse the record it holds.
    CUT = "CUT"
    #: The broker refuses the records themselves.
    BAD_RECORD = "BAD_RECORD"
    #: The principal lacks a right.
    NOT_AUTHORIZED = "NOT_AUTHORIZED"
    #: Another producer has the transactional id, or the coordinator ended the transaction.
    FENCED = "FENCED"
    #: The attempt fails.
    FAIL = "FAIL"


_REACTIONS = {
    Reaction.DONE: (WriteCode.NONE, WriteCode.DUPLICATE_SEQUENCE_NUMBER),
    Reaction.AGAIN: (
        WriteCode.REQUEST_TIMED_OUT,
        WriteCode.NETWORK_EXCEPTION,
        WriteCode.COORDINATOR_LOAD_IN_PROGRESS,
        WriteCode.COORDINATOR_NOT_AVAILABLE,
        WriteCode.NOT_COORDINATOR,
        WriteCode.NOT_ENOUGH_REPLICAS,
        WriteCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        WriteCode.CONCURRENT_TRANSACTIONS,
        # Of a request with several partitions, when another one of them has an error of its own.
        WriteCode.OPERATION_NOT_ATTEMPTED,
    ),
    Reaction.ASK_FOR_LEADER: (
        WriteCode.UNKNOWN_TOPIC_OR_PARTITION,
        WriteCode.LEADER_NOT_AVAILABLE,
        WriteCode.NOT_LEADER_OR_FOLLOWER,
        WriteCode.REPLICA_NOT_AVAILABLE,
        WriteCode.KAFKA_STORAGE_ERROR,
        WriteCode.FENCED_LEADER_EPOCH,
        WriteCode.UNKNOWN_LEADER_EPOCH,
    ),
    Reaction.CUT: (WriteCode.MESSAGE_TOO_LARGE, WriteCode.RECORD_LIST_TOO_LARGE),
    Reaction.BAD_RECORD: (WriteCode.INVALID_TIMESTAMP, WriteCode.INVALID_RECORD),
    Reaction.NOT_AUTHORIZED: (
        WriteCode.TOPIC_AUTHORIZATION_FAILED,
        WriteCode.CLUSTER_AUTHORIZATION_FAILED,
        WriteCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ),
    Reaction.FENCED: (
        WriteCode.INVALID_PRODUCER_EPOCH,
        WriteCode.INVALID_TXN_STATE,
        WriteCode.INVALID_PRODUCER_ID_MAPPING,
        WriteCode.PRODUCER_FENCED,
    ),
    Reaction.FAIL: (
        # Ours are checked by nobody in between, so this is a bug or bad memory: encode again.
        WriteCode.CORRUPT_MESSAGE,
        WriteCode.INVALID_TOPIC_EXCEPTION,
        WriteCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        WriteCode.INVALID_TRANSACTION_TIMEOUT,
        WriteCode.UNKNOWN_PRODUCER_ID,
        WriteCode.TRANSACTION_ABORTABLE,
    ),
}
_BY_CODE = {code: reaction for reaction, codes in _REACTIONS.items() for code in codes}


def reaction_to(code: int) -> Reaction:
    """Return what to do about `code`; FAIL for one that is not in the table."""
    return _BY_CODE.get(code, Reaction.FAIL)  # type: ignore[call-overload,no-any-return]


def described(code: int) -> str:
    """Return `code` with its name where this module knows it."""
    return f"{code} {WriteCode(code).name}" if code in _BY_CODE else str(code)
