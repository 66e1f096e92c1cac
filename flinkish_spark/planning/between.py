"""Functions between a source and a keyed operator, and between two keyed operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.plans import APPEND, calls_python, native_parts, why_not_streamed
from flinkish_spark.bridge.session import streaming_sources
from flinkish_spark.core.arrow_pass import ComposedWorker, Worker, map_in_arrow
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.functions.watermark_strategy import WatermarkStrategy
from flinkish_spark.planning.declare import KeyPart, check_same_fields, make_key_workers
from flinkish_spark.planning.partitioning import CustomPartitioning, Rebalance, is_partitioning
from flinkish_spark.planning.sink_rows import TaggedStream
from flinkish_spark.planning.stream_graph import (
    Input,
    Key,
    KeyedNode,
    Path,
    Step,
    StreamGraph,
    TransformNode,
    Upstream,
    find_operator,
    find_upstreams,
)
from flinkish_spark.planning.times import find_time_column, make_time_column
from flinkish_spark.planning.transforms import (
    NonRowTransform,
    RecordFunction,
    RowByRow,
    Transform,
    WorkerPass,
    apply_transform,
    chain_workers,
    describe_function,
    find_fields,
    find_frame_function,
    read_functions,
    read_functions_over,
)
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.protocol.job_graph import ChainingStrategy
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.branches import ORIGIN, InputPath, InputPaths, ParallelWorkers
from flinkish_spark.transport.columns import Origins, add_position
from flinkish_spark.transport.routes import InputRecords
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.schemas import PREFIX, check_field_names, nullable
from flinkish_spark.worker.functions import TimeStage
from flinkish_spark.worker.time import (
    ControlRowBypass,
    DroppedTimesKeeper,
    TimeRowFilter,
    TimestampsFromColumn,
)

_ORIGIN = T.StructField(ORIGIN, T.LongType())


@dataclass(frozen=True, eq=False)
class SharedRows:
    #: The same object for all inputs in it.
    frame: DataFrame
    #: Selects the records of this input.
    own: InputRecords
    #: Pairs of a column here and its name in the user's expressions and in the shuffled rows.
    columns: tuple[tuple[str, str], ...]
    #: Column with the place of a record in its source; null in a dropped record, which only carries its
    #: event time.
    place: str = C.SEQUENCE

    @property
    def named(self) -> list[Column]:
        return [F.col(quote_name(own)).alias(known) for own, known in self.columns]


def find_functions_between(uid: str, functions: Sequence[object]) -> tuple[RecordFunction, ...]:
    """Return the functions between two operators; moves have no effect, since the operator shuffles again."""
    found = [function for function in functions if not is_partitioning(function)]
    known = tuple(function for function in found if isinstance(function, RecordFunction))
    if len(known) < len(found):
        raise GraphError(
            f"a transform() stands between the keyed operator '{uid}' and an earlier one",
            why="several paths lead from one operator to another here, and one DataFrame has the rows of all "
            "paths; a transform() must then be the first function of a path of its own",
            what_to_do="call it before the other functions of its path, and not before a union(); or use "
            "functions of single records: map(), flat_map(), filter(), process()",
        )
    return known


def check_tasks_between(graph: StreamGraph, tasks: int) -> None:
    """Refuse settings of tasks that functions between two keyed operators cannot have."""
    for node in graph.operators:
        for upstream in find_upstreams(node):
            if find_operator(upstream.base) is not None:
                for path in upstream.paths:
                    _check_tasks(graph, node.uid, path, tasks)


def _check_tasks(graph: StreamGraph, uid: str, path: Path, tasks: int) -> None:
    moved, where_run = "", "functions between keyed operators run in the tasks of the first operator"
    for step in path.steps:
        function: object = step.function if isinstance(step, TransformNode) else None
        if isinstance(function, CustomPartitioning):
            moved = "partition_custom()"
        elif is_partitioning(function):
            moved = "global_()" if function == Rebalance(1) else ""
        if not isinstance(function, RecordFunction):
            continue
        name = function.settings.name
        where = f"'{name}' stands between the keyed operator '{uid}' and an earlier one"
        if graph.find_chaining(step) is not ChainingStrategy.ALWAYS:
            raise GraphError(
                f"{where}, and was told to have tasks of its own (start_new_chain, disable_chaining)",
                why=where_run,
                what_to_do="leave that call out; or call the function before the first keyed operator, or "
                "after the last one",
            )
        if moved:
            raise GraphError(
                f"{where}, and {moved} before it would move its records to other tasks",
                why=where_run,
                what_to_do=f"leave {moved} out; or call key_by() with a key that brings these records "
                "together, and make the function a keyed one",
            )
        if function.settings.parallelism not in (None, tasks):
            raise ConfigError(
                f"{where}, and set_parallelism({function.settings.parallelism}) was called on it",
                why=f"{where_run}, which has {tasks}",
                what_to_do=f"leave it out, or say {tasks}",
            )


def is_read_plainly(uid: str, upstream: Upstream) -> bool:
    found = [_find_functions(uid, path) for path in upstream.paths]
    return len(found) == 1 and not found[0]


def make_worker_between(uid: str, input_: Input, given: T.StructType) -> tuple[Worker | None, T.StructType]:
    if len(input_.paths) == 1:
        (path,) = input_.paths
        workers, made = chain_workers(_find_functions(uid, path), given)
        return (ComposedWorker(workers), made) if workers else (None, made)
    numbered = T.StructType([*given, _ORIGIN])
    made_on = [chain_workers(_find_functions(uid, path), numbered) for path in input_.paths]
    first = find_fields(made_on[0][1])
    for _, made in made_on[1:]:
        check_same_fields(first, find_fields(made), f"operator '{uid}'")
    control = [field for field in given if field.name.startswith(PREFIX)]
    columns = T.StructType([*control, *first])
    return ParallelWorkers(tuple(ComposedWorker(workers) for workers, _ in made_on), columns), columns


def share_inputs(
    node: KeyedNode, inputs: Sequence[Input], streams: Sequence[TaggedStream], passing: Sequence[TaggedStream]
) -> list[tuple[SharedRows, T.StructType, tuple[KeyPart, ...]]]:
    frame_of_all = (*streams, *passing)[0]
    frame = frame_of_all.frame
    control = T.StructType([f for f in frame.schema if f.name in (*C.CONTROL, C.TIME)])
    beside = T.StructType([field for field in control if field.name not in (C.KIND, C.CHECKPOINT)])
    dealt, keys = list[InputPath](), list[tuple[KeyPart, ...]]()
    for number, (input_, stream) in enumerate(zip(inputs, streams, strict=True)):
        schema, columns, place = stream.schema, _find_output_columns(stream), C.SEQUENCE
        frames, rest = _split_leading_frames(input_)
        if frames:
            schema, read = read_functions(frame.sparkSession, frames, schema, columns)
            if isinstance(read, NonRowTransform):
                raise _not_row_by_row(node.uid, read)
            check_field_names(schema, "the result of a transform")
            place = f"{PREFIX}way{number}_place"
            columns = tuple(f"{PREFIX}way{number}_in{at}" for at in range(len(schema)))
            marked = frame.withColumn(place, F.when(_is_record_of(stream), F.col(C.SEQUENCE)))
            frame = read.append_columns(marked, place, columns)
        given = T.StructType([*beside, *schema])
        worker, made = make_worker_between(node.uid, rest, given)
        reader = node.uid, node.entries[input_.entry].keys
        of_keys, made, (own,) = make_key_workers(made, [reader], Origins())
        workers: tuple[Worker, ...] = of_keys if worker is None else (worker, *of_keys)
        taken = T.StructType([one for one in made if one.name not in beside.names])
        names = tuple(f"{PREFIX}way{number}_{at}" for at in range(len(taken)))
        dealt.append(InputPath(stream.side, columns, given, ComposedWorker(workers), taken, names, place))
        keys.append(own)
    for number, stream in enumerate(passing, start=len(dealt)):
        names = tuple(f"{PREFIX}way{number}_{at}" for at in range(len(stream.schema)))
        given = T.StructType([*beside, *stream.schema])
        columns = _find_output_columns(stream)
        dealt.append(InputPath(stream.side, columns, given, ComposedWorker(()), stream.schema, names))
        keys.append(())
    has_expressions = any(isinstance(key, Column) for own in keys for key in own)
    rows = _deal_rows(replace(frame_of_all, frame=frame), dealt, control, has_expressions)
    return [(own, find_fields(one.made), key) for own, one, key in zip(rows, dealt, keys, strict=True)]


def _find_output_columns(stream: TaggedStream) -> tuple[str, ...]:
    return stream.outputs[stream.side] if stream.outputs else tuple(stream.schema.names)


def _split_leading_frames(input_: Input) -> tuple[list[Transform], Input]:
    """Return the DataFrame functions with which an input's only path begins, and the input after them."""
    path, *others = input_.paths
    if others or all(find_frame_function(step) is None for step in path.steps):
        return [], input_
    steps = [
        step
        for step in path.steps
        if not (isinstance(step, TransformNode) and is_partitioning(step.function))
    ]
    frames = [function for step in steps if (function := find_frame_function(step)) is not None]
    behind = next((at for at, step in enumerate(steps) if find_frame_function(step) is None), len(steps))
    return frames[:behind], replace(input_, paths=(replace(path, steps=tuple(steps[behind:])),))


