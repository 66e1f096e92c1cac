"""The parts of a Kafka record as columns: fields of value and key, what stands beside them; tombstones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.connectors.changelog import PLACE, Changelog
from flinkish_spark.connectors.json import Misfit, decoded, is_bad, json_schema
from flinkish_spark.connectors.kafka.checks import HEADERS, HEADERS_TYPE, letter_topic
from flinkish_spark.connectors.kafka.client.settings import INCLUDE_LEADER_EPOCH
from flinkish_spark.core.changelogs import ROW_KIND, Changes, RowKind
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.formats import Engine, Json, OnBadRecord, OnTombstone, Raw
from flinkish_spark.core.validation import instance_of
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import quoted
from flinkish_spark.types.schemas import PREFIX

# ----------------------------------------------------------------------------------------------------------
# What stands beside a record's fields. Names are Flink's; types are those that lose nothing.


#: Of a reader of ours, the epoch in which the leader of the partition took the record; -1 if it is not known.
LEADER_EPOCH = "leaderEpoch"
#: By the number that Spark's `timestampType` has: what Kafka calls it, and Flink with it.
_TIMESTAMP_TYPES = {-1: "NoTimestampType", 0: "CreateTime", 1: "LogAppendTime"}


class _Part(NamedTuple):
    """One part of a record."""

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
    """Return the names that a user asked for, each once.

    Raises
    ------
    ConfigError
        It is no list, or one of them is not known.

    Examples
    --------
    >>> checked_metadata(["topic", "leader-epoch"])
    ('topic', 'leader-epoch')
    """
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


def check_readable(metadata: Sequence[str], reader: Engine) -> None:
    """Raise ConfigError for what a reader does not know of a record."""
    if "leader-epoch" in metadata and reader is Engine.JVM:
        raise ConfigError(
            "metadata asks for 'leader-epoch', and Spark's own Kafka source reads",
            why="it does not tell the epoch of a record",
            what_to_do='add reader="python"; or leave it out',
        )


def metadata_columns(metadata: Sequence[str]) -> list[Column]:
    """Return the columns, made from those of a Kafka reader."""
    own = [name for name in metadata if not _is_of_value(name)]
    made = [F.unix_millis("timestamp") if name == OWN_TIME else _PARTS[name].column() for name in own]
    return [one.alias(name) for one, name in zip(made, names_of(own), strict=True)]


def names_of(metadata: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns, without those that the value's format knows.

    Examples
    --------
    >>> names_of(["topic", "timestamp-type"])
    ('_topic', '_timestamp_type')
    """
    own = [name for name in metadata if not _is_of_value(name)]
    return tuple(C.TIME if name == OWN_TIME else "_" + name.replace("-", "_") for name in own)


def check_names(metadata: Sequence[str], fields: T.StructType) -> None:
    """Raise SchemaError if a field of the records has the name of a metadata column."""
    # Spark does not tell names apart by case.
    taken = {name.lower() for name in fields.names}
    both = [name for name in names_of(metadata) if name in taken]
    if both:
        raise SchemaError(
            f"the JSON schema has a field '{both[0]}', and metadata asks for a column of that name",
            what_to_do=f"leave '{both[0][1:]}' out of metadata, or rename the field",
        )


def options_for(metadata: Sequence[str]) -> dict[str, str]:
    """Return the options of a reader that make it read what is asked for."""
    options = {"includeHeaders": "true"} if _WITH_HEADERS & set(metadata) else {}
    return {**options, **({INCLUDE_LEADER_EPOCH: "true"} if "leader-epoch" in metadata else {})}


# ----------------------------------------------------------------------------------------------------------
# From a record to a row: fields of the value and of the key, and what a tombstone is.


#: While a key is decoded, the columns of its record have this before their names.
_ASIDE = f"{PREFIX}aside_"
_KEY, _IS_TOMBSTONE = f"{PREFIX}key_fields", f"{PREFIX}is_tombstone"
_IS_BARRIER = f"{PREFIX}is_barrier"


