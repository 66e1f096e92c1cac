"""The functions of a program: ours, which have PyFlink's names, and its kinds of window functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from flinkish_spark.functions.keyed import *  # noqa: F403
from flinkish_spark.functions.keyed import RichFunction as Function
from flinkish_spark.functions.stream import *  # noqa: F403
from flinkish_spark.windows.functions import ProcessWindowFunction as ProcessWindowFunction
from flinkish_spark.windows.functions import WindowContext


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
