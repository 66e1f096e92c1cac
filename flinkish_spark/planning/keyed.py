"""The plan of one keyed operator: route, transport, apply, restore."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupStateTimeout

from flinkish_spark.bridge.plans import name_operators, name_scan
from flinkish_spark.contracts.operators import OperatorFactory
from flinkish_spark.core.arrow_pass import map_in_arrow
from flinkish_spark.core.elements import OutputTag
from flinkish_spark.core.errors import GraphError
from flinkish_spark.functions.keyed import KeyedCoProcessFunction, KeyedProcessFunction
from flinkish_spark.operators.process import FilterRecords, KeyedProcessOperator
from flinkish_spark.operators.vectorized import VectorizedProcessFunction
from flinkish_spark.planning.between import SharedRows
from flinkish_spark.planning.declare import (
    check_late_output,
    check_same_fields,
)
from flinkish_spark.planning.factories import BroadcastFunctions, ColumnFolding, FoldingWindows
from flinkish_spark.planning.meaning import describe_meaning
from flinkish_spark.planning.sent_columns import (
    RENAME,
    FoldPlan,
    KeyedInput,
    SentColumns,
    find_sent_columns,
    make_transport,
    no_event_times,
)
from flinkish_spark.planning.sink_rows import TaggedStream
from flinkish_spark.planning.stream_graph import KeyedNode, SideNode
from flinkish_spark.planning.times import SourceMarkers, find_subtask
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.protocol.plan_layout import ScanRole
from flinkish_spark.protocol.restore import OperatorShape
from flinkish_spark.state.key_group import BasePolicy
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import (
    EMITTED,
    BlockPacker,
    BlockUnpacker,
    RouteCalls,
    TimeReport,
)
from flinkish_spark.transport.branches import INPUT, ControlRows, InputPacker, InputPackers
from flinkish_spark.transport.routes import ControlRoutes, InputRecords, RecordRoutes, RouteRows
from flinkish_spark.transport.routing import Distribution, Routing
from flinkish_spark.types.ddl import ddl_of, quote_name
from flinkish_spark.types.rows import ElementType, arrow_schema
from flinkish_spark.types.schemas import PREFIX, check_field_names, nullable
from flinkish_spark.worker.broadcast_runner import UnkeyedCheckpointedFunction
from flinkish_spark.worker.combiner import CombinerStep
from flinkish_spark.worker.keyed_operator import (
    KeyedOperator,
    KeyedOperatorSpec,
    PassThroughRows,
    SharedTasks,
    StatefulOperator,
)
from flinkish_spark.worker.runners import InputShape, RowShape

STATE_DDL = "value BINARY"
#: When a key group's entries move out of its state value; crash tests make it small.
BASE_POLICY = BasePolicy()


@dataclass(frozen=True)
class KeyedParts:
    node: KeyedNode
    #: Ordered by entry.
    inputs: tuple[KeyedInput, ...]
    #: Outputs of earlier operators that later operators read, in one frame with the inputs.
    passing: tuple[KeyedInput, ...]
    #: The operator's number as a reporter to the driver.
    number: int
    bundling: Bundling
    #: The side outputs that are read.
    sides: Sequence[SideNode]
    #: Key groups and their state, if the lineage begins with state for this operator.
    seed: DataFrame | None
    #: Latency markers of the sources that it reads directly, if latency is measured.
    markers: SourceMarkers | None
    #: Name in errors, beside the uid; empty if not set.
    name: str
    #: Identifies its share of the accumulators; empty in all chains but the first.
    counts_as: str
    #: Name of the chain in which it runs.
    chain: str


@dataclass(frozen=True, eq=False)
class _Operator:
    """A keyed operator before its rows are routed to it."""

    parts: KeyedParts
    routing: Routing
    #: Columns sent of its inputs, then of the streams that pass it.
    sent: tuple[SentColumns, ...]
    #: Fields of the main output, side outputs and passing streams, as named in the frame.
    outputs: tuple[T.StructType, ...]
    spec: KeyedOperatorSpec

    @property
    def has_broadcast(self) -> bool:
        return isinstance(self.parts.node.function, BroadcastFunctions)

    @property
    def timed(self) -> tuple[bool, ...]:
        shape = self.spec.shape
        return (*(shape.with_times for _ in shape.outputs), *(one.has_times for one in self.parts.passing))

    def add_seed(self, rows: DataFrame) -> DataFrame:
        """Add the seed's rows: each key group gets its state with the first micro-batch."""
        seed, routing = self.parts.seed, self.routing
        if seed is None:
            return rows
        # State of partitions goes to every partition, which takes its share: their number may have changed.
        group = F.col("key_group")
        own_route = F.array(F.element_at(_make_int_array(routing.of_group), group + 1))
        routes = F.when(group <= C.FIRST_PARTITION_GROUP, _make_int_array(routing.of_broadcast)).otherwise(
            own_route
        )
        states = seed.select(
            F.explode(routes).alias(C.ROUTE),
            F.lit(int(C.Kind.STATE)).alias(C.KIND),
            F.lit(0).cast("long").alias(C.CHECKPOINT),
            F.lit(C.STATE_CHANNEL).cast("long").alias(C.CHANNEL),
            group.cast("long").alias(C.SEQUENCE),
            F.col("value").alias(C.BLOCK),
        )
        return rows.unionByName(name_scan(states, ScanRole.SEED, self.parts.node.uid))

    def make_packer(self, number: int, given: KeyedInput, sent: SentColumns) -> BlockPacker:
        uid, counts_as, combine = self.parts.node.uid, self.parts.counts_as, None
        if sent.folded is not None and sent.folded.combiner is not None:
            own = f"{counts_as}/input {number}" if counts_as else ""
            combine = CombinerStep(uid, self.parts.bundling.key_groups, sent.folded.combiner, own)
        is_broadcast = given.distribution is Distribution.BROADCAST
        calls = None
        # A key group needs its partition's broadcast state first. A broadcast element may apply a function to
        # the keyed state of all key groups.
        if self.has_broadcast and given.distribution in (Distribution.BY_KEY, Distribution.BROADCAST):
            called = self.routing.of_bundle if is_broadcast else self.routing.of_broadcast
            calls = RouteCalls(self.parts.number, called)
        return BlockPacker(
            arrow_schema(sent.transport.schema),
            None if given.reports_as is None else TimeReport(given.reports_as, self.routing.of_barrier[0]),
            combine,
            number,
            copies=self.routing.of_broadcast if is_broadcast else (),
            calls=calls,
        )

    def make_control_routes(self) -> Column:
        """Return the routes of a control row: a barrier goes everywhere, a call to its key group."""
        kind, routing = F.col(C.KIND), self.routing
        is_own_call = (kind == int(C.Kind.WAKE)) & (F.col(C.CHANNEL) == self.parts.number)
        called = F.array(F.element_at(_make_int_array(routing.of_bundle), F.col(C.SEQUENCE).cast("int") + 1))
        if self.has_broadcast:
            called = F.concat(called, _make_int_array(routing.of_broadcast))
        routes = F.when(kind == int(C.Kind.BARRIER), _make_int_array(routing.of_barrier))
        same = F.get(_make_int_array(routing.of_barrier), find_subtask(F.col(C.CHANNEL)))
        routes = routes.when(kind == int(C.Kind.MARKER), F.array(same))
        # Reports to the driver, and calls of later operators, only pass: one partition is enough.
        return routes.when(is_own_call, called).otherwise(_make_int_array(routing.of_barrier[:1]))


