"""The plan of one keyed operator: route, transport, apply, restore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupStateTimeout

from flinkish_spark.bridge.plan_layout import named_operator, named_scan
from flinkish_spark.errors import GraphError
from flinkish_spark.functions import KeyedProcessFunction
from flinkish_spark.graph.operator_factories import FoldingColumns, fields_of
from flinkish_spark.graph.stream_graph import KeyedNode, SideNode
from flinkish_spark.operators.keyed_operators import KeyedProcessOperator, KeyedStreamOperator
from flinkish_spark.operators.vectorized import VectorizedProcessFunction
from flinkish_spark.operators.vectorized_aggregates import ColumnAggregation, MergePartials
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.protocol.scans import ScanRole
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.combining import Combiner
from flinkish_spark.runtime.group_runners import InputShape, RowShape
from flinkish_spark.runtime.key_groups import Routing
from flinkish_spark.runtime.keyed_operator import KeyedOperator, KeyedOperatorSpec, Origins
from flinkish_spark.runtime.row_blocks import (
    EMITTED,
    PACKED,
    BlockPacker,
    BlockUnpacker,
    TimeReport,
    arrow_schema,
)
from flinkish_spark.state import StateTtl

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
    number
        The operator's among those who report to the driver.
    reports_as
        The source's, if its records have event times that the driver is told of here.
    """

    frames: tuple[DataFrame, ...]
    schema: T.StructType
    channels: ExpectedChannels
    origins: Origins
    source: str | None = None
    seed: DataFrame | None = None
    number: int = 0
    reports_as: int | None = None


@dataclass(frozen=True)
class KeyedPlan:
    """The plan of an operator.

    Parameters
    ----------
    frame
        Control columns and fields; the fields of side outputs stand behind those of the main output.
    key_types
        Of its key, as Spark writes them.
    outputs
        Columns of `frame` with the fields of each output, the main one first.
    schema
        Fields of the main output.
    """

    frame: DataFrame
    key_types: tuple[str, ...]
    outputs: tuple[tuple[str, ...], ...]
    schema: T.StructType


@dataclass(frozen=True)
class _Transport:
    """Which columns go to the worker, under which names."""

    columns: tuple[Column, ...]
    schema: T.StructType
    field_names: tuple[str, ...]
    key_names: tuple[str, ...]
    key_types: tuple[T.DataType, ...]


def plan_keyed(
    node: KeyedNode, given: KeyedInput, partitions: int, sides: Sequence[SideNode] = ()
) -> KeyedPlan:
    """Return the operator's plan for a number of shuffle partitions and the side outputs that are read."""
    routing = Routing(node.max_parallelism, partitions)
    keys = [F.col(C.quoted(k)) if isinstance(k, str) else k for k in node.keys]
    transport = _transport(node, given, keys)
    folded = _folded(node, given, transport)
    sent = transport if folded is None else folded.transport
    rows = _routed(given, transport, routing, folded)
    if given.seed is not None:
        rows = _seeded(rows, given.seed, node.uid, routing)
    main = _main_output(node, given, folded)
    outputs = (main, *(_renamed(side.output, number) for number, side in enumerate(sides, start=1)))
    came = InputShape(
        schema=arrow_schema(sent.schema),
        fields=tuple(given.schema.names if folded is None else folded.aggregation.names),
        field_columns=sent.field_names,
        key_columns=sent.key_names,
        is_behind_operator=given.source is None,
    )
    shape = RowShape(
        inputs=(came,),
        key_types=sent.key_types,
        outputs=outputs,
        side_names=tuple(side.tag.name for side in sides),
        with_times=C.TIME in sent.schema.names,
    )
    spec = KeyedOperatorSpec(
        uid=node.uid,
        max_parallelism=node.max_parallelism,
        operator=_operator(node, given.schema, folded, has_times=shape.with_times),
        shape=shape,
        upstream_channels=(given.channels,),
        group_of_route={route: group for group, route in enumerate(routing.of_group)},
        barrier_routes={route: p for p, route in enumerate(routing.of_barrier)},
        origins=(given.origins,),
        reporter=given.number,
    )
    applied = rows.groupBy(C.ROUTE).applyInPandasWithState(
        KeyedOperator(spec), EMITTED, STATE_DDL, "append", GroupStateTimeout.NoTimeout
    )
    unpacker = BlockUnpacker(outputs, shape.with_times)
    frame = applied.mapInArrow(unpacker, unpacker.columns)
    return KeyedPlan(
        named_operator(frame, node.uid),
        tuple(kind.simpleString() for kind in sent.key_types),
        tuple(tuple(fields.names) for fields in outputs),
        main,
    )


