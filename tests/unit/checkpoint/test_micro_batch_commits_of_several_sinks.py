"""Commits of several sinks of a plain query: one that loses its data, or is away, and the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.checkpoint.micro_batch_commits import Lease, MicroBatchCommits, settle_micro_batch
from flinkish_spark.contracts.sink import Committer, CompletedCheckpoint, StageResult
from flinkish_spark.core.errors import (
    AnotherTimelineError,
    BrokerUnavailableError,
    CommittableLostError,
    FencedError,
    FlinkishError,
    JobDirError,
)
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.protocol.ids import BatchId, CheckpointId
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, StagedBatch, TaskAck
from tests.support.door_files import place


class Died(BaseException):
    """The process died behind the decision."""


class DieBehindTheDecision(SilentObserver):
    def on_step_end(self, step: Any, subject: str) -> None:
        if step is Step.DECISION:
            raise Died


@dataclass
class System:
    """A sink's system: staged data by id, and its state."""

    uid: str
    lifetime_ms: int | None = None
    state: dict[int, str] = field(default_factory=dict)
    is_away: bool = False
    completes: Outcome = Outcome.COMMITTED

    @property
    def shown(self) -> list[int]:
        return [one for one, state in self.state.items() if state == "committed"]


class FakeCommitter(Committer):
    def __init__(self, system: System, log: list[str]) -> None:
        self.system, self.log = system, log
        self.staged_lifetime_ms = system.lifetime_ms

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> list[CommitAnswer]:
        self.log.append(self.system.uid)
        if self.system.is_away:
            return [CommitAnswer(Outcome.RETRY, f"{self.system.uid} is away")]
        answers = []
        for one in committables:
            number = one.payload["id"]
            if self.system.state[number] == "aborted":
                return [*answers, CommitAnswer(Outcome.LOST, "rolled back", is_proven_aborted=True)]
            self.system.state[number] = "committed"
            answers.append(CommitAnswer(Outcome.COMMITTED))
        return answers

    def checkpoint_complete(self, completed: CompletedCheckpoint) -> CommitAnswer:
        return CommitAnswer(self.system.completes, "the parts are gone")

    def abort(self, committables: Sequence[Committable]) -> list[CommitAnswer]:
        for one in committables:
            self.system.state[one.payload["id"]] = "aborted"
        return [CommitAnswer(Outcome.COMMITTED) for _ in committables]

    def why_dead(self, committables: Sequence[Committable]) -> dict[int, str]:
        return {}

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        names = {one.payload["id"] for one in kept if one.sink == self.system.uid}
        for number, state in self.system.state.items():
            if state == "open" and number not in names:
                self.system.state[number] = "aborted"
        return 0

    def task_of(self, committable: Committable) -> int | None:
        return 0


