"""Operators with two keyed inputs, which share a key's state and timers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flinkish_spark.functions import KeyedCoProcessFunction
from flinkish_spark.operators.elements import TimeDomain, Timer
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator, Processor


class KeyedCoProcessOperator(KeyedStreamOperator):
    """Runs a :class:`~flinkish_spark.functions.KeyedCoProcessFunction`: inputs 0 and 1."""

    def __init__(self, function: KeyedCoProcessFunction) -> None:
        self._function = function

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Open the function."""
        self._context = context
        self._function.open(states.of_function())

    def processors(self) -> tuple[Processor, ...]:
        """Return the function's `process_element1` and `process_element2`."""
        return self._function.process_element1, self._function.process_element2

    def on_timer(self, timer: Timer, domain: TimeDomain) -> Iterable[Any] | None:
        """Call the function's `on_timer`."""
        return self._function.on_timer(timer.time_ms, self._context)

    def close(self) -> None:
        """Close the function."""
        self._function.close()
