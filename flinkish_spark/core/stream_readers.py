"""Streaming readers in Python that run under Spark 4.1 and 4.2.

From 4.2 on Spark passes the start of the next micro-batch and a read limit to `latestOffset`. 4.1 passes
neither. Once before it asks, it does say where its log ends: it plans the empty range there, for readers that
have to know (`AcceptsLatestSeenOffset` of its `PythonMicroBatchStream`). A query whose log is empty begins at
the reader's initial offset. From then on each micro-batch begins where the one before it ended, which is the
reader's last answer: in 4.1, too, Spark runs a micro-batch to each new end before it asks for another, and
makes a new reader when a query starts.

So readers are written for 4.2, and each of our sources gives Spark the result of :func:`adapt_reader`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from flinkish_spark.core.errors import EnvironmentFault

#: Whether Spark (from 4.2 on) tells readers where a micro-batch begins, how much it may hold, and that the
#: query ends with the data of now. Before, Trigger.AvailableNow is one micro-batch if a source is in Python.
TELLS_READERS = find_spec("pyspark.sql.streaming.datasource") is not None

if TYPE_CHECKING or TELLS_READERS:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
else:

    class ReadLimit:
        """Stand-in for Spark's class under 4.1: the limit of a micro-batch."""

    @dataclass
    class ReadAllAvailable(ReadLimit):
        """Stand-in for Spark's class under 4.1: no limit."""

    @dataclass
    class ReadMaxRows(ReadLimit):
        """Stand-in for Spark's class under 4.1: at most `max_rows` rows."""

        max_rows: int

    class SupportsTriggerAvailableNow:
        """Stand-in for Spark's class under 4.1, which does not use it."""


__all__ = [
    "TELLS_READERS",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "adapt_reader",
]

_WRAPPER = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"


def adapt_reader(reader: DataSourceStreamReader) -> DataSourceStreamReader:
    return reader if TELLS_READERS else PositionedReader(reader)


class PositionedReader(DataSourceStreamReader):
    """Remembers where the next micro-batch begins, for Spark 4.1: see the module's head."""

    def __init__(self, reader: DataSourceStreamReader) -> None:
        self._reader = reader
        self._position: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:
        return self._reader.initialOffset()

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the end of the next micro-batch, which begins where the one before it ended."""
        start = self._reader.initialOffset() if self._position is None else self._position
        limit = getattr(self._reader, "getDefaultReadLimit", ReadAllAvailable)()
        self._position = self._reader.latestOffset(json.loads(json.dumps(start)), limit)
        return self._position

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the pieces of a micro-batch; none of an empty range, which marks the end of the log."""
        if self._position is None:
            self._position = end
        elif start == end and end != self._position:
            raise EnvironmentFault(
                "Spark has asked a source where a micro-batch ends before it said where it begins",
                why=f"{_WRAPPER} is set, and Spark 4.1 restarts no source in Python exactly under "
                "Trigger.AvailableNow with it",
                what_to_do=f"unset {_WRAPPER}, or use Spark 4.2",
            )
        return self._reader.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._reader.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._reader.commit(end)

    def stop(self) -> None:
        self._reader.stop()
