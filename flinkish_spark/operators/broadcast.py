"""Keyed and unkeyed operators with a broadcast input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flinkish_spark.core.elements import MIN_WATERMARK_MS, OutputTag, Progress, TimeDomain, Timer, tag_name
from flinkish_spark.core.iterators import USER_ERRORS, elements_of, refuse_not_run
from flinkish_spark.core.validation import check_function
from flinkish_spark.functions.keyed import BroadcastProcessFunction, KeyedBroadcastProcessFunction
from flinkish_spark.operators.context import FunctionContext, NoKeyedState
from flinkish_spark.operators.process import (
    Check,
    ElementError,
    Elements,
    GroupRun,
    KeyedStreamOperator,
    OperatorOutput,
    Sides,
    wrap_with_check,
)
from flinkish_spark.state.descriptors import MapStateDescriptor, StateDescriptor
from flinkish_spark.state.key_group import GroupState
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.layered import Array
from flinkish_spark.state.operator_state import BroadcastState, BroadcastTables, ReadOnlyBroadcastState
from flinkish_spark.state.timers import Timers
from flinkish_spark.types.to_python import copy_if_mutable

#: Takes an element and the context; returns the rows to emit.
ElementProcessor = Callable[[Any, Any], Iterable[Any] | None]
KeyedStateFunction = Callable[[Any, Any], None]


class _NoKey:
    """Placeholder for the current key; using it for a lookup raises."""

    def __hash__(self) -> int:
        raise TypeError(
            "there is no current key while broadcast elements are processed; only the element side has keyed "
            "state and timers; use ctx.apply_to_keyed_state()"
        )

    def __repr__(self) -> str:
        return "<no key>"


NO_KEY = _NoKey()


class ContextFacts:
    """Times of the current micro-batch and element, and its output; base class of the contexts."""

    __slots__ = ("check", "emitted", "processing_time_ms", "timestamp_ms", "watermark_ms")

    def __init__(self) -> None:
        self.emitted = OperatorOutput()
        #: Checks the rows of each call; set only to find the call that emitted a wrong row.
        self.check: Check | None = None
        self.timestamp_ms: int | None = None
        self.watermark_ms, self.processing_time_ms = MIN_WATERMARK_MS, 0

    def timestamp(self) -> int | None:
        return self.timestamp_ms

    def current_watermark(self) -> int:
        return self.watermark_ms

    def current_processing_time(self) -> int:
        return self.processing_time_ms

    def output(self, tag: OutputTag, value: Any) -> None:
        self.emitted.side.setdefault(tag_name(tag), []).append((copy_if_mutable(value), self.timestamp_ms))

    def process_sides(self, process: ElementProcessor, sides: Sides, progress: Progress) -> OperatorOutput:
        """Call a function for the elements before and behind the watermark; return its output."""
        # Rows of an element before the watermark are before it, too: they are not late in the next operator.
        self.emitted = emitted = OperatorOutput()
        self.processing_time_ms = progress.processing_time_ms
        self.watermark_ms = progress.watermark_before_ms
        self.process(process, sides[0], is_before=True)
        emitted.before = len(emitted.rows)
        emitted.side_before = {name: len(rows) for name, rows in emitted.side.items()}
        self.watermark_ms = progress.watermark_ms
        self.process(process, sides[1], is_before=False)
        return emitted

    def process(self, process: ElementProcessor, elements: Elements, *, is_before: bool) -> None:
        if self.check is not None:
            process = wrap_with_check(process, lambda: self.emitted, self.check)
        rows, times = self.emitted.rows, self.emitted.times_ms
        stamps: Iterable[int | None] = elements.times_ms or [None] * len(elements.keys)
        for at, (value, time_ms) in enumerate(zip(elements.values, stamps, strict=True)):
            self.timestamp_ms = time_ms
            try:
                rows.extend(map(copy_if_mutable, elements_of(process(value, self) or ())))
            except USER_ERRORS as error:
                raise ElementError(at, is_before, error) from error
            times.extend([time_ms] * (len(rows) - len(times)))


class BroadcastSideContext(ContextFacts):
    __slots__ = ("_is_declared", "applications", "count", "tables")

    def __init__(self, is_declared: Callable[[StateDescriptor], bool]) -> None:
        super().__init__()
        self.tables: BroadcastTables
        self._is_declared = is_declared
        #: Functions to apply to keyed state, in this order.
        self.applications: list[tuple[StateDescriptor, KeyedStateFunction]] = []
        #: For internal functions applied to keyed state: adds to one of the operator's counters.
        self.count: Callable[..., None]

    def get_broadcast_state(self, descriptor: MapStateDescriptor) -> BroadcastState[Any, Any]:
        return self.tables.writable(descriptor)

    def apply_to_keyed_state(self, descriptor: StateDescriptor, function: KeyedStateFunction) -> None:
        if not self._is_declared(descriptor):
            raise TypeError(f"apply_to_keyed_state() got '{descriptor.name}', which open() did not declare")
        check_function(function, "the function of apply_to_keyed_state()", 2)
        self.applications.append((descriptor, function))


class BroadcastSide:
    """Broadcast side of an operator in a partition; `begin`, `process`, `dump` precede the element side."""

    def __init__(
        self,
        uid: str,
        descriptors: Sequence[MapStateDescriptor],
        process: ElementProcessor,
        is_declared: Callable[[StateDescriptor], bool],
    ) -> None:
        self._uid, self._descriptors, self._process = uid, tuple(descriptors), process
        self.context = BroadcastSideContext(is_declared)
        self._value: bytes | None = None
        self.context.tables = BroadcastTables(uid, self._descriptors, None)

    def begin(self, value: bytes | memoryview | None) -> None:
        self.context.applications = []
        if value != self._value or self.context.tables.is_changed:
            self.context.tables = BroadcastTables(self._uid, self._descriptors, value)
            self._value = None if value is None else bytes(value)

    def dump(self) -> bytes | None:
        """Return the value to store for the partition; None if nothing has changed."""
        tables = self.context.tables
        if not tables.is_changed:
            return None
        # If the next micro-batch begins with this value, the tables need not be read again.
        self._value = tables.dump()
        tables.settle()
        return self._value

    def process(self, sides: Sides, progress: Progress, check: Check | None = None) -> OperatorOutput:
        self.context.check = check
        try:
            return self.context.process_sides(self._process_one, sides, progress)
        except ElementError as failed:
            failed.is_broadcast = True
            raise failed from failed.error

    def _process_one(self, value: Any, context: BroadcastSideContext) -> Iterable[Any]:
        rows = list(map(copy_if_mutable, elements_of(self._process(value, context) or ())))
        context.tables.puts.settle()
        return rows

    def readable(self, descriptor: MapStateDescriptor) -> ReadOnlyBroadcastState[Any, Any]:
        return self.context.tables.readable(descriptor)


class KeyedBroadcastOperator(KeyedStreamOperator):
    """Runs a :class:`~flinkish_spark.functions.keyed.KeyedBroadcastProcessFunction`."""

    def __init__(
        self, function: KeyedBroadcastProcessFunction, descriptors: Sequence[MapStateDescriptor]
    ) -> None:
        self._function, self._descriptors = function, tuple(descriptors)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        self._states = states = states.view_for_function()
        #: The broadcast half; runs once per partition and micro-batch, before the partition's key groups.
        self.side = BroadcastSide(states.uid, self._descriptors, self._process_broadcast, self._is_declared)
        self.side.context.count = context.count
        self._context = context
        context.get_broadcast_state = self.side.readable
        self._function.open(states)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> Iterable[Any] | None:
        return self._function.on_timer(timer.time_ms, self._context)

    def close(self) -> None:
        self._function.close()

    def count_open_items(self, state: str, rows: pa.RecordBatch) -> int | None:
        count_open_items = getattr(self._function, "count_open_items", None)
        return None if count_open_items is None else count_open_items(state, rows)

    def hashes_to_load(self, group: GroupState) -> Array:
        names = {descriptor.name for descriptor, _ in self.side.context.applications}
        found = [group.hashes_of(name) for name in sorted(names)]
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)

    def apply(self, run: GroupRun, progress: Progress) -> None:
        """Apply the functions passed to `apply_to_keyed_state` to the loaded key group."""
        # Called before `GroupRun.run`, also for key groups that have no elements and no timers.
        scope = run.states.scope
        scope.now_ms = progress.processing_time_ms
        for descriptor, function in self.side.context.applications:
            state, table = self._states.any_state(descriptor), self._states.tables[descriptor.name]
            for key in list(table.entries):
                scope.enter(key)
                # Skip expired entries.
                if table.read(scope) is None:
                    continue
                try:
                    call: Callable[..., object] = function
                    refuse_not_run(call(key, state), "the function of apply_to_keyed_state()")
                except USER_ERRORS as error:
                    place = f"state '{descriptor.name}' of the key {key!r}"
                    raise RuntimeError(f"{place}: {type(error).__name__}: {error}") from error
                self._states.puts.settle()

    def process_element(self, value: Any, context: FunctionContext) -> Iterable[Any] | None:
        return self._function.process_element(value, self._context)

    def _process_broadcast(self, value: Any, context: BroadcastSideContext) -> Iterable[Any]:
        self._states.scope.enter(NO_KEY)
        # As a list: a generator would run after the current key has changed.
        rows = self._function.process_broadcast_element(value, context)
        return list(map(copy_if_mutable, elements_of(rows or ())))

    def _is_declared(self, descriptor: StateDescriptor) -> bool:
        return self._states.descriptors.get(descriptor.name) == descriptor


class BroadcastRun:
    """Runs a :class:`~flinkish_spark.functions.keyed.BroadcastProcessFunction` in one partition."""

    def __init__(
        self,
        function: BroadcastProcessFunction,
        descriptors: Sequence[MapStateDescriptor],
        uid: str,
        max_parallelism: int,
    ) -> None:
        self._function = function
        self._context = _ElementContext()
        self.side = BroadcastSide(uid, descriptors, function.process_broadcast_element, lambda _: False)
        self._context.get_broadcast_state = self.side.readable
        function.open(NoKeyedState(uid, max_parallelism))

    def run(
        self,
        value: bytes | None,
        broadcast: Sides,
        elements: Sides,
        progress: Progress,
        check: Check | None = None,
    ) -> tuple[OperatorOutput, bytes | None]:
        self.side.begin(value)
        emitted = self.side.process(broadcast, progress, check)
        stored = self.side.dump()
        self._context.check = check
        later = self._context.process_sides(self._function.process_element, elements, progress)
        return emitted.then(later), stored

    def close(self) -> None:
        self._function.close()


class _ElementContext(ContextFacts):
    __slots__ = ("get_broadcast_state",)
    get_broadcast_state: Callable[[MapStateDescriptor], ReadOnlyBroadcastState[Any, Any]]
