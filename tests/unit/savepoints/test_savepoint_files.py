"""A savepoint's directory: whole or not, damaged, moved, claimed."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flinkish_spark.core.errors import (
    ConfigError,
    CorruptObjectError,
    EnvironmentFault,
    JobDirError,
    StoreError,
    UserError,
)
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.savepoints import OperatorState, SavepointMetadata, StateFile
from flinkish_spark.savepoints.export import make_durable, operator_numbers
from flinkish_spark.savepoints.files import (
    RestoreSettings,
    SavepointDamagedError,
    SavepointDir,
    SavepointNotFoundError,
)
from flinkish_spark.state.savepoint_files import ROWS_AT_ONCE, StateFileWriter, sha256_of, state_in
from tests.support.durability import Synced

JOB = JobUuid("0" * 32)


def write_file(root: Path, operator="totals", name="a-0", groups=range(40)) -> StateFile:
    writer = StateFileWriter(root / f"state/{operator}/{name}.parquet")
    numbers = list(groups)
    for first in range(0, len(numbers), 7):
        part = numbers[first : first + 7]
        writer.write(part, [f"value {group}".encode() * 50 for group in part])
    size, digest = writer.close()
    return StateFile(operator, operator, name, len(numbers), size, digest)


def metadata(*files: StateFile, checkpoint=7, job=JOB, name="a" * 32) -> SavepointMetadata:
    operators = {file.operator: OperatorState(128, ("string",)) for file in files}
    return SavepointMetadata(
        name,
        "orders",
        job,
        CheckpointId(checkpoint),
        Lineage(0),
        BatchId(3),
        5,
        2,
        operators,
        {},
        (),
        files=files,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A finished savepoint."""
    root = tmp_path / "savepoint"
    SavepointDir(root).prepare()
    SavepointDir(root).finish(metadata(write_file(root)))
    return root


def test_the_savepoint_of_a_copy_of_the_job_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    root = tmp_path / "savepoint"
    SavepointDir(root).prepare()
    SavepointDir(root).finish(replace(metadata(write_file(root)), timeline="a" * 16))
    assert SavepointDir(root).find_finished(JOB, CheckpointId(7), "a" * 16) == SavepointDir(root).metadata()
    with pytest.raises(EnvironmentFault, match="checkpoint 7 of a copy of this job's directory"):
        SavepointDir(root).find_finished(JOB, CheckpointId(7), "b" * 16)


# -- state files ------------------------------------------------------------------------------------


def test_a_state_file_gives_back_what_was_written(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    path = tmp_path / file.path
    rows = [row for batch in state_in(StoreSpec(str(tmp_path)), file) for row in batch.to_pylist()]
    assert rows == [{"key_group": g, "value": f"value {g}".encode() * 50} for g in range(40)]
    assert max(batch.num_rows for batch in state_in(StoreSpec(str(tmp_path)), file)) <= ROWS_AT_ONCE
    assert sha256_of(path) == file.sha256


def test_every_damage_to_a_state_file_is_found(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    path = tmp_path / file.path
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match="bytes instead of"):
        list(state_in(StoreSpec(str(tmp_path)), file))
    path.write_bytes(whole[:-8] + bytes(8))
    with pytest.raises(ValueError, match="torn or altered"):
        list(state_in(StoreSpec(str(tmp_path)), file))
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="has 40 rows instead of 41"):
        list(state_in(StoreSpec(str(tmp_path)), replace(file, rows=41)))


def test_another_parquet_file_is_no_state(tmp_path: Path) -> None:
    path = tmp_path / "state/totals/x.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"a": [1]}), path)
    file = StateFile("totals", "totals", "x", 1, path.stat().st_size, "0")
    with pytest.raises(ValueError, match="other columns"):
        list(state_in(StoreSpec(str(tmp_path)), file))


# -- reading ----------------------------------------------------------------------------------------


def test_an_unknown_path_is_refused_and_nothing_is_created(tmp_path: Path) -> None:
    # behaviour 63
    path = tmp_path / "nowhere"
    with pytest.raises(SavepointNotFoundError, match="no such directory") as caught:
        SavepointDir(path).metadata()
    assert caught.value.what_to_do
    assert not path.exists()