def _is_record_of(stream: TaggedStream) -> Column:
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    return is_record & (F.col(C.SIDE) == stream.side) if stream.outputs else is_record


def _deal_rows(
    stream: TaggedStream, inputs: Sequence[InputPath], control: T.StructType, has_expressions: bool
) -> list[SharedRows]:
    if any(one.worker.workers for one in inputs):
        return _deal_in_workers(stream.frame, tuple(map(_hide_dropped_rows, inputs)), control)
    frame, columns = stream.frame, [one.columns for one in inputs]
    if has_expressions:
        # A user's expression names the fields of its own path, so the columns here need other names.
        own = [
            F.col(quote_name(column)).alias(name)
            for one in inputs
            for column, name in zip(one.columns, one.names, strict=True)
        ]
        sides = [C.SIDE] if stream.outputs else []
        places = dict.fromkeys(one.place for one in inputs if one.place != C.SEQUENCE)
        frame = frame.select(*control.names, *sides, *places, *own)
        columns = [one.names for one in inputs]
    found = []
    for one, names in zip(inputs, columns, strict=True):
        owned = InputRecords(side=one.side if stream.outputs else None, place=one.place)
        found.append(SharedRows(frame, owned, tuple(zip(names, one.made.names, strict=True))))
    return found


def _deal_in_workers(
    frame: DataFrame, inputs: tuple[InputPath, ...], control: T.StructType
) -> list[SharedRows]:
    deal = InputPaths(inputs, control)
    made = map_in_arrow(frame, deal, deal.columns)
    return [
        SharedRows(made, InputRecords(number), tuple(zip(one.names, one.made.names, strict=True)))
        for number, one in enumerate(inputs)
    ]


