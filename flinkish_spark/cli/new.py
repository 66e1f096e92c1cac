"""`flinkish new`: a small project to begin with: a job, its test, a notebook, how to run it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from flinkish_spark.cli.client import say

#: Behind the names of Python files in the package, where they are data and no modules.
_AS_DATA = ".txt"


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def new(folder: Path) -> None:
    """Write a small project into DIR: a job, a test without Spark, a notebook, and how to run them.

    DIR is made if it is missing. One with files in it is refused.
    """
    write_project(folder)
    say(f"written: {folder.absolute()}; README.md in it says how to run it")


def write_project(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        raise click.UsageError(f"{str(folder)!r} has files in it; give a new directory.")
    folder.mkdir(parents=True, exist_ok=True)
    for file in files(__package__).joinpath("project").iterdir():
        # Nothing is overwritten, whoever else writes at this moment.
        with (folder / file.name.removesuffix(_AS_DATA)).open("x", encoding="utf-8") as written:
            written.write(file.read_text(encoding="utf-8"))
