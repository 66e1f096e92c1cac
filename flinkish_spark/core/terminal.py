"""Terminals, and lines on them that are overwritten."""

from __future__ import annotations

import os
import sys
from typing import TextIO

#: Returns to the beginning of the terminal's line and clears it.
CLEAR_LINE = "\r\x1b[K"


def can_show(out: TextIO) -> bool:
    """Return True if a line can be overwritten: on a terminal, but not in a notebook or file."""
    try:
        return out.isatty() and os.environ.get("TERM", "") not in ("", "dumb") and not is_notebook()
    except ValueError:
        # It is closed.
        return False


def is_notebook() -> bool:
    return "ipykernel" in sys.modules
