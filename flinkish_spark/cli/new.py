"""`flinkish new`: creates a small project: a job, its test, a notebook, a README."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from flinkish_spark.cli.client import say

#: Suffix of the templates of Python files, so that they are data and not modules of the package.
_AS_DATA = ".txt"


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def new(folder: Path) -> None:
    """Create a small project in DIR: a job, a test without Spark, a notebook, and instructions.

    DIR is created if missing. It must be empty.
    """
    write_project(folder)
    say(f"written: {folder.absolute()}; README.md in it says how to run it")


def write_project(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        raise click.UsageError(f"{str(folder)!r} has files in it; give a new directory.")
    folder.mkdir(parents=True, exist_ok=True)
    for file in files(__package__).joinpath("project").iterdir():
        # Mode x overwrites nothing, even if another process writes at the same time.
        with (folder / file.name.removesuffix(_AS_DATA)).open("x", encoding="utf-8") as written:
            written.write(file.read_text(encoding="utf-8"))
