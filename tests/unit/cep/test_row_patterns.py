"""Row patterns of SQL: what is published about MATCH_RECOGNIZE as facts, and what is refused.

The facts are those of Trino's tests of row pattern matching: values of rows in their order, the clauses, and
what comes out. Where nothing else is said the rows are 90, 80, 70, 70.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flinkish_spark import OutputTag
from flinkish_spark.cep.expressions import (
    Aggregate,
    All,
    Classifier,
    Column,
    FunctionCall,
    IsNull,
    Literal,
    Navigation,
    any_of,
)
from flinkish_spark.cep.match_recognize import match_recognize
from flinkish_spark.cep.rows import (
    Concatenation,
    OneOf,
    Repetition,
    RowMatcher,
    RowPattern,
    RowSearch,
    RowsPerMatch,
    RowState,
    Variable,
)
from flinkish_spark.cep.stages import Skip
from flinkish_spark.cep.values import is_equal
from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.core.errors import ConfigError, GraphError, PatternError, SchemaError
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.types.ddl import parse_ddl
from tests.support.effort import examples

N = None
FALLING = (90, 80, 70, 70)
ALL = (
    "MEASURES MATCH_NUMBER() AS match, RUNNING LAST(value) AS val, CLASSIFIER() AS label ALL ROWS PER MATCH "
)
EMPTIES = [(1, 1, N, N), (2, 2, N, N), (3, 3, N, N), (4, 4, N, N)]
B_EACH = [(1, 1, N, N), (2, 2, 80, "B"), (3, 3, 70, "B"), (4, 4, 70, "B")]
B_ALL = [(1, 1, N, N), (2, 2, 80, "B"), (3, 2, 70, "B"), (4, 2, 70, "B")]
B_PLUS = [(2, 1, 80, "B"), (3, 1, 70, "B"), (4, 1, 70, "B")]
B_ONES = [(2, 1, 80, "B"), (3, 2, 70, "B"), (4, 3, 70, "B")]
NOT_RISING = " DEFINE B AS B.value <= PREV(B.value)"
DROPS = " DEFINE B AS B.value < PREV(B.value)"
LEVEL = " DEFINE B AS B.value < PREV(B.value), C AS C.value = PREV(C.value)"


def found(
    text: str, values: Any = FALLING, *, batches: int = 1, id_type: str = "LONG"
) -> list[tuple[Any, ...]]:
    """Return what comes out of rows, without the key; over several micro-batches with restarts in between."""

    def program(rows: Any) -> Any:
        return rows.key_by("key").match_recognize(text, uid="found")

    fields = f"key STRING, id {id_type}, value LONG"
    harness, rows = ProgramHarness(program, fields), []
    numbered = list(enumerate(values, 1))
    for number in range(batches):
        part = (
            numbered[number::1]
            if batches == 1
            else numbered[number::batches] and numbered[number : number + 1]
        )
        part = numbered if batches == 1 else part
        harness.push_all([(("k", at, value), at) for at, value in part])
        if batches > 1:
            harness.watermark(number + 1)
            rows += harness.take().rows
            harness = ProgramHarness(program, fields, restore=harness.snapshot())
    harness.end_of_input()
    return [tuple(row)[1:] for row in [*rows, *harness.take().rows]]


PATTERNS: list[tuple[str, list[Any]]] = [
    ("(() | A) DEFINE A AS true", EMPTIES),
    ("(^A) DEFINE A AS true", [(1, 1, 90, "A")]),
    ("(A^) DEFINE A AS true", []),
    ("(^A^) DEFINE A AS true", []),
    ("(A$) DEFINE A AS true", [(4, 1, 70, "A")]),
    ("($A) DEFINE A AS true", []),
    ("($A$) DEFINE A AS true", []),
    ("(A B C)" + LEVEL, [(2, 1, 80, "A"), (3, 1, 70, "B"), (4, 1, 70, "C")]),
    (
        "(B | C | A) DEFINE B AS B.value < PREV(B.value), C AS C.value <= PREV(C.value)",
        [(1, 1, 90, "A"), (2, 2, 80, "B"), (3, 3, 70, "B"), (4, 4, 70, "C")],
    ),
    (
        "(PERMUTE(B, C)) DEFINE B AS B.value < PREV(B.value), C AS C.value < PREV(C.value)",
        [(2, 1, 80, "B"), (3, 1, 70, "C")],
    ),
    ("(((A) (B (C))))" + LEVEL, [(2, 1, 80, "A"), (3, 1, 70, "B"), (4, 1, 70, "C")]),
    ("(B*)" + NOT_RISING, B_ALL),
    ("(B*?)" + NOT_RISING, EMPTIES),
    ("(B+)" + NOT_RISING, B_PLUS),
    ("(B+?)" + NOT_RISING, B_ONES),
    ("(B?)" + NOT_RISING, B_EACH),
    ("(B??)" + NOT_RISING, EMPTIES),
    ("(B{,})" + NOT_RISING, B_ALL),
    ("(B{,}?)" + NOT_RISING, EMPTIES),
    ("(B{1,})" + NOT_RISING, B_PLUS),
    ("(B{1,}?)" + NOT_RISING, B_ONES),
    ("(B{2,})" + NOT_RISING, B_PLUS),
    ("(B{2,}?)" + NOT_RISING, [(2, 1, 80, "B"), (3, 1, 70, "B")]),
    ("(B{5,})" + NOT_RISING, []),
    ("(B{5,}?)" + NOT_RISING, []),
    ("(B{,1})" + NOT_RISING, B_EACH),
    ("(B{,1}?)" + NOT_RISING, EMPTIES),
    ("(B{,2})" + NOT_RISING, [(1, 1, N, N), (2, 2, 80, "B"), (3, 2, 70, "B"), (4, 3, 70, "B")]),
    ("(B{,5})" + NOT_RISING, B_ALL),
    ("(B{1,1})" + NOT_RISING, B_ONES),
    ("(()* | B)" + DROPS, EMPTIES),
    ("(()+ | B)" + DROPS, EMPTIES),
    ("((){5,} | B)" + DROPS, EMPTIES),
    ("(B | ()*)" + DROPS, [(1, 1, N, N), (2, 2, 80, "B"), (3, 3, 70, "B"), (4, 4, N, N)]),
    ("((B ()*)*)" + DROPS, [(1, 1, N, N), (2, 2, 80, "B"), (3, 2, 70, "B"), (4, 3, N, N)]),
    ("((B ()*)*?)" + DROPS, EMPTIES),
    ("(^* | B)" + DROPS, EMPTIES),
    ("(^+ | B)" + DROPS, [(1, 1, N, N), (2, 2, 80, "B"), (3, 3, 70, "B")]),
    ("(^* A B)" + DROPS, [(1, 1, 90, "A"), (2, 1, 80, "B")]),
    ("($* | B)" + DROPS, EMPTIES),
    ("($+ | B)" + DROPS, [(2, 1, 80, "B"), (3, 2, 70, "B")]),
    ("(B A $+)" + DROPS, [(3, 1, 70, "B"), (4, 1, 70, "A")]),
    ("(A {- B -} C)" + LEVEL, [(2, 1, 80, "A"), (4, 1, 70, "C")]),
]


@pytest.mark.parametrize(("pattern", "rows"), PATTERNS, ids=lambda one: one if isinstance(one, str) else "")
def test_a_row_pattern_finds_what_is_published(pattern: str, rows: list[Any]) -> None:
    without_value = [(row[0], *row[2:]) for row in found(f"{ALL} PATTERN {pattern}")]
    assert without_value == rows


@pytest.mark.parametrize(
    ("pattern", "rows"), PATTERNS[::3], ids=lambda one: one if isinstance(one, str) else ""
)
def test_it_finds_the_same_row_by_row_with_restarts(pattern: str, rows: list[Any]) -> None:
    assert [(row[0], *row[2:]) for row in found(f"{ALL} PATTERN {pattern}", batches=4)] == rows


MODES = "MEASURES MATCH_NUMBER() AS match, RUNNING LAST(value) AS val, CLASSIFIER() AS label "


@pytest.mark.parametrize(
    ("mode", "pattern", "rows"),
    [
        ("ONE ROW PER MATCH", "(B*)", [(1, N, N), (2, 70, "B"), (3, N, N)]),
        ("", "(B*)", [(1, N, N), (2, 70, "B"), (3, N, N)]),
        ("ONE ROW PER MATCH", "(B+)", [(1, 70, "B")]),
        ("ALL ROWS PER MATCH", "(B*)", [(1, N, N), (2, 80, "B"), (2, 70, "B"), (3, N, N)]),
        ("ALL ROWS PER MATCH", "(B+)", [(1, 80, "B"), (1, 70, "B")]),
        ("ALL ROWS PER MATCH SHOW EMPTY MATCHES", "(B*)", [(1, N, N), (2, 80, "B"), (2, 70, "B"), (3, N, N)]),
        ("ALL ROWS PER MATCH OMIT EMPTY MATCHES", "(B*)", [(2, 80, "B"), (2, 70, "B")]),
        ("ALL ROWS PER MATCH OMIT EMPTY MATCHES", "(B+)", [(1, 80, "B"), (1, 70, "B")]),
        (
            "ALL ROWS PER MATCH WITH UNMATCHED ROWS",
            "(B+)",
            [(N, N, N), (1, 80, "B"), (1, 70, "B"), (N, N, N)],
        ),
    ],
)
def test_what_is_told_of_a_match(mode: str, pattern: str, rows: list[Any]) -> None:
    out = found(f"{MODES} {mode} PATTERN {pattern} {DROPS}")
    assert [row[-3:] for row in out] == rows


SKIPPING = (
    "PATTERN (A B+ C+ D?) SUBSET U = (C, D) "
    "DEFINE B AS B.value < PREV(B.value), C AS C.value > PREV(C.value), D AS false"
)
FIRST = [(1, 1, 90, "A"), (2, 1, 80, "B"), (3, 1, 70, "B"), (4, 1, 80, "C")]
AT_FOUR = [(4, 2, 80, "A"), (5, 2, 70, "B"), (6, 2, 80, "C")]


@pytest.mark.parametrize(
    ("skip", "rows"),
    [
        ("PAST LAST ROW", FIRST),
        (
            "TO NEXT ROW",
            [
                *FIRST,
                (2, 2, 80, "A"),
                (3, 2, 70, "B"),
                (4, 2, 80, "C"),
                (4, 3, 80, "A"),
                (5, 3, 70, "B"),
                (6, 3, 80, "C"),
            ],
        ),
        ("TO FIRST C", [*FIRST, *AT_FOUR]),
        ("TO LAST B", [*FIRST, *AT_FOUR]),
        ("TO B", [*FIRST, *AT_FOUR]),
        ("TO U", [*FIRST, *AT_FOUR]),
    ],
)
def test_where_the_search_goes_on(skip: str, rows: list[Any]) -> None:
    out = found(f"{ALL} AFTER MATCH SKIP {skip} {SKIPPING}", (90, 80, 70, 80, 70, 80))
    assert [(row[0], *row[2:]) for row in out] == rows


@pytest.mark.parametrize(("skip", "why"), [("TO A", "it would be found again"), ("TO D", "has no such row")])
def test_a_skip_that_leads_nowhere_stops_the_job(skip: str, why: str) -> None:
    with pytest.raises(PatternError, match=why):
        found(f"{ALL} AFTER MATCH SKIP {skip} {SKIPPING}", (90, 80, 70, 80, 70, 80))


def test_rows_in_an_overlapping_match_are_not_unmatched() -> None:
    text = (
        "MEASURES MATCH_NUMBER() AS match, CLASSIFIER() AS label ALL ROWS PER MATCH WITH UNMATCHED ROWS "
        "AFTER MATCH SKIP TO NEXT ROW PATTERN (A B{2}) DEFINE B AS B.value < PREV (B.value)"
    )
    assert [(row[0], row[2], row[3]) for row in found(text, (100, 100, 90, 80, 70, 100))] == [
        (1, N, N), (2, 1, "A"), (3, 1, "B"), (4, 1, "B"), (3, 2, "A"), (4, 2, "B"), (5, 2, "B"), (6, N, N),
    ]  # fmt: skip


def test_unions_of_variables() -> None:
    text = (
        "MEASURES MATCH_NUMBER() AS match, CLASSIFIER(U) AS lower_or_higher, CLASSIFIER(W) AS label "
        "ALL ROWS PER MATCH PATTERN ((L | H) A) SUBSET U = (L, H), W = (A, L, H) "
        "DEFINE A AS A.value = 80, L AS L.value < 80, H AS H.value > 80"
    )
    assert [(row[0], *row[2:]) for row in found(text, (90, 80, 70, 80))] == [
        (1, 1, "H", "H"), (2, 1, "H", "A"), (3, 2, "L", "L"), (4, 2, "L", "A"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("measure", "values"),
    [
        ("value", [10, 20, 30]),
        ("LAST(value)", [10, 20, 30]),
        ("RUNNING LAST(value)", [10, 20, 30]),
        ("FINAL LAST(value)", [30, 30, 30]),
        ("FIRST(value)", [10, 10, 10]),
        ("RUNNING FIRST(value)", [10, 10, 10]),
        ("FINAL FIRST(value)", [10, 10, 10]),
        ("FINAL LAST(value, 2)", [10, 10, 10]),
        ("FIRST(value, 2)", [30, 30, 30]),
        ("LAST(value, 10)", [N, N, N]),
        ("FIRST(value, 10)", [N, N, N]),
        ("PREV(value)", [N, 10, 20]),
        ("NEXT(value)", [20, 30, N]),
        ("NEXT(FIRST(value), 2)", [30, 30, 30]),
        ("NEXT(FIRST(value), 10)", [N, N, N]),
        ("PREV(FIRST(value), 10)", [N, N, N]),
        ("PREV(FIRST(value, 10), 2)", [N, N, N]),
        ("PREV(LAST(value, 10), 2)", [N, N, N]),
        ("COUNT(*)", [1, 2, 3]),
        ("FINAL COUNT(A.*)", [3, 3, 3]),
        ("SUM(value)", [10, 30, 60]),
        ("AVG(A.value)", [10.0, 15.0, 20.0]),
        ("FINAL MAX(value) - MIN(value)", [20, 20, 20]),
        ("CASE WHEN value > 10 THEN value * 2 ELSE -value END", [-10, 40, 60]),
        ("COALESCE(PREV(value), 0) + value", [10, 30, 50]),
        ("value BETWEEN 20 AND 30 AND value NOT IN (30)", [False, True, False]),
        ("NULLIF(value, 10)", PatternError),
        ("CAST(value AS VARCHAR) || '!'", ["10!", "20!", "30!"]),
        ("value / 4", [2.5, 5.0, 7.5]),
        ("value % 20 IS NULL OR value % 20 = 0", [False, True, False]),
    ],
)
def test_measures_and_navigation(measure: str, values: Any) -> None:
    text = f"MEASURES {measure} AS measure ALL ROWS PER MATCH PATTERN (A+)"
    if values is PatternError:
        with pytest.raises(PatternError, match="not known here"):
            found(text, (10, 20, 30))
    else:
        assert [row[-1] for row in found(text, (10, 20, 30))] == values


@pytest.mark.parametrize(
    ("measure", "value"),
    [
        ("PREV(B.value, 4)", N),
        ("PREV(B.value, 3)", 10),
        ("PREV(B.value, 2)", 20),
        ("NEXT(B.value, 1)", 40),
        ("NEXT(B.value, 2)", N),
    ],
)
def test_rows_outside_of_the_match_are_seen(measure: str, value: Any) -> None:
    text = f"MEASURES {measure} AS measure PATTERN (A B) DEFINE B AS B.value = PREV(B.value)"
    assert found(text, (10, 20, 30, 30, 40)) == found(text, (10, 20, 30, 30, 40), batches=5) == [(value,)]


def test_classifiers_of_rows_to_come() -> None:
    text = "MEASURES CLASSIFIER() AS label, NEXT(CLASSIFIER()) AS next ALL ROWS PER MATCH PATTERN (A B+ C+) "
    text += "DEFINE B AS B.value < PREV(B.value), C AS C.value > PREV(C.value)"
    assert [row[-2:] for row in found(text, (90, 80, 70, 80))] == [
        ("A", "B"),
        ("B", "B"),
        ("B", "C"),
        ("C", N),
    ]
    none = "MEASURES value AS v ALL ROWS PER MATCH PATTERN (A+) DEFINE A AS NEXT(CLASSIFIER()) = 'A'"
    assert found(none, (90, 80, 70, 80)) == []


def test_conditions_look_at_what_was_matched() -> None:
    condition = "PREV(CLASSIFIER(U), 1) = 'A' AND LAST(CLASSIFIER(), 3) = 'B' AND FIRST(CLASSIFIER(U)) = 'B'"
    text = (
        f"MEASURES CLASSIFIER() AS classy, {condition} AS condition ALL ROWS PER MATCH "
        f"PATTERN ((A | B)* X $) SUBSET U = (A, B) DEFINE X AS {condition}"
    )
    assert [row[-2:] for row in found(text, (1, 2, 3, 4, 5))] == [
        ("B", N), ("B", False), ("A", False), ("A", True), ("X", True),
    ]  # fmt: skip
    total = "PREV(LAST(A.value), 3) + FIRST(A.value) + PREV(LAST(B.value), 2)"
    text = f"MEASURES CLASSIFIER() AS classy, {total} AS x ALL ROWS PER MATCH PATTERN ((A | B)* X) "
    text += f"DEFINE X AS value = {total}"
    assert [row[-2:] for row in found(text, (1, 2, 3, 4, 5, 6))] == [
        ("B", N), ("A", N), ("A", N), ("A", N), ("B", 6), ("X", 6),
    ]  # fmt: skip


def test_quoted_variables_keep_their_case() -> None:
    text = 'MEASURES CLASSIFIER() AS label ALL ROWS PER MATCH PATTERN (a "b"+ C+) '
    text += 'DEFINE "b" AS "b".value < PREV("b".value), C AS C.value > PREV(C.value)'
    assert [row[-1] for row in found(text, (90, 80, 70, 80))] == ["A", "b", "b", "C"]


# -- beside regular expressions ----------------------------------------------------------------------------

#: Variables as sets of values: rows are letters, and a variable is some of them.
LETTERS = {"A": "ab", "B": "bc", "C": "c", "D": "abc"}
DEFINED = {
    name: any_of(tuple(FunctionCall(is_equal, (Column(0), Literal(letter))) for letter in own))
    for name, own in LETTERS.items()
}


@st.composite
def expressions(draw: Any, depth: int = 0) -> tuple[RowPattern, str]:
    """A row pattern, and the regular expression of Python's that means the same."""
    kind = draw(st.sampled_from(["row", "row", "order", "choice", "repeated"] if depth < 3 else ["row"]))
    if kind == "row":
        name = draw(st.sampled_from(sorted(LETTERS)))
        return Variable(name), f"[{LETTERS[name]}]"
    if kind == "repeated":
        of, text = draw(expressions(depth + 1))
        least = draw(st.integers(0, 2))
        most = draw(st.none() | st.integers(max(least, 1), 3))
        # A round without a row is the last in SQL, as soon as there are enough; in `re` only behind these.
        assume(least in (0, most) or re.fullmatch(text, "") is None)
        is_greedy = draw(st.booleans())
        bounds = f"{{{least},{'' if most is None else most}}}"
        return Repetition(of, least, most, is_greedy), f"(?:{text}){bounds}{'' if is_greedy else '?'}"
    parts = draw(st.lists(expressions(depth + 1), min_size=1, max_size=3))
    if kind == "order":
        return Concatenation(tuple(one for one, _ in parts)), "".join(text for _, text in parts)
    return OneOf(tuple(one for one, _ in parts)), f"(?:{'|'.join(text for _, text in parts)})"


