"""Lookup joins: what is asked, what is cached, what comes out; and the table in SQLite."""

from __future__ import annotations

import pickle
import sqlite3
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import Row

from flinkish_spark.core.elements import OutputTag
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.joins import (
    JoinType,
    LookupCache,
    LookupJoin,
    LookupTable,
    ProcessJoinFunction,
    SqliteTable,
)
from flinkish_spark.operators.lookup_join import (
    LookupJoinRun,
    find_cached_answers,
    forget_answers,
)
from flinkish_spark.operators.process import ElementError
from flinkish_spark.state import ValueStateDescriptor
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.worker.functions import LookupRows, RowFunction
from tests.support.joins_support import LEFT

USERS = "name STRING, age LONG"


class Table(LookupTable):
    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def lookup(self, keys):
        self.asked.append(list(keys))
        return {key: self.rows[key] for key in keys if key in self.rows}


def run_of(table, **given):
    given = {"key_of": lambda e: e[0]} | given
    return LookupJoinRun(LookupJoin(LEFT, USERS, table=table, **given), "lookup")


def test_the_keys_of_a_batch_are_asked_for_once_and_rows_come_in_the_order_of_the_elements() -> None:
    table = Table({"a": [("ann", 1), ("abe", 2)], "b": [("bob", 3)]})
    run = run_of(table, join_type=JoinType.LEFT)
    elements = [("b", 1), ("a", 2), ("x", 3), (None, 4), ("b", 5)]
    emitted = run.run(elements, [10, 20, 30, 40, 50], 0)
    assert emitted.rows == [
        ("b", 1, "bob", 3),
        ("a", 2, "ann", 1),
        ("a", 2, "abe", 2),
        ("x", 3, None, None),
        (None, 4, None, None),
        ("b", 5, "bob", 3),
    ]
    assert emitted.times_ms == [10, 20, 20, 30, 40, 50]
    assert table.asked == [["b", "a", "x"]]
    inner = run_of(table).run(elements, None, 0)
    assert [row[1] for row in inner.rows] == [1, 2, 2, 5]
    assert inner.times_ms == [None] * 4


def test_without_a_cache_each_batch_asks_and_large_ones_ask_in_parts() -> None:
    table = Table({})
    run = run_of(table, keys_per_call=2)
    for _ in range(2):
        run.run([(key, 0) for key in "abcab"], None, 0)
    assert table.asked == [["a", "b"], ["c"]] * 2


def test_the_cache_keeps_answers_and_misses_for_their_time_and_not_too_many() -> None:
    table = Table({"a": [("ann", 1)]})
    run = run_of(table, cache=LookupCache(ttl_ms=100, max_keys=3))

    def ask(keys, now_ms):
        table.asked.clear()
        rows = run.run([(key, 0) for key in keys], None, now_ms).rows
        return rows, [key for asked in table.asked for key in asked]

    assert ask("ab", 0) == ([("a", 0, "ann", 1)], ["a", "b"])
    table.rows = {"b": [("bob", 2)]}
    assert ask("ab", 99) == ([("a", 0, "ann", 1)], [])
    assert ask("ab", 100) == ([("b", 0, "bob", 2)], ["a", "b"])
    assert ask("a", 110)[1] == []
    assert ask("cd", 110)[1] == ["c", "d"]
    # Of a, c and d three are kept; b was not used for longest.
    assert ask("acdb", 110)[1] == ["b"]
    # More keys than there is room for: they are there for the batch that asked.
    assert len(ask("efghb", 110)[0]) == 1


def test_an_answer_whose_age_is_not_known_is_not_taken() -> None:
    table = Table({})
    run = run_of(table, cache=LookupCache(ttl_ms=100))
    for now_ms in (1_000, 1_050, 500, 550):
        run.run([("a", 0)], None, now_ms)
    # The clock was set back; what is read then counts.
    assert table.asked == [["a"]] * 2


