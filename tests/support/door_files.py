"""What a drop-in sink has in its folder, as tests look at it."""

from __future__ import annotations

from pathlib import Path

from flinkish_spark.checkpoint.micro_batch_commits import find_or_create_uuid, open_sinks_dir
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import BatchId, JobUuid


def place(checkpoint: Path) -> StoreSpec:
    return StoreSpec(str(checkpoint))


def open_sink_dir(checkpoint: Path) -> JobDir:
    return open_sinks_dir(place(checkpoint))


def sink_uuid(checkpoint: Path) -> JobUuid:
    return find_or_create_uuid(open_sink_dir(checkpoint))


def decided(checkpoint: Path) -> dict[BatchId, Decision]:
    """The decision of each micro-batch that has one, with what was staged again since."""
    return {one.batch: one for one in open_sink_dir(checkpoint).live_commits()}


def confirmed(checkpoint: Path) -> frozenset[BatchId]:
    found = decided(checkpoint).items()
    return frozenset(b for b, one in found if open_sink_dir(checkpoint).receipt(one.checkpoint) is not None)
