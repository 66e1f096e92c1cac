"""First pass of a task: reads ranges of Kafka partitions and yields records and control rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.connectors.kafka.metadata import clear_missing_times, metadata_arrays, metadata_fields
from flinkish_spark.connectors.kafka.stream_options import SourceOptions
from flinkish_spark.connectors.kafka.stream_reader import KafkaPiece, make_schema, read_range
from flinkish_spark.protocol.ids import Place
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import CONTROL
from flinkish_spark.transport.channels import channel_of
from flinkish_spark.types.arrow_types import arrow_schema, as_schema
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.worker.daemon import freeze_modules

#: Columns of a record, as Spark's own Kafka source has them.
KAFKA_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp")
#: Control columns of an environment's job only, and those of every record.
_CONTROL, _PLACE = CONTROL.fields[:2], CONTROL.fields[2:]


@dataclass(frozen=True)
class ReadRanges:
    """Function for mapInArrow; a repeated task reads the same records."""

    options: SourceOptions
    #: Topics by which partitions are numbered as channels; empty for a pattern.
    topics: tuple[str, ...]
    #: Ending offsets; a partition without one yields nothing. None if no partition ends.
    ends: Mapping[Place, int] | None
    metadata: tuple[str, ...]
    #: Further columns of a record to keep.
    beside: tuple[str, ...] = ()

    @property
    def columns(self) -> T.StructType:
        known = parse_ddl(make_schema(self.options))
        assert isinstance(known, T.StructType)
        own = [known[name] for name in (*KAFKA_COLUMNS, *self.beside)]
        control = _CONTROL if self.options.control_path else []
        return T.StructType([*own, *metadata_fields(self.metadata), *control, *_PLACE])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_modules()
        schema = arrow_schema(self.columns)
        for batch in batches:
            for text in batch.column(C.PIECE).to_pylist():
                piece = KafkaPiece.of(text)
                yield from self._records(piece, schema)
                if piece.rows:
                    yield _control_rows(piece.rows, schema)

    def _records(self, piece: KafkaPiece, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        wanted = piece.range
        if wanted is None:
            return
        if self.ends is not None:
            end = self.ends.get((wanted.topic, wanted.partition), 0)
            wanted = replace(wanted, end=max(wanted.start, min(wanted.end, end)))
        channel = channel_of(self.topics, wanted.topic, wanted.partition)
        for records in read_range(self.options, wanted):
            count = records.num_rows
            own = {name: records.column(name) for name in (*KAFKA_COLUMNS, *self.beside)}
            own["timestamp"] = clear_missing_times(own["timestamp"])
            control = [np.zeros(count, np.int32), np.zeros(count, np.int64)]
            place = [np.full(count, channel, np.int64)]
            added = [pa.array(one) for one in (*(control if self.options.control_path else ()), *place)]
            columns = [
                *own.values(),
                *metadata_arrays(self.metadata, records),
                *added,
                records.column("offset"),
            ]
            yield as_schema(pa.RecordBatch.from_arrays(columns, names=schema.names), schema)


def _control_rows(rows: Sequence[Sequence[int]], schema: pa.Schema) -> pa.RecordBatch:
    """Build rows without a record: barriers, and calls of key groups."""
    control = dict(zip(C.CONTROL, zip(*rows, strict=True), strict=True))
    columns = [
        pa.array(control[field.name], field.type)
        if field.name in control
        else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
