"""The store of completed checkpoints behind a real coordinator: what is pinned, what goes, and when."""

from __future__ import annotations

from typing import Any

import pytest

from flinkish_spark.checkpoint.ownership import take_over
from flinkish_spark.checkpoint.retention import CompletedCheckpoints
from flinkish_spark.core.errors import CorruptObjectError, FencedError, StoreError
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.lineage import RewindOrder, Tables
from flinkish_spark.protocol.retention import CheckpointRetention
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import Fault, Rig, by_hand

RETAIN, DELETE = CheckpointRetention


class Pins:
    """Notes which checkpoints are pinned."""

    def __init__(self) -> None:
        self.ids: set[CheckpointId] = set()
        self.failing: list[Exception] = []

    def pin(self, decision: Decision) -> None:
        if self.failing:
            raise self.failing.pop(0)
        self.ids.add(decision.checkpoint)

    def list_pinned(self) -> frozenset[CheckpointId]:
        return frozenset(self.ids)

    def clean(self, require_owner: Any) -> None:
        pass

    def unpin(self, checkpoint: CheckpointId) -> None:
        self.ids.discard(checkpoint)


class Keeping:
    """A rig whose receipts are followed by the deletion of what is too old."""

    def __init__(self, **settings) -> None:
        config = by_hand(**{"retained": 2, **settings})
        self.pins, self.in_use = Pins(), frozenset()
        self.rig = Rig(config, on_receipt=lambda decision: self.kept.on_confirmed(decision))
        self.kept = CompletedCheckpoints(
            self.rig.job_dir, config, self.pins, lambda: self.in_use, self.rig.ownership
        )  # type: ignore[arg-type]

    def take(self, count: int = 1, purpose: CheckpointPurpose = CheckpointPurpose.USER) -> None:
        for _ in range(count):
            self.rig.take(purpose, "/sp" if purpose.is_savepoint else "")

    @property
    def left(self) -> list[int]:
        """The ids that can be gone back to."""
        commits = [int(d.checkpoint) for d in self.rig.job_dir.live_commits()]
        assert commits == sorted(int(one) for one in self.pins.ids)
        return commits


def test_a_new_checkpoint_takes_the_place_of_the_oldest() -> None:
    """Behaviour 69."""
    keeping = Keeping()
    lefts = []
    for _ in range(4):
        keeping.take()
        lefts.append(keeping.left)
    assert lefts == [[1], [1, 2], [2, 3], [3, 4]]
    assert keeping.rig.objects(1) == []


def test_what_could_not_be_pinned_behind_the_decision_is_pinned_behind_the_receipt(caplog) -> None:
    keeping = Keeping()
    keeping.take()
    decision = keeping.rig.job_dir.decision(CheckpointId(1))
    keeping.pins.ids.clear()
    keeping.pins.failing = [StoreError("cannot pin checkpoint 1", why="no room")]
    keeping.kept.on_decided(decision)
    assert keeping.pins.ids == set() and "checkpoint 1 is pinned later" in caplog.text
    keeping.kept.on_confirmed(decision)
    assert keeping.left == [1]
    keeping.kept.on_decided(decision)
    assert keeping.left == [1]


def test_a_checkpoint_that_fails_takes_nobodys_place() -> None:
    """Behaviours 70, 71: neither do ids that are still open."""
    keeping = Keeping(retained=1, timeout_ms=1_000)
    keeping.take()
    for _ in range(3):
        keeping.rig.ask()
        keeping.rig.tick(1_000)
    assert keeping.left == [1]
    keeping.rig.store.faults = [("/decision.json", Fault.REFUSED)]
    keeping.rig.ask()
    keeping.rig.run_batch(keeping.rig.control.offered[-1])
    assert (keeping.rig.confirmed, keeping.left) == ([1], [1])


def test_the_newest_stays_while_younger_ones_are_in_flight() -> None:
    """Behaviour 71."""
    keeping = Keeping(retained=1, max_concurrent=3)
    rig = keeping.rig
    rig.threads.held = ("complete",)
    for checkpoint in (1, 2, 3):
        rig.ask()
        rig.run_batch(checkpoint)
    for checkpoint in (1, 2, 3):
        rig.threads.let(f"complete-{checkpoint}")
        rig.tick()
        assert keeping.left == [checkpoint]


def test_savepoints_take_no_place() -> None:
    """Behaviour 74."""
    keeping = Keeping()
    keeping.take(2)
    keeping.take(2, CheckpointPurpose.SAVEPOINT)
    assert keeping.left == [1, 2, 3, 4]
    keeping.take()
    assert keeping.left == [2, 3, 4, 5]


