"""Export of a confirmed checkpoint's state to a savepoint, out of Spark's own checkpoint.

Spark's state data source reads the state after one micro-batch, with its own stores, so it does not disturb
the running query. Its tasks write the files; the driver gets only their names, sizes and digests. There is no
savepoint until ``savepoint.json`` exists. An export that was cut off leaves files that it does not name; the
next export to the same place removes them.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from flinkish_spark.bridge.settings import make_session
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.foreign_errors import describe_error
from flinkish_spark.core.store import sync_directory
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.protocol.plan_layout import PlanLayout, StateInstance
from flinkish_spark.protocol.restore import OperatorShape
from flinkish_spark.protocol.savepoints import STATE_FOLDER, StateFile
from flinkish_spark.savepoints.written_files import REPORT, read_reports, write_state_file
from flinkish_spark.state.base_files import BaseFiles, MappedBases, bases_of
from flinkish_spark.state.group_values import describe_group, inline_base, unbundle_groups
from flinkish_spark.state.savepoint_files import ROWS_AT_ONCE
from flinkish_spark.transport.columns import FIRST_PARTITION_GROUP, ROUTE
from flinkish_spark.transport.routing import PLACE_BITS, Routing

#: Characters that Java escapes in a URI.
_ESCAPED = re.compile(r"[\x00-\x20%#?\"<>\\^`{|}\[\]]")


class _WriteStateFile:
    """Checks the rows of one state store and writes them into a file; runs in tasks."""

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
        states: dict[str, str] = {}

        def values() -> Iterator[tuple[Sequence[int], Sequence[bytes]]]:
            for batch in batches:
                rows = zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)
                for route, stored in rows:
                    # Merges the base here, where its file is: a savepoint holds all of its state itself.
                    value, bundle = inline_base(stored, self._bases), self._bundle_of_route[route]
                    states.update(describe_group(value, self._operator).types)
                    groups = {bundle: value}
                    if bundle >= 0 and len(self._bundling.groups_of(bundle)) > 1:
                        groups = unbundle_groups(value, self._operator, self._bundling)
                    yield list(groups), list(groups.values())

        yield from write_state_file(self._place, self._operator, self._name, values(), {"states": states})


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
) -> tuple[tuple[StateFile, ...], Mapping[str, Mapping[str, str]]]:
    """Write the keyed state of a decided checkpoint below ``state/`` of a place, in files with new names.

    Returns the files, and the stored types of each operator's states.
    """
    numbers = operator_numbers(decision.commits_text)
    planned = tuple(dict.fromkeys(one.number for one in layout.states))
    if numbers != planned:
        raise EnvironmentFault(
            "the state in Spark's checkpoint does not match the plan",
            why=f"it has the operators {numbers}, and the plan has {planned}",
            what_to_do="keep the job directory and report this",
        )
    reader, token = make_session(spark, shuffle_partitions), uuid.uuid4().hex[:8]
    files: list[StateFile] = []
    states: dict[str, dict[str, str]] = {}
    # A state value is a whole key group; an Arrow batch holds only few of them.
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
            frame = filter_instance(state.load(log.hadoop_url), instance)
            values = frame.select(F.col(f"key.{ROUTE}"), F.col("value.groupState.value"))
            rows = values.mapInArrow(write, REPORT).collect()
        except Exception as error:
            raise EnvironmentFault(
                f"the state of checkpoint {decision.checkpoint} cannot be read from Spark's checkpoint",
                why=describe_error(error),
                what_to_do="take another savepoint; the job is not affected"
                if _ESCAPED.search(log.hadoop_url) is None
                else "give as job_dir a symbolic link to it, whose path has letters, digits, - and _ alone: "
                "Spark's reader of state escapes a path twice, and does not find this one",
            ) from error
        written = read_reports(rows, instance.uid, instance.chain, groups)
        states.setdefault(instance.uid, {}).update(written.states)
        files += written.files
    return tuple(files), states


def filter_instance(state: DataFrame, instance: StateInstance) -> DataFrame:
    route = F.col(f"key.{ROUTE}")
    place = F.shiftright(F.when(route < 0, F.bitwise_not(route)).otherwise(route), PLACE_BITS)
    return state.where(place == instance.place)


def operator_numbers(commits_text: str) -> tuple[int, ...]:
    r"""Return Spark's numbers of the operators that have state, from a commits entry of format 2."""
    body = json.loads(commits_text.strip().split("\n")[1])
    return tuple(sorted(int(number) for number in body.get("stateUniqueIds") or {}))


def make_durable(place: StoreSpec, files: Collection[StateFile]) -> None:
    """Sync the folders of files on a disk; files in a bucket are durable already."""
    if place.is_local:
        root = place.folder
        for folder in {root / STATE_FOLDER / file.operator for file in files} | {root / STATE_FOLDER, root}:
            if folder.is_dir():
                sync_directory(folder)
