"""A Kafka source one of whose scans shows every barrier one micro-batch after the others.

Spark asks one scan after the other for its offset, so this happens by itself when a checkpoint is
offered in between. In a file of its own, because Spark's Python processes import it again and again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T
from pyspark.sql.datasource import DataSourceStreamReader

from flinkish_spark.connectors.kafka.data_source import FlinkishKafka
from flinkish_spark.connectors.kafka.stream_options import SourceOptions, parse_stream
from flinkish_spark.connectors.kafka.stream_reader import KafkaStreamReader
from flinkish_spark.core.offset_log import OFFSET_KEY
from flinkish_spark.core.stream_readers import adapt_reader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class LateReader(KafkaStreamReader):
    """The scan that is asked first in a start of the job is the late one."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self._is_late: bool | None = None
        self._held = 0

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        if self._is_late is None:
            self._is_late = _is_first(Path(self._options.control_path).with_suffix(".late"))
        end = super().latestOffset(start, limit)
        if self._is_late and end[OFFSET_KEY] not in (start[OFFSET_KEY], self._held):
            self._held = end[OFFSET_KEY]
            return {**end, OFFSET_KEY: start[OFFSET_KEY]}
        return end


class LateKafka(FlinkishKafka):
    """Registered in the place of the source."""

    def streamReader(self, schema: T.StructType) -> DataSourceStreamReader:
        return adapt_reader(LateReader(parse_stream(self.options)))


def register_late(spark: SparkSession) -> None:
    """Let the Python reader of the jobs that start from now on have a late scan."""
    spark.dataSource.register(LateKafka)


def _is_first(claim: Path) -> bool:
    claim.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
