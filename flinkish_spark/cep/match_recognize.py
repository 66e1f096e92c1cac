"""The parser of MATCH_RECOGNIZE of SQL:2016; no other module uses sqlglot's trees."""

from __future__ import annotations

import decimal
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from pyspark.sql import types as T

from flinkish_spark.cep import expressions as E
from flinkish_spark.cep import values as V
from flinkish_spark.cep.rows import (
    Anchor,
    Concatenation,
    Exclusion,
    OneOf,
    Repetition,
    RowPattern,
    RowSearch,
    RowsPerMatch,
    Variable,
    names_in,
)
from flinkish_spark.cep.stages import Skip
from flinkish_spark.core.errors import ConfigError, PatternError
from flinkish_spark.core.extras import how_to_install

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
#: Quoted names, and the operators of a row pattern.
_APART = re.compile(r'("(?:[^"]|"")*"|`(?:[^`]|``)*`)|[$?^|+*(){}-]')
_UNITS_MS = {"MILLISECOND": 1, "SECOND": 1_000, "MINUTE": 60_000, "HOUR": 3_600_000, "DAY": 86_400_000}
#: Joins two words of the text that are one function.
_JOINED = "__"


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    #: The upper-case word to compare with keywords; empty for a quoted name.
    word: str
    kind: str
    begin: int
    end: int


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
        # Operators of a row pattern are parts of names, or of other operators, elsewhere in SQL.
        tokens = _tokenize(_APART.sub(lambda found: found.group(1) or f" {found.group()} ", text))
        if not tokens or tokens[0].word != "(" or tokens[-1].word != ")":
            _refuse(text, "a row pattern stands in parentheses", "write PATTERN (A B+)")
        pattern = _PatternReader(text, tokens[1:-1]).read()
        expressions = _Expressions(fields, names_in(pattern))
        if not expressions.variables:
            _refuse(text, "it has no variable", "name one")
        self._add_unions(expressions)
        measures, told = list[tuple[str, E.Expression]](), T.StructType()
        for own in _split_at_commas(clause := self.clauses.get("MEASURES", "")):
            if len(own) < 3 or own[-2].word != "AS":
                _refuse(" ".join(one.text for one in own), "it has no name", "write MEASURES ... AS name")
            made, kind = expressions.read(_render(clause, own[:-2]))
            measures.append((own[-1].text, made))
            told.add(own[-1].text, kind)
        rows, skip = self._parse_rows(), self._parse_skip(expressions)
        defined = dict(self._parse_definitions(expressions))
        return RowSearch(pattern, defined, tuple(measures), rows, *skip, self._parse_window_ms()), told

    def _add_unions(self, expressions: _Expressions) -> None:
        for one in _split_at_commas(text := self.clauses.get("SUBSET", "")):
            name, equals, rest = (one[0], one[1:2], one[2:]) if one else (None, [], [])
            members = [token for token in rest if token.word not in ("(", ")", ",")]
            if name is None or [token.word for token in equals] != ["="] or not members:
                _refuse(text, "a union is written U = (A, B)", "correct SUBSET")
            own = frozenset[str]().union(*(expressions.find_variable(_fold_name(token)) for token in members))
            expressions.variables[_fold_name(name)] = own

    def _parse_definitions(self, expressions: _Expressions) -> Iterator[tuple[str, E.Expression]]:
        clause = self.clauses.get("DEFINE", "")
        for tokens in _split_at_commas(clause):
            if len(tokens) < 3 or tokens[1].word != "AS":
                _refuse(" ".join(one.text for one in tokens), "it is no A AS condition", "correct DEFINE")
            name, text = _fold_name(tokens[0]), _render(clause, tokens[2:])
            if expressions.variables.get(name) != frozenset([name]):
                _refuse(text, f"{name} is no variable of the PATTERN", "define what stands there")
            made, kind = expressions.read(text)
            if kind != _BOOLEAN:
                _refuse(text, f"it is a {kind.simpleString()}", "let a definition be a condition")
            if any(isinstance(one, E.Final) for one in made.all_parts()):
                _refuse(text, "a definition sees the rows up to its own", "leave FINAL out")
            yield name, made

    def _parse_rows(self) -> RowsPerMatch:
        clauses = self.clauses
        said = clauses.get("ALL ROWS PER MATCH")
        if said is None:
            return RowsPerMatch.ONE_ROW
        if "ONE ROW PER MATCH" in clauses:
            _refuse("ONE ROW PER MATCH", "ALL ROWS PER MATCH stands there, too", "leave one out")
        # For sqlglot, SHOW begins a command.
        words = " ".join(said.upper().split()) or "SHOW EMPTY MATCHES"
        try:
            return RowsPerMatch(f"ALL ROWS PER MATCH {words}")
        except ValueError:
            _refuse(
                said, "it is none of " + ", ".join(one.value for one in RowsPerMatch), "write one of these"
            )

    def _parse_skip(self, expressions: _Expressions) -> tuple[Skip, frozenset[str]]:
        said = self.clauses.get("AFTER MATCH SKIP", "PAST LAST ROW")
        tokens = _tokenize(said)
        words = [one.word for one in tokens]
        match words:
            case ["PAST", "LAST", "ROW"]:
                return Skip.PAST_LAST, frozenset()
            case ["TO", "NEXT", "ROW"]:
                return Skip.TO_NEXT, frozenset()
            case ["TO", "FIRST", _]:
                return Skip.TO_FIRST, expressions.find_variable(_fold_name(tokens[2]))
            case ["TO", "LAST", _]:
                return Skip.TO_LAST, expressions.find_variable(_fold_name(tokens[2]))
            case ["TO", _]:
                return Skip.TO_LAST, expressions.find_variable(_fold_name(tokens[1]))
        _refuse(
            said, "it is no way to skip", "write AFTER MATCH SKIP PAST LAST ROW, TO NEXT ROW or TO LAST A"
        )

    def _parse_window_ms(self) -> int | None:
        said = self.clauses.get("WITHIN")
        if said is None:
            return None
        words = [one.text.upper() for one in _tokenize(said)]
        unit = words[-1].removesuffix("S") if words else ""
        if len(words) == 3 and words[0] == "INTERVAL" and unit in _UNITS_MS and words[1].isdigit():
            window_ms = int(words[1]) * _UNITS_MS[unit]
            if window_ms:
                return window_ms
        _refuse(said, "it is no span of time", "write WITHIN INTERVAL '15' MINUTE")


