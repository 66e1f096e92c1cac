"""Whatever is typed, answered or named: a line, a status, and nothing for the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flinkish_spark.checkpoint.answers import CheckpointAnswer
from flinkish_spark.cli.client import describe_unexpected, local_time, one_line
from flinkish_spark.job import asking, rewind
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId
from tests.support.cli_hostile_rig import COMMANDS, EVIL, assert_civil, full_job, words_of
from tests.support.cli_rig import JobOnDisk, flinkish, said

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody runs here; and nothing has to survive a power cut."""
    monkeypatch.setattr(asking, "_POLL_MS", 2)
    monkeypatch.setattr(rewind, "_POLL_MS", 2)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    return full_job(tmp_path / "job")


# -- terminals --------------------------------------------------------------------------------------
def test_what_a_job_answers_is_printed_without_control_characters(job: JobOnDisk, tmp_path: Path) -> None:
    answers = [
        CheckpointAnswer.make_completed(CheckpointId(7), EVIL),
        CheckpointAnswer.make_savepoint_failed(CheckpointId(7), EVIL),
        CheckpointAnswer.make_refused(CheckpointFailureReason.STORAGE_NOT_READY, EVIL),
    ]
    for answer in answers:
        with job.running(lambda request, answer=answer: answer):
            for more in ((), ("--json",)):
                result = flinkish("savepoint", "trigger", job.root, tmp_path / "a", *more)
                assert_civil(result)
                assert more or result.stdout.count("\n") + result.stderr.count("\n") == 1
        if answer.text == EVIL:
            assert said(result)["text"] == EVIL


def test_paths_are_printed_without_control_characters(tmp_path: Path) -> None:
    place = tmp_path / EVIL.replace("\0", "")
    job = full_job(place / "job")
    for command in COMMANDS:
        assert_civil(flinkish(*words_of(job, command)))
    assert said(flinkish("checkpoints", "list", job.root, "--json"))["job_dir"] == str(job.root)


def test_a_path_that_is_no_text_can_be_looked_at(tmp_path: Path) -> None:
    job = full_job(tmp_path / "a\udcffb")
    assert flinkish("checkpoints", "list", job.root).exit_code == 0
    assert said(flinkish("checkpoints", "list", job.root, "--json"))["job_dir"] == str(job.root)
    assert said(flinkish("savepoint", "list", tmp_path, "--json"))["savepoints"][0]["error"] == ""


def test_a_document_is_ascii(tmp_path: Path) -> None:
    job = full_job(tmp_path / "bücher")
    result = flinkish("checkpoints", "list", job.root, "--json")
    assert result.stdout.isascii() and said(result)["job_dir"] == str(job.root)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a  b", "a  b"),
        (" a \r\n\t b ", "a b"),
        ("a\u2028b\x85c", "a b c"),
        ("\x1b[31m\x9b\u202e\u200b\udcff", "?[31m????"),
        ("süß 漢字", "süß 漢字"),
    ],
)
def test_a_line_is_what_can_be_printed(text: str, line: str) -> None:
    assert one_line(text) == line


def test_a_time_that_no_clock_says_is_a_number() -> None:
    assert [local_time(ms) for ms in (10**30, 253_402_300_800_000, -(10**18), 0, None)] == [
        f"{10**30} ms",
        "253402300800000 ms",
        f"{-(10**18)} ms",
        "-",
        "-",
    ]


# -- arguments --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words",
    [
        (EVIL,),
        (f"--{EVIL}",),
        (f"-{EVIL}",),
        ("checkpoints", EVIL),
        ("checkpoints", "list", EVIL),
        ("checkpoints", "list", "x" * 5_000),
        ("checkpoints", "list", "a/" * 5_000),
        ("checkpoints", "list", "JOB", f"--{EVIL}"),
        ("checkpoints", "list", f"JOB/job.json/{EVIL}"),
        ("checkpoints", "show", "JOB", EVIL),
        ("checkpoints", "show", "JOB", "9" * 30),
        ("checkpoints", "show", "JOB", "9" * 4_000),
        ("checkpoints", "show", "JOB", "9" * 5_000),
        ("savepoint", "list", EVIL),
        ("savepoint", "list", "x" * 300),
        ("savepoint", "trigger", "JOB", EVIL),
        ("rewind", "JOB", "1", "--tables", EVIL),
        ("rewind", "JOB", "1", "--timeout-s", EVIL),
        ("rewind", "JOB", "1", EVIL),
    ],
    ids=lambda words: ascii(words)[:60],
)
def test_words_that_nobody_types_are_wrong_usage(job: JobOnDisk, words: tuple[str, ...]) -> None:
    result = flinkish(*(word.replace("JOB", str(job.root)) for word in words))
    assert_civil(result)
    assert result.exit_code == 2 and "Error: " in result.stderr


def test_a_directory_that_may_not_be_entered_is_wrong_usage(
    job: JobOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, **more: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("flinkish_spark.cli.client.os.stat", refuse)
    result = flinkish("checkpoints", "list", job.root)
    assert result.exit_code == 2 and "cannot be accessed: Permission denied" in result.stderr


def test_a_working_directory_that_is_gone_is_wrong_usage(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import os, sys; os.rmdir('../gone'); import flinkish_spark.cli as cli; cli.main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "checkpoints", "list", "job"],
        capture_output=True,
        text=True,
        cwd=gone,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 2 and "the current directory is gone" in run.stderr


# -- whatever else ----------------------------------------------------------------------------------
def test_an_error_that_nobody_foresaw_is_a_line_with_its_place(
    job: JobOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: object) -> None:
        raise LookupError(EVIL)

    monkeypatch.setattr("flinkish_spark.cli.checkpoints.checkpoint_views", fail)
    result = flinkish("checkpoints", "list", job.root)
    assert_civil(result)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "the command failed: LookupError: " in result.stderr
    assert "in flinkish_spark.cli.checkpoints, line " in result.stderr
    assert str(ROOT) not in result.stderr


def test_an_error_from_nowhere_has_no_place() -> None:
    assert "in an unknown place" in str(describe_unexpected(ValueError("x")))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("buffering", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def test_an_output_that_is_full_is_a_line(job: JobOnDisk, buffering: dict[str, str]) -> None:
    surroundings = {name: one for name, one in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "wb") as full:
        run = subprocess.run(
            [sys.executable, "-m", "flinkish_spark.cli", "checkpoints", "list", str(job.root)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=surroundings | buffering,
        )
    assert run.returncode == 1
    assert run.stderr.startswith("flinkish: the command failed. ")
    assert run.stderr.count("\n") == 1


def test_an_output_of_another_encoding_shows_what_it_can(tmp_path: Path) -> None:
    job = full_job(tmp_path / "bücher")
    for more in ((), ("--json",)):
        run = subprocess.run(
            [sys.executable, "-m", "flinkish_spark.cli", "savepoint", "list", str(job.root), *more],
            capture_output=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert (run.returncode, run.stderr) == (0, b"")
        assert b"b\\u00fccher" in run.stdout if more else b"b?cher" in run.stdout
