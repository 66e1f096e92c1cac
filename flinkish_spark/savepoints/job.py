"""The one object by which the engine of a job uses this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flinkish_spark.core.errors import InternalError
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.upstream_cut import upstream_cut
from flinkish_spark.savepoints.export import JobFacts, SavepointHandle, export_savepoint
from flinkish_spark.savepoints.files import target_place
from flinkish_spark.savepoints.restore import Rescaling
from flinkish_spark.savepoints.seeds import (
    SeedKeeper,
    beginning_of,
    bundles_per_partition_of,
    claimant,
    layout_so_far,
    recorded_layout,
    shuffle_partitions_of,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.checkpoint.spark_log import SparkLog
    from flinkish_spark.contracts.source import SourceNode
    from flinkish_spark.core.job_dir import JobDir
    from flinkish_spark.planning.beginning import Beginning
    from flinkish_spark.planning.sink_rows import PlannedJob
    from flinkish_spark.protocol.decisions import Decision
    from flinkish_spark.protocol.plan_layout import PlanLayout


@dataclass(frozen=True)
class JobSavepoints:
    """Savepoints of a job, and what its lineages begin with."""

    spark: SparkSession
    name: str
    root: StoreSpec
    wanted_partitions: int
    job_dir: JobDir
    planned: PlannedJob
    sources: Sequence[SourceNode]

    def beginning(self) -> Beginning:
        return beginning_of(self.job_dir, self.root)

    def shuffle_partitions(self) -> int:
        """Return with how many partitions the query of the live lineage runs."""
        # Spark goes by its log: until that has begun anew, a job that is to have another number still runs,
        # and so replays, with the one that it had.
        now = shuffle_partitions_of(self.job_dir, self.beginning())
        return self.wanted_partitions if now is None else now

    def bundles_per_partition(self, beginning: Beginning) -> int:
        """Return in how many bundles a partition of the live lineage has its key groups."""
        return bundles_per_partition_of(self.job_dir, beginning)

    def layout_so_far(self) -> PlanLayout | None:
        return layout_so_far(self.job_dir)

    def write(self, decision: Decision, target: str, log: SparkLog) -> SavepointHandle:
        """Export a confirmed checkpoint of the live lineage to `target`."""
        job = self.job_dir.known_uuid()
        if job is None:
            raise InternalError("a job without job.json has a checkpoint")
        facts = JobFacts(
            name=self.name,
            uuid=job,
            planned=self.planned,
            sources=self.sources,
            layout=recorded_layout(self.job_dir),
            shuffle_partitions=self.wanted_partitions,
            bundles_per_partition=self.bundles_per_partition(self.beginning()),
        )
        upstream = {
            topic: {"job": str(cut.job), "checkpoint": int(cut.checkpoint)}
            for topic, cut in upstream_cut(decision.offsets_text).items()
        }
        place = target_place(target, self.root)
        return export_savepoint(self.spark, place, decision, log, facts, self.job_dir, self.root, upstream)

    def reseeding(self, log: SparkLog) -> Rescaling:
        """Return what the recovery asks whether Spark's checkpoint has to begin anew."""
        return Rescaling(
            spark=self.spark,
            planned=self.planned,
            sources=self.sources,
            job_dir=self.job_dir,
            root=self.root,
            log=log,
            shuffle_partitions=self.wanted_partitions,
        )

    def keeper(self) -> SeedKeeper:
        return SeedKeeper(self.root, self.beginning(), claimant(self.job_dir))
