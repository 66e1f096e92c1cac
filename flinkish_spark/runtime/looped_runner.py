"""A key group's rows through windows that a function of the user's folds, in one loop over all elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from flinkish_spark.operators.element_windows import LATE_RECORDS_DROPPED
from flinkish_spark.operators.elements import MIN_WATERMARK_MS, TimeDomain
from flinkish_spark.operators.group_run import ElementFailed, Emitted, Progress, TimerFailed
from flinkish_spark.operators.group_state import GroupLayout, GroupState
from flinkish_spark.operators.key_index import Array
from flinkish_spark.operators.keyed_context import KeyedStates
from flinkish_spark.operators.looped_windows import OPEN, LoopedWindows
from flinkish_spark.operators.open_windows import Arrived, Late, OpenWindow, OpenWindows, open_windows
from flinkish_spark.operators.stored_windows import StoredWindows
from flinkish_spark.operators.table_codec import SlotForm, layout_of
from flinkish_spark.operators.window_forms import form_with_timers
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.arrow_rows import RowReader, RowWriter
from flinkish_spark.runtime.group_runners import (
    InputRows,
    OutRows,
    RowShape,
    row_of_element,
    rows_between,
    rows_written,
)
from flinkish_spark.runtime.looped_calls import SideRows, WindowCalls
from flinkish_spark.runtime.looped_results import Fired, ResultWriter, timer_of
from flinkish_spark.runtime.python_values import to_values
from flinkish_spark.runtime.row_blocks import as_schema
from flinkish_spark.runtime.taken_values import taken
from flinkish_spark.user_iterators import USER_ERRORS, elements_of
from flinkish_spark.windows.assigners import NoEventTime


class LoopedRunner:
    """Runs :class:`~flinkish_spark.operators.looped_windows.LoopedWindows`; it has one entry.

    A :class:`~flinkish_spark.runtime.group_runners.GroupRunner`. `counts` is what was counted in the last
    call, by name.
    """

    def __init__(self, operator: LoopedWindows, uid: str, max_parallelism: int, shape: RowShape) -> None:
        self.operator, self.shape = operator, shape
        states = KeyedStates(uid, max_parallelism)
        self.folding = operator.open(states)
        self.calls = None if operator.function is None else WindowCalls(operator, states)
        layout = GroupLayout.of(states, shape.key_types)
        self.layout = replace(layout, other_form=form_with_timers(operator, layout, shape.key_types))
        self.contents = layout_of(operator.contents, shape.key_types, SlotForm.KEY_AND_WINDOW)
        self.counts: dict[str, int] = {}
        self.readers = [RowReader(one.fields, one.field_columns, one.key_columns) for one in shape.inputs]
        self.results = ResultWriter(operator.bounds, shape.outputs[0], operator.clock)
        self._writers = [RowWriter.of(fields) for fields in shape.outputs]

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutRows]:
        """See :class:`~flinkish_spark.runtime.group_runners.GroupRunner`."""
        self.counts = {}
        given = list(self._given(inputs))
        hashes = [rows.column(C.KEY_HASH).to_numpy() for _, _, rows in given]
        keys = [[rows.column(name) for name in self.shape.inputs[at].key_columns] for at, _, rows in given]
        table = group.due_table(OPEN)
        limit_ms = progress.limits_ms[self.operator.clock]
        stored = table.select(np.concatenate([np.empty(0, dtype=np.int64), *hashes]), limit_ms)
        if not len(stored) and not given:
            return
        windows = StoredWindows(table, stored, self.contents, hashes, keys)
        yield from _GroupLoop(self, windows, group).run(given, progress)

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        """See :class:`~flinkish_spark.runtime.group_runners.GroupRunner`."""
        return row_of_element(self.shape, inputs, failure)

    def sides_written(self, emitted: Emitted) -> Iterator[OutRows]:
        """Yield what goes to side outputs as rows."""
        return rows_written(self.shape, self._writers, emitted)

    def _given(self, inputs: InputRows) -> Iterator[tuple[int, bool, pa.RecordBatch]]:
        """Yield input, side of the watermark and rows: those before it first, input by input."""
        for is_before in (True, False):
            for at, (rows, shape) in enumerate(zip(inputs, self.shape.inputs, strict=True)):
                part = rows_between(rows, shape, is_before=is_before)
                if part is not None:
                    yield at, is_before, part


#: Input, side of the watermark, rows.
_Given = tuple[int, bool, pa.RecordBatch]


class _GroupLoop:
    """A key group in one micro-batch."""

    def __init__(self, runner: LoopedRunner, stored: StoredWindows, group: GroupState) -> None:
        self._runner, self._stored, self._group = runner, stored, group
        operator = runner.operator
        self._clock, self._late_output = operator.clock, operator.late_output
        registered = group.timers.registered[self._clock]
        self._open: OpenWindows = open_windows(
            operator.windows, runner.folding, len(stored.index), registered
        )
        self._open.put(stored.windows())
        columns = [to_values(column) for column in stored.index.keys]
        #: Keys as functions see them, by their numbers.
        self._keys: Sequence[Any] = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        self._fired, self._sides_out = Fired(), SideRows()

    def run(self, given: Sequence[_Given], progress: Progress) -> list[OutRows]:
        """Work through the elements; what becomes of the windows is stored behind that."""
        before, behind = self._sides(given, progress.processing_time_ms)
        is_by_event_time = self._clock is TimeDomain.EVENT_TIME
        if not is_by_event_time:
            self._fire(progress.processing_limit_ms, progress.watermark_before_ms, progress)
        self._add(before, progress.watermark_before_ms)
        if is_by_event_time:
            self._fire(progress.watermark_ms, progress.watermark_ms, progress)
        self._fired.before = len(self._fired.windows)
        self._sides_out.divide()
        self._add(behind, progress.watermark_ms)
        if is_by_event_time and progress.drained_to_ms > progress.watermark_ms:
            self._fire(progress.drained_to_ms, progress.drained_to_ms, progress)
        # First, as of any operator: it names the field of a row that is not as it was declared.
        written = [*self._results(), *self._sides_out.written(self._write_sides)]
        if self._stored.store(self._open.living(), self._keys):
            self._group.timers.registered[self._clock] = self._open.registered
        return written

    # -- elements -----------------------------------------------------------------------------------
    def _sides(self, given: Sequence[_Given], processing_time_ms: int) -> tuple[_Side, _Side]:
        sides = _Side(is_before=True), _Side(is_before=False)
        numbers, at = self._stored.key_numbers(), 0
        for number, is_before, rows in given:
            side = sides[0] if is_before else sides[1]
            side.keys.append(numbers[at : at + rows.num_rows])
            side.values.append(self._runner.readers[number].records(rows))
            side.add_times(self._times(rows, processing_time_ms))
            at += rows.num_rows
        return sides

    def _times(self, rows: pa.RecordBatch, processing_time_ms: int) -> pa.Array:
        if self._clock is TimeDomain.PROCESSING_TIME:
            return pa.array(np.full(rows.num_rows, processing_time_ms))
        return rows.column(C.TIME) if C.TIME in rows.schema.names else pa.nulls(rows.num_rows, pa.int64())

    def _add(self, side: _Side, watermark_ms: int) -> None:
        if not side.keys:
            return
        # By processing time nothing is late.
        reached_ms = watermark_ms if self._clock is TimeDomain.EVENT_TIME else MIN_WATERMARK_MS
        arrived = side.arrived()
        late = self._open.add(arrived, reached_ms)
        if late:
            self._put_late(late, is_before=side.is_before)
        if len(arrived.times_ms) < len(arrived.keys):
            error = NoEventTime()
            raise ElementFailed(len(arrived.times_ms), side.is_before, error) from error

    def _put_late(self, late: Sequence[Late], *, is_before: bool) -> None:
        if self._late_output is None:
            counts = self._runner.counts
            counts[LATE_RECORDS_DROPPED] = counts.get(LATE_RECORDS_DROPPED, 0) + len(late)
            return
        for at, value, time_ms in late:
            self._sides_out.put(self._late_output, value, time_ms, partial(ElementFailed, at, is_before))

    # -- results ------------------------------------------------------------------------------------
    def _fire(self, now_ms: int, watermark_ms: int, progress: Progress) -> None:
        due = self._open.due(now_ms)
        if not due:
            return
        calls, window = self._runner.calls, due[0]
        try:
            if calls is not None:
                calls.begin(watermark_ms, progress.processing_time_ms, self._sides_out)
                for window in due:
                    self._call(calls, window)
                return
            result_of, take = self._runner.folding.result, self._runner.results.take
            windows, results = self._fired.windows, self._fired.results
            for window in due:
                accumulator = window.accumulator
                result = None if accumulator is None else result_of(accumulator)
                if result is not None:
                    results.append(result if take is None else take(result))
                    windows.append(window)
        except USER_ERRORS as error:
            raise self._failed(window, error) from error

    def _call(self, calls: WindowCalls, window: OpenWindow) -> None:
        """Call the function for a window, and then for its end."""
        fired, take = self._fired, self._runner.results.take or taken
        blame = partial(self._failed, window)
        rows = calls.rows(self._runner.folding, window, self._keys[window.key], blame)
        if rows is not None:
            fired.results.extend(map(take, elements_of(rows)))
            fired.windows += [window] * (len(fired.results) - len(fired.windows))
        calls.end()

    def _failed(self, window: OpenWindow, error: BaseException) -> TimerFailed:
        return TimerFailed(timer_of(window, self._keys), self._clock, error)

    def _results(self) -> Iterator[OutRows]:
        fired = self._fired
        if not fired.windows:
            return
        runner = self._runner
        times, *columns = runner.results.write(fired, self._stored.index.keys, self._keys)
        schema = runner.shape.block_schemas[0]
        arrays = [times, *columns] if runner.shape.with_times else columns
        rows = as_schema(pa.RecordBatch.from_arrays(arrays, names=schema.names), schema)
        yield from OutRows.divided(0, rows, fired.before)

    def _write_sides(self, emitted: Emitted) -> list[OutRows]:
        return list(self._runner.sides_written(emitted))


class _Side:
    """The elements on one side of the watermark, of all ways in."""

    def __init__(self, *, is_before: bool) -> None:
        self.is_before = is_before
        self.keys: list[Array] = []
        self.values: list[Iterator[Any]] = []
        self._times_ms: list[Array] = []
        self._has_all_times = True

    def add_times(self, times_ms: pa.Array) -> None:
        """Add the times of elements, up to the first that has none: the loop ends there."""
        if not self._has_all_times:
            return
        if times_ms.null_count:
            first = int(np.flatnonzero(times_ms.is_null().to_numpy(zero_copy_only=False))[0])
            times_ms, self._has_all_times = times_ms.slice(0, first), False
        self._times_ms.append(times_ms.to_numpy())

    def arrived(self) -> Arrived:
        """Return them."""
        keys = np.concatenate(self.keys).tolist()
        times_ms = np.concatenate(self._times_ms)
        return Arrived(keys, times_ms, chain.from_iterable(self.values), self.is_before)
