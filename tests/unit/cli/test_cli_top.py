"""`flinkish top`: one view for pipes and tests, a live one on a terminal, jobs that run and that are down."""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path

import pytest

from flinkish_spark.protocol.job_status import JobEvent, JobStatus
from tests.support.cli_rig import JobOnDisk, flinkish
from tests.support.rest_rig import ShownJob, shown_job


@pytest.fixture
def job(tmp_path: Path) -> ShownJob:
    return shown_job(tmp_path / "orders")


def shown(root: Path) -> list[list[str]]:
    """Return the cells of one view, line by line."""
    result = flinkish("top", root, "--once")
    assert result.exit_code == 0, result.stderr
    assert all(line.isprintable() for line in result.stdout.splitlines())
    return [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]


def test_a_view_has_what_the_page_has(job: ShownJob) -> None:
    lines = shown(job.root)
    assert lines[0][:2] == ["orders", "RUNNING"] and lines[0][2].startswith("for 5 min")
    assert lines[1] == [f"owner 1 on driver, process {os.getpid()}: it lives"]
    assert lines[2] == ["restarts 1, lineage 0"] and lines[3] == [str(job.root)]
    # 1,000 records in the 10 s between two checkpoints; 4 s of them at work, 1 s held back.
    assert ["Vertices, over the 10.0 s of the last checkpoint"] in lines
    assert ["Source: orders", "RUNNING", "100.0", "-", "40%", "10%", "-", "-"] in lines
    assert ["totals", "RUNNING", "-", "-", "40%", "10%", "7.0 s", "4"] in lines
    assert ["Sink: table", "RUNNING", "-", "100.0", "30%", "0%", "-", "-"] in lines
    assert ["Checkpoints: 5 completed, 1 failed; took 5.7 s (p50), 6.0 s (p99)"] in lines
    numbers = [line for line in lines if line[0].isdecimal()]
    assert [line[:4] for line in numbers[:4]] == [
        ["7", "IN_PROGRESS", "-", "2000"],
        ["6", "COMPLETED", "6.0 s", "2000"],
        ["5", "COMPLETED", "5.9 s", "2000"],
        ["4", "FAILED", "2.0 s", "-"],
    ]
    assert numbers[3][-1] == "TASK_FAILED: no broker answered"
    (table,) = [line for line in lines if line[0] == "table"]
    assert table[1:4] == ["1000", "1000", "2"] and table[-2:] == ["6", "1000"]
    (cause,) = [line for line in lines if line[-1].startswith("the sink 'topic' lost its broker")]
    assert cause[1] == "totals"
    assert lines[-1][0] == "totals" and lines[-1][-1] == "7.0 s"


def test_lines_over_time_totals_and_the_hint(job: ShownJob) -> None:
    job.measured_over_time(hours=2)
    job.report = replace(job.report, settings={**job.report.settings, "interval_ms": 5_000})
    job.job_dir.put_report(job.report)
    lines = shown(job.root)
    assert ["Source: orders", "12345678", "-", "2100", "-"] in lines
    (rows,) = [line for line in lines if line[0] == "rows in/s"]
    assert rows[1].startswith("4") and len(rows[3]) == 40 and set(rows[3]) <= set("▁▂▃▄▅▆▇█·")
    (starts,) = [line for line in lines if line[0] == "starts"]
    assert starts[1:3] == ["0", "1"] and starts[3].count("█") == 1 and "·" in starts[3]
    (took,) = [line for line in lines if line[0] == "checkpoint took"]
    assert took[2].endswith(" s")
    assert [line for line in lines if line[0].startswith("The interval of 5.0 s is never kept")]


