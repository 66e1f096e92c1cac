"""When a micro-batch that is being ended is interrupted again, and when its process is ended."""

from __future__ import annotations

import pytest

from flinkish_spark.core.config import CancellationConfig
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.protocol.cancellation import CancellationRules, CancellationStep
from flinkish_spark.protocol.limits import UNLIMITED

S = CancellationStep


def test_the_defaults_are_those_of_flink() -> None:
    assert CancellationRules() == CancellationRules(interval_ms=30_000, timeout_ms=180_000)


def test_it_is_interrupted_at_each_interval_and_ended_behind_the_timeout() -> None:
    rules, interrupts, steps = CancellationRules(100, 350), 0, []
    for now_ms in range(0, 401, 50):
        step = rules.step(now_ms, interrupts)
        interrupts += step is S.INTERRUPT
        steps.append((now_ms, step))
    assert [(now_ms, step) for now_ms, step in steps if step is not S.WAIT] == [
        (100, S.INTERRUPT),
        (200, S.INTERRUPT),
        (300, S.INTERRUPT),
        (400, S.END_PROCESS),
    ]


def test_without_a_timeout_it_is_interrupted_for_ever() -> None:
    rules = CancellationRules(100, UNLIMITED)
    assert rules.step(10**12, 7) is S.INTERRUPT


def test_one_that_looks_late_interrupts_once_per_look() -> None:
    assert CancellationRules(100, 10_000).step(1_000, 0) is S.INTERRUPT


@pytest.mark.parametrize(
    "given", [{"interval_ms": 0}, {"interval_ms": 1.5}, {"timeout_ms": 0}, {"timeout_ms": None}]
)
def test_values_that_mean_nothing_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        CancellationConfig(**given)  # type: ignore[arg-type]
