"""Operators over changelogs, whose elements insert or retract rows: aggregates and upserts.

An aggregate emits its former result as -U and its new one as +U; +I for the first row of a key, -D after the
last one is retracted, and nothing if the result is unchanged. This is Flink's group aggregate.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.core.changelogs import ROW_KIND, RowKind
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.functions.aggregates import AggregateColumn, Fold
from flinkish_spark.functions.keyed import AggregateFunction
from flinkish_spark.operators.aggregates import make_value_fold
from flinkish_spark.operators.context import FunctionContext, close_part, open_part
from flinkish_spark.operators.process import KeyedStreamOperator
from flinkish_spark.state.descriptors import MapStateDescriptor, StateTtl, ValueStateDescriptor
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.timers import Timers
from flinkish_spark.types.ddl import ddl_of
from flinkish_spark.types.hints import StateType
from flinkish_spark.types.to_python import copy_if_mutable, copy_result

_KINDS: Mapping[str, RowKind] = {kind.value: kind for kind in RowKind}


def parse_kind(value: Any) -> RowKind:
    kind = _KINDS.get(value)
    if kind is None:
        raise ValueError(f"{value!r} is no row kind: {', '.join(_KINDS)}")
    return kind


def _diff(before: Any, after: Any) -> Iterable[Any]:
    """Return the changelog rows from one result to another; None is no result."""
    if before == after:
        return ()
    if before is None:
        return (_add_kind(after, RowKind.INSERT),)
    if after is None:
        return (_add_kind(before, RowKind.DELETE),)
    return _add_kind(before, RowKind.UPDATE_BEFORE), _add_kind(after, RowKind.UPDATE_AFTER)


def _add_kind(row: Any, kind: RowKind) -> Any:
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        row = {one.name: getattr(row, one.name) for one in dataclasses.fields(row)}
    elif hasattr(row, "asDict"):
        row = row.asDict()
    if isinstance(row, Mapping):
        return {**row, ROW_KIND: kind.value}
    return (*row, kind.value)


class RetractingFold(ABC):
    """One aggregate column over the current rows of a key."""

    #: DDL types of its fields in the operator's state, and their values without any row.
    kept: tuple[str, ...]
    nothing: tuple[Any, ...]

    def open(self, states: KeyedStates) -> None:
        """Declare further states, if it needs any."""

    @abstractmethod
    def add(self, kept: Sequence[Any], value: Any, count: int) -> tuple[Any, ...]:
        """Return the state after a row was inserted (1) or retracted (-1)."""

    def result(self, kept: Sequence[Any]) -> Any:
        return kept[0]

    def clear(self) -> None:
        """Clear the state of a key without rows."""


class RetractingCount(RetractingFold):
    kept = ("LONG",)
    nothing = (0,)

    def add(self, kept: Sequence[Any], value: Any, count: int) -> tuple[Any, ...]:
        return (kept[0] + (0 if value is None else count),)


class RetractingSum(RetractingFold):
    """The sum of the values; null if there are none."""

    def __init__(self, name: str, kind: T.DataType) -> None:
        self._add = make_value_fold(Fold.SUM, name, kind)
        self._is_float = isinstance(kind, T.FloatType | T.DoubleType)
        #: The sum, the number of values, and the numbers of NaN, +inf and -inf. These are not in the sum,
        #: from which they could not be subtracted again.
        self.kept = (kind.simpleString(), *["LONG"] * (4 if self._is_float else 1))
        self.nothing = (None, *[0] * (len(self.kept) - 1))

    def add(self, kept: Sequence[Any], value: Any, count: int) -> tuple[Any, ...]:
        if value is None:
            return tuple(kept)
        total, number, *others = kept
        if self._is_float and not math.isfinite(value):
            at = 0 if math.isnan(value) else 1 if value > 0 else 2
            others[at] += count
            return (total, number + count, *others)
        number += count
        if number - sum(others) == 0:
            # Drop the rounding error of the float sum.
            return (None, number, *others)
        # Not a minus, which rounds a Decimal to the precision of the thread's context.
        negative = value.copy_negate() if isinstance(value, Decimal) else -value
        return (self._add(total, value if count > 0 else negative), number, *others)

    def result(self, kept: Sequence[Any]) -> Any:
        total, number, *others = kept
        if not number:
            return None
        nans, above, below = others if self._is_float else (0, 0, 0)
        if nans or (above and below):
            return math.nan
        return math.inf if above else -math.inf if below else total


class RetractingExtreme(RetractingFold):
    """Minimum or maximum of the values; keeps each value with its number of occurrences."""

    def __init__(self, fold: Fold, kind: T.DataType, number: int, ttl: StateTtl | None) -> None:
        self._better = make_value_fold(fold, "", kind)
        self._is_float = isinstance(kind, T.FloatType | T.DoubleType)
        self.kept, self.nothing = (kind.simpleString(), "LONG"), (None, 0)
        # NaN does not equal itself, so it could not be found as a map key.
        key = "STRING" if self._is_float else kind.simpleString()
        self._descriptor = MapStateDescriptor(f"values-{number}", key, "LONG", ttl)

    def open(self, states: KeyedStates) -> None:
        self._values = states.get_map_state(self._descriptor)

    def add(self, kept: Sequence[Any], value: Any, count: int) -> tuple[Any, ...]:
        best, number = kept
        if value is None:
            return tuple(kept)
        key = self._key(value)
        left = (self._values.get(key) or 0) + count
        if left == 0:
            self._values.remove(key)
        else:
            self._values.put(key, left)
        number += count
        if count > 0:
            return (value if number == 1 else self._better(best, value), number)
        if left > 0 or key != self._key(best):
            return (best, number)
        best = None
        for one in self._values:
            found = float(one) if self._is_float else one
            best = found if best is None else self._better(best, found)
        return (best, number)

    def _key(self, value: Any) -> Any:
        if not self._is_float or value is None:
            return value
        return repr(float(value) + 0.0)

    def clear(self) -> None:
        self._values.clear()


def make_retracting_fold(
    column: AggregateColumn, fields: T.StructType, number: int, ttl: StateTtl | None
) -> tuple[RetractingFold, T.DataType]:
    if column.field is None and column.fold is Fold.COUNT:
        return RetractingCount(), T.LongType()
    if column.field not in fields.names:
        raise ConfigError(
            f"the aggregate '{column.name}' is of the field {column.field!r}, which the stream does not have",
            what_to_do=f"choose among {', '.join(fields.names)}",
        )
    kind = fields[str(column.field)].dataType
    match column.fold:
        case Fold.COUNT:
            return RetractingCount(), T.LongType()
        case Fold.SUM if isinstance(kind, T.NumericType):
            return RetractingSum(column.name, kind), kind
        case Fold.MIN | Fold.MAX if isinstance(kind, T.AtomicType):
            return RetractingExtreme(column.fold, kind, number, ttl), kind
    raise ConfigError(
        f"the aggregate '{column.name}' is Fold.{column.fold.name} of a field of type {kind.simpleString()}",
        why="rows of a changelog can be taken back, and come in no order of their own",
        what_to_do="take COUNT, SUM of numbers, or MIN or MAX of values that can be compared",
    )


class ChangelogFoldOperator(KeyedStreamOperator):
    """Aggregates fields over the current rows of each key; emits a changelog."""

    def __init__(
        self,
        kind_at: int,
        key_at: Sequence[int],
        folds: Sequence[tuple[RetractingFold, int | None]],
        ttl: StateTtl | None,
    ) -> None:
        self._kind_at = kind_at
        self._key_at, self._folds = tuple(key_at), tuple(folds)
        kinds = ["LONG", *(kind for fold, _ in folds for kind in fold.kept)]
        fields = ", ".join(f"f{at} {kind}" for at, kind in enumerate(kinds))
        self._descriptor = ValueStateDescriptor("folded", fields, ttl=ttl)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        self._state = states.get_state(self._descriptor)
        for fold, _ in self._folds:
            fold.open(states)

    def process_element(self, value: Any, context: FunctionContext) -> Iterable[Any]:
        kept, count = self._state.value(), -1 if parse_kind(value[self._kind_at]).is_retraction else 1
        if kept is None and count < 0:
            # A retraction of an unknown row.
            return ()
        kept = tuple(kept) if kept is not None else (0, *(v for fold, _ in self._folds for v in fold.nothing))
        key = tuple(value[at] for at in self._key_at)
        before = self._row(key, kept)
        now = [kept[0] + count]
        for fold, mine, at in self._parts(kept):
            now += fold.add(mine, 1 if at is None else value[at], count)
        if now[0] > 0:
            self._state.update(tuple(now))
        else:
            self._state.clear()
            for fold, _ in self._folds:
                fold.clear()
        return _diff(before, self._row(key, now))

    def _parts(self, kept: Sequence[Any]) -> Iterable[tuple[RetractingFold, Sequence[Any], int | None]]:
        begin = 1
        for fold, at in self._folds:
            end = begin + len(fold.kept)
            yield fold, kept[begin:end], at
            begin = end

    def _row(self, key: tuple[Any, ...], kept: Sequence[Any]) -> tuple[Any, ...] | None:
        if kept[0] <= 0:
            return None
        return (*key, *(fold.result(mine) for fold, mine, _ in self._parts(kept)))


class ChangelogAggregateOperator(KeyedStreamOperator):
    """Runs an AggregateFunction over the current rows of each key; emits a changelog."""

    def __init__(
        self, kind_at: int, aggregate: AggregateFunction, accumulator_type: StateType, ttl: StateTtl | None
    ) -> None:
        self._kind_at = kind_at
        self._aggregate: Any = aggregate
        self._descriptors = (
            ValueStateDescriptor("accumulator", accumulator_type, ttl=ttl),
            ValueStateDescriptor("rows", "LONG", ttl=ttl),
        )

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        open_part(self._aggregate, states.uid, states.max_parallelism)
        self._accumulator, self._rows = map(states.get_state, self._descriptors)

    def process_element(self, value: Any, context: FunctionContext) -> Iterable[Any]:
        is_retraction = parse_kind(value[self._kind_at]).is_retraction
        rows, accumulator = self._rows.value() or 0, self._accumulator.value()
        if not rows:
            if is_retraction:
                return ()
            before, accumulator = None, copy_if_mutable(self._aggregate.create_accumulator())
        else:
            # A copy: the function may change the accumulator in place, and the result may be a part of it.
            before = copy_if_mutable(self._aggregate.get_result(accumulator))
        change = self._aggregate.retract if is_retraction else self._aggregate.add
        accumulator = copy_result(change(value, accumulator), accumulator, value)
        rows += -1 if is_retraction else 1
        if not rows:
            self._accumulator.clear()
            self._rows.clear()
            return _diff(before, None)
        after = self._aggregate.get_result(accumulator)
        self._accumulator.update(accumulator)
        self._rows.update(rows)
        return _diff(before, after)

    def close(self) -> None:
        close_part(self._aggregate)


class NormalizeOperator(KeyedStreamOperator):
    """Completes upserts to a changelog, like Flink's ChangelogNormalize.

    Emits the replaced row as -U, nothing for an unchanged row, all fields of a deleted row, and nothing for
    the deletion of an unknown key.
    """

    def __init__(self, kind_at: int, fields: T.StructType, ttl: StateTtl | None) -> None:
        self._kind_at = kind_at
        own = T.StructType([one for at, one in enumerate(fields) if at != kind_at])
        self._descriptor = ValueStateDescriptor("row", ddl_of(own), ttl=ttl)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        self._state = states.get_state(self._descriptor)

    def process_element(self, value: Any, context: FunctionContext) -> Iterable[Any]:
        at, kept = self._kind_at, self._state.value()
        before = None if kept is None else tuple(kept)
        if parse_kind(value[at]).is_retraction:
            self._state.clear()
            return self._restore_kind_position(_diff(before, None))
        row = (*value[:at], *value[at + 1 :])
        self._state.update(row)
        return self._restore_kind_position(_diff(before, row))

    def _restore_kind_position(self, rows: Iterable[Any]) -> Iterable[Any]:
        return tuple((*row[: self._kind_at], row[-1], *row[self._kind_at : -1]) for row in rows)
