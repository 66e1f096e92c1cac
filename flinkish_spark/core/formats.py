"""Policies of formats: for records that cannot be read or written, and for tombstones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.durations import Milliseconds


class OnBadRecord(Choice):
    """Policy for a record that cannot be read, or that the broker would refuse.

    A dead-letter topic needs a name, so it is a value of its own: :class:`DeadLetter`.
    """

    #: Stop the job with the record's origin; nothing is lost, nothing is skipped.
    FAIL = "fail"
    #: Leave it out and count it.
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Write bad records to this topic, in the same checkpoint as everything else.

    Parameters
    ----------
    topic
        An existing topic that is neither source nor sink of the job.
    transaction_timeout_ms
        Of a source's dead letters, as a :class:`~flinkish_spark.sinks.KafkaSink` has one. None: the
        shortest of the job's Kafka sinks; without any, the default of one. A sink's own dead letters are
        part of its transactions, and have none.
    """

    topic: str
    transaction_timeout_ms: Annotated[Milliseconds | None, Range(1)] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.topic:
            raise ConfigError("the dead-letter topic has no name", what_to_do="name an existing topic")


BadRecordPolicy = OnBadRecord | DeadLetter


class OnTombstone(Choice):
    """Policy for a tombstone: a record without a value, which means that its key is deleted.

    Examples
    --------
    >>> OnTombstone("drop")
    <OnTombstone.DROP: 'drop'>
    """

    #: It cannot be read: `on_bad_record` of the value decides.
    REFUSE = "refuse"
    #: Leave it out.
    DROP = "drop"
    #: A row whose fields are null, beside those of the key and the metadata.
    KEEP = "keep"
    #: A deletion: the stream is a changelog with a column `_row_kind`, as that of Flink's `upsert-kafka`.
    DELETE = "delete"
