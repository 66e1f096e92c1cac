"""Stateless functions, run by mapInArrow in a worker; pickled into the plan.

The control columns of a row are copied to the rows made of it, which so keep its channel and sequence.
Functions of the user see records only; control rows get nulls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.elements import OutputTag, tag_name
from flinkish_spark.core.errors import UserFunctionError
from flinkish_spark.core.iterators import NOT_RUN, USER_ERRORS, elements_of, is_true, refuse_not_run
from flinkish_spark.core.micro_batch import MicroBatch, micro_batch_of_task
from flinkish_spark.core.subtask import Subtask, SubtaskFacts
from flinkish_spark.core.suggestions import describe_raised
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.functions.watermark_strategy import ChannelGenerators, WatermarkGenerator
from flinkish_spark.joins.lookup import LookupJoin
from flinkish_spark.operators.context import Closeable, close_operator
from flinkish_spark.operators.lookup_join import LookupJoinRun, find_cached_answers
from flinkish_spark.operators.process import ElementError
from flinkish_spark.protocol.event_time import MIN_WATERMARK_MS, check_time
from flinkish_spark.state.layered import Array
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.columns import CHANNEL, KIND, SEQUENCE, TIME, Kind, Origins
from flinkish_spark.types.arrow_types import as_schema
from flinkish_spark.types.rows import OutputError, RowReader, RowWriter, arrow_schema
from flinkish_spark.types.schemas import PREFIX
from flinkish_spark.types.to_python import copier_of, copy_if_mutable
from flinkish_spark.worker.daemon import freeze_modules
from flinkish_spark.worker.keyed_operator import OperatorError
from flinkish_spark.worker.time import are_records


class StatelessContext(SubtaskFacts):
    def __init__(self, uid: str, parallelism: int | None = None, counts_as: str = "") -> None:
        self.uid, self._parallelism = uid, parallelism
        self.max_parallelism = 1
        self._own_counts_as = counts_as

    def _counts_as(self) -> str:
        return self._own_counts_as

    def _subtask(self) -> Subtask:
        found = super()._subtask()
        return found if self._parallelism is None else replace(found, parallelism=self._parallelism)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):
            raise RuntimeError(
                f"'{self.uid}' asks for state ({name}), which only functions on a keyed stream have; "
                "call key_by() first"
            )
        raise AttributeError(name)


@dataclass(frozen=True)
class RowFunction:
    """A function of one row, with its name for error messages."""

    #: Name of the operator, or of its step.
    name: str
    #: From a record to its results; a process function also gets its context.
    call: Callable[..., Any]
    #: The function to open and close once per task, if it can be.
    rich: RichFunction | None = None
    origins: Origins = field(default_factory=Origins)
    #: Description for errors, if it is not simply the function of the operator.
    what: str = ""
    #: Number of tasks that run it; None if unknown.
    parallelism: int | None = None
    #: Name under which its accumulators are counted; empty if they are not.
    counts_as: str = ""
    #: Id of the operator in the job graph, since names are not unique; empty if unknown.
    operator: str = ""

    @contextmanager
    def open_for_task(self) -> Iterator[None]:
        """Open the function for the duration of a task; close it even if it fails, also in `open`."""
        if self.rich is None:
            freeze_modules()
            yield
            return
        with self.closing(self.rich):
            with self.translate_errors("open"):
                self.rich.open(StatelessContext(self.name, self.parallelism, self.counts_as))
            freeze_modules()
            yield

    @contextmanager
    def closing(self, rich: Closeable) -> Iterator[None]:
        """Close an opened function at the end of the block, also after an error."""
        try:
            yield
        except BaseException:
            # Report the first error.
            close_operator(rich, self.name)
            raise
        with self.translate_errors("close"):
            rich.close()

    @contextmanager
    def translate_errors(self, method: str) -> Iterator[None]:
        """Raise errors of `open` or `close` as an OperatorError, which stops the job."""
        try:
            yield
        except USER_ERRORS as error:
            what, says = f"{method}() of operator '{self.name}'", describe_raised(error)
            raise OperatorError.from_facts(**self._known, what=what, error=says) from error

    @property
    def _known(self) -> dict[str, Any]:
        return {"uid": self.name, **({"operator": self.operator} if self.operator else {})}

    def make_error(
        self, batch: pa.RecordBatch, at: int, error: BaseException, says: str = ""
    ) -> OperatorError:
        places: dict[str, Any] = {}
        if CHANNEL in batch.schema.names and SEQUENCE in batch.schema.names:
            channel, sequence = (int(batch.column(name)[at].as_py()) for name in (CHANNEL, SEQUENCE))
            places = self.origins.describe(channel, sequence)
        says = says or describe_raised(error)
        facts = {**self._known, **places, "error": says}
        if self.what:
            facts["what"] = self.what
        return OperatorError.from_facts(**facts)


def records_of(batch: pa.RecordBatch) -> Iterator[Any]:
    names = [name for name in batch.schema.names if not name.startswith(PREFIX)]
    return RowReader(names, names, ()).read(batch)[1]


@dataclass(frozen=True)
class FilterRows:
    function: RowFunction

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        what = "the function of filter()"
        with self.function.open_for_task():
            for batch in batches:
                kept, at = np.zeros(batch.num_rows, dtype=bool), -1
                try:
                    for at, record in enumerate(records_of(batch)):
                        answer = self.function.call(record)
                        kept[at] = answer if type(answer) is bool else is_true(answer, what)
                except USER_ERRORS as error:
                    raise self.function.make_error(batch, max(at, 0), error) from error
                yield batch.filter(pa.array(kept))


@dataclass(frozen=True)
class ExpandRows:
    function: RowFunction
    output: T.StructType
    #: Control columns to copy.
    carried: tuple[T.StructField, ...]

    @property
    def columns(self) -> T.StructType:
        return T.StructType([*self.output, *self.carried])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        write = self.make_writer()
        with self.function.open_for_task():
            for batch in batches:
                yield write(batch, *self._make_rows(batch))

    def make_writer(self) -> Callable[[pa.RecordBatch, list[Any], Array], pa.RecordBatch]:
        """Return a function that makes a batch from the input batch, new rows, and the input row of each."""
        return partial(self._write, RowWriter.of(self.output), arrow_schema(self.columns))

    def _write(
        self, writer: RowWriter, schema: pa.Schema, batch: pa.RecordBatch, rows: list[Any], of_row: Array
    ) -> pa.RecordBatch:
        try:
            arrays = writer.write(rows)
        except OutputError as error:
            at = int(of_row[error.row]) if error.row is not None else 0
            raise self.function.make_error(batch, at, error, f"the function {error}") from error
        taken = pa.array(of_row)
        carried = [batch.column(one.name).take(taken) for one in self.carried]
        made = pa.RecordBatch.from_arrays([*arrays, *carried], names=schema.names)
        return as_schema(made, schema)

    def _make_rows(self, batch: pa.RecordBatch) -> tuple[list[Any], Array]:
        """Return the rows made of a batch, and the position of each one's row."""
        made: list[Any] = []
        counts = np.zeros(batch.num_rows, dtype=np.int64)
        call, at = self._call(batch), -1
        take = copier_of(self.output)
        try:
            for at, record in enumerate(records_of(batch)):
                before = len(made)
                made.extend(map(take, elements_of(call(at, record) or ())))
                counts[at] = len(made) - before
        except USER_ERRORS as error:
            raise self.function.make_error(batch, max(at, 0), error) from error
        return made, np.repeat(np.arange(batch.num_rows), counts)

    def _call(self, batch: pa.RecordBatch) -> Callable[[int, Any], Iterable[Any] | None]:
        return lambda at, record: self.function.call(record)


