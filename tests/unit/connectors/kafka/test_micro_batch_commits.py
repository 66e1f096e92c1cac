"""The driver's side of the drop-in sink over real files: attempts of micro-batches, crashes and zombies."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from flinkish_spark.checkpoint.decision_point import DeadCommittableError, DecisionError
from flinkish_spark.checkpoint.micro_batch_commits import MicroBatchCommits, find_or_create_uuid
from flinkish_spark.connectors.kafka.client.marks import KafkaMarks
from flinkish_spark.connectors.kafka.client.transactions import (
    Evidence,
    KafkaCommittable,
    Liveness,
    OpenTransaction,
)
from flinkish_spark.connectors.kafka.format.sink import SINK
from flinkish_spark.connectors.stream_writer import find_refreshed_checkpoints
from flinkish_spark.contracts.sink import StageResult
from flinkish_spark.core.errors import (
    AnotherTimelineError,
    BrokerUnavailableError,
    CommittableLostError,
    ConfigError,
    FencedError,
    FlinkishError,
    JobDirError,
    StoreError,
)
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.core.store import CreateResult
from flinkish_spark.foreach_batch.sink_group import settle
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, TransactionalId
from flinkish_spark.protocol.records import CommitAnswer, Outcome, StagedBatch, TaskAck
from tests.support.door_files import decided, make_commits, open_sink_dir, place


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power fails here; the store's own tests sync."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


class Died(BaseException):
    """The process died at a step."""


@dataclass
class Brokers:
    """Transactions as Kafka keeps them: open, committed or aborted, one producer per id and epoch."""

    state: dict[tuple[str, int], str] = field(default_factory=dict)
    rows: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    is_down: bool = False
    forgets: bool = False

    def stage(self, name: str, rows: Sequence[int]) -> KafkaCommittable:
        epoch = self.epochs.get(name, -1) + 1
        if epoch and self.state[name, epoch - 1] == "open":
            self.state[name, epoch - 1] = "aborted"
        self.epochs[name] = epoch
        self.state[name, epoch], self.rows[name, epoch] = "open", list(rows)
        return KafkaCommittable(name, 1, epoch, Evidence("out", 0, 0), len(rows))

    def expire(self, one: KafkaCommittable) -> None:
        self.state[one.transactional_id, one.producer_epoch] = "aborted"

    def visible(self) -> list[int]:
        return sorted(r for key, rows in self.rows.items() if self.state[key] == "committed" for r in rows)

    def open(self) -> list[tuple[str, int]]:
        return [key for key, state in self.state.items() if state == "open"]

    def commit(self, committable: KafkaCommittable) -> CommitAnswer:
        if self.is_down:
            return CommitAnswer(Outcome.RETRY, "down")
        key = (committable.transactional_id, committable.producer_epoch)
        if self.state[key] == "aborted":
            return CommitAnswer(Outcome.LOST, "rolled back", not self.forgets)
        self.state[key] = "committed"
        return CommitAnswer(Outcome.COMMITTED)

    def abort(self, committable: KafkaCommittable) -> CommitAnswer:
        key = (committable.transactional_id, committable.producer_epoch)
        if self.state[key] == "committed":
            return CommitAnswer(Outcome.FENCED)
        self.state[key] = "aborted"
        return CommitAnswer(Outcome.COMMITTED)

    def is_alive(self, committables: Sequence[KafkaCommittable]) -> dict[KafkaCommittable, Liveness]:
        return {
            c: Liveness(self.state[c.transactional_id, c.producer_epoch] == "open", "state")
            for c in committables
        }

    def list_open_transactions(self, job: JobUuid) -> list[OpenTransaction]:
        if self.is_down:
            raise BrokerUnavailableError("down")
        names = {name for name, _ in self.open()}
        parsed = [TransactionalId.parse(name) for name in sorted(names)]
        return [OpenTransaction(p, 1, "Ongoing") for p in parsed if p is not None and p.job == job]

    def abort_open(self, transactional_id: TransactionalId) -> CommitAnswer:
        name = str(transactional_id)
        key = (name, self.epochs[name])
        self.epochs[name] += 1
        if self.state[key] == "open":
            self.state[key] = "aborted"
        self.state[name, self.epochs[name]], self.rows[name, self.epochs[name]] = "aborted", []
        return CommitAnswer(Outcome.COMMITTED)


class DieAt:
    """Dies at the n-th step of any kind."""

    def __init__(self, step: int) -> None:
        self._left = step

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise Died

    def on_step_start(self, step: Step, subject: str) -> None:
        self._count()

    def on_step_end(self, step: Step, subject: str) -> None:
        self._count()


class Group:
    """In the place of KafkaAdmin: one group's notes."""

    def __init__(self) -> None:
        self.notes: dict[tuple[str, int], str] = {}

    def find_committed_notes(self, group: str) -> dict[tuple[str, int], str]:
        return dict(self.notes)

    def commit_offsets(self, group: str, offsets: dict[tuple[str, int], int], how: object, note: str) -> None:
        self.notes.update(dict.fromkeys(offsets, note))


