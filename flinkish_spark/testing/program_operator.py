"""Operators in a harness: planned and run as in a job, in memory.

A frame here corresponds to a job's DataFrame of records: control columns, then fields. A row whose sequence
is `BEHIND` or more was late at the watermark of its micro-batch.
"""

from __future__ import annotations

import copy
import datetime
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import types as T

from flinkish_spark.core.elements import Progress, TimeDomain
from flinkish_spark.core.errors import USER_FUNCTION_MARKER, ConfigError, GraphError, UserFunctionError
from flinkish_spark.core.iterators import USER_ERRORS, NotAnEnd
from flinkish_spark.core.subtask import Subtask, running_as
from flinkish_spark.operators.context import close_operator
from flinkish_spark.operators.process import ElementError, TimerError
from flinkish_spark.planning.between import make_worker_between
from flinkish_spark.planning.declare import make_key_worker, no_such_key, refuse_unfit_key
from flinkish_spark.planning.factories import BroadcastFunctions
from flinkish_spark.planning.keyed import make_operator_and_shape
from flinkish_spark.planning.meaning import describe_meaning
from flinkish_spark.planning.partitioning import CustomPartitioning, is_partitioning
from flinkish_spark.planning.sent_columns import KeyedInput, SentColumns, Transport, choose_sent_columns
from flinkish_spark.planning.stream_graph import (
    Base,
    Input,
    Key,
    KeyedNode,
    KeyFunction,
    Path,
    SideNode,
    Step,
    TimedNode,
    TransformNode,
    find_operator,
    find_upstreams,
)
from flinkish_spark.planning.times import check_time_type
from flinkish_spark.planning.transforms import (
    LookupTransform,
    ProcessTransform,
    RowTransform,
    find_frame_function,
)
from flinkish_spark.protocol.restore import find_changed_meaning
from flinkish_spark.state.codec import StateValueError
from flinkish_spark.state.descriptors import MapStateDescriptor
from flinkish_spark.state.key_group import NO_BASE, GroupState, NoBases
from flinkish_spark.state.operator_state import BroadcastTables
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BlockPacker, sort_blocks
from flinkish_spark.transport.columns import Origins
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.types.arrow_types import as_schema
from flinkish_spark.types.rows import OutputError, RowReader, RowWriter, arrow_schema
from flinkish_spark.types.schemas import PREFIX
from flinkish_spark.types.to_arrow import ValueMismatch
from flinkish_spark.types.to_python import to_values
from flinkish_spark.worker.functions import AppendColumns, TimeStage
from flinkish_spark.worker.keyed_operator import OperatorError
from flinkish_spark.worker.runners import InputRows, OutputRows, make_runner

#: A function as for mapInArrow.
Stage = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
_CONTROL = [T.StructField(name, T.LongType()) for name in (C.CHANNEL, C.SEQUENCE, C.TIME)]
_NEEDS_SPARK = "give the harness a program that begins after it, and test that step with a Spark session"


def frame_type(fields: T.StructType) -> T.StructType:
    return T.StructType([*_CONTROL, *fields])


def fields_of(frame: T.StructType) -> T.StructType:
    return T.StructType([field for field in frame if not field.name.startswith(PREFIX)])


def frame_of(
    values: Sequence[Any], times_ms: Sequence[int | None], fields: T.StructType, channel: int, first: int
) -> pa.RecordBatch:
    try:
        rows = [_row(value, len(fields)) for value in values]
        arrays = RowWriter(arrow_schema(fields)).write(rows)
    except OutputError as error:
        raise ConfigError(
            f"an element that was pushed is not ({', '.join(f.simpleString() for f in fields)})",
            why=str(error).replace("emitted", "it has", 1),
            what_to_do="push tuples, named tuples, Rows, dicts or dataclasses with the fields that the "
            "harness was given for this input",
        ) from None
    count = len(rows)
    control = [pa.array([channel] * count, pa.int64()), pa.array(range(first, first + count), pa.int64())]
    times = pa.array(times_ms, pa.int64())
    return pa.RecordBatch.from_arrays([*control, times, *arrays], schema=arrow_schema(frame_type(fields)))


