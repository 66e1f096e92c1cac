"""How staging records in Kafka fails: one message for every cause.

Raised in tasks. What a task raises reaches the driver as text inside Spark's own error, so two
causes open their message with a marker, the same ones as the JVM writer's. No message quotes a
producer setting's value, and each is one line.
"""

from __future__ import annotations

from collections.abc import Iterable

from flinkish_spark.errors import AuthorizationError, BadRecordError, EnvironmentFault
from flinkish_spark.kafka.answers import Code
from flinkish_spark.kafka.write_answers import WriteCode, described

BAD_RECORD_MARKER = "[FLINKISH_BAD_RECORD]"
NOT_AUTHORIZED_MARKER = "[FLINKISH_NOT_AUTHORIZED]"


class StagingFailed(EnvironmentFault):
    """An attempt to stage records failed; another attempt, with another transaction, may succeed."""

    restartable = True
    ends_when_repeated = True

    def __init__(self, what: str, **more: object) -> None:
        super().__init__(f"staging records in Kafka failed: {what}", **more)  # type: ignore[arg-type]


class StagingUnanswered(StagingFailed):
    """The brokers do not answer, or gave up the transaction meanwhile: no fault of the job's."""

    ends_when_repeated = False


# -- records ----------------------------------------------------------------------------------


def no_topic() -> BadRecordError:
    """Return the error for a record that names no topic where nothing stands in for it."""
    return BadRecordError(f"{BAD_RECORD_MARKER} a record names no topic and the sink has no default topic")


def refused_record(sentence: str, topic: str) -> BadRecordError:
    """Return the error for a record that was seen to be one that cannot be written, before it was sent."""
    return BadRecordError(f"{BAD_RECORD_MARKER} {sentence}", topic=topic)


def refused_as_too_large(topic: str, limit: int) -> BadRecordError:
    """Return the error for a record that is within our limit but not the broker's."""
    return BadRecordError(
        f"{BAD_RECORD_MARKER} the broker refuses a record for topic {topic} as too large although it is "
        f"within the limit of {limit} bytes; raise the topic's max.message.bytes or lower max_record_bytes",
        topic=topic,
    )


def refused_records(topic: str, partition: int, code: int, detail: str) -> BadRecordError:
    """Return the error for what the broker checks beside sizes: keys of a compacted topic, timestamps."""
    said = described(code) + (f", {_one_line(detail)}" if detail else "")
    return BadRecordError(
        f"{BAD_RECORD_MARKER} the broker refuses a record for topic {topic}, partition {partition} ({said})",
        topic=topic,
        partition=partition,
        code=code,
    )


def unknown_partition(topic: str, partition: int, partitions: int) -> str:
    """Return the sentence about a record that names a partition its topic does not have."""
    return (
        f"a record names partition {partition} of topic {topic}, which has the partitions "
        f"0 to {partitions - 1}"
    )


def no_such_partition(topic: str, partition: int, partitions: int) -> BadRecordError:
    """Return the error for such a record."""
    return refused_record(unknown_partition(topic, partition, partitions), topic)


# -- the cluster ------------------------------------------------------------------------------


def no_such_topic(topic: str, servers: str) -> StagingFailed:
    """Return the error for a topic that does not exist; it is never created."""
    return StagingFailed(
        f"topic '{topic}' does not exist",
        why=f"the brokers at {servers} do not know it",
        what_to_do="create it, or correct its name",
        topic=topic,
    )


def not_authorized(right: str) -> AuthorizationError:
    """Return the error for a missing right, such as "WRITE and DESCRIBE on topics [orders]"."""
    return AuthorizationError(f"{NOT_AUTHORIZED_MARKER} the producer's principal lacks {_one_line(right)}")


def denied(error: AuthorizationError, right: str) -> AuthorizationError:
    """Return the error of a task for that of a request which needs `right`, or of a login."""
    if "bootstrap_servers" in error.facts:
        return AuthorizationError(f"{NOT_AUTHORIZED_MARKER} {error.what} ({_one_line(error.why)})")
    return not_authorized(right)


def missing_right(code: int, topics: Iterable[str], transactional_id: str | None) -> str:
    """Return the right that Kafka's `code` is about."""
    match code:
        case WriteCode.TOPIC_AUTHORIZATION_FAILED:
            return f"WRITE and DESCRIBE on topics [{', '.join(sorted(set(topics)))}]"
        case WriteCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return f"WRITE and DESCRIBE on transactional id {transactional_id}"
        case WriteCode.CLUSTER_AUTHORIZATION_FAILED:
            return "IDEMPOTENT_WRITE on the cluster"
        case _:
            return f"a right of this kind: {described(code)}"


def fenced(transactional_id: str | None, code: int) -> StagingUnanswered:
    """Return the error for an attempt of which nothing can become visible any more."""
    return StagingUnanswered(
        f"the transaction of {transactional_id} is no longer ours ({described(code)})",
        why="another attempt took its id, or its transaction timeout passed",
        transactional_id=transactional_id,
        code=code,
    )


#: Codes whose name does not say what to change.
_EXPLAINED = {
    int(Code.INVALID_TRANSACTION_TIMEOUT): "the transaction timeout is above the broker's "
    "transaction.max.timeout.ms",
}


def refused(what: str, code: int, detail: str = "") -> StagingFailed:
    """Return the error for an answer that asking again cannot change."""
    why = detail or _EXPLAINED.get(code, "")
    return StagingFailed(f"Kafka refused to {what} ({described(code)})", why=_one_line(why), code=code)


def unreachable(what: str, error: EnvironmentFault) -> StagingUnanswered:
    """Return the error for a connection that cannot be made, such as with a wrong TLS set-up."""
    return StagingUnanswered(
        f"could not {what}: {_one_line(error.what)}", why=_one_line(error.why), what_to_do=error.what_to_do
    )


def unanswered(what: str, within_ms: int, last: str) -> StagingUnanswered:
    """Return the error for an answer that did not come within the delivery timeout."""
    return StagingUnanswered(f"{within_ms} ms were not enough to {what}", why=_one_line(last))


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
