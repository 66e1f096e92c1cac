"""Windows of a program: ours, with PyFlink's factories, and classes of the program translated to ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, Self

from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.pyflink.common.typeinfo import TypeInformation
from flinkish_spark.pyflink.datastream.border import Context, RecordCall
from flinkish_spark.pyflink.datastream.border import TimeWindow as TimeWindow
from flinkish_spark.pyflink.datastream.state import StateDescriptor
from flinkish_spark.windows import assigners, time_window, triggers
from flinkish_spark.windows.assigners import CountSlidingWindowAssigner as CountSlidingWindowAssigner
from flinkish_spark.windows.assigners import DynamicEventTimeSessionWindows as DynamicEventTimeSessionWindows
from flinkish_spark.windows.assigners import (
    DynamicProcessingTimeSessionWindows as DynamicProcessingTimeSessionWindows,
)
from flinkish_spark.windows.assigners import EventTimeSessionWindows as EventTimeSessionWindows
from flinkish_spark.windows.assigners import GlobalWindows as GlobalWindows
from flinkish_spark.windows.assigners import ProcessingTimeSessionWindows as ProcessingTimeSessionWindows
from flinkish_spark.windows.assigners import SlidingEventTimeWindows as SlidingEventTimeWindows
from flinkish_spark.windows.assigners import SlidingProcessingTimeWindows as SlidingProcessingTimeWindows
from flinkish_spark.windows.assigners import TumblingEventTimeWindows as TumblingEventTimeWindows
from flinkish_spark.windows.assigners import TumblingProcessingTimeWindows as TumblingProcessingTimeWindows
from flinkish_spark.windows.triggers import ContinuousEventTimeTrigger as ContinuousEventTimeTrigger
from flinkish_spark.windows.triggers import ContinuousProcessingTimeTrigger as ContinuousProcessingTimeTrigger
from flinkish_spark.windows.triggers import CountTrigger as CountTrigger
from flinkish_spark.windows.triggers import EventTimeTrigger as EventTimeTrigger
from flinkish_spark.windows.triggers import NeverTrigger as NeverTrigger
from flinkish_spark.windows.triggers import ProcessingTimeTrigger as ProcessingTimeTrigger
from flinkish_spark.windows.triggers import PurgingTrigger as PurgingTrigger
from flinkish_spark.windows.triggers import Trigger as Trigger
from flinkish_spark.windows.triggers import TriggerContext as TriggerContext
from flinkish_spark.windows.triggers import TriggerResult as TriggerResult

#: Windows by count and global windows have no times; a program mostly names these in hints.
GlobalWindow = CountWindow = TimeWindow


class SessionWindowTimeGapExtractor(ABC):
    """The gap of each element, for `with_dynamic_gap`."""

    @abstractmethod
    def extract(self, element: Any) -> int:
        """Return milliseconds."""


class CountTumblingWindowAssigner(GlobalWindows):
    """Windows of a number of elements of a key, one after the other."""

    def __init__(self, window_size: int) -> None:
        self._window_size = window_size

    @classmethod
    def of(cls, window_size: int) -> Self:
        return cls(window_size)

    def default_trigger(self) -> Trigger:
        return PurgingTrigger(CountTrigger(self._window_size))


class WindowAssigner(ABC):
    """An assigner of the program: it says which windows an element has."""

    @abstractmethod
    def assign_windows(self, element: Any, timestamp: int, context: Any) -> Collection[TimeWindow]:
        """Return the windows of an element."""

    @abstractmethod
    def get_default_trigger(self, env: Any) -> Trigger:
        """Return the trigger of windows for which the program sets none."""

    @abstractmethod
    def is_event_time(self) -> bool:
        """Return whether windows end by event time."""

    def get_window_serializer(self) -> Any:
        """Return None: windows are stored by themselves."""


class MergingWindowAssigner(WindowAssigner):
    """An assigner of the program whose windows may merge; they merge if they overlap or touch."""


class _Assigner(assigners.WindowAssigner):
    def __init__(self, own: WindowAssigner, given: TypeInformation) -> None:
        self._own, self._given = own, given
        self.clock = TimeDomain.EVENT_TIME if own.is_event_time() else TimeDomain.PROCESSING_TIME

    def assign_windows(self, value: Any, timestamp_ms: int | None, processing_time_ms: int) -> Any:
        context = SimpleNamespace(get_current_processing_time=lambda: processing_time_ms)
        made = self._own.assign_windows(self._given.from_row(value), timestamp_ms or 0, context)
        return [time_window.TimeWindow(*one) for one in made]

    def default_trigger(self) -> Trigger:
        return translate_trigger(self._own.get_default_trigger(None), self._given)


class _MergingAssigner(_Assigner, assigners.MergingWindowAssigner):
    pass


class _Trigger(Trigger):
    def __init__(self, own: Trigger, given: TypeInformation) -> None:
        self._own, self._given = own, given

    def states(self) -> Sequence[Any]:
        # A program asks for the states of its trigger by descriptors that it keeps.
        return [one.own for one in vars(self._own).values() if isinstance(one, StateDescriptor)]

    def on_element(self, value: Any, timestamp_ms: int | None, window: Any, ctx: Any) -> TriggerResult:
        element = self._given.from_row(value)
        return self._own.on_element(element, timestamp_ms, *_translate(window, ctx))

    def on_event_time(self, time_ms: int, window: Any, ctx: Any) -> TriggerResult:
        return self._own.on_event_time(time_ms, *_translate(window, ctx))

    def on_processing_time(self, time_ms: int, window: Any, ctx: Any) -> TriggerResult:
        return self._own.on_processing_time(time_ms, *_translate(window, ctx))

    def can_merge(self) -> bool:
        return type(self._own).on_merge is not Trigger.on_merge

    def on_merge(self, window: Any, ctx: Any) -> None:
        self._own.on_merge(*_translate(window, ctx))

    def clear(self, window: Any, ctx: Any) -> None:
        self._own.clear(*_translate(window, ctx))


def _translate(window: Any, ctx: Any) -> tuple[Any, Any]:
    return TimeWindow(*window), Context(ctx)


def translate_trigger(trigger: Trigger, given: TypeInformation) -> Trigger:
    if isinstance(trigger, PurgingTrigger):
        return PurgingTrigger(translate_trigger(trigger._trigger, given))
    is_ours = type(trigger).__module__ == triggers.__name__
    return trigger if is_ours else _Trigger(trigger, given)


def translate_assigner(assigner: Any, given: TypeInformation) -> assigners.WindowAssigner:
    if isinstance(assigner, assigners._DynamicSession):
        return type(assigner)(RecordCall(assigner._gap_ms_of, given))
    if isinstance(assigner, MergingWindowAssigner):
        return _MergingAssigner(assigner, given)
    if isinstance(assigner, WindowAssigner):
        return _Assigner(assigner, given)
    own: assigners.WindowAssigner = assigner
    return own
