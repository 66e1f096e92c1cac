"""Every way in which a prepared transaction can end, on a real broker."""

from __future__ import annotations

import dataclasses
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient

from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import Evidence, KafkaCommittable, TransactionClient
from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.records import CommitAnswer, Outcome
from flinkish_spark.testing import LocalBroker
from tests.support.jobs import read_committed
from tests.support.open_transactions import still_open
from tests.support.services import BROKER_JARS

TopicFactory = Callable[..., str]
BLOCKS = iter(range(1_000_000))


def new_id(job: JobUuid | None = None) -> TransactionalId:
    return TransactionalId(job or JobUuid(uuid.uuid4().hex), OwnerEpoch(1), next(BLOCKS), 0, 0)


class Stage:
    """Prepares transactions as a task would, and reads as a consumer would."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self.producers: list[KafkaProducer] = []

    def producer(self, transactional_id: str, timeout_ms: int = 60_000) -> KafkaProducer:
        made = KafkaProducer(
            bootstrap_servers=self.servers,
            transactional_id=transactional_id,
            acks="all",
            transaction_timeout_ms=timeout_ms,
            retry_backoff_ms=10,
        )
        made.init_transactions()
        self.producers.append(made)
        return made

    def send(
        self, producer: KafkaProducer, transactional_id: str, topic: str, n: int = 3
    ) -> KafkaCommittable:
        """Begin a transaction, write `n` records and leave it open."""
        producer.begin_transaction()
        futures = [producer.send(topic, b"%d" % i, key=b"k%d" % i, partition=0) for i in range(n)]
        producer.flush()
        written = futures[-1].get(timeout=10)
        grant = producer._transaction_manager.producer_id_and_epoch
        place = Evidence(topic, 0, written.offset)
        return KafkaCommittable(transactional_id, grant.producer_id, grant.epoch, place, n)

    def prepare(
        self, topic: str, transactional_id: str | None = None, timeout_ms: int = 60_000
    ) -> KafkaCommittable:
        name = transactional_id or str(new_id())
        return self.send(self.producer(name, timeout_ms), name, topic)

    def visible(self, topic: str) -> int:
        return len(read_committed(self.servers, topic))

    def delete_records_before(self, topic: str, offset: int) -> None:
        with KafkaAdminClient(bootstrap_servers=self.servers) as admin:
            admin.delete_records({TopicPartition(topic, 0): offset})

    def delete_topic(self, topic: str) -> None:
        with KafkaAdminClient(bootstrap_servers=self.servers) as admin:
            admin.delete_topics([topic])


@pytest.fixture
def stage(broker: LocalBroker) -> Iterator[Stage]:
    made = Stage(broker.bootstrap_servers)
    yield made
    for producer in made.producers:
        producer.close(timeout=1)


@pytest.fixture
def client(broker: LocalBroker) -> Iterator[TransactionClient]:
    with TransactionClient(KafkaConnection(broker.bootstrap_servers)) as made:
        yield made


def outcome(answer: CommitAnswer) -> Outcome:
    assert answer.detail
    return answer.outcome


def fence(client: TransactionClient, one: KafkaCommittable) -> None:
    parsed = TransactionalId.parse(one.transactional_id)
    assert parsed is not None
    client.abort_open(parsed)


# -- the 2 x 2 table of repeats -------------------------------------------------------------------


def test_commit_and_commit_again(stage: Stage, client: TransactionClient, topic: TopicFactory) -> None:
    """Behaviours 133, 152."""
    one = stage.prepare(name := topic())
    assert stage.visible(name) == 0
    assert outcome(client.commit(one)) is Outcome.COMMITTED
    assert outcome(client.commit(one)).is_done
    assert stage.visible(name) == 3


def test_abort_and_abort_again(stage: Stage, client: TransactionClient, topic: TopicFactory) -> None:
    """Behaviour 152."""
    one = stage.prepare(name := topic())
    assert outcome(client.abort(one)) is Outcome.COMMITTED
    assert outcome(client.abort(one)).is_done
    assert stage.visible(name) == 0


def test_commit_after_abort_is_lost(stage: Stage, client: TransactionClient, topic: TopicFactory) -> None:
    """Behaviours 139, 152."""
    one = stage.prepare(topic())
    client.abort(one)
    answer = client.commit(one)
    assert outcome(answer) is Outcome.LOST
    assert "48 INVALID_TXN_STATE" in answer.detail
    assert "aborted transaction" in answer.detail


def test_abort_after_commit_is_fenced(stage: Stage, client: TransactionClient, topic: TopicFactory) -> None:
    """Behaviour 152."""
    one = stage.prepare(name := topic())
    client.commit(one)
    answer = client.abort(one)
    assert outcome(answer) is Outcome.FENCED
    assert answer.detail.startswith("was committed by another owner")
    assert stage.visible(name) == 3


# -- fenced, timed out, expired -------------------------------------------------------------------


def test_fenced_before_the_commit_is_lost(
    stage: Stage, client: TransactionClient, topic: TopicFactory
) -> None:
    """Behaviour 139."""
    one = stage.prepare(name := topic())
    fence(client, one)
    answer = client.commit(one)
    assert outcome(answer) is Outcome.LOST
    assert outcome(client.abort(one)) is Outcome.ALREADY_COMMITTED
    assert stage.visible(name) == 0


def test_fenced_after_the_commit_is_committed(
    stage: Stage, client: TransactionClient, topic: TopicFactory
) -> None:
    """Behaviours 139, 152b: recovered again, it is committed already."""
    one = stage.prepare(name := topic())
    client.commit(one)
    fence(client, one)
    answer = client.commit(one)
    assert outcome(answer) is Outcome.ALREADY_COMMITTED
    assert "PRODUCER_FENCED" in answer.detail
    assert outcome(client.abort(one)) is Outcome.FENCED
    assert stage.visible(name) == 3


def test_a_transaction_that_timed_out_is_lost(
    stage: Stage, client: TransactionClient, topic: TopicFactory
) -> None:
    """Behaviour 139."""
    one = stage.prepare(name := topic(), timeout_ms=1_000)
    end = time.monotonic() + 40
    while client.is_alive([one])[one].alive:
        assert time.monotonic() < end, "the broker never timed the transaction out"
        time.sleep(0.5)
    assert "epoch" in client.is_alive([one])[one].reason or "Abort" in client.is_alive([one])[one].reason
    answer = client.commit(one)
    assert outcome(answer) is Outcome.LOST
    # Where the broker does not list it as aborted, its marker in the log says so.
    proof = f"{name}-0 offset 2 (lies in an aborted transaction|was ended by the ABORT marker)"
    assert re.search(proof, answer.detail), answer.detail
    assert outcome(client.abort(one)) is Outcome.ALREADY_COMMITTED


def test_an_unknown_producer_id_proves_nothing(
    stage: Stage, client: TransactionClient, topic: TopicFactory
) -> None:
    """Behaviour 139: as after transactional.id.expiration.ms, code 49, yet the record tells."""
    one = stage.prepare(topic())
    client.commit(one)
    forgotten = dataclasses.replace(one, transactional_id=str(new_id()))
    assert outcome(client.commit(forgotten)) is Outcome.ALREADY_COMMITTED
    still_open = stage.prepare(topic())
    forgotten = dataclasses.replace(still_open, transactional_id=str(new_id()))
    assert outcome(client.commit(forgotten)) is Outcome.RETRY
    assert outcome(client.abort(forgotten)) is Outcome.RETRY
    assert outcome(client.commit(still_open)) is Outcome.COMMITTED


def test_another_producers_open_transaction_does_not_hide_the_fate(
    stage: Stage, client: TransactionClient, topic: TopicFactory
) -> None:
    """It holds the last stable offset back; the markers tell nevertheless."""
    name = topic()
    older = stage.prepare(name)
    committed, aborted = stage.prepare(name), stage.prepare(name)
    client.commit(committed)
    for one in (committed, aborted):
        fence(client, one)
    assert stage.visible(name) == 0
    assert outcome(client.commit(committed)) is Outcome.ALREADY_COMMITTED
    assert outcome(client.commit(aborted)) is Outcome.LOST
    assert outcome(client.commit(older)) is Outcome.COMMITTED
    assert stage.visible(name) == 6


# -- the danger of using an id twice --------------------------------------------------------------


def test_without_a_new_epoch_an_old_handle_commits_the_new_transaction(
    stage: Stage, client: TransactionClient, topic: TopicFactory
) -> None:
    """Why the writer asks for a new epoch before every transaction; nothing here can detect it."""
    name, transactional_id = topic(), str(new_id())
    producer = stage.producer(transactional_id)
    old = stage.send(producer, transactional_id, name)
    producer.commit_transaction()
    new = stage.send(producer, transactional_id, name)
    assert (old.producer_id, old.producer_epoch) == (new.producer_id, new.producer_epoch)
    assert outcome(client.commit(old)) is Outcome.COMMITTED
    assert stage.visible(name) == 6


def test_with_a_new_epoch_an_old_handle_cannot_touch_the_new_transaction(
    stage: Stage, client: TransactionClient, topic: TopicFactory
) -> None:
    """Behaviour 141."""
    name, transactional_id = topic(), str(new_id())
    old = stage.prepare(name, transactional_id)
    client.commit(old)
    new = stage.prepare(name, transactional_id)
    assert outcome(client.commit(old)) is Outcome.ALREADY_COMMITTED
    assert outcome(client.abort(old)) is Outcome.FENCED
    assert stage.visible(name) == 3
    assert client.is_alive([old, new])[new].alive
    assert outcome(client.commit(new)) is Outcome.COMMITTED


# -- evidence that is gone ------------------------------------------------------------------------


def test_expired_records_are_reported_as_evidence_gone(
    stage: Stage, client: TransactionClient, topic: TopicFactory
) -> None:
    one = stage.prepare(name := topic())
    client.commit(one)
    fence(client, one)
    stage.delete_records_before(name, 4)
    answer = client.commit(one)
    assert outcome(answer) is Outcome.LOST
    assert "the evidence is gone" in answer.detail


def test_a_deleted_topic_is_reported(stage: Stage, client: TransactionClient, topic: TopicFactory) -> None:
    one = stage.prepare(name := topic())
    client.commit(one)
    fence(client, one)
    stage.delete_topic(name)
    answer = client.commit(one)
    assert outcome(answer) is Outcome.LOST
    assert f"topic {name} (partition 0) was deleted" in answer.detail


def test_another_topic_of_the_same_name_is_no_evidence(
    stage: Stage, client: TransactionClient, topic: TopicFactory
) -> None:
    """As if the topic had been created again: the place holds another producer's record."""
    one = stage.prepare(topic())
    client.commit(one)
    fence(client, one)
    other = stage.prepare(name := topic())
    client.commit(other)
    moved = dataclasses.replace(one, evidence=Evidence(name, 0, 1))
    assert outcome(client.commit(moved)) is Outcome.LOST
    beyond = dataclasses.replace(one, evidence=Evidence(name, 0, 99))
    answer = client.commit(beyond)
    assert outcome(answer) is Outcome.LOST
    assert "beyond the end of the log" in answer.detail


