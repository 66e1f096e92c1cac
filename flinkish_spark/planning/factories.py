"""Operators that are made when the fields of their input are known, which is when the job is planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pyspark.sql import types as T

from flinkish_spark.cep.conditions import Comparison
from flinkish_spark.cep.expressions import Expression
from flinkish_spark.cep.rows import RowsPerMatch
from flinkish_spark.core.changelogs import ROW_KIND
from flinkish_spark.core.elements import OutputTag, TimeDomain
from flinkish_spark.core.errors import InternalError, SchemaError
from flinkish_spark.core.validation import instance_of, reducer
from flinkish_spark.functions.aggregates import AggregateColumn, ElementAggregate, ElementChoice, Fold
from flinkish_spark.functions.keyed import (
    AggregateFunction,
    BroadcastProcessFunction,
    KeyedBroadcastProcessFunction,
    ReduceFunction,
)
from flinkish_spark.functions.match_recognize import MatchRecognize, comparison, measures
from flinkish_spark.functions.patterns import MeasuredMatches
from flinkish_spark.joins.spec import IntervalJoin, TemporalJoin, WindowCoGroup, WindowJoin
from flinkish_spark.operators.aggregates import AggregateOperator, ReduceOperator, make_element_reduce
from flinkish_spark.operators.broadcast import KeyedBroadcastOperator
from flinkish_spark.operators.changelogs import (
    ChangelogAggregateOperator,
    ChangelogFoldOperator,
    NormalizeOperator,
    RetractingFold,
    make_retracting_fold,
)
from flinkish_spark.operators.columnar_aggregates import (
    AggregateColumns,
    AggregatedRows,
    ColumnAggregation,
    MergePartials,
    ReducedRows,
    make_element_aggregation,
)
from flinkish_spark.operators.columnar_windows import (
    ColumnWindows,
    KeysAndWindow,
    WindowFold,
    WindowRules,
    make_element_choice,
    make_field_fold,
    read_elements,
    read_partials,
)
from flinkish_spark.operators.joins import IntervalJoinOperator, TemporalJoinOperator, WindowCoGroupOperator
from flinkish_spark.operators.patterns import PatternOperator, PatternSearch
from flinkish_spark.operators.process import KeyedStreamOperator
from flinkish_spark.operators.row_patterns import RowPatternOperator
from flinkish_spark.operators.window_loop import LoopedWindows, make_looped_windows
from flinkish_spark.operators.windowing import WindowOperator, window_operator
from flinkish_spark.state.descriptors import MapStateDescriptor, StateTtl, check_ttl
from flinkish_spark.types.ddl import ddl_of, parse_ddl
from flinkish_spark.types.hints import StateType
from flinkish_spark.types.rows import ElementType
from flinkish_spark.types.schemas import check_field_names
from flinkish_spark.windows.spec import WindowComputation, WindowSpec
from flinkish_spark.worker.broadcast_runner import UnkeyedBroadcast


class OperatorFactory(Protocol):
    """Makes an operator at each planning, when the fields of its inputs are known."""

    @property
    def needs_event_time(self) -> bool:
        """Whether it cannot work without timestamps."""

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator | LoopedWindows:
        """Return the operator for the fields of its inputs; called at each planning."""


class _OfKey:
    """State of a key, for as long as the program says."""

    needs_event_time = False
    ttl: StateTtl | None

    def __post_init__(self) -> None:
        check_ttl("ttl", self.ttl)


@dataclass(frozen=True)
class Windows:
    spec: WindowSpec
    computation: WindowComputation
    #: Fields of the results that are declared, without that of retractions; None for those of the elements.
    result: T.StructType | None = None

    @property
    def needs_event_time(self) -> bool:
        return self.spec.assigner.clock is TimeDomain.EVENT_TIME

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator | LoopedWindows:
        element_type = ElementType(ddl_of(schemas[0]))
        looped = make_looped_windows(self.spec, self.computation, element_type)
        if looped is not None:
            return looped
        result = ddl_of(self._result(schemas[0]))
        return window_operator(self.spec, self.computation, element_type, result)

    def output(self, *schemas: T.StructType) -> T.StructType:
        return with_retraction_field(self.spec, self._result(schemas[0]))

    def late_outputs(self, *schemas: T.StructType) -> list[tuple[OutputTag, T.StructType]]:
        tag = self.spec.late_output
        return [] if tag is None else [(tag, schemas[0])]

    def _result(self, elements: T.StructType) -> T.StructType:
        return elements if self.result is None else self.result


@dataclass(frozen=True)
class Reducing(_OfKey):
    reduce: ReduceFunction | Callable[[Any, Any], Any]
    ttl: StateTtl | None = None

    def __post_init__(self) -> None:
        reducer("reduce", self.reduce)
        super().__post_init__()

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        return ReduceOperator(self.reduce, ddl_of(schemas[0]), self.ttl)


@dataclass(frozen=True)
class Aggregating(_OfKey):
    aggregate: AggregateFunction
    accumulator_type: StateType
    ttl: StateTtl | None = None

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        return AggregateOperator(self.aggregate, self.accumulator_type, self.ttl)


@dataclass(frozen=True)
class OverChangelog(_OfKey):
    #: The field with the kinds.
    row_kind: str
    #: How long what is known of a key lives.
    ttl: StateTtl | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        instance_of("row_kind", self.row_kind, str, what_to_do='give "_row_kind"')

    def kind_at(self, schema: T.StructType) -> int:
        if self.row_kind not in schema.names or schema[self.row_kind].dataType != T.StringType():
            raise SchemaError(
                f"a changelog has its kinds in the field '{self.row_kind}', and there is no such STRING",
                what_to_do=f"choose from {', '.join(schema.names)}",
            )
        return schema.names.index(self.row_kind)


@dataclass(frozen=True)
class ChangelogAggregating(OverChangelog):
    aggregate: AggregateFunction | None = None
    accumulator_type: StateType = ""

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        assert self.aggregate is not None
        at = self.kind_at(schemas[0])
        return ChangelogAggregateOperator(at, self.aggregate, self.accumulator_type, self.ttl)


@dataclass(frozen=True)
class ChangelogFolding(OverChangelog):
    columns: tuple[AggregateColumn, ...] = ()
    #: Names of the key's fields.
    keys: tuple[str, ...] = ()

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        names = schemas[0].names
        keys = [names.index(key) for key in self._own_keys(schemas[0])]
        folds = [(fold, None if at is None else names.index(at)) for fold, _, at in self._folds(schemas[0])]
        return ChangelogFoldOperator(self.kind_at(schemas[0]), keys, folds, self.ttl)

    def output(self, *schemas: T.StructType) -> T.StructType:
        own = [T.StructField(key, schemas[0][key].dataType) for key in self._own_keys(schemas[0])]
        named = zip(self.columns, self._folds(schemas[0]), strict=True)
        made = [T.StructField(column.name, kind) for column, (_, kind, _) in named]
        return T.StructType([*own, *made, T.StructField(ROW_KIND, T.StringType())])

    def _own_keys(self, schema: T.StructType) -> list[str]:
        return [key for key in self.keys if key in schema.names]

    def _folds(self, schema: T.StructType) -> list[tuple[RetractingFold, T.DataType, str | None]]:
        return [
            (*make_retracting_fold(column, schema, number, self.ttl), column.field)
            for number, column in enumerate(self.columns)
        ]


@dataclass(frozen=True)
class Normalizing(OverChangelog):
    """Whole changes out of upserts."""

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        return NormalizeOperator(self.kind_at(schemas[0]), schemas[0], self.ttl)


@dataclass(frozen=True)
class FoldingElements(_OfKey):
    """A sum, a least or a greatest of a field, element by element."""

    aggregate: ElementAggregate
    ttl: StateTtl | None = None

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        ddl = ddl_of(schemas[0])
        return ReduceOperator(make_element_reduce(self.aggregate, ddl), ddl, self.ttl)


class _OverColumns(_OfKey):
    def operator(self, aggregation: ColumnAggregation, output: T.StructType) -> MergePartials:
        return MergePartials(aggregation, self.ttl)


@dataclass(frozen=True)
class FoldingColumns(_OverColumns):
    """An aggregate over columns, most of it in front of the shuffle; once per key and micro-batch."""

    #: A fold of an element, or a table of them.
    columns: ElementAggregate | tuple[AggregateColumn, ...]
    ttl: StateTtl | None = None

    def aggregation(self, schema: T.StructType, keys: tuple[str, ...]) -> ColumnAggregation:
        if not isinstance(self.columns, tuple):
            return make_element_aggregation(self.columns, ddl_of(schema))
        own = [AggregateColumn(key, Fold.FIRST, key) for key in keys if key in schema.names]
        return AggregateColumns([*own, *self.columns], ddl_of(schema))


@dataclass(frozen=True)
class ReducingColumns(_OverColumns):
    """A reduction by a function of the user's, once per key and micro-batch; in part before the shuffle."""

    reduce: ReduceFunction | Callable[[Any, Any], Any]
    ttl: StateTtl | None = None

    def __post_init__(self) -> None:
        reducer("reduce", self.reduce)
        super().__post_init__()

    def aggregation(self, schema: T.StructType, keys: tuple[str, ...]) -> ColumnAggregation:
        return ReducedRows(self.reduce, ddl_of(schema))


