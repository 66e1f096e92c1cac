"""What the brokers have now: partitions, first and last offsets, offsets for timestamps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flinkish_spark.drop_in.source_options import EARLIEST, LATEST, Bound, NoOffsetStrategy, SourceOptions
from flinkish_spark.errors import ConfigError, GraphError
from flinkish_spark.kafka import Isolation
from flinkish_spark.kafka.admin import unknown_topic
from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.positions import Positions, TopicPartitions, TopicPattern
from flinkish_spark.sources.kafka_beginnings import first_at_least_as_late


class OffsetFinder:
    """Turns options into offsets by asking the brokers; one per reader, on the driver.

    Parameters
    ----------
    positions
        The brokers.
    options
        Of the source.
    """

    def __init__(self, positions: Positions, options: SourceOptions) -> None:
        self._positions, self._options = positions, options

    def places(self) -> frozenset[Place]:
        """Return the partitions to read now.

        Raises
        ------
        GraphError
            A topic that was named does not exist.
        """
        wanted = self._options.subscription
        if wanted.assigned:
            existing = self._existing({topic for topic, _ in wanted.assigned})
            for topic, partition in wanted.assigned:
                if partition >= existing[topic].partitions:
                    raise GraphError(
                        f"the topic '{topic}' has no partition {partition}",
                        why=f"it has {existing[topic].partitions} partitions",
                        what_to_do="correct the option 'assign'",
                    )
            return frozenset(wanted.assigned)
        if wanted.pattern:
            return frozenset(Positions.places(self._positions.matching(TopicPattern(wanted.pattern))))
        return frozenset(Positions.places(self._existing(set(wanted.topics))))

    def existing_places(self) -> frozenset[Place]:
        """Return those of the partitions to read that exist now."""
        wanted = self._options.subscription
        if wanted.pattern:
            return self.places()
        found = frozenset(
            Positions.places(self._positions.topics(wanted.topics or {t for t, _ in wanted.assigned}))
        )
        return found & frozenset(wanted.assigned) if wanted.assigned else found

    def _existing(self, topics: set[str]) -> dict[str, TopicPartitions]:
        existing = self._positions.topics(topics)
        missing = sorted(topics - existing.keys())
        if missing:
            raise unknown_topic(missing[0], self._options.connection.servers)
        return existing

    def earliest(self, places: Iterable[Place]) -> dict[Place, int]:
        """Return first offsets."""
        return self._positions.earliest(places)

    def latest(self, places: Iterable[Place], isolation: Isolation | None = None) -> dict[Place, int]:
        """Return last offsets; under the source's isolation unless another one is named."""
        return self._positions.latest(places, isolation or self._options.reader.isolation)

    def starting(self) -> dict[Place, int]:
        """Return where a new query begins, for every partition."""
        return self._resolved(self._options.starting, "starting")

    def ending(self) -> dict[Place, int]:
        """Return where a batch read ends, for every partition."""
        return self._resolved(self._options.ending, "ending")

    def _resolved(self, bound: Bound, side: str) -> dict[Place, int]:
        places = self.places()
        if bound.everywhere is not None:
            return self.earliest(places) if bound.everywhere == EARLIEST else self.latest(places)
        if bound.offsets is not None:
            _check_same_places(places, bound.offsets, f"{side}Offsets")
            symbols = {LATEST: self.latest, EARLIEST: self.earliest}
            found = {place: offset for place, offset in bound.offsets.items() if offset >= 0}
            for symbol, ask in symbols.items():
                found.update(ask([place for place, offset in bound.offsets.items() if offset == symbol]))
            return found
        if bound.timestamp_ms is not None:
            return self._at_times(dict.fromkeys(places, bound.timestamp_ms), side)
        assert bound.timestamps_ms is not None
        _check_same_places(places, bound.timestamps_ms, f"{side}OffsetsByTimestamp")
        return self._at_times(bound.timestamps_ms, side)

    def _at_times(self, wanted: Mapping[Place, int], side: str) -> dict[Place, int]:
        if side == "ending" or self._options.when_no_offset is not NoOffsetStrategy.ERROR:
            return first_at_least_as_late(wanted, self._asked_times, self.latest)
        # As in Spark: an end that nothing reaches is the end, a start that nothing reaches an error.
        found: dict[Place, int] = {}
        for place, offset in sorted(self._asked_times(wanted).items()):
            if offset is not None:
                found[place] = offset
                continue
            topic, partition = place
            raise ConfigError(
                f"no record of {topic}-{partition} is as new as the timestamp {wanted[place]}",
                what_to_do="choose an earlier timestamp, or set startingOffsetsByTimestampStrategy to latest",
            )
        return found

    def _asked_times(self, wanted: Mapping[Place, int]) -> dict[Place, int | None]:
        return self._positions.at_timestamps(wanted, self._options.reader.isolation)


def _check_same_places(places: frozenset[Place], given: Mapping[Place, int], option: str) -> None:
    if places != given.keys():
        odd = sorted(places ^ given.keys())[0]
        state = "is not in it" if odd in places else "is not read by this source"
        raise ConfigError(
            f"the option '{option}' and the partitions that are read differ: {odd[0]}-{odd[1]} {state}",
            what_to_do="name every partition: -2 stands for the first offset, -1 for the end",
            option=option,
        )
