"""User functions over windows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self

from flinkish_spark.core.elements import OutputTag
from flinkish_spark.functions.keyed import RuntimeContext, StateStore, TimeContext, name_contexts
from flinkish_spark.windows.time_window import TimeWindow

#: Fields that the two functions below append.
WINDOW_BOUNDS = "window_start TIMESTAMP, window_end TIMESTAMP"


class WindowRuntimeContext(RuntimeContext, Protocol):
    """Given to :meth:`ProcessWindowFunction.open`; its own `get_state` is `global_state.get_state`."""

    @property
    def window_state(self) -> StateStore:
        """Return states per key and window; refused for windows that merge."""

    @property
    def global_state(self) -> StateStore:
        """Return states per key, shared by all of its windows."""


class WindowContext(TimeContext, Protocol):
    """The context of :class:`ProcessWindowFunction` for one firing; valid only inside the call."""

    @property
    def window(self) -> TimeWindow:
        """Return the window. A sink that upserts by (key, `window`) keeps the last of its results."""

    @property
    def window_state(self) -> StateStore:
        """Return states of this window, which must be cleared in :meth:`ProcessWindowFunction.clear`."""

    @property
    def global_state(self) -> StateStore:
        """Return states of the key, which outlive the window."""

    def output(self, tag: OutputTag, value: Any) -> None:
        """Emit a row, which has the time of the window's results, to a side output."""


class ProcessWindowFunction(ABC):
    """A function over all elements of a window, or over their reduced or aggregated value.

    Examples
    --------
    >>> class Median(ProcessWindowFunction):
    ...     def process(self, key, context, elements):
    ...         amounts = sorted(element.amount for element in elements)
    ...         yield key, amounts[len(amounts) // 2], context.window.start, context.window.end
    """

    def __class_getitem__(cls, hints: Any) -> type[Self]:
        # Flink's is generic; here the hint of `process` says the types.
        return cls

    def open(self, context: WindowRuntimeContext) -> None:
        """Declare state; called once per copy, before any element."""

    @abstractmethod
    def process(self, key: Any, context: WindowContext, elements: Sequence[Any]) -> Iterable[Any] | None:
        """Return a window's result when it fires; called again for each later firing.

        Parameters
        ----------
        key
            A scalar for one key column, else a tuple.
        elements
            In their order of arrival, never empty; after reduce or aggregate only its result.
            If sessions merged, elements of the earlier session come first.
        """

    def clear(self, context: WindowContext) -> None:
        """Clear the window's own states; called at its cleanup, even if it never fired."""

    def close(self) -> None:
        """Release resources of `open`. Called when a worker ends regularly, not when it is killed."""


name_contexts(ProcessWindowFunction, Context=WindowContext)


class WindowBounds(ProcessWindowFunction):
    """A window function that appends `window_start, window_end` (`WINDOW_BOUNDS`) to the result.

    For results that contain the key. A later firing gives a row with the same key and bounds: a sink that
    upserts by these keeps the last one. The bounds of a global window are null.
    """

    def process(self, key: Any, context: WindowContext, elements: Sequence[Any]) -> Iterable[Any]:
        window = context.window
        return [(*_to_tuple(element), window.start, window.end) for element in elements]


class KeyAndWindowBounds(ProcessWindowFunction):
    """A window function that puts the key before the result, and `WINDOW_BOUNDS` after it.

    For results that do not contain the key, as of most aggregate functions; see
    :class:`WindowBounds`.
    """

    def process(self, key: Any, context: WindowContext, elements: Sequence[Any]) -> Iterable[Any]:
        window = context.window
        return [(*_to_tuple(key), *_to_tuple(element), window.start, window.end) for element in elements]


def _to_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
