"""Results of windows on their way out: as they are, or with those that they replace.

A window that fires again, or becomes part of another one, has emitted what does not stand any more. With
retractions it emits that once more, marked, in front of what stands instead: so that whoever adds results up,
or keeps them by key and window, has what is true after every row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from flinkish_spark.operators.keyed_context import KeyedStates
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.runtime.arrow_rows import OutputError, as_row
from flinkish_spark.state import ListStateDescriptor
from flinkish_spark.state.tables import KeyScope
from flinkish_spark.user_iterators import elements_of
from flinkish_spark.windows.time_window import TimeWindow

#: The results that a window has emitted last.
FIRED = "window/fired"


class WindowResults(ABC):
    """What becomes of results, window by window of a key."""

    @abstractmethod
    def open(self, states: KeyedStates) -> None:
        """Declare the state."""

    @abstractmethod
    def fired(self, key: Any, window: TimeWindow, rows: Iterable[Any]) -> Iterable[Any]:
        """Return what is emitted when a window fires with these rows."""

    @abstractmethod
    def withdrawn(self, key: Any, window: TimeWindow) -> Sequence[Any]:
        """Return what is emitted of a window that is part of another one now."""

    @abstractmethod
    def settle(self, key: Any, window: TimeWindow) -> None:
        """Let a window's results stand: nothing replaces them any more."""


class PlainResults(WindowResults):
    """Results as the function made them."""

    def open(self, states: KeyedStates) -> None:
        """Give up what is stored by a program that had retractions."""
        states.drop_state(FIRED)

    def fired(self, key: Any, window: TimeWindow, rows: Iterable[Any]) -> Iterable[Any]:
        """Return the rows."""
        return rows

    def withdrawn(self, key: Any, window: TimeWindow) -> Sequence[Any]:
        """Return nothing."""
        return ()

    def settle(self, key: Any, window: TimeWindow) -> None:
        """Do nothing."""


class RetractedResults(WindowResults):
    """Results with a last field that is true in one that does not stand any more.

    Parameters
    ----------
    result_type
        Of results, without that field. They are kept with the window's state until the window is cleaned up.
    """

    def __init__(self, result_type: ElementType) -> None:
        self._type, self._names = result_type, tuple(field.name for field in result_type.fields)

    def open(self, states: KeyedStates) -> None:
        """Declare what was emitted last, per key and window."""
        # A scope of its own: a window's content may be in the place of another window.
        self._scope = KeyScope()
        own = states.through(self._scope)
        own.per_namespace(FIRED)
        self._last = own.get_list_state(ListStateDescriptor(FIRED, self._type.stored_fields))

    def fired(self, key: Any, window: TimeWindow, rows: Iterable[Any]) -> Iterable[Any]:
        """Return the last results, retracted, and then the rows.

        Raises
        ------
        OutputError
            A row has other fields than were declared.
        """
        # A generator runs here, with the window still the current one.
        now = [self._row(row) for row in elements_of(rows)]
        retracted = self.withdrawn(key, window)
        self._last.update(now)
        return [*retracted, *((*row, False) for row in now)]

    def withdrawn(self, key: Any, window: TimeWindow) -> Sequence[Any]:
        """Return the last results, retracted; they are not kept any more."""
        self._scope.enter(key, window)
        last = [(*row, True) for row in self._last.get()]
        self._last.clear()
        return last

    def settle(self, key: Any, window: TimeWindow) -> None:
        """Keep the last results no longer."""
        self._scope.enter(key, window)
        self._last.clear()

    def _row(self, row: Any) -> tuple[Any, ...]:
        found = as_row(row, self._names)
        if len(found) != len(self._names):
            declared = ", ".join(self._names)
            raise OutputError(f"emitted {len(found)} fields, declared are {len(self._names)}: {declared}")
        return tuple(found)
