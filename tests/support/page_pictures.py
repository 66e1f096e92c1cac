"""Takes the pictures of the page that `docs/ui.md` shows: `python -m tests.support.page_pictures docs/ui`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.browser import browser
from tests.support.rest_rig import serving, shown_job
from tests.unit.rest.test_page import ten_thousand

WIDE, NARROW = {"width": 1120, "height": 700}, {"width": 390, "height": 780}


def main(out: Path) -> None:
    """Write the pictures into a folder."""
    # Its name is on the pictures.
    root = Path(tempfile.gettempdir()) / "flinkish"
    shutil.rmtree(root, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        (root / "empty").mkdir(parents=True)
        job = shown_job(root / "jobs" / "orders", checkpoints=12)
        job.measured_over_time()
        many = ten_thousand(root / "many" / "orders", patch)
        with serving(root / "jobs") as jobs, serving(root / "empty") as empty, serving(root / "many") as all_:
            for name, server, address, size, scheme in (
                ("graph", jobs, f"/job/{job.uuid}/graph", WIDE, "light"),
                ("lines", jobs, f"/job/{job.uuid}/lines", WIDE, "light"),
                ("checkpoints", jobs, f"/job/{job.uuid}/checkpoints", WIDE, "light"),
                ("checkpoint", jobs, f"/job/{job.uuid}/checkpoints/show/9", WIDE, "dark"),
                ("sinks", jobs, f"/job/{job.uuid}/sinks", WIDE, "light"),
                ("time", jobs, f"/job/{job.uuid}/time", WIDE, "dark"),
                ("restarts", jobs, f"/job/{job.uuid}/restarts", WIDE, "light"),
                ("operate", jobs, f"/job/{job.uuid}/operate", WIDE, "dark"),
                ("narrow", jobs, f"/job/{job.uuid}/graph", NARROW, "light"),
                ("empty", empty, "/", WIDE, "light"),
                ("ten-thousand", all_, f"/job/{many.uuid}/checkpoints", WIDE, "light"),
            ):
                with browser() as chromium:
                    page = chromium.new_context(viewport=size, color_scheme=scheme).new_page()
                    page.goto(f"{server.url}#{address}")
                    page.locator("main h1").wait_for()
                    page.wait_for_timeout(1_500)
                    is_long = name in ("checkpoints", "lines", "narrow")
                    page.screenshot(path=out / f"{name}.png", full_page=is_long)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