def match_recognize(text: str) -> MatchRecognize:
    """Parse the clauses of MATCH_RECOGNIZE, with or without that word and its parentheses."""
    if not isinstance(text, str):
        raise ConfigError(f"match_recognize() got {text!r}", what_to_do="give it the clauses as text")
    tokens = _tokenize(text)
    if [one.word for one in tokens[:2]] == ["MATCH_RECOGNIZE", "("] and tokens[-1].word == ")":
        tokens = tokens[2:-1]
    clauses = dict(_split_clauses(text, tokens))
    if "PATTERN" not in clauses:
        _refuse(text, "it has no PATTERN", "write PATTERN (A B+) DEFINE ...")
    partition = tuple(one.strip() for one in clauses.pop("PARTITION BY", "").split(",") if one.strip())
    order = clauses.pop("ORDER BY", "").strip()
    words = [one.word for one in _tokenize(order)]
    if len(words) > 2 or (len(words) == 2 and words[1] != "ASC"):
        _refuse(order, "rows are in the order of their time", "name one column in ORDER BY, ascending")
    names = [one.text for one in _tokenize(order)][:1]
    return MatchRecognize(tuple(_unquote(one) for one in partition), names[0] if names else None, clauses)


def parse_condition(text: str, fields: T.StructType) -> E.Expression:
    """Return a condition of one row with these fields, as it stands in DEFINE."""
    said = MatchRecognize((), None, {"PATTERN": "(A)", "DEFINE": f"A AS {text}"})
    found = said.search(fields)[0].defined["A"]
    if any(one.looks_around for one in found.all_parts()):
        _refuse(text, "it looks at other rows", "compare fields of one event")
    return found


def parse_comparison(text: str, fields: T.StructType, names: Iterable[str]) -> E.Expression:
    """Return a condition of an event with these fields, which may refer to earlier events of the match."""
    made, kind = _make_named_expressions(fields, names).read_named(text, _tokenize(text))
    if kind != _BOOLEAN:
        _refuse(text, f"it is a {kind.simpleString()}", "give a condition")
    return made


def parse_measures(
    text: str, fields: T.StructType, names: Iterable[str]
) -> tuple[list[E.Expression], T.StructType]:
    """Parse the output columns of a match, as `first.id, last.value AS value`; return them and the fields."""
    expressions, made, told = _make_named_expressions(fields, names), [], []
    for tokens in _split_at_commas(text):
        if [one.word for one in tokens[-2:-1]] == ["AS"]:
            name, tokens = tokens[-1].text, tokens[:-2]
        elif len(tokens) == 3 and tokens[1].word == ".":
            name = tokens[2].text
        else:
            _refuse(text, "one of its columns has no name", "write ... AS name")
        one, kind = expressions.read_named(text, tokens)
        if any(isinstance(part, E.Column) and part.variables is None for part in one.all_parts()):
            _refuse(text, "a field stands there without a name of the pattern", "write name.field")
        made.append(one)
        told.append(T.StructField(name, kind))
    return made, T.StructType(told)


