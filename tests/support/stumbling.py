"""An operator whose worker dies in the middle of a step, and a harness that starts again until it is done."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from flinkish_spark.core.elements import TimeDomain, Timer
from flinkish_spark.operators.context import FunctionContext
from flinkish_spark.operators.process import ElementError, KeyedStreamOperator, Processor, TimerError
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.timers import Timers
from flinkish_spark.testing import Output
from tests.support.operator_harness import OperatorHarness


class Stumble(Exception):
    """The worker is gone."""


class Stumbles:
    """How often calls stumble: half as often after each time, so that long steps come to their end."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.begin()

    def begin(self) -> None:
        """Begin another step."""
        self._share = 0.1

    def maybe(self) -> None:
        """Raise Stumble, or do nothing."""
        if self._chance.random() < self._share:
            self._share /= 2
            raise Stumble


class Stumbling(KeyedStreamOperator):
    """An operator that dies in front of or behind an element or a timer, by chance."""

    def __init__(self, operator: KeyedStreamOperator, stumbles: Stumbles) -> None:
        self._operator, self._stumbles = operator, stumbles

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        self._operator.open(states, context, timers)

    def processors(self) -> tuple[Processor, ...]:
        return tuple(map(self._stumbling, self._operator.processors()))

    def on_timer(self, timer: Timer, domain: TimeDomain) -> Iterable[Any] | None:
        return self._stumbling(self._operator.on_timer)(timer, domain)

    def _stumbling(self, call: Callable[..., Iterable[Any] | None]) -> Callable[..., Iterable[Any] | None]:
        def maybe(*given: Any) -> Iterable[Any] | None:
            self._stumbles.maybe()
            result = call(*given)
            rows = None if result is None else list(result)
            self._stumbles.maybe()
            return rows

        return maybe


class Restarting:
    """Does steps until they are done: with the harness as it is, or with a new one from the last snapshot.

    Parameters
    ----------
    operator
        Makes the operator anew.
    harness
        Makes a harness of one; takes `restore` and `bases`, too.
    """

    def __init__(
        self,
        operator: Callable[[], KeyedStreamOperator],
        harness: Callable[..., OperatorHarness],
        chance: random.Random,
    ) -> None:
        self._operator, self._harness, self._chance = operator, harness, chance
        self._stumbles = Stumbles(chance)
        self.harness = self._made()
        self.crashes = 0

    def do(self, step: Callable[[OperatorHarness], None]) -> None:
        """Do a step; whenever it fails, nothing of it must have happened."""
        self._stumbles.begin()
        while True:
            before = self.harness.snapshot()
            try:
                return step(self.harness)
            except (ElementError, TimerError):
                self.crashes += 1
                assert (self.harness.snapshot(), self.harness.take()) == (before, Output())
                if self._chance.random() < 0.5:
                    self.harness = self._made(restore=before, bases=self.harness.bases)

    def _made(self, **restore: Any) -> OperatorHarness:
        return self._harness(Stumbling(self._operator(), self._stumbles), **restore)
