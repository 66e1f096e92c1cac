"""Idle connections to Kafka that wait for the next task of this process.

A Spark task lives for a fraction of a second, its Python worker for many tasks; a new connection
costs 30 to 60 ms and a thread. Rules:

- A wire belongs to one borrower until it is given back.
- A wire stays in the process that made it: Spark's workers are forked, and a fork must neither
  use nor close its parent's sockets.
- There is no thread that cleans up: what has been idle for too long is closed by the next call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flinkish_spark.clock import Clock, SystemClock
from flinkish_spark.kafka._wire import KafkaWire
from flinkish_spark.kafka.options import KafkaConnection

#: Brokers close idle connections after ten minutes; a stream that still runs is back long before.
_IDLE_MS = 60_000
#: As many as the tasks that run in one worker process at a time, and a few.
_MOST_IDLE = 8
_CLOCK = SystemClock()


@dataclass(slots=True)
class _Shelf:
    """The idle wires of one process, longest idle first: (wire, when it was given back)."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    wires: list[tuple[KafkaWire, int]] = field(default_factory=list)


class WirePool:
    """Lends connections; safe to call from any thread and after a fork.

    Parameters
    ----------
    idle_ms
        How long a wire may lie unused.
    most_idle
        How many wires are kept; one more closes the one that has been idle for longest.
    clock
        Time, replaceable in tests.
    make
        How a wire is made, replaceable in tests.
    """

    def __init__(
        self,
        *,
        idle_ms: int = _IDLE_MS,
        most_idle: int = _MOST_IDLE,
        clock: Clock = _CLOCK,
        make: Callable[[KafkaConnection], KafkaWire] = KafkaWire,
    ) -> None:
        self._idle_ms, self._most_idle = idle_ms, most_idle
        self._clock, self._make = clock, make
        self._shelves: dict[int, _Shelf] = {}

    @contextmanager
    def wire(self, connection: KafkaConnection) -> Iterator[KafkaWire]:
        """Lend a wire for the length of a with block, whatever ends it."""
        wire = self.borrow(connection)
        try:
            yield wire
        finally:
            self.give_back(wire)

    def borrow(self, connection: KafkaConnection) -> KafkaWire:
        """Return an idle wire of an equal `connection`, else a new one; does not connect.

        The broker may have gone since the wire was last used; that shows as a lost connection in
        the first call, and the second call connects again.
        """
        shelf = self._shelf()
        with shelf.lock:
            expired = self._expired(shelf)
            newest_first = range(len(shelf.wires) - 1, -1, -1)
            at = next((i for i in newest_first if shelf.wires[i][0].connection == connection), None)
            found = None if at is None else shelf.wires.pop(at)[0]
        _close(expired)
        return found if found is not None else self._make(connection)

    def give_back(self, wire: KafkaWire) -> None:
        """Take a wire back; the borrower must not use it any more."""
        shelf = self._shelf()
        with shelf.lock:
            superfluous = self._expired(shelf)
            shelf.wires.append((wire, self._clock.monotonic_ms()))
            while len(shelf.wires) > self._most_idle:
                superfluous.append(shelf.wires.pop(0)[0])
        _close(superfluous)

    def close(self) -> None:
        """Close the idle wires of this process; the pool can still be used."""
        shelf = self._shelf()
        with shelf.lock:
            idle, shelf.wires = [wire for wire, _ in shelf.wires], []
        _close(idle)

    def _shelf(self) -> _Shelf:
        # By process id, so that after a fork the child finds an empty shelf and a free lock.
        return self._shelves.setdefault(os.getpid(), _Shelf())

    def _expired(self, shelf: _Shelf) -> list[KafkaWire]:
        oldest_ms = self._clock.monotonic_ms() - self._idle_ms
        expired = [wire for wire, since_ms in shelf.wires if since_ms < oldest_ms]
        shelf.wires = [(wire, since_ms) for wire, since_ms in shelf.wires if since_ms >= oldest_ms]
        return expired


def _close(wires: list[KafkaWire]) -> None:
    # Outside the lock: closing joins the wire's thread.
    for wire in wires:
        wire.close()


#: The pool of this process, shared by all readers and writers.
WIRES = WirePool()
