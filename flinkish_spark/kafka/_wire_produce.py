"""Requests of a transactional writer that kafka-python's public API does not offer.

Rules of this file, beside those of ``_wire``:

- Produce stays at version 11 and AddPartitionsToTxn at 3. From Produce 12 on the broker adds
  partitions by itself and every EndTxn raises the epoch (KIP-890), which a committable must not.
- A Produce request is begun and finished in two calls: it travels on the client's own thread
  while the caller encodes the next one.
- Topics are never created, whatever the broker's ``auto.create.topics.enable`` says.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.kafka._wire import _WRONG_CLIENT, KafkaWire, _blocking, _patiently_sent
from flinkish_spark.kafka.answers import Code, Place, ProducerGrant

try:
    import kafka.errors as kafka_errors
    from kafka.protocol.metadata import MetadataRequest
    from kafka.protocol.producer import AddPartitionsToTxnRequest, InitProducerIdRequest, ProduceRequest
except ImportError as missing:
    raise EnvironmentFault(_WRONG_CLIENT, why=str(missing)) from missing

_ADD_PARTITIONS_VERSION = 3
_PRODUCE_VERSION = 11
_INIT_PRODUCER_ID_VERSION = 4
#: The oldest Metadata that can tell what a principal may do with a topic, as numbers of bits; two of these.
_TELLS_RIGHTS_VERSION = 8
_RIGHTS_UNKNOWN = 31
_WRITE = 4
#: Java's: a producer without transactions has no time limit.
_NO_TIME_LIMIT_MS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TopicLayout:
    """Answer to Metadata for one topic.

    Attributes
    ----------
    code
        An error code of Kafka; the leaders count only if it is 0.
    leaders
        At index i the broker that leads partition i, -1 where there is none now.
    """

    code: int
    leaders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Answer to Produce for one batch.

    Attributes
    ----------
    code
        An error code of Kafka.
    base_offset
        The offset of the batch's first record, -1 where the broker did not tell it.
    detail
        What the broker said about an error, often nothing.
    """

    code: int
    base_offset: int
    detail: str = ""


class ProduceInFlight:
    """A Produce request that was handed to the client's thread; finished once."""

    def __init__(self, places: Iterable[Place], future: Any, is_orphan: Callable[[], bool]) -> None:
        self.places = tuple(places)
        self._future, self._is_orphan = future, is_orphan

    @property
    def is_done(self) -> bool:
        """Whether it was answered or lost; finishing it does not wait then."""
        return bool(self._future.is_done) or self._is_orphan()

    def _response(self) -> Any:
        if not self._future.is_done:
            raise kafka_errors.KafkaTimeoutError("the client's thread gave no answer")
        failure = self._future.exception
        if failure is None:
            return self._future.value
        if isinstance(failure, kafka_errors.KafkaError | OSError):
            raise failure
        # A socket that closes under its feet, a task that is cancelled: the client has many words for it.
        raise kafka_errors.KafkaConnectionError(f"the request was dropped ({type(failure).__name__})")


