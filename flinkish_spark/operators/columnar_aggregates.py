"""Running aggregates over columns, in two steps: `combine` before the shuffle, `merge` in the key group.

Partial rows, state and results have the same columns. Sums of integers and decimals are exact; an overflow
is an error. Floats are added in double precision, in the order of the rows. Functions of the user are called
row by row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.iterators import refuse_not_run
from flinkish_spark.core.suggestions import describe_choices
from flinkish_spark.functions.aggregates import AggregateColumn, ElementAggregate, ElementChoice, Fold, Ties
from flinkish_spark.functions.keyed import AggregateFunction, ReduceFunction, RuntimeContext
from flinkish_spark.operators.context import close_part, open_part
from flinkish_spark.operators.vectorized import BatchContext, VectorizedProcessFunction
from flinkish_spark.state.columnar import ColumnarState
from flinkish_spark.state.descriptors import StateTtl, ValueStateDescriptor, state_type
from flinkish_spark.state.layered import Array, KeyIndex
from flinkish_spark.state.tables import owner_of
from flinkish_spark.transport import columns as C
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.ddl import name_text, type_text
from flinkish_spark.types.hints import StateType, maker_of, to_ddl
from flinkish_spark.types.row_form import RowForm
from flinkish_spark.types.rows import ElementType, RowWriter
from flinkish_spark.types.to_arrow import strict_array
from flinkish_spark.types.to_python import as_it_is, copy_if_mutable, to_values

_LIMIT = 1 << 63
#: Whole numbers below this are exact as doubles.
_EXACT = 1 << 53
_LOW_BITS = 32


class AggregateOverflow(OverflowError):
    def __init__(self, name: str, kind: pa.DataType) -> None:
        super().__init__(
            f"the sum of the field '{name}' leaves its type {kind}; cast the field to a wider type before "
            "the aggregate"
        )


def fold_groups(fold: Fold, name: str, values: pa.Array, groups: Array, first: Array) -> pa.Array:
    if fold is Fold.FIRST:
        return values.take(pa.array(first))
    if fold is Fold.COUNT:
        present = values.is_valid().to_numpy(zero_copy_only=False)
        return pa.array(np.bincount(groups, weights=present, minlength=len(first)).astype(np.int64))
    if pa.types.is_duration(values.type):
        # Arrow cannot group intervals, so fold them as microseconds.
        return fold_groups(fold, name, values.cast(pa.int64()), groups, first).cast(values.type)
    if (plain := _to_numbers(values)) is not None and len(first):
        if fold is not Fold.SUM:
            best = plain[first]
            (np.minimum if fold is Fold.MIN else np.maximum).at(best, groups, plain)
            return pa.array(best, values.type)
        if (sums := _add_exactly(plain, groups, len(first))) is not None:
            return _narrow(name, sums, values.type)
    if fold is Fold.SUM:
        return _narrow(name, _add_groups(values, groups, len(first)), values.type)
    best = _aggregate_groups(values, groups, "min" if fold is Fold.MIN else "max", len(first))
    if fold is Fold.MAX and pa.types.is_floating(values.type):
        best = _set_nan(best, _aggregate_groups(pc.is_nan(values), groups, "any", len(first)))
    return best


def fold_pairs(fold: Fold, name: str, before: pa.Array, now: pa.Array) -> pa.Array:
    """Return the element-wise fold of the state before and the new values; nulls are skipped."""
    # Not for FIRST, where null is a value; `add` looks at `exists` for it.
    if fold in (Fold.SUM, Fold.COUNT):
        return pc.coalesce(_narrow(name, _add_pairs(name, before, now), now.type), before, now)
    choose = pc.min_element_wise if fold is Fold.MIN else pc.max_element_wise
    kind = now.type
    # Arrow cannot compare columns of these types element-wise; cast to a type with the same order.
    if pa.types.is_boolean(kind):
        kind = pa.uint8()
    elif pa.types.is_timestamp(kind):
        kind = pa.int64()
    best = choose(before.cast(kind), now.cast(kind), skip_nulls=True).cast(now.type)
    if fold is Fold.MAX and pa.types.is_floating(now.type):
        is_nan = pc.or_(pc.fill_null(pc.is_nan(before), False), pc.fill_null(pc.is_nan(now), False))
        best = _set_nan(best, is_nan)
    return best


def find_equal(left: pa.Array, right: pa.Array) -> pa.Array:
    """Return where two columns are equal; null equals null, and NaN equals NaN."""
    same = pc.or_(pc.fill_null(pc.equal(left, right), False), pc.and_(left.is_null(), right.is_null()))
    if pa.types.is_floating(left.type):
        nans = pc.and_(pc.fill_null(pc.is_nan(left), False), pc.fill_null(pc.is_nan(right), False))
        same = pc.or_(same, nans)
    return same


def _to_numbers(values: pa.Array) -> Array | None:
    """Return the values as a Numpy array, which folds faster; None if one is null, NaN or no number."""
    kind = values.type
    if values.null_count or not (pa.types.is_integer(kind) or pa.types.is_float64(kind)):
        return None
    numbers: Array = values.to_numpy()
    return None if numbers.dtype.kind == "f" and np.isnan(numbers).any() else numbers


def _add_exactly(numbers: Array, groups: Array, count: int) -> pa.Array | None:
    """Return the sums of groups, added as doubles; None if doubles could not hold integer sums exactly."""
    if numbers.dtype.kind == "f":
        return pa.array(np.bincount(groups, weights=numbers, minlength=count))
    most = max(-int(numbers.min()), int(numbers.max()))
    if most * len(numbers) >= _EXACT:
        return None
    return pa.array(np.bincount(groups, weights=numbers, minlength=count).astype(np.int64))


def _add_groups(values: pa.Array, groups: Array, count: int) -> pa.Array:
    """Return the sums of groups in the widest type of their kind."""
    kind = values.type
    if pa.types.is_integer(kind):
        least, greatest = (bound.as_py() or 0 for bound in pc.min_max(values).values())
        if max(-least, greatest) * len(values) >= _LIMIT:
            return _add_wide(values, groups, count)
    elif pa.types.is_decimal(kind) and kind.precision + len(str(len(values))) > 38:
        values = values.cast(pa.decimal256(kind.precision, kind.scale))
    return _aggregate_groups(values, groups, "sum", count)


def _add_wide(values: pa.Array, groups: Array, count: int) -> pa.Array:
    """Return sums of integers that may overflow 64 bits, adding upper and lower halves separately."""
    whole = pc.fill_null(values.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    upper, lower = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    np.add.at(upper, groups, whole >> _LOW_BITS)
    np.add.at(lower, groups, whole & ((1 << _LOW_BITS) - 1))
    there = np.zeros(count, dtype=bool)
    there[groups[values.is_valid().to_numpy(zero_copy_only=False)]] = True
    exact = [(high << _LOW_BITS) + low for high, low in zip(upper.tolist(), lower.tolist(), strict=True)]
    if not all(-_LIMIT <= total < _LIMIT for total in exact):
        # `_narrow` raises for a sum that does not fit.
        return pa.array(
            [total if is_there else None for total, is_there in zip(exact, there, strict=True)],
            pa.decimal128(38, 0),
        )
    return pa.array(np.array(exact, dtype=np.int64), mask=~there)


def _add_pairs(name: str, before: pa.Array, now: pa.Array) -> pa.Array:
    kind = now.type
    if pa.types.is_integer(kind):
        try:
            return pc.add_checked(before.cast(pa.int64()), now.cast(pa.int64()))
        except pa.ArrowInvalid as error:
            raise AggregateOverflow(name, kind) from error
    if pa.types.is_decimal(kind):
        wide = pa.decimal256(kind.precision, kind.scale)
        return pc.add(before.cast(wide), now.cast(wide))
    if pa.types.is_floating(kind):
        return pc.add(before.cast(pa.float64()), now.cast(pa.float64()))
    return pc.add(before, now)


def _narrow(name: str, sums: pa.Array, kind: pa.DataType) -> pa.Array:
    if sums.type == kind:
        return sums
    try:
        return sums.cast(kind)
    except pa.ArrowInvalid as error:
        raise AggregateOverflow(name, kind) from error


def _aggregate_groups(values: pa.Array, groups: Array, function: str, count: int) -> pa.Array:
    """Return an aggregate per group, by the group's number; nulls are skipped."""
    table = pa.table([pa.array(groups), values], names=["group", "value"])
    found = table.group_by("group", use_threads=False).aggregate([("value", function)])
    numbers, column = (found.column(at).combine_chunks() for at in (0, 1))
    ordered = numbers.to_numpy()
    if len(ordered) != count:
        raise ValueError(f"expected {count} groups, found {len(ordered)}")
    if np.array_equal(ordered, np.arange(count)):
        return column
    places = np.empty(count, dtype=np.int64)
    places[ordered] = np.arange(count)
    return column.take(pa.array(places))


