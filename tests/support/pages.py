"""Runs the examples of the pages in docs/, one after the other in one interpreter, as a reader types them."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(r"^```pycon\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks_of(page: str) -> list[str]:
    """Return the examples of a page that need no Spark."""
    return _BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def check_page(page: str, *, at_least: int, flags: int = 0, given: dict[str, Any] | None = None) -> None:
    """Fail with what they print if the examples do not do what they say, or are fewer than that."""
    blocks = blocks_of(page)
    assert len(blocks) >= at_least
    example = doctest.DocTestParser().get_doctest("".join(blocks), given or {}, page, str(DOCS / page), 0)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=flags)
    assert runner.run(example, out=said.append).failed == 0, "".join(said)
