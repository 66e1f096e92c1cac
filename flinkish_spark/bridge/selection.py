"""Selecting the same columns from one micro-batch after the other.

Every micro-batch is a DataFrame of its own, and naming a column of it takes Python several calls into the
JVM: for a sink of ten columns some fifty, a good part of what a small micro-batch costs. The columns
themselves belong to no DataFrame, so they are handed over once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame


class Selection:
    """Columns to select from every DataFrame that has them.

    Parameters
    ----------
    columns
        Unresolved: made by name, not taken from a DataFrame.

    Notes
    -----
    Belongs to one JVM; used by one thread at a time. The same as `frame.select(*columns)`, which is what
    it does where the session has no JVM of its own.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = tuple(columns)
        self._handed_over: Any = None

    def of(self, frame: DataFrame) -> DataFrame:
        """Return the columns of `frame`."""
        own = getattr(frame, "_jdf", None)
        if own is None:
            return frame.select(*self._columns)
        if self._handed_over is None:
            self._handed_over = frame._jcols(*self._columns)  # type: ignore[operator]
        return DataFrame(own.select(self._handed_over), frame.sparkSession)