def _hide_dropped_rows(one: InputPath) -> InputPath:
    """Return an input whose worker does not see records that DataFrame functions have dropped."""
    if one.place == C.SEQUENCE:
        return one
    return replace(one, worker=ComposedWorker((TimeRowFilter(), *one.worker.workers)))


def _find_functions(uid: str, path: Path) -> tuple[RecordFunction, ...]:
    return find_functions_between(uid, [one.function for one in path.steps if isinstance(one, TransformNode)])


def apply_frame_prefix(uid: str, upstream: Upstream, stream: TaggedStream) -> tuple[TaggedStream, Upstream]:
    """Apply the only path up to its last DataFrame function; return the stream then, and the rest."""
    # With several paths, a filter on one would drop rows of another, so nothing is applied here.
    path, *others = upstream.paths
    steps = path.steps
    last = max((at for at, step in enumerate(steps) if find_frame_function(step) is not None), default=None)
    if others or last is None:
        return stream, upstream
    (input_,) = upstream.inputs
    rest = replace(input_, paths=(replace(path, steps=steps[last + 1 :]),))
    return _apply_steps(uid, steps[: last + 1], stream), Upstream((rest,))


def _apply_steps(uid: str, steps: Sequence[Step], stream: TaggedStream) -> TaggedStream:
    made = TaggedStream(stream.select_own_rows(), stream.schema, stream.channels)
    functions: list[Any] = []
    for step in steps:
        assert isinstance(step, TransformNode), "refused where it was declared"
        if not is_partitioning(step.function):
            functions.append(step.function)
    for is_of_records, run in groupby(functions, lambda function: isinstance(function, RecordFunction)):
        own = list(run)
        made = _apply_record_functions(made, own) if is_of_records else _apply_frame_functions(uid, made, own)
    return made