@settings(max_examples=examples(2_000))
@given(expressions(), st.text("abcx", max_size=9), st.integers(1, 3))
def test_preferred_matches_are_those_of_regular_expressions(
    drawn: tuple[RowPattern, str], letters: str, size: int
) -> None:
    pattern, text = drawn
    search = RowSearch(pattern, DEFINED, (("rows", Aggregate(None)),))
    wanted, at = [], 0
    while at < len(letters):
        match = re.compile(text).match(letters, at)
        if match is not None:
            wanted.append((at, match.end() - at))
        at = at + 1 if match is None or match.end() == at else match.end()
    matcher, state, found = RowMatcher(search), RowState(), []
    for begin in range(0, len(letters), size):
        part = letters[begin : begin + size]
        state.rows += [(letter,) for letter in part]
        state.times_ms += range(begin, begin + len(part))
        found += matcher.run(state, begin + len(part) - 1)
        state.forget(matcher.count_unneeded(state))
    found += matcher.run(state, MAX_WATERMARK_MS)
    assert [(told.first_ms, told.values[0]) for told in found] == wanted


def ways(pattern: RowPattern, letters: str) -> Iterator[tuple[str, ...]]:
    """Yield the variables of all matches at the beginning of a text, in the order of the standard."""
    match pattern:
        case Variable(name):
            if letters[:1] and letters[0] in LETTERS[name]:
                yield (name,)
        case Concatenation(parts):
            if not parts:
                yield ()
                return
            for first in ways(parts[0], letters):
                for others in ways(Concatenation(parts[1:]), letters[len(first) :]):
                    yield first + others
        case OneOf(options):
            for one in options:
                yield from ways(one, letters)
        case Repetition():
            yield from rounds(pattern, letters, 0)


