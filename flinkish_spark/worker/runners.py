"""Runners, which pass a key group's rows through an operator: as elements, or as columns."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.elements import Progress
from flinkish_spark.core.errors import InternalError
from flinkish_spark.operators.process import (
    Check,
    ElementError,
    Elements,
    GroupRun,
    KeyedStreamOperator,
    OperatorOutput,
    Sides,
    TimerError,
)
from flinkish_spark.state.key_group import GroupLayout, GroupState
from flinkish_spark.state.layered import Array
from flinkish_spark.state.operator_state import choose_copy
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BEHIND, make_block_schema
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.types.rows import OutputError, RowReader, RowWriter
from flinkish_spark.types.to_python import copier_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class InputShape:
    """Columns of one input of an operator; pickled into the plan."""

    schema: pa.Schema
    #: Names of the records' fields, and of the columns that hold them.
    fields: tuple[str, ...]
    field_columns: tuple[str, ...]
    #: Columns of the key. A key that is a field has that field's column.
    key_columns: tuple[str, ...]
    #: Whether the sequence of rows tells their side of the watermark; rows of a source are all behind it.
    is_behind_operator: bool = False
    #: The operator's entry that they belong to; several inputs may have the same one.
    entry: int = 0
    distribution: Distribution = Distribution.BY_KEY

    def places(self, rows: pa.RecordBatch, *, is_before: bool) -> Array:
        """Return the positions of the rows on one side of the watermark, in order."""
        if not self.is_behind_operator:
            return np.arange(0 if is_before else rows.num_rows)
        return np.flatnonzero((rows.column(C.SEQUENCE).to_numpy() < BEHIND) == is_before)


@dataclass(frozen=True)
class RowShape:
    """Columns of the inputs and outputs of an operator; pickled into the plan."""

    #: Its inputs, by number.
    inputs: tuple[InputShape, ...]
    #: Types of the key's parts, the same for all inputs.
    key_types: tuple[T.DataType, ...]
    #: Fields of the main output, then of each side output.
    outputs: tuple[T.StructType, ...]
    side_names: tuple[str, ...] = ()
    #: Whether emitted rows have a column with their event time.
    with_times: bool = False

    @property
    def block_schemas(self) -> tuple[pa.Schema, ...]:
        return tuple(make_block_schema(fields, with_times=self.with_times) for fields in self.outputs)


@dataclass(frozen=True, slots=True)
class OutputRows:
    #: Number of the output: 0 for the main one.
    side: int
    #: Sequence of the first row; the others follow without gaps.
    first: int
    rows: pa.RecordBatch

    @staticmethod
    def divide(side: int, rows: pa.RecordBatch, before: int) -> Iterator[OutputRows]:
        if before:
            yield OutputRows(side, 0, rows.slice(0, before))
        if before < rows.num_rows:
            yield OutputRows(side, BEHIND, rows.slice(before))


#: The rows of each input in canonical order; None for an input without rows.
InputRows = Sequence[pa.RecordBatch | None]


@dataclass(frozen=True, slots=True)
class PartitionResult:
    rows: tuple[OutputRows, ...]
    #: Value to store; None if nothing has changed.
    value: bytes | None


class PartitionSide(ABC):
    """The unkeyed part of an operator, per partition: its broadcast side; runs before the key groups."""

    #: Whether functions must be applied to key groups without elements.
    has_applications = False

    def __init__(self, shape: RowShape) -> None:
        self.shape = shape
        self._writers = [RowWriter.of(fields) for fields in shape.outputs]

    @abstractmethod
    def begin(self, value: bytes | None, inputs: InputRows, progress: Progress) -> PartitionResult:
        """Process the rows without key; `value` is the stored value of the partition."""

    def restore(self, values: Sequence[bytes | None], partition: int, partitions: int) -> bytes | None:
        """Return the initial value of a partition, from those of all partitions of a savepoint."""
        return choose_copy(values)

    def find_row(self, inputs: InputRows, failure: ElementError) -> tuple[int, int]:
        way = Distribution.BROADCAST if failure.is_broadcast else Distribution.BY_CHANNEL
        shape = self.shape
        own = [one if of.distribution is way else None for one, of in zip(inputs, shape.inputs, strict=True)]
        return find_element_row(shape, own, failure)

    def write(self, run: Callable[[Check | None], OperatorOutput]) -> tuple[OutputRows, ...]:
        emitted = run(None)
        try:
            return tuple(self._rows(emitted))
        except OutputError:
            blame_call(lambda: run(lambda emitted: [*self._rows(emitted)]))
            raise

    def elements(self, inputs: InputRows, way: Distribution) -> Sides:
        """Return the rows of one distribution as elements without keys, before and behind the watermark."""
        before, behind = (self._elements(inputs, way, is_before=is_before) for is_before in (True, False))
        return before, behind

    def _elements(self, inputs: InputRows, way: Distribution, *, is_before: bool) -> Elements:
        values: list[Any] = []
        times: list[int | None] = []
        for given, one in zip(inputs, self.shape.inputs, strict=True):
            rows = select_side(given, one, is_before=is_before) if one.distribution is way else None
            if rows is not None:
                values += RowReader(one.fields, one.field_columns, ()).read(rows)[1]
                is_timed = C.TIME in rows.schema.names
                times += rows.column(C.TIME).to_pylist() if is_timed else [None] * rows.num_rows
        return Elements(values, values, times)

    def _rows(self, emitted: OperatorOutput) -> Iterator[OutputRows]:
        return write_rows(self.shape, self._writers, emitted)


class GroupRunner(ABC):
    """Runs an opened operator; `counts` has the counters of the last call of `process`, by name."""

    layout: GroupLayout
    counts: dict[str, int]
    side: PartitionSide | None = None

    @abstractmethod
    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutputRows]:
        """Process the rows of a key group, then update its state."""

    @abstractmethod
    def find_row(self, inputs: InputRows, failure: ElementError) -> tuple[int, int]:
        """Return the input of the element at which the function failed, and its row there."""


#: Makes a runner from an operator, its uid, the maximum parallelism, and the shape of its rows.
MakeRunner = Callable[[Any, str, int, RowShape], GroupRunner]
_Made = TypeVar("_Made", bound=MakeRunner)
_RUNNERS: dict[type, MakeRunner] = {}


def runs(*operators: type) -> Callable[[_Made], _Made]:
    """Register a runner for operators of some types and of their subclasses."""

    def register(make: _Made) -> _Made:
        _RUNNERS.update(dict.fromkeys(operators, make))
        return make

    return register


def make_runner(operator: object, uid: str, max_parallelism: int, shape: RowShape) -> GroupRunner:
    for kind in type(operator).__mro__:
        if (make := _RUNNERS.get(kind)) is not None:
            return make(operator, uid, max_parallelism, shape)
    raise InternalError(f"nothing runs a {type(operator).__name__}")


@runs(KeyedStreamOperator)
class ElementRunner(GroupRunner):
    def __init__(
        self, operator: KeyedStreamOperator, uid: str, max_parallelism: int, shape: RowShape
    ) -> None:
        self._shape, self._operator = shape, operator
        self._run = GroupRun(operator, uid, max_parallelism, copier_of(shape.outputs[0]))
        self.counts: dict[str, int] = {}
        self.layout = GroupLayout.of(self._run.states, shape.key_types)
        self._readers = [RowReader(one.fields, one.field_columns, one.key_columns) for one in shape.inputs]
        self._writers = [RowWriter.of(fields) for fields in shape.outputs]

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutputRows]:
        before, behind = self._prepare(inputs, group, progress)
        emitted = self._run.run(before, progress, behind)
        self.counts = emitted.counts
        # Write first, to name the field of a wrong row before the state that contains it is stored.
        try:
            written = self._write(emitted)
        except OutputError:
            # No state is stored yet.
            blame_call(lambda: self._run_again(inputs, group, progress))
            raise
        self._store(group)
        yield from written

    def sum_open_items(self, entries: Iterable[tuple[str, pa.RecordBatch]]) -> int | None:
        found = [self._operator.count_open_items(name, rows) for name, rows in entries]
        counted = [level for level in found if level is not None]
        return sum(counted) if counted else None

    def _prepare(
        self, inputs: InputRows, group: GroupState, progress: Progress
    ) -> tuple[list[Elements], list[Elements]]:
        hash_of = dict[object, int]()
        sides: dict[bool, list[Elements]] = {True: [], False: []}
        for number, (rows, shape) in enumerate(zip(inputs, self._shape.inputs, strict=True)):
            for is_before, elements in sides.items():
                part = select_side(rows, shape, is_before=is_before)
                if part is None:
                    continue
                keys, values = self._readers[number].read(part)
                hash_of.update(zip(keys, part.column(C.KEY_HASH).to_numpy().tolist(), strict=True))
                times = part.column(C.TIME).to_pylist() if C.TIME in part.schema.names else None
                elements.append(Elements(keys, values, times, shape.entry))
        self._load(group, hash_of, progress)
        return sides[True], sides[False]

    def _store(self, group: GroupState) -> None:
        group.store(self._run.states, self._run.timers)

    def _run_again(self, inputs: InputRows, group: GroupState, progress: Progress) -> None:
        before, behind = self._prepare(inputs, group, progress)
        self._run.run_checked(before, progress, behind, self._write)

    def find_row(self, inputs: InputRows, failure: ElementError) -> tuple[int, int]:
        return find_element_row(self._shape, inputs, failure)

    def _load(self, group: GroupState, hash_of: dict[object, int], progress: Progress) -> None:
        run, also = self._run, self._operator.hashes_to_load(group)
        group.load(run.states, run.timers, hash_of, progress, also)
        self._operator.apply(run, progress)

    def _write(self, emitted: OperatorOutput) -> list[OutputRows]:
        return list(write_rows(self._shape, self._writers, emitted))


def find_element_row(shape: RowShape, inputs: InputRows, failure: ElementError) -> tuple[int, int]:
    """Return the input of the element at which a function failed, and its row there."""
    at = failure.at
    for source, (rows, own) in enumerate(zip(inputs, shape.inputs, strict=True)):
        places = [] if rows is None else own.places(rows, is_before=failure.is_before).tolist()
        if at < len(places):
            return source, places[at]
        at -= len(places)
    raise AssertionError(f"there is no element {failure.at}")


def blame_call(again: Callable[[], object]) -> None:
    """Run a micro-batch again to raise an error that names the element or timer which emitted a wrong row."""
    try:
        again()
    except (ElementError, TimerError) as failure:
        if isinstance(failure.error, OutputError):
            raise
    except Exception:
        _LOG.debug("the micro-batch failed in another way when it was run again", exc_info=True)


def write_rows(
    shape: RowShape, writers: Sequence[RowWriter], emitted: OperatorOutput
) -> Iterator[OutputRows]:
    """Yield the emitted rows of each output, those before the watermark first."""
    outputs: list[tuple[list[Any], list[int | None], int]] = [
        (emitted.rows, emitted.times_ms, emitted.before)
    ]
    for name in shape.side_names:
        # Rows to a side output that no stream reads are dropped, as in Flink.
        found, before = emitted.side.get(name, []), emitted.side_before.get(name, 0)
        outputs.append(([row for row, _ in found], [time_ms for _, time_ms in found], before))
    for side, (rows, times_ms, before) in enumerate(outputs):
        if not rows:
            continue
        try:
            arrays = writers[side].write(rows)
        except OutputError as error:
            if side:
                raise OutputError(f"to the side output '{shape.side_names[side - 1]}': {error}") from error
            raise
        if shape.with_times:
            arrays = [pa.array(times_ms, pa.int64()), *arrays]
        batch = pa.RecordBatch.from_arrays(arrays, schema=shape.block_schemas[side])
        yield from OutputRows.divide(side, batch, before)


def select_side(rows: pa.RecordBatch | None, shape: InputShape, *, is_before: bool) -> pa.RecordBatch | None:
    """Return the rows on one side of the watermark; None if there are none."""
    if rows is None:
        return None
    places = shape.places(rows, is_before=is_before)
    if not len(places):
        return None
    return rows if len(places) == rows.num_rows else rows.take(pa.array(places))