class Asked(LookupTable):
    """Says when it was asked, in all its copies."""

    asked: ClassVar[list[str]] = []

    def lookup(self, keys):
        self.asked.extend(keys)
        return {key: [(key.upper(),)] for key in keys}


def test_a_worker_keeps_answers_from_one_micro_batch_to_the_next() -> None:
    def program(cache):
        def found(elements):
            key = lambda element: element.k  # noqa: E731
            return elements.lookup_join(Asked(), "name STRING", key=key, cache=cache)

        return ProgramHarness(found, LEFT)

    def asked(one, *keys):
        Asked.asked.clear()
        one.push_all([((key, 1), None) for key in keys])
        assert [row.name for row in one.take().rows] == [key.upper() for key in keys]
        return list(Asked.asked)

    one, other = program(LookupCache(10**9)), program(LookupCache(10**9))
    assert [asked(one, "a", "b"), asked(one, "b", "c"), asked(one, "a", "c")] == [["a", "b"], ["c"], []]
    # Another join keeps its own; without a cache each micro-batch asks.
    assert [asked(other, "a"), asked(one, "a")] == [["a"], []]
    plain = program(None)
    assert [asked(plain, "a"), asked(plain, "a")] == [["a"], ["a"]]
    one.crash()
    assert asked(one, "a") == ["a"]


def test_what_is_kept_for_joins_that_are_gone_goes() -> None:
    forget_answers()
    first = find_cached_answers("first")
    assert find_cached_answers("first") is first
    for number in range(64):
        find_cached_answers(f"join {number}")
    assert find_cached_answers("first") is not first
    forget_answers()


def test_several_columns_are_a_tuple_and_a_null_in_it_has_no_rows() -> None:
    table = Table({("a", 1): [("ann", 1)], ("a", None): [("nobody", 0)]})
    run = run_of(table, key_of=lambda e: (e[0], e[1]))
    assert run.run([("a", 1), ("a", None)], None, 0).rows == [("a", 1, "ann", 1)]
    assert table.asked == [[("a", 1)]]


class Adults(ProcessJoinFunction):
    SIDE = OutputTag("minors", "k STRING")

    def process_element(self, left, right, ctx):
        if right is None or right[1] < 18:
            ctx.output(self.SIDE, (left[0],))
        else:
            yield left[0], ctx.left_timestamp(), ctx.right_timestamp(), ctx.timestamp()


def test_a_function_makes_rows_and_has_side_outputs() -> None:
    table = Table({"a": [("ann", 17)], "b": [("bob", 18)]})
    emitted = run_of(table, function=Adults(), join_type=JoinType.LEFT).run(
        [("a", 1), ("b", 2), ("c", 3)], [5, 6, 7], 0
    )
    assert (emitted.rows, emitted.times_ms) == ([("b", 6, None, 6)], [6])
    assert emitted.side == {"minors": [(("a",), 5), (("c",), 7)]}


def test_failures_name_the_element_or_the_table() -> None:
    with pytest.raises(ElementError, match="IndexError") as caught:
        run_of(Table({})).run([("a", 1), ()], None, 0)
    assert caught.value.at == 1
    with pytest.raises(ElementError, match="unhashable"):
        run_of(Table({}), key_of=lambda e: [e]).run([("a", 1)], None, 0)
    with pytest.raises(TypeError, match=r"Table.lookup\(\) returned .*'ann'.* for the key 'a'"):
        run_of(Table({"a": "ann"})).run([("a", 1)], None, 0)

    class Listing(LookupTable):
        def lookup(self, keys):
            return [("ann", 1)]

    with pytest.raises(TypeError, match=r"Listing.lookup\(\) returned list"):
        run_of(Listing()).run([("a", 1)], None, 0)

    class Keyed(Adults):
        def open(self, context):
            context.get_state(ValueStateDescriptor("x", "LONG"))

    with pytest.raises(TypeError, match="operator 'lookup' asks for the state 'x'"):
        run_of(Table({}), function=Keyed())


