"""A key group's rows through an operator that takes them in the order of their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from flinkish_spark.core.elements import MIN_WATERMARK_MS, Progress, TimeDomain, Timer
from flinkish_spark.operators.process import ElementFailed, Elements, GroupRun
from flinkish_spark.operators.timed_rows import DueRows, TimedRows, TimedRowsOperator, WaitingRows
from flinkish_spark.state.key_group import GroupState
from flinkish_spark.state.layered import Array, KeyIndex
from flinkish_spark.transport import columns as C
from flinkish_spark.worker.columns_runner import event_times
from flinkish_spark.worker.runners import ElementRunner, InputRows, InputShape, OutRows, RowShape, runs


@dataclass
class _Part:
    """Rows of one way in, on one side of the watermark."""

    source: int
    shape: InputShape
    rows: pa.RecordBatch
    #: Which of the input's they are, and their times; of one that has none the least number.
    places: Array
    times_ms: Array

    def where(self, is_meant: Array) -> _Part:
        rows = self.rows if is_meant.all() else self.rows.filter(pa.array(is_meant))
        return _Part(self.source, self.shape, rows, self.places[is_meant], self.times_ms[is_meant])

    @property
    def hashes(self) -> Array:
        found: Array = self.rows.column(C.KEY_HASH).to_numpy()
        return found

    def columns(self, names: Sequence[str]) -> list[pa.Array]:
        return [self.rows.column(name) for name in names]


class DueAsColumns(Protocol):
    """The handling of due rows of those keys for which columns are enough."""

    #: States besides the waiting rows whose keys have something to do when a timer is due.
    also_due: tuple[str, ...]

    def prepare(
        self, waiting: WaitingRows, late: Mapping[object, int], group: GroupState, progress: Progress
    ) -> DueRows:
        """Work through the due rows, with the hashes of late ones at hand; return those that are left.

        What the operator needs for these is loaded behind it, and its timers are registered.
        """

    def written(self, others: Sequence[OutRows], counts: dict[str, int]) -> Iterator[OutRows]:
        """Yield what was made of the rows, and what the operator has emitted; count what there was."""

    def store(self, group: GroupState) -> None: ...


@runs(TimedRowsOperator)
def timed_runner(
    operator: TimedRowsOperator, uid: str, max_parallelism: int, shape: RowShape
) -> ElementRunner:
    if operator.timed is None:
        return ElementRunner(operator, uid, max_parallelism, shape)
    return TimedRunner(operator, operator.timed, uid, max_parallelism, shape)


class TimedRunner(ElementRunner):
    """Runs a :class:`.TimedRowsOperator` whose rows wait; its elements are the rows that are late."""

    def __init__(
        self,
        operator: TimedRowsOperator,
        timed: TimedRows,
        uid: str,
        max_parallelism: int,
        shape: RowShape,
        as_columns: Callable[[GroupRun], DueAsColumns] | None = None,
    ) -> None:
        super().__init__(operator, uid, max_parallelism, shape)
        self._timed, self._layout = timed, self.layout.states[timed.state.name]
        # The layout knows the state; its entries stay columns.
        del self._run.states.tables[timed.state.name]
        self._late: dict[bool, list[_Part]] = {}
        self.columns = None if as_columns is None else as_columns(self._run)

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutRows]:
        written = super().process(inputs, group, progress)
        if self.columns is None:
            return written
        others = list(written)
        return self.columns.written(others, self.counts)

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        late = self._late[failure.is_before]
        return [(part.source, at) for part in late for at in part.places.tolist()][failure.at]

    def _prepared(
        self, inputs: InputRows, group: GroupState, progress: Progress
    ) -> tuple[list[Elements], list[Elements]]:
        coming, elements = self._divided(inputs, progress)
        self._waiting = waiting = self._put_together(coming, group, progress)
        late = self._hashes_of_late(elements)
        if self.columns is not None:
            self._timed.due = self.columns.prepare(waiting, late, group, progress)
            return elements[True], elements[False]
        hash_of = dict(zip(waiting.keys, waiting.index.hashes.tolist(), strict=True))
        self._load(group, hash_of | late, progress)
        timers = self._run.timers.queues[TimeDomain.EVENT_TIME]
        for key, time_ms in waiting.first_new():
            timers.register(Timer(time_ms, key, None))
        self._timed.due = waiting.due(progress.limits_ms[TimeDomain.EVENT_TIME])
        return elements[True], elements[False]

    def _divided(
        self, inputs: InputRows, progress: Progress
    ) -> tuple[list[_Part], dict[bool, list[Elements]]]:
        """Return the rows that wait, and the others as elements, by whether they are before the watermark."""
        coming = []
        for is_before, reached_ms in ((True, progress.watermark_before_ms), (False, progress.watermark_ms)):
            parts = list(self._parts(inputs, is_before=is_before))
            self._late[is_before] = [part.where(part.times_ms <= reached_ms) for part in parts]
            coming += [part.where(part.times_ms > reached_ms) for part in parts]
        return coming, {side: list(map(self._elements_of, late)) for side, late in self._late.items()}

    def _hashes_of_late(self, elements: Mapping[bool, Sequence[Elements]]) -> dict[object, int]:
        found: dict[object, int] = {}
        for side, late in self._late.items():
            for given, part in zip(elements[side], late, strict=True):
                found.update(zip(given.keys, part.hashes.tolist(), strict=True))
        return found

    def _store(self, group: GroupState) -> None:
        super()._store(group)
        self._waiting.store()
        if self.columns is not None:
            self.columns.store(group)

    def _parts(self, inputs: InputRows, *, is_before: bool) -> list[_Part]:
        found = []
        for source, (rows, shape) in enumerate(zip(inputs, self._shape.inputs, strict=True)):
            if rows is None:
                continue
            places = shape.places(rows, is_before=is_before)
            if len(places):
                own = rows if len(places) == rows.num_rows else rows.take(pa.array(places))
                found.append(_Part(source, shape, own, places, self._times(own, shape)))
        return found

    def _times(self, rows: pa.RecordBatch, shape: InputShape) -> Array:
        at = self._timed.time_field
        name = C.TIME if at is None else shape.field_columns[at]
        given = dict(zip(rows.schema.names, rows.columns, strict=True))
        times: Array = event_times(given, name, rows.num_rows).fill_null(MIN_WATERMARK_MS).to_numpy()
        return times

    def _elements_of(self, late: _Part) -> Elements:
        keys, values = self._readers[late.source].read(late.rows)
        return Elements(keys, values, late.times_ms.tolist(), late.shape.entry)

    def _put_together(self, coming: Sequence[_Part], group: GroupState, progress: Progress) -> WaitingRows:
        name, layout = self._timed.state.name, self._layout
        due = np.unique(group.timers.due(TimeDomain.EVENT_TIME, progress.limits_ms[TimeDomain.EVENT_TIME]))
        also_due = () if self.columns is None else self.columns.also_due
        stored = pa.concat_batches([group.keys_of(one, due) for one in (name, *also_due)])
        hashes = np.concatenate([*(part.hashes for part in coming), stored.column(0).to_numpy()])
        keys = [
            pa.concat_arrays(
                [
                    *(one[at].cast(kind) for one in (p.columns(p.shape.key_columns) for p in coming)),
                    stored.column(1 + at),
                ]
            )
            for at, kind in enumerate(layout.keys)
        ]
        index = KeyIndex.of(hashes, keys)
        kinds = layout.values[0].value_type
        columns = [
            pa.concat_arrays([part.rows.column(part.shape.field_columns[at]) for part in coming])
            if coming
            else pa.nulls(0, field.type)
            for at, field in enumerate(list(kinds)[:-1])
        ]
        times_ms = np.concatenate([np.empty(0, dtype=np.int64), *(part.times_ms for part in coming)])
        return WaitingRows(
            self._timed, index, group.columns(name, index, progress.processing_time_ms), columns, times_ms
        )
