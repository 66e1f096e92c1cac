"""Tables that would change a record, or lose it: before the start, and if they become so while a job runs."""

from __future__ import annotations

import threading
from decimal import Decimal

import psycopg
import pyarrow as pa
import pymysql
import pytest
from pyspark.sql import types as T

from flinkish_spark.connectors.jdbc import committer
from flinkish_spark.connectors.jdbc.checks import Checks
from flinkish_spark.connectors.jdbc.settings import DeadLetterTable
from flinkish_spark.core.errors import BadRecordError, SchemaError
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.protocol.records import Outcome
from tests.support.databases import TestDatabase, commit, committer_of, context_of, staged

TEXT = T.StructType([T.StructField("v", T.StringType())])
MONEY = T.StructType([T.StructField("v", T.DecimalType(10, 2))])


def check(sink, tmp_path, schema=TEXT) -> None:
    Checks(sink.settings, context_of(tmp_path, schema)).run()


def one_of(request, name) -> TestDatabase:
    return request.getfixturevalue(f"{name}_database")


# -- what a column keeps ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("database", "column"),
    [
        # '2' was 'y', 'X' was 'x', and 'y ' was 'y'.
        ("mariadb", "ENUM('x', 'y')"),
        ("mariadb", "SET('x', 'y')"),
        ("mariadb", "CHAR(9)"),
        ("mariadb", "BINARY(9)"),
        ("mariadb", "BIT(9)"),
        ("mariadb", "YEAR"),
        ("mariadb", "TIME(6)"),
        ("mariadb", "GEOMETRY"),
        ("mariadb", "INET6"),
        ("mariadb", "VARCHAR(9) CHARACTER SET sjis"),
        ("mariadb", "VARCHAR(9) AS ('x')"),
        ("postgres", "CHAR(9)"),
        ("postgres", "BIT VARYING(9)"),
        ("postgres", "BYTEA"),
        ("postgres", "POINT"),
        ("postgres", "INT4RANGE"),
        ("postgres", "NUMERIC(9, 1)[]"),
        ("postgres", "inner_tenth"),
        ("postgres", "TEXT GENERATED ALWAYS AS ('x') STORED"),
        ("sqlite", "ANY"),
        ("sqlite", "STRING"),
    ],
)
def test_columns_that_fold_a_text_are_refused(request, tmp_path, database, column) -> None:
    found = one_of(request, database)
    if "tenth" in column:
        found.run("CREATE DOMAIN tenth AS numeric(9, 1)", "CREATE DOMAIN inner_tenth AS tenth")
    found.run(f"CREATE TABLE t (v {column})")
    with pytest.raises(SchemaError, match=r"'v' of type string does not fit the column of type"):
        check(found.sink(), tmp_path)


@pytest.mark.parametrize(
    ("database", "column"),
    [
        ("mariadb", "VARCHAR(9)"),
        ("mariadb", "VARCHAR(9) CHARACTER SET latin1"),
        ("mariadb", "TINYTEXT"),
        ("mariadb", "JSON"),
        ("mariadb", "VARBINARY(9)"),
        ("postgres", "mood"),
        ("postgres", "short"),
        ("postgres", "JSON"),
        ("sqlite", "VARCHAR(3)"),
    ],
)
def test_a_column_that_is_taken_keeps_a_text_or_refuses_it(request, tmp_path, database, column) -> None:
    found = one_of(request, database)
    if found.dialect.name == "postgresql":
        found.run("CREATE TYPE mood AS ENUM ('x', 'y')", "CREATE DOMAIN short AS varchar(3)")
    found.run(f"CREATE TABLE t (v {column})")
    sink = found.sink(on_refused=OnBadRecord.DROP)
    check(sink, tmp_path)
    texts = ["x", "y ", "X", "2", "", "abcd ", "abc      z", "a" * 300, "a" * 254 + "  ", "€日", "\U0001f600"]
    texts += ['{"b": 1.0, "a": 2}', "[1]"]
    given = staged(tmp_path, [(text,) for text in texts], TEXT)
    answer = commit(sink, context_of(tmp_path, TEXT), 1, given)
    rows = found.query(f"SELECT {'v::text' if found.dialect.name == 'postgresql' else 'v'} FROM t")
    kept = [v.decode() if isinstance(v, bytes) else v for (v,) in rows]
    assert len(kept) + answer.facts.get("refused", 0) == len(texts)
    assert kept and set(kept) <= set(texts)


