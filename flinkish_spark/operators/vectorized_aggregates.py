"""Running aggregates over columns, in two steps: one before the shuffle, one in the key group.

`combine` makes one row per key of a record batch, wherever the records happen to be; `merge` adds such rows
to the state of their keys. Both are functions of their arguments alone. What travels between them, what is
kept and what comes out has the same columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.aggregates import (
    AggregateColumn,
    ElementAggregate,
    ElementChoice,
    Fold,
    Ties,
)
from flinkish_spark.errors import ConfigError
from flinkish_spark.functions import RuntimeContext
from flinkish_spark.operators.column_folds import fold_groups, fold_pairs, same_values
from flinkish_spark.operators.columnar_state import ColumnarState
from flinkish_spark.operators.key_index import Array, KeyIndex, group_numbers
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.vectorized import BatchContext, VectorizedProcessFunction
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.ddl import name_text, type_text
from flinkish_spark.state import StateTtl, ValueStateDescriptor

AGGREGATE = "aggregate"


@dataclass(frozen=True)
class Combined:
    """What is left of a batch.

    Parameters
    ----------
    groups
        Number of each row's key; shape (rows,).
    first
        The first row of each key in the batch: take the key columns from there. Shape (keys,).
    partials
        A row per key, in the same order.
    """

    groups: Array
    first: Array
    partials: pa.RecordBatch


class ColumnAggregation(ABC):
    """An aggregate of a keyed stream, over columns."""

    @abstractmethod
    def state_type(self) -> str:
        """Return the type of what is kept per key, as DDL."""

    @abstractmethod
    def fold(self, batch: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        """Return the columns of the partial rows of elements; see :func:`combine`."""

    @abstractmethod
    def fold_partials(self, partials: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        """Return the columns of one partial row per group of partial rows."""

    @abstractmethod
    def add(self, exists: Array, before: Sequence[pa.Array], now: Sequence[pa.Array]) -> list[pa.Array]:
        """Return the columns of what was before and what is now together."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Names of the columns."""

    #: Whether a function of the user's is a part of it.
    has_function: ClassVar[bool] = False

    def open(self, uid: str, max_parallelism: int) -> None:
        """Open the user's function, if there is one; each copy once, before the shuffle and behind it."""

    def close(self) -> None:
        """Close it."""


def combine(aggregation: ColumnAggregation, batch: pa.RecordBatch, keys: Sequence[pa.Array]) -> Combined:
    """Make one row per key of a batch; for each batch of records, before the shuffle.

    Parameters
    ----------
    batch
        Elements, with at least the columns that the aggregation folds.
    keys
        Key columns, as long as the batch; at least one.

    Raises
    ------
    AggregateOverflow
        A sum leaves the type of its field.

    Examples
    --------
    >>> totals = Columns([AggregateColumn("total", Fold.SUM, "amount")], "user STRING, amount LONG")
    >>> batch = pa.RecordBatch.from_pydict({"user": ["a", "b", "a"], "amount": [1, 2, 4]})
    >>> combined = combine(totals, batch, [batch.column("user")])
    >>> combined.first.tolist(), combined.partials.to_pydict()
    ([0, 1], {'total': [5, 2]})
    """
    groups, first = group_numbers(keys)
    columns = aggregation.fold(batch, groups, first)
    return Combined(groups, first, pa.RecordBatch.from_arrays(columns, names=aggregation.names))


