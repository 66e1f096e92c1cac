"""Going back, carried out: what is refused, what is changed, and a crash at every step."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.checkpoint.commit import Confirmation
from flinkish_spark.checkpoint.ownership import Ownership, take_over
from flinkish_spark.checkpoint.retention import SparkPins
from flinkish_spark.contracts.sink import Committer
from flinkish_spark.core.errors import CommittableLostError, CorruptObjectError, EnvironmentFault
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import SilentObserver
from flinkish_spark.core.store import LocalStore
from flinkish_spark.job.recovery import Recovery
from flinkish_spark.job.rewind import RewindError, order_rewind, why_refused
from flinkish_spark.protocol.decisions import Decision, Receipt, Verdict
from flinkish_spark.protocol.event_time import BatchTimes
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.lineage import RewindKind, Tables
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, StagedBatch
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import context_of
from tests.support.effort import stride
from tests.support.recoveries import NoReplaying, NoReseeding
from tests.support.state_folder import SparkFolder

CLOCK = ManualClock(1_700_000_000_000)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No power is cut here, so nothing is synced."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def c(number):
    return CheckpointId(number)


class Sink(Committer):
    """Remembers what it was asked; `answers` are given to supersede, `lost` names what commit loses."""

    def __init__(self):
        self.calls, self.answers, self.lost, self.refusal = [], [], set(), ""

    def commit(self, checkpoint, committables):
        self.calls.append(("commit", int(checkpoint)))
        outcome = Outcome.LOST if int(checkpoint) in self.lost else Outcome.COMMITTED
        return [CommitAnswer(outcome, "gone") for _ in committables]

    def abort(self, committables):
        self.calls.append(("abort", len(committables)))
        return [CommitAnswer(Outcome.COMMITTED) for _ in committables]

    def why_dead(self, committables):
        return {}

    def why_not_superseded(self, target):
        return self.refusal

    def supersede(self, target, lineage):
        self.calls.append(("supersede", int(target), int(lineage)))
        return CommitAnswer(self.answers.pop(0) if self.answers else Outcome.COMMITTED, "detail")


class Job:
    """A job that stands still: four confirmed checkpoints, at micro-batches 1, 3, 5 and 7."""

    def __init__(self, root, *, pinned=(1, 2, 3, 4), confirmed=(1, 2, 3, 4)):
        self.root = root
        self.job_dir = JobDir(LocalStore(root))
        self.folder = SparkFolder(root)
        self.sink, self.lowered, self.lost_input = Sink(), [], ""
        self.pins = SparkPins(self.folder.log, root)
        if (root / "owners").exists():
            self.ownership = Ownership(self.job_dir, self.job_dir.newest_owner())
            return
        self.ownership = take_over(self.job_dir, CLOCK)
        for batch in range(8):
            self.folder.run(batch, snapshot=batch == 4)
        for number in (1, 2, 3, 4):
            self.decide(number, 2 * number - 1, confirmed=number in confirmed)
            if number in pinned:
                self.pins.pin(self.job_dir.decision(c(number)))

    def decide(self, number, batch, *, lineage=0, confirmed=True):
        plain = self.folder.decision(number, batch, lineage)
        self.job_dir.create_decision(
            Decision(
                plain.checkpoint,
                Verdict.COMMIT,
                plain.owner_epoch,
                0,
                lineage=plain.lineage,
                batches=(self.staged(batch, lineage),),
                offsets_text=plain.offsets_text,
                commits_text=plain.commits_text,
            )
        )
        if confirmed:
            self.job_dir.create_receipt(Receipt(c(number), OwnerEpoch(1), 0))

    def staged(self, batch, lineage=0):
        committable = Committable("sink", {"batch": batch})
        return StagedBatch(Lineage(lineage), BatchId(batch), OwnerEpoch(1), 1, (), (committable,))

    def abort(self, number):
        self.job_dir.create_decision(Decision(c(number), Verdict.ABORT, OwnerEpoch(1), 0, reason="no"))

    def recovery(self, **more):
        committers = {"sink": self.sink}
        job = context_of(
            job_dir=self.job_dir,
            ownership=self.ownership,
            log=self.folder.log,
            # As a new process, it has nothing in memory.
            pins=SparkPins(self.folder.log, self.root),
            committers=committers,
            clock=CLOCK,
            observer=SilentObserver(),
        )
        inputs: Any = SimpleNamespace(
            lower=lambda position: self.lowered.append(position.sources),
            why_lost=lambda position: self.lost_input,
        )
        alone = {"reseeding": NoReseeding(), "replaying": NoReplaying()}
        return Recovery(job, Confirmation(job), inputs, **alone | more)

    def order(self, target, tables=Tables.KEEP):
        return order_rewind(self.job_dir, self.pins, CLOCK, c(target), tables, "wrong prices")

    def versions(self):
        names = [n.rsplit("/", 1)[1] for n in self.folder.files() if n.endswith((".zip", ".changelog"))]
        return {int(name.split("_")[0]) for name in names}

    def batches(self, log):
        return sorted(b.value for b in self.folder.log.batches(log))

    def contents(self):
        """A digest per file, without what a refusal may write."""
        return {
            str(p.relative_to(self.root)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in self.root.rglob("*")
            if p.is_file() and "orders" not in p.parts
        }


# -- orders -------------------------------------------------------------------------------------------


def test_an_ordered_rewind_sets_everything_back_to_its_target(tmp_path):
    job = Job(tmp_path)
    order = job.order(2)
    start, kept = job.recovery().run()
    assert (start.next_batch, kept) == (BatchId(4), [])
    assert job.batches("offsets") == job.batches("commits") == [0, 1, 2, 3]
    assert job.versions() == {1, 2, 3, 4}
    history = job.job_dir.history()
    (past,) = history.rewinds
    assert (past.kind, past.target, past.lineage) == (RewindKind.TO_CHECKPOINT, c(2), Lineage(1))
    assert [int(d.checkpoint) for d in job.job_dir.live_commits()] == [1, 2]
    assert job.job_dir.newest_commit().checkpoint == c(2)
    assert job.job_dir.rewind_order() is None and job.job_dir.open_rewind() is None
    # The intent, now history, has the removed entries byte for byte, and names the order.
    stored = (tmp_path / "rewinds/1.json").read_text()
    assert order.order_id in stored and "commits/7" in stored and "offsets/4" in stored
    assert job.lowered == [({"a": 3},)]
    assert job.sink.calls == []


def test_a_rewind_to_the_newest_drops_only_what_is_undecided(tmp_path):
    job = Job(tmp_path)
    job.folder.run(8)
    job.job_dir.write_staged(job.staged(8))
    job.order(4)
    start, _ = job.recovery().run()
    assert start.next_batch == BatchId(8) and job.versions() == {5, 6, 7, 8}
    assert job.sink.calls == [("abort", 1)]
    assert len(job.job_dir.live_commits()) == 4
    assert job.job_dir.list_staged(Lineage(0)) == {}


def test_a_job_that_was_drained_and_did_not_stop_goes_back_in_front_of_that(tmp_path):
    """Windows that fired before their time must not be committed by a job that goes on."""
    job = Job(tmp_path)
    job.folder.run(8)
    job.job_dir.write_staged(replace(job.staged(8), times=BatchTimes(7, drained=5)))
    start, kept = job.recovery().run()
    assert (start.next_batch, kept, job.sink.calls) == (BatchId(8), [], [("abort", 1)])
    assert job.batches("offsets")[-1] == 7 and job.job_dir.lineage() == Lineage(1)
    other = Job(tmp_path / "other")
    other.folder.run(8)
    other.job_dir.write_staged(replace(other.staged(8), times=BatchTimes(7)))
    start, kept = other.recovery().run()
    assert (start.next_batch, [one.batch for one in kept]) == (BatchId(9), [BatchId(8)])


def test_a_checkpoint_whose_files_spark_has_purged_is_restored_from_its_pin(tmp_path):
    job = Job(tmp_path)
    before = job.folder.files()
    job.folder.purge(below=7)
    job.order(1)
    start, _ = job.recovery().run()
    assert start.next_batch == BatchId(2)
    assert job.batches("offsets") == [0, 1] and job.batches("commits") == [1]
    found = job.folder.files()
    assert found == {name: before[name] for name in found} and job.versions() == {1, 2}


def test_a_second_rewind_goes_on_from_the_first(tmp_path):
    job = Job(tmp_path)
    job.order(3)
    job.recovery().run()
    job.folder.go_back(6)
    for batch in (6, 7, 8):
        job.folder.run(batch, "b")
    job.decide(5, 8, lineage=1)
    job.order(2)
    start, _ = job.recovery().run()
    assert start.next_batch == BatchId(4)
    assert [int(d.checkpoint) for d in job.job_dir.live_commits()] == [1, 2]
    assert job.job_dir.lineage() == Lineage(2)


def test_tables_are_restored_only_if_the_order_says_so(tmp_path):
    job = Job(tmp_path)
    job.sink.answers = [Outcome.RETRY, Outcome.COMMITTED]
    job.order(2, Tables.RESTORE)
    job.recovery().run()
    assert job.sink.calls == [("supersede", 2, 1)] * 2


def test_a_table_that_turns_out_to_be_impossible_keeps_the_rewind_open(tmp_path):
    job = Job(tmp_path)
    job.sink.answers = [Outcome.LOST]
    job.order(2, Tables.RESTORE)
    with pytest.raises(EnvironmentFault, match=r"sink 'sink' cannot take back.*Detail"):
        job.recovery().run()
    assert job.job_dir.open_rewind() is not None
    start, _ = job.recovery().run()
    assert start.next_batch == BatchId(4) and job.job_dir.open_rewind() is None


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target,why",
    [
        (9, "does not exist; the newest id is 6"),
        (5, "was not completed"),
        (3, "The state that it needs is not kept"),
        (6, "not every sink has confirmed"),
    ],
)
def test_an_order_that_cannot_be_obeyed_is_refused_when_it_is_given(tmp_path, target, why):
    job = Job(tmp_path, pinned=(1, 2, 4))
    job.abort(5)
    job.folder.run(8)
    job.folder.run(9)
    job.decide(6, 9, confirmed=False)
    before = job.contents()
    with pytest.raises(RewindError, match=why) as caught:
        job.order(target)
    assert caught.value.what_to_do and job.contents() == before
    assert not (tmp_path / "orders").exists()


def test_a_checkpoint_that_a_rewind_left_behind_is_refused(tmp_path):
    """Going forward again would bring back what was taken back."""
    job = Job(tmp_path)
    job.order(2)
    job.recovery().run()
    with pytest.raises(RewindError, match="The rewind to checkpoint 2, which began lineage 1"):
        job.order(3)


def test_only_one_order_can_wait(tmp_path):
    job = Job(tmp_path)
    job.order(2)
    with pytest.raises(RewindError, match="Another order"):
        job.order(3)
    assert job.job_dir.rewind_order().target == c(2)


def test_an_order_that_became_impossible_is_closed_and_ends_one_start_only(tmp_path):
    job = Job(tmp_path)
    order = job.order(2)
    job.pins.unpin(c(2))
    before = job.contents()
    with pytest.raises(RewindError, match="not kept any more"):
        job.recovery().run()
    assert job.contents() == before
    assert (tmp_path / f"orders/refused/{order.order_id}.json").exists()
    start, _ = job.recovery().run()
    assert start.next_batch == BatchId(8) and job.job_dir.history().rewinds == ()


def test_a_table_that_cannot_be_restored_refuses_the_order_before_anything_is_touched(tmp_path):
    job = Job(tmp_path)
    job.sink.refusal = "somebody else committed"
    job.order(2, Tables.RESTORE)
    before = job.contents()
    with pytest.raises(RewindError, match="Somebody else committed"):
        job.recovery().run()
    assert job.contents() == before
    job.order(2)
    assert job.recovery().run()[0].next_batch == BatchId(4)


def test_input_that_cannot_be_read_again_refuses_the_order_before_anything_is_touched(tmp_path):
    job = Job(tmp_path)
    job.lost_input = "offsets 5 to 9 have expired"
    job.order(2)
    before = job.contents()
    with pytest.raises(RewindError, match="Offsets 5 to 9 have expired"):
        job.recovery().run()
    assert job.contents() == before


def test_a_damaged_pin_is_no_way_back(tmp_path):
    job = Job(tmp_path)
    next((tmp_path / "pins/state").rglob("3_a3p0.changelog")).write_bytes(b"torn")
    assert "bytes instead of" in why_refused(job.job_dir, job.pins, c(2))


# -- what is decided ----------------------------------------------------------------------------------


def test_what_is_decided_is_confirmed_before_the_job_goes_back(tmp_path):
    job = Job(tmp_path, confirmed=(1, 2, 3), pinned=(1, 2, 3))
    job.order(2)
    job.recovery().run()
    assert job.sink.calls == [("commit", 4)]
    assert job.job_dir.receipt(c(4)) is not None


def test_a_lost_checkpoint_stops_the_job_unless_an_order_leaves_it_behind(tmp_path):
    """Behaviour 128."""
    job = Job(tmp_path, confirmed=(1, 2, 3), pinned=(1, 2, 3))
    job.sink.lost = {4}
    with pytest.raises(CommittableLostError):
        job.recovery().run()
    job.order(3)
    start, _ = job.recovery().run()
    assert start.next_batch == BatchId(6)
    assert job.job_dir.receipt(c(4)) is None
    # It is dead, so no later start asks for it again.
    job.sink.calls.clear()
    job.recovery().run()
    assert job.sink.calls == []


def test_a_corrupt_newest_checkpoint_is_an_error_and_no_older_one_is_taken_instead(tmp_path):
    job = Job(tmp_path)
    decision = tmp_path / "checkpoints/4/decision.json"
    decision.write_bytes(decision.read_bytes()[:-9])
    before = job.contents()
    with pytest.raises(CorruptObjectError, match="an older checkpoint is never used silently"):
        job.recovery().run()
    assert job.contents() == before


def test_the_newest_checkpoint_is_pinned_by_the_next_start(tmp_path):
    job = Job(tmp_path, pinned=(1,))
    job.recovery().run()
    assert job.pins.list_pinned() == {c(1), c(4)}


def test_the_log_entry_before_the_newest_comes_from_the_pin(tmp_path):
    job = Job(tmp_path)
    text = job.folder.log.read("offsets", BatchId(6))
    for entry in ("offsets/6", "offsets/7", "commits/7"):
        job.folder.log.remove(entry)
    job.recovery().run()
    assert job.folder.log.read("offsets", BatchId(6)) == text
    assert job.batches("commits")[-1] == 7


def test_a_log_entry_that_nothing_has_a_copy_of_is_an_error(tmp_path):
    job = Job(tmp_path, pinned=())
    job.folder.log.remove("offsets/6")
    with pytest.raises(CorruptObjectError, match="offsets/6 is gone"):
        job.recovery().run()


# -- beginning anew -----------------------------------------------------------------------------------


class Anew:
    """Wants a new log once; remembers what it exported."""

    def __init__(self):
        self.exported = []

    def is_wanted(self, log_began_in):
        return log_began_in == Lineage(0)

    def export(self, decision, lineage):
        self.exported.append((decision and int(decision.checkpoint), int(lineage)))


def test_beginning_anew_moves_sparks_checkpoint_aside(tmp_path):
    job, anew = Job(tmp_path), Anew()
    job.folder.run(8)
    job.job_dir.write_staged(job.staged(8))
    old = job.folder.files()
    start, kept = job.recovery(reseeding=anew).run()
    assert (start.next_batch, kept, anew.exported) == (BatchId(0), [], [(4, 1)])
    assert job.batches("offsets") == job.batches("commits") == [] and job.folder.files() == {}
    assert (tmp_path / "spark-retired/1/commits/7").exists() and old
    assert job.pins.list_pinned() == frozenset() and job.job_dir.history().log_began_in == Lineage(1)
    assert job.sink.calls == [("abort", 1)]
    # Its checkpoints stay live, but nobody can go back to them.
    assert len(job.job_dir.live_commits()) == 4
    with pytest.raises(RewindError, match="begun anew in lineage 1"):
        job.order(3)


def test_beginning_anew_finds_the_state_that_spark_has_cleaned_away(tmp_path):
    """A barrier that does not come lets more micro-batches through than Spark keeps versions."""
    job, anew, seen = Job(tmp_path), Anew(), []
    job.pins.restore(c(4))
    needed = job.folder.files()
    for batch in (8, 9):
        job.folder.run(batch)
        job.job_dir.write_staged(job.staged(batch))
    job.folder.purge(10)
    assert not needed.keys() <= job.folder.files().keys()
    anew.export = lambda decision, lineage: seen.append(job.folder.files())
    start, _ = job.recovery(reseeding=anew).run()
    assert start.next_batch == BatchId(0) and seen == [needed]


def test_what_was_moved_aside_goes_once_the_new_log_has_a_checkpoint(tmp_path):
    job, anew = Job(tmp_path), Anew()
    job.recovery(reseeding=anew).run()
    job.folder.lineages = {0: [], 1: []}
    job.folder.run(0, "b")
    job.decide(5, 0, lineage=1)
    start, _ = job.recovery(reseeding=anew).run()
    assert start.next_batch == BatchId(1) and not (tmp_path / "spark-retired").exists()
    assert anew.exported == [(4, 1)] and job.pins.list_pinned() == {c(5)}


def test_a_log_without_a_checkpoint_begins_anew_as_it_began(tmp_path):
    job, anew = Job(tmp_path), Anew()
    anew.is_wanted = lambda log_began_in: log_began_in < Lineage(2)
    job.recovery(reseeding=anew).run()
    assert anew.exported == [(4, 1), (None, 2)]


# -- crashes ------------------------------------------------------------------------------------------


class Crash(BaseException):
    pass


#: Everything by which files change.
MUTATIONS = ("link", "replace", "rename", "unlink", "rmdir", "mkdir")
#: Every seventh one by day, all of them at night.
STRIDE = stride(by_day=7)
REAL = {name: getattr(os, name) for name in MUTATIONS}


def crash_at(monkeypatch, call):
    """Make the process die before its `call`-th change of a file."""
    left = [call]

    def dying(real):
        def change(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            return real(*args, **kwargs)

        return change

    for name in MUTATIONS:
        monkeypatch.setattr(os, name, dying(REAL[name]))


def outcome(job):
    return (
        job.batches("offsets"),
        job.batches("commits"),
        job.folder.files(),
        [int(d.checkpoint) for d in job.job_dir.live_commits()],
        job.job_dir.lineage(),
        job.job_dir.rewind_order(),
        job.job_dir.open_rewind(),
        job.job_dir.list_staged(Lineage(0)),
    )


def prepared(root):
    job = Job(root)
    job.folder.run(8)
    job.job_dir.write_staged(job.staged(8))
    job.folder.purge(below=5)
    return job


def to_checkpoint(job):
    job.order(2, Tables.RESTORE)
    return {}


def anew(job):
    return {"reseeding": Anew()}


@pytest.mark.parametrize("going", [to_checkpoint, anew])
def test_a_crash_between_two_changes_of_files_is_made_good_by_the_next_start(tmp_path, monkeypatch, going):
    straight = prepared(tmp_path / "template")
    more = going(straight)
    shutil.copytree(tmp_path / "template", tmp_path / "0")
    straight.recovery(**more).run()
    expected = outcome(straight)
    call, has_crashed = 1, True
    while has_crashed:
        shutil.copytree(tmp_path / "0", tmp_path / "next")
        job = Job(tmp_path / "next")
        crash_at(monkeypatch, call)
        try:
            job.recovery(**more).run()
            has_crashed = False
        except Crash:
            has_crashed = True
        finally:
            for name in MUTATIONS:
                monkeypatch.setattr(os, name, REAL[name])
        job.recovery(**more).run()
        assert outcome(job) == expected, call
        shutil.rmtree(tmp_path / "next")
        call += STRIDE
    assert call > 30
    if going is to_checkpoint:
        assert {("supersede", 2, 1)} == {one for one in job.sink.calls if one[0] == "supersede"}