@pytest.mark.parametrize("database", ["postgres", "mariadb"])
def test_blanks_that_a_column_would_cut_off_are_refused_before_the_decision(
    request, tmp_path, database
) -> None:
    found = one_of(request, database)
    found.run("CREATE TABLE t (v VARCHAR(3))")
    sink, context = found.sink(), context_of(tmp_path, TEXT)
    sink.preflight(None, context)
    record_check = sink.create_writer(None, context)._check
    with pytest.raises(BadRecordError, match=r"longer than .*\(3\), which cuts blanks off"):
        record_check(pa.record_batch({"v": ["abc", "ab ", "abc "]}))
    with pytest.raises(BadRecordError, match="cuts blanks off"):
        commit(sink, context, 1, staged(tmp_path, [("abc ",)], TEXT))
    letters = found.sink(on_refused=DeadLetterTable("letters"))
    answer = commit(letters, context, 1, staged(tmp_path, [("abc ",), ("ab ",)], TEXT))
    assert answer.facts == {"rows": 1, "refused": 1} and found.table(order="1") == [("ab ",)]


# -- what a table becomes while a job runs ---------------------------------------------------------

CHANGES = {
    ("postgres", "ALTER TABLE t ALTER v TYPE numeric(10, 1)"): "rounded to 1 digits",
    ("mariadb", "ALTER TABLE t MODIFY v DECIMAL(10, 1)"): "rounded to 1 digits",
    ("postgres", "ALTER TABLE t ALTER v TYPE double precision"): "Values would be converted",
    ("mariadb", "ALTER TABLE t ADD w INT NOT NULL"): "the column 'w' of t must have a value",
    ("postgres", "ALTER TABLE t SET UNLOGGED"): "t is UNLOGGED",
    ("postgres", "ALTER TABLE flinkish_checkpoints SET UNLOGGED"): "flinkish_checkpoints is UNLOGGED",
    ("mariadb", "ALTER TABLE t ENGINE = Aria"): "engine Aria has no transactions",
}


@pytest.mark.parametrize(("database", "change"), CHANGES)
def test_a_table_that_changes_stops_the_job_before_anything_is_written(
    request, tmp_path, database, change
) -> None:
    """2.25 was 2.3 without a word."""
    found = one_of(request, database)
    found.run("CREATE TABLE t (v NUMERIC(10, 2))")
    sink, context = found.sink(), context_of(tmp_path, MONEY)
    check(sink, tmp_path, MONEY)
    running = committer_of(sink, context)
    first = staged(tmp_path, [(Decimal("1.25"),)], MONEY)
    assert running.commit(1, [first])[0].outcome is Outcome.COMMITTED
    found.run(change)
    second = staged(tmp_path, [(Decimal("2.25"),)], MONEY, batch=1)
    with pytest.raises(SchemaError, match=CHANGES[database, change]):
        running.commit(2, [second])
    running.close()
    assert found.query("SELECT count(*) FROM t") == [(1,)]
    assert [row[1] for row in found.newest()] == [1]


def test_a_sqlite_table_that_is_made_anew(sqlite_database, tmp_path) -> None:
    sqlite_database.run("CREATE TABLE t (v TEXT)")
    sink, context = sqlite_database.sink(), context_of(tmp_path, TEXT)
    assert commit(sink, context, 1, staged(tmp_path, [("1.50",)], TEXT)).outcome is Outcome.COMMITTED
    sqlite_database.run("DROP TABLE t", "CREATE TABLE t (v NUMERIC)")
    with pytest.raises(SchemaError, match="NUMERIC affinity converts text"):
        commit(sink, context, 2, staged(tmp_path, [("2.50",)], TEXT, batch=1))
    assert sqlite_database.table(order="1") == []


@pytest.mark.parametrize("database", ["postgres", "mariadb"])
def test_nobody_alters_a_table_between_the_look_and_the_end(request, tmp_path, monkeypatch, database) -> None:
    found, tried = one_of(request, database), []
    found.run("CREATE TABLE t (v NUMERIC(10, 2))")
    wait, change = {
        "postgres": ("SET lock_timeout = '200ms'", "ALTER TABLE t ALTER v TYPE numeric(10, 1)"),
        "mariadb": ("SET lock_wait_timeout = 1", "ALTER TABLE t MODIFY v DECIMAL(10, 1)"),
    }[database]
    found.run(wait)
    run = committer.CheckpointWrite.run

    def altered_before(self, rows):
        with pytest.raises((psycopg.errors.LockNotAvailable, pymysql.err.OperationalError)):
            found.run(change)
        tried.append(change)
        return run(self, rows)

    monkeypatch.setattr(committer.CheckpointWrite, "run", altered_before)
    context = context_of(tmp_path, MONEY)
    assert commit(found.sink(), context, 1, staged(tmp_path, [(Decimal("2.25"),)], MONEY)).facts["rows"] == 1
    assert tried and found.table(order="1") == [(Decimal("2.25"),)]


