"""A key's windows that may merge, and where the content of each is kept.

When windows merge, their content stays in the place of one of them: so a session that grows with each
element does not carry its content along. The set knows the place of each window; it is part of the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flinkish_spark.state import ListState, ListStateDescriptor
from flinkish_spark.windows.assigners import MergingWindowAssigner
from flinkish_spark.windows.time_window import TimeWindow

#: Entries: a window, and the window in whose place its content is.
MERGING_WINDOWS = ListStateDescriptor(
    "window/merging", "start_ms LONG, end_ms LONG, state_start_ms LONG, state_end_ms LONG"
)

StoredWindow = tuple[int, int, int, int]


class Merge(NamedTuple):
    """Windows that became one.

    Parameters
    ----------
    window
        What they became.
    merged
        The windows that are gone; not the one whose coming caused the merge, which never had anything.
    state_window
        Where the content is to be.
    merged_state_windows
        Where the rest of it is.
    """

    window: TimeWindow
    merged: list[TimeWindow]
    state_window: TimeWindow
    merged_state_windows: list[TimeWindow]


class MergingWindowSet:
    """The windows of one key that are not yet cleaned up.

    Parameters
    ----------
    assigner
        Says which windows become one.
    stored
        What was stored.
    """

    def __init__(self, assigner: MergingWindowAssigner, stored: Iterable[StoredWindow] = ()) -> None:
        self._assigner = assigner
        self._places = {TimeWindow(*one[:2]): TimeWindow(*one[2:]) for one in stored}
        self._before = dict(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def state_window(self, window: TimeWindow) -> TimeWindow | None:
        """Return where a window's content is; None if the window is gone."""
        return self._places.get(window)

    def retire(self, window: TimeWindow) -> None:
        """Remove a window."""
        del self._places[window]

    def add(self, window: TimeWindow) -> tuple[TimeWindow, list[Merge]]:
        """Add a window; return the one that it is part of now, and what had to merge for that."""
        if window in self._places:
            return window, []
        merges, actual = [], window
        for result, parts in self._assigner.merge_windows([*self._places, window]):
            merged = sorted(one for one in parts if one != window)
            if window in parts:
                actual = result
            # The earliest keeps its place: the order of a list's elements follows from it.
            places = [self._places.pop(one) for one in merged]
            self._places[result] = places[0]
            gone = [one for one in merged if one != result]
            if gone:
                merges.append(Merge(result, gone, places[0], places[1:]))
        self._places.setdefault(actual, actual)
        return actual, merges

    def persist(self, state: ListState[StoredWindow]) -> None:
        """Store the set if it has changed."""
        if self._places != self._before:
            state.update((*window, *place) for window, place in self._places.items())
            self._before = dict(self._places)
