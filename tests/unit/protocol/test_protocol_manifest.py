"""What a manifest says about a checkpoint."""

from __future__ import annotations

import json

from flinkish_spark.protocol.decisions import Decision, ManifestRecord, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import SinkAck, StagedBatch, TaskAck


def staged(batch: int, *acks: SinkAck) -> StagedBatch:
    return StagedBatch(Lineage(2), BatchId(batch), OwnerEpoch(1), 1, acks, ())


def test_a_record_sums_up_all_micro_batches_of_a_checkpoint() -> None:
    first = staged(
        6,
        SinkAck("kafka", (TaskAck(0, 5, 1, dropped=1), TaskAck(1, 2, 1, dead_lettered=2))),
        SinkAck("table", (TaskAck(0, 7, 1),)),
    )
    second = staged(7, SinkAck("kafka", ()), SinkAck("table", (TaskAck(0, 4, 1),)))
    decision = Decision(
        CheckpointId(4),
        Verdict.COMMIT,
        OwnerEpoch(1),
        99,
        lineage=Lineage(2),
        batches=(first, second),
        purpose=CheckpointPurpose.FINAL,
    )
    record = ManifestRecord.of(decision, {"table": {"version": 12}}, {"orders": {0: 5, 1: 9}}, Lineage(1))
    assert json.loads(json.dumps(record.to_json())) == {
        "checkpoint": 4,
        "lineage": 2,
        "log_began_in": 1,
        "first_batch": 6,
        "last_batch": 7,
        "decided_at_ms": 99,
        "purpose": CheckpointPurpose.FINAL.value,
        "sinks": {
            "kafka": {"rows": 7, "dropped": 1, "dead_lettered": 2, "facts": {}},
            "table": {"rows": 11, "dropped": 0, "dead_lettered": 0, "facts": {"version": 12}},
        },
        "offsets": {"orders": {"0": 5, "1": 9}},
    }
