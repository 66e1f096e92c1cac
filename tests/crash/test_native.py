"""Spark's own state under kills: every query's rows are those of a batch query, none lost and none twice."""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from demo.process import JobProcess, Victim
from demo.rig import _environment
from tests.crash.lives import SEED_VARIABLE
from tests.support.cli_rig import flinkish
from tests.support.jobs import eventually
from tests.support.killing import KILL_AT_VARIABLE
from tests.support.native_queries import QUERIES, write_end, write_events

SHOT = "shot"
#: Where the job is killed, in turn; more events come before each start.
POINTS = ("decision:before:1", SHOT, "spark-commit:after:1", "decision:after:1", "sink-commit:after:1")
GROUPS = {
    "windows": ("tumbling", "sliding", "session", "two-aggregates", "distinct-users", "top"),
    "joins": ("inner-join", "left-join", "full-join", "distinct-orders", "distinct-within"),
    "functions": ("running-totals", "silences", "left-join"),
    "sources": ("tumbling", "inner-join", "left-join"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", GROUPS)
def test_rows_are_exact_whatever_is_killed(spark: Any, run_directory: Path, group: str) -> None:
    chance, queries = random.Random(int(os.environ.get(SEED_VARIABLE, "7"))), GROUPS[group]
    shutil.rmtree(run_directory, ignore_errors=True)
    (run_directory / "in").mkdir(parents=True)
    command = [
        sys.executable, "-m", "tests.crash.native_app", "--directory", str(run_directory),
        "--queries", *queries, *(["--sources"] if group == "sources" else []),
    ]  # fmt: skip
    for number, point in enumerate(POINTS):
        write_events(run_directory / "in", number)
        kill_at(command, point, run_directory, chance)
    write_end(run_directory / "in", len(POINTS))
    expected = {name: QUERIES[name].expected(spark, run_directory / "in") for name in queries}
    assert all(expected.values())
    job = JobProcess(command, _environment(), run_directory / "driver.log", chance)
    job.start({})
    try:
        for name in queries:
            eventually(lambda name=name: found(spark, run_directory, name) >= expected[name], within_s=400)
            assert found(spark, run_directory, name) == expected[name], name
    finally:
        job.reap()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", ["spark-commit:after:1", "decision:before:1", "decision:after:1"])
def test_an_adopted_query_is_killed_before_its_first_checkpoint(
    spark: Any, run_directory: Path, point: str
) -> None:
    chance, name = random.Random(int(os.environ.get(SEED_VARIABLE, "7"))), "tumbling"
    shutil.rmtree(run_directory, ignore_errors=True)
    (run_directory / "in").mkdir(parents=True)
    command = [
        sys.executable, "-m", "tests.crash.native_app", "--directory", str(run_directory), "--queries", name,
    ]  # fmt: skip
    query, folder = QUERIES[name], run_directory / "in"
    for number in range(3):
        write_events(folder, number)
    writer = query.stream(spark, folder).writeStream.format("json").trigger(availableNow=True)
    writer = writer.option("path", str(run_directory / "plain"))
    writer.option("checkpointLocation", str(run_directory / "checkpoint")).start().awaitTermination()
    assert flinkish("adopt", run_directory / "checkpoint", run_directory / "job").exit_code == 0
    write_events(folder, 3)
    kill_at(command, point, run_directory, chance)
    write_end(folder, 4)
    schema, expected = query.stream(spark, folder).schema, query.expected(spark, folder)
    plain = Counter(map(tuple, spark.read.schema(schema).json(str(run_directory / "plain")).collect()))
    assert plain
    job = JobProcess(command, _environment(), run_directory / "driver.log", chance)
    job.start({})
    try:
        eventually(lambda: plain + found(spark, run_directory, name) >= expected, within_s=400)
        assert plain + found(spark, run_directory, name) == expected
    finally:
        job.reap()


def kill_at(command: list[str], point: str, directory: Path, chance: random.Random) -> None:
    job = JobProcess(command, _environment(), directory / "driver.log", chance)
    job.start({} if point == SHOT else {KILL_AT_VARIABLE: point})
    try:
        if point == SHOT:
            time.sleep(chance.uniform(10, 25))
            job.kill(Victim.GROUP)
        else:
            job.wait(300)
    finally:
        job.reap()


def found(spark: Any, directory: Path, name: str) -> Counter[tuple[Any, ...]]:
    """Return the rows that a reader of the files sees, without those of the last, far event."""
    folder = directory / "out" / name
    seen = [path for path in folder.rglob("*") if path.is_file()]
    own = [str(path) for path in seen if not any(part[0] in "._" for part in path.relative_to(folder).parts)]
    if not own:
        return Counter()
    schema = QUERIES[name].stream(spark, directory / "in").schema
    rows = map(tuple, spark.read.schema(schema).json(own).collect())
    return Counter(row for row in rows if "end" not in row and -1 not in row)
