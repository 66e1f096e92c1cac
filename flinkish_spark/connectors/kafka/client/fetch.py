"""Fetches as bytes, which no consumer offers: with producer ids, markers and the last stable offset."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kafka.errors as kafka_errors
from kafka.protocol.consumer import FetchRequest
from kafka.record import MemoryRecords

from flinkish_spark.connectors.kafka.client.client import (
    UNKNOWN_PARTITION,
    Isolation,
    KafkaWire,
    group_by_topic,
    make_blocking,
)
from flinkish_spark.protocol.ids import Place

#: The newest Fetch with topic names; later ones need topic ids.
_FETCH_VERSION = 12
NO_REPLICA = -1


class Marker(enum.Enum):
    ABORT = 0
    COMMIT = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """The header of a record batch; `marker` is set for a transaction marker only."""

    base_offset: int
    last_offset: int
    producer_id: int
    producer_epoch: int
    records: int
    marker: Marker | None = None


@dataclass(frozen=True, slots=True)
class _Slice:
    """Answer to a Fetch of one partition; -1 for an offset that the broker did not send."""

    code: int
    log_start_offset: int = -1
    last_stable_offset: int = -1
    high_watermark: int = -1
    #: (producer id, first offset) of the aborted transactions that overlap what was read.
    aborted: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LogSlice(_Slice):
    batches: tuple[Batch, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of a Fetch; Kafka sends the first batch even if it exceeds the sizes."""

    isolation: Isolation
    max_bytes: int
    partition_max_bytes: int
    request_timeout_ms: int
    #: How long the broker may delay the answer until it has `min_bytes`.
    max_wait_ms: int = 0
    min_bytes: int = 0
    #: Rack of the reader: a leader may name a closer replica (KIP-392); for a Fetch of one partition.
    rack: str = ""


@dataclass(frozen=True, slots=True)
class RawSlice(_Slice):
    #: Whole batches and maybe an incomplete last one; the first may begin before the requested offset.
    records: bytes = b""
    #: The broker to which the leader redirects the reader, or NO_REPLICA.
    preferred_replica: int = NO_REPLICA


#: Partition -> its answer; empty if the broker throttles this client.
FetchAnswer = Mapping[Place, RawSlice]


class PendingFetch:
    """A Fetch under way; its result may be ignored."""

    def __init__(self, wire: KafkaWire, future: Any, what: str, places: Sequence[Place]) -> None:
        self._wire, self._future, self._what, self._places = wire, future, what, places

    def result(self) -> FetchAnswer:
        """Wait for the answer; call it at most once."""

        async def wait(_admin: Any) -> FetchAnswer:
            answer: FetchAnswer = await self._future
            return answer

        return self._wire.attempt(
            self._what, make_blocking(wait), refused=lambda code: dict.fromkeys(self._places, RawSlice(code))
        )


class FetchClient:
    """Sends Fetches for partitions with the same leader over a borrowed wire."""

    # Take pending results before sending anything else over the same wire.
    #
    # A replica that the leader names is trusted only for the records that it sends. An end of the log, an
    # offset out of range or an error may mean that it lags behind, and then the leader is asked.

    def __init__(self, wire: KafkaWire) -> None:
        self._wire = wire
        self._leaders: dict[Place, int] = {}
        self._replicas: dict[Place, int] = {}

    def send(
        self, offsets: Mapping[Place, int], limits: FetchLimits, *, connect_within_ms: int
    ) -> PendingFetch:
        """Send one Fetch from `offsets` on to the first partition's leader, without waiting."""
        topic, partition = next(iter(offsets))
        what = f"read {topic}-{partition} at offset {offsets[topic, partition]}"

        async def body(admin: Any) -> FetchAnswer:
            if limits.rack and len(offsets) == 1:
                return await self._from_nearest(admin, offsets, limits)
            return await self._from_leader(admin, offsets, limits)

        future = self._wire.attempt(
            what, lambda admin: admin._manager.call_soon(body, admin), connect_within_ms=connect_within_ms
        )
        return PendingFetch(self._wire, future, what, tuple(offsets))

    async def _from_leader(
        self, admin: Any, offsets: Mapping[Place, int], limits: FetchLimits
    ) -> FetchAnswer:
        code, node = await self._leader(admin, next(iter(offsets)))
        if code:
            return dict.fromkeys(offsets, RawSlice(code))
        answer = await _send_fetch(admin, node, offsets, limits)
        if any(seen.code for seen in answer.values()):
            self._leaders.clear()
        return answer

    async def _from_nearest(
        self, admin: Any, offsets: Mapping[Place, int], limits: FetchLimits
    ) -> FetchAnswer:
        """Fetch from the replica that the leader has named, or else from the leader."""
        (place,) = offsets
        if place not in self._replicas:
            answer = await self._from_leader(admin, offsets, limits)
            if place not in answer or answer[place].preferred_replica == NO_REPLICA:
                return answer
            # This answer has no records.
            self._replicas[place] = answer[place].preferred_replica
            if admin._manager.cluster.broker_metadata(self._replicas[place]) is None:
                # It joined after the client was made.
                await admin._manager.cluster.refresh_metadata()
        without_rack = replace(limits, rack="")
        try:
            answer = await _send_fetch(admin, self._replicas[place], offsets, without_rack)
        except (kafka_errors.KafkaError, OSError):
            # One broker failed; the leader will tell whether there is an outage.
            answer = {}
        if place in answer and not answer[place].code and answer[place].records:
            return answer
        del self._replicas[place]
        return await self._from_leader(admin, offsets, without_rack)

    async def _leader(self, admin: Any, place: Place) -> tuple[int, int]:
        """Return (error code, node) of the partition's leader; ask Kafka if it is not cached."""
        if place in self._leaders:
            return 0, self._leaders[place]
        name, partition = place
        # The answer has a code for each named topic, even for a hidden one.
        metadata = await admin._get_cluster_metadata([name])
        topic = metadata["topics"][0]
        if topic["error_code"]:
            return int(topic["error_code"]), -1
        row = next((p for p in topic["partitions"] if p["partition_index"] == partition), None)
        if row is None:
            return UNKNOWN_PARTITION, -1
        if row["leader_id"] < 0:
            return kafka_errors.LeaderNotAvailableError.errno, -1
        self._leaders[place] = row["leader_id"]
        return 0, row["leader_id"]


