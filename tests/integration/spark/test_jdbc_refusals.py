"""What the JDBC sink refuses before a start, outages behind it, and the password that nobody sees."""

from __future__ import annotations

import logging
import threading
import time
import traceback

import pytest
from pyspark.sql import types as T

from flinkish_spark.connectors.jdbc.checks import Checks
from flinkish_spark.connectors.jdbc.names import TableName
from flinkish_spark.connectors.jdbc.settings import DeadLetterTable
from flinkish_spark.core.errors import ConfigError, EnvironmentFault, SchemaError, UnavailableError
from flinkish_spark.core.secrets import EnvironmentSecret, FileSecret
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import Outcome
from tests.support.databases import PAIRS, TestDatabase, commit, committer_of, context_of, staged
from tests.support.postgres import LocalPostgres, unpack_postgres
from tests.support.services import BUILD

UPSERT = {"key": ("k",), "mode": "upsert"}


def check(sink, tmp_path, schema=PAIRS) -> None:
    Checks(sink.settings, context_of(tmp_path, schema)).run()


def fields(**types) -> T.StructType:
    return T.StructType([T.StructField(name, type_) for name, type_ in types.items()])


def test_a_preflight_leaves_nothing_behind(database, tmp_path) -> None:
    check(database.sink(create_table=True, **UPSERT, on_refused=DeadLetterTable("letters")), tmp_path)
    # MySQL cannot take a CREATE TABLE back.
    left = database.dialect.name == "mysql"
    for name in ("t", "letters", "flinkish_checkpoints"):
        found = database.dialect.columns_of(database.session, TableName.parse(name))
        assert bool(found) is left


def test_two_unique_indexes_under_an_upsert_of_mysql(mariadb_database, tmp_path) -> None:
    """Its upsert would replace the row that is equal in either."""
    mariadb_database.run("CREATE TABLE t (k BIGINT PRIMARY KEY, v VARCHAR(9) UNIQUE)")
    with pytest.raises(SchemaError, match="more than one unique index"):
        check(mariadb_database.sink(**UPSERT), tmp_path)
    check(mariadb_database.sink(), tmp_path)


@pytest.mark.parametrize(
    ("create", "settings", "message"),
    [
        ("CREATE TABLE other (x INT)", {}, "the table t, which is not in"),
        ("CREATE TABLE t (k BIGINT)", {}, "writes the field 'v', for which t has no column"),
        ("CREATE TABLE t (k BIGINT, v TEXT, w INT NOT NULL)", {}, "the column 'w' of t must have a value"),
        ("CREATE TABLE t (k BIGINT, v TEXT)", UPSERT, "no unique constraint on exactly these columns"),
        (
            "CREATE TABLE t (k BIGINT, v VARCHAR(9), PRIMARY KEY (k, v))",
            UPSERT,
            "no unique constraint on exactly",
        ),
        ("CREATE TABLE t (k REAL, v TEXT)", {}, "'k' of type bigint does not fit the column of"),
    ],
)
def test_tables_that_do_not_fit_are_refused(database, tmp_path, create, settings, message) -> None:
    database.run(create)
    with pytest.raises(SchemaError, match=message):
        check(database.sink(**settings), tmp_path)


@pytest.mark.parametrize(
    ("databases", "column", "why"),
    [
        ("mariadb", "VARCHAR(9)", "the collation utf8mb4_general_ci of its column k"),
        ("mariadb", "VARCHAR(9) COLLATE utf8mb4_bin", "the collation utf8mb4_bin of its column k"),
        ("postgres", "UUID", "different texts are one uuid"),
        ("postgres", "TEXT COLLATE nocase", "the collation nocase of its column k"),
        ("sqlite", "TEXT COLLATE NOCASE", "the collation NOCASE of its column k"),
        ("sqlite", "TEXT COLLATE RTRIM", "the collation RTRIM of its column k"),
    ],
)
def test_keys_that_a_table_takes_for_one_are_refused(request, tmp_path, databases, column, why) -> None:
    """'a' and 'A', or 'a' and 'a ', are two keys of the stream."""
    database = request.getfixturevalue(f"{databases}_database")
    if "nocase" in column:
        database.run(
            "CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
        )
    database.run(f"CREATE TABLE t (k {column} PRIMARY KEY, v BIGINT)")
    schema = fields(k=T.StringType(), v=T.LongType())
    with pytest.raises(SchemaError, match="upserts by k, and t takes some different keys for equal") as found:
        check(database.sink(**UPSERT), tmp_path, schema)
    assert why in found.value.why
    check(database.sink(), tmp_path, schema)


