"""Kills a test app at the point that its environment names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flinkish_spark.core.steps import Observer, SilentObserver
from flinkish_spark.testing.crash_points import KillAt, KillPoint, kill_process

#: Holds a kill point in its text form.
KILL_AT_VARIABLE = "FLINKISH_KILL_AT"


def observer_from(variables: Mapping[str, str], kill: Callable[[], None] = kill_process) -> Observer:
    """Return the observer that the variable asks for, or one that does nothing."""
    text = variables.get(KILL_AT_VARIABLE, "")
    return KillAt(KillPoint.parse(text), kill) if text else SilentObserver()
