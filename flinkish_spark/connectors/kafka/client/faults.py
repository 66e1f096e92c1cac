"""Reactions to error codes of a producer's requests, and the errors of an attempt to stage records."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import kafka.errors as kafka_errors

from flinkish_spark.connectors.kafka.client.client import describe_code
from flinkish_spark.core.errors import AuthorizationError, BadRecordError, RetriableError, UnavailableError


class Reaction(enum.Enum):
    #: Done, now or by an earlier request whose answer was lost.
    DONE = "DONE"
    #: Not done; send the same again, with the same sequence number.
    AGAIN = "AGAIN"
    #: As AGAIN, after asking for the partition's leader.
    ASK_FOR_LEADER = "ASK_FOR_LEADER"
    #: The batch is too large for the topic; split it, or refuse its single record.
    CUT = "CUT"
    #: The broker refuses the records themselves.
    BAD_RECORD = "BAD_RECORD"
    NOT_AUTHORIZED = "NOT_AUTHORIZED"
    #: Another producer has the transactional id, or the coordinator ended the transaction.
    FENCED = "FENCED"
    FAIL = "FAIL"


#: Reaction -> the errors of InitProducerId, AddPartitionsToTxn and Produce that cause it.
_REACTIONS = {
    Reaction.DONE: (kafka_errors.NoError, kafka_errors.DuplicateSequenceNumberError),
    Reaction.AGAIN: (
        kafka_errors.RequestTimedOutError,
        kafka_errors.NetworkExceptionError,
        kafka_errors.CoordinatorLoadInProgressError,
        kafka_errors.CoordinatorNotAvailableError,
        kafka_errors.NotCoordinatorError,
        kafka_errors.NotEnoughReplicasError,
        kafka_errors.NotEnoughReplicasAfterAppendError,
        kafka_errors.ConcurrentTransactionsError,
        # In a request with several partitions, if another one has an error of its own.
        kafka_errors.OperationNotAttemptedError,
    ),
    Reaction.ASK_FOR_LEADER: (
        kafka_errors.UnknownTopicOrPartitionError,
        kafka_errors.LeaderNotAvailableError,
        kafka_errors.NotLeaderForPartitionError,
        kafka_errors.ReplicaNotAvailableError,
        kafka_errors.KafkaStorageError,
        kafka_errors.FencedLeaderEpochError,
        kafka_errors.UnknownLeaderEpochError,
    ),
    Reaction.CUT: (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError),
    Reaction.BAD_RECORD: (kafka_errors.InvalidTimestampError, kafka_errors.InvalidRecordError),
    Reaction.NOT_AUTHORIZED: (
        kafka_errors.TopicAuthorizationFailedError,
        kafka_errors.ClusterAuthorizationFailedError,
        kafka_errors.TransactionalIdAuthorizationFailedError,
    ),
    Reaction.FENCED: (
        kafka_errors.InvalidProducerEpochError,
        kafka_errors.InvalidTxnStateError,
        kafka_errors.InvalidProducerIdMappingError,
        kafka_errors.ProducerFencedError,
    ),
}
_BY_CODE: dict[int, Reaction] = {
    error.errno: reaction for reaction, errors in _REACTIONS.items() for error in errors
}
#: Error codes of missing rights.
TOPIC_DENIED: int = kafka_errors.TopicAuthorizationFailedError.errno
ID_DENIED: int = kafka_errors.TransactionalIdAuthorizationFailedError.errno
CLUSTER_DENIED: int = kafka_errors.ClusterAuthorizationFailedError.errno


def find_reaction(code: int) -> Reaction:
    return _BY_CODE.get(code, Reaction.FAIL)


# A task's error reaches the driver as text inside Spark's own error, so messages of two causes begin with a
# marker. No message quotes the value of a producer setting, and each is one line.
BAD_RECORD_MARKER = "[FLINKISH_BAD_RECORD]"
NOT_AUTHORIZED_MARKER = "[FLINKISH_NOT_AUTHORIZED]"


def make_no_topic_error() -> BadRecordError:
    return BadRecordError(
        f"{BAD_RECORD_MARKER} a record names no topic and the sink has no default topic",
        what_to_do="give the sink a topic, or let each record name one",
    )


def make_bad_record_error(sentence: str, topic: str, what_to_do: str = "") -> BadRecordError:
    return BadRecordError(f"{BAD_RECORD_MARKER} {sentence}", what_to_do=what_to_do, topic=topic)


def describe_unknown_partition(topic: str, partition: int, partitions: int) -> str:
    return (
        f"a record names partition {partition} of topic {topic}, which has the partitions "
        f"0 to {partitions - 1}"
    )


def make_missing_right_error(right: str) -> AuthorizationError:
    return AuthorizationError(f"{NOT_AUTHORIZED_MARKER} the producer's principal lacks {to_one_line(right)}")


def mark_authorization_error(error: AuthorizationError, right: str) -> AuthorizationError:
    if "bootstrap_servers" in error.facts:
        return AuthorizationError(f"{NOT_AUTHORIZED_MARKER} {error.what} ({to_one_line(error.why)})")
    return make_missing_right_error(right)


def describe_missing_right(code: int, topics: Iterable[str], transactional_id: str | None) -> str:
    if code == TOPIC_DENIED:
        return f"WRITE and DESCRIBE on topics [{', '.join(sorted(set(topics)))}]"
    if code == ID_DENIED:
        return f"WRITE and DESCRIBE on transactional id {transactional_id}"
    if code == CLUSTER_DENIED:
        return "IDEMPOTENT_WRITE on the cluster"
    return f"a right of this kind: {describe_code(code)}"


def _staging_facts(what: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    usual = "look at the brokers if it goes on: the records are staged again"
    return {
        **facts,
        "what": f"staging records in Kafka failed: {what}",
        "what_to_do": facts.get("what_to_do") or usual,
    }


def make_staging_error(what: str, **facts: Any) -> RetriableError:
    """Return the error of an attempt that failed; another one, with another transaction, may succeed."""
    return RetriableError(**{"kind": "staging", **_staging_facts(what, facts)})


def make_staging_outage(what: str, **facts: Any) -> UnavailableError:
    """Return the error for brokers that did not answer, or ended the transaction: no fault of the job."""
    return UnavailableError(**_staging_facts(what, facts))


def make_unanswered_error(what: str, within_ms: int, last: str) -> UnavailableError:
    return make_staging_outage(f"{within_ms} ms were not enough to {what}", why=to_one_line(last))


def to_one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
