"""Async calls in a harness: an event loop with simulated time, and recorded answers in memory."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from flinkish_spark.async_io.rows import close_kept
from flinkish_spark.core.store import CreateResult, ObjectMissing


class _Selector(selectors.DefaultSelector):
    """A selector that advances simulated time instead of waiting, unless a real socket is waited for."""

    def __init__(self, passes: Callable[[float], None]) -> None:
        super().__init__()
        self._passes = passes

    def select(self, timeout: float | None = None) -> list[Any]:
        found: list[Any] = super().select(0)
        if found or not timeout:
            return found if timeout is not None or found else super().select(None)
        began_s = time.monotonic()
        # One registered socket is the loop's own.
        if len(self.get_map()) > 1 and (found := super().select(timeout)):
            self._passes(min(timeout, time.monotonic() - began_s))
        else:
            self._passes(timeout)
        return found


class ManualLoop(asyncio.SelectorEventLoop):
    """An event loop with simulated time: `asyncio.sleep(10)` returns at once."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Selector(self._pass))

    def time(self) -> float:
        return self._now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call the function directly: a thread would use the real clock."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    # A function that calls a real server waits in real time.
    def _pass(self, seconds: float) -> None:
        self._now_s += seconds


class MemoryStore:
    """A :class:`~flinkish_spark.core.store.Store` in memory."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def read(self, key: str) -> bytes:
        if key not in self._objects:
            raise ObjectMissing(key)
        return self._objects[key]

    def put(self, key: str, data: bytes) -> None:
        self._objects[key] = data

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        if key in self._objects:
            return CreateResult.EXISTS
        self._objects[key] = data
        return CreateResult.CREATED

    def list(self, prefix: str) -> tuple[str, ...]:
        below = prefix.rstrip("/") + "/"
        return tuple(
            sorted(one for one in self._objects if one.startswith(below) and "/" not in one[len(below) :])
        )

    def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    def clear(self, prefix: str) -> None:
        for key in [one for one in self._objects if one.startswith(prefix)]:
            del self._objects[key]


class HarnessCalls:
    """The :class:`~flinkish_spark.async_io.rows.CallsInHarness` of a harness."""

    def __init__(self) -> None:
        self.name, self.store = uuid4().hex, MemoryStore()
        self.lineage = self._number = 0

    def make_loop(self) -> asyncio.AbstractEventLoop:
        return ManualLoop()

    def folder(self, uid: str, *, is_kept: bool) -> str:
        return f"{'recorded' if is_kept else 'passing'}/{uid}"

    def next_micro_batch(self) -> int:
        self.store.clear("passing/")
        self._number += 1
        return self._number

    def checkpoint(self) -> None:
        self.store.clear("")

    def crash(self) -> None:
        self.lineage += 1
        close_kept(self.name)
