"""From the stream graph to one streaming DataFrame (DESIGN 3).

    sources -> stateless transforms -> union with the barriers -> keyed operators
            -> tagged union of every stream that a sink reads

A barrier is one row of the control source; a keyed operator turns it into one per shuffle
partition. Transforms in front of a keyed operator are part of the streaming plan and see records
only. Transforms behind one run on the evaluated micro-batch, because splitting the operator's
output in the plan would run the operator twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.plan_layout import layout_of, named_chain, named_scan
from flinkish_spark.errors import GraphError
from flinkish_spark.graph.beginning import Beginning
from flinkish_spark.graph.chains import chain_to
from flinkish_spark.graph.declared import check_field_names
from flinkish_spark.graph.keyed_plan import KeyedInput, plan_keyed
from flinkish_spark.graph.python_transforms import RowTransform
from flinkish_spark.graph.record_stream import RecordStream, transform_records, with_times
from flinkish_spark.graph.sink_rows import PlannedSink, Transform, hashable
from flinkish_spark.graph.stream_graph import (
    SideNode,
    SourceNode,
    StreamGraph,
    StreamNode,
    TimedNode,
    TransformNode,
)
from flinkish_spark.graph.times import plan_times, reporters
from flinkish_spark.protocol.alignment import Announced, ExpectedChannels
from flinkish_spark.protocol.restoring import OperatorShape
from flinkish_spark.protocol.scans import Chain, PlanLayout, ScanRole
from flinkish_spark.protocol.time_plan import TimePlan
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.control_source import FORMAT_NAME
from flinkish_spark.runtime.keyed_operator import Origins
from flinkish_spark.sinks.base import Sink

NO_TIME_PLAN = TimePlan()
#: A lineage that no seed was made for.
NOTHING = Beginning()
#: The control source has one channel.
SOURCE_CHANNELS = frozenset({0})


@dataclass(frozen=True)
class TaggedStream:
    """Output of a keyed operator: records and barriers in one DataFrame, told apart by kind.

    Parameters
    ----------
    schema
        Fields of the records.
    transforms
        Wait for the evaluated micro-batch.
    outputs
        Columns of the frame with the fields of each output, if the operator has side outputs.
    side
        Which of them this stream is.
    """

    frame: DataFrame
    schema: T.StructType
    channels: ExpectedChannels
    transforms: tuple[Transform, ...] = ()
    outputs: tuple[tuple[str, ...], ...] = ()
    side: int = 0

    def alone(self) -> DataFrame:
        """Return control columns and the fields of this output under their names, in its rows only."""
        if not self.outputs:
            return self.frame
        columns = [
            F.col(C.quoted(column)).alias(name)
            for column, name in zip(self.outputs[self.side], self.schema.names, strict=True)
        ]
        times = [C.TIME] if C.TIME in self.frame.columns else []
        is_own = (F.col(C.KIND) != int(C.Kind.RECORD)) | (F.col(C.SIDE) == self.side)
        return self.frame.where(is_own).select(*C.CONTROL, *times, *columns)


PlannedStream = RecordStream | TaggedStream


@dataclass(frozen=True)
class PlannedJob:
    """What the supervisor starts: one DataFrame and who takes which rows of it.

    Parameters
    ----------
    chains
        What it runs, in the order of the streams.
    operators
        The keyed operators in it by uid.
    time
        Who in it reports about time.
    """

    frame: DataFrame
    sinks: tuple[PlannedSink, ...]
    chains: tuple[Chain, ...] = ()
    operators: Mapping[str, OperatorShape] = field(default_factory=dict)
    time: TimePlan = NO_TIME_PLAN

    def layout(self) -> PlanLayout:
        """Return names for Spark's lists of sources and operators; asks the JVM for every node."""
        return layout_of(self.frame)


@dataclass(frozen=True)
class _Base:
    """A part of the tagged union: the end of a chain."""

    chain: Chain
    stream: TaggedStream