@pytest.mark.parametrize(
    ("databases", "column"),
    [
        ("mariadb", "VARCHAR(9) COLLATE utf8mb4_nopad_bin"),
        ("mariadb", "VARBINARY(9)"),
        ("postgres", "TEXT"),
        ("postgres", "VARCHAR(9)"),
        ("sqlite", "TEXT"),
    ],
)
def test_keys_that_a_table_tells_apart_are_taken(request, tmp_path, databases, column) -> None:
    database = request.getfixturevalue(f"{databases}_database")
    database.run(f"CREATE TABLE t (k {column} PRIMARY KEY, v BIGINT)")
    check(database.sink(**UPSERT), tmp_path, fields(k=T.StringType(), v=T.LongType()))


def test_tables_without_transactions_are_refused(mariadb_database, tmp_path) -> None:
    mariadb_database.run("CREATE TABLE t (k BIGINT, v TEXT) ENGINE=MyISAM")
    with pytest.raises(SchemaError, match="engine MyISAM has no transactions"):
        check(mariadb_database.sink(), tmp_path)


def test_a_partial_or_late_unique_constraint_is_none(postgres_database, sqlite_database, tmp_path) -> None:
    for database in (postgres_database, sqlite_database):
        database.run("CREATE TABLE t (k BIGINT, v TEXT)", "CREATE UNIQUE INDEX i ON t (k) WHERE v <> ''")
        with pytest.raises(SchemaError, match="no unique constraint"):
            check(database.sink(**UPSERT), tmp_path)
    postgres_database.run("CREATE TABLE late (k BIGINT UNIQUE DEFERRABLE, v TEXT)")
    with pytest.raises(SchemaError, match="no unique constraint"):
        check(postgres_database.sink("late", **UPSERT), tmp_path)
    postgres_database.run("CREATE UNIQUE INDEX covering ON late (k) INCLUDE (v)")
    check(postgres_database.sink("late", **UPSERT), tmp_path)


def test_streams_that_do_not_fit_are_refused(database, tmp_path) -> None:
    sink = database.sink(create_table=True, key=("nothing",))
    with pytest.raises(SchemaError, match="'nothing', which its stream does not have"):
        check(sink, tmp_path)
    schema = fields(k=T.ArrayType(T.LongType()), v=T.StringType())
    with pytest.raises(SchemaError, match="databases do not compare"):
        check(database.sink(create_table=True, **UPSERT), tmp_path, schema)
    with pytest.raises(SchemaError, match="cannot write the field 'v' of type interval day to second"):
        check(database.sink(create_table=True), tmp_path, fields(k=T.LongType(), v=T.DayTimeIntervalType()))
    with pytest.raises(SchemaError, match="of type string, and it must be boolean"):
        check(database.sink(create_table=True, **UPSERT, delete_when="v"), tmp_path)


@pytest.mark.parametrize(
    ("type_", "column"),
    [
        (T.DecimalType(18, 2), "numeric(18, 1)"),
        (T.DecimalType(18, 2), "numeric(17, 2)"),
        (T.LongType(), "integer"),
        (T.LongType(), "numeric(18, 0)"),
        (T.LongType(), "double precision"),
        (T.TimestampType(), "timestamp"),
        (T.TimestampType(), "timestamptz(3)"),
        (T.TimestampNTZType(), "timestamptz"),
        (T.DoubleType(), "real"),
        (T.DoubleType(), "numeric"),
        (T.BinaryType(), "text"),
        (T.StringType(), "numeric(10, 2)"),
        (T.StringType(), "tenth"),
        (T.StringType(), "double precision"),
        (T.StringType(), "timestamp(0)"),
        (T.StringType(), "date"),
    ],
)
def test_columns_that_would_change_values_are_refused(postgres_database, tmp_path, type_, column) -> None:
    postgres_database.run("CREATE DOMAIN tenth AS numeric(10, 1)", f"CREATE TABLE t (v {column})")
    with pytest.raises(SchemaError, match=r"'v' of type .* does not fit"):
        check(postgres_database.sink(), tmp_path, fields(v=type_))


@pytest.mark.parametrize("column", ["INT", "DECIMAL(10, 2)", "FLOAT", "DATE", "DATETIME(6)", "TIME", "YEAR"])
def test_text_that_mysql_would_round_or_cut_is_refused(mariadb_database, tmp_path, column) -> None:
    mariadb_database.run(f"CREATE TABLE t (v {column})")
    with pytest.raises(SchemaError, match=r"'v' of type string does not fit .* rounded or cut") as found:
        check(mariadb_database.sink(), tmp_path, fields(v=T.StringType()))
    assert "cast the field" in str(found.value)