def _make_named_expressions(fields: T.StructType, names: Iterable[str]) -> _Expressions:
    """Return a reader of expressions that name events; unquoted names also match in capitals."""
    found = _Expressions(fields, names)
    folded = [name.upper() for name in found.variables]
    for name in list(found.variables):
        # A name is found in capitals if this is unambiguous.
        if folded.count(name.upper()) == 1:
            found.variables.setdefault(name.upper(), frozenset([name]))
    return found


def _split_clauses(text: str, tokens: Sequence[_Token]) -> Iterator[tuple[str, str]]:
    begins: list[tuple[int, int, str, int]] = []
    depth, behind = 0, -1
    for at, token in enumerate(tokens):
        depth += {"(": 1, ")": -1}.get(token.word, 0)
        if depth:
            continue
        for number, words in enumerate(_CLAUSES):
            if tuple(one.word for one in tokens[at : at + len(words)]) == words:
                if number <= behind:
                    _refuse(text, f"{' '.join(words)} stands after a later clause", _ORDER)
                behind = number
                begins.append((at, at + len(words), " ".join(words), number))
    if not begins or begins[0][0]:
        _refuse(text, "it does not begin with a clause", _ORDER)
    ends = [*(one[0] for one in begins[1:]), len(tokens)]
    for (_, first, name, _), end in zip(begins, ends, strict=True):
        inside = tokens[first:end]
        yield name, text[inside[0].begin : inside[-1].end] if inside else ""


_ORDER = "write the clauses in their order: " + ", ".join(" ".join(words) for words in _CLAUSES)


def _tokenize(text: str) -> list[_Token]:
    sqlglot = _import_sqlglot()
    try:
        found = sqlglot.tokenize(text, dialect=_make_dialect())
    except sqlglot.errors.SqlglotError as error:
        _refuse(text, str(error), "correct the text")
    tokens = []
    for one in found:
        kind = one.token_type.name
        if kind in ("IDENTIFIER", "STRING"):
            tokens.append(_Token(one.text, "", kind, one.start, one.end + 1))
            continue
        # A token of sqlglot may be several words, such as PARTITION BY.
        for word in re.finditer(r"\S+", one.text):
            begin, end = one.start + word.start(), one.start + word.end()
            tokens.append(_Token(word.group(), word.group().upper(), kind, begin, end))
    return tokens


def _import_sqlglot() -> Any:
    try:
        import sqlglot
    except ImportError as error:
        raise ConfigError(
            "match_recognize() cannot read SQL here", what_to_do=how_to_install("sql")
        ) from error
    return sqlglot


@functools.cache
def _make_dialect() -> Any:
    """Return Trino's SQL dialect, extended by the backticks of Spark and Flink."""
    _import_sqlglot()
    from sqlglot.dialects.trino import Trino

    class QuotedTrino(Trino):
        class Tokenizer(Trino.Tokenizer):
            IDENTIFIERS: ClassVar[list[str | tuple[str, str]]] = ['"', "`"]

    return QuotedTrino


def _unquote(text: str) -> str:
    quote = text[0]
    return text[1:-1].replace(quote * 2, quote) if quote in ('"', "`") else text


def _refuse(text: str, why: str, what_to_do: str) -> NoReturn:
    raise PatternError(f"MATCH_RECOGNIZE has {text.strip()[:200]!r}", why=why, what_to_do=what_to_do)


class _PatternReader:
    def __init__(self, text: str, tokens: Sequence[_Token]) -> None:
        self._text, self._tokens, self._at = text, tokens, 0

    def read(self) -> RowPattern:
        found = self._parse_alternatives()
        if self._at < len(self._tokens):
            self._fail()
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
        while self._at < len(self._tokens):
            if self._word in ("|", ")", ",") or self._sees("-", "}"):
                break
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
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        if token is None or not (token.kind in ("VAR", "IDENTIFIER") or token.text.isidentifier()):
            self._fail()
        self._at += 1
        return Variable(_fold_name(token))

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
                _refuse(self._text, "a repetition ends before it begins, or is none", "write {least,most}")
        elif not self._takes("+"):
            return part
        return Repetition(part, least, most, not self._takes("?"))

    def _parse_number(self) -> int | None:
        word = self._word
        return int(word) if word.isdigit() and self._takes(word) else None

    @property
    def _word(self) -> str:
        return self._tokens[self._at].word if self._at < len(self._tokens) else ""

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
        where = self._tokens[self._at].text if self._at < len(self._tokens) else "the end"
        _refuse(self._text, f"{where!r} stands where it cannot", "correct the row pattern")


# ----------------------------------------------------------------------------------------------------------
# Expressions and their types.