def _row(value: Any, width: int) -> Any:
    if isinstance(value, tuple | list | dict) or hasattr(value, "__dataclass_fields__"):
        return value
    if width > 1:
        raise OutputError(f"it is {value!r}, which is no row")
    return (value,)


def records_in(frame: pa.RecordBatch) -> tuple[list[Any], list[int | None]]:
    names = [name for name in frame.schema.names if not name.startswith(PREFIX)]
    return list(RowReader(names, names, ()).read(frame)[1]), frame.column(C.TIME).to_pylist()


@contextmanager
def blame(uid: str | None = None) -> Iterator[None]:
    """Raise errors of a user function unchanged, with a note that names the operator."""
    blamed: BaseException | None = None
    try:
        yield
    except (ElementError, TimerError) as failure:
        blamed = failure.error
    except OperatorError as failure:
        blamed = failure.__cause__
        uid = str(json.loads(str(failure).removeprefix(USER_FUNCTION_MARKER))["uid"])
    except USER_ERRORS as error:
        # An error in a columnar fold has no single failed element.
        if uid is None and not isinstance(error, OutputError | StateValueError):
            raise
        blamed = error
    if isinstance(blamed, OutputError | StateValueError | ValueMismatch):
        says = f"the function {blamed}" if isinstance(blamed, OutputError) else str(blamed)
        raise UserFunctionError(f"operator '{uid}': {says}", uid=uid)
    if isinstance(blamed, StopIteration):
        # StopIteration would end the caller's `with`.
        blamed = NotAnEnd(blamed, "the function")
    if blamed is not None:
        blamed.add_note(f"in the operator '{uid}'")
        raise blamed


@dataclass(frozen=True)
class StageCopier:
    """A stage that is copied for each micro-batch, as for each task in a job."""

    stage: Stage

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return copy.deepcopy(self.stage)(batches)


@dataclass(frozen=True)
class StagedPath:
    base: Base
    stages: tuple[Stage, ...]
    frame: T.StructType

    def rows(self, found: Mapping[int, pa.RecordBatch]) -> pa.RecordBatch:
        """Return the output of a micro-batch, from the rows of each base, by its identity."""
        schema = arrow_schema(self.frame)
        rows = found[id(self.base)]
        for stage in self.stages:
            if rows.num_rows:
                with blame():
                    rows = pa.concat_batches(list(stage(iter([rows]))))
        if not rows.num_rows:
            return pa.RecordBatch.from_pylist([], schema=schema)
        return as_schema(rows.select(schema.names), schema)


def build_path(path: Path, frame: T.StructType) -> StagedPath:
    stages: list[Stage] = []
    functions = (step.function for step in path.steps if isinstance(step, TransformNode))
    is_told_times = not any(isinstance(one, ProcessTransform) for one in functions)
    if find_operator(path.base) is not None and not is_told_times:
        stages.append(_clear_times)
    for step in path.steps:
        stage, frame = _stage(step, frame)
        if stage is not None:
            stages.append(stage)
    return StagedPath(path.base, tuple(stages), frame)


