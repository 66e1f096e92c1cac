"""Producer of a task's Kafka records, in a transaction that another process ends."""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from flinkish_spark.connectors.kafka.client import faults
from flinkish_spark.connectors.kafka.client.admission import (
    Admission,
    OutgoingRecords,
    StickyPartitioner,
    split_by_partition,
    split_by_topic,
)
from flinkish_spark.connectors.kafka.client.batches import (
    Column,
    CommonHeaders,
    EncodedBatch,
    encode_batches,
    lengths,
    sequence_after,
)
from flinkish_spark.connectors.kafka.client.client import WIRES, KafkaWire, WirePool, describe_code
from flinkish_spark.connectors.kafka.client.faults import Reaction, find_reaction
from flinkish_spark.connectors.kafka.client.produce import BatchAnswer, ProduceInFlight
from flinkish_spark.connectors.kafka.client.session import (
    SESSIONS,
    ProducerSession,
    SharedSession,
    Ticket,
    TransactionSession,
)
from flinkish_spark.connectors.kafka.client.settings import StagingSettings
from flinkish_spark.connectors.kafka.client.transactions import Evidence, KafkaCommittable, abort_own
from flinkish_spark.core.clock import FIRST_PAUSE_MS, LONGEST_PAUSE_MS
from flinkish_spark.core.errors import AuthorizationError, BrokerUnavailableError, InternalError
from flinkish_spark.protocol.ids import Place
from flinkish_spark.types.record_time import Int64s

_T = TypeVar("_T")
#: Above this many unacknowledged bytes the caller waits for acknowledgements.
_MOST_UNACKNOWLEDGED_BYTES = 16 * 1024 * 1024
_LEAST_UNACKNOWLEDGED_BYTES = 1024 * 1024
#: Grace time after a request's timeout; after it the client's thread is taken for dead.
_THREAD_DEAD_MS = 10_000
_NO_ANSWER = BatchAnswer(-1, -1, "the answer does not name the partition")


@dataclass(slots=True)
class _PendingBatch:
    """An unacknowledged batch, with its records in case it must be split."""

    batch: EncodedBatch
    rows: OutgoingRecords
    #: In the outbox's active time; set when the batch is first sent.
    deadline_ms: int | None = None


@dataclass(slots=True)
class _PartitionQueue:
    place: Place
    parcels: deque[_PendingBatch] = field(default_factory=deque)
    next_sequence: int = 0
    acknowledged: int = 0
    is_under_way: bool = False
    pause_ms: int = 0
    not_before_ms: int = 0


