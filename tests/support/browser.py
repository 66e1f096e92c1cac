"""A real Chromium for tests of the page: the machine's, or Debian's, unpacked without installing it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.debian import library_path, unpack
from tests.support.services import BUILD

_PACKAGES = ("chromium", "chromium-common")


def _chromium() -> tuple[str, dict[str, str]]:
    """Return the program and the environment that it needs beside this one."""
    found = shutil.which("chromium")
    if found is not None:
        return found, {}
    root = unpack(lambda apt: _PACKAGES, Path(BUILD / "chromium"))
    return str(root / "usr/lib/chromium/chromium"), {"LD_LIBRARY_PATH": library_path(root)}


@contextmanager
def browser() -> Iterator[Any]:
    """Start a browser without a window; a playwright `Browser`."""
    # Here and not above: it starts a process of its own.
    from playwright.sync_api import sync_playwright

    program, more = _chromium()
    with sync_playwright() as playwright:
        # Root may not use Chromium's own sandbox, and in a container nobody may.
        started = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"], env={**os.environ, **more}
        )
        try:
            yield started
        finally:
            started.close()
