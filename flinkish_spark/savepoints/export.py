"""From a confirmed checkpoint to a savepoint: read the keyed state from Spark's own checkpoint.

Spark's state data source reads the state behind one micro-batch, in stores of its own, so the running query
is not disturbed. The tasks that read write the files; the driver sees their names, sizes and digests only.
Nothing is a savepoint until ``savepoint.json`` exists. An export that was given up leaves files that nobody
names; the next export to the same place removes them.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import functions as F

from flinkish_spark.bridge.settings import session_of_its_own
from flinkish_spark.checkpoint.spark_log import place_of_bases
from flinkish_spark.core.foreign_errors import said
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import sync_directory
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.protocol.plan_layout import PlanLayout, StateInstance
from flinkish_spark.protocol.savepoints import (
    STATE_FOLDER,
    OperatorShape,
    OperatorState,
    SavedChain,
    SavepointMetadata,
    SourceFacts,
    StateFile,
    check_groups,
    state_path,
)
from flinkish_spark.savepoints.files import SavepointFailed, check_outside, savepoint_at
from flinkish_spark.state.base_files import BaseFiles, MappedBases, bases_of
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.state.key_group import describe_group, unbundled_groups, whole_group
from flinkish_spark.state.savepoint_files import ROWS_AT_ONCE, StateFileWriter, new_state_file
from flinkish_spark.transport.columns import FIRST_PARTITION_GROUP, ROUTE
from flinkish_spark.transport.routing import PLACE_BITS, Routing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flinkish_spark.checkpoint.spark_log import SparkLog
    from flinkish_spark.contracts.source import SourceNode
    from flinkish_spark.core.job_dir import JobDir
    from flinkish_spark.planning.sink_rows import PlannedJob
    from flinkish_spark.protocol.decisions import Decision


#: What is escaped in a URI of Java's.
_ESCAPED = re.compile(r"[\x00-\x20%#?\"<>\\^`{|}\[\]]")
#: What a task says about the file that it has written, as JSON.
_REPORT = "report STRING"


@dataclass(frozen=True)
class ExportedState:
    """State files below a folder, and the stored types of each operator's states."""

    files: tuple[StateFile, ...]
    states: Mapping[str, Mapping[str, str]]


class _WriteStateFile:
    """Runs in a task: writes the rows of one state store into a file, after checking each."""

    def __init__(
        self,
        place: StoreSpec,
        name: str,
        operator: str,
        bundle_of_route: Mapping[int, int],
        bundling: Bundling,
        bases: StoreSpec,
    ) -> None:
        self._place, self._name, self._operator = place, name, operator
        self._bases = BaseFiles(MappedBases(bases), 0, None)
        self._bundle_of_route, self._bundling = dict(bundle_of_route), bundling

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        # An attempt of its own has a name of its own: a lost one leaves a file that nobody names.
        name = f"{self._name}-{task.partitionId()}-{task.taskAttemptId()}"
        states, found = dict[str, str](), list[int]()
        writer: StateFileWriter | None = None
        for batch in batches:
            if not batch.num_rows:
                continue
            # Read here, where the files are: a savepoint holds all of its state itself.
            writer = writer or new_state_file(self._place, state_path(self._operator, name))
            for route, stored in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                value = whole_group(stored, self._bases)
                states.update(self._checked(value))
                groups = self._by_group(self._bundle_of_route[route], value)
                writer.write(list(groups), list(groups.values()))
                found += groups
        if writer is not None:
            size, digest = writer.close()
            file = {"name": name, "rows": writer.rows, "bytes": size, "sha256": digest}
            yield pa.RecordBatch.from_pydict(
                {"report": [json.dumps({**file, "states": states, "groups": found})]}
            )

    def _by_group(self, bundle: int, value: bytes) -> Mapping[int, bytes]:
        is_alone = bundle < 0 or len(self._bundling.groups_of(bundle)) == 1
        return {bundle: value} if is_alone else unbundled_groups(value, self._operator, self._bundling)

    def _checked(self, value: bytes) -> Mapping[str, str]:
        """Return the stored types of a state value that is whole and the operator's."""
        stored = describe_group(value)
        if stored.owner != self._operator:
            raise StateMismatch(f"state of {stored.owner!r} is where that of {self._operator!r} has to be")
        return stored.types


