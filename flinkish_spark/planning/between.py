"""What lies between a source and a keyed operator, and between two of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.plans import calls_python
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.functions.watermark_strategy import WatermarkStrategy
from flinkish_spark.planning.declare import KeyPart, check_same_fields, key_workers
from flinkish_spark.planning.partitioning import ByPartitioner, Spread, is_partitioning
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
    operator_of,
    upstreams,
)
from flinkish_spark.planning.times import named_time, time_column
from flinkish_spark.planning.transforms import (
    InWorkers,
    RecordFunction,
    RowByRow,
    Spoiler,
    Transform,
    fields_of,
    frame_function,
    in_turn,
    named,
    read_functions,
    read_functions_over,
    transformed,
)
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.protocol.job_graph import Chained
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.branches import ORIGIN, InputPath, InputPaths, ParallelWorkers
from flinkish_spark.transport.columns import ComposedWorker, Origins, Worker, add_position
from flinkish_spark.transport.routes import InputRecords
from flinkish_spark.types.ddl import quoted
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
    """The rows of one input in a frame that holds those of others, too."""

    #: The same object for all of them.
    frame: DataFrame
    #: Which records are for this input.
    own: InputRecords
    #: Each with the name by which expressions of the user's, and what travels, know it.
    columns: tuple[tuple[str, str], ...]
    #: Column with the place of a record in its source; null in one that was dropped, and is there for its
    #: event time.
    place: str = C.SEQUENCE

    @property
    def named(self) -> list[Column]:
        return [F.col(quoted(own)).alias(known) for own, known in self.columns]


def functions_between(uid: str, functions: Sequence[object]) -> tuple[RecordFunction, ...]:
    """Return an operator's functions behind another one, without moves: it distributes records anew."""
    found = [function for function in functions if not is_partitioning(function)]
    known = tuple(function for function in found if isinstance(function, RecordFunction))
    if len(known) < len(found):
        raise GraphError(
            f"operator '{uid}' follows a transform() behind another keyed operator",
            why="operators are read on several ways here, and the rows of all ways are in one DataFrame; "
            "there a transform() can only stand first on a way of its own",
            what_to_do="call it in front of the other functions of its way, and in front of no union(); "
            "or say it with functions of single records: map(), flat_map(), filter(), process()",
            uid=uid,
        )
    return known


def check_said_between(graph: StreamGraph, tasks: int) -> None:
    """Refuse what is said of tasks between two keyed operators and cannot be kept."""
    for node in graph.operators:
        for upstream in upstreams(node):
            if operator_of(upstream.base) is not None:
                for path in upstream.paths:
                    _check_said(graph, node.uid, path, tasks)


def _check_said(graph: StreamGraph, uid: str, path: Path, tasks: int) -> None:
    moved, in_front = "", "functions between keyed operators run in the tasks of the one in front"
    for step in path.steps:
        function: object = step.function if isinstance(step, TransformNode) else None
        if isinstance(function, ByPartitioner):
            moved = "partition_custom()"
        elif is_partitioning(function):
            moved = "global_()" if function == Spread(1) else ""
        if not isinstance(function, RecordFunction):
            continue
        name = function.settings.name
        where = f"'{name}' stands in front of the keyed operator '{uid}' and behind another one"
        if graph.chained_of(step) is not Chained.ALWAYS:
            raise GraphError(
                f"'{name}' stands between the keyed operator '{uid}' and another one, and is to have tasks "
                "of its own (start_new_chain, disable_chaining)",
                why=f"{in_front}, as its records come",
                what_to_do="leave that out; or call the function in front of the first keyed operator, or "
                "behind the last one",
                uid=uid,
            )
        if moved:
            raise GraphError(
                f"{where}, and {moved} says which records it sees in one task",
                why=f"{in_front}, as its records come",
                what_to_do=f"leave {moved} out; or call key_by() with the key that belongs together, and "
                "give the function as a keyed one",
                uid=uid,
            )
        if function.settings.parallelism not in (None, tasks):
            raise ConfigError(
                f"{where}, and set_parallelism({function.settings.parallelism}) was called on it",
                why=f"{in_front}, and these are {tasks}",
                what_to_do=f"leave it out, or say {tasks}",
                setting="parallelism",
                value=function.settings.parallelism,
            )


