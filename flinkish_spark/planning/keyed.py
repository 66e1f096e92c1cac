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
from flinkish_spark.planning.factories import (
    BroadcastFunctions,
    ChangelogFolding,
    ColumnFolding,
    FoldingWindows,
    Joining,
    Patterns,
    RowPatterns,
    Windows,
)
from flinkish_spark.planning.meaning import meaning_of
from flinkish_spark.planning.sent_columns import (
    RENAME,
    Folded,
    KeyedInput,
    Sent,
    columns_sent,
    transport_of,
    without_event_times,
)
from flinkish_spark.planning.sink_rows import TaggedStream
from flinkish_spark.planning.stream_graph import KeyedNode, SideNode
from flinkish_spark.planning.times import SourceMarkers, subtask_in
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.protocol.plan_layout import ScanRole
from flinkish_spark.protocol.savepoints import OperatorShape
from flinkish_spark.state.key_group import BasePolicy
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import (
    EMITTED,
    BlockPacker,
    BlockUnpacker,
    Calls,
    TimeReport,
)
from flinkish_spark.transport.branches import INPUT, DealBlocks, DealtBlocks, Takes
from flinkish_spark.transport.routes import ControlRoutes, OwnRows, RecordRoutes, RouteRows
from flinkish_spark.transport.routing import Distribution, Routing
from flinkish_spark.types.ddl import ddl_of, quoted
from flinkish_spark.types.rows import ElementType, arrow_schema
from flinkish_spark.types.schemas import PREFIX, check_field_names, nullable
from flinkish_spark.worker.broadcast_runner import Checkpointed
from flinkish_spark.worker.combiner import BlamedCombine
from flinkish_spark.worker.keyed_operator import (
    KeyedOperator,
    KeyedOperatorSpec,
    PassingRows,
    SharedTasks,
    StatefulOperator,
)
from flinkish_spark.worker.runners import InputShape, RowShape

STATE_DDL = "value BINARY"
#: When a key group's entries move out of its state value; tests that crash jobs make it small.
BASE_POLICY = BasePolicy()


@dataclass(frozen=True)
class KeyedParts:
    """The parts of a keyed operator's plan."""

    node: KeyedNode
    #: In their order, by entry.
    inputs: tuple[KeyedInput, ...]
    #: Outputs of operators in front, in one frame with the inputs, that those behind this one read.
    passing: tuple[KeyedInput, ...]
    #: The operator's among those who report to the driver.
    number: int
    bundling: Bundling
    #: The side outputs that are read.
    sides: Sequence[SideNode]
    #: Key groups and their state, if the lineage begins with state of this operator.
    seed: DataFrame | None
    #: Of the sources that it reads itself, if latency is measured; those of others come with the rows.
    markers: SourceMarkers | None
    #: What errors call it beside its uid; empty if nobody has said one.
    name: str
    #: Tells what it adds to accumulators from what others add; empty in all chains but the first.
    counts_as: str
    #: Name of the chain in which it runs.
    chain: str