class Rig:
    def __init__(self, folder: Path, *systems: System) -> None:
        self.folder, self.systems, self.log = folder, systems, list[str]()
        self._staged = 0
        for batch in range(3):
            (folder / "offsets").mkdir(exist_ok=True)
            (folder / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{batch}")

    def driver(self, observer: Any = None, name: str = "driver") -> MicroBatchCommits:
        def make(ownership: object) -> dict[str, Committer]:
            return {one.uid: FakeCommitter(one, self.log) for one in self.systems}

        return MicroBatchCommits(place(self.folder), make, observer or SilentObserver(), name)

    def stage(self, lease: Lease, batch: int, digest: int = 7) -> StagedBatch:
        self._staged += 1
        for one in self.systems:
            one.state[self._staged] = "open"
        result = StageResult((TaskAck(0, 3, digest),), ({"id": self._staged},))
        return lease.to_staged_batch(BatchId(batch), {one.uid: result for one in self.systems})

    def run(self, batch: int, *, observer: Any = None, name: str = "driver", digest: int = 7) -> None:
        driver = self.driver(observer, name)
        if driver.is_confirmed(BatchId(batch)):
            return
        lease = driver.plan()
        if not driver.is_confirmed(BatchId(batch)):
            driver.commit(self.stage(lease, batch, digest))

    def decide(self, batch: int = 0) -> None:
        with pytest.raises(Died):
            self.run(batch, observer=DieBehindTheDecision())


def test_a_sink_that_lost_its_data_costs_no_other_sink_its_own(tmp_path: Path) -> None:
    """Also if it cannot be replaced: a person settles what one sink has lost, and nothing else is left."""
    rig = Rig(tmp_path, first := System("first"), second := System("second"))
    rig.decide()
    first.state[1] = "aborted"
    with pytest.raises(CommittableLostError, match="3 of its 3 rows for sink 'first' are lost") as lost:
        rig.run(0, name="next", digest=8)
    assert "second" not in str(lost.value)
    assert second.shown == [1] and not first.shown
    settle_micro_batch(place(tmp_path), 0)
    rig.run(0, name="third")
    rig.run(1, name="third")
    assert second.shown == [1, 3] and first.shown == [3]


def test_what_two_sinks_have_lost_is_named_and_replaced_together(tmp_path: Path) -> None:
    rig = Rig(tmp_path, first := System("first"), second := System("second"), third := System("third"))
    rig.decide()
    first.state[1] = third.state[1] = "aborted"
    with pytest.raises(CommittableLostError, match=r"'first'.*'third'"):
        rig.run(0, name="other", digest=8)
    rig.run(0, name="same")
    assert first.shown == third.shown == [3] and second.shown == [1]
    assert "open" not in {state for one in rig.systems for state in one.state.values()}


def test_a_sink_that_is_away_does_not_keep_others_from_their_commit(tmp_path: Path) -> None:
    """Those whose data expires come first."""
    rig = Rig(tmp_path, database := System("database"), topic := System("topic", lifetime_ms=60_000))
    rig.decide()
    database.is_away = True
    with pytest.raises(BrokerUnavailableError, match="sink 'database'"):
        rig.run(0, name="next")
    assert topic.shown == [1] and rig.log == ["topic", "database"]
    database.is_away = False
    rig.run(0, name="last")
    assert database.shown == topic.shown == [1]


@pytest.mark.parametrize("error", [FencedError("replaced"), AnotherTimelineError("a copy", found=9)])
def test_a_driver_that_is_not_the_one_touches_no_further_sink(
    tmp_path: Path, error: Exception, monkeypatch: Any
) -> None:
    rig = Rig(tmp_path, first := System("first"), second := System("second"))
    rig.decide()
    real = FakeCommitter.commit

    def refuse(self: FakeCommitter, *given: Any) -> list[CommitAnswer]:
        if self.system is first:
            raise error
        return real(self, *given)

    with monkeypatch.context() as broken, pytest.raises(type(error)):
        broken.setattr(FakeCommitter, "commit", refuse)
        rig.run(0, name="next")
    assert not second.shown


def test_a_sink_that_cannot_complete_leaves_no_receipt(tmp_path: Path) -> None:
    rig = Rig(tmp_path, files := System("files", completes=Outcome.LOST))
    with pytest.raises(CommittableLostError, match="cannot complete batch 0"):
        rig.run(0)
    assert not rig.driver().is_confirmed(BatchId(0))
    files.completes = Outcome.COMMITTED
    rig.run(0, name="next")
    assert rig.driver().is_confirmed(BatchId(0)) and files.shown == [1]


def test_a_driver_that_was_replaced_is_told_so_and_nothing_else(tmp_path: Path) -> None:
    rig = Rig(tmp_path, System("one"))
    zombie = rig.driver(name="zombie")
    staged = rig.stage(zombie.plan(), 0)
    for batch in range(2):
        rig.run(batch, name="successor")
    with pytest.raises(FencedError, match="taken this job over"):
        zombie.commit(staged)


def test_a_checkpoint_that_was_set_back_is_refused_before_anything_is_staged(tmp_path: Path) -> None:
    rig = Rig(tmp_path, System("one"))
    for batch in range(2):
        rig.run(batch)
    with pytest.raises(JobDirError, match="set back"):
        rig.driver().is_confirmed(BatchId(0))


@pytest.mark.parametrize("error", [OSError("no answer"), BrokerUnavailableError("away")])
def test_a_sweep_that_fails_ends_no_query(tmp_path: Path, error: Exception, monkeypatch: Any) -> None:
    rig = Rig(tmp_path, one := System("one"))
    rig.run(0)
    before = rig.driver()._dir.newest_owner()

    def fail(*_: object) -> int:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(FakeCommitter, "sweep", fail)
        rig.run(1)
    assert one.shown == [1, 2]
    # Leftovers may have the names of the next attempt, so that one is another owner's.
    rig.run(2)
    assert one.shown == [1, 2, 3] and rig.driver()._dir.newest_owner() > before


def test_a_sink_that_is_gone_is_asked_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path, System("one"), System("two"))
    rig.decide()
    rig.systems = rig.systems[:1]
    with pytest.raises(FlinkishError, match="holds decided data of sink 'two'"):
        rig.run(0, name="next")
