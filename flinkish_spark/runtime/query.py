"""Starting the one Spark query of a job, with the settings that the protocol depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flinkish_spark.bridge.session import LOCAL_CHECKPOINT_FILES, has_local_checkpoint_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from flinkish_spark.graph.planned import PlannedJob

_STATE = "spark.sql.streaming.stateStore."

#: Set only while the query starts: Spark copies the session's settings then.
REQUIRED_CONF = {
    # State files are named by commits/N, so a rewind is exact and zombie tasks overwrite nothing.
    _STATE + "providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    _STATE + "checkpointFormatVersion": "2",
    _STATE + "rocksdb.changelogCheckpointing.enabled": "true",
    # Spark refuses several keyed operators; what it would protect from does not occur, since no
    # operator of ours uses Spark's watermark. Our own check stands in `graph` and `sources`.
    "spark.sql.streaming.unsupportedOperationCheck": "false",
    "spark.sql.streaming.asyncProgressTrackingEnabled": "false",
    # The coordinator's backlog limits are set against this number.
    "spark.sql.streaming.minBatchesToRetain": "200",
    # A micro-batch is cached for a second or two; compressing it costs more than it saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # An adaptive plan could coalesce the partitions that barriers are routed to.
    "spark.sql.adaptive.enabled": "false",
}
#: Which class writes the query's checkpoint files; a user may have named one.
_FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"


@contextmanager
def query_conf(spark: SparkSession, shuffle_partitions: int) -> Iterator[None]:
    """Set what the query needs, and give the session back as it was."""
    wanted = {**REQUIRED_CONF, "spark.sql.shuffle.partitions": str(shuffle_partitions)}
    if spark.conf.get(_FILE_MANAGER, None) is None and has_local_checkpoint_files(spark):
        wanted[_FILE_MANAGER] = LOCAL_CHECKPOINT_FILES
    before = {name: spark.conf.get(name, None) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


def start_query(
    spark: SparkSession,
    job: PlannedJob,
    writer: Callable[[Any, int], None],
    *,
    name: str,
    checkpoint_location: str,
    trigger: Mapping[str, Any],
) -> StreamingQuery:
    """Start the query; called inside :func:`query_conf`. `trigger` is what DataStreamWriter.trigger takes."""
    stream = job.frame.writeStream.outputMode("append").foreachBatch(writer)
    stream = stream.option("checkpointLocation", checkpoint_location).queryName(name)
    return stream.trigger(**trigger).start()