def test_without_its_last_file_there_is_no_savepoint(place: Path) -> None:
    (place / "savepoint.json").unlink()
    with pytest.raises(SavepointNotFoundError, match=r"no savepoint\.json in it"):
        SavepointDir(place).metadata()


@pytest.mark.parametrize("cut", [0, 10, 150, -3])
def test_a_torn_savepoint_json_is_an_error_and_never_taken_for_none(place: Path, cut: int) -> None:
    whole = (place / "savepoint.json").read_bytes()
    (place / "savepoint.json").write_bytes(whole[:cut])
    with pytest.raises(CorruptObjectError, match="cannot be trusted"):
        SavepointDir(place).metadata()


def test_a_savepoint_of_a_newer_version_says_so(place: Path) -> None:
    body = {**SavepointDir(place).metadata().to_json(), "version": 3}
    (place / "savepoint.json").write_bytes(seal("savepoint", body))
    with pytest.raises(JobDirError, match="version 3 of savepoints"):
        SavepointDir(place).metadata()


def test_a_moved_savepoint_is_the_same_savepoint(place: Path, tmp_path: Path) -> None:
    # behaviour 64
    moved = tmp_path / "elsewhere" / "copy"
    moved.parent.mkdir()
    place.rename(moved)
    found = SavepointDir(moved).metadata()
    SavepointDir(moved).check_files(found.files)
    SavepointDir(moved).copy_to_folder(found.files, tmp_path / "job")
    assert sha256_of(tmp_path / "job" / found.files[0].path) == found.files[0].sha256


def test_files_that_are_missing_short_or_altered_are_refused(place: Path, tmp_path: Path) -> None:
    found = SavepointDir(place).metadata()
    path = place / found.files[0].path
    whole = path.read_bytes()
    path.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    SavepointDir(place).check_files(found.files)
    with pytest.raises(SavepointDamagedError, match="checksum does not match"):
        SavepointDir(place).copy_to_folder(found.files, tmp_path / "job")
    path.write_bytes(whole[:50])
    with pytest.raises(SavepointDamagedError, match="50 bytes instead of"):
        SavepointDir(place).check_files(found.files)
    path.unlink()
    with pytest.raises(SavepointDamagedError, match="no such file"):
        SavepointDir(place).check_files(found.files)


def test_a_link_out_of_the_savepoint_is_refused(place: Path, tmp_path: Path) -> None:
    found = SavepointDir(place).metadata()
    path = place / found.files[0].path
    outside = tmp_path / "outside.parquet"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(SavepointDamagedError, match="leads out of the savepoint"):
        SavepointDir(place).copy_to_folder(found.files, tmp_path / "job")


def test_taking_files_links_them_or_copies_where_links_are_impossible(place, tmp_path, monkeypatch) -> None:
    # behaviour 22
    found = SavepointDir(place).metadata()
    target = tmp_path / "job" / found.files[0].path
    SavepointDir(place).copy_to_folder(found.files, tmp_path / "job")
    assert target.stat().st_nlink == 2
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("another device")))
    SavepointDir(place).copy_to_folder(found.files, tmp_path / "job")
    assert target.stat().st_nlink == 1
    shutil.rmtree(place)
    assert sha256_of(target) == found.files[0].sha256
    make_durable(StoreSpec(str(tmp_path / "job")), found.files)


# -- writing ----------------------------------------------------------------------------------------


def test_an_export_that_is_repeated_finds_what_the_first_one_made(place: Path) -> None:
    known = SavepointDir(place).find_finished(JOB, CheckpointId(7))
    assert SavepointDir(place).find_finished(JOB, CheckpointId(7), "a" * 16) == known
    assert known == SavepointDir(place).metadata()
    with pytest.raises(EnvironmentFault, match="another savepoint"):
        SavepointDir(place).find_finished(JOB, CheckpointId(8))
    with pytest.raises(EnvironmentFault, match="another savepoint"):
        SavepointDir(place).find_finished(JobUuid("1" * 32), CheckpointId(7))
    assert SavepointDir(place.parent / "new").find_finished(JOB, CheckpointId(7)) is None


