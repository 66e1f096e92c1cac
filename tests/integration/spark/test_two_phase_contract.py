"""The contract of sinks, held by those that stand on nothing but Python."""

from __future__ import annotations

import pytest

from flinkish_spark import CommitAnswer, MemorySink, Outcome, SinkWithDeadLetters
from flinkish_spark.testing import sink_contract as sinks
from flinkish_spark.testing.sink_contract import SINK_CASES, SinkContractError, SinkUnderTest, check_sink
from tests.support.two_phase_page import Ledger, sqlite_sink_class

SCHEMA = "user STRING, total LONG"
#: For sinks that stand on something that is under test with all of them.
SOME_CASES = (
    sinks.a_commit_may_be_repeated,
    sinks.another_process_can_commit,
    sinks.an_abort_may_be_repeated_and_shows_nothing,
    sinks.micro_batches_of_one_checkpoint_come_together,
    sinks.a_sweep_removes_leftovers_and_nothing_else,
)


@pytest.mark.parametrize("case", SINK_CASES)
def test_the_sqlite_sink_of_the_page(case, spark, tmp_path) -> None:
    ledger = Ledger(tmp_path)
    case(
        SinkUnderTest(
            make_sink=ledger.sink,
            read_visible=ledger.rows,
            spark=spark,
            folder=tmp_path / "folder",
            schema=SCHEMA,
            count_open=lambda: len(ledger.files()),
        )
    )


@pytest.mark.parametrize("case", SOME_CASES)
def test_the_memory_sink(case, spark, tmp_path) -> None:
    sink, folder = MemorySink(str(tmp_path)), tmp_path / "folder"
    files = lambda: len(list(folder.rglob("*.arrow")))  # noqa: E731
    case(SinkUnderTest(lambda: MemorySink(sink.name), sink.rows, spark, folder, count_open=files))


@pytest.mark.parametrize("case", SOME_CASES)
def test_a_sink_with_dead_letters(case, spark, tmp_path) -> None:
    """All records of the cases are taken; the dead letters' side is there and has nothing to do."""
    ledger = Ledger(tmp_path)
    case(
        SinkUnderTest(
            make_sink=lambda: SinkWithDeadLetters(ledger.sink(), MemorySink(f"{tmp_path} dead")),
            read_visible=ledger.rows,
            spark=spark,
            folder=tmp_path / "folder",
            schema=SCHEMA,
            count_open=lambda: len(ledger.files()),
        )
    )


# -- the cases find what they are for -----------------------------------------------------------------


def broken(**methods):
    """The page's class with some methods replaced."""
    return type("BrokenSink", (sqlite_sink_class(),), methods)


def commits_without_looking(self, committable, checkpoint):
    answer = super(type(self), self).commit(committable, checkpoint)
    if answer is Outcome.ALREADY_COMMITTED:
        import sqlite3

        with sqlite3.connect(self.database) as db:
            db.execute("DELETE FROM done")
        return super(type(self), self).commit(committable, checkpoint)
    return answer


@pytest.mark.parametrize(
    ("methods", "found"),
    [
        pytest.param({"commit": commits_without_looking}, "too many", id="a commit that forgets"),
        pytest.param({"list_open": lambda self, prefix: {}}, "leftovers are still open", id="no sweep"),
        pytest.param(
            {"commit": lambda self, committable, checkpoint: None}, "missing", id="a commit that does nothing"
        ),
        pytest.param(
            {"commit": lambda self, c, n: CommitAnswer(Outcome.RETRY, "busy")},
            "RETRY",
            id="a commit that waits",
        ),
        pytest.param({"why_lost": lambda self, committable: "gone"}, "is dead", id="a pessimist"),
    ],
)
def test_a_broken_sink_is_found_out(methods, found, spark, tmp_path) -> None:
    ledger, kind = Ledger(tmp_path), broken(**methods)
    subject = SinkUnderTest(
        lambda: ledger.sink(kind),
        ledger.rows,
        spark,
        tmp_path / "folder",
        schema=SCHEMA,
        count_open=lambda: len(ledger.files()),
    )
    cases = {case.__name__: case for case in SINK_CASES}
    wanted = ["nothing_is_visible_before_the_commit", "a_commit_may_be_repeated"]
    wanted.append("a_sweep_removes_leftovers_and_nothing_else")
    with pytest.raises(SinkContractError, match=found):
        check_sink(subject, [cases[name] for name in wanted])
