"""Producer of a task's Kafka records, in a transaction that another process ends."""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self, TypeVar

import kafka.errors as kafka_errors
import numpy as np

from flinkish_spark.connectors.kafka.client import admission as faults
from flinkish_spark.connectors.kafka.client.admission import (
    Admission,
    OutgoingRecords,
    Reaction,
    StickyPartitioner,
    find_reaction,
    split_by_partition,
    split_by_topic,
)
from flinkish_spark.connectors.kafka.client.batches import (
    TRANSACTIONAL_BIT,
    Column,
    CommonHeaders,
    EncodedBatch,
    encode_batches,
    lengths,
    sequence_after,
)
from flinkish_spark.connectors.kafka.client.client import (
    WIRES,
    BatchAnswer,
    ConfirmationCounter,
    EndAction,
    Handle,
    KafkaWire,
    ProduceClient,
    ProduceInFlight,
    ProducerGrant,
    TopicLayout,
    WirePool,
    describe_code,
)
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.settings import DeliveryGuarantee, StagingSettings, TaskAttempt
from flinkish_spark.connectors.kafka.client.transactions import (
    Evidence,
    KafkaCommittable,
    TransactionClient,
    abort_own,
)
from flinkish_spark.core.clock import FIRST_PAUSE_MS, LONGEST_PAUSE_MS, SystemClock, tries
from flinkish_spark.core.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    EnvironmentFault,
    FlinkishError,
    InternalError,
)
from flinkish_spark.protocol.ids import Place
from flinkish_spark.types.record_time import Int64s

_T = TypeVar("_T")
#: Age at which cached partitions are asked for again, since partitions can be added.
_LAYOUT_MAX_AGE_MS = 300_000
_UNKNOWN: int = kafka_errors.UnknownTopicOrPartitionError.errno
_INVALID: int = kafka_errors.InvalidTopicError.errno

#: Cached topic layouts of this process, with their time on the monotonic clock. Plain values, so that a
#: forked worker can use its parent's.
_known: dict[KafkaConnection, dict[str, tuple[TopicLayout, int]]] = {}


@dataclass(frozen=True, slots=True)
class Ticket:
    """Producer id and epoch that an attempt got for its task's ticket id; increases with each attempt."""

    producer_id: int
    producer_epoch: int

    def follows(self, other: Ticket | None) -> bool:
        """Return whether no ticket was taken in between; None means that the id was never used."""
        if other is not None and other.producer_epoch < _LAST_EPOCH:
            return self == Ticket(other.producer_id, other.producer_epoch + 1)
        # A new producer id, or the next one after its epochs are used up.
        return self.producer_epoch == 0 and (other is None or self.producer_id != other.producer_id)


#: After this epoch Kafka assigns another producer id; it reserves one more epoch for fencing.
_LAST_EPOCH = 32_766