def _route_rows(operators: Sequence[_Operator]) -> DataFrame:
    """Return the rows for operators that share tasks; a frame that several inputs read is scanned once.

    A packed record goes to its key group's route, and a barrier to every partition of the operators.
    """
    shares = [
        _InputShare(place, number, one, given, sent)
        for place, one in enumerate(operators)
        for number, (given, sent) in enumerate(
            zip((*one.parts.inputs, *one.parts.passing), one.sent, strict=True)
        )
    ]
    together: dict[int, list[_InputShare]] = {}
    for share in shares:
        together.setdefault(id(share.frame), []).append(share)
    frames = [_pack_inputs(own, is_alone=len(operators) == 1) for own in together.values()]
    apart = [share for share in shares if len(share.given.frames) == 2]
    if apart:
        # All source inputs share the control source's barrier rows; add them once.
        targets = [
            (one.make_control_routes(), [share.number for share in apart if share.operator is one])
            for one in dict.fromkeys(share.operator for share in apart)
        ]
        frames.append(name_scan(_route_control_rows(apart[0].given.frames[1], targets), ScanRole.BARRIERS))
    return reduce(DataFrame.unionByName, frames)


@dataclass(frozen=True)
class _InputShare:
    """One input of operators that share a frame; columns computed for it are named by its place."""

    #: The operator's place in its task group.
    place: int
    #: The input's number at its operator.
    number: int
    operator: _Operator
    given: KeyedInput
    sent: SentColumns

    @property
    def frame(self) -> DataFrame:
        return self.given.frames[0] if self.given.shared is None else self.given.shared.frame

    @property
    def _prefix(self) -> str:
        return f"{PREFIX}at{self.place}_{self.number}_"

    @property
    def _expressions(self) -> dict[str, str]:
        return {name: f"{self._prefix}{name}" for name, _ in self.sent.chosen.expressions}

    @property
    def names(self) -> dict[str, str]:
        """Map each column that is sent, except the hash, to its name in the frame."""
        shared = self.given.shared
        own = {} if shared is None else {known: name for name, known in shared.columns}
        own |= {} if shared is None else {C.SEQUENCE: shared.place}
        own |= self._expressions
        chosen = self.sent.chosen
        return {
            name: own.get(column, column)
            for name, column in zip(chosen.schema.names[1:], chosen.columns, strict=True)
        }

    def add_key_columns(self, frame: DataFrame) -> DataFrame:
        """Add columns with the keys that Spark computes; they are null in rows of other inputs."""
        chosen, shared = self.sent.chosen, self.given.shared
        if not chosen.expressions:
            return frame
        names = [F.col(quote_name(name)) for name in frame.columns]
        if shared is None:
            return frame.select(
                *names, *(key.alias(self._expressions[name]) for name, key in chosen.expressions)
            )
        is_own = _is_own(shared)
        added = (F.when(is_own, key).alias(self._expressions[name]) for name, key in chosen.expressions)
        return frame.select(*names, *shared.named).select(*names, *added)

    @property
    def record_routes(self) -> RecordRoutes:
        names, shared = self.names, self.given.shared
        return RecordRoutes(
            self.operator.routing,
            self.given.distribution,
            tuple(names[name] for name in self.sent.chosen.key_names),
            f"{self._prefix}{C.KEY_HASH}",
            f"{self._prefix}{C.ROUTE}",
            InputRecords() if shared is None else shared.own,
        )

    def deal_blocks(self, marks: Sequence[str], takes: ControlRows) -> InputPacker:
        packer = self.operator.make_packer(self.number, self.given, self.sent)
        names, routes = self.names, self.record_routes
        columns = (routes.hash_name, *names.values(), *marks)
        return InputPacker(routes.route_name, columns, (C.KEY_HASH, *names, *marks), packer, takes)


