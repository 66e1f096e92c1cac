"""Finds the threads of a job that have waited too long, and what they wait for.

Code that waits for something that may never come (the JVM, a broker, a disk, a user's code, another thread)
wraps the wait in ``with waiting("..."):``, and calls :func:`note_failure` with the last error in it. A thread
or an open checkpoint that has waited too long is named in the job's report; a thread also in the log. No
thread is ended: a MERGE may take an hour.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from flinkish_spark.core import clock as spans
from flinkish_spark.core.clock import Clock, Threads

LOG = logging.getLogger(__name__)
#: How long a thread may wait for one thing before the log names it, and how long while the job is ending.
PATIENCE_MS, HURRIED_MS = 60_000, 5_000
_LOOK_MS = 1_000

#: Context manager that notes what the calling thread waits for: ``the broker to answer``.
Waiting = Callable[[str], AbstractContextManager[None]]


def skip_watch(what: str) -> AbstractContextManager[None]:
    return nullcontext()


#: Longest part of an error that is kept.
_MOST_ERROR = 500
_HERE = threading.local()


def note_failure(why: str) -> None:
    """Note the last error of the calling thread's current wait; do nothing if it has none."""
    stand = getattr(_HERE, "stand", None)
    if stand is not None:
        line = " ".join(why.split())[:_MOST_ERROR]
        stand.error = "".join(letter if letter.isprintable() else "?" for letter in line)


@dataclass(frozen=True, slots=True)
class Wait:
    #: ``the thread 'flinkish-complete-3'`` or ``checkpoint 3``.
    who: str
    #: The thing it waits for, as it reads after "waits for".
    what: str
    for_ms: int
    #: The last error; empty if there was none, or none is known.
    error: str = ""

    def __str__(self) -> str:
        text = f"{self.who} has waited {self.for_ms // 1000} s for {self.what}"
        return f"{text}: {self.error}" if self.error else text


@dataclass(slots=True)
class _ThreadWaits:
    """The waits of one thread, and since when the innermost one lasts."""

    thread: str
    since_ms: int
    waits: list[str] = field(default_factory=list)
    error: str = ""
    #: Length of the wait when the log last named it; 0 before that.
    named_after_ms: int = 0

    def reset(self, now_ms: int) -> None:
        self.since_ms, self.named_after_ms, self.error = now_ms, 0, ""


class Watchdog:
    """Knows what all threads of a job wait for; of nested waits the innermost counts."""

    def __init__(
        self,
        clock: Clock,
        tell: Callable[[tuple[Wait, ...]], None],
        is_hurried: Callable[[], bool] = lambda: False,
        patience_ms: int = PATIENCE_MS,
        held: Callable[[], Iterable[Wait]] = lambda: (),
    ) -> None:
        self._clock, self._tell, self._is_hurried = clock, tell, is_hurried
        self._patience_ms, self._held = min(patience_ms, PATIENCE_MS), held
        self._lock = threading.Lock()
        self._stands: dict[int, _ThreadWaits] = {}
        self._stopping = threading.Event()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Note what this thread waits for until the block ends; see :data:`Waiting`."""
        me, now_ms = threading.get_ident(), self._clock.monotonic_ms()
        with self._lock:
            stand = self._stands.setdefault(me, _ThreadWaits(threading.current_thread().name, now_ms))
            stand.waits.append(what)
            stand.reset(now_ms)
        outer, _HERE.stand = getattr(_HERE, "stand", None), stand
        try:
            yield
        finally:
            _HERE.stand = outer
            with self._lock:
                if stand.named_after_ms:
                    LOG.warning("the thread '%s' goes on: it waits no more for %s", stand.thread, what)
                stand.waits.pop()
                ended_ms = self._clock.monotonic_ms()
                stand.reset(ended_ms)
                if not stand.waits:
                    del self._stands[me]
            spans.log_span(what, ended_ms - now_ms)

    @property
    def longest(self) -> str:
        with self._lock:
            first = min(self._stands.values(), key=lambda stand: stand.since_ms, default=None)
            return "" if first is None else first.waits[-1]

    def start(self, threads: Threads) -> None:
        threads.start("flinkish-watchdog", self._run)

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.look()
            self._clock.wait(self._stopping, _LOOK_MS)

    def look(self) -> None:
        """Report waits that are too long; log a thread's after a minute, and again after twice the time."""
        is_hurried = self._is_hurried()
        patience_ms = HURRIED_MS if is_hurried else self._patience_ms
        named_ms = HURRIED_MS if is_hurried else PATIENCE_MS
        found = [] if is_hurried else [wait for wait in self._held() if wait.for_ms >= patience_ms]
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            for stand in self._stands.values():
                who = f"the thread '{stand.thread}'"
                wait = Wait(who, stand.waits[-1], now_ms - stand.since_ms, stand.error)
                if wait.for_ms < patience_ms:
                    continue
                found.append(wait)
                if wait.for_ms >= max(named_ms, 2 * stand.named_after_ms):
                    stand.named_after_ms = wait.for_ms
                    LOG.warning("%s; nothing is ended because of that", wait)
        self._tell(tuple(sorted(found, key=lambda wait: -wait.for_ms)))
