"""One transaction for all tasks of a checkpoint; the driver begins it and checks its contents.

These conditions make it safe:

- **A new epoch for every transaction.** InitProducerId comes first, so that producer id and epoch identify
  the transaction, and sequence numbers begin at 0.
- **The driver adds all partitions** before any task runs. Brokers refuse records for any other partition, so
  a task that outlives its transaction can neither write into it nor open another one.
- **One owner for each partition and micro-batch.** Rows are shuffled by their Kafka partition. A task
  continues with the sequence numbers at which the previous micro-batch ended; the driver passes them on.
- **One attempt of each task.** An attempt takes a ticket before it writes. If any other ticket than those of
  the successful attempts was taken, nobody knows which attempt's records the partitions have, and the
  transaction is given up.
- **Counts are compared.** The records acknowledged to the tasks must be those that the leaders have. The
  driver checks it when a micro-batch is staged, and again right before the decision.

Any doubt is an error: the job goes back to its last checkpoint, and the sweep aborts the transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import kafka.errors as kafka_errors

from flinkish_spark.connectors.kafka.client import faults
from flinkish_spark.connectors.kafka.client.batches import sequence_after
from flinkish_spark.connectors.kafka.client.client import KafkaWire
from flinkish_spark.connectors.kafka.client.session import Ticket, TransactionSession
from flinkish_spark.connectors.kafka.client.settings import SharedProducer, StagingSettings
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient, abort_own, why_not_counted
from flinkish_spark.protocol.ids import Place

#: Task number in the transactional id; no Spark partition has a number this high.
SHARED_TASK = 999_999_997


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    task: int
    #: Kafka partition -> number of the task's records that the brokers have acknowledged.
    written: Mapping[Place, int]
    #: Ticket of the attempt; None if it wrote nothing, or if no other attempt can write.
    ticket: Ticket | None


class SharedTransaction:
    """One open transaction, on the driver; after a crash the next owner of the job aborts it."""

    def __init__(self, wire: KafkaWire, settings: StagingSettings, topics: Sequence[str]) -> None:
        self._wire, self._settings = wire, settings
        self._session = TransactionSession(wire, settings)
        self._session.begin()
        # Ask for the partitions now; those added later are not in the transaction.
        self._session.refresh(topics)
        self._next = {topic: [0] * len(self._session.layout(topic).leaders) for topic in topics}
        self._session.join((t, p) for t, known in self._next.items() for p in range(len(known)))

    def use_wire(self, wire: KafkaWire) -> None:
        """Use this connection from now on; each micro-batch borrows another one."""
        self._wire = wire
        self._session.use(wire)

    @property
    def transactional_id(self) -> str:
        return str(self._settings.transactional_id)

    @property
    def partitions(self) -> dict[str, int]:
        return {topic: len(known) for topic, known in self._next.items()}

    def check_partitions(self) -> None:
        """Fail if partitions were added: a task would take a record that names one for a bad record."""
        self._session.refresh(self._next)
        for topic, known in self._next.items():
            now = len(self._session.layout(topic).leaders)
            if now > len(known):
                raise faults.make_staging_error(
                    f"topic {topic} has {now} partitions, and {self.transactional_id} has {len(known)} of it",
                    why="they were added since the checkpoint began, and a record may name one of them",
                    what_to_do="none: the checkpoint is given up, and its micro-batches run again",
                )

    @property
    def next_sequences(self) -> dict[str, tuple[int, ...]]:
        return {topic: tuple(known) for topic, known in self._next.items()}

    @property
    def is_empty(self) -> bool:
        return not any(any(known) for known in self._next.values())

    def producer(self, ticket_prefix: str) -> SharedProducer:
        return SharedProducer(
            self._session.producer_id, self._session.producer_epoch, self.next_sequences, ticket_prefix
        )

    def tickets(self, names: Iterable[str]) -> dict[str, Ticket]:
        """Return the newest ticket under each name that has one."""
        return {
            name: Ticket(view.producer_id, view.producer_epoch)
            for name, view in TransactionClient.from_wire(self._wire).describe(names).items()
            if view.code != kafka_errors.TransactionalIdNotFoundError.errno
        }

    def advance(self, outcomes: Iterable[TaskOutcome]) -> None:
        """Add the records that the tasks of a micro-batch wrote, and check the count at the leaders."""
        for outcome in outcomes:
            for (topic, partition), records in outcome.written.items():
                known = self._next[topic]
                known[partition] = sequence_after(known[partition], records)
        difference = why_not_counted(
            self._wire, self.next_sequences, self._session.producer_id, self._session.producer_epoch
        )
        if difference:
            raise faults.make_staging_error(
                f"{self.transactional_id} does not hold what its tasks have written",
                why=difference,
                what_to_do="none: it is given up, and its micro-batches run again",
            )

    def commit_offsets(self, group: str, offsets: Mapping[Place, int], note: str) -> None:
        self._session.commit_offsets(group, offsets, note)

    def abort(self) -> None:
        """Abort an empty transaction; a sweep aborts it if this fails."""
        abort_own(self._wire, self._session.handle, self._wire.timeout_ms)


def why_other_attempts(
    before: Mapping[str, Ticket], after: Mapping[str, Ticket], given: Mapping[str, Ticket | None]
) -> str:
    """Return why another than the successful attempts may have written; empty if none can have."""
    for name, ticket in given.items():
        is_alone = (
            after.get(name) == before.get(name)
            if ticket is None
            else after.get(name) == ticket and ticket.follows(before.get(name))
        )
        if not is_alone:
            return f"another attempt of its task has a ticket under {name}"
    return ""