@dataclass(frozen=True)
class AggregatingColumns(_OverColumns):
    """An aggregate of the user's, once per key and micro-batch; in part before the shuffle."""

    aggregate: AggregateFunction
    accumulator_type: StateType
    ttl: StateTtl | None = None

    def aggregation(self, schema: T.StructType, keys: tuple[str, ...]) -> ColumnAggregation:
        return AggregatedRows(self.aggregate, ddl_of(schema), self.accumulator_type)

    def operator(self, aggregation: ColumnAggregation, output: T.StructType) -> MergePartials:
        return MergePartials(aggregation, self.ttl, output)


@dataclass(frozen=True)
class FoldingWindows:
    """Folds of windows: over columns, most of it before the shuffle, or else element by element."""

    spec: WindowSpec
    #: Folds of fields; just one for windows that columns cannot have. Or a choice of elements.
    columns: tuple[AggregateColumn, ...] | ElementChoice

    @property
    def needs_event_time(self) -> bool:
        return self.spec.assigner.clock is TimeDomain.EVENT_TIME

    def aggregation(self, schema: T.StructType) -> ColumnAggregation:
        ddl = ddl_of(schema)
        if isinstance(self.columns, ElementChoice):
            return make_element_aggregation(self.columns, ddl)
        return AggregateColumns(self.columns, ddl)

    def key_places(self, schema: T.StructType, keys: Sequence[object]) -> tuple[int, ...]:
        if isinstance(self.columns, ElementChoice):
            return ()
        return tuple(at for at, key in enumerate(keys) if isinstance(key, str) and key in schema.names)

    def over_columns(
        self, windows: ColumnWindows, schema: T.StructType, keys: Sequence[object]
    ) -> WindowFold:
        rules = WindowRules(windows, self.spec.allowed_lateness_ms, self.aggregation(schema))
        late_output = self.spec.late_output
        reader = read_partials if late_output is None else read_elements
        return WindowFold(rules, self.key_places(schema, keys), reader, late_output)

    def by_element(
        self, schema: T.StructType, keys: Sequence[object], result: T.StructType
    ) -> WindowOperator:
        ddl = ddl_of(schema)
        if isinstance(self.columns, ElementChoice):
            computation = make_element_choice(self.columns, ddl)
        else:
            (column,) = self.columns
            computation = make_field_fold(
                column, ddl, KeysAndWindow(self.key_places(schema, keys), len(keys))
            )
        return window_operator(self.spec, computation, ddl, ddl_of(result))


