"""Warns of staged data that has waited for half of the time in which it can be committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flinkish_spark.clock import Clock
from flinkish_spark.protocol.ids import BatchId, Lineage
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.sinks.base import Committer

LOG = logging.getLogger(__name__)
_Key = tuple[Lineage, BatchId]


@dataclass(frozen=True, slots=True)
class StagedAge:
    """Data that a sink has staged and not committed.

    Parameters
    ----------
    sink
        Its uid.
    batch
        The oldest micro-batch of which the sink holds something.
    age_ms
        Since its staging began.
    lifetime_ms
        From then on it can be committed for so long, such as a transaction's timeout.
    """

    sink: str
    batch: BatchId
    age_ms: int
    lifetime_ms: int

    @property
    def is_half_over(self) -> bool:
        """Whether half of the lifetime has passed."""
        return 2 * self.age_ms >= self.lifetime_ms

    def __str__(self) -> str:
        return (
            f"what sink '{self.sink}' staged in micro-batch {self.batch} is {self.age_ms} ms old and not "
            f"committed; {self.lifetime_ms} ms after its staging the system drops it, and the job has to go "
            "back to its last checkpoint"
        )


class StagedAges:
    """Says once per sink and epoch that staged data grows old; of one coordinator, in its thread.

    An age counts from when the staging began by the wall clock of whoever staged it, so that what a
    restart found counts too; from then on by the monotonic clock.

    Parameters
    ----------
    committers
        By sink uid; those without :attr:`Committer.staged_lifetime_ms` are not watched.
    tell
        Called with what has grown old, beside the line in the log.
    """

    def __init__(
        self, committers: Mapping[str, Committer], clock: Clock, tell: Callable[[StagedAge], None]
    ) -> None:
        self._lifetimes = {
            uid: lifetime_ms
            for uid, committer in committers.items()
            if (lifetime_ms := committer.staged_lifetime_ms) is not None
        }
        self._clock, self._tell = clock, tell
        #: When the staging of each began, in monotonic milliseconds.
        self._began_ms: dict[_Key, int] = {}
        #: By sink, the oldest micro-batch of the epoch for which it was said.
        self._said: dict[str, _Key] = {}

    def look(self, waiting: Sequence[StagedBatch]) -> None:
        """Look at what is staged and not confirmed, in order; called often."""
        if not waiting or not self._lifetimes:
            self._began_ms.clear()
            return
        now_ms = self._clock.monotonic_ms()
        began = {_key(s): self._began_ms.get(_key(s), now_ms - self._age_at_sight_ms(s)) for s in waiting}
        self._began_ms = began
        for uid, lifetime_ms in self._lifetimes.items():
            oldest = next((s for s in waiting if any(c.sink == uid for c in s.committables)), None)
            if oldest is None or self._said.get(uid) == _key(oldest):
                continue
            found = StagedAge(uid, oldest.batch, now_ms - began[_key(oldest)], lifetime_ms)
            if found.is_half_over:
                self._said[uid] = _key(oldest)
                LOG.warning("%s", found)
                self._tell(found)

    def _age_at_sight_ms(self, staged: StagedBatch) -> int:
        if staged.began_at_ms is None:
            return 0
        return max(0, self._clock.wall_ms() - staged.began_at_ms)


def _key(staged: StagedBatch) -> _Key:
    return (staged.lineage, staged.batch)
