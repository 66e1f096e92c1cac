"""The plan of one keyed operator: route, transport, apply, restore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupStateTimeout

from flinkish_spark.bridge.plan_layout import named_operator
from flinkish_spark.errors import GraphError
from flinkish_spark.functions import KeyedCoProcessFunction, KeyedProcessFunction
from flinkish_spark.graph.broadcast_functions import BroadcastFunctions
from flinkish_spark.graph.declared import check_field_names, check_late_row, check_same_fields
from flinkish_spark.graph.join_factories import Joining
from flinkish_spark.graph.keyed_input import Folded, KeyedInput, Sent, columns_sent, without_event_times
from flinkish_spark.graph.keyed_routes import KeyedRoutes
from flinkish_spark.graph.latency_markers import SourceMarkers
from flinkish_spark.graph.operator_factories import ColumnFolding, FoldingWindows, Windows
from flinkish_spark.graph.stream_graph import KeyedNode, SideNode
from flinkish_spark.operators.co_operators import KeyedCoProcessOperator
from flinkish_spark.operators.elements import OutputTag
from flinkish_spark.operators.group_state import BasePolicy
from flinkish_spark.operators.keyed_operators import KeyedProcessOperator
from flinkish_spark.operators.vectorized import VectorizedProcessFunction
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.group_runners import Distribution, InputShape, RowShape
from flinkish_spark.runtime.key_groups import Routing
from flinkish_spark.runtime.keyed_operator import KeyedOperator, KeyedOperatorSpec
from flinkish_spark.runtime.list_state_runner import Checkpointed
from flinkish_spark.runtime.opened_operators import StatefulOperator
from flinkish_spark.runtime.row_blocks import (
    EMITTED,
    BlockUnpacker,
    arrow_schema,
)

STATE_DDL = "value BINARY"
#: When a key group's entries move out of its state value; tests that crash jobs make it small.
BASE_POLICY = BasePolicy()


@dataclass(frozen=True)
class KeyedParts:
    """What a keyed operator's plan is made of besides its node.

    Parameters
    ----------
    inputs
        In their order, by entry.
    number
        The operator's among those who report to the driver.
    partitions
        Spark's shuffle partitions.
    sides
        The side outputs that are read.
    seed
        Key groups and their state, if the lineage begins with state of this operator.
    markers
        Of the sources that it reads itself, if latency is measured; those of others come with the rows.
    name
        What errors call it beside its uid; empty if nobody has said one.
    """

    inputs: tuple[KeyedInput, ...]
    number: int
    partitions: int
    sides: Sequence[SideNode] = ()
    seed: DataFrame | None = None
    markers: SourceMarkers | None = None
    name: str = ""


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


def plan_keyed(node: KeyedNode, parts: KeyedParts) -> KeyedPlan:
    """Return the operator's plan.

    Raises
    ------
    GraphError
        Its keys have different types, or cannot be keys; its inputs do not go together, or lack event times.
    """
    routing = Routing(node.max_parallelism, parts.partitions)
    sent = [columns_sent(node, given) for given in parts.inputs]
    routes = KeyedRoutes(routing, parts.number, isinstance(node.function, BroadcastFunctions), node.uid)
    rows = routes.of_inputs(parts.inputs, sent)
    if parts.seed is not None:
        rows = rows.unionByName(routes.of_seed(parts.seed, node.uid))
    if parts.markers is not None:
        rows = rows.unionByName(parts.markers.routed(routing.of_barrier))
    has_times = all(one.has_times for one in parts.inputs)
    operator, shape = operator_and_shape(node, parts.inputs, sent, parts.sides, has_times=has_times)
    # Functions know the names that were declared; in the frame no name may be there twice.
    main, *sides = shape.outputs
    outputs = (_nullable(main), *(_renamed(fields, number) for number, fields in enumerate(sides, start=1)))
    spec = KeyedOperatorSpec(
        uid=node.uid,
        max_parallelism=node.max_parallelism,
        operator=operator,
        shape=shape,
        upstream_channels=tuple(given.channels for given in parts.inputs),
        group_of_route={route: group for group, route in enumerate(routing.of_group)},
        barrier_routes={route: p for p, route in enumerate(routing.of_barrier)},
        broadcast_routes={route: p for p, route in enumerate(routing.of_broadcast)},
        origins=tuple(given.origins for given in parts.inputs),
        reporter=parts.number,
        base_policy=BASE_POLICY,
        name=parts.name,
    )
    applied = rows.groupBy(C.ROUTE).applyInPandasWithState(
        KeyedOperator(spec), EMITTED, STATE_DDL, "append", GroupStateTimeout.NoTimeout
    )
    unpacker = BlockUnpacker(outputs, shape.with_times)
    frame = applied.mapInArrow(unpacker, unpacker.columns)
    return KeyedPlan(
        named_operator(frame, node.uid),
        tuple(kind.simpleString() for kind in shape.key_types),
        tuple(tuple(fields.names) for fields in outputs),
        main,
    )


def operator_and_shape(
    node: KeyedNode,
    inputs: Sequence[KeyedInput],
    sent: Sequence[Sent],
    sides: Sequence[SideNode],
    *,
    has_times: bool,
) -> tuple[StatefulOperator, RowShape]:
    """Return what runs in the workers, and how rows come and go there; needs no Spark.

    Parameters
    ----------
    inputs
        In their order, by entry; their frames are not looked at.
    sent
        What travels of each.
    has_times
        Whether the records of all inputs have event times.

    Raises
    ------
    GraphError, SchemaError
        As of :func:`plan_keyed`.
    """
    schemas = _schemas(node, inputs)
    main = _main_output(node, schemas, sent[0].folded)
    shape = RowShape(
        inputs=tuple(map(_input_shape, inputs, sent)),
        key_types=_key_types(node, inputs, sent),
        outputs=(main, *(side.output for side in sides)),
        side_names=tuple(side.tag.name for side in sides),
        with_times=_with_times(node, sent),
    )
    tags = [side.tag for side in sides]
    return _operator(node, schemas, sent[0].folded, tags, has_times=has_times), shape


def _input_shape(given: KeyedInput, sent: Sent) -> InputShape:
    fields = given.schema.names if sent.folded is None else sent.folded.fields
    return InputShape(
        schema=arrow_schema(sent.transport.schema),
        fields=tuple(fields),
        field_columns=sent.transport.field_names,
        key_columns=sent.transport.key_names,
        is_behind_operator=given.source is None,
        entry=given.entry,
        distribution=given.distribution,
    )


def _schemas(node: KeyedNode, inputs: Sequence[KeyedInput]) -> list[T.StructType]:
    """Return the fields of each entry; all ways into one entry have the same."""
    found: dict[int, T.StructType] = {}
    for given in inputs:
        check_same_fields(found.setdefault(given.entry, given.schema), given.schema, f"operator '{node.uid}'")
    return [found[entry] for entry in sorted(found)]


def _key_types(node: KeyedNode, inputs: Sequence[KeyedInput], sent: Sequence[Sent]) -> tuple[T.DataType, ...]:
    keyed = [
        one for one, given in zip(sent, inputs, strict=True) if given.distribution is Distribution.BY_KEY
    ]
    if not keyed:
        return ()
    first = keyed[0].transport.key_types
    for other in keyed[1:]:
        if other.transport.key_types != first:
            shown = [", ".join(k.simpleString() for k in one) for one in (first, other.transport.key_types)]
            raise GraphError(
                f"operator '{node.uid}' is keyed by ({shown[0]}) on one way and by ({shown[1]}) on another",
                why="a key is found by its hash, which is another one for another type",
                what_to_do="cast the keys to the same types",
                uid=node.uid,
            )
    return first


def _nullable(fields: T.StructType) -> T.StructType:
    """Return fields that may be null, as they are in the rows of other outputs and in control rows."""
    return T.StructType([T.StructField(field.name, field.dataType) for field in fields])


def _renamed(fields: T.StructType, number: int) -> T.StructType:
    """Return the fields of a side output under names that no other output has."""
    return T.StructType(
        [T.StructField(f"{C.SIDE}{number}_{at}", field.dataType) for at, field in enumerate(fields)]
    )


def _main_output(node: KeyedNode, schemas: Sequence[T.StructType], folded: Folded | None) -> T.StructType:
    if node.output is not None:
        return node.output
    if isinstance(node.function, Joining | Windows):
        found = node.function.output(*schemas)
        # What the fields of the inputs are called is known now only.
        check_field_names(found, f"the output of '{node.uid}'")
        return found
    return schemas[0] if folded is None else folded.output


def _with_times(node: KeyedNode, sent: Sequence[Sent]) -> bool:
    """Return whether rows that go out have event times.

    Raises
    ------
    GraphError
        A function gives them some, and there is no watermark by which they could count.
    """
    has_times, function = any(C.TIME in one.transport.schema.names for one in sent), node.function
    if not isinstance(function, VectorizedProcessFunction):
        return has_times
    if function.event_time is not None and not has_times:
        raise without_event_times(node.uid)
    return function.event_time is not None


def _operator(
    node: KeyedNode,
    schemas: Sequence[T.StructType],
    folded: Folded | None,
    read: Sequence[OutputTag],
    *,
    has_times: bool,
) -> StatefulOperator:
    function = node.function
    if folded is not None:
        return folded.operator
    assert not isinstance(function, ColumnFolding | FoldingWindows)
    if isinstance(function, KeyedProcessFunction):
        return KeyedProcessOperator(function)
    if isinstance(function, BroadcastFunctions):
        return function.create()
    if isinstance(function, Checkpointed):
        return function
    if isinstance(function, KeyedCoProcessFunction):
        return KeyedCoProcessOperator(function)
    if isinstance(function, VectorizedProcessFunction):
        return function
    if function.needs_event_time and not has_times:
        raise without_event_times(node.uid)
    if isinstance(function, Windows | Joining):
        for tag, schema in function.late_outputs(*schemas):
            # What is read by that name may be declared by another tag: both sides' may have one name.
            for declared in (tag, *(one for one in read if one.name == tag.name)):
                check_late_row(declared, schema, node.uid)
    return function.create(*schemas)
