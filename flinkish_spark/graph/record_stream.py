"""Records of a source on their way to the first keyed operator, and what may happen to them there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.errors import GraphError
from flinkish_spark.graph.frame_transforms import Transform, transformed
from flinkish_spark.graph.lookup_transforms import LookupTransform
from flinkish_spark.graph.partitioning import is_partitioning
from flinkish_spark.graph.python_transforms import RowTransform
from flinkish_spark.graph.row_by_row import Spoiler, read_functions_over
from flinkish_spark.graph.times import time_column
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.keyed_operator import Origins
from flinkish_spark.runtime.time_stage import TimeStage
from flinkish_spark.watermark_strategy import WatermarkStrategy


@dataclass(frozen=True)
class RecordStream:
    """Records of a source: own columns plus channel and sequence; barriers are apart.

    Parameters
    ----------
    source
        Uid of the source.
    barriers
        Control columns of the barriers that belong to the records.
    channels
        On how many channels each barrier comes.
    marked
        Records and barriers in one frame, where the source made them so; a transform cannot keep
        them together, since it would see the barriers.
    has_channels
        Whether the records' channels are those of the source. Behind a transform that chose its own columns
        they are Spark's input partitions, which are others in each micro-batch.
    is_timed
        Whether a strategy of the user's has given the records their times.
    has_kept_times
        Whether there are rows among the records that are times only; see `runtime/kept_times.py`.
    """

    source: str
    records: DataFrame
    origins: Origins
    barriers: DataFrame
    channels: ExpectedChannels
    marked: DataFrame | None = None
    has_channels: bool = True
    is_timed: bool = False
    has_kept_times: bool = False

    @property
    def schema(self) -> T.StructType:
        """Own fields."""
        return T.StructType([f for f in self.records.schema if not f.name.startswith(C.PREFIX)])

    def records_only(self) -> RecordStream:
        """Return the stream without the times of records that were dropped: for what must not see them."""
        if not self.has_kept_times:
            return self
        records = self.records.where(F.col(C.SEQUENCE).isNotNull())
        return replace(self, records=records, has_kept_times=False)


def transform_records(stream: RecordStream, function: Transform) -> RecordStream:
    """Return the stream behind a transform.

    Raises
    ------
    GraphError
        The function returned no DataFrame, or dropped the records' times, or Spark refuses what it does.
    UserFunctionError
        The function raised.
    """
    if stream.is_timed and isinstance(function, RowTransform | LookupTransform):
        kept = replace(stream, records=function.keeping_times()(stream.records), marked=None)
        return replace(kept, has_kept_times=True)
    if is_partitioning(function):
        # What moves rows moves those that are times only, too.
        return replace(stream, records=function(stream.records), marked=None)
    by_row = _keeping_times(stream, function) if stream.is_timed else None
    if by_row is not None:
        return by_row
    stream = stream.records_only()
    records = transformed(stream.records, function)
    lost = {C.TIME, C.MARK} & (set(stream.records.columns) - set(records.columns))
    if lost:
        raise GraphError(
            "a transform dropped the event times of its records",
            why="it chose its own columns behind assign_timestamps_and_watermarks()",
            what_to_do="call assign_timestamps_and_watermarks() behind the transform, or add and drop single "
            "columns in it: withColumn(...), drop(...)",
        )
    if C.CHANNEL in records.columns and C.SEQUENCE in records.columns:
        return replace(stream, records=records, marked=None)
    # The function selected its own columns. A narrow transform keeps rows in their order within
    # Spark's input partition, so position in the partition stands in for the offset.
    placed = with_position(records)
    return replace(stream, records=placed, origins=Origins(), marked=None, has_channels=False)


def _keeping_times(stream: RecordStream, function: Transform) -> RecordStream | None:
    """Return the stream behind a function that looks at each row by itself; None if it does more.

    It sees fields only, so it cannot lose times and places. What it drops leaves its time.
    """
    names = stream.schema.names
    fields = stream.records.select(*[F.col(C.quoted(name)) for name in names])
    _, found = read_functions_over(fields, [function], names)
    if isinstance(found, Spoiler):
        return None
    if found.drops or stream.has_kept_times:
        return replace(stream, records=found.keeping_times(stream.records), marked=None, has_kept_times=True)
    # No row is without fields, so they stay what they are: also those that must not be null.
    return replace(stream, records=found.of_records(stream.records), marked=None)


def with_position(records: DataFrame) -> DataFrame:
    """Add channel and sequence from Spark's input partition and the row's place in it."""
    place = F.monotonically_increasing_id()
    kept = [F.col(C.quoted(name)) for name in records.columns if name not in (C.CHANNEL, C.SEQUENCE)]
    placed = records.select(*kept, place.alias(C.SEQUENCE))
    return placed.select(
        *kept,
        F.shiftright(C.SEQUENCE, 33).alias(C.CHANNEL),
        F.col(C.SEQUENCE).bitwiseAND((1 << 33) - 1).alias(C.SEQUENCE),
    )


def with_times(stream: RecordStream, strategy: WatermarkStrategy) -> RecordStream:
    """Return the stream with an event time beside each record, in milliseconds.

    A column costs nothing. A function of the user's, and a generator of watermarks, take the records through
    Python.

    Raises
    ------
    GraphError
        The times cannot be found.
    """
    stream = replace(stream.records_only(), is_timed=True)
    plain, assigner = stream.records.drop(C.MARK), strategy.timestamps
    function = None if assigner is None or isinstance(assigner, str | Column) else assigner
    if strategy.generator is not None or function is not None:
        timed = plain if function is not None else plain.withColumn(C.TIME, time_column(plain, assigner))
        stage = TimeStage(function, strategy.generator, stream.source, stream.origins)
        return replace(stream, records=C.map_in_arrow(timed, stage, stage.columns(timed.schema)), marked=None)
    column = time_column(plain, assigner)
    records = plain.withColumn(C.TIME, column)
    if stream.marked is None or isinstance(assigner, Column):
        # An expression of the user's must not see barriers, which have no fields.
        return replace(stream, records=records, marked=None)
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    marked = stream.marked.drop(C.MARK).withColumn(C.TIME, F.when(is_record, column))
    return replace(stream, records=records, marked=marked)
