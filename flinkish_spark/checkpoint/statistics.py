"""Statistics of checkpoints: measured while they run, stored for other processes to read."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flinkish_spark.checkpoint.series import SeriesKeeper
from flinkish_spark.contracts.sink import Committer
from flinkish_spark.contracts.source import Extent, SourceNode
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import CorruptObjectError, StoreError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.upstream_cut import slowest_cut
from flinkish_spark.protocol.checkpoint import CheckpointRequest, Participant, ParticipantKind
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.records import CommitAnswer, Outcome, SinkAck, StagedBatch
from flinkish_spark.protocol.statistics import (
    POSITION,
    ChannelStatistics,
    CheckpointDurations,
    CheckpointStatistics,
    ParticipantStatistics,
    RestoredCheckpoint,
    StatisticsHistory,
)
from flinkish_spark.protocol.time_plan import sum_counts, sum_late_records
from flinkish_spark.protocol.user_metrics import UserMetrics, update_metrics

LOG = logging.getLogger(__name__)
_NOTHING_MEASURED = CheckpointDurations()
#: A refused request costs a file of statistics at most this often.
_PAUSE_MS = 1_000

#: A sink's acknowledgement, and the monotonic time in ms at which its micro-batch was staged; None if that
#: carried no barrier, or an earlier process staged it.
_Reported = tuple[SinkAck, int | None]


class Acknowledgements:
    """The acknowledgements of a checkpoint in flight; used by the coordinator's thread.

    Operators and hooks report only that they have acknowledged. A job may have thousands of participants
    and channels, so only those that are listed in the end are counted one by one.
    """

    def __init__(self, asked: Collection[Participant] = (), requested_ms: int = 0, wall_ms: int = 0) -> None:
        self.asked, self.requested_ms, self.wall_ms = asked, requested_ms, wall_ms
        #: Monotonic times; None for steps that have not happened yet.
        self.offered_ms: int | None = None
        self.decided_ms: int | None = None
        self.sync_ms: int | None = None
        self._after_ms: dict[Participant, int] = {}
        #: The micro-batches that carried a barrier, and when each was staged.
        self._staged: list[tuple[StagedBatch, int]] = []

    def note(self, participants: Iterable[Participant], after_ms: int) -> None:
        for participant in participants:
            self._after_ms.setdefault(participant, after_ms)

    def note_staged(self, staged: StagedBatch, now_ms: int) -> None:
        self._staged.append((staged, now_ms))

    def durations(self, now_ms: int) -> CheckpointDurations:
        """Return the durations of the steps so far; no alignment for fewer than two micro-batches."""
        first_ms, last_ms = (self._staged[at][1] if self._staged else None for at in (0, -1))
        return CheckpointDurations(
            trigger_ms=_measure(self.requested_ms, self.offered_ms),
            alignment_ms=_measure(first_ms, last_ms) if len(self._staged) > 1 else None,
            sync_ms=self.sync_ms,
            async_ms=_measure(last_ms, self.decided_ms),
            commit_ms=_measure(self.decided_ms, now_ms),
            end_to_end_ms=now_ms - self.requested_ms,
        )

    def describe_failed(self, checkpoint: CheckpointId) -> Iterator[ParticipantStatistics]:
        """Yield the participants, those without acknowledgement first, with their barriers."""
        reported = _group_by_sink(self._staged)
        for one in sorted(self.asked, key=lambda p: (p in self._after_ms, p.kind.value, p.uid)):
            seen = reported.get(one.uid, []) if one.kind is ParticipantKind.SINK else None
            yield ParticipantStatistics(
                one.uid,
                one.kind,
                is_acknowledged=one in self._after_ms,
                ack_ms=self._after_ms.get(one),
                sync_ms=seen[-1][0].sync_ms if seen else None,
                barriers=None if seen is None else len(_find_shown_channels(checkpoint, seen)),
                channels=() if seen is None else self._channels(checkpoint, seen),
            )

    def describe_completed(
        self, decision: Decision, commit_ms: Mapping[str, int], at_most: int
    ) -> tuple[tuple[ParticipantStatistics, ...], int]:
        """Return the statistics of all participants, and how many channels are not listed in them."""
        checkpoint, unlisted = decision.checkpoint, 0
        staged_ms = {int(staged.batch): now_ms for staged, now_ms in self._staged}
        reported = _group_by_sink((batch, staged_ms.get(int(batch.batch))) for batch in decision.batches)
        # If another process took the checkpoint, only its hooks are known.
        hooks = [Participant(ParticipantKind.HOOK, name) for name in sorted(decision.hook_states)]
        known = self._after_ms or dict.fromkeys(hooks)
        of_sinks = {p.uid: after_ms for p, after_ms in known.items() if p.kind is ParticipantKind.SINK}
        others = [item for item in known.items() if item[0].kind is not ParticipantKind.SINK]
        room = at_most - len(reported) - len(others)
        result = []
        for uid, seen in reported.items():
            shown = _find_shown_channels(checkpoint, seen)
            count = len(shown) if len(shown) < 2 else len(set(shown))
            fits, sizes = count <= room, [ack.bytes for ack, _ in seen]
            room, unlisted = (room - count, unlisted) if fits else (room, unlisted + count)
            result.append(
                ParticipantStatistics(
                    uid,
                    ParticipantKind.SINK,
                    ack_ms=of_sinks.get(uid),
                    rows=sum(ack.rows for ack, _ in seen),
                    # Unknown if one of them is.
                    bytes=None if None in sizes else sum(size or 0 for size in sizes),
                    sync_ms=seen[-1][0].sync_ms,
                    commit_ms=commit_ms.get(uid),
                    barriers=len(shown),
                    channels=self._channels(checkpoint, seen) if fits else (),
                )
            )
        late, counts = sum_late_records(decision.batches), sum_counts(decision.batches, decision.times)
        for one, after_ms in others:
            statistics = ParticipantStatistics(one.uid, one.kind, ack_ms=after_ms)
            if one.kind is ParticipantKind.OPERATOR and (one.uid in late or one.uid in counts):
                dropped, counted = late.get(one.uid), counts.get(one.uid, {})
                statistics = replace(statistics, late_dropped=dropped, counts=counted)
            result.append(statistics)
        return tuple(result), unlisted

    def _channels(self, checkpoint: CheckpointId, seen: Sequence[_Reported]) -> tuple[ChannelStatistics, ...]:
        barriers, number = Counter[int](), checkpoint.value
        rows: dict[int, int | None] = {}
        staged_at: dict[int, int | None] = {}
        for ack, staged_ms in seen:
            shown = [
                (task.rows, [one.channel for one in task.barriers if one.checkpoint.value == number])
                for task in ack.tasks
            ]
            # A task with the barrier of one channel read only that channel. The channels of a task with none
            # or several barriers share one row count.
            is_told_apart = all(len(channels) == 1 or not count for count, channels in shown)
            for count, channels in shown:
                for channel in channels:
                    known = rows.get(channel, 0)
                    rows[channel] = known + count if is_told_apart and known is not None else None
                    staged_at[channel] = staged_ms
                    barriers[channel] += 1
        last_ms = self._staged[-1][1] if len(self._staged) > 1 else None
        return tuple(
            ChannelStatistics(
                str(channel), count, rows[channel], alignment_ms=_measure(staged_at[channel], last_ms)
            )
            for channel, count in sorted(barriers.items())
        )


def _group_by_sink(batches: Iterable[tuple[StagedBatch, int | None]]) -> dict[str, list[_Reported]]:
    found: dict[str, list[_Reported]] = {}
    for staged, staged_ms in batches:
        for ack in staged.acks:
            found.setdefault(ack.sink, []).append((ack, staged_ms))
    return found


def _find_shown_channels(checkpoint: CheckpointId, seen: Sequence[_Reported]) -> list[int]:
    number = checkpoint.value
    barriers = (barrier for ack, _ in seen for task in ack.tasks for barrier in task.barriers)
    return [barrier.channel for barrier in barriers if barrier.checkpoint.value == number]


class UserMetricKeeper:
    """Keeps the metrics of user functions since the job's first start; any thread may read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now: UserMetrics = {}

    def begin(self, stored: UserMetrics) -> None:
        """Go on from the stored metrics; called when the process has become the job's owner."""
        with self._lock:
            self.now = stored

    def on_staged(self, measured: UserMetrics) -> None:
        if measured:
            with self._lock:
                self.now = update_metrics(self.now, measured)


