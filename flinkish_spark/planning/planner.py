"""From the stream graph to one streaming DataFrame."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.plans import calls_python, named_chain, named_scan
from flinkish_spark.bridge.session import why_no_resources
from flinkish_spark.connectors.control_source import load_control
from flinkish_spark.contracts.source import NO_JOB, JobPlace, Source, SourceNode, SourceStart
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.operators.recorded_answers import Stream
from flinkish_spark.planning.async_calls import (
    NO_PLACE,
    AsyncCalls,
    AsyncPlace,
    async_evaluations,
    shared_from,
)
from flinkish_spark.planning.between import (
    Branch,
    BranchRows,
    MustStandApart,
    RecordStream,
    behind_frames,
    branch_rows,
    check_said_between,
    functions_between,
    is_read_plainly,
    is_set_apart,
    shared_inputs,
    stems,
    transform_records,
    with_times,
)
from flinkish_spark.planning.declare import KeyPart, check_same_fields, with_computed_keys, with_keys_of_all
from flinkish_spark.planning.keyed import KeyedInput, KeyedParts, plan_keyed, plan_shared
from flinkish_spark.planning.meaning import meaning_of
from flinkish_spark.planning.partitioning import (
    ByPartitioner,
    LocatedTransform,
    Spread,
    shuffle_partitions,
)
from flinkish_spark.planning.seed_source import load_seed
from flinkish_spark.planning.sink_rows import (
    PlannedJob,
    PlannedSink,
    SinkPart,
    TaggedStream,
    fields_in,
    functions_before_sink,
    tag,
)
from flinkish_spark.planning.stream_graph import (
    Base,
    Feed,
    Inlet,
    KeyedEntry,
    KeyedNode,
    KeyFunction,
    Leg,
    SideNode,
    Step,
    StreamGraph,
    StreamNode,
    TransformNode,
    feeds,
    has_ways_that_meet,
    legs,
    operator_of,
    operator_scans,
    operators_upto,
    scans_of,
)
from flinkish_spark.planning.times import (
    NO_MARKING,
    LatencyMarking,
    NoMarking,
    chain_of,
    chains_to,
    ends_with,
    plan_times,
    reporters,
    sharing_tasks,
)
from flinkish_spark.planning.transforms import LookupTransform, RowTransform, Spoiler, transformed
from flinkish_spark.protocol.alignment import Announced
from flinkish_spark.protocol.key_groups import BUNDLES_PER_PARTITION, Bundling
from flinkish_spark.protocol.plan_layout import Chain, PlanLayout, ScanRole
from flinkish_spark.protocol.savepoints import OperatorShape, SeededChain
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.columns import Origins
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.types.ddl import quoted
from flinkish_spark.types.schemas import check_field_names

if TYPE_CHECKING:
    from flinkish_spark.protocol.savepoints import Seed


_NOWHERE = StoreSpec("/")


@dataclass(frozen=True)
class Beginning:
    """The seed of the live lineage, for as long as that lives."""

    # Spark logs offsets by the order of sources, so the plan has the same seeds in it long after their state
    # was read.

    #: None for a lineage that began with nothing.
    seed: Seed | None = None
    #: Where the seed lies; means nothing without one.
    folder: StoreSpec = _NOWHERE

    def label(self, chain: Chain) -> str:
        begins = self._of(chain)
        return "" if begins is None else _digest([dict(begins.positions), dict(begins.states)])

    def label_of_input(self, chain: Chain, name: str) -> str:
        begins = self._of(chain)
        return "" if begins is None or name not in begins.positions else _digest(begins.positions[name])

    def positioned(self, node: SourceNode, chain: Chain, name: str) -> Source:
        begins = self._of(chain)
        if begins is None or name not in begins.positions:
            return node.source
        label = _digest(begins.positions[name])
        folder = self.folder.below(f"begin/{node.uid}-{label}").to_text()
        return node.source.starting_at(SourceStart(begins.positions[name], folder, label))

    def state_of(self, spark: SparkSession, operator: str, chain: Chain) -> DataFrame | None:
        begins = self._of(chain)
        if begins is None or operator not in begins.states:
            return None
        return load_seed(spark, self.folder, operator, chain.name)

    def _of(self, chain: Chain) -> SeededChain | None:
        return None if self.seed is None else self.seed.chain(chain.name)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


#     sources -> stateless transforms -> union with the barriers -> keyed operators
#             -> tagged union of every stream that a sink reads
#
# A barrier is one row of the control source; a keyed operator turns it into one per shuffle partition.
# Transforms in front of a keyed operator are part of the streaming plan and see records only. Those between
# two keyed operators are part of it, too, and control rows pass them by. Those behind the last one run on
# the evaluated micro-batch, because splitting the operator's output in the plan would run the operator
# twice.

#: A lineage that no seed was made for.
NOTHING = Beginning()
#: The control source has one channel.
SOURCE_CHANNELS = frozenset({0})


PlannedStream = RecordStream | TaggedStream
#: Where a stream is in the plan: what it begins with, its steps, how its chain begins, and as which inputs.
_Place = tuple[int, tuple[int, ...], str, tuple[str, ...], tuple[bool, ...], bool]


@dataclass(frozen=True)
class _Base:
    """A part of the tagged union: the end of a chain."""

    chain: Chain
    stream: TaggedStream


@dataclass(frozen=True)
class _Sharer:
    node: KeyedNode
    chain: Chain
    #: Its inputs in their order, and the names of their scans.
    ways: tuple[tuple[Feed, str], ...]
    #: Among those that share tasks, in the live log; if that begins now, the order of the program counts.
    place: int


@dataclass(frozen=True, eq=False)
class _Reader:
    #: The operator's place among those that share tasks.
    place: int
    #: Of the operator's input.
    number: int
    uid: str
    entry: KeyedEntry
    #: The way to it, and as which input of which chain.
    leg: Leg
    chain: Chain
    name: str


class Planner:
    """Plans each node once, however many sinks read it."""

    def __init__(
        self,
        spark: SparkSession,
        place: JobPlace,
        partitions: int,
        beginning: Beginning = NOTHING,
        graph: StreamGraph | None = None,
        marking: LatencyMarking | NoMarking = NO_MARKING,
        calls: AsyncPlace = NO_PLACE,
        bundles_per_partition: int = BUNDLES_PER_PARTITION,
        recorded: PlanLayout | None = None,
    ) -> None:
        self._spark, self._bundles_per_partition = spark, bundles_per_partition
        self._beginning, self._marking = beginning, marking
        self._place = place
        self._partitions = partitions
        self._has_one_source = False
        self._planned: dict[_Place, PlannedStream] = {}
        self._operators: dict[str, OperatorShape] = {}
        self._read: dict[str, T.StructType] = {}
        #: By function or operator, the node and the chain in which it counts; it may stand in several.
        self._counting: dict[object, tuple[object, Chain]] = {}
        #: Numbers of steps, by identity, in the order in which they were met.
        self._steps: dict[int, int] = {}
        self._graph = graph or StreamGraph()
        self._async_place = calls
        self._calls = AsyncCalls((), calls)
        self._recorded = recorded
        #: By chain the plan of an operator that shares tasks with others.
        self._shared: dict[str, TaggedStream] = {}
        #: By chain the plans of what is read behind its operators, where these stand one behind the other.
        self._lines: dict[str, Mapping[int, TaggedStream]] = {}
        #: The uids of operators that share tasks.
        self._groups: list[tuple[str, ...]] = []
        #: The ways that are branches of one scan, by operator and input.
        self._branches: list[tuple[tuple[str, str], ...]] = []

    @cached_property
    def _barriers(self) -> DataFrame:
        return load_control(self._spark, self._place.control_path).select(*C.CONTROL)

    def _load_barriers(self) -> DataFrame:
        return self._barriers

    def plan(self, graph: StreamGraph) -> PlannedJob:
        check_said_between(graph, self._partitions)
        self._graph = graph
        self._has_one_source = _has_one_source(graph)
        self._calls = AsyncCalls(
            async_evaluations(graph, lambda node: chains_to(graph, node)), self._async_place
        )
        self._share_tasks()
        number_of_reporters = len(reporters(graph))
        bases: list[_Base] = []
        sinks: list[PlannedSink] = []
        for node in graph.sinks:
            ends = chains_to(graph, node.parent)
            parts = [self._part(bases, self._united(chain, ways, node.uid), chain) for chain, ways in ends]
            schema = parts[0][1]
            for _, other in parts[1:]:
                check_same_fields(schema, other, f"the sink '{node.uid}'")
            own = tuple(part for part, _ in parts)
            sinks.append(PlannedSink(node.uid, node.sink, schema, own, number_of_reporters))
        peers = [sink for node in graph.sinks for _, sink in node.sink.parts(node.uid)]
        for source in graph.sources:
            for uid in source.source.side_uids(source.uid):
                chain = Chain((source.uid,), (), (uid,))
                moved = self._beginning.positioned(source, chain, source.uid)
                for side in moved.side_outputs(self._spark, source.uid, self._place, peers):
                    letters = RecordStream(
                        source.uid, side.frame, Origins(), self._load_barriers, SOURCE_CHANNELS
                    )
                    marked = self._marking.beside(self._with_barriers([letters]), graph, [source.uid])
                    part, schema = self._part(bases, marked, chain)
                    sinks.append(PlannedSink(side.uid, side.sink, schema, (part,), number_of_reporters))
        union: DataFrame | None = None
        asked = {part.stream for sink in sinks for part in sink.parts if part.has_async}
        for index, base in enumerate(bases):
            shown = [at for at, other in enumerate(bases) if other.stream.frame is base.stream.frame]
            if index != shown[0]:
                continue
            beside = [C.SEQUENCE] if asked.intersection(shown) else []
            tagged = tag(base.stream, index, beside, self._by_side(bases, shown))
            named = named_chain(tagged, base.chain)
            union = named if union is None else union.unionByName(named, allowMissingColumns=True)
        assert union is not None
        time = plan_times(graph, lambda leg, chain, name: self.stream(leg, chain, (name,)))
        per_partition = self._bundles_per_partition
        bundlings = {
            uid: Bundling(shape.max_parallelism, self._partitions, per_partition)
            for uid, shape in self._operators.items()
        }
        time = replace(time, bundlings=bundlings)
        chains, recordings = tuple(base.chain for base in bases), self._calls.recordings
        shared, branches = tuple(self._groups), tuple(self._branches)
        return PlannedJob(
            union,
            tuple(sinks),
            chains,
            self._operators,
            time,
            recordings,
            shared,
            branches,
            read=self._read,
        )

    def stream(
        self, leg: Leg, chain: Chain, names: tuple[str, ...], *, may_be_marked: bool = True
    ) -> PlannedStream:
        """Return a stream of the plan; a source's control rows are among its records where they may be."""
        if may_be_marked and self._has_one_source:
            try:
                return self._stream(leg, chain, names, marked=True)
            except MustStandApart:
                # A source whose records and control rows are taken apart would be read twice.
                pass
        return self._stream(leg, chain, names, marked=False)

    def _read_by(
        self, entries: Sequence[KeyedEntry], leg: Leg, chain: Chain, names: tuple[str, ...]
    ) -> PlannedStream:
        """Return a source's stream as operators read it: keys that call Python must not see control rows."""
        stream = self.stream(leg, chain, names)
        keys = [key for entry in entries for key in entry.keys if isinstance(key, Column)]
        is_marked = isinstance(stream, RecordStream) and stream.is_marked
        if is_marked and any(calls_python(stream.frame, key) for key in keys):
            return self.stream(leg, chain, names, may_be_marked=False)
        return stream

    def _stream(self, leg: Leg, chain: Chain, names: tuple[str, ...], *, marked: bool) -> PlannedStream:
        steps = tuple(map(id, leg.steps))
        if isinstance(leg.base, SourceNode) and self._may_share:
            label = self._beginning.label_of_input(chain, *names)
        else:
            label = self._beginning.label(chain)
        known = id(leg.base), steps, label, names, self._counting_on(leg, chain), marked
        if known not in self._planned:
            self._planned[known] = self._plan_leg(leg, chain, names, marked=marked)
        return self._planned[known]

    def _plan_leg(self, leg: Leg, chain: Chain, names: tuple[str, ...], *, marked: bool) -> PlannedStream:
        if not leg.steps:
            return self._plan_base(leg.base, chain, names, marked=marked)
        *before, step = leg.steps
        parent = self._stream(Leg(leg.base, tuple(before)), chain, names, marked=marked)
        if is_set_apart(self._graph, leg.steps):
            parent = _spread(parent)
        if isinstance(step, TransformNode):
            function = self._function(step, leg, chain, names, parent)
            if isinstance(parent, TaggedStream):
                return replace(parent, transforms=(*parent.transforms, function))
            return transform_records(parent, function)
        assert isinstance(parent, RecordStream), "refused where it was declared"
        return with_times(parent, step.strategy)

    def _function(
        self, step: TransformNode, leg: Leg, chain: Chain, names: tuple[str, ...], parent: PlannedStream
    ) -> Any:
        self._check_resources(step)
        counted = self._counted(step, chain, (*names, *self._way(leg))).function
        function = self._calls.on_way(counted, leg, _stream_of(parent))
        if isinstance(parent, RecordStream) and isinstance(function, LocatedTransform):
            return function.located(parent.origins)
        return function

    def _check_resources(self, step: TransformNode) -> None:
        function: object = step.function
        if not isinstance(function, RowTransform | LookupTransform) or function.settings.resources is None:
            return
        settings = function.settings
        why = why_no_resources(self._spark, function.settings.resources)
        if why:
            raise ConfigError(
                f"set_resources() was called on '{settings.name}', and this Spark has no resources for it",
                why=why,
                what_to_do="leave it out, and say spark.task.cpus and spark.executor.* for the whole job; or "
                "run it on a standalone cluster, YARN or Kubernetes",
            )

    def _counts(self, known_as: object, node: object, chain: Chain) -> bool:
        first, where = self._counting.setdefault(known_as, (node, chain))
        return first is node and where == chain

    def _counting_on(self, leg: Leg, chain: Chain) -> tuple[bool, ...]:
        """Return what counts of all that a way in a chain has: ways that differ in it are planned apart."""
        functions = [(_counted_as(step), step) for step in leg.steps]
        operators = [(node.uid, node) for node in _operators_below(leg.base)]
        return tuple(
            self._counts(known_as, node, chain)
            for known_as, node in [*operators, *functions]
            if known_as is not None
        )

    def _counted(self, step: TransformNode, chain: Chain, way: tuple[str, ...]) -> TransformNode:
        """Return a step whose function knows as what it counts, if it does; `way` tells its ways apart."""
        function, known_as = step.function, _counted_as(step)
        if known_as is None or not self._counts(known_as, step, chain):
            return step
        number = list(self._counting).index(known_as)
        counts_as = f"function {number:04}/{chain.name}/{','.join(way)}"
        if isinstance(function, RowTransform):
            row = replace(function.function, counts_as=counts_as)
            return TransformNode(step.parent, replace(function, function=row))
        assert isinstance(function, LookupTransform | ByPartitioner)
        return TransformNode(step.parent, replace(function, counts_as=counts_as))

    def _with_counted_keys(self, node: KeyedNode, chain: Chain, of: str) -> KeyedNode:
        if not self._counts(node.uid, node, chain):
            return node
        entries = []
        for at, entry in enumerate(node.entries):
            counts_as = f"{node.uid}/{chain.name}/keys {at} {of}"
            keys = (
                replace(key, counts_as=counts_as) if isinstance(key, KeyFunction) else key
                for key in entry.keys
            )
            entries.append(replace(entry, keys=tuple(keys)))
        return replace(node, entries=tuple(entries))

    def _way(self, leg: Leg) -> tuple[str, ...]:
        steps = [str(self._steps.setdefault(id(step), len(self._steps))) for step in leg.steps]
        return _named(leg.base), ".".join(steps)

    def _counted_between(self, feed: Feed, chain: Chain) -> Feed:
        """Return what an operator reads of another one, with functions that know as what they count."""
        if isinstance(feed.base, SourceNode):
            return feed
        inlets = []
        for inlet in feed.inlets:
            legs = [
                replace(
                    leg,
                    steps=tuple(
                        self._counted(step, chain, (str(inlet.entry), str(number), *self._way(leg)))
                        if isinstance(step, TransformNode)
                        else step
                        for step in leg.steps
                    ),
                )
                for number, leg in enumerate(inlet.legs)
            ]
            inlets.append(replace(inlet, legs=tuple(legs)))
        return replace(feed, inlets=tuple(inlets))

    def _plan_base(self, base: Base, chain: Chain, names: tuple[str, ...], *, marked: bool) -> PlannedStream:
        if isinstance(base, SourceNode):
            (name,) = names
            stream = self._plan_source(base, chain, name, marked=marked)
            check_field_names(stream.schema, f"the source '{base.uid}'")
            self._read[base.uid] = stream.schema
            return stream
        (last,) = (node for node in self._graph.operators if node.uid == chain.name)
        ends = ends_with(self._graph, last)
        if len(ends) > 1 or has_ways_that_meet(last):
            if chain.name not in self._lines:
                self._lines[chain.name] = self._plan_line(ends, chain)
            return self._lines[chain.name][id(base)]
        if isinstance(base, SideNode):
            main = self.stream(Leg(base.parent), chain, names)
            assert isinstance(main, TaggedStream)
            number = 1 + self._graph.sides_of(base.parent).index(base)
            return replace(main, schema=base.output, side=main.side + number)
        return self._plan_keyed(base, chain, names)

    def _plan_keyed(self, node: KeyedNode, chain: Chain, names: tuple[str, ...]) -> TaggedStream:
        if chain.name in self._shared:
            return self._shared[chain.name]
        numbers = [one.uid for one in reporters(self._graph)]
        given, rest = list[KeyedInput](), list(names)
        for number, feed in enumerate(self._counted_between(feed, chain) for feed in feeds(node)):
            own = tuple(rest.pop(0) for _ in scans_of(feed.base))
            counted = self._with_counted_keys(node, chain, f"feed {number}")
            given += self._inputs(counted, feed, chain, own, numbers)
        return self._operator(node, chain, given)

    def _operator(
        self, node: KeyedNode, chain: Chain, given: list[KeyedInput], passing: Sequence[KeyedInput] = ()
    ) -> TaggedStream:
        planned = plan_keyed(node, self._parts(node, chain, given, passing))
        self._operators[node.uid] = OperatorShape(node.max_parallelism, planned.key_types, meaning_of(node))
        outputs = planned.outputs if len(planned.outputs) > 1 else ()
        channels = frozenset(range(self._partitions))
        return TaggedStream(planned.frame, planned.schema, channels, outputs=outputs, timed=planned.timed)

    def _parts(
        self, node: KeyedNode, chain: Chain, given: list[KeyedInput], passing: Sequence[KeyedInput] = ()
    ) -> KeyedParts:
        numbers = [one.uid for one in reporters(self._graph)]
        # Elements of an entry come before those of the next one, whatever they are read of.
        given.sort(key=lambda one: one.entry)
        sides = self._graph.sides_of(node)
        seed = self._beginning.state_of(self._spark, node.uid, chain)
        number = numbers.index(node.uid)
        markers = self._marking.of(self._graph, [one.source for one in given if one.source is not None])
        name = self._graph.names.get(node.uid, "")
        counts_as = f"{node.uid}/{chain.name}" if self._counts(node.uid, node, chain) else ""
        return KeyedParts(
            inputs=tuple(given),
            number=number,
            partitions=self._partitions,
            bundles_per_partition=self._bundles_per_partition,
            passing=tuple(passing),
            sides=sides,
            seed=seed,
            markers=markers,
            name=name,
            counts_as=counts_as,
            chain=chain.name,
        )

    # -- operators that share tasks ---------------------------------------------------------------------

    @property
    def _may_share(self) -> bool:
        recorded = self._recorded
        return recorded is None or bool(recorded.shared) or bool(recorded.together)

    def _share_tasks(self) -> None:
        """Plan the operators that share tasks, as in Flink's slot sharing: one shuffle serves all of them."""
        if not self._may_share:
            return
        recorded = {} if self._recorded is None else {one.chain: one for one in self._recorded.states}
        for nodes in sharing_tasks(self._graph):
            groups: dict[int | None, list[_Sharer]] = {}
            for node in nodes:
                chain = chain_of(self._graph, node)
                lies = recorded.get(chain.name)
                named = zip(feeds(node), chain.inputs, strict=True)
                ways = sorted(named, key=lambda way: way[0].inlets[0].entry)
                one = _Sharer(node, chain, tuple(ways), 0 if lies is None else lies.place)
                groups.setdefault(None if lies is None else lies.number, []).append(one)
            for group in groups.values():
                self._plan_shared(sorted(group, key=lambda one: one.place))

    def _plan_shared(self, group: Sequence[_Sharer]) -> None:
        self._groups.append(tuple(one.node.uid for one in group))
        given: dict[tuple[int, int], KeyedInput] = {}
        for reader, made in self._read_together(group):
            at = group[reader.place].ways[reader.number][0].inlets[0].entry
            made = replace(made, entry=at, distribution=reader.entry.distribution)
            given[reader.place, reader.number] = made
        parts = []
        for place, sharer in enumerate(group):
            inputs = [given[place, number] for number in range(len(sharer.ways))]
            parts.append(self._parts(sharer.node, sharer.chain, inputs))
        plans = plan_shared([(one.node, part) for one, part in zip(group, parts, strict=True)])
        channels = frozenset(range(self._partitions))
        for one, planned in zip(group, plans, strict=True):
            self._operators[one.node.uid] = OperatorShape(
                one.node.max_parallelism, planned.key_types, meaning_of(one.node)
            )
            self._shared[one.chain.name] = TaggedStream(
                frame=planned.frame,
                schema=planned.schema,
                channels=channels,
                outputs=planned.outputs if len(planned.outputs) > 1 else (),
                timed=planned.timed,
                side=planned.first_output,
            )

    def _read_together(self, group: Sequence[_Sharer]) -> Iterator[tuple[_Reader, KeyedInput]]:
        """Yield the inputs of operators; what several of them read is scanned once."""
        scans: dict[object, list[_Reader]] = {}
        for place, one in enumerate(group):
            for number, (feed, name) in enumerate(one.ways):
                (leg,) = feed.inlets[0].legs
                counted = self._with_counted_keys(one.node, one.chain, f"feed {number}")
                entry = counted.entries[feed.inlets[0].entry]
                reader = _Reader(place, number, one.node.uid, entry, leg, one.chain, name)
                label = self._beginning.label_of_input(one.chain, name)
                known = id(leg.base), label, self._scanned_in(one.chain, name)
                scans.setdefault(known, []).append(reader)
        for readers in scans.values():
            for stem, ways in stems(self._graph, [one.leg for one in readers]):
                alike = [[readers[number] for number in way] for way in ways]
                if len(alike) == 1:
                    yield from self._read_alike(alike[0])
                else:
                    yield from self._read_branches(stem, alike)

    def _scanned_in(self, chain: Chain, name: str) -> int | None:
        """Return the number of the scan that brings an input in the live log; None in one that begins now."""
        layout = self._recorded
        if layout is None:
            return None
        records = (at for at, scan in enumerate(layout.scans) if scan.role is ScanRole.RECORDS)
        return next((at for at in records if (chain.name, name) in layout.inputs_of(at)), None)

    def _read_branches(
        self, stem: int, ways: Sequence[Sequence[_Reader]]
    ) -> Iterator[tuple[_Reader, KeyedInput]]:
        """Yield inputs whose paths part behind some steps; what several share runs as the first's."""
        first = ways[0][0]
        upto = Leg(first.leg.base, first.leg.steps[:stem])
        stream = self.stream(upto, first.chain, (first.name,), may_be_marked=False)
        assert isinstance(stream, RecordStream)
        branches: list[tuple[Sequence[_Reader], Branch]] = []
        for own in ways:
            found = self._branch(stream, own, stem)
            if isinstance(found, Branch):
                branches.append((own, found))
            else:
                yield from self._read_alike(own)
        numbers = [one.uid for one in reporters(self._graph)]
        self._branches.append(tuple((one.uid, one.name) for own, _ in branches for one in own))
        made = branch_rows(stream, [branch for _, branch in branches])
        for (own, _), rows in zip(branches, made, strict=True):
            for reader, keys in zip(own, rows.keys, strict=True):
                yield reader, _of_branch(stream, rows, keys, numbers, reader.name)

    def _branch(self, stream: RecordStream, readers: Sequence[_Reader], stem: int) -> Branch | Spoiler:
        """Return what is behind the stem of a way; what spoils it if it cannot run beside others."""
        first, functions = readers[0], []
        for at in range(stem, len(first.leg.steps)):
            upto = Leg(first.leg.base, first.leg.steps[: at + 1])
            step = upto.steps[-1]
            assert isinstance(step, TransformNode)
            functions.append(self._function(step, upto, first.chain, (first.name,), stream))
        return Branch.of(stream, functions, [(one.uid, one.entry.keys) for one in readers])

    def _read_alike(self, readers: Sequence[_Reader]) -> Iterator[tuple[_Reader, KeyedInput]]:
        first = readers[0]
        entries = [one.entry for one in readers]
        stream = self._read_by(entries, first.leg, first.chain, (first.name,))
        assert isinstance(stream, RecordStream)
        by_expression = [one for one in readers if _has_expression(one.entry)]
        plain = [one for one in readers if one not in by_expression]
        together = [(_frames_of(stream, (by_expression or plain)[0].entry), list(readers))]
        if plain and by_expression and stream.has_kept_times:
            together = [(_frames_of(stream, own[0].entry), own) for own in (plain, by_expression)]
        numbers = [one.uid for one in reporters(self._graph)]
        for frames, own in together:
            keys = [(one.uid, one.entry.keys) for one in own]
            with_keys, found = with_keys_of_all(frames[0], keys, stream.origins)
            for reader, keyed_by in zip(own, found, strict=True):
                yield reader, _of_source(stream, (with_keys, *frames[1:]), keyed_by, numbers, reader.name)

    def _by_side(self, bases: Sequence[_Base], shown: Sequence[int]) -> list[int]:
        """Return by output which stream of the union it is, where operators that share tasks are several."""
        if bases[shown[0]].chain.name not in self._shared:
            return []
        first = {self._shared[bases[at].chain.name].side: at for at in shown}
        found: list[int] = []
        for output in range(len(bases[shown[0]].stream.outputs)):
            found.append(first[output] if output in first else found[-1])
        return found

    def _plan_line(self, ends: Sequence[KeyedNode], chain: Chain) -> Mapping[int, TaggedStream]:
        """Plan operators one behind the other: their paths part, and meet again or go to sinks."""
        # Each stands in the plan once. What one behind it reads of an operator in front passes it, as another
        # output; so does what a sink reads.
        scans = zip(operator_scans(*ends), chain.inputs, strict=True)
        named = {(id(scan.operator), scan.feed): name for scan, name in scans}
        numbers = [one.uid for one in reporters(self._graph)]
        order = operators_upto(*ends)
        read = {id(leg.base) for sink in self._graph.sinks for leg in legs(sink.parent)}
        #: The outputs that the line has so far, by what they are of.
        line: dict[int, TaggedStream] = {}
        for place, one in enumerate(order):
            given, inlets = list[KeyedInput](), list[Inlet]()
            for number, feed in enumerate(feeds(one)):
                if isinstance(feed.base, SourceNode):
                    own = (named[id(one), number],)
                    counted = self._with_counted_keys(one, chain, f"feed {number}")
                    entries = [counted.entries[feed.inlets[0].entry]]
                    stream = self._read_by(entries, feed.inlets[0].legs[0], chain, own)
                    given.append(_plain_input(counted, feed, stream, numbers))
                else:
                    inlets += self._placed_inlets(self._counted_between(feed, chain))
            behind = {id(i.base) for other in order[place + 1 :] for f in feeds(other) for i in f.inlets}
            passing = {base: stream for base, stream in line.items() if base in behind | read}
            counted = self._with_counted_keys(one, chain, "line")
            shared = self._line_inputs(counted, inlets, line, tuple(passing.values()))
            planned = self._operator(one, chain, [*given, *shared[: len(inlets)]], shared[len(inlets) :])
            sides = self._graph.sides_of(one)
            line = {id(one): planned}
            line |= {
                id(side): replace(planned, schema=side.output, side=number)
                for number, side in enumerate(sides, start=1)
            }
            line |= {
                base: replace(planned, schema=stream.schema, side=number)
                for number, (base, stream) in enumerate(passing.items(), start=1 + len(sides))
            }
        return line

    def _line_inputs(
        self,
        node: KeyedNode,
        inlets: Sequence[Inlet],
        line: Mapping[int, TaggedStream],
        passing: Sequence[TaggedStream],
    ) -> list[KeyedInput]:
        streams = [line[id(inlet.base)] for inlet in inlets]
        if not streams and not passing:
            return []
        entries = [(inlet.entry, node.entries[inlet.entry].distribution) for inlet in inlets]
        entries += [(len(node.entries), Distribution.PASSING)] * len(passing)
        found = []
        shared = shared_inputs(node, Feed(tuple(inlets)), streams, passing)
        origins = (*streams, *passing)
        for stream, (entry, way), (rows, schema, keys) in zip(origins, entries, shared, strict=True):
            view = rows.frame.select(*C.CONTROL, *stream.times, *rows.named)
            channels = origins[0].channels
            one = KeyedInput((view,), schema, channels, Origins(), keys, shared=rows)
            found.append(replace(one, entry=entry, distribution=way))
        return found

    def _inputs(
        self, node: KeyedNode, feed: Feed, chain: Chain, names: tuple[str, ...], reporters: Sequence[str]
    ) -> list[KeyedInput]:
        if isinstance(feed.base, SourceNode):
            entries = [node.entries[feed.inlets[0].entry]]
            stream = self._read_by(entries, feed.inlets[0].legs[0], chain, names)
            return [_plain_input(node, feed, stream, reporters)]
        feed = Feed(self._placed_inlets(feed))
        streams = []
        for inlet in feed.inlets:
            stream = self.stream(Leg(inlet.base), chain, names)
            assert isinstance(stream, TaggedStream)
            streams.append(stream)
        streams[0], feed = behind_frames(node.uid, feed, streams[0])
        if is_read_plainly(node.uid, feed):
            return [_plain_input(node, feed, streams[0], reporters)]
        line = {id(inlet.base): stream for inlet, stream in zip(feed.inlets, streams, strict=True)}
        return self._line_inputs(node, feed.inlets, line, ())

    def _plan_source(self, node: SourceNode, chain: Chain, name: str, *, marked: bool) -> RecordStream:
        origins = Origins(node.source.topics)
        source = self._beginning.positioned(node, chain, name)
        if self._graph.needs_own_time(node):
            source = source.with_own_time() or source
        frame = source.load_marked(self._spark, self._place) if marked else None
        if frame is not None:
            return RecordStream(
                name, frame, origins, self._load_barriers, Announced.ANNOUNCED, is_marked=True
            )
        records, has_channels = source.load(self._spark, self._place), source.has_channels
        return RecordStream(
            name, records, origins, self._load_barriers, SOURCE_CHANNELS, has_channels=has_channels
        )

    def _united(self, chain: Chain, ways: Sequence[Leg], sink: str) -> TaggedStream:
        """Return the end of a chain: an operator's output, or the records of all ways from sources."""
        rest, streams = list(chain.inputs), []
        shared = shared_from(self._graph, ways[0], len(ways))
        if shared is not None:
            # Each sink does the rest for itself, on the evaluated micro-batch.
            (leg,) = ways
            planned = self.stream(Leg(leg.base, leg.steps[:shared]), chain, chain.inputs)
            assert isinstance(planned, RecordStream)
            own = (*chain.inputs, *self._way(leg))
            rest_of = [one for one in leg.steps[shared:] if isinstance(one, TransformNode)]
            steps = [self._counted(one, chain, own) for one in rest_of]
            stream = _stream_of(planned)
            tagged = self._marking.beside(self._with_barriers([planned]), self._graph, chain.inputs)
            functions = (self._calls.on_way(step.function, leg, stream) for step in steps)
            return replace(tagged, transforms=tuple(functions))
        if operator_of(ways[0].base) is not None:
            (leg,) = ways
            planned = self.stream(leg, chain, chain.inputs)
            assert isinstance(planned, TaggedStream)
            return planned
        for leg in ways:
            streams.append(self.stream(leg, chain, (rest.pop(0),)))
        records = [stream for stream in streams if isinstance(stream, RecordStream)]
        for other in records[1:]:
            check_same_fields(records[0].schema, other.schema, f"the sink '{sink}'")
        return self._marking.beside(self._with_barriers(records), self._graph, chain.inputs)

    def _placed_inlets(self, feed: Feed) -> tuple[Inlet, ...]:
        return tuple(
            replace(one, legs=tuple(self._placed(leg, Stream.OF_MICRO_BATCH) for leg in one.legs))
            for one in feed.inlets
        )

    def _placed(self, leg: Leg, stream: Stream) -> Leg:
        steps = (
            replace(step, function=self._calls.on_way(step.function, leg, stream))
            if isinstance(step, TransformNode)
            else step
            for step in leg.steps
        )
        return Leg(leg.base, tuple(steps))

    @staticmethod
    def _with_barriers(streams: Sequence[RecordStream]) -> TaggedStream:
        streams = [stream.records_only() for stream in streams]
        first = streams[0]
        fields = [F.col(quoted(name)) for name in first.schema.names]
        if first.is_marked:
            marked = first.frame.select(*C.CONTROL, *fields)
            named = named_scan(marked, ScanRole.RECORDS, first.source)
            return TaggedStream(named, first.schema, first.channels)
        found: DataFrame | None = None
        for stream in streams:
            records = stream.frame.select(
                F.lit(int(C.Kind.RECORD)).alias(C.KIND),
                F.lit(0).cast("long").alias(C.CHECKPOINT),
                C.CHANNEL,
                C.SEQUENCE,
                *fields,
            )
            named = named_scan(records, ScanRole.RECORDS, stream.source)
            found = named if found is None else found.unionByName(named)
        assert found is not None
        barriers = named_scan(first.barriers, ScanRole.BARRIERS)
        frame = found.unionByName(barriers, allowMissingColumns=True)
        return TaggedStream(frame, first.schema, first.channels)

    def _part(self, bases: list[_Base], tagged: TaggedStream, chain: Chain) -> tuple[SinkPart, T.StructType]:
        index = next((i for i, base in enumerate(bases) if base.chain == chain), len(bases))
        if index == len(bases):
            bases.append(_Base(chain, replace(tagged, transforms=())))
        fields = tuple(tagged.schema.names)
        places = fields_in(tagged)
        own = tagged.outputs[tagged.side] if tagged.outputs else fields
        frame = bases[index].stream.frame
        named_by = next(i for i, base in enumerate(bases) if base.stream.frame is frame)
        columns = tuple(f"s{named_by}_{places.index(name)}" for name in own)
        side = tagged.side if tagged.outputs else None
        part = SinkPart(index, columns, fields, tagged.channels, tagged.transforms, side)
        if not tagged.transforms:
            return part, tagged.schema
        schema, one_pass = functions_before_sink(self._spark, tagged.transforms, tagged.schema, columns)
        check_field_names(schema, "the result of a transform")
        return replace(part, one_pass=one_pass), schema


