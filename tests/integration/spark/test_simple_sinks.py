"""Functions, printing and memory in a job; what a crash does to them is in the unit tests."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from flinkish_spark import ForeachCheckpointSink, ForeachSink, MemorySink, NoRestart, PrintSink
from flinkish_spark.core.errors import UserFunctionError
from tests.support.jobs import environment, failure_of, rows
from tests.support.two_phase_app import check_each_once, run_for, totals_of

#: Longer than the usual limit, for machines with much else to do.
pytestmark = pytest.mark.timeout(600)


@pytest.mark.nightly
def test_all_four_see_every_row_of_every_checkpoint(spark, tmp_path, capfd) -> None:
    each, together, memory = [], {}, MemorySink(str(tmp_path))
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
    totals = totals_of(env)
    totals.sink_to(memory, uid="memory")
    totals.sink_to(ForeachSink(lambda row, checkpoint: each.append((int(checkpoint), row))), uid="each")
    totals.sink_to(
        ForeachCheckpointSink(lambda found, checkpoint: together.update({int(checkpoint): list(found)})),
        uid="together",
    )
    totals.sink_to(PrintSink("totals> "), uid="print")
    client = run_for(env, 2)
    assert check_each_once(memory.rows()) == rows(client, "memory") > 0
    wanted = memory.rows_by_checkpoint()
    assert {c: Counter(found) for c, found in together.items()} == {c: Counter(r) for c, r in wanted.items()}
    assert Counter(each) == Counter((c, row) for c, found in wanted.items() for row in found)
    assert [c for c, _ in each] == sorted(c for c, _ in each)
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("totals> ")]
    found = Counter(tuple(json.loads(line.removeprefix("totals> ")).values()) for line in printed)
    assert found == Counter(map(tuple, memory.rows()))
    assert not list((tmp_path / "job").rglob("*.arrow")), "the rows of confirmed checkpoints are still there"


@pytest.mark.nightly
def test_a_function_that_fails_gets_the_same_checkpoint_again(spark, tmp_path) -> None:
    seen, memory = [], MemorySink(str(tmp_path))

    def take(found, checkpoint):
        seen.append((int(checkpoint), list(found)))
        if len(seen) == 2:
            raise RuntimeError("not today")

    env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
    totals = totals_of(env)
    totals.sink_to(memory, uid="memory")
    totals.sink_to(ForeachCheckpointSink(take), uid="take")
    client = run_for(env, 2)
    assert client.progress.restarts == 1 and seen[1] == seen[2]
    assert check_each_once(row for _, found in [seen[0], *seen[2:]] for row in found) == len(memory.rows())


def test_a_function_that_always_fails_ends_the_job_with_its_error(spark, tmp_path) -> None:
    env = environment(spark, tmp_path / "job", restart_strategy=NoRestart())
    totals_of(env).sink_to(ForeachSink(lambda row, checkpoint: row.nothing), uid="each")
    error = failure_of(env)
    assert isinstance(error, UserFunctionError)
    assert "the function of sink 'each' failed at checkpoint 1" in str(error) and "nothing" in str(error)
