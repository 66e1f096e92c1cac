"""Streams with PyFlink's methods; each makes streams of ours, and knows the type of its elements."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Self

from flinkish_spark.connectors.driver_sinks import ForeachSink, MemorySink
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.pyflink.common.typeinfo import (
    AS_IT_IS,
    PICKLED,
    TypeInformation,
    Types,
    find_hinted_type,
    show,
)
from flinkish_spark.pyflink.common.types import Row
from flinkish_spark.pyflink.datastream import border
from flinkish_spark.pyflink.datastream.functions import Function, KeyedProcessFunction
from flinkish_spark.pyflink.datastream.output_tag import OutputTag
from flinkish_spark.pyflink.datastream.state import (
    EncodedAggregate,
    EncodedReduce,
    MapStateDescriptor,
    ValueStateDescriptor,
    same,
)
from flinkish_spark.pyflink.datastream.window import (
    CountSlidingWindowAssigner,
    CountTumblingWindowAssigner,
    translate_assigner,
    translate_trigger,
)


def _find_type(output_type: TypeInformation | None, function: Any, *methods: str) -> TypeInformation:
    """Return a declared type, or the one that the hints of a function's methods say, or pickled."""
    if output_type is not None:
        return output_type
    calls = [getattr(function, method, function) for method in methods]
    makes_many = methods[0].startswith(("flat_map", "process", "apply"))
    found = [find_hinted_type(call, makes_many=makes_many) for call in calls if callable(call)]
    return found[0] if found and all(one == found[0] for one in found) else PICKLED


class _Stream:
    """The base of all streams: an environment, a stream of ours, the types of its elements and keys."""

    #: What the methods of functions end in: two streams have two of each.
    _sides: tuple[str, ...] = ("",)

    def __init__(
        self, env: Any, stream: Any, info: TypeInformation, key: TypeInformation | None = None
    ) -> None:
        self._env, self._stream, self._info, self._key = env, stream, info, key

    def _uid(self, method: str, *others: Any) -> str:
        fronts = [getattr(one, "_entry", None) or one._node for one in (self._stream, *others)]
        uid: str = self._env.graph.derive_uid(method, fronts)
        return uid

    def _apply(self, function: Any, method: str, made: TypeInformation) -> DataStream:
        raise NotImplementedError

    def _call(self, function: Any, method: str, output_type: TypeInformation | None) -> DataStream:
        methods = [f"{method}{side}" for side in self._sides]
        return self._apply(function, method, _find_type(output_type, function, *methods))

    def map(self, func: Any, output_type: TypeInformation | None = None) -> DataStream:
        return self._call(func, "map", output_type)

    def flat_map(self, func: Any, output_type: TypeInformation | None = None) -> DataStream:
        return self._call(func, "flat_map", output_type)

    def process(self, func: Any, output_type: TypeInformation | None = None) -> DataStream:
        return self._call(func, "process_element", output_type)

    def filter(self, func: Any) -> DataStream:
        return self._apply(func, "filter", self._info)

    def connect(self, ds: Any) -> Any:
        return (BroadcastConnectedStream if isinstance(ds, BroadcastStream) else ConnectedStreams)(self, ds)

    def get_execution_environment(self) -> Any:
        return self._env

    def get_type(self) -> TypeInformation:
        return self._info


def _move(name: str) -> Callable[[DataStream], DataStream]:
    return lambda self: self._make_same(getattr(self._stream, name)())


