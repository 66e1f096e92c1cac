"""The border: functions of a program as functions of ours, elements and contexts as the program has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.functions import keyed, stream
from flinkish_spark.pyflink.common.typeinfo import PICKLED, TypeInformation
from flinkish_spark.pyflink.datastream.output_tag import OutputTag
from flinkish_spark.pyflink.datastream.state import StateDescriptor, find_state
from flinkish_spark.windows.functions import ProcessWindowFunction


class TimeWindow(NamedTuple):
    """A window from `start` up to, but without, `end`, in milliseconds since 1970."""

    start: int
    end: int

    def max_timestamp(self) -> int:
        return self.end if self.end == MAX_WATERMARK_MS else self.end - 1

    def intersects(self, other: TimeWindow) -> bool:
        return self.start <= other.end and self.end >= other.start

    def cover(self, other: TimeWindow) -> Self:
        return type(self)(min(self.start, other.start), max(self.end, other.end))


def _get_state(self: Context, descriptor: StateDescriptor) -> Any:
    return find_state(self._context, descriptor)


class Context:
    """A context of ours with PyFlink's methods, and with values as the program has them."""

    def __init__(self, context: Any, key: TypeInformation = PICKLED) -> None:
        self._context, self._key = context, key

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._context, name)

    get_state = get_list_state = get_map_state = get_reducing_state = get_aggregating_state = _get_state

    def get_current_key(self) -> Any:
        return self._key.decode(self._context.get_current_key())

    def timer_service(self) -> Any:
        # A context without a key has the times itself, and no timers.
        own = getattr(self._context, "timer_service", None)
        return self._context if own is None else own()

    def output(self, tag: OutputTag, value: Any) -> None:
        self._context.output(tag.own(), tag.type_info.to_row(value))

    def get_broadcast_state(self, descriptor: StateDescriptor) -> Any:
        return descriptor.wrap(self._context.get_broadcast_state(descriptor.own))

    def apply_to_keyed_state(self, descriptor: StateDescriptor, function: Any) -> None:
        decode = self._key.decode
        self._context.apply_to_keyed_state(
            descriptor.own, lambda key, state: function(decode(key), descriptor.wrap(state))
        )

    def get_partitioned_state(self, descriptor: StateDescriptor) -> Any:
        return descriptor.wrap(self._context.get_partitioned_state(descriptor.own))

    def merge_partitioned_state(self, descriptor: StateDescriptor) -> None:
        self._context.merge_partitioned_state(descriptor.own)

    def window(self) -> TimeWindow:
        return TimeWindow(*self._context.window)

    def window_state(self) -> Context:
        return Context(self._context.window_state)

    def global_state(self) -> Context:
        return Context(self._context.global_state)


def _results(function: Any, method: str, *arguments: Any) -> Iterable[Any]:
    call = getattr(function, method, function)
    kind = method.rstrip("12")
    if kind.startswith(("map", "flat_map", "filter")):
        # These take no context.
        made = call(arguments[0])
        if kind == "filter":
            return arguments[:1] if made else ()
        return (made,) if kind == "map" else made or ()
    made = call(*arguments)
    return () if made is None else made


class Border:
    """The base of functions of ours that call one of the program."""

    def __init__(
        self,
        function: Any,
        method: str,
        given: Sequence[TypeInformation],
        made: TypeInformation,
        key: TypeInformation | None = None,
    ) -> None:
        self._function, self._method, self._given, self._made = function, method, given, made
        self._key = PICKLED if key is None else key

    def open(self, context: Any) -> None:
        if hasattr(self._function, "open"):
            self._function.open(Context(context, self._key))

    def close(self) -> None:
        if hasattr(self._function, "close"):
            self._function.close()

    def _emit(self, method: str, context: Any, *arguments: Any) -> Iterator[Any]:
        for value in _results(self._function, method, *arguments):
            if type(value) is tuple and len(value) == 2 and isinstance(value[0], OutputTag):
                Context(context).output(*value)
            else:
                yield self._made.to_row(value)

    def _take(self, method: str, side: int, value: Any, context: Any) -> Iterator[Any]:
        element = self._given[side].from_row(value)
        return self._emit(method, context, element, Context(context, self._key))

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        return self._emit("on_timer", ctx, time_ms, Context(ctx, self._key))

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        return self._take(self._method, 0, value, ctx)

    def process_element1(self, value: Any, ctx: Any) -> Iterator[Any]:
        return self._take(f"{self._method}1", 0, value, ctx)

    def process_element2(self, value: Any, ctx: Any) -> Iterator[Any]:
        return self._take(f"{self._method}2", 1, value, ctx)

    def process_broadcast_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        return self._take("process_broadcast_element", 1, value, ctx)


class Elements(Border, stream.ProcessFunction):
    """A function over the elements of a stream without a key."""


class Rows(Border, keyed.FlatMapFunction):
    def flat_map(self, value: Any) -> Iterator[Any]:
        return map(self._made.to_row, _results(self._function, self._method, self._given[0].from_row(value)))


class Key(Border, stream.KeySelector):
    def get_key(self, value: Any) -> Any:
        call = getattr(self._function, "get_key", self._function)
        return self._key.encode(call(self._given[0].from_row(value)))


class KeyedElements(Border, keyed.KeyedProcessFunction):
    """A function over the elements of each key."""


class ConnectedElements(Border, stream.CoProcessFunction):
    """A function over two streams without a key."""


class ConnectedKeyedElements(Border, keyed.KeyedCoProcessFunction):
    """A function over two keyed streams."""


class Broadcast(Border, keyed.BroadcastProcessFunction):
    """A function over a stream and a broadcast one."""


class KeyedBroadcast(Border, keyed.KeyedBroadcastProcessFunction):
    """A function over a keyed stream and a broadcast one."""


class WindowBorder(Border, ProcessWindowFunction):
    """A window function; `method` is ``process`` or ``apply``, after ``all_`` for one without a key."""

    def open(self, context: Any) -> None:
        super().open(context)
        # The program asks for states of windows when a window fires; here they are declared in `open`.
        used = self._function.process.__code__.co_names if hasattr(self._function, "process") else ()
        store = context.window_state if "window_state" in used else context.global_state
        for one in vars(self._function).values():
            if isinstance(one, StateDescriptor):
                getattr(store, one.method)(one.own)

    def process(self, key: Any, context: Any, elements: Sequence[Any]) -> Iterator[Any]:
        kind, own = self._method.removeprefix("all_"), Context(context, self._key)
        where: Any = own.window() if kind == "apply" else own
        values = [self._given[0].from_row(one) for one in elements]
        if kind != self._method:
            return self._emit(kind, context, where, values)
        return self._emit(kind, context, self._key.decode(key), where, values)

    def clear(self, context: Any) -> None:
        if hasattr(self._function, "clear"):
            self._function.clear(Context(context, self._key))


class RecordCall:
    """A function of an element, and of more, called with a record: a timestamp assigner, a session's gap."""

    def __init__(self, function: Any, given: TypeInformation) -> None:
        self._function, self._given = function, given

    def __call__(self, record: Any, *more: Any) -> Any:
        return self._function(self._given.from_row(record), *more)