class ProduceClient:
    """What a transactional writer asks of Kafka, over a borrowed wire.

    Raises
    ------
    BrokerUnavailableError
        By every method: nobody answered. The broker may have acted nevertheless.
    AuthorizationError
        By every method: Kafka refuses the principal, or its login.
    """

    def __init__(self, wire: KafkaWire) -> None:
        self._wire = wire

    def layouts(self, topics: Iterable[str], *, connect_within_ms: int) -> dict[str, TopicLayout]:
        """Ask once for partitions and leaders; every topic has an entry, if only with an error code."""
        wanted = [MetadataRequest.MetadataRequestTopic(name=name) for name in sorted(set(topics))]
        request = MetadataRequest(topics=wanted, allow_auto_topic_creation=False)

        async def body(admin: Any) -> dict[str, TopicLayout]:
            response = await admin._manager.send(request)
            found = {topic.name: _layout_of(topic) for topic in response.topics}
            cluster = admin._manager.cluster
            leaders = {node for layout in found.values() for node in layout.leaders if node >= 0}
            if any(cluster.broker_metadata(node) is None for node in leaders):
                # A broker that joined since the client was built; it could not be connected to.
                await cluster.refresh_metadata()
            return found

        unknown = TopicLayout(Code.UNKNOWN_TOPIC_OR_PARTITION)
        what = f"describe topics {', '.join(topic.name for topic in wanted)}"
        found = self._wire.attempt(what, _blocking(body), connect_within_ms=connect_within_ms)
        return {topic.name: found.get(topic.name, unknown) for topic in wanted}

    def unwritable(self, topics: Iterable[str]) -> list[str]:
        """Return the topics that this principal may not write, as far as the broker tells."""
        wanted = [MetadataRequest.MetadataRequestTopic(name=name) for name in sorted(set(topics))]
        request = MetadataRequest(
            topics=wanted,
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=True,
            min_version=_TELLS_RIGHTS_VERSION,
        )

        async def body(admin: Any) -> list[str]:
            response = await admin._manager.send(request)
            rights = {topic.name: topic.authorized_operations for topic in response.topics}
            # Anything but a set is kafka-python's word for "the broker did not say".
            told = {name: bits for name, bits in rights.items() if isinstance(bits, set)}
            return [name for name, bits in told.items() if not bits & {_RIGHTS_UNKNOWN, _WRITE}]

        what = "ask for rights on topics"
        return self._wire.attempt(what, _blocking(body), connect_within_ms=self._wire.timeout_ms)

    def init_idempotent(self, *, connect_within_ms: int) -> ProducerGrant:
        """Ask any broker once for a producer id that belongs to no transactional id."""
        request = InitProducerIdRequest(
            transactional_id=None,
            transaction_timeout_ms=_NO_TIME_LIMIT_MS,
            producer_id=-1,
            producer_epoch=-1,
            max_version=_INIT_PRODUCER_ID_VERSION,
        )

        async def body(admin: Any) -> ProducerGrant:
            answer = await admin._manager.send(request)
            return ProducerGrant(int(answer.error_code), answer.producer_id, answer.producer_epoch)

        what = "get a producer id"
        try:
            return self._wire.attempt(what, _blocking(body), connect_within_ms=connect_within_ms)
        except kafka_errors.BrokerResponseError as refused:
            return ProducerGrant(int(refused.errno), -1, -1)

    def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        places: Iterable[Place],
        *,
        connect_within_ms: int,
    ) -> dict[Place, int]:
        """Ask once to make partitions part of the transaction; return the error code of each.

        Must be acknowledged before anything is produced to them. May be repeated.
        """
        wanted = tuple(places)
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=transactional_id,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=producer_epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=partitions)
                for topic, partitions in _by_topic(wanted).items()
            ],
            max_version=_ADD_PARTITIONS_VERSION,
        )
        what = f"add partitions to transaction {transactional_id}"
        answer = self._wire._ask_coordinator(what, transactional_id, request, connect_within_ms)
        if isinstance(answer, int):
            return dict.fromkeys(wanted, answer)
        codes = {
            (topic.name, row.partition_index): int(row.partition_error_code)
            for topic in answer.results_by_topic_v3_and_below
            for row in topic.results_by_partition
        }
        if Code.NOT_COORDINATOR in codes.values() or Code.COORDINATOR_NOT_AVAILABLE in codes.values():
            self._wire._forget_coordinator(transactional_id)
        return {place: codes[place] for place in wanted}

    def begin_produce(
        self,
        leader: int,
        transactional_id: str | None,
        batches: Mapping[Place, bytes],
        *,
        acks: int,
        request_timeout_ms: int,
        answered: threading.Event,
        connect_within_ms: int,
    ) -> ProduceInFlight:
        """Hand a Produce request with at most one batch per partition to the client's thread.

        `answered` is set once it is answered or lost; without `acks`, once it is sent. At most five
        requests may be under way to one leader, counting all kinds (KIP-98).
        """
        request = ProduceRequest(
            transactional_id=transactional_id,
            acks=acks,
            timeout_ms=request_timeout_ms,
            topic_data=_topic_data(batches),
            max_version=_PRODUCE_VERSION,
        )

        def begin(admin: Any) -> ProduceInFlight:
            future = admin._manager.call_soon(_patiently_sent, admin, request, leader, request_timeout_ms)
            future.add_both(lambda _: answered.set())
            return ProduceInFlight(batches, future, lambda: self._wire._admin is not admin)

        return self._wire.attempt("write records", begin, connect_within_ms=connect_within_ms)

    def finish_produce(self, request: ProduceInFlight) -> dict[Place, BatchAnswer]:
        """Return the answer for every batch of a request; call it when the request is done.

        Raises
        ------
        BrokerUnavailableError
            If it was lost, or is not done yet. The connection is closed then, and with it every
            request that is under way; the broker may have appended their batches nevertheless.
        AuthorizationError
            If Kafka refuses the principal altogether.
        """

        def finish(_admin: Any) -> dict[Place, BatchAnswer]:
            response = request._response()
            if response is None:
                # Nobody was to acknowledge it.
                return dict.fromkeys(request.places, BatchAnswer(Code.NONE, -1))
            return {
                (topic.name, row.index): BatchAnswer(
                    int(row.error_code), int(row.base_offset), row.error_message or ""
                )
                for topic in response.responses
                for row in topic.partition_responses
            }

        if request._is_orphan():
            # Something else on the wire was lost, and took this request's connection along.
            raise self._wire._unavailable("write records", None)
        try:
            return self._wire.attempt("write records", finish, connect_within_ms=self._wire.timeout_ms)
        except kafka_errors.BrokerResponseError as refused:
            return {place: BatchAnswer(int(refused.errno), -1, str(refused)) for place in request.places}


def _layout_of(topic: Any) -> TopicLayout:
    leaders = {row.partition_index: int(row.leader_id) for row in topic.partitions}
    return TopicLayout(
        int(topic.error_code), tuple(leaders.get(i, -1) for i in range(max(leaders, default=-1) + 1))
    )


def _by_topic(places: Iterable[Place]) -> dict[str, list[int]]:
    partitions: dict[str, list[int]] = defaultdict(list)
    for topic, partition in places:
        partitions[topic].append(partition)
    return partitions


def _topic_data(batches: Mapping[Place, bytes]) -> list[Any]:
    topic_type = ProduceRequest.TopicProduceData
    rows: dict[str, list[Any]] = defaultdict(list)
    for (topic, partition), data in batches.items():
        rows[topic].append(topic_type.PartitionProduceData(index=partition, records=data))
    return [topic_type(name=topic, partition_data=data) for topic, data in rows.items()]
