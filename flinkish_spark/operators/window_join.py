"""Joins and co-groups within windows: the window operator over a tagged union of both inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from flinkish_spark.joins.functions import CoGroupFunction, ProcessJoinFunction
from flinkish_spark.joins.kinds import JoinType
from flinkish_spark.joins.window import WindowCoGroup, WindowJoin
from flinkish_spark.operators.element_windows import LATE_RECORDS_DROPPED
from flinkish_spark.operators.elements import OutputTag, TimeDomain, Timer
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator, Processor
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.tagged_union import TaggedUnion
from flinkish_spark.operators.window_operator import window_operator
from flinkish_spark.user_iterators import called, elements_of
from flinkish_spark.windows import ProcessWindow, ProcessWindowFunction, WindowContext, WindowRuntimeContext

#: Where the window operator sends late elements; the two sides have their own.
_LATE = OutputTag("join/late", "side INT")


class WindowCoGroupOperator(KeyedStreamOperator):
    """Runs a co-group or a join within windows: input 0 is the left one, 1 the right one."""

    def __init__(self, join: WindowCoGroup | WindowJoin) -> None:
        self._union = TaggedUnion(ElementType(join.left_type), ElementType(join.right_type))
        self._late = join.left_late, join.right_late
        if isinstance(join, WindowCoGroup):
            function: CoGroupFunction = join.function
        else:
            function = _JoinAll(join.actual_function, join.join_type)
        spec = dataclasses.replace(join.windows, late_output=_LATE)
        self._windows = window_operator(spec, ProcessWindow(_Split(self._union, function)), self._union)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Open the window operator."""
        self._windows.open(states, context, timers)
        self._tagging = self._union.tagging()
        self._contexts = tuple(_LateContext(context, tag) for tag in self._late)

    def processors(self) -> tuple[Processor, ...]:
        """Return what handles an element of the left and of the right input."""
        return self._processor(0), self._processor(1)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        """Let the window operator handle it."""
        self._windows.on_timer(timer, domain)

    def close(self) -> None:
        """Close the function."""
        self._windows.close()

    def _processor(self, at: int) -> Processor:
        tag, process, late = self._tagging[at], self._windows.process_element, self._contexts[at]

        def process_side(value: Any, context: FunctionContext) -> None:
            late.begin(value, context.timestamp_ms)
            process(tag(value), late)  # type: ignore[arg-type]

        return process_side


class _LateContext:
    """What the window operator uses of a context: it knows the element before it was tagged."""

    __slots__ = ("_context", "_tag", "_value", "timestamp_ms")

    def __init__(self, context: FunctionContext, tag: OutputTag | None) -> None:
        self._context, self._tag = context, tag
        self.timestamp_ms: int | None = None

    def begin(self, value: Any, timestamp_ms: int | None) -> None:
        self._value, self.timestamp_ms = value, timestamp_ms

    def output(self, tag: OutputTag, value: Any) -> None:
        if self._tag is None:
            self._context.count(LATE_RECORDS_DROPPED)
        else:
            self._context.output(self._tag, self._value)


class _Split(ProcessWindowFunction):
    """Gives a co-group function its two sides."""

    def __init__(self, union: TaggedUnion, function: CoGroupFunction) -> None:
        self._union, self._function = union, function

    def open(self, context: WindowRuntimeContext) -> None:
        self._function.open(context)

    def process(self, key: Any, context: WindowContext, elements: Sequence[Any]) -> Iterable[Any] | None:
        lefts, rights = self._union.split(elements)
        return self._function.co_group(key, context, lefts, rights)

    def clear(self, context: WindowContext) -> None:
        self._function.clear(context)

    def close(self) -> None:
        self._function.close()


class _JoinAll(CoGroupFunction):
    """Gives a join function each pair of a window."""

    def __init__(self, function: ProcessJoinFunction, join_type: JoinType) -> None:
        self._function, self._type = function, join_type

    def open(self, context: WindowRuntimeContext) -> None:
        self._function.open(context)

    def co_group(
        self, key: Any, context: WindowContext, lefts: Sequence[Any], rights: Sequence[Any]
    ) -> Iterable[Any]:
        pair, join = _WindowPair(context), called(self._function.process_element)
        if not rights:
            lefts, rights = (lefts if self._type.keeps_left else ()), (None,)
        elif not lefts:
            lefts, rights = (None,), (rights if self._type.keeps_right else ())
        for left in lefts:
            for right in rights:
                yield from elements_of(join(left, right, pair) or ())

    def close(self) -> None:
        self._function.close()


class _WindowPair:
    """Given to a join function; the times of single elements are not kept in windows."""

    __slots__ = ("_context", "output")

    def __init__(self, context: WindowContext) -> None:
        self._context, self.output = context, context.output

    def left_timestamp(self) -> None:
        return None

    def right_timestamp(self) -> None:
        return None

    def timestamp(self) -> int:
        return self._context.window.max_timestamp_ms
