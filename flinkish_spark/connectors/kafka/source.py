"""The Kafka source: Spark's native one or ours in Python, read_committed, with honest group offsets."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Self

from pyspark.sql import functions as F

from flinkish_spark.bridge.session import has_kafka_source
from flinkish_spark.connectors.json import why_no_record
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
    PREFLIGHT_TIMEOUT_MS,
    KafkaAdmin,
    OffsetDirection,
    TopicPattern,
    check_letters_stay,
    unknown_topic,
)
from flinkish_spark.connectors.kafka.client.barriers import is_compacted
from flinkish_spark.connectors.kafka.client.client import WIRES, WirePool
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection, is_connection_option
from flinkish_spark.connectors.kafka.client.settings import HARMLESS_OPTIONS
from flinkish_spark.connectors.kafka.client.settings import READER_OPTIONS as CONSUMER_OPTIONS
from flinkish_spark.connectors.kafka.format import options as names
from flinkish_spark.connectors.kafka.format.data_source import FORMAT_NAME, register
from flinkish_spark.connectors.kafka.format.options import (
    CONTROL_PATH,
    FIRST_OFFSETS,
    HELD_PATH,
    HELD_SOURCE,
    PER_SECOND,
)
from flinkish_spark.connectors.kafka.offsets import (
    EndsAtOffsets,
    GroupPatience,
    KafkaEnd,
    KafkaStart,
    Partitions,
    StartingOffsets,
    Wanted,
    checked_end,
    checked_start,
    cut_at,
    group_marks,
    store_offsets,
)
from flinkish_spark.connectors.kafka.records import (
    Decoding,
    check_readable,
    checked_metadata,
    decoding_of,
    metadata_columns,
    names_of,
    options_for,
)
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.sink import GroupOffsets
from flinkish_spark.contracts.source import NO_JOB, JobPlace, SideOutput, SourceStart
from flinkish_spark.core.changelogs import Changes
from flinkish_spark.core.errors import (
    BAD_TIME_MARKER,
    ConfigError,
    EnvironmentFault,
    GraphError,
)
from flinkish_spark.core.formats import Engine, Format, Json, OnTombstone, Raw, check_format
from flinkish_spark.core.upstream_cut import UPSTREAM_KEY
from flinkish_spark.core.validation import instance_of, refused_as_config_errors, values_by_name
from flinkish_spark.protocol.choices import closest
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.input_gate import AlignmentMode
from flinkish_spark.protocol.limits import UNLIMITED, Unlimited, checked_whole
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.channels import TOPIC_BITS, TOPIC_SHIFT, check_told_apart
from flinkish_spark.types.record_time import FIRST_MS, LAST_MS, NO_TIME_MS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamReader

    from flinkish_spark.connectors.kafka.chaining.upstream import UpstreamJob
    from flinkish_spark.contracts.sink import Sink
    from flinkish_spark.core.job_dir import JobDir
    from flinkish_spark.core.offset_log import LoggedOffsets


#: Kafka's consumer is made for long polls. A micro-batch reads a range that is there already, and
#: loses half a second to a fetch that waits for records behind the range; 100,000 records take
#: 0.2 s with these settings and 0.8 s without.
READER_DEFAULTS = {"kafka.fetch.max.wait.ms": "20", "kafka.max.poll.records": "5000"}
KAFKA_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp")
#: Reader options that change nothing that the source promises; all others are refused.
READER_OPTIONS = frozenset(
    {
        "minOffsetsPerTrigger",
        "maxTriggerDelay",
        "kafkaConsumer.pollTimeoutMs",
        "fetchOffset.numRetries",
        "fetchOffset.retryIntervalMs",
    }
    | {f"kafka.{name}" for name in (CONSUMER_OPTIONS | HARMLESS_OPTIONS) - {"isolation.level"}}
)
_SPLITTING = frozenset({"minpartitions", "maxrecordsperpartition"})


def check_reader_options(options: Mapping[str, str]) -> None:
    """Refuse reader options that are not known to be harmless."""
    known = {name.lower() for name in READER_OPTIONS}
    for name in options:
        bare = name.lower().removeprefix("kafka.")
        if name.lower() in _SPLITTING:
            raise ConfigError(
                f"the reader option '{name}' cannot be set",
                why="several tasks would read one partition, and a later record could come out before an "
                "earlier one",
                what_to_do="give the topic more partitions, or spread the records behind the source with "
                "rebalance()",
                option=name,
            )
        if name.lower() in known:
            continue
        if is_connection_option(bare):
            what_to_do = f'give it to options: options={{"kafka.{bare}": ...}}'
        else:
            what_to_do = closest(name, READER_OPTIONS) or "leave it out, or use a parameter of the source"
        raise ConfigError(
            f"the reader option '{name}' cannot be set",
            why="an option is taken if it changes nothing that the source promises",
            what_to_do=what_to_do,
            option=name,
        )


def subscription(
    topics: Sequence[str], partitions: Mapping[str, Sequence[int]], pattern: str = ""
) -> dict[str, str]:
    if pattern:
        return {"subscribePattern": pattern}
    if not partitions:
        return {"subscribe": ",".join(topics)}
    return {"assign": json.dumps({topic: list(numbers) for topic, numbers in partitions.items()})}


def for_jvm(pattern: str) -> str:
    """Return a pattern as Spark's own reader wants it, which looks for it anywhere in a topic's name."""
    return f"^(?:{pattern})$" if pattern else ""


def ranges_between(
    starts: Mapping[str, Mapping[int, int]], ends: Mapping[str, Mapping[int, int]]
) -> dict[str, str] | None:
    """Return the options of a batch read of what a micro-batch has read; None if that was nothing."""
    if not ends:
        return None
    earliest = -2
    wanted = {t: {p: starts.get(t, {}).get(p, earliest) for p in ps} for t, ps in ends.items()}
    return {
        # Not the topics: they may have more partitions by now.
        "assign": json.dumps({topic: sorted(numbers) for topic, numbers in ends.items()}),
        "startingOffsets": json.dumps(wanted),
        "endingOffsets": json.dumps(ends),
    }


def with_checked_times(records: DataFrame) -> DataFrame:
    """Return records whose `timestamp` is one: a record without a time has -1 in Kafka, here it has null.

    Any other time in none of the years 1 to 9999 ends the query with an error that names the record.
    """
    ms = F.unix_millis("timestamp")
    is_time = ms.isNull() | ms.between(FIRST_MS, LAST_MS)
    place = F.to_json(F.struct("topic", "partition", "offset", ms.alias("timestamp_ms")))
    message = F.concat(F.lit(BAD_TIME_MARKER), place)
    checked = F.when(is_time, F.lit(True)).otherwise(F.raise_error(message).cast("boolean"))
    return with_known_times(records.where(checked))


def with_known_times(records: DataFrame) -> DataFrame:
    is_known = F.unix_millis("timestamp") != NO_TIME_MS
    return records.withColumn("timestamp", F.when(is_known, F.col("timestamp")))


def channel_column(topics: Sequence[str]) -> Column:
    """Return the number of each record's partition as a channel."""
    channel = F.col("partition").cast("long")
    if len(topics) != 1:
        number = F.crc32(F.col("topic").cast("binary")).bitwiseAND(F.lit(TOPIC_BITS).cast("long"))
        channel = F.shiftleft(number, TOPIC_SHIFT) + channel
    return channel.alias(C.CHANNEL)


