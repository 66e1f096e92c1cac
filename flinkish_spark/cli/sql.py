"""`flinkish sql`: runs a script in Spark's SQL as one job, here or on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flinkish_spark.cli.run import become, launching_options


@click.command()
@launching_options
@click.option("--job-dir", metavar="DIR", help="The job's own directory: a path, or a URL.")
@click.option("--job", metavar="NAME", help="The name of the job; by default that of the script.")
@click.option("--checkpoint-interval", metavar="TIME", help='Such as "10 seconds", the default.')
@click.option(
    "--py",
    "python",
    metavar="FILE",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A Python file that is run first, with `spark`: to register functions.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
def sql(
    job_dir: str | None,
    job: str | None,
    checkpoint_interval: str | None,
    python: tuple[str, ...],
    script: str,
    **launching: Any,
) -> None:
    """Run a script: CREATE TABLE ... USING, CREATE TEMPORARY VIEW, INSERT INTO. docs/sql.md says more."""
    # Not imported: this process only launches the program.
    program = Path(__file__).parents[1] / "sql" / "program.py"
    files = [word for file in python for word in ("--py", file)]
    words = ["--job", job or "", "--job-dir", job_dir or ""]
    words += ["--checkpoint-interval", checkpoint_interval or "", *files, script]
    become([str(program), *words], **launching)
