"""Measuring checkpoints while they run, and keeping the history where other processes can read it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flinkish_spark.contracts.sink import Committer
from flinkish_spark.contracts.source import Extent, SourceNode
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import CorruptObjectError, StoreError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.steps import Observer, SilentObserver, Step
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
from flinkish_spark.protocol.time_plan import counts_of, late_of
from flinkish_spark.protocol.user_metrics import UserMetrics, measured_after

LOG = logging.getLogger(__name__)
_NOTHING_MEASURED = CheckpointDurations()
#: A refused request costs a file of statistics at most this often.
_PAUSE_MS = 1_000

#: What a sink reported, and the monotonic milliseconds at which it was staged; None if it brought no
#: barrier, or an earlier process staged it.
_Reported = tuple[SinkAck, int | None]


@dataclass(slots=True)
class _Channel:
    barriers: int = 0
    rows: int | None = 0
    staged_ms: int | None = None


class Acknowledgements:
    """Who acknowledged a checkpoint in flight, when, and what each did; owned by the coordinator's thread.

    Operators and hooks report nothing but that they have acknowledged. A job may have thousands of
    participants and channels, so no more of them are looked at than are listed in the end.
    """

    def __init__(self, asked: Collection[Participant] = ()) -> None:
        self._asked = asked
        self._after_ms: dict[Participant, int] = {}
        #: What carried a barrier, and when it was staged.
        self._staged: list[tuple[StagedBatch, int]] = []

    def note(self, participants: Iterable[Participant], after_ms: int) -> None:
        for participant in participants:
            self._after_ms.setdefault(participant, after_ms)

    def note_hooks(self, after_ms: int) -> None:
        self.note((p for p in self._asked if p.kind is ParticipantKind.HOOK), after_ms)

    def note_staged(self, staged: StagedBatch, now_ms: int) -> None:
        self._staged.append((staged, now_ms))

    @property
    def alignment_ms(self) -> int | None:
        """From the first micro-batch with a barrier to the last; None for fewer than two."""
        return None if len(self._staged) < 2 else max(0, self._staged[-1][1] - self._staged[0][1])

    def of_failed(self, checkpoint: CheckpointId) -> Iterator[ParticipantStatistics]:
        """Yield who had not acknowledged, then who had, with the barriers that came."""
        reported = _by_sink(self._staged)
        for one in sorted(self._asked, key=lambda p: (p in self._after_ms, p.kind.value, p.uid)):
            seen = reported.get(one.uid, []) if one.kind is ParticipantKind.SINK else None
            yield ParticipantStatistics(
                one.uid,
                one.kind,
                is_acknowledged=one in self._after_ms,
                ack_ms=self._after_ms.get(one),
                sync_ms=_sync_ms_in(seen) if seen else None,
                barriers=None if seen is None else len(_rows_and_channels(checkpoint, seen)[1]),
                channels=() if seen is None else self._channels(checkpoint, seen),
            )

    def of_completed(
        self, decision: Decision, commit_ms: Mapping[str, int], at_most: int
    ) -> tuple[tuple[ParticipantStatistics, ...], int]:
        """Return what each participant did, and how many more channels there are; all have acknowledged."""
        checkpoint, unlisted = decision.checkpoint, 0
        staged_ms = {int(staged.batch): now_ms for staged, now_ms in self._staged}
        reported = _by_sink((batch, staged_ms.get(int(batch.batch))) for batch in decision.batches)
        known = self._after_ms or dict.fromkeys(_hooks_of(decision))
        of_sinks = {p.uid: after_ms for p, after_ms in known.items() if p.kind is ParticipantKind.SINK}
        others = [item for item in known.items() if item[0].kind is not ParticipantKind.SINK]
        room = at_most - len(reported) - len(others)
        result = []
        for uid, seen in reported.items():
            rows, shown = _rows_and_channels(checkpoint, seen)
            count = len(shown) if len(shown) < 2 else len(set(shown))
            fits = count <= room
            room, unlisted = (room - count, unlisted) if fits else (room, unlisted + count)
            result.append(
                ParticipantStatistics(
                    uid,
                    ParticipantKind.SINK,
                    ack_ms=of_sinks.get(uid),
                    rows=rows,
                    bytes=_bytes_in(seen),
                    sync_ms=_sync_ms_in(seen),
                    commit_ms=commit_ms.get(uid),
                    barriers=len(shown),
                    channels=self._channels(checkpoint, seen) if fits else (),
                )
            )
        late, counts = late_of(decision.batches), counts_of(decision.batches, decision.times)
        for one, after_ms in others:
            dropped = late.get(one.uid) if one.kind is ParticipantKind.OPERATOR else None
            counted = counts.get(one.uid, {}) if one.kind is ParticipantKind.OPERATOR else {}
            result.append(
                ParticipantStatistics(
                    one.uid, one.kind, ack_ms=after_ms, late_dropped=dropped, counts=counted
                )
            )
        return tuple(result), unlisted

    def _channels(self, checkpoint: CheckpointId, seen: Sequence[_Reported]) -> tuple[ChannelStatistics, ...]:
        channels: dict[int, _Channel] = {}
        for ack, staged_ms in seen:
            _add_channels(channels, checkpoint, ack, staged_ms)
        last_ms = self._staged[-1][1] if len(self._staged) > 1 else None
        return tuple(
            ChannelStatistics(
                str(number),
                one.barriers,
                one.rows,
                alignment_ms=None if last_ms is None or one.staged_ms is None else last_ms - one.staged_ms,
            )
            for number, one in sorted(channels.items())
        )


def _by_sink(batches: Iterable[tuple[StagedBatch, int | None]]) -> dict[str, list[_Reported]]:
    found: dict[str, list[_Reported]] = {}
    for staged, staged_ms in batches:
        for ack in staged.acks:
            found.setdefault(ack.sink, []).append((ack, staged_ms))
    return found


def _bytes_in(seen: Sequence[_Reported]) -> int | None:
    """Return what a sink staged; None if one of its micro-batches does not tell."""
    total = 0
    for ack, _ in seen:
        if ack.bytes is None:
            return None
        total += ack.bytes
    return total


def _sync_ms_in(seen: Sequence[_Reported]) -> int | None:
    return seen[-1][0].sync_ms


def _rows_and_channels(checkpoint: CheckpointId, seen: Sequence[_Reported]) -> tuple[int, list[int]]:
    """Return the rows that a sink reported, and the channel of every barrier of the checkpoint."""
    number, rows, channels = checkpoint.value, 0, []
    for ack, _ in seen:
        for task in ack.tasks:
            rows += task.rows
            for barrier in task.barriers:
                if barrier.checkpoint.value == number:
                    channels.append(barrier.channel)
    return rows, channels


def _add_channels(
    channels: dict[int, _Channel], checkpoint: CheckpointId, ack: SinkAck, staged_ms: int | None
) -> None:
    """Add what a sink reported of each channel with one micro-batch."""
    # A task that showed one channel's barrier read that channel and no other. Rows of a task that
    # showed none, or several, cannot be told apart.
    rows: dict[int, int] = {}
    is_told_apart = True
    for task in ack.tasks:
        shown = [barrier.channel for barrier in task.barriers if barrier.checkpoint == checkpoint]
        is_told_apart = is_told_apart and (len(shown) == 1 or not task.rows)
        for number in shown:
            rows[number] = rows.get(number, 0) + task.rows
            channel = channels.setdefault(number, _Channel())
            channel.barriers += 1
            channel.staged_ms = staged_ms
    for number, count in rows.items():
        channel = channels[number]
        channel.rows = channel.rows + count if is_told_apart and channel.rows is not None else None


def _hooks_of(decision: Decision) -> list[Participant]:
    """Return the hooks that a decision names; the operators of another process are not known."""
    return [Participant(ParticipantKind.HOOK, name) for name in sorted(decision.hook_states)]


@dataclass
class _Times:
    """Monotonic milliseconds at which one checkpoint came past; None where it did not yet."""

    requested: int
    wall: int
    acknowledgements: Acknowledgements
    offered: int | None = None
    staged: int | None = None
    sync_ms: int | None = None
    decided: int | None = None


class _CommitTimes:
    """Notes how long each sink takes to commit, of one checkpoint at a time, and tells another observer."""

    def __init__(self, clock: Clock, observer: Observer) -> None:
        self._clock, self._observer = clock, observer
        self._began_ms = 0
        self.took_ms: dict[str, int] = {}

    def before(self, step: Step, subject: str) -> None:
        self._began_ms = self._clock.monotonic_ms()
        self._observer.before(step, subject)

    def after(self, step: Step, subject: str) -> None:
        if step is Step.SINK_COMMIT:
            self.took_ms[subject] = self._clock.monotonic_ms() - self._began_ms
        self._observer.after(step, subject)


class UserMetricKeeper:
    """Keeps what functions have measured since the job began; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: UserMetrics = {}

    @property
    def now(self) -> UserMetrics:
        return self._now

    def begin(self, stored: UserMetrics) -> None:
        """Go on from what was stored; called when the process has become the job's owner."""
        with self._lock:
            self._now = stored

    def on_staged(self, measured: UserMetrics) -> None:
        if measured:
            with self._lock:
                self._now = measured_after(self._now, measured)