class DataStream(_Stream):
    """A stream of elements. Made by an environment, never directly."""

    #: The tag of late elements, and their type.
    _late: tuple[str, TypeInformation] | None = None

    def _make_same(self, stream: Any) -> DataStream:
        return DataStream(self._env, stream, self._info)

    def _values(self) -> DataStream:
        return self

    def name(self, name: str) -> Self:
        self._stream.name(name)
        return self

    def get_name(self) -> str:
        return str(self._stream._describe_node())

    def uid(self, uid: str) -> Self:
        self._stream.uid(uid)
        return self

    def _ignore(self, *_: Any) -> Self:
        # How many tasks there are, and which functions share them, is set in Spark.
        return self

    set_parallelism = set_max_parallelism = set_buffer_timeout = slot_sharing_group = forward = _ignore
    start_new_chain = disable_chaining = force_non_parallel = set_description = set_uid_hash = _ignore
    shuffle, rebalance, rescale = _move("shuffle"), _move("rebalance"), _move("rescale")

    def _apply(self, function: Any, method: str, made: TypeInformation) -> DataStream:
        if method == "process_element":
            elements = border.Elements(function, method, [self._info], made)
            return DataStream(self._env, self._stream.process(elements, output=made.fields), made)
        rows = border.Rows(function, method, [self._info], made)
        return DataStream(self._env, self._stream.flat_map(rows, output=made.fields), made)

    def project(self, *field_indexes: int) -> DataStream:
        infos = getattr(self._info, "infos", None)
        made = PICKLED if infos is None else Types.TUPLE([infos[at] for at in field_indexes])
        return self.map(lambda value: tuple(value[at] for at in field_indexes), made)

    def key_by(self, key_selector: Any, key_type: TypeInformation | None = None) -> KeyedStream:
        key = _find_type(key_type, key_selector, "get_key").key
        function = border.Key(key_selector, "get_key", [self._info], key, key)
        keyed = KeyedStream(self._env, self._stream.key_by(function, key=key.data_type), self._info, key)
        keyed._before = self
        return keyed

    def union(self, *streams: Any) -> DataStream:
        united: list[DataStream] = [self, *(one._values() for one in streams)]
        if any(one._info != self._info for one in united):
            united = [one.map(same, PICKLED) for one in united]
        first, *others = united
        return first._make_same(first._stream.union(*(one._stream for one in others)))

    def broadcast(self, *descriptors: MapStateDescriptor) -> BroadcastStream:
        own = self._stream.broadcast(*(one.own for one in descriptors))
        return BroadcastStream(self._env, own, self._info)

    def partition_custom(self, partitioner: Any, key_selector: Any) -> DataStream:
        selector = border.RecordCall(getattr(key_selector, "get_key", key_selector), self._info)
        return self._make_same(self._stream.partition_custom(partitioner, selector))

    def assign_timestamps_and_watermarks(self, watermark_strategy: Any) -> DataStream:
        strategy = watermark_strategy
        if callable(strategy.timestamps):
            strategy = strategy.with_timestamp_assigner(border.RecordCall(strategy.timestamps, self._info))
        return self._make_same(self._stream.assign_timestamps_and_watermarks(strategy))

    def get_side_output(self, output_tag: OutputTag) -> DataStream:
        is_late = self._late is not None and self._late[0] == output_tag.tag_id
        info = self._late[1] if self._late and is_late else output_tag.type_info
        return DataStream(self._env, self._stream.get_side_output(output_tag.own(info)), info)

    def window_all(self, window_assigner: Any) -> WindowedStream:
        return self.key_by(lambda value: 0, Types.INT())._window(window_assigner, "all_")

    def count_window_all(self, size: int, slide: int = 0) -> WindowedStream:
        return self.window_all(_count_windows(size, slide))

    def sink_to(self, sink: Any) -> DataStream:
        if self._info == PICKLED:
            raise SchemaError(
                f"{type(sink).__name__} gets a stream whose elements have no declared type",
                why="a sink writes columns, and these are pickled Python values",
                what_to_do="say output_type=Types.ROW_NAMED(...) in the step before sink_to()",
            )
        self._stream.sink_to(sink, uid=self._uid("sink"))
        return self

    add_sink = sink_to

    def print(self, sink_identifier: str | None = None) -> DataStream:
        prefix = "" if sink_identifier is None else f"{sink_identifier}> "
        sink = ForeachSink(lambda row, checkpoint: print(f"{prefix}{row[0]}", flush=True))
        return self.map(show, Types.STRING()).sink_to(sink)

    def execute_and_collect(self, job_execution_name: str | None = None, limit: int | None = None) -> Any:
        sink = MemorySink(self._uid("collect"))
        sink.clear()
        self._stream.sink_to(sink, uid=self._uid("sink"))
        self._env.execute(job_execution_name)
        values = [self._info.from_row(row) for row in sink.rows()]
        return CloseableIterator(values) if limit is None else values[:limit]


