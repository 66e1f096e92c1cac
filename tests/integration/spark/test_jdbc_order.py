"""Records whose order counts: further unique constraints, foreign keys, triggers.

Each expected table is what the records would leave if they came one by one, found by hand.
"""

from __future__ import annotations

import random

import pytest
from pyspark.sql import types as T

from flinkish_spark.connectors.jdbc.checks import Checks
from flinkish_spark.connectors.jdbc.settings import DeadLetterTable
from flinkish_spark.core.errors import BadRecordError, SchemaError
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.protocol.records import Outcome
from tests.support.databases import PAIRS, commit, context_of, staged

UPSERT = {"key": ("k",), "mode": "upsert"}
USERS = "CREATE TABLE t (k BIGINT PRIMARY KEY, v VARCHAR(20) UNIQUE)"
GONE = T.StructType([*PAIRS.fields, T.StructField("gone", T.BooleanType())])
POLICIES = [OnBadRecord.FAIL, OnBadRecord.DROP, DeadLetterTable("letters")]
NAMES = ["fail", "drop", "dead-letter"]


@pytest.fixture(params=["sqlite", "postgres"])
def unique_database(request: pytest.FixtureRequest):
    """Databases in which an upsert's table may have further unique constraints."""
    return request.getfixturevalue(f"{request.param}_database")


# -- further unique constraints -------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_a_value_that_is_free_only_in_between(unique_database, tmp_path, policy) -> None:
    """The field report: the last record of each key alone, in their order, would collide."""
    unique_database.run(USERS, "INSERT INTO t VALUES (1, 'x')")
    sink = unique_database.sink(**UPSERT, on_refused=policy)
    Checks(sink.settings, context_of(tmp_path)).run()
    answer = commit(sink, context_of(tmp_path), 1, staged(tmp_path, [(1, "y"), (2, "x"), (1, "z")]))
    assert answer.outcome is Outcome.COMMITTED and "refused" not in answer.facts
    assert unique_database.table() == [(1, "z"), (2, "x")]


@pytest.mark.parametrize(
    "tasks",
    [
        # Values change places by way of a third.
        [[(1, "tmp"), (2, "x"), (1, "y")]],
        # The same out of two tasks, in either order.
        [[(2, "x")], [(1, "tmp"), (1, "y")]],
        [[(1, "tmp"), (1, "y")], [(2, "x")]],
        # At once, as behind a constraint that the other side defers.
        [[(1, "y"), (2, "x")]],
        [[(2, "x")], [(1, "y")]],
    ],
)
@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_values_that_change_places(unique_database, tmp_path, tasks, policy) -> None:
    unique_database.run(USERS, "INSERT INTO t VALUES (1, 'x'), (2, 'y'), (9, 'other')")
    sink = unique_database.sink(**UPSERT, on_refused=policy)
    given = [staged(tmp_path, rows, task=task) for task, rows in enumerate(tasks)]
    answer = commit(sink, context_of(tmp_path), 1, *given)
    assert answer.outcome is Outcome.COMMITTED and "refused" not in answer.facts
    assert unique_database.table() == [(1, "y"), (2, "x"), (9, "other")]


def stream_of(
    chance: random.Random,
) -> tuple[dict[int, str], list[tuple[int, str | None, bool]], dict[int, str]]:
    """Rows, records each of which a database would take at its place, and the rows that they leave."""
    rows = dict(zip(chance.sample(range(5), 3), "abc", strict=True))
    begin, records = dict(rows), []
    while len(records) < 12:
        key, value = chance.randrange(5), chance.choice("abcd")
        if chance.random() < 0.2:
            rows.pop(key, None)
            records.append((key, None, True))
        elif value not in [held for other, held in rows.items() if other != key]:
            rows[key] = value
            records.append((key, value, False))
    return begin, records, rows


