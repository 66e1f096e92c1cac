"""The Kafka source: read in Python, read_committed, with honest group offsets."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from flinkish_spark.connectors.formats.decoding import REASON, schema_facts
from flinkish_spark.connectors.kafka.chaining.alignment import from_json, to_json
from flinkish_spark.connectors.kafka.chaining.upstream import UpstreamJob
from flinkish_spark.connectors.kafka.checks import (
    HEADERS,
    HEADERS_TYPE,
    check_topic_retention,
    missing_input,
    raise_if_it_stays,
    replaced_topic,
)
from flinkish_spark.connectors.kafka.client.admin import (
    PREFLIGHT_TIMEOUT_MS,
    KafkaAdmin,
    OffsetDirection,
    TopicPattern,
    check_letters_stay,
    unknown_topic,
)
from flinkish_spark.connectors.kafka.client.client import WIRES
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection, is_connection_option
from flinkish_spark.connectors.kafka.client.marks import newest_of
from flinkish_spark.connectors.kafka.client.settings import HARMLESS_OPTIONS, DeliveryGuarantee
from flinkish_spark.connectors.kafka.client.settings import READER_OPTIONS as CONSUMER_OPTIONS
from flinkish_spark.connectors.kafka.format import options as names
from flinkish_spark.connectors.kafka.format.data_source import FORMAT_NAME, register
from flinkish_spark.connectors.kafka.metadata import OWN_TIME, checked_metadata, names_of, options_for
from flinkish_spark.connectors.kafka.offsets import (
    GroupPatience,
    KafkaEnd,
    KafkaStart,
    StartingOffsets,
    Wanted,
    checked_end,
    checked_start,
    places_in,
    store_offsets,
)
from flinkish_spark.connectors.kafka.ranges import ReadRanges
from flinkish_spark.connectors.kafka.records import Decoding, decoding_of
from flinkish_spark.connectors.kafka.sink import KafkaSink
from flinkish_spark.connectors.kafka.sink_settings import DEFAULT_TRANSACTION_TIMEOUT_MS
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.sink import GroupOffsets, Sink
from flinkish_spark.contracts.source import Extent, JobPlace, SideOutput, Source, SourceStart
from flinkish_spark.core.changelogs import Changes
from flinkish_spark.core.errors import ConfigError, GraphError, JobDirError
from flinkish_spark.core.formats import BadRecordPolicy, DeadLetter, Format, OnTombstone, Raw, check_format
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.upstream_cut import UPSTREAM_KEY
from flinkish_spark.core.validation import instance_of, refused_as_config_errors, values_by_name
from flinkish_spark.protocol.choices import closest
from flinkish_spark.protocol.ids import JobUuid, Place
from flinkish_spark.protocol.input_gate import AlignmentMode
from flinkish_spark.protocol.limits import UNLIMITED, Unlimited, checked_whole
from flinkish_spark.protocol.plan_layout import Position, offsets_in
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.channels import channel_of, check_distinct_channels

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
        why = "an option is taken if it changes nothing that the source promises"
        to_do = closest(name, READER_OPTIONS) or "leave it out, or use a parameter of the source"
        if name.lower() in _SPLITTING:
            why = "several tasks would read a partition; a later record could come out before an earlier one"
            to_do = "give the topic more partitions, or spread the records behind the source with rebalance()"
        elif is_connection_option(bare):
            to_do = f'give it to options: options={{"kafka.{bare}": ...}}'
        if name.lower() not in known:
            raise ConfigError(
                f"the reader option '{name}' cannot be set", why=why, what_to_do=to_do, option=name
            )


def subscription(wanted: Wanted) -> dict[str, str]:
    if wanted.pattern:
        return {"subscribePattern": wanted.pattern}
    if not wanted.partitions:
        return {"subscribe": ",".join(wanted.topics)}
    return {"assign": json.dumps({topic: list(numbers) for topic, numbers in wanted.partitions.items()})}


#: Barrier records are no records of the stream, also of a job that does not follow them.
SKIP = {names.BARRIER_RECORDS: "skip"}


class KafkaInput(Source):
    """Kafka topics as input, whoever reads them: the questions to brokers, the dead letters, the group."""

    wanted: Wanted
    connection: KafkaConnection
    group_id: str
    #: What becomes of the records; None if they come as they are.
    decoding: Decoding | None

    def datasets(self) -> tuple[Dataset, ...]:
        """Return its topics; those of a pattern are not known before they are read."""
        return Dataset.from_topics(self.connection.servers, self.wanted.topics)

    @property
    def drops_records(self) -> bool:
        return self.decoding is not None and self.decoding.drops_records

    @property
    def letters(self) -> str:
        """The topic of dead letters; empty for none."""
        return "" if self.decoding is None else self.decoding.letter_topic

    @property
    def has_side_outputs(self) -> bool:
        return bool(self.letters)

    def side_uids(self, uid: str) -> tuple[str, ...]:
        return (f"{uid}{_OF_LETTERS}",) if self.letters else ()

    def side_outputs(
        self, spark: SparkSession, uid: str, place: JobPlace, peers: Sequence[Sink]
    ) -> tuple[SideOutput, ...]:
        """Return the dead-letter stream: a second scan that keeps the unreadable records only."""
        if self.decoding is None or not self.letters:
            return ()
        raw = self.with_headers(spark, place)
        bad = self.decoding.deserializer(uid, place, self.wanted.topics).bad(raw)
        return (letters_of(bad, self.decoding.policy, uid, self.connection, peers),)

    @abstractmethod
    def with_headers(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        """Return a scan of the records as they are, with their headers."""

    @cached_property
    def _admin(self) -> KafkaAdmin:
        return KafkaAdmin(self.connection)

    def topics_now(self) -> Sequence[str]:
        """Return the topics that are named; of a pattern, those that there are now. In any thread."""
        if not self.wanted.pattern:
            return self.wanted.topics
        # A connection belongs to one thread, so each call has its own.
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            return sorted(admin.matching(TopicPattern(self.wanted.pattern)))

    def topics_at(self, position: LoggedOffsets | None) -> Sequence[str]:
        """Return :meth:`topics_now`; of a pattern, also those that were read and may be gone."""
        if not self.wanted.pattern or position is None:
            return self.topics_now()
        return sorted({*self.topics_now(), *self.wanted.among(position.topics())})

    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        """Refuse brokers that do not answer, and topics that do not exist or cannot be followed."""
        super().preflight(spark, job_dir, uid)
        letters, who = self.letters, f"source '{uid}'"
        if letters and self.wanted.among([letters]):
            raise GraphError(
                f"source '{uid}' has its own topic as dead-letter topic",
                what_to_do="name another topic" + (", which does not match" if self.wanted.pattern else ""),
            )
        asked = [*self.wanted.topics, *filter(None, [letters])]
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            found = admin.topics(asked)
            missing = [topic for topic in asked if topic not in found]
            if missing:
                raise unknown_topic(missing[0], self.connection.servers, of=who)
            check_letters_stay(found, [letters], who)
            counts = {name: one.partitions for name, one in found.items()}
            places_in(counts, self.wanted.partitions, "the source's partitions")
            self.check_end(admin)

    def check_end(self, admin: KafkaAdmin) -> None:
        """Refuse an end that does not fit the partitions, where it is known before the source is read."""

    def check_retention(self, uid: str, needed_ms: int) -> None:
        check_topic_retention(self.connection, self.topics_now(), uid, needed_ms)

    def check_position(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Compare topics and offsets with what the job still has to read."""
        admin, topics = self._admin, self.topics_at(position)
        raise_if_it_stays(
            lambda: (
                replaced_topic(admin, topics, job_dir, uid, position)
                or missing_input(admin, topics, uid, position)
            )
        )

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Any]:
        """Return ids of topics, and schemas, as the job recorded them when it first met each."""
        names = [*(f"topic-{uid}-{topic}" for topic in self.topics_now()), *schema_facts(uid)]
        facts = {name: job_dir.recorded(name) for name in names}
        return {name: fact for name, fact in facts.items() if fact is not None}

    @cached_property
    def _group_patience(self) -> GroupPatience:
        return GroupPatience()

    def store_offsets(
        self,
        offsets: Mapping[Place, int],
        note: str = "",
        direction: OffsetDirection = OffsetDirection.FORWARD_ONLY,
    ) -> bool:
        """Set the group's offsets, with a note beside them; return whether that was done."""
        return bool(self.group_id) and self._group_patience.tries(
            self.group_id, lambda: store_offsets(self._admin, self.group_id, offsets, direction, note)
        )

    def newest_marks(self, job: JobUuid) -> Sequence[Mark]:
        notes = self._admin.committed_notes(self.group_id).values() if self.group_id else ()
        mark = newest_of(notes, job)
        return () if mark is None else (mark,)


