"""Formats of records (JSON, Avro, CSV...): how their bytes become columns and back."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.core.config import require_positive
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.secrets import secret_of
from flinkish_spark.core.validation import hold_plain_values, instance_of, members_of, unusable
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.durations import Milliseconds

#: What fits the four bytes of a schema's id.
_MOST_SCHEMA_ID = 2**31 - 1


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
    transaction_timeout_ms: Milliseconds | None = None

    def __post_init__(self) -> None:
        hold_plain_values(self)
        if not self.topic:
            raise ConfigError("the dead-letter topic has no name", what_to_do="name an existing topic")
        if self.transaction_timeout_ms is not None:
            require_positive("transaction_timeout_ms", self.transaction_timeout_ms)


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


class OnSchemaChange(Choice):
    """Policy for records whose writer's schema has more than the source's own schema.

    A field that the writer's schema lacks is no such change: it is null, or has the default of the source's
    schema.
    """

    #: Stop the job, with the names of the fields, so that no field is left out by accident.
    FAIL = "fail"
    #: Start again with the newest schema of the subject: new columns, null in records from before. In Avro
    #: also for a value that the source's schema cannot hold; the column's type may be another one then.
    EVOLVE = "evolve"
    #: Read the fields of the source's schema, and leave out all others.
    LEAVE_OUT = "leave_out"


class SubjectNameStrategy(Choice):
    """Name of a schema's subject in a registry; the strategies are Confluent's."""

    #: ``<topic>-key`` or ``<topic>-value``.
    TOPIC_NAME = "topic_name"
    #: The full name of the record, whatever the topic.
    RECORD_NAME = "record_name"
    #: ``<topic>-<full name of the record>``.
    TOPIC_RECORD_NAME = "topic_record_name"


class Registration(Choice):
    """How a sink's schema gets into a registry."""

    #: Registered before the job starts; the registry refuses one that is not compatible.
    AUTOMATIC = "automatic"
    #: It must be registered already, under the subject; a job that writes another one is refused.
    REQUIRED = "required"


