"""Functions with a broadcast input, and the states that its elements fill."""

from __future__ import annotations

from dataclasses import dataclass

from flinkish_spark.functions import BroadcastProcessFunction, KeyedBroadcastProcessFunction
from flinkish_spark.operators.broadcast_operators import KeyedBroadcastOperator
from flinkish_spark.runtime.broadcast_runners import UnkeyedBroadcast
from flinkish_spark.state import MapStateDescriptor


@dataclass(frozen=True)
class BroadcastFunctions:
    """Part of the stream graph, so a value.

    Parameters
    ----------
    descriptors
        Of the broadcast states.
    """

    function: KeyedBroadcastProcessFunction | BroadcastProcessFunction
    descriptors: tuple[MapStateDescriptor, ...]

    def create(self) -> KeyedBroadcastOperator | UnkeyedBroadcast:
        """Return what runs in the workers; called at each planning."""
        if isinstance(self.function, KeyedBroadcastProcessFunction):
            return KeyedBroadcastOperator(self.function, self.descriptors)
        return UnkeyedBroadcast(self.function, self.descriptors)