class ProducerSession:
    """Topic metadata and the producer's identity; this one writes without a producer id."""

    #: Attribute bits of every batch.
    batch_attributes = 0
    #: Whether a begun session may have a transaction to abort.
    is_transactional = False
    #: Ticket of a begun attempt that writes into a shared transaction.
    ticket: Ticket | None = None

    def __init__(self, wire: KafkaWire, settings: StagingSettings) -> None:
        self.settings = settings
        self.use(wire)
        self._layouts = _known.setdefault(wire.connection, {})
        self.producer_id = -1
        self.producer_epoch = -1
        self.is_begun = False

    def use(self, wire: KafkaWire) -> None:
        self.wire, self.client = wire, ProduceClient(wire)

    def begin(self) -> None:
        self.is_begun = True

    def join(self, places: Iterable[Place]) -> None:
        """Prepare writing to partitions; may raise the errors of :meth:`begin`."""

    def first_sequence(self, place: Place) -> int:
        return 0

    def _take(self, what: str, right: str, ask: Callable[[int], ProducerGrant]) -> None:
        grant = self.ask_brokers(what, right, ask, lambda grant: self.why_ask_again(what, [grant.code]))
        self.producer_id, self.producer_epoch = grant.producer_id, grant.producer_epoch
        self.is_begun = True

    def layout(self, topic: str) -> TopicLayout:
        """Return partitions and leaders of a topic, at most five minutes old."""
        known = self._layouts.get(topic)
        now_ms = self.wire.clock.monotonic_ms()
        if known is None or now_ms - known[1] > _LAYOUT_MAX_AGE_MS:
            self.refresh([topic])
        return self._layouts[topic][0]

    def layout_with(self, topic: str, partition: int) -> TopicLayout:
        if partition >= len(self.layout(topic).leaders):
            self.refresh([topic])
        return self.layout(topic)

    def leader(self, place: Place) -> int:
        leaders = self.layout(place[0]).leaders
        return leaders[place[1]] if place[1] < len(leaders) else -1

    def refresh(self, topics: Iterable[str]) -> None:
        """Ask for partitions and leaders of topics now."""
        wanted = sorted(set(topics))
        for topic in wanted:
            self._layouts.pop(topic, None)
        what, doubt = f"describe topics {', '.join(wanted)}", ConfirmationCounter()

        def why_ask_again(found: dict[str, TopicLayout]) -> str:
            codes = {topic: layout.code for topic, layout in found.items()}
            self.check_topics_allowed(codes.items())
            is_believed = doubt.is_confirmed(_UNKNOWN in codes.values())
            for topic, code in codes.items():
                if code == _INVALID or (code == _UNKNOWN and is_believed):
                    raise faults.StagingError(
                        f"topic '{topic}' does not exist",
                        why=f"the brokers at {self.wire.connection.servers} do not know it",
                        what_to_do="create it, or correct its name",
                        topic=topic,
                    )
            return self.why_ask_again(what, codes.values())

        found = self.ask_brokers(
            what,
            f"DESCRIBE on topics [{', '.join(wanted)}]",
            lambda left_ms: self.client.layouts(wanted, connect_within_ms=left_ms),
            why_ask_again,
        )
        now_ms = self.wire.clock.monotonic_ms()
        self._layouts.update((topic, (layout, now_ms)) for topic, layout in found.items())

    def check_topics_allowed(self, codes: Iterable[tuple[str, int]]) -> None:
        denied = [topic for topic, code in codes if code == faults.TOPIC_DENIED]
        if denied:
            right = faults.describe_missing_right(faults.TOPIC_DENIED, denied, self.settings.transactional_id)
            raise faults.make_missing_right_error(right)

    def ask_brokers(
        self, what: str, right: str, ask: Callable[[int], _T], why_ask_again: Callable[[_T], str]
    ) -> _T:
        """Ask until `why_ask_again` returns "" for the answer; it raises on a refusal."""
        budget_ms = self.settings.producer.delivery_timeout_ms
        last = ""
        for left_ms in tries(budget_ms, self.wire.clock):
            try:
                answer = ask(left_ms)
            except BrokerUnavailableError as lost:
                last = lost.why
                continue
            except AuthorizationError as denied:
                raise faults.mark_authorization_error(denied, right) from None
            except EnvironmentFault as broken:
                raise faults.StagingOutageError(
                    f"could not {what}: {faults.to_one_line(broken.what)}",
                    why=faults.to_one_line(broken.why),
                    what_to_do=broken.what_to_do,
                ) from None
            last = why_ask_again(answer)
            if not last:
                return answer
        raise faults.make_unanswered_error(what, budget_ms, last)

    def why_ask_again(self, what: str, codes: Iterable[int]) -> str:
        """Return the reason to ask again, or ""; raise if another attempt cannot help."""
        last = ""
        for code in codes:
            match find_reaction(code):
                case Reaction.DONE:
                    continue
                case Reaction.AGAIN | Reaction.ASK_FOR_LEADER:
                    last = f"Kafka answered {describe_code(code)}"
                case _:
                    raise self.make_error(what, code)
        return last

    def make_error(self, what: str, code: int, topics: Iterable[str] = (), detail: str = "") -> FlinkishError:
        name = self.settings.transactional_id
        match find_reaction(code):
            case Reaction.NOT_AUTHORIZED:
                return faults.make_missing_right_error(faults.describe_missing_right(code, topics, name))
            case Reaction.FENCED:
                return faults.StagingOutageError(
                    f"the transaction of {name} is no longer ours ({describe_code(code)})",
                    why="another attempt took its id, or its transaction timeout passed",
                    transactional_id=name,
                    code=code,
                )
            case _:
                if code == kafka_errors.InvalidTransactionTimeoutError.errno:
                    limit = "transaction.max.timeout.ms"
                    detail = detail or f"the transaction timeout is above the broker's {limit}"
                why = faults.to_one_line(detail)
                return faults.StagingError(
                    f"Kafka refused to {what} ({describe_code(code)})", why=why, code=code
                )