@dataclass(frozen=True)
class SchemaRegistry:
    """A schema registry that speaks the REST API of Confluent's.

    Asked by the driver before a job starts, and by tasks for schemas that they have not seen yet; an answer
    about a number is kept for the life of a process. Needs the extra ``schema-registry``.

    Parameters
    ----------
    url
        ``"https://registry:8081"``; several with commas between them.
    username, password
        For basic authentication. Both or none; neither stands in `url`. The password, and the token, may be
        ``env:NAME`` or ``file:/path`` of the driver.
    token
        In place of these: a bearer token.
    ca_location, certificate_location, key_location
        Files in PEM for TLS, on every machine that asks: who signs the registry's certificate, and the
        client's own.
    timeout_ms
        How long one answer is waited for.
    retry_ms
        For how long an answer that does not come is asked for again. Then the registry counts as away: the
        job restarts, and no record is called bad.
    strategy
        Under which name schemas stand.
    subject
        The name itself, in place of a strategy.
    registration
        How a sink's schema gets there.

    Examples
    --------
    >>> SchemaRegistry("http://registry:8081", username="job", password="secret")
    SchemaRegistry(url='http://registry:8081')
    """

    url: str
    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    ca_location: str = ""
    certificate_location: str = ""
    key_location: str = ""
    timeout_ms: Milliseconds = 10_000
    retry_ms: Milliseconds = 30_000
    strategy: SubjectNameStrategy = SubjectNameStrategy.TOPIC_NAME
    subject: str = ""
    registration: Registration = Registration.AUTOMATIC

    def __repr__(self) -> str:
        return f"SchemaRegistry(url={self.url!r})"

    def __getstate__(self) -> dict[str, object]:
        # A task gets the secrets themselves: their places are the driver's.
        return {**self.__dict__, **{name: self.secret(name) for name in ("password", "token")}}

    def secret(self, name: str) -> str:
        """Return a secret, read from where it is."""
        return secret_of(getattr(self, name), f"{name} of the schema registry").read()

    def __post_init__(self) -> None:
        hold_plain_values(self)
        urls = [one.strip() for one in self.url.split(",")] if isinstance(self.url, str) else [""]
        if not all(re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", one) for one in urls):
            raise ConfigError(
                "the URL of the schema registry cannot be used",
                why="it must begin with http:// or https://, and must not contain a name or a password",
                what_to_do='give SchemaRegistry("https://registry:8081", username=..., password=...)',
            )
        if bool(self.username) != bool(self.password) or (self.username and self.token):
            raise ConfigError(
                "the schema registry has a username without a password, a password alone, or a token as well",
                what_to_do="give username and password, or only a token, or none of the three",
            )
        for name in ("password", "token"):
            secret_of(getattr(self, name), f"{name} of the schema registry")  # Raises if it names no place.
        if self.key_location and not self.certificate_location:
            raise ConfigError(
                "the schema registry has a key_location and no certificate_location",
                what_to_do="give the certificate that the key belongs to",
            )
        require_positive("timeout_ms", self.timeout_ms)
        require_positive("retry_ms", self.retry_ms)
        for name, kind in (("strategy", SubjectNameStrategy), ("registration", Registration)):
            names = ", ".join(members_of(kind))
            instance_of(name, getattr(self, name), kind, what_to_do=f"use one of {names}")


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

    def __post_init__(self) -> None:
        check_policy("on_bad_record", self.on_bad_record)


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
class String:
    """Text in UTF-8, one value per record.

    Parameters
    ----------
    column
        The column with it: STRING of a source, of a sink one whose values have a text that says all of them.
    on_bad_record
        What a source does with bytes that are no UTF-8; a null value counts as such.
    """

    column: str = "value"
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL

    def __post_init__(self) -> None:
        check_policy("on_bad_record", self.on_bad_record)


@dataclass(frozen=True, slots=True)
class Csv:
    """A line of values, one per record, in the order of the fields, quoted as RFC 4180 says.

    Nothing between two delimiters is null, and ``""`` the empty text.

    Parameters
    ----------
    schema
        Fields as DDL; none of them nested. Needed to read; a sink writes all fields of its stream if none
        is named.
    delimiter
        Between values: one character, no quote and no end of a line.
    on_bad_record
        What a source does with a line of other values than the fields: too few, too many, or one that is no
        value of its type. A null value counts as such.

    Examples
    --------
    >>> Csv("user STRING, amount DECIMAL(10,2)", delimiter=";").delimiter
    ';'
    """

    schema: str = ""
    delimiter: str = ","
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL

    def __post_init__(self) -> None:
        check_policy("on_bad_record", self.on_bad_record)
        if not isinstance(self.delimiter, str) or len(self.delimiter) != 1 or self.delimiter in '"\r\n\0':
            raise ConfigError(
                f"delimiter is {self.delimiter!r}",
                what_to_do="give one character, which is no quote and no end of a line",
            )


@dataclass(frozen=True, slots=True)
class Avro:
    """Avro's binary form, one record of a schema each; with a registry in Confluent's wire format.

    A sink's records are encoded by Spark, so the session needs the Avro JAR of the pinned list whichever
    engine writes. A source's are read by fastavro, of the extra ``avro``.

    Parameters
    ----------
    schema
        A record's schema as JSON text. A sink writes the fields that it names, in its order; empty: derived
        from the stream, with every field nullable. A source gives its fields, whatever the writer's schema
        had besides; empty: the newest of the registry's subject at the first start of the job.
    schema_id
        Of a sink without a registry: under which number one knows `schema`; written in front of every
        record as a zero byte and four bytes. Needs `schema`. None: nothing is written in front.
    registry
        Where the schema of each record is asked for by the number in front of it, and that of a sink is
        registered. None: a source's records were written with `schema`, and have nothing in front.
    on_schema_change
        What a source does with records of a schema that has more. EVOLVE needs a registry and no `schema`.
    on_bad_record
        What a source does with bytes that are no record; a null value counts as such.

    Examples
    --------
    >>> Avro('{"type": "record", "name": "Order", "fields": [{"name": "user", "type": "string"}]}').schema_id
    """

    schema: str = ""
    schema_id: int | None = None
    registry: SchemaRegistry | None = None
    on_schema_change: OnSchemaChange = OnSchemaChange.FAIL
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL

    def __post_init__(self) -> None:
        check_policy("on_bad_record", self.on_bad_record)
        if self.schema:
            found = _parse_json(self.schema, "Avro schema")
            is_record = isinstance(found, dict) and found.get("type") == "record"
            fields = found.get("fields") if is_record else None
            if not isinstance(fields, list) or not fields or not all(map(_is_field, fields)):
                form = '{"type": "record", "name": ..., "fields": [{"name": ..., "type": ...}, ...]}'
                raise ConfigError("the Avro schema is not that of a record", what_to_do=f"write {form}")
        _check_change("Avro", self.schema, self.registry, self.on_schema_change)
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
        if self.registry is not None:
            raise ConfigError(
                "Avro has a schema_id and a registry",
                why="the registry gives the id",
                what_to_do="leave one of them out",
            )


@dataclass(frozen=True, slots=True)
class Protobuf:
    """Protocol Buffers, one message per record; with a registry in Confluent's wire format.

    Needs the extra ``protobuf``. What each type becomes is said in `docs/formats.md`.

    Parameters
    ----------
    descriptor
        A serialized FileDescriptorSet, as ``protoc --descriptor_set_out --include_imports`` writes it. Empty,
        of a source: the newest schema of the registry's subject at the first start of the job.
    message
        Full name of the message in it, ``"shop.Order"``. Empty: the only one of its last file.
    registry
        Where the schema of each record is asked for, and that of a sink is registered. None: records have
        nothing in front.
    on_schema_change, on_bad_record
        As for :class:`Avro`.

    Examples
    --------
    >>> from google.protobuf import timestamp_pb2
    >>> Protobuf.of(timestamp_pb2.Timestamp).message
    'google.protobuf.Timestamp'
    """

    descriptor: bytes = b""
    message: str = ""
    registry: SchemaRegistry | None = None
    on_schema_change: OnSchemaChange = OnSchemaChange.FAIL
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL

    def __post_init__(self) -> None:
        check_policy("on_bad_record", self.on_bad_record)
        if not isinstance(self.descriptor, bytes):
            raise ConfigError(
                f"descriptor is {type(self.descriptor).__name__}",
                what_to_do="give the bytes of the file, or take Protobuf.of(orders_pb2.Order)",
            )
        _check_change("Protobuf", self.descriptor, self.registry, self.on_schema_change)

    @classmethod
    def of(
        cls,
        message: Any,
        *,
        registry: SchemaRegistry | None = None,
        on_schema_change: OnSchemaChange = OnSchemaChange.FAIL,
        on_bad_record: BadRecordPolicy = OnBadRecord.FAIL,
    ) -> Protobuf:
        """Return the format of a message whose class a compiled module has: ``orders_pb2.Order``.

        The class is asked for its description once, here; no task needs its module.
        """
        known: Any = getattr(message, "DESCRIPTOR", None)
        if getattr(known, "full_name", None) is None or getattr(known, "file", None) is None:
            raise ConfigError(
                f"{message!r} is no message of a compiled module",
                what_to_do="give a class such as orders_pb2.Order",
            )
        return cls(
            _serialize_descriptors(known.file), known.full_name, registry, on_schema_change, on_bad_record
        )


def _serialize_descriptors(file: Any) -> bytes:
    """Return a file's descriptors with those of all its imports; imported files come first."""
    from google.protobuf import descriptor_pb2

    found = descriptor_pb2.FileDescriptorSet()
    known: set[str] = set()

    def add(one: Any) -> None:
        if one.name in known:
            return
        known.add(one.name)
        for needed in one.dependencies:
            add(needed)
        one.CopyToProto(found.file.add())

    add(file)
    return bytes(found.SerializeToString(deterministic=True))


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON objects that a JSON Schema describes; with a registry in Confluent's wire format.

    Needs the extra ``json-schema``. Drafts 4 to 2020-12.

    Parameters
    ----------
    schema
        The schema as JSON text, of an object. A sink without one derives it from the stream; a source
        without one takes the newest of the registry's subject at the first start of the job.
    fields
        Columns as DDL, in place of those that follow from the schema, as for :class:`Json`:
        ``"amount DECIMAL(10,2)"`` keeps every digit, which the type ``number`` does not promise.
    registry, on_schema_change, on_bad_record
        As for :class:`Avro`. A record is bad, too, if it is not valid by the schema it was written with.
    """

    schema: str = ""
    fields: str = ""
    registry: SchemaRegistry | None = None
    on_schema_change: OnSchemaChange = OnSchemaChange.FAIL
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL

    def __post_init__(self) -> None:
        check_policy("on_bad_record", self.on_bad_record)
        _check_change("JsonSchema", self.schema or self.fields, self.registry, self.on_schema_change)
        if self.schema and not isinstance(_parse_json(self.schema, "JSON Schema"), dict):
            raise ConfigError("the JSON Schema is no object", what_to_do='write {"type": "object", ...}')


#: How the bytes of a key or a value become columns, and back.
Format = Json | Raw | String | Csv | Avro | Protobuf | JsonSchema
#: Of these, those with a schema that a registry may hold.
RegisteredFormat = Avro | Protobuf | JsonSchema


def check_policy(name: str, value: object) -> None:
    if not isinstance(value, BadRecordPolicy):
        raise unusable(
            name,
            value,
            wanted="an OnBadRecord or a DeadLetter",
            what_to_do='use OnBadRecord.FAIL, OnBadRecord.DROP or DeadLetter("topic")',
            choices=members_of(OnBadRecord),
        )


def check_format(name: str, value: object) -> None:
    if not isinstance(value, Format):
        raise ConfigError(
            f"{name} is {value!r}",
            what_to_do='use Json("field TYPE, ..."), Csv(...), String(...), Avro(...), Protobuf(...), '
            "JsonSchema(...) or Raw(...)",
        )


def _check_change(
    name: str, schema: str | bytes, registry: SchemaRegistry | None, change: OnSchemaChange
) -> None:
    if registry is not None and not isinstance(registry, SchemaRegistry):
        raise ConfigError(f"registry is {registry!r}", what_to_do="give a SchemaRegistry(...)")
    instance_of("on_schema_change", change, OnSchemaChange, what_to_do="use OnSchemaChange.FAIL")
    if change is OnSchemaChange.EVOLVE and (schema or registry is None):
        raise ConfigError(
            f"{name} has OnSchemaChange.EVOLVE, and "
            + ("no registry" if registry is None else "a schema or fields of its own"),
            why="new columns come from the newest schema of a registry's subject",
            what_to_do="give a registry and neither of them, or choose OnSchemaChange.FAIL or LEAVE_OUT",
        )


def _parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as wrong:
        raise ConfigError(
            f"the {what} is no JSON", why=str(wrong), what_to_do="give the schema as JSON text"
        ) from None


def _is_field(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and "type" in value