def rounds(loop: Repetition, letters: str, done: int) -> Iterator[tuple[str, ...]]:
    has_enough = done >= loop.least
    if has_enough and not loop.is_greedy:
        yield ()
    if loop.most is None or done < loop.most:
        for one in ways(loop.of, letters):
            if not one and done + 1 >= loop.least:
                yield ()
                continue
            for others in rounds(loop, letters[len(one) :], done + 1):
                yield one + others
    if has_enough and loop.is_greedy:
        yield ()


@st.composite
def loops(draw: Any, depth: int = 0) -> RowPattern:
    """A row pattern, most often with loops whose rounds may have no row."""
    kind = draw(st.sampled_from(["row", "order", "choice", "loop", "loop"] if depth < 3 else ["row"]))
    if kind == "row":
        return Variable(draw(st.sampled_from(sorted(LETTERS))))
    if kind == "loop":
        least, most = draw(st.sampled_from([(0, None), (0, 1), (0, 2), (1, None), (1, 2), (2, 3), (2, 2)]))
        return Repetition(draw(loops(depth + 1)), least, most, draw(st.booleans()))
    parts = tuple(draw(st.lists(loops(depth + 1), min_size=0 if kind == "order" else 1, max_size=3)))
    return Concatenation(parts) if kind == "order" else OneOf(parts)