def _clear_times(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Set times to null: as in a job, a process function after an operator gets none."""
    for batch in batches:
        at = batch.schema.names.index(C.TIME)
        yield batch.set_column(at, batch.schema.field(at), pa.nulls(batch.num_rows, pa.int64()))


def _stage(step: Step, given: T.StructType) -> tuple[Stage | None, T.StructType]:
    if isinstance(step, TimedNode):
        return _make_time_stage(step, given), given
    function: Any = step.function
    if isinstance(function, RowTransform | LookupTransform):
        worker, columns = function.make_worker(given)
        return StageCopier(worker), columns
    if isinstance(function, CustomPartitioning):
        function.check_key(fields_of(given).names)
    if is_partitioning(function):
        # A redistribution moves rows between tasks and does not change them.
        return None, given
    raise no_frames()


def no_frames() -> GraphError:
    return GraphError("transform() cannot be run in a harness", what_to_do=_NEEDS_SPARK)


def _make_time_stage(step: TimedNode, given: T.StructType) -> Stage | None:
    """Return the stage that assigns timestamps; watermarks come from the test alone."""
    assigner: Any = step.strategy.timestamps
    if assigner is None:
        return None
    if isinstance(assigner, str):
        if assigner not in fields_of(given).names:
            raise GraphError(
                f"the records have no column '{assigner}' with their event time",
                why=f"they have {', '.join(fields_of(given).names)}",
                what_to_do="name one of them in with_timestamp_assigner(...)",
            )
        at = fields_of(given).names.index(assigner)
        check_time_type(assigner, fields_of(given)[at].dataType)
        return TimeStage(lambda record, _: _ms(record[at]), None, "harness", Origins())
    if isinstance(assigner, Column):
        raise GraphError(
            "a timestamp assigner that is a column expression cannot be run in a harness",
            why="Spark evaluates it in the JVM",
            what_to_do="name a column or give a function, or leave it out and push elements with their times",
        )
    return TimeStage(assigner, None, "harness", Origins())


def _ms(value: Any) -> Any:
    if not isinstance(value, datetime.datetime):
        return value
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return (value - epoch) // datetime.timedelta(milliseconds=1)


@dataclass(frozen=True)
class OperatorSnapshot:
    #: Keyed state and timers, by key group.
    groups: Mapping[int, bytes]
    #: Other state of each subtask: broadcast state, operator list state; None for nothing.
    partitions: tuple[bytes | None, ...]
    max_parallelism: int
    #: The meaning of the state, as in a savepoint.
    meaning: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Input:
    """An input of the operator, and the transport of its records."""

    staged: StagedPath
    given: KeyedInput
    sent: SentColumns
    keys: AppendColumns | None


class ProgramOperator:
    def __init__(
        self,
        node: KeyedNode,
        sides: Sequence[SideNode],
        frames: Mapping[int, T.StructType],
        parallelism: int,
        name: str = "",
    ) -> None:
        self.node, self._sides, self._parallelism, self._name = node, tuple(sides), parallelism, name
        inputs = sorted(
            (one for upstream in find_upstreams(node) for one in upstream.inputs), key=lambda one: one.entry
        )
        self._inputs = [_input(node, one, frames[id(one.base)]) for one in inputs]
        operator, self._shape = make_operator_and_shape(
            node,
            [one.given for one in self._inputs],
            [one.sent for one in self._inputs],
            self._sides,
            has_times=True,
        )
        self._made: Any = operator
        self._operators: list[Any] = []

    @property
    def frames(self) -> dict[int, T.StructType]:
        found = {id(self.node): frame_type(self._shape.outputs[0])}
        return found | {id(side): frame_type(side.output) for side in self._sides}

    def snapshot(self) -> OperatorSnapshot:
        groups, partitions = dict(self._groups), tuple(self._partitions)
        return OperatorSnapshot(groups, partitions, self.node.max_parallelism, describe_meaning(self.node))

    def restart(self, stored: OperatorSnapshot | None) -> None:
        """Restart with new copies of the function, and the stored state; None for no state."""
        node, shape = self.node, self._shape
        changed = "" if stored is None else find_changed_meaning(stored.meaning, describe_meaning(node))
        if changed:
            raise ConfigError(
                f"the state of operator '{node.uid}' would mean something else: {changed}",
                why="the snapshot has state that was made one way, and it would be read the other way",
                what_to_do="leave the operator as it was, or give it another uid",
            )
        if stored is not None and stored.max_parallelism != node.max_parallelism:
            raise ConfigError(
                f"operator '{node.uid}' has {node.max_parallelism} key groups, "
                f"and the snapshot is of one with {stored.max_parallelism}",
                why="keys are found by their key group",
                what_to_do=f"give it max_parallelism={stored.max_parallelism}",
            )
        self._operators, self._runners = [], []
        for index in range(self._parallelism):
            own = copy.deepcopy(self._made)
            with running_as(self._subtask(index)):
                runner: Any = make_runner(own, node.uid, node.max_parallelism, shape)
            self._operators.append(own)
            self._runners.append(runner)
        self._layout = self._runners[0].layout
        self._groups = {} if stored is None else dict(stored.groups)
        self._partitions: list[bytes | None] = [None] * self._parallelism
        if stored is not None and len(stored.partitions) == self._parallelism:
            self._partitions = list(stored.partitions)
        elif stored is not None and any(one is not None for one in stored.partitions):
            self._partitions = [
                runner.side.restore(stored.partitions, index, self._parallelism)
                for index, runner in enumerate(self._runners)
            ]
        for value in self._groups.values():
            # A declaration that does not fit fails now, not at some later element.
            GroupState(self._layout, value, NoBases())

    def take_back(self, before: OperatorSnapshot) -> None:
        self._groups, self._partitions = dict(before.groups), list(before.partitions)

    def close(self) -> None:
        for operator in self._operators:
            close_operator(operator, self.node.uid)

    def group_states(self) -> Iterator[GroupState]:
        for value in self._groups.values():
            yield GroupState(self._layout, value, NoBases())

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(self._layout.states)

    @property
    def broadcast_names(self) -> tuple[str, ...]:
        return tuple(descriptor.name for descriptor in self._broadcast)

    def copies(self, name: str) -> list[dict[Any, Any]]:
        (descriptor,) = (one for one in self._broadcast if one.name == name)
        tables = [BroadcastTables(self.node.uid, self._broadcast, value) for value in self._partitions]
        return [dict(one.readable(descriptor)) for one in tables]

    @property
    def _broadcast(self) -> tuple[MapStateDescriptor, ...]:
        function = self.node.function
        return function.descriptors if isinstance(function, BroadcastFunctions) else ()

    def run(
        self, found: Mapping[int, pa.RecordBatch], progress: Progress, counts: dict[str, int]
    ) -> dict[int, pa.RecordBatch]:
        given = [one.staged.rows(found) for one in self._inputs]
        blocks, whole = self._split_by_key_group(given)
        out: list[tuple[int, OutputRows]] = []
        for index, runner in enumerate(self._runners):
            if runner.side is not None:
                with running_as(self._subtask(index)), blame(self.node.uid):
                    done = runner.side.begin(self._partitions[index], whole(index), progress)
                self._partitions[index] = self._partitions[index] if done.value is None else done.value
                out += [(self.node.max_parallelism + index, rows) for rows in done.rows]
        for group in sorted(blocks.keys() | self._find_due_groups(progress)):
            inputs = [
                sort_blocks(own, arrow_schema(one.sent.transport.schema)) if own else None
                for own, one in zip(blocks.get(group, [[]] * len(given)), self._inputs, strict=True)
            ]
            out += [(group, rows) for rows in self._process(group, inputs, progress, counts)]
        return self._frames(out)

    def _process(
        self, group: int, inputs: InputRows, progress: Progress, counts: dict[str, int]
    ) -> list[OutputRows]:
        index = group % self._parallelism
        runner = self._runners[index]
        state = GroupState(self._layout, self._groups.get(group), NoBases())
        state.clean_up(progress.processing_time_ms)
        with running_as(self._subtask(index)), blame(self.node.uid):
            out = list(runner.process(inputs, state, progress))
            if state.is_changed:
                self._groups[group] = state.dump(group, NO_BASE, progress.processing_time_ms)
        for name, count in runner.counts.items():
            counts[name] = counts.get(name, 0) + count
        return out

    def _find_due_groups(self, progress: Progress) -> set[int]:
        """Return the key groups that must run without elements."""
        called = set()
        for group, value in self._groups.items():
            state = GroupState(self._layout, value, NoBases())
            due = [(state.next_call_ms(clock), limit_ms) for clock, limit_ms in progress.limits_ms.items()]
            is_due = any(due_ms is not None and due_ms <= limit_ms for due_ms, limit_ms in due)
            side = self._runners[group % self._parallelism].side
            if is_due or (side is not None and side.has_applications):
                called.add(group)
        return called

    def _split_by_key_group(
        self, given: Sequence[pa.RecordBatch]
    ) -> tuple[dict[int, list[list[bytes]]], Callable[[int], InputRows]]:
        """Return the blocks by key group and input, and rows without a key group by subtask."""
        blocks: dict[int, list[list[bytes]]] = {}
        others: list[pa.RecordBatch | None] = [None] * len(given)
        for number, (rows, one) in enumerate(zip(given, self._inputs, strict=True)):
            if not rows.num_rows:
                continue
            with blame(self.node.uid):
                travelling = _to_transport(rows, one, self.node.max_parallelism)
            if one.given.distribution is not Distribution.BY_KEY:
                others[number] = travelling.drop_columns([C.ROUTE])
                continue
            with blame(self.node.uid):
                for group, block in _blocks(travelling, one.sent):
                    blocks.setdefault(group, [[] for _ in given])[number].append(block)

        def whole(index: int) -> InputRows:
            return [
                rows
                if rows is None or one.given.distribution is Distribution.BROADCAST
                else self._own(rows, index)
                for rows, one in zip(others, self._inputs, strict=True)
            ]

        return blocks, whole

    def _own(self, rows: pa.RecordBatch, index: int) -> pa.RecordBatch:
        channels = rows.column(C.CHANNEL).to_numpy()
        return rows.filter(pa.array(channels % self._parallelism == index))

    def _frames(self, out: Iterable[tuple[int, OutputRows]]) -> dict[int, pa.RecordBatch]:
        nodes: list[Base] = [self.node, *self._sides]
        schemas = [arrow_schema(self.frames[id(node)]) for node in nodes]
        parts: list[list[pa.RecordBatch]] = [[] for _ in nodes]
        for channel, one in out:
            count = one.rows.num_rows
            places = [pa.array([channel] * count, pa.int64()), pa.array(range(one.first, one.first + count))]
            # Rows of a vectorised function that names no event time have none.
            times = [] if self._shape.with_times else [pa.nulls(count, pa.int64())]
            arrays = [*places, *times, *one.rows.columns]
            parts[one.side].append(pa.RecordBatch.from_arrays(arrays, schema=schemas[one.side]))
        return {
            id(node): pa.concat_batches(own) if own else pa.RecordBatch.from_pylist([], schema=schema)
            for node, own, schema in zip(nodes, parts, schemas, strict=True)
        }

    def _subtask(self, index: int) -> Subtask:
        return Subtask(index, self._parallelism, name=self._name)


def next_due_ms(operator: ProgramOperator, domain: TimeDomain) -> int | None:
    due = [state.next_due_ms(domain) for state in operator.group_states()]
    return min((due_ms for due_ms in due if due_ms is not None), default=None)


def _input(node: KeyedNode, input_: Input, frame: T.StructType) -> _Input:
    entry = node.entries[input_.entry]
    staged = (
        _build_input_path(node.uid, input_, frame)
        if find_operator(input_.base)
        else build_path(input_.paths[0], frame)
    )
    fields = fields_of(staged.frame)
    functions = [key for key in entry.keys if isinstance(key, KeyFunction)]
    worker = make_key_worker(functions[0], staged.frame, node.uid, Origins()) if functions else None
    transport = _transport(node.uid, fields, entry.keys, worker)
    # A key that is not a field name is computed.
    keys = cast("tuple[str, ...]", entry.keys if worker is None else (worker,) * len(worker.made))
    given = KeyedInput(
        (), fields, frozenset(), Origins(), keys, entry=input_.entry, distribution=entry.distribution
    )
    return _Input(staged, given, choose_sent_columns(node, given, transport), worker)


def _build_input_path(uid: str, input_: Input, frame: T.StructType) -> StagedPath:
    if any(find_frame_function(step) is not None for path in input_.paths for step in path.steps):
        raise no_frames()
    worker, columns = make_worker_between(uid, input_, frame)
    return StagedPath(input_.base, () if worker is None else (StageCopier(worker),), columns)


def _transport(
    uid: str, fields: T.StructType, keys: Sequence[Key], worker: AppendColumns | None
) -> Transport:
    """Return the transport of whole records; the counterpart of the planner's Spark columns."""
    names = {field.name: f"c{at}" for at, field in enumerate(fields)}
    control = [T.StructField(name, T.LongType()) for name in (C.KEY_HASH, C.CHANNEL, C.SEQUENCE, C.TIME)]
    own = [T.StructField(names[field.name], field.dataType) for field in fields]
    if worker is not None:
        made = [T.StructField(f"k{at}", part.dataType) for at, part in enumerate(worker.made)]
        key_names, kinds = [one.name for one in made], [one.dataType for one in made]
        return Transport(
            (), T.StructType([*control, *own, *made]), tuple(names.values()), tuple(key_names), tuple(kinds)
        )
    chosen = [_key_field(uid, key, fields) for key in keys]
    return Transport(
        (),
        T.StructType([*control, *own]),
        tuple(names.values()),
        tuple(names[field.name] for field in chosen),
        tuple(field.dataType for field in chosen),
    )


def _key_field(uid: str, key: Key, fields: T.StructType) -> T.StructField:
    if not isinstance(key, str):
        raise GraphError(
            f"operator '{uid}' is keyed by a column expression, which a harness cannot compute",
            why="Spark evaluates it in the JVM",
            what_to_do='name a column, or give a function: key_by(lambda order: ..., key="STRING")',
        )
    if key not in fields.names:
        raise no_such_key(uid, key, fields)
    refuse_unfit_key(fields[key].dataType, f"operator '{uid}' is keyed by", key)
    return fields[key]


def _to_transport(rows: pa.RecordBatch, one: _Input, groups: int) -> pa.RecordBatch:
    """Return the records with their key groups and the transported columns."""
    if one.keys is not None:
        (rows,) = one.keys(iter([rows]))
        keys = [rows.column(name) for name in one.keys.names]
    else:
        keys = [rows.column(key) for key in one.given.keys if isinstance(key, str)]
    values = zip(*map(to_values, keys), strict=True) if keys else [()] * rows.num_rows
    hashes = [zlib.crc32(repr(value).encode()) for value in values]
    control = [rows.column(name) for name in (C.CHANNEL, C.SEQUENCE, C.TIME)]
    own = [rows.column(name) for name in one.given.schema.names]
    schema = arrow_schema([T.StructField(C.ROUTE, T.IntegerType()), *one.sent.chosen.schema])
    routes = pa.array([hashed % groups for hashed in hashes], pa.int32())
    made = keys if one.keys is not None else []
    arrays = [routes, pa.array(hashes, pa.int64()), *control, *own, *made]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _blocks(rows: pa.RecordBatch, sent: SentColumns) -> Iterator[tuple[int, bytes]]:
    """Yield pairs of key group and block, as a task's packer does."""
    folded = sent.folded
    packer = BlockPacker(
        arrow_schema(sent.transport.schema), combine=None if folded is None else folded.combiner
    )
    for packed in packer(iter([rows])):
        yield from zip(packed.column(C.ROUTE).to_pylist(), packed.column(C.BLOCK).to_pylist(), strict=True)
