"""Barrier records, which mark the end of a job's checkpoints in its output topic.

A barrier record has the header :data:`BARRIER_HEADER`, and neither key nor value, so that most consumers skip
it; in a compacted topic it is a tombstone of :data:`BARRIER_KEY`. In its partition all records of the
checkpoint precede it, and all later records of the same sink follow it. All barrier records of a checkpoint
are one transaction, so that they become visible in all partitions or in none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import pyarrow as pa

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin, make_unknown_topic_error
from flinkish_spark.connectors.kafka.client.batch_decoder import RawBatch, decode
from flinkish_spark.connectors.kafka.client.client import WIRES, Isolation
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.fetch import FetchClient
from flinkish_spark.connectors.kafka.client.producer import StagedTransaction
from flinkish_spark.connectors.kafka.client.reader import (
    FetchedBatches,
    OffsetRange,
    RangeFetches,
    find_bounds,
    select_visible,
)
from flinkish_spark.connectors.kafka.client.settings import ReaderSettings, StagingSettings
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import CorruptObjectError, InternalError
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import StoredObject
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage, Place, SinkUid

#: Header of a barrier record; no other record may have it.
BARRIER_HEADER = "flinkish-barrier"
#: Key of a barrier record, in compacted topics only.
BARRIER_KEY = b"flinkish-barrier"
_FORMAT = 1


class BarrierRecords(Choice):
    """Setting of a Kafka sink: which barrier records it writes into its topic."""

    NONE = "NONE"
    #: One in every partition for every checkpoint.
    EACH_CHECKPOINT = "EACH_CHECKPOINT"


@dataclass(frozen=True, slots=True)
class BarrierMark(StoredObject):
    job: JobUuid
    sink: SinkUid
    #: The upstream checkpoint. Ids rise along a partition and may skip.
    checkpoint: CheckpointId
    lineage: Lineage
    #: Number of partitions that got a barrier of this checkpoint; later partitions have none.
    partitions: int
    #: The previous checkpoint of which this sink staged barrier records; None for the first since its start.
    #: No other lies between the two. The previous ones may have been aborted.
    previous: CheckpointId | None
    written_at_ms: int

    def to_header(self) -> bytes:
        content = {"format": _FORMAT, **self.to_json()}
        return json.dumps(content, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_header(cls, value: bytes | None) -> BarrierMark:
        try:
            content: Mapping[str, Any] = json.loads(value or b"")
            if content["format"] != _FORMAT:
                raise ValueError(f"it has format {content['format']!r}, and only {_FORMAT} can be read")
            return cls.from_json(content)
        except (ValueError, KeyError, TypeError) as wrong:
            raise CorruptObjectError(
                f"a record has the header '{BARRIER_HEADER}' and is no barrier record of this version",
                why=str(wrong),
                what_to_do="find out who wrote it: the header belongs to this package, and a newer version "
                "of it may write another format",
            ) from wrong


def find_mark(headers: Iterable[Mapping[str, Any]] | None) -> BarrierMark | None:
    """Find the mark in a record's headers; None for an ordinary record."""
    for entry in headers or ():
        if entry["key"] == BARRIER_HEADER:
            return BarrierMark.from_header(entry["value"])
    return None


_CLOCK = SystemClock()
#: Largest batch that can be a barrier record, which holds its mark only.
_MOST_BARRIER_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class SeenBarrier:
    offset: int
    mark: BarrierMark


@dataclass(frozen=True, slots=True)
class BarrierScan:
    #: The offset after the last visible record, barrier records included; the start of the range if there is
    #: none. Transaction markers and aborted records do not count.
    end: int
    #: Barriers in the order of the log.
    barriers: tuple[SeenBarrier, ...]


