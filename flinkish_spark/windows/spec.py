"""The specification of windows: assigner, trigger, allowed lateness and computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from flinkish_spark.core.elements import MAX_WATERMARK_MS, OutputTag, TimeDomain
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import Range, check_arguments, check_fields
from flinkish_spark.core.validation import (
    check_aggregate,
    function_object,
    instance_of,
    reducer,
)
from flinkish_spark.functions.keyed import AggregateFunction, ReduceFunction
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.types.hints import StateType
from flinkish_spark.windows.assigners import GlobalWindows, MergingWindowAssigner, WindowAssigner
from flinkish_spark.windows.evictors import CountEvictor, Evictor
from flinkish_spark.windows.functions import ProcessWindowFunction
from flinkish_spark.windows.time_window import POSITIVE
from flinkish_spark.windows.triggers import CountTrigger, PurgingTrigger, Trigger


@dataclass(frozen=True)
class WindowSpec:
    """Windows of a keyed stream.

    Parameters
    ----------
    assigner
        Chooses the windows of elements.
    trigger
        Fires windows; None: the assigner's default.
    evictor
        Removes elements at each firing. With one, windows store all their elements. None: the assigner's
        default, if any.
    allowed_lateness_ms
        How long after its end (in event time) a window still takes elements. Each of these fires it again.
        No effect for processing time.
    late_output
        Side output of elements that are too late for all their windows; None: they are dropped and counted.
    retraction_field
        Name of a BOOLEAN field after the fields of a result. It is false in a result, and true in a
        retraction of an earlier result, whose window fires again or was merged into another one. None: no
        such field, and no retractions.

    Examples
    --------
    >>> from flinkish_spark.windows import TumblingEventTimeWindows
    >>> WindowSpec(TumblingEventTimeWindows(60_000), allowed_lateness_ms=5_000).allowed_lateness_ms
    5000
    """

    assigner: WindowAssigner
    trigger: Trigger | None = None
    evictor: Evictor | None = None
    allowed_lateness_ms: Annotated[Milliseconds, Range(0, MAX_WATERMARK_MS)] = 0
    late_output: OutputTag | None = None
    retraction_field: str | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            assigner="give windows, as `GlobalWindows()`",
            allowed_lateness_ms="set allowed_lateness_ms to a number of milliseconds, 0 or more",
        )
        what_to_do = "give the assigner a clock, as TimeDomain.EVENT_TIME"
        instance_of("clock", getattr(self.assigner, "clock", None), TimeDomain, what_to_do=what_to_do)
        if self.evictor is None:
            object.__setattr__(self, "evictor", self.assigner.default_evictor())
        if isinstance(self.assigner, MergingWindowAssigner) and not self.actual_trigger.can_merge():
            raise ConfigError(
                f"{type(self.assigner).__name__} cannot have the trigger {type(self.trigger).__name__}",
                why="these windows merge and the trigger says that it cannot take over merged windows",
                what_to_do="give the trigger can_merge() and on_merge(), or use windows that do not merge",
            )

    @property
    def actual_trigger(self) -> Trigger:
        """The trigger, or the assigner's default."""
        return self.assigner.default_trigger() if self.trigger is None else self.trigger


def count_window(count: int) -> WindowSpec:
    """Return windows of `count` elements of a key; an incomplete window at the end is not emitted."""
    return WindowSpec(GlobalWindows(), PurgingTrigger(CountTrigger(count)))


@check_arguments()
def sliding_count_window(count: Annotated[int, POSITIVE], slide: Annotated[int, POSITIVE]) -> WindowSpec:
    """Return windows over the last `count` elements of a key, one every `slide` elements."""
    return WindowSpec(GlobalWindows(), CountTrigger(slide), CountEvictor(count))


@dataclass(frozen=True)
class ReduceWindow:
    """A reduction of elements as they come; a window stores one value.

    Parameters
    ----------
    reduce
        From two elements to one of the same type: an object with `reduce`, or a callable. Associative.
    then
        Makes the result of the reduced value; None: the value is the result.
    """

    reduce: ReduceFunction | Callable[[Any, Any], Any]
    then: ProcessWindowFunction | None = None

    def __post_init__(self) -> None:
        reducer("reduce", self.reduce)
        if self.then is not None:
            function_object("then", self.then, ProcessWindowFunction)


@dataclass(frozen=True)
class AggregateWindow:
    """An aggregation of elements as they come; a window stores one accumulator.

    Parameters
    ----------
    aggregate
        The function. For windows that merge it needs `merge`.
    accumulator_type
        Type of the accumulator, as of a state: one type, or fields for a tuple.
    then
        Makes the result from that of `get_result`, or None. If `get_result` returns None, there is no result.
    """

    aggregate: AggregateFunction
    accumulator_type: StateType
    then: ProcessWindowFunction | None = None

    def __post_init__(self) -> None:
        check_aggregate(self.aggregate)
        if self.then is not None:
            function_object("then", self.then, ProcessWindowFunction)


@dataclass(frozen=True)
class ProcessWindow:
    """A function over all elements, which the window stores until it fires."""

    process: ProcessWindowFunction

    def __post_init__(self) -> None:
        function_object("process", self.process, ProcessWindowFunction)


WindowComputation = ReduceWindow | AggregateWindow | ProcessWindow
