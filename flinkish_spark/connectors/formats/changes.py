"""Formats of change data capture: Debezium, Canal and Maxwell."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pyspark.sql import types as T

from flinkish_spark.connectors.formats.avro_format import Avro
from flinkish_spark.connectors.formats.changelog import (
    AvroChangelog,
    CanalEnvelope,
    DebeziumEnvelope,
    Envelope,
    JsonChangelog,
    MaxwellEnvelope,
    MongoEnvelope,
    TableEnvelope,
)
from flinkish_spark.connectors.formats.changelog_texts import DecimalHandling, EpochUnit, Texts
from flinkish_spark.connectors.formats.reader import OnSchemaChange
from flinkish_spark.connectors.formats.registry import SchemaRegistry
from flinkish_spark.connectors.plain_formats import parse_fields
from flinkish_spark.contracts.format import Changelog, Changes, Format
from flinkish_spark.core.changelogs import ChangelogMode
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import check_fields
from flinkish_spark.core.formats import BadRecordPolicy, OnBadRecord

#: Debezium's default `unavailable.value.placeholder`.
UNAVAILABLE = "__debezium_unavailable_value"


@dataclass(frozen=True)
class _JsonChanges(Changes):
    schema: str
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL
    mode: ChangelogMode = ChangelogMode.ALL

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def _make_envelope(self) -> Envelope: ...

    def _check_columns(self, fields: T.StructType) -> None:
        """Refuse settings that do not fit the columns."""

    def make_format(self, metadata: Sequence[str]) -> Format:
        made = JsonChangelog(self, self._make_envelope(), parse_fields(self.schema), metadata)
        self._check_columns(made.fields)
        return made.json

    def make_changelog(self, fields: T.StructType, metadata: Sequence[str]) -> Changelog:
        return JsonChangelog(self, self._make_envelope(), parse_fields(self.schema), metadata)


@dataclass(frozen=True)
class DebeziumJson(_JsonChanges):
    """Changes as Debezium's connectors write them in JSON, with their schema in each record or without.

    ``c`` and ``r`` (a row of a snapshot) are +I, ``u`` -U and +U, ``d`` -D. Everything else, such as ``t``
    for a table that was emptied, cannot be said of rows, and is a bad record; so is an update without
    `before` in ChangelogMode.ALL.

    Parameters
    ----------
    schema
        Columns of the table as DDL.
    on_bad_record
        What to do with a record that is no change of such a row.
    mode
        What is made of an update.
    epoch_units
        By column, what a number counts where it stands for a TIMESTAMP: milliseconds for
        `io.debezium.time.Timestamp`, microseconds for `MicroTimestamp`, nanoseconds for `NanoTimestamp`.
        Without it such a column wants a text.
    decimals
        The connector's `decimal.handling.mode`; or by column, and PRECISE for the others. A DECIMAL without
        places behind the point has to be told by column, unless all are STRING or DOUBLE: some connectors
        write whole numbers as numbers, whatever the mode (DOUBLE here).
    unavailable
        The connector's `unavailable.value.placeholder`: what stands for a long value that has not changed
        and that PostgreSQL or Oracle did not tell. Such a record is bad, it would overwrite the value. Empty:
        none is looked for.

    Examples
    --------
    >>> DebeziumJson("id LONG, at TIMESTAMP", epoch_units={"at": EpochUnit.MICROSECONDS}).mode
    <ChangelogMode.ALL: 'all'>
    """

    epoch_units: Mapping[str, EpochUnit] = field(default_factory=dict)
    decimals: DecimalHandling | Mapping[str, DecimalHandling] = DecimalHandling.PRECISE
    unavailable: str = UNAVAILABLE

    def _make_envelope(self) -> Envelope:
        unavailable = _find_unavailable_texts(self.unavailable)
        return DebeziumEnvelope(self, Texts(True, self.epoch_units, self.decimals, unavailable))

    def _check_columns(self, fields: T.StructType) -> None:
        _check_names(fields, "epoch_units", self.epoch_units, T.TimestampType, T.TimestampNTZType)
        told = self.decimals if isinstance(self.decimals, Mapping) else {}
        _check_names(fields, "decimals", told, T.DecimalType)
        if isinstance(self.decimals, DecimalHandling) and self.decimals is not DecimalHandling.PRECISE:
            return
        for column in fields:
            kind = column.dataType
            if isinstance(kind, T.DecimalType) and not kind.scale and column.name not in told:
                raise ConfigError(
                    f"the column '{column.name}' of DebeziumJson is {kind.simpleString()}, and decimals does "
                    "not say how it is written",
                    why="some connectors write whole numbers as plain numbers; the text 1234 is such a "
                    "number, and also the base64 of another one",
                    what_to_do=f'decimals={{"{column.name}": DecimalHandling.PRECISE}} if it is base64, '
                    "DecimalHandling.DOUBLE if it is a number; or declare LONG",
                )


@dataclass(frozen=True)
class DebeziumMongoJson(_JsonChanges):
    """Changes as Debezium's connector for MongoDB writes them in JSON: rows are documents, as texts.

    The kinds are those of :class:`DebeziumJson`. Values are those of MongoDB's extended JSON. What a document
    was before, the connector tells with a `capture.mode` of pre-images alone.

    Parameters
    ----------
    schema
        Fields of the documents as DDL; one that a document does not have is null.
    on_bad_record
        As of :class:`DebeziumJson`. An update without `after` is bad, too: the document was gone when the
        connector looked for it.
    mode
        In ChangelogMode.ALL an update and a deletion want `before`. In UPSERT neither does, and the source
        needs the record's key: all fields of a deletion may be null but that.

    Examples
    --------
    >>> DebeziumMongoJson("_id LONG, name STRING", mode=ChangelogMode.UPSERT).on_bad_record
    <OnBadRecord.FAIL: 'fail'>
    """

    def check_keyless(self) -> None:
        if self.mode is ChangelogMode.UPSERT:
            # A deletion may name its document by the record's key alone.
            what = "the value is DebeziumMongoJson in ChangelogMode.UPSERT, and the source has no key"
            raise ConfigError(what, what_to_do='read it, key=Json("id STRING"), and let sinks go by it')

    def _make_envelope(self) -> Envelope:
        return MongoEnvelope(self)


@dataclass(frozen=True)
class _TableChanges(_JsonChanges):
    _envelope: ClassVar[type[TableEnvelope]]
    database: str = ""
    table: str = ""

    def _make_envelope(self) -> Envelope:
        return self._envelope(self, self.database, self.table)


@dataclass(frozen=True)
class CanalJson(_TableChanges):
    """Changes of MySQL as Canal writes them in JSON: of several rows in a record, values as text.

    ``INSERT`` is +I, ``UPDATE`` -U and +U, ``DELETE`` -D. Records about definitions (``CREATE``, ``ALTER``,
    indexes) are passed over; ``TRUNCATE``, ``ERASE`` and ``RENAME``, after which rows are gone, are bad.

    Parameters
    ----------
    schema
        Columns of the table as DDL; BINARY and nested ones are none.
    on_bad_record, mode
        As of :class:`DebeziumJson`. In ChangelogMode.UPSERT, an update of a column that `pkNames` names is
        -D and +U.
    database, table
        Records of others are left out. Empty: none are.

    Examples
    --------
    >>> CanalJson("id LONG, name STRING", table="products").table
    'products'
    """

    _envelope = CanalEnvelope


@dataclass(frozen=True)
class MaxwellJson(_TableChanges):
    """Changes of MySQL as Maxwell writes them in JSON.

    ``insert`` and ``bootstrap-insert`` are +I, ``update`` -U and +U, ``delete`` -D. Records about
    definitions, and the begin and end of a bootstrap, are passed over; ``table-drop`` and ``database-drop``
    are bad.

    Parameters
    ----------
    schema
        Columns of the table as DDL.
    on_bad_record, mode
        As of :class:`DebeziumJson`. In ChangelogMode.UPSERT, an update of a column that
        `primary_key_columns` names, if the records have it, is -D and +U.
    database, table
        As of :class:`CanalJson`.

    Examples
    --------
    >>> MaxwellJson("id LONG, name STRING").database
    ''
    """

    _envelope = MaxwellEnvelope


@dataclass(frozen=True)
class DebeziumAvro(Changes):
    """Changes as Debezium's connectors write them in Avro, with a schema registry as a rule.

    The envelope is a record, and so are the rows in it: their fields are the columns, of the types that
    `docs/formats.md` says. The kinds are those of :class:`DebeziumJson`.

    Parameters
    ----------
    schema, registry, on_schema_change, on_bad_record
        Of the envelope, as of :class:`~flinkish_spark.Avro`. A record is bad, too, if it is no change.
    mode
        What is made of an update.
    unavailable
        As of :class:`DebeziumJson`, in fields that are texts, bytes or arrays of texts.

    Examples
    --------
    >>> DebeziumAvro(registry=SchemaRegistry("http://registry:8081")).mode
    <ChangelogMode.ALL: 'all'>
    """

    schema: str = ""
    registry: SchemaRegistry | None = None
    on_schema_change: OnSchemaChange = OnSchemaChange.FAIL
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL
    mode: ChangelogMode = ChangelogMode.ALL
    unavailable: str = UNAVAILABLE

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.envelope  # Raises if it cannot be.

    @property
    def envelope(self) -> Avro:
        """How the envelope is read."""
        return Avro(
            self.schema,
            registry=self.registry,
            on_schema_change=self.on_schema_change,
            on_bad_record=self.on_bad_record,
        )

    def make_format(self, metadata: Sequence[str]) -> Format:
        return self.envelope

    def make_changelog(self, fields: T.StructType, metadata: Sequence[str]) -> Changelog:
        return AvroChangelog(self, fields, self.unavailable, metadata)


def _check_names(fields: T.StructType, setting: str, names: Iterable[str], *kinds: type[T.DataType]) -> None:
    able = [column.name for column in fields if isinstance(column.dataType, kinds)]
    wrong = [one for one in names if one not in able]
    if wrong:
        raise ConfigError(
            f"{setting} has '{wrong[0]}', which is no {kinds[0].typeName().upper()} of the schema",
            what_to_do=f"choose among {', '.join(able)}" if able else "leave it out",
        )


def _find_unavailable_texts(placeholder: str) -> Sequence[str]:
    """Return the texts that stand for a value which the connector could not read, one per type of column."""
    # As PostgreSQL's connector writes them: a text, bytes, hstore and JSON; arrays of texts, bytes, UUIDs and
    # numbers. They include those of Oracle's connector.
    if not placeholder:
        return ()
    data = placeholder.encode()
    in_base64 = base64.b64encode(data).decode()
    named = uuid.UUID(bytes=hashlib.md5(data, usedforsecurity=False).digest(), version=3)
    arrays = [placeholder], [in_base64], [str(named)], list(data), [float(one) for one in data]
    as_json = [json.dumps(one, separators=(",", ":")) for one in ({placeholder: placeholder}, *arrays)]
    return placeholder, in_base64, *as_json
