"""Messages to one thread: calls that it makes later, in the order in which they came."""

from __future__ import annotations

import enum
import queue
import threading
from collections.abc import Callable

Message = Callable[[], None]


class Delivery(enum.Enum):
    """What became of a message."""

    ACCEPTED = "ACCEPTED"
    #: The owner reads no more.
    CLOSED = "CLOSED"


class Mailbox:
    """Filled by any thread, read by its owner."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, message: Message) -> Delivery:
        """Leave a message; an accepted one is read."""
        with self._lock:
            if self._is_closed:
                return Delivery.CLOSED
            self._messages.put(message)
            return Delivery.ACCEPTED

    def close(self) -> None:
        """Accept nothing more; what was accepted can still be read."""
        with self._lock:
            self._is_closed = True

    def __len__(self) -> int:
        return self._messages.qsize()

    def read(self, on_error: Callable[[BaseException], None]) -> None:
        """Act on all messages; what one raises does not keep the others from being read."""
        while not self._messages.empty():
            try:
                self._messages.get()()
            except BaseException as error:
                on_error(error)
