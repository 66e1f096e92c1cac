"""State of windows as the operator with states and timers keeps it, read by the one that loops over elements.

So a job that was stopped before there was such a loop goes on. Of a key group it happens once: what is stored
next has the new form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.operators.elements import TimeDomain, Timer
from flinkish_spark.operators.frames import Frame
from flinkish_spark.operators.group_state import STATE, Bases, GroupLayout, GroupState, table_bytes
from flinkish_spark.operators.looped_windows import OPEN, LoopedWindows
from flinkish_spark.operators.merging_windows import MERGING_WINDOWS
from flinkish_spark.operators.stored_rows import Row
from flinkish_spark.operators.table_codec import SlotForm, encode_rows, layout_of
from flinkish_spark.operators.window_contents import CONTENTS
from flinkish_spark.windows.time_window import TimeWindow

_MERGING = MERGING_WINDOWS.name


@dataclass(frozen=True)
class FormerWindows:
    """The former form of an operator's state.

    Parameters
    ----------
    layout
        Of the form that it has now.
    former
        Of that which it had.
    clock
        What the windows go by.
    """

    layout: GroupLayout
    former: GroupLayout
    clock: TimeDomain

    def is_of(self, sections: Frame) -> bool:
        """Return whether sections are of the former form."""
        return STATE + CONTENTS in sections or STATE + _MERGING in sections

    def converted(self, value: bytes | memoryview, bases: Bases) -> dict[str, memoryview]:
        """Return the sections that say the same in the form of now, without a base.

        Raises
        ------
        StateMismatch
            What is stored does not fit the declaration.
        """
        stored = GroupState(self.former, value, bases)
        rows = sorted(self._rows(stored), key=lambda row: row.hash)
        return {STATE + OPEN: table_bytes(encode_rows(self.layout.states[OPEN], rows))} if rows else {}

    def _rows(self, stored: GroupState) -> Iterator[Row]:
        places = {row.slot: row.value[0] for row in stored.timer_rows(self.clock)}
        contents = {row.slot: row for row in stored.rows(CONTENTS)}
        width = len(self.former.states[CONTENTS].values)
        for key, bounds, place in _windows(stored, contents):
            window = TimeWindow._make(bounds)
            due_ms = window.max_timestamp_ms
            order = places.get(Timer(due_ms, key, bounds))
            row = contents.get((key, place))
            # Without that timer it has fired, and was kept for late elements: it fires no more.
            if order is not None and row is not None:
                value = row.value if width > 1 else (row.value,)
                yield Row((key, bounds), (due_ms, order, *value), row.hash)


def former_windows(
    operator: LoopedWindows, layout: GroupLayout, key_types: Sequence[T.DataType]
) -> FormerWindows:
    """Return what reads the former form of an operator's state."""
    # Values as they are stored: no instances of classes are made on the way.
    contents = layout_of(operator.contents, key_types, SlotForm.KEY_AND_WINDOW)
    contents = replace(contents, name=CONTENTS, decode=None)
    states = {CONTENTS: contents, _MERGING: layout_of(MERGING_WINDOWS, key_types)}
    return FormerWindows(layout, replace(layout, states=states), operator.clock)


def _windows(stored: GroupState, contents: dict[Any, Row]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield key and bounds of each window, and the bounds of the one in whose place its content is."""
    merging = {row.slot: row.value for row in stored.rows(_MERGING)}
    for key, entries in merging.items():
        for start_ms, end_ms, *place in entries:
            yield key, (start_ms, end_ms), tuple(place)
    for key, bounds in contents:
        if key not in merging:
            yield key, bounds, bounds