@pytest.mark.parametrize(
    ("type_", "column"),
    [
        (T.DecimalType(18, 2), "numeric(20, 4)"),
        (T.DecimalType(18, 2), "numeric"),
        (T.IntegerType(), "bigint"),
        (T.LongType(), "numeric(19, 0)"),
        (T.StringType(), "uuid"),
        (T.StringType(), "varchar(3)"),
        (T.StringType(), "integer"),
        (T.StringType(), "numeric"),
        (T.StringType(), "jsonb"),
        (T.StringType(), "inet"),
        (T.TimestampType(), "timestamptz"),
        (T.FloatType(), "double precision"),
        (T.ArrayType(T.LongType()), "json"),
    ],
)
def test_columns_that_hold_every_value_are_taken(postgres_database, tmp_path, type_, column) -> None:
    postgres_database.run(f"CREATE TABLE t (v {column})")
    check(postgres_database.sink(), tmp_path, fields(v=type_))


NOT_NULL = {
    "a {text} NOT NULL": True,
    "a {text} NOT NULL DEFAULT 'x'": True,
    "a {text}": False,
    "a {number} NOT NULL": False,
}


@pytest.mark.parametrize("column", NOT_NULL)
def test_which_columns_refuse_a_null(database, tmp_path, column) -> None:
    """One with a trigger in front of it does not, nor one that gets a number; a default is for none given."""
    number = {
        "postgresql": "BIGINT DEFAULT 1",
        "mysql": "BIGINT AUTO_INCREMENT UNIQUE",
        "sqlite": "INTEGER PRIMARY KEY",
    }[database.dialect.name]
    database.run(f"CREATE TABLE t ({column.format(text='VARCHAR(9)', number=number)}, b BIGINT)")
    table = TableName(("t",))
    found = {one.name: one.refuses_null for one in database.dialect.columns_of(database.session, table)}
    refuses = NOT_NULL[column] or ("{number}" in column and database.dialect.name == "postgresql")
    assert found == {"a": refuses, "b": False}
    if not refuses:
        database.run("INSERT INTO t VALUES (NULL, 1)")
        return
    with pytest.raises(Exception, match=r"(?i)null"):
        database.run("INSERT INTO t VALUES (NULL, 1)")
    database.run(*TRIGGER[database.dialect.name])
    assert not any(one.refuses_null for one in database.dialect.columns_of(database.session, table))


TRIGGER = {
    "postgresql": (
        "CREATE FUNCTION filled() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NEW.a = COALESCE(NEW.a, '1'); RETURN NEW; END $$",
        "CREATE TRIGGER filled BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION filled()",
        "INSERT INTO t VALUES (NULL, 1)",
    ),
    "mysql": (
        "CREATE TRIGGER filled BEFORE INSERT ON t FOR EACH ROW SET NEW.a = COALESCE(NEW.a, 'x')",
        "INSERT INTO t VALUES (NULL, 1)",
    ),
    "sqlite": (
        "CREATE TRIGGER without BEFORE INSERT ON t WHEN NEW.a IS NULL BEGIN SELECT RAISE(IGNORE); END",
        "INSERT INTO t VALUES (NULL, 1)",
    ),
}


def test_sqlite_s_affinities(sqlite_database, tmp_path) -> None:
    sqlite_database.run("CREATE TABLE t (v NUMERIC)")
    for type_ in (T.StringType(), T.DecimalType(10, 2), T.DoubleType()):
        with pytest.raises(SchemaError, match="affinity"):
            check(sqlite_database.sink(), tmp_path, fields(v=type_))
    check(sqlite_database.sink(), tmp_path, fields(v=T.LongType()))


def test_missing_rights_are_found(postgres_database, tmp_path) -> None:
    postgres_database.run(
        "CREATE TABLE t (k BIGINT PRIMARY KEY, v TEXT)",
        "DROP ROLE IF EXISTS weak",
        "CREATE ROLE weak LOGIN PASSWORD 'weak-secret'",
        "GRANT INSERT ON t TO weak",
    )
    weak = TestDatabase(postgres_database.url, "weak", "weak-secret")
    with pytest.raises(EnvironmentFault, match="Permission denied for schema public"):
        check(weak.sink(**UPSERT), tmp_path)
    committer = committer_of(postgres_database.sink(), context_of(tmp_path))
    committer.has_applied(CheckpointId(1))
    committer.close()
    postgres_database.run("GRANT SELECT, INSERT, UPDATE ON flinkish_checkpoints TO weak")
    with pytest.raises(EnvironmentFault, match="Permission denied for table t"):
        check(weak.sink(**UPSERT), tmp_path)
    postgres_database.run("GRANT SELECT, UPDATE ON t TO weak")
    check(weak.sink(**UPSERT), tmp_path)
    postgres_database.run("REVOKE TEMPORARY ON DATABASE " + weak.url.rsplit("/", 1)[1] + " FROM PUBLIC")
    with pytest.raises(EnvironmentFault, match="Permission denied to create temporary tables"):
        check(weak.sink(**UPSERT), tmp_path)