Typed = tuple[E.Expression, T.DataType]
_INT, _LONG, _DOUBLE, _TEXT, _BOOLEAN = (
    T.IntegerType(),
    T.LongType(),
    T.DoubleType(),
    T.StringType(),
    T.BooleanType(),
)
#: By integer type: its bits, and the digits of an equivalent decimal.
_BITS: dict[type, int] = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}
_DIGITS: dict[type, int] = {T.ByteType: 3, T.ShortType: 5, T.IntegerType: 10, T.LongType: 20}
#: By operator: the function, whether to swap its operands, and whether to negate its result.
_COMPARED: dict[str, tuple[Callable[[Any, Any], bool], bool, bool]] = {
    "EQ": (V.is_equal, False, False),
    "NEQ": (V.is_equal, False, True),
    "LT": (V.is_less, False, False),
    "LTE": (V.is_less, True, True),
    "GT": (V.is_less, True, False),
    "GTE": (V.is_less, False, True),
}
_ARITHMETIC = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "Mod": "%"}
_OF_TEXT: dict[str, tuple[Callable[[str], Any], T.DataType]] = {
    "Lower": (str.lower, _TEXT),
    "Upper": (str.upper, _TEXT),
    "Length": (len, _INT),
}
_CAST: dict[str, T.DataType] = {
    "BIGINT": _LONG,
    "INT": _INT,
    "SMALLINT": T.ShortType(),
    "TINYINT": T.ByteType(),
    "DOUBLE": _DOUBLE,
    "FLOAT": T.FloatType(),
    **dict.fromkeys(("VARCHAR", "TEXT", "CHAR"), _TEXT),
    "BOOLEAN": _BOOLEAN,
}


#: The parts of sqlglot's trees that are read. A tree with others, as BETWEEN SYMMETRIC, is refused.
_PARTS = {"this", "expression"}
_MORE_PARTS: dict[str, set[str]] = {
    "Anonymous": {"expressions"},
    "Between": {"low", "high"},
    "Case": {"ifs", "default"},
    "Cast": {"to"},
    "Coalesce": {"expressions"},
    "Column": {"table"},
    "Count": {"big_int"},
    "Div": {"typed"},
    "In": {"expressions"},
    "Like": {"negate"},
    "Literal": {"is_string"},
}
_KNOWN = "see docs/cep.md for what is"


