"""Paths from one stream into several operator inputs: their functions run side by side on each record.

    rows of the stream  --InputPaths-->  rows by input  --hash of the key, route-->  InputPackers  -->  blocks

The stream is in the plan once. :class:`InputPaths` runs the functions of all paths; without functions, JVM
columns do the same. All of this runs in mapInArrow, once per task.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.core.arrow_pass import ComposedWorker, Worker
from flinkish_spark.state.layered import Array
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import PACKED, BlockPacker, Packing
from flinkish_spark.types.arrow_types import as_schema
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.types.schemas import PREFIX

#: Position of the row in the batch that a row was made of.
ORIGIN = f"{PREFIX}origin"
#: Number of the input that a row is for.
INPUT = f"{PREFIX}input"
_RECORD, _BARRIER = int(C.Kind.RECORD), int(C.Kind.BARRIER)


class _BatchwiseWorker:
    """A worker called batch by batch, which makes one batch of each; it starts with the first batch."""

    def __init__(self, worker: Worker) -> None:
        self._batch: pa.RecordBatch | None = None
        self.made = iter(worker(self._yield_batches()))

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self._batch = batch
        return next(self.made)

    def close(self) -> None:
        if isinstance(self.made, Generator):
            self.made.close()

    def _yield_batches(self) -> Iterator[pa.RecordBatch]:
        while self._batch is not None:
            batch, self._batch = self._batch, None
            yield batch


@contextmanager
def run_batchwise(workers: Iterable[Worker]) -> Iterator[list[_BatchwiseWorker]]:
    fed = [_BatchwiseWorker(worker) for worker in workers]
    try:
        yield fed
        for one in fed:
            for _ in one.made:
                raise AssertionError("a worker made a batch of nothing")
    finally:
        for one in fed:
            one.close()


@dataclass(frozen=True)
class ParallelWorkers:
    """Runs workers over the same rows; the results of a row are adjacent, in the order of the workers."""

    workers: tuple[Worker, ...]
    #: Columns of each worker's output, in any order.
    made: T.StructType

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = arrow_schema([*self.made, T.StructField(ORIGIN, T.LongType())])
        with run_batchwise(self.workers) as fed:
            for batch in batches:
                origin = pa.array(np.arange(batch.num_rows, dtype=np.int64))
                names = [*batch.schema.names, ORIGIN]
                numbered = pa.RecordBatch.from_arrays([*batch.columns, origin], names=names)
                parts = [as_schema(one.process(numbered).select(schema.names), schema) for one in fed]
                rows = pa.concat_batches(parts)
                order = np.argsort(rows.column(ORIGIN).to_numpy(), kind="stable")
                yield rows.take(pa.array(order)).drop_columns([ORIGIN])


@dataclass(frozen=True)
class InputPath:
    """How one input gets its rows from those of a stream; pickled into the plan."""

    #: Number of the operator's output that it reads; a source has one output.
    side: int
    #: Columns of the stream's frame with the fields of that output.
    columns: tuple[str, ...]
    #: The worker's input columns: control columns, then these fields under their own names.
    given: T.StructType
    #: The functions of the path; each of its workers makes one batch of each.
    worker: ComposedWorker
    #: Columns of the worker's output to use.
    made: T.StructType
    #: Their unique names among those of all inputs.
    names: tuple[str, ...]
    #: Column with the record's sequence in its source; null if this path has dropped it.
    place: str = C.SEQUENCE

    @property
    def fields(self) -> list[T.StructField]:
        return [T.StructField(name, one.dataType) for name, one in zip(self.names, self.made, strict=True)]


@dataclass(frozen=True)
class InputPaths:
    """Turns the rows of a stream into rows per input; control rows, if any, pass through."""

    inputs: tuple[InputPath, ...]
    #: Columns of all rows: control columns, and the event time if there is one.
    control: T.StructType

    @property
    def columns(self) -> T.StructType:
        """Return the output columns; a row has nulls for other inputs."""
        own = [field for one in self.inputs for field in one.fields]
        return T.StructType([*self.control, T.StructField(INPUT, T.IntegerType()), *own])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = arrow_schema(self.columns)
        with run_batchwise(one.worker for one in self.inputs) as fed:
            for batch in batches:
                names = batch.schema.names
                is_record = np.ones(batch.num_rows, dtype=bool)
                if C.KIND in names:
                    is_record = batch.column(C.KIND).to_numpy() == _RECORD
                # Without the column there is only one output.
                sides = batch.column(C.SIDE).to_numpy(zero_copy_only=False) if C.SIDE in names else None
                if not is_record.all():
                    control = batch.filter(pa.array(~is_record))
                    yield self._arrange(control, schema, {})
                for number, (one, run) in enumerate(zip(self.inputs, fed, strict=True)):
                    is_own = is_record if sides is None else is_record & (sides == one.side)
                    own = batch.filter(pa.array(is_own))
                    made = run.process(_select_input(own, one)) if own.num_rows else own
                    if made.num_rows:
                        yield self._to_rows(made, number, schema)

    def _to_rows(self, made: pa.RecordBatch, number: int, schema: pa.Schema) -> pa.RecordBatch:
        one, count = self.inputs[number], made.num_rows
        arrays = dict(zip(one.names, (made.column(name) for name in one.made.names), strict=True))
        arrays[INPUT] = pa.array(np.full(count, number, dtype=np.int32))
        arrays[C.KIND] = pa.array(np.full(count, _RECORD, dtype=np.int32))
        arrays[C.CHECKPOINT] = pa.array(np.zeros(count, dtype=np.int64))
        return self._arrange(made, schema, arrays)

    def _arrange(
        self, rows: pa.RecordBatch, schema: pa.Schema, arrays: dict[str, pa.Array]
    ) -> pa.RecordBatch:
        shared = {name: rows.column(name) for name in self.control.names if name in rows.schema.names}
        found = {**shared, **arrays}
        columns = [found.get(field.name, pa.nulls(rows.num_rows, field.type)) for field in schema]
        plain = pa.RecordBatch.from_arrays(columns, names=schema.names)
        return as_schema(plain, schema)


def _select_input(rows: pa.RecordBatch, one: InputPath) -> pa.RecordBatch:
    control = [
        one.place if name == C.SEQUENCE else name for name in one.given.names if name.startswith(PREFIX)
    ]
    columns = [rows.column(name) for name in (*control, *one.columns)]
    return as_schema(pa.RecordBatch.from_arrays(columns, names=one.given.names), arrow_schema(one.given))


class ControlRows(enum.Enum):
    """The control rows that an input takes from those of the shared stream."""

    #: Every control row passes once.
    ALL = "ALL"
    #: Another input of the same operator takes the others.
    BARRIERS = "BARRIERS"
    #: Another operator's input takes all of them: a row for each operator is among them.
    NONE = "NONE"


@dataclass(frozen=True)
class InputPacker:
    """Columns of one input among those of all inputs, and its packer."""

    #: Column with the route of a row; null if the row is not for this input.
    route: str
    #: Columns for the packer, and their names there.
    columns: tuple[str, ...]
    names: tuple[str, ...]
    packer: BlockPacker
    #: Control rows to take, which already have routes.
    takes: ControlRows


@dataclass(frozen=True)
class InputPackers:
    """Packs rows into blocks per input. A record may be for several inputs; a barrier is for all of them."""

    inputs: tuple[InputPacker, ...]
    columns: ClassVar[T.StructType] = PACKED

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        runs = [Packing(one.packer) for one in self.inputs]
        for batch in batches:
            kinds = batch.column(C.KIND).to_numpy() if C.KIND in batch.schema.names else None
            for one, run in zip(self.inputs, runs, strict=True):
                yield from run.take(_own(batch, one, kinds))
        for run in runs:
            yield from run.finish()


def _own(batch: pa.RecordBatch, one: InputPacker, kinds: Array | None) -> pa.RecordBatch:
    """Return the rows of an input after their routes; `kinds` is None if all rows are records."""
    routes = batch.column(one.route)
    if kinds is None:
        rows = batch if not routes.null_count else batch.filter(routes.is_valid())
        columns = [rows.column(name) for name in (one.route, *one.columns)]
        return pa.RecordBatch.from_arrays(columns, names=[C.ROUTE, *one.names])
    has_route = routes.is_valid().to_numpy(zero_copy_only=False)
    own_rows = (kinds == _RECORD) & has_route
    if one.takes is ControlRows.ALL:
        own_rows |= kinds != _RECORD
    elif one.takes is ControlRows.BARRIERS:
        own_rows |= kinds == _BARRIER
    rows = batch if own_rows.all() else batch.filter(pa.array(own_rows))
    route = pc.if_else(rows.column(one.route).is_valid(), rows.column(one.route), rows.column(C.ROUTE))
    names = (C.KIND, C.CHECKPOINT, *one.columns)
    columns = [route, *(rows.column(name) for name in names)]
    own = [C.ROUTE, C.KIND, C.CHECKPOINT, *one.names]
    return pa.RecordBatch.from_arrays(columns, names=own)
