"""With which status `flinkish` ends, so that scripts need not read its text."""

from __future__ import annotations

import enum
import re
from typing import NoReturn

import click

#: A line break with the blanks around it; blanks elsewhere may be part of a name.
_BREAK = re.compile(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
#: What a line says at most: an object may hold megabytes, and an error quotes it.
_LONGEST_ERROR = 4_000


class ExitStatus(enum.IntEnum):
    """The exit statuses; part of the interface."""

    #: It is done. A rewind of a job that does not run is done when it is ordered.
    DONE = 0
    #: It is not: the job refused or failed it, the directory cannot be read, or you said no.
    NOT_DONE = 1
    #: The command cannot be understood: no such option, no readable job in that directory.
    USAGE = 2
    #: Nobody answered: the job does not run, or ended or was busy for too long. After a timeout it
    #: may still happen.
    NO_ANSWER = 3


def end_with(status: ExitStatus) -> NoReturn:
    """End the command; its output is complete."""
    click.get_current_context().exit(status)


def say(text: str) -> None:
    """Say one line on stdout."""
    click.echo(one_line(text))


def complain(text: str) -> None:
    """Say one line on stderr."""
    line = one_line(text)
    shown = line if len(line) <= _LONGEST_ERROR else f"{line[:_LONGEST_ERROR]}..."
    click.echo(f"flinkish: {shown}", err=True)


def one_line(text: str) -> str:
    r"""Return text as one line without control characters: jobs put messages of others into theirs.

    Examples
    --------
    >>> one_line("no\n  room\x1b[2J")
    'no room?[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in _BREAK.sub(" ", text.strip()))
