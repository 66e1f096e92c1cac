"""Texts of SQL as sqlglot reads them: their tokens, and the trees of their expressions."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from flinkish_spark.core.errors import ConfigError, GraphError, PatternError
from flinkish_spark.core.extras import how_to_install

#: Joins two words of the text that are one function.
JOINED = "__"


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    #: The upper-case word to compare with keywords; empty for a quoted name.
    word: str
    kind: str
    begin: int
    end: int


def tokenize(text: str) -> list[Token]:
    sqlglot, dialect = _import_sqlglot()
    try:
        return _split_into_words(sqlglot.tokenize(text, dialect=dialect))
    except sqlglot.errors.SqlglotError as error:
        refuse(text, str(error), "correct the text")


def tokenize_spark(text: str) -> list[Token]:
    sqlglot, _ = _import_sqlglot()
    try:
        return _split_into_words(sqlglot.tokenize(text, dialect="spark"))
    except sqlglot.errors.SqlglotError as error:
        # The error itself shows the text around, which may have a password in it.
        what, why = "a text with MATCH_RECOGNIZE cannot be read", str(error.__cause__)
        raise GraphError(what, why=why, what_to_do="close the quote or the comment") from None


def _split_into_words(found: Sequence[Any]) -> list[Token]:
    tokens = []
    for one in found:
        kind = one.token_type.name
        if kind == "IDENTIFIER" or kind.endswith("STRING"):
            tokens.append(Token(one.text, "", kind, one.start, one.end + 1))
            continue
        # A token of sqlglot may be several words, such as PARTITION BY.
        for word in re.finditer(r"\S+", one.text):
            begin, end = one.start + word.start(), one.start + word.end()
            tokens.append(Token(word.group(), word.group().upper(), kind, begin, end))
    return tokens


def parse_expression(text: str) -> Any:
    sqlglot, dialect = _import_sqlglot()
    try:
        return sqlglot.parse_one(text, dialect=dialect)
    except sqlglot.errors.SqlglotError as error:
        refuse(text, str(error).partition("\n")[0], "correct the expression")


@functools.cache
def _import_sqlglot() -> tuple[Any, Any]:
    """Return the package, and Trino's SQL dialect, extended by the backticks of Spark and Flink."""
    try:
        import sqlglot
        from sqlglot.dialects.trino import Trino
    except ImportError as error:
        raise ConfigError(
            "match_recognize() cannot read SQL here", what_to_do=how_to_install("sql")
        ) from error

    class QuotedTrino(Trino):
        class Tokenizer(Trino.Tokenizer):
            IDENTIFIERS: ClassVar[list[str | tuple[str, str]]] = ['"', "`"]

    return sqlglot, QuotedTrino


def refuse(text: str, why: str, what_to_do: str) -> NoReturn:
    has = f"MATCH_RECOGNIZE has {text.strip()[:200]!r}"
    raise PatternError(has, why=why, what_to_do=what_to_do, text=text)


def split_at_commas(text: str) -> Iterator[list[Token]]:
    depth, part = 0, list[Token]()
    for token in tokenize(text) if text.strip() else ():
        depth += {"(": 1, ")": -1}.get(token.word, 0)
        if token.word == "," and not depth:
            yield part
            part = []
        else:
            part.append(token)
    if part:
        yield part


def render(text: str, tokens: Sequence[Token]) -> str:
    """Return the text of some tokens for sqlglot, in which `FINAL LAST(x)` is one function name."""
    parts, end = list[str](), tokens[0].begin
    for token, name, opened in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if token.word in ("FINAL", "RUNNING") and opened.word == "(":
            parts += [text[end : token.end], JOINED]
            end = name.begin
    return "".join(parts) + text[end : tokens[-1].end]


def fold_name(token: Token) -> str:
    return token.text if token.kind == "IDENTIFIER" else token.text.upper()


def unquote(text: str) -> str:
    quote = text[0]
    return text[1:-1].replace(quote * 2, quote) if quote in ('"', "`") else text
