"""What commands take: job directories, targets of savepoints, and the options that several share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flinkish_spark.clock import Clock, SystemClock
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.store import LocalStore

if TYPE_CHECKING:
    from flinkish_spark.runtime.pins import CheckpointPins

F = TypeVar("F", bound=Callable[..., Any])
_LOCAL = "file://"
#: What a directory holds if there is a savepoint in it: `savepoints.files.METADATA_KEY`.
SAVEPOINT_FILE = "savepoint.json"


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


def _job(ctx: click.Context, param: click.Parameter, value: str) -> Job:
    """Return the job in a directory; raise BadParameter if there is none."""
    root = _absolute(value)
    if not root.is_dir():
        raise click.BadParameter(f"there is no directory {root}.")
    job_dir = JobDir(LocalStore(root))
    settings = job_dir.known_settings()
    if settings is None:
        raise click.BadParameter(f"there is no job in {root}: it has no job.json.")
    return Job(root, job_dir, str(settings.get("job", "")), JobUuid(settings["uuid"]), SystemClock())


def _target(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Return the path; raise BadParameter if something is in the way."""
    path = _absolute(value)
    if path.exists() and not path.is_dir():
        raise click.BadParameter(f"{path} is a file.")
    if (path / SAVEPOINT_FILE).exists():
        raise click.BadParameter(f"there is a savepoint in {path} already; give a new directory.")
    return str(path)


def _absolute(value: str) -> Path:
    text = value.removeprefix(_LOCAL)
    if "://" in text or not text or "\0" in text:
        raise click.BadParameter(f"{value!r} is not a path on this machine's file systems.")
    return Path(text).absolute()


def json_option(command: F) -> F:
    """Give a command `--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, for programs.")(
        command
    )


def timeout_option(command: F) -> F:
    """Give a command `--timeout-s`, as `timeout_s`."""
    return click.option(
        "--timeout-s",
        type=click.FloatRange(min=0, min_open=True),
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
    click.echo(explanation, err=True)
    if not yes:
        click.confirm(question, abort=True, err=True)