class Outbox:
    """Sends the records of one transaction and tracks their acknowledgement."""

    # Correctness depends on the order of a partition's batches (KIP-98: a broker accepts only the next
    # sequence number). A batch leaves its queue only when it is acknowledged; until then it is sent again
    # unchanged, with the same producer id, epoch and sequence number, and a broker recognises a repeat. One
    # batch of a queue is under way at a time, and one request to a leader.

    def __init__(self, session: ProducerSession) -> None:
        self._session, self._settings = session, session.settings.producer
        self._clock = session.wire.clock
        self._lanes: dict[Place, _PartitionQueue] = {}
        #: Leader -> its request under way, and when without an answer the client's thread is taken for dead.
        self._flights: dict[int, tuple[ProduceInFlight, int]] = {}
        self._answered = threading.Event()
        self._unacknowledged_bytes = 0
        self._most_bytes = max(
            _LEAST_UNACKNOWLEDGED_BYTES, _MOST_UNACKNOWLEDGED_BYTES // session.settings.transactions_of_task
        )
        #: Total time outside the outbox, and since when the caller is outside.
        self._away_ms, self._left_at_ms = 0, self._clock.monotonic_ms()
        self._stale_topics: set[str] = set()
        #: Topic -> lower batch size limit since the broker refused a larger batch.
        self._lowered_limits: dict[str, int] = {}
        self.acknowledged = 0
        self.evidence: Evidence | None = None

    def post(self, parts: Mapping[Place, OutgoingRecords]) -> None:
        """Encode records and send them if possible; wait only while too many bytes are unacknowledged."""
        with self._exclude_idle_time():
            # Interleaved, so that a request has a batch for each of a leader's partitions.
            for turn in _interleave([self._parcels(place, rows) for place, rows in parts.items()]):
                for place, parcel in turn:
                    self._lanes[place].parcels.append(parcel)
                    self._unacknowledged_bytes += len(parcel.batch.data)
                self._advance()
                self._wait_until(self._most_bytes)

    def drain(self) -> None:
        with self._exclude_idle_time():
            self._advance()
            self._wait_until(0)

    def count_acknowledged(self) -> dict[Place, int]:
        return {place: lane.acknowledged for place, lane in self._lanes.items()}

    def wait_for_pending(self, within_ms: int) -> bool:
        """Wait for requests under way without sending more; return whether none is left."""
        end_ms = self._clock.monotonic_ms() + within_ms
        while any(not request.is_done for request, _ in self._flights.values()):
            left_ms = end_ms - self._clock.monotonic_ms()
            if left_ms <= 0:
                return False
            self._answered.clear()
            self._answered.wait(min(left_ms, LONGEST_PAUSE_MS) / 1000)
        return True

    @contextmanager
    def _exclude_idle_time(self) -> Iterator[None]:
        """Exclude the time since the last call from the delivery timeouts."""
        self._away_ms += self._clock.monotonic_ms() - self._left_at_ms
        try:
            yield
        finally:
            self._left_at_ms = self._clock.monotonic_ms()

    def _read_active_ms(self) -> int:
        return self._clock.monotonic_ms() - self._away_ms

    def _parcels(self, place: Place, rows: OutgoingRecords) -> Iterator[tuple[Place, _PendingBatch]]:
        lane = self._lanes.get(place)
        if lane is None:
            lane = _PartitionQueue(place, next_sequence=self._session.first_sequence(place))
            self._lanes[place] = lane
        first = lane.next_sequence
        lane.next_sequence = sequence_after(first, len(rows))
        for parcel in self._encode(place[0], rows, first):
            yield place, parcel

    def _encode(self, topic: str, rows: OutgoingRecords, sequence: int) -> Iterator[_PendingBatch]:
        limit = min(self._settings.batch_bytes, self._session.settings.record_limit_bytes)
        batches = encode_batches(
            rows.keys,
            rows.values,
            rows.headers,
            rows.timestamps_ms,
            producer_id=self._session.producer_id,
            producer_epoch=self._session.producer_epoch,
            base_sequence=sequence,
            codec=self._settings.codec,
            max_batch_bytes=min(limit, self._lowered_limits.get(topic, limit)),
            attributes=self._session.batch_attributes,
        )
        start = 0
        for batch in batches:
            yield _PendingBatch(batch, rows.slice(start, batch.records))
            start += batch.records

    def _cut(self, lane: _PartitionQueue) -> None:
        """Replace the first batch, which is too large for its topic, by two halves."""
        topic, parcel = lane.place[0], lane.parcels.popleft()
        size, records = len(parcel.batch.data), parcel.batch.records
        if size <= self._lowered_limits.get(topic, size):
            # A larger one was encoded before the limit was lowered, and says nothing about the new limit.
            self._lowered_limits[topic] = size // 2
        half, sequence = records // 2, parcel.batch.base_sequence
        halves = [
            *self._encode(topic, parcel.rows.slice(0, half), sequence),
            *self._encode(topic, parcel.rows.slice(half, records - half), sequence_after(sequence, half)),
        ]
        lane.parcels.extendleft(reversed(halves))
        self._unacknowledged_bytes += sum(len(one.batch.data) for one in halves) - size

    def _advance(self) -> None:
        """Process answers and send what can be sent, without waiting."""
        self._answered.clear()
        self._collect()
        if self._stale_topics:
            topics, self._stale_topics = self._stale_topics, set()
            self._session.refresh(topics)
        for leader, lanes in self._sendable().items():
            self._send(leader, lanes)

    def _wait_until(self, bytes_left: int) -> None:
        while self._unacknowledged_bytes > bytes_left:
            now_ms = self._clock.monotonic_ms()
            pauses = [
                lane.not_before_ms - now_ms
                for lane in self._lanes.values()
                if lane.parcels and not lane.is_under_way and lane.not_before_ms > now_ms
            ]
            pause_ms = min([LONGEST_PAUSE_MS, *pauses])
            if self._flights:
                self._answered.wait(pause_ms / 1000)
            elif pauses:
                self._clock.sleep_ms(pause_ms)
            self._advance()

    def _sendable(self) -> dict[int, list[_PartitionQueue]]:
        now_ms, limit = self._clock.monotonic_ms(), self._session.settings.request_limit_bytes
        lanes: dict[int, list[_PartitionQueue]] = {}
        used: dict[int, int] = {}
        for lane in self._lanes.values():
            if not lane.parcels or lane.is_under_way or lane.not_before_ms > now_ms:
                continue
            leader = self._session.leader(lane.place)
            if leader < 0:
                self._stale_topics.add(lane.place[0])
                self._postpone(lane, "the partition has no leader")
                continue
            size = len(lane.parcels[0].batch.data)
            if leader in self._flights or (leader in used and used[leader] + size > limit):
                continue
            lanes.setdefault(leader, []).append(lane)
            used[leader] = used.get(leader, 0) + size
        return lanes

    def _send(self, leader: int, lanes: Iterable[_PartitionQueue]) -> None:
        now_ms = self._clock.monotonic_ms()
        batches = {}
        for lane in lanes:
            lane.is_under_way = True
            batches[lane.place] = lane.parcels[0].batch.data
            if lane.parcels[0].deadline_ms is None:
                lane.parcels[0].deadline_ms = self._read_active_ms() + self._settings.delivery_timeout_ms
        timeout_ms = self._settings.request_timeout_ms
        try:
            request = self._session.client.begin_produce(
                leader,
                self._session.settings.transactional_id,
                batches,
                acks=int(self._settings.acks),
                request_timeout_ms=timeout_ms,
                answered=self._answered,
                connect_within_ms=self._settings.delivery_timeout_ms,
            )
        except (BrokerUnavailableError, AuthorizationError) as lost:
            self._forget_requests(lost)
        else:
            self._flights[leader] = (request, now_ms + timeout_ms + _THREAD_DEAD_MS)

    def _collect(self) -> None:
        for leader, (request, dead_at_ms) in tuple(self._flights.items()):
            if not request.is_done and self._clock.monotonic_ms() < dead_at_ms:
                continue
            try:
                answers = self._session.client.finish_produce(request)
            except (BrokerUnavailableError, AuthorizationError) as lost:
                self._forget_requests(lost)
                return
            del self._flights[leader]
            for place in request.places:
                self._lanes[place].is_under_way = False
                self._take(self._lanes[place], answers.get(place, _NO_ANSWER))

    def _take(self, lane: _PartitionQueue, answer: BatchAnswer) -> None:
        (topic, partition), parcel = lane.place, lane.parcels[0]
        match find_reaction(answer.code):
            case Reaction.DONE:
                self._acknowledge(lane, answer.base_offset)
            case Reaction.AGAIN | Reaction.ASK_FOR_LEADER as reaction:
                if reaction is Reaction.ASK_FOR_LEADER:
                    self._stale_topics.add(topic)
                detail = f", {answer.detail}" if answer.detail else ""
                self._postpone(lane, f"Kafka answered {describe_code(answer.code)}{detail}")
            case Reaction.CUT if parcel.batch.records > 1:
                self._cut(lane)
            case Reaction.CUT:
                limit = self._session.settings.record_limit_bytes
                raise faults.make_bad_record_error(
                    f"the broker refuses a record for topic {topic} as too large although it is within the "
                    f"limit of {limit} bytes",
                    topic,
                    "raise the topic's max.message.bytes or lower max_record_bytes",
                )
            case Reaction.BAD_RECORD:
                # The broker checks keys of compacted topics and timestamps.
                said = faults.to_one_line(f"{describe_code(answer.code)}, {answer.detail}").rstrip(", ")
                raise faults.make_bad_record_error(
                    f"the broker refuses a record for topic {topic}, partition {partition} ({said})", topic
                )
            case _:
                what = f"write to topic {topic}, partition {partition}"
                raise self._session.make_error(what, answer.code, [topic], answer.detail)

    def _acknowledge(self, lane: _PartitionQueue, base_offset: int) -> None:
        batch = lane.parcels.popleft().batch
        lane.pause_ms = 0
        lane.acknowledged += batch.records
        self.acknowledged += batch.records
        self._unacknowledged_bytes -= len(batch.data)
        if base_offset >= 0:
            self.evidence = Evidence(*lane.place, base_offset)

    def _forget_requests(self, lost: BrokerUnavailableError | AuthorizationError) -> None:
        """Forget all requests after the connection to all leaders was closed."""
        # The broker may have appended their batches or not, so they stay first in their queues.
        if isinstance(lost, AuthorizationError):
            raise faults.mark_authorization_error(lost, "a right to write") from None
        self._flights.clear()
        for lane in self._lanes.values():
            if lane.is_under_way:
                lane.is_under_way = False
                # Leaders move if a broker fails.
                self._stale_topics.add(lane.place[0])
                self._postpone(lane, lost.why)

    def _postpone(self, lane: _PartitionQueue, why: str) -> None:
        """Let a queue pause before its first batch is sent again; raise if the delivery timeout is over."""
        parcel, attended_ms = lane.parcels[0], self._read_active_ms()
        if parcel.deadline_ms is None:
            parcel.deadline_ms = attended_ms + self._settings.delivery_timeout_ms
        elif attended_ms >= parcel.deadline_ms:
            topic, partition = lane.place
            what = f"deliver a batch to topic {topic}, partition {partition}"
            raise faults.make_unanswered_error(what, self._settings.delivery_timeout_ms, why) from None
        lane.pause_ms = min(max(2 * lane.pause_ms, FIRST_PAUSE_MS), LONGEST_PAUSE_MS)
        lane.not_before_ms = self._clock.monotonic_ms() + lane.pause_ms


