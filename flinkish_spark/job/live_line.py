"""The status line on a terminal while `execute` waits: records in and out, newest checkpoint, lag."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from flinkish_spark.contracts.source import Extent, SourceNode
from flinkish_spark.core.clock import Clock, duration_text
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.terminal import CLEAR_LINE
from flinkish_spark.job.client import JobClient

LOG = logging.getLogger(__name__)
#: Shorter than the half second of silence after which Spark draws its progress bars.
_REFRESH_S = 0.25


def _width() -> int:
    return shutil.get_terminal_size().columns - 1


@dataclass(frozen=True, slots=True)
class _ReadProgress:
    """The number of records read at some time, over all sources that report it."""

    at_ms: int
    records: int
    all_records: int | None

    @classmethod
    def of(cls, at_ms: int, extents: Sequence[Extent | None]) -> _ReadProgress | None:
        known = [one for one in extents if one is not None]
        if not known:
            return None
        ends = [one.all_records for one in known if one.all_records is not None]
        has_end = len(ends) == len(extents)
        return cls(at_ms, sum(one.records for one in known), sum(ends) if has_end else None)


class LiveLine:
    """Draws the line in a separate thread, and removes it when the job has ended."""

    def __init__(
        self,
        name: str,
        client: JobClient,
        sources: Sequence[SourceNode],
        out: TextIO,
        hold_bars: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._name, self._client, self._sources = name, client, tuple(sources)
        self._out, self._hold_bars, self._clock = out, hold_bars, clock
        self._begin: _ReadProgress | None = None
        self._now: _ReadProgress | None = None
        self._offsets_text: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="flinkish-live-line", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(1)
        # The last line stays on the screen, unless an error follows.
        self._write(CLEAR_LINE if error is not None else f"{CLEAR_LINE}{self.text(_width())}\n")

    def _draw(self) -> None:
        try:
            while not self._over.wait(_REFRESH_S):
                self._hold_bars()
                # The cursor returns to the line's beginning, so that other output overwrites it.
                self._write(f"{CLEAR_LINE}{self.text(_width())}\r")
        except Exception:
            # The job goes on without it.
            LOG.debug("the live line has ended", exc_info=True)

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            # The terminal is gone.
            self._over.set()

    def text(self, width: int) -> str:
        """Return the line; parts that do not fit are left out, the last one first."""
        progress, newest = self._client.progress, self._client.statistics.newest_completed
        self._look()
        restarts = f"restarts {progress.restarts}"
        parts = [f"{self._name} {self._client.status.value}", *([restarts] if progress.restarts else [])]
        # A wait with an error is more important than the longest one.
        waits = sorted(progress.waits, key=lambda wait: not wait.error)
        parts += [str(wait) for wait in waits[:1]] or self._start()
        parts += self._end()
        if self._begin is not None and self._now is not None:
            parts.append(f"in {max(0, self._now.records - self._begin.records):,}")
        parts.append(f"out {sum(progress.rows_by_sink.values()):,}")
        if newest is not None:
            took_ms = newest.durations.end_to_end_ms
            parts.append(f"checkpoint {newest.checkpoint} in {duration_text(took_ms)}")
        if progress.watermark_lag_ms is not None:
            parts.append(f"lag {duration_text(progress.watermark_lag_ms)}")
        if not progress.restarts:
            parts.append(restarts)
        while len(parts) > 1 and len(" | ".join(parts)) > width:
            parts.pop()
        return " | ".join(parts)[: max(0, width)]

    def _start(self) -> list[str]:
        """Return the current wait of a start, up to its first micro-batch."""
        progress = self._client.progress
        if progress.batches or self._client.status.is_terminal:
            return []
        what = "the first micro-batch" if progress.is_running else progress.start_waits_for
        return [f"waits for {what}"] if what else []

    def _look(self) -> None:
        """Update the read progress if there was a checkpoint since the last look."""
        progress = self._client.progress
        # Before the query runs, the offsets may still be those of an earlier start.
        if progress.offsets_text == self._offsets_text or (self._begin is None and not progress.is_running):
            return
        text = self._offsets_text = progress.offsets_text
        try:
            position = LoggedOffsets.parse(text) if text else None
            extents = [node.source.extent(position) for node in self._sources]
        except CorruptObjectError:
            return
        self._now = _ReadProgress.of(self._clock.monotonic_ms(), extents)
        if self._begin is None:
            self._begin = self._now

    def _end(self) -> list[str]:
        """Return the share of a bounded input that was read, and the estimated remaining time."""
        begin, now = self._begin, self._now
        if begin is None or now is None or not now.all_records:
            return []
        # The share of the whole input, even if this start began in the middle of it.
        share = min(1.0, now.records / now.all_records)
        done, left = now.records - begin.records, max(0, now.all_records - now.records)
        if done <= 0 or left == 0 or self._client.status.is_terminal:
            return [f"{share:.0%}"]
        needed_ms = left * (now.at_ms - begin.at_ms) // done
        left_ms = max(0, needed_ms - (self._clock.monotonic_ms() - now.at_ms))
        return [f"{share:.0%}, {duration_text(left_ms)} left"]
