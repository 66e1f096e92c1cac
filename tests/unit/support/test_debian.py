"""Programs out of Debian packages: who comes while another one unpacks waits for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.support import debian


def test_of_several_at_the_same_time_one_unpacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lanes of tests begin in a fresh clone, and both want a database."""
    running, most, calls = 0, 0, 0

    def unpack(choose: object, into: Path) -> None:
        nonlocal running, most, calls
        calls, running = calls + 1, running + 1
        most = max(most, running)
        time.sleep(0.05)
        into.mkdir()
        (into / debian._STAMP).touch()
        running -= 1

    monkeypatch.setattr(debian, "_unpack", unpack)
    monkeypatch.setattr(debian.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    found: list[Path] = []

    def lane() -> None:
        found.append(debian.unpack(lambda apt: [], tmp_path / "build" / "db"))

    lanes = [threading.Thread(target=lane) for _ in range(4)]
    for one in lanes:
        one.start()
    for one in lanes:
        one.join()
    assert found == [tmp_path / "build" / "db"] * 4 and (most, calls) == (1, 1)
