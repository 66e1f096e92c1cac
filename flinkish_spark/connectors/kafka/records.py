"""The parts of a Kafka record as columns: fields of value and key, what stands beside them; tombstones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.session import session_time_zone
from flinkish_spark.connectors.changelog import AvroChangelog, Changelog, JsonChangelog, column_of
from flinkish_spark.connectors.formats import plain_json
from flinkish_spark.connectors.formats.decoding import (
    REASON,
    Part,
    part_of,
    stated_part,
    with_part,
    without_bad,
)
from flinkish_spark.connectors.kafka.checks import HEADERS, HEADERS_TYPE, letter_topic
from flinkish_spark.connectors.kafka.client.settings import INCLUDE_LEADER_EPOCH
from flinkish_spark.contracts.source import JobPlace
from flinkish_spark.core.changelogs import (
    ROW_KIND,
    ChangelogMode,
    Changes,
    DebeziumAvro,
    DebeziumMongoJson,
    RowKind,
)
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.formats import (
    BadRecordPolicy,
    Format,
    OnBadRecord,
    OnTombstone,
    Raw,
    check_format,
)
from flinkish_spark.core.validation import instance_of
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import quoted
from flinkish_spark.types.schemas import check_field_names

#: Of a reader of ours, the epoch in which the leader of the partition took the record; -1 if it is not known.
LEADER_EPOCH = "leaderEpoch"
#: By the number that Spark's `timestampType` has: what Kafka calls it, and Flink with it.
_TIMESTAMP_TYPES = {-1: "NoTimestampType", 0: "CreateTime", 1: "LogAppendTime"}


class _Part(NamedTuple):
    type: str
    #: From the columns of a reader.
    column: Callable[[], Column]


def _timestamp_type() -> Column:
    known = F.col("timestampType")
    return F.coalesce(*[F.when(known == number, F.lit(name)) for number, name in _TIMESTAMP_TYPES.items()])


def _headers() -> Column:
    # Readers have null where there are none.
    return F.coalesce(F.col(HEADERS), F.array().cast(HEADERS_TYPE))


def _headers_map() -> Column:
    names = F.array_distinct(F.transform(_headers(), lambda one: one["key"]))

    def values_of(name: Column) -> Column:
        of_name = F.filter(_headers(), lambda one: one["key"] == name)
        return F.transform(of_name, lambda one: one["value"])

    return F.map_from_arrays(names, F.transform(names, values_of))


def _leader_epoch() -> Column:
    return F.when(F.col(LEADER_EPOCH) >= 0, F.col(LEADER_EPOCH))


_PARTS: Mapping[str, _Part] = {
    "topic": _Part("STRING", lambda: F.col("topic")),
    "partition": _Part("INT", lambda: F.col("partition")),
    "offset": _Part("LONG", lambda: F.col("offset")),
    "timestamp": _Part("TIMESTAMP", lambda: F.col("timestamp")),
    "timestamp-type": _Part("STRING", _timestamp_type),
    "key": _Part("BINARY", lambda: F.col("key")),
    "headers": _Part(HEADERS_TYPE, _headers),
    "headers-map": _Part("MAP<STRING, ARRAY<BINARY>>", _headers_map),
    "leader-epoch": _Part("INT", _leader_epoch),
}
#: What can be asked for; its column has an underscore in front, and underscores for hyphens.
METADATA = tuple(_PARTS)
#: What only the planner asks for: the record's timestamp as event time.
OWN_TIME = "event time"
#: In front of what the format of the value knows.
_OF_VALUE = "value."
_WITH_HEADERS = frozenset({"headers", "headers-map"})


def checked_metadata(metadata: Sequence[str]) -> tuple[str, ...]:
    # A set is no list: columns have an order, the same in every process.
    is_list = isinstance(metadata, Sequence) and not isinstance(metadata, str)
    if not is_list or not all(name in METADATA or _is_of_value(name) for name in metadata):
        raise ConfigError(
            f"metadata is {metadata!r}",
            why=f"it must be a list of names among {', '.join(METADATA)}",
            what_to_do='give it like metadata=["topic", "partition", "offset"], or leave it out',
        )
    return tuple(dict.fromkeys(metadata))


def _is_of_value(name: object) -> bool:
    return isinstance(name, str) and name.startswith(_OF_VALUE)


def metadata_columns(metadata: Sequence[str]) -> list[Column]:
    own = [name for name in metadata if not _is_of_value(name)]
    made = [F.unix_millis("timestamp") if name == OWN_TIME else _PARTS[name].column() for name in own]
    return [one.alias(name) for one, name in zip(made, names_of(own), strict=True)]


def names_of(metadata: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns, without those that the value's format knows."""
    own = [name for name in metadata if not _is_of_value(name)]
    return tuple(C.TIME if name == OWN_TIME else "_" + name.replace("-", "_") for name in own)