def checked_pace(
    most: float | Unlimited, reader: str | Engine, aligned_with: UpstreamJob | None
) -> float | Unlimited:
    """Return what a user gave as `max_offsets_per_second`, or raise ConfigError."""
    if most is UNLIMITED:
        return most
    if Engine.of(reader, "reader") is not Engine.PYTHON:
        raise ConfigError(
            "max_offsets_per_second needs the Python reader",
            why="Spark's own Kafka source counts records of a micro-batch, and no seconds",
            what_to_do='add reader="python"; or set max_offsets_per_trigger, and trigger_interval_ms of '
            "the environment",
        )
    if aligned_with is not None:
        raise ConfigError(
            "max_offsets_per_second and aligned_with are set for one source",
            why="a micro-batch ends where the upstream job's checkpoint does",
            what_to_do="set max_offsets_per_trigger, or leave one of them out",
        )
    return RateLimit(records_per_second=most).records_per_second


#: Barrier records are no records of the stream, also of a job that does not follow them.
SKIP = {names.BARRIER_RECORDS: "skip"}


def check_upstream(
    upstream: UpstreamJob | None, reader: Engine, has_side_outputs: bool, reads_some: bool
) -> None:
    """Refuse settings of a source that cannot be aligned; called when the source is made."""
    if upstream is None:
        return
    if reader is not Engine.PYTHON:
        raise ConfigError(
            "aligned_with needs the Python reader",
            why="Spark's own Kafka source cannot stop at a barrier record",
            what_to_do='add reader="python"',
        )
    if reads_some:
        raise ConfigError(
            "aligned_with and partitions, or a pattern, are set for one source",
            why="a cut of the upstream job has a barrier in every partition of topics that are named",
            what_to_do="name the topics, and leave out partitions; or leave out aligned_with",
        )
    if has_side_outputs:
        raise ConfigError(
            "aligned_with and a dead-letter topic are set for one source",
            why="unreadable records are read by a second scan, which ends elsewhere than the cut",
            what_to_do="choose OnBadRecord.FAIL or OnBadRecord.DROP",
        )