class BarrierScanner:
    """Scans ranges of partitions for barriers; stateless, used by one thread."""

    def __init__(self, connection: KafkaConnection, settings: ReaderSettings) -> None:
        self._connection = connection
        self._settings = replace(settings, isolation=Isolation.READ_COMMITTED)

    def scan(self, place: Place, start: int, end: int) -> BarrierScan:
        if start >= end:
            return BarrierScan(start, ())
        wanted = OffsetRange(*place, start, end)
        with WIRES.wire(self._connection) as wire:
            fetches = RangeFetches(
                FetchClient(wire), lambda: find_bounds(wire, wanted), wanted, self._settings, _CLOCK
            )
            return find_barriers(wanted, iter(fetches.take, None))


def find_barriers(wanted: OffsetRange, answers: Iterable[FetchedBatches]) -> BarrierScan:
    behind, barriers = wanted.start, []
    for fetched in answers:
        inside = takewhile(lambda raw: raw.header.base_offset < wanted.end, fetched.batches)
        for batch in select_visible(inside, fetched.aborted, Isolation.READ_COMMITTED):
            # Compaction may have emptied a batch, or all its records are before the range.
            if not batch.header.records or batch.header.last_offset < wanted.start:
                continue
            behind = max(behind, min(batch.header.last_offset + 1, wanted.end))
            seen = _find_barrier(batch, wanted)
            if seen is not None and wanted.start <= seen.offset < wanted.end:
                barriers.append(seen)
    return BarrierScan(behind, tuple(barriers))


def _find_barrier(raw: RawBatch, wanted: OffsetRange) -> SeenBarrier | None:
    # A barrier is the only record of a transactional batch, so no other batch is decoded.
    header = raw.header
    if header.records != 1 or not header.is_transactional or len(raw.body) > _MOST_BARRIER_BYTES:
        return None
    record = decode(raw, with_headers=True)
    assert record.headers is not None
    try:
        mark = find_mark(record.headers[0].as_py())
    except CorruptObjectError as broken:
        place = f"{wanted.topic}-{wanted.partition} at offset {header.base_offset}"
        broken.add_note(f"The record is in {place}.")
        raise
    return None if mark is None else SeenBarrier(int(record.offsets[0]), mark)


class BarrierWriter:
    """Stages the barrier records of one sink at each checkpoint; used by one thread."""

    def __init__(
        self, connection: KafkaConnection, topic: str, job: JobUuid, sink: str, transaction_timeout_ms: int
    ) -> None:
        self._connection, self._topic = connection, topic
        self._job, self._sink = job, sink
        self._timeout_ms = transaction_timeout_ms
        #: Not stored: after a crash readers scan further, with the same result.
        self._previous: CheckpointId | None = None

    def stage(self, checkpoint: CheckpointId, lineage: Lineage, transactional_id: str) -> KafkaCommittable:
        """Write one barrier record into each existing partition; leave the transaction open."""
        # This order matters: called after all tasks have flushed and before the next micro-batch begins.
        with WIRES.wire(self._connection) as wire:
            # Cached metadata may lack new partitions that have records.
            topic = KafkaAdmin.from_wire(wire).topics([self._topic]).get(self._topic)
        if topic is None:
            raise make_unknown_topic_error(self._topic, self._connection.servers, of=f"sink '{self._sink}'")
        partitions = topic.partitions
        mark = BarrierMark(
            self._job, self._sink, checkpoint, lineage, partitions, self._previous, _CLOCK.wall_ms()
        )
        settings = StagingSettings(
            connection=self._connection,
            transactional_id=transactional_id,
            transaction_timeout_ms=self._timeout_ms,
            default_topic=self._topic,
        )
        with StagedTransaction(settings) as transaction:
            transaction.write(
                pa.array([BARRIER_KEY if topic.is_compacted else None] * partitions, pa.binary()),
                pa.nulls(partitions, pa.binary()),
                ((BARRIER_HEADER, mark.to_header()),),
                partitions=pa.array(range(partitions), pa.int32()),
                timestamps_ms=mark.written_at_ms,
            )
            committable = transaction.prepare()
        if committable is None:
            raise InternalError(f"the topic '{self._topic}' has {partitions} partitions for a barrier")
        self._previous = checkpoint
        return committable
