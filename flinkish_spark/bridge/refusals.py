"""Refusals of this package within errors of Spark's: their sentence comes last, behind Spark's plan."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

#: An error of ours that was raised in a Python process of Spark's.
_OURS = re.compile(r"^flinkish_spark(?:\.\w+)*\.\w+: (.+)$", re.MULTILINE)
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+\s*$")
#: The roots of Spark's errors of a classic session, and of one of Spark Connect.
_ROOTS = (
    ("pyspark.errors.exceptions.captured", "CapturedException"),
    ("pyspark.errors.exceptions.connect", "SparkConnectGrpcException"),
)


def say_refusals_last() -> None:
    """Let the text of each of Spark's errors end with our refusal, if it holds one; may be repeated."""
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
