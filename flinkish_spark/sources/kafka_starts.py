"""The part of a Kafka source that has to do with its beginning: at a savepoint, or at the first start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Self

from flinkish_spark.job_dir import JobDir
from flinkish_spark.kafka import PREFLIGHT_TIMEOUT_MS, KafkaAdmin, KafkaConnection
from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.channels import channel_of, check_told_apart
from flinkish_spark.kafka.positions import Positions, TopicPattern
from flinkish_spark.protocol.scans import offsets_in
from flinkish_spark.runtime.spark_log import LoggedOffsets
from flinkish_spark.sources.base import Source, SourceStart
from flinkish_spark.sources.kafka_beginnings import KafkaStart, StartingOffsets, start_offsets
from flinkish_spark.sources.kafka_checks import InputChecks, raise_if_it_stays
from flinkish_spark.sources.kafka_metadata import OWN_TIME
from flinkish_spark.sources.kafka_places import NO_CONTROL, Partitions, by_topic, places_in
from flinkish_spark.store import LocalStore

if TYPE_CHECKING:
    from flinkish_spark.protocol.scans import Position

#: Spark's number for "the first offset there is".
_EARLIEST = -2


class StartsAtOffsets(Source):
    """A source of Kafka topics that can begin at any offset of any partition."""

    kind = "kafka"
    metadata: tuple[str, ...] = ()
    #: By topic; empty for all.
    partitions: Partitions = {}  # noqa: RUF012 - never changed
    pattern: str = ""
    starting_offsets: StartingOffsets | KafkaStart
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
    def topic_pattern(self) -> str:  # type: ignore[override]
        """What topics are read by, if not by their names."""
        return self.pattern

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
        return self.channels_of(self.offsets_in(position))

    def offsets_in(self, position: LoggedOffsets) -> dict[str, dict[int, int]]:
        """Return topic -> partition -> next offset of what this source has read."""
        return position.kafka(frozenset(self._of_mine(position.topics())))

    def topics_now(self) -> Sequence[str]:
        """Return the topics that are named; of a pattern, those that there are now.

        May be called in any thread: a connection belongs to one, so each call has its own.

        Raises
        ------
        ConfigError
            Two that match would have one number.
        """
        if not self.pattern:
            return self.topics
        with Positions(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as brokers:
            found = sorted(brokers.matching(TopicPattern(self.pattern)))
        check_told_apart(found)
        return found

    def topics_at(self, position: LoggedOffsets | None) -> Sequence[str]:
        """Return :meth:`topics_now`; of a pattern, also those that were read and may be gone."""
        if not self.pattern or position is None:
            return self.topics_now()
        return sorted({*self.topics_now(), *self._of_mine(position.topics())})

    def _of_mine(self, topics: Iterable[str]) -> list[str]:
        mine: Collection[str] | TopicPattern = TopicPattern(self.pattern) if self.pattern else self.topics
        return [topic for topic in topics if topic in mine]

    def channels_of(self, partitions: Mapping[str, Iterable[int]]) -> frozenset[int]:
        """Return the channels of partitions by topic."""
        return frozenset(
            channel_of(self.topics, topic, partition)
            for topic in self._of_mine(partitions)
            for partition in partitions[topic]
        )

    def places(self, admin: KafkaAdmin) -> list[Place]:
        """Return the partitions that are read now; see :func:`~.kafka_places.places_in`."""
        return places_in(admin, self.topics_now(), self.partitions)

    def starting_option(self, control_path: str) -> str:
        """Return the option `startingOffsets`: Spark wants every partition named.

        Partitions and topics that are not in what is known were added since, and are read whole.
        """
        known = self._known_offsets(control_path)
        if isinstance(known, StartingOffsets):
            return known.value
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            places = self.places(admin)
        return json.dumps(by_topic({(t, p): known.get(t, {}).get(str(p), _EARLIEST) for t, p in places}))

    def _known_offsets(self, control_path: str) -> StartingOffsets | Mapping[str, Mapping[str, int]]:
        if self._start is not None:
            return offsets_in(self._start.position)
        path, name = Path(control_path), self.fact("start")
        # Spark's reader asks for the end in every scan, the dead letters' too, and again where its log is
        # begun anew. Of the first offsets either scan reads what there is; the Python reader keeps its own.
        is_asked_again = self.starting_offsets is StartingOffsets.LATEST and self.needs_kafka_jars
        if isinstance(self.starting_offsets, StartingOffsets) and not (
            is_asked_again and path.name != NO_CONTROL
        ):
            return self.starting_offsets
        if path.name == NO_CONTROL:
            return self._asked_offsets()
        job_dir = JobDir(LocalStore(path.parent.parent))
        if job_dir.known_uuid() is None:
            # A plan that is only looked at, before the first start.
            return StartingOffsets.EARLIEST
        recorded = job_dir.recorded(name)
        if recorded is None:
            recorded = job_dir.recorded_once(name, {"offsets": self._asked_offsets()})
        offsets: Mapping[str, Mapping[str, int]] = recorded["offsets"]
        return offsets

    def _asked_offsets(self) -> dict[str, dict[str, int]]:
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            return by_topic(start_offsets(self.starting_offsets, admin, self.places(admin)))

    def check_start(self, uid: str, position: Position) -> None:
        """Compare a savepoint's offsets with what the topics still hold."""
        logged = LoggedOffsets((offsets_in(position),))
        topics = self.topics_at(logged)
        with KafkaAdmin(self.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS) as admin:
            checks = InputChecks(admin, topics)
            raise_if_it_stays(lambda: checks.gone(uid, logged))

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Mapping[str, str]]:
        """Return the ids of the topics as the job recorded them at its first start, by fact."""
        names = [f"topic-{uid}-{topic}" for topic in self.topics_now()]
        facts = {name: job_dir.recorded(name) for name in names}
        return {name: fact for name, fact in facts.items() if fact is not None}

    def fact(self, what: str) -> str:
        """Return the name under which the job keeps `what` of this source."""
        # No two sources of a job read one topic. No topic has a blank in its name.
        read = self.topics or (f"pattern {self.pattern}",)
        return f"kafka-{what}-{hashlib.sha256(repr(read).encode()).hexdigest()[:16]}"
