"""What checkpoints cost: one, its participants, the newest, and a summary over many.

Written by the coordinator while a checkpoint runs, read by programs and by `flinkish checkpoints`. Nothing
here decides anything. `None` means that something was not measured or not reached; 0 means that it took no
time. A :class:`StatisticsHistory` is a value of bounded size, which is stored with every change:

- All checkpoints in progress are kept, and the newest `limit` that have ended.
- At most `details` participants and channels are listed, over all entries. The newest ended one
  has the first right to them; one before it is listed whole, or not at all. What is not listed is
  counted. A job with a thousand participants has a short memory, not a history of megabytes.
- The newest completed one, the newest failed one, the newest savepoint and the newest restored
  one are remembered, as a whole, when they fall out of that. A savepoint is a completed
  checkpoint, too.
- The summary is exact over the newest `window` completed checkpoints; of each only nine numbers
  are kept. Flink's window is 10,000. 1,000 are three hours at a checkpoint every ten seconds.
- Counts and totals are over the life of the job, as far as this history was carried on. Of metrics
  that functions have, as many are kept as :mod:`flinkish_spark.protocol.user_metrics` says.

With the limits below and the longest names and numbers the stored form stays below a megabyte; totals add
at most half a kilobyte for each source, operator and sink.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import GenericAlias
from typing import Annotated, Any, ClassVar

from flinkish_spark.protocol.checkpoint import ParticipantKind
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import (
    LEFT_OUT,
    Form,
    Presence,
    Stored,
    read,
    whole,
)
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.html import html_table, utc_text
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.user_metrics import UserMetric


@dataclass(frozen=True, slots=True)
class ChannelStatistics(Stored):
    """What one channel brought to a sink in one checkpoint.

    Parameters
    ----------
    channel
        Its number, as text.
    barriers
        Barriers of this checkpoint that came through it; 1 if all is well.
    rows
        Records that came through it in the micro-batch of the barrier; None where the records of
        several channels cannot be told apart.
    bytes
        None: tasks do not count them by channel.
    alignment_ms
        From its barrier to the last one of the checkpoint; None where all came with one micro-batch.
    """

    DEFAULTS: ClassVar = Presence.LEFT_OUT

    channel: str
    barriers: int
    rows: int | None = None
    bytes: int | None = None
    alignment_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ParticipantStatistics(Stored):
    """What one operator, sink or master hook did for one checkpoint.

    Parameters
    ----------
    uid, kind
        Who it is.
    is_acknowledged
        Whether it has acknowledged. Who has not is what a failed checkpoint waited for.
    ack_ms
        From the request to its acknowledgement.
    rows, bytes
        What it staged for the checkpoint, over all its micro-batches. None for operators and hooks,
        and where the checkpoint failed; bytes are None where the system does not tell.
    sync_ms
        How long it took to stage the checkpoint's last micro-batch.
    commit_ms
        How long its commit took; None where it had nothing to commit.
    barriers
        How many barriers of the checkpoint it saw, over all channels; None for operators and hooks.
    channels
        One entry per channel that showed a barrier.
    late_dropped
        How many late records an operator has dropped for the checkpoint, over all its micro-batches; None
        where there were none.
    counts
        What else an operator has counted for it, by name: matches of patterns, for example; and how much of
        something there is behind it: partial matches that are open.
    """

    DEFAULTS: ClassVar = Presence.LEFT_OUT

    uid: str
    kind: ParticipantKind
    is_acknowledged: bool = True
    ack_ms: int | None = None
    rows: int | None = None
    bytes: int | None = None
    sync_ms: int | None = None
    commit_ms: int | None = None
    barriers: int | None = None
    channels: tuple[ChannelStatistics, ...] = ()
    late_dropped: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def detail_count(self) -> int:
        """How many entries of a list it takes: its own and one per channel."""
        return 1 + len(self.channels)


def listed(participants: Iterable[ParticipantStatistics], at_most: int) -> tuple[ParticipantStatistics, ...]:
    """Return the participants that may be listed, and the channels of those for which there is room."""
    kept = sorted(participants, key=lambda one: one.is_acknowledged)[:at_most]
    room = at_most - len(kept)
    result = []
    for one in kept:
        fits = len(one.channels) <= room
        room -= len(one.channels) if fits else 0
        result.append(one if fits else replace(one, channels=()))
    return tuple(result)


#: Characters of a failure's text that are kept; an exception may quote a whole record.
MOST_TEXT = 2_000


class CheckpointStatus(Choice):
    """What has become of a checkpoint."""

    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class CheckpointDurations(Stored):
    """How long the phases of a checkpoint took, in milliseconds.

    Parameters
    ----------
    trigger_ms
        From the request to the moment when the barrier is offered; waiting in the queue included.
    start_delay_ms, alignment_ms
        Of a checkpoint that is one cut with an upstream's: from the writing of the upstream's barrier
        records to the first one that was passed, and from there to the cut. With several upstreams,
        those of the one that took longest. Otherwise the alignment is the time from the first
        micro-batch with a barrier to the last; None where one micro-batch brought all of them, since
        what happens inside of it cannot be seen.
    sync_ms
        From the start of foreachBatch to the staged file: the part that the stream waits for.
    async_ms
        From the staged file to the decision, while the next micro-batch runs.
    commit_ms
        From the decision to the receipt.
    end_to_end_ms
        From the request to the receipt, or to the failure.
    """

    trigger_ms: int | None = None
    start_delay_ms: int | None = None
    alignment_ms: int | None = None
    sync_ms: int | None = None
    async_ms: int | None = None
    commit_ms: int | None = None
    end_to_end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointFailure(Stored):
    """Why a checkpoint failed: the reason for programs, the text for people."""

    reason: CheckpointFailureReason
    text: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointStatistics(Stored):
    """One checkpoint, from its trigger to its end.

    Parameters
    ----------
    checkpoint
        Its id.
    purpose
        What it was taken for.
    status
        What has become of it.
    trigger_at_ms
        Wall clock time of the request, for people; durations are measured by another clock.
    durations
        See :class:`CheckpointDurations`.
    rows, bytes_staged
        What all sinks staged for it; None before it is completed, bytes also where a sink does not tell.
    asked, acknowledged
        How many had to acknowledge, and how many did; None where nobody noted it.
    participants
        One entry per operator, sink and master hook, those first that have not acknowledged.
    unlisted
        Participants and channels that are not listed: there were too many.
    failure
        Why it failed; there exactly when the status is FAILED.

    Raises
    ------
    ValueError
        Status and failure contradict each other.

    Examples
    --------
    >>> begun = CheckpointStatistics.triggered(CheckpointId(7), CheckpointPurpose.USER, trigger_at_ms=1_000)
    >>> done = begun.completed(CheckpointDurations(sync_ms=20, end_to_end_ms=90), rows=12, bytes_staged=340)
    >>> done.status.value, done.durations.sync_ms, CheckpointStatistics.from_json(done.to_json()) == done
    ('COMPLETED', 20, True)
    """

    checkpoint: CheckpointId
    purpose: CheckpointPurpose
    status: CheckpointStatus
    trigger_at_ms: int
    durations: CheckpointDurations = CheckpointDurations()
    rows: int | None = None
    bytes_staged: int | None = None
    asked: int | None = None
    acknowledged: int | None = None
    participants: tuple[ParticipantStatistics, ...] = ()
    unlisted: int = 0
    failure: CheckpointFailure | None = None

    def __post_init__(self) -> None:
        if (self.status is CheckpointStatus.FAILED) != (self.failure is not None):
            raise ValueError(
                f"checkpoint {self.checkpoint} is {self.status.value} with failure {self.failure}"
            )

    @classmethod
    def triggered(
        cls, checkpoint: CheckpointId, purpose: CheckpointPurpose, trigger_at_ms: int
    ) -> CheckpointStatistics:
        """Return the statistics of a checkpoint that has just got its id."""
        return cls(checkpoint, purpose, CheckpointStatus.IN_PROGRESS, trigger_at_ms)

    def completed(
        self,
        durations: CheckpointDurations,
        *,
        rows: int,
        bytes_staged: int | None = None,
        participants: tuple[ParticipantStatistics, ...] = (),
        unlisted: int = 0,
    ) -> CheckpointStatistics:
        """Return the statistics of the same checkpoint, confirmed; called after the receipt."""
        return replace(
            self,
            status=CheckpointStatus.COMPLETED,
            durations=durations,
            rows=rows,
            bytes_staged=bytes_staged,
            unlisted=unlisted,
            **_of(participants),
        )

    def failed(
        self,
        reason: CheckpointFailureReason,
        text: str,
        durations: CheckpointDurations | None = None,
        participants: tuple[ParticipantStatistics, ...] = (),
    ) -> CheckpointStatistics:
        """Return the statistics of the same checkpoint, failed; durations only if there are new ones.

        A text of more than :data:`MOST_TEXT` characters is cut.
        """
        kept = text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 3] + "..."
        return replace(
            self,
            status=CheckpointStatus.FAILED,
            durations=durations or self.durations,
            failure=CheckpointFailure(reason, kept),
            **_of(participants),
        )

    @property
    def detail_count(self) -> int:
        """How many participants and channels are listed."""
        channels = sum(len(one.channels) for one in self.participants if one.channels)
        return len(self.participants) + channels

    def with_details(self, at_most: int) -> CheckpointStatistics:
        """Return the statistics with at most so many participants and channels."""
        count = self.detail_count
        if count <= at_most:
            return self
        kept = listed(self.participants, at_most)
        unlisted = self.unlisted + count - sum(one.detail_count for one in kept)
        return replace(self, participants=kept, unlisted=unlisted)

    def without_details(self) -> CheckpointStatistics:
        """Return the statistics of the checkpoint as a whole."""
        return replace(self, participants=(), unlisted=self.unlisted + self.detail_count)


def _of(participants: tuple[ParticipantStatistics, ...]) -> dict[str, Any]:
    """Return participants and their counts; those who are not known are not counted."""
    acknowledged = sum(participant.is_acknowledged for participant in participants)
    counts = {"asked": len(participants), "acknowledged": acknowledged} if participants else {}
    return {"participants": participants, **counts}


class Quantity(Choice):
    """What is summed up; the values are the names in JSON."""

    TRIGGER_MS = "trigger_ms"
    START_DELAY_MS = "start_delay_ms"
    ALIGNMENT_MS = "alignment_ms"
    SYNC_MS = "sync_ms"
    ASYNC_MS = "async_ms"
    COMMIT_MS = "commit_ms"
    END_TO_END_MS = "end_to_end_ms"
    ROWS = "rows"
    BYTES_STAGED = "bytes_staged"


#: The quantities of one checkpoint, in the order of :class:`Quantity`; None was not measured.
Sample = tuple[int | None, ...]


def sample_of(statistics: CheckpointStatistics) -> Sample:
    """Return what a summary needs of one checkpoint."""
    staged = {"rows": statistics.rows, "bytes_staged": statistics.bytes_staged}
    known = statistics.durations.to_json() | staged
    return tuple(known[quantity.value] for quantity in Quantity)


@dataclass(frozen=True, slots=True)
class Summary:
    """One quantity over several checkpoints, without those where it was not measured.

    p50 and p99 are the smallest value that at least 50 % or 99 % of all values do not exceed, so
    each is a value that really occurred.
    """

    count: int
    minimum: int
    average: float
    p50: int
    p99: int
    maximum: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Summary:
        """Return the summary of at least one value.

        Examples
        --------
        >>> Summary.of([40, 10, 30, 20])
        Summary(count=4, minimum=10, average=25.0, p50=20, p99=40, maximum=40)
        """
        ordered = sorted(values)
        count = len(ordered)
        # In whole numbers, since 0.99 is not a float.
        p50, p99 = (ordered[(count * percent + 99) // 100 - 1] for percent in (50, 99))
        return cls(count, ordered[0], sum(ordered) / count, p50, p99, ordered[-1])


#: Up to where the records of a source are counted, as the source counts them.
POSITION = "position"
#: Totals that say how much there is, and not how much there has been.
GAUGES = frozenset({"pendingRecords", POSITION})


_SAMPLE: Any = GenericAlias(tuple, (Annotated[int, whole(0)] | None,) * len(Quantity))
_SAMPLES = Form(
    lambda samples: [list(one) for one in samples],
    functools.partial(read, GenericAlias(tuple, (_SAMPLE, ...))),
)


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
    totals
        What went through sources, operators and sinks with all checkpoints, by uid and by Flink's name of the
        metric: ``{"orders": {"numRecordsIn": 12}}``. See :data:`GAUGES` for those that can go back.
    user_metrics
        What functions have measured, by uid and name.

    Examples
    --------
    >>> from flinkish_spark.protocol.ids import CheckpointPurpose
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
    totals: Mapping[str, Mapping[str, int]] = field(default_factory=dict, metadata=LEFT_OUT)
    user_metrics: Mapping[str, Mapping[str, UserMetric]] = field(default_factory=dict, metadata=LEFT_OUT)

    def __post_init__(self) -> None:
        ids = [entry.checkpoint for entry in self.entries]
        if ids != sorted(set(ids)):
            raise ValueError(f"the entries must have rising ids, got {[int(i) for i in ids]}")
        if len(self.in_progress) != self.counts.in_progress or len(self.samples) > self.window:
            raise ValueError("the entries, the counts and the window of a history contradict each other")

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
        columns = dict(zip(Quantity, zip(*self.samples, strict=True), strict=False))
        known = {q: [number for number in column if number is not None] for q, column in columns.items()}
        return {quantity: Summary.of(numbers) for quantity, numbers in known.items() if numbers}

    def _repr_html_(self) -> str:
        counts = self.counts
        said = f"{counts.completed} completed, {counts.failed} failed, {counts.in_progress} in progress"
        heads = ("id", "purpose", "status", "triggered", "end_to_end_ms", "sync_ms", "rows", "bytes_staged")
        newest = [
            (
                one.checkpoint,
                one.purpose.value,
                one.status.value,
                utc_text(one.trigger_at_ms),
                one.durations.end_to_end_ms,
                one.durations.sync_ms,
                one.rows,
                one.bytes_staged,
                None if one.failure is None else f"{one.failure.reason.value}: {one.failure.text}",
            )
            for one in reversed(self.entries)
        ]
        shown = html_table(newest, columns=(*heads, "failure"), caption=f"Checkpoints: {said}")
        spread = [
            (name.value, one.count, one.minimum, round(one.average, 1), one.p50, one.p99, one.maximum)
            for name, one in self.summary().items()
        ]
        columns = ("", "count", "min", "avg", "p50", "p99", "max")
        caption = "Over the newest completed ones"
        return shown + html_table(spread, columns=columns, caption=caption) if spread else shown

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
            newest = _newer(self.newest_failed, statistics)
            counts = replace(counts, failed=counts.failed + 1)
            return replace(self, entries=entries, counts=counts, newest_failed=newest)._bounded()
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

    def counted(self, more: Mapping[str, Mapping[str, int]]) -> StatisticsHistory:
        """Note what went through with a checkpoint, by uid and name; see :attr:`totals`."""
        totals = {uid: dict(own) for uid, own in self.totals.items()}
        for uid, own in more.items():
            known = totals.setdefault(uid, {})
            for name, count in own.items():
                known[name] = count if name in GAUGES else known.get(name, 0) + count
        return replace(self, totals=totals)

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
