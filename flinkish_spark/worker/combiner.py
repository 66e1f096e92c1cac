"""Partial aggregation before the shuffle: one row per key and task instead of one per record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.core.iterators import USER_ERRORS
from flinkish_spark.core.subtask import counting_as
from flinkish_spark.functions.aggregates import Fold
from flinkish_spark.operators.columnar_aggregates import (
    AggregateOverflow,
    ColumnAggregation,
    combine,
    fold_groups,
)
from flinkish_spark.operators.columnar_windows import WindowRules
from flinkish_spark.operators.context import close_with
from flinkish_spark.state.layered import Array, group_numbers, keys_rarely_repeat
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BEHIND
from flinkish_spark.windows.time_window import NoEventTime
from flinkish_spark.worker.keyed_operator import OperatorError


@dataclass(frozen=True)
class Combiner:
    """Makes partial rows for an operator that merges them; pickled into the plan."""

    aggregation: ColumnAggregation
    #: Columns copied from the first row of each key: control columns and the key. The event time is the
    #: latest one.
    kept: tuple[str, ...]
    #: The key's columns among them.
    keys: tuple[str, ...]
    #: Pairs of a column and the name of the field in it.
    fields: tuple[tuple[str, str], ...]

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return kept columns and partial aggregates: a row per key, or per row if keys rarely repeat."""
        # Rows before and behind the watermark are not combined: their results are on the same side.
        own = [rows.column(column) for column, _ in self.fields]
        batch = pa.RecordBatch.from_arrays(own, names=[name for _, name in self.fields])
        first = rows.select(list(self.kept))
        if keys_rarely_repeat(rows.column(C.KEY_HASH).to_numpy()):
            # Grouping would cost more than it saves after the shuffle.
            groups = places = np.arange(rows.num_rows)
        else:
            groups, places = group_numbers(_keys_and_sides(rows, self.keys))
            first = first.take(pa.array(places))
            if C.TIME in self.kept:
                latest = fold_groups(Fold.MAX, C.TIME, rows.column(C.TIME), groups, places)
                first = first.set_column(self.kept.index(C.TIME), C.TIME, latest)
        return _append_partials(first, combine(self.aggregation, batch, groups, places).columns)


@dataclass(frozen=True)
class WindowCombiner:
    """Combines rows into one per key, window slice (or part of a session) and task; pickled into the plan.

    Rows before and behind the watermark are not combined, since they are late by different watermarks.
    """

    #: Windows and aggregates.
    rules: WindowRules
    kept: tuple[str, ...]
    keys: tuple[str, ...]
    fields: tuple[tuple[str, str], ...]

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the kept columns, partial aggregates, numbers of elements, and last times."""
        own = [rows.column(column) for column, _ in self.fields]
        batch = pa.RecordBatch.from_arrays(own, names=[name for _, name in self.fields])
        keys = _keys_and_sides(rows, self.keys)
        parts, partials = self.rules.fold(batch, keys, self._times(rows))
        first = rows.select(list(self.kept)).take(pa.array(parts.first))
        if self.rules.is_by_event_time:
            first = first.set_column(self.kept.index(C.TIME), C.TIME, pa.array(parts.first_ms))
        counts = np.bincount(parts.of_row, minlength=len(parts.first))
        return _append_partials(first, [*partials, pa.array(counts), pa.array(parts.last_ms)])

    @property
    def aggregation(self) -> ColumnAggregation:
        return self.rules.aggregation

    def _times(self, rows: pa.RecordBatch) -> Array:
        if self.rules.windows.clock is TimeDomain.PROCESSING_TIME:
            return np.zeros(rows.num_rows, dtype=np.int64)
        if C.TIME not in rows.schema.names or rows.column(C.TIME).null_count:
            raise NoEventTime
        times: Array = rows.column(C.TIME).to_numpy()
        return times


@dataclass(frozen=True)
class CombinerStep:
    """Runs a combiner before the shuffle; reports its errors as those of the operator after the shuffle."""

    uid: str
    max_parallelism: int
    combine: Combiner | WindowCombiner
    #: Name under which its function's accumulators are counted; empty if they are not.
    counts_as: str = ""

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        try:
            with counting_as(self.counts_as):
                _ = self._opened
                return self.combine(rows)
        except USER_ERRORS as error:
            has_function = self.combine.aggregation.has_function
            if not isinstance(error, AggregateOverflow | NoEventTime) and not has_function:
                raise
            says = f"{type(error).__name__}: {error}"
            raise OperatorError.from_facts(uid=self.uid, error=says) from error

    @cached_property
    def _opened(self) -> ColumnAggregation:
        aggregation = self.combine.aggregation
        aggregation.open(self.uid, self.max_parallelism)
        close_with(self, aggregation, self.uid)
        return aggregation


def _keys_and_sides(rows: pa.RecordBatch, keys: Sequence[str]) -> list[pa.Array]:
    """Return the columns to group by: the key, and the side of the watermark if rows are on both."""
    columns = [rows.column(name) for name in keys]
    is_before = rows.column(C.SEQUENCE).to_numpy() < BEHIND
    if is_before.any() and not is_before.all():
        columns.append(pa.array(is_before))
    return columns


def _append_partials(first: pa.RecordBatch, partials: Sequence[pa.Array]) -> pa.RecordBatch:
    names = [*first.schema.names, *(f"p{at}" for at in range(len(partials)))]
    return pa.RecordBatch.from_arrays([*first.columns, *partials], names=names)
