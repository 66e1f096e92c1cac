"""The protocol by which a Kafka source follows the checkpoints of the job that writes its topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flinkish_spark.connectors.kafka.client.connection import KafkaConnection


class UpstreamJob(Protocol):
    """The part of :class:`flinkish_spark.UpstreamJob` that a source asks."""

    def to_option(self) -> str:
        """Return the option by which the reader in Spark's process knows the job."""

    def check_topics(self, connection: KafkaConnection, topics: Sequence[str]) -> None:
        """Refuse topics at whose barriers no checkpoint can be taken; called by the preflight."""
