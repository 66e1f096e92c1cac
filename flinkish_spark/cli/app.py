"""The tree of commands, and the handling of their errors."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, NoReturn

import click

from flinkish_spark.cli.adopt import adopt
from flinkish_spark.cli.audit import audit
from flinkish_spark.cli.checkpoints import checkpoints
from flinkish_spark.cli.client import ExitStatus, complain, describe_unexpected, one_line
from flinkish_spark.cli.course import course
from flinkish_spark.cli.dead_letters import replay_dead_letters
from flinkish_spark.cli.demo import demo
from flinkish_spark.cli.doctor import doctor
from flinkish_spark.cli.graph import graph
from flinkish_spark.cli.jars import jars
from flinkish_spark.cli.new import new
from flinkish_spark.cli.rewind import rewind, timeline
from flinkish_spark.cli.run import run
from flinkish_spark.cli.savepoints import cancel, savepoint
from flinkish_spark.cli.sql import sql
from flinkish_spark.cli.top import top
from flinkish_spark.cli.topics import topics
from flinkish_spark.cli.transactions import transactions
from flinkish_spark.cli.ui import ui
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.core.version import __version__

#: A group called without a command; up to click 8.1 that is no error.
_NO_WORDS: type[click.UsageError] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())


class _OneLineErrors(click.Group):
    """A group that prints errors of its commands as one line."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            _refuse(error)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; print any error as one line, without a traceback."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                _flush()
        except click.UsageError as error:
            _refuse(error)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except FlinkishError as error:
            complain(str(error))
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                # The reader of the output has closed the pipe; click handles that.
                raise
            complain(str(describe_unexpected(error)))
        ctx.exit(ExitStatus.NOT_DONE)


def _flush() -> None:
    """Flush the output while an error can still be reported."""
    try:
        sys.stdout.flush()
    except OSError:
        # The remaining output would fail again at the end of the interpreter, with another exit status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _refuse(error: click.UsageError) -> NoReturn:
    """Raise a usage error again as one line, since it quotes the words of the command."""
    if isinstance(error, _NO_WORDS):
        # Its text is the help.
        raise error from None
    raise click.UsageError(one_line(error.format_message()), error.ctx) from None


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flinkish")
def app() -> None:
    """Run a program, look at the checkpoints of a job, ask a running job, order a rewind.

    JOB_DIR is the job's directory, the job_dir of its environment. Commands that ask a running job
    reach it through that directory: they work wherever the directory can be written.

    Exit status: 0 done, 1 not done, 2 wrong usage, 3 nobody answered; of `run` the program's.
    """


for _command in (
    run,
    sql,
    checkpoints,
    savepoint,
    rewind,
    timeline,
    cancel,
    transactions,
    topics,
    replay_dead_letters,
    graph,
    audit,
    adopt,
    doctor,
    jars,
    ui,
    top,
    new,
    demo,
    course,
):
    app.add_command(_command)
