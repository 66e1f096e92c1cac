"""Functions over the rows of many keys at once, as columns, with the state of those keys beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa

from flinkish_spark.core.elements import OutputTag, Progress, TimeDomain
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.state.columnar import ColumnarState
from flinkish_spark.state.key_group import GroupState
from flinkish_spark.state.layered import Array, KeyIndex
from flinkish_spark.state.timers import BatchTimers

#: What is emitted.
Batch: TypeAlias = pa.RecordBatch | pd.DataFrame


@dataclass(frozen=True)
class BatchContext:
    """Given to the methods of a :class:`VectorizedProcessFunction`; valid only inside the call.

    Parameters
    ----------
    index
        The keys of the batch, or of the timers: `index.of_row` says which key each row has, `index.keys` are
        their columns.
    times
        Event time of each row in milliseconds, null for one that has none; None if the stream has none. Of
        timers when each was due.
    progress
        Watermark and processing time of the micro-batch.
    watermark_ms
        Where event time stands in this call.
    """

    index: KeyIndex
    times: pa.Array | None
    progress: Progress
    watermark_ms: int
    _group: GroupState
    _sides: list[tuple[OutputTag, Batch]]
    _timers: BatchTimers | None
    _states: dict[str, ColumnarState] = field(default_factory=dict)

    @property
    def times_ms(self) -> Array | None:
        """The same as numpy array; None if a row has none."""
        if self.times is None or self.times.null_count:
            return None
        found: Array = self.times.to_numpy()
        return found

    def state(self, name: str) -> ColumnarState:
        """Return the value state of that name, by key number; `numbers(absent=...)` stands for a default."""
        # One for all who ask in a call: a second one would not know of what the first one has put.
        if name not in self._states:
            found = self._group.columns(name, self.index, self.progress.processing_time_ms)
            self._states[name] = found
        return self._states[name]

    def output(self, tag: OutputTag, batch: Batch) -> None:
        """Emit a batch to a side output; dropped if nobody reads that."""
        self._sides.append((tag, batch))

    def register_event_time_timers(self, times_ms: Array | int, where: Array | None = None) -> None:
        """Register a timer for each key.

        Parameters
        ----------
        times_ms
            When, in milliseconds, by the key's number: shape (keys,), or one time for all.
        where
            Which keys get one, shape (keys,), bool; all by default.

        Raises
        ------
        TypeError
            Times are no whole numbers, or the function has no `on_timers`.
        """
        self._own_timers().register(TimeDomain.EVENT_TIME, self.index, times_ms, where)

    def register_processing_time_timers(self, times_ms: Array | int, where: Array | None = None) -> None:
        """Register a timer for each key, by processing time; see :meth:`register_event_time_timers`."""
        self._own_timers().register(TimeDomain.PROCESSING_TIME, self.index, times_ms, where)

    def delete_event_time_timers(self, times_ms: Array | int, where: Array | None = None) -> None:
        """Delete the timer of each key with that time; one that is not there is no error."""
        self._own_timers().delete(TimeDomain.EVENT_TIME, self.index, times_ms, where)

    def delete_processing_time_timers(self, times_ms: Array | int, where: Array | None = None) -> None:
        """Delete the timer of each key with that time; one that is not there is no error."""
        self._own_timers().delete(TimeDomain.PROCESSING_TIME, self.index, times_ms, where)

    def _own_timers(self) -> BatchTimers:
        if self._timers is None:
            raise TypeError("a function with timers has the method on_timers(domain, ctx)")
        return self._timers


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

    #: The column of emitted batches that holds their rows' event time: milliseconds as LONG, or TIMESTAMP.
    #: It is taken off where the declared output has no such field. None: rows have no event time, and
    #: operators that go by it cannot stand behind this one.
    event_time: ClassVar[str | None] = None

    @abstractmethod
    def process_batch(self, batch: pa.RecordBatch, ctx: BatchContext) -> Iterable[Batch] | None:
        """Process the rows of a key group's keys.

        Called in every micro-batch for a key group that has rows; behind another operator once for those
        before the watermark and once for those behind it. Emits batches with the declared columns, in any
        order, or frames of pandas: their index is no column, and NaN in them is null.
        """

    def on_timers(self, domain: TimeDomain, ctx: BatchContext) -> Iterable[Batch] | None:
        """Process the timers of a key group that have become due together; defined by functions with timers.

        Called again as long as it registers timers that are due at once. A timer that another one of the same
        call deletes fires all the same.

        Parameters
        ----------
        domain
            Their clock.
        ctx
            Its rows are the timers, by time: `ctx.times` says when each was due, `ctx.index` whose it is.
        """
        raise NotImplementedError(
            f"timers are due that {type(self).__name__} registered when it had an on_timers(): define that "
            "again; it may return ()"
        )


def has_timers(function: VectorizedProcessFunction) -> bool:
    return type(function).on_timers is not VectorizedProcessFunction.on_timers


def sum_by_key(index: KeyIndex, values: Array) -> Array:
    """Return the sum of each key's values; shape (keys,), exact for integers."""
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


def greatest_by_key(index: KeyIndex, values: Array) -> Array:
    ordered, begins = _runs(index)
    greatest: Array = np.maximum.reduceat(values[ordered], begins)
    return greatest


def count_by_key(index: KeyIndex) -> Array:
    counted: Array = np.bincount(index.of_row, minlength=len(index))
    return counted


def _runs(index: KeyIndex) -> tuple[Array, Array]:
    """Return the rows ordered by key, rows of one key in their order, and where each key's begin."""
    ordered: Array = np.argsort(index.of_row, kind="stable")
    counts = np.bincount(index.of_row, minlength=len(index))
    return ordered, np.cumsum(counts) - counts
