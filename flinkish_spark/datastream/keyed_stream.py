"""Keyed streams as a user writes them: what is done with the elements of each key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from pyspark.sql import types as T

from flinkish_spark.core.changelogs import ROW_KIND
from flinkish_spark.core.elements import OutputTag, OutputType
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.core.validation import check_aggregate
from flinkish_spark.datastream.connected_streams import (
    BroadcastConnectedStream,
    BroadcastStream,
    KeyedConnectedStreams,
    add_operator,
    check_same_job,
)
from flinkish_spark.datastream.joined_streams import IntervalSettings, JoinedStreams
from flinkish_spark.datastream.row_patterns import load_row_patterns
from flinkish_spark.datastream.windowed_stream import WindowedStream
from flinkish_spark.functions.aggregates import (
    AggregateColumn,
    ElementAggregate,
    ElementChoice,
    Emit,
    FieldAggregate,
    Fold,
    Ties,
    check_columns,
)
from flinkish_spark.functions.keyed import (
    AggregateFunction,
    FilterFunction,
    FlatMapFunction,
    KeyedProcessFunction,
    MapFunction,
    ReduceFunction,
)
from flinkish_spark.operators.process import FilterRecords, FlatMapRecords, MapRecords
from flinkish_spark.operators.vectorized import VectorizedProcessFunction
from flinkish_spark.planning import declare
from flinkish_spark.planning.factories import (
    Aggregating,
    AggregatingColumns,
    ChangelogAggregating,
    ChangelogFolding,
    FoldingColumns,
    FoldingElements,
    Normalizing,
    Reducing,
    ReducingColumns,
)
from flinkish_spark.planning.stream_graph import KeyedEntry, StreamNode
from flinkish_spark.protocol.durations import Duration
from flinkish_spark.state.descriptors import StateTtl
from flinkish_spark.types.hints import StateType
from flinkish_spark.types.schemas import output_schema
from flinkish_spark.windows.assigners import WindowAssigner
from flinkish_spark.windows.spec import WindowSpec, count_window, sliding_count_window

if TYPE_CHECKING:
    from pyspark.sql import Column

    from flinkish_spark.datastream.data_stream import DataStream
    from flinkish_spark.datastream.environment import StreamExecutionEnvironment
    from flinkish_spark.functions.stream import KeySelector
    from flinkish_spark.planning.stream_graph import Key, KeyedFunction


class FoldSettings(TypedDict, total=False):
    """Options of :meth:`KeyedStream.sum` and the like."""

    uid: str | None
    emit: Emit
    ttl: StateTtl | None
    max_parallelism: int | None


_OTHER = "call key_by() on the other one too, with a key of the same type"


class KeyedStream:
    """A stream partitioned by key; :meth:`process` gives it a function with state.

    `uid` and `max_parallelism` of all methods are as of :meth:`process`, which also says what is raised.
    """

    def __init__(
        self, environment: StreamExecutionEnvironment, node: StreamNode, keys: tuple[Key, ...]
    ) -> None:
        self._environment = environment
        self._entry = KeyedEntry(node, keys)

    def map(
        self,
        function: MapFunction | Callable[[Any], Any],
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Make one row of each record, by a function that may keep state for the record's key.

        Call a function without state before `key_by`, by :meth:`DataStream.map`: there it needs no shuffle
        and no state.

        Parameters
        ----------
        function
            A :class:`~flinkish_spark.MapFunction`, whose `open` is given what that of a
            :class:`~flinkish_spark.KeyedProcessFunction` is; or a function of one record. Serialised here.
        output
            Fields of the rows; by default those in the function's type hint.
        """
        uid = declare.resolve_uid(self._environment.graph, uid, "map", self._entry)
        made = declare.make_record_call(function, "map", uid)
        fields = declare.infer_output(made.call, f"'{uid}'", is_iterable=False) if output is None else output
        return self._add_operator(MapRecords(made.call, made.rich), fields, uid, max_parallelism)

    def flat_map(
        self,
        function: FlatMapFunction | Callable[[Any], Any],
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Make any number of rows of each record, by a function that may keep state for its key.

        Parameters
        ----------
        function
            A :class:`~flinkish_spark.FlatMapFunction`, or a function of one record; returns or yields rows,
            or returns None. A type hint like ``Iterator[Word]`` defines the fields.

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
        uid = declare.resolve_uid(self._environment.graph, uid, "flat_map", self._entry)
        made = declare.make_record_call(function, "flat_map", uid)
        fields = declare.infer_output(made.call, f"'{uid}'", is_iterable=True) if output is None else output
        return self._add_operator(FlatMapRecords(made.call, made.rich), fields, uid, max_parallelism)

    def filter(
        self,
        function: FilterFunction | Callable[[Any], Any],
        *,
        uid: str | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Keep the records for which a function says so, which may keep state for their key.

        Parameters
        ----------
        function
            A :class:`~flinkish_spark.FilterFunction`, or a function from a record to a truth value. Records
            go out with the fields that they came with.
        """
        uid = declare.resolve_uid(self._environment.graph, uid, "filter", self._entry)
        made = declare.make_record_call(function, "filter", uid)
        return self._add_operator(FilterRecords(made.call, made.rich), None, uid, max_parallelism)

    def key_by(
        self, *keys: str | Column | Callable[[Any], Any] | KeySelector, key: StateType | None = None
    ) -> KeyedStream:
        """Partition the same records by another key, which counts alone; see :meth:`DataStream.key_by`."""
        return KeyedStream(self._environment, self._entry.parent, declare.parse_keys(keys, key))

    @check_arguments()
    def process(
        self,
        function: KeyedProcessFunction | VectorizedProcessFunction,
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Process the elements of each key one after the other.

        Parameters
        ----------
        function
            Serialised here, once; must not hold a session, a lock or a connection.
        output
            Fields of the emitted rows: DDL, a StructType, a dataclass or a NamedTuple class; by default those
            in the type hint of `process_element`, or else of `on_timer`: ``Iterator[Total]``, for example.
        uid
            Stable name of this operator, by which its state is found. If left out, it is derived from the
            place in the program, with a warning; see docs/job-graph.md.
        max_parallelism
            Number of key groups; fixed for the life of the state. The environment's by default.

        Raises
        ------
        ConfigError
            The number of key groups is out of range, or it is no KeyedProcessFunction.
        GraphError
            The uid cannot be used or is taken.
        UserFunctionError
            The function cannot be serialised.
        SchemaError
            The output type is not a list of fields.
        """
        uid = declare.resolve_uid(self._environment.graph, uid, "process", self._entry)
        if output is None and isinstance(function, KeyedProcessFunction):
            call, timers = function.process_element, function.on_timer
            output = declare.infer_output(call, f"'{uid}'", timers, is_iterable=True)
        if output is None:
            raise SchemaError(
                f"the output of '{uid}' is not known", what_to_do='say output="user STRING, n LONG"'
            )
        return self._add_operator(function, output, uid, max_parallelism)

    @check_arguments()
    def reduce(
        self,
        reduce: ReduceFunction | Callable[[Any, Any], Any],
        *,
        uid: str | None = None,
        emit: Emit = Emit.PER_ELEMENT,
        ttl: StateTtl | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Emit, for each element, the reduction of all elements of its key so far.

        Parameters
        ----------
        reduce
            From two elements to one of the same fields. Once per key it has to be associative.
        emit
            For each element, as in Flink, or once per key and micro-batch: as of :meth:`sum`.
        ttl
            How long a key's value lives; None: for ever.
        """
        uid = declare.resolve_uid(self._environment.graph, uid, "reduce", self._entry)
        reducing = Reducing(reduce, ttl) if emit is Emit.PER_ELEMENT else ReducingColumns(reduce, ttl)
        return self._add_operator(reducing, None, uid, max_parallelism)

    @check_arguments("aggregate", "accumulator")
    def aggregate(
        self,
        aggregate: AggregateFunction,
        *,
        accumulator: StateType,
        output: OutputType | None = None,
        uid: str | None = None,
        emit: Emit = Emit.PER_ELEMENT,
        ttl: StateTtl | None = None,
        max_parallelism: int | None = None,
        row_kind: str = "",
    ) -> DataStream:
        """Emit, for each element, the result of its key's accumulator, unless it is None.

        Parameters
        ----------
        accumulator
            Type of the accumulator, as of a state.
        output
            Fields of the result; by default those in the type hint of `get_result`.
        emit
            For each element, as in Flink, or once per key and micro-batch: as of :meth:`sum`.
        ttl
            How long an accumulator lives; None: for ever.
        row_kind
            For a changelog: the field with the row kind, ``"_row_kind"``. A retracted row goes to the
            function's `retract(value, accumulator)`, which returns the accumulator without it, the inverse
            of `add`. The results are a changelog, too: see :meth:`fold`.
        """
        uid = declare.resolve_uid(self._environment.graph, uid, "aggregate", self._entry)
        check_aggregate(aggregate)
        if output is None:
            output = declare.infer_aggregate_output(aggregate, None, f"'{uid}'")
        kind = declare.check_accumulator_type(accumulator, uid)
        if row_kind:
            check_aggregate(aggregate, name=f"aggregate of '{uid}'", retracts=True)
            if emit is not Emit.PER_ELEMENT:
                raise ConfigError(
                    f"aggregate() of '{uid}' has a changelog as its input, and cannot emit once per key",
                    why="partial aggregates of tasks would be merged, and these cannot retract rows",
                    what_to_do="leave emit out",
                )
            fields = [*output_schema(output, f"'{uid}'"), T.StructField(ROW_KIND, T.StringType())]
            changes = ChangelogAggregating(row_kind, ttl, aggregate=aggregate, accumulator_type=kind)
            return self._add_operator(changes, T.StructType(fields), uid, max_parallelism)
        if emit is Emit.PER_ELEMENT:
            return self._add_operator(Aggregating(aggregate, kind, ttl), output, uid, max_parallelism)
        if getattr(type(aggregate), "merge", AggregateFunction.merge) is AggregateFunction.merge:
            raise ConfigError(
                f"aggregate() of '{uid}' cannot emit once per key",
                why="partial aggregates of tasks are merged, and the function has no merge(first, second)",
                what_to_do="define it, or leave emit=Emit.PER_ELEMENT",
            )
        return self._add_operator(AggregatingColumns(aggregate, kind, ttl), output, uid, max_parallelism)

    def sum(self, field: str, **settings: Unpack[FoldSettings]) -> DataStream:
        """Emit each key's first element with the sum of a field of all.

        Parameters
        ----------
        field
            Nulls are left out; a sum that leaves the field's type stops the job.
        settings
            `emit`: for each element, as in Flink, or once per key and micro-batch, many times as fast.
            `ttl`: how long a key's element lives; None: for ever. `uid`, `max_parallelism`.
        """
        return self._add_fold("sum", FieldAggregate(Fold.SUM, field), **settings)

    def min(self, field: str, **settings: Unpack[FoldSettings]) -> DataStream:
        """Emit each key's first element with the least of a field of all; see :meth:`sum`."""
        return self._add_fold("min", FieldAggregate(Fold.MIN, field), **settings)

    def max(self, field: str, **settings: Unpack[FoldSettings]) -> DataStream:
        """Emit each key's first element with the greatest of a field of all; see :meth:`sum`."""
        return self._add_fold("max", FieldAggregate(Fold.MAX, field), **settings)

    def min_by(self, field: str, *, ties: Ties = Ties.FIRST, **settings: Unpack[FoldSettings]) -> DataStream:
        """Emit each key's element with the least value of a field; `ties` chooses among equal ones."""
        return self._add_fold("min_by", ElementChoice(Fold.MIN, field, ties), **settings)

    def max_by(self, field: str, *, ties: Ties = Ties.FIRST, **settings: Unpack[FoldSettings]) -> DataStream:
        """Emit each key's element with the greatest value of a field; `ties` chooses among equal ones."""
        return self._add_fold("max_by", ElementChoice(Fold.MAX, field, ties), **settings)

    @check_arguments("columns")
    def fold(
        self,
        *columns: AggregateColumn,
        uid: str | None = None,
        ttl: StateTtl | None = None,
        max_parallelism: int | None = None,
        row_kind: str = "",
    ) -> DataStream:
        """Emit a row per key and micro-batch: the key's columns, then aggregates over all its elements.

        Computed over columns, most of it before the shuffle.

        Parameters
        ----------
        columns
            For example ``AggregateColumn("total", Fold.SUM, "amount")``. Keys that are expressions, and no
            fields, do not come out.
        ttl
            How long a key's row lives; None: for ever.
        row_kind
            For a changelog: the field with the row kind, ``"_row_kind"``. Each retracted row is subtracted
            from COUNT, SUM, MIN and MAX, and the results are a changelog by key, with a field `_row_kind`:
            for each element -U and +U if a result changes, +I at a key's first row, -D after its last one.
            See `docs/changelogs.md`.
        """
        uid = declare.resolve_uid(self._environment.graph, uid, "fold", self._entry)
        check_columns(columns, uid)
        if row_kind:
            keys = tuple(key for key in self._entry.keys if isinstance(key, str))
            changes = ChangelogFolding(row_kind, ttl, columns=columns, keys=keys)
            return self._add_operator(changes, None, uid, max_parallelism)
        return self._add_operator(FoldingColumns(columns, ttl), None, uid, max_parallelism)

    @check_arguments(row_kind='give "_row_kind"')
    def changelog_normalize(
        self,
        row_kind: str = ROW_KIND,
        *,
        uid: str | None = None,
        ttl: StateTtl | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Make a full changelog of upserts: emit a row's old values as -U before its new values.

        Use it before an aggregate, for a stream of updates without old values (`OnTombstone.DELETE`,
        `ChangelogMode.UPSERT`); it also drops repeated changes. Flink calls it ChangelogNormalize. The stream
        must be keyed by the key of the table.

        Parameters
        ----------
        row_kind
            The field with the kinds.
        ttl
            How long a row is stored after its last change; None: for ever.

        Examples
        --------
        >>> users.key_by("id").changelog_normalize(uid="users-as-they-were")  # doctest: +SKIP
        """
        uid = declare.resolve_uid(self._environment.graph, uid, "changelog_normalize", self._entry)
        return self._add_operator(Normalizing(row_kind, ttl), None, uid, max_parallelism)

    @check_arguments()
    def _add_fold(
        self,
        method: str,
        aggregate: ElementAggregate,
        uid: str | None = None,
        emit: Emit = Emit.PER_ELEMENT,
        ttl: StateTtl | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        uid = declare.resolve_uid(self._environment.graph, uid, method, self._entry)
        folding = FoldingElements if emit is Emit.PER_ELEMENT else FoldingColumns
        return self._add_operator(folding(aggregate, ttl), None, uid, max_parallelism)

    def window(self, assigner: WindowAssigner) -> WindowedStream:
        """Divide each key's elements into windows, such as ``TumblingEventTimeWindows(60_000)``."""
        return WindowedStream(self, WindowSpec(assigner))

    def count_window(self, count: int, slide: int | None = None) -> WindowedStream:
        """Divide each key's elements into windows of a fixed number of elements.

        `slide` is the number of elements between the ends of two windows; by default windows do not overlap.
        """
        return WindowedStream(
            self, count_window(count) if slide is None else sliding_count_window(count, slide)
        )

    @check_arguments("text")
    def match_recognize(
        self,
        text: str,
        *,
        uid: str | None = None,
        late_output: OutputTag | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Look for a row pattern of SQL:2016 among the rows of each key; see docs/cep.md.

        Parameters
        ----------
        text
            The clauses of MATCH_RECOGNIZE. PARTITION BY may name the stream's keys, ORDER BY the field that
            says the time of a row; both may be left out.
        late_output
            Side output of late rows; None: they are dropped and counted.

        Examples
        --------
        >>> stream.key_by("cell").match_recognize(
        ...     "MEASURES LAST(B.value) AS value PATTERN (A B+) DEFINE B AS value > PREV(value)", uid="rising"
        ... )  # doctest: +SKIP
        """
        patterns = load_row_patterns()
        found: DataStream = patterns.find_row_patterns(self, text, uid, late_output, max_parallelism)
        return found

    @overload
    def connect(self, other: KeyedStream) -> KeyedConnectedStreams: ...
    @overload
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStream: ...
    @check_arguments(other=_OTHER)
    def connect(
        self, other: KeyedStream | BroadcastStream
    ) -> KeyedConnectedStreams | BroadcastConnectedStream:
        """Let one function read this stream and another one: keyed by the same types, or broadcast."""
        check_same_job(self._environment, other._environment, "connect")
        if isinstance(other, BroadcastStream):
            return BroadcastConnectedStream(self._entry, other)
        return KeyedConnectedStreams(self._environment, self._entry, other._entry)

    @check_arguments(other=_OTHER)
    def join(self, other: KeyedStream) -> JoinedStreams:
        """Join this stream, the left one, with another one that has keys of the same types.

        Then call `interval`, `window`, `co_group` or `temporal` for the kind of join.
        """
        check_same_job(self._environment, other._environment, "join")
        return JoinedStreams(self._environment, self._entry, other._entry)

    def interval_join(
        self,
        other: KeyedStream,
        *,
        lower_ms: Duration,
        upper_ms: Duration,
        uid: str | None = None,
        **more: Unpack[IntervalSettings],
    ) -> DataStream:
        """Join elements whose event times are near; as :meth:`JoinedStreams.interval`."""
        return self.join(other).interval(lower_ms=lower_ms, upper_ms=upper_ms, uid=uid, **more)

    def _add_operator(
        self, function: KeyedFunction, output: OutputType | None, uid: str, max_parallelism: int | None
    ) -> DataStream:
        return add_operator(self._environment, [self._entry], function, output, uid, max_parallelism)
