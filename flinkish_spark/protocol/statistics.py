"""Checkpoint statistics: of single checkpoints and their participants, the newest ones, and a summary.

The coordinator writes them while a checkpoint runs; programs and `flinkish checkpoints` read them. They
decide nothing. `None` means that a value was not measured or not reached; 0 means that it took no time. A
:class:`StatisticsHistory` is a value of bounded size, which is stored with every change:

- It keeps all checkpoints in progress, and the newest `limit` that have ended.
- It lists at most `details` participants and channels, over all entries. The newest ended checkpoint
  is listed first, as far as there is room; older ones completely or not at all. The others are only
  counted. So the history of a job with a thousand participants is short, and not megabytes long.
- It keeps the newest completed and failed checkpoints, savepoint and restored checkpoint, without
  participants, also when they drop out of the entries. A savepoint is a completed checkpoint, too.
- The summary is exact over the newest `window` completed checkpoints, with nine numbers of each.
  Flink's window is 10,000. 1,000 are three hours at a checkpoint every ten seconds.
- Counts and totals are over the life of the job, as far as this history was kept. Metrics of
  functions are limited as in :mod:`flinkish_spark.protocol.user_metrics`.

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
    StoredObject,
    read,
    whole,
)
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.html import html_table, utc_text
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.user_metrics import UserMetric


@dataclass(frozen=True, slots=True)
class ChannelStatistics(StoredObject):
    """Barriers and records of one channel of a sink in one checkpoint.

    Parameters
    ----------
    channel
        Its number, as text.
    barriers
        Number of barriers of this checkpoint; 1 if all is well.
    rows
        Number of records in the micro-batch of the barrier; None if the records of several channels
        cannot be told apart.
    bytes
        None: tasks do not count them by channel.
    alignment_ms
        From its barrier to the last one of the checkpoint; None if one micro-batch brought all barriers.
    """

    DEFAULTS: ClassVar = Presence.LEFT_OUT

    channel: str
    barriers: int
    rows: int | None = None
    bytes: int | None = None
    alignment_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ParticipantStatistics(StoredObject):
    """Statistics of one operator, sink or master hook in one checkpoint.

    Parameters
    ----------
    uid, kind
        Uid and kind of the participant.
    is_acknowledged
        True if it has acknowledged. A failed checkpoint waited for the participants that have not.
    ack_ms
        From the request to its acknowledgement.
    rows, bytes
        Staged records and bytes, over all micro-batches of the checkpoint. None for operators and hooks,
        and if the checkpoint failed; bytes are None if the system does not tell.
    sync_ms
        Duration of staging the checkpoint's last micro-batch.
    commit_ms
        Duration of its commit; None if it had nothing to commit.
    barriers
        Number of the checkpoint's barriers that it saw, over all channels; None for operators and hooks.
    channels
        One entry per channel with a barrier.
    late_dropped
        Number of late records that an operator dropped, over all micro-batches of the checkpoint; None if
        there were none.
    counts
        Other counts of an operator by name, such as matches of patterns; and its levels after the
        checkpoint, such as open partial matches.
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
        """Number of listed entries: its own and one per channel."""
        return 1 + len(self.channels)


