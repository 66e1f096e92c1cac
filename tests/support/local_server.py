"""A real database server on this machine, for tests: started, stopped, killed and paused as a test wants.

It listens on loopback only, asks for a password, and runs as an ordinary user: as whoever runs the test, or
as `nobody` if that is root. Its data goes when it is closed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.testing.broker import watch
from tests.support.debian import library_path

HOST = "127.0.0.1"
_NOBODY = 65534
_POLL_S = 0.05
_STOP_TIMEOUT_S = 30


class ServerDidNotStart(EnvironmentFault):
    """A database server of a test did not come up, or was never unpacked."""


class LocalServer(ABC):
    """A server whose programs were unpacked from Debian's packages.

    Parameters
    ----------
    programs_dir
        Where they are.
    main_program
        The server's program below it, as a glob.
    start_timeout_s
        How long it may take to answer.
    """

    user = "flinkish"
    database = "test"
    #: Signals by which it shuts down in order, and at once without a mess.
    _stop_signal, _quit_signal = signal.SIGTERM, signal.SIGKILL

    def __init__(self, programs_dir: Path, main_program: str, start_timeout_s: float) -> None:
        programs = programs_dir.resolve()
        found = sorted(programs.glob(main_program))
        if not found:
            raise ServerDidNotStart(
                f"there is no {main_program} in {programs_dir}",
                what_to_do="unpack it first: flinkish_spark.testing has a function for each server",
            )
        self.password = secrets.token_hex(16)
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._is_root = os.geteuid() == 0
        # A checkout, and pytest's directories, may be closed to others, and `nobody` is one.
        self._folder = Path(tempfile.mkdtemp(prefix="flinkish-server-"))
        self._programs = programs
        self._give_away(self._folder)
        if self._is_root and not _is_open_to_others(found[-1]):
            self._programs = self._folder / "programs"
            shutil.copytree(programs, self._programs, symlinks=True)
        self._main = self._programs / found[-1].relative_to(programs)
        self._data, self._log = self._folder / "data", self._folder / "log"
        self.port = _free_port()

    @property
    @abstractmethod
    def url(self) -> str:
        """JDBC URL of the database."""

    @abstractmethod
    def _initialise(self) -> None:
        """Make the data directory; raise ServerDidNotStart if that fails."""

    @abstractmethod
    def _command(self) -> list[str]:
        """Return how the server is started over its data."""

    @abstractmethod
    def _make_database(self) -> bool:
        """Make the database if it is missing; return False if the server does not answer yet."""

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise ServerDidNotStart("the server does not run", what_to_do="start() it")
        return self._process.pid

    def start(self) -> Self:
        """Start the server over what it had, or over a new database; returns when it answers.

        Raises
        ------
        ServerDidNotStart
            With the end of its log.
        """
        if self._process is not None:
            return self
        if not self._data.exists():
            self._initialise()
        self._process = self._run(self._command())
        self._watcher = watch(self._process.pid)
        try:
            self._await_answer(self._process)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """Shut down in order; connections are ended, transactions rolled back."""
        self._end(self._stop_signal)

    def kill(self) -> None:
        """Kill every process of the server; what was committed comes back with the next start."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze every process of the server: connections stay open, nothing is answered."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen server go on."""
        self._signal_all(signal.SIGCONT)

    def close(self) -> None:
        """Stop and delete everything."""
        self._end(self._quit_signal)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------

    def _private_file(self, name: str, text: str) -> Path:
        """Write a file that only the server's user can read."""
        path = self._folder / name
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
        self._give_away(path)
        return path

    def _give_away(self, path: Path) -> None:
        """Make something the server's own."""
        if self._is_root:
            os.chown(path, _NOBODY, _NOBODY)

    def _run(self, command: list[str], standard_input: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        environment = {"PATH": os.environ.get("PATH", ""), "LD_LIBRARY_PATH": library_path(self._programs)}
        as_nobody: dict[str, Any] = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if standard_input is None else standard_input,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=environment,
                start_new_session=True,
                **(as_nobody if self._is_root else {}),
            )

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise self._did_not_start(f"its process ended with status {process.returncode}")
            if self._make_database():
                return
            time.sleep(_POLL_S)
        raise self._did_not_start(f"it did not answer within {self._start_timeout_s:g} s")

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        children: set[int] = set()
        if number is signal.SIGKILL:
            children = self._signal_all(number)
        else:
            self.resume()  # a frozen server cannot hear anything
            self._process.send_signal(number)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            children |= self._signal_all(signal.SIGKILL)
            self._process.wait()
        # What is left of a server keeps the next one over its data from starting.
        _await_end(children)
        self._process = None
        if self._watcher is not None:
            self._watcher.communicate(b"over\n")
            self._watcher = None

    def _signal_all(self, number: signal.Signals) -> set[int]:
        """Signal the server and its children, which are in process groups of their own; return those."""
        if self._process is None or self._process.poll() is not None:
            return set()
        parent = self._process.pid
        # Those of a dead parent are no longer called its.
        children = set(_children(parent))
        # The parent first: frozen or dead, it starts no further children.
        os.kill(parent, number)
        children.update(_children(parent))
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return children

    def _did_not_start(self, why: str) -> ServerDidNotStart:
        tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        return ServerDidNotStart(
            f"{self._main.name} did not start", why=f"{why}; its log ends: {' / '.join(tail)}"
        )


def _children(parent: int) -> list[int]:
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if (stat := _state_and_parent(pid)) is not None and stat[1] == parent]


def _await_end(pids: set[int]) -> None:
    """Wait until processes that were killed have ended; whoever is to collect them may take its time."""
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while time.monotonic() < deadline and any(map(_is_running, pids)):
        time.sleep(_POLL_S)


def _is_running(pid: int) -> bool:
    stat = _state_and_parent(pid)
    return stat is not None and stat[0] not in "ZX"


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    """Return a process's state, as in `man proc`, and its parent; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the name in parentheses, which may hold anything.
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


def _is_open_to_others(program: Path) -> bool:
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in [program, *program.parents])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
