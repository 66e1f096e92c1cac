"""The sinks of a plan, and each one's rows of an evaluated micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.selection import Selection
from flinkish_spark.errors import SchemaError
from flinkish_spark.graph.before_sinks import OnePass
from flinkish_spark.graph.frame_transforms import Transform, transformed
from flinkish_spark.protocol.alignment import Announced, ExpectedChannels
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.usable_types import parts_of
from flinkish_spark.sinks.base import Sink

#: Between the barriers' channels of two parts of a sink; above all channels that are not announced.
_PART_BITS = 48


@dataclass(frozen=True)
class SinkPart:
    """The end of a chain that a sink reads.

    Parameters
    ----------
    stream
        Value of the stream column in the tagged union.
    columns
        Column of the union for each field, in order.
    channels
        Channels whose barriers the sink must see here.
    transforms
        Between the chain's end and the sink; they run on the evaluated micro-batch.
    side
        Which output of the operator at the chain's end it is; None where that has only one.
    one_pass
        What the transforms do, if they look at each row by itself; the functions are not called again then.
    """

    stream: int
    columns: tuple[str, ...]
    fields: tuple[str, ...]
    channels: ExpectedChannels
    transforms: tuple[Transform, ...] = ()
    side: int | None = None
    one_pass: OnePass | None = None

    @property
    def is_apart(self) -> bool:
        """Whether its records are read without its control rows, and these once more."""
        return bool(self.transforms) and self.one_pass is None

    @property
    def place(self) -> tuple[int, int | None]:
        """What tells its rows in the union from others."""
        return self.stream, self.side

    @cached_property
    def is_own(self) -> Column:
        """Whether a row of the union belongs to it; barriers are for the readers of every output."""
        is_own = F.col(C.STREAM) == self.stream
        if self.side is None:
            return is_own
        return is_own & ((F.col(C.KIND) != int(C.Kind.RECORD)) | (F.col(C.SIDE) == self.side))

    @cached_property
    def with_control(self) -> Selection:
        """Control columns, then the fields; behind transforms in one pass what they make of them."""
        if self.one_pass is None:
            return Selection([*map(F.col, C.SINK_CONTROL), *self._own_fields()])
        # Under its name: a map is hashed as JSON, in which that stands.
        named = [(own.alias(field.name), field.dataType) for own, field in self.one_pass.fields]
        hashed = F.xxhash64(*[hashable(own, kind) for own, kind in named])
        is_record = F.col(C.KIND) == int(C.Kind.RECORD)
        own_hash = F.when(is_record, hashed).otherwise(F.col(C.HASH)).alias(C.HASH)
        control = [own_hash if name == C.HASH else F.col(name) for name in C.SINK_CONTROL]
        return Selection([*control, *self.one_pass.named_fields])

    @cached_property
    def records_only(self) -> Selection:
        """The fields."""
        return Selection(self._own_fields())

    def _own_fields(self) -> list[Column]:
        return [F.col(C.quoted(c)).alias(name) for c, name in zip(self.columns, self.fields, strict=True)]


@dataclass(frozen=True)
class PlannedSink:
    """A sink and the parts of the tagged union that belong to it.

    Parameters
    ----------
    schema
        Fields of the sink's records, behind the transforms of each part.
    parts
        One, or for a union several.
    reporters
        How many reporters the plan has: what reports of the next part count from.
    """

    uid: str
    sink: Sink
    schema: T.StructType
    parts: tuple[SinkPart, ...]
    reporters: int = 0

    @property
    def streams(self) -> tuple[int, ...]:
        """Values of the stream column of its parts."""
        return tuple(part.stream for part in self.parts)

    @property
    def channels(self) -> ExpectedChannels:
        """Channels whose barriers this sink must see."""
        if len(self.parts) == 1:
            return self.parts[0].channels
        found: set[int] = set()
        for number, part in enumerate(self.parts):
            # Barriers of unions come from the control source or from operators, which have fixed channels.
            assert not isinstance(part.channels, Announced)
            found |= {_moved(channel, number) for channel in part.channels}
        return frozenset(found)

    @property
    def readings(self) -> int:
        """How often its rows read the micro-batch: each part on its own."""
        return sum(2 if part.is_apart else 1 for part in self.parts)

    @property
    def rows(self) -> tuple[tuple[int, int | None], ...] | None:
        """What tells its rows in the union from those of other sinks; None where it changes them first."""
        if any(part.transforms for part in self.parts):
            return None
        return tuple(part.place for part in self.parts)


def _moved(channel: int, number: int) -> int:
    return channel + (number << _PART_BITS)


def hashable(column: Column, kind: T.DataType) -> Column:
    """Return what stands for a column in a record's hash."""
    # Spark refuses to hash maps, since equal maps may differ in order, and VARIANT.
    has_no_hash = any(isinstance(part, T.MapType | T.VariantType) for part in parts_of(kind))
    return F.to_json(F.struct(column)) if has_no_hash else column


def select_sink_rows(frame: DataFrame, planned: PlannedSink, streams: int) -> DataFrame:
    """Return one sink's rows of an evaluated micro-batch, control columns first.

    Columns: kind, checkpoint, channel, hash, then the sink's fields.
    """
    if len(planned.parts) == 1:
        return _rows_of(frame, planned, planned.parts[0], streams)
    # Each part has barriers, and channels that begin with 0: they are told apart by the part's number.
    kind, channel = F.col(C.KIND), F.col(C.CHANNEL)
    is_barrier, is_report = kind == int(C.Kind.BARRIER), kind >= C.FIRST_REPORT
    found: DataFrame | None = None
    for number, part in enumerate(planned.parts):
        rows = _rows_of(frame, planned, part, streams)
        by = number * planned.reporters
        moved = rows.withColumns(
            {
                C.KIND: F.when(is_report, kind + by).otherwise(kind).cast("int"),
                C.CHANNEL: F.when(is_barrier, channel + _moved(0, number)).otherwise(channel),
            }
        )
        found = moved if found is None else found.union(moved)
    assert found is not None
    return found


def _rows_of(frame: DataFrame, planned: PlannedSink, part: SinkPart, streams: int) -> DataFrame:
    rows = frame if streams == 1 and part.side is None else frame.where(part.is_own)
    if not part.is_apart:
        return part.with_control.of(rows if part.one_pass is None else part.one_pass.over(rows))
    records = part.records_only.of(rows.where(F.col(C.KIND) == int(C.Kind.RECORD)))
    for function in part.transforms:
        records = transformed(records, function)
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
