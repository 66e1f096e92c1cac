"""The writer of an atomic Kafka sink: one transaction holds all micro-batches of a checkpoint.

The rules of the transaction are in :mod:`flinkish_spark.connectors.kafka.client.shared_transaction`. This
module assigns partitions to tasks, begins and continues the transaction, and adds the sources' offsets to it:

- A transaction begins with the first micro-batch after a barrier and continues up to the micro-batch with the
  next barrier. The barrier of a checkpoint that an earlier owner of the job began and gave up is ignored.
- If a micro-batch raises, the sweep aborts its transaction, because nobody knows how much was written.
- A new start of the query never continues it (:attr:`.Committer.shows_whole`): tasks of the old start may
  still be writing.
- An empty transaction is aborted at once: it would hold readers back, and it has no record by which its
  outcome could be found out later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import arrow_udf

from flinkish_spark.connectors.kafka.client import faults
from flinkish_spark.connectors.kafka.client.admin import VERIFICATION, KafkaAdmin
from flinkish_spark.connectors.kafka.client.admission import partitions_for_keys
from flinkish_spark.connectors.kafka.client.client import WIRES, KafkaWire
from flinkish_spark.connectors.kafka.client.session import Ticket
from flinkish_spark.connectors.kafka.client.settings import StagingSettings
from flinkish_spark.connectors.kafka.client.shared_transaction import (
    SHARED_TASK,
    SharedTransaction,
    TaskOutcome,
    why_other_attempts,
)
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable
from flinkish_spark.connectors.kafka.record_encoder import KEY, PARTITION, TOPIC
from flinkish_spark.connectors.kafka.sink_settings import KafkaSinkSettings
from flinkish_spark.connectors.kafka.writer import KafkaSinkCommittable, KafkaWriter, make_ticket_name
from flinkish_spark.contracts.sink import SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.core.config import CheckpointingMode
from flinkish_spark.core.errors import AuthorizationError, ConfigError
from flinkish_spark.protocol.ids import CheckpointId, TransactionalId
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.routing import spark_hash_int


def check_atomic(sink: KafkaSinkSettings, spark: SparkSession, wire: KafkaWire, context: SinkContext) -> None:
    uid = context.uid

    def make_refusal(problem: str, way_out: str) -> ConfigError:
        return ConfigError(
            f"the sink '{uid}' is atomic, and {problem}", what_to_do=f"{way_out}, or leave atomic out"
        )

    if context.checkpoint.mode is CheckpointingMode.AT_LEAST_ONCE:
        # Records of a checkpoint can arrive after the end of its transaction, and then it is given up.
        problem = "the job's checkpoints have CheckpointingMode.AT_LEAST_ONCE, in which records can come late"
        raise make_refusal(problem, "use CheckpointingMode.EXACTLY_ONCE")
    if str(spark.conf.get("spark.speculation", "false")).lower() == "true":
        problem = "spark.speculation is on: a copy of a task would write the same partitions"
        raise make_refusal(problem, "set spark.speculation=false")
    if not wire.verifies_partitions():
        # Such brokers may accept records of a task after the end of its transaction.
        problem = "its brokers are older than Kafka 3.7, or not Apache Kafka"
        raise make_refusal(problem, "use Kafka 3.7 or later")
    if unverified := KafkaAdmin.from_wire(wire).brokers_that_verify_no_partitions():
        problem = (
            f"{VERIFICATION}=false at the broker {unverified[0]}, which takes records after a transaction"
        )
        raise make_refusal(problem, f"set {VERIFICATION}=true, Kafka's default")
    for topic in sink.topics:
        try:
            wire.last_sequences([(topic, 0)], 0, 0)
        except AuthorizationError as denied:
            raise AuthorizationError(
                f"Kafka refuses this principal READ on the topic '{topic}' of the atomic sink '{uid}'",
                why="before a checkpoint is decided the sink checks its transaction with DescribeProducers",
                what_to_do="add an ACL that allows READ on it, or leave atomic out",
                topic=topic,
            ) from denied


@dataclass(frozen=True)
class Owners:
    """Assignment of Kafka partitions to tasks; exactly one task writes each partition."""

    partitions: Mapping[str, int]
    #: Topic of records that name none.
    default_topic: str
    most_tasks: int

    @property
    def tasks(self) -> int:
        """Number of tasks; at most the number of partitions, since each partition has one owner."""
        return max(1, min(self.most_tasks, max(self.partitions.values())))

    def assign(self, rows: DataFrame) -> DataFrame:
        """Add each row's target partition and shuffle the rows to the tasks that own the partitions."""
        named = F.col(PARTITION) if PARTITION in rows.columns else F.lit(None).cast("int")
        destination = _destination(dict(self.partitions), self.default_topic)
        placed = rows.withColumn(PARTITION, destination(F.col(KEY), F.col(TOPIC), named, F.col(C.HASH)))
        routes = F.array(*map(F.lit, self._routes()))
        route = F.element_at(routes, F.pmod(F.col(PARTITION), F.lit(self.tasks)) + 1)
        return placed.repartition(self.tasks, route)

    def _routes(self) -> list[int]:
        """Find for each task an integer whose Spark hash sends a row to that task."""
        found: dict[int, int] = {}
        candidate = 0
        while len(found) < self.tasks:
            found.setdefault(spark_hash_int(candidate) % self.tasks, candidate)
            candidate += 1
        return [found[task] for task in range(self.tasks)]