@dataclass(frozen=True)
class SingleRow:
    """Turns a function that returns one row into one that returns rows; pickled into the plan."""

    function: Callable[[Any], Any]

    def __call__(self, record: Any) -> tuple[Any]:
        made = self.function(record)
        if type(made) in NOT_RUN:
            refuse_not_run(made, "the function")
        return (made,)


@dataclass(frozen=True)
class ProcessRows(ExpandRows):
    """Runs a process function, which gets a record and its context; emits the rows of one output."""

    #: Name of the side output; None for the main output.
    side: str | None = None

    def _call(self, batch: pa.RecordBatch) -> Callable[[int, Any], Iterable[Any] | None]:
        context = _Context(batch.column(TIME).to_pylist() if TIME in batch.schema.names else None)

        def rows(at: int, record: Any) -> Iterable[Any]:
            context.at, context.emitted = at, {}
            # Run the function to its end for any output, since it may emit to side outputs at any point.
            main = list(map(copy_if_mutable, elements_of(self.function.call(record, context) or ())))
            return main if self.side is None else context.emitted.get(self.side, ())

        return rows


class _Context:
    """See :class:`~flinkish_spark.functions.stream.ProcessContext`."""

    def __init__(self, times_ms: list[int | None] | None) -> None:
        self._times_ms, self.at = times_ms, 0
        self.emitted: dict[str, list[Any]] = {}

    def timestamp(self) -> int | None:
        return None if self._times_ms is None else self._times_ms[self.at]

    def current_watermark(self) -> int:
        return self._micro_batch.watermarks.least_ms

    def current_processing_time(self) -> int:
        return self._micro_batch.processing_time_ms

    @cached_property
    def _micro_batch(self) -> MicroBatch:
        # Read lazily, once per batch of rows.
        return micro_batch_of_task()

    def output(self, tag: OutputTag, value: Any) -> None:
        self.emitted.setdefault(tag_name(tag), []).append(copy_if_mutable(value))


