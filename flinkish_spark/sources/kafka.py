"""The Kafka source: Spark's native one, read_committed, with group offsets that tell the truth."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.errors import (
    BrokerUnavailableError,
    ConfigError,
    EnvironmentFault,
    GraphError,
    InputLostError,
    SchemaError,
)
from flinkish_spark.formats import DeadLetter, Json, OnBadRecord, Raw
from flinkish_spark.kafka import GroupCommit, KafkaAdmin, KafkaConnection
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.ddl import DdlError, parse_ddl
from flinkish_spark.sources.base import SideOutput, Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flinkish_spark.job_dir import JobDir
    from flinkish_spark.runtime.spark_log import LoggedOffsets

#: Opens the message of an error about a record that cannot be read or written.
BAD_RECORD_MARKER = "[FLINKISH_BAD_RECORD]"
_CORRUPT = "_fs_corrupt"
#: Name of the observed metric that counts dropped records; the source's uid follows.
DROPPED_METRIC = "flinkish_dropped_"


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
            _json_schema(value)

    @cached_property
    def connection(self) -> KafkaConnection:
        """How the brokers are reached."""
        return KafkaConnection(self.bootstrap_servers, self.options)

    @cached_property
    def _admin(self) -> KafkaAdmin:
        return KafkaAdmin(self.connection)

    # -- planning -------------------------------------------------------------------------------
    def load(self, spark: SparkSession) -> DataFrame:
        """Return the stream with fields, channel and offset."""
        return self._decoded(self._raw(spark))

    def side_outputs(self, spark: SparkSession, uid: str) -> tuple[SideOutput, ...]:
        """Return the dead-letter stream: a second scan that keeps the unreadable records only."""
        from flinkish_spark.sinks.kafka import KafkaSink

        if not isinstance(self.value, Json) or not isinstance(self.value.on_bad_record, DeadLetter):
            return ()
        raw = self._raw(spark)
        bad = raw.where(_is_bad(_parsed(self.value))).select("key", "value", C.CHANNEL, C.SEQUENCE)
        sink = KafkaSink(
            self.bootstrap_servers,
            self.value.on_bad_record.topic,
            key="key",
            value=Raw("value"),
            options=self.options,
        )
        return (SideOutput(f"{uid}-dead-letter", bad, sink),)

    def _raw(self, spark: SparkSession) -> DataFrame:
        reader = spark.readStream.format("kafka").options(**self.connection.for_spark())
        reader = reader.options(**dict(self.reader_options))
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

    def _decoded(self, raw: DataFrame) -> DataFrame:
        if isinstance(self.value, Raw):
            return raw
        policy = self.value.on_bad_record
        if policy is OnBadRecord.FAIL:
            # FAILFAST raises wherever a field is used; a second look for the check would parse
            # every record twice. A null value parses to null, so it is refused by itself.
            place = F.to_json(F.struct("topic", "partition", "offset"))
            refuse = F.raise_error(F.concat(F.lit(BAD_RECORD_MARKER + " a null value at "), place))
            checked = F.when(F.col("value").isNull(), refuse.cast("boolean")).otherwise(F.lit(True))
            parsed = F.from_json(
                F.col("value").cast("string"), _json_schema(self.value), {"mode": "FAILFAST"}
            )
            return (
                raw.where(checked)
                .select(parsed.alias("e"), C.CHANNEL, C.SEQUENCE)
                .select("e.*", C.CHANNEL, C.SEQUENCE)
            )
        parsed = _parsed(self.value)
        counted = raw.withColumn("e", parsed)
        is_bad = _is_bad(F.col("e"))
        if policy is OnBadRecord.DROP:
            name = DROPPED_METRIC + self.topics[0]
            counted = counted.observe(name, F.count(F.when(is_bad, 1)).alias("dropped"))
        names = [F.col(f"e.`{n}`") for n in _json_schema(self.value).names]
        return counted.where(~is_bad).select(*names, C.CHANNEL, C.SEQUENCE)

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
        found = self._admin.topics(wanted)
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
        topics = self._admin.topics(self.topics)
        now = {t: topics[t].topic_id or "" for t in self.topics if t in topics}
        before = job_dir.recorded_once(f"topics-{uid}", {"topic_ids": now})["topic_ids"]
        for topic in self.topics:
            if topic not in now:
                raise InputLostError(
                    f"the input topic '{topic}' was deleted",
                    why="the job has not read all of it, or cannot know that it has",
                    what_to_do="restore the topic, or start a new job with a new job_dir",
                    topic=topic,
                )
            if before.get(topic, now[topic]) != now[topic]:
                raise InputLostError(
                    f"the input topic '{topic}' was deleted and created again",
                    why="its id changed, so the offsets of the checkpoint mean other records"
                    + self._missing(position),
                    what_to_do="start a new job with a new job_dir, or restore the old topic",
                    topic=topic,
                )
        lost = self._missing(position)
        if lost:
            raise InputLostError(
                f"input of source '{uid}' is gone" + lost,
                why="Kafka's retention removed records that the job had not read",
                what_to_do="raise retention.ms; start a new job_dir to go on without these records",
                uid=uid,
            )

    def _missing(self, position: LoggedOffsets | None) -> str:
        """Return the offsets that the job needs and Kafka no longer has, as text."""
        if position is None:
            return ""
        wanted = {
            (t, p): o for t, ps in position.kafka(frozenset(self.topics)).items() for p, o in ps.items()
        }
        try:
            first, last = self._admin.beginning_offsets(wanted), self._admin.end_offsets(wanted)
        except InputLostError as error:
            return f": {error.what}"
        gone = [f"{t}-{p} from {o} to {first[t, p] - 1}" for (t, p), o in wanted.items() if o < first[t, p]]
        gone += [
            f"{t}-{p} ends at {last[t, p]}, the job was at {o}"
            for (t, p), o in wanted.items()
            if o > last[t, p]
        ]
        return ": missing are the offsets " + "; ".join(sorted(gone)) if gone else ""

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


def _json_schema(value: Json) -> T.StructType:
    try:
        schema = parse_ddl(value.schema)
    except DdlError as error:
        raise SchemaError("the JSON schema cannot be read", why=str(error)) from None
    if not isinstance(schema, T.StructType):
        raise SchemaError(
            f"the JSON schema {value.schema!r} is not a list of fields",
            what_to_do='write it like Json("user STRING, amount LONG")',
        )
    return schema


def _parsed(value: Json) -> Column:
    schema = T.StructType([*_json_schema(value), T.StructField(_CORRUPT, T.StringType())])
    settings = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    return F.from_json(F.col("value").cast("string"), schema, settings)


def _is_bad(parsed: Column) -> Column:
    return F.col("value").isNull() | parsed.isNull() | parsed[_CORRUPT].isNotNull()


#: Raised by the admin client when no broker answers; re-exported for the supervisor.
__all__ = [
    "BAD_RECORD_MARKER",
    "DROPPED_METRIC",
    "BrokerUnavailableError",
    "GroupIsActive",
    "KafkaSource",
    "StartingOffsets",
]
