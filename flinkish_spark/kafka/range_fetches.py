"""The Fetches that one range of a partition takes, one of them ahead, and what is believed to be lost.

Rules of this file:

- The planner has seen the range, so a Fetch takes what is there and does not wait for more.
- The next Fetch is sent as soon as the end of this answer is known, before it is decoded: two
  answers are in memory at most, provided that the caller lets go of one before it takes the next.
- The range ends when the next offset reaches its end, or when the broker shows that nothing is
  left before it; offsets have gaps, and the last ones may belong to no record.
- A broker that has just started may not know a topic, or the end of its log, for a moment. A loss
  counts only when it shows again and again for two seconds; an error between starts these anew.
- Progress starts the time allowed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from flinkish_spark.clock import Clock
from flinkish_spark.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    EnvironmentFault,
    InputLostError,
)
from flinkish_spark.kafka._pace import pauses_ms
from flinkish_spark.kafka._wire_fetch import FetchAnswer, FetchLimits, RawSlice, is_retriable
from flinkish_spark.kafka.answers import UNAUTHORIZED, Code, Isolation, Place, name_of
from flinkish_spark.kafka.reader_settings import DOUBT_MS, ReaderSettings
from flinkish_spark.kafka.record_decode import RawBatch, batches

#: What a record is taken for before the first answer tells; and the least that a Fetch asks for.
_GUESSED_RECORD_BYTES, _LEAST_BYTES = 1024, 64 * 1024


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The records of a partition from offset `start` on, before offset `end`."""

    topic: str
    partition: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if not isinstance(self.topic, str) or not self.topic:
            raise ValueError(f"a range needs a topic, got {self.topic!r}")
        if self.partition < 0 or not 0 <= self.start <= self.end:
            raise ValueError(f"there is no range {self}")

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} offsets {self.start} to {self.end - 1}"


@dataclass(frozen=True, slots=True)
class LostRange:
    """A part of a range that Kafka no longer has, and why that is believed."""

    range: OffsetRange
    why: str


@dataclass(frozen=True, slots=True)
class FetchedBatches:
    """The whole batches of one answer, at least one.

    `start` is the offset that was asked for; the first batch may begin before it, with records
    that were deleted or do not belong to the range.
    """

    batches: list[RawBatch]
    aborted: tuple[tuple[int, int], ...]
    start: int


class Pending(Protocol):
    """A Fetch on its way."""

    def result(self) -> FetchAnswer:
        """Wait for the answer."""


class Fetches(Protocol):
    """Who sends Fetches: :class:`~flinkish_spark.kafka._wire_fetch.FetchClient`, or a test."""

    def send(self, offsets: Mapping[Place, int], limits: FetchLimits, *, connect_within_ms: int) -> Pending:
        """Send a Fetch and do not wait."""