def _apply_frame_functions(uid: str, stream: TaggedStream, functions: Sequence[Transform]) -> TaggedStream:
    frame = stream.frame
    schema, found = read_functions(frame.sparkSession, functions, stream.schema, stream.schema.names)
    if isinstance(found, NonRowTransform):
        raise _not_row_by_row(uid, found)
    check_field_names(schema, "the result of a transform")
    control = [field.name for field in _find_control_columns(stream)]
    return replace(stream, frame=found.apply(frame).select(*control, *found.named_fields), schema=schema)


def _not_row_by_row(uid: str, found: NonRowTransform) -> GraphError:
    return GraphError(
        f"the transform() {describe_function(found.function)} stands between the keyed operator '{uid}' and "
        f"an earlier one, and does more than look at single rows: it contains {found.what}",
        why="barriers are rows between the records, and pass only selections, computed columns and filters",
        what_to_do="use select, withColumn, where and drop; or functions of single records: map(), "
        "flat_map(), filter(), process(); or do it in one of the two operators",
    )


def _apply_record_functions(stream: TaggedStream, functions: Sequence[RecordFunction]) -> TaggedStream:
    control = _find_control_columns(stream)
    found = WorkerPass.of(functions, stream.schema, stream.schema.names, T.StructType(control))
    own = [column.alias(field.name) for column, field in found.fields]
    frame = found.apply(stream.frame).select(*(field.name for field in control), *own)
    return replace(stream, frame=frame, schema=found.schema)


def _find_control_columns(stream: TaggedStream) -> list[T.StructField]:
    return [field for field in stream.frame.schema if field.name in (*C.CONTROL, C.TIME)]


# ----------------------------------------------------------------------------------------------------------
# Records of a source on their way to the first keyed operator, and the functions applied to them.


class ControlRowError(Exception):
    """A step cannot pass control rows on; the planner plans the source again with control rows apart."""


@dataclass(frozen=True)
class RecordStream:
    """Records of a source: their fields, channel and sequence."""

    source: str
    #: If marked, it contains the source's control rows too, and has the columns kind and checkpoint.
    frame: DataFrame
    origins: Origins
    #: Returns the barriers, as control columns, for records that are not marked.
    barriers: Callable[[], DataFrame]
    #: The channels on which each barrier arrives.
    channels: ExpectedChannels
    is_marked: bool = False
    #: True if the records' channels are the source's. After a transform that selected its own columns they
    #: are Spark's input partitions, which differ between micro-batches.
    has_channels: bool = True
    #: True if later rows replace earlier ones: aggregates of Spark's in update mode.
    is_updated: bool = False
    #: True if a watermark strategy has assigned event times.
    is_timed: bool = False
    #: True if dropped records are still there as rows with an event time only; see `worker/time.py`.
    has_kept_times: bool = False
    #: Fields of the records, if some columns of the frame are nullable for control rows only.
    fields: T.StructType | None = None

    @property
    def schema(self) -> T.StructType:
        if self.fields is not None:
            return self.fields
        return T.StructType([f for f in self.frame.schema if not f.name.startswith(PREFIX)])

    def keep_records(self) -> RecordStream:
        """Return the stream without the event times of dropped records."""
        if not self.has_kept_times:
            return self
        is_kept = F.col(C.SEQUENCE).isNotNull()
        if self.is_marked:
            is_kept |= F.col(C.KIND) != int(C.Kind.RECORD)
        return replace(self, frame=self.frame.where(is_kept), has_kept_times=False)


