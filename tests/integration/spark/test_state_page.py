"""The examples of docs/state.md that need Spark do what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "state.md"


def test_the_examples_on_the_page_do_what_they_say(spark, tmp_path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```pycon spark\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    # Classes travel to the workers, as those of a program that is run do.
    given = {"__name__": "__main__", "spark": spark, "folder": str(tmp_path)}
    example = doctest.DocTestParser().get_doctest("".join(blocks), given, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)
