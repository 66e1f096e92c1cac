"""Operators that are made when the fields of their input are known, which is when the job is planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pyspark.sql import types as T

from flinkish_spark.aggregates import AggregateColumn, ElementAggregate, ElementChoice, Fold
from flinkish_spark.arguments import reducer
from flinkish_spark.functions import AggregateFunction, ReduceFunction
from flinkish_spark.operators.column_windows import ColumnWindows
from flinkish_spark.operators.element_windows import WindowOperator
from flinkish_spark.operators.elements import OutputTag, TimeDomain
from flinkish_spark.operators.elementwise_folds import KeysAndWindow, chosen_element, folded_field
from flinkish_spark.operators.keyed_aggregates import AggregateOperator, ReduceOperator
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator
from flinkish_spark.operators.looped_windows import LoopedWindows, looped_windows
from flinkish_spark.operators.row_aggregates import AggregatedRows, MergeResults, ReducedRows
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.value_folds import element_reduce
from flinkish_spark.operators.vectorized_aggregates import (
    ColumnAggregation,
    Columns,
    MergePartials,
    element_aggregation,
)
from flinkish_spark.operators.vectorized_windows import Partials, WholeElements, WindowFold
from flinkish_spark.operators.window_operator import window_operator
from flinkish_spark.operators.window_pool import WindowRules
from flinkish_spark.runtime.ddl import ddl_of, parse_ddl
from flinkish_spark.runtime.hinted_types import StateType
from flinkish_spark.state import StateTtl
from flinkish_spark.state.ttl import check_ttl
from flinkish_spark.windows.spec import WindowComputation, WindowSpec


class OperatorFactory(Protocol):
    """Part of the stream graph, so a value."""

    @property
    def needs_event_time(self) -> bool:
        """Whether it cannot work without timestamps."""

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator | LoopedWindows:
        """Return the operator for the fields of its inputs; called at each planning."""


@dataclass(frozen=True)
class Windows:
    """Windows and what is computed on them; an :class:`OperatorFactory`.

    Parameters
    ----------
    spec, computation
        Which, and what.
    result
        Fields of the results that are declared, without that of retractions; None for those of the elements.
    """

    spec: WindowSpec
    computation: WindowComputation
    result: T.StructType | None = None

    @property
    def needs_event_time(self) -> bool:
        """Whether windows go by event time."""
        return self.spec.assigner.clock is TimeDomain.EVENT_TIME

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator | LoopedWindows:
        """Return the operator: that which does it in one loop, where the windows allow it."""
        element_type = ElementType(ddl_of(schemas[0]))
        looped = looped_windows(self.spec, self.computation, element_type)
        if looped is not None:
            return looped
        result = ddl_of(self._result(schemas[0]))
        return window_operator(self.spec, self.computation, element_type, result)

    def output(self, *schemas: T.StructType) -> T.StructType:
        """Return the fields of what is emitted."""
        return with_retraction_field(self.spec, self._result(schemas[0]))

    def late_outputs(self, *schemas: T.StructType) -> list[tuple[OutputTag, T.StructType]]:
        """Return by which tag late elements go out, and their fields."""
        tag = self.spec.late_output
        return [] if tag is None else [(tag, schemas[0])]

    def _result(self, elements: T.StructType) -> T.StructType:
        return elements if self.result is None else self.result


@dataclass(frozen=True)
class Reducing:
    """A running reduction, element by element."""

    reduce: ReduceFunction | Callable[[Any, Any], Any]
    ttl: StateTtl | None = None
    needs_event_time: bool = False

    def __post_init__(self) -> None:
        reducer("reduce", self.reduce)
        check_ttl("ttl", self.ttl)

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        """Return the operator."""
        return ReduceOperator(self.reduce, ddl_of(schemas[0]), self.ttl)


@dataclass(frozen=True)
class Aggregating:
    """A running aggregate of the user's, element by element."""

    aggregate: AggregateFunction
    accumulator_type: StateType
    ttl: StateTtl | None = None
    needs_event_time: bool = False

    def __post_init__(self) -> None:
        check_ttl("ttl", self.ttl)

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        """Return the operator."""
        return AggregateOperator(self.aggregate, self.accumulator_type, self.ttl)


@dataclass(frozen=True)
class FoldingElements:
    """A sum, a least or a greatest of a field, element by element."""

    aggregate: ElementAggregate
    ttl: StateTtl | None = None
    needs_event_time: bool = False

    def __post_init__(self) -> None:
        check_ttl("ttl", self.ttl)

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        """Return the operator."""
        ddl = ddl_of(schemas[0])
        return ReduceOperator(element_reduce(self.aggregate, ddl), ddl, self.ttl)


@dataclass(frozen=True)
class FoldingColumns:
    """An aggregate over columns, most of it in front of the shuffle; once per key and micro-batch.

    Parameters
    ----------
    columns
        A fold of an element, or a table of them.
    """

    columns: ElementAggregate | tuple[AggregateColumn, ...]
    ttl: StateTtl | None = None

    def __post_init__(self) -> None:
        check_ttl("ttl", self.ttl)

    def aggregation(self, schema: T.StructType, keys: tuple[str, ...]) -> ColumnAggregation:
        """Return what is computed; a table of aggregates begins with those keys that are fields.

        Raises
        ------
        ConfigError
            There is no such field, or its type has no such fold.
        """
        if not isinstance(self.columns, tuple):
            return element_aggregation(self.columns, ddl_of(schema))
        own = [AggregateColumn(key, Fold.FIRST, key) for key in keys if key in schema.names]
        return Columns([*own, *self.columns], ddl_of(schema))

    def operator(self, aggregation: ColumnAggregation, output: T.StructType) -> MergePartials:
        """Return what adds partial rows to the state."""
        return MergePartials(aggregation, self.ttl)


