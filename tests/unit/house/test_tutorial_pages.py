"""The examples of tutorials and of further pages that need no Spark do what they say."""

from __future__ import annotations

import re

import pytest

from tests.support.pages import DOCS, check_page


@pytest.mark.parametrize(
    ("page", "at_least"),
    [
        ("tutorials/state-and-time.md", 6),
        ("migrate/stateful-spark.md", 1),
        ("migrate/flink-datastream.md", 1),
        ("errors.md", 1),
    ],
)
def test_the_examples_on_the_page_do_what_they_say(page: str, at_least: int) -> None:
    check_page(page, at_least=at_least)


def test_no_example_is_left_out() -> None:
    """An example that no test runs is a claim; each page with one is named in a test.

    Those on Spark are looked for by the test that runs them.
    """
    tests = DOCS.parent / "tests"
    files = [*(tests / "unit" / "house").glob("*.py"), *(tests / "integration").rglob("test_*.py")]
    named = "\n".join(file.read_text(encoding="utf-8") for file in files)
    pages = [page for page in DOCS.rglob("*.md") if re.search(r"^```pycon$", page.read_text("utf-8"), re.M)]
    assert len(pages) > 15
    assert [page.name for page in pages if page.relative_to(DOCS).as_posix() not in named] == []