def is_read_plainly(uid: str, upstream: Upstream) -> bool:
    """Whether an operator reads another one on one path, with nothing on it."""
    found = [_functions(uid, path) for path in upstream.paths]
    return len(found) == 1 and not found[0]


def worker_between(uid: str, input_: Input, given: T.StructType) -> tuple[Worker | None, T.StructType]:
    if len(input_.paths) == 1:
        (path,) = input_.paths
        workers, made = in_turn(_functions(uid, path), given)
        return (ComposedWorker(workers), made) if workers else (None, made)
    numbered = T.StructType([*given, _ORIGIN])
    made_on = [in_turn(_functions(uid, path), numbered) for path in input_.paths]
    first = fields_of(made_on[0][1])
    for _, made in made_on[1:]:
        check_same_fields(first, fields_of(made), f"operator '{uid}'")
    control = [field for field in given if field.name.startswith(PREFIX)]
    columns = T.StructType([*control, *first])
    return ParallelWorkers(tuple(ComposedWorker(workers) for workers, _ in made_on), columns), columns


def shared_inputs(
    node: KeyedNode, inputs: Sequence[Input], streams: Sequence[TaggedStream], passing: Sequence[TaggedStream]
) -> list[tuple[SharedRows, T.StructType, tuple[KeyPart, ...]]]:
    frame_of_all = (*streams, *passing)[0]
    frame = frame_of_all.frame
    control = T.StructType([f for f in frame.schema if f.name in (*C.CONTROL, C.TIME)])
    beside = T.StructType([field for field in control if field.name not in (C.KIND, C.CHECKPOINT)])
    dealt, keys = list[InputPath](), list[tuple[KeyPart, ...]]()
    for number, (input_, stream) in enumerate(zip(inputs, streams, strict=True)):
        schema, columns, place = stream.schema, _columns_of(stream), C.SEQUENCE
        frames, rest = _frames_in_front(input_)
        if frames:
            schema, read = read_functions(frame.sparkSession, frames, schema, columns)
            if isinstance(read, Spoiler):
                raise _not_row_by_row(node.uid, read)
            check_field_names(schema, "the result of a transform")
            place = f"{PREFIX}way{number}_place"
            columns = tuple(f"{PREFIX}way{number}_in{at}" for at in range(len(schema)))
            marked = frame.withColumn(place, F.when(_is_of(stream), F.col(C.SEQUENCE)))
            frame = read.beside(marked, place, columns)
        given = T.StructType([*beside, *schema])
        worker, made = worker_between(node.uid, rest, given)
        reader = node.uid, node.entries[input_.entry].keys
        of_keys, made, (own,) = key_workers(made, [reader], Origins())
        workers: tuple[Worker, ...] = of_keys if worker is None else (worker, *of_keys)
        taken = T.StructType([one for one in made if one.name not in beside.names])
        names = tuple(f"{PREFIX}way{number}_{at}" for at in range(len(taken)))
        dealt.append(InputPath(stream.side, columns, given, ComposedWorker(workers), taken, names, place))
        keys.append(own)
    for number, stream in enumerate(passing, start=len(dealt)):
        names = tuple(f"{PREFIX}way{number}_{at}" for at in range(len(stream.schema)))
        given = T.StructType([*beside, *stream.schema])
        columns = _columns_of(stream)
        dealt.append(InputPath(stream.side, columns, given, ComposedWorker(()), stream.schema, names))
        keys.append(())
    has_expressions = any(isinstance(key, Column) for own in keys for key in own)
    rows = _dealt(replace(frame_of_all, frame=frame), dealt, control, has_expressions)
    return [(own, fields_of(one.made), key) for own, one, key in zip(rows, dealt, keys, strict=True)]


def _columns_of(stream: TaggedStream) -> tuple[str, ...]:
    return stream.outputs[stream.side] if stream.outputs else tuple(stream.schema.names)


