"""Ways from one operator that meet again, in running jobs: what a harness does, over a savepoint, too."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from flinkish_spark import JobStatus, MemorySink, RestoreSettings
from flinkish_spark.sources import Discovery, FileSource, JsonLines
from flinkish_spark.testing import ProgramHarness
from tests.support import two_ways
from tests.support.jobs import await_that, environment, rows, running
from tests.support.two_ways import BY_AT, ORDERS, ROWS

pytestmark = pytest.mark.timeout(600)


def expected(program: Any, *parts: list[Any]) -> Counter[Any]:
    harness = ProgramHarness(lambda orders: program(orders.assign_timestamps_and_watermarks(BY_AT)), ORDERS)
    for part in parts:
        harness.push_all([(row, None) for row in part])
    harness.end_of_input()
    return Counter(map(tuple, harness.take().rows))


def keyed_by_expressions(orders: Any) -> Any:
    """Expressions are seen by the rows of their way only: those of others have other fields, or none."""
    totals = two_ways.totals_of(orders, "totals-9")
    odd = totals.get_side_output(two_ways.ODD)
    upper = F.upper(F.col("user")), F.assert_true(F.col("total") > 0).isNull()
    both = totals.key_by(*upper).connect(
        odd.key_by(F.upper(F.col("who")), F.assert_true(F.col("amount") % 2 == 1).isNull())
    )
    return both.process(two_ways.Counted(), output="user STRING, totals INT, odd INT", uid="expressions")


def test_an_operator_that_others_read_on_several_ways_runs_once(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    orders = env.from_collection(ROWS, ORDERS, uid="orders").assign_timestamps_and_watermarks(BY_AT)
    sinks = {program: MemorySink(f"{tmp_path}/{program.__name__}") for program in two_ways.OVER_OPERATORS}
    for program, sink in sinks.items():
        program(orders).sink_to(sink, uid=program.__name__)
    with running(env) as client:
        assert client.wait(timeout_ms=400_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED and client.progress.restarts == 0
    for program, sink in sinks.items():
        assert Counter(map(tuple, sink.rows())) == expected(program, ROWS), program.__name__
    _, body = (tmp_path / "job" / "facts" / "layout-0.json").read_text().splitlines()
    layout = json.loads(body)
    operators = [uid for uid, _ in layout["operators"]]
    assert sorted(operators) == sorted(set(operators)), "each stands in the plan once"
    assert [scan[1] for scan in layout["scans"]].count("orders") == len(sinks)


@pytest.mark.nightly(by_day="tests/contracts/test_sources.py")
def test_a_job_does_what_a_harness_does(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    orders = env.from_collection(ROWS, ORDERS, uid="orders").assign_timestamps_and_watermarks(BY_AT)
    sinks = {program: MemorySink(f"{tmp_path}/{program.__name__}") for program in two_ways.PROGRAMS}
    for program, sink in sinks.items():
        program(orders).sink_to(sink, uid=program.__name__)
    by_expressions = MemorySink(f"{tmp_path}/expressions")
    keyed_by_expressions(orders).sink_to(by_expressions, uid="expressions-out")
    with running(env) as client:
        assert client.wait(timeout_ms=400_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED and client.progress.restarts == 0
    for program, sink in sinks.items():
        assert Counter(map(tuple, sink.rows())) == expected(program, ROWS), program.__name__
    counted = expected(two_ways.counted_by_name, ROWS)
    assert Counter(map(tuple, by_expressions.rows())) == counted


def feed(folder: Path, name: str, part: list[Any]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(dict(zip(("user", "amount", "at"), row, strict=True))) + "\n" for row in part]
    (folder / f".{name}").write_text("".join(lines))
    (folder / f".{name}").rename(folder / f"{name}.json")


def job(
    spark: Any, tmp_path: Path, name: str, programs: Any, **settings: Any
) -> tuple[Any, list[MemorySink]]:
    env = environment(spark, tmp_path / name, **settings)
    files = FileSource(
        str(tmp_path / "orders"), JsonLines(), ORDERS, discovery=Discovery.CONTINUOUS, discover_every_ms=100
    )
    orders = env.from_source(files, BY_AT, uid="orders")
    sinks = [MemorySink(f"{tmp_path}/{name}-{program.__name__}") for program in programs]
    for program, sink in zip(programs, sinks, strict=True):
        program(orders).sink_to(sink, uid=program.__name__)
    return env, sinks


@pytest.mark.nightly
def test_state_and_positions_go_on_behind_a_restart_and_behind_a_savepoint(
    spark: Any, tmp_path: Path
) -> None:
    parts = ROWS[:3], ROWS[3:5], ROWS[5:]
    programs = (two_ways.joined_with_itself, two_ways.united_branches)
    wanted = [[0, 0]]
    wanted += [[expected(one, *parts[:count]).total() for one in programs] for count in (1, 2, 3)]

    def run(name: str, count: int, **settings: Any) -> tuple[Any, list[MemorySink]]:
        """Run the job until it has emitted what `count` files come to; it is to be stopped then."""
        feed(tmp_path / "orders", str(count), parts[count - 1])
        env, sinks = job(spark, tmp_path, name, programs, **settings)
        client = env.execute_async()
        more = [after - before for before, after in zip(wanted[count - 1], wanted[count], strict=True)]
        await_that(lambda: [rows(client, one.__name__) for one in programs] == more, client)
        return client, sinks

    client, _ = run("first", 1)
    client.stop_with_checkpoint()
    client.wait()
    client, first = run("first", 2)
    client.stop_with_savepoint(str(tmp_path / "savepoint"))
    client.wait()
    client, second = run("second", 3, restore=RestoreSettings(str(tmp_path / "savepoint")))
    client.stop_with_checkpoint()
    client.wait()
    for program, sink, other in zip(programs, first, second, strict=True):
        assert Counter(map(tuple, [*sink.rows(), *other.rows()])) == expected(program, *parts)
