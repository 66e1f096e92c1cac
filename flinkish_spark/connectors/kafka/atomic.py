"""The staging half of an atomic Kafka sink: all micro-batches of a checkpoint in one transaction.

The rules of the transaction are in :mod:`flinkish_spark.connectors.kafka.client.shared_transaction`. Here is
which task owns which partition, when a transaction begins and when it goes on, and what goes into it beside
records:

- It begins with the first micro-batch behind a barrier, and goes on until the one with the next barrier. That
  of a checkpoint that an earlier owner of the job began, and that was given up, does not count.
- A micro-batch that raises leaves it to the sweep: what of it was written nobody knows.
- Nothing is handed on to another start of the query (:attr:`.Committer.shows_whole`): who begins anew does
  not know which tasks of the old one still write.
- One in which nothing was written is ended at once. It would hold readers back for nothing, and no record of
  it could tell later what became of it.
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

from flinkish_spark.connectors.kafka.client.admin import VERIFICATION, KafkaAdmin
from flinkish_spark.connectors.kafka.client.admission import partitions_for_keys
from flinkish_spark.connectors.kafka.client.client import WIRES, KafkaWire
from flinkish_spark.connectors.kafka.client.producer import Ticket
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
from flinkish_spark.connectors.kafka.writer import (
    KafkaSinkCommittable,
    KafkaWriter,
    find_checkpoint,
    make_ticket_name,
)
from flinkish_spark.contracts.sink import SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.core.config import CheckpointingMode
from flinkish_spark.core.errors import AuthorizationError, ConfigError, EnvironmentFault
from flinkish_spark.protocol.ids import CheckpointId, TransactionalId
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.routing import spark_hash_int


class DoubtfulTransaction(EnvironmentFault):
    """Nobody can say what a checkpoint's transaction holds; it is given up and staged again."""

    restartable = True
    ends_when_repeated = True


def check_atomic(sink: KafkaSinkSettings, spark: SparkSession, wire: KafkaWire, context: SinkContext) -> None:
    uid = context.uid
    if context.checkpoint.mode is CheckpointingMode.AT_LEAST_ONCE:
        raise ConfigError(
            f"the sink '{uid}' is atomic, and the job's checkpoints have CheckpointingMode.AT_LEAST_ONCE",
            why="then a branch may stage records of a checkpoint behind the end of its transaction, "
            "and such a checkpoint is given up",
            what_to_do="use CheckpointingMode.EXACTLY_ONCE, or leave atomic out",
        )
    if str(spark.conf.get("spark.speculation", "false")).lower() == "true":
        raise ConfigError(
            f"the sink '{uid}' is atomic, and spark.speculation is on",
            why="a copy of a task would write the same partitions, and such a checkpoint is given up",
            what_to_do="set spark.speculation=false, or leave atomic out",
        )
    if not wire.verifies_partitions():
        raise ConfigError(
            f"the sink '{uid}' is atomic, and its brokers are older than Kafka 3.7, or of another make",
            why="by the requests that they know they do not refuse records of a task that has outlived its "
            "transaction, behind the transaction's end",
            what_to_do="use Kafka 3.7 or later, or leave atomic out",
        )
    unverified = KafkaAdmin.from_wire(wire).brokers_that_verify_no_partitions()
    if unverified:
        raise ConfigError(
            f"the sink '{uid}' is atomic, and {VERIFICATION}=false at the broker {unverified[0]}",
            why="it takes records of a task that has outlived its transaction, behind the transaction's end, "
            "and readers wait for ever",
            what_to_do=f"set {VERIFICATION}=true, Kafka's default, or leave atomic out",
            setting=VERIFICATION,
        )
    for topic in sink.topics:
        try:
            wire.last_sequences([(topic, 0)], 0, 0)
        except AuthorizationError as denied:
            raise AuthorizationError(
                f"Kafka refuses this principal READ on the topic '{topic}' of the atomic sink '{uid}'",
                why="before a checkpoint is decided DescribeProducers tells what its transaction holds",
                what_to_do="add an ACL that allows READ on it, or leave atomic out",
                topic=topic,
            ) from denied


@dataclass(frozen=True)
class Owners:
    """Tasks and the Kafka partitions that each of them writes alone."""

    #: How many each topic has.
    partitions: Mapping[str, int]
    #: Of records that name none.
    default_topic: str
    most_tasks: int

    @property
    def tasks(self) -> int:
        """How many tasks there are: no more than partitions, since each has one owner."""
        return max(1, min(self.most_tasks, max(self.partitions.values())))

    def assign(self, rows: DataFrame) -> DataFrame:
        """Return rows with the partition that each is written to, in the task that owns it, in order."""
        named = F.col(PARTITION) if PARTITION in rows.columns else F.lit(None).cast("int")
        destination = _destination(dict(self.partitions), self.default_topic)
        placed = rows.withColumn(PARTITION, destination(F.col(KEY), F.col(TOPIC), named, F.col(C.HASH)))
        routes = F.array(*map(F.lit, self._routes()))
        route = F.element_at(routes, F.pmod(F.col(PARTITION), F.lit(self.tasks)) + 1)
        return placed.repartition(self.tasks, route)

    def _routes(self) -> list[int]:
        """Return for each task an integer that Spark hashes to it."""
        found: dict[int, int] = {}
        candidate = 0
        while len(found) < self.tasks:
            found.setdefault(spark_hash_int(candidate) % self.tasks, candidate)
            candidate += 1
        return [found[task] for task in range(self.tasks)]


