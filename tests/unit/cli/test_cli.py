"""The command line as a whole: what it loads, what it says of errors, what it waits for."""

from __future__ import annotations

import configparser
import subprocess
import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import flinkish_spark.cli
from flinkish_spark.checkpoint.answers import CheckpointAnswer
from flinkish_spark.cli.client import EXIT_STATUS, ExitStatus
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.store import LocalStore
from flinkish_spark.job import asking
from flinkish_spark.job.asking import describe
from flinkish_spark.job.requests import (
    Inbox,
    OutsideRequest,
    Reply,
    ReplyKind,
    RequestFiles,
    RequestKind,
)
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from tests.support.cli_rig import JobOnDisk, flinkish, said

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "command-line.md"
COMMANDS = (
    ("checkpoints", "list"),
    ("checkpoints", "show"),
    ("checkpoints", "trigger"),
    ("savepoint", "trigger"),
    ("savepoint", "stop"),
    ("savepoint", "list"),
    ("rewind",),
    ("cancel",),
    ("transactions", "list"),
    ("transactions", "commit"),
    ("transactions", "abort"),
    ("audit",),
)


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    return JobOnDisk(tmp_path / "job")


def requests(job: JobOnDisk) -> list[str]:
    return [name for name in job.files() if name.startswith("requests/")]


# -- the program ------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_and_is_documented(command: tuple[str, ...]) -> None:
    result = flinkish(*command, "--help")
    assert result.exit_code == 0 and "--json" in result.stdout
    assert f"flinkish {' '.join(command)} " in DOCUMENT.read_text(encoding="utf-8")


def test_the_exit_statuses_are_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"| {status.value} | {status.name} |" in text for status in ExitStatus)


def test_every_way_to_end_is_documented_with_its_status() -> None:
    row = next(line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if "NOT_TAKEN" in line)
    assert all(f"`{kind.value}`" in row for kind in ReplyKind)


