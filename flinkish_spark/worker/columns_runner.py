"""Runner of operators over columns, which process all keys of a key group at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.elements import OutputTag, Progress, TimeDomain
from flinkish_spark.core.iterators import elements_of, guard_call
from flinkish_spark.operators.columnar_windows import KeyedRows, WindowFold
from flinkish_spark.operators.process import ElementError
from flinkish_spark.operators.vectorized import Batch, BatchContext, VectorizedProcessFunction, has_timers
from flinkish_spark.state.key_group import GroupLayout, GroupState
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.layered import KeyIndex
from flinkish_spark.state.timers import BatchTimers
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BEHIND
from flinkish_spark.types import to_arrow
from flinkish_spark.types.arrow_types import as_schema
from flinkish_spark.types.exact_columns import exact_cast, is_of_kind
from flinkish_spark.types.rows import OutputError
from flinkish_spark.types.schemas import PREFIX
from flinkish_spark.worker.runners import (
    GroupRunner,
    InputRows,
    InputShape,
    OutputRows,
    RowShape,
    runs,
    select_side,
)

if TYPE_CHECKING:
    import pandas as pd
from flinkish_spark.worker.time import milliseconds


def to_batch(frame: pd.DataFrame, kinds: Mapping[str, pa.DataType]) -> pa.RecordBatch:
    """Return a pandas frame as a batch, without its index. NaN, NaT and None become null."""
    names = [str(name) for name in frame.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OutputError(f"emitted a frame with the column {twice[0]!r} twice")
    lost = [name for name in kinds if name not in names and name in frame.index.names]
    if lost:
        raise OutputError(f"emitted a frame with {lost[0]!r} in its index; call reset_index()")
    columns = [_to_column(name, frame.iloc[:, at], kinds.get(name)) for at, name in enumerate(names)]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _to_column(name: str, series: pd.Series, kind: pa.DataType | None) -> pa.Array:
    import pandas as pd

    is_null = series.isna().to_numpy(dtype=bool)
    if is_null.all():
        # An empty or all-null column may have any type in pandas.
        return pa.nulls(len(series), pa.int64() if kind is None else kind)
    try:
        if kind is not None and (series.dtype == object or isinstance(series.dtype, pd.StringDtype)):
            values = series.tolist()
            for at in np.flatnonzero(is_null).tolist():
                values[at] = None
            return to_arrow.strict_array(values, kind)
        made = _from_pandas(series)
        # Integers with nulls are floats in pandas.
        is_gappy = kind is None and pa.types.is_floating(made.type) and made.null_count
        return made.cast(pa.int64()) if is_gappy else made
    except to_arrow.ValueMismatch as error:
        wrong = next((at for at, value in enumerate(values) if value is error.value), None)
        raise OutputError(f"emitted a wrong value: field {name!r} of {error}", wrong) from error
    except to_arrow.REFUSALS as error:
        wrong = to_arrow.first_refused(len(series), lambda count: _from_pandas(series.iloc[:count]))
        value = f" of {series.iloc[wrong]!r:.200}" if wrong is not None else ""
        raise OutputError(f"emitted a wrong column: field {name!r}{value}: {error}", wrong) from error


def _from_pandas(series: pd.Series) -> pa.Array:
    made = pa.Array.from_pandas(series)
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


def read_event_times(given: dict[str, pa.Array], name: str | None, count: int) -> pa.Array:
    column = None if name is None else given.get(name)
    if column is None:
        return pa.nulls(count, pa.int64())
    if pa.types.is_timestamp(column.type):
        return milliseconds(column)
    if not pa.types.is_integer(column.type):
        says = f"emitted a wrong event time: {name!r} is {column.type}, not LONG or TIMESTAMP"
        raise OutputError(says + to_arrow.first_of(column), to_arrow.first_valid(column))
    return column.cast(pa.int64())


def cast_to_declared(field: T.StructField, column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast a column to its declared type: another width of the same kind, never text to number."""
    wrong = f"emitted a wrong column: field {field.name!r}"
    if not is_of_kind(column.type, kind):
        says = f"{wrong} has the type {column.type}, but the declared type is {kind}"
        raise OutputError(says + to_arrow.first_of(column), to_arrow.first_valid(column))
    missing = to_arrow.first_missing(field, column)
    if missing is not None:
        raise OutputError(f"emitted a wrong value: {missing}", missing.row)
    try:
        return exact_cast(column, kind)
    except pa.ArrowException as error:
        at = to_arrow.first_refused(len(column), lambda count: exact_cast(column.slice(0, count), kind))
        value = f" of {column[at].as_py()!r:.200}" if at is not None else ""
        raise OutputError(f"{wrong}{value}: {error}", at) from error


#: Prefix of columns with parts of the key; no field has such a name.
_KEY = f"{PREFIX}key_"