async def _send_fetch(
    admin: Any, node: int, offsets: Mapping[Place, int], limits: FetchLimits
) -> FetchAnswer:
    response = await admin._manager.send(_request(offsets, limits), node, limits.request_timeout_ms)
    if response.error_code:
        return dict.fromkeys(offsets, RawSlice(int(response.error_code)))
    return {
        (topic.topic, row.partition_index): RawSlice(
            int(row.error_code),
            row.log_start_offset,
            row.last_stable_offset,
            row.high_watermark,
            tuple((entry.producer_id, entry.first_offset) for entry in row.aborted_transactions or ()),
            row.records or b"",
            row.preferred_read_replica,
        )
        for topic in response.responses
        for row in topic.partitions
    }


def _request(offsets: Mapping[Place, int], limits: FetchLimits) -> Any:
    topic_type = FetchRequest.FetchTopic
    topics = [
        topic_type(
            topic=topic,
            partitions=[
                topic_type.FetchPartition(
                    partition=partition, fetch_offset=offset, partition_max_bytes=limits.partition_max_bytes
                )
                for partition, offset in rows
            ],
        )
        for topic, rows in group_by_topic(offsets.items()).items()
    ]
    return FetchRequest(
        max_wait_ms=limits.max_wait_ms,
        min_bytes=limits.min_bytes,
        max_bytes=limits.max_bytes,
        isolation_level=int(limits.isolation),
        session_id=0,
        session_epoch=-1,
        topics=topics,
        forgotten_topics_data=[],
        rack_id=limits.rack,
        max_version=_FETCH_VERSION,
    )


def fetch_headers(
    wire: KafkaWire, place: Place, offset: int, isolation: Isolation, max_bytes: int
) -> LogSlice:
    """Read batch headers from `offset` on, once, without waiting for new data."""
    limits = FetchLimits(isolation, max_bytes, max_bytes, wire.timeout_ms)
    pending = FetchClient(wire).send({place: offset}, limits, connect_within_ms=wire.timeout_ms)
    seen = pending.result().get(place, RawSlice(kafka_errors.ThrottlingQuotaExceededError.errno))
    offsets = (seen.log_start_offset, seen.last_stable_offset, seen.high_watermark)
    return LogSlice(seen.code, *offsets, seen.aborted, tuple(_read_headers(seen.records)))


def _read_headers(records: bytes) -> Iterator[Batch]:
    for batch in MemoryRecords(records):
        if batch.magic < 2:
            continue  # older than transactions: no evidence
        marker = None
        if batch.is_control_batch:
            kind = next(iter(batch)).type if batch.records_count else None
            marker = Marker(kind) if kind in (Marker.ABORT.value, Marker.COMMIT.value) else None
        handle = (batch.producer_id, batch.producer_epoch)
        yield Batch(batch.base_offset, batch.last_offset, *handle, batch.records_count, marker)
