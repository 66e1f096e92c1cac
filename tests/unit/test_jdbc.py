"""The JDBC sink without a database server: names, URLs, SQL of each dialect, types, errors, secrets."""

from __future__ import annotations

import builtins
import datetime as dt
import math
import sqlite3
from decimal import Decimal

import psycopg
import pyarrow as pa
import pymysql
import pytest
from pyspark.sql import types as T

from flinkish_spark.errors import ConfigError
from flinkish_spark.sinks.jdbc.control import ControlTable
from flinkish_spark.sinks.jdbc.dialect import ColumnInfo, Login, Session, Target, Trouble, WriteMode
from flinkish_spark.sinks.jdbc.drivers import DriverMissing
from flinkish_spark.sinks.jdbc.mysql import MySql
from flinkish_spark.sinks.jdbc.names import TableName
from flinkish_spark.sinks.jdbc.postgres import Postgres
from flinkish_spark.sinks.jdbc.secrets import PlainSecret
from flinkish_spark.sinks.jdbc.sink import JdbcSink
from flinkish_spark.sinks.jdbc.sqlite import Sqlite
from flinkish_spark.sinks.jdbc.types import SqlType, is_supported
from flinkish_spark.sinks.jdbc.url import JdbcUrl
from flinkish_spark.sinks.jdbc.values import Unfit, json_value, parameters, python_values, record_json

DIALECTS = {one.name: one for one in (Postgres(), Sqlite(), MySql())}
TABLE = TableName(("s", "t"))


def target(mode=WriteMode.UPSERT, columns=("k", "l", "v", "w"), key=("k", "l")) -> Target:
    return Target(TABLE, columns, key, mode)


# -- names and URLs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("t", ("t",)),
        ("s.t", ("s", "t")),
        ('"s.1"."a ""b"""', ("s.1", 'a "b"')),
        ("with space.täble;--", ("with space", "täble;--")),
    ],
)
def test_names_of_tables(text, parts) -> None:
    assert TableName.parse(text).parts == parts
    assert TableName.parse(str(TableName(parts))).parts == parts


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a.b.c", '"a', 'a"b', '""', 'a."b"c'])
def test_what_is_no_name_of_a_table(text) -> None:
    with pytest.raises(ConfigError, match="is not the name of a table"):
        TableName.parse(text)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("jdbc:postgresql://db/shop", JdbcUrl("postgresql", "shop", "db", 5432)),
        (
            "jdbc:postgresql://[::1]:1/a%20b?sslmode=require",
            JdbcUrl("postgresql", "a b", "::1", 1, {"sslmode": "require"}),
        ),
        ("jdbc:mariadb://db/shop", JdbcUrl("mysql", "shop", "db", 3306)),
        ("jdbc:sqlite:/a/b c.db", JdbcUrl("sqlite", "/a/b c.db")),
    ],
)
def test_urls(text, url) -> None:
    assert JdbcUrl.parse(text) == url


@pytest.mark.parametrize(
    "text", ["", "postgresql://db/x", "jdbc:postgresql://db", "jdbc:sqlite:relative", "jdbc:sqlite::memory:"]
)
def test_what_is_no_url(text) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        JdbcUrl.parse(text)


# -- SQL ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "name", "sql"),
    [
        ("postgresql", 'a"b%s', '"a""b%%s"'),
        ("sqlite", 'a"b%s?', '"a""b%s?"'),
        ("mysql", 'a`b"%s', '`a``b"%%s`'),
    ],
)
def test_identifiers_are_quoted(dialect, name, sql) -> None:
    assert DIALECTS[dialect].quoted(name) == sql


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", ["", "a\0b"])
def test_names_that_no_quoting_helps_are_refused(dialect, name) -> None:
    with pytest.raises(ConfigError, match="cannot be the name"):
        DIALECTS[dialect].quoted(name)


def test_names_that_would_be_cut_off_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 to 63 bytes"):
        Postgres().quoted("ü" * 32)


def upsert(dialect: str, given: Target) -> str:
    one = DIALECTS[dialect]
    return one.insert(given.table, given.columns) + one.on_conflict(given)


