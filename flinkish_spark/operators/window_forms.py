"""State of windows in the other of its two forms: with states and timers, or as one loop keeps it.

A program changes from one to the other when its windows do (they get a trigger, or wait for late elements),
and a job that was stopped before there was a loop goes on with it. Of a key group it happens once: what is
stored next has the form that the operator writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.operators.due_table import DUE_FIELDS
from flinkish_spark.operators.elements import TimeDomain, Timer
from flinkish_spark.operators.frames import Frame
from flinkish_spark.operators.group_state import (
    STATE,
    TIMERS,
    Bases,
    GroupLayout,
    GroupState,
)
from flinkish_spark.operators.looped_windows import OPEN, ORDER_FIELD, LoopedWindows
from flinkish_spark.operators.merging_windows import MERGING_WINDOWS
from flinkish_spark.operators.payloads import table_bytes
from flinkish_spark.operators.stored_rows import Row
from flinkish_spark.operators.table_codec import SlotForm, TableLayout, encode_rows, layout_of
from flinkish_spark.operators.window_contents import CONTENTS
from flinkish_spark.windows.time_window import TimeWindow

_MERGING = MERGING_WINDOWS.name


@dataclass(frozen=True)
class WithTimers:
    """What the operator with states and timers has stored, for the loop.

    Parameters
    ----------
    layout
        Of the loop's state.
    other
        Of what is read.
    clock
        What the windows go by.
    """

    layout: GroupLayout
    other: GroupLayout
    clock: TimeDomain

    def is_of(self, sections: Frame) -> bool:
        """Return whether sections are of that form."""
        return STATE + CONTENTS in sections or STATE + _MERGING in sections

    def converted(self, value: bytes | memoryview, bases: Bases) -> dict[str, memoryview]:
        """Return the sections that say the same in the loop's form, without a base.

        Raises
        ------
        StateMismatch
            What is stored does not fit the declaration.
        """
        stored = GroupState(self.other, value, bases)
        return _sections({STATE + OPEN: self.layout.states[OPEN]}, {STATE + OPEN: self._rows(stored)})

    def _rows(self, stored: GroupState) -> Iterator[Row]:
        places = {row.slot: row.value[0] for row in stored.timer_rows(self.clock)}
        contents = {row.slot: row for row in stored.rows(CONTENTS)}
        is_spread = len(self.other.states[CONTENTS].values) > 1
        for key, bounds, place in _windows(stored, contents):
            due_ms = TimeWindow._make(bounds).max_timestamp_ms
            order = places.get(Timer(due_ms, key, bounds))
            row = contents.get((key, place))
            # Without that timer it has fired, and was kept for late elements: it fires no more.
            if order is not None and row is not None:
                value = row.value if is_spread else (row.value,)
                yield Row((key, bounds), (due_ms, order, *value), row.hash)


@dataclass(frozen=True)
class FromLoop:
    """What the loop has stored, for the operator with states and timers; parameters as of `WithTimers`."""

    layout: GroupLayout
    other: GroupLayout
    clock: TimeDomain

    def is_of(self, sections: Frame) -> bool:
        """Return whether sections are of that form."""
        return STATE + OPEN in sections

    def converted(self, value: bytes | memoryview, bases: Bases) -> dict[str, memoryview]:
        """Return the sections that say the same with states and timers; see :class:`WithTimers`."""
        contents, timers = list[Row](), list[Row]()
        merging: dict[Any, Row] = {}
        is_spread = len(self.layout.states[CONTENTS].values) > 1
        for row in GroupState(self.other, value, bases).rows(OPEN):
            key, bounds = row.slot
            _, order, *own = row.value
            contents.append(Row(row.slot, tuple(own) if is_spread else own[0], row.hash))
            due_ms = TimeWindow._make(bounds).max_timestamp_ms
            timers.append(Row(Timer(due_ms, key, bounds), (order, None), row.hash))
            merging.setdefault(key, Row(key, [], row.hash)).value.append((*bounds, *bounds))
        rows: dict[str, Iterable[Row]] = {STATE + CONTENTS: contents, TIMERS + self.clock.value: timers}
        if _MERGING in self.layout.states:
            rows[STATE + _MERGING] = merging.values()
        return _sections(self.layout.sections, rows)


def form_with_timers(
    operator: LoopedWindows, layout: GroupLayout, key_types: Sequence[T.DataType]
) -> WithTimers:
    """Return what reads for a loop."""
    # Values as they are stored: no instances of classes are made on the way.
    contents = layout_of(operator.contents, key_types, SlotForm.KEY_AND_WINDOW)
    contents = replace(contents, name=CONTENTS, decode=None)
    states = {CONTENTS: contents, _MERGING: layout_of(MERGING_WINDOWS, key_types)}
    return WithTimers(layout, replace(layout, states=states), operator.clock)


def form_of_loop(layout: GroupLayout, clock: TimeDomain) -> FromLoop:
    """Return what reads for an operator of windows with states and timers."""
    contents = layout.states[CONTENTS]
    own = TableLayout(
        OPEN,
        contents.keys,
        (pa.int64(), pa.int64(), *contents.values),
        SlotForm.KEY_AND_WINDOW,
        value_names=(DUE_FIELDS[clock], ORDER_FIELD, *(contents.value_names or ("value",))),
    )
    return FromLoop(layout, replace(layout, states={OPEN: own}), clock)


def _windows(stored: GroupState, contents: dict[Any, Row]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield key and bounds of each window, and the bounds of the one in whose place its content is."""
    merging = {row.slot: row.value for row in stored.rows(_MERGING)}
    for key, entries in merging.items():
        for start_ms, end_ms, *place in entries:
            yield key, (start_ms, end_ms), tuple(place)
    for key, bounds in contents:
        if key not in merging:
            yield key, bounds, bounds


def _sections(layouts: dict[str, TableLayout], rows: dict[str, Iterable[Row]]) -> dict[str, memoryview]:
    """Return the payloads of sections; none of those without rows."""
    batches = {name: encode_rows(layouts[name], list(own)) for name, own in rows.items()}
    return {name: table_bytes(batch) for name, batch in batches.items() if batch.num_rows}
