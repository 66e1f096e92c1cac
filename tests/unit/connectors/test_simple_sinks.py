"""Functions, printing and memory behind the write-ahead buffer, over files that are written without Spark."""

from __future__ import annotations

import json

import pytest

from flinkish_spark import ForeachCheckpointSink, ForeachSink, MemorySink, Outcome, PrintSink
from flinkish_spark.checkpoint.failures import RepeatableUserError
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage, OwnerEpoch
from tests.support.sinks import sink_context_of
from tests.unit.connectors.test_buffer import staged

ONE, TWO, THREE = (CheckpointId(n) for n in (1, 2, 3))


def committer_of(sink, folder, uid="out"):
    context = sink_context_of(JobUuid("b" * 32), OwnerEpoch(2), uid, None, None, folder)
    return sink.create_committer(None, context)


def outcomes(answers) -> list[str]:
    return [answer.outcome.name for answer in answers]


def test_a_crash_before_the_receipt_repeats_the_whole_checkpoint_in_order(tmp_path) -> None:
    seen: list[tuple[int, int]] = []
    sink = ForeachSink(lambda row, checkpoint: seen.append((int(checkpoint), row.n)))
    given = [staged(tmp_path, 3, 1), staged(tmp_path, 2, task=1), staged(tmp_path, 0, batch=1)]
    assert outcomes(committer_of(sink, tmp_path).commit(ONE, given)) == ["COMMITTED"] * 3
    assert seen == [(1, 3), (1, 1), (1, 2), (1, 0)]
    committer_of(sink, tmp_path).commit(ONE, given)
    assert seen[4:] == seen[:4]


def test_a_function_of_checkpoints_is_called_once_for_each(tmp_path) -> None:
    calls: list[tuple[int, list[int]]] = []
    sink = ForeachCheckpointSink(lambda rows, at: calls.append((int(at), [row.n for row in rows])))
    committer = committer_of(sink, tmp_path)
    committer.commit(ONE, [staged(tmp_path, 1), staged(tmp_path, 2, batch=1)])
    committer.commit(TWO, [staged(tmp_path, 3, batch=2)])
    assert calls == [(1, [1, 2]), (2, [3])]


def test_a_function_that_fails_is_named_and_nothing_is_concluded(tmp_path) -> None:
    committer = committer_of(ForeachSink(lambda row, checkpoint: row.nothing), tmp_path)
    given = [staged(tmp_path, 1)]
    with pytest.raises(RepeatableUserError, match=r"function of sink 'out' failed at checkpoint 1.*nothing"):
        committer.commit(ONE, given)
    assert not committer.why_dead(given)


def test_an_outage_is_waited_for(tmp_path) -> None:
    class Outage(EnvironmentFault):
        restartable = True

    def refuse(row, checkpoint):
        raise Outage("no connection")

    given = [staged(tmp_path, 1), staged(tmp_path, 2, task=1)]
    answers = committer_of(ForeachSink(refuse), tmp_path).commit(ONE, given)
    assert {(a.outcome, a.detail) for a in answers} == {(Outcome.RETRY, "no connection.")}


def test_rows_whose_files_are_gone_may_have_been_seen(tmp_path) -> None:
    given = [staged(tmp_path, 1)]
    (tmp_path / given[0].payload["file"]).unlink()
    (answer,) = committer_of(ForeachSink(print), tmp_path).commit(ONE, given)
    assert answer.outcome is Outcome.LOST and not answer.is_proven_aborted


def test_rows_are_printed_as_lines_of_json(tmp_path, capsys) -> None:
    committer_of(PrintSink("n> "), tmp_path).commit(ONE, [staged(tmp_path, 1, 2)])
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line.removeprefix("n> ")) for line in lines] == [{"n": 1}, {"n": 2}]


def test_memory_has_each_row_once_whoever_commits_how_often(tmp_path) -> None:
    sink = MemorySink(str(tmp_path))
    given = [staged(tmp_path, 3), staged(tmp_path, 1, task=1)]
    first, again = committer_of(sink, tmp_path), committer_of(MemorySink(sink.name), tmp_path)
    assert outcomes(first.commit(ONE, given)) == ["COMMITTED"] * 2
    assert outcomes(again.commit(ONE, given)) == ["ALREADY_COMMITTED"] * 2
    (tmp_path / given[0].payload["file"]).unlink()
    assert outcomes(again.commit(ONE, given)) == ["ALREADY_COMMITTED"] * 2
    assert [row.n for row in sink.rows()] == [3, 1]


def test_memory_goes_by_checkpoint_and_forgets_by_rewind_and_by_name(tmp_path) -> None:
    sink = MemorySink(str(tmp_path))
    committer, other = committer_of(sink, tmp_path), committer_of(sink, tmp_path, uid="other")
    for n, checkpoint in enumerate((ONE, TWO, THREE)):
        committer.commit(checkpoint, [staged(tmp_path, n, batch=n)])
    other.commit(THREE, [staged(tmp_path, 9)])
    found = {c: [row.n for row in rows] for c, rows in sink.rows_by_checkpoint().items()}
    assert found == {1: [0], 2: [1], 3: [9, 2]}, "by checkpoint, then by uid"
    assert committer.supersede(ONE, Lineage(1)).outcome is Outcome.COMMITTED
    assert committer.supersede(ONE, Lineage(1)).outcome is Outcome.ALREADY_COMMITTED
    assert [row.n for row in sink.rows()] == [0, 9], "another sink's rows are its own"
    sink.clear()
    assert sink.rows() == [] == MemorySink("nobody's").rows()


async def nobody_awaits(row, checkpoint): ...


def nobody_goes_through(rows, checkpoint):
    yield from rows


WRONG = [
    lambda: MemorySink(""), lambda: ForeachSink("no function"), lambda: ForeachCheckpointSink(None),
    lambda: ForeachSink(nobody_awaits), lambda: ForeachCheckpointSink(nobody_goes_through),
]  # fmt: skip


@pytest.mark.parametrize("make", [*WRONG, lambda: PrintSink(7)])
def test_what_cannot_work_is_refused_at_once(make) -> None:
    with pytest.raises(ConfigError, match="To do"):
        make()
