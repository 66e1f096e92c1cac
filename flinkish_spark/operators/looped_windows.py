"""Windows that a function of the user's folds element by element, in one loop per key group.

What :class:`~flinkish_spark.operators.element_windows.WindowOperator` makes of the most usual windows (each
fires once, at its end), with the same results, calls and order, and without states and timers for each. What
is kept of a window is one row, as of folds over columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.operators.column_windows import (
    ColumnWindows,
    NotOverColumns,
    column_windows_or_why_not,
)
from flinkish_spark.operators.due_table import DUE_FIELDS
from flinkish_spark.operators.elements import OutputTag, TimeDomain
from flinkish_spark.operators.keyed_context import KeyedStates
from flinkish_spark.operators.open_windows import Folding
from flinkish_spark.operators.rich_parts import close_part, open_part
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.window_contents import function_of, part_of
from flinkish_spark.operators.window_results import FIRED
from flinkish_spark.runtime.ddl import ddl_of
from flinkish_spark.state import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from flinkish_spark.windows.functions import ProcessWindowFunction, WithKeyAndWindow, WithWindow
from flinkish_spark.windows.spec import (
    AggregateWindow,
    ProcessWindow,
    ReduceWindow,
    WindowComputation,
    WindowSpec,
)

#: Entries per key and window: when it is due, its place in the order, its accumulator.
OPEN = "window/open"
ORDER_FIELD = "_fs_order"


@dataclass(frozen=True)
class LoopedWindows:
    """Windows and what folds their elements, as a keyed operator; travels in the plan.

    Parameters
    ----------
    late_output
        Where late elements go; None: they are dropped and counted.
    """

    windows: ColumnWindows
    computation: WindowComputation
    element_type: ElementType
    late_output: OutputTag | None = None

    @property
    def clock(self) -> TimeDomain:
        """What the windows go by."""
        return self.windows.clock

    @property
    def contents(self) -> AggregatingStateDescriptor | ReducingStateDescriptor | ListStateDescriptor:
        """An accumulator, as a state has it."""
        computation = self.computation
        if isinstance(computation, AggregateWindow):
            return AggregatingStateDescriptor(OPEN, computation.aggregate, computation.accumulator_type)
        if isinstance(computation, ReduceWindow):
            return ReducingStateDescriptor(OPEN, computation.reduce, self.element_type.ddl)
        return ListStateDescriptor(OPEN, self.element_type.ddl)

    @property
    def bounds(self) -> WithKeyAndWindow | WithWindow | None:
        """What of ours is put around results, if that is all; of classes made of them nobody knows."""
        then = None if isinstance(self.computation, ProcessWindow) else self.computation.then
        if type(then) not in (WithKeyAndWindow, WithWindow):
            return None
        assert isinstance(then, WithKeyAndWindow | WithWindow)
        return then

    @property
    def function(self) -> ProcessWindowFunction | None:
        """What is called for each window, if that is to be done."""
        return None if self.bounds is not None else function_of(self.computation)

    def open(self, states: KeyedStates) -> Folding:
        """Declare the state, open the function that folds, and return what folds with it."""
        open_part(part_of(self.computation), states.uid, states.max_parallelism)
        # Of a program that had retractions.
        states.drop_state(FIRED)
        states.per_namespace(OPEN)
        states.get_state(ValueStateDescriptor(OPEN, self._state_type()))
        if isinstance(self.computation, AggregateWindow):
            return _aggregating(self.computation)
        if isinstance(self.computation, ReduceWindow):
            return _reducing(self.computation, self.element_type)
        return _collecting(self.element_type)

    def close(self) -> None:
        """Close the functions."""
        close_part(part_of(self.computation))
        function = function_of(self.computation)
        if function is not None:
            function.close()

    def _state_type(self) -> str:
        """Return the fields of an entry; those of an accumulator as its state alone would have them."""
        stored = self.contents.stored_type
        own = [T.StructField("value", stored)]
        if isinstance(stored, T.StructType) and len(stored) > 1:
            own = list(stored.fields)
        ours = [T.StructField(name, T.LongType()) for name in (DUE_FIELDS[self.clock], ORDER_FIELD)]
        return ddl_of(T.StructType([*ours, *own]))


def looped_windows(
    spec: WindowSpec, computation: WindowComputation, element_type: ElementType
) -> LoopedWindows | None:
    """Return the operator for windows that need no more than it does; None for others."""
    windows = column_windows_or_why_not(spec)
    if isinstance(windows, NotOverColumns) or spec.allowed_lateness_ms:
        return None
    function = function_of(computation)
    # What is asked for in `open` would be known in a worker only: so it must be that which asks for nothing.
    own_open = None if function is None else getattr(function.open, "__func__", None)
    if function is not None and own_open is not ProcessWindowFunction.open:
        return None
    return LoopedWindows(windows, computation, element_type, spec.late_output)


def _aggregating(computation: AggregateWindow) -> Folding:
    aggregate = computation.aggregate
    create, add = aggregate.create_accumulator, aggregate.add
    # For windows that do not merge it need not have `merge`.
    return Folding(
        begin=lambda value: add(value, create()),
        add=add,
        merge=lambda first, second: aggregate.merge(first, second),
        result=aggregate.get_result,
        elements=_alone,
    )


def _reducing(computation: ReduceWindow, element_type: ElementType) -> Folding:
    given: Any = computation.reduce
    reduce: Callable[[Any, Any], Any] = getattr(given, "reduce", given)
    named = element_type.naming()
    return Folding(
        begin=lambda value: value,
        add=lambda value, before: reduce(named(before), value),
        merge=lambda first, second: reduce(named(first), named(second)),
        result=named,
        elements=_alone,
    )


def _collecting(element_type: ElementType) -> Folding:
    named = element_type.naming()
    return Folding(
        begin=lambda value: [value],
        add=_appended,
        merge=lambda first, second: [*first, *second],
        result=lambda held: list(map(named, held)),
        elements=_all,
    )


def _appended(value: Any, held: list[Any]) -> list[Any]:
    held.append(value)
    return held


def _alone(result: Any) -> Sequence[Any]:
    return (result,)


def _all(result: Sequence[Any]) -> Sequence[Any]:
    return result
