"""Tables and times for people: drawn on a terminal, plain where the output goes elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flinkish_spark.cli.exits import one_line

#: Wide enough that a pipe gets one line per row.
_PIPE_WIDTH = 100_000
#: What a terminal shows where nothing is known.
UNKNOWN = "-"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under headings; columns of numbers are aligned to the right.

    On a terminal cells are wrapped to its width. Elsewhere a row is one line, columns are
    separated by blanks only, and nothing is coloured.
    """
    console = _console()
    is_terminal = console.is_terminal
    table = Table(
        box=SIMPLE_HEAD if is_terminal else None,
        pad_edge=False,
        show_edge=False,
        header_style="bold" if is_terminal else "",
    )
    for place, column in enumerate(columns):
        is_numeric = any(_is_number(row[place]) for row in rows)
        table.add_column(Text(column), justify="right" if is_numeric else "left", no_wrap=not is_terminal)
    for row in rows:
        # Text, not str: what comes from a job must not be read as rich's markup.
        table.add_row(*(Text(_shown(cell)) for cell in row))
    console.print(table)


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    """Print names and values, one a line."""
    width = max(len(name) for name, _ in facts)
    console = _console()
    for name, value in facts:
        console.print(Text(f"{name:<{width}}  {_shown(value)}"))


def print_line(text: str = "") -> None:
    """Print a line."""
    _console().print(Text(one_line(text)))


def local_time(wall_ms: int | None) -> str:
    """Return a wall-clock time for people, in the time zone of this machine."""
    if not wall_ms:
        return UNKNOWN
    try:
        return datetime.fromtimestamp(wall_ms / 1_000).astimezone().isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        # No clock says this; whatever wrote it, the rest may be worth seeing.
        return f"{wall_ms} ms"


def _console() -> Console:
    # Made anew each time: it looks up sys.stdout when it is made.
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH, color_system=None)


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _shown(cell: object) -> str:
    if cell is None or cell == "":
        return UNKNOWN
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.1f}" if isinstance(cell, float) else one_line(str(cell))
