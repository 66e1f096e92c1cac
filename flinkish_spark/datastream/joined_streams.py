"""Joins of two keyed streams as a user writes them: `orders.join(payments).interval(...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

from flinkish_spark.core.elements import OutputTag, OutputType
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.datastream.connected_streams import add_operator
from flinkish_spark.joins.spec import (
    Bound,
    CoGroupFunction,
    IntervalJoin,
    JoinType,
    ProcessJoinFunction,
    TemporalJoin,
    WindowCoGroup,
    WindowJoin,
)
from flinkish_spark.planning.declare import infer_output, resolve_uid
from flinkish_spark.planning.factories import UNKNOWN_TYPE, Joining, KeyedJoin
from flinkish_spark.planning.stream_graph import KeyedEntry
from flinkish_spark.protocol.durations import Duration
from flinkish_spark.state.descriptors import StateTtl
from flinkish_spark.windows.assigners import WindowAssigner
from flinkish_spark.windows.spec import WindowSpec

if TYPE_CHECKING:
    from flinkish_spark.datastream.data_stream import DataStream
    from flinkish_spark.datastream.environment import StreamExecutionEnvironment


class IntervalSettings(TypedDict, total=False):
    """Options of an interval join beside its bounds in time; see :meth:`JoinedStreams.interval`."""

    lower: Bound
    upper: Bound
    join_type: JoinType
    function: ProcessJoinFunction | None
    output: OutputType | None
    left_late: OutputTag | None
    right_late: OutputTag | None
    max_parallelism: int | None


class JoinedStreams:
    """Two streams that are keyed by the same types, the left one and the right one.

    Without a function the output is the fields of both; a right field is called ``right_<name>`` if the left
    stream has a field of that name. With a function give its `output`, or a type hint to its method. `uid`
    and `max_parallelism` are as for :meth:`KeyedStream.process`. See docs/joins.md.
    """

    def __init__(self, environment: StreamExecutionEnvironment, left: KeyedEntry, right: KeyedEntry) -> None:
        self._environment, self._entries = environment, (left, right)

    def interval(
        self,
        *,
        lower_ms: Duration,
        upper_ms: Duration,
        uid: str | None = None,
        lower: Bound = Bound.INCLUSIVE,
        upper: Bound = Bound.INCLUSIVE,
        join_type: JoinType = JoinType.INNER,
        function: ProcessJoinFunction | None = None,
        output: OutputType | None = None,
        left_late: OutputTag | None = None,
        right_late: OutputTag | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Join elements whose event times are near: `left + lower <= right <= left + upper`.

        Parameters
        ----------
        lower_ms, upper_ms
            How much later than the left element the right one may be; may be negative.
        lower, upper
            Whether each bound belongs to the interval.
        join_type
            Which sides emit elements without a partner.
        function
            Makes rows of a pair.
        left_late, right_late
            Side output of late elements; None: they are dropped and counted.
        """
        uid = resolve_uid(self._environment.graph, uid, "interval", *self._entries)
        join = IntervalJoin(
            UNKNOWN_TYPE,
            UNKNOWN_TYPE,
            lower_ms,
            upper_ms,
            lower,
            upper,
            join_type,
            function,
            left_late,
            right_late,
        )
        return self._add_join(join, function, output, uid, max_parallelism)

    def window(
        self,
        windows: WindowAssigner | WindowSpec,
        *,
        uid: str | None = None,
        join_type: JoinType = JoinType.INNER,
        function: ProcessJoinFunction | None = None,
        output: OutputType | None = None,
        left_late: OutputTag | None = None,
        right_late: OutputTag | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Join each element with all elements of the other stream in the same window; see :meth:`interval`.

        Parameters
        ----------
        windows
            An assigner, or a specification with trigger, evictor and lateness.
        """
        uid = resolve_uid(self._environment.graph, uid, "window", *self._entries)
        spec = windows if isinstance(windows, WindowSpec) else WindowSpec(windows)
        join = WindowJoin(UNKNOWN_TYPE, UNKNOWN_TYPE, spec, join_type, function, left_late, right_late)
        return self._add_join(join, function, output, uid, max_parallelism)

    def co_group(
        self,
        windows: WindowAssigner | WindowSpec,
        function: CoGroupFunction,
        *,
        uid: str | None = None,
        output: OutputType | None = None,
        left_late: OutputTag | None = None,
        right_late: OutputTag | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Call a function with all elements of both streams in a window; see :meth:`window`."""
        uid = resolve_uid(self._environment.graph, uid, "co_group", *self._entries)
        spec = windows if isinstance(windows, WindowSpec) else WindowSpec(windows)
        join = WindowCoGroup(UNKNOWN_TYPE, UNKNOWN_TYPE, spec, function, left_late, right_late)
        return self._add_join(join, function, output, uid, max_parallelism)

    def temporal(
        self,
        *,
        uid: str | None = None,
        join_type: JoinType = JoinType.INNER,
        function: ProcessJoinFunction | None = None,
        output: OutputType | None = None,
        is_deletion: Callable[[Any], bool] | None = None,
        version_ttl: StateTtl | None = None,
        late_output: OutputTag | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Join each left element with the newest right element at its event time.

        Parameters
        ----------
        is_deletion
            Recognises right elements that end a version without beginning a new one; None: there are none.
        version_ttl
            How long versions live after the last one came; None: the newest stays for ever.
        late_output
            Side output of left elements whose version is no longer known; None: they are dropped and counted.
        """
        uid = resolve_uid(self._environment.graph, uid, "temporal", *self._entries)
        join = TemporalJoin(
            UNKNOWN_TYPE, UNKNOWN_TYPE, join_type, function, is_deletion, version_ttl, late_output
        )
        return self._add_join(join, function, output, uid, max_parallelism)

    def _add_join(
        self,
        join: KeyedJoin,
        function: ProcessJoinFunction | CoGroupFunction | None,
        output: OutputType | None,
        uid: str,
        max_parallelism: int | None,
    ) -> DataStream:
        if function is None and output is not None:
            raise SchemaError(
                f"the join '{uid}' has an output and no function",
                why="without a function the output is the fields of both streams",
                what_to_do="leave the output out, or give a function that makes it",
            )
        if output is None and function is not None:
            call = function.co_group if isinstance(function, CoGroupFunction) else function.process_element
            output = infer_output(call, f"'{uid}'", is_iterable=True)
        return add_operator(self._environment, self._entries, Joining(join), output, uid, max_parallelism)