def with_retraction_field(spec: WindowSpec, result: T.StructType) -> T.StructType:
    if spec.retraction_field is None:
        return result
    return T.StructType([*result, T.StructField(spec.retraction_field, T.BooleanType())])


#: Aggregates over columns of all elements of a key.
ColumnFolding = FoldingColumns | ReducingColumns | AggregatingColumns


def fields_of(aggregation: ColumnAggregation) -> T.StructType:
    kind = parse_ddl(aggregation.state_type())
    if len(aggregation.names) == 1:
        return T.StructType([T.StructField(aggregation.names[0], kind)])
    assert isinstance(kind, T.StructType)
    return kind


@dataclass(frozen=True)
class Patterns:
    search: PatternSearch

    @property
    def needs_event_time(self) -> bool:
        return self.search.clock is TimeDomain.EVENT_TIME

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        events, named = self._events(schemas[0]), self.search.time_field
        at = None if named is None else _place_of_time(events, named)
        said = {
            leaf.text: comparison(leaf.text, events, one.automaton.names)
            for one in self.search.patterns
            for leaf in one.automaton.leaves
            if isinstance(leaf, Comparison)
        }
        search, function = replace(self.search, comparisons=said), self.search.function
        if isinstance(function, MeasuredMatches):
            told, _ = self._measures(events, function)
            search = replace(search, function=MeasuredMatches(function.text, function.lost, told))
        return PatternOperator(search, ElementType(ddl_of(events)), at)

    def output(self, *schemas: T.StructType) -> T.StructType:
        function = self.search.function
        assert isinstance(function, MeasuredMatches)
        return self._measures(self._events(schemas[0]), function)[1]

    def _measures(
        self, events: T.StructType, function: MeasuredMatches
    ) -> tuple[list[Expression], T.StructType]:
        names = dict.fromkeys(name for one in self.search.patterns for name in one.automaton.names)
        return measures(function.text, events, names)

    def late_outputs(self, *schemas: T.StructType) -> list[tuple[OutputTag, T.StructType]]:
        tag = self.search.late_output
        return [] if tag is None else [(tag, self._events(schemas[0]))]

    def _events(self, schema: T.StructType) -> T.StructType:
        return T.StructType(schema.fields[: len(schema) - len(self.search.column_conditions)])


