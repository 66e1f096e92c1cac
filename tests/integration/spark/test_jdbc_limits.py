"""Where databases have limits that only show with certain records: sizes, indexes, partitions, rights."""

from __future__ import annotations

import random

from pyspark.sql import types as T

from flinkish_spark.connectors.jdbc.checks import Checks
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.protocol.records import Outcome
from tests.support.databases import TestDatabase, commit, context_of, staged


def test_a_statement_is_never_longer_than_mysql_reads(mariadb_database, tmp_path) -> None:
    """Otherwise the server hangs up, which looks like an outage that never ends."""
    database, most = mariadb_database, 1 << 20
    ((usual,),) = database.query("SELECT @@max_allowed_packet")
    database.run(
        "CREATE TABLE t (k BIGINT PRIMARY KEY, v LONGTEXT)", f"SET GLOBAL max_allowed_packet = {most}"
    )
    rows = [(n, "'" * (most // 100)) for n in range(200)]
    rows += [(1_000, "'" * (most // 2)), (1_001, "ü" * (most // 2)), (1_002, "x" * (most // 2)), (1_003, "x")]
    sink = database.sink(on_refused=OnBadRecord.DROP)
    try:
        answer = commit(sink, context_of(tmp_path), 1, staged(tmp_path, rows))
    finally:
        database.run(f"SET GLOBAL max_allowed_packet = {usual}")
    assert (answer.outcome, answer.facts) == (Outcome.COMMITTED, {"rows": 202, "refused": 2})
    found = database.query("SELECT k, LENGTH(v) FROM t WHERE k >= 199 ORDER BY k")
    assert found == [(199, most // 100), (1_002, most // 2), (1_003, 1)]


def test_keys_of_created_tables_differ_by_case_and_spaces(database, tmp_path) -> None:
    schema = T.StructType([T.StructField("k", T.StringType()), T.StructField("v", T.LongType())])
    sink = database.sink(create_table=True, key=("k",), mode="upsert")
    keys = ["a", "a ", "A", " a", "é", "e\u0301", ""]
    rows = [(key, n) for n, key in enumerate(keys)]
    assert commit(sink, context_of(tmp_path, schema), 1, staged(tmp_path, rows, schema)).facts["rows"] == len(
        keys
    )
    assert sorted(database.table()) == sorted(rows)


def test_a_record_for_which_there_is_no_partition_is_refused(
    mariadb_database, postgres_database, tmp_path
) -> None:
    mariadb_database.run(
        "CREATE TABLE t (k BIGINT, v TEXT) PARTITION BY RANGE (k) (PARTITION low VALUES LESS THAN (10))"
    )
    postgres_database.run(
        "CREATE TABLE t (k BIGINT, v TEXT) PARTITION BY RANGE (k)",
        "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (10)",
    )
    for database in (mariadb_database, postgres_database):
        sink, context = (
            database.sink(on_refused=OnBadRecord.DROP),
            context_of(tmp_path / database.dialect.name),
        )
        answer = commit(sink, context, 1, staged(context.folder, [(1, "a"), (20, "b")]))
        assert answer.facts == {"rows": 1, "refused": 1} and database.table() == [(1, "a")]


def test_a_value_that_is_too_long_for_an_index_is_refused(postgres_database, tmp_path) -> None:
    postgres_database.run("CREATE TABLE t (k BIGINT, v TEXT UNIQUE)")
    long = random.Random(1).randbytes(20_000).hex()
    sink = postgres_database.sink(on_refused=OnBadRecord.DROP)
    answer = commit(sink, context_of(tmp_path), 1, staged(tmp_path, [(1, "a"), (2, long)]))
    assert answer.facts == {"rows": 1, "refused": 1} and postgres_database.table() == [(1, "a")]


def test_a_table_with_row_level_security(postgres_database, tmp_path) -> None:
    """It takes no COPY."""
    postgres_database.run(
        "CREATE TABLE t (k BIGINT PRIMARY KEY, v TEXT)",
        "CREATE ROLE guarded LOGIN PASSWORD 'guarded-secret'",
        "GRANT ALL ON t TO guarded",
        "GRANT ALL ON SCHEMA public TO guarded",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY small ON t TO guarded USING (true) WITH CHECK (k < 100)",
    )
    guarded = TestDatabase(postgres_database.url, "guarded", "guarded-secret")
    sink, context = guarded.sink(), context_of(tmp_path)
    Checks(sink.settings, context).run()
    rows = [(n, "a") for n in range(60)]
    assert commit(sink, context, 1, staged(tmp_path, rows)).outcome is Outcome.COMMITTED
    assert postgres_database.table() == rows
