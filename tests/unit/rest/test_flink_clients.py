"""Clients of Flink's, as they are on PyPI, at our server: list jobs, read checkpoints, trigger, stop."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flink_job_manager_api import AuthenticatedClient
from flink_job_manager_api.api.default import (
    cancel_job,
    get_checkpoint_config,
    get_checkpoint_statistic_details,
    get_checkpoint_status,
    get_checkpointing_statistics,
    get_cluster_overview,
    get_dashboard_configuration,
    get_job_accumulators,
    get_job_config,
    get_job_details,
    get_job_exceptions,
    get_job_ids_with_statuses_overview,
    get_job_plan,
    get_job_status_info,
    get_job_vertex_back_pressure,
    get_job_vertex_details,
    get_jobs_overview,
    get_savepoint_status,
    get_subtasks_times,
    get_task_checkpoint_statistics,
    get_task_managers,
    trigger_checkpoint,
    trigger_savepoint,
    trigger_stop_with_savepoint,
)
from flink_job_manager_api.models import (
    CheckpointTriggerRequestBody,
    SavepointTriggerRequestBody,
    StopWithSavepointRequestBody,
)
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from flinkish_spark.rest.server import UiServer
from tests.support.rest_rig import TABLE, TOKEN, ShownJob, serving, shown_job


@pytest.fixture
def job(tmp_path: Path) -> ShownJob:
    return shown_job(tmp_path / "jobs" / "orders")


@pytest.fixture
def server(job: ShownJob) -> Iterator[UiServer]:
    with serving(job.root.parent) as server:
        yield server


def completed(state: Callable[[], Any]) -> Any:
    """Ask until an operation is COMPLETED, as Flink's documents say; return what came of it."""
    for _ in range(600):
        found = state()
        if found.status.id.value == "COMPLETED":
            return found.operation.to_dict()
        time.sleep(0.05)
    raise AssertionError("the operation does not end")


def test_the_typed_client_reads_everything_that_it_has_types_for(server: UiServer, job: ShownJob) -> None:
    client = AuthenticatedClient(server.url.rstrip("/"), TOKEN, raise_on_unexpected_status=True)
    for call in (get_cluster_overview, get_dashboard_configuration, get_task_managers):
        assert call.sync(client=client) is not None
    (listed,) = get_jobs_overview.sync(client=client).jobs
    assert (listed.jid, listed.name, listed.state.value) == (str(job.uuid), "orders", "RUNNING")
    (again,) = get_job_ids_with_statuses_overview.sync(client=client).jobs
    assert again.id == listed.jid
    for call in (get_job_plan, get_job_config, get_job_accumulators, get_job_status_info):
        assert call.sync(listed.jid, client=client) is not None
    causes = get_job_exceptions.sync(listed.jid, client=client).exception_history.entries
    assert causes[0].task_name == "totals"
    for vertex in get_job_details.sync(listed.jid, client=client).vertices:
        for call in (get_job_vertex_details, get_job_vertex_back_pressure, get_subtasks_times):
            assert call.sync(listed.jid, vertex.id, client=client) is not None
    assert get_checkpoint_config.sync(listed.jid, client=client).interval == 10_000
    task = get_task_checkpoint_statistics.sync(listed.jid, 6, TABLE, client=client)
    assert (task.status.value, task.state_size) == ("COMPLETED", 20_000)


def test_the_typed_client_reads_checkpoints(server: UiServer, job: ShownJob) -> None:
    # For these it has no types: Flink's document has none that a generator takes.
    client = AuthenticatedClient(server.url.rstrip("/"), TOKEN)
    content = get_checkpointing_statistics.sync_detailed(str(job.uuid), client=client).content
    newest = json.loads(content)["latest"]["completed"]["id"]
    content = get_checkpoint_statistic_details.sync_detailed(str(job.uuid), newest, client=client).content
    assert json.loads(content)["tasks"][TABLE]["status"] == "COMPLETED"


def test_the_typed_client_triggers_and_stops(server: UiServer, job: ShownJob, tmp_path: Path) -> None:
    client, job_id = AuthenticatedClient(server.url.rstrip("/"), TOKEN), str(job.uuid)
    parent = str(tmp_path / "savepoints")
    with job.running(job.carry_out) as seen:
        begun = trigger_checkpoint.sync(job_id, client=client, body=CheckpointTriggerRequestBody())
        done = completed(lambda: get_checkpoint_status.sync(job_id, begun.request_id, client=client))
        assert done == {"checkpointId": 8}
        asked = SavepointTriggerRequestBody(target_directory=parent)
        taken = trigger_savepoint.sync(job_id, client=client, body=asked)
        done = completed(lambda: get_savepoint_status.sync(job_id, taken.request_id, client=client))
        assert Path(done["location"]).parent == Path(parent) and Path(done["location"]).is_dir()
        wanted = StopWithSavepointRequestBody(target_directory=parent, drain=False)
        stop = trigger_stop_with_savepoint.sync(job_id, client=client, body=wanted)
        completed(lambda: get_savepoint_status.sync(job_id, stop.request_id, client=client))
    assert [one.kind.value for one in seen] == ["CHECKPOINT", "SAVEPOINT", "STOP_WITH_SAVEPOINT"]
    assert get_job_details.sync(job_id, client=client).state.value == "FINISHED"
    assert cancel_job.sync_detailed(job_id, client=client).status_code == 409


def test_the_mcp_server_reads_jobs_checkpoints_and_causes(server: UiServer, job: ShownJob) -> None:
    told = asyncio.run(asked_of_mcp(server.url, str(job.uuid)))
    (listed,) = told["list_jobs"]
    assert (listed["id"], listed["state"]) == (str(job.uuid), "RUNNING")
    (checkpoints,) = told["checkpoint_stats"]
    assert checkpoints["last_completed"]["id"] == 6
    assert checkpoints["last_failed"]["failure_message"] == "TASK_FAILED: no broker answered"
    (causes,) = told["job_exceptions"]
    assert causes["recent"][0]["task"] == "totals"
    held = [(one["vertex"], one["backpressured_ms_per_s"]) for one in told["backpressure"]]
    assert sorted(held)[:2] == [("Sink: table", 0), ("Sink: topic", 0)]
    (verdict,) = told["diagnose_job"]
    assert verdict["state"] == "RUNNING"


async def asked_of_mcp(url: str, job_id: str) -> dict[str, list[Any]]:
    """Start the server of MCP as its users do, and call its tools; return the JSON of each answer."""
    program = str(Path(sys.executable).with_name("flink-mcp-server"))
    environment = {**os.environ, "FLINK_REST_URL": url, "FLINK_REST_TOKEN": TOKEN}
    told: dict[str, list[Any]] = {}
    parameters = StdioServerParameters(command=program, env=environment)
    async with (
        stdio_client(parameters) as (read, write),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        calls = ["list_jobs", "cluster_overview", "fleet_overview", "list_jars", "list_log_files"]
        of_job = ["job_details", "job_exceptions", "checkpoint_stats", "backpressure", "list_savepoints"]
        of_job += ["job_timeline", "diagnose_job", "job_metrics", "job_config"]
        for name in (*calls, *of_job):
            answer = await session.call_tool(name, {"job_id": job_id} if name in of_job else {})
            assert not answer.isError, (name, answer.content)
            told[name] = [json.loads(one.text) for one in answer.content]
    return told
