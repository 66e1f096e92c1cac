"""Takes what latency markers have measured out of staged micro-batches, and keeps it as histograms.

    SinkStaging -> TrackedStaging -> epoch writer, without a trace of markers
                        |
                  LatencyTracker -> JobClient.latencies

Nothing of it is stored: histograms are of one process, and decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flinkish_spark.clock import Clock
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.latencies import (
    Latencies,
    Measurement,
    marked_in,
    measured_in,
    without_latencies,
)
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.runtime.engine import Staging


class LatencyTracker:
    """Histograms of one `execute`, over all restarts of its query.

    Written by the epoch writer's thread, read by any.

    Parameters
    ----------
    interval_ms
        Markers of a micro-batch count if it was planned at least so long behind the last one that counted.
    """

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self._counted_ms: int | None = None
        self._latencies = Latencies()

    @property
    def latencies(self) -> Latencies:
        """Return what has been measured so far."""
        return self._latencies

    def note(self, marked_ms: int, measured: Sequence[Measurement]) -> None:
        """Count what the markers of one micro-batch have measured."""
        self._counted_ms = marked_ms
        self._latencies = self._latencies.noted(measured)

    def is_due(self, marked_ms: int) -> bool:
        """Whether markers that were put in at that time count."""
        last_ms = self._counted_ms
        # A wall clock that was set back must not silence the markers until it is there again.
        return last_ms is None or not last_ms <= marked_ms < last_ms + self._interval_ms


class TrackedStaging:
    """A :class:`~flinkish_spark.runtime.engine.Staging` that tells a tracker of markers; one per start.

    What it returns is as if there were none, so staged files, event time and replays know nothing of them.

    Parameters
    ----------
    inner
        Stages.
    uids
        Of operators and sources, by number.
    """

    def __init__(self, inner: Staging, tracker: LatencyTracker, uids: Sequence[str], clock: Clock) -> None:
        self._inner, self._tracker, self._uids = inner, tracker, tuple(uids)
        self._began_ms = clock.wall_ms()

    def stage(self, frame: Any, batch: BatchId, attempt: int) -> StagedBatch:
        """Have every sink stage `frame`, and count the markers in it."""
        staged = self._inner.stage(frame, batch, attempt)
        marked_ms = marked_in(staged.acks)
        # A micro-batch that a crash cut off was planned before it: it measures how long the job was down.
        if marked_ms is not None and marked_ms >= self._began_ms and self._tracker.is_due(marked_ms):
            self._tracker.note(marked_ms, measured_in(staged.acks, self._uids))
        return replace(staged, acks=without_latencies(staged.acks))

    def stage_only(self, frame: Any, batch: BatchId, attempt: int, sinks: frozenset[str]) -> StagedBatch:
        """Have these sinks stage `frame`; markers of a replay count nowhere."""
        staged = self._inner.stage_only(frame, batch, attempt, sinks)
        return replace(staged, acks=without_latencies(staged.acks))
