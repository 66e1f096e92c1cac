"""Where crash runs leave their traces: below build/, so that they are still there after a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.rig import ROOT


@pytest.fixture
def run_directory(request: pytest.FixtureRequest) -> Path:
    """A directory of this test's own; an earlier run's is emptied."""
    return ROOT / "build" / "crash" / request.node.name
