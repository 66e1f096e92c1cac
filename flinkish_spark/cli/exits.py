"""With which status `flinkish` ends, so that scripts need not read its text."""

from __future__ import annotations

import enum
from typing import NoReturn

import click


class ExitStatus(enum.IntEnum):
    """The exit statuses; part of the interface."""

    #: It is done. A rewind of a job that does not run is done when it is ordered.
    DONE = 0
    #: It is not: the job refused or failed it, the directory cannot be read, or you said no.
    NOT_DONE = 1
    #: The command cannot be understood: no such option, no job in that directory.
    USAGE = 2
    #: Nobody answered: the job does not run, or ended or was busy for too long. After a timeout it
    #: may still happen.
    NO_ANSWER = 3


def end_with(status: ExitStatus) -> NoReturn:
    """End the command; its output is complete."""
    click.get_current_context().exit(status)


def complain(text: str) -> None:
    """Say one line on stderr."""
    click.echo(f"flinkish: {one_line(text)}", err=True)


def one_line(text: str) -> str:
    r"""Return text as one line without control characters: jobs put messages of others into theirs.

    Examples
    --------
    >>> one_line("no\n  room\x1b[2J")
    'no room?[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
