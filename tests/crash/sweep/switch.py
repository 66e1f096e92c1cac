"""One per job: every call at its boundary comes by here, and one of them meets a fault.

Several jobs live in one process, and all of them are to be killed at a point of their own. So a job
that has come to its point is not killed but *frozen*: the call is not made, and neither is any other
one of this job from then on. When all have come to their points the process is killed from outside.
For what lies outside of the process that is the same as a kill at the point.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.crash.sweep.points import Call, Effect, Fault, Layer, Point, Run

_T = TypeVar("_T")
#: The switch that a thread is in a call of.
_WITHIN = threading.local()


def switch_of_this_thread() -> Switch | None:
    """Return the switch whose call this thread makes; None outside of all."""
    return getattr(_WITHIN, "switch", None)


class Switch:
    """Counts, records and disturbs the calls of one job; used by all of its threads.

    Parameters
    ----------
    tell
        Called with the name of what happened, once: ``"reached"`` (and frozen) or ``"fired"``.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._run: Run | None = None
        self._is_frozen = False
        self._is_open = False
        self._seen: Counter[str] = Counter()
        self._trace: list[Call] = []
        self._inside = threading.local()

    # -- windows --------------------------------------------------------------------------------
    def begin(self, run: Run | None) -> None:
        """Open a window: count and record from here on; meet a fault at `run`'s point if there is one."""
        with self._lock:
            self._seen.clear()
            self._trace.clear()
            self._run, self._is_open = run, True

    def end(self) -> list[Call]:
        """Close the window and return what came by in it."""
        with self._lock:
            self._is_open, self._run = False, None
            return list(self._trace)

    # -- calls ----------------------------------------------------------------------------------
    def passing(self, call: Call) -> Fault | None:
        """Note a call that is about to be made; return what has to be done to it.

        Does not return if the job is frozen, or is now.
        """
        with self._lock:
            fault = None if self._is_frozen else self._noted(call)
            if fault is Fault.KILL:
                self._is_frozen = True
        if fault is not None:
            self._tell("reached" if fault is Fault.KILL else "fired")
        self.hold()
        return fault

    def hold(self) -> None:
        """Return at once, or never if the job is frozen."""
        if self._is_frozen:
            threading.Event().wait()

    def _noted(self, call: Call) -> Fault | None:
        if not self._is_open:
            return None
        self._seen[call.name] += 1
        self._trace.append(call)
        run = self._run
        if run is None or run.point != Point(call.name, self._seen[call.name]):
            return None
        self._run = None
        return run.fault

    def around(self, call: Call, body: Callable[[], _T], error: Callable[[], BaseException]) -> _T:
        """Make a call, unless something is to happen to it.

        Parameters
        ----------
        error
            Returns what the call raises when the system behind it is out.
        """
        fault = self.passing(call)
        before, self._inside.call = getattr(self._inside, "call", None), call
        outer, _WITHIN.switch = switch_of_this_thread(), self
        try:
            match fault:
                case Fault.FAIL:
                    raise error()
                case Fault.LOST:
                    body()
                    raise error()
                case Fault.TWICE:
                    answer = body()
                    _repeat(body)
                    return answer
                case _:
                    return body()
        finally:
            self._inside.call, _WITHIN.switch = before, outer

    @staticmethod
    @contextmanager
    def looking_away() -> Iterator[None]:
        """Let this thread make calls that no switch sees."""
        outer, _WITHIN.switch = switch_of_this_thread(), None
        try:
            yield
        finally:
            _WITHIN.switch = outer

    def on_file(self, name: str, effect: Effect = Effect.WRITE) -> Fault | None:
        """Note a system call on a file."""
        inside = getattr(self._inside, "call", None)
        layer = Layer.FILE if inside is None else Layer.INNER
        return self.passing(Call(name, layer, effect))


def _repeat(body: Callable[[], Any]) -> None:
    """Do it again; what comes of it nobody hears."""
    try:
        body()
    except Exception as error:
        print(f"the repetition was refused: {error}", flush=True)
