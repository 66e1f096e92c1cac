"""The task's side of the source: records of a range as Arrow batches, and the barrier behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from flinkish_spark.drop_in.offset_plan import Range
from flinkish_spark.drop_in.source_options import BarrierRecordPolicy, SourceOptions
from flinkish_spark.protocol.records import Barrier
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.worker_gc import freeze_modules

if TYPE_CHECKING:
    import pyarrow as pa

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


class WakePiece(InputPartition):
    """Rows that call key groups of a job's operators; a barrier, if there is no partition to bring it.

    Parameters
    ----------
    rows
        Kind, checkpoint, channel, and sequence, which travels in place of a record's offset.
    """

    def __init__(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        super().__init__(None)
        self.rows = tuple(rows)


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
            if options.barrier_records is BarrierRecordPolicy.SKIP:
                batch = _without_barrier_records(options, batch)
            if batch.num_rows:
                yield _with_control(batch, 0, 0, C.Kind.RECORD) if options.control_path else batch
    if partition.barrier is not None:
        yield _barrier(options, partition.barrier)


def read_wakes(options: SourceOptions, partition: WakePiece) -> Iterator[pa.RecordBatch]:
    """Yield the rows that call key groups, without anything of a record. Called in a task."""
    import pyarrow as pa

    kinds, checkpoints, channels, places = zip(*partition.rows, strict=True)
    nothing = _nothing(options, len(partition.rows))
    offsets = nothing.schema.get_field_index("offset")
    rows = nothing.set_column(offsets, nothing.schema.field(offsets), pa.array(places, pa.int64()))
    for name, values, width in (
        (C.KIND, kinds, pa.int32()),
        (C.CHECKPOINT, checkpoints, pa.int64()),
        (C.CHANNEL, channels, pa.int64()),
    ):
        rows = rows.append_column(name, pa.array(values, width))
    yield rows


def _without_barrier_records(options: SourceOptions, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Leave out the barrier records of another job.

    They have no value, and no key or ours; only of records that look so the headers are read, one
    by one, since there are few if any.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from flinkish_spark.kafka.barrier_records import BARRIER_KEY, mark_in
    from flinkish_spark.kafka.range_reader import OffsetRange, RangeReader

    if not batch.column("value").null_count:
        return batch
    keys = batch.column("key")
    is_keyed = pc.fill_null(pc.not_equal(keys, BARRIER_KEY), False)
    candidates = batch.filter(pc.and_not(pc.is_null(batch.column("value")), is_keyed))
    reader = RangeReader(options.connection, replace(options.reader, include_headers=True))
    found = []
    for topic, partition, offset in zip(
        *(candidates.column(n).to_pylist() for n in ("topic", "partition", "offset")), strict=True
    ):
        for one in reader.read(OffsetRange(topic, partition, offset, offset + 1)):
            found += [offset for headers in one.column("headers").to_pylist() if mark_in(headers)]
    if not found:
        return batch
    return batch.filter(pc.invert(pc.is_in(batch.column("offset"), pa.array(found, pa.int64()))))


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
    return _with_control(_nothing(options, 1), int(barrier.checkpoint), barrier.channel, C.Kind.BARRIER)


def _nothing(options: SourceOptions, count: int) -> pa.RecordBatch:
    """Return rows of nulls in place of records."""
    import pyarrow as pa

    from flinkish_spark.kafka.range_reader import record_schema

    columns = record_schema(include_headers=options.reader.include_headers)
    return pa.RecordBatch.from_pylist([{}] * count, schema=columns)
