"""Writing the barrier records of one checkpoint: a transaction of its own, left open like a task's.

On the driver, after every task of the micro-batch that carries the barrier has flushed and before
the next micro-batch begins. So the offsets of the barrier records lie behind every record of the
checkpoint and before every later one, whatever becomes visible first: a read_committed reader never
passes an open transaction.
"""

from __future__ import annotations

from typing import Any

import kafka.errors as kafka_errors
import pyarrow as pa
from kafka.admin import ConfigResource, ConfigResourceType

from flinkish_spark.clock import Clock, SystemClock
from flinkish_spark.errors import AuthorizationError, InternalError
from flinkish_spark.kafka._wire import KafkaWire
from flinkish_spark.kafka.admin import KafkaAdmin, unknown_topic
from flinkish_spark.kafka.barrier_records import BARRIER_HEADER, BARRIER_KEY, BarrierMark
from flinkish_spark.kafka.options import KafkaConnection
from flinkish_spark.kafka.staging import StagedTransaction
from flinkish_spark.kafka.staging_settings import StagingSettings
from flinkish_spark.kafka.transactions import KafkaCommittable
from flinkish_spark.kafka.wire_pool import WIRES, WirePool
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage

_CLOCK = SystemClock()
_POLICY = "cleanup.policy"


class BarrierWriter:
    """Stages the barrier records of one sink, checkpoint after checkpoint; used by one thread.

    Keeps which barrier it staged last. A crash loses that, which costs readers a longer look ahead
    and nothing else.

    Parameters
    ----------
    connection
        Where Kafka is.
    topic
        The sink's topic.
    job, sink
        Who writes.
    transaction_timeout_ms
        The sink's: the barrier records have to wait as long as its data.
    pool, clock
        Replaceable in tests.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        topic: str,
        job: JobUuid,
        sink: str,
        transaction_timeout_ms: int,
        *,
        pool: WirePool = WIRES,
        clock: Clock = _CLOCK,
    ) -> None:
        self._connection, self._topic = connection, topic
        self._job, self._sink = job, sink
        self._timeout_ms = transaction_timeout_ms
        self._pool, self._clock = pool, clock
        self._previous: CheckpointId | None = None
        with pool.wire(connection) as wire:
            self._key = BARRIER_KEY if is_compacted(wire, topic) else None

    def stage(self, checkpoint: CheckpointId, lineage: Lineage, transactional_id: str) -> KafkaCommittable:
        """Write one barrier record into every partition that the topic has now, and leave it open.

        Parameters
        ----------
        transactional_id
            Of this call alone.

        Raises
        ------
        AuthorizationError, StagingFailed, GraphError
            Kafka refuses, cannot be reached, or does not know the topic any more. Whoever leased
            the transactional id aborts what is open under it.
        """
        partitions = self._partitions()
        mark = BarrierMark(
            self._job, self._sink, checkpoint, lineage, partitions, self._previous, self._clock.wall_ms()
        )
        settings = StagingSettings(
            connection=self._connection,
            transactional_id=transactional_id,
            transaction_timeout_ms=self._timeout_ms,
            default_topic=self._topic,
        )
        with StagedTransaction(settings, pool=self._pool) as transaction:
            transaction.write(
                pa.array([self._key] * partitions, pa.binary()),
                pa.nulls(partitions, pa.binary()),
                ((BARRIER_HEADER, mark.to_header()),),
                partitions=pa.array(range(partitions), pa.int32()),
                timestamps_ms=mark.written_at_ms,
            )
            committable = transaction.prepare()
        if committable is None:
            raise InternalError(f"the topic '{self._topic}' has {partitions} partitions for a barrier")
        self._previous = checkpoint
        return committable

    def _partitions(self) -> int:
        """Ask Kafka now: what is known from before may be older than partitions that have records."""
        with self._pool.wire(self._connection) as wire:
            found = KafkaAdmin.over(wire).topics([self._topic])
        if self._topic not in found:
            raise unknown_topic(self._topic, self._connection.servers, of=f"sink '{self._sink}'")
        return found[self._topic].partitions


def is_compacted(wire: KafkaWire, topic: str) -> bool:
    """Return whether a topic keeps only the newest record of a key, and refuses records without one.

    False where its settings are hidden.
    """

    def read(admin: Any) -> str:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {_POLICY: None})
        try:
            found = admin.describe_configs([resource], config_filter="all")
        except kafka_errors.UnknownTopicOrPartitionError:
            return ""
        return str(found.get("topic", {}).get(topic, {}).get(_POLICY, {}).get("value"))

    try:
        return "compact" in wire.call(f"read the settings of topic {topic}", read)
    except AuthorizationError:
        return False
