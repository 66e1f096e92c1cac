"""Operators as a plan brings them, and what runs each kind of them."""

from __future__ import annotations

from flinkish_spark.operators.broadcast_operators import KeyedBroadcastOperator
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator
from flinkish_spark.operators.looped_windows import LoopedWindows
from flinkish_spark.operators.vectorized import VectorizedProcessFunction
from flinkish_spark.operators.vectorized_windows import WindowFold
from flinkish_spark.runtime.batch_runner import BatchRunner
from flinkish_spark.runtime.broadcast_runners import (
    KeyedBroadcastRunner,
    UnkeyedBroadcast,
    UnkeyedBroadcastRunner,
)
from flinkish_spark.runtime.group_runners import ElementRunner, GroupRunner, RowShape
from flinkish_spark.runtime.list_state_runner import Checkpointed, ListStateRunner
from flinkish_spark.runtime.looped_runner import LoopedRunner
from flinkish_spark.runtime.window_runner import WindowRunner

StatefulOperator = (
    KeyedStreamOperator
    | VectorizedProcessFunction
    | WindowFold
    | LoopedWindows
    | UnkeyedBroadcast
    | Checkpointed
)


def runner_of(operator: StatefulOperator, uid: str, max_parallelism: int, shape: RowShape) -> GroupRunner:
    """Return the opened operator."""
    settings = uid, max_parallelism, shape
    if isinstance(operator, VectorizedProcessFunction):
        return BatchRunner(operator, *settings)
    if isinstance(operator, WindowFold):
        return WindowRunner(operator, *settings)
    if isinstance(operator, LoopedWindows):
        return LoopedRunner(operator, *settings)
    if isinstance(operator, UnkeyedBroadcast):
        return UnkeyedBroadcastRunner(operator, *settings)
    if isinstance(operator, Checkpointed):
        return ListStateRunner(operator, *settings)
    if isinstance(operator, KeyedBroadcastOperator):
        return KeyedBroadcastRunner(operator, *settings)
    return ElementRunner(operator, *settings)
