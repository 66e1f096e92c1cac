"""Threads that a coordinator begins, and what became of them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flinkish_spark.runtime.confirmation import Interrupted
from flinkish_spark.runtime.threads import RunningThread, Threads
from flinkish_spark.runtime.watchdog import Waiting, unwatched

LOG = logging.getLogger(__name__)


class Workers:
    """Starts threads for one coordinator and waits for them at its end.

    Parameters
    ----------
    on_failure
        Told of an error that ended a worker; called in the worker's thread.
    """

    def __init__(
        self, threads: Threads, on_failure: Callable[[BaseException], None], waiting: Waiting = unwatched
    ) -> None:
        self._threads, self._on_failure, self._waiting = threads, on_failure, waiting
        self._awaited: dict[str, RunningThread] = {}

    def begin(self, name: str, work: Callable[[], None]) -> None:
        """Start work that :meth:`join` waits for."""
        self._awaited = {known: one for known, one in self._awaited.items() if one.is_alive()}
        self._awaited[name] = self.begin_unawaited(name, work)

    def begin_unawaited(self, name: str, work: Callable[[], None]) -> RunningThread:
        """Start work that nobody waits for, because a user's code in it may hang."""

        def run() -> None:
            try:
                with self._waiting(f"{name} to end"):
                    work()
            except Interrupted:
                LOG.info("%s was interrupted; the next start finishes what is decided", name)
            except BaseException as error:
                self._on_failure(error)

        return self._threads.start(f"flinkish-{name}", run)

    def join(self) -> None:
        """Wait for what was begun; whoever calls has told it to stop."""
        for name, worker in tuple(self._awaited.items()):
            with self._waiting(f"the thread of {name} to end"):
                worker.join()
