"""`flinkish run`: the same program in a process of its own, on a cluster, and what it says of itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.testing import MiniCluster
from tests.support.dependent import EXPECTED, make_files
from tests.support.jobs import eventually
from tests.support.services import BUILD, ROOT

PROGRAM = ROOT / "tests" / "support" / "dependent.py"
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.memory": "600m",
    "spark.orders.limit": "4 and 5",
}
WANTED = {**{name: {found} for name, found in EXPECTED.items()}, "import": {"imported"}}


@contextmanager
def started(folder: Path, *options: str, words: tuple[str, ...] = ()) -> Iterator[Any]:
    settings = [word for name, value in SETTINGS.items() for word in ("-D", f"{name}={value}")]
    command = [sys.executable, "-m", "flinkish_spark.cli", "run", *options, *settings]
    command += ["--jars", str(BUILD / "jars"), str(PROGRAM), *words]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def ended(folder: Path, *options: str, words: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    """Run the program to its end; return the exit status, and what it has said."""
    with started(folder, *options, words=words) as process:
        out, _ = process.communicate(timeout=240)
        said = [line for line in out.splitlines() if line.startswith("{")]
        found = json.loads(said[-1]) if said else {"log": log_of(folder)}
        return process.returncode, {**found, "is_same_process": found.get("pid") == process.pid}


def log_of(folder: Path) -> str:
    return (folder / "log").read_text()[-3_000:]


def prepared(folder: Path, *words: str) -> tuple[str, ...]:
    """Write what the program registers; return its words."""
    module = f"made_{uuid.uuid4().hex[:12]}"
    make_files(folder / "files")
    (folder / f"{module}.py").write_text("SAYS = 'imported'\n")
    return ("--folder", str(folder), "--module", module, *words)


def files_in(folder: Path) -> list[Path]:
    return list((folder / "out").glob("*/*.json"))


def found_in(folder: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for file in files_in(folder):
        for line in file.read_text().splitlines():
            found.setdefault(file.parent.name, set()).add(json.loads(line)["found"])
    return found


@pytest.mark.timeout(300)
def test_one_program_runs_on_a_cluster_whose_executors_find_what_it_has_registered(tmp_path: Path) -> None:
    folder, kinds = tmp_path / "program", ("map", "keyed", "import")
    words = prepared(folder, "--kinds", ",".join(kinds))
    with MiniCluster(tmp_path / "workers", workers=2) as cluster:
        status, said = ended(folder, "--target", cluster.master, words=words)
        assert (status, said.get("master")) == (0, cluster.master), said
    assert (said["setting"], said["here"], said["is_same_process"]) == ("4 and 5", "imported", True)
    assert found_in(folder) == {kind: WANTED[kind] for kind in kinds}
    shipped = list((tmp_path / "workers").glob("worker-*/*/*/flinkish-*/word.txt"))
    assert {file.parents[3].name for file in shipped} == {"worker-0", "worker-1"}


@pytest.mark.nightly
def test_the_same_program_runs_here_and_its_exit_status_is_the_command_s(tmp_path: Path) -> None:
    status, said = ended(tmp_path, "--target", "local[2]", words=prepared(tmp_path))
    assert (status, said.get("master"), said.get("is_same_process")) == (0, "local[2]", True), said
    assert found_in(tmp_path) == WANTED
    status, said = ended(tmp_path, "-t", "local[1]", words=prepared(tmp_path / "again", "--fail"))
    assert status == 7, said


@pytest.mark.nightly
def test_sigterm_takes_a_last_checkpoint(tmp_path: Path) -> None:
    words = prepared(tmp_path, "--kinds", "endless")
    with started(tmp_path, "--target", "local[2]", words=words) as process:
        assert eventually(lambda: bool(found_in(tmp_path)), 120), log_of(tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log_of(tmp_path)
        assert '"ended": "FINISHED"' in process.stdout.read()


@pytest.mark.nightly
def test_a_program_with_a_master_of_its_own_is_refused_elsewhere(tmp_path: Path) -> None:
    words = prepared(tmp_path, "--master", "local[1]")
    status, said = ended(tmp_path, "--target", "local[2]", words=words)
    assert status == 1 and "runs on local[1], and --target says local[2]" in said["log"]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_worker_that_dies_costs_nothing_and_its_executor_s_files_come_again(tmp_path: Path) -> None:
    folder = tmp_path / "program"
    words = prepared(folder, "--kinds", "endless")
    with (
        MiniCluster(tmp_path / "workers", workers=2, cores=2) as cluster,
        started(folder, "--target", cluster.master, "-D", "spark.cores.max=1", words=words) as process,
    ):
        assert eventually(lambda: bool(found_in(folder)), 120), log_of(folder)
        (shipped,) = (tmp_path / "workers").glob("worker-*/*/*/flinkish-*/word.txt")
        before, enough = shipped.parents[3].name, len(files_in(folder)) + 3
        # The only executor is there; another one is started on the other worker.
        cluster.kill_worker(int(before[-1]))
        assert eventually(lambda: len(files_in(folder)) >= enough, 120), log_of(folder)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log_of(folder)
    assert found_in(folder) == {"endless": {"word imported"}}
    shipped_to = {
        file.parents[3].name for file in (tmp_path / "workers").glob("worker-*/*/*/flinkish-*/word.txt")
    }
    assert len(shipped_to) == 2