_ANSWERS = {
    Outcome.COMMITTED: "successfulCommittables",
    Outcome.ALREADY_COMMITTED: "alreadyCommittedCommittables",
    Outcome.RETRY: "retriedCommittables",
    Outcome.LOST: "failedCommittables",
    Outcome.FENCED: "failedCommittables",
}


class _CheckpointCounts:
    """Counts of one checkpoint, by uid and Flink's name of the metric."""

    def __init__(self) -> None:
        self.by_uid: dict[str, dict[str, int]] = {}

    def add(self, uid: str, name: str, count: int) -> None:
        own = self.by_uid.setdefault(uid, {})
        own[name] = own.get(name, 0) + count

    def add_decided(self, decision: Decision) -> None:
        for batch in decision.batches:
            for ack in batch.acks:
                self.add(ack.sink, "numRecordsOut", ack.rows)
                if ack.bytes is not None:
                    self.add(ack.sink, "numBytesOut", ack.bytes)
            for committable in batch.committables:
                self.add(committable.sink, "totalCommittables", 1)
        for uid, count in sum_late_records(decision.batches).items():
            self.add(uid, "numLateRecordsDropped", count)

    def add_read(self, extents: Mapping[str, Extent], begins: Mapping[str, int]) -> None:
        """Count the records read since `begins`, and of bounded inputs those that are left."""
        for uid, end in extents.items():
            self.add(uid, POSITION, end.records)
            if uid in begins:
                self.add(uid, "numRecordsIn", max(0, end.records - begins[uid]))
            if end.all_records is not None:
                self.add(uid, "pendingRecords", max(0, end.all_records - end.records))