# -- tables that do not last ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("create", "why"),
    [
        (["CREATE UNLOGGED TABLE t (v TEXT)"], "t is UNLOGGED"),
        (
            [
                "CREATE TABLE t (v TEXT) PARTITION BY LIST (v)",
                "CREATE UNLOGGED TABLE part PARTITION OF t DEFAULT",
            ],
            "part is UNLOGGED",
        ),
        (["CREATE UNLOGGED TABLE u (v TEXT)", "CREATE VIEW t AS SELECT v FROM u"], "u is UNLOGGED"),
        (
            ["CREATE TABLE t (v TEXT)", "CREATE UNLOGGED TABLE flinkish_checkpoints AS SELECT 1 AS x"],
            "flinkish_checkpoints is UNLOGGED",
        ),
    ],
)
def test_tables_that_a_crash_empties_are_refused(postgres_database, tmp_path, create, why) -> None:
    """A server that was killed left an empty table, and a control row that said committed."""
    postgres_database.run(*create)
    with pytest.raises(SchemaError, match=why):
        check(postgres_database.sink(), tmp_path)


def test_a_temporary_table_is_refused(postgres_database, sqlite_database, tmp_path) -> None:
    with pytest.raises(SchemaError, match="t is TEMPORARY"):
        check(postgres_database.sink("pg_temp.t", create_table=True), tmp_path)
    with pytest.raises(SchemaError, match="It is temporary"):
        check(sqlite_database.sink("temp.t", create_table=True), tmp_path)
    assert sqlite_database.query("PRAGMA synchronous") == [(2,)]


@pytest.mark.parametrize("engine", ["MEMORY", "MyISAM", "Aria", "CSV"])
def test_engines_whose_rows_do_not_last_are_refused(mariadb_database, tmp_path, engine) -> None:
    mariadb_database.run(f"CREATE TABLE t (v VARCHAR(9) NOT NULL) ENGINE = {engine}")
    with pytest.raises(SchemaError, match=f"(?i)its engine {engine} has no transactions"):
        check(mariadb_database.sink(), tmp_path)


def test_a_server_that_syncs_nothing_is_warned_about(postgres_database, tmp_path, caplog) -> None:
    """That of the tests; it would lose its data in a power cut, not when it is killed."""
    check(postgres_database.sink(create_table=True), tmp_path)
    assert "a power cut at jdbc:postgresql://" in caplog.text and "since fsync is off" in caplog.text


# -- a limit for silence ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [{}, {"key": ("k",), "mode": "upsert"}])
@pytest.mark.parametrize("database", ["postgres", "mariadb"])
def test_work_that_takes_longer_than_the_limit_for_silence_is_done(request, tmp_path, database, mode) -> None:
    """A trigger that sleeps for each row: beyond `timeout_ms` it was begun anew for ever."""
    found = one_of(request, database)
    found.run("CREATE TABLE t (k BIGINT PRIMARY KEY, v VARCHAR(9))", *SLOW[database])
    running = committer_of(found.sink(timeout_ms=300, **mode), context_of(tmp_path))
    rows = [(n, "x") for n in range(25)]
    answer = running.commit(1, [staged(tmp_path, rows)])[0]
    running.close()
    assert answer.outcome is Outcome.COMMITTED and answer.facts["rows"] == 25
    assert found.table() == rows


SLOW = {
    "postgres": (
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.05); RETURN NEW; END $$",
        "CREATE TRIGGER slow BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION slow()",
    ),
    "mariadb": (
        "CREATE TRIGGER slow BEFORE INSERT ON t FOR EACH ROW SET NEW.v = IF(SLEEP(0.05), 'y', NEW.v)",
    ),
}


def test_a_cancelled_job_ends_a_statement_that_does_not_end(postgres_database, tmp_path) -> None:
    postgres_database.run("CREATE TABLE t (k BIGINT, v TEXT)", SLOW["postgres"][0].replace("0.05", "60"))
    postgres_database.run(SLOW["postgres"][1])
    running = committer_of(postgres_database.sink(timeout_ms=300), context_of(tmp_path))
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(running.commit(1, [staged(tmp_path, [(1, "a")])])[0])
    )
    thread.start()
    while thread.is_alive():
        asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
        if postgres_database.query(asleep) == [(1,)]:
            running.interrupt()
        thread.join(0.05)
    assert answers[0].outcome is Outcome.RETRY
    asleep = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    postgres_database.run(asleep)
