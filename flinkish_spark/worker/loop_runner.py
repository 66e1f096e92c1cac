"""A key group's rows through windows that a function of the user's folds, in one loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

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
from flinkish_spark.operators.columnar_windows import SessionWindows, last_of, timestamps
from flinkish_spark.operators.context import FunctionContext
from flinkish_spark.operators.process import ElementFailed, Emitted, TimerFailed
from flinkish_spark.operators.window_contents import OPEN, Folding
from flinkish_spark.operators.window_loop import (
    Arrived,
    Late,
    LoopedWindows,
    OpenWindow,
    OpenWindows,
    StoredWindows,
    open_windows,
)
from flinkish_spark.operators.windowing import FiringContext, FunctionStates, refuse_window_state
from flinkish_spark.state.descriptors import StateDescriptor
from flinkish_spark.state.key_group import GroupLayout, GroupState
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.layered import Array
from flinkish_spark.state.timers import Timers
from flinkish_spark.transport import columns as C
from flinkish_spark.types.arrow_types import as_schema
from flinkish_spark.types.rows import OutputError, RowReader, RowWriter
from flinkish_spark.types.to_python import Take, taken, taking, to_values
from flinkish_spark.windows.functions import WithKeyAndWindow, WithWindow
from flinkish_spark.windows.time_window import NoEventTime, TimeWindow
from flinkish_spark.worker.runners import (
    InputRows,
    OutRows,
    PartitionSide,
    RowShape,
    row_of_element,
    rows_between,
    rows_written,
    runs,
)

#: From an error to what says which element, or which timer, is to blame for it.
Blame = Callable[[Exception], ElementFailed | TimerFailed]


class SideRows:
    def __init__(self) -> None:
        self._emitted = Emitted()
        self._blame: dict[str, list[Blame]] = {}

    def put(self, tag: OutputTag, value: Any, time_ms: int | None, blame: Blame) -> None:
        name = tag_name(tag)
        self._emitted.side.setdefault(name, []).append((taken(value), time_ms))
        self._blame.setdefault(name, []).append(blame)

    def divide(self) -> None:
        self._emitted.side_before = {name: len(rows) for name, rows in self._emitted.side.items()}

    def written(self, write: Callable[[Emitted], list[OutRows]]) -> list[OutRows]:
        try:
            return write(self._emitted)
        except OutputError:
            for name, rows in self._emitted.side.items():
                for row, blame in zip(rows, self._blame[name], strict=True):
                    try:
                        write(Emitted(side={name: [row]}))
                    except OutputError as error:
                        raise blame(error) from error
            raise


class WindowCalls:
    """Calls an opened window function, which has asked for no state."""

    def __init__(self, operator: LoopedWindows, states: KeyedStates) -> None:
        function = operator.function
        assert function is not None
        self._function, self._timers = function, Timers(states.scope)
        merges = isinstance(operator.windows, SessionWindows)
        of_function = FunctionStates(
            states.of_function(), states.of_function(), refuse_window_state if merges else _any_window_state
        )
        function.open(of_function)
        of_function.seal()
        context = FunctionContext(states.scope, self._timers, self._to_side, _no_rows, _no_count)
        self._firing = FiringContext(of_function, context, self._timers)

    def begin(self, watermark_ms: int, processing_time_ms: int, sides: SideRows) -> None:
        self._timers.watermark_ms, self._timers.processing_time_ms = watermark_ms, processing_time_ms
        self._sides = sides

    def rows(self, folding: Folding, window: OpenWindow, key: Any, blame: Blame) -> Iterable[Any] | None:
        """Return what the function makes of a window; None if there is nothing to call it with."""
        self._blame = blame
        self._firing.window = TimeWindow(window.start_ms, window.end_ms)
        accumulator = window.accumulator
        result = None if accumulator is None else folding.result(accumulator)
        if result is None:
            return None
        elements: Sequence[Any] = folding.elements(result)
        return self._function.process(key, self._firing, elements)

    def end(self) -> None:
        self._function.clear(self._firing)

    def _to_side(self, tag: OutputTag, value: Any, time_ms: int | None) -> None:
        self._sides.put(tag, value, time_ms, self._blame)


def _any_window_state(descriptor: StateDescriptor) -> None:
    """Windows that do not merge may have states of their own."""


def _no_rows(rows: Iterable[Any], time_ms: int | None) -> None:
    raise AssertionError("a window function returns its rows")


def _no_count(name: str) -> None:
    raise AssertionError("a window function counts nothing")


@dataclass
class Fired:
    """Windows that have fired with a result, in their order."""

    #: As long as each other.
    windows: list[OpenWindow] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    #: How many of them fired before the watermark.
    before: int = 0


class _Firing(NamedTuple):
    """What of a window's context the functions that are known look at."""

    window: TimeWindow


