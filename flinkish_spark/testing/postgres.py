"""A real PostgreSQL server on this machine, for tests: started, stopped, killed and paused as a test wants.

It listens on loopback only, asks for a password, and runs as an ordinary user: as whoever runs the test, or
as `nobody` if that is root, whom PostgreSQL refuses.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.testing.debian import Apt, library_path, unpack
from flinkish_spark.testing.watching import watch

_HOST = "127.0.0.1"
_NOBODY = 65534
_POLL_S = 0.05
#: A server of tests may lose its data in a power cut, not when it is killed.
_SETTINGS = {"fsync": "off", "unix_socket_directories": "", "jit": "off", "max_connections": "30"}


class PostgresDidNotStart(EnvironmentFault):
    """The server did not come up, or was never unpacked."""


def unpack_postgres(into: Path) -> Path:
    """Fetch the newest PostgreSQL that this machine's Debian has into a directory; once.

    Raises
    ------
    PackagesMissing
        It cannot be fetched here.
    """

    def choose(apt: Apt) -> Sequence[str]:
        return [apt.newest_version("postgresql-")]

    return unpack(choose, into)


class LocalPostgres:
    """A server with one empty database, ``test``.

    Parameters
    ----------
    programs_dir
        Where :func:`unpack_postgres` has put it.
    start_timeout_s
        How long it may take to answer.

    Examples
    --------
    >>> with LocalPostgres(Path("build/postgres")) as server:  # doctest: +SKIP
    ...     JdbcSink(server.url, "totals", user=server.user, password=server.password)
    """

    user = "flinkish"
    database = "test"

    def __init__(self, programs_dir: Path, *, start_timeout_s: float = 60) -> None:
        programs = programs_dir.resolve()
        found = sorted((programs / "usr/lib/postgresql").glob("*/bin/postgres"))
        if not found:
            raise PostgresDidNotStart(
                f"there is no PostgreSQL in {programs_dir}",
                what_to_do="run `make postgres`, which fetches it from Debian",
            )
        self.password = secrets.token_hex(16)
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._is_root = os.geteuid() == 0
        # A checkout, and pytest's directories, may be closed to others, and `nobody` is one.
        self._folder = Path(tempfile.mkdtemp(prefix="flinkish-postgres-"))
        self._programs = programs
        if self._is_root:
            os.chown(self._folder, _NOBODY, _NOBODY)
            if not _is_open_to_others(found[-1]):
                self._programs = self._folder / "programs"
                shutil.copytree(programs, self._programs, symlinks=True)
        self._bin = self._programs / found[-1].parent.relative_to(programs)
        self._data, self._log = self._folder / "data", self._folder / "log"
        self.port = _free_port()

    @property
    def url(self) -> str:
        """JDBC URL of the database."""
        return f"jdbc:postgresql://{_HOST}:{self.port}/{self.database}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise PostgresDidNotStart("the server does not run", what_to_do="start() it")
        return self._process.pid

    def connect(self, **settings: Any) -> Any:
        """Return a psycopg connection in autocommit, as the server's owner."""
        import psycopg

        place = {"host": _HOST, "port": self.port, "dbname": self.database}
        login = {"user": self.user, "password": self.password}
        return psycopg.connect(**{**place, **login, "autocommit": True, "connect_timeout": 5, **settings})

    def start(self) -> Self:
        """Start the server over what it had, or over a new database; returns when it answers.

        Raises
        ------
        PostgresDidNotStart
            With the end of its log.
        """
        if self._process is not None:
            return self
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
        settings = [f"--{name}={value}" for name, value in {**_SETTINGS, "port": self.port}.items()]
        self._process = self._run("postgres", "-D", str(self._data), "-h", _HOST, *[s for s in settings])
        self._watcher = watch(self._process.pid)
        try:
            self._await_answer(self._process)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """Shut down in order; connections are ended, transactions rolled back."""
        self._end(signal.SIGINT)

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
        self._end(signal.SIGQUIT)  # what would be written is deleted anyway
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------

    def _initialise(self) -> None:
        password = self._folder / "password"
        password.touch(mode=0o600)
        password.write_text(self.password)
        if self._is_root:
            os.chown(password, _NOBODY, _NOBODY)
        options = ["-D", str(self._data), "-U", self.user, "--pwfile", str(password), "--no-sync"]
        options += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        done = self._run("initdb", *options).wait()
        password.unlink()
        if done != 0:
            raise self._did_not_start("initdb failed")

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {"PATH": os.environ.get("PATH", ""), "LD_LIBRARY_PATH": library_path(self._programs)}
        as_nobody: dict[str, Any] = (
            {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if self._is_root else {}
        )
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [str(self._bin / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=environment,
                start_new_session=True,
                **as_nobody,
            )

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        import psycopg

        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise self._did_not_start(f"its process ended with status {process.returncode}")
            try:
                with self.connect(dbname="postgres") as connection:
                    if not connection.execute(
                        "SELECT 1 FROM pg_database WHERE datname = %s", (self.database,)
                    ).fetchall():
                        connection.execute(f"CREATE DATABASE {self.database}")
                    return
            except psycopg.OperationalError:
                time.sleep(_POLL_S)
        raise self._did_not_start(f"it did not answer within {self._start_timeout_s:g} s")

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if number is signal.SIGKILL:
            self._signal_all(number)
        else:
            self.resume()  # a frozen server cannot hear anything
            self._process.send_signal(number)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._signal_all(signal.SIGKILL)
            self._process.wait()
        self._process = None
        if self._watcher is not None:
            self._watcher.communicate(b"over\n")
            self._watcher = None

    def _signal_all(self, number: signal.Signals) -> None:
        """Signal the server and its children, which are in process groups of their own."""
        if self._process is None or self._process.poll() is not None:
            return
        # The parent first: frozen or dead, it starts no further children.
        parent = self._process.pid
        os.kill(parent, number)
        for pid in _children(parent):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _did_not_start(self, why: str) -> PostgresDidNotStart:
        tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        return PostgresDidNotStart("PostgreSQL did not start", why=f"{why}; its log ends: {' / '.join(tail)}")


def _children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = status.read_text()
        except OSError:
            continue
        # The second field is the name in parentheses, which may hold anything; the parent is the fourth.
        if int(text.rpartition(")")[2].split()[1]) == parent:
            found.append(int(status.parent.name))
    return found


def _is_open_to_others(program: Path) -> bool:
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in [program, *program.parents])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
