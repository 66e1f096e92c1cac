"""Which files and directories were synced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Synced:
    """Notes every fsync from its making on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._known: set[tuple[int, int]] = set()
        real = os.fsync

        def noting(handle: int) -> None:
            real(handle)
            found = os.fstat(handle)
            self._known.add((found.st_dev, found.st_ino))

        monkeypatch.setattr(os, "fsync", noting)

    def __contains__(self, path: Path) -> bool:
        found = path.stat()
        return (found.st_dev, found.st_ino) in self._known

    def lost_below(self, root: Path) -> list[Path]:
        """Return the directories and files below an old directory that a power cut can take away."""
        return sorted(path for path in root.rglob("*") if path.parent not in self)