def test_leftovers_of_an_export_that_was_given_up_go_with_the_next(tmp_path: Path) -> None:
    root = tmp_path / "savepoint"
    SavepointDir(root).prepare()
    write_file(root, name="given-up")
    write_file(root, operator="gone", name="given-up")
    SavepointDir(root).prepare()
    SavepointDir(root).finish(metadata(write_file(root, name="b-0")))
    assert [path.name for path in root.glob("state/*/*")] == ["b-0.parquet"]


def test_of_two_exports_the_slower_one_gets_the_faster_ones_savepoint(place: Path) -> None:
    slower = metadata(write_file(place, name="slower"), name="b" * 32)
    assert SavepointDir(place).finish(slower).savepoint == "a" * 32
    assert [path.name for path in place.glob("state/*/*")] == ["a-0.parquet"]


@pytest.mark.parametrize(
    "name", ["notes.txt", "state/notes.txt", "state/totals/notes.txt", "state/a/b/c.parquet"]
)
def test_a_directory_with_something_else_in_it_is_not_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(EnvironmentFault, match=r"no part of a savepoint"):
        SavepointDir(tmp_path).prepare()
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("link", ["state", "state/totals", "state/totals/a.parquet"])
def test_links_are_no_part_of_a_savepoint(tmp_path: Path, link: str) -> None:
    """A savepoint's directory is cleaned when it is written: what a link leads to is not ours."""
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "savepoint"
    (elsewhere / "totals").mkdir(parents=True)
    (elsewhere / "totals/mine.parquet").write_text("mine")
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(elsewhere if link == "state" else elsewhere / "totals")
    with pytest.raises(EnvironmentFault, match="no part of a savepoint"):
        SavepointDir(root).prepare()


def test_what_a_crash_left_of_a_write_into_the_store_does_not_block_a_place(tmp_path: Path) -> None:
    (tmp_path / f".savepoint.json.{'0' * 32}.tmp").write_text("half")
    SavepointDir(tmp_path).prepare()


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write the savepoint"):
        SavepointDir(tmp_path / "file" / "savepoint").prepare()


# -- ownership --------------------------------------------------------------------------------------

A, B = JobUuid("a" * 32), JobUuid("b" * 32)
NAME = "a" * 32


def test_of_several_jobs_one_can_claim_a_savepoint(place: Path) -> None:
    """Behaviour 65."""
    SavepointDir(place).check_unclaimed(None)
    SavepointDir(place).claim(A, "/jobs/a")
    SavepointDir(place).claim(A, "/jobs/moved")
    with pytest.raises(UserError, match="/jobs/a") as caught:
        SavepointDir(place).claim(B, "/jobs/b")
    assert "claimed.json" in caught.value.what_to_do
    for other in (B, None):
        with pytest.raises(UserError, match="/jobs/a"):
            SavepointDir(place).check_unclaimed(other)
    SavepointDir(place).delete(B, NAME)
    assert SavepointDir(place).metadata()


def test_a_claimed_savepoint_is_deleted_whole_also_in_two_goes(place: Path) -> None:
    SavepointDir(place).claim(A, "/jobs/a")
    (place / SavepointDir(place).metadata().files[0].path).unlink()
    SavepointDir(place).delete(A, NAME)
    assert not place.exists()
    SavepointDir(place).delete(A, NAME)


