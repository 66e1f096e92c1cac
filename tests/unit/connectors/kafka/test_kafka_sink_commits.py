"""Whole micro-batches or nothing: what the Kafka sink's committer does and answers when transactions died."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.connectors.kafka.client.transactions import Evidence, KafkaCommittable, Liveness
from flinkish_spark.connectors.kafka.writer import BARRIER_TASK, KafkaCommitter, KafkaSinkCommittable
from flinkish_spark.core.errors import BrokerUnavailableError
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome

JOB = JobUuid("a" * 32)
FIVE = CheckpointId(5)
OPEN, COMMITTED, ABORTED, GONE, HIDDEN = "open", "committed", "aborted", "gone", "hidden"
#: What `TransactionClient.commit` answers for each state, and whether it proves an abort.
ANSWERS = {
    OPEN: (Outcome.COMMITTED, False),
    COMMITTED: (Outcome.ALREADY_COMMITTED, False),
    ABORTED: (Outcome.LOST, True),
    GONE: (Outcome.LOST, False),
    HIDDEN: (Outcome.RETRY, False),
}


class Broker:
    """In the place of `TransactionClient`: a state for each transaction, and what was asked."""

    def __init__(self) -> None:
        self.states: dict[KafkaCommittable, str] = {}
        self.looks: list[int] = []
        self.is_away = False
        #: Die between the look and their commit.
        self.doomed: set[KafkaCommittable] = set()

    def commit(self, one: KafkaCommittable) -> CommitAnswer:
        if one in self.doomed:
            self.states[one] = ABORTED
        outcome, is_proven = ANSWERS[self.states[one]]
        if self.states[one] == OPEN:
            self.states[one] = COMMITTED
        return CommitAnswer(outcome, f"{one.transactional_id} was {self.states[one]}", is_proven)

    def abort(self, one: KafkaCommittable) -> CommitAnswer:
        self.states[one] = ABORTED
        return CommitAnswer(Outcome.COMMITTED)

    def is_alive(self, ones: Iterable[KafkaCommittable]) -> dict[KafkaCommittable, Liveness]:
        if self.is_away:
            raise BrokerUnavailableError("nobody answers")
        asked = list(ones)
        self.looks.append(len(asked))
        return {one: Liveness(self.states[one] == OPEN, self.states[one]) for one in asked}


class Rig:
    """A committer, and micro-batches of it: block after block, a task for each state."""

    def __init__(self, *micro_batches: tuple[str, ...]) -> None:
        self.broker = Broker()
        self.committer = KafkaCommitter(self.broker, SimpleNamespace(uid="out"))  # type: ignore[arg-type]
        self.committables: list[Committable] = []
        self.handles: list[KafkaCommittable] = []
        for block, states in enumerate(micro_batches, start=1):
            for task, state in enumerate(states):
                self.add(block, task, state)

    def add(self, block: int, task: int, state: str, barrier_of: int | None = None) -> None:
        name = TransactionalId(JOB, OwnerEpoch(1), block, task, 0)
        handle = KafkaCommittable(str(name), len(self.handles), 0, Evidence("out", 0, 7), 1)
        self.broker.states[handle] = state
        self.handles.append(handle)
        checkpoint = None if barrier_of is None else CheckpointId(barrier_of)
        self.committables.append(Committable("out", KafkaSinkCommittable(handle, checkpoint).to_payload()))

    def commit(self) -> list[str]:
        self.answers = list(self.committer.commit(FIVE, self.committables))
        return [answer.outcome.value for answer in self.answers]

    @property
    def states(self) -> list[str]:
        return [self.broker.states[handle] for handle in self.handles]


def test_what_is_open_is_committed_after_one_look() -> None:
    rig = Rig((OPEN, OPEN), (OPEN, OPEN, OPEN))
    assert rig.commit() == ["COMMITTED"] * 5
    assert rig.broker.looks == [5]


def test_micro_batches_of_one_transaction_need_no_look() -> None:
    rig = Rig((OPEN,), (OPEN,))
    assert rig.commit() == ["COMMITTED"] * 2
    assert rig.broker.looks == []
    rig = Rig((OPEN,), (ABORTED,), (OPEN,))
    assert rig.commit() == ["COMMITTED", "LOST"]
    assert rig.answers[-1].is_proven_aborted
    assert rig.states == [COMMITTED, ABORTED, OPEN]


def test_a_repeated_commit_is_done_again() -> None:
    rig = Rig((OPEN, OPEN), (OPEN,))
    rig.commit()
    assert rig.commit() == ["ALREADY_COMMITTED"] * 3


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_micro_batch_with_a_lost_transaction_is_not_committed_halfway(dead: int) -> None:
    states = [ABORTED if task == dead else OPEN for task in range(3)]
    rig = Rig((OPEN, OPEN), tuple(states), (OPEN, OPEN))
    assert rig.commit() == ["COMMITTED", "COMMITTED", "LOST"]
    assert rig.states == [COMMITTED, COMMITTED, *states, OPEN, OPEN]
    lost = rig.answers[-1]
    assert lost.is_proven_aborted
    assert rig.handles[2 + dead].transactional_id in lost.detail
    assert "1 of the 3 transactions of its micro-batch" in lost.detail


def test_a_loss_without_proof_is_said_to_have_none() -> None:
    rig = Rig((OPEN, ABORTED, GONE))
    assert rig.commit() == ["LOST"]
    assert not rig.answers[-1].is_proven_aborted
    assert Rig((GONE,)).commit() == ["LOST"]


def test_a_micro_batch_that_was_committed_in_part_is_committed_up_to_the_first_lost_one() -> None:
    rig = Rig((COMMITTED, OPEN, ABORTED, OPEN), (OPEN, OPEN))
    assert rig.commit() == ["ALREADY_COMMITTED", "COMMITTED", "LOST"]
    assert rig.answers[-1].is_proven_aborted
    # Nothing behind the last answer is committed: it can be staged again.
    assert rig.states == [COMMITTED, COMMITTED, ABORTED, OPEN, OPEN, OPEN]


def test_what_somebody_else_committed_behind_a_lost_one_is_never_staged_again() -> None:
    rig = Rig((OPEN, ABORTED, COMMITTED))
    assert rig.commit() == ["COMMITTED", "LOST"]
    assert not rig.answers[-1].is_proven_aborted
    assert "was committed, by nobody of this package" in rig.answers[-1].detail


def test_nothing_is_committed_or_lost_while_a_part_of_the_micro_batch_is_unknown() -> None:
    for states in ((OPEN, HIDDEN), (HIDDEN, OPEN), (ABORTED, HIDDEN, OPEN), (HIDDEN, ABORTED)):
        rig = Rig(states)
        assert rig.commit() == ["RETRY"]
        assert tuple(rig.states) == states
    assert Rig((COMMITTED, OPEN, HIDDEN)).commit() == ["ALREADY_COMMITTED", "RETRY"]


def test_a_transaction_that_dies_after_the_look_is_looked_at_again() -> None:
    rig = Rig((OPEN, OPEN, OPEN))
    rig.broker.doomed = {rig.handles[1]}
    assert rig.commit() == ["COMMITTED", "RETRY"]
    assert rig.commit() == ["ALREADY_COMMITTED", "LOST"]
    assert rig.answers[-1].is_proven_aborted
    assert rig.states == [COMMITTED, ABORTED, OPEN]


def test_an_unanswered_look_is_asked_again() -> None:
    rig = Rig((OPEN, OPEN))
    rig.broker.is_away = True
    assert rig.commit() == ["RETRY"]
    assert rig.states == [OPEN, OPEN]


def test_barrier_records_are_no_part_of_the_look_and_their_loss_is_none() -> None:
    rig = Rig((OPEN, OPEN))
    rig.add(1, BARRIER_TASK, ABORTED, barrier_of=5)
    rig.add(2, 0, OPEN)
    assert rig.commit() == ["COMMITTED", "COMMITTED", "ALREADY_COMMITTED", "COMMITTED"]
    assert rig.broker.looks == [2]


def test_the_same_block_of_another_owner_is_another_micro_batch() -> None:
    rig = Rig((OPEN,))
    name = TransactionalId(JOB, OwnerEpoch(2), 1, 0, 0)
    handle = KafkaCommittable(str(name), 9, 0, Evidence("out", 0, 7), 1)
    rig.broker.states[handle] = ABORTED
    rig.committables.append(Committable("out", handle.to_json()))
    assert rig.commit() == ["COMMITTED", "LOST"]


def test_the_task_is_that_of_the_transactional_id() -> None:
    rig = Rig((OPEN, OPEN, OPEN))
    rig.add(1, BARRIER_TASK, OPEN, barrier_of=5)
    tasks: list[Any] = [rig.committer.task_of(one) for one in rig.committables]
    assert tasks == [0, 1, 2, None]