def _counted_as(step: Step) -> object:
    """Return what is one function where it is counted, if it can add to accumulators; else None."""
    # Its outputs are nodes of their own, each of which runs all of it. The two ways of connected streams have
    # other calls.
    match step.function if isinstance(step, TransformNode) else None:
        case RowTransform(function=function) as transform if function.rich is not None:
            return id(transform.settings), id(step.parent), getattr(function.call, "__name__", "")
        case LookupTransform() as transform if transform.join.function is not None:
            return id(transform.settings), id(step.parent), ""
        case ByPartitioner() as transform if transform.rich is not None:
            return id(transform), id(step.parent), ""
    return None


def _named(base: Base) -> str:
    return f"{base.parent.uid}.{base.tag.name}" if isinstance(base, SideNode) else base.uid


def _operators_below(base: Base) -> tuple[KeyedNode, ...]:
    operator = operator_of(base)
    if operator is None:
        return ()
    return (operator, *(node for feed in feeds(operator) for node in _operators_below(feed.base)))


def _spread(stream: PlannedStream) -> PlannedStream:
    if isinstance(stream, TaggedStream):
        return replace(stream, transforms=(*stream.transforms, Spread(None)))
    return transform_records(stream, Spread(None))


def plan_records(spark: SparkSession, graph: StreamGraph, node: StreamNode) -> DataFrame:
    """Return a node's records as a plain streaming DataFrame, outside of any checkpoint."""
    # Without what other streams of its operators would add.
    graph = replace(graph, begun_chains=frozenset())
    planner = Planner(spark, NO_JOB, shuffle_partitions(spark), graph=graph)
    found: DataFrame | None = None
    for chain, ways in chains_to(graph, node):
        rest = list(chain.inputs)
        for leg in ways:
            own = tuple(rest.pop(0) for _ in scans_of(leg.base))
            frame = _records_of(planner.stream(leg, chain, own))
            found = frame if found is None else found.unionByName(frame)
    assert found is not None
    return found


