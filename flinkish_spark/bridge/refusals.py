"""Errors of this package inside Spark's errors: their message is printed last, after Spark's plan."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

#: An error of ours that was raised in one of Spark's Python processes.
_OURS = re.compile(r"^flinkish_spark(?:\.\w+)*\.\w+: (.+)$", re.MULTILINE)
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+\s*$")
#: The base classes of Spark's errors in a classic session, and in Spark Connect.
_ROOTS = (
    ("pyspark.errors.exceptions.captured", "CapturedException"),
    ("pyspark.errors.exceptions.connect", "SparkConnectGrpcException"),
)


def say_refusals_last() -> None:
    """Make each of Spark's errors that contains our refusal end with it; may be called repeatedly."""
    for module, name in _ROOTS:
        root = getattr(sys.modules.get(module), name, None)
        if root is not None and not hasattr(root.__str__, "__wrapped__"):
            root.__str__ = _ending(root.__str__)


def _ending(text_of: Callable[[Any], str]) -> Callable[[Any], str]:
    @functools.wraps(text_of)
    def text_that_ends(error: Any) -> str:
        text = text_of(error)
        ours = _OURS.findall(text)
        return f"{text.rstrip()}\n\n{_SQLSTATE.sub('', ours[-1])}" if ours else text

    return text_that_ends