@settings(max_examples=examples(2_000))
@given(loops(), st.text("abc", max_size=5), st.booleans())
def test_preferred_matches_are_the_first_of_all_in_the_order_of_the_standard(
    pattern: RowPattern, letters: str, is_local: bool
) -> None:
    defined = DEFINED
    if not is_local:
        # The same, said of a row before as well.
        before = IsNull(Navigation(Literal(None), rows=-1))
        defined = {name: All((before, own)) for name, own in DEFINED.items()}
    search = RowSearch(
        pattern, defined, (("v", Classifier()),), RowsPerMatch.ALL_ROWS_OMIT_EMPTY, Skip.TO_NEXT
    )
    wanted = [(at, label) for at in range(len(letters)) for label in next(ways(pattern, letters[at:]), ())]
    state = RowState([(letter,) for letter in letters], list(range(len(letters))))
    told = RowMatcher(search).run(state, MAX_WATERMARK_MS)
    assert [(one.first_ms, one.values[0]) for one in told] == wanted


@pytest.mark.parametrize(
    ("pattern", "letters", "labels"),
    [
        ("((A??)* B)", "bc", "B"),
        ("((A*?)*)", "a", ""),
        ("((A*)*)", "aaa", "AAA"),
        ("((A | ())+)", "ab", "AA"),
        ("((() | A)+)", "a", ""),
        ("((() | A){2} C)", "ac", "AC"),
        ("((A?){2,3})", "aa", "AA"),
        ("((A??){2,3})", "a", ""),
        ("((() | A B | A)* C)", "acabc", "ABABC"),
        ("((() | A B | A){0,2} C)", "acabc", "ABABC"),
        ("((() | A B | A){1,2} C)", "acabc", "ABABC"),
        ("((() | A B | A){2} C)", "acabc", "AC"),
    ],
)
def test_a_round_without_a_row_is_the_last(pattern: str, letters: str, labels: str) -> None:
    """ISO/IEC 19075-5, 7.2.8: as in Perl, as soon as there are enough rounds."""
    text = f"MEASURES CLASSIFIER() AS v ALL ROWS PER MATCH OMIT EMPTY MATCHES PATTERN {pattern} "
    defined = {"A": "v IN ('a', 'b')", "B": "v IN ('b', 'c')", "C": "v = 'c'"}
    text += "DEFINE " + ", ".join(f"{name} AS {made}" for name, made in defined.items() if name in pattern)
    search, _ = match_recognize(text).search(parse_ddl("v STRING"))
    state = RowState([(letter,) for letter in letters], list(range(len(letters))))
    told = RowMatcher(search).run(state, MAX_WATERMARK_MS)
    assert "".join(one.values[0] for one in told if one.first_ms == 0) == labels