@dataclass
class Driver:
    """One driver over a checkpoint: plans, stages as tasks would, commits."""

    checkpoint: Path
    brokers: Brokers
    observer: DieAt | SilentObserver = field(default_factory=SilentObserver)
    name: str = "driver"
    group: Group | None = None

    def commits(self) -> MicroBatchCommits:
        marks = None
        if self.group is not None:
            marks = KafkaMarks(self.group, find_or_create_uuid(open_sink_dir(self.checkpoint)), SINK, "out")  # type: ignore[arg-type]
        return make_commits(place(self.checkpoint), self.brokers, self.observer, self.name, marks)  # type: ignore[arg-type]

    def stage(self, content: dict[int, list[int]], batch: int = 0) -> StagedBatch:
        lease = self.commits().plan()
        acks, found = [], []
        for task, rows in content.items():
            acks.append(TaskAck(task, len(rows), sum(hash((task, r)) for r in rows)))
            if rows:
                name = TransactionalId(lease.job, lease.owner, 1, task, 0)
                found.append(self.brokers.stage(str(name), rows).to_json())
        return lease.to_staged_batch(BatchId(batch), {SINK: StageResult(tuple(acks), tuple(found))})

    def run(self, batch: int, content: dict[int, list[int]]) -> None:
        """Run a micro-batch as Spark does: offsets, tasks, commit, commits/N; abort if that fails."""
        _write(self.checkpoint / "offsets" / str(batch), f"v1\n{{}}\n{sorted(content.items())}")
        staged = self.stage(content, batch)
        try:
            self.commits().commit(staged)
        except FlinkishError:
            self.commits().abort(staged)
            raise
        _write(self.checkpoint / "commits" / str(batch), "v1\n{}")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _content(batch: int, tasks: int = 3) -> dict[int, list[int]]:
    return {task: [batch * 100 + task * 10 + i for i in range(task + 1)] for task in range(tasks)}


def _all_rows(batches: int) -> list[int]:
    return sorted(row for batch in range(batches) for rows in _content(batch).values() for row in rows)


def _lose_a_decided_part(checkpoint: Path, brokers: Brokers, step: int = 4) -> None:
    """Leave batch 0 decided and committed up to a step, and the transaction of its task 1 rolled back."""
    with pytest.raises(Died):
        Driver(checkpoint, brokers, DieAt(step)).run(0, _content(0))
    (batch,) = decided(checkpoint)[BatchId(0)].batches
    brokers.expire(KafkaCommittable.from_json(batch.committables[1].payload))


def test_a_checkpoint_that_is_an_older_copy_writes_nothing(tmp_path: Path) -> None:
    brokers, group = Brokers(), Group()
    here, backup = tmp_path / "here", tmp_path / "backup"
    for batch in range(2):
        Driver(here, brokers, name="first", group=group).run(batch, _content(batch))
    shutil.copytree(here, backup)
    for batch in range(2, 5):
        Driver(here, brokers, name="second", group=group).run(batch, _content(batch))
    # The first one goes on as if nothing had happened, as a driver does whose folder was put back under it.
    for name in ("first", "third", "second"):
        with pytest.raises(AnotherTimelineError, match=r"holds attempt 5 of this query.* its newest is 2"):
            Driver(backup, brokers, name=name, group=group).run(2, _content(2))
    assert brokers.visible() == _all_rows(5)
    assert brokers.open() == []
    Driver(here, brokers, name="third", group=group).run(5, _content(5))
    assert brokers.visible() == _all_rows(6)


