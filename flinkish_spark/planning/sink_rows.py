"""The sinks of a plan, the functions before them, and the rows of each sink in a micro-batch."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.plans import (
    AGGREGATES,
    APPEND,
    NotRowByRow,
    Projection,
    Selection,
    layout_of,
    row_plan,
)
from flinkish_spark.contracts.calls import Recording
from flinkish_spark.contracts.sink import Sink
from flinkish_spark.core.arrow_pass import ArrowPass, ComposedWorker, Worker, map_in_arrow, map_in_pass
from flinkish_spark.core.errors import GraphError, SchemaError
from flinkish_spark.planning.logical_plan import LogicalPlan
from flinkish_spark.planning.partitioning import is_partitioning
from flinkish_spark.planning.recorded_functions import RecordedTransform
from flinkish_spark.planning.stream_graph import StreamGraph, StreamNode
from flinkish_spark.planning.transforms import (
    ReadRows,
    RecordFunction,
    RowByRow,
    Transform,
    WorkerPass,
    apply_transform,
    read_functions,
)
from flinkish_spark.protocol.alignment import AnnouncedChannels, ExpectedChannels
from flinkish_spark.protocol.plan_layout import Chain, PlanLayout, source_of
from flinkish_spark.protocol.restore import OperatorShape
from flinkish_spark.protocol.time_plan import TimePlan
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.sink_rows import CONTROL, PACKED, PackBatches, SinkFanOut, UnpackBatches
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.hints import parts_of
from flinkish_spark.types.schemas import check_field_names

#: Identify a record in its stream for a recorded function.
_PLACE = (C.CHANNEL, C.SEQUENCE)
_PLACED = T.StructType([*CONTROL, T.StructField(C.SEQUENCE, T.LongType())])


class _Kind(enum.Enum):
    OF_FRAMES = "OF_FRAMES"
    OF_RECORDS = "OF_RECORDS"
    MOVING = "MOVING"


def plan_functions_before_sink(
    spark: SparkSession, functions: Sequence[Transform], schema: T.StructType, columns: Sequence[str]
) -> tuple[T.StructType, tuple[ReadRows, ...] | None]:
    """Return the fields after functions, and the functions as steps of one pass, or None if impossible."""
    steps: list[ReadRows] = []
    control = _PLACED if _need_places(functions) else CONTROL
    made, runs = schema, [(kind, list(run)) for kind, run in itertools.groupby(functions, _classify)]
    for kind, run in runs:
        given: Sequence[object] = run
        step: ReadRows | None = None
        if kind is _Kind.OF_RECORDS:
            own = [one for one in given if isinstance(one, RecordFunction)]
            step = WorkerPass.of(own, made, columns, control)
            made = step.schema
        elif kind is _Kind.OF_FRAMES:
            made, read = read_functions(spark, run, made, columns)
            check_field_names(made, "the result of a transform")
            step = read if isinstance(read, RowByRow) else None
        if step is None:
            for at, function in enumerate(functions):
                is_after_frames = any(_classify(one) is _Kind.OF_FRAMES for one in functions[:at])
                if isinstance(function, RecordedTransform) and is_after_frames:
                    raise GraphError(
                        f"the {function.does} '{function.settings.name}' follows a transform()",
                        why="a function there moves rows, or looks at several; so its rows cannot be traced "
                        "back to a record",
                        what_to_do="use functions of single records: map(), flat_map(), filter(); or call "
                        f"transform() after the {function.does}",
                    )
            if kind is _Kind.OF_FRAMES and len(runs) == 1:
                # The fields are known; functions are not called more often than needed.
                return made, None
            frame = spark.createDataFrame([], schema)
            for function in functions:
                frame = apply_transform(frame, function)
            return frame.schema, None
        columns = step.outputs
        steps.append(step)
    return made, tuple(steps)


def _need_places(functions: Sequence[object]) -> bool:
    return any(isinstance(function, RecordedTransform) for function in functions)


def _classify(function: Transform) -> _Kind:
    given: object = function
    if isinstance(given, RecordFunction):
        # A function with its own parallelism moves records first, and control rows would have to stay.
        return _Kind.OF_RECORDS if given.settings.parallelism is None else _Kind.MOVING
    return _Kind.MOVING if is_partitioning(given) else _Kind.OF_FRAMES


#: Offset, in bits, between the barrier channels of two parts of a sink; above all unannounced channels.
_PART_BITS = 48


@dataclass(frozen=True)
class SinkPart:
    #: Value of the stream column in the tagged union.
    stream: int
    #: Column of the union for each field, in order.
    columns: tuple[str, ...]
    fields: tuple[str, ...]
    #: Channels whose barriers the sink must see here.
    channels: ExpectedChannels
    #: Transforms between the chain's end and the sink; they run on the evaluated micro-batch.
    transforms: tuple[Transform, ...] = ()
    #: Number of the output of the operator at the chain's end; None if there is only one.
    side: int | None = None
    #: The transforms as one pass, if each looks at single rows; the functions are then not called again.
    one_pass: tuple[ReadRows, ...] | None = None

    @property
    def is_apart(self) -> bool:
        return bool(self.transforms) and self.one_pass is None

    @cached_property
    def is_own(self) -> Column:
        """True for rows of the union that this part takes; it takes barriers of every output."""
        is_own = F.col(C.STREAM) == self.stream
        if self.side is None:
            return is_own
        return is_own & ((F.col(C.KIND) != int(C.Kind.RECORD)) | (F.col(C.SIDE) == self.side))

    @cached_property
    def with_control(self) -> Selection:
        """Control columns, then the fields, as the transforms leave them if they run in one pass."""
        if self.one_pass is None:
            return Selection([*map(F.col, C.SINK_CONTROL), *self._select_own_fields()])
        # Columns need their names here: a map is hashed as JSON, which contains the name.
        last = self.one_pass[-1]
        named = [(own.alias(field.name), field.dataType) for own, field in last.fields]
        hashed = F.xxhash64(*[hashable(own, kind) for own, kind in named])
        is_record = F.col(C.KIND) == int(C.Kind.RECORD)
        own_hash = F.when(is_record, hashed).otherwise(F.col(C.HASH)).alias(C.HASH)
        control = [own_hash if name == C.HASH else F.col(name) for name in C.SINK_CONTROL]
        return Selection([*control, *last.named_fields])

    @property
    def function(self) -> ReadRows | None:
        """The transforms, if they are one step over single records, which needs no places."""
        steps = () if self.one_pass is None or self.needs_places else self.one_pass
        return steps[0] if len(steps) == 1 else None

    @property
    def needs_places(self) -> bool:
        return _need_places(self.transforms)

    @cached_property
    def records_only(self) -> Selection:
        return Selection([*map(F.col, _PLACE if self.needs_places else ()), *self._select_own_fields()])

    def _select_own_fields(self) -> list[Column]:
        return [F.col(quote_name(c)).alias(name) for c, name in zip(self.columns, self.fields, strict=True)]


@dataclass(frozen=True)
class PlannedSink:
    uid: str
    sink: Sink
    #: Fields of the sink's records, after the transforms of each part.
    schema: T.StructType
    #: One part, or several for a union.
    parts: tuple[SinkPart, ...]
    #: Number of reporters in the plan; reports of each further part are numbered after these.
    reporters: int = 0

    @property
    def streams(self) -> tuple[int, ...]:
        return tuple(part.stream for part in self.parts)

    @property
    def channels(self) -> ExpectedChannels:
        if len(self.parts) == 1:
            return self.parts[0].channels
        found: set[int] = set()
        for number, part in enumerate(self.parts):
            # Barriers of unions come from the control source or from operators, which have fixed channels.
            assert not isinstance(part.channels, AnnouncedChannels)
            found |= {_shift_channel(channel, number) for channel in part.channels}
        return frozenset(found)

    @property
    def readings(self) -> int:
        return sum(2 if part.is_apart else 1 for part in self.parts)

    @property
    def rows(self) -> tuple[tuple[int, int | None], ...] | None:
        if any(part.transforms for part in self.parts):
            return None
        return tuple((part.stream, part.side) for part in self.parts)


def _shift_channel(channel: int, number: int) -> int:
    return channel + (number << _PART_BITS)


def hashable(column: Column, kind: T.DataType) -> Column:
    # Spark does not hash VARIANT, nor maps, since equal maps may differ in order.
    has_no_hash = any(isinstance(part, T.MapType | T.VariantType) for part in parts_of(kind))
    return F.to_json(F.struct(column)) if has_no_hash else column


def select_sink_rows(frame: DataFrame, planned: PlannedSink, streams: int) -> DataFrame:
    """Return one sink's rows of a micro-batch: kind, checkpoint, channel, hash, then its fields."""
    if len(planned.parts) == 1:
        return _select_part_rows(frame, planned, planned.parts[0], streams)
    # Each part has barriers on channels from 0 on: add the part's number to distinguish them.
    kind, channel = F.col(C.KIND), F.col(C.CHANNEL)
    is_barrier, is_report = kind == int(C.Kind.BARRIER), kind >= C.FIRST_REPORT
    frames = []
    for number, part in enumerate(planned.parts):
        rows = _select_part_rows(frame, planned, part, streams)
        by = number * planned.reporters
        moved = rows.withColumns(
            {
                C.KIND: F.when(is_report, kind + by).otherwise(kind).cast("int"),
                C.CHANNEL: F.when(is_barrier, channel + _shift_channel(0, number)).otherwise(channel),
            }
        )
        frames.append(moved)
    return reduce(DataFrame.union, frames)