class RangeFetches:
    """Takes the batches of one range, answer by answer; used once, by one thread.

    Parameters
    ----------
    client
        Sends the Fetches.
    bounds
        Asks for the first offset and the offset after the last one that the log holds now.
    wanted
        What to read.
    settings
        How.
    clock
        Time, replaceable in tests.

    Attributes
    ----------
    losses
        What was skipped, if the settings allow that.
    """

    def __init__(
        self,
        client: Fetches,
        bounds: Callable[[], tuple[int, int]],
        wanted: OffsetRange,
        settings: ReaderSettings,
        clock: Clock,
    ) -> None:
        self._client, self._bounds, self._clock = client, bounds, clock
        self._wanted, self._settings = wanted, settings
        self._place = (wanted.topic, wanted.partition)
        self._position, self._end = wanted.start, wanted.end
        self._bytes_per_offset = float(_GUESSED_RECORD_BYTES)
        self._is_waiting = False
        self._ahead: Pending | None = None
        self._doubt = _Doubt(clock)
        self.losses: list[LostRange] = []

    def take(self) -> FetchedBatches | None:
        """Return the next batches, or None at the end of the range.

        Raises
        ------
        InputLostError
            If a part of the range is gone and the settings do not allow that.
        BrokerUnavailableError
            If there was no progress within ``default.api.timeout.ms``.
        AuthorizationError
            If the principal may not read the topic.
        EnvironmentFault
            If the broker answers with an error that asking again cannot change.
        """
        if self._position >= self._end:
            return None
        trouble = "no time was allowed"
        allowed_ms = self._settings.patience_ms
        for left_ms in pauses_ms(allowed_ms, self._clock):
            try:
                seen = self._answer(left_ms)
                fetched = None if seen is None else self._whole_batches(seen, left_ms)
                if fetched is not None:
                    return fetched
                trouble = self._without_batches(seen)
                if self._position >= self._end:
                    return None
            except BrokerUnavailableError as lost:
                self._doubt.end()
                trouble = lost.why or lost.what
        raise BrokerUnavailableError(
            f"Reading {self._wanted} did not get on at offset {self._position} for {allowed_ms} ms",
            why=trouble,
            what_to_do="look at the broker that leads the partition; the task can be tried again",
            topic=self._wanted.topic,
            partition=self._wanted.partition,
            offset=self._position,
        )

    # -- asking -------------------------------------------------------------------------------

    def _answer(self, left_ms: int) -> RawSlice | None:
        """Return the answer for the current position; None if the broker throttles this client."""
        pending, self._ahead = self._ahead, None
        return (pending or self._send(left_ms)).result().get(self._place)

    def _send(self, left_ms: int) -> Pending:
        return self._client.send({self._place: self._position}, self._limits(), connect_within_ms=left_ms)

    def _limits(self) -> FetchLimits:
        settings = self._settings
        limits = settings.waiting_limits() if self._is_waiting else settings.fetch_limits()
        # A small range in the middle of a log is not worth a whole answer of what follows it.
        guessed = max(_LEAST_BYTES, int((self._end - self._position) * self._bytes_per_offset))
        return replace(limits, partition_max_bytes=min(limits.partition_max_bytes, guessed))

    def _whole_batches(self, seen: RawSlice, left_ms: int) -> FetchedBatches | None:
        """Return what the answer holds, go on behind it and send the next Fetch."""
        if seen.code != Code.NONE:
            return None
        found = list(batches(seen.records))
        if not found or found[-1].header.last_offset < self._position:
            return None
        asked, behind = self._position, found[-1].header.last_offset + 1
        self._bytes_per_offset = len(seen.records) / (behind - found[0].header.base_offset)
        self._position, self._is_waiting = behind, False
        self._doubt.end()
        if self._position < self._end:
            try:
                self._ahead = self._send(left_ms)
            except BrokerUnavailableError:
                self._ahead = None  # take() sends it again; this answer must not be lost
        return FetchedBatches(found, seen.aborted, asked)

    # -- answers without records ----------------------------------------------------------------

    def _without_batches(self, seen: RawSlice | None) -> str:
        """Act on an answer that brought no batch; return what to say if it stays like that."""
        if seen is None:
            return "the broker throttles this client"
        if seen.code == Code.NONE:
            return self._without_error(seen)
        if seen.code == Code.OFFSET_OUT_OF_RANGE:
            return self._out_of_range()
        if seen.code == Code.UNKNOWN_TOPIC_OR_PARTITION:
            return self._absent()
        self._doubt.end()
        if seen.code in UNAUTHORIZED:
            raise AuthorizationError(
                f"Kafka refuses this principal READ on topic {self._wanted.topic!r} ({name_of(seen.code)})",
                topic=self._wanted.topic,
                code=seen.code,
            )
        if not is_retriable(seen.code):
            raise EnvironmentFault(
                f"Kafka refuses to read {self._wanted} at offset {self._position}",
                why=f"it answers {name_of(seen.code)}",
                code=seen.code,
            )
        return f"the last answer was {name_of(seen.code)}"

    def _without_error(self, seen: RawSlice) -> str:
        committed = self._settings.isolation is Isolation.READ_COMMITTED
        visible = seen.last_stable_offset if committed else seen.high_watermark
        if visible >= self._end and not seen.records:
            # Markers and records at the end of the range can be compacted away.
            self._position = self._end
            return "nothing is left"
        self._is_waiting = True
        if seen.high_watermark < self._end:
            why = f"the log ends at {seen.high_watermark}"
            return self._doubted(max(self._position, seen.high_watermark), self._end, why)
        self._doubt.end()
        if visible < self._end:
            return f"a transaction is open at offset {visible}, which hides later records"
        return "the answer held no whole batch"

    def _out_of_range(self) -> str:
        try:
            first, end = self._bounds()
        except InputLostError:
            return self._absent()
        if self._position < first:
            why = f"the log starts at {first}"
            return self._doubted(self._position, min(first, self._end), why)
        if self._position > end:
            return self._doubted(self._position, self._end, f"the log ends at {end}")
        self._doubt.end()
        return "the broker's answers contradict each other"

    def _absent(self) -> str:
        return self._doubted(self._position, self._end, "Kafka does not know the topic or the partition")

    def _doubted(self, start: int, end: int, why: str) -> str:
        """Skip or report the loss of the offsets from `start` to before `end` once it is believed."""
        loss = LostRange(OffsetRange(*self._place, start, end), why)
        if not self._doubt.is_over(loss):
            return why
        if self._settings.fail_on_data_loss:
            raise InputLostError(
                f"Input is gone: missing are the offsets {start} to {end - 1} of "
                f"topic {self._wanted.topic!r} partition {self._wanted.partition}",
                why=f"{why}: retention removed records, or the topic was truncated or created again",
                what_to_do="raise retention.ms, or set failOnDataLoss to false to go on without them",
                topic=self._wanted.topic,
                partition=self._wanted.partition,
                missing_start=start,
                missing_end=end,
            )
        self.losses.append(loss)
        if start <= self._position:
            self._position = end
        else:
            self._end = start
        self._doubt.end()
        return why


class _Doubt:
    """For how long a loss has been showing without anything that speaks against it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loss: LostRange | None = None
        self._since_ms = 0

    def end(self) -> None:
        """Forget it: something else was answered."""
        self._loss = None

    def is_over(self, loss: LostRange) -> bool:
        """Return whether `loss` is to be believed."""
        now_ms = self._clock.monotonic_ms()
        if self._loss is None or _length(loss) < _length(self._loss):
            # What was missing comes back: a log that is still being opened.
            self._loss, self._since_ms = loss, now_ms
        return now_ms - self._since_ms >= DOUBT_MS


def _length(loss: LostRange) -> int:
    return loss.range.end - loss.range.start