class IdempotentSession(ProducerSession):
    """Idempotent producer: a batch that is sent again is written once."""

    def begin(self) -> None:
        right = faults.describe_missing_right(faults.CLUSTER_DENIED, (), None)
        self._take(
            "get a producer id", right, lambda left_ms: self.client.init_idempotent(connect_within_ms=left_ms)
        )


class TransactionSession(ProducerSession):
    """Transactional producer: one producer id and epoch, and the partitions of its transaction."""

    batch_attributes = TRANSACTIONAL_BIT
    is_transactional = True

    def __init__(self, wire: KafkaWire, settings: StagingSettings) -> None:
        super().__init__(wire, settings)
        assert settings.transactional_id is not None
        self._name = settings.transactional_id
        self._joined: set[Place] = set()

    @property
    def handle(self) -> Handle:
        return Handle(self._name, self.producer_id, self.producer_epoch)

    def begin(self) -> None:
        """Take a new epoch of the transactional id, which fences its producers and aborts what is open."""
        # This order matters: without a new epoch for every transaction a handle would name two of them, and a
        # commit of the older one would commit the newer data.
        if (attempt := self.settings.attempt) is not None:
            # Choose the id as late as possible, so that no other attempt takes it before its use.
            self._name = find_free_transactional_id(self.wire, self._name, attempt)
            self.settings = replace(self.settings, transactional_id=self._name, attempt=None)
        self._take_epoch(self._name)

    def _take_epoch(self, name: str) -> None:
        timeout_ms = self.settings.transaction_timeout_ms

        def ask(left_ms: int) -> ProducerGrant:
            return self.wire.init_producer_id(name, timeout_ms, connect_within_ms=left_ms)

        right = faults.describe_missing_right(faults.ID_DENIED, (), name)
        self._take(f"initialise transactional id {name}", right, ask)

    def join(self, places: Iterable[Place]) -> None:
        """Add partitions to the transaction, unless they are in it."""
        new = sorted(set(places) - self._joined)
        if not new:
            return
        name = self._name
        what = f"add partitions to the transaction of {name}"

        def ask(left_ms: int) -> dict[Place, int]:
            return self.client.add_partitions(self.handle, new, connect_within_ms=left_ms)

        def why_ask_again(codes: dict[Place, int]) -> str:
            self.check_topics_allowed((topic, code) for (topic, _), code in codes.items())
            if any(find_reaction(code) is Reaction.ASK_FOR_LEADER for code in codes.values()):
                # Raises if the topic was deleted; otherwise the coordinator may not know it yet.
                self.refresh({topic for topic, _ in new})
            return self.why_ask_again(what, codes.values())

        right = faults.describe_missing_right(faults.ID_DENIED, (), name)
        self.ask_brokers(what, right, ask, why_ask_again)
        self._joined.update(new)

    def commit_offsets(self, group: str, offsets: Mapping[Place, int], note: str) -> None:
        right = f"READ on the consumer group {group}"

        def check_codes(codes: Iterable[int]) -> str:
            found = [code for code in codes if code]
            if kafka_errors.GroupAuthorizationFailedError.errno in found:
                raise faults.make_missing_right_error(right)
            return self.why_ask_again(f"store the offsets of group {group}", found)

        self.ask_brokers(
            f"add the group {group} to {self._name}",
            right,
            lambda left_ms: self.client.add_group(self.handle, group, connect_within_ms=left_ms),
            lambda code: check_codes([code]),
        )
        self.ask_brokers(
            f"store the offsets of group {group}",
            right,
            lambda left_ms: self.client.commit_in_transaction(
                self.handle, group, offsets, note, connect_within_ms=left_ms
            ),
            lambda codes: check_codes(codes.values()),
        )

    def commit(self) -> None:
        """Commit the transaction; the next one may begin, under the same epoch."""
        what = f"commit the transaction of {self._name}"
        right = faults.describe_missing_right(faults.ID_DENIED, (), self._name)
        self.ask_brokers(
            what,
            right,
            lambda left_ms: self.wire.end_transaction(
                self.handle, EndAction.COMMIT, connect_within_ms=left_ms
            ),
            lambda code: self.why_ask_again(what, [code]),
        )
        self._joined.clear()