@dataclass(frozen=True)
class AppendColumns:
    #: From a record to a row of `made`.
    function: RowFunction
    given: T.StructType
    #: Fields of the row, under their names in error messages.
    made: T.StructType
    #: Names of the added columns.
    names: tuple[str, ...]

    @property
    def columns(self) -> T.StructType:
        pairs = zip(self.names, self.made, strict=True)
        return T.StructType([*self.given, *(T.StructField(name, field.dataType) for name, field in pairs)])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        writer = RowWriter(arrow_schema(self.made))
        with self.function.open_for_task():
            for batch in batches:
                places = _find_records(batch)
                arrays = self._compute_columns(
                    batch if places is None else batch.take(pa.array(places)), writer
                )
                if places is not None:
                    # By row, its number among the records; null if it is not a record.
                    number = np.full(batch.num_rows, -1)
                    number[places] = np.arange(len(places))
                    record = pa.array(number, mask=number < 0)
                    arrays = [array.take(record) for array in arrays]
                names = [*batch.schema.names, *self.names]
                yield pa.RecordBatch.from_arrays([*batch.columns, *arrays], names=names)

    def _compute_columns(self, records: pa.RecordBatch, writer: RowWriter) -> list[pa.Array]:
        rows: list[Any] = []
        try:
            for record in records_of(records):
                rows.append(self.function.call(record))
        except USER_ERRORS as error:
            raise self.function.make_error(records, len(rows), error) from error
        try:
            return writer.write(rows)
        except OutputError as error:
            raise self.function.make_error(records, error.row or 0, error, f"it {error}") from error


def _find_records(batch: pa.RecordBatch) -> Array | None:
    """Return the positions of records; None if all rows are records."""
    is_record = np.ones(batch.num_rows, np.bool_)
    if KIND in batch.schema.names:
        is_record &= batch.column(KIND).to_numpy() == int(Kind.RECORD)
    # Rows without a sequence carry only a time.
    mask = are_records(batch)
    if mask is not None:
        is_record &= mask.to_numpy(zero_copy_only=False)
    return None if is_record.all() else np.flatnonzero(is_record)


@dataclass(frozen=True)
class RecordPartitioner:
    """Computes the target partition of a record, as a row; pickled into the plan."""

    #: From a key and the number of partitions to a partition.
    partition: Callable[[Any, int], int]
    key: Callable[[Any], Any]
    partitions: int

    def __call__(self, record: Any) -> tuple[int]:
        chosen: Any = refuse_not_run(self.partition(self.key(record), self.partitions), "the partitioner")
        # Accept numpy integers, but not True as partition 1.
        is_number = hasattr(chosen, "__index__") and not isinstance(chosen, bool)
        if not is_number or not 0 <= chosen < self.partitions:
            raise ValueError(
                f"the partitioner returned {chosen!r}; there are partitions 0 to {self.partitions - 1}"
            )
        return (operator.index(chosen),)


@dataclass(frozen=True)
class LookupRows(ExpandRows):
    join: LookupJoin
    #: Name of the side output; None for the main output.
    side: str | None = None
    #: Name under which a worker caches answers across micro-batches.
    kept_as: str = field(kw_only=True)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        write = self.make_writer()
        with self._open() as run:
            for batch in batches:
                made, of_row = self._join(run, batch)
                yield write(batch, made, np.array(of_row, dtype=np.int64))

    @contextmanager
    def _open(self) -> Iterator[LookupJoinRun]:
        kept = None if self.join.cache is None else find_cached_answers(self.kept_as)
        with self.function.translate_errors("open"):
            run = LookupJoinRun(self.join, self.function.name, kept, self.function.counts_as)
        freeze_modules()
        with self.function.closing(run):
            yield run

    def _join(self, run: LookupJoinRun, batch: pa.RecordBatch) -> tuple[list[object], list[int]]:
        values = list(records_of(batch))
        times = batch.column(TIME).to_pylist() if TIME in batch.schema.names else None
        try:
            # The wall clock only decides whether a cached answer is still used. The job's results are not
            # deterministic here anyway, since the table may change at any time.
            emitted = run.run(values, times, SystemClock().wall_ms())
        except ElementError as failure:
            raise self.function.make_error(batch, max(failure.at, 0), failure.error) from failure.error
        if self.side is None:
            return emitted.rows, run.of_row
        return [row for row, _ in emitted.side.get(self.side, ())], run.of_side_row.get(self.side, [])


