"""The examples of pages in docs/ that need Spark do what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = sorted(
    page.relative_to(DOCS).as_posix()
    for page in DOCS.rglob("*.md")
    if "```pycon spark" in page.read_text("utf-8")
)
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("page", PAGES)
def test_the_jobs_of_the_page_do_what_it_says(spark, tmp_path, page) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```pycon spark\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    # Classes travel to the workers, as those of a program that is run do.
    given = {"__name__": "__main__", "spark": spark, "folder": str(tmp_path)}
    example = doctest.DocTestParser().get_doctest("".join(blocks), given, page, page, 0)
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)
