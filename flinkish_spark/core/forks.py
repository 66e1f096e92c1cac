"""Resources of one process (files, connections, signal handlers), and how a forked child lets go of them.

A fork copies everything but the threads: open files and the locks on them, connections, handlers of signals,
`atexit` functions. None of it is the child's. A lock would outlive its owner, a `close()` would end the
parent's session, and a clean-up would delete the parent's files. So a child lets go of all of it at once, and
sends nothing. Python runs that for `os.fork`, `multiprocessing` and `subprocess`; programs that a child
starts by exec get no file of ours anyway.

Standard library only, and nothing here waits: it runs between fork and the child's first line.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


class _ProcessResources:
    """The resources that a forked child must let go of."""

    def __init__(self) -> None:
        #: Held for one system call: no fork happens between opening a file and noting it.
        self.noting = threading.Lock()
        self.files: set[OwnFile] = set()
        self.pipes: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()
        self.left: weakref.WeakSet[ProcessConnection] = weakref.WeakSet()
        #: Earlier handlers of the signals that we handle.
        self.handled_before: dict[signal.Signals, Any] = {}
        self._mask: set[Any] = set()

    def hold_fork(self) -> None:
        self.noting.acquire()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.handled_before)

    def resume_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self.noting.release()

    def let_go(self) -> None:
        self.noting = threading.Lock()
        for file in self.files:
            file.let_go()
        self.files.clear()
        for pipe in list(self.pipes):
            _replace(pipe)
        self.pipes.clear()
        for one in list(self.left):
            one.leave_to_parent()
        self.left.clear()
        for number, handler in self.handled_before.items():
            signal.signal(number, handler)
        self.handled_before.clear()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


class OwnFile:
    """An open file that forked children close: a lock on it ends with this process."""

    def __init__(self, path: Path, flags: int) -> None:
        with _RESOURCES.noting:
            self._number: int | None = os.open(path, flags | os.O_CLOEXEC, 0o666)
            _RESOURCES.files.add(self)

    def fileno(self) -> int:
        if self._number is None:
            raise ValueError("the file is closed")
        return self._number

    @property
    def is_open(self) -> bool:
        return self._number is not None

    def close(self) -> None:
        """Close it; a second call does nothing, and neither does one in a child."""
        with _RESOURCES.noting:
            number, self._number = self._number, None
            _RESOURCES.files.discard(self)
            if number is not None:
                os.close(number)

    def let_go(self) -> None:
        """Close the child's copy. The lock stays the parent's: it is not unlocked."""
        number, self._number = self._number, None
        if number is not None:
            os.close(number)


class ProcessConnection:
    """Base of objects with a connection of this process; a subclass calls :meth:`keep_from_children`."""

    def keep_from_children(self) -> None:
        _RESOURCES.left.add(self)

    def leave_to_parent(self) -> None:
        raise NotImplementedError


def close_in_children(pipe: IO[bytes]) -> None:
    """Close our end of a pipe in children: its reader must see the end when this process dies."""
    _RESOURCES.pipes.add(pipe)


def keep_forever(thing: object) -> None:
    """Keep an object of the parent's for the life of this process: finalized, a client would say goodbye."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def skip_in_children(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return `work` for `atexit` and finalizers: in a child, which ends like its parent, it does nothing."""
    maker = os.getpid()

    def run(*args: Any, **named: Any) -> Any:
        return work(*args, **named) if os.getpid() == maker else None

    return run


@contextmanager
def own_handler(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals in the block, in this process's main thread; not in children."""
    before = {number: signal.signal(number, handler) or signal.SIG_DFL for number in numbers}
    _RESOURCES.handled_before.update(before)
    try:
        yield
    finally:
        for number, earlier in before.items():
            if _RESOURCES.handled_before.pop(number, None) is not None:
                signal.signal(number, earlier)


def _replace(pipe: IO[bytes]) -> None:
    # Not closed: the object would close the number again, when it may be somebody else's.
    if pipe.closed:
        return
    nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nothing, pipe.fileno(), inheritable=False)
    os.close(nothing)


_RESOURCES = _ProcessResources()
os.register_at_fork(
    before=_RESOURCES.hold_fork, after_in_parent=_RESOURCES.resume_parent, after_in_child=_RESOURCES.let_go
)
