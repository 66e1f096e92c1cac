"""Windows as a user writes them: `key_by(...).window(...).aggregate(...)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T

from flinkish_spark.functions import AggregateFunction, ReduceFunction
from flinkish_spark.graph.operator_factories import Windows
from flinkish_spark.operators.elements import OutputTag
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
    from flinkish_spark.datastream import DataStream
    from flinkish_spark.keyed_stream import KeyedStream


class WindowedStream:
    """A keyed stream in windows; made by :meth:`KeyedStream.window`. Each method returns a new one.

    What a window emits has the time of its last instant, so windows of windows work.
    """

    def __init__(self, stream: KeyedStream, spec: WindowSpec) -> None:
        self._stream, self._spec = stream, spec

    def trigger(self, trigger: Trigger) -> WindowedStream:
        """Fire when a trigger says so, instead of at the windows' ends."""
        return WindowedStream(self._stream, replace(self._spec, trigger=trigger))

    def evictor(self, evictor: Evictor) -> WindowedStream:
        """Throw elements away at each firing. Windows then keep all their elements."""
        return WindowedStream(self._stream, replace(self._spec, evictor=evictor))

    def allowed_lateness(self, lateness_ms: int) -> WindowedStream:
        """Keep windows for a while behind their end; each late element fires its window again.

        Parameters
        ----------
        lateness_ms
            By the watermark, in milliseconds. Later results stand for the same key and window: a sink
            that upserts by both keeps the last.
        """
        return WindowedStream(self._stream, replace(self._spec, allowed_lateness_ms=lateness_ms))

    def side_output_late_data(self, tag: OutputTag) -> WindowedStream:
        """Send elements that come too late for all their windows to a side output; else they are dropped."""
        return WindowedStream(self._stream, replace(self._spec, late_output=tag))

    def reduce(
        self,
        reduce: ReduceFunction | Callable[[Any, Any], Any],
        then: ProcessWindowFunction | None = None,
        *,
        uid: str,
        output: str | T.StructType | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Reduce elements as they come; a window keeps one value.

        Parameters
        ----------
        reduce
            From two elements to one of the same fields; associative.
        then
            What makes the result of that one; needs `output`.
        output
            Fields of the result; those of the elements by default.
        uid, max_parallelism
            As of :meth:`KeyedStream.process`.
        """
        return self._apply(ReduceWindow(reduce, then), uid, output, max_parallelism)

    def aggregate(
        self,
        aggregate: AggregateFunction,
        then: ProcessWindowFunction | None = None,
        *,
        accumulator: str,
        output: str | T.StructType,
        uid: str,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Aggregate elements as they come; a window keeps one accumulator.

        Parameters
        ----------
        aggregate
            The function.
        then
            What makes the result of `get_result`; that is the result by default.
        accumulator
            Type of the accumulator, as DDL.
        output
            Fields of the result.
        uid, max_parallelism
            As of :meth:`KeyedStream.process`.
        """
        return self._apply(AggregateWindow(aggregate, accumulator, then), uid, output, max_parallelism)

    def process(
        self,
        process: ProcessWindowFunction,
        *,
        output: str | T.StructType,
        uid: str,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Keep all elements of a window, and process them when it fires.

        Parameters
        ----------
        process
            The function.
        output
            Fields of the result.
        uid, max_parallelism
            As of :meth:`KeyedStream.process`.
        """
        return self._apply(ProcessWindow(process), uid, output, max_parallelism)

    def _apply(
        self,
        computation: WindowComputation,
        uid: str,
        output: str | T.StructType | None,
        max_parallelism: int | None,
    ) -> DataStream:
        return self._stream._keyed(Windows(self._spec, computation), output, uid, max_parallelism)