def test_what_somebody_else_put_there_stays(place: Path) -> None:
    (place / "notes.txt").write_text("mine")
    SavepointDir(place).claim(A, "/jobs/a")
    SavepointDir(place).delete(A, NAME)
    assert [path.name for path in place.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("claimant", [None, A, B])
def test_a_later_savepoint_in_the_place_of_a_claimed_one_stays(place: Path, claimant) -> None:
    """Behaviour 65: the owner calls this at every start, long after it deleted what it owned."""
    SavepointDir(place).claim(A, "/jobs/a")
    SavepointDir(place).delete(A, NAME)
    SavepointDir(place).prepare()
    later = SavepointDir(place).finish(metadata(write_file(place), checkpoint=99, name="c" * 32))
    if claimant is not None:
        SavepointDir(place).claim(claimant, "/jobs/x")
    SavepointDir(place).delete(A, NAME)
    assert SavepointDir(place).metadata() == later
    SavepointDir(place).check_files(later.files)
    assert (place / "claimed.json").exists() is (claimant is not None)


def test_a_savepoint_that_somebody_exchanged_under_its_claim_stays(place: Path) -> None:
    SavepointDir(place).claim(A, "/jobs/a")
    (place / "savepoint.json").unlink()
    later = SavepointDir(place).finish(metadata(write_file(place), checkpoint=99, name="c" * 32))
    SavepointDir(place).delete(A, NAME)
    assert SavepointDir(place).metadata() == later
    SavepointDir(place).check_unclaimed(B)


def test_a_savepoint_of_a_newer_version_is_not_deleted(place: Path) -> None:
    SavepointDir(place).claim(A, "/jobs/a")
    body = {**SavepointDir(place).metadata().to_json(), "version": 3}
    (place / "savepoint.json").write_bytes(seal("savepoint", body))
    SavepointDir(place).delete(A, NAME)
    assert list(place.glob("state/*/*"))


def test_a_deletion_that_was_cut_off_behind_the_metadata_is_finished_by_its_owner_only(place: Path) -> None:
    SavepointDir(place).claim(A, "/jobs/a")
    claim = (place / "claimed.json").read_bytes()
    SavepointDir(place).delete(A, NAME)
    place.mkdir()
    (place / "claimed.json").write_bytes(claim)
    for job, name in ((B, NAME), (A, "c" * 32)):
        SavepointDir(place).delete(job, name)
        assert (place / "claimed.json").exists()
    # A savepoint that is written there now would be born claimed.
    with pytest.raises(EnvironmentFault, match=r"holds claimed\.json") as caught:
        SavepointDir(place).prepare()
    assert "delete" in caught.value.what_to_do
    SavepointDir(place).delete(A, NAME)
    assert not place.exists()


def test_a_copy_of_a_claimed_savepoint_is_nobodys(place: Path, tmp_path: Path) -> None:
    """Behaviours 64, 65: the owner deletes the original."""
    SavepointDir(place).claim(A, "/jobs/a")
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    SavepointDir(copy).check_unclaimed(B)
    assert SavepointDir(copy).find_claim(NAME) is None
    SavepointDir(copy).claim(B, "/jobs/b")
    with pytest.raises(UserError, match="/jobs/b"):
        SavepointDir(copy).check_unclaimed(A)
    SavepointDir(place).delete(A, NAME)
    assert SavepointDir(copy).metadata()
    SavepointDir(copy).delete(B, NAME)
    assert not copy.exists()


def test_a_claim_holds_by_whatever_links_the_savepoint_is_reached(place: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(place)
    SavepointDir(tmp_path / "link").claim(A, "/jobs/a")
    with pytest.raises(UserError, match="belongs to another job"):
        SavepointDir(place).check_unclaimed(B)


# -- durability -------------------------------------------------------------------------------------


def test_a_finished_savepoint_survives_a_power_cut_with_all_new_directories(tmp_path, monkeypatch) -> None:
    synced = Synced(monkeypatch)
    root = tmp_path / "new" / "newer" / "savepoint"
    SavepointDir(root).prepare()
    file = write_file(root)
    make_durable(StoreSpec(str(root)), [file])
    SavepointDir(root).finish(metadata(file))
    assert synced.lost_below(tmp_path) == []


def test_taken_files_survive_a_power_cut_with_all_new_directories(place, tmp_path, monkeypatch) -> None:
    synced, folder = Synced(monkeypatch), tmp_path / "job" / "seeds" / "0"
    files = SavepointDir(place).metadata().files
    SavepointDir(place).copy_to_folder(files, folder)
    make_durable(StoreSpec(str(folder)), files)
    assert synced.lost_below(tmp_path / "job") == []
    assert tmp_path in synced
    assert all(folder / file.path in synced for file in files)


# -- small things -----------------------------------------------------------------------------------


def test_a_relative_path_is_refused_and_a_file_url_understood() -> None:
    with pytest.raises(ConfigError, match="absolute"):
        RestoreSettings("savepoints/7")
    assert RestoreSettings("file:///savepoints/7").folder == Path("/savepoints/7")


def test_a_commits_entry_without_state_has_no_operators() -> None:
    assert operator_numbers('v2\n{"nextBatchWatermarkMs":0}') == ()
    assert operator_numbers('v2\n{"stateUniqueIds":null}') == ()
