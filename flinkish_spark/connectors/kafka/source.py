"""The Kafka source: reads committed records in Python, and commits group offsets after the sinks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Self

from pyspark.sql import DataFrame, SparkSession

from flinkish_spark.connectors.kafka import stream_options as names
from flinkish_spark.connectors.kafka.checks import (
    HEADERS,
    find_missing_input,
    find_replaced_topic,
    raise_if_confirmed,
)
from flinkish_spark.connectors.kafka.client.admin import PREFLIGHT_TIMEOUT_MS, KafkaAdmin, OffsetDirection
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection, is_connection_option
from flinkish_spark.connectors.kafka.client.settings import HARMLESS_OPTIONS
from flinkish_spark.connectors.kafka.client.settings import READER_OPTIONS as CONSUMER_OPTIONS
from flinkish_spark.connectors.kafka.data_source import FORMAT_NAME, register
from flinkish_spark.connectors.kafka.input import KafkaInput
from flinkish_spark.connectors.kafka.metadata import OWN_TIME, check_metadata, names_of, to_reader_options
from flinkish_spark.connectors.kafka.offset_ranges import from_json, to_json
from flinkish_spark.connectors.kafka.offsets import (
    SOURCE_ADVICE,
    KafkaEnd,
    KafkaStart,
    StartingOffsets,
    TopicSelection,
    name_group,
    select_partitions,
)
from flinkish_spark.connectors.kafka.ranges import ReadRanges
from flinkish_spark.connectors.kafka.records import make_decoding
from flinkish_spark.connectors.kafka.upstream_job import UpstreamJob
from flinkish_spark.connectors.plain_formats import Raw
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.contracts.format import FORMATS, Changes, Format
from flinkish_spark.contracts.sink import GroupOffsets
from flinkish_spark.contracts.source import Extent, JobPlace, SourceStart
from flinkish_spark.core.arrow_pass import map_in_arrow
from flinkish_spark.core.errors import ConfigError, GraphError, JobDirError
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.core.formats import OnTombstone
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.upstream_cut import UPSTREAM_KEY
from flinkish_spark.core.validation import values_by_name
from flinkish_spark.protocol.choices import closest
from flinkish_spark.protocol.ids import Place
from flinkish_spark.protocol.limits import UNLIMITED, NoLimit
from flinkish_spark.protocol.plan_layout import Position, offsets_in
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.channels import channel_of, check_distinct_channels

#: Reader options that do not affect the source's guarantee; all others are refused.
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
    known = {name.lower() for name in READER_OPTIONS}
    for name in options:
        bare = name.lower().removeprefix("kafka.")
        why = "an option is taken if it changes nothing that the source promises"
        to_do = closest(name, READER_OPTIONS) or "leave it out, or use a parameter of the source"
        if name.lower() in _SPLITTING:
            why = "several tasks would read a partition; a later record could come out before an earlier one"
            to_do = "give the topic more partitions, or spread the records behind the source with rebalance()"
        elif is_connection_option(bare):
            to_do = f'give it to options: options={{"kafka.{bare}": ...}}'
        if name.lower() not in known:
            raise ConfigError(f"the reader option '{name}' cannot be set", why=why, what_to_do=to_do)


def to_subscription_options(wanted: TopicSelection) -> dict[str, str]:
    if wanted.pattern:
        return {"subscribePattern": wanted.pattern}
    if not wanted.partitions:
        return {"subscribe": ",".join(wanted.topics)}
    return {"assign": json.dumps({topic: list(numbers) for topic, numbers in wanted.partitions.items()})}


#: Every job skips barrier records, also one that does not align to them.
SKIP = {names.BARRIER_RECORDS: "skip"}


def make_upstream_options(upstream: UpstreamJob | None, start: SourceStart | None) -> dict[str, str]:
    if upstream is None:
        return {}
    options = {names.UPSTREAM: upstream.to_option()}
    if start is not None and UPSTREAM_KEY in start.position:
        options[names.UPSTREAM_START] = json.dumps(start.position)
    return options


#: Spark's number for the earliest offset.
_EARLIEST = -2
_OPTIONS_TO_DO = 'give options by name: {"name": "value"}; or leave it out'


@dataclass(frozen=True)
class KafkaSource(KafkaInput):
    """Read Kafka topics.

    Parameters
    ----------
    bootstrap_servers
        ``"host:port,host:port"``.
    topics
        Existing topics; partitions may be added while the job runs.
    pattern
        In place of topics: a regular expression for whole topic names, ``"orders-.*"``. The source reads
        topics that are created later from their first record; deleting one fails the job.
    group_id
        Consumer group whose offsets are committed after all sinks, so that lag tools show the real
        progress. While a consumer of the group is active, Kafka refuses them: the job goes on without
        them, and warns. Empty: no offsets are committed.
    value
        The format of values, see `docs/formats.md`: ``Json("field TYPE, ...")``, ``Csv(...)``, ``String()``,
        ``Avro(...)``, ``Protobuf(...)``, ``JsonSchema(...)`` or ``Raw()``; or, for changes of a database,
        ``DebeziumJson(...)``, ``DebeziumAvro(...)``, ``DebeziumMongoJson(...)``, ``CanalJson(...)`` or
        ``MaxwellJson(...)``: see `docs/changelogs.md`.
    starting_offsets
        Where the first start of the job begins: StartingOffsets.EARLIEST or LATEST, StartAtTimestamp(...),
        StartAtOffsets(...) or StartAtCommittedOffsets(...). Later starts go on from the checkpoint.
    max_offsets_per_trigger
        Most offsets per micro-batch; 0 for no limit.
    max_offsets_per_second
        Average rate; up to one second's worth at once.
    options
        Connection and security options under Kafka's or Spark's names.
    reader_options
        Further options of a Kafka source, under Spark's names, that do not affect its guarantee, such as
        ``{"kafka.fetch.max.bytes": "1000000"}``; see `docs/sources.md`.
    reader
        ``"python"`` or None: this package reads Kafka in Python only.
    aligned_with
        The job that writes the topics, if checkpoints are to align to its checkpoints: see
        :class:`~flinkish_spark.UpstreamJob`. May change between two starts.
    metadata
        Columns of the stream beside the fields, called ``_topic`` and so on: any of ``"topic"``,
        ``"partition"``, ``"offset"``, ``"timestamp"``, ``"timestamp-type"``, ``"key"``, ``"headers"``,
        ``"headers-map"`` and ``"leader-epoch"``; see `docs/sources.md`. `flinkish audit` needs some of them
        (`docs/audit.md`). For changes also metadata of their format, with the prefix ``value.``:
        ``"value.source.table"``.
    ending
        EndAtLatest(), EndAtOffsets(...) or EndAtTimestamp(...), fixed at the first start; the job ends
        when all of its sources have. None: the topics have no end.
    partitions
        Topic -> the partitions to read; others are never read. None for all partitions, also those that are
        added while the job runs.
    key
        The format of keys. Their fields become columns before those of the value; a field that both have is
        taken from the value. They are null in a record without a key. None: keys are not decoded.
    key_fields_prefix
        Prefix for the names of the key's fields.
    tombstones
        Policy for a record without a value. None: it is a bad record; for changes it is dropped, and for a
        `Raw` value it is null. See :class:`~flinkish_spark.OnTombstone`.

    Notes
    -----
    The source reads committed records only and fails on lost data. Neither can be switched off, since
    exactly-once depends on both.
    """

    bootstrap_servers: str
    topics: Sequence[str] = ()  # type: ignore[assignment]
    _: KW_ONLY
    pattern: str = ""
    group_id: str = ""
    value: Format | Changes = field(default_factory=Raw)
    starting_offsets: StartingOffsets | KafkaStart = StartingOffsets.EARLIEST
    max_offsets_per_trigger: Annotated[int, Range(0)] = 0
    options: Mapping[str, str] | None = field(default=None, repr=False)
    reader_options: Mapping[str, str] | None = field(default=None, repr=False)
    reader: InitVar[str | None] = None
    aligned_with: UpstreamJob | None = None
    metadata: Sequence[str] = ()
    ending: KafkaEnd | None = None
    partitions: Mapping[str, Sequence[int]] | None = None
    max_offsets_per_second: float | NoLimit = UNLIMITED
    key: Format | None = None
    key_fields_prefix: str = ""
    tombstones: OnTombstone | None = None

    kind = "kafka"
    _uid: ClassVar[str] = ""
    _start: ClassVar[SourceStart | None] = None
    #: Ending offsets, once they are fixed.
    _ends: ClassVar[Mapping[Place, int] | None] = None

    def __post_init__(self, reader: str | None) -> None:
        if reader not in (None, "python"):
            raise ConfigError(f"reader is {reader!r}, and it must be 'python'", what_to_do="leave it out")
        check_fields(
            self,
            value=FORMATS,
            max_offsets_per_trigger="give a number of records, or 0 for no limit",
            **SOURCE_ADVICE,
        )
        wanted = TopicSelection.of(self.topics, self.pattern, self.partitions)
        check_distinct_channels(wanted.topics)
        options = values_by_name("options", self.options, what_to_do=_OPTIONS_TO_DO)
        reader_options = values_by_name("reader_options", self.reader_options, what_to_do=_OPTIONS_TO_DO)
        check_reader_options(reader_options)
        metadata = check_metadata(self.metadata)
        parts = self.key, self.key_fields_prefix, self.tombstones
        for name, content in (
            ("wanted", wanted),
            ("connection", KafkaConnection(self.bootstrap_servers, options)),
            ("decoding", make_decoding(self.value, metadata, *parts)),
            ("topics", wanted.topics),
            ("partitions", wanted.partitions),
            ("starting_offsets", name_group(self.starting_offsets, self.group_id)),
            ("options", options),
            ("reader_options", reader_options),
            ("metadata", metadata),
            ("max_offsets_per_second", RateLimit(self.max_offsets_per_second).records_per_second),
        ):
            object.__setattr__(self, name, content)
        alone = {
            "max_offsets_per_second": self.max_offsets_per_second is not UNLIMITED,
            "partitions": self.partitions,
            "pattern": self.pattern,
            "ending": self.ending is not None,
            # Unreadable records are read by a second scan, which ends elsewhere than the cut.
            "a dead-letter topic": self.letters,
        }
        for other in (name for name, given in alone.items() if given and self.aligned_with is not None):
            raise ConfigError(
                f"aligned_with and {other} are both set",
                why="a micro-batch ends at barriers of that job, which all partitions of named topics have",
                what_to_do=f"leave out {other} or aligned_with",
            )

    def bind(self, uid: str) -> Self:
        return self._copy_with("_uid", uid)

    def _copy_with(self, name: str, value: object) -> Self:
        changed = copy(self)
        changed.__dict__[name] = value
        return changed

    @property
    def topic_pattern(self) -> str:  # type: ignore[override]
        return self.pattern

    @property
    def is_positionable(self) -> bool:
        return True

    def starting_at(self, start: SourceStart) -> Self:
        moved = self._copy_with("_start", start)
        # A connection belongs to one thread, and so to one source object.
        for name in ("_admin", "_watch_admin"):
            moved.__dict__.pop(name, None)
        return moved

    def add_own_time(self) -> Self:
        return self._copy_with("metadata", (*self.metadata, OWN_TIME))

    @property
    def is_checked_apart(self) -> bool:
        """The checks ask brokers only."""
        return True

    @property
    def plan_name(self) -> str:
        """Distinguishes two ways to number channels."""
        return "pattern" if self.pattern else ""

    @cached_property
    def _watch_admin(self) -> KafkaAdmin:
        # For the watching thread: an admin client belongs to one thread.
        return KafkaAdmin(self.connection)

    # Starting offsets:
    def offsets_in(self, position: LoggedOffsets) -> dict[Place, int]:
        """Return the next offset of each partition that this source has read."""
        return from_json(position.kafka(frozenset(self.wanted.filter_topics(position.topics()))))

    def topics_now(self) -> Sequence[str]:
        found = super().topics_now()
        check_distinct_channels(found)
        return found

    def places(self, admin: KafkaAdmin) -> list[Place]:
        """Return the existing partitions to read; raise GraphError if a named one does not exist."""
        counts = admin.partition_counts(self.topics_now())
        return select_partitions(counts, self.wanted.partitions, "the source's partitions")

    def starting_option(self, place: JobPlace) -> str:
        """Return the option `startingOffsets`, in which Spark wants every partition."""
        known: Mapping[str, Mapping[str, int]]
        if self._start is not None:
            known = offsets_in(self._start.position)
        elif isinstance(self.starting_offsets, StartingOffsets):
            # Each scan records the offsets that it finds.
            return self.starting_offsets.value
        elif place.job_dir is None:
            known = self._ask_offsets()
        else:
            job_dir, name = JobDir(place.job_dir.open()), self.make_fact_name("start")
            if job_dir.find_uuid() is None:
                # A plan that is only explained, before the first start.
                return StartingOffsets.EARLIEST.value
            recorded = job_dir.find_fact(name)
            if recorded is None:
                recorded = job_dir.record_fact(name, {"offsets": self._ask_offsets()})
            known = recorded["offsets"]
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            places = self.places(admin)
        # Unknown partitions and topics were added since and are read from their beginning.
        return json.dumps(to_json({(t, p): known.get(t, {}).get(str(p), _EARLIEST) for t, p in places}))

    def _ask_offsets(self) -> dict[str, dict[str, int]]:
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            return to_json(self.starting_offsets.offsets(admin, self.places(admin)))

    def make_fact_name(self, what: str) -> str:
        """Return the name under which the job directory keeps `what` of this source."""
        # No two sources of a job read one topic, and no topic name contains a blank.
        read = self.topics or (f"pattern {self.pattern}",)
        return f"kafka-{what}-{hashlib.sha256(repr(read).encode()).hexdigest()[:16]}"

    # Ending offsets:
    @property
    def is_bounded(self) -> bool:
        return self.ending is not None

    def has_ended(self, position: LoggedOffsets) -> bool:
        ends, read = self._ends, self.offsets_in(position)
        return ends is not None and all(read.get(place, -1) >= end for place, end in ends.items())

    def channels_in(self, position: LoggedOffsets) -> frozenset[int]:
        """Return the channels of partitions that have not reached their ending offset."""
        ends, read = self._ends, self.offsets_in(position)
        return self.channels_of(p for p, at in read.items() if ends is None or at < ends.get(p, 0))

    def channels_of(self, places: Iterable[Place]) -> frozenset[int]:
        """Return the channel numbers of partitions, as in the column ``_fs_channel``."""
        return frozenset(channel_of(self.wanted.topics, *place) for place in places)

    def extent(self, position: LoggedOffsets | None) -> Extent | None:
        """Return the sum of a position's offsets, without asking brokers where topics begin."""
        read = {} if position is None else self.offsets_in(position)
        return Extent(sum(read.values()), partitions=read) if read else None

    def newest(
        self, job_dir: JobDir, uid: str, position: LoggedOffsets | None
    ) -> Mapping[str, Mapping[str, int]]:
        return to_json(self.clip_to_ends(self._admin.end_offsets(self.places(self._admin))))

    def has_reached(self, end: Mapping[str, Mapping[str, int]], position: LoggedOffsets) -> bool:
        read = self.offsets_in(position)
        return all(read.get(place, -1) >= offset for place, offset in from_json(end).items())

    def check_end(self, admin: KafkaAdmin) -> None:
        places = self.places(admin)
        if self.ending is not None:
            self.ending.offsets(admin, places)

    def fix_end(self, admin: KafkaAdmin, job_dir: JobDir) -> None:
        """Record the ending offsets at the first start; called before each start of the query."""
        if self.ending is None or self._ends is not None:
            return
        wanted, name = self.ending.to_json(), self.make_fact_name("end")
        recorded = job_dir.find_fact(name)
        if recorded is None:
            offsets = to_json(self.ending.offsets(admin, self.places(admin)))
            recorded = job_dir.record_fact(name, {"ending": wanted, "offsets": offsets})
        if recorded["ending"] != wanted:
            read = ", ".join(self.topics) or self.pattern
            raise JobDirError(
                f"the source of {read} has the end {recorded['ending']}, not {wanted}",
                what_to_do="give that end again, or start a new job with a new job_dir",
            )
        self.__dict__["_ends"] = from_json(recorded["offsets"])

    def read_recorded_ends(self, place: JobPlace) -> Mapping[Place, int] | None:
        """Return the recorded ending offsets; None if the source has none, and before the first start."""
        if self.ending is None or self._ends is not None or place.job_dir is None:
            return self._ends
        recorded = JobDir(place.job_dir.open()).find_fact(self.make_fact_name("end"))
        return None if recorded is None else from_json(recorded["offsets"])

    def clip_to_ends(self, offsets: Mapping[Place, int]) -> dict[Place, int]:
        """Limit offsets to the ending offsets, and drop partitions without one, which were added later."""
        ends = offsets if self._ends is None else self._ends
        return {place: min(at, ends[place]) for place, at in offsets.items() if place in ends}

    # Reading:
    def load(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        if self.aligned_with is not None and place.job_dir is not None:
            raise GraphError(
                "a source with aligned_with is not the only source of its job",
                why="each source would take a checkpoint at another cut, so that it would not be consistent",
                what_to_do="read all topics of the upstream job with one source, or leave aligned_with out",
            )
        return self._decode(self._scan(spark, place, {}), place, (C.CHANNEL, C.SEQUENCE))

    def load_marked(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        """Return the stream with barriers, one per partition and checkpoint."""
        upstream = make_upstream_options(self.aligned_with, self._start)
        records = self._scan(spark, place, {names.CONTROL_PATH: place.control_path, **upstream})
        return self._decode(records, place, (C.KIND, C.CHECKPOINT, C.CHANNEL, C.SEQUENCE))

    def _decode(self, raw: DataFrame, place: JobPlace, kept: Sequence[str]) -> DataFrame:
        if self.decoding is None:
            return C.mark_records(raw)
        # Two scans with different beginnings count their dropped records separately.
        # The text becomes a name in Spark, so a pattern, which may hold any character, is hashed.
        read = ("topics", *self.topics) if self.topics else ("pattern", self.make_fact_name("pattern"))
        counted_as = ("" if self._start is None else self._start.label, *read)
        rows_of = self.decoding.deserializer(self._uid, place, self.topics)
        return rows_of.rows(raw, counted_as, (*names_of(self.metadata), *kept))

    def scan_with_headers(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        return self._scan(spark, place, {"includeHeaders": "true"}, HEADERS)

    def _scan(
        self, spark: SparkSession, place: JobPlace, more: Mapping[str, str], *columns: str
    ) -> DataFrame:
        """Return raw records: Spark plans offset ranges, and tasks read them."""
        given = {**self._make_options(place), **more, names.PIECES: "true"}
        register(spark)
        pieces = spark.readStream.format(FORMAT_NAME).options(**given).load()
        topics, metadata = self.wanted.topics, tuple(self.metadata)
        read = ReadRanges(
            names.parse_stream(given), topics, self.read_recorded_ends(place), metadata, columns
        )
        return map_in_arrow(pieces, read, read.columns)

    def _make_options(self, place: JobPlace) -> dict[str, str]:
        held = {names.HELD_PATH: place.control_path, names.HELD_SOURCE: self._uid} if self._uid else {}
        most = self.max_offsets_per_second
        pace = {} if isinstance(most, NoLimit) else {names.PER_SECOND: repr(float(most))}
        limit = {"maxOffsetsPerTrigger": str(self.max_offsets_per_trigger)}
        return {
            **self.connection.to_spark_options(),
            names.FIRST_OFFSETS: place.beginnings(self._start),
            **held,
            **pace,
            **SKIP,
            **to_reader_options(self.metadata),
            **(self.reader_options or {}),
            **to_subscription_options(self.wanted),
            "startingOffsets": self.starting_option(place),
            "failOnDataLoss": "true",
            "kafka.isolation.level": "read_committed",
            **(limit if self.max_offsets_per_trigger else {}),
        }

    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        super().preflight(spark, job_dir, uid)
        if self.aligned_with is not None:
            self.aligned_with.check_topics(self.connection, self.topics)

    def check_start(self, uid: str, position: Position) -> None:
        logged = LoggedOffsets((offsets_in(position),))
        topics = self.topics_at(logged)
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            raise_if_confirmed(lambda: find_missing_input(admin, topics, uid, logged))

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Fix the ending offsets, and check that Kafka still has what the job has to read."""
        self.fix_end(self._admin, job_dir)
        self.check_position(job_dir, uid, position)

    def check_identity(self, job_dir: JobDir, uid: str) -> None:
        """Check the topic ids: Spark does not notice that a topic was deleted and created again."""
        admin, topics = self._watch_admin, self.topics_now()
        raise_if_confirmed(lambda: find_replaced_topic(admin, topics, job_dir, uid, None))

    def check_alignable(self, uid: str) -> None:
        if self.aligned_with is not None:
            raise GraphError(
                f"the source '{uid}' follows an upstream job, and has with_watermark_alignment()",
                why="a partition that is held back would never reach the barrier for which the others wait",
                what_to_do="leave out with_watermark_alignment() or aligned_with",
            )

    def group_offsets(self, position: LoggedOffsets) -> GroupOffsets | None:
        places = self._find_offsets_to_commit(position)
        servers = self.connection.servers
        return GroupOffsets(servers, self.group_id, places) if self.group_id and places else None

    def commit_offsets(
        self, position: LoggedOffsets, note: str = ""
    ) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """Commit the group's offsets, forward only."""
        places = self._find_offsets_to_commit(position)
        return {self.group_id: to_json(places)} if self.store_offsets(places, note) else {}

    def lower_offsets(self, position: LoggedOffsets) -> None:
        """Set the group's offsets to `position`, even if it is lower; called for a rewind."""
        self.store_offsets(self._find_offsets_to_commit(position), direction=OffsetDirection.REWIND)

    def _find_offsets_to_commit(self, position: LoggedOffsets) -> dict[Place, int]:
        return self.clip_to_ends(self.offsets_in(position))
