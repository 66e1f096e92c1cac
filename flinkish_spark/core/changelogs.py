"""Changelogs: streams of changes to the rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.formats import (
    Avro,
    BadRecordPolicy,
    OnBadRecord,
    OnSchemaChange,
    SchemaRegistry,
    check_policy,
)
from flinkish_spark.core.validation import instance_of
from flinkish_spark.protocol.choices import Choice

#: The column of a stream with the kind of each row.
ROW_KIND = "_row_kind"


class RowKind(Choice):
    """The kind of change that a row of a changelog stands for; Flink's kinds and short names.

    An update may come as two rows, the old one and the new one; both are of one record of the log, and follow
    each other.

    Examples
    --------
    >>> RowKind("-U"), RowKind.UPDATE_BEFORE.is_retraction
    (<RowKind.UPDATE_BEFORE: '-U'>, True)
    """

    INSERT = "+I"
    UPDATE_BEFORE = "-U"
    UPDATE_AFTER = "+U"
    DELETE = "-D"

    @property
    def is_retraction(self) -> bool:
        """True if the row retracts an earlier one."""
        return self in (RowKind.UPDATE_BEFORE, RowKind.DELETE)


#: The kinds that retract a row.
RETRACTIONS = tuple(kind.value for kind in RowKind if kind.is_retraction)


class ChangelogMode(Choice):
    """Which rows a source emits for an update; Flink's word."""

    #: The old row, -U, and the new row, +U: an aggregate needs both, to retract the old one.
    ALL = "all"
    #: The new row, +U, alone: enough for a sink that keeps one row per key.
    UPSERT = "upsert"


class EpochUnit(Choice):
    """Unit of a number that stands for a time since 1970."""

    MILLISECONDS = 1_000
    MICROSECONDS = 1_000_000
    NANOSECONDS = 1_000_000_000


class DecimalHandling(Choice):
    """How Debezium writes decimals: its `decimal.handling.mode`."""

    #: The unscaled number in base64. The declared scale is the column's, which the number does not say.
    PRECISE = "precise"
    #: As text.
    STRING = "string"
    #: As a number.
    DOUBLE = "double"


#: Debezium's default `unavailable.value.placeholder`.
UNAVAILABLE = "__debezium_unavailable_value"


@dataclass(frozen=True)
class _Changes:
    schema: str
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL
    mode: ChangelogMode = ChangelogMode.ALL

    def __post_init__(self) -> None:
        check_policy("on_bad_record", self.on_bad_record)
        instance_of("mode", self.mode, ChangelogMode, what_to_do="use ChangelogMode.ALL or UPSERT")


@dataclass(frozen=True)
class DebeziumJson(_Changes):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        for one in self.decimals.values() if isinstance(self.decimals, Mapping) else (self.decimals,):
            instance_of("decimals", one, DecimalHandling, what_to_do="use DecimalHandling.PRECISE")
        instance_of("unavailable", self.unavailable, str, what_to_do="give the connector's placeholder")
        units = self.epoch_units
        if not isinstance(units, Mapping) or not all(isinstance(one, EpochUnit) for one in units.values()):
            raise ConfigError(
                f"epoch_units is {units!r}",
                what_to_do='give units by column: {"created_at": EpochUnit.MICROSECONDS}',
            )


@dataclass(frozen=True)
class DebeziumMongoJson(_Changes):
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


@dataclass(frozen=True)
class _ChangesOfTables(_Changes):
    database: str = ""
    table: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("database", "table"):
            instance_of(name, getattr(self, name), str, what_to_do="give a name, or leave it out")


@dataclass(frozen=True)
class CanalJson(_ChangesOfTables):
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


@dataclass(frozen=True)
class MaxwellJson(_ChangesOfTables):
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


@dataclass(frozen=True)
class DebeziumAvro:
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
        instance_of("mode", self.mode, ChangelogMode, what_to_do="use ChangelogMode.ALL or UPSERT")
        instance_of("unavailable", self.unavailable, str, what_to_do="give the connector's placeholder")
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


Changes = DebeziumJson | DebeziumAvro | DebeziumMongoJson | CanalJson | MaxwellJson
