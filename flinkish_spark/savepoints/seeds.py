"""The seed that the live lineage began with, and the deletion of its files."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Collection

from flinkish_spark.core.errors import CorruptObjectError, FlinkishError, JobDirError
from flinkish_spark.core.job_dir import JobDir, seed_folder
from flinkish_spark.core.store import SealedObjects
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.planning.beginning import Beginning
from flinkish_spark.planning.sink_rows import PlannedJob
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import JobUuid, Lineage
from flinkish_spark.protocol.key_groups import BUNDLES_PER_PARTITION
from flinkish_spark.protocol.lineage import FIRST_LINEAGE
from flinkish_spark.protocol.plan_layout import PlanLayout
from flinkish_spark.protocol.savepoints import STATE_FOLDER, ClaimMode, Seed, StateFile
from flinkish_spark.savepoints.files import savepoint_at

LOG = logging.getLogger(__name__)
#: Key in job.json: the savepoint that the job began with.
RESTORED_FROM = "restored_from"
#: Key in job.json: the number of bundles per partition in the first log.
BUNDLES = "bundles_per_partition"
_CLAIMANT = "claimant"


def read_seed(job_dir: JobDir, lineage: Lineage) -> Seed | None:
    key = f"{seed_folder(lineage)}/seed.json"
    return SealedObjects(job_dir.store, "the job directory").optional(key, "seed", Seed.from_json)


def write_seed(job_dir: JobDir, seed: Seed) -> None:
    job_dir.store.put(f"{seed_folder(seed.lineage)}/seed.json", seal("seed", seed.to_json()))


def find_beginning(job_dir: JobDir, root: StoreSpec) -> Beginning:
    """Return the beginning of the live lineage. Called before every planning, under the job's lock."""
    # A plain rewind goes on with the same log and so with the same seed; a seed whose lineage a crash kept
    # from beginning does not count.
    origin = job_dir.history().log_began_in
    seed = read_seed(job_dir, origin)
    was_restored = (job_dir.find_settings() or {}).get(RESTORED_FROM)
    if seed is None and (origin != FIRST_LINEAGE or was_restored):
        raise CorruptObjectError(
            f"the seed of lineage {origin} is gone from the job directory",
            why="Spark's checkpoint cannot be read without it: the numbers of its sources depend on the seed",
            what_to_do="restore seeds/ from a backup, or start a new job from a savepoint",
        )
    return Beginning() if seed is None else Beginning(seed, root.to_child(seed_folder(origin)))


def shuffle_partitions_of(job_dir: JobDir, beginning: Beginning) -> int | None:
    """Return the number of shuffle partitions of the live lineage; None before the first start."""
    if beginning.seed is not None:
        return beginning.seed.shuffle_partitions
    settings = job_dir.find_settings()
    return None if settings is None else int(settings["shuffle_partitions"])


def bundles_per_partition_of(job_dir: JobDir, beginning: Beginning) -> int:
    if beginning.seed is not None:
        return beginning.seed.bundles_per_partition
    settings = job_dir.find_settings()
    return BUNDLES_PER_PARTITION if settings is None else int(settings[BUNDLES])


def find_lost_seed(job_dir: JobDir, root: StoreSpec) -> Seed | None:
    """Return the seed that the live lineage still needs and whose files are gone; else None."""
    beginning = find_beginning(job_dir, root)
    seed = beginning.seed
    # This order matters: an owner that runs meanwhile decides a checkpoint before it deletes files.
    if seed is None or not _is_incomplete(beginning.folder, seed.files):
        return None
    # A job that was cancelled with DELETE_ON_CANCELLATION has no checkpoint any more and begins anew.
    newest = job_dir.newest_commit()
    return None if newest is not None and newest.lineage >= seed.lineage else seed


def _is_incomplete(place: StoreSpec, files: Collection[StateFile]) -> bool:
    if not place.is_local:
        there = place.open_bucket().sizes_below("") if files else {}
        return any(there.get(file.path) != file.size_bytes for file in files)
    for file in files:
        try:
            if (place.folder / file.path).stat().st_size != file.size_bytes:
                return True
        except OSError:
            return True
    return False