@dataclass(frozen=True)
class Decoding:
    """What becomes of the records of a source whose values have fields.

    Parameters
    ----------
    value
        Fields of the values, and what is done with records that do not have them.
    metadata
        What stands beside them.
    key
        Fields of the keys; None where these are not read. Bad ones are treated as bad values are.
    key_fields_prefix
        In front of the name of each of a key's fields.
    tombstones
        What becomes of records without a value.

    Raises
    ------
    ConfigError, SchemaError
        They contradict each other.
    """

    value: Json | Changes
    metadata: tuple[str, ...] = ()
    key: Json | None = None
    key_fields_prefix: str = ""
    tombstones: OnTombstone = OnTombstone.REFUSE

    def __post_init__(self) -> None:
        key_type = (Json, type(None))
        if not isinstance(self.key, key_type):
            raise ConfigError(f"key is {self.key!r}", what_to_do='give Json("id LONG"), or leave it out')
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
        if self.key is not None and self.key.on_bad_record is not OnBadRecord.FAIL:
            raise ConfigError(
                "the key has a policy for bad records of its own",
                why="a record is good or bad as a whole",
                what_to_do="give on_bad_record to the value",
            )
        if not isinstance(self.value, Json) and self.tombstones in (OnTombstone.KEEP, OnTombstone.DELETE):
            raise ConfigError(
                f"tombstones is OnTombstone.{self.tombstones.name}, and the value is a format of changes",
                why="a deletion is a record of its own there; the tombstone behind it is for compaction",
                what_to_do="leave it out, or use OnTombstone.REFUSE",
            )
        if isinstance(self.value, Json) and self._of_value:
            raise ConfigError(
                f"metadata asks for '{_OF_VALUE}{self._of_value[0]}', and the value is Json",
                what_to_do="leave it out: only formats of changes know such things",
            )
        self._check_fields()

    @cached_property
    def _changelog(self) -> Changelog | None:
        return None if isinstance(self.value, Json) else Changelog(self.value, self._of_value)

    @property
    def _of_value(self) -> tuple[str, ...]:
        return tuple(one.removeprefix(_OF_VALUE) for one in self.metadata if _is_of_value(one))

    @property
    def _read(self) -> Json:
        """How a value is read."""
        return self.value if self._changelog is None else self._changelog.json  # type: ignore[return-value]

    @property
    def _fields(self) -> T.StructType:
        """Fields of a value, as the stream has them."""
        return json_schema(self._read) if self._changelog is None else self._changelog.fields

    @property
    def _misfit(self) -> Misfit | None:
        return None if self._changelog is None else self._changelog.misfit

    def _check_fields(self) -> None:
        values, keys = self._fields, self._key_fields
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
        if self.is_changelog and ROW_KIND in {*taken, *(one.name.lower() for one in keys)}:
            raise SchemaError(
                f"the records have a field '{ROW_KIND}', in which a changelog has the kinds of its rows",
                what_to_do="leave it out",
            )

    @property
    def is_changelog(self) -> bool:
        """Whether the rows have kinds."""
        return self.tombstones is OnTombstone.DELETE or self._changelog is not None

    @property
    def drops_records(self) -> bool:
        """Whether bad records are left out and counted."""
        return self.value.on_bad_record is OnBadRecord.DROP

    @property
    def letter_topic(self) -> str:
        """Where bad records go; empty where they go nowhere."""
        return letter_topic(self.value)

    @property
    def _key_fields(self) -> T.StructType:
        if self.key is None:
            return T.StructType([])
        # Beside the value's: names as the stream has them.
        own = json_schema(self.key)
        return T.StructType([T.StructField(self.key_fields_prefix + one.name, one.dataType) for one in own])

    def applied(
        self,
        raw: DataFrame,
        counted_as: Sequence[str],
        kept: Sequence[str],
        is_barrier: Column | None = None,
    ) -> DataFrame:
        """Return the fields of each good record and the columns `kept`.

        Parameters
        ----------
        raw
            Has at least `key`, `value`, `topic`, `partition`, `offset` and the columns `kept`.
        counted_as
            As of :func:`~flinkish_spark.connectors.json.decoded`.
        is_barrier
            Which rows are no records: they pass.
        """
        has_none = _has_no_value(is_barrier)
        if self.tombstones is OnTombstone.DROP:
            raw = raw.where(~has_none)
        if self.key is not None:
            raw = self._with_key(raw, counted_as, is_barrier)
        passes, beside = is_barrier, self._beside(kept)
        if self.tombstones in (OnTombstone.KEEP, OnTombstone.DELETE):
            raw = raw.withColumn(_IS_TOMBSTONE, has_none)
            passes = F.col(_IS_TOMBSTONE) if is_barrier is None else F.col(_IS_TOMBSTONE) | is_barrier
        if self._changelog is None:
            return self._named(decoded(raw, self._read, counted_as, beside, passes), kept)
        raw = raw.withColumn(PLACE, F.to_json(F.struct("topic", "partition", "offset")))
        raw = raw.withColumn(_IS_BARRIER, F.lit(False) if is_barrier is None else is_barrier)
        said = decoded(raw, self._read, counted_as, (*beside, PLACE, _IS_BARRIER), passes, self._misfit)
        return self._named(self._changelog.rows(said, beside, F.col(_IS_BARRIER)), kept)

    def _beside(self, kept: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that go past the decoding of the value."""
        keeps = self.tombstones in (OnTombstone.KEEP, OnTombstone.DELETE)
        return (*([_KEY] if self.key else []), *([_IS_TOMBSTONE] if keeps else []), *kept)

    def _with_key(self, raw: DataFrame, counted_as: Sequence[str], is_barrier: Column | None) -> DataFrame:
        """Add a column with the fields of the keys."""
        assert self.key is not None
        policy = replace(self.key, on_bad_record=self.value.on_bad_record)
        aside = [F.col(quoted(name)).alias(_ASIDE + name) for name in raw.columns]
        place = [F.col(name) for name in ("topic", "partition", "offset")]
        as_value = raw.select(*aside, *place, F.col("key").alias("value"))
        names = [_ASIDE + name for name in raw.columns]
        read = decoded(as_value, policy, (*counted_as, "key"), names, is_barrier)
        fields = [F.col(quoted(name)) for name in json_schema(self.key).names]
        back = [F.col(quoted(_ASIDE + name)).alias(name) for name in raw.columns]
        return read.select(F.struct(*fields).alias(_KEY), *back)

    def _named(self, frame: DataFrame, kept: Sequence[str]) -> DataFrame:
        """Return the columns of a stream: those of the key alone, of the value, the kind, those kept."""
        of_key = [] if self.key is None else json_schema(self.key).names
        keys = {self.key_fields_prefix + name: F.col(_KEY)[name] for name in of_key}
        values = {name: F.col(quoted(name)) for name in self._fields.names}
        if self.tombstones in (OnTombstone.KEEP, OnTombstone.DELETE):
            for name in values.keys() & keys.keys():
                values[name] = F.when(F.col(_IS_TOMBSTONE), keys[name]).otherwise(values[name])
        kind = []
        if self._changelog is not None:
            kind = [F.col(name) for name in (ROW_KIND, *self._changelog.names)]
        elif self.is_changelog:
            deleted, updated = (F.lit(one.value) for one in (RowKind.DELETE, RowKind.UPDATE_AFTER))
            kind = [F.when(F.col(_IS_TOMBSTONE), deleted).otherwise(updated).alias(ROW_KIND)]
        alone = [column.alias(name) for name, column in keys.items() if name not in values]
        own = [column.alias(name) for name, column in values.items()]
        return frame.select(*alone, *own, *kind, *kept)

    def bad(self, raw: DataFrame) -> DataFrame:
        """Return the records of which no row can be made."""
        spark = raw.sparkSession
        found = is_bad(spark, self._read, "value", self._misfit)
        if self.tombstones is not OnTombstone.REFUSE:
            found = F.col("value").isNotNull() & found
        if self.key is not None:
            found = found | is_bad(spark, self.key, "key")
        if self.tombstones is OnTombstone.DROP:
            # Such a record is left out whatever its key is.
            found = F.col("value").isNotNull() & found
        return raw.where(found)

    def why_bad(self, bad: DataFrame) -> Column:
        """Return what is wrong with the records of :meth:`bad`, as a text."""
        what = "JSON object" if self._changelog is None else self._changelog.what
        why = _why_none("value", f"no {what} of the fields {self.value.schema}")
        if self.key is None:
            return why
        why_key = _why_none("key", f"no JSON object of the fields {self.key.schema}")
        return F.when(is_bad(bad.sparkSession, self.key, "key"), why_key).otherwise(why)


def _why_none(part: str, otherwise: str) -> Column:
    return (
        F.when(F.col(part).isNull(), F.lit(f"the record has no {part}"))
        .when(~F.is_valid_utf8(F.col(part).cast("string")), F.lit(f"the {part} is not UTF-8"))
        .otherwise(F.lit(f"the {part} is {otherwise}"))
    )


def _has_no_value(is_barrier: Column | None) -> Column:
    has_none = F.col("value").isNull()
    return has_none if is_barrier is None else has_none & ~is_barrier


def decoding_of(
    value: object,
    metadata: Sequence[str],
    key: Json | None,
    key_fields_prefix: str,
    tombstones: OnTombstone | None,
) -> Decoding | None:
    """Return what a user asked for; None if records come as they are.

    Raises
    ------
    ConfigError, SchemaError
        It cannot be.
    """
    if isinstance(value, Json | Changes):
        usual = OnTombstone.REFUSE if isinstance(value, Json) else OnTombstone.DROP
        told = usual if tombstones is None else tombstones
        return Decoding(value, tuple(metadata), key, key_fields_prefix, told)
    if isinstance(value, Raw | None) and (key is not None or key_fields_prefix or tombstones is not None):
        name = "tombstones" if tombstones is not None else "key" if key is not None else "key_fields_prefix"
        raise ConfigError(
            f"{name} is given, and the value is not decoded",
            why="records come as they are, key and value as bytes, a tombstone with null",
            what_to_do='give value=Json("field TYPE, ...")',
        )
    return None