@dataclass(frozen=True, eq=False)
class _Operator:
    """A keyed operator before its rows are brought to it."""

    parts: KeyedParts
    routing: Routing
    #: What travels of its inputs, and behind them of what passes it.
    sent: tuple[Sent, ...]
    #: Fields of the main output, of side outputs, and of what passes, as they stand in the frame.
    outputs: tuple[T.StructType, ...]
    spec: KeyedOperatorSpec

    @property
    def has_broadcast(self) -> bool:
        return isinstance(self.parts.node.function, BroadcastFunctions)

    @property
    def timed(self) -> tuple[bool, ...]:
        """Return whether rows of each output have event times."""
        shape = self.spec.shape
        return (*(shape.with_times for _ in shape.outputs), *(one.has_times for one in self.parts.passing))

    def with_seed(self, rows: DataFrame) -> DataFrame:
        """Send each key group its state, which the first micro-batch brings."""
        seed, routing = self.parts.seed, self.routing
        if seed is None:
            return rows
        # What partitions keep beside their key groups goes to every partition, which chooses: there may be
        # another number of them.
        group = F.col("key_group")
        own_route = F.array(F.element_at(_int_array(routing.of_group), group + 1))
        routes = F.when(group <= C.FIRST_PARTITION_GROUP, _int_array(routing.of_broadcast)).otherwise(
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

    def packer(self, number: int, given: KeyedInput, sent: Sent) -> BlockPacker:
        uid, counts_as, combine = self.parts.node.uid, self.parts.counts_as, None
        if sent.folded is not None and sent.folded.combiner is not None:
            own = f"{counts_as}/input {number}" if counts_as else ""
            combine = BlamedCombine(uid, self.parts.bundling.key_groups, sent.folded.combiner, own)
        is_broadcast = given.distribution is Distribution.BROADCAST
        calls = None
        # A key group needs that of its partition before it. What a broadcast element wants done with keyed
        # state concerns all key groups.
        if self.has_broadcast and given.distribution in (Distribution.BY_KEY, Distribution.BROADCAST):
            called = self.routing.of_bundle if is_broadcast else self.routing.of_broadcast
            calls = Calls(self.parts.number, called)
        return BlockPacker(
            arrow_schema(sent.transport.schema),
            None if given.reports_as is None else TimeReport(given.reports_as, self.routing.of_barrier[0]),
            combine,
            number,
            copies=self.routing.of_broadcast if is_broadcast else (),
            calls=calls,
        )

    def control_routes(self) -> Column:
        """Return the routes of a control row: a barrier goes everywhere, a call to its key group."""
        kind, routing = F.col(C.KIND), self.routing
        is_own_call = (kind == int(C.Kind.WAKE)) & (F.col(C.CHANNEL) == self.parts.number)
        called = F.array(F.element_at(_int_array(routing.of_bundle), F.col(C.SEQUENCE).cast("int") + 1))
        if self.has_broadcast:
            called = F.concat(called, _int_array(routing.of_broadcast))
        routes = F.when(kind == int(C.Kind.BARRIER), _int_array(routing.of_barrier))
        same = F.get(_int_array(routing.of_barrier), subtask_in(F.col(C.CHANNEL)))
        routes = routes.when(kind == int(C.Kind.MARKER), F.array(same))
        # Reports to the driver, and calls of operators behind this one, only pass by: one partition will do.
        return routes.when(is_own_call, called).otherwise(_int_array(routing.of_barrier[:1]))


def _rows_of(operators: Sequence[_Operator]) -> DataFrame:
    """Send rows into operators that share tasks; what several inputs of them read is scanned once.

    A packed record goes to its key group's route, and a barrier to every partition of the operators.
    """
    shares = [
        _Share(place, number, one, given, sent)
        for place, one in enumerate(operators)
        for number, (given, sent) in enumerate(
            zip((*one.parts.inputs, *one.parts.passing), one.sent, strict=True)
        )
    ]
    together: dict[int, list[_Share]] = {}
    for share in shares:
        together.setdefault(id(share.frame), []).append(share)
    frames = [_packed(own, is_alone=len(operators) == 1) for own in together.values()]
    apart = [share for share in shares if len(share.given.frames) == 2]
    if apart:
        # Of a control source there is one frame, whichever input has it.
        targets = [
            (one.control_routes(), [share.number for share in apart if share.operator is one])
            for one in dict.fromkeys(share.operator for share in apart)
        ]
        frames.append(name_scan(_spread(apart[0].given.frames[1], targets), ScanRole.BARRIERS))
    return reduce(DataFrame.unionByName, frames)


@dataclass(frozen=True)
class _Share:
    """One input of operators that share a frame; what is computed for it has its place in the name."""

    #: Of the operator among those that share tasks.
    place: int
    #: Of the input among the operator's.
    number: int
    operator: _Operator
    given: KeyedInput
    sent: Sent

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
        """Map each column that travels, but the hash, to its name in the frame."""
        shared = self.given.shared
        own = {} if shared is None else {known: name for name, known in shared.columns}
        own |= {} if shared is None else {C.SEQUENCE: shared.place}
        own |= self._expressions
        chosen = self.sent.chosen
        return {
            name: own.get(column, column)
            for name, column in zip(chosen.schema.names[1:], chosen.columns, strict=True)
        }

    def with_expressions(self, frame: DataFrame) -> DataFrame:
        """Return the frame with the keys that Spark computes, null in rows of others."""
        chosen, shared = self.sent.chosen, self.given.shared
        if not chosen.expressions:
            return frame
        names = [F.col(quoted(name)) for name in frame.columns]
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
            OwnRows() if shared is None else shared.own,
        )

    def dealt(self, marks: Sequence[str], takes: Takes) -> DealtBlocks:
        packer = self.operator.packer(self.number, self.given, self.sent)
        names, routes = self.names, self.record_routes
        columns = (routes.hash_name, *names.values(), *marks)
        return DealtBlocks(routes.route_name, columns, (C.KEY_HASH, *names, *marks), packer, takes)


