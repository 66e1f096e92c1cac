"""Connected streams and broadcast streams: one function reads two streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column

from flinkish_spark.core.elements import OutputType
from flinkish_spark.core.errors import GraphError
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.core.validation import check_methods
from flinkish_spark.functions.keyed import (
    BroadcastProcessFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    RichFunction,
)
from flinkish_spark.functions.stream import CoProcessFunction, KeySelector
from flinkish_spark.operators.process import CoFlatMapRecords, CoMapRecords
from flinkish_spark.planning.declare import (
    RecordCall,
    declare_operator,
    infer_output,
    is_key_function,
    make_connected_calls,
    resolve_uid,
)
from flinkish_spark.planning.factories import BroadcastFunctions
from flinkish_spark.planning.stream_graph import KeyedEntry
from flinkish_spark.planning.transforms import make_co_process, make_connected_transforms
from flinkish_spark.state.descriptors import MapStateDescriptor
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.types.hints import StateType

if TYPE_CHECKING:
    from flinkish_spark.datastream.data_stream import DataStream
    from flinkish_spark.datastream.environment import StreamExecutionEnvironment
    from flinkish_spark.planning.stream_graph import KeyedFunction, StreamNode


_Calls = tuple[Callable[[Any], Any], Callable[[Any], Any]]
ConnectedKey = str | Column | tuple[str | Column, ...] | Callable[[Any], Any] | KeySelector


class ConnectedStreams:
    """Two streams, maybe with different fields. Made by :meth:`DataStream.connect`."""

    def __init__(self, first: DataStream, second: DataStream) -> None:
        self._first, self._second = first, second

    def key_by(
        self, first: ConnectedKey, second: ConnectedKey, *, key: StateType | None = None
    ) -> KeyedConnectedStreams:
        """Partition both streams by key, so that equal keys share state.

        Parameters
        ----------
        first, second
            The key of each: a column name, a column expression, or a tuple of these; or a function of a
            record. They have the same types.
        key
            Type of the functions' results; by default their type hints. See :meth:`DataStream.key_by`.
        """
        # Only functions need it; without a function key_by refuses it.
        is_of_function = is_key_function(first) or is_key_function(second)
        left, right = (
            stream.key_by(*_key(given), key=None if is_of_function and not is_key_function(given) else key)
            for stream, given in ((self._first, first), (self._second, second))
        )
        return left.connect(right)

    def map(
        self, first: Any, second: Any = None, *, output: OutputType | None = None, name: str | None = None
    ) -> DataStream:
        """Make one row of each record, without state; see :meth:`DataStream.map`.

        Parameters
        ----------
        first, second
            A :class:`~flinkish_spark.CoMapFunction` alone; or for each stream a function of one record.
        output
            Fields of the rows of both; by default those in the type hint of each function, or of the other.
        """
        return self._transform_each("map", first, second, output, name)

    def flat_map(
        self, first: Any, second: Any = None, *, output: OutputType | None = None, name: str | None = None
    ) -> DataStream:
        """Make any number of rows of each record.

        Takes a :class:`~flinkish_spark.CoFlatMapFunction` or two functions; see :meth:`map` and
        :meth:`DataStream.flat_map`.
        """
        return self._transform_each("flat_map", first, second, output, name)

    def _transform_each(
        self, method: str, first: Any, second: Any, output: OutputType | None, name: str | None
    ) -> DataStream:
        left, right = make_connected_transforms(method, first, second, output, name)
        return self._first._apply_function(left).union(self._second._apply_function(right))

    def process(
        self, function: CoProcessFunction, *, output: OutputType | None = None, name: str | None = None
    ) -> DataStream:
        """Make any number of rows of each record, to several outputs; see :meth:`DataStream.process`.

        Without keys there is no state and there are no timers. For these call :meth:`key_by` first.

        Parameters
        ----------
        function
            A function with a method for each stream; each stream has a copy of it.
        output
            Fields of the main output; by default those in the type hint of `process_element1`.
        """
        left, right = make_co_process(function, output, name)
        return self._first._apply_function(left).union(self._second._apply_function(right))


class KeyedConnectedStreams:
    """Two keyed streams that share the state and the timers of a key.

    `uid` and `max_parallelism` of all methods are as of :meth:`KeyedStream.process`.
    """

    def __init__(
        self, environment: StreamExecutionEnvironment, first: KeyedEntry, second: KeyedEntry
    ) -> None:
        self._environment, self._entries = environment, (first, second)

    @check_arguments()
    def process(
        self,
        function: KeyedCoProcessFunction,
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Process the elements of both streams, one after the other for each key.

        Within a micro-batch the elements of the first stream come before elements of the second; this order
        is no guarantee.

        Parameters
        ----------
        function
            Serialised here, once.
        output
            Fields of the emitted rows; by default those in the type hint of `process_element1`, or else of
            `process_element2` or `on_timer`.
        """
        uid = resolve_uid(self._environment.graph, uid, "process", *self._entries)
        if output is None:
            calls = (function.process_element2, function.on_timer)
            output = infer_output(function.process_element1, f"'{uid}'", *calls, is_iterable=True)
        return add_operator(self._environment, self._entries, function, output, uid, max_parallelism)

    def map(
        self,
        first: Any,
        second: Any = None,
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Make one row of each record, by functions that may keep state for the record's key.

        Parameters
        ----------
        first, second
            A :class:`~flinkish_spark.CoMapFunction` alone, whose methods share their states; or for each
            stream a :class:`~flinkish_spark.MapFunction` or a function of one record. Serialised here.
        output
            Fields of the rows; by default those in the type hint of the first, or else of the second.
        """
        uid = resolve_uid(self._environment.graph, uid, "map", *self._entries)
        left, right = make_connected_calls(first, second, "map", uid)
        if output is None:
            output = infer_output(left.call, f"'{uid}'", right.call, is_iterable=False)
        made = CoMapRecords(*_split_calls(left, right))
        return add_operator(self._environment, self._entries, made, output, uid, max_parallelism)

    def flat_map(
        self,
        first: Any,
        second: Any = None,
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Make any number of rows of each record, by functions that may keep state for its key.

        Parameters
        ----------
        first, second
            A :class:`~flinkish_spark.CoFlatMapFunction` alone; or for each stream a
            :class:`~flinkish_spark.FlatMapFunction` or a function that returns or yields rows, or None.
        """
        uid = resolve_uid(self._environment.graph, uid, "flat_map", *self._entries)
        left, right = make_connected_calls(first, second, "flat_map", uid)
        if output is None:
            output = infer_output(left.call, f"'{uid}'", right.call, is_iterable=True)
        made = CoFlatMapRecords(*_split_calls(left, right))
        return add_operator(self._environment, self._entries, made, output, uid, max_parallelism)


def add_operator(
    environment: StreamExecutionEnvironment,
    entries: Sequence[KeyedEntry],
    function: KeyedFunction,
    output: OutputType | None,
    uid: str,
    max_parallelism: int | None,
) -> DataStream:
    from flinkish_spark.datastream.data_stream import DataStream  # the two make each other

    node = declare_operator(environment.graph, entries, function, output, uid, max_parallelism)
    return DataStream(environment, node)


def _split_calls(left: RecordCall, right: RecordCall) -> tuple[_Calls, tuple[RichFunction, ...]]:
    rich = [left.rich] if left.rich is right.rich else [left.rich, right.rich]
    return (left.call, right.call), tuple(one for one in rich if one is not None)


def _key(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


class BroadcastStream:
    """A broadcast stream: every partition of the operator that reads it gets all of its records.

    Made by :meth:`DataStream.broadcast`; a keyed or plain stream is connected with it.
    """

    def __init__(
        self,
        environment: StreamExecutionEnvironment,
        node: StreamNode,
        descriptors: tuple[MapStateDescriptor, ...],
    ) -> None:
        self._environment, self._descriptors = environment, descriptors
        self._entry = KeyedEntry(node, (), Distribution.BROADCAST)


class BroadcastConnectedStream:
    """A stream connected with a broadcast stream; one function reads both.

    `uid` and `max_parallelism` are as of :meth:`KeyedStream.process`.
    """

    def __init__(self, entry: KeyedEntry, other: BroadcastStream) -> None:
        self._entry, self._other = entry, other

    def process(
        self,
        function: KeyedBroadcastProcessFunction | BroadcastProcessFunction,
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Process the elements of the stream, with the state that the broadcast elements fill.

        In a micro-batch the broadcast elements come first, in every partition. Each partition keeps a copy of
        the broadcast state, which goes through checkpoints, savepoints and rescaling.

        Parameters
        ----------
        function
            A KeyedBroadcastProcessFunction if the stream is keyed, else a BroadcastProcessFunction.
        output
            Fields of the emitted rows; by default those in the type hint of `process_element`.
        """
        uid = resolve_uid(self._other._environment.graph, uid, "process", self._entry, self._other._entry)
        is_keyed = self._entry.distribution is Distribution.BY_KEY
        wanted: Any = KeyedBroadcastProcessFunction if is_keyed else BroadcastProcessFunction
        if not isinstance(function, wanted):
            raise GraphError(
                f"process() of '{uid}' got a {type(function).__name__}",
                why=f"the stream that is connected with a broadcast one is {'' if is_keyed else 'not '}keyed",
                what_to_do=f"give it an instance of a {wanted.__name__} subclass",
            )
        check_methods(function, wanted, f"'{uid}'")
        if output is None:
            timers = (function.on_timer,) if isinstance(function, KeyedBroadcastProcessFunction) else ()
            calls = (function.process_broadcast_element, *timers)
            output = infer_output(function.process_element, f"'{uid}'", *calls, is_iterable=True)
        entries = (self._entry, self._other._entry)
        made = BroadcastFunctions(function, self._other._descriptors)
        return add_operator(self._other._environment, entries, made, output, uid, max_parallelism)


def broadcast_states(descriptors: tuple[Any, ...]) -> tuple[MapStateDescriptor, ...]:
    what_to_do = 'give a MapStateDescriptor: broadcast(MapStateDescriptor("rules", "STRING", "LONG"))'
    if not descriptors:
        raise GraphError(
            "broadcast() got no state",
            why="every task gets all records, to store them for records of another stream; a function of "
            "this stream alone would emit everything once per task",
            what_to_do=f"{what_to_do}, and connect a stream with it",
        )
    for descriptor in descriptors:
        if not isinstance(descriptor, MapStateDescriptor):
            raise GraphError(f"broadcast() got a {type(descriptor).__name__}", what_to_do=what_to_do)
        if descriptor.ttl is not None:
            raise GraphError(
                f"the broadcast state '{descriptor.name}' has a time to live",
                why="its copies would not stay equal: partitions look at it at different times",
                what_to_do="leave the ttl out, and remove entries in process_broadcast_element()",
            )
    names = [descriptor.name for descriptor in descriptors]
    if len(set(names)) < len(names):
        raise GraphError(f"broadcast() got states of one name: {', '.join(names)}", what_to_do=what_to_do)
    return descriptors


def check_same_job(one: StreamExecutionEnvironment, other: StreamExecutionEnvironment, method: str) -> None:
    if other is not one:
        raise GraphError(
            f"{method}() got a stream of another environment",
            what_to_do="make both streams with one environment",
        )