@dataclass
class User:
    age: int
    name: str


@pytest.mark.parametrize("row", [{"age": 1, "name": "ann"}, Row(age=1, name="ann"), User(1, "ann")])
def test_rows_with_names_go_by_name(row) -> None:
    assert run_of(Table({"a": [row]})).run([("a", 1)], None, 0).rows == [("a", 1, "ann", 1)]


def test_a_row_of_one_field_may_be_its_value() -> None:
    # So does SqliteTable return it, where there is one column.
    for rows in (["ann"], [("ann",)], [{"name": "ann"}]):
        join = LookupJoin(LEFT, "name STRING", key_of=lambda e: e[0], table=Table({"a": rows}))
        assert LookupJoinRun(join, "lookup").run([("a", 1)], None, 0).rows == [("a", 1, "ann")]


def test_rows_that_are_declared_as_a_struct_have_its_fields() -> None:
    def program(elements):
        key = lambda element: element.k  # noqa: E731
        return elements.lookup_join(Table({"a": [("ann", 1)]}), "STRUCT<name: STRING, age: INT>", key=key)

    one = ProgramHarness(program, LEFT)
    one.push(("a", 7))
    assert [(row.name, row.age) for row in one.take().rows] == [("ann", 1)]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("ab", "a str; a row is a tuple"),
        (("ann",), "1 fields, but 2 are declared: name, age"),
        ({"name": "ann", "years": 1}, "the field 'years', but the declared fields are name, age"),
    ],
)
def test_a_row_that_is_none_names_operator_table_and_key(row, why) -> None:
    says = rf"operator 'lookup': Table.lookup\(\) returned a wrong row for the key 'a': {why}"
    with pytest.raises(TypeError, match=says):
        run_of(Table({"a": [row]})).run([("a", 1)], None, 0)


def test_a_function_gets_rows_as_the_table_returned_them() -> None:
    class Shown(ProcessJoinFunction):
        def process_element(self, left, right, ctx):
            yield (right["years"],)

    run = run_of(Table({"a": [{"years": 1}]}), function=Shown())
    assert run.run([("a", 1)], None, 0).rows == [(1,)]


class Noted(LookupTable):
    def __init__(self, notes, fails=""):
        self.notes, self.fails = notes, fails

    def open(self):
        self.note("open")

    def lookup(self, keys):
        self.note("lookup")
        return {}

    def close(self):
        self.note("close")

    def note(self, what):
        self.notes.append(what)
        if what == self.fails:
            raise OSError(f"no {what}")


class NotedFunction(ProcessJoinFunction):
    def __init__(self, notes):
        self.notes = notes

    def process_element(self, left, right, ctx):
        yield (1,)

    def close(self):
        self.notes.append("function closed")
        raise ValueError("the function's close")


@pytest.mark.parametrize(
    ("fails", "told", "cause", "notes"),
    [
        ("open", r"open\(\) of operator 'found'", "no open", ["open", "function closed", "close"]),
        ("lookup", "no lookup", "no lookup", ["open", "lookup", "function closed", "close"]),
        ("", r"close\(\) of operator 'found'", "function's close", ["open", "function closed", "close"]),
    ],
)
def test_table_and_function_are_closed_whatever_failed_and_errors_name_the_operator(
    fails, told, cause, notes
) -> None:
    noted: list[str] = []
    join = LookupJoin(LEFT, USERS, lambda e: e.k, Noted(noted, fails), function=NotedFunction(noted))
    worker = LookupRows(RowFunction("found", join.key_of), parse_ddl("n LONG"), (), join, kept_as="found")
    batch = pa.RecordBatch.from_pydict({"k": ["a"], "n": [1]})
    with pytest.raises(Exception, match=told) as caught:
        list(worker(iter([batch] if fails else [])))
    assert cause in str(caught.value)
    assert noted == notes


