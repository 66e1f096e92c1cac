"""Change data capture: rows with a row kind from records of Debezium, Canal and Maxwell.

A record is parsed in two steps. Its envelope is a JSON object that yields entries: a row kind, and the row's
values by column, as text. Then each text is parsed as its column's type. If one does not parse, the record is
bad: no value is rounded or guessed.

The formats are read as their own documentation says, or, where it says nothing, as Flink's `debezium-json`,
`canal-json` and `maxwell-json` read them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.connectors.bad_records import raise_unreadable
from flinkish_spark.connectors.formats.changelog_texts import DocumentTexts, Texts
from flinkish_spark.connectors.plain_formats import Json
from flinkish_spark.contracts.format import Changelog, Changes, name_metadata_column
from flinkish_spark.core.changelogs import ROW_KIND, ChangelogMode, RowKind
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.types.arrow_columns import to_column_function
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.hints import parts_of
from flinkish_spark.types.schemas import PREFIX

#: Returns a member of an envelope, by its name.
MemberReader = Callable[[str], Column]

_VALUES = "map<string,string>"
_TEXTS = T.MapType(T.StringType(), T.StringType())
_ENTRIES, _ENTRY = f"{PREFIX}entries", f"{PREFIX}entry"
_PLACE, _READ = f"{PREFIX}place", f"{PREFIX}read"
_WRONG = f"{PREFIX}wrong"
_MOST_DETAIL = 1_000
_INTERVALS = (T.DayTimeIntervalType, T.YearMonthIntervalType)


class _MetadataField(NamedTuple):
    """A metadata column that a source can be asked for; its name is used without the prefix "value."."""

    #: The member of the envelope that it is computed from.
    member: str
    column: Callable[[MemberReader], Column]


def _read_member(member: str) -> _MetadataField:
    return _MetadataField(member, lambda read: read(member))


def _read_source_member(name: str) -> _MetadataField:
    return _MetadataField("source", lambda read: F.try_element_at(read("source"), F.lit(name)))


class Envelope(ABC):
    #: The type of each member, as DDL.
    members: Mapping[str, str]
    #: The members that entries are computed from.
    needed: tuple[str, ...]
    metadata: Mapping[str, _MetadataField]
    texts: Texts
    #: Types that no column can have.
    unfit: tuple[type[T.DataType], ...] = ()
    #: Says in error messages what a record must have.
    hint: str

    def __init__(self, form: Changes, row: T.DataType = _TEXTS) -> None:
        self.is_upsert = form.mode is ChangelogMode.UPSERT
        entry = T.StructType([T.StructField("kind", T.StringType()), T.StructField("row", row)])
        #: The type of :meth:`entries`: an array of row kinds and rows.
        self.kind = T.ArrayType(entry)

    def schema(self, metadata: Sequence[str]) -> str:
        names = dict.fromkeys((*self.needed, *(self.metadata[one].member for one in metadata)))
        return ", ".join(f"{quote_name(name)} {self.members[name]}" for name in names)

    def unwrap(self, read: MemberReader) -> MemberReader:
        return read

    @abstractmethod
    def entries(self, read: MemberReader) -> Column:
        """Return the entries of a record; null if the record is no change of this format."""

    def _entries(self, *entries: Column) -> Column:
        return F.array(*entries).cast(self.kind)


def _entry(kind: RowKind, row: Column) -> Column:
    return F.struct(F.lit(kind.value).alias("kind"), row.alias("row"))


def _differs(before: Column, after: Column, names: Column) -> Column:
    def is_other(name: Column) -> Column:
        return ~F.try_element_at(before, name).eqNullSafe(F.try_element_at(after, name))

    return F.coalesce(F.exists(names, is_other), F.lit(False))


class DebeziumEnvelope(Envelope):
    hint = (
        "op is c, r, u or d; d has before, and u in ChangelogMode.ALL; "
        "each value is known: REPLICA IDENTITY FULL in PostgreSQL"
    )
    needed = ("before", "after", "op")
    _TRANSACTION = "STRUCT<id: STRING, total_order: LONG, data_collection_order: LONG>"
    members: Mapping[str, str] = {
        "before": _VALUES,
        "after": _VALUES,
        "op": "STRING",
        "ts_ms": "LONG",
        "source": _VALUES,
        "transaction": _TRANSACTION,
        "schema": "STRING",
    }
    metadata: Mapping[str, _MetadataField] = {
        "schema": _read_member("schema"),
        "ingestion-timestamp": _MetadataField("ts_ms", lambda read: F.timestamp_millis(read("ts_ms"))),
        "source.timestamp": _MetadataField(
            "source",
            lambda read: F.timestamp_millis(_read_source_member("ts_ms").column(read).try_cast("long")),
        ),
        "source.database": _read_source_member("db"),
        "source.schema": _read_source_member("schema"),
        "source.table": _read_source_member("table"),
        "source.properties": _read_member("source"),
        "transaction.id": _MetadataField("transaction", lambda read: read("transaction")["id"]),
        "transaction.total-order": _MetadataField(
            "transaction", lambda read: read("transaction")["total_order"]
        ),
        "transaction.data-collection-order": _MetadataField(
            "transaction", lambda read: read("transaction")["data_collection_order"]
        ),
    }

    def __init__(self, form: Changes, texts: Texts) -> None:
        super().__init__(form)
        self.texts = texts

    def schema(self, metadata: Sequence[str]) -> str:
        alone = super().schema([one for one in metadata if one != "schema"])
        inside = alone.replace("` ", "`: ")
        around = ["`schema` STRING"] if "schema" in metadata else []
        return ", ".join([alone, f"`payload` STRUCT<{inside}>", *around])

    def unwrap(self, read: MemberReader) -> MemberReader:
        # A record with its schema has the change in the member `payload`.
        payload = read("payload")

        def member(name: str) -> Column:
            if name == "schema":
                return read(name)
            return F.when(payload.isNotNull(), payload[name]).otherwise(read(name))

        return member

    def entries(self, read: MemberReader) -> Column:
        before, after, op = read("before"), read("after"), read("op")
        is_there, was_there = after.isNotNull(), before.isNotNull()
        update = self._entries(_entry(RowKind.UPDATE_BEFORE, before), _entry(RowKind.UPDATE_AFTER, after))
        if self.is_upsert:
            update, was_needed = self._entries(_entry(RowKind.UPDATE_AFTER, after)), F.lit(True)
        else:
            # With another REPLICA IDENTITY of PostgreSQL's, `before` has only the key.
            was_needed = was_there & self._is_whole(before, after)
        return (
            F.when(op.isin("c", "r") & is_there, self._entries(_entry(RowKind.INSERT, after)))
            .when((op == "u") & is_there & was_needed, update)
            .when((op == "d") & was_there, self._entries(_entry(RowKind.DELETE, before)))
        )

    def _is_whole(self, before: Column, after: Column) -> Column:
        return F.size(F.array_except(F.map_keys(after), F.map_keys(before))) == 0


class MongoEnvelope(DebeziumEnvelope):
    """The envelope of MongoDB's connector: `before` and `after` are documents, as text."""

    hint = "op is c, r, u or d; c, r and u have after; in ChangelogMode.ALL u and d have before: pre-images"
    members: Mapping[str, str] = {**DebeziumEnvelope.members, "before": "STRING", "after": "STRING"}
    metadata: Mapping[str, _MetadataField] = {
        **{
            one: field
            for one, field in DebeziumEnvelope.metadata.items()
            if one not in ("source.schema", "source.table")
        },
        "source.collection": _read_source_member("collection"),
    }

    def __init__(self, form: Changes) -> None:
        super().__init__(form, DocumentTexts())

    def entries(self, read: MemberReader) -> Column:
        def documents(name: str) -> Column:
            if name not in ("before", "after"):
                return read(name)
            return F.from_json(read(name), _VALUES, {"allowSingleQuotes": "false"})

        found = super().entries(documents)
        if not self.is_upsert:
            return found
        # Only the record's key says which document was deleted.
        is_nameless = (read("op") == "d") & read("before").isNull()
        unknown = self._entries(_entry(RowKind.DELETE, F.create_map().cast(_VALUES)))
        return F.when(is_nameless, unknown).otherwise(found)

    def _is_whole(self, before: Column, after: Column) -> Column:
        # `before` may lack fields of `after`: an update may add fields to a document.
        return F.lit(True)


