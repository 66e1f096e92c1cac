"""Windows of keyed streams: which there are, when they fire, what is computed.

`flinkish_spark/operators/window_operator.py` runs them; docs/windows.md explains them.
"""

from flinkish_spark.windows.assigners import (
    DynamicEventTimeSessionWindows,
    DynamicProcessingTimeSessionWindows,
    EventTimeSessionWindows,
    GlobalWindows,
    MergingWindowAssigner,
    NoEventTime,
    ProcessingTimeSessionWindows,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowAssigner,
)
from flinkish_spark.windows.continuous_triggers import (
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
)
from flinkish_spark.windows.evictors import (
    CountEvictor,
    DeltaEvictor,
    Evict,
    Evictor,
    TimeEvictor,
    TimestampedValue,
)
from flinkish_spark.windows.functions import (
    WINDOW_BOUNDS,
    ProcessWindowFunction,
    WindowContext,
    WindowRuntimeContext,
    WithKeyAndWindow,
    WithWindow,
)
from flinkish_spark.windows.spec import (
    AggregateWindow,
    ProcessWindow,
    ReduceWindow,
    WindowComputation,
    WindowSpec,
    count_window,
    sliding_count_window,
)
from flinkish_spark.windows.time_window import GLOBAL_WINDOW, TimeWindow
from flinkish_spark.windows.triggers import (
    CountTrigger,
    EventTimeTrigger,
    NeverTrigger,
    ProcessingTimeTrigger,
    PurgingTrigger,
    Trigger,
    TriggerContext,
    TriggerResult,
)

__all__ = [
    "GLOBAL_WINDOW",
    "WINDOW_BOUNDS",
    "AggregateWindow",
    "ContinuousEventTimeTrigger",
    "ContinuousProcessingTimeTrigger",
    "CountEvictor",
    "CountTrigger",
    "DeltaEvictor",
    "DynamicEventTimeSessionWindows",
    "DynamicProcessingTimeSessionWindows",
    "EventTimeSessionWindows",
    "EventTimeTrigger",
    "Evict",
    "Evictor",
    "GlobalWindows",
    "MergingWindowAssigner",
    "NeverTrigger",
    "NoEventTime",
    "ProcessWindow",
    "ProcessWindowFunction",
    "ProcessingTimeSessionWindows",
    "ProcessingTimeTrigger",
    "PurgingTrigger",
    "ReduceWindow",
    "SlidingEventTimeWindows",
    "SlidingProcessingTimeWindows",
    "TimeEvictor",
    "TimeWindow",
    "TimestampedValue",
    "Trigger",
    "TriggerContext",
    "TriggerResult",
    "TumblingEventTimeWindows",
    "TumblingProcessingTimeWindows",
    "WindowAssigner",
    "WindowComputation",
    "WindowContext",
    "WindowRuntimeContext",
    "WindowSpec",
    "WithKeyAndWindow",
    "WithWindow",
    "count_window",
    "sliding_count_window",
]
