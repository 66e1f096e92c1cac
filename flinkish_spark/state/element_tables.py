"""Where lists and maps are kept whose elements expire one by one; internal to the runtime.

What has expired is left out when a key group's entries are taken over. From then on the clock stands still
until the next key group, and what is touched meanwhile lives: so nobody has to look at the clock again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from flinkish_spark.state.tables import KeyScope, StateTable, StoredEntry, Touch
from flinkish_spark.state.ttl import StateTtl, TtlUpdate


class ExpiringElements(StateTable, ABC):
    """Lists or maps by slot; `touches` has the times of their elements, at the same places."""

    __slots__ = ("_ttl", "touches")

    def __init__(self, ttl: StateTtl) -> None:
        super().__init__()
        self._ttl = ttl
        self.touches: dict[Any, Any] = {}

    def take(self, stored: Mapping[Any, StoredEntry], now_ms: int) -> None:
        """Take over stored entries, by slot, without the elements that have expired."""
        for slot, entry in stored.items():
            times = entry.touches or [entry.touched_ms] * len(entry.value)
            lives = [not self._ttl.is_expired(time_ms, now_ms) for time_ms in times]
            if not all(lives):
                self.changed.add(slot)
            if any(lives):
                self.entries[slot], self.touches[slot] = self._living(entry.value, times, lives)

    def touch_of(self, slot: Any) -> Touch:
        """Return what is to be stored of an entry's time."""
        if slot not in self.entries:
            return 0, None
        times = self._times(slot)
        latest_ms = max(times)
        return latest_ms, None if min(times) == latest_ms else times

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self.touches.clear()

    def read(self, scope: KeyScope) -> Any:
        """Return the current slot's entry; where reads count, all of it is touched now."""
        found = self.entries.get(scope.slot)
        if found is not None and self.is_renewed_by_reads:
            self.write(scope, found)
        return found

    def write(self, scope: KeyScope, value: Any) -> None:
        """Set the current slot's entry, which is not empty; all of it is touched now."""
        super().write(scope, value)
        self.touches[scope.slot] = self._all_at(value, scope.now_ms)

    def remove(self, scope: KeyScope) -> None:
        """Remove the current slot's entry, if there is one."""
        super().remove(scope)
        self.touches.pop(scope.slot, None)

    def move(self, source: Any, target: Any) -> None:
        """Give one slot's entry, with the times of its elements, to another."""
        super().move(source, target)
        self.touches[target] = self.touches.pop(source)

    def put(self, scope: KeyScope, value: Any, touches: Any) -> None:
        """Set the current slot's entry and the times of its elements; an empty one is removed."""
        if value:
            super().write(scope, value)
            self.touches[scope.slot] = touches
        else:
            self.remove(scope)

    @property
    def is_renewed_by_reads(self) -> bool:
        """Whether a read is a touch."""
        return self._ttl.update is TtlUpdate.ON_READ_AND_WRITE

    @abstractmethod
    def _living(self, value: Any, times: Sequence[int], lives: Sequence[bool]) -> tuple[Any, Any]:
        """Return the elements that live, and their times."""

    @abstractmethod
    def _all_at(self, value: Any, time_ms: int) -> Any:
        """Return one time for all elements."""

    @abstractmethod
    def _times(self, slot: Any) -> list[int]:
        """Return the times of an entry's elements in their order."""


class ExpiringLists(ExpiringElements):
    """Lists; `touches` are lists of the same length."""

    __slots__ = ()

    def append(self, scope: KeyScope, added: list[Any]) -> None:
        """Append to the current slot's list; only what is added is touched."""
        slot = scope.slot
        self.entries.setdefault(slot, []).extend(added)
        self.touches.setdefault(slot, []).extend([scope.now_ms] * len(added))
        self.changed.add(slot)

    def write_rest(self, scope: KeyScope, rest: list[Any]) -> None:
        """Set the current slot's list to its last elements, which keep their times."""
        self.put(scope, rest, self.touches[scope.slot][-len(rest) :])

    def _living(self, value: Any, times: Sequence[int], lives: Sequence[bool]) -> tuple[Any, Any]:
        return [*compress(value, lives)], [*compress(times, lives)]

    def _all_at(self, value: Any, time_ms: int) -> list[int]:
        return [time_ms] * len(value)

    def _times(self, slot: Any) -> list[int]:
        times: list[int] = self.touches[slot]
        return times


class ExpiringMaps(ExpiringElements):
    """Maps; `touches` are dicts with the same keys."""

    __slots__ = ()

    def _living(self, value: Any, times: Sequence[int], lives: Sequence[bool]) -> tuple[Any, Any]:
        return dict(compress(value.items(), lives)), dict(compress(zip(value, times, strict=True), lives))

    def _all_at(self, value: Any, time_ms: int) -> dict[Any, int]:
        return dict.fromkeys(value, time_ms)

    def _times(self, slot: Any) -> list[int]:
        touches = self.touches[slot]
        return [touches[key] for key in self.entries[slot]]
