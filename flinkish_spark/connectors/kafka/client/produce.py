"""Requests of a producer over a borrowed wire: kafka-python's own producer ends only its own transactions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import kafka.errors as kafka_errors
from kafka.protocol.metadata import CoordinatorType, MetadataRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)

from flinkish_spark.connectors.kafka.client.client import (
    UNKNOWN_PARTITION,
    Handle,
    KafkaWire,
    ProducerGrant,
    UnknownRequest,
    group_by_topic,
    make_blocking,
    make_init_request,
)
from flinkish_spark.protocol.ids import Place

#: From Produce 12 on a broker adds partitions and groups by itself, and every EndTxn raises the epoch
#: (KIP-890), which a committable must not.
_PRODUCE_VERSION = 11
_ADD_PARTITIONS_VERSION, _ADD_OFFSETS_VERSION, _TXN_OFFSET_COMMIT_VERSION = 3, 3, 3
#: The oldest Metadata with a principal's rights on a topic, as bit numbers; two of these.
_TELLS_RIGHTS_VERSION = 8
_RIGHTS_UNKNOWN = 31
_WRITE = 4
#: Java's value for a producer without transactions.
_NO_TIME_LIMIT_MS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TopicLayout:
    #: Kafka's error code; the leaders are valid only if it is 0.
    code: int
    #: The leader of each partition, -1 if it has none now.
    leaders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    #: Kafka's error code.
    code: int
    #: Offset of the batch's first record; -1 if the broker did not send it.
    base_offset: int = -1
    #: The broker's error message, often empty.
    detail: str = ""


class ProduceInFlight:
    """A Produce request under way in the client's thread; to be finished once."""

    def __init__(self, places: Iterable[Place], future: Any, is_orphan: Callable[[], bool]) -> None:
        self.places = tuple(places)
        self._future, self._is_orphan = future, is_orphan

    @property
    def is_done(self) -> bool:
        """True if it was answered or lost, so that finishing it does not wait."""
        return bool(self._future.is_done) or self._is_orphan()

    def _response(self) -> Any:
        if not self._future.is_done:
            raise kafka_errors.KafkaTimeoutError("the client's thread gave no answer")
        failure = self._future.exception
        if failure is None:
            return self._future.value
        if isinstance(failure, kafka_errors.KafkaError | OSError):
            raise failure
        # kafka-python raises many types for a closed socket or a cancelled task.
        raise kafka_errors.KafkaConnectionError(f"the request was dropped ({type(failure).__name__})")


