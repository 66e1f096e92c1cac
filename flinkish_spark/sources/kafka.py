"""The Kafka source: Spark's native one, read_committed, with group offsets that tell the truth."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from flinkish_spark.clock import SystemClock
from flinkish_spark.errors import (
    BrokerUnavailableError,
    ConfigError,
    EnvironmentFault,
    GraphError,
    InputLostError,
)
from flinkish_spark.formats import DeadLetter, Json, OnBadRecord, Raw
from flinkish_spark.kafka import PREFLIGHT_TIMEOUT_MS, GroupCommit, KafkaAdmin, KafkaConnection
from flinkish_spark.runtime import columns as C
from flinkish_spark.sources.base import SideOutput, Source
from flinkish_spark.sources.json_records import (
    BAD_RECORD_MARKER,
    DROPPED_METRIC,
    bad_records,
    decoded,
    json_schema,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flinkish_spark.job_dir import JobDir
    from flinkish_spark.runtime.spark_log import LoggedOffsets

_CLOCK = SystemClock()
#: A broker that just started may not know its topics or the end of its logs yet: so many answers
#: in a row, so far apart, are believed.
_LOSSES_BELIEVED, _LOSS_PAUSE_MS = 4, 500


class StartingOffsets(enum.Enum):
    """Where a job that has no checkpoint yet begins to read."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, init=False)