class JoinedRows:
    """Rows of several sinks in one frame, to be staged in one pass."""

    def __init__(self, sinks: Sequence[tuple[PlannedSink, Mapping[str, UnionColumn]]]) -> None:
        parts = [part for planned, _ in sinks for part in planned.parts]
        own = [F.when(part.is_own, F.lit(place)) for place, part in enumerate(parts)]
        # A row with several readers, such as a barrier after side outputs, is repeated for each.
        is_once = len({part.stream for part in parts}) == len(parts)
        sink = F.coalesce(*own) if is_once else F.explode(F.array_compact(F.array(*own)))
        self._owned = Selection([F.col("*"), sink.alias(C.SINK)])
        made: dict[str, Column] = {}
        #: By uid of the sink: the column for each name that its writer reads.
        self.columns: dict[str, dict[str, str]] = {}
        for at, (planned, found) in enumerate(sinks):
            # Sinks of one stream share its columns; a computed column belongs to one sink.
            names = self.columns[planned.uid] = {}
            for name, one in found.items():
                if isinstance(one, str):
                    names[name], made[one] = one, F.col(quote_name(one))
                else:
                    names[name] = f"{C.SINK}_{at}_{name}"
                    made[names[name]] = F.when(F.col(C.SINK) == at, one)
        named = [column.alias(name) for name, column in made.items()]
        self._made = Selection([*map(F.col, C.SINK_CONTROL), *named, F.col(C.SINK)])

    def of(self, frame: DataFrame) -> DataFrame:
        return self._made.of(self._owned.of(frame).where(F.col(C.SINK).isNotNull()))