def test_an_older_copy_that_its_own_driver_goes_on_with_is_noticed_at_its_next_attempt(
    tmp_path: Path,
) -> None:
    """Its attempt has the number, and the owner, of the one that was committed meanwhile."""
    brokers, group = Brokers(), Group()
    here, backup = tmp_path / "here", tmp_path / "backup"
    Driver(here, brokers, group=group).run(0, _content(0))
    shutil.copytree(here, backup)
    Driver(here, brokers, group=group).run(1, _content(1))
    with pytest.raises(AnotherTimelineError, match=r"holds attempt 2 of this query.* its newest is 1"):
        Driver(backup, brokers, group=group).run(1, _content(1))
    assert brokers.visible() == _all_rows(2)


def test_an_attempt_that_a_copy_has_given_up_and_the_original_commits_is_noticed(tmp_path: Path) -> None:
    brokers, group = Brokers(), Group()
    here, copy = Driver(tmp_path / "here", brokers, group=group), tmp_path / "copy"
    here.run(0, _content(0))
    _write(here.checkpoint / "offsets" / "1", "v1\n{}\nx")
    staged = here.stage(_content(1), 1)
    shutil.copytree(here.checkpoint, copy)
    elsewhere = Driver(copy, brokers, name="elsewhere", group=group)
    with pytest.raises(Died):
        Driver(copy, brokers, DieAt(2), "elsewhere", group).stage(_content(1), 1)
    for one in staged.committables:
        brokers.state[one.payload["transactional_id"], one.payload["producer_epoch"]] = "open"
    here.commits().commit(staged)
    with pytest.raises(AnotherTimelineError, match=r"holds attempt 2 of this query.* its newest is 1"):
        elsewhere.run(1, _content(1))
    assert brokers.visible() == _all_rows(2)


def test_stretches_are_forgotten_but_for_that_of_the_newest_mark(tmp_path: Path) -> None:
    brokers, group = Brokers(), Group()
    for batch in range(40):
        Driver(tmp_path, brokers, name=f"{batch}", group=group).run(batch, _content(batch))
    kept = list((tmp_path / "flinkish" / "timeline").iterdir())
    assert len(kept) <= 31
    # Nothing is written for long.
    for batch in range(40, 120):
        Driver(tmp_path, brokers, name=f"{batch % 3}", group=group).run(batch, {0: []})
    Driver(tmp_path, brokers, name="last", group=group).run(120, _content(40))
    assert brokers.visible() == _all_rows(41)


def test_of_two_copies_that_run_at_once_the_second_commits_nothing(tmp_path: Path) -> None:
    brokers, group = Brokers(), Group()
    Driver(tmp_path / "one", brokers, name="first", group=group).run(0, _content(0))
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    one = Driver(tmp_path / "one", brokers, name="one", group=group)
    other = Driver(tmp_path / "other", brokers, name="other", group=group)
    _write(other.checkpoint / "offsets" / "1", "v1\n{}\n")
    staged = other.stage(_content(1))
    one.run(1, _content(1))
    with pytest.raises(FlinkishError):
        other.commits().commit(replace(staged, batch=BatchId(1)))
    assert brokers.visible() == _all_rows(2)


def test_clean_batches_use_few_ids_and_leave_nothing_open(tmp_path: Path) -> None:
    brokers = Brokers()
    driver = Driver(tmp_path, brokers)
    for batch in range(60):
        driver.run(batch, _content(batch))
    assert brokers.visible() == _all_rows(60)
    assert not brokers.open()
    # One id per task for ever: brokers remember each id for a week.
    assert len(brokers.epochs) == 3
    assert len(list((tmp_path / "flinkish" / "checkpoints").iterdir())) <= 31


@pytest.mark.parametrize("step", range(1, 15))
def test_a_crash_at_any_step_loses_nothing_and_doubles_nothing(tmp_path: Path, step: int) -> None:
    brokers = Brokers()
    Driver(tmp_path, brokers).run(0, _content(0))
    with pytest.raises(Died):
        Driver(tmp_path, brokers, DieAt(step)).run(1, _content(1))
    survivor = Driver(tmp_path, brokers)
    survivor.run(1, _content(1))
    survivor.run(2, _content(2))
    assert brokers.visible() == _all_rows(3)
    assert not brokers.open()