class SharedSession(TransactionSession):
    """Producer of a task in a shared transaction, which the driver begins and ends."""

    # Spark may run a task again while an earlier attempt still writes, and brokers cannot distinguish the
    # two: they acknowledge and drop a batch with the sequence numbers of an earlier one. So an attempt takes
    # a ticket first, and then checks whether another attempt has written. If two attempts check at the same
    # time, both have a ticket, and the driver gives the transaction up.

    #: The driver aborts, not the task.
    is_transactional = False

    def __init__(self, wire: KafkaWire, settings: StagingSettings) -> None:
        super().__init__(wire, settings)
        assert settings.shared is not None
        self._shared = settings.shared

    def begin(self) -> None:
        # This order matters: before the attempt writes, its ticket lets the driver know about it.
        self._take_epoch(self._shared.ticket)
        self.ticket = Ticket(self.producer_id, self.producer_epoch)
        self.producer_id, self.producer_epoch = self._shared.producer_id, self._shared.producer_epoch

    def join(self, places: Iterable[Place]) -> None:
        """Check that partitions have only the records that the driver knows of."""
        new = sorted(set(places) - self._joined)
        if not new:
            return
        found = self.ask_brokers(
            f"describe the producers of {len(new)} partitions",
            f"READ on topics [{', '.join(sorted({topic for topic, _ in new}))}]",
            lambda _left_ms: self.wire.last_sequences(new, self.producer_id, self.producer_epoch),
            lambda _found: "",
        )
        for place, last in found.items():
            wanted = self._shared.find_next_sequence(place)
            if wanted is None:
                raise faults.StagingError(
                    f"partition {place[1]} of topic {place[0]} is not in the checkpoint's transaction",
                    why="it was added to the topic since the checkpoint began",
                )
            # Sequence numbers wrap after 2**31 - 1 records; a transaction has fewer.
            if last != (wanted - 1 if wanted else None):
                raise faults.StagingError(
                    f"partition {place[1]} of topic {place[0]} is not as it was when the micro-batch began",
                    why="another attempt of its task has written to it, and brokers cannot tell them apart",
                    what_to_do="none: the transaction is given up, and its micro-batches run again",
                    transactional_id=self._name,
                    topic=place[0],
                    partition=place[1],
                )
        self._joined.update(new)

    def first_sequence(self, place: Place) -> int:
        return self._shared.find_next_sequence(place) or 0


_SESSIONS = {
    DeliveryGuarantee.EXACTLY_ONCE: TransactionSession,
    DeliveryGuarantee.AT_LEAST_ONCE: IdempotentSession,
    DeliveryGuarantee.NONE: ProducerSession,
}


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
    """Pending batches of one partition in the order of their sequence numbers."""

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
    #: Number of dead letters.
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
        session = SharedSession if settings.shared is not None else _SESSIONS[settings.guarantee]
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
            raise faults.StagingError(
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
            raise faults.StagingError(f"{name} was not aborted", why=left)

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


def abandon_all(transactions: Iterable[StagedTransaction]) -> None:
    """Abandon a task's transactions one after the other, all within the time limit of one."""
    clock = SystemClock()
    end_ms = clock.monotonic_ms() + ABORT_BOUND_MS
    for transaction in transactions:
        transaction.abandon(max(0, end_ms - clock.monotonic_ms()))


#: Transactional ids of a task per stage attempt; Spark restarts task attempt numbers in each of these.
_ATTEMPTS_PER_STAGE_ATTEMPT = 16
MAX_ATTEMPT_INDEX = 64
_ONGOING = "Ongoing"


def find_free_transactional_id(wire: KafkaWire, prefix: str, attempt: TaskAttempt) -> str:
    """Return an id ``<prefix>-<partition>-<index>`` without an open transaction."""
    # When executors are lost Spark runs a stage again while old tasks may still write, and numbers task
    # attempts from 0 again; PySpark does not tell the stage attempt. Taking the id of a task whose result
    # Spark has accepted would abort its transaction, so the coordinator is asked first.
    indexes = range(attempt.number, MAX_ATTEMPT_INDEX, _ATTEMPTS_PER_STAGE_ATTEMPT)
    names = [f"{prefix}-{attempt.partition}-{index}" for index in indexes]
    if attempt.number < _ATTEMPTS_PER_STAGE_ATTEMPT:
        views = TransactionClient.from_wire(wire).describe(names)
        for name in names:
            view = views.get(name)
            if view is None or view.code or view.state != _ONGOING:
                return name
    raise EnvironmentFault(
        f"attempt {attempt.number} of task {attempt.partition} has no transactional id left",
        why=f"a task has {_ATTEMPTS_PER_STAGE_ATTEMPT} for each of {len(names)} attempts of its stage",
        what_to_do="lower spark.task.maxFailures, or find out why tasks fail so often",
    )
