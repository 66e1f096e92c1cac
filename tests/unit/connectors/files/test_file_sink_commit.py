"""The file sink's commit: a process may die at any file operation, and readers see each record once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flinkish_spark import (
    ColumnBuckets,
    Compaction,
    FinalPartitionAction,
    PartitionCommit,
    PartitionPolicy,
    ProcessTime,
    RollingPolicy,
    SuccessFile,
)
from flinkish_spark.connectors.files.committer import CommitSettings, FileCommitter
from flinkish_spark.connectors.files.ledger import Entry
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, Lineage
from flinkish_spark.protocol.records import Outcome
from tests.support.durability import Synced
from tests.support.effort import points
from tests.support.file_sink_rig import Faults, Killed, Rig, completed

FINAL = CheckpointPurpose.FINAL


@pytest.fixture(autouse=True)
def quick_disk(request, monkeypatch):
    """Thousands of file operations: what is synced is looked at in a test of its own."""
    if "is_synced" not in request.node.name:
        monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where there is such a place: thousands of small files are made and removed."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Noting(PartitionPolicy):
    """Notes which partitions it was given, and what readers saw in them then."""

    seen: list[tuple[str, int]] = field(default_factory=list)

    def commit(self, partition, spark):
        count = sum(len(p.read_text().splitlines()) for p in partition.path.glob("part-*"))
        self.seen.append((partition.path.name, count))


COUNTRY = (ColumnBuckets("country"),)
BY_SIZE = RollingPolicy(part_bytes=20, rollover_ms=10_000, inactivity_ms=5_000)
SETTINGS = {
    "plain": CommitSettings(),
    "compacted": CommitSettings(compaction=Compaction(part_bytes=14)),
    "rolled": CommitSettings(rolling=BY_SIZE),
    "partitions": CommitSettings(
        partition_commit=PartitionCommit(
            ProcessTime(1_500), (SuccessFile(), Noting()), FinalPartitionAction.COMMIT
        ),
        assigners=COUNTRY,
    ),
    "rolled partitions": CommitSettings(
        rolling=BY_SIZE,
        partition_commit=PartitionCommit(
            ProcessTime(1_500), (SuccessFile(), Noting()), FinalPartitionAction.COMMIT
        ),
        assigners=COUNTRY,
    ),
}


def script(rig: Rig):
    """Yield each checkpoint with what it stages; the second stages nothing."""
    yield 1, [rig.stage({"country=de": ["a1"], "country=fr": ["a2"]})], CheckpointPurpose.PERIODIC
    yield 2, [], CheckpointPurpose.USER
    last = [rig.stage({"country=de": ["b1", "b2"]}), rig.stage({"country=de": ["b3"]})]
    yield 3, last, FINAL


EVERYTHING = ["a1", "a2", "b1", "b2", "b3"]


def finish(committer: FileCommitter, checkpoint: int, staged, purpose) -> None:
    """What the coordinator or the recovery does about a decided checkpoint."""
    if staged:
        answers = committer.commit(CheckpointId(checkpoint), staged)
        assert len(answers) == len(staged) and all(answer.outcome.is_done for answer in answers), answers
    answer = committer.checkpoint_complete(completed(checkpoint, purpose=purpose))
    assert answer.outcome.is_done, answer


def run(rig: Rig, faults: Faults, on_kill: Callable[[Rig], None] = lambda rig: None) -> int:
    """Run the script; at the kill go on with a new process. Return how many operations the first one did."""
    committer = rig.committer(faults)
    for checkpoint, staged, purpose in script(rig):
        try:
            finish(committer, checkpoint, staged, purpose)
            committer.sweep((), frozenset)
        except Killed:
            on_kill(rig)
            committer = rig.committer()
            finish(committer, checkpoint, staged, purpose)
            committer.sweep((), frozenset)
    return faults.count


def count_operations(tmp: Path, settings: CommitSettings) -> int:
    return run(Rig(tmp / "whole", settings), Faults())


@pytest.mark.parametrize("name", ["partitions", "compacted", "rolled partitions"])
def test_killed_behind_any_operation_every_record_is_seen_once(tmp_path, name) -> None:
    """Behaviour 158."""
    settings = SETTINGS[name]
    count = count_operations(tmp_path, settings)
    whole = Rig(tmp_path / "whole", settings)
    assert whole.lines() == EVERYTHING and not whole.hidden()
    assert count > 50
    for point in points(count):
        rig = Rig(tmp_path / str(point), settings)
        run(rig, Faults(point, after=True))
        assert rig.visible().keys() == whole.visible().keys(), f"killed at operation {point}"
        assert rig.visible() == whole.visible(), f"killed at operation {point}"
        assert not rig.hidden(), f"killed at operation {point}"
        shutil.rmtree(rig.tmp)


@pytest.mark.parametrize("name", ["plain", "compacted"])
def test_what_readers_take_away_between_kill_and_restart_does_not_come_back(tmp_path, name) -> None:
    """A finished file may be read and deleted at once; the repetition must not take it for lost."""
    settings = SETTINGS[name]
    count = count_operations(tmp_path, settings)
    for point in points(count):
        rig = Rig(tmp_path / str(point), settings)
        taken: list[str] = []

        def take(rig: Rig, taken: list[str] = taken) -> None:
            taken += rig.lines()
            for path in rig.visible():
                (rig.root / path).unlink()

        run(rig, Faults(point, after=True), take)
        assert sorted(taken + rig.lines()) == EVERYTHING, f"killed at operation {point}"
        shutil.rmtree(rig.tmp)


@pytest.mark.parametrize("name", ["compacted", "rolled partitions"])
def test_a_disk_that_refuses_once_is_asked_again(tmp_path, name) -> None:
    settings = SETTINGS[name]
    count = count_operations(tmp_path, settings)
    for point in points(count):
        rig = Rig(tmp_path / str(point), settings)
        faults = Faults(point, error=lambda: OSError(28, "no space left"))
        committer = rig.committer(faults)
        for checkpoint, staged, purpose in script(rig):
            try:
                finish(committer, checkpoint, staged, purpose)
            except AssertionError as refused:
                assert "RETRY" in str(refused) and "no space left" in str(refused)
                finish(committer, checkpoint, staged, purpose)
        assert rig.lines() == EVERYTHING
        shutil.rmtree(rig.tmp)


def test_nothing_is_seen_before_the_commit_and_everything_behind_it(tmp_path) -> None:
    """Behaviour 153."""
    rig = Rig(tmp_path)
    staged = [rig.stage({"": ["one", "two"]}), rig.stage({"": ["three"]})]
    assert not rig.visible()
    answers = rig.committer().commit(CheckpointId(5), staged)
    assert [a.outcome for a in answers] == [Outcome.COMMITTED] * 2
    assert answers[0].facts == {"files": 3, "bytes": 14, "rows": 3}
    assert rig.lines() == ["one", "three", "two"]
    assert sorted(rig.visible()) == [f"part-out-{rig.files.tag}-5-5-{n}.txt" for n in range(3)]
    again = rig.committer().commit(CheckpointId(5), staged)
    assert [a.outcome for a in again] == [Outcome.ALREADY_COMMITTED] * 2
    assert rig.committer().checkpoint_complete(completed(5)).facts["rows"] == 3


@pytest.mark.parametrize("completes", [False, True])
def test_repetitions_after_readers_deleted_files_are_no_loss(tmp_path, completes) -> None:
    rig = Rig(tmp_path)
    staged = [rig.stage({"": ["one", "two"]})]
    rig.committer().commit(CheckpointId(5), staged)
    if completes:
        rig.committer().checkpoint_complete(completed(5))
    for path in rig.visible():
        (rig.root / path).unlink()
    (answer,) = rig.committer().commit(CheckpointId(5), staged)
    assert answer.outcome is Outcome.ALREADY_COMMITTED
    assert rig.committer().checkpoint_complete(completed(5)).outcome.is_done
    assert not rig.visible()


def test_what_is_committed_is_synced_with_its_names(tmp_path, monkeypatch) -> None:
    """A power cut takes nothing of it away: files, folders, and folders of folders."""
    tmp_path.mkdir(exist_ok=True)
    rig = Rig(tmp_path, SETTINGS["compacted"])
    staged = [rig.stage({"country=de": ["a", "b"], "country=fr": ["c"]})]
    synced = Synced(monkeypatch)
    rig.committer().commit(CheckpointId(5), staged)
    hidden = rig.files.hidden
    assert not [path for path in synced.lost_below(rig.root) if not path.is_relative_to(hidden.parent)]
    merged = [rig.root / name for name, text in rig.visible().items() if text == "a\nb\n"]
    assert merged and merged[0] in synced


def test_a_zombie_that_repeats_an_old_commit_changes_nothing(tmp_path) -> None:
    rig = Rig(tmp_path)
    first = [rig.stage({"": ["one"]})]
    for checkpoint, staged in [(1, first), (2, [rig.stage({"": ["two"]})])]:
        finish(rig.committer(), checkpoint, staged, CheckpointPurpose.PERIODIC)
    (answer,) = rig.committer().commit(CheckpointId(1), first)
    assert answer.outcome is Outcome.ALREADY_COMMITTED
    assert rig.lines() == ["one", "two"]


def test_a_pending_file_that_is_gone_is_lost_and_was_never_seen(tmp_path) -> None:
    rig = Rig(tmp_path)
    staged = [rig.stage({"": ["one", "two"]}), rig.stage({"": ["three"]})]
    (gone,) = (rig.files.pending / staged[1].payload["staged"]).rglob("*.txt")
    gone.unlink()
    assert list(rig.committer().why_dead(staged)) == [1]
    (answer,) = rig.committer().commit(CheckpointId(5), staged)
    assert (answer.outcome, answer.is_proven_aborted) == (Outcome.LOST, True)
    assert not rig.visible()
    # It is staged anew, under the same checkpoint; the rest of the first try is swept.
    anew = [rig.stage({"": ["one", "two", "three"]})]
    finish(rig.committer(), 5, anew, CheckpointPurpose.PERIODIC)
    assert rig.committer().sweep((), frozenset) == 2
    assert rig.lines() == ["one", "three", "two"] and not rig.hidden()


def test_files_that_vanish_between_record_and_rename_are_lost_without_proof_only_when_some_were_seen(
    tmp_path,
) -> None:
    rig = Rig(tmp_path)
    staged = [rig.stage({"": ["one", "two"]})]
    # Dies behind BUILT, before the first rename.
    faults = Faults()
    committer = rig.committer(faults)
    publisher = committer._publisher
    object.__setattr__(publisher, "_move", lambda plan: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        committer.commit(CheckpointId(5), staged)
    assert rig.ledger.has(5, Entry.BUILT) and not rig.visible()
    shutil.rmtree(rig.files.hidden)
    (answer,) = rig.committer().commit(CheckpointId(5), staged)
    assert (answer.outcome, answer.is_proven_aborted) == (Outcome.LOST, False)


def test_an_abort_removes_what_is_pending_and_not_what_was_committed(tmp_path) -> None:
    rig = Rig(tmp_path, SETTINGS["rolled"])
    kept, dropped = rig.stage({"": ["one"]}), rig.stage({"": ["two"]})
    finish(rig.committer(), 1, [kept], CheckpointPurpose.PERIODIC)
    answers = rig.committer().abort([dropped, dropped, kept])
    assert [a.outcome.value for a in answers] == ["COMMITTED", "ALREADY_COMMITTED", "FENCED"]
    finish(rig.committer(), 2, [], FINAL)
    assert rig.lines() == ["one"]


def test_a_sweep_leaves_what_others_need(tmp_path) -> None:
    rig = Rig(tmp_path, SETTINGS["rolled"], epoch=3)
    open_part = rig.stage({"": ["open"]}, epoch=1)
    finish(rig.committer(), 1, [open_part], CheckpointPurpose.PERIODIC)
    undecided, newer = rig.stage({"": ["undecided"]}), rig.stage({"": ["newer"]}, epoch=4)
    running, old, given_up = rig.stage({"": ["x"]}), rig.stage({"": ["y"]}, epoch=2), rig.stage({"": ["z"]})
    (rig.files.in_progress / "3-9-0a0b0c0d" / "_temporary").mkdir(parents=True)
    (rig.files.in_progress / "4-9-0a0b0c0d").mkdir()
    block = int(running.payload["staged"].split("-")[1])
    assert rig.committer().sweep([undecided], lambda: frozenset({block})) == 3
    left = {path.name for path in rig.files.pending.iterdir()}
    assert left == {c.payload["staged"] for c in (open_part, undecided, newer, running)}
    assert not left & {old.payload["staged"], given_up.payload["staged"]}
    assert [path.name for path in rig.files.in_progress.iterdir()] == ["4-9-0a0b0c0d"]


def test_parts_stay_hidden_until_a_limit_and_are_one_file_then(tmp_path) -> None:
    """Behaviour 159."""
    rig = Rig(tmp_path, CommitSettings(rolling=RollingPolicy(1_000, rollover_ms=5_000, inactivity_ms=60_000)))
    for checkpoint in range(1, 9):
        finish(rig.committer(), checkpoint, [rig.stage({"": [f"r{checkpoint}"]})], CheckpointPurpose.PERIODIC)
        # 1 is rolled when it is 5 s old, with all that came until then; 7 begins the next part.
        assert len(rig.visible()) == (0 if checkpoint < 6 else 1)
    assert list(rig.visible()) == [f"part-out-{rig.files.tag}-1-6-0.txt"]
    assert rig.lines() == [f"r{n}" for n in range(1, 7)]
    finish(rig.committer(), 9, [], CheckpointPurpose.SAVEPOINT)
    assert rig.lines() == [f"r{n}" for n in range(1, 9)] and not rig.hidden()


def test_a_part_without_new_records_is_finished_by_a_checkpoint_that_stages_nothing(tmp_path) -> None:
    """Behaviours 153, 156, 159."""
    rig = Rig(tmp_path, CommitSettings(rolling=RollingPolicy(1_000, rollover_ms=60_000, inactivity_ms=3_000)))
    finish(rig.committer(), 1, [rig.stage({"a=1": ["x"], "a=2": ["y"]})], CheckpointPurpose.PERIODIC)
    finish(rig.committer(), 2, [], CheckpointPurpose.PERIODIC)
    finish(rig.committer(), 3, [rig.stage({"a=2": ["z"]})], CheckpointPurpose.PERIODIC)
    assert not rig.visible()
    finish(rig.committer(), 4, [], CheckpointPurpose.PERIODIC)
    assert rig.lines() == ["x"]


def test_open_parts_are_finished_when_the_next_start_rolls_on_checkpoint(tmp_path) -> None:
    rig = Rig(tmp_path, SETTINGS["rolled"])
    finish(rig.committer(), 1, [rig.stage({"": ["x"]})], CheckpointPurpose.PERIODIC)
    assert not rig.visible()
    finish(rig.committer(settings=CommitSettings()), 2, [], CheckpointPurpose.PERIODIC)
    assert rig.lines() == ["x"] and not rig.hidden()


def test_small_files_of_a_bucket_become_one_up_to_the_size(tmp_path) -> None:
    rig = Rig(tmp_path, CommitSettings(compaction=Compaction(part_bytes=9)))
    staged = [
        rig.stage({"k=1": ["aa", "bb"], "k=2": ["cc"]}),
        rig.stage({"k=1": ["dd", "a long line", "ee"]}),
    ]
    finish(rig.committer(), 1, staged, CheckpointPurpose.PERIODIC)
    assert sorted(rig.visible().values()) == ["a long line\n", "aa\nbb\ndd\n", "cc\n", "ee\n"]


def test_two_sinks_on_one_path_do_not_touch_each_other(tmp_path) -> None:
    shared = Rig(tmp_path, uid="a"), Rig(tmp_path, uid="a-1")
    for rig in shared:
        finish(rig.committer(), 1, [rig.stage({"": [f"of {rig.uid}"]})], CheckpointPurpose.PERIODIC)
        rig.stage({"": ["left over"]})
    assert shared[0].lines() == ["of a", "of a-1"]
    assert shared[0].committer().sweep((), frozenset) == 1
    assert len(shared[1].hidden()) == 1
    assert shared[0].committer().supersede(CheckpointId(0), Lineage(1)).outcome is Outcome.COMMITTED
    assert shared[1].lines() == ["of a-1"]


def test_a_rewind_deletes_the_files_of_later_checkpoints(tmp_path) -> None:
    rig = Rig(tmp_path, SETTINGS["partitions"])
    for checkpoint in range(1, 5):
        staged = [rig.stage({f"country={checkpoint % 2}": [f"r{checkpoint}"]})]
        finish(rig.committer(), checkpoint, staged, CheckpointPurpose.PERIODIC)
    assert rig.committer().why_not_superseded(CheckpointId(2)) == ""
    answers = [rig.committer().supersede(CheckpointId(2), Lineage(1)).outcome.value for _ in range(2)]
    assert answers == ["COMMITTED", "ALREADY_COMMITTED"]
    assert rig.lines() == ["r1", "r2"]
    finish(rig.committer(), 5, [rig.stage({"country=1": ["r5"]})], FINAL)
    assert rig.lines() == ["r1", "r2", "r5"]
    assert (rig.root / "country=0" / "_SUCCESS").exists()


def test_a_rewind_is_refused_where_a_part_holds_records_of_both_sides(tmp_path) -> None:
    rig = Rig(tmp_path, CommitSettings(rolling=RollingPolicy(1_000)))
    finish(rig.committer(), 1, [rig.stage({"": ["r1"]})], CheckpointPurpose.PERIODIC)
    finish(rig.committer(), 2, [rig.stage({"": ["r2"]})], CheckpointPurpose.SAVEPOINT)
    finish(rig.committer(), 3, [rig.stage({"": ["r3"]})], CheckpointPurpose.PERIODIC)
    assert "before and after checkpoint 1" in rig.committer().why_not_superseded(CheckpointId(1))
    assert rig.committer().supersede(CheckpointId(1), Lineage(1)).outcome is Outcome.LOST
    # What is only open can be taken back.
    assert rig.committer().supersede(CheckpointId(2), Lineage(1)).outcome.is_done
    finish(rig.committer(), 4, [rig.stage({"": ["r4"]})], FINAL)
    assert rig.lines() == ["r1", "r2", "r4"]


def test_a_rewind_killed_at_any_operation_can_be_repeated(tmp_path) -> None:
    def prepared(tmp: Path) -> Rig:
        rig = Rig(tmp, SETTINGS["rolled partitions"])
        finish(rig.committer(), 1, [rig.stage({"country=0": ["r1"]})], CheckpointPurpose.SAVEPOINT)
        finish(rig.committer(), 2, [rig.stage({"country=0": ["r2"]})], CheckpointPurpose.SAVEPOINT)
        finish(rig.committer(), 3, [rig.stage({"country=1": ["r3"]})], CheckpointPurpose.PERIODIC)
        return rig

    faults = Faults()
    prepared(tmp_path / "whole").committer(faults).supersede(CheckpointId(1), Lineage(1))
    assert faults.count > 10
    for point in range(faults.count):
        rig = prepared(tmp_path / str(point))
        with pytest.raises(Killed):
            rig.committer(Faults(point)).supersede(CheckpointId(1), Lineage(1))
        assert rig.committer().supersede(CheckpointId(1), Lineage(1)).outcome.is_done
        finish(rig.committer(), 4, [rig.stage({"country=1": ["r4"]})], FINAL)
        assert rig.lines() == ["r1", "r4"], point
        rig.committer().sweep((), frozenset)
        assert not rig.hidden()


@pytest.mark.parametrize("name", ["plain", "rolled partitions"])
def test_a_checkpoint_that_was_left_behind_keeps_its_records(tmp_path, name) -> None:
    """Another sink lost it, so it was committed here and never completed; a rewind kept the tables."""
    rig = Rig(tmp_path, SETTINGS[name])
    finish(rig.committer(), 1, [rig.stage({"country=a": ["r1"]})], CheckpointPurpose.PERIODIC)
    rig.committer().commit(CheckpointId(2), [rig.stage({"country=a": ["r2"]})])
    finish(rig.committer(), 3, [rig.stage({"country=b": ["r3"]})], CheckpointPurpose.PERIODIC)
    finish(rig.committer(), 4, [], FINAL)
    assert rig.lines() == ["r1", "r2", "r3"] and not rig.hidden()


def test_a_target_that_does_not_answer_is_asked_again(tmp_path) -> None:
    rig = Rig(tmp_path)
    staged = [rig.stage({"": ["one"]})]

    def refused():
        return OSError(5, "input/output error")

    with pytest.raises(EnvironmentFault, match="input/output error") as caught:
        rig.committer(Faults(0, error=refused)).why_dead(staged)
    assert caught.value.restartable
    with pytest.raises(EnvironmentFault):
        rig.committer(Faults(0, error=refused)).sweep((), frozenset)
    with pytest.raises(EnvironmentFault):
        rig.committer(Faults(0, error=refused)).why_not_superseded(CheckpointId(1))
