"""A plain Spark query becomes a job: its offsets, its watermark and its state as they are.

The query's last micro-batch becomes checkpoint 1 of the job, with a receipt, since the query's own sink has
its rows. The first start goes on from there as after any other checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from flinkish_spark.checkpoint.ownership import JobLock, take_over
from flinkish_spark.checkpoint.spark_log import SparkLog, fence_spark_folder, translate_disk_errors
from flinkish_spark.checkpoint.state_files import StateOnDisk
from flinkish_spark.checkpoint.state_transfer import LAST_BATCH, write_rocksdb
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore, Store, make_directories, sync_directory
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.plain_query import (
    PARTITIONS,
    PROVIDER,
    ROCKSDB,
    PlainQuery,
    StatefulOperator,
    read_plain_query,
    refuse,
)
from flinkish_spark.protocol.control_offset import ControlOffset
from flinkish_spark.protocol.decisions import Decision, Receipt, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId
from flinkish_spark.protocol.lineage import FIRST_LINEAGE
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS, STATE
from flinkish_spark.protocol.plan_layout import PlanLayout, ScanRole
from flinkish_spark.protocol.records import StagedBatch

#: The fact of a job directory that says what it was made of.
_ADOPTED = "adopted"
_FIRST = CheckpointId(1)
_SCHEMAS = "_stateSchema"
#: Users' words for operators, by how Spark's names begin; a longer one comes first.
WORDS: Mapping[str, tuple[str, ...]] = {
    "stateStoreSave": ("an aggregate (groupBy, agg)", "SELECT DISTINCT"),
    "sessionWindowStateStoreSave": ("an aggregate (groupBy, agg)",),
    "dedupeWithinWatermark": ("dropDuplicatesWithinWatermark()",),
    "dedupe": ("dropDuplicates() or distinct()",),
    "symmetricHashJoin": ("a join of two streams",),
    "applyInPandasWithState": ("applyInPandasWithState()",),
    "flatMapGroupsWithState": ("mapGroupsWithState()",),
    "transformWithState": ("transformWithState()",),
    "globalLimit": ("limit()",),
}


def adopt(checkpoint: Path, place: StoreSpec, clock: Clock) -> PlainQuery:
    """Make a job directory whose first checkpoint is the newest micro-batch of a stopped query."""
    _check_free(place)
    query = read_plain_query(checkpoint)
    with _make_apart(place.folder) as folder:
        job_dir = JobDir(LocalStore(folder))
        epoch = take_over(job_dir, clock).epoch
        log = SparkLog(job_dir.store, fence_spark_folder(folder, epoch), str(folder))
        _copy_query(checkpoint, query.operators, job_dir.store, f"{log.folder}/")
        ids, state = dict[str, list[list[str]]](), StateOnDisk(checkpoint / STATE)
        for one in query.operators:
            for partition in range(one.partitions):
                content, key = query.read_store(one, partition), f"{one.number}/{partition}"
                where = f"{log.folder}/{STATE}/{key}"
                unique_id = write_rocksdb(state, content, job_dir.store, where)
                ids.setdefault(str(one.number), []).append([unique_id])
        commit = f"v2\n{json.dumps({**query.commit, 'stateUniqueIds': ids})}"
        facts = json.dumps({**query.facts, "conf": {**query.conf, **({PROVIDER: ROCKSDB} if ids else {})}})
        # In the plan of such a job the barriers come after the sources of the query.
        control = json.dumps(ControlOffset(checkpoint=int(_FIRST)).to_json())
        offsets = "\n".join(["v1", facts, *query.positions, control])
        for batch in range(LAST_BATCH + 1):
            # Spark's restart reads the entry before the newest, too.
            log.restore(OFFSETS, BatchId(batch), offsets)
        log.restore(COMMITS, BatchId(LAST_BATCH), commit)
        origin = {"checkpoint": str(checkpoint), "batch": query.batch, "sources": len(query.positions)}
        operators = [one.name for one in query.operators]
        partitions = int(query.conf[PARTITIONS])
        job_dir.record_fact(_ADOPTED, {**origin, "operators": operators, "shuffle_partitions": partitions})
        now_ms, last = clock.wall_ms(), StagedBatch(FIRST_LINEAGE, BatchId(LAST_BATCH), epoch, 1, (), ())
        decision = Decision(_FIRST, Verdict.COMMIT, epoch, now_ms, batches=(last,), triggered_at_ms=now_ms)
        job_dir.create_decision(replace(decision, offsets_text=offsets, commits_text=commit))
        job_dir.create_receipt(Receipt(_FIRST, epoch, now_ms))
        query.check_unchanged()
    return query


def check_adopted(job_dir: JobDir, layout: PlanLayout, partitions: int) -> None:
    """Refuse a job that does not fit the query which its directory was made of."""
    adopted = job_dir.find_fact(_ADOPTED)
    if adopted is None:
        return
    theirs, names = adopted["shuffle_partitions"], adopted["operators"]
    if partitions != theirs:
        raise refuse(
            f"the adopted query has {theirs} shuffle partitions, and this job {partitions}",
            "Spark does not move its own state to other partitions",
            f"set {PARTITIONS} to {theirs}",
        )
    roles = [scan.role for scan in layout.scans]
    natives = [one.what for one in sorted(layout.natives, key=lambda one: one.number)]
    known = [next((WORDS[one] for one in WORDS if name.startswith(one)), ()) for name in names]
    is_same = len(natives) == len(known)
    is_same = is_same and all(what in own for own, what in zip(known, natives, strict=True))
    wanted = [ScanRole.RECORDS] * adopted["sources"] + [ScanRole.BARRIERS]
    if roles != wanted or layout.operators or not is_same:
        raise refuse(
            "this job is another query than the one which its directory was made of: that keeps state for "
            f"{', '.join(names) or 'nothing'}, and reads {adopted['sources']} sources; this keeps state for "
            f"{', '.join(natives) or 'nothing'}, and reads {roles.count(ScanRole.RECORDS)}",
            "Spark finds offsets and state by position in the plan",
            "give the DataFrame of the query to from_dataframe() as it was, once, and let only sinks read it",
        )


def _copy_query(source: Path, operators: Sequence[StatefulOperator], store: Store, key: str) -> None:
    """Copy the files by which Spark knows a query, its sources and its operators."""
    names = ["metadata", "sources", *(f"{STATE}/{one.number}/0/_metadata" for one in operators)]
    for path in [path for name in names for path in (source / name, *sorted((source / name).rglob("*")))]:
        # Spark does without files of checksums, and would refuse those of other content.
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(".crc"):
            store.put(f"{key}{path.relative_to(source).as_posix()}", path.read_bytes())
    for operator in operators:
        folder = f"{STATE}/{operator.number}"
        if not operator.has_batches:
            store.put(f"{key}{folder}/_metadata/metadata", operator.metadata.encode())
            continue
        # These names begin with a micro-batch, which is 0 here; the start corrects the folder's path.
        version, _, body = operator.metadata.partition("\n")
        metadata = json.loads(body)
        for one in metadata["stateStoreInfo"]:
            named = [path.rpartition(f"/{_SCHEMAS}/")[2] for path in one["stateSchemaFilePaths"]]
            begun = [f"{_SCHEMAS}/{Path(name).parent}/0_{name.partition('_')[2]}" for name in named]
            for name, new in zip(named, begun, strict=True):
                store.put(f"{key}{folder}/{new}", (source / folder / _SCHEMAS / name).read_bytes())
            one["stateSchemaFilePaths"] = [f"{source}/{folder}/{new}" for new in begun]
        store.put(f"{key}{folder}/_metadata/v2/0", f"{version}\n{json.dumps(metadata)}".encode())


def _check_free(place: StoreSpec) -> None:
    if not place.is_local:
        raise refuse(
            f"the job directory {place.url} is in a bucket",
            "it is made anew, and moved to its place in one step",
            "give a directory on a disk",
        )
    JobLock.from_folder(place.folder).check_free()
    if place.folder.exists() and (not place.folder.is_dir() or any(place.folder.iterdir())):
        raise refuse(
            f"the job directory {place.folder} is in use", "there are files in it", "give a new directory"
        )


@contextmanager
def _make_apart(target: Path) -> Iterator[Path]:
    """Yield a new folder, which becomes `target` in one step if the block ends well."""
    apart = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    with translate_disk_errors(f"make {target}"):
        try:
            make_directories(apart)
            yield apart
            os.rename(apart, target)
            sync_directory(target.parent)
        finally:
            shutil.rmtree(apart, ignore_errors=True)