def transform_records(stream: RecordStream, function: Transform) -> RecordStream:
    """Apply a function to a stream; raise ControlRowError if control rows cannot pass it."""
    given: object = function
    if isinstance(given, RecordFunction):
        return _apply_record_function(stream, given)
    if is_partitioning(function):
        if stream.is_marked:
            raise ControlRowError
        # Rows of dropped records, which are event times only, move too.
        return replace(stream, frame=function(stream.frame))
    # The function sees fields only, so it cannot lose times and places.
    names = stream.schema.names
    fields = stream.frame.select(*[F.col(quote_name(name)) for name in names])
    _, found = read_functions_over(fields, [function], names)
    if isinstance(found, NonRowTransform):
        return _apply_frame_function(stream, function)
    check_field_names(found.schema, "the result of a transform")
    # A dropped record with an event time leaves that time.
    keeps_times = stream.is_timed and (found.drops or stream.has_kept_times)
    frame = found.select_in_arrow(stream.frame, keeps_times=keeps_times)
    if frame is None and keeps_times:
        frame = found.keep_times(stream.frame)
    elif frame is None and stream.is_marked:
        control = [name for name in stream.frame.columns if name.startswith(PREFIX)]
        frame = found.apply(stream.frame).select(*control, *found.named_fields)
    elif frame is None:
        # Every row is a record, so fields that are not nullable stay so.
        frame = found.select_records(stream.frame)
    made = found.schema if stream.is_marked else None
    return replace(stream, frame=frame, has_kept_times=keeps_times, fields=made)


def _apply_record_function(stream: RecordStream, function: RecordFunction) -> RecordStream:
    stream = stream if stream.is_timed else stream.keep_records()
    kept = function.keep_times() if stream.is_timed else function
    if not stream.is_marked:
        return replace(stream, frame=kept(stream.frame), has_kept_times=stream.is_timed)
    if kept.settings.parallelism is not None:
        raise ControlRowError
    worker, made = kept.make_wrapped_worker(stream.frame.schema)
    passing = ControlRowBypass(worker, made)
    frame = map_in_arrow(stream.frame, passing, passing.columns, kept.settings.resources)
    return replace(stream, frame=frame, has_kept_times=stream.is_timed, fields=find_fields(made))


def _apply_frame_function(stream: RecordStream, function: Transform) -> RecordStream:
    """Apply a DataFrame function that does more than look at single rows."""
    if stream.is_marked:
        raise ControlRowError
    stream = stream.keep_records()
    given = stream.frame
    if _has_native_state(stream, function):
        # With a place in its source each row would differ from all others.
        given = given.select(*[F.col(quote_name(name)) for name in stream.schema.names])
    records = apply_transform(given, function)
    lost = {C.TIME, C.MARK} & (set(stream.frame.columns) - set(records.columns))
    if lost:
        raise GraphError(
            "a transform dropped the event times of its records",
            why="it selected its own columns after assign_timestamps_and_watermarks()",
            what_to_do="call assign_timestamps_and_watermarks() after the transform, or add and drop single "
            "columns in it: withColumn(...), drop(...)",
        )
    if C.CHANNEL in records.columns and C.SEQUENCE in records.columns:
        return replace(stream, frame=records)
    # The function selected its own columns. A narrow transform keeps the order of rows within Spark's
    # input partition, so the position in the partition replaces the offset.
    return replace(stream, frame=add_position(records), origins=Origins(), has_channels=False)


