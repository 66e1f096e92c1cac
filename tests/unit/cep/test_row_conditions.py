"""Conditions of row patterns over columns: what each row would answer alone, or nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.cep import row_conditions
from flinkish_spark.cep.expressions import Frame
from flinkish_spark.cep.match_recognize import match_recognize
from flinkish_spark.cep.row_conditions import answer_conditions
from flinkish_spark.cep.rows import RowMatcher, RowSearch
from flinkish_spark.core.errors import PatternError
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.to_python import to_values
from tests.support.effort import examples
from tests.support.row_expressions import EXPRESSIONS, FIELDS, ROWS, record_batch


def search_of(condition: str, pattern: str = "(A+)", fields: str = FIELDS) -> RowSearch:
    return match_recognize(f"PATTERN {pattern} DEFINE A AS {condition}").search(parse_ddl(fields))[0]


def over_columns(search: RowSearch, rows: list[Any], begins: list[int]) -> Any:
    columns = record_batch(rows).columns
    return answer_conditions(search, columns, np.array(begins)).get("A")


def row_by_row(search: RowSearch, rows: list[Any], begins: list[int]) -> list[Any]:
    """Return the answers of each row; what it is refused with in the place of one."""
    own = list(zip(*map(to_values, record_batch(rows).columns), strict=True))
    found: list[Any] = []
    for begin, end in zip(begins, [*begins[1:], len(rows)], strict=True):
        for at in range(end - begin):
            frame = Frame(own[begin:end], at, ["A"], 1, 1, is_ended=True)
            try:
                found.append(search.defined["A"].value(frame, None) is True)
            except PatternError as refused:
                found.append(refused)
    return found


def conditions() -> list[str]:
    """Conditions of all expressions: whether they are something, and the other way round."""
    found = []
    for text in EXPRESSIONS:
        for asked in (text, f"({text}) IS NULL", f"({text}) = ({text})", f"({text}) < PREV({text})"):
            try:
                search_of(asked)
            except PatternError:
                continue
            found.append(asked)
    return found


CONDITIONS = conditions()


def test_what_is_answered_is_what_each_row_answers_alone() -> None:
    known, refused = 0, 0
    for text in CONDITIONS:
        search, begins = search_of(text), [0, 3, 4]
        found, alone = over_columns(search, ROWS, begins), row_by_row(search, ROWS, begins)
        if any(isinstance(one, PatternError) for one in alone):
            # One row would be refused, if anybody asked about it.
            assert found is None, text
            refused += 1
        elif found is not None:
            known += 1
            for at, (one, other) in enumerate(zip(found, alone, strict=True)):
                assert one == other or (one is None and "PREV" in text and at in begins), (text, at)
            assert None not in found or "PREV" in text, text
    assert known > 250 and refused > 30, (known, refused, len(CONDITIONS))


@settings(max_examples=examples(400))
@given(st.data())
def test_any_rows_and_any_keys(data: Any) -> None:
    text = data.draw(st.sampled_from(CONDITIONS))
    rows = data.draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=8))
    begins = sorted({0} | data.draw(st.sets(st.integers(0, len(rows) - 1))))
    search = search_of(text)
    found, alone = over_columns(search, rows, begins), row_by_row(search, rows, begins)
    if found is None:
        return
    assert not any(isinstance(one, PatternError) for one in alone)
    assert all(one is None or one == other for one, other in zip(found, alone, strict=True)), text


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("i > PREV(i)", [None, True, None, True, False]),
        ("A.i > PREV(A.i, 2)", [None, None, None, None, False]),
        ("PREV(i) IS NULL", [None, False, None, False, False]),
        ("LAST(i) > 2", [False, True, True, True, False]),
        ("i > FIRST(i)", None),
        ("i > NEXT(i)", None),
        ("i > LAST(i, 1)", None),
        ("COUNT(*) > 1", None),
        ("CLASSIFIER() = 'A'", None),
        ("true", None),
        ("p > q", None),
    ],
)
def test_what_looks_further_is_left_to_the_matcher(text: str, answers: Any) -> None:
    fields = parse_ddl(FIELDS).names
    rows = [tuple({"i": i}.get(name) for name in fields) for i in (1, 3, 4, 6, 2)]
    assert over_columns(search_of(text), rows, [0, 2]) == answers


@pytest.mark.parametrize(
    ("pattern", "first"),
    [
        ("(A B)", "A"),
        ("(A | B)", "AB"),
        ("(B? A)", "AB"),
        ("(A*)", ""),
        ("(^ A)", "A"),
        ("({- A -} B)", "A"),
        ("((A? B?){2,3} A)", "AB"),
        # Any row may be the first; whether one is C is known in a match alone.
        ("(D A)", ""),
        ("(C A)", ""),
    ],
)
def test_what_the_first_row_has_to_be(pattern: str, first: str) -> None:
    text = f"PATTERN {pattern} DEFINE A AS i > 1"
    text += ", B AS i < PREV(i)" * ("B" in pattern) + ", C AS COUNT(*) > 1" * ("C" in pattern)
    matcher = RowMatcher(match_recognize(text).search(parse_ddl(FIELDS))[0])
    assert "".join(sorted(matcher._first)) == first


ROW_FIELDS = "key STRING, v LONG, w LONG"
TEXTS = [
    "MEASURES FIRST(v) AS a, LAST(v) AS b PATTERN (A B+ C?) DEFINE A AS v > 2, B AS v > PREV(v), C AS v < 2",
    "MEASURES CLASSIFIER() AS c, LAST(v) AS b ALL ROWS PER MATCH WITH UNMATCHED ROWS "
    "PATTERN ((A | B) C*) DEFINE A AS v = 1, B AS v < PREV(v, 2), C AS v >= PREV(v) AND v > FIRST(v)",
    "MEASURES COUNT(*) AS n AFTER MATCH SKIP TO NEXT ROW PATTERN (A B{1,2}?) WITHIN INTERVAL '4' MILLISECOND "
    "DEFINE A AS w <> 0 AND v / w > 1, B AS v < NEXT(v)",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(6))
def test_a_row_pattern_finds_the_same_without_columns(text: str, seed: int, monkeypatch: Any) -> None:
    chance = random.Random(seed)
    batches = [
        [
            ((chance.choice("xy"), chance.randint(0, 4), chance.randint(0, 3)), at * 3 + one)
            for one in range(3)
        ]
        for at in range(8)
    ]

    def run() -> list[Any]:
        def program(rows: Any) -> Any:
            return rows.key_by("key").match_recognize(text, uid="found")

        harness, rows = ProgramHarness(program, ROW_FIELDS), []
        for number, batch in enumerate(batches):
            harness.push_all(batch)
            harness.watermark(number * 3 + chance.randint(-2, 2))
            if chance.random() < 0.3:
                rows += harness.take().rows
                harness = ProgramHarness(program, ROW_FIELDS, restore=harness.snapshot())
        harness.end_of_input()
        return [*rows, *harness.take().rows]

    seeded = chance.getstate()
    with_columns = run()
    chance.setstate(seeded)
    monkeypatch.setattr("flinkish_spark.cep.row_operator.answer_conditions", lambda *_: {})
    assert run() == with_columns


def test_a_row_that_is_never_tried_is_never_refused() -> None:
    def program(rows: Any) -> Any:
        text = "MEASURES LAST(v) AS v PATTERN (A B) DEFINE A AS v > 1, B AS 10 / w > 1"
        return rows.key_by("key").match_recognize(text, uid="found")

    harness = ProgramHarness(program, ROW_FIELDS)
    harness.push_all([(("x", v, w), at) for at, (v, w) in enumerate([(0, 0), (2, 1), (3, 2), (0, 0)])])
    harness.watermark(3)
    assert [row.v for row in harness.take().rows] == [3]
    harness.push_all([(("x", v, w), at) for at, (v, w) in enumerate([(2, 1), (3, 0)], 4)])
    with pytest.raises(PatternError, match="divided by zero"):
        harness.end_of_input()


def test_without_rows_nothing_is_answered() -> None:
    nothing = [pa.nulls(0, field.type) for field in record_batch([]).schema]
    assert answer_conditions(search_of("i > 1"), nothing, np.empty(0, dtype=np.int64)) == {}
    assert row_conditions.answer_conditions(search_of("i > 1"), (), np.empty(0, dtype=np.int64)) == {}