def letters_of(
    bad: DataFrame, policy: BadRecordPolicy, uid: str, connection: KafkaConnection, peers: Sequence[Sink]
) -> SideOutput:
    # By a scan of their own, which ends where its logged offsets say: a record is good in the one or bad in
    # the other, whichever micro-batch brings it, so each comes out once.
    assert isinstance(policy, DeadLetter)
    sink = KafkaSink(
        connection.servers,
        policy.topic,
        key="key",
        value=Raw("value"),
        transaction_timeout_ms=letters_timeout_ms(policy, peers),
        # What a topic holds fits another one that takes as much; where it takes less, its head is kept.
        on_bad_record=DeadLetter(policy.topic),
        options=connection.options,
        producer={"max.request.size": str(_MOST_LETTER_BYTES)},
        headers=HEADERS,
    )
    letters = bad.select("key", "value", _headers(uid).alias(HEADERS), C.CHANNEL, C.SEQUENCE)
    return SideOutput(f"{uid}{_OF_LETTERS}", letters, sink)


def letters_timeout_ms(policy: DeadLetter, peers: Sequence[Sink]) -> int:
    """Return how long staged letters may wait: as long as what their job stages otherwise."""
    exact = [
        one.transaction_timeout_ms
        for one in peers
        if isinstance(one, KafkaSink) and one.delivery is DeliveryGuarantee.EXACTLY_ONCE
    ]
    return policy.transaction_timeout_ms or min(exact, default=DEFAULT_TRANSACTION_TIMEOUT_MS)


