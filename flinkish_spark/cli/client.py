"""Shared code of the commands: parameters, requests to a running job, tables, exit statuses, errors."""

from __future__ import annotations

import enum
import json
import math
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flinkish_spark.core.errors import (
    ConfigError,
    CorruptObjectError,
    EnvironmentFault,
    FlinkishError,
    InternalError,
    JobDirError,
    StoreError,
)
from flinkish_spark.core.job_dir import JOB_KEY, job_place, open_job_dir
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.asking import describe
from flinkish_spark.job.requests import Reply, ReplyKind
from flinkish_spark.job.stored_job import StoredJob
from flinkish_spark.protocol.micro_batches import SINKS

if TYPE_CHECKING:
    from flinkish_spark.connectors.kafka.client.connection import KafkaConnection


#: A line break with the blanks around it; other blanks may be part of a name.
_BREAK = re.compile(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
#: Maximum length of a line, since an error may quote an object of megabytes.
_LONGEST_ERROR = 4_000


class ExitStatus(enum.IntEnum):
    #: Done. A rewind of a job that does not run is done when it is ordered.
    DONE = 0
    #: Not done: the job refused it or failed, the directory cannot be read, or the user declined.
    NOT_DONE = 1
    #: Wrong usage: no such option, no readable job in that directory.
    USAGE = 2
    #: No answer: the job does not run, ended, or was busy for too long. After a timeout the request may still
    #: be carried out.
    NO_ANSWER = 3


def end_with(status: ExitStatus) -> NoReturn:
    click.get_current_context().exit(status)


def say(text: str) -> None:
    click.echo(one_line(text))


def complain(text: str) -> None:
    line = one_line(text)
    shown = line if len(line) <= _LONGEST_ERROR else f"{line[:_LONGEST_ERROR]}..."
    click.echo(f"flinkish: {shown}", err=True)


def one_line(text: str) -> str:
    r"""Return text as one line without control characters, since errors quote messages of other systems."""
    return "".join(c if c.isprintable() else "?" for c in _BREAK.sub(" ", text.strip()))


F = TypeVar("F", bound=Callable[..., Any])

config_option = click.option(
    "--command-config",
    "config",
    type=click.File("r", encoding="utf-8"),
    metavar="FILE",
    help="Properties with the security settings, as for Kafka's own tools.",
)


def brokers_options(command: F) -> F:
    """Add `--bootstrap-servers` and `--command-config` to a command, as `servers` and `config`."""
    what = "Where Kafka is; the job directory does not know it."
    servers = click.option(
        "--bootstrap-servers", "servers", required=True, metavar="HOST:PORT,...", help=what
    )
    return servers(config_option(command))


def connection_of(servers: str, config: Any) -> KafkaConnection:
    """Return the connection to the brokers; warn about other settings of the file and ignore them."""
    # Imported here, since most commands need no broker.
    from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
    from flinkish_spark.connectors.kafka.client.properties import KafkaProperties, parse_properties

    try:
        text = "" if config is None else config.read()
    except (UnicodeDecodeError, OSError) as error:
        raise click.BadParameter(f"the file of --command-config cannot be read: {error}.") from None
    try:
        given = KafkaProperties(parse_properties(text, "the file of --command-config"))
        used = given.options
        left = given.settings.keys() - used.keys() - {"bootstrap.servers"}
        if left:
            complain(f"left out of --command-config: {', '.join(sorted(left))}")
        return KafkaConnection(servers, used)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


#: Wide enough for one line per row in a pipe.
_PIPE_WIDTH = 100_000
#: The text for unknown values on a terminal.
UNKNOWN = "-"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under headings: wrapped and coloured on a terminal, one plain line a row elsewhere."""
    console = output_console()
    console.print(table_of(columns, rows, is_drawn=console.is_terminal))


def table_of(columns: Sequence[str], rows: Sequence[Sequence[object]], *, is_drawn: bool) -> Table:
    table = Table(
        box=SIMPLE_HEAD if is_drawn else None,
        pad_edge=False,
        show_edge=False,
        header_style="bold" if is_drawn else "",
    )
    for place, column in enumerate(columns):
        is_numeric = any(_is_number(row[place]) for row in rows)
        table.add_column(Text(column), justify="right" if is_numeric else "left", no_wrap=not is_drawn)
    for row in rows:
        # Text, not str: values of a job must not be parsed as rich's markup.
        table.add_row(*(Text(_format_cell(cell)) for cell in row))
    return table


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    width = max(len(name) for name, _ in facts)
    console = output_console()
    for name, value in facts:
        console.print(Text(f"{name:<{width}}  {_format_cell(value)}"))


def print_line(text: str = "") -> None:
    output_console().print(Text(one_line(text)))


def local_time(wall_ms: int | None) -> str:
    if not wall_ms:
        return UNKNOWN
    try:
        return datetime.fromtimestamp(wall_ms / 1_000).astimezone().isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        # No clock has this time; the rest of the output may still be useful.
        return f"{wall_ms} ms"


def output_console() -> Console:
    # Created for each call, since it reads sys.stdout when it is created.
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH, color_system=None)


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _format_cell(cell: object) -> str:
    if cell is None or cell == "":
        return UNKNOWN
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.1f}" if isinstance(cell, float) else one_line(str(cell))


_PACKAGE = __package__.partition(".")[0]


# Objects with a valid checksum may still have any content: a command ends with a message and a status, never
# with a traceback.
def describe_unexpected(error: Exception) -> FlinkishError:
    """Return the message for an unexpected error, with the place where it was raised."""
    if isinstance(error, OSError):
        return EnvironmentFault(
            "the command failed",
            why=str(error),
            what_to_do="check the disk, and where the output goes to",
        )
    return InternalError(
        f"the command failed: {type(error).__name__}: {error} in {_place_of(error.__traceback__)}",
        why="a file that it read was not written by a job, or this is a bug in flinkish_spark",
        what_to_do="restore the directory from a backup if somebody changed it, else report this line",
    )


def _place_of(traceback: TracebackType | None) -> str:
    """Return module and line of the innermost frame of this package, without paths of the user."""
    place = "an unknown place"
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] == _PACKAGE:
            place = f"{module}, line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


_LOCAL = "file://"
_STORE_OPTIONS = "flinkish.store-options"
#: The file that marks a savepoint directory: `savepoints.files.METADATA_KEY`.
SAVEPOINT_FILE = "savepoint.json"
#: Characters that cannot be stored in a target, or control a terminal.
_UNUSABLE = ("Cc", "Cs")
#: 31 years; much larger values overflow as milliseconds.
_LONGEST_S = 1e9
#: The highest checkpoint id; one with thousands of digits is no valid file name.
_HIGHEST_ID = 2**63 - 1


def store_options() -> dict[str, str]:
    given: dict[str, str] = click.get_current_context().meta.get(_STORE_OPTIONS, {})
    return given


def _keep_store_options(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> None:
    pairs = [value.partition("=") for value in values]
    wrong = next((name for name, mark, _ in pairs if not mark or not name), None)
    if wrong is not None:
        raise click.BadParameter(f"{wrong!r} is not NAME=VALUE.")
    ctx.meta[_STORE_OPTIONS] = {name: value for name, _, value in pairs}


def _directory(value: str) -> Path:
    path = absolute_path(value)
    found = _stat(path)
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise click.BadParameter(f"there is no directory {path}.")
    return path


def _job(ctx: click.Context, param: click.Parameter, value: str) -> StoredJob:
    """Return the job in a directory; end the command with USAGE if there is no readable one."""
    if "://" in value.removeprefix(_LOCAL):
        return _job_in_bucket(ctx, value)
    root = _directory(value)
    if _stat(root / JOB_KEY) is None and _stat(root / SINKS / JOB_KEY) is not None:
        # The checkpoint of a plain query.
        root /= SINKS
    found = _stat(root / JOB_KEY)
    if found is None:
        raise click.BadParameter(f"there is no job in {root}: it has no {JOB_KEY}.")
    if not stat.S_ISREG(found.st_mode):
        # Reading a named pipe would block.
        raise click.BadParameter(f"there is no job in {root}: {JOB_KEY} is no file.")
    try:
        return StoredJob.read(StoreSpec(str(root)))
    except CorruptObjectError as error:
        complain(f"{root} is no usable job directory: {error}")
        ctx.exit(ExitStatus.USAGE)


def refuse_plain_query(job: StoredJob) -> None:
    """End the command if the directory is that of a plain query's sinks."""
    if job.is_plain_query:
        complain(
            f"{job.place.url} belongs to a plain Spark query, which takes no orders. Its next start finishes "
            "what is decided, and aborts all else; lost rows are settled by flinkish_spark.settle()"
        )
        end_with(ExitStatus.USAGE)


def _job_in_bucket(ctx: click.Context, value: str) -> StoredJob:
    try:
        place = job_place(value, store_options())
        if open_job_dir(place).find_settings() is None:
            place = place.to_child(SINKS)
        if open_job_dir(place).find_settings() is None:
            raise click.BadParameter(f"there is no job in {place.url}: it has no {JOB_KEY}.")
        return StoredJob.read(place)
    except (ConfigError, StoreError, CorruptObjectError, JobDirError) as error:
        complain(f"{value} is no usable job directory: {error}")
        ctx.exit(ExitStatus.USAGE)


def _target(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Return the path; raise BadParameter if the savepoint cannot be written there."""
    if "://" in value.removeprefix(_LOCAL):
        try:
            # The job, which has the bucket's options, checks whether it can be written.
            return StoreSpec.parse(value).url
        except ConfigError as error:
            raise click.BadParameter(str(error)) from None
    path = absolute_path(value)
    if any(unicodedata.category(letter) in _UNUSABLE for letter in value):
        raise click.BadParameter(f"there are control characters in {value!r}.")
    found = _stat(path)
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise click.BadParameter(f"{path} is a file.")
    if found is not None and _stat(path / SAVEPOINT_FILE) is not None:
        raise click.BadParameter(f"there is a savepoint in {path} already; give a new directory.")
    return str(path)


def absolute_path(value: str) -> Path:
    text = value.removeprefix(_LOCAL)
    if "://" in text or not text or "\0" in text:
        raise click.BadParameter(f"{value!r} is not a path on this machine's file systems.")
    try:
        return Path(text).absolute()
    except OSError as error:
        raise click.BadParameter(
            f"{value!r} is a relative path, and the current directory is gone: {error}."
        ) from None


def _stat(path: Path) -> os.stat_result | None:
    """Return the file's status, following links; None if it is missing; raise BadParameter on errors."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise click.BadParameter(f"{str(path)!r} cannot be accessed: {why}.") from None


class Seconds(click.FloatRange):
    """A range without NaN, which compares with nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


store_option = click.option(
    "--store-option",
    metavar="NAME=VALUE",
    multiple=True,
    is_eager=True,
    expose_value=False,
    callback=_keep_store_options,
    help="Of the bucket that the job directory is in; secrets as NAME=env:VARIABLE.",
)
#: The TARGET of a savepoint, as an absolute path for the job's process.
target_argument = click.argument("target", metavar="TARGET", callback=_target)
directories_argument = click.argument(
    "folders",
    metavar="DIR...",
    nargs=-1,
    required=True,
    callback=lambda ctx, param, values: tuple(map(_directory, values)),
)
checkpoint_argument = click.argument("checkpoint", metavar="ID", type=click.IntRange(min=1, max=_HIGHEST_ID))
json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on stdout, for programs."
)
timeout_option = click.option(
    "--timeout-s",
    type=Seconds(min=0, min_open=True, max=_LONGEST_S),
    default=600.0,
    show_default=True,
    help="How long to wait for the answer.",
)
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask before it is done.")


def job_argument(command: F) -> F:
    return store_option(click.argument("job", metavar="JOB_DIR", callback=_job)(command))


def confirm(explanation: str, question: str, yes: bool, as_json: bool) -> None:
    """Print the consequences on stderr and ask; end the command unless the answer is yes."""
    if as_json and not yes:
        raise click.UsageError("--json does not ask for confirmation: add --yes.")
    for line in explanation.split("\n"):
        click.echo(one_line(line), err=True)
    if not yes:
        click.confirm(question, abort=True, err=True)


#: Exit status by the kind of reply.
EXIT_STATUS = {
    ReplyKind.COMPLETED: ExitStatus.DONE,
    ReplyKind.REFUSED: ExitStatus.NOT_DONE,
    ReplyKind.ABORTED: ExitStatus.NOT_DONE,
    ReplyKind.SAVEPOINT_FAILED: ExitStatus.NOT_DONE,
    ReplyKind.LEFT_TO_NEXT_START: ExitStatus.NO_ANSWER,
    ReplyKind.UNKNOWN: ExitStatus.NO_ANSWER,
    ReplyKind.NOT_TAKEN: ExitStatus.NO_ANSWER,
    ReplyKind.NOT_ANSWERED: ExitStatus.NO_ANSWER,
}


def print_json(value: Any) -> None:
    # ASCII works with every encoding of a terminal.
    click.echo(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False))


def report(reply: Reply, asked: Mapping[str, Any], done: Callable[[Reply], str], as_json: bool) -> NoReturn:
    if as_json:
        print_json({**asked, **reply.to_json()})
    elif reply.kind is ReplyKind.COMPLETED:
        say(done(reply))
    else:
        complain(describe(reply))
    end_with(EXIT_STATUS[reply.kind])