@pytest.mark.parametrize("seed", range(40))
def test_records_that_are_valid_in_their_order_are_valid_in_every_order_of_tasks(
    sqlite_database, tmp_path, seed
) -> None:
    chance = random.Random(seed)
    begin, records, end = stream_of(chance)
    values = ", ".join(f"({key}, '{value}')" for key, value in begin.items())
    sqlite_database.run(USERS, f"INSERT INTO t VALUES {values}")
    tasks = [[one for one in records if one[0] % 3 == task] for task in chance.sample(range(3), 3)]
    sink = sqlite_database.sink(**UPSERT, delete_when="gone", on_refused=OnBadRecord.DROP)
    given = [staged(tmp_path, rows, GONE, task=task) for task, rows in enumerate(tasks) if rows]
    assert "refused" not in commit(sink, context_of(tmp_path, GONE), 1, *given).facts
    assert dict(sqlite_database.table()) == end


def test_rows_that_move_up_by_one(unique_database, tmp_path) -> None:
    """A chain of a hundred, in the order in which each waits for the next."""
    unique_database.run(USERS)
    sink = unique_database.sink(**UPSERT)
    commit(sink, context_of(tmp_path), 1, staged(tmp_path, [(n, f"v{n:03}") for n in range(100)]))
    moved = [(n, f"v{n + 1:03}") for n in range(100)]
    answer = commit(sink, context_of(tmp_path), 2, staged(tmp_path, moved, batch=1))
    assert answer.facts == {"rows": 100, "deleted": 0, "superseded": 0}
    assert unique_database.table() == moved


