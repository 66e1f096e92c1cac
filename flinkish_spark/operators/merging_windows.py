"""A key's windows that may merge, and where the content of each is kept.

When windows merge, their content stays in the place of one of them: so a session that grows with each
element does not carry its content along. The set knows the place of each window; it is part of the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flinkish_spark.state import ListState, ListStateDescriptor
from flinkish_spark.user_iterators import elements_of
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

    Made anew for each element and timer: so it works on entries as they are stored, of which only those
    that overlap a new window are looked at twice.

    Parameters
    ----------
    assigner
        Says which windows become one.
    stored
        What was stored.
    """

    __slots__ = ("_assigner", "_entries", "_is_changed")

    def __init__(self, assigner: MergingWindowAssigner, stored: Iterable[StoredWindow] = ()) -> None:
        self._assigner, self._entries, self._is_changed = assigner, list(stored), False

    def __len__(self) -> int:
        return len(self._entries)

    def state_window(self, window: TimeWindow) -> TimeWindow | None:
        """Return where a window's content is; None if the window is gone."""
        start_ms, end_ms = window
        for entry in self._entries:
            if entry[0] == start_ms and entry[1] == end_ms:
                return TimeWindow(entry[2], entry[3])
        return None

    def retire(self, window: TimeWindow) -> None:
        """Remove a window."""
        self._entries = [entry for entry in self._entries if entry[:2] != window]
        self._is_changed = True

    def add(self, window: TimeWindow) -> tuple[TimeWindow, list[Merge]]:
        """Add a window; return the one that it is part of now, and what had to merge for that."""
        near = self._entries
        if type(self._assigner).merge_windows is MergingWindowAssigner.merge_windows:
            # Those that neither overlap nor touch stay as they are.
            start_ms, end_ms = window
            near = [entry for entry in near if entry[0] <= end_ms and entry[1] >= start_ms]
            if not near:
                self._replace(near, [(*window, *window)])
                return window, []
            if len(near) == 1:
                return self._grow(near[0], window)
        places = {TimeWindow(entry[0], entry[1]): TimeWindow(entry[2], entry[3]) for entry in near}
        if window in places:
            return window, []
        actual, merges = self._merge(window, places)
        places.setdefault(actual, actual)
        self._replace(near, [(*one, *place) for one, place in places.items()])
        return actual, merges

    def _grow(self, entry: StoredWindow, window: TimeWindow) -> tuple[TimeWindow, list[Merge]]:
        """Make a window cover a new one: what happens to nearly all elements of sessions."""
        before, place = TimeWindow(entry[0], entry[1]), TimeWindow(entry[2], entry[3])
        actual = before.cover(window)
        if actual == before:
            return before, []
        self._replace([entry], [(*actual, *place)])
        return actual, [Merge(actual, [before], place, [])]

    def _replace(self, gone: list[StoredWindow], new: list[StoredWindow]) -> None:
        if gone:
            self._entries = [entry for entry in self._entries if entry not in gone]
        self._entries += new
        self._is_changed = True

    def _merge(
        self, window: TimeWindow, places: dict[TimeWindow, TimeWindow]
    ) -> tuple[TimeWindow, list[Merge]]:
        actual, merges = window, []
        for result, parts in elements_of(self._assigner.merge_windows([*places, window])) if places else ():
            merged = sorted(one for one in parts if one != window)
            if window in parts:
                actual = result
            # The earliest keeps its place: the order of a list's elements follows from it.
            merged_places = [places.pop(one) for one in merged]
            places[result] = merged_places[0]
            gone = [one for one in merged if one != result]
            if gone:
                merges.append(Merge(result, gone, merged_places[0], merged_places[1:]))
        return actual, merges

    def persist(self, state: ListState[StoredWindow]) -> None:
        """Store the set if it has changed."""
        if self._is_changed:
            state.update(self._entries)
            self._is_changed = False
