"""A transaction that all tasks of a checkpoint share: tickets, counts, owners, what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark import BarrierRecords, DeadLetter, DeliveryGuarantee, KafkaSink, OnBadRecord
from flinkish_spark.checkpoint.ownership import seal_open_ids, take_over
from flinkish_spark.checkpoint.staging import StagingContext
from flinkish_spark.connectors.kafka.atomic import AtomicWriter, Owners
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.session import Ticket
from flinkish_spark.connectors.kafka.client.settings import SharedProducer
from flinkish_spark.connectors.kafka.client.shared_transaction import SHARED_TASK, why_other_attempts
from flinkish_spark.connectors.kafka.client.transactions import (
    Evidence,
    KafkaCommittable,
    Liveness,
    why_not_counted,
)
from flinkish_spark.connectors.kafka.writer import KafkaCommitter, KafkaSinkCommittable
from flinkish_spark.contracts.sink import GroupOffsets, SinkContext, StageRequest
from flinkish_spark.core.errors import ConfigError, CorruptObjectError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.decisions import TriggerRecord
from flinkish_spark.protocol.ids import (
    BatchId,
    CheckpointId,
    CheckpointPurpose,
    JobUuid,
    Lineage,
    OwnerEpoch,
    TransactionalId,
)
from flinkish_spark.protocol.records import Barrier, CommitAnswer, Committable, Outcome, TaskAck
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.transport.routing import spark_hash_int
from tests.support.clocks import ManualClock

JOB = JobUuid("a" * 32)
FIRST, SECOND = Ticket(7, 0), Ticket(7, 1)


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delivery": DeliveryGuarantee.AT_LEAST_ONCE}, "DeliveryGuarantee.AT_LEAST_ONCE"),
        ({"barriers": BarrierRecords.EACH_CHECKPOINT}, "barrier records"),
        ({"on_bad_record": DeadLetter("letters")}, "'letters'"),
        ({"on_oversize": DeadLetter("large")}, "'large'"),
        ({"atomic": "yes"}, "atomic is"),
    ],
)
def test_what_cannot_be_in_one_transaction_is_refused_where_the_sink_is_made(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        KafkaSink("broker:9092", "out", **{"atomic": True, **settings})


def test_bad_records_may_be_left_out() -> None:
    assert KafkaSink("broker:9092", "out", atomic=True, on_bad_record=OnBadRecord.DROP).atomic
    assert not KafkaSink("broker:9092", "out").atomic


# -- one attempt ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ticket", "other", "follows"),
    [
        (FIRST, None, True),
        (SECOND, None, False),
        (SECOND, FIRST, True),
        (Ticket(7, 2), FIRST, False),
        (FIRST, FIRST, False),
        # Its epochs are used up, so that the id has got another producer id.
        (Ticket(8, 0), Ticket(7, 32_766), True),
        (Ticket(8, 1), Ticket(7, 32_766), False),
        # One came in between: the last epoch of the old producer id is not the one before.
        (Ticket(8, 0), Ticket(7, 32_765), False),
        (Ticket(7, 32_766), Ticket(7, 32_765), True),
    ],
)
def test_a_ticket_follows_the_one_before_it(ticket: Ticket, other: Ticket | None, follows: bool) -> None:
    assert ticket.follows(other) is follows


@pytest.mark.parametrize(
    ("before", "after", "given", "is_alone"),
    [
        ({}, {"a": FIRST}, {"a": FIRST}, True),
        ({"a": FIRST}, {"a": SECOND}, {"a": SECOND}, True),
        ({}, {}, {"a": None}, True),
        ({"a": FIRST}, {"a": FIRST}, {"a": None}, True),
        # Another attempt wrote nothing that counts, but may have written.
        ({}, {"a": FIRST}, {"a": None}, False),
        # One came before, one came behind the attempt that counts.
        ({}, {"a": SECOND}, {"a": SECOND}, False),
        ({}, {"a": SECOND}, {"a": FIRST}, False),
        ({}, {"a": FIRST, "b": SECOND}, {"a": FIRST, "b": SECOND}, False),
    ],
)
def test_any_other_ticket_is_a_doubt(
    before: Mapping[str, Ticket],
    after: Mapping[str, Ticket],
    given: Mapping[str, Ticket | None],
    is_alone: bool,
) -> None:
    assert (why_other_attempts(before, after, given) == "") is is_alone


# -- the count --------------------------------------------------------------------------------------


class Leaders:
    """In the place of `KafkaWire`: the last sequence number of each partition."""

    def __init__(self, last: Mapping[tuple[str, int], int | None]) -> None:
        self._last = last

    def last_sequences(self, places: Sequence[tuple[str, int]], *_: int) -> dict[Any, int | None]:
        return {place: self._last.get(place) for place in places}


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({("out", 0): 4, ("out", 1): None}, ""),
        ({("out", 0): 3, ("out", 1): None}, "partition 0 of topic out has 4 records"),
        ({("out", 0): None, ("out", 1): None}, "partition 0 of topic out has 0 records"),
        # Where its tasks wrote nothing somebody else has.
        ({("out", 0): 4, ("out", 1): 0}, "partition 1 of topic out has 1 records"),
    ],
)
def test_what_leaders_have_is_what_tasks_were_told(last: Any, words: str) -> None:
    why = why_not_counted(Leaders(last), {"out": [5, 0]}, 7, 1)  # type: ignore[arg-type]
    assert why.startswith(words) and bool(why) is bool(words)


def test_tasks_go_on_where_the_micro_batch_before_ended() -> None:
    told = SharedProducer(7, 1, {"out": (5, 0)}, "ticket")
    assert [told.find_next_sequence(("out", p)) for p in range(3)] == [5, 0, None]
    assert told.find_next_sequence(("other", 0)) is None


# -- owners -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partitions", "most", "tasks"), [({"a": 4}, 2, 2), ({"a": 3, "b": 9}, 200, 9), ({"a": 1}, 8, 1)]
)
def test_no_more_tasks_than_partitions_and_a_route_to_each(
    partitions: dict[str, int], most: int, tasks: int
) -> None:
    owners = Owners(partitions, "a", most)
    assert owners.tasks == tasks
    assert [spark_hash_int(route) % tasks for route in owners._routes()] == list(range(tasks))


# -- committables -----------------------------------------------------------------------------------


def staged(block: int = 1, sequences: tuple[int, ...] = (5, 0)) -> KafkaSinkCommittable:
    name = TransactionalId(JOB, OwnerEpoch(1), block, SHARED_TASK, 0)
    handle = KafkaCommittable(str(name), block, 0, Evidence("out", 0, 7), 5)
    return KafkaSinkCommittable(handle, next_sequences={"out": sequences})


def test_a_committable_is_stored_with_its_count() -> None:
    assert KafkaSinkCommittable.of(staged().to_payload()) == staged()
    plain = KafkaSinkCommittable(staged().handle)
    assert "next_sequences" not in plain.to_payload()


@pytest.mark.parametrize("stored", [5, {"out": 5}, {"out": [-1]}, {"out": [True]}, {"out": ["1"]}])
def test_a_count_that_cannot_be_is_damage(stored: Any) -> None:
    with pytest.raises(CorruptObjectError):
        KafkaSinkCommittable.of({**staged().to_payload(), "next_sequences": stored})


class Broker:
    """In the place of `TransactionClient`: everything is open, and counted as said."""

    def __init__(self, why: str = "") -> None:
        self.why, self.asked = why, list[Any]()
        self.commits = 0

    def commit(self, handle: KafkaCommittable) -> CommitAnswer:
        self.commits += 1
        return CommitAnswer(Outcome.COMMITTED, handle.transactional_id)

    def is_alive(self, handles: Any) -> dict[KafkaCommittable, Liveness]:
        return {handle: Liveness(True, "Ongoing") for handle in handles}

    def why_not_counted(self, handle: KafkaCommittable, sequences: Mapping[str, Sequence[int]]) -> str:
        self.asked.append(dict(sequences))
        return self.why


def why_dead(broker: Broker, *of: KafkaSinkCommittable) -> Mapping[int, str]:
    committer = KafkaCommitter(broker, SimpleNamespace(uid="out"), shows_whole=True)  # type: ignore[arg-type]
    return committer.why_dead([Committable("out", one.to_payload()) for one in of])


def test_the_newest_count_is_compared_before_the_decision() -> None:
    """The transaction goes on from one micro-batch to the next, and so does its count."""
    broker = Broker()
    assert why_dead(broker, staged(sequences=(5, 0)), staged(sequences=(9, 3))) == {}
    assert broker.asked == [{"out": (9, 3)}]
    assert "too few" in why_dead(Broker("too few"), staged(), staged())[1]


def test_a_checkpoint_in_two_transactions_would_show_in_parts() -> None:
    broker = Broker()
    assert list(why_dead(broker, staged(1), staged(2), staged(2))) == [0]
    assert broker.asked == []


def test_a_transaction_of_several_micro_batches_is_ended_once() -> None:
    broker = Broker()
    committer = KafkaCommitter(broker, SimpleNamespace(uid="out"), shows_whole=True)  # type: ignore[arg-type]
    told = [Committable("out", one.to_payload()) for one in (staged(), staged(sequences=(9, 0)))]
    answers = committer.commit(CheckpointId(5), told)
    assert [one.outcome for one in answers] == [Outcome.COMMITTED] * 2
    assert broker.commits == 1


# -- the mark beside the input's position -----------------------------------------------------------


class Shared:
    """In the place of an open transaction that holds records."""

    is_empty = False

    def __init__(self) -> None:
        self.notes: list[str] = []

    def use_wire(self, wire: Any) -> None:
        """Use another connection."""

    def commit_offsets(self, group: str, offsets: Any, note: str) -> None:
        self.notes.append(note)


@pytest.mark.parametrize("is_of_a_later_owner", [False, True])
def test_the_mark_of_a_barrier_that_was_given_up_is_left_by_no_later_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_of_a_later_owner: bool
) -> None:
    """A micro-batch runs again and keeps its barrier, 2; behind it comes one with barrier 3."""
    job_dir = JobDir(LocalStore(tmp_path))
    ownership = take_over(job_dir, ManualClock(), lambda: "a" * 16)
    job_dir.create_trigger(TriggerRecord(CheckpointId(1), ownership.epoch, CheckpointPurpose.PERIODIC, 0))
    job_dir.create_trigger(TriggerRecord(CheckpointId(2), ownership.epoch, CheckpointPurpose.PERIODIC, 0))
    if is_of_a_later_owner:
        ownership = take_over(job_dir, ManualClock(), lambda: "b" * 16)
    seal_open_ids(ownership, ManualClock())
    monkeypatch.setattr(StagingContext, "_find_drawn", lambda self, batch: CheckpointId(batch.value + 1))
    unused: Any = None
    staging = StagingContext(JOB, ownership, Lineage(0), unused, ManualClock(), unused)
    connection = KafkaConnection("broker:9092")
    known = SimpleNamespace(committed_offsets=lambda group: {})
    monkeypatch.setattr(KafkaAdmin, "from_wire", staticmethod(lambda wire: known))
    context = SinkContext(JOB, ownership.epoch, "out", unused, unused, "", unused, unused, ownership.timeline)
    sink: Any = SimpleNamespace(connection=connection)
    writer, shared = AtomicWriter(sink, context, unused), Shared()
    open_at_the_end = []
    for batch in (1, 2):
        writer._open = None
        barrier = TaskAck(0, 1, 7, (Barrier(CheckpointId(batch + 1), 0),))
        monkeypatch.setattr(
            writer, "_write", lambda *given, one=barrier: [{**one.to_json(), "committable": 0}]
        )
        request = StageRequest(
            unused,
            Lineage(0),
            BatchId(batch),
            batch,
            staging.checkpoint_of(BatchId(batch)),
            lambda: [GroupOffsets(connection.servers, "readers", {("in", 0): 9})],
        )
        writer._stage(shared, unused, request)  # type: ignore[arg-type]
        open_at_the_end.append(writer._open is not None)
    marks = [Mark.parse(note, JOB) for note in shared.notes]
    ours = [mark for mark in marks if mark and not ownership.timeline.why_not_ours(mark, CheckpointId(9))]
    assert ours == marks
    assert [int(mark.checkpoint) for mark in ours] == ([3] if is_of_a_later_owner else [2, 3])
    assert open_at_the_end == [is_of_a_later_owner, False]
