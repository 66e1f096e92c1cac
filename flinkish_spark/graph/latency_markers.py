"""Latency markers in a plan: rows that every micro-batch begins with, beside the records of sources.

They come from no streaming source: a row of `spark.range` in a streaming plan is there in each micro-batch,
asks for none, and stands in no log. `current_timestamp` of such a plan is the time that Spark has logged for
the micro-batch when it decided its offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from flinkish_spark.graph.times import reporters
from flinkish_spark.protocol.latencies import SUBTASK_MASK, place_of
from flinkish_spark.runtime import columns as C

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from flinkish_spark.graph.planned import TaggedStream
    from flinkish_spark.graph.stream_graph import StreamGraph


@dataclass(frozen=True)
class SourceMarkers:
    """Makes the markers of the sources that meet at one place.

    Parameters
    ----------
    sources
        Their numbers among those who report to the driver; at least one.
    """

    spark: SparkSession
    sources: tuple[int, ...]

    def routed(self, routes: Sequence[int]) -> DataFrame:
        """Return a marker per source and subtask of a keyed operator, as they go through the shuffle to it.

        Parameters
        ----------
        routes
            Of barriers, by partition: what takes them comes behind all records of its partition.
        """
        subtask = F.col("id") % len(routes)
        route = F.get(_array(routes), subtask.cast("int"))
        no_block = F.lit("").cast("binary").alias(C.BLOCK)
        rows = self._rows(len(routes))
        return rows.select(route.alias(C.ROUTE), *self._control(len(routes), subtask), no_block)

    def alone(self) -> DataFrame:
        """Return one marker per source for streams without a keyed operator: control columns and no more."""
        return self._rows(1).select(*self._control(1, F.lit(0)))

    def _rows(self, subtasks: int) -> DataFrame:
        return self.spark.range(0, len(self.sources) * subtasks, 1, 1)

    def _control(self, subtasks: int, subtask: Column) -> list[Column]:
        places = _array([place_of(source, 0) for source in self.sources])
        place = F.get(places, F.floor(F.col("id") / subtasks).cast("int")) + subtask
        return [
            F.lit(int(C.Kind.MARKER)).alias(C.KIND),
            F.unix_millis(F.current_timestamp()).alias(C.CHECKPOINT),
            place.cast("long").alias(C.CHANNEL),
            F.lit(0).cast("long").alias(C.SEQUENCE),
        ]


class LatencyMarking:
    """Puts markers into the plan of a job that measures latency."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def of(self, graph: StreamGraph, inputs: Iterable[str]) -> SourceMarkers | None:
        """Return the markers of inputs, by name, that a keyed operator reads; None if there are none."""
        numbers = [one.uid for one in reporters(graph)]
        found = tuple(numbers.index(name) for name in inputs)
        return SourceMarkers(self._spark, found) if found else None

    def beside(self, stream: TaggedStream, graph: StreamGraph, inputs: Iterable[str]) -> TaggedStream:
        """Return the rows of sources on their way to sinks, with markers behind them.

        Behind: of the first partition of a DataFrame Spark writes a file even if it holds no record.
        """
        markers = self.of(graph, inputs)
        if markers is None:
            return stream
        return replace(stream, frame=stream.frame.unionByName(markers.alone(), allowMissingColumns=True))


class NoMarking:
    """Leaves the plan as it is."""

    def of(self, graph: StreamGraph, inputs: Iterable[str]) -> SourceMarkers | None:
        """Return None."""
        return None

    def beside(self, stream: TaggedStream, graph: StreamGraph, inputs: Iterable[str]) -> TaggedStream:
        """Return the stream."""
        return stream


NO_MARKING = NoMarking()


def subtask_in(place: Column) -> Column:
    """Return the subtask of a marker's channel."""
    return place.bitwiseAND(F.lit(SUBTASK_MASK)).cast("int")


def _array(values: Sequence[int]) -> Column:
    return F.array(*map(F.lit, values))