def export_state(
    spark: SparkSession,
    place: StoreSpec,
    log: SparkLog,
    bases: StoreSpec,
    decision: Decision,
    operators: Mapping[str, OperatorShape],
    layout: PlanLayout,
    shuffle_partitions: int,
    bundles_per_partition: int,
) -> ExportedState:
    """Write the keyed state of a decided checkpoint below ``state/`` of a place, in files with new names."""
    numbers = operator_numbers(decision.commits_text)
    planned = tuple(dict.fromkeys(one.number for one in layout.states))
    if numbers != planned:
        raise _unexpected(f"it has the operators {numbers}, and the plan has {planned}")
    reader, token = session_of_its_own(spark, shuffle_partitions), uuid.uuid4().hex[:8]
    files: list[StateFile] = []
    states: dict[str, dict[str, str]] = {}
    # A state value is a whole key group: few at a time, or a batch outgrows what Arrow holds.
    reader.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(ROWS_AT_ONCE))
    for instance in layout.states:
        groups = operators[instance.uid].max_parallelism
        bundling = Bundling(groups, shuffle_partitions, bundles_per_partition)
        routing = Routing(bundling, instance.place)
        by_route = {route: bundle for bundle, route in enumerate(routing.of_bundle)}
        by_route |= {route: FIRST_PARTITION_GROUP - p for p, route in enumerate(routing.of_broadcast)}
        of_operator = bases_of(bases, instance.uid, instance.chain)
        name = f"{token}-{instance.number}-{instance.place}"
        write = _WriteStateFile(place, name, instance.uid, by_route, bundling, of_operator)
        state = reader.read.format("statestore").option("batchId", str(decision.batch))
        state = state.option("operatorId", str(instance.number))
        try:
            frame = of_instance(state.load(log.hadoop_url), instance)
            values = frame.select(F.col(f"key.{ROUTE}"), F.col("value.groupState.value"))
            reports = [json.loads(row["report"]) for row in values.mapInArrow(write, _REPORT).collect()]
        except Exception as error:
            raise SavepointFailed(
                f"the state of checkpoint {decision.checkpoint} cannot be read from Spark's checkpoint",
                why=said(error),
                what_to_do="take another savepoint; the job is not affected"
                if _ESCAPED.search(log.hadoop_url) is None
                else "give as job_dir a symbolic link to it, whose path has letters, digits, - and _ alone: "
                "Spark's reader of state escapes a path twice, and does not find this one",
            ) from error
        for report in reports:
            states.setdefault(instance.uid, {}).update(report["states"])
        try:
            found = [group for r in reports for group in r["groups"] if group >= 0]
            check_groups(instance.uid, groups, found)
        except ValueError as error:
            raise _unexpected(str(error)) from None
        files += [
            StateFile(instance.uid, instance.chain, r["name"], r["rows"], r["bytes"], r["sha256"])
            for r in sorted(reports, key=lambda report: str(report["name"]))
        ]
    return ExportedState(tuple(files), states)


def of_instance(state: DataFrame, instance: StateInstance) -> DataFrame:
    route = F.col(f"key.{ROUTE}")
    place = F.shiftright(F.when(route < 0, F.bitwise_not(route)).otherwise(route), PLACE_BITS)
    return state.where(place == instance.place)


def _unexpected(why: str) -> SavepointFailed:
    return SavepointFailed(
        "the state in Spark's checkpoint is not what it has to be",
        why=why,
        what_to_do="keep the job directory and report this",
    )


def operator_numbers(commits_text: str) -> tuple[int, ...]:
    r"""Return Spark's numbers of the operators that have state, from a commits entry of format 2."""
    body = json.loads(commits_text.strip().split("\n")[1])
    return tuple(sorted(int(number) for number in body.get("stateUniqueIds") or {}))


@dataclass(frozen=True)
class JobFacts:
    """A job's facts that go into its savepoints beside its state."""

    name: str
    uuid: JobUuid
    #: Its plan, under any number of partitions and any beginning.
    planned: PlannedJob
    sources: Sequence[SourceNode]
    #: Of the lineage in which the checkpoint was taken.
    layout: PlanLayout
    shuffle_partitions: int
    bundles_per_partition: int


@dataclass(frozen=True)
class SavepointHandle:
    """A finished savepoint."""

    place: StoreSpec
    metadata: SavepointMetadata


def export_savepoint(
    spark: SparkSession,
    target: StoreSpec,
    decision: Decision,
    log: SparkLog,
    facts: JobFacts,
    job_dir: JobDir,
    job_place: StoreSpec,
    upstream: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> SavepointHandle:
    """Make a confirmed checkpoint a savepoint at `target`; do nothing if it is one already.

    The caller sees to it that Spark keeps the state of the checkpoint meanwhile. Any process may repeat it.
    """
    check_outside(target, job_place)
    place = savepoint_at(target)
    timeline = job_dir.timeline().mark_of(decision.checkpoint).token or ""
    known = place.finished_by(facts.uuid, decision.checkpoint, timeline)
    if known is not None:
        return SavepointHandle(target, known)
    place.prepare()
    planned, logged = facts.planned, LoggedOffsets.parse(decision.offsets_text).sources
    positions = facts.layout.positions(logged)
    exported = export_state(
        spark,
        target,
        log,
        place_of_bases(job_place, log),
        decision,
        planned.operators,
        facts.layout,
        facts.shuffle_partitions,
        facts.bundles_per_partition,
    )
    metadata = SavepointMetadata(
        savepoint=uuid.uuid4().hex,
        job=facts.name,
        job_uuid=facts.uuid,
        checkpoint=decision.checkpoint,
        lineage=decision.lineage,
        batch=decision.batch,
        decided_at_ms=decision.decided_at_ms,
        shuffle_partitions=facts.shuffle_partitions,
        operators={
            uid: OperatorState(
                shape.max_parallelism, shape.key_types, exported.states.get(uid, {}), shape.meaning
            )
            for uid, shape in planned.operators.items()
        },
        sources={
            node.uid: SourceFacts(node.source.kind, node.source.identity(job_dir, node.uid))
            for node in facts.sources
        },
        chains=tuple(
            SavedChain(chain, positions.get(chain.name, {}), sinks)
            for chain, sinks in planned.read_by.items()
        ),
        sinks=tuple(sink.uid for sink in planned.sinks),
        hooks=dict(decision.hook_states),
        finished=tuple(decision.finished),
        upstream=dict(upstream),
        files=exported.files,
        times=decision.times,
        timeline=timeline,
    )
    make_durable(target, exported.files)
    # The savepoint exists from here on.
    return SavepointHandle(target, place.finish(metadata))


def make_durable(place: StoreSpec, files: Collection[StateFile]) -> None:
    if place.is_local:
        sync_folders(place.folder, files)


def sync_folders(root: Path, files: Collection[StateFile]) -> None:
    folders = {root / STATE_FOLDER / file.operator for file in files} | {root / STATE_FOLDER, root}
    for folder in folders:
        if folder.is_dir():
            sync_directory(folder)
