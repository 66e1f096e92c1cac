"""The atomic Kafka sink: one transaction for a checkpoint, in doubt none."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient, NewPartitions

from flinkish_spark import CheckpointConfig, CheckpointingMode, Json, KafkaSink, OnBadRecord, Raw
from flinkish_spark.connectors.kafka.atomic import Owners
from flinkish_spark.connectors.kafka.client.admin import VERIFICATION, KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import Isolation, KafkaWire
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.connectors.kafka.writer import KafkaSinkCommittable
from flinkish_spark.contracts.sink import GroupOffsets, StageRequest, StageResult
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Committable, Outcome
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.testing.sink_contract import SINK_CASES, SinkUnderTest, check_sink
from flinkish_spark.transport import columns as C
from tests.support.jobs import PATIENCE_S, eventually, read_committed
from tests.support.open_transactions import still_open
from tests.support.sinks import sink_context_of

pytestmark = pytest.mark.timeout(240)
SCHEMA = "k STRING, v BINARY, p INT"
CONTROL = f"{C.KIND} INT, {C.CHECKPOINT} BIGINT, {C.CHANNEL} BIGINT, {C.HASH} BIGINT"
FIVE = CheckpointId(5)
Topics = Callable[..., str]


class Rig:
    """Stages micro-batches by a sink's own writer, and ends them by its committer."""

    def __init__(self, spark: Any, servers: str, topic: str, **settings: Any) -> None:
        self.spark, self.servers, self.topic = spark, servers, topic
        self.job = JobUuid(uuid.uuid4().hex)
        self.client = TransactionClient(KafkaConnection(servers))
        self.blocks = iter(range(1, 1_000_000))
        given = {
            "key": "k",
            "value": Raw("v"),
            "transaction_timeout_ms": 60_000,
            "atomic": True,
            **settings,
        }
        self.sink = KafkaSink(servers, topic, **given)
        fields = spark.createDataFrame([], SCHEMA).schema
        config = CheckpointConfig(interval_ms=1_000, restart_budget_ms=10_000)
        self.context = sink_context_of(self.job, OwnerEpoch(1), "out", fields, config)
        self.sink.preflight(spark, self.context)
        self.writer = self.sink.create_writer(spark, self.context)
        self.committer = self.sink.create_committer(spark, self.context)

    def close(self) -> None:
        for found in self.client.list_open_transactions(self.job):
            self.client.abort_open(found.transactional_id)
        self.client.close()
        self.committer.close()

    def stage(
        self,
        values: Sequence[str],
        *,
        barrier: CheckpointId | None = None,
        partition: int | None = None,
        change: Callable[[Any], Any] = lambda frame: frame,
        inputs: Sequence[GroupOffsets] = (),
    ) -> StageResult:
        records: list[tuple[Any, ...]] = [
            (int(C.Kind.RECORD), 0, 0, number * 7_919, value, value.encode(), partition)
            for number, value in enumerate(values)
        ]
        if barrier is not None:
            records.append((int(C.Kind.BARRIER), int(barrier), 7, 0, None, None, None))
        spread = self.spark.sparkContext.parallelize(records, 2)
        frame = change(self.spark.createDataFrame(spread, f"{CONTROL}, {SCHEMA}"))
        request = StageRequest(
            frame,
            Lineage(0),
            BatchId(next(self.blocks)),
            next(self.blocks),
            FIVE,
            lambda: inputs,
        )
        return self.writer.stage(request)

    def committables(self, *results: StageResult) -> list[Committable]:
        return [Committable("out", json.loads(json.dumps(p))) for one in results for p in one.payloads]

    def commit(self, *results: StageResult) -> list[Outcome]:
        return [one.outcome for one in self.committer.commit(FIVE, self.committables(*results))]

    def seen(self) -> Counter[str]:
        return Counter(record.value.decode() for record in read_committed(self.servers, self.topic))

    def transactions(self, *results: StageResult) -> set[tuple[str, int, int]]:
        return {KafkaSinkCommittable.of(one.payload).transaction for one in self.committables(*results)}


@pytest.fixture
def rig(spark: Any, broker: Any, topic: Topics) -> Iterator[Rig]:
    made = Rig(spark, broker.bootstrap_servers, topic(partitions=4))
    yield made
    made.close()