def check_alone(upstream: UpstreamJob | None, place: JobPlace) -> None:
    """Refuse a plan in which other sources decide where barriers are; called by the planner."""
    if upstream is not None and place.job_dir is not None:
        raise GraphError(
            "a source with aligned_with is not the only source of its job",
            why="each source would draw a checkpoint at a place of its own, and no cut would be one",
            what_to_do="read all topics of the upstream job with one source, or leave aligned_with out",
        )


def check_policies(
    upstream: UpstreamJob | None, connection: KafkaConnection, topics: Sequence[str], pool: WirePool = WIRES
) -> None:
    """Refuse to draw cuts ahead of barriers in topics that lose them; called by the preflight."""
    if upstream is None or upstream.mode in (AlignmentMode.ALIGNED, AlignmentMode.AT_LEAST_ONCE):
        return
    with pool.wire(connection) as wire:
        compacted = next((topic for topic in topics if is_compacted(wire, topic)), None)
    if compacted is not None:
        raise ConfigError(
            f"the topic '{compacted}' is compacted, and its source has AlignmentMode.{upstream.mode.name}",
            why="compaction may remove a barrier record after the checkpoint was drawn ahead of it, which "
            "then names a cut that is none",
            what_to_do="use AlignmentMode.ALIGNED, or a topic with cleanup.policy=delete",
            topic=compacted,
        )


def reader_options(upstream: UpstreamJob | None, start: SourceStart | None) -> dict[str, str]:
    if upstream is None:
        return {}
    options = {names.UPSTREAM: upstream.to_option()}
    if start is not None and UPSTREAM_KEY in start.position:
        options[names.UPSTREAM_START] = json.dumps(start.position)
    return options


LOG = logging.getLogger(__name__)
#: By which a job directory knows that Python reads.
_PYTHON_PLAN = "kafka-python"
_OPTIONS_TO_DO = 'give options by name: {"name": "value"}; or leave it out'