class _AvroEnvelope(DebeziumEnvelope):
    def __init__(self, form: Changes, envelope: T.StructType) -> None:
        kinds = {one.name: one.dataType for one in envelope}
        row, op = kinds.get("after"), kinds.get("op")
        is_envelope = isinstance(row, T.StructType) and kinds.get("before") == row
        if not is_envelope or not isinstance(op, T.StringType) or not isinstance(row, T.StructType):
            raise SchemaError(
                "the Avro schema of DebeziumAvro is no envelope of Debezium's",
                why=f"it has no op, or before and after are not records of one schema: {', '.join(kinds)}",
                what_to_do="give the schema of the topic's values; of topics without an envelope, use Avro",
            )
        Envelope.__init__(self, form, row)
        self.row = row
        source, transaction = kinds.get("source"), kinds.get("transaction")
        self._source = set(source.names) if isinstance(source, T.StructType) else set()
        known = {*kinds, *(f"source.{one}" for one in self._source)}
        needs = {
            "ingestion-timestamp": "ts_ms",
            "source.timestamp": "source.ts_ms",
            "source.database": "source.db",
            "source.schema": "source.schema",
            "source.table": "source.table",
        }
        there = {name for name, needed in needs.items() if needed in known}
        there |= {"source.properties"} if self._source else set()
        of_transaction = transaction.names if isinstance(transaction, T.StructType) else []
        there |= {f"transaction.{name.replace('_', '-')}" for name in of_transaction}
        self.metadata = {name: one for name, one in DebeziumEnvelope.metadata.items() if name in there}

    def unwrap(self, read: MemberReader) -> MemberReader:
        def member(name: str) -> Column:
            if name != "source":
                return read(name)
            names = sorted(self._source)
            texts = [read(name)[one].cast("string") for one in names]
            return F.map_from_arrays(F.array(*map(F.lit, names)), F.array(*texts))

        return member

    def _is_whole(self, before: Column, after: Column) -> Column:
        # An Avro record has all of its fields.
        return F.lit(True)