def test_a_value_of_a_row_that_goes(unique_database, tmp_path) -> None:
    unique_database.run(USERS, "INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    sink = unique_database.sink(**UPSERT, delete_when="gone")
    rows = [(3, "x2", False), (1, None, True), (3, "x", False), (1, "z", False), (2, None, True)]
    commit(sink, context_of(tmp_path, GONE), 1, staged(tmp_path, rows, GONE))
    assert unique_database.table() == [(1, "z"), (3, "x")]


def test_what_cannot_get_in_is_refused_alone(unique_database, tmp_path) -> None:
    """(3, 'x') has no place beside (1, 'x'), ever; the others get theirs, though they have to wait."""
    unique_database.run(USERS, "INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    sink = unique_database.sink(**UPSERT, on_refused=DeadLetterTable("letters"))
    rows = [(3, "x"), (4, "y"), (2, "w"), (4, "v"), (2, "y")]
    answer = commit(sink, context_of(tmp_path), 1, staged(tmp_path, rows))
    assert answer.facts["refused"] == 1
    assert unique_database.table() == [(1, "x"), (2, "y"), (4, "v")]
    assert unique_database.query("SELECT position, record FROM letters") == [(0, '{"k": 3, "v": "x"}')]


def test_a_record_that_waits_is_not_overtaken(unique_database, tmp_path) -> None:
    """(2, 'x') never gets in; (2, 'b') comes later with its key and stands in the end, (2, 'a') does not."""
    unique_database.run(USERS, "INSERT INTO t VALUES (1, 'x')")
    sink = unique_database.sink(**UPSERT, on_refused=OnBadRecord.DROP)
    rows = [(2, "x"), (2, "a"), (2, "b"), (3, "x")]
    answer = commit(sink, context_of(tmp_path), 1, staged(tmp_path, rows))
    assert answer.facts["refused"] == 1  # only the last of a key has to fit: (3, 'x')
    assert unique_database.table() == [(1, "x"), (2, "b")]


def test_under_fail_what_cannot_get_in_stops_the_job(unique_database, tmp_path) -> None:
    unique_database.run(USERS, "INSERT INTO t VALUES (1, 'x')")
    sink, given = unique_database.sink(**UPSERT), staged(tmp_path, [(2, "x"), (3, "z")])
    with pytest.raises(BadRecordError, match=r'refuses a record of sink \'out\': \{"k": 2\}'):
        commit(sink, context_of(tmp_path), 1, given)
    assert unique_database.table() == [(1, "x")]


def test_a_last_record_that_no_database_holds(postgres_database, tmp_path) -> None:
    """A zero byte: the record before it stands, and gives its value free as if each had come alone."""
    postgres_database.run(USERS, "INSERT INTO t VALUES (1, 'x')")
    sink = postgres_database.sink(**UPSERT, on_refused=OnBadRecord.DROP)
    rows = [(1, "y"), (2, "x"), (1, "\0")]
    assert commit(sink, context_of(tmp_path), 1, staged(tmp_path, rows)).facts["refused"] == 1
    assert postgres_database.table() == [(1, "y"), (2, "x")]


@pytest.mark.parametrize(
    "index",
    [
        "CREATE UNIQUE INDEX more ON t (lower(v))",
        "CREATE UNIQUE INDEX more ON t (v) WHERE v <> ''",
        "CREATE UNIQUE INDEX more ON t (v, k)",
        "CREATE UNIQUE INDEX more ON t (v)",
    ],
)
def test_every_kind_of_unique_index(unique_database, tmp_path, index) -> None:
    unique_database.run("CREATE TABLE t (k BIGINT PRIMARY KEY, v VARCHAR(20))", index)
    unique_database.run("INSERT INTO t VALUES (1, 'x')")
    sink = unique_database.sink(**UPSERT)
    commit(sink, context_of(tmp_path), 1, staged(tmp_path, [(1, "y"), (2, "x"), (1, "z")]))
    assert unique_database.table() == [(1, "z"), (2, "x")]


def test_an_index_that_comes_while_the_job_runs(unique_database, tmp_path) -> None:
    unique_database.run("CREATE TABLE t (k BIGINT PRIMARY KEY, v VARCHAR(20))")
    sink, context = unique_database.sink(**UPSERT), context_of(tmp_path)
    commit(sink, context, 1, staged(tmp_path, [(1, "x")]))
    unique_database.run("CREATE UNIQUE INDEX more ON t (v)")
    commit(sink, context, 2, staged(tmp_path, [(1, "y"), (2, "x"), (1, "z")], batch=1))
    assert unique_database.table() == [(1, "z"), (2, "x")]


def test_what_the_sink_does_not_write_stays(unique_database, tmp_path) -> None:
    """With a column of somebody else's a row is not taken away to come again."""
    unique_database.run(
        "CREATE TABLE t (k BIGINT PRIMARY KEY, v VARCHAR(20) UNIQUE, note VARCHAR(20) DEFAULT 'none')",
        "INSERT INTO t VALUES (1, 'x', 'mine'), (2, 'y', 'yours')",
    )
    sink = unique_database.sink(**UPSERT)
    rows = [(1, "tmp"), (2, "x"), (1, "y"), (3, "z")]
    commit(sink, context_of(tmp_path), 1, staged(tmp_path, rows))
    assert unique_database.table() == [(1, "y", "mine"), (2, "x", "yours"), (3, "z", "none")]


def test_a_deferrable_constraint_counts_in_the_end(postgres_database, tmp_path) -> None:
    postgres_database.run(
        "CREATE TABLE t (k BIGINT PRIMARY KEY, v TEXT UNIQUE DEFERRABLE, note TEXT)",
        "INSERT INTO t VALUES (1, 'x', 'mine'), (2, 'y', 'yours')",
    )
    sink = postgres_database.sink(**UPSERT)
    commit(sink, context_of(tmp_path), 1, staged(tmp_path, [(1, "y"), (2, "x")]))
    assert postgres_database.table() == [(1, "y", "mine"), (2, "x", "yours")]


@pytest.mark.parametrize(
    "index", ["CREATE UNIQUE INDEX more ON t (v)", "CREATE UNIQUE INDEX more ON t (v(5))"]
)
def test_mysql_has_one_unique_index_or_none_starts(mariadb_database, tmp_path, index) -> None:
    """Also one over a part of a column; and one that comes while the job runs stops it."""
    mariadb_database.run("CREATE TABLE t (k BIGINT PRIMARY KEY, v VARCHAR(20))")
    sink, context = mariadb_database.sink(**UPSERT), context_of(tmp_path)
    commit(sink, context, 1, staged(tmp_path, [(1, "x")]))
    mariadb_database.run(index)
    with pytest.raises(SchemaError, match="more than one unique index"):
        Checks(sink.settings, context).run()
    with pytest.raises(SchemaError, match="more than one unique index"):
        commit(sink, context, 2, staged(tmp_path, [(2, "x")], batch=1))
    assert mariadb_database.table() == [(1, "x")]


# -- foreign keys ---------------------------------------------------------------------------------

TREE = (
    "CREATE TABLE t (k BIGINT PRIMARY KEY, v BIGINT, gone INT, "
    "CONSTRAINT parent FOREIGN KEY (v) REFERENCES t (k) {})"
)
NODES = T.StructType([T.StructField("k", T.LongType()), T.StructField("v", T.LongType()), GONE["gone"]])


@pytest.fixture(params=["postgres", "mariadb"])
def linked_database(request: pytest.FixtureRequest):
    """Databases that heed foreign keys without being asked to."""
    return request.getfixturevalue(f"{request.param}_database")


@pytest.mark.parametrize("mode", ["insert", "upsert"])
def test_a_child_of_another_task_comes_before_its_parent(linked_database, tmp_path, mode) -> None:
    linked_database.run(TREE.format(""))
    schema = T.StructType(NODES.fields[:2])
    sink = linked_database.sink(key=("k",), mode=mode, on_refused=OnBadRecord.DROP)
    given = [
        staged(tmp_path, [(3, 2), (9, 8), (4, 3)], schema),
        staged(tmp_path, [(2, 1), (1, None)], schema, task=1),
    ]
    answer = commit(sink, context_of(tmp_path, schema), 1, *given)
    assert answer.facts["rows"] == 4 and answer.facts["refused"] == 1
    assert [row[:2] for row in linked_database.table(order="1")] == [(1, None), (2, 1), (3, 2), (4, 3)]


def test_a_parent_goes_behind_its_children(linked_database, tmp_path) -> None:
    linked_database.run(TREE.format(""), "INSERT INTO t (k, v) VALUES (1, NULL), (2, 1), (3, 1), (4, NULL)")
    sink = linked_database.sink(**UPSERT, delete_when="gone")
    rows = [(1, None, True), (2, None, True), (3, 4, False)]
    commit(sink, context_of(tmp_path, NODES), 1, staged(tmp_path, rows, NODES))
    assert [row[:2] for row in linked_database.table(order="1")] == [(3, 4), (4, None)]


def test_a_deleted_row_takes_others_with_it(linked_database, tmp_path) -> None:
    """Row 1 goes and comes again: its child 2, which came before, is gone; 3, which came after, is there."""
    linked_database.run(TREE.format("ON DELETE CASCADE"), "INSERT INTO t (k, v) VALUES (1, NULL)")
    sink = linked_database.sink(**UPSERT, delete_when="gone")
    rows = [(2, 1, False), (1, None, True), (1, None, False), (3, 1, False)]
    commit(sink, context_of(tmp_path, NODES), 1, staged(tmp_path, rows, NODES))
    assert [row[:2] for row in linked_database.table(order="1")] == [(1, None), (3, 1)]


def test_a_record_that_a_foreign_key_refuses_is_refused_whatever_comes_later(
    linked_database, tmp_path
) -> None:
    """As if each record were a checkpoint of its own, so it does not depend on where checkpoints end."""
    linked_database.run(TREE.format(""))
    schema = T.StructType(NODES.fields[:2])
    sink = linked_database.sink(**UPSERT, on_refused=DeadLetterTable("letters"))
    given = staged(tmp_path, [(1, None), (2, 9), (2, 1)], schema)
    facts = commit(sink, context_of(tmp_path, schema), 1, given).facts
    assert facts == {"rows": 2, "deleted": 0, "superseded": 0, "refused": 1}
    assert [row[:2] for row in linked_database.table(order="1")] == [(1, None), (2, 1)]
    assert linked_database.query("SELECT position FROM letters") == [(1,)]


# -- triggers --------------------------------------------------------------------------------------


def test_a_trigger_sees_each_record(sqlite_database, tmp_path) -> None:
    """Also one that a later one of the same checkpoint replaces."""
    note = "BEGIN INSERT INTO history VALUES (NEW.k, NEW.v); END"
    sqlite_database.run(
        "CREATE TABLE t (k BIGINT PRIMARY KEY, v TEXT)",
        "CREATE TABLE history (k BIGINT, v TEXT)",
        f"CREATE TRIGGER first AFTER INSERT ON t {note}",
        f"CREATE TRIGGER later AFTER UPDATE ON t {note}",
    )
    sink, records = sqlite_database.sink(**UPSERT), [(1, "a"), (2, "x"), (1, "b")]
    commit(sink, context_of(tmp_path), 1, staged(tmp_path, records))
    assert sqlite_database.query("SELECT k, v FROM history ORDER BY rowid") == records
    assert sqlite_database.table() == [(1, "b"), (2, "x")]


def test_a_trigger_that_allows_steps_of_one(sqlite_database, tmp_path) -> None:
    """From 1 to 3 by way of 2: the last record of the key alone would be refused."""
    sqlite_database.run(
        "CREATE TABLE t (k BIGINT PRIMARY KEY, v TEXT)",
        "INSERT INTO t VALUES (1, '1')",
        "CREATE TRIGGER steps BEFORE UPDATE ON t WHEN CAST(NEW.v AS INT) > CAST(OLD.v AS INT) + 1 "
        "BEGIN SELECT RAISE(ABORT, 'too far'); END",
    )
    sink = sqlite_database.sink(**UPSERT)
    commit(sink, context_of(tmp_path), 1, staged(tmp_path, [(1, "2"), (2, "7"), (1, "3")]))
    assert sqlite_database.table() == [(1, "3"), (2, "7")]
    with pytest.raises(BadRecordError, match="Too far"):
        commit(sink, context_of(tmp_path), 2, staged(tmp_path, [(1, "9")], batch=1))


def test_a_trigger_of_postgres_that_allows_steps_of_one(postgres_database, tmp_path) -> None:
    postgres_database.run(
        "CREATE TABLE t (k BIGINT PRIMARY KEY, v TEXT)",
        "INSERT INTO t VALUES (1, '1')",
        "CREATE FUNCTION steps() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.v::int > OLD.v::int + 1 THEN RAISE 'too far'; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER steps BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION steps()",
    )
    sink = postgres_database.sink(**UPSERT)
    rows = [(n, "1") for n in range(10, 50)] + [(1, "2"), (1, "3")]
    commit(sink, context_of(tmp_path), 1, staged(tmp_path, rows))
    assert postgres_database.table() == [(1, "3"), *rows[:40]]


FOLDING = {
    "sqlite": "CREATE TABLE t (v TEXT COLLATE NOCASE PRIMARY KEY, k BIGINT)",
    "mysql": "CREATE TABLE t (v VARCHAR(20) COLLATE utf8mb4_general_ci PRIMARY KEY, k BIGINT)",
    "postgresql": "CREATE TABLE t (v TEXT COLLATE nocase PRIMARY KEY, k BIGINT)",
}


def test_a_table_that_comes_to_take_keys_for_equal_stops_the_job(database, tmp_path) -> None:
    """It tells them apart at the start; behind the change the row of one would replace another's."""
    if database.dialect.name == "postgresql":
        database.run(
            "CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
        )
    database.run(FOLDING[database.dialect.name])
    sink = database.sink(key=("v",), mode="upsert", delete_when="gone")
    rows = [(1, "a", False), (None, "A", True)]
    with pytest.raises(SchemaError, match="takes some different keys for equal"):
        commit(sink, context_of(tmp_path, GONE), 1, staged(tmp_path, rows, GONE))
    assert database.table() == []