def test_what_holds_a_checkpoint_back_is_shown_while_the_job_lives(
    job: ShownJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.held_back()
    lines = shown(job.root)
    assert ["Held back"] in lines
    (held,) = [line for line in lines if line[0] == "checkpoint 7"]
    assert held[1] == "its commit" and held[2].startswith("1 min 4") and held[3] == "no <b>route</b>"
    job.change(JobStatus.FAILED, JobEvent.GIVE_UP, 100_000, "no broker")
    assert ["Held back"] not in shown(job.root)
    job.held_back()
    job.change(JobStatus.RUNNING, JobEvent.STARTED, 100_000)
    job.held_back()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    assert "checkpoint 7, 1 min 4" in flinkish("top", job.root, "--once").stdout


def test_a_job_that_is_down_says_so(job: ShownJob, tmp_path: Path) -> None:
    job.change(JobStatus.FAILED, JobEvent.GIVE_UP, 100_000, "no broker")
    assert shown(job.root)[0][:2] == ["orders", "FAILED"]
    gone = JobOnDisk(tmp_path / "gone")
    gone.complete(1)
    lines = shown(gone.root)
    assert lines[0][:2] == ["orders", "SUSPENDED"]
    assert ["its graph is not written down yet"] in lines


def test_a_job_that_has_never_run_has_nothing_yet(tmp_path: Path) -> None:
    lines = shown(JobOnDisk(tmp_path / "new", owners=0).root)
    assert lines[0][1] == "CREATED" and ["it has never run"] in lines and ["none yet"] in lines


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_a_narrow_terminal_has_the_columns_that_matter_most(
    job: ShownJob, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", flinkish("top", job.root, "--once").stdout)
    assert max(map(len, drawn.splitlines())) <= columns
    assert "held back" not in drawn and ("busy" in drawn or columns == 20)


def test_texts_of_others_do_nothing_to_a_terminal(job: ShownJob) -> None:
    job.failed_and_restarted("no [bold]room\x1b[2J\nhere")
    assert "no [bold]room?[2J here" in flinkish("top", job.root, "--once").stdout


def test_what_cannot_be_read_is_one_line(job: ShownJob) -> None:
    job.damage("checkpoints/7/decision.json")
    result = flinkish("top", job.root, "--once")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "checkpoints/7/decision.json" in result.stderr


# -- on a terminal ----------------------------------------------------------------------------------
class Terminal:
    """A terminal with a command in it."""

    def __init__(self, file: int) -> None:
        self._file, self.seen = file, ""

    def press(self, keys: bytes) -> None:
        os.write(self._file, keys)

    def wait_for(self, text: str) -> None:
        """Wait until it has shown something since the last time."""
        deadline = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self.look()
        self.seen = self.seen[self.seen.index(text) + len(text) :]

    def look(self) -> None:
        """Take what it shows within a moment."""
        if select.select([self._file], [], [], 0.1)[0]:
            self.seen += os.read(self._file, 65_536).decode(errors="replace")


@contextmanager
def terminal(*words: object, lines: int = 60) -> Iterator[Terminal]:
    """Run a command on a terminal; at the end it must have ended well, and left the terminal as it was."""
    # The size is that of the terminal, whatever the test's own says.
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "FORCE_COLOR")}
    command = [sys.executable, "-m", "flinkish_spark.cli", *map(str, words)]
    file, other = pty.openpty()
    ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 120, 0, 0))
    before = termios.tcgetattr(other)
    environment["TERM"] = "xterm-256color"
    process = subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True
    )
    try:
        screen = Terminal(file)
        yield screen
        deadline = time.monotonic() + 60
        while process.poll() is None:
            assert time.monotonic() < deadline, screen.seen
            screen.look()
        assert (process.returncode, termios.tcgetattr(other)) == (0, before)
    finally:
        process.kill()
        process.wait()
        os.close(other)
        os.close(file)


def test_on_a_terminal_it_is_live_until_q(job: ShownJob) -> None:
    with terminal("top", job.root, "--interval-s", "0.3") as screen:
        screen.wait_for("5 completed, 1 failed")
        job.completed(8)
        screen.wait_for("6 completed, 1 failed")
        job.damage("checkpoints/8/decision.json")
        screen.wait_for("cannot be read now")
        screen.wait_for("6 completed")
        screen.press(b"q")
        # It has left the screen of its own.
        screen.wait_for("\x1b[?1049l")


def test_what_does_not_fit_is_scrolled_to(job: ShownJob) -> None:
    with terminal("top", job.root, "--interval-s", "30", lines=10) as screen:
        screen.wait_for("more lines below")
        assert "Event time" not in screen.seen
        screen.press(b" " * 8)
        screen.wait_for("Event time")
        screen.press(b"\x1b[A")
        screen.wait_for("1 more lines below")
        screen.press(b"xq")
        screen.wait_for("\x1b[?1049l")