def _is_own(rows: SharedRows) -> Column:
    own, found = rows.own, F.col(rows.own.place or rows.place).isNotNull()
    for name, value in ((INPUT, own.number), (C.SIDE, own.side)):
        found = found if value is None else found & F.coalesce(F.col(name) == value, F.lit(False))
    return found & (F.col(C.KIND) == int(C.Kind.RECORD)) if C.KIND in rows.frame.columns else found


def _packed(shares: Sequence[_Share], *, is_alone: bool) -> DataFrame:
    """Return the blocks of inputs whose rows stand in one frame, and the control rows between them."""
    # A record may be for several, with another route to each; so its routes are among the columns.
    frame, first = shares[0].frame, shares[0].place
    for one in shares:
        frame = one.with_expressions(frame)
    marks = [C.MARK] if C.MARK in frame.columns else []
    has_control = C.KIND in frame.columns
    wanted = dict.fromkeys([*(C.CONTROL if has_control else ()), *marks])
    for one in shares:
        own = one.record_routes.own
        wanted |= dict.fromkeys([*one.names.values(), *own.columns])
    # Behind all expressions of the user's, which might know the columns by an alias.
    narrow = C.behind_select(frame, [*wanted], lambda rows: _scan_of(rows, shares, is_alone=is_alone))
    operators = dict.fromkeys(one.operator for one in shares) if has_control else ()
    controls = (ControlRoutes(one.routing, one.parts.number, one.has_broadcast) for one in operators)
    route = RouteRows(
        tuple(one.record_routes for one in shares),
        tuple(controls),
        T.StructType([narrow.schema[name] for name in wanted]),
    )
    takes = [Takes.ALL] + [Takes.BARRIERS if one.place == first else Takes.NONE for one in shares[1:]]
    deal = DealBlocks(tuple(one.dealt(marks, own) for one, own in zip(shares, takes, strict=True)))
    return C.map_in_arrow(C.map_in_arrow(narrow, route, route.columns), deal, deal.columns)


def _scan_of(frame: DataFrame, shares: Sequence[_Share], *, is_alone: bool) -> DataFrame:
    """Return a frame so that the source in it is known by its name, and by the chains of all who read it."""
    named = [(one.operator.parts.chain, one.given.source) for one in shares]
    inputs = [(chain, name) for chain, name in named if name is not None]
    if not inputs:
        return frame
    # What is read for one operator alone may stand in several chains.
    return name_scan(frame, ScanRole.RECORDS, inputs[0][1], () if is_alone and len(inputs) == 1 else inputs)


def _spread(barriers: DataFrame, targets: Sequence[tuple[Column, Sequence[int]]]) -> DataFrame:
    """Return control rows with their routes; a barrier once for each input, which its sequence says."""
    arrays = []
    for routes, numbers in targets:
        inputs = F.array(*[F.lit(number).cast("long") for number in numbers])
        arrays.append(F.transform(routes, partial(_target, inputs)))
    exploded = barriers.select(F.explode(F.concat(*arrays)).alias("target"), *C.CONTROL)
    is_barrier = F.col(C.KIND) == int(C.Kind.BARRIER)
    sequences = F.when(is_barrier, F.col("target.inputs")).otherwise(F.array(F.col(C.SEQUENCE)))
    no_block = F.lit("").cast("binary").alias(C.BLOCK)
    routed = (F.col("target.route").alias(C.ROUTE), *C.CONTROL[:-1])
    return exploded.select(*routed, F.explode(sequences).alias(C.SEQUENCE), no_block)


def _target(inputs: Column, route: Column) -> Column:
    return F.struct(route.alias("route"), inputs.alias("inputs"))


def _int_array(values: Sequence[int]) -> Column:
    # One text for Spark's parser: a literal for each key group would take some thousand calls into the JVM.
    return F.expr(f"array({', '.join(map(str, values))})")