class _Expressions:
    """A reader of expressions over rows with these fields, and with the variables of a pattern."""

    def __init__(self, fields: T.StructType, variables: Iterable[str]) -> None:
        self._fields = fields
        self._places = {field.name.lower(): at for at, field in enumerate(fields)}
        self.variables = {name: frozenset([name]) for name in variables}

    def read(self, text: str) -> Typed:
        return self._read_tree(_parse(text), text)

    def read_named(self, text: str, tokens: Sequence[_Token]) -> Typed:
        """Read an expression over the named events of a Flink pattern; refuse navigation over rows."""
        made, kind = self.read(_render(text, tokens))
        for one in made.all_parts():
            of_rows = isinstance(one, E.Navigation) and (one.rows or one.variables is None)
            if of_rows or isinstance(one, E.Classifier | E.MatchNumber | E.Final):
                _refuse(text, "it looks at rows, and not at a name's events", "name what it looks at")
            if isinstance(one, E.Aggregate) and one.variables is None:
                _refuse(text, "its aggregate is of no name's events", "write SUM(name.field)")
        return made, kind

    def find_variable(self, name: str) -> frozenset[str]:
        if name not in self.variables:
            known = ", ".join(self.variables)
            _refuse(name, "it is no variable of the PATTERN, and no SUBSET", f"use one of {known}")
        return self.variables[name]

    def _read_tree(self, tree: Any, text: str) -> Typed:
        name = type(tree).__name__
        more = {part for part, said in tree.args.items() if said} - _PARTS - _MORE_PARTS.get(name, set())
        if more:
            _refuse(text, f"{tree.sql(dialect='trino')} says more than is known here", _KNOWN)
        make: Callable[[Any, str], Typed] | None = getattr(self, f"_read_{name.lower()}", None)
        if make is not None:
            return make(tree, text)
        match name:
            case "Paren":
                return self._read_tree(tree.this, text)
            case "Null":
                return E.Literal(None), T.NullType()
            case "Boolean":
                return E.Literal(bool(tree.this)), _BOOLEAN
            case "And" | "Or":
                conditions = self._read_conditions(tree, text)
                return (E.All(conditions) if name == "And" else E.any_of(conditions)), _BOOLEAN
            case "Not":
                return E.Negation(self._read_tree(tree.this, text)[0]), _BOOLEAN
            case "Neg":
                return self._apply_sign(tree, V.negative_whole, V.negative, text)
            case "Abs":
                return self._apply_sign(tree, V.absolute_whole, V.absolute, text)
            case "DPipe":
                texts = tuple(cast(one, _TEXT, text) for one in self._read_operands(tree, text))
                return E.FunctionCall(operator.add, texts), _TEXT
            case "First" | "Last":
                return self._navigate(name.upper(), [tree.this, tree.args.get("expression")], text)
            case "Count" | "Sum" | "Min" | "Max" | "Avg":
                return self._aggregate(name.upper(), tree.this, text)
        if name in _COMPARED:
            return self._compare(name, *self._read_operands(tree, text), text)
        if name in _ARITHMETIC:
            return make_arithmetic(_ARITHMETIC[name], *self._read_operands(tree, text), text)
        if name in _OF_TEXT:
            function, kind = _OF_TEXT[name]
            return E.FunctionCall(function, (cast(self._read_tree(tree.this, text), _TEXT, text),)), kind
        _refuse(text, f"{tree.sql(dialect='trino')} is not known here", _KNOWN)

    def _read_operands(self, tree: Any, text: str) -> tuple[Typed, Typed]:
        return self._read_tree(tree.this, text), self._read_tree(tree.expression, text)

    def _read_column(self, tree: Any, text: str) -> Typed:
        place = self._places.get(tree.name.lower())
        if place is None:
            _refuse(text, f"there is no field {tree.name}", f"use one of {', '.join(self._fields.names)}")
        variables = None if not tree.table else self.find_variable(_fold_identifier(tree.args["table"]))
        return E.Column(place, variables), self._fields[place].dataType

    def _read_literal(self, tree: Any, text: str) -> Typed:
        if tree.is_string:
            return E.Literal(tree.this), _TEXT
        if "E" in tree.this.upper():
            return E.Literal(float(tree.this)), _DOUBLE
        value = decimal.Decimal(tree.this)
        scale = max(-int(value.as_tuple().exponent), 0)
        digits = max(len(value.as_tuple().digits), scale)
        if scale or "." in tree.this or abs(value) >= 1 << 63:
            return E.Literal(value), T.DecimalType(digits, scale)
        return E.Literal(int(value)), _INT if abs(value) < 1 << 31 else _LONG

    def _read_conditions(self, tree: Any, text: str) -> tuple[E.Expression, ...]:
        both = self._read_operands(tree, text)
        for _, kind in both:
            if not isinstance(kind, T.BooleanType | T.NullType):
                _refuse(text, f"a {kind.simpleString()} is no condition", "compare it with something")
        return tuple(made for made, _ in both)

    def _read_is(self, tree: Any, text: str) -> Typed:
        made = self._read_tree(tree.this, text)
        other = self._read_tree(tree.expression, text)
        if isinstance(other[1], T.NullType):
            return E.IsNull(made[0]), _BOOLEAN
        return E.Coalesce((self._compare("EQ", made, other, text)[0], E.Literal(False))), _BOOLEAN

    def _read_between(self, tree: Any, text: str) -> Typed:
        made = self._read_tree(tree.this, text)
        low, high = (self._read_tree(tree.args[name], text) for name in ("low", "high"))
        bounds = self._compare("GTE", made, low, text)[0], self._compare("LTE", made, high, text)[0]
        return E.All(bounds), _BOOLEAN

    def _read_in(self, tree: Any, text: str) -> Typed:
        made = self._read_tree(tree.this, text)
        options = [self._read_tree(one, text) for one in tree.expressions]
        kind = find_common_type((made[1], *(kind for _, kind in options)), text)
        own, *others = (cast(one, kind, text) for one in (made, *options))
        return E.any_of(tuple(E.FunctionCall(V.is_equal, (own, one)) for one in others)), _BOOLEAN

    def _read_like(self, tree: Any, text: str, escape: str | None = None) -> Typed:
        of, pattern = self._read_tree(tree.this, text), tree.expression
        if not isinstance(of[1], T.StringType | T.NullType) or not _is_text(pattern):
            _refuse(text, "LIKE compares a text with a pattern that is written out", "write name LIKE 'a%'")
        if escape is None and "\\" in pattern.this:
            # For Spark a backslash is an escape, for the SQL standard a plain character.
            _refuse(text, "a backslash in LIKE is not the same in every SQL", "name the escape: ESCAPE '!'")
        try:
            like = re.compile(V.translate_like(pattern.this, escape), re.DOTALL)
        except ValueError as error:
            _refuse(text, str(error), "write the escape before %, _ or itself")
        found = E.FunctionCall(functools.partial(V.is_like, like), (of[0],))
        return (E.Negation(found) if tree.args.get("negate") else found), _BOOLEAN

    def _read_escape(self, tree: Any, text: str) -> Typed:
        escape = tree.expression
        if type(tree.this).__name__ != "Like" or not _is_text(escape) or len(escape.this) != 1:
            _refuse(text, "an escape is one character after LIKE", "write name LIKE 'a!%' ESCAPE '!'")
        return self._read_like(tree.this, text, escape.this)

    def _apply_sign(
        self, tree: Any, of_wholes: Callable[[int, int], int], of_others: Callable[[Any], Any], text: str
    ) -> Typed:
        made, kind = self._read_tree(tree.this, text)
        if not isinstance(kind, T.NumericType):
            _refuse(text, f"a {kind.simpleString()} is no number", "cast it")
        bits = _BITS.get(type(kind))
        if isinstance(made, E.Literal) and of_others is V.negative:
            return E.Literal(V.negative(made.given)), kind
        function = of_others if bits is None else functools.partial(of_wholes, bits)
        return E.FunctionCall(function, (made,)), kind

    def _read_coalesce(self, tree: Any, text: str) -> Typed:
        parts = [self._read_tree(one, text) for one in (tree.this, *tree.expressions)]
        kind = find_common_type([own for _, own in parts], text)
        return E.Coalesce(tuple(cast(one, kind, text) for one in parts)), kind

    def _read_case(self, tree: Any, text: str) -> Typed:
        given = tree.args.get("this")
        whole = None if given is None else self._read_tree(given, text)
        conditions, values = [], []
        for one in tree.args["ifs"]:
            condition = self._read_tree(one.this, text)
            if whole is not None:
                condition = self._compare("EQ", whole, condition, text)
            elif not isinstance(condition[1], T.BooleanType | T.NullType):
                _refuse(text, f"a {condition[1].simpleString()} is no condition", "compare it with something")
            conditions.append(condition[0])
            values.append(self._read_tree(one.args["true"], text))
        default = tree.args.get("default")
        values.append((E.Literal(None), T.NullType()) if default is None else self._read_tree(default, text))
        kind = find_common_type([own for _, own in values], text)
        *chosen, otherwise = (cast(one, kind, text) for one in values)
        return E.CaseWhen(tuple(zip(conditions, chosen, strict=True)), otherwise), kind

    def _read_cast(self, tree: Any, text: str) -> Typed:
        wanted, made = tree.to.this.name, self._read_tree(tree.this, text)
        if tree.to.expressions and wanted != "DECIMAL":
            _refuse(text, "a cast does not cut texts here", f"cast to {wanted}, without a length")
        if wanted == "DECIMAL":
            sizes = [int(one.this.this) for one in tree.to.expressions] or [10, 0]
            kind: T.DataType = T.DecimalType(*sizes)
        elif wanted in _CAST:
            kind = _CAST[wanted]
        else:
            _refuse(text, f"nothing is cast to {wanted} here", f"cast to one of {', '.join(_CAST)}, DECIMAL")
        return cast(made, kind, text), kind

    def _read_anonymous(self, tree: Any, text: str) -> Typed:
        name, given = tree.this.upper(), tree.expressions
        prefix, joined, rest = name.partition(_JOINED)
        if joined and prefix in ("FINAL", "RUNNING"):
            of = _parse(f"{rest}({', '.join(one.sql(dialect='trino') for one in given)})")
            made, kind = self._read_tree(of, text)
            return (E.Final(made) if prefix == "FINAL" else made), kind
        match name:
            case "CLASSIFIER":
                variables = None if not given else self.find_variable(_fold_identifier(given[0].this))
                return E.Classifier(variables), _TEXT
            case "MATCH_NUMBER":
                return E.MatchNumber(), _LONG
            case "PREV" | "NEXT" if len(given) in (1, 2):
                return self._navigate(name, given, text)
        _refuse(text, f"the function {tree.this} is not known here", _KNOWN)

    def _navigate(self, name: str, given: Sequence[Any], text: str) -> Typed:
        of, number = given[0], (given[1] if len(given) > 1 else None)
        offset = (
            (1 if name in ("PREV", "NEXT") else 0) if number is None else self._parse_offset(number, text)
        )
        if name in ("PREV", "NEXT") and type(of).__name__ in ("First", "Last"):
            inner, kind = self._read_tree(of, text)
            assert isinstance(inner, E.Navigation)
            rows = -offset if name == "PREV" else offset
            return E.Navigation(inner.of, inner.variables, inner.from_first, inner.offset, rows), kind
        made, kind = self._read_tree(of, text)
        named = {one.variables for one in made.all_parts() if isinstance(one, E.Column | E.Classifier)}
        if len(named) > 1 or any(
            one.looks_around and not isinstance(one, E.Classifier) for one in made.all_parts()
        ):
            _refuse(
                text, f"{name} is of one variable's row", "name one variable in it, and no other function"
            )
        variables = next(iter(named), None)
        if name in ("PREV", "NEXT"):
            return E.Navigation(made, variables, rows=-offset if name == "PREV" else offset), kind
        return E.Navigation(made, variables, from_first=name == "FIRST", offset=offset), kind

    def _parse_offset(self, tree: Any, text: str) -> int:
        if type(tree).__name__ != "Literal" or tree.is_string or not tree.this.isdigit():
            _refuse(text, "an offset is a whole number", "write one, as PREV(A.value, 2)")
        return int(tree.this)

    def _aggregate(self, name: str, of: Any, text: str) -> Typed:
        kind = type(of).__name__
        if kind == "Star" or (kind == "Column" and type(of.this).__name__ == "Star"):
            variables = None if kind == "Star" else self.find_variable(_fold_identifier(of.args["table"]))
            return E.Aggregate(None, variables), _LONG
        made, own = self._read_tree(of, text)
        named = {one.variables for one in made.all_parts() if isinstance(one, E.Column)}
        if len(named) > 1 or any(one.looks_around for one in made.all_parts()):
            _refuse(text, "an aggregate is of the rows of one variable", "name one variable, or a SUBSET")
        function, result = aggregate(name, own, text)
        return E.Aggregate(made, next(iter(named), None), function), result

    @staticmethod
    def _compare(name: str, one: Typed, other: Typed, text: str) -> Typed:
        kind = find_common_type((one[1], other[1]), text)
        function, is_swapped, is_negated = _COMPARED[name]
        pair = cast(one, kind, text), cast(other, kind, text)
        found = E.FunctionCall(function, pair[::-1] if is_swapped else pair)
        return (E.Negation(found) if is_negated else found), _BOOLEAN


