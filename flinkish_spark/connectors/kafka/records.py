"""Decoding of Kafka records: fields of value and key as columns, tombstones, bad records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.session import session_time_zone
from flinkish_spark.connectors.bad_records import REASON, drop_bad_records, make_reasons
from flinkish_spark.connectors.kafka.metadata import OF_VALUE, check_names, is_of_value
from flinkish_spark.connectors.plain_formats import Raw
from flinkish_spark.contracts.format import Changelog, Changes, Format, PartReader
from flinkish_spark.contracts.source import JobPlace
from flinkish_spark.core.arrow_pass import map_in_arrow
from flinkish_spark.core.changelogs import ROW_KIND, RowKind
from flinkish_spark.core.errors import UNREADABLE_MARKER, BadRecordError, ConfigError, SchemaError
from flinkish_spark.core.formats import BadRecordPolicy, DeadLetter, OnBadRecord, OnTombstone
from flinkish_spark.transport import columns as C
from flinkish_spark.types.arrow_types import arrow_schema, as_schema
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.json_columns import (
    has_intervals,
    replace_months,
    restore_frame_intervals,
    restore_intervals,
)
from flinkish_spark.types.schemas import check_field_names
from flinkish_spark.worker.daemon import freeze_modules


@dataclass(frozen=True)
class Decoding:
    #: The format of values, with the policy for bad records.
    value: Format | Changes
    metadata: tuple[str, ...] = ()
    #: The format of keys; None if keys are not decoded.
    key: Format | None = None
    key_fields_prefix: str = ""
    tombstones: OnTombstone = OnTombstone.REFUSE

    def __post_init__(self) -> None:
        is_of_changes, tombstones = isinstance(self.value, Changes), self.tombstones
        if self.key is None and tombstones is OnTombstone.DELETE:
            what = "tombstones is OnTombstone.DELETE, and the source has no key that identifies the row"
            raise ConfigError(what, what_to_do='name the key\'s fields: key=Json("id LONG")')
        if self.key is None and self.key_fields_prefix:
            raise ConfigError("key_fields_prefix is given, and key is not", what_to_do="leave it out")
        of_key = None if self.key is None else self.key.on_bad_record
        if of_key not in (None, OnBadRecord.FAIL, self.policy):
            what = "the key has a policy for bad records that is not the value's"
            raise ConfigError(what, what_to_do="give on_bad_record to the value only")
        if is_of_changes and tombstones in (OnTombstone.KEEP, OnTombstone.DELETE):
            what = f"tombstones is OnTombstone.{tombstones.name}, and the value is a format of changes"
            raise ConfigError(what, what_to_do="leave it out, or use OnTombstone.REFUSE")
        if isinstance(self.value, Changes) and self.key is None:
            self.value.check_keyless()
        if not is_of_changes and self._of_value:
            what = f"metadata asks for '{OF_VALUE}{self._of_value[0]}', and the value is no format of changes"
            raise ConfigError(what, what_to_do="leave it out")
        key = None if self.key is None else self.key.make_reader("key")
        self._check_fields(key, *self._make_value_reader(lambda form: form.make_reader("value")))

    @property
    def policy(self) -> BadRecordPolicy:
        of_key = None if self.key is None else self.key.on_bad_record
        return self.value.on_bad_record or of_key or OnBadRecord.FAIL

    @property
    def drops_records(self) -> bool:
        return self.policy is OnBadRecord.DROP

    @property
    def letter_topic(self) -> str:
        return self.policy.topic if isinstance(self.policy, DeadLetter) else ""

    def deserializer(self, uid: str, place: JobPlace, topics: Sequence[str]) -> Deserializer:
        """Make the deserializer; this asks a schema registry if it defines the columns."""
        key = None if self.key is None else self.key.find_reader("key", uid, place, topics)
        value, changelog = self._make_value_reader(lambda form: form.find_reader("value", uid, place, topics))
        assert value is not None
        self._check_fields(key, value, changelog)
        return Deserializer(self, key, value, changelog)

    def _make_value_reader(
        self, reader_of: Callable[[Format], PartReader | None]
    ) -> tuple[PartReader | None, Changelog | None]:
        if not isinstance(self.value, Changes):
            return reader_of(self.value), None
        reader = reader_of(self.value.make_format(self._of_value))
        return reader, None if reader is None else self.value.make_changelog(reader.fields, self._of_value)

    def fields_of(self, key: PartReader | None) -> T.StructType:
        fields, prefix = () if key is None else key.fields, self.key_fields_prefix
        return T.StructType([T.StructField(prefix + one.name, one.dataType) for one in fields])

    @property
    def _of_value(self) -> tuple[str, ...]:
        return tuple(one.removeprefix(OF_VALUE) for one in self.metadata if is_of_value(one))

    def _check_fields(
        self, key: PartReader | None, value: PartReader | None, changelog: Changelog | None
    ) -> None:
        """Refuse two fields of one name; None stands for a part that is not known yet."""
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
                f"the records have a field '{ROW_KIND}', which is the column of a changelog's row kinds",
                what_to_do="leave it out",
            )


def make_decoding(
    value: Format | Changes | None,
    metadata: Sequence[str],
    key: Format | None,
    key_fields_prefix: str,
    tombstones: OnTombstone | None,
) -> Decoding | None:
    is_raw = isinstance(value, Raw)
    if value is None or (is_raw and key is None):
        told = {"key": key, "tombstones": tombstones, "key_fields_prefix": key_fields_prefix or None}
        name = next((name for name, one in told.items() if one is not None), None)
        if name is not None:
            what = f"{name} is given, and records are not decoded"
            raise ConfigError(what, what_to_do='give value=Json("field TYPE, ...")')
        return None
    if tombstones is None:
        tombstones = OnTombstone.DROP if isinstance(value, Changes) else OnTombstone.REFUSE
        tombstones = OnTombstone.KEEP if is_raw else tombstones
    return Decoding(value, tuple(metadata), key, key_fields_prefix, tombstones)


_KEEPING = (OnTombstone.KEEP, OnTombstone.DELETE)


@dataclass(frozen=True)
class Deserializer:
    decoding: Decoding
    #: Reads the key; None if keys are not decoded.
    key: PartReader | None
    value: PartReader
    #: Turns decoded values into changes; None if a value is the row itself.
    changelog: Changelog | None

    @property
    def fields(self) -> T.StructType:
        values = self.value.fields if self.changelog is None else self.changelog.fields
        keys = self.decoding.fields_of(self.key)
        return T.StructType([*(one for one in keys if one.name not in values.names), *values])

    def rows(self, raw: DataFrame, counted_as: Sequence[str], kept: Sequence[str]) -> DataFrame:
        """Return the fields of each good record and the columns `kept`; control rows have null fields."""
        policy, parts = self.decoding.policy, self._make_parts(raw)
        if self.changelog is None:
            decode = DecodeRecords(parts, policy, tuple(raw.schema[name] for name in kept))
            made = C.mark_records(map_in_arrow(raw, decode, decode.columns))
            if policy is OnBadRecord.DROP:
                made = drop_bad_records(made, policy, counted_as).drop(REASON)
            return restore_frame_intervals(made, parts.fields)
        read = self._read_parts(raw, parts, fails=policy is OnBadRecord.FAIL)
        if policy is not OnBadRecord.FAIL:
            read, reason = self._add_misfit(self.changelog, read)
            read = drop_bad_records(read.withColumn(REASON, reason), policy, counted_as)
        # Under FAIL an invalid change ends the task here, so nobody checks for it before.
        beside = [*([] if self.key is None else [self.key.column]), *kept]
        time_zone = session_time_zone(raw.sparkSession)
        passes = F.col("topic").isNull() if C.KIND in raw.columns else None
        found = self.changelog.rows(read, F.col(self.value.column), beside, passes, time_zone)
        return self._select_columns(found, kept)

    def bad(self, raw: DataFrame) -> DataFrame:
        """Return the records that cannot be decoded, with the cause in the column `REASON`."""
        parts = self._make_parts(raw)
        if self.changelog is None:
            find = FindBadRecords(parts, raw.schema)
            return map_in_arrow(raw, find, find.columns)
        read, reason = self._add_misfit(self.changelog, self._read_parts(raw, parts, fails=False))
        return read.withColumn(REASON, reason).where(F.col(REASON).isNotNull())

    def _make_parts(self, raw: DataFrame) -> RecordParts:
        tombstones = self.decoding.tombstones
        kind = [T.StructField(ROW_KIND, T.StringType())] if tombstones is OnTombstone.DELETE else []
        return RecordParts(
            self.key,
            self.value,
            self.decoding.fields_of(self.key),
            T.StructType([*self.fields, *kind]),
            tombstones,
            session_time_zone(raw.sparkSession),
        )

    def _read_parts(self, raw: DataFrame, parts: RecordParts, *, fails: bool) -> DataFrame:
        """Add the decoded parts as columns, for the expressions of a changelog."""
        read = ReadParts(parts, raw.schema, fails)
        frame = map_in_arrow(raw, read, read.columns)
        for part in parts.all:
            if has_intervals(part.fields):
                frame = frame.withColumn(part.column, restore_intervals(F.col(part.column), part.fields))
        return frame

    def _add_misfit(self, changelog: Changelog, found: DataFrame) -> tuple[DataFrame, Column]:
        envelope, time_zone = F.col(self.value.column), session_time_zone(found.sparkSession)
        found, is_misfit = changelog.find_misfits(found, envelope, time_zone)
        misfit = F.when(F.col("topic").isNotNull() & is_misfit, F.lit(changelog.why))
        return found, F.coalesce(F.col(REASON), misfit)

    def _select_columns(self, frame: DataFrame, kept: Sequence[str]) -> DataFrame:
        """Select the columns of a changelog: key fields, row, row kind, and the columns `kept`."""
        assert self.changelog is not None
        keys = {}
        if self.key is not None:
            of_key = F.col(self.key.column)
            names = zip(self.decoding.fields_of(self.key).names, self.key.fields.names, strict=True)
            keys = {name: of_key[own] for name, own in names}
        values = {name: F.col(quote_name(name)) for name in self.changelog.fields.names}
        kind = [F.col(name) for name in (ROW_KIND, *self.changelog.names)]
        columns = {**keys, **values}
        return frame.select(*[columns[name].alias(name) for name in self.fields.names], *kind, *kept)


@dataclass(frozen=True)
class RecordParts:
    """Decodes keys and values of Arrow batches; pickled into the plan."""

    key: PartReader | None
    value: PartReader
    #: The key's fields under their names in the stream.
    key_fields: T.StructType
    #: The stream's fields, then the row kind if tombstones delete rows.
    fields: T.StructType
    tombstones: OnTombstone
    time_zone: str

    @property
    def all(self) -> tuple[PartReader, ...]:
        return (self.value,) if self.key is None else (self.key, self.value)

    def drop_tombstones(self, records: pa.RecordBatch) -> pa.RecordBatch:
        """Drop tombstones, even with a bad key, if the source drops them."""
        values = records.column("value")
        if self.tombstones is not OnTombstone.DROP or not values.null_count:
            return records
        return records.filter(values.is_valid())

    def read(self, records: pa.RecordBatch) -> tuple[list[pa.Array], pa.Array]:
        """Decode each part to a struct column; also return why a record is bad, or null."""
        found, reasons = [], []
        for part in self.all:
            rows, of_part = part.read(records.column(part.name), self.time_zone)
            found.append(rows)
            reasons.append(of_part)
            if part is self.key and self.tombstones is OnTombstone.DELETE:
                reasons.append(make_reasons(records.column("key").is_null(), "the record has no key"))
        if self.tombstones is OnTombstone.REFUSE:
            reasons.append(make_reasons(records.column("value").is_null(), "the record has no value"))
        return found, pc.coalesce(*reasons)

    def columns(self, records: pa.RecordBatch, found: list[pa.Array]) -> list[pa.Array]:
        """Combine the decoded parts to the columns of `fields`."""
        values = dict(zip(self.value.fields.names, found[-1].flatten(), strict=True))
        keys = {} if self.key is None else dict(zip(self.key_fields.names, found[0].flatten(), strict=True))
        is_tombstone = records.column("value").is_null()
        if self.tombstones in _KEEPING and is_tombstone.true_count:
            for name in values.keys() & keys.keys():
                values[name] = pc.if_else(is_tombstone, keys[name], values[name])
        made = {**keys, **values}
        if self.tombstones is OnTombstone.DELETE:
            deleted, updated = RowKind.DELETE.value, RowKind.UPDATE_AFTER.value
            made[ROW_KIND] = pc.if_else(is_tombstone, deleted, updated)
        return [made[name] for name in self.fields.names]


def _split_control(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
    topics = batch.column("topic")
    if C.KIND not in batch.schema.names or not topics.null_count:
        return batch, None
    return batch.filter(topics.is_valid()), batch.filter(topics.is_null())


def refuse(records: pa.RecordBatch, reasons: pa.Array) -> None:
    if reasons.null_count == len(reasons):
        return
    at = reasons.is_valid().index(True).as_py()
    place = {name: records.column(name)[at].as_py() for name in ("topic", "partition", "offset")}
    raise BadRecordError(f"{UNREADABLE_MARKER} {json.dumps({**place, 'reason': reasons[at].as_py()})}")


@dataclass(frozen=True)
class DecodeRecords:
    parts: RecordParts
    policy: BadRecordPolicy
    #: Input columns to keep beside the fields.
    kept: tuple[T.StructField, ...]

    @property
    def columns(self) -> T.StructType:
        """The output columns; under DROP also the reason, so that the caller can drop and count."""
        reason = [_REASON] if self.policy is OnBadRecord.DROP else []
        return T.StructType([*replace_months(self.parts.fields, T.IntegerType()), *self.kept, *reason])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_modules()
        schema = arrow_schema(self.columns)
        for batch in batches:
            records, control = _split_control(batch)
            if records.num_rows:
                yield self._decode(self.parts.drop_tombstones(records), schema)
            if control is not None:
                kept = [control.column(field.name) for field in self.kept]
                nothing = [pa.nulls(control.num_rows, kind) for kind in schema.types]
                first = len(self.parts.fields)
                nothing[first : first + len(kept)] = kept
                yield as_schema(pa.RecordBatch.from_arrays(nothing, names=schema.names), schema)

    def _decode(self, records: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        found, reasons = self.parts.read(records)
        if self.policy is OnBadRecord.FAIL:
            refuse(records, reasons)
        columns = self.parts.columns(records, found)
        columns += [records.column(field.name) for field in self.kept]
        if self.policy is OnBadRecord.DROP:
            columns.append(reasons)
        made = as_schema(pa.RecordBatch.from_arrays(columns, names=schema.names), schema)
        is_filtered = isinstance(self.policy, DeadLetter) and reasons.null_count < len(reasons)
        return made.filter(reasons.is_null()) if is_filtered else made


@dataclass(frozen=True)
class FindBadRecords:
    """Function for mapInArrow: keeps the records that cannot be decoded, and adds the reason."""

    parts: RecordParts
    given: T.StructType

    @property
    def columns(self) -> T.StructType:
        return T.StructType([*self.given, _REASON])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            records = self.parts.drop_tombstones(batch)
            _, reasons = self.parts.read(records)
            if reasons.null_count < len(reasons):
                yield records.append_column(REASON, reasons).filter(reasons.is_valid())


@dataclass(frozen=True)
class ReadParts:
    """Function for mapInArrow: adds the decoded parts of records, and the reason if one is bad."""

    parts: RecordParts
    given: T.StructType
    #: Whether a bad record ends the task.
    fails: bool

    @property
    def columns(self) -> T.StructType:
        read = [
            T.StructField(one.column, replace_months(one.fields, T.IntegerType())) for one in self.parts.all
        ]
        return T.StructType([*self.given, *read, _REASON])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_modules()
        schema = arrow_schema(self.columns)
        for batch in batches:
            records, control = _split_control(batch)
            records = self.parts.drop_tombstones(records)
            if records.num_rows:
                found, reasons = self.parts.read(records)
                if self.fails:
                    refuse(records, reasons)
                columns = [*records.columns, *found, reasons]
                yield as_schema(pa.RecordBatch.from_arrays(columns, names=schema.names), schema)
            if control is not None:
                more = [pa.nulls(control.num_rows, kind) for kind in schema.types[len(self.given) :]]
                yield pa.RecordBatch.from_arrays([*control.columns, *more], names=schema.names)


_REASON = T.StructField(REASON, T.StringType())
