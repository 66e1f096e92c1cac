"""`spark.read.format("flinkish-kafka")`: a bounded read of topics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from flinkish_spark.drop_in import offset_plan as plan
from flinkish_spark.drop_in.finder import OffsetFinder
from flinkish_spark.drop_in.offset_plan import Range
from flinkish_spark.drop_in.rows import KafkaPiece, read_piece
from flinkish_spark.drop_in.source_options import SourceOptions
from flinkish_spark.kafka.positions import Positions

if TYPE_CHECKING:
    import pyarrow as pa


class KafkaBatchReader(DataSourceReader):
    """Reads from the starting to the ending offsets, as they are when Spark plans the query.

    Parameters
    ----------
    options
        Of the source.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """Return the pieces to read; one empty piece if there is nothing."""
        with Positions(self._options.connection) as positions:
            finder = OffsetFinder(positions, self._options)
            start, end = finder.starting(), finder.ending()
        ranges = [Range(t, p, start.get((t, p), 0), o) for (t, p), o in sorted(end.items())]
        cut = plan.pieces(
            [r for r in ranges if r.size > 0],
            min_partitions=self._options.min_partitions,
            max_per_partition=self._options.max_per_partition,
        )
        # Spark wants at least one piece.
        nothing = Range("", 0, 0, 0)
        return [KafkaPiece(piece, None) for piece in cut or [nothing]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one piece."""
        assert isinstance(partition, KafkaPiece)
        return read_piece(self._options, partition)
