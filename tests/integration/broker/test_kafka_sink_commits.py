"""Whole micro-batches on a real broker: transactions that time out one by one, and what proof is left."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient

from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.producer import StagedTransaction
from flinkish_spark.connectors.kafka.client.settings import StagingSettings
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable, TransactionClient
from flinkish_spark.connectors.kafka.writer import KafkaCommitter
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome
from flinkish_spark.testing import LocalBroker
from tests.support.jobs import read_committed

LONG_MS, SHORT_MS = 120_000, 1_000
DONE = [Outcome.COMMITTED, Outcome.COMMITTED]


class Job:
    """Micro-batches of one sink, staged task by task, each with a transaction timeout of its own."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self.connection = KafkaConnection(servers)
        self.job = JobUuid(uuid.uuid4().hex)
        self.client = TransactionClient(self.connection)
        self.committer = KafkaCommitter(self.client, SimpleNamespace(uid="out", job=self.job))  # type: ignore[arg-type]

    def stage(self, topic: str, block: int, *timeouts_ms: int) -> list[KafkaCommittable]:
        found = []
        for task, timeout_ms in enumerate(timeouts_ms):
            name = str(TransactionalId(self.job, OwnerEpoch(1), block, task, 0))
            settings = StagingSettings(
                connection=self.connection,
                transactional_id=name,
                transaction_timeout_ms=timeout_ms,
                default_topic=topic,
            )
            with StagedTransaction(settings) as transaction:
                transaction.write(None, pa.array([b"%d-%d" % (block, task)]))
                committable = transaction.prepare()
            assert committable is not None
            found.append(committable)
        return found

    def commit(self, *handles: KafkaCommittable) -> list[CommitAnswer]:
        staged = [Committable("out", handle.to_json()) for handle in handles]
        return list(self.committer.commit(CheckpointId(3), staged))

    def await_death(self, *handles: KafkaCommittable) -> None:
        """Wait until the broker has timed them out; it looks every ten seconds."""
        end = time.monotonic() + 40
        while any(one.alive for one in self.client.is_alive(handles).values()):
            assert time.monotonic() < end, "the broker never timed the transactions out"
            time.sleep(0.3)

    def values(self, topic: str) -> list[Any]:
        return sorted(record.value for record in read_committed(self.servers, topic))


@pytest.fixture
def job(broker: LocalBroker) -> Iterator[Job]:
    made = Job(broker.bootstrap_servers)
    yield made
    for found in made.client.list_open_transactions(made.job):
        made.client.abort_open(found.transactional_id)
    made.committer.close()


def test_transactions_that_time_out_take_their_micro_batch_along(job: Job, topic: Callable[..., str]) -> None:
    """One broker's wait for timeouts, for all that can become of a micro-batch with a lost transaction."""
    fine, halfway, begun, gone = topic(), topic(), topic(), topic()
    one = job.stage(fine, 1, LONG_MS, LONG_MS)
    two = job.stage(halfway, 2, LONG_MS, LONG_MS, SHORT_MS)
    three = job.stage(begun, 3, LONG_MS, LONG_MS, SHORT_MS, LONG_MS)
    four = job.stage(gone, 4, LONG_MS, SHORT_MS)
    assert job.client.commit(three[0]).outcome is Outcome.COMMITTED
    job.await_death(two[2], three[2], four[1])

    answers = job.commit(*one, *two, *three)
    assert [answer.outcome for answer in answers] == [*DONE, Outcome.LOST]
    assert answers[-1].is_proven_aborted
    # The same proof in the list of aborted transactions or, where the broker did not list it, in the log.
    proofs = ("lies in an aborted transaction", "was ended by the ABORT marker")
    assert any(proof in answers[-1].detail for proof in proofs), answers[-1].detail
    assert job.values(fine) == [b"1-0", b"1-1"]
    # Its first two are still open, and can be aborted for a replay.
    assert [job.client.abort(handle).outcome for handle in two[:2]] == DONE
    assert job.values(halfway) == []

    answers = job.commit(*three)
    assert [answer.outcome for answer in answers] == [*DONE, Outcome.LOST]
    assert answers[-1].is_proven_aborted
    assert job.client.is_alive(three)[three[3]].alive, "nothing behind the answer was committed"
    assert [answer.outcome for answer in job.commit(*three)] == [*DONE, Outcome.LOST], (
        "a repeat says the same"
    )

    assert job.client.abort(four[0]).outcome is Outcome.COMMITTED
    with KafkaAdminClient(bootstrap_servers=job.servers) as admin:
        admin.delete_records({TopicPartition(gone, 0): four[1].evidence.offset + 1})
    (lost,) = job.commit(*four)
    assert (lost.outcome, lost.is_proven_aborted) == (Outcome.LOST, False)
    assert "the evidence is gone" in lost.detail