def plan_operators(operators: Sequence[KeyedParts]) -> list[tuple[TaggedStream, OperatorShape]]:
    """Plan operators that share tasks: one pass over one frame, with the outputs of each, main ones first."""
    found: list[_Operator] = []
    for place, parts in enumerate(operators):
        own = None if len(operators) == 1 else place
        found.append(_operator_of(parts, own, sum(len(one.outputs) for one in found)))
    rows = _rows_of(found)
    for one in found:
        rows = one.with_seed(rows)
        if one.parts.markers is not None:
            rows = rows.unionByName(one.parts.markers.routed(one.routing.of_barrier))
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
    frame = C.map_in_arrow(named, unpacker, unpacker.columns)
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
        made.append((stream, OperatorShape(node.max_parallelism, key_types, meaning_of(node))))
    return made


def _operator_of(parts: KeyedParts, place: int | None, first_output: int) -> _Operator:
    """Return what is known of an operator; `place` is that among those that share tasks with it."""
    node, routing = parts.node, Routing(parts.bundling, place or 0)
    sent = tuple(columns_sent(node, given) for given in parts.inputs)
    whole = [transport_of(node, given, ()) for given in parts.passing]
    passing = tuple(Sent(one, one) for one in whole)
    has_times = all(one.has_times for one in parts.inputs)
    operator, shape = operator_and_shape(node, parts.inputs, sent, parts.sides, has_times=has_times)
    # Functions know the names that were declared; in the frame no name may be there twice.
    main, *own_sides = shape.outputs
    sides = (*own_sides, *(given.schema for given in parts.passing))
    first = nullable(main) if place is None else _renamed(main, first_output)
    outputs = (first, *(_renamed(fields, first_output + number) for number, fields in enumerate(sides, 1)))
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
            PassingRows(
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


def operator_and_shape(
    node: KeyedNode,
    inputs: Sequence[KeyedInput],
    sent: Sequence[Sent],
    sides: Sequence[SideNode],
    *,
    has_times: bool,
) -> tuple[StatefulOperator, RowShape]:
    """Return what runs in the workers, and how rows come and go there; needs no Spark."""
    schemas = _schemas(node, inputs)
    main = _main_output(node, schemas, sent[0].folded)
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
        key_types=_key_types(node, inputs, sent),
        outputs=(main, *(side.output for side in sides)),
        side_names=tuple(side.tag.name for side in sides),
        with_times=_with_times(node, sent),
    )
    tags = [side.tag for side in sides]
    return _operator(node, schemas, sent[0].folded, tags, has_times=has_times), shape


def _schemas(node: KeyedNode, inputs: Sequence[KeyedInput]) -> list[T.StructType]:
    """Return the fields of each entry; all paths into one entry have the same."""
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


def _renamed(fields: T.StructType, number: int) -> T.StructType:
    return T.StructType(
        [T.StructField(f"{C.SIDE}{number}_{at}", field.dataType) for at, field in enumerate(fields)]
    )


def _main_output(node: KeyedNode, schemas: Sequence[T.StructType], folded: Folded | None) -> T.StructType:
    if node.output is not None:
        return node.output
    if isinstance(node.function, ChangelogFolding | Joining | Windows | Patterns | RowPatterns):
        found = node.function.output(*schemas)
        # What the fields of the inputs are called is known now only.
        check_field_names(found, f"the output of '{node.uid}'", RENAME)
        return found
    return schemas[0] if folded is None else folded.output


def _with_times(node: KeyedNode, sent: Sequence[Sent]) -> bool:
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
    if isinstance(function, FilterRecords):
        function = copy.copy(function)
        function.take = ElementType(ddl_of(schemas[0])).take
    if isinstance(function, KeyedProcessFunction | KeyedCoProcessFunction):
        return KeyedProcessOperator(function)
    if isinstance(function, BroadcastFunctions):
        return function.create()
    if isinstance(function, Checkpointed | VectorizedProcessFunction):
        return function
    if function.needs_event_time and not has_times:
        raise without_event_times(node.uid)
    if isinstance(function, Windows | Joining | Patterns | RowPatterns):
        for tag, schema in function.late_outputs(*schemas):
            # What is read by that name may be declared by another tag: both sides' may have one name.
            for declared in (tag, *(one for one in read if one.name == tag.name)):
                check_late_output(declared, schema, node.uid, types_may_differ=True)
    return function.create(*schemas)