def _records_of(stream: PlannedStream) -> DataFrame:
    if isinstance(stream, RecordStream):
        return stream.records_only().frame.select(*[F.col(quoted(name)) for name in stream.schema.names])
    frame = stream.alone().where(F.col(C.KIND) == int(C.Kind.RECORD)).drop(*C.CONTROL, C.TIME)
    for function in stream.transforms:
        frame = transformed(frame, function)
    return frame


def _has_one_source(graph: StreamGraph) -> bool:
    """Whether barriers may come from the source itself."""
    # Several scans that meet would each put a barrier into the micro-batch for which *they* saw the trigger.
    ends = [end for sink in graph.sinks for end in chains_to(graph, sink.parent)]
    is_straight = all(len(chain.inputs) == 1 and len(ways) == 1 for chain, ways in ends)
    has_unions = any(len(legs(sink.parent)) > 1 for sink in graph.sinks)
    is_plain = len(graph.sources) == 1 and not graph.sources[0].source.has_side_outputs
    return is_plain and is_straight and not has_unions


def _stream_of(stream: PlannedStream) -> Stream:
    is_counted = isinstance(stream, RecordStream) and stream.has_channels
    return Stream.OF_SOURCE if is_counted else Stream.OF_MICRO_BATCH


def _plain_input(node: KeyedNode, feed: Feed, stream: PlannedStream, reporters: Sequence[str]) -> KeyedInput:
    (inlet,) = feed.inlets
    entry = node.entries[inlet.entry]
    one = _keyed_input(node, entry, stream, reporters)
    return replace(one, entry=inlet.entry, distribution=entry.distribution)


