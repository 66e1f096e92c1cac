"""User functions on keyed streams.

A function object is serialised once, sent to the Python workers, and opened in each; its
attributes must not hold a Spark session, a lock or a connection (make those in `open`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

from flinkish_spark.state import ValueState, ValueStateDescriptor


class RuntimeContext(Protocol):
    """Given to :meth:`KeyedProcessFunction.open`; valid only there."""

    def get_state(self, descriptor: ValueStateDescriptor) -> ValueState[Any]:
        """Return the value state of that name, created empty at its first use."""


class Context(Protocol):
    """Given to :meth:`KeyedProcessFunction.process_element`; valid only inside the call."""

    def get_current_key(self) -> Any:
        """Return the key of the element: a scalar for one key column, else a tuple."""


class KeyedProcessFunction(ABC):
    """A function over the elements of a keyed stream, one at a time, with state per key.

    The result must be a function of the state and the element alone: no wall clock, no unseeded
    random. A micro-batch that is cut off by a crash is processed again from the state before it.

    Examples
    --------
    >>> class RunningTotal(KeyedProcessFunction):
    ...     def open(self, context):
    ...         self.total = context.get_state(ValueStateDescriptor("total", "LONG"))
    ...     def process_element(self, value, ctx):
    ...         total = (self.total.value() or 0) + value.amount
    ...         self.total.update(total)
    ...         yield value.user, total
    """

    def open(self, context: RuntimeContext) -> None:
        """Declare state and make what cannot travel.

        Called before any element, once per copy of the function: Spark keeps a copy in a Python
        worker over many tasks and micro-batches. So nothing that matters may be kept in the
        function's own attributes; that is what state is for.
        """

    @abstractmethod
    def process_element(self, value: Any, ctx: Context) -> Iterable[Any] | None:
        """Process one element; `yield` emits.

        Parameters
        ----------
        value
            The element as a named tuple: ``value.amount``. TIMESTAMP fields are datetimes in
            UTC, DATE fields are dates, DECIMAL fields are decimals.
        ctx
            See :class:`Context`.

        Returns
        -------
        iterable of rows
            Each a tuple, named tuple, Row or dict in the declared output type; or None.

        Notes
        -----
        Called exactly once per element of each micro-batch that counts. Elements of one key that
        came from one channel (one Kafka partition) arrive in their order there. An exception
        stops the job with the element's topic, partition and offset; nothing is lost.
        """