def _destination(partitions: Mapping[str, int], default_topic: str) -> Any:
    """Return a function of key, topic, named partition and hash: where a record goes, at each attempt."""

    def destination(keys: pa.Array, topics: pa.Array, named: pa.Array, hashes: pa.Array) -> pa.Array:
        # A partition that the topic does not have is left as it is, for the writer to refuse.
        result = named.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
        undecided = named.is_null().to_numpy(zero_copy_only=False)
        spread = hashes.fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64)
        coded = topics.fill_null(default_topic).dictionary_encode()
        codes = coded.indices.to_numpy(zero_copy_only=False)
        for code, topic in enumerate(coded.dictionary.to_pylist()):
            # Of a topic that is not declared any partition will do: the record is refused.
            count = partitions.get(topic, 1)
            at = np.flatnonzero(undecided & (codes == code))
            if len(at):
                chosen = partitions_for_keys(keys.take(pa.array(at)), count)
                keyless = chosen < 0
                chosen[keyless] = (spread[at][keyless] % np.uint64(count)).astype(np.int32)
                result[at] = chosen
        return pa.array(result, pa.int32())

    # By its hints: a type in so many words makes PySpark warn.
    made: Any = arrow_udf(destination, "int")  # type: ignore[call-overload]
    return made


class AtomicWriter(SinkWriter):
    def __init__(self, sink: KafkaSinkSettings, context: SinkContext, tasks: KafkaWriter) -> None:
        self._sink, self._context, self._tasks = sink, context, tasks
        self._open: SharedTransaction | None = None

    def stage(self, request: StageRequest) -> StageResult:
        with WIRES.wire(self._sink.connection) as wire:
            # This order matters: what raises below leaves the transaction in doubt; nobody goes on with it.
            transaction, self._open = self._open, None
            if transaction is None:
                # Under the block of its first micro-batch, which is leased until the receipt.
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
        checkpoint = find_checkpoint(tasks)
        if transaction.is_empty:
            transaction.abort()
            return StageResult(tasks, ())
        if checkpoint is None or checkpoint < request.checkpoint:
            # Without a barrier, or with that of a checkpoint that was given up: the next one shows the rows.
            self._open = transaction
        else:
            self._commit_inputs(transaction, wire, request, checkpoint)
        return StageResult(tasks, tuple(self._committables(transaction, found)))

    def _write(self, transaction: SharedTransaction, request: StageRequest) -> Sequence[Mapping[str, Any]]:
        """Have the tasks write; return their reports once there is no doubt about them."""
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
        outcomes = [_outcome(report) for report in found]
        given: dict[str, Ticket | None] = dict.fromkeys(names)
        given.update((make_ticket_name(prefix, one.task), one.ticket) for one in outcomes)
        # This order matters: a ticket that is taken later belongs to an attempt that sees what is written.
        why = why_other_attempts(before, transaction.tickets(names), given)
        if why:
            raise DoubtfulTransaction(
                f"{transaction.transactional_id} may hold records of two attempts of a task",
                why=why,
                what_to_do="none: the job goes back to its last checkpoint",
            )
        transaction.advance(outcomes)
        return found

    def _commit_inputs(
        self, transaction: SharedTransaction, wire: KafkaWire, request: StageRequest, checkpoint: CheckpointId
    ) -> None:
        """Put the input's position into the transaction, where the groups are on the same brokers."""
        note = self._context.timeline.mark_of(checkpoint).to_text(self._context.job)
        for one in request.input_offsets():
            if _servers(one.servers) != _servers(self._sink.connection.servers):
                continue
            known = KafkaAdmin.from_wire(wire).committed_offsets(one.group)
            forward = {place: at for place, at in one.offsets.items() if at > known.get(place, -1)}
            if forward:
                transaction.commit_offsets(one.group, forward, note)

    def _committables(
        self, transaction: SharedTransaction, found: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        handles = [KafkaCommittable.from_json(r["committable"]) for r in found if r["committable"]]
        if not handles:
            return []
        handle = replace(handles[0], records=sum(handle.records for handle in handles))
        return [KafkaSinkCommittable(handle, next_sequences=transaction.next_sequences).to_payload()]


def _outcome(report: Mapping[str, Any]) -> TaskOutcome:
    written = {(str(topic), int(partition)): int(count) for topic, partition, count in report["written"]}
    ticket = report.get("ticket")
    return TaskOutcome(
        int(report["partition"]), written, None if ticket is None else Ticket(*map(int, ticket))
    )


def _servers(text: str) -> frozenset[str]:
    return frozenset(one.strip() for one in text.split(","))
