"""The plan of one keyed operator: route, transport, apply, restore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupStateTimeout

from flinkish_spark.bridge.plan_layout import named_operator, named_scan
from flinkish_spark.errors import GraphError
from flinkish_spark.graph.stream_graph import KeyedNode
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.protocol.scans import ScanRole
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.key_groups import Routing
from flinkish_spark.runtime.keyed_operator import KeyedOperator, KeyedOperatorSpec, Origins
from flinkish_spark.runtime.row_codec import MASK_BITS

STATE_DDL = "value BINARY"


@dataclass(frozen=True)
class KeyedInput:
    """Input of a keyed operator.

    Parameters
    ----------
    frames
        Either records and barriers apart (a source), or one frame of both (another operator): a
        frame that is used twice would run the operator before it twice.
    schema
        The records' fields.
    channels
        Upstream channels, each of which shows every barrier once.
    source
        Uid of the source whose records are in the first frame; None behind another operator.
    seed
        Key groups and their state, if the lineage begins with state of this operator.
    """

    frames: tuple[DataFrame, ...]
    schema: T.StructType
    channels: ExpectedChannels
    origins: Origins
    source: str | None = None
    seed: DataFrame | None = None


@dataclass(frozen=True)
class KeyedPlan:
    """The plan of an operator: control columns and the declared fields, and the types of its key."""

    frame: DataFrame
    key_types: tuple[str, ...]


@dataclass(frozen=True)
class _Transport:
    """Which columns go to the worker, in which form: no nulls, few columns, no duplicates."""

    fields: list[tuple[str, Column]]
    masks: list[tuple[str, Column]]
    field_names: tuple[str, ...]
    key_names: tuple[str, ...]
    key_types: tuple[T.DataType, ...]
    mask_names: tuple[str, ...]


def plan_keyed(node: KeyedNode, given: KeyedInput, partitions: int) -> KeyedPlan:
    """Return the operator's plan for a number of shuffle partitions."""
    routing = Routing(node.max_parallelism, partitions)
    keys = [F.col(C.quoted(k)) if isinstance(k, str) else k for k in node.keys]
    transport = _transport(node, given, keys)
    rows = _routed(given, transport, keys, routing)
    if given.seed is not None:
        rows = _seeded(rows, given.seed, node.uid, routing)
    spec = KeyedOperatorSpec(
        uid=node.uid,
        function=node.function,
        input_schema=given.schema,
        output_schema=node.output,
        key_columns=transport.key_names,
        key_types=transport.key_types,
        input_columns=transport.field_names,
        mask_columns=transport.mask_names,
        upstream_channels=given.channels,
        group_of_route={route: group for group, route in enumerate(routing.of_group)},
        barrier_routes={route: p for p, route in enumerate(routing.of_barrier)},
        origins=given.origins,
        state_column=None if given.seed is None else C.STATE,
    )
    returned = T.StructType(
        [
            T.StructField(C.KIND, T.IntegerType()),
            *[T.StructField(n, T.LongType()) for n in (C.CHANNEL, C.SEQUENCE)],
            *([T.StructField(C.NANS, T.LongType())] if _has_floats(node.output) else []),
            *[T.StructField(f.name, f.dataType) for f in node.output],
        ]
    )
    applied = rows.groupBy(C.ROUTE).applyInPandasWithState(
        KeyedOperator(spec), returned, STATE_DDL, "append", GroupStateTimeout.NoTimeout
    )
    # A barrier's sequence is its checkpoint: one column less on the way through pandas.
    is_barrier = F.col(C.KIND) == int(C.Kind.BARRIER)
    checkpoint = F.when(is_barrier, F.col(C.SEQUENCE)).otherwise(F.lit(0).cast("long"))
    frame = applied.select(
        C.KIND, checkpoint.alias(C.CHECKPOINT), C.CHANNEL, C.SEQUENCE, *_restored(node.output)
    )
    return KeyedPlan(
        named_operator(frame, node.uid), tuple(kind.simpleString() for kind in transport.key_types)
    )


def _routed(given: KeyedInput, transport: _Transport, keys: Sequence[Column], routing: Routing) -> DataFrame:
    """Send a record to its key group's route, and a barrier to every partition of the operator."""
    group = F.pmod(F.xxhash64(*keys), F.lit(routing.max_parallelism)).cast("int")
    own_route = F.element_at(_int_array(routing.of_group), group + 1)
    all_barriers = _int_array(routing.of_barrier)
    payload = [c.alias(name) for name, c in (*transport.masks, *transport.fields)]
    nothing = [c.alias(name) for name, c in _empty(transport, given.frames[0].select(*payload).schema)]
    barrier = [F.col(C.CHANNEL), F.col(C.CHECKPOINT).alias(C.SEQUENCE)]
    if len(given.frames) == 2:
        records, barriers = given.frames
        routed = records.select(own_route.alias(C.ROUTE), C.CHANNEL, C.SEQUENCE, *payload)
        spread = barriers.select(F.explode(all_barriers).alias(C.ROUTE), *barrier, *nothing)
        return _named(routed, given.source).unionByName(named_scan(spread, ScanRole.BARRIERS))
    (both,) = given.frames
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    routes = F.when(is_record, F.array(own_route)).otherwise(all_barriers)
    place = F.when(is_record, F.col(C.SEQUENCE)).otherwise(F.col(C.CHECKPOINT))
    routed = both.select(F.explode(routes).alias(C.ROUTE), C.CHANNEL, place.alias(C.SEQUENCE), *payload)
    return _named(routed, given.source)


