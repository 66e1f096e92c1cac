"""What the product's modules get in place of Spark while a simulation runs.

Only what has no seam of its own: everything else is passed in. Undone when the context ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from unittest import mock

from flinkish_spark.checkpoint import coordinator
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.job import supervisor
from flinkish_spark.planning import sink_rows
from tests.simulation.frames import select_rows


class SurprisingError(Exception):
    """The product raised something that no failure of its surroundings explains."""


def _classified(error: BaseException, place: str = "") -> FlinkishError:
    """Stand in for `failures.classify`: no Spark is here to raise what is not typed."""
    if isinstance(error, FlinkishError):
        return error
    raise SurprisingError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def simulated_surroundings() -> Iterator[None]:
    """Let the product run without Spark; its log is silent unless somebody listens to it."""
    logger = logging.getLogger("flinkish_spark")
    silent, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(silent)
    logger.propagate = False
    try:
        with (
            # The proportions to the retained micro-batches are the product's: 40, 80 and 200.
            mock.patch.object(coordinator, "BACKLOG_TRIGGER", 4),
            mock.patch.object(coordinator, "BACKLOG_LIMIT", 8),
            mock.patch.object(sink_rows, "select_sink_rows", select_rows),
            mock.patch.object(supervisor, "classify", _classified),
        ):
            yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(silent)