def _has_native_state(stream: RecordStream, function: Transform) -> bool:
    """Return whether Spark keeps state for a DataFrame function; refuse one that Spark cannot stream."""
    made = try_functions(stream.frame.sparkSession, stream.schema, [function])
    added, below = native_parts(made), native_parts(stream.frame)
    name = describe_function(function)
    if len(streaming_sources(made)) > 1:
        raise GraphError(
            f"{name} of transform() brings another stream",
            why="nobody has checked whether that stream can be replayed",
            what_to_do="put the two DataFrames together first, and give the result to from_dataframe()",
        )
    why = why_not_streamed(made, added, APPEND)
    if why:
        raise GraphError(
            f"Spark cannot run {name} of transform() in a streaming query",
            why=why,
            what_to_do="give an aggregate a window and a watermark; or build the query with from_dataframe() "
            "and output_mode='update'",
        )
    is_second = below.states and (added.states or added.has_watermark)
    if is_second or (below.has_watermark and added.has_watermark) or (added.states and stream.is_updated):
        raise GraphError(
            f"{name} of transform() has state or a watermark, and so has a part of the query before it",
            why="Spark checks a query as a whole, and sees only one of the two parts here",
            what_to_do="write both parts as one DataFrame, and give it to from_dataframe()",
        )
    return bool(added.states)


def try_functions(spark: SparkSession, schema: T.StructType, functions: Sequence[Transform]) -> DataFrame:
    """Return the result of DataFrame functions over another stream with the same fields."""
    # Places of records may be computed by what Spark refuses in a query with state.
    fields = [F.lit(None).cast(one.dataType).alias(one.name, metadata=one.metadata) for one in schema]
    made = spark.readStream.format("rate").load().select(*fields)
    for function in functions:
        made = apply_transform(made, function)
    return made


def assign_times(stream: RecordStream, strategy: WatermarkStrategy) -> RecordStream:
    """Assign each record an event time in milliseconds, from a column, an expression or a function."""
    stream = replace(stream.keep_records(), is_timed=True)
    frame, assigner = stream.frame, strategy.timestamps
    plain = frame.drop(C.MARK) if C.MARK in frame.columns else frame
    if isinstance(assigner, Column):
        time = make_time_column(plain, assigner)
        if stream.is_marked:
            if calls_python(plain, time):
                # Spark calls Python for all rows, whatever condition stands around the call.
                raise ControlRowError
            # A user's expression must not see barriers, which have no fields.
            time = F.when(F.col(C.KIND) == int(C.Kind.RECORD), time)
        stream = replace(stream, frame=plain.withColumn(C.TIME, time))
    elif assigner is None or isinstance(assigner, str):
        take = TimestampsFromColumn(find_time_column(plain, assigner))
        # Adding a time to the columns of a source does not change them.
        timed = C.map_records(plain, take, take.columns(plain.schema))
        stream = replace(stream, frame=timed)
    function = None if assigner is None or isinstance(assigner, str | Column) else assigner
    if strategy.generator is None and function is None:
        return stream
    timed = plain if function is not None else stream.frame
    stage = TimeStage(function, strategy.generator, stream.source, stream.origins)
    columns = stage.columns(timed.schema)
    if not stream.is_marked:
        return replace(stream, frame=map_in_arrow(timed, stage, columns))
    passing = ControlRowBypass(stage, columns)
    return replace(stream, frame=map_in_arrow(timed, passing, passing.columns))


# ----------------------------------------------------------------------------------------------------------
# Paths from one scan of a source into several operators: one pass runs the functions of all paths.


#: Control columns that accompany the fields of a record.
_BESIDE = (C.CHANNEL, C.SEQUENCE, C.TIME, C.MARK)


