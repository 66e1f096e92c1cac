"""A key group's rows through folds of windows: columns all the way, called when windows are due too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from flinkish_spark.operators.group_run import ElementFailed, Progress
from flinkish_spark.operators.group_state import GroupLayout, GroupState
from flinkish_spark.operators.keyed_context import KeyedStates
from flinkish_spark.operators.vectorized_windows import Rows, WindowFold
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.group_runners import InputRows, InputShape, OutRows, RowShape, rows_between
from flinkish_spark.runtime.row_blocks import BEHIND, as_schema


class WindowRunner:
    """Runs a :class:`~flinkish_spark.operators.vectorized_windows.WindowFold`; it has one entry.

    A :class:`~flinkish_spark.runtime.group_runners.GroupRunner`. `counts` is what was counted in the last
    call, by name.
    """

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
        """See :class:`~flinkish_spark.runtime.group_runners.GroupRunner`."""
        before, behind = (self._side(inputs, is_before=is_before) for is_before in (True, False))
        outcome = self._fold.run(before, behind, group, progress)
        self.counts = outcome.counts
        yield from self._written(0, 0, outcome.before)
        yield from self._written(0, BEHIND, outcome.behind)
        for side in self._late:
            for first, late in ((0, outcome.late_before), (BEHIND, outcome.late_behind)):
                yield from self._written(side, first, [] if late is None else [late])

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        """See :class:`~flinkish_spark.runtime.group_runners.GroupRunner`; there are no elements."""
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
    """Return the rows of several ways, one behind the other."""
    times = [pa.nulls(len(one.hashes), pa.int64()) if one.times_ms is None else one.times_ms for one in parts]
    hashes = pa.concat_arrays([pa.array(one.hashes) for one in parts]).to_numpy()
    keys = tuple(
        pa.concat_arrays(list(columns)) for columns in zip(*(one.keys for one in parts), strict=True)
    )
    fields = pa.concat_batches([one.fields for one in parts])
    return Rows(hashes, keys, pa.concat_arrays(times), fields)
