"""Streams as a user writes them: `from_source(...).key_by(...).process(...).sink_to(...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from pyspark.sql import Column
from pyspark.sql import types as T

from flinkish_spark.broadcast_stream import (
    BroadcastConnectedStream,
    BroadcastStream,
    broadcast_states,
    same_job,
)
from flinkish_spark.checkpointed_functions import CheckpointedProcessFunction
from flinkish_spark.connected_streams import ConnectedStreams
from flinkish_spark.errors import GraphError
from flinkish_spark.graph.declared import check_can_be_sent, declare_operator, output_schema
from flinkish_spark.graph.join_factories import UNKNOWN_TYPE
from flinkish_spark.graph.lookup_transforms import lookup_rows
from flinkish_spark.graph.output_types import inferred_output
from flinkish_spark.graph.python_transforms import filter_rows, flat_map_rows, map_rows
from flinkish_spark.graph.stream_graph import (
    KeyedEntry,
    KeyedNode,
    SinkNode,
    StreamNode,
    TimedNode,
    TransformNode,
    UnionNode,
    base_of,
    is_behind_keys,
)
from flinkish_spark.joins.functions import ProcessJoinFunction
from flinkish_spark.joins.kinds import JoinType
from flinkish_spark.joins.lookup import LookupCache, LookupJoin, LookupTable
from flinkish_spark.keyed_stream import KeyedStream
from flinkish_spark.operators.elements import OutputTag
from flinkish_spark.runtime.group_runners import Distribution
from flinkish_spark.runtime.list_state_runner import Checkpointed
from flinkish_spark.sinks.base import Sink
from flinkish_spark.state import MapStateDescriptor
from flinkish_spark.watermark_strategy import WatermarkStrategy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flinkish_spark.environment import StreamExecutionEnvironment


class DataStream:
    """A stream of records. Made by an environment, never directly."""

    def __init__(self, environment: StreamExecutionEnvironment, node: StreamNode) -> None:
        self._environment = environment
        self._node = node

    def transform(self, function: Callable[[DataFrame], DataFrame]) -> DataStream:
        """Apply a stateless DataFrame function: select, where, withColumn, a join with a table.

        Barriers never pass through it. Keep row order: a record's place in its channel is what
        orders the records of one key.

        Parameters
        ----------
        function
            Gets the records' DataFrame and returns another; called at each start of the query, or
            behind a keyed operator once per micro-batch.

        Raises
        ------
        GraphError
            It cannot be called.
        """
        if not callable(function):
            raise GraphError(
                f"transform() got a {type(function).__name__}",
                why="it takes a function from one DataFrame to another",
                what_to_do='give it one: transform(lambda df: df.where("amount > 0"))',
            )
        return DataStream(self._environment, TransformNode(self._node, function))

    def map(
        self, function: Any, *, output: str | T.StructType | None = None, name: str | None = None
    ) -> DataStream:
        """Make one row of each record, in Python.

        What columns can say, :meth:`transform` says many times as fast: it stays in the JVM.

        Parameters
        ----------
        function
            From a record, a named tuple, to a row: tuple, named tuple, Row, dict or dataclass; or a
            :class:`~flinkish_spark.MapFunction`. Without state, and the same for the same record.
        output
            Fields of the rows, as DDL or StructType; by default what the function's hint says.
        name
            What errors call it.

        Raises
        ------
        GraphError, UserFunctionError
            It cannot be called, or not be sent to the workers.
        SchemaError
            The output is not known, or is no list of fields.
        """
        return DataStream(self._environment, TransformNode(self._node, map_rows(function, output, name)))

    def flat_map(
        self, function: Any, *, output: str | T.StructType | None = None, name: str | None = None
    ) -> DataStream:
        """Make any number of rows of each record, in Python; see :meth:`map`.

        Parameters
        ----------
        function
            Returns or yields rows; or a :class:`~flinkish_spark.FlatMapFunction`. A hint like
            ``Iterator[Word]`` says the fields.
        """
        return DataStream(self._environment, TransformNode(self._node, flat_map_rows(function, output, name)))

    def filter(self, function: Any, *, name: str | None = None) -> DataStream:
        """Keep the records for which a function says so, in Python; see :meth:`map`.

        Parameters
        ----------
        function
            From a record to a truth value, or a :class:`~flinkish_spark.FilterFunction`.
        """
        return DataStream(self._environment, TransformNode(self._node, filter_rows(function, name)))

    def assign_timestamps_and_watermarks(self, strategy: WatermarkStrategy) -> DataStream:
        """Give the records event times, and say how far event time is behind them.

        Call it right behind the source, or behind transforms that make the column with the time; a channel is
        a Kafka partition as long as no transform in front has chosen its own columns. What a stream further
        down says again counts from there on. See `docs/event-time.md`.

        Parameters
        ----------
        strategy
            For example ``WatermarkStrategy.for_bounded_out_of_orderness(5_000)``.

        Raises
        ------
        GraphError
            It is no strategy, or the stream comes from a keyed operator, whose results have their times.
        UserFunctionError
            A function or a generator of the strategy cannot be sent to the workers.
        """
        if not isinstance(strategy, WatermarkStrategy):
            raise GraphError(
                f"assign_timestamps_and_watermarks() got a {type(strategy).__name__}",
                what_to_do="give it a strategy: WatermarkStrategy.for_bounded_out_of_orderness(5_000)",
            )
        if is_behind_keys(self._node):
            raise GraphError(
                "assign_timestamps_and_watermarks() was called behind a keyed operator",
                why="what an operator emits has the time of the record or timer that it was emitted for",
                what_to_do="call it between the source and key_by()",
            )
        for function in (strategy.timestamps, strategy.generator):
            if callable(function) and not isinstance(function, Column):
                check_can_be_sent(function, "of the watermark strategy", base_of(self._node))
        node = TimedNode(self._node, strategy)
        self._environment.graph.timed.append(node)
        return DataStream(self._environment, node)

    def key_by(self, *keys: str | Column) -> KeyedStream:
        """Partition by columns or expressions; records of equal keys meet the same state.

        Parameters
        ----------
        keys
            Column names or column expressions. A null key is a key like any other.

        Raises
        ------
        GraphError
            There is no key, or one that is neither a name nor a column.
        """
        if not keys:
            raise GraphError("key_by() got no key", what_to_do='name a column: key_by("user")')
        for key in keys:
            if not isinstance(key, str | Column) or (isinstance(key, str) and not key):
                raise GraphError(
                    f"key_by() got {key!r} ({type(key).__name__})",
                    why="a key is the name of a column or a column expression",
                    what_to_do='name them one by one: key_by("user", "product")',
                )
        return KeyedStream(self._environment, self._node, keys)

    def union(self, *others: DataStream) -> DataStream:
        """Put streams with the same fields together; in which order their records come is not promised.

        A stream may be united with itself, and then has each record twice.

        Raises
        ------
        GraphError
            There is no other stream, or one is keyed, or of another job. Other fields are refused when the
            job starts.
        """
        if not others:
            raise GraphError("union() got no stream", what_to_do="name one: orders.union(more_orders)")
        nodes = (self._node, *(self._other(other, "union")._node for other in others))
        return DataStream(self._environment, UnionNode(nodes))

    @overload
    def connect(self, other: DataStream) -> ConnectedStreams: ...
    @overload
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStream: ...
    def connect(self, other: DataStream | BroadcastStream) -> ConnectedStreams | BroadcastConnectedStream:
        """Let one function read this stream and another one, which may have other fields.

        Raises
        ------
        GraphError
            The other is keyed, or of another job.
        """
        if isinstance(other, BroadcastStream):
            entry = KeyedEntry(self._node, (), Distribution.BY_CHANNEL)
            return BroadcastConnectedStream(entry, same_job(self._environment, other))
        return ConnectedStreams(self, self._other(other, "connect"))

    def broadcast(self, *descriptors: MapStateDescriptor) -> BroadcastStream:
        """Send every record to every partition of the operator that reads it.

        Parameters
        ----------
        descriptors
            The states that a function's `process_broadcast_element` fills.

        Raises
        ------
        GraphError
            There is none, or one cannot be a broadcast state.
        """
        return BroadcastStream(self._environment, self._node, broadcast_states(descriptors))

    def _other(self, other: Any, method: str) -> DataStream:
        if not isinstance(other, DataStream):
            raise GraphError(
                f"{method}() got a {type(other).__name__}",
                what_to_do="give it a DataStream; of a keyed one, call it before key_by()",
            )
        if other._environment is not self._environment:
            raise GraphError(
                f"{method}() got a stream of another environment",
                what_to_do="make both streams with one environment",
            )
        return other

    def process_with_state(
        self,
        function: CheckpointedProcessFunction,
        *,
        output: str | T.StructType | None = None,
        uid: str,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Process records without a key, with operator list state; records of a channel come in their order.

        Parameters
        ----------
        function
            Serialised here, once.
        output
            Fields of the emitted rows; by default what the hint of `process_element` says.
        uid, max_parallelism
            As of :meth:`KeyedStream.process`.

        Raises
        ------
        GraphError
            It is no CheckpointedProcessFunction, or the uid cannot be used or is taken.
        UserFunctionError, SchemaError, ConfigError
            As of :meth:`KeyedStream.process`.
        """
        if not isinstance(function, CheckpointedProcessFunction):
            raise GraphError(
                f"process_with_state() of '{uid}' got a {type(function).__name__}",
                what_to_do="give it an instance of a CheckpointedProcessFunction subclass",
            )
        if output is None:
            output = inferred_output(function.process_element, f"'{uid}'", is_iterable=True)
        entry = KeyedEntry(self._node, (), Distribution.BY_CHANNEL)
        made = Checkpointed(function)
        node = declare_operator(self._environment, [entry], made, output, uid, max_parallelism)
        return DataStream(self._environment, node)

    def lookup_join(
        self,
        table: LookupTable,
        rows: str,
        *,
        key: Callable[[Any], Any],
        join_type: JoinType = JoinType.INNER,
        function: ProcessJoinFunction | None = None,
        output: str | T.StructType | None = None,
        cache: LookupCache | None = None,
        keys_per_call: int = 1_000,
        name: str = "lookup_join",
    ) -> DataStream:
        """Join each record with the rows that a table outside has for it at that time; see docs/joins.md.

        Parameters
        ----------
        table
            Travels to the workers and is opened there.
        rows
            Type of its rows, as DDL.
        key
            From a record to the key to ask for; None has no rows.
        join_type
            INNER, or LEFT: then records without rows come out with null.
        function
            What is made of a pair; by default the fields of both, a row's as ``right_<name>`` where the
            record has a field of that name.
        output
            Fields of what the function makes.
        cache
            What is kept of the answers; None: each batch of a micro-batch asks anew.
        keys_per_call
            At most.
        name
            What errors call it.

        Raises
        ------
        ConfigError, SchemaError, UserFunctionError
            Something cannot be used.
        """
        join = LookupJoin(UNKNOWN_TYPE, rows, key, table, join_type, function, cache, keys_per_call)
        return DataStream(self._environment, TransformNode(self._node, lookup_rows(join, output, name)))

    def get_side_output(self, tag: OutputTag) -> DataStream:
        """Return the stream of what a function emits with ``ctx.output(tag, row)``.

        It takes part in the same checkpoints. What is emitted to a tag that nobody asks for is dropped.

        Parameters
        ----------
        tag
            The one that the function uses; its `output` says the fields.

        Raises
        ------
        GraphError
            This is not the result of a keyed function, or the name was asked for with other fields.
        SchemaError
            The tag's output type is not a list of fields.
        """
        if not isinstance(self._node, KeyedNode):
            raise GraphError(
                "get_side_output() was called on a stream that no keyed function made",
                what_to_do="call it on what process() returned, before any transform()",
            )
        if not isinstance(tag, OutputTag):
            raise GraphError(
                f"get_side_output() got a {type(tag).__name__}", what_to_do="give it an OutputTag"
            )
        fields = output_schema(tag.output, f"{self._node.uid}/{tag.name}")
        side = self._environment.graph.side(self._node, tag, fields)
        return DataStream(self._environment, side)

    def sink_to(self, sink: Sink, *, uid: str) -> DataStream:
        """Write this stream to a sink that commits with the checkpoints.

        Parameters
        ----------
        sink
            For example a KafkaSink or a DeltaSink.
        uid
            Stable name of this sink in this job.

        Returns
        -------
        DataStream
            This stream, so that several sinks can be attached in a row.

        Raises
        ------
        GraphError
            It is no sink, or the uid cannot be used or is taken.
        """
        if not isinstance(sink, Sink):
            raise GraphError(
                f"sink_to() got a {type(sink).__name__}",
                why="it takes an instance of a sink",
                what_to_do="give it a KafkaSink(...) or a DeltaSink(...)",
            )
        graph = self._environment.graph
        graph.sinks.append(SinkNode(graph.check_uid(uid), self._node, sink))
        return self

    def to_dataframe(self) -> DataFrame:
        """Return the records as a plain streaming DataFrame, for a query of your own.

        That query is not part of this job: its output is not bound to the job's checkpoints.
        """
        from flinkish_spark.graph.planner import plan_records

        return plan_records(self._environment.spark, self._environment.graph, self._node)