class TableEnvelope(Envelope):
    def __init__(self, form: Changes, database: str, table: str) -> None:
        super().__init__(form)
        wanted = {"database": database, "table": table}
        self._wanted = {name: one for name, one in wanted.items() if one}
        self.needed = (*self.needed, *self._wanted)
        self.texts = Texts()

    def entries(self, read: MemberReader) -> Column:
        found = self._table_entries(read)
        if not self._wanted:
            return found
        is_mine = F.lit(True)
        for name, wanted in self._wanted.items():
            is_mine = is_mine & F.coalesce(read(name) == wanted, F.lit(False))
        return F.when(is_mine, found).otherwise(self._entries())

    @abstractmethod
    def _table_entries(self, read: MemberReader) -> Column: ...

    def _update(self, after: Column, changed: Column, key: Column) -> Column:
        """Return the entries of an updated row; null if the values before or after are unknown."""
        same = F.map_filter(after, lambda name, _: ~F.map_contains_key(changed, name))
        before = F.map_concat(same, changed)
        is_new = _entry(RowKind.UPDATE_AFTER, after)
        if not self.is_upsert:
            found = self._entries(_entry(RowKind.UPDATE_BEFORE, before), is_new)
        else:
            moved = self._entries(_entry(RowKind.DELETE, before), is_new)
            found = F.when(_differs(before, after, key), moved).otherwise(self._entries(is_new))
        return F.when(after.isNotNull() & changed.isNotNull(), found)


class CanalEnvelope(TableEnvelope):
    hint = "type is INSERT, UPDATE or DELETE; each row of data has one of old if it was updated"
    unfit = (T.BinaryType, T.StructType, T.ArrayType, T.MapType)
    needed = ("data", "old", "type", "pkNames")
    members: Mapping[str, str] = {
        "data": f"ARRAY<{_VALUES}>",
        "old": f"ARRAY<{_VALUES}>",
        "type": "STRING",
        "database": "STRING",
        "table": "STRING",
        "pkNames": "ARRAY<STRING>",
        "sqlType": "MAP<STRING, INT>",
        "ts": "LONG",
        "es": "LONG",
    }
    metadata: Mapping[str, _MetadataField] = {
        "database": _read_member("database"),
        "table": _read_member("table"),
        "sql-type": _read_member("sqlType"),
        "pk-names": _read_member("pkNames"),
        "ingestion-timestamp": _MetadataField("ts", lambda read: F.timestamp_millis(read("ts"))),
        "event-timestamp": _MetadataField("es", lambda read: F.timestamp_millis(read("es"))),
    }
    _PASSED_OVER = ("CREATE", "ALTER", "CINDEX", "DINDEX", "QUERY")

    def _table_entries(self, read: MemberReader) -> Column:
        data, old, what, key = read("data"), read("old"), read("type"), read("pkNames")
        has_rows = data.isNotNull() & ~F.exists(data, lambda row: row.isNull())
        updates = F.transform(data, lambda row, place: self._update(row, F.get(old, place), key))
        is_known = old.isNotNull() & ~F.exists(updates, lambda entries: entries.isNull())
        return (
            F.when((what == "INSERT") & has_rows, F.transform(data, lambda row: _entry(RowKind.INSERT, row)))
            .when((what == "DELETE") & has_rows, F.transform(data, lambda row: _entry(RowKind.DELETE, row)))
            .when((what == "UPDATE") & has_rows & is_known, F.flatten(updates))
            .when(what.isin(*self._PASSED_OVER), self._entries())
            .cast(self.kind)
        )


