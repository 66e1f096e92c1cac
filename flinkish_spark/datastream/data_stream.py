"""Streams as a user writes them: `from_source(...).map(...).key_by(...).sink_to(...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Self, overload

from pyspark.resource import ResourceProfile
from pyspark.sql import Column

from flinkish_spark.contracts.sink import Sink
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.elements import OutputTag, OutputType
from flinkish_spark.core.errors import GraphError
from flinkish_spark.core.fields import Arity, check_arguments
from flinkish_spark.datastream.connected_streams import (
    BroadcastConnectedStream,
    BroadcastStream,
    ConnectedStreams,
    add_operator,
    broadcast_states,
    check_same_job,
)
from flinkish_spark.datastream.keyed_stream import KeyedStream
from flinkish_spark.datastream.row_patterns import load_row_patterns
from flinkish_spark.functions.stream import CheckpointedProcessFunction, KeySelector, ProcessFunction
from flinkish_spark.functions.watermark_strategy import WatermarkStrategy
from flinkish_spark.job.face import job_face
from flinkish_spark.joins.lookup import LookupCache, LookupJoin, LookupTable
from flinkish_spark.joins.spec import JoinType, ProcessJoinFunction
from flinkish_spark.planning import declare, transforms
from flinkish_spark.planning.factories import UNKNOWN_TYPE
from flinkish_spark.planning.job_graph import describe_stream
from flinkish_spark.planning.partitioning import (
    Parallelism,
    Rebalance,
    Rescale,
    check_is_shuffle_partitions,
    is_partitioning,
    make_custom_partitioning,
)
from flinkish_spark.planning.recorded_functions import RecordedTransform
from flinkish_spark.planning.stream_graph import (
    KeyedEntry,
    KeyedNode,
    QueryNode,
    SideNode,
    SinkNode,
    StreamNode,
    TimedNode,
    TransformNode,
    UnionNode,
    find_paths,
    is_behind_keys,
    name_bases,
)
from flinkish_spark.protocol.ids import check_name
from flinkish_spark.protocol.job_graph import ChainingStrategy
from flinkish_spark.state.descriptors import MapStateDescriptor
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.types.hints import StateType
from flinkish_spark.types.schemas import output_schema
from flinkish_spark.worker.broadcast_runner import UnkeyedCheckpointedFunction

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flinkish_spark.datastream.environment import StreamExecutionEnvironment
    from flinkish_spark.protocol.job_graph import JobGraph


#: Functions of single records that may emit to side outputs.
_WITH_SIDES = (RecordedTransform, transforms.LookupTransform, transforms.ProcessTransform)


_OTHER = "give it a DataStream; of a keyed one, call it before key_by()"


class OperatorSettings:
    """The part of a `DataStream` that configures the operator that made it.

    Each method changes that operator, as in Flink, and returns the stream.
    """

    _environment: StreamExecutionEnvironment
    _node: StreamNode

    @check_arguments(name='give it a text: name("parse")')
    def name(self, name: str) -> Self:
        """Set the name of the function that made the stream, as errors show it.

        A keyed operator is still found by its uid; its functions see the name as `get_task_name`. The name of
        a source is only displayed. A union, transform or watermark strategy has no name, and the call has no
        effect.
        """
        if not name:
            raise GraphError("name() got an empty text", what_to_do='give it a name: name("parse")')
        settings = self._find_settings()
        if settings is not None:
            settings.name = name
        elif isinstance(self._node, KeyedNode | SourceNode | QueryNode):
            self._environment.graph.names[self._node.uid] = name
        return self

    def uid(self, uid: str) -> Self:
        """Set the uid of a keyed operator, or the name of a function without state.

        The call that makes the operator takes its uid, too; the last one counts, as in Flink. Streams without
        state need no uid, and the call has no effect. It is refused for a source, and once something reads
        the operator.
        """
        try:
            check_name(uid, "uid")
        except ValueError as error:
            raise GraphError(str(error), what_to_do="give such a uid") from None
        settings = self._find_settings()
        if settings is not None:
            settings.name = uid
        elif isinstance(self._node, KeyedNode | SourceNode | QueryNode) and self._node.uid != uid:
            graph = self._environment.graph
            # A source keeps its uid. Once something reads an operator, the call may be meant for the reader.
            if not isinstance(self._node, KeyedNode) or graph.is_read(self._node):
                raise GraphError(
                    f"uid({uid!r}) was called on {self._describe_node()}",
                    why="the uid, by which state is found, is given to the call that makes a source, a query "
                    "or a keyed operator",
                    what_to_do=f'give it there: process(..., uid="{uid}")',
                )
            graph.rename(self._node, uid)
        return self

    @check_arguments()
    def set_parallelism(self, parallelism: Parallelism) -> Self:
        """Set the number of tasks of a function of `map`, `flat_map`, `filter` or `process` without a key.

        Its records go through a shuffle before it, as by `rebalance`; later functions run in its tasks, too.
        A keyed operator runs in Spark's shuffle partitions, and a function between two keyed operators in the
        tasks of the first; for both, another number is refused, for the function when the job starts.
        """
        settings = self._find_settings()
        if isinstance(self._node, KeyedNode):
            check_is_shuffle_partitions(parallelism, self._environment._partitions(), self._describe_node())
        elif settings is not None:
            settings.parallelism = parallelism
        else:
            raise GraphError(
                f"set_parallelism({parallelism}) was called on {self._describe_node()}",
                why="it has no parallelism of its own; a source has a task for each partition of its system",
                what_to_do=f"call rebalance({parallelism}) after it, or set_parallelism() right after the "
                "map(), flat_map(), filter() or process() that it is for",
            )
        return self

    @check_arguments(max_parallelism=declare.KEY_GROUPS_ADVICE)
    def set_max_parallelism(self, max_parallelism: declare.KeyGroups) -> Self:
        """Set the number of key groups of a keyed operator; no effect on other streams.

        The call that makes the operator takes it, too; the last one counts, as in Flink, until something
        reads the operator.
        """
        if isinstance(self._node, KeyedNode) and self._node.max_parallelism != max_parallelism:
            if self._environment.graph.is_read(self._node):
                groups = self._node.max_parallelism
                raise GraphError(
                    f"{self._describe_node()} has {groups} key groups, not {max_parallelism}",
                    why="their number is given to the call that makes an operator, for the life of its state",
                    what_to_do=f"give it there: process(..., max_parallelism={max_parallelism})",
                )
            self._node.max_parallelism = max_parallelism
        return self

    def start_new_chain(self) -> Self:
        """Run a function of `map`, `flat_map`, `filter` or `process` without a key in new tasks.

        Functions before it run in other tasks, as in Flink; functions after it may share its tasks. Spark has
        no queue between tasks, so its records go through a shuffle, as by `rebalance`. A source and a keyed
        operator have their own tasks anyway.
        """
        return self._chain(ChainingStrategy.HEAD, "start_new_chain")

    def disable_chaining(self) -> Self:
        """Run a function in tasks that nothing else shares; see :meth:`start_new_chain`.

        There is a shuffle after it, too. A sink right after it still runs in its tasks.
        """
        return self._chain(ChainingStrategy.NEVER, "disable_chaining")

    def _chain(self, chained: ChainingStrategy, method: str) -> Self:
        settings = self._find_settings()
        if settings is not None:
            self._environment.graph.chained[id(settings)] = chained
        elif not isinstance(self._node, KeyedNode | SourceNode) or chained is ChainingStrategy.NEVER:
            raise GraphError(
                f"{method}() was called on {self._describe_node()}",
                why="only a function of single records can be given tasks of its own: a source and a keyed "
                "operator always have new tasks, and functions after them run in these",
                what_to_do="call it right after map(), flat_map(), filter() or process(); or leave it out",
            )
        return self

    def slot_sharing_group(self, slot_sharing_group: str) -> Self:
        """Set the slot sharing group of an operator with state: operators share tasks within a group only.

        Operators that read only sources, and whose outputs only sinks read, run one after the other in the
        same tasks, over one shuffle; a stream that several of them read is scanned once. An operator in
        another group has its own tasks and shuffle. Use this for a slow operator for which others should not
        wait.

        Parameters
        ----------
        slot_sharing_group
            Any name; ``"default"`` is the default. A job keeps the groups that it began with; changing them
            takes a savepoint.
        """
        if isinstance(self._node, KeyedNode):
            self._environment.graph.slot_sharing[self._node.uid] = slot_sharing_group
        elif slot_sharing_group != "default":
            raise GraphError(
                f"slot_sharing_group({slot_sharing_group!r}) was called on {self._describe_node()}",
                why="only operators with state share tasks; others run in the tasks of their input",
                what_to_do="leave it out; for tasks of its own call start_new_chain(), for other resources "
                "set_resources() on a function without a key",
            )
        return self

    @check_arguments(resources="give what ResourceProfileBuilder().require(...).build returns")
    def set_resources(self, resources: ResourceProfile) -> Self:
        """Set the resources of the tasks of a function without a key: cores, memory, GPUs.

        It then has tasks of its own, as by :meth:`disable_chaining`. A local Spark has no resource profiles.

        Parameters
        ----------
        resources
            As Spark's `ResourceProfileBuilder` builds it. With task requests alone executors stay as they
            are; with executor requests Spark starts others, for which it needs dynamic allocation.

        Examples
        --------
        >>> from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
        >>> two_cores = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
        >>> scored = orders.map(Score(), output=SCORED).set_resources(two_cores)  # doctest: +SKIP
        """
        settings = self._find_settings()
        if settings is None:
            raise GraphError(
                f"set_resources() was called on {self._describe_node()}",
                why="only functions of single records can have their own resources; all other tasks have "
                "those of spark.task.cpus and spark.executor.*",
                what_to_do="call it right after map(), flat_map(), filter() or process() without a key; or "
                "set spark.task.cpus and spark.executor.* for the whole job",
            )
        settings.resources = resources
        return self.disable_chaining()

    def _find_settings(self) -> transforms.TransformSettings | None:
        node = next(iter(transforms.find_connected_transforms(self._node)), self._node)
        if isinstance(node, TransformNode) and isinstance(
            node.function, transforms.RowTransform | transforms.LookupTransform
        ):
            return node.function.settings
        return None

    def _describe_node(self) -> str:
        node, settings = self._node, self._find_settings()
        if settings is not None:
            return f"the function '{settings.name}', which has no key"
        match node:
            case KeyedNode():
                return f"the keyed operator '{node.uid}'"
            case SourceNode():
                return f"the source '{node.uid}'"
            case QueryNode():
                return f"the query '{node.uid}'"
            case SideNode():
                return f"a side output of the keyed operator '{node.parent.uid}'"
            case UnionNode():
                return "a stream that is a union"
            case TimedNode():
                return "a stream that assign_timestamps_and_watermarks() made"
            case TransformNode() if is_partitioning(node.function):
                return "a stream whose records were only moved (rebalance() and the like)"
        return "a stream that transform() made"


class DataStream(OperatorSettings):
    """A stream of records. Made by an environment, never directly.

    What cannot be planned is refused at once: a wrong value with a ConfigError, a call in a wrong place with
    a GraphError, a function that cannot run on workers with a UserFunctionError, fields that are not known
    with a SchemaError. `uid` and `max_parallelism` are as of :meth:`KeyedStream.process`.
    """

    def __init__(self, environment: StreamExecutionEnvironment, node: StreamNode) -> None:
        self._environment = environment
        self._node = node

    def _apply_function(self, function: Callable[[DataFrame], DataFrame]) -> DataStream:
        return DataStream(self._environment, TransformNode(self._node, function))

    @check_arguments(function='give it a function: transform(lambda df: df.where("amount > 0"))')
    def transform(self, function: Annotated[Callable[[Any], Any], Arity(1)]) -> DataStream:
        """Apply a DataFrame function: select, where, withColumn, a join with a table.

        Before the first keyed operator Spark may keep state for it: dropDuplicates, a windowed aggregate.

        Barriers never pass through it. Keep row order: a record's place in its channel is what
        orders the records of one key. Between two keyed operators it must look at each row by itself.

        Parameters
        ----------
        function
            Gets the records' DataFrame and returns another; called at each start of the query, and
            between a keyed operator and a sink once per micro-batch if it looks at more than single rows.
        """
        return self._apply_function(function)

    def map(self, function: Any, *, output: OutputType | None = None, name: str | None = None) -> DataStream:
        """Make one row of each record, in Python.

        For an expression over columns :meth:`transform` is many times as fast, since it stays in the JVM.

        Parameters
        ----------
        function
            From a record, a named tuple, to a row: tuple, named tuple, Row, dict or dataclass; or a
            :class:`~flinkish_spark.MapFunction`. Without state, and the same for the same record.
        output
            Fields of the rows, as DDL or StructType; by default those in the function's type hint.
        """
        return self._apply_function(transforms.make_map(function, output, name))

    def flat_map(
        self, function: Any, *, output: OutputType | None = None, name: str | None = None
    ) -> DataStream:
        """Make any number of rows of each record, in Python; see :meth:`map`.

        The function, or a :class:`~flinkish_spark.FlatMapFunction`, returns or yields rows. A hint like
        ``Iterator[Word]`` says the fields.
        """
        return self._apply_function(transforms.make_flat_map(function, output, name))

    def filter(self, function: Any, *, name: str | None = None) -> DataStream:
        """Keep the records for which a function, or a FilterFunction, returns true; see :meth:`map`."""
        return self._apply_function(transforms.make_filter(function, name))

    def process(
        self, function: ProcessFunction, *, output: OutputType | None = None, name: str | None = None
    ) -> DataStream:
        """Make any number of rows of each record, to several outputs, in Python; see :meth:`map`.

        It has no state and no timers; those are for `key_by(...).process(...)`. The function runs once for
        each of its outputs that is read; `output` has the fields of the main one.
        """
        return self._apply_function(transforms.make_process(function, output, name))

    def _refuse_union(self, method: str) -> None:
        if len(find_paths(self._node)) > 1:
            raise GraphError(
                f"{method}() was called on a union",
                why="functions after a union run over each of its streams separately, in different tasks",
                what_to_do="call key_by() on it, which brings all of its streams together; or leave it out",
            )

    def rebalance(self, parallelism: int | None = None) -> DataStream:
        """Distribute the records evenly, through a shuffle.

        Useful before slow Python functions: these run in the tasks of their input, whose number is at first
        the number of partitions of the source. A keyed operator has its own tasks. All rows made of a record
        go to the same task, chosen by the record's place in its channel; each task gets its records in the
        order that they had before, also when it is repeated.

        Parameters
        ----------
        parallelism
            Number of tasks, for a union of each of its streams; by default the number of shuffle partitions.
        """
        return self._apply_function(Rebalance(parallelism))

    def shuffle(self, parallelism: int | None = None) -> DataStream:
        """Distribute the records as :meth:`rebalance` does.

        Flink chooses a random task for each record. A repeated task would choose other ones, so here a hash
        of the record's place replaces chance.
        """
        return self._apply_function(Rebalance(parallelism))

    def rescale(self, parallelism: int | None = None) -> DataStream:
        """Merge the input of several tasks into fewer tasks, without a shuffle; see :meth:`rebalance`.

        Functions before it run in these tasks, too. Only a shuffle can increase the number of tasks.

        Parameters
        ----------
        parallelism
            The most tasks; by default the number of shuffle partitions.
        """
        return self._apply_function(Rescale(parallelism))

    def global_(self) -> DataStream:
        """Send all records to one task, through a shuffle; see :meth:`rebalance`.

        It has an underscore since `global` is a Python keyword.
        """
        self._refuse_union("global_")
        return self._apply_function(Rebalance(1))

    def forward(self) -> DataStream:
        """Return the stream unchanged: records stay in their tasks by default."""
        return self

    def partition_custom(
        self, partitioner: Any, key: str | Callable[[Any], Any] | Any, parallelism: int | None = None
    ) -> DataStream:
        """Send each record to the task that a function chooses by the record's key.

        Parameters
        ----------
        partitioner
            A :class:`~flinkish_spark.functions.stream.Partitioner`, or a function of a key and the number of
            tasks that returns a task's number, from 0. The same for the same key, in every process.
        key
            Name of a field, a function of a record, or an instance of a
            :class:`~flinkish_spark.functions.stream.KeySelector`.
        parallelism
            Number of tasks; by default the number of shuffle partitions.

        A function that raises, or returns no task, stops the job with the record's topic, partition and
        offset. Keyed state does not follow these tasks: a later `key_by` distributes the records again.
        """
        self._refuse_union("partition_custom")
        return self._apply_function(make_custom_partitioning(partitioner, key, parallelism))

    @check_arguments(strategy="give one: WatermarkStrategy.for_bounded_out_of_orderness(5_000)")
    def assign_timestamps_and_watermarks(self, strategy: WatermarkStrategy) -> DataStream:
        """Assign event times to the records, and define the watermarks.

        Call it right after the source, or after transforms that compute the column with the time; a channel
        is a Kafka partition as long as no earlier transform selected its own columns. A second call on a
        later stream replaces times and watermarks from there on. See `docs/event-time.md`.

        Parameters
        ----------
        strategy
            For example ``WatermarkStrategy.for_bounded_out_of_orderness(5_000)``.
        """
        declare.check_strategy(strategy, name_bases(self._node))
        if is_behind_keys(self._node):
            raise GraphError(
                "assign_timestamps_and_watermarks() was called after a keyed operator",
                why="an operator's rows have the time of the record or timer for which they were emitted",
                what_to_do="call it between the source and key_by(); if results need other times, write them "
                "to a topic, and read it with a strategy in a chained job",
            )
        node = TimedNode(self._node, strategy)
        self._environment.graph.timed.append(node)
        return DataStream(self._environment, node)

    def key_by(
        self, *keys: str | Column | Callable[[Any], Any] | KeySelector, key: StateType | None = None
    ) -> KeyedStream:
        """Partition by columns, expressions or a function; records of equal keys meet the same state.

        Parameters
        ----------
        keys
            Column names or column expressions, which Spark computes in the JVM. Or one function of a record,
            or a :class:`~flinkish_spark.functions.stream.KeySelector`, which take the records through Python
            once more; keys of equal values and types have the same state, however they are made. A null key
            is a key like any other.
        key
            Type of the function's result: ``"STRING"``, or ``"user STRING, product LONG"`` for a tuple.
            By default its return type hint: a type, a tuple of types, a named tuple or a dataclass.

        Examples
        --------
        >>> stream.key_by(lambda order: order.user.lower(), key="STRING")  # doctest: +SKIP
        """
        return KeyedStream(self._environment, self._node, declare.parse_keys(keys, key))

    def match_recognize(self, text: str, *, uid: str | None = None, **more: Any) -> DataStream:
        """Look for a row pattern of SQL:2016 among the rows of each key, which PARTITION BY names.

        Without PARTITION BY all rows have the same key, and run in one task. `text` and the options are as
        of :meth:`KeyedStream.match_recognize`.
        """
        partition = load_row_patterns().find_partition(text)
        keyed = self.key_by(*partition) if partition else self.key_by(lambda record: 0, key="INT")
        return keyed.match_recognize(text, uid=uid, **more)

    @check_arguments(others=_OTHER)
    def union(self, *others: DataStream) -> DataStream:
        """Unite streams with the same fields; the order of records of different streams is undefined.

        A stream united with itself has each record twice. Other fields are refused when the job starts.
        """
        if not others:
            return self
        for other in others:
            check_same_job(self._environment, other._environment, "union")
        return DataStream(self._environment, UnionNode((self._node, *(other._node for other in others))))

    @overload
    def connect(self, other: DataStream) -> ConnectedStreams: ...
    @overload
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStream: ...
    @check_arguments(other=_OTHER)
    def connect(self, other: DataStream | BroadcastStream) -> ConnectedStreams | BroadcastConnectedStream:
        """Let one function read this stream and another one, which may have other fields."""
        check_same_job(self._environment, other._environment, "connect")
        if isinstance(other, BroadcastStream):
            entry = KeyedEntry(self._node, (), Distribution.BY_CHANNEL)
            return BroadcastConnectedStream(entry, other)
        return ConnectedStreams(self, other)

    def broadcast(self, *descriptors: MapStateDescriptor) -> BroadcastStream:
        """Send every record to every partition of the operator that reads it.

        A function's `process_broadcast_element` fills the states of the descriptors.
        """
        return BroadcastStream(self._environment, self._node, broadcast_states(descriptors))

    @check_arguments()
    def process_with_state(
        self,
        function: CheckpointedProcessFunction,
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Process records without a key, with operator list state; records of a channel come in their order.

        Parameters
        ----------
        function
            Serialised here, once.
        output
            Fields of the emitted rows; by default those in the type hint of `process_element`.
        """
        uid = declare.resolve_uid(self._environment.graph, uid, "process_with_state", self._node)
        if output is None:
            output = declare.infer_output(function.process_element, f"'{uid}'", is_iterable=True)
        entry = KeyedEntry(self._node, (), Distribution.BY_CHANNEL)
        made = UnkeyedCheckpointedFunction(function)
        return add_operator(self._environment, [entry], made, output, uid, max_parallelism)

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
        """Join each record with the current rows of an external table; see docs/joins.md.

        Parameters
        ----------
        table
            Travels to the workers and is opened there.
        rows
            Type of its rows, as DDL.
        key
            From a record to the key to look up; None has no rows.
        join_type
            INNER, or LEFT, which emits records without rows with null.
        function
            Makes rows of a pair. By default the output is the fields of both; a row's field is called
            ``right_<name>`` if the record has a field of that name.
        output
            Fields of what the function makes.
        cache
            Cache of answers; None: each batch of a micro-batch looks its keys up again.
        keys_per_call
            The most keys in one call.
        """
        join = LookupJoin(UNKNOWN_TYPE, rows, key, table, join_type, function, cache, keys_per_call)
        return DataStream(
            self._environment, TransformNode(self._node, transforms.make_lookup(join, output, name))
        )

    @check_arguments()
    def get_side_output(self, tag: OutputTag) -> DataStream:
        """Return the stream of rows that a function emits with ``ctx.output(tag, row)``.

        It takes part in the same checkpoints. Rows for a tag that no stream reads are dropped. A function
        without a key runs once for each of its outputs that is read.

        Parameters
        ----------
        tag
            The tag that the function uses; its `output` defines the fields.
        """
        node = self._node
        ways = transforms.find_connected_transforms(node)
        if ways:
            sides = [DataStream(self._environment, way).get_side_output(tag) for way in ways]
            return sides[0].union(*sides[1:])
        if isinstance(node, TransformNode) and isinstance(node.function, _WITH_SIDES):
            name = node.function.settings.name
            fields = output_schema(tag.output, f"{name}/{tag.name}")
            self._environment.graph.check_row_side(node, name, tag, fields)
            made = TransformNode(node.parent, node.function.select_side_output(tag.name, fields))
            return DataStream(self._environment, made)
        if not isinstance(node, KeyedNode):
            raise GraphError(
                "get_side_output() was called on a stream that no process() made",
                what_to_do="call it on what process() returned, before any transform()",
            )
        fields = output_schema(tag.output, f"{node.uid}/{tag.name}")
        side = self._environment.graph.side(node, tag, fields)
        return DataStream(self._environment, side)

    @check_arguments(sink="give a KafkaSink(...) or a DeltaSink(...)")
    def sink_to(self, sink: Sink, *, uid: str | None = None) -> DataStream:
        """Write this stream to a sink that commits with the checkpoints; return the stream.

        The uid is its stable name in this job. If left out, it is derived from the place in the program, with
        a warning.
        """
        uid = declare.resolve_uid(self._environment.graph, uid, "sink", self._node)
        graph = self._environment.graph
        graph.sinks.append(SinkNode(graph.check_uid(uid), self._node, sink))
        return self

    def explain(self) -> None:
        """Print the operators of this stream as a tree; see :meth:`StreamExecutionEnvironment.explain`."""
        job_face().print_tree(self._describe_job(), self._environment._statistics())

    def _describe_job(self) -> JobGraph:
        environment = self._environment
        return describe_stream(environment.job, environment.graph, self._node, environment._partitions())

    def _repr_markdown_(self) -> str:
        return job_face().markdown(self._describe_job())

    def to_dataframe(self) -> DataFrame:
        """Return the records as a plain streaming DataFrame, for a query of your own.

        That query is not part of this job: its output is not bound to the job's checkpoints. It needs
        ``spark.sql.streaming.unsupportedOperationCheck=false`` after `from_dataframe`, a transform that
        selects its own columns, several keyed operators, or a redistribution: that check also refuses
        positions and sorts within a task.
        """
        from flinkish_spark.planning.planner import plan_records

        return plan_records(self._environment.spark, self._environment.graph, self._node)