def _headers(uid: str) -> Column:
    # Before 1970 no sink writes; it is how a log says that it has no time.
    time_ms = F.unix_millis("timestamp")
    ours = {
        "flinkish-error": F.lit("unreadable"),
        "flinkish-source": F.lit(uid),
        "flinkish-topic": F.col("topic"),
        "flinkish-partition": F.col("partition").cast("string"),
        "flinkish-offset": F.col("offset").cast("string"),
        "flinkish-timestamp": F.when(time_ms >= 0, time_ms.cast("string")),
        "flinkish-detail": F.col(REASON),
    }
    entries = [
        F.struct(F.lit(name).alias("key"), text.cast("binary").alias("value")) for name, text in ours.items()
    ]
    told = F.filter(F.array(*entries), lambda one: one["value"].isNotNull())
    return F.concat(F.coalesce(F.col(HEADERS), F.array().cast(HEADERS_TYPE)), told)


def check_alone(upstream: UpstreamJob | None, place: JobPlace) -> None:
    """Refuse a plan in which other sources decide where barriers are; called by the planner."""
    if upstream is not None and place.job_dir is not None:
        raise GraphError(
            "a source with aligned_with is not the only source of its job",
            why="each source would draw a checkpoint at a place of its own, and no cut would be one",
            what_to_do="read all topics of the upstream job with one source, or leave aligned_with out",
        )


def check_policies(upstream: UpstreamJob | None, connection: KafkaConnection, topics: Sequence[str]) -> None:
    """Refuse to draw cuts ahead of barriers in topics that lose them; called by the preflight."""
    if upstream is None or upstream.mode in (AlignmentMode.ALIGNED, AlignmentMode.AT_LEAST_ONCE):
        return
    with WIRES.wire(connection) as wire:
        found = KafkaAdmin.over(wire).topics(topics)
    compacted = next((topic for topic in topics if topic in found and found[topic].is_compacted), None)
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


