"""Runner of windows that are folded by a function of the user, in one loop per key group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.elements import (
    LATE_RECORDS_DROPPED,
    MIN_WATERMARK_MS,
    OutputTag,
    Progress,
    TimeDomain,
    Timer,
    tag_name,
)
from flinkish_spark.core.iterators import USER_ERRORS, elements_of
from flinkish_spark.operators.columnar_windows import SessionWindows, find_last_ms, to_timestamps
from flinkish_spark.operators.process import ElementError, OperatorOutput, TimerError
from flinkish_spark.operators.window_contents import OPEN, Folding
from flinkish_spark.operators.window_loop import (
    ArrivedElements,
    LoopedWindows,
    OpenAlignedWindows,
    OpenSessions,
    OpenWindow,
    OpenWindows,
    StoredOpenWindows,
)
from flinkish_spark.operators.windowing import FiringContext, FunctionStates
from flinkish_spark.state.key_group import GroupLayout, GroupState
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.timers import Timers
from flinkish_spark.transport import columns as C
from flinkish_spark.types.arrow_types import as_schema
from flinkish_spark.types.rows import OutputError, RowReader, RowWriter
from flinkish_spark.types.to_python import Copier, copier_of, copy_if_mutable, to_values
from flinkish_spark.windows.functions import KeyAndWindowBounds, WindowBounds
from flinkish_spark.windows.time_window import NoEventTime, TimeWindow
from flinkish_spark.worker.runners import (
    GroupRunner,
    InputRows,
    OutputRows,
    RowShape,
    find_element_row,
    runs,
    select_side,
    write_rows,
)

#: Makes the error for the element or timer that caused an exception.
Blame = Callable[[Exception], ElementError | TimerError]


class SideRows:
    """Rows for side outputs, with the element or timer that emitted each of them."""

    def __init__(self) -> None:
        self._emitted = OperatorOutput()
        self._blame: dict[str, list[Blame]] = {}

    def put(self, tag: OutputTag, value: Any, time_ms: int | None, blame: Blame) -> None:
        name = tag_name(tag)
        self._emitted.side.setdefault(name, []).append((copy_if_mutable(value), time_ms))
        self._blame.setdefault(name, []).append(blame)

    def divide(self) -> None:
        self._emitted.side_before = {name: len(rows) for name, rows in self._emitted.side.items()}

    def write(self, write: Callable[[OperatorOutput], Iterable[OutputRows]]) -> list[OutputRows]:
        try:
            return list(write(self._emitted))
        except OutputError:
            for name, rows in self._emitted.side.items():
                for row, blame in zip(rows, self._blame[name], strict=True):
                    try:
                        list(write(OperatorOutput(side={name: [row]})))
                    except OutputError as error:
                        raise blame(error) from error
            raise


class WindowCalls:
    """Calls an opened window function that has declared no state."""

    def __init__(self, operator: LoopedWindows, states: KeyedStates) -> None:
        function = operator.function
        assert function is not None
        self._function, self._timers = function, Timers(states.scope)
        merges = isinstance(operator.windows, SessionWindows)
        of_function = FunctionStates(states.view_for_function(), states.view_for_function(), merges=merges)
        function.open(of_function)
        of_function.seal()
        self._firing = FiringContext(of_function, self._to_side, self._timers)

    def begin(self, watermark_ms: int, processing_time_ms: int, sides: SideRows) -> None:
        self._timers.watermark_ms, self._timers.processing_time_ms = watermark_ms, processing_time_ms
        self._sides = sides

    def fire(
        self, folding: Folding, window: OpenWindow, key: Any, take: Copier, blame: Blame
    ) -> Iterable[Any]:
        """Call the function for a window and clear the window; return the rows, none for an empty window."""
        self._blame = blame
        self._firing.window = TimeWindow(window.start_ms, window.end_ms)
        accumulator = window.accumulator
        result = None if accumulator is None else folding.result(accumulator)
        rows: list[Any] = []
        if result is not None:
            made = self._function.process(key, self._firing, folding.elements(result))
            rows = [] if made is None else list(map(take, elements_of(made)))
        self._function.clear(self._firing)
        return rows

    def _to_side(self, tag: OutputTag, value: Any, time_ms: int | None) -> None:
        self._sides.put(tag, value, time_ms, self._blame)


class ResultWriter:
    """Turns results into columns, with the checks for rows of any function."""

    def __init__(
        self, then: KeyAndWindowBounds | WindowBounds | None, output: T.StructType, clock: TimeDomain
    ) -> None:
        self._then, self._clock, self._writer = then, clock, RowWriter.of(output)
        #: Copies a result that the function might change after the call.
        self.take: Copier = copier_of(output)

    def write(
        self,
        windows: Sequence[OpenWindow],
        results: list[Any],
        key_columns: Sequence[pa.Array],
        keys: Sequence[Any],
    ) -> list[pa.Array]:
        """Return the column of times, followed by those of the results."""
        end_ms = np.array([one.end_ms for one in windows], dtype=np.int64)
        times = pa.array(find_last_ms(end_ms))
        try:
            if self._then is None:
                return [times, *self._writer.write(results)]
            columns = _to_columns(results)
            if columns is not None:
                start_ms = np.array([one.start_ms for one in windows], dtype=np.int64)
                key = pa.array([one.key for one in windows], pa.int64())
                with_key = type(self._then) is KeyAndWindowBounds
                own = [column.take(key) for column in key_columns] if with_key else []
                given = [*own, *columns, to_timestamps(start_ms), to_timestamps(end_ms)]
                return [times, *self._writer.write_columns(given)]
        except OutputError:
            pass  # Written one by one below, to find the window.
        rows = []
        for window, result in zip(windows, results, strict=True):
            made = [result]
            if self._then is not None:
                firing: Any = SimpleNamespace(window=TimeWindow(window.start_ms, window.end_ms))
                made = list(self._then.process(keys[window.key], firing, (result,)))
            try:
                self._writer.write(made)
            except OutputError as error:
                raise TimerError(make_timer(window, keys), self._clock, error) from error
            rows += made
        return [times, *self._writer.write(rows)]


def make_timer(window: OpenWindow, keys: Sequence[Any]) -> Timer:
    own = TimeWindow(window.start_ms, window.end_ms)
    return Timer(own.max_timestamp_ms, keys[window.key], own)


def _to_columns(results: Sequence[Any]) -> list[Sequence[Any]] | None:
    """Return results as columns; None if they do not all have the same form."""
    kinds = set(map(type, results))
    are_rows = {issubclass(kind, tuple) for kind in kinds}
    if are_rows == {False}:
        return [results]
    if are_rows == {True} and len(set(map(len, results))) == 1:
        return list(zip(*results, strict=True))
    return None


#: Input, side of the watermark, rows.
_Given = tuple[int, bool, pa.RecordBatch]


@runs(LoopedWindows)
class LoopedRunner(GroupRunner):
    """Runs :class:`~flinkish_spark.operators.window_loop.LoopedWindows`, which have one entry."""

    def __init__(self, operator: LoopedWindows, uid: str, max_parallelism: int, shape: RowShape) -> None:
        self.operator, self.shape = operator, shape
        states = KeyedStates(uid, max_parallelism)
        self.folding = operator.open(states)
        self.calls = None if operator.function is None else WindowCalls(operator, states)
        self.layout = GroupLayout.of(states, shape.key_types)
        self.counts: dict[str, int] = {}
        self.readers = [RowReader(one.fields, one.field_columns, one.key_columns) for one in shape.inputs]
        self.results = ResultWriter(operator.bounds, shape.outputs[0], operator.clock)
        self.write_emitted = partial(write_rows, shape, [RowWriter.of(fields) for fields in shape.outputs])

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutputRows]:
        self.counts = {}
        group.forget_timers()
        given: list[_Given] = []
        for is_before in (True, False):
            for at, (rows, shape) in enumerate(zip(inputs, self.shape.inputs, strict=True)):
                part = select_side(rows, shape, is_before=is_before)
                if part is not None:
                    given.append((at, is_before, part))
        hashes = [rows.column(C.KEY_HASH).to_numpy() for _, _, rows in given]
        keys = [[rows.column(name) for name in self.shape.inputs[at].key_columns] for at, _, rows in given]
        table = group.due_table(OPEN)
        limit_ms = progress.limits_ms[self.operator.clock]
        stored = table.select(np.concatenate([np.empty(0, dtype=np.int64), *hashes]), limit_ms)
        if not len(stored) and not given:
            return
        windows = StoredOpenWindows(table, stored, hashes, keys)
        yield from _GroupLoop(self, windows, group).run(given, progress)

    def find_row(self, inputs: InputRows, failure: ElementError) -> tuple[int, int]:
        return find_element_row(self.shape, inputs, failure)


class _GroupLoop:
    def __init__(self, runner: LoopedRunner, stored: StoredOpenWindows, group: GroupState) -> None:
        self._runner, self._stored, self._group = runner, stored, group
        windows, self._late_output = runner.operator.windows, runner.operator.late_output
        self._clock = windows.clock
        given = runner.folding, len(stored.index), group.timers.registered[self._clock]
        if isinstance(windows, SessionWindows):
            self._open: OpenWindows = OpenSessions(windows, *given)
        else:
            self._open = OpenAlignedWindows(windows, *given)
        columns = [to_values(column) for column in stored.index.keys]
        #: Keys by number, as functions see them.
        self._keys: Sequence[Any] = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        self._open.put(stored.windows(self._keys))
        #: Windows and their results, in order.
        self._fired: list[OpenWindow] = []
        self._results: list[Any] = []
        self._sides_out = SideRows()

    def run(self, given: Sequence[_Given], progress: Progress) -> list[OutputRows]:
        """Process the elements, then store the windows; return the rows."""
        before, behind = self._gather_elements(given, progress.processing_time_ms)
        is_by_event_time = self._clock is TimeDomain.EVENT_TIME
        if not is_by_event_time:
            self._fire(progress.processing_limit_ms, progress.watermark_before_ms, progress)
        self._add(before, progress.watermark_before_ms)
        if is_by_event_time:
            self._fire(progress.watermark_ms, progress.watermark_ms, progress)
        fired_before = len(self._fired)
        self._sides_out.divide()
        self._add(behind, progress.watermark_ms)
        if is_by_event_time and progress.drained_to_ms > progress.watermark_ms:
            self._fire(progress.drained_to_ms, progress.drained_to_ms, progress)
        # Write first, as in any operator, to name the field of a wrong row before state is stored.
        written = self._write_results(fired_before) + self._sides_out.write(self._runner.write_emitted)
        if self._stored.store(self._open.living(), self._keys):
            self._group.timers.registered[self._clock] = self._open.registered
        return written

    def _gather_elements(
        self, given: Sequence[_Given], processing_time_ms: int
    ) -> tuple[ArrivedElements | None, ArrivedElements | None]:
        """Return the elements before and behind the watermark; None if there are none."""
        parts: dict[bool, list[Any]] = {True: [], False: []}
        at = 0
        for number, is_before, rows in given:
            count = rows.num_rows
            if self._clock is TimeDomain.PROCESSING_TIME:
                times = pa.array(np.full(count, processing_time_ms))
            else:
                times = rows.column(C.TIME) if C.TIME in rows.schema.names else pa.nulls(count, pa.int64())
            keys = self._stored.arrived_key[at : at + count]
            parts[is_before].append((keys, times, self._runner.readers[number].records(rows)))
            at += count
        before, behind = (
            ArrivedElements(own, is_before=side) if own else None for side, own in parts.items()
        )
        return before, behind

    def _add(self, arrived: ArrivedElements | None, watermark_ms: int) -> None:
        if arrived is None:
            return
        # By processing time nothing is late.
        reached_ms = watermark_ms if self._clock is TimeDomain.EVENT_TIME else MIN_WATERMARK_MS
        late = self._open.add(arrived, reached_ms)
        if late and self._late_output is None:
            counts = self._runner.counts
            counts[LATE_RECORDS_DROPPED] = counts.get(LATE_RECORDS_DROPPED, 0) + len(late)
        elif self._late_output is not None:
            for at, value, time_ms in late:
                blame = partial(ElementError, at, arrived.is_before)
                self._sides_out.put(self._late_output, value, time_ms, blame)
        if len(arrived.times_ms) < len(arrived.keys):
            error = NoEventTime()
            raise ElementError(len(arrived.times_ms), arrived.is_before, error) from error

    def _fire(self, now_ms: int, watermark_ms: int, progress: Progress) -> None:
        due = self._open.take_due(now_ms)
        if not due:
            return
        calls, folding, take = self._runner.calls, self._runner.folding, self._runner.results.take
        fired, results, window = self._fired, self._results, due[0]
        try:
            if calls is not None:
                calls.begin(watermark_ms, progress.processing_time_ms, self._sides_out)
                for window in due:
                    blame = partial(self._make_timer_error, window)
                    results += calls.fire(folding, window, self._keys[window.key], take, blame)
                    fired += [window] * (len(results) - len(fired))
                return
            for window in due:
                accumulator = window.accumulator
                result = None if accumulator is None else folding.result(accumulator)
                if result is not None:
                    results.append(take(result))
                    fired.append(window)
        except USER_ERRORS as error:
            raise self._make_timer_error(window, error) from error

    def _make_timer_error(self, window: OpenWindow, error: BaseException) -> TimerError:
        return TimerError(make_timer(window, self._keys), self._clock, error)

    def _write_results(self, fired_before: int) -> list[OutputRows]:
        if not self._fired:
            return []
        shape, columns = self._runner.shape, self._stored.index.keys
        arrays = self._runner.results.write(self._fired, self._results, columns, self._keys)
        schema = shape.block_schemas[0]
        own = arrays if shape.with_times else arrays[1:]
        rows = as_schema(pa.RecordBatch.from_arrays(own, names=schema.names), schema)
        return list(OutputRows.divide(0, rows, fired_before))
