"""Record batches on their way to the leaders of their partitions, until each is acknowledged.

A producer without id and sequence numbers (``DeliveryGuarantee.NONE``) goes the same way; a batch that is
sent again is then written again.

The order of a partition's batches is the correctness argument (KIP-98: a broker accepts the next
sequence number or refuses). Rules:

- A batch leaves its lane only when it is acknowledged; until then it is sent again as it is, with
  the same producer id, epoch and sequence number. A broker that has it already says so.
- One batch of a lane is under way at a time, and one request to a leader, holding the next batch
  of as many of its lanes as fit. While it travels the caller encodes what follows.
- A lost connection says nothing about what was appended. All requests under way are forgotten
  together with the connection, and their batches are still first in their lanes.
- Every batch has the delivery timeout, counted from its first sending.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from flinkish_spark.errors import AuthorizationError, BrokerUnavailableError
from flinkish_spark.kafka import staging_faults as faults
from flinkish_spark.kafka._columns import Rows
from flinkish_spark.kafka._producer_session import ProducerSession
from flinkish_spark.kafka._wire_produce import BatchAnswer, ProduceInFlight
from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.evidence import Evidence
from flinkish_spark.kafka.record_batch import EncodedBatch, encode_batches, sequence_after
from flinkish_spark.kafka.write_answers import Reaction, described, reaction_to

_T = TypeVar("_T")
_FIRST_PAUSE_MS = 20
_LONGEST_PAUSE_MS = 500
#: More than this is not held back in memory: the caller waits for acknowledgements.
_MOST_UNACKNOWLEDGED_BYTES = 16 * 1024 * 1024
#: The client ends a request by itself; this much later its thread must be dead.
_THREAD_DEAD_MS = 10_000
_NO_ANSWER = BatchAnswer(-1, -1, "the answer does not name the partition")


@dataclass(slots=True)
class _Parcel:
    """A batch that is not acknowledged yet, and its records, in case it has to be cut."""

    batch: EncodedBatch
    rows: Rows
    #: Set at the first sending.
    deadline_ms: int | None = None


@dataclass(slots=True)
class _Lane:
    """The batches of one partition, in the order of their sequence numbers."""

    place: Place
    parcels: deque[_Parcel] = field(default_factory=deque)
    next_sequence: int = 0
    is_under_way: bool = False
    pause_ms: int = 0
    not_before_ms: int = 0


@dataclass(frozen=True, slots=True)
class _Flight:
    request: ProduceInFlight
    dead_at_ms: int


class Outbox:
    """All records of one transaction between their encoding and their acknowledgement.

    Parameters
    ----------
    session
        Has begun, and joined every partition that records are posted to.

    Attributes
    ----------
    acknowledged
        How many records the brokers have.
    evidence
        The place of one of them, None before the first acknowledgement that tells an offset.
    """

    def __init__(self, session: ProducerSession) -> None:
        self._session, self._settings = session, session.settings.producer
        self._clock = session.wire.clock
        self._lanes: dict[Place, _Lane] = {}
        self._flights: dict[int, _Flight] = {}
        self._answered = threading.Event()
        self._unacknowledged_bytes = 0
        self._stale_topics: set[str] = set()
        #: Topic -> what its batches may take since the broker refused a larger one.
        self._lowered_limits: dict[str, int] = {}
        self.acknowledged = 0
        self.evidence: Evidence | None = None

    def post(self, parts: Mapping[Place, Rows]) -> None:
        """Encode records and send them as far as possible; waits only while too much is under way.

        Raises
        ------
        BadRecordError, AuthorizationError, StagingFailed
            If a batch failed, of this call or an earlier one. The transaction must be aborted.
        """
        # In turn, so that a request has a batch for each of a leader's partitions.
        for turn in _in_turn([self._parcels(place, rows) for place, rows in parts.items()]):
            for place, parcel in turn:
                self._lanes[place].parcels.append(parcel)
                self._unacknowledged_bytes += len(parcel.batch.data)
            self._advance()
            self._wait_until(_MOST_UNACKNOWLEDGED_BYTES)

    def drain(self) -> None:
        """Return once every record is acknowledged; raises as :meth:`post`."""
        self._advance()
        self._wait_until(0)

    def hush(self, within_ms: int) -> bool:
        """Wait for what is under way without sending more; return whether nothing is any more."""
        end_ms = self._clock.monotonic_ms() + within_ms
        while any(not flight.request.is_done for flight in self._flights.values()):
            left_ms = end_ms - self._clock.monotonic_ms()
            if left_ms <= 0:
                return False
            self._answered.clear()
            self._answered.wait(min(left_ms, _LONGEST_PAUSE_MS) / 1000)
        return True

    # -- encoding -----------------------------------------------------------------------------

    def _parcels(self, place: Place, rows: Rows) -> Iterator[tuple[Place, _Parcel]]:
        lane = self._lanes.setdefault(place, _Lane(place))
        first = lane.next_sequence
        lane.next_sequence = sequence_after(first, len(rows))
        for parcel in self._encoded(place[0], rows, first):
            yield place, parcel

    def _encoded(self, topic: str, rows: Rows, sequence: int) -> Iterator[_Parcel]:
        limit = self._session.settings.batch_limit_bytes
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
            yield _Parcel(batch, rows.slice(start, batch.records))
            start += batch.records

    def _cut(self, lane: _Lane) -> None:
        """Put two batches in the place of the first one, which its topic does not take."""
        topic, parcel = lane.place[0], lane.parcels.popleft()
        size, records = len(parcel.batch.data), parcel.batch.records
        if size <= self._lowered_limits.get(topic, size):
            # Otherwise it was encoded before the limit was lowered, and tells nothing about the new one.
            self._lowered_limits[topic] = size // 2
        half, sequence = records // 2, parcel.batch.base_sequence
        halves = [
            *self._encoded(topic, parcel.rows.slice(0, half), sequence),
            *self._encoded(topic, parcel.rows.slice(half, records - half), sequence_after(sequence, half)),
        ]
        lane.parcels.extendleft(reversed(halves))
        self._unacknowledged_bytes += sum(len(one.batch.data) for one in halves) - size

    # -- sending ------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take in what is answered and send what can be sent; does not wait."""
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
            pause_ms = min([_LONGEST_PAUSE_MS, *pauses])
            if self._flights:
                self._answered.wait(pause_ms / 1000)
            elif pauses:
                self._clock.sleep_ms(pause_ms)
            self._advance()

    def _sendable(self) -> dict[int, list[_Lane]]:
        """Return for each idle leader the lanes whose first batch fits into its next request."""
        now_ms, limit = self._clock.monotonic_ms(), self._session.settings.request_limit_bytes
        lanes: dict[int, list[_Lane]] = {}
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

    def _send(self, leader: int, lanes: Iterable[_Lane]) -> None:
        now_ms = self._clock.monotonic_ms()
        batches = {}
        for lane in lanes:
            lane.is_under_way = True
            batches[lane.place] = lane.parcels[0].batch.data
            if lane.parcels[0].deadline_ms is None:
                lane.parcels[0].deadline_ms = now_ms + self._settings.delivery_timeout_ms
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
            self._lost(lost)
        else:
            self._flights[leader] = _Flight(request, now_ms + timeout_ms + _THREAD_DEAD_MS)

    # -- answers ------------------------------------------------------------------------------

    def _collect(self) -> None:
        for leader, flight in tuple(self._flights.items()):
            if not flight.request.is_done and self._clock.monotonic_ms() < flight.dead_at_ms:
                continue
            try:
                answers = self._session.client.finish_produce(flight.request)
            except (BrokerUnavailableError, AuthorizationError) as lost:
                self._lost(lost)
                return
            del self._flights[leader]
            for place in flight.request.places:
                self._lanes[place].is_under_way = False
                self._take(self._lanes[place], answers.get(place, _NO_ANSWER))

    def _take(self, lane: _Lane, answer: BatchAnswer) -> None:
        (topic, partition), parcel = lane.place, lane.parcels[0]
        match reaction_to(answer.code):
            case Reaction.DONE:
                self._acknowledged(lane, answer.base_offset)
            case Reaction.AGAIN:
                self._postpone(lane, _said(answer))
            case Reaction.ASK_FOR_LEADER:
                self._stale_topics.add(topic)
                self._postpone(lane, _said(answer))
            case Reaction.CUT if parcel.batch.records > 1:
                self._cut(lane)
            case Reaction.CUT:
                raise faults.refused_as_too_large(topic, self._session.settings.record_limit_bytes)
            case Reaction.BAD_RECORD:
                raise faults.refused_records(topic, partition, answer.code, answer.detail)
            case _:
                what = f"write to topic {topic}, partition {partition}"
                raise self._session.fault(what, answer.code, [topic], answer.detail)

    def _acknowledged(self, lane: _Lane, base_offset: int) -> None:
        batch = lane.parcels.popleft().batch
        lane.pause_ms = 0
        self.acknowledged += batch.records
        self._unacknowledged_bytes -= len(batch.data)
        if base_offset >= 0:
            self.evidence = Evidence(*lane.place, base_offset)

    def _lost(self, lost: BrokerUnavailableError | AuthorizationError) -> None:
        """Forget every request: the connection is closed, for all leaders."""
        if isinstance(lost, AuthorizationError):
            raise faults.denied(lost, "a right to write") from None
        self._flights.clear()
        for lane in self._lanes.values():
            if lane.is_under_way:
                lane.is_under_way = False
                # Leaders move when a broker goes.
                self._stale_topics.add(lane.place[0])
                self._postpone(lane, lost.why)

    def _postpone(self, lane: _Lane, why: str) -> None:
        """Let a lane wait before its first batch is sent again; raise if its time is over."""
        now_ms, parcel = self._clock.monotonic_ms(), lane.parcels[0]
        if parcel.deadline_ms is None:
            parcel.deadline_ms = now_ms + self._settings.delivery_timeout_ms
        elif now_ms >= parcel.deadline_ms:
            topic, partition = lane.place
            what = f"deliver a batch to topic {topic}, partition {partition}"
            raise faults.unanswered(what, self._settings.delivery_timeout_ms, why) from None
        lane.pause_ms = min(max(2 * lane.pause_ms, _FIRST_PAUSE_MS), _LONGEST_PAUSE_MS)
        lane.not_before_ms = now_ms + lane.pause_ms


def _said(answer: BatchAnswer) -> str:
    return f"Kafka answered {described(answer.code)}" + (f", {answer.detail}" if answer.detail else "")


def _in_turn(streams: list[Iterator[_T]]) -> Iterator[list[_T]]:
    """Yield the first of each stream, then the second of each, until all are at their end."""
    while streams:
        turn = []
        for stream in tuple(streams):
            if (one := next(stream, None)) is None:
                streams.remove(stream)
            else:
                turn.append(one)
        yield turn