def await_truth(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def names(first: int, count: int) -> list[str]:
    return [f"value-{number}" for number in range(first, first + count)]


# -- one transaction --------------------------------------------------------------------------------


def test_the_micro_batches_of_a_checkpoint_are_one_transaction_and_show_together(rig: Rig) -> None:
    """Over all partitions, the ones of each key in their order; a repeat changes nothing."""
    one = rig.stage(names(0, 200))
    two = rig.stage([])
    three = rig.stage(names(200, 200), barrier=FIVE)
    assert len(rig.transactions(one, two, three)) == 1
    assert rig.seen() == Counter()
    assert rig.committer.why_dead(rig.committables(one, two, three)) == {}
    assert rig.commit(one, two, three) == [Outcome.COMMITTED] * 2
    assert rig.seen() == Counter(names(0, 400))
    assert {record.partition for record in read_committed(rig.servers, rig.topic)} == {0, 1, 2, 3}
    rig.commit(one, two, three)
    assert rig.seen() == Counter(names(0, 400))
    assert still_open(rig.client, rig.job) == []


def test_records_lie_where_the_partitioner_of_kafka_puts_them(rig: Rig, topic: Topics) -> None:
    """As those of a sink that is not atomic."""
    plain = Rig(rig.spark, rig.servers, topic(partitions=4))
    object.__setattr__(plain.sink, "atomic", False)
    plain.writer = plain.sink.create_writer(plain.spark, plain.context)
    for one in (rig, plain):
        one.commit(one.stage(names(0, 50), barrier=FIVE))
    places = [{(r.value, r.partition) for r in read_committed(o.servers, o.topic)} for o in (rig, plain)]
    assert places[0] == places[1]
    plain.close()


def test_the_next_checkpoint_is_another_transaction_which_may_be_aborted_alone(rig: Rig) -> None:
    first = rig.stage(names(0, 20), barrier=FIVE)
    second = rig.stage(names(20, 20), barrier=CheckpointId(6))
    assert len(rig.transactions(first, second)) == 2
    assert [a.outcome for a in rig.committer.abort(rig.committables(second))] == [Outcome.COMMITTED]
    rig.commit(first)
    assert rig.seen() == Counter(names(0, 20))


def test_nothing_stays_open_where_nothing_was_written(rig: Rig) -> None:
    assert rig.stage([], barrier=FIVE).payloads == ()
    assert rig.stage([]).payloads == ()
    assert still_open(rig.client, rig.job) == []


def test_the_cases_of_the_contract(spark: Any, broker: Any, topic: Topics, tmp_path: Path) -> None:
    """Each on a topic of its own: what a case leaves open hides what comes behind it, in every partition."""
    servers = broker.bootstrap_servers

    def subject(name: str) -> SinkUnderTest:
        def visible() -> list[tuple[str, int]]:
            rows = (json.loads(record.value) for record in read_committed(servers, name))
            return [(row["user"], row["amount"]) for row in rows]

        def sink() -> KafkaSink:
            return KafkaSink(servers, name, key="user", value=Json(), atomic=True)

        made = SinkUnderTest(sink, visible, spark, tmp_path)
        made.count_open = lambda: len(still_open(client, made.job))
        return made

    with TransactionClient(KafkaConnection(servers)) as client:
        for case in SINK_CASES:
            check_sink(subject(topic(partitions=3)), [case])


# -- the input's position ---------------------------------------------------------------------------


def test_group_offsets_show_with_the_records(rig: Rig, topic: Topics) -> None:
    source, group = topic(partitions=2), f"group-{uuid.uuid4().hex[:8]}"
    with KafkaAdmin(KafkaConnection(rig.servers)) as admin:
        elsewhere = GroupOffsets("127.0.0.1:1", group, {(source, 0): 99})
        wanted = {(source, 0): 0, (source, 1): 0}
        inputs = [GroupOffsets(rig.servers, group, wanted), elsewhere]
        staged = rig.stage(names(0, 10), barrier=FIVE, inputs=inputs)
        assert admin.committed_offsets(group) == {}
        rig.commit(staged)
        # The coordinator of the group gets its marker behind the answer.
        await_truth(lambda: admin.committed_offsets(group) == wanted)
        assert admin.committed_offsets(group) == wanted


def test_group_offsets_of_what_is_aborted_do_not_show(rig: Rig, topic: Topics) -> None:
    source, group = topic(partitions=1), f"group-{uuid.uuid4().hex[:8]}"
    inputs = [GroupOffsets(rig.servers, group, {(source, 0): 0})]
    staged = rig.stage(names(0, 10), barrier=FIVE, inputs=inputs)
    rig.committer.abort(rig.committables(staged))
    with KafkaAdmin(KafkaConnection(rig.servers)) as admin:
        assert admin.committed_offsets(group) == {}


# -- doubt ------------------------------------------------------------------------------------------


class _FailingOnce:
    """Behind the shuffle: the first attempt passes every row on, waits until they are written, and fails."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        time.sleep(1)
        raise RuntimeError("the first attempt of this task fails, as the test wants")


def test_a_second_attempt_of_a_task_that_has_written_gives_the_transaction_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The task's first attempt dies behind its last record, before it could say so."""
    mark, owned = tmp_path / "failed", Owners.assign

    def owned_by_a_task_that_fails(self: Owners, rows: Any) -> Any:
        found = owned(self, rows)
        return found.mapInArrow(_FailingOnce(mark), found.schema)

    monkeypatch.setattr(Owners, "assign", owned_by_a_task_that_fails)
    # Of a size at which a task has sent some when the last one comes.
    small = "spark.sql.execution.arrow.maxRecordsPerBatch"
    rig.spark.conf.set(small, "500")
    try:
        with pytest.raises(Exception, match="attempt"):
            rig.stage([f"{number:04}" * 600 for number in range(8_000)], barrier=FIVE)
    finally:
        rig.spark.conf.unset(small)
    assert mark.exists()
    monkeypatch.undo()
    rig.committer.sweep([], frozenset)
    assert still_open(rig.client, rig.job) == []
    rig.commit(rig.stage(names(0, 10), barrier=FIVE))
    assert rig.seen() == Counter(names(0, 10))


def test_a_second_attempt_of_a_task_that_has_not_written_is_no_doubt(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mark, owned = tmp_path / "failed", Owners.assign

    def owned_by_a_task_that_fails(self: Owners, rows: Any) -> Any:
        found = owned(self, rows)
        return found.mapInArrow(_FailingOnce(mark), found.schema)

    monkeypatch.setattr(Owners, "assign", owned_by_a_task_that_fails)
    rig.commit(rig.stage(names(0, 10), barrier=FIVE))
    assert mark.exists()
    assert rig.seen() == Counter(names(0, 10))


def test_records_that_nobody_has_counted_make_the_checkpoint_dead(rig: Rig) -> None:
    """A task that outlived its micro-batch has written into the transaction."""
    staged = rig.stage(names(0, 20), barrier=FIVE)
    (committable,) = rig.committables(staged)
    one = KafkaSinkCommittable.of(committable.payload)
    assert one.next_sequences is not None
    append_as_a_zombie(rig, one)
    dead = rig.committer.why_dead([committable])
    assert list(dead) == [0]
    assert "were acknowledged" in dead[0]


def append_as_a_zombie(rig: Rig, one: KafkaSinkCommittable) -> None:
    """Write one more record into a transaction, as a zombie of a task would."""
    import pyarrow as pa

    from flinkish_spark.connectors.kafka.client.producer import StagedTransaction
    from flinkish_spark.connectors.kafka.client.settings import SharedProducer, StagingSettings

    assert one.next_sequences is not None
    handle = one.handle
    shared = SharedProducer(
        handle.producer_id, handle.producer_epoch, one.next_sequences, f"ticket-{uuid.uuid4().hex}"
    )
    settings = StagingSettings(
        connection=KafkaConnection(rig.servers),
        transactional_id=handle.transactional_id,
        transaction_timeout_ms=60_000,
        shared=shared,
    )
    with StagedTransaction(settings) as transaction:
        transaction.write(pa.array([b"zombie"]), pa.array([b"zombie"]), topics=rig.topic)
        transaction.prepare()


def test_a_task_that_outlives_its_transaction_cannot_write(rig: Rig) -> None:
    """Neither into it nor into a new one of the same producer: readers see nothing of it, ever."""
    staged = rig.stage(names(0, 20), barrier=FIVE)
    rig.commit(staged)
    (committable,) = rig.committables(staged)
    # Until its markers are written a partition takes what goes on with the transaction.
    assert still_open(rig.client, rig.job) == []
    with pytest.raises(EnvironmentFault):
        append_as_a_zombie(rig, KafkaSinkCommittable.of(committable.payload))
    assert rig.seen() == Counter(names(0, 20))
    assert still_open(rig.client, rig.job) == []


def test_a_checkpoint_in_two_transactions_is_dead(rig: Rig) -> None:
    """The one before was aborted, so what it staged would show with the next, and apart from it."""
    first = rig.stage(names(0, 20), barrier=FIVE)
    second = rig.stage(names(20, 20), barrier=CheckpointId(6))
    dead = rig.committer.why_dead(rig.committables(first, second))
    assert list(dead) == [0]
    assert "a part of the checkpoint only" in dead[0]


def test_a_barrier_of_a_checkpoint_that_was_given_up_ends_no_transaction(rig: Rig, topic: Topics) -> None:
    """A micro-batch that an earlier owner had planned: it passes to the next checkpoint, with its mark."""
    source, group = topic(partitions=1), f"group-{uuid.uuid4().hex}"
    at = GroupOffsets(rig.servers, group, {(source, 0): 40})
    first = rig.stage(names(0, 20), barrier=CheckpointId(4), inputs=[at])
    second = rig.stage([], barrier=FIVE, inputs=[at])
    assert len(rig.transactions(first, second)) == 1
    assert rig.commit(first, second) == [Outcome.COMMITTED]
    assert rig.seen() == Counter(names(0, 20))
    with KafkaAdmin(KafkaConnection(rig.servers)) as admin:
        (note,) = admin.find_committed_notes(group, Isolation.READ_COMMITTED).values()
    mark = Mark.parse(note, rig.job)
    assert mark is not None and mark.checkpoint == FIVE


def test_a_checkpoint_that_its_owner_gave_up_shows_with_the_next_one_and_its_own_mark(
    rig: Rig, topic: Topics
) -> None:
    """It was staged whole by then; no row came behind it."""
    source, group = topic(partitions=1), f"group-{uuid.uuid4().hex}"
    at = GroupOffsets(rig.servers, group, {(source, 0): 40})
    staged = rig.stage(names(0, 20), barrier=FIVE, inputs=[at])
    behind = rig.stage([], barrier=CheckpointId(6), inputs=[at])
    answers = rig.committer.commit(CheckpointId(6), rig.committables(staged, behind))
    assert [one.outcome for one in answers] == [Outcome.COMMITTED]
    assert rig.seen() == Counter(names(0, 20))
    with KafkaAdmin(KafkaConnection(rig.servers)) as admin:
        await_truth(lambda: admin.committed_offsets(group) == at.offsets)
        # As the job does behind its commit: what has not grown is not written, nor is the note beside it.
        sixth = rig.context.timeline.mark_of(CheckpointId(6)).to_text(rig.job)
        admin.commit_offsets(group, at.offsets, note=sixth)
        (note,) = admin.find_committed_notes(group, Isolation.READ_COMMITTED).values()
    mark, own = Mark.parse(note, rig.job), rig.committer.newest_marks()
    assert mark is not None and mark.checkpoint == FIVE
    # The sink's own mark is that of what was decided.
    assert [one.checkpoint for one in own] == [CheckpointId(6)]


def test_what_the_coordinator_has_aborted_is_lost_as_a_whole(rig: Rig) -> None:
    """LOST stands at the first committable, with proof: the checkpoint can be replayed."""
    one, two = rig.stage(names(0, 20)), rig.stage(names(20, 20), barrier=FIVE)
    (name,) = {found.transactional_id for found in rig.client.list_open_transactions(rig.job)}
    rig.client.abort_open(name)
    answers = rig.committer.commit(FIVE, rig.committables(one, two))
    assert [(a.outcome, a.is_proven_aborted) for a in answers] == [(Outcome.LOST, True)]
    assert [rig.committer.task_of(c) for c in rig.committables(one, two)] == [None, None]


def test_a_partition_that_is_added_meanwhile_is_used_from_the_next_checkpoint_on(rig: Rig) -> None:
    first = rig.stage(names(0, 20))
    admin = KafkaAdminClient(bootstrap_servers=rig.servers)
    admin.create_partitions({rig.topic: NewPartitions(6)})
    admin.close()
    second = rig.stage(names(20, 100), barrier=FIVE)
    assert rig.commit(first, second) == [Outcome.COMMITTED] * 2
    assert {record.partition for record in read_committed(rig.servers, rig.topic)} == {0, 1, 2, 3}
    third = rig.stage(names(120, 200), barrier=FIVE)
    rig.commit(third)
    assert rig.seen() == Counter(names(0, 320))
    assert {record.partition for record in read_committed(rig.servers, rig.topic)} == set(range(6))


# -- what is refused --------------------------------------------------------------------------------


def test_a_named_partition_that_there_is_not_meets_the_policy(spark: Any, broker: Any, topic: Topics) -> None:
    settings = {"partition": "p", "on_bad_record": OnBadRecord.DROP}
    rig = Rig(spark, broker.bootstrap_servers, topic(partitions=2), **settings)
    staged = rig.stage(names(0, 5), partition=7)
    kept = rig.stage(names(5, 5), partition=1, barrier=FIVE)
    rig.commit(staged, kept)
    assert sum(task.dropped for task in staged.tasks) == 5
    assert rig.seen() == Counter(names(5, 5))
    rig.close()


def test_a_record_may_name_a_partition_that_is_added_while_its_checkpoint_is_staged(
    spark: Any, broker: Any, topic: Topics
) -> None:
    settings = {"partition": "p", "on_bad_record": OnBadRecord.DROP}
    rig = Rig(spark, broker.bootstrap_servers, topic(partitions=2), **settings)
    rig.stage(names(0, 5), partition=1)
    admin = KafkaAdminClient(bootstrap_servers=rig.servers)
    admin.create_partitions({rig.topic: NewPartitions(3)})
    # The broker answers before its own metadata knows of the new one.
    assert eventually(lambda: len(admin.describe_topics([rig.topic])[0]["partitions"]) == 3, PATIENCE_S)
    admin.close()
    with pytest.raises(EnvironmentFault, match="has 3 partitions") as given_up:
        rig.stage(names(5, 5), partition=2, barrier=FIVE)
    assert given_up.value.restartable
    # As the job does: the sweep aborts it, and the micro-batches run again.
    for found in rig.client.list_open_transactions(rig.job):
        rig.client.abort_open(found.transactional_id)
    again = rig.stage(names(0, 5), partition=1), rig.stage(names(5, 5), partition=2, barrier=FIVE)
    rig.commit(*again)
    assert sum(task.dropped for one in again for task in one.tasks) == 0
    assert rig.seen() == Counter(names(0, 10))
    rig.close()


def test_checkpoints_that_do_not_align_and_brokers_that_verify_nothing_are_refused(rig: Rig) -> None:
    config = CheckpointConfig(mode=CheckpointingMode.AT_LEAST_ONCE, restart_budget_ms=10_000)
    fields = rig.context.schema
    with pytest.raises(ConfigError, match=r"atomic.*AT_LEAST_ONCE"):
        rig.sink.preflight(rig.spark, sink_context_of(rig.job, OwnerEpoch(1), "out", fields, config))
    admin = KafkaAdminClient(bootstrap_servers=rig.servers)

    def verify(value: str) -> None:
        (broker,) = (str(one["broker_id"]) for one in admin.describe_cluster()["brokers"])
        admin.alter_configs([ConfigResource(ConfigResourceType.BROKER, broker, {VERIFICATION: value})])

    try:
        verify("false")
        with pytest.raises(ConfigError, match=f"{VERIFICATION}=false"):
            rig.sink.preflight(rig.spark, rig.context)
    finally:
        verify("true")
        admin.close()
    rig.sink.preflight(rig.spark, rig.context)


def test_older_brokers_and_copies_of_tasks_are_refused_by_name(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KafkaWire, "verifies_partitions", lambda self: False)
    with pytest.raises(ConfigError, match=r"older than Kafka 3\.7"):
        rig.sink.preflight(rig.spark, rig.context)
