"""Offsets that the brokers have now, and the policy for lost data."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from operator import itemgetter

from flinkish_spark.connectors.kafka.client.admin import (
    KafkaAdmin,
    TopicPattern,
    list_places,
    make_unknown_topic_error,
)
from flinkish_spark.connectors.kafka.client.client import Isolation, poll_until_confirmed
from flinkish_spark.connectors.kafka.offsets import find_offsets_by_time, select_partitions
from flinkish_spark.connectors.kafka.stream_options import (
    EARLIEST,
    LATEST,
    NoOffsetStrategy,
    OffsetRangeLimit,
    SourceOptions,
)
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import ConfigError, GraphError, InputLostError
from flinkish_spark.protocol.ids import Place


class OffsetFinder:
    """Resolves options to offsets by asking the brokers; one per reader, on the driver."""

    def __init__(self, admin: KafkaAdmin, options: SourceOptions) -> None:
        self._admin, self._options = admin, options

    def places(self) -> frozenset[Place]:
        wanted = self._options.subscription
        if wanted.pattern:
            return frozenset(list_places(self._admin.find_matching_topics(TopicPattern(wanted.pattern))))
        assigned = {t: tuple(p for _, p in at) for t, at in groupby(sorted(wanted.assigned), itemgetter(0))}
        names = set(assigned or wanted.topics)
        counts = self._admin.partition_counts(names)
        missing = sorted(names - counts.keys())
        if missing:
            raise make_unknown_topic_error(missing[0], self._options.connection.servers)
        return frozenset(select_partitions(counts, assigned, "the option 'assign'"))

    def existing_places(self) -> frozenset[Place]:
        wanted = self._options.subscription
        if wanted.pattern:
            return self.places()
        names = wanted.topics or {topic for topic, _ in wanted.assigned}
        found = frozenset(list_places(self._admin.partition_counts(names)))
        return found & frozenset(wanted.assigned) if wanted.assigned else found

    def earliest(self, places: Iterable[Place]) -> dict[Place, int]:
        return self._admin.beginning_offsets(places)

    def latest(self, places: Iterable[Place], isolation: Isolation | None = None) -> dict[Place, int]:
        """Return end offsets, with the source's isolation level unless another one is given."""
        return self._admin.end_offsets(places, isolation or self._options.reader.isolation)

    def starting(self) -> dict[Place, int]:
        return self._resolve(self._options.starting, "starting")

    def ending(self) -> dict[Place, int]:
        return self._resolve(self._options.ending, "ending")

    def _resolve(self, bound: OffsetRangeLimit, side: str) -> dict[Place, int]:
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
            return self._find_by_time(dict.fromkeys(places, bound.timestamp_ms), side)
        assert bound.timestamps_ms is not None
        _check_same_places(places, bound.timestamps_ms, f"{side}OffsetsByTimestamp")
        return self._find_by_time(bound.timestamps_ms, side)

    def _find_by_time(self, wanted: Mapping[Place, int], side: str) -> dict[Place, int]:
        if side == "ending" or self._options.when_no_offset is not NoOffsetStrategy.ERROR:
            return find_offsets_by_time(wanted, self._ask_by_time, self.latest)
        # As in Spark: if no record is as late, a start is an error and an end is the end of the log.
        found: dict[Place, int] = {}
        for place, offset in sorted(self._ask_by_time(wanted).items()):
            if offset is not None:
                found[place] = offset
                continue
            topic, partition = place
            raise ConfigError(
                f"no record of {topic}-{partition} is as new as the timestamp {wanted[place]}",
                what_to_do="choose an earlier timestamp, or set startingOffsetsByTimestampStrategy to latest",
            )
        return found

    def _ask_by_time(self, wanted: Mapping[Place, int]) -> dict[Place, int | None]:
        return self._admin.offsets_at(wanted, self._options.reader.isolation)


def _check_same_places(places: frozenset[Place], given: Mapping[Place, int], option: str) -> None:
    if places != given.keys():
        odd = sorted(places ^ given.keys())[0]
        state = "is not in it" if odd in places else "is not read by this source"
        raise ConfigError(
            f"the option '{option}' and the partitions that are read differ: {odd[0]}-{odd[1]} {state}",
            what_to_do="name every partition: -2 stands for the first offset, -1 for the end",
        )