class Planner:
    """Plans each node once, however many sinks read it.

    Parameters
    ----------
    control_path
        File of the control source.
    partitions
        Spark's shuffle partitions, which are fixed for the life of the job's state.
    beginning
        What the live lineage began with.
    graph
        For whoever plans single nodes.
    """

    def __init__(
        self,
        spark: SparkSession,
        control_path: str,
        partitions: int,
        beginning: Beginning = NOTHING,
        graph: StreamGraph | None = None,
    ) -> None:
        self._spark = spark
        self._beginning = beginning
        self._control_path = control_path
        self._partitions = partitions
        control = spark.readStream.format(FORMAT_NAME).option("path", control_path).load()
        self._barriers = control.select(*C.CONTROL)
        self._has_one_source = False
        self._planned: dict[tuple[int, str], PlannedStream] = {}
        self._operators: dict[str, OperatorShape] = {}
        self._graph = graph or StreamGraph()

    def plan(self, graph: StreamGraph) -> PlannedJob:
        """Return the plan of the whole job."""
        # Several sources would each put a barrier into the micro-batch for which *they* saw the trigger.
        self._graph = graph
        self._has_one_source = len(graph.sources) == 1 and not graph.sources[0].source.has_side_outputs
        bases: list[_Base] = []
        sinks: list[PlannedSink] = []
        for node in graph.sinks:
            chain = chain_to(graph, node.parent)
            self._add_sink(bases, sinks, node.uid, node.sink, self.stream(node.parent, chain), chain)
        for source in graph.sources:
            for uid in source.source.side_uids(source.uid):
                chain = Chain(source.uid, (), (uid,))
                moved = self._beginning.positioned(source, chain)
                for side in moved.side_outputs(self._spark, source.uid, self._control_path):
                    letters = RecordStream(source.uid, side.frame, Origins(), self._barriers, SOURCE_CHANNELS)
                    self._add_sink(bases, sinks, side.uid, side.sink, letters, chain)
        union: DataFrame | None = None
        for index, base in enumerate(bases):
            part = named_chain(_tag(base.stream, index), base.chain)
            union = part if union is None else union.unionByName(part, allowMissingColumns=True)
        assert union is not None
        time = plan_times(graph, lambda node, chain: self.stream(node, chain))
        return PlannedJob(union, tuple(sinks), tuple(base.chain for base in bases), self._operators, time)

    def stream(self, node: StreamNode, chain: Chain) -> PlannedStream:
        """Return the plan of one node as a part of `chain`; chains that begin alike share it."""
        known = id(node), self._beginning.label(chain)
        if known not in self._planned:
            self._planned[known] = self._plan_node(node, chain)
        return self._planned[known]

    def _plan_node(self, node: StreamNode, chain: Chain) -> PlannedStream:
        if isinstance(node, SourceNode):
            stream = self._plan_source(node, chain)
            check_field_names(stream.schema, f"the source '{node.uid}'")
            return stream
        if isinstance(node, TransformNode):
            parent = self.stream(node.parent, chain)
            if isinstance(parent, TaggedStream):
                return replace(parent, transforms=(*parent.transforms, node.function))
            function = node.function
            if isinstance(function, RowTransform):
                function = function.located(parent.origins)
            return transform_records(parent, function)
        if isinstance(node, TimedNode):
            parent = self.stream(node.parent, chain)
            assert isinstance(parent, RecordStream), "refused where it was declared"
            return with_times(parent, node.strategy)
        if isinstance(node, SideNode):
            main = self.stream(node.parent, chain)
            assert isinstance(main, TaggedStream)
            number = 1 + self._graph.sides_of(node.parent).index(node)
            return replace(main, schema=node.output, side=number)
        parent = self.stream(node.parent, chain)
        if isinstance(parent, TaggedStream) and parent.transforms:
            raise GraphError(
                f"operator '{node.uid}' follows a transform() behind another keyed operator",
                why="a transform behind a keyed operator runs on the evaluated micro-batch",
                what_to_do="move the transform into the function of the operator before it",
            )
        numbers = [one.uid for one in reporters(self._graph)]
        reports_as = None
        if isinstance(parent, RecordStream):
            if C.TIME in parent.records.columns:
                reports_as = numbers.index(parent.source)
            frames: tuple[DataFrame, ...] = (parent.records, parent.barriers)
            if parent.marked is not None and all(isinstance(key, str) for key in node.keys):
                # An expression of the user's must not see barriers, which have no fields.
                frames = (parent.marked,)
            given = KeyedInput(frames, parent.schema, parent.channels, parent.origins, parent.source)
        else:
            given = KeyedInput((parent.alone(),), parent.schema, parent.channels, Origins())
        given = replace(
            given,
            seed=self._beginning.state_of(self._spark, node.uid, chain),
            number=numbers.index(node.uid),
            reports_as=reports_as,
        )
        planned = plan_keyed(node, given, self._partitions, self._graph.sides_of(node))
        self._operators[node.uid] = OperatorShape(node.max_parallelism, planned.key_types)
        outputs = planned.outputs if len(planned.outputs) > 1 else ()
        channels = frozenset(range(self._partitions))
        return TaggedStream(planned.frame, planned.schema, channels, outputs=outputs)

    def _plan_source(self, node: SourceNode, chain: Chain) -> RecordStream:
        origins = Origins(node.source.topics)
        source, marked = self._beginning.positioned(node, chain), None
        if self._graph.needs_own_time(node):
            source = source.with_own_time() or source
        if self._has_one_source:
            marked = source.load_marked(self._spark, self._control_path)
        if marked is None:
            records = source.load(self._spark, self._control_path)
            has_channels = source.has_channels
            return RecordStream(
                node.uid, records, origins, self._barriers, SOURCE_CHANNELS, None, has_channels
            )
        is_record = F.col(C.KIND) == int(C.Kind.RECORD)
        return RecordStream(
            node.uid,
            marked.where(is_record).drop(C.KIND, C.CHECKPOINT),
            origins,
            marked.where(~is_record).select(*C.CONTROL),
            Announced.ANNOUNCED,
            marked,
        )

    @staticmethod
    def _with_barriers(stream: RecordStream) -> DataFrame:
        fields = [F.col(C.quoted(name)) for name in stream.schema.names]
        if stream.marked is not None:
            marked = stream.marked.select(*C.CONTROL, *fields)
            return named_scan(marked, ScanRole.RECORDS, stream.source)
        records = stream.records.select(
            F.lit(int(C.Kind.RECORD)).alias(C.KIND),
            F.lit(0).cast("long").alias(C.CHECKPOINT),
            C.CHANNEL,
            C.SEQUENCE,
            *fields,
        )
        named = named_scan(records, ScanRole.RECORDS, stream.source)
        return named.unionByName(named_scan(stream.barriers, ScanRole.BARRIERS), allowMissingColumns=True)

    def _add_sink(
        self,
        bases: list[_Base],
        sinks: list[PlannedSink],
        uid: str,
        sink: Sink,
        stream: PlannedStream,
        chain: Chain,
    ) -> None:
        tagged = stream
        if isinstance(tagged, RecordStream):
            tagged = TaggedStream(self._with_barriers(tagged), tagged.schema, tagged.channels)
        index = next((i for i, base in enumerate(bases) if base.chain == chain), len(bases))
        if index == len(bases):
            bases.append(_Base(chain, replace(tagged, transforms=())))
        schema = self._schema_after(tagged) if tagged.transforms else tagged.schema
        fields = tuple(tagged.schema.names)
        places = _fields(tagged)
        own = tagged.outputs[tagged.side] if tagged.outputs else fields
        columns = tuple(f"s{index}_{places.index(name)}" for name in own)
        side = tagged.side if tagged.outputs else None
        sinks.append(
            PlannedSink(uid, sink, index, columns, fields, schema, tagged.channels, tagged.transforms, side)
        )

    def _schema_after(self, stream: TaggedStream) -> T.StructType:
        probe = self._spark.createDataFrame([], stream.schema)
        for function in stream.transforms:
            probe = function(probe)
        check_field_names(probe.schema, "the result of a transform")
        return probe.schema


