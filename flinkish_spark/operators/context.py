"""Contexts of an operator's functions: times, timers, side outputs; opening and closing of functions."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol

from flinkish_spark.core.elements import LATE_RECORDS_DROPPED, OutputTag, TimeDomain
from flinkish_spark.core.forks import skip_in_children
from flinkish_spark.core.iterators import USER_ERRORS
from flinkish_spark.core.subtask import SubtaskFacts
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.state.descriptors import StateDescriptor
from flinkish_spark.state.tables import KeyScope
from flinkish_spark.state.timers import Timers

_log = logging.getLogger(__name__)


class FunctionContext:
    """Context of `process_element` and `on_timer`; one object, updated for each element and timer."""

    #: Returns a read-only broadcast state; only set in operators with a broadcast side.
    get_broadcast_state: Callable[[Any], Any]

    def __init__(
        self,
        scope: KeyScope,
        timers: Timers,
        emit_to: Callable[[OutputTag, Any, int | None], None],
        emit: Callable[[Iterable[Any], int | None], None],
        count: Callable[..., None],
    ) -> None:
        self._scope, self._timers = scope, timers
        #: Emits rows with a time other than that of the element or timer.
        #: Must not be called from inside a generator that also yields.
        self.emit = emit
        #: The same for a side output: takes tag, row and time.
        self.emit_to = emit_to
        #: Adds to one of the operator's counters: takes its name and an amount, 1 by default.
        self.count = count
        self.timestamp_ms: int | None = None
        self.domain = TimeDomain.EVENT_TIME

    def get_current_key(self) -> Any:
        return self._scope.key

    def timestamp(self) -> int | None:
        return self.timestamp_ms

    def timer_service(self) -> Timers:
        return self._timers

    def time_domain(self) -> TimeDomain:
        return self.domain

    def output(self, tag: OutputTag, value: Any) -> None:
        self.emit_to(tag, value, self.timestamp_ms)


def put_aside(context: FunctionContext, late_output: OutputTag | None, value: Any) -> None:
    """Emit a late element to its side output, or count it if there is none."""
    if late_output is None:
        context.count(LATE_RECORDS_DROPPED)
    else:
        context.output(late_output, value)


def move_timer(timers: Timers, clock: TimeDomain, before_ms: int | None, due_ms: int | None) -> None:
    """Replace a key's timer; None is no timer."""
    register, delete = timers.register_event_time_timer, timers.delete_event_time_timer
    if clock is TimeDomain.PROCESSING_TIME:
        register, delete = timers.register_processing_time_timer, timers.delete_processing_time_timer
    if before_ms is not None and before_ms != due_ms:
        delete(before_ms)
    if due_ms is not None:
        register(due_ms)


class NoKeyedState(SubtaskFacts):
    """Runtime context for `open` of a function on an unkeyed stream."""

    refusal = (
        "operator '{uid}' asks for the state '{name}', but its stream has no key; put key_by() before it "
        "and use a keyed function"
    )

    def __init__(self, uid: str, max_parallelism: int, counts_as: str | None = None) -> None:
        self.uid, self.max_parallelism, self._own_counts_as = uid, max_parallelism, counts_as

    def _counts_as(self) -> str:
        return super()._counts_as() if self._own_counts_as is None else self._own_counts_as

    def drop_state(self, name: str) -> None:
        """Do nothing: there is no such state."""

    def get_state(self, descriptor: StateDescriptor) -> NoReturn:
        raise TypeError(self.refusal.format(uid=self.uid, name=descriptor.name))

    get_list_state = get_map_state = get_reducing_state = get_aggregating_state = get_state


class _NoOwnState(NoKeyedState):
    """Runtime context for `open` of a reduce or aggregate function, whose result is the only state."""

    refusal = (
        "a reduce or aggregate function of operator '{uid}' asks for the state '{name}', but its result is "
        "its only state; use process() with a function that has states"
    )


def open_part(function: object, uid: str, max_parallelism: int) -> None:
    if isinstance(function, RichFunction):
        function.open(_NoOwnState(uid, max_parallelism))


def close_part(function: object) -> None:
    if isinstance(function, RichFunction):
        function.close()


class Closeable(Protocol):
    def close(self) -> None: ...


def close_with(holder: object, operator: object, uid: str) -> None:
    # PySpark does not tell a worker that a task has ended; it only drops the objects that it unpickled. Only
    # the process that opened a function closes it, not a child that the function forks.
    weakref.finalize(holder, skip_in_children(close_operator), operator, uid)


def close_operator(operator: object, uid: str) -> None:
    """Close an operator's functions; log their errors, since the micro-batch already has its results."""
    close = getattr(operator, "close", None) or getattr(getattr(operator, "function", None), "close", None)
    if close is None:
        return
    try:
        close()
    except USER_ERRORS:
        _log.exception("close() of operator '%s' failed", uid)
