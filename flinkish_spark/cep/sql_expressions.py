"""The reader of expressions of MATCH_RECOGNIZE; no other module uses sqlglot's trees."""

from __future__ import annotations

import decimal
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.cep import expressions as E
from flinkish_spark.cep import sql_types as S
from flinkish_spark.cep import values as V
from flinkish_spark.cep.sql_text import JOINED, Token, parse_expression, refuse, render
from flinkish_spark.types.ddl import parse_ddl

_NULL: S.Typed = E.Literal(None), T.NullType()
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
    "Lower": (str.lower, S.TEXT),
    "Upper": (str.upper, S.TEXT),
    "Length": (len, S.INT),
}
_CAST = {name: parse_ddl(name) for name in ("BIGINT", "INT", "SMALLINT", "TINYINT", "DOUBLE", "FLOAT")}
_CAST |= dict.fromkeys(("VARCHAR", "TEXT", "CHAR"), S.TEXT) | {"BOOLEAN": S.BOOLEAN}
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


class ExpressionReader:
    """Reads expressions over rows with these fields, and with the variables of a pattern."""

    def __init__(self, fields: T.StructType, variables: Iterable[str]) -> None:
        self._fields = fields
        self._places = {field.name.lower(): at for at, field in enumerate(fields)}
        self.variables = {name: frozenset([name]) for name in variables}

    def read(self, text: str) -> S.Typed:
        return self._read_tree(parse_expression(text), text)

    def read_named(self, text: str, tokens: Sequence[Token]) -> S.Typed:
        """Read an expression over the named events of a Flink pattern; refuse navigation over rows."""
        made, kind = self.read(render(text, tokens))
        for one in made.all_parts():
            of_rows = isinstance(one, E.Navigation) and (one.rows or one.variables is None)
            if of_rows or isinstance(one, E.Classifier | E.MatchNumber | E.Final):
                refuse(text, "it looks at rows, and not at a name's events", "name what it looks at")
            if isinstance(one, E.Aggregate) and one.variables is None:
                refuse(text, "its aggregate is of no name's events", "write SUM(name.field)")
        return made, kind

    def find_variable(self, name: str) -> frozenset[str]:
        if name not in self.variables:
            known = ", ".join(self.variables)
            refuse(name, "it is no variable of the PATTERN, and no SUBSET", f"use one of {known}")
        return self.variables[name]

    def _find_variables(self, tree: Any) -> frozenset[str]:
        name = str(tree.this)
        return self.find_variable(name if tree.args.get("quoted") else name.upper())

    def _read_tree(self, tree: Any, text: str) -> S.Typed:
        name = type(tree).__name__
        more = {part for part, said in tree.args.items() if said} - _PARTS - _MORE_PARTS.get(name, set())
        if more:
            refuse(text, f"{tree.sql(dialect='trino')} says more than is known here", _KNOWN)
        make: Callable[[Any, str], S.Typed] | None = getattr(self, f"_read_{name.lower()}", None)
        if make is not None:
            return make(tree, text)
        match name:
            case "Paren":
                return self._read_tree(tree.this, text)
            case "Null":
                return _NULL
            case "Boolean":
                return E.Literal(bool(tree.this)), S.BOOLEAN
            case "And" | "Or":
                both = self._read_operands(tree, text)
                conditions = tuple(_require_condition(one, text) for one in both)
                return (E.All(conditions) if name == "And" else E.any_of(conditions)), S.BOOLEAN
            case "Not":
                return E.Negation(self._read_tree(tree.this, text)[0]), S.BOOLEAN
            case "Neg" | "Abs":
                return self._apply_sign(V.negative if name == "Neg" else V.absolute, tree, text)
            case "DPipe":
                texts = tuple(S.cast(one, S.TEXT, text) for one in self._read_operands(tree, text))
                return E.FunctionCall(operator.add, texts), S.TEXT
            case "First" | "Last":
                return self._navigate(name.upper(), tree.this, tree.args.get("expression"), text)
            case "Count" | "Sum" | "Min" | "Max" | "Avg":
                return self._aggregate(name.upper(), tree.this, text)
        if name in _COMPARED:
            return _compare(name, *self._read_operands(tree, text), text)
        if name in _ARITHMETIC:
            return S.compute(_ARITHMETIC[name], *self._read_operands(tree, text), text)
        if name in _OF_TEXT:
            function, kind = _OF_TEXT[name]
            return E.FunctionCall(function, (S.cast(self._read_tree(tree.this, text), S.TEXT, text),)), kind
        refuse(text, f"{tree.sql(dialect='trino')} is not known here", _KNOWN)

    def _read_operands(self, tree: Any, text: str) -> tuple[S.Typed, S.Typed]:
        return self._read_tree(tree.this, text), self._read_tree(tree.expression, text)

    def _read_column(self, tree: Any, text: str) -> S.Typed:
        place = self._places.get(tree.name.lower())
        if place is None:
            refuse(text, f"there is no field {tree.name}", f"use one of {', '.join(self._fields.names)}")
        variables = self._find_variables(tree.args["table"]) if tree.table else None
        return E.Column(place, variables), self._fields[place].dataType

    def _read_literal(self, tree: Any, text: str) -> S.Typed:
        if tree.is_string:
            return E.Literal(tree.this), S.TEXT
        if "E" in tree.this.upper():
            return E.Literal(float(tree.this)), S.DOUBLE
        value = decimal.Decimal(tree.this)
        scale = max(-int(value.as_tuple().exponent), 0)
        if scale or "." in tree.this or abs(value) >= 1 << 63:
            return E.Literal(value), T.DecimalType(max(len(value.as_tuple().digits), scale), scale)
        return E.Literal(int(value)), S.INT if abs(value) < 1 << 31 else S.LONG

    def _read_is(self, tree: Any, text: str) -> S.Typed:
        made, other = self._read_operands(tree, text)
        if isinstance(other[1], T.NullType):
            return E.IsNull(made[0]), S.BOOLEAN
        return E.Coalesce((_compare("EQ", made, other, text)[0], E.Literal(False))), S.BOOLEAN

    def _read_between(self, tree: Any, text: str) -> S.Typed:
        made, low, high = (self._read_tree(tree.args[name], text) for name in ("this", "low", "high"))
        return E.All((_compare("GTE", made, low, text)[0], _compare("LTE", made, high, text)[0])), S.BOOLEAN

    def _read_in(self, tree: Any, text: str) -> S.Typed:
        parts = [self._read_tree(one, text) for one in (tree.this, *tree.expressions)]
        (own, *others), _ = S.cast_alike(parts, text)
        return E.any_of(tuple(E.FunctionCall(V.is_equal, (own, one)) for one in others)), S.BOOLEAN

    def _read_like(self, tree: Any, text: str, escape: str | None = None) -> S.Typed:
        of, pattern = self._read_tree(tree.this, text), tree.expression
        if not isinstance(of[1], T.StringType | T.NullType) or not _is_text(pattern):
            refuse(text, "LIKE compares a text with a pattern that is written out", "write name LIKE 'a%'")
        if escape is None and "\\" in pattern.this:
            # For Spark a backslash is an escape, for the SQL standard a plain character.
            refuse(text, "a backslash in LIKE is not the same in every SQL", "name the escape: ESCAPE '!'")
        try:
            like = re.compile(V.translate_like(pattern.this, escape), re.DOTALL)
        except ValueError as error:
            refuse(text, str(error), "write the escape before %, _ or itself")
        found = E.FunctionCall(partial(V.is_like, like), (of[0],))
        return (E.Negation(found) if tree.args.get("negate") else found), S.BOOLEAN

    def _read_escape(self, tree: Any, text: str) -> S.Typed:
        escape = tree.expression
        if type(tree.this).__name__ != "Like" or not _is_text(escape) or len(escape.this) != 1:
            refuse(text, "an escape is one character after LIKE", "write name LIKE 'a!%' ESCAPE '!'")
        return self._read_like(tree.this, text, escape.this)

    def _apply_sign(self, function: Callable[[Any], Any], tree: Any, text: str) -> S.Typed:
        made, kind = self._read_tree(tree.this, text)
        S.require_number(kind, text)
        if isinstance(made, E.Literal) and function is V.negative:
            return E.Literal(V.negative(made.given)), kind
        found = E.FunctionCall(function, (made,))
        if type(kind) in S.BITS:
            found = E.FunctionCall(partial(V.whole_of_number, S.BITS[type(kind)]), (found,))
        return found, kind

    def _read_coalesce(self, tree: Any, text: str) -> S.Typed:
        parts = [self._read_tree(one, text) for one in (tree.this, *tree.expressions)]
        options, kind = S.cast_alike(parts, text)
        return E.Coalesce(options), kind

    def _read_case(self, tree: Any, text: str) -> S.Typed:
        given = tree.args.get("this")
        of = None if given is None else self._read_tree(given, text)
        conditions, values = list[E.Expression](), list[S.Typed]()
        for one in tree.args["ifs"]:
            condition = self._read_tree(one.this, text)
            if of is not None:
                condition = _compare("EQ", of, condition, text)
            conditions.append(_require_condition(condition, text))
            values.append(self._read_tree(one.args["true"], text))
        default = tree.args.get("default")
        values.append(_NULL if default is None else self._read_tree(default, text))
        (*chosen, otherwise), kind = S.cast_alike(values, text)
        return E.CaseWhen(tuple(zip(conditions, chosen, strict=True)), otherwise), kind

    def _read_cast(self, tree: Any, text: str) -> S.Typed:
        wanted, made = tree.to.this.name, self._read_tree(tree.this, text)
        if tree.to.expressions and wanted != "DECIMAL":
            refuse(text, "a cast does not cut texts here", f"cast to {wanted}, without a length")
        if wanted == "DECIMAL":
            sizes = [int(one.this.this) for one in tree.to.expressions] or [10, 0]
            kind: T.DataType = T.DecimalType(*sizes)
        elif wanted in _CAST:
            kind = _CAST[wanted]
        else:
            refuse(text, f"nothing is cast to {wanted} here", f"cast to one of {', '.join(_CAST)}, DECIMAL")
        return S.cast(made, kind, text), kind

    def _read_anonymous(self, tree: Any, text: str) -> S.Typed:
        name, given = tree.this.upper(), tree.expressions
        prefix, joined, rest = name.partition(JOINED)
        if joined and prefix in ("FINAL", "RUNNING"):
            of = parse_expression(f"{rest}({', '.join(one.sql(dialect='trino') for one in given)})")
            made, kind = self._read_tree(of, text)
            return (E.Final(made) if prefix == "FINAL" else made), kind
        match name, given:
            case "CLASSIFIER", _:
                return E.Classifier(self._find_variables(given[0].this) if given else None), S.TEXT
            case "MATCH_NUMBER", _:
                return E.MatchNumber(), S.LONG
            case "PREV" | "NEXT", [of]:
                return self._navigate(name, of, None, text)
            case "PREV" | "NEXT", [of, number]:
                return self._navigate(name, of, number, text)
        refuse(text, f"the function {tree.this} is not known here", _KNOWN)

    def _navigate(self, name: str, of: Any, number: Any, text: str) -> S.Typed:
        is_step = name in ("PREV", "NEXT")
        offset = int(is_step) if number is None else _parse_offset(number, text)
        rows = (-offset if name == "PREV" else offset) if is_step else 0
        made, kind = self._read_tree(of, text)
        if is_step and type(of).__name__ in ("First", "Last"):
            assert isinstance(made, E.Navigation)
            return E.Navigation(made.of, made.variables, made.from_first, made.offset, rows), kind
        named = {one.variables for one in made.all_parts() if isinstance(one, E.Column | E.Classifier)}
        if len(named) > 1 or any(
            one.looks_around and not isinstance(one, E.Classifier) for one in made.all_parts()
        ):
            refuse(text, f"{name} is of one variable's row", "name one variable in it, and no other function")
        variables = next(iter(named), None)
        if is_step:
            return E.Navigation(made, variables, rows=rows), kind
        return E.Navigation(made, variables, from_first=name == "FIRST", offset=offset), kind

    def _aggregate(self, name: str, of: Any, text: str) -> S.Typed:
        kind = type(of).__name__
        if kind == "Star" or (kind == "Column" and type(of.this).__name__ == "Star"):
            variables = None if kind == "Star" else self._find_variables(of.args["table"])
            return E.Aggregate(None, variables), S.LONG
        made, own = self._read_tree(of, text)
        named = {one.variables for one in made.all_parts() if isinstance(one, E.Column)}
        if len(named) > 1 or any(one.looks_around for one in made.all_parts()):
            refuse(text, "an aggregate is of the rows of one variable", "name one variable, or a SUBSET")
        function, result = S.aggregate(name, own, text)
        return E.Aggregate(made, next(iter(named), None), function), result


def _require_condition(given: S.Typed, text: str) -> E.Expression:
    made, kind = given
    if not isinstance(kind, T.BooleanType | T.NullType):
        refuse(text, f"a {kind.simpleString()} is no condition", "compare it with something")
    return made


def _compare(name: str, one: S.Typed, other: S.Typed, text: str) -> S.Typed:
    pair, _ = S.cast_alike((one, other), text)
    function, is_swapped, is_negated = _COMPARED[name]
    found = E.FunctionCall(function, pair[::-1] if is_swapped else pair)
    return (E.Negation(found) if is_negated else found), S.BOOLEAN


def _parse_offset(tree: Any, text: str) -> int:
    if type(tree).__name__ != "Literal" or tree.is_string or not tree.this.isdigit():
        refuse(text, "an offset is a whole number", "write one, as PREV(A.value, 2)")
    return int(tree.this)


def _is_text(tree: Any) -> bool:
    return type(tree).__name__ == "Literal" and bool(tree.is_string)