def plan_records(spark: SparkSession, graph: StreamGraph, node: StreamNode) -> DataFrame:
    """Return a node's records as a plain streaming DataFrame, outside of any checkpoint."""
    from flinkish_spark.runtime.control_source import ControlSource

    spark.dataSource.register(ControlSource)
    partitions = int(spark.conf.get("spark.sql.shuffle.partitions") or 200)
    chain = chain_to(graph, node)
    stream = Planner(spark, "/nonexistent/no-control", partitions, graph=graph).stream(node, chain)
    if isinstance(stream, RecordStream):
        return stream.records.select(*[F.col(C.quoted(name)) for name in stream.schema.names])
    frame = stream.alone().where(F.col(C.KIND) == int(C.Kind.RECORD)).drop(*C.CONTROL, C.TIME)
    for function in stream.transforms:
        frame = function(frame)
    return frame


def _fields(stream: TaggedStream) -> list[str]:
    """Return the columns of a stream's frame that hold fields, of all of its outputs."""
    control = {*C.CONTROL, C.SIDE, C.TIME}
    return [name for name in stream.frame.columns if name not in control]


def _tag(stream: TaggedStream, index: int) -> DataFrame:
    """Give a stream's columns names of their own in the union, and each record its hash."""
    names = _fields(stream)
    columns = [F.col(C.quoted(name)) for name in names]
    types = stream.frame.schema
    hashed = F.xxhash64(*[hashable(c, types[n].dataType) for c, n in zip(columns, names, strict=True)])
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    return stream.frame.select(
        C.KIND,
        C.CHECKPOINT,
        C.CHANNEL,
        # The second number of a report; of a barrier nobody reads it.
        F.when(is_record, hashed).otherwise(F.col(C.SEQUENCE)).alias(C.HASH),
        F.lit(index).alias(C.STREAM),
        *([C.SIDE] if stream.outputs else []),
        *[column.alias(f"s{index}_{i}") for i, column in enumerate(columns)],
    )
