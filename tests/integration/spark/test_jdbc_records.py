"""What records become in real databases: every type, hostile names and values, refused ones."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal

import pytest
from pyspark.sql import types as T

from flinkish_spark.connectors.jdbc.checks import Checks
from flinkish_spark.connectors.jdbc.settings import DeadLetterTable
from flinkish_spark.core.errors import BadRecordError, ConfigError
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.protocol.records import Outcome
from tests.support.databases import PAIRS, commit, context_of, staged

FIELDS = {
    "n": T.IntegerType(),
    "boolean": T.BooleanType(),
    "byte": T.ByteType(),
    "short": T.ShortType(),
    "long": T.LongType(),
    "float": T.FloatType(),
    "double": T.DoubleType(),
    "decimal": T.DecimalType(38, 18),
    "string": T.StringType(),
    "binary": T.BinaryType(),
    "date": T.DateType(),
    "timestamp": T.TimestampType(),
    "local": T.TimestampNTZType(),
    "array": T.ArrayType(T.DoubleType()),
    "map": T.MapType(T.StringType(), T.LongType()),
    "struct": T.StructType([T.StructField("of", T.ArrayType(T.DecimalType(10, 2)))]),
}
EVERYTHING = T.StructType([T.StructField(name, type_) for name, type_ in FIELDS.items()])
UTC = dt.UTC
VALUES = (
    1,
    True,
    -128,
    -(2**15),
    -(2**63),
    0.1,
    1e-310,
    Decimal("-99999999999999999999.999999999999999999"),
    "π ' \" ; -- \\ \t\n\r {} % %s $1 ? \\N",
    b"\x00\xff\\x",
    dt.date(1, 1, 1),
    dt.datetime(2024, 3, 31, 1, 30, 0, 1, tzinfo=UTC),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999999),
    [None, math.nan, -math.inf, 1.5],
    {"a": None, "": 2**63 - 1},
    {"of": [Decimal("0.01"), None]},
)
FLOAT = 0.10000000149011612  # 0.1 in four bytes
JSONS = ([None, "NaN", "-Infinity", 1.5], {"a": None, "": 2**63 - 1}, {"of": ["0.01", None]})
UPSERT = {"key": ("k",), "mode": "upsert"}


@pytest.mark.parametrize("count", [1, 50])
def test_every_type_comes_out_as_it_went_in(database, tmp_path, count) -> None:
    context = context_of(tmp_path, EVERYTHING)
    sink = database.sink(create_table=True, key=("n",), mode="upsert")
    Checks(sink.settings, context).run()
    rows = [(n, *VALUES[1:]) for n in range(count)] + [(count, *[None] * 15)]
    assert commit(sink, context, 1, staged(tmp_path, rows, EVERYTHING)).outcome is Outcome.COMMITTED
    *full, empty = database.table(order="1")
    assert empty == (count, *[None] * 15)
    for found in full:
        if database.dialect.name == "sqlite":
            assert found[1:5] == (1, -128, -(2**15), -(2**63))
            assert found[7] == "-99999999999999999999.999999999999999999"
            assert found[10:13] == (
                "0001-01-01",
                "2024-03-31 01:30:00.000001+00:00",
                "9999-12-31 23:59:59.999999",
            )
        else:
            assert found[1:5] == VALUES[1:5] and found[7] == VALUES[7]
            at = VALUES[11] if database.dialect.name == "postgresql" else VALUES[11].replace(tzinfo=None)
            assert found[10:13] == (VALUES[10], at, VALUES[12])
        assert found[5] in (0.1, FLOAT) and found[6] == 1e-310
        assert found[8:10] == VALUES[8:10]
        parts = [json.loads(v) if isinstance(v, str) else v for v in found[13:]]
        assert parts == list(JSONS)


def test_floats_that_are_no_numbers(postgres_database, tmp_path) -> None:
    schema = T.StructType([T.StructField("x", T.DoubleType())])
    sink = postgres_database.sink(create_table=True)
    commit(sink, context_of(tmp_path, schema), 1, staged(tmp_path, [(math.nan,), (-math.inf,)], schema))
    assert [repr(x) for (x,) in postgres_database.table(order="1")] == ["-inf", "nan"]


HOSTILE = [
    'a"b',
    "semi; DROP TABLE t; --",
    "percent %s %% %(x)s",
    "ünïcödé 表 🙂",
    "$1 ? :x {} \\ '",
    "SELECT",
    "space  and\ttab\n",
    "Case",
    "case",
]


def as_name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_nothing_but_names(database, tmp_path, name) -> None:
    fields = [name, name + ' "2"']
    if database.dialect.name == "mysql" and (name != name.rstrip() or max(name) > "\uffff"):
        with pytest.raises(ConfigError, match="cannot be the name"):
            database.sink(as_name(name))
        return
    schema = T.StructType([T.StructField(field, T.StringType()) for field in fields])
    context = context_of(tmp_path, schema, uid="out")
    sink = database.sink(
        as_name(name),
        key=(name,),
        mode="upsert",
        create_table=True,
        control_table=as_name(name + " control"),
        on_refused=DeadLetterTable(as_name(name + " letters")),
    )
    Checks(sink.settings, context).run()
    rows = [(f"'; DROP TABLE x; -- {n}", name) for n in range(30)]
    rows.append((None, "no key"))
    answer = commit(sink, context, 1, staged(tmp_path, rows, schema))
    assert answer.facts["rows"] == 30 and answer.facts["refused"] == 1
    commit(sink, context, 2, staged(tmp_path, [(rows[0][0], "new")], schema, batch=1))
    assert sorted(database.table(as_name(name))) == sorted([*rows[1:30], (rows[0][0], "new")])
    assert len(database.table(as_name(name + " letters"))) == 1


def test_a_schema_of_its_own(postgres_database, tmp_path) -> None:
    postgres_database.run('CREATE SCHEMA "my ""own"""')
    names = {"control_table": '"my ""own""".c', "on_refused": DeadLetterTable('"my ""own""".d')}
    sink = postgres_database.sink('"my ""own""".t', create_table=True, key=("k",), mode="upsert", **names)
    context = context_of(tmp_path)
    Checks(sink.settings, context).run()
    answer = commit(sink, context, 1, staged(tmp_path, [(n, "x\0" if n == 3 else "x") for n in range(50)]))
    assert answer.facts == {"rows": 49, "deleted": 0, "superseded": 0, "refused": 1}
    assert len(postgres_database.table('"my ""own""".t')) == 49
    ((*_, reason, record),) = postgres_database.table('"my ""own""".d', order="1")
    assert "NUL" in reason and json.loads(record) == {"k": 3, "v": "x\0"}


