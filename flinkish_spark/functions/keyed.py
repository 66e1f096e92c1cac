"""User functions on keyed streams.

A function object is serialised once, sent to the Python workers, and opened in each; its
attributes must not hold a Spark session, a lock or a connection (make those in `open`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, Self

from flinkish_spark.core.elements import OutputTag, TimeDomain
from flinkish_spark.core.subtask import TaskFacts
from flinkish_spark.state.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from flinkish_spark.state.states import AggregatingState, ListState, MapState, ReducingState, ValueState

if TYPE_CHECKING:
    from flinkish_spark.state.operator_state import BroadcastState, ReadOnlyBroadcastState


class StateStore(Protocol):
    """A store of states; each must be requested in `open`, which declares it."""

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


class TimeContext(Protocol):
    """Times of the micro-batch, in milliseconds since 1970."""

    def current_watermark(self) -> int:
        """Return the watermark; `MIN_WATERMARK_MS` before the first."""

    def current_processing_time(self) -> int:
        """Return the micro-batch's processing time: the same if it is run again."""


class RuntimeContext(StateStore, TaskFacts, Protocol):
    """Given to :meth:`RichFunction.open`; valid only there. Each state is created empty at its first use."""

    @property
    def uid(self) -> str:
        """Stable name of the operator."""

    @property
    def max_parallelism(self) -> int:
        """Number of key groups."""

    def drop_state(self, name: str) -> None:
        """Discard the data of a state that the function no longer has; without this, the job refuses it."""


class TimerService(TimeContext, Protocol):
    """Times, and timers of the current key."""

    def register_event_time_timer(self, time_ms: int) -> None:
        """Call `on_timer` once when the watermark reaches a time, even if it is registered several times."""

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
        """Return the time domain of the timer."""


class RichFunction:
    """A function that is opened and closed in each worker; ``MapFunction[int, str]`` is `MapFunction`."""

    def __class_getitem__(cls, hints: Any) -> type[Self]:
        # Flink's functions are generic; here a method's hints say the types.
        return cls

    def open(self, context: RuntimeContext) -> None:
        """Declare state, and make resources that cannot be serialised.

        Called before any element, once per copy of the function: Spark keeps a copy in a Python
        worker over many tasks and micro-batches. So keep data in state, never in the function's
        attributes.
        """

    def close(self) -> None:
        """Release resources of `open`.

        Called when Python discards a copy: perhaps late, between calls of other functions, and not at all
        when a worker is killed. So it must not block.
        """


class MapFunction(RichFunction, ABC):
    """A map function that can be opened: one row of each record."""

    @abstractmethod
    def map(self, value: Any) -> Any:
        """Return the row for a record: tuple, named tuple, Row, dict or dataclass."""


class FlatMapFunction(RichFunction, ABC):
    """A flat-map function that can be opened: any number of rows of each record."""

    @abstractmethod
    def flat_map(self, value: Any) -> Iterable[Any] | None:
        """Return or yield the rows for a record."""


class FilterFunction(RichFunction, ABC):
    """A filter function that can be opened."""

    @abstractmethod
    def filter(self, value: Any) -> bool:
        """Return whether to keep a record."""


class ReduceFunction(RichFunction, ABC):
    """An associative function that makes one value of two.

    `open` gets no state: the values are the state. If the function is part of a state's descriptor, only the
    function that declares the state can open it.
    """

    @abstractmethod
    def reduce(self, first: Any, second: Any) -> Any:
        """Return the value made of both; it may be one of them, changed."""


class AggregateFunction(RichFunction, ABC):
    """A function that aggregates values in an accumulator; opened as a :class:`ReduceFunction`.

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
        """Return an empty accumulator."""

    @abstractmethod
    def add(self, value: Any, accumulator: Any) -> Any:
        """Return the accumulator with a value added."""

    @abstractmethod
    def get_result(self, accumulator: Any) -> Any:
        """Return the result of an accumulator."""

    def merge(self, first: Any, second: Any) -> Any:
        """Return one accumulator for two; called only for windows that merge."""
        raise NotImplementedError(f"{type(self).__name__}.merge() is needed for windows that merge")


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
        reaches them, before the elements that came after that watermark.
        """
        raise NotImplementedError(f"{type(self).__name__} has a timer for {time_ms} and no on_timer()")


class KeyedCoProcessFunction(RichFunction, ABC):
    """A function over two keyed streams; elements of one key share state and timers.

    The order between the two inputs is undefined, as in Flink: an element that has to wait for the other side
    waits in state. Within one input, elements of one key and channel come in order.

    Examples
    --------
    >>> class Enrich(KeyedCoProcessFunction):
    ...     def open(self, context):
    ...         self.name = context.get_state(ValueStateDescriptor("name", "STRING"))
    ...     def process_element1(self, order, ctx):
    ...         yield order.user, self.name.value(), order.amount
    ...     def process_element2(self, user, ctx):
    ...         self.name.update(user.name)
    """

    @abstractmethod
    def process_element1(self, value: Any, ctx: Context) -> Iterable[Any] | None:
        """Process an element of the first input; as :meth:`KeyedProcessFunction.process_element`."""

    @abstractmethod
    def process_element2(self, value: Any, ctx: Context) -> Iterable[Any] | None:
        """Process an element of the second input."""

    def on_timer(self, time_ms: int, ctx: OnTimerContext) -> Iterable[Any] | None:
        """Act on a timer that either input has registered."""
        raise NotImplementedError(f"{type(self).__name__} has a timer for {time_ms} and no on_timer()")


