"""MATCH_RECOGNIZE in the FROM of a query in Spark's SQL: cut out, with a name in its place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NoReturn

from flinkish_spark.cep.match_recognize import MatchRecognize, match_recognize
from flinkish_spark.cep.sql_text import Token, tokenize_spark
from flinkish_spark.core.errors import GraphError, PatternError
from flinkish_spark.protocol.durations import milliseconds
from flinkish_spark.protocol.limits import UnusableValueError

_FORM = "FROM table WATERMARK column DELAY OF INTERVAL 10 SECONDS MATCH_RECOGNIZE (...) AS name"


@dataclass(frozen=True)
class TextPart:
    """A part of a longer text, whose places are counted from the beginning of the whole."""

    whole: str = field(repr=False)
    begin: int
    end: int

    def __str__(self) -> str:
        return self.whole[self.begin : self.end]

    def locate(self, inside: str = "") -> str:
        at = max(self.whole.find(inside, self.begin, self.end), self.begin)
        before = self.whole[:at].split("\n")
        return f"line {len(before)}, column {len(before[-1]) + 1}"

    def refuse(self, why: str, what_to_do: str) -> NoReturn:
        raise GraphError(f"MATCH_RECOGNIZE on {self.locate()} cannot run", why=why, what_to_do=what_to_do)


@dataclass(frozen=True)
class MatchClause:
    """A MATCH_RECOGNIZE in FROM: what it reads, and by which event time."""

    place: TextPart
    #: In lower case.
    table: str
    time_field: str
    delay_ms: int
    said: MatchRecognize


@contextmanager
def name_place(place: TextPart | None) -> Iterator[None]:
    """Add line and column to what is wrong in a MATCH_RECOGNIZE of a query."""
    try:
        yield
    except PatternError as error:
        if place is None:
            raise
        where = place.locate(str(error.facts.get("text", "")))
        raise PatternError(f"{error.what} on {where}", why=error.why, what_to_do=error.what_to_do) from None


def cut_matches(text: str) -> tuple[str, Mapping[str, MatchClause]]:
    """Return a text with a view's name for each MATCH_RECOGNIZE, and the clauses by these names.

    All else stays on its line and column.
    """
    found = dict[str, MatchClause]()
    if "match_recognize" not in text.lower():
        return text, found
    tokens, parts, end = tokenize_spark(text), list[str](), 0
    for at, (token, opened) in enumerate(pairwise(tokens)):
        if (token.word, opened.word) != ("MATCH_RECOGNIZE", "("):
            continue
        place = TextPart(text, token.begin, _find_end(text, tokens, at))
        before = _find_table(tokens[:at], place)
        _refuse_own_name(tokens[:at], before[0], place)
        # The word is longer than the name, so everything behind keeps its column.
        name = f"__matches_{len(found) + 1}"
        blank = re.sub(r"[^\n]", " ", text[before[0].begin : place.end])
        inside = token.begin - before[0].begin
        parts += [text[end : before[0].begin], blank[:inside], name, blank[inside + len(name) :]]
        found[name], end = _read_clause(before, place), place.end
    return "".join([*parts, text[end:]]), found


def _find_end(text: str, tokens: Sequence[Token], at: int) -> int:
    depth = 0
    for token in tokens[at + 1 :]:
        depth += {"(": 1, ")": -1}.get(token.word, 0)
        if token.word == ";":
            break
        if not depth:
            return token.end
    TextPart(text, tokens[at].begin, len(text)).refuse("its parenthesis is not closed", "close it")


def _find_table(before: Sequence[Token], place: TextPart) -> Sequence[Token]:
    """Return the tokens between FROM and the clause: a table, and its watermark."""
    begins = (
        at for at in range(len(before), 0, -1) if before[at - 1].word in ("FROM", "JOIN", ",", ")", ";")
    )
    begin = next(begins, 0)
    if begin == len(before) or not begin or before[begin - 1].word in (")", ";"):
        place.refuse(
            "a table, or a view of one, stands before it",
            f"name what it reads, by CREATE TEMPORARY VIEW name AS ... in a script, and write {_FORM}",
        )
    return before[begin:]


def _refuse_own_name(before: Sequence[Token], table: Token, place: TextPart) -> None:
    """Refuse a name that the query's own WITH defines: the clause is searched before the query runs."""
    begin = max((at for at, one in enumerate(before) if one.word == ";"), default=0)
    for name, after, opened in zip(before[begin:], before[begin + 1 :], before[begin + 2 :], strict=False):
        if (after.word, opened.word) == ("AS", "(") and name.text.lower() == table.text.lower():
            place.refuse(
                f"it reads '{table.text}', which the same query's WITH defines",
                "define it as a view: CREATE TEMPORARY VIEW name AS ... in a script",
            )


def _read_clause(before: Sequence[Token], place: TextPart) -> MatchClause:
    table, *rest = before
    match [one.word for one in rest]:
        case ["WATERMARK", _, "DELAY", "OF", "INTERVAL", *_]:
            time_field, delay = rest[1].text, " ".join(one.text for one in rest[5:])
        case []:
            place.refuse(
                f"'{table.text}' has no event time, by which rows are in order",
                f"write {_FORM.replace('table', table.text)}",
            )
        case _:
            place.refuse(f"'{' '.join(one.text for one in before)}' stands before it", f"write {_FORM}")
    try:
        delay_ms = milliseconds("delay", delay)
    except UnusableValueError:
        delay_ms = -1
    if delay_ms < 0:
        place.refuse(f"its delay is '{delay}'", "write DELAY OF INTERVAL 10 SECONDS, for example")
    if "\\" in str(place):
        place.refuse(
            "a backslash stands in it, which Spark and the SQL standard read differently",
            "leave it out: compute such a text in a view before it",
        )
    with name_place(place):
        said = match_recognize(str(place))
    if (said.order or time_field).lower() != time_field.lower():
        place.refuse(
            f"it says ORDER BY {said.order}, and the event time of '{table.text}' is '{time_field}'",
            f"write ORDER BY {time_field}, or WATERMARK {said.order}",
        )
    return MatchClause(place, table.text.lower(), time_field, delay_ms, said)