def test_settings_that_contradict_each_other() -> None:
    database = TestDatabase("jdbc:sqlite:/nowhere/x")
    for settings, message in [
        ({"mode": "upsert"}, "needs a key"),
        ({"mode": "replace"}, "mode is 'replace'"),
        ({"key": "k"}, "must be a list of texts"),
        ({"key": ("k", "k")}, "twice"),
        ({"delete_when": "gone"}, "needs mode='upsert'"),
        ({**UPSERT, "delete_when": "k"}, "is a column of the key"),
        ({"on_refused": "ignore"}, "must be one of OnBadRecord.FAIL"),
        ({"on_refused": DeadLetterTable("t")}, "not all different"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"table": "a.b.c"}, "is not the name of a table"),
    ]:
        with pytest.raises(ConfigError, match=message):
            database.sink(**settings)


# -- outages --------------------------------------------------------------------------------------


@pytest.fixture
def own_postgres():
    with LocalPostgres(unpack_postgres(BUILD / "postgres")) as server:
        yield server


def test_a_server_that_goes_and_comes_back(own_postgres, tmp_path) -> None:
    database = TestDatabase(own_postgres.url, own_postgres.user, own_postgres.password)
    sink, context = database.sink(create_table=True, timeout_ms=2_000), context_of(tmp_path)
    committer = committer_of(sink, context)

    def answer(number, *given):
        return committer.commit(CheckpointId(number), given)[0]

    one = staged(tmp_path, [(1, "a")])
    assert answer(1, one).outcome is Outcome.COMMITTED
    for harm in (own_postgres.kill, own_postgres.stop):
        harm()
        down = answer(2, staged(tmp_path, [(2, "b")], batch=1))
        assert down.outcome is Outcome.RETRY and "cannot be used now" in down.detail
        own_postgres.start()
    two = staged(tmp_path, [(2, "b")], batch=1)
    assert answer(2, two).outcome is Outcome.COMMITTED
    own_postgres.pause()
    began = time.monotonic()
    three = staged(tmp_path, [(3, "c")], batch=2)
    silent = answer(3, three)
    assert silent.outcome is Outcome.RETRY
    # An outage of our own making says so.
    assert "was silent for 2000 ms, so this sink ended the connection" in silent.detail
    assert time.monotonic() - began < 30
    own_postgres.resume()
    assert answer(3, three).outcome.is_done
    assert database.table() == [(1, "a"), (2, "b"), (3, "c")]
    database.close()


def test_stopped_while_checkpoints_are_committed(own_postgres, tmp_path) -> None:
    """A server that is killed again and again at some moment of a commit, under one that repeats."""
    database = TestDatabase(own_postgres.url, own_postgres.user, own_postgres.password)
    database.run("CREATE TABLE t (k BIGINT, v TEXT)")
    database.close()
    sink, context, over = database.sink(timeout_ms=5_000), context_of(tmp_path), threading.Event()

    def harm():
        while not over.wait(0.4):
            own_postgres.kill()
            own_postgres.start()

    thread = threading.Thread(target=harm)
    thread.start()
    try:
        committer, retries = committer_of(sink, context), 0
        for number in range(1, 31):
            given = staged(tmp_path, [(n, str(number)) for n in range(2_000)], batch=number)
            while True:
                answer = committer.commit(CheckpointId(number), [given])[0]
                if answer.outcome.is_done:
                    break
                assert answer.outcome is Outcome.RETRY
                retries += 1
                time.sleep(0.02)
    finally:
        over.set()
        thread.join(60)
    committer.close()
    assert retries > 0
    assert database.query("SELECT v, count(*) FROM t GROUP BY v HAVING count(*) <> 2000") == []
    assert database.query("SELECT count(*) FROM t") == [(60_000,)]
    database.close()