#: The name of a column of the union of all streams, or an expression over these columns.
UnionColumn = str | Column


def _translate_to_union(
    spark: SparkSession, planned: PlannedSink, columns: Mapping[str, Column]
) -> Mapping[str, UnionColumn] | None:
    """Translate columns over a sink's fields to columns over the union of all streams; None if impossible."""
    # Impossible if the sink does not get rows of the union unchanged, or if Python makes a column.
    if planned.rows is None or len(planned.parts) > 1:
        return None
    given = spark.createDataFrame([], planned.schema)
    made = given.select(*(column.alias(name) for name, column in columns.items()))
    found = row_plan(given, made, planned.parts[0].columns, f"{C.SINK}_")
    if isinstance(found, NotRowByRow):
        return None
    computed = {
        one.name: one.value for step in found.steps if isinstance(step, Projection) for one in step.columns
    }
    return {name: computed.get(output, output) for name, output in zip(columns, found.outputs, strict=True)}


def _select_part_rows(frame: DataFrame, planned: PlannedSink, part: SinkPart, streams: int) -> DataFrame:
    rows = frame if streams == 1 and part.side is None else frame.where(part.is_own)
    if not part.is_apart:
        for step in part.one_pass or ():
            rows = step.apply(rows)
        return part.with_control.of(rows)
    records = part.records_only.of(rows.where(F.col(C.KIND) == int(C.Kind.RECORD)))
    for function in part.transforms:
        records = apply_transform(records, function)
    records = records.drop(*_PLACE)
    if [(f.name, f.dataType) for f in records.schema] != [(f.name, f.dataType) for f in planned.schema]:
        raise SchemaError(
            f"the transform before sink '{planned.uid}' changed its columns while running",
            what_to_do="let transform() return the same columns whenever it is called",
        )
    names = [F.col(quote_name(n)) for n in records.columns]
    hashed = F.xxhash64(*[hashable(c, f.dataType) for c, f in zip(names, records.schema, strict=True)])
    tagged = records.select(
        F.lit(int(C.Kind.RECORD)).alias(C.KIND),
        F.lit(0).cast("long").alias(C.CHECKPOINT),
        F.lit(0).cast("long").alias(C.CHANNEL),
        hashed.alias(C.HASH),
        *names,
    )
    # Barriers, and reports about time.
    control = rows.where(F.col(C.KIND) != int(C.Kind.RECORD)).select(*C.SINK_CONTROL)
    return tagged.unionByName(control, allowMissingColumns=True)


