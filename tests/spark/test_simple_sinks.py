"""ForeachSink, ForeachCheckpointSink, PrintSink, MemorySink: rows of completed checkpoints, on the driver."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from flinkish_spark import ForeachCheckpointSink, ForeachSink, MemorySink, NoRestart, PrintSink
from flinkish_spark.errors import EnvironmentFault, UserFunctionError
from flinkish_spark.testing.sinks import SinkUnderTest
from tests.support import environment, failure_of, rows
from tests.two_phase_app import check_each_once, run_for, totals_of

#: Longer than the usual limit, for machines with much else to do.
pytestmark = pytest.mark.timeout(600)


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
    client = run_for(env, 3)
    assert check_each_once(memory.rows()) == rows(client, "memory") > 0
    wanted = memory.by_checkpoint()
    assert {c: Counter(found) for c, found in together.items()} == {c: Counter(r) for c, r in wanted.items()}
    assert Counter(each) == Counter((c, row) for c, found in wanted.items() for row in found)
    assert [c for c, _ in each] == sorted(c for c, _ in each)
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("totals> ")]
    found = Counter(tuple(json.loads(line.removeprefix("totals> ")).values()) for line in printed)
    assert found == Counter(map(tuple, memory.rows()))
    assert not list((tmp_path / "job").rglob("*.arrow")), "the rows of confirmed checkpoints are still there"


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
    client = run_for(env, 3)
    assert client.progress.restarts == 1 and seen[1] == seen[2]
    assert check_each_once(row for _, found in [seen[0], *seen[2:]] for row in found) == len(memory.rows())


def test_a_function_that_always_fails_ends_the_job_with_its_error(spark, tmp_path) -> None:
    env = environment(spark, tmp_path / "job", restart_strategy=NoRestart())
    totals_of(env).sink_to(ForeachSink(lambda row, checkpoint: row.nothing), uid="each")
    error = failure_of(env)
    assert isinstance(error, UserFunctionError)
    assert "the function of sink 'each' failed at checkpoint 1" in str(error) and "nothing" in str(error)


def subject_of(spark, tmp_path, make_sink) -> SinkUnderTest:
    return SinkUnderTest(make_sink, lambda: [], spark, tmp_path / "folder")


def test_a_crash_before_the_receipt_repeats_the_whole_checkpoint(spark, tmp_path) -> None:
    seen = []
    sink = ForeachSink(lambda row, checkpoint: seen.append((checkpoint, row)))
    subject = subject_of(spark, tmp_path, lambda: sink)
    first, checkpoint = subject.start(), subject.next_checkpoint()
    staged = first.stage(subject.new_rows(), checkpoint=checkpoint)
    assert not seen
    first.commit(checkpoint, staged)
    subject.start().commit(checkpoint, staged)
    assert len(seen) == 10 and seen[:5] == seen[5:]
    assert {c for c, _ in seen} == {checkpoint}


def test_an_outage_is_waited_for(spark, tmp_path) -> None:
    class Outage(EnvironmentFault):
        restartable = True

    def refuse(row, checkpoint):
        raise Outage("no connection")

    subject = subject_of(spark, tmp_path, lambda: ForeachSink(refuse))
    process, checkpoint = subject.start(), subject.next_checkpoint()
    staged = process.stage(subject.new_rows(), checkpoint=checkpoint)
    answers = process.committer.commit(checkpoint, staged.committables)
    assert {(a.outcome.name, a.detail) for a in answers} == {("RETRY", "no connection.")}


def test_a_memory_sink_forgets_by_name_and_by_rewind(spark, tmp_path) -> None:
    sink = MemorySink(str(tmp_path))
    subject = subject_of(spark, tmp_path, lambda: MemorySink(sink.name))
    process, checkpoints = subject.start(), [subject.next_checkpoint() for _ in range(3)]
    for checkpoint in checkpoints:
        process.commit(checkpoint, process.stage(subject.new_rows(2), checkpoint=checkpoint))
    assert list(sink.by_checkpoint()) == list(map(int, checkpoints)) and len(sink.rows()) == 6
    from flinkish_spark.protocol.ids import Lineage

    process.committer.supersede(checkpoints[0], Lineage(1))
    assert list(sink.by_checkpoint()) == [int(checkpoints[0])]
    sink.clear()
    assert sink.rows() == []


@pytest.mark.parametrize(
    "make", [lambda: MemorySink(""), lambda: ForeachSink("no function"), lambda: PrintSink(7)]
)
def test_what_cannot_work_is_refused_at_once(make) -> None:
    from flinkish_spark.errors import ConfigError

    with pytest.raises(ConfigError, match="To do"):
        make()
