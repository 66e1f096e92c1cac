"""What the planner of a Kafka source asks before every micro-batch: which topics, from where, how far.

Answers are what one broker says at one moment. A broker that has just started may not know a topic,
or the end of a log, for a second or two: whoever would conclude from an answer that input is gone
asks again first.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flinkish_spark.clock import Clock, SystemClock
from flinkish_spark.errors import ConfigError
from flinkish_spark.kafka._wire import KafkaWire
from flinkish_spark.kafka.admin import KafkaAdmin, _described_topics, _topic_id
from flinkish_spark.kafka.answers import Isolation, Place
from flinkish_spark.kafka.options import KafkaConnection

#: Kafka's default.api.timeout.ms.
_TIMEOUT_MS = 60_000
#: [a[b]]: a set in a set in Java, something else in Python, which warns of some of them only.
_NESTED_SET = re.compile(r"\[(?:\\.|[^\]\\])*\[")
#: A beginning of a pattern that stands for itself.
_PLAIN = re.compile(r"[A-Za-z0-9_-]*")
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class TopicPartitions:
    """How many partitions a topic has, numbered from 0.

    `topic_id` tells a topic from a later one of the same name; None before Kafka 2.8.
    """

    partitions: int
    topic_id: str | None


class TopicPattern:
    """A regular expression that a topic's whole name has to match, as in Java's ``matches()``.

    Parameters
    ----------
    text
        What Java's ``Pattern`` and Python's ``re`` both understand, in the same way.

    Raises
    ------
    ConfigError
        If Python does not understand it, or might understand something else than Java.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            if _NESTED_SET.search(text):
                raise re.error("a set in a set", text)
            with warnings.catch_warnings():
                # Python warns of [a&&b], an intersection in Java but not here.
                warnings.simplefilter("error", FutureWarning)
                # Java's \w, \d and (?i) mean ASCII.
                self._compiled = re.compile(text, re.ASCII)
        except (re.error, FutureWarning) as wrong:
            raise ConfigError(
                f"the topic pattern {text!r} cannot be used",
                why=f"Python reads it otherwise than Java, or not at all: {wrong}",
                what_to_do="write it with what both know, such as [a-z], \\d, ., *, +, ?, | and ( )",
                pattern=text,
            ) from wrong

    def matches(self, topic: str) -> bool:
        """Return whether the whole name matches."""
        return self._compiled.fullmatch(topic) is not None

    def __contains__(self, topic: object) -> bool:
        return isinstance(topic, str) and self.matches(topic)

    def may_match_what(self, other: TopicPattern) -> bool:
        """Return whether some topic may match both; False only if none can, by how their names begin.

        Examples
        --------
        >>> orders = TopicPattern("orders-.*")
        >>> orders.may_match_what(TopicPattern("clicks-.*")), orders.may_match_what(TopicPattern("ord.*"))
        (False, True)
        """
        mine, theirs = _literal_prefix(self.text), _literal_prefix(other.text)
        return mine.startswith(theirs) or theirs.startswith(mine)


def _literal_prefix(pattern: str) -> str:
    """Return what every name that matches begins with, as far as that is plain to see."""
    if "|" in pattern:
        return ""
    plain = _PLAIN.match(pattern)
    found = "" if plain is None else plain[0]
    # What may be missing is no beginning.
    return found[:-1] if pattern[len(found) : len(found) + 1] in ("?", "*", "{") else found


class Positions:
    """Answers a planner's questions over one connection; one instance belongs to one thread.

    All calls may be repeated and reconnect by themselves. Each takes one or two requests to one
    broker, and one more to each leader where offsets are asked for.

    Parameters
    ----------
    connection
        Where Kafka is.
    timeout_ms
        The longest a call may wait for a broker before :class:`BrokerUnavailableError`.
    clock
        Time, replaceable in tests.

    Examples
    --------
    >>> positions = Positions(KafkaConnection("broker:9092"))
    >>> places = positions.places(positions.topics(["orders"]))  # doctest: +SKIP
    >>> ends = positions.latest(places, Isolation.READ_COMMITTED)  # doctest: +SKIP
    """

    def __init__(
        self, connection: KafkaConnection, *, timeout_ms: int = _TIMEOUT_MS, clock: Clock = _CLOCK
    ) -> None:
        self._wire = KafkaWire(connection, timeout_ms=timeout_ms, clock=clock)
        self._admin = KafkaAdmin.over(self._wire)

    def close(self) -> None:
        """Close the connection; a later call opens it again."""
        self._wire.close()

    def __enter__(self) -> Positions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def matching(self, pattern: TopicPattern) -> dict[str, TopicPartitions]:
        """Return the topics that match, without Kafka's internal ones.

        Kafka leaves out topics that the principal may not describe. A topic that the broker
        knows but cannot describe now is left out too.
        """
        rows = self._wire.call("list topics", lambda admin: admin.describe_topics(None))
        return {
            row["name"]: _partitions_of(row)
            for row in rows
            if not row["is_internal"] and not row["error_code"] and pattern.matches(row["name"])
        }

    def topics(self, names: Iterable[str]) -> dict[str, TopicPartitions]:
        """Return the topics of these names; one that does not exist is left out, none is created.

        Raises
        ------
        AuthorizationError
            If the principal may not describe one of them.
        """
        wanted = sorted(set(names))

        if not wanted:
            return {}
        rows = self._wire.call("describe topics", lambda admin: _described_topics(admin, wanted))
        return {row["name"]: _partitions_of(row) for row in rows}

    @staticmethod
    def places(topics: Mapping[str, TopicPartitions]) -> list[Place]:
        """Return every partition of the topics as (topic, partition), in order."""
        return [(name, p) for name in sorted(topics) for p in range(topics[name].partitions)]

    def earliest(self, places: Iterable[Place]) -> dict[Place, int]:
        """Return the first offset that each partition still holds.

        Raises
        ------
        InputLostError
            If a partition does not exist.
        """
        return self._admin.beginning_offsets(places)

    def latest(self, places: Iterable[Place], isolation: Isolation) -> dict[Place, int]:
        """Return the offset after the last record of each partition that a reader may see.

        That is the last stable offset under read_committed, where the first open transaction
        ends the log, and the high watermark under read_uncommitted.

        Raises
        ------
        InputLostError
            If a partition does not exist.
        """
        return self._admin.end_offsets(places, isolation)

    def at_timestamps(
        self, timestamps_ms: Mapping[Place, int], isolation: Isolation
    ) -> dict[Place, int | None]:
        """Return the offset of each partition's first record that is at least as late, or None.

        Raises
        ------
        ConfigError
            If a timestamp, in milliseconds since 1970, is negative.
        InputLostError
            If a partition does not exist.
        """
        for (topic, partition), timestamp_ms in timestamps_ms.items():
            if timestamp_ms < 0:
                raise ConfigError(
                    f"the timestamp {timestamp_ms} ms of {topic}-{partition} lies before 1970",
                    topic=topic,
                    partition=partition,
                )
        return self._admin.offsets_at(timestamps_ms, isolation)


def _partitions_of(row: Mapping[str, Any]) -> TopicPartitions:
    return TopicPartitions(len(row["partitions"]), _topic_id(row.get("topic_id")))