class KafkaSource(Source):
    """Read Kafka topics.

    Parameters
    ----------
    bootstrap_servers
        ``"host:port,host:port"``.
    topics
        Topics that exist; partitions may be added while the job runs.
    group_id
        Consumer group whose offsets are committed after every sink, so that lag tools see what is
        really done. No consumer of the group may be active. Empty: no offsets are committed.
    value
        ``Json("field TYPE, ...")`` or ``Raw()``.
    starting_offsets
        Where the first start of the job begins; later starts go on from the checkpoint.
    max_offsets_per_trigger
        Most records per micro-batch; 0 for no limit.
    options
        Connection and security options under Kafka's or Spark's names.
    reader_options
        Further options of Spark's Kafka source, such as ``{"minPartitions": "8"}``.

    Notes
    -----
    Reads committed records only, fails on lost data, and neither can be switched off: without
    them exactly-once is not true.
    """

    bootstrap_servers: str
    topics: tuple[str, ...]
    group_id: str = ""
    value: Json | Raw = field(default_factory=Raw)
    starting_offsets: StartingOffsets = StartingOffsets.EARLIEST
    max_offsets_per_trigger: int = 0
    options: Mapping[str, str] = field(default_factory=dict)
    reader_options: Mapping[str, str] = field(default_factory=dict)

    def __init__(
        self,
        bootstrap_servers: str,
        topics: Sequence[str],
        *,
        group_id: str = "",
        value: Json | Raw = Raw(),  # noqa: B008 - a frozen value
        starting_offsets: StartingOffsets = StartingOffsets.EARLIEST,
        max_offsets_per_trigger: int = 0,
        options: Mapping[str, str] | None = None,
        reader_options: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(topics, str) or not topics or not all(isinstance(t, str) and t for t in topics):
            raise ConfigError(
                f"topics is {topics!r}", what_to_do='give a list of topic names: topics=["orders"]'
            )
        if max_offsets_per_trigger < 0:
            raise ConfigError(f"max_offsets_per_trigger is {max_offsets_per_trigger}")
        for name, content in (
            ("bootstrap_servers", bootstrap_servers),
            ("topics", tuple(dict.fromkeys(topics))),
            ("group_id", group_id),
            ("value", value),
            ("starting_offsets", StartingOffsets(starting_offsets)),
            ("max_offsets_per_trigger", max_offsets_per_trigger),
            ("options", dict(options or {})),
            ("reader_options", dict(reader_options or {})),
        ):
            object.__setattr__(self, name, content)
        for name in self.reader_options:
            if name.lower() in _RESERVED:
                raise ConfigError(
                    f"the reader option '{name}' cannot be set",
                    why="the source sets it itself, and exactly-once depends on it",
                    what_to_do="leave it out",
                )
        if isinstance(value, Json):
            json_schema(value)

    @cached_property
    def connection(self) -> KafkaConnection:
        """How the brokers are reached."""
        return KafkaConnection(self.bootstrap_servers, self.options)

    @property
    def drops_records(self) -> bool:
        """Whether the policy for bad records is to drop them."""
        return isinstance(self.value, Json) and self.value.on_bad_record is OnBadRecord.DROP

    @cached_property
    def _admin(self) -> KafkaAdmin:
        return KafkaAdmin(self.connection)

    @cached_property
    def _watch_admin(self) -> KafkaAdmin:
        # Another thread's: an admin belongs to one.
        return KafkaAdmin(self.connection)

    # -- planning -------------------------------------------------------------------------------
    def load(self, spark: SparkSession) -> DataFrame:
        """Return the stream with fields, channel and offset."""
        raw = self._raw(spark)
        if isinstance(self.value, Raw):
            return raw
        return decoded(raw, self.value, self.topics, (C.CHANNEL, C.SEQUENCE))

    def side_outputs(self, spark: SparkSession, uid: str) -> tuple[SideOutput, ...]:
        """Return the dead-letter stream: a second scan that keeps the unreadable records only."""
        from flinkish_spark.sinks.kafka import KafkaSink

        if not isinstance(self.value, Json) or not isinstance(self.value.on_bad_record, DeadLetter):
            return ()
        raw = self._raw(spark)
        bad = bad_records(raw, self.value).select("key", "value", C.CHANNEL, C.SEQUENCE)
        sink = KafkaSink(
            self.bootstrap_servers,
            self.value.on_bad_record.topic,
            key="key",
            value=Raw("value"),
            options=self.options,
        )
        return (SideOutput(f"{uid}-dead-letter", bad, sink),)

    def find_bad_record(
        self, spark: SparkSession, start: LoggedOffsets | None, end: LoggedOffsets
    ) -> tuple[str, int, int] | None:
        """Read one micro-batch's range again, without Spark's fail-fast, up to its first bad record."""
        ends = end.kafka(frozenset(self.topics))
        if not isinstance(self.value, Json) or not ends:
            return None
        starts = start.kafka(frozenset(self.topics)) if start is not None else {}
        earliest = -2
        wanted = {t: {p: starts.get(t, {}).get(p, earliest) for p in ps} for t, ps in ends.items()}
        reader = spark.read.format("kafka").options(**self.connection.for_spark())
        reader = reader.option("subscribe", ",".join(self.topics)).option("failOnDataLoss", "false")
        reader = reader.option("kafka.isolation.level", "read_committed")
        reader = reader.option("startingOffsets", json.dumps(wanted)).option(
            "endingOffsets", json.dumps(ends)
        )
        found = bad_records(reader.load(), self.value).select("topic", "partition", "offset").first()
        return None if found is None else (found.topic, found.partition, found.offset)

    def _raw(self, spark: SparkSession) -> DataFrame:
        reader = spark.readStream.format("kafka").options(**self.connection.for_spark())
        reader = reader.options(**{**READER_DEFAULTS, **self.reader_options})
        reader = reader.option("subscribe", ",".join(self.topics))
        reader = reader.option("startingOffsets", self.starting_offsets.value)
        reader = reader.option("failOnDataLoss", "true").option("kafka.isolation.level", "read_committed")
        if self.max_offsets_per_trigger:
            reader = reader.option("maxOffsetsPerTrigger", str(self.max_offsets_per_trigger))
        channel = F.col("partition").cast("long")
        if len(self.topics) > 1:
            index = F.array_position(F.array(*[F.lit(t) for t in self.topics]), F.col("topic")) - 1
            channel = F.shiftleft(index, 32) + channel
        return reader.load().select(
            "key",
            "value",
            "topic",
            "partition",
            "offset",
            "timestamp",
            channel.alias(C.CHANNEL),
            F.col("offset").alias(C.SEQUENCE),
        )

    # -- checks ---------------------------------------------------------------------------------
    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        """Refuse brokers that do not answer and topics that do not exist."""
        wanted = list(self.topics)
        if isinstance(self.value, Json) and isinstance(self.value.on_bad_record, DeadLetter):
            if self.value.on_bad_record.topic in self.topics:
                raise GraphError(
                    f"source '{uid}' has its own topic as dead-letter topic",
                    what_to_do="name another topic",
                )
            wanted.append(self.value.on_bad_record.topic)
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            found = admin.topics(wanted)
        missing = [t for t in wanted if t not in found]
        if missing:
            raise GraphError(
                f"the topic '{missing[0]}' of source '{uid}' does not exist",
                why=f"the brokers at {self.connection.servers} do not know it",
                what_to_do="create it, or correct its name",
                topic=missing[0],
            )

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Compare topics and offsets with what the job still has to read."""

        def loss() -> InputLostError | None:
            return self._other(self._admin, job_dir, uid, position) or self._gone(uid, position)

        _raise_if_it_stays(loss)

    def check_identity(self, job_dir: JobDir, uid: str) -> None:
        """Compare the topics' ids: Spark does not notice a topic that was created again."""
        _raise_if_it_stays(lambda: self._other(self._watch_admin, job_dir, uid, None))

    def _other(
        self, admin: KafkaAdmin, job_dir: JobDir, uid: str, position: LoggedOffsets | None
    ) -> InputLostError | None:
        """Return the error of a topic that is gone or another one than at the job's first start."""
        found = admin.topics(self.topics)
        for topic in self.topics:
            if topic not in found:
                return InputLostError(
                    f"the input topic '{topic}' was deleted" + _position_text(position, topic),
                    why="the job has not read all of it, or cannot know that it has",
                    what_to_do="restore the topic, or start a new job with a new job_dir",
                    topic=topic,
                )
        for topic in self.topics:
            now = {"topic_id": found[topic].topic_id or ""}
            if job_dir.recorded_once(f"topic-{uid}-{topic}", now) != now:
                return InputLostError(
                    f"the input topic '{topic}' was deleted and created again"
                    + _position_text(position, topic),
                    why="its id changed, so the offsets of the checkpoint mean other records",
                    what_to_do="start a new job with a new job_dir, or restore the old topic",
                    topic=topic,
                )
        return None

    def _gone(self, uid: str, position: LoggedOffsets | None) -> InputLostError | None:
        gone = self._missing(position)
        if not gone:
            return None
        return InputLostError(
            f"input of source '{uid}' is gone: missing are the offsets {'; '.join(gone)}",
            why="Kafka's retention removed records that the job had not read, or a log was truncated",
            what_to_do="raise retention.ms; start a new job_dir to go on without these records",
            uid=uid,
            missing=gone,
        )

    def _missing(self, position: LoggedOffsets | None) -> tuple[str, ...]:
        """Return the ranges that the job needs and Kafka no longer has, as text."""
        if position is None:
            return ()
        wanted = {
            (t, p): o for t, ps in position.kafka(frozenset(self.topics)).items() for p, o in ps.items()
        }
        try:
            first, last = self._admin.beginning_offsets(wanted), self._admin.end_offsets(wanted)
        except InputLostError as error:
            return (error.why or error.what,)
        gone = [f"{t}-{p} from {o} to {first[t, p] - 1}" for (t, p), o in wanted.items() if o < first[t, p]]
        gone += [
            f"{t}-{p} from {last[t, p]} to {o - 1}, which the job had read"
            for (t, p), o in wanted.items()
            if o > last[t, p]
        ]
        return tuple(sorted(gone))

    # -- after the sinks ------------------------------------------------------------------------
    def commit_offsets(self, position: LoggedOffsets) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """Commit the group's offsets, forward only."""
        if not self.group_id:
            return {}
        offsets = position.kafka(frozenset(self.topics))
        flat = {(t, p): o for t, ps in offsets.items() for p, o in ps.items()}
        try:
            answer = self._admin.commit_offsets(self.group_id, flat)
        except InputLostError:
            answer = GroupCommit.UNCHANGED
        if answer is GroupCommit.ACTIVE_MEMBERS:
            raise GroupIsActive(
                f"the consumer group '{self.group_id}' has active members",
                why="Kafka then takes offsets from those members only",
                what_to_do="stop the consumers, or give the job a group of its own; "
                "the receipt stays open until then",
                group=self.group_id,
            )
        return {self.group_id: {t: {str(p): o for p, o in ps.items()} for t, ps in offsets.items()}}


class GroupIsActive(EnvironmentFault):
    """Consumers are members of the job's group; committing its offsets has to wait."""

    restartable = True


def _raise_if_it_stays(loss: Callable[[], InputLostError | None]) -> None:
    """Raise what `loss` finds if it finds it again and again."""
    for _ in range(_LOSSES_BELIEVED - 1):
        if loss() is None:
            return
        _CLOCK.sleep_ms(_LOSS_PAUSE_MS)
    error = loss()
    if error is not None:
        raise error


def _position_text(position: LoggedOffsets | None, topic: str) -> str:
    """Return from where on the job still needed `topic`."""
    if position is None:
        return ""
    offsets = position.kafka(frozenset({topic})).get(topic, {})
    places = "; ".join(f"{topic}-{p} from {o} on" for p, o in sorted(offsets.items()))
    return f": missing are the offsets {places}" if places else ""


#: Kafka's consumer is made for long polls. A micro-batch reads a range that is there already, and
#: loses half a second to a fetch that waits for records behind the range; 100,000 records take
#: 0.2 s with these settings and 0.8 s without.
READER_DEFAULTS = {"kafka.fetch.max.wait.ms": "20", "kafka.max.poll.records": "5000"}

_RESERVED = frozenset(
    {
        "subscribe",
        "subscribepattern",
        "assign",
        "startingoffsets",
        "failondataloss",
        "kafka.isolation.level",
        "maxoffsetspertrigger",
        "kafka.bootstrap.servers",
        "kafka.group.id",
        "groupidprefix",
    }
)


__all__ = [
    "BAD_RECORD_MARKER",
    "DROPPED_METRIC",
    "BrokerUnavailableError",
    "GroupIsActive",
    "KafkaSource",
    "StartingOffsets",
]
