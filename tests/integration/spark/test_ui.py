"""The page of a job that runs, in a real browser, and one of Flink's clients at the same server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flink_job_manager_api import AuthenticatedClient
from flink_job_manager_api.api.default import (
    get_job_details,
    get_jobs_overview,
    get_savepoint_status,
    trigger_stop_with_savepoint,
)
from flink_job_manager_api.models import StopWithSavepointRequestBody

from flinkish_spark import MemorySink, UiConfig
from flinkish_spark.sources import DataGeneratorSource, RandomChoice, RandomLong, RateLimit
from tests.support.browser import browser
from tests.support.jobs import TOTAL, RunningTotal, await_that, end, environment


def test_a_savepoint_is_taken_on_the_page_and_appears_there(spark: Any, tmp_path: Path) -> None:
    fields = {"user": RandomChoice(["ann", "bob"]), "amount": RandomLong(1, 9)}
    env = environment(spark, tmp_path / "job")
    orders = env.from_source(DataGeneratorSource(fields, rate=RateLimit(50)), uid="orders")
    totals = orders.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(MemorySink(str(tmp_path)), uid="out")
    client = env.execute_async(ui=UiConfig(savepoint_dir=str(tmp_path / "savepoints")))
    try:
        await_that(lambda: client.progress.checkpoints >= 2, client)
        assert client.ui is not None
        with browser() as chromium:
            _on_the_page(chromium.new_page(), client.ui.link, client.job_id)
        taken = list((tmp_path / "savepoints").iterdir())
        assert [(one / "savepoint.json").is_file() for one in taken] == [True]
        _stopped_by_flinks_client(client.ui)
        assert client.wait(timeout_ms=60_000)
        assert len(list((tmp_path / "savepoints").iterdir())) == 2
    finally:
        end(client)


def _on_the_page(page: Any, link: str, job_id: str) -> None:
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(link)
    page.get_by_role("link", name="orders", exact=True).click()
    page.get_by_role("img", name="out: RUNNING").wait_for()
    assert page.url.endswith(f"#/job/{job_id}/graph") and "token" not in page.url
    page.get_by_role("link", name="Operate").click()
    page.get_by_role("button", name="Take a savepoint").click()
    # Nothing has happened yet: somebody has to say yes.
    page.get_by_role("button", name="Yes, take a savepoint").click()
    page.get_by_text("✓ savepoint: ").wait_for(timeout=60_000)
    page.get_by_role("link", name="Checkpoints").click()
    # Told by the server, not asked for: the page is not loaded again.
    page.get_by_role("cell", name="savepoint", exact=True).first.wait_for()
    assert not troubles


def _stopped_by_flinks_client(ui: Any) -> None:
    client = AuthenticatedClient(ui.url.rstrip("/"), ui.token)
    (job,) = get_jobs_overview.sync(client=client).jobs
    assert (job.name, job.state.value) == ("orders", "RUNNING")
    details = get_job_details.sync(job.jid, client=client)
    assert [vertex.name for vertex in details.vertices] == ["Source: orders", "totals", "Sink: out"]
    begun = trigger_stop_with_savepoint.sync(job.jid, client=client, body=StopWithSavepointRequestBody())
    for _ in range(300):
        found = get_savepoint_status.sync(job.jid, begun.request_id, client=client)
        if found.status.id.value == "COMPLETED":
            break
        time.sleep(0.2)
    assert "location" in found.operation.to_dict()
