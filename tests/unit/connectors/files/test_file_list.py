"""The list of found files: each task is sent its own, and old parts become one object."""

from __future__ import annotations

import json
import os

import pytest

from flinkish_spark.connectors.files import source as file_source
from flinkish_spark.connectors.files.input_formats import TextLines
from flinkish_spark.connectors.files.source import FileList
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.connectors.splits import SourceUnavailable, read_piece
from flinkish_spark.core.errors import InputLostError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore, SealedObjects
from flinkish_spark.core.store_spec import StoreSpec
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
    # A machine that does other work lists slowly, and then a source waits before it looks again.
    monkeypatch.setattr(file_source, "_LONG_LOOK_S", 600.0)


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
        restored.record_fact(fact, json.loads(json.dumps(value)))
    other = reader_of(coming(folder), tmp_path / "other")
    put(folder, "h", "h\n")
    end, rows = step(other, position)
    assert first_column(rows) == ["h"] and SplitPosition.from_json(end).offsets == {"0": 8}


def test_pages_keep_few_objects_between_folds(folder, tmp_path, job, monkeypatch) -> None:
    reader = reader_of(coming(folder), tmp_path)
    start = reader.initialOffset()
    names = [f"{n:03d}" for n in range(43)]
    position, read = grow(reader, start, folder, names)
    assert read == names
    # Behind 36 files a fourth of them would be a fold, which 7 are not.
    assert stored(job, "folds")[-1] == "000000000036.json"
    assert stored(job, "pages")[-2:] == ["000000000036.json", "000000000039.json"]
    assert stored(job, "files")[-2:] == ["000000000041.json", "000000000042.json"]
    again = reader_of(coming(folder), tmp_path)
    assert first_column(rows_of(again, start, position)) == names
    assert step(again, position) == (position, [])
    position, read = grow(again, position, folder, ["x", "y"])
    assert read == ["x", "y"]


@pytest.fixture
def settled(monkeypatch):
    """Folders that have just been changed count as settled."""
    monkeypatch.setattr(file_source, "_SETTLED_MS", -(10**9))
    monkeypatch.setattr(file_source, "_LISTED", -1)


def listed_by(monkeypatch):
    found, listing = [], os.scandir

    def noting(path):
        found.append(os.path.basename(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", noting)
    return found


def test_folders_that_have_not_changed_are_listed_in_turns(folder, tmp_path, monkeypatch, settled) -> None:
    reader = reader_of(coming(folder), tmp_path)
    position, read = grow(reader, reader.initialOffset(), folder, ["a/1", "b/1", "c/1"])
    listed = listed_by(monkeypatch)
    position, read = grow(reader, position, folder, ["b/2"])
    # In each look the one that has a new file, and one in its turn.
    assert read == ["b/2"] and "b" in listed and len(listed) <= 3
    # A file system that does not keep a folder's time.
    os.utime(folder / "c", ns=(5, 5))
    position, _ = step(reader, position)
    put(folder, "c/2", "late\n")
    os.utime(folder / "c", ns=(5, 5))
    for _ in range(4):
        position, rows = step(reader, position)
        if rows:
            break
    assert first_column(rows) == ["late"]


def test_a_look_that_fails_has_seen_nothing(folder, tmp_path, monkeypatch, settled) -> None:
    """What it found before it failed is found by the next one."""
    put(folder, "a/1", "1\n")
    put(folder, "b/1", "2\n")
    reader = reader_of(coming(folder), tmp_path)
    start, listing, tries = reader.initialOffset(), os.scandir, []

    def broken(path):
        tries.append(path)
        if len(tries) == 3:
            raise OSError(5, "Input/output error")
        return listing(path)

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(SourceUnavailable):
        reader.latestOffset(start, None)
    assert sorted(first_column(step(reader, start)[1])) == ["1", "2"]


def test_another_process_that_was_first_takes_no_file_away(folder, tmp_path, settled) -> None:
    """Of two that look, the one whose part was not taken finds its files again."""
    one, two = (FileList(StoreSpec(str(tmp_path / "list"))).read() for _ in range(2))
    put(folder, "a/1", "1\n")
    mine = one.look(folder, "*", TextLines())
    put(folder, "b/1", "2\n")
    two.add(two.look(folder, "*", TextLines())[:1], False)
    put(folder, "a/2", "3\n")
    more = one.look(folder, "*", TextLines())
    one.add(more, False)
    assert len(mine) == 1 and len(one) == 1
    one.add(one.look(folder, "*", TextLines()), False)
    assert sorted(one[at].path for at in range(len(one))) == ["a/1", "a/2", "b/1"]


def test_files_that_were_found_are_compared_in_turns(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(file_source, "_COMPARED", 2)
    reader = reader_of(coming(folder), tmp_path)
    position, _ = grow(reader, reader.initialOffset(), folder, "abcde")
    put(folder, "d", "other\n", at=99)
    with pytest.raises(InputLostError, match="/d has changed since it was found"):
        for _ in range(3):
            position, _ = step(reader, position)