def _keyed_input(
    node: KeyedNode, entry: KeyedEntry, stream: PlannedStream, reporters: Sequence[str]
) -> KeyedInput:
    if isinstance(stream, TaggedStream):
        functions_between(node.uid, stream.transforms)
        for key in entry.keys:
            if isinstance(key, Column) and calls_python(stream.alone(), key):
                raise GraphError(
                    f"the key of operator '{node.uid}' is an expression that calls a function in Python",
                    why="behind an operator Spark would call it for barriers, which have no fields",
                    what_to_do="give key_by() the function itself, and key=; or compute a column in front",
                )
        frame, keys = with_computed_keys(stream.alone(), entry.keys, node.uid, Origins())
        return KeyedInput((frame,), stream.schema, stream.channels, Origins(), keys)
    frames = _frames_of(stream, entry)
    first, keys = with_computed_keys(frames[0], entry.keys, node.uid, stream.origins)
    return _of_source(stream, (first, *frames[1:]), keys, reporters, stream.source)


def _frames_of(stream: RecordStream, entry: KeyedEntry) -> tuple[DataFrame, ...]:
    """Return records and barriers of a source, in one frame if they may be."""
    # An expression of the user's must not see rows without fields, and times alone are such.
    stream = stream.records_only() if _has_expression(entry) else stream
    return (stream.frame,) if stream.is_marked else (stream.frame, stream.barriers)


def _has_expression(entry: KeyedEntry) -> bool:
    return any(isinstance(key, Column) for key in entry.keys)


def _of_source(
    stream: RecordStream,
    frames: tuple[DataFrame, ...],
    keys: tuple[KeyPart, ...],
    reporters: Sequence[str],
    name: str,
) -> KeyedInput:
    """Return an input of an operator by its name in the chain, which may not be that of the scan."""
    is_timed = C.TIME in stream.frame.columns
    return KeyedInput(
        frames,
        stream.schema,
        stream.channels,
        stream.origins,
        keys,
        source=name,
        reports_as=reporters.index(name) if is_timed else None,
    )


def _of_branch(
    stream: RecordStream,
    branch: BranchRows,
    keys: tuple[KeyPart, ...],
    reporters: Sequence[str],
    name: str,
) -> KeyedInput:
    rows = branch.rows
    beside = [name for name in (C.CHANNEL, C.SEQUENCE, C.TIME) if name in rows.frame.columns]
    view = rows.frame.select(*beside, *rows.named)
    made = _of_source(stream, (view, stream.barriers), keys, reporters, name)
    return replace(made, schema=branch.schema, shared=rows)