@runs(VectorizedProcessFunction, WindowFold)
class ColumnsRunner(GroupRunner):
    """Runs functions and window aggregates over columns, which have one entry."""

    def __init__(
        self,
        function: VectorizedProcessFunction | WindowFold,
        uid: str,
        max_parallelism: int,
        shape: RowShape,
    ) -> None:
        self._function, self.shape = function, shape
        states = KeyedStates(uid, max_parallelism)
        function.open(states)
        self.layout = GroupLayout.of(states, shape.key_types)
        self.counts: dict[str, int] = {}
        self.is_timed = any(C.TIME in one.schema.names for one in shape.inputs)
        self.keys = [f"{_KEY}{at}" for at in range(len(shape.key_types))]

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutputRows]:
        before, behind = (self._select_side(inputs, is_before=is_before) for is_before in (True, False))
        if isinstance(self._function, WindowFold):
            return self._fold(self._function, before, behind, group, progress)
        return _Calls(self._function, self, group, progress).run(before, behind)

    def find_row(self, inputs: InputRows, failure: ElementError) -> tuple[int, int]:
        return 0, failure.at

    def _fold(
        self,
        fold: WindowFold,
        before: pa.RecordBatch | None,
        behind: pa.RecordBatch | None,
        group: GroupState,
        progress: Progress,
    ) -> Iterator[OutputRows]:
        outcome = fold.run(self._rows(before), self._rows(behind), group, progress)
        self.counts = outcome.counts
        names, tag = self.shape.side_names, fold.late_output
        made = [(0, outcome.rows)]
        if tag is not None and tag.name in names:
            # A stream reads the side output of late elements.
            made.append((1 + names.index(tag.name), outcome.late))
        for side, batches in made:
            schema = self.shape.block_schemas[side]
            for first, own in zip((0, BEHIND), batches, strict=True):
                for batch in own:
                    columns = batch.columns if self.shape.with_times else batch.columns[1:]
                    rows = pa.RecordBatch.from_arrays(columns, names=schema.names)
                    yield OutputRows(side, first, as_schema(rows, schema))
                    first += batch.num_rows

    def _rows(self, named: pa.RecordBatch | None) -> KeyedRows | None:
        if named is None:
            return None
        return KeyedRows(
            named.column(C.KEY_HASH).to_numpy(),
            tuple(named.column(name) for name in self.keys),
            named.column(C.TIME) if self.is_timed else None,
            named.select(list(self.shape.inputs[0].fields)),
        )

    def _select_side(self, inputs: InputRows, *, is_before: bool) -> pa.RecordBatch | None:
        """Return the rows of all inputs on one side of the watermark; None if there are none."""
        parts = []
        for rows, shape in zip(inputs, self.shape.inputs, strict=True):
            own = select_side(rows, shape, is_before=is_before)
            if own is not None:
                parts.append(self._rename_columns(own, shape))
        if len(parts) < 2:
            return parts[0] if parts else None
        return pa.concat_batches(parts)

    def _rename_columns(self, rows: pa.RecordBatch, shape: InputShape) -> pa.RecordBatch:
        columns = {C.KEY_HASH: rows.column(C.KEY_HASH)}
        if self.is_timed:
            is_timed = C.TIME in rows.schema.names
            columns[C.TIME] = rows.column(C.TIME) if is_timed else pa.nulls(rows.num_rows, pa.int64())
        columns |= {f"{_KEY}{at}": rows.column(name) for at, name in enumerate(shape.key_columns)}
        columns |= {
            name: rows.column(column) for name, column in zip(shape.fields, shape.field_columns, strict=True)
        }
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


