"""`flinkish savepoint`: asking a job for one, and finding those that are there."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flinkish_spark.checkpoint.answers import CheckpointAnswer
from flinkish_spark.job.requests import RequestKind, StopMode
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.job_report import JobReport
from flinkish_spark.protocol.job_status import JobStatus
from flinkish_spark.protocol.savepoints import OperatorState, SavepointMetadata, SourceFacts, StateFile
from flinkish_spark.savepoints.files import SavepointDir
from tests.support.cli_rig import HOUR_MS, JobOnDisk, flinkish, said


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    return JobOnDisk(tmp_path / "job")


def write_savepoint(path: Path, checkpoint: int = 3) -> SavepointMetadata:
    metadata = SavepointMetadata(
        savepoint="5" * 32,
        job="orders",
        job_uuid=JobUuid("0" * 32),
        checkpoint=CheckpointId(checkpoint),
        lineage=Lineage(0),
        batch=BatchId(9),
        decided_at_ms=checkpoint * HOUR_MS,
        shuffle_partitions=2,
        operators={"totals": OperatorState(128, ("string",), {"total": "long"})},
        sources={"in": SourceFacts("kafka")},
        chains=(),
        sinks=("out",),
        hooks={"catalog": {"token": "hidden"}},
        files=(
            StateFile(
                operator="totals", chain="totals", name="a-0", rows=100, size_bytes=4_096, sha256="f" * 64
            ),
        ),
    )
    path.mkdir(parents=True)
    return SavepointDir(path).finish(metadata)


def completed(request) -> CheckpointAnswer:
    return CheckpointAnswer.make_completed(CheckpointId(7), request.target)


# -- trigger ----------------------------------------------------------------------------------------
def test_a_savepoint_is_asked_for_by_its_absolute_path(
    job: JobOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with job.running(completed) as seen:
        result = flinkish("savepoint", "trigger", "job", "saved/one")
    target = str(tmp_path / "saved/one")
    assert [(r.kind, r.target) for r in seen] == [(RequestKind.SAVEPOINT, target)]
    assert (result.exit_code, result.stdout) == (0, f"savepoint of checkpoint 7: {target}\n")


def test_a_program_is_told_what_was_asked_and_answered(job: JobOnDisk, tmp_path: Path) -> None:
    target = f"file://{tmp_path}/a{{b}}"
    with job.running(completed):
        result = flinkish("savepoint", "trigger", job.root, target, "--json")
    assert said(result) == {
        "job_dir": str(job.root),
        "job": "orders",
        "job_uuid": str(job.uuid),
        "target": f"{tmp_path}/a{{b}}",
        "outcome": "COMPLETED",
        "checkpoint": 7,
        "reason": None,
        "text": f"{tmp_path}/a{{b}}",
    }


def test_blanks_in_a_target_are_shown_as_they_are(job: JobOnDisk, tmp_path: Path) -> None:
    with job.running(completed):
        result = flinkish("savepoint", "trigger", job.root, tmp_path / "a  b")
    assert result.stdout == f"savepoint of checkpoint 7: {tmp_path}/a  b\n"


def test_a_savepoint_that_could_not_be_written_is_not_done(job: JobOnDisk, tmp_path: Path) -> None:
    answer = CheckpointAnswer.make_savepoint_failed(CheckpointId(7), "the disk is\nfull")
    with job.running(lambda request: answer):
        result = flinkish("savepoint", "trigger", job.root, tmp_path / "a")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr == (
        "flinkish: checkpoint 7 is complete, but its savepoint could not be written: "
        "SAVEPOINT_FAILED, the disk is full\n"
    )


def test_a_refusal_without_words_has_those_of_its_reason(job: JobOnDisk, tmp_path: Path) -> None:
    reason = CheckpointFailureReason.PARTICIPANT_NOT_RUNNING
    with job.running(lambda request: CheckpointAnswer.make_refused(reason)):
        result = flinkish("savepoint", "trigger", job.root, tmp_path / "a")
    assert result.exit_code == 1
    assert f"refused: {reason.value}, {reason.text}" in result.stderr


@pytest.mark.parametrize("command", ["trigger", "stop"])
@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("job/inside", "inside the job directory"),
        ("job", "inside the job directory"),
        ("a-file", "is a file"),
        ("taken", "a savepoint in"),
        ("ftp://bucket/a", "There is no store for ftp"),
        ("", "is not a path"),
        ("a-file/deeper", "cannot be accessed"),
        ("x" * 300, "cannot be accessed"),
        ("x/" * 3_000, "cannot be accessed"),
        ("circle/a", "cannot be accessed"),
        ("a\nb", "control characters"),
        ("a\x1b[2J", "control characters"),
        ("a\udcff", "control characters"),
        ("a\0b", "is not a path"),
        (".", "a directory of its own"),
        ("link/inside", "inside the job directory"),
    ],
)
def test_targets_that_cannot_be_written_are_refused_before_the_job_is_asked(
    job: JobOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, target: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "link").symlink_to("job")
    write_savepoint(tmp_path / "taken")
    result = flinkish("savepoint", command, "job", target)
    assert result.exit_code == 2 and why in " ".join(result.stderr.split())


# -- stop -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "mode"),
    [((), StopMode.SUSPEND), (("--suspend",), StopMode.SUSPEND), (("--drain",), StopMode.DRAIN)],
)
def test_a_job_is_stopped_with_a_savepoint(job: JobOnDisk, tmp_path: Path, words, mode: StopMode) -> None:
    with job.running(completed) as seen:
        result = flinkish("savepoint", "stop", job.root, tmp_path / "a", *words)
    assert [(r.kind, r.stop_mode) for r in seen] == [(RequestKind.STOP_WITH_SAVEPOINT, mode)]
    assert result.exit_code == 0 and result.stdout.endswith("; the job stops\n")


@pytest.mark.parametrize("command", ["cancel", "savepoint stop", "savepoint trigger", "checkpoints trigger"])
def test_a_job_that_has_ended_is_not_waited_for(job: JobOnDisk, tmp_path: Path, command: str) -> None:
    report = JobReport.begin(OwnerEpoch(1), 1_000, (), {}, None)
    job.job_dir.put_report(replace(report, status=JobStatus.FINISHED))
    words = ["--yes"] if command == "cancel" else [tmp_path / "new"] if "savepoint" in command else []
    # With the patience of 30 s that a request has otherwise.
    before, began = job.files(), time.monotonic()
    result = flinkish(*command.split(), job.root, *words)
    assert time.monotonic() - began < 20
    assert result.exit_code == 3 and "the job does not run: it has ended" in result.stderr
    assert job.files() == before


def test_a_stop_tells_programs_its_mode(job: JobOnDisk, tmp_path: Path) -> None:
    with job.running(completed):
        result = flinkish("savepoint", "stop", job.root, tmp_path / "a", "--drain", "--json")
    assert said(result)["stop_mode"] == "DRAIN"


# -- list -------------------------------------------------------------------------------------------
def test_savepoints_below_several_directories_are_found_oldest_first(tmp_path: Path) -> None:
    write_savepoint(tmp_path / "one/deep/b", 5)
    write_savepoint(tmp_path / "one/a", 7)
    write_savepoint(tmp_path / "two", 6)
    result = flinkish("savepoint", "list", tmp_path / "one", tmp_path / "two", tmp_path / "one", "--json")
    found = said(result)["savepoints"]
    assert [Path(one["path"]).name for one in found] == ["b", "two", "a"]
    assert result.exit_code == 0


def test_a_savepoint_is_told_without_what_belongs_to_others(tmp_path: Path) -> None:
    write_savepoint(tmp_path / "a")
    result = flinkish("savepoint", "list", tmp_path, "--json")
    assert said(result)["savepoints"] == [
        {
            "path": str(tmp_path / "a"),
            "error": "",
            "claimed_by": "",
            "savepoint": {
                "savepoint": "5" * 32,
                "job": "orders",
                "job_uuid": "0" * 32,
                "checkpoint": 3,
                "lineage": 0,
                "batch": 9,
                "decided_at_ms": 3 * HOUR_MS,
                "shuffle_partitions": 2,
                "operators": {
                    "totals": {
                        "max_parallelism": 128,
                        "key_types": ["string"],
                        "states": {"total": "long"},
                    }
                },
                "sources": {"in": "kafka"},
                "sinks": ["out"],
                "hooks": ["catalog"],
                "finished": [],
                "upstream": {},
                "key_groups": 100,
                "bytes": 4_096,
                "files": 1,
            },
        }
    ]
    assert "hidden" not in result.stdout


def test_savepoints_are_a_table_for_people(tmp_path: Path) -> None:
    write_savepoint(tmp_path / "a")
    SavepointDir(tmp_path / "a").claim(JobUuid("1" * 32), "/jobs/other")
    header, row = flinkish("savepoint", "list", tmp_path).stdout.splitlines()
    assert header.split()[:3] == ["path", "job", "checkpoint"]
    assert row.split()[:3] == [str(tmp_path / "a"), "orders", "3"]
    assert row.split()[-4:] == ["100", "4096", "totals", "/jobs/other"]


def test_a_moved_savepoint_is_found_where_it_is(tmp_path: Path) -> None:
    """Behaviour 64."""
    write_savepoint(tmp_path / "old/a")
    shutil.move(tmp_path / "old", tmp_path / "new")
    found = said(flinkish("savepoint", "list", tmp_path, "--json"))["savepoints"]
    assert [one["path"] for one in found] == [str(tmp_path / "new/a")]


def test_no_savepoints_is_an_answer(tmp_path: Path) -> None:
    result = flinkish("savepoint", "list", tmp_path)
    assert (result.exit_code, result.stdout) == (0, "no savepoints\n")
    assert said(flinkish("savepoint", "list", tmp_path, "--json")) == {"savepoints": []}


def test_a_torn_savepoint_is_listed_with_the_reason(tmp_path: Path) -> None:
    write_savepoint(tmp_path / "good")
    write_savepoint(tmp_path / "torn")
    (tmp_path / "torn/savepoint.json").write_bytes(b"{")
    result = flinkish("savepoint", "list", tmp_path, "--json")
    torn, good = said(result)["savepoints"]
    assert result.exit_code == 1
    assert torn["savepoint"] is None and "cannot be trusted" in torn["error"] and good["error"] == ""
    plain = flinkish("savepoint", "list", tmp_path)
    assert "cannot be read" in plain.stdout and plain.stderr.count("\n") == 1


def test_a_savepoint_of_a_newer_version_is_listed_with_the_reason(tmp_path: Path) -> None:
    stored = write_savepoint(tmp_path / "a").to_json()
    (tmp_path / "a/savepoint.json").write_bytes(seal("savepoint", {**stored, "version": 99}))
    (found,) = said(flinkish("savepoint", "list", tmp_path, "--json"))["savepoints"]
    assert "version 99" in found["error"]


def test_an_unfinished_export_is_no_savepoint(tmp_path: Path) -> None:
    (tmp_path / "a/state/totals").mkdir(parents=True)
    assert flinkish("savepoint", "list", tmp_path).stdout == "no savepoints\n"


def test_links_are_not_followed(tmp_path: Path) -> None:
    write_savepoint(tmp_path / "outside/a")
    (tmp_path / "looked-at").mkdir()
    (tmp_path / "looked-at/loop").symlink_to(tmp_path)
    assert flinkish("savepoint", "list", tmp_path / "looked-at").stdout == "no savepoints\n"


def test_a_directory_that_cannot_be_looked_at_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    def walk(folder, onerror):
        onerror(PermissionError(13, "Permission denied", str(folder)))
        return iter(())

    monkeypatch.setattr(os, "walk", walk)
    result = flinkish("savepoint", "list", tmp_path)
    assert "not all directories could be searched" in result.stderr


def test_directories_must_be_there(tmp_path: Path) -> None:
    """Behaviour 63: an unknown path is refused and nothing is created."""
    assert flinkish("savepoint", "list", tmp_path / "nowhere").exit_code == 2
    assert flinkish("savepoint", "list").exit_code == 2
    assert not (tmp_path / "nowhere").exists()