LOG = logging.getLogger(__name__)
#: How often to look for added partitions and matching topics.
_LOOK_FOR_PARTITIONS_S = 5.0
_CLOCK = SystemClock()


class TopicWatch:
    """Watches the ends of partitions, and detects lost data; one per reader, on the driver."""

    def __init__(self, finder: OffsetFinder, fails_on_loss: bool) -> None:
        self._finder, self._fails_on_loss = finder, fails_on_loss
        self._places: frozenset[Place] = frozenset()
        self._looked_at = float("-inf")
        self._reported: set[str] = set()

    def ends(self, begin: Mapping[Place, int]) -> dict[Place, int]:
        if not self._fails_on_loss:
            return self._find_existing_ends(begin)
        ends, losses = poll_until_confirmed(lambda: self._look(begin), lambda seen: bool(seen[1]), _CLOCK)
        self._report(losses)
        return {place: max(end, begin.get(place, 0)) for place, end in ends.items()}

    def look_again(self) -> None:
        """Look for partitions at the next call; called when a barrier counts more than are known."""
        self._looked_at = float("-inf")

    def add_new_partitions(self, begin: Mapping[Place, int], end: Mapping[Place, int]) -> dict[Place, int]:
        added = sorted(end.keys() - begin.keys())
        if not added:
            return dict(begin)
        try:
            first = self._finder.earliest(added)
        except InputLostError as error:
            self._report((str(error),))
            first = {place: end[place] for place in added}
        self._report(tuple(f"{t}-{p} from 0 to {o - 1}" for (t, p), o in sorted(first.items()) if o > 0))
        return {**begin, **first}

    def _find_existing_ends(self, begin: Mapping[Place, int]) -> dict[Place, int]:
        places = self._find_places(self._finder.existing_places)
        try:
            ends = self._finder.latest(places)
        except InputLostError:
            # A topic was deleted since the last look.
            self.look_again()
            ends = self._finder.latest(self._find_places(self._finder.existing_places))
        hidden = self._find_hidden(begin, ends)
        self._report(self._find_missing(begin, ends, hidden))
        return {place: begin[place] if place in hidden else end for place, end in ends.items()}

    def _look(self, begin: Mapping[Place, int]) -> tuple[Mapping[Place, int], tuple[str, ...]]:
        try:
            ends: Mapping[Place, int] = self._finder.latest(self._find_places(self._finder.places))
            losses = self._find_missing(begin, ends, self._find_hidden(begin, ends))
        except (GraphError, InputLostError) as error:
            # A known topic or partition does not exist any more.
            ends, losses = begin, (str(error),)
        if losses:
            self.look_again()
        return ends, losses

    def _find_places(self, ask: Callable[[], frozenset[Place]]) -> frozenset[Place]:
        now = time.monotonic()
        if now - self._looked_at > _LOOK_FOR_PARTITIONS_S:
            self._places, self._looked_at = ask(), now
        return self._places

    def _find_hidden(self, begin: Mapping[Place, int], ends: Mapping[Place, int]) -> frozenset[Place]:
        """Return the partitions whose end is before their position only because a transaction is open."""
        behind = [place for place, end in ends.items() if end < begin.get(place, 0)]
        marks = self._finder.latest(behind, Isolation.READ_UNCOMMITTED) if behind else {}
        return frozenset(place for place, mark in marks.items() if mark >= begin[place])

    @staticmethod
    def _find_missing(
        begin: Mapping[Place, int], ends: Mapping[Place, int], hidden: frozenset[Place]
    ) -> tuple[str, ...]:
        gone = [f"{t}-{p} from {o} on" for (t, p), o in sorted(begin.items()) if (t, p) not in ends]
        back = [
            f"{t}-{p} from {ends[t, p]} to {o - 1}, which were read"
            for (t, p), o in sorted(begin.items())
            if ends.get((t, p), o) < o and (t, p) not in hidden
        ]
        return (*gone, *back)

    def _report(self, losses: tuple[str, ...]) -> None:
        if losses and self._fails_on_loss:
            raise InputLostError(
                f"input is gone: Kafka no longer has the offsets {'; '.join(losses)}",
                why="Kafka's retention removed records that the query had not read, or a topic was "
                "deleted or created again",
                what_to_do="restore the topic, or set failOnDataLoss to false to go on without them",
            )
        for loss in losses:
            if loss not in self._reported:
                LOG.warning("input is gone and failOnDataLoss is false: %s", loss)
                self._reported.add(loss)
