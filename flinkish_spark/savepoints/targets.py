"""Where a savepoint can be written: looked at before the request for it gets a checkpoint id."""

from __future__ import annotations

import os
import unicodedata
import uuid
from collections.abc import Callable
from pathlib import Path

from flinkish_spark.errors import FlinkishError
from flinkish_spark.savepoints.errors import SavepointFailed
from flinkish_spark.savepoints.files import METADATA_KEY, SavepointDir

#: Of a path and of one name in it, in bytes, with room for ``/state/<uid>/<name>.parquet`` behind it.
_LONGEST_PATH = 3_500
_LONGEST_NAME = 255
_ELSEWHERE = "give another directory"


def why_no_savepoint_at(target: str, job_root: Path) -> str:
    """Return why no savepoint can be written to a directory, and what to do; empty if it can.

    Makes the directory if it can be one: that is the only way to know. Whatever `target` is, the
    answer is text. It holds for the moment; the export looks again.

    Parameters
    ----------
    target
        What somebody asked for.
    job_root
        The job directory, absolute.
    """
    try:
        check_target(target, lambda path: check_outside(path, job_root))
    except FlinkishError as error:
        return str(error)
    return ""


def check_target(target: str, check_place: Callable[[Path], None] = lambda path: None) -> None:
    """Refuse a directory to which no savepoint can be written; makes it if it can be one.

    Parameters
    ----------
    check_place
        What else is to be refused, before anything is made.

    Raises
    ------
    SavepointFailed
        With the reason.
    """
    try:
        _check_text(target)
        path = Path(target)
        check_place(path)
        _check_free(path)
        SavepointDir(path).prepare()
        _try_to_write(path)
    except FlinkishError:
        raise
    except (OSError, ValueError) as error:
        raise _refused(target, str(error), "check that this user may write it, or " + _ELSEWHERE) from error


def check_apart(target: Path, origin: Path) -> None:
    """Refuse a target that is, or is in or around, the savepoint that a new one is made of.

    Raises
    ------
    SavepointFailed
        The old one would be changed.
    """
    place, root = Path(os.path.realpath(target)), Path(os.path.realpath(origin))
    if _is_within(place, root) or _is_within(root, place):
        raise _refused(
            str(target), f"it and the savepoint {origin}, of which it is made, are in each other", _ELSEWHERE
        )


def check_outside(target: Path, job_root: Path) -> None:
    """Refuse a target in the job directory or around it, by whatever links it is reached.

    Raises
    ------
    SavepointFailed
        One of them would be deleted with the other.
    """
    # Not Path.resolve, which raises where links lead in a circle.
    place, root = Path(os.path.realpath(target)), Path(os.path.realpath(job_root))
    if _is_within(place, root):
        raise _refused(
            str(target),
            f"it is in the job directory {root}, and a savepoint outlives that",
            "give a directory outside of it",
        )
    if _is_within(root, place):
        raise _refused(str(target), f"the job directory {root} is in it", "give a directory of its own")


def _is_within(path: Path, folder: Path) -> bool:
    """Whether a resolved path is a resolved folder or below it; one directory can have two names."""
    if path.is_relative_to(folder):
        return True
    try:
        known = folder.stat()
    except OSError:
        return False
    return any(_is_same(part, known) for part in (path, *path.parents))


def _is_same(path: Path, known: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), known)
    except OSError:
        return False


def _check_text(target: str) -> None:
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in target):
        raise _refused(target, "there are control characters in it", "give a path of printable characters")
    if not target.startswith("/"):
        raise _refused(
            target,
            "half of the code runs in other processes, with other working directories",
            "give an absolute path",
        )
    longest = max(len(name.encode()) for name in target.split("/"))
    if len(target.encode()) > _LONGEST_PATH or longest > _LONGEST_NAME:
        raise _refused(
            target,
            f"it is too long: a path has room for {_LONGEST_PATH:,} bytes, a name in it for {_LONGEST_NAME}",
            "give a shorter path",
        )


def _check_free(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise _refused(str(path), "it is a file", "give a directory of its own, which may be new")
    if not os.path.lexists(path / METADATA_KEY):
        return
    try:
        known = SavepointDir(path).metadata()
        what = f"checkpoint {known.checkpoint} of job '{known.job}'"
    except FlinkishError:
        what = "one that cannot be read"
    raise _refused(str(path), f"another savepoint is there: {what}", _ELSEWHERE)


def _try_to_write(path: Path) -> None:
    # Named as a file of the store's that a crash left: a later export puts up with it.
    probe = path / f".{METADATA_KEY}.{uuid.uuid4().hex}.tmp"
    try:
        with open(probe, "xb") as file:
            file.write(b"?")
    finally:
        probe.unlink(missing_ok=True)


def _refused(target: str, why: str, what_to_do: str) -> SavepointFailed:
    # It may be anything: shown in quotes, and not longer than a line or two.
    shown = repr(target if len(target) <= 200 else f"{target[:200]}...")
    return SavepointFailed(f"no savepoint can be written to {shown}", why=why, what_to_do=what_to_do)