@pytest.fixture
def database(tmp_path):
    file = tmp_path / "users {1}.db"
    with sqlite3.connect(file) as connection:
        connection.execute('CREATE TABLE "all ""users""" (id INTEGER, "c{0}" TEXT, name TEXT, age INTEGER)')
        rows = [(n, "de" if n % 2 else "fr", f"n{n}", n) for n in range(2_000)]
        connection.executemany('INSERT INTO "all ""users""" VALUES (?, ?, ?, ?)', rows)
        connection.execute("""INSERT INTO "all ""users\""" VALUES (7, 'de', 'again', 70)""")
    connection.close()
    return file


def test_a_table_in_sqlite_is_asked_by_one_column_or_several(database) -> None:
    one = SqliteTable(database, 'all "users"', ["id"], ["name", "age"])
    one = pickle.loads(cloudpickle.dumps(one))
    one.open()
    assert one.lookup([7, -1, "8"]) == {7: [("n7", 7), ("again", 70)], "8": [("n8", 8)]}
    assert len(one.lookup(list(range(3_000)))) == 2_000
    one.close()
    several = SqliteTable(database, 'all "users"', ["id", "c{0}"], ["name"])
    several.open()
    assert several.lookup([(7, "de"), (7, "fr"), (8, "fr")]) == {
        (7, "de"): ["n7", "again"],
        (8, "fr"): ["n8"],
    }
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        several._connection.execute('DELETE FROM "all ""users"""')
    several.close()


@pytest.mark.parametrize("key", ["7d", 7, (7, "de", 1)])
def test_a_key_of_another_width_than_the_table_s_is_refused(database, key) -> None:
    # "7d" has as many letters as there are columns.
    table = SqliteTable(database, 'all "users"', ["id", "c{0}"], ["name"])
    table.open()
    with pytest.raises(ConfigError, match=r"asked for the key .* key columns id, c\{0\}.* a tuple of 2"):
        table.lookup([key])
    table.close()


@pytest.mark.parametrize("key", [Decimal("2.5"), (7,), 2**63])
def test_a_key_that_sqlite_does_not_know_is_refused_with_its_type(database, key) -> None:
    table = SqliteTable(database, 'all "users"', ["id"], ["name"])
    table.open()
    with pytest.raises(ConfigError, match=f'all "users".* of the types {type(key).__name__}'):
        table.lookup([key])
    table.close()


def test_a_database_that_is_not_there_is_named(tmp_path) -> None:
    table = SqliteTable(tmp_path / "none.db", "t", ["id"], ["name"])
    with pytest.raises(sqlite3.OperationalError, match=r"none\.db"):
        table.open()
    table.close()


def test_a_lookup_join_over_sqlite(database) -> None:
    table = SqliteTable(database, 'all "users"', ["id"], ["name", "age"])
    run = run_of(table, key_of=lambda e: e[1], cache=LookupCache(1_000))
    assert run.run([("x", 3), ("y", 4), ("z", None)], None, 0).rows == [("x", 3, "n3", 3), ("y", 4, "n4", 4)]
    run.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"join_type": JoinType.RIGHT}, "cannot be a RIGHT join"),
        ({"key_of": "k"}, "called with one argument"),
        ({"table": Table}, "subclass of LookupTable"),
        ({"cache": 100}, "give a LookupCache"),
        ({"keys_per_call": 0}, "keys_per_call is 0"),
    ],
)
def test_a_join_that_cannot_be_is_refused_where_it_is_said(wrong, message) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(**({"table": Table({})} | wrong))
    with pytest.raises(ConfigError, match="ttl_ms is 0"):
        LookupCache(0)
    with pytest.raises(ConfigError, match=r"key_columns=\['id'\]"):
        SqliteTable("users.db", "users", "id", ["name"])
    with pytest.raises(ConfigError, match="0 key columns and 1 columns"):
        SqliteTable("x", "t", [], ["a"])
    with pytest.raises(ConfigError, match="cannot be the name"):
        SqliteTable("x", "t\0", ["k"], ["a"])
