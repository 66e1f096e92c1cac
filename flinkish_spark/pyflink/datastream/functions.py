"""The functions of a program: ours, which have PyFlink's names, and its kinds of window functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from flinkish_spark.functions.keyed import AggregateFunction as AggregateFunction
from flinkish_spark.functions.keyed import BroadcastProcessFunction as BroadcastProcessFunction
from flinkish_spark.functions.keyed import FilterFunction as FilterFunction
from flinkish_spark.functions.keyed import FlatMapFunction as FlatMapFunction
from flinkish_spark.functions.keyed import KeyedBroadcastProcessFunction as KeyedBroadcastProcessFunction
from flinkish_spark.functions.keyed import KeyedCoProcessFunction as KeyedCoProcessFunction
from flinkish_spark.functions.keyed import KeyedProcessFunction as KeyedProcessFunction
from flinkish_spark.functions.keyed import MapFunction as MapFunction
from flinkish_spark.functions.keyed import ReduceFunction as ReduceFunction
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.functions.keyed import RuntimeContext as RuntimeContext
from flinkish_spark.functions.stream import CoFlatMapFunction as CoFlatMapFunction
from flinkish_spark.functions.stream import CoMapFunction as CoMapFunction
from flinkish_spark.functions.stream import CoProcessFunction as CoProcessFunction
from flinkish_spark.functions.stream import KeySelector as KeySelector
from flinkish_spark.functions.stream import Partitioner as Partitioner
from flinkish_spark.functions.stream import ProcessFunction as ProcessFunction
from flinkish_spark.windows.functions import ProcessWindowFunction as ProcessWindowFunction
from flinkish_spark.windows.functions import WindowContext

#: PyFlink's name of the base of all functions.
Function = RichFunction


class WindowFunction(Function, ABC):
    """A function over the elements of a key's window, for `WindowedStream.apply`."""

    @abstractmethod
    def apply(self, key: Any, window: Any, inputs: Iterable[Any]) -> Iterable[Any]:
        """Return a window's results."""


class AllWindowFunction(Function, ABC):
    """A function over the elements of a window, for `AllWindowedStream.apply`."""

    @abstractmethod
    def apply(self, window: Any, inputs: Iterable[Any]) -> Iterable[Any]:
        """Return a window's results."""


class ProcessAllWindowFunction(Function, ABC):
    """A function over the elements of a window, for `AllWindowedStream.process`."""

    Context = WindowContext

    @abstractmethod
    def process(self, context: Any, elements: Iterable[Any]) -> Iterable[Any]:
        """Return a window's results."""

    def clear(self, context: Any) -> None:
        """Clear the window's own states."""