class ResultWriter:
    """Makes columns of results, checked as rows of any function are."""

    def __init__(
        self, then: WithKeyAndWindow | WithWindow | None, output: T.StructType, clock: TimeDomain
    ) -> None:
        self._then, self._clock, self._writer = then, clock, RowWriter.of(output)
        #: Makes a result that does not change behind the call that has made it.
        self.take: Take = taking(output)

    def write(self, fired: Fired, key_columns: Sequence[pa.Array], keys: Sequence[Any]) -> list[pa.Array]:
        end_ms = np.array([one.end_ms for one in fired.windows], dtype=np.int64)
        return [pa.array(last_of(end_ms)), *self._columns(fired, end_ms, key_columns, keys)]

    def _columns(
        self, fired: Fired, end_ms: Array, key_columns: Sequence[pa.Array], keys: Sequence[Any]
    ) -> list[pa.Array]:
        try:
            if self._then is None:
                return self._writer.write(fired.results)
            columns = _spread(fired.results)
            if columns is not None:
                given = self._with_bounds(columns, fired.windows, end_ms, key_columns)
                return self._writer.write_columns(given)
        except OutputError:
            pass  # Below it is said of which window.
        return self._row_by_row(fired, keys)

    def _with_bounds(
        self,
        results: list[Sequence[Any]],
        windows: Sequence[OpenWindow],
        end_ms: Array,
        key_columns: Sequence[pa.Array],
    ) -> list[Sequence[Any] | pa.Array]:
        start_ms = np.array([one.start_ms for one in windows], dtype=np.int64)
        key = pa.array([one.key for one in windows], pa.int64())
        own = [column.take(key) for column in key_columns] if type(self._then) is WithKeyAndWindow else []
        return [*own, *results, timestamps(start_ms), timestamps(end_ms)]

    def _row_by_row(self, fired: Fired, keys: Sequence[Any]) -> list[pa.Array]:
        rows = []
        for window, result in zip(fired.windows, fired.results, strict=True):
            own = self._rows(window, result, keys)
            try:
                self._writer.write(own)
            except OutputError as error:
                raise TimerFailed(timer_of(window, keys), self._clock, error) from error
            rows += own
        return self._writer.write(rows)

    def _rows(self, window: OpenWindow, result: Any, keys: Sequence[Any]) -> list[Any]:
        if self._then is None:
            return [result]
        firing: Any = _Firing(TimeWindow(window.start_ms, window.end_ms))
        return list(self._then.process(keys[window.key], firing, (result,)))


def timer_of(window: OpenWindow, keys: Sequence[Any]) -> Timer:
    own = TimeWindow(window.start_ms, window.end_ms)
    return Timer(own.max_timestamp_ms, keys[window.key], own)


def _spread(results: Sequence[Any]) -> list[Sequence[Any]] | None:
    kinds = set(map(type, results))
    are_rows = {issubclass(kind, tuple) for kind in kinds}
    if are_rows == {False}:
        return [results]
    if are_rows == {True} and len(set(map(len, results))) == 1:
        return list(zip(*results, strict=True))
    return None


@runs(LoopedWindows)
class LoopedRunner:
    """Runs :class:`~flinkish_spark.operators.window_loop.LoopedWindows`, which has one entry."""

    side: PartitionSide | None = None

    def __init__(self, operator: LoopedWindows, uid: str, max_parallelism: int, shape: RowShape) -> None:
        self.operator, self.shape = operator, shape
        states = KeyedStates(uid, max_parallelism)
        self.folding = operator.open(states)
        self.calls = None if operator.function is None else WindowCalls(operator, states)
        self.layout = GroupLayout.of(states, shape.key_types)
        self.counts: dict[str, int] = {}
        self.readers = [RowReader(one.fields, one.field_columns, one.key_columns) for one in shape.inputs]
        self.results = ResultWriter(operator.bounds, shape.outputs[0], operator.clock)
        self._writers = [RowWriter.of(fields) for fields in shape.outputs]

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutRows]:
        self.counts = {}
        group.forget_timers()
        given = list(self._given(inputs))
        hashes = [rows.column(C.KEY_HASH).to_numpy() for _, _, rows in given]
        keys = [[rows.column(name) for name in self.shape.inputs[at].key_columns] for at, _, rows in given]
        table = group.due_table(OPEN)
        limit_ms = progress.limits_ms[self.operator.clock]
        stored = table.select(np.concatenate([np.empty(0, dtype=np.int64), *hashes]), limit_ms)
        if not len(stored) and not given:
            return
        windows = StoredWindows(table, stored, hashes, keys)
        yield from _GroupLoop(self, windows, group).run(given, progress)

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        return row_of_element(self.shape, inputs, failure)

    def sides_written(self, emitted: Emitted) -> Iterator[OutRows]:
        return rows_written(self.shape, self._writers, emitted)

    def _given(self, inputs: InputRows) -> Iterator[tuple[int, bool, pa.RecordBatch]]:
        for is_before in (True, False):
            for at, (rows, shape) in enumerate(zip(inputs, self.shape.inputs, strict=True)):
                part = rows_between(rows, shape, is_before=is_before)
                if part is not None:
                    yield at, is_before, part


#: Input, side of the watermark, rows.
_Given = tuple[int, bool, pa.RecordBatch]


class _GroupLoop:
    def __init__(self, runner: LoopedRunner, stored: StoredWindows, group: GroupState) -> None:
        self._runner, self._stored, self._group = runner, stored, group
        operator = runner.operator
        self._clock, self._late_output = operator.clock, operator.late_output
        registered = group.timers.registered[self._clock]
        self._open: OpenWindows = open_windows(
            operator.windows, runner.folding, len(stored.index), registered
        )
        columns = [to_values(column) for column in stored.index.keys]
        #: Keys as functions see them, by their numbers.
        self._keys: Sequence[Any] = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        self._open.put(stored.windows(self._keys))
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
                    results.append(take(result))
                    windows.append(window)
        except USER_ERRORS as error:
            raise self._failed(window, error) from error

    def _call(self, calls: WindowCalls, window: OpenWindow) -> None:
        fired, take = self._fired, self._runner.results.take
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
        keys = np.concatenate(self.keys).tolist()
        times_ms = np.concatenate(self._times_ms)
        return Arrived(keys, times_ms, chain.from_iterable(self.values), self.is_before)
