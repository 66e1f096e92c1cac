"""Factories of operators, called when the job is planned and the fields of the inputs are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.contracts.operators import OperatorFactory
from flinkish_spark.core.changelogs import ROW_KIND
from flinkish_spark.core.elements import OutputTag, TimeDomain
from flinkish_spark.core.errors import InternalError, SchemaError
from flinkish_spark.core.validation import reducer
from flinkish_spark.functions.aggregates import AggregateColumn, ElementAggregate, ElementChoice, Fold
from flinkish_spark.functions.keyed import (
    AggregateFunction,
    BroadcastProcessFunction,
    KeyedBroadcastProcessFunction,
    ReduceFunction,
)
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
    FoldedField,
    KeysAndWindow,
    WindowFold,
    WindowRules,
    read_elements,
    read_partials,
)
from flinkish_spark.operators.joins import IntervalJoinOperator, TemporalJoinOperator, WindowCoGroupOperator
from flinkish_spark.operators.process import KeyedStreamOperator
from flinkish_spark.operators.window_loop import LoopedWindows, make_looped_windows
from flinkish_spark.operators.windowing import WindowOperator, window_operator
from flinkish_spark.state.descriptors import MapStateDescriptor, StateTtl
from flinkish_spark.types.ddl import ddl_of, parse_ddl
from flinkish_spark.types.hints import StateType
from flinkish_spark.types.rows import ElementType
from flinkish_spark.types.schemas import check_field_names
from flinkish_spark.windows.functions import WindowBounds
from flinkish_spark.windows.spec import AggregateWindow, ReduceWindow, WindowComputation, WindowSpec
from flinkish_spark.worker.broadcast_runner import UnkeyedBroadcast


@dataclass(frozen=True)
class Windows(OperatorFactory):
    spec: WindowSpec
    computation: WindowComputation
    #: Declared fields of the results, without the retraction field; None for the fields of the elements.
    result: T.StructType | None = None

    @property
    def needs_event_time(self) -> bool:
        return self.spec.assigner.clock is TimeDomain.EVENT_TIME

    @property
    def display_name(self) -> str:
        return type(self.spec.assigner).__name__

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator | LoopedWindows:
        element_type = ElementType(ddl_of(schemas[0]))
        looped = make_looped_windows(self.spec, self.computation, element_type)
        if looped is not None:
            return looped
        result = ddl_of(self._result(schemas[0]))
        return window_operator(self.spec, self.computation, element_type, result)

    def find_output(self, *schemas: T.StructType) -> T.StructType:
        return add_retraction_field(self.spec, self._result(schemas[0]))

    def find_late_outputs(self, *schemas: T.StructType) -> list[tuple[OutputTag, T.StructType]]:
        tag = self.spec.late_output
        return [] if tag is None else [(tag, schemas[0])]

    def _result(self, elements: T.StructType) -> T.StructType:
        return elements if self.result is None else self.result


@dataclass(frozen=True)
class Reducing(OperatorFactory):
    reduce: ReduceFunction | Callable[[Any, Any], Any]
    ttl: StateTtl | None = None

    display_name = "running reduce"

    def __post_init__(self) -> None:
        reducer("reduce", self.reduce)

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        return ReduceOperator(self.reduce, ddl_of(schemas[0]), self.ttl)


@dataclass(frozen=True)
class Aggregating(OperatorFactory):
    aggregate: AggregateFunction
    accumulator_type: StateType
    ttl: StateTtl | None = None

    display_name = "running aggregate"

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        return AggregateOperator(self.aggregate, self.accumulator_type, self.ttl)


@dataclass(frozen=True)
class ChangelogFactory(OperatorFactory):
    #: Name of the field with the row kind.
    row_kind: str
    #: Time to live of the state of a key.
    ttl: StateTtl | None = None

    def find_kind_position(self, schema: T.StructType) -> int:
        if self.row_kind not in schema.names or schema[self.row_kind].dataType != T.StringType():
            raise SchemaError(
                f"the changelog has no STRING field '{self.row_kind}' for the row kind",
                what_to_do=f"choose from {', '.join(schema.names)}",
            )
        return schema.names.index(self.row_kind)


@dataclass(frozen=True)
class ChangelogAggregating(ChangelogFactory):
    aggregate: AggregateFunction | None = None
    accumulator_type: StateType = ""

    display_name = "aggregate over a changelog"

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        assert self.aggregate is not None
        at = self.find_kind_position(schemas[0])
        return ChangelogAggregateOperator(at, self.aggregate, self.accumulator_type, self.ttl)


@dataclass(frozen=True)
class ChangelogFolding(ChangelogFactory):
    columns: tuple[AggregateColumn, ...] = ()
    #: Names of the key's fields.
    keys: tuple[str, ...] = ()

    display_name = "fold over a changelog"

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        names = schemas[0].names
        keys = [names.index(key) for key in self._own_keys(schemas[0])]
        folds = [(fold, None if at is None else names.index(at)) for fold, _, at in self._folds(schemas[0])]
        return ChangelogFoldOperator(self.find_kind_position(schemas[0]), keys, folds, self.ttl)

    def find_output(self, *schemas: T.StructType) -> T.StructType:
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
class Normalizing(ChangelogFactory):
    """Makes a full changelog (with -U rows) from upserts."""

    display_name = "changelog of upserts"

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        return NormalizeOperator(self.find_kind_position(schemas[0]), schemas[0], self.ttl)


@dataclass(frozen=True)
class FoldingElements(OperatorFactory):
    """A sum, minimum or maximum of a field, updated for each element."""

    aggregate: ElementAggregate
    ttl: StateTtl | None = None

    display_name = "running fold"

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        ddl = ddl_of(schemas[0])
        return ReduceOperator(make_element_reduce(self.aggregate, ddl), ddl, self.ttl)


class _ColumnFactory:
    ttl: StateTtl | None

    def operator(self, aggregation: ColumnAggregation, output: T.StructType) -> MergePartials:
        return MergePartials(aggregation, self.ttl)


@dataclass(frozen=True)
class FoldingColumns(_ColumnFactory):
    """An aggregate over columns, emitted once per key and micro-batch; mostly computed before the shuffle."""

    #: An aggregate that emits elements, or a tuple of columns.
    columns: ElementAggregate | tuple[AggregateColumn, ...]
    ttl: StateTtl | None = None

    def make_aggregation(self, schema: T.StructType, keys: tuple[str, ...]) -> ColumnAggregation:
        if not isinstance(self.columns, tuple):
            return make_element_aggregation(self.columns, ddl_of(schema))
        own = [AggregateColumn(key, Fold.FIRST, key) for key in keys if key in schema.names]
        return AggregateColumns([*own, *self.columns], ddl_of(schema))


@dataclass(frozen=True)
class ReducingColumns(_ColumnFactory):
    """A user's reduce function, emitted once per key and micro-batch; partly computed before the shuffle."""

    reduce: ReduceFunction | Callable[[Any, Any], Any]
    ttl: StateTtl | None = None

    def __post_init__(self) -> None:
        reducer("reduce", self.reduce)

    def make_aggregation(self, schema: T.StructType, keys: tuple[str, ...]) -> ColumnAggregation:
        return ReducedRows(self.reduce, ddl_of(schema))


