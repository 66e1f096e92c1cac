"""What a test gives a harness, as a stream graph: a program, or one function with its key and its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from pyspark.sql import types as T

from flinkish_spark.arguments import instance_of
from flinkish_spark.checkpointed_functions import CheckpointedProcessFunction
from flinkish_spark.datastream import DataStream
from flinkish_spark.errors import ConfigError, GraphError
from flinkish_spark.functions import (
    BroadcastProcessFunction,
    FilterFunction,
    FlatMapFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    MapFunction,
)
from flinkish_spark.graph.declared import check_max_parallelism, output_schema
from flinkish_spark.graph.partitioning import checked_parallelism
from flinkish_spark.graph.stream_graph import SourceNode, StreamGraph
from flinkish_spark.keyed_stream import KeyedStream
from flinkish_spark.operators.vectorized import VectorizedProcessFunction
from flinkish_spark.sources.collection import CollectionSource
from flinkish_spark.stream_functions import (
    CoFlatMapFunction,
    CoMapFunction,
    CoProcessFunction,
    ProcessFunction,
)

Program = Callable[..., DataStream]
_SETTINGS = ("key", "key_type", "output", "broadcast", "uid")
_OF_RECORDS = (CoMapFunction, CoFlatMapFunction)
_TWO = (
    KeyedCoProcessFunction,
    CoProcessFunction,
    BroadcastProcessFunction,
    KeyedBroadcastProcessFunction,
    *_OF_RECORDS,
)


class _Environment:
    """What streams need of an environment to be declared; there is no session."""

    def __init__(self, parallelism: int, max_parallelism: int) -> None:
        self.graph = StreamGraph(max_parallelism=max_parallelism)
        conf = SimpleNamespace(get=lambda name, default=None: str(parallelism))
        self.spark = SimpleNamespace(conf=conf)


def declared(
    program: Program, inputs: Sequence[str | T.StructType], parallelism: int, max_parallelism: int
) -> tuple[list[tuple[SourceNode, T.StructType]], DataStream]:
    """Return a source for each input, with its fields, and the stream that a program makes of them.

    Raises
    ------
    ConfigError, GraphError, SchemaError, UserFunctionError
        The program declares what cannot be, or returns no stream.
    """
    checked_parallelism("ProgramHarness", parallelism)
    check_max_parallelism(max_parallelism)
    if not callable(program):
        raise ConfigError(
            f"a harness got a {type(program).__name__} as its program",
            what_to_do="give it a function from streams to a stream; for a function of single elements call "
            "ProgramHarness.of(function, ...)",
        )
    if not inputs:
        raise ConfigError(
            "a harness got no input", what_to_do='say the fields of each: "user STRING, amount LONG"'
        )
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
    """Return the program that calls one function, and the settings that are not about it.

    Raises
    ------
    ConfigError
        It is no function that a stream takes, or something is missing.
    """
    rest = {name: value for name, value in settings.items() if name not in _SETTINGS}
    key, kind, output = (settings.get(name) for name in ("key", "key_type", "output"))
    uid = settings.get("uid", "operator")
    wanted = 2 if isinstance(function, _TWO) else 1
    if inputs != wanted:
        raise ConfigError(
            f"a {type(function).__name__} reads {wanted} inputs, and the fields of {inputs} are given",
            what_to_do='say the fields of each: "user STRING, amount LONG"',
        )
    made = {"output": output, "uid": uid}
    if isinstance(function, BroadcastProcessFunction | KeyedBroadcastProcessFunction):
        states = _needed(
            settings, "broadcast", function, 'broadcast=[MapStateDescriptor("rules", "STRING", "LONG")]'
        )
        is_keyed = isinstance(function, KeyedBroadcastProcessFunction)
        keys = _keys(_needed(settings, "key", function, 'key="user"')) if is_keyed else ()

        def broadcasting(stream: DataStream, rules: DataStream) -> DataStream:
            first: Any = stream.key_by(*keys, key=kind) if is_keyed else stream
            joined: DataStream = first.connect(rules.broadcast(*states)).process(function, **made)
            return joined

        return broadcasting, rest
    if isinstance(function, KeyedCoProcessFunction) or (
        key is not None and isinstance(function, _OF_RECORDS)
    ):
        pair = _needed(settings, "key", function, 'key=("user", "payer")')
        first, second = _pair(pair)
        return (
            lambda left, right: _of_two(left.connect(right).key_by(first, second, key=kind), function, made)
        ), rest
    if isinstance(function, KeyedProcessFunction | VectorizedProcessFunction):
        keys = _keys(_needed(settings, "key", function, 'key="user"'))
        return lambda stream: stream.key_by(*keys, key=kind).process(function, **made), rest
    if key is not None and isinstance(function, MapFunction | FlatMapFunction | FilterFunction):
        keys = _keys(key)
        return lambda stream: _of_records(stream.key_by(*keys, key=kind), function, made), rest
    if key is not None:
        raise ConfigError(
            f"a {type(function).__name__} has no key", what_to_do="leave key= out, or give a keyed function"
        )
    return _unkeyed(function, output, uid), rest


def _of_records(keyed: KeyedStream, function: Any, made: dict[str, Any]) -> DataStream:
    if isinstance(function, FilterFunction):
        return keyed.filter(function, uid=made["uid"])
    call = keyed.map if isinstance(function, MapFunction) else keyed.flat_map
    return call(function, **made)


def _of_two(connected: Any, function: Any, made: dict[str, Any]) -> Any:
    if isinstance(function, CoMapFunction):
        return connected.map(function, **made)
    if isinstance(function, CoFlatMapFunction):
        return connected.flat_map(function, **made)
    return connected.process(function, **made)


def _unkeyed(function: Any, output: Any, uid: str) -> Program:
    if isinstance(function, CoProcessFunction | CoMapFunction | CoFlatMapFunction):
        return lambda left, right: _of_two(left.connect(right), function, {"output": output, "name": uid})
    if isinstance(function, CheckpointedProcessFunction):
        return lambda stream: stream.process_with_state(function, output=output, uid=uid)
    if isinstance(function, ProcessFunction):
        return lambda stream: stream.process(function, output=output, name=uid)
    if isinstance(function, MapFunction):
        return lambda stream: stream.map(function, output=output, name=uid)
    if isinstance(function, FlatMapFunction):
        return lambda stream: stream.flat_map(function, output=output, name=uid)
    if isinstance(function, FilterFunction):
        return lambda stream: stream.filter(function, name=uid)
    raise ConfigError(
        f"ProgramHarness.of() got a {type(function).__name__}",
        what_to_do="give it an instance of one of the function classes; for windows, joins and several "
        "operators give ProgramHarness(...) a program",
    )


def _needed(settings: Mapping[str, Any], name: str, function: Any, example: str) -> Any:
    if settings.get(name) is None:
        raise ConfigError(
            f"a {type(function).__name__} needs {name}=", what_to_do=f"say it, for example {example}"
        )
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
