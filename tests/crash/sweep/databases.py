"""Puts switches into statements to databases.

Jobs are told apart by the database: by its file, or by its name, which begins with the job's.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from typing import Any

from tests.crash.sweep.files import OUTAGE, Jobs
from tests.crash.sweep.points import Call, Effect, Layer, without_ids
from tests.crash.sweep.switch import Switch


def hook_sqlite(jobs: Jobs) -> None:
    connect = sqlite3.connect

    def connected(database: Any, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        found = jobs.of_path(database)
        if found is not None and "factory" not in kwargs:
            kwargs["factory"] = functools.partial(_WatchedConnection, found[0], jobs.prefix)
        return connect(database, *args, **kwargs)

    sqlite3.connect = connected  # type: ignore[assignment]


class _WatchedConnection(sqlite3.Connection):
    def __init__(self, switch: Switch, prefix: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._switch, self._prefix = switch, prefix

    def cursor(self, *args: Any, **kwargs: Any) -> sqlite3.Cursor:
        return super().cursor(functools.partial(_WatchedCursor, self._switch, self._prefix))  # type: ignore[arg-type]

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        return self.cursor().execute(sql, *args)

    def executemany(self, sql: str, *args: Any) -> sqlite3.Cursor:
        return self.cursor().executemany(sql, *args)

    def commit(self) -> None:
        if not self.in_transaction:
            return
        _on_sql(self._switch, self._prefix, "COMMIT", super().commit)

    def __exit__(self, kind: Any, *error: Any) -> Any:
        # SQLite's own does not come by `commit`.
        if kind is not None:
            return super().__exit__(kind, *error)
        self.commit()
        return False


class _WatchedCursor(sqlite3.Cursor):
    def __init__(self, switch: Switch, prefix: str, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self._switch, self._prefix = switch, prefix

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        return _on_sql(self._switch, self._prefix, sql, functools.partial(super().execute, sql, *args))

    def executemany(self, sql: str, *args: Any) -> sqlite3.Cursor:
        return _on_sql(self._switch, self._prefix, sql, functools.partial(super().executemany, sql, *args))


def _on_sql(switch: Switch, prefix: str, sql: str, body: Callable[[], Any]) -> Any:
    call = sql_call(sql, f"{prefix}sqlite")
    return switch.around(call, body, lambda: sqlite3.OperationalError(OUTAGE))


def sql_call(sql: str, system: str) -> Call:
    """Return the call that a statement is: its first words, up to the first name of a table."""
    words = without_ids(" ".join(sql.split()))[:60]
    is_read = words.split(" ", 1)[0].upper() in ("SELECT", "PRAGMA", "SHOW", "")
    return Call(f"{system} {words}", Layer.SQL, Effect.READ if is_read else Effect.WRITE)


# -- PostgreSQL -------------------------------------------------------------------------------------
def hook_postgres(jobs: Jobs) -> None:
    """Watch what goes through psycopg's cursors; in a process that has psycopg."""
    import psycopg

    for name in ("execute", "executemany", "copy"):
        setattr(psycopg.Cursor, name, _cursor_method(jobs, getattr(psycopg.Cursor, name)))


def _cursor_method(jobs: Jobs, original: Callable[..., Any]) -> Callable[..., Any]:
    import psycopg

    @functools.wraps(original)
    def wrapped(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        found = jobs.of_database(str(self.connection.info.dbname))
        if found is None:
            return original(self, query, *args, **kwargs)

        def lost() -> BaseException:
            # Who loses an answer loses the connection, and the server ends what was open on it.
            self.connection.close()
            return psycopg.OperationalError(OUTAGE)

        call = sql_call(str(query), "postgres")
        return found.around(call, functools.partial(original, self, query, *args, **kwargs), lost)

    return wrapped