@dataclass(frozen=True)
class AggregatingColumns(_ColumnFactory):
    """A user's aggregate, emitted once per key and micro-batch; partly computed before the shuffle."""

    aggregate: AggregateFunction
    accumulator_type: StateType
    ttl: StateTtl | None = None

    def make_aggregation(self, schema: T.StructType, keys: tuple[str, ...]) -> ColumnAggregation:
        return AggregatedRows(self.aggregate, ddl_of(schema), self.accumulator_type)

    def operator(self, aggregation: ColumnAggregation, output: T.StructType) -> MergePartials:
        return MergePartials(aggregation, self.ttl, output)


@dataclass(frozen=True)
class FoldingWindows:
    """Aggregates of windows: over columns and mostly before the shuffle if possible, else per element."""

    spec: WindowSpec
    #: Aggregates of fields, exactly one for windows that cannot run over columns; or a choice of elements.
    columns: tuple[AggregateColumn, ...] | ElementChoice

    @property
    def needs_event_time(self) -> bool:
        return self.spec.assigner.clock is TimeDomain.EVENT_TIME

    def make_aggregation(self, schema: T.StructType) -> ColumnAggregation:
        ddl = ddl_of(schema)
        if isinstance(self.columns, ElementChoice):
            return make_element_aggregation(self.columns, ddl)
        return AggregateColumns(self.columns, ddl)

    def find_key_positions(self, schema: T.StructType, keys: Sequence[object]) -> tuple[int, ...]:
        if isinstance(self.columns, ElementChoice):
            return ()
        return tuple(at for at, key in enumerate(keys) if isinstance(key, str) and key in schema.names)

    def make_column_fold(
        self, windows: ColumnWindows, schema: T.StructType, keys: Sequence[object]
    ) -> WindowFold:
        rules = WindowRules(windows, self.spec.allowed_lateness_ms, self.make_aggregation(schema))
        late_output = self.spec.late_output
        reader = read_partials if late_output is None else read_elements
        return WindowFold(rules, self.find_key_positions(schema, keys), reader, late_output)

    def make_element_operator(
        self, schema: T.StructType, keys: Sequence[object], result: T.StructType
    ) -> WindowOperator:
        ddl = ddl_of(schema)
        if isinstance(self.columns, ElementChoice):
            reduce = make_element_reduce(self.columns, ddl)
            computation: WindowComputation = ReduceWindow(reduce, WindowBounds())
        else:
            (column,) = self.columns
            fold = FoldedField(column, ddl)
            placed = KeysAndWindow(self.find_key_positions(schema, keys), len(keys))
            computation = AggregateWindow(fold, fold.kept, placed)
        return window_operator(self.spec, computation, ddl, ddl_of(result))


