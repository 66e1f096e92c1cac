"""A key group's rows through an operator: columns to elements and back, or columns all the way.

Made once per copy of an operator, that is once per Python worker; called once per key group that has rows or
timers that are due, in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.operators.group_run import ElementFailed, Elements, Emitted, GroupRun, Progress
from flinkish_spark.operators.group_state import GroupLayout, GroupState
from flinkish_spark.operators.key_index import KeyIndex
from flinkish_spark.operators.keyed_context import KeyedStates
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator
from flinkish_spark.operators.vectorized import BatchContext, VectorizedProcessFunction
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.arrow_rows import OutputError, RowReader, RowWriter
from flinkish_spark.runtime.row_blocks import BEHIND, arrow_schema, as_schema, block_schema


@dataclass(frozen=True)
class RowShape:
    """How rows come into an operator and how they go out of it; travels in the plan.

    Parameters
    ----------
    fields, field_columns
        Names of the records' fields, and of the columns that hold them.
    key_columns, key_types
        Of the key. A key that is a field has that field's column.
    outputs
        Fields of the main output, then of each side output.
    side_names
        Names of the side outputs.
    is_behind_operator
        Whether rows say by their sequence on which side of the watermark they are; those of a source are
        all behind it.
    with_times
        Whether rows that go out have their event time beside them.
    """

    fields: tuple[str, ...]
    field_columns: tuple[str, ...]
    key_columns: tuple[str, ...]
    key_types: tuple[T.DataType, ...]
    outputs: tuple[T.StructType, ...]
    side_names: tuple[str, ...] = ()
    is_behind_operator: bool = False
    with_times: bool = False

    @property
    def block_schemas(self) -> tuple[pa.Schema, ...]:
        """Schemas of the blocks that go out."""
        return tuple(block_schema(fields, with_times=self.with_times) for fields in self.outputs)


@dataclass(frozen=True, slots=True)
class OutRows:
    """Rows that go out together.

    Parameters
    ----------
    side
        0 for the main output.
    first
        Sequence of the first; the others follow.
    """

    side: int
    first: int
    rows: pa.RecordBatch


class GroupRunner(Protocol):
    """An opened operator."""

    layout: GroupLayout

    def process(
        self, rows: pa.RecordBatch | None, group: GroupState, progress: Progress
    ) -> Iterator[OutRows]:
        """Work through rows in their canonical order, None for none; the group's state is changed behind it.

        Raises
        ------
        ElementFailed, TimerFailed, OutputError
                The function is to blame; nothing of the micro-batch counts.
        """

    def row_of(self, rows: pa.RecordBatch, failure: ElementFailed) -> int:
        """Return which of the rows an element is at which the function failed."""


class ElementRunner:
    """Runs a :class:`KeyedStreamOperator`, element by element."""

    def __init__(
        self, operator: KeyedStreamOperator, uid: str, max_parallelism: int, shape: RowShape
    ) -> None:
        self._shape = shape
        self._run = GroupRun(operator, uid, max_parallelism)
        self.layout = GroupLayout.of(self._run.states, shape.key_types)
        self._reader = RowReader(shape.fields, shape.field_columns, shape.key_columns)
        self._schemas = shape.block_schemas
        self._writers = [RowWriter(arrow_schema(fields)) for fields in shape.outputs]

    def process(
        self, rows: pa.RecordBatch | None, group: GroupState, progress: Progress
    ) -> Iterator[OutRows]:
        """See :class:`GroupRunner`."""
        parts = [] if rows is None else self._parts(rows)
        hash_of = dict[object, int]()
        inputs: list[list[Elements]] = []
        for part in parts:
            keys, values = self._reader.read(part)
            hash_of.update(zip(keys, part.column(C.KEY_HASH).to_numpy().tolist(), strict=True))
            times = part.column(C.TIME).to_pylist() if C.TIME in part.schema.names else None
            inputs.append([Elements(keys, values, times)] if len(keys) else [])
        before, behind = inputs if len(inputs) == 2 else ([], inputs[0] if inputs else [])
        group.load(self._run, hash_of, progress)
        emitted = self._run.run(before, progress, behind)
        group.store(self._run)
        yield from self._written(emitted)

    def row_of(self, rows: pa.RecordBatch, failure: ElementFailed) -> int:
        """See :class:`GroupRunner`."""
        parts = self._parts(rows)
        if len(parts) == 1:
            return failure.at
        is_before = rows.column(C.SEQUENCE).to_numpy() < BEHIND
        return int(np.flatnonzero(is_before == failure.is_before)[failure.at])

    def _parts(self, rows: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Return the rows before and behind the watermark, or all of them where all are behind it."""
        if not self._shape.is_behind_operator:
            return [rows]
        is_behind = rows.column(C.SEQUENCE).to_numpy() >= BEHIND
        if is_behind.all():
            return [rows]
        return [rows.filter(pa.array(~is_behind)), rows.filter(pa.array(is_behind))]

    def _written(self, emitted: Emitted) -> Iterator[OutRows]:
        yield from self._output(0, emitted.rows, emitted.times_ms, emitted.before)
        for side, name in enumerate(self._shape.side_names, start=1):
            # What is emitted to a side output that nobody reads is dropped, as in Flink.
            found = emitted.side.get(name, [])
            rows, times = [row for row, _ in found], [time_ms for _, time_ms in found]
            yield from self._output(side, rows, times, emitted.side_before.get(name, 0))

    def _output(
        self, side: int, rows: list[object], times_ms: Sequence[int | None], before: int
    ) -> Iterator[OutRows]:
        if not rows:
            return
        try:
            arrays = self._writers[side].write(rows)
        except OutputError as error:
            if side:
                raise OutputError(
                    f"to the side output '{self._shape.side_names[side - 1]}': {error}"
                ) from error
            raise
        if self._shape.with_times:
            arrays = [pa.array(times_ms, pa.int64()), *arrays]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schemas[side])
        if before:
            yield OutRows(side, 0, batch.slice(0, before))
        if before < len(rows):
            yield OutRows(side, BEHIND, batch.slice(before))