def test_upserts() -> None:
    assert upsert("postgresql", target()) == (
        'INSERT INTO "s"."t" ("k", "l", "v", "w") VALUES (%s, %s, %s, %s) '
        'ON CONFLICT ("k", "l") DO UPDATE SET "v" = EXCLUDED."v", "w" = EXCLUDED."w"'
    )
    assert upsert("sqlite", target(columns=("k", "l"))) == (
        'INSERT INTO "s"."t" ("k", "l") VALUES (?, ?) ON CONFLICT ("k", "l") DO NOTHING'
    )
    assert upsert("mysql", target()) == (
        "INSERT INTO `s`.`t` (`k`, `l`, `v`, `w`) VALUES (%s, %s, %s, %s) "
        "ON DUPLICATE KEY UPDATE `v` = VALUES(`v`), `w` = VALUES(`w`)"
    )
    assert upsert("mysql", target(columns=("k", "l"))).endswith("ON DUPLICATE KEY UPDATE `k` = VALUES(`k`)")
    assert upsert("mysql", target(WriteMode.INSERT)).endswith("(%s, %s, %s, %s)")


def test_deletes() -> None:
    assert MySql().delete_by_key(target()) == "DELETE FROM `s`.`t` WHERE `k` = %s AND `l` = %s"
    assert Sqlite().delete_by_key(target()) == 'DELETE FROM "s"."t" WHERE "k" = ? AND "l" = ?'


def test_mysql_s_tables() -> None:
    sql = MySql().create_table(TABLE, ControlTable.columns(MySql()), ("job_uuid", "sink_uid"))
    assert sql == (
        "CREATE TABLE IF NOT EXISTS `s`.`t` (`job_uuid` VARCHAR(190) NOT NULL, "
        "`sink_uid` VARCHAR(190) NOT NULL, `checkpoint_id` BIGINT NOT NULL, `owner_epoch` BIGINT NOT NULL, "
        "`facts` LONGTEXT NOT NULL, PRIMARY KEY (`job_uuid`, `sink_uid`)) "
        "ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 /*!50799 COLLATE utf8mb4_0900_bin */ "
        "/*M!100202 COLLATE utf8mb4_nopad_bin */"
    )
    made = MySql().insert_if_absent(TABLE, ("a", "b"), ("a",))
    assert made == "INSERT INTO `s`.`t` (`a`, `b`) VALUES (%s, %s) ON DUPLICATE KEY UPDATE `a` = `a`"


class Recorded:
    """A connection that keeps statements and parameters; a query is answered with one number."""

    def __init__(self, answer: int) -> None:
        self.calls, self.rowcount, self._answer = [], 1, answer

    def cursor(self):
        return self

    def execute(self, sql, params):
        if not sql.startswith("SELECT"):
            self.calls.append((sql, params))

    def fetchall(self):
        return [(self._answer,)]

    def close(self):
        pass


def test_mysql_writes_many_rows_with_one_statement() -> None:
    connection = Recorded(answer=16 << 20)
    rows = [(n, 0, "'; --", None) for n in range(1_001)]
    MySql().write(Session(connection), target(), rows)
    assert [len(params) // 4 for _, params in connection.calls] == [500, 500, 1]
    sql, params = connection.calls[-1]
    assert "'; --" not in sql and params == (1_000, 0, "'; --", None)
    assert sql.count("%s") == 4 and "ON DUPLICATE KEY UPDATE" in sql
    assert [value for _, params in connection.calls for value in params[::4]] == list(range(1_001))
    narrow = Recorded(answer=8_000)
    MySql().write(Session(narrow), target(), [(n, 0, "x" * 300, None) for n in range(10)])
    assert [len(params) // 4 for _, params in narrow.calls] == [3, 3, 3, 1]


# -- types and values -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("numeric(18,2)", SqlType("numeric", 18, 2)),
        ("decimal(9)", SqlType("decimal", 9, 0)),
        ("timestamp(3) with time zone", SqlType("timestamp with time zone", 3, 0)),
        ("double precision", SqlType("double precision")),
        ("enum('a','b')", SqlType("enum('a','b')")),
    ],
)
def test_types_are_taken_apart(text, expected) -> None:
    assert SqlType.parse(text) == expected