def add_retraction_field(spec: WindowSpec, result: T.StructType) -> T.StructType:
    if spec.retraction_field is None:
        return result
    return T.StructType([*result, T.StructField(spec.retraction_field, T.BooleanType())])


#: Aggregates over columns of all elements of a key.
ColumnFolding = FoldingColumns | ReducingColumns | AggregatingColumns


def find_fields(aggregation: ColumnAggregation) -> T.StructType:
    kind = parse_ddl(aggregation.state_type())
    if len(aggregation.names) == 1:
        return T.StructType([T.StructField(aggregation.names[0], kind)])
    assert isinstance(kind, T.StructType)
    return kind


KeyedJoin = IntervalJoin | WindowJoin | WindowCoGroup | TemporalJoin
#: Placeholder for the type of an input until it is known.
UNKNOWN_TYPE = "unknown STRING"
#: Prefix of a right field whose name a left field has too.
_RIGHT = "right_"


@dataclass(frozen=True)
class Joining(OperatorFactory):
    #: The join as declared, with :data:`UNKNOWN_TYPE` for the types of the inputs.
    join: KeyedJoin

    @property
    def needs_event_time(self) -> bool:
        if isinstance(self.join, WindowJoin | WindowCoGroup):
            return self.join.windows.assigner.clock is TimeDomain.EVENT_TIME
        return True

    @property
    def display_name(self) -> str:
        return type(self.join).__name__

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        left, right = map(ddl_of, schemas)
        join = replace(self.join, left_type=left, right_type=right)
        if isinstance(join, IntervalJoin):
            return IntervalJoinOperator(join)
        if isinstance(join, TemporalJoin):
            return TemporalJoinOperator(join)
        return WindowCoGroupOperator(join)

    def find_late_outputs(self, *schemas: T.StructType) -> list[tuple[OutputTag, T.StructType]]:
        join = self.join
        tags = (join.late_output,) if isinstance(join, TemporalJoin) else (join.left_late, join.right_late)
        return [(tag, schema) for tag, schema in zip(tags, schemas, strict=False) if tag is not None]

    def find_output(self, *schemas: T.StructType) -> T.StructType:
        if isinstance(self.join, WindowCoGroup) or self.join.function is not None:
            raise InternalError("the output of a join with a function is declared with it")
        return join_fields(*schemas)


def join_fields(left: T.StructType, right: T.StructType) -> T.StructType:
    """Return the left fields, then the right ones; a right field whose name is taken gets a prefix."""
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
