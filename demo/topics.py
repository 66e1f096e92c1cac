"""Reading a whole Kafka topic, and watching one: read_committed, without a group."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection

_PATIENCE_S = 20.0
#: Big fetches: this client spends its time per call, and two cores are shared with the job.
_FETCH = {"fetch_max_bytes": 32 << 20, "max_partition_fetch_bytes": 8 << 20, "max_poll_records": 20_000}


class TopicUnreadable(Exception):
    """Records that must be there did not come."""


def count_partitions(servers: str, topic: str) -> int:
    """Return how many partitions the topic has now; some may have been added."""
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        return admin.partition_counts([topic])[topic]


def consumer_of(servers: str, topic: str, partitions: int) -> KafkaConsumer:
    """Return a consumer at the beginning of all partitions."""
    consumer = KafkaConsumer(
        bootstrap_servers=servers,
        isolation_level="read_committed",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        allow_auto_create_topics=False,
        **_FETCH,
    )
    places = [TopicPartition(topic, number) for number in range(partitions)]
    consumer.assign(places)
    consumer.seek_to_beginning(*places)
    return consumer


def read_topic(servers: str, topic: str, partitions: int) -> Iterator[Any]:
    """Yield every record that a read_committed reader may see now, partition by partition in order.

    Raises
    ------
    TopicUnreadable
        The end was not reached.
    """
    for number in range(partitions):
        yield from _read_partition(servers, TopicPartition(topic, number), partitions)


def _read_partition(servers: str, place: TopicPartition, partitions: int) -> Iterator[Any]:
    consumer = consumer_of(servers, place.topic, partitions)
    try:
        consumer.assign([place])
        consumer.seek_to_beginning(place)
        end = consumer.end_offsets([place])[place]
        last_news = time.monotonic()
        # The position, not the last record: the end of a transaction takes an offset of its own.
        while consumer.position(place) < end:
            records = [r for batch in consumer.poll(timeout_ms=500).values() for r in batch]
            yield from (record for record in records if record.offset < end)
            if records:
                last_news = time.monotonic()
            elif time.monotonic() - last_news > _PATIENCE_S:
                raise TopicUnreadable(
                    f"{place.topic}-{place.partition} ends at {end}, and nothing came after "
                    f"{consumer.position(place)} for {_PATIENCE_S:g} s"
                )
    finally:
        consumer.close()