# -- what a stream adds ------------------------------------------------------------------------------------


def test_a_match_is_told_when_no_better_one_can_come() -> None:
    def program(rows: Any) -> Any:
        return rows.match_recognize(
            "PARTITION BY key ORDER BY at MEASURES FIRST(A.v) AS first, LAST(B.v) AS last PATTERN (A B+) "
            "WITHIN INTERVAL '10' SECOND DEFINE B AS v > A.v",
            uid="rising",
            late_output=LATE,
        )

    harness = ProgramHarness(program, FIELDS, side_outputs=[LATE])
    harness.push_all([(("k", 1, 0), 0), (("k", 2, 1_000), 1_000), (("k", 3, 2_000), 2_000), (("l", 5, 0), 0)])
    harness.watermark(9_999)
    # One more row could belong to it.
    assert harness.take().rows == []
    harness.push_all([(("k", 9, 5_000), 5_000)])
    harness.watermark(10_000)
    out = harness.take()
    assert out.rows == [("k", 1, 3)] and out.times_ms == [2_000]
    assert [row.v for row in out.side["late"]] == [9] and out.counts["matches"] == 1
    # Of a key without rows nothing is kept.
    assert not any(harness.entries(name) for name in ("rows/kept", "rows/place", "rows/waiting"))
    assert harness.timer_count() == 0


