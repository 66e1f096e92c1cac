"""Measuring checkpoints while they run, and keeping the history where other processes can read it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from flinkish_spark.clock import Clock
from flinkish_spark.errors import CorruptObjectError, StoreError
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.checkpoint import Participant, ParticipantKind
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.requests import CheckpointRequest
from flinkish_spark.protocol.statistics import CheckpointDurations, CheckpointStatistics
from flinkish_spark.protocol.statistics_history import RestoredCheckpoint, StatisticsHistory
from flinkish_spark.runtime.acknowledgements import Acknowledgements
from flinkish_spark.runtime.steps import Observer, SilentObserver, Step

LOG = logging.getLogger(__name__)
_NOTHING_MEASURED = CheckpointDurations()


#: A refused request costs a file of statistics at most this often.
_PAUSE_MS = 1_000


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
    """An observer of confirmations that notes how long each sink takes to commit, and tells another.

    Confirmations come one after the other, so it holds those of one checkpoint.
    """

    def __init__(self, clock: Clock, observer: Observer) -> None:
        self._clock, self._observer = clock, observer
        self._began_ms = 0
        self.took_ms: dict[str, int] = {}

    def before(self, step: Step, subject: str) -> None:
        """Note when a sink begins."""
        self._began_ms = self._clock.monotonic_ms()
        self._observer.before(step, subject)

    def after(self, step: Step, subject: str) -> None:
        """Note how long it took."""
        if step is Step.SINK_COMMIT:
            self.took_ms[subject] = self._clock.monotonic_ms() - self._began_ms
        self._observer.after(step, subject)


class CheckpointTracker:
    """Notes what the coordinator's threads tell it; lives as long as the process owns the job.

    Statistics decide nothing, so a store that refuses them is only logged.
    """

    def __init__(self, job_dir: JobDir, clock: Clock) -> None:
        self._job_dir, self._clock = job_dir, clock
        self._times: dict[CheckpointId, _Times] = {}
        self._commits = _CommitTimes(clock, SilentObserver())
        self._stored_ms = clock.monotonic_ms()
        self._lock = threading.Lock()
        self._history = self._stored()

    def _stored(self) -> StatisticsHistory:
        try:
            return self._job_dir.statistics() or StatisticsHistory()
        except CorruptObjectError as error:
            LOG.warning("the statistics begin anew: %s", error)
            return StatisticsHistory()

    def settle(self) -> None:
        """End what an earlier start left in progress; called after each recovery.

        What was decided is confirmed by now, the other ids are sealed.
        """
        for left in self._history.in_progress:
            decision = self._job_dir.decision(left.checkpoint)
            times = self._times.pop(left.checkpoint, None)
            known = Acknowledgements() if times is None else times.acknowledgements
            if decision is not None and decision.verdict is Verdict.COMMIT:
                self._end(self._completed(left, decision, known, _NOTHING_MEASURED, {}))
            else:
                reason = CheckpointFailureReason.TASK_FAILED
                self._end(left.failed(reason, reason.text, None, tuple(known.of_failed(left.checkpoint))))

    @property
    def history(self) -> StatisticsHistory:
        """Return the history as of now."""
        return self._history

    @property
    def highest(self) -> CheckpointId:
        """Return the highest id that the history knows of; 0 for none."""
        entries = [entry.checkpoint for entry in self._history.entries]
        return max([self._history.dropped_up_to, *entries])

    def triggered_at_ms(self, checkpoint: CheckpointId) -> int:
        """Return the wall-clock time of its trigger; 0 if it is unknown."""
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
        """Note that its barrier may go out; with that, every hook has acknowledged."""
        times = self._times[checkpoint]
        times.offered = self._clock.monotonic_ms()
        times.acknowledgements.note_hooks(times.offered - times.requested)

    def staged(self, checkpoint: CheckpointId, staged: StagedBatch, sync_ms: int) -> None:
        """Note a micro-batch that carried a barrier of it."""
        times = self._times[checkpoint]
        times.staged, times.sync_ms = self._clock.monotonic_ms(), sync_ms
        times.acknowledgements.note_staged(staged, times.staged)

    def acknowledged(self, checkpoint: CheckpointId, participants: Iterable[Participant]) -> None:
        """Note who acknowledged with the micro-batch that :meth:`staged` was told of last."""
        times = self._times[checkpoint]
        times.acknowledgements.note(participants, self._clock.monotonic_ms() - times.requested)

    def decided(self, checkpoint: CheckpointId) -> None:
        """Note its decision; what is committed from now on is its."""
        self._commits.took_ms = {}
        self._times[checkpoint].decided = self._clock.monotonic_ms()

    def timing(self, observer: Observer) -> Observer:
        """Return what a confirmation reports to, so that the commits of sinks are measured."""
        self._commits = _CommitTimes(self._clock, observer)
        return self._commits

    def confirmed(self, decision: Decision) -> None:
        """Note its receipt, and store the history."""
        times = self._times.pop(decision.checkpoint)
        begun, durations = self._begun(decision.checkpoint), self._durations(times)
        commit_ms = self._commits.took_ms
        self._end(self._completed(begun, decision, times.acknowledgements, durations, commit_ms))

    def failed(self, checkpoint: CheckpointId, reason: CheckpointFailureReason, text: str) -> None:
        """Note that it ended without completing and who had acknowledged, and store the history."""
        times = self._times.pop(checkpoint, None)
        if times is not None:
            participants = tuple(times.acknowledgements.of_failed(checkpoint))
            self._end(self._begun(checkpoint).failed(reason, text, self._durations(times), participants))

    def refused(self) -> None:
        """Note a request that never got an id.

        Stored at once, or if many come in a row, with what is stored next; see :meth:`store`.
        """
        with self._lock:
            self._history = self._history.refused()
        if self._clock.monotonic_ms() - self._stored_ms >= _PAUSE_MS:
            self.store()

    def restored(self, checkpoint: CheckpointId, path: str = "") -> None:
        """Note that a start goes on from a checkpoint, or from a savepoint at `path`."""
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
            self._history = self._history.ended(statistics)
        self.store()


def _between(begin: int | None, end: int | None) -> int | None:
    return None if begin is None or end is None else max(0, end - begin)


def _aligned(decision: Decision, durations: CheckpointDurations) -> CheckpointDurations:
    """Return the durations with the alignment of the upstream's cut, if the checkpoint is one with it."""
    # Here and not above: with it comes the Kafka client, which jobs without Kafka can do without.
    from flinkish_spark.chaining.cuts import slowest_cut

    cut = slowest_cut(decision.offsets_text)
    if cut is None:
        return durations
    return replace(durations, start_delay_ms=cut.start_delay_ms, alignment_ms=cut.alignment_ms)
