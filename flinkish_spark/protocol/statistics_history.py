"""The statistics of the newest checkpoints, counts of all, and a summary over a window.

A :class:`StatisticsHistory` is a value of bounded size: the coordinator replaces it with every
change and stores it as JSON, the command line reads it. Rules:

- All checkpoints in progress are kept, and the newest `limit` that have ended.
- At most `details` participants and channels are listed, over all entries. The newest ended one
  has the first right to them; one before it is listed whole, or not at all. What is not listed is
  counted. A job with a thousand participants has a short memory, not a history of megabytes that
  is written with every checkpoint.
- The newest completed one, the newest failed one, the newest savepoint and the newest restored
  one are remembered, as a whole, when they fall out of that. A savepoint is a completed
  checkpoint, too.
- The summary is exact over the newest `window` completed checkpoints; of each only nine numbers
  are kept. Flink's window is 10,000. 1,000 are three hours at a checkpoint every ten seconds, and
  leave the stored history small enough to be written with every checkpoint.
- Counts are over the life of the job, as far as this history was carried on.

With the limits below and the longest names and numbers the stored form stays below a megabyte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from flinkish_spark.protocol.codec import Form, Stored
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.json_values import member, text_of
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.protocol.statistics import CheckpointStatistics, CheckpointStatus
from flinkish_spark.protocol.statistics_summary import (
    Quantity,
    Sample,
    Summary,
    sample_of,
    samples_from_json,
    summarize,
)

#: Stored beside the samples: a reader may know others.
_QUANTITIES = [quantity.value for quantity in Quantity]
#: They are read together with the names of their quantities.
_SAMPLES = Form(lambda samples: [list(one) for one in samples], lambda samples: samples)


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint(Stored):
    """The checkpoint that a start went on from.

    Parameters
    ----------
    checkpoint
        Its id.
    restored_at_ms
        Wall clock time.
    path
        The savepoint's directory; empty for a checkpoint of the job's own.
    """

    checkpoint: CheckpointId
    restored_at_ms: int
    path: str = ""

    def __post_init__(self) -> None:
        checked_whole("restored_at_ms", self.restored_at_ms, least=0)
        text_of(self.path, "path")


@dataclass(frozen=True, slots=True)
class CheckpointCounts(Stored):
    """How many checkpoints there were: every triggered one is in progress, completed or failed.

    `refused` are requests that never got an id; `restored` are starts from a checkpoint.
    """

    triggered: int = 0
    completed: int = 0
    failed: int = 0
    refused: int = 0
    restored: int = 0

    def __post_init__(self) -> None:
        for one in fields(self):
            checked_whole(one.name, getattr(self, one.name), least=0)
        if self.in_progress < 0:
            raise ValueError(f"more checkpoints ended than were triggered: {self}")

    @property
    def in_progress(self) -> int:
        """How many were triggered and have not ended."""
        return self.triggered - self.completed - self.failed


@dataclass(frozen=True, slots=True)
class StatisticsHistory(Stored):
    """See the module's head.

    Parameters
    ----------
    limit
        How many ended checkpoints are kept; 0 for none.
    details
        How many participants and channels are listed at most, over all entries.
    window
        How many completed ones the summary is over; at least 1.
    entries
        Checkpoints in progress and the newest ended ones, by rising id.
    counts
        Over all checkpoints.
    samples
        The window, oldest first.
    newest_completed, newest_failed, newest_savepoint, newest_restored
        By id, without participants; the restored one by time.
    dropped_up_to
        The highest id of an ended checkpoint that was dropped from `entries`.

    Examples
    --------
    >>> from flinkish_spark.protocol.purpose import CheckpointPurpose
    >>> from flinkish_spark.protocol.statistics import CheckpointDurations
    >>> begun = CheckpointStatistics.triggered(CheckpointId(1), CheckpointPurpose.PERIODIC, trigger_at_ms=0)
    >>> history = StatisticsHistory().triggered(begun)
    >>> history.counts.in_progress
    1
    >>> done = begun.completed(CheckpointDurations(end_to_end_ms=80), rows=5, bytes_staged=100)
    >>> history.ended(done).summary()[Quantity.END_TO_END_MS].p99
    80
    """

    limit: int = 20
    details: int = 1_000
    window: int = 1_000
    entries: tuple[CheckpointStatistics, ...] = ()
    counts: CheckpointCounts = CheckpointCounts()
    samples: Annotated[tuple[Sample, ...], _SAMPLES] = ()
    newest_completed: CheckpointStatistics | None = None
    newest_failed: CheckpointStatistics | None = None
    newest_savepoint: CheckpointStatistics | None = None
    newest_restored: RestoredCheckpoint | None = None
    dropped_up_to: CheckpointId = field(default_factory=lambda: CheckpointId(0))

    def __post_init__(self) -> None:
        checked_whole("limit", self.limit, least=0)
        checked_whole("details", self.details, least=0)
        checked_whole("window", self.window, least=1)
        ids = [entry.checkpoint for entry in self.entries]
        if ids != sorted(set(ids)):
            raise ValueError(f"the entries must have rising ids, got {[int(i) for i in ids]}")
        if len(self.in_progress) != self.counts.in_progress or len(self.samples) > self.window:
            raise ValueError("the entries, the counts and the window of a history contradict each other")

    # -- looking --------------------------------------------------------------------------------
    @property
    def in_progress(self) -> tuple[CheckpointStatistics, ...]:
        """The checkpoints that have not ended, oldest first."""
        return tuple(e for e in self.entries if e.status is CheckpointStatus.IN_PROGRESS)

    def find(self, checkpoint: CheckpointId) -> CheckpointStatistics | None:
        """Return what is known about a checkpoint; None if it is unknown or was dropped."""
        newest = (self.newest_completed, self.newest_failed, self.newest_savepoint)
        for known in (*self.entries, *newest):
            if known is not None and known.checkpoint == checkpoint:
                return known
        return None

    def summary(self) -> dict[Quantity, Summary]:
        """Return the summary over the window; a quantity that was never measured is left out."""
        return summarize(self.samples)

    # -- noting ---------------------------------------------------------------------------------
    def triggered(self, statistics: CheckpointStatistics) -> StatisticsHistory:
        """Note a checkpoint that has got its id.

        Raises
        ------
        ValueError
            It is not in progress, or its id was here before: ids are never used again.
        """
        if statistics.status is not CheckpointStatus.IN_PROGRESS:
            raise ValueError(
                f"checkpoint {statistics.checkpoint} is {statistics.status.value}, not triggered"
            )
        if self._was_here(statistics.checkpoint):
            raise ValueError(f"checkpoint {statistics.checkpoint} was triggered before")
        counts = replace(self.counts, triggered=self.counts.triggered + 1)
        return replace(self, entries=self._with(statistics), counts=counts)

    def ended(self, statistics: CheckpointStatistics) -> StatisticsHistory:
        """Note that a checkpoint has completed or failed.

        One that has ended before stays as it was: a recovery may finish a checkpoint twice. One
        that was never noted counts as triggered, too: another process began it.

        Raises
        ------
        ValueError
            It is in progress.
        """
        if statistics.status is CheckpointStatus.IN_PROGRESS:
            raise ValueError(f"checkpoint {statistics.checkpoint} has not ended")
        is_open = any(e.checkpoint == statistics.checkpoint for e in self.in_progress)
        if not is_open and self._was_here(statistics.checkpoint):
            return self
        counts = self.counts if is_open else replace(self.counts, triggered=self.counts.triggered + 1)
        entries = self._with(statistics)
        if statistics.status is CheckpointStatus.FAILED:
            return replace(
                self,
                entries=entries,
                counts=replace(counts, failed=counts.failed + 1),
                newest_failed=_newer(self.newest_failed, statistics),
            )._bounded()
        savepoint = self.newest_savepoint
        return replace(
            self,
            entries=entries,
            counts=replace(counts, completed=counts.completed + 1),
            samples=(*self.samples, sample_of(statistics))[-self.window :],
            newest_completed=_newer(self.newest_completed, statistics),
            newest_savepoint=_newer(savepoint, statistics) if statistics.purpose.is_savepoint else savepoint,
        )._bounded()

    def refused(self) -> StatisticsHistory:
        """Note that a request was turned away before it got an id. Not for ticks of the timer."""
        return replace(self, counts=replace(self.counts, refused=self.counts.refused + 1))

    def restored(self, restored: RestoredCheckpoint) -> StatisticsHistory:
        """Note that a start went on from a checkpoint."""
        counts = replace(self.counts, restored=self.counts.restored + 1)
        return replace(self, counts=counts, newest_restored=restored)

    # -- inside ---------------------------------------------------------------------------------
    def _was_here(self, checkpoint: CheckpointId) -> bool:
        return checkpoint <= self.dropped_up_to or any(e.checkpoint == checkpoint for e in self.entries)

    def _with(self, statistics: CheckpointStatistics) -> tuple[CheckpointStatistics, ...]:
        others = (e for e in self.entries if e.checkpoint != statistics.checkpoint)
        return _in_order((*others, statistics))

    def _bounded(self) -> StatisticsHistory:
        """Drop the oldest ended checkpoints beyond the limit, and details beyond theirs."""
        ended = [e for e in self.entries if e.status is not CheckpointStatus.IN_PROGRESS]
        kept = ended[max(0, len(ended) - self.limit) :]
        dropped = ended[: len(ended) - len(kept)]
        return replace(
            self,
            entries=_in_order((*self.in_progress, *_detailed(kept, self.details))),
            dropped_up_to=max([self.dropped_up_to, *(e.checkpoint for e in dropped)]),
        )

    # -- storing --------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {**Stored.to_json(self), "quantities": _QUANTITIES}

    @classmethod
    def _of_older(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return an object as it is written today: its samples may be of other quantities."""
        names, samples = member(value, "quantities"), member(value, "samples")
        return {**value, "samples": samples_from_json(names, samples)}


def _in_order(entries: Iterable[CheckpointStatistics]) -> tuple[CheckpointStatistics, ...]:
    return tuple(sorted(entries, key=lambda e: e.checkpoint))


def _detailed(ended: Sequence[CheckpointStatistics], details: int) -> Iterator[CheckpointStatistics]:
    """Yield the newest with as many details as may be, and older ones whole as long as there is room."""
    room = details
    for place, statistics in enumerate(reversed(ended)):
        kept = statistics.with_details(room) if place == 0 else statistics
        count = kept.detail_count
        if count > room:
            yield kept.without_details()
        else:
            room -= count
            yield kept


def _newer(known: CheckpointStatistics | None, found: CheckpointStatistics) -> CheckpointStatistics:
    if known is not None and known.checkpoint > found.checkpoint:
        return known
    return found.without_details()