def _renamed(fields: T.StructType, number: int) -> T.StructType:
    """Return the fields of a side output under names that no other output has."""
    return T.StructType(
        [T.StructField(f"{C.SIDE}{number}_{at}", field.dataType) for at, field in enumerate(fields)]
    )


@dataclass(frozen=True)
class _Folded:
    """An aggregate that is computed in part before the shuffle, and what then goes through it."""

    aggregation: ColumnAggregation
    combiner: Combiner
    transport: _Transport
    ttl: StateTtl | None


def _folded(node: KeyedNode, given: KeyedInput, transport: _Transport) -> _Folded | None:
    if not isinstance(node.function, FoldingColumns):
        return None
    names = tuple(key for key in node.keys if isinstance(key, str))
    aggregation = node.function.aggregation(given.schema, names)
    control = [f for f in transport.schema if f.name.startswith(C.PREFIX)]
    own = {f.name: f for f in transport.schema}
    keys = [own[name] for name in dict.fromkeys(transport.key_names)]
    partials = [T.StructField(f"p{at}", f.dataType) for at, f in enumerate(fields_of(aggregation))]
    kept = (C.ROUTE, *(f.name for f in (*control, *keys)))
    fields = tuple(zip(transport.field_names, given.schema.names, strict=True))
    return _Folded(
        aggregation,
        Combiner(aggregation, kept, transport.key_names, fields),
        replace(
            transport,
            schema=T.StructType([*control, *keys, *partials]),
            field_names=tuple(f.name for f in partials),
        ),
        node.function.ttl,
    )


def _main_output(node: KeyedNode, given: KeyedInput, folded: _Folded | None) -> T.StructType:
    if node.output is not None:
        return node.output
    return given.schema if folded is None else fields_of(folded.aggregation)


def _operator(
    node: KeyedNode, schema: T.StructType, folded: _Folded | None, *, has_times: bool
) -> KeyedStreamOperator | VectorizedProcessFunction:
    function = node.function
    if folded is not None:
        return MergePartials(folded.aggregation, folded.ttl)
    assert not isinstance(function, FoldingColumns)
    if isinstance(function, KeyedProcessFunction):
        return KeyedProcessOperator(function)
    if isinstance(function, VectorizedProcessFunction):
        return function
    if function.needs_event_time and not has_times:
        raise GraphError(
            f"operator '{node.uid}' goes by event time, and its stream has no timestamps",
            what_to_do="call assign_timestamps_and_watermarks() before key_by()",
            uid=node.uid,
        )
    return function.create(schema)


def _routed(given: KeyedInput, transport: _Transport, routing: Routing, folded: _Folded | None) -> DataFrame:
    """Send a record, packed, to its key group's route, and a barrier to every partition of the operator."""
    group = F.pmod(F.col(C.KEY_HASH), F.lit(routing.max_parallelism)).cast("int")
    own_route = F.element_at(_int_array(routing.of_group), group + 1)
    names = transport.schema.names
    report = None if given.reports_as is None else TimeReport(given.reports_as, routing.of_barrier[0])
    packer = BlockPacker(arrow_schema(transport.schema), report)
    if folded is not None:
        packer = BlockPacker(arrow_schema(folded.transport.schema), report, folded.combiner)
    if len(given.frames) == 2:
        records, barriers = given.frames
        # Only a generator in front makes marks, and behind it barriers are in a frame of their own.
        marks = [C.MARK] if C.MARK in records.columns else []
        sent = _named(records.select(*transport.columns, *marks), given.source)
        no_block = F.lit("").cast("binary").alias(C.BLOCK)
        packed = sent.select(own_route.alias(C.ROUTE), *names, *marks).mapInArrow(packer, PACKED)
        # A barrier's sequence says which input it is for, as that of a block does.
        is_barrier = F.col(C.KIND) == int(C.Kind.BARRIER)
        sequence = F.when(is_barrier, F.lit(packer.number).cast("long")).otherwise(F.col(C.SEQUENCE))
        control: list[Column | str] = [*C.CONTROL[:-1], sequence.alias(C.SEQUENCE)]
        spread = barriers.select(
            [F.explode(_control_routes(given, routing)).alias(C.ROUTE), *control, no_block]
        )
        return packed.unionByName(named_scan(spread, ScanRole.BARRIERS))
    (both,) = given.frames
    sent = _named(both.select(C.KIND, C.CHECKPOINT, *transport.columns), given.source)
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    routes = F.when(is_record, F.array(own_route)).otherwise(_control_routes(given, routing))
    spread = sent.select(F.explode(routes).alias(C.ROUTE), C.KIND, C.CHECKPOINT, *names)
    return spread.mapInArrow(packer, PACKED)