def _set_nan(values: pa.Array, is_nan: pa.Array) -> pa.Array:
    if not pc.any(is_nan).as_py():
        return values
    return pc.if_else(pc.fill_null(is_nan, False), pa.scalar(float("nan"), values.type), values)


AGGREGATE = "aggregate"


class ColumnAggregation(ABC):
    @abstractmethod
    def state_type(self) -> str:
        """Return the type of the state per key, as DDL."""

    @abstractmethod
    def fold(self, batch: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        """Return the columns of the partial rows of elements; see :func:`combine`."""

    @abstractmethod
    def fold_partials(self, partials: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        """Return the columns of one partial row per group of partial rows."""

    @abstractmethod
    def add(self, exists: Array, before: Sequence[pa.Array], now: Sequence[pa.Array]) -> list[pa.Array]:
        """Return the columns of the state before combined with the new partial rows."""

    @property
    @abstractmethod
    def names(self) -> list[str]: ...

    #: Whether it calls a function of the user.
    has_function: ClassVar[bool] = False

    def open(self, uid: str, max_parallelism: int) -> None:
        """Open the user's function, if any; called once per copy, before and after the shuffle."""

    def close(self) -> None:
        """Close it."""


def combine(
    aggregation: ColumnAggregation, batch: pa.RecordBatch, groups: Array, first: Array
) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(aggregation.fold(batch, groups, first), names=aggregation.names)


def merge(
    aggregation: ColumnAggregation, partials: pa.RecordBatch, index: KeyIndex, state: ColumnarState
) -> pa.RecordBatch:
    """Add the partial rows of a key group's keys to their state; return the new state."""
    now = aggregation.fold_partials(partials, index.of_row, index.first)
    before = [state.column(at).cast(column.type) for at, column in enumerate(now)]
    columns = aggregation.add(state.exists, before, now)
    state.put(columns)
    return pa.RecordBatch.from_arrays(columns, names=aggregation.names)


class AggregateColumns(ColumnAggregation):
    """A table of aggregates: each column is a fold of one field."""

    def __init__(self, columns: Sequence[AggregateColumn], input_type: str) -> None:
        self._columns = tuple(columns)
        kinds = {field.name: type_text(field.dataType) for field in ElementType(input_type).fields}
        self._types = [_find_result_type(column, kinds) for column in self._columns]

    @property
    def names(self) -> list[str]:
        return [column.name for column in self._columns]

    def state_type(self) -> str:
        return _format_state_type(self.names, self._types)

    def fold(self, batch: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        found = []
        for one in self._columns:
            if one.field is None:
                values = pa.array(np.ones(batch.num_rows, dtype=bool))
            else:
                values = batch.column(one.field)
            found.append(fold_groups(one.fold, one.field or "", values, groups, first))
        return found

    def fold_partials(self, partials: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        found = []
        for at, one in enumerate(self._columns):
            fold = Fold.SUM if one.fold is Fold.COUNT else one.fold
            found.append(fold_groups(fold, one.field or "", partials.column(at), groups, first))
        return found

    def add(self, exists: Array, before: Sequence[pa.Array], now: Sequence[pa.Array]) -> list[pa.Array]:
        return [
            pc.if_else(pa.array(exists), old, new)
            if one.fold is Fold.FIRST
            else fold_pairs(one.fold, one.field or "", old, new)
            for one, old, new in zip(self._columns, before, now, strict=True)
        ]


class ExtremeElement(ColumnAggregation):
    """The element with the smallest or greatest value of a field (`min_by`, `max_by`)."""

    def __init__(self, choice: ElementChoice, input_type: str) -> None:
        self._choice, self._fields = choice, ElementType(input_type).fields
        kinds = {field.name: type_text(field.dataType) for field in self._fields}
        _find_result_type(AggregateColumn(choice.field, choice.fold, choice.field), kinds)
        self._at = self.names.index(choice.field)

    @property
    def names(self) -> list[str]:
        return [field.name for field in self._fields]

    def state_type(self) -> str:
        return _format_state_type(self.names, [type_text(field.dataType) for field in self._fields])

    def fold(self, batch: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        best = fold_groups(
            self._choice.fold, self._choice.field, batch.column(self._choice.field), groups, first
        )
        is_best = find_equal(batch.column(self._choice.field), best.take(pa.array(groups)))
        candidates = np.flatnonzero(is_best.to_numpy(zero_copy_only=False))
        places = first.copy()
        if self._choice.ties is Ties.FIRST:
            candidates = candidates[::-1]
        # Of several candidates of a group the last one written stays.
        places[groups[candidates]] = candidates
        taken = pa.array(places)
        return [batch.column(name).take(taken) for name in self.names]

    def fold_partials(self, partials: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        return self.fold(partials, groups, first)

    def add(self, exists: Array, before: Sequence[pa.Array], now: Sequence[pa.Array]) -> list[pa.Array]:
        old, new = before[self._at], now[self._at]
        best = fold_pairs(self._choice.fold, self._choice.field, old, new)
        if self._choice.ties is Ties.FIRST:
            keeps = find_equal(old, best)
        else:
            keeps = pc.invert(find_equal(new, best))
        keeps = pc.and_(keeps, pa.array(exists))
        return [pc.if_else(keeps, *pair) for pair in zip(before, now, strict=True)]


def make_element_aggregation(aggregate: ElementAggregate, input_type: str) -> ColumnAggregation:
    element = ElementType(input_type)
    if not element.has_fields:
        raise ConfigError(
            f"{aggregate.fold.value} of the field '{aggregate.field}' of elements of the type {input_type}",
            why="they have no fields",
            what_to_do="use reduce(), or give the elements a field",
        )
    if isinstance(aggregate, ElementChoice):
        return ExtremeElement(aggregate, input_type)
    kinds = {field.name: type_text(field.dataType) for field in element.fields}
    _find_result_type(AggregateColumn(aggregate.field, aggregate.fold, aggregate.field), kinds)
    folds = [aggregate.fold if name == aggregate.field else Fold.FIRST for name in kinds]
    columns = [AggregateColumn(name, fold, name) for name, fold in zip(kinds, folds, strict=True)]
    return AggregateColumns(columns, input_type)


class MergePartials(VectorizedProcessFunction):
    """The second step: merges the partial rows of a key group. `output` has the fields of results."""

    def __init__(
        self, aggregation: ColumnAggregation, ttl: StateTtl | None = None, output: T.StructType | None = None
    ) -> None:
        self._aggregation, self._ttl, self._output = aggregation, ttl, output

    #: A row has the latest time of its key's rows.
    event_time = C.TIME

    def open(self, context: RuntimeContext) -> None:
        context.get_state(ValueStateDescriptor(AGGREGATE, self._aggregation.state_type(), ttl=self._ttl))
        self._aggregation.open(context.uid, context.max_parallelism)

    def close(self) -> None:
        self._aggregation.close()

    def process_batch(self, batch: pa.RecordBatch, ctx: BatchContext) -> Iterable[pa.RecordBatch]:
        aggregation, output = self._aggregation, self._output
        merged = merge(aggregation, batch, ctx.index, ctx.state(AGGREGATE))
        times: list[pa.Array] = []
        if ctx.times is not None:
            times = [fold_groups(Fold.MAX, C.TIME, ctx.times, ctx.index.of_row, ctx.index.first)]
        columns, names = merged.columns, merged.schema.names
        if isinstance(aggregation, AggregatedRows) and output is not None:
            results = aggregation.results(merged)
            columns = RowWriter.of(output).write([result for result in results if result is not None])
            is_there = pa.array([result is not None for result in results], pa.bool_())
            times, names = [one.filter(is_there) for one in times], output.names
        own = [*names, C.TIME] if times else names
        return (pa.RecordBatch.from_arrays([*columns, *times], names=own),)


_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal")
_UNORDERED = ("array", "map", "struct")


def _find_result_type(column: AggregateColumn, kinds: dict[str, str]) -> str:
    if column.fold is Fold.COUNT and column.field is None:
        return "bigint"
    if column.field not in kinds:
        raise ConfigError(
            f"there is no field {column.field!r} for {column.fold.value}",
            why=describe_choices(list(kinds), str(column.field)),
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


def _format_state_type(names: Sequence[str], kinds: Sequence[str]) -> str:
    # A single column is stored as a scalar, not as a struct with one field.
    if len(kinds) == 1:
        return kinds[0]
    return ", ".join(f"{name_text(name)} {kind}" for name, kind in zip(names, kinds, strict=True))


class _RowAggregation(ColumnAggregation):
    """Keeps one row per key, computed by a function of the user."""

    has_function = True

    def __init__(self, function: Any, kept: StateType) -> None:
        self._function = function
        self._kept = ElementType(to_ddl(kept))
        self._form = RowForm([field.name for field in self._kept.fields])
        self._class = None if isinstance(kept, str) else kept
        #: Copies a result if the function may change it later.
        self._own = owner_of(state_type(AGGREGATE, kept))

    @property
    def names(self) -> list[str]:
        return [field.name for field in self._kept.fields]

    def state_type(self) -> str:
        fields = self._kept.fields
        return type_text(fields[0].dataType) if len(fields) == 1 else self._kept.stored_fields

    def fold_partials(self, partials: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        rows = self._rows([partials.column(name) for name in self.names])
        return self._columns(_fold_rows(rows, groups, len(first), as_it_is, self._merge))

    def add(self, exists: Array, before: Sequence[pa.Array], now: Sequence[pa.Array]) -> list[pa.Array]:
        pairs = zip(exists.tolist(), self._rows(before), self._rows(now), strict=True)
        return self._columns([self._merge(old, new) if is_there else new for is_there, old, new in pairs])

    def open(self, uid: str, max_parallelism: int) -> None:
        open_part(self._function, uid, max_parallelism)

    def close(self) -> None:
        close_part(self._function)

    @abstractmethod
    def _merge(self, first: Any, second: Any) -> Any: ...

    @cached_property
    def _element(self) -> Callable[[Any], Any]:
        if not self._kept.has_fields:
            return as_it_is
        gather, tuple_of = self._kept.gathering(), self._form.tuple_of
        return lambda row: gather(tuple_of(row))

    def _rows(self, columns: Sequence[pa.Array]) -> list[Any]:
        rows, made = _rows(self._kept, columns), maker_of(self._class)
        return rows if made is None else [made(row) for row in rows]

    def _columns(self, rows: Sequence[Any]) -> list[pa.Array]:
        has_fields = self._kept.has_fields
        spread = self._form.tuples(list(rows)) if has_fields else [(row,) for row in rows]
        columns = list(zip(*spread, strict=True)) or [()] * len(self._kept.fields)
        kinds = [arrow_type(field.dataType) for field in self._kept.fields]
        return [strict_array(column, kind) for column, kind in zip(columns, kinds, strict=True)]


class ReducedRows(_RowAggregation):
    def __init__(self, reduce: ReduceFunction | Callable[[Any, Any], Any], input_type: str) -> None:
        super().__init__(reduce, input_type)

    def fold(self, batch: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        return self.fold_partials(batch, groups, first)

    def _merge(self, first: Any, second: Any) -> Any:
        # The result is the next call's first argument, so it gets the elements' field names.
        made = getattr(self._function, "reduce", self._function)(first, second)
        return self._own(self._element(refuse_not_run(made, "reduce()")), first, second)


class AggregatedRows(_RowAggregation):
    """Accumulator of each key; :meth:`results` turns accumulators into results."""

    def __init__(self, aggregate: AggregateFunction, input_type: str, accumulator_type: StateType) -> None:
        super().__init__(aggregate, accumulator_type)
        self._input = ElementType(input_type)

    def fold(self, batch: pa.RecordBatch, groups: Array, first: Array) -> list[pa.Array]:
        rows = _rows(self._input, [batch.column(field.name) for field in self._input.fields])
        return self._columns(_fold_rows(rows, groups, len(first), self._begin, self._add))

    def results(self, merged: pa.RecordBatch) -> list[Any]:
        return [copy_if_mutable(self._function.get_result(made)) for made in self._rows(merged.columns)]

    def _begin(self, row: Any) -> Any:
        return self._add(copy_if_mutable(self._function.create_accumulator()), row)

    def _add(self, made: Any, row: Any) -> Any:
        return self._own(refuse_not_run(self._function.add(row, made), "add()"), made, row)

    def _merge(self, first: Any, second: Any) -> Any:
        return self._own(refuse_not_run(self._function.merge(first, second), "merge()"), first, second)


def _rows(element: ElementType, columns: Sequence[pa.Array]) -> list[Any]:
    gather = element.gathering()
    values = [to_values(column) for column in columns]
    return [gather(row) for row in zip(*values, strict=True)]


def _fold_rows(
    rows: Iterable[Any],
    groups: Array,
    count: int,
    begin: Callable[[Any], Any],
    add: Callable[[Any, Any], Any],
) -> list[Any]:
    made: list[Any] = [None] * count
    seen = [False] * count
    for group, row in zip(groups.tolist(), rows, strict=True):
        made[group] = add(made[group], row) if seen[group] else begin(row)
        seen[group] = True
    return made