class MaxwellEnvelope(TableEnvelope):
    hint = "type is insert, update, delete or bootstrap-insert; an update has old"
    needed = ("data", "old", "type", "primary_key_columns")
    members: Mapping[str, str] = {
        "data": _VALUES,
        "old": _VALUES,
        "type": "STRING",
        "database": "STRING",
        "table": "STRING",
        "primary_key_columns": "ARRAY<STRING>",
        "ts": "LONG",
        "xid": "LONG",
    }
    metadata: Mapping[str, _MetadataField] = {
        "database": _read_member("database"),
        "table": _read_member("table"),
        "primary-key-columns": _read_member("primary_key_columns"),
        "ingestion-timestamp": _MetadataField("ts", lambda read: F.timestamp_seconds(read("ts"))),
        "transaction.id": _read_member("xid"),
    }
    _PASSED_OVER = (
        *("bootstrap-start", "bootstrap-complete"),
        *("table-create", "table-alter", "database-create", "database-alter"),
    )

    def _table_entries(self, read: MemberReader) -> Column:
        data, old, what = read("data"), read("old"), read("type")
        has_row = data.isNotNull()
        inserted, deleted = _entry(RowKind.INSERT, data), _entry(RowKind.DELETE, data)
        return (
            F.when(what.isin("insert", "bootstrap-insert") & has_row, self._entries(inserted))
            .when((what == "update") & has_row, self._update(data, old, read("primary_key_columns")))
            .when((what == "delete") & has_row, self._entries(deleted))
            .when(what.isin(*self._PASSED_OVER), self._entries())
        )


class _EnvelopeChangelog(Changelog):
    def __init__(
        self, form: Changes, envelope: Envelope, fields: T.StructType, metadata: Sequence[str]
    ) -> None:
        self.fields, self._envelope, self._metadata = fields, envelope, tuple(metadata)
        self.names = tuple(map(name_metadata_column, metadata))
        self._name, known = type(form).__name__, envelope.metadata
        listed = ", ".join(f"{one.name} {one.dataType.simpleString()}" for one in fields)
        what = f"change in {self._name} ({envelope.hint}) of the fields {listed}"
        self.why = f"the value is no {what}"[:_MOST_DETAIL]
        for one in metadata:
            if one not in known:
                raise ConfigError(
                    f"metadata asks for 'value.{one}', which {self._name} does not know",
                    what_to_do=f"choose among {', '.join('value.' + each for each in known)}",
                )
        if ROW_KIND in (one.lower() for one in fields.names):
            raise SchemaError(
                f"{self._name} has a field '{ROW_KIND}', which says the kinds of a changelog's rows",
                what_to_do="leave it out",
            )

    def find_misfits(self, frame: DataFrame, value: Column, time_zone: str) -> tuple[DataFrame, Column]:
        entries = self._envelope.entries(self._envelope.unwrap(lambda name: value[name]))
        # A separate column, made non-deterministic so that Spark does not inline it: Spark cannot evaluate a
        # Python function whose argument contains higher-order functions.
        frame = frame.withColumn(_ENTRIES, F.when(F.spark_partition_id() >= 0, entries))
        entries = F.col(_ENTRIES)
        return frame, F.coalesce(entries.isNull() | self._has_misfit(entries, time_zone), F.lit(True))

    @abstractmethod
    def _has_misfit(self, entries: Column, time_zone: str) -> Column: ...

    @abstractmethod
    def _parse_row(self, row: Column, time_zone: str) -> Column:
        """Return a struct of an entry's parsed values, with the flag :data:`_WRONG` if one does not parse."""

    def rows(
        self, frame: DataFrame, value: Column, kept: Sequence[str], passes: Column | None, time_zone: str
    ) -> DataFrame:
        read = self._envelope.unwrap(lambda name: value[name])
        why = F.lit(self.why)
        entries = F.coalesce(self._envelope.entries(read), raise_unreadable(why).cast(self._envelope.kind))
        if passes is not None:
            no_entry = F.array(F.struct(F.lit(None).alias("kind"), F.lit(None).alias("row")))
            entries = F.when(passes, no_entry.cast(self._envelope.kind)).otherwise(entries)
        beside = [
            self._envelope.metadata[one].column(read).alias(name)
            for one, name in zip(self._metadata, self.names, strict=True)
        ]
        place = F.struct("topic", "partition", "offset").alias(_PLACE)
        one_each = frame.select(F.explode(entries).alias(_ENTRY), *beside, *kept, place)
        one_each = one_each.withColumn(_READ, self._parse_row(F.col(_ENTRY)["row"], time_zone))
        parsed, misread = F.col(_READ), raise_unreadable(why, lambda name: F.col(_PLACE)[name])
        own = [
            F.when(parsed[_WRONG], misread.cast(one.dataType)).otherwise(parsed[one.name]).alias(one.name)
            for one in self.fields
        ]
        return one_each.select(*own, F.col(_ENTRY)["kind"].alias(ROW_KIND), *self.names, *kept)


