"""The write-ahead buffer's rules, over files that are written without Spark."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from flinkish_spark.connectors.buffer import (
    ApplyStatus,
    BufferedCommitter,
    BufferedFile,
    BufferedFileError,
    BufferFileWriter,
    BufferName,
)
from flinkish_spark.core.errors import UnavailableError
from flinkish_spark.core.remote_store import requests_of_this_process
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome
from tests.support.sinks import sink_context_of

ONE = CheckpointId(1)


class Kept(BufferedCommitter):
    """A system that keeps rows, and knows what a test says it knows."""

    def __init__(self, folder: Path | StoreSpec, epoch: int = 2) -> None:
        context = sink_context_of(JobUuid("b" * 32), OwnerEpoch(epoch), "out", None, None)
        super().__init__(replace(context, place=place_of(folder)))
        self.knows, self.rows, self.on_apply = ApplyStatus.UNKNOWN, [], lambda: None

    def apply(self, checkpoint, rows):
        self.on_apply()
        self.rows = [row["n"] for batch in rows.batches() for row in batch.to_pylist()]
        return CommitAnswer(Outcome.COMMITTED)

    def has_applied(self, checkpoint):
        return self.knows


def place_of(folder: Path | StoreSpec) -> StoreSpec:
    return StoreSpec(str(folder)) if isinstance(folder, Path) else folder


def staged(folder: Path | StoreSpec, *numbers: int, epoch=2, block=1, task=0, batch=0) -> Committable:
    writer = BufferFileWriter(place_of(folder), BufferName.new(OwnerEpoch(epoch), block, task, 0))
    for number in numbers:
        writer.write(pa.record_batch({"n": [number]}))
    place = {"lineage": 0, "batch": batch, "task": task}
    return Committable("out", {**writer.finish(), **place})


def path_of(folder: Path, committable: Committable) -> Path:
    return folder / committable.payload["file"]


def test_rows_come_in_the_order_of_committables(tmp_path) -> None:
    given = [staged(tmp_path, 3, 1, task=0), staged(tmp_path, 2, task=1), staged(tmp_path, 0, batch=1)]
    committer = Kept(tmp_path)
    answers = committer.commit(ONE, given)
    assert [answer.outcome for answer in answers] == [Outcome.COMMITTED] * 3
    assert committer.rows == [3, 1, 2, 0]
    assert [committer.task_of(one) for one in given] == [0, 1, 0]
    assert committer.commit(ONE, []) == ()


def test_a_task_without_records_leaves_no_file(tmp_path) -> None:
    writer = BufferFileWriter(StoreSpec(str(tmp_path / "out")), BufferName.new(OwnerEpoch(1), 1, 0, 0))
    assert writer.finish() is None and not (tmp_path / "out").exists()


def damaged(path: Path) -> str:
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    return "is damaged"


def shortened(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-1])
    return "bytes instead of"


def gone(path: Path) -> str:
    path.unlink()
    return "is gone"


@pytest.mark.parametrize("harm", [damaged, shortened, gone])
@pytest.mark.parametrize(
    ("knows", "outcome", "is_proven"),
    [
        (ApplyStatus.YES, Outcome.ALREADY_COMMITTED, False),
        (ApplyStatus.NO, Outcome.LOST, True),
        (ApplyStatus.UNKNOWN, Outcome.LOST, False),
    ],
)
def test_what_a_missing_file_means_is_what_the_system_knows(
    tmp_path, harm, knows, outcome, is_proven
) -> None:
    """Behaviour 135."""
    given = [staged(tmp_path, 1), staged(tmp_path, 2, task=1)]
    reason, committer = harm(path_of(tmp_path, given[1])), Kept(tmp_path)
    committer.knows = knows
    assert list(committer.why_dead(given)) == [1] and reason in committer.why_dead(given)[1]
    answers = committer.commit(ONE, given)
    assert len(answers) == (1 if outcome is Outcome.LOST else 2)
    assert (answers[0].outcome, answers[0].is_proven_aborted) == (outcome, is_proven)
    assert reason in answers[0].detail or outcome is not Outcome.LOST
    assert not committer.rows


def test_a_file_that_goes_while_it_is_applied_is_lost(tmp_path) -> None:
    given, committer = [staged(tmp_path, 1)], Kept(tmp_path)
    committer.knows, committer.on_apply = ApplyStatus.NO, path_of(tmp_path, given[0]).unlink
    (answer,) = committer.commit(ONE, given)
    assert answer.outcome is Outcome.LOST and answer.is_proven_aborted


def test_a_file_with_other_rows_than_it_says_is_no_file(tmp_path) -> None:
    one = staged(tmp_path, 1)
    wrong = BufferedFile.from_payload({**one.payload, "rows": 2})
    with pytest.raises(BufferedFileError, match="1 rows instead of 2"):
        list(Kept(tmp_path)._folder.batches(wrong))


def test_a_system_that_cannot_be_asked_is_asked_again(tmp_path) -> None:
    """Behaviour 136."""

    def fail():
        raise UnavailableError("the system is away")

    committer = Kept(tmp_path)
    committer.on_apply = fail
    answers = committer.commit(ONE, [staged(tmp_path, 1), staged(tmp_path, 2)])
    assert [answer.outcome for answer in answers] == [Outcome.RETRY] * 2


def test_a_buffer_that_cannot_be_read_now_proves_nothing(tmp_path) -> None:
    one = staged(tmp_path, 1)
    path = path_of(tmp_path, one)
    path.unlink()
    path.mkdir()  # root may read everything but a directory
    committer = Kept(tmp_path)
    committer.knows = ApplyStatus.NO
    assert committer.commit(ONE, [one])[0].outcome is Outcome.RETRY
    with pytest.raises(UnavailableError):
        committer.why_dead([one])


def test_abort_deletes_once(tmp_path) -> None:
    given, committer = [staged(tmp_path, 1), staged(tmp_path, 2)], Kept(tmp_path)
    assert [a.outcome for a in committer.abort(given)] == [Outcome.COMMITTED] * 2
    assert [a.outcome for a in committer.abort(given)] == [Outcome.ALREADY_COMMITTED] * 2
    assert not list(tmp_path.iterdir())


def test_the_sweep_leaves_what_is_kept_what_runs_and_what_is_newer(tmp_path) -> None:
    """Behaviour 135."""
    kept, running = staged(tmp_path, 1, block=1), staged(tmp_path, 2, block=2)
    newer, foreign = staged(tmp_path, 3, epoch=3, block=9), tmp_path / "somebody's.arrow"
    foreign.touch()
    staged(tmp_path, 4, block=3)
    staged(tmp_path, 5, epoch=1, block=2)  # an older owner's block may have the number of one that runs
    other_sink = Committable("other", kept.payload)
    assert Kept(tmp_path).sweep([kept, other_sink], lambda: frozenset([2])) == 2
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {foreign.name, *(one.payload["file"] for one in (kept, running, newer))}


def test_running_blocks_are_asked_for_behind_the_listing(tmp_path) -> None:
    """What is staged in between is neither listed nor known as running; it must stay."""
    staged(tmp_path, 1, block=1)
    late = []

    def running():
        late.append(staged(tmp_path, 2, block=2))
        return frozenset()

    Kept(tmp_path).sweep([], running)
    assert [path.name for path in tmp_path.iterdir()] == [late[0].payload["file"]]


def test_in_a_bucket_what_was_committed_is_deleted_without_a_listing() -> None:
    """Leftovers that nobody knows are looked for by every tenth sweep, and by the first of a process."""
    pytest.importorskip("obstore")
    place = StoreSpec.parse(f"memory://buffer-{uuid.uuid4().hex}/buffers/out")
    committer, store = Kept(place), place.open_bucket()
    earlier = staged(place, 0)
    assert committer.sweep([], frozenset) == 1, "by another process"
    asked, leftover = requests_of_this_process()["list"], staged(place, 9)
    for number in range(1, 10):
        given = [staged(place, number, batch=number)]
        committer.commit(CheckpointId(number), given)
        later = [staged(place, 100, batch=number + 1)]
        assert committer.sweep(later, frozenset) == 1
        assert set(store.sizes_below("")) >= {one.payload["file"] for one in (leftover, *later)}
        asked += 1
    assert requests_of_this_process()["list"] == asked, "the looks of this test"
    assert committer.sweep([], frozenset) == 10 and not store.sizes_below("")
    assert earlier.payload["file"] != leftover.payload["file"]


def test_a_sweep_of_a_folder_that_was_never_made(tmp_path) -> None:
    assert Kept(tmp_path / "none").sweep([], frozenset) == 0


@pytest.mark.parametrize("name", ["../../etc/passwd", "1-1-1-1-zz.arrow", "1-1-1-1-0123456789abcdef", ""])
def test_a_committable_cannot_name_another_file(tmp_path, name) -> None:
    payload = {**staged(tmp_path, 1).payload, "file": name}
    with pytest.raises(ValueError, match="not a file of a write-ahead buffer"):
        Kept(tmp_path).commit(ONE, [Committable("out", payload)])


def test_names_are_read_as_they_are_written() -> None:
    name = BufferName.new(OwnerEpoch(12), 3, 4, 5)
    assert BufferName.parse(str(name)) == name
    assert BufferName.new(OwnerEpoch(12), 3, 4, 5) != name