def _named(frame: DataFrame, source: str | None) -> DataFrame:
    return frame if source is None else named_scan(frame, ScanRole.RECORDS, source)


def _seeded(rows: DataFrame, seed: DataFrame, uid: str, routing: Routing) -> DataFrame:
    """Send each key group its state, on a channel that is read before all others.

    The columns stay in the plan for the life of the lineage; behind the first micro-batch they hold
    nothing.
    """
    stands_for = {C.ROUTE: F.element_at(_int_array(routing.of_group), F.col("key_group") + 1)}
    stands_for[C.CHANNEL] = F.lit(C.STATE_CHANNEL).cast("long")
    stands_for[C.SEQUENCE] = F.col("key_group").cast("long")
    nothing = [
        stands_for.get(f.name, _send(F.lit(None).cast(f.dataType), f.dataType)).alias(f.name)
        for f in rows.schema
    ]
    states = seed.select(*nothing, F.col("value").alias(C.STATE))
    plain = rows.withColumn(C.STATE, F.lit(None).cast("binary"))
    return plain.unionByName(named_scan(states, ScanRole.SEED, uid))


def _transport(node: KeyedNode, given: KeyedInput, keys: Sequence[Column]) -> _Transport:
    key_fields = _key_fields(node, given.frames[0], keys)
    names = {f.name: f"c{i}" for i, f in enumerate(given.schema)}
    sent = [(names[f.name], F.col(C.quoted(f.name)), f.dataType) for f in given.schema]
    key_names = []
    for index, (key, column, field) in enumerate(zip(node.keys, keys, key_fields, strict=True)):
        # A key that is a field travels once.
        if isinstance(key, str) and key in names:
            key_names.append(names[key])
        else:
            key_names.append(f"k{index}")
            sent.append((f"k{index}", column, field.dataType))
    masks = [
        (f"{C.NULLS}{i}", _mask([column for _, column, _ in sent[first : first + MASK_BITS]]))
        for i, first in enumerate(range(0, len(sent), MASK_BITS))
    ]
    return _Transport(
        fields=[(name, _send(column, kind)) for name, column, kind in sent],
        masks=masks,
        field_names=tuple(names.values()),
        key_names=tuple(key_names),
        key_types=tuple(f.dataType for f in key_fields),
        mask_names=tuple(name for name, _ in masks),
    )


def _empty(transport: _Transport, schema: T.StructType) -> list[tuple[str, Column]]:
    """Return stand-ins for a barrier's payload: never null, so that no column gets slower."""
    return [(f.name, _send(F.lit(None).cast(f.dataType), f.dataType)) for f in schema]


#: Types whose values are not equal to themselves reliably, or cannot be a Python dict's key.
_UNFIT_KEYS = (
    T.ArrayType,
    T.MapType,
    T.StructType,
    T.FloatType,
    T.DoubleType,
    T.VariantType,
)


def _key_fields(node: KeyedNode, tagged: DataFrame, keys: Sequence[Column]) -> list[T.StructField]:
    fields = tagged.select(*keys).schema.fields
    for field in fields:
        if isinstance(field.dataType, _UNFIT_KEYS):
            raise GraphError(
                f"operator '{node.uid}' is keyed by {field.name}, a {field.dataType.simpleString()}",
                why="values of that type cannot be compared reliably",
                what_to_do="key by its parts: a string, a whole number, a date, a timestamp or a decimal",
            )
    return fields


def _has_floats(schema: T.StructType) -> bool:
    return any(isinstance(f.dataType, T.FloatType | T.DoubleType) for f in schema)


def _int_array(values: Sequence[int]) -> Column:
    return F.array(*[F.lit(v) for v in values])


def _mask(columns: Sequence[Column]) -> Column:
    """Return a number with one bit per column, set where it is null."""
    mask = F.lit(0).cast("long")
    for bit, column in enumerate(columns):
        mask = mask.bitwiseOR(F.when(column.isNull(), F.lit(1 << bit).cast("long")).otherwise(F.lit(0)))
    return mask


def _send(column: Column, kind: T.DataType) -> Column:
    """Return `column` in the form that pandas carries without loss, never null where it can be."""
    if isinstance(kind, T.TimestampType):
        return F.coalesce(F.unix_micros(column), F.lit(0).cast("long"))
    if isinstance(kind, T.DateType):
        return F.coalesce(F.unix_date(column), F.lit(0))
    if isinstance(kind, T.BooleanType):
        return F.coalesce(column, F.lit(False))
    if isinstance(kind, T.StringType):
        return F.coalesce(column, F.lit(""))
    if isinstance(kind, T.NumericType):
        return F.coalesce(column, F.lit(0).cast(kind))
    return column


def _restored(output: T.StructType) -> list[Column]:
    """Return the output fields with NaN where the operator said NaN: pandas made them null."""
    restored, bit = [], 0
    for field in output:
        column = F.col(C.quoted(field.name))
        if isinstance(field.dataType, T.FloatType | T.DoubleType):
            is_nan = F.col(C.NANS).bitwiseAND(F.lit(1 << bit).cast("long")) != 0
            column = F.when(is_nan, F.lit(float("nan")).cast(field.dataType)).otherwise(column)
            bit += 1
        restored.append(column.alias(field.name))
    return restored
