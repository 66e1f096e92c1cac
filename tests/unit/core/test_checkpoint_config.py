"""What a job may say about its checkpoints, and what of it reaches the rules."""

from __future__ import annotations

import math
import re

import pytest

from flinkish_spark.core.config import CheckpointConfig, CheckpointingMode
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.protocol.checkpoint import FinishedParticipants
from flinkish_spark.protocol.limits import UNLIMITED
from flinkish_spark.protocol.retention import CheckpointRetention


@pytest.mark.parametrize(
    "setting", ["interval_ms", "timeout_ms", "restart_budget_ms", "retained", "max_concurrent"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, math.inf, "1", None, True, 10**30])
def test_what_must_be_positive(setting, value) -> None:
    """Behaviours 8, 23, 71: checkpoints cannot be switched off, one is in flight at least, one is kept."""
    with pytest.raises(
        ConfigError, match=re.escape(f"{setting} is {value!r} ({type(value).__name__})")
    ) as caught:
        CheckpointConfig(**{setting: value})
    assert caught.value.facts == {"setting": setting, "value": value}
    assert ("milliseconds" in str(caught.value)) is setting.endswith("_ms")
    # A text may be a length of time, and "1" is none: it says no unit.
    is_text = isinstance(value, str) and setting.endswith("_ms")
    wanted = 'or a text like "10 seconds"' if is_text else "a whole number from 1 to"
    assert wanted in caught.value.why and caught.value.what_to_do


@pytest.mark.parametrize(
    ("setting", "most"),
    [
        ("interval_ms", 31_536_000_000),
        ("timeout_ms", 31_536_000_000),
        ("restart_budget_ms", 31_536_000_000),
        ("min_pause_ms", 31_536_000_000),
        ("retained", 1_000_000),
        ("max_concurrent", 100),
    ],
)
def test_every_number_has_a_bound(setting, most) -> None:
    """What no clock can wait for, and no broker hold open, is refused before anything starts."""
    assert getattr(CheckpointConfig(**{setting: most}), setting) == most
    with pytest.raises(ConfigError, match=f"to {most}"):
        CheckpointConfig(**{setting: most + 1})


@pytest.mark.parametrize("value", [-1, 1.5, math.nan, "1", True, None])
def test_a_pause_is_none_or_some(value) -> None:
    """Behaviour 7."""
    assert CheckpointConfig(min_pause_ms=0).min_pause_ms == 0
    with pytest.raises(ConfigError, match="min_pause_ms is"):
        CheckpointConfig(min_pause_ms=value)


@pytest.mark.parametrize("value", [-1, True, math.inf, None])
def test_failures_are_tolerated_up_to_a_number_or_without_limit(value) -> None:
    """Behaviour 47."""
    assert CheckpointConfig(tolerable_failures=0).tolerable_failures == 0
    assert CheckpointConfig(tolerable_failures=UNLIMITED).tolerable_failures is UNLIMITED
    with pytest.raises(ConfigError, match="UNLIMITED"):
        CheckpointConfig(tolerable_failures=value)


@pytest.mark.parametrize("setting", ["retention", "mode", "finished"])
@pytest.mark.parametrize("value", ["EXACTLY_ONCE", None, True])
def test_choices_are_values_and_no_words(setting, value) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is {value!r}.*It must be one of"):
        CheckpointConfig(**{setting: value})


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