@dataclass(frozen=True)
class TimeStage:
    """Assigns timestamps and runs watermark generators."""

    #: From a record and its current time, if any, to its time; None if records keep their time.
    assigner: Callable[[Any, int | None], int] | None
    #: Makes a watermark generator; None if there is none.
    generator: Callable[[], WatermarkGenerator] | None
    source: str
    origins: Origins

    def columns(self, given: T.StructType) -> T.StructType:
        own = [field for field in given if field.name not in (C.TIME, C.MARK)]
        added = [C.TIME] if self.generator is None else [C.TIME, C.MARK]
        return T.StructType([*own, *(T.StructField(name, T.LongType()) for name in added)])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_modules()
        if self.generator is None:
            for batch in batches:
                yield self._add_columns(batch, {C.TIME: self._assign_times(batch, list(records_of(batch)))})
            return
        task = ChannelGenerators(self.generator, self.source)
        #: The last row of each channel, which takes the watermark that the generator emits at the end.
        held: dict[int, pa.RecordBatch] = {}
        for batch in batches:
            if not batch.num_rows:
                continue
            records = list(records_of(batch))
            times = self._assign_times(batch, records)
            if self.assigner is not None and any(map(pa.types.is_nested, batch.schema.types)):
                # A fresh copy for the generator, since the assigner may have changed the records.
                records = list(records_of(batch))
            marks = self._generate_watermarks(task, batch, records, times)
            yield from _hold_last(self._add_columns(batch, {C.TIME: times, C.MARK: marks}), held)
        try:
            final = task.finish()
        except UserFunctionError as error:
            what = _strip_failed(error)
            raise OperatorError.from_facts(uid=self.source, what=what, error=error.why) from error
        for channel, row in held.items():
            mark_ms = final[channel]
            yield self._add_columns(row, {C.MARK: [MIN_WATERMARK_MS if mark_ms is None else mark_ms]})

    def _assign_times(self, batch: pa.RecordBatch, records: list[Any]) -> list[int]:
        has_time = C.TIME in batch.schema.names
        known: list[Any] = batch.column(C.TIME).to_pylist() if has_time else [None] * batch.num_rows
        if self.assigner is None:
            return known
        times: list[int] = []
        try:
            for record, known_ms in zip(records, known, strict=True):
                time_ms = check_time("the event time", self.assigner(record, known_ms))
                if time_ms is None:
                    raise ValueError("the event time must be milliseconds, got None")
                times.append(int(time_ms))
        except USER_ERRORS as error:
            what = f"the timestamp assigner of '{self.source}'"
            raise self._make_error(what, batch, len(times), error) from error
        return times

    def _generate_watermarks(
        self, task: ChannelGenerators, batch: pa.RecordBatch, records: list[Any], times: list[int]
    ) -> list[int]:
        marks: list[int] = []
        try:
            channels = batch.column(C.CHANNEL).to_pylist()
            for channel, record, time_ms in zip(channels, records, times, strict=True):
                task.on_event(channel, record, time_ms)
                mark_ms = task.greatest(channel)
                marks.append(MIN_WATERMARK_MS if mark_ms is None else mark_ms)
        except UserFunctionError as error:
            raise self._make_error(_strip_failed(error), batch, len(marks), error, error.why) from error
        return marks

    def _make_error(
        self, what: str, batch: pa.RecordBatch, at: int, error: BaseException, says: str = ""
    ) -> OperatorError:
        function = RowFunction(self.source, lambda record: record, origins=self.origins, what=what)
        return function.make_error(batch, at, error, says)

    @staticmethod
    def _add_columns(batch: pa.RecordBatch, added: dict[str, list[int]]) -> pa.RecordBatch:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        # Added columns come last, in the order of `columns()`.
        columns = {name: column for name, column in columns.items() if name not in added or name == C.MARK}
        columns |= {name: pa.array(values, pa.int64()) for name, values in added.items()}
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _strip_failed(error: UserFunctionError) -> str:
    return error.what.removesuffix(" failed")


def _hold_last(batch: pa.RecordBatch, held: dict[int, pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield all rows but the last one of each channel, which is held until its channel's next row."""
    channels = batch.column(C.CHANNEL).to_numpy()
    last = {int(channel): at for at, channel in enumerate(channels.tolist())}
    for channel in last:
        if channel in held:
            yield held.pop(channel)
    keep = np.ones(batch.num_rows, dtype=bool)
    keep[list(last.values())] = False
    if keep.any():
        yield batch.filter(pa.array(keep))
    held.update({channel: batch.slice(at, 1) for channel, at in last.items()})