def test_many_random_crashes_and_zombies_stay_exact(tmp_path: Path) -> None:
    chance = random.Random(4)
    for seed in range(25):
        chance.seed(seed)
        brokers, checkpoint = Brokers(), tmp_path / str(seed)
        zombies: list[tuple[int, StagedBatch]] = []
        for batch in range(6):
            for _ in range(chance.randrange(3)):
                try:
                    Driver(checkpoint, brokers, DieAt(chance.randint(1, 16))).run(batch, _content(batch))
                except Died:
                    continue
                break
            if chance.random() < 0.3 and not (checkpoint / "commits" / str(batch)).exists():
                _write(checkpoint / "offsets" / str(batch), f"v1\n{{}}\n{sorted(_content(batch).items())}")
                staged = Driver(checkpoint, brokers).stage(_content(batch))
                zombies.append((batch, staged))
            if not (checkpoint / "commits" / str(batch)).exists():
                Driver(checkpoint, brokers).run(batch, _content(batch))
            for of_batch, staged in zombies:
                with pytest.raises(FlinkishError):
                    Driver(checkpoint, brokers).commits().commit(
                        replace(staged, batch=BatchId(of_batch + 10))
                    )
            zombies.clear()
        assert brokers.visible() == _all_rows(6), seed
        assert not brokers.open(), seed


def test_many_random_crashes_with_losses_behind_decisions_stay_exact(tmp_path: Path) -> None:
    for seed in range(25):
        chance, brokers, checkpoint = random.Random(seed), Brokers(), tmp_path / str(seed)
        lost = 0
        for batch in range(6):
            for _ in range(chance.randrange(5)):
                try:
                    Driver(checkpoint, brokers, DieAt(chance.randint(1, 16))).run(batch, _content(batch))
                except Died:
                    newest = open_sink_dir(checkpoint).newest_commit()
                    named = [] if newest is None else [one.payload for one in newest.batches[0].committables]
                    for payload in named:
                        key = payload["transactional_id"], payload["producer_epoch"]
                        if key in brokers.open() and chance.random() < 0.4:
                            brokers.state[key] = "aborted"
                            lost += 1
                    continue
                break
            if not (checkpoint / "commits" / str(batch)).exists():
                Driver(checkpoint, brokers).run(batch, _content(batch))
        assert brokers.visible() == _all_rows(6), (seed, lost)
        assert not brokers.open(), seed


def test_a_zombie_cannot_decide_after_a_later_attempt_was_planned(tmp_path: Path) -> None:
    brokers = Brokers()
    _write(tmp_path / "offsets" / "0", "v1\n{}\nx")
    zombie = Driver(tmp_path, brokers)
    staged = zombie.stage(_content(0))
    Driver(tmp_path, brokers).run(0, _content(0))
    with pytest.raises(FencedError, match="taken this job over"):
        zombie.commits().commit(staged)
    assert brokers.visible() == _all_rows(1)
    assert not brokers.open()


@pytest.mark.parametrize("step", range(1, 15))
@pytest.mark.parametrize("again", range(1, 8))
def test_a_checkpoint_that_is_given_up_has_whole_batches_and_nothing_open(
    tmp_path: Path, step: int, again: int
) -> None:
    """Wherever its driver died, and wherever whoever gives it up dies the first time."""
    brokers, group = Brokers(), Group()
    Driver(tmp_path, brokers, group=group).run(0, _content(0))
    with pytest.raises(Died):
        Driver(tmp_path, brokers, DieAt(step), group=group).run(1, _content(1))
    was_decided = BatchId(1) in decided(tmp_path)
    with contextlib.suppress(Died):
        Driver(tmp_path, brokers, DieAt(again), "refresh", group).commits().give_up()
    for _ in range(2):
        Driver(tmp_path, brokers, name="refresh", group=group).commits().give_up()
    assert brokers.visible() == _all_rows(2 if was_decided else 1)
    assert not brokers.open()
    with pytest.raises(FencedError, match="full refresh"):
        Driver(tmp_path, brokers, group=group).run(2, _content(2))


def test_who_lives_on_in_a_checkpoint_that_is_given_up_decides_nothing(tmp_path: Path) -> None:
    brokers = Brokers()
    _write(tmp_path / "offsets" / "0", "v1\n{}\nx")
    zombie = Driver(tmp_path, brokers)
    staged = zombie.stage(_content(0))
    Driver(tmp_path, brokers, name="refresh").commits().give_up()
    with pytest.raises((FencedError, DeadCommittableError)):
        zombie.commits().commit(staged)
    assert not brokers.visible() and not brokers.open()


