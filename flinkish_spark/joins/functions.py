"""What is made of a pair of elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from flinkish_spark.functions import RichFunction
from flinkish_spark.operators.elements import OutputTag
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.windows.functions import WindowContext, WindowRuntimeContext


class JoinContext(Protocol):
    """Given to a join function for one pair; valid only inside the call."""

    def left_timestamp(self) -> int | None:
        """Return the left element's event time; None if there is no left element, or it is a window join."""

    def right_timestamp(self) -> int | None:
        """Return the right element's event time; None as for the left one."""

    def timestamp(self) -> int | None:
        """Return the event time of what is emitted."""

    def output(self, tag: OutputTag, value: Any) -> None:
        """Emit a row, with the time of the result, to a side output."""


class ProcessJoinFunction(RichFunction, ABC):
    """Makes rows of a pair.

    Examples
    --------
    >>> class OrderWithPayment(ProcessJoinFunction):
    ...     def process_element(self, order, payment, ctx):
    ...         yield order.id, payment.amount, ctx.right_timestamp() - ctx.left_timestamp()
    """

    @abstractmethod
    def process_element(self, left: Any, right: Any, ctx: JoinContext) -> Iterable[Any] | None:
        """Return the rows of a pair; `yield` emits.

        Parameters
        ----------
        left, right
            The elements; None for the one that is missing in an outer join.
        """


class Concatenate(ProcessJoinFunction):
    """Emits the fields of the left element followed by those of the right one, None for a missing one's.

    Parameters
    ----------
    left_type, right_type
        DDL of the elements.

    Examples
    --------
    >>> list(Concatenate("a LONG, b LONG", "STRING").process_element((1, 2), None, None))
    [(1, 2, None)]
    """

    def __init__(self, left_type: str, right_type: str) -> None:
        self._left, self._right = ElementType(left_type), ElementType(right_type)
        self._no_left = (None,) * len(self._left.fields)
        self._no_right = (None,) * len(self._right.fields)

    def process_element(self, left: Any, right: Any, ctx: JoinContext) -> Iterable[Any]:
        """Return the one row."""
        row = self._no_left if left is None else self._left.spread(left)
        return (row + (self._no_right if right is None else self._right.spread(right)),)


class CoGroupFunction(ABC):
    """Makes rows of all elements of a key and window, of both inputs; either may have none.

    Examples
    --------
    >>> class Counts(CoGroupFunction):
    ...     def co_group(self, key, context, lefts, rights):
    ...         yield key, context.window.start, len(lefts), len(rights)
    """

    def open(self, context: WindowRuntimeContext) -> None:
        """Declare state; called once per copy, before any element."""

    @abstractmethod
    def co_group(
        self, key: Any, context: WindowContext, lefts: Sequence[Any], rights: Sequence[Any]
    ) -> Iterable[Any] | None:
        """Return the rows of a window, whenever it fires; `yield` emits."""

    def clear(self, context: WindowContext) -> None:
        """Clear what was kept for a window that is cleaned up."""

    def close(self) -> None:
        """Give back what `open` made."""