@pytest.mark.parametrize(
    ("type_", "column", "fits"),
    [
        (T.LongType(), "bigint(20)", True),
        (T.LongType(), "bigint(20) unsigned", False),
        (T.LongType(), "int", False),
        (T.BooleanType(), "tinyint(1)", True),
        (T.DecimalType(10, 2), "decimal(10,2)", True),
        (T.DecimalType(10, 2), "decimal(10,1)", False),
        (T.TimestampType(), "datetime(6)", True),
        (T.TimestampType(), "datetime", False),
        (T.TimestampType(), "timestamp(6)", False),
        (T.FloatType(), "float", False),
        (T.DoubleType(), "double", True),
        (T.StringType(), "varchar(10)", True),
        (T.BinaryType(), "varbinary(10)", True),
        (T.BinaryType(), "text", False),
        (T.ArrayType(T.LongType()), "json", True),
        (T.ArrayType(T.LongType()), "longtext", True),
        (T.DateType(), "datetime(6)", False),
    ],
)
def test_what_fits_in_mysql(type_, column, fits) -> None:
    assert (MySql().why_unfit(type_, ColumnInfo("c", column, False)) == "") is fits


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_a_dialect_creates_fits(dialect) -> None:
    one = DIALECTS[dialect]
    types = [T.BooleanType(), T.ByteType(), T.ShortType(), T.IntegerType(), T.LongType(), T.FloatType()]
    types += [T.DoubleType(), T.DecimalType(38, 18), T.StringType(), T.BinaryType(), T.DateType()]
    types += [T.TimestampType(), T.TimestampNTZType(), T.ArrayType(T.LongType()), T.StructType([])]
    for type_ in types:
        for in_key in (True, False):
            made = one.type_for(type_, in_key=in_key)
            assert (
                made and one.why_unfit(type_, ColumnInfo("c", made.lower().replace(", ", ","), False)) == ""
            )


def test_types_that_are_not_written() -> None:
    assert not is_supported(T.DayTimeIntervalType())
    assert not is_supported(T.ArrayType(T.MapType(T.StringType(), T.VariantType())))
    assert is_supported(T.MapType(T.StringType(), T.StructType([T.StructField("a", T.DateType())])))


def test_values_of_mysql() -> None:
    batch = pa.record_batch(
        {
            "at": pa.array([dt.datetime(2024, 1, 1, tzinfo=dt.UTC)], pa.timestamp("us", "Europe/Berlin")),
            "x": pa.array([math.inf]),
            "l": pa.array([[1, None]]),
        }
    )
    ((at, x, parts),) = parameters(batch, ["at", "x", "l"], MySql())
    assert (at, parts) == (dt.datetime(2024, 1, 1), "[1, null]")
    assert isinstance(x, Unfit) and "infinity" in x
    assert parameters(batch, [], MySql()) == [()]


def test_an_hour_that_a_clock_shows_twice() -> None:
    """Both instants are 02:30 in Berlin."""
    instants = [dt.datetime(2024, 10, 27, hour, 30, tzinfo=dt.UTC) for hour in (0, 1)]
    assert python_values(pa.array(instants, pa.timestamp("us", "Europe/Berlin"))) == instants


def test_a_time_that_python_does_not_have() -> None:
    column = pa.array([0, 2**60], pa.int64()).cast(pa.timestamp("us", "UTC"))
    first, second = python_values(column)
    assert first == dt.datetime(1970, 1, 1, tzinfo=dt.UTC) and isinstance(second, Unfit)
    batch = pa.record_batch({"at": column})
    assert "out of range" in record_json(batch, 1)


def test_json_keeps_what_it_can_and_writes_the_rest_as_text() -> None:
    struct = pa.struct([("d", pa.decimal128(10, 2)), ("m", pa.map_(pa.int64(), pa.binary()))])
    value = {"d": Decimal("1.50"), "m": [(1, b"\xff")]}
    assert json_value(value, struct) == {"d": "1.50", "m": [[1, "/w=="]]}
    assert json_value([dt.date(1, 2, 3), None], pa.list_(pa.date32())) == ["0001-02-03", None]


# -- errors ---------------------------------------------------------------------------------------


def sqlite_error(code: int, kind=sqlite3.OperationalError):
    error = kind("said")
    error.sqlite_errorcode = code
    return error


