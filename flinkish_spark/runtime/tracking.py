"""Measuring checkpoints while they run, and keeping the history where other processes can read it."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from flinkish_spark.clock import Clock
from flinkish_spark.errors import CorruptObjectError, StoreError
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import SinkAck, StagedBatch
from flinkish_spark.protocol.requests import CheckpointRequest
from flinkish_spark.protocol.statistics import (
    ChannelStatistics,
    CheckpointDurations,
    CheckpointStatistics,
    ParticipantStatistics,
)
from flinkish_spark.protocol.statistics_history import RestoredCheckpoint, StatisticsHistory

LOG = logging.getLogger(__name__)


@dataclass
class _Times:
    """Monotonic milliseconds at which one checkpoint came past; None where it did not yet."""

    requested: int
    wall: int
    offered: int | None = None
    first_staged: int | None = None
    staged: int | None = None
    sync_ms: int | None = None
    decided: int | None = None


class CheckpointTracker:
    """Notes what the coordinator's threads tell it; lives as long as the process owns the job.

    Statistics decide nothing, so a store that refuses them is only logged.
    """

    def __init__(self, job_dir: JobDir, clock: Clock) -> None:
        self._job_dir, self._clock = job_dir, clock
        self._times: dict[CheckpointId, _Times] = {}
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
            self._times.pop(left.checkpoint, None)
            if decision is not None and decision.verdict is Verdict.COMMIT:
                self._end(_completed(left, decision, CheckpointDurations()))
            else:
                reason = CheckpointFailureReason.TASK_FAILED
                self._end(left.failed(reason, reason.text))

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

    def triggered(self, checkpoint: CheckpointId, request: CheckpointRequest) -> None:
        """Note that a request got an id."""
        wall = self._clock.wall_ms()
        self._times[checkpoint] = _Times(request.asked_at_ms, wall)
        begun = CheckpointStatistics.triggered(checkpoint, request.purpose, wall)
        with self._lock:
            self._history = self._history.triggered(begun)

    def offered(self, checkpoint: CheckpointId) -> None:
        """Note that its barrier may go out."""
        self._times[checkpoint].offered = self._clock.monotonic_ms()

    def staged(self, checkpoint: CheckpointId, staged: StagedBatch, sync_ms: int) -> None:
        """Note a micro-batch that carried a barrier of it."""
        times, now_ms = self._times[checkpoint], self._clock.monotonic_ms()
        times.first_staged = times.first_staged if times.first_staged is not None else now_ms
        times.staged, times.sync_ms = now_ms, sync_ms

    def decided(self, checkpoint: CheckpointId) -> None:
        """Note its decision."""
        self._times[checkpoint].decided = self._clock.monotonic_ms()

    def confirmed(self, decision: Decision) -> None:
        """Note its receipt, and store the history."""
        times = self._times.pop(decision.checkpoint)
        self._end(_completed(self._begun(decision.checkpoint), decision, self._durations(times)))

    def failed(self, checkpoint: CheckpointId, reason: CheckpointFailureReason, text: str) -> None:
        """Note that it ended without completing, and store the history."""
        times = self._times.pop(checkpoint, None)
        if times is not None:
            self._end(self._begun(checkpoint).failed(reason, text, self._durations(times)))

    def refused(self) -> None:
        """Note a request that never got an id."""
        with self._lock:
            self._history = self._history.refused()

    def restored(self, checkpoint: CheckpointId, path: str = "") -> None:
        """Note that a start goes on from a checkpoint, or from a savepoint at `path`."""
        with self._lock:
            restored = RestoredCheckpoint(checkpoint, self._clock.wall_ms(), path)
            self._history = self._history.restored(restored)
        self._store()

    # -- inside ---------------------------------------------------------------------------------
    def _begun(self, checkpoint: CheckpointId) -> CheckpointStatistics:
        found = self._history.find(checkpoint)
        assert found is not None, "only a triggered checkpoint ends"
        return found

    def _durations(self, times: _Times) -> CheckpointDurations:
        now_ms = self._clock.monotonic_ms()
        return CheckpointDurations(
            trigger_ms=_between(times.requested, times.offered),
            alignment_ms=_between(times.first_staged, times.staged),
            sync_ms=times.sync_ms,
            async_ms=_between(times.staged, times.decided),
            commit_ms=_between(times.decided, now_ms),
            end_to_end_ms=now_ms - times.requested,
        )

    def _end(self, statistics: CheckpointStatistics) -> None:
        with self._lock:
            self._history = self._history.ended(statistics)
        self._store()

    def _store(self) -> None:
        try:
            self._job_dir.put_statistics(self._history)
        except StoreError as error:
            LOG.warning("the statistics are not stored: %s", error)


def _between(begin: int | None, end: int | None) -> int | None:
    return None if begin is None or end is None else max(0, end - begin)


def _completed(
    begun: CheckpointStatistics, decision: Decision, durations: CheckpointDurations
) -> CheckpointStatistics:
    participants = _participants(decision)
    return begun.completed(
        durations,
        rows=sum(p.rows for p in participants),
        bytes_staged=sum(p.bytes or 0 for p in participants),
        participants=participants,
    )


def _participants(decision: Decision) -> tuple[ParticipantStatistics, ...]:
    """Sum up what each sink saw over the micro-batches of a decision."""
    acks: dict[str, list[SinkAck]] = {}
    for batch in decision.batches:
        for ack in batch.acks:
            acks.setdefault(ack.sink, []).append(ack)
    return tuple(
        ParticipantStatistics(
            uid,
            rows=sum(one.rows for one in seen),
            bytes=None,
            channels=_channels(decision.checkpoint, seen),
        )
        for uid, seen in acks.items()
    )


def _channels(checkpoint: CheckpointId, acks: list[SinkAck]) -> tuple[ChannelStatistics, ...]:
    barriers: dict[int, int] = {}
    for ack in acks:
        for barrier in ack.barriers:
            if barrier.checkpoint == checkpoint:
                barriers[barrier.channel] = barriers.get(barrier.channel, 0) + 1
    return tuple(ChannelStatistics(str(channel), count) for channel, count in sorted(barriers.items()))