def test_a_checkpoint_without_an_attempt_is_given_up_without_a_trace(tmp_path: Path) -> None:
    Driver(tmp_path, Brokers()).commits().give_up()
    assert not (tmp_path / "flinkish").exists()


def test_only_checkpoints_of_the_same_flow_of_a_pipeline_are_those_before_its_refresh(tmp_path: Path) -> None:
    flow = tmp_path / "_checkpoints" / "spark_catalog" / "default" / "totals" / "flow"
    for used in flow / "0", flow / "2", flow / "10", flow / "11", flow.parent / "other" / "1":
        find_or_create_uuid(open_sink_dir(used))
    (flow / "3").mkdir()
    (flow / "0.bak").mkdir()
    assert find_refreshed_checkpoints(place(flow / "10")) == [place(flow / "0"), place(flow / "2")]
    assert find_refreshed_checkpoints(place(flow / "0")) == []
    # Elsewhere numbers are somebody's own.
    for number in "1", "2":
        find_or_create_uuid(open_sink_dir(tmp_path / "plain" / number))
    assert find_refreshed_checkpoints(place(tmp_path / "plain" / "2")) == []


def test_a_sealed_attempt_of_an_undecided_batch_is_fenced(tmp_path: Path) -> None:
    brokers = Brokers()
    _write(tmp_path / "offsets" / "0", "v1\n{}\nx")
    zombie, newer = Driver(tmp_path, brokers), Driver(tmp_path, brokers)
    staged = zombie.stage(_content(0))
    later = newer.stage(_content(0))
    with pytest.raises((FencedError, DeadCommittableError)):
        zombie.commits().commit(staged)
    newer.commits().commit(later)
    assert brokers.visible() == _all_rows(1)


@pytest.mark.parametrize("step", [4, 7])
def test_a_lost_part_is_replaced_by_the_same_task_of_the_next_attempt(tmp_path: Path, step: int) -> None:
    """Before anything of its micro-batch is committed, and when a part of it is."""
    brokers = Brokers()
    _lose_a_decided_part(tmp_path, brokers, step)
    Driver(tmp_path, brokers).run(0, _content(0))
    assert brokers.visible() == _all_rows(1)
    assert not brokers.open()
    # The mend is durable: another start finds nothing to do.
    Driver(tmp_path, brokers).run(1, _content(1))
    assert brokers.visible() == _all_rows(2)


@pytest.mark.parametrize("again", range(1, 16))
@pytest.mark.parametrize("step", [4, 7])
def test_a_crash_while_a_lost_part_is_replaced_changes_nothing(tmp_path: Path, step: int, again: int) -> None:
    brokers = Brokers()
    _lose_a_decided_part(tmp_path, brokers, step)
    with contextlib.suppress(Died):
        Driver(tmp_path, brokers, DieAt(again)).run(0, _content(0))
    for batch in range(2):
        Driver(tmp_path, brokers).run(batch, _content(batch))
    assert brokers.visible() == _all_rows(2)
    assert not brokers.open()


def test_what_stands_for_a_lost_part_may_be_lost_in_turn(tmp_path: Path) -> None:
    brokers = Brokers()
    _lose_a_decided_part(tmp_path, brokers)
    driver = Driver(tmp_path, brokers)
    staged = driver.stage(_content(0))
    with pytest.raises(Died):
        # Behind the mend, before its first commit.
        Driver(tmp_path, brokers, DieAt(4)).commits().commit(staged)
    brokers.expire(KafkaCommittable.from_json(staged.committables[0].payload))
    driver.run(0, _content(0))
    assert brokers.visible() == _all_rows(1)
    assert not brokers.open()


