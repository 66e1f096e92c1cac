"""Accumulators of a job that is killed around its decisions and whose tasks fail: all counts once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset
import pytest

from tests.crash.accumulating_app import RECORDS, order
from tests.support import effort
from tests.support.accumulating import expected
from tests.support.killing import KILL_AT_VARIABLE

#: Staged and not decided; decided and not committed; committed without a receipt; in front of a decision.
#: The last two at night only.
POINTS = ("staged-file:after:2", "decision:after:1", "receipt:before:1", "decision:before:2")


@pytest.mark.timeout(1_200)
def test_what_is_counted_is_exact_behind_kills_and_failing_tasks(tmp_path: Path) -> None:
    points = POINTS if effort.is_night else POINTS[:2]
    for point in (*points, ""):
        ended = subprocess.run(
            [sys.executable, "-m", "tests.crash.accumulating_app", str(tmp_path)],
            env={**os.environ, KILL_AT_VARIABLE: point},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=400,
            start_new_session=True,
        )
        wanted = -signal.SIGKILL if point else 0
        assert ended.returncode == wanted, f"{point}: {ended.returncode}\n{ended.stderr[-4_000:]}"
    orders = [order(number) for number in range(RECORDS)]
    found = json.loads((tmp_path / "accumulators.json").read_text())
    found["by parity"] = {int(number): count for number, count in found["by parity"].items()}
    assert found == {**expected(orders), "numbers": RECORDS}
    # Tasks failed behind what they had counted, in more lives than one.
    assert len(list(tmp_path.glob("failed-*"))) > 1
    # The sinks say the same.
    large = pyarrow.dataset.dataset(str(tmp_path / "large"), format="parquet", ignore_prefixes=["_", "."])
    assert large.count_rows() == found["both"]
