"""Functions over columns: the rows of many keys at once, with the state of these keys as columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa

from flinkish_spark.core.elements import OutputTag, Progress, TimeDomain
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.state.columnar import ColumnarState
from flinkish_spark.state.key_group import GroupState
from flinkish_spark.state.layered import Array, KeyIndex
from flinkish_spark.state.timers import BatchTimers

if TYPE_CHECKING:
    import pandas as pd

#: A batch of emitted rows.
Batch: TypeAlias = "pa.RecordBatch | pd.DataFrame"


@dataclass(frozen=True)
class BatchContext:
    """Given to the methods of a :class:`VectorizedProcessFunction`; valid only inside the call.

    Parameters
    ----------
    index
        The keys of the batch or of the timers: `index.of_row` is the number of each row's key, `index.keys`
        are the columns of the keys.
    times
        Event time of each row in milliseconds, null for a row without one; None if the stream has no event
        times. For timers their due times.
    progress
        Watermark and processing time of the micro-batch.
    watermark_ms
        The watermark in this call.
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
        """The times as a numpy array; None if a row has no time."""
        if self.times is None or self.times.null_count:
            return None
        found: Array = self.times.to_numpy()
        return found

    def state(self, name: str) -> ColumnarState:
        """Return the value state of that name, by key number; `numbers(absent=...)` stands for a default."""
        # One per call: a second one would not see the values that were put into the first one.
        if name not in self._states:
            found = self._group.columns(name, self.index, self.progress.processing_time_ms)
            self._states[name] = found
        return self._states[name]

    def output(self, tag: OutputTag, batch: Batch) -> None:
        """Emit a batch to a side output; it is dropped if no stream reads that."""
        self._sides.append((tag, batch))

    def register_event_time_timers(self, times_ms: Array | int, where: Array | None = None) -> None:
        """Register a timer for each key, or for the keys of the mask `where`; shape (keys,), bool.

        `times_ms` has milliseconds by the key's number, shape (keys,), or is one time for all keys.
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

    Rows of one key and channel are in their original order. For row by row work use a
    :class:`~flinkish_spark.KeyedProcessFunction`.

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

    #: Column of emitted batches with the rows' event time: milliseconds as LONG, or TIMESTAMP. It is removed
    #: if the declared output has no such field. None: rows have no event time, so no event-time operator can
    #: follow this one.
    event_time: ClassVar[str | None] = None

    @abstractmethod
    def process_batch(self, batch: pa.RecordBatch, ctx: BatchContext) -> Iterable[Batch] | None:
        """Process the rows of a key group's keys.

        Called in each micro-batch for a key group that has rows; after another operator once for the rows
        before the watermark and once for those behind it. Emits batches with the declared columns, in any
        order, or pandas frames, whose index is ignored and whose NaN is null.
        """

    def on_timers(self, domain: TimeDomain, ctx: BatchContext) -> Iterable[Batch] | None:
        """Process the timers of a key group that have become due together; defined by functions with timers.

        Called again while it registers timers that are already due. A timer that is deleted in the same call
        fires all the same.

        Parameters
        ----------
        domain
            Their clock.
        ctx
            Its rows are the timers, by time: `ctx.times` are their due times, `ctx.index` their keys.
        """
        raise NotImplementedError(
            f"timers are due that an earlier version of {type(self).__name__} registered: define on_timers() "
            "again; it may return ()"
        )


def has_timers(function: VectorizedProcessFunction) -> bool:
    return type(function).on_timers is not VectorizedProcessFunction.on_timers


def sum_by_key(index: KeyIndex, values: Array) -> Array:
    """Return the sum of each key's values, shape (keys,); integers are added exactly."""
    if values.dtype.kind == "f":
        return np.bincount(index.of_row, weights=values, minlength=len(index))
    ordered, begins = _sort_by_key(index)
    sums: Array = np.add.reduceat(values[ordered].astype(np.int64), begins)
    bound = float(np.abs(values.astype(np.float64)).sum())
    if bound >= 2.0**62:
        exact = [0] * len(index)
        for number, value in zip(index.of_row.tolist(), values.tolist(), strict=True):
            exact[number] += value
        if any(not -(1 << 63) <= total < 1 << 63 for total in exact):
            raise OverflowError("a sum of LONG values overflows 64 bits")
        return np.array(exact, dtype=np.int64)
    return sums


def greatest_by_key(index: KeyIndex, values: Array) -> Array:
    ordered, begins = _sort_by_key(index)
    return np.maximum.reduceat(values[ordered], begins)


def count_by_key(index: KeyIndex) -> Array:
    return np.bincount(index.of_row, minlength=len(index))


def _sort_by_key(index: KeyIndex) -> tuple[Array, Array]:
    """Return the stable order of rows by key, and where each key's rows begin."""
    ordered: Array = np.argsort(index.of_row, kind="stable")
    counts = np.bincount(index.of_row, minlength=len(index))
    return ordered, np.cumsum(counts) - counts
