"""What became of a transaction, told by the log itself.

A coordinator's "fenced" or "unknown id" says nothing about the data: the transaction may have
been committed before. So a committable names one record of its own, and its place in the log is
read before anything is concluded. Rules:

- The batch at that place must carry the committable's producer id and epoch; a topic that was
  created again, or a log that was truncated, puts somebody else's record there.
- Where the last stable offset is beyond it, the broker's list of aborted transactions decides.
- Where it is not (another producer's older transaction may hold it back), or where compaction
  took the record, the first marker of that producer id after the place decides.
- Nobody answers, or no marker yet: undecided. Only a finding from the log counts as proof.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from kafka import TopicPartition
from kafka.admin import OffsetSpec

from flinkish_spark.errors import AuthorizationError
from flinkish_spark.kafka._pace import pauses_ms
from flinkish_spark.kafka._wire import KafkaWire
from flinkish_spark.kafka.answers import (
    UNAUTHORIZED,
    Batch,
    Code,
    Isolation,
    LogSlice,
    Marker,
    name_of,
)
from flinkish_spark.protocol.codec import Stored

#: Enough for the one batch at the place; Kafka sends a whole batch even if it is larger.
_PEEK_BYTES = 64 * 1024
_SCAN_BYTES = 4 * 1024 * 1024
#: A broker that just started may not know a topic yet; this many answers in a row are believed.
_ABSENCES_BELIEVED = 4


class Fate(enum.Enum):
    """What the log says about a transaction."""

    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"
    #: Still open, its markers are not written yet, or the log could not be read.
    UNDECIDED = "UNDECIDED"
    #: The place no longer holds the record and no marker tells why.
    GONE = "GONE"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fate, with the observation that proves it."""

    fate: Fate
    detail: str


@dataclass(frozen=True, slots=True)
class Evidence(Stored):
    """The place of one record that a transaction wrote."""

    IS_CLOSED: ClassVar = True

    topic: str
    partition: int
    offset: int

    def __post_init__(self) -> None:
        if not isinstance(self.topic, str) or not self.topic:
            raise ValueError(f"evidence needs a topic, got {self.topic!r}")
        for name, value in (("partition", self.partition), ("offset", self.offset)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"evidence needs a {name} >= 0, got {value!r}")

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} offset {self.offset}"


def judge_stable(seen: LogSlice, place: Evidence, producer_id: int, producer_epoch: int) -> Finding | None:
    """Judge a read_committed slice that starts at `place`; None if only a marker can tell."""
    if seen.last_stable_offset <= place.offset:
        return None
    batch = _covering(seen, place.offset)
    if batch is not None and (batch.producer_id, batch.producer_epoch) != (producer_id, producer_epoch):
        return Finding(
            Fate.GONE,
            f"{place} holds a record of producer {batch.producer_id} epoch {batch.producer_epoch}: "
            "the topic was created again or its log was truncated",
        )
    if any(pid == producer_id and first <= place.offset for pid, first in seen.aborted):
        return Finding(Fate.ABORTED, f"{place} lies in an aborted transaction")
    if batch is None or batch.records == 0:
        return None
    return Finding(Fate.COMMITTED, f"{place} is visible to read_committed readers")


def judge_markers(
    seen: LogSlice, place: Evidence, producer_id: int, producer_epoch: int, is_record_there: bool
) -> Finding | None:
    """Judge by the first marker of `producer_id` in `seen`; None if there is none.

    A marker of another epoch counts only while the record is still there: without it, the
    producer's next transaction may be meant, and compaction may have taken our own marker.
    """
    for batch in seen.batches:
        if batch.marker is None or batch.producer_id != producer_id or batch.last_offset <= place.offset:
            continue
        if batch.producer_epoch == producer_epoch or is_record_there:
            fate = Fate.COMMITTED if batch.marker is Marker.COMMIT else Fate.ABORTED
            return Finding(
                fate, f"{place} was ended by the {batch.marker.name} marker at {batch.last_offset}"
            )
        return Finding(Fate.GONE, f"{place} and the end of its transaction were compacted away")
    return None


def _covering(seen: LogSlice, offset: int) -> Batch | None:
    return next((b for b in seen.batches if b.base_offset <= offset <= b.last_offset), None)


