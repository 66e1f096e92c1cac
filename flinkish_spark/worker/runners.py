"""A key group's rows through an operator: columns to elements and back, or columns all the way."""

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
from flinkish_spark.operators.broadcast import BroadcastElementFailed
from flinkish_spark.operators.process import (
    Check,
    ElementFailed,
    Elements,
    Emitted,
    GroupRun,
    KeyedStreamOperator,
    Sides,
    TimerFailed,
)
from flinkish_spark.state.key_group import GroupLayout, GroupState
from flinkish_spark.state.layered import Array
from flinkish_spark.state.operator_state import choose_copy
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BEHIND, block_schema
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.types.rows import OutputError, RowReader, RowWriter
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
        if before:
            yield OutRows(side, 0, rows.slice(0, before))
        if before < rows.num_rows:
            yield OutRows(side, BEHIND, rows.slice(before))


#: The rows of each input in their canonical order; None where an input has none.
InputRows = Sequence[pa.RecordBatch | None]


@dataclass(frozen=True, slots=True)
class PartitionDone:
    """The result of a partition's side without keys in a micro-batch."""

    rows: tuple[OutRows, ...]
    #: To be stored; None if nothing has changed.
    value: bytes | None


class PartitionSide(ABC):
    """The part of an operator that belongs to a partition and to no key; it runs before the key groups."""

    #: Whether key groups without elements have something to do, too.
    has_applications = False

    def __init__(self, shape: RowShape) -> None:
        self.shape = shape
        self._writers = [RowWriter.of(fields) for fields in shape.outputs]

    @abstractmethod
    def begin(self, value: bytes | None, inputs: InputRows, progress: Progress) -> PartitionDone:
        """Work through the rows that have no key, with what was stored for the partition."""

    def restored(self, values: Sequence[bytes | None], partition: int, partitions: int) -> bytes | None:
        """Return what a partition begins with, of what all partitions of a savepoint had."""
        return choose_copy(values)

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        """Return the input, and which of its rows is the element at which the function failed."""
        is_broadcast = isinstance(failure, BroadcastElementFailed)
        way = Distribution.BROADCAST if is_broadcast else Distribution.BY_CHANNEL
        shape = self.shape
        own = [one if of.distribution is way else None for one, of in zip(inputs, shape.inputs, strict=True)]
        return row_of_element(shape, own, failure)

    def write(self, run: Callable[[Check | None], Emitted]) -> tuple[OutRows, ...]:
        emitted = run(None)
        try:
            return tuple(self._rows(emitted))
        except OutputError:
            blame_call(lambda: run(lambda emitted: [*self._rows(emitted)]))
            raise

    def elements(self, inputs: InputRows, way: Distribution) -> Sides:
        """Return rows that come by one way, before the watermark and behind it, as elements without keys."""
        before, behind = (self._elements(inputs, way, is_before=is_before) for is_before in (True, False))
        return before, behind

    def _elements(self, inputs: InputRows, way: Distribution, *, is_before: bool) -> Elements:
        values: list[Any] = []
        times: list[int | None] = []
        for given, one in zip(inputs, self.shape.inputs, strict=True):
            rows = rows_between(given, one, is_before=is_before) if one.distribution is way else None
            if rows is not None:
                values += RowReader(one.fields, one.field_columns, ()).read(rows)[1]
                is_timed = C.TIME in rows.schema.names
                times += rows.column(C.TIME).to_pylist() if is_timed else [None] * rows.num_rows
        return Elements(values, values, times)

    def _rows(self, emitted: Emitted) -> Iterator[OutRows]:
        return rows_written(self.shape, self._writers, emitted)


class GroupRunner(ABC):
    """An opened operator; `counts` is what was counted in the last call of `process`, by name."""

    layout: GroupLayout
    counts: dict[str, int]
    side: PartitionSide | None = None

    @abstractmethod
    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutRows]:
        """Work through the rows of a key group; the group's state is changed behind it."""

    @abstractmethod
    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        """Return the input, and which of its rows is the element at which the function failed."""


#: Makes the runner of an operator: of that, its uid, the maximum parallelism, and the shape of its rows.
MakeRunner = Callable[[Any, str, int, RowShape], GroupRunner]
_Made = TypeVar("_Made", bound=MakeRunner)
_RUNNERS: dict[type, MakeRunner] = {}


def runs(*operators: type) -> Callable[[_Made], _Made]:
    """Say that a runner is that of operators of some types, and of the types that derive from them."""

    def register(make: _Made) -> _Made:
        _RUNNERS.update(dict.fromkeys(operators, make))
        return make

    return register


def runner_of(operator: object, uid: str, max_parallelism: int, shape: RowShape) -> GroupRunner:
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
            written = self._written(emitted)
        except OutputError:
            # Nothing is stored yet.
            blame_call(lambda: self._run_again(inputs, group, progress))
            raise
        self._store(group)
        yield from written

    def level_of(self, entries: Iterable[tuple[str, pa.RecordBatch]]) -> int | None:
        found = [self._operator.level_in(name, rows) for name, rows in entries]
        counted = [level for level in found if level is not None]
        return sum(counted) if counted else None

    def _prepared(
        self, inputs: InputRows, group: GroupState, progress: Progress
    ) -> tuple[list[Elements], list[Elements]]:
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
        self._load(group, hash_of, progress)
        return sides[True], sides[False]

    def _store(self, group: GroupState) -> None:
        group.store(self._run.states, self._run.timers)

    def _run_again(self, inputs: InputRows, group: GroupState, progress: Progress) -> None:
        before, behind = self._prepared(inputs, group, progress)
        self._run.run_checked(before, progress, behind, self._written)

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        return row_of_element(self._shape, inputs, failure)

    def _load(self, group: GroupState, hash_of: dict[object, int], progress: Progress) -> None:
        run, also = self._run, self._operator.hashes_to_load(group)
        group.load(run.states, run.timers, hash_of, progress, also)
        self._operator.apply(run, progress)

    def _written(self, emitted: Emitted) -> list[OutRows]:
        return list(rows_written(self._shape, self._writers, emitted))


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
    outputs: list[tuple[list[Any], list[int | None], int]] = [
        (emitted.rows, emitted.times_ms, emitted.before)
    ]
    for name in shape.side_names:
        # What is emitted to a side output that nobody reads is dropped, as in Flink.
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
        yield from OutRows.divided(side, batch, before)


def rows_between(rows: pa.RecordBatch | None, shape: InputShape, *, is_before: bool) -> pa.RecordBatch | None:
    """Return the rows on one side of the watermark; None if there are none."""
    if rows is None:
        return None
    places = shape.places(rows, is_before=is_before)
    if not len(places):
        return None
    return rows if len(places) == rows.num_rows else rows.take(pa.array(places))
