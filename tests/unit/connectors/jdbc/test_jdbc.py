"""The JDBC sink without a database server: names, URLs, SQL of each dialect, types, errors, secrets."""

from __future__ import annotations

import builtins
import datetime as dt
import json
import math
import pickle
import sqlite3
from dataclasses import replace
from decimal import Decimal

import psycopg
import pyarrow as pa
import pymysql
import pytest
from pyspark.sql import types as T

from flinkish_spark.checkpoint.failures import classify
from flinkish_spark.connectors.jdbc.control import ControlTable
from flinkish_spark.connectors.jdbc.dialect import (
    ColumnInfo,
    Login,
    Session,
    Target,
    Trouble,
    UnfitValue,
    WriteMode,
    json_value,
    parameters,
    python_values,
    record_json,
)
from flinkish_spark.connectors.jdbc.mysql import MySql
from flinkish_spark.connectors.jdbc.names import JdbcUrl, TableName
from flinkish_spark.connectors.jdbc.postgres import Postgres
from flinkish_spark.connectors.jdbc.settings import RecordCheck
from flinkish_spark.connectors.jdbc.sink import JdbcSink
from flinkish_spark.connectors.jdbc.sqlite import Sqlite
from flinkish_spark.connectors.jdbc.types import SqlType, is_supported
from flinkish_spark.core.errors import BadRecordError, ConfigError, EnvironmentFault
from flinkish_spark.core.secrets import PlainSecret

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


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("jdbc:sqlite:/jobs/a#1/db", "its path has '#'"),
        ("jdbc:sqlite:/jobs/a?1#2/db", "its path has '?' and '#'"),
        ("jdbc:sqlite:a/db", "its path is not absolute"),
        ("jdbc:postgresql://db/a#1", "the name of its database has '#'"),
        ("jdbc:mysql://db/a/b", "the name of its database has '/'"),
        ("jdbc:mysql://d#b/a", "the name of its host has '#'"),
        ("jdbc:postgresql://db", "it names no database"),
    ],
)
def test_letters_that_a_url_cannot_have_are_named(text, what) -> None:
    with pytest.raises(ConfigError) as caught:
        JdbcUrl.parse(text)
    assert caught.value.what == f"the JDBC URL cannot be read: {what}" and caught.value.what_to_do
    assert JdbcUrl.parse("jdbc:postgresql://db/a%231").database == "a#1"


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
    assert DIALECTS[dialect].quote(name) == sql


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", ["", "a\0b"])
def test_names_that_no_quoting_helps_are_refused(dialect, name) -> None:
    with pytest.raises(ConfigError, match="cannot be the name"):
        DIALECTS[dialect].quote(name)


def test_names_that_would_be_cut_off_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 to 63 bytes"):
        Postgres().quote("ü" * 32)


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
        (T.StringType(), "tinytext", True),
        (T.StringType(), "longtext", True),
        (T.StringType(), "varbinary(9)", True),
        (T.StringType(), "enum('a','b')", False),
        (T.StringType(), "set('a','b')", False),
        (T.StringType(), "char(9)", False),
        (T.StringType(), "binary(9)", False),
        (T.StringType(), "json", False),
        (T.StringType(), "geometry", False),
        (T.StringType(), "uuid", False),
        (T.StringType(), "inet6", False),
        (T.BooleanType(), "tinyint(1) unsigned", True),
        (T.BooleanType(), "bit(1)", False),
        (T.BinaryType(), "binary(9)", False),
        (T.DecimalType(10, 2), "decimal(10,2) unsigned", False),
        (T.DoubleType(), "double(10,2)", False),
        (T.DoubleType(), "double unsigned", False),
        (T.LongType(), "bigint(20) unsigned zerofill", False),
        (T.StringType(), "int(11) unsigned", False),
        (T.StringType(), "tinyint(1)", False),
        (T.StringType(), "decimal(10,2)", False),
        (T.StringType(), "double", False),
        (T.StringType(), "date", False),
        (T.StringType(), "datetime(6)", False),
        (T.StringType(), "timestamp", False),
        (T.StringType(), "time", False),
        (T.StringType(), "year(4)", False),
        (T.StringType(), "bit(1)", False),
        (T.BinaryType(), "varbinary(10)", True),
        (T.BinaryType(), "text", False),
        (T.ArrayType(T.LongType()), "json", True),
        (T.ArrayType(T.LongType()), "longtext", True),
        (T.DateType(), "datetime(6)", False),
    ],
)
def test_what_fits_in_mysql(type_, column, fits) -> None:
    assert (MySql().why_unfit(type_, ColumnInfo("c", column, False)) == "") is fits


