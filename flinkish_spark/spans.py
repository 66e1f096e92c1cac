"""Spans: how long each part of a start took, in the log at DEBUG.

    logging.getLogger("flinkish_spark.spans").setLevel(logging.DEBUG)

What the threads of a job wait for (:mod:`flinkish_spark.runtime.watchdog`) is logged by itself when it has
ended; parts of it that nobody waits for are marked with :func:`span`. `make bench-start ARGS=--debug` shows
them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger(__name__)
#: What is shorter is not logged: a coordinator's steps and questions to Spark come many times a second.
LEAST_MS = 10


def ended(what: str, took_ms: int) -> None:
    """Log a span that has ended, unless it was a short one."""
    if took_ms >= LEAST_MS:
        LOG.debug("%6d ms: %s", took_ms, what)


@contextmanager
def span(what: str) -> Iterator[None]:
    """Log how long the block took, also if it raises."""
    began_ns = time.monotonic_ns()
    try:
        yield
    finally:
        ended(what, (time.monotonic_ns() - began_ns) // 1_000_000)
