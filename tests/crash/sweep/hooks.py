"""Puts switches into the calls that a driver process makes: store, Delta, SQLite, files.

Jobs are told apart by what they touch: everything of job ``x`` that is a file lies below
``<base>/x/``. Nothing of the product knows of this.
"""

from __future__ import annotations

import functools
import inspect
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flinkish_spark.errors import StoreError
from flinkish_spark.runtime.steps import Step
from flinkish_spark.store import LocalStore
from tests.crash.sweep.points import Call, Effect, Fault, Layer, without_ids
from tests.crash.sweep.switch import Switch

_OUTAGE = "the sweep lets this call fail"
#: Which argument names the file that a system call changes.
_FILE_EVENTS = {"os.link": 1, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.mkdir": 0, "os.truncate": 0}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
#: What threads look for all the time, asked by nobody; it would make every trace another one.
_BACKGROUND = ("requests", "orders", "orders/rewind.json")


class Jobs:
    """All jobs of this process, found by what they touch."""

    def __init__(self, base: Path, switches: Mapping[str, Switch]) -> None:
        self._base = f"{base}{os.sep}"
        self.switches = switches

    def of_path(self, path: object) -> tuple[Switch, str] | None:
        """Return the job that a path belongs to, and the path below its directory without ids."""
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
        if not isinstance(text, str):
            return None
        text = text.removeprefix("file:")
        if not text.startswith(self._base):
            return None
        job, _, rest = text[len(self._base) :].partition(os.sep)
        switch = self.switches.get(job)
        return None if switch is None else (switch, without_ids(rest))


# -- the store of a job directory -------------------------------------------------------------------
_STORE = {
    "read": Effect.READ,
    "list": Effect.READ,
    "put": Effect.WRITE,
    "create_if_absent": Effect.WRITE,
    "delete": Effect.WRITE,
}


def hook_store(jobs: Jobs) -> None:
    for name, effect in _STORE.items():
        setattr(LocalStore, name, _store_method(jobs, name, effect))


def _store_method(jobs: Jobs, name: str, effect: Effect) -> Callable[..., Any]:
    original = getattr(LocalStore, name)

    @functools.wraps(original)
    def wrapped(self: LocalStore, key: str, *rest: Any) -> Any:
        found = jobs.of_path(f"{self.root}{os.sep}")
        if found is None or key in _BACKGROUND:
            return original(self, key, *rest)
        call = Call(f"store.{name} {without_ids(key)}", Layer.CALL, effect)
        body = functools.partial(original, self, key, *rest)
        return found[0].around(call, body, lambda: StoreError(f"cannot {name} {key}", why=_OUTAGE, key=key))

    return wrapped


# -- functions that name a path ---------------------------------------------------------------------
def hook_methods(
    jobs: Jobs, owner: type, prefix: str, writes: Iterable[str], error: Callable[[], BaseException]
) -> None:
    """Hook every public method of a class that has a parameter `path`.

    Parameters
    ----------
    writes
        How the names of those begin that change something.
    error
        What they raise when the system behind them is out.
    """
    beginnings = tuple(writes)
    for name, original in list(vars(owner).items()):
        if name.startswith("_") or not inspect.isfunction(original):
            continue
        signature = inspect.signature(original)
        if "path" in signature.parameters:
            effect = Effect.WRITE if name.startswith(beginnings) else Effect.READ
            setattr(owner, name, _path_method(jobs, original, f"{prefix}.{name}", effect, error))


def _path_method(
    jobs: Jobs, original: Callable[..., Any], name: str, effect: Effect, error: Callable[[], BaseException]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        found = jobs.of_path(signature.bind(*args, **kwargs).arguments.get("path"))
        body = functools.partial(original, *args, **kwargs)
        return body() if found is None else found[0].around(Call(name, Layer.CALL, effect), body, error)

    return wrapped


# -- system calls -----------------------------------------------------------------------------------
def hook_files(jobs: Jobs) -> None:
    """Look at all system calls that change files; an audit hook cannot be taken out again."""

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            if not (mode and set(mode) & set("wxa+")) and not (isinstance(flags, int) and flags & _WRITING):
                return
        elif event in _FILE_EVENTS:
            path = args[_FILE_EVENTS[event]]
        else:
            return
        found = jobs.of_path(path)
        if found is None:
            return
        effect = Effect.WRITE if _changes(event, path) else Effect.READ
        if found[0].on_file(f"{event} {found[1]}", effect) is Fault.FAIL:
            raise OSError(5, _OUTAGE, str(path))

    sys.addaudithook(audit)


def _changes(event: str, path: str) -> bool:
    """Return whether a system call will change anything, by what is there."""
    match event:
        case "os.mkdir":
            return not os.path.lexists(path)
        case "os.remove":
            return os.path.lexists(path)
        case "os.rmdir":
            return os.path.isdir(path) and not os.listdir(path)
        case _:
            return True


# -- SQLite -----------------------------------------------------------------------------------------
def hook_sqlite(jobs: Jobs) -> None:
    connect = sqlite3.connect

    def connected(database: Any, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        found = jobs.of_path(database)
        if found is not None and "factory" not in kwargs:
            kwargs["factory"] = functools.partial(_WatchedConnection, found[0])
        return connect(database, *args, **kwargs)

    sqlite3.connect = connected  # type: ignore[assignment]


class _WatchedConnection(sqlite3.Connection):
    def __init__(self, switch: Switch, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._switch = switch

    def cursor(self, *args: Any, **kwargs: Any) -> sqlite3.Cursor:
        return super().cursor(functools.partial(_WatchedCursor, self._switch))  # type: ignore[arg-type]

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        return self.cursor().execute(sql, *args)

    def executemany(self, sql: str, *args: Any) -> sqlite3.Cursor:
        return self.cursor().executemany(sql, *args)

    def commit(self) -> None:
        if not self.in_transaction:
            return
        _on_sql(self._switch, "COMMIT", super().commit)

    def __exit__(self, kind: Any, *error: Any) -> Any:
        # SQLite's own does not come by `commit`.
        if kind is not None:
            return super().__exit__(kind, *error)
        self.commit()
        return False


class _WatchedCursor(sqlite3.Cursor):
    def __init__(self, switch: Switch, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self._switch = switch

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        return _on_sql(self._switch, sql, functools.partial(super().execute, sql, *args))

    def executemany(self, sql: str, *args: Any) -> sqlite3.Cursor:
        return _on_sql(self._switch, sql, functools.partial(super().executemany, sql, *args))


def _on_sql(switch: Switch, sql: str, body: Callable[[], Any]) -> Any:
    call = sql_call(sql, "sqlite")
    return switch.around(call, body, lambda: sqlite3.OperationalError(_OUTAGE))


def sql_call(sql: str, system: str) -> Call:
    """Return the call that a statement is: its first words, up to the first name of a table."""
    words = without_ids(" ".join(sql.split()))[:60]
    is_read = words.split(" ", 1)[0].upper() in ("SELECT", "PRAGMA", "SHOW", "")
    return Call(f"{system} {words}", Layer.CALL, Effect.READ if is_read else Effect.WRITE)


# -- Spark ------------------------------------------------------------------------------------------
class SparkSteps:
    """An observer that lets a job be killed around Spark's own commit of a micro-batch."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def before(self, step: Step, subject: str) -> None:
        """Stop here if this is the point: foreachBatch is about to return."""
        if step is Step.SPARK_COMMIT:
            self._switch.passing(Call("spark.write commits/*", Layer.SPARK, Effect.WRITE))

    def after(self, step: Step, subject: str) -> None:
        """Stop here if this is the point: commits/N was read."""
        if step is Step.SPARK_COMMIT:
            self._switch.passing(Call("spark.wrote commits/*", Layer.SPARK, Effect.WRITE))