FIELDS = "key STRING, v LONG, at LONG"
LATE = OutputTag("late", FIELDS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("MEASURES value AS v", "It has no PATTERN"),
        ("hello", "does not begin with a clause"),
        ("DEFINE A AS true PATTERN (A)", "stands after a later clause"),
        ("PATTERN A", "in parentheses"),
        ("PATTERN ()", "no variable"),
        ("PATTERN (A | ", "parentheses"),
        ("PATTERN (A +* )", "stands where it cannot"),
        ("PATTERN (A{3,2})", "ends before it begins"),
        ("PATTERN (A{0})", "or is none"),
        ("PATTERN (A{20000})", "more than 10000 states"),
        ("PATTERN (A) DEFINE B AS true", "no variable of the PATTERN"),
        ("PATTERN (A) DEFINE A AS value", "is a bigint"),
        ("PATTERN (A) DEFINE A AS value = 'x'", "have no type in common"),
        ("PATTERN (A) DEFINE A AS nothing > 1", "There is no field nothing"),
        ("PATTERN (A) DEFINE A AS C.value > 1", "no variable of the PATTERN, and no SUBSET"),
        ("PATTERN (A) DEFINE A AS FINAL LAST(value) > 1", "sees the rows up to its own"),
        ("PATTERN (A) DEFINE A AS rank() > 1", "not known here"),
        ("PATTERN (A B) DEFINE B AS PREV(A.value + B.value) > 1", "of one variable's row"),
        ("PATTERN (A B) DEFINE B AS SUM(A.value + B.value) > 1", "the rows of one variable"),
        ("PATTERN (A) DEFINE A AS PREV(value, -1) > 1", "whole number"),
        ("PATTERN (A) SUBSET U = ()", "A union is written"),
        ("MEASURES value PATTERN (A)", "It has no name"),
        ("AFTER MATCH SKIP PAST FIRST ROW PATTERN (A)", "no way to skip"),
        ("AFTER MATCH SKIP TO LAST Z PATTERN (A)", "no variable of the PATTERN"),
        ("ALL ROWS PER MATCH SOMEHOW PATTERN (A)", "none of ONE ROW"),
        ("PATTERN (A) WITHIN 5", "no span of time"),
        ("PATTERN (A) DEFINE A AS value >", "correct the expression"),
    ],
)
def test_what_cannot_be_is_refused_with_its_text(text: str, why: str) -> None:
    with pytest.raises(PatternError, match=why):
        found(text)


