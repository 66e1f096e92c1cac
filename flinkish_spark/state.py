"""Keyed state that a function declares in `open` and uses in `process_element`.

State belongs to the current key; it is stored with the checkpoint and comes back after a crash
as it was when the micro-batch of the last kept checkpoint ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class ValueStateDescriptor:
    """Name and type of a :class:`ValueState`.

    Parameters
    ----------
    name
        Unique within the function; part of the stored format.
    value_type
        A Spark type as DDL: one type (``"LONG"``) makes the value a scalar, fields
        (``"total LONG, orders LONG"``) make it a tuple with those fields in order.

    Examples
    --------
    >>> ValueStateDescriptor("total", "total LONG, orders LONG").name
    'total'
    """

    name: str
    value_type: str


class KeyScope:
    """The current key of an operator, shared by its states; internal to the runtime."""

    __slots__ = ("is_dirty", "key")

    def __init__(self) -> None:
        self.key: Any = None
        self.is_dirty = False


class ValueState(Generic[V]):
    """One value per key.

    Valid only inside `process_element`, for the key of the element at hand. Not thread-safe.
    """

    __slots__ = ("_entries", "_scope")

    def __init__(self, scope: KeyScope) -> None:
        self._scope = scope
        self._entries: dict[Any, V] = {}

    def value(self) -> V | None:
        """Return the current key's value, or None if there is none."""
        return self._entries.get(self._scope.key)

    def update(self, value: V) -> None:
        """Set the current key's value; None clears it."""
        if value is None:
            self.clear()
            return
        self._entries[self._scope.key] = value
        self._scope.is_dirty = True

    def clear(self) -> None:
        """Remove the current key's value."""
        if self._entries.pop(self._scope.key, None) is not None:
            self._scope.is_dirty = True

    def _load(self, entries: dict[Any, V]) -> None:
        self._entries = entries

    def _dump(self) -> dict[Any, V]:
        return self._entries
