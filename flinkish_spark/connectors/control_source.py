"""The control source: a streaming DataSource whose offset *is* the control state.

The coordinator raises the checkpoint id in a small file, and the time keeper raises the watermark there.
Spark asks this source for its latest offset, logs it, and only then runs the micro-batch. So a micro-batch
that runs again carries the same barrier and watermark and calls the same key groups, and an idle stream gets
micro-batches too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from flinkish_spark.checkpoint.control import read_control, to_control_offset
from flinkish_spark.core.stream_readers import adapt_reader
from flinkish_spark.protocol.control_offset import ControlOffset, TimeOffer
from flinkish_spark.transport import columns as C

FORMAT_NAME = "flinkish-control"
_SCHEMA = f"{C.KIND} INT, {C.CHECKPOINT} BIGINT, {C.CHANNEL} BIGINT, {C.SEQUENCE} BIGINT"
#: Kind, checkpoint, channel and sequence.
ControlRow = tuple[int, int, int, int]


def wake_rows(before: TimeOffer, after: TimeOffer) -> list[ControlRow]:
    return [(int(C.Kind.WAKE), 0, number, group) for number, group in after.find_new_wakes(before)]


class _ControlPartition(InputPartition):
    def __init__(self, rows: list[ControlRow]) -> None:
        super().__init__(tuple(rows))
        self.rows = rows


class ControlReader(DataSourceStreamReader):
    """Reads the control file; a checkpoint id that two consecutive offsets skip gets no barrier."""

    def __init__(self, path: str) -> None:
        self._path = path

    def initialOffset(self) -> dict[str, Any]:
        return ControlOffset().to_json()

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        known = ControlOffset.from_json(start)
        raised = known.merge_max(to_control_offset(read_control(self._path)))
        return start if raised == known else raised.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return one partition with the control rows, if there are any; only the newest id gets a barrier."""
        before, after = ControlOffset.from_json(start), ControlOffset.from_json(end)
        rows = wake_rows(before.time, after.time)
        if after.checkpoint > before.checkpoint:
            rows.append((int(C.Kind.BARRIER), after.checkpoint, 0, 0))
        return [_ControlPartition(rows)] if rows else []

    def read(self, partition: InputPartition) -> Iterator[ControlRow]:
        assert isinstance(partition, _ControlPartition)
        yield from partition.rows


class ControlSource(DataSource):
    """The control source as Spark knows it; :func:`load_control` registers it with the session."""

    @classmethod
    def name(cls) -> str:
        return FORMAT_NAME

    def schema(self) -> str:
        return _SCHEMA

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return adapt_reader(ControlReader(self.options["path"]))


def load_control(spark: SparkSession, path: str) -> DataFrame:
    spark.dataSource.register(ControlSource)
    return spark.readStream.format(FORMAT_NAME).option("path", path).load()
