"""A job that a scheduler starts again and again: each run catches up, some are killed, and nothing is twice.

FLINKISH_RUNS=50 makes as many runs.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from demo.process import JobProcess, Victim
from demo.rig import ROOT, _environment
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.testing import LocalBroker
from tests.crash.lives import SEED_VARIABLE
from tests.support.jobs import expected_totals, order, produce, read_delta, totals_in
from tests.support.killing import KILL_AT_VARIABLE
from tests.support.open_transactions import still_open

RUNS = int(os.environ.get("FLINKISH_RUNS", "4"))
#: Where a run kills itself; empty for runs that are left alone, SHOT for a kill from outside.
SHOT = "shot"
POINTS = ("", "decision:before:1", SHOT, "decision:after:1", "sink-commit:after:1:kafka", "")


@pytest.mark.timeout(600 + 60 * RUNS)
def test_runs_that_catch_up_are_exact_whatever_is_killed(run_directory: Path, broker: LocalBroker) -> None:
    chance = random.Random(int(os.environ.get(SEED_VARIABLE, "7")))
    servers = broker.bootstrap_servers
    shutil.rmtree(run_directory, ignore_errors=True)
    run_directory.mkdir(parents=True)
    source, target = (f"{run_directory.name}.{name}" for name in ("orders", "totals"))
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        for topic in (source, target):
            admin.create_topic(topic, 2)
    command = [
        sys.executable, "-m", "tests.crash.catch_up_app", "--servers", servers, "--source", source,
        "--target", target, "--directory", str(run_directory),
    ]  # fmt: skip
    amounts: dict[str | None, list[int]] = defaultdict(list)
    for run in range(RUNS):
        for user in ("a", "b", "c"):
            new = [chance.randrange(1_000) for _ in range(chance.choice([0, 40, 90]))]
            amounts[user] += new
            produce(servers, source, [order(user, n) for n in new], key=user.encode())
        point = POINTS[run % len(POINTS)]
        if point:
            kill_a_run(command, point, run_directory, chance)
        assert caught_up(command, run_directory) == 0, (run_directory / "driver.log").read_text()[-3_000:]
        expected = expected_totals(amounts)
        assert totals_in(servers, target) == expected, f"run {run}, {point}"
        rows = [(row["user"], row["total"]) for row in read_delta(run_directory / "table")]
        assert sorted(rows) == sorted(expected.elements()), f"run {run}, {point}"
    with TransactionClient(KafkaConnection(servers, {})) as client:
        assert list(still_open(client, JobDir(LocalStore(run_directory / "job")).find_uuid())) == []


def caught_up(command: list[str], directory: Path) -> int:
    """Run the program to its end and return its exit status."""
    with (directory / "driver.log").open("ab") as log:
        return subprocess.run(
            command, cwd=ROOT, env=_environment(), stdout=log, stderr=log, timeout=300, check=False
        ).returncode


def kill_a_run(command: list[str], point: str, directory: Path, chance: random.Random) -> None:
    """Start a run that is killed at a point, or from outside; one without new input may end before."""
    job = JobProcess(command, _environment(), directory / "driver.log", chance)
    job.start({} if point == SHOT else {KILL_AT_VARIABLE: point})
    try:
        if point == SHOT:
            time.sleep(chance.uniform(4, 14))
            if job.is_alive:
                job.kill(Victim.GROUP)
        else:
            job.wait(300)
    finally:
        job.reap()
