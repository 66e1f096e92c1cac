"""Where the states of a key group keep their entries while it is worked on; internal to the runtime.

A slot is a key, or a (key, namespace) for states of windows. Only slots of keys that are worked on are
in a table; what changed is what has to be stored again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from flinkish_spark.state.ttl import StateTtl, TtlUpdate


class StoredEntry(Protocol):
    """What is stored of a slot."""

    @property
    def value(self) -> Any:
        """The entry."""

    @property
    def touched_ms(self) -> int:
        """When it was touched last; 0 where entries do not expire."""

    @property
    def touches(self) -> list[int] | None:
        """When each of its elements was, in their order; None where that is the same for all."""


#: What is stored of an entry's time: as in :class:`StoredEntry`.
Touch = tuple[int, "list[int] | None"]


class KeyScope:
    """Whose turn it is in an operator; shared by its states."""

    __slots__ = ("key", "namespace", "now_ms", "slot")

    def __init__(self) -> None:
        self.key: Any = None
        self.namespace: Any = None
        #: Where states look: the key, with its namespace if it has one.
        self.slot: Any = None
        self.now_ms = 0

    def enter(self, key: Any, namespace: Any = None) -> None:
        """Make a key, and maybe a namespace of its, the current one."""
        self.key, self.namespace = key, namespace
        self.slot = key if namespace is None else (key, namespace)


class StateTable:
    """Entries of one state by slot, and the slots whose entries differ from what is stored."""

    __slots__ = ("changed", "entries", "lent")

    def __init__(self) -> None:
        self.entries: dict[Any, Any] = {}
        self.changed: set[Any] = set()
        #: Slots whose entries a function has had in hand and may have changed in place.
        self.lent: set[Any] = set()

    def take(self, stored: Mapping[Any, StoredEntry], now_ms: int) -> None:
        """Take over stored entries, by slot; `now_ms` stands still until the next :meth:`clear`."""
        self.entries.update((slot, entry.value) for slot, entry in stored.items())

    def touch_of(self, slot: Any) -> Touch:
        """Return what is to be stored of an entry's time."""
        return 0, None

    def read(self, scope: KeyScope) -> Any:
        """Return the current slot's entry, None if there is none."""
        return self.entries.get(scope.slot)

    def lend(self, scope: KeyScope) -> Any:
        """Return the current slot's entry, which may be changed in place; None if there is none."""
        value = self.read(scope)
        if value is not None:
            self.lent.add(scope.slot)
        return value

    def written_in_place(self, slot: Any, now_ms: int) -> None:
        """Take note that a function has changed an entry that it had in hand: as if it had put it back."""
        self.changed.add(slot)

    def clear(self) -> None:
        """Forget all: another key group comes."""
        self.entries.clear()
        self.changed.clear()
        self.lent.clear()

    def write(self, scope: KeyScope, value: Any) -> None:
        """Set the current slot's entry."""
        self.entries[scope.slot] = value
        self.changed.add(scope.slot)

    def write_rest(self, scope: KeyScope, rest: list[Any]) -> None:
        """Set the current slot's list to what is left of it without some first elements; that is no touch."""
        self.write(scope, rest)

    def remove(self, scope: KeyScope) -> None:
        """Remove the current slot's entry, if there is one."""
        if scope.slot in self.entries:
            del self.entries[scope.slot]
            self.changed.add(scope.slot)

    def move(self, source: Any, target: Any) -> None:
        """Give one slot's entry to another, which loses its own."""
        self.entries[target] = self.entries.pop(source)
        self.changed |= {source, target}


class ExpiringTable(StateTable):
    """Entries that expire as a whole; `touched_ms` says when each was touched last."""

    __slots__ = ("_ttl", "touched_ms")

    def __init__(self, ttl: StateTtl) -> None:
        super().__init__()
        self._ttl = ttl
        self.touched_ms: dict[Any, int] = {}

    def take(self, stored: Mapping[Any, StoredEntry], now_ms: int) -> None:
        """Take over stored entries, by slot."""
        super().take(stored, now_ms)
        self.touched_ms.update((slot, entry.touched_ms) for slot, entry in stored.items())

    def touch_of(self, slot: Any) -> Touch:
        """Return what is to be stored of an entry's time."""
        return self.touched_ms.get(slot, 0), None

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self.touched_ms.clear()

    def read(self, scope: KeyScope) -> Any:
        """Return the current slot's entry unless it is expired."""
        slot = scope.slot
        if slot not in self.entries:
            return None
        if self._ttl.is_expired(self.touched_ms[slot], scope.now_ms):
            self.remove(scope)
            return None
        if self._ttl.update is TtlUpdate.ON_READ_AND_WRITE and self.touched_ms[slot] != scope.now_ms:
            self.touched_ms[slot] = scope.now_ms
            self.changed.add(slot)
        return self.entries[slot]

    def written_in_place(self, slot: Any, now_ms: int) -> None:
        """Take note of a change in place, which is a touch as any other one."""
        super().written_in_place(slot, now_ms)
        self.touched_ms[slot] = now_ms

    def write(self, scope: KeyScope, value: Any) -> None:
        """Set the current slot's entry, touched now."""
        super().write(scope, value)
        self.touched_ms[scope.slot] = scope.now_ms

    def remove(self, scope: KeyScope) -> None:
        """Remove the current slot's entry, if there is one."""
        super().remove(scope)
        self.touched_ms.pop(scope.slot, None)

    def move(self, source: Any, target: Any) -> None:
        """Give one slot's entry, and the time of its touch, to another."""
        super().move(source, target)
        self.touched_ms[target] = self.touched_ms.pop(source)
