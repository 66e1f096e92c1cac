"""From the logical plan to one streaming DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import takewhile
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.plans import UPDATE, calls_python, name_scan, native_parts
from flinkish_spark.bridge.session import why_no_resources
from flinkish_spark.connectors.control_source import load_control
from flinkish_spark.contracts.calls import NO_PLACE, CallPlace, Stream
from flinkish_spark.contracts.source import NO_JOB, JobPlace, SourceNode
from flinkish_spark.core.arrow_pass import is_made_by_workers
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.planning.beginning import NOTHING, Beginning
from flinkish_spark.planning.between import (
    Branch,
    ControlRowError,
    RecordStream,
    apply_frame_prefix,
    assign_times,
    check_tasks_between,
    compute_branches,
    is_read_plainly,
    share_inputs,
    transform_records,
    try_functions,
)
from flinkish_spark.planning.declare import check_same_fields, compute_keys
from flinkish_spark.planning.keyed import KeyedParts, plan_operators
from flinkish_spark.planning.logical_plan import ChainEnd, LogicalPlan, Reader, SharedScan, TaskGroup
from flinkish_spark.planning.optimizer import optimize, plan_of_stream
from flinkish_spark.planning.partitioning import CustomPartitioning, Rebalance, shuffle_partitions
from flinkish_spark.planning.queries import run_query, select_fields
from flinkish_spark.planning.recorded_functions import RecordedFunctions
from flinkish_spark.planning.rules.set_apart import is_set_apart
from flinkish_spark.planning.sent_columns import (
    KeyedInput,
    PlannedStream,
    find_frames,
    has_expression,
    make_branch_input,
    make_keyed_input,
    make_source_input,
)
from flinkish_spark.planning.sink_rows import PlannedJob, PlannedSink, TaggedStream
from flinkish_spark.planning.stream_graph import (
    Base,
    Input,
    Key,
    KeyedEntry,
    KeyedNode,
    Path,
    QueryNode,
    SideNode,
    StreamGraph,
    StreamNode,
    TransformNode,
    Upstream,
    deal_names,
    find_operator,
    find_paths,
    find_scans,
    find_upstreams,
)
from flinkish_spark.planning.stream_union import StreamUnion
from flinkish_spark.planning.times import SourceMarkers, find_reporters, plan_times
from flinkish_spark.planning.transforms import (
    LookupTransform,
    NonRowTransform,
    RowTransform,
    Transform,
    apply_transform,
    find_frame_function,
)
from flinkish_spark.protocol.alignment import AnnouncedChannels
from flinkish_spark.protocol.key_groups import BUNDLES_PER_PARTITION, Bundling
from flinkish_spark.protocol.plan_layout import Chain, PlanLayout, ScanRole
from flinkish_spark.protocol.restore import OperatorShape
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.columns import Origins, add_position
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.schemas import check_field_names

#     sources -> stateless transforms -> union with the barriers -> keyed operators
#             -> tagged union of every stream that a sink reads
#
# A barrier is one row of the control source; a keyed operator turns it into one per shuffle partition.
# Transforms before a keyed operator are part of the streaming plan and see records only. Transforms between
# two keyed operators are part of it, too, and control rows bypass them. Transforms after the last keyed
# operator run on the evaluated micro-batch, because splitting the operator's output in the plan would run
# the operator twice.
#
# The planner translates the logical plan. It makes these decisions itself, since they depend on Spark's
# analysis of the program's expressions and transforms:
#
# - A source's control rows are a frame of their own, not among its records, if a step moves rows, if a
#   DataFrame function does more than look at each row, or if an expression for a time or a key calls
#   Python (`ControlRowError`, `_read_by`).
# - A branch of a shared scan gets its own scan if it has a DataFrame function of that kind (`Branch.of`).
# - DataFrame functions of single rows run in the Arrow pass that reads a source, or as Spark expressions
#   (`RowByRow.select_in_arrow`); before a sink they run in one pass, or over its records alone
#   (`plan_functions_before_sink`).
# - Operators with key expressions read a source separately if it has rows that are event times only
#   (`_read_alike`).
# - A recorded function's elements are numbered by the source if its records still have their channels, else
#   by micro-batch (`_find_numbering`).
# - Fields, their names, and types of keys.

#: The control source has one channel.
SOURCE_CHANNELS = frozenset({0})

#: The place of a stream in the plan: base, steps, seed of its chain, names of inputs, which steps count, and
#: whether control rows are among its records.
_Place = tuple[int, tuple[int, ...], str, tuple[str, ...], tuple[bool, ...], bool]


class Planner:
    """The translator of one logical plan; it translates each node once, however many sinks read it."""

    def __init__(
        self,
        spark: SparkSession,
        place: JobPlace,
        partitions: int,
        beginning: Beginning = NOTHING,
        marks_latency: bool = False,
        calls: CallPlace = NO_PLACE,
        bundles_per_partition: int = BUNDLES_PER_PARTITION,
        recorded: PlanLayout | None = None,
    ) -> None:
        self._spark, self._bundles_per_partition = spark, bundles_per_partition
        self._beginning, self._recorded, self._marks_latency = beginning, recorded, marks_latency
        self._place, self._call_place = place, calls
        self._partitions = partitions
        self._control: DataFrame | None = None
        self._planned: dict[_Place, PlannedStream] = {}
        self._operators: dict[str, OperatorShape] = {}
        self._read: dict[str, T.StructType] = {}
        #: By chain: the outputs after its operators, if they form a line.
        self._lines: dict[str, Mapping[int, TaggedStream]] = {}
        self._union = StreamUnion(spark)
        self._in_arrow: set[StreamNode] = set()
        #: Paths that are branches of one scan, by operator and input.
        self._branches: list[tuple[tuple[str, str], ...]] = []

    def _barriers(self) -> DataFrame:
        if self._control is None:
            self._control = load_control(self._spark, self._place.control_path).select(*C.CONTROL)
        return self._control

    def _start(self, logical: LogicalPlan) -> None:
        self._logical, self._graph = logical, logical.graph
        self._recorded_functions = RecordedFunctions(logical.evaluations, self._call_place)
        self._reporters = [one.uid for one in find_reporters(logical.graph)]

    def plan(self, graph: StreamGraph) -> PlannedJob:
        check_tasks_between(graph, self._partitions)
        self._start(optimize(graph, self._beginning, self._recorded))
        for group in self._logical.groups:
            self._plan_group(group)
        sinks = [*self._plan_sinks(), *self._plan_side_outputs()]
        union = self._union.unite({part.stream for sink in sinks for part in sink.parts if part.needs_places})
        deferred = self._union.plan_deferred_pass(sinks)
        if deferred is not None:
            self._in_arrow.update(self._find_steps_before_sinks())
        time = plan_times(self._logical, self.plan_stream)
        bundlings = {
            uid: self._make_bundling(shape.max_parallelism) for uid, shape in self._operators.items()
        }
        return PlannedJob(
            union,
            tuple(sinks),
            self._union.chains,
            self._operators,
            replace(time, bundlings=bundlings),
            tuple(self._recorded_functions.recordings.values()),
            tuple(self._branches),
            deferred,
            frozenset(self._in_arrow),
            self._logical,
            read=self._read,
        )

    def records(self, graph: StreamGraph, node: StreamNode) -> DataFrame:
        """Return a node's records as a plain streaming DataFrame, outside of any checkpoint."""
        self._start(plan_of_stream(graph, node))
        frames = []
        for end in self._logical.all_ends:
            for path, own in deal_names(end.paths, end.chain.inputs):
                frames.append(_select_records(self.plan_stream(path, end.chain, own)))
        return reduce(DataFrame.unionByName, frames)

    def _plan_sinks(self) -> Iterator[PlannedSink]:
        for node in self._graph.sinks:
            ends = self._logical.ends[node.uid]
            parts = [self._union.add(end.chain, self._plan_end(end, node.uid)) for end in ends]
            schema = self._unite_fields([one for _, one in parts], f"the sink '{node.uid}'")
            own = tuple(part for part, _ in parts)
            yield PlannedSink(node.uid, node.sink, schema, own, len(self._reporters))

    def _find_steps_before_sinks(self) -> Iterator[StreamNode]:
        """Yield the DataFrame functions that run on the evaluated micro-batch."""
        for node in self._graph.sinks:
            for end in self._logical.ends[node.uid]:
                for path in end.paths:
                    is_behind_operator = find_operator(path.base) is not None
                    first = 0 if is_behind_operator else end.deferred_from
                    steps = () if first is None else path.steps[first:]
                    yield from (step for step in steps if find_frame_function(step) is not None)

    def _plan_side_outputs(self) -> Iterator[PlannedSink]:
        peers = [sink for node in self._graph.sinks for _, sink in node.sink.parts(node.uid)]
        for source in self._graph.sources:
            for uid in source.source.side_uids(source.uid):
                chain = Chain((source.uid,), (), (uid,))
                moved = self._beginning.position_source(source, chain, source.uid)
                for side in moved.side_outputs(self._spark, source.uid, self._place, peers):
                    letters = RecordStream(source.uid, side.frame, Origins(), self._barriers, SOURCE_CHANNELS)
                    part, schema = self._union.add(chain, self._add_barriers([letters], chain))
                    yield PlannedSink(side.uid, side.sink, schema, (part,), len(self._reporters))

    def _plan_end(self, end: ChainEnd, sink: str) -> TaggedStream:
        """Return the end of a chain: an operator's output, or the records of all paths from sources."""
        chain = end.chain
        if find_operator(end.paths[0].base) is not None:
            planned = self.plan_stream(end.paths[0], chain, chain.inputs)
            assert isinstance(planned, TaggedStream)
            return planned
        streams = []
        for path, own in deal_names(end.paths, chain.inputs):
            stream = self.plan_stream(path.cut_to(end.deferred_from), chain, own)
            assert isinstance(stream, RecordStream)
            streams.append(stream)
        schema = self._unite_fields([stream.schema for stream in streams], f"the sink '{sink}'")
        tagged = replace(self._add_barriers(streams, chain), schema=schema)
        if end.deferred_from is None:
            return tagged
        # Each sink runs the remaining steps itself, on the evaluated micro-batch.
        (path,) = end.paths
        steps = [step for step in path.steps[end.deferred_from :] if isinstance(step, TransformNode)]
        self._check_deferred(steps, streams[0].schema, sink)
        counted = (self._logical.counting.mark_step(step, chain, path, *chain.inputs) for step in steps)
        counts = _find_numbering(streams[0])
        return replace(
            tagged,
            transforms=tuple(
                self._recorded_functions.place_on_path(one.function, path, counts) for one in counted
            ),
        )

    def _unite_fields(self, schemas: Sequence[T.StructType], what: str) -> T.StructType:
        """Return the fields of a union: a value may be null, at any depth, if it may be in one stream."""
        first, *others = schemas
        for other in others:
            check_same_fields(first, other, what)
        frames = (self._spark.createDataFrame([], one) for one in schemas)
        return reduce(DataFrame.union, frames).schema if others else first

    def _check_deferred(self, steps: Sequence[TransformNode], schema: T.StructType, sink: str) -> None:
        """Refuse state of Spark's own in steps that run on each micro-batch by itself."""
        frames = [*takewhile(lambda step: find_frame_function(step) is not None, steps)]
        if not frames:
            return
        states = native_parts(try_functions(self._spark, schema, [step.function for step in frames])).states
        if states:
            raise GraphError(
                f"a transform() in front of the sink '{sink}' contains {states[0]}",
                why="it stands behind an async function that several sinks share, so it would see one "
                "micro-batch at a time",
                what_to_do="call it before the async function, or use key_by() and an operator",
            )

    def _add_barriers(self, streams: Sequence[RecordStream], chain: Chain) -> TaggedStream:
        """Return records of sources with control rows, in the form of an operator's output."""
        by_workers = streams[0].frame
        streams = [stream.keep_records() for stream in streams]
        first = streams[0]
        fields = [F.col(quote_name(name)) for name in first.schema.names]
        if first.is_marked:
            marked = first.frame.select(*C.CONTROL, *fields)
            named = name_scan(marked, ScanRole.RECORDS, first.source)
            tagged = TaggedStream(
                named, first.schema, first.channels, by_workers=by_workers, source=first.source
            )
            return self._add_markers(tagged, chain)
        kind = (F.lit(int(C.Kind.RECORD)).alias(C.KIND), F.lit(0).cast("long").alias(C.CHECKPOINT))
        frames = [
            name_scan(
                stream.frame.select(*kind, C.CHANNEL, C.SEQUENCE, *fields), ScanRole.RECORDS, stream.source
            )
            for stream in streams
        ]
        barriers = name_scan(first.barriers(), ScanRole.BARRIERS)
        frame = reduce(DataFrame.unionByName, frames).unionByName(barriers, allowMissingColumns=True)
        return self._add_markers(TaggedStream(frame, first.schema, first.channels), chain)

    def _add_markers(self, stream: TaggedStream, chain: Chain) -> TaggedStream:
        markers = self._make_markers(chain.inputs)
        if markers is None:
            return stream
        # Markers come last: Spark writes a file for a DataFrame's first partition even without a record.
        united = stream.frame.unionByName(markers.make_rows(), allowMissingColumns=True)
        return replace(stream, frame=united, by_workers=None)

    def _make_markers(self, inputs: Iterable[str]) -> SourceMarkers | None:
        numbers = tuple(map(self._reporters.index, inputs)) if self._marks_latency else ()
        return SourceMarkers(self._spark, numbers) if numbers else None

    # -- streams ------------------------------------------------------------------------------------------

    def plan_stream(
        self, path: Path, chain: Chain, names: tuple[str, ...], *, may_be_marked: bool = True
    ) -> PlannedStream:
        """Return a stream of the plan; a source's control rows are among its records where they may be."""
        if may_be_marked and self._logical.marks_records:
            try:
                return self._plan_once(path, chain, names, marked=True)
            except ControlRowError:
                # Splitting a marked source into records and control rows would read it twice.
                pass
        return self._plan_once(path, chain, names, marked=False)

    def _read_by(
        self, entries: Sequence[KeyedEntry], path: Path, chain: Chain, names: tuple[str, ...]
    ) -> PlannedStream:
        """Return a source's stream as operators read it: keys that call Python must not see control rows."""
        stream = self.plan_stream(path, chain, names)
        keys = [key for entry in entries for key in entry.keys if isinstance(key, Column)]
        is_marked = isinstance(stream, RecordStream) and stream.is_marked
        if is_marked and any(calls_python(stream.frame, key) for key in keys):
            return self.plan_stream(path, chain, names, may_be_marked=False)
        return stream

    def _plan_once(self, path: Path, chain: Chain, names: tuple[str, ...], *, marked: bool) -> PlannedStream:
        steps = tuple(map(id, path.steps))
        if isinstance(path.base, SourceNode) and self._logical.may_share:
            label = self._beginning.find_input_label(chain, *names)
        else:
            label = self._beginning.label(chain)
        if isinstance(path.base, QueryNode):
            # Two chains with one DataFrame would share its watermark, and Spark gives it to one of the two.
            label = f"{label} {chain.name}"
        counts = self._logical.counting.find_counts(path, chain)
        known = id(path.base), steps, label, names, counts, marked
        if known not in self._planned:
            self._planned[known] = self._plan_path(path, chain, names, marked=marked)
        return self._planned[known]

    def _plan_path(self, path: Path, chain: Chain, names: tuple[str, ...], *, marked: bool) -> PlannedStream:
        if not path.steps:
            return self._plan_base(path.base, chain, names, marked=marked)
        parent = self._plan_once(path.cut_to(-1), chain, names, marked=marked)
        if is_set_apart(self._graph, path.steps):
            parent = _apply_transform(parent, Rebalance(None))
        step = path.steps[-1]
        if isinstance(step, TransformNode):
            made = _apply_transform(parent, self._prepare_function(step, path, chain, names, parent))
            is_of_source = isinstance(made, RecordStream) and find_frame_function(step) is not None
            if is_of_source and is_made_by_workers(made.frame):
                self._in_arrow.add(step)
            return made
        assert isinstance(parent, RecordStream), "refused where it was declared"
        return assign_times(parent, step.strategy)

    def _prepare_function(
        self, step: TransformNode, path: Path, chain: Chain, names: tuple[str, ...], parent: PlannedStream
    ) -> Any:
        self._check_resources(step)
        counted = self._logical.counting.mark_step(step, chain, path, *names).function
        function = self._recorded_functions.place_on_path(counted, path, _find_numbering(parent))
        if isinstance(parent, RecordStream) and isinstance(
            function, RowTransform | LookupTransform | CustomPartitioning
        ):
            return function.replace_origins(parent.origins)
        return function

    def _check_resources(self, step: TransformNode) -> None:
        function: object = step.function
        settings = function.settings if isinstance(function, RowTransform | LookupTransform) else None
        if settings is None or settings.resources is None:
            return
        why = why_no_resources(self._spark, settings.resources)
        if why:
            raise ConfigError(
                f"set_resources() was called on '{settings.name}', and this Spark cannot give tasks any",
                why=why,
                what_to_do="leave it out, and set spark.task.cpus and spark.executor.* for the whole job; or "
                "run it on a standalone cluster, YARN or Kubernetes",
            )

    def _plan_base(self, base: Base, chain: Chain, names: tuple[str, ...], *, marked: bool) -> PlannedStream:
        if isinstance(base, QueryNode):
            return self._plan_query(base, chain, names, marked=marked)
        if isinstance(base, SourceNode):
            (name,) = names
            stream = self._plan_source(base, chain, name, marked=marked)
            check_field_names(stream.schema, f"the source '{base.uid}'")
            self._read[base.uid] = stream.schema
            return stream
        if chain.name in self._logical.lines:
            if chain.name not in self._lines:
                self._lines[chain.name] = self._plan_line(chain)
            return self._lines[chain.name][id(base)]
        if isinstance(base, SideNode):
            main = self.plan_stream(Path(base.parent), chain, names)
            assert isinstance(main, TaggedStream)
            number = 1 + self._graph.find_sides(base.parent).index(base)
            return replace(main, schema=base.output, side=main.side + number)
        return self._plan_keyed(base, chain, names)

    def _plan_source(self, node: SourceNode, chain: Chain, name: str, *, marked: bool) -> RecordStream:
        origins = Origins(node.source.topics)
        source = self._beginning.position_source(node, chain, name)
        if self._graph.needs_own_time(node):
            source = source.add_own_time() or source
        frame = source.load_marked(self._spark, self._place) if marked else None
        if frame is not None:
            return RecordStream(
                name, frame, origins, self._barriers, AnnouncedChannels.ANNOUNCED, is_marked=True
            )
        records, has_channels = source.load(self._spark, self._place), source.has_channels
        is_updated = source.output_mode == UPDATE
        return RecordStream(
            name,
            records,
            origins,
            self._barriers,
            SOURCE_CHANNELS,
            has_channels=has_channels,
            is_updated=is_updated,
        )

    def _plan_query(
        self, node: QueryNode, chain: Chain, names: tuple[str, ...], *, marked: bool
    ) -> RecordStream:
        if marked:
            raise ControlRowError
        rest, frames = list(names), []
        for parent in node.parents:
            streams = [self._plan_input(path, chain, rest.pop(0)) for path in find_paths(parent)]
            for other in streams[1:]:
                check_same_fields(streams[0].schema, other.schema, f"the query '{node.uid}'")
            frames.append(reduce(DataFrame.unionByName, (select_fields(one) for one in streams)))
        made = run_query(node, frames)
        # Spark's own operators in it have the query's name, its scans those of their sources.
        named = add_position(name_scan(made, ScanRole.RECORDS, node.uid))
        is_updated = node.output_mode == UPDATE
        return RecordStream(
            names[0],
            named,
            Origins(),
            self._barriers,
            SOURCE_CHANNELS,
            has_channels=False,
            is_updated=is_updated,
        )

    def _plan_input(self, path: Path, chain: Chain, name: str) -> RecordStream:
        stream = self.plan_stream(path, chain, (name,), may_be_marked=False)
        assert isinstance(stream, RecordStream), "refused where it was declared"
        return stream

    # -- keyed operators ----------------------------------------------------------------------------------

    def _plan_keyed(self, node: KeyedNode, chain: Chain, names: tuple[str, ...]) -> TaggedStream:
        if chain.name in self._union.shared:
            return self._union.shared[chain.name]
        given, rest = list[KeyedInput](), list(names)
        for number, upstream in enumerate(find_upstreams(node)):
            own = tuple(rest.pop(0) for _ in find_scans(upstream.base))
            counted = self._logical.counting.mark_keys(node, chain, f"feed {number}")
            if find_operator(upstream.base) is None:
                given.append(self._plan_source_input(counted, upstream, chain, own))
            else:
                given += self._plan_operator_inputs(counted, upstream, chain, own)
        return self._plan_operators([self._make_parts(node, chain, given)])[0]

    def _plan_source_input(
        self, node: KeyedNode, upstream: Upstream, chain: Chain, names: tuple[str, ...]
    ) -> KeyedInput:
        at = upstream.inputs[0].entry
        stream = self._read_by([node.entries[at]], upstream.paths[0], chain, names)
        return make_keyed_input(node, at, stream, self._reporters)

    def _plan_operator_inputs(
        self, node: KeyedNode, upstream: Upstream, chain: Chain, names: tuple[str, ...]
    ) -> list[KeyedInput]:
        upstream = Upstream(self._prepare_inputs(upstream, chain))
        streams = []
        for one in upstream.inputs:
            stream = self.plan_stream(Path(one.base), chain, names)
            assert isinstance(stream, TaggedStream)
            streams.append(stream)
        streams[0], upstream = apply_frame_prefix(node.uid, upstream, streams[0])
        if is_read_plainly(node.uid, upstream):
            return [make_keyed_input(node, upstream.inputs[0].entry, streams[0], self._reporters)]
        return self._plan_shared_inputs(node, upstream.inputs, streams)

    def _prepare_inputs(self, upstream: Upstream, chain: Chain) -> tuple[Input, ...]:
        counted = self._logical.counting.mark_upstream(upstream, chain)
        return tuple(
            replace(one, paths=tuple(map(self._recorded_functions.place_between_operators, one.paths)))
            for one in counted.inputs
        )

    def _plan_operators(self, operators: Sequence[KeyedParts]) -> list[TaggedStream]:
        made = plan_operators(operators)
        self._operators |= {one.node.uid: shape for one, (_, shape) in zip(operators, made, strict=True)}
        return [stream for stream, _ in made]

    def _make_parts(
        self, node: KeyedNode, chain: Chain, given: list[KeyedInput], passing: Sequence[KeyedInput] = ()
    ) -> KeyedParts:
        # Elements of an entry come before elements of the next entry, whatever their upstream.
        given.sort(key=lambda one: one.entry)
        return KeyedParts(
            node=node,
            inputs=tuple(given),
            passing=tuple(passing),
            number=self._reporters.index(node.uid),
            bundling=self._make_bundling(node.max_parallelism),
            sides=self._graph.find_sides(node),
            seed=self._beginning.state_of(self._spark, node.uid, chain),
            markers=self._make_markers(one.source for one in given if one.source is not None),
            name=self._graph.names.get(node.uid, ""),
            counts_as=self._logical.counting.find_counter_id(node, chain),
            chain=chain.name,
        )

    def _make_bundling(self, max_parallelism: int) -> Bundling:
        return Bundling(max_parallelism, self._partitions, self._bundles_per_partition)

    def _plan_shared_inputs(
        self,
        node: KeyedNode,
        inputs: Sequence[Input],
        streams: Sequence[TaggedStream],
        passing: Sequence[TaggedStream] = (),
    ) -> list[KeyedInput]:
        """Return the inputs that share a frame, then the streams that pass the operator."""
        if not streams and not passing:
            return []
        entries = [(one.entry, node.entries[one.entry].distribution) for one in inputs]
        entries += [(len(node.entries), Distribution.PASSING)] * len(passing)
        found = []
        shared = share_inputs(node, inputs, streams, passing)
        origins = (*streams, *passing)
        for stream, (entry, distribution), (rows, schema, keys) in zip(origins, entries, shared, strict=True):
            view = rows.frame.select(*C.CONTROL, *stream.times, *rows.named)
            one = KeyedInput((view,), schema, origins[0].channels, Origins(), keys, shared=rows)
            found.append(replace(one, entry=entry, distribution=distribution))
        return found

    def _plan_line(self, chain: Chain) -> Mapping[int, TaggedStream]:
        """Plan the operators of a line in order; return the streams after the last, by id of their base."""
        line: dict[int, TaggedStream] = {}
        for known in self._logical.lines[chain.name]:
            one = known.operator
            given, inputs = list[KeyedInput](), list[Input]()
            for number, upstream in enumerate(find_upstreams(one)):
                if find_operator(upstream.base) is None:
                    counted = self._logical.counting.mark_keys(one, chain, f"feed {number}")
                    given.append(self._plan_source_input(counted, upstream, chain, known.names[number]))
                else:
                    inputs += self._prepare_inputs(upstream, chain)
            counted = self._logical.counting.mark_keys(one, chain, "line")
            streams = [line[id(input_.base)] for input_ in inputs]
            passing = {id(base): line[id(base)] for base in known.passing}
            shared = self._plan_shared_inputs(counted, inputs, streams, tuple(passing.values()))
            own = [*given, *shared[: len(inputs)]]
            (planned,) = self._plan_operators([self._make_parts(one, chain, own, shared[len(inputs) :])])
            made = {id(one): planned.schema}
            made |= {id(side): side.output for side in self._graph.find_sides(one)}
            made |= {base: stream.schema for base, stream in passing.items()}
            line = {
                base: replace(planned, schema=schema, side=number)
                for number, (base, schema) in enumerate(made.items())
            }
        return line

    def _plan_group(self, group: TaskGroup) -> None:
        inputs: list[list[tuple[int, KeyedInput]]] = [[] for _ in group.members]
        for scan in group.scans:
            for reader, made in self._read_scan(scan):
                distribution = reader.operator.entries[reader.entry].distribution
                one = replace(made, entry=reader.entry, distribution=distribution)
                inputs[reader.place].append((reader.number, one))
        parts = [
            self._make_parts(operator, chain, [one for _, one in sorted(own, key=lambda known: known[0])])
            for (operator, chain), own in zip(group.members, inputs, strict=True)
        ]
        self._union.shared |= zip(
            (chain.name for _, chain in group.members), self._plan_operators(parts), strict=True
        )

    def _read_scan(self, scan: SharedScan) -> Iterator[tuple[Reader, KeyedInput]]:
        """Yield the input of each reader of a scan; common steps are planned as the first reader's."""
        if len(scan.branches) == 1:
            yield from self._read_alike(scan.branches[0])
            return
        first = scan.branches[0][0]
        stream = self.plan_stream(
            first.path.cut_to(scan.common), first.chain, (first.name,), may_be_marked=False
        )
        assert isinstance(stream, RecordStream)
        branches: list[tuple[tuple[Reader, ...], Branch]] = []
        for readers in scan.branches:
            found = self._make_branch(stream, readers, scan.common)
            if isinstance(found, Branch):
                branches.append((readers, found))
            else:
                yield from self._read_alike(readers)
        self._branches.append(tuple((one.operator.uid, one.name) for own, _ in branches for one in own))
        made = compute_branches(stream, [branch for _, branch in branches])
        for (readers, _), (rows, schema, keys) in zip(branches, made, strict=True):
            for reader, own in zip(readers, keys, strict=True):
                given = make_branch_input(stream, rows, own, self._reporters, reader.name)
                yield reader, replace(given, schema=schema)

    def _make_branch(
        self, stream: RecordStream, readers: Sequence[Reader], common: int
    ) -> Branch | NonRowTransform:
        """Return the branch after the common steps, or the function for which it needs its own scan."""
        first, functions = readers[0], list[Transform]()
        for at, step in enumerate(first.path.steps[common:], start=common + 1):
            assert isinstance(step, TransformNode)
            names = (first.name,)
            functions.append(self._prepare_function(step, first.path.cut_to(at), first.chain, names, stream))
        return Branch.of(stream, functions, self._mark_keys(readers))

    def _mark_entry(self, reader: Reader) -> KeyedEntry:
        of = f"feed {reader.number}"
        return self._logical.counting.mark_entry(reader.operator, reader.entry, reader.chain, of)

    def _mark_keys(self, readers: Sequence[Reader]) -> list[tuple[str, Sequence[Key]]]:
        return [(one.operator.uid, self._mark_entry(one).keys) for one in readers]

    def _read_alike(self, readers: Sequence[Reader]) -> Iterator[tuple[Reader, KeyedInput]]:
        entries, first = [self._mark_entry(one) for one in readers], readers[0]
        stream = self._read_by(entries, first.path, first.chain, (first.name,))
        assert isinstance(stream, RecordStream)
        of_expression = [has_expression(entry) for entry in entries]
        together: list[tuple[bool, Sequence[Reader]]] = [(any(of_expression), readers)]
        if len(set(of_expression)) > 1 and stream.has_kept_times:
            known = list(zip(of_expression, readers, strict=True))
            together = [(kind, [one for own, one in known if own is kind]) for kind in (False, True)]
        for by_expression, own in together:
            frames = find_frames(stream, by_expression=by_expression)
            with_keys, found = compute_keys(frames[0], self._mark_keys(own), stream.origins)
            for reader, keys in zip(own, found, strict=True):
                frames_with_keys = (with_keys, *frames[1:])
                yield reader, make_source_input(stream, frames_with_keys, keys, self._reporters, reader.name)


def plan_records(spark: SparkSession, graph: StreamGraph, node: StreamNode) -> DataFrame:
    return Planner(spark, NO_JOB, shuffle_partitions(spark)).records(graph, node)


def _select_records(stream: PlannedStream) -> DataFrame:
    if isinstance(stream, RecordStream):
        return stream.keep_records().frame.select(*[F.col(quote_name(name)) for name in stream.schema.names])
    frame = stream.select_own_rows().where(F.col(C.KIND) == int(C.Kind.RECORD)).drop(*C.CONTROL, C.TIME)
    for function in stream.transforms:
        frame = apply_transform(frame, function)
    return frame


def _apply_transform(stream: PlannedStream, function: Transform) -> PlannedStream:
    if isinstance(stream, TaggedStream):
        return replace(stream, transforms=(*stream.transforms, function))
    return transform_records(stream, function)


def _find_numbering(stream: PlannedStream) -> Stream:
    is_counted = isinstance(stream, RecordStream) and stream.has_channels
    return Stream.OF_SOURCE if is_counted else Stream.OF_MICRO_BATCH
