"""Puts switches into the calls that a process makes: store, files, functions that name a path, Spark.

Jobs are told apart by what they touch: everything of job ``x`` that is a file lies below
``<base>/x/``. Nothing of the product knows of this.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flinkish_spark.errors import StoreError
from flinkish_spark.runtime.steps import Step
from flinkish_spark.store import LocalStore
from tests.crash.sweep.points import Call, Effect, Fault, Layer, without_ids
from tests.crash.sweep.switch import Switch

OUTAGE = "the sweep lets this call fail"
#: Which argument names the file that a system call changes.
_FILE_EVENTS = {"os.link": 1, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.mkdir": 0, "os.truncate": 0}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
#: What threads look for all the time, asked by nobody; it would make every trace another one.
_BACKGROUND = ("requests", "orders", "orders/rewind.json")


class Jobs:
    """All jobs of this process, found by what they touch.

    Parameters
    ----------
    prefix
        How the names of system calls and statements begin, if they are made elsewhere than in the driver.
    """

    def __init__(self, base: Path, switches: Mapping[str, Switch], prefix: str = "") -> None:
        self.prefix = prefix
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
        return found[0].around(call, body, lambda: StoreError(f"cannot {name} {key}", why=OUTAGE, key=key))

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
        if found[0].on_file(f"{jobs.prefix}{event} {found[1]}", effect) is Fault.FAIL:
            raise OSError(5, OUTAGE, str(path))

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