def _frames_in_front(input_: Input) -> tuple[list[Transform], Input]:
    """Return the DataFrame functions that stand first on the one path of an input, and the rest of it."""
    path, *others = input_.paths
    if others or all(frame_function(step) is None for step in path.steps):
        return [], input_
    steps = [
        step
        for step in path.steps
        if not (isinstance(step, TransformNode) and is_partitioning(step.function))
    ]
    frames = [function for step in steps if (function := frame_function(step)) is not None]
    behind = next((at for at, step in enumerate(steps) if frame_function(step) is None), len(steps))
    return frames[:behind], replace(input_, paths=(replace(path, steps=tuple(steps[behind:])),))


def _is_of(stream: TaggedStream) -> Column:
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    return is_record & (F.col(C.SIDE) == stream.side) if stream.outputs else is_record


def _dealt(
    stream: TaggedStream, inputs: Sequence[InputPath], control: T.StructType, has_expressions: bool
) -> list[SharedRows]:
    if any(one.worker.workers for one in inputs):
        return _dealt_by_workers(stream.frame, tuple(map(_without_dropped, inputs)), control)
    frame, columns = stream.frame, [one.columns for one in inputs]
    if has_expressions:
        # An expression of the user's names the fields of its own path, so that columns need other names.
        own = [
            F.col(quoted(column)).alias(name)
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


def _dealt_by_workers(
    frame: DataFrame, inputs: tuple[InputPath, ...], control: T.StructType
) -> list[SharedRows]:
    deal = InputPaths(inputs, control)
    made = C.map_in_arrow(frame, deal, deal.columns)
    return [
        SharedRows(made, InputRecords(number), tuple(zip(one.names, one.made.names, strict=True)))
        for number, one in enumerate(inputs)
    ]


def _without_dropped(one: InputPath) -> InputPath:
    """Return an input whose worker does not see what DataFrame functions have dropped."""
    if one.place == C.SEQUENCE:
        return one
    return replace(one, worker=ComposedWorker((TimeRowFilter(), *one.worker.workers)))


def _functions(uid: str, path: Path) -> tuple[RecordFunction, ...]:
    return functions_between(uid, [one.function for one in path.steps if isinstance(one, TransformNode)])


def behind_frames(uid: str, upstream: Upstream, stream: TaggedStream) -> tuple[TaggedStream, Upstream]:
    """Plan an operator's output behind the last DataFrame function of its one path; return what remains."""
    # Of several paths a filter on one would drop rows of another: there both stay what they are.
    path, *others = upstream.paths
    steps = path.steps
    last = max((at for at, step in enumerate(steps) if frame_function(step) is not None), default=None)
    if others or last is None:
        return stream, upstream
    (input_,) = upstream.inputs
    rest = replace(input_, paths=(replace(path, steps=steps[last + 1 :]),))
    return _through(uid, steps[: last + 1], stream), Upstream((rest,))


def _through(uid: str, steps: Sequence[Step], stream: TaggedStream) -> TaggedStream:
    made = TaggedStream(stream.alone(), stream.schema, stream.channels)
    functions: list[Any] = []
    for step in steps:
        assert isinstance(step, TransformNode), "refused where it was declared"
        if not is_partitioning(step.function):
            functions.append(step.function)
    for is_of_records, run in groupby(functions, lambda function: isinstance(function, RecordFunction)):
        own = list(run)
        made = _behind_workers(made, own) if is_of_records else _behind_functions(uid, made, own)
    return made


def _behind_functions(uid: str, stream: TaggedStream, functions: Sequence[Transform]) -> TaggedStream:
    frame = stream.frame
    schema, found = read_functions(frame.sparkSession, functions, stream.schema, stream.schema.names)
    if isinstance(found, Spoiler):
        raise _not_row_by_row(uid, found)
    check_field_names(schema, "the result of a transform")
    control = [field.name for field in _control(stream)]
    return replace(stream, frame=found.over(frame).select(*control, *found.named_fields), schema=schema)


def _not_row_by_row(uid: str, found: Spoiler) -> GraphError:
    return GraphError(
        f"operator '{uid}' follows a transform() behind another keyed operator, and "
        f"{named(found.function)} there does not look at each row by itself: it contains {found.what}",
        why="barriers travel between the records, and pass by only what selects, computes and filters",
        what_to_do="say it with select, withColumn, where and drop; with functions of single records: "
        "map(), flat_map(), filter(), process(); or do it in one of the two operators",
        uid=uid,
    )


def _behind_workers(stream: TaggedStream, functions: Sequence[RecordFunction]) -> TaggedStream:
    control = _control(stream)
    found = InWorkers.of(functions, stream.schema, stream.schema.names, T.StructType(control))
    own = [column.alias(field.name) for column, field in found.fields]
    frame = found.over(stream.frame).select(*(field.name for field in control), *own)
    return replace(stream, frame=frame, schema=found.schema)


def _control(stream: TaggedStream) -> list[T.StructField]:
    return [field for field in stream.frame.schema if field.name in (*C.CONTROL, C.TIME)]


# ----------------------------------------------------------------------------------------------------------
# Records of a source on their way to the first keyed operator, and what may happen to them there.


class MustStandApart(Exception):
    """A step needs records without control rows; the source is planned anew, with these apart."""


@dataclass(frozen=True)
class RecordStream:
    """Records of a source: own columns plus channel and sequence."""

    source: str
    #: If they are marked the source's control rows are among them, and all have kind and checkpoint.
    frame: DataFrame
    origins: Origins
    #: Returns the control columns of the barriers that belong to records that are not marked.
    barriers: Callable[[], DataFrame]
    #: On how many channels each barrier comes.
    channels: ExpectedChannels
    is_marked: bool = False
    #: Whether the records' channels are those of the source. Behind a transform that chose its own columns
    #: they are Spark's input partitions, which are others in each micro-batch.
    has_channels: bool = True
    #: Whether a strategy of the user's has given the records their times.
    is_timed: bool = False
    #: Whether there are rows among the records that are times only; see `worker/time.py`.
    has_kept_times: bool = False
    #: Fields of the records, where the frame has some that may be null only in control rows.
    fields: T.StructType | None = None

    @property
    def schema(self) -> T.StructType:
        if self.fields is not None:
            return self.fields
        return T.StructType([f for f in self.frame.schema if not f.name.startswith(PREFIX)])

    def records_only(self) -> RecordStream:
        """Return the stream without the times of records that were dropped: for what must not see them."""
        if not self.has_kept_times:
            return self
        is_kept = F.col(C.SEQUENCE).isNotNull()
        if self.is_marked:
            is_kept |= F.col(C.KIND) != int(C.Kind.RECORD)
        return replace(self, frame=self.frame.where(is_kept), has_kept_times=False)


def transform_records(stream: RecordStream, function: Transform) -> RecordStream:
    """Return the stream behind a function; raise MustStandApart if control rows cannot pass by it."""
    given: object = function
    if isinstance(given, RecordFunction):
        return _behind_record_function(stream, given)
    if is_partitioning(function):
        if stream.is_marked:
            raise MustStandApart
        # What moves rows moves those that are times only, too.
        return replace(stream, frame=function(stream.frame))
    # It sees fields only, so it cannot lose times and places.
    names = stream.schema.names
    fields = stream.frame.select(*[F.col(quoted(name)) for name in names])
    _, found = read_functions_over(fields, [function], names)
    if isinstance(found, Spoiler):
        return _behind_frame_function(stream, function)
    check_field_names(found.schema, "the result of a transform")
    # What is dropped of records with times leaves its time.
    keeps_times = stream.is_timed and (found.drops or stream.has_kept_times)
    frame = found.in_arrow(stream.frame, keeps_times=keeps_times)
    if frame is None and keeps_times:
        frame = found.keeping_times(stream.frame)
    elif frame is None and stream.is_marked:
        control = [name for name in stream.frame.columns if name.startswith(PREFIX)]
        frame = found.over(stream.frame).select(*control, *found.named_fields)
    elif frame is None:
        # No record is without fields, so they stay what they are: also those that must not be null.
        frame = found.of_records(stream.frame)
    made = found.schema if stream.is_marked else None
    return replace(stream, frame=frame, has_kept_times=keeps_times, fields=made)


def _behind_record_function(stream: RecordStream, function: RecordFunction) -> RecordStream:
    stream = stream if stream.is_timed else stream.records_only()
    kept = function.keeping_times() if stream.is_timed else function
    if not stream.is_marked:
        return replace(stream, frame=kept(stream.frame), has_kept_times=stream.is_timed)
    if kept.settings.parallelism is not None:
        raise MustStandApart
    worker, made = kept.worker_of(stream.frame.schema)
    passing = ControlRowBypass(worker, made)
    frame = C.map_in_arrow(stream.frame, passing, passing.columns, kept.settings.resources)
    return replace(stream, frame=frame, has_kept_times=stream.is_timed, fields=fields_of(made))


def _behind_frame_function(stream: RecordStream, function: Transform) -> RecordStream:
    """Return the stream behind a function that does more than look at single rows."""
    if stream.is_marked:
        raise MustStandApart
    stream = stream.records_only()
    records = transformed(stream.frame, function)
    lost = {C.TIME, C.MARK} & (set(stream.frame.columns) - set(records.columns))
    if lost:
        raise GraphError(
            "a transform dropped the event times of its records",
            why="it chose its own columns behind assign_timestamps_and_watermarks()",
            what_to_do="call assign_timestamps_and_watermarks() behind the transform, or add and drop single "
            "columns in it: withColumn(...), drop(...)",
        )
    if C.CHANNEL in records.columns and C.SEQUENCE in records.columns:
        return replace(stream, frame=records)
    # The function selected its own columns. A narrow transform keeps rows in their order within
    # Spark's input partition, so position in the partition stands in for the offset.
    return replace(stream, frame=add_position(records), origins=Origins(), has_channels=False)


def with_times(stream: RecordStream, strategy: WatermarkStrategy) -> RecordStream:
    """Give each record an event time, in milliseconds: from a column, an expression or a function."""
    stream = replace(stream.records_only(), is_timed=True)
    frame, assigner = stream.frame, strategy.timestamps
    plain = frame.drop(C.MARK) if C.MARK in frame.columns else frame
    if isinstance(assigner, Column):
        time = time_column(plain, assigner)
        if stream.is_marked:
            if calls_python(plain, time):
                # Spark calls it for all rows, whatever condition stands around it.
                raise MustStandApart
            # An expression of the user's must not see barriers, which have no fields.
            time = F.when(F.col(C.KIND) == int(C.Kind.RECORD), time)
        stream = replace(stream, frame=plain.withColumn(C.TIME, time))
    elif assigner is None or isinstance(assigner, str):
        take = TimestampsFromColumn(named_time(plain, assigner))
        # A time beside the columns of a source leaves them what they are.
        timed = C.map_records(plain, take, take.columns(plain.schema))
        stream = replace(stream, frame=timed)
    function = None if assigner is None or isinstance(assigner, str | Column) else assigner
    if strategy.generator is None and function is None:
        return stream
    timed = plain if function is not None else stream.frame
    stage = TimeStage(function, strategy.generator, stream.source, stream.origins)
    columns = stage.columns(timed.schema)
    if not stream.is_marked:
        return replace(stream, frame=C.map_in_arrow(timed, stage, columns))
    passing = ControlRowBypass(stage, columns)
    return replace(stream, frame=C.map_in_arrow(timed, passing, passing.columns))


# ----------------------------------------------------------------------------------------------------------
# Ways from one scan of a source into several operators: the functions of all of them in one pass.


#: What goes along with the fields of a record.
_BESIDE = (C.CHANNEL, C.SEQUENCE, C.TIME, C.MARK)


@dataclass(frozen=True, eq=False)
class Branch:
    """The last part of a path from a source, where it is not that of other paths."""

    #: What its DataFrame functions do to each record; None if it has none.
    read: RowByRow | None
    #: Those of single records, which come behind them.
    functions: tuple[RecordFunction, ...]
    #: Of each operator that reads it, its uid and its keys.
    readers: tuple[tuple[str, Sequence[Key]], ...]

    @classmethod
    def of(
        cls,
        stream: RecordStream,
        functions: Sequence[Transform],
        readers: Sequence[tuple[str, Sequence[Key]]],
    ) -> Branch | Spoiler:
        given: Sequence[object] = functions
        records = tuple(one for one in given if isinstance(one, RecordFunction))
        frames = functions[: len(functions) - len(records)]
        if not frames:
            return cls(None, records, tuple(readers))
        fields = stream.frame.select(*[F.col(quoted(name)) for name in stream.schema.names])
        _, read = read_functions_over(fields, frames, _stem_names(stream))
        if isinstance(read, Spoiler):
            return read
        check_field_names(read.schema, "the result of a transform")
        return cls(read, records, tuple(readers))


def branch_rows(
    stream: RecordStream, branches: Sequence[Branch]
) -> list[tuple[SharedRows, T.StructType, list[tuple[KeyPart, ...]]]]:
    """Return the rows of branches that begin with a stream, all in one frame, with fields and keys."""
    # Where there are functions of Python, InputPaths runs those of all branches in one worker for each task;
    # else Spark has the fields of all branches beside each other.
    beside = nullable(one for one in stream.frame.schema if one.name in _BESIDE)
    stem = zip(stream.schema.names, _stem_names(stream), strict=True)
    frame = stream.frame.select(*beside.names, *[F.col(quoted(field)).alias(name) for field, name in stem])
    dealt, keys = list[InputPath](), list[list[tuple[KeyPart, ...]]]()
    for number, branch in enumerate(branches):
        fields, names, place = stream.schema, _stem_names(stream), C.SEQUENCE
        if branch.read is not None:
            fields, place = branch.read.schema, f"{PREFIX}branch{number}_place"
            names = tuple(f"{PREFIX}branch{number}_{at}" for at in range(len(fields)))
            frame = branch.read.beside(frame.withColumn(place, F.col(C.SEQUENCE)), place, names)
        given = nullable([*beside, *fields])
        worker, made, own = _branch_worker(stream, branch, given)
        taken = T.StructType([one for one in made if one.name not in beside.names])
        made_names = tuple(f"{PREFIX}way{number}_{at}" for at in range(len(taken)))
        dealt.append(InputPath(0, names, given, worker, taken, made_names, place))
        keys.append(own)
    rows = _rows_of_branches(stream, frame, dealt, beside)
    return [
        (own, fields_of(one.made), of_readers) for own, one, of_readers in zip(rows, dealt, keys, strict=True)
    ]


def _rows_of_branches(
    stream: RecordStream, frame: DataFrame, dealt: Sequence[InputPath], beside: T.StructType
) -> list[SharedRows]:
    if any(one.worker.workers for one in dealt):
        wanted = [name for one in dealt for name in (one.place, *one.columns)]
        inputs = tuple(dealt if stream.is_timed else map(_without_dropped, dealt))
        return _dealt_by_workers(frame.select(*dict.fromkeys([*beside.names, *wanted])), inputs, beside)
    found = []
    for one in dealt:
        own = InputRecords(place=None if stream.is_timed else one.place)
        columns = tuple(zip(one.columns, one.made.names, strict=True))
        found.append(SharedRows(frame, own, columns, one.place))
    return found


def _branch_worker(
    stream: RecordStream, branch: Branch, given: T.StructType
) -> tuple[ComposedWorker, T.StructType, list[tuple[KeyPart, ...]]]:
    workers: list[Worker] = []
    for function in branch.functions:
        (worker,), given = in_turn([function], given)
        if stream.is_timed:
            worker = DroppedTimesKeeper(worker, given)
            given = worker.columns
        workers.append(worker)
    of_keys, made, keys = key_workers(given, branch.readers, stream.origins)
    return ComposedWorker((*workers, *of_keys)), made, keys


def _stem_names(stream: RecordStream) -> tuple[str, ...]:
    return tuple(f"{PREFIX}stem{at}" for at in range(len(stream.schema)))
