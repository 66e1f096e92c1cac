"""Streams as a user writes them: `from_source(...).key_by(...).process(...).sink_to(...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from pyspark.sql import Column

from flinkish_spark.arguments import refuse_async
from flinkish_spark.broadcast_stream import (
    BroadcastConnectedStream,
    BroadcastStream,
    broadcast_states,
    same_job,
)
from flinkish_spark.checkpointed_functions import CheckpointedProcessFunction
from flinkish_spark.connected_streams import ConnectedStreams
from flinkish_spark.errors import GraphError
from flinkish_spark.graph.declared import declare_operator, output_schema
from flinkish_spark.graph.join_factories import UNKNOWN_TYPE
from flinkish_spark.graph.key_selectors import chosen_keys
from flinkish_spark.graph.lookup_transforms import LookupTransform, lookup_rows
from flinkish_spark.graph.output_types import inferred_output
from flinkish_spark.graph.python_transforms import ProcessTransform, connected_ways
from flinkish_spark.graph.strategies import check_strategy
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
from flinkish_spark.operator_settings import OperatorSettings
from flinkish_spark.operators.elements import OutputTag
from flinkish_spark.redistribution import Redistribution
from flinkish_spark.runtime.group_runners import Distribution
from flinkish_spark.runtime.hinted_types import OutputType, StateType
from flinkish_spark.runtime.list_state_runner import Checkpointed
from flinkish_spark.single_records import SingleRecords
from flinkish_spark.sinks.base import Sink
from flinkish_spark.state import MapStateDescriptor
from flinkish_spark.stream_functions import KeySelector
from flinkish_spark.watermark_strategy import WatermarkStrategy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flinkish_spark.environment import StreamExecutionEnvironment


class DataStream(SingleRecords, Redistribution, OperatorSettings):
    """A stream of records. Made by an environment, never directly."""

    def __init__(self, environment: StreamExecutionEnvironment, node: StreamNode) -> None:
        self._environment = environment
        self._node = node

    def _behind(self, function: Callable[[DataFrame], DataFrame]) -> DataStream:
        return DataStream(self._environment, TransformNode(self._node, function))

    def transform(self, function: Callable[[DataFrame], DataFrame]) -> DataStream:
        """Apply a stateless DataFrame function: select, where, withColumn, a join with a table.

        Barriers never pass through it. Keep row order: a record's place in its channel is what
        orders the records of one key. Between two keyed operators it must look at each row by itself.

        Parameters
        ----------
        function
            Gets the records' DataFrame and returns another; called at each start of the query, and
            between a keyed operator and a sink once per micro-batch if it looks at more than single rows.

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
        return self._behind(function)

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
        check_strategy(strategy, "assign_timestamps_and_watermarks()", base_of(self._node))
        if is_behind_keys(self._node):
            raise GraphError(
                "assign_timestamps_and_watermarks() was called behind a keyed operator",
                why="what an operator emits has the time of the record or timer that it was emitted for",
                what_to_do="call it between the source and key_by(); for results with times of their own "
                "write them to a topic, and read that with a strategy in a chained job",
            )
        node = TimedNode(self._node, strategy)
        self._environment.graph.timed.append(node)
        return DataStream(self._environment, node)

    def key_by(
        self,
        *keys: str | Column | Callable[[Any], Any] | KeySelector,
        key: StateType | None = None,
    ) -> KeyedStream:
        """Partition by columns, expressions or a function; records of equal keys meet the same state.

        Parameters
        ----------
        keys
            Column names or column expressions, which Spark computes in the JVM. Or one function of a record,
            or a :class:`~flinkish_spark.stream_functions.KeySelector`, which take the records through Python
            once more; keys of equal values and types have the same state, however they are made. A null key
            is a key like any other.
        key
            Type of what the function returns: ``"STRING"``, or ``"user STRING, product LONG"`` for a tuple.
            By default what its hint says: a type, a tuple of types, a named tuple or a dataclass.

        Raises
        ------
        GraphError, UserFunctionError
            There is no key, one that cannot be used, or a function that cannot be sent to the workers.
        SchemaError
            The type of a function's keys is not known.

        Examples
        --------
        >>> stream.key_by(lambda order: order.user.lower(), key="STRING")  # doctest: +SKIP
        """
        return KeyedStream(self._environment, self._node, chosen_keys(keys, key))

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
        output: OutputType | None = None,
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
        refuse_async(function, ("process_element",), f"'{uid}'")
        if output is None:
            output = inferred_output(function.process_element, f"'{uid}'", is_iterable=True)
        entry = KeyedEntry(self._node, (), Distribution.BY_CHANNEL)
        made = Checkpointed(function)
        node = declare_operator(self._environment.graph, [entry], made, output, uid, max_parallelism)
        return DataStream(self._environment, node)

    def lookup_join(
        self,
        table: LookupTable,
        rows: str,
        *,
        key: Callable[[Any], Any],
        join_type: JoinType = JoinType.INNER,
        function: ProcessJoinFunction | None = None,
        output: OutputType | None = None,
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

        It takes part in the same checkpoints. What is emitted to a tag that nobody asks for is dropped. A
        function without a key runs once for each of its outputs that is read.

        Parameters
        ----------
        tag
            The one that the function uses; its `output` says the fields.

        Raises
        ------
        GraphError
            This is not the result of `process` or of a join, or the name was asked for with other fields.
        SchemaError
            The tag's output type is not a list of fields.
        """
        if not isinstance(tag, OutputTag):
            raise GraphError(
                f"get_side_output() got a {type(tag).__name__}", what_to_do="give it an OutputTag"
            )
        node = self._node
        ways = connected_ways(node)
        if ways:
            sides = [DataStream(self._environment, way).get_side_output(tag) for way in ways]
            return sides[0].union(*sides[1:])
        if isinstance(node, TransformNode) and isinstance(node.function, ProcessTransform | LookupTransform):
            name = node.function.settings.name
            fields = output_schema(tag.output, f"{name}/{tag.name}")
            self._environment.graph.check_row_side(node, name, tag, fields)
            made = TransformNode(node.parent, node.function.of_side(tag.name, fields))
            return DataStream(self._environment, made)
        if not isinstance(node, KeyedNode):
            raise GraphError(
                "get_side_output() was called on a stream that no process() made",
                what_to_do="call it on what process() returned, before any transform()",
            )
        fields = output_schema(tag.output, f"{node.uid}/{tag.name}")
        side = self._environment.graph.side(node, tag, fields)
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

        That query is not part of this job: its output is not bound to the job's checkpoints. Behind several
        keyed operators, or records that were redistributed, it needs
        ``spark.sql.streaming.unsupportedOperationCheck=false``: Spark refuses sorts within a task, too.
        """
        from flinkish_spark.graph.planner import plan_records

        return plan_records(self._environment.spark, self._environment.graph, self._node)
