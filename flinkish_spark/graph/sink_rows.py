"""The sinks of a plan, and each one's rows of an evaluated micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.selection import Selection
from flinkish_spark.errors import SchemaError
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.runtime import columns as C
from flinkish_spark.sinks.base import Sink

Transform = Callable[[DataFrame], DataFrame]


@dataclass(frozen=True)
class PlannedSink:
    """A sink and the part of the tagged union that belongs to it.

    Parameters
    ----------
    stream
        Value of the stream column.
    columns
        Column of the union for each field, in order.
    schema
        Fields of the sink's records, after `transforms`.
    channels
        Channels whose barriers this sink must see.
    side
        Which output of the operator at the stream's end it reads; None where that has only one.
    """

    uid: str
    sink: Sink
    stream: int
    columns: tuple[str, ...]
    fields: tuple[str, ...]
    schema: T.StructType
    channels: ExpectedChannels
    transforms: tuple[Transform, ...]
    side: int | None = None

    @property
    def rows(self) -> tuple[int, int | None]:
        """What tells its rows in the union from those of other sinks."""
        return self.stream, self.side

    @cached_property
    def is_own(self) -> Column:
        """Whether a row of the union is for this sink; barriers are for the readers of every output."""
        is_own = F.col(C.STREAM) == self.stream
        if self.side is None:
            return is_own
        return is_own & ((F.col(C.KIND) != int(C.Kind.RECORD)) | (F.col(C.SIDE) == self.side))

    @cached_property
    def with_control(self) -> Selection:
        """Control columns, then the fields."""
        return Selection([*map(F.col, C.SINK_CONTROL), *self._own_fields()])

    @cached_property
    def records_only(self) -> Selection:
        """The fields."""
        return Selection(self._own_fields())

    def _own_fields(self) -> list[Column]:
        return [F.col(c).alias(name) for c, name in zip(self.columns, self.fields, strict=True)]


def hashable(column: Column, kind: T.DataType) -> Column:
    """Return what stands for a column in a record's hash."""
    # Spark refuses to hash maps, since equal maps may differ in order.
    return F.to_json(F.struct(column)) if "map<" in kind.simpleString() else column


def select_sink_rows(frame: DataFrame, planned: PlannedSink, streams: int) -> DataFrame:
    """Return one sink's rows of an evaluated micro-batch, control columns first.

    Columns: kind, checkpoint, channel, hash, then the sink's fields.
    """
    rows = frame if streams == 1 and planned.side is None else frame.where(planned.is_own)
    if not planned.transforms:
        return planned.with_control.of(rows)
    records = planned.records_only.of(rows.where(F.col(C.KIND) == int(C.Kind.RECORD)))
    for function in planned.transforms:
        records = function(records)
    if [(f.name, f.dataType) for f in records.schema] != [(f.name, f.dataType) for f in planned.schema]:
        raise SchemaError(f"the transform before sink '{planned.uid}' changed its columns while running")
    names = [F.col(C.quoted(n)) for n in records.columns]
    hashed = F.xxhash64(*[hashable(c, f.dataType) for c, f in zip(names, records.schema, strict=True)])
    tagged = records.select(
        F.lit(int(C.Kind.RECORD)).alias(C.KIND),
        F.lit(0).cast("long").alias(C.CHECKPOINT),
        F.lit(0).cast("long").alias(C.CHANNEL),
        hashed.alias(C.HASH),
        *names,
    )
    # Barriers, and reports about time.
    control = rows.where(F.col(C.KIND) != int(C.Kind.RECORD)).select(*C.SINK_CONTROL)
    return tagged.unionByName(control, allowMissingColumns=True)