@pytest.mark.parametrize(
    ("column", "fits"),
    [
        ("text", True),
        ("character varying(5)", True),
        ("jsonb", True),
        ("uuid", True),
        ("inet", True),
        ("boolean", True),
        ("integer", True),
        ("numeric", True),
        ("json", True),
        ("citext", True),
        ("mood", False),
        ("character(5)", False),
        ("bpchar", False),
        ("bytea", False),
        ("bit varying(5)", False),
        ("xml", False),
        ("point", False),
        ("tsvector", False),
        ("int4range", False),
        ("numeric(10,2)", False),
        ("numeric(10,2)[]", False),
        ("real", False),
        ("double precision", False),
        ("money", False),
        ("date", False),
        ("time(0) without time zone", False),
        ("timestamp(0) without time zone", False),
        ("timestamp with time zone", False),
        ("interval day to second(3)", False),
        ("name", False),
        ('"char"', False),
    ],
)
def test_which_columns_of_postgresql_take_text(column, fits) -> None:
    """'12.345' would be 12.35, and a time would lose its digits; what is no integer is refused by itself."""
    assert (Postgres().why_unfit(T.StringType(), ColumnInfo("c", column, False)) == "") is fits


def test_texts_and_enums_letters_and_computed_columns() -> None:
    postgres, mysql, text = Postgres(), MySql(), T.StringType()
    assert postgres.why_unfit(text, ColumnInfo("c", "mood", False, is_enum=True)) == ""
    for dialect, type_ in ((postgres, "text"), (mysql, "longtext")):
        made = ColumnInfo("c", type_, False, is_generated=True)
        assert dialect.why_unfit(text, made) == "the database computes its values"
    for letters, fits in (("utf8mb4", True), ("latin1", True), ("sjis", False), ("koi8r", False)):
        column = ColumnInfo("c", "varchar(9)", False, letters=letters)
        assert (mysql.why_unfit(text, column) == "") is fits


@pytest.mark.parametrize(
    ("dialect", "column", "text", "is_taken"),
    [
        ("postgresql", "character varying(3)", "ab ", True),
        ("postgresql", "character varying(3)", "abc ", False),
        # Not cut but refused, by the database itself.
        ("postgresql", "character varying(3)", "abcd", True),
        ("postgresql", "character varying", "abc ", True),
        ("mysql", "varchar(3)", "äbc ", False),
        ("mysql", "varchar(4)", "äbc ", True),
        ("mysql", "tinytext", "ä" * 127 + " ", True),
        ("mysql", "tinytext", "ä" * 127 + "  ", False),
        ("mysql", "varbinary(3)", "abc ", True),
        ("postgresql", "jsonb", '{"a": 1, "b": {"a": 2}}', True),
        ("postgresql", "jsonb", '{"a": 1, "b": [{"a": 2, "a": 3}]}', False),
        ("postgresql", "jsonb", "1" * 5_000, True),
        ("postgresql", "jsonb", "no json", True),
        ("postgresql", "json", '{"a": 1, "a": 2}', True),
        ("sqlite", "varchar(3)", "abc ", True),
    ],
)
def test_a_text_that_a_column_would_shorten_is_refused(dialect, column, text, is_taken) -> None:
    one = DIALECTS[dialect]
    checks = one.checks([ColumnInfo("c", column, False)])
    batch = pa.record_batch({"c": pa.array([text, None])})
    found = parameters(batch, ["c"], one, checks)
    assert found[1] == (None,)
    assert isinstance(found[0][0], UnfitValue) is not is_taken
    if is_taken:
        assert found[0] == (text,)


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
    ((at, x, parts),) = parameters(batch, ["at", "x", "l"], MySql(), {})
    assert (at, parts) == (dt.datetime(2024, 1, 1), "[1, null]")
    assert isinstance(x, UnfitValue) and "infinity" in x
    assert parameters(batch, [], MySql(), {}) == [()]


def test_an_hour_that_a_clock_shows_twice() -> None:
    """Both instants are 02:30 in Berlin."""
    instants = [dt.datetime(2024, 10, 27, hour, 30, tzinfo=dt.UTC) for hour in (0, 1)]
    assert python_values(pa.array(instants, pa.timestamp("us", "Europe/Berlin"))) == instants