def _is_own(rows: SharedRows) -> Column:
    own, found = rows.own, F.col(rows.own.place or rows.place).isNotNull()
    for name, value in ((INPUT, own.number), (C.SIDE, own.side)):
        found = found if value is None else found & F.coalesce(F.col(name) == value, F.lit(False))
    return found & (F.col(C.KIND) == int(C.Kind.RECORD)) if C.KIND in rows.frame.columns else found


def _pack_inputs(shares: Sequence[_InputShare], *, is_alone: bool) -> DataFrame:
    """Return the blocks of inputs that share a frame, and the frame's control rows."""
    # A record may be for several inputs, with a different route for each; so routes are columns.
    frame, first = shares[0].frame, shares[0].place
    for one in shares:
        frame = one.add_key_columns(frame)
    marks = [C.MARK] if C.MARK in frame.columns else []
    has_control = C.KIND in frame.columns
    wanted = dict.fromkeys([*(C.CONTROL if has_control else ()), *marks])
    for one in shares:
        own = one.record_routes.own
        wanted |= dict.fromkeys([*one.names.values(), *own.columns])
    # After all expressions of the user, which may refer to columns by an alias.
    narrow = C.select_aliased(frame, [*wanted], lambda rows: _label_scan(rows, shares, is_alone=is_alone))
    operators = dict.fromkeys(one.operator for one in shares) if has_control else ()
    controls = (ControlRoutes(one.routing, one.parts.number, one.has_broadcast) for one in operators)
    route = RouteRows(
        tuple(one.record_routes for one in shares),
        tuple(controls),
        T.StructType([narrow.schema[name] for name in wanted]),
    )
    takes = [ControlRows.ALL] + [
        ControlRows.BARRIERS if one.place == first else ControlRows.NONE for one in shares[1:]
    ]
    deal = InputPackers(tuple(one.deal_blocks(marks, own) for one, own in zip(shares, takes, strict=True)))
    return map_in_arrow(map_in_arrow(narrow, route, route.columns), deal, deal.columns)


