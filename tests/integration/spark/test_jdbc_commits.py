"""Checkpoints into real databases: once each, whatever breaks, by whichever process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flinkish_spark.connectors.jdbc.settings import DeadLetterTable
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import Outcome
from tests.support.databases import PAIRS, Breaking, commit, committer_of, context_of, staged

CREATE = "CREATE TABLE t (k BIGINT PRIMARY KEY, v TEXT CHECK (v <> 'bad'))"
UPSERT = {"key": ("k",), "mode": "upsert"}


def test_a_checkpoint_becomes_visible_once(database, tmp_path) -> None:
    context, sink = context_of(tmp_path), database.sink(create_table=True)
    one, two = staged(tmp_path, [(1, "a"), (2, None)]), staged(tmp_path, [(1, "b")], task=1)
    first = commit(sink, context, 1, one, two)
    assert (first.outcome, first.facts) == (Outcome.COMMITTED, {"rows": 3})
    again = commit(sink, context, 1, one, two)
    assert (again.outcome, again.facts) == (Outcome.ALREADY_COMMITTED, {"rows": 3})
    assert database.table() == [(1, "a"), (1, "b"), (2, None)]
    assert commit(sink, context, 3, staged(tmp_path, [(3, "c")], batch=1)).outcome is Outcome.COMMITTED
    late = commit(sink, context, 1, one, two)
    assert (late.outcome, late.facts) == (Outcome.ALREADY_COMMITTED, {})
    assert len(database.table()) == 4 and database.newest() == [("out", 3, 1)]


def test_of_one_key_the_last_record_counts(database, tmp_path) -> None:
    database.run(CREATE, "INSERT INTO t VALUES (1, 'old'), (9, 'stays')")
    sink, context = database.sink(**UPSERT), context_of(tmp_path)
    first = staged(tmp_path, [(1, "bad"), (2, "x"), (1, "y")])
    later = staged(tmp_path, [(2, "z")], batch=1, task=0)
    answer = commit(sink, context, 1, first, staged(tmp_path, [(3, "p")], task=1), later)
    assert answer.facts == {"rows": 3, "deleted": 0, "superseded": 2}
    assert database.table() == [(1, "y"), (2, "z"), (3, "p"), (9, "stays")]


def test_many_records_of_one_key(database, tmp_path) -> None:
    """Enough rows for the ways that are for many: COPY, several chunks."""
    database.run(CREATE)
    rows = [(n % 700, str(n)) for n in range(120_000)]
    answer = commit(database.sink(**UPSERT), context_of(tmp_path), 1, staged(tmp_path, rows))
    assert answer.facts == {"rows": 700, "deleted": 0, "superseded": 119_300}
    assert database.table() == sorted((n % 700, str(n)) for n in range(120_000 - 700, 120_000))


@pytest.mark.parametrize("count", [1, 40])
def test_a_record_deletes_the_row_with_its_key(database, tmp_path, count) -> None:
    from pyspark.sql import types as T

    database.run(CREATE)
    schema = T.StructType([*PAIRS.fields, T.StructField("gone", T.BooleanType())])
    sink = database.sink(**UPSERT, delete_when="gone")
    numbers = range(count)
    commit(sink, context_of(tmp_path, schema), 1, staged(tmp_path, [(n, "a", None) for n in numbers], schema))
    assert len(database.table()) == count
    # Deleted and written again; written and deleted; neither.
    rows = [(n, None, True) for n in numbers]
    rows += [(n, "new", False) for n in numbers if n % 2] + [(n + 1000, "x", False) for n in numbers]
    rows += [(n + 1000, "bad", True) for n in numbers]
    answer = commit(sink, context_of(tmp_path, schema), 2, staged(tmp_path, rows, schema, batch=1))
    assert database.table() == [(n, "new") for n in numbers if n % 2]
    assert answer.facts["deleted"] == count - count // 2 + count


def test_lost_at_every_moment(database, tmp_path) -> None:
    """The connection breaks before and behind every statement of a checkpoint; a new process repeats."""
    database.run("CREATE TABLE t (k BIGINT PRIMARY KEY, v TEXT CHECK (v <> 'bad'))")
    context = context_of(tmp_path)
    sink = database.sink(**UPSERT, on_refused=DeadLetterTable("letters"))
    rows = [(n, "bad" if n == 7 else f"v{n}") for n in range(22)]
    expected = [row for row in rows if row[1] != "bad"]
    at, checkpoint, outcomes = 0, 0, set()
    while True:
        at, checkpoint = at + 1, checkpoint + 1
        given = staged(tmp_path, rows, batch=checkpoint)
        broken: list[Breaking] = []

        def connect(at=at, broken=broken):
            broken.append(Breaking(sink.settings.connect(), at))
            return broken[-1]

        first = committer_of(sink, context, connect).commit(CheckpointId(checkpoint), [given])[0]
        if not broken[0].has_broken:
            break
        assert first.outcome is Outcome.RETRY and "Connection lost" in first.detail
        visible = database.table()
        assert visible in ([], expected)
        fresh = committer_of(sink, context)
        second, third = (fresh.commit(CheckpointId(checkpoint), [given])[0] for _ in range(2))
        fresh.close()
        assert second.outcome is (Outcome.ALREADY_COMMITTED if visible else Outcome.COMMITTED)
        assert second.facts == {"rows": 21, "deleted": 0, "superseded": 0, "refused": 1}
        assert third.outcome is Outcome.ALREADY_COMMITTED
        assert database.table() == expected
        assert database.query("SELECT checkpoint_id, position FROM letters") == [(checkpoint, 7)]
        outcomes.add(second.outcome)
        database.run("DELETE FROM t", "DELETE FROM letters")
    assert at > 30 and outcomes == {Outcome.COMMITTED, Outcome.ALREADY_COMMITTED}


def test_an_older_owner_is_turned_away(database, tmp_path) -> None:
    sink = database.sink(create_table=True)
    zombie, owner = context_of(tmp_path, epoch=1), context_of(tmp_path, epoch=2)
    one, two = staged(tmp_path, [(1, "a")]), staged(tmp_path, [(2, "b")], batch=1)
    assert commit(sink, owner, 1, one).outcome is Outcome.COMMITTED
    assert commit(sink, zombie, 1, one).outcome is Outcome.FENCED
    assert commit(sink, zombie, 2, two).outcome is Outcome.FENCED
    assert database.table() == [(1, "a")] and database.newest() == [("out", 1, 2)]


def test_jobs_and_sinks_share_a_control_table(database, tmp_path) -> None:
    sink = database.sink(create_table=True)
    for uid in ("one", "two; --"):
        answer = commit(sink, context_of(tmp_path, uid=uid), 1, staged(tmp_path, [(1, uid)]))
        assert answer.outcome is Outcome.COMMITTED
    assert sorted(database.newest()) == [("one", 1, 1), ("two; --", 1, 1)]


@pytest.mark.parametrize("harm", ["DROP TABLE flinkish_checkpoints", "DELETE FROM flinkish_checkpoints"])
def test_a_control_row_that_is_gone_stops_the_job(database, tmp_path, harm) -> None:
    """It is the evidence of what is in: made anew it would let a repeated commit write everything again."""
    sink, context = database.sink(create_table=True), context_of(tmp_path)
    given = staged(tmp_path, [(1, "a")])
    running = committer_of(sink, context)
    assert running.commit(CheckpointId(1), [given])[0].outcome is Outcome.COMMITTED
    database.run(harm)
    with pytest.raises(EnvironmentFault) as caught:
        running.commit(CheckpointId(1), [given])
    assert not caught.value.restartable
    lost = staged(tmp_path, [(2, "b")], batch=1)
    lose(tmp_path, lost)
    for one in (given, lost):
        with pytest.raises(EnvironmentFault, match="the row of sink 'out' is gone from the control table"):
            commit(sink, context_of(tmp_path, epoch=2), 1, one)
    assert database.table() == [(1, "a")]
    row = f"INSERT INTO flinkish_checkpoints VALUES ('{context.job}', 'out', 1, 0, '{{}}')"
    database.run(row)
    assert commit(sink, context, 1, given).outcome is Outcome.ALREADY_COMMITTED
    # Another control table begins anew.
    assert commit(database.sink(control_table="c"), context, 2, given).outcome is Outcome.COMMITTED


def lose(tmp_path: Path, committable) -> None:
    (tmp_path / committable.payload["file"]).unlink()


def test_a_lost_file_is_lost_only_if_the_database_does_not_have_it(database, tmp_path) -> None:
    sink, context = database.sink(create_table=True), context_of(tmp_path)
    one, two = staged(tmp_path, [(1, "a")]), staged(tmp_path, [(2, "b")], batch=1)
    commit(sink, context, 1, one)
    lose(tmp_path, one)
    lose(tmp_path, two)
    assert commit(sink, context, 1, one).outcome is Outcome.ALREADY_COMMITTED
    lost = commit(sink, context, 2, two)
    assert lost.outcome is Outcome.LOST and lost.is_proven_aborted
    # The proof holds against an older owner that has the data still in its hands.
    three = staged(tmp_path, [(3, "c")], batch=2)
    newer = context_of(tmp_path, epoch=2)
    lost = commit(sink, newer, 3, two)
    assert lost.outcome is Outcome.LOST and lost.is_proven_aborted
    assert commit(sink, context, 3, three).outcome is Outcome.FENCED
    older = commit(sink, context, 4, two)
    assert older.outcome is Outcome.LOST and not older.is_proven_aborted
    assert database.table() == [(1, "a")]


def test_a_proof_waits_for_an_older_owner_that_is_at_it(database, tmp_path) -> None:
    """Its rows are not visible yet and will be: without the wait they would be called lost."""
    sink, context = database.sink(create_table=True), context_of(tmp_path)
    commit(sink, context, 1, staged(tmp_path, [(1, "a")]))
    one = staged(tmp_path, [(2, "b")], batch=1)
    at_commit, go_on = threading.Event(), threading.Event()

    class Waiting(Breaking):
        def moment(self):
            self.moments += 1

    class WaitingCursor:
        def __init__(self, cursor):
            self._cursor = cursor

        def execute(self, sql, params):
            if sql == "COMMIT":
                at_commit.set()
                assert go_on.wait(30)
            return self._cursor.execute(sql, params)

        def __getattr__(self, name):
            return getattr(self._cursor, name)

    def connect():
        slow = Waiting(sink.settings.connect(), at=10**9)
        slow.cursor = lambda: WaitingCursor(slow.connection.cursor())
        return slow

    answers = []
    zombie = committer_of(sink, context, connect)
    thread = threading.Thread(target=lambda: answers.append(zombie.commit(CheckpointId(2), [one])[0]))
    thread.start()
    assert at_commit.wait(30)
    path = tmp_path / one.payload["file"]
    path.rename(path.with_suffix(".away"))
    claims = []
    newer = threading.Thread(
        target=lambda: claims.append(commit(sink, context_of(tmp_path, epoch=2), 2, one))
    )
    newer.start()
    newer.join(0.5)
    assert newer.is_alive()
    go_on.set()
    thread.join(30)
    newer.join(30)
    assert answers[0].outcome is Outcome.COMMITTED and claims[0].outcome is Outcome.ALREADY_COMMITTED


def test_rows_cannot_be_taken_back(database, tmp_path) -> None:
    sink, context = database.sink(create_table=True), context_of(tmp_path)
    committer = committer_of(sink, context)
    assert committer.why_not_superseded(CheckpointId(0)) == ""
    commit(sink, context, 5, staged(tmp_path, [(1, "a")]))
    assert committer.why_not_superseded(CheckpointId(5)) == ""
    assert "holds rows of checkpoint 5" in committer.why_not_superseded(CheckpointId(4))
    committer.close()


def test_100_000_rows_take_seconds(database, tmp_path, capsys) -> None:
    import time

    database.run(CREATE)
    rows = [(n, f"value-{n}") for n in range(100_000)]
    context, given = context_of(tmp_path), staged(tmp_path, rows)
    # The driver's own time: how long the machine lets it wait for server and disk is not the sink's affair.
    began = time.process_time()
    assert commit(database.sink(**UPSERT), context, 1, given).outcome is Outcome.COMMITTED
    upsert_s = time.process_time() - began
    began = time.process_time()
    answer = commit(database.sink("inserted", create_table=True), context_of(tmp_path, uid="o2"), 1, given)
    insert_s = time.process_time() - began
    assert answer.facts == {"rows": 100_000}
    with capsys.disabled():
        print(f"\n{database.dialect.name}: upsert {upsert_s:.2f} s, insert {insert_s:.2f} s for 100,000 rows")
    assert upsert_s < 15 and insert_s < 15
