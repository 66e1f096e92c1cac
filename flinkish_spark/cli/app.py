"""The commands as one tree, and what happens to their errors."""

from __future__ import annotations

from typing import Any

import click

from flinkish_spark.cli.checkpoints import checkpoints
from flinkish_spark.cli.exits import ExitStatus, complain
from flinkish_spark.cli.jobs import cancel
from flinkish_spark.cli.rewind import rewind
from flinkish_spark.cli.savepoints import savepoint
from flinkish_spark.errors import FlinkishError
from flinkish_spark.version import __version__


class _OneLineErrors(click.Group):
    """A group whose commands end with one line where they would raise."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours is its message, without a traceback."""
        try:
            return super().invoke(ctx)
        except FlinkishError as error:
            complain(str(error))
            ctx.exit(ExitStatus.NOT_DONE)


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flinkish")
def app() -> None:
    """Look at the checkpoints of a flinkish_spark job, ask a running job, order a rewind.

    JOB_DIR is the job's directory, the job_dir of its environment. Commands that ask a running job
    reach it through that directory: they work wherever the directory can be written.

    Exit status: 0 done, 1 not done, 2 wrong usage, 3 nobody answered.
    """


for _command in (checkpoints, savepoint, rewind, cancel):
    app.add_command(_command)
