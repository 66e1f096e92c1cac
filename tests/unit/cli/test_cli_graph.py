"""`flinkish graph`: what the newest start of a job has run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flinkish_spark.protocol.envelope import seal
from tests.support.cli_rig import JobOnDisk, flinkish
from tests.support.job_graphs import PROGRAMS, graph_of

GRAPH = graph_of(PROGRAMS[1])


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    return JobOnDisk(tmp_path / "job")


def test_a_job_that_is_down_shows_what_it_ran(job: JobOnDisk) -> None:
    job.job_dir.put_job_graph(GRAPH)
    shown = flinkish("graph", str(job.root))
    assert shown.exit_code == 0
    assert shown.stdout.startswith("functions-in-front: 3 vertices") and "│   " in shown.stdout
    assert "└── [1] Source: orders -> transform doubled" in shown.stdout


def test_it_comes_as_json_as_a_plan_and_as_pictures(job: JobOnDisk) -> None:
    job.job_dir.put_job_graph(GRAPH)
    found = json.loads(flinkish("graph", str(job.root), "--json").stdout)
    assert found["graph"] == GRAPH.to_json() and found["plan"]["jid"] == str(job.uuid)
    assert json.loads(flinkish("graph", str(job.root), "--plan").stdout) == GRAPH.execution_plan()
    assert flinkish("graph", str(job.root), "--dot").stdout.startswith(
        'digraph "functions-in-front" {\n  rank'
    )
    assert flinkish("graph", str(job.root), "--mermaid").stdout.startswith("flowchart LR\n  v")


def test_a_job_without_a_graph_says_so(job: JobOnDisk) -> None:
    shown = flinkish("graph", str(job.root))
    assert shown.exit_code == 1 and "no job graph yet" in shown.stderr


@pytest.mark.parametrize("content", [b"torn", seal("graph", {"job": "a"}), seal("graph", {"operators": 3})])
def test_a_damaged_graph_is_one_line(job: JobOnDisk, content: bytes) -> None:
    job.job_dir.store.put("graph.json", content)
    shown = flinkish("graph", str(job.root))
    assert shown.exit_code == 1 and shown.stdout == "" and shown.stderr.count("\n") == 1
