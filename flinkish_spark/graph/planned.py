"""What a planner makes: streams of records and barriers, and the whole job as one DataFrame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.plan_layout import layout_of
from flinkish_spark.graph.frame_transforms import Transform
from flinkish_spark.graph.sink_rows import PlannedSink, hashable
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.protocol.restoring import OperatorShape
from flinkish_spark.protocol.scans import Chain, PlanLayout
from flinkish_spark.protocol.time_plan import TimePlan
from flinkish_spark.runtime import columns as C

NO_TIME_PLAN = TimePlan()


@dataclass(frozen=True)
class TaggedStream:
    """Output of a keyed operator: records and barriers in one DataFrame, told apart by kind.

    Parameters
    ----------
    schema
        Fields of the records.
    transforms
        Wait for the evaluated micro-batch.
    outputs
        Columns of the frame with the fields of each output, if the operator has side outputs.
    side
        Which of them this stream is.
    """

    frame: DataFrame
    schema: T.StructType
    channels: ExpectedChannels
    transforms: tuple[Transform, ...] = ()
    outputs: tuple[tuple[str, ...], ...] = ()
    side: int = 0

    def alone(self) -> DataFrame:
        """Return control columns and the fields of this output under their names, in its rows only."""
        if not self.outputs:
            return self.frame
        columns = [
            F.col(C.quoted(column)).alias(name)
            for column, name in zip(self.outputs[self.side], self.schema.names, strict=True)
        ]
        times = [C.TIME] if C.TIME in self.frame.columns else []
        is_own = (F.col(C.KIND) != int(C.Kind.RECORD)) | (F.col(C.SIDE) == self.side)
        return self.frame.where(is_own).select(*C.CONTROL, *times, *columns)


@dataclass(frozen=True)
class PlannedJob:
    """What the supervisor starts: one DataFrame and who takes which rows of it.

    Parameters
    ----------
    chains
        What it runs, in the order of the streams.
    operators
        The keyed operators in it by uid.
    time
        Who in it reports about time.
    """

    frame: DataFrame
    sinks: tuple[PlannedSink, ...]
    chains: tuple[Chain, ...] = ()
    operators: Mapping[str, OperatorShape] = field(default_factory=dict)
    time: TimePlan = NO_TIME_PLAN

    def layout(self) -> PlanLayout:
        """Return names for Spark's lists of sources and operators; asks the JVM for every node."""
        return layout_of(self.frame)


def fields_in(stream: TaggedStream) -> list[str]:
    """Return the columns of a stream's frame that hold fields, of all of its outputs."""
    control = {*C.CONTROL, C.SIDE, C.TIME}
    return [name for name in stream.frame.columns if name not in control]


def tag(stream: TaggedStream, index: int) -> DataFrame:
    """Give a stream's columns names of their own in the union, and each record its hash."""
    names = fields_in(stream)
    columns = [F.col(C.quoted(name)) for name in names]
    types = stream.frame.schema
    hashed = F.xxhash64(*[hashable(c, types[n].dataType) for c, n in zip(columns, names, strict=True)])
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    return stream.frame.select(
        C.KIND,
        C.CHECKPOINT,
        C.CHANNEL,
        # The second number of a report; of a barrier nobody reads it.
        F.when(is_record, hashed).otherwise(F.col(C.SEQUENCE)).alias(C.HASH),
        F.lit(index).alias(C.STREAM),
        *([C.SIDE] if stream.outputs else []),
        *[column.alias(f"s{index}_{i}") for i, column in enumerate(columns)],
    )
