"""Functions over the rows of many keys at once, as columns, with the state of those keys beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from flinkish_spark.functions import RichFunction
from flinkish_spark.operators.columnar_state import ColumnarState
from flinkish_spark.operators.group_run import Progress
from flinkish_spark.operators.group_state import GroupState
from flinkish_spark.operators.key_index import Array, KeyIndex


@dataclass(frozen=True)
class BatchContext:
    """Given to :meth:`VectorizedProcessFunction.process_batch`; valid only inside the call.

    Parameters
    ----------
    index
        The batch's keys: `index.of_row` says which key each row has, `index.keys` are their columns.
    times_ms
        Event time of each row; None if the stream has none.
    progress
        Watermark and processing time of the micro-batch.
    """

    index: KeyIndex
    times_ms: Array | None
    progress: Progress
    _group: GroupState

    def state(self, name: str) -> ColumnarState:
        """Return the value state of that name, by key number."""
        return self._group.columns(name, self.index, self.progress.processing_time_ms)


class VectorizedProcessFunction(RichFunction, ABC):
    """A keyed function that gets the rows of a micro-batch together, as columns.

    Rows of one key that came from one channel are in their order there. What has to be done row by row is
    better done in a :class:`~flinkish_spark.KeyedProcessFunction`.

    Examples
    --------
    >>> class Totals(VectorizedProcessFunction):
    ...     def open(self, context):
    ...         context.get_state(ValueStateDescriptor("total", "LONG"))
    ...     def process_batch(self, batch, ctx):
    ...         total, index = ctx.state("total"), ctx.index
    ...         sums = total.numbers() + sum_by_key(index, batch.column("amount").to_numpy())
    ...         total.put([sums])
    ...         yield pa.RecordBatch.from_arrays([*index.keys, pa.array(sums)], names=["user", "total"])
    """

    @abstractmethod
    def process_batch(self, batch: pa.RecordBatch, ctx: BatchContext) -> Iterable[pa.RecordBatch] | None:
        """Process the rows of a key group's keys.

        Called once per micro-batch and key group that has rows. Emits batches with the declared columns.
        """


def sum_by_key(index: KeyIndex, values: Array) -> Array:
    """Return the sum of each key's values; shape (keys,), exact for integers.

    Raises
    ------
    OverflowError
        A sum of integers leaves 64 bits.
    """
    if values.dtype.kind == "f":
        summed: Array = np.bincount(index.of_row, weights=values, minlength=len(index))
        return summed
    ordered, begins = _runs(index)
    sums: Array = np.add.reduceat(values[ordered].astype(np.int64), begins)
    bound = float(np.abs(values.astype(np.float64)).sum())
    if bound >= 2.0**62:
        exact = [0] * len(index)
        for number, value in zip(index.of_row.tolist(), values.tolist(), strict=True):
            exact[number] += value
        if any(not -(1 << 63) <= total < 1 << 63 for total in exact):
            raise OverflowError("a sum of LONG values leaves 64 bits")
        return np.array(exact, dtype=np.int64)
    return sums


def least_by_key(index: KeyIndex, values: Array) -> Array:
    """Return the least of each key's values; shape (keys,)."""
    ordered, begins = _runs(index)
    least: Array = np.minimum.reduceat(values[ordered], begins)
    return least


def greatest_by_key(index: KeyIndex, values: Array) -> Array:
    """Return the greatest of each key's values; shape (keys,)."""
    ordered, begins = _runs(index)
    greatest: Array = np.maximum.reduceat(values[ordered], begins)
    return greatest


def count_by_key(index: KeyIndex) -> Array:
    """Return how many rows each key has; shape (keys,)."""
    counted: Array = np.bincount(index.of_row, minlength=len(index))
    return counted


def _runs(index: KeyIndex) -> tuple[Array, Array]:
    """Return the rows ordered by key, rows of one key in their order, and where each key's begin."""
    ordered: Array = np.argsort(index.of_row, kind="stable")
    counts = np.bincount(index.of_row, minlength=len(index))
    return ordered, np.cumsum(counts) - counts


def split_by_key(index: KeyIndex) -> list[Any]:
    """Return for each key the places of its rows, in their order."""
    ordered, begins = _runs(index)
    return np.split(ordered, begins[1:])
