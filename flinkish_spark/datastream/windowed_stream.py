"""Windows as a user writes them: `key_by(...).window(...).aggregate(...)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flinkish_spark.core.elements import OutputTag, OutputType
from flinkish_spark.core.validation import check_aggregate
from flinkish_spark.functions.aggregates import AggregateColumn, ElementChoice, Fold, Ties, check_columns
from flinkish_spark.functions.keyed import AggregateFunction, ReduceFunction
from flinkish_spark.operators.columnar_windows import require_column_windows
from flinkish_spark.planning.declare import (
    check_accumulator_type,
    infer_aggregate_output,
    infer_output,
    resolve_uid,
)
from flinkish_spark.planning.factories import FoldingWindows, Windows
from flinkish_spark.protocol.durations import Duration
from flinkish_spark.types.hints import StateType
from flinkish_spark.types.schemas import output_schema
from flinkish_spark.windows.evictors import Evictor
from flinkish_spark.windows.functions import ProcessWindowFunction
from flinkish_spark.windows.spec import (
    AggregateWindow,
    ProcessWindow,
    ReduceWindow,
    WindowComputation,
    WindowSpec,
)
from flinkish_spark.windows.triggers import Trigger

if TYPE_CHECKING:
    from flinkish_spark.datastream.data_stream import DataStream
    from flinkish_spark.datastream.keyed_stream import KeyedStream


class WindowedStream:
    """A keyed stream in windows; made by :meth:`KeyedStream.window`. Each method returns a new one.

    Results of a window have the time of its last instant, so windows of windows work. `uid` and
    `max_parallelism` are as of :meth:`KeyedStream.process`.
    """

    def __init__(self, stream: KeyedStream, spec: WindowSpec) -> None:
        self._stream, self._spec = stream, spec

    def trigger(self, trigger: Trigger) -> WindowedStream:
        """Fire windows by a trigger, instead of at their ends."""
        return WindowedStream(self._stream, replace(self._spec, trigger=trigger))

    def evictor(self, evictor: Evictor) -> WindowedStream:
        """Remove elements at each firing. Windows then store all their elements."""
        return WindowedStream(self._stream, replace(self._spec, evictor=evictor))

    def allowed_lateness(self, lateness_ms: Duration) -> WindowedStream:
        """Keep windows for a while after their end; each late element fires its window again.

        Later results have the same key and window: a sink that upserts by both keeps the last.
        """
        return WindowedStream(self._stream, replace(self._spec, allowed_lateness_ms=lateness_ms))

    def side_output_late_data(self, tag: OutputTag) -> WindowedStream:
        """Send elements that are too late for all of their windows to a side output, or else drop them."""
        return WindowedStream(self._stream, replace(self._spec, late_output=tag))

    def emit_retractions(self, field: str = "is_retracted") -> WindowedStream:
        """Emit each result that is no longer valid once more, marked, before the result that replaces it.

        This happens when a window fires again, and when sessions that have fired merge. A sink by key and
        window deletes these rows: ``Upsert(keys, delete_when="is_retracted", not_stored=("is_retracted",))``.
        Results are stored with the window until its cleanup. Results of a purged window stay valid.

        Parameters
        ----------
        field
            Name of a BOOLEAN field after the fields of a result; it is true if the result is no longer valid.
        """
        return WindowedStream(self._stream, replace(self._spec, retraction_field=field))

    def reduce(
        self,
        reduce: ReduceFunction | Callable[[Any, Any], Any],
        then: ProcessWindowFunction | None = None,
        *,
        uid: str | None = None,
        output: OutputType | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Reduce elements as they come; a window keeps one value.

        Parameters
        ----------
        reduce
            From two elements to one of the same fields; associative.
        then
            Makes the result of the reduced element.
        output
            Fields of the result; by default the elements' fields, or those in the hint of `then.process`.
        """
        uid = self._resolve_uid(uid, "reduce")
        computation = ReduceWindow(reduce, then)
        if then is not None and output is None:
            output = infer_output(then.process, f"'{uid}'", is_iterable=True)
        return self._apply(computation, uid, output, max_parallelism)

    def aggregate(
        self,
        aggregate: AggregateFunction,
        then: ProcessWindowFunction | None = None,
        *,
        accumulator: StateType,
        output: OutputType | None = None,
        uid: str | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Aggregate elements as they come; a window keeps one accumulator.

        Parameters
        ----------
        then
            Makes the result from that of `get_result`, which is the result by default.
        accumulator
            Type of the accumulator, as of a state.
        output
            Fields of the result; by default those in the hint of `get_result`, or of `then.process`.
        """
        uid = self._resolve_uid(uid, "aggregate")
        check_aggregate(aggregate)
        if output is None:
            output = infer_aggregate_output(aggregate, then, f"'{uid}'")
        computation = AggregateWindow(aggregate, check_accumulator_type(accumulator, uid), then)
        return self._apply(computation, uid, output, max_parallelism)

    def process(
        self,
        process: ProcessWindowFunction,
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Keep all elements of a window, and process them when it fires.

        The fields of the result are by default those in the type hint of the function's `process`.
        """
        uid = self._resolve_uid(uid, "process")
        computation = ProcessWindow(process)
        if output is None:
            output = infer_output(process.process, f"'{uid}'", is_iterable=True)
        return self._apply(computation, uid, output, max_parallelism)

    def fold(
        self, *columns: AggregateColumn, uid: str | None = None, max_parallelism: int | None = None
    ) -> DataStream:
        """Fold fields of a window's elements over columns, many times as fast as element by element.

        Emits the key's columns, the folds, and `window_start, window_end` (TIMESTAMP), at the time of the
        window's last instant. There is one row when the window ends, and one more for each micro-batch with
        late elements that are in time for it. For tumbling and sliding windows and for sessions with a fixed
        gap, with their own trigger and no evictor.

        Parameters
        ----------
        columns
            For example ``AggregateColumn("total", Fold.SUM, "amount")``. Keys that are expressions, and no
            fields, do not come out.
        """
        uid = self._resolve_uid(uid, "fold")
        check_columns(columns, uid)
        require_column_windows(self._spec, uid)
        return self._add_fold(columns, uid, max_parallelism)

    def sum(self, field: str, *, uid: str | None = None, max_parallelism: int | None = None) -> DataStream:
        """Emit the sum of a field under the field's name, between the key's columns and the window's bounds.

        Emits the same rows as :meth:`fold`, for any windows. Windows that cannot be folded over columns
        (count and global windows, sessions with a gap per element, a custom trigger, an evictor, retractions)
        are computed element by element: each late element then fires its window once more.

        Parameters
        ----------
        field
            Nulls are left out; a sum that leaves the field's type stops the job.
        """
        uid = self._resolve_uid(uid, "sum")
        return self._add_fold((AggregateColumn(field, Fold.SUM, field),), uid, max_parallelism)

    def min(self, field: str, *, uid: str | None = None, max_parallelism: int | None = None) -> DataStream:
        """Emit the least of a field under the field's name; see :meth:`sum`."""
        uid = self._resolve_uid(uid, "min")
        return self._add_fold((AggregateColumn(field, Fold.MIN, field),), uid, max_parallelism)

    def max(self, field: str, *, uid: str | None = None, max_parallelism: int | None = None) -> DataStream:
        """Emit the greatest of a field under the field's name; see :meth:`sum`."""
        uid = self._resolve_uid(uid, "max")
        return self._add_fold((AggregateColumn(field, Fold.MAX, field),), uid, max_parallelism)

    def min_by(
        self,
        field: str,
        *,
        uid: str | None = None,
        ties: Ties = Ties.FIRST,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Emit the whole element with the least value of a field, then `window_start, window_end`.

        For any windows, as :meth:`sum`.

        Parameters
        ----------
        field
            Null is neither the least nor the greatest, unless there is nothing else; NaN is the greatest.
        ties
            Which of several that are equal; by default the one that came first.
        """
        uid = self._resolve_uid(uid, "min_by")
        return self._add_fold(ElementChoice(Fold.MIN, field, ties), uid, max_parallelism)

    def max_by(
        self,
        field: str,
        *,
        uid: str | None = None,
        ties: Ties = Ties.FIRST,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Emit the whole element with the greatest value of a field; see :meth:`min_by`."""
        uid = self._resolve_uid(uid, "max_by")
        return self._add_fold(ElementChoice(Fold.MAX, field, ties), uid, max_parallelism)

    def _resolve_uid(self, uid: str | None, method: str) -> str:
        if uid is not None:
            return uid
        return resolve_uid(self._stream._environment.graph, uid, method, self._stream._entry)

    def _add_fold(
        self, columns: tuple[AggregateColumn, ...] | ElementChoice, uid: str, max_parallelism: int | None
    ) -> DataStream:
        return self._stream._add_operator(FoldingWindows(self._spec, columns), None, uid, max_parallelism)

    def _apply(
        self, computation: WindowComputation, uid: str, output: OutputType | None, max_parallelism: int | None
    ) -> DataStream:
        result = None if output is None else output_schema(output, uid)
        function = Windows(self._spec, computation, result)
        return self._stream._add_operator(function, None, uid, max_parallelism)
