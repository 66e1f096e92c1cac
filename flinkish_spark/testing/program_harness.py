"""A harness that runs a program's functions step by step, without Spark: push elements, advance time.

It checks declared types, stores state in the job's format, and plans operators with the job's code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self, cast

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.async_io.functions import AsyncBatchFunction, AsyncFunction
from flinkish_spark.async_io.rows import CALLS_IN_HARNESS, close_kept
from flinkish_spark.connectors.collection import CollectionSource
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.distributed_cache import CACHED_FILES_IN_HARNESS
from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, OutputTag, Progress, TimeDomain
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.core.micro_batch import MICRO_BATCH_IN_HARNESS, MicroBatch
from flinkish_spark.core.validation import check_function, instance_of, unusable, values_by_name
from flinkish_spark.datastream.async_data_stream import AsyncDataStream
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.functions.keyed import (
    BroadcastProcessFunction,
    FilterFunction,
    FlatMapFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    MapFunction,
)
from flinkish_spark.functions.stream import (
    CheckpointedProcessFunction,
    CoFlatMapFunction,
    CoMapFunction,
    CoProcessFunction,
    ProcessFunction,
)
from flinkish_spark.job.dependencies import check_cached_name
from flinkish_spark.operators.lookup_join import forget_answers
from flinkish_spark.operators.vectorized import VectorizedProcessFunction
from flinkish_spark.planning.between import check_tasks_between
from flinkish_spark.planning.declare import KeyGroups, check_same_fields
from flinkish_spark.planning.partitioning import Parallelism
from flinkish_spark.planning.rules.cut_chains import find_chain_ends
from flinkish_spark.planning.stream_graph import StreamGraph, StreamNode, find_paths
from flinkish_spark.protocol.event_time import Watermarks
from flinkish_spark.testing.harness_calls import HarnessCalls
from flinkish_spark.testing.program_operator import (
    OperatorSnapshot,
    ProgramOperator,
    StagedPath,
    build_path,
    fields_of,
    frame_of,
    frame_type,
    next_due_ms,
    records_in,
)
from flinkish_spark.transport.blocks import BEHIND
from flinkish_spark.types.schemas import output_schema

Program = Callable[..., DataStream]
_SETTINGS = ("key", "key_type", "output", "broadcast", "uid")
#: The methods of streams for these functions; `process` takes all others.
_METHODS = {
    MapFunction: "map",
    FlatMapFunction: "flat_map",
    FilterFunction: "filter",
    CoMapFunction: "map",
    CoFlatMapFunction: "flat_map",
    CheckpointedProcessFunction: "process_with_state",
}
_OF_RECORDS = (MapFunction, FlatMapFunction, FilterFunction, CoMapFunction, CoFlatMapFunction)
#: Timeout of an async function that is tested alone.
_PATIENCE_MS, _BATCH_SIZE = 60_000, 32
_TWO = (
    KeyedCoProcessFunction,
    CoProcessFunction,
    BroadcastProcessFunction,
    KeyedBroadcastProcessFunction,
    CoMapFunction,
    CoFlatMapFunction,
)


class _Environment:
    def __init__(self, parallelism: int, max_parallelism: int) -> None:
        self.graph = StreamGraph(max_parallelism=max_parallelism)
        conf = SimpleNamespace(get=lambda name, default=None: str(parallelism))
        self.spark = SimpleNamespace(conf=conf)


@check_arguments()
def build_program(
    program: Program, inputs: Sequence[Any], parallelism: Parallelism, max_parallelism: KeyGroups
) -> tuple[list[tuple[SourceNode, T.StructType]], DataStream]:
    """Return a source for each input, with its fields, and the stream that the program returns."""
    if not callable(program):
        raise ConfigError(
            f"a harness got a {type(program).__name__} as its program",
            what_to_do="give it a function from streams to a stream; for a function of single elements call "
            "ProgramHarness.of(function, ...)",
        )
    if not inputs:
        raise ConfigError("a harness got no input", what_to_do='say the fields of each: "user STRING"')
    check_function(program, "the program of a harness", len(inputs))
    environment: Any = _Environment(parallelism, max_parallelism)
    sources = []
    for number, given in enumerate(inputs):
        fields = output_schema(given, f"input-{number}")
        source = SourceNode(f"input-{number}", CollectionSource([], fields))
        environment.graph.sources.append(source)
        sources.append((source, fields))
    stream = program(*(DataStream(environment, source) for source, _ in sources))
    if not isinstance(stream, DataStream) or cast(Any, stream)._environment is not environment:
        raise GraphError(
            f"the program of a harness returned a {type(stream).__name__}",
            what_to_do="return a DataStream that it has made of the streams that it got",
        )
    return sources, stream


def program_of(function: Any, inputs: int, settings: Mapping[str, Any]) -> tuple[Program, dict[str, Any]]:
    """Return a program that calls one function, and the remaining settings."""
    rest = {name: value for name, value in settings.items() if name not in _SETTINGS}
    wanted = 2 if isinstance(function, _TWO) else 1
    if inputs != wanted:
        raise ConfigError(
            f"a {type(function).__name__} reads {wanted} inputs, and the fields of {inputs} are given",
            what_to_do='say the fields of each: "user STRING"',
        )
    if isinstance(function, BroadcastProcessFunction | KeyedBroadcastProcessFunction):
        return _build_broadcast(function, settings), rest
    key, kind, uid = settings.get("key"), settings.get("key_type"), settings.get("uid", "operator")
    call = partial(_call, function, settings.get("output"))
    is_keyed = key is not None and isinstance(function, _OF_RECORDS)
    if isinstance(function, KeyedCoProcessFunction) or (is_keyed and wanted == 2):
        first, second = _pair(_require(settings, "key", function, 'key=("user", "payer")'))
        return lambda one, two: call(one.connect(two).key_by(first, second, key=kind), uid=uid), rest
    if isinstance(function, KeyedProcessFunction | VectorizedProcessFunction) or is_keyed:
        keys = _keys(_require(settings, "key", function, 'key="user"'))
        return lambda stream: call(stream.key_by(*keys, key=kind), uid=uid), rest
    if key is not None:
        raise ConfigError(f"a {type(function).__name__} has no key", what_to_do="leave key= out")
    if wanted == 2:
        return lambda one, two: call(one.connect(two), name=uid), rest
    if isinstance(function, CheckpointedProcessFunction):
        return lambda stream: call(stream, uid=uid), rest
    if isinstance(function, (ProcessFunction, *_OF_RECORDS)):
        return lambda stream: call(stream, name=uid), rest
    made = {"output": settings.get("output"), "uid": uid}
    if isinstance(function, AsyncFunction):
        return lambda stream: AsyncDataStream.ordered_wait(stream, function, _PATIENCE_MS, **made), rest
    if isinstance(function, AsyncBatchFunction):
        wait = AsyncDataStream.ordered_wait_batch
        return lambda stream: wait(stream, function, _PATIENCE_MS, _BATCH_SIZE, **made), rest
    raise ConfigError(
        f"ProgramHarness.of() got a {type(function).__name__}",
        what_to_do="give it an instance of one of the function classes; for windows, joins and several "
        "operators give ProgramHarness(...) a program",
    )


def _build_broadcast(function: Any, settings: Mapping[str, Any]) -> Program:
    example = 'broadcast=[MapStateDescriptor("rules", "STRING", "LONG")]'
    states = _require(settings, "broadcast", function, example)
    is_keyed = isinstance(function, KeyedBroadcastProcessFunction)
    keys = _keys(_require(settings, "key", function, 'key="user"')) if is_keyed else ()

    def program(stream: DataStream, rules: DataStream) -> DataStream:
        first: Any = stream.key_by(*keys, key=settings.get("key_type")) if is_keyed else stream
        joined = first.connect(rules.broadcast(*states))
        uid = settings.get("uid", "operator")
        made: DataStream = joined.process(function, output=settings.get("output"), uid=uid)
        return made

    return program


def _call(function: Any, output: Any, stream: Any, **label: str) -> DataStream:
    method = next((name for kind, name in _METHODS.items() if isinstance(function, kind)), "process")
    given = {} if isinstance(function, FilterFunction) else {"output": output}
    made: DataStream = getattr(stream, method)(function, **given, **label)
    return made


def _require(settings: Mapping[str, Any], name: str, function: Any, example: str) -> Any:
    if settings.get(name) is None:
        raise ConfigError(f"a {type(function).__name__} needs {name}=", what_to_do=f"say it: {example}")
    return settings[name]


def _keys(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _pair(key: Any) -> tuple[Any, Any]:
    instance_of("key", key, tuple, what_to_do='give the key of each input: key=("user", "payer")')
    if len(key) != 2:
        raise ConfigError(
            f"two keyed inputs got {len(key)} keys", what_to_do='give the key of each: key=("user", "payer")'
        )
    first, second = key
    return first, second


#: An element and its event time in milliseconds, None without one.
Timed = tuple[Any, int | None]


@dataclass(frozen=True)
class ProgramSnapshot:
    """A snapshot of a harness, to restore another one from.

    Parameters
    ----------
    operators
        Stored state of each stateful operator, by uid.
    watermark_ms, processing_time_ms
        Event time and processing time at the snapshot.
    """

    operators: Mapping[str, OperatorSnapshot]
    watermark_ms: int = MIN_WATERMARK_MS
    processing_time_ms: int = 0


@dataclass
class Output:
    """The output since the last call of `take`.

    Parameters
    ----------
    rows, times_ms
        The emitted rows and their event times, in order.
    side
        Rows by name of the side output.
    counts
        Counters of operators, by name.
    """

    rows: list[Any] = field(default_factory=list)
    times_ms: list[int | None] = field(default_factory=list)
    side: dict[str, list[Any]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def extend(self, later: Output) -> None:
        """Append later output."""
        self.rows += later.rows
        self.times_ms += later.times_ms
        for name, rows in later.side.items():
            self.side.setdefault(name, []).extend(rows)
        for name, count in later.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count


class ProgramHarness:
    """A program without sources and sinks, in memory.

    Parameters
    ----------
    program
        A function from one stream per input to the observed stream. It may use everything that a job may,
        except `transform` and column expressions, which need the JVM.
    inputs
        Fields of each input's elements: ``"user STRING, amount LONG"``, or a StructType.
    side_outputs
        Side outputs of the operator that made the returned stream; other side output is dropped, as in a job.
    parallelism
        Number of subtasks of each stateful operator. It may differ from the snapshot's.
    max_parallelism
        Number of key groups of operators that set none; must equal the snapshot's.
    restore
        The snapshot to begin with; by default none.
    cached_files
        Files and folders for `get_distributed_cache().get_file(name)`: paths by name.

    Raises
    ------
    GraphError, SchemaError, ConfigError, UserFunctionError
        A job would refuse the program, it needs Spark, or it does not fit the snapshot.

    Notes
    -----
    Each call of `push`, `push_all`, `watermark`, `processing_time` and `micro_batch` is one micro-batch. A
    call that raises has no effect; errors of functions are raised unchanged. As in a job, the harness runs
    copies of the program's functions: a new one for each subtask, and after a crash.

    Examples
    --------
    >>> from flinkish_spark.windows import TumblingEventTimeWindows
    >>> def program(orders):
    ...     windows = orders.key_by("user").window(TumblingEventTimeWindows(10))
    ...     return windows.reduce(lambda a, b: (a.user, a.amount + b.amount), uid="totals")
    >>> harness = ProgramHarness(program, "user STRING, amount LONG")
    >>> harness.push_all([(("ann", 1), 3), (("ann", 2), 9), (("ann", 5), 12)])
    >>> harness.watermark(9)
    >>> harness.take().rows
    [Record(user='ann', amount=3)]
    """

    def __init__(
        self,
        program: Callable[..., DataStream],
        *inputs: str | T.StructType,
        side_outputs: Sequence[OutputTag] = (),
        parallelism: int = 1,
        max_parallelism: int = 16,
        restore: ProgramSnapshot | None = None,
        cached_files: Mapping[str, str | Path] = MappingProxyType({}),
    ) -> None:
        self._cached_files = _check_cached_files(cached_files)
        sources, stream = build_program(program, inputs, parallelism, max_parallelism)
        self._sources: list[tuple[SourceNode, T.StructType]] = sources
        sides = [(tag, stream.get_side_output(tag)) for tag in side_outputs]
        graph = stream._environment.graph
        # Paths that a job does not support are refused here, too.
        find_chain_ends(graph, stream._node)
        check_tasks_between(graph, parallelism)
        frames = {id(node): frame_type(fields) for node, fields in sources}
        self._operators: list[ProgramOperator] = []
        for node in graph.operators:
            name = graph.names.get(node.uid, "")
            made = ProgramOperator(node, graph.find_sides(node), frames, parallelism, name)
            self._operators.append(made)
            frames |= made.frames
        self._main = _ways(stream._node, frames)
        self._sides = {tag.name: _ways(side._node, frames) for tag, side in sides}
        self._pushed, self._calls = [0] * len(sources), HarnessCalls()
        self._watermark_ms, self._time_ms, self._output = MIN_WATERMARK_MS, 0, Output()
        self._last = ProgramSnapshot({}) if restore is None else restore
        self._begin(self._last)

    @classmethod
    def of(cls, function: Any, *inputs: str | T.StructType, **settings: Any) -> Self:
        """Return a harness for one function.

        Parameters
        ----------
        function
            A KeyedProcessFunction, KeyedCoProcessFunction, VectorizedProcessFunction, ProcessFunction,
            CoProcessFunction, BroadcastProcessFunction, KeyedBroadcastProcessFunction,
            CheckpointedProcessFunction, AsyncFunction, AsyncBatchFunction, MapFunction, FlatMapFunction,
            FilterFunction, CoMapFunction or CoFlatMapFunction; the last five with a key or without. To set
            timeouts of async functions, write a program.
        inputs
            Fields of each input; for a broadcast function the broadcast input comes second.
        settings
            ``key=`` as for `key_by`, or a pair of that for two keyed inputs; ``key_type=`` the type of
            computed keys; ``output=`` fields of the output, by default from type hints; ``broadcast=``
            descriptors of broadcast states; ``uid=``. All others are parameters of the class.

        Raises
        ------
        ConfigError
            The function has none of these types, or a setting that it needs is missing.

        Examples
        --------
        >>> from flinkish_spark import MapFunction
        >>> class Doubled(MapFunction):
        ...     def map(self, value):
        ...         return (value.n * 2,)
        >>> harness = ProgramHarness.of(Doubled(), "n LONG", output="n LONG")
        >>> harness.push((21,))
        >>> harness.take().rows
        [Record(n=42)]
        """
        program, rest = program_of(function, len(inputs), settings)
        return cls(program, *inputs, **rest)

    def push(self, value: Any, time_ms: int | None = None, source: int = 0) -> None:
        """Process one element of an input.

        Parameters
        ----------
        value
            A tuple, named tuple, Row, dict or dataclass; for an input with one field also its value.
        time_ms
            Its event time; None without one.
        source
            Number of the input.
        """
        self.push_all([(value, time_ms)], source)

    def push_all(self, elements: Sequence[Timed], source: int = 0, channel: int = 0) -> None:
        """Process elements of one input as one micro-batch: (value, event time).

        Parameters
        ----------
        channel
            Channel of the elements, such as a Kafka partition; for functions with operator list state it
            selects the subtask.
        """
        given: list[Sequence[Timed]] = [()] * len(self._sources)
        if not 0 <= source < len(given):
            raise ConfigError(f"there is no input {source}", what_to_do=f"choose from 0 to {len(given) - 1}")
        given[source] = elements
        self.micro_batch(*given, channel=channel)

    def watermark(self, time_ms: int) -> None:
        """Advance the watermark; a lower one is ignored."""
        if time_ms > self._watermark_ms:
            self.micro_batch(watermark_ms=time_ms)

    def processing_time(self, time_ms: int) -> None:
        """Advance processing time.

        Raises
        ------
        ValueError
            The time is before the current one.
        """
        self.micro_batch(processing_time_ms=time_ms)

    def end_of_input(self) -> None:
        """Advance the watermark to its maximum, as at the end of bounded sources."""
        self.watermark(MAX_WATERMARK_MS)

    def micro_batch(
        self,
        *elements: Sequence[Timed],
        watermark_ms: int | None = None,
        processing_time_ms: int | None = None,
        channel: int = 0,
    ) -> None:
        """Process elements of all inputs as one micro-batch.

        Parameters
        ----------
        elements
            Elements of each input, in order; inputs that are left out have none.
        watermark_ms, processing_time_ms
            Watermark and processing time before the elements; by default unchanged.
        channel
            Channel of the elements.
        """
        now_ms = self._time_ms if processing_time_ms is None else processing_time_ms
        if now_ms < self._time_ms:
            raise ValueError(f"processing time is {self._time_ms} and cannot go back to {now_ms}")
        reached_ms = max(self._watermark_ms, MIN_WATERMARK_MS if watermark_ms is None else watermark_ms)
        if len(elements) > len(self._sources):
            raise ConfigError(
                f"the program has {len(self._sources)} inputs, but elements were given for {len(elements)}",
                what_to_do="give a list for each input",
            )
        found = self._frames(elements, channel)
        before = [one.snapshot() for one in self._operators]
        try:
            output = self._run(found, Progress(self._watermark_ms, reached_ms, now_ms))
        except BaseException:
            for operator, stored in zip(self._operators, before, strict=True):
                operator.take_back(stored)
            raise
        self._watermark_ms, self._time_ms = reached_ms, now_ms
        self._output.extend(output)

    def take(self) -> Output:
        """Return what was emitted since the last call: rows, their times, side outputs, counts.

        Rows are named tuples. Rows of one key are in order; the order of several keys within one micro-batch
        is undefined.
        """
        output, self._output = self._output, Output()
        return output

    @property
    def output_type(self) -> T.StructType:
        """Fields of the stream that the program returned."""
        return fields_of(self._main[0].frame)

    def snapshot(self) -> ProgramSnapshot:
        """Return all state and times, to restore a harness of the same program or of a changed one.

        :meth:`crash` also goes back to it.
        """
        stored = {one.node.uid: one.snapshot() for one in self._operators}
        self._last = ProgramSnapshot(stored, self._watermark_ms, self._time_ms)
        # Async answers up to here are final and are not requested again after a crash.
        self._calls.checkpoint()
        return self._last

    def crash(self) -> None:
        """Discard everything since the last snapshot: state, times, and output that was not taken.

        Without a snapshot, go back to the beginning. Functions are not closed; new copies are opened. Push
        the elements since then again, as a job would read them again.
        """
        self._begin(self._last)

    def close(self) -> None:
        """Close all functions, as at the clean end of a worker."""
        close_kept(self._calls.name)
        for operator in self._operators:
            operator.close()

    def entries(self, state: str, uid: str | None = None) -> dict[Any, Any]:
        """Return all entries of a keyed state by key; for window state by (key, window).

        Parameters
        ----------
        uid
            Uid of the operator; may be left out if only one has a state of that name.

        Raises
        ------
        ConfigError
            There is no such state, or there are several.
        """
        operator = self._find_operator(
            "keyed state", state, uid, {one: one.state_names for one in self._operators}
        )
        return {row.slot: row.value for group in operator.group_states() for row in group.rows(state)}

    def copies(self, state: str, uid: str | None = None) -> list[dict[Any, Any]]:
        """Return each subtask's copy of a broadcast state; the function must keep them equal.

        Parameters
        ----------
        uid
            Uid of the operator; may be left out if only one has a broadcast state of that name.

        Raises
        ------
        ConfigError
            There is no such state, or there are several.
        """
        names = {one: one.broadcast_names for one in self._operators}
        return self._find_operator("broadcast state", state, uid, names).copies(state)

    def timer_count(self) -> int:
        """Return the number of registered timers, of both clocks and all operators."""
        return sum(group.timer_count() for one in self._operators for group in one.group_states())

    def next_timer_ms(self, domain: TimeDomain) -> int | None:
        """Return the time of the next timer of a clock; None without one."""
        due = [next_due_ms(one, domain) for one in self._operators]
        return min((due_ms for due_ms in due if due_ms is not None), default=None)

    @property
    def watermark_ms(self) -> int:
        """The current watermark."""
        return self._watermark_ms

    @staticmethod
    def _find_operator(
        kind: str, state: str, uid: str | None, names: Mapping[ProgramOperator, Collection[str]]
    ) -> ProgramOperator:
        having = [one for one, own in names.items() if state in own and uid in (None, one.node.uid)]
        if len(having) != 1:
            known = [f"{one.node.uid}/{name}" for one, own in names.items() for name in own]
            raise ConfigError(
                f"there are {len(having)} states '{state}'",
                why=f"there is {', '.join(known) or f'no {kind}'}",
                what_to_do="name one of them, and the uid of its operator",
            )
        return having[0]

    def _begin(self, stored: ProgramSnapshot) -> None:
        known = {one.node.uid for one in self._operators}
        lost = sorted(uid for uid in stored.operators if uid not in known)
        if lost:
            raise GraphError(
                f"the snapshot has state of '{lost[0]}', and the program has no such operator",
                why="state is found again by uid",
                what_to_do=f'give an operator uid="{lost[0]}"',
            )
        forget_answers()
        self._calls.crash()
        token = CACHED_FILES_IN_HARNESS.set(self._cached_files)
        try:
            for operator in self._operators:
                operator.restart(stored.operators.get(operator.node.uid))
        finally:
            CACHED_FILES_IN_HARNESS.reset(token)
        self._watermark_ms, self._time_ms = stored.watermark_ms, stored.processing_time_ms
        self._output = Output()

    def _frames(self, elements: Sequence[Sequence[Timed]], channel: int) -> dict[int, pa.RecordBatch]:
        found = {}
        for number, (node, fields) in enumerate(self._sources):
            own = elements[number] if number < len(elements) else ()
            first = BEHIND + self._pushed[number]
            values, times = [value for value, _ in own], [time_ms for _, time_ms in own]
            found[id(node)] = frame_of(values, times, fields, channel, first)
            self._pushed[number] += len(own)
        return found

    def _run(self, found: dict[int, pa.RecordBatch], progress: Progress) -> Output:
        here = MicroBatch(
            Watermarks(progress.watermark_before_ms),
            Watermarks(progress.watermark_ms),
            progress.processing_time_ms,
            number=self._calls.next_micro_batch(),
            lineage=self._calls.lineage,
        )
        output = Output()
        token, calls_token = MICRO_BATCH_IN_HARNESS.set(here), CALLS_IN_HARNESS.set(self._calls)
        files_token = CACHED_FILES_IN_HARNESS.set(self._cached_files)
        try:
            for operator in self._operators:
                found |= operator.run(found, progress, output.counts)
            for path in self._main:
                rows, times = records_in(path.rows(found))
                output.rows += rows
                output.times_ms += times
            for name, paths in self._sides.items():
                found_rows = [row for path in paths for row in records_in(path.rows(found))[0]]
                if found_rows:
                    output.side[name] = found_rows
        finally:
            MICRO_BATCH_IN_HARNESS.reset(token)
            CALLS_IN_HARNESS.reset(calls_token)
            CACHED_FILES_IN_HARNESS.reset(files_token)
        return output


def _check_cached_files(given: object) -> Mapping[str, str]:
    what_to_do = 'give cached_files={"model": "/path/of/it"}, or leave it out'
    found: dict[str, str] = {}
    for name, path in values_by_name("cached_files", given, what_to_do=what_to_do).items():
        check_cached_name(name, found)
        if not isinstance(path, str | os.PathLike) or not os.path.exists(path):
            wanted = "a file or folder that is there"
            raise unusable(f"cached_files[{name!r}]", path, wanted=wanted, what_to_do="correct the path")
        found[name] = os.path.abspath(path)
    return found


def _ways(node: StreamNode, frames: Mapping[int, T.StructType]) -> list[StagedPath]:
    paths = [build_path(path, frames[id(path.base)]) for path in find_paths(node)]
    for path in paths[1:]:
        check_same_fields(fields_of(paths[0].frame), fields_of(path.frame), "the program of a harness")
    return paths
