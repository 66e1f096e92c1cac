"""A proxy in front of a server that lets every request meet a fault, without touching either end.

The server's own listener for this proxy advertises the proxy's address, so that clients of either
engine, in the driver and in tasks, stay behind it whatever they are told by the server.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.crash.sweep.points import Call, Effect, Fault, Layer
from tests.crash.sweep.switch import Switch

_HOST = "127.0.0.1"

#: Requests by Kafka's api keys (Kafka protocol guide, "API keys").
_KAFKA = {
    0: "Produce",
    1: "Fetch",
    2: "ListOffsets",
    3: "Metadata",
    8: "OffsetCommit",
    9: "OffsetFetch",
    10: "FindCoordinator",
    18: "ApiVersions",
    22: "InitProducerId",
    23: "OffsetForLeaderEpoch",
    24: "AddPartitionsToTxn",
    25: "AddOffsetsToTxn",
    26: "EndTxn",
    28: "TxnOffsetCommit",
    32: "DescribeConfigs",
    60: "DescribeCluster",
    61: "DescribeProducers",
    65: "DescribeTransactions",
    66: "ListTransactions",
    75: "DescribeTopicPartitions",
}
#: What is not listed may change something, as far as anybody knows here.
_READS = {
    "OffsetFetch", "FindCoordinator", "DescribeProducers", "DescribeTransactions", "ListTransactions",
}  # fmt: skip
#: Clients send these when they like: on new connections, and to look whether there is something to read.
_QUIET = {
    "ApiVersions", "Metadata", "Fetch", "ListOffsets", "OffsetForLeaderEpoch", "DescribeCluster",
    "DescribeTopicPartitions", "DescribeConfigs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """One request; `call` is None if it is not a point."""

    data: bytes
    correlation: int
    call: Call | None


def kafka_frame(data: bytes) -> Frame:
    """Take a request apart: length, api key, api version, correlation id."""
    key, _, correlation = struct.unpack_from(">hhi", data, 4)
    name = _KAFKA.get(key, f"api-{key}")
    effect = Effect.READ if name in _READS else Effect.WRITE
    call = None if name in _QUIET else Call(f"kafka.{name}", Layer.WIRE, effect)
    return Frame(data, correlation, call)


class KafkaProxy:
    """Listens for clients of one job and passes everything on, with the job's switch in between.

    Parameters
    ----------
    port
        Where it listens; what the server's listener advertises.
    upstream
        Port of that listener.
    """

    def __init__(self, port: int, upstream: int, switch: Switch) -> None:
        self._upstream, self._switch = upstream, switch
        self._socket = socket.create_server((_HOST, port))
        threading.Thread(target=self._accept, name=f"proxy-{port}", daemon=True).start()

    def close(self) -> None:
        """Take no more clients."""
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                try:
                    server = socket.create_connection((_HOST, self._upstream))
                except OSError:
                    client.close()
                    continue
                _Connection(client, server, self._switch).start()


@dataclass
class _Connection:
    """Two pumps; a server answers the requests of a connection in their order."""

    client: socket.socket
    server: socket.socket
    switch: Switch
    #: By correlation id: answers that still come and are not passed on, and those that end the connection.
    dropped: Counter[int] = field(default_factory=Counter)
    lost: set[int] = field(default_factory=set)

    def start(self) -> None:
        for one in (self.client, self.server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pump in (self._requests, self._answers):
            threading.Thread(target=self._until_closed, args=(pump,), name="proxy-pump", daemon=True).start()

    def _until_closed(self, pump: Callable[[], None]) -> None:
        try:
            pump()
        except (OSError, EOFError):
            pass
        finally:
            self._close()

    def _close(self) -> None:
        for one in (self.client, self.server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _requests(self) -> None:
        while True:
            frame = kafka_frame(_read_frame(self.client))
            fault = None
            if frame.call is None:
                self.switch.hold()
            else:
                fault = self.switch.passing(frame.call)
            match fault:
                case Fault.FAIL:
                    return
                case Fault.LOST:
                    self.lost.add(frame.correlation)
                case Fault.TWICE:
                    self.dropped[frame.correlation] += 1
                    self.server.sendall(frame.data)
            self.server.sendall(frame.data)

    def _answers(self) -> None:
        seen: set[int] = set()
        while True:
            data = _read_frame(self.server)
            (correlation,) = struct.unpack_from(">i", data, 4)
            if correlation in self.lost:
                return
            if self.dropped[correlation] and correlation in seen:
                # The first answer went to the client; this is the repetition's.
                self.dropped[correlation] -= 1
                continue
            if self.dropped[correlation]:
                seen.add(correlation)
            self.client.sendall(data)


def _read_frame(source: socket.socket) -> bytes:
    head = _read(source, 4)
    return head + _read(source, struct.unpack(">i", head)[0])


def _read(source: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = source.recv(min(left, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