class _Counted:
    """Counts what went through with one checkpoint, by uid and Flink's name of the metric."""

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
        for uid, count in late_of(decision.batches).items():
            self.add(uid, "numLateRecordsDropped", count)

    def add_answers(self, uid: str, answers: Iterable[CommitAnswer]) -> None:
        names = {
            Outcome.COMMITTED: "successfulCommittables",
            Outcome.ALREADY_COMMITTED: "alreadyCommittedCommittables",
            Outcome.RETRY: "retriedCommittables",
            Outcome.LOST: "failedCommittables",
            Outcome.FENCED: "failedCommittables",
        }
        for answer in answers:
            self.add(uid, names[answer.outcome], 1)

    def add_read(self, extents: Mapping[str, Extent], begins: Mapping[str, int]) -> None:
        """Count what was read up to somewhere, and what of a bounded input is left behind that."""
        for uid, end in extents.items():
            self.add(uid, POSITION, end.records)
            if uid in begins:
                self.add(uid, "numRecordsIn", max(0, end.records - begins[uid]))
            if end.all_records is not None:
                self.add(uid, "pendingRecords", max(0, end.all_records - end.records))


class CheckpointTracker:
    """Notes what the coordinator's threads tell it; a store that refuses statistics is only logged."""

    def __init__(
        self,
        job_dir: JobDir,
        clock: Clock,
        sources: Sequence[SourceNode] = (),
        user_metrics: UserMetricKeeper | None = None,
    ) -> None:
        self._job_dir, self._clock, self._sources = job_dir, clock, tuple(sources)
        self._user_metrics = UserMetricKeeper() if user_metrics is None else user_metrics
        #: Returns how many records wait in front of sources, where Spark has looked.
        self.pending: Callable[[], Mapping[str, int]] = dict
        #: A job that begins with a savepoint has not read what lies before that.
        self._begins_at_savepoint = False
        #: Answers of committers to the checkpoint that is being confirmed.
        self._answers = _Counted()
        self._times: dict[CheckpointId, _Times] = {}
        self._commits = _CommitTimes(clock, SilentObserver())
        self._stored_ms = clock.monotonic_ms()
        self._lock = threading.Lock()
        self._history = self._stored()
        self._user_metrics.begin(self._history.user_metrics)

    def _stored(self) -> StatisticsHistory:
        try:
            return self._job_dir.statistics() or StatisticsHistory()
        except CorruptObjectError as error:
            LOG.warning("the statistics begin anew: %s", error)
            return StatisticsHistory()

    def settle(self) -> None:
        """End what an earlier start left in progress; called after each recovery."""
        # What was decided is confirmed by now, the other ids are sealed.
        for left in self._history.in_progress:
            decision = self._job_dir.decision(left.checkpoint)
            times = self._times.pop(left.checkpoint, None)
            known = Acknowledgements() if times is None else times.acknowledgements
            if decision is not None and decision.verdict is Verdict.COMMIT:
                self._count(decision)
                self._end(self._completed(left, decision, known, _NOTHING_MEASURED, {}))
            else:
                reason = CheckpointFailureReason.TASK_FAILED
                self._end(left.failed(reason, reason.text, None, tuple(known.of_failed(left.checkpoint))))

    @property
    def history(self) -> StatisticsHistory:
        return self._history

    @property
    def highest(self) -> CheckpointId:
        entries = [entry.checkpoint for entry in self._history.entries]
        return max([self._history.dropped_up_to, *entries])

    def triggered_at_ms(self, checkpoint: CheckpointId) -> int:
        times = self._times.get(checkpoint)
        return 0 if times is None else times.wall

    def triggered(
        self, checkpoint: CheckpointId, request: CheckpointRequest, asked: Collection[Participant] = ()
    ) -> None:
        """Note that a request got an id, and who has to acknowledge."""
        wall = self._clock.wall_ms()
        self._times[checkpoint] = _Times(request.asked_at_ms, wall, Acknowledgements(asked))
        begun = CheckpointStatistics.triggered(checkpoint, request.purpose, wall)
        with self._lock:
            self._history = self._history.triggered(begun)

    def offered(self, checkpoint: CheckpointId) -> None:
        times = self._times[checkpoint]
        times.offered = self._clock.monotonic_ms()
        times.acknowledgements.note_hooks(times.offered - times.requested)

    def staged(self, checkpoint: CheckpointId, staged: StagedBatch, sync_ms: int) -> None:
        times = self._times[checkpoint]
        times.staged, times.sync_ms = self._clock.monotonic_ms(), sync_ms
        times.acknowledgements.note_staged(staged, times.staged)

    def acknowledged(self, checkpoint: CheckpointId, participants: Iterable[Participant]) -> None:
        times = self._times[checkpoint]
        times.acknowledgements.note(participants, self._clock.monotonic_ms() - times.requested)

    def decided(self, checkpoint: CheckpointId) -> None:
        self._commits.took_ms = {}
        self._times[checkpoint].decided = self._clock.monotonic_ms()

    def answered(self, uid: str, answers: Iterable[CommitAnswer]) -> None:
        self._answers.add_answers(uid, answers)

    def timing(self, observer: Observer) -> Observer:
        self._commits = _CommitTimes(self._clock, observer)
        return self._commits

    def confirmed(self, decision: Decision) -> None:
        times = self._times.pop(decision.checkpoint)
        begun, durations = self._begun(decision.checkpoint), self._durations(times)
        commit_ms = self._commits.took_ms
        self._count(decision)
        self._end(self._completed(begun, decision, times.acknowledgements, durations, commit_ms))

    def failed(self, checkpoint: CheckpointId, reason: CheckpointFailureReason, text: str) -> None:
        times = self._times.pop(checkpoint, None)
        if times is not None:
            participants = tuple(times.acknowledgements.of_failed(checkpoint))
            self._end(self._begun(checkpoint).failed(reason, text, self._durations(times), participants))

    def refused(self) -> None:
        """Note a request that never got an id; of many in a row, some are stored with what is stored next."""
        with self._lock:
            self._history = self._history.refused()
        if self._clock.monotonic_ms() - self._stored_ms >= _PAUSE_MS:
            self.store()

    def goes_on_behind(self, decision: Decision) -> None:
        """Note behind which checkpoint a start goes on: behind a rewind, records are read once more."""
        try:
            counted = _Counted()
            counted.add_read(self._extents(decision.offsets_text), {})
        except Exception as error:
            LOG.warning("what sources read once more is not counted: %s", error)
            return
        with self._lock:
            self._history = self._history.counted(counted.by_uid)

    def restored(self, checkpoint: CheckpointId, path: str = "") -> None:
        """Note that a start goes on from a checkpoint, or from a savepoint at `path`."""
        self._begins_at_savepoint = bool(path)
        with self._lock:
            restored = RestoredCheckpoint(checkpoint, self._clock.wall_ms(), path)
            self._history = self._history.restored(restored)
        self.store()

    def store(self) -> None:
        """Store the history; called when the coordinator ends, too."""
        self._stored_ms = self._clock.monotonic_ms()
        try:
            self._job_dir.put_statistics(self._history)
        except StoreError as error:
            LOG.warning("the statistics are not stored: %s", error)

    # -- inside ---------------------------------------------------------------------------------
    def _count(self, decision: Decision) -> None:
        """Add what went through with a checkpoint that is confirmed to the job's totals."""
        counted, self._answers = self._answers, _Counted()
        counted.add_decided(decision)
        for batch in decision.batches:
            for committable in batch.committables:
                counted.add(committable.sink, "totalCommittables", 1)
        try:
            # Both may ask what is not ours: a source of the user's, and Spark.
            counted.add_read(self._extents(decision.offsets_text), self._counted_upto())
            for uid, count in self.pending().items():
                counted.add(uid, "pendingRecords", count)
        except Exception as error:
            LOG.warning("what sources have read is not counted for %s: %s", decision.checkpoint, error)
        with self._lock:
            self._history = self._history.counted(counted.by_uid)

    def _counted_upto(self) -> dict[str, int]:
        """Return up to where the records of each source are counted."""
        known = {uid: own[POSITION] for uid, own in self._history.totals.items() if POSITION in own}
        if self._begins_at_savepoint:
            return known
        return {uid: one.records for uid, one in self._extents("").items()} | known

    def _extents(self, offsets_text: str) -> dict[str, Extent]:
        position = LoggedOffsets.parse(offsets_text) if offsets_text else None
        found = {node.uid: node.source.extent(position) for node in self._sources}
        return {uid: extent for uid, extent in found.items() if extent is not None}

    def _begun(self, checkpoint: CheckpointId) -> CheckpointStatistics:
        found = self._history.find(checkpoint)
        assert found is not None, "only a triggered checkpoint ends"
        return found

    def _completed(
        self,
        begun: CheckpointStatistics,
        decision: Decision,
        known: Acknowledgements,
        durations: CheckpointDurations,
        commit_ms: Mapping[str, int],
    ) -> CheckpointStatistics:
        participants, unlisted = known.of_completed(decision, commit_ms, self._history.details)
        sinks = [one for one in participants if one.kind is ParticipantKind.SINK]
        sizes = [one.bytes for one in sinks if one.bytes is not None]
        return begun.completed(
            _aligned(decision, durations),
            rows=sum(one.rows or 0 for one in sinks),
            # The sum of some is not what all of them staged.
            bytes_staged=sum(sizes) if sinks and len(sizes) == len(sinks) else None,
            participants=participants,
            unlisted=unlisted,
        )

    def _durations(self, times: _Times) -> CheckpointDurations:
        now_ms = self._clock.monotonic_ms()
        return CheckpointDurations(
            trigger_ms=_between(times.requested, times.offered),
            alignment_ms=times.acknowledgements.alignment_ms,
            sync_ms=times.sync_ms,
            async_ms=_between(times.staged, times.decided),
            commit_ms=_between(times.decided, now_ms),
            end_to_end_ms=now_ms - times.requested,
        )

    def _end(self, statistics: CheckpointStatistics) -> None:
        with self._lock:
            self._history = replace(self._history.ended(statistics), user_metrics=self._user_metrics.now)
        self.store()