def _label_scan(frame: DataFrame, shares: Sequence[_InputShare], *, is_alone: bool) -> DataFrame:
    """Label the scan in a frame with the source's name and the chains of all readers."""
    named = [(one.operator.parts.chain, one.given.source) for one in shares]
    inputs = [(chain, name) for chain, name in named if name is not None]
    if not inputs:
        return frame
    # A scan for one operator alone may be in several chains.
    return name_scan(frame, ScanRole.RECORDS, inputs[0][1], () if is_alone and len(inputs) == 1 else inputs)


def _route_control_rows(barriers: DataFrame, targets: Sequence[tuple[Column, Sequence[int]]]) -> DataFrame:
    """Return control rows with routes; a barrier is repeated per input, whose number is its sequence."""
    arrays = []
    for routes, numbers in targets:
        inputs = F.array(*[F.lit(number).cast("long") for number in numbers])
        arrays.append(F.transform(routes, partial(_make_target, inputs)))
    exploded = barriers.select(F.explode(F.concat(*arrays)).alias("target"), *C.CONTROL)
    is_barrier = F.col(C.KIND) == int(C.Kind.BARRIER)
    sequences = F.when(is_barrier, F.col("target.inputs")).otherwise(F.array(F.col(C.SEQUENCE)))
    no_block = F.lit("").cast("binary").alias(C.BLOCK)
    routed = (F.col("target.route").alias(C.ROUTE), *C.CONTROL[:-1])
    return exploded.select(*routed, F.explode(sequences).alias(C.SEQUENCE), no_block)


def _make_target(inputs: Column, route: Column) -> Column:
    return F.struct(route.alias("route"), inputs.alias("inputs"))


def _make_int_array(values: Sequence[int]) -> Column:
    # One SQL text: a literal per key group would take thousands of calls into the JVM.
    return F.expr(f"array({', '.join(map(str, values))})")


