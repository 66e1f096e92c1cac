"""A real PostgreSQL server for tests, out of Debian's package."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.debian import Apt, unpack
from tests.support.local_server import HOST, LocalServer

#: A server of tests may lose its data in a power cut, not when it is killed.
_SETTINGS = {
    **{"fsync": "off", "unix_socket_directories": "", "jit": "off", "max_connections": "30"},
    # Changes can be read from it; see postgres_changes.py.
    "wal_level": "logical",
}


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


class LocalPostgres(LocalServer):
    """A PostgreSQL server with one empty database, ``test``.

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

    _stop_signal, _quit_signal = signal.SIGINT, signal.SIGQUIT

    def __init__(self, programs_dir: Path, *, start_timeout_s: float = 60) -> None:
        super().__init__(programs_dir, "usr/lib/postgresql/*/bin/postgres", start_timeout_s)

    @property
    def url(self) -> str:
        """JDBC URL of the database."""
        return f"jdbc:postgresql://{HOST}:{self.port}/{self.database}"

    def connect(self, **settings: Any) -> Any:
        """Return a psycopg connection in autocommit, as the server's owner."""
        import psycopg

        place = {"host": HOST, "port": self.port, "dbname": self.database}
        login = {"user": self.user, "password": self.password}
        return psycopg.connect(**{**place, **login, "autocommit": True, "connect_timeout": 5, **settings})

    def _initialise(self) -> None:
        password = self._private_file("password", self.password)
        program = str(self._main.with_name("initdb"))
        options = ["-D", str(self._data), "-U", self.user, "--pwfile", str(password), "--no-sync"]
        options += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        status = self._run([program, *options]).wait()
        password.unlink()
        if status != 0:
            raise self._did_not_start("initdb failed")

    def _command(self) -> list[str]:
        settings = [f"--{name}={value}" for name, value in {**_SETTINGS, "port": str(self.port)}.items()]
        return [str(self._main), "-D", str(self._data), "-h", HOST, *settings]

    def _make_database(self) -> bool:
        import psycopg

        try:
            with self.connect(dbname="postgres") as connection:
                asked = "SELECT 1 FROM pg_database WHERE datname = %s"
                if not connection.execute(asked, (self.database,)).fetchall():
                    connection.execute(f"CREATE DATABASE {self.database}")
        except psycopg.OperationalError:
            return False
        return True