def limit_participants(
    participants: Iterable[ParticipantStatistics], at_most: int
) -> tuple[ParticipantStatistics, ...]:
    """Return at most `at_most` participants and channels, unacknowledged participants first."""
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
    """Status of a checkpoint."""

    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class CheckpointDurations(StoredObject):
    """Durations of the phases of a checkpoint, in milliseconds.

    Parameters
    ----------
    trigger_ms
        From the request to the offer of the barrier, including the time in the queue.
    start_delay_ms, alignment_ms
        In a chained job: from the writing of the upstream job's barrier records to the first one that was
        read, and from there to the cut. With several upstream jobs, those of the one that took longest. In
        other jobs the alignment is the time from the first micro-batch with a barrier to the last; None if
        one micro-batch brought all of them, since it cannot be measured inside of a micro-batch.
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
class CheckpointFailure(StoredObject):
    """Why a checkpoint failed: the reason for programs, the text for people."""

    reason: CheckpointFailureReason
    text: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointStatistics(StoredObject):
    """One checkpoint, from its trigger to its end.

    Parameters
    ----------
    checkpoint
        Its id.
    purpose
        Its purpose.
    status
        Its status.
    trigger_at_ms
        Wall clock time of the request, for people; durations are measured by another clock.
    durations
        See :class:`CheckpointDurations`.
    rows, bytes_staged
        Records and bytes that all sinks staged; None before it is completed, bytes also if a sink does not
        tell.
    asked, acknowledged
        Number of participants that had to acknowledge, and that did; None if unknown.
    participants
        One entry per operator, sink and master hook; those that have not acknowledged come first.
    unlisted
        Number of participants and channels that are not listed, since there were too many.
    failure
        Reason of the failure; present exactly if the status is FAILED.

    Examples
    --------
    >>> begun = CheckpointStatistics.begin(CheckpointId(7), CheckpointPurpose.USER, trigger_at_ms=1_000)
    >>> done = begun.complete(CheckpointDurations(sync_ms=20, end_to_end_ms=90), rows=12, bytes_staged=340)
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
    def begin(
        cls, checkpoint: CheckpointId, purpose: CheckpointPurpose, trigger_at_ms: int
    ) -> CheckpointStatistics:
        """Return the statistics of a checkpoint that has just got its id."""
        return cls(checkpoint, purpose, CheckpointStatus.IN_PROGRESS, trigger_at_ms)

    def complete(
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
            **_to_fields(participants),
        )

    def fail(
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
            **_to_fields(participants),
        )

    @property
    def detail_count(self) -> int:
        """Number of listed participants and channels."""
        channels = sum(len(one.channels) for one in self.participants if one.channels)
        return len(self.participants) + channels

    def limit_details(self, at_most: int) -> CheckpointStatistics:
        """Return the statistics with at most `at_most` participants and channels."""
        count = self.detail_count
        if count <= at_most:
            return self
        kept = limit_participants(self.participants, at_most)
        unlisted = self.unlisted + count - sum(one.detail_count for one in kept)
        return replace(self, participants=kept, unlisted=unlisted)

    def drop_details(self) -> CheckpointStatistics:
        """Return the statistics without participants and channels."""
        return replace(self, participants=(), unlisted=self.unlisted + self.detail_count)


def _to_fields(participants: tuple[ParticipantStatistics, ...]) -> dict[str, Any]:
    """Return the fields for participants and their counts; without participants the counts stay unknown."""
    acknowledged = sum(participant.is_acknowledged for participant in participants)
    counts = {"asked": len(participants), "acknowledged": acknowledged} if participants else {}
    return {"participants": participants, **counts}


class Quantity(Choice):
    """Quantities of the summary; the values are the names in JSON."""

    TRIGGER_MS = "trigger_ms"
    START_DELAY_MS = "start_delay_ms"
    ALIGNMENT_MS = "alignment_ms"
    SYNC_MS = "sync_ms"
    ASYNC_MS = "async_ms"
    COMMIT_MS = "commit_ms"
    END_TO_END_MS = "end_to_end_ms"
    ROWS = "rows"
    BYTES_STAGED = "bytes_staged"


#: The quantities of one checkpoint, in the order of :class:`Quantity`; None if not measured.
Sample = tuple[int | None, ...]


def make_sample(statistics: CheckpointStatistics) -> Sample:
    staged = {"rows": statistics.rows, "bytes_staged": statistics.bytes_staged}
    known = statistics.durations.to_json() | staged
    return tuple(known[quantity.value] for quantity in Quantity)