@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_commit_that_is_finished_after_many_failed_attempts_is_not_forgotten(
    tmp_path: Path, is_lost: bool, has_marks: bool
) -> None:
    """Its id is far below the newest one, and it is the newest commit all the same."""
    brokers, group, sink = Brokers(), Group() if has_marks else None, open_sink_dir(tmp_path)
    Driver(tmp_path, brokers, group=group).run(0, _content(0))
    with pytest.raises(Died):
        Driver(tmp_path, brokers, DieAt(4), group=group).run(1, _content(1))
    open_commit = sink.newest_commit()
    assert open_commit is not None and sink.receipt(open_commit.checkpoint) is None
    if is_lost:
        brokers.expire(KafkaCommittable.from_json(open_commit.batches[0].committables[1].payload))
    for attempt in range(40):
        in_tasks = Driver(tmp_path, brokers, name=f"{attempt}", group=group)
        in_tasks.stage(_content(1), 1)
        in_tasks.commits().abort(None)
    # Each time Spark dies right before commits/1.
    for name in "last", "again", "and again":
        Driver(tmp_path, brokers, name=name, group=group).run(1, _content(1))
        newest = sink.newest_commit()
        assert newest is not None and newest.checkpoint == open_commit.checkpoint
        assert brokers.visible() == _all_rows(2)
    for batch in range(2, 4):
        Driver(tmp_path, brokers, group=group).run(batch, _content(batch))
    assert brokers.visible() == _all_rows(4)
    assert not brokers.open()
    # Nothing that is old stays for it, once another commit is there.
    assert len(sink.list_checkpoint_ids()) <= 31


@pytest.mark.parametrize("what", ["other rows", "fewer rows", "no rows", "no proof"])
@pytest.mark.parametrize("step", [4, 7])
def test_a_lost_part_that_does_not_match_stops_the_query(tmp_path: Path, what: str, step: int) -> None:
    brokers = Brokers(forgets=what == "no proof")
    _lose_a_decided_part(tmp_path, brokers, step)
    now = {
        "other rows": {**_content(0), 1: [10, 12]},
        "fewer rows": {**_content(0), 1: [10]},
        "no rows": {**_content(0), 1: []},
        "no proof": _content(0),
    }[what]
    driver = Driver(tmp_path, brokers)
    staged = driver.stage(now)
    with pytest.raises(CommittableLostError) as stopped:
        driver.commits().commit(staged)
    assert "cannot be replaced" in str(stopped.value)
    # Nothing is shown of a micro-batch that cannot be shown whole, unless it was before.
    assert brokers.visible() == ([] if step == 4 else _content(0)[0])
    assert stopped.value.facts["rows"] == len(_all_rows(1)) - len(brokers.visible())
    ours = {one.payload["transactional_id"] for one in staged.committables}
    assert not ours & {name for name, _ in brokers.open()}


def test_brokers_that_do_not_answer_behind_the_decision_are_waited_for(tmp_path: Path) -> None:
    brokers = Brokers()
    driver = Driver(tmp_path, brokers)
    _write(tmp_path / "offsets" / "0", "v1\n{}\nx")
    staged = driver.stage(_content(0))
    brokers.is_down = True
    with pytest.raises(BrokerUnavailableError):
        driver.commits().commit(staged)
    driver.commits().abort(staged)  # Spark does this behind a failed commit
    brokers.is_down = False
    with pytest.raises(JobDirError, match="other offsets"):
        driver.run(0, _content(5))
    _write(tmp_path / "offsets" / "0", "v1\n{}\nx")
    staged = driver.stage(_content(0))
    driver.commits().commit(staged)
    assert brokers.visible() == _all_rows(1)


def test_data_that_dies_before_the_decision_is_never_decided(tmp_path: Path) -> None:
    brokers = Brokers()
    driver = Driver(tmp_path, brokers)
    _write(tmp_path / "offsets" / "0", "v1\n{}\nx")
    staged = driver.stage(_content(0))
    brokers.expire(KafkaCommittable.from_json(staged.committables[2].payload))
    with pytest.raises(DeadCommittableError):
        driver.commits().commit(staged)
    assert brokers.visible() == []
    driver.run(0, _content(0))
    assert brokers.visible() == _all_rows(1)


def test_a_checkpoint_that_was_set_back_is_refused(tmp_path: Path) -> None:
    brokers = Brokers()
    driver = Driver(tmp_path, brokers)
    for batch in range(40):
        driver.run(batch, _content(batch))
    with pytest.raises(JobDirError, match="set back"):
        driver.run(3, _content(3))
    with pytest.raises(JobDirError, match="other offsets"):
        driver.run(39, _content(3))
    assert brokers.visible() == _all_rows(40)
    assert not brokers.open()


