"""What commands take: job directories, targets of savepoints, and the options that several share."""

from __future__ import annotations

import math
import os
import stat
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flinkish_spark.cli.damage import as_damage
from flinkish_spark.cli.exits import ExitStatus, complain, one_line
from flinkish_spark.clock import Clock, SystemClock
from flinkish_spark.errors import CorruptObjectError
from flinkish_spark.job_dir import JOB_KEY, JobDir
from flinkish_spark.protocol.ids import JobUuid, checked_name
from flinkish_spark.store import LocalStore

if TYPE_CHECKING:
    from flinkish_spark.runtime.pins import CheckpointPins

F = TypeVar("F", bound=Callable[..., Any])
_LOCAL = "file://"
#: What a directory holds if there is a savepoint in it: `savepoints.files.METADATA_KEY`.
SAVEPOINT_FILE = "savepoint.json"
#: A target with these cannot be written down, or does something to a terminal.
_UNUSABLE = ("Cc", "Cs")
#: 31 years; more cannot be waited for, and cannot be counted in milliseconds at some point.
_LONGEST_S = 1e9
#: No id is higher, and one of thousands of digits is no file's name.
_HIGHEST_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Job:
    """The job in a directory.

    Parameters
    ----------
    root
        The directory, absolute.
    job_dir
        Typed access to it.
    name, uuid
        Of the job.
    clock
        Of this command.
    """

    root: Path
    job_dir: JobDir
    name: str
    uuid: JobUuid
    clock: Clock

    def pins(self) -> CheckpointPins:
        """Return what is kept for checkpoints; only to be asked, never to be changed."""
        # Here and not above: with it comes Arrow, which most commands can do without.
        from flinkish_spark.runtime.pins import SparkPins
        from flinkish_spark.runtime.spark_log import SparkLog

        folder = f"spark/{self.job_dir.newest_owner()}"
        return SparkPins(SparkLog(self.job_dir.store, folder, self.root / folder), self.root)

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` says about it."""
        return {"job_dir": str(self.root), "job": self.name, "job_uuid": str(self.uuid)}


def job_argument(command: F) -> F:
    """Give a command its JOB_DIR, as `job`."""
    return click.argument("job", metavar="JOB_DIR", callback=_job)(command)


def target_argument(command: F) -> F:
    """Give a command the TARGET of a savepoint, as `target`: a path, absolute.

    The job has another current directory, so a relative one would mean something else to it.
    """
    return click.argument("target", metavar="TARGET", callback=_target)(command)


def directories_argument(command: F) -> F:
    """Give a command its DIR..., as `folders`: one or more directories that exist, absolute."""
    argument = click.argument("folders", metavar="DIR...", nargs=-1, required=True, callback=_directories)
    return argument(command)


def _directories(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(_directory(value) for value in values)


def _directory(value: str) -> Path:
    """Return the path; raise BadParameter if no directory is there."""
    path = _absolute(value)
    found = _found_at(path)
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise click.BadParameter(f"there is no directory {path}.")
    return path


def _job(ctx: click.Context, param: click.Parameter, value: str) -> Job:
    """Return the job in a directory; end with USAGE if there is none that can be read."""
    root = _directory(value)
    found = _found_at(root / JOB_KEY)
    if found is None:
        raise click.BadParameter(f"there is no job in {root}: it has no {JOB_KEY}.")
    if not stat.S_ISREG(found.st_mode):
        # A pipe would be waited for.
        raise click.BadParameter(f"there is no job in {root}: {JOB_KEY} is no file.")
    try:
        return _read_job(root)
    except CorruptObjectError as error:
        complain(f"{root} is no usable job directory: {error}")
        ctx.exit(ExitStatus.USAGE)


def _read_job(root: Path) -> Job:
    job_dir = JobDir(LocalStore(root))
    with as_damage(f"{JOB_KEY} in the job directory"):
        settings = job_dir.known_settings() or {}
        name = checked_name(settings["job"], "job name")
        return Job(root, job_dir, name, JobUuid(settings["uuid"]), SystemClock())


def _target(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Return the path; raise BadParameter if something is in the way."""
    path = _absolute(value)
    if any(unicodedata.category(letter) in _UNUSABLE for letter in value):
        raise click.BadParameter(f"there are control characters in {value!r}.")
    found = _found_at(path)
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise click.BadParameter(f"{path} is a file.")
    if found is not None and _found_at(path / SAVEPOINT_FILE) is not None:
        raise click.BadParameter(f"there is a savepoint in {path} already; give a new directory.")
    return str(path)


def _absolute(value: str) -> Path:
    text = value.removeprefix(_LOCAL)
    if "://" in text or not text or "\0" in text:
        raise click.BadParameter(f"{value!r} is not a path on this machine's file systems.")
    try:
        return Path(text).absolute()
    except OSError as error:
        raise click.BadParameter(f"{value!r} is meant from a directory that is gone: {error}.") from None


def _found_at(path: Path) -> os.stat_result | None:
    """Return what is there, behind links; None if nothing is; raise BadParameter if nobody can say."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise click.BadParameter(f"{str(path)!r} cannot be looked at: {why}.") from None


def checkpoint_argument(command: F) -> F:
    """Give a command the ID of a checkpoint, as `checkpoint`."""
    ids = click.IntRange(min=1, max=_HIGHEST_ID)
    return click.argument("checkpoint", metavar="ID", type=ids)(command)


def json_option(command: F) -> F:
    """Give a command `--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, for programs.")(
        command
    )


class _Seconds(click.FloatRange):
    """A range that nan is not in: it compares with nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; raise BadParameter if it is none or out of range."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


def timeout_option(command: F) -> F:
    """Give a command `--timeout-s`, as `timeout_s`."""
    return click.option(
        "--timeout-s",
        type=_Seconds(min=0, min_open=True, max=_LONGEST_S),
        default=600.0,
        show_default=True,
        help="How long to wait for the answer.",
    )(command)


def yes_option(command: F) -> F:
    """Give a command `--yes`, as `yes`."""
    return click.option("--yes", "-y", is_flag=True, help="Do not ask before it is done.")(command)


def confirm(explanation: str, question: str, yes: bool, as_json: bool) -> None:
    """Say on stderr what will happen, and ask; the command ends unless the answer is yes.

    Raises
    ------
    click.UsageError
        Nobody can be asked.
    click.Abort
        The answer is no.
    """
    if as_json and not yes:
        raise click.UsageError("with --json nobody is asked: add --yes.")
    for line in explanation.split("\n"):
        click.echo(one_line(line), err=True)
    if not yes:
        click.confirm(question, abort=True, err=True)
