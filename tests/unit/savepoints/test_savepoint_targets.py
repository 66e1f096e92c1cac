"""Where a savepoint can be written: asked before anything else is done for it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from flinkish_spark.savepoints import files as targets
from flinkish_spark.savepoints.files import SavepointDir, why_no_savepoint_at
from flinkish_spark.savepoints.job import JobSavepoints
from tests.unit.savepoints.test_savepoint_files import metadata, write_file


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job/checkpoints").mkdir(parents=True)
    return tmp_path / "job"


def refused(target: object, job: Path, why: str) -> None:
    answer = why_no_savepoint_at(str(target), StoreSpec(str(job)))
    assert why in answer and "To do: " in answer and answer.isprintable(), answer


@pytest.mark.parametrize("name", ["new", "new/and/deep", "with blank", "Zürich", "a.b"])
def test_a_directory_that_can_be_made_is_made_and_nothing_in_it(job, tmp_path, name) -> None:
    for _ in range(2):
        assert why_no_savepoint_at(str(tmp_path / name), StoreSpec(str(job))) == ""
    assert list((tmp_path / name).iterdir()) == []


def test_a_directory_with_an_export_that_was_given_up_can_be_used(job, tmp_path) -> None:
    write_file(tmp_path / "given-up")
    assert why_no_savepoint_at(str(tmp_path / "given-up"), StoreSpec(str(job))) == ""
    assert len(list((tmp_path / "given-up").rglob("*.parquet"))) == 1


@pytest.mark.parametrize(
    "target,why",
    [
        ("", "absolute"),
        ("savepoints/7", "absolute"),
        ("~/savepoints", "absolute"),
        ("/tmp/a\0b", "control characters"),
        ("/tmp/a\nb", "control characters"),
        ("/tmp/a\x7f", "control characters"),
        ("/tmp/\udc80", "control characters"),
        ("/" + "a" * 256, "too long"),
        ("/" + "\u00fc" * 128, "too long"),
        ("/abc" * 1_000, "too long"),
        ("/proc/savepoint", "cannot write"),
    ],
)
def test_text_that_is_no_usable_path_is_refused_and_nothing_is_made(job, target, why) -> None:
    refused(target, job, why)


def test_a_target_in_the_job_directory_is_refused_by_whatever_links_it_is_reached(job, tmp_path) -> None:
    (tmp_path / "link").symlink_to(job)
    (tmp_path / "deep").symlink_to(job / "checkpoints")
    (tmp_path / "nowhere").symlink_to(job / "not-yet")
    inside = [job, job / "new", job / "not/there/yet", tmp_path / "x/../job/new", tmp_path / "link/new"]
    for target in [*inside, tmp_path / "deep", tmp_path / "deep/a/b", tmp_path / "nowhere/a"]:
        refused(target, job, "It is in the job directory")
    # Also where the job itself is reached by a link.
    refused(job / "new", tmp_path / "link", "It is in the job directory")
    assert [path.name for path in job.iterdir()] == ["checkpoints"]


def test_a_directory_with_two_names_is_one_directory(job, tmp_path, monkeypatch) -> None:
    """As with bind mounts, and where upper and lower case are the same."""
    (tmp_path / "JOB").mkdir()
    known, real = (tmp_path / "JOB").stat(), Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **more: known if self == job else real(self, **more))
    refused(tmp_path / "JOB/new", job, "It is in the job directory")
    assert why_no_savepoint_at(str(tmp_path / "other"), StoreSpec(str(job))) == ""


def test_a_target_around_the_job_directory_is_refused(job, tmp_path) -> None:
    for target in (tmp_path, tmp_path.parent, Path("/")):
        refused(target, job, f"The job directory {job} is in it")


def test_a_job_directory_that_is_not_there_contains_nothing(tmp_path) -> None:
    assert why_no_savepoint_at(str(tmp_path / "savepoint"), StoreSpec(str(tmp_path / "job"))) == ""


def test_what_is_there_already_is_not_touched(job, tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    refused(tmp_path / "file", job, "It is a file")
    refused(tmp_path / "file/below", job, "File exists")
    refused(tmp_path / "full", job, "notes.txt")
    assert (tmp_path / "full/notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"


def test_another_savepoint_is_named(job, tmp_path) -> None:
    place = SavepointDir(tmp_path / "savepoint")
    place.prepare()
    place.finish(metadata(write_file(place.path)))
    refused(place.path, job, "Another savepoint is there: checkpoint 7 of job 'orders'")
    (place.path / "savepoint.json").write_bytes(b"torn")
    refused(place.path, job, "Another savepoint is there: one that cannot be read")


def test_what_is_left_of_a_claimed_savepoint_is_named(job, tmp_path) -> None:
    (tmp_path / "savepoint").mkdir()
    (tmp_path / "savepoint/claimed.json").write_text("{}")
    refused(tmp_path / "savepoint", job, "holds claimed.json")


def test_links_in_circles_are_refused(job, tmp_path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop", job, "loop")
    refused(tmp_path / "loop/below", job, "loop")


def test_a_directory_that_cannot_be_written_is_refused(job, tmp_path, monkeypatch) -> None:
    """A superuser's tests cannot take a permission away, so the file system is made to refuse."""

    def refuse(path, mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(targets, "open", refuse, raising=False)
    refused(tmp_path / "savepoint", job, "Permission denied")
    monkeypatch.undo()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: refuse("x", 0))
    refused(tmp_path / "another", job, "Permission denied")


def test_an_export_looks_again_whether_it_would_write_into_the_job_directory(job) -> None:
    decision = Decision(CheckpointId(7), Verdict.COMMIT, OwnerEpoch(1), 5)
    savepoints = JobSavepoints(None, "job", StoreSpec(str(job)), 5, None, None, [])
    with pytest.raises(EnvironmentFault, match="It is in the job directory"):
        savepoints.write(decision, str(job / "savepoint"), None)
    assert not (job / "savepoint").exists()