def test_what_is_read_or_ordered_stays() -> None:
    """Behaviour 77: deleting waits for readers and does not pass them."""
    keeping = Keeping(retained=1)
    keeping.take(2)
    keeping.in_use = frozenset({CheckpointId(2)})
    keeping.take(2)
    assert keeping.left == [2, 3, 4]
    keeping.in_use = frozenset()
    order = RewindOrder("order-1", CheckpointId(3), Tables.KEEP, "wanted", 0)
    keeping.rig.job_dir.create_rewind_order(order)
    keeping.take()
    assert keeping.left == [3, 5]


@pytest.mark.parametrize("error", [StoreError("no room"), CorruptObjectError("state is gone")])
def test_a_checkpoint_that_cannot_be_pinned_is_complete_all_the_same(error, caplog) -> None:
    keeping = Keeping()
    keeping.pins.failing = [error]
    keeping.take()
    assert keeping.rig.answers == ["user=COMPLETED"]
    assert "cannot be gone back to later" in caplog.text


def test_what_cannot_be_deleted_now_goes_later(caplog) -> None:
    """Behaviour 70 turned round: the new one is there before the old one goes."""
    keeping = Keeping(retained=1)
    keeping.take()
    keeping.rig.store.faults = [("1/decision.json", Fault.REFUSED)]
    keeping.take()
    assert "old checkpoints are deleted later" in caplog.text
    assert keeping.rig.confirmed == [1, 2]
    keeping.take()
    assert keeping.left == [3]


def test_an_old_checkpoint_that_cannot_be_read_keeps_nobody_from_completing(caplog) -> None:
    """Behaviour 72 turned round: only the newest has to be whole for the job to go on."""
    keeping = Keeping(retained=3)
    keeping.take(2)
    keeping.rig.store.objects["checkpoints/1/decision.json"] = b"torn"
    keeping.kept = CompletedCheckpoints(
        keeping.rig.job_dir,
        keeping.rig.job.config,
        keeping.pins,
        lambda: frozenset(),
        keeping.rig.ownership,
    )  # type: ignore[arg-type]
    keeping.take()
    assert keeping.rig.coordinator.failure is None
    assert keeping.rig.answers[-1] == "user=COMPLETED"
    assert caplog.text


def test_a_cancelled_job_keeps_its_checkpoints_unless_told_otherwise() -> None:
    """Behaviours 60, 75."""
    keeping = Keeping(retention=RETAIN)
    keeping.take(2)
    keeping.kept.on_cancelled(keeping.rig.clock)
    assert keeping.left == [1, 2]


def test_a_cancelled_job_can_delete_them_and_counts_its_ids_on() -> None:
    """Behaviours 11, 75: what was pending is sealed first."""
    keeping = Keeping(retention=DELETE)
    keeping.take(2)
    keeping.rig.ask()
    keeping.kept.on_cancelled(keeping.rig.clock)
    assert (keeping.left, keeping.rig.verdict(4)) == ([], Verdict.ABORT)
    assert Rig(store=keeping.rig.store).take() == 5
    empty = Keeping(retention=DELETE)
    empty.kept.on_cancelled(empty.rig.clock)
    assert empty.rig.store.list("checkpoints") == ()


def test_who_was_fenced_deletes_nothing() -> None:
    """Behaviour 75: they are the newer owner's checkpoints now."""
    keeping = Keeping(retention=DELETE)
    keeping.take()
    take_over(keeping.rig.job_dir, ManualClock())
    with pytest.raises(FencedError):
        keeping.kept.on_cancelled(keeping.rig.clock)
    assert keeping.left == [1]


def test_a_savepoint_is_protected_before_the_next_checkpoint_can_complete() -> None:
    """Behaviour 77: its export begins behind its receipt, and so does the next decision."""
    keeping = Keeping(retained=1, max_concurrent=2)
    rig, there = keeping.rig, []
    keeping.kept = CompletedCheckpoints(
        rig.job_dir, rig.job.config, keeping.pins, lambda: rig.coordinator.exporting, rig.ownership
    )  # type: ignore[arg-type]
    rig.on_savepoint = lambda decision: there.append(decision.checkpoint in keeping.pins.ids)
    rig.threads.held = ("complete-1", "savepoint")
    rig.ask(CheckpointPurpose.SAVEPOINT, "/sp")
    rig.run_batch(1)
    rig.ask()
    rig.run_batch(2)
    rig.threads.let("complete-1")
    rig.tick()
    assert rig.confirmed == [1, 2]
    rig.threads.let("savepoint-1")
    assert there == [True]
