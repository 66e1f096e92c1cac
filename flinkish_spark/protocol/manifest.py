"""What a manifest says about one checkpoint: one record, the same in every repetition but for its facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from flinkish_spark.protocol.codec import Form, Stored, stored
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.lineage import FIRST_LINEAGE
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.protocol.records import SinkAck

#: Topic -> partition -> first offset that is not in the checkpoint.
Positions = Mapping[str, Mapping[Annotated[int, Form(str, int)], int]]


@dataclass(frozen=True, slots=True)
class SinkShare(Stored):
    """What one sink shows with a checkpoint.

    Parameters
    ----------
    rows
        Records that it got, those included that its policy kept out.
    dropped, dead_lettered
        Those that its policy kept out, or sent elsewhere.
    facts
        What it said about its commit, such as the version of a table.
    """

    rows: int
    dropped: int
    dead_lettered: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ManifestRecord(Stored):
    """A checkpoint that every sink has committed.

    Readers who must see whole checkpoints only read up to what the newest record names. A record of a
    higher lineage supersedes those of lower ones from its first micro-batch on, among those with the same
    `log_began_in`: the job went back.

    Parameters
    ----------
    lineage, first_batch, last_batch
        The micro-batches that it consists of.
    decided_at_ms
        Wall-clock time of its decision.
    sinks
        By sink uid; sinks that got nothing have a share of no rows.
    offsets
        How far the sources have been read.
    log_began_in
        The lineage from which micro-batches are counted. A job that is given another number of shuffle
        partitions counts from 0 again, and supersedes nothing by that.
    """

    checkpoint: CheckpointId
    lineage: Lineage
    first_batch: BatchId
    last_batch: BatchId
    decided_at_ms: int
    purpose: CheckpointPurpose
    sinks: Mapping[str, SinkShare]
    offsets: Positions
    log_began_in: Lineage = field(default=FIRST_LINEAGE, metadata=stored(at=2))

    @classmethod
    def of(
        cls,
        decision: Decision,
        facts: Mapping[str, Mapping[str, Any]],
        offsets: Positions,
        log_began_in: Lineage = FIRST_LINEAGE,
    ) -> ManifestRecord:
        """Return the record of a decided checkpoint.

        Parameters
        ----------
        facts
            By sink uid.
        """
        acks = [ack for batch in decision.batches for ack in batch.acks]
        uids = dict.fromkeys(ack.sink for ack in acks)
        return cls(
            decision.checkpoint,
            decision.lineage,
            decision.batches[0].batch,
            decision.batch,
            decision.decided_at_ms,
            decision.purpose,
            {uid: _share([a for a in acks if a.sink == uid], facts.get(uid, {})) for uid in uids},
            offsets,
            log_began_in,
        )


def _share(acks: Sequence[SinkAck], facts: Mapping[str, Any]) -> SinkShare:
    tasks = [task for ack in acks for task in ack.tasks]
    return SinkShare(
        sum(task.rows for task in tasks),
        sum(task.dropped for task in tasks),
        sum(task.dead_lettered for task in tasks),
        facts,
    )
