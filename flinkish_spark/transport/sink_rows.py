"""Rows in the form that sinks stage, made by the worker that has the rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.core.arrow_pass import Worker
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.key_hash import hash_keys
from flinkish_spark.types.arrow_types import arrow_schema, as_schema

#: Rows of a micro-batch that is evaluated once and read in several passes: batches, each as bytes.
PACKED = f"{C.BLOCK} BINARY"
#: Columns before the fields of a sink's rows.
CONTROL = T.StructType(
    [
        T.StructField(C.KIND, T.IntegerType()),
        *(T.StructField(name, T.LongType()) for name in (C.CHECKPOINT, C.CHANNEL, C.HASH)),
    ]
)


@dataclass(frozen=True)
class ToSinkRows:
    """Selects the rows of one output of a stream and adds a hash to each record. For mapInArrow.

    :func:`~flinkish_spark.planning.sink_rows.tag` computes the same hash.
    """

    #: The fields of the sink, and their columns.
    fields: T.StructType
    names: tuple[str, ...]
    #: Number of the operator's output; None if it has only one.
    side: int | None = None
    #: Numbers of the operator's outputs, if others share its tasks; they select control rows, too.
    sides: frozenset[int] | None = None
    #: Column with the second number of a report; unused for a barrier.
    second: str = C.SEQUENCE
    #: False if a function follows, whose results get the hash.
    has_hash: bool = True

    @property
    def columns(self) -> T.StructType:
        return T.StructType([*CONTROL, *(T.StructField(one.name, one.dataType) for one in self.fields)])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = arrow_schema(self.columns)
        for given in batches:
            is_record = pc.equal(given.column(C.KIND), int(C.Kind.RECORD))
            batch = given if (kept := self._find_kept(given, is_record)) is None else given.filter(kept)
            if not batch.num_rows:
                continue
            kind, checkpoint, channel = (batch.column(one) for one in (C.KIND, C.CHECKPOINT, C.CHANNEL))
            fields = [batch.column(name) for name in self.names]
            hashes = batch.column(self.second)
            if self.has_hash:
                is_other = kind.to_numpy() != int(C.Kind.RECORD)
                made = hash_keys(fields, batch.num_rows)
                if is_other.any():
                    made = np.where(is_other, hashes.fill_null(0).to_numpy(), made)
                hashes = pa.array(made, pa.int64())
            arrays = [kind, checkpoint, channel, hashes, *fields]
            plain = pa.RecordBatch.from_arrays(arrays, names=schema.names)
            yield as_schema(plain, schema)

    def _find_kept(self, batch: pa.RecordBatch, is_record: pa.Array) -> pa.Array | None:
        """Return the mask of the output's rows; None if all rows belong to it."""
        # A record without a sequence is the time of a dropped record; see `worker/time.py`.
        place = batch.column(self.second)
        conditions = [place.is_valid()] if place.null_count and self.second == C.SEQUENCE else []
        if self.side is not None:
            conditions.append(pc.equal(batch.column(C.SIDE), self.side))
        kept = None
        if conditions:
            is_own = conditions[0] if len(conditions) == 1 else pc.and_(*conditions)
            kept = pc.or_(pc.invert(is_record), pc.fill_null(is_own, False))
        if self.sides is not None:
            is_of_stream = pc.is_in(batch.column(C.SIDE), pa.array(sorted(self.sides), pa.int32()))
            kept = is_of_stream if kept is None else pc.and_(kept, is_of_stream)
        return kept


@dataclass(frozen=True)
class SinkFanOut:
    """Makes the rows of each sink, with the sink's number. For mapInArrow, never as the last worker."""

    sinks: tuple[Worker, ...]

    @property
    def columns(self) -> T.StructType:
        return T.StructType([*CONTROL, T.StructField(C.SINK, T.IntegerType())])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for place, sink in enumerate(self.sinks):
                for rows in sink(iter([batch])):
                    places = pa.array(np.full(rows.num_rows, place, np.int32))
                    yield rows.append_column(C.SINK, places)


@dataclass(frozen=True)
class PackBatches:
    """Turns each batch into a row with its bytes. For mapInArrow."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, batch.schema) as stream:
                    stream.write_batch(batch)
                yield pa.record_batch([pa.array([sink.getvalue().to_pybytes()], pa.binary())], [C.BLOCK])


@dataclass(frozen=True)
class UnpackBatches:
    """Restores the batches that :class:`PackBatches` has packed. For mapInArrow."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for packed in batches:
            for one in packed.column(C.BLOCK):
                yield from pa.ipc.open_stream(one.as_buffer())
