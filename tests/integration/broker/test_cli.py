"""The command line, as a process of its own, beside a job that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import KafkaSink
from tests.support.jobs import (
    TOTAL,
    RunningTotal,
    await_that,
    environment,
    expected_totals,
    order,
    orders_source,
    produce,
    rows,
    run_until,
    running,
    totals_in,
)

ROOT = Path(__file__).resolve().parents[3]
ENOUGH = ("--timeout-s", "60")


def flinkish(*words: object, status: int = 0) -> Any:
    """Run the command line; return its JSON document."""
    command = [sys.executable, "-m", "flinkish_spark.cli", *map(str, words), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.returncode == status, run.stdout + run.stderr
    return json.loads(run.stdout)


def job(spark, broker, job_dir, source, sink, **settings):
    env = environment(spark, job_dir, **settings)
    stream = env.from_source(orders_source(broker.bootstrap_servers, source), uid="orders")
    totals = stream.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(KafkaSink(broker.bootstrap_servers, sink, key="user"), uid="kafka")
    return env


def send(broker, source, amounts: dict[str, list[int]]) -> None:
    for user, all_ in amounts.items():
        produce(broker.bootstrap_servers, source, [order(user, amount) for amount in all_])


def test_a_running_job_is_looked_at_asked_and_set_back(spark, broker, topic, job_dir):
    source, sink = topic(), topic()
    first, second = {"a": [1, 2], "b": [3]}, {"a": [4], "c": [5, 6]}
    send(broker, source, first)
    with running(job(spark, broker, job_dir, source, sink)) as client:
        await_that(lambda: rows(client, "kafka") == 3, client)
        asked = flinkish("checkpoints", "trigger", job_dir, *ENOUGH)
        assert asked["outcome"] == "COMPLETED"

        shown = flinkish("checkpoints", "show", job_dir, asked["checkpoint"])
        assert (shown["purpose"], shown["status"]) == ("USER", "COMPLETED")
        assert shown["can_be_rewound_to"], shown["why_not"]
        assert shown["durations"]["end_to_end_ms"] is not None and shown["participants"]
        listed = flinkish("checkpoints", "list", job_dir)
        assert asked["checkpoint"] in [one["id"] for one in listed["checkpoints"]]

        send(broker, source, second)
        await_that(lambda: rows(client, "kafka") == 6, client)
        back = flinkish("rewind", job_dir, asked["checkpoint"], "--yes", *ENOUGH)
        assert (back["outcome"], back["tables"]) == ("DONE", "KEEP") and back["lineage"] >= 1
        # The orders behind the checkpoint are read again, by the state of then.
        await_that(lambda: rows(client, "kafka") == 9, client)
        assert flinkish("cancel", job_dir, "--yes", *ENOUGH)["outcome"] == "COMPLETED"
        assert client.wait(timeout_ms=240_000)
    again = expected_totals({"a": [1, 2, 4], "c": [5, 6], "b": [3]})
    again.subtract(expected_totals({"a": [1, 2], "b": [3]}))
    assert (
        totals_in(broker.bootstrap_servers, sink)
        == expected_totals({"a": [1, 2, 4], "b": [3], "c": [5, 6]}) + again
    )
    gone = flinkish("checkpoints", "trigger", job_dir, "--timeout-s", "1", status=3)
    assert gone["outcome"] == "NOT_TAKEN"
    assert not list(job_dir.glob("requests/*"))


@pytest.mark.nightly
def test_a_job_that_was_stopped_with_a_savepoint_goes_on(spark, broker, topic, job_dir, tmp_path):
    source, sink = topic(), topic()
    send(broker, source, {"a": [1, 2], "b": [3]})
    with running(job(spark, broker, job_dir, source, sink)) as client:
        await_that(lambda: rows(client, "kafka") == 3, client)
        taken = flinkish("savepoint", "trigger", job_dir, tmp_path / "saved/one", *ENOUGH)
        stopped = flinkish("savepoint", "stop", job_dir, tmp_path / "saved/two", *ENOUGH)
        assert taken["outcome"] == stopped["outcome"] == "COMPLETED"
        assert client.wait(timeout_ms=240_000)
    found = flinkish("savepoint", "list", tmp_path)["savepoints"]
    assert [(one["path"], one["savepoint"]["checkpoint"]) for one in found] == [
        (str(tmp_path / "saved/one"), taken["checkpoint"]),
        (str(tmp_path / "saved/two"), stopped["checkpoint"]),
    ]
    assert list(found[0]["savepoint"]["operators"]) == ["totals"]
    shown = flinkish("checkpoints", "show", job_dir, stopped["checkpoint"])
    assert shown["purpose"] == "FINAL_SAVEPOINT"

    send(broker, source, {"a": [4]})
    run_until(job(spark, broker, job_dir, source, sink), lambda client: rows(client, "kafka") == 1)
    assert totals_in(broker.bootstrap_servers, sink) == expected_totals({"a": [1, 2, 4], "b": [3]})