class _Calls:
    """The calls of a function in one micro-batch, and their output."""

    def __init__(
        self,
        function: VectorizedProcessFunction,
        runner: ColumnsRunner,
        group: GroupState,
        progress: Progress,
    ) -> None:
        self._function, self._runner, self.shape = function, runner, runner.shape
        self._group, self._progress = group, progress
        self._timers: BatchTimers | None = None
        self._watermark_ms = progress.watermark_before_ms
        #: Sequence of the first row on this side of the watermark, and number of rows per output.
        self._first = 0
        self._counts: dict[tuple[int, int], int] = {}
        self._sides = {name: side for side, name in enumerate(self.shape.side_names, start=1)}
        self._schemas = self.shape.block_schemas

    def run(self, before: pa.RecordBatch | None, behind: pa.RecordBatch | None) -> Iterator[OutputRows]:
        """Call the function in the order of `operators/process.py`."""
        progress, timers = self._progress, self._load_timers(before, behind)
        yield from self._fire(TimeDomain.PROCESSING_TIME, progress.processing_limit_ms)
        yield from self._process(before)
        # This order matters: the watermark is set before the timers fire that it makes due.
        self._watermark_ms = progress.watermark_ms
        yield from self._fire(TimeDomain.EVENT_TIME, progress.watermark_ms)
        self._first = BEHIND
        yield from self._process(behind)
        if progress.drained_to_ms > progress.watermark_ms:
            self._watermark_ms = progress.drained_to_ms
            yield from self._fire(TimeDomain.EVENT_TIME, progress.drained_to_ms)
        if timers is not None:
            self._group.timers.replace(timers.queues, timers.hash_of)

    def _load_timers(self, *sides: pa.RecordBatch | None) -> BatchTimers | None:
        """Load the timers of the keys that have rows, and of those whose timers are due."""
        timers, runner = self._group.timers, self._runner
        hashes = [timers.due(domain, limit_ms) for domain, limit_ms in self._progress.limits_ms.items()]
        # The function may have had some before the program was changed: they would be due for ever.
        if has_timers(self._function) or any(map(len, hashes)):
            hashes += [one.column(C.KEY_HASH).to_numpy() for one in sides if one is not None]
            queues = timers.select(np.unique(np.concatenate(hashes)))
            key_types = runner.layout.timers[TimeDomain.EVENT_TIME].keys
            self._timers = BatchTimers(queues, timers.hash_of, key_types)
        return self._timers

    def _fire(self, domain: TimeDomain, limit_ms: int) -> Iterator[OutputRows]:
        while self._timers is not None and (due := self._timers.take_due(domain, limit_ms)) is not None:
            context = self._context(due[0], pa.array(due[1]))
            yield from self._emit(guard_call(self._function.on_timers)(domain, context), context)

    def _process(self, rows: pa.RecordBatch | None) -> Iterator[OutputRows]:
        if rows is None:
            return
        runner = self._runner
        index = KeyIndex.of(rows.column(C.KEY_HASH).to_numpy(), [rows.column(name) for name in runner.keys])
        batch = rows.select(list(self.shape.inputs[0].fields))
        context = self._context(index, rows.column(C.TIME) if runner.is_timed else None)
        yield from self._emit(guard_call(self._function.process_batch)(batch, context), context)

    def _context(self, index: KeyIndex, times: pa.Array | None) -> BatchContext:
        sides: list[tuple[OutputTag, Batch]] = []
        return BatchContext(
            index, times, self._progress, self._watermark_ms, self._group, sides, self._timers
        )

    def _emit(self, batches: Iterable[Batch] | None, context: BatchContext) -> Iterator[OutputRows]:
        for batch in elements_of(batches or ()):
            yield self._number(0, self._as_declared(0, batch))
        for tag, batch in context._sides:
            # Rows to a side output that no stream reads are dropped, as in Flink.
            if (side := self._sides.get(tag.name)) is None:
                continue
            try:
                rows = self._as_declared(side, batch)
            except OutputError as error:
                raise OutputError(f"to the side output '{tag.name}': {error}") from error
            yield self._number(side, rows)

    def _number(self, side: int, rows: pa.RecordBatch) -> OutputRows:
        at = (self._first, side)
        before = self._counts.get(at, 0)
        self._counts[at] = before + rows.num_rows
        return OutputRows(side, self._first + before, rows)

    def _as_declared(self, side: int, rows: Any) -> pa.RecordBatch:
        try:
            return self._check(side, rows)
        except OutputError as error:
            if error.row is None:
                raise
            key = _describe_key(rows, self.shape.inputs[0], error.row)
            raise OutputError(f"{error} (row {error.row} of the batch{key})", error.row) from error

    def _check(self, side: int, rows: Any) -> pa.RecordBatch:
        import pandas as pd

        names = self.shape.outputs[side].names
        schema, fields = self._schemas[side], self.shape.outputs[side]
        kinds = dict(zip(names, schema.types[len(schema) - len(names) :], strict=True))
        if isinstance(rows, pd.DataFrame):
            rows = to_batch(rows, kinds)
        if not isinstance(rows, pa.RecordBatch):
            raise OutputError(
                f"emitted a {type(rows).__name__}; emit batches: pyarrow.RecordBatch or pandas.DataFrame"
            )
        given = dict(zip(rows.schema.names, rows.columns, strict=True))
        timed = []
        if self.shape.with_times:
            timed = [read_event_times(given, self._function.event_time, rows.num_rows)]
        if self._function.event_time not in names:
            given.pop(self._function.event_time or "", None)
        if set(given) != set(names):
            raise OutputError(
                f"emitted the columns {', '.join(given)}, but the declared columns are {', '.join(names)}"
            )
        own = [cast_to_declared(field, given[field.name], kinds[field.name]) for field in fields]
        return pa.RecordBatch.from_arrays([*timed, *own], schema=schema)


def _describe_key(rows: Batch, shape: InputShape, at: int) -> str:
    import pandas as pd

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
