"""Aligned sources in a job: who is ahead waits, everything is read, and the job ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import JobStatus, KeyedProcessFunction, MemorySink, WatermarkStrategy
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.core.errors import GraphError
from flinkish_spark.sources import CollectionSource, RateLimit
from tests.support.jobs import environment, running

pytestmark = pytest.mark.timeout(600)
DRIFT_MS, STEP = 1_000, 50
ALIGNED = (
    WatermarkStrategy.for_monotonous_timestamps()
    .with_timestamp_assigner("at")
    .with_watermark_alignment("both", DRIFT_MS)
)


class Same(KeyedProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        yield tuple(value)


def logged(tmp_path: Path, uid: str) -> list[int]:
    """Return how far each micro-batch of the log has read a source."""
    (folder,) = (tmp_path / "job" / "spark").glob("*/offsets")
    entries = sorted((one for one in folder.iterdir() if one.name.isdecimal()), key=lambda one: int(one.name))
    import json

    found = []
    for entry in entries:
        sources = [json.loads(line) for line in entry.read_text().split("\n")[2:] if line.startswith("{")]
        found += [
            sum(SplitPosition.from_json(one).offsets.values())
            for one in sources
            if one.get("flinkish:source") == uid
        ]
    return found


@pytest.mark.nightly
def test_the_fast_source_waits_for_the_slow_one_and_all_of_both_is_read(spark: Any, tmp_path: Path) -> None:
    # The fast one covers a second of event time by a record, the slow one a tenth of it.
    env = environment(spark, tmp_path / "job", trigger_interval_ms=20)
    sinks = {}
    for uid, step_ms, records in (("fast", 1_000, 60), ("slow", 100, 600)):
        values = [(uid, n * step_ms) for n in range(records)]
        source = CollectionSource(values, "name STRING, at LONG").limit_rate(
            RateLimit(records_per_batch=STEP)
        )
        timed = env.from_source(source, uid=uid).assign_timestamps_and_watermarks(ALIGNED)
        sinks[uid] = MemorySink(f"{tmp_path}-{uid}")
        out = timed.key_by("name").process(Same(), output="name STRING, at LONG", uid=f"{uid}-same")
        out.sink_to(sinks[uid], uid=f"{uid}-out")
    with running(env) as client:
        assert client.wait(timeout_ms=300_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED
    assert len(sinks["fast"].rows()) == 60 and len(sinks["slow"].rows()) == 600
    fast, slow = logged(tmp_path, "fast"), logged(tmp_path, "slow")
    waited = [(f, s) for f, s in zip(fast, slow, strict=True) if f == STEP and s < 450]
    # Without alignment the second micro-batch would have read the fast source to its end.
    assert len(waited) >= 5


def test_a_dataframe_cannot_be_aligned(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    (tmp_path / "in").mkdir()
    files = spark.readStream.schema("name STRING, at LONG").json(str(tmp_path / "in"))
    timed = env.from_dataframe(files, uid="files").assign_timestamps_and_watermarks(ALIGNED)
    timed.key_by("name").process(Same(), output="name STRING, at LONG", uid="same").sink_to(
        MemorySink(f"{tmp_path}-rows"), uid="out"
    )
    with pytest.raises(GraphError, match="cannot be aligned"):
        env.execute()


def test_a_source_of_which_nobody_asks_for_times_cannot_be_aligned(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    source = CollectionSource([("a", 1)], "name STRING, at LONG")
    timed = env.from_source(source, uid="in").assign_timestamps_and_watermarks(ALIGNED)
    timed.sink_to(MemorySink(f"{tmp_path}-rows"), uid="out")
    with pytest.raises(GraphError, match="has no watermarks"):
        env.execute()
