"""User functions as aggregates over columns: a row per key and micro-batch, combined before the shuffle.

Rows become Python objects for the function, one by one: slower than built-in folds, but what travels and
what is kept are the same few rows per key.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from flinkish_spark.functions import AggregateFunction, ReduceFunction
from flinkish_spark.operators.key_index import Array
from flinkish_spark.operators.rich_parts import close_part, open_part
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.vectorized import BatchContext
from flinkish_spark.operators.vectorized_aggregates import (
    AGGREGATE,
    ColumnAggregation,
    MergePartials,
    merge,
)
from flinkish_spark.runtime.arrow_rows import RowWriter
from flinkish_spark.runtime.arrow_values import strict_array
from flinkish_spark.runtime.ddl import type_text
from flinkish_spark.runtime.hinted_types import StateType, declared_ddl, maker_of
from flinkish_spark.runtime.named_rows import RowForm
from flinkish_spark.runtime.python_values import to_values
from flinkish_spark.state import StateTtl


class _RowAggregation(ColumnAggregation):
    """Keeps one row per key, which a function makes."""

    has_function = True

    def __init__(self, function: Any, kept: StateType) -> None:
        self._function = function
        self._kept = ElementType(declared_ddl(kept))
        self._form = RowForm([field.name for field in self._kept.fields])
        self._class = None if isinstance(kept, str) else kept

    @property
    def names(self) -> list[str]:
        """Names of the columns that are kept."""
        return [field.name for field in self._kept.fields]

    def state_type(self) -> str:
        """Return the type of what is kept per key."""
        fields = self._kept.fields
        return type_text(fields[0].dataType) if len(fields) == 1 else self._kept.stored_fields

    def fold_partials(self, partials: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        """Return the columns of one partial row per group."""
        rows = self._rows([partials.column(name) for name in self.names])
        return self._columns(_folded(rows, groups, len(first), self._same, self._merge))

    def add(self, exists: Array, before: Sequence[pa.Array], now: Sequence[pa.Array]) -> list[pa.Array]:
        """Return the columns of both together."""
        pairs = zip(exists.tolist(), self._rows(before), self._rows(now), strict=True)
        return self._columns([self._merge(old, new) if is_there else new for is_there, old, new in pairs])

    def open(self, uid: str, max_parallelism: int) -> None:
        """Open the function."""
        open_part(self._function, uid, max_parallelism)

    def close(self) -> None:
        """Close it."""
        close_part(self._function)

    @abstractmethod
    def _merge(self, first: Any, second: Any) -> Any:
        """Return the row for two."""

    @staticmethod
    def _same(row: Any) -> Any:
        return row

    @cached_property
    def _element(self) -> Callable[[Any], Any]:
        """What makes an element of a row in any of its forms."""
        if not self._kept.has_fields:
            return self._same
        gather, tuple_of = self._kept.gathering(), self._form.tuple_of
        return lambda row: gather(tuple_of(row))

    def _rows(self, columns: Sequence[pa.Array]) -> list[Any]:
        rows, made = _rows(self._kept, columns), maker_of(self._class)
        return rows if made is None else [made(row) for row in rows]

    def _columns(self, rows: Sequence[Any]) -> list[pa.Array]:
        has_fields = self._kept.has_fields
        spread = self._form.tuples(list(rows)) if has_fields else [(row,) for row in rows]
        columns = list(zip(*spread, strict=True)) or [()] * len(self._kept.fields)
        kinds = [to_arrow_type(field.dataType, timezone="UTC") for field in self._kept.fields]
        return [strict_array(column, kind) for column, kind in zip(columns, kinds, strict=True)]


class ReducedRows(_RowAggregation):
    """What a reduction makes of the elements of each key.

    Parameters
    ----------
    reduce
        From two elements to one of the same type: an object with `reduce`, or a callable. Associative.
    input_type
        DDL of the elements.
    """

    def __init__(self, reduce: ReduceFunction | Callable[[Any, Any], Any], input_type: str) -> None:
        super().__init__(reduce, input_type)

    def fold(self, batch: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        """Return the columns of the partial rows: partial rows are elements."""
        return self.fold_partials(batch, groups, first)

    def _merge(self, first: Any, second: Any) -> Any:
        # What comes out goes in again, so it gets the names that elements have.
        return self._element(getattr(self._function, "reduce", self._function)(first, second))


class AggregatedRows(_RowAggregation):
    """The accumulator of each key; :meth:`results` makes results of them.

    Parameters
    ----------
    aggregate
        The function; it needs `merge`.
    input_type
        DDL of the elements.
    accumulator_type
        Of the accumulator: one type, fields for a tuple, or a class.
    """

    def __init__(self, aggregate: AggregateFunction, input_type: str, accumulator_type: StateType) -> None:
        super().__init__(aggregate, accumulator_type)
        self._input = ElementType(input_type)

    def fold(self, batch: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        """Return the columns of the accumulators of a batch."""
        rows = _rows(self._input, [batch.column(field.name) for field in self._input.fields])
        add = self._function.add
        return self._columns(_folded(rows, groups, len(first), self._begin, lambda made, row: add(row, made)))

    def results(self, merged: pa.RecordBatch) -> list[Any]:
        """Return the results of what :func:`~flinkish_spark.operators.vectorized_aggregates.merge` returned.

        One per key, in the same order; None where the function gives None.
        """
        return [self._function.get_result(made) for made in self._rows(merged.columns)]

    def _begin(self, row: Any) -> Any:
        return self._function.add(row, self._function.create_accumulator())

    def _merge(self, first: Any, second: Any) -> Any:
        return self._function.merge(first, second)


class MergeResults(MergePartials):
    """Adds accumulators to the state and emits what the function makes of them.

    Parameters
    ----------
    aggregation, ttl
        As of :class:`~flinkish_spark.operators.vectorized_aggregates.MergePartials`.
    output
        Fields of the results.
    """

    def __init__(
        self, aggregation: AggregatedRows, output: T.StructType, ttl: StateTtl | None = None
    ) -> None:
        super().__init__(aggregation, ttl)
        self._accumulators, self._output = aggregation, output

    def process_batch(self, batch: pa.RecordBatch, ctx: BatchContext) -> Iterable[pa.RecordBatch]:
        """Return the results of the batch's keys, one row each; none for a key whose result is None."""
        merged = merge(self._accumulators, batch, ctx.index, ctx.state(AGGREGATE))
        results = self._accumulators.results(merged)
        is_there = pa.array([result is not None for result in results], pa.bool_())
        writer = RowWriter.of(self._output)
        columns = writer.write([result for result in results if result is not None])
        timed, width = self.timed(merged, ctx).filter(is_there), merged.num_columns
        names = [*self._output.names, *timed.schema.names[width:]]
        return (pa.RecordBatch.from_arrays([*columns, *timed.columns[width:]], names=names),)


def _rows(element: ElementType, columns: Sequence[pa.Array]) -> list[Any]:
    gather = element.gathering()
    values = [to_values(column) for column in columns]
    return [gather(row) for row in zip(*values, strict=True)]


def _folded(
    rows: Iterable[Any],
    groups: Array,
    count: int,
    begin: Callable[[Any], Any],
    add: Callable[[Any, Any], Any],
) -> list[Any]:
    """Return what is made of the rows of each group, in their order."""
    made: list[Any] = [None] * count
    seen = [False] * count
    for group, row in zip(groups.tolist(), rows, strict=True):
        made[group] = add(made[group], row) if seen[group] else begin(row)
        seen[group] = True
    return made