class BatchRunner:
    """Runs a :class:`VectorizedProcessFunction`, all rows of a key group at once."""

    def __init__(
        self, function: VectorizedProcessFunction, uid: str, max_parallelism: int, shape: RowShape
    ) -> None:
        self._function, self._shape = function, shape
        states = KeyedStates(uid, max_parallelism)
        function.open(states)
        self.layout = GroupLayout.of(states, shape.key_types)
        self._schema = shape.block_schemas[0]
        self._columns = dict(zip(shape.field_columns, shape.fields, strict=True))

    def process(
        self, rows: pa.RecordBatch | None, group: GroupState, progress: Progress
    ) -> Iterator[OutRows]:
        """See :class:`GroupRunner`."""
        if rows is None:
            return
        index = KeyIndex.of(
            rows.column(C.KEY_HASH).to_numpy(), [rows.column(name) for name in self._shape.key_columns]
        )
        times = rows.column(C.TIME).to_numpy() if C.TIME in rows.schema.names else None
        context = BatchContext(index, times, progress, group)
        own = rows.select(list(self._columns))
        batch = pa.RecordBatch.from_arrays(own.columns, names=list(self._columns.values()))
        first = BEHIND
        for out in self._function.process_batch(batch, context) or ():
            yield OutRows(0, first, self._checked(out))
            first += out.num_rows

    def row_of(self, rows: pa.RecordBatch, failure: ElementFailed) -> int:
        """See :class:`GroupRunner`; there are no elements."""
        return failure.at

    def _checked(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch as it was declared; columns are found by their names."""
        wanted = self._schema.names
        times = {C.TIME: pa.nulls(rows.num_rows, pa.int64())} if self._shape.with_times else {}
        given: Mapping[str, pa.Array] = {**times, **dict(zip(rows.schema.names, rows.columns, strict=True))}
        if set(given) != set(wanted):
            raise OutputError(f"emitted the columns {', '.join(given)}, declared are {', '.join(wanted)}")
        try:
            return as_schema(
                pa.RecordBatch.from_arrays([given[n] for n in wanted], names=wanted), self._schema
            )
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise OutputError(f"emitted a wrong column: {error}") from error
