"""Event time of a running job: watermarks for the next micro-batch, and latencies from markers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flinkish_spark.checkpoint.control import ControlFile, write_held
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.checkpoint.staging import Staging
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import InternalError
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.protocol.control_offset import ControlOffset, TimeOffer, Wake
from flinkish_spark.protocol.event_time import MAX_WATERMARK_MS, AssignerInput, BatchTimes, Watermarks
from flinkish_spark.protocol.ids import BatchId, CheckpointPurpose
from flinkish_spark.protocol.latency import (
    Latencies,
    Measurement,
    drop_latencies,
    find_marked_ms,
    find_measurements,
)
from flinkish_spark.protocol.micro_batches import OFFSETS
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.time_plan import (
    TimePlan,
    count_late_records,
    drop_reports,
    find_counts,
    find_known_channels,
    find_reports,
    has_reports,
    update_levels,
)
from flinkish_spark.protocol.watermark_alignment import HeldChannels, find_held_sources
from flinkish_spark.protocol.watermarks import EventTime, next_micro_batch_ms, step


class TimeKeeper:
    """Keeps time by the rules of `protocol/watermarks.py`; made anew for every start.

    tasks' reports -> add_times() -> staged file -> on_staged() -> step() -> control file -> next micro-batch

    Used by the supervisor's thread before the query starts, the epoch writer's, and the coordinator's. In a
    job without event time and timers it reads no log and stores nothing.
    """

    def __init__(
        self,
        plan: TimePlan,
        sources: Sequence[SourceNode],
        control: ControlFile,
        log: SparkLog,
        clock: Clock,
        stored: EventTime | None,
        kept: Sequence[StagedBatch],
        next_batch: BatchId,
        *,
        needs_first: bool = False,
    ) -> None:
        self._plan, self._control, self._log, self._clock = plan, control, log, clock
        self._rules = plan.rules
        self._sources = {node.uid: node.source for node in sources}
        self._is_bounded = any(source.is_bounded for source in self._sources.values())
        self._lock = threading.Lock()
        #: The state of a job without event time and timers; it is not stored.
        self._nothing = plan.adapt_to_plan(EventTime())
        self._state = self._nothing if stored is None else plan.adapt_to_plan(stored)
        self._after_batch: dict[BatchId, EventTime] = {}
        self._held: dict[str, HeldChannels] = {}
        for staged in kept:
            self._step(staged)
        self._next = next_batch
        #: The barrier on offer drains the job: its micro-batch fires all event-time timers.
        self._is_draining = False
        #: The end of all input is on offer, with or without a barrier.
        self._is_ending = False
        #: Whether a micro-batch without records is wanted: a bounded input may have ended without a
        #: micro-batch to report it, and only the first one says where sources begin (`needs_first`).
        is_unknown = self._is_bounded and self._state.processing_time_ms is None
        self._must_look = is_unknown or (needs_first and next_batch == BatchId(0))
        #: Wall-clock time of the next :meth:`wake` that may offer something; None for never.
        self._look_at_ms: int | None = None

    def begin(self) -> None:
        with self._lock:
            self._offer(self._clock.wall_ms())

    @property
    def can_end(self) -> bool:
        """Return whether all input is over, so that the final checkpoint can be requested."""
        # The micro-batch with the final barrier tells the operators that input is over, and no timer may be
        # left after it. In a new log the first micro-batch has to show first whether input goes on.
        return self._next != BatchId(0) and (self._state.is_told_all_next or self.has_ended)

    @property
    def has_ended(self) -> bool:
        """Return whether all input is over and every operator has seen that, so that the job can end."""
        return self._state.has_carried_all and self._state.agenda.next_event_time_ms is None

    @property
    def is_due_at_once(self) -> bool:
        """Return whether a timer waits for the next micro-batch: a watermark has passed it."""
        return self._state.is_due_at_once

    def add_times(self, staged: StagedBatch) -> StagedBatch:
        """Return a staged micro-batch with its times, which tasks have reported; before it is written."""
        is_told = has_reports(staged.acks)
        is_kept = self._plan.is_timed or self._state != self._nothing
        if not (is_told or self._is_bounded or is_kept):
            return staged
        text = self._log.read(OFFSETS, staged.batch)
        if text is None:
            raise InternalError(f"Spark's log has no entry of micro-batch {staged.batch}, which runs")
        logged = LoggedOffsets.parse(text)
        inputs = tuple(self._inputs(logged))
        if not (is_told or inputs or is_kept):
            return staged
        channels, timers = find_reports(self._plan, staged.acks)
        called = ControlOffset.find_called_groups(staged.batch.value, logged.sources)
        planned_ms = logged.processing_time_ms
        now_ms = self._clock.wall_ms() if planned_ms is None else planned_ms
        times = BatchTimes(
            self._state.next_processing_time_ms(now_ms),
            channels,
            inputs,
            (*timers, *self._plan.report_silent_groups(called, timers)),
            logged.control.time.watermark_ms,
            logged.control.time.above,
            ControlOffset.find_drained(logged.sources) if self._is_draining else 0,
        )
        late, counts = count_late_records(self._plan, staged.acks), find_counts(self._plan, staged.acks)
        acks = drop_reports(staged.acks)
        return replace(staged, acks=acks, times=times, late_dropped=late, counts=counts)

    def on_staged(self, staged: StagedBatch) -> None:
        with self._lock:
            self._step(staged)
            self._next, self._must_look = staged.batch.next(), False
            self._offer(self._clock.wall_ms())

    def wake(self) -> None:
        """Offer a micro-batch if a timer or the end of input makes one due; called every few milliseconds."""
        if self._look_at_ms is None:
            return
        now_ms = self._clock.wall_ms()
        with self._lock:
            if self._look_at_ms is not None and now_ms >= self._look_at_ms:
                self._offer(now_ms)

    def on_offer(self, purpose: CheckpointPurpose) -> None:
        """Call all key groups with timers if the checkpoint drains; any may carry the end of input."""
        with self._lock:
            self._is_ending = self._state.is_told_all_next
            if purpose is CheckpointPurpose.DRAINED_SAVEPOINT:
                self._is_draining = True
                self._offer(self._clock.wall_ms())

    def find_event_time(self, batch: BatchId) -> EventTime | None:
        with self._lock:
            self._after_batch = {known: state for known, state in self._after_batch.items() if known >= batch}
            found = self._after_batch.get(batch, self._nothing)
            return None if found == self._nothing else found

    def _step(self, staged: StagedBatch) -> None:
        if staged.times is not None:
            self._state = step(self._rules, self._state, staged.times)
        self._state = update_levels(self._state, staged.counts)
        self._after_batch[staged.batch] = self._state

    def _inputs(self, logged: LoggedOffsets) -> Iterator[AssignerInput]:
        """Yield the inputs whose channels, or whose end, have changed with a micro-batch."""
        for uid, assigner in self._plan.assigners.items():
            source = self._sources[assigner.source]
            channels = find_known_channels(source.channels_in(logged), assigner)
            # The end of a scan that has no log entry yet is unknown.
            has_ended = source.is_bounded and None not in logged.sources and source.has_ended(logged)
            before = self._state.assigners.get(uid)
            if before is None:
                is_new = channels is not None or has_ended
            else:
                known = frozenset(before.valve.channels)
                is_new = has_ended != before.has_ended or (channels is not None and channels != known)
            if is_new:
                yield AssignerInput(uid, channels, has_ended)

    def _offer(self, now_ms: int) -> None:
        """Write the watermarks and calls for the next micro-batch; make it due if it needs no records."""
        state = self._state
        # Channels that are too far ahead, before Spark asks the sources again.
        held = find_held_sources(self._plan, state)
        if held != self._held:
            write_held(self._control.path, held)
            self._held = held
        # A new log has carried no watermark yet, whatever its state has seen.
        is_first = self._next == BatchId(0)
        carried = Watermarks() if is_first else state.carried
        watermarks = carried.merge_max(state.watermarks)
        has_risen = watermarks != carried
        matters = has_risen and (is_first or state.is_awaited(carried))
        due_ms = next_micro_batch_ms(self._rules, state)
        # If the wall clock was set back, processing-time timers wait until it is there again: the operators'
        # clock is the same one. Timers that the watermark makes due do not wait.
        is_due = (due_ms is not None and due_ms <= now_ms) or state.is_due_at_once or self._must_look
        due = state.agenda.due(MAX_WATERMARK_MS, now_ms) if self._is_draining else state.due(now_ms)
        groups = self._plan.number_groups(due)
        wake = Wake(self._next.value, groups) if groups or not has_risen else None
        # A first micro-batch runs in any case; its time must not be before that of its state.
        is_offered = is_first or self._is_ending or self._is_draining
        waits_for_barrier = state.is_told_all_next and not is_offered
        if waits_for_barrier or not (groups or is_due or matters):
            # An offer that was not drawn is withdrawn: its micro-batch has run without it.
            self._control.offer_time(TimeOffer.of(carried))
            self._control.keep_time(TimeOffer.of(watermarks, state.has_ended, wake if groups else None))
        else:
            seen = state.carried if is_first else Watermarks()
            self._control.offer_time(TimeOffer.of(watermarks, state.has_ended, wake, seen))
        # The next time at which more may be due than now.
        timers = state.agenda.groups.values()
        times_ms = [due_ms, *(one.processing_time_ms for one in timers)]
        later_ms = (time_ms for time_ms in times_ms if time_ms is not None and time_ms > now_ms)
        self._look_at_ms = min(later_ms, default=None)


class LatencyTracker:
    """Latency histograms of one `execute`, over all restarts; written by the epoch writer's thread only."""

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self._counted_ms: int | None = None
        self._latencies = Latencies()

    @property
    def latencies(self) -> Latencies:
        return self._latencies

    def note(self, marked_ms: int, measured: Sequence[Measurement]) -> None:
        self._counted_ms = marked_ms
        self._latencies = self._latencies.add(measured)

    def is_due(self, marked_ms: int) -> bool:
        last_ms = self._counted_ms
        # A wall clock that was set back must not stop the measuring until it is there again.
        return last_ms is None or not last_ms <= marked_ms < last_ms + self._interval_ms


class TrackedStaging:
    """A :class:`.Staging` that reports latency markers to a tracker and removes them from the result."""

    def __init__(self, inner: Staging, tracker: LatencyTracker, uids: Sequence[str], clock: Clock) -> None:
        self._inner, self._tracker, self._uids = inner, tracker, tuple(uids)
        self._began_ms = clock.wall_ms()

    def stage(self, frame: Any, batch: BatchId, attempt: int) -> StagedBatch:
        staged = self._inner.stage(frame, batch, attempt)
        marked_ms = find_marked_ms(staged.acks)
        # A micro-batch that was planned before a crash would measure how long the job was down.
        if marked_ms is not None and marked_ms >= self._began_ms and self._tracker.is_due(marked_ms):
            self._tracker.note(marked_ms, find_measurements(staged.acks, self._uids))
        return replace(staged, acks=drop_latencies(staged.acks))

    def stage_only(self, frame: Any, batch: BatchId, attempt: int, sinks: frozenset[str]) -> StagedBatch:
        staged = self._inner.stage_only(frame, batch, attempt, sinks)
        return replace(staged, acks=drop_latencies(staged.acks))
