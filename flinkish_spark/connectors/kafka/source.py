"""The Kafka source: read in Python, read_committed, with honest group offsets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

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
from flinkish_spark.connectors.kafka.client.client import WIRES
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
    PIECES,
    parse_stream,
)
from flinkish_spark.connectors.kafka.metadata import checked_metadata, names_of, options_for
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
    group_marks,
    store_offsets,
)
from flinkish_spark.connectors.kafka.ranges import ReadRanges
from flinkish_spark.connectors.kafka.records import Decoding, decoding_of
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.sink import GroupOffsets
from flinkish_spark.contracts.source import JobPlace, SideOutput, SourceStart
from flinkish_spark.core.changelogs import Changes
from flinkish_spark.core.errors import (
    ConfigError,
    GraphError,
)
from flinkish_spark.core.formats import Format, OnTombstone, Raw, check_format
from flinkish_spark.core.upstream_cut import UPSTREAM_KEY
from flinkish_spark.core.validation import instance_of, refused_as_config_errors, values_by_name
from flinkish_spark.protocol.choices import closest
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.input_gate import AlignmentMode
from flinkish_spark.protocol.limits import UNLIMITED, Unlimited, checked_whole
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.channels import check_told_apart

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flinkish_spark.connectors.kafka.chaining.upstream import UpstreamJob
    from flinkish_spark.contracts.sink import Sink
    from flinkish_spark.core.job_dir import JobDir
    from flinkish_spark.core.offset_log import LoggedOffsets


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


def check_reader(reader: object) -> None:
    """Refuse another reader than the one that there is."""
    if reader not in (None, "python"):
        raise ConfigError(
            f"reader is {reader!r}",
            why="this package reads Kafka in Python, and in no other way",
            what_to_do="leave it out",
        )


def subscription(
    topics: Sequence[str], partitions: Mapping[str, Sequence[int]], pattern: str = ""
) -> dict[str, str]:
    if pattern:
        return {"subscribePattern": pattern}
    if not partitions:
        return {"subscribe": ",".join(topics)}
    return {"assign": json.dumps({topic: list(numbers) for topic, numbers in partitions.items()})}


def checked_pace(most: float | Unlimited, aligned_with: UpstreamJob | None) -> float | Unlimited:
    """Return what a user gave as `max_offsets_per_second`, or raise ConfigError."""
    if most is UNLIMITED:
        return most
    if aligned_with is not None:
        raise ConfigError(
            "max_offsets_per_second and aligned_with are set for one source",
            why="a micro-batch ends where the upstream job's checkpoint does",
            what_to_do="set max_offsets_per_trigger, or leave one of them out",
        )
    return RateLimit(records_per_second=most).records_per_second


#: Barrier records are no records of the stream, also of a job that does not follow them.
SKIP = {names.BARRIER_RECORDS: "skip"}


def check_upstream(upstream: UpstreamJob | None, has_side_outputs: bool, reads_some: bool) -> None:
    """Refuse settings of a source that cannot be aligned; called when the source is made."""
    if upstream is None:
        return
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
    topics: tuple[str, ...]
    group_id: str = ""
    value: Format | Changes = field(default_factory=Raw)
    starting_offsets: StartingOffsets | KafkaStart = StartingOffsets.EARLIEST
    max_offsets_per_trigger: int = 0
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    reader_options: Mapping[str, str] = field(default_factory=dict, repr=False)
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
        reader: str | None = None,
        aligned_with: UpstreamJob | None = None,
        metadata: Sequence[str] = (),
        ending: KafkaEnd | None = None,
        partitions: Mapping[str, Sequence[int]] | None = None,
        max_offsets_per_second: float | Unlimited = UNLIMITED,
        key: Format | None = None,
        key_fields_prefix: str = "",
        tombstones: OnTombstone | None = None,
    ) -> None:
        check_reader(reader)
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
            ("aligned_with", aligned_with),
            ("metadata", checked_metadata(metadata)),
            ("ending", checked_end(ending, aligned_with)),
            ("partitions", read.partitions),
            ("pattern", read.pattern),
            ("max_offsets_per_second", checked_pace(max_offsets_per_second, aligned_with)),
            ("key", key),
            ("key_fields_prefix", key_fields_prefix),
            ("tombstones", tombstones),
            ("_start", None),
        ):
            object.__setattr__(self, name, content)
        _ = self.connection  # Raises if servers or options cannot be used.
        check_reader_options(self.reader_options)
        if not isinstance(value, Changes):
            check_format("value", value)
        _ = self._decoding  # Raises if its parts contradict each other.
        check_upstream(self.aligned_with, self.has_side_outputs, bool(self.partitions or self.pattern))

    @cached_property
    def connection(self) -> KafkaConnection:
        return KafkaConnection(self.bootstrap_servers, self.options)

    def datasets(self) -> tuple[Dataset, ...]:
        """Return its topics; those of a pattern are not known before they are read."""
        return Dataset.of_topics(self.connection.servers, self.topics)

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
        """Tell apart how channels are numbered."""
        return "pattern" if self.pattern else ""

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
        return self._fields(self._records(spark, place, {}), place, (C.CHANNEL, C.SEQUENCE))

    def load_marked(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        """Return the stream whose partitions each end with a barrier."""
        upstream = reader_options(self.aligned_with, self._start)
        records = self._records(spark, place, {CONTROL_PATH: place.control_path, **upstream})
        return self._fields(records, place, (C.KIND, C.CHECKPOINT, C.CHANNEL, C.SEQUENCE))

    def _fields(self, raw: DataFrame, place: JobPlace, kept: Sequence[str]) -> DataFrame:
        if self._decoding is None:
            return C.as_records(raw)
        # Two scans that begin at different places count apart what they drop.
        # A name of Spark's, in which a pattern might be anything.
        read = ("topics", *self.topics) if self.topics else ("pattern", self.fact("pattern"))
        counted_as = ("" if self._start is None else self._start.label, *read)
        rows_of = self._decoding.deserializer(self._uid, place, self.topics)
        return rows_of.rows(raw, counted_as, (*names_of(self.metadata), *kept))

    def side_uids(self, uid: str) -> tuple[str, ...]:
        return (letters_uid(uid),) if self.has_side_outputs else ()

    def side_outputs(
        self, spark: SparkSession, uid: str, place: JobPlace, peers: Sequence[Sink]
    ) -> tuple[SideOutput, ...]:
        """Return the dead-letter stream: a second scan that keeps the unreadable records only."""
        if self._decoding is None or not self.has_side_outputs:
            return ()
        raw = self._records(spark, place, {"includeHeaders": "true"}, HEADERS)
        bad = self._decoding.deserializer(uid, place, self.topics).bad(raw)
        return (letters_of(bad, self._decoding.policy, uid, self.connection, peers),)

    def _records(
        self, spark: SparkSession, place: JobPlace, more: Mapping[str, str], *columns: str
    ) -> DataFrame:
        """Return records as Kafka has them: Spark gets ranges, which a task reads."""
        given = {**self._options(place), **more, PIECES: "true"}
        register(spark)
        pieces = spark.readStream.format(FORMAT_NAME).options(**given).load()
        read = ReadRanges(parse_stream(given), self.topics, self.ends_in(place), self.metadata, columns)
        return C.map_in_arrow(pieces, read, read.columns)

    def _options(self, place: JobPlace) -> dict[str, str]:
        held = {HELD_PATH: place.control_path, HELD_SOURCE: self._uid} if self._uid else {}
        most = self.max_offsets_per_second
        pace = {} if isinstance(most, Unlimited) else {PER_SECOND: repr(float(most))}
        limit = {"maxOffsetsPerTrigger": str(self.max_offsets_per_trigger)}
        return {
            **self.connection.for_spark(),
            FIRST_OFFSETS: place.beginnings(self._start),
            **held,
            **pace,
            **SKIP,
            **options_for(self.metadata),
            **self.reader_options,
            **subscription(self.topics, self.partitions, self.pattern),
            "startingOffsets": self.starting_option(place),
            "failOnDataLoss": "true",
            "kafka.isolation.level": "read_committed",
            **(limit if self.max_offsets_per_trigger else {}),
        }

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
