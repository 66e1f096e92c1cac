"""Checks of what windows are told, at the call that tells it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from flinkish_spark.arguments import can_take, refused_as_config_errors, unusable
from flinkish_spark.operators.elements import MAX_WATERMARK_MS
from flinkish_spark.protocol.limits import checked_whole

_T = TypeVar("_T")


def positive_ms(name: str, value: int) -> int:
    """Return a time; raise ConfigError unless it is a positive number of milliseconds."""
    with refused_as_config_errors(f"set {name} to a number of milliseconds, 1 or more"):
        checked_whole(name, value, least=1, most=MAX_WATERMARK_MS)
    return value


def lateness_ms(name: str, value: int) -> int:
    """Return a time; raise ConfigError unless it is a number of milliseconds, 0 or more."""
    with refused_as_config_errors(f"set {name} to a number of milliseconds, 0 or more"):
        checked_whole(name, value, least=0, most=MAX_WATERMARK_MS)
    return value


def offset_ms(name: str, value: int, period_ms: int) -> int:
    """Return an offset; raise ConfigError unless it is nearer to 0 than a period is long."""
    with refused_as_config_errors(f"set {name} to less than the {period_ms} ms after which windows begin"):
        checked_whole(name, value, least=1 - period_ms, most=period_ms - 1)
    return value


def positive_count(name: str, value: int) -> int:
    """Return a count; raise ConfigError unless it is a positive whole number."""
    with refused_as_config_errors(f"set {name} to 1 or more"):
        checked_whole(name, value, least=1, most=MAX_WATERMARK_MS)
    return value


def number(name: str, value: float) -> float:
    """Return a number; raise ConfigError if it is none, or not a number that can be compared."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise unusable(name, value, wanted="a number", what_to_do=f"set {name} to a number, as 0.5")
    return value


def function_of_one(name: str, value: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Return a function of an element; raise ConfigError if it is none."""
    if not can_take(value, 1):
        raise unusable(name, value, wanted="a function of an element", what_to_do="give one, as a lambda")
    return value
