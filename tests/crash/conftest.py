"""What crash tests share: traces below build/, servers, and JVMs that start fast."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.rig import ROOT
from tests.crash.class_path import variables
from tests.crash.families_rig import Servers
from tests.crash.kill_points import SEED_VARIABLE, seed


def pytest_report_header() -> str:
    """Say how the kills that are drawn by chance are repeated."""
    return f"kills drawn by chance: {SEED_VARIABLE}={seed()}"


@pytest.fixture(autouse=True, scope="module")
def fast_start() -> Iterator[None]:
    """Put all JARs on the class path of every driver: only what is there can be archived."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables().items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def run_directory(request: pytest.FixtureRequest) -> Path:
    """A directory of this test's own, where traces are found after a failure; an earlier run's is emptied."""
    # Topics are called by it, which may have no brackets.
    return ROOT / "build" / "crash" / re.sub(r"[^\w.-]+", "-", request.node.name).strip("-")


@pytest.fixture(scope="session")
def servers(service: Callable[[str], Any]) -> Servers:
    """What jobs with a sink of every family need; nobody kills it."""
    return Servers(service("broker"), service("postgres"))
