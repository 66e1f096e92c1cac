"""What an operator does with an element and a timer of the current key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from flinkish_spark.functions import KeyedProcessFunction
from flinkish_spark.operators.elements import TimeDomain, Timer
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers

#: Takes an element and the context; returns what is emitted.
Processor = Callable[[Any, FunctionContext], Iterable[Any] | None]


class KeyedStreamOperator(ABC):
    """One keyed operator, the same for all key groups. It keeps nothing of a key in its own attributes.

    Called by :class:`~flinkish_spark.operators.group_run.GroupRun`, which makes a key the current one
    before each call.
    """

    @abstractmethod
    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Declare state; called once per copy, before anything else."""

    @abstractmethod
    def processors(self) -> tuple[Processor, ...]:
        """Return what handles an element, by input."""

    @abstractmethod
    def on_timer(self, timer: Timer, domain: TimeDomain) -> Iterable[Any] | None:
        """Handle a timer that is due."""

    def close(self) -> None:
        """Give back what `open` made."""


class KeyedProcessOperator(KeyedStreamOperator):
    """Runs a :class:`~flinkish_spark.KeyedProcessFunction`."""

    def __init__(self, function: KeyedProcessFunction) -> None:
        self._function = function

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Open the function."""
        self._context = context
        self._function.open(states.of_function())

    def processors(self) -> tuple[Processor, ...]:
        """Return the function's `process_element`."""
        return (self._function.process_element,)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> Iterable[Any] | None:
        """Call the function's `on_timer`."""
        return self._function.on_timer(timer.time_ms, self._context)

    def close(self) -> None:
        """Close the function."""
        self._function.close()