def test_a_time_that_python_does_not_have() -> None:
    column = pa.array([0, 2**60], pa.int64()).cast(pa.timestamp("us", "UTC"))
    first, second = python_values(column)
    assert first == dt.datetime(1970, 1, 1, tzinfo=dt.UTC) and isinstance(second, UnfitValue)
    batch = pa.record_batch({"at": column})
    assert "out of range" in record_json(batch, 1)


def test_json_keeps_what_it_can_and_writes_the_rest_as_text() -> None:
    struct = pa.struct([("d", pa.decimal128(10, 2)), ("m", pa.map_(pa.int64(), pa.binary()))])
    value = {"d": Decimal("1.50"), "m": [(1, b"\xff")]}
    assert json_value(value, struct) == {"d": "1.50", "m": [[1, "/w=="]]}
    assert json_value([dt.date(1, 2, 3), None], pa.list_(pa.date32())) == ["0001-02-03", None]


# -- records that no commit could write -----------------------------------------------------------

NO_TEXT = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff")]
)
LATE = pa.array([0, 2**60], pa.int64()).cast(pa.timestamp("us", "UTC"))
PAIRS = pa.map_(pa.string(), pa.string())


def check_of(dialect: str, columns=(), delete_when="") -> RecordCheck:
    """As a task has it."""
    made = RecordCheck("out", DIALECTS[dialect], target(columns=("k", "v"), key=("k",)), delete_when, columns)
    return pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize(
    ("dialect", "second", "why"),
    [
        ("sqlite", pa.array([1.5, math.nan]), "v: SQLite would store NaN as NULL"),
        ("mysql", pa.array([1.5, math.nan]), "v: MySQL has no NaN and no infinity"),
        ("mysql", pa.array([None, -math.inf]), "v: MySQL has no NaN and no infinity"),
        ("postgresql", pa.array([None, "a\0"]), "v: postgresql has no text with a zero byte"),
        ("postgresql", pa.array([["\0"], [None, "\0"]]).slice(1), "v: postgresql has no text with a zero"),
        ("postgresql", pa.array([None, [("\0", "a")]], PAIRS), "v: postgresql has no text with a zero byte"),
        ("sqlite", NO_TEXT, "v: the value cannot be read: 'utf-8' codec can't decode byte 0xff"),
        ("sqlite", LATE, "v: the value 1152921504606846976 is out of range"),
        ("sqlite", pa.StructArray.from_arrays([LATE], ["at"]), "v: the value cannot be read"),
        ("sqlite", pa.array([0, 2932897], pa.int32()).cast(pa.date32()), "v: the value cannot be read"),
    ],
)
def test_what_no_commit_could_write_is_named_before_the_decision(dialect, second, why) -> None:
    count = len(second)
    batch = pa.record_batch([pa.array(range(count)), second], names=["k", "v"])
    with pytest.raises(BadRecordError) as caught:
        check_of(dialect)(batch)
    said = str(caught.value)
    assert "[FLINKISH_BAD_RECORD] the sink 'out' refuses it: " + why in said
    assert f'{{"k": {count - 1}}}' in said


def test_what_python_cannot_read_can_be_left_out_at_the_commit() -> None:
    """Other policies than FAIL come by it there; the dead letter says what it was."""
    for column, first in ((NO_TEXT, "a"), (pa.StructArray.from_arrays([NO_TEXT], ["of"]), {"of": "a"})):
        found = python_values(column)
        assert found[0] == first and isinstance(found[1], UnfitValue)
        said = json.loads(record_json(pa.record_batch([column], names=["v"]), 1))
        assert said["v"].startswith("the value cannot be read: 'utf-8' codec")


@pytest.mark.parametrize(
    ("dialect", "second", "type_"),
    [
        ("postgresql", [math.nan, math.inf, None], "double precision"),
        ("sqlite", [math.inf, -math.inf, None], ""),
        ("sqlite", ["a\0", None], ""),
        ("mysql", ["a\0", None], ""),
        ("mysql", [[math.nan], None], "json"),
        ("postgresql", [["\0"], None], "json"),
        ("postgresql", [["\\u0000"], None], "jsonb"),
        ("sqlite", [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)], ""),
        ("sqlite", [dt.date(1, 1, 1), dt.date(9999, 12, 31)], ""),
        ("sqlite", [None, None], ""),
        ("sqlite", [], ""),
    ],
)
def test_what_a_commit_can_write_is_let_through(dialect, second, type_) -> None:
    batch = pa.record_batch({"k": pa.array(range(len(second)), pa.int64()), "v": pa.array(second)})
    check_of(dialect, (ColumnInfo("v", type_, False),))(batch)