class UnkeyedContext(TimeContext, Protocol):
    """The context of a function without a current key; valid only inside the call."""

    def timestamp(self) -> int | None:
        """Return the element's event time in milliseconds; None if the stream has no timestamps."""

    def output(self, tag: OutputTag, value: Any) -> None:
        """Emit a row to a side output."""


class BroadcastContext(UnkeyedContext, Protocol):
    """The context of `process_broadcast_element`, without a current key."""

    def get_broadcast_state(self, descriptor: MapStateDescriptor) -> BroadcastState[Any, Any]:
        """Return a broadcast state for reading and writing."""


class KeyedBroadcastContext(BroadcastContext, Protocol):
    """Given to :meth:`KeyedBroadcastProcessFunction.process_broadcast_element`."""

    def apply_to_keyed_state(self, descriptor: StateDescriptor, function: Callable[[Any, Any], None]) -> None:
        """Call a function with each key that has an entry of a state, and that state."""


class ReadOnlyBroadcastContext(Protocol):
    """Read access of the element side to broadcast states."""

    def get_broadcast_state(self, descriptor: MapStateDescriptor) -> ReadOnlyBroadcastState[Any, Any]:
        """Return a broadcast state for reading; writing raises `TypeError`."""


class ReadOnlyContext(UnkeyedContext, ReadOnlyBroadcastContext, Protocol):
    """Given to :meth:`BroadcastProcessFunction.process_element`."""


class KeyedReadOnlyContext(Context, ReadOnlyBroadcastContext, Protocol):
    """Given to :meth:`KeyedBroadcastProcessFunction.process_element`."""


class BroadcastOnTimerContext(OnTimerContext, ReadOnlyBroadcastContext, Protocol):
    """Given to :meth:`KeyedBroadcastProcessFunction.on_timer`."""


class BroadcastProcessFunction(RichFunction, ABC):
    """A function over a stream and a broadcast stream, whose elements every parallel copy gets.

    Each partition has a copy of the broadcast state. The copies stay equal if `process_broadcast_element`
    depends on the element and the broadcast state only. In a micro-batch the broadcast elements come before
    all others, in every partition.

    Examples
    --------
    >>> RULES = MapStateDescriptor("rules", "STRING", "LONG")
    >>> class Allowed(BroadcastProcessFunction):
    ...     def process_element(self, value, ctx):
    ...         limit = ctx.get_broadcast_state(RULES).get(value.kind)
    ...         if limit is None or value.amount <= limit:
    ...             yield value
    ...     def process_broadcast_element(self, rule, ctx):
    ...         ctx.get_broadcast_state(RULES)[rule.kind] = rule.limit
    """

    @abstractmethod
    def process_element(self, value: Any, ctx: ReadOnlyContext) -> Iterable[Any] | None:
        """Process an element; `yield` emits."""

    @abstractmethod
    def process_broadcast_element(self, value: Any, ctx: BroadcastContext) -> Iterable[Any] | None:
        """Process a broadcast element; its rows are emitted once per partition, as in Flink."""


class KeyedBroadcastProcessFunction(RichFunction, ABC):
    """A function over a keyed stream and a broadcast one: state and timers per key, and broadcast state.

    Broadcast state works as in :class:`BroadcastProcessFunction`.
    """

    @abstractmethod
    def process_element(self, value: Any, ctx: KeyedReadOnlyContext) -> Iterable[Any] | None:
        """Process an element of the current key; `yield` emits."""

    @abstractmethod
    def process_broadcast_element(self, value: Any, ctx: KeyedBroadcastContext) -> Iterable[Any] | None:
        """Process a broadcast element. There is no current key: keyed state and timers are refused."""

    def on_timer(self, time_ms: int, ctx: BroadcastOnTimerContext) -> Iterable[Any] | None:
        """Act on a timer of `ctx`'s key."""
        raise NotImplementedError(f"{type(self).__name__} has a timer for {time_ms} and no on_timer()")


def name_contexts(*functions: type, **contexts: type) -> None:
    """Let hints name the contexts of functions as in Flink: ``KeyedProcessFunction.Context``."""
    for function in functions:
        for name, context in contexts.items():
            setattr(function, name, context)


name_contexts(KeyedProcessFunction, KeyedCoProcessFunction, Context=Context, OnTimerContext=OnTimerContext)
name_contexts(BroadcastProcessFunction, Context=BroadcastContext, ReadOnlyContext=ReadOnlyContext)
name_contexts(
    KeyedBroadcastProcessFunction,
    Context=KeyedBroadcastContext,
    ReadOnlyContext=KeyedReadOnlyContext,
    OnTimerContext=BroadcastOnTimerContext,
)
