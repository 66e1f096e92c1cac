"""`flinkish course`: writes the notebooks of the course into a folder."""

from __future__ import annotations

import re
import shlex
from importlib.resources import files
from pathlib import Path

import click

from flinkish_spark.cli.client import say
from flinkish_spark.core.extras import how_to_install

#: A link to a page of the documentation, which is not beside written notebooks. Its label is within a line.
_LINK = re.compile(r"\[([^]\"]*)\]\(\.\./(docs/[^)#]*)[^)]*\)")


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def course(folder: Path) -> None:
    """Write the notebooks of the course into DIR, one idea each.

    DIR is created if missing. Files that are there and differ are left alone, and then nothing is written.
    """
    lessons = read_course()
    changed = [
        name for name in lessons if (folder / name).exists() and not _has(folder / name, lessons[name])
    ]
    if changed:
        raise click.UsageError(f"{str(folder)!r} has another {changed[0]}; give a new directory.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in lessons.items():
        (folder / name).write_text(text, encoding="utf-8")
    notebooks = [name for name in lessons if name.endswith(".ipynb")]
    say(f"written: {len(notebooks)} notebooks, in {folder.absolute()}")
    say(f"libraries, once: {how_to_install('course')}")
    say(f"then: cd {shlex.quote(str(folder.absolute()))} && jupyter lab {notebooks[0]}")


def read_course() -> dict[str, str]:
    """Return the files of the course by name, in the order of its lessons."""
    found = [file for file in files(__package__).joinpath("lessons").iterdir() if file.is_file()]
    texts = {file.name: file.read_text(encoding="utf-8") for file in found}
    return {name: _LINK.sub(r"\1 (\2)", texts[name]) for name in sorted(texts)}


def _has(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()