@dataclass(frozen=True)
class PendingRecords:
    """Numbers of records that are there and not read yet."""

    by_source: Mapping[str, int] = field(default_factory=dict)
    #: In the partition with the most; None if unknown.
    worst_partition: int | None = None


class CheckpointTracker:
    """Collects statistics from the coordinator's threads; a failure to store them is only logged."""

    def __init__(
        self,
        job_dir: JobDir,
        clock: Clock,
        sources: Sequence[SourceNode] = (),
        user_metrics: UserMetricKeeper | None = None,
    ) -> None:
        self._job_dir, self._clock, self._sources = job_dir, clock, tuple(sources)
        self._user_metrics = UserMetricKeeper() if user_metrics is None else user_metrics
        #: Returns the records that sources have not read yet, as far as Spark knows.
        self.pending: Callable[[], PendingRecords] = PendingRecords
        #: Whether the job began with a savepoint, so that it has not read the earlier records.
        self._begins_at_savepoint = False
        #: Answers of committers for the checkpoint that is being confirmed.
        self._answers = _CheckpointCounts()
        self._times: dict[CheckpointId, Acknowledgements] = {}
        #: How long each sink took to commit the present checkpoint.
        self._commit_ms: dict[str, int] = {}
        self._stored_ms = clock.monotonic_ms()
        self._lock = threading.Lock()
        self._history = self._load()
        self._user_metrics.begin(self._history.user_metrics)
        self._series = SeriesKeeper(job_dir, clock)

    def _load(self) -> StatisticsHistory:
        try:
            return self._job_dir.statistics() or StatisticsHistory()
        except CorruptObjectError as error:
            LOG.warning("the statistics begin anew: %s", error)
            return StatisticsHistory()

    def settle(self) -> None:
        """End the checkpoints that an earlier start left in progress; called after each recovery."""
        # The recovery has confirmed the decided ones and sealed the others.
        for left in self._history.in_progress:
            decision = self._job_dir.decision(left.checkpoint)
            known = self._times.pop(left.checkpoint, Acknowledgements())
            if decision is not None and decision.verdict is Verdict.COMMIT:
                self._count(decision)
                self._end(self._complete(left, decision, known, _NOTHING_MEASURED, {}))
            else:
                reason = CheckpointFailureReason.TASK_FAILED
                self._end(left.fail(reason, reason.text, None, tuple(known.describe_failed(left.checkpoint))))

    @property
    def history(self) -> StatisticsHistory:
        return self._history

    @property
    def highest(self) -> CheckpointId:
        entries = [entry.checkpoint for entry in self._history.entries]
        return max([self._history.dropped_up_to, *entries])

    def find_trigger_time_ms(self, checkpoint: CheckpointId) -> int:
        times = self._times.get(checkpoint)
        return 0 if times is None else times.wall_ms

    def on_triggered(
        self, checkpoint: CheckpointId, request: CheckpointRequest, asked: Collection[Participant] = ()
    ) -> None:
        """Note that a request got an id, and its participants."""
        wall = self._clock.wall_ms()
        self._times[checkpoint] = Acknowledgements(asked, request.asked_at_ms, wall)
        begun = CheckpointStatistics.begin(checkpoint, request.purpose, wall)
        with self._lock:
            self._history = self._history.add_triggered(begun)

    def on_offered(self, checkpoint: CheckpointId) -> None:
        times = self._times[checkpoint]
        times.offered_ms = self._clock.monotonic_ms()
        hooks = (one for one in times.asked if one.kind is ParticipantKind.HOOK)
        times.note(hooks, times.offered_ms - times.requested_ms)

    def on_staged(self, checkpoint: CheckpointId, staged: StagedBatch, sync_ms: int) -> None:
        times = self._times[checkpoint]
        times.sync_ms = sync_ms
        times.note_staged(staged, self._clock.monotonic_ms())

    def on_acknowledged(self, checkpoint: CheckpointId, participants: Iterable[Participant]) -> None:
        times = self._times[checkpoint]
        times.note(participants, self._clock.monotonic_ms() - times.requested_ms)

    def on_decided(self, checkpoint: CheckpointId) -> None:
        self._commit_ms = {}
        self._times[checkpoint].decided_ms = self._clock.monotonic_ms()

    def on_answers(self, uid: str, answers: Iterable[CommitAnswer]) -> None:
        for answer in answers:
            self._answers.add(uid, _ANSWERS[answer.outcome], 1)

    def on_committed(self, uid: str, took_ms: int) -> None:
        self._commit_ms[uid] = took_ms

    def on_confirmed(self, decision: Decision) -> None:
        times = self._times.pop(decision.checkpoint)
        begun, durations = self._find_begun(decision.checkpoint), times.durations(self._clock.monotonic_ms())
        counts, worst_lag = self._count(decision)
        self._series.on_confirmed(counts, worst_lag, durations.end_to_end_ms or 0)
        self._end(self._complete(begun, decision, times, durations, self._commit_ms))

    def on_failed(self, checkpoint: CheckpointId, reason: CheckpointFailureReason, text: str) -> None:
        times = self._times.pop(checkpoint, None)
        if times is not None:
            durations, participants = (
                times.durations(self._clock.monotonic_ms()),
                times.describe_failed(checkpoint),
            )
            self._end(self._find_begun(checkpoint).fail(reason, text, durations, tuple(participants)))

    def on_refused(self) -> None:
        """Count a request that got no id; stored at most once a second, else with the next change."""
        with self._lock:
            self._history = self._history.count_refused()
        if self._clock.monotonic_ms() - self._stored_ms >= _PAUSE_MS:
            self.store()

    def on_start_after(self, decision: Decision) -> None:
        """Set the positions of sources to the checkpoint that a start goes on from."""
        try:
            counted = _CheckpointCounts()
            counted.add_read(self._extents(decision.offsets_text), {})
        except Exception as error:
            LOG.warning("records that sources read again are not counted: %s", error)
            return
        with self._lock:
            self._history = self._history.add_counts(counted.by_uid)

    def on_restored(self, checkpoint: CheckpointId, path: str = "") -> None:
        """Note the checkpoint, or the savepoint at `path`, that a start goes on from."""
        self._begins_at_savepoint = bool(path)
        with self._lock:
            restored = RestoredCheckpoint(checkpoint, self._clock.wall_ms(), path)
            self._history = self._history.add_restored(restored)
        self._series.on_start()
        self.store()

    def store(self, is_last: bool = False) -> None:
        """Store the history, and the lines over time if it is time; called when the coordinator ends, too."""
        self._stored_ms = self._clock.monotonic_ms()
        try:
            self._job_dir.put_statistics(self._history)
        except StoreError as error:
            # Without another try of a store that does not answer.
            LOG.warning("the statistics are not stored: %s", error)
        else:
            self._series.store(is_last)

    def _count(self, decision: Decision) -> tuple[Mapping[str, Mapping[str, int]], int | None]:
        """Add a confirmed checkpoint's counts to the totals; return them, and the worst partition's lag."""
        counted, self._answers = self._answers, _CheckpointCounts()
        worst_lag = None
        counted.add_decided(decision)
        try:
            # Both call foreign code: a source of the user's, and Spark.
            totals = self._history.totals
            upto = {uid: own[POSITION] for uid, own in totals.items() if POSITION in own}
            if not self._begins_at_savepoint:
                upto = {uid: one.records for uid, one in self._extents("").items()} | upto
            counted.add_read(self._extents(decision.offsets_text), upto)
            pending = self.pending()
            for uid, count in pending.by_source.items():
                counted.add(uid, "pendingRecords", count)
            worst_lag = pending.worst_partition
        except Exception as error:
            LOG.warning("records of checkpoint %s are not counted: %s", decision.checkpoint, error)
        with self._lock:
            self._history = self._history.add_counts(counted.by_uid)
        return counted.by_uid, worst_lag

    def _extents(self, offsets_text: str) -> dict[str, Extent]:
        position = LoggedOffsets.parse(offsets_text) if offsets_text else None
        found = {node.uid: node.source.extent(position) for node in self._sources}
        return {uid: extent for uid, extent in found.items() if extent is not None}

    def _find_begun(self, checkpoint: CheckpointId) -> CheckpointStatistics:
        found = self._history.find(checkpoint)
        assert found is not None, "only a triggered checkpoint ends"
        return found

    def _complete(
        self,
        begun: CheckpointStatistics,
        decision: Decision,
        known: Acknowledgements,
        durations: CheckpointDurations,
        commit_ms: Mapping[str, int],
    ) -> CheckpointStatistics:
        cut = slowest_cut(decision.offsets_text)
        if cut is not None:
            # The checkpoint is aligned with one of an upstream job.
            durations = replace(durations, start_delay_ms=cut.start_delay_ms, alignment_ms=cut.alignment_ms)
        participants, unlisted = known.describe_completed(decision, commit_ms, self._history.details)
        sinks = [one for one in participants if one.kind is ParticipantKind.SINK]
        sizes = [one.bytes for one in sinks if one.bytes is not None]
        return begun.complete(
            durations,
            rows=sum(one.rows or 0 for one in sinks),
            # Unknown if one of them is.
            bytes_staged=sum(sizes) if sinks and len(sizes) == len(sinks) else None,
            participants=participants,
            unlisted=unlisted,
        )

    def _end(self, statistics: CheckpointStatistics) -> None:
        with self._lock:
            self._history = replace(self._history.add_ended(statistics), user_metrics=self._user_metrics.now)
        self.store()


