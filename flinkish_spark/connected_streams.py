"""Two streams that one function reads, as a user writes them: `orders.connect(limits)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column

from flinkish_spark.errors import GraphError
from flinkish_spark.functions import KeyedCoProcessFunction
from flinkish_spark.graph.declared import declare_operator
from flinkish_spark.graph.key_selectors import is_key_function
from flinkish_spark.graph.output_types import inferred_output
from flinkish_spark.graph.stream_graph import KeyedEntry
from flinkish_spark.runtime.hinted_types import OutputType, StateType
from flinkish_spark.stream_functions import KeySelector

if TYPE_CHECKING:
    from flinkish_spark.datastream import DataStream
    from flinkish_spark.environment import StreamExecutionEnvironment


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
        left, right = (
            stream.key_by(*_key(given), key=key if is_key_function(given) else None)
            for stream, given in ((self._first, first), (self._second, second))
        )
        return left.connect(right)

    def map(
        self, first: Any, second: Any, *, output: OutputType | None = None, name: str | None = None
    ) -> DataStream:
        """Make one row of each record, with a function for each stream; see :meth:`DataStream.map`."""
        left = self._first.map(first, output=output, name=name)
        return left.union(self._second.map(second, output=output, name=name))

    def flat_map(
        self, first: Any, second: Any, *, output: OutputType | None = None, name: str | None = None
    ) -> DataStream:
        """Make any number of rows of each record; see :meth:`DataStream.flat_map`."""
        left = self._first.flat_map(first, output=output, name=name)
        return left.union(self._second.flat_map(second, output=output, name=name))


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
        if output is None:
            calls = (function.process_element2, function.on_timer)
            output = inferred_output(function.process_element1, f"'{uid}'", *calls, is_iterable=True)
        from flinkish_spark.datastream import DataStream  # the two make each other

        node = declare_operator(self._environment, self._entries, function, output, uid, max_parallelism)
        return DataStream(self._environment, node)


def _key(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)
