"""Kafka as a source of splits: what can stand behind history in a hybrid source.

A split is a partition, its offset Kafka's. Records are read by this package's reader of ranges, without a
JAR, and come as they are: decoding is left to a transform, the same for history and for what is live.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T

from flinkish_spark.arguments import instance_of, refused_as_config_errors
from flinkish_spark.clock import SystemClock
from flinkish_spark.errors import ConfigError, InputLostError
from flinkish_spark.graph.declared import output_schema
from flinkish_spark.kafka import PREFLIGHT_TIMEOUT_MS, GroupCommit, Isolation, KafkaAdmin, KafkaConnection
from flinkish_spark.kafka._pace import seen_to_stay
from flinkish_spark.kafka.admin import unknown_topic
from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.positions import Positions
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.runtime.spark_log import LoggedOffsets
from flinkish_spark.sources.kafka_checks import InputChecks, raise_if_it_stays
from flinkish_spark.sources.kafka_retention import check_topic_retention
from flinkish_spark.sources.rates import RateLimit
from flinkish_spark.sources.split_positions import Offset, SplitPosition, logged_positions
from flinkish_spark.sources.splits import SplitSource

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from flinkish_spark.job_dir import JobDir
    from flinkish_spark.protocol.scans import Position

_CLOCK = SystemClock()
_COMMITTED = Isolation.READ_COMMITTED
#: How often the brokers are asked which partitions there are.
_TOPICS_EVERY_S = 5.0
#: Fields that a record can have, with the types of each.
_FIELDS: Mapping[str, tuple[T.DataType, ...]] = {
    "key": (T.BinaryType(), T.StringType()),
    "value": (T.BinaryType(), T.StringType()),
    "topic": (T.StringType(),),
    "partition": (T.IntegerType(), T.LongType()),
    "offset": (T.LongType(),),
    "timestamp": (T.TimestampType(),),
}


class KafkaRecordsSource(SplitSource):
    """Reads Kafka topics as one part of a :class:`~flinkish_spark.sources.hybrid.HybridSource`.

    Alone, take a :class:`~flinkish_spark.sources.kafka.KafkaSource`: it decodes, and reads through the JVM.

    Parameters
    ----------
    bootstrap_servers, topics, group_id, options
        As for a KafkaSource.
    schema
        Any of the fields key and value (BINARY, or STRING if all are UTF-8), topic, partition, offset and
        timestamp.
    starting_at_ms
        Begins each partition at its first record that is at least as late, in milliseconds since 1970; where
        there is none yet, with what comes. 0 for everything that is there.
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

    def __init__(
        self,
        bootstrap_servers: str,
        topics: Sequence[str],
        *,
        schema: str | T.StructType = "value STRING",
        starting_at_ms: int = 0,
        group_id: str = "",
        options: Mapping[str, str] | None = None,
        rate: RateLimit | None = None,
    ) -> None:
        if isinstance(topics, str) or not topics or not all(isinstance(t, str) and t for t in topics):
            raise ConfigError(f"topics is {topics!r}", what_to_do='give a list of names: ["orders"]')
        with refused_as_config_errors("give milliseconds since 1970"):
            checked_whole("starting_at_ms", starting_at_ms, least=0, most=(1 << 63) - 1)
        self.connection = KafkaConnection(bootstrap_servers, dict(options or {}))
        # Not `topics`: by these the planner would take channels for partitions.
        self._topics = tuple(dict.fromkeys(topics))
        self.schema: T.StructType = output_schema(schema, "a source of Kafka records")
        for field in self.schema:
            if field.dataType not in _FIELDS.get(field.name, ()):
                raise ConfigError(
                    f"a Kafka record has no field '{field.name}' of type {field.dataType.simpleString()}",
                    what_to_do=f"choose among {', '.join(_FIELDS)}; key and value as BINARY or STRING",
                )
        self.group_id = instance_of("group_id", group_id, str, what_to_do="give a name, or leave it out")
        self.rate = RateLimit() if rate is None else rate
        self._from_ms = starting_at_ms
        self._partitions: list[str] = []
        self._looked_at = float("-inf")

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in ("_positions", "_admin")}
        return {**kept, "_partitions": [], "_looked_at": float("-inf")}

    @cached_property
    def _positions(self) -> Positions:
        return Positions(self.connection)

    @cached_property
    def _admin(self) -> KafkaAdmin:
        return KafkaAdmin(self.connection)

    # -- between micro-batches ------------------------------------------------------------------
    def splits(self) -> Sequence[str]:
        """Return the partitions."""
        if time.monotonic() - self._looked_at >= _TOPICS_EVERY_S:
            found = seen_to_stay(
                lambda: self._positions.topics(self._topics), lambda one: len(one) < len(self._topics), _CLOCK
            )
            missing = [topic for topic in self._topics if topic not in found]
            if missing:
                raise InputLostError(
                    f"the input topic '{missing[0]}' was deleted",
                    why="the job has not read all of it, or cannot know that it has",
                    what_to_do="restore the topic, or start a new job with a new job_dir",
                )
            self._partitions = [_split(place) for place in Positions.places(found)]
            self._looked_at = time.monotonic()
        return self._partitions

    def first(self, split: str) -> int:
        """Return where a partition begins to be read."""
        place = _place(split)
        if not self._from_ms:
            return self._positions.earliest([place])[place]
        at = self._positions.at_timestamps({place: self._from_ms}, _COMMITTED)[place]
        return self._positions.latest([place], _COMMITTED)[place] if at is None else at

    def latest(self, split: str, start: int, limit: int | None) -> int:
        """Return the end of a partition for readers of committed records."""
        place = _place(split)
        # A broker that has just started may not know its end yet.
        end = seen_to_stay(
            lambda: self._positions.latest([place], _COMMITTED)[place], lambda at: at < start, _CLOCK
        )
        return end if limit is None else min(end, start + limit)

    def close(self) -> None:
        """Close the connection."""
        if "_positions" in self.__dict__:
            self.__dict__.pop("_positions").close()

    # -- in a task ------------------------------------------------------------------------------
    def read(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the committed records of a range."""
        from flinkish_spark.kafka.range_reader import OffsetRange, RangeReader
        from flinkish_spark.kafka.reader_settings import ReaderSettings

        topic, partition = _place(split)
        reader = RangeReader(self.connection, ReaderSettings())
        for batch in reader.read(OffsetRange(topic, partition, start, end)):
            yield batch.select(self.schema.names)

    # -- on the driver --------------------------------------------------------------------------
    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        """Refuse brokers that do not answer, and topics that do not exist."""
        super().preflight(spark, job_dir, uid)
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            found = admin.topics(self._topics)
        missing = [topic for topic in self._topics if topic not in found]
        if missing:
            raise unknown_topic(missing[0], self.connection.servers, of=f"source '{uid}'")

    def check_retention(self, uid: str, needed_ms: int) -> None:
        """Refuse topics that give up records before a replay would have read them again."""
        check_topic_retention(self.connection, self._topics, uid, needed_ms)

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Compare topics and offsets with what the job still has to read."""
        scans = [] if position is None else logged_positions(position, uid)
        logged = LoggedOffsets(tuple(_by_topic(scan.offsets) for scan in scans)) if scans else None
        checks = InputChecks(self._admin, self._topics)
        raise_if_it_stays(lambda: checks.replaced(job_dir, uid, logged) or checks.gone(uid, logged))

    def check_start(self, uid: str, position: Position) -> None:
        """Compare a savepoint's offsets with what the topics still hold."""
        logged = LoggedOffsets((_by_topic(SplitPosition.from_json(position).offsets),))
        checks = InputChecks(self._admin, self._topics)
        raise_if_it_stays(lambda: checks.gone(uid, logged))

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Any]:
        """Return the ids of the topics as the job recorded them at its first start."""
        facts = {name: job_dir.recorded(name) for name in (f"topic-{uid}-{topic}" for topic in self._topics)}
        return {name: fact for name, fact in facts.items() if fact is not None}

    def committed(self, offsets: Mapping[str, Offset]) -> None:
        """Commit the group's offsets, forward only."""
        if not self.group_id:
            return
        flat = {_place(split): int(offset) for split, offset in offsets.items()}
        if self._admin.commit_offsets(self.group_id, flat) is GroupCommit.ACTIVE_MEMBERS:
            from flinkish_spark.sources.kafka import GroupIsActive

            raise GroupIsActive(
                f"the consumer group '{self.group_id}' has active members",
                why="Kafka then takes offsets from those members only",
                what_to_do="stop the consumers, or give the job a group of its own",
                group=self.group_id,
            )


def _split(place: Place) -> str:
    return f"{place[0]}:{place[1]}"


def _place(split: str) -> Place:
    topic, _, partition = split.rpartition(":")
    return topic, int(partition)


def _by_topic(offsets: Mapping[str, Offset]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for split, offset in offsets.items():
        topic, partition = _place(split)
        found.setdefault(topic, {})[str(partition)] = int(offset)
    return found
