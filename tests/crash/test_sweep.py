"""A sample of `make crash-sweep`: a few faults, and in the night kills, at calls of one checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.crash.sweep.__main__ import chooser, summary
from tests.crash.sweep.points import Fault
from tests.crash.sweep.results import revision
from tests.crash.sweep.rounds import Plan
from tests.crash.sweep.sinks import SWEPT
from tests.crash.sweep.sweep import Sweep

_RUNS = 1


def sample(directory: Path, sinks: tuple[str, ...], *faults: Fault, store: str = "disk") -> None:
    choose = chooser(_RUNS, faults, "")
    for old in directory.glob("*.jsonl"):
        old.unlink()
    plan = Plan(directory / "work", directory, revision(), sinks, choose, time.monotonic() + 900, store)
    Sweep(plan).run()

    line = summary(sinks, directory, plan.revision, choose)

    assert not any(line[name] for name in ("lost", "duplicated", "partial_checkpoints", "stuck", "left")), (
        line
    )
    assert all(one["runs"] >= _RUNS for one in line["sinks"].values()), line


@pytest.mark.timeout(1_200)
def test_a_call_that_fails(run_directory: Path) -> None:
    """Without a kill, so in one process; the kills of every run are in `tests/crash/test_all_families.py`."""
    sample(run_directory, ("delta",), Fault.FAIL, Fault.LOST, Fault.TWICE)


@pytest.mark.nightly
@pytest.mark.timeout(1_200)
def test_a_few_points_of_tables_in_a_bucket(run_directory: Path) -> None:
    sample(run_directory, ("delta", "delta-upsert"), *Fault, store="s3")


@pytest.mark.nightly
@pytest.mark.timeout(1_200)
def test_a_few_points_of_two_sinks(run_directory: Path) -> None:
    sample(run_directory, ("delta", "jdbc-sqlite"), *Fault)


@pytest.mark.nightly
@pytest.mark.timeout(1_200)
def test_a_few_points_of_every_sink(run_directory: Path) -> None:
    sample(run_directory, SWEPT, *Fault)
