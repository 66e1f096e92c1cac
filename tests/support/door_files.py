"""What a drop-in sink has in its folder, as tests look at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from pyspark.sql.types import StructType

from flinkish_spark.checkpoint.micro_batch_commits import (
    MicroBatchCommits,
    find_or_create_uuid,
    open_sinks_dir,
)
from flinkish_spark.checkpoint.ownership import Ownership
from flinkish_spark.connectors.kafka.client.marks import KafkaMarks
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable, TransactionClient
from flinkish_spark.connectors.kafka.format.sink import SINK
from flinkish_spark.connectors.kafka.writer import KafkaCommitter
from flinkish_spark.contracts.sink import Committer, SinkContext
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import Observer, Step
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import BatchId, JobUuid
from flinkish_spark.protocol.records import CommitAnswer


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


class _ObservedClient:
    """A transaction client that reports each commit to an observer."""

    def __init__(self, client: TransactionClient, observer: Observer) -> None:
        self._client, self._observer = client, observer

    def commit(self, committable: KafkaCommittable) -> CommitAnswer:
        self._observer.on_step_start(Step.SINK_COMMIT, committable.transactional_id)
        answer = self._client.commit(committable)
        self._observer.on_step_end(Step.SINK_COMMIT, committable.transactional_id)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def make_commits(
    checkpoint_location: StoreSpec,
    client: TransactionClient,
    observer: Observer,
    driver: str,
    marks: KafkaMarks | None = None,
) -> MicroBatchCommits:
    """The commits of `format("flinkish-kafka")`; each transaction's is a step, too."""
    observed = cast(TransactionClient, _ObservedClient(client, observer))

    def make_committers(ownership: Ownership) -> dict[str, Committer]:
        job = find_or_create_uuid(ownership.job_dir)
        whose = (job, ownership.epoch, SINK, StructType(), CheckpointConfig(), SINK)
        context = SinkContext(*whose, checkpoint_location, SystemClock(), ownership.timeline)
        return {SINK: KafkaCommitter(observed, context, marks)}

    return MicroBatchCommits(checkpoint_location, make_committers, observer, driver)