def _destination(partitions: Mapping[str, int], default_topic: str) -> Any:
    """Return a column function that chooses a record's partition, the same in every attempt."""

    def destination(keys: pa.Array, topics: pa.Array, named: pa.Array, hashes: pa.Array) -> pa.Array:
        # Keep a partition that does not exist: the writer refuses the record.
        result = named.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
        undecided = named.is_null().to_numpy(zero_copy_only=False)
        spread = hashes.fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64)
        coded = topics.fill_null(default_topic).dictionary_encode()
        codes = coded.indices.to_numpy(zero_copy_only=False)
        for code, topic in enumerate(coded.dictionary.to_pylist()):
            # Any partition will do for an undeclared topic: the writer refuses the record.
            count = partitions.get(topic, 1)
            at = np.flatnonzero(undecided & (codes == code))
            if len(at):
                chosen = partitions_for_keys(keys.take(pa.array(at)), count)
                keyless = chosen < 0
                chosen[keyless] = (spread[at][keyless] % np.uint64(count)).astype(np.int32)
                result[at] = chosen
        return pa.array(result, pa.int32())

    # PySpark warns if the function type is given explicitly, so it infers it from the type hints.
    made: Any = arrow_udf(destination, "int")  # type: ignore[call-overload]
    return made


class AtomicWriter(SinkWriter):
    def __init__(self, sink: KafkaSinkSettings, context: SinkContext, tasks: KafkaWriter) -> None:
        self._sink, self._context, self._tasks = sink, context, tasks
        self._open: SharedTransaction | None = None

    def stage(self, request: StageRequest) -> StageResult:
        with WIRES.wire(self._sink.connection) as wire:
            # This order matters: an error below leaves the transaction in doubt, so it must not be continued.
            transaction, self._open = self._open, None
            if transaction is None:
                # Named by the block of its first micro-batch, which stays leased until the receipt.
                context = self._context
                name = TransactionalId(context.job, context.owner_epoch, request.block, SHARED_TASK, 0)
                settings = StagingSettings(
                    connection=self._sink.connection,
                    transactional_id=str(name),
                    transaction_timeout_ms=self._sink.transaction_timeout_ms,
                )
                transaction = SharedTransaction(wire, settings, self._sink.topics)
            transaction.use_wire(wire)
            return self._stage(transaction, wire, request)

    def _stage(self, transaction: SharedTransaction, wire: KafkaWire, request: StageRequest) -> StageResult:
        found = self._write(transaction, request)
        tasks = tuple(TaskAck.from_json(report) for report in found)
        checkpoint = request.find_checkpoint(tasks)
        if transaction.is_empty:
            transaction.abort()
            return StageResult(tasks, ())
        if checkpoint is None or checkpoint < request.checkpoint:
            # No barrier, or that of a checkpoint that was given up: the next checkpoint commits the rows.
            self._open = transaction
        else:
            self._commit_inputs(transaction, wire, request, checkpoint)
        handles = [KafkaCommittable.from_json(r["committable"]) for r in found if r["committable"]]
        if not handles:
            return StageResult(tasks, ())
        whole = replace(handles[0], records=sum(handle.records for handle in handles))
        staged = KafkaSinkCommittable(whole, next_sequences=transaction.next_sequences)
        return StageResult(tasks, (staged.to_payload(),))

    def _write(self, transaction: SharedTransaction, request: StageRequest) -> Sequence[Mapping[str, Any]]:
        """Run the tasks; return their reports after checking that no other attempt has written."""
        if self._sink.partition:
            transaction.check_partitions()
        most = int(request.rows.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
        owners = Owners(transaction.partitions, self._sink.topic, most)
        prefix = TransactionalId.prefix(self._context.job, self._context.owner_epoch, request.block)
        names = [make_ticket_name(prefix, task) for task in range(owners.tasks)]
        before = transaction.tickets(names)
        producer = transaction.producer(prefix)
        found = self._tasks.write_shared(
            request, owners.assign, transaction.partitions, transaction.transactional_id, producer
        )
        outcomes = []
        for report in found:
            written = {(str(topic), int(at)): int(count) for topic, at, count in report["written"]}
            ticket = Ticket(*report["ticket"]) if report.get("ticket") is not None else None
            outcomes.append(TaskOutcome(int(report["partition"]), written, ticket))
        given: dict[str, Ticket | None] = dict.fromkeys(names)
        given.update((make_ticket_name(prefix, one.task), one.ticket) for one in outcomes)
        # This order matters: an attempt that takes its ticket after this sees the written records and stops.
        why = why_other_attempts(before, transaction.tickets(names), given)
        if why:
            raise faults.make_staging_error(
                f"{transaction.transactional_id} may hold records of two attempts of a task",
                why=why,
                what_to_do="none: the job goes back to its last checkpoint",
            )
        transaction.advance(outcomes)
        return found

    def _commit_inputs(
        self, transaction: SharedTransaction, wire: KafkaWire, request: StageRequest, checkpoint: CheckpointId
    ) -> None:
        """Add the offsets of consumer groups on the same brokers to the transaction."""
        note = self._context.timeline.mark_of(checkpoint).to_text(self._context.job)
        for one in request.input_offsets():
            if _servers(one.servers) != _servers(self._sink.connection.servers):
                continue
            known = KafkaAdmin.from_wire(wire).committed_offsets(one.group)
            forward = {place: at for place, at in one.offsets.items() if at > known.get(place, -1)}
            if forward:
                transaction.commit_offsets(one.group, forward, note)


def _servers(text: str) -> frozenset[str]:
    return frozenset(one.strip() for one in text.split(","))