def check_names(metadata: Sequence[str], fields: T.StructType) -> None:
    # Spark does not tell names apart by case.
    taken = {name.lower() for name in fields.names}
    for asked in metadata:
        of_value = asked.removeprefix(_OF_VALUE)
        name = column_of(of_value) if _is_of_value(asked) else names_of([asked])[0]
        if name in taken:
            raise SchemaError(
                f"the records have a field '{name}', and metadata asks for a column of that name",
                what_to_do=f"leave '{asked}' out of metadata, or rename the field",
            )


def options_for(metadata: Sequence[str]) -> dict[str, str]:
    options = {"includeHeaders": "true"} if _WITH_HEADERS & set(metadata) else {}
    return {**options, **({INCLUDE_LEADER_EPOCH: "true"} if "leader-epoch" in metadata else {})}


@dataclass(frozen=True)
class Decoding:
    """What becomes of the records of a source whose parts are read."""

    #: The format of values, and what is done with bad records.
    value: Format | Changes
    #: What stands beside their fields.
    metadata: tuple[str, ...] = ()
    #: The format of keys; None where these are not read.
    key: Format | None = None
    #: In front of the name of each of a key's fields.
    key_fields_prefix: str = ""
    #: What becomes of records without a value.
    tombstones: OnTombstone = OnTombstone.REFUSE

    def __post_init__(self) -> None:
        if self.key is not None:
            check_format("key", self.key)
        to_do = 'give a text, such as key_fields_prefix="key_", or leave it out'
        instance_of("key_fields_prefix", self.key_fields_prefix, str, what_to_do=to_do)
        to_do = "use OnTombstone.REFUSE, DROP, KEEP or DELETE"
        instance_of("tombstones", self.tombstones, OnTombstone, what_to_do=to_do)
        if self.key is None and self.tombstones is OnTombstone.DELETE:
            raise ConfigError(
                "tombstones is OnTombstone.DELETE, and the source has no key",
                why="a tombstone says by its key which row is deleted",
                what_to_do='name the key\'s fields: key=Json("id LONG")',
            )
        if self.key is None and self.key_fields_prefix:
            raise ConfigError("key_fields_prefix is given, and key is not", what_to_do="leave it out")
        if _own_policy(self.key) not in (None, OnBadRecord.FAIL, self.policy):
            raise ConfigError(
                "the key has a policy for bad records that is not the value's",
                why="a record is good or bad as a whole",
                what_to_do="give on_bad_record to the value, and leave it out of the key",
            )
        if isinstance(self.value, Changes) and self.tombstones in (OnTombstone.KEEP, OnTombstone.DELETE):
            raise ConfigError(
                f"tombstones is OnTombstone.{self.tombstones.name}, and the value is a format of changes",
                why="a deletion is a record of its own there; the tombstone behind it is for compaction",
                what_to_do="leave it out, or use OnTombstone.REFUSE",
            )
        is_upsert = isinstance(self.value, Changes) and self.value.mode is ChangelogMode.UPSERT
        if is_upsert and isinstance(self.value, DebeziumMongoJson) and self.key is None:
            raise ConfigError(
                "the value is DebeziumMongoJson in ChangelogMode.UPSERT, and the source has no key",
                why="a deletion may name its document by the record's key alone",
                what_to_do='read it, key=Json("id STRING"), and let sinks go by it',
            )
        if not isinstance(self.value, Changes) and self._of_value:
            raise ConfigError(
                f"metadata asks for '{_OF_VALUE}{self._of_value[0]}', "
                f"and the value is {type(self.value).__name__}",
                what_to_do="leave it out: only formats of changes know such things",
            )
        key = None if self.key is None else stated_part(self.key, "key")
        value = self._envelope or stated_part(self._format, "value")
        self._check_fields(key, value, None if value is None else self._changelog_of(value))

    @property
    def policy(self) -> BadRecordPolicy:
        return _own_policy(self.value) or _own_policy(self.key) or OnBadRecord.FAIL

    @property
    def drops_records(self) -> bool:
        return self.policy is OnBadRecord.DROP

    @property
    def letter_topic(self) -> str:
        return letter_topic(self.policy)

    def deserializer(self, uid: str, place: JobPlace, topics: Sequence[str]) -> Deserializer:
        """Return what makes rows; a registry is asked where it says what the columns are."""
        key = None if self.key is None else part_of(self.key, "key", uid, place, topics)
        value = self._envelope or part_of(self._format, "value", uid, place, topics)
        changelog = self._changelog_of(value)
        self._check_fields(key, value, changelog)
        return Deserializer(self, key, value, changelog)

    def fields_of(self, key: Part | None) -> T.StructType:
        fields = [] if key is None else list(key.fields)
        return T.StructType(
            [T.StructField(self.key_fields_prefix + one.name, one.dataType) for one in fields]
        )

    @cached_property
    def _json_changelog(self) -> JsonChangelog | None:
        if not isinstance(self.value, Changes) or isinstance(self.value, DebeziumAvro):
            return None
        return JsonChangelog(self.value, self._of_value)

    def _changelog_of(self, value: Part) -> Changelog | None:
        if isinstance(self.value, DebeziumAvro):
            return AvroChangelog(self.value, value.fields, self._of_value)
        return self._json_changelog

    @property
    def _envelope(self) -> Part | None:
        """How the values of a changelog in JSON are read."""
        if self._json_changelog is None:
            return None
        form = self._json_changelog.json
        return Part("value", form, plain_json.json_schema(form))

    @property
    def _format(self) -> Format:
        if isinstance(self.value, DebeziumAvro):
            return self.value.envelope
        assert not isinstance(self.value, Changes)
        return self.value

    @property
    def _of_value(self) -> tuple[str, ...]:
        return tuple(one.removeprefix(_OF_VALUE) for one in self.metadata if _is_of_value(one))

    def _check_fields(self, key: Part | None, value: Part | None, changelog: Changelog | None) -> None:
        """Refuse fields that would be one column; None stands for a part that is not known yet."""
        values = [] if value is None else list(value.fields if changelog is None else changelog.fields)
        keys = self.fields_of(key)
        check_field_names(keys, "the key of the records")
        check_field_names(T.StructType(values), "the value of the records")
        check_names(self.metadata, T.StructType([*values, *keys]))
        taken = {one.name.lower(): one for one in values}
        for one in keys:
            other = taken.get(one.name.lower())
            if other is not None and (other.name, other.dataType) != (one.name, one.dataType):
                raise SchemaError(
                    f"key and value have fields '{one.name}' and '{other.name}' that are not the same",
                    why=f"they are {one.dataType.simpleString()} and {other.dataType.simpleString()}",
                    what_to_do='give the key\'s fields other names: key_fields_prefix="key_"',
                )
        is_changelog = self.tombstones is OnTombstone.DELETE or isinstance(self.value, Changes)
        if is_changelog and ROW_KIND in {*taken, *(one.name.lower() for one in keys)}:
            raise SchemaError(
                f"the records have a field '{ROW_KIND}', in which a changelog has the kinds of its rows",
                what_to_do="leave it out",
            )