@dataclass(frozen=True)
class RowPatterns:
    said: MatchRecognize
    #: The key's columns that are fields; they come out in front where one row is told per match.
    keys: tuple[str, ...]
    late_output: OutputTag | None = None
    needs_event_time = True

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        fields = schemas[0]
        search, _ = self.said.search(fields)
        order = self.said.order
        at = None if order is None else _place_of_time(fields, order)
        return RowPatternOperator(
            search, ElementType(ddl_of(fields)), at, self._key_places(fields), self.late_output
        )

    def output(self, *schemas: T.StructType) -> T.StructType:
        fields = schemas[0]
        search, measures = self.said.search(fields)
        own = fields.fields
        if search.rows is RowsPerMatch.ONE_ROW:
            own = [fields[place] for place in self._key_places(fields)]
        return T.StructType([*(T.StructField(one.name, one.dataType) for one in own), *measures])

    def late_outputs(self, *schemas: T.StructType) -> list[tuple[OutputTag, T.StructType]]:
        return [] if self.late_output is None else [(self.late_output, schemas[0])]

    def _key_places(self, fields: T.StructType) -> list[int]:
        names = [name.lower() for name in fields.names]
        return [names.index(key.lower()) for key in self.keys if key.lower() in names]


def _place_of_time(fields: T.StructType, name: str) -> int:
    for place, field in enumerate(fields):
        if field.name.lower() == name.lower() and isinstance(field.dataType, T.LongType | T.TimestampType):
            return place
    raise SchemaError(
        f"the field '{name}' is to say the time of events, and is no time",
        why=f"the fields are {fields.simpleString()}",
        what_to_do="name a field of type LONG, in milliseconds, or TIMESTAMP",
    )


KeyedJoin = IntervalJoin | WindowJoin | WindowCoGroup | TemporalJoin
#: Stands for the type of an input until it is known.
UNKNOWN_TYPE = "unknown STRING"
#: Before the name of a right field that a left one has too.
_RIGHT = "right_"


@dataclass(frozen=True)
class Joining:
    #: What the program says, with :data:`UNKNOWN_TYPE` for the types of the inputs.
    join: KeyedJoin

    @property
    def needs_event_time(self) -> bool:
        if isinstance(self.join, WindowJoin | WindowCoGroup):
            return self.join.windows.assigner.clock is TimeDomain.EVENT_TIME
        return True

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        left, right = map(ddl_of, schemas)
        join = replace(self.join, left_type=left, right_type=right)
        if isinstance(join, IntervalJoin):
            return IntervalJoinOperator(join)
        if isinstance(join, TemporalJoin):
            return TemporalJoinOperator(join)
        return WindowCoGroupOperator(join)

    def late_outputs(self, *schemas: T.StructType) -> list[tuple[OutputTag, T.StructType]]:
        join = self.join
        tags = (join.late_output,) if isinstance(join, TemporalJoin) else (join.left_late, join.right_late)
        return [(tag, schema) for tag, schema in zip(tags, schemas, strict=False) if tag is not None]

    def output(self, *schemas: T.StructType) -> T.StructType:
        if isinstance(self.join, WindowCoGroup) or self.join.function is not None:
            raise InternalError("the output of a join with a function is declared with it")
        return joined_fields(*schemas)


def joined_fields(left: T.StructType, right: T.StructType) -> T.StructType:
    """Return the left fields, then the right ones, which get another name where theirs is taken."""
    taken = {name.lower() for name in left.names}
    fields = [T.StructField(field.name, field.dataType) for field in left]
    for field in right:
        name = f"{_RIGHT}{field.name}" if field.name.lower() in taken else field.name
        fields.append(T.StructField(name, field.dataType))
    check_field_names(T.StructType(fields), "the result of a join")
    return T.StructType(fields)


@dataclass(frozen=True)
class BroadcastFunctions:
    function: KeyedBroadcastProcessFunction | BroadcastProcessFunction
    descriptors: tuple[MapStateDescriptor, ...]

    def create(self) -> KeyedBroadcastOperator | UnkeyedBroadcast:
        if isinstance(self.function, KeyedBroadcastProcessFunction):
            return KeyedBroadcastOperator(self.function, self.descriptors)
        return UnkeyedBroadcast(self.function, self.descriptors)
