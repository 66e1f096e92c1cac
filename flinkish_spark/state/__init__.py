"""Keyed state that a function declares in `open` and uses while it processes an element or a timer.

State belongs to the current key; it is stored with the checkpoint and comes back after a crash as it
was when the micro-batch of the last kept checkpoint ended.
"""

from flinkish_spark.state.descriptors import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    StateTtl,
    TtlUpdate,
    ValueStateDescriptor,
)
from flinkish_spark.state.states import AggregatingState, ListState, MapState, ReducingState, ValueState

__all__ = [
    "AggregatingState",
    "AggregatingStateDescriptor",
    "ListState",
    "ListStateDescriptor",
    "MapState",
    "MapStateDescriptor",
    "ReducingState",
    "ReducingStateDescriptor",
    "StateDescriptor",
    "StateTtl",
    "TtlUpdate",
    "ValueState",
    "ValueStateDescriptor",
]