def _measure(begin: int | None, end: int | None) -> int | None:
    return None if begin is None or end is None else max(0, end - begin)


_Key = tuple[Lineage, BatchId]


@dataclass(frozen=True, slots=True)
class StagedAge:
    sink: str
    #: The oldest micro-batch of which the sink holds something.
    batch: BatchId
    age_ms: int
    #: How long after its staging it can be committed, such as a transaction's timeout.
    lifetime_ms: int

    def __str__(self) -> str:
        return (
            f"data that sink '{self.sink}' staged in micro-batch {self.batch} is {self.age_ms} ms old and "
            f"not committed; the system drops it {self.lifetime_ms} ms after staging, and then the job has "
            "to go back to its last checkpoint"
        )


class StagedAges:
    """Warns once per sink and epoch that staged data grows old; used by the coordinator's thread.

    An age counts from the wall-clock begin of the staging, so that it goes on over a restart.
    """

    def __init__(
        self, committers: Mapping[str, Committer], clock: Clock, tell: Callable[[StagedAge], None]
    ) -> None:
        lifetimes = {uid: committer.staged_lifetime_ms for uid, committer in committers.items()}
        self._lifetimes = {uid: ms for uid, ms in lifetimes.items() if ms is not None}
        self._clock, self._tell = clock, tell
        #: When the staging of each began, in monotonic milliseconds.
        self._began_ms: dict[_Key, int] = {}
        #: By sink, the oldest micro-batch for which the warning was given.
        self._said: dict[str, _Key] = {}

    def check(self, waiting: Sequence[StagedBatch]) -> None:
        """Check the micro-batches that are staged and not confirmed, in order; called often."""
        if not waiting or not self._lifetimes:
            self._began_ms.clear()
            return
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        began = {}
        for staged in waiting:
            age_ms = 0 if staged.began_at_ms is None else max(0, wall_ms - staged.began_at_ms)
            began[_key(staged)] = self._began_ms.get(_key(staged), now_ms - age_ms)
        self._began_ms = began
        for uid, lifetime_ms in self._lifetimes.items():
            oldest = next((s for s in waiting if any(c.sink == uid for c in s.committables)), None)
            if oldest is None or self._said.get(uid) == _key(oldest):
                continue
            found = StagedAge(uid, oldest.batch, now_ms - began[_key(oldest)], lifetime_ms)
            if 2 * found.age_ms >= lifetime_ms:
                self._said[uid] = _key(oldest)
                LOG.warning("%s", found)
                self._tell(found)


def _key(staged: StagedBatch) -> _Key:
    return (staged.lineage, staged.batch)
