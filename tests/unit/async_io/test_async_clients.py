"""Async functions with real clients and servers on loopback: HTTP and gRPC, slow, failing, busy, silent."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import grpc
import pytest

from flinkish_spark import (
    AsyncDataStream,
    AsyncFunction,
    AsyncRetryStrategy,
    OutputTag,
    ToSide,
    current_call,
)
from flinkish_spark.testing import ProgramHarness
from tests.support.answering_server import HOST, answering

ANSWER = "n LONG, answer STRING"
LETTERS = OutputTag("letters", ANSWER)


class Letters(AsyncFunction):
    """What is not answered is a letter."""

    def timeout(self, value: Any) -> Any:
        return [ToSide(LETTERS, (value.n, "late"))]

    def on_error(self, value: Any, error: Exception) -> Any:
        return [ToSide(LETTERS, (value.n, type(error).__name__))]


class Http(Letters):
    def __init__(self, url: str) -> None:
        self.url = url

    async def open(self, context: Any) -> None:  # type: ignore[override]
        self.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=4))

    async def close(self) -> None:  # type: ignore[override]
        await self.client.close()

    async def async_invoke(self, value: Any) -> Any:
        headers = {"Idempotency-Key": str(current_call().idempotency_key)}
        async with self.client.get(f"{self.url}/{value.n}", headers=headers) as response:
            response.raise_for_status()
            return [(value.n, (await response.text()).split()[0])]


class Grpc(Letters):
    """Without generated code: a stub would be made in `open` just so."""

    def __init__(self, target: str) -> None:
        self.target = target

    async def open(self, context: Any) -> None:  # type: ignore[override]
        self.channel = grpc.aio.insecure_channel(self.target)
        self.ask = self.channel.unary_unary("/test.Answers/Ask")

    async def close(self) -> None:  # type: ignore[override]
        await self.channel.close()

    async def async_invoke(self, value: Any) -> Any:
        key = current_call().idempotency_key
        answer = await self.ask(str(value.n).encode(), metadata=(("idempotency-key", str(key)),))
        return [(value.n, answer.decode().split()[0])]


class GrpcServer:
    """Fails so many times for each element, and never answers 13."""

    def __init__(self, failing: Counter[str]) -> None:
        self.failing, self.calls, self.target = failing, Counter[str](), ""
        self._number = itertools.count()

    async def ask(self, request: bytes, context: Any) -> bytes:
        key = request.decode()
        self.calls[key] += 1
        await asyncio.sleep(0.01)
        if self.failing[key] > 0:
            self.failing[key] -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "try again")
        if key == "13":
            await asyncio.sleep(3_600)
        return f"{key} {next(self._number)}".encode()


@contextmanager
def grpc_answering(failing: Counter[str]) -> Iterator[GrpcServer]:
    """Run a server in a thread of this process."""
    found, loop = GrpcServer(failing), asyncio.new_event_loop()
    is_up, is_over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        server = grpc.aio.server()
        handlers = {"Ask": grpc.unary_unary_rpc_method_handler(found.ask)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Answers", handlers),))
        found.target = f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
        await server.start()
        is_up.set()
        await is_over.wait()
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert is_up.wait(30)
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(30)


def asked(function: Any, timeout_ms: int, strategy: Any, *numbers: int) -> tuple[list[Any], list[Any]]:
    run = ProgramHarness(
        lambda s: AsyncDataStream.ordered_wait_with_retry(
            s, function, timeout_ms, 4, strategy, output=ANSWER, uid="asked"
        ),
        "n LONG",
        side_outputs=[LETTERS],
    )
    try:
        run.push_all([((n,), None) for n in numbers])
        run.push_all([((n,), None) for n in numbers[:2]])
        found = run.take()
        return [tuple(row) for row in found.rows], [tuple(row) for row in found.side.get("letters", [])]
    finally:
        run.close()


@pytest.mark.timeout(120)
def test_http() -> None:
    with answering(
        latency_ms=10, failing=Counter({"3": 1, "4": 9}), busy=Counter({"5": 1}), silent=Counter({"6": 9})
    ) as server:
        rows, letters = asked(Http(server.url), 3_000, AsyncRetryStrategy.fixed_delay(2, 10), *range(1, 9))
    assert rows == [(n, str(n)) for n in (1, 2, 3, 5, 7, 8, 1, 2)]
    assert letters == [(4, "ClientResponseError"), (6, "late")]
    assert server.calls == Counter({"1": 2, "2": 2, "3": 2, "4": 3, "5": 2, "6": 1, "7": 1, "8": 1})
    # The client and its connections outlive a micro-batch: one that timed out is lost.
    assert server.most_at_once <= 4 and len(server.clients) <= 5


@pytest.mark.timeout(120)
def test_grpc() -> None:
    with grpc_answering(Counter({"3": 1, "4": 9})) as server:
        strategy = AsyncRetryStrategy.fixed_delay(2, 10)
        rows, letters = asked(Grpc(server.target), 2_000, strategy, 1, 2, 3, 4, 13)
    assert rows == [(n, str(n)) for n in (1, 2, 3, 1, 2)]
    assert letters == [(4, "AioRpcError"), (13, "late")]
    assert server.calls == Counter({"1": 2, "2": 2, "3": 2, "4": 3, "13": 1})