class EvidenceReader:
    """Reads places in the log over a shared connection; see the rules of this module.

    Parameters
    ----------
    wire
        The connection; it reconnects by itself.
    patience_ms
        How long an undecided place is read again before it is reported as such.
    """

    def __init__(self, wire: KafkaWire, *, patience_ms: int = 2_000) -> None:
        self._wire = wire
        self._patience_ms = patience_ms

    def read(self, place: Evidence, producer_id: int, producer_epoch: int) -> Finding:
        """Return what became of the transaction of (`producer_id`, `producer_epoch`) at `place`.

        Reads again while the place is undecided, for at most `patience_ms`: markers follow
        within milliseconds of the decision. Typically 2 to 10 ms.

        Raises
        ------
        BrokerUnavailableError
            If nobody answered.
        AuthorizationError
            If the principal may not read the topic.
        """
        finding = Finding(Fate.UNDECIDED, f"{place} was not read")
        absences = 0
        wire = self._wire
        for _left_ms in pauses_ms(self._patience_ms, wire.clock):
            seen = self._fetch(place, place.offset, Isolation.READ_COMMITTED, _PEEK_BYTES)
            if seen.code == Code.UNKNOWN_TOPIC_OR_PARTITION:
                absences += 1
                finding = Finding(Fate.UNDECIDED, f"{place}: the broker does not know the partition")
                if absences == _ABSENCES_BELIEVED:
                    return Finding(
                        Fate.GONE, f"topic {place.topic} (partition {place.partition}) was deleted"
                    )
                continue
            absences = 0
            finding = self._judge(seen, place, producer_id, producer_epoch)
            if finding.fate is not Fate.UNDECIDED:
                return finding
        return finding

    def _fetch(self, place: Evidence, offset: int, isolation: Isolation, max_bytes: int) -> LogSlice:
        seen = self._wire.fetch(place.topic, place.partition, offset, isolation, max_bytes)
        if seen.code in UNAUTHORIZED:
            raise AuthorizationError(
                f"Kafka refuses this principal READ on topic {place.topic!r}, which is needed to tell "
                f"whether a transaction was committed ({name_of(seen.code)})",
                code=seen.code,
            )
        return seen

    def _judge(self, seen: LogSlice, place: Evidence, producer_id: int, producer_epoch: int) -> Finding:
        if seen.code == Code.OFFSET_OUT_OF_RANGE:
            return self._outside(place)
        if seen.code != Code.NONE:
            return Finding(Fate.UNDECIDED, f"{place} cannot be read now (error {name_of(seen.code)})")
        stable = judge_stable(seen, place, producer_id, producer_epoch)
        return stable if stable is not None else self._scan(place, producer_id, producer_epoch)

    def _outside(self, place: Evidence) -> Finding:
        partition = TopicPartition(place.topic, place.partition)
        found = self._wire.call(
            f"find the start of {place.topic}-{place.partition}",
            lambda admin: admin.list_partition_offsets({partition: OffsetSpec.EARLIEST}),
        )
        start = found[partition].offset
        if place.offset < start:
            return Finding(Fate.GONE, f"{place} was deleted, the log starts at {start}: the evidence is gone")
        return Finding(
            Fate.GONE,
            f"{place} is beyond the end of the log: the topic was created again or its log was truncated",
        )

    def _scan(self, place: Evidence, producer_id: int, producer_epoch: int) -> Finding:
        """Look for the end of the transaction from `place` on, for at most `patience_ms`."""
        clock = self._wire.clock
        end_ms = clock.monotonic_ms() + self._patience_ms
        next_offset, is_record_there = place.offset, False
        while True:
            seen = self._fetch(place, next_offset, Isolation.READ_UNCOMMITTED, _SCAN_BYTES)
            if seen.code != Code.NONE:
                return Finding(Fate.UNDECIDED, f"{place} cannot be read now (error {name_of(seen.code)})")
            if next_offset == place.offset and (batch := _covering(seen, place.offset)) is not None:
                is_record_there = True
                if (batch.producer_id, batch.producer_epoch) != (producer_id, producer_epoch):
                    return Finding(Fate.GONE, f"{place} holds a record of another producer")
            found = judge_markers(seen, place, producer_id, producer_epoch, is_record_there)
            if found is not None:
                return found
            if seen.batches:
                next_offset = seen.batches[-1].last_offset + 1
            if not seen.batches or next_offset >= seen.high_watermark:
                break
            if clock.monotonic_ms() > end_ms:
                return Finding(
                    Fate.UNDECIDED, f"{place}: no end of the transaction up to offset {next_offset}"
                )
        if is_record_there or seen.high_watermark <= place.offset:
            return Finding(Fate.UNDECIDED, f"{place} is still open")
        return Finding(Fate.GONE, f"{place} was compacted away and no marker is left: the evidence is gone")