class CloseableIterator:
    """The elements that `execute_and_collect` returns."""

    def __init__(self, values: list[Any]) -> None:
        self._values = iter(values)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._values)

    next = __next__

    def __enter__(self) -> Self:
        return self

    def close(self, *_: object) -> None:
        """Release nothing: the elements are here."""

    __exit__ = close


def _count_windows(size: int, slide: int) -> Any:
    return CountSlidingWindowAssigner(size, slide) if slide else CountTumblingWindowAssigner(size)


class _Reduce(KeyedProcessFunction):
    """The running reduction of each key; the function may have state, as in PyFlink."""

    def __init__(self, reduce: Any, info: TypeInformation) -> None:
        self._reduce, self._info = reduce, info

    def open(self, context: Any) -> None:
        if isinstance(self._reduce, Function):
            self._reduce.open(context)
        self._reduced = context.get_state(ValueStateDescriptor("reduced", self._info))

    def process_element(self, value: Any, ctx: Any) -> Any:
        before = self._reduced.value()
        call = getattr(self._reduce, "reduce", self._reduce)
        now = value if before is None else call(before, value)
        self._reduced.update(now)
        yield now


def _fold(fold: Callable[[Any, Any], Any], *, takes_whole: bool = False) -> Callable[..., DataStream]:
    """Return a method of streams that folds one field of elements, or single values."""

    def method(self: KeyedStream, position: int | str = 0, **named: int | str) -> DataStream:
        at: Any = next(iter(named.values()), position)

        def reduce(first: Any, second: Any) -> Any:
            if not isinstance(first, tuple | list | Row):
                return fold(first, second)
            made = fold(first[at], second[at])
            if takes_whole:
                return first if made == first[at] else second
            folded = list(first)
            names = first._fields if isinstance(first, Row) else []
            folded[names.index(at) if isinstance(at, str) else at] = made
            return Row.of(names, folded) if isinstance(first, Row) else type(first)(folded)

        return self.reduce(reduce)

    return method


class KeyedStream(_Stream):
    """A stream partitioned by key."""

    _before: DataStream

    def _values(self) -> DataStream:
        return self._before

    def __getattr__(self, name: str) -> Any:
        if name in ("print", "sink_to", "add_sink", "execute_and_collect", "union", "key_by", "project"):
            return getattr(self._before, name)
        raise AttributeError(f"a KeyedStream has no {name}()")

    def _apply(self, function: Any, method: str, made: TypeInformation) -> DataStream:
        process = border.KeyedElements(function, method, [self._info], made, self._key)
        own = self._stream.process(process, output=made.fields, uid=self._uid(method))
        return DataStream(self._env, own, made)

    def reduce(self, func: Any) -> DataStream:
        return self._apply(_Reduce(func, self._info), "process_element", self._info)

    # First these: in the next line `min` and `max` become methods.
    min_by, max_by = _fold(min, takes_whole=True), _fold(max, takes_whole=True)
    sum, min, max = _fold(operator.add), _fold(min), _fold(max)

    def _window(self, assigner: Any, kind: str) -> WindowedStream:
        windows = self._stream.window(translate_assigner(assigner, self._info))
        return WindowedStream(self, windows, kind)

    def window(self, window_assigner: Any) -> WindowedStream:
        return self._window(window_assigner, "")

    def count_window(self, size: int, slide: int = 0) -> WindowedStream:
        return self.window(_count_windows(size, slide))


