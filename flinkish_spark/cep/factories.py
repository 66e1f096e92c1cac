"""Factories of the operators for patterns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspark.sql import types as T

from flinkish_spark.cep.columnar_runner import make_pattern_operator
from flinkish_spark.cep.conditions import Comparison
from flinkish_spark.cep.expressions import Expression
from flinkish_spark.cep.functions import MeasuredMatches
from flinkish_spark.cep.match_recognize import MatchRecognize, parse_comparison, parse_measures
from flinkish_spark.cep.matches_in_sql import TextPart, name_place
from flinkish_spark.cep.pattern_operator import LookedFor, PatternSearch
from flinkish_spark.cep.row_operator import RowPatternOperator
from flinkish_spark.cep.rows import RowSearch, RowsPerMatch
from flinkish_spark.cep.stages import AfterMatchSkip, Stage
from flinkish_spark.contracts.operators import MeaningRules, OperatorFactory
from flinkish_spark.core.elements import OutputTag, TimeDomain
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.operators.process import KeyedStreamOperator
from flinkish_spark.types.ddl import ddl_of
from flinkish_spark.types.rows import ElementType


@dataclass(frozen=True)
class Patterns(OperatorFactory):
    search: PatternSearch

    @property
    def needs_event_time(self) -> bool:
        return self.search.clock is TimeDomain.EVENT_TIME

    @property
    def display_name(self) -> str:
        names = [one.name for one in self.search.patterns if one.name]
        return " ".join(["patterns", *names]) if names else "pattern"

    @property
    def meaning_rules(self) -> MeaningRules:
        return _MEANING_OF_PATTERNS

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        events, named = self._events(schemas[0]), self.search.time_field
        at = None if named is None else _find_time_position(events, named)
        said = {
            leaf.text: parse_comparison(leaf.text, events, one.automaton.names)
            for one in self.search.patterns
            for leaf in one.automaton.leaves
            if isinstance(leaf, Comparison)
        }
        search, function = replace(self.search, comparisons=said), self.search.function
        if isinstance(function, MeasuredMatches):
            told, _ = self._measures(events, function)
            search = replace(search, function=MeasuredMatches(function.text, function.lost, told))
        return make_pattern_operator(search, ElementType(ddl_of(events)), at)

    def find_output(self, *schemas: T.StructType) -> T.StructType:
        function = self.search.function
        assert isinstance(function, MeasuredMatches)
        return self._measures(self._events(schemas[0]), function)[1]

    def _measures(
        self, events: T.StructType, function: MeasuredMatches
    ) -> tuple[list[Expression], T.StructType]:
        names = dict.fromkeys(name for one in self.search.patterns for name in one.automaton.names)
        return parse_measures(function.text, events, names)

    def find_late_outputs(self, *schemas: T.StructType) -> list[tuple[OutputTag, T.StructType]]:
        tag = self.search.late_output
        return [] if tag is None else [(tag, self._events(schemas[0]))]

    def _events(self, schema: T.StructType) -> T.StructType:
        return T.StructType(schema.fields[: len(schema) - len(self.search.column_conditions)])


@dataclass(frozen=True)
class RowPatterns(OperatorFactory):
    said: MatchRecognize
    #: The fields among the key's columns; with one row per match they are the first output columns.
    keys: tuple[str, ...]
    late_output: OutputTag | None = None
    #: Where it stands in a query.
    place: TextPart | None = None
    needs_event_time = True
    display_name = "row pattern"

    @property
    def meaning_rules(self) -> MeaningRules:
        return _MEANING_OF_ROW_PATTERNS

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        fields = schemas[0]
        search, _ = self._search(fields)
        order = self.said.order
        at = None if order is None else _find_time_position(fields, order)
        return RowPatternOperator(
            search, ElementType(ddl_of(fields)), at, self._find_key_positions(fields), self.late_output
        )

    def find_output(self, *schemas: T.StructType) -> T.StructType:
        fields = schemas[0]
        search, measures = self._search(fields)
        own = fields.fields
        if search.rows is RowsPerMatch.ONE_ROW:
            own = [fields[place] for place in self._find_key_positions(fields)]
        return T.StructType([*(T.StructField(one.name, one.dataType) for one in own), *measures])

    def find_late_outputs(self, *schemas: T.StructType) -> list[tuple[OutputTag, T.StructType]]:
        return [] if self.late_output is None else [(self.late_output, schemas[0])]

    def _search(self, fields: T.StructType) -> tuple[RowSearch, T.StructType]:
        with name_place(self.place):
            return self.said.search(fields)

    def _find_key_positions(self, fields: T.StructType) -> list[int]:
        names = [name.lower() for name in fields.names]
        return [names.index(key.lower()) for key in self.keys if key.lower() in names]


def _find_time_position(fields: T.StructType, name: str) -> int:
    for place, field in enumerate(fields):
        if field.name.lower() == name.lower() and isinstance(field.dataType, T.LongType | T.TimestampType):
            return place
    raise SchemaError(
        f"the field '{name}' cannot be the time of events",
        why=f"the fields are {fields.simpleString()}",
        what_to_do="name a field of type LONG, in milliseconds, or TIMESTAMP",
    )


_MEANING_OF_PATTERNS = MeaningRules(
    {
        PatternSearch: frozenset({"function", "late_output", "limit", "column_conditions", "comparisons"}),
        # The states of partial matches have the name and the automaton in their names.
        LookedFor: frozenset({"name", "automaton"}),
        Stage: frozenset({"name", "condition", "until"}),
        AfterMatchSkip: frozenset({"raises"}),
    },
    part_names={LookedFor: lambda one: one.fingerprint, Stage: lambda one: one.name},
)
_MEANING_OF_ROW_PATTERNS = MeaningRules(
    # The state is rows, which a changed text can read too.
    {RowPatterns: frozenset({"keys", "late_output", "place"})},
    instead={(MatchRecognize, "clauses"): lambda said: said.clauses.get("WITHIN")},
)
