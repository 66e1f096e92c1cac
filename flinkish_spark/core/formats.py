"""How a record's bytes become columns and back, and which side of Spark does it."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

from flinkish_spark.core.config import require_positive
from flinkish_spark.core.errors import ConfigError

# ----------------------------------------------------------------------------------------------------------
# How a record's bytes become columns and back: JSON, Avro and raw.


#: What fits the four bytes of a schema's id.
_MOST_SCHEMA_ID = 2**31 - 1


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
    transaction_timeout_ms
        Of a source's dead letters, as a :class:`~flinkish_spark.sinks.KafkaSink` has one. None: the
        shortest of the job's Kafka sinks; without any, the default of one. A sink's own dead letters are
        part of its transactions, and have none.
    """

    topic: str
    transaction_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        if not self.topic:
            raise ConfigError("the dead-letter topic has no name", what_to_do="name an existing topic")
        if self.transaction_timeout_ms is not None:
            require_positive("transaction_timeout_ms", self.transaction_timeout_ms)


BadRecordPolicy = OnBadRecord | DeadLetter


class OnTombstone(enum.Enum):
    """What a source makes of a record without a value: a tombstone, which says that its key is gone.

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


@dataclass(frozen=True, slots=True)
class Json:
    """JSON objects, one per record.

    Parameters
    ----------
    schema
        Fields as DDL (``"user STRING, amount LONG"``). Needed to read. A sink writes the fields that are
        named here, all fields of its stream if none is.
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


@dataclass(frozen=True, slots=True)
class Avro:
    """Avro's binary form, one record of a schema each; for sinks.

    Encoded by Spark, so the session needs the Avro JAR of the pinned list whichever engine writes.

    Parameters
    ----------
    schema
        A record's schema as JSON text. A sink writes the fields that it names; their order is the schema's.
        Empty: derived from the stream, with every field nullable.
    schema_id
        Under which a schema registry knows `schema`; written in front of every record as a zero byte and
        four bytes (Confluent's wire format). Needs `schema`. None: nothing is written in front.

    Examples
    --------
    >>> Avro('{"type": "record", "name": "Order", "fields": [{"name": "user", "type": "string"}]}').schema_id
    """

    schema: str = ""
    schema_id: int | None = None

    def __post_init__(self) -> None:
        if self.schema:
            _check_avro_schema(self.schema)
        if self.schema_id is None:
            return
        number = self.schema_id
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _MOST_SCHEMA_ID:
            raise ConfigError(
                f"schema_id is {number!r}", what_to_do=f"give a whole number from 0 to {_MOST_SCHEMA_ID}"
            )
        if not self.schema:
            raise ConfigError(
                "Avro has a schema_id and no schema",
                why="the id belongs to one schema, and a derived one changes with the stream",
                what_to_do="give the schema that the registry has under this id",
            )


def _check_avro_schema(text: str) -> None:
    try:
        found = json.loads(text)
    except (TypeError, ValueError) as wrong:
        raise ConfigError("the Avro schema is no JSON", why=str(wrong)) from None
    fields = found.get("fields") if isinstance(found, dict) and found.get("type") == "record" else None
    if not isinstance(fields, list) or not fields or not all(_is_field(one) for one in fields):
        raise ConfigError(
            "the Avro schema is not that of a record",
            what_to_do='write {"type": "record", "name": ..., "fields": [{"name": ..., "type": ...}, ...]}',
        )


def _is_field(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and "type" in value


# ----------------------------------------------------------------------------------------------------------
# Which side of Spark does a connector's work.


class Engine(enum.Enum):
    """Who reads or writes.

    Both sides leave the same things behind: offsets of one can be continued, and committables of
    one committed, by the other.
    """

    #: Spark's native source, and the writer in this package's JAR. Faster, needs JARs.
    JVM = "jvm"
    #: Pure Python on kafka-python; needs no JAR.
    PYTHON = "python"

    @classmethod
    def of(cls, value: str | Engine, setting: str) -> Engine:
        """Return the engine that a user named.

        Raises
        ------
        ConfigError
            There is none of that name.
        """
        try:
            return cls(value)
        except ValueError:
            raise ConfigError(f"{setting} is {value!r}", what_to_do='use "jvm" or "python"') from None
