"""A real MariaDB server for tests of the MySQL dialect, out of Debian's package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.debian import unpack
from tests.support.local_server import HOST, LocalServer


def unpack_mariadb(into: Path) -> Path:
    """Fetch MariaDB from this machine's Debian into a directory; once.

    Raises
    ------
    PackagesMissing
        It cannot be fetched here.
    """
    return unpack(lambda apt: ["mariadb-server-core"], into)


class LocalMariaDb(LocalServer):
    """A MariaDB server with one empty database, ``test``.

    Parameters
    ----------
    programs_dir
        Where :func:`unpack_mariadb` has put it.
    start_timeout_s
        How long it may take to answer.
    """

    def __init__(self, programs_dir: Path, *, start_timeout_s: float = 60) -> None:
        super().__init__(programs_dir, "usr/sbin/mariadbd", start_timeout_s)

    @property
    def url(self) -> str:
        """JDBC URL of the database."""
        return f"jdbc:mysql://{HOST}:{self.port}/{self.database}"

    def connect(self) -> Any:
        """Return a PyMySQL connection in autocommit, as the server's owner."""
        import pymysql

        login = {"user": self.user, "password": self.password}
        return pymysql.connect(host=HOST, port=self.port, autocommit=True, connect_timeout=5, **login)

    @property
    def _share(self) -> Path:
        return self._programs / "usr/share/mysql"

    @property
    def _places(self) -> list[str]:
        return ["--no-defaults", f"--datadir={self._data}", f"--lc-messages-dir={self._share}"]

    def _initialise(self) -> None:
        self._data.mkdir()
        self._give_away(self._data)
        parts = ["mysql_system_tables.sql", "mysql_performance_tables.sql", "mysql_system_tables_data.sql"]
        text = "CREATE DATABASE mysql;\nUSE mysql;\n"
        text += "".join((self._share / part).read_text(encoding="utf-8") for part in parts)
        text += "DELETE FROM global_priv;\nFLUSH PRIVILEGES;\n"
        text += f"CREATE USER {self.user}@'%' IDENTIFIED BY '{self.password}';\n"
        text += f"GRANT ALL PRIVILEGES ON *.* TO {self.user}@'%' WITH GRANT OPTION;\n"
        script = self._private_file("first.sql", text)
        command = [str(self._main), *self._places, "--bootstrap", "--skip-networking"]
        with script.open("rb") as first:
            status = self._run(command, first).wait()
        script.unlink()
        if status != 0:
            raise self._did_not_start("its first tables could not be made")

    def _command(self) -> list[str]:
        # A server of tests may lose its data in a power cut, not when it is killed.
        settings = ["--innodb-flush-log-at-trx-commit=2", "--innodb-buffer-pool-size=32M"]
        place = [f"--bind-address={HOST}", f"--port={self.port}", f"--socket={self._folder / 'socket'}"]
        return [str(self._main), *self._places, *place, *settings, f"--pid-file={self._folder / 'pid'}"]

    def _make_database(self) -> bool:
        import pymysql

        try:
            with self.connect() as connection, connection.cursor() as cursor:
                cursor.execute(f"CREATE DATABASE IF NOT EXISTS {self.database} CHARACTER SET utf8mb4")
        except pymysql.OperationalError:
            return False
        return True
