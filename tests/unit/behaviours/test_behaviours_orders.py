"""In whatever order the ends of micro-batches are seen, decisions are made in the order of ids."""

from __future__ import annotations

import pytest

from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.ids import CheckpointPurpose as P
from tests.support.coordinator_rig import Rig, by_hand

#: As Spark's EpochCoordinatorSuite has them, and their reverse.
ORDERS = ["12", "21", "1342", "13542", "4321", "54321", "123", "132", "231", "312", "321"]


def in_flight(count: int, purpose: P) -> Rig:
    """Return a job with that many checkpoints staged, each by one micro-batch; the first by number 0."""
    rig = Rig(by_hand(max_concurrent=count + 1))
    for checkpoint in range(1, count + 1):
        rig.ask(purpose, f"/sp{checkpoint}" if purpose.is_savepoint else "", str(checkpoint))
        assert rig.stage(checkpoint) == checkpoint - 1
    assert rig.open == " ".join(f"{n}:ACKNOWLEDGED" for n in range(1, count + 1))
    return rig


def see(rig: Rig, order: str) -> list[list[int]]:
    """Let Spark's commits/N of the checkpoints be seen in an order; return who is confirmed after each."""
    after = []
    for checkpoint in map(int, order):
        rig.commit_log(checkpoint - 1)
        after.append(list(rig.confirmed))
    return after


def decided_batches(rig: Rig) -> list[int]:
    """The micro-batches of all decisions, in the order of the decisions."""
    decisions = [rig.job_dir.decision(CheckpointId(n)) for n in rig.confirmed]
    return [int(batch.batch) for decision in decisions for batch in decision.batches]


@pytest.mark.parametrize("order", ORDERS)
def test_savepoints_wait_for_those_in_front_of_them(order: str) -> None:
    """Behaviour 168: 1, 3, 4 are seen and 1 is decided; with 2 the others follow in their order."""
    rig = in_flight(len(order), P.SAVEPOINT)
    after, seen = see(rig, order), set()
    for checkpoint, confirmed in zip(map(int, order), after, strict=True):
        seen.add(checkpoint)
        first_missing = next(n for n in range(1, 10) if n not in seen)
        assert confirmed == list(range(1, first_missing))
    assert decided_batches(rig) == list(range(len(order)))
    assert rig.committers["a"].called("commit") == [(n + 1, [n]) for n in range(len(order))]


@pytest.mark.parametrize("order", ORDERS)
def test_checkpoints_are_subsumed_by_those_that_are_seen_before_them(order: str) -> None:
    """Behaviour 168: what is overtaken ends, and its micro-batches are decided with the younger one."""
    rig = in_flight(len(order), P.USER)
    see(rig, order)
    rising = [n for i, n in enumerate(map(int, order)) if n > max(map(int, order[:i]), default=0)]
    assert rig.confirmed == rising
    assert sorted(rig.aborted) == sorted(set(map(int, order)) - set(rising))
    assert decided_batches(rig) == list(range(len(order)))
    assert rig.open == ""