NO_TIME_PLAN = TimePlan()


@dataclass(frozen=True)
class TaggedStream:
    """Output of a keyed operator: records and barriers in one DataFrame, with a column for the kind."""

    frame: DataFrame
    schema: T.StructType
    channels: ExpectedChannels
    #: Transforms that run on the evaluated micro-batch.
    transforms: tuple[Transform, ...] = ()
    #: Columns of the frame with the fields of each output, if the operator has side outputs.
    outputs: tuple[tuple[str, ...], ...] = ()
    #: True for each output whose rows have event times.
    timed: tuple[bool, ...] = ()
    #: Number of this stream's output.
    side: int = 0
    #: The same rows with more columns, made by workers alone; None if Spark computes some of them.
    by_workers: DataFrame | None = None
    #: The source of the records; empty after an operator.
    source: str = ""

    @property
    def times(self) -> list[str]:
        has_times = C.TIME in self.frame.columns and (not self.outputs or self.timed[self.side])
        return [C.TIME] if has_times else []

    def select_own_rows(self) -> DataFrame:
        if not self.outputs:
            return self.frame
        columns = [
            F.col(quote_name(column)).alias(name)
            for column, name in zip(self.outputs[self.side], self.schema.names, strict=True)
        ]
        is_own = (F.col(C.KIND) != int(C.Kind.RECORD)) | (F.col(C.SIDE) == self.side)
        return self.frame.where(is_own).select(*C.CONTROL, *self.times, *columns)


@dataclass(frozen=True)
class SinkWorkers:
    workers: tuple[Worker, ...]
    columns: T.StructType
    #: Whether a worker calls functions of users, which live for a task and not for a batch.
    calls_functions: bool = False


@dataclass(frozen=True)
class DeferredPass:
    """The end of the streaming query, and the workers that make the sinks' rows from it.

    They run in the pass that stages; as a pass of their own, rows would go to the JVM and back.
    """

    frame: DataFrame
    #: Makes the rows of the stream.
    worker: Worker
    sinks: Mapping[str, SinkWorkers]

    def make_rows(self, frame: DataFrame) -> WorkersRows:
        return WorkersRows(frame, self.worker, self.sinks)


@dataclass(frozen=True)
class ReadingSink:
    """A sink whose writer can share a pass, and what it reads there."""

    planned: PlannedSink
    #: By name, over the fields of the sink.
    columns: Mapping[str, Column]
    #: Whether each column is the field of its name.
    reads_fields_alone: bool


@dataclass(frozen=True)
class JoinedByWorkers:
    #: By uid of the sink: the column for each name that its writer reads.
    columns: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class UnionRows:
    """A micro-batch as the union of all streams, from which Spark selects each sink's rows."""

    frame: DataFrame
    streams: int

    def run(self) -> None:
        """Evaluate the micro-batch for no sink."""
        _run(self.frame)

    def keep(self) -> UnionRows:
        """Evaluate the micro-batch once, for several passes."""
        return replace(self, frame=self.frame.persist())

    def release(self) -> None:
        self.frame.unpersist()

    def select_sink(self, sink: PlannedSink) -> DataFrame:
        return select_sink_rows(self.frame, sink, self.streams)

    def join(self, sinks: Sequence[ReadingSink]) -> JoinedRows | None:
        """Return the sinks that Spark can select in one pass; None if there are fewer than two."""
        spark, able = self.frame.sparkSession, list[tuple[PlannedSink, Mapping[str, UnionColumn]]]()
        for sink in sinks:
            columns = _translate_to_union(spark, sink.planned, sink.columns)
            if columns is not None:
                able.append((sink.planned, columns))
        return JoinedRows(able) if len(able) > 1 else None

    def select_joined(self, joined: JoinedRows) -> DataFrame:
        return joined.of(self.frame)