def test_no_command_loads_spark_kafka_or_arrow_to_be_started() -> None:
    code = "import sys, flinkish_spark.cli.app; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ("pyspark", "py4j", "kafka", "pyarrow", "pandas")
    run = subprocess.run(
        [sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert run.stdout.strip() == "[]"


def test_looking_at_a_job_starts_no_spark(job: JobOnDisk) -> None:
    job.complete(1)
    code = (
        "import sys; from flinkish_spark.cli.app import app\n"
        "for words in (['checkpoints', 'list'], ['checkpoints', 'show', '1']):\n"
        "    app([*words[:2], sys.argv[1], *words[2:]], standalone_mode=False)\n"
        "print([m for m in ('pyspark', 'py4j') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(job.root)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert run.stdout.splitlines()[-1] == "[]"


def test_the_script_is_declared_in_the_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    name, _, value = setup["options.entry_points"]["console_scripts"].strip().partition(" = ")
    assert name == "flinkish"
    assert EntryPoint(name, value, "console_scripts").load() is flinkish_spark.cli.main


def test_it_also_runs_as_a_module(job: JobOnDisk) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "flinkish_spark.cli", "checkpoints", "list", str(job.root)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (run.returncode, run.stdout) == (0, "the job 'orders' has no checkpoints\n")


def test_the_version_is_the_package_s() -> None:
    assert flinkish_spark.__version__ in flinkish("--version").stdout


@pytest.mark.parametrize("group", ["", "checkpoints", "savepoint", "transactions", "timeline"])
def test_a_group_without_a_command_shows_its_help(group: str) -> None:
    result = flinkish(*filter(None, [group]))
    # Up to click 8.1 it is no error.
    assert result.exit_code in (0, 2)
    lines = (result.stdout + result.stderr).splitlines()
    assert lines[0].startswith(f"Usage: flinkish {group}".rstrip()) and "Commands:" in lines
    assert max(map(len, lines)) <= 80 and "Error" not in result.stderr


# -- errors -----------------------------------------------------------------------------------------
def test_a_directory_without_a_job_is_wrong_usage_and_stays_as_it_is(tmp_path: Path) -> None:
    result = flinkish("checkpoints", "list", tmp_path)
    assert result.exit_code == 2 and "no job in" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    result = flinkish("savepoint", "trigger", tmp_path / "nowhere", tmp_path / "a")
    assert result.exit_code == 2 and "no directory" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_job_may_be_named_as_its_environment_names_it(job: JobOnDisk) -> None:
    assert flinkish("checkpoints", "list", f"file://{job.root}").exit_code == 0
    assert flinkish("checkpoints", "list", "hdfs://host/job").exit_code == 2


def test_a_torn_job_json_is_one_line(job: JobOnDisk) -> None:
    job.damage("job.json")
    result = flinkish("checkpoints", "list", job.root)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "job.json" in result.stderr


def test_a_directory_that_cannot_be_written_is_one_line(
    job: JobOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LocalStore, key: str, data: bytes) -> None:
        raise StoreError("cannot create it", why="read-only", what_to_do="ask for it")

    monkeypatch.setattr(LocalStore, "create_if_absent", refuse)
    result = flinkish("checkpoints", "trigger", job.root)
    assert result.exit_code == 1
    assert result.stderr == "flinkish: cannot create it. Read-only. To do: ask for it.\n"


# -- asking -----------------------------------------------------------------------------------------
def test_nobody_takes_the_request_of_a_job_that_does_not_run(job: JobOnDisk) -> None:
    result = flinkish("checkpoints", "trigger", job.root, "--timeout-s", "0.2", "--json")
    assert result.exit_code == 3
    assert said(result)["outcome"] == "NOT_TAKEN" and "withdrawn" in said(result)["text"]
    assert requests(job) == []


def test_a_job_that_has_never_run_is_not_waited_for(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path / "job", owners=0)
    result = flinkish("checkpoints", "trigger", job.root)
    assert result.exit_code == 3 and "never run" in result.stderr


def test_a_job_that_does_not_answer_in_time_may_still_do_it(job: JobOnDisk) -> None:
    with job.running(lambda request: None):
        result = flinkish("checkpoints", "trigger", job.root, "--timeout-s", "2", "--json")
    assert result.exit_code == 3
    assert said(result)["outcome"] == "NOT_ANSWERED" and "may still" in said(result)["text"]
    assert requests(job) == []


def test_a_job_that_was_taken_over_before_it_took_the_request_is_asked_again(job: JobOnDisk) -> None:
    with job.running(lambda request: None, owner=2):
        result = flinkish("checkpoints", "trigger", job.root, "--json")
    assert result.exit_code == 1
    assert said(result)["outcome"] == "REFUSED" and "ask again" in said(result)["text"]


def test_a_take_over_that_nobody_answered_for_is_named(job: JobOnDisk) -> None:
    timer = threading.Timer(0.1, job.take_over, (2,))
    timer.start()
    result = flinkish("checkpoints", "trigger", job.root, "--timeout-s", "1")
    timer.join()
    assert result.exit_code == 3 and "taken over by owner 2 meanwhile" in result.stderr


def test_an_owner_that_dies_before_it_answers_leaves_it_open(job: JobOnDisk) -> None:
    """Owner 1 takes the request and is killed; owner 2 finds the claim."""

    def successor() -> None:
        job.take_over(2)
        inbox = Inbox(job.job_dir, SystemClock())
        inbox.took_over(OwnerEpoch(2))
        inbox.take()

    with job.running(lambda request: threading.Timer(0.1, successor).start()):
        result = flinkish("checkpoints", "trigger", job.root, "--json")
    assert result.exit_code == 3
    assert said(result)["outcome"] == "UNKNOWN" and "may or may not" in said(result)["text"]


@pytest.mark.parametrize("kind", ReplyKind)
def test_whatever_a_job_answers_is_understood(kind: ReplyKind) -> None:
    reply = Reply(kind, CheckpointId(7), None, "in words")
    assert isinstance(EXIT_STATUS[reply.kind], ExitStatus)
    assert "in words" in describe(reply)


def test_a_savepoint_that_was_being_decided_when_the_job_ended_is_no_answer(
    job: JobOnDisk, tmp_path: Path
) -> None:
    with job.running(lambda request: CheckpointAnswer.make_left_to_next_start(CheckpointId(7))):
        plain = flinkish("savepoint", "trigger", job.root, tmp_path / "a")
        for_programs = said(flinkish("savepoint", "stop", job.root, tmp_path / "a", "--json"))
    assert plain.exit_code == 3 and plain.stdout == ""
    assert plain.stderr.startswith("flinkish: no answer about checkpoint 7: SHUT_DOWN, the job ended while")
    assert "the next start finishes the checkpoint if it was decided" in plain.stderr
    assert "look at `flinkish checkpoints list`" in plain.stderr
    assert (for_programs["outcome"], for_programs["checkpoint"]) == ("LEFT_TO_NEXT_START", 7)
    assert "look at `flinkish checkpoints list`" in for_programs["text"]


def test_a_job_that_recovers_says_that_it_cannot_now(job: JobOnDisk, tmp_path: Path) -> None:
    reason = CheckpointFailureReason.PARTICIPANT_NOT_RUNNING
    with job.running(lambda request: CheckpointAnswer.make_refused(reason)):
        result = flinkish("savepoint", "stop", job.root, tmp_path / "a")
    assert result.exit_code == 1
    assert result.stderr == f"flinkish: refused: {reason.value}, {reason.text}\n"


@pytest.mark.parametrize("timeout_s", ["nan", "inf", "-inf", "0", "-1", "1e400", "1e10", "x", ""])
def test_a_timeout_that_nobody_can_wait_for_is_wrong_usage(job: JobOnDisk, timeout_s: str) -> None:
    result = flinkish("checkpoints", "trigger", job.root, "--timeout-s", timeout_s)
    assert result.exit_code == 2 and "--timeout-s" in result.stderr
    assert requests(job) == []


def test_a_timeout_may_be_short_or_long(job: JobOnDisk) -> None:
    assert flinkish("checkpoints", "trigger", job.root, "--timeout-s", "1e-300").exit_code == 3
    with job.running(lambda request: CheckpointAnswer.make_completed(CheckpointId(7))):
        assert flinkish("checkpoints", "trigger", job.root, "--timeout-s", "1e9").exit_code == 0


def test_a_request_that_is_taken_in_the_last_moment_is_waited_for(
    job: JobOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner wins the claim against the asker that wants to take the request back."""
    inbox = Inbox(job.job_dir, SystemClock())
    inbox.took_over(OwnerEpoch(1))
    take_back = asking._take_back

    def too_late(request, files: RequestFiles) -> bool:
        taken = [one.name for one in inbox.take()]
        assert taken == [request.name]
        is_taken_back = take_back(request, files)
        inbox.answer(request.name, CheckpointAnswer.make_completed(CheckpointId(7)))
        return is_taken_back

    monkeypatch.setattr(asking, "_take_back", too_late)
    monkeypatch.setattr(asking, "TAKEN_WITHIN_MS", 100)
    patience = asking.RequestTimeouts(taken_within_ms=100, answered_within_ms=5_000)
    monkeypatch.setattr(asking.RequestTimeouts, "from_seconds", lambda *words: patience)
    result = flinkish("checkpoints", "trigger", job.root)
    assert (result.exit_code, result.stdout) == (0, "checkpoint 7 is confirmed\n")


@pytest.mark.parametrize("is_taken", [True, False])
def test_an_interrupt_says_what_becomes_of_the_request(
    job: JobOnDisk, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    inbox = Inbox(job.job_dir, SystemClock())
    inbox.took_over(OwnerEpoch(1))

    def interrupted(self: SystemClock, duration_ms: int) -> None:
        if is_taken:
            inbox.take()
        raise KeyboardInterrupt

    monkeypatch.setattr(SystemClock, "sleep_ms", interrupted)
    result = flinkish("checkpoints", "trigger", job.root, "--json")
    assert result.exit_code == 3
    assert said(result)["outcome"] == ("NOT_ANSWERED" if is_taken else "NOT_TAKEN")
    assert requests(job) == []


def test_an_interrupt_while_the_request_is_written_leaves_nothing(
    job: JobOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = RequestFiles.create

    def interrupted(self: RequestFiles, request: OutsideRequest) -> None:
        create(self, request)
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestFiles, "create", interrupted)
    result = flinkish("checkpoints", "trigger", job.root)
    assert result.exit_code == 3 and "the request was withdrawn" in result.stderr
    assert requests(job) == []


def test_a_torn_answer_is_one_line(job: JobOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    def tear(self: RequestFiles, answer) -> None:
        job.job_dir.store.put(self._key(asking_part()), b"torn")

    def asking_part():
        from flinkish_spark.job.requests import Part

        return Part.ANSWER

    monkeypatch.setattr(RequestFiles, "give_answer", tear)
    with job.running(lambda request: CheckpointAnswer.make_completed(CheckpointId(7))):
        result = flinkish("checkpoints", "trigger", job.root)
    assert result.exit_code == 1 and "cannot be trusted" in result.stderr
    assert requests(job) == []


# -- cancel -----------------------------------------------------------------------------------------
def test_a_job_is_cancelled_after_a_yes(job: JobOnDisk) -> None:
    with job.running(lambda request: CheckpointAnswer.make_completed(CheckpointId(1))) as seen:
        assert flinkish("cancel", job.root, answers="n\n").exit_code == 1
        assert seen == []
        result = flinkish("cancel", job.root, answers="y\n")
    assert (result.exit_code, result.stdout) == (0, "the job is being cancelled\n")
    assert [request.kind for request in seen] == [RequestKind.CANCEL]