class WindowedStream:
    """A keyed stream in windows; also `AllWindowedStream`, of one key."""

    def __init__(self, keyed: KeyedStream, windows: Any, kind: str, late: OutputTag | None = None) -> None:
        self._keyed, self._windows, self._kind, self._late = keyed, windows, kind, late
        self._info, self.get_input_type = keyed._info, keyed.get_type

    def _change(self, windows: Any, late: OutputTag | None = None) -> WindowedStream:
        return WindowedStream(self._keyed, windows, self._kind, late or self._late)

    def trigger(self, trigger: Any) -> WindowedStream:
        return self._change(self._windows.trigger(translate_trigger(trigger, self._info)))

    def allowed_lateness(self, time_ms: Any) -> WindowedStream:
        return self._change(self._windows.allowed_lateness(time_ms))

    def side_output_late_data(self, output_tag: OutputTag) -> WindowedStream:
        return self._change(self._windows.side_output_late_data(output_tag.own(self._info)), output_tag)

    def _results(self, method: str, made: TypeInformation, *functions: Any, **settings: Any) -> DataStream:
        call = getattr(self._windows, method)
        own = call(*functions, output=made.fields, uid=self._keyed._uid(method), **settings)
        stream = DataStream(self._keyed._env, own, made)
        stream._late = None if self._late is None else (self._late.tag_id, self._info)
        return stream

    def _translate(self, function: Any, given: TypeInformation, output_type: TypeInformation | None) -> Any:
        method = "apply" if hasattr(function, "apply") else "process"
        made = _find_type(output_type, function, method)
        return border.WindowBorder(function, f"{self._kind}{method}", [given], made, self._keyed._key), made

    def process(self, func: Any, output_type: TypeInformation | None = None) -> DataStream:
        function, made = self._translate(func, self._info, output_type)
        return self._results("process", made, function)

    apply = process

    def reduce(
        self, reduce_function: Any, window_function: Any = None, output_type: TypeInformation | None = None
    ) -> DataStream:
        reduce = EncodedReduce(reduce_function, self._info.to_row, self._info.from_row)
        if window_function is None:
            return self._results("reduce", self._info, reduce)
        then, made = self._translate(window_function, self._info, output_type)
        return self._results("reduce", made, reduce, then)

    def aggregate(
        self,
        aggregate_function: Any,
        window_function: Any = None,
        accumulator_type: TypeInformation | None = None,
        output_type: TypeInformation | None = None,
    ) -> DataStream:
        kind = _find_type(accumulator_type, aggregate_function, "create_accumulator")
        made = _find_type(output_type, aggregate_function, "get_result")
        then: tuple[Any, ...] = ()
        encode = made.to_row
        if window_function is not None:
            function, made = self._translate(window_function, AS_IT_IS, output_type)
            then, encode = (function,), same
        aggregate = EncodedAggregate(aggregate_function, self._info.from_row, kind, encode)
        return self._results("aggregate", made, aggregate, *then, accumulator=kind.data_type)


AllWindowedStream = WindowedStream


class ConnectedStreams(_Stream):
    """Two streams, read by one function."""

    _sides: tuple[str, ...] = ("1", "2")

    def __init__(self, stream1: Any, stream2: Any) -> None:
        super().__init__(stream1._env, stream1._stream, stream1._info, stream1._key)
        self._first, self._second = stream1, stream2

    def key_by(self, key_selector1: Any, key_selector2: Any, key_type: Any = None) -> ConnectedStreams:
        first = self._first._values().key_by(key_selector1, key_type)
        return ConnectedStreams(first, self._second._values().key_by(key_selector2, key_type))

    def _apply(self, function: Any, method: str, made: TypeInformation) -> DataStream:
        given, other = [self._info, self._second._info], self._second._stream
        both = self._stream.connect(other)
        if self._key is None:
            elements = border.ConnectedElements(function, method, given, made)
            return DataStream(self._env, both.process(elements, output=made.fields), made)
        process = border.ConnectedKeyedElements(function, method, given, made, self._key)
        uid = self._uid(method, other)
        return DataStream(self._env, both.process(process, output=made.fields, uid=uid), made)


class BroadcastStream(_Stream):
    """A stream that every task reads whole."""


class BroadcastConnectedStream(ConnectedStreams):
    """A stream connected with a broadcast one."""

    _sides = ("",)

    def _apply(self, function: Any, method: str, made: TypeInformation) -> DataStream:
        kind = border.Broadcast if self._key is None else border.KeyedBroadcast
        process = kind(function, method, [self._info, self._second._info], made, self._key)
        other = self._second._stream
        own = self._stream.connect(other).process(process, output=made.fields, uid=self._uid(method, other))
        return DataStream(self._env, own, made)