class ProduceClient:
    """Sends the requests of a producer over a borrowed wire."""

    def __init__(self, wire: KafkaWire) -> None:
        self._wire = wire

    def layouts(self, topics: Iterable[str], *, connect_within_ms: int) -> dict[str, TopicLayout]:
        """Ask once for partitions and leaders; the result has each topic, maybe with an error code."""
        wanted = [MetadataRequest.MetadataRequestTopic(name=name) for name in sorted(set(topics))]
        request = MetadataRequest(topics=wanted, allow_auto_topic_creation=False)

        async def body(admin: Any) -> dict[str, TopicLayout]:
            response = await admin._manager.send(request)
            found = {}
            for topic in response.topics:
                by_number = {row.partition_index: int(row.leader_id) for row in topic.partitions}
                leaders = (by_number.get(i, -1) for i in range(max(by_number, default=-1) + 1))
                found[topic.name] = TopicLayout(int(topic.error_code), tuple(leaders))
            cluster = admin._manager.cluster
            nodes = {node for layout in found.values() for node in layout.leaders if node >= 0}
            if any(cluster.broker_metadata(node) is None for node in nodes):
                # Learn about brokers that joined after the client was made, to connect to them.
                await cluster.refresh_metadata()
            return found

        unknown = TopicLayout(UNKNOWN_PARTITION)
        what = f"describe topics {', '.join(topic.name for topic in wanted)}"
        found = self._wire.attempt(what, make_blocking(body), connect_within_ms=connect_within_ms)
        return {topic.name: found.get(topic.name, unknown) for topic in wanted}

    def find_unwritable_topics(self, topics: Iterable[str]) -> list[str]:
        """Return the topics that this principal may not write to, if the broker tells."""
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
            # Not a set if the broker did not tell.
            told = {name: bits for name, bits in rights.items() if isinstance(bits, set)}
            return [name for name, bits in told.items() if not bits & {_RIGHTS_UNKNOWN, _WRITE}]

        try:
            return self._wire.attempt("ask for rights on topics", make_blocking(body))
        except UnknownRequest:
            # Old brokers do not tell; a write will fail later.
            return []

    def init_idempotent(self, *, connect_within_ms: int) -> ProducerGrant:
        """Ask any broker once for a producer id without a transactional id."""
        request = make_init_request(None, _NO_TIME_LIMIT_MS)

        async def body(admin: Any) -> ProducerGrant:
            answer = await admin._manager.send(request)
            return ProducerGrant(int(answer.error_code), answer.producer_id, answer.producer_epoch)

        return self._wire.attempt(
            "get a producer id",
            make_blocking(body),
            connect_within_ms=connect_within_ms,
            refused=ProducerGrant,
        )

    def add_partitions(
        self, handle: Handle, places: Iterable[Place], *, connect_within_ms: int
    ) -> dict[Place, int]:
        """Ask once to add partitions to the transaction, before producing to them."""
        wanted, name = tuple(places), handle.transactional_id
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=handle.producer_id,
            v3_and_below_producer_epoch=handle.producer_epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(
                    name=topic, partitions=[partition for partition, _ in rows]
                )
                for topic, rows in group_by_topic((place, None) for place in wanted).items()
            ],
            max_version=_ADD_PARTITIONS_VERSION,
        )
        what = f"add partitions to transaction {name}"
        code, answer = self._wire.ask_coordinator(what, name, request, connect_within_ms)
        if answer is None:
            return dict.fromkeys(wanted, code)
        codes = {
            (topic.name, row.partition_index): int(row.partition_error_code)
            for topic in answer.results_by_topic_v3_and_below
            for row in topic.results_by_partition
        }
        self._wire.forget_moved_coordinators(codes.values())
        return {place: codes[place] for place in wanted}

    def add_group(self, handle: Handle, group: str, *, connect_within_ms: int) -> int:
        """Ask once to add a group to the transaction, before storing its offsets."""
        request = AddOffsetsToTxnRequest(**handle._asdict(), group_id=group, max_version=_ADD_OFFSETS_VERSION)
        name = handle.transactional_id
        what = f"add group {group} to transaction {name}"
        return self._wire.ask_coordinator(what, name, request, connect_within_ms)[0]

    def commit_in_transaction(
        self, handle: Handle, group: str, offsets: Mapping[Place, int], note: str, *, connect_within_ms: int
    ) -> dict[Place, int]:
        """Store a group's offsets in the transaction, as a non-member, which Kafka always accepts."""
        topic_type = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
        topics = [
            topic_type(
                name=topic,
                partitions=[
                    topic_type.TxnOffsetCommitRequestPartition(
                        partition_index=partition, committed_offset=offset, committed_metadata=note
                    )
                    for partition, offset in rows
                ],
            )
            for topic, rows in group_by_topic(offsets.items()).items()
        ]
        request = TxnOffsetCommitRequest(
            **handle._asdict(), group_id=group, topics=topics, max_version=_TXN_OFFSET_COMMIT_VERSION
        )

        async def body(admin: Any) -> dict[Place, int]:
            nodes = await admin._find_coordinator_ids([group], CoordinatorType.GROUP)
            response = await admin._manager.send(request, node_id=nodes[group])
            return {
                (topic.name, row.partition_index): int(row.error_code)
                for topic in response.topics
                for row in topic.partitions
            }

        codes = self._wire.attempt(
            f"store the offsets of group {group} in transaction {handle.transactional_id}",
            make_blocking(body),
            connect_within_ms=connect_within_ms,
            refused=lambda code: dict.fromkeys(offsets, code),
        )
        self._wire.forget_moved_coordinators(codes.values())
        return codes

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
        """Pass a Produce request with at most one batch per partition to the client's thread."""
        # `answered` is set when it is answered or lost, or with acks=0 when it is sent. At most five requests
        # of all kinds may be under way to one leader (KIP-98).
        topic_type = ProduceRequest.TopicProduceData
        topic_data = [
            topic_type(
                name=topic,
                partition_data=[topic_type.PartitionProduceData(index=i, records=data) for i, data in rows],
            )
            for topic, rows in group_by_topic(batches.items()).items()
        ]
        request = ProduceRequest(
            transactional_id=transactional_id,
            acks=acks,
            timeout_ms=request_timeout_ms,
            topic_data=topic_data,
            max_version=_PRODUCE_VERSION,
        )

        def begin(admin: Any) -> ProduceInFlight:
            future = admin._manager.call_soon(admin._manager.send, request, leader, request_timeout_ms)
            future.add_both(lambda _: answered.set())
            return ProduceInFlight(batches, future, lambda: self._wire._admin is not admin)

        return self._wire.attempt("write records", begin, connect_within_ms=connect_within_ms)

    def finish_produce(self, request: ProduceInFlight) -> dict[Place, BatchAnswer]:
        def finish(_admin: Any) -> dict[Place, BatchAnswer]:
            response = request._response()
            if response is None:
                # With acks=0 there is no answer.
                return dict.fromkeys(request.places, BatchAnswer(0))
            return {
                (topic.name, row.index): BatchAnswer(
                    int(row.error_code), int(row.base_offset), row.error_message or ""
                )
                for topic in response.responses
                for row in topic.partition_responses
            }

        if request._is_orphan():
            # Another loss on this wire has closed the request's connection.
            raise self._wire._make_unavailable_error("write records", None)
        return self._wire.attempt(
            "write records", finish, refused=lambda code: dict.fromkeys(request.places, BatchAnswer(code))
        )