class JsonChangelog(_EnvelopeChangelog):
    def __init__(
        self, form: Changes, envelope: Envelope, fields: T.StructType, metadata: Sequence[str]
    ) -> None:
        super().__init__(form, envelope, fields, metadata)
        self.json = Json(envelope.schema(metadata), form.on_bad_record)
        for column in fields:
            kind = column.dataType
            has_interval = any(isinstance(part, _INTERVALS) for part in parts_of(kind))
            if has_interval or isinstance(kind, envelope.unfit):
                raise SchemaError(
                    f"the column '{column.name}' of {self._name} is {kind.simpleString()}",
                    why="its records have no such values",
                    what_to_do="declare STRING, also within it, and convert it in a transform",
                )

    def _has_misfit(self, entries: Column, time_zone: str) -> Column:
        texts, fields = self._envelope.texts, self.fields

        def look(values: pa.Array) -> pa.Array:
            parse = texts.parser(fields, time_zone)
            found = (any(_row(parse, one["row"])[1] for one in each or ()) for each in values.to_pylist())
            return pa.array(found, pa.bool_())

        return to_column_function(look, T.BooleanType())(entries)

    def _parse_row(self, row: Column, time_zone: str) -> Column:
        texts, fields = self._envelope.texts, self.fields
        returned = T.StructType([*fields, T.StructField(_WRONG, T.BooleanType())])

        def read(values: pa.Array) -> pa.Array:
            parse = texts.parser(fields, time_zone)
            rows = (_row(parse, one) for one in values.to_pylist())
            return pa.array(({**row, _WRONG: is_wrong} for row, is_wrong in rows), arrow_type(returned))

        return to_column_function(read, returned)(row)


def _row(parse: Callable[[Mapping[str, str]], dict[str, Any]], texts: Any) -> tuple[dict[str, Any], bool]:
    try:
        return ({} if texts is None else parse(dict(texts))), False
    except (ValueError, RecursionError):
        return {}, True


class AvroChangelog(_EnvelopeChangelog):
    """Turns Debezium's Avro records into rows; their values are typed already."""

    def __init__(
        self, form: Changes, envelope: T.StructType, unavailable: str, metadata: Sequence[str]
    ) -> None:
        made = _AvroEnvelope(form, envelope)
        super().__init__(form, made, made.row, metadata)
        self._unavailable = unavailable

    def _has_misfit(self, entries: Column, time_zone: str) -> Column:
        return F.exists(entries, lambda one: self._parse_row(one["row"], time_zone)[_WRONG])

    def _parse_row(self, row: Column, time_zone: str) -> Column:
        values, wrong = [], F.lit(False)
        for one in self.fields:
            is_unavailable = self._is_unavailable(row[one.name], one.dataType)
            values.append(F.when(~is_unavailable, row[one.name]).alias(one.name))
            wrong = wrong | is_unavailable
        return F.struct(*values, wrong.alias(_WRONG))

    def _is_unavailable(self, value: Column, kind: T.DataType) -> Column:
        text = F.lit(self._unavailable)
        match kind if self._unavailable else None:
            case T.StringType():
                return value.eqNullSafe(text)
            case T.BinaryType():
                return value.eqNullSafe(text.cast("binary"))
            case T.ArrayType(elementType=T.StringType()):
                return value.eqNullSafe(F.array(text))
        return F.lit(False)
