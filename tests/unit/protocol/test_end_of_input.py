"""When the inputs of a job have ended: all of them, by what its micro-batches have read."""

from __future__ import annotations

import json

import pytest

from flinkish_spark.checkpoint.control import ControlFile, read_control
from flinkish_spark.checkpoint.event_time import TimeKeeper
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.event_time import AssignerRules, NoWatermarkStrategy
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, Lineage, OwnerEpoch
from flinkish_spark.protocol.micro_batches import OFFSETS
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.time_plan import Assigner, TimePlan
from flinkish_spark.sources import CollectionSource
from tests.support.clocks import ManualClock
from tests.unit.connectors.test_split_source import Counters

HERE = SplitPosition("in", {"all": 1}, is_ended=True).to_json()
MORE = SplitPosition("more", {"all": 2}, is_ended=True).to_json()
CONTROL = {"flinkish:checkpoint": 4}


class Job:
    """Two bounded sources, and a log that the test writes."""

    def __init__(self, root, *others) -> None:
        self.log = SparkLog(LocalStore(root), "spark/1", root / "spark" / "1")
        bounded = [SourceNode(uid, CollectionSource([1], "n LONG").bind(uid)) for uid in ("in", "more")]
        nodes = [*bounded, *others]
        untimed = AssignerRules(NoWatermarkStrategy())
        plan = TimePlan(assigners={node.uid: Assigner(node.uid, untimed) for node in nodes})
        self.control = ControlFile.create_for_start(root / "control", OwnerEpoch(1), 0)
        facts = (plan, nodes, self.control, self.log, ManualClock(1_000))
        self.keeper = TimeKeeper(*facts, None, [], BatchId(0))

    def run(self, batch: int, *offsets) -> None:
        lines = ["v1", "{}", *("-" if offset is None else json.dumps(offset) for offset in offsets)]
        self.log.restore(OFFSETS, BatchId(batch), "\n".join(lines))
        staged = StagedBatch(Lineage(0), BatchId(batch), OwnerEpoch(1), 0, (), ())
        self.keeper.on_staged(self.keeper.add_times(staged))

    @property
    def is_told(self) -> bool:
        """Whether the next micro-batch is told that all input is over."""
        return "flinkish:end" in read_control(str(self.control.path))


def test_they_have_ended_when_the_last_micro_batch_of_all_is_staged(tmp_path) -> None:
    job = Job(tmp_path)
    assert not job.is_told
    job.run(0, HERE, CONTROL, SplitPosition("more", {"all": 1}).to_json())
    assert not job.is_told
    job.run(1, HERE, CONTROL, MORE)
    # With the last barrier, in the same micro-batch.
    assert job.keeper.can_end and not job.is_told and not job.keeper.has_ended
    job.keeper.on_offer(CheckpointPurpose.FINAL)
    job.control.offer(CheckpointId(5), CheckpointPurpose.FINAL)
    assert job.is_told
    job.run(2, HERE, {**CONTROL, **read_control(str(job.control.path))}, MORE)
    assert job.keeper.has_ended


@pytest.mark.parametrize(
    "offsets",
    [
        (HERE, CONTROL),
        (HERE, CONTROL, MORE, None),
        (HERE, SplitPosition("in", {"all": 0}).to_json(), MORE),
    ],
)
def test_not_while_a_scan_has_not_logged_its_end(tmp_path, offsets) -> None:
    job = Job(tmp_path)
    job.run(0, *offsets)
    assert not job.is_told and not job.keeper.can_end


def test_never_beside_a_source_without_an_end(tmp_path) -> None:
    job = Job(tmp_path, SourceNode("endless", Counters({}).bind("endless")))
    job.run(0, HERE, CONTROL, MORE, SplitPosition("endless", {}).to_json())
    assert not job.is_told and not job.keeper.can_end
