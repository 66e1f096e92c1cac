"""What anybody may have put into a directory, and what becomes of the errors that it causes.

A checksum says that an object is as it was written, and not who wrote it. Whatever is in a job
directory, the command line ends with a line and a status, never with a traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from flinkish_spark.errors import CorruptObjectError, EnvironmentFault, FlinkishError, InternalError

#: What taking a stored value apart raises if it has a shape that no job writes.
WRONG_SHAPE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
_PACKAGE = __package__.partition(".")[0]


@contextmanager
def as_damage(what: str) -> Iterator[None]:
    """Raise CorruptObjectError where reading `what` fails because of its shape.

    Examples
    --------
    >>> with as_damage("job.json"):
    ...     {}["uuid"]
    Traceback (most recent call last):
    flinkish_spark.errors.CorruptObjectError: job.json is damaged. because KeyError: 'uuid'. ...
    """
    try:
        yield
    except WRONG_SHAPE as error:
        raise CorruptObjectError(
            f"{what} is damaged",
            why=_in_words(error),
            what_to_do="restore the file from a backup",
        ) from error


def unforeseen(error: Exception) -> FlinkishError:
    """Return what to say of an error that nobody expected, with the place where it was raised."""
    if isinstance(error, OSError):
        return EnvironmentFault(
            "the command cannot go on",
            why=str(error),
            what_to_do="check the disk, and where the output goes to",
        )
    return InternalError(
        f"the command cannot go on: {_in_words(error)} in {_place_of(error.__traceback__)}",
        why="something that it read is not what a job writes, or this is a bug in flinkish_spark",
        what_to_do="restore the directory from a backup if somebody changed it, else report this line",
    )


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _place_of(traceback: TracebackType | None) -> str:
    """Return module and line of the innermost frame of this package: no paths, they are the user's."""
    place = "an unknown place"
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] == _PACKAGE:
            place = f"{module}, line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
