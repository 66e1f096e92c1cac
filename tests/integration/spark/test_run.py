"""`flinkish run`: the same program in a process of its own, on a cluster, and what it says of itself."""

from __future__ import annotations

import json
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
from tests.support.services import BUILD, ROOT

PROGRAM = ROOT / "tests" / "support" / "dependent.py"
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.memory": "600m",
    "spark.orders.limit": "4 and 5",
}


@contextmanager
def started(folder: Path, *options: str, program: Path = PROGRAM, words: tuple[str, ...] = ()) -> Iterator[Any]:
    settings = [word for name, value in SETTINGS.items() for word in ("-D", f"{name}={value}")]
    command = [sys.executable, "-m", "flinkish_spark.cli", "run", *options, *settings]
    command += ["--jars", str(BUILD / "jars"), str(program), *words]
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
        found = json.loads(said[-1]) if said else {"log": (folder / "log").read_text()[-3_000:]}
        return process.returncode, {**found, "is_same_process": found.get("pid") == process.pid}


def prepared(folder: Path) -> tuple[str, ...]:
    module = f"made_{uuid.uuid4().hex[:12]}"
    make_files(folder / "files")
    (folder / f"{module}.py").write_text("SAYS = 'imported'\n")
    return ("--folder", str(folder), "--module", module)


def found_in(folder: Path) -> dict[str, set[str]]:
    files = (folder / "out").glob("*/*.json")
    found: dict[str, set[str]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            found.setdefault(file.parent.name, set()).add(json.loads(line)["found"])
    return found


WANTED = {**{name: {found} for name, found in EXPECTED.items()}, "import": {"imported"}}


@pytest.mark.timeout(300)
def test_one_program_runs_here_and_on_a_cluster(tmp_path: Path) -> None:
    """Its executors are other processes, and find what it has registered."""
    (tmp_path / "cluster").mkdir()
    words = prepared(tmp_path / "cluster")
    with MiniCluster(tmp_path / "workers", workers=2) as cluster:
        status, said = ended(tmp_path / "cluster", "--target", cluster.master, words=words)
        assert (status, said.get("master")) == (0, cluster.master), said
    assert (said["setting"], said["here"], said["is_same_process"]) == ("4 and 5", "imported", True)
    assert found_in(tmp_path / "cluster") == WANTED
    shipped = list((tmp_path / "workers").glob("worker-*/*/*/flinkish-*/word.txt"))
    assert {file.parents[3].name for file in shipped} == {"worker-0", "worker-1"}


@pytest.mark.nightly(by_day="tests/integration/spark/test_run.py")
def test_the_same_program_runs_in_this_process(tmp_path: Path) -> None:
    status, said = ended(tmp_path, "--target", "local[2]", words=prepared(tmp_path))
    assert (status, said.get("master"), said.get("is_same_process")) == (0, "local[2]", True), said
    assert found_in(tmp_path) == WANTED
    (tmp_path / "again").mkdir()
    status, said = ended(tmp_path / "again", "-t", "local[1]", words=(*prepared(tmp_path / "again"), "--fail"))
    assert status == 7, said
