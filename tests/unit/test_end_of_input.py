"""When the inputs of a job have ended: all of them, by what Spark has done."""

from __future__ import annotations

import json

import pytest

from flinkish_spark.graph.stream_graph import SourceNode
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.runtime.inputs import Inputs
from flinkish_spark.runtime.spark_log import COMMITS, OFFSETS, SparkLog
from flinkish_spark.sources import CollectionSource
from flinkish_spark.sources.split_positions import SplitPosition
from flinkish_spark.store import LocalStore
from tests.unit.test_split_source import Counters

HERE = SplitPosition("in", {"all": 1}, is_ended=True).to_json()
MORE = SplitPosition("more", {"all": 2}, is_ended=True).to_json()
CONTROL = {"flinkish:checkpoint": 4}


class Job:
    """Two bounded sources, and a log that the test writes."""

    def __init__(self, root, *others) -> None:
        store = LocalStore(root)
        self.log = SparkLog(store, "spark/1", root / "spark" / "1")
        bounded = [SourceNode(uid, CollectionSource([1], "n LONG").bound(uid)) for uid in ("in", "more")]
        self.inputs = Inputs([*bounded, *others], JobDir(store), self.log)

    def run(self, batch: int, *offsets) -> None:
        lines = ["v1", "{}", *("-" if offset is None else json.dumps(offset) for offset in offsets)]
        self.log.restore(OFFSETS, BatchId(batch), "\n".join(lines))

    def done(self, batch: int) -> None:
        self.log.restore(COMMITS, BatchId(batch), "v1\n{}")


def test_they_have_ended_when_spark_has_done_the_last_micro_batch_of_all(tmp_path) -> None:
    job = Job(tmp_path)
    assert not job.inputs.have_ended()
    job.run(0, HERE, CONTROL, SplitPosition("more", {"all": 1}).to_json())
    job.done(0)
    assert not job.inputs.have_ended()
    job.run(1, HERE, CONTROL, MORE)
    assert not job.inputs.have_ended()
    job.done(1)
    assert job.inputs.have_ended()


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
    job.done(0)
    assert not job.inputs.have_ended()


def test_never_beside_a_source_without_an_end(tmp_path) -> None:
    job = Job(tmp_path, SourceNode("endless", Counters({}).bound("endless")))
    job.run(0, HERE, CONTROL, MORE, SplitPosition("endless", {}).to_json())
    job.done(0)
    assert not job.inputs.have_ended()