def plan_operators(operators: Sequence[KeyedParts]) -> list[tuple[TaggedStream, OperatorShape]]:
    """Plan operators that share tasks, as one pass over one frame; return main output and shape of each."""
    found: list[_Operator] = []
    for place, parts in enumerate(operators):
        own = None if len(operators) == 1 else place
        found.append(_prepare_operator(parts, own, sum(len(one.outputs) for one in found)))
    rows = _route_rows(found)
    for one in found:
        rows = one.add_seed(rows)
        if one.parts.markers is not None:
            rows = rows.unionByName(one.parts.markers.route(one.routing.of_barrier))
    run = tuple(KeyedOperator(one.spec) for one in found)
    applied = rows.groupBy(C.ROUTE).applyInPandasWithState(
        run[0] if len(run) == 1 else SharedTasks(run),
        EMITTED,
        STATE_DDL,
        "append",
        GroupStateTimeout.NoTimeout,
    )
    timed = tuple(of_output for one in found for of_output in one.timed)
    fields = tuple(of_output for one in found for of_output in one.outputs)
    unpacker = BlockUnpacker(fields, timed)
    named = name_operators(applied, [one.parts.node.uid for one in found])
    frame = map_in_arrow(named, unpacker, unpacker.columns)
    outputs = tuple(tuple(of_output.names) for of_output in fields)
    made = []
    for one in found:
        node, shape = one.parts.node, one.spec.shape
        stream = TaggedStream(
            frame,
            shape.outputs[0],
            frozenset(range(one.parts.bundling.partitions)),
            outputs=outputs if len(outputs) > 1 else (),
            timed=timed,
            side=one.spec.first_output,
            by_workers=frame,
        )
        key_types = tuple(kind.simpleString() for kind in shape.key_types)
        made.append((stream, OperatorShape(node.max_parallelism, key_types, describe_meaning(node))))
    return made


def _prepare_operator(parts: KeyedParts, place: int | None, first_output: int) -> _Operator:
    """Prepare an operator; `place` is its place in its task group, None if it is alone."""
    node, routing = parts.node, Routing(parts.bundling, place or 0)
    sent = tuple(find_sent_columns(node, given) for given in parts.inputs)
    whole = [make_transport(node, given, ()) for given in parts.passing]
    passing = tuple(SentColumns(one, one) for one in whole)
    has_times = all(one.has_times for one in parts.inputs)
    operator, shape = make_operator_and_shape(node, parts.inputs, sent, parts.sides, has_times=has_times)
    # Functions use the declared names; in the frame each name must be unique.
    main, *own_sides = shape.outputs
    sides = (*own_sides, *(given.schema for given in parts.passing))
    first = nullable(main) if place is None else _rename_fields(main, first_output)
    outputs = (
        first,
        *(_rename_fields(fields, first_output + number) for number, fields in enumerate(sides, 1)),
    )
    spec = KeyedOperatorSpec(
        uid=node.uid,
        bundling=parts.bundling,
        operator=operator,
        shape=shape,
        upstream_channels=tuple(given.channels for given in (*parts.inputs, *parts.passing)),
        bundle_of_route={route: bundle for bundle, route in enumerate(routing.of_bundle)},
        barrier_routes={route: p for p, route in enumerate(routing.of_barrier)},
        broadcast_routes={route: p for p, route in enumerate(routing.of_broadcast)},
        origins=tuple(given.origins for given in parts.inputs),
        reporter=parts.number,
        base_policy=BASE_POLICY,
        name=parts.name,
        passing=tuple(
            PassThroughRows(
                arrow_schema(one.schema),
                tuple(name for name in (C.TIME, *one.field_names) if name in one.schema.names),
                number,
            )
            for number, one in enumerate(whole, start=len(shape.outputs))
        ),
        counts_as=parts.counts_as,
        chain=parts.chain,
        first_output=first_output,
    )
    return _Operator(parts, routing, (*sent, *passing), outputs, spec)