# -- looking --------------------------------------------------------------------------------------


def test_is_alive(stage: Stage, client: TransactionClient, topic: TopicFactory) -> None:
    name = topic()
    live, committed, aborted, fenced = (stage.prepare(name) for _ in range(4))
    unknown = dataclasses.replace(live, transactional_id=str(new_id()))
    client.commit(committed)
    client.abort(aborted)
    fence(client, fenced)
    seen = client.is_alive([live, committed, aborted, fenced, unknown])
    assert {one for one, state in seen.items() if state.alive} == {live}
    assert "replaced by producer" in seen[fenced].reason
    assert "NOT_FOUND" in seen[unknown].reason
    assert client.is_alive([]) == {}


def test_list_of_job_parses_ids_exactly(stage: Stage, client: TransactionClient, topic: TopicFactory) -> None:
    """Behaviours 149, 150: whose a transaction is."""
    name, job = topic(), JobUuid(uuid.uuid4().hex)
    ours = [new_id(job), new_id(job)]
    foreign = [
        f"{ours[0]}-9",
        f"x{ours[0]}",
        f"flinkish-{job}-1-2",
        f"flinkish-{job}",
        f"flinkish-{job}-1-02-0-0",
    ]
    for transactional_id in [*map(str, ours), *foreign, str(new_id())]:
        stage.prepare(name, transactional_id)
    done = new_id(job)
    client.commit(stage.prepare(name, str(done)))
    found = still_open(client, job)
    assert [one.transactional_id for one in found] == sorted(ours)
    assert {one.state for one in found} == {"Ongoing"}