def test_a_zombie_that_slept_until_its_seal_was_pruned_shows_nothing(tmp_path: Path) -> None:
    brokers = Brokers()
    _write(tmp_path / "offsets" / "0", "v1\n{}\nx")
    zombie = Driver(tmp_path, brokers, name="zombie")
    staged = zombie.stage(_content(0))
    driver, sink = Driver(tmp_path, brokers), open_sink_dir(tmp_path)
    for batch in range(40):
        driver.run(batch, _content(batch))
    pruned = CheckpointId(staged.attempt)
    assert pruned not in sink.list_checkpoint_ids()
    with pytest.raises(FlinkishError):
        zombie.commits().commit(replace(staged, batch=BatchId(40)))
    sink.delete_all([f"checkpoints/{pruned}/decision.json"])
    # It fell asleep right before its create, behind all looks.
    late = Decision(
        pruned, Verdict.COMMIT, staged.owner_epoch, 0, batches=(replace(staged, batch=BatchId(40)),)
    )
    assert sink.create_decision(late) is CreateResult.CREATED
    driver.run(40, _content(40))
    Driver(tmp_path, brokers, name="next").run(41, _content(41))
    assert brokers.visible() == _all_rows(42)
    assert not brokers.open()


def test_a_decision_whose_answer_was_lost_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brokers, create = Brokers(), JobDir.create_decision

    def answer_lost(self: JobDir, decision: Decision) -> CreateResult:
        if create(self, decision) is CreateResult.CREATED:
            raise StoreError("no answer")
        return CreateResult.EXISTS

    monkeypatch.setattr(JobDir, "create_decision", answer_lost)
    Driver(tmp_path, brokers).run(0, _content(0))
    assert brokers.visible() == _all_rows(1)


def test_a_decision_that_the_store_refuses_aborts_what_was_staged_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers, create = Brokers(), JobDir.create_decision

    def refuse(self: JobDir, decision: Decision) -> CreateResult:
        if decision.verdict is Verdict.COMMIT:
            raise StoreError("the disk is full")
        return create(self, decision)

    with monkeypatch.context() as full, pytest.raises(DecisionError, match="disk is full") as refused:
        full.setattr(JobDir, "create_decision", refuse)
        Driver(tmp_path, brokers).run(0, _content(0))
    assert "what was staged is aborted, and the micro-batch runs anew" in str(refused.value.what_to_do)
    assert not brokers.visible() and not brokers.open()
    Driver(tmp_path, brokers).run(0, _content(0))
    assert brokers.visible() == _all_rows(1)


def test_a_confirmed_batch_is_not_finished_again(tmp_path: Path) -> None:
    """What became of its transactions may be unknown by then; what counts is the receipt."""
    brokers = Brokers()
    driver = Driver(tmp_path, brokers)
    driver.run(0, _content(0))
    brokers.forgets = True
    driver.run(0, _content(0))
    driver.run(1, _content(1))
    assert brokers.visible() == _all_rows(2)
    assert not brokers.open()


def test_an_abort_that_names_nothing_leaves_other_drivers_alone(tmp_path: Path) -> None:
    brokers = Brokers()
    _write(tmp_path / "offsets" / "0", "v1\n{}\nx")
    old, newer = Driver(tmp_path, brokers, name="old"), Driver(tmp_path, brokers, name="new")
    staged = newer.stage(_content(0))
    old.commits().abort(None)
    newer.commits().commit(staged)
    assert brokers.visible() == _all_rows(1)
    newer.stage(_content(1))
    newer.commits().abort(None)
    assert not brokers.open()


def test_lost_rows_are_settled_by_hand_and_the_query_goes_on(tmp_path: Path) -> None:
    brokers = Brokers(forgets=True)
    _lose_a_decided_part(tmp_path, brokers)
    driver = Driver(tmp_path, brokers)
    with pytest.raises(CommittableLostError, match="settle"):
        driver.run(0, _content(0))
    with pytest.raises(ConfigError, match="not decided"):
        settle(str(tmp_path), 5)
    settle(tmp_path.as_uri(), 0)
    with pytest.raises(ConfigError, match="confirmed already"):
        settle(str(tmp_path), 0)
    driver.run(0, _content(0))
    driver.run(1, _content(1))
    assert brokers.visible() == sorted(set(_all_rows(2)) - set(_all_rows(1)))
    assert not brokers.open()