def _between(begin: int | None, end: int | None) -> int | None:
    return None if begin is None or end is None else max(0, end - begin)


def _aligned(decision: Decision, durations: CheckpointDurations) -> CheckpointDurations:
    """Return the durations with the alignment of the upstream's cut, if the checkpoint is one with it."""
    cut = slowest_cut(decision.offsets_text)
    if cut is None:
        return durations
    return replace(durations, start_delay_ms=cut.start_delay_ms, alignment_ms=cut.alignment_ms)


_Key = tuple[Lineage, BatchId]


@dataclass(frozen=True, slots=True)
class StagedAge:
    """Data that a sink has staged and not committed."""

    sink: str
    #: The oldest micro-batch of which the sink holds something.
    batch: BatchId
    age_ms: int
    #: From then on it can be committed for so long, such as a transaction's timeout.
    lifetime_ms: int

    @property
    def is_half_over(self) -> bool:
        return 2 * self.age_ms >= self.lifetime_ms

    def __str__(self) -> str:
        return (
            f"what sink '{self.sink}' staged in micro-batch {self.batch} is {self.age_ms} ms old and not "
            f"committed; {self.lifetime_ms} ms after its staging the system drops it, and the job has to go "
            "back to its last checkpoint"
        )


class StagedAges:
    """Says once per sink and epoch that staged data grows old; of one coordinator, in its thread.

    An age counts from when the staging began, by the wall clock, so that what a restart found counts too.
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
