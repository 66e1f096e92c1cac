"""How a record's bytes become columns and back: JSON and raw."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flinkish_spark.errors import ConfigError


class OnBadRecord(enum.Enum):
    """What happens to a record that cannot be read, or that the broker would refuse.

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
    """

    topic: str

    def __post_init__(self) -> None:
        if not self.topic:
            raise ConfigError("the dead-letter topic has no name", what_to_do="name an existing topic")


BadRecordPolicy = OnBadRecord | DeadLetter


@dataclass(frozen=True, slots=True)
class Json:
    """JSON objects, one per record.

    Parameters
    ----------
    schema
        Fields as DDL (``"user STRING, amount LONG"``). Needed to read; a sink writes all fields
        of its stream and needs none.
    on_bad_record
        What to do with a value that is not a JSON object of this schema; a null value counts as
        one.

    Examples
    --------
    >>> Json("user STRING, amount LONG").on_bad_record
    <OnBadRecord.FAIL: 'fail'>
    """

    schema: str = ""
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes as they are.

    A source gives the columns `key`, `value`, `topic`, `partition`, `offset` and `timestamp`.

    Parameters
    ----------
    column
        For a sink: the column that is the value.
    """

    column: str = "value"