def _own_policy(form: Format | Changes | None) -> BadRecordPolicy | None:
    return None if form is None or isinstance(form, Raw) else form.on_bad_record


def decoding_of(
    value: Format | Changes | None,
    metadata: Sequence[str],
    key: Format | None,
    key_fields_prefix: str,
    tombstones: OnTombstone | None,
) -> Decoding | None:
    """Return what a user asked for; None if records come as they are."""
    is_raw = isinstance(value, Raw)
    if value is None or (is_raw and key is None):
        told = {"key": key, "tombstones": tombstones, "key_fields_prefix": key_fields_prefix or None}
        name = next((name for name, one in told.items() if one is not None), None)
        if name is not None:
            raise ConfigError(
                f"{name} is given, and records are not decoded",
                why="records come as they are, key and value as bytes, a tombstone with null",
                what_to_do='give value=Json("field TYPE, ...")',
            )
        return None
    usual = OnTombstone.DROP if isinstance(value, Changes) else OnTombstone.REFUSE
    usual = OnTombstone.KEEP if is_raw else usual
    return Decoding(
        value, tuple(metadata), key, key_fields_prefix, usual if tombstones is None else tombstones
    )


_KEEPING = (OnTombstone.KEEP, OnTombstone.DELETE)


@dataclass(frozen=True)
class Deserializer:
    """Makes rows of records, as a :class:`Decoding` says whose columns are known."""

    decoding: Decoding
    #: How the parts are read; no key where it is not.
    key: Part | None
    value: Part
    #: What becomes of the values that have been read; None where they are the row.
    changelog: Changelog | None

    @property
    def fields(self) -> T.StructType:
        """Fields of the key alone, then those of the value, as the stream has them."""
        values = self.value.fields if self.changelog is None else self.changelog.fields
        keys = self.decoding.fields_of(self.key)
        return T.StructType([*(one for one in keys if one.name not in values.names), *values])

    def rows(
        self,
        raw: DataFrame,
        counted_as: Sequence[str],
        kept: Sequence[str],
        is_barrier: Column | None = None,
    ) -> DataFrame:
        policy = self.decoding.policy
        passes = F.lit(False) if is_barrier is None else is_barrier
        if self.decoding.tombstones is OnTombstone.DROP:
            raw = raw.where(F.col("value").isNotNull() | passes)
        found, reason = self._read(raw)
        if self.changelog is not None and policy is not OnBadRecord.FAIL:
            found, reason = self._with_misfit(self.changelog, found, reason)
        found = without_bad(found.withColumn(REASON, reason), policy, counted_as, passes)
        if self.changelog is not None:
            # Under FAIL a change that says nothing of rows ends the task here: no other look is taken.
            beside = [*([] if self.key is None else [self.key.read]), *kept]
            time_zone = session_time_zone(raw.sparkSession)
            found = self.changelog.rows(found, F.col(self.value.read), beside, is_barrier, time_zone)
        return self._named(found, kept)

    def bad(self, raw: DataFrame) -> DataFrame:
        """Return the records of which no row can be made, and in the column `REASON` why."""
        if self.decoding.tombstones is OnTombstone.DROP:
            # Such a record is left out whatever its key is.
            raw = raw.where(F.col("value").isNotNull())
        found, reason = self._read(raw)
        if self.changelog is not None:
            found, reason = self._with_misfit(self.changelog, found, reason)
        return found.withColumn(REASON, reason).where(F.col(REASON).isNotNull())

    def _read(self, raw: DataFrame) -> tuple[DataFrame, Column]:
        """Add what the parts are read as; return why a record is bad, null where it is not."""
        reasons = []
        if self.key is not None:
            raw, of_key = with_part(raw, self.key)
            reasons.append(of_key)
            if self.decoding.tombstones is OnTombstone.DELETE:
                reasons.append(F.when(F.col("key").isNull(), F.lit("the record has no key")))
        raw, of_value = with_part(raw, self.value)
        reasons.append(of_value)
        if self.decoding.tombstones is OnTombstone.REFUSE:
            reasons.append(F.when(F.col("value").isNull(), F.lit("the record has no value")))
        return raw, F.coalesce(*reasons)

    def _with_misfit(
        self, changelog: Changelog, found: DataFrame, reason: Column
    ) -> tuple[DataFrame, Column]:
        envelope, time_zone = F.col(self.value.read), session_time_zone(found.sparkSession)
        found, is_misfit = changelog.with_misfit(found, envelope, time_zone)
        return found, F.coalesce(reason, F.when(is_misfit, F.lit(changelog.why)))

    def _named(self, frame: DataFrame, kept: Sequence[str]) -> DataFrame:
        """Return the columns of a stream: those of the key alone, of the value, the kind, those kept."""
        keys, values, kind = {}, {}, []
        if self.key is not None:
            of_key = F.col(self.key.read)
            names = zip(self.decoding.fields_of(self.key).names, self.key.fields.names, strict=True)
            keys = {name: of_key[own] for name, own in names}
        if self.changelog is not None:
            values = {name: F.col(quoted(name)) for name in self.changelog.fields.names}
            kind = [F.col(name) for name in (ROW_KIND, *self.changelog.names)]
        else:
            values = {name: F.col(self.value.read)[name] for name in self.value.fields.names}
        if self.decoding.tombstones in _KEEPING:
            is_tombstone = F.col("value").isNull()
            for name in values.keys() & keys.keys():
                values[name] = F.when(is_tombstone, keys[name]).otherwise(values[name])
            if self.decoding.tombstones is OnTombstone.DELETE:
                deleted, updated = (F.lit(one.value) for one in (RowKind.DELETE, RowKind.UPDATE_AFTER))
                kind = [F.when(is_tombstone, deleted).otherwise(updated).alias(ROW_KIND)]
        columns = {**keys, **values}
        return frame.select(*[columns[name].alias(name) for name in self.fields.names], *kind, *kept)
