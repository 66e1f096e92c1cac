"""The task's side of the source: records of a range as Arrow batches, and the barrier behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from flinkish_spark.drop_in.offset_plan import Range
from flinkish_spark.protocol.records import Barrier
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.worker_gc import freeze_modules

if TYPE_CHECKING:
    import pyarrow as pa

    from flinkish_spark.drop_in.source_options import SourceOptions

#: Columns of Spark's own Kafka source.
SCHEMA = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, "
    "timestamp TIMESTAMP, timestampType INT"
)
HEADERS = ", headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
#: Behind them inside an environment's job.
CONTROL = f", {C.KIND} INT, {C.CHECKPOINT} BIGINT, {C.CHANNEL} BIGINT"


class KafkaPiece(InputPartition):
    """What one task reads.

    Parameters
    ----------
    piece
        The range.
    barrier
        What follows the range, if anything; its channel also says how many there are.
    """

    def __init__(self, piece: Range, barrier: Barrier | None) -> None:
        super().__init__(None)
        self.piece, self.barrier = piece, barrier


def schema_of(options: SourceOptions) -> str:
    """Return the columns of the source."""
    return SCHEMA + HEADERS * options.reader.include_headers + CONTROL * bool(options.control_path)


def read_piece(options: SourceOptions, partition: KafkaPiece) -> Iterator[pa.RecordBatch]:
    """Yield a piece's records, and its barrier as the last row.

    Called in a task, once per attempt; a repeated call yields the same rows.
    """
    from flinkish_spark.kafka.range_reader import OffsetRange, RangeReader

    freeze_modules()
    piece = partition.piece
    if piece.size:
        reader = RangeReader(options.connection, options.reader)
        for batch in reader.read(OffsetRange(piece.topic, piece.partition, piece.start, piece.end)):
            yield _with_control(batch, 0, 0, C.Kind.RECORD) if options.control_path else batch
    if partition.barrier is not None:
        yield _barrier(options, partition.barrier)


def _with_control(batch: pa.RecordBatch, checkpoint: int, channel: int, kind: C.Kind) -> pa.RecordBatch:
    import pyarrow as pa

    for name, value, width in (
        (C.KIND, int(kind), pa.int32()),
        (C.CHECKPOINT, checkpoint, pa.int64()),
        (C.CHANNEL, channel, pa.int64()),
    ):
        batch = batch.append_column(name, pa.repeat(pa.scalar(value, width), batch.num_rows))
    return batch


def _barrier(options: SourceOptions, barrier: Barrier) -> pa.RecordBatch:
    import pyarrow as pa

    from flinkish_spark.kafka.range_reader import record_schema

    columns = record_schema(include_headers=options.reader.include_headers)
    nothing = pa.RecordBatch.from_pylist([{}], schema=columns)
    return _with_control(nothing, int(barrier.checkpoint), barrier.channel, C.Kind.BARRIER)
