"""Barrier records: how a job tells the readers of its topic where its checkpoints end.

A barrier record has the header :data:`BARRIER_HEADER`, and neither key nor value, so that most consumers skip
it; in a compacted topic it is a tombstone of :data:`BARRIER_KEY`. In its partition every record of the
checkpoint lies before it, and every later record of the same sink behind it. All barrier records of a
checkpoint are one transaction, so either all partitions show it or none does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import pyarrow as pa

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin, TopicInfo, make_unknown_topic_error
from flinkish_spark.connectors.kafka.client.batches import RawBatch, decode
from flinkish_spark.connectors.kafka.client.client import WIRES, FetchClient, Isolation
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.producer import StagedTransaction
from flinkish_spark.connectors.kafka.client.reader import (
    FetchedBatches,
    OffsetRange,
    RangeFetches,
    bounds_of,
    visible,
)
from flinkish_spark.connectors.kafka.client.settings import ReaderSettings, StagingSettings
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import CorruptObjectError, InternalError
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import Stored
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage, Place, SinkUid

#: Header of a barrier record; no other record may have it.
BARRIER_HEADER = "flinkish-barrier"
#: Key of a barrier record, in compacted topics only.
BARRIER_KEY = b"flinkish-barrier"
_FORMAT = 1


class BarrierRecords(Choice):
    """Whether a Kafka sink writes barrier records into its topic."""

    NONE = "NONE"
    #: One in every partition for every checkpoint.
    EACH_CHECKPOINT = "EACH_CHECKPOINT"


@dataclass(frozen=True, slots=True)
class BarrierMark(Stored):
    """What a barrier record says."""

    job: JobUuid
    sink: SinkUid
    #: The upstream checkpoint. Ids rise along a partition and may skip.
    checkpoint: CheckpointId
    lineage: Lineage
    #: How many partitions of the topic got one; those added later have no barrier of this checkpoint.
    partitions: int
    #: The checkpoint whose barrier records the same sink staged right before; None if it had staged
    #: none since it started. Between the two there is no other. They may have been aborted.
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
    """Return the mark among a record's headers, None if it is an ordinary record."""
    for entry in headers or ():
        if entry["key"] == BARRIER_HEADER:
            return BarrierMark.from_header(entry["value"])
    return None


_CLOCK = SystemClock()
#: The record of a barrier holds its mark and nothing else.
_MOST_BARRIER_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class SeenBarrier:
    """A visible barrier record and where it is."""

    offset: int
    mark: BarrierMark


@dataclass(frozen=True, slots=True)
class BarrierScan:
    #: Behind the last visible record, barrier records included; the start of the range if there is none.
    #: Markers of transactions and what was aborted are no records.
    end: int
    #: In the order of the log.
    barriers: tuple[SeenBarrier, ...]


class BarrierScanner:
    """Scans ranges of partitions one after the other; used by one thread, keeps nothing."""

    def __init__(self, connection: KafkaConnection, settings: ReaderSettings) -> None:
        self._connection = connection
        self._settings = replace(settings, isolation=Isolation.READ_COMMITTED)

    def scan(self, place: Place, start: int, end: int) -> BarrierScan:
        if start >= end:
            return BarrierScan(start, ())
        wanted = OffsetRange(*place, start, end)
        with WIRES.wire(self._connection) as wire:
            fetches = RangeFetches(
                FetchClient(wire), lambda: bounds_of(wire, wanted), wanted, self._settings, _CLOCK
            )
            return find_barriers(wanted, iter(fetches.take, None))


def find_barriers(wanted: OffsetRange, answers: Iterable[FetchedBatches]) -> BarrierScan:
    behind, barriers = wanted.start, []
    for fetched in answers:
        inside = takewhile(lambda raw: raw.header.base_offset < wanted.end, fetched.batches)
        for batch in visible(inside, fetched.aborted, Isolation.READ_COMMITTED):
            # A batch may have lost its records to compaction, or have them all before the range.
            if not batch.header.records or batch.header.last_offset < wanted.start:
                continue
            behind = max(behind, min(batch.header.last_offset + 1, wanted.end))
            seen = _find_barrier(batch, wanted)
            if seen is not None and wanted.start <= seen.offset < wanted.end:
                barriers.append(seen)
    return BarrierScan(behind, tuple(barriers))


def _find_barrier(raw: RawBatch, wanted: OffsetRange) -> SeenBarrier | None:
    # It is alone in its batch, which is transactional: no other record is looked into.
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
    """Stages the barrier records of one sink, checkpoint after checkpoint; used by one thread."""

    def __init__(
        self,
        connection: KafkaConnection,
        topic: str,
        job: JobUuid,
        sink: str,
        transaction_timeout_ms: int,
    ) -> None:
        self._connection, self._topic = connection, topic
        self._job, self._sink = job, sink
        self._timeout_ms = transaction_timeout_ms
        #: A crash loses it, which costs readers a longer look ahead and nothing else.
        self._previous: CheckpointId | None = None

    def stage(self, checkpoint: CheckpointId, lineage: Lineage, transactional_id: str) -> KafkaCommittable:
        """Write one barrier record into every partition that the topic has now, and leave it open."""
        # This order matters: all tasks have flushed, and the next micro-batch has not begun.
        topic = self._topic_now()
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

    def _topic_now(self) -> TopicInfo:
        """Ask Kafka now: what is known from before may be older than partitions that have records."""
        with WIRES.wire(self._connection) as wire:
            found = KafkaAdmin.from_wire(wire).topics([self._topic])
        if self._topic not in found:
            raise make_unknown_topic_error(self._topic, self._connection.servers, of=f"sink '{self._sink}'")
        return found[self._topic]
