"""What the drop-in sink needs of Kafka's transactions; tests bring transactions of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from flinkish_spark.kafka import KafkaCommittable, Liveness, OpenTransaction
from flinkish_spark.protocol.ids import JobUuid, TransactionalId
from flinkish_spark.protocol.micro_batches import StagedPart
from flinkish_spark.protocol.outcomes import CommitAnswer


class Transactions(Protocol):
    """What is needed of `flinkish_spark.kafka.TransactionClient`."""

    def commit(self, committable: KafkaCommittable) -> CommitAnswer:
        """Make a prepared transaction visible."""

    def abort(self, committable: KafkaCommittable) -> CommitAnswer:
        """Drop a prepared transaction."""

    def is_alive(self, committables: Sequence[KafkaCommittable]) -> Mapping[KafkaCommittable, Liveness]:
        """Tell which can still be committed."""

    def list_of_job(self, job: JobUuid) -> list[OpenTransaction]:
        """Return the open transactions of a sink."""

    def abort_open(self, transactional_id: TransactionalId) -> CommitAnswer:
        """Abort whatever is open under an id."""


def handles_of(parts: Sequence[StagedPart]) -> list[KafkaCommittable]:
    """Return the committables of parts that hold rows."""
    return [KafkaCommittable.from_json(part.payload) for part in parts if part.payload is not None]