# -- refused records ------------------------------------------------------------------------------

GUARDED = "CREATE TABLE t (k BIGINT PRIMARY KEY, v TEXT NOT NULL CHECK (v <> 'bad'))"
MIXED = [(n, {5: "bad", 17: None, 99: "bad"}.get(n, f"v{n}")) for n in range(100)]
GOOD = [row for row in MIXED if row[1] not in ("bad", None)]


@pytest.mark.parametrize("mode", ["insert", "upsert"])
def test_refused_records_become_dead_letters(database, tmp_path, mode) -> None:
    database.run(GUARDED)
    sink = database.sink(key=("k",), mode=mode, on_refused=DeadLetterTable("letters"))
    answer = commit(sink, context_of(tmp_path), 4, staged(tmp_path, MIXED))
    assert answer.outcome is Outcome.COMMITTED and answer.facts["refused"] == 3
    assert database.table() == GOOD
    found = database.query(
        "SELECT sink_uid, checkpoint_id, position, reason, record FROM letters ORDER BY position"
    )
    assert [(u, c, p, json.loads(r)) for u, c, p, _, r in found] == [
        ("out", 4, n, {"k": n, "v": MIXED[n][1]}) for n in (5, 17, 99)
    ]
    assert "constraint" in found[0][3].lower() and "null" in found[1][3].lower()


def test_a_refused_record_does_not_take_the_place_of_an_earlier_one(database, tmp_path) -> None:
    """As if each record were a checkpoint of its own: none without a key is lost, nor the last good one."""
    database.run("CREATE TABLE t (k BIGINT PRIMARY KEY, v VARCHAR(99) CHECK (v <> 'bad'))")
    schema = T.StructType([*PAIRS.fields, T.StructField("gone", T.BooleanType())])
    sink = database.sink(**UPSERT, delete_when="gone", on_refused=DeadLetterTable("letters"))
    rows = [(None, "a"), (1, "x"), (1, "y"), (None, "b"), (2, "z"), (3, "p")]
    rows += [(1, "bad"), (1, "bad"), (3, "q")]
    given = staged(tmp_path, [(*row, False) for row in rows], schema)
    more = [(2, None, True), (2, "bad", False), (4, "r", False), (4, "bad", False)]
    answer = commit(sink, context_of(tmp_path, schema), 1, given, staged(tmp_path, more, schema, batch=1))
    assert database.table() == [(1, "y"), (3, "q"), (4, "r")]
    found = database.query("SELECT position FROM letters ORDER BY position")
    assert [at for (at,) in found] == [0, 3, 6, 7, 10, 12]
    assert answer.facts == {"rows": 5, "deleted": 1, "superseded": 1, "refused": 6}


def test_refused_records_are_dropped_and_counted(database, tmp_path) -> None:
    database.run(GUARDED, "INSERT INTO t VALUES (3, 'there')")
    sink = database.sink(on_refused=OnBadRecord.DROP)
    answer = commit(sink, context_of(tmp_path), 1, staged(tmp_path, [*MIXED, (4, "twice")]))
    assert answer.facts == {"rows": 96, "refused": 5}
    assert database.table() == sorted([(3, "there"), *[r for r in GOOD if r[0] != 3]])


