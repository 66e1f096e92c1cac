"""`flinkish ui`: what it says, what it refuses, and that Ctrl-C closes it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from tests.support.cli_rig import JobOnDisk, flinkish


def test_it_says_where_it_is_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path / "orders")
    command = [sys.executable, "-u", "-m", "flinkish_spark.cli", "ui", str(tmp_path), "--port", "0"]
    # Whoever starts tests in the background lets them ignore Ctrl-C.
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeded
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        said = re.fullmatch(
            r"jobs are shown at (http://127\.0\.0\.1:\d+/)#token=\S{20,}\n", process.stdout.readline()
        )
        assert said is not None
        with urllib.request.urlopen(f"{said[1]}jobs", timeout=20) as answer:
            assert json.load(answer) == {"jobs": [{"id": str(job.uuid), "status": "SUSPENDED"}]}
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == "flinkish: the page is closed; the jobs continue\n"
    finally:
        process.kill()


def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    short = tmp_path / "token"
    short.write_text("too short\n")
    for words, status, said in (
        ((), 2, "Missing argument"),
        ((tmp_path / "nowhere",), 2, "does not exist"),
        (("s3:/bucket",), 2, "does not exist"),
        ((tmp_path, "--savepoint-dir", "relative"), 1, "relative"),
        ((tmp_path, "--token-file", short), 1, "16 characters"),
        ((tmp_path, "--host", "192.0.2.1"), 1, "cannot listen"),
    ):
        result = flinkish("ui", *words)
        assert (result.exit_code, said in result.stderr) == (status, True), result.stderr


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = flinkish("ui", tmp_path)
    assert result.exit_code == 1 and "pip install 'starlette>=1,<2'" in result.stderr