def find_percentile(ordered: Sequence[int], permille: int) -> int:
    """Return the smallest of the values that so many thousandths of all do not exceed."""
    # In whole numbers, since 0.99 is not a float.
    return ordered[(len(ordered) * permille + 999) // 1_000 - 1]


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of one quantity over several checkpoints, without those that did not measure it.

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
        p50, p99 = find_percentile(ordered, 500), find_percentile(ordered, 990)
        return cls(len(ordered), ordered[0], sum(ordered) / len(ordered), p50, p99, ordered[-1])

    def to_json(self, digits: int | None = None) -> dict[str, float]:
        """Return the values by their short names, with an average of so many digits, or all of them."""
        return {
            "count": self.count,
            "min": self.minimum,
            "avg": self.average if digits is None else round(self.average, digits),
            "p50": self.p50,
            "p99": self.p99,
            "max": self.maximum,
        }


#: Name of the total that holds a source's position, as the source counts its records.
POSITION = "position"
#: Totals that are current values and not sums.
GAUGES = frozenset({"pendingRecords", POSITION})


_SAMPLE: Any = GenericAlias(tuple, (Annotated[int, whole(0)] | None,) * len(Quantity))
_SAMPLES = Form(
    lambda samples: [list(one) for one in samples],
    functools.partial(read, GenericAlias(tuple, (_SAMPLE, ...))),
)


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint(StoredObject):
    """The checkpoint that a start restored.

    Parameters
    ----------
    checkpoint
        Its id.
    restored_at_ms
        Wall clock time.
    path
        The savepoint's directory; empty for a checkpoint of the job itself.
    """

    checkpoint: CheckpointId
    restored_at_ms: int
    path: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointCounts(StoredObject):
    """Numbers of checkpoints: every triggered one is in progress, completed or failed.

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
        """Number of checkpoints that were triggered and have not ended."""
        return self.triggered - self.completed - self.failed


@dataclass(frozen=True, slots=True)
class StatisticsHistory(StoredObject):
    """History of a job's checkpoints, of bounded size; see the module's docstring.

    Parameters
    ----------
    limit
        Number of ended checkpoints to keep; 0 for none.
    details
        The most participants and channels that are listed, over all entries.
    window
        Number of completed checkpoints in the summary; at least 1.
    entries
        Checkpoints in progress and the newest ended ones, by rising id.
    counts
        Counts of all checkpoints.
    samples
        Quantities of the checkpoints in the window, oldest first.
    newest_completed, newest_failed, newest_savepoint, newest_restored
        The checkpoints with the highest ids, without participants; the last one restored.
    dropped_up_to
        The highest id of an ended checkpoint that was dropped from `entries`.
    totals
        Sums over all checkpoints of sources, operators and sinks, by uid and by Flink's name of the metric:
        ``{"orders": {"numRecordsIn": 12}}``. The names in :data:`GAUGES` are current values instead.
    user_metrics
        Metrics of functions, by uid and name.

    Examples
    --------
    >>> from flinkish_spark.protocol.ids import CheckpointPurpose
    >>> from flinkish_spark.protocol.statistics import CheckpointDurations
    >>> begun = CheckpointStatistics.begin(CheckpointId(1), CheckpointPurpose.PERIODIC, trigger_at_ms=0)
    >>> history = StatisticsHistory().add_triggered(begun)
    >>> history.counts.in_progress
    1
    >>> done = begun.complete(CheckpointDurations(end_to_end_ms=80), rows=5, bytes_staged=100)
    >>> history.add_ended(done).summary()[Quantity.END_TO_END_MS].p99
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
        """Return the statistics of a checkpoint; None if it is unknown or was dropped."""
        return self.known.get(checkpoint)

    @property
    def known(self) -> dict[CheckpointId, CheckpointStatistics]:
        """The entries and the newest checkpoints, by id."""
        newest = (self.newest_completed, self.newest_failed, self.newest_savepoint)
        # The entries come last, since they have the details.
        return {one.checkpoint: one for one in (*newest, *self.entries) if one is not None}

    def list_values(self, quantity: Quantity) -> list[int]:
        """Return the measured values of a quantity over the window, oldest first."""
        at = list(Quantity).index(quantity)
        values = (sample[at] for sample in self.samples)
        return [value for value in values if value is not None]

    def summary(self) -> dict[Quantity, Summary]:
        """Return the summary over the window, without quantities that were never measured."""
        columns = {quantity: self.list_values(quantity) for quantity in Quantity}
        return {quantity: Summary.of(numbers) for quantity, numbers in columns.items() if numbers}

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
        spread = {name.value: one.to_json(digits=1) for name, one in self.summary().items()}
        if not spread:
            return shown
        rows = [(name, *one.values()) for name, one in spread.items()]
        columns = ("", *next(iter(spread.values())))
        return shown + html_table(rows, columns=columns, caption="Over the newest completed ones")

    def add_triggered(self, statistics: CheckpointStatistics) -> StatisticsHistory:
        """Note a checkpoint that has got its id."""
        if statistics.status is not CheckpointStatus.IN_PROGRESS:
            raise ValueError(
                f"checkpoint {statistics.checkpoint} is {statistics.status.value}, not triggered"
            )
        if self._is_known(statistics.checkpoint):
            raise ValueError(f"checkpoint {statistics.checkpoint} was triggered before")
        counts = replace(self.counts, triggered=self.counts.triggered + 1)
        return replace(self, entries=self._replace_entry(statistics), counts=counts)

    def add_ended(self, statistics: CheckpointStatistics) -> StatisticsHistory:
        """Note that a checkpoint has completed or failed.

        One that has ended before stays as it was: a recovery may finish a checkpoint twice. An unknown one
        counts as triggered, too: another process began it.
        """
        if statistics.status is CheckpointStatus.IN_PROGRESS:
            raise ValueError(f"checkpoint {statistics.checkpoint} has not ended")
        is_open = any(e.checkpoint == statistics.checkpoint for e in self.in_progress)
        if not is_open and self._is_known(statistics.checkpoint):
            return self
        counts = self.counts if is_open else replace(self.counts, triggered=self.counts.triggered + 1)
        entries = self._replace_entry(statistics)
        if statistics.status is CheckpointStatus.FAILED:
            newest = _choose_newer(self.newest_failed, statistics)
            counts = replace(counts, failed=counts.failed + 1)
            return replace(self, entries=entries, counts=counts, newest_failed=newest)._apply_limits()
        savepoint = self.newest_savepoint
        return replace(
            self,
            entries=entries,
            counts=replace(counts, completed=counts.completed + 1),
            samples=(*self.samples, make_sample(statistics))[-self.window :],
            newest_completed=_choose_newer(self.newest_completed, statistics),
            newest_savepoint=_choose_newer(savepoint, statistics)
            if statistics.purpose.is_savepoint
            else savepoint,
        )._apply_limits()

    def count_refused(self) -> StatisticsHistory:
        """Count a request that was refused before it got an id; not called for periodic requests."""
        return replace(self, counts=replace(self.counts, refused=self.counts.refused + 1))

    def add_restored(self, restored: RestoredCheckpoint) -> StatisticsHistory:
        """Note that a start restored a checkpoint."""
        counts = replace(self.counts, restored=self.counts.restored + 1)
        return replace(self, counts=counts, newest_restored=restored)

    def add_counts(self, more: Mapping[str, Mapping[str, int]]) -> StatisticsHistory:
        """Add a checkpoint's counts by uid and name to :attr:`totals`."""
        totals = {uid: dict(own) for uid, own in self.totals.items()}
        for uid, own in more.items():
            known = totals.setdefault(uid, {})
            for name, count in own.items():
                known[name] = count if name in GAUGES else known.get(name, 0) + count
        return replace(self, totals=totals)

    def _is_known(self, checkpoint: CheckpointId) -> bool:
        return checkpoint <= self.dropped_up_to or any(e.checkpoint == checkpoint for e in self.entries)

    def _replace_entry(self, statistics: CheckpointStatistics) -> tuple[CheckpointStatistics, ...]:
        others = (e for e in self.entries if e.checkpoint != statistics.checkpoint)
        return _sort_by_id((*others, statistics))

    def _apply_limits(self) -> StatisticsHistory:
        """Drop the oldest ended checkpoints beyond `limit`, and listed entries beyond `details`."""
        ended = [e for e in self.entries if e.status is not CheckpointStatus.IN_PROGRESS]
        kept = ended[max(0, len(ended) - self.limit) :]
        dropped = ended[: len(ended) - len(kept)]
        return replace(
            self,
            entries=_sort_by_id((*self.in_progress, *_limit_details(kept, self.details))),
            dropped_up_to=max([self.dropped_up_to, *(e.checkpoint for e in dropped)]),
        )


def _sort_by_id(entries: Iterable[CheckpointStatistics]) -> tuple[CheckpointStatistics, ...]:
    return tuple(sorted(entries, key=lambda e: e.checkpoint))


def _limit_details(ended: Sequence[CheckpointStatistics], details: int) -> Iterator[CheckpointStatistics]:
    """Yield checkpoints, the newest first, with at most `details` listed entries in all."""
    room = details
    for place, statistics in enumerate(reversed(ended)):
        kept = statistics.limit_details(room) if place == 0 else statistics
        count = kept.detail_count
        if count > room:
            yield kept.drop_details()
        else:
            room -= count
            yield kept


def _choose_newer(known: CheckpointStatistics | None, found: CheckpointStatistics) -> CheckpointStatistics:
    if known is not None and known.checkpoint > found.checkpoint:
        return known
    return found.drop_details()
