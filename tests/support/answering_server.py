"""An HTTP server on loopback that never gives the same answer twice, and can be slow, busy or silent."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

HOST = "127.0.0.1"


@dataclass
class AnsweringServer:
    """What it was asked, and how it answers.

    Parameters
    ----------
    latency_ms
        How long each answer takes.
    busy, failing, silent
        How often it says of a key that it is too busy (429, Retry-After), fails (500), or does not answer.
    """

    latency_ms: int = 0
    busy: Counter[str] = field(default_factory=Counter)
    failing: Counter[str] = field(default_factory=Counter)
    silent: Counter[str] = field(default_factory=Counter)
    retry_after: str = "1"
    calls: Counter[str] = field(default_factory=Counter)
    keys: dict[str, set[str]] = field(default_factory=dict)
    clients: set[str] = field(default_factory=set)
    most_at_once: int = 0
    url: str = ""
    _at_once: int = 0
    _number: Iterator[int] = field(default_factory=itertools.count)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer `GET /<key>`."""
        key = request.match_info["key"]
        self.calls[key] += 1
        self.keys.setdefault(key, set()).add(request.headers.get("Idempotency-Key", ""))
        peer: Any = request.transport and request.transport.get_extra_info("peername")
        self.clients.add(str(peer))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self.answered(key)
        finally:
            self._at_once -= 1

    async def answered(self, key: str) -> web.StreamResponse:
        """Return what a call is answered; for servers that do more."""
        if self.latency_ms:
            await asyncio.sleep(self.latency_ms / 1_000)
        for times, response in (
            (self.busy, web.Response(status=429, headers={"Retry-After": self.retry_after})),
            (self.failing, web.Response(status=500)),
        ):
            if times[key] > 0:
                times[key] -= 1
                return response
        if self.silent[key] > 0:
            self.silent[key] -= 1
            await asyncio.sleep(3_600)
        return web.Response(text=f"{key} {next(self._number)}")


@contextmanager
def answering(kind: type[AnsweringServer] = AnsweringServer, **settings: Any) -> Iterator[AnsweringServer]:
    """Run a server in a thread of this process."""
    server, loop = kind(**settings), asyncio.new_event_loop()
    is_up, is_over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/{key}", server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, HOST, 0, backlog=4_096)
        await site.start()
        assert runner.addresses
        server.url = f"http://{HOST}:{runner.addresses[0][1]}"
        is_up.set()
        await is_over.wait()
        await runner.cleanup()
        # Those that were never to be answered.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert is_up.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(30)
        loop.close()
