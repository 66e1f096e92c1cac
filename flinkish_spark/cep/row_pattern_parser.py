"""The parser of row patterns, the PATTERN clause of MATCH_RECOGNIZE."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NoReturn

from flinkish_spark.cep.rows import (
    Anchor,
    Concatenation,
    Exclusion,
    OneOf,
    Repetition,
    RowPattern,
    Variable,
)
from flinkish_spark.cep.sql_text import Token, fold_name, refuse, tokenize

#: Quoted names, and the operators of a row pattern.
_APART = re.compile(r'("(?:[^"]|"")*"|`(?:[^`]|``)*`)|[$?^|+*(){}-]')


def parse_row_pattern(text: str) -> RowPattern:
    # Operators of a row pattern are parts of names, or of other operators, elsewhere in SQL.
    tokens = tokenize(_APART.sub(lambda found: found.group(1) or f" {found.group()} ", text))
    if not tokens or tokens[0].word != "(" or tokens[-1].word != ")":
        refuse(text, "a row pattern stands in parentheses", "write PATTERN (A B+)")
    return _Parser(text, [*tokens[1:-1], _END]).parse()


_END = Token("the end", "\0", "", 0, 0)


class _Parser:
    def __init__(self, text: str, tokens: Sequence[Token]) -> None:
        self._text, self._tokens, self._at = text, tokens, 0

    def parse(self) -> RowPattern:
        found = self._parse_alternatives()
        self._expect(_END.word)
        return found

    def _parse_alternatives(self) -> RowPattern:
        options = self._parse_sequences("|")
        return options[0] if len(options) == 1 else OneOf(tuple(options))

    def _parse_sequences(self, between: str) -> list[RowPattern]:
        found = [self._parse_sequence()]
        while self._takes(between):
            found.append(self._parse_sequence())
        return found

    def _parse_sequence(self) -> RowPattern:
        parts: list[RowPattern] = []
        while self._token.word not in ("|", ")", ",", _END.word) and not self._sees("-", "}"):
            parts.append(self._parse_quantifier(self._parse_part()))
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _parse_part(self) -> RowPattern:
        if self._takes("("):
            inside = self._parse_alternatives()
            self._expect(")")
            return inside
        if self._takes("{", "-"):
            inside = self._parse_alternatives()
            self._expect("-", "}")
            return Exclusion(inside)
        for word in ("^", "$"):
            if self._takes(word):
                return Anchor(word == "^")
        if self._takes("PERMUTE", "("):
            parts = self._parse_sequences(",")
            self._expect(")")
            # Permutations with an earlier part first are preferred.
            return OneOf(tuple(Concatenation(one) for one in itertools.permutations(parts)))
        token = self._token
        if token.kind not in ("VAR", "IDENTIFIER") and not token.text.isidentifier():
            self._fail()
        self._at += 1
        return Variable(fold_name(token))

    def _parse_quantifier(self, part: RowPattern) -> RowPattern:
        least = 1
        most: int | None = None
        if self._takes("*"):
            least = 0
        elif self._takes("?"):
            least, most = 0, 1
        elif not self._sees("{", "-") and self._takes("{"):
            least = self._parse_number() or 0
            most = self._parse_number() if self._takes(",") else least
            self._expect("}")
            if most is not None and most < max(least, 1):
                refuse(self._text, "a repetition ends before it begins, or is none", "write {least,most}")
        elif not self._takes("+"):
            return part
        return Repetition(part, least, most, not self._takes("?"))

    def _parse_number(self) -> int | None:
        word = self._token.word
        return int(word) if word.isdigit() and self._takes(word) else None

    @property
    def _token(self) -> Token:
        return self._tokens[self._at]

    def _sees(self, *words: str) -> bool:
        return tuple(one.word for one in self._tokens[self._at : self._at + len(words)]) == words

    def _takes(self, *words: str) -> bool:
        found = self._sees(*words)
        self._at += len(words) if found else 0
        return found

    def _expect(self, *words: str) -> None:
        if not self._takes(*words):
            self._fail()

    def _fail(self) -> NoReturn:
        refuse(self._text, f"{self._token.text!r} stands where it cannot", "correct the row pattern")