def test_abort_open(stage: Stage, client: TransactionClient, topic: TopicFactory) -> None:
    """Behaviour 142."""
    name, transactional_id = topic(), new_id()
    producer = stage.producer(str(transactional_id))
    stage.send(producer, str(transactional_id), name)
    assert outcome(client.abort_open(transactional_id)) is Outcome.COMMITTED
    assert outcome(client.abort_open(transactional_id)) is Outcome.ALREADY_COMMITTED
    assert outcome(client.abort_open(new_id())) is Outcome.ALREADY_COMMITTED
    with pytest.raises(Exception, match=r"(?i)fenced|epoch"):  # the zombie cannot go on
        producer.send(name, b"zombie", partition=0).get(timeout=10)
        producer.commit_transaction()
    assert stage.visible(name) == 0


# -- brokers that go away -------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_same_client_works_after_a_broker_restart(own_broker: LocalBroker) -> None:
    """Behaviours 137, 152b."""
    own_broker.start()
    servers = own_broker.bootstrap_servers
    stage = Stage(servers)
    with KafkaAdminClient(bootstrap_servers=servers) as admin:
        admin.create_topics({"t": {"num_partitions": 1, "replication_factor": 1}}, wait_for_metadata=True)
    with TransactionClient(KafkaConnection(servers), timeout_ms=1_500) as client:
        before, after, fenced = (stage.prepare("t") for _ in range(3))
        assert outcome(client.commit(before)) is Outcome.COMMITTED
        own_broker.kill()
        started = time.monotonic()
        answer = client.commit(after)
        assert outcome(answer) is Outcome.RETRY
        assert servers in answer.detail
        assert time.monotonic() - started < 4
        own_broker.start()
        assert outcome(_until_settled(lambda: client.commit(after))) is Outcome.COMMITTED
        assert outcome(client.commit(before)).is_done
        fence(client, fenced)
        assert outcome(client.commit(fenced)) is Outcome.LOST
        assert stage.visible("t") == 6
        own_broker.pause()
        assert outcome(client.commit(after)) is Outcome.RETRY
        own_broker.resume()
        assert outcome(_until_settled(lambda: client.commit(after))).is_done
    for producer in stage.producers:
        producer.close(timeout=0)


