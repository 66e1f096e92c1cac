"""A key group's rows through an operator: columns to elements and back, or columns all the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.elements import OutputTag, Progress, TimeDomain
from flinkish_spark.core.iterators import called, elements_of
from flinkish_spark.operators.columnar_windows import Rows, WindowFold
from flinkish_spark.operators.process import (
    ElementFailed,
    Elements,
    Emitted,
    GroupRun,
    KeyedStreamOperator,
    TimerFailed,
)
from flinkish_spark.operators.vectorized import Batch, BatchContext, VectorizedProcessFunction, has_timers
from flinkish_spark.state.key_group import GroupLayout, GroupState
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.layered import Array, KeyIndex
from flinkish_spark.state.timers import BatchTimers
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BEHIND, as_schema, block_schema
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.types.exact_columns import exact_cast, is_of_kind
from flinkish_spark.types.rows import OutputError, RowReader, RowWriter
from flinkish_spark.types.schemas import PREFIX
from flinkish_spark.types.to_arrow import (
    REFUSALS,
    ValueMismatch,
    first_missing,
    first_of,
    first_refused,
    first_valid,
    strict_array,
)
from flinkish_spark.types.to_python import taking

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class InputShape:
    """How the rows of one input come into an operator; travels in the plan."""

    schema: pa.Schema
    #: Names of the records' fields, and of the columns that hold them.
    fields: tuple[str, ...]
    field_columns: tuple[str, ...]
    #: Of the key. A key that is a field has that field's column.
    key_columns: tuple[str, ...]
    #: Whether rows say by their sequence on which side of the watermark they are; those of a source are
    #: all behind it.
    is_behind_operator: bool = False
    #: Which of the operator's inputs they are for: several ways may lead into one.
    entry: int = 0
    distribution: Distribution = Distribution.BY_KEY

    def places(self, rows: pa.RecordBatch, *, is_before: bool) -> Array:
        """Return which rows are on one side of the watermark, in their order."""
        if not self.is_behind_operator:
            return np.arange(0 if is_before else rows.num_rows)
        found: Array = np.flatnonzero((rows.column(C.SEQUENCE).to_numpy() < BEHIND) == is_before)
        return found


@dataclass(frozen=True)
class RowShape:
    """How rows come into an operator and how they go out of it; travels in the plan."""

    #: The ways into it, by number.
    inputs: tuple[InputShape, ...]
    #: Of the key, the same for all inputs.
    key_types: tuple[T.DataType, ...]
    #: Fields of the main output, then of each side output.
    outputs: tuple[T.StructType, ...]
    side_names: tuple[str, ...] = ()
    #: Whether rows that go out have their event time beside them.
    with_times: bool = False

    @property
    def block_schemas(self) -> tuple[pa.Schema, ...]:
        return tuple(block_schema(fields, with_times=self.with_times) for fields in self.outputs)


@dataclass(frozen=True, slots=True)
class OutRows:
    #: 0 for the main output.
    side: int
    #: Sequence of the first; the others follow.
    first: int
    rows: pa.RecordBatch

    @staticmethod
    def divided(side: int, rows: pa.RecordBatch, before: int) -> Iterator[OutRows]:
        """Yield rows of which so many are before the watermark, and the others behind it."""
        if before:
            yield OutRows(side, 0, rows.slice(0, before))
        if before < rows.num_rows:
            yield OutRows(side, BEHIND, rows.slice(before))


#: The rows of each input in their canonical order; None where an input has none.
InputRows = Sequence[pa.RecordBatch | None]


class GroupRunner(Protocol):
    """An opened operator; `counts` is what was counted in the last call of `process`, by name."""

    layout: GroupLayout
    counts: dict[str, int]

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutRows]:
        """Work through the rows of a key group; the group's state is changed behind it."""

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        """Return the input, and which of its rows is the element at which the function failed."""


