"""Barrier records: how a job tells the readers of its topic where its checkpoints end.

A barrier record is an ordinary record of the topic with the header :data:`BARRIER_HEADER`, and with
neither key nor value, so that most consumers skip it without knowing what it is. In a compacted
topic, which takes no record without key, its key is :data:`BARRIER_KEY` and it is a tombstone.
Nothing here talks to a broker.

The promise of the record of checkpoint n in a partition: every record of the checkpoint lies before
it and every later record of the same sink behind it. All barrier records of one checkpoint are one
transaction, so either all partitions show it or none does.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flinkish_spark.errors import CorruptObjectError
from flinkish_spark.protocol.codec import Stored
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage, SinkUid

#: Header of a barrier record; no other record may have it.
BARRIER_HEADER = "flinkish-barrier"
#: Key of a barrier record, in compacted topics only.
BARRIER_KEY = b"flinkish-barrier"
_FORMAT = 1


class BarrierRecords(enum.Enum):
    """Whether a Kafka sink writes barrier records into its topic."""

    NONE = "NONE"
    #: One in every partition for every checkpoint.
    EACH_CHECKPOINT = "EACH_CHECKPOINT"


@dataclass(frozen=True, slots=True)
class BarrierMark(Stored):
    """What a barrier record says.

    Parameters
    ----------
    job, sink
        Who wrote it.
    checkpoint, lineage
        The upstream checkpoint. Ids rise along a partition and may skip.
    partitions
        How many partitions of the topic got one; those added later have no barrier of this checkpoint.
    previous
        The checkpoint whose barrier records the same sink staged right before; None if it had staged
        none since it started. Between the two there is no other. They may have been aborted.
    written_at_ms
        Wall clock.

    Examples
    --------
    >>> mark = BarrierMark(JobUuid("0" * 32), "out", CheckpointId(7), Lineage(0), 2, None, 1_000)
    >>> BarrierMark.from_header(mark.to_header()) == mark
    True
    """

    job: JobUuid
    sink: SinkUid
    checkpoint: CheckpointId
    lineage: Lineage
    partitions: int
    previous: CheckpointId | None
    written_at_ms: int

    def to_header(self) -> bytes:
        """Return the value of the record's header."""
        content = {"format": _FORMAT, **self.to_json()}
        return json.dumps(content, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_header(cls, value: bytes | None) -> BarrierMark:
        """Return what :meth:`to_header` wrote.

        Raises
        ------
        CorruptObjectError
            It is none of ours, or of a newer format.
        """
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


def mark_in(headers: Iterable[Mapping[str, Any]] | None) -> BarrierMark | None:
    """Return the mark among a record's headers, None if it is an ordinary record.

    Parameters
    ----------
    headers
        Entries with ``key`` and ``value``, as in Spark's headers column.

    Raises
    ------
    CorruptObjectError
        The header is there and cannot be read.
    """
    for entry in headers or ():
        if entry["key"] == BARRIER_HEADER:
            return BarrierMark.from_header(entry["value"])
    return None
