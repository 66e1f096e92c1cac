"""The interface of this package to the engine of a job."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pyspark.sql import SparkSession

from flinkish_spark.checkpoint.spark_log import SparkLog, place_of_bases
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.errors import InternalError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.upstream_cut import upstream_cut
from flinkish_spark.planning.beginning import Beginning
from flinkish_spark.planning.sink_rows import PlannedJob
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.plan_layout import PlanLayout, Position
from flinkish_spark.protocol.savepoints import OperatorState, SavedChain, SavepointMetadata, SourceFacts
from flinkish_spark.savepoints.export import export_state, make_durable
from flinkish_spark.savepoints.files import check_outside, savepoint_at, target_place
from flinkish_spark.savepoints.restore import Rescaling
from flinkish_spark.savepoints.seeds import (
    SeedKeeper,
    bundles_per_partition_of,
    find_beginning,
    find_claimant,
    find_layout,
    read_layout,
    shuffle_partitions_of,
)


class SavepointHandle(NamedTuple):
    place: StoreSpec
    metadata: SavepointMetadata


@dataclass(frozen=True)
class JobSavepoints:
    """Writes the savepoints of a job, and finds the seeds of its lineages."""

    spark: SparkSession
    name: str
    root: StoreSpec
    wanted_partitions: int
    job_dir: JobDir
    planned: PlannedJob
    sources: Sequence[SourceNode]

    def beginning(self) -> Beginning:
        return find_beginning(self.job_dir, self.root)

    def shuffle_partitions(self) -> int:
        # Spark takes the number from its log: a job that is to be rescaled runs, and replays, with the former
        # number until a new log begins.
        now = shuffle_partitions_of(self.job_dir, self.beginning())
        return self.wanted_partitions if now is None else now

    def bundles_per_partition(self, beginning: Beginning) -> int:
        return bundles_per_partition_of(self.job_dir, beginning)

    def find_layout(self) -> PlanLayout | None:
        return find_layout(self.job_dir)

    def why_none_possible(self) -> str:
        """Return why no savepoint of this job can be taken, and what to do; empty if it can."""
        natives = self.planned.layout.natives
        if not natives:
            return ""
        return (
            f"'{natives[0].uid}' contains {natives[0].what}, whose state is Spark's own. A savepoint holds "
            "only the state of keyed operators. To do: stop without a savepoint, and go on in the same "
            "job_dir; or use key_by() and an operator of this package in its place"
        )

    def write(self, decision: Decision, target: str, log: SparkLog) -> SavepointHandle:
        """Export a confirmed checkpoint of the live lineage; do nothing if the savepoint exists already.

        The caller makes sure that Spark keeps the state meanwhile. Any process may repeat it.
        """
        place, job_dir = target_place(target, self.root), self.job_dir
        check_outside(place, self.root)
        job, directory = job_dir.find_uuid(), savepoint_at(place)
        if job is None:
            raise InternalError("a job without job.json has a checkpoint")
        timeline = job_dir.timeline().mark_of(decision.checkpoint).token or ""
        known = directory.find_finished(job, decision.checkpoint, timeline)
        if known is not None:
            return SavepointHandle(place, known)
        layout, bundles = read_layout(job_dir), self.bundles_per_partition(self.beginning())
        directory.prepare()
        files, states = export_state(
            self.spark,
            place,
            log,
            place_of_bases(self.root, log),
            decision,
            self.planned.operators,
            layout,
            self.wanted_partitions,
            bundles,
        )
        positions = layout.positions(LoggedOffsets.parse(decision.offsets_text).sources)
        metadata = replace(
            self._metadata(job, decision, positions),
            operators={
                uid: OperatorState(shape.max_parallelism, shape.key_types, states.get(uid, {}), shape.meaning)
                for uid, shape in self.planned.operators.items()
            },
            files=files,
            timeline=timeline,
        )
        make_durable(place, files)
        # The savepoint exists from here on.
        return SavepointHandle(place, directory.finish(metadata))

    def _metadata(
        self,
        job: JobUuid,
        decision: Decision,
        positions: Mapping[str, Mapping[str, Position]],
    ) -> SavepointMetadata:
        """Return the savepoint's metadata, without operators and files."""
        chains = self.planned.read_by.items()
        upstream = upstream_cut(decision.offsets_text).items()
        return SavepointMetadata(
            savepoint=uuid.uuid4().hex,
            job=self.name,
            job_uuid=job,
            checkpoint=decision.checkpoint,
            lineage=decision.lineage,
            batch=decision.batch,
            decided_at_ms=decision.decided_at_ms,
            shuffle_partitions=self.wanted_partitions,
            operators={},
            sources={
                node.uid: SourceFacts(node.source.kind, node.source.identity(self.job_dir, node.uid))
                for node in self.sources
            },
            chains=tuple(SavedChain(one, positions.get(one.name, {}), sinks) for one, sinks in chains),
            sinks=tuple(sink.uid for sink in self.planned.sinks),
            hooks=dict(decision.hook_states),
            finished=tuple(decision.finished),
            upstream={
                topic: {"job": str(cut.job), "checkpoint": int(cut.checkpoint)} for topic, cut in upstream
            },
            times=decision.times,
        )

    def reseeding(self, log: SparkLog) -> Rescaling:
        """Return the object that tells the recovery whether Spark's checkpoint has to begin anew."""
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
        return SeedKeeper(self.root, self.beginning(), find_claimant(self.job_dir))