def _interleave(streams: list[Iterator[_T]]) -> Iterator[list[_T]]:
    """Yield the first elements of all streams, then the second ones, until all are exhausted."""
    while streams:
        turn = []
        for stream in tuple(streams):
            if (one := next(stream, None)) is None:
                streams.remove(stream)
            else:
                turn.append(one)
        yield turn


_LOG = logging.getLogger(__name__)
#: A task collects about this many bytes of records and encodes them while the previous ones are under way.
#: A lower value makes smaller batches; with a higher one the broker waits longer for the first.
_PORTION_BYTES = 4 * 1024 * 1024
_LEAST_PORTION_BYTES = 256 * 1024
#: Time limit of an abort that may fail: the owner of the lease aborts again.
ABORT_BOUND_MS = 3_000


@dataclass(slots=True)
class StagedCounts:
    #: Number of records sent, dead letters included.
    sent: int = 0
    #: Size of their keys and values.
    bytes: int = 0
    dropped: int = 0
    dead_lettered: int = 0


class _Phase(enum.Enum):
    WRITING = "is being written"
    PREPARED = "is prepared"
    FAILED = "failed"
    ABANDONED = "was abandoned"


class StagedTransaction:
    """Transaction of one task attempt; abandoned on exit unless it is prepared. Not thread safe."""

    # It begins when the first records are sent, so a task without records leaves nothing at the broker. A
    # crash leaves at most an open transaction under `settings.transactional_id`, which the owner of the
    # lease, or the timeout, aborts. After any error the caller can only abandon it.

    def __init__(
        self, settings: StagingSettings, *, pool: WirePool = WIRES, common_headers: CommonHeaders = ()
    ) -> None:
        self._settings, self._pool = settings, pool
        self._wire: KafkaWire | None = pool.borrow(settings.connection)
        self._clock = self._wire.clock
        session = SharedSession if settings.shared is not None else SESSIONS[settings.guarantee]
        self._session = session(self._wire, settings)
        self._admission = Admission(settings, common_headers, self._clock)
        self._outbox = Outbox(self._session)
        self._spreader = StickyPartitioner(settings.producer.batch_bytes)
        self._collected: list[OutgoingRecords] = []
        self._collected_bytes = 0
        self._portion_bytes = max(_LEAST_PORTION_BYTES, _PORTION_BYTES // settings.transactions_of_task)
        self._phase = _Phase.WRITING
        self.counts = StagedCounts()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._phase is not _Phase.PREPARED:
            self.abandon()

    @property
    def ticket(self) -> Ticket | None:
        return self._session.ticket

    def count_acknowledged(self) -> dict[Place, int]:
        return self._outbox.count_acknowledged()

    def now_ms(self) -> int:
        return self._clock.wall_ms()

    def write(
        self,
        keys: Column | None,
        values: Column,
        headers: Column | CommonHeaders | None = None,
        topics: Column | str | None = None,
        partitions: Column | None = None,
        timestamps_ms: Int64s | int | None = None,
        misfits: Column | None = None,
    ) -> None:
        """Add records; they are sent once there are enough of them, at the latest by :meth:`prepare`."""
        self._require_writing()
        if not len(values):
            return
        at_ms = self._clock.wall_ms() if timestamps_ms is None else timestamps_ms
        with self._failing():
            headers = self._admission.add_common_headers(headers)
            records = OutgoingRecords.of(keys, values, headers, topics, partitions, at_ms, misfits)
            if self._collected and not records.continues(self._collected[-1]):
                self._send_collected()
            self._collected.append(records)
            self._collected_bytes += records.about_bytes
            if self._collected_bytes >= self._portion_bytes:
                self._send_collected()

    def prepare(self) -> KafkaCommittable | None:
        """Make all records durable but not visible; return the handle, or None without a transaction."""
        self._require_writing()
        with self._failing():
            self._send_collected()
            self._outbox.drain()
            committable = self._committable()
        self._phase = _Phase.PREPARED
        self._release()
        return committable

    def abandon(self, within_ms: int = ABORT_BOUND_MS) -> None:
        """Abort the transaction in about `within_ms`; never raises, may be repeated."""
        if self._phase in (_Phase.PREPARED, _Phase.ABANDONED):
            return
        failed_before, self._phase = self._phase is _Phase.FAILED, _Phase.ABANDONED
        self._collected.clear()
        try:
            # Requests under way should arrive before the abort. Only since Kafka 3.6 (KIP-890) do brokers
            # refuse them after it.
            quiet = self._outbox.wait_for_pending(within_ms // 3)
            if (failed_before or not quiet) and self._wire is not None:
                # The next task would get this wire, which may be broken.
                self._wire.close()
            if within_ms > 0 and self._session.is_begun and self._session.is_transactional:
                self._abort(within_ms // 2)
        except Exception as failed:
            _LOG.warning(
                "could not abort the Kafka transaction of %s (%s); its lease or its timeout ends it",
                self._session.settings.transactional_id,
                failed,
            )
        finally:
            self._release()

    def _send_collected(self) -> None:
        if not self._collected:
            return
        whole = OutgoingRecords.concat(self._collected)
        self._collected, self._collected_bytes = [], 0
        portions = max(1, whole.about_bytes // self._portion_bytes)
        step = -(-len(whole) // portions)
        for start in range(0, len(whole), step):
            for topic, records in split_by_topic(whole.slice(start, step), self._settings.default_topic):
                judged = self._admission.admit(topic, records)
                self.counts.dropped += judged.dropped
                for name, letters in judged.letters:
                    self._send(name, letters)
                    self.counts.dead_lettered += len(letters)
                self._send(topic, judged.admitted)

    def _send(self, topic: str, records: OutgoingRecords) -> None:
        if not len(records):
            return
        layout = self._session.layout_with(topic, records.highest_partition)
        parts = split_by_partition(topic, records, layout, self._spreader)
        places = {(topic, partition): rows for partition, rows in parts.items()}
        # This order matters: brokers refuse records of a partition outside the transaction.
        if not self._session.is_begun:
            self._session.begin()
        self._session.join(places)
        self._outbox.post(places)
        self.counts.sent += len(records)
        sizes = (np.maximum(lengths(column), 0).sum() for column in (records.keys, records.values))
        self.counts.bytes += int(sum(sizes))

    def _committable(self) -> KafkaCommittable | None:
        outbox, session = self._outbox, self._session
        if outbox.acknowledged != self.counts.sent:
            raise InternalError(
                f"{self.counts.sent} records were sent, but {outbox.acknowledged} acknowledged after a flush"
            )
        name = session.settings.transactional_id
        if not session.is_begun or name is None:
            return None
        if outbox.evidence is None:
            raise faults.make_staging_error(
                "the broker acknowledged no record with its offset",
                why="each was a repeat whose first answer was lost; the transaction's fate could not be "
                "proved later",
            )
        handle = (name, session.producer_id, session.producer_epoch)
        return KafkaCommittable(*handle, outbox.evidence, outbox.acknowledged)

    def _abort(self, within_ms: int) -> None:
        assert isinstance(self._session, TransactionSession)
        # Use a new connection with short timeouts: the borrowed one may be broken.
        wire = KafkaWire(self._settings.connection, timeout_ms=within_ms, clock=self._clock)
        try:
            left = abort_own(wire, self._session.handle, within_ms)
        finally:
            wire.close()
        if left:
            name = self._session.settings.transactional_id
            raise faults.make_staging_error(f"{name} was not aborted", why=left)

    def _release(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            self._pool.give_back(wire)

    def _require_writing(self) -> None:
        if self._phase is not _Phase.WRITING:
            name = self._session.settings.transactional_id or "a task"
            raise InternalError(f"nothing can be added, the output of {name} {self._phase.value}")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._phase = _Phase.FAILED
            raise
