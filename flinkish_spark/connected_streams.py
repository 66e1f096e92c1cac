"""Two streams that one function reads, as a user writes them: `orders.connect(limits)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column

from flinkish_spark.arguments import refuse_async
from flinkish_spark.errors import GraphError
from flinkish_spark.functions import KeyedCoProcessFunction, RichFunction
from flinkish_spark.graph.declared import declare_operator
from flinkish_spark.graph.key_selectors import is_key_function
from flinkish_spark.graph.output_types import inferred_output
from flinkish_spark.graph.python_transforms import co_process_rows, connected_rows
from flinkish_spark.graph.record_callables import RecordCall, connected_calls
from flinkish_spark.graph.stream_graph import KeyedEntry
from flinkish_spark.operators.record_functions import CoFlatMapRecords, CoMapRecords
from flinkish_spark.runtime.hinted_types import OutputType, StateType
from flinkish_spark.stream_functions import CoProcessFunction, KeySelector

if TYPE_CHECKING:
    from flinkish_spark.datastream import DataStream
    from flinkish_spark.environment import StreamExecutionEnvironment


_Calls = tuple[Callable[[Any], Any], Callable[[Any], Any]]
ConnectedKey = str | Column | tuple[str | Column, ...] | Callable[[Any], Any] | KeySelector


class ConnectedStreams:
    """Two streams, maybe with different fields. Made by :meth:`DataStream.connect`.

    Parameters
    ----------
    first, second
        The streams.
    """

    def __init__(self, first: DataStream, second: DataStream) -> None:
        self._first, self._second = first, second

    def key_by(
        self, first: ConnectedKey, second: ConnectedKey, *, key: StateType | None = None
    ) -> KeyedConnectedStreams:
        """Partition both by key, so that equal keys meet.

        Parameters
        ----------
        first, second
            The key of each: a column's name, a column expression, or a tuple of these; or a function of a
            record. They have the same types.
        key
            Type of what functions return; by default what their hints say. See :meth:`DataStream.key_by`.
        """
        # Only functions need it; if there is none, it is refused as key_by refuses it.
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
            Fields of the rows of both; by default what the hint of each function says, or that of the other.
        name
            What errors call it.
        """
        return self._of_each("map", first, second, output, name)

    def flat_map(
        self, first: Any, second: Any = None, *, output: OutputType | None = None, name: str | None = None
    ) -> DataStream:
        """Make any number of rows of each record.

        Takes a :class:`~flinkish_spark.CoFlatMapFunction` or two functions; see :meth:`map` and
        :meth:`DataStream.flat_map`.
        """
        return self._of_each("flat_map", first, second, output, name)

    def _of_each(
        self, method: str, first: Any, second: Any, output: OutputType | None, name: str | None
    ) -> DataStream:
        left, right = connected_rows(method, first, second, output, name)
        return self._first._behind(left).union(self._second._behind(right))

    def process(
        self,
        function: CoProcessFunction,
        *,
        output: OutputType | None = None,
        name: str | None = None,
    ) -> DataStream:
        """Make any number of rows of each record, to several outputs; see :meth:`DataStream.process`.

        Without keys there is no state and there are no timers. For these call :meth:`key_by` first.

        Parameters
        ----------
        function
            Has a method for each stream; there is a copy of it for each.
        output
            Fields of the main output; by default what the hint of `process_element1` says.
        name
            What errors call it.

        Raises
        ------
        GraphError, UserFunctionError
            It is no CoProcessFunction, or cannot be sent to the workers.
        SchemaError
            The output is not known, or is no list of fields.
        """
        left, right = co_process_rows(function, output, name)
        return self._first._behind(left).union(self._second._behind(right))