def _control_routes(given: KeyedInput, routing: Routing) -> Column:
    """Return the routes of a control row: a barrier goes everywhere, a call to its key group."""
    kind = F.col(C.KIND)
    is_own_call = (kind == int(C.Kind.WAKE)) & (F.col(C.CHANNEL) == given.number)
    called = F.element_at(_int_array(routing.of_group), F.col(C.SEQUENCE).cast("int") + 1)
    routes = F.when(kind == int(C.Kind.BARRIER), _int_array(routing.of_barrier))
    # Reports to the driver, and calls of operators behind this one, only pass by: one partition will do.
    return routes.when(is_own_call, F.array(called)).otherwise(_int_array(routing.of_barrier[:1]))


def _named(frame: DataFrame, source: str | None) -> DataFrame:
    return frame if source is None else named_scan(frame, ScanRole.RECORDS, source)


def _seeded(rows: DataFrame, seed: DataFrame, uid: str, routing: Routing) -> DataFrame:
    """Send each key group its state; behind the first micro-batch there is none to send."""
    states = seed.select(
        F.element_at(_int_array(routing.of_group), F.col("key_group") + 1).alias(C.ROUTE),
        F.lit(int(C.Kind.STATE)).alias(C.KIND),
        F.lit(0).cast("long").alias(C.CHECKPOINT),
        F.lit(C.STATE_CHANNEL).cast("long").alias(C.CHANNEL),
        F.col("key_group").cast("long").alias(C.SEQUENCE),
        F.col("value").alias(C.BLOCK),
    )
    return rows.unionByName(named_scan(states, ScanRole.SEED, uid))


def _transport(node: KeyedNode, given: KeyedInput, keys: Sequence[Column]) -> _Transport:
    key_fields = _key_fields(node, given.frames[0], keys)
    names = {f.name: f"c{i}" for i, f in enumerate(given.schema)}
    # The event time travels along if the stream has one.
    times = [C.TIME] if C.TIME in given.frames[0].columns else []
    control = [C.CHANNEL, C.SEQUENCE, *times]
    columns = [F.xxhash64(*keys).alias(C.KEY_HASH), *map(F.col, control)]
    fields = [T.StructField(name, T.LongType()) for name in (C.KEY_HASH, *control)]
    for field in given.schema:
        columns.append(F.col(C.quoted(field.name)).alias(names[field.name]))
        fields.append(T.StructField(names[field.name], field.dataType))
    key_names = []
    for index, (key, column, field) in enumerate(zip(node.keys, keys, key_fields, strict=True)):
        # A key that is a field travels once.
        if isinstance(key, str) and key in names:
            key_names.append(names[key])
            continue
        key_names.append(f"k{index}")
        columns.append(column.alias(f"k{index}"))
        fields.append(T.StructField(f"k{index}", field.dataType))
    return _Transport(
        columns=tuple(columns),
        schema=T.StructType(fields),
        field_names=tuple(names.values()),
        key_names=tuple(key_names),
        key_types=tuple(f.dataType for f in key_fields),
    )


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


def _int_array(values: Sequence[int]) -> Column:
    return F.array(*[F.lit(v) for v in values])
