"""The list of found files: each task is sent its own, and old parts become one object."""

from __future__ import annotations

import json

import pytest

from flinkish_spark.connectors.files import source as file_source
from flinkish_spark.connectors.splits import SplitPosition, read_piece
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore, SealedObjects
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.sources import Discovery
from tests.unit.connectors.files.test_file_source import first_column, put, reader_of, texts
from tests.unit.connectors.test_split_source import rows_of, step


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def job(tmp_path):
    return tmp_path / "job"


@pytest.fixture(autouse=True)
def small_folds(monkeypatch):
    monkeypatch.setattr(file_source, "_PARTS_PER_FOLD", 3)


def coming(folder, **settings):
    return texts(folder, discovery=Discovery.CONTINUOUS, **settings)


def grow(reader, position, folder, names):
    """Let files come one after the other; return the position and what was read."""
    read = []
    for name in names:
        put(folder, name, f"{name}\n")
        position, rows = step(reader, position)
        read += first_column(rows)
    return position, read


def commit(job, checkpoint, position):
    text = "\n".join(["v1", "{}", json.dumps(position)])
    staged = StagedBatch(Lineage(0), BatchId(checkpoint), OwnerEpoch(1), 1, (), ())
    who = (CheckpointId(checkpoint), Verdict.COMMIT, OwnerEpoch(1), 0)
    JobDir(LocalStore(job)).create_decision(Decision(*who, batches=(staged,), offsets_text=text))


def fold_of(job, name):
    store = LocalStore(job / "sources" / "in")
    return SealedObjects(store, "the list").read(f"folds/{name}.json", "files", dict)


def stored(job, kind):
    return sorted(path.name for path in (job / "sources" / "in" / kind).glob("*"))


def test_a_task_is_sent_its_files_and_reads_no_list(folder, tmp_path, job) -> None:
    reader = reader_of(coming(folder, splits=2), tmp_path)
    position, _ = grow(reader, reader.initialOffset(), folder, ["a", "b", "c", "d"])
    put(folder, "e", "e\n")
    pieces = reader.partitions(position, reader.latestOffset(position, None))
    assert [[file[0] for file in piece.facts] for piece in pieces] == [["e"]]
    for part in (job / "sources" / "in").rglob("*.json"):
        part.unlink()
    (batch,) = read_piece(reader.source, pieces[0])
    assert batch.column("value").to_pylist() == ["e"]


def test_parts_become_one_object_and_positions_stay(folder, tmp_path, job) -> None:
    reader = reader_of(coming(folder), tmp_path)
    start = reader.initialOffset()
    position, read = grow(reader, start, folder, "abcdefgh")
    assert read == list("abcdefgh")
    # Folded behind 3 and 6 files. The parts since the fold before are still there for another scan.
    assert stored(job, "folds") == ["000000000003.json", "000000000006.json"]
    assert stored(job, "files") == [f"{n:012d}.json" for n in (3, 4, 5, 6, 7)]
    again = reader_of(coming(folder), tmp_path)
    assert first_column(rows_of(again, start, position)) == list("abcdefgh")
    assert step(again, position) == (position, [])


def test_another_scan_whose_list_ends_before_the_fold_goes_on(folder, tmp_path) -> None:
    one, two = reader_of(coming(folder), tmp_path), reader_of(coming(folder), tmp_path)
    start = one.initialOffset()
    behind, _ = grow(one, start, folder, "ab")
    assert step(two, start)[0] == behind
    position, _ = grow(one, behind, folder, "cdef")
    end, rows = step(two, behind)
    assert (end, first_column(rows)) == (position, ["c", "d", "e", "f"])


def test_files_that_no_checkpoint_needs_are_dropped_and_never_read_again(folder, tmp_path, job) -> None:
    reader = reader_of(coming(folder), tmp_path)
    first, _ = grow(reader, reader.initialOffset(), folder, "abcd")
    commit(job, 1, first)
    second, _ = grow(reader, first, folder, "e")
    commit(job, 2, second)
    (folder / "a").unlink()
    position, _ = grow(reader, second, folder, "fghi")
    fold = fold_of(job, "000000000006")
    assert (fold["dropped"], [one[0] for one in fold["files"]]) == (4, ["e", "f"])
    # 'a' is gone for good; 'b' is still in the folder and must not be found again.
    assert sorted(fold["read"]) == ["b", "c", "d"]
    again = reader_of(coming(folder), tmp_path)
    assert step(again, position) == (position, [])
    assert first_column(rows_of(again, first, position)) == ["e", "f", "g", "h", "i"]
    put(folder, "a", "new\n", at=9)
    assert first_column(step(again, position)[1]) == ["new"]


def test_a_folder_that_looks_empty_may_be_one_that_is_not_mounted(folder, tmp_path, job) -> None:
    reader = reader_of(coming(folder), tmp_path)
    first, _ = grow(reader, reader.initialOffset(), folder, ["disk/a", "disk/b", "c"])
    commit(job, 1, first)
    commit(job, 2, first)
    (folder / "disk").rename(tmp_path / "elsewhere")
    (folder / "disk").mkdir()
    position, _ = grow(reader, first, folder, ["d", "e", "f"])
    fold = fold_of(job, "000000000006")
    assert fold["dropped"] == 3 and sorted(fold["read"]) == ["c", "disk/a", "disk/b"]
    (folder / "disk").rmdir()
    (tmp_path / "elsewhere").rename(folder / "disk")
    assert step(reader, position) == (position, [])


def test_a_savepoint_takes_a_folded_list_along(folder, tmp_path, job) -> None:
    reader = reader_of(coming(folder), tmp_path)
    first, _ = grow(reader, reader.initialOffset(), folder, "abc")
    commit(job, 1, first)
    commit(job, 2, first)
    position, _ = grow(reader, first, folder, "defg")
    saved = reader.source.identity(JobDir(LocalStore(job)), "in")
    restored = JobDir(LocalStore(tmp_path / "other" / "job"))
    for fact, value in saved.items():
        restored.recorded_once(fact, json.loads(json.dumps(value)))
    other = reader_of(coming(folder), tmp_path / "other")
    put(folder, "h", "h\n")
    end, rows = step(other, position)
    assert first_column(rows) == ["h"] and SplitPosition.from_json(end).offsets == {"0": 8}