class ElementRunner:
    def __init__(
        self, operator: KeyedStreamOperator, uid: str, max_parallelism: int, shape: RowShape
    ) -> None:
        self._shape, self._operator_level = shape, operator.level_in
        self._run = GroupRun(operator, uid, max_parallelism, taking(shape.outputs[0]))
        self.counts: dict[str, int] = {}
        self.layout = GroupLayout.of(self._run.states, shape.key_types)
        self._readers = [RowReader(one.fields, one.field_columns, one.key_columns) for one in shape.inputs]
        self._writers = [RowWriter.of(fields) for fields in shape.outputs]

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutRows]:
        before, behind = self._prepared(inputs, group, progress)
        emitted = self._run.run(before, progress, behind)
        self.counts = emitted.counts
        # First, since it names the field of a row that is not as it was declared; states keep results, too.
        try:
            written = list(self._written(emitted))
        except OutputError:
            self._blame_call(inputs, group, progress)
            raise
        self._store(group)
        yield from written

    def level_of(self, entries: Iterable[tuple[str, pa.RecordBatch]]) -> int | None:
        found = [self._operator_level(name, rows) for name, rows in entries]
        counted = [level for level in found if level is not None]
        return sum(counted) if counted else None

    def _prepared(
        self, inputs: InputRows, group: GroupState, progress: Progress
    ) -> tuple[list[Elements], list[Elements]]:
        before, behind, hash_of = self._elements(inputs)
        self._load(group, hash_of, progress)
        return before, behind

    def _store(self, group: GroupState) -> None:
        group.store(self._run.states, self._run.timers)

    def _elements(self, inputs: InputRows) -> tuple[list[Elements], list[Elements], dict[object, int]]:
        """Return the elements before the watermark, those behind it, and the hashes of their keys."""
        hash_of = dict[object, int]()
        sides: dict[bool, list[Elements]] = {True: [], False: []}
        for number, (rows, shape) in enumerate(zip(inputs, self._shape.inputs, strict=True)):
            for is_before, elements in sides.items():
                part = rows_between(rows, shape, is_before=is_before)
                if part is None:
                    continue
                keys, values = self._readers[number].read(part)
                hash_of.update(zip(keys, part.column(C.KEY_HASH).to_numpy().tolist(), strict=True))
                times = part.column(C.TIME).to_pylist() if C.TIME in part.schema.names else None
                elements.append(Elements(keys, values, times, shape.entry))
        return sides[True], sides[False], hash_of

    def _blame_call(self, inputs: InputRows, group: GroupState, progress: Progress) -> None:
        """Raise the error of the element or timer that emitted a wrong row; nothing is stored yet."""

        def again() -> None:
            before, behind = self._prepared(inputs, group, progress)
            self._run.run_checked(before, progress, behind, lambda emitted: [*self._written(emitted)])

        blame_call(again)

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        return row_of_element(self._shape, inputs, failure)

    def _load(self, group: GroupState, hash_of: dict[object, int], progress: Progress) -> None:
        group.load(self._run.states, self._run.timers, hash_of, progress)

    def _written(self, emitted: Emitted) -> Iterator[OutRows]:
        return rows_written(self._shape, self._writers, emitted)