class KeyedConnectedStreams:
    """Two keyed streams that share the state and the timers of a key."""

    def __init__(
        self, environment: StreamExecutionEnvironment, first: KeyedEntry, second: KeyedEntry
    ) -> None:
        self._environment, self._entries = environment, (first, second)

    def process(
        self,
        function: KeyedCoProcessFunction,
        *,
        output: OutputType | None = None,
        uid: str,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Process the elements of both streams, those of one key one after the other.

        Within a micro-batch the elements of the first stream come before those of the second; nothing is
        promised about the order between the two.

        Parameters
        ----------
        function
            Serialised here, once.
        output
            Fields of the emitted rows; by default what the hint of `process_element1` says, or else
            that of `process_element2` or `on_timer`.
        uid, max_parallelism
            As of :meth:`KeyedStream.process`.

        Raises
        ------
        GraphError
            It is no KeyedCoProcessFunction, or the uid cannot be used or is taken.
        UserFunctionError, SchemaError, ConfigError
            As of :meth:`KeyedStream.process`.
        """
        if not isinstance(function, KeyedCoProcessFunction):
            raise GraphError(
                f"process() of '{uid}' got a {type(function).__name__}",
                why="two streams are connected",
                what_to_do="give it an instance of a KeyedCoProcessFunction subclass",
            )
        refuse_async(function, ("process_element1", "process_element2", "on_timer"), f"'{uid}'")
        if output is None:
            calls = (function.process_element2, function.on_timer)
            output = inferred_output(function.process_element1, f"'{uid}'", *calls, is_iterable=True)
        return self._keyed(function, output, uid, max_parallelism)

    def map(
        self,
        first: Any,
        second: Any = None,
        *,
        output: OutputType | None = None,
        uid: str,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Make one row of each record, by functions that may keep state for the record's key.

        Parameters
        ----------
        first, second
            A :class:`~flinkish_spark.CoMapFunction` alone, whose methods share their states; or for each
            stream a :class:`~flinkish_spark.MapFunction` or a function of one record. Serialised here.
        output
            Fields of the rows; by default what the hint of the first says, or else that of the second.
        uid, max_parallelism
            As of :meth:`KeyedStream.process`.

        Raises
        ------
        GraphError
            It cannot be called, there is one too many or too few, or the uid cannot be used or is taken.
        UserFunctionError, SchemaError, ConfigError
            As of :meth:`KeyedStream.process`.
        """
        left, right = connected_calls(first, second, "map", uid)
        if output is None:
            output = inferred_output(left.call, f"'{uid}'", right.call, is_iterable=False)
        return self._keyed(CoMapRecords(*_opened(left, right)), output, uid, max_parallelism)

    def flat_map(
        self,
        first: Any,
        second: Any = None,
        *,
        output: OutputType | None = None,
        uid: str,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Make any number of rows of each record, by functions that may keep state for its key.

        Parameters
        ----------
        first, second
            A :class:`~flinkish_spark.CoFlatMapFunction` alone; or for each stream a
            :class:`~flinkish_spark.FlatMapFunction` or a function that returns or yields rows, or None.
        output, uid, max_parallelism
            As of :meth:`map`, which also says what is raised.
        """
        left, right = connected_calls(first, second, "flat_map", uid)
        if output is None:
            output = inferred_output(left.call, f"'{uid}'", right.call, is_iterable=True)
        return self._keyed(CoFlatMapRecords(*_opened(left, right)), output, uid, max_parallelism)

    def _keyed(
        self, function: KeyedCoProcessFunction, output: OutputType, uid: str, max_parallelism: int | None
    ) -> DataStream:
        from flinkish_spark.datastream import DataStream  # the two make each other

        graph = self._environment.graph
        node = declare_operator(graph, self._entries, function, output, uid, max_parallelism)
        return DataStream(self._environment, node)


def _opened(left: RecordCall, right: RecordCall) -> tuple[_Calls, tuple[RichFunction, ...]]:
    """Return what is called, and what has to be opened for it, once if it is one object."""
    rich = [left.rich] if left.rich is right.rich else [left.rich, right.rich]
    return (left.call, right.call), tuple(one for one in rich if one is not None)


def _key(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)