def each_alone(aggregation: ColumnAggregation, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a partial row for each row of a batch, as :func:`combine` makes where no two have one key."""
    rows = np.arange(batch.num_rows)
    return pa.RecordBatch.from_arrays(aggregation.fold(batch, rows, rows), names=aggregation.names)


def merge(
    aggregation: ColumnAggregation, partials: pa.RecordBatch, index: KeyIndex, state: ColumnarState
) -> pa.RecordBatch:
    """Add the partial rows of a key group's keys to their state; return what that is now.

    Parameters
    ----------
    partials
        Rows that :func:`combine` made, of any number of batches.
    index
        Their keys.
    state
        The value state of those keys, of the aggregation's type.

    Returns
    -------
    pyarrow.RecordBatch
        A row per key, by its number.

    Raises
    ------
    AggregateOverflow
        A sum leaves the type of its field; the state is as it was.
    """
    now = aggregation.fold_partials(partials, index.of_row, index.first)
    before = [state.column(at).cast(column.type) for at, column in enumerate(now)]
    columns = aggregation.add(state.exists, before, now)
    state.put(columns)
    return pa.RecordBatch.from_arrays(columns, names=aggregation.names)


class Columns(ColumnAggregation):
    """A table of aggregates: each column is a fold of one field.

    Parameters
    ----------
    columns
        At least one.
    input_type
        DDL of the elements.

    Raises
    ------
    ConfigError
        There is no such field, or its type has no such fold.
    """

    def __init__(self, columns: Sequence[AggregateColumn], input_type: str) -> None:
        self._columns = tuple(columns)
        kinds = {field.name: type_text(field.dataType) for field in ElementType(input_type).fields}
        self._types = [_result_type(column, kinds) for column in self._columns]

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [column.name for column in self._columns]

    def state_type(self) -> str:
        """Return the type of what is kept per key."""
        return _state_type(self.names, self._types)

    def fold(self, batch: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        """Return the columns of the partial rows."""
        return [
            fold_groups(one.fold, one.field or "", _field_of(batch, one), groups, first)
            for one in self._columns
        ]

    def fold_partials(self, partials: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        """Return the columns of one partial row per group."""
        return [
            fold_groups(_of_partials(one.fold), one.field or "", partials.column(at), groups, first)
            for at, one in enumerate(self._columns)
        ]

    def add(self, exists: Array, before: Sequence[pa.Array], now: Sequence[pa.Array]) -> list[pa.Array]:
        """Return the columns of both together."""
        return [
            pc.if_else(pa.array(exists), old, new)
            if one.fold is Fold.FIRST
            else fold_pairs(one.fold, one.field or "", old, new)
            for one, old, new in zip(self._columns, before, now, strict=True)
        ]


class Chosen(ColumnAggregation):
    """The element whose field is the least, or the greatest.

    Parameters
    ----------
    choice
        Which.
    input_type
        DDL of the elements: fields.

    Raises
    ------
    ConfigError
        There is no such field, or its type has no order.
    """

    def __init__(self, choice: ElementChoice, input_type: str) -> None:
        self._choice, self._fields = choice, ElementType(input_type).fields
        kinds = {field.name: type_text(field.dataType) for field in self._fields}
        _result_type(AggregateColumn(choice.field, choice.fold, choice.field), kinds)
        self._at = self.names.index(choice.field)

    @property
    def names(self) -> list[str]:
        """Names of the elements' fields."""
        return [field.name for field in self._fields]

    def state_type(self) -> str:
        """Return the type of the elements."""
        return _state_type(self.names, [type_text(field.dataType) for field in self._fields])

    def fold(self, batch: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        """Return the columns of one element per group."""
        best = fold_groups(
            self._choice.fold, self._choice.field, batch.column(self._choice.field), groups, first
        )
        is_best = same_values(batch.column(self._choice.field), best.take(pa.array(groups)))
        candidates = np.flatnonzero(is_best.to_numpy(zero_copy_only=False))
        places = first.copy()
        if self._choice.ties is Ties.FIRST:
            candidates = candidates[::-1]
        # Of several candidates of a group the one that is written last stays.
        places[groups[candidates]] = candidates
        taken = pa.array(places)
        return [batch.column(name).take(taken) for name in self.names]

    def fold_partials(self, partials: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        """Return the columns of one element per group: partial rows are elements."""
        return self.fold(partials, groups, first)

    def add(self, exists: Array, before: Sequence[pa.Array], now: Sequence[pa.Array]) -> list[pa.Array]:
        """Return the columns of the better ones."""
        old, new = before[self._at], now[self._at]
        best = fold_pairs(self._choice.fold, self._choice.field, old, new)
        if self._choice.ties is Ties.FIRST:
            keeps = same_values(old, best)
        else:
            keeps = pc.invert(same_values(new, best))
        keeps = pc.and_(keeps, pa.array(exists))
        return [pc.if_else(keeps, *pair) for pair in zip(before, now, strict=True)]


def element_aggregation(aggregate: ElementAggregate, input_type: str) -> ColumnAggregation:
    """Return what computes a running aggregate whose results are elements.

    Raises
    ------
    ConfigError
        Elements have no fields, or none of that name, or its type has no such fold.
    """
    element = ElementType(input_type)
    if not element.has_fields:
        raise ConfigError(
            f"{aggregate.fold.value} of the field '{aggregate.field}' of elements of the type {input_type}",
            why="they have no fields",
            what_to_do="use reduce(), or give the elements a field",
        )
    if isinstance(aggregate, ElementChoice):
        return Chosen(aggregate, input_type)
    kinds = {field.name: type_text(field.dataType) for field in element.fields}
    _result_type(AggregateColumn(aggregate.field, aggregate.fold, aggregate.field), kinds)
    folds = [aggregate.fold if name == aggregate.field else Fold.FIRST for name in kinds]
    columns = [AggregateColumn(name, fold, name) for name, fold in zip(kinds, folds, strict=True)]
    return Columns(columns, input_type)


class MergePartials(VectorizedProcessFunction):
    """The second step, as a function of a key group's partial rows.

    Parameters
    ----------
    aggregation
        The aggregate.
    ttl
        How long a key's aggregate lives since its last element; None: for ever.
    """

    def __init__(self, aggregation: ColumnAggregation, ttl: StateTtl | None = None) -> None:
        self._aggregation, self._ttl = aggregation, ttl

    #: A row has the latest time of its key's rows.
    event_time = C.TIME

    def open(self, context: RuntimeContext) -> None:
        """Declare the state."""
        context.get_state(ValueStateDescriptor(AGGREGATE, self._aggregation.state_type(), ttl=self._ttl))
        self._aggregation.open(context.uid, context.max_parallelism)

    def close(self) -> None:
        """Close the aggregation's function."""
        self._aggregation.close()

    def process_batch(self, batch: pa.RecordBatch, ctx: BatchContext) -> Iterable[pa.RecordBatch]:
        """Return the aggregates of the batch's keys, one row each."""
        return (self.timed(merge(self._aggregation, batch, ctx.index, ctx.state(AGGREGATE)), ctx),)

    @staticmethod
    def timed(rows: pa.RecordBatch, ctx: BatchContext) -> pa.RecordBatch:
        """Return a row per key with the latest event time of each, if there are such times."""
        if ctx.times is None:
            return rows
        latest = fold_groups(Fold.MAX, C.TIME, ctx.times, ctx.index.of_row, ctx.index.first)
        return rows.append_column(C.TIME, latest)


_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal")
_UNORDERED = ("array", "map", "struct")


def _result_type(column: AggregateColumn, kinds: dict[str, str]) -> str:
    """Return the type of a column, as DDL; raise ConfigError if there cannot be one."""
    if column.fold is Fold.COUNT and column.field is None:
        return "bigint"
    if column.field not in kinds:
        raise ConfigError(
            f"{column.fold.value} of the field {column.field!r}",
            why=f"the elements have the fields {', '.join(kinds)}",
            what_to_do="name one of these",
        )
    kind = kinds[column.field]
    is_possible = {
        Fold.SUM: kind.startswith(_NUMBERS),
        Fold.MIN: not kind.startswith(_UNORDERED),
        Fold.MAX: not kind.startswith(_UNORDERED),
    }
    if not is_possible.get(column.fold, True):
        raise ConfigError(
            f"{column.fold.value} of the field '{column.field}', which is {kind}",
            why="that is not defined for this type",
            what_to_do="take another field, or use reduce()",
        )
    return "bigint" if column.fold is Fold.COUNT else kind


def _state_type(names: Sequence[str], kinds: Sequence[str]) -> str:
    # One column alone is kept as a scalar: fields of which there is one would be a struct.
    if len(kinds) == 1:
        return kinds[0]
    return ", ".join(f"{name_text(name)} {kind}" for name, kind in zip(names, kinds, strict=True))


def _field_of(batch: pa.RecordBatch, column: AggregateColumn) -> pa.Array:
    if column.field is None:
        return pa.array(np.ones(batch.num_rows, dtype=bool))
    return batch.column(column.field)


def _of_partials(fold: Fold) -> Fold:
    return Fold.SUM if fold is Fold.COUNT else fold
