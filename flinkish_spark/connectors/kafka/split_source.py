"""Kafka as a split source, one split per partition; a hybrid source can read it after history."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Self

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from flinkish_spark.connectors.kafka.checks import HEADERS, find_missing_input, raise_if_confirmed
from flinkish_spark.connectors.kafka.client.admin import PLANNING_TIMEOUT_MS, KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import poll_until_confirmed
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.reader import OffsetRange, RangeReader
from flinkish_spark.connectors.kafka.client.settings import ReaderSettings
from flinkish_spark.connectors.kafka.input import KafkaInput
from flinkish_spark.connectors.kafka.metadata import (
    LEADER_EPOCH,
    check_metadata,
    clear_missing_times,
    metadata_arrays,
    metadata_fields,
    names_of,
    to_milliseconds,
)
from flinkish_spark.connectors.kafka.offset_ranges import to_json
from flinkish_spark.connectors.kafka.offsets import (
    SOURCE_ADVICE,
    KafkaEnd,
    KafkaStart,
    StartingOffsets,
    TopicSelection,
    find_offsets_by_time,
    name_group,
)
from flinkish_spark.connectors.kafka.records import make_decoding
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.connectors.split_positions import Offset, SplitPosition, find_scan_positions
from flinkish_spark.connectors.splits import SplitSource, ask_once
from flinkish_spark.contracts.format import Changes, Format
from flinkish_spark.contracts.source import JobPlace
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import Range, check_arguments
from flinkish_spark.core.formats import OnTombstone
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.protocol.ids import Place
from flinkish_spark.protocol.plan_layout import Position
from flinkish_spark.transport import columns as C
from flinkish_spark.types.schemas import PREFIX, output_schema

_CLOCK = SystemClock()
#: How often to ask the brokers for the partitions.
_TOPICS_EVERY_S = 5.0
_HEADERS = T.StructField(
    HEADERS,
    T.ArrayType(T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])),
)
#: Fields that are read if records are decoded, and below, further ones that some metadata need.
_DECODED = (
    T.StructField("key", T.BinaryType()),
    T.StructField("value", T.BinaryType()),
    T.StructField("topic", T.StringType()),
    T.StructField("partition", T.IntegerType()),
    T.StructField("offset", T.LongType()),
    T.StructField("timestamp", T.TimestampType()),
)
_FOR_METADATA: Mapping[str, T.StructField] = {
    "timestamp-type": T.StructField("timestampType", T.IntegerType()),
    "headers": _HEADERS,
    "headers-map": _HEADERS,
    "leader-epoch": T.StructField(LEADER_EPOCH, T.IntegerType()),
}
#: Field of a record -> its possible types.
_FIELDS: dict[str, list[T.DataType]] = {
    **{one.name: [one.dataType] for one in (*_DECODED, *_FOR_METADATA.values())},
    "key": [T.BinaryType(), T.StringType()],
    "value": [T.BinaryType(), T.StringType()],
    "partition": [T.IntegerType(), T.LongType()],
}


class KafkaRecordsSource(KafkaInput, SplitSource):
    """Reads raw records of Kafka topics; can be a part of a hybrid source.

    For everything else use a :class:`~flinkish_spark.sources.KafkaSource`.
    The source finds new partitions and matching topics within 5 s and reads them from their first record;
    deleting one fails the job.

    Parameters
    ----------
    bootstrap_servers, group_id, options, partitions
        As for a KafkaSource.
    topics
        Names of topics; without them, a pattern.
    pattern
        A regular expression for whole topic names, ``"orders-.*"``; it also applies to topics created later.
    schema
        Any of the fields key and value (BINARY, or STRING if all are UTF-8), topic, partition, offset,
        timestamp, timestampType, headers and leaderEpoch, as in Spark's Kafka source and
        `format("flinkish-kafka")`. Leave it out if `value` defines the fields.
    value, metadata, key, key_fields_prefix, tombstones
        The format of values, such as ``Json("field TYPE, ...")``, and metadata columns, as for a KafkaSource.
        Not in a hybrid source. Without a format the source does not decode records.
    starting_offsets
        As for a KafkaSource, found when reading begins: in a hybrid source, after the part before it.
    starting_at_ms
        Milliseconds since 1970. Each partition, also one created later, begins at its first record with this
        timestamp or a later one, or else at its end. 0 for its first record.
    ending
        As for a KafkaSource, fixed when reading begins.
    rate
        Maximum rate of records, counted by offsets.

    Raises
    ------
    ConfigError, SchemaError
        An argument cannot be used.

    Examples
    --------
    >>> live = KafkaRecordsSource("broker:9092", ["orders"], starting_at_ms=1_767_225_600_000)
    >>> live.schema.simpleString()
    'struct<value:string>'
    """

    kind = "kafka-records"
    #: Whether rows have the record's timestamp as event time.
    _has_own_time: bool = False

    @check_arguments(
        "schema",
        value='give Json("field TYPE, ..."), or leave it out and name fields with schema=',
        starting_at_ms="give milliseconds since 1970",
        **SOURCE_ADVICE,
    )
    def __init__(
        self,
        bootstrap_servers: str,
        topics: Sequence[str] = (),
        *,
        pattern: str = "",
        partitions: Mapping[str, Sequence[int]] | None = None,
        schema: str | T.StructType = "value STRING",
        value: Format | Changes | None = None,
        metadata: Sequence[str] = (),
        key: Format | None = None,
        key_fields_prefix: str = "",
        tombstones: OnTombstone | None = None,
        starting_offsets: StartingOffsets | KafkaStart = StartingOffsets.EARLIEST,
        starting_at_ms: Annotated[int, Range(0, (1 << 63) - 1)] = 0,
        ending: KafkaEnd | None = None,
        group_id: str = "",
        options: Mapping[str, str] | None = None,
        rate: RateLimit | None = None,
    ) -> None:
        self.connection = KafkaConnection(bootstrap_servers, options or {})
        self.wanted = TopicSelection.of(topics, pattern, partitions)
        names = check_metadata(metadata)
        if value is None and names:
            what_to_do = 'name the fields: schema="value STRING, topic STRING, offset LONG"'
            raise ConfigError("metadata is asked for, and nothing is decoded", what_to_do=what_to_do)
        self.decoding = decoding = make_decoding(value, names, key, key_fields_prefix, tombstones)
        if value is not None and decoding is None:
            to_do = "leave it out, and name fields with schema="
            raise ConfigError("value is Raw, and nothing is decoded", what_to_do=to_do)
        if decoding is not None:
            more = [_FOR_METADATA[name] for name in names if name in _FOR_METADATA]
            schema = T.StructType([*_DECODED, *dict.fromkeys(more)])
        self.schema: T.StructType = output_schema(schema, "a source of Kafka records")
        for field in self.schema:
            if field.dataType not in _FIELDS.get(field.name, []):
                raise ConfigError(
                    f"a Kafka record has no field '{field.name}' of type {field.dataType.simpleString()}",
                    what_to_do=f"choose among {', '.join(_FIELDS)}; key and value as BINARY or STRING",
                )
        self.group_id = group_id
        self.rate = RateLimit() if rate is None else rate
        self._from_ms, self._begin = starting_at_ms, name_group(starting_offsets, group_id)
        if starting_at_ms and self._begin is not StartingOffsets.EARLIEST:
            raise ConfigError("starting_at_ms and starting_offsets are both set", what_to_do="leave one out")
        self._ending = ending
        self._partitions: list[str] = []
        self._looked_at = float("-inf")

    def __getstate__(self) -> dict[str, Any]:
        own = ("_planning_admin", "_admin", "_starts", "_ends", "_group_patience")
        kept = {name: value for name, value in self.__dict__.items() if name not in own}
        return {**kept, "_partitions": [], "_looked_at": float("-inf")}

    @cached_property
    def _planning_admin(self) -> KafkaAdmin:
        return KafkaAdmin(self.connection, timeout_ms=PLANNING_TIMEOUT_MS)

    @property
    def is_bounded(self) -> bool:  # type: ignore[override]
        return self._ending is not None

    def splits(self) -> Sequence[str]:
        if time.monotonic() - self._looked_at >= _TOPICS_EVERY_S:
            # This order matters: partitions with an end exist by then, so that the listing has all of them.
            ends = self._ends
            places = self.wanted.places(self._planning_admin, _CLOCK)
            self._partitions = [
                _format_split(at) for at in places if ends is None or _format_split(at) in ends
            ]
            self._looked_at = time.monotonic()
        return self._partitions

    def first(self, split: str) -> int:
        place = _parse_split(split)
        if self._from_ms:
            admin = self._planning_admin
            return find_offsets_by_time({place: self._from_ms}, admin.offsets_at, admin.end_offsets)[place]
        # Partitions added after the first start, or after the savepoint, are read from their beginning.
        is_first = self._begin is not StartingOffsets.EARLIEST and self._fs_start is None
        at = self._starts.get(split) if is_first else None
        return self._planning_admin.beginning_offsets([place])[place] if at is None else at

    def latest(self, split: str, start: int, limit: int | None) -> int:
        """Return the end of a partition for read_committed readers."""
        place = _parse_split(split)
        # A broker that has just started may not know the end of its log yet.
        end = poll_until_confirmed(
            lambda: self._planning_admin.end_offsets([place])[place], lambda at: at < start, _CLOCK
        )
        last = self.end(split)
        end = end if last is None else max(start, min(end, last))
        return end if limit is None else min(end, start + limit)

    def available(self, split: str, start: int | None) -> int:
        # Where it begins is asked for when it begins to be read.
        return self.latest(split, 0 if start is None else start, None)

    def end(self, split: str) -> int | None:
        return None if self._ends is None else self._ends[split]

    @cached_property
    def _starts(self) -> dict[str, int]:
        return self._record_once("starts", lambda places: self._begin.offsets(self._admin, places))

    @cached_property
    def _ends(self) -> dict[str, int] | None:
        ending = self._ending
        if ending is None:
            return None
        name = hashlib.sha256(json.dumps(ending.to_json(), sort_keys=True).encode()).hexdigest()[:16]
        return self._record_once(f"ends-{name}", lambda places: ending.offsets(self._admin, places))

    def _record_once(self, name: str, ask: Callable[[Sequence[Place]], dict[Place, int]]) -> dict[str, int]:
        """Return offsets by split, as recorded at the first call in the life of the job."""

        def ask_now() -> dict[str, Any]:
            places = self.wanted.places(self._planning_admin, _CLOCK)
            return {"offsets": {_format_split(place): at for place, at in ask(places).items()}}

        is_of_job, key = bool(self._fs_folder), f"{name}.json"
        kept = ask_once(self.job_store, key, "kafka-offsets", ask_now) if is_of_job else ask_now()
        offsets: dict[str, int] = kept["offsets"]
        return offsets

    def close(self) -> None:
        for name in ("_planning_admin", "_admin"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()

    def read(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        topic, partition = _parse_split(split)
        names = self.schema.names
        settings = ReaderSettings(
            include_headers=HEADERS in names, include_leader_epoch=LEADER_EPOCH in names
        )
        reader = RangeReader(self.connection, settings)
        for batch in reader.read(OffsetRange(topic, partition, start, end)):
            own = {name: batch.column(name) for name in names}
            if "timestamp" in own:
                own["timestamp"] = clear_missing_times(own["timestamp"])
            time = [to_milliseconds(batch)] if self._has_own_time else []
            columns = [*own.values(), *metadata_arrays(self._metadata, batch), *time]
            yield pa.RecordBatch.from_arrays(columns, names=self.record_type.names)

    def add_own_time(self) -> Self:
        return self._replace("_has_own_time", True)

    @property
    def record_type(self) -> T.StructType:
        """The fields, the metadata columns, and the timestamp if it is the event time."""
        time = [T.StructField(C.TIME, T.LongType())] if self._has_own_time else []
        return T.StructType([*self.schema, *metadata_fields(self._metadata), *time])

    @property
    def _metadata(self) -> tuple[str, ...]:
        return () if self.decoding is None else self.decoding.metadata

    def load(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        frame = super().load(spark, place)
        if self.decoding is None:
            return frame
        # Two scans with different beginnings count their dropped records separately.
        label = "" if self._fs_start is None else self._fs_start.label
        control = [column for column in frame.columns if column.startswith(PREFIX)]
        kept = (*names_of(self.decoding.metadata), *control)
        rows_of = self.decoding.deserializer(self._fs_uid, place, self.wanted.topics)
        return rows_of.rows(frame, (label, "uid", self._fs_uid), kept)

    def scan_with_headers(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        scan = self._replace("schema", T.StructType(list(dict.fromkeys([*self.schema, _HEADERS]))))
        scan = scan._replace("_fs_format", f"{self._fs_format}-letters")
        return super(KafkaRecordsSource, scan).load(spark, place)

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        scans = [] if position is None else find_scan_positions(position, uid)
        logged = LoggedOffsets(tuple(_group_by_topic(scan.offsets) for scan in scans)) if scans else None
        self.check_position(job_dir, uid, logged)

    def check_start(self, uid: str, position: Position) -> None:
        logged = LoggedOffsets((_group_by_topic(SplitPosition.from_json(position).offsets),))
        admin, topics = self._admin, self.topics_at(logged)
        raise_if_confirmed(lambda: find_missing_input(admin, topics, uid, logged))

    def on_commit(self, offsets: Mapping[str, Offset]) -> None:
        """Commit the group's offsets, forward only."""
        self._tell(offsets, "")

    def _tell(self, offsets: Mapping[str, Offset], note: str) -> None:
        self.store_offsets({_parse_split(split): int(offset) for split, offset in offsets.items()}, note)


def _format_split(place: Place) -> str:
    return f"{place[0]}:{place[1]}"


def _parse_split(split: str) -> Place:
    topic, _, partition = split.rpartition(":")
    return topic, int(partition)


def _group_by_topic(offsets: Mapping[str, Offset]) -> dict[str, dict[str, int]]:
    return to_json({_parse_split(split): int(offset) for split, offset in offsets.items()})