def _parse(text: str) -> Any:
    sqlglot = _import_sqlglot()
    try:
        return sqlglot.parse_one(text, dialect=_make_dialect())
    except sqlglot.errors.SqlglotError as error:
        _refuse(text, str(error).partition("\n")[0], "correct the expression")


def _render(text: str, tokens: Sequence[_Token]) -> str:
    """Return the text of some tokens for sqlglot, in which `FINAL LAST(x)` is one function name."""
    parts, end = list[str](), tokens[0].begin
    for token, name, opened in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if token.word in ("FINAL", "RUNNING") and opened.word == "(":
            parts += [text[end : token.end], _JOINED]
            end = name.begin
    return "".join(parts) + text[end : tokens[-1].end]


def _is_text(tree: Any) -> bool:
    return type(tree).__name__ == "Literal" and bool(tree.is_string)


def _split_at_commas(text: str) -> Iterator[list[_Token]]:
    """Yield the tokens of each part between commas."""
    depth, part = 0, list[_Token]()
    for token in _tokenize(text) if text.strip() else ():
        depth += {"(": 1, ")": -1}.get(token.word, 0)
        if token.word == "," and not depth:
            yield part
            part = []
        else:
            part.append(token)
    if part:
        yield part


def _fold_name(token: _Token) -> str:
    return token.text if token.kind == "IDENTIFIER" else token.text.upper()