@dataclass(frozen=True, eq=False)
class Branch:
    """The end of a path from a source, after the steps that it shares with other paths."""

    #: The effect of its DataFrame functions on each record; None if it has none.
    read: RowByRow | None
    #: Its functions of single records, which come after the DataFrame functions.
    functions: tuple[RecordFunction, ...]
    #: Uid and keys of each operator that reads it.
    readers: tuple[tuple[str, Sequence[Key]], ...]

    @classmethod
    def of(
        cls,
        stream: RecordStream,
        functions: Sequence[Transform],
        readers: Sequence[tuple[str, Sequence[Key]]],
    ) -> Branch | NonRowTransform:
        given: Sequence[object] = functions
        records = tuple(one for one in given if isinstance(one, RecordFunction))
        frames = functions[: len(functions) - len(records)]
        if not frames:
            return cls(None, records, tuple(readers))
        fields = stream.frame.select(*[F.col(quote_name(name)) for name in stream.schema.names])
        _, read = read_functions_over(fields, frames, _name_columns(stream))
        if isinstance(read, NonRowTransform):
            return read
        check_field_names(read.schema, "the result of a transform")
        return cls(read, records, tuple(readers))


def compute_branches(
    stream: RecordStream, branches: Sequence[Branch]
) -> list[tuple[SharedRows, T.StructType, list[tuple[KeyPart, ...]]]]:
    """Compute the branches of a stream in one frame; return rows, fields and keys of each."""
    # If any branch has Python functions, InputPaths runs those of all branches in one worker per task;
    # else Spark computes the fields of all branches in columns of their own.
    beside = nullable(one for one in stream.frame.schema if one.name in _BESIDE)
    stem = zip(stream.schema.names, _name_columns(stream), strict=True)
    frame = stream.frame.select(
        *beside.names, *[F.col(quote_name(field)).alias(name) for field, name in stem]
    )
    dealt, keys = list[InputPath](), list[list[tuple[KeyPart, ...]]]()
    for number, branch in enumerate(branches):
        fields, names, place = stream.schema, _name_columns(stream), C.SEQUENCE
        if branch.read is not None:
            fields, place = branch.read.schema, f"{PREFIX}branch{number}_place"
            names = tuple(f"{PREFIX}branch{number}_{at}" for at in range(len(fields)))
            frame = branch.read.append_columns(frame.withColumn(place, F.col(C.SEQUENCE)), place, names)
        given = nullable([*beside, *fields])
        worker, made, own = _make_branch_worker(stream, branch, given)
        taken = T.StructType([one for one in made if one.name not in beside.names])
        made_names = tuple(f"{PREFIX}way{number}_{at}" for at in range(len(taken)))
        dealt.append(InputPath(0, names, given, worker, taken, made_names, place))
        keys.append(own)
    rows = _deal_branches(stream, frame, dealt, beside)
    return [
        (own, find_fields(one.made), of_readers)
        for own, one, of_readers in zip(rows, dealt, keys, strict=True)
    ]


def _deal_branches(
    stream: RecordStream, frame: DataFrame, dealt: Sequence[InputPath], beside: T.StructType
) -> list[SharedRows]:
    if any(one.worker.workers for one in dealt):
        wanted = [name for one in dealt for name in (one.place, *one.columns)]
        inputs = tuple(dealt if stream.is_timed else map(_hide_dropped_rows, dealt))
        return _deal_in_workers(frame.select(*dict.fromkeys([*beside.names, *wanted])), inputs, beside)
    found = []
    for one in dealt:
        own = InputRecords(place=None if stream.is_timed else one.place)
        columns = tuple(zip(one.columns, one.made.names, strict=True))
        found.append(SharedRows(frame, own, columns, one.place))
    return found


def _make_branch_worker(
    stream: RecordStream, branch: Branch, given: T.StructType
) -> tuple[ComposedWorker, T.StructType, list[tuple[KeyPart, ...]]]:
    workers: list[Worker] = []
    for function in branch.functions:
        (worker,), given = chain_workers([function], given)
        if stream.is_timed:
            worker = DroppedTimesKeeper(worker, given)
            given = worker.columns
        workers.append(worker)
    of_keys, made, keys = make_key_workers(given, branch.readers, stream.origins)
    return ComposedWorker((*workers, *of_keys)), made, keys


def _name_columns(stream: RecordStream) -> tuple[str, ...]:
    return tuple(f"{PREFIX}stem{at}" for at in range(len(stream.schema)))
