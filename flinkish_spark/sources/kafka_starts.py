"""The part of a Kafka source that has to do with savepoints: beginning at offsets that are given."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Self

from flinkish_spark.kafka import PREFLIGHT_TIMEOUT_MS, KafkaAdmin, KafkaConnection
from flinkish_spark.kafka.channels import channel_of
from flinkish_spark.protocol.scans import offsets_in
from flinkish_spark.runtime.spark_log import LoggedOffsets
from flinkish_spark.sources.base import Source, SourceStart
from flinkish_spark.sources.kafka_checks import InputChecks, raise_if_it_stays
from flinkish_spark.sources.kafka_metadata import OWN_TIME

if TYPE_CHECKING:
    from flinkish_spark.job_dir import JobDir
    from flinkish_spark.protocol.scans import Position

#: Spark's number for "the first offset there is".
_EARLIEST = -2


class StartsAtOffsets(Source):
    """A source of Kafka topics that can begin at any offset of any partition."""

    kind = "kafka"
    metadata: tuple[str, ...] = ()
    _start: SourceStart | None
    #: Under which its job knows it.
    _uid: str = ""

    @property
    def connection(self) -> KafkaConnection:
        """Return how the brokers are reached."""
        raise NotImplementedError

    def bound(self, uid: str) -> Self:
        """Return this source under its uid."""
        known = copy(self)
        known.__dict__["_uid"] = uid
        return known

    @property
    def is_positionable(self) -> bool:
        """Whether it can begin anywhere."""
        return True

    def starting_at(self, start: SourceStart) -> Self:
        """Return this source with another beginning."""
        moved = copy(self)
        moved.__dict__["_start"] = start
        # A connection belongs to one thread, and so to one source.
        for name in ("_admin", "_watch_admin"):
            moved.__dict__.pop(name, None)
        return moved

    def with_own_time(self) -> Self:
        """Return this source with the timestamp of Kafka's records."""
        timed = copy(self)
        timed.__dict__["metadata"] = (*self.metadata, OWN_TIME)
        return timed

    def channels_in(self, position: LoggedOffsets) -> frozenset[int]:
        """Return the partitions, by the number that their records have as their channel."""
        return self.channels_of(position.kafka(frozenset(self.topics)))

    def channels_of(self, partitions: Mapping[str, Iterable[int]]) -> frozenset[int]:
        """Return the channels of partitions by topic."""
        return frozenset(
            channel_of(self.topics, topic, partition)
            for topic in self.topics
            for partition in partitions.get(topic, ())
        )

    def starting_at_offsets(self, otherwise: str) -> str:
        """Return the option `startingOffsets`: Spark wants every partition named.

        Partitions and topics that the position does not know were added since, and are read whole.
        """
        if self._start is None:
            return otherwise
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            found = admin.topics(self.topics)
        known = offsets_in(self._start.position)
        wanted = {
            topic: {str(p): known.get(topic, {}).get(str(p), _EARLIEST) for p in range(there.partitions)}
            for topic, there in found.items()
        }
        return json.dumps(wanted)

    def check_start(self, uid: str, position: Position) -> None:
        """Compare a savepoint's offsets with what the topics still hold."""
        logged = LoggedOffsets((offsets_in(position),))
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            checks = InputChecks(admin, self.topics)
            raise_if_it_stays(lambda: checks.gone(uid, logged))

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Mapping[str, str]]:
        """Return the ids of the topics as the job recorded them at its first start, by fact."""
        names = [f"topic-{uid}-{topic}" for topic in self.topics]
        facts = {name: job_dir.recorded(name) for name in names}
        return {name: fact for name, fact in facts.items() if fact is not None}