def _fold_identifier(tree: Any) -> str:
    name = str(tree.this)
    return name if tree.args.get("quoted") else name.upper()


# ----------------------------------------------------------------------------------------------------------
# Types of computed values, as in Spark's ANSI mode.


def find_common_type(kinds: Iterable[T.DataType], text: str) -> T.DataType:
    """Return the common type of several types, for comparisons and results."""
    found: T.DataType = T.NullType()
    for kind in kinds:
        found = _widen(found, kind, text)
    return found


def _widen(one: T.DataType, other: T.DataType, text: str) -> T.DataType:
    if one == other or isinstance(other, T.NullType):
        return one
    if isinstance(one, T.NullType):
        return other
    if not isinstance(one, T.NumericType) or not isinstance(other, T.NumericType):
        says = f"a {one.simpleString()} and a {other.simpleString()} have no type in common"
        _refuse(text, says, "cast one of them")
    if type(one) in _BITS and type(other) in _BITS:
        return max(one, other, key=lambda kind: _BITS[type(kind)])
    first, second = _to_decimal_type(one), _to_decimal_type(other)
    if first is None or second is None:
        return _DOUBLE
    scale = max(first.scale, second.scale)
    whole = max(first.precision - first.scale, second.precision - second.scale)
    # If the digits do not fit, those before the point are kept.
    return T.DecimalType(min(whole + scale, 38), scale if whole + scale <= 38 else max(38 - whole, 0))


def _to_decimal_type(kind: T.DataType) -> T.DecimalType | None:
    """Return the decimal type that holds all values of an exact type; None for other types."""
    if isinstance(kind, T.DecimalType):
        return kind
    digits = _DIGITS.get(type(kind))
    return None if digits is None else T.DecimalType(digits, 0)


