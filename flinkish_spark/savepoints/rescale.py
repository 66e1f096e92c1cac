"""Another number of shuffle partitions: Spark's checkpoint begins anew from the newest checkpoint's state.

Spark fixes the number for the life of a checkpoint. Its own repartition of a checkpoint
(SPARK-54590) does not fit: it moves a key by the hash of what Spark groups by, which in our plans is
a route, an integer chosen for one number of partitions; and it adds a micro-batch of its own to
Spark's logs, which no staged file covers. So the state is exported like a savepoint's, by key group,
and the next lineage begins with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flinkish_spark.errors import InternalError
from flinkish_spark.graph.chains import read_by
from flinkish_spark.job_dir import JobDir, seed_folder
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.restoring import begin_chain
from flinkish_spark.protocol.savepoints import SavedChain, StateFile
from flinkish_spark.protocol.scans import Position, ScanRole
from flinkish_spark.protocol.seeding import Seed, SeededChain, SeedOrigin
from flinkish_spark.runtime.spark_log import LoggedOffsets, SparkLog
from flinkish_spark.savepoints.errors import RescaleRefused
from flinkish_spark.savepoints.export import export_state, sync_folders
from flinkish_spark.savepoints.files import copy_durably
from flinkish_spark.savepoints.restore import with_state_only
from flinkish_spark.savepoints.seeds import beginning_of, recorded_layout, shuffle_partitions_of
from flinkish_spark.store import make_directories

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from flinkish_spark.graph.planned import PlannedJob
    from flinkish_spark.graph.stream_graph import SourceNode
    from flinkish_spark.protocol.decisions import Decision


def check_rescale(job_dir: JobDir, root: Path, sources: Sequence[SourceNode], wanted: int) -> None:
    """Refuse another number of shuffle partitions for a job that cannot be carried over to it.

    Called before anything is written, and by the recovery once more.

    Parameters
    ----------
    wanted
        The number that the job is to run with.

    Raises
    ------
    RescaleRefused
        A source cannot be told where to go on.
    """
    now = _old_number(job_dir, root, wanted)
    fixed = [node.uid for node in sources if not node.source.is_positionable]
    if now is None or not fixed:
        return
    raise RescaleRefused(
        f"this job runs with {now} shuffle partitions and cannot change to {wanted}",
        why=f"its source '{fixed[0]}' is a DataFrame, or a Delta table that Spark's own source reads: it "
        "cannot be told where to go on",
        what_to_do=f"set spark.sql.shuffle.partitions to {now} again; or stop with a savepoint and "
        "restore it into a new job_dir, with a DataFrame that begins where the savepoint ends",
        uid=fixed[0],
    )


def _old_number(job_dir: JobDir, root: Path, wanted: int) -> int | None:
    """Return with how many partitions the log runs if the job is to have another number; else None."""
    now = shuffle_partitions_of(job_dir, beginning_of(job_dir, root))
    return None if now == wanted else now


@dataclass(frozen=True)
class Rescaling:
    """Carries a job over to another number of shuffle partitions; used by the recovery.

    A :class:`~flinkish_spark.runtime.recovering.Reseeding`.

    Parameters
    ----------
    planned
        The plan of the graph, under any number of partitions and any beginning.
    log
        Spark's checkpoint.
    shuffle_partitions
        The number that the job has to run with.
    """

    spark: SparkSession
    planned: PlannedJob
    sources: Sequence[SourceNode]
    job_dir: JobDir
    root: Path
    log: SparkLog
    shuffle_partitions: int

    def is_wanted(self, log_began_in: Lineage) -> bool:
        """Whether the log runs with another number of partitions than the job is to have."""
        return _old_number(self.job_dir, self.root, self.shuffle_partitions) is not None

    def export(self, decision: Decision | None, lineage: Lineage) -> None:
        """Write the seed that `lineage` begins with: the state and the positions of `decision`.

        Raises
        ------
        RescaleRefused
            A source cannot be told where to go on.
        SavepointFailed
            Spark cannot read the state.
        """
        check_rescale(self.job_dir, self.root, self.sources, self.shuffle_partitions)
        # What is there is of a start that was cut off before the lineage began.
        shutil.rmtree(self.root / seed_folder(lineage), ignore_errors=True)
        seed = self._as_before(lineage) if decision is None else self._from_checkpoint(decision, lineage)
        self.job_dir.write_seed(seed)

    def _from_checkpoint(self, decision: Decision, lineage: Lineage) -> Seed:
        before = shuffle_partitions_of(self.job_dir, beginning_of(self.job_dir, self.root))
        if before is None:
            raise InternalError("a job that has a checkpoint has no number of shuffle partitions")
        folder = self.root / seed_folder(lineage)
        # Tasks make folders in it.
        make_directories(folder)
        layout = recorded_layout(self.job_dir)
        exported = export_state(
            self.spark, folder, self.log.location, decision, self.planned.operators, layout, before
        )
        sync_folders(folder, exported.files)
        positions = layout.positions(LoggedOffsets.parse(decision.offsets_text).sources)
        chains = with_state_only(self._chains(positions), exported.files)
        return self._seed(lineage, decision.checkpoint, chains, exported.files)

    def _as_before(self, lineage: Lineage) -> Seed:
        """Return the present log's beginning: nothing was decided in it."""
        known = beginning_of(self.job_dir, self.root)
        if known.seed is None:
            chains = with_state_only(self._chains(self._first_positions()), ())
            return self._seed(lineage, CheckpointId(0), chains)
        folder = self.root / seed_folder(lineage)
        for file in known.seed.files:
            make_directories((folder / file.path).parent)
            copy_durably(known.folder / file.path, folder / file.path)
        sync_folders(folder, known.seed.files)
        # Also who owns the savepoint stays as it was: nothing was checkpointed since.
        return replace(known.seed, lineage=lineage, shuffle_partitions=self.shuffle_partitions)

    def _first_positions(self) -> dict[str, dict[str, Position]]:
        """Return where Spark's own Kafka source began; other sources keep that themselves."""
        folder = self.log.location / "sources"
        if not folder.is_dir():
            # The query was never started.
            return {}
        found: dict[str, dict[str, Position]] = {}
        for number, scan in enumerate(recorded_layout(self.job_dir).scans):
            path = folder / str(number) / "0"
            if scan.role is ScanRole.RECORDS and path.is_file():
                # A version, and behind it one line of JSON.
                position = json.loads(path.read_text(encoding="utf-8").split("\n", 1)[1])
                found.setdefault(scan.chain, {})[scan.uid] = position
        return found

    def _chains(self, positions: Mapping[str, Mapping[str, Position]]) -> tuple[SeededChain, ...]:
        chains = read_by(self.planned)
        saved = [SavedChain(chain, positions.get(chain.name, {}), sinks) for chain, sinks in chains.items()]
        positionable = {node.uid for node in self.sources if node.source.is_positionable}
        return tuple(begin_chain(chain, sinks, saved, positionable) for chain, sinks in chains.items())

    def _seed(
        self,
        lineage: Lineage,
        checkpoint: CheckpointId,
        chains: tuple[SeededChain, ...],
        files: tuple[StateFile, ...] = (),
    ) -> Seed:
        origin, number = SeedOrigin.RESCALE, self.shuffle_partitions
        return Seed(lineage, origin, "", checkpoint, number, chains, files=files)
