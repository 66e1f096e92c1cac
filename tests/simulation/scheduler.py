"""One seeded scheduler: virtual time, and threads that run one at a time.

Product code is synchronous and expects threads, so it gets real ones; but only the thread that
holds the *baton* runs. Whoever wants to wait, for any reason, puts the time at which it goes on
into one queue and hands the baton to whoever is first. Equal times are ordered by chance. The
same seed gives the same order, since nothing but the queue and the seed decides it.

A process can die: each of its threads gets :class:`ProcessDied` at the place where it waits, and
at every later attempt to touch the outside. A process can also be stopped for a while, as a
suspended machine is, while the others go on.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable

from tests.simulation.worker_pool import Worker, WorkerPool

US_PER_MS = 1_000


class ProcessDied(BaseException):
    """The simulated process is dead. Not an Exception: no product code may survive it."""


class SimulationOver(BaseException):
    """The run has ended; raised in threads that still wait."""


class Process:
    """Something that dies as a whole: a driver, a JVM, an executor.

    Parameters
    ----------
    name
        For traces.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        #: Virtual time until which it stands still.
        self.stopped_until_us = 0
        #: Called once, right after its death; must not wait.
        self.on_death: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<{self.name}>"


class SimThread:
    """A thread of a simulated process; a :class:`~flinkish_spark.core.clock.RunningThread`."""

    __slots__ = ("_scheduler", "is_done", "name", "process", "target", "ticket", "worker")

    def __init__(self, scheduler: Scheduler, process: Process, name: str, target: Callable[[], None]) -> None:
        self._scheduler, self.process, self.name, self.target = scheduler, process, name, target
        #: Tells the valid entry in the queue from those that were overtaken.
        self.ticket = 0
        self.worker: Worker | None = None
        self.is_done = False

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self.is_done

    def join(self) -> None:
        """Wait for its end."""
        while not self.is_done:
            self._scheduler.pause(2 * US_PER_MS)


class Scheduler:
    """Owns time and order.

    Parameters
    ----------
    chance
        Orders what is due at the same time.
    pool
        Where the real threads come from.
    """

    def __init__(self, chance: random.Random, pool: WorkerPool) -> None:
        self._pool, self._random = pool, chance.random
        self._queue: list[tuple[int, float, int, SimThread | Callable[[], None]]] = []
        # In order of their start: a set would be gone through in another order each time.
        self._threads: dict[SimThread, None] = {}
        self._main = threading.Lock()
        self.now_us = 0
        self.current: SimThread | None = None
        self.is_over = False
        self.failure: BaseException | None = None

    # -- threads and processes ------------------------------------------------------------------
    def spawn(self, process: Process, name: str, target: Callable[[], None], delay_us: int = 0) -> SimThread:
        """Start a thread; it gets its first turn after `delay_us`."""
        thread = SimThread(self, process, name, target)
        self._threads[thread] = None
        self._enter(thread, self.now_us + delay_us)
        return thread

    def call_at(self, due_us: int, action: Callable[[], None]) -> None:
        """Run `action` at a time, between two turns; it must not wait."""
        heapq.heappush(self._queue, (due_us, self._random(), 0, action))

    def kill(self, *processes: Process) -> None:
        """Let processes die: their threads unwind at once and reach nothing any more.

        Raises
        ------
        ProcessDied
            The calling thread is among them.
        """
        dying = [process for process in processes if process.is_alive]
        for process in dying:
            process.is_alive = False
        for thread in list(self._threads):
            if thread.process in dying and thread is not self.current:
                self._enter(thread, self.now_us)
        for process in dying:
            for action in process.on_death:
                action()

    def check(self) -> None:
        """Raise if the calling thread may not touch the outside any more."""
        if self.is_over:
            raise SimulationOver
        if self.current is not None and not self.current.process.is_alive:
            raise ProcessDied

    # -- taking turns ---------------------------------------------------------------------------
    def pause(self, duration_us: int) -> None:
        """Let others run for at least `duration_us` of virtual time.

        Raises
        ------
        ProcessDied
            The thread's process has died meanwhile.
        """
        me = self.current
        assert me is not None, "only simulated threads wait"
        self.check()
        self._enter(me, self.now_us + duration_us)
        following = self._next()
        if following is not me:
            self._hand_over(following)
            assert me.worker is not None
            me.worker.wait()
        if self.is_over:
            raise SimulationOver
        if not me.process.is_alive:
            raise ProcessDied

    def run(self) -> None:
        """Run until every thread has ended or :meth:`stop` was called; called from outside."""
        self._main.acquire()
        self._hand_over(self._next())
        self._main.acquire()
        self._main.release()

    def stop(self, failure: BaseException | None = None) -> None:
        """End the run; the first `failure` is kept. The caller's thread unwinds too."""
        self.end(failure)
        raise SimulationOver

    def end(self, failure: BaseException | None = None) -> None:
        """End the run like :meth:`stop`, from an action that is run between two turns."""
        if not self.is_over:
            self.is_over, self.failure = True, failure
            self._queue.clear()
            for thread in self._threads:
                self._enter(thread, self.now_us)

    # -- inside ---------------------------------------------------------------------------------
    def _enter(self, thread: SimThread, due_us: int) -> None:
        thread.ticket += 1
        heapq.heappush(self._queue, (due_us, self._random(), thread.ticket, thread))

    def _next(self) -> SimThread | None:
        """Return whose turn it is, and move time on; None if nobody is left."""
        queue = self._queue
        while queue:
            due_us, _, ticket, entry = heapq.heappop(queue)
            if not isinstance(entry, SimThread):
                self.now_us = max(self.now_us, due_us)
                entry()
                continue
            if entry.is_done or ticket != entry.ticket:
                continue
            process = entry.process
            if process.stopped_until_us > due_us and process.is_alive and not self.is_over:
                heapq.heappush(queue, (process.stopped_until_us, self._random(), ticket, entry))
                continue
            if due_us > self.now_us:
                self.now_us = due_us
            return entry
        return None

    def _hand_over(self, thread: SimThread | None) -> None:
        self.current = thread
        if thread is None:
            self._main.release()
        elif thread.worker is None:
            thread.worker = self._pool.take()
            thread.worker.begin(lambda: self._life(thread))
        else:
            thread.worker.resume()

    def _life(self, thread: SimThread) -> None:
        try:
            self.check()
            thread.target()
        except (ProcessDied, SimulationOver):
            pass
        except BaseException as error:
            self.end(error)
        thread.is_done = True
        del self._threads[thread]
        # This order matters: the worker must be free before others run and may want one.
        assert thread.worker is not None
        self._pool.give_back(thread.worker)
        self._hand_over(self._next())