def row_of_element(shape: RowShape, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
    """Return the input, and which of its rows is the element at which a function failed."""
    at = failure.at
    for source, (rows, own) in enumerate(zip(inputs, shape.inputs, strict=True)):
        places = [] if rows is None else own.places(rows, is_before=failure.is_before).tolist()
        if at < len(places):
            return source, places[at]
        at -= len(places)
    raise AssertionError(f"there is no element {failure.at}")


def blame_call(again: Callable[[], object]) -> None:
    """Run a micro-batch again to raise the error of the element or timer that emitted a wrong row."""
    try:
        again()
    except (ElementFailed, TimerFailed) as failure:
        if isinstance(failure.error, OutputError):
            raise
    except Exception:
        _LOG.debug("the micro-batch did something else when it was run again", exc_info=True)


def rows_written(shape: RowShape, writers: Sequence[RowWriter], emitted: Emitted) -> Iterator[OutRows]:
    """Yield what was emitted as rows of each output, those before the watermark first."""
    yield from _output(shape, writers, 0, emitted.rows, emitted.times_ms, emitted.before)
    for side, name in enumerate(shape.side_names, start=1):
        # What is emitted to a side output that nobody reads is dropped, as in Flink.
        found = emitted.side.get(name, [])
        rows, times_ms = [row for row, _ in found], [time_ms for _, time_ms in found]
        yield from _output(shape, writers, side, rows, times_ms, emitted.side_before.get(name, 0))


def _output(
    shape: RowShape,
    writers: Sequence[RowWriter],
    side: int,
    rows: list[Any],
    times_ms: list[int | None],
    before: int,
) -> Iterator[OutRows]:
    if not rows:
        return
    try:
        arrays = writers[side].write(rows)
    except OutputError as error:
        if side:
            raise OutputError(f"to the side output '{shape.side_names[side - 1]}': {error}") from error
        raise
    if shape.with_times:
        arrays = [pa.array(times_ms, pa.int64()), *arrays]
    batch = pa.RecordBatch.from_arrays(arrays, schema=shape.block_schemas[side])
    yield from OutRows.divided(side, batch, before)


def rows_between(rows: pa.RecordBatch | None, shape: InputShape, *, is_before: bool) -> pa.RecordBatch | None:
    """Return the rows on one side of the watermark; None if there are none."""
    if rows is None:
        return None
    places = shape.places(rows, is_before=is_before)
    if not len(places):
        return None
    return rows if len(places) == rows.num_rows else rows.take(pa.array(places))


def batch_of(frame: pd.DataFrame, kinds: Mapping[str, pa.DataType]) -> pa.RecordBatch:
    """Return a frame's columns as a batch; its index is none of them. NaN, NaT and None are null."""
    names = [str(name) for name in frame.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OutputError(f"emitted a frame with the column {twice[0]!r} twice")
    lost = [name for name in kinds if name not in names and name in frame.index.names]
    if lost:
        raise OutputError(f"emitted a frame with {lost[0]!r} in its index; call reset_index()")
    columns = [_column(name, frame.iloc[:, at], kinds.get(name)) for at, name in enumerate(names)]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _column(name: str, series: pd.Series, kind: pa.DataType | None) -> pa.Array:
    is_null = series.isna().to_numpy(dtype=bool)
    if is_null.all():
        # Such a column, and one without rows, has any type in pandas.
        return pa.nulls(len(series), pa.int64() if kind is None else kind)
    try:
        if kind is not None and (series.dtype == object or isinstance(series.dtype, pd.StringDtype)):
            values = series.tolist()
            for at in np.flatnonzero(is_null).tolist():
                values[at] = None
            return strict_array(values, kind)
        made = _from_pandas(series)
        # Whole numbers with gaps are floats in pandas.
        is_gappy = kind is None and pa.types.is_floating(made.type) and made.null_count
        return made.cast(pa.int64()) if is_gappy else made
    except ValueMismatch as error:
        wrong = next((at for at, value in enumerate(values) if value is error.value), None)
        raise OutputError(f"emitted a wrong value: field {name!r} of {error}", wrong) from error
    except REFUSALS as error:
        wrong = first_refused(len(series), lambda count: _from_pandas(series.iloc[:count]))
        value = f" of {series.iloc[wrong]!r:.200}" if wrong is not None else ""
        raise OutputError(f"emitted a wrong column: field {name!r}{value}: {error}", wrong) from error


def _from_pandas(series: pd.Series) -> pa.Array:
    made = pa.Array.from_pandas(series)
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


def event_times(given: dict[str, pa.Array], name: str | None, count: int) -> pa.Array:
    column = None if name is None else given.get(name)
    if column is None:
        return pa.nulls(count, pa.int64())
    if pa.types.is_timestamp(column.type):
        micros = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        is_null = column.is_null().to_numpy(zero_copy_only=False)
        return pa.array(micros.fill_null(0).to_numpy() // 1000, mask=is_null)
    if not pa.types.is_integer(column.type):
        says = f"emitted a wrong event time: {name!r} is {column.type}, not LONG or TIMESTAMP"
        raise OutputError(says + first_of(column), first_valid(column))
    return column.cast(pa.int64())


def declared_column(field: T.StructField, column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column with its declared type: another width of the same, never a number out of text."""
    wrong = f"emitted a wrong column: field {field.name!r}"
    if not is_of_kind(column.type, kind):
        says = f"{wrong} has the type {column.type}, declared is {kind}"
        raise OutputError(says + first_of(column), first_valid(column))
    missing = first_missing(field, column)
    if missing is not None:
        raise OutputError(f"emitted a wrong value: {missing}", missing.row)
    try:
        return exact_cast(column, kind)
    except pa.ArrowException as error:
        at = first_refused(len(column), lambda count: exact_cast(column.slice(0, count), kind))
        value = f" of {column[at].as_py()!r:.200}" if at is not None else ""
        raise OutputError(f"{wrong}{value}: {error}", at) from error


#: Opens the name of a part of the key; no field has such a name.
_KEY = f"{PREFIX}key_"


class BatchRunner:
    """Runs a :class:`VectorizedProcessFunction` in the order of `operators/process.py`; it has one entry."""

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
        return 0, failure.at

    def _side(self, inputs: InputRows, *, is_before: bool) -> pa.RecordBatch | None:
        """Return the rows of all ways in on one side of the watermark; None without any."""
        parts = []
        for rows, shape in zip(inputs, self._shape.inputs, strict=True):
            own = rows_between(rows, shape, is_before=is_before)
            if own is not None:
                parts.append(self._named(own, shape))
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
        # The function may have had some before the program was changed: they would be due for ever.
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
        if self._timers is None:
            return
        while (due := self._timers.take_due(domain, limit_ms)) is not None:
            context = self.context(due[0], pa.array(due[1]))
            yield from self.emitted(called(self._function.on_timers)(domain, context), context)

    def context(self, index: KeyIndex, times: pa.Array | None) -> BatchContext:
        sides: list[tuple[OutputTag, Batch]] = []
        return BatchContext(index, times, self._progress, self.watermark_ms, self._group, sides, self._timers)

    def emitted(self, batches: Iterable[Batch] | None, context: BatchContext) -> Iterator[OutRows]:
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
        try:
            return self._checked(side, rows)
        except OutputError as error:
            if error.row is None:
                raise
            key = _key_of(rows, self._shape.inputs[0], error.row)
            raise OutputError(f"{error} (row {error.row} of the batch{key})", error.row) from error

    def _checked(self, side: int, rows: Any) -> pa.RecordBatch:
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


class WindowRunner:
    """Runs a :class:`~flinkish_spark.operators.columnar_windows.WindowFold`, which has one entry."""

    def __init__(self, fold: WindowFold, uid: str, max_parallelism: int, shape: RowShape) -> None:
        self._fold, self._shape = fold, shape
        states = KeyedStates(uid, max_parallelism)
        fold.open(states)
        self.layout = GroupLayout.of(states, shape.key_types)
        self.counts: dict[str, int] = {}
        self._schemas = shape.block_schemas
        #: The side output of late elements, if somebody reads it.
        names = [] if fold.late_output is None else [fold.late_output.name]
        self._late = [1 + at for at, name in enumerate(shape.side_names) if name in names]

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutRows]:
        before, behind = (self._side(inputs, is_before=is_before) for is_before in (True, False))
        outcome = self._fold.run(before, behind, group, progress)
        self.counts = outcome.counts
        yield from self._written(0, 0, outcome.before)
        yield from self._written(0, BEHIND, outcome.behind)
        for side in self._late:
            for first, late in ((0, outcome.late_before), (BEHIND, outcome.late_behind)):
                yield from self._written(side, first, [] if late is None else [late])

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        return 0, failure.at

    def _side(self, inputs: InputRows, *, is_before: bool) -> Rows | None:
        """Return the rows of all ways in on one side of the watermark; None without any."""
        parts = []
        for rows, shape in zip(inputs, self._shape.inputs, strict=True):
            own = rows_between(rows, shape, is_before=is_before)
            if own is not None:
                parts.append(_rows(own, shape))
        if len(parts) < 2:
            return parts[0] if parts else None
        return _united(parts)

    def _written(self, side: int, first: int, batches: Sequence[pa.RecordBatch]) -> Iterator[OutRows]:
        schema = self._schemas[side]
        for batch in batches:
            columns = batch.columns if self._shape.with_times else batch.columns[1:]
            own = pa.RecordBatch.from_arrays(columns, names=schema.names)
            yield OutRows(side, first, as_schema(own, schema))
            first += batch.num_rows


def _rows(rows: pa.RecordBatch, shape: InputShape) -> Rows:
    fields = pa.RecordBatch.from_arrays(
        [rows.column(name) for name in shape.field_columns], names=list(shape.fields)
    )
    return Rows(
        rows.column(C.KEY_HASH).to_numpy(),
        tuple(rows.column(name) for name in shape.key_columns),
        rows.column(C.TIME) if C.TIME in rows.schema.names else None,
        fields,
    )


def _united(parts: Sequence[Rows]) -> Rows:
    times = [pa.nulls(len(one.hashes), pa.int64()) if one.times_ms is None else one.times_ms for one in parts]
    hashes = pa.concat_arrays([pa.array(one.hashes) for one in parts]).to_numpy()
    keys = tuple(
        pa.concat_arrays(list(columns)) for columns in zip(*(one.keys for one in parts), strict=True)
    )
    fields = pa.concat_batches([one.fields for one in parts])
    return Rows(hashes, keys, pa.concat_arrays(times), fields)