def test_a_table_that_is_dropped_stops_the_job_and_comes_back(database, tmp_path) -> None:
    database.run("CREATE TABLE t (k BIGINT PRIMARY KEY, v TEXT)")
    sink, context, given = database.sink(**UPSERT), context_of(tmp_path), staged(tmp_path, [(1, "a")])
    database.run("DROP TABLE t")
    with pytest.raises(EnvironmentFault) as caught:
        commit(sink, context, 1, given)
    assert not caught.value.restartable
    database.run("CREATE TABLE t (k BIGINT PRIMARY KEY, v TEXT)")
    assert commit(sink, context, 1, given).outcome is Outcome.COMMITTED


def test_a_locked_file_is_waited_for(sqlite_database, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("flinkish_spark.connectors.jdbc.sqlite._LOCK_WAIT_S", 0.1)
    sink, context, given = (
        sqlite_database.sink(create_table=True),
        context_of(tmp_path),
        staged(tmp_path, [(1, "a")]),
    )
    sqlite_database.run("BEGIN IMMEDIATE")
    assert commit(sink, context, 1, given).outcome is Outcome.RETRY
    sqlite_database.run("ROLLBACK")
    assert commit(sink, context, 1, given).outcome is Outcome.COMMITTED


# -- the password ---------------------------------------------------------------------------------


def everything_said(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))


def test_the_password_is_nowhere(postgres_database, tmp_path, caplog, capfd) -> None:
    caplog.set_level(logging.DEBUG)
    right, wrong, said = postgres_database.password, "wrong-pass-word", []
    sink = postgres_database.sink(create_table=True)
    said += [repr(sink), str(sink), repr(sink.settings), repr(vars(sink)), repr(sink.password)]
    context = context_of(tmp_path / "buffer")
    given = staged(tmp_path / "buffer", [(1, "a")])
    said.append(repr(given.payload))
    said.append(repr(commit(sink, context, 1, given)))
    bad = TestDatabase(postgres_database.url, postgres_database.user, wrong).sink()
    with pytest.raises(EnvironmentFault, match=r"authentication failed|cannot be used") as caught:
        check(bad, tmp_path)
    said.append(everything_said(caught.value))
    gone = TestDatabase("jdbc:postgresql://127.0.0.1:1/x", "me", right).sink()
    with pytest.raises(UnavailableError) as refused:
        check(gone, tmp_path)
    said.append(everything_said(refused.value))
    said.append(repr(commit(gone, context, 2, staged(tmp_path / "buffer", [(2, "b")], batch=1))))
    # A database that says it back, in the text of an error.
    postgres_database.run("DROP TABLE t", f"""CREATE VIEW t AS SELECT 1::bigint AS k, '{right}' AS v""")
    with pytest.raises(EnvironmentFault) as echoed:
        commit(
            postgres_database.sink(f'"{right}"'), context, 3, staged(tmp_path / "buffer", [(2, "b")], batch=1)
        )
    said += [str(echoed.value.why), str(caplog.text), *capfd.readouterr()]
    said += [path.read_bytes().decode("latin-1") for path in (tmp_path / "buffer").iterdir()]
    text = "\n".join(said)
    assert right not in text and wrong not in text and "***" in text


@pytest.mark.parametrize(
    "url",
    [
        "jdbc:postgresql://me:hidden-word@host/db",
        "jdbc:postgresql://host/db?user=me&password=hidden-word",
        "jdbc:mysql://host/db?PASSWORD=hidden-word",
        "jdbc:mysql://host/db?passwd=hidden-word",
        "jdbc:mysql://host/db?ssl_key_password=hidden-word",
        "jdbc:postgresql://host/db?oauth_client_secret=hidden-word",
        "jdbc:oracle:thin:me/hidden-word@//host:1521/db",
        "hidden-word",
    ],
)
def test_a_url_that_is_refused_is_not_shown(url) -> None:
    with pytest.raises(ConfigError) as caught:
        TestDatabase(url).sink()
    assert "hidden-word" not in everything_said(caught.value)


def test_a_password_is_read_for_each_connection(postgres_database, tmp_path, monkeypatch) -> None:
    file = tmp_path / "secret"
    sink = TestDatabase(postgres_database.url, postgres_database.user).sink(
        create_table=True, password=FileSecret(str(file))
    )
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        check(sink, tmp_path)
    file.write_text(postgres_database.password + "\n")
    check(sink, tmp_path)
    monkeypatch.setenv("DB_WORD", postgres_database.password)
    named = TestDatabase(postgres_database.url, postgres_database.user)
    check(named.sink(create_table=True, password=EnvironmentSecret("DB_WORD")), tmp_path)
    monkeypatch.delenv("DB_WORD")
    with pytest.raises(EnvironmentFault, match="DB_WORD is not set"):
        check(named.sink(password=EnvironmentSecret("DB_WORD")), tmp_path)