@dataclass(frozen=True)
class WorkersRows:
    frame: DataFrame
    worker: Worker
    sinks: Mapping[str, SinkWorkers]

    def run(self) -> None:
        """Evaluate the micro-batch for no sink."""
        _run(self._pack_rows())

    def keep(self) -> WorkersRows:
        """Evaluate the micro-batch once, for several passes."""
        return replace(self, frame=self._pack_rows().persist(), worker=UnpackBatches())

    def _pack_rows(self) -> DataFrame:
        return map_in_arrow(self.frame, ComposedWorker((self.worker, PackBatches())), PACKED)

    def release(self) -> None:
        self.frame.unpersist()

    def select_sink(self, sink: PlannedSink) -> ArrowPass:
        own = self.sinks[sink.uid]
        return map_in_pass(self.frame, ComposedWorker((self.worker, *own.workers)), own.columns)

    def join(self, sinks: Sequence[ReadingSink]) -> JoinedByWorkers | None:
        """Return the sinks whose rows one pass can make; None if there are fewer than two."""
        able = {
            sink.planned.uid: {name: name for name in sink.columns}
            for sink in sinks
            if sink.reads_fields_alone and not self.sinks[sink.planned.uid].calls_functions
        }
        return JoinedByWorkers(able) if len(able) > 1 else None

    def select_joined(self, joined: JoinedByWorkers) -> ArrowPass:
        """Return rows whose position says to which sink they belong; only another worker can read them."""
        each = SinkFanOut(tuple(ComposedWorker(self.sinks[uid].workers) for uid in joined.columns))
        # No batch has the columns of all sinks, and no batch leaves the pass.
        return map_in_pass(self.frame, ComposedWorker((self.worker, each)), each.columns)


def _run(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


@dataclass(frozen=True)
class PlannedJob:
    """A planned job, for the supervisor: one DataFrame, and the sinks with their parts of its rows."""

    frame: DataFrame
    sinks: tuple[PlannedSink, ...]
    #: Its chains, in the order of the streams.
    chains: tuple[Chain, ...] = ()
    #: Its keyed operators by uid.
    operators: Mapping[str, OperatorShape] = field(default_factory=dict)
    #: Its reporters about time.
    time: TimePlan = NO_TIME_PLAN
    #: Recordings of answers of its functions.
    recordings: tuple[Recording, ...] = ()
    #: Paths that share a scan, each as the operator's uid and the name of its input.
    branches: tuple[tuple[tuple[str, str], ...], ...] = ()
    #: Set if the pass that stages also runs the plan's last pass.
    deferred: DeferredPass | None = None
    #: DataFrame functions that run in the Arrow pass that reads a source.
    in_arrow: frozenset[StreamNode] = frozenset()
    #: The logical plan of which this is the translation.
    logical: LogicalPlan = field(default_factory=lambda: LogicalPlan(StreamGraph()))

    @property
    def read_by(self) -> dict[Chain, tuple[str, ...]]:
        return {
            chain: tuple(sink.uid for sink in self.sinks if stream in sink.streams)
            for stream, chain in enumerate(self.chains)
        }

    @cached_property
    def layout(self) -> PlanLayout:
        return layout_of(self.frame)

    @cached_property
    def output_mode(self) -> str:
        """The output mode of the query: that of Spark's own aggregates, which must have the same."""
        aggregating = {source_of(one.uid) for one in self.layout.natives if one.what in AGGREGATES}
        graph = self.logical.graph
        modes = {node.uid: node.source.output_mode for node in graph.sources}
        modes |= {node.uid: node.output_mode for node in graph.queries}
        by_mode = {mode: uid for uid, mode in modes.items() if uid in aggregating}
        if len(by_mode) > 1:
            raise GraphError(
                f"the aggregates of {' and '.join(map(repr, by_mode.values()))} have different output modes",
                why="a job is one streaming query, and Spark gives a query one output mode",
                what_to_do="give both the same output_mode, or run two jobs",
            )
        return next(iter(by_mode), APPEND)

    #: Fields of each source's records, by its uid.
    read: Mapping[str, T.StructType] = field(default_factory=dict)
