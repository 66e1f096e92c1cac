"""The seed of an operator as a streaming source: all of its state, in the first micro-batch.

The offset is 0 or 1: before and after the state. Spark asks every source before it logs the first
micro-batch of a new checkpoint, so state and first records always come together; a micro-batch that
is run again reads the same files. Later the source never has anything to read; it stays in the plan
only because Spark logs offsets by the order of sources.

Only :func:`load_seed` runs in the user's process; everything else runs in Spark's Python processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from flinkish_spark.core.errors import STATE_MARKER
from flinkish_spark.core.store import SealedObjects
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.stream_readers import adapt_reader
from flinkish_spark.protocol.plan_layout import SEEDED, UNSEEDED
from flinkish_spark.protocol.savepoints import Seed, StateFile
from flinkish_spark.state.savepoint_files import state_in
from flinkish_spark.worker.keyed_operator import OperatorError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


FORMAT_NAME = "flinkish-seed"
_SCHEMA = "key_group INT, value BINARY"
_MOST_BYTES = 1 << 28


class _FilePartition(InputPartition):
    def __init__(self, file: StateFile) -> None:
        super().__init__(file.path)
        self.file = file


class SeedReader(DataSourceStreamReader):
    def __init__(self, folder: str, operator: str, chain: str) -> None:
        self._place = StoreSpec.from_text(folder)
        self._operator, self._chain = operator, chain

    def initialOffset(self) -> dict[str, Any]:
        return dict(UNSEEDED)

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return dict(SEEDED)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return one partition per file in the first micro-batch, none in any other."""
        if start == end:
            return []
        objects = SealedObjects(self._place.open(), "the job directory's seed")
        seed = objects.read("seed.json", "seed", Seed.from_json)
        return [_FilePartition(file) for file in seed.files_of(self._operator, self._chain)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _FilePartition)
        try:
            for batch in state_in(self._place, partition.file):
                yield from _split_large(batch)
        except (OSError, ValueError) as error:
            # The marker tells the driver that no restart will help.
            raise OperatorError(f"{STATE_MARKER} operator '{self._operator}': {error}") from error


def _split_large(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches that Spark's type for bytes, of at most 2 GiB a batch, can hold."""
    schema = pa.schema([("key_group", pa.int32()), ("value", pa.binary())])
    step = batch.num_rows if batch.nbytes < _MOST_BYTES else 1
    for first in range(0, batch.num_rows, max(step, 1)):
        yield batch.slice(first, step).cast(schema)


class SeedSource(DataSource):
    """Registered with the session by :func:`load_seed`; not for users."""

    @classmethod
    def name(cls) -> str:
        return FORMAT_NAME

    def schema(self) -> str:
        return _SCHEMA

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        own = SeedReader(self.options["path"], self.options["operator"], self.options["chain"])
        return adapt_reader(own)


def load_seed(spark: SparkSession, folder: StoreSpec, operator: str, chain: str) -> DataFrame:
    spark.dataSource.register(SeedSource)
    reader = spark.readStream.format(FORMAT_NAME).option("path", folder.to_text())
    return reader.option("operator", operator).option("chain", chain).load()