def test_a_refused_record_fails_the_checkpoint_until_the_cause_is_mended(database, tmp_path) -> None:
    database.run("CREATE TABLE t (k BIGINT, v VARCHAR(9))", "CREATE UNIQUE INDEX once ON t (v)")
    database.run("INSERT INTO t VALUES (7, 'v70')")
    sink, given = database.sink(key=("k",)), staged(tmp_path, [(n, f"v{n}") for n in range(100)])
    for _ in range(2):
        database.run("DELETE FROM t WHERE k <> 7", "UPDATE t SET k = 1007")
        with pytest.raises(BadRecordError, match=r'refuses a record of sink \'out\': \{"k": 70\}') as caught:
            commit(sink, context_of(tmp_path), 1, given)
        assert not caught.value.restartable and "change the table" in str(caught.value)
        assert database.table() == [(1007, "v70")] and database.newest() in ([], [("out", 0, 0)])
        database.run("UPDATE t SET k = 7")
    database.run("DROP INDEX once" + (" ON t" if database.dialect.name == "mysql" else ""), "DELETE FROM t")
    assert commit(sink, context_of(tmp_path), 1, given).outcome is Outcome.COMMITTED
    assert len(database.table()) == 100


@pytest.mark.parametrize("value", ["x", "12345678901", "", "1; DROP TABLE t"])
def test_a_bad_cast_is_refused(postgres_database, tmp_path, value) -> None:
    postgres_database.run("CREATE TABLE t (k BIGINT, v INTEGER)")
    sink = postgres_database.sink(on_refused=OnBadRecord.DROP)
    Checks(sink.settings, context_of(tmp_path)).run()
    rows = [(n, value if n == 11 else str(n)) for n in range(40)]
    assert commit(sink, context_of(tmp_path), 1, staged(tmp_path, rows)).facts == {"rows": 39, "refused": 1}
    rows = [(1, "1"), (2, value)]
    answer = commit(sink, context_of(tmp_path), 2, staged(tmp_path, rows, batch=1))
    assert answer.facts == {"rows": 1, "refused": 1}


def test_data_that_is_too_long_is_refused(postgres_database, tmp_path) -> None:
    postgres_database.run("CREATE TABLE t (k BIGINT, v VARCHAR(3))")
    sink = postgres_database.sink(on_refused=OnBadRecord.DROP)
    answer = commit(sink, context_of(tmp_path), 1, staged(tmp_path, [(1, "abc"), (2, "abcd")]))
    assert answer.facts == {"rows": 1, "refused": 1} and postgres_database.table() == [(1, "abc")]


def test_a_trigger_may_refuse(postgres_database, tmp_path) -> None:
    postgres_database.run(
        "CREATE TABLE t (k BIGINT, v TEXT)",
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.v = 'bad' THEN RAISE 'not this one'; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER no BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION no()",
    )
    sink = postgres_database.sink(on_refused=DeadLetterTable("letters"))
    answer = commit(sink, context_of(tmp_path), 1, staged(tmp_path, MIXED))
    assert answer.facts == {"rows": 98, "refused": 2}
    assert "not this one" in postgres_database.query("SELECT reason FROM letters")[0][0]


def test_a_constraint_that_would_be_checked_at_commit_is_checked_per_record(
    postgres_database, tmp_path
) -> None:
    postgres_database.run(
        "CREATE TABLE p (k BIGINT PRIMARY KEY)",
        "INSERT INTO p VALUES (1)",
        "CREATE TABLE t (k BIGINT REFERENCES p DEFERRABLE INITIALLY DEFERRED, v TEXT)",
    )
    sink = postgres_database.sink(on_refused=OnBadRecord.DROP)
    answer = commit(sink, context_of(tmp_path), 1, staged(tmp_path, [(1, "a"), (2, "b")]))
    assert answer.facts == {"rows": 1, "refused": 1}


def test_values_that_only_spark_has(sqlite_database, tmp_path) -> None:
    schema = T.StructType([T.StructField("k", T.LongType()), T.StructField("x", T.DoubleType())])
    sink = sqlite_database.sink(create_table=True, on_refused=DeadLetterTable("letters"))
    rows = [(1, math.nan), (2, math.inf), (3, None)]
    answer = commit(sink, context_of(tmp_path, schema), 1, staged(tmp_path, rows, schema))
    assert answer.facts == {"rows": 2, "refused": 1}
    assert sqlite_database.table() == [(2, math.inf), (3, None)]
    assert sqlite_database.query("SELECT reason, record FROM letters") == [
        ("x: SQLite would store NaN as NULL", '{"k": 1, "x": "NaN"}')
    ]


def test_the_dead_letters_of_a_repeated_commit_are_not_written_twice(database, tmp_path) -> None:
    database.run(GUARDED)
    sink, given = database.sink(on_refused=DeadLetterTable("letters")), staged(tmp_path, MIXED)
    for _ in range(3):
        assert commit(sink, context_of(tmp_path, PAIRS), 1, given).outcome.is_done
    assert database.query("SELECT count(*) FROM letters") == [(3,)]
