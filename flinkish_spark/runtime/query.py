"""Starting the one Spark query of a job, with the settings that the protocol depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flinkish_spark.bridge.session import LOCAL_CHECKPOINT_FILES, has_local_checkpoint_files
from flinkish_spark.bridge.session_settings import SETTINGS, SHUFFLE_PARTITIONS
from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.runtime.micro_batch_time import CHECKPOINT_PROPERTY

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
    # What Spark derives from a value that is made of all columns, as a record's hash is, doubles with each
    # column that is named again: with twenty of them no micro-batch ended. No plan of ours gains by it.
    "spark.sql.constraintPropagation.enabled": "false",
    # An adaptive plan could coalesce the partitions that barriers are routed to.
    "spark.sql.adaptive.enabled": "false",
}
#: Which class writes the query's checkpoint files; a user may have named one.
_FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"


class SettingsChanged(EnvironmentFault):
    """Somebody changed a setting of the session while the query started; the next start has its own."""

    restartable = True


@contextmanager
def query_conf(spark: SparkSession, shuffle_partitions: int) -> Iterator[Mapping[str, str]]:
    """Set what the query needs, and give the session back as it was; yields what was set.

    One query of this process starts at a time. See :mod:`flinkish_spark.bridge.session_settings`.
    """
    wanted = _wanted(spark, shuffle_partitions)
    with SETTINGS.borrowed(spark, wanted):
        yield wanted


def session_of_its_own(spark: SparkSession, shuffle_partitions: int) -> SparkSession:
    """Return a new session with what a query needs, in which Spark reads what a query has written."""
    own = spark.newSession()
    for name, value in _wanted(spark, shuffle_partitions).items():
        own.conf.set(name, value)
    return own


def _wanted(spark: SparkSession, shuffle_partitions: int) -> dict[str, str]:
    wanted = {**REQUIRED_CONF, SHUFFLE_PARTITIONS: str(shuffle_partitions)}
    chosen = SETTINGS.get(spark, _FILE_MANAGER)
    if chosen is None and has_local_checkpoint_files(spark):
        chosen = LOCAL_CHECKPOINT_FILES
    return wanted if chosen is None else {**wanted, _FILE_MANAGER: chosen}


def start_query(
    spark: SparkSession,
    job: PlannedJob,
    writer: Callable[[Any, int], None],
    *,
    name: str,
    checkpoint_location: str,
    trigger: Mapping[str, Any],
    shuffle_partitions: int,
) -> StreamingQuery:
    """Start the query, under the settings that it needs.

    Parameters
    ----------
    name
        Of the query, unless another query of the session has it: then with the location behind it.
    trigger
        What DataStreamWriter.trigger takes.

    Raises
    ------
    SettingsChanged
        Somebody changed a setting of the session in this moment; nothing runs.
    """
    context = spark.sparkContext
    with query_conf(spark, shuffle_partitions) as wanted:
        # The query's thread takes over what is set here, and hands it to every task.
        context.setLocalProperty(CHECKPOINT_PROPERTY, checkpoint_location)
        try:
            stream = job.frame.writeStream.outputMode("append").foreachBatch(writer)
            stream = stream.option("checkpointLocation", checkpoint_location)
            taken = {query.name for query in spark.streams.active}
            stream = stream.queryName(f"{name} ({checkpoint_location})" if name in taken else name)
            query = stream.trigger(**trigger).start()
        finally:
            context.setLocalProperty(CHECKPOINT_PROPERTY, None)  # type: ignore[arg-type]
        changed = SETTINGS.changed(spark, wanted)
    if changed:
        query.stop()
        raise SettingsChanged(
            f"the setting {changed[0]} of the session was changed while the query started",
            why="Spark copies the settings of a session into a query when it starts",
            what_to_do="nothing; the query starts again with the settings that it needs",
            setting=changed[0],
        )
    return query
