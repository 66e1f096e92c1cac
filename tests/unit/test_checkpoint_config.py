"""What a job may say about its checkpoints, and what of it reaches the rules."""

from __future__ import annotations

import math

import pytest

from flinkish_spark.config import CheckpointConfig, CheckpointingMode
from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.limits import UNLIMITED
from flinkish_spark.protocol.retention import CheckpointRetention
from flinkish_spark.protocol.trigger import FinishedParticipants


@pytest.mark.parametrize(
    "setting", ["interval_ms", "timeout_ms", "restart_budget_ms", "retained", "max_concurrent"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "1", None, True])
def test_what_must_be_positive(setting, value) -> None:
    """Behaviours 8, 71: at least one checkpoint in flight, and one that is kept."""
    with pytest.raises(ConfigError, match=f"{setting} is {value!r}".replace(".", r"\.")) as caught:
        CheckpointConfig(**{setting: value})
    assert caught.value.facts == {"setting": setting, "value": value}
    unit = "milliseconds" in str(caught.value)
    assert unit is setting.endswith("_ms")


@pytest.mark.parametrize("value", [-1, 1.5, "1", True, None])
def test_a_pause_is_none_or_some(value) -> None:
    """Behaviour 7."""
    assert CheckpointConfig(min_pause_ms=0).min_pause_ms == 0
    with pytest.raises(ConfigError, match="min_pause_ms must be"):
        CheckpointConfig(min_pause_ms=value)


@pytest.mark.parametrize("value", [-1, True, math.inf, None])
def test_failures_are_tolerated_up_to_a_number_or_without_limit(value) -> None:
    """Behaviour 47."""
    assert CheckpointConfig(tolerable_failures=0).tolerable_failures == 0
    assert CheckpointConfig(tolerable_failures=UNLIMITED).tolerable_failures is UNLIMITED
    with pytest.raises(ConfigError, match="UNLIMITED"):
        CheckpointConfig(tolerable_failures=value)


@pytest.mark.parametrize("setting", ["retention", "mode", "finished"])
def test_choices_are_values_and_no_words(setting) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is 'EXACTLY_ONCE'"):
        CheckpointConfig(**{setting: "EXACTLY_ONCE"})


def test_the_rules_get_what_they_need() -> None:
    config = CheckpointConfig(
        interval_ms=1,
        timeout_ms=2,
        min_pause_ms=3,
        max_concurrent=4,
        mode=CheckpointingMode.AT_LEAST_ONCE,
        retention=CheckpointRetention.DELETE_ON_CANCELLATION,
        finished=FinishedParticipants.REFUSED,
    )
    rules = config.rules()
    assert (rules.interval_ms, rules.timeout_ms, rules.min_pause_ms, rules.max_concurrent) == (1, 2, 3, 4)
    assert rules.finished is FinishedParticipants.REFUSED
