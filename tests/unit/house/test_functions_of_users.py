"""Whatever takes a function of the user's refuses one of the wrong kind; found by walking the public API."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import types as T

import flinkish_spark
import flinkish_spark.datastream
from flinkish_spark import (
    AggregatingStateDescriptor,
    AsyncBatchFunction,
    AsyncDataStream,
    AsyncFunction,
    AsyncRetryStrategy,
    BroadcastProcessFunction,
    MapFunction,
    MapStateDescriptor,
    OutputTag,
    ReducingStateDescriptor,
    SinkGroup,
    StreamExecutionEnvironment,
    WatermarkStrategy,
    commit_together,
)
from flinkish_spark.cep import CEP, Pattern
from flinkish_spark.connectors.collection import CollectionSource
from flinkish_spark.connectors.files.buckets import ExpressionBuckets
from flinkish_spark.connectors.files.partitions import PartitionCommit, PartitionTime
from flinkish_spark.core.errors import UserError
from flinkish_spark.core.iterators import NotRun
from flinkish_spark.core.metric_group import MetricGroup
from flinkish_spark.functions.watermark_strategy import WatermarkGenerator
from flinkish_spark.joins import (
    IntervalJoin,
    LookupJoin,
    TemporalJoin,
    WindowCoGroup,
    WindowJoin,
)
from flinkish_spark.savepoints.bootstrap import bootstrap_function
from flinkish_spark.sinks import FileFormat, FileSink, ForeachCheckpointSink, ForeachSink, MemorySink
from flinkish_spark.sources import DataGeneratorSource, FileSource, RandomLong
from flinkish_spark.testing import ProgramHarness, SinkUnderTest
from flinkish_spark.testing.crash_points import KillAt, KillPoint
from flinkish_spark.windows import (
    AggregateWindow,
    CountTrigger,
    DeltaEvictor,
    DynamicEventTimeSessionWindows,
    DynamicProcessingTimeSessionWindows,
    GlobalWindows,
    ProcessWindow,
    PurgingTrigger,
    ReduceWindow,
    TumblingEventTimeWindows,
    WindowAssigner,
    WindowSpec,
)
from flinkish_spark.worker.functions import RecordPartitioner

ROWS = "user STRING, amount LONG"
OUT = "n LONG"
RULES = MapStateDescriptor("rules", "STRING", "LONG")
LATE = OutputTag("late", OUT)
FACES = [
    *("flinkish_spark", "flinkish_spark.cep", "flinkish_spark.sinks", "flinkish_spark.sources"),
    *("flinkish_spark.testing", "flinkish_spark.windows", "flinkish_spark.joins", "flinkish_spark.state"),
    *("flinkish_spark.state_processor", "flinkish_spark.latency"),
    *(
        f"flinkish_spark.datastream.{one.name}"
        for one in pkgutil.iter_modules(flinkish_spark.datastream.__path__)
    ),
]


# -- what takes a function ---------------------------------------------------------------------------
class Place(NamedTuple):
    """A parameter, and what it says of what it takes."""

    method: str
    parameter: str
    annotation: str
    kinds: tuple[type, ...]
    is_plain: bool


def own_methods(owner: type) -> Iterator[tuple[str, Any]]:
    for name, found in inspect.getmembers(owner):
        function = getattr(found, "__func__", found)
        is_public = (name == "__init__" or name[0] != "_") and inspect.isfunction(function)
        if is_public and (name == "__init__" or str(function.__module__).startswith("flinkish_spark")):
            yield name, function


def named_in(annotation: str, function: Any, face: types.ModuleType) -> Iterator[Any]:
    """Yield what the names in an annotation stand for, as far as anybody knows."""
    spaces = [vars(importlib.import_module(function.__module__)), vars(face)]
    for name in re.findall(r"[A-Za-z_]\w*", annotation):
        for space in spaces:
            if name in space:
                yield space[name]
                break
        else:
            yield KNOWN.get(name)


#: Classes whose objects a user writes: each of their public methods is called by us.
FUNCTIONS: dict[str, type] = {}
#: All public classes and aliases, for annotations that name what is only imported for type checkers.
KNOWN: dict[str, Any] = {}
#: Their objects are made by us, or do not stand for a function.
NO_FUNCTIONS = {
    *(
        "Clock",
        "Committer",
        "Condition",
        "Expression",
        "Given",
        "JoiningWriter",
        "Leaf",
    ),
    *("ManifestWriter", "SinkWriter", "StateStore", "Store", "TimerService", "Manifest"),
    *("RestartStrategy", "RichFunction", "Aggregate", "Reducer"),
    *("Changelog", "Changes", "Format", "PartReader", "PartWriter"),
}
#: They are none by their class alone: what they do by default is enough.
ALSO_FUNCTIONS = {"Evictor", "WatermarkGenerator", "JobListener", "StepObserver", "ExecutionListener"}


def fill_known() -> None:
    homes = ["functions", "windows", "joins", "contracts", "core.steps", "cep", "connectors.files.buckets"]
    homes += [
        "connectors.files.partitions",
        "operators.vectorized",
        "state.descriptors",
        "savepoints.bootstrap",
        "connectors.files.input_formats",
        "connectors.generator",
    ]
    modules = [importlib.import_module(one) for one in FACES]
    for home in homes:
        module = importlib.import_module(f"flinkish_spark.{home}")
        modules.append(module)
        for one in pkgutil.iter_modules(getattr(module, "__path__", [])):
            modules.append(importlib.import_module(f"{module.__name__}.{one.name}"))
    for module in modules:
        names = getattr(module, "__all__", None) or list(vars(module))
        for name in names:
            if name[0] != "_":
                KNOWN.setdefault(name, getattr(module, name))
    for name, kind in KNOWN.items():
        home = str(getattr(kind, "__module__", ""))
        if not inspect.isclass(kind) or not home.startswith("flinkish_spark.") or ".datastream." in home:
            continue
        is_abstract = inspect.isabstract(kind) or getattr(kind, "_is_protocol", False)
        if (is_abstract and name not in NO_FUNCTIONS and not is_given(name)) or name in ALSO_FUNCTIONS:
            FUNCTIONS[name] = kind


def is_given(name: str) -> bool:
    return name.endswith(("Context", "Facts", "State", "Handle", "Session"))


def places() -> list[Place]:
    """Return all parameters of the public API that take a function, or an object with methods."""
    found: dict[tuple[str, str], Place] = {}
    for face in map(importlib.import_module, FACES):
        for name in getattr(face, "__all__", None) or [one for one in vars(face) if one[0] != "_"]:
            owner = getattr(face, name)
            if not str(getattr(owner, "__module__", "")).startswith("flinkish_spark"):
                continue
            if ".datastream." in face.__name__ and owner.__module__ != face.__name__:
                continue
            if inspect.isclass(owner):
                if FUNCTIONS.get(owner.__name__) is owner or is_given(owner.__name__):
                    continue  # Its methods are called by us.
                methods = [(f"{owner.__name__}.{one}", call) for one, call in own_methods(owner)]
            else:
                methods = [(name, owner)] if inspect.isfunction(owner) else []
            for method, call in methods:
                for parameter in inspect.signature(inspect.unwrap(call)).parameters.values():
                    place = place_of(method, parameter, call, face)
                    if place is not None:
                        found.setdefault((method, parameter.name), place)
    return list(found.values())


def place_of(method: str, parameter: inspect.Parameter, call: Any, face: types.ModuleType) -> Place | None:
    said = str(parameter.annotation)
    wanted = MORE.get((method, parameter.name))
    if wanted is not None:
        said = wanted
    named = list(named_in(said, call, face))
    kinds = {one for one in named if inspect.isclass(one) and FUNCTIONS.get(one.__name__) is one}
    for alias in named:
        # `KeyedFunction = KeyedProcessFunction | VectorizedProcessFunction`
        kinds |= {one for one in getattr(alias, "__args__", ()) if one in FUNCTIONS.values()}
    is_plain = "Callable" in said or any("Callable" in str(one) for one in named if not inspect.isclass(one))
    if not kinds and not is_plain:
        return None
    return Place(method, parameter.name, said, tuple(sorted(kinds, key=lambda one: one.__name__)), is_plain)


#: What is annotated with Any, and takes functions all the same.
MORE = {
    ("DataStream.partition_custom", "partitioner"): "Callable[[Any, int], int] | Partitioner",
    ("DataStream.map", "function"): "MapFunction | Callable[[Any], Any]",
    ("DataStream.flat_map", "function"): "FlatMapFunction | Callable[[Any], Iterable[Any]]",
    ("DataStream.filter", "function"): "FilterFunction | Callable[[Any], Any]",
    ("KeyedStream.flat_map", "function"): "FlatMapFunction | Callable[[Any], Iterable[Any]]",
    ("ConnectedStreams.map", "first"): "CoMapFunction",
    ("ConnectedStreams.flat_map", "first"): "CoFlatMapFunction",
    ("KeyedConnectedStreams.map", "first"): "CoMapFunction",
    ("KeyedConnectedStreams.flat_map", "first"): "CoFlatMapFunction",
    ("DataStream.process", "function"): "ProcessFunction",
    ("ConnectedStreams.process", "function"): "CoProcessFunction",
    ("ReducingStateDescriptor.__init__", "reduce"): "ReduceFunction | Callable[[Any, Any], Any]",
    ("AggregatingStateDescriptor.__init__", "aggregate"): "AggregateFunction",
    ("CEP.pattern", "comparator"): "Callable[[Any, Any], int]",
    ("CEP.patterns", "comparator"): "Callable[[Any, Any], int]",
    ("PatternStream.select", "timed_out"): "Callable[[Any, int], Any]",
    ("PatternStream.flat_select", "timed_out"): "Callable[[Any, int], Iterable[Any]]",
    ("StreamExecutionEnvironment.observe", "observer"): "StepObserver",
    ("WatermarkStrategy.with_timestamp_assigner", "timestamps"): "Callable[[Any, int | None], int]",
}


# -- how each is called ------------------------------------------------------------------------------
SESSION = SparkSession.__new__(SparkSession)


def environment() -> StreamExecutionEnvironment:
    return StreamExecutionEnvironment(SESSION, job="orders", job_dir="/jobs/a")


def stream(env: Any = None) -> Any:
    return (env or environment()).from_source(CollectionSource([], ROWS), uid="orders")


def two() -> tuple[Any, Any]:
    env = environment()
    return stream(env), env.from_source(CollectionSource([], ROWS), uid="others")


def keyed() -> Any:
    return stream().key_by("user")


def connected() -> Any:
    return stream_pair(lambda left, right: left.connect(right))


def stream_pair(make: Callable[[Any, Any], Any]) -> Any:
    return make(*two())


def windowed() -> Any:
    return keyed().window(TumblingEventTimeWindows(10))


def joined() -> Any:
    return stream_pair(lambda left, right: left.key_by("user").join(right.key_by("user")))


def patterns() -> Any:
    return CEP.pattern(keyed(), Pattern.begin("first"))


def declared(kind: type, **methods: Any) -> Any:
    """Return an object of a function class that does nothing."""
    names: dict[str, Any] = {
        name: (lambda self, *given: None)
        for name, own in inspect.getmembers(kind)
        if getattr(own, "__isabstractmethod__", False) or getattr(kind, "_is_protocol", False)
        if name[0] != "_"
    }
    if inspect.iscoroutinefunction(getattr(kind, "async_invoke", None)):
        names["async_invoke"] = awaited
    if inspect.iscoroutinefunction(getattr(kind, "async_invoke_batch", None)):
        names["async_invoke_batch"] = awaited
    if kind is FUNCTIONS.get("MasterHook"):
        names["name"] = "hook"
    if kind is FUNCTIONS.get("Field"):
        methods["__repr__"] = lambda self: "MyField()"
    if kind is FUNCTIONS.get("BucketAssigner"):
        names["names"] = ("first",)
    if kind is WindowAssigner:
        from flinkish_spark.core.elements import TimeDomain

        names |= {"clock": TimeDomain.EVENT_TIME, "default_trigger": lambda self: CountTrigger(1)}
    # Declared with the right arguments: what is overridden is all that is wrong.
    stubs = {name: same_as(getattr(kind, name, None), value) for name, value in names.items()}
    bases = () if getattr(kind, "_is_protocol", False) else (kind,)
    return type(f"My{kind.__name__}", bases, {**stubs, **methods})()


async def awaited(self: Any, value: Any) -> list[Any]:
    return []


def same_as(own: Any, stub: Any) -> Any:
    """Return a stub that takes what a method takes."""
    if not inspect.isfunction(stub) or stub is awaited or not inspect.isfunction(own):
        return stub
    names = [one.name for one in inspect.signature(own).parameters.values()]
    return eval(f"lambda {', '.join(names)}: None")


def of(kind: str) -> Any:
    return declared(FUNCTIONS[kind])


def one_of_each(kinds: tuple[type, ...], is_plain: bool, takes: int) -> Any:
    return plain(takes) if is_plain else declared(kinds[0])


def plain(takes: int) -> Any:
    return eval(f"lambda {', '.join(f'a{at}' for at in range(takes))}: 1")


Call = Callable[[dict[str, Any]], Any]
JOIN = {"left_type": ROWS, "right_type": ROWS}
LOOKUP = {"rows": "name STRING", "key": plain(1)}
WAIT = {"timeout_ms": 100, "output": OUT, "uid": "waits"}


def call(make: Callable[[], Any], method: str | None = None, **usual: Any) -> Call:
    """Return what calls a method, or what is made, with what is usual there and what a test gives."""

    def called(given: dict[str, Any]) -> Any:
        owner = make()
        function = owner if method is None else getattr(owner, method)
        own = {
            name: value() if isinstance(value, Usual) else value for name, value in {**usual, **given}.items()
        }
        by_place = [own.pop(name) for name in list(own) if name.startswith("*")]
        return function(*by_place, **own)

    return called


class Usual(NamedTuple):
    """A usual argument that is made for each call."""

    make: Callable[[], Any]

    def __call__(self) -> Any:
        return self.make()


def usual(kind: str) -> Usual:
    return Usual(lambda: of(kind))


def waiting(kind: str, parameter: str, **more: Any) -> dict[str, Any]:
    return {"stream": Usual(stream), parameter: usual(kind), **WAIT, **more}


RETRY = AsyncRetryStrategy.fixed_delay(1, 1)
BROADCAST = Usual(lambda: None)


def query(given: dict[str, Any]) -> Any:
    orders = stream()
    return orders._environment.from_query(given.get("function", plain(1)), orders, uid="query")


CALLS: dict[str, Call] = {
    "Queries.from_query": query,
    "StreamExecutionEnvironment.from_query": query,
    "DataStream.map": call(stream, "map", function=plain(1), output=OUT),
    "DataStream.flat_map": call(stream, "flat_map", function=plain(1), output=OUT),
    "DataStream.filter": call(stream, "filter", function=plain(1)),
    "DataStream.process": call(stream, "process", function=usual("ProcessFunction"), output=OUT),
    "DataStream.process_with_state": call(
        stream, "process_with_state", function=usual("CheckpointedProcessFunction"), output=OUT, uid="u"
    ),
    "DataStream.key_by": lambda given: stream().key_by(given.get("keys", plain(1)), key="LONG"),
    "DataStream.partition_custom": call(stream, "partition_custom", partitioner=plain(2), key=plain(1)),
    "DataStream.transform": call(stream, "transform", function=plain(1)),
    "DataStream.lookup_join": call(stream, "lookup_join", table=usual("LookupTable"), **LOOKUP),
    "DataStream.sink_to": call(stream, "sink_to", sink=MemorySink("m"), uid="sink"),
    "KeyedStream.map": call(keyed, "map", function=plain(1), output=OUT, uid="u"),
    "KeyedStream.flat_map": call(keyed, "flat_map", function=plain(1), output=OUT, uid="u"),
    "KeyedStream.filter": call(keyed, "filter", function=plain(1), uid="u"),
    "KeyedStream.key_by": lambda given: keyed().key_by(given.get("keys", plain(1)), key="LONG"),
    "KeyedStream.process": call(
        keyed, "process", function=usual("KeyedProcessFunction"), output=OUT, uid="u"
    ),
    "KeyedStream.reduce": call(keyed, "reduce", reduce=plain(2), uid="u"),
    "KeyedStream.aggregate": call(
        keyed, "aggregate", aggregate=usual("AggregateFunction"), accumulator="LONG", output=OUT, uid="u"
    ),
    "KeyedStream.window": call(keyed, "window", assigner=TumblingEventTimeWindows(10)),
    "WindowedStream.trigger": call(windowed, "trigger", trigger=CountTrigger(1)),
    "WindowedStream.evictor": call(windowed, "evictor", evictor=usual("Evictor")),
    "WindowedStream.reduce": call(windowed, "reduce", reduce=plain(2), output=OUT, uid="u"),
    "WindowedStream.aggregate": call(
        windowed, "aggregate", aggregate=usual("AggregateFunction"), accumulator="LONG", output=OUT, uid="u"
    ),
    "WindowedStream.process": call(
        windowed, "process", process=usual("ProcessWindowFunction"), output=OUT, uid="u"
    ),
    "ConnectedStreams.key_by": call(connected, "key_by", first=plain(1), second=plain(1), key="LONG"),
    "ConnectedStreams.map": call(connected, "map", first=usual("CoMapFunction"), output=OUT),
    "ConnectedStreams.flat_map": call(connected, "flat_map", first=usual("CoFlatMapFunction"), output=OUT),
    "ConnectedStreams.process": call(connected, "process", function=usual("CoProcessFunction"), output=OUT),
    "KeyedConnectedStreams.map": call(
        lambda: connected().key_by("user", "user"), "map", first=usual("CoMapFunction"), output=OUT, uid="u"
    ),
    "KeyedConnectedStreams.flat_map": call(
        lambda: connected().key_by("user", "user"),
        "flat_map",
        first=usual("CoFlatMapFunction"),
        output=OUT,
        uid="u",
    ),
    "KeyedConnectedStreams.process": call(
        lambda: connected().key_by("user", "user"),
        "process",
        function=usual("KeyedCoProcessFunction"),
        output=OUT,
        uid="u",
    ),
    "BroadcastConnectedStream.process": lambda given: with_broadcast(given.get("function")),
    "JoinedStreams.interval": call(
        joined, "interval", lower_ms=0, upper_ms=1, output=OUT, uid="u", function=usual("ProcessJoinFunction")
    ),
    "JoinedStreams.window": call(
        joined,
        "window",
        windows=TumblingEventTimeWindows(10),
        output=OUT,
        uid="u",
        function=usual("ProcessJoinFunction"),
    ),
    "JoinedStreams.co_group": call(
        joined,
        "co_group",
        windows=TumblingEventTimeWindows(10),
        output=OUT,
        uid="u",
        function=usual("CoGroupFunction"),
    ),
    "JoinedStreams.temporal": call(
        joined, "temporal", uid="u", output=OUT, function=usual("ProcessJoinFunction")
    ),
    "CEP.pattern": call(lambda: CEP, "pattern", stream=Usual(keyed), pattern=Pattern.begin("first")),
    "CEP.patterns": call(
        lambda: CEP, "patterns", stream=Usual(keyed), patterns={"a": Pattern.begin("first")}
    ),
    "Pattern.where": call(lambda: Pattern.begin("first"), "where", condition=plain(1)),
    "Pattern.or_where": call(lambda: Pattern.begin("a").where("n > 1"), "or_where", condition=plain(1)),
    "Pattern.until": call(lambda: Pattern.begin("a").one_or_more(), "until", condition=plain(1)),
    "PatternStream.process": call(
        patterns, "process", function=usual("PatternProcessFunction"), output=OUT, uid="u"
    ),
    "PatternStream.select": call(patterns, "select", select=plain(1), output=OUT, uid="u"),
    "PatternStream.flat_select": call(patterns, "flat_select", select=plain(1), output=OUT, uid="u"),
    "PatternsFromStream.__init__": call(
        lambda: flinkish_spark.cep.PatternsFromStream,
        elements=ROWS,
        function=usual("PatternProcessFunction"),
        patterns={"known": lambda least: Pattern.begin("first")},
    ),
    "AsyncDataStream.ordered_wait": call(
        lambda: AsyncDataStream, "ordered_wait", **waiting("AsyncFunction", "async_function")
    ),
    "AsyncDataStream.ordered_wait_with_retry": call(
        lambda: AsyncDataStream,
        "ordered_wait_with_retry",
        **waiting("AsyncFunction", "async_function", capacity=1, retry_strategy=RETRY),
    ),
    "AsyncDataStream.ordered_wait_batch": call(
        lambda: AsyncDataStream,
        "ordered_wait_batch",
        **waiting("AsyncBatchFunction", "async_batch_function", batch_size=2),
    ),
    "AsyncRetryStrategy.__init__": call(lambda: AsyncRetryStrategy, max_attempts=1),
    "AsyncRetryStrategy.fixed_delay": call(
        lambda: AsyncRetryStrategy, "fixed_delay", max_attempts=1, backoff_time_millis=1
    ),
    "AsyncRetryStrategy.exponential_backoff": call(
        lambda: AsyncRetryStrategy,
        "exponential_backoff",
        max_attempts=1,
        initial_delay=1,
        max_retry_delay=2,
        multiplier=2.0,
    ),
    "WatermarkStrategy.for_generator": call(
        lambda: WatermarkStrategy, "for_generator", factory=WatermarkGenerator
    ),
    "WatermarkStrategy.with_timestamp_assigner": call(
        WatermarkStrategy.for_monotonous_timestamps, "with_timestamp_assigner", timestamps=plain(2)
    ),
    "ExpressionBuckets.__init__": call(lambda: ExpressionBuckets, name="first", expression=plain(0)),
    "FileSink.__init__": call(lambda: FileSink, path="/lake/orders", format=FileFormat.JSON),
    "FileSource.__init__": call(lambda: FileSource, path="/in", schema=ROWS, format=usual("InputFormat")),
    "DataGeneratorSource.__init__": lambda given: DataGeneratorSource(
        {"n": given.get("fields", RandomLong(1, 2))}, records=1
    ),
    "PartitionTime.__init__": call(lambda: PartitionTime),
    "PartitionCommit.__init__": lambda given: PartitionCommit(
        policies=(given["policies"],) if "policies" in given else (of("PartitionPolicy"),)
    ),
    "commit_together": lambda given: commit_together({"out": given.get("sinks", FileSink("/lake/orders"))}),
    "SinkGroup.__init__": lambda given: SinkGroup(
        {"out": given.get("sinks", MemorySink("m"))},
        checkpoint_location="/data/c",
        rows={"out": given.get("rows", plain(1))},
    ),
    "ForeachSink.__init__": call(lambda: ForeachSink, function=plain(2)),
    "ForeachCheckpointSink.__init__": call(lambda: ForeachCheckpointSink, function=plain(2)),
    "MetricGroup.gauge": call(lambda: MetricGroup("u", lambda: None), "gauge", name="n", obj=plain(0)),
    "ReducingStateDescriptor.__init__": call(
        lambda: ReducingStateDescriptor, name="s", reduce=plain(2), value_type="LONG"
    ),
    "AggregatingStateDescriptor.__init__": call(
        lambda: AggregatingStateDescriptor,
        name="s",
        aggregate=usual("AggregateFunction"),
        accumulator_type="LONG",
    ),
    "StreamExecutionEnvironment.add_listener": call(
        environment, "add_listener", listener=usual("JobListener")
    ),
    "StreamExecutionEnvironment.observe": call(environment, "observe", observer=usual("StepObserver")),
    "StreamExecutionEnvironment.register_job_listener": call(
        environment, "register_job_listener", listener=usual("ExecutionListener")
    ),
    "StreamExecutionEnvironment.add_master_hook": call(
        environment, "add_master_hook", hook=usual("MasterHook")
    ),
    "StreamExecutionEnvironment.from_source": call(
        environment, "from_source", source=CollectionSource([], ROWS), uid="u"
    ),
    "SavepointWriter.with_operator": lambda given: bootstrap_function(
        given.get("states", of("KeyedStateBootstrapFunction")), T.StructType(), "u"
    ),
    "KillAt.__init__": call(lambda: KillAt, point=KillPoint.parse("receipt:before:2")),
    "ProgramHarness.__init__": lambda given: ProgramHarness(given.get("program", lambda one: one), ROWS),
    "SinkUnderTest.__init__": call(
        lambda: SinkUnderTest, make_sink=plain(0), read_visible=plain(0), spark=None, folder=None
    ),
    "AggregateWindow.__init__": call(
        lambda: AggregateWindow, aggregate=usual("AggregateFunction"), accumulator_type="LONG"
    ),
    "ProcessWindow.__init__": call(lambda: ProcessWindow, process=usual("ProcessWindowFunction")),
    "ReduceWindow.__init__": call(lambda: ReduceWindow, reduce=plain(2)),
    "DeltaEvictor.__init__": call(lambda: DeltaEvictor, threshold=1, delta=plain(2)),
    "DynamicEventTimeSessionWindows.__init__": call(
        lambda: DynamicEventTimeSessionWindows, gap_ms_of=plain(1)
    ),
    "DynamicProcessingTimeSessionWindows.__init__": call(
        lambda: DynamicProcessingTimeSessionWindows, gap_ms_of=plain(1)
    ),
    "PurgingTrigger.__init__": lambda given: WindowSpec(
        GlobalWindows(), PurgingTrigger(given.get("trigger", CountTrigger(1)))
    ),
    "WindowSpec.__init__": call(lambda: WindowSpec, assigner=TumblingEventTimeWindows(10)),
    "IntervalJoin.__init__": call(lambda: IntervalJoin, **JOIN, lower_ms=0, upper_ms=1),
    "TemporalJoin.__init__": call(lambda: TemporalJoin, **JOIN),
    "WindowJoin.__init__": call(lambda: WindowJoin, **JOIN, windows=WindowSpec(TumblingEventTimeWindows(10))),
    "WindowCoGroup.__init__": call(
        lambda: WindowCoGroup,
        **JOIN,
        windows=WindowSpec(TumblingEventTimeWindows(10)),
        function=usual("CoGroupFunction"),
    ),
    "LookupJoin.__init__": call(lambda: LookupJoin, **JOIN, key_of=plain(1), table=usual("LookupTable")),
}
for ordered in ("ordered_wait", "ordered_wait_with_retry", "ordered_wait_batch"):
    CALLS[f"AsyncDataStream.un{ordered}"] = CALLS[f"AsyncDataStream.{ordered}"]
#: They take no function of a user's, and why.
NOT_OF_USERS = {
    "Accumulator.bind": "called by the runtime", "AverageAccumulator.bind": "the same",
    "DoubleCounter.bind": "the same", "DoubleMaximum.bind": "the same", "DoubleMinimum.bind": "the same",
    "Histogram.bind": "the same", "IntCounter.bind": "the same", "LongCounter.bind": "the same",
    "LongMaximum.bind": "the same", "LongMinimum.bind": "the same", "MetricGroup.__init__": "the same",
    "PartitionCommit.check": "given the sink's assigners, which it has looked at",
    "PartitionTime.check": "the same", "PartitionTime.due_ms": "the same",
    "PartitionTime.time_ms": "the same",
    "WatermarkStrategy.__init__": "made by its class methods",
    "check_sink": "takes cases of our own",
    "JobClient.__init__": "made by execute_async()",
    "HybridSource.__init__": "parts are looked at when the job begins, as sources are",
    "SinkWithDeadLetters.__init__": "sinks are looked at when the job begins, as sinks are",
}  # fmt: skip


def with_broadcast(function: Any) -> Any:
    left, right = two()
    is_keyed = not isinstance(function, BroadcastProcessFunction)
    one = left.key_by("user") if is_keyed else left
    function = of("KeyedBroadcastProcessFunction") if function is None else function
    return one.connect(right.broadcast(RULES)).process(function, output=OUT, uid="u")


# -- what is wrong -----------------------------------------------------------------------------------
async def coroutine(*given: Any) -> bool:
    return False


async def async_generator(*given: Any) -> Any:
    yield 1


def generator(*given: Any) -> Any:
    yield 1


class Async:
    async def __call__(self, *given: Any) -> bool:
        return False

    async def method(self, *given: Any) -> bool:
        return False


class NoFunction:
    """A class where an object, or a function, is wanted."""


@functools.lru_cache
async def cached(*given: Any) -> bool:
    return False


def seven(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any) -> int:
    return 1


WRONG_FUNCTIONS: dict[str, Any] = {
    "async": coroutine,
    "async generator": async_generator,
    "generator": generator,
    "partial of async": functools.partial(coroutine),
    "async, cached": cached,
    "bound async method": Async().method,
    "object with async call": Async(),
    "partial of such an object": functools.partial(Async(), 1),
    "too many arguments": seven,
    "a class": NoFunction,
    "nothing that can be called": object(),
}


def wrong_values(place: Place) -> Iterator[tuple[str, Any]]:
    """Yield all that a parameter must not take."""
    if place.is_plain:
        for name, wrong in WRONG_FUNCTIONS.items():
            is_rows = name == "generator" and "Itera" in place.annotation
            if not is_rows:
                yield name, wrong
    for kind in place.kinds:
        yield f"no {kind.__name__}", object()
        yield f"the class {kind.__name__}", kind
        yield f"a class of {kind.__name__}", type(declared(kind))
        for name, own in inspect.getmembers(kind, inspect.isfunction):
            if name[0] == "_":
                continue
            wanted = "" if inspect.iscoroutinefunction(own) else "async"
            if issubclass(kind, AsyncFunction | AsyncBatchFunction) and name in ("open", "close"):
                wanted = ""
            returns = str(own.__annotations__.get("return", ""))
            for what, wrong in WRONG_METHODS.items():
                if (what == "async" and not wanted) or (what == "generator" and "Itera" in returns):
                    continue
                if what == "generator" and inspect.iscoroutinefunction(own):
                    continue
                yield f"{what} {name}() of {kind.__name__}", declared(kind, **{name: wrong})


WRONG_METHODS = {
    "async": coroutine,
    "async generator": async_generator,
    "generator": generator,
    "too many arguments for": seven,
}


fill_known()
PLACES = places()


def test_each_place_that_takes_a_function_is_called_here() -> None:
    methods = {one.method for one in PLACES}
    assert len(methods) > 80
    # The runtime calls these: with the sinks of the job, and with how the job began.
    methods = {one for one in methods if not one.endswith((".side_outputs", ".in_session"))}
    new = sorted(methods - CALLS.keys() - NOT_OF_USERS.keys())
    assert not new, f"say in CALLS how to call {new}"
    gone = sorted((CALLS.keys() | NOT_OF_USERS.keys()) - methods)
    assert not gone, f"nothing there takes a function any more: {gone}"


@pytest.mark.parametrize("method", CALLS)
def test_what_is_right_is_taken(method: str) -> None:
    CALLS[method]({})


TRIED = [one for one in PLACES if one.method in CALLS]


@pytest.mark.parametrize("place", TRIED, ids=lambda one: f"{one.method} {one.parameter}")
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_nothing_wrong_is_taken(place: Place) -> None:
    taken = []
    for name, wrong in wrong_values(place):
        given: Any = wrong
        if place.parameter == "timed_out":
            given = (LATE, wrong)
        makes = ("factory", "expression", "kill", "obj", "make_sink", "read_visible", "count_open")
        if place.parameter in makes and "class" in name:
            continue  # A class makes an object.
        if place.parameter in ("patterns",):
            given = {"known": wrong}
            if name in ("too many arguments", "a class", "nothing that can be called"):
                continue  # What a rule gives it is said by the rule.
        try:
            CALLS[place.method]({place.parameter: given})
        except UserError as error:
            # One sentence why, and one thing to do.
            assert error.what, name
            assert error.what_to_do, name
        except TypeError as error:
            assert place.method == "MetricGroup.gauge", (name, error)
        else:
            taken.append(name)
    assert not taken, f"{place.method}({place.parameter}=) silently takes: {taken}"


# -- what only a result tells --------------------------------------------------------------------------
def harness_of(program: Any) -> ProgramHarness:
    harness = ProgramHarness(program, ROWS)
    harness.push_all([(("ann", 1), 1), (("ann", 2), 2), (("ann", 3), 3)])
    harness.watermark(100)
    return harness


LATER: dict[str, Any] = {
    "filter": lambda s: s.filter(lambda one: coroutine(one)),
    "filter, keyed": lambda s: s.key_by("user").filter(lambda one: coroutine(one), uid="u"),
    "filter, a generator": lambda s: s.filter(lambda one: generator(one)),
    "map": lambda s: s.map(lambda one: coroutine(one), output=OUT),
    "map, a field": lambda s: s.map(lambda one: (coroutine(one),), output=OUT),
    "flat_map": lambda s: s.flat_map(lambda one: coroutine(one), output=OUT),
    "key_by": lambda s: s.key_by(lambda one: coroutine(one), key="LONG").map(
        lambda one: one, output=ROWS, uid="u"
    ),
    "reduce": lambda s: s.key_by("user").reduce(lambda one, other: coroutine(one), uid="u"),
    "windows": lambda s: (
        s.key_by("user").window(TumblingEventTimeWindows(10)).reduce(lambda one, two: coroutine(one), uid="u")
    ),
    "pattern": lambda s: CEP.pattern(
        s.key_by("user"), Pattern.begin("first").where(lambda one: coroutine(one))
    ).select(lambda match: (1,), output=OUT, uid="u"),
    "pattern that looks back": lambda s: CEP.pattern(
        s.key_by("user"), Pattern.begin("first").where(lambda one, ctx: coroutine(one))
    ).select(lambda match: (1,), output=OUT, uid="u"),
    "select": lambda s: CEP.pattern(s.key_by("user"), Pattern.begin("first")).select(
        lambda match: coroutine(match), output=OUT, uid="u"
    ),
}


@pytest.mark.parametrize("place", LATER)
@pytest.mark.filterwarnings("error")
def test_a_result_that_has_not_run_is_refused(place: str) -> None:
    with pytest.raises((UserError, TypeError), match="of which nothing has run"):
        harness_of(LATER[place])


def test_a_partition_that_has_not_run_is_refused() -> None:
    with pytest.raises(NotRun, match="the partitioner returned a coroutine"):
        partition: Any = coroutine
        RecordPartitioner(partition, lambda record: record, 2)("ann")


def test_a_pattern_of_an_async_condition_matches_nothing_and_says_why() -> None:
    async def no(event: Any) -> bool:
        return False

    with pytest.raises(UserError, match=r"the condition of first\.where\(\) would never run"):
        Pattern.begin("first").where(no)


def test_async_open_of_a_map_function_is_refused() -> None:
    class Opens(MapFunction):
        async def open(self, context: Any) -> None:  # type: ignore[override]
            raise AssertionError

        def map(self, value: Any) -> Any:
            return value

    with pytest.raises(UserError, match=r"open\(\) of map\(\) of 'u' would never run\. It is async"):
        keyed().map(Opens(), output=ROWS, uid="u")
