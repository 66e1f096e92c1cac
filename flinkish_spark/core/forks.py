"""What belongs to one process, and what becomes of it in a child that somebody forks.

A fork copies everything but the threads: files that are open and the locks on them, connections, handlers of
signals, what is to be done at the end. None of it is the child's. A lock would outlive its owner, a `close()`
would end the parent's session, and a clean-up would delete the parent's files. So a child lets go of all of
it at once, without a word to anybody. Python runs that for `os.fork`, `multiprocessing` and `subprocess`;
programs that a child becomes by exec get no file of ours anyway.

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


class _Inherited:
    """What a child has to let go of."""

    def __init__(self) -> None:
        #: Nobody forks between opening a file and noting it. Held for one system call.
        self.noting = threading.Lock()
        self.files: set[OwnFile] = set()
        self.pipes: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()
        self.left: weakref.WeakSet[Connected] = weakref.WeakSet()
        #: What handled the signals that we handle.
        self.handled_before: dict[signal.Signals, Any] = {}
        self._mask: set[Any] = set()

    def before_fork(self) -> None:
        self.noting.acquire()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.handled_before)

    def in_parent(self) -> None:
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
    """An open file that no child has: a lock on it ends with this process, whoever is forked off it."""

    def __init__(self, path: Path, flags: int) -> None:
        with _INHERITED.noting:
            self._number: int | None = os.open(path, flags | os.O_CLOEXEC, 0o666)
            _INHERITED.files.add(self)

    def fileno(self) -> int:
        if self._number is None:
            raise ValueError("the file is closed")
        return self._number

    @property
    def is_open(self) -> bool:
        return self._number is not None

    def close(self) -> None:
        """Close it; a second call does nothing, and neither does one in a child."""
        with _INHERITED.noting:
            number, self._number = self._number, None
            _INHERITED.files.discard(self)
            if number is not None:
                os.close(number)

    def let_go(self) -> None:
        """Close the child's copy. The lock stays the parent's: it is not unlocked."""
        number, self._number = self._number, None
        if number is not None:
            os.close(number)


class Connected:
    """Something with a connection of this process; a subclass calls :meth:`keep_from_children`."""

    def keep_from_children(self) -> None:
        _INHERITED.left.add(self)

    def leave_to_parent(self) -> None:
        raise NotImplementedError


def close_in_children(pipe: IO[bytes]) -> None:
    """Let nobody hold our end of a pipe open: whoever reads it must see the end when this process dies."""
    _INHERITED.pipes.add(pipe)


def never_finalized(thing: object) -> None:
    """Keep an object of the parent's for the life of this process: clients say good-bye at their end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def in_this_process(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return `work` for `atexit` and finalizers: in a child, which ends like its parent, it does nothing."""
    maker = os.getpid()

    def guarded(*args: Any, **named: Any) -> Any:
        return work(*args, **named) if os.getpid() == maker else None

    return guarded


@contextmanager
def own_handler(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals in the block, in this process and its main thread; not in children."""
    before = {number: signal.signal(number, handler) or signal.SIG_DFL for number in numbers}
    _INHERITED.handled_before.update(before)
    try:
        yield
    finally:
        for number, earlier in before.items():
            if _INHERITED.handled_before.pop(number, None) is not None:
                signal.signal(number, earlier)


def _replace(pipe: IO[bytes]) -> None:
    # Not closed: the object would close the number again, when it may be somebody else's.
    if pipe.closed:
        return
    nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nothing, pipe.fileno(), inheritable=False)
    os.close(nothing)


_INHERITED = _Inherited()
os.register_at_fork(
    before=_INHERITED.before_fork, after_in_parent=_INHERITED.in_parent, after_in_child=_INHERITED.let_go
)
