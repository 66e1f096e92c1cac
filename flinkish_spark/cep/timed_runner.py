"""Operators that process rows in the order of their times, and their runner."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from flinkish_spark.cep.timed_rows import DueRows, TimedRows, WaitingRows
from flinkish_spark.core.elements import MIN_WATERMARK_MS, Progress, TimeDomain, Timer
from flinkish_spark.operators.process import ElementError, Elements, KeyedStreamOperator
from flinkish_spark.state.key_group import GroupState
from flinkish_spark.state.layered import Array, KeyIndex
from flinkish_spark.transport import columns as C
from flinkish_spark.worker.columns_runner import read_event_times
from flinkish_spark.worker.runners import ElementRunner, InputRows, InputShape, RowShape, runs


class TimedRowsOperator(KeyedStreamOperator, ABC):
    """An operator that processes rows in the order of their times.

    If `timed` is not None, its runner stores waiting rows, puts the due rows of a key group into `timed.due`
    and fires a timer for each key with due rows. Only late rows and rows without a time go to its processor,
    which is that of `timed`.
    """

    timed: TimedRows | None


@dataclass
class _Part:
    source: int
    shape: InputShape
    rows: pa.RecordBatch
    #: Their positions in the input, and their times; MIN_WATERMARK_MS for a row without one.
    places: Array
    times_ms: Array

    def where(self, is_meant: Array) -> _Part:
        rows = self.rows if is_meant.all() else self.rows.filter(pa.array(is_meant))
        return _Part(self.source, self.shape, rows, self.places[is_meant], self.times_ms[is_meant])

    @property
    def hashes(self) -> Array:
        return self.rows.column(C.KEY_HASH).to_numpy()  # type: ignore[no-any-return]


@runs(TimedRowsOperator)
def make_timed_runner(
    operator: TimedRowsOperator, uid: str, max_parallelism: int, shape: RowShape
) -> ElementRunner:
    kind = ElementRunner if operator.timed is None else TimedRunner
    return kind(operator, uid, max_parallelism, shape)


class TimedRunner(ElementRunner):
    """Runs a :class:`.TimedRowsOperator` whose rows wait; only late rows become elements."""

    #: States other than the waiting rows whose keys may have due timers.
    also_due: Sequence[str] = ()

    def __init__(self, operator: TimedRowsOperator, uid: str, max_parallelism: int, shape: RowShape) -> None:
        super().__init__(operator, uid, max_parallelism, shape)
        assert operator.timed is not None
        self._timed = operator.timed
        self._layout = self.layout.states[self._timed.state.name]
        # The layout has the state, but its entries stay columns.
        del self._run.states.tables[self._timed.state.name]
        self._late: dict[bool, list[_Part]] = {}

    def find_row(self, inputs: InputRows, failure: ElementError) -> tuple[int, int]:
        late = self._late[failure.is_before]
        return [(part.source, at) for part in late for at in part.places.tolist()][failure.at]

    def _prepare(
        self, inputs: InputRows, group: GroupState, progress: Progress
    ) -> tuple[list[Elements], list[Elements]]:
        # Divide rows into late and waiting ones, on each side of the watermark.
        coming: list[_Part] = []
        for is_before, reached_ms in ((True, progress.watermark_before_ms), (False, progress.watermark_ms)):
            parts = list(self._parts(inputs, is_before=is_before))
            self._late[is_before] = [part.where(part.times_ms <= reached_ms) for part in parts]
            coming += [part.where(part.times_ms > reached_ms) for part in parts]
        self._waiting = self._put_together(coming, group, progress)
        elements: dict[bool, list[Elements]] = {True: [], False: []}
        hash_of: dict[object, int] = {}
        for is_before, late in self._late.items():
            for part in late:
                keys, values = self._readers[part.source].read(part.rows)
                elements[is_before].append(Elements(keys, values, part.times_ms.tolist(), part.shape.entry))
                hash_of.update(zip(keys, part.hashes.tolist(), strict=True))
        self._timed.due = self._load_due(hash_of, group, progress)
        return elements[True], elements[False]

    def _load_due(self, late: dict[object, int], group: GroupState, progress: Progress) -> DueRows:
        """Load the state of keys with due rows, and of those with late rows, whose hashes are given."""
        waiting = self._waiting
        hash_of = dict(zip(waiting.keys, waiting.index.hashes.tolist(), strict=True))
        self._load(group, hash_of | late, progress)
        timers = self._run.timers.queues[TimeDomain.EVENT_TIME]
        for key, time_ms in waiting.list_first_new():
            timers.register(Timer(time_ms, key, None))
        return waiting.take_due(progress.limits_ms[TimeDomain.EVENT_TIME])

    def _store(self, group: GroupState) -> None:
        super()._store(group)
        self._waiting.store()

    def _parts(self, inputs: InputRows, *, is_before: bool) -> Iterator[_Part]:
        at = self._timed.time_field
        for source, (rows, shape) in enumerate(zip(inputs, self._shape.inputs, strict=True)):
            if rows is None:
                continue
            places = shape.places(rows, is_before=is_before)
            if len(places):
                own = rows if len(places) == rows.num_rows else rows.take(pa.array(places))
                given = dict(zip(own.schema.names, own.columns, strict=True))
                times = read_event_times(
                    given, C.TIME if at is None else shape.field_columns[at], own.num_rows
                )
                yield _Part(source, shape, own, places, times.fill_null(MIN_WATERMARK_MS).to_numpy())

    def _put_together(self, coming: Sequence[_Part], group: GroupState, progress: Progress) -> WaitingRows:
        name, layout = self._timed.state.name, self._layout
        due = np.unique(group.timers.due(TimeDomain.EVENT_TIME, progress.limits_ms[TimeDomain.EVENT_TIME]))
        stored = pa.concat_batches([group.keys_of(one, due) for one in (name, *self.also_due)])
        hashes = np.concatenate([*(part.hashes for part in coming), stored.column(0).to_numpy()])
        keys = []
        for at, kind in enumerate(layout.keys):
            own = [part.rows.column(part.shape.key_columns[at]).cast(kind) for part in coming]
            keys.append(pa.concat_arrays([*own, stored.column(1 + at)]))
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
