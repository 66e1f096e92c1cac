"""A wire to a NameNode that loses answers, or lets nothing through."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Self

from tests.support.local_server import HOST


class Wire:
    """Forwards what comes to its port to a NameNode; use it as a context.

    Parameters
    ----------
    port
        The NameNode's.
    """

    def __init__(self, port: int) -> None:
        self._namenode = port
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        #: What still gets lost: the name of a call, and how often.
        self._loses: tuple[bytes, int] = (b"", 0)
        self._is_dead = False
        #: How often an answer was lost.
        self.lost = 0

    def lose_answers(self, call: str, times: int) -> None:
        """Let calls of that name through, and close the connection before their answer."""
        with self._lock:
            self._loses = (call.encode(), times)

    @contextlib.contextmanager
    def dead(self) -> Iterator[None]:
        """Let nothing through in either direction, and close nothing."""
        self._is_dead = True
        try:
            yield
        finally:
            self._is_dead = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((HOST, self._namenode))
            except OSError:
                # Whoever waits for an answer would wait for ever.
                client.close()
                continue
            cut = threading.Event()
            for one, other, looks in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._forward, args=(one, other, looks, cut), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket, looks: bool, cut: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65_536):
                if self._is_dead:
                    continue
                if looks:
                    with self._lock:
                        call, times = self._loses
                        if times and call in data:
                            self._loses, self.lost = (call, times - 1), self.lost + 1
                            cut.set()
                elif cut.is_set():
                    # The NameNode has answered: it is done.
                    break
                other.sendall(data)
        for end in (one, other):
            # Closing alone would not end what the other thread waits for.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