def test_without_a_partition_all_rows_are_of_one() -> None:
    text = "MEASURES A.v AS first, B.v AS last PATTERN (A B)"
    harness = ProgramHarness(lambda rows: rows.match_recognize(text, uid="m"), FIELDS, parallelism=3)
    harness.push_all([(("k", 1, 0), 0), (("l", 2, 1), 1)])
    harness.watermark(1)
    assert harness.take().rows == [(1, 2)]


def test_keys_and_times_are_those_of_the_stream() -> None:
    def keyed(text: str) -> Any:
        return lambda rows: rows.key_by("key").match_recognize(text, uid="m")

    with pytest.raises(GraphError, match="is partitioned by value"):
        ProgramHarness(keyed("PARTITION BY value PATTERN (A)"), FIELDS.replace("v LONG", "value LONG"))
    with pytest.raises(SchemaError, match="cannot be the time"):
        ProgramHarness(keyed("ORDER BY key PATTERN (A)"), FIELDS)
    with pytest.raises(PatternError, match="in the order of their time"):
        ProgramHarness(keyed("ORDER BY at DESC PATTERN (A)"), FIELDS)
    with pytest.raises(ConfigError, match="clauses as text"):
        ProgramHarness(keyed(None), FIELDS)  # type: ignore[arg-type]