#: Spark's number for "the first offset there is".
_EARLIEST = -2
_MOST_LETTER_BYTES = 32 * 1024 * 1024
#: Behind the uid of a source, in that of its dead letters.
_OF_LETTERS = "-dead-letter"
_OPTIONS_TO_DO = 'give options by name: {"name": "value"}; or leave it out'


@dataclass(frozen=True)
class KafkaSource(KafkaInput):
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
        On average, up to a second's worth at once.
    options
        Connection and security options under Kafka's or Spark's names.
    reader_options
        Further options of a Kafka source, under Spark's names, that change nothing that is promised, such as
        ``{"kafka.fetch.max.bytes": "1000000"}``; see `docs/sources.md`.
    reader
        ``"python"`` or None: this package reads, and nothing else does.
    aligned_with
        The job that writes the topics, if checkpoints are to be drawn at its checkpoints: see
        :class:`~flinkish_spark.UpstreamJob`. May change from start to start.
    metadata
        Columns of the stream beside the fields, called ``_topic`` and so on: any of ``"topic"``,
        ``"partition"``, ``"offset"``, ``"timestamp"``, ``"timestamp-type"``, ``"key"``, ``"headers"``,
        ``"headers-map"`` and ``"leader-epoch"``; see `docs/sources.md`. What `flinkish audit` goes by
        (`docs/audit.md`). Of changes also what their format knows, with ``value.`` in front:
        ``"value.source.table"``.
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
    topics: Sequence[str] = ()  # type: ignore[assignment]
    _: KW_ONLY
    pattern: str = ""
    group_id: str = ""
    value: Format | Changes = field(default_factory=Raw)
    starting_offsets: StartingOffsets | KafkaStart = StartingOffsets.EARLIEST
    max_offsets_per_trigger: int = 0
    options: Mapping[str, str] | None = field(default=None, repr=False)
    reader_options: Mapping[str, str] | None = field(default=None, repr=False)
    reader: InitVar[str | None] = None
    aligned_with: UpstreamJob | None = None
    metadata: Sequence[str] = ()
    ending: KafkaEnd | None = None
    partitions: Mapping[str, Sequence[int]] | None = None
    max_offsets_per_second: float | Unlimited = UNLIMITED
    key: Format | None = None
    key_fields_prefix: str = ""
    tombstones: OnTombstone | None = None

    kind = "kafka"
    #: Under which its job knows it.
    _uid: ClassVar[str] = ""
    _start: ClassVar[SourceStart | None] = None
    #: Where partitions end for good, once that is fixed.
    _ends: ClassVar[Mapping[Place, int] | None] = None

    def __post_init__(self, reader: str | None) -> None:
        if reader not in (None, "python"):
            raise ConfigError(
                f"reader is {reader!r}",
                why="this package reads Kafka in Python, and in no other way",
                what_to_do="leave it out",
            )
        wanted = Wanted.of(self.topics, self.pattern, self.partitions)
        check_distinct_channels(wanted.topics)
        instance_of("group_id", self.group_id, str, what_to_do="give a name, or leave it out")
        with refused_as_config_errors("give a number of records, or 0 for no limit"):
            checked_whole("max_offsets_per_trigger", self.max_offsets_per_trigger, least=0)
        options = values_by_name("options", self.options, what_to_do=_OPTIONS_TO_DO)
        reader_options = values_by_name("reader_options", self.reader_options, what_to_do=_OPTIONS_TO_DO)
        check_reader_options(reader_options)
        if not isinstance(self.value, Changes):
            check_format("value", self.value)
        parts = self.key, self.key_fields_prefix, self.tombstones
        checked_end(self.ending)
        for name, content in (
            ("wanted", wanted),
            ("connection", KafkaConnection(self.bootstrap_servers, options)),
            ("decoding", decoding_of(self.value, checked_metadata(self.metadata), *parts)),
            ("topics", wanted.topics),
            ("partitions", wanted.partitions),
            ("starting_offsets", checked_start(self.starting_offsets, self.group_id)),
            ("options", options),
            ("reader_options", reader_options),
            ("metadata", checked_metadata(self.metadata)),
            ("max_offsets_per_second", RateLimit(self.max_offsets_per_second).records_per_second),
        ):
            object.__setattr__(self, name, content)
        if self.aligned_with is not None:
            self._check_aligned()

    def _check_aligned(self) -> None:
        """Refuse what cannot be together with an upstream job."""
        for other, is_given, why, what_to_do in (
            (
                "max_offsets_per_second",
                self.max_offsets_per_second is not UNLIMITED,
                "a micro-batch ends where the upstream job's checkpoint does",
                "set max_offsets_per_trigger, or leave one of them out",
            ),
            (
                "partitions, or a pattern,",
                self.partitions or self.pattern,
                "a cut of the upstream job has a barrier in every partition of topics that are named",
                "name the topics, and leave out partitions; or leave out aligned_with",
            ),
            (
                "ending",
                self.ending is not None,
                "its last checkpoint would wait for a barrier of that job's, which may lie behind the end",
                "leave out ending or aligned_with",
            ),
            (
                "a dead-letter topic",
                self.letters,
                "unreadable records are read by a second scan, which ends elsewhere than the cut",
                "choose OnBadRecord.FAIL or OnBadRecord.DROP",
            ),
        ):
            if is_given:
                raise ConfigError(
                    f"aligned_with and {other} are set for one source", why=why, what_to_do=what_to_do
                )

    def bind(self, uid: str) -> Self:
        return self._changed("_uid", uid)

    def _changed(self, name: str, value: object) -> Self:
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
        moved = self._changed("_start", start)
        # A connection belongs to one thread, and so to one source.
        for name in ("_admin", "_watch_admin"):
            moved.__dict__.pop(name, None)
        return moved

    def add_own_time(self) -> Self:
        return self._changed("metadata", (*self.metadata, OWN_TIME))

    @property
    def is_checked_apart(self) -> bool:
        """Brokers are asked, and nobody else."""
        return True

    @property
    def plan_name(self) -> str:
        """Tell apart how channels are numbered."""
        return "pattern" if self.pattern else ""

    @cached_property
    def _watch_admin(self) -> KafkaAdmin:
        # Another thread's: an admin belongs to one.
        return KafkaAdmin(self.connection)

    # Where it begins:
    def offsets_in(self, position: LoggedOffsets) -> dict[Place, int]:
        """Return the next offset of each partition that this source has read."""
        return from_json(position.kafka(frozenset(self.wanted.among(position.topics()))))

    def topics_now(self) -> Sequence[str]:
        found = super().topics_now()
        check_distinct_channels(found)
        return found

    def places(self, admin: KafkaAdmin) -> list[Place]:
        """Return the partitions that there are now; raise GraphError if one that is named is not there."""
        counts = admin.partition_counts(self.topics_now())
        return places_in(counts, self.wanted.partitions, "the source's partitions")

    def starting_option(self, place: JobPlace) -> str:
        """Return the option `startingOffsets`: Spark wants every partition named."""
        known: Mapping[str, Mapping[str, int]]
        if self._start is not None:
            known = offsets_in(self._start.position)
        elif isinstance(self.starting_offsets, StartingOffsets):
            # Of these each scan keeps what it found.
            return self.starting_offsets.value
        elif place.job_dir is None:
            known = self._asked_offsets()
        else:
            job_dir, name = JobDir(place.job_dir.open()), self.fact("start")
            if job_dir.known_uuid() is None:
                # A plan that is only looked at, before the first start.
                return StartingOffsets.EARLIEST.value
            recorded = job_dir.recorded(name)
            if recorded is None:
                recorded = job_dir.recorded_once(name, {"offsets": self._asked_offsets()})
            known = recorded["offsets"]
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            places = self.places(admin)
        # Partitions and topics that are not in what is known were added since, and are read whole.
        return json.dumps(to_json({(t, p): known.get(t, {}).get(str(p), _EARLIEST) for t, p in places}))

    def _asked_offsets(self) -> dict[str, dict[str, int]]:
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            return to_json(self.starting_offsets.offsets(admin, self.places(admin)))

    def fact(self, what: str) -> str:
        """Return the name under which the job keeps `what` of this source."""
        # No two sources of a job read one topic. No topic has a blank in its name.
        read = self.topics or (f"pattern {self.pattern}",)
        return f"kafka-{what}-{hashlib.sha256(repr(read).encode()).hexdigest()[:16]}"

    # Where it ends:
    @property
    def is_bounded(self) -> bool:
        return self.ending is not None

    def has_ended(self, position: LoggedOffsets) -> bool:
        ends, read = self._ends, self.offsets_in(position)
        return ends is not None and all(read.get(place, -1) >= end for place, end in ends.items())

    def channels_in(self, position: LoggedOffsets) -> frozenset[int]:
        """Return the partitions that are not at their end: the others bring nothing any more."""
        ends, read = self._ends, self.offsets_in(position)
        return self.channels_of(p for p, at in read.items() if ends is None or at < ends.get(p, 0))

    def channels_of(self, places: Iterable[Place]) -> frozenset[int]:
        """Return the numbers that the records of partitions have in ``_fs_channel``."""
        return frozenset(channel_of(self.wanted.topics, *place) for place in places)

    def extent(self, position: LoggedOffsets | None) -> Extent | None:
        """Return the sum of the offsets of a position; where topics began, brokers would have to be asked."""
        read = {} if position is None else self.offsets_in(position)
        return Extent(sum(read.values())) if read else None

    def check_end(self, admin: KafkaAdmin) -> None:
        places = self.places(admin)
        if self.ending is not None:
            self.ending.offsets(admin, places)

    def fix_end(self, admin: KafkaAdmin, job_dir: JobDir) -> None:
        """Record the end at the first start; called before each start of the query."""
        if self.ending is None or self._ends is not None:
            return
        wanted, name = self.ending.to_json(), self.fact("end")
        recorded = job_dir.recorded(name)
        if recorded is None:
            offsets = to_json(self.ending.offsets(admin, self.places(admin)))
            recorded = job_dir.recorded_once(name, {"ending": wanted, "offsets": offsets})
        if recorded["ending"] != wanted:
            read = ", ".join(self.topics) or self.pattern
            raise JobDirError(
                f"the source of {read} has the end {recorded['ending']}, not {wanted}",
                why="the end is fixed at the first start",
                what_to_do="give that end again, or start a new job with a new job_dir",
            )
        self.__dict__["_ends"] = from_json(recorded["offsets"])

    def ends_in(self, place: JobPlace) -> Mapping[Place, int] | None:
        """Return the ends as they were recorded; None without any, and before the first start."""
        if self.ending is None or self._ends is not None or place.job_dir is None:
            return self._ends
        recorded = JobDir(place.job_dir.open()).recorded(self.fact("end"))
        return None if recorded is None else from_json(recorded["offsets"])

    def before_end(self, offsets: Mapping[Place, int]) -> dict[Place, int]:
        """Return offsets, not beyond the ends; topics and partitions that were added later are left out."""
        ends = offsets if self._ends is None else self._ends
        return {place: min(at, ends[place]) for place, at in offsets.items() if place in ends}

    # How it is read:
    def load(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        check_alone(self.aligned_with, place)
        return self._fields(self._records(spark, place, {}), place, (C.CHANNEL, C.SEQUENCE))

    def load_marked(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        """Return the stream whose partitions each end with a barrier."""
        upstream = reader_options(self.aligned_with, self._start)
        records = self._records(spark, place, {names.CONTROL_PATH: place.control_path, **upstream})
        return self._fields(records, place, (C.KIND, C.CHECKPOINT, C.CHANNEL, C.SEQUENCE))

    def _fields(self, raw: DataFrame, place: JobPlace, kept: Sequence[str]) -> DataFrame:
        if self.decoding is None:
            return C.mark_records(raw)
        # Two scans that begin at different places count apart what they drop.
        # A name of Spark's, in which a pattern might be anything.
        read = ("topics", *self.topics) if self.topics else ("pattern", self.fact("pattern"))
        counted_as = ("" if self._start is None else self._start.label, *read)
        rows_of = self.decoding.deserializer(self._uid, place, self.topics)
        return rows_of.rows(raw, counted_as, (*names_of(self.metadata), *kept))

    def with_headers(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        return self._records(spark, place, {"includeHeaders": "true"}, HEADERS)

    def _records(
        self, spark: SparkSession, place: JobPlace, more: Mapping[str, str], *columns: str
    ) -> DataFrame:
        """Return records as Kafka has them: Spark gets ranges, which a task reads."""
        given = {**self._options(place), **more, names.PIECES: "true"}
        register(spark)
        pieces = spark.readStream.format(FORMAT_NAME).options(**given).load()
        topics, metadata = self.wanted.topics, tuple(self.metadata)
        read = ReadRanges(names.parse_stream(given), topics, self.ends_in(place), metadata, columns)
        return C.map_in_arrow(pieces, read, read.columns)

    def _options(self, place: JobPlace) -> dict[str, str]:
        held = {names.HELD_PATH: place.control_path, names.HELD_SOURCE: self._uid} if self._uid else {}
        most = self.max_offsets_per_second
        pace = {} if isinstance(most, Unlimited) else {names.PER_SECOND: repr(float(most))}
        limit = {"maxOffsetsPerTrigger": str(self.max_offsets_per_trigger)}
        return {
            **self.connection.for_spark(),
            names.FIRST_OFFSETS: place.beginnings(self._start),
            **held,
            **pace,
            **SKIP,
            **options_for(self.metadata),
            **(self.reader_options or {}),
            **subscription(self.wanted),
            "startingOffsets": self.starting_option(place),
            "failOnDataLoss": "true",
            "kafka.isolation.level": "read_committed",
            **(limit if self.max_offsets_per_trigger else {}),
        }

    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        super().preflight(spark, job_dir, uid)
        check_policies(self.aligned_with, self.connection, self.topics)

    def check_start(self, uid: str, position: Position) -> None:
        logged = LoggedOffsets((offsets_in(position),))
        topics = self.topics_at(logged)
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            raise_if_it_stays(lambda: missing_input(admin, topics, uid, logged))

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Compare topics and offsets with what the job still has to read; fix the end."""
        self.fix_end(self._admin, job_dir)
        self.check_position(job_dir, uid, position)

    def check_identity(self, job_dir: JobDir, uid: str) -> None:
        """Compare the topics' ids: Spark does not notice a topic that was created again."""
        admin, topics = self._watch_admin, self.topics_now()
        raise_if_it_stays(lambda: replaced_topic(admin, topics, job_dir, uid, None))

    def check_alignable(self, uid: str) -> None:
        if self.aligned_with is not None:
            raise GraphError(
                f"the source '{uid}' follows an upstream job, and has with_watermark_alignment()",
                why="a partition that is held back would never come to the barrier for which the others wait",
                what_to_do="leave out with_watermark_alignment() or aligned_with",
                uid=uid,
            )

    def group_offsets(self, position: LoggedOffsets) -> GroupOffsets | None:
        places = self._committed(position)
        servers = self.connection.servers
        return GroupOffsets(servers, self.group_id, places) if self.group_id and places else None

    def commit_offsets(
        self, position: LoggedOffsets, note: str = ""
    ) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """Commit the group's offsets, forward only."""
        places = self._committed(position)
        return {self.group_id: to_json(places)} if self.store_offsets(places, note) else {}

    def lower_offsets(self, position: LoggedOffsets) -> None:
        """Set the group's offsets to `position`, also downwards: somebody ordered a rewind."""
        self.store_offsets(self._committed(position), direction=OffsetDirection.REWIND)

    def _committed(self, position: LoggedOffsets) -> dict[Place, int]:
        return self.before_end(self.offsets_in(position))