def _until_settled(ask: Callable[[], CommitAnswer]) -> CommitAnswer:
    end = time.monotonic() + 30
    while (answer := ask()).outcome is Outcome.RETRY and time.monotonic() < end:
        pass
    return answer


@pytest.mark.nightly
def test_compaction_does_not_turn_a_commit_into_a_loss(tmp_path: Path) -> None:
    """The record that served as evidence is compacted away; the marker is still there."""
    quick = {"log.cleaner.backoff.ms": "200"}
    with LocalBroker(tmp_path / "broker", jars_dir=BROKER_JARS, extra_properties=quick) as broker:
        configs = {"cleanup.policy": "compact", "segment.ms": "500", "min.cleanable.dirty.ratio": "0.001"}
        with KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers) as admin:
            options = {"num_partitions": 1, "replication_factor": 1, "configs": configs}
            admin.create_topics({"t": options}, wait_for_metadata=True)
        stage = Stage(broker.bootstrap_servers)
        with TransactionClient(KafkaConnection(broker.bootstrap_servers)) as client:
            committed, aborted = stage.prepare("t"), stage.prepare("t")
            client.commit(committed)
            for one in (committed, aborted):
                fence(client, one)
            end = time.monotonic() + 40
            while (answer := client.commit(committed)).detail.find("COMMIT marker") < 0:
                assert answer.outcome is Outcome.ALREADY_COMMITTED
                assert time.monotonic() < end, "the record was never compacted away"
                client.commit(stage.prepare("t"))  # the same keys again, in a new segment
                time.sleep(0.6)
            assert answer.outcome is Outcome.ALREADY_COMMITTED
            assert outcome(client.commit(aborted)) is Outcome.LOST
        for producer in stage.producers:
            producer.close(timeout=0)
