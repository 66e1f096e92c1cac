"""User functions on keyed streams.

A function object is serialised once, sent to the Python workers, and opened in each; its
attributes must not hold a Spark session, a lock or a connection (make those in `open`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

from flinkish_spark.operators.elements import OutputTag, TimeDomain
from flinkish_spark.state import (
    AggregatingState,
    AggregatingStateDescriptor,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    ReducingState,
    ReducingStateDescriptor,
    ValueState,
    ValueStateDescriptor,
)


class RuntimeContext(Protocol):
    """Given to :meth:`RichFunction.open`; valid only there. Each state is created empty at its first use."""

    @property
    def uid(self) -> str:
        """Stable name of the operator."""

    @property
    def max_parallelism(self) -> int:
        """Number of key groups."""

    def get_state(self, descriptor: ValueStateDescriptor) -> ValueState[Any]:
        """Return the value state of that name."""

    def get_list_state(self, descriptor: ListStateDescriptor) -> ListState[Any]:
        """Return the list state of that name."""

    def get_map_state(self, descriptor: MapStateDescriptor) -> MapState[Any, Any]:
        """Return the map state of that name."""

    def get_reducing_state(self, descriptor: ReducingStateDescriptor) -> ReducingState[Any]:
        """Return the reducing state of that name."""

    def get_aggregating_state(self, descriptor: AggregatingStateDescriptor) -> AggregatingState:
        """Return the aggregating state of that name."""

    def drop_state(self, name: str) -> None:
        """Give up what is stored of a state that the function had once; otherwise such state is refused."""


class TimerService(Protocol):
    """Times, and timers of the current key. Times are milliseconds since 1970."""

    def current_watermark(self) -> int:
        """Return the watermark; `MIN_WATERMARK_MS` before the first."""

    def current_processing_time(self) -> int:
        """Return the micro-batch's processing time: the same if it is run again."""

    def register_event_time_timer(self, time_ms: int) -> None:
        """Call `on_timer` when the watermark reaches a time; once, however often it is registered."""

    def register_processing_time_timer(self, time_ms: int) -> None:
        """Call `on_timer` when the processing time reaches a time."""

    def delete_event_time_timer(self, time_ms: int) -> None:
        """Take a registration back; nothing happens if there is none."""

    def delete_processing_time_timer(self, time_ms: int) -> None:
        """Take a registration back; nothing happens if there is none."""


class Context(Protocol):
    """Given to the functions for an element; valid only inside the call."""

    def get_current_key(self) -> Any:
        """Return the key of the element: a scalar for one key column, else a tuple."""

    def timestamp(self) -> int | None:
        """Return the element's event time in milliseconds; None if the stream has no timestamps."""

    def timer_service(self) -> TimerService:
        """Return times and timers."""

    def output(self, tag: OutputTag, value: Any) -> None:
        """Emit a row to a side output."""


class OnTimerContext(Context, Protocol):
    """Given to :meth:`KeyedProcessFunction.on_timer`; its `timestamp` is the timer's time."""

    def time_domain(self) -> TimeDomain:
        """Return which clock fired."""


class RichFunction:
    """A function with a beginning and an end in each worker."""

    def open(self, context: RuntimeContext) -> None:
        """Declare state and make what cannot travel.

        Called before any element, once per copy of the function: Spark keeps a copy in a Python
        worker over many tasks and micro-batches. So nothing that matters may be kept in the
        function's own attributes; that is what state is for.
        """

    def close(self) -> None:
        """Give back what `open` made. Called when a worker ends in order, not when it is killed."""


class MapFunction(RichFunction, ABC):
    """Makes one row of each; for a function that has to be opened."""

    @abstractmethod
    def map(self, value: Any) -> Any:
        """Return the row that stands for a record: tuple, named tuple, Row, dict or dataclass."""


class FlatMapFunction(RichFunction, ABC):
    """Makes any number of rows of each; for a function that has to be opened."""

    @abstractmethod
    def flat_map(self, value: Any) -> Iterable[Any] | None:
        """Return or yield the rows that stand for a record."""


class FilterFunction(RichFunction, ABC):
    """Keeps some rows; for a function that has to be opened."""

    @abstractmethod
    def filter(self, value: Any) -> bool:
        """Return whether to keep a record."""


class ReduceFunction(Protocol):
    """Makes one value of two; associative."""

    def reduce(self, first: Any, second: Any) -> Any:
        """Return the value that stands for both; must not change either."""


class AggregateFunction(ABC):
    """Aggregates values in an accumulator.

    Examples
    --------
    >>> class Average(AggregateFunction):
    ...     def create_accumulator(self):
    ...         return 0, 0
    ...     def add(self, value, accumulator):
    ...         return accumulator[0] + value.amount, accumulator[1] + 1
    ...     def get_result(self, accumulator):
    ...         return (accumulator[0] / accumulator[1],)
    ...     def merge(self, first, second):
    ...         return first[0] + second[0], first[1] + second[1]
    """

    @abstractmethod
    def create_accumulator(self) -> Any:
        """Return an accumulator to which nothing was added."""

    @abstractmethod
    def add(self, value: Any, accumulator: Any) -> Any:
        """Return the accumulator with a value added."""

    @abstractmethod
    def get_result(self, accumulator: Any) -> Any:
        """Return the result of an accumulator."""

    def merge(self, first: Any, second: Any) -> Any:
        """Return one accumulator for two; called only for windows that merge."""
        raise NotImplementedError(
            f"{type(self).__name__}.merge() is needed for session windows and other windows that merge"
        )


class KeyedProcessFunction(RichFunction, ABC):
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

    def on_timer(self, time_ms: int, ctx: OnTimerContext) -> Iterable[Any] | None:
        """Act on a timer of `ctx`'s key; emits like `process_element`.

        Called once per timer, in the order of their times. Event-time timers fire when the watermark
        reaches them, before the elements that came behind that watermark.
        """
        raise NotImplementedError(
            f"{type(self).__name__} registered a timer for {time_ms} but has no on_timer()"
        )
