"""A key group's rows through an operator: columns to elements and back, or columns all the way.

Made once per copy of an operator, that is once per Python worker; called once per key group that has rows or
timers that are due, in every micro-batch.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.operators.element_windows import WindowOperator
from flinkish_spark.operators.group_run import (
    ElementFailed,
    Elements,
    Emitted,
    GroupRun,
    Progress,
    TimerFailed,
)
from flinkish_spark.operators.group_state import GroupLayout, GroupState
from flinkish_spark.operators.key_index import Array
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator
from flinkish_spark.operators.window_forms import form_of_loop
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.arrow_rows import OutputError, RowReader, RowWriter
from flinkish_spark.runtime.row_blocks import BEHIND, block_schema
from flinkish_spark.runtime.taken_values import taking

_LOG = logging.getLogger(__name__)


class Distribution(enum.Enum):
    """By what rows of an input are spread over the partitions."""

    #: The key group.
    BY_KEY = "BY_KEY"
    #: Every partition gets all of them.
    BROADCAST = "BROADCAST"
    #: The channel, where there is no key.
    BY_CHANNEL = "BY_CHANNEL"


@dataclass(frozen=True)
class InputShape:
    """How the rows of one input come into an operator; travels in the plan.

    Parameters
    ----------
    schema
        Of the blocks.
    fields, field_columns
        Names of the records' fields, and of the columns that hold them.
    key_columns
        Of the key. A key that is a field has that field's column.
    is_behind_operator
        Whether rows say by their sequence on which side of the watermark they are; those of a source are
        all behind it.
    entry
        Which of the operator's inputs they are for: several ways may lead into one.
    distribution
        How they are spread over the partitions.
    """

    schema: pa.Schema
    fields: tuple[str, ...]
    field_columns: tuple[str, ...]
    key_columns: tuple[str, ...]
    is_behind_operator: bool = False
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
    """How rows come into an operator and how they go out of it; travels in the plan.

    Parameters
    ----------
    inputs
        The ways into it, by number.
    key_types
        Of the key, the same for all inputs.
    outputs
        Fields of the main output, then of each side output.
    side_names
        Names of the side outputs.
    with_times
        Whether rows that go out have their event time beside them.
    """

    inputs: tuple[InputShape, ...]
    key_types: tuple[T.DataType, ...]
    outputs: tuple[T.StructType, ...]
    side_names: tuple[str, ...] = ()
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
        """Work through the rows of a key group; the group's state is changed behind it.

        Raises
        ------
        ElementFailed, TimerFailed, OutputError
            The function is to blame; nothing of the micro-batch counts.
        """

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        """Return the input, and which of its rows is the element at which the function failed."""


class ElementRunner:
    """Runs a :class:`KeyedStreamOperator`, element by element."""

    def __init__(
        self, operator: KeyedStreamOperator, uid: str, max_parallelism: int, shape: RowShape
    ) -> None:
        self._shape = shape
        self._run = GroupRun(operator, uid, max_parallelism, taking(shape.outputs[0]))
        #: What was counted in the last call, by name.
        self.counts: dict[str, int] = {}
        self.layout = GroupLayout.of(self._run.states, shape.key_types)
        if isinstance(operator, WindowOperator):
            own = form_of_loop(self.layout, operator.clock)
            self.layout = replace(self.layout, other_form=own)
        self._readers = [RowReader(one.fields, one.field_columns, one.key_columns) for one in shape.inputs]
        self._writers = [RowWriter.of(fields) for fields in shape.outputs]

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutRows]:
        """See :class:`GroupRunner`."""
        before, behind, hash_of = self._elements(inputs)
        self._load(group, hash_of, progress)
        emitted = self._run.run(before, progress, behind)
        self.counts = emitted.counts
        # First, since it names the field of a row that is not as it was declared; states keep results, too.
        try:
            written = list(self._written(emitted))
        except OutputError:
            self._blame_call(inputs, group, progress)
            raise
        group.store(self._run.states, self._run.timers)
        yield from written

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
            before, behind, hash_of = self._elements(inputs)
            self._load(group, hash_of, progress)
            self._run.run_checked(before, progress, behind, lambda emitted: [*self._written(emitted)])

        blame_call(again)

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        """See :class:`GroupRunner`."""
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
    """Run a micro-batch again to raise the error of the element or timer that emitted a wrong row.

    Parameters
    ----------
    again
        Runs it with a check behind each call. A function that does something else this time is not blamed.
    """
    try:
        again()
    except (ElementFailed, TimerFailed) as failure:
        if isinstance(failure.error, OutputError):
            raise
    except Exception:
        _LOG.debug("the micro-batch did something else when it was run again", exc_info=True)


def rows_written(shape: RowShape, writers: Sequence[RowWriter], emitted: Emitted) -> Iterator[OutRows]:
    """Yield what was emitted as rows of each output, those before the watermark first.

    Raises
    ------
    OutputError
        A row is not as it was declared.
    """
    main = list(zip(emitted.rows, emitted.times_ms, strict=True))
    yield from _output(shape, writers, 0, main, emitted.before)
    for side, name in enumerate(shape.side_names, start=1):
        # What is emitted to a side output that nobody reads is dropped, as in Flink.
        yield from _output(shape, writers, side, emitted.side.get(name, []), emitted.side_before.get(name, 0))


def _output(
    shape: RowShape,
    writers: Sequence[RowWriter],
    side: int,
    found: Sequence[tuple[object, int | None]],
    before: int,
) -> Iterator[OutRows]:
    if not found:
        return
    rows, times_ms = [row for row, _ in found], [time_ms for _, time_ms in found]
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