def remove_below(place: StoreSpec) -> None:
    """Delete everything at a place; on a disk, ignore errors."""
    if place.is_local:
        shutil.rmtree(place.folder, ignore_errors=True)
    else:
        bucket = place.open_bucket()
        bucket.delete_all(tuple(bucket.sizes_below("")))


def find_claimant(job_dir: JobDir) -> JobUuid | None:
    """Return the id under which the job claims savepoints; None if it never did."""
    recorded = job_dir.find_fact(_CLAIMANT)
    return None if recorded is None else JobUuid(recorded["job"])


def become_claimant(job_dir: JobDir) -> JobUuid:
    """Return the id under which the job claims savepoints, recorded first so that it survives a crash."""
    return JobUuid(job_dir.record_fact(_CLAIMANT, {"job": uuid.uuid4().hex})["job"])


def check_layout(job_dir: JobDir, planned: PlannedJob) -> PlanLayout:
    """Record the order of the plan's sources and operators; compare it at every later start."""
    # Spark's logs have numbers and no names: this record maps positions and states to uids.
    now = planned.layout
    recorded = PlanLayout.from_json(
        job_dir.record_fact(layout_fact(job_dir.history().log_began_in), now.to_json())
    )
    if recorded.natives != now.natives:
        raise JobDirError(
            "Spark keeps state for other parts of the job than when this job directory was begun",
            why="Spark finds state by position in the plan, and the positions have changed",
            what_to_do="undo the change, or begin a new job_dir",
        )
    if recorded != now:
        raise JobDirError(
            "the job reads its sources in another way than when this job directory was begun",
            why="Spark finds offsets and state by position in the plan, and the positions have changed",
            what_to_do="undo the change, or restore a savepoint into a new job_dir",
        )
    return now


def find_layout(job_dir: JobDir) -> PlanLayout | None:
    """Return the recorded layout of the live log; None before its first start."""
    recorded = job_dir.find_fact(layout_fact(job_dir.history().log_began_in))
    return None if recorded is None else PlanLayout.from_json(recorded)


def read_layout(job_dir: JobDir) -> PlanLayout:
    return layout_of(job_dir, job_dir.history().log_began_in)


def layout_of(job_dir: JobDir, origin: Lineage) -> PlanLayout:
    recorded = job_dir.find_fact(layout_fact(origin))
    if recorded is None:
        raise JobDirError(
            "the job directory does not say in which order its sources are read",
            why=f"the record {layout_fact(origin)} is gone",
            what_to_do="restore facts/ from a backup",
        )
    return PlanLayout.from_json(recorded)


def layout_fact(origin: Lineage) -> str:
    return f"layout-{origin}"


class SeedKeeper:
    """Deletes the files of a seed once its lineage has a checkpoint."""

    def __init__(self, root: StoreSpec, beginning: Beginning, job: JobUuid | None) -> None:
        self._root, self._job = root, job
        self._seed: Seed | None = beginning.seed

    def on_confirmed(self, decision: Decision) -> None:
        """Delete the seed's files, and a claimed savepoint, after the lineage's first checkpoint.

        From then on the micro-batch that read the seed never runs again. Errors are logged, and the next
        start tries again after its first checkpoint.
        """
        seed = self._seed
        if seed is None or decision.lineage < seed.lineage:
            return
        self._seed = None
        try:
            for key in self._root.open().list("seeds"):
                number = key.rpartition("/")[2]
                # Also seeds of older lineages, in which no checkpoint was decided.
                if number.isdecimal() and int(number) <= int(seed.lineage):
                    remove_below(self._root.to_child(f"{key}/{STATE_FOLDER}"))
            if seed.claim is ClaimMode.CLAIM and self._job is not None:
                savepoint_at(StoreSpec.from_text(seed.path)).delete(self._job, seed.savepoint)
        except FlinkishError as error:
            LOG.warning("the savepoint that the job began with is not deleted: %s", error)
