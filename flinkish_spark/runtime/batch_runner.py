"""A key group's rows through a vectorised function: columns all the way.

The order is that of :mod:`flinkish_spark.operators.group_run`: timers by processing time, rows before the
watermark, timers by event time, rows behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from flinkish_spark.operators.batch_timers import BatchTimers
from flinkish_spark.operators.elements import OutputTag, TimeDomain
from flinkish_spark.operators.group_run import ElementFailed, Progress
from flinkish_spark.operators.group_state import GroupLayout, GroupState
from flinkish_spark.operators.key_index import KeyIndex
from flinkish_spark.operators.keyed_context import KeyedStates
from flinkish_spark.operators.vectorized import Batch, BatchContext, VectorizedProcessFunction, has_timers
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.arrow_rows import OutputError
from flinkish_spark.runtime.emitted_columns import batch_of, declared_column, event_times
from flinkish_spark.runtime.group_runners import InputRows, InputShape, OutRows, RowShape
from flinkish_spark.runtime.row_blocks import BEHIND
from flinkish_spark.user_iterators import called, elements_of

#: Opens the name of a part of the key; no field has such a name.
_KEY = f"{C.PREFIX}key_"


class BatchRunner:
    """Runs a :class:`VectorizedProcessFunction`; it has one entry.

    A :class:`~flinkish_spark.runtime.group_runners.GroupRunner`.
    """

    def __init__(
        self, function: VectorizedProcessFunction, uid: str, max_parallelism: int, shape: RowShape
    ) -> None:
        self._function, self._shape = function, shape
        states = KeyedStates(uid, max_parallelism)
        function.open(states)
        self.layout = GroupLayout.of(states, shape.key_types)
        self.counts: dict[str, int] = {}
        self._is_timed = any(C.TIME in one.schema.names for one in shape.inputs)

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutRows]:
        """See :class:`~flinkish_spark.runtime.group_runners.GroupRunner`."""
        before, behind = (self._side(inputs, is_before=is_before) for is_before in (True, False))
        timers = self._timers([one for one in (before, behind) if one is not None], group, progress)
        call = _Calls(self._function, self._shape, group, progress, timers)
        yield from call.fire(TimeDomain.PROCESSING_TIME, progress.processing_limit_ms)
        yield from self._rows(call, before)
        # This order matters: the watermark stands before the timers fire that it makes due.
        call.watermark_ms = progress.watermark_ms
        yield from call.fire(TimeDomain.EVENT_TIME, progress.watermark_ms)
        call.first = BEHIND
        yield from self._rows(call, behind)
        if progress.drained_to_ms > progress.watermark_ms:
            call.watermark_ms = progress.drained_to_ms
            yield from call.fire(TimeDomain.EVENT_TIME, progress.drained_to_ms)
        if timers is not None:
            group.timers.replace(timers.queues, timers.hash_of)

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        """See :class:`~flinkish_spark.runtime.group_runners.GroupRunner`; there are no elements."""
        return 0, failure.at

    def _side(self, inputs: InputRows, *, is_before: bool) -> pa.RecordBatch | None:
        """Return the rows of all ways in on one side of the watermark; None without any."""
        parts = []
        for rows, shape in zip(inputs, self._shape.inputs, strict=True):
            places = () if rows is None else shape.places(rows, is_before=is_before)
            if rows is not None and len(places):
                whole = len(places) == rows.num_rows
                parts.append(self._named(rows if whole else rows.take(pa.array(places)), shape))
        if len(parts) < 2:
            return parts[0] if parts else None
        return pa.concat_batches(parts)

    def _named(self, rows: pa.RecordBatch, shape: InputShape) -> pa.RecordBatch:
        """Return the rows of one way with the names that they have on all ways."""
        columns = {C.KEY_HASH: rows.column(C.KEY_HASH)}
        if self._is_timed:
            is_timed = C.TIME in rows.schema.names
            columns[C.TIME] = rows.column(C.TIME) if is_timed else pa.nulls(rows.num_rows, pa.int64())
        columns |= {f"{_KEY}{at}": rows.column(name) for at, name in enumerate(shape.key_columns)}
        columns |= {
            name: rows.column(column) for name, column in zip(shape.fields, shape.field_columns, strict=True)
        }
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _timers(
        self, sides: Sequence[pa.RecordBatch], group: GroupState, progress: Progress
    ) -> BatchTimers | None:
        """Return the timers of the keys that have rows, and of those whose timers are due."""
        hashes = [group.timers.due(domain, limit_ms) for domain, limit_ms in progress.limits_ms.items()]
        # Of a function without timers an earlier version may have had some: they would be due for ever.
        if not has_timers(self._function) and not any(map(len, hashes)):
            return None
        hashes += [one.column(C.KEY_HASH).to_numpy() for one in sides]
        queues = group.timers.select(np.unique(np.concatenate(hashes)))
        return BatchTimers(queues, group.timers.hash_of, self.layout.timers[TimeDomain.EVENT_TIME].keys)

    def _rows(self, call: _Calls, rows: pa.RecordBatch | None) -> Iterator[OutRows]:
        if rows is None:
            return
        keys = [rows.column(f"{_KEY}{at}") for at in range(len(self._shape.key_types))]
        index = KeyIndex.of(rows.column(C.KEY_HASH).to_numpy(), keys)
        times = rows.column(C.TIME) if self._is_timed else None
        batch = rows.select(list(self._shape.inputs[0].fields))
        context = call.context(index, times)
        yield from call.emitted(called(self._function.process_batch)(batch, context), context)


class _Calls:
    """The calls of a function in one micro-batch, and what it emits in them."""

    def __init__(
        self,
        function: VectorizedProcessFunction,
        shape: RowShape,
        group: GroupState,
        progress: Progress,
        timers: BatchTimers | None,
    ) -> None:
        self._function, self._shape, self._group = function, shape, group
        self._progress, self._timers = progress, timers
        self.watermark_ms = progress.watermark_before_ms
        #: Sequence of the first row on this side of the watermark, and how many there are of each output.
        self.first = 0
        self._counts: dict[tuple[int, int], int] = {}
        self._sides = {name: side for side, name in enumerate(shape.side_names, start=1)}
        self._schemas = shape.block_schemas

    def fire(self, domain: TimeDomain, limit_ms: int) -> Iterator[OutRows]:
        """Call the function for timers as long as there are some that are due."""
        if self._timers is None:
            return
        while (due := self._timers.take_due(domain, limit_ms)) is not None:
            context = self.context(due[0], pa.array(due[1]))
            yield from self.emitted(called(self._function.on_timers)(domain, context), context)

    def context(self, index: KeyIndex, times: pa.Array | None) -> BatchContext:
        """Return what a call is given."""
        sides: list[tuple[OutputTag, Batch]] = []
        return BatchContext(index, times, self._progress, self.watermark_ms, self._group, sides, self._timers)

    def emitted(self, batches: Iterable[Batch] | None, context: BatchContext) -> Iterator[OutRows]:
        """Return what a call emits."""
        for batch in elements_of(batches or ()):
            yield self._numbered(0, self._as_declared(0, batch))
        for tag, batch in context._sides:
            # What is emitted to a side output that nobody reads is dropped, as in Flink.
            if (side := self._sides.get(tag.name)) is None:
                continue
            try:
                rows = self._as_declared(side, batch)
            except OutputError as error:
                raise OutputError(f"to the side output '{tag.name}': {error}") from error
            yield self._numbered(side, rows)

    def _numbered(self, side: int, rows: pa.RecordBatch) -> OutRows:
        at = (self.first, side)
        before = self._counts.get(at, 0)
        self._counts[at] = before + rows.num_rows
        return OutRows(side, self.first + before, rows)

    def _as_declared(self, side: int, rows: Any) -> pa.RecordBatch:
        """Return a batch as it was declared; of a wrong one say which row, and whose."""
        try:
            return self._checked(side, rows)
        except OutputError as error:
            if error.row is None:
                raise
            key = _key_of(rows, self._shape.inputs[0], error.row)
            raise OutputError(f"{error} (row {error.row} of the batch{key})", error.row) from error

    def _checked(self, side: int, rows: Any) -> pa.RecordBatch:
        """Return a batch as it was declared; columns are found by their names."""
        names = self._shape.outputs[side].names
        schema, fields = self._schemas[side], self._shape.outputs[side]
        kinds = dict(zip(names, schema.types[len(schema) - len(names) :], strict=True))
        if isinstance(rows, pd.DataFrame):
            rows = batch_of(rows, kinds)
        if not isinstance(rows, pa.RecordBatch):
            raise OutputError(
                f"emitted a {type(rows).__name__}; emit batches: pyarrow.RecordBatch or pandas.DataFrame"
            )
        given = dict(zip(rows.schema.names, rows.columns, strict=True))
        timed = (
            [event_times(given, self._function.event_time, rows.num_rows)] if self._shape.with_times else []
        )
        if self._function.event_time not in names:
            given.pop(self._function.event_time or "", None)
        if set(given) != set(names):
            raise OutputError(f"emitted the columns {', '.join(given)}, declared are {', '.join(names)}")
        own = [declared_column(field, given[field.name], kinds[field.name]) for field in fields]
        return pa.RecordBatch.from_arrays([*timed, *own], schema=schema)


def _key_of(rows: Batch, shape: InputShape, at: int) -> str:
    """Return a row's key for people, if an emitted batch has the columns of the key under their names."""
    name_of = dict(zip(shape.field_columns, shape.fields, strict=True))
    names = [name_of.get(column) for column in shape.key_columns]
    columns = list(rows.columns) if isinstance(rows, pd.DataFrame) else rows.schema.names
    if not names or any(name is None or columns.count(name) != 1 for name in names):
        return ""
    if isinstance(rows, pd.DataFrame):
        parts = [rows[name].iloc[at] for name in names]
    else:
        parts = [rows.column(name)[at].as_py() for name in names]
    key = parts[0] if len(parts) == 1 else tuple(parts)
    return f", key {key!r:.200}"