def make_operator_and_shape(
    node: KeyedNode,
    inputs: Sequence[KeyedInput],
    sent: Sequence[SentColumns],
    sides: Sequence[SideNode],
    *,
    has_times: bool,
) -> tuple[StatefulOperator, RowShape]:
    """Return the operator that workers run, and the shape of its rows; needs no Spark."""
    schemas = _find_schemas(node, inputs)
    main = _find_main_output(node, schemas, sent[0].folded)
    shape = RowShape(
        inputs=tuple(
            InputShape(
                schema=arrow_schema(one.transport.schema),
                fields=tuple(given.schema.names if one.folded is None else one.folded.fields),
                field_columns=one.transport.field_names,
                key_columns=one.transport.key_names,
                is_behind_operator=given.source is None,
                entry=given.entry,
                distribution=given.distribution,
            )
            for given, one in zip(inputs, sent, strict=True)
        ),
        key_types=_find_key_types(node, inputs, sent),
        outputs=(main, *(side.output for side in sides)),
        side_names=tuple(side.tag.name for side in sides),
        with_times=_emits_times(node, sent),
    )
    tags = [side.tag for side in sides]
    return _make_operator(node, schemas, sent[0].folded, tags, has_times=has_times), shape


def _find_schemas(node: KeyedNode, inputs: Sequence[KeyedInput]) -> list[T.StructType]:
    found: dict[int, T.StructType] = {}
    for given in inputs:
        check_same_fields(found.setdefault(given.entry, given.schema), given.schema, f"operator '{node.uid}'")
    return [found[entry] for entry in sorted(found)]


def _find_key_types(
    node: KeyedNode, inputs: Sequence[KeyedInput], sent: Sequence[SentColumns]
) -> tuple[T.DataType, ...]:
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
                f"operator '{node.uid}' is keyed by ({shown[0]}) on one path and by ({shown[1]}) on another",
                why="state is found by the hash of its key, which depends on the key's types",
                what_to_do="cast the keys to the same types",
            )
    return first


def _rename_fields(fields: T.StructType, number: int) -> T.StructType:
    return T.StructType(
        [T.StructField(f"{C.SIDE}{number}_{at}", field.dataType) for at, field in enumerate(fields)]
    )


def _find_main_output(
    node: KeyedNode, schemas: Sequence[T.StructType], folded: FoldPlan | None
) -> T.StructType:
    if node.output is not None:
        return node.output
    found = node.function.find_output(*schemas) if isinstance(node.function, OperatorFactory) else None
    if found is not None:
        # Names of the inputs' fields are known only now.
        check_field_names(found, f"the output of '{node.uid}'", RENAME)
        return found
    return schemas[0] if folded is None else folded.output


def _emits_times(node: KeyedNode, sent: Sequence[SentColumns]) -> bool:
    has_times, function = any(C.TIME in one.transport.schema.names for one in sent), node.function
    if not isinstance(function, VectorizedProcessFunction):
        return has_times
    if function.event_time is not None and not has_times:
        raise no_event_times(node.uid)
    return function.event_time is not None


def _make_operator(
    node: KeyedNode,
    schemas: Sequence[T.StructType],
    folded: FoldPlan | None,
    read: Sequence[OutputTag],
    *,
    has_times: bool,
) -> StatefulOperator:
    function = node.function
    if folded is not None:
        return folded.operator
    assert not isinstance(function, ColumnFolding | FoldingWindows)
    if isinstance(function, FilterRecords):
        function = copy.copy(function)
        function.take = ElementType(ddl_of(schemas[0])).take
    if isinstance(function, KeyedProcessFunction | KeyedCoProcessFunction):
        return KeyedProcessOperator(function)
    if isinstance(function, BroadcastFunctions):
        return function.create()
    if isinstance(function, UnkeyedCheckpointedFunction | VectorizedProcessFunction):
        return function
    if function.needs_event_time and not has_times:
        raise no_event_times(node.uid)
    for tag, schema in function.find_late_outputs(*schemas):
        # Two tags of one name may be declared: one for each side of a join.
        for declared in (tag, *(one for one in read if one.name == tag.name)):
            check_late_output(declared, schema, node.uid, types_may_differ=True)
    return function.create(*schemas)
