"""Kafka as a source of splits, which can stand behind history in a hybrid source; a split is a partition."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.connectors.formats.decoding import schema_facts
from flinkish_spark.connectors.kafka.checks import (
    HEADERS,
    InputChecks,
    check_letter_topic,
    check_topic_retention,
    letters_of,
    letters_uid,
    raise_if_it_stays,
)
from flinkish_spark.connectors.kafka.client.admin import (
    PLANNING_TIMEOUT_MS,
    PREFLIGHT_TIMEOUT_MS,
    KafkaAdmin,
    TopicPattern,
    check_letters_stay,
    unknown_topic,
)
from flinkish_spark.connectors.kafka.client.client import seen_to_stay
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.metadata import (
    LEADER_EPOCH,
    checked_metadata,
    known_times,
    metadata_arrays,
    metadata_fields,
    milliseconds_of,
    names_of,
)
from flinkish_spark.connectors.kafka.offsets import (
    GroupPatience,
    KafkaEnd,
    KafkaStart,
    StartingOffsets,
    Wanted,
    by_topic,
    checked_end,
    checked_start,
    commit_places,
    first_at_least_as_late,
    group_marks,
    places_in,
    start_offsets,
)
from flinkish_spark.connectors.kafka.records import Decoding, decoding_of
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.connectors.splits import Offset, SplitPosition, SplitSource, logged_positions
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.source import JobPlace, SideOutput
from flinkish_spark.core.changelogs import Changes
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.formats import Format, OnTombstone
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import SealedObjects
from flinkish_spark.core.validation import instance_of, refused_as_config_errors, unusable, values_by_name
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import JobUuid, Place
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.transport import columns as C
from flinkish_spark.types.schemas import PREFIX, output_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flinkish_spark.contracts.sink import Sink
    from flinkish_spark.core.job_dir import JobDir
    from flinkish_spark.protocol.plan_layout import Position


_CLOCK = SystemClock()
#: How often the brokers are asked which partitions there are.
_TOPICS_EVERY_S = 5.0
_HEADERS = T.StructField(
    HEADERS,
    T.ArrayType(T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])),
)
#: What is read where records are decoded; behind it what only some metadata are made of.
_DECODED = (
    T.StructField("key", T.BinaryType()),
    T.StructField("value", T.BinaryType()),
    T.StructField("topic", T.StringType()),
    T.StructField("partition", T.IntegerType()),
    T.StructField("offset", T.LongType()),
    T.StructField("timestamp", T.TimestampType()),
)
_TIMESTAMP_TYPE = T.StructField("timestampType", T.IntegerType())
_LEADER_EPOCH = T.StructField(LEADER_EPOCH, T.IntegerType())
_FOR_METADATA: Mapping[str, T.StructField] = {
    "timestamp-type": _TIMESTAMP_TYPE,
    "headers": _HEADERS,
    "headers-map": _HEADERS,
    "leader-epoch": _LEADER_EPOCH,
}
#: Fields that a record can have, with the types of each.
_FIELDS: Mapping[str, tuple[T.DataType, ...]] = {
    "key": (T.BinaryType(), T.StringType()),
    "value": (T.BinaryType(), T.StringType()),
    "topic": (T.StringType(),),
    "partition": (T.IntegerType(), T.LongType()),
    "offset": (T.LongType(),),
    "timestamp": (T.TimestampType(),),
    _TIMESTAMP_TYPE.name: (_TIMESTAMP_TYPE.dataType,),
    _HEADERS.name: (_HEADERS.dataType,),
    _LEADER_EPOCH.name: (_LEADER_EPOCH.dataType,),
}


def _needed(decoding: Decoding) -> T.StructType:
    more = dict.fromkeys(_FOR_METADATA[name] for name in decoding.metadata if name in _FOR_METADATA)
    return T.StructType([*_DECODED, *more])


def _checked_decoding(
    value: Format | Changes | None,
    metadata: Sequence[str],
    key: Format | None,
    key_fields_prefix: str,
    tombstones: OnTombstone | None,
) -> Decoding | None:
    """Return what becomes of the records; None if they come as they are."""
    to_do = 'give Json("field TYPE, ..."), or leave it out and name fields with schema='
    if value is not None and not isinstance(value, Format | Changes):
        raise unusable("value", value, wanted="a format, such as Json(...)", what_to_do=to_do)
    names = checked_metadata(metadata)
    if value is None and names:
        raise ConfigError(
            "metadata is asked for, and nothing is decoded",
            what_to_do='name the fields: schema="value STRING, topic STRING, offset LONG"',
        )
    found = decoding_of(value, names, key, key_fields_prefix, tombstones)
    if found is None and value is not None:
        raise unusable("value", value, wanted="a format, such as Json(...)", what_to_do=to_do)
    return found


class KafkaRecordsSource(SplitSource):
    """Reads Kafka topics, records as they are; also as a part of a hybrid source.

    Otherwise take a :class:`~flinkish_spark.sources.KafkaSource`.
    Partitions, and topics that match, are found within 5 s of being made, and are read from their first
    record; one that is deleted fails the job.

    Parameters
    ----------
    bootstrap_servers, group_id, options, partitions
        As for a KafkaSource.
    topics
        Names of topics; without them, a pattern.
    pattern
        A regular expression that the whole name of a topic matches, ``"orders-.*"``; also of topics that
        come later.
    schema
        Any of the fields key and value (BINARY, or STRING if all are UTF-8), topic, partition, offset,
        timestamp, timestampType, headers and leaderEpoch, as Spark's Kafka source and
        `format("flinkish-kafka")` have them. Left out where `value` says what the fields are.
    value, metadata, key, key_fields_prefix, tombstones
        A format with what is done with bad records, such as ``Json("field TYPE, ...")``, and columns beside
        its fields, as for a KafkaSource. Not in a hybrid source.
        Without it records come as they are.
    starting_offsets
        As for a KafkaSource, asked for when the source begins to be read: in a hybrid source, behind the part
        in front of it.
    starting_at_ms
        Begins each partition, also one that comes later, at its first record that is at least as late, in
        milliseconds since 1970; where there is none yet, with what comes. 0 for everything that is there.
    ending
        As for a KafkaSource, fixed when the source begins to be read.
    rate
        Most records, which are counted by offsets.

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
    #: Whether records have their times beside their fields.
    _has_own_time: bool = False

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
        starting_at_ms: int = 0,
        ending: KafkaEnd | None = None,
        group_id: str = "",
        options: Mapping[str, str] | None = None,
        rate: RateLimit | None = None,
    ) -> None:
        with refused_as_config_errors("give milliseconds since 1970"):
            checked_whole("starting_at_ms", starting_at_ms, least=0, most=(1 << 63) - 1)
        self.connection = KafkaConnection(
            bootstrap_servers,
            values_by_name("options", options, what_to_do='give options by name: {"name": "value"}'),
        )
        self._wanted = Wanted.of(topics, pattern, partitions)
        self.decoding = _checked_decoding(value, metadata, key, key_fields_prefix, tombstones)
        wanted = schema if self.decoding is None else _needed(self.decoding)
        self.schema: T.StructType = output_schema(wanted, "a source of Kafka records")
        for field in self.schema:
            if field.dataType not in _FIELDS.get(field.name, ()):
                raise ConfigError(
                    f"a Kafka record has no field '{field.name}' of type {field.dataType.simpleString()}",
                    what_to_do=f"choose among {', '.join(_FIELDS)}; key and value as BINARY or STRING",
                )
        self.group_id = instance_of("group_id", group_id, str, what_to_do="give a name, or leave it out")
        self.rate = RateLimit() if rate is None else rate
        self._from_ms, self._begin = starting_at_ms, checked_start(starting_offsets, self.group_id)
        if starting_at_ms and self._begin is not StartingOffsets.EARLIEST:
            raise ConfigError(
                "starting_at_ms and starting_offsets are set for one source",
                what_to_do="leave one of them out",
            )
        self._ending = checked_end(ending, None)
        self._partitions: list[str] = []
        self._looked_at = float("-inf")

    def datasets(self) -> tuple[Dataset, ...]:
        """Return its topics; those of a pattern are not known before they are read."""
        return Dataset.of_topics(self.connection.servers, self._wanted.topics)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_planning_admin", "_admin", "_starts", "_ends", "_group_patience")
        kept = {name: value for name, value in self.__dict__.items() if name not in own}
        return {**kept, "_partitions": [], "_looked_at": float("-inf")}

    @cached_property
    def _planning_admin(self) -> KafkaAdmin:
        return KafkaAdmin(self.connection, timeout_ms=PLANNING_TIMEOUT_MS)

    @cached_property
    def _admin(self) -> KafkaAdmin:
        return KafkaAdmin(self.connection)

    @cached_property
    def _group_patience(self) -> GroupPatience:
        return GroupPatience()

    @property
    def is_bounded(self) -> bool:  # type: ignore[override]
        return self._ending is not None

    def splits(self) -> Sequence[str]:
        if time.monotonic() - self._looked_at >= _TOPICS_EVERY_S:
            # This order matters: every partition that has an end is there by then, and none is left out.
            ends = self._ends
            places = self._wanted.places(self._planning_admin, _CLOCK)
            self._partitions = [_split(at) for at in places if ends is None or _split(at) in ends]
            self._looked_at = time.monotonic()
        return self._partitions

    def first(self, split: str) -> int:
        place = _place(split)
        if self._from_ms:
            admin = self._planning_admin
            return first_at_least_as_late({place: self._from_ms}, admin.offsets_at, admin.end_offsets)[place]
        # What comes later than the source, or than the savepoint that it goes on from, is read whole.
        is_first = self._begin is not StartingOffsets.EARLIEST and self._fs_start is None
        at = self._starts.get(split) if is_first else None
        return self._planning_admin.beginning_offsets([place])[place] if at is None else at

    def latest(self, split: str, start: int, limit: int | None) -> int:
        """Return the end of a partition for readers of committed records."""
        place = _place(split)
        # A broker that has just started may not know its end yet.
        end = seen_to_stay(
            lambda: self._planning_admin.end_offsets([place])[place], lambda at: at < start, _CLOCK
        )
        last = self.end(split)
        end = end if last is None else max(start, min(end, last))
        return end if limit is None else min(end, start + limit)

    def end(self, split: str) -> int | None:
        return None if self._ends is None else self._ends[split]

    @cached_property
    def _starts(self) -> dict[str, int]:
        return self._fixed("starts", lambda places: start_offsets(self._begin, self._admin, places))

    @cached_property
    def _ends(self) -> dict[str, int] | None:
        ending = self._ending
        if ending is None:
            return None
        name = hashlib.sha256(json.dumps(ending.to_json(), sort_keys=True).encode()).hexdigest()[:16]
        return self._fixed(f"ends-{name}", lambda places: ending.offsets(self._admin, places))

    def _fixed(self, name: str, ask: Callable[[Sequence[Place]], dict[Place, int]]) -> dict[str, int]:
        """Return offsets by split as they were found at the first call in the life of the job."""
        if not self._fs_folder:
            return {_split(place): at for place, at in self._asked(ask).items()}
        store = self.job_store.open()
        objects, kind = SealedObjects(store, self.job_store.url), "kafka-offsets"
        if objects.optional(f"{name}.json", kind, dict) is None:
            found = {_split(place): at for place, at in self._asked(ask).items()}
            store.create_if_absent(f"{name}.json", seal(kind, {"offsets": found}))
        offsets: dict[str, int] = objects.read(f"{name}.json", kind, dict)["offsets"]
        return offsets

    def _asked(self, ask: Callable[[Sequence[Place]], dict[Place, int]]) -> dict[Place, int]:
        return ask(self._wanted.places(self._planning_admin, _CLOCK))

    def close(self) -> None:
        for name in ("_planning_admin", "_admin"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()

    def read(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        from flinkish_spark.connectors.kafka.client.reader import OffsetRange, RangeReader
        from flinkish_spark.connectors.kafka.client.settings import ReaderSettings

        topic, partition = _place(split)
        names = self.schema.names
        settings = ReaderSettings(
            include_headers=HEADERS in names, include_leader_epoch=LEADER_EPOCH in names
        )
        reader = RangeReader(self.connection, settings)
        for batch in reader.read(OffsetRange(topic, partition, start, end)):
            own = {name: batch.column(name) for name in names}
            if "timestamp" in own:
                own["timestamp"] = known_times(own["timestamp"])
            time = [milliseconds_of(batch)] if self._has_own_time else []
            columns = [*own.values(), *metadata_arrays(self._metadata, batch), *time]
            yield pa.RecordBatch.from_arrays(columns, names=self.record_type.names)

    def with_own_time(self) -> Self:
        return self._with("_has_own_time", True)

    @property
    def record_type(self) -> T.StructType:
        """The fields, what metadata asks for, and the time of a record if that is asked for."""
        time = [T.StructField(C.TIME, T.LongType())] if self._has_own_time else []
        return T.StructType([*self.schema, *metadata_fields(self._metadata), *time])

    @property
    def _metadata(self) -> tuple[str, ...]:
        return () if self.decoding is None else self.decoding.metadata

    def load(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        frame = super().load(spark, place)
        if self.decoding is None:
            return frame
        # Two scans that begin at different places count apart what they drop.
        label = "" if self._fs_start is None else self._fs_start.label
        control = [column for column in frame.columns if column.startswith(PREFIX)]
        kept = (*names_of(self.decoding.metadata), *control)
        rows_of = self.decoding.deserializer(self._fs_uid, place, self._wanted.topics)
        return rows_of.rows(frame, (label, "uid", self._fs_uid), kept)

    @property
    def drops_records(self) -> bool:
        return self.decoding is not None and self.decoding.drops_records

    @property
    def has_side_outputs(self) -> bool:
        return bool(self._letters)

    @property
    def _letters(self) -> str:
        return "" if self.decoding is None else self.decoding.letter_topic

    def side_uids(self, uid: str) -> tuple[str, ...]:
        return (letters_uid(uid),) if self.has_side_outputs else ()

    def side_outputs(
        self, spark: SparkSession, uid: str, place: JobPlace, peers: Sequence[Sink]
    ) -> tuple[SideOutput, ...]:
        """Return the dead-letter stream: a second scan that keeps the unreadable records only."""
        if self.decoding is None or not self.has_side_outputs:
            return ()
        scan = self._with("schema", T.StructType(list(dict.fromkeys([*self.schema, _HEADERS]))))
        scan = scan._with("_fs_format", f"{self._fs_format}-letters")
        raw = super(KafkaRecordsSource, scan).load(spark, place)
        bad = self.decoding.deserializer(uid, place, self._wanted.topics).bad(raw)
        return (letters_of(bad, self.decoding.policy, uid, self.connection, peers),)

    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        """Refuse brokers that do not answer, and topics and partitions that do not exist."""
        super().preflight(spark, job_dir, uid)
        read = self._wanted.topics or TopicPattern(self._wanted.pattern)
        check_letter_topic(uid, self._letters, read)
        wanted = [*self._wanted.topics, *filter(None, [self._letters])]
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            found = admin.topics(wanted)
            counts = {name: one.partitions for name, one in found.items()}
            places_in(counts, self._wanted.partitions, "the source's partitions")
        missing = [topic for topic in wanted if topic not in found]
        if missing:
            raise unknown_topic(missing[0], self.connection.servers, of=f"source '{uid}'")
        check_letters_stay(found, [self._letters], f"source '{uid}'")

    def check_retention(self, uid: str, needed_ms: int) -> None:
        check_topic_retention(self.connection, self._topics_now(), uid, needed_ms)

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        scans = [] if position is None else logged_positions(position, uid)
        logged = LoggedOffsets(tuple(_by_topic(scan.offsets) for scan in scans)) if scans else None
        checks = InputChecks(self._admin, self._topics_in(logged))
        raise_if_it_stays(lambda: checks.replaced(job_dir, uid, logged) or checks.gone(uid, logged))

    def check_start(self, uid: str, position: Position) -> None:
        logged = LoggedOffsets((_by_topic(SplitPosition.from_json(position).offsets),))
        checks = InputChecks(self._admin, self._topics_in(logged))
        raise_if_it_stays(lambda: checks.gone(uid, logged))

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Any]:
        """Return ids of topics, and schemas, as the job recorded them when it first met each."""
        names = [*(f"topic-{uid}-{t}" for t in self._topics_now()), *schema_facts(uid)]
        facts = {name: job_dir.recorded(name) for name in names}
        return {name: fact for name, fact in facts.items() if fact is not None}

    def _topics_now(self) -> Sequence[str]:
        return self._wanted.topics_now(self.connection)

    def _topics_in(self, logged: LoggedOffsets | None) -> Sequence[str]:
        """Return the topics that are named; of a pattern, those that match or were read."""
        if not self._wanted.pattern:
            return self._wanted.topics
        begun = {topic for scan in logged.sources for topic in scan} if logged is not None else set()
        return sorted(begun | set(self._topics_now()))

    def committed(self, offsets: Mapping[str, Offset]) -> None:
        """Commit the group's offsets, forward only."""
        self._tell(offsets, "")

    def _tell(self, offsets: Mapping[str, Offset], note: str) -> None:
        if self.group_id:
            flat = {_place(split): int(offset) for split, offset in offsets.items()}
            self._group_patience.tries(
                self.group_id, lambda: commit_places(self._admin, self.group_id, flat, note)
            )

    def newest_marks(self, job: JobUuid) -> Sequence[Mark]:
        return group_marks(self._admin, self.group_id, job)


def _split(place: Place) -> str:
    return f"{place[0]}:{place[1]}"


def _place(split: str) -> Place:
    topic, _, partition = split.rpartition(":")
    return topic, int(partition)


def _by_topic(offsets: Mapping[str, Offset]) -> dict[str, dict[str, int]]:
    return by_topic({_place(split): int(offset) for split, offset in offsets.items()})
