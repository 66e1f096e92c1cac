"""The reader of batches of `format("flinkish-kafka")`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from flinkish_spark.connectors.kafka.client.admin import PLANNING_TIMEOUT_MS, KafkaAdmin
from flinkish_spark.connectors.kafka.offset_ranges import Range, split_ranges
from flinkish_spark.connectors.kafka.stream_offsets import OffsetFinder
from flinkish_spark.connectors.kafka.stream_options import SourceOptions
from flinkish_spark.connectors.kafka.stream_reader import KafkaPiece, read_range

if TYPE_CHECKING:
    import pyarrow as pa


class KafkaBatchReader(DataSourceReader):
    """Reads from the starting to the ending offsets, resolved when Spark plans the query."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        with KafkaAdmin(self._options.connection, timeout_ms=PLANNING_TIMEOUT_MS) as admin:
            finder = OffsetFinder(admin, self._options)
            start, end = finder.starting(), finder.ending()
        ranges = [Range(t, p, start.get((t, p), 0), o) for (t, p), o in sorted(end.items())]
        cut = split_ranges(
            [r for r in ranges if r.size > 0],
            min_partitions=self._options.min_partitions,
            max_per_partition=self._options.max_per_partition,
        )
        # Spark needs at least one partition.
        nothing = Range("", 0, 0, 0)
        return [KafkaPiece(piece) for piece in cut or [nothing]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, KafkaPiece)
        assert partition.range is not None
        return read_range(self._options, partition.range)
