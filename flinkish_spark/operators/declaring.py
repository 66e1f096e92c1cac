"""States by their descriptors, where nothing is known of their kind."""

from __future__ import annotations

from typing import Any

from flinkish_spark.operators.keyed_context import KeyedStates
from flinkish_spark.state import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)


def declared_state(states: KeyedStates, descriptor: StateDescriptor) -> Any:
    """Return the state of a descriptor, of whatever kind; declares it if that is not done yet."""
    match descriptor:
        case ValueStateDescriptor():
            return states.get_state(descriptor)
        case ListStateDescriptor():
            return states.get_list_state(descriptor)
        case MapStateDescriptor():
            return states.get_map_state(descriptor)
        case ReducingStateDescriptor():
            return states.get_reducing_state(descriptor)
        case AggregatingStateDescriptor():
            return states.get_aggregating_state(descriptor)
