"""What there is to read now, and what is missing: the source's policy for lost data."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flinkish_spark.clock import SystemClock
from flinkish_spark.drop_in.finder import OffsetFinder
from flinkish_spark.errors import GraphError, InputLostError
from flinkish_spark.kafka import Isolation
from flinkish_spark.kafka._pace import seen_to_stay
from flinkish_spark.kafka.answers import Place

LOG = logging.getLogger(__name__)
#: How often partitions that were added, or topics that match a pattern, are looked for.
_LOOK_FOR_PARTITIONS_S = 5.0
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at the topics: the ends, and what is missing of what was read before."""

    ends: Mapping[Place, int]
    losses: tuple[str, ...]


class TopicWatch:
    """Answers the same questions every few milliseconds; one per reader, on the driver.

    Parameters
    ----------
    finder
        Asks the brokers.
    fails_on_loss
        Spark's option `failOnDataLoss`.
    """

    def __init__(self, finder: OffsetFinder, fails_on_loss: bool) -> None:
        self._finder, self._fails_on_loss = finder, fails_on_loss
        self._places: frozenset[Place] = frozenset()
        self._looked_at = float("-inf")
        self._reported: set[str] = set()

    def ends(self, begin: Mapping[Place, int]) -> dict[Place, int]:
        """Return where each partition ends now.

        Parameters
        ----------
        begin
            How far the query has read. With `failOnDataLoss` no end is before it. Without, an end
            may be: the log was made anew, and the query goes on there.

        Raises
        ------
        InputLostError
            With `failOnDataLoss`, if something that was read, or is still to be read, is gone.
        """
        if not self._fails_on_loss:
            return self._ends_there_are(begin)
        look = seen_to_stay(lambda: self._look(begin), lambda seen: bool(seen.losses), _CLOCK)
        self._report(look.losses)
        return {place: max(end, begin.get(place, 0)) for place, end in look.ends.items()}

    def look_again(self) -> None:
        """Look for partitions at the next call: somebody knows of some that are not known here."""
        self._looked_at = float("-inf")

    def with_new(self, begin: Mapping[Place, int], end: Mapping[Place, int]) -> dict[Place, int]:
        """Return `begin` with the first offsets of the partitions that only `end` has."""
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

    def _ends_there_are(self, begin: Mapping[Place, int]) -> dict[Place, int]:
        places = self._known(self._finder.existing_places)
        try:
            ends = self._finder.latest(places)
        except InputLostError:
            # Deleted since the last look.
            self._looked_at = float("-inf")
            ends = self._finder.latest(self._known(self._finder.existing_places))
        hidden = self._hidden(begin, ends)
        self._report(self._missing(begin, ends, hidden))
        return {place: begin[place] if place in hidden else end for place, end in ends.items()}

    def _look(self, begin: Mapping[Place, int]) -> _Look:
        try:
            ends = self._finder.latest(self._known(self._finder.places))
        except (GraphError, InputLostError) as error:
            # A topic or a partition of the last look does not exist any more.
            look = _Look(begin, (str(error),))
        else:
            look = _Look(ends, self._missing(begin, ends, self._hidden(begin, ends)))
        if look.losses:
            self._looked_at = float("-inf")
        return look

    def _known(self, ask: Callable[[], frozenset[Place]]) -> frozenset[Place]:
        now = time.monotonic()
        if now - self._looked_at > _LOOK_FOR_PARTITIONS_S:
            self._places, self._looked_at = ask(), now
        return self._places

    def _hidden(self, begin: Mapping[Place, int], ends: Mapping[Place, int]) -> frozenset[Place]:
        """Return the partitions whose end is before what was read only because a transaction is open.

        Whoever read without read_committed before has read more than is shown now.
        """
        behind = [place for place, end in ends.items() if end < begin.get(place, 0)]
        marks = self._finder.latest(behind, Isolation.READ_UNCOMMITTED) if behind else {}
        return frozenset(place for place, mark in marks.items() if mark >= begin[place])

    @staticmethod
    def _missing(
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
                f"input is gone: missing are the offsets {'; '.join(losses)}",
                why="Kafka's retention removed records that the query had not read, or a topic was "
                "deleted or created again",
                what_to_do="restore the topic, or set failOnDataLoss to false to go on without them",
            )
        for loss in losses:
            if loss not in self._reported:
                LOG.warning("input is gone and failOnDataLoss is false: %s", loss)
                self._reported.add(loss)
