"""A proxy in front of a broker that shows clients older versions of its requests, as other makes do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from flinkish_spark.testing.broker import free_port

_API_VERSIONS = 18
#: The newest versions that Redpanda takes, by number of the request; where its sources of different ages
#: differ, the oldest: Produce, Fetch, ListOffsets, Metadata, OffsetFetch, FindCoordinator, InitProducerId,
#: AddPartitionsToTxn, AddOffsetsToTxn, EndTxn, TxnOffsetCommit.
REDPANDA: Mapping[int, int] = {
    0: 7,
    1: 11,
    2: 3,
    3: 7,
    9: 4,
    10: 2,
    22: 1,
    24: 2,
    25: 2,
    26: 3,
    28: 3,
}


class OlderWire:
    """Passes everything on, but lowers what the broker says of the versions that it knows.

    The broker must name `port` to clients (``advertised.listeners``), or they go past this.

    Parameters
    ----------
    newest
        By number of a request, its newest version.
    """

    def __init__(self, newest: Mapping[int, int] = REDPANDA) -> None:
        self._newest = dict(newest)
        self.port = free_port()
        self._broker_port = 0
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._open: list[socket.socket] = []

    def in_front_of(self, broker_port: int) -> None:
        """Pass on to this port from now on."""
        self._broker_port = broker_port
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    broker = socket.create_connection(("127.0.0.1", self._broker_port))
                except OSError:
                    client.close()
                    continue
                self._open += [client, broker]
                asked: dict[int, int] = {}
                for source, target, look in (
                    (client, broker, self._request),
                    (broker, client, self._answer),
                ):
                    threading.Thread(target=_pass_on, args=(source, target, look, asked), daemon=True).start()

    def _request(self, frame: bytearray, asked: dict[int, int]) -> None:
        key, version, correlation = struct.unpack_from(">hhi", frame)
        if key == _API_VERSIONS:
            asked[correlation] = version

    def _answer(self, frame: bytearray, asked: dict[int, int]) -> None:
        if not asked:
            return
        version = asked.pop(struct.unpack_from(">i", frame)[0], None)
        if version is None or struct.unpack_from(">h", frame, 4)[0] != 0:
            return
        # Correlation id, error code, then the rows; from version 3 on in compact form, each with a tag.
        if version >= 3:
            count, at = _varint(frame, 6)
            count, size = count - 1, 7
        else:
            (count,), at, size = struct.unpack_from(">i", frame, 6), 10, 6
        for row in range(count):
            key, _, newest = struct.unpack_from(">hhh", frame, at + row * size)
            lowered = min(newest, self._newest.get(key, newest))
            struct.pack_into(">h", frame, at + row * size + 4, lowered)


def _varint(frame: bytearray, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = frame[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def _pass_on(
    source: socket.socket,
    target: socket.socket,
    look: Callable[[bytearray, dict[int, int]], None],
    asked: dict[int, int],
) -> None:
    with contextlib.suppress(OSError, struct.error):
        reader = source.makefile("rb")
        while len(head := reader.read(4)) == 4:
            frame = bytearray(reader.read(struct.unpack(">i", head)[0]))
            look(frame, asked)
            target.sendall(head + frame)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
            one.close()
