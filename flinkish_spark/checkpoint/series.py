"""Keeps the lines over time in the job directory; nothing depends on them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.protocol.series import HOUR_SLOT_MS, Series, SeriesPoint, sum_known

LOG = logging.getLogger(__name__)


class SeriesKeeper:
    """Adds a point for each confirmed checkpoint; the owner stores them at most once for each slot."""

    def __init__(self, job_dir: JobDir, clock: Clock) -> None:
        self._job_dir, self._clock = job_dir, clock
        self._since_ms = self._stored_ms = clock.monotonic_ms()
        self._is_stored = True
        try:
            self._series = job_dir.series() or Series()
        except FlinkishError as error:
            LOG.warning("the lines over time begin anew: %s", error)
            self._series = Series()

    def on_start(self) -> None:
        """Mark that the job goes on from a checkpoint; the time that it was down counts for no rate."""
        self._since_ms = self._clock.monotonic_ms()
        self._add(SeriesPoint(self._clock.wall_ms(), starts=1))

    def on_confirmed(
        self, counts: Mapping[str, Mapping[str, int]], worst_lag: int | None, took_ms: int
    ) -> None:
        """Add a checkpoint, with its counts by uid and name."""
        now_ms = self._clock.monotonic_ms()
        read, written, lag = (
            sum_known(own.get(name) for own in counts.values())
            for name in ("numRecordsIn", "numRecordsOut", "pendingRecords")
        )
        self._add(
            SeriesPoint(
                self._clock.wall_ms(),
                now_ms - self._since_ms,
                read,
                written,
                lag,
                worst_lag,
                took_ms,
            )
        )
        self._since_ms = now_ms

    def _add(self, point: SeriesPoint) -> None:
        self._series, self._is_stored = self._series.add(point), False

    def store(self, is_last: bool) -> None:
        """Store the lines if they changed, and a slot has passed or nothing comes after this."""
        now_ms = self._clock.monotonic_ms()
        if self._is_stored or not (is_last or now_ms - self._stored_ms >= HOUR_SLOT_MS):
            return
        self._stored_ms = now_ms
        try:
            self._job_dir.put_series(self._series)
            self._is_stored = True
        except FlinkishError as error:
            LOG.warning("the lines over time are not stored: %s", error)
