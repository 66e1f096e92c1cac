"""Saying what a job answered, and ending the command with its status."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import click

from flinkish_spark.cli.asking import Reply, ReplyKind
from flinkish_spark.cli.exits import complain, end_with, say


def print_json(value: Any) -> None:
    """Print the one document of a `--json`; in ASCII, so that no terminal and no encoding matters."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False))


def report(reply: Reply, asked: Mapping[str, Any], done: Callable[[Reply], str], as_json: bool) -> NoReturn:
    """Print a reply and end.

    Parameters
    ----------
    asked
        What was asked, for programs.
    done
        Returns what to say if it is done.
    """
    if as_json:
        print_json({**asked, **reply.to_json()})
    elif reply.kind is ReplyKind.COMPLETED:
        say(done(reply))
    else:
        complain(describe(reply))
    end_with(reply.kind.exit_status)


def describe(reply: Reply) -> str:
    """Return a reply that is not COMPLETED as one line.

    Examples
    --------
    >>> describe(Reply(ReplyKind.REFUSED, text="ask again"))
    'refused: ask again'
    """
    match reply.kind:
        case ReplyKind.REFUSED:
            what = "refused"
        case ReplyKind.ABORTED:
            what = f"checkpoint {reply.checkpoint} was aborted"
        case ReplyKind.SAVEPOINT_FAILED:
            what = f"checkpoint {reply.checkpoint} is complete, but its savepoint could not be written"
        case ReplyKind.LEFT_TO_NEXT_START:
            what = f"no answer about checkpoint {reply.checkpoint}"
        case _:
            what = "no answer"
    reason = "" if reply.reason is None else reply.reason.value
    text = reply.text or ("" if reply.reason is None else reply.reason.text)
    return f"{what}: {', '.join(filter(None, (reason, text)))}"
