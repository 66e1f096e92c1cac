"""What a keyed stream does with single records: map, flat_map, filter with state per key; and another key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flinkish_spark.functions import FilterFunction, FlatMapFunction, MapFunction
from flinkish_spark.graph.declared import check_max_parallelism
from flinkish_spark.graph.key_selectors import chosen_keys
from flinkish_spark.graph.output_types import inferred_output
from flinkish_spark.graph.record_callables import record_call
from flinkish_spark.operators.record_functions import FilterRecords, FlatMapRecords, MapRecords
from flinkish_spark.runtime.hinted_types import OutputType, StateType

if TYPE_CHECKING:
    from pyspark.sql import Column

    from flinkish_spark.datastream import DataStream
    from flinkish_spark.environment import StreamExecutionEnvironment
    from flinkish_spark.graph.stream_graph import KeyedEntry, KeyedFunction
    from flinkish_spark.keyed_stream import KeyedStream
    from flinkish_spark.stream_functions import KeySelector


class KeyedRecords(ABC):
    """The part of a `KeyedStream` that calls functions of the user's with single records."""

    _environment: StreamExecutionEnvironment
    _entry: KeyedEntry

    @abstractmethod
    def _keyed(
        self, function: KeyedFunction, output: OutputType | None, uid: str, max_parallelism: int | None
    ) -> DataStream:
        """Add an operator to the graph; `output` None stands for the fields of the input."""

    def map(
        self,
        function: MapFunction | Callable[[Any], Any],
        *,
        output: OutputType | None = None,
        uid: str,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Make one row of each record, by a function that may keep state for the record's key.

        A function without state is better called in front of `key_by`, by :meth:`DataStream.map`: there it
        needs no shuffle and no state.

        Parameters
        ----------
        function
            A :class:`~flinkish_spark.MapFunction`, whose `open` is given what that of a
            :class:`~flinkish_spark.KeyedProcessFunction` is; or a function of one record. Serialised here.
        output
            Fields of the rows; by default what the function's hint says.
        uid, max_parallelism
            As of :meth:`KeyedStream.process`. States live as long as their descriptors say.

        Raises
        ------
        GraphError
            It cannot be called, or the uid cannot be used or is taken.
        ConfigError, UserFunctionError, SchemaError
            As of :meth:`KeyedStream.process`.
        """
        made = record_call(function, "map", uid)
        fields = inferred_output(made.call, f"'{uid}'", is_iterable=False) if output is None else output
        return self._of_records(MapRecords(made.call, made.rich), fields, uid, max_parallelism)

    def flat_map(
        self,
        function: FlatMapFunction | Callable[[Any], Any],
        *,
        output: OutputType | None = None,
        uid: str,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Make any number of rows of each record, by a function that may keep state for its key.

        Parameters
        ----------
        function
            A :class:`~flinkish_spark.FlatMapFunction`, or a function of one record; returns or yields rows,
            or returns None. A hint like ``Iterator[Word]`` says the fields.
        output, uid, max_parallelism
            As of :meth:`map`, which also says what is raised.

        Examples
        --------
        >>> from flinkish_spark import FlatMapFunction, ValueStateDescriptor
        >>> class EverySecond(FlatMapFunction):
        ...     def open(self, context):
        ...         self.n = context.get_state(ValueStateDescriptor("n", "LONG", default=0))
        ...     def flat_map(self, order):
        ...         self.n.update(self.n.value() + 1)
        ...         if self.n.value() % 2 == 0:
        ...             yield order
        >>> stream.key_by("user").flat_map(
        ...     EverySecond(), output="user STRING, amount LONG", uid="second"
        ... )  # doctest: +SKIP
        """
        made = record_call(function, "flat_map", uid)
        fields = inferred_output(made.call, f"'{uid}'", is_iterable=True) if output is None else output
        return self._of_records(FlatMapRecords(made.call, made.rich), fields, uid, max_parallelism)

    def filter(
        self,
        function: FilterFunction | Callable[[Any], Any],
        *,
        uid: str,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Keep the records for which a function says so, which may keep state for their key.

        Parameters
        ----------
        function
            A :class:`~flinkish_spark.FilterFunction`, or a function from a record to a truth value. Records
            go out with the fields that they came with.
        uid, max_parallelism
            As of :meth:`map`, which also says what is raised.
        """
        made = record_call(function, "filter", uid)
        return self._of_records(FilterRecords(made.call, made.rich), None, uid, max_parallelism)

    def key_by(
        self,
        *keys: str | Column | Callable[[Any], Any] | KeySelector,
        key: StateType | None = None,
    ) -> KeyedStream:
        """Partition the same records by another key, which counts alone; see :meth:`DataStream.key_by`."""
        from flinkish_spark.keyed_stream import KeyedStream  # it is made of this

        return KeyedStream(self._environment, self._entry.parent, chosen_keys(keys, key))

    def _of_records(
        self, function: KeyedFunction, output: OutputType | None, uid: str, max_parallelism: int | None
    ) -> DataStream:
        if max_parallelism is not None:
            check_max_parallelism(max_parallelism)
        return self._keyed(function, output, uid, max_parallelism)