def test_a_key_without_a_value_is_named_before_the_decision() -> None:
    batch = pa.record_batch({"k": ["a", "b", None, None], "v": [1, 2, 3, 4]})
    with pytest.raises(BadRecordError, match=r'the key column k is null, .*: \{"k": null\}'):
        check_of("sqlite")(batch)
    insert = replace(check_of("sqlite"), target=target(WriteMode.INSERT, ("k", "v"), ("k",)))
    insert(batch)


def test_a_null_for_a_column_that_is_not_null() -> None:
    columns = (ColumnInfo("v", "bigint", True, True),)
    good = pa.record_batch({"k": [1, 2], "v": [1, 2], "gone": [False, None]})
    bad = pa.record_batch({"k": [1, 2], "v": [1, None], "gone": [False, None]})
    check_of("mysql", columns)(good)
    check_of("mysql")(bad)
    with pytest.raises(BadRecordError, match=r'column v of s.t is NOT NULL, and .* is null: \{"k": 2\}'):
        check_of("mysql", columns, "gone")(bad)


def test_a_record_that_deletes_needs_its_key_only() -> None:
    columns = (ColumnInfo("v", "real", True, True),)
    batch = pa.record_batch({"k": ["a", "b", "c"], "v": [None, math.nan, 1.5], "gone": [True, True, False]})
    check_of("sqlite", columns, "gone")(batch)
    batch = pa.record_batch({"k": ["a", "b\0"], "v": [None, None], "gone": [True, True]})
    with pytest.raises(BadRecordError, match="k: postgresql has no text with a zero byte"):
        check_of("postgresql", columns, "gone")(batch)


def test_a_record_brings_no_marker_into_the_message() -> None:
    batch = pa.record_batch({"k": ["[FLINKISH_USER_FUNCTION] {}"], "v": [math.nan]})
    with pytest.raises(BadRecordError) as caught:
        check_of("sqlite")(batch)
    told = classify(RuntimeError(f"{caught.value}"))
    assert isinstance(told, BadRecordError) and "USER_FUNCTION] {}" in str(told)
    assert "correct the producer" in str(told)


def test_which_columns_of_sqlite_refuse_a_null() -> None:
    session = Session(sqlite3.connect(":memory:", isolation_level=None))
    session.run(
        "CREATE TABLE t (k INTEGER NOT NULL PRIMARY KEY, a TEXT NOT NULL, b INT NOT NULL DEFAULT 1, c)"
    )
    session.run("CREATE TABLE u (a TEXT NOT NULL ON CONFLICT IGNORE)")
    found = [(one.name, one.refuses_null) for one in Sqlite().columns_of(session, TableName(("t",)))]
    assert found == [("k", False), ("a", True), ("b", True), ("c", False)]
    assert [one.refuses_null for one in Sqlite().columns_of(session, TableName(("u",)))] == [False]
    session.run("CREATE TRIGGER no BEFORE INSERT ON t WHEN NEW.a IS NULL BEGIN SELECT RAISE(IGNORE); END")
    assert not any(one.refuses_null for one in Sqlite().columns_of(session, TableName(("t",))))


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
    with pytest.raises(EnvironmentFault, match=rf"(?i)pip install '{module}.*[0-9]'"):
        DIALECTS[dialect].connect(Login(url, "", "", 1_000))


def test_no_driver_is_imported_before_it_is_used() -> None:
    import subprocess
    import sys

    code = "import sys, flinkish_spark.connectors.jdbc.sink; print({'psycopg', 'pymysql'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "set()"


def test_a_password_is_shown_nowhere() -> None:
    sink = JdbcSink("jdbc:sqlite:/x", "t", user="me", password="hidden-word")
    login = Login(sink.settings.url, "me", "hidden-word", 1)
    shown = [repr(sink), repr(sink.settings), repr(vars(sink)), repr(PlainSecret("hidden-word")), repr(login)]
    assert "hidden-word" not in "".join(shown) and sink.settings.secret.read() == "hidden-word"
    assert sink.settings.scrub("said hidden-word back") == "said *** back"
