"""The Spark jobs that write the state files of a planned savepoint.

The savepoint that a plan starts from is only read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.core.arrow_pass import map_in_arrow
from flinkish_spark.core.errors import (
    USER_FUNCTION_MARKER,
    EnvironmentFault,
    FlinkishError,
    SchemaError,
    UserFunctionError,
)
from flinkish_spark.core.foreign_errors import describe_error, describe_failure
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.planning.partitioning import shuffle_partitions
from flinkish_spark.protocol.savepoints import OperatorState, StateFile
from flinkish_spark.savepoints.files import BootstrapError, SavepointDamagedError, SavepointDir
from flinkish_spark.savepoints.group_edits import (
    KEY_GROUP,
    PACKED,
    PART,
    ROW_TIME,
    VALUE,
    Edit,
    EditedTimers,
    EditGroup,
    FillGroup,
    PackRows,
    PackValues,
    WriteGroups,
    WriterError,
)
from flinkish_spark.savepoints.writer_plan import (
    EditRows,
    OperatorBootstrap,
    PlannedOperator,
    WrittenOperator,
)
from flinkish_spark.savepoints.written_files import REPORT, DueTimers, WrittenFiles, read_reports
from flinkish_spark.state.codec import HASH
from flinkish_spark.state.operator_state import BROADCAST_KIND
from flinkish_spark.transport.columns import FIRST_PARTITION_GROUP
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.rows import arrow_schema

#: About how many bytes of state files one task rewrites.
_TASK_BYTES = 64 << 20
#: Types whose values cannot be compared reliably; jobs refuse them as keys, too.
_UNFIT_KEYS = (T.ArrayType, T.MapType, T.StructType, T.FloatType, T.DoubleType, T.VariantType)


@dataclass(frozen=True)
class WriteTarget:
    """The target of a new savepoint, and the savepoint that it starts from."""

    spark: SparkSession
    place: StoreSpec
    #: The old savepoint; None for a new one.
    origin: SavepointDir | None
    #: Prefix of the names of all files that this writer makes.
    token: str
    #: Processing time for bootstrap functions.
    now_ms: int


def write_operator(target: WriteTarget, uid: str, planned: PlannedOperator) -> WrittenOperator:
    """Write the state files of one operator; runs Spark jobs, unless nothing changes."""
    if planned.bootstrap is not None:
        chain = planned.bootstrap.chain
        found = _fill(target, uid, planned.state, planned.bootstrap, planned.edits.get(chain, ()))
        state = replace(planned.state, states={**planned.state.states, **found.states})
        return WrittenOperator(state, found.files, {chain: found.due})
    written: list[StateFile] = []
    timers: dict[str, tuple[DueTimers, ...]] = {}
    chains = sorted(planned.origin.keys() | planned.edits.keys())
    # With several chains the states of the other chains stay known.
    state = planned.state if len(chains) > 1 else replace(planned.state, states={})
    for chain in chains:
        old, edits = planned.origin.get(chain, ()), planned.edits.get(chain, ())
        if not edits and all(file.operator == uid for file in old):
            assert target.origin is not None
            target.origin.copy_to_place(old, target.place)
            written += [replace(file, chain=chain) for file in old]
            state = replace(state, states={**state.states, **planned.state.states})
            continue
        found = _rewrite(target, uid, state, chain, old, edits)
        state = replace(state, states={**state.states, **found.states})
        written += found.files
        if any(isinstance(one.edit, EditedTimers) for one in edits):
            timers[chain] = found.due
    return WrittenOperator(state, tuple(written), timers)


def key_columns(keys: Sequence[str | Column]) -> list[Column]:
    return [F.col(quote_name(key)) if isinstance(key, str) else key for key in keys]


def check_key_types(frame: DataFrame, keys: Sequence[str | Column]) -> tuple[T.DataType, ...]:
    fields = frame.select(*key_columns(keys)).schema.fields
    for one in fields:
        if isinstance(one.dataType, _UNFIT_KEYS):
            raise SchemaError(
                f"state cannot be keyed by {one.name}, a {one.dataType.simpleString()}",
                why="values of that type cannot be compared reliably",
                what_to_do="key by its parts: a string, a whole number, a date, a timestamp or a decimal",
            )
    return tuple(one.dataType for one in fields)


# -- parts ------------------------------------------------------------------------------------------
def _fill(
    target: WriteTarget,
    uid: str,
    state: OperatorState,
    bootstrap: OperatorBootstrap,
    edits: Sequence[EditRows],
) -> WrittenFiles:
    rows, frame = bootstrap.rows, bootstrap.rows.frame
    keys, key_types = key_columns(rows.keys), check_key_types(frame, rows.keys)
    columns: list[Column] = [F.xxhash64(*keys).alias(HASH)]
    fields = [T.StructField(HASH, T.LongType())]
    if rows.timestamp is not None:
        columns.append(F.col(quote_name(rows.timestamp)).alias(ROW_TIME))
        fields.append(T.StructField(ROW_TIME, T.LongType()))
    for number, one in enumerate(frame.schema):
        columns.append(F.col(quote_name(one.name)).alias(f"c{number}"))
        fields.append(T.StructField(f"c{number}", one.dataType))
    for number, (key, kind) in enumerate(zip(keys, key_types, strict=True)):
        columns.append(key.alias(f"k{number}"))
        fields.append(T.StructField(f"k{number}", kind))
    schema = arrow_schema(fields)
    by_group = _add_key_group(frame.select(*columns), state.max_parallelism)
    packed = by_group.mapInArrow(PackRows(VALUE + 1, schema), PACKED)
    fill = FillGroup(
        uid, state.max_parallelism, bootstrap.function, schema, frame.schema.names, key_types, target.now_ms
    )
    frames, by_part = _edit_blocks(edits, state.max_parallelism, VALUE + 2)
    together = reduce(lambda one, other: one.unionByName(other), [packed, *frames])
    groups = _shuffle(target, together, state, 0)
    return _run(target, state, bootstrap.chain, groups, EditGroup(uid, by_part, fill))


def _rewrite(
    target: WriteTarget,
    uid: str,
    state: OperatorState,
    chain: str,
    old: Sequence[StateFile],
    edits: Sequence[EditRows],
) -> WrittenFiles:
    frames, by_part = _edit_blocks(edits, state.max_parallelism, VALUE + 1)
    if old:
        assert target.origin is not None
        target.origin.check_files(old)
        described = [(json.dumps(file.to_json()),) for file in old]
        listed = target.spark.createDataFrame(described, "file STRING").repartition(len(old))
        # In a shuffle, the copies of broadcast state become one.
        together = frozenset({BROADCAST_KIND} if edits else ())
        frames.insert(0, listed.mapInArrow(PackValues(target.origin.place, together), PACKED))
    groups = reduce(lambda one, other: one.unionByName(other), frames)
    if edits:
        groups = _shuffle(target, groups, state, sum(file.size_bytes for file in old))
    return _run(target, state, chain, groups, EditGroup(uid, by_part))


def _edit_blocks(
    edits: Sequence[EditRows], groups: int, first_part: int
) -> tuple[list[DataFrame], dict[int, Edit]]:
    by_part = dict(enumerate(edits, start=first_part))
    partition = F.lit(FIRST_PARTITION_GROUP).cast("int").alias(KEY_GROUP)
    frames = []
    for part, rows in by_part.items():
        is_keyed = rows.edit.kind is None
        frame = _add_key_group(rows.frame, groups) if is_keyed else rows.frame.select(partition, "*")
        frames.append(map_in_arrow(frame, PackRows(part, rows.edit.rows), PACKED))
    return frames, {part: rows.edit for part, rows in by_part.items()}


def _add_key_group(frame: DataFrame, groups: int) -> DataFrame:
    # As in a job's `key_by`, which looks for the key in this key group.
    group = F.pmod(F.col(HASH), F.lit(groups)).cast("int").alias(KEY_GROUP)
    return frame.select(group, "*")


def _shuffle(target: WriteTarget, packed: DataFrame, state: OperatorState, size_bytes: int) -> DataFrame:
    wanted = shuffle_partitions(target.spark)
    partitions = min(state.max_parallelism, max(wanted, size_bytes // _TASK_BYTES + 1))
    return packed.repartition(partitions, KEY_GROUP).sortWithinPartitions(KEY_GROUP, PART)


def _run(
    target: WriteTarget, state: OperatorState, chain: str, groups: DataFrame, change: EditGroup
) -> WrittenFiles:
    try:
        rows = groups.mapInArrow(WriteGroups(target.place, target.token, change), REPORT).collect()
    except Exception as error:
        raise _failure(change.owner, error) from error
    return read_reports(rows, change.owner, chain, state.max_parallelism)


def _failure(uid: str, error: Exception) -> FlinkishError:
    text = describe_failure(error)
    if USER_FUNCTION_MARKER in text:
        begins = text.index("{", text.index(USER_FUNCTION_MARKER))
        facts, _ = json.JSONDecoder().raw_decode(text[begins:])
        return UserFunctionError(
            f"the function that fills the state of '{uid}' failed",
            why=str(facts["error"]),
            what_to_do="correct the function or the row; no savepoint was written",
            uid=uid,
        )
    for name, kind in (
        (WriterError.__name__, BootstrapError),
        ("SavepointDamagedError", SavepointDamagedError),
    ):
        if f"{name}: " in text:
            says = text[text.index(f"{name}: ") + len(name) + 2 :].split("\n", 1)[0]
            return kind(
                f"the state of '{uid}' cannot be written",
                why=says[:1_500],
                what_to_do="correct the input and write again; no savepoint was written",
            )
    return EnvironmentFault(
        f"the state of '{uid}' cannot be written",
        why=describe_error(error),
        what_to_do="write again; no savepoint was written",
    )