def make_arithmetic(name: str, one: Typed, other: Typed, text: str) -> Typed:
    kinds = one[1], other[1]
    for kind in kinds:
        if not isinstance(kind, T.NumericType | T.NullType):
            _refuse(text, f"a {kind.simpleString()} is no number", "cast it")
    kind = _widen(*kinds, text)
    if isinstance(kind, T.DecimalType):
        own = _to_decimal_operand(one), _to_decimal_operand(other)
        kind = _find_decimal_type(name, *own)
        given = tuple(cast(each, as_, text) for each, as_ in zip((one, other), own, strict=True))
        function = functools.partial(V.compute_decimals, name, kind.precision, kind.scale)
        return E.FunctionCall(function, given), kind
    if name == "/" or not isinstance(kind, T.NumericType):
        kind = _DOUBLE if name == "/" or isinstance(kind, T.NullType) else kind
    given = cast(one, kind, text), cast(other, kind, text)
    if type(kind) in _BITS:
        return E.FunctionCall(functools.partial(V.compute_wholes, name, _BITS[type(kind)]), given), kind
    made = E.FunctionCall(functools.partial(V.compute_doubles, name), given)
    return (E.FunctionCall(V.single, (made,)) if isinstance(kind, T.FloatType) else made), kind


def _to_decimal_operand(given: Typed) -> T.DecimalType:
    """Return the decimal type of an operand; a literal whole number has as many digits as written."""
    made, kind = given
    if isinstance(made, E.Literal) and type(made.given) is int:
        return T.DecimalType(max(len(str(abs(made.given))), 1), 0)
    found = _to_decimal_type(kind)
    return T.DecimalType(1, 0) if found is None else found


def _find_decimal_type(name: str, one: T.DecimalType, other: T.DecimalType) -> T.DecimalType:
    """Return the type of arithmetic; if it is too long, digits after the point are dropped, down to six."""
    most, least = max(one.scale, other.scale), min(one.precision - one.scale, other.precision - other.scale)
    whole = max(one.precision - one.scale, other.precision - other.scale)
    match name:
        case "*":
            digits, scale = one.precision + other.precision + 1, one.scale + other.scale
        case "/":
            scale = max(6, one.scale + other.precision + 1)
            digits = one.precision - one.scale + other.scale + scale
        case "%":
            digits, scale = least + most, most
        case _:
            digits, scale = whole + most + 1, most
    if digits <= 38:
        return T.DecimalType(digits, scale)
    return T.DecimalType(38, max(38 - (digits - scale), min(scale, 6)))


def cast(given: Typed, kind: T.DataType, text: str) -> E.Expression:
    made, own = given
    if own == kind or isinstance(own, T.NullType):
        return made
    function: Callable[[Any], Any] | None = None
    is_text = isinstance(own, T.StringType)
    is_number = isinstance(own, T.NumericType | T.BooleanType)
    if type(kind) in _BITS and (is_number or is_text):
        function = functools.partial(V.whole_of_text if is_text else V.whole_of_number, _BITS[type(kind)])
    elif isinstance(kind, T.DecimalType) and (is_number or is_text):
        of = V.decimal_of_text if is_text else V.decimal_of_number
        function = functools.partial(of, kind.precision, kind.scale)
    elif isinstance(kind, T.DoubleType) and (is_number or is_text):
        function = V.double_of_text if is_text else float
    elif isinstance(kind, T.FloatType) and (is_number or is_text):
        return E.FunctionCall(V.single, (cast(given, _DOUBLE, text),))
    elif isinstance(kind, T.BooleanType) and (is_number or is_text):
        function = V.boolean_of_text if is_text else bool
    elif isinstance(kind, T.StringType) and is_number and not isinstance(own, T.DoubleType | T.FloatType):
        function = V.text_of
    if function is None:
        says = f"a {own.simpleString()} is not cast to {kind.simpleString()} here"
        _refuse(text, says, "leave the cast to a transform() after the match")
    return E.FunctionCall(function, (made,))


def aggregate(name: str, kind: T.DataType, text: str) -> tuple[Callable[[list[Any]], Any] | None, T.DataType]:
    """Return the function of an aggregate (None for a count), and the result's type."""
    if name == "COUNT":
        return None, _LONG
    if name in ("MIN", "MAX"):
        return functools.partial(functools.reduce, V.lesser if name == "MIN" else V.greater), kind
    if not isinstance(kind, T.NumericType):
        _refuse(text, f"a {kind.simpleString()} is no number", "cast it")
    if isinstance(kind, T.DecimalType):
        more, of = (10, V.sum_of_decimals) if name == "SUM" else (4, V.mean_of_decimals)
        digits = min(kind.precision + more, 38)
        scale = kind.scale if name == "SUM" else min(kind.scale + 4, 38)
        return functools.partial(of, digits, scale), T.DecimalType(digits, scale)
    if name == "AVG":
        return V.mean_of_doubles, _DOUBLE
    if type(kind) in _BITS:
        return functools.partial(functools.reduce, functools.partial(V.compute_wholes, "+", 64)), _LONG
    return V.sum_of_doubles, _DOUBLE