POSTGRES = {
    psycopg.errors.UniqueViolation("x"): Trouble.REFUSED,
    psycopg.errors.InvalidTextRepresentation("x"): Trouble.REFUSED,
    psycopg.errors.CardinalityViolation("x"): Trouble.REFUSED,
    psycopg.DataError("zero byte"): Trouble.REFUSED,
    psycopg.errors.DeadlockDetected("x"): Trouble.PASSING,
    psycopg.errors.AdminShutdown("x"): Trouble.PASSING,
    psycopg.errors.ReadOnlySqlTransaction("x"): Trouble.PASSING,
    psycopg.errors.DiskFull("x"): Trouble.PASSING,
    psycopg.errors.LockNotAvailable("x"): Trouble.PASSING,
    psycopg.OperationalError("lost"): Trouble.PASSING,
    psycopg.errors.InsufficientPrivilege("x"): Trouble.LASTING,
    psycopg.errors.UndefinedTable("x"): Trouble.LASTING,
    psycopg.ProgrammingError("x"): Trouble.LASTING,
    ValueError("a bug"): Trouble.LASTING,
}
MYSQL = {
    pymysql.IntegrityError(1062, "dup"): Trouble.REFUSED,
    pymysql.DataError(1406, "long"): Trouble.REFUSED,
    pymysql.OperationalError(2013, "lost"): Trouble.PASSING,
    pymysql.OperationalError(1213, "deadlock"): Trouble.PASSING,
    pymysql.InterfaceError(0, ""): Trouble.PASSING,
    pymysql.OperationalError(1045, "denied"): Trouble.LASTING,
    pymysql.ProgrammingError(1146, "no table"): Trouble.LASTING,
    ValueError("a bug"): Trouble.LASTING,
}
SQLITE = {
    sqlite_error(sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.IntegrityError): Trouble.REFUSED,
    OverflowError("int too large"): Trouble.REFUSED,
    sqlite_error(sqlite3.SQLITE_BUSY): Trouble.PASSING,
    sqlite_error(sqlite3.SQLITE_IOERR_WRITE): Trouble.PASSING,
    sqlite_error(sqlite3.SQLITE_FULL): Trouble.PASSING,
    sqlite_error(sqlite3.SQLITE_READONLY): Trouble.LASTING,
    sqlite_error(sqlite3.SQLITE_ERROR): Trouble.LASTING,
}
CASES = [(name, error, what) for name, cases in zip(DIALECTS, (POSTGRES, SQLITE, MYSQL), strict=True)
         for error, what in cases.items()]  # fmt: skip


@pytest.mark.parametrize(("dialect", "error", "trouble"), CASES, ids=lambda one: str(one)[:30])
def test_what_an_error_means(dialect, error, trouble) -> None:
    assert DIALECTS[dialect].trouble(error) is trouble
    assert DIALECTS[dialect].reason(error)


@pytest.mark.parametrize(("dialect", "module"), [("postgresql", "psycopg"), ("mysql", "pymysql")])
def test_a_missing_driver_is_named(dialect, module, monkeypatch) -> None:
    real = builtins.__import__

    def without(name, *arguments, **named):
        if name == module:
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    url = JdbcUrl.parse(f"jdbc:{dialect}://127.0.0.1:1/x")
    with pytest.raises(DriverMissing, match=rf"pip install 'flinkish-spark\[{dialect}\]'"):
        DIALECTS[dialect].connect(Login(url, "", "", 1_000))


def test_no_driver_is_imported_before_it_is_used() -> None:
    import subprocess
    import sys

    code = "import sys, flinkish_spark.sinks.jdbc.sink; print({'psycopg', 'pymysql'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "set()"


def test_a_password_is_shown_nowhere() -> None:
    sink = JdbcSink("jdbc:sqlite:/x", "t", user="me", password="hidden-word")
    login = Login(sink.settings.url, "me", "hidden-word", 1)
    shown = [repr(sink), repr(sink.settings), repr(vars(sink)), repr(PlainSecret("hidden-word")), repr(login)]
    assert "hidden-word" not in "".join(shown) and sink.settings.secret.read() == "hidden-word"
    assert sink.settings.scrubbed("said hidden-word back") == "said *** back"