@dataclass(frozen=True)
class ReducingColumns:
    """A reduction by a function of the user's, once per key and micro-batch; in part before the shuffle."""

    reduce: ReduceFunction | Callable[[Any, Any], Any]
    ttl: StateTtl | None = None

    def __post_init__(self) -> None:
        reducer("reduce", self.reduce)
        check_ttl("ttl", self.ttl)

    def aggregation(self, schema: T.StructType, keys: tuple[str, ...]) -> ColumnAggregation:
        """Return what is computed."""
        return ReducedRows(self.reduce, ddl_of(schema))

    def operator(self, aggregation: ColumnAggregation, output: T.StructType) -> MergePartials:
        """Return what adds partial rows to the state."""
        return MergePartials(aggregation, self.ttl)


@dataclass(frozen=True)
class AggregatingColumns:
    """An aggregate of the user's, once per key and micro-batch; in part before the shuffle."""

    aggregate: AggregateFunction
    accumulator_type: StateType
    ttl: StateTtl | None = None

    def __post_init__(self) -> None:
        check_ttl("ttl", self.ttl)

    def aggregation(self, schema: T.StructType, keys: tuple[str, ...]) -> ColumnAggregation:
        """Return what is computed."""
        return AggregatedRows(self.aggregate, ddl_of(schema), self.accumulator_type)

    def operator(self, aggregation: ColumnAggregation, output: T.StructType) -> MergePartials:
        """Return what adds partial rows to the state, and makes results of the accumulators."""
        assert isinstance(aggregation, AggregatedRows)
        return MergeResults(aggregation, output, self.ttl)


@dataclass(frozen=True)
class FoldingWindows:
    """Folds of windows: over columns, most of it before the shuffle, or else element by element.

    Parameters
    ----------
    spec
        Which windows.
    columns
        Folds of fields; just one for windows that columns cannot have. Or a choice of elements.
    """

    spec: WindowSpec
    columns: tuple[AggregateColumn, ...] | ElementChoice

    @property
    def needs_event_time(self) -> bool:
        """Whether windows go by event time."""
        return self.spec.assigner.clock is TimeDomain.EVENT_TIME

    def aggregation(self, schema: T.StructType) -> ColumnAggregation:
        """Return what is computed.

        Raises
        ------
        ConfigError
            There is no such field, or its type has no such fold.
        """
        ddl = ddl_of(schema)
        if isinstance(self.columns, ElementChoice):
            return element_aggregation(self.columns, ddl)
        return Columns(self.columns, ddl)

    def key_places(self, schema: T.StructType, keys: Sequence[object]) -> tuple[int, ...]:
        """Return which parts of the key come out in front: the fields among them; none before elements."""
        return () if isinstance(self.columns, ElementChoice) else own_keys(schema, keys)

    def over_columns(
        self, windows: ColumnWindows, schema: T.StructType, keys: Sequence[object]
    ) -> WindowFold:
        """Return the operator over columns."""
        rules = WindowRules(windows, self.spec.allowed_lateness_ms, self.aggregation(schema))
        late_output = self.spec.late_output
        reader = Partials() if late_output is None else WholeElements()
        return WindowFold(rules, self.key_places(schema, keys), reader, late_output)

    def by_element(
        self, schema: T.StructType, keys: Sequence[object], result: T.StructType
    ) -> WindowOperator:
        """Return the operator that computes the same element by element.

        Parameters
        ----------
        result
            Fields of its results, without that of retractions.
        """
        ddl = ddl_of(schema)
        if isinstance(self.columns, ElementChoice):
            computation = chosen_element(self.columns, ddl)
        else:
            (column,) = self.columns
            computation = folded_field(column, ddl, KeysAndWindow(self.key_places(schema, keys), len(keys)))
        return window_operator(self.spec, computation, ddl, ddl_of(result))


def with_retraction_field(spec: WindowSpec, result: T.StructType) -> T.StructType:
    """Return what is emitted where these fields are a result: with that of retractions, if there are any."""
    if spec.retraction_field is None:
        return result
    return T.StructType([*result, T.StructField(spec.retraction_field, T.BooleanType())])


#: Aggregates over columns of all elements of a key.
ColumnFolding = FoldingColumns | ReducingColumns | AggregatingColumns


def own_keys(schema: T.StructType, keys: Sequence[object]) -> tuple[int, ...]:
    """Return which parts of a key are fields."""
    return tuple(at for at, key in enumerate(keys) if isinstance(key, str) and key in schema.names)


def fields_of(aggregation: ColumnAggregation) -> T.StructType:
    """Return the columns that come out of an aggregation."""
    kind = parse_ddl(aggregation.state_type())
    if len(aggregation.names) == 1:
        return T.StructType([T.StructField(aggregation.names[0], kind)])
    assert isinstance(kind, T.StructType)
    return kind
