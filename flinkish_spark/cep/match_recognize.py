"""The clauses of MATCH_RECOGNIZE of SQL:2016."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pyspark.sql import types as T

from flinkish_spark.cep import expressions as E
from flinkish_spark.cep.row_pattern_parser import parse_row_pattern
from flinkish_spark.cep.rows import RowSearch, RowsPerMatch, names_in
from flinkish_spark.cep.sql_expressions import ExpressionReader
from flinkish_spark.cep.sql_text import (
    Token,
    fold_name,
    refuse,
    render,
    split_at_commas,
    tokenize,
    unquote,
)
from flinkish_spark.cep.sql_types import BOOLEAN
from flinkish_spark.cep.stages import Skip
from flinkish_spark.core.errors import ConfigError

#: The first words of the clauses, in their required order.
_CLAUSES: tuple[tuple[str, ...], ...] = (
    ("PARTITION", "BY"),
    ("ORDER", "BY"),
    ("MEASURES",),
    ("ONE", "ROW", "PER", "MATCH"),
    ("ALL", "ROWS", "PER", "MATCH"),
    ("AFTER", "MATCH", "SKIP"),
    ("PATTERN",),
    ("WITHIN",),
    ("SUBSET",),
    ("DEFINE",),
)
_UNITS_MS = {"MILLISECOND": 1, "SECOND": 1_000, "MINUTE": 60_000, "HOUR": 3_600_000, "DAY": 86_400_000}


@dataclass(frozen=True)
class MatchRecognize:
    """The clauses of a MATCH_RECOGNIZE, before the fields of its input are known."""

    #: Names of columns; empty if the stream's key is used.
    partition: tuple[str, ...]
    #: The column with the time of a row; None if the stream has timestamps.
    order: str | None
    #: The text of each other clause, by its first words.
    clauses: dict[str, str]

    def search(self, fields: T.StructType) -> tuple[RowSearch, T.StructType]:
        """Return the search over rows with these fields, and the fields of the measures."""
        text = self.clauses["PATTERN"]
        pattern = parse_row_pattern(text)
        expressions = ExpressionReader(fields, names_in(pattern))
        if not expressions.variables:
            refuse(text, "it has no variable", "name one")
        self._add_unions(expressions)
        measures, told = list[tuple[str, E.Expression]](), T.StructType()
        for own in split_at_commas(clause := self.clauses.get("MEASURES", "")):
            if len(own) < 3 or own[-2].word != "AS":
                refuse(" ".join(one.text for one in own), "it has no name", "write MEASURES ... AS name")
            made, kind = expressions.read(render(clause, own[:-2]))
            measures.append((own[-1].text, made))
            told.add(own[-1].text, kind)
        rows, skip = self._parse_rows(), self._parse_skip(expressions)
        defined = dict(self._parse_definitions(expressions))
        return RowSearch(pattern, defined, tuple(measures), rows, *skip, self._parse_window_ms()), told

    def _add_unions(self, expressions: ExpressionReader) -> None:
        for one in split_at_commas(text := self.clauses.get("SUBSET", "")):
            members = [token for token in one[2:] if token.word not in ("(", ")", ",")]
            if [token.word for token in one[1:2]] != ["="] or not members:
                refuse(text, "a union is written U = (A, B)", "correct SUBSET")
            own = frozenset[str]().union(*(expressions.find_variable(fold_name(token)) for token in members))
            expressions.variables[fold_name(one[0])] = own

    def _parse_definitions(self, expressions: ExpressionReader) -> Iterator[tuple[str, E.Expression]]:
        clause = self.clauses.get("DEFINE", "")
        for tokens in split_at_commas(clause):
            if len(tokens) < 3 or tokens[1].word != "AS":
                refuse(" ".join(one.text for one in tokens), "it is no A AS condition", "correct DEFINE")
            name, text = fold_name(tokens[0]), render(clause, tokens[2:])
            if expressions.variables.get(name) != frozenset([name]):
                refuse(text, f"{name} is no variable of the PATTERN", "define what stands there")
            made, kind = expressions.read(text)
            if kind != BOOLEAN:
                refuse(text, f"it is a {kind.simpleString()}", "let a definition be a condition")
            if any(isinstance(one, E.Final) for one in made.all_parts()):
                refuse(text, "a definition sees the rows up to its own", "leave FINAL out")
            yield name, made

    def _parse_rows(self) -> RowsPerMatch:
        clauses = self.clauses
        said = clauses.get("ALL ROWS PER MATCH")
        if said is None:
            return RowsPerMatch.ONE_ROW
        if "ONE ROW PER MATCH" in clauses:
            refuse("ONE ROW PER MATCH", "ALL ROWS PER MATCH stands there, too", "leave one out")
        # For sqlglot, SHOW begins a command.
        words = " ".join(said.upper().split()) or "SHOW EMPTY MATCHES"
        try:
            return RowsPerMatch(f"ALL ROWS PER MATCH {words}")
        except ValueError:
            refuse(
                said, "it is none of " + ", ".join(one.value for one in RowsPerMatch), "write one of these"
            )

    def _parse_skip(self, expressions: ExpressionReader) -> tuple[Skip, frozenset[str]]:
        said = self.clauses.get("AFTER MATCH SKIP", "PAST LAST ROW")
        tokens = tokenize(said)
        match [one.word for one in tokens]:
            case ["PAST", "LAST", "ROW"]:
                return Skip.PAST_LAST, frozenset()
            case ["TO", "NEXT", "ROW"]:
                return Skip.TO_NEXT, frozenset()
            case ["TO", "FIRST", _]:
                return Skip.TO_FIRST, expressions.find_variable(fold_name(tokens[2]))
            case ["TO", "LAST", _] | ["TO", _]:
                return Skip.TO_LAST, expressions.find_variable(fold_name(tokens[-1]))
        refuse(said, "it is no way to skip", "write AFTER MATCH SKIP PAST LAST ROW, TO NEXT ROW or TO LAST A")

    def _parse_window_ms(self) -> int | None:
        said = self.clauses.get("WITHIN")
        if said is None:
            return None
        match [one.text.upper() for one in tokenize(said)]:
            case ["INTERVAL", number, unit] if number.isdigit() and unit.removesuffix("S") in _UNITS_MS:
                if int(number):
                    return int(number) * _UNITS_MS[unit.removesuffix("S")]
        refuse(said, "it is no span of time", "write WITHIN INTERVAL '15' MINUTE")


def match_recognize(text: str) -> MatchRecognize:
    """Parse the clauses of MATCH_RECOGNIZE, with or without that word and its parentheses."""
    if not isinstance(text, str):
        raise ConfigError(f"match_recognize() got {text!r}", what_to_do="give it the clauses as text")
    tokens = tokenize(text)
    if [one.word for one in tokens[:2]] == ["MATCH_RECOGNIZE", "("] and tokens[-1].word == ")":
        tokens = tokens[2:-1]
    clauses = dict(_split_clauses(text, tokens))
    if "PATTERN" not in clauses:
        refuse(text, "it has no PATTERN", "write PATTERN (A B+) DEFINE ...")
    partition = tuple(one.strip() for one in clauses.pop("PARTITION BY", "").split(",") if one.strip())
    order = tokenize(said := clauses.pop("ORDER BY", ""))
    if len(order) > 2 or (len(order) == 2 and order[1].word != "ASC"):
        refuse(said, "rows are in the order of their time", "name one column in ORDER BY, ascending")
    return MatchRecognize(tuple(map(unquote, partition)), order[0].text if order else None, clauses)


def parse_condition(text: str, fields: T.StructType) -> E.Expression:
    said = MatchRecognize((), None, {"PATTERN": "(A)", "DEFINE": f"A AS {text}"})
    found = said.search(fields)[0].defined["A"]
    if any(one.looks_around for one in found.all_parts()):
        refuse(text, "it looks at other rows", "compare fields of one event")
    return found


def parse_comparison(text: str, fields: T.StructType, names: Iterable[str]) -> E.Expression:
    """Return a condition of an event with these fields, which may refer to earlier events of the match."""
    made, kind = _make_named_expressions(fields, names).read_named(text, tokenize(text))
    if kind != BOOLEAN:
        refuse(text, f"it is a {kind.simpleString()}", "give a condition")
    return made


def parse_measures(
    text: str, fields: T.StructType, names: Iterable[str]
) -> tuple[list[E.Expression], T.StructType]:
    """Parse the output columns of a match, as `first.id, last.value AS value`; return them and the fields."""
    expressions, made, told = _make_named_expressions(fields, names), list[E.Expression](), T.StructType()
    for tokens in split_at_commas(text):
        if [one.word for one in tokens[-2:-1]] == ["AS"]:
            name, tokens = tokens[-1].text, tokens[:-2]
        elif len(tokens) == 3 and tokens[1].word == ".":
            name = tokens[2].text
        else:
            refuse(text, "one of its columns has no name", "write ... AS name")
        one, kind = expressions.read_named(text, tokens)
        if any(isinstance(part, E.Column) and part.variables is None for part in one.all_parts()):
            refuse(text, "a field stands there without a name of the pattern", "write name.field")
        made.append(one)
        told.add(name, kind)
    return made, told


def _make_named_expressions(fields: T.StructType, names: Iterable[str]) -> ExpressionReader:
    """Return a reader of expressions that name events; unquoted names also match in capitals."""
    found = ExpressionReader(fields, names)
    folded = [name.upper() for name in found.variables]
    for name in list(found.variables):
        # A name is found in capitals if this is unambiguous.
        if folded.count(name.upper()) == 1:
            found.variables.setdefault(name.upper(), frozenset([name]))
    return found


def _split_clauses(text: str, tokens: Sequence[Token]) -> Iterator[tuple[str, str]]:
    begins, depth = list[tuple[int, int]](), 0
    for at, token in enumerate(tokens):
        depth += {"(": 1, ")": -1}.get(token.word, 0)
        for number, words in enumerate(() if depth else _CLAUSES):
            if tuple(one.word for one in tokens[at : at + len(words)]) == words:
                if begins and number <= begins[-1][1]:
                    refuse(text, f"{' '.join(words)} stands after a later clause", _ORDER)
                begins.append((at, number))
    if not begins or begins[0][0]:
        refuse(text, "it does not begin with a clause", _ORDER)
    for (at, number), (end, _) in pairwise([*begins, (len(tokens), 0)]):
        words = _CLAUSES[number]
        inside = tokens[at + len(words) : end]
        yield " ".join(words), text[inside[0].begin : inside[-1].end] if inside else ""


_ORDER = "write the clauses in their order: " + ", ".join(" ".join(words) for words in _CLAUSES)
