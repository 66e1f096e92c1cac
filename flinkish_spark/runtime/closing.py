"""Closes the functions of an operator when the copy that a task has made of it is given up.

PySpark tells a worker nothing of the end of a task; what it does is to let go of what it has unpickled for
it. A worker that is killed closes nothing.
"""

from __future__ import annotations

import logging
import weakref
from typing import Protocol

from flinkish_spark.forks import in_this_process
from flinkish_spark.user_iterators import USER_ERRORS

_log = logging.getLogger(__name__)


class Closes(Protocol):
    """What a task opens and closes."""

    def close(self) -> None:
        """Close it."""


def close_with(holder: object, operator: object, uid: str) -> None:
    """Close an opened operator as soon as `holder` is gone, or the interpreter ends."""
    # What a function opened is its process's, not that of a child which the function forks.
    weakref.finalize(holder, in_this_process(close_operator), operator, uid)


def close_operator(operator: object, uid: str) -> None:
    """Close an operator's functions; what they raise is logged, since the micro-batch has its results."""
    close = getattr(operator, "close", None) or getattr(getattr(operator, "function", None), "close", None)
    if close is None:
        return
    try:
        close()
    except USER_ERRORS:
        _log.exception("close() of operator '%s' failed", uid)
