"""The page in a real browser, over job directories: with a keyboard, narrow, dark, with no data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.protocol.statistics import StatisticsHistory
from flinkish_spark.rest.server import UiServer
from tests.support.browser import browser
from tests.support.rest_rig import ShownJob, serving, shown_job

TABS = ("graph", "lines", "checkpoints", "sinks", "time", "restarts", "operate", "checkpoints/show/5")
NARROW = {"width": 390, "height": 800}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture
def troubles() -> list[str]:
    """What the browser complains of; no test may leave any."""
    found: list[str] = []
    yield found
    assert not found


def opened(chromium: Any, troubles: list[str], **settings: Any) -> Any:
    page = chromium.new_context(**settings).new_page()
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)

    def failed(request: Any) -> None:
        # Events end with the server; and whoever leaves a page has its requests aborted.
        if "events" not in request.url and request.failure != "net::ERR_ABORTED":
            troubles.append(request.url)

    page.on("requestfailed", failed)
    return page


def shown(page: Any, server: UiServer, address: str, text: str) -> None:
    page.goto(f"{server.url}#{address}")
    page.get_by_text(text).first.wait_for(timeout=15_000)


@pytest.mark.parametrize(
    "settings",
    [{"color_scheme": "light"}, {"color_scheme": "dark", "viewport": NARROW}],
    ids=["wide", "narrow, dark"],
)
def test_each_part_is_shown(
    chromium: Any, troubles: list[str], tmp_path: Path, settings: dict[str, Any]
) -> None:
    job = shown_job(tmp_path / "orders")
    job.measured_over_time(hours=2)
    page = opened(chromium, troubles, **settings)
    says = (
        "Measured between",
        "Rows per second",
        "wait for its micro-batch",
        "An open transaction",
        "As of checkpoint",
        "lost its broker",
        "Go back",
        "Participants",
    )
    with serving(tmp_path) as server:
        shown(page, server, "/", "RUNNING")
        for tab, text in zip(TABS, says, strict=True):
            shown(page, server, f"/job/{job.uuid}/{tab}", text)
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, tab
        # What colours say is said in numbers, too.
        shown(page, server, f"/job/{job.uuid}/graph", "Measured between")
        said = page.get_by_role("img", name="totals: RUNNING").get_attribute("aria-label")
        assert said is not None and said.endswith("busy 40 %, held back 10 %")
        page.close()


def test_lines_say_in_words_what_they_show(chromium: Any, troubles: list[str], tmp_path: Path) -> None:
    job = shown_job(tmp_path / "orders")
    job.measured_over_time(hours=2)
    job.report = replace(job.report, settings={**job.report.settings, "spark_ui": "javascript:alert(1)"})
    job.job_dir.put_report(job.report)
    page = opened(chromium, troubles, viewport=NARROW)
    with serving(tmp_path) as server:
        shown(page, server, f"/job/{job.uuid}/lines", "Rows per second")
        rows = page.get_by_role("img", name="Rows per second").get_attribute("aria-label")
        assert rows is not None and "; in: 4," in rows and "; out: 1," in rows
        took = page.get_by_role("img", name="Checkpoint duration").get_attribute("aria-label")
        assert took is not None and took.endswith("interval: 10 s")
        # The job was down for three minutes; a dashed line where it went on.
        assert page.locator("svg path.line.sync").first.get_attribute("d").count("M") == 2
        assert page.locator("svg line.start").count() == 3
        # What a job reports as an address is a link only if it is one of a page.
        assert page.locator("main a[href^='javascript']").count() == 0
        # Three facts beside each other on a phone.
        assert (
            page.evaluate(
                "getComputedStyle(document.querySelector('dl.facts')).gridTemplateColumns.split(' ').length"
            )
            == 3
        )
        page.get_by_role("link", name="Last week").click()
        page.get_by_text("A point stands for 15 min.").wait_for()
        page.close()


def test_an_interval_that_is_never_kept_is_said(chromium: Any, troubles: list[str], tmp_path: Path) -> None:
    job = shown_job(tmp_path / "orders")
    job.report = replace(job.report, settings={**job.report.settings, "interval_ms": 5_000})
    job.job_dir.put_report(job.report)
    page = opened(chromium, troubles)
    with serving(tmp_path) as server:
        shown(page, server, f"/job/{job.uuid}/checkpoints", "The interval of 5.0 s is never kept")
        page.get_by_role("link", name="jobs and stages").wait_for()
        page.close()


def test_what_holds_a_checkpoint_back_is_on_every_tab(
    chromium: Any, troubles: list[str], tmp_path: Path
) -> None:
    job = shown_job(tmp_path / "orders")
    job.held_back()
    page = opened(chromium, troubles, viewport=NARROW)
    with serving(tmp_path) as server:
        shown(page, server, f"/job/{job.uuid}/sinks", "no <b>route</b>")
        assert page.get_by_role("heading", name="Held back").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.close()


def test_names_of_a_job_are_text_and_nothing_else(chromium: Any, troubles: list[str], tmp_path: Path) -> None:
    job = shown_job(tmp_path / "orders")
    job.failed_and_restarted("<img src=x onerror=alert(1)><script>alert(2)</script>")
    page = opened(chromium, troubles)
    page.on("dialog", lambda dialog: troubles.append(dialog.message))
    with serving(tmp_path) as server:
        shown(page, server, f"/job/{job.uuid}/restarts", "<img src=x onerror=alert(1)>")
        assert page.locator("main img, main script").count() == 0
        page.close()


def test_a_savepoint_is_taken_with_the_keyboard_alone(
    chromium: Any, troubles: list[str], tmp_path: Path
) -> None:
    job = shown_job(tmp_path / "jobs" / "orders")
    page = opened(chromium, troubles)
    with (
        serving(tmp_path / "jobs", savepoint_dir=str(tmp_path / "savepoints")) as server,
        job.running(job.carry_out) as seen,
    ):
        page.goto(server.link.replace(" ", "%20"))
        page.get_by_role("link", name="orders", exact=True).focus()
        page.keyboard.press("Enter")
        page.get_by_role("link", name="Operate").focus()
        page.keyboard.press("Enter")
        button = page.get_by_role("button", name="Take a savepoint")
        button.focus()
        page.keyboard.press("Enter")
        # The dialog holds the focus, and its first answer is no.
        page.get_by_role("button", name="No", exact=True).wait_for()
        page.keyboard.press("Enter")
        assert not seen
        button.focus()
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Yes, take a savepoint").wait_for()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.get_by_text("✓ savepoint: ").wait_for(timeout=15_000)
        assert [one.kind.value for one in seen] == ["SAVEPOINT"]
        page.close()


def test_without_the_token_the_page_asks_for_it(chromium: Any, tmp_path: Path) -> None:
    job = shown_job(tmp_path / "orders")
    # The browser complains of the 401, as it should.
    page = opened(chromium, [])
    with serving(tmp_path) as server, job.running(job.carry_out) as seen:
        shown(page, server, f"/job/{job.uuid}/operate", "Take a checkpoint")
        page.get_by_role("button", name="Take a checkpoint").click()
        page.get_by_role("button", name="Yes, take a checkpoint").click()
        page.get_by_label("Token", exact=True).fill(server.token)
        page.get_by_role("button", name="Use it").click()
        assert not seen
        page.get_by_text("This tab has a token").wait_for()
        page.get_by_role("button", name="Take a checkpoint").click()
        page.get_by_role("button", name="Yes, take a checkpoint").click()
        page.get_by_text("✓ checkpoint 8 is confirmed").wait_for(timeout=15_000)
        page.close()


def test_what_happens_is_shown_without_loading_the_page_again(
    chromium: Any, troubles: list[str], tmp_path: Path
) -> None:
    job = shown_job(tmp_path / "orders")
    page = opened(chromium, troubles)
    with serving(tmp_path) as server:
        shown(page, server, f"/job/{job.uuid}/checkpoints", "7 checkpoints")
        job.completed(8)
        page.get_by_role("link", name="8", exact=True).wait_for(timeout=10_000)
        page.close()


@pytest.mark.parametrize("how", ["mouse", "keyboard"])
def test_what_is_pressed_is_not_replaced_before_it_is_released(
    chromium: Any, troubles: list[str], tmp_path: Path, how: str
) -> None:
    """A job that runs changes what is shown many times a second."""
    job = shown_job(tmp_path / "orders")
    page = opened(chromium, troubles)
    with serving(tmp_path) as server, job.running(job.carry_out):
        shown(page, server, f"/job/{job.uuid}/operate", "Take a checkpoint")
        button = page.get_by_role("button", name="Take a checkpoint")
        button.hover()
        button.focus()
        page.mouse.down() if how == "mouse" else page.keyboard.down("Space")
        job.completed(8)
        # Without a request that could be waited for: what was asked for before it may still wait to be drawn.
        page.wait_for_timeout(2_000)
        page.mouse.up() if how == "mouse" else page.keyboard.up("Space")
        page.get_by_role("button", name="Yes, take a checkpoint").wait_for(timeout=5_000)
        page.close()


def test_a_press_that_clicks_nothing_does_not_stop_the_page(
    chromium: Any, troubles: list[str], tmp_path: Path
) -> None:
    """A scroll bar may be released without the page hearing of it."""
    job = shown_job(tmp_path / "orders")
    page = opened(chromium, troubles)
    with serving(tmp_path) as server:
        shown(page, server, f"/job/{job.uuid}/checkpoints", "7 checkpoints")
        page.get_by_text("7 checkpoints").hover()
        page.mouse.down()
        job.completed(8)
        page.get_by_role("link", name="8", exact=True).wait_for(timeout=10_000)
        page.close()


def test_no_data_is_said_in_words(chromium: Any, troubles: list[str], tmp_path: Path) -> None:
    page = opened(chromium, troubles)
    with serving(tmp_path) as server:
        shown(page, server, "/", "There is no job in these directories yet")
        # It asks again and again: also a server that is gone.
        page.goto("about:blank")
    job = ShownJob(tmp_path / "orders")
    with serving(tmp_path) as server:
        says = (
            "Rates and shares need two",
            "Nothing was measured",
            "There are no checkpoints yet",
            "confirmed up to",
            "no event time",
        )
        for tab, text in zip(("graph", "lines", "checkpoints", "sinks", "time"), says, strict=True):
            shown(page, server, f"/job/{job.uuid}/{tab}", text)
        page.close()


@pytest.mark.nightly
def test_ten_thousand_checkpoints(
    chromium: Any, troubles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ten_thousand(tmp_path / "orders", monkeypatch)
    page = opened(chromium, troubles)
    with serving(tmp_path) as server:
        shown(page, server, f"/job/{job.uuid}/checkpoints", "10,000")
        page.get_by_role("link", name="10000", exact=True).wait_for(timeout=5_000)
        page.get_by_role("link", name="Older than 9951").click()
        page.get_by_role("link", name="9950", exact=True).wait_for(timeout=5_000)
        page.get_by_label("Id of a checkpoint").fill("17")
        page.get_by_role("button", name="Show").click()
        page.get_by_role("heading", name="Checkpoint 17").wait_for(timeout=5_000)
        page.close()


def ten_thousand(root: Path, monkeypatch: pytest.MonkeyPatch) -> ShownJob:
    """Return a job with so many checkpoints, of whose statistics the newest 1,000 are summed up."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    job = ShownJob(root)
    monkeypatch.setattr(job.job_dir, "put_statistics", lambda history: None)
    job.history = StatisticsHistory()
    for number in range(1, 10_001):
        job.completed(number)
    monkeypatch.undo()
    job.job_dir.put_statistics(job.history)
    return job
