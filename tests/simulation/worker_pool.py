"""Real threads, kept: starting one costs as much as a hundred turns of the simulation."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Worker:
    """A real thread that runs one piece of work after the other, each when told to.

    Its lock is the baton: locked while the worker has to wait.
    """

    def __init__(self, number: int) -> None:
        self._baton = threading.Lock()
        self._baton.acquire()
        self._work: Callable[[], None] | None = None
        self.wait = self._baton.acquire
        self.resume = self._baton.release
        threading.Thread(name=f"simulation-{number}", target=self._loop, daemon=True).start()

    def begin(self, work: Callable[[], None]) -> None:
        """Run `work`; the caller waits or ends right after this."""
        self._work = work
        self._baton.release()

    def _loop(self) -> None:
        while True:
            self._baton.acquire()
            work, self._work = self._work, None
            assert work is not None
            work()


class WorkerPool:
    """Workers that wait for work. One pool serves one simulation at a time."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        self._made = 0
        # A fork takes no threads along.
        os.register_at_fork(after_in_child=self._idle.clear)

    def take(self) -> Worker:
        """Return an idle worker, a new one if there is none."""
        if self._idle:
            return self._idle.pop()
        self._made += 1
        return Worker(self._made)

    def give_back(self, worker: Worker) -> None:
        """Take a worker back; called by itself, as the last thing of its work but handing over."""
        self._idle.append(worker)
