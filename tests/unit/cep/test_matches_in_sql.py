"""MATCH_RECOGNIZE is cut out of texts in Spark's SQL; what is wrong is refused with its line and column."""

from __future__ import annotations

import re

import pytest

from flinkish_spark.cep.factories import RowPatterns
from flinkish_spark.cep.matches_in_sql import cut_matches
from flinkish_spark.core.errors import GraphError, PatternError
from flinkish_spark.types.ddl import parse_ddl

TIMED = "WATERMARK ts DELAY OF INTERVAL 5 SECONDS"
CLAUSE = "MATCH_RECOGNIZE (PARTITION BY user ORDER BY ts PATTERN (A B) DEFINE B AS amount > 1)"


def cut(text: str) -> list[tuple[str, str, int, str]]:
    _, found = cut_matches(text)
    return [(one.table, one.time_field, one.delay_ms, one.said.clauses["PATTERN"]) for one in found.values()]


PLAIN = f"SELECT * FROM orders {TIMED} {CLAUSE}"
TEXTS = {
    "plain": f"{PLAIN} AS t WHERE t.a > 1",
    "small letters": f"{PLAIN} as t".lower().replace("(a b)", "(A B)"),
    "no alias": PLAIN,
    "lines": f"SELECT *\nFROM\n  orders\n{TIMED}\n{CLAUSE}\nAS t".replace("BY user", "BY\nuser"),
    "a join": PLAIN.replace("FROM", "FROM towns JOIN") + " AS t ON a = b",
    "a second table": PLAIN.replace("FROM", "FROM towns,"),
    "quoted names": PLAIN.replace(" ts ", " `ts` ").replace("orders", "`orders`") + " AS `t`",
    "comments": f"SELECT * -- MATCH_RECOGNIZE (\nFROM orders /* ( /* ( */ FROM x */ {TIMED} -- ' (\n{CLAUSE}",
    "comments in it": PLAIN.replace(" DEFINE", "/* ) */ -- )\nDEFINE"),
    "words in texts": PLAIN.replace("*", "'MATCH_RECOGNIZE (', r'\\', \"FROM (\""),
    "texts in it": PLAIN.replace("amount > 1", "'it'') DEFINE (' = user"),
    "parentheses": f"SELECT * FROM ({PLAIN.replace('amount > 1', '((amount) > (1))')} AS t) AS u",
    "no space": PLAIN.replace(" (PARTITION", "(PARTITION") + "AS t",
    "an interval as text": PLAIN.replace("5 SECONDS", "'5 seconds'"),
    "a number as text": PLAIN.replace("5 SECONDS", "'5' SECOND"),
    "no ORDER BY": PLAIN.replace("ORDER BY ts ", ""),
    "letters and lines of others": PLAIN.replace("*", "'größe \U0001f642' AS a,\r\n  `日付`") + " AS t",
    "FROM first": f"FROM orders {TIMED} {CLAUSE} AS t SELECT a",
    "an insert": f"INSERT INTO match_recognize {PLAIN}",
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_clause_is_cut_out_and_all_else_keeps_its_place(case: str) -> None:
    text = TEXTS[case]
    left, found = cut_matches(text)
    assert cut(text) == [("orders", "ts", 5_000, "(A B)")]
    assert left.count("__matches_1") == 1
    (clause,) = found.values()
    part = clause.place
    assert len(left) == len(text)
    assert left[part.end :] == text[part.end :]
    begin = re.search(r"`?orders", text)
    assert begin is not None
    assert left[: begin.start()] == text[: begin.start()]
    assert left[begin.start() : part.end].split() == ["__matches_1"]
    assert [at for at, one in enumerate(text) if one == "\n"] == [
        at for at, one in enumerate(left) if one == "\n"
    ]


def test_a_text_without_a_clause_stays_as_it_is() -> None:
    for text in (
        "SELECT 1",
        "SELECT 'match_recognize (' -- MATCH_RECOGNIZE (",
        "SELECT match_recognize FROM t",
        "",
    ):
        assert cut_matches(text) == (text, {})


def test_each_clause_of_a_script_gets_a_name_of_its_own() -> None:
    first, second = (f"SELECT * FROM {name} {TIMED} {CLAUSE}" for name in "xy")
    text = f"INSERT INTO a {first};\nINSERT INTO b {second} AS t;"
    left, found = cut_matches(text)
    assert [*found] == ["__matches_1", "__matches_2"]
    assert [one.table for one in found.values()] == ["x", "y"]
    assert [" ".join(one.split()) for one in left.split(";")] == [
        "INSERT INTO a SELECT * FROM __matches_1",
        "INSERT INTO b SELECT * FROM __matches_2 AS t",
        "",
    ]


def wrong(old: str, new: str) -> str:
    return f"SELECT 1;\nSELECT *\n  FROM orders {TIMED}\n    {CLAUSE} AS t".replace(old, new)


REFUSED = {
    "no event time": (
        wrong(TIMED, ""),
        "MATCH_RECOGNIZE on line 4, column 5 cannot run. 'orders' has no event time, by which rows are in "
        "order. To do: write FROM orders WATERMARK column DELAY OF INTERVAL 10 SECONDS MATCH_RECOGNIZE (...) "
        "AS name.",
    ),
    "another order": (
        wrong("ORDER BY ts", "ORDER BY at"),
        "line 4, column 5 cannot run. It says ORDER BY at, and the event time of 'orders' is 'ts'. "
        "To do: write ORDER BY ts, or WATERMARK at.",
    ),
    "a month": (wrong("5 SECONDS", "1 MONTH"), "Its delay is '1 MONTH'. To do: write DELAY OF"),
    "a negative delay": (wrong("5 SECONDS", "-5 SECONDS"), "Its delay is '- 5 SECONDS'"),
    "an alias before": (
        wrong("orders", "orders AS o"),
        "'orders AS o WATERMARK ts DELAY OF INTERVAL 5 SECONDS'",
    ),
    "a table of a catalog": (wrong("orders", "db.orders"), "stands before it. To do: write FROM table"),
    "a query": (
        wrong(f"orders {TIMED}", "(SELECT * FROM orders)"),
        "a table, or a view of one, stands before",
    ),
    "a name of its WITH": (
        wrong("SELECT *", "WITH orders AS (SELECT 1) SELECT *"),
        "It reads 'orders', which the same query's WITH defines",
    ),
    "nothing": (wrong(f"FROM orders {TIMED}", ";"), "A table, or a view of one, stands before it"),
    "a column in its place": (wrong(f"orders {TIMED}", ""), "A table, or a view of one, stands before it"),
    "an open parenthesis": (wrong(") AS t", " AS t; SELECT 1"), "Its parenthesis is not closed"),
    "a backslash": (wrong("amount > 1", r"user = 'a\\b'"), "a backslash stands in it"),
    "an open quote": (wrong("amount > 1", "user = 'b"), "cannot be read. Missing ' from"),
    "an open comment": (wrong("AS t", "/* secret"), "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_out_is_refused_with_its_place(case: str) -> None:
    text, says = REFUSED[case]
    with pytest.raises(GraphError) as refused:
        cut_matches(text)
    assert says.lower() in str(refused.value).lower()
    assert "secret" not in str(refused.value)


WRONG_CLAUSES = {
    "no pattern": (wrong("PATTERN (A B) ", ""), "on line 4, column 5"),
    "the order of clauses": (
        wrong("PARTITION BY user ORDER BY ts", "ORDER BY ts PARTITION BY user"),
        "on line 4, column 5",
    ),
    "an order that falls": (wrong("ORDER BY ts", "ORDER BY ts DESC"), "'ts DESC' on line 4, column 49"),
}


@pytest.mark.parametrize("case", WRONG_CLAUSES)
def test_a_wrong_clause_is_refused_with_its_place(case: str) -> None:
    text, says = WRONG_CLAUSES[case]
    with pytest.raises(PatternError) as refused:
        cut_matches(text)
    assert says in str(refused.value)


WRONG_EXPRESSIONS = {
    "an unknown field": (wrong("amount > 1", "prize > 1"), "line 4, column 78"),
    "an unknown variable": (wrong("DEFINE B", "DEFINE C"), "line 4, column 78"),
    "a window": (wrong(" DEFINE", " WITHIN 5 DEFINE"), "'5' on line 4"),
}


@pytest.mark.parametrize("case", WRONG_EXPRESSIONS)
def test_a_wrong_expression_is_refused_with_its_place_once_the_fields_are_known(case: str) -> None:
    text, says = WRONG_EXPRESSIONS[case]
    (clause,) = cut_matches(text)[1].values()
    operator = RowPatterns(clause.said, ("user",), None, clause.place)
    with pytest.raises(PatternError) as refused:
        operator.find_output(parse_ddl("user STRING, amount LONG, ts TIMESTAMP"))
    assert says in str(refused.value)
