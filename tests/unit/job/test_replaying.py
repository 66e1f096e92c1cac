"""Commit or replay, carried out over a real job directory: what is done in which order, refused, cut off."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flinkish_spark.checkpoint.commit import JobInterruptedError
from flinkish_spark.checkpoint.failures import QueryError
from flinkish_spark.checkpoint.ownership import Ownership, take_over
from flinkish_spark.checkpoint.retention import SparkPins
from flinkish_spark.checkpoint.spark_log import SparkLog, fence_spark_folder
from flinkish_spark.checkpoint.statistics import UserMetricKeeper
from flinkish_spark.contracts.sink import Committer
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import CommittableLostError, NotReplayableError, StoreError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import Step
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job import supervisor
from flinkish_spark.job.replay import Replayer
from flinkish_spark.protocol.decisions import Decision, Receipt, RestagedEpoch, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.limits import UNLIMITED
from flinkish_spark.protocol.records import Committable, SinkAck, StagedBatch, TaskAck
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import context_of
from tests.support.state_folder import SparkFolder
from tests.unit.job.test_rewinding import Job as StandingJob

CLOCK = ManualClock(1_700_000_000_000)
LOST = CheckpointId(2)
TASKS = {0: 5, 1: 7}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No power is cut here, so nothing is synced."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class Cut(Exception):
    """The process ends here."""


class Fuse:
    """Cuts off at the given call, before or after it has happened; never without one."""

    def __init__(self, at=None):
        self.left = at

    def burn(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Cut


class FusedStore(LocalStore):
    """Every change and every read may be the last thing that happens, or the first that does not."""

    def __init__(self, root, fuse):
        super().__init__(root)
        self._fuse = fuse

    def _fused(self, effect, *args):
        self._fuse.burn()
        result = effect(*args)
        self._fuse.burn()
        return result

    def read(self, key):
        return self._fused(super().read, key)

    def list(self, prefix):
        return self._fused(super().list, prefix)

    def put(self, key, data):
        return self._fused(super().put, key, data)

    def create_if_absent(self, key, data):
        return self._fused(super().create_if_absent, key, data)

    def delete(self, key):
        return self._fused(super().delete, key)


class System:
    """What the sinks write to; outlives processes. Names are ``<sink>-<batch>-<task>`` and more."""

    def __init__(self):
        self.open, self.effects = set(), []

    def abort(self, sink, committables):
        names = [c.payload["name"] for c in committables]
        if names:
            self.effects.append(("abort", names))
        self.open -= set(names)


class Sinks(Committer):
    """Told apart by task, where the name ends in one."""

    def commit(self, checkpoint, committables):
        raise NotImplementedError

    def abort(self, committables):
        raise NotImplementedError

    def why_dead(self, committables):
        raise NotImplementedError

    def task_of(self, committable):
        return int(committable.payload["name"].split("-")[2])


class Query:
    """One that has run when it is started."""

    def __init__(self, error=None, active=False):
        self.error, self.is_active, self.stops = error, active, 0

    def exception(self):
        return self.error

    def stop(self):
        self.stops += 1


class Engine:
    """Runs the newest logged micro-batch at once; plan and staging, too."""

    def __init__(self, job):
        self.job, self.rows, self.error, self.hangs, self.runs = job, dict(TASKS), None, False, True
        self.during = lambda batch: None
        self.queries = []

    def pins(self, log):
        return SparkPins(log, self.job.root)

    def plan(self, control):
        self.job.fuse.burn()
        return self

    def staging(self, context):
        self.owner = context.ownership.epoch
        # Also of a micro-batch that was to be shown with an earlier one, which was aborted.
        assert context.checkpoint_of(BatchId(2)) == LOST
        return self

    def start_once(self, log, write):
        self.job.fuse.burn()
        batch = max(log.batches("offsets"))
        assert batch not in log.batches("commits")
        assert log.folder == f"replay/{self.owner}-2"
        self.job.system.effects.append(("run", int(batch)))
        if self.hangs or not self.runs:
            self.queries.append(Query(active=self.hangs))
            return self.queries[-1]
        try:
            self.during(batch)
            write("frame", int(batch))
        except (QueryError, RuntimeError) as error:
            return Query(error)
        log.restore("commits", batch, self.job.commits_text(batch))
        self.job.fuse.burn()
        return Query()

    def stage_only(self, frame, batch, attempt, sinks):
        self.job.fuse.burn()
        if self.error is not None:
            raise self.error
        if not sinks:
            return StagedBatch(Lineage(0), batch, self.owner, attempt, (), ())
        self.job.system.effects.append(("stage", int(batch), sorted(sinks)))
        names = [
            f"{sink}-{batch}-{task}-by{self.owner}.{attempt}" for sink in sorted(sinks) for task in TASKS
        ]
        self.job.system.open |= set(names)
        acks = tuple(ack(sink, self.rows) for sink in sorted(sinks))
        committables = tuple(Committable(name[0], {"name": name}) for name in names)
        self.job.fuse.burn()
        return StagedBatch(Lineage(0), batch, self.owner, attempt, acks, committables, (9,))


def ack(sink, rows):
    return SinkAck(sink, tuple(TaskAck(task, count, digest=count) for task, count in rows.items()))


class Job:
    """Checkpoint 1 at micro-batch 1 is confirmed and pinned, checkpoint 2 with 2 and 3 is decided only."""

    def __init__(self, root, *, fuse=None, system=None, pinned=True, first_epoch=False):
        self.root, self.fuse, self.system = root, fuse or Fuse(), system or System()
        self.job_dir = JobDir(FusedStore(root, self.fuse))
        self.why_input_is_lost, self.asked = "", []
        self.is_cancelled = False
        self.committers = {"a": Sinks(), "b": Sinks()}
        self.engine, self.numbers = Engine(self), itertools.count(1)
        if (root / "owners").exists():
            # A new process.
            self.ownership = take_over(self.job_dir, CLOCK)
            folder = fence_spark_folder(root, self.ownership.epoch)
            self.log = SparkLog(self.job_dir.store, folder, root / folder)
        else:
            self.ownership = take_over(self.job_dir, CLOCK)
            self.begin(pinned=pinned, first_epoch=first_epoch)
        self.pins = SparkPins(self.log, root)

    def begin(self, *, pinned, first_epoch):
        folder = SparkFolder(self.root)
        for batch in range(4):
            folder.run(batch)
        self.log = SparkLog(self.job_dir.store, "spark/1", folder.location)
        if not first_epoch:
            self.decide(folder, 1, (0, 1))
            self.job_dir.create_receipt(Receipt(CheckpointId(1), OwnerEpoch(1), 0))
            if pinned:
                SparkPins(self.log, self.root).pin(self.job_dir.decision(CheckpointId(1)))
        self.decide(folder, 2, (0, 1, 2, 3) if first_epoch else (2, 3))

    def decide(self, folder, number, batches):
        plain = folder.decision(number, batches[-1])
        staged = tuple(self.staged(batch) for batch in batches)
        self.system.open |= {c.payload["name"] for one in staged for c in one.committables}
        self.job_dir.create_decision(
            Decision(
                plain.checkpoint,
                Verdict.COMMIT,
                OwnerEpoch(1),
                0,
                lineage=Lineage(0),
                batches=staged,
                offsets_text=plain.offsets_text,
                commits_text=plain.commits_text,
            )
        )

    def staged(self, batch):
        names = [f"{sink}-{batch}-{task}" for sink in "ab" for task in TASKS]
        committables = tuple(Committable(name[0], {"name": name}) for name in names)
        acks = (ack("a", TASKS), ack("b", TASKS))
        return StagedBatch(Lineage(0), BatchId(batch), OwnerEpoch(1), 1, acks, committables)

    def commits_text(self, batch):
        return (self.root / f"spark/{self.ownership.epoch}/commits/{batch}").read_text()

    def on_step_start(self, step, subject):
        assert (step, subject) == (Step.RESTAGED, "2")

    def on_step_end(self, step, subject):
        self.system.effects.append(("restaged", self.job_dir.find_restaged(LOST).number))

    def why_lost(self, position):
        self.asked.append(position.sources)
        return self.why_input_is_lost

    def replayer(self):
        job = context_of(
            job_dir=self.job_dir,
            ownership=self.ownership,
            log=self.log,
            pins=self.pins,
            committers=self.committers,
            clock=CLOCK,
            observer=self,
            is_cancelled=lambda: self.is_cancelled,
        )
        return Replayer(self.engine, job, self.why_lost, lambda: None, self.numbers)

    def replay(self, position, sink="a", decision=None, **facts):
        facts = {"sink": sink, "checkpoint": LOST, "is_proven_aborted": True, **facts}
        if position is not None:
            facts["position"] = position
        lost = CommittableLostError("a decided committable is lost", why="it timed out", **facts)
        decision = decision or self.job_dir.decision(LOST)
        self.replayer().replay(decision, lost, self.system.abort, lambda ask: ask())

    def names(self, sink="a"):
        batches = self.job_dir.decision(LOST).batches
        return [c.payload["name"] for b in batches for c in b.committables if c.sink == sink]


# -- what is done, and in which order -----------------------------------------------------------------


def test_what_is_lost_is_aborted_then_run_again_then_named(tmp_path):
    """Behaviour 128."""
    job = Job(tmp_path)
    job.replay(0)
    assert job.system.effects == [
        ("abort", ["a-2-0", "a-2-1", "a-3-0", "a-3-1"]),
        ("run", 2),
        ("stage", 2, ["a"]),
        ("run", 3),
        ("stage", 3, ["a"]),
        ("restaged", 1),
    ]
    assert job.names() == ["a-2-0-by1.1", "a-2-1-by1.1", "a-3-0-by1.2", "a-3-1-by1.2"]
    assert job.names("b") == ["b-2-0", "b-2-1", "b-3-0", "b-3-1"]
    assert job.asked == [({"a": 1},)]


def test_a_micro_batch_without_a_loss_only_runs(tmp_path):
    job = Job(tmp_path)
    job.replay(2)
    assert job.system.effects == [
        ("abort", ["a-3-0", "a-3-1"]),
        ("run", 2),
        ("run", 3),
        ("stage", 3, ["a"]),
        ("restaged", 1),
    ]
    assert job.names() == ["a-2-0", "a-2-1", "a-3-0-by1.2", "a-3-1-by1.2"]


def test_what_was_staged_again_of_a_committed_task_is_aborted_before_the_rest_is_named(tmp_path):
    job = Job(tmp_path)
    job.replay(1)
    assert job.system.effects[-2:] == [("abort", ["a-2-0-by1.1"]), ("restaged", 1)]
    assert job.names() == ["a-2-0", "a-2-1-by1.1", "a-3-0-by1.2", "a-3-1-by1.2"]


def test_what_was_staged_again_can_be_lost_again(tmp_path):
    job = Job(tmp_path)
    job.replay(0)
    job.replay(3)
    assert job.system.effects[-1] == ("restaged", 2)
    assert ("abort", ["a-3-1-by1.2"]) in job.system.effects
    assert job.names() == ["a-2-0-by1.1", "a-2-1-by1.1", "a-3-0-by1.2", "a-3-1-by1.4"]


def test_the_job_s_own_log_and_state_are_not_touched_and_the_scratch_folder_goes(tmp_path):
    job = Job(tmp_path)
    before = {p: p.read_bytes() for p in (tmp_path / "spark").rglob("*") if p.is_file()}
    job.replay(0)
    assert before == {p: p.read_bytes() for p in (tmp_path / "spark").rglob("*") if p.is_file()}
    assert not (tmp_path / "replay").exists()


def test_the_first_epoch_is_replayed_from_where_the_sources_began(tmp_path):
    job = Job(tmp_path, first_epoch=True)
    recorded = job.log.location / "sources/0/0"
    recorded.parent.mkdir(parents=True)
    recorded.write_bytes(b'\0v1\n{"orders": {"0": 3}}')
    job.replay(7)
    assert job.asked == [({"orders": {"0": 3}},)]
    assert [effect for effect in job.system.effects if effect[0] == "run"] == [("run", n) for n in range(4)]


def test_a_partition_that_is_added_within_the_epoch_is_asked_for_from_its_first_record(tmp_path):
    job = Job(tmp_path)
    before, lost = (job.job_dir.decision(CheckpointId(n)) for n in (1, 2))
    offsets = {1: '{"orders": {"0": 3}}', 2: '{"orders": {"0": 9, "1": 4}}'}
    for number, decision in ((1, before), (2, lost)):
        job.job_dir.store.delete(f"checkpoints/{number}/decision.json")
        text = f"v1\n{{}}\n{offsets[number]}"
        job.job_dir.create_decision(replace(decision, offsets_text=text))
    job.replay(0)
    assert job.asked == [({"orders": {"0": 3}}, {"orders": {"1": 0}})]


def test_a_checkpoint_before_that_could_not_be_pinned_is_pinned_now(tmp_path):
    job = Job(tmp_path, pinned=False)
    job.replay(0)
    assert CheckpointId(1) in job.pins.list_pinned()
    assert job.system.effects[-1] == ("restaged", 1)


# -- what is refused ----------------------------------------------------------------------------------


def cannot_be_found(job):
    return {"position": None}


def is_not_proven(job):
    return {"position": 0, "is_proven_aborted": False}


def has_lost_its_input(job):
    job.why_input_is_lost = "orders-0 from 3 to 9 is gone"
    return {"position": 0}


def has_lost_its_offsets(job):
    job.log.remove("offsets/2")
    return {"position": 0}


def has_lost_its_pin(job):
    job.pins.unpin(CheckpointId(1))
    job.log.remove("offsets/0")
    return {"position": 0}


def cannot_be_told_apart(job):
    job.committers["a"].task_of = lambda committable: None
    return {"position": 1}


def lost_nothing(job):
    return {"position": 4}


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        (cannot_be_found, "it was not staged by a micro-batch"),
        (is_not_proven, "nothing proves that it was never visible"),
        (has_lost_its_input, "orders-0 from 3 to 9 is gone"),
        (has_lost_its_offsets, "no entry offsets/2 any more"),
        (has_lost_its_pin, "the state of checkpoint 1 is gone"),
        (cannot_be_told_apart, "cannot be told apart"),
        (lost_nothing, "nothing of sink 'a' is lost"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_is_touched(tmp_path, spoilt, why):
    job = Job(tmp_path)
    with pytest.raises(NotReplayableError, match=why) as refused:
        job.replay(**spoilt(job))
    assert "It timed out" in str(refused.value)
    assert refused.value.facts["checkpoint"] == LOST
    assert job.system.effects == []
    assert job.job_dir.find_restaged(LOST) is None and not (tmp_path / "replay").exists()


def test_other_rows_are_aborted_and_the_job_stops_with_the_input_s_ranges(tmp_path):
    job = Job(tmp_path)
    job.engine.rows = {0: 5, 1: 8}
    with pytest.raises(NotReplayableError, match=r"micro-batch 2 gives sink 'a' 13 rows.*its input: "):
        job.replay(0)
    assert job.system.effects[-1] == (
        "abort",
        ["a-2-0-by1.1", "a-2-1-by1.1", "a-3-0-by1.2", "a-3-1-by1.2"],
    )
    assert job.job_dir.find_restaged(LOST) is None


# -- while it runs ------------------------------------------------------------------------------------


def test_a_sink_that_fails_fails_the_replay_and_the_next_one_succeeds(tmp_path):
    job = Job(tmp_path)
    job.engine.error = StoreError("the disk is full")
    with pytest.raises(StoreError, match="disk is full"):
        try:
            job.replay(0)
        except RuntimeError:
            raise AssertionError("its own error is the one to raise") from None
    job.engine.error = None
    job.replay(0)
    assert job.system.effects[-1] == ("restaged", 1)


def test_a_query_that_runs_nothing_is_a_failure(tmp_path):
    job = Job(tmp_path)
    job.engine.runs = False
    with pytest.raises(QueryError, match="micro-batch 2 was to be replayed, and Spark did not run it"):
        job.replay(0)


def test_a_job_that_is_told_to_end_stops_its_replay(tmp_path):
    job = Job(tmp_path)
    job.engine.hangs, job.is_cancelled = True, True
    with pytest.raises(JobInterruptedError):
        job.replay(0)
    assert [query.stops for query in job.engine.queries] == [1]
    assert job.job_dir.find_restaged(LOST) is None


# -- other owners -------------------------------------------------------------------------------------


def by_another(job, decision):
    """Finish a replay as an owner does that is not known to be deposed."""
    return RestagedEpoch(LOST, 1, OwnerEpoch(7), 0, "a", "lost", decision.batches)


def test_a_job_that_is_told_to_stop_finishes_its_replay_and_a_cancelled_one_does_not(tmp_path, monkeypatch):
    """A job that has stopped may not be started again for long."""
    job, replayers = Job(tmp_path), []

    class Recovered(Exception):
        """Far enough."""

    def recovery(*_, replaying, **__):
        replayers.append(replaying)
        raise Recovered

    monkeypatch.setattr(supervisor, "Recovery", recovery)
    engine = SimpleNamespace(
        why_no_savepoint_at=None,
        uids=(),
        vertices=(),
        operators=(),
        sources=(),
        record_job=lambda: JobUuid("5" * 32),
        fence_log=lambda ownership: job.log,
        pins=lambda log: job.pins,
        committers=lambda uuid, ownership: job.committers,
        manifest=lambda uuid, ownership: None,
        reseeding=lambda log: None,
    )
    settings = SimpleNamespace(
        job_dir=StoreSpec(str(tmp_path)),
        token=lambda: "0123456789abcdef",
        hooks=None,
        threads=None,
        checkpoint=CheckpointConfig(),
        restart=None,
        tries_without_progress=UNLIMITED,
        random=None,
        clock=CLOCK,
        observer=job,
        listeners=(),
        until=None,
        user_metrics=UserMetricKeeper(),
    )
    standing = supervisor.Supervisor(engine, settings, job.job_dir)
    with pytest.raises(Recovered):
        standing._recover(standing._own())
    standing.control.stop_with_checkpoint()
    assert not replayers[0].job.is_cancelled()
    standing.control.cancel()
    assert replayers[0].job.is_cancelled()


def test_of_two_owners_that_replay_at_the_same_time_the_first_one_wins(tmp_path):
    job = Job(tmp_path)
    decision = job.job_dir.decision(LOST)
    theirs = by_another(job, decision)
    job.engine.during = lambda batch: job.job_dir.create_restaged(theirs)
    job.replay(0)
    assert job.job_dir.find_restaged(LOST) == theirs
    assert not (tmp_path / "replay").exists()


def test_a_loss_that_another_owner_has_replayed_since_is_not_replayed(tmp_path):
    """The position belongs to the decision as it was; what is named now is alive."""
    job = Job(tmp_path)
    decision = job.job_dir.decision(LOST)
    job.replay(0)
    done = list(job.system.effects)
    job.replay(0, decision=decision)
    assert job.system.effects == done
    assert job.job_dir.find_restaged(LOST).number == 1


def test_folders_of_newer_owners_stay_and_those_of_older_ones_go(tmp_path):
    job = Job(tmp_path)
    Job(tmp_path)
    for name in ("1-2", "2-2"):
        (tmp_path / "replay" / name / "offsets").mkdir(parents=True)
    job.log.end_replay()
    assert [p.name for p in (tmp_path / "replay").iterdir()] == ["2-2"]
    SparkLog(job.job_dir.store, "spark/2", tmp_path / "spark/2").end_replay()
    assert not (tmp_path / "replay").exists()


def test_a_deposed_owner_replays_nothing(tmp_path):
    job = Job(tmp_path)
    decision = job.job_dir.decision(LOST)
    owner = Ownership(job.job_dir, job.ownership.epoch)
    take_over(job.job_dir, CLOCK)
    with pytest.raises(Exception, match="has taken this job over"):
        job.replay(0, decision=decision)
    with pytest.raises(Exception, match="has taken this job over"):
        owner.check()
    assert not any(effect[0] in ("run", "stage", "restaged") for effect in job.system.effects)


def test_what_is_deleted_while_somebody_lists_it_is_no_replay(tmp_path, monkeypatch):
    """Behind its receipt a checkpoint goes with its replays; who shows checkpoints may be reading them."""
    job = Job(tmp_path)
    job.replay(0)
    listed = LocalStore.list

    def deleted_behind_the_list(store, prefix):
        found = listed(store, prefix)
        if prefix == "restaged/2":
            (tmp_path / "restaged/2/1.json").unlink()
        return found

    monkeypatch.setattr(LocalStore, "list", deleted_behind_the_list)
    assert job.job_dir.find_restaged(LOST) is None


def test_a_recovery_deletes_what_a_replay_has_left(tmp_path):
    """It is cut off behind its end, or an order leaves its checkpoint behind."""
    job = StandingJob(tmp_path)
    (tmp_path / "replay/1-4/state").mkdir(parents=True)
    job.recovery().run()
    assert not (tmp_path / "replay").exists()


# -- cut off ------------------------------------------------------------------------------------------


def confirmed_or_replayed(job, committed):
    """Do what a recovery does: find the first that is lost, replay, until nothing is."""
    for _ in range(3):
        names = job.names()
        lost = [n for n, name in enumerate(names) if name not in job.system.open | committed]
        if not lost:
            return names
        job.replay(lost[0])
    raise AssertionError("it does not come to an end")


def test_a_replay_that_is_cut_off_anywhere_is_repeated_by_the_next_owner(tmp_path):
    """Behaviours 125, 128: of a micro-batch that is half committed, so that every step is there."""
    cuts, position = 0, 1
    for at in itertools.count():
        root = tmp_path / str(at)
        job = Job(root)
        committed = set(job.names()[:position])
        job.system.open -= {*job.names()[position:], *committed}
        job.fuse.left = at
        try:
            confirmed_or_replayed(job, committed)
            assert cuts > 50
            return
        except Cut:
            cuts += 1
        system = job.system
        # What is named must never be aborted, and what was committed never staged a second time.
        after = Job(root, system=system)
        names = confirmed_or_replayed(after, committed)
        tasks = [name.split("-")[:3] for name in names]
        assert tasks == [["a", str(batch), str(task)] for batch in (2, 3) for task in TASKS]
        assert committed <= set(names) and set(names) - committed <= system.open
        replayed = [effect for effect in system.effects if effect[0] == "restaged"]
        assert len(replayed) <= 1 and after.job_dir.find_restaged(LOST).number == 1
        after.log.end_replay()
        assert not (root / "replay").exists()