@dataclass(frozen=True, init=False)
class KafkaSource(EndsAtOffsets):
    """Read Kafka topics.

    Parameters
    ----------
    bootstrap_servers
        ``"host:port,host:port"``.
    topics
        Topics that exist; partitions may be added while the job runs.
    pattern
        In place of topics: a regular expression that the whole name of a topic matches, ``"orders-.*"``.
        Topics that come later are read from their first record; one that is deleted fails the job.
    group_id
        Consumer group whose offsets are committed after every sink, so that lag tools see what is
        really done. While a consumer of the group is active, Kafka does not take them: the job goes on
        without them, and warns. Empty: no offsets are committed.
    value
        The format of values, see `docs/formats.md`: ``Json("field TYPE, ...")``, ``Csv(...)``, ``String()``,
        ``Avro(...)``, ``Protobuf(...)``, ``JsonSchema(...)`` or ``Raw()``; or, for changes of a database,
        ``DebeziumJson(...)``, ``DebeziumAvro(...)``, ``DebeziumMongoJson(...)``, ``CanalJson(...)`` or
        ``MaxwellJson(...)``: see `docs/changelogs.md`.
    starting_offsets
        Where the first start of the job begins: StartingOffsets.EARLIEST or LATEST, StartAtTimestamp(...),
        StartAtOffsets(...) or StartAtCommitted(...). Later starts go on from the checkpoint.
    max_offsets_per_trigger
        Most records per micro-batch; 0 for no limit.
    max_offsets_per_second
        On average, up to a second's worth at once; of the Python reader.
    options
        Connection and security options under Kafka's or Spark's names.
    reader_options
        Further options of Spark's Kafka source that change nothing that is promised, such as
        ``{"kafka.fetch.max.bytes": "1000000"}``; see `docs/sources.md`.
    reader
        ``"jvm"``: Spark's own source. ``"python"``: this package's, which needs no JAR and injects a
        barrier behind the records of every partition. Fixed for the life of a job_dir. None: the one that
        the job_dir was begun with; at first Spark's own, or Python where the session has no JAR of it.
    aligned_with
        The job that writes the topics, if checkpoints are to be drawn at its checkpoints: see
        :class:`~flinkish_spark.UpstreamJob`. May change from start to start.
    metadata
        Columns of the stream beside the fields, called ``_topic`` and so on: any of ``"topic"``,
        ``"partition"``, ``"offset"``, ``"timestamp"``, ``"timestamp-type"``, ``"key"``, ``"headers"``,
        ``"headers-map"`` and, with the Python reader, ``"leader-epoch"``; see `docs/sources.md`. What
        `flinkish audit` goes by (`docs/audit.md`). Of changes also what their format knows, with
        ``value.`` in front: ``"value.source.table"``.
    ending
        EndAtLatest(), EndAtOffsets(...) or EndAtTimestamp(...), fixed at the first start; the job ends
        when all of its sources have. None: the topics have no end.
    partitions
        By topic, those that are read, and no others however many there come to be. None for all, and for
        those that are added while the job runs.
    key
        The format of keys, if their fields are to be columns, too: in front of the value's. A field that both
        have is one column, the value's. A record without a key has null in them. None: keys are not decoded.
    key_fields_prefix
        In front of the name of each field of the keys.
    tombstones
        What becomes of a record without a value. None: it is bad; of changes it is left out, and where the
        value is `Raw` it is null. See :class:`~flinkish_spark.OnTombstone`.

    Notes
    -----
    Reads committed records only, fails on lost data, and neither can be switched off: without
    them exactly-once is not true.
    """

    bootstrap_servers: str
    topics: tuple[str, ...]
    group_id: str = ""
    value: Format | Changes = field(default_factory=Raw)
    starting_offsets: StartingOffsets | KafkaStart = StartingOffsets.EARLIEST
    max_offsets_per_trigger: int = 0
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    reader_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    reader: Engine = Engine.JVM
    aligned_with: UpstreamJob | None = None
    metadata: tuple[str, ...] = ()
    ending: KafkaEnd | None = None
    partitions: Partitions = field(default_factory=dict)
    pattern: str = ""
    max_offsets_per_second: float | Unlimited = UNLIMITED
    key: Format | None = None
    key_fields_prefix: str = ""
    tombstones: OnTombstone | None = None
    _start: SourceStart | None = field(default=None, repr=False)
    _finds_reader: bool = field(default=False, repr=False, compare=False)

    def __init__(
        self,
        bootstrap_servers: str,
        topics: Sequence[str] = (),
        *,
        pattern: str = "",
        group_id: str = "",
        value: Format | Changes = Raw(),  # noqa: B008 - a frozen value
        starting_offsets: StartingOffsets | KafkaStart = StartingOffsets.EARLIEST,
        max_offsets_per_trigger: int = 0,
        options: Mapping[str, str] | None = None,
        reader_options: Mapping[str, str] | None = None,
        reader: str | Engine | None = None,
        aligned_with: UpstreamJob | None = None,
        metadata: Sequence[str] = (),
        ending: KafkaEnd | None = None,
        partitions: Mapping[str, Sequence[int]] | None = None,
        max_offsets_per_second: float | Unlimited = UNLIMITED,
        key: Format | None = None,
        key_fields_prefix: str = "",
        tombstones: OnTombstone | None = None,
    ) -> None:
        is_found, reader = reader is None, Engine.JVM if reader is None else Engine.of(reader, "reader")
        read = Wanted.of(topics, pattern, partitions)
        check_told_apart(read.topics)
        group_id = instance_of("group_id", group_id, str, what_to_do="give a name, or leave it out")
        with refused_as_config_errors("give a number of records, or 0 for no limit"):
            checked_whole("max_offsets_per_trigger", max_offsets_per_trigger, least=0)
        for name, content in (
            ("bootstrap_servers", bootstrap_servers),
            ("topics", read.topics),
            ("group_id", group_id),
            ("value", value),
            ("starting_offsets", checked_start(starting_offsets, group_id)),
            ("max_offsets_per_trigger", max_offsets_per_trigger),
            ("options", values_by_name("options", options, what_to_do=_OPTIONS_TO_DO)),
            ("reader_options", values_by_name("reader_options", reader_options, what_to_do=_OPTIONS_TO_DO)),
            ("reader", reader),
            ("aligned_with", aligned_with),
            ("metadata", checked_metadata(metadata)),
            ("ending", checked_end(ending, aligned_with)),
            ("partitions", read.partitions),
            ("pattern", read.pattern),
            ("max_offsets_per_second", checked_pace(max_offsets_per_second, reader, aligned_with)),
            ("key", key),
            ("key_fields_prefix", key_fields_prefix),
            ("tombstones", tombstones),
            ("_start", None),
            ("_finds_reader", is_found),
        ):
            object.__setattr__(self, name, content)
        _ = self.connection  # Raises if servers or options cannot be used.
        check_reader_options(self.reader_options)
        if not isinstance(value, Changes):
            check_format("value", value)
        check_readable(self.metadata, self.reader)
        _ = self._decoding  # Raises if its parts contradict each other.
        check_upstream(
            self.aligned_with, self.reader, self.has_side_outputs, bool(self.partitions or self.pattern)
        )

    def in_session(self, spark: SparkSession, begun_as: Callable[[], str | None]) -> Self:
        """Return the source with the reader that its job directory was begun with, or a new one can have."""
        if not self._finds_reader or getattr(spark, "_jvm", None) is None:
            return self
        begun, has_jars = begun_as(), has_kafka_source(spark)
        is_python = not has_jars if begun is None else _PYTHON_PLAN in begun.split()
        if not is_python and not has_jars:
            raise EnvironmentFault(
                f"the source '{self._uid}' was begun with Spark's Kafka source, which this session has not",
                why="the log of its offsets is that reader's",
                what_to_do="start the session with flinkish_spark.configure_spark_with_jars(...); or take a "
                'savepoint there, and begin a new job_dir with it, with reader="python"',
                uid=self._uid,
            )
        if not is_python:
            return self
        LOG.info("the Kafka source '%s' is read in Python", self._uid)
        found = copy(self)
        found.__dict__["reader"] = Engine.PYTHON
        return found

    @cached_property
    def connection(self) -> KafkaConnection:
        return KafkaConnection(self.bootstrap_servers, self.options)

    def datasets(self) -> tuple[Dataset, ...]:
        """Return its topics; those of a pattern are not known before they are read."""
        return Dataset.of_topics(self.connection.servers, self.topics)

    @property
    def needs_kafka_jars(self) -> bool:
        return self.reader is Engine.JVM

    @property
    def is_checked_apart(self) -> bool:
        """Brokers are asked, and nobody else."""
        return True

    @cached_property
    def _decoding(self) -> Decoding | None:
        return decoding_of(self.value, self.metadata, self.key, self.key_fields_prefix, self.tombstones)

    @property
    def has_side_outputs(self) -> bool:
        return bool(self._letters)

    @property
    def _letters(self) -> str:
        return "" if self._decoding is None else self._decoding.letter_topic

    @property
    def plan_name(self) -> str:
        """Tell apart what a log was written by: the reader, and how channels are numbered."""
        reader = "" if self.reader is Engine.JVM else _PYTHON_PLAN
        return " ".join(filter(None, (reader, "pattern" if self.pattern else "")))

    @property
    def drops_records(self) -> bool:
        return self._decoding is not None and self._decoding.drops_records

    @cached_property
    def _admin(self) -> KafkaAdmin:
        return KafkaAdmin(self.connection)

    @cached_property
    def _watch_admin(self) -> KafkaAdmin:
        # Another thread's: an admin belongs to one.
        return KafkaAdmin(self.connection)

    @cached_property
    def _group_patience(self) -> GroupPatience:
        return GroupPatience()

    def load(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        check_alone(self.aligned_with, place)
        return self._fields(self._raw(spark, place, {}), place, (C.CHANNEL, C.SEQUENCE), None)

    def load_marked(self, spark: SparkSession, place: JobPlace) -> DataFrame | None:
        """Return the Python reader's stream, whose partitions each end with a barrier."""
        if self.reader is Engine.JVM:
            return None
        raw = self._python_raw(spark, place)
        # Not by the kind: a later filter on it would let Spark's optimizer put its value into the check
        # of the records' values, and run that check first.
        is_barrier = F.col("topic").isNull()
        control = (C.KIND, C.CHECKPOINT, C.CHANNEL, C.SEQUENCE)
        return self._fields(raw, place, control, is_barrier)

    def _fields(
        self, raw: DataFrame, place: JobPlace, kept: Sequence[str], is_barrier: Column | None
    ) -> DataFrame:
        if self._decoding is None:
            return raw
        # Two scans that begin at different places count apart what they drop.
        # A name of Spark's, in which a pattern might be anything.
        read = ("topics", *self.topics) if self.topics else ("pattern", self.fact("pattern"))
        counted_as = ("" if self._start is None else self._start.label, *read)
        rows_of = self._decoding.deserializer(self._uid, place, self.topics)
        return rows_of.rows(raw, counted_as, (*names_of(self.metadata), *kept), is_barrier)

    def side_uids(self, uid: str) -> tuple[str, ...]:
        return (letters_uid(uid),) if self.has_side_outputs else ()

    def side_outputs(
        self, spark: SparkSession, uid: str, place: JobPlace, peers: Sequence[Sink]
    ) -> tuple[SideOutput, ...]:
        """Return the dead-letter stream: a second scan that keeps the unreadable records only."""
        if self._decoding is None or not self.has_side_outputs:
            return ()
        raw = self._raw(spark, place, {"includeHeaders": "true"}, HEADERS)
        bad = self._decoding.deserializer(uid, place, self.topics).bad(raw)
        return (letters_of(bad, self._decoding.policy, uid, self.connection, peers),)

    def find_bad_record(
        self, spark: SparkSession, start: LoggedOffsets | None, end: LoggedOffsets
    ) -> tuple[str, int, int, str] | None:
        """Read one micro-batch's range again, without Spark's fail-fast, up to its first bad record."""
        ranges = ranges_between({} if start is None else self.offsets_in(start), self.offsets_in(end))
        if not isinstance(self.value, Json) or self._decoding is None or ranges is None:
            # Of all others the error itself says which record it is.
            return None
        reader = spark.read.format(self._format_in(spark)).options(**self.connection.for_spark())
        reader = reader.options(failOnDataLoss="false")
        skip = {} if self.reader is Engine.JVM else SKIP
        reader = reader.options(**ranges, **{"kafka.isolation.level": "read_committed", **skip})
        bad = self._decoding.deserializer(self._uid, NO_JOB, self.topics).bad(reader.load())
        found = bad.select("topic", "partition", "offset", "value").first()
        if found is None:
            return None
        return found.topic, found.partition, found.offset, why_no_record(spark, self.value, found.value)

    def _format_in(self, spark: SparkSession) -> str:
        if self.reader is Engine.JVM:
            return "kafka"
        register(spark)
        return FORMAT_NAME

    def _raw(self, spark: SparkSession, place: JobPlace, more: Mapping[str, str], *columns: str) -> DataFrame:
        frame = self._stream(spark, place, more).load()
        frame = with_checked_times(cut_at(frame, self.ends_in(place)))
        own = [*map(F.col, (*KAFKA_COLUMNS, *columns)), *metadata_columns(self.metadata)]
        return frame.select(*own, channel_column(self.topics), F.col("offset").alias(C.SEQUENCE))

    def _python_raw(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        upstream = reader_options(self.aligned_with, self._start)
        frame = self._stream(spark, place, {CONTROL_PATH: place.control_path, **upstream}).load()
        is_record = F.col(C.KIND) == int(C.Kind.RECORD)
        frame = with_checked_times(cut_at(frame, self.ends_in(place), F.col("topic").isNull()))
        channel = F.when(is_record, channel_column(self.topics)).otherwise(F.col(C.CHANNEL))
        offset = F.coalesce("offset", F.lit(0).cast("long"))
        own = [*map(F.col, KAFKA_COLUMNS), *metadata_columns(self.metadata)]
        return frame.select(*own, C.KIND, C.CHECKPOINT, channel.alias(C.CHANNEL), offset.alias(C.SEQUENCE))

    def _stream(self, spark: SparkSession, place: JobPlace, more: Mapping[str, str]) -> DataStreamReader:
        held = {HELD_PATH: place.control_path, HELD_SOURCE: self._uid} if self._uid else {}
        most = self.max_offsets_per_second
        pace = {} if isinstance(most, Unlimited) else {PER_SECOND: repr(float(most))}
        own = {FIRST_OFFSETS: place.beginnings(self._start), **held, **pace}
        own = {**own, **SKIP} if self.reader is Engine.PYTHON else READER_DEFAULTS
        own = {**own, **options_for(self.metadata)}
        reader = spark.readStream.format(self._format_in(spark)).options(**self.connection.for_spark())
        reader = reader.options(**{**own, **self.reader_options, **more})
        pattern = self.pattern if self.reader is Engine.PYTHON else for_jvm(self.pattern)
        reader = reader.options(**subscription(self.topics, self.partitions, pattern))
        reader = reader.option("startingOffsets", self.starting_option(place))
        reader = reader.option("failOnDataLoss", "true").option("kafka.isolation.level", "read_committed")
        if self.max_offsets_per_trigger:
            reader = reader.option("maxOffsetsPerTrigger", str(self.max_offsets_per_trigger))
        return reader

    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        """Refuse brokers that do not answer, and topics that do not exist or cannot be followed."""
        letters = self._letters
        check_letter_topic(uid, letters, self.topics or TopicPattern(self.pattern))
        wanted = [*self.topics, *filter(None, [letters])]
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            found = admin.topics(wanted)
            missing = [t for t in wanted if t not in found]
            if missing:
                raise unknown_topic(missing[0], self.connection.servers, of=f"source '{uid}'")
            check_letters_stay(found, [letters], f"source '{uid}'")
            self.places(admin)  # Raises if one that was named is not there.
            self.check_end(admin)
        check_policies(self.aligned_with, self.connection, self.topics)

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Compare topics and offsets with what the job still has to read; fix the end."""
        self.fix_end(self._admin, job_dir)
        checks = InputChecks(self._admin, self.topics_at(position))
        raise_if_it_stays(lambda: checks.replaced(job_dir, uid, position) or checks.gone(uid, position))

    def check_identity(self, job_dir: JobDir, uid: str) -> None:
        """Compare the topics' ids: Spark does not notice a topic that was created again."""
        checks = InputChecks(self._watch_admin, self.topics_now())
        raise_if_it_stays(lambda: checks.replaced(job_dir, uid, None))

    def check_alignable(self, uid: str) -> None:
        if self.reader is not Engine.PYTHON:
            raise GraphError(
                f"the source '{uid}' cannot be aligned with others",
                why="Spark's own Kafka source cannot hold back a partition that is ahead",
                what_to_do='read it with KafkaSource(..., reader="python"), or leave '
                "with_watermark_alignment() out and set max_offsets_per_trigger",
                uid=uid,
            )
        if self.aligned_with is not None:
            raise GraphError(
                f"the source '{uid}' follows an upstream job, and has with_watermark_alignment()",
                why="a partition that is held back would never come to the barrier for which the others wait",
                what_to_do="leave out with_watermark_alignment() or aligned_with",
                uid=uid,
            )

    def check_retention(self, uid: str, needed_ms: int) -> None:
        check_topic_retention(self.connection, self.topics_now(), uid, needed_ms)

    def group_offsets(self, position: LoggedOffsets) -> GroupOffsets | None:
        if not self.group_id:
            return None
        offsets = self.before_end(self.offsets_in(position))
        places = {(topic, p): at for topic, partitions in offsets.items() for p, at in partitions.items()}
        return GroupOffsets(self.connection.servers, self.group_id, places) if places else None

    def commit_offsets(
        self, position: LoggedOffsets, note: str = ""
    ) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """Commit the group's offsets, forward only."""
        return self._store_offsets(position, OffsetDirection.FORWARD_ONLY, note)

    def newest_marks(self, job: JobUuid) -> Sequence[Mark]:
        return group_marks(self._admin, self.group_id, job)

    def lower_offsets(self, position: LoggedOffsets) -> None:
        """Set the group's offsets to `position`, also downwards: somebody ordered a rewind."""
        self._store_offsets(position, OffsetDirection.REWIND)

    def _store_offsets(
        self, position: LoggedOffsets, direction: OffsetDirection, note: str = ""
    ) -> dict[str, Mapping[str, Mapping[str, int]]]:
        offsets = self.before_end(self.offsets_in(position))
        stored: dict[str, Mapping[str, Mapping[str, int]]] = {}
        self._group_patience.tries(
            self.group_id,
            lambda: stored.update(store_offsets(self._admin, self.group_id, offsets, direction, note)),
        )
        return stored
