"""`flinkish demo` runs: its job is killed, goes on, and its output is exact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flinkish_spark.cli.demo import count, rows_in


@pytest.mark.nightly(by_day="tests/integration/spark/test_run.py")
@pytest.mark.timeout(300)
def test_the_demo_is_exact_and_leaves_a_project_that_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "flinkish_spark.cli", "demo", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EXACTLY ONCE: 10,000 orders, 10,000 rows, 0 lost, 0 twice, 0 wrong totals" in done.stdout
    assert count(rows_in(folder), 10_000).is_exact
    # Two processes owned the job: the one that was killed, and the one that went on.
    assert len(list((folder / "data" / "job" / "owners").glob("*.json"))) == 2
