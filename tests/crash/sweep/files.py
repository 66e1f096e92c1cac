"""Puts switches into system calls on files. Standard library only: every Python worker loads this.

Jobs are told apart by what they touch: everything of job ``x`` that is a file lies below ``<base>/x/``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tests.crash.sweep.points import Effect, Fault, without_ids
from tests.crash.sweep.switch import Switch

if TYPE_CHECKING:
    from flinkish_spark.core.store_spec import StoreSpec

OUTAGE = "the sweep lets this call fail"
#: Which argument names the file that a system call changes.
_FILE_EVENTS = {
    "os.link": 1,
    "os.rename": 1,
    "os.remove": 0,
    "os.rmdir": 0,
    "os.mkdir": 0,
    "os.truncate": 0,
    # What is in the folder is removed by names relative to it, which no job can be told by.
    "shutil.rmtree": 0,
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def database_of(job: str) -> str:
    """Return the name of a job's database on a server.

    >>> database_of("jdbc-postgres")
    'jdbc_postgres'
    """
    return job.replace("-", "_")


class Jobs:
    """All jobs of this process, found by what they touch.

    Parameters
    ----------
    prefix
        How the names of system calls and statements begin, if they are made elsewhere than in the driver.
    buckets
        The job directories in buckets, by job.
    """

    def __init__(
        self,
        base: Path,
        switches: Mapping[str, Switch],
        prefix: str = "",
        buckets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.prefix = prefix
        self._base = f"{base}{os.sep}"
        self._databases = {database_of(job): switch for job, switch in switches.items()}
        self._buckets = dict(buckets)
        self.switches = switches

    def of_database(self, name: str) -> Switch | None:
        """Return the job that a database of a server belongs to."""
        return self._databases.get(name)

    def of_url(self, url: str) -> Switch | None:
        """Return the job whose directory in a bucket a URL is, or is below of."""
        jobs = (job for job, own in self._buckets.items() if f"{url}/".startswith(f"{own}/"))
        return self.switches.get(next(jobs, ""))

    def of_place(self, place: StoreSpec) -> Switch | None:
        """Return the job whose directory a place is, or is below of."""
        if not place.is_local:
            return self.of_url(place.url)
        found = self.of_path(f"{place.folder}{os.sep}")
        return None if found is None else found[0]

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
        case "os.mkdir" | "os.link":
            return not os.path.lexists(path)
        case "os.remove" | "shutil.rmtree":
            return os.path.lexists(path)
        case "os.rmdir":
            return os.path.isdir(path) and not os.listdir(path)
        case _:
            return True
